"""`Recording`: the spans of a trace file, as small tuples: what the CPU threads did, and what ran on a device.

`EventFile` reads the events of the Chrome trace: of a whole and valid file at once where msgspec is installed, of any
other one by one, so that a large file is never held whole. Nothing in it is executed.
"""

from __future__ import annotations

import codecs
import functools
import itertools
import json
import math
import operator
import re
import sys
import sysconfig
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from nearpeak._files import InputFile
from nearpeak.errors import FileProblem
from nearpeak.ops.low_gc import low_gc

try:
    import msgspec
except ImportError:  # the extra `traces`; json reads the same, more slowly
    msgspec = None  # type: ignore[assignment]

_CHUNK = 1 << 20
"""Characters that are added where an event does not end."""
_MAX_EVENT_CHARS = 1 << 24
"""Characters that one event may have; what is longer is damaged."""
WHOLE_BYTES = 1 << 28
"""A larger file is read event by event: all events of a file at once take ten times its size."""
LARGEST_TRACE = 2**36
"""Bytes of a decompressed file. It is never held whole, and the ops of a step are what takes memory."""
_LARGEST_ID = 2**63
_LONGEST_NAME = 100_000
_MOST_OTHERS = 1000
"""Values in the list of events that are none, before the first one."""
_LARGEST_TIME = 1e18
"""Microseconds: thirty thousand years. Sums of a few times are numbers that can still be computed with."""
_LONGEST_WORD = len("-Infinity")
_SPACE = re.compile(r"[\s,]*")
_EVENT_BOUNDARY = re.compile(r"\}\s*,\s*(?=\{)")
"""Where one event ends and the next begins. Inside of events, objects never follow each other."""
_BARE_NONFINITE = re.compile(r"(?<=[:,\[])\s*-?(?:nan|inf|infinity)(?:\([^)]*\))?\s*(?=[,}\]])", re.IGNORECASE)
"""Numbers that C++ writes and JSON does not have."""


class EventFile:
    """Iterates over the events of one file in order; afterwards `metadata` has its other fields.

    A truncated file, as a killed job leaves behind, gives the events up to its end.
    """

    def __init__(self, path: str | Path | InputFile) -> None:
        self.file = path if isinstance(path, InputFile) else InputFile(path)
        self.metadata: dict[str, Any] = {}
        self.truncated = False
        """The file ends before its JSON does."""
        self.damaged = 0
        """Events that are not valid JSON and were skipped."""
        self._decoder = json.JSONDecoder()
        self._buffer = ""
        self._at = 0
        self._text: Iterator[str] = iter(())

    def __iter__(self) -> Iterator[dict[str, Any]]:
        with self.file:
            pieces = self.file.pieces(LARGEST_TRACE)
            if msgspec is not None:
                start, size = [], 0
                for piece in pieces:
                    start.append(piece)
                    size += len(piece)
                    if size > WHOLE_BYTES:
                        break
                events = self._whole(b"".join(start)) if size <= WHOLE_BYTES and not self.file.truncated else None
                if events is not None:
                    yield from events
                    return
                pieces = itertools.chain(start, pieces)
            self._text = self._decoded(pieces)
            yield from self._document()

    def _whole(self, content: bytes) -> list[dict[str, Any]] | None:
        """The events of a file that is whole and valid; None for any other, which is read event by event."""
        try:
            document = msgspec.json.decode(content)
        except (ValueError, RecursionError):  # of its errors, all are ValueErrors
            return None
        events = document.get("traceEvents") if isinstance(document, dict) else None
        if not isinstance(events, list) or not set(map(type, events)) <= {dict} or not all(events):
            return None
        self.metadata = {key: value for key, value in document.items() if key != "traceEvents"}
        return events

    def _decoded(self, pieces: Iterator[bytes]) -> Iterator[str]:
        """The text of the file in pieces, up to where a compressed one is truncated."""
        decoder = codecs.getincrementaldecoder("utf-8-sig")(errors="replace")
        for piece in pieces:
            yield decoder.decode(piece)
        self.truncated = self.truncated or self.file.truncated

    def _document(self) -> Iterator[dict[str, Any]]:
        first = self._peek()
        if first == "[":  # Chrome's other format: the array alone
            self._at += 1
            yield from self._events()
            return
        if first != "{":
            empty = "nothing of it can be unpacked" if self.truncated else "there is nothing in it"
            raise self._no_trace(f"it starts with {first!r}" if first else empty)
        self._at += 1
        has_events = False
        while (key := self._value()) is not None:
            if self._peek() == ":":
                self._at += 1
            if key == "traceEvents" and self._peek() == "[":
                self._at += 1
                has_events = True
                yield from self._events()
            else:
                self.metadata[str(key)] = self._value()
        if not has_events and not self.truncated:
            fields = ", ".join(name[:40] for name in [*self.metadata][:8]) or "none"
            raise self._no_trace(f"it has no list of traceEvents. Its fields: {fields}")

    def _no_trace(self, why: str) -> FileProblem:
        return FileProblem(
            self.file,
            f"it is no Chrome trace: {why}. Pass a file that torch.profiler's export_chrome_trace wrote, as .json or "
            ".json.gz",
        )

    def _events(self) -> Iterator[dict[str, Any]]:
        others = 0
        while True:
            following = self._peek()
            if following == "]":
                self._at += 1
                return
            if not following:
                self.truncated = True
                return
            event = self._value()
            if isinstance(event, dict) and event:
                others = -1
                yield event
            elif others >= 0:
                others += 1
                if others > _MOST_OTHERS:
                    raise self._no_trace("what it lists are no events")

    def _peek(self) -> str:
        """The next character that is neither space nor comma; "" at the end."""
        while True:
            match = _SPACE.match(self._buffer, self._at)
            self._at = match.end() if match else self._at
            if self._at < len(self._buffer):
                return self._buffer[self._at]
            if not self._fill():
                return ""

    def _value(self) -> Any:
        """The next value; None at the end of the object or the file, and for a damaged event."""
        if self._peek() in ("", "}", "]"):
            if not self._peek():
                self.truncated = True
            self._at += 1
            return None
        size = _CHUNK
        while True:
            try:
                value, end = self._decoder.raw_decode(self._buffer, self._at)
            except (RecursionError, ValueError) as error:  # nested too deep, or a number of too many digits
                if not self._unfinished(error) or len(self._buffer) - self._at > _MAX_EVENT_CHARS:
                    return self._repaired()
                if not self._fill(size):
                    return self._repaired()
                size *= 2  # so that a long event is not decoded again for every piece
                continue
            if isinstance(value, (int, float)) and end >= len(self._buffer) - len(".e-") and self._fill():
                continue  # a number may go on
            self._at = end
            return value

    def _unfinished(self, error: Exception) -> bool:
        """Whether the buffer merely ends too early. An unterminated string is reported at its start."""
        if not isinstance(error, json.JSONDecodeError):
            return False
        return error.msg.startswith("Unterminated string") or error.pos >= len(self._buffer) - _LONGEST_WORD

    def _repaired(self) -> Any:
        """A value that is not valid JSON, up to the next event, with bare NaN and infinity replaced."""
        match = _EVENT_BOUNDARY.search(self._buffer, self._at)
        while match is None and len(self._buffer) - self._at <= _MAX_EVENT_CHARS and self._fill():
            match = _EVENT_BOUNDARY.search(self._buffer, self._at)
        end = match.start() + 1 if match else len(self._buffer)
        text = _BARE_NONFINITE.sub("null", self._buffer[self._at : end])
        try:
            value, used = self._decoder.raw_decode(text)
        except (RecursionError, ValueError):
            if match is None:
                self.truncated = True
            else:
                self.damaged += 1
            self._at = end
            return None
        self._at = end if match else end - (len(text) - used)
        return value

    def _fill(self, size: int = 1) -> bool:
        """Reads at least `size` more characters, if there are as many, and drops those already used."""
        pieces = [self._buffer[self._at :]]
        added = 0
        for piece in self._text:
            pieces.append(piece)
            added += len(piece)
            if added >= size:
                break
        if not added:
            return False
        self._buffer = "".join(pieces)
        self._at = 0
        return True


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
_STREAM_WAIT = "cuda_sync"
_CAPTURE_CALL = re.compile(r"(?:cuda|cu|hip)(?:Stream(Begin|End)Capture|GraphInstantiate)")
"""The calls that begin and end the capture of a graph, and the one that makes it ready to be launched."""
_STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"]
_LIBRARY_PREFIXES = ("torch/", "nearpeak/", "<")
"""How the names of Python frames begin that are not the user's code."""


class Inputs(NamedTuple):
    """The inputs of an op as the profiler wrote them, None where it wrote none. Equal inputs are one object."""

    dims: Any
    strides: Any
    types: Any
    values: Any


class Span(NamedTuple):
    """An event of a CPU thread. Times are microseconds."""

    start: float
    end: float
    kind: SpanKind
    name: str
    external: int | None = None
    """The id that device events refer to."""
    correlation: int | None = None
    """Of a launch: the id that it shares with the device event."""
    sequence: int | None = None
    """The number that a forward op shares with its backward node."""
    inputs: Inputs | None = None
    facts: Mapping[str, Any] | None = None
    """Other fields: the block sizes of Inductor's kernels, the call stack of an op in an old file."""


class CollectiveFacts(NamedTuple):
    """What torch writes beside the kernel of a collective."""

    kind: str
    """As torch names it: "allreduce", "_allgather_base"."""
    group: str
    """The name of its process group."""
    sequence: int | None
    """Its number in that group; files before torch 2.12 have none."""
    bytes: float | None
    """What one rank gives or gets, the larger."""
    ranks: int | None
    """The size of the group."""


NO_FACTS = CollectiveFacts("", "", None, None, None)
_START_OF, _END_OF = operator.itemgetter(0), operator.itemgetter(1)
"""Of a span: much faster as keys of a sort than functions written in Python."""


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
    graph: int | None
    """The number of the CUDA graph that launched it; None if none did, or the file does not tell."""
    duration: float
    """As the file has it: `end - start` is less precise, since these count from the start of the machine."""
    node: int | None = None
    """Of what a CUDA graph launched: the id of its node. Nodes that were added later have larger ones."""
    grid: tuple[int, ...] | None = None
    """Of a kernel: the number of its blocks along each axis."""
    block: tuple[int, ...] | None = None
    """Of a kernel: the number of threads of a block along each axis."""
    collective: CollectiveFacts | None = None
    """Of a kernel of a collective: what torch wrote about it."""

    @property
    def blocks(self) -> int | None:
        """Of a kernel: the number of its blocks."""
        blocks = 0 if self.grid is None else math.prod(self.grid)
        return blocks if 0 < blocks < _LARGEST_ID else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """One file. `threads` has the spans by process and thread, in the order of time, outer spans before inner ones."""

    threads: Mapping[tuple[Any, Any], list[Span]]
    device_spans: list[DeviceSpan]
    metadata: Mapping[str, Any]
    truncated: bool
    damaged: int
    last_written: tuple[DeviceSpan, ...] = ()
    """The last event of each stream in the file."""
    overheads: tuple[Span, ...] = ()
    """Overheads of the profiler and the driver, on threads that the file does not name."""
    captures: tuple[tuple[float, float], ...] = ()
    """When CUDA graphs were captured: what is launched meanwhile is recorded into a graph and does not run."""
    instantiations: tuple[float, ...] = ()
    """When graphs were made ready to be launched, after their capture."""
    empty_streams: int = 0
    """Streams that the file names and has no events of."""


@low_gc()
def load_recording(path: str | Path | InputFile, *, since: str | None = None, only_sizes: bool = False) -> Recording:
    """Reads a file in one pass. Python frames of torch, the standard library and built-in functions are dropped.

    An event whose fields cannot be is left out and counted, as one that is not valid JSON. Operators of torch that end
    before the range `since` begins are left out too: nobody asks for them, and most events are operators. With
    `only_sizes`, ops have the sizes and dtypes of their inputs alone.
    """
    file = EventFile(path)
    threads: defaultdict[tuple[Any, Any], list[Span]] = defaultdict(list)
    device_spans: list[DeviceSpan] = []
    inputs: dict[str, Inputs] = {}
    overheads: list[Span] = []
    captures: list[tuple[float, float, bool]] = []
    instantiations: list[float] = []
    named_streams: set[tuple[str, str]] = set()
    used_streams: set[tuple[str, str]] = set()
    waiting: list[tuple[float, float, str, dict[str, Any], tuple[Any, Any]]] = []
    """Operators in front of the range `since`, unless it comes."""
    first = math.inf if since is not None else -math.inf
    """When that range begins."""

    def add(start: float, end: float, kind: SpanKind, name: str, facts: dict[str, Any], thread: Any) -> None:
        try:
            span = _span(start, end, kind, sys.intern(name), facts, None if only_sizes else inputs)
            threads[thread].append(span)
        except (TypeError, RecursionError):  # a list as an id; inputs that are nested too deep
            file.damaged += 1

    for event in file:
        if event.get("ph") != "X":
            if event.get("ph") == "M" and _names_stream(event):
                named_streams.add(_ids(event))
            continue
        category = event.get("cat", "")
        if not isinstance(category, str):
            continue
        kind, on_device = _kinds_of_category(category)
        if kind is None and on_device is None:
            if category.lower() == _STREAM_WAIT:
                used_streams.add(_ids(event))
            continue
        start, duration = _microseconds(event.get("ts")), _microseconds(event.get("dur") or 0.0)
        name = event.get("name")
        if start is None or duration is None or not isinstance(name, str) or len(name) > _LONGEST_NAME:
            file.damaged += 1
            continue
        duration = duration if duration > 0.0 else 0.0
        end = start + duration
        args = event.get("args")
        facts = args if isinstance(args, dict) else {}
        if on_device is not None and not (start or duration):
            file.damaged += 1  # the profiler got no times of it
        elif on_device is not None:
            used_streams.add(_ids(event))
            device_spans.append(_device_span(start, duration, on_device, sys.intern(name), facts, event))
        elif kind == "overhead":
            overheads.append(Span(start, end, kind, sys.intern(name)))
        elif kind is not None and (kind != "python" or _is_user_frame(name)):
            thread = event.get("pid"), event.get("tid")
            if name == since:
                first = min(first, start)
            if end <= first and kind == "op" and name.startswith("aten::"):
                if first == math.inf:
                    waiting.append((start, end, name, facts, thread))
                continue
            add(start, end, kind, name, facts, thread)
            if kind == "launch" and (call := _CAPTURE_CALL.match(name)):
                if call[1]:
                    captures.append((start, end, call[1] == "Begin"))
                else:
                    instantiations.append(start)
    for start, end, name, facts, thread in waiting:
        if first == math.inf or end > first:
            add(start, end, "op", name, facts, thread)
    for spans in threads.values():  # outer spans first: by start, and of one start by the end, backwards
        spans.sort(key=_END_OF, reverse=True)
        spans.sort(key=_START_OF)
    last = {(span.device, span.stream): span for span in device_spans}
    device_spans.sort(key=_START_OF)
    return Recording(
        threads=dict(threads),
        device_spans=device_spans,
        metadata=file.metadata,
        truncated=file.truncated,
        damaged=file.damaged,
        last_written=tuple(last.values()),
        overheads=tuple(overheads),
        captures=_capture_windows(captures),
        instantiations=tuple(sorted(instantiations)),
        empty_streams=len(named_streams - used_streams),
    )


@functools.lru_cache(1000)  # a file has few different ones
def _kinds_of_category(category: str) -> tuple[SpanKind | None, DeviceKind | None]:
    return _SPANS.get(category.lower()), _DEVICE.get(category.lower())


def _names_stream(event: Mapping[str, Any]) -> bool:
    """Whether it gives a stream of a device its name: "stream 7"."""
    args = event.get("args")
    name = args.get("name") if isinstance(args, dict) else None
    return event.get("name") == "thread_name" and isinstance(name, str) and name.startswith("stream ")


def _ids(event: Mapping[str, Any]) -> tuple[str, str]:
    return str(event.get("pid")), str(event.get("tid"))


def _capture_windows(calls: list[tuple[float, float, bool]]) -> tuple[tuple[float, float], ...]:
    """From each call that begins a capture to the one that ends it. They do not nest.

    Of a capture that began before the recording only the end is there, and of one that goes on only the begin.
    """
    windows: list[tuple[float, float]] = []
    begun: float | None = None if calls and min(calls)[2] else -math.inf
    for start, end, begins in sorted(calls):
        if begins:
            begun = start if begun is None else begun
        elif begun is not None:
            windows.append((begun, end))
            begun = None
    return (*windows, (begun, math.inf)) if begun is not None and calls else tuple(windows)


def _is_user_frame(name: str) -> bool:
    if name.startswith("nn.Module: "):
        return True
    if name.startswith(_LIBRARY_PREFIXES) or "(" not in name:
        return False
    path = name.partition("(")[0]
    return "/torch/" not in path and not _is_standard(path)


@functools.cache
def _is_standard(path: str) -> bool:
    """Whether a path below an import root is a file of the standard library.

    A module there has the name of the path's first part. A user may have a folder of that name, such as trace/.
    """
    first, *rest = path.removesuffix(".py").split("/")
    return first in sys.stdlib_module_names and (not rest or Path(_STANDARD_LIBRARY, path).exists())


def _span(
    start: float, end: float, kind: SpanKind, name: str, facts: Mapping[str, Any], inputs: dict[str, Inputs] | None
) -> Span:
    if kind == "python":
        return Span(start, end, kind, name)
    external = _integer(facts.get("External id", facts.get("external id")))
    if kind != "op":
        return Span(start, end, kind, name, external, _integer(facts.get("correlation")))
    shapes: Inputs | None = None
    if inputs is None:
        dims = facts.get("Input Dims", facts.get("Input dims"))
        return Span(start, end, kind, name, external, None, None, Inputs(dims, None, facts.get("Input type"), None))
    if "Input Dims" in facts or "Input dims" in facts:
        shapes = Inputs(
            facts.get("Input Dims", facts.get("Input dims")),
            facts.get("Input Strides"),
            facts.get("Input type"),
            facts.get("Concrete Inputs"),
        )
        shapes = inputs.setdefault(repr(shapes), shapes)
    details = {key: facts[key] for key in ("kernel_backend", "kernel_kwargs", "Call stack") if facts.get(key)}
    return Span(start, end, kind, name, external, None, _integer(facts.get("Sequence number")), shapes, details or None)


def _device_span(
    start: float, duration: float, kind: DeviceKind, name: str, facts: Mapping[str, Any], event: Mapping[str, Any]
) -> DeviceSpan:
    stream = _integer(facts.get("stream"))
    device = _integer(facts.get("device"))
    return DeviceSpan(
        start=start,
        end=start + duration,
        kind=kind,
        name=name,
        stream=(_integer(event.get("tid")) or 0) if stream is None else stream,
        device=(_integer(event.get("pid")) or 0) if device is None else device,
        external=_integer(facts.get("External id", facts.get("external id"))),
        correlation=_integer(facts.get("correlation")),
        bytes=_byte_count(facts.get("bytes", facts.get("Bytes"))),
        in_graph=bool(facts.get("graph node id") or facts.get("graph id")),
        graph=_integer(facts.get("graph id")) or None,
        duration=duration,
        node=_integer(facts.get("graph node id")) or None,
        grid=_sizes(facts.get("grid")),
        block=_sizes(facts.get("block")),
        collective=collective_facts(facts) if "Collective name" in facts else None,
    )


_ELEMENT_BYTES = {"Double": 8, "Long": 8, "Float": 4, "Int": 4, "Half": 2, "BFloat16": 2, "Short": 2}
"""Bytes of an element by the name of its dtype; those of the others have one."""


def collective_facts(facts: Mapping[str, Any]) -> CollectiveFacts:
    """What torch writes beside the call and the kernel of a collective."""
    elements = [_byte_count(facts.get(key)) for key in ("In msg nelems", "Out msg nelems")]
    largest = max((count for count in elements if count is not None), default=None)
    ranks = _integer(facts.get("Group size"))
    return CollectiveFacts(
        sys.intern(str(facts.get("Collective name"))[:_LONGEST_NAME]),
        sys.intern(str(facts.get("Process Group Name", ""))[:_LONGEST_NAME]),
        _integer(facts.get("Seq")),
        None if largest is None else largest * _ELEMENT_BYTES.get(str(facts.get("dtype")), 1),
        ranks if ranks is not None and ranks > 0 else None,
    )


def _sizes(value: Any) -> tuple[int, ...] | None:
    if not isinstance(value, list) or not value:
        return None
    for size in value:
        if type(size) is not int or not 0 < size < _LARGEST_ID:
            return None
    return tuple(value)


def _microseconds(value: Any) -> float | None:
    if type(value) is float and -_LARGEST_TIME < value < _LARGEST_TIME:  # nearly all of them
        return value
    number = _finite_number(value)
    return number if number is not None and -_LARGEST_TIME < number < _LARGEST_TIME else None


def _byte_count(value: Any) -> float | None:
    number = None if value is None else _finite_number(value)
    return number if number is not None and 0 <= number < _LARGEST_ID else None


def _finite_number(value: Any) -> float | None:
    """A finite number; None for anything else, as in a damaged event."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return None
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value - value == 0:
        try:
            return float(value)
        except OverflowError:
            return None
    return None


def _integer(value: Any) -> int | None:
    """An id of 64 bits, with a sign or without."""
    if value is None or (type(value) is int and -_LARGEST_ID <= value < _LARGEST_ID):  # nearly all of them
        return value
    if not isinstance(value, int) or isinstance(value, bool):
        number = _finite_number(value)
        if number is None:
            return None
        value = int(number)
    return value if -_LARGEST_ID <= value < 2 * _LARGEST_ID else None
