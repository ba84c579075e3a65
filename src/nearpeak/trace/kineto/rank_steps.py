"""`rank_timeline`: the steps of one rank from a recording of torch.profiler, as a `RankTimeline`.

The lane of a rank is its device, or without one the threads of the program. Where a device is idle, its host says why.
On a CPU a collective runs on a thread of its backend: the program waits for it where it runs nothing itself.
"""

from __future__ import annotations

import functools
import math
import re
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from nearpeak.devices.host_load import ThreadSeconds
from nearpeak.profiles.rank_timeline import (
    Activity,
    OpTotal,
    RankCollective,
    RankStep,
    RankTimeline,
    cut_segments,
    label_activities,
)
from nearpeak.profiles.waterfall import Interval, merge_intervals
from nearpeak.trace.kineto.collectives import (
    RecordedCollective,
    communication_waits,
    device_collectives,
    groups_of,
    host_collectives,
)
from nearpeak.trace.kineto.host import kind_of_range
from nearpeak.trace.kineto.recording import DeviceSpan, Recording, Span

STEP_PREFIX = "ProfilerStep#"
_CONTAINER = re.compile(r"autograd::|torch::autograd|_?c10d|record_param_comms|dynamo|nccl:|gloo:|Optimizer\.")
"""Ranges and operators around others, and those of communication."""
_CPP_KERNEL = "cpp_fused"
_LONG_GAP = 200.0
"""Microseconds without an op, while a collective is under way, that are a wait for it: shorter ones are Python's."""
_END_TOLERANCE = 50.0
"""Microseconds between the end of a collective on its thread and the end of the wait for it."""
MOST_OPS = 40
"""Names of ops that a step keeps."""


class GroupNumber(NamedTuple):
    """The process group of a collective, and its number in it."""

    group: str
    sequence: int


def rank_timeline(
    recording: Recording,
    *,
    rank: int,
    world_size: int | None = None,
    source: str = "",
    numbers: Sequence[GroupNumber] = (),
    thread_seconds: Mapping[int, ThreadSeconds] | None = None,
    first_step: int = 0,
    clock_hz: float | None = None,
) -> RankTimeline:
    """The steps of a recording.

    Args:
        recording: The file. Without the profiler's steps, all of it is one step.
        rank: Of the process.
        world_size: The number of ranks.
        source: The file, for people.
        numbers: Groups and numbers of the collectives of the whole recording in the order of their calls, if they are
            known from elsewhere and as many.
        thread_seconds: Those of the thread of the program, by the number of the step in the recording.
        first_step: What is added to the numbers of steps.
        clock_hz: The clock of the device.
    """
    on_device = bool(recording.device_spans)
    collectives = device_collectives(recording) if on_device else host_collectives(recording.threads)
    if len(numbers) == len(collectives) and not any(item.group for item in collectives):
        collectives = [
            item._replace(group=number.group, sequence=number.sequence)
            for item, number in zip(collectives, numbers, strict=True)
        ]
    lane = _Lane(recording, collectives, on_device)
    windows = _step_windows(recording, lane)
    origin = min((start for _, start, _ in windows), default=0.0)
    base_us = _base_us(recording.metadata)
    numbered = [number for number, *_ in windows]
    starts = [start for _, start, _ in windows]
    kept = [
        RankCollective(
            kind=item.kind,
            group=item.group,
            sequence=item.sequence,
            step=first_step + numbered[max(0, _place(starts, item.called))],
            called_s=(item.called - origin) / 1e6,
            end_s=(item.end - origin) / 1e6,
            bytes=item.bytes,
            ranks=item.ranks,
            stream=item.stream,
        )
        for item in collectives
        if windows
    ]
    pieces = [lane.pieces((start, end)) for _, start, end in windows]
    kept = [_with_end(item, lane.cut_ends, origin) for item in kept]
    steps = tuple(
        lane.step(first_step + number, (start, end), origin, parts, kept, (thread_seconds or {}).get(number))
        for (number, start, end), parts in zip(windows, pieces, strict=True)
    )
    notes = []
    if recording.truncated:
        notes.append("its file is truncated")
    if recording.damaged:
        notes.append(f"{recording.damaged:,} events of its file are damaged")
    return RankTimeline(
        rank=rank,
        world_size=world_size,
        host=str(recording.metadata.get("host_name") or "")[:200],
        origin_s=(base_us + origin) / 1e6,
        steps=steps,
        collectives=tuple(kept),
        groups=groups_of(recording.metadata),
        on_device=on_device,
        clock_hz=clock_hz,
        source=source,
        notes=tuple(notes),
    )


def _with_end(item: RankCollective, cut_ends: Sequence[float], origin: float) -> RankCollective:
    """A collective that ended when the program stopped waiting for it, if that was earlier than recorded."""
    place = bisect_left(cut_ends, item.called_s * 1e6 + origin)
    if place == len(cut_ends) or (end_s := (cut_ends[place] - origin) / 1e6) >= item.end_s:
        return item
    return replace(item, end_s=end_s)


def rank_of(metadata: Mapping[str, Any]) -> tuple[int, int | None] | None:
    """The rank that a file says it is of, and the number of ranks; None if it says nothing."""
    info = metadata.get("distributedInfo")
    if not isinstance(info, dict) or type(info.get("rank")) is not int or info["rank"] < 0:
        return None
    size = info.get("world_size")
    return info["rank"], size if type(size) is int and size > 0 else None


def _base_us(metadata: Mapping[str, Any]) -> float:
    base = metadata.get("baseTimeNanoseconds")
    return base / 1e3 if type(base) is int and 0 <= base < 2**63 else 0.0


def _place(starts: Sequence[float], time: float) -> int:
    return bisect_left(starts, math.nextafter(time, math.inf)) - 1


def _step_windows(recording: Recording, lane: _Lane) -> list[tuple[int, float, float]]:
    """Number, start and end of each step; a step lasts until the next one begins.

    On a device the host runs ahead: a step begins with the first kernel that was launched in it.
    """
    found: dict[int, tuple[float, float]] = {}
    for spans in recording.threads.values():
        for span in spans:
            if span.kind == "annotation" and span.name.startswith(STEP_PREFIX):
                number = span.name.removeprefix(STEP_PREFIX)
                if number.isdigit() and len(number) < 10:
                    found.setdefault(int(number), (span.start, span.end))
    steps = sorted((number, start, end) for number, (start, end) in found.items())
    if not steps:
        start, end = lane.extent()
        return [(0, start, end)] if end > start else []
    if not recording.device_spans:
        return steps
    launches = {
        span.correlation: span.start
        for spans in recording.threads.values()
        for span in spans
        if span.kind == "launch" and span.correlation is not None
    }
    first: dict[int, float] = {}
    starts = [start for _, start, _ in steps]
    last_end = 0.0
    for kernel in recording.device_spans:
        launched = kernel.start if kernel.correlation is None else launches.get(kernel.correlation, kernel.start)
        place = _place(starts, launched)
        if place >= 0:
            first[place] = min(first.get(place, math.inf), kernel.start)
        last_end = max(last_end, kernel.end)
    begun = [(steps[place][0], first[place]) for place in sorted(first)]
    ends = [start for _, start in begun[1:]] + [last_end]
    return [(number, start, end) for (number, start), end in zip(begun, ends, strict=True) if end > start]


class _Lane:
    """What a rank did, as intervals by activity, in microseconds."""

    def __init__(self, recording: Recording, collectives: Sequence[RecordedCollective], on_device: bool) -> None:
        self.on_device = on_device
        self._works = merge_intervals((item.start, item.end) for item in collectives)
        self._ends = sorted(item.end for item in collectives)
        self.cut_ends: list[float] = []
        """Ends of waits for collectives whose own end was recorded too late."""
        threads = recording.threads.values()
        self._waits = merge_intervals((span.start, span.end) for span in communication_waits(threads))
        kinds = {name: kind_of_range(name) for name in {span.name for spans in threads for span in spans}}
        self._input = merge_intervals(_named(threads, {name for name, kind in kinds.items() if kind == "input"}))
        self._garbage = merge_intervals(
            _named(threads, {name for name, kind in kinds.items() if kind == "garbage collection"})
        )
        self._host_ops = _outer_ops(recording.threads)
        self._ops: list[Span] | list[DeviceSpan]
        if on_device:
            streams = {(item.start, item.stream) for item in collectives}
            self._ops = [span for span in recording.device_spans if (span.start, span.stream) not in streams]
        else:
            self._ops = self._host_ops
        self._starts = [span.start for span in self._ops]
        self._compute = merge_intervals((span.start, span.end) for span in self._ops)
        self._launching = merge_intervals((span.start, span.end) for span in self._host_ops) if on_device else []

    def extent(self) -> Interval:
        """From the first op to the last."""
        if not self._compute:
            return 0.0, 0.0
        ends = [self._compute[-1][1], *(end for _, end in self._works[-1:])]
        return min(self._compute[0][0], *(start for start, _ in self._works[:1]), math.inf), max(ends)

    def pieces(self, window: Interval) -> list[tuple[float, float, Activity]]:
        """What the rank did in a window, at each instant."""
        ordered: list[tuple[Activity, list[Interval]]]
        if self.on_device:
            ordered = [
                ("ops", self._compute),
                ("communication", self._works),
                ("garbage collection", self._garbage),
                ("input", self._input),
                ("launching", self._launching),
            ]
        else:
            ordered = [
                ("communication", self._waits),
                ("garbage collection", self._garbage),
                ("input", self._input),
                ("ops", self._compute),
                ("communication", self._works),
            ]
        labels = [(label, _inside(intervals, window)) for label, intervals in ordered]
        labeled = label_activities(window, labels)
        if not self.on_device:
            labeled = [part for piece in labeled for part in self._wait_and_rest(*piece)]
        return labeled

    def step(
        self,
        number: int,
        window: Interval,
        origin: float,
        pieces: Sequence[tuple[float, float, Activity]],
        collectives: Sequence[RankCollective],
        thread_seconds: ThreadSeconds | None,
    ) -> RankStep:
        """One step; `collectives` are those of the whole recording."""
        parts = [((start - origin) / 1e6, (end - origin) / 1e6, label) for start, end, label in pieces]
        start_s, end_s = (window[0] - origin) / 1e6, (window[1] - origin) / 1e6
        near = {index: item for index, item in enumerate(collectives) if item.called_s < end_s and item.end_s > start_s}
        return RankStep(
            number=number,
            start_s=start_s,
            end_s=end_s,
            segments=cut_segments(parts, near),
            ops=self._totals(window),
            preempted_s=None if thread_seconds is None else thread_seconds.waited_s,
            processor_s=None if thread_seconds is None else thread_seconds.ran_s,
        )

    def _wait_and_rest(self, start: float, end: float, label: Activity) -> list[tuple[float, float, Activity]]:
        """A piece of time in which a collective was under way and no op ran, up to the last one that ended in it.

        What comes after that is no wait: the program went on before another one ended. A long time without an op is
        one nevertheless.
        """
        if label != "communication" or _inside(self._waits, (start, end)):
            return [(start, end, label)]
        place = bisect_left(self._ends, end + _END_TOLERANCE) - 1
        until = min(self._ends[place], end) if place >= 0 else start
        if until <= start and end - start >= _LONG_GAP:
            # The thread of the backend tells the program that it is done, and may lose its processor before it ends
            # its range.
            until = end
            self.cut_ends.append(end)
        parts: list[tuple[float, float, Activity]] = []
        if until > start:
            parts.append((start, until, label))
        if end > max(until, start):
            parts.append((max(until, start), end, "python"))
        return parts

    def _totals(self, window: Interval) -> dict[str, OpTotal]:
        totals: dict[str, list[float]] = {}
        for span in self._ops[bisect_left(self._starts, window[0]) : bisect_left(self._starts, window[1])]:
            total = totals.setdefault(span.name, [0, 0.0, 0.0])
            total[0] += 1
            total[1] += (span.end - span.start) / 1e6
            total[2] += _elements(span)
        longest = sorted(totals, key=lambda name: -totals[name][1])[:MOST_OPS]
        return {
            name[:200]: OpTotal(count=int(totals[name][0]), seconds=totals[name][1], elements=totals[name][2])
            for name in longest
        }


def _inside(intervals: Sequence[Interval], window: Interval) -> list[Interval]:
    """The disjoint intervals that touch a window."""
    first = max(0, bisect_left(intervals, (window[0], -math.inf)) - 1)
    return [item for item in intervals[first : bisect_left(intervals, (window[1], -math.inf))] if item[1] > window[0]]


def _elements(span: Span | DeviceSpan) -> float:
    if isinstance(span, DeviceSpan):
        return float(span.blocks or 0)
    dims = None if span.inputs is None else span.inputs.dims
    if not dims:
        return 0.0
    return sum(_product(item) for item in dims) if isinstance(dims, list) else 0.0


def _product(dims: Any) -> float:
    if not isinstance(dims, list) or not dims:
        return 0.0
    if all(type(size) is int and 0 <= size < 2**40 for size in dims):
        return min(float(math.prod(dims)), 1e18)
    return sum(_product(item) for item in dims)


def _named(threads: Iterable[Sequence[Span]], names: Collection[str]) -> list[Interval]:
    """The operators and ranges with these names."""
    if not names:
        return []
    return [
        (span.start, span.end)
        for spans in threads
        for span in spans
        if span.name in names and span.kind in ("annotation", "op")
    ]


def _outer_ops(threads: Mapping[Any, Sequence[Span]]) -> list[Span]:
    """The operators that are in no other one, of all threads, by start."""
    outer: list[Span] = []
    for spans in threads.values():
        end = -math.inf
        for span in spans:
            if span.kind == "op" and span.start >= end and _is_operator(span.name):
                outer.append(span)
                end = span.end
    return sorted(outer, key=lambda span: span.start)


@functools.cache
def _is_operator(name: str) -> bool:
    return ("::" in name or _CPP_KERNEL in name) and not _CONTAINER.match(name)
