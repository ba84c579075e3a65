"""`HostSpan`: host activity that can leave a device idle: synchronization, data loading, allocation, compilation."""

from __future__ import annotations

import functools
import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from nearpeak.trace.kineto.recording import Recording, Span

HostKind = Literal["profiler", "compilation", "garbage collection", "input", "allocator", "synchronization", "host ops"]

GARBAGE_COLLECTION: Final = "nearpeak: garbage collection"
"""How the name of the range around a garbage collection begins; its generation follows. See `kineto/marks.py`."""
STEP_END_WAIT: Final = "nearpeak: end of a step"
"""The name of the range around a synchronization that is nearpeak's own, not the profiled code's."""

MARKER: Final = "nearpeak: marker "
"""How the name of the range around a marker kernel begins; its number follows. See `kineto/markers.py`."""
GRAPH_REPLAY: Final = "nearpeak: replay of graph "
"""How the name of the range around a replay of a CUDA graph begins; its number follows."""

PRINTED_TENSOR: Final = "nearpeak: printed tensor"
"""How the name of the range around the printing of a device's tensor begins: it waits for the values."""
NEW_TENSOR: Final = "nearpeak: new tensor"
"""How the name of the range around `torch.tensor` begins: no trace sees the ops inside of it."""

_WAIT_CALLS = re.compile(r"\w*Synchronize|(?:cuda|cu|hip)Memcpy(?!\w*Async)|ur(?:EventWait|QueueFinish)")
"""Calls that block until the device has finished something. On AMD, torch reads numbers with hipMemcpyWithStream."""
_ALLOCATION_CALLS = re.compile(
    r"(?:cuda|cu|hip)(?:Malloc|Free|Host(?:Alloc|Free|Malloc|Register|Unregister)"
    r"|Mem(?:Alloc|Free|HostAlloc|Create|Release|Map|Unmap|SetAccess|AddressReserve|AddressFree))"
)
_KERNEL_LOADING_CALLS = re.compile(
    r"(?:cuda|cu|hip)(?:Module|Library)Load|Lazy Function Loading|Runtime Triggered Module Load"
)
DATA_LOADER_RANGE: Final = "enumerate(DataLoader)#"
"""How the name of torch's range around the next batch of a data loader begins; see `kineto/marks.py` too."""
LINE_SEPARATOR: Final = " at "
"""Separates the user's line in the name of a range that nearpeak adds."""
_COMPILATION_SUFFIX = "(dynamo_timed)"
"""How the names of the ranges end that Dynamo and Inductor open while they compile."""
_COMPILATION_RANGE = "dynamo"
"""The range around a whole compilation: the time outside of its inner ranges takes milliseconds too."""
_PAGEABLE = "Pageable"
"""In the name of a copy from or to memory that is not pinned, which makes the call block."""
_IGNORED_OVERHEADS = ("Command Buffer Full",)


class HostCall(NamedTuple):
    """A span with its kind. Times are microseconds."""

    kind: HostKind
    span: Span
    owner: object | None
    """The call of the op around it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSpan:
    """Host activity that can leave a device idle."""

    kind: HostKind
    name: str
    start_s: float
    """From the start of what was read."""
    seconds: float
    op: int | None
    """The index of the op around it."""


@functools.cache  # a file has few different names
def kind_of_runtime_call(name: str) -> HostKind | None:
    """The kind of a call of the device's runtime or driver; None for an ordinary one such as a launch.

    >>> [kind_of_runtime_call(name) for name in ("cudaStreamSynchronize", "hipMalloc", "cudaMemcpyAsync")]
    ['synchronization', 'allocator', None]
    """
    if _WAIT_CALLS.match(name):
        return "synchronization"
    if _ALLOCATION_CALLS.match(name):
        return "allocator"
    return "compilation" if _KERNEL_LOADING_CALLS.match(name) else None


@functools.cache
def kind_of_range(name: str) -> HostKind | None:
    """The kind of an op or a range with this name; None for an ordinary one.

    >>> kind_of_range("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__")
    'input'
    """
    if name.endswith(_COMPILATION_SUFFIX) or name == _COMPILATION_RANGE:
        return "compilation"
    if name.startswith(DATA_LOADER_RANGE):
        return "input"
    if name.startswith(PRINTED_TENSOR):
        return "synchronization"
    return "garbage collection" if name.startswith(GARBAGE_COLLECTION) else None


def line_of_mark(name: str) -> str:
    """The user's line in the name of a range that nearpeak adds; "" where it has none.

    >>> line_of_mark("nearpeak: garbage collection at train.py:41"), line_of_mark("nearpeak: garbage collection")
    ('train.py:41', '')
    """
    return name.rpartition(LINE_SEPARATOR)[2] if LINE_SEPARATOR in name else ""


def generation_of_mark(name: str) -> int | None:
    """The generation in the name of the range around a garbage collection; None where it has none.

    >>> generation_of_mark("nearpeak: garbage collection 2 at train.py:41"), generation_of_mark("ProfilerStep#1")
    (2, None)
    """
    generation = name.removeprefix(GARBAGE_COLLECTION).lstrip()[:1] if name.startswith(GARBAGE_COLLECTION) else ""
    return int(generation) if generation.isdigit() else None


def overhead_calls(recording: Recording) -> list[HostCall]:
    """The overheads that the profiler reports: its own, and lazily loaded kernels."""
    return [
        HostCall(kind_of_runtime_call(span.name) or "profiler", span, None)
        for span in recording.overheads
        if span.name not in _IGNORED_OVERHEADS
    ]


def blocking_copies(recording: Recording, launches: Mapping[int, Span], owners: Mapping[int, object]) -> list[HostCall]:
    """The calls of copies that block although their name does not say so: those of memory that is not pinned."""
    copies = []
    for item in recording.device_spans:
        if item.kind == "memcpy" and _PAGEABLE in item.name and item.correlation is not None:
            launch = launches.get(item.correlation)
            if launch is not None and kind_of_runtime_call(launch.name) is None:
                copies.append(HostCall("synchronization", launch, owners.get(item.correlation)))
    return copies


def host_spans(calls: Iterable[HostCall], indices: Mapping[int, int], start: float, end: float) -> tuple[HostSpan, ...]:
    """Host calls that overlap a window, in the order of time, without those inside another one of the same kind.

    Args:
        calls: All of the file.
        indices: Of ops, by the identity of their calls.
        start: Of the window, in microseconds; the times of the result are from there.
        end: Of the window.
    """
    inside = [call for call in calls if call.span.end > start and call.span.start < end]
    inside.sort(key=lambda call: (call.span.start, -call.span.end))
    last: dict[HostKind, float] = {}
    spans = []
    for kind, span, owner in inside:
        if span.end <= last.get(kind, start):
            continue
        last[kind] = span.end
        spans.append(
            HostSpan(
                kind=kind,
                name=span.name,
                start_s=(span.start - start) / 1e6,
                seconds=(span.end - span.start) / 1e6,
                op=None if owner is None else indices.get(id(owner)),
            )
        )
    return tuple(spans)


def busy_intervals(threads: Iterable[Sequence[Span]], start: float, end: float) -> tuple[tuple[float, float], ...]:
    """When any thread was inside an op or a call of the runtime: disjoint starts and ends, in seconds."""
    merged: list[tuple[float, float]] = []
    for spans in threads:
        open_from = open_until = start
        for position in range(bisect_left(spans, start, key=lambda span: span.start), len(spans)):
            span = spans[position]
            if span.start >= end:
                break
            if span.kind not in ("op", "launch"):
                continue
            if span.start > open_until:
                merged.append((open_from, open_until))
                open_from, open_until = span.start, span.end
            elif span.end > open_until:
                open_until = span.end
        merged.append((open_from, open_until))
    merged.sort()
    disjoint: list[tuple[float, float]] = []
    for begin, finish in merged:
        first, last = (begin - start) / 1e6, (finish - start) / 1e6
        if disjoint and first <= disjoint[-1][1]:
            disjoint[-1] = (disjoint[-1][0], max(last, disjoint[-1][1]))
        elif last > first:
            disjoint.append((first, last))
    return tuple(disjoint)


def intervals_outside(
    intervals: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]]
) -> tuple[tuple[float, float], ...]:
    """Intervals without what is in others; both are disjoint and in order.

    >>> intervals_outside([(0.0, 4.0), (5.0, 9.0)], [(3.0, 6.0)])
    ((0.0, 3.0), (6.0, 9.0))
    """
    outside: list[tuple[float, float]] = []
    for start, end in intervals:
        for first, last in others:
            if last > start and first < end:
                if first > start:
                    outside.append((start, first))
                start = last
        if end > start:
            outside.append((start, end))
    return tuple(outside)


def event_starts(threads: Iterable[Sequence[Span]], start: float, end: float) -> tuple[float, ...]:
    """When the ops, ranges and calls of the runtime of all threads began, in seconds from the start of the window."""
    return tuple(
        sorted(
            (span.start - start) / 1e6
            for spans in threads
            for span in spans
            if start <= span.start < end and span.kind != "python"
        )
    )


def host_end(threads: Iterable[Sequence[Span]], start: float, end: float) -> float:
    """When the host was done with a step, in seconds: nearpeak waits for the device after it."""
    waits = [span.start for spans in threads for span in spans if span.name == STEP_END_WAIT]
    return (max((time for time in waits if start <= time < end), default=end) - start) / 1e6
