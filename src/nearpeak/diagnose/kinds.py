"""`Kind`: ops of one kind in two runs, how much longer they take, how sure that is, and what limits them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from nearpeak.diagnose.matching import Matched
from nearpeak.diagnose.profile import ProfiledOp

Limits = Literal["compute", "memory", "other"]
"""What a kernel's time depends on: the clock; the memory alone, as it moves bytes about as fast as that can; or either:
it is limited by memory by its work, and does not get near it, or nothing is known of its work."""

HELD = 0.75
"""Of the bandwidth: a kernel that moves its bytes this fast waits for memory, whatever the clock is."""
OUTLIER = 0.25
"""An op of one of its own differs from its kind by more, and by ten standard deviations."""
TRIMMED = 0.125
"""Of the weight at either end, which a mean leaves out."""
_NORMAL_MAD, _NORMAL_TENTH = 1.4826, 1.645


@dataclass(frozen=True, slots=True, kw_only=True)
class Usual:
    """What is known of such a device before anything is seen of the runs, as relative standard deviations."""

    least: Mapping[Limits, float]
    """A smaller change is never called real."""
    kinds: Mapping[Limits, float]
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


GPU = Usual(
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
CPU = Usual(
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
class Kind:
    """Ops of one kind in both runs: how much longer they take, as a logarithm, and its standard error."""

    match: Matched
    change: float
    error: float
    op_scatter: float | None
    """The standard deviation of single ops; None where there are too few."""
    outliers: tuple[int, ...]
    """The positions of ops that changed far more than the others of their kind."""
    limits: Limits = "other"
    spreads: tuple[float | None, float | None] = (None, None)
    """Of each run, how much longer its ops took in the slowest of the profiled steps than in the quickest, as a
    logarithm; None where one step was profiled."""


def kind_of(match: Matched, usual: Usual, outlier_s: float, bandwidth: float | None = None) -> Kind | None:
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
    limits = limits_of(match, bandwidth)
    spreads = _spread(match.before), _spread(match.after)
    changes = [math.log(after.compared_s / before.compared_s) for before, after in pairs]
    weights = [before.compared_s for before, _ in pairs]
    kernel_s = sum(weights) / sum(before.kernels for before, _ in pairs)
    few = len(pairs) < 3
    one = math.hypot(usual.alone if few and limits == "compute" else usual.op, usual.jitter_s / kernel_s)
    if few:
        total = math.log(match.after_s / match.before_s)
        error = one / math.sqrt(len(pairs))
        return Kind(
            match=match, change=total, error=error, op_scatter=None, outliers=(), limits=limits, spreads=spreads
        )
    middle = weighted_median(changes, weights)
    mean = trimmed_mean(changes, weights)
    seen = scale(sorted(abs(change - middle) for change in changes))
    outliers = tuple(
        at
        for at, (change, (before, after)) in enumerate(zip(changes, pairs, strict=True))
        if not usual.hiccups
        and abs(change - middle) > max(OUTLIER, 10.0 * seen)
        and abs(after.compared_s - before.compared_s) > outlier_s
    )
    scatter = max(seen, one / 2)  # a few ops may agree by chance
    count = sum(weights) ** 2 / sum(weight**2 for weight in weights)  # short ones hardly count
    error = scatter / math.sqrt(count)
    return Kind(
        match=match, change=mean, error=error, op_scatter=scatter, outliers=outliers, limits=limits, spreads=spreads
    )


def limits_of(match: Matched, bandwidth: float | None) -> Limits:
    """What the op with most of the time is limited by, in both runs."""
    longest = [max(ops, key=lambda op: op.compared_s) for ops in (match.before, match.after) if ops]
    if any(op.limiter == "compute" for op in longest):
        return "compute"
    held = bandwidth is not None and all(
        op.modelled and op.limiter == "memory" and op.bytes >= HELD * bandwidth * op.compared_s for op in longest
    )
    return "memory" if held else "other"


def bandwidth_of(ops: Sequence[ProfiledOp]) -> float | None:
    """The bandwidth of memory that the bounds are against, in bytes per second; None where no op is limited by it.

    What may be left in a cache is not charged in full, so the bounds of such ops are against more: the least of all
    counts.
    """
    rates = [op.bytes / op.bound_s for op in ops if op.limiter == "memory" and op.modelled and op.bound_s > 0.0]
    return min(rates, default=None)


def trimmed_mean(values: Sequence[float], weights: Sequence[float]) -> float:
    """The mean without the lowest and the highest eighth of the weight, in which single ops of another kind are.

    Times of one kernel often have two or three values that are 1 to 2 % apart, and a median is one of them.

    >>> trimmed_mean([9.0, 1.0, 1.0, 1.0, 3.0, 3.0, 3.0, -5.0], [1.0] * 8)
    2.0
    """
    ordered = sorted(zip(values, weights, strict=True))
    total = sum(weights)
    low, high = TRIMMED * total, (1.0 - TRIMMED) * total
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


def scale(deviations: Sequence[float]) -> float:
    """A standard deviation from sorted distances: of the middle, or of the far ones where these are not changes."""
    if not deviations:
        return 0.0
    middle = _NORMAL_MAD * median(deviations)
    far = deviations[math.floor(0.9 * (len(deviations) - 1))] / _NORMAL_TENTH
    return max(middle, min(far, 2.0 * middle))


def _spread(ops: Sequence[ProfiledOp]) -> float | None:
    quickest_s = slowest_s = 0.0
    for op in ops:
        if op.quickest_s is None or op.slowest_s is None:
            return None
        quickest_s += op.quickest_s
        slowest_s += op.slowest_s
    return math.log(slowest_s / quickest_s) if quickest_s > 0.0 and slowest_s > 0.0 else None
