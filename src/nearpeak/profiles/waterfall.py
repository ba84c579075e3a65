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

Interval = tuple[float, float]
"""Start and end, in seconds."""


def merge_intervals(intervals: Iterable[Interval]) -> list[Interval]:
    """The same instants as disjoint intervals in order.

    >>> union([(2.0, 3.0), (0.0, 1.0), (0.5, 1.5)])
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
    """How much time they cover together."""
    return sum(end - start for start, end in merge_intervals(intervals))


def exclusive_seconds(intervals: Sequence[Interval]) -> list[float]:
    """How much each interval covers that none which began before it does; they sum to `length`.

    >>> charges([(0.0, 2.0), (1.0, 3.0), (1.5, 1.8)])
    [2.0, 1.0, 0.0]
    """
    charged = [0.0] * len(intervals)
    covered = float("-inf")
    for index in sorted(range(len(intervals)), key=lambda at: intervals[at]):
        start, end = intervals[index]
        charged[index] = max(0.0, end - max(start, covered))
        covered = max(covered, end)
    return charged


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
"""Less of the wall time than this is a difference of sums in another order, and nothing."""
TOLERANCE = 0.01
"""How far below zero a part may be, relative to the wall time, before it is called broken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part of the wall time."""

    name: PartName
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Waterfall:
    """The parts in order; they sum to the wall time."""

    wall_s: float
    parts: tuple[Part, ...]

    def seconds(self, name: PartName) -> float:
        """The time of one part."""
        return next(part.seconds for part in self.parts if part.name == name)

    @property
    def broken(self) -> tuple[Part, ...]:
        """Parts that are below zero by more than a measurement can be wrong."""
        return tuple(part for part in self.parts if part.seconds < -TOLERANCE * self.wall_s)

    @property
    def largest_loss(self) -> Part:
        """The part that costs most of those that can be changed."""
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
        wall_s: Of the step.
        ideal_s: The floors of what was traced.
        fused_s: See `ideal_s`.
        as_written_s: See `ideal_s`.
        modeled_s: How long kernels ran whose ops have a bound.
        kernel_s: How long any kernel ran but those of communication; instants, not durations.
        communication_s: How long only communication ran.

    >>> found = waterfall(wall_s=10, ideal_s=2, fused_s=3, as_written_s=4, modeled_s=6, kernel_s=7, communication_s=1)
    >>> [(part.name, part.seconds) for part in found.parts][3:]
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
    exact = {name: value if abs(value) > ROUNDING * wall_s else 0.0 for name, value in seconds.items()}
    return Waterfall(wall_s=wall_s, parts=tuple(Part(name=name, seconds=value) for name, value in exact.items()))
