"""The engine: a registry of rules, and `find`, which runs them on a step.

A rule yields a `Waste` for each place. The engine merges what they claim by line into findings, and ranks these by what
each saves alone. Where the host and the device were recorded, that is what a replay of both without the claims gives;
else it is the sum of the claims. What findings save together is less where they shorten the same ops.
"""

from __future__ import annotations

import dataclasses
import re
import runpy
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nearpeak.errors import NearpeakError, UsageError, did_you_mean, message_of
from nearpeak.findings.replay import Cause, Change, StepReplay, combine
from nearpeak.findings.step import Step, StepFact
from nearpeak.machines.machine import Machine
from nearpeak.ops.op import Trace
from nearpeak.ops.settings import SLOW_SETTINGS
from nearpeak.profiles.finding import MIN_SHOWN_SHARE, Finding, Fix, is_ignored
from nearpeak.profiles.idle import IdleCause
from nearpeak.profiles.profile import Profile
from nearpeak.units import percent, seconds

MIN_SAVED_SHARE = 0.001
"""Of the wall time. Findings that save less are not part of a profile."""
OWN_ERRORS_ARE_RAISED = False
"""Whether an error in a rule of nearpeak's ends the report, as in tests; for users it is a note."""
_MAX_MENTIONED_IDLE_VALUE = 0.95
"""The reasoning mentions the clock if a second of idle time is worth less than this."""
_WHOLE = 0.9
"""The share of the idle time of a cause from which all of it is claimed."""
_GONE = 0.99
"""The share of the time of an op, or of a cause, from which it goes as a whole."""
_SAME_WASTE = 0.8
"""The share of a claim from which it is another name of what larger ones change."""
_SAME_SAVING = 0.05
"""The reasoning mentions the replay if it differs from the sum of the claims by more than this share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waste:
    """What a rule sees at one place of a step.

    Savings are predicted per op: `gains` are seconds by the index of the op, at most the time of the op. `gone` are ops
    that would no longer run: the time that the device waited for their launches is saved too. Other idle time is
    claimed from `idle`, by the name of the cause; "communication" is the time in which only communication ran.
    """

    title: str
    op: int | None
    """The op whose line is to be changed; None if there is no such op."""
    gains: Mapping[int, float] = field(default_factory=dict)
    gone: Collection[int] = ()
    """Ops whose whole time is gained need not be listed here."""
    idle: Mapping[str, float] = field(default_factory=dict)
    causes: Collection[IdleCause] = ()
    """The idle time that `idle` is part of, so that a replay knows which waits or stretches go; without them, all of
    the named causes."""
    launch_s: Mapping[int, float] = field(default_factory=dict)
    """For a replay: the seconds of the host that remain of each launch of an op, 0 in a CUDA graph. `idle` has what
    that saves."""
    evidence: str
    reasoning: str
    remedy: str
    fix: Fix | None = None
    """What nearpeak offers; the engine fills in its ops and modules."""
    source: str = ""
    """The line to change, if it is not that of `op`."""
    is_once: bool = False
    """Whether it is done once for each new size and kept, as a plan is: in the long run, steps spend nothing on it."""
    from_outside: bool = False
    """Whether the remedy is at the user's line also where the ops are those of an installed package."""
    replaces: bool = False
    """Whether something else takes the place of the ops, so that no other rule can save anything of what remains."""

    @property
    def saving_s(self) -> float:
        """The sum of what it claims."""
        return sum(self.gains.values()) + sum(self.idle.values())


RuleFunction = Callable[[Step], Iterable[Waste]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A rule's name, the facts about a step that it needs, and its function."""

    name: str
    needs: frozenset[StepFact]
    look: RuleFunction
    general: bool = False
    """Whether other rules describe its findings better. It runs after them, and gets the ops that none of them
    claims."""
    compiles: bool = False
    """Whether torch.compile removes the waste without a change of the line."""
    first: bool = False
    """Whether its findings are to be seen to before all others, which are predicted for the step without them."""


_RULES: dict[str, Rule] = {}


def rule(
    name: str,
    *,
    needs: Collection[StepFact] = (),
    general: bool = False,
    compiles: bool = False,
    first: bool = False,
) -> Callable[[RuleFunction], RuleFunction]:
    """Registers a function as a rule. It is called with a `Step` and yields a `Waste` for each place.

    Args:
        name: Words with hyphens that say what is wrong: "zeroed-then-overwritten".
        needs: The facts that must be known about a step; without them the rule is listed as not decidable. "storages":
            which tensors share memory. "lines": the source lines of ops. "host": what the host did. "memory": the peak
            memory.
        general: For a rule about waste of many kinds: it runs after all others, and `step.claimed` has the ops that
            these claim.
        compiles: Whether torch.compile removes the waste without a change of the line; said where the line is in an
            installed package.
        first: For what distorts the whole step: where the host and the device are replayed, the savings of all other
            rules are those in the step without it.
    """
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name):
        raise UsageError(f"{name!r} is not a valid rule name. Use lowercase letters, digits and hyphens.")

    def register(look: RuleFunction) -> RuleFunction:
        if name in _RULES:
            raise UsageError(f"There is a rule called {name!r} already.")
        _RULES[name] = Rule(
            name=name, needs=frozenset(needs), look=look, general=general, compiles=compiles, first=first
        )
        return look

    return register


def forget_rule(name: str) -> None:
    """Removes a rule from the registry."""
    _RULES.pop(name, None)


def rules() -> dict[str, Rule]:
    """All rules by name."""
    from nearpeak.findings import rules as _  # noqa: F401  # importing a rule registers it

    return _RULES


def wastes_of(step: Step, name: str) -> Iterator[Waste]:
    """What another rule sees in a step, for a rule that leaves this to it."""
    return iter(rules()[name].look(step))


def add_rules(path: str | Path) -> None:
    """Runs a Python file of the user's that defines rules with `nearpeak.rule`."""
    file = Path(path)
    if not file.is_file():
        raise UsageError(f"{file}: there is no such file. --rules takes a Python file that defines rules.")
    before = set(rules())
    try:
        runpy.run_path(str(file))
    except (NearpeakError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise UsageError(f"--rules {file} failed: {type(error).__name__}: {message_of(error)}") from error
    if set(rules()) == before:
        raise UsageError(f"{file} defines no rule. Decorate a function with @nearpeak.rule('name').")


def check_ignored_rules(ignore: Iterable[str]) -> None:
    """UsageError if a rule to be ignored does not exist."""
    for item in ignore:
        name = item.partition("@")[0]
        if name not in rules():
            raise UsageError(f"There is no rule called {name!r}. {did_you_mean(name, rules())}")


def find(
    step: Step,
    *,
    ignore: Collection[str] = (),
    least_share: float = MIN_SHOWN_SHARE,
    failures: list[str] | None = None,
) -> tuple[tuple[Finding, ...], tuple[str, ...]]:
    """The findings of a step, the largest saving first; and the rules that cannot be decided.

    Args:
        step: The step.
        ignore: Names of rules, or "NAME@train.py:41" for one line.
        least_share: Of the wall time. Findings that save less are left out.
        failures: Gets a sentence about each rule that raises an error, since a measurement is worth more than one of
            its findings; with None, the error is raised.
    """
    check_ignored_rules(ignore)
    enabled = [item for item in rules().values() if item.name not in ignore]
    undecided = tuple(item.name for item in enabled if not item.needs <= step.knows)
    wastes: list[tuple[str, Waste]] = []
    for general in (False, True):
        if general:
            step = step.after(index for _, waste in wastes for index in waste.gains)
        for item in enabled:
            if item.general == general and item.needs <= step.knows:
                try:
                    wastes += [
                        (item.name, _with_views(step, waste)) for waste in item.look(step) if _saves_time(step, waste)
                    ]
                except Exception as error:
                    is_own = item.look.__module__.startswith("nearpeak.")
                    if failures is None or (is_own and OWN_ERRORS_ARE_RAISED):
                        raise
                    blame = ", which is an error of nearpeak: please report it" if is_own else ""
                    failures.append(f"The rule {item.name} failed{blame}: {type(error).__name__}: {message_of(error)}")
    wastes = [(name, waste) for name, waste in wastes if not is_ignored(name, _source_line(step, waste), ignore)]
    groups = _predict(step, _merge_claims(step, list(_claims(step, wastes))))
    wall_s = step.profile.wall_s
    long_run_s = wall_s - sum(group.once_s for group in groups)
    groups = [
        group
        for group in sorted(groups, key=lambda group: -group.found_s)
        if group.found_s >= least_share * (wall_s if group.is_once else long_run_s)
    ]
    return tuple(_finding(step, group, long_run_s) for group in _predict_together(step, groups)), undecided


def add_findings(
    profile: Profile, trace: Trace, machine: Machine, knows: frozenset[StepFact], *, replay: StepReplay | None = None
) -> Profile:
    """The profile with the findings in the traced ops behind it, including those that are too small to be shown."""
    notes = []
    if replay is not None and not replay.is_good:
        notes.append(
            f"The replay of the host and the device takes {seconds(replay.unchanged.seconds)} where a clean step takes "
            f"{seconds(profile.wall_s)}: savings are sums of times, and may overlap."
        )
        replay = None
    step = Step(trace=trace, profile=profile, machine=machine, knows=knows, replay=replay)
    for name in trace.settings:
        if not SLOW_SETTINGS[name].is_predicted:
            notes.append(f"{SLOW_SETTINGS[name].words}. How much time that takes cannot be told from one run.")
    findings, undecided = find(step, least_share=MIN_SAVED_SHARE, failures=notes)
    if once_s := sum(finding.once_s for finding in findings):
        notes.append(
            f"{seconds(once_s)} of the step were spent on sizes that came for the first time. Steps whose sizes recur "
            f"do not spend them: savings are shares of the other {seconds(profile.wall_s - once_s)}."
        )
    return dataclasses.replace(
        profile,
        findings=findings,
        undecided=undecided,
        notes=(*profile.notes, *notes),
        callers=step.callers,
        settings=trace.settings,
        replayed_s=None if replay is None else replay.unchanged.seconds,
    )


def _saves_time(step: Step, waste: Waste) -> bool:
    named = (*waste.gains, *waste.gone, *(() if waste.op is None else (waste.op,)))
    if not all(0 <= index < len(step.ops) for index in named):
        raise ValueError(f"a waste names ops that are not among the {len(step.ops)} of the step")
    return waste.saving_s > 0.0 or any(step.measured[index].launch_wait_s > 0.0 for index in waste.gone)


def _with_views(step: Step, waste: Waste) -> Waste:
    """The waste with the views of what only ops that go have read: the host calls these too."""
    gone = set(_removed_ops(step, waste))
    views = {
        view: step.time(view)
        for index in gone
        if gone.issuperset(step.flow.consumers[index])
        for view in step.views_of.get(index, ())
        if view not in gone
    }
    if not views:
        return waste
    return dataclasses.replace(waste, gains={**views, **waste.gains}, gone=(*waste.gone, *views))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Claim:
    """What one place saves if it alone is changed."""

    rule: str
    waste: Waste
    gains: Mapping[int, float]
    removed: frozenset[int]
    """The ops that no longer run."""
    launch_waits: Mapping[int, float]
    """The idle time before them."""
    idle: Mapping[str, float]
    """Other idle time, by its cause."""

    @property
    def saving_s(self) -> float:
        """The sum of what is claimed."""
        return sum(self.gains.values()) + sum(self.launch_waits.values()) + sum(self.idle.values())


class _Ledger:
    """The time of a step that is left to claim: that of each op, and each idle time."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._left = [op.measured_s for op in step.measured]
        self._removed: set[int] = set()
        self._idle: dict[str, float] = _idle_by_cause(step)

    def claim(self, name: str, waste: Waste, besides: Collection[int] = ()) -> _Claim:
        """What is left of what a waste claims, besides some ops."""
        gains: dict[int, float] = {}
        for index, gain in waste.gains.items():
            if index not in besides and (claimed_s := min(max(gain, 0.0), self._left[index])):
                gains[index] = claimed_s
                self._left[index] = 0.0 if waste.replaces else self._left[index] - claimed_s
        removed = frozenset(_removed_ops(self._step, waste)) - self._removed
        self._removed |= removed
        launch_waits: dict[int, float] = {}
        for index in removed:
            wanted_s = self._step.measured[index].launch_wait_s
            launch_waits[index] = self._claim_idle("launching", wanted_s)
            launch_waits[index] += self._claim_idle("python", wanted_s - launch_waits[index])
        idle = {cause: self._claim_idle(cause, max(gain, 0.0)) for cause, gain in waste.idle.items()}
        return _Claim(rule=name, waste=waste, gains=gains, removed=removed, launch_waits=launch_waits, idle=idle)

    def _claim_idle(self, cause: str, wanted_s: float) -> float:
        claimed_s = min(wanted_s, self._idle.get(cause, 0.0))
        self._idle[cause] = self._idle.get(cause, 0.0) - claimed_s
        return claimed_s


def _idle_by_cause(step: Step) -> dict[str, float]:
    idle: dict[str, float] = {"communication": step.profile.communication_s}
    for cause in step.profile.idle:
        idle[cause.cause] = idle.get(cause.cause, 0.0) + cause.seconds
    return idle


def _claims(step: Step, wastes: Sequence[tuple[str, Waste]]) -> Iterator[_Claim]:
    """What each place saves alone, the largest first.

    Places of one rule claim the time of an op once. Those of different rules are different changes: each has all that
    it saves, unless nearly all of that goes with a larger one anyway. General rules get what all others leave.
    """
    registry = rules()
    of_all = _Ledger(step)
    of_rule: dict[str, _Ledger] = {}
    gone = _Gone(step)
    special_ops: set[int] = set()

    def order(item: tuple[str, Waste]) -> tuple[bool, float]:
        name, waste = item
        launches_s = sum(step.measured[index].launch_wait_s for index in _removed_ops(step, waste))
        return registry[name].general, -waste.saving_s - launches_s

    for name, waste in sorted(wastes, key=order):
        if registry[name].general:
            yield of_all.claim(name, waste, besides=special_ops)
            continue
        if gone.has_most_of(name, waste):
            yield of_all.claim(name, waste)
        else:
            of_all.claim(name, waste)
            if name not in of_rule:
                of_rule[name] = _Ledger(step)
            yield of_rule[name].claim(name, waste)
        gone.add(name, waste)
        special_ops.update(waste.gains)


class _Gone:
    """What goes as a whole with wastes that were seen: ops that no longer run or are replaced, and idle time."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._rules: dict[Hashable, set[str]] = {}

    def add(self, name: str, waste: Waste) -> None:
        for part, share, _ in self._parts(waste):
            if share > _GONE or (waste.replaces and part in waste.gains):
                self._rules.setdefault(part, set()).add(name)

    def has_most_of(self, name: str, waste: Waste) -> bool:
        """Whether a waste is another name for what larger ones of other rules change."""
        parts = list(self._parts(waste))
        gone_s = sum(seconds for part, _, seconds in parts if self._rules.get(part, set()) - {name})
        return gone_s > _SAME_WASTE * sum(seconds for _, _, seconds in parts)

    def _parts(self, waste: Waste) -> Iterator[tuple[Hashable, float, float]]:
        """The ops and idle times of a waste, with the share that goes and its seconds."""
        for index, gain in waste.gains.items():
            yield index, gain / self._step.time(index) if self._step.time(index) else 1.0, max(gain, 0.0)
        for index in _removed_ops(self._step, waste):
            yield ("launch", index), 1.0, self._step.measured[index].launch_wait_s
        for name, claimed_s in waste.idle.items():
            causes = [cause for cause in waste.causes or self._step.profile.idle if cause.cause == name]
            total_s = sum(cause.seconds for cause in causes)
            for cause in causes:
                share = min(1.0, claimed_s / total_s) if total_s else 0.0
                yield (name, cause.where, cause.what), share, share * cause.seconds


def _sum_of(step: Step, groups: Iterable[_Group]) -> tuple[float, float]:
    """What groups save at once as a sum of times, and the idle time in it: two that shorten an op multiply."""
    stays: dict[int, float] = {}
    launch_waits: dict[int, float] = {}
    idle: dict[str, float] = {}
    for group in groups:
        for index, share in group.shares.items():
            stays[index] = stays.get(index, 1.0) * (1.0 - share)
        for claim in group.claims:
            launch_waits.update(claim.launch_waits)
            for cause, claimed_s in claim.idle.items():
                idle[cause] = idle.get(cause, 0.0) + claimed_s
    total = _idle_by_cause(step)
    idle = {cause: min(claimed_s, total.get(cause, 0.0)) for cause, claimed_s in idle.items()}
    launching_s = sum(total.get(cause, 0.0) - idle.get(cause, 0.0) for cause in ("launching", "python"))
    busy_s = sum(step.time(index) * (1.0 - share) for index, share in stays.items()) + idle.pop("communication", 0.0)
    idle_s = sum(idle.values()) + min(launching_s, sum(launch_waits.values()))
    return (busy_s + idle_s * step.idle_value) * step.clean_over_seen, idle_s * step.clean_over_seen


def _change(step: Step, claims: Sequence[_Claim], shares: Mapping[int, float]) -> Change:
    """What the claims of one group change in a replay."""
    if step.replay is None:
        return Change()
    return dataclasses.replace(combine(_change_of_host(step, step.replay, claim) for claim in claims), shorter=shares)


def _change_of_host(step: Step, replay: StepReplay, claim: _Claim) -> Change:
    """What a claim changes, other than kernels."""
    timeline, waste = replay.timeline, claim.waste
    causes: dict[Cause, float] = {}
    other_s = 0.0
    for name, claimed_s in claim.idle.items():
        if name == "communication" or not claimed_s or (waste.launch_s and name in ("launching", "python")):
            continue
        named = [cause for cause in waste.causes or step.profile.idle if cause.cause == name]
        total_s = sum(cause.seconds for cause in named)
        for cause in named:
            key = (cause.cause, cause.where, cause.what)
            # A wait goes as a whole, so one that a rule does not name must be claimed as a whole.
            if key in timeline.causes and (waste.causes or claimed_s > _WHOLE * total_s or key not in timeline.waits):
                causes[key] = min(1.0, claimed_s / total_s)
            else:
                other_s += claimed_s * cause.seconds / total_s
    exposed_s = step.profile.communication_s
    return Change(
        launch_s={
            **{index: left_s for index, left_s in waste.launch_s.items() if index not in timeline.waiting_ops},
            **dict.fromkeys(claim.removed, 0.0),
        },
        calls={
            index: count / (len(calls) + 1)
            for index, calls in step.called_before.items()
            if index not in claim.removed and (count := len(claim.removed.intersection(calls)))
        },
        causes=causes,
        communication=claim.idle.get("communication", 0.0) / exposed_s if exposed_s else 0.0,
        idle_s=other_s,
    )


def _removed_ops(step: Step, waste: Waste) -> Iterator[int]:
    """The ops that would no longer run."""
    gone = set(waste.gone)
    yield from gone
    for index, gain in waste.gains.items():
        if index not in gone and 0.0 < (1 - 1e-9) * step.time(index) <= gain:
            yield index


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """The claims of one rule at one line: a finding to be."""

    rule: str
    source: str
    library: str
    claims: Sequence[_Claim]
    shares: Mapping[int, float]
    """The share of the time of ops that goes."""
    change: Change
    """The same for a replay, with what the host no longer does."""
    saving_s: float = 0.0
    idle_s: float = 0.0
    """The idle time in the saving."""
    once_s: float = 0.0
    """What it takes of this step, and of no step in the long run: not in the saving."""
    together_s: float = 0.0
    """The saving of this one and of all before it at once."""

    @property
    def is_once(self) -> bool:
        """Whether what it changes is done once for each new size."""
        return any(claim.waste.is_once for claim in self.claims)

    @property
    def found_s(self) -> float:
        """What it takes of the profiled step."""
        return self.saving_s + self.once_s

    def in_long_run(self) -> _Group:
        """The group with a saving of steps whose sizes recur."""
        return dataclasses.replace(self, saving_s=0.0, idle_s=0.0, once_s=self.saving_s) if self.is_once else self


def _merge_claims(step: Step, claims: Sequence[_Claim]) -> list[_Group]:
    """One group for each rule, line and library."""
    by_line: dict[tuple[str, str, str, str], list[_Claim]] = {}
    for claim in claims:
        line, library = _source_line(step, claim.waste), _library(step, claim)
        by_line.setdefault((claim.rule, line, library, claim.waste.title if not line else ""), []).append(claim)
    groups = []
    for (name, line, library, _), own in by_line.items():
        shares: dict[int, float] = {}
        for claim in own:
            for index, gain in claim.gains.items():
                shares[index] = min(1.0, shares.get(index, 0.0) + gain / step.time(index))
        change = _change(step, own, shares)
        groups.append(_Group(rule=name, source=line, library=library, claims=own, shares=shares, change=change))
    return groups


def _predict(step: Step, groups: Sequence[_Group]) -> list[_Group]:
    """The groups with their savings.

    In a replay those of a rule sum to what all of them save at once: two waits in a row cost little each, and much
    together. A general rule gets what is left when everything else has gone, and other rules what is left after those
    that come first, and after what is done once.
    """
    sums = {id(group): _sum_of(step, [group]) for group in groups}
    if step.replay is None:
        return [
            dataclasses.replace(group, saving_s=sums[id(group)][0], idle_s=sums[id(group)][1]).in_long_run()
            for group in groups
        ]
    by_rule: dict[str, list[_Group]] = {}
    for group in groups:
        by_rule.setdefault(group.rule, []).append(group)
    special = combine(group.change for group in groups if not rules()[group.rule].general)
    firsts = {group.rule for group in groups if rules()[group.rule].first or group.is_once}
    first = combine(group.change for group in groups if group.rule in firsts)
    predicted: list[_Group] = []
    for name, own in by_rule.items():
        after = special if rules()[name].general else Change() if name in firsts else first
        alone = [_replayed(step, step.replay, group.change, after) for group in own]
        if len(own) == 1:
            together = alone[0]
        else:
            together = _replayed(step, step.replay, combine(group.change for group in own), after)
        total_s, sums_s = sum(saving for saving, _ in alone), sum(sums[id(group)][0] for group in own)
        more_s = max(0.0, together[0] - total_s)
        less = min(1.0, together[0] / total_s) if total_s > 0.0 else 1.0
        for group, (saving_s, idle_s) in zip(own, alone, strict=True):
            extra_s = more_s * sums[id(group)][0] / sums_s if sums_s else 0.0
            saved = dataclasses.replace(group, saving_s=saving_s * less + extra_s, idle_s=idle_s * less + extra_s)
            predicted.append(saved.in_long_run())
    return predicted


def _replayed(step: Step, replay: StepReplay, change: Change, after: Change) -> tuple[float, float]:
    """What a change saves after another one, and the idle time in it."""
    saving = replay.saving(change, after=after)
    idle_s = saving.seconds - saving.busy_s
    if idle_s > 0.0:
        idle_s *= _idle_of_step_over_replay(step, replay)
    # Where the device did not wait before and waits now, all of that is lost.
    return max(0.0, saving.busy_s + idle_s * (step.idle_value if idle_s > 0.0 else 1.0)), max(0.0, idle_s)


def _idle_of_step_over_replay(step: Step, replay: StepReplay) -> float:
    """The idle time of the step over that of the replay, at most 1.

    A replay that waits for its host where the step did not, such as one in which the host itself waited to launch more,
    has idle time that nothing can save.
    """
    before, profile = replay.unchanged, step.profile
    if before.seconds <= before.busy_s:
        return 1.0
    replayed_s = profile.wall_s * (1.0 - before.busy_s / before.seconds)
    return min(1.0, max(0.0, profile.wall_s - profile.kernel_s) / replayed_s)


def _predict_together(step: Step, groups: Sequence[_Group]) -> Iterator[_Group]:
    """The groups with the saving of each and of all before it."""
    once = combine(group.change for group in groups if group.is_once)
    for count, group in enumerate(groups, 1):
        saving = [each for each in groups[:count] if not each.is_once]
        if step.replay is None:
            together_s = _sum_of(step, saving)[0]
        else:
            together_s = _replayed(step, step.replay, combine(each.change for each in saving), once)[0]
        yield dataclasses.replace(group, together_s=together_s)


def _finding(step: Step, group: _Group, long_run_s: float) -> Finding:
    """Its texts are those of the place with the largest saving."""
    largest = max(group.claims, key=lambda claim: claim.waste.saving_s).waste
    ops = tuple(sorted({index for claim in group.claims for index in claim.waste.gains}))
    places = [claim.waste.op for claim in group.claims if claim.waste.op is not None]
    modules = tuple(dict.fromkeys(step.ops[index].module for index in sorted(places)))
    members = {*places, *(index for claim in group.claims for index in (*claim.gains, *claim.removed))}
    return Finding(
        rule=group.rule,
        title=largest.title,
        source=group.source,
        modules=modules,
        places=len(group.claims),
        saving_s=group.saving_s,
        share=group.saving_s / long_run_s if long_run_s > 0.0 else 0.0,
        evidence=largest.evidence,
        reasoning=largest.reasoning + _idle_note(step, group),
        remedy=_remedy_outside(group, largest.remedy, modules)
        if group.library and not largest.from_outside
        else largest.remedy,
        fix=None if largest.fix is None else dataclasses.replace(largest.fix, ops=ops, modules=modules),
        ops=ops,
        together_s=group.together_s,
        once_s=group.once_s,
        idle_s=min(group.idle_s, group.saving_s),
        library=group.library,
        inside=_innermost_line(step, largest) if group.library and not group.library.startswith("torch.") else "",
        called_at=step.caller_of(group.source, members) if group.source else "",
    )


def _library(step: Step, claim: _Claim) -> str:
    """The installed package that a place is in, or the class of torch's whose own ops would be fused; "" for others."""
    package = step.trace.packages.get(_innermost_line(step, claim.waste).rpartition(":")[0])
    if package is not None or not rules()[claim.rule].compiles:
        return package or ""
    gains = [index for index, gain in claim.waste.gains.items() if gain]
    paths = {step.ops[index].module for index in gains}
    if len({step.ops[index].name for index in gains}) < 2 or "" in paths:
        return ""  # one op in many calls of a module is not to be fused with anything
    # The user writes a module's calls: ops of one module of torch's, or of modules below one, are torch's to write.
    shared: tuple[str, ...] = ()
    for names in zip(*(path.split(".") for path in paths), strict=False):
        if len(set(names)) > 1:
            break
        shared = (*shared, names[0])
    return step.trace.torch_modules.get(".".join(shared), "")


_OVER_A_SEQUENCE = {f"torch.nn.{name}Cell": f"torch.nn.{name}" for name in ("LSTM", "GRU", "RNN")}
"""Classes of torch's that run one step of a sequence, and those that run all steps in a few kernels."""


def _remedy_outside(group: _Group, remedy: str, modules: Sequence[str]) -> str:
    """What to do about code of a library, which its user does not change: first what is done from outside."""
    library = group.library
    module = next((name for name in modules if name), "")
    which = f" ({module})" if module else ""
    swap = f"give the model another module in place of {module} (model.set_submodule)" if module else ""
    if library in _OVER_A_SEQUENCE:
        return f"{_OVER_A_SEQUENCE[library]}(...)  # in place of {library}{which}, where all inputs are known before"
    if rules()[group.rule].compiles:
        other = f"\n# or {swap}, with:\n{remedy}" if swap else ""
        return f"model.compile()  # {library} writes these ops; or only the module{which}: module.compile(){other}"
    advice = f"or {swap}" if swap else "or ask its authors"
    return f"{remedy}\n# This is code of {library}: look for a setting of it, {advice}."


def _idle_note(step: Step, group: _Group) -> str:
    """A note for the reasoning about idle time that the rule itself does not mention, and about the replay."""
    note = ""
    claimed_s = sum(claim.saving_s for claim in group.claims)
    if step.replay is not None and abs(group.saving_s - claimed_s) > _SAME_SAVING * claimed_s:
        left_s = step.profile.wall_s - group.saving_s
        note += f" A replay of the host and the device without it takes {seconds(left_s)} for the step."
    if step.clean_over_seen > 1.0 + _SAME_SAVING:
        note += (
            f" Clean steps took {step.clean_over_seen:.2f} times as long as what the profiled one shows, and what is "
            "saved of them is in proportion."
        )
    if group.idle_s < 0.01 * step.profile.wall_s:
        return note
    if not any(claim.waste.idle for claim in group.claims):
        what = "between these ops" if step.machine.kind == "cpu" else "in which the device waited for their launches"
        note += f" {seconds(group.idle_s)} {what} go too."
    if step.idle_value < _MAX_MENTIONED_IDLE_VALUE:
        note += (
            f" {percent(1 - step.idle_value, 0)} less of the waiting is counted: without rests, products do not keep "
            "the clock that they run at now."
        )
    return note


def _source_line(step: Step, waste: Waste) -> str:
    """The line of the user's own: in an installed package, the one that calls it."""
    line = _innermost_line(step, waste)
    if waste.op is not None and step.ops[waste.op].source == line:
        return step.ops[waste.op].caller or line
    return step.callers.get(line, line)


def _innermost_line(step: Step, waste: Waste) -> str:
    if waste.source or waste.op is None:
        return waste.source
    return step.ops[waste.op].source
