"""The engine: a registry of rules, and `find`, which runs them on a step.

A rule yields a `Waste` for each place. The engine makes sure that no time is claimed twice, merges the claims by line
into findings, and ranks these by their saving. Where the host and the device were recorded, the saving is what a replay
of both without the claims gives; else it is the sum of the claims.
"""

from __future__ import annotations

import dataclasses
import re
import runpy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nearpeak.errors import NearpeakError, UsageError, did_you_mean, message_of
from nearpeak.findings.replay import Cause, Change, StepReplay, combine
from nearpeak.findings.step import Step, StepFact
from nearpeak.machines.machine import Machine
from nearpeak.ops.op import Trace
from nearpeak.profiles.finding import MIN_SHOWN_SHARE, Finding, Fix, is_ignored
from nearpeak.profiles.idle import IdleCause
from nearpeak.profiles.profile import Profile
from nearpeak.units import percent, seconds

MIN_SAVED_SHARE = 0.001
"""Of the wall time. Findings that save less are not part of a profile."""
_MAX_MENTIONED_IDLE_VALUE = 0.95
"""The reasoning mentions the clock if a second of idle time is worth less than this."""
_WHOLE = 0.9
"""The share of the idle time of a cause from which all of it is claimed."""
_SAME_SAVING = 0.05
"""The reasoning mentions the replay if it differs from the sum of the claims by more than this share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waste:
    """What a rule sees at one place of a step.

    Savings are predicted per op, so that two rules never claim the same time: `gains` are seconds by the index of the
    op, at most the time of the op. `gone` are ops that would no longer run: the time that the device waited for their
    launches is saved too. Other idle time is claimed from `idle`, by the name of the cause; "communication" is the time
    in which only communication ran.
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
    replaces: bool = False
    """Whether something else takes the place of the ops, so that no other rule can save anything of what remains."""

    @property
    def saving_s(self) -> float:
        """The saving before claims of other rules are subtracted."""
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


_RULES: dict[str, Rule] = {}


def rule(
    name: str, *, needs: Collection[StepFact] = (), general: bool = False, compiles: bool = False
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
    """
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name):
        raise UsageError(f"{name!r} is not a valid rule name. Use lowercase letters, digits and hyphens.")

    def register(look: RuleFunction) -> RuleFunction:
        if name in _RULES:
            raise UsageError(f"There is a rule called {name!r} already.")
        _RULES[name] = Rule(name=name, needs=frozenset(needs), look=look, general=general, compiles=compiles)
        return look

    return register


def forget_rule(name: str) -> None:
    """Removes a rule from the registry."""
    _RULES.pop(name, None)


def rules() -> dict[str, Rule]:
    """All rules by name."""
    from nearpeak.findings import rules as _  # noqa: F401  # importing a rule registers it

    return _RULES


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
        failures: Gets a sentence about each rule of the user's that raises an error; with None, the error is raised.
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
                    wastes += [(item.name, waste) for waste in item.look(step) if _saves_time(step, waste)]
                except Exception as error:
                    if failures is None or item.look.__module__.startswith("nearpeak."):
                        raise
                    failures.append(f"The rule {item.name} failed: {type(error).__name__}: {message_of(error)}")
    wastes = [(name, waste) for name, waste in wastes if not is_ignored(name, _source_line(step, waste), ignore)]
    least_s = least_share * step.profile.wall_s
    groups = _predict(step, _merge_claims(step, list(_claims(step, wastes))))
    groups = sorted((group for group in groups if group.saving_s >= least_s), key=lambda group: -group.saving_s)
    return tuple(_finding(step, group) for group in _predict_together(step, groups)), undecided


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
    findings, undecided = find(step, least_share=MIN_SAVED_SHARE, failures=notes)
    return dataclasses.replace(
        profile,
        findings=findings,
        undecided=undecided,
        notes=(*profile.notes, *notes),
        callers=step.callers,
        replayed_s=None if replay is None else replay.unchanged.seconds,
    )


def _saves_time(step: Step, waste: Waste) -> bool:
    named = (*waste.gains, *waste.gone, *(() if waste.op is None else (waste.op,)))
    if not all(0 <= index < len(step.ops) for index in named):
        raise ValueError(f"a waste names ops that are not among the {len(step.ops)} of the step")
    return waste.saving_s > 0.0 or any(step.measured[index].launch_wait_s > 0.0 for index in waste.gone)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Claim:
    rule: str
    waste: Waste
    saving_s: float
    """The sum of what is claimed."""
    idle_s: float
    """The idle time in the saving."""
    change: Change
    """The same for a replay."""


def _claims(step: Step, wastes: Sequence[tuple[str, Waste]]) -> Iterator[_Claim]:
    """Claims in the order of their size, general rules last. The time of an op, and each idle time, is claimed once."""
    left = [op.measured_s for op in step.measured]
    launch_wait = [op.launch_wait_s for op in step.measured]
    removed: set[int] = set()
    idle: dict[str, float] = {"communication": step.profile.communication_s}
    for cause in step.profile.idle:
        idle[cause.cause] = idle.get(cause.cause, 0.0) + cause.seconds
    registry = rules()
    claimed_by_special: set[int] = set()

    def order(item: tuple[str, Waste]) -> tuple[bool, float]:
        name, waste = item
        launches_s = sum(step.measured[index].launch_wait_s for index in _removed_ops(step, waste))
        return registry[name].general, -waste.saving_s - launches_s

    def claim_idle(cause: str, wanted_s: float) -> float:
        claimed_s = min(wanted_s, idle.get(cause, 0.0))
        idle[cause] = idle.get(cause, 0.0) - claimed_s
        return claimed_s

    for name, waste in sorted(wastes, key=order):
        busy_s = idle_s = 0.0
        shorter: dict[int, float] = {}
        for index, gain in waste.gains.items():
            if registry[name].general and index in claimed_by_special:
                continue
            claimed_s = min(max(gain, 0.0), left[index])
            left[index] = 0.0 if waste.replaces else left[index] - claimed_s
            busy_s += claimed_s
            if claimed_s:
                shorter[index] = claimed_s / step.time(index)
        now_removed = set(_removed_ops(step, waste)) - removed
        removed |= now_removed
        for index in now_removed:
            for cause_name in ("launching", "python"):
                claimed_s = claim_idle(cause_name, launch_wait[index])
                launch_wait[index] -= claimed_s
                idle_s += claimed_s
        claimed_idle = {cause: claim_idle(cause, max(gain, 0.0)) for cause, gain in waste.idle.items()}
        for cause_name, claimed_s in claimed_idle.items():
            if cause_name == "communication":
                busy_s += claimed_s
            else:
                idle_s += claimed_s
        if not registry[name].general:
            claimed_by_special.update(waste.gains)
        yield _Claim(
            rule=name,
            waste=waste,
            saving_s=busy_s + idle_s * step.idle_value,
            idle_s=idle_s,
            change=_change(step, waste, shorter, now_removed, claimed_idle),
        )


def _change(
    step: Step, waste: Waste, shorter: Mapping[int, float], removed: Collection[int], idle: Mapping[str, float]
) -> Change:
    """What a claim changes in a replay."""
    if step.replay is None:
        return Change()
    timeline = step.replay.timeline
    causes: dict[Cause, float] = {}
    other_s = 0.0
    for name, claimed_s in idle.items():
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
        shorter=shorter,
        launch_s={
            **{index: left_s for index, left_s in waste.launch_s.items() if index not in timeline.waiting_ops},
            **dict.fromkeys(removed, 0.0),
        },
        causes=causes,
        communication=idle.get("communication", 0.0) / exposed_s if exposed_s else 0.0,
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
    change: Change
    saving_s: float
    idle_s: float
    """The idle time in the saving."""
    together_s: float = 0.0
    """The saving of this one and of all before it at once."""


def _merge_claims(step: Step, claims: Sequence[_Claim]) -> list[_Group]:
    """One group for each rule, line and library, with sums of savings."""
    by_line: dict[tuple[str, str, str, str], list[_Claim]] = {}
    for claim in claims:
        line, library = _source_line(step, claim.waste), _library(step, claim)
        by_line.setdefault((claim.rule, line, library, claim.waste.title if not line else ""), []).append(claim)
    return [
        _Group(
            rule=name,
            source=line,
            library=library,
            claims=group,
            change=combine(claim.change for claim in group),
            saving_s=sum(claim.saving_s for claim in group),
            idle_s=sum(claim.idle_s for claim in group),
        )
        for (name, line, library, _), group in by_line.items()
    ]


def _predict(step: Step, groups: Sequence[_Group]) -> list[_Group]:
    """The groups with the savings of a replay, if there is one.

    Those of a rule sum to what all of them save at once: two waits in a row cost little each, and much together. A
    general rule gets what is left when everything else has gone.
    """
    if step.replay is None:
        return list(groups)
    by_rule: dict[str, list[_Group]] = {}
    for group in groups:
        by_rule.setdefault(group.rule, []).append(group)
    special = combine(group.change for group in groups if not rules()[group.rule].general)
    predicted: list[_Group] = []
    for name, own in by_rule.items():
        after = special if rules()[name].general else Change()
        alone = [_replayed(step, step.replay, group.change, after) for group in own]
        if len(own) == 1:
            together = alone[0]
        else:
            together = _replayed(step, step.replay, combine(group.change for group in own), after)
        total_s, sums_s = sum(saving for saving, _ in alone), sum(group.saving_s for group in own)
        more_s = max(0.0, together[0] - total_s)
        less = min(1.0, together[0] / total_s) if total_s > 0.0 else 1.0
        for group, (saving_s, idle_s) in zip(own, alone, strict=True):
            extra_s = more_s * group.saving_s / sums_s if sums_s else 0.0
            predicted.append(
                dataclasses.replace(group, saving_s=saving_s * less + extra_s, idle_s=idle_s * less + extra_s)
            )
    return predicted


def _replayed(step: Step, replay: StepReplay, change: Change, after: Change) -> tuple[float, float]:
    """What a change saves after another one, and the idle time in it."""
    saving = replay.saving(change, after=after)
    idle_s = saving.seconds - saving.busy_s
    # Where the device did not wait before and waits now, all of that is lost.
    return max(0.0, saving.busy_s + idle_s * (step.idle_value if idle_s > 0.0 else 1.0)), max(0.0, idle_s)


def _predict_together(step: Step, groups: Sequence[_Group]) -> Iterator[_Group]:
    """The groups with the saving of each and of all before it."""
    changes: list[Change] = []
    together_s = 0.0
    for group in groups:
        changes.append(group.change)
        if step.replay is None:
            together_s += group.saving_s
        else:
            together_s = _replayed(step, step.replay, combine(changes), Change())[0]
        yield dataclasses.replace(group, together_s=together_s)


def _finding(step: Step, group: _Group) -> Finding:
    """Its texts are those of the place with the largest saving."""
    largest = max(group.claims, key=lambda claim: claim.waste.saving_s).waste
    ops = tuple(sorted({index for claim in group.claims for index in claim.waste.gains}))
    places = [claim.waste.op for claim in group.claims if claim.waste.op is not None]
    modules = tuple(dict.fromkeys(step.ops[index].module for index in sorted(places)))
    return Finding(
        rule=group.rule,
        title=largest.title,
        source=group.source,
        modules=modules,
        places=len(group.claims),
        saving_s=group.saving_s,
        share=group.saving_s / step.profile.wall_s if step.profile.wall_s else 0.0,
        evidence=largest.evidence,
        reasoning=largest.reasoning + _idle_note(step, group),
        remedy=_remedy_outside(group, largest.remedy, modules) if group.library else largest.remedy,
        fix=None if largest.fix is None else dataclasses.replace(largest.fix, ops=ops, modules=modules),
        ops=ops,
        together_s=group.together_s,
        idle_s=min(group.idle_s, group.saving_s),
        library=group.library,
        inside=_innermost_line(step, largest) if group.library and not group.library.startswith("torch.") else "",
    )


def _library(step: Step, claim: _Claim) -> str:
    """The installed package that a place is in, or the class of torch's whose own ops would be fused; "" for others."""
    package = step.trace.packages.get(_innermost_line(step, claim.waste).rpartition(":")[0])
    if package is not None or not rules()[claim.rule].compiles:
        return package or ""
    paths = {step.ops[index].module for index in claim.waste.gains}
    if len(claim.waste.gains) < 2 or "" in paths:
        return ""
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
