"""`Scatter`: how far kernel times of two runs differ by chance, and which changes are beyond it.

What is known, in logarithms of the later time over the earlier one:

    drift       what kernels that memory holds have in common; on a CPU, all: another process, say
    clock       what the clock explains of a kernel's change: see `clock`
    error       how uncertain the change of one kind is, from how far its ops, one by one, differ from each other
    by kind     how far kinds that did not change differ all the same, each of them alike in all layers: from where
                memory lies, from power. It is seen in all other kinds of the same pair of runs.

A kind has changed where it is further from none, from the drift and from what the clock explains than the error and
the scatter by kind make likely.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from statistics import median

from nearpeak.diagnose.clock import Clock, Range
from nearpeak.diagnose.kinds import Kind, Limits, Usual, scale, weighted_median

SURE = 3.3
"""Standard errors that a change must be away from none: with a hundred kinds, one in ten pairs of equal runs has one
that is further away."""
PRIOR_KINDS = 8
"""How many kinds of these runs count as much as what is usual."""
LEAST_KINDS = 5
"""Fewer have nothing in common that could be told from a change."""
AGREEING = 0.6
"""A drift is what at least this share of the kinds has."""


class Scatter:
    """What is chance between two runs."""

    def __init__(self, kinds: Sequence[Kind], usual: Usual) -> None:
        self._usual = usual
        # too short a kernel says little about how far kinds differ, and one that runs once little but of the clock
        known = [kind for kind in kinds if kind.error <= usual.op]
        clocked = usual.follows_clock and bool(kinds)
        self.clock = Clock([kind for kind in kinds if kind.error <= max(usual.op, usual.alone)]) if clocked else None
        """None where kernels do not follow one."""
        self.drift = self._common([kind for kind in known if self._limits(kind) == "memory" or not clocked])
        """What kernels that memory holds have in common, as a logarithm; None where they have nothing."""
        self._deviations = {
            name: sorted(self.beyond(kind) for kind in known if self._limits(kind) == name) for name in usual.kinds
        }
        within = [kind.op_scatter for kind in known if kind.op_scatter is not None]
        self._most = max(usual.most, median(within) if within else 0.0)

    def explained(self, kind: Kind | None) -> Range:
        """The changes that are none of the ops' own, as logarithms; of None, for ops without counterparts."""
        drift = self.drift or 0.0
        if self.clock is None:
            return min(0.0, drift), max(0.0, drift)
        low, high = self.clock.explains_any() if kind is None else self.clock.explains(kind)
        return min(low, drift), max(high, drift)

    def beyond(self, kind: Kind) -> float:
        """How far the change of a kind is from what is explained."""
        return abs(outside(kind.change, self.explained(kind)))

    def noise(self, kind: Kind) -> float:
        """The change beyond what is explained that could be chance, as a logarithm."""
        return max(self._usual.least[self._limits(kind)], SURE * math.hypot(self._by_kind(kind), kind.error))

    def noise_of(self, limits: Limits) -> float:
        """The same for ops that have no counterpart one by one."""
        return max(self._usual.least[limits], SURE * self._shrunk(limits, self._deviations[limits]))

    def _limits(self, kind: Kind) -> Limits:
        """A kernel that stood still while the clock moved waits for memory, whether its work is known or not."""
        return "memory" if self.clock is not None and self.clock.stands_still(kind) else kind.limits

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

    def _by_kind(self, kind: Kind) -> float:
        """From all other kinds: a kind that changed must not hide behind itself."""
        limits = self._limits(kind)
        deviations = self._deviations[limits]
        own = self.beyond(kind)
        at = bisect_left(deviations, own)
        if at < len(deviations) and deviations[at] == own:
            deviations = deviations[:at] + deviations[at + 1 :]
        return self._shrunk(limits, deviations)

    def _shrunk(self, limits: Limits, deviations: Sequence[float]) -> float:
        """Never less than usual: of what the clock may have moved, only what is beyond that is seen."""
        count = len(deviations)
        seen = min(scale(deviations), self._most)
        usual = self._usual.kinds[limits]
        return max(usual, math.sqrt((count * seen**2 + PRIOR_KINDS * usual**2) / (count + PRIOR_KINDS)))


def outside(change: float, explained: Range) -> float:
    """How far a change is outside of a range, with its sign; 0 inside.

    >>> outside(0.5, (0.0, 0.25)), outside(0.125, (0.0, 0.25)), outside(-0.5, (0.0, 0.25))
    (0.25, 0.0, -0.5)
    """
    return change - min(max(change, explained[0]), explained[1])
