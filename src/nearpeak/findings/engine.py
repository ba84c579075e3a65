"""`find`: the wastes that all rules see in a step, merged, ranked, and never claiming the same time twice."""

from __future__ import annotations

import dataclasses
import re
import runpy
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from nearpeak.errors import UsageError, did_you_mean
from nearpeak.findings.step import Step, StepFact
from nearpeak.machines.machine import Machine
from nearpeak.ops.op import Trace
from nearpeak.profiles.finding import MIN_SHOWN_SHARE, Finding, Waste, is_ignored
from nearpeak.profiles.profile import Profile
from nearpeak.units import percent, seconds

RuleFunction = Callable[[Step], Iterable[Waste]]

MIN_SAVED_SHARE = 0.001
"""What saves less is not even kept."""
_WORTH_MENTIONING = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A name, what of a step must be known to decide it, and the function that looks."""

    name: str
    needs: frozenset[StepFact]
    look: RuleFunction
    general: bool = False
    """Whether it sees much that other rules see better: it looks after them, and gets ops that none of them claims."""


_RULES: dict[str, Rule] = {}


def rule(
    name: str, *, needs: Collection[StepFact] = (), general: bool = False
) -> Callable[[RuleFunction], RuleFunction]:
    """Registers a function that looks at a step and yields what it finds, as a rule of this name.

    Args:
        name: Words with hyphens, which say what is wrong: "zeroed-then-overwritten".
        needs: What must be known of a step; where it is not, the rule is listed as not decidable. "storages": which
            tensors share memory. "lines": of ops. "host": what the host did. "memory": the peak of memory.
        general: For a rule about anything that has no better name: it looks after all others, and `step.named` has the
            ops that these claim something of.
    """
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name):
        raise UsageError(f"A rule cannot be called {name!r}: its name is of small letters, digits and hyphens.")

    def register(look: RuleFunction) -> RuleFunction:
        if name in _RULES:
            raise UsageError(f"There is a rule called {name!r} already.")
        _RULES[name] = Rule(name=name, needs=frozenset(needs), look=look, general=general)
        return look

    return register


def forget_rule(name: str) -> None:
    """Takes a rule away again."""
    _RULES.pop(name, None)


def rules() -> dict[str, Rule]:
    """All rules by name."""
    from nearpeak.findings import rules as _  # importing one registers it  # noqa: F401  # importing one registers it

    return _RULES


def add_rules(path: str | Path) -> None:
    """Runs a file of the user's that defines rules, with `nearpeak.rule`."""
    file = Path(path)
    if not file.is_file():
        raise UsageError(f"{file}: there is no such file. --rules takes a Python file that defines rules.")
    before = set(rules())
    runpy.run_path(str(file))
    if set(rules()) == before:
        raise UsageError(f"{file} defines no rule. A function with @nearpeak.rule('name') before it is one.")


def check_ignored_rules(ignore: Iterable[str]) -> None:
    """UsageError for what is to be ignored and does not exist."""
    for item in ignore:
        name = item.partition("@")[0]
        if name not in rules():
            raise UsageError(f"There is no rule called {name!r}. {did_you_mean(name, rules())}")


def find(
    step: Step, *, ignore: Collection[str] = (), least_share: float = MIN_SHOWN_SHARE
) -> tuple[tuple[Finding, ...], tuple[str, ...]]:
    """What is wasted in a step, the largest saving first; and the rules that cannot be decided from what is known.

    Args:
        step: What is known of it.
        ignore: Names of rules, or "NAME@train.py:41" for one line alone.
        least_share: Of the wall time; what saves less is left out.
    """
    check_ignored_rules(ignore)
    known = rules()
    asked = [item for item in known.values() if item.name not in ignore]
    undecided = tuple(item.name for item in asked if not item.needs <= step.knows)
    seen: list[tuple[str, Waste]] = []
    for general in (False, True):
        if general:
            step = step.after(index for _, waste in seen for index in waste.gains)
        for item in asked:
            if item.general == general and item.needs <= step.knows:
                seen += [(item.name, waste) for waste in item.look(step) if _saves_time(step, waste)]
    seen = [(name, waste) for name, waste in seen if not is_ignored(name, _source_line(step, waste), ignore)]
    merged = _merge_claims(step, list(_claims(step, seen)))
    least = least_share * step.profile.wall_s
    found = sorted((item for item in merged if item.saving_s >= least), key=lambda item: -item.saving_s)
    return tuple(found), undecided


def _saves_time(step: Step, waste: Waste) -> bool:
    return waste.saving_s > 0.0 or any(step.measured[index].launch_wait_s > 0.0 for index in waste.gone)


def add_findings(profile: Profile, trace: Trace, machine: Machine, knows: frozenset[StepFact]) -> Profile:
    """A profile with what the rules find in the ops behind it; what is too little to show is in it too."""
    step = Step(trace=trace, profile=profile, machine=machine, knows=knows)
    found, undecided = find(step, least_share=MIN_SAVED_SHARE)
    return dataclasses.replace(profile, findings=found, undecided=undecided)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Claim:
    rule: str
    waste: Waste
    saving_s: float
    waited_s: float
    """Of the idle time."""


def _claims(step: Step, seen: Sequence[tuple[str, Waste]]) -> Iterator[_Claim]:
    """The largest first, general rules last: what an op took, and each idle time, can be saved once."""
    left = [op.measured_s for op in step.measured]
    late = [op.launch_wait_s for op in step.measured]
    idle: dict[str, float] = {"communication": step.profile.communication_s}
    for cause in step.profile.idle:
        idle[cause.cause] = idle.get(cause.cause, 0.0) + cause.seconds
    known = rules()
    special: set[int] = set()

    def size(item: tuple[str, Waste]) -> tuple[bool, float]:
        name, waste = item
        return known[name].general, -waste.saving_s - sum(
            step.measured[index].launch_wait_s for index in _removed_ops(step, waste)
        )

    for name, waste in sorted(seen, key=size):
        saving = waited = 0.0
        for index, gain in waste.gains.items():
            if known[name].general and index in special:
                continue
            taken = min(max(gain, 0.0), left[index])
            left[index] -= taken
            saving += taken
        for index in _removed_ops(step, waste):
            for cause_name in ("launching", "python"):  # what there is of it, of either
                taken = min(late[index], idle.get(cause_name, 0.0))
                late[index] -= taken
                idle[cause_name] = idle.get(cause_name, 0.0) - taken
                waited += taken
        for cause_name, gain in waste.idle.items():
            taken = min(max(gain, 0.0), idle.get(cause_name, 0.0))
            idle[cause_name] = idle.get(cause_name, 0.0) - taken
            if cause_name == "communication":
                saving += taken
            else:
                waited += taken
        if not known[name].general:
            special.update(waste.gains)
        yield _Claim(rule=name, waste=waste, saving_s=saving + waited * step.idle_value, waited_s=waited)


def _removed_ops(step: Step, waste: Waste) -> Iterator[int]:
    """Ops that would not run any more."""
    named = set(waste.gone)
    yield from named
    for index, gain in waste.gains.items():
        if index not in named and 0.0 < (1 - 1e-9) * step.measured[index].measured_s <= gain:
            yield index


def _merge_claims(step: Step, claims: Sequence[_Claim]) -> Iterator[Finding]:
    """One finding for each rule and line, with what the first place shows."""
    groups: dict[tuple[str, str, str], list[_Claim]] = {}
    for claim in claims:
        line = _source_line(step, claim.waste)
        groups.setdefault((claim.rule, line, claim.waste.title if not line else ""), []).append(claim)
    for (name, line, _), group in groups.items():
        first = max(group, key=lambda claim: claim.waste.saving_s).waste
        saving = sum(claim.saving_s for claim in group)
        modules = [step.ops[claim.waste.at].module for claim in group if claim.waste.at is not None]
        yield Finding(
            rule=name,
            title=first.title,
            source=line,
            module=common_module(modules),
            places=len(group),
            saving_s=saving,
            share=saving / step.profile.wall_s if step.profile.wall_s else 0.0,
            evidence=first.evidence,
            reasoning=first.reasoning + _idle_note(step, group),
            remedy=first.remedy,
            fix=first.fix,
            ops=tuple(sorted({index for claim in group for index in claim.waste.gains})),
        )


def _idle_note(step: Step, claims: Sequence[_Claim]) -> str:
    """What is to be said of idle time that was not named as such, and of what becomes of it."""
    said = ""
    waited = sum(claim.waited_s for claim in claims)
    if waited < 0.01 * step.profile.wall_s:
        return said
    if not any(claim.waste.idle for claim in claims):
        what = "between these ops" if step.machine.kind == "cpu" else "in which the device waited for their launches"
        said += f" {seconds(waited)} {what} go too."
    if step.idle_value < _WORTH_MENTIONING:
        said += (
            f" {percent(1 - step.idle_value, 0)} less of the waiting is counted: without rests, products do not keep "
            "the clock that they run at now."
        )
    return said


def _source_line(step: Step, waste: Waste) -> str:
    if waste.source or waste.at is None:
        return waste.source
    return step.ops[waste.at].source


def common_module(modules: Sequence[str]) -> str:
    """One path for several, with a star for what differs.

    >>> common_module(["model.layers.0.mlp", "model.layers.1.mlp"])
    'model.layers.*.mlp'
    >>> common_module(["model.norm", "model.layers.1.norm"])
    'model.*'
    """
    paths = [module.split(".") for module in dict.fromkeys(modules)]
    if not paths:
        return ""
    if len({len(path) for path in paths}) == 1:
        return ".".join(parts[0] if len(set(parts)) == 1 else "*" for parts in zip(*paths, strict=True))
    shared = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join([*shared, "*"])
