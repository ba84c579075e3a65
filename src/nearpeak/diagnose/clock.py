"""`Clock`: how much of a kernel's change the clock of the GPU explains.

A GPU that reaches the limit of its power lowers its clock, by some percent and from step to step. The products of one
step took 681 to 747 us on an H200, in steps and processes of the same code. A kernel has an elasticity of its own: the
layer norm and the gelu beside them moved by 1.7 times as much, and what waits for memory did not move at all. So
nothing can be taken off that all kernels have in common; but of a change c of the kernels that compute, a kernel of
elasticity e may have everything from 0 to e times c.

The elasticity is seen where several steps of a run were profiled and the clock moved between them. Else it is little
where the kernel moves its bytes about as fast as memory can, and as large as any that was seen for all others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import median

from nearpeak.diagnose.kinds import Kind, weighted_median

HELD_BY_MEMORY = 0.2
"""The largest elasticity of a kernel that waits for memory."""
STANDS_STILL = 0.6
"""A kernel that was seen to move by less of what products did waits for memory: what follows the clock has 0.9 or more,
what does not has up to 0.3 by chance."""
LARGEST = 1.7
"""Of any kernel, where it was not seen: of a layer norm and a gelu, from the lowest clock to the highest."""
SEEN_AT_MOST = 3.0
"""More is not believed: times of few steps say no more."""
MOVED = 0.01
"""How far products of one run must differ from step to step to say how others follow them."""
SURE = 1.5
"""Standard errors by which what was seen of it may be too small."""
UNKNOWN = 0.08
"""How far the clock may have changed where no kernel tells."""
Range = tuple[float, float]


class Clock:
    """The clock of one run against that of another, as kernels show it. All changes are logarithms."""

    def __init__(self, kinds: Sequence[Kind]) -> None:
        self._computing = [kind for kind in kinds if kind.limits == "compute"]
        self._others = [kind for kind in kinds if kind.limits == "other"]
        self.change = _middle(self._computing) if self._computing else None
        """How much longer kernels take that compute; None where there are none."""

    def explains(self, kind: Kind) -> Range:
        """The changes of these ops that the clock may have made: from other kinds, not from themselves."""
        computing = [other for other in self._computing if other is not kind]
        others = [other for other in self._others if other is not kind]
        if computing:
            return _reach([self.elasticity(kind) * _middle(computing)])
        if kind.limits == "compute":  # the others may follow the clock or not, so each of them may be what tells
            return _reach(other.change for other in others) if others else (-UNKNOWN, UNKNOWN)
        return _reach([_middle(others)] if others and kind.limits == "other" else [])

    def elasticity(self, kind: Kind) -> float:
        """How many times as far as products it may move."""
        if kind.limits == "memory":
            return HELD_BY_MEMORY
        seen, _ = self._seen(kind) or (0.0, 0.0)
        return max(seen, HELD_BY_MEMORY) if self.stands_still(kind) else min(max(seen, LARGEST), SEEN_AT_MOST)

    def stands_still(self, kind: Kind) -> bool:
        """Whether it was seen not to move while the clock did."""
        seen = self._seen(kind)
        return kind.limits == "other" and seen is not None and sum(seen) <= STANDS_STILL

    def _seen(self, kind: Kind) -> tuple[float, float] | None:
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
        if squares < MOVED**2:
            return None
        return along / squares, SURE * kind.error / math.sqrt(squares)

    def explains_any(self) -> Range:
        """The same for ops that have no counterpart one by one."""
        return _reach([LARGEST * (self.change or 0.0)])


def _middle(kinds: Sequence[Kind]) -> float:
    """The median change. A long kernel counts as much as others: it may have changed."""
    return weighted_median([kind.change for kind in kinds], [_weight(kind) for kind in kinds])


def _weight(kind: Kind) -> float:
    return 1.0 / (0.01**2 + kind.error**2)


def _reach(changes: Iterable[float]) -> Range:
    """From none to the furthest either way."""
    known = [0.0, *changes]
    return min(known), max(known)
