"""`Waterfall`: the wall time of a step as parts that sum to it, from what is unavoidable to what is lost.

    wall = ideal + traffic + fusion + slow kernels + not modeled + communication + idle

The first three parts are differences of floors, the others differences of measured times. A negative part means that
something ran faster than its bound: a bug in nearpeak, reported as one and not clipped to zero. Kernels on several
streams overlap; the interval functions count each instant once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from nearpeak._records import Seconds, SignedSeconds

PartName = Literal["ideal", "traffic", "fusion", "slow kernels", "not modeled", "communication", "idle"]

PART_MEANINGS: Mapping[PartName, str] = {
    "ideal": "inputs, parameters and results cross memory once",
    "traffic": "memory traffic that fusion cannot remove",
    "fusion": "traffic that fusing ops would remove",
    "slow kernels": "kernels slower than their bounds",
    "not modeled": "kernels whose bound is not known",
    "communication": "between devices, with nothing else running",
    "idle": "nothing runs on the device",
}
ROUNDING = 1e-12
"""Of the wall time. Smaller parts are rounding errors of sums, and set to zero."""
TOLERANCE = 0.01
"""Of the wall time. A part that is further below zero is broken."""
SUM_TOLERANCE = 1e-6
"""Of the wall time. Parts that sum to something else were not made by `build_waterfall`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part of the wall time."""

    name: PartName
    seconds: SignedSeconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Waterfall:
    """The parts in order; they sum to the wall time."""

    wall_s: Seconds
    parts: tuple[Part, ...]

    def check(self) -> None:
        """ValueError where parts are missing, or do not sum to the wall time."""
        if tuple(part.name for part in self.parts) != tuple(PART_MEANINGS):
            raise ValueError(f"expected the parts {', '.join(PART_MEANINGS)}, each once and in this order")
        total = sum(part.seconds for part in self.parts)
        if abs(total - self.wall_s) > SUM_TOLERANCE * self.wall_s:
            raise ValueError(f"the parts sum to {total:g} s, and the wall time is {self.wall_s:g} s")

    def seconds(self, name: PartName) -> float:
        """The time of one part."""
        return next(part.seconds for part in self.parts if part.name == name)

    @property
    def broken(self) -> tuple[Part, ...]:
        """Parts that are below zero by more than the measurement error."""
        return tuple(part for part in self.parts if part.seconds < -TOLERANCE * self.wall_s)

    @property
    def largest_loss(self) -> Part:
        """The largest part other than the ideal time."""
        return max((part for part in self.parts if part.name != "ideal"), key=lambda part: part.seconds)


def build_waterfall(
    *,
    wall_s: float,
    ideal_s: float,
    fused_s: float,
    as_written_s: float,
    modeled_s: float,
    kernel_s: float,
    communication_s: float = 0.0,
) -> Waterfall:
    """The parts, from three floors and four measured times.

    Args:
        wall_s: The wall time of the step.
        ideal_s: The ideal floor.
        fused_s: The fused floor.
        as_written_s: The floor as written.
        modeled_s: The time of kernels whose ops have a bound.
        kernel_s: The time in which any kernel ran, other than communication; each instant counts once.
        communication_s: The time in which only communication ran.

    >>> parts = build_waterfall(
    ...     wall_s=10, ideal_s=2, fused_s=3, as_written_s=4, modeled_s=6, kernel_s=7, communication_s=1
    ... ).parts
    >>> [(part.name, part.seconds) for part in parts][3:]
    [('slow kernels', 2), ('not modeled', 1), ('communication', 1), ('idle', 2)]
    """
    seconds: dict[PartName, float] = {
        "ideal": ideal_s,
        "traffic": fused_s - ideal_s,
        "fusion": as_written_s - fused_s,
        "slow kernels": modeled_s - as_written_s,
        "not modeled": kernel_s - modeled_s,
        "communication": communication_s,
        "idle": wall_s - kernel_s - communication_s,
    }
    rounded = {name: value if abs(value) > ROUNDING * wall_s else 0.0 for name, value in seconds.items()}
    return Waterfall(wall_s=wall_s, parts=tuple(Part(name=name, seconds=value) for name, value in rounded.items()))


Interval = tuple[float, float]
"""Start and end, in seconds."""


def merge_intervals(intervals: Iterable[Interval]) -> list[Interval]:
    """The union of intervals as disjoint intervals in order.

    >>> merge_intervals([(2.0, 3.0), (0.0, 1.0), (0.5, 1.5)])
    [(0.0, 1.5), (2.0, 3.0)]
    """
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        elif end > start:
            merged.append((start, end))
    return merged


def covered_seconds(intervals: Iterable[Interval]) -> float:
    """The length of the union of intervals."""
    return sum(end - start for start, end in merge_intervals(intervals))


def exclusive_seconds(intervals: Sequence[Interval]) -> list[float]:
    """The time that each interval covers and no earlier one does; the sum is `covered_seconds`.

    >>> exclusive_seconds([(0.0, 2.0), (1.0, 3.0), (1.5, 1.8)])
    [2.0, 1.0, 0.0]
    """
    exclusive = [0.0] * len(intervals)
    covered_until = float("-inf")
    for index in sorted(range(len(intervals)), key=lambda index: intervals[index]):
        start, end = intervals[index]
        exclusive[index] = max(0.0, end - max(start, covered_until))
        covered_until = max(covered_until, end)
    return exclusive
