"""`NoiseModel`: which changes of kernel times between two runs are significant, and which are noise or the GPU clock.

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
norm and the GELU next to these GEMMs changed 1.7 times as much, and memory-bound kernels did not change at all. So there
is no common factor to divide by; but if compute-bound kernels changed by c, a kernel with elasticity e may have changed
by anything from 0 to e times c. The elasticity is measured where several steps of a run were profiled and the clock
changed between them. Otherwise it is small for kernels close to the memory bandwidth, and as large as the largest
measured one for all others.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from nearpeak.diffs.match import Match
from nearpeak.profiles.profile import ProfiledOp

TimeLimiter = Literal["compute", "memory", "other"]
"""What a kernel's time depends on: the clock; the memory alone, as it moves bytes about as fast as that can; or either:
it is limited by memory by its work, and does not get near it, or nothing is known of its work."""

MEMORY_BOUND_SHARE = 0.75
"""Of the bandwidth: a kernel that moves its bytes this fast waits for memory, whatever the clock is."""
OUTLIER_CHANGE = 0.25
"""An op of one of its own differs from its kind by more, and by ten standard deviations."""
TRIMMED_WEIGHT = 0.125
"""Of the weight at either end, which a mean leaves out."""
_NORMAL_MAD, _NORMAL_TENTH = 1.4826, 1.645


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePrior:
    """What is known of such a device before anything is seen of the runs, as relative standard deviations."""

    least: Mapping[TimeLimiter, float]
    """A smaller change is never called real."""
    kinds: Mapping[TimeLimiter, float]
    """Of kinds from run to run, beside what they have in common."""
    op: float
    """Of one kernel, as a share of its time."""
    alone: float
    """The same of an op that computes and of which there are not three: it saw the clock of one instant."""
    jitter_s: float
    """What clocks and launches add to each."""
    most: float
    """Kinds cannot differ by more without single ops differing by as much."""
    follows_clock: bool
    """Whether kernels that compute have a clock in common."""
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
"""From five models and two compiled ones on an H200, each in two or three processes, one step profiled in each. Beside
what the clock explains and their own errors, kinds of three ops or more have a standard deviation of 0.8 % where they
compute, with single ones up to 4 % off, of 0.24 % where memory holds them, and of 0.2 % where neither is known. A
product of 10 ms that runs once was up to 5 % off."""
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
"""Where other processes run too. A guess, on the side of saying nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpKind:
    """Ops of one kind in both runs: how much longer they take, as a logarithm, and its standard error."""

    match: Match
    change: float
    error: float
    op_scatter: float | None
    """The standard deviation of single ops; None where there are too few."""
    outliers: tuple[int, ...]
    """The positions of ops that changed far more than the others of their kind."""
    limits: TimeLimiter = "other"
    spreads: tuple[float | None, float | None] = (None, None)
    """Of each run, how much longer its ops took in the slowest of the profiled steps than in the quickest, as a
    logarithm; None where one step was profiled."""


def op_kind(match: Match, usual: DevicePrior, outlier_s: float, bandwidth: float | None = None) -> OpKind | None:
    """The change of ops that are matched one by one; None where a time is missing.

    Args:
        match: The ops of both runs.
        usual: What is known of the device.
        outlier_s: By how many seconds a single op must change to be one of its own.
        bandwidth: Of the device's memory, in bytes per second.
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
    one = math.hypot(usual.alone if few and limits == "compute" else usual.op, usual.jitter_s / kernel_s)
    if few:
        total = math.log(match.after_s / match.before_s)
        error = one / math.sqrt(len(pairs))
        return OpKind(
            match=match, change=total, error=error, op_scatter=None, outliers=(), limits=limits, spreads=spreads
        )
    middle = weighted_median(changes, weights)
    mean = trimmed_mean(changes, weights)
    seen = robust_deviation(sorted(abs(change - middle) for change in changes))
    outliers = tuple(
        at
        for at, (change, (before, after)) in enumerate(zip(changes, pairs, strict=True))
        if not usual.hiccups
        and abs(change - middle) > max(OUTLIER_CHANGE, 10.0 * seen)
        and abs(after.compared_s - before.compared_s) > outlier_s
    )
    scatter = max(seen, one / 2)  # a few ops may agree by chance
    count = sum(weights) ** 2 / sum(weight**2 for weight in weights)  # short ones hardly count
    error = scatter / math.sqrt(count)
    return OpKind(
        match=match, change=mean, error=error, op_scatter=scatter, outliers=outliers, limits=limits, spreads=spreads
    )


def time_limiter(match: Match, bandwidth: float | None) -> TimeLimiter:
    """What the op with most of the time is limited by, in both runs."""
    longest = [max(ops, key=lambda op: op.compared_s) for ops in (match.before, match.after) if ops]
    if any(op.limiter == "compute" for op in longest):
        return "compute"
    held = bandwidth is not None and all(
        op.modeled and op.limiter == "memory" and op.bytes >= MEMORY_BOUND_SHARE * bandwidth * op.compared_s
        for op in longest
    )
    return "memory" if held else "other"


def trimmed_mean(values: Sequence[float], weights: Sequence[float]) -> float:
    """The mean without the lowest and the highest eighth of the weight, in which single ops of another kind are.

    Times of one kernel often have two or three values that are 1 to 2 % apart, and a median is one of them.

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
    """The value with half of the weight on either side; the mean of two where they share the middle.

    >>> weighted_median([1.0, 2.0, 9.0], [1.0, 1.0, 1.0]), weighted_median([1.0, 2.0], [1.0, 1.0])
    (2.0, 1.5)
    """
    ordered = sorted(zip(values, weights, strict=True))
    half = sum(weights) / 2
    passed = 0.0
    for at, (value, weight) in enumerate(ordered):
        passed += weight
        if math.isclose(passed, half, rel_tol=1e-9) and at + 1 < len(ordered):
            return (value + ordered[at + 1][0]) / 2
        if passed >= half:
            return value
    return ordered[-1][0]


def robust_deviation(deviations: Sequence[float]) -> float:
    """A standard deviation from sorted distances: of the middle, or of the far ones where these are not changes."""
    if not deviations:
        return 0.0
    middle = _NORMAL_MAD * median(deviations)
    far = deviations[math.floor(0.9 * (len(deviations) - 1))] / _NORMAL_TENTH
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
"""The largest elasticity of a kernel that waits for memory."""
STILL_ELASTICITY = 0.6
"""A kernel that was seen to move by less of what products did waits for memory: what follows the clock has 0.9 or more,
what does not has up to 0.3 by chance."""
MAX_ELASTICITY = 1.7
"""Of any kernel, where it was not seen: of a layer norm and a gelu, from the lowest clock to the highest."""
MAX_SEEN_ELASTICITY = 3.0
"""More is not believed: times of few steps say no more."""
MIN_CLOCK_CHANGE = 0.01
"""How far products of one run must differ from step to step to say how others follow them."""
ELASTICITY_ERRORS = 1.5
"""Standard errors by which what was seen of it may be too small."""
UNKNOWN_CLOCK_CHANGE = 0.08
"""How far the clock may have changed where no kernel tells."""
ChangeRange = tuple[float, float]


class ClockModel:
    """The clock of one run against that of another, as kernels show it. All changes are logarithms."""

    def __init__(self, kinds: Sequence[OpKind]) -> None:
        self._computing = [kind for kind in kinds if kind.limits == "compute"]
        self._others = [kind for kind in kinds if kind.limits == "other"]
        self.change = _median_change(self._computing) if self._computing else None
        """How much longer kernels take that compute; None where there are none."""

    def explains(self, kind: OpKind) -> ChangeRange:
        """The changes of these ops that the clock may have made: from other kinds, not from themselves."""
        computing = [other for other in self._computing if other is not kind]
        others = [other for other in self._others if other is not kind]
        if computing:
            return _range_from_zero([self.elasticity(kind) * _median_change(computing)])
        if kind.limits == "compute":  # the others may follow the clock or not, so each of them may be what tells
            return (
                _range_from_zero(other.change for other in others)
                if others
                else (-UNKNOWN_CLOCK_CHANGE, UNKNOWN_CLOCK_CHANGE)
            )
        return _range_from_zero([_median_change(others)] if others and kind.limits == "other" else [])

    def elasticity(self, kind: OpKind) -> float:
        """How many times as far as products it may move."""
        if kind.limits == "memory":
            return MEMORY_BOUND_ELASTICITY
        seen, _ = self._seen(kind) or (0.0, 0.0)
        return (
            max(seen, MEMORY_BOUND_ELASTICITY)
            if self.is_clock_independent(kind)
            else min(max(seen, MAX_ELASTICITY), MAX_SEEN_ELASTICITY)
        )

    def is_clock_independent(self, kind: OpKind) -> bool:
        """Whether it was seen not to move while the clock did."""
        seen = self._seen(kind)
        return kind.limits == "other" and seen is not None and sum(seen) <= STILL_ELASTICITY

    def _seen(self, kind: OpKind) -> tuple[float, float] | None:
        """How far it moved from step to step in both runs, over how far products did, and by how much that may be more.

        None where the clock stood still.
        """
        along = squares = 0.0
        for run in (0, 1):
            own = kind.spreads[run]
            theirs = [spread for other in self._computing if other is not kind and (spread := other.spreads[run])]
            if own is not None and theirs:
                moved = median(theirs)
                along, squares = along + own * moved, squares + moved**2
        if squares < MIN_CLOCK_CHANGE**2:
            return None
        return along / squares, ELASTICITY_ERRORS * kind.error / math.sqrt(squares)

    def explains_unmatched(self) -> ChangeRange:
        """The same for ops that have no counterpart one by one."""
        return _range_from_zero([MAX_ELASTICITY * (self.change or 0.0)])


def _median_change(kinds: Sequence[OpKind]) -> float:
    """The median change. A long kernel counts as much as others: it may have changed."""
    return weighted_median([kind.change for kind in kinds], [_kind_weight(kind) for kind in kinds])


def _kind_weight(kind: OpKind) -> float:
    return 1.0 / (0.01**2 + kind.error**2)


def _range_from_zero(changes: Iterable[float]) -> ChangeRange:
    """From none to the furthest either way."""
    known = [0.0, *changes]
    return min(known), max(known)


SIGNIFICANT_ERRORS = 3.3
"""Standard errors that a change must be away from none: with a hundred kinds, one in ten pairs of equal runs has one
that is further away."""
PRIOR_KINDS = 8
"""How many kinds of these runs count as much as what is usual."""
MIN_KINDS = 5
"""Fewer have nothing in common that could be told from a change."""
MIN_AGREEING = 0.6
"""A drift is what at least this share of the kinds has."""


class NoiseModel:
    """What is chance between two runs."""

    def __init__(self, kinds: Sequence[OpKind], usual: DevicePrior) -> None:
        self._usual = usual
        # too short a kernel says little about how far kinds differ, and one that runs once little but of the clock
        known = [kind for kind in kinds if kind.error <= usual.op]
        clocked = usual.follows_clock and bool(kinds)
        self.clock = (
            ClockModel([kind for kind in kinds if kind.error <= max(usual.op, usual.alone)]) if clocked else None
        )
        """None where kernels do not follow one."""
        self.drift = self._common([kind for kind in known if self._limits(kind) == "memory" or not clocked])
        """What kernels that memory holds have in common, as a logarithm; None where they have nothing."""
        self._deviations = {
            name: sorted(self.beyond(kind) for kind in known if self._limits(kind) == name) for name in usual.kinds
        }
        within = [kind.op_scatter for kind in known if kind.op_scatter is not None]
        self._most = max(usual.most, median(within) if within else 0.0)

    def explained(self, kind: OpKind | None) -> ChangeRange:
        """The changes that are none of the ops' own, as logarithms; of None, for ops without counterparts."""
        drift = self.drift or 0.0
        if self.clock is None:
            return min(0.0, drift), max(0.0, drift)
        low, high = self.clock.explains_unmatched() if kind is None else self.clock.explains(kind)
        return min(low, drift), max(high, drift)

    def beyond(self, kind: OpKind) -> float:
        """How far the change of a kind is from what is explained."""
        return abs(excess(kind.change, self.explained(kind)))

    def noise(self, kind: OpKind) -> float:
        """The change beyond what is explained that could be chance, as a logarithm."""
        return max(
            self._usual.least[self._limits(kind)], SIGNIFICANT_ERRORS * math.hypot(self._by_kind(kind), kind.error)
        )

    def noise_of(self, limits: TimeLimiter) -> float:
        """The same for ops that have no counterpart one by one."""
        return max(self._usual.least[limits], SIGNIFICANT_ERRORS * self._shrunk(limits, self._deviations[limits]))

    def _limits(self, kind: OpKind) -> TimeLimiter:
        """A kernel that stood still while the clock moved waits for memory, whether its work is known or not."""
        return "memory" if self.clock is not None and self.clock.is_clock_independent(kind) else kind.limits

    def _common(self, kinds: Sequence[OpKind]) -> float | None:
        """The median change, where most kinds have it. A long kernel counts as much as others: it may have changed."""
        if len(kinds) < MIN_KINDS:
            return None
        weights = [1.0 / (self._usual.op**2 + kind.error**2) for kind in kinds]
        middle = weighted_median([kind.change for kind in kinds], weights)
        near = sum(
            weight
            for kind, weight in zip(kinds, weights, strict=True)
            if abs(kind.change - middle) <= SIGNIFICANT_ERRORS * math.hypot(self._usual.op, kind.error)
        )
        return middle if near >= MIN_AGREEING * sum(weights) else None

    def _by_kind(self, kind: OpKind) -> float:
        """From all other kinds: a kind that changed must not hide behind itself."""
        limits = self._limits(kind)
        deviations = self._deviations[limits]
        own = self.beyond(kind)
        at = bisect_left(deviations, own)
        if at < len(deviations) and deviations[at] == own:
            deviations = deviations[:at] + deviations[at + 1 :]
        return self._shrunk(limits, deviations)

    def _shrunk(self, limits: TimeLimiter, deviations: Sequence[float]) -> float:
        """Never less than usual: of what the clock may have moved, only what is beyond that is seen."""
        count = len(deviations)
        seen = min(robust_deviation(deviations), self._most)
        usual = self._usual.kinds[limits]
        return max(usual, math.sqrt((count * seen**2 + PRIOR_KINDS * usual**2) / (count + PRIOR_KINDS)))


def excess(change: float, explained: ChangeRange) -> float:
    """How far a change is outside of a range, with its sign; 0 inside.

    >>> outside(0.5, (0.0, 0.25)), outside(0.125, (0.0, 0.25)), outside(-0.5, (0.0, 0.25))
    (0.25, 0.0, -0.5)
    """
    return change - min(max(change, explained[0]), explained[1])
