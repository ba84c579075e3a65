"""`attribute`: idle time of the device, attributed to causes on the host. The causes sum to the idle time.

A gap between kernels ends with a kernel. Until the host has launched that kernel, each instant of the gap is attributed
to what the host was doing. A call that waits for the device, such as a synchronization, makes the host lose its lead:
it is also charged with what the host did afterwards, in this gap and the next ones, for as long as it had blocked the
host while the device was busy, or until the host is ahead again. Without the call, the host would have done that work
earlier by this much.

The gaps are those of a step under the profiler, which slows down ops on the host by a factor of two to three. It does
not slow down waiting, loading, allocation, garbage collection, compilation or long stretches of Python: these keep
their time, and the time of ops and between ops is scaled to the rest of the idle time of a clean step.
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

_PRIORITY = ("profiler", "compilation", "garbage collection", "input", "allocator", "synchronization", "host ops")
"""If several causes hold at an instant, the first of these counts."""
_BLOCKING_CAUSES = ("synchronization", "allocator")
"""Causes that block the host until the device is done; freeing memory does too."""
CLOCK_SKEW = 5e-6
"""Seconds by which the clocks of host and device may differ."""
IDLE_NOISE = 0.1
"""The relative excess of a clean step's idle time over the profiled one that is attributed to the same causes."""
LONG_PYTHON = 2e-4
"""Seconds between two host ops from which Python is a cause of its own; the profiler adds at most a tenth of it."""
PROFILER_CLOSING = 1e-3
"""Seconds at the end of the profiled step in which the profiler records the end of the step."""


class DeviceActivity(NamedTuple):
    """A kernel, copy or fill on the device. Any clock will do."""

    start_s: float
    end_s: float
    launched_s: float | None
    """When the host had launched it; None if that is not known, and the host is charged until it starts."""
    where: str = ""
    op: int | None = None
    stream: int = 0
    communication: bool = False
    in_graph: bool = False
    """Whether a CUDA graph launched it, which is one launch for all of its kernels."""
    op_returned_s: float | None = None
    """When the op that launched it returned on the host; None if that is not known."""
    is_copy: bool = False


class HostActivity(NamedTuple):
    """What the host did, on the same clock."""

    cause: CauseName
    start_s: float
    end_s: float
    where: str = ""
    what: str = ""
    op: int | None = None
    """The op around it."""


class _Pause(NamedTuple):
    """The time between two kernels; empty if the next one followed at once."""

    start: float
    end: float
    next_activity: DeviceActivity | None


@dataclass(slots=True)
class _ChargedTime:
    """Seconds charged to one cause."""

    steady: float = 0.0
    slowed: float = 0.0
    """The part that the profiler slows down."""
    spans: set[int] = field(default_factory=set)
    places: dict[str, float] = field(default_factory=dict)

    def add(self, seconds: float, *, slowed: bool) -> None:
        if slowed:
            self.slowed += seconds
        else:
            self.steady += seconds


def attribute(
    device: Sequence[DeviceActivity],
    host: Sequence[HostActivity],
    host_ops: Sequence[Interval] | None,
    *,
    window: Interval,
    idle_s: float,
    clean: bool,
) -> IdleTime:
    """The causes of idle time, the idle time that launches of ops cause, and the gaps.

    Args:
        device: Everything that ran on the device.
        host: Activities of the host that can be a cause.
        host_ops: When the host was inside of an op or a launch, disjoint and in order. None if the host is the device
            and launches nothing.
        window: The start and end of the step.
        idle_s: The idle time to attribute.
        clean: Whether `idle_s` is of a step without the profiler, unlike `device`.

    >>> device = [DeviceActivity(0.0, 3.0, 0.0), DeviceActivity(7.0, 9.0, 6.5)]
    >>> item = HostActivity("synchronization", 1.0, 3.5, "train.py:8", "item")
    >>> idle = attribute(device, [item], [(5.0, 7.0)], window=(0.0, 9.0), idle_s=4.0, clean=False)
    >>> for cause in idle.causes:
    ...     print(cause.cause, cause.seconds, cause.where, cause.what)
    synchronization 2.5 train.py:8 item
    launching 1.5  launched late
    """
    attribution = _Attribution(host, host_ops, slowdown=PROFILER_SLOWDOWN if clean else 1.0)
    gaps = [gap for number, pause in enumerate(_pauses(device, window)) if (gap := attribution.pause(number, pause))]
    if clean:
        _trim_after_last_kernel(attribution.charged, idle_s)
    scale = _scale(attribution.charged, idle_s, clean=clean)
    causes = [
        IdleCause(
            cause=cause,
            seconds=scale.of(total),
            count=len(total.spans),
            where=where or max(total.places, key=lambda place: total.places[place], default=""),
            what=what,
        )
        for (cause, what, where), total in attribution.charged.items()
        if not (clean and cause == "profiler")
    ]
    rest = idle_s - sum(cause.seconds for cause in causes)
    if rest > 1e-9 * idle_s:
        causes.append(IdleCause(cause="unknown", seconds=rest, count=0, where="", what=""))
    return IdleTime(
        causes=tuple(sorted((cause for cause in causes if cause.seconds > 0.0), key=lambda cause: -cause.seconds)),
        launch_wait_s={
            op: seconds for op, total in attribution.launch_wait.items() if (seconds := scale.of(total)) > 0.0
        },
        gaps=tuple(gaps),
    )


class _Attribution:
    """Charges pauses, in the order of time."""

    def __init__(self, host: Sequence[HostActivity], host_ops: Sequence[Interval] | None, slowdown: float) -> None:
        self.charged: dict[tuple[CauseName, str, str], _ChargedTime] = {}
        self.launch_wait: dict[int, _ChargedTime] = {}
        self._host = host
        self._timeline = list(host_timeline(host))
        self._host_ops = host_ops
        self._slowdown = slowdown
        self._blocking = sorted(
            (span.start_s, index) for index, span in enumerate(host) if span.cause in _BLOCKING_CAUSES
        )
        self._wait: int | None = None
        self._lead = 0.0
        """The lead that the host lost by the wait and has not caught up yet, in seconds without the profiler."""
        self._pause_charges: dict[tuple[CauseName, str], float] = {}
        """The charges of the current pause."""

    def pause(self, number: int, pause: _Pause) -> Gap | None:
        next_activity = pause.next_activity
        launched = pause.end if next_activity is None or next_activity.launched_s is None else next_activity.launched_s
        until = min(max(launched, pause.start), pause.end)
        wait = self._blocking_at(pause.start)
        if wait is not None and wait != self._wait:
            self._wait, self._lead = wait, pause.start - self._host[wait].start_s
        elif launched <= pause.start and wait is None:
            self._lead = 0.0  # the host is ahead of the device again
        if pause.end <= pause.start:
            return None
        self._pause_charges = {}
        for start, end, index in _split_span(self._timeline, pause.start, until):
            if index is not None:
                self._charge_activity(index, end - start, slowed=False)
            else:
                self._charge_unnamed(number, start + self._catch_up(end - start), end, next_activity)
        if pause.end > until:
            late = until > pause.start
            rest = pause.end - until - (self._catch_up(pause.end - until) if late else 0.0)
            self._charge_launch(LAUNCHED_LATE if late else BETWEEN_QUEUED_KERNELS, rest, number, next_activity)
        cause, where = max(self._pause_charges, key=lambda key: self._pause_charges[key])
        return Gap(start_s=pause.start, seconds=pause.end - pause.start, cause=cause, where=where)

    def _catch_up(self, seconds: float) -> float:
        """The part of some time that is charged to the last wait."""
        if self._wait is None or self._lead <= 0.0:
            return 0.0
        caught_up = min(self._lead * self._slowdown, seconds)
        self._lead -= caught_up / self._slowdown
        self._charge_activity(self._wait, caught_up, slowed=True)
        return caught_up

    def _blocking_at(self, time: float) -> int | None:
        """The activity that blocked the host when the device ran out of work."""
        position = bisect_left(self._blocking, (time, -1)) - 1
        if position < 0 or self._host[self._blocking[position][1]].end_s < time - CLOCK_SKEW:
            return None
        return self._blocking[position][1]

    def _charge_unnamed(self, number: int, start: float, end: float, next_activity: DeviceActivity | None) -> None:
        """Charges time without a named activity: to launches, to Python code, and at the end to the profiler."""
        inside = 0.0
        if self._host_ops is not None:
            inside = sum(
                last - first
                for first, last, index in _split_span(
                    [(*span, 0) for span in self._host_ops_in(start, end)], start, end
                )
                if index is not None
            )
        if inside > 0.0:
            self._charge_launch(LAUNCHED_LATE, inside, number, next_activity)
        outside = end - start - inside
        where = "" if next_activity is None else next_activity.where
        if next_activity is None and outside > 0.0:
            closing = min(outside, PROFILER_CLOSING) if self._slowdown > 1.0 else 0.0
            self._add("profiler", AFTER_LAST_KERNEL, "", closing, number, "", slowed=False)
            self._add("python", AFTER_LAST_KERNEL, "", outside - closing, number, "", slowed=False)
        elif outside >= LONG_PYTHON:
            self._add("python", "", where, outside, number, "", slowed=False)
        elif outside > 0.0:
            self._add("python", BETWEEN_OPS, "", outside, number, where, slowed=True)
            self._charge_op(next_activity, outside, slowed=True)

    def _host_ops_in(self, start: float, end: float) -> Sequence[Interval]:
        assert self._host_ops is not None
        first = max(0, bisect_right(self._host_ops, (start, math.inf)) - 1)
        return self._host_ops[first : bisect_left(self._host_ops, (end, -math.inf))]

    def _charge_launch(self, what: str, seconds: float, number: int, next_activity: DeviceActivity | None) -> None:
        if seconds > 0.0:
            where = "" if next_activity is None else next_activity.where
            self._add("launching", what, "", seconds, number, where, slowed=what == LAUNCHED_LATE)
            self._charge_op(next_activity, seconds, slowed=what == LAUNCHED_LATE)

    def _charge_op(self, next_activity: DeviceActivity | None, seconds: float, *, slowed: bool) -> None:
        # On a CPU, the time between ops is mostly the profiler's: only a clean step shows what remains without it.
        known = self._host_ops is not None or self._slowdown > 1.0
        if known and next_activity is not None and next_activity.op is not None:
            self.launch_wait.setdefault(next_activity.op, _ChargedTime()).add(seconds, slowed=slowed)

    def _charge_activity(self, index: int, seconds: float, *, slowed: bool) -> None:
        span = self._host[index]
        self._add(span.cause, span.what, span.where, seconds, index, "", slowed=slowed)

    def _add(
        self, cause: CauseName, what: str, where: str, seconds: float, number: int, place: str, *, slowed: bool
    ) -> None:
        if seconds <= 0.0:
            return
        total = self.charged.setdefault((cause, what, where), _ChargedTime())
        total.add(seconds, slowed=slowed)
        total.spans.add(number)
        if place:
            total.places[place] = total.places.get(place, 0.0) + seconds
        key = cause, where or place
        self._pause_charges[key] = self._pause_charges.get(key, 0.0) + seconds


class _Scale(NamedTuple):
    """Factors from seconds of the profiled step to seconds of the step whose idle time is attributed."""

    steady: float
    slowed: float

    def of(self, total: _ChargedTime) -> float:
        return total.steady * self.steady + total.slowed * self.slowed


def _scale(charged: Mapping[tuple[CauseName, str, str], _ChargedTime], idle_s: float, *, clean: bool) -> _Scale:
    totals = [total for (cause, _, _), total in charged.items() if not (clean and cause == "profiler")]
    steady_s, slowed_s = sum(total.steady for total in totals), sum(total.slowed for total in totals)
    total_s = steady_s + slowed_s
    if idle_s > total_s or not clean:
        same = idle_s / total_s if total_s > 0.0 and idle_s <= total_s * (1.0 + IDLE_NOISE) else 1.0
        return _Scale(same, same)
    steady = min(1.0, idle_s / steady_s) if steady_s > 0.0 else 1.0
    return _Scale(steady, max(0.0, idle_s - steady_s) / slowed_s if slowed_s > 0.0 else 0.0)


def _trim_after_last_kernel(charged: Mapping[tuple[CauseName, str, str], _ChargedTime], idle_s: float) -> None:
    """Limits the time after the last kernel: the profiler stops there, slowly the first time."""
    after = charged.get(("python", AFTER_LAST_KERNEL, ""))
    if after is not None:
        others = sum(total.steady for (cause, _, _), total in charged.items() if cause != "profiler") - after.steady
        after.steady = min(after.steady, max(0.0, idle_s - others))


def _pauses(device: Sequence[DeviceActivity], window: Interval) -> Iterator[_Pause]:
    """The times in which nothing ran, with the activity that ended each."""
    covered, end = window
    for activity in sorted(device, key=lambda activity: activity.start_s):
        yield _Pause(covered, min(max(activity.start_s, covered), end), activity)
        covered = max(covered, activity.end_s)
        if covered >= end:
            return
    if end > covered:
        yield _Pause(covered, end, None)


def host_timeline(host: Sequence[HostActivity]) -> Iterator[tuple[float, float, int]]:
    """Disjoint pieces of time in order, each with the activity of the highest priority."""
    starts = sorted((span.start_s, index) for index, span in enumerate(host) if span.end_s > span.start_s)
    times = sorted({time for span in host for time in (span.start_s, span.end_s)})
    running: list[tuple[int, float, int]] = []
    position = 0
    for start, end in itertools.pairwise(times):
        while position < len(starts) and starts[position][0] <= start:
            index = starts[position][1]
            heapq.heappush(running, (_PRIORITY.index(host[index].cause), starts[position][0], index))
            position += 1
        while running and host[running[0][2]].end_s <= start:
            heapq.heappop(running)
        if running:
            yield start, end, running[0][2]


def _split_span(
    pieces: Sequence[tuple[float, float, int]], start: float, end: float
) -> Iterator[tuple[float, float, int | None]]:
    """Splits the time from `start` to `end` into the pieces in it, and None for the time between pieces."""
    position = max(0, bisect_right(pieces, (start, math.inf, 0)) - 1)
    time = start
    while time < end:
        while position < len(pieces) and pieces[position][1] <= time:
            position += 1
        if position == len(pieces) or pieces[position][0] >= end:
            yield time, end, None
            return
        first, last, index = pieces[position]
        if first > time:
            yield time, first, None
            time = first
        yield time, min(last, end), index
        time = min(last, end)
