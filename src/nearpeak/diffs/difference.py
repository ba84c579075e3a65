"""`difference`: what changed between two profiles of a step, by part and by op, and whether it is significant.

Two runs of the same code never take the same time: the GPU is warmer, its clock is lower, memory is placed differently.
A step has changed if its wall time differs by more than that of runs of the same code, or if ops that changed account
for the difference. An op has changed if its time differs by more than the clock and the scatter of its kind explain:
see `significance`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from statistics import median
from typing import Literal

from nearpeak._display import Result, headline
from nearpeak.diffs.match import Match, Relation, common_shares, match_ops, operator_name
from nearpeak.diffs.significance import (
    CPU_PRIOR,
    GPU_PRIOR,
    MIN_STEPS,
    ChangeRange,
    NoiseModel,
    OpKind,
    clean_walls,
    excess,
    is_unsteady,
    op_kind,
    step_noise,
    time_limiter,
)
from nearpeak.profiles.finding import MIN_SHOWN_SHARE, Finding, common_module
from nearpeak.profiles.grade import grade_profile
from nearpeak.profiles.idle import CauseName, IdleCause
from nearpeak.profiles.profile import Profile, ProfiledOp
from nearpeak.profiles.waterfall import PartName
from nearpeak.units import percent, quantity, seconds

Verdict = Literal["slower", "faster", "same"]
StepVerdict = Literal[Verdict, "different programs"]

MIN_OP_SHARE = 0.0005
"""Of the wall time. Smaller changes of ops are not listed."""
OUTLIER_SHARE = 0.005
"""Of the wall time. A single op that changes by less is judged with the others of its kind."""
EXPLAINED_RANGE = (0.5, 2.0)
"""Ops account for a change of the wall time if their changes sum to a share of it in this range."""
MIN_EXPLAINED_SHARE = 0.005
"""Of the wall time. The least that the changes of these ops must sum to."""
MAX_CLOCK_CHANGE = 0.035
"""The change of the step time, as a logarithm, that the clock of a GPU may cause although neither ops nor idle time
account for it: 3.1 % between two processes of the same code on an H200 at its power limit."""
MIN_IDLE_CHANGE = 0.25
"""Of the larger time. Idle time of a cause that changes by less is considered unchanged."""
MIN_WORK_CHANGE = 0.01
"""Of the FLOPs. A step whose FLOPs change by more does different work."""
MIN_COMMON_SHARE = 0.5
"""Of the kernel time of one of the runs at least. With less in ops that both have, the runs are of different programs;
a change of one program leaves most of the ops of the faster run in both."""
MIN_COMMON_SHARE_SAME_NAME = 0.15
"""The same where both runs are of a file of one name, which may have been rewritten."""
MAX_WORK_CHANGE_REWRITTEN = 0.05
"""Of the FLOPs. A program that was rewritten has other ops and does the same work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """One run, without its ops."""

    source: str
    date: str
    device: str
    machine: str
    how: str
    wall_s: float
    """As in its report: the mean clean step."""
    step_s: float
    """The median clean step, which a slow first step does not move; the wall time if one run does not have it."""
    steps: int
    spread: float | None
    kernel_s: float
    """The typical kernel time of the profiled steps, as ops are compared."""
    flops: float
    peak_bytes: float | None
    """Of memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartChange:
    """A part of the waterfall in both runs."""

    name: PartName
    before_s: float
    after_s: float

    @property
    def change_s(self) -> float:
        """Positive if it takes longer in the later run."""
        return self.after_s - self.before_s


@dataclass(frozen=True, slots=True, kw_only=True)
class OpChange:
    """Ops that do the same work in both runs, and whose time changed significantly."""

    relation: Relation
    verdict: Verdict
    names_before: tuple[str, ...]
    """Operators, the one with the longest time first."""
    names_after: tuple[str, ...]
    phase: str
    module: str
    """In the later run, or in the earlier one if they are gone; with a star for the parts that differ."""
    source: str
    """The line with the longest time."""
    count_before: int
    count_after: int
    before_s: float
    after_s: float
    noise: float | None
    """The largest insignificant change, as a logarithm; None for ops that are in one run only."""

    @property
    def change_s(self) -> float:
        """Positive if they take longer in the later run."""
        return self.after_s - self.before_s


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleChange:
    """Idle time of one cause in both runs, all places together."""

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
        """Positive if there is more in the later run."""
        return self.after_s - self.before_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference(Result):
    """Two profiles, the later relative to the earlier."""

    before: RunSummary
    after: RunSummary
    verdict: StepVerdict
    ratio: float
    """Of the step times."""
    noise: float
    """The largest insignificant change of the step time, as a logarithm."""
    explained: bool
    """Whether ops that changed significantly account for most of the change."""
    by_clock: bool
    """Whether the change is more than noise and no more than the clock of a GPU causes, and neither ops nor idle time
    account for it."""
    drift: float | None
    """The ratio of times that memory-bound kernels have in common; on a CPU, all kernels. None if too few are in both
    runs, or they have none in common."""
    clock: float | None
    """The ratio of times of compute-bound kernels, which follow the clock of a GPU; None without any."""
    parts: tuple[PartChange, ...]
    ops: tuple[OpChange, ...]
    """Significant changes, the largest first."""
    idle: tuple[IdleChange, ...]
    """Causes whose time changed, the largest change first."""
    appeared: tuple[Finding, ...]
    gone: tuple[Finding, ...]
    steady: bool = True
    """False if the clean steps of a run are so far apart that its ops say nothing: ops are not compared one to one."""
    doubts: tuple[str, ...] = ()
    """Why nothing can be said about the step time with confidence."""
    common_shares: tuple[float, float] = (1.0, 1.0)
    """Of the kernel time of each run, the share of ops that the other run has too."""
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        step = f"{seconds(self.before.step_s)} -> {seconds(self.after.step_s)} a step, {100 * self.change:+.1f} %"
        return headline(f"Difference of {self.before.source} and {self.after.source}: {self.verdict}, {step}")

    @property
    def change(self) -> float:
        """The relative change of the step time; positive if a step takes longer in the later run."""
        return self.ratio - 1.0

    @property
    def interval(self) -> tuple[float, float]:
        """The range of changes that noise leaves possible."""
        return self.ratio * math.exp(-self.noise) - 1.0, self.ratio * math.exp(self.noise) - 1.0


def difference(before: Profile, after: Profile) -> Difference:
    """What changed from one profile to another."""
    runs = _summarize_runs(before, after)
    steady = not (is_unsteady(before) or is_unsteady(after))
    ratio = runs[1].step_s / runs[0].step_s if runs[0].step_s and runs[1].step_s else 1.0
    noise = step_noise(before, after)
    model, ops, beyond_s = _op_changes(before, after, steady)
    changed_s = runs[1].step_s - runs[0].step_s
    idle = _idle_changes(before, after, noise)
    explained = (
        steady
        and abs(beyond_s) >= MIN_EXPLAINED_SHARE * runs[0].step_s
        and changed_s != 0.0
        and EXPLAINED_RANGE[0] <= beyond_s / changed_s <= EXPLAINED_RANGE[1]
    )
    significant = ratio != 1.0 and (abs(math.log(ratio)) > noise or explained)
    by_clock = False
    if significant and model.clock is not None and abs(math.log(ratio)) <= MAX_CLOCK_CHANGE:
        accounted_s = beyond_s + sum(change.change_s for change in idle)
        by_clock = accounted_s / changed_s < EXPLAINED_RANGE[0]
    shares = common_shares(before, after)
    verdict: StepVerdict = "same" if by_clock or not significant else "slower" if ratio > 1.0 else "faster"
    return Difference(
        before=runs[0],
        after=runs[1],
        verdict="different programs" if _are_different_programs(before, after, max(shares)) else verdict,
        ratio=ratio,
        noise=noise,
        explained=explained,
        by_clock=by_clock,
        drift=None if model.drift is None else math.exp(model.drift),
        clock=None if model.clock is None or model.clock.change is None else math.exp(model.clock.change),
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
        common_shares=shares,
        notes=tuple(_notes(before, after)),
    )


def _are_different_programs(before: Profile, after: Profile, common_share: float) -> bool:
    names = [PurePath(profile.source.replace("\\", "/")).name for profile in (before, after)]
    is_same_work = before.flops and abs(after.flops / before.flops - 1.0) <= MAX_WORK_CHANGE_REWRITTEN
    return not is_same_work and common_share < (
        MIN_COMMON_SHARE_SAME_NAME if names[0] == names[1] else MIN_COMMON_SHARE
    )


def _summarize_runs(before: Profile, after: Profile) -> tuple[RunSummary, RunSummary]:
    """Both runs, with the median clean step of both or the wall time of both as the time of a step."""
    has_median = all(len(clean_walls(profile)) >= MIN_STEPS for profile in (before, after))
    first, second = (
        RunSummary(
            source=profile.source,
            date=profile.date,
            device=profile.device,
            machine=profile.machine,
            how=profile.how,
            wall_s=profile.wall_s,
            step_s=median(profile.walls) if has_median else profile.wall_s,
            steps=profile.steps,
            spread=profile.spread,
            kernel_s=profile.kernel_s + sum(op.compared_s - op.measured_s for op in profile.ops),
            flops=profile.flops,
            peak_bytes=None if profile.memory is None else profile.memory.peak_bytes,
        )
        for profile in (before, after)
    )
    return first, second


def _op_changes(before: Profile, after: Profile, steady: bool) -> tuple[NoiseModel, list[OpChange], float]:
    """The noise model, the ops that changed significantly, and the sum of their changes in seconds."""
    prior = CPU_PRIOR if "cpu" in (before.device, after.device) else GPU_PRIOR
    bandwidths = [run.ceilings.bandwidth for run in (before, after) if run.ceilings is not None]
    bandwidth = min(bandwidths, default=None)
    outlier_s = OUTLIER_SHARE * before.wall_s
    kinds: list[tuple[Match, OpKind | None]] = [
        (match, op_kind(match, prior, outlier_s, bandwidth) if match.is_one_to_one else None)
        for match in match_ops(before, after)
    ]
    # On another device every kernel changes in its own way, and all of that is significant.
    same_device = before.device == after.device
    model = NoiseModel([kind for _, kind in kinds if kind is not None] if same_device else [], prior)
    if not steady:  # the profiled step may be any of them
        kinds = [(match, kind) for match, kind in kinds if not match.is_one_to_one]
    least_s = MIN_OP_SHARE * before.wall_s
    changes: list[OpChange] = []
    total_s = 0.0
    for match, kind in kinds:
        explained = model.explained(kind)
        noise = model.noise_of(time_limiter(match, bandwidth)) if kind is None else model.noise(kind)
        for part, change in _parts_to_judge(match, kind, explained):
            beyond = change if change is None else excess(change, explained)
            beyond_s = part.after_s - part.before_s
            if change is not None and beyond is not None:
                beyond_s = part.after_s - math.exp(change - beyond) * part.before_s
            if abs(beyond_s) >= least_s and (beyond is None or abs(beyond) > noise):
                verdict: Verdict = "slower" if beyond_s > 0.0 else "faster"
                changes.append(_op_change(part, verdict, None if beyond is None else noise))
                total_s += beyond_s
    return model, changes, total_s


def _parts_to_judge(match: Match, kind: OpKind | None, explained: ChangeRange) -> Iterator[tuple[Match, float | None]]:
    """The ops that are judged together, and their change as a logarithm if they have one."""
    if kind is None:
        ratio = match.after_s / match.before_s if match.before_s and match.after_s else None
        yield match, None if ratio is None else math.log(ratio)
        return
    if kind.outliers:
        outliers = _subset(match, kind.outliers)
        yield outliers, math.log(outliers.after_s / outliers.before_s)
        match = _subset(match, [position for position in range(len(match.before)) if position not in kind.outliers])
    # Both must have changed: most of the ops, and their sum, which is what the report shows.
    changes = kind.change, math.log(match.after_s / match.before_s)
    yield match, min(changes, key=lambda change: abs(excess(change, explained)))


def _subset(match: Match, positions: Sequence[int]) -> Match:
    return Match(
        relation=match.relation,
        before=[match.before[position] for position in positions],
        after=[match.after[position] for position in positions],
    )


def _op_change(match: Match, verdict: Verdict, noise: float | None) -> OpChange:
    shown = match.after or match.before
    return OpChange(
        relation=match.relation,
        verdict=verdict,
        names_before=_by_time(match.before, operator_name),
        names_after=_by_time(match.after, operator_name),
        phase=shown[0].phase,
        module=common_module([op.module for op in shown]),
        source=_by_time(shown, lambda op: op.source)[0],
        count_before=len(match.before),
        count_after=len(match.after),
        before_s=match.before_s,
        after_s=match.after_s,
        noise=noise,
    )


def _by_time(ops: Sequence[ProfiledOp], key: Callable[[ProfiledOp], str]) -> tuple[str, ...]:
    """The keys of ops, the one with the longest time first."""
    totals: dict[str, float] = {}
    for op in ops:
        totals[key(op)] = totals.get(key(op), 0.0) + op.compared_s
    return tuple(sorted(totals, key=lambda name: -totals[name]))


def _idle_changes(before: Profile, after: Profile, noise: float) -> list[IdleChange]:
    """By cause. Idle time is what is left of the wall time, so it is as uncertain as that."""
    changes = []
    least_s = math.expm1(noise) * before.wall_s
    for cause in dict.fromkeys(entry.cause for entry in (*before.idle, *after.idle)):
        first, second = ([entry for entry in run.idle if entry.cause == cause] for run in (before, after))
        before_s, after_s = (sum(entry.seconds for entry in entries) for entries in (first, second))
        if abs(after_s - before_s) > max(least_s, MIN_IDLE_CHANGE * max(before_s, after_s)):
            where, what = _most_changed_place(first, second)
            changes.append(
                IdleChange(
                    cause=cause,
                    before_s=before_s,
                    after_s=after_s,
                    count_before=sum(entry.count for entry in first),
                    count_after=sum(entry.count for entry in second),
                    where=where,
                    what=what,
                )
            )
    return sorted(changes, key=lambda change: -abs(change.change_s))


def _most_changed_place(before: Sequence[IdleCause], after: Sequence[IdleCause]) -> tuple[str, str]:
    totals: dict[tuple[str, str], float] = {}
    for sign, entries in ((-1.0, before), (1.0, after)):
        for entry in entries:
            place = entry.where, entry.what
            totals[place] = totals.get(place, 0.0) + sign * entry.seconds
    return max(totals, key=lambda place: abs(totals[place]))


def _findings_only_in(run: Profile, other: Profile) -> tuple[Finding, ...]:
    """Findings of one run that are large enough to be shown, and that the other does not have, even small.

    Lines move and modules are renamed, so a finding is paired with one of the same rule: at the same file and module if
    there is one, otherwise with any that is left.
    """
    left = list(other.findings)
    unpaired = []
    for finding in run.findings:
        same = next((known for known in left if _finding_place(known) == _finding_place(finding)), None)
        if same is not None:
            left.remove(same)
        else:
            unpaired.append(finding)
    only = []
    for finding in unpaired:
        same = next((known for known in left if known.rule == finding.rule), None)
        if same is not None:
            left.remove(same)
        elif finding.share >= MIN_SHOWN_SHARE and finding.rule not in other.undecided:
            only.append(finding)
    return tuple(only)


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
        grade = grade_profile(profile)
        if not grade.is_trusted:
            yield f"The {name} run has grade {grade.letter}: {grade.reasons[0]}."
