"""`Recording`: what matters of a trace file, as small tuples: spans of the CPU's threads, and what ran on a device."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from nearpeak.capture.kineto.events import EventFile

SpanKind = Literal["op", "annotation", "python", "launch", "overhead"]
DeviceKind = Literal["kernel", "memcpy", "memset"]

_DEVICE: dict[str, DeviceKind] = {"kernel": "kernel", "gpu_memcpy": "memcpy", "gpu_memset": "memset"}
_SPANS: dict[str, SpanKind] = {
    "cpu_op": "op",
    "operator": "op",  # before torch 1.12
    "user_annotation": "annotation",
    "python_function": "python",
    "cuda_runtime": "launch",
    "cuda_driver": "launch",
    "hip_runtime": "launch",
    "xpu_runtime": "launch",
    "runtime": "launch",
    "overhead": "overhead",
}
_NOT_THE_USERS = ("torch/", "nearpeak/", "<")
"""How the names of Python frames begin that lead to no line of the user's."""


class Inputs(NamedTuple):
    """The inputs of an op as the profiler wrote them, None where it wrote none. One object for all that are equal."""

    dims: Any
    strides: Any
    types: Any
    values: Any


class Span(NamedTuple):
    """Something that a thread of the CPU did. Times are microseconds."""

    start: float
    end: float
    kind: SpanKind
    name: str
    external: int | None = None
    """The number that kernels refer to."""
    correlation: int | None = None
    """Of a launch: the number that it shares with what it started on the device."""
    sequence: int | None = None
    """Of a forward op and of the backward node that it made."""
    inputs: Inputs | None = None
    facts: Mapping[str, Any] | None = None
    """What else is known: of Inductor's kernels their blocks, of an old file's op its call stack."""


class DeviceSpan(NamedTuple):
    """A kernel, a copy or a fill on the device. Times are microseconds."""

    start: float
    end: float
    kind: DeviceKind
    name: str
    stream: int
    device: int
    external: int | None
    correlation: int | None
    bytes: float | None
    in_graph: bool
    blocks: int | None
    """Of a kernel: the product of its grid."""
    duration: float
    """As the file has it: the difference of two times since the start of the machine has fewer digits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """One file. `threads` are by process and thread, each in the order of time, outer spans before inner ones."""

    threads: Mapping[tuple[Any, Any], list[Span]]
    device_spans: list[DeviceSpan]
    metadata: Mapping[str, Any]
    truncated: bool
    damaged: int
    last_written: tuple[DeviceSpan, ...] = ()
    """Of each stream, what comes last in the file."""
    overheads: tuple[Span, ...] = ()
    """What the profiler or the driver did besides, on threads that the file does not name."""


def load(path: str | Path) -> Recording:
    """Reads a file in one pass. Python frames of torch, the standard library and built-in functions are dropped."""
    file = EventFile(path)
    threads: dict[tuple[Any, Any], list[Span]] = {}
    device_spans: list[DeviceSpan] = []
    inputs: dict[str, Inputs] = {}
    overheads: list[Span] = []
    for event in file:
        if event.get("ph") != "X":
            continue
        category = str(event.get("cat", "")).lower()
        kind = _SPANS.get(category)
        on_device = _DEVICE.get(category)
        start = _number(event.get("ts"))
        name = event.get("name")
        if start is None or not isinstance(name, str) or (kind is None and on_device is None):
            continue
        end = start + max(_number(event.get("dur")) or 0.0, 0.0)
        args = event.get("args")
        facts = args if isinstance(args, dict) else {}
        if on_device is not None:
            device_spans.append(_device_span(start, end, on_device, sys.intern(name), facts, event))
        elif kind == "overhead":
            overheads.append(Span(start, end, kind, sys.intern(name)))
        elif kind is not None and (kind != "python" or _of_the_user(name)):
            thread = threads.setdefault((event.get("pid"), event.get("tid")), [])
            thread.append(_span(start, end, kind, sys.intern(name), facts, inputs))
    for spans in threads.values():
        spans.sort(key=_outer_first)
    last = {(span.device, span.stream): span for span in device_spans}
    device_spans.sort(key=lambda span: span.start)
    return Recording(
        threads=threads,
        device_spans=device_spans,
        metadata=file.metadata,
        truncated=file.truncated,
        damaged=file.damaged,
        last_written=tuple(last.values()),
        overheads=tuple(overheads),
    )


def _outer_first(span: Span) -> tuple[float, float]:
    return span.start, -span.end


def _of_the_user(name: str) -> bool:
    if name.startswith("nn.Module: "):
        return True
    if name.startswith(_NOT_THE_USERS) or "(" not in name:
        return False
    head = name.partition("(")[0].removesuffix(".py")
    return head.partition("/")[0] not in sys.stdlib_module_names and "/torch/" not in head


def _span(
    start: float, end: float, kind: SpanKind, name: str, facts: Mapping[str, Any], inputs: dict[str, Inputs]
) -> Span:
    if kind == "python":
        return Span(start, end, kind, name)
    external = _whole(facts.get("External id", facts.get("external id")))
    if kind != "op":
        return Span(start, end, kind, name, external, _whole(facts.get("correlation")))
    seen: Inputs | None = None
    if "Input Dims" in facts or "Input dims" in facts:
        seen = Inputs(
            facts.get("Input Dims", facts.get("Input dims")),
            facts.get("Input Strides"),
            facts.get("Input type"),
            facts.get("Concrete Inputs"),
        )
        seen = inputs.setdefault(repr(seen), seen)
    kept = {key: facts[key] for key in ("kernel_backend", "kernel_kwargs", "Call stack") if facts.get(key)}
    return Span(start, end, kind, name, external, None, _whole(facts.get("Sequence number")), seen, kept or None)


def _device_span(
    start: float, end: float, kind: DeviceKind, name: str, facts: Mapping[str, Any], event: Mapping[str, Any]
) -> DeviceSpan:
    stream = _whole(facts.get("stream"))
    device = _whole(facts.get("device"))
    return DeviceSpan(
        start=start,
        end=end,
        kind=kind,
        name=name,
        stream=(_whole(event.get("tid")) or 0) if stream is None else stream,
        device=(_whole(event.get("pid")) or 0) if device is None else device,
        external=_whole(facts.get("External id", facts.get("external id"))),
        correlation=_whole(facts.get("correlation")),
        bytes=_number(facts.get("bytes", facts.get("Bytes"))),
        in_graph=bool(facts.get("graph node id") or facts.get("graph id")),
        blocks=_blocks(facts.get("grid")),
        duration=max(_number(event.get("dur")) or 0.0, 0.0),
    )


def _blocks(grid: Any) -> int | None:
    if not isinstance(grid, list) or not grid or not all(isinstance(size, int) and size > 0 for size in grid):
        return None
    return math.prod(grid)


def _number(value: Any) -> float | None:
    """A finite number; None for what is none, as in an event that was damaged."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return None
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value - value == 0:
        return float(value)
    return None


def _whole(value: Any) -> int | None:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    number = _number(value)
    return None if number is None else int(number)
