"""Which changes between two runs are significant: of kernel times (`NoiseModel`) and of the step time (`step_noise`).

All changes are logarithms of the later time over the earlier one. Ops of one kind (`OpKind`) are judged together:

    drift       what memory-bound kernels have in common; on a CPU, all kernels: another process, for example
    clock       the part of a kernel's change that the GPU clock explains (`ClockModel`)
    error       the standard error of the change of one kind, from how far its ops differ from each other
    by kind     how far unchanged kinds differ between runs: placement in memory, power. It is estimated from all
                other kinds of the same two runs.

A kind has changed if it lies further outside the drift and the clock's range than its error and the spread between
kinds make likely.

A GPU at its power limit lowers its clock, by a few percent and from step to step. The GEMMs of one step took 681 to
747 us on an H200, in steps and processes of the same code. Each kernel has its own elasticity to the clock: the layer
norm and the GELU next to these GEMMs changed 1.7 times as much, and memory-bound kernels did not change at all. So
there is no common factor to divide by; but if compute-bound kernels changed by c, a kernel with elasticity e may have
changed by anything from 0 to e times c. The elasticity is measured if several steps of a run were profiled and the
clock changed between them. Otherwise it is small for kernels close to the memory bandwidth, and as large as the largest
measured one for all others.

The clean steps of a run follow each other and share clock, temperature and memory placement, so their spread says too
little about another run. On an H200, five models in separate processes differed by -0.3 to +0.6 % if steps of the same
numbers were compared, and by up to 3 % if not: clean steps begin when step times have settled, a few steps earlier or
later. Short steps even share the clock of one instant, so that many of them are one sample.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev
from typing import Literal

from nearpeak.diffs.match import Match
from nearpeak.profiles.profile import Profile, ProfiledOp

TimeLimiter = Literal["compute", "memory", "other"]
"""What the time of a kernel depends on: the clock; the memory, if it moves its bytes at nearly full bandwidth; or
either, if it is memory-bound by its work and far from the bandwidth, or if nothing is known about its work."""
ChangeRange = tuple[float, float]

MEMORY_BOUND_SHARE = 0.75
"""Of the bandwidth. A kernel that moves its bytes this fast does not depend on the clock."""
OUTLIER_CHANGE = 0.25
"""An outlier differs from its kind by more than this, and by more than ten standard deviations."""
TRIMMED_WEIGHT = 0.125
"""The share of the weight at either end that a trimmed mean leaves out."""
_NORMAL_MAD, _NORMAL_TENTH = 1.4826, 1.645


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePrior:
    """What is known about a kind of device before two runs are compared, as relative standard deviations."""

    least: Mapping[TimeLimiter, float]
    """Smaller changes are never significant."""
    kinds: Mapping[TimeLimiter, float]
    """Of kinds between runs, beyond what they have in common."""
    op: float
    """Of one kernel, as a share of its time."""
    alone: float
    """The same for a compute-bound op of which there are fewer than three: it saw the clock of one instant."""
    jitter_s: float
    """What timers and launches add to each kernel."""
    most: float
    """Kinds cannot differ by more unless single ops do."""
    follows_clock: bool
    """Whether compute-bound kernels share a clock."""
    hiccups: bool
    """Whether a single op may take many times as long for no reason."""


GPU_PRIOR = DevicePrior(
    least={"compute": 0.02, "memory": 0.0125, "other": 0.02},
    kinds={"compute": 0.013, "memory": 0.003, "other": 0.005},
    op=0.01,
    alone=0.02,
    jitter_s=2e-7,
    most=0.02,
    follows_clock=True,
    hiccups=False,
)
"""From five models and two compiled ones on an H200, each in two or three processes with one profiled step. Beyond the
clock and their own errors, kinds of three or more ops have a standard deviation of 0.8 % if they are compute-bound,
with outliers up to 4 %, of 0.24 % if they are memory-bound, and of 0.2 % if neither is known. A GEMM of 10 ms that runs
once was up to 5 % off."""
CPU_PRIOR = DevicePrior(
    least={"compute": 0.20, "memory": 0.20, "other": 0.20},
    kinds={"compute": 0.05, "memory": 0.05, "other": 0.05},
    op=0.20,
    alone=0.20,
    jitter_s=2e-5,
    most=0.10,
    follows_clock=False,
    hiccups=True,
)
"""For a machine with other processes. A conservative guess."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpKind:
    """Ops of one kind in both runs: the change of their time, and its standard error."""

    match: Match
    change: float
    error: float
    op_scatter: float | None
    """The standard deviation of single ops; None if there are too few."""
    outliers: tuple[int, ...]
    """The positions of ops that changed far more than the others of their kind."""
    limits: TimeLimiter = "other"
    spreads: tuple[float | None, float | None] = (None, None)
    """For each run, the logarithm of the time of its ops in the slowest profiled step over that in the fastest; None
    if one step was profiled."""


def op_kind(match: Match, prior: DevicePrior, outlier_s: float, bandwidth: float | None = None) -> OpKind | None:
    """The change of ops that are matched one to one; None if a time is missing.

    Args:
        match: The ops of both runs.
        prior: What is known about the device.
        outlier_s: The change in seconds from which a single op can be an outlier.
        bandwidth: Of the memory, in bytes/s.
    """
    pairs = list(zip(match.before, match.after, strict=True))
    if any(before.compared_s <= 0.0 or after.compared_s <= 0.0 for before, after in pairs):
        return None
    limits = time_limiter(match, bandwidth)
    spreads = _step_spread(match.before), _step_spread(match.after)
    changes = [math.log(after.compared_s / before.compared_s) for before, after in pairs]
    weights = [before.compared_s for before, _ in pairs]
    kernel_s = sum(weights) / sum(before.kernels for before, _ in pairs)
    few = len(pairs) < 3
    op_error = math.hypot(prior.alone if few and limits == "compute" else prior.op, prior.jitter_s / kernel_s)
    if few:
        total = math.log(match.after_s / match.before_s)
        error = op_error / math.sqrt(len(pairs))
        return OpKind(
            match=match, change=total, error=error, op_scatter=None, outliers=(), limits=limits, spreads=spreads
        )
    middle = weighted_median(changes, weights)
    deviation = robust_deviation(sorted(abs(change - middle) for change in changes))
    outliers = tuple(
        position
        for position, (change, (before, after)) in enumerate(zip(changes, pairs, strict=True))
        if not prior.hiccups
        and abs(change - middle) > max(OUTLIER_CHANGE, 10.0 * deviation)
        and abs(after.compared_s - before.compared_s) > outlier_s
    )
    scatter = max(deviation, op_error / 2)  # a few ops may agree by chance
    effective_count = sum(weights) ** 2 / sum(weight**2 for weight in weights)  # short ops hardly count
    return OpKind(
        match=match,
        change=trimmed_mean(changes, weights),
        error=scatter / math.sqrt(effective_count),
        op_scatter=scatter,
        outliers=outliers,
        limits=limits,
        spreads=spreads,
    )


def time_limiter(match: Match, bandwidth: float | None) -> TimeLimiter:
    """What limits the longest op, in both runs."""
    longest = [max(ops, key=lambda op: op.compared_s) for ops in (match.before, match.after) if ops]
    if any(op.limiter == "compute" for op in longest):
        return "compute"
    memory_bound = bandwidth is not None and all(
        op.modeled and op.limiter == "memory" and op.bytes >= MEMORY_BOUND_SHARE * bandwidth * op.compared_s
        for op in longest
    )
    return "memory" if memory_bound else "other"


def trimmed_mean(values: Sequence[float], weights: Sequence[float]) -> float:
    """The mean without the lowest and the highest eighth of the weight, where ops of another kind may be.

    Times of one kernel often have two or three values that are 1 to 2 % apart; a median would pick one of them.

    >>> trimmed_mean([9.0, 1.0, 1.0, 1.0, 3.0, 3.0, 3.0, -5.0], [1.0] * 8)
    2.0
    """
    ordered = sorted(zip(values, weights, strict=True))
    total = sum(weights)
    low, high = TRIMMED_WEIGHT * total, (1.0 - TRIMMED_WEIGHT) * total
    passed = summed = 0.0
    for value, weight in ordered:
        summed += value * max(0.0, min(passed + weight, high) - max(passed, low))
        passed += weight
    return summed / (high - low)


def weighted_median(values: Sequence[float], weights: Sequence[float]) -> float:
    """The value with half of the weight on either side; the mean of two values that share the middle.

    >>> weighted_median([1.0, 2.0, 9.0], [1.0, 1.0, 1.0]), weighted_median([1.0, 2.0], [1.0, 1.0])
    (2.0, 1.5)
    """
    ordered = sorted(zip(values, weights, strict=True))
    half = sum(weights) / 2
    passed = 0.0
    for position, (value, weight) in enumerate(ordered):
        passed += weight
        if math.isclose(passed, half, rel_tol=1e-9) and position + 1 < len(ordered):
            return (value + ordered[position + 1][0]) / 2
        if passed >= half:
            return value
    return ordered[-1][0]


def robust_deviation(distances: Sequence[float]) -> float:
    """A standard deviation from sorted distances to the median: from the median distance, or from the ninth decile if
    that is larger and not an outlier."""
    if not distances:
        return 0.0
    middle = _NORMAL_MAD * median(distances)
    far = distances[math.floor(0.9 * (len(distances) - 1))] / _NORMAL_TENTH
    return max(middle, min(far, 2.0 * middle))


def _step_spread(ops: Sequence[ProfiledOp]) -> float | None:
    quickest_s = slowest_s = 0.0
    for op in ops:
        if op.quickest_s is None or op.slowest_s is None:
            return None
        quickest_s += op.quickest_s
        slowest_s += op.slowest_s
    return math.log(slowest_s / quickest_s) if quickest_s > 0.0 and slowest_s > 0.0 else None


MEMORY_BOUND_ELASTICITY = 0.2
"""The largest elasticity of a memory-bound kernel."""
STILL_ELASTICITY = 0.6
"""A kernel with a smaller measured elasticity is memory-bound: kernels that follow the clock have 0.9 or more, others
up to 0.3 by chance."""
MAX_ELASTICITY = 1.7
"""Of any kernel, if it was not measured: that of a layer norm and a GELU, from the lowest clock to the highest."""
MAX_SEEN_ELASTICITY = 3.0
"""Larger measured values are not trusted: a few steps do not show more."""
MIN_CLOCK_CHANGE = 0.01
"""How far the GEMMs of one run must differ between steps to measure the elasticity of others."""
ELASTICITY_ERRORS = 1.5
"""Standard errors that are added to a measured elasticity."""
UNKNOWN_CLOCK_CHANGE = 0.08
"""How far the clock may have changed if no kernel shows it."""


class ClockModel:
    """The clock of one run relative to that of another, as seen in kernel times."""

    def __init__(self, kinds: Sequence[OpKind]) -> None:
        self._compute_bound = [kind for kind in kinds if kind.limits == "compute"]
        self._others = [kind for kind in kinds if kind.limits == "other"]
        self.change = _median_change(self._compute_bound) if self._compute_bound else None
        """The change of compute-bound kernels; None without any."""

    def explains(self, kind: OpKind) -> ChangeRange:
        """The changes of these ops that the clock may have caused, estimated from the other kinds."""
        compute_bound = [other for other in self._compute_bound if other is not kind]
        others = [other for other in self._others if other is not kind]
        if compute_bound:
            return _range_from_zero([self.elasticity(kind) * _median_change(compute_bound)])
        if kind.limits == "compute":  # any of the others may follow the clock
            if not others:
                return -UNKNOWN_CLOCK_CHANGE, UNKNOWN_CLOCK_CHANGE
            return _range_from_zero(other.change for other in others)
        return _range_from_zero([_median_change(others)] if others and kind.limits == "other" else [])

    def elasticity(self, kind: OpKind) -> float:
        """The largest possible change of a kind relative to that of compute-bound kernels."""
        if kind.limits == "memory":
            return MEMORY_BOUND_ELASTICITY
        measured, _ = self._measured_elasticity(kind) or (0.0, 0.0)
        if self.is_clock_independent(kind):
            return max(measured, MEMORY_BOUND_ELASTICITY)
        return min(max(measured, MAX_ELASTICITY), MAX_SEEN_ELASTICITY)

    def is_clock_independent(self, kind: OpKind) -> bool:
        """Whether the clock changed between the steps of a run and the kind did not."""
        measured = self._measured_elasticity(kind)
        return kind.limits == "other" and measured is not None and sum(measured) <= STILL_ELASTICITY

    def _measured_elasticity(self, kind: OpKind) -> tuple[float, float] | None:
        """The change of a kind between the steps of both runs over that of GEMMs, and its error; None if the clock did
        not change."""
        along = squares = 0.0
        for run in (0, 1):
            own = kind.spreads[run]
            others = [spread for other in self._compute_bound if other is not kind and (spread := other.spreads[run])]
            if own is not None and others:
                clock = median(others)
                along, squares = along + own * clock, squares + clock**2
        if squares < MIN_CLOCK_CHANGE**2:
            return None
        return along / squares, ELASTICITY_ERRORS * kind.error / math.sqrt(squares)

    def explains_unmatched(self) -> ChangeRange:
        """The same for ops without one-to-one counterparts."""
        return _range_from_zero([MAX_ELASTICITY * (self.change or 0.0)])


def _median_change(kinds: Sequence[OpKind]) -> float:
    """The median change, weighted by accuracy and not by time: a long kernel may itself have changed."""
    return weighted_median([kind.change for kind in kinds], [1.0 / (0.01**2 + kind.error**2) for kind in kinds])


def _range_from_zero(changes: Iterable[float]) -> ChangeRange:
    """From no change to the furthest either way."""
    known = [0.0, *changes]
    return min(known), max(known)


SIGNIFICANT_ERRORS = 3.3
"""Standard errors from which a change is significant. Among a hundred kinds, one in ten pairs of equal runs has one
that is further away."""
PRIOR_KINDS = 8
"""The number of kinds that weigh as much as the prior."""
MIN_KINDS = 5
"""Fewer kinds show no drift that could be told from a change."""
MIN_AGREEING = 0.6
"""The share of the kinds that must agree on a drift."""


class NoiseModel:
    """What is noise between two runs."""

    def __init__(self, kinds: Sequence[OpKind], prior: DevicePrior) -> None:
        self._prior = prior
        # Very short kernels say little about differences between kinds; a kernel that runs once only shows the clock.
        accurate = [kind for kind in kinds if kind.error <= prior.op]
        clocked = prior.follows_clock and bool(kinds)
        self.clock = (
            ClockModel([kind for kind in kinds if kind.error <= max(prior.op, prior.alone)]) if clocked else None
        )
        """None if kernels do not share a clock."""
        self.drift = self._drift([kind for kind in accurate if self._limiter(kind) == "memory" or not clocked])
        """What memory-bound kernels have in common; None if they have nothing in common."""
        self._deviations = {
            name: sorted(self.beyond(kind) for kind in accurate if self._limiter(kind) == name) for name in prior.kinds
        }
        scatters = [kind.op_scatter for kind in accurate if kind.op_scatter is not None]
        self._most = max(prior.most, median(scatters) if scatters else 0.0)

    def explained(self, kind: OpKind | None) -> ChangeRange:
        """The changes of a kind that the drift and the clock explain; of None, for ops without counterparts."""
        drift = self.drift or 0.0
        if self.clock is None:
            return min(0.0, drift), max(0.0, drift)
        low, high = self.clock.explains_unmatched() if kind is None else self.clock.explains(kind)
        return min(low, drift), max(high, drift)

    def beyond(self, kind: OpKind) -> float:
        """The distance of a kind's change from what is explained."""
        return abs(excess(kind.change, self.explained(kind)))

    def noise(self, kind: OpKind) -> float:
        """The largest insignificant distance from what is explained."""
        error = math.hypot(self._kind_scatter(kind), kind.error)
        return max(self._prior.least[self._limiter(kind)], SIGNIFICANT_ERRORS * error)

    def noise_of(self, limiter: TimeLimiter) -> float:
        """The same for ops without one-to-one counterparts."""
        scatter = self._with_prior(limiter, self._deviations[limiter])
        return max(self._prior.least[limiter], SIGNIFICANT_ERRORS * scatter)

    def _limiter(self, kind: OpKind) -> TimeLimiter:
        """A kernel that did not change with the clock is memory-bound, whether its work is known or not."""
        return "memory" if self.clock is not None and self.clock.is_clock_independent(kind) else kind.limits

    def _drift(self, kinds: Sequence[OpKind]) -> float | None:
        """The median change if most kinds have it, weighted by accuracy and not by time."""
        if len(kinds) < MIN_KINDS:
            return None
        weights = [1.0 / (self._prior.op**2 + kind.error**2) for kind in kinds]
        middle = weighted_median([kind.change for kind in kinds], weights)
        agreeing = sum(
            weight
            for kind, weight in zip(kinds, weights, strict=True)
            if abs(kind.change - middle) <= SIGNIFICANT_ERRORS * math.hypot(self._prior.op, kind.error)
        )
        return middle if agreeing >= MIN_AGREEING * sum(weights) else None

    def _kind_scatter(self, kind: OpKind) -> float:
        """The scatter of all other kinds: a kind that changed must not widen its own interval."""
        limiter = self._limiter(kind)
        deviations = self._deviations[limiter]
        own = self.beyond(kind)
        position = bisect_left(deviations, own)
        if position < len(deviations) and deviations[position] == own:
            deviations = deviations[:position] + deviations[position + 1 :]
        return self._with_prior(limiter, deviations)

    def _with_prior(self, limiter: TimeLimiter, deviations: Sequence[float]) -> float:
        """The scatter with the prior mixed in, never below the prior: only what is beyond the clock is measured."""
        count = len(deviations)
        measured = min(robust_deviation(deviations), self._most)
        usual = self._prior.kinds[limiter]
        return max(usual, math.sqrt((count * measured**2 + PRIOR_KINDS * usual**2) / (count + PRIOR_KINDS)))


def excess(change: float, explained: ChangeRange) -> float:
    """How far a change is outside of a range, with its sign; 0 inside.

    >>> excess(0.5, (0.0, 0.25)), excess(0.125, (0.0, 0.25)), excess(-0.5, (0.0, 0.25))
    (0.25, 0.0, -0.5)
    """
    return change - min(max(change, explained[0]), explained[1])


GPU_RUN_NOISE = 0.015
"""The largest relative difference of wall times of the same code between processes, on an otherwise unused GPU."""
CPU_RUN_NOISE = 0.10
"""The same for a CPU with other processes. A guess: on a busy machine with two cores they differed by far more, and so
did their steps."""
PROFILED_STEP_NOISE = 0.10
"""The same if the step of a run was one under the profiler."""
STEP_SIGNIFICANT_ERRORS = 3.0
"""Standard errors from which a change of the step time is significant."""
UNSTEADY_SPREAD = 0.20
"""With a larger spread between clean steps, something else ran in between, and may have run all the time."""
HOST_AHEAD_SHARE = 0.15
"""If the median of the clean steps is further from the wall time, the host did not see when they ended."""
CLOCK_PERIOD_S = 0.1
"""Seconds for which a GPU at its power limit stays at one clock: steps within them are one sample."""
MIN_STEPS = 6
"""With fewer steps, a single slow one moves the median."""


def step_noise(before: Profile, after: Profile) -> float:
    """The largest insignificant change of the step time, as a logarithm."""
    runs = CPU_RUN_NOISE if "cpu" in (before.device, after.device) else GPU_RUN_NOISE
    noise = math.hypot(runs, *(STEP_SIGNIFICANT_ERRORS * _step_error(profile) for profile in (before, after)))
    return max(noise, *(profile.spread or 0.0 for profile in (before, after) if is_unsteady(profile)), 0.0)


def is_unsteady(profile: Profile) -> bool:
    """Whether the clean steps are too far apart for one of them to represent the others."""
    return profile.spread is not None and profile.spread > UNSTEADY_SPREAD


def clean_walls(profile: Profile) -> Sequence[float]:
    """The clean steps, if the host saw the end of each."""
    walls = profile.walls
    return walls if walls and abs(median(walls) - profile.wall_s) <= HOST_AHEAD_SHARE * profile.wall_s else ()


def _step_error(profile: Profile) -> float:
    """The relative standard error of the step time, from the clean steps alone."""
    walls = clean_walls(profile)
    if not profile.steps:
        return PROFILED_STEP_NOISE / STEP_SIGNIFICANT_ERRORS
    if len(walls) < 2:  # only their range is known: for so many steps, three to four standard deviations
        if profile.steps > 1:
            return (profile.spread or 0.0) / 3.0 / math.sqrt(profile.steps)
        return UNSTEADY_SPREAD / STEP_SIGNIFICANT_ERRORS / 2
    samples = min(len(walls), max(1.0, sum(walls) / CLOCK_PERIOD_S))
    if len(walls) < MIN_STEPS:
        return stdev(walls) / fmean(walls) / math.sqrt(samples) * (1.0 + 2.0 / len(walls))
    middle = median(walls)
    return 1.2533 * 1.4826 * median(abs(wall - middle) for wall in walls) / middle / math.sqrt(samples)
