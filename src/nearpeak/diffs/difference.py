"""`difference`: what changed between two profiles of a step, by part and by op, and whether it is real.

Two runs of the same code never take the same time: a GPU is warmer, its clock is lower, memory lies elsewhere. A step
has changed when its wall time did by more than runs of the same code differ, or when ops did that account for it. An
op has changed when it did by more than the clock and the scatter of its kind explain: see `scatter`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from nearpeak.diffs.match import Match, Relation, match_ops, operator_name
from nearpeak.diffs.noise import RunSummary, is_unsteady, step_noise, summarize_runs
from nearpeak.diffs.significance import (
    CPU_PRIOR,
    GPU_PRIOR,
    ChangeRange,
    NoiseModel,
    OpKind,
    excess,
    op_kind,
    time_limiter,
)
from nearpeak.profiles.finding import MIN_SHOWN_SHARE, Finding, common_module
from nearpeak.profiles.idle import CauseName, IdleCause
from nearpeak.profiles.profile import Profile, ProfiledOp
from nearpeak.profiles.waterfall import PartName
from nearpeak.units import percent, quantity

Verdict = Literal["slower", "faster", "same"]

MIN_OP_SHARE = 0.0005
"""Of the wall time: ops that change by less are not named."""
OUTLIER_SHARE = 0.005
"""Of the wall time: a single op that changes by less than this goes with the others of its kind."""
EXPLAINED_RANGE = (0.5, 2.0)
"""Ops account for a change of the wall time where they changed by this much of it."""
MIN_EXPLAINED_SHARE = 0.005
"""Of the wall time that these ops must have changed by."""
MAX_CLOCK_CHANGE = 0.035
"""The change of a step's time, as a logarithm, that the clock of a GPU may have made where neither ops nor idle time
account for it: 3.1 % between two processes of the same code on an H200 at the limit of its power."""
MIN_IDLE_CHANGE = 0.25
"""Of the larger time: idle time of a cause that changes by less is as it was."""
MIN_WORK_CHANGE = 0.01
"""Of the FLOPs: a step with more or fewer does other work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartChange:
    """A part of the waterfall in both runs."""

    name: PartName
    before_s: float
    after_s: float

    @property
    def change_s(self) -> float:
        """Above zero where it takes longer now."""
        return self.after_s - self.before_s


@dataclass(frozen=True, slots=True, kw_only=True)
class OpChange:
    """Ops that do the same work in both runs, and whose time really changed."""

    how: Relation
    verdict: Verdict
    names_before: tuple[str, ...]
    """Operators, the one that takes longest first."""
    names_after: tuple[str, ...]
    phase: str
    module: str
    """In the later run, or in the earlier one where they are gone; a star for what differs."""
    source: str
    """The line of that with most time."""
    count_before: int
    count_after: int
    before_s: float
    after_s: float
    noise: float | None
    """The change, as a logarithm, that could be chance; None for ops that are in one run alone."""

    @property
    def change_s(self) -> float:
        """Above zero where they take longer now."""
        return self.after_s - self.before_s


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleChange:
    """Idle time of one cause in both runs, all its places together."""

    cause: CauseName
    before_s: float
    after_s: float
    count_before: int
    count_after: int
    where: str
    """The place that changed most."""
    what: str

    @property
    def change_s(self) -> float:
        """Above zero where it is more now."""
        return self.after_s - self.before_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Two profiles, the later against the earlier."""

    before: RunSummary
    after: RunSummary
    verdict: Verdict
    ratio: float
    """Of the times of a step."""
    noise: float
    """The change of that, as a logarithm, that could be chance."""
    explained: bool
    """Whether ops that really changed account for most of it."""
    by_clock: bool
    """Whether it is more than noise, and no more than the clock of a GPU does, with neither ops nor idle time that
    account for it."""
    drift: float | None
    """The ratio that kernels have in common which wait for memory; of a CPU, all. None where too few are in both runs,
    or they have none in common."""
    clock: float | None
    """The ratio of kernels that are limited by compute, which follow the clock of a GPU; None where there are none."""
    parts: tuple[PartChange, ...]
    ops: tuple[OpChange, ...]
    """Those that are real, the largest change first."""
    idle: tuple[IdleChange, ...]
    """Causes whose time changed, the largest change first."""
    appeared: tuple[Finding, ...]
    gone: tuple[Finding, ...]
    steady: bool = True
    """False where clean steps of a run are so far apart that its ops say nothing: none of them is compared alone."""
    doubts: tuple[str, ...] = ()
    """Why nothing can be said of the wall time with confidence."""
    notes: tuple[str, ...] = ()

    @property
    def change(self) -> float:
        """Of the time of a step, relatively; above zero where it takes longer now."""
        return self.ratio - 1.0

    @property
    def interval(self) -> tuple[float, float]:
        """The changes that noise leaves possible."""
        return self.ratio * math.exp(-self.noise) - 1.0, self.ratio * math.exp(self.noise) - 1.0


def difference(before: Profile, after: Profile) -> Difference:
    """What changed from one profile to another."""
    runs = summarize_runs(before, after)
    steady = not (is_unsteady(before) or is_unsteady(after))
    ratio = runs[1].step_s / runs[0].step_s if runs[0].step_s and runs[1].step_s else 1.0
    noise = step_noise(before, after)
    scatter, ops, beyond_s = _op_changes(before, after, steady)
    changed_s = runs[1].step_s - runs[0].step_s
    idle = _idle_changes(before, after, noise)
    explained = (
        steady
        and abs(beyond_s) >= MIN_EXPLAINED_SHARE * runs[0].step_s
        and changed_s != 0.0
        and EXPLAINED_RANGE[0] <= beyond_s / changed_s <= EXPLAINED_RANGE[1]
    )
    real = ratio != 1.0 and (abs(math.log(ratio)) > noise or explained)
    by_clock = False
    if real and scatter.clock is not None and abs(math.log(ratio)) <= MAX_CLOCK_CHANGE:
        accounted_s = beyond_s + sum(change.change_s for change in idle)
        by_clock = accounted_s / changed_s < EXPLAINED_RANGE[0]
    return Difference(
        before=runs[0],
        after=runs[1],
        verdict="same" if by_clock or not real else "slower" if ratio > 1.0 else "faster",
        ratio=ratio,
        noise=noise,
        explained=explained,
        by_clock=by_clock,
        drift=None if scatter.drift is None else math.exp(scatter.drift),
        clock=None if scatter.clock is None or scatter.clock.change is None else math.exp(scatter.clock.change),
        parts=tuple(
            PartChange(name=part.name, before_s=part.seconds, after_s=after.waterfall.seconds(part.name))
            for part in before.waterfall.parts
        ),
        ops=tuple(sorted(ops, key=lambda change: -abs(change.change_s))),
        idle=tuple(idle),
        appeared=_findings_only_in(after, before),
        gone=_findings_only_in(before, after),
        steady=steady,
        doubts=tuple(_doubts(before, after)),
        notes=tuple(_notes(before, after)),
    )


def _op_changes(before: Profile, after: Profile, steady: bool) -> tuple[NoiseModel, list[OpChange], float]:
    """What is chance, the ops that changed beyond it, and by how many seconds these did."""
    found = match_ops(before, after)
    usual = CPU_PRIOR if "cpu" in (before.device, after.device) else GPU_PRIOR
    bandwidths = [run.ceilings.bandwidth for run in (before, after) if run.ceilings is not None]
    bandwidth = min(bandwidths, default=None)
    outlier_s = OUTLIER_SHARE * before.wall_s
    kinds: list[tuple[Match, OpKind | None]] = [
        (match, op_kind(match, usual, outlier_s, bandwidth) if match.is_one_to_one else None) for match in found
    ]
    # on another device every kernel changes in its own way, and all of that is real
    same = before.device == after.device
    scatter = NoiseModel([kind for _, kind in kinds if kind is not None] if same else [], usual)
    if not steady:  # the one profiled step may be any of them
        kinds = [(match, kind) for match, kind in kinds if not match.is_one_to_one]
    least_s = MIN_OP_SHARE * before.wall_s
    changes: list[OpChange] = []
    total_s = 0.0
    for match, kind in kinds:
        explained = scatter.explained(kind)
        noise = scatter.noise_of(time_limiter(match, bandwidth)) if kind is None else scatter.noise(kind)
        for part, change in _parts_to_judge(match, kind, explained):
            beyond = change if change is None else excess(change, explained)
            beyond_s = part.after_s - part.before_s
            if change is not None and beyond is not None:
                beyond_s = part.after_s - math.exp(change - beyond) * part.before_s
            if abs(beyond_s) >= least_s and (beyond is None or abs(beyond) > noise):
                verdict: Verdict = "slower" if beyond_s > 0.0 else "faster"
                changes.append(_op_change(part, verdict, None if beyond is None else noise))
                total_s += beyond_s
    return scatter, changes, total_s


def _parts_to_judge(match: Match, kind: OpKind | None, explained: ChangeRange) -> Iterator[tuple[Match, float | None]]:
    """The ops that are to be judged together, and their change as a logarithm where they have one."""
    if kind is None:
        ratio = match.after_s / match.before_s if match.before_s and match.after_s else None
        yield match, None if ratio is None else math.log(ratio)
        return
    if kind.outliers:
        alone = _subset(match, kind.outliers)
        yield alone, math.log(alone.after_s / alone.before_s)
        match = _subset(match, [at for at in range(len(match.before)) if at not in kind.outliers])
    # most of them must have changed, and their sum, which is shown
    changes = kind.change, math.log(match.after_s / match.before_s)
    yield match, min(changes, key=lambda one: abs(excess(one, explained)))


def _subset(match: Match, positions: Sequence[int]) -> Match:
    return Match(
        how=match.how, before=[match.before[at] for at in positions], after=[match.after[at] for at in positions]
    )


def _op_change(match: Match, verdict: Verdict, noise: float | None) -> OpChange:
    shown = match.after or match.before
    return OpChange(
        how=match.how,
        verdict=verdict,
        names_before=_operator_names(match.before),
        names_after=_operator_names(match.after),
        phase=shown[0].phase,
        module=common_module([op.module for op in shown]),
        source=_main_line(shown),
        count_before=len(match.before),
        count_after=len(match.after),
        before_s=match.before_s,
        after_s=match.after_s,
        noise=noise,
    )


def _operator_names(ops: Sequence[ProfiledOp]) -> tuple[str, ...]:
    totals: dict[str, float] = {}
    for op in ops:
        totals[operator_name(op)] = totals.get(operator_name(op), 0.0) + op.compared_s
    return tuple(sorted(totals, key=lambda name: -totals[name]))


def _main_line(ops: Sequence[ProfiledOp]) -> str:
    totals: dict[str, float] = {}
    for op in ops:
        totals[op.source] = totals.get(op.source, 0.0) + op.compared_s
    return max(totals, key=lambda source: totals[source])


def _idle_changes(before: Profile, after: Profile, noise: float) -> list[IdleChange]:
    """By cause. The idle time is what is left of the wall time, so it is as uncertain as that."""
    found = []
    least_s = math.expm1(noise) * before.wall_s
    for cause in dict.fromkeys(entry.cause for entry in (*before.idle, *after.idle)):
        first, second = ([entry for entry in run.idle if entry.cause == cause] for run in (before, after))
        before_s, after_s = (sum(entry.seconds for entry in entries) for entries in (first, second))
        if abs(after_s - before_s) > max(least_s, MIN_IDLE_CHANGE * max(before_s, after_s)):
            place = _most_changed(first, second)
            found.append(
                IdleChange(
                    cause=cause,
                    before_s=before_s,
                    after_s=after_s,
                    count_before=sum(entry.count for entry in first),
                    count_after=sum(entry.count for entry in second),
                    where=place[0],
                    what=place[1],
                )
            )
    return sorted(found, key=lambda change: -abs(change.change_s))


def _most_changed(before: Sequence[IdleCause], after: Sequence[IdleCause]) -> tuple[str, str]:
    totals: dict[tuple[str, str], float] = {}
    for sign, entries in ((-1.0, before), (1.0, after)):
        for entry in entries:
            place = entry.where, entry.what
            totals[place] = totals.get(place, 0.0) + sign * entry.seconds
    return max(totals, key=lambda place: abs(totals[place]))


def _findings_only_in(one: Profile, other: Profile) -> tuple[Finding, ...]:
    """Findings of one run that are worth showing, and that the other does not have, even small.

    Lines move and modules get other names, so a finding goes with one of the same rule: at the same file and module
    where there is one, else with any that is left.
    """
    left = list(other.findings)
    rest = []
    for finding in one.findings:
        same = next((known for known in left if _finding_place(known) == _finding_place(finding)), None)
        if same is not None:
            left.remove(same)
        else:
            rest.append(finding)
    new = []
    for finding in rest:
        same = next((known for known in left if known.rule == finding.rule), None)
        if same is not None:
            left.remove(same)
        elif finding.share >= MIN_SHOWN_SHARE and finding.rule not in other.undecided:
            new.append(finding)
    return tuple(new)


def _finding_place(finding: Finding) -> tuple[str, str, str]:
    return finding.rule, finding.source.rpartition(":")[0], finding.module


def _doubts(before: Profile, after: Profile) -> Iterable[str]:
    if before.device != after.device:
        yield f"the runs were on different devices, {before.device} and {after.device}"
    for name, profile in (("first", before), ("second", after)):
        if not profile.steps:
            yield f"the {name} run has no clean steps, only one under the profiler"


def _notes(before: Profile, after: Profile) -> Iterable[str]:
    if before.device == after.device and (before.machine, before.how) != (after.machine, after.how):
        yield (
            f"The bounds are against different ceilings ({before.machine}, {before.how}; {after.machine}, {after.how}):"
            " parts of the waterfall changed with these too."
        )
    if before.flops and abs(after.flops / before.flops - 1.0) > MIN_WORK_CHANGE:
        yield (
            f"The steps do different work: {quantity(before.flops, 'FLOP')} before, {quantity(after.flops, 'FLOP')} "
            f"now ({percent(after.flops / before.flops - 1.0)})."
        )
    compiled = [profile.compiler is not None and profile.compiler.graphs > 0 for profile in (before, after)]
    if compiled[0] != compiled[1]:
        yield f"The {'second' if compiled[1] else 'first'} run is compiled, the other is not."
    for name, profile in (("first", before), ("second", after)):
        if is_unsteady(profile):
            yield (
                f"Clean steps of the {name} run are {percent(profile.spread, 0)} apart: something else ran as well, so "
                "single ops say nothing."
            )
        if profile.waterfall.broken:
            yield f"The {name} run has a part of the waterfall below zero: do not trust its parts."
