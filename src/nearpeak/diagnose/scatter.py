"""`Scatter`: how far kernel times of two runs differ by chance, and which changes are beyond it.

A run has one profiled step, so there is no second look at a kernel; but there are others of its kind in that step, in
other layers. What is known, in logarithms of the later time over the earlier one:

    drift       what kernels have in common: a lower clock, another process. Kernels that compute and kernels that move
                memory may have one each, as a lower clock slows only the first.
    error       how uncertain the change of one kind is, from how far its ops, one by one, differ from each other
    by kind     how far kinds that did not change differ all the same, each of them alike in all layers: from where
                memory lies, from power. It is seen in all other kinds of the same pair of runs.

A kind has changed where it is off the drift by more than these explain.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from nearpeak.diagnose.matching import Matched

SURE = 3.3
"""Standard errors that a change must be away from none: with a hundred kinds, one in ten pairs of equal runs has one
that is further away."""
PRIOR_KINDS = 8
"""How many kinds of these runs count as much as what is usual."""
LEAST_KINDS = 5
"""Fewer have nothing in common that could be told from a change."""
CLASSES_APART = 0.03
"""How far the drift of one class may be from that of all; beyond it is a change of these ops."""
AGREEING = 0.6
"""A drift is what at least this share of the kinds has."""
OUTLIER = 0.25
"""An op of one of its own differs from its kind by more, and by ten standard deviations."""
_NORMAL_MAD, _NORMAL_TENTH, _MEDIAN_LOSES = 1.4826, 1.645, 1.2533
Limits = Literal["compute", "memory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Usual:
    """What is known of such a device before anything is seen of the runs, as relative standard deviations."""

    least: float
    """A smaller change is never called real."""
    kinds: Mapping[Limits, float]
    """Of kinds from run to run, beside the drift."""
    most: float
    """Kinds cannot differ by more without single ops differing by as much."""
    op: float
    """Of one kernel, as a share of its time."""
    jitter_s: float
    """What clocks and launches add to each."""
    hiccups: bool
    """Whether a single op may take many times as long for no reason."""


GPU = Usual(least=0.02, kinds={"compute": 0.008, "memory": 0.005}, most=0.015, op=0.01, jitter_s=2e-7, hiccups=False)
"""From two models on an H200, each in two processes: kinds that compute differ by up to 2.3 %, the others by up to 2 %,
where kernels are not so short that the resolution of the clock shows."""
CPU = Usual(least=0.20, kinds={"compute": 0.05, "memory": 0.05}, most=0.10, op=0.20, jitter_s=2e-5, hiccups=True)
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

    @property
    def limits(self) -> Limits:
        """What their drift depends on."""
        return limits_of(self.match)


class Scatter:
    """What is chance between two runs."""

    def __init__(self, kinds: Sequence[Kind], usual: Usual) -> None:
        self._usual = usual
        # too short a kernel says little about how far kinds differ
        self._known = [kind for kind in kinds if kind.error <= usual.op]
        self.drift = self._common(self._known)
        """What all kernels have in common, as a logarithm; None where they have nothing."""
        self._drifts = {name: self._drift_of(name) for name in usual.kinds}
        self._deviations = {
            name: sorted(abs(kind.change - self._drifts[name]) for kind in self._known if kind.limits == name)
            for name in usual.kinds
        }
        within = [kind.op_scatter for kind in self._known if kind.op_scatter is not None]
        self._most = max(usual.most, median(within) if within else 0.0)

    def drift_of(self, limits: Limits) -> float:
        """The drift of one class, as a logarithm; 0 where there is none."""
        return self._drifts[limits]

    def noise(self, kind: Kind) -> float:
        """The change beside the drift that could be chance, as a logarithm."""
        return max(self._usual.least, SURE * math.hypot(self._by_kind(kind), kind.error))

    def noise_of(self, limits: Limits) -> float:
        """The same for ops that have no counterpart one by one."""
        return max(self._usual.least, SURE * self._shrunk(limits, self._deviations[limits]))

    def _common(self, kinds: Sequence[Kind]) -> float | None:
        """The median change, where most kinds have it. A long kernel counts as much as others: it may have changed."""
        if len(kinds) < LEAST_KINDS:
            return None
        weights = [1.0 / (self._usual.op**2 + kind.error**2) for kind in kinds]
        middle = weighted_median([kind.change for kind in kinds], weights)
        near = sum(
            weight
            for kind, weight in zip(kinds, weights, strict=True)
            if abs(kind.change - middle) <= SURE * math.hypot(self._usual.op, kind.error)
        )
        return middle if near >= AGREEING * sum(weights) else None

    def _drift_of(self, name: Limits) -> float:
        if self.drift is None:
            return 0.0
        own = self._common([kind for kind in self._known if kind.limits == name])
        return own if own is not None and abs(own - self.drift) <= CLASSES_APART else self.drift

    def _by_kind(self, kind: Kind) -> float:
        """From all other kinds: a kind that changed must not hide behind itself."""
        deviations = self._deviations[kind.limits]
        own = abs(kind.change - self._drifts[kind.limits])
        at = bisect_left(deviations, own)
        if at < len(deviations) and deviations[at] == own:
            deviations = deviations[:at] + deviations[at + 1 :]
        return self._shrunk(kind.limits, deviations)

    def _shrunk(self, limits: Limits, deviations: Sequence[float]) -> float:
        count = len(deviations)
        seen = min(_scale(deviations), self._most)
        usual = self._usual.kinds[limits]
        return math.sqrt((count * seen**2 + PRIOR_KINDS * usual**2) / (count + PRIOR_KINDS))


def kind_of(match: Matched, usual: Usual, outlier_s: float) -> Kind | None:
    """The change of ops that are matched one by one; None where a time is missing.

    Args:
        match: The ops of both runs.
        usual: What is known of the device.
        outlier_s: By how many seconds a single op must change to be one of its own.
    """
    pairs = list(zip(match.before, match.after, strict=True))
    if any(before.measured_s <= 0.0 or after.measured_s <= 0.0 for before, after in pairs):
        return None
    changes = [math.log(after.measured_s / before.measured_s) for before, after in pairs]
    weights = [before.measured_s for before, _ in pairs]
    kernel_s = sum(weights) / sum(before.kernels for before, _ in pairs)
    one = math.hypot(usual.op, usual.jitter_s / kernel_s)
    if len(pairs) < 3:
        total = math.log(match.after_s / match.before_s)
        return Kind(match=match, change=total, error=one / math.sqrt(len(pairs)), op_scatter=None, outliers=())
    middle = weighted_median(changes, weights)
    seen = _scale(sorted(abs(change - middle) for change in changes))
    outliers = tuple(
        at
        for at, (change, (before, after)) in enumerate(zip(changes, pairs, strict=True))
        if not usual.hiccups
        and abs(change - middle) > max(OUTLIER, 10.0 * seen)
        and abs(after.measured_s - before.measured_s) > outlier_s
    )
    scatter = max(seen, one / 2)  # a few ops may agree by chance
    count = sum(weights) ** 2 / sum(weight**2 for weight in weights)  # short ones hardly count
    error = _MEDIAN_LOSES * scatter / math.sqrt(count)
    return Kind(match=match, change=middle, error=error, op_scatter=scatter, outliers=outliers)


def limits_of(match: Matched) -> Limits:
    """What the op with most of the time is limited by: only what computes follows the clock."""
    longest = max(match.before or match.after, key=lambda op: op.measured_s)
    return "compute" if longest.limiter == "compute" else "memory"


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


def _scale(deviations: Sequence[float]) -> float:
    """A standard deviation from sorted distances: of the middle, or of the far ones where these are not changes."""
    if not deviations:
        return 0.0
    middle = _NORMAL_MAD * median(deviations)
    far = deviations[math.floor(0.9 * (len(deviations) - 1))] / _NORMAL_TENTH
    return max(middle, min(far, 2.0 * middle))
