"""`StepReplay`: a discrete-event model of a step, which tells how long the step takes without some of its work.

The host runs its pieces one after the other: work, launches of kernels, and waits for a kernel. A kernel starts when it
has been launched and the kernel before it on its stream has ended. Steps follow each other without a synchronization,
so the time of a step is the time between the ends of two of them. A step whose device is always busy gains kernel time
alone, one whose device waits for the host gains host time alone, and a wait costs what the host cannot do meanwhile.

The recording is of a step under the profiler, which takes some time for every event that it records on the host. That
time is solved for: without it, the replay of the unchanged step takes as long as a clean step. Kernel times differ a
little from step to step too, so what the replay lacks is not always the host's. A change saves the same share of the
clean step as of the replay.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import mean, median
from typing import NamedTuple

from nearpeak.profiles.idle import AFTER_LAST_KERNEL, PROFILER_SLOWDOWN, CauseName
from nearpeak.profiles.idle_attribution import (
    CLOCK_SKEW,
    LONG_PYTHON,
    DeviceActivity,
    HostActivity,
    host_timeline,
)
from nearpeak.profiles.waterfall import Interval

EVERYTHING_BEFORE = -1
"""As the kernel that the host waits for: all that was launched in earlier steps."""
_LAUNCH_LATENCY_S = 3e-6
"""From a launch to the start of its kernel, if the recording does not show it."""
_QUEUED_GAP_S, _COPY_GAP_S = 1e-6, 4e-6
"""Between two queued kernels, and before and after a queued copy, if the recording does not show it."""
_PROFILER_COPY_GAP_S = 1e-6
"""What the profiler adds before and after a queued copy: on an H200, 64 gaps in a step were 4.9 and 5.5 us long with it
in two runs, and 3.8 and 4.4 us without it. Between two kernels it adds less than 0.3 us."""
_MAX_QUEUED_GAP_S = 2e-5
"""After a longer gap, a queued kernel waited for something else than the one before it."""
_GRAPH_GAP_S = 4e-7
"""Between two kernels of a CUDA graph: the median of three recordings on an H200, where queued launches had 1.5 us."""
_MOST_OF_CALL = 0.5
"""A copy that runs for more of a call is what the call does."""
_MAX_EVENT_S = 1e-4
_LEAST_OF_PIECE = 0.15
"""The share of recorded host time that remains at least without the profiler."""
_ROUNDS = 6
"""Steps in a row, at most, until the time of a step does not change any more."""
_SAME_STEP_TIME = 1e-4
"""The relative difference below which two step times are the same."""
_CALIBRATED = 0.005
"""The relative difference to the clean step at which the time per event is found."""
_HOST_SPREAD = 0.3
"""How far the speed of the host under the profiler is usually from `PROFILER_SLOWDOWN`, as a logarithm: in forty steps
on an H200 that waited for their host, it was 1.2 to 3 times slower."""
_DEVICE_SPREAD = 0.03
"""How far the kernel times of profiled and clean steps are usually apart, as a logarithm."""
_NO_TIME = 1e-9
MAX_MISSING, MAX_EXCESS = 0.15, 0.5
"""A replay that lacks more of the clean step does not describe it. One that takes longer has it all, with longer waits
under the profiler: the share that a change saves of it holds all the same."""

Cause = tuple[CauseName, str, str]
"""The cause, `where` and `what` of an `IdleCause`."""


class ReplayedKernel(NamedTuple):
    """A kernel, copy or fill."""

    seconds: float
    op: int | None
    stream: int
    gap_s: float
    """After the kernel before it on its stream."""
    communication: bool
    after: int | None
    """A kernel of another stream that it was seen to wait for."""
    after_s: float
    """From the end of that kernel to its start."""
    is_copy: bool = False


class HostPiece(NamedTuple):
    """Something that the host does. First it waits for `wait`, then it works, then it launches `kernel`."""

    seconds: float
    """Of work, under the profiler."""
    events: int
    """What the profiler recorded meanwhile."""
    op: int | None
    """The op that the work is for; without the op, the piece goes."""
    cause: Cause | None
    """A named stretch of work, or the call that waits; None for calling and launching ops."""
    kernel: int | None = None
    wait: int | None = None
    after_last_op: bool = False
    """At the end of the step, where nearpeak works too."""


@dataclass(frozen=True, kw_only=True)
class StepTimeline:
    """What the host and the device did in a profiled step."""

    pieces: Sequence[HostPiece]
    kernels: Sequence[ReplayedKernel]
    """By the number that pieces have; in the order of their launches."""
    launch_latency_s: float
    """From a launch to the start of its kernel on an idle device."""
    kernel_gap_s: float = _QUEUED_GAP_S
    """Between two queued kernels that are no copies."""

    @cached_property
    def causes(self) -> frozenset[Cause]:
        """The named stretches and waits of the host."""
        return frozenset(piece.cause for piece in self.pieces if piece.cause is not None)

    @cached_property
    def waits(self) -> frozenset[Cause]:
        """Those in which the host waits for the device."""
        return frozenset(piece.cause for piece in self.pieces if piece.wait is not None and piece.cause is not None)

    @cached_property
    def waiting_ops(self) -> frozenset[int]:
        """Ops in which the host waits."""
        return frozenset(piece.op for piece in self.pieces if piece.wait is not None and piece.op is not None)


def step_timeline(
    device: Sequence[DeviceActivity],
    host: Sequence[HostActivity],
    host_ops: Sequence[Interval],
    host_events: Sequence[float],
    *,
    host_end_s: float,
    device_free_s: float = 0.0,
) -> StepTimeline:
    """The timeline of a step from what was recorded, on one clock that starts with the step.

    Args:
        device: Everything that ran on the device.
        host: Named activities of the host.
        host_ops: When the host was inside of an op or a launch, disjoint and in order.
        host_events: When the events began that the profiler recorded on the host, in order.
        host_end_s: When the host had done its part of the step.
        device_free_s: When the device had finished what was launched before.
    """
    named = list(host_timeline(host))
    spans = [span for span in named if host[span[2]].cause != "profiler"]
    profiler = [(start, end) for start, end, index in named if host[index].cause == "profiler"]
    issued = [_issue_time(activity, spans, host) for activity in device]
    order = sorted(range(len(device)), key=lambda index: (issued[index], device[index].start_s))
    device, issued = [device[index] for index in order], [issued[index] for index in order]

    marks = [(time, 1, number) for number, time in enumerate(issued)]
    for number, (start, end, _) in enumerate(spans):
        marks += [(start, 2, number), (end, 0, number)]
    last = min(host_end_s, max((end for start, end in host_ops if start < host_end_s), default=0.0))
    marks.append((last, 3, 0))
    marks.sort()

    pieces: list[HostPiece] = []
    now, launched = 0.0, 0
    by_stream: dict[int, list[int]] = {}
    """The kernels that were launched."""
    open_span: int | None = None

    def owner(number: int) -> int | None:
        return None if not 0 <= number < len(device) or device[number].in_graph else device[number].op

    def work(until: float, waiting_op: int | None = None) -> Iterator[HostPiece]:
        """The pieces from `now` on, without what they launch: first for the op that launched last, until it returns,
        then for the op that waits or is launched next."""
        returned = device[launched - 1].op_returned_s if launched else None
        split = now if returned is None else min(max(now, returned), until)
        if open_span is not None:
            activity = host[spans[open_span][2]]
            yield from piece(now, until, None, (activity.cause, activity.where, activity.what))
            return
        yield from piece(now, split, owner(launched - 1))
        outside = until - split - _overlap(host_ops, split, until) - _overlap(profiler, split, until)
        stretch_s = outside if outside >= LONG_PYTHON else 0.0
        events = 0
        if stretch_s:  # ops on tensors in the memory of the host are part of it, and events
            following = ("", AFTER_LAST_KERNEL) if launched == len(device) else (device[launched].where, "")
            events = _events_outside(host_events, host_ops, split, until)
            yield HostPiece(stretch_s, events, None, ("python", *following), after_last_op=now >= last)
        yield from piece(
            split, until, owner(launched) if waiting_op is None else waiting_op, less_s=stretch_s, less_events=events
        )

    def piece(
        start: float,
        end: float,
        op: int | None,
        cause: Cause | None = None,
        *,
        less_s: float = 0.0,
        less_events: int = 0,
    ) -> Iterator[HostPiece]:
        seconds = end - start - less_s - _overlap(profiler, start, end)
        if seconds > 0.0:
            events = bisect_left(host_events, end) - bisect_left(host_events, start) - less_events
            yield HostPiece(seconds, events, op, cause, after_last_op=cause is None and start >= last)

    for time, kind, number in marks:
        if time >= host_end_s and kind == 2:
            continue
        until = min(max(time, now), max(host_end_s, now))
        if open_span is None or not _is_wait(host[spans[open_span][2]]):
            pieces.extend(work(until, host[spans[number][2]].op if kind == 2 else None))
        now = max(now, until)
        if kind == 0:
            open_span = None
        elif kind == 1:
            pieces.append(HostPiece(0.0, 0, None, None, kernel=number))
            launched = number + 1
            by_stream.setdefault(device[number].stream, []).append(number)
        elif kind == 2:
            open_span = number
            start, end, index = spans[number]
            if _is_wait(host[index]):
                pieces.append(_wait_piece(host[index], (start, min(end, host_end_s)), device, by_stream))
    pieces.extend(work(max(host_end_s, now)))
    kernels, latency_s, gap_s = _kernels(device, issued, device_free_s)
    return StepTimeline(pieces=_merge_pieces(pieces), kernels=kernels, launch_latency_s=latency_s, kernel_gap_s=gap_s)


def _events_outside(events: Sequence[float], host_ops: Sequence[Interval], start: float, end: float) -> int:
    """How many events began between two times outside of any op or launch."""
    first = max(0, bisect_right(host_ops, (start, float("inf"))) - 1)
    inside = sum(
        max(0, bisect_right(events, min(finish, end)) - bisect_left(events, max(begin, start)))
        for begin, finish in host_ops[first : bisect_left(host_ops, (end, -float("inf")))]
    )
    return max(0, bisect_left(events, end) - bisect_left(events, start) - inside)


def _is_wait(activity: HostActivity) -> bool:
    return activity.cause in ("synchronization", "allocator")


def _issue_time(
    activity: DeviceActivity, spans: Sequence[tuple[float, float, int]], host: Sequence[HostActivity]
) -> float:
    """When the host launched it. A call that copies and waits for the copy launches it at its beginning."""
    time = max(0.0, activity.start_s if activity.launched_s is None else min(activity.launched_s, activity.start_s))
    position = bisect_right(spans, (time, float("inf"), 0)) - 1
    if position >= 0 and time <= spans[position][1] and _is_wait(host[spans[position][2]]):
        return max(0.0, spans[position][0])
    return time


def _wait_piece(
    activity: HostActivity, span: Interval, device: Sequence[DeviceActivity], launched: Mapping[int, Sequence[int]]
) -> HostPiece:
    """A call that may wait: for the last of the launched kernels that had ended when it returned.

    Freeing memory waits for all of them, and allocating for none. `launched` has the numbers of kernels by stream. The
    end of a copy from pageable memory, which the call makes itself, may be recorded after its return.
    """
    start, end = span

    def is_over(kernel: DeviceActivity) -> bool:
        inside_s = min(kernel.end_s, end) - kernel.start_s
        own = kernel.start_s >= start - CLOCK_SKEW and inside_s > _MOST_OF_CALL * (end - start)
        return kernel.end_s <= end + CLOCK_SKEW or own

    cause = (activity.cause, activity.where, activity.what)
    last, waits_for_all = EVERYTHING_BEFORE, True
    for numbers in launched.values():
        position = len(numbers) - 1
        while position >= 0 and not is_over(device[numbers[position]]):
            position -= 1
        waits_for_all &= position == len(numbers) - 1
        if position >= 0 and (last < 0 or device[numbers[position]].end_s > device[last].end_s):
            last = numbers[position]
    if activity.cause == "allocator" and not waits_for_all:
        return HostPiece(end - start, 0, activity.op, cause)
    if last < 0:
        return HostPiece(end - start if launched else 0.0, 0, activity.op, cause, wait=last)
    return HostPiece(end - min(max(start, device[last].end_s), end), 0, activity.op, cause, wait=last)


def _merge_pieces(pieces: Sequence[HostPiece]) -> list[HostPiece]:
    """The same pieces, with a launch as part of the work before it."""
    merged: list[HostPiece] = []
    for piece in pieces:
        last = merged[-1] if merged else None
        is_work = last is not None and last.kernel is None and last.cause is None and piece.cause is None
        if (
            last is not None
            and is_work
            and (piece.seconds == 0.0 or (last.op, last.after_last_op) == (piece.op, piece.after_last_op))
        ):
            seconds, events = last.seconds + piece.seconds, last.events + piece.events
            merged[-1] = last._replace(seconds=seconds, events=events, kernel=piece.kernel)
        else:
            merged.append(piece)
    return merged


def _kernels(
    device: Sequence[DeviceActivity], issued: Sequence[float], device_free_s: float
) -> tuple[list[ReplayedKernel], float, float]:
    """The kernels in the order of their launches, the latency of a launch on an idle device, and the usual gap.

    A kernel that was not queued has the gap of others: of those beside a copy, or of those between kernels. Copies have
    engines of their own, which start later.
    """
    ends: dict[int, float] = {}
    copied: dict[int, bool] = {}
    """Whether the last of a stream was a copy."""
    beside_copy: list[bool] = []
    latest: list[tuple[float, int, int]] = []
    """Ends of kernels with their numbers and streams, while there are several streams."""
    streams = {activity.stream for activity in device}
    gaps: list[float | None] = []
    latencies: list[float] = []
    waits_for: list[tuple[int, float] | None] = []
    for number, activity in enumerate(device):
        free = ends.get(activity.stream, device_free_s)
        ready = max(free, issued[number])
        late = max(0.0, activity.start_s - ready)
        other = None
        if len(streams) > 1 and late > 2 * CLOCK_SKEW:
            before = [item for item in latest[-64:] if item[2] != activity.stream and item[0] <= activity.start_s]
            if before and max(before)[0] > ready:
                other = max(before)
        waits_for.append(None if other is None else (other[1], activity.start_s - other[0]))
        queued = issued[number] < free
        beside_copy.append(activity.is_copy or copied.get(activity.stream, False))
        copied[activity.stream] = activity.is_copy
        clean = max(min(late, _QUEUED_GAP_S), late - _PROFILER_COPY_GAP_S) if beside_copy[-1] else late
        gaps.append(clean if queued and late <= _MAX_QUEUED_GAP_S else None)
        if not queued and other is None:
            latencies.append(late)
        ends[activity.stream] = max(free, activity.end_s)
        latest.append((activity.end_s, number, activity.stream))
    beside = [gap for gap, copy in zip(gaps, beside_copy, strict=True) if gap is not None and copy]
    between = [gap for gap, copy in zip(gaps, beside_copy, strict=True) if gap is not None and not copy]
    copy_gap_s = mean(beside) if beside else _COPY_GAP_S  # they spread widely, and sums count
    gap_s = median(between) if between else _QUEUED_GAP_S
    kernels = [
        ReplayedKernel(
            seconds=activity.end_s - activity.start_s,
            op=activity.op,
            stream=activity.stream,
            gap_s=gap if gap is not None else copy_gap_s if copy else gap_s,
            communication=activity.communication,
            after=None if other is None else other[0],
            after_s=0.0 if other is None else other[1],
            is_copy=activity.is_copy,
        )
        for activity, gap, copy, other in zip(device, gaps, beside_copy, waits_for, strict=True)
    ]
    return kernels, median(latencies) if latencies else _LAUNCH_LATENCY_S, gap_s


def _overlap(intervals: Sequence[Interval], start: float, end: float) -> float:
    first = max(0, bisect_right(intervals, (start, float("inf"))) - 1)
    last = bisect_left(intervals, (end, -float("inf")))
    return sum(max(0.0, min(finish, end) - max(begin, start)) for begin, finish in intervals[first:last])


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What becomes of a step."""

    shorter: Mapping[int, float] = field(default_factory=dict)
    """The share of the kernel time of an op that goes, by the index of the op."""
    launch_s: Mapping[int, float] = field(default_factory=dict)
    """What the host still takes for a launch of an op. With 0 the host does not call it: its kernels are in a CUDA
    graph, or, if they are shorter too, part of the kernel before."""
    calls: Mapping[int, float] = field(default_factory=dict)
    """The share of the host's time for an op that goes with calls before it which launch nothing."""
    causes: Mapping[Cause, float] = field(default_factory=dict)
    """The share of a named stretch of the host that goes. A wait goes as a whole."""
    communication: float = 0.0
    """The share of the time of communication that goes."""
    idle_s: float = 0.0
    """Idle time that goes and is not in the timeline."""


def combine(changes: Iterable[Change]) -> Change:
    """All of the changes at once: two that shorten the same multiply."""
    shorter: dict[int, float] = {}
    launch_s: dict[int, float] = {}
    calls: dict[int, float] = {}
    causes: dict[Cause, float] = {}
    communication = idle_s = 0.0
    for change in changes:
        for op, share in change.shorter.items():
            shorter[op] = 1.0 - (1.0 - shorter.get(op, 0.0)) * (1.0 - share)
        for op, seconds in change.launch_s.items():
            launch_s[op] = min(seconds, launch_s.get(op, seconds))
        for op, share in change.calls.items():
            calls[op] = min(1.0, calls.get(op, 0.0) + share)
        for cause, share in change.causes.items():
            causes[cause] = 1.0 - (1.0 - causes.get(cause, 0.0)) * (1.0 - share)
        communication = 1.0 - (1.0 - communication) * (1.0 - change.communication)
        idle_s += change.idle_s
    return Change(
        shorter=shorter, launch_s=launch_s, calls=calls, causes=causes, communication=communication, idle_s=idle_s
    )


UNCHANGED = Change()


class StepTime(NamedTuple):
    """The time of one of many steps in a row."""

    seconds: float
    busy_s: float
    """Of it, the time in which a kernel ran."""


class _HostSpeed(NamedTuple):
    """What a clean step has of the host's time under the profiler."""

    event_s: float
    """What the profiler takes for an event."""
    end_share: float
    """The share of the time after the last op that is not nearpeak's."""


_Instruction = tuple[int | None, float, int | None, float, int, float, int | None, float]
"""The kernel to wait for, seconds of work, the kernel to launch, and of that its seconds, stream, gap, the kernel of
another stream that it follows, and at what distance. A plain tuple: most of the time of a replay goes into the loop
over these."""


def _log_ratio(value: float, other: float) -> float:
    """How far apart two times are, the same whichever is the longer."""
    return abs(math.log(max(value, _NO_TIME) / max(other, _NO_TIME)))


def bisect_decreasing(function: Callable[[float], float], wanted: float, start: float, end: float) -> float:
    """Where a function that falls from `start` to `end` has a value; the nearer end if it does not have it.

    >>> bisect_decreasing(lambda x: 10.0 - x, 7.0, 0.0, 8.0)
    3.0
    """
    for _ in range(20):
        middle = (start + end) / 2
        value = function(middle)
        if abs(value - wanted) <= _CALIBRATED * wanted / 5:
            return middle
        start, end = (middle, end) if value > wanted else (start, middle)
    return (start + end) / 2


class StepReplay:
    """A timeline that reproduces a clean step, and predicts the step with changes.

    >>> launch = [HostPiece(4.0, 0, op, None, kernel=op) for op in range(2)]
    >>> kernels = [ReplayedKernel(1.0, op, 0, 0.0, False, None, 0.0) for op in range(2)]
    >>> replay = StepReplay(StepTimeline(pieces=launch, kernels=kernels, launch_latency_s=0.0), wall_s=8.0)
    >>> replay.step(Change(shorter={1: 0.5})).seconds, replay.step(Change(launch_s={1: 0.0})).seconds
    (8.0, 4.0)
    """

    def __init__(self, timeline: StepTimeline, wall_s: float) -> None:
        self.timeline = timeline
        self.wall_s = wall_s
        self.host_speed = self._calibrate()
        self._clean = self._clean_seconds(self.host_speed)
        self.unchanged = self._run(UNCHANGED, self._clean)

    @property
    def residual(self) -> float:
        """The replayed time of the unchanged step relative to the clean one, less 1."""
        return self.unchanged.seconds / self.wall_s - 1.0

    @property
    def is_good(self) -> bool:
        """Whether the replay describes the step."""
        return -MAX_MISSING <= self.residual <= MAX_EXCESS

    def step(self, change: Change) -> StepTime:
        """The time of the step with a change."""
        time = self._run(change, self._clean)
        # Not all waits of streams for each other are seen: kernels overlap no more than they did.
        overlap_s = max(0.0, self.unchanged.busy_s - self._removed_kernel_seconds(change) - time.busy_s)
        busy_s = time.busy_s + overlap_s
        return StepTime(max(busy_s, time.seconds + overlap_s - change.idle_s), busy_s)

    def launch_seconds(self) -> dict[int, float]:
        """What the host takes for the launches of each op, without the profiler."""
        launches: dict[int, float] = {}
        for piece, clean_s in zip(self.timeline.pieces, self._clean, strict=True):
            if piece.op is not None and piece.cause is None:
                launches[piece.op] = launches.get(piece.op, 0.0) + clean_s
        return launches

    def saving(self, change: Change, *, after: Change = UNCHANGED) -> StepTime:
        """What a change saves of the clean step, after another one: the same share as of the replay."""
        before = self.unchanged if after == UNCHANGED else self.step(after)
        changed = self.step(change if after == UNCHANGED else combine([after, change]))
        scale = self.wall_s / self.unchanged.seconds if self.unchanged.seconds else 1.0
        return StepTime((before.seconds - changed.seconds) * scale, (before.busy_s - changed.busy_s) * scale)

    def _removed_kernel_seconds(self, change: Change) -> float:
        """The kernel time that goes, on all streams."""
        removed_s = 0.0
        for kernel in self.timeline.kernels:
            share = 0.0 if kernel.op is None else change.shorter.get(kernel.op, 0.0)
            stays = (1.0 - share) * (1.0 - change.communication * kernel.communication)
            removed_s += kernel.seconds * (1.0 - stays)
        return removed_s

    def _clean_seconds(self, host: _HostSpeed) -> list[float]:
        """The work of the pieces without the profiler."""
        return [
            max(_LEAST_OF_PIECE * piece.seconds, piece.seconds - host.event_s * piece.events)
            * (host.end_share if piece.after_last_op else 1.0)
            for piece in self.timeline.pieces
        ]

    def _calibrate(self) -> _HostSpeed:
        """How much slower the profiler made the host.

        As a rule it does so by `PROFILER_SLOWDOWN`, and what follows the last op is nearpeak's own. A step that takes
        another time had a faster or slower host, or one with work after its last op, if that is the likelier
        explanation: where the device decides, the host would have to be many times slower before it did, and kernels
        that took a few percent longer are likelier.
        """
        pieces = self.timeline.pieces
        recorded_s = sum(piece.seconds for piece in pieces if piece.events)
        usual_s = recorded_s * (1.0 - 1.0 / PROFILER_SLOWDOWN) / max(1, sum(piece.events for piece in pieces))
        usual = _HostSpeed(min(_MAX_EVENT_S, usual_s), 0.0)

        def step_s(host: _HostSpeed) -> float:
            return self._run(UNCHANGED, self._clean_seconds(host)).seconds

        def unlikeliness(host: _HostSpeed) -> float:
            changed = _log_ratio(self._host_seconds(host), self._host_seconds(usual))
            return changed / _HOST_SPREAD + _log_ratio(step_s(host), wanted) / _DEVICE_SPREAD

        wanted = max(self.wall_s, step_s(_HostSpeed(_MAX_EVENT_S, 0.0)))
        time = step_s(usual)
        if abs(time - wanted) <= _CALIBRATED * wanted:
            return usual
        if time > wanted:
            other = _HostSpeed(
                bisect_decreasing(lambda x: step_s(_HostSpeed(x, 0.0)), wanted, usual.event_s, _MAX_EVENT_S), 0.0
            )
        elif step_s(_HostSpeed(usual.event_s, 1.0)) > wanted:
            share = bisect_decreasing(lambda x: step_s(_HostSpeed(usual.event_s, x)), wanted, 1.0, 0.0)
            other = _HostSpeed(usual.event_s, share)
        else:
            event_s = bisect_decreasing(lambda x: step_s(_HostSpeed(x, 1.0)), wanted, 0.0, usual.event_s)
            other = _HostSpeed(event_s, 1.0)
        return min(usual, other, key=unlikeliness)

    def _host_seconds(self, host: _HostSpeed) -> float:
        """The work of the host that depends on its speed."""
        clean = zip(self.timeline.pieces, self._clean_seconds(host), strict=True)
        return sum(seconds for piece, seconds in clean if piece.events or piece.after_last_op)

    def _run(self, change: Change, host_seconds: Sequence[float]) -> StepTime:
        """Replays steps in a row until their time does not change any more."""
        program = self._program(change, host_seconds)
        latency_s = self.timeline.launch_latency_s
        ends = [0.0] * len(self.timeline.kernels)
        free: dict[int, float] = {}
        host = last_end = last_step = covered = 0.0
        step_s = busy_s = 0.0
        for number in range(_ROUNDS):
            busy_s = 0.0
            for wait, seconds, kernel, kernel_s, stream, gap_s, after, after_s in program:
                if wait is not None:
                    until = max(free.values(), default=0.0) if wait == EVERYTHING_BEFORE else ends[wait]
                    if until > host:
                        host = until
                host += seconds
                if kernel is None:
                    continue
                before = free.get(stream, 0.0)
                if kernel_s <= 0.0:
                    ends[kernel] = before
                    continue
                start = max(host + latency_s, before + gap_s)
                if after is not None:
                    start = max(start, ends[after] + after_s)
                end = start + kernel_s
                ends[kernel] = free[stream] = end
                if end > covered:
                    busy_s += end - max(start, covered)
                    covered = end
            free = dict.fromkeys(free, covered)  # the next step needs the results of this one
            now = max(host, covered)
            step_s, last_end = now - last_end, now
            if number > 1 and abs(step_s - last_step) <= _SAME_STEP_TIME * step_s:
                break
            last_step = step_s
        return StepTime(step_s, busy_s)

    def _program(self, change: Change, host_seconds: Sequence[float]) -> list[_Instruction]:
        """The pieces with the change applied."""
        program: list[_Instruction] = []
        gone = {op for op, share in change.shorter.items() if share > 1.0 - 1e-9}
        copy_gone: dict[int, bool] = {}
        """Whether the kernel before, of the same stream, was a copy that goes."""
        for piece, clean_s in zip(self.timeline.pieces, host_seconds, strict=True):
            wait, seconds = piece.wait, clean_s
            launch_s = None if piece.op is None else 0.0 if piece.op in gone else change.launch_s.get(piece.op)
            if launch_s == 0.0:
                wait, seconds = None, 0.0
            elif piece.cause is not None:
                share = change.causes.get(piece.cause, 0.0)
                wait, seconds = (None, 0.0) if wait is not None and share > 0.0 else (wait, seconds * (1.0 - share))
            elif launch_s is not None:
                seconds = min(seconds, launch_s)
            elif piece.op is not None:
                seconds *= 1.0 - change.calls.get(piece.op, 0.0)
            if piece.kernel is None:
                program.append((wait, seconds, None, 0.0, 0, 0.0, None, 0.0))
                continue
            kernel = self.timeline.kernels[piece.kernel]
            kernel_s, gap_s = kernel.seconds, kernel.gap_s
            if kernel.op is not None:
                kernel_s = 0.0 if kernel.op in gone else kernel_s * (1.0 - change.shorter.get(kernel.op, 0.0))
                if change.launch_s.get(kernel.op) == 0.0:
                    gap_s = 0.0 if kernel.op in change.shorter else min(gap_s, _GRAPH_GAP_S)
            if copy_gone.get(kernel.stream) and not kernel.is_copy:
                gap_s = min(gap_s, self.timeline.kernel_gap_s)
            copy_gone[kernel.stream] = kernel.is_copy and kernel_s <= 0.0
            if kernel.communication:
                kernel_s *= 1.0 - change.communication
            program.append((wait, seconds, piece.kernel, kernel_s, kernel.stream, gap_s, kernel.after, kernel.after_s))
        return program
