"""`RankTimeline`: what one rank of a job did in some steps, small enough to be sent to another rank.

The time of a rank is cut at its collectives, into segments. A segment has the seconds of each activity, and ends where
the rank calls a collective, or where it has waited for one. That is a program which a model can run again
(`profiles/job_analysis.py`): work, call, work, wait.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from nearpeak._records import Amount, Count, Rate, Seconds, SignedSeconds
from nearpeak.ops.fast_init import fast_init
from nearpeak.profiles.waterfall import Interval

Activity = Literal["ops", "input", "garbage collection", "launching", "python", "communication"]
ACTIVITIES: tuple[Activity, ...] = ("ops", "input", "garbage collection", "launching", "python", "communication")
"""Of a rank: at each instant it does one of these. Communication is a wait in which nothing else runs."""
COMMUNICATION = ACTIVITIES.index("communication")
END_TOLERANCE_S = 5e-5
"""A wait that ends at most this long before its collective did is a wait for it: two threads take the times."""


@fast_init
@dataclass(frozen=True, slots=True, kw_only=True)
class RankCollective:
    """A collective as one rank saw it. Times are seconds from the origin of its timeline."""

    kind: str
    group: str
    """The name of its process group; "" if it is not known."""
    sequence: Count | None
    """Its number in that group; None if it is not known."""
    step: Count
    called_s: SignedSeconds
    """When the rank was there."""
    end_s: SignedSeconds
    bytes: Amount | None = None
    ranks: Count | None = None
    """The number of ranks of its group."""
    stream: int = 0


@fast_init
@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A part of a step, up to a call of a collective, the end of a wait for one, or the end of the step."""

    seconds: tuple[Seconds, ...]
    """Of each activity, in the order of `ACTIVITIES`."""
    event: Literal["call", "wait", "end"]
    collective: Count | None = None
    """The index of the collective in the timeline."""
    after_s: Seconds = 0.0
    """Of a wait: the time from the end of the collective until the rank went on."""

    @property
    def own_s(self) -> float:
        """The seconds in which the rank did not wait for others."""
        return sum(self.seconds) - self.seconds[COMMUNICATION]


@fast_init
@dataclass(frozen=True, slots=True, kw_only=True)
class OpTotal:
    """All calls of one operator, or all runs of one kernel, in a step."""

    count: Count
    seconds: Seconds
    elements: Amount
    """Of all inputs; for a kernel, the blocks of its grid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStep:
    """One step of a rank."""

    number: Count
    start_s: SignedSeconds
    end_s: SignedSeconds
    segments: tuple[Segment, ...]
    ops: Mapping[str, OpTotal] = field(default_factory=dict)
    """By name, those that take longest."""
    preempted_s: Seconds | None = None
    """The time in which its thread was ready and other work had the processor; None if it was not measured."""
    processor_s: Seconds | None = None
    """The time in which its thread had a processor; None if it was not measured."""

    def seconds(self, activity: Activity) -> float:
        """The seconds of one activity."""
        place = ACTIVITIES.index(activity)
        return sum(segment.seconds[place] for segment in self.segments)

    @property
    def own_s(self) -> float:
        """The seconds in which the rank did not wait for others."""
        return sum(segment.own_s for segment in self.segments)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimeline:
    """Some steps of one rank."""

    rank: Count
    world_size: Count | None = None
    host: str = ""
    """The machine; "" if it is not known."""
    origin_s: float = 0.0
    """The time from which all others count, on the clock of the machine."""
    steps: tuple[RankStep, ...]
    collectives: tuple[RankCollective, ...]
    groups: Mapping[str, tuple[Count, ...]] = field(default_factory=dict)
    """The ranks of each process group, by its name, as far as they are known."""
    on_device: bool = False
    """Whether the times of ops are those of kernels of a device."""
    clock_hz: Rate | None = None
    """Of the device in these steps."""
    source: str = ""
    """The trace file."""
    notes: tuple[str, ...] = ()
    """What is missing of it."""


def split_intervals(intervals: Sequence[Interval], others: Sequence[Interval]) -> tuple[list[Interval], list[Interval]]:
    """The parts of intervals that are in one of the others, and those that are in none; both are disjoint and in order.

    >>> split_intervals([(0.0, 4.0), (5.0, 9.0)], [(3.0, 6.0), (7.0, 8.0)])
    ([(3.0, 4.0), (5.0, 6.0), (7.0, 8.0)], [(0.0, 3.0), (6.0, 7.0), (8.0, 9.0)])
    """
    inside: list[Interval] = []
    outside: list[Interval] = []
    count, position = len(others), 0
    for start, end in intervals:
        while position < count and others[position][1] <= start:
            position += 1
        place = position
        while place < count and others[place][0] < end:
            first, last = others[place]
            if first > start:
                outside.append((start, first))
                start = first
            inside.append((start, last if last < end else end))
            start = last
            place += 1
        if start < end:
            outside.append((start, end))
    return inside, outside


def label_activities(
    window: Interval, labels: Sequence[tuple[Activity, Sequence[Interval]]]
) -> list[tuple[float, float, Activity]]:
    """The window as disjoint pieces in order, each with the first label that holds there; "python" if none does.

    The intervals of a label are disjoint and in order, as `merge_intervals` makes them.

    >>> label_activities((0.0, 4.0), [("input", [(0.0, 1.0)]), ("ops", [(0.5, 3.0)])])
    [(0.0, 1.0, 'input'), (1.0, 3.0, 'ops'), (3.0, 4.0, 'python')]
    """
    pieces: list[tuple[float, float, Activity]] = []
    left: list[Interval] = [window]
    for label, intervals in labels:
        inside, left = split_intervals(left, intervals)
        pieces += [(start, end, label) for start, end in inside]
    pieces += [(start, end, "python") for start, end in left]
    return sorted(pieces)


def cut_segments(
    pieces: Sequence[tuple[float, float, Activity]], collectives: Mapping[int, RankCollective]
) -> tuple[Segment, ...]:
    """The segments of a step from its pieces; `collectives` has those that may be called or waited for in it."""
    first, last = pieces[0][0], pieces[-1][1]
    calls = sorted((item.called_s, index) for index, item in collectives.items() if first <= item.called_s < last)
    ends = sorted((item.end_s, index) for index, item in collectives.items())
    segments: list[Segment] = []
    seconds = [0.0] * len(ACTIVITIES)

    def close(event: Literal["call", "wait", "end"], index: int | None = None, after_s: float = 0.0) -> None:
        segments.append(Segment(seconds=tuple(seconds), event=event, collective=index, after_s=after_s))
        seconds[:] = [0.0] * len(ACTIVITIES)

    position = 0
    for start, end, label in pieces:
        begun = start
        while position < len(calls) and calls[position][0] < end:
            when, called = calls[position]
            seconds[ACTIVITIES.index(label)] += max(0.0, when - start)
            start = max(start, when)
            close("call", called)
            position += 1
        seconds[ACTIVITIES.index(label)] += end - start
        if label == "communication":
            place = bisect_right(ends, (end + END_TOLERANCE_S, math.inf)) - 1
            if place >= 0 and ends[place][0] > begun:
                close("wait", ends[place][1], max(0.0, end - ends[place][0]))
    close("end")
    return tuple(segments)
