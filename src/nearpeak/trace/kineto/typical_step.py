"""`typical_times`: a profiled step on a CPU as steps like it usually are.

Another process may interrupt any op of a step for milliseconds, and the garbage collector runs in some step. One step
therefore says little about its ops. Each op, and each time between two ops, gets the median of its shares of several
steps that run the same ops.

The profiler takes time for every event. How much follows from a clean step, and is subtracted from each op: otherwise
small ops would appear longer, and large ones shorter, than they are.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import median

from nearpeak.profiles.waterfall import Interval

MAX_EVENT_S = 8e-6
"""What the profiler takes for an event on a CPU, with shapes, at most: 0.7 to 1.7 us on a Xeon in loops of one op, and
3 to 6 us in the step of a model. A profiled step that takes longer was slower as a whole."""
_LEAST_LEFT = 0.15
"""The share of a recorded time that remains at least without the profiler."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStep:
    """The ops of a step and its events, in seconds from its start."""

    names: tuple[str, ...]
    ops: Sequence[Interval]
    """In the order of their start."""
    events: Sequence[float]
    """When the events of the profiler began, in order."""
    seconds: float

    def cuts(self) -> list[float]:
        """The starts and ends of ops, and the end of the step."""
        return [0.0, *(time for op in self.ops for time in op), self.seconds]

    def shares(self, event_s: float = 0.0) -> list[float]:
        """The time before each op, of the op, and after the last one, if `event_s` of each event is the profiler's."""
        lengths = []
        for start, end in pairwise(self.cuts()):
            events = bisect_left(self.events, end) - bisect_left(self.events, start)
            lengths.append(max(_LEAST_LEFT * (end - start), end - start - event_s * events))
        total = sum(lengths)
        return [length / total for length in lengths]


@dataclass(frozen=True, slots=True)
class TypicalTimes:
    """Maps times of a recorded step to those of the typical one, which takes as long."""

    recorded: Sequence[float]
    typical: Sequence[float]

    def time(self, recorded_s: float) -> float:
        """The time in the typical step."""
        last = len(self.recorded) - 2
        index = min(max(bisect_right(self.recorded, recorded_s) - 1, 0), last)
        start, end = self.recorded[index], self.recorded[index + 1]
        share = min(max((recorded_s - start) / (end - start), 0.0), 1.0) if end > start else 0.0
        return self.typical[index] + share * (self.typical[index + 1] - self.typical[index])

    def intervals(self, recorded: Sequence[Interval]) -> Iterator[Interval]:
        """Intervals in the typical step."""
        return ((self.time(start), self.time(end)) for start, end in recorded)


def typical_times(
    step: RecordedStep, others: Sequence[RecordedStep] = (), *, event_s: float = 0.0
) -> TypicalTimes | None:
    """The times of a step with the medians of its own and the others that run the same ops.

    `event_s` of each event is the profiler's. None if ops overlap, as those of several threads do.
    """
    same = [item for item in (step, *others) if item.names == step.names and _is_sequence(item)]
    if not _is_sequence(step):
        return None
    columns = zip(*(item.shares(event_s) for item in same), strict=True)
    typical = [median(column) for column in columns]
    scale = step.seconds / sum(typical)
    return TypicalTimes(step.cuts(), [0.0, *accumulate(scale * share for share in typical)])


def _is_sequence(step: RecordedStep) -> bool:
    """Whether one op follows the other inside of the step."""
    cuts = step.cuts()
    return bool(step.ops) and step.seconds > 0.0 and all(start <= end for start, end in pairwise(cuts))
