"""`HostSpan`: what the CPU did that can leave a device idle: waiting for it, loading input, allocating, compiling."""

from __future__ import annotations

import functools
import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from nearpeak.trace.kineto.recording import Recording, Span

HostKind = Literal["profiler", "compilation", "garbage collection", "input", "allocator", "synchronization"]

GARBAGE_COLLECTION: Final = "nearpeak: garbage collection"
"""How the mark around a collection begins; see `nearpeak.trace.kineto.marks`."""
STEP_END_WAIT: Final = "nearpeak: end of a step"
"""The name of the mark around a wait for the device that is nearpeak's, not that of the code which is profiled."""

_WAIT_CALLS = re.compile(r"\w*Synchronize|(?:cuda|cu|hip)Memcpy(?!\w*Async)|ur(?:EventWait|QueueFinish)")
"""Calls that return when the device is done with something. torch reads numbers on AMD with hipMemcpyWithStream."""
_ALLOCATION_CALLS = re.compile(
    r"(?:cuda|cu|hip)(?:Malloc|Free|Host(?:Alloc|Free|Malloc|Register|Unregister)"
    r"|Mem(?:Alloc|Free|HostAlloc|Create|Release|Map|Unmap|SetAccess|AddressReserve|AddressFree))"
)
_KERNEL_LOADING_CALLS = re.compile(
    r"(?:cuda|cu|hip)(?:Module|Library)Load|Lazy Function Loading|Runtime Triggered Module Load"
)
DATA_LOADER_RANGE: Final = "enumerate(DataLoader)#"
"""How torch names the range in which a data loader gives its next batch; see `nearpeak.trace.kineto.marks` too."""
LINE_SEPARATOR: Final = " at "
"""Before the line in the name of a mark of nearpeak's."""
_COMPILATION_SUFFIX = "(dynamo_timed)"
"""How the names of Dynamo's and Inductor's own ranges end, which they open while they compile."""
_COMPILATION_RANGE = "dynamo"
"""The range around all of a compilation: what comes before and after the ranges inside takes milliseconds too."""
_PAGEABLE = "Pageable"
"""In the name of a copy: a side of it is memory that the driver must copy itself, so that the call waits."""
_IGNORED_OVERHEADS = ("Command Buffer Full",)


class HostCall(NamedTuple):
    """A span with what it means. Times are microseconds."""

    kind: HostKind
    span: Span
    owner: object | None
    """The call of the op that holds it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSpan:
    """Something that the CPU did and that can leave a device idle."""

    kind: HostKind
    name: str
    start_s: float
    """From the start of what was read."""
    seconds: float
    op: int | None
    """The index of the op that holds it."""


@functools.cache  # a file has few different names
def kind_of_runtime_call(name: str) -> HostKind | None:
    """What a call of the device's runtime or driver means for the device; None for an ordinary one, as a launch.

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
    """What an op or a range with this name means; None for an ordinary one.

    >>> kind_of_range("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__")
    'input'
    """
    if name.endswith(_COMPILATION_SUFFIX) or name == _COMPILATION_RANGE:
        return "compilation"
    if name.startswith(DATA_LOADER_RANGE):
        return "input"
    return "garbage collection" if name.startswith(GARBAGE_COLLECTION) else None


def line_of_mark(name: str) -> str:
    """The user's line in the name of a mark; "" where it has none.

    >>> line_of_mark("nearpeak: garbage collection at train.py:41"), line_of_mark("nearpeak: garbage collection")
    ('train.py:41', '')
    """
    return name.rpartition(LINE_SEPARATOR)[2] if LINE_SEPARATOR in name else ""


def overhead_calls(recording: Recording) -> list[HostCall]:
    """What the profiler says it did itself, and kernels that were loaded late."""
    return [
        HostCall(kind_of_runtime_call(span.name) or "profiler", span, None)
        for span in recording.overheads
        if span.name not in _IGNORED_OVERHEADS
    ]


def blocking_copies(recording: Recording, launches: Mapping[int, Span], owners: Mapping[int, object]) -> list[HostCall]:
    """The calls of copies that wait for the device although their name does not say so."""
    copies = []
    for item in recording.device_spans:
        if item.kind == "memcpy" and _PAGEABLE in item.name and item.correlation is not None:
            launch = launches.get(item.correlation)
            if launch is not None and kind_of_runtime_call(launch.name) is None:
                copies.append(HostCall("synchronization", launch, owners.get(item.correlation)))
    return copies


def host_spans(calls: Iterable[HostCall], indices: Mapping[int, int], start: float, end: float) -> tuple[HostSpan, ...]:
    """Those that reach into a window, in the order of time. What lies in another one of the same kind is left out.

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
    """When any thread was inside of an op or a call of the runtime: starts and ends, disjoint, in seconds."""
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
