"""`KernelRun`: a kernel, copy or fill that ran on the device, with the op that launched it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nearpeak.trace.kineto.calls import OpCall, OpCalls
from nearpeak.trace.kineto.recording import DeviceKind, DeviceSpan


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphLaunch:
    """What a file says about a kernel of a CUDA graph whose ops nearpeak knows."""

    graph: int
    """The number of the graph."""
    start_s: float
    """When the graph was launched, from the start of what was read."""
    node: int | None
    """The id of the node; None where the file does not tell."""
    grid: tuple[int, ...] | None
    block: tuple[int, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRun:
    """A kernel, a copy or a fill that ran on the device."""

    name: str
    kind: DeviceKind
    start_s: float
    """From the start of what was read."""
    seconds: float
    device: int
    stream: int
    op: int | None
    """The index of the op that launched it; None where the file does not tell."""
    in_graph: bool = False
    """A CUDA graph launched it, with all other kernels of the graph."""
    replay: GraphLaunch | None = None
    """The launch of the graph that it belongs to, if nearpeak knows the graph's ops."""
    bytes: float | None = None
    """Of a copy or a fill; None for a kernel."""
    launched_s: float | None = None
    """When the CPU had launched it, from the start of what was read; None where the file does not tell. A graph has one
    launch, which is over at the latest when its first kernel starts."""


def owner_of(span: DeviceSpan, calls: OpCalls) -> OpCall | None:
    """The op that launched a kernel.

    Kernels of a graph belong to the launch of the graph. For others the id of the innermost event at the launch tells,
    or, where that is missing, the event around the launch.
    """
    launched_by = calls.by_correlation.get(span.correlation) if span.correlation is not None else None
    if launched_by is not None and launched_by.kind == "graph":
        return launched_by
    named = calls.by_external.get(span.external) if span.external is not None else None
    return named or launched_by


LaunchedSpan = tuple[DeviceSpan, OpCall | None]


def launch_times(spans: Sequence[LaunchedSpan], calls: OpCalls) -> dict[int, float]:
    """When each was launched, in microseconds, by the identity of the span; minus infinity: before the recording.

    The kernels of a stream run in the order of their launches. So one whose launch is not in the file was launched
    between those before and after it on its stream: with none before it, before the recording began.

    Args:
        spans: In the order of their starts.
        calls: The launches.
    """
    times: dict[int, float] = {}
    known_streams: set[tuple[int, int]] = set()
    for span, owner in spans:
        launch = calls.launches.get(span.correlation) if span.correlation is not None else None
        by = launch or (None if owner is None else owner.span)
        if by is not None:
            times[id(span)] = by.start
            known_streams.add((span.device, span.stream))
    if len(times) == len(spans):
        return times
    first = min((span.start for span, _ in spans if id(span) in times), default=-math.inf)
    before = {(span.device, span.stream) for span, _ in spans if span.start < first}
    latest: dict[tuple[int, int], float] = {}
    for span, _ in spans:
        stream = (span.device, span.stream)
        if id(span) in times:
            latest[stream] = times[id(span)]
        elif stream in known_streams:
            times[id(span)] = latest.get(stream, -math.inf)
        else:  # of a stream without launches: it was busy before, and nothing shows that it was given more
            times[id(span)] = -math.inf if stream in before else span.start
    return times


def kernel_runs(
    spans: Sequence[LaunchedSpan], indices: Mapping[int, int], origin: float, calls: OpCalls
) -> tuple[KernelRun, ...]:
    """The kernels in order of time. `indices` has the index of each op by the identity of its call."""
    begun: dict[int | None, float] = {}
    """When the device began with each launch of a graph."""
    for span, owner in spans:
        if is_in_graph(span, owner):
            begun[span.correlation] = min(span.start, begun.get(span.correlation, span.start))
    return tuple(
        KernelRun(
            name=span.name,
            kind=span.kind,
            start_s=(span.start - origin) / 1e6,
            seconds=span.duration / 1e6,
            device=span.device,
            stream=span.stream,
            op=indices.get(id(owner)) if owner is not None else None,
            in_graph=is_in_graph(span, owner),
            replay=_graph_launch(span, owner, origin),
            bytes=span.bytes,
            launched_s=_launch_end_s(span, calls, origin, begun.get(span.correlation)),
        )
        for span, owner in spans
    )


def _graph_launch(span: DeviceSpan, owner: OpCall | None, origin: float) -> GraphLaunch | None:
    if owner is None or owner.graph is None:
        return None
    start_s = (owner.span.start - origin) / 1e6
    return GraphLaunch(graph=owner.graph, start_s=start_s, node=span.node, grid=span.grid, block=span.block)


def is_in_graph(span: DeviceSpan, owner: OpCall | None) -> bool:
    """Whether a CUDA graph launched it."""
    return span.in_graph or (owner is not None and owner.kind == "graph")


def graph_note(kernels: Sequence[KernelRun]) -> str:
    """A note about kernels that CUDA graphs launched; "" where there are none.

    >>> run = dict(name="k", kind="kernel", start_s=0.0, seconds=2e-6, device=0, stream=7, op=None)
    >>> graph_note([KernelRun(in_graph=True, **run), KernelRun(in_graph=True, **run), KernelRun(**run)])
    '2 kernels of 0.004 ms were launched by CUDA graphs and have no ops, so they are measured without bounds.'
    """
    inside = [kernel for kernel in kernels if kernel.in_graph]
    if not inside:
        return ""
    total = sum(kernel.seconds for kernel in inside)
    return (
        f"{len(inside)} kernels of {total * 1e3:.3f} ms were launched by CUDA graphs and have no ops, so they are "
        "measured without bounds."
    )


def _launch_end_s(span: DeviceSpan, calls: OpCalls, origin: float, begun: float | None) -> float | None:
    """The end of its launch, or the start of its graph if that is earlier: a long graph runs while it is launched."""
    launch = calls.launches.get(span.correlation) if span.correlation is not None else None
    if launch is None:
        return None
    return ((launch.end if begun is None else min(launch.end, begun)) - origin) / 1e6


def seconds_by_op(kernels: Sequence[KernelRun]) -> dict[int | None, float]:
    """Measured device time by the index of the op; under None what belongs to none.

    >>> run = dict(kind="kernel", start_s=0.0, device=0, stream=7)
    >>> seconds_by_op([KernelRun(name="a", seconds=1.0, op=op, **run) for op in (3, 3, None)])
    {3: 2.0, None: 1.0}
    """
    total: dict[int | None, float] = {}
    for kernel in kernels:
        total[kernel.op] = total.get(kernel.op, 0.0) + kernel.seconds
    return total
