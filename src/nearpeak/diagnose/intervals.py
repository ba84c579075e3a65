"""Intervals of time: what several streams cover together, each instant counted once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Interval = tuple[float, float]
"""Start and end, in seconds."""


def union(intervals: Iterable[Interval]) -> list[Interval]:
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


def length(intervals: Iterable[Interval]) -> float:
    """How much time they cover together."""
    return sum(end - start for start, end in union(intervals))


def charges(intervals: Sequence[Interval]) -> list[float]:
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
