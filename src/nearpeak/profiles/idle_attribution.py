"""`explain`: the time in which nothing ran on the device, as named causes that sum to it.

A gap between kernels ends with a kernel. Until that one was launched, the gap is the host's doing, and each instant of
it is charged to what the host was doing then. What waits for the device, a synchronization, say, makes the host lose
its lead: it is charged with what the host did after it as well, in this gap and the next ones, for as long as it had
held the host while the device was still busy, or until the host is ahead again. Without it the host would have done
that earlier by so much.

The gaps are those of a step under the profiler, which makes ops of the host take two to three times as long. It does
not make waiting, loading, allocating, collecting or compiling longer, nor long stretches of Python: these keep their
time, and what the host took for ops and between them gets the rest of the idle time of a clean step.
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from nearpeak.profiles.idle import (
    AFTER_LAST_KERNEL,
    BETWEEN_OPS,
    BETWEEN_QUEUED_KERNELS,
    LAUNCHED_LATE,
    PROFILER_SLOWDOWN,
    CauseName,
    Gap,
    IdleCause,
    IdleTime,
)
from nearpeak.profiles.waterfall import Interval

_PRIORITY = ("profiler", "compilation", "garbage collection", "input", "allocator", "synchronization")
"""What an instant is charged to where several are true, the most specific first."""
_BLOCKING_CAUSES = ("synchronization", "allocator")
"""What holds the host up until the device is done: freeing memory waits too."""
CLOCK_SKEW = 5e-6
"""How much the clocks of host and device may differ."""
IDLE_NOISE = 0.1
"""How much more idle time a clean step may have than the profiled one, relatively, to have it from the same causes."""
LONG_PYTHON = 2e-4
"""Seconds between two ops of the host that are code of its own; the profiler adds at most a tenth of it to an op."""
PROFILER_CLOSING = 1e-3
"""Seconds at the end of the profiled step that are the profiler's: it notes the end, and nothing else is launched."""


class DeviceActivity(NamedTuple):
    """Something that ran on the device, in seconds of any clock."""

    start_s: float
    end_s: float
    launched_s: float | None
    """When the host was done launching it; None where that is not known: then the host is charged until it starts."""
    where: str = ""
    op: int | None = None


class HostActivity(NamedTuple):
    """What the host did, on the same clock."""

    cause: CauseName
    start_s: float
    end_s: float
    where: str = ""
    what: str = ""


class _Pause(NamedTuple):
    """Between two kernels; without a length where the next one was there at once."""

    start: float
    end: float
    ended_by: DeviceActivity | None


@dataclass(slots=True)
class _ChargedTime:
    steady: float = 0.0
    slowed: float = 0.0
    """What takes longer under the profiler."""
    spans: set[int] = field(default_factory=set)
    places: dict[str, float] = field(default_factory=dict)


def attribute(
    ran: Sequence[DeviceActivity],
    doing: Sequence[HostActivity],
    working: Sequence[Interval] | None,
    *,
    window: Interval,
    idle_s: float,
    clean: bool,
) -> IdleTime:
    """The causes of idle time, what ops have of it, and the gaps.

    Args:
        ran: Everything on the device.
        doing: What the host did that is a cause.
        working: When the host was inside of an op or a launch, disjoint and in order. None where the host is the
            device, so that nothing is launched.
        window: From when to when the step went.
        idle_s: The idle time to explain.
        clean: Whether it is that of a step that ran without the profiler, unlike `ran`.

    >>> ran = [Ran(0.0, 3.0, 0.0), Ran(7.0, 9.0, 6.5)]
    >>> waited = Doing("synchronization", 1.0, 3.5, "train.py:8", "item")
    >>> for cause in explain(ran, [waited], [(5.0, 7.0)], window=(0.0, 9.0), idle_s=4.0, clean=False).causes:
    ...     print(cause.cause, cause.seconds, cause.where, cause.what)
    synchronization 2.5 train.py:8 item
    launching 1.5  launched late
    """
    charge = _Attribution(doing, working, slower=PROFILER_SLOWDOWN if clean else 1.0)
    gaps = [gap for number, pause in enumerate(_pauses(ran, window)) if (gap := charge.pause(number, pause))]
    if clean:
        _trim_after_last_kernel(charge.charged, idle_s)
    scale = _scale(charge.charged, idle_s, clean=clean)
    found = [
        IdleCause(
            cause=cause,
            seconds=scale.of(total),
            count=len(total.spans),
            where=where or max(total.places, key=lambda place: total.places[place], default=""),
            what=what,
        )
        for (cause, what, where), total in charge.charged.items()
        if not (clean and cause == "profiler")
    ]
    rest = idle_s - sum(cause.seconds for cause in found)
    if rest > 1e-9 * idle_s:
        found.append(IdleCause(cause="unknown", seconds=rest, count=0, where="", what=""))
    return IdleTime(
        causes=tuple(sorted((cause for cause in found if cause.seconds > 0.0), key=lambda cause: -cause.seconds)),
        launch_wait_s={op: seconds for op, total in charge.late.items() if (seconds := scale.of(total)) > 0.0},
        gaps=tuple(gaps),
    )


class _Attribution:
    """Charges pauses, in the order of time."""

    def __init__(self, doing: Sequence[HostActivity], working: Sequence[Interval] | None, slower: float) -> None:
        self.charged: dict[tuple[CauseName, str, str], _ChargedTime] = {}
        self.late: dict[int, _ChargedTime] = {}
        self._doing = doing
        self._timeline = list(_host_timeline(doing))
        self._working = working
        self._slower = slower
        self._waits = sorted(
            (span.start_s, index) for index, span in enumerate(doing) if span.cause in _BLOCKING_CAUSES
        )
        self._wait: int | None = None
        self._lead = 0.0
        """What the host still has to catch up with because of the wait; it takes longer for that under a profiler."""
        self._here: dict[tuple[CauseName, str], float] = {}
        """What the pause at hand is charged to."""

    def pause(self, number: int, pause: _Pause) -> Gap | None:
        ended_by = pause.ended_by
        launched = pause.end if ended_by is None or ended_by.launched_s is None else ended_by.launched_s
        until = min(max(launched, pause.start), pause.end)
        wait = self._wait_at(pause.start)
        if wait is not None and wait != self._wait:
            self._wait, self._lead = wait, pause.start - self._doing[wait].start_s
        elif launched <= pause.start and wait is None:
            self._lead = 0.0  # the host is ahead of the device again
        if pause.end <= pause.start:
            return None
        self._here = {}
        for start, end, index in _split_span(self._timeline, pause.start, until):
            if index is not None:
                self._span(index, end - start, slowed=False)
            else:
                self._host(number, start + self._catch_up(end - start), end, ended_by)
        if pause.end > until:
            late = until > pause.start
            rest = pause.end - until - (self._catch_up(pause.end - until) if late else 0.0)
            self._launch(LAUNCHED_LATE if late else BETWEEN_QUEUED_KERNELS, rest, number, ended_by)
        cause, where = max(self._here, key=lambda key: self._here[key])
        return Gap(start_s=pause.start, seconds=pause.end - pause.start, cause=cause, where=where)

    def _catch_up(self, seconds: float) -> float:
        """What of some time is still the doing of a wait."""
        if self._wait is None or self._lead <= 0.0:
            return 0.0
        caught_up = min(self._lead * self._slower, seconds)
        self._lead -= caught_up / self._slower
        self._span(self._wait, caught_up, slowed=True)
        return caught_up

    def _wait_at(self, time: float) -> int | None:
        """What held the host when the device ran out of work."""
        at = bisect_left(self._waits, (time, -1)) - 1
        if at < 0 or self._doing[self._waits[at][1]].end_s < time - CLOCK_SKEW:
            return None
        return self._waits[at][1]

    def _host(self, number: int, start: float, end: float, ended_by: DeviceActivity | None) -> None:
        """Time in which the host did nothing that has a name."""
        inside = 0.0
        if self._working is not None:
            inside = sum(
                last - first
                for first, last, index in _split_span([(*span, 0) for span in self._near(start, end)], start, end)
                if index is not None
            )
        if inside > 0.0:
            self._launch(LAUNCHED_LATE, inside, number, ended_by)
        outside = end - start - inside
        where = "" if ended_by is None else ended_by.where
        if ended_by is None and outside > 0.0:
            closing = min(outside, PROFILER_CLOSING) if self._slower > 1.0 else 0.0
            self._add("profiler", AFTER_LAST_KERNEL, "", closing, number, "", slowed=False)
            self._add("python", AFTER_LAST_KERNEL, "", outside - closing, number, "", slowed=False)
        elif outside >= LONG_PYTHON:
            self._add("python", "", where, outside, number, "", slowed=False)
        elif outside > 0.0:
            self._add("python", BETWEEN_OPS, "", outside, number, where, slowed=True)
            self._of_op(ended_by, outside, slowed=True)

    def _near(self, start: float, end: float) -> Sequence[Interval]:
        assert self._working is not None
        first = max(0, bisect_right(self._working, (start, math.inf)) - 1)
        return self._working[first : bisect_left(self._working, (end, -math.inf))]

    def _launch(self, what: str, seconds: float, number: int, ended_by: DeviceActivity | None) -> None:
        if seconds > 0.0:
            where = "" if ended_by is None else ended_by.where
            self._add("launching", what, "", seconds, number, where, slowed=what == LAUNCHED_LATE)
            self._of_op(ended_by, seconds, slowed=what == LAUNCHED_LATE)

    def _of_op(self, ended_by: DeviceActivity | None, seconds: float, *, slowed: bool) -> None:
        # What is between the ops of a CPU is mostly the profiler's: only a clean step says what remains without it.
        known = self._working is not None or self._slower > 1.0
        if known and ended_by is not None and ended_by.op is not None:
            _accumulate(self.late.setdefault(ended_by.op, _ChargedTime()), seconds, slowed=slowed)

    def _span(self, index: int, seconds: float, *, slowed: bool) -> None:
        span = self._doing[index]
        self._add(span.cause, span.what, span.where, seconds, index, "", slowed=slowed)

    def _add(
        self, cause: CauseName, what: str, where: str, seconds: float, number: int, place: str, *, slowed: bool
    ) -> None:
        if seconds <= 0.0:
            return
        total = self.charged.setdefault((cause, what, where), _ChargedTime())
        _accumulate(total, seconds, slowed=slowed)
        total.spans.add(number)
        if place:
            total.places[place] = total.places.get(place, 0.0) + seconds
        key = cause, where or place
        self._here[key] = self._here.get(key, 0.0) + seconds


def _accumulate(total: _ChargedTime, seconds: float, *, slowed: bool) -> None:
    if slowed:
        total.slowed += seconds
    else:
        total.steady += seconds


class _Scale(NamedTuple):
    """What becomes of seconds of the profiled step in the step whose idle time is explained."""

    steady: float
    slowed: float

    def of(self, total: _ChargedTime) -> float:
        return total.steady * self.steady + total.slowed * self.slowed


def _scale(charged: Mapping[tuple[CauseName, str, str], _ChargedTime], idle_s: float, *, clean: bool) -> _Scale:
    kept = [total for (cause, _, _), total in charged.items() if not (clean and cause == "profiler")]
    steady_s, slowed_s = sum(total.steady for total in kept), sum(total.slowed for total in kept)
    total_s = steady_s + slowed_s
    if idle_s > total_s or not clean:
        same = idle_s / total_s if total_s > 0.0 and idle_s <= total_s * (1.0 + IDLE_NOISE) else 1.0
        return _Scale(same, same)
    steady = min(1.0, idle_s / steady_s) if steady_s > 0.0 else 1.0
    return _Scale(steady, max(0.0, idle_s - steady_s) / slowed_s if slowed_s > 0.0 else 0.0)


def _trim_after_last_kernel(charged: Mapping[tuple[CauseName, str, str], _ChargedTime], idle_s: float) -> None:
    """Takes off what is too much of the time after the last kernel: the profiler ends there, the first time slowly."""
    after = charged.get(("python", AFTER_LAST_KERNEL, ""))
    if after is not None:
        others = sum(total.steady for (cause, _, _), total in charged.items() if cause != "profiler") - after.steady
        after.steady = min(after.steady, max(0.0, idle_s - others))


def _pauses(ran: Sequence[DeviceActivity], window: Interval) -> Iterator[_Pause]:
    """When nothing ran, with what ended it."""
    covered, end = window
    for item in sorted(ran, key=lambda item: item.start_s):
        yield _Pause(covered, min(max(item.start_s, covered), end), item)
        covered = max(covered, item.end_s)
        if covered >= end:
            return
    if end > covered:
        yield _Pause(covered, end, None)


def _host_timeline(doing: Sequence[HostActivity]) -> Iterator[tuple[float, float, int]]:
    """Disjoint pieces of time in order, each with the most specific of what the host did."""
    starts = sorted((span.start_s, index) for index, span in enumerate(doing) if span.end_s > span.start_s)
    times = sorted({time for span in doing for time in (span.start_s, span.end_s)})
    running: list[tuple[int, float, int]] = []
    at = 0
    for start, end in itertools.pairwise(times):
        while at < len(starts) and starts[at][0] <= start:
            index = starts[at][1]
            heapq.heappush(running, (_PRIORITY.index(doing[index].cause), starts[at][0], index))
            at += 1
        while running and doing[running[0][2]].end_s <= start:
            heapq.heappop(running)
        if running:
            yield start, end, running[0][2]


def _split_span(
    pieces: Sequence[tuple[float, float, int]], start: float, end: float
) -> Iterator[tuple[float, float, int | None]]:
    """From `start` to `end` without holes: the pieces in there, and between them what belongs to none."""
    at = max(0, bisect_right(pieces, (start, math.inf, 0)) - 1)
    time = start
    while time < end:
        while at < len(pieces) and pieces[at][1] <= time:
            at += 1
        if at == len(pieces) or pieces[at][0] >= end:
            yield time, end, None
            return
        first, last, index = pieces[at]
        if first > time:
            yield time, first, None
            time = first
        yield time, min(last, end), index
        time = min(last, end)
