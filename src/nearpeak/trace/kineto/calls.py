"""`find_op_calls`: the events of a recording that are ops, the same that a dispatch mode below autograd records.

Events nest: `aten::linear` contains `aten::addmm`, `aten::to` contains `aten::_to_copy`, which contains `aten::copy_`.
A composite operator is decomposed before autograd, and the calls inside it are the ops. Any other operator is an op,
and the calls inside it are its implementation; so is a composite operator that launched a kernel itself. Everything
else that launches kernels is an op of unknown results: a custom operator that this torch does not know, an autograd
function, a kernel of Inductor's, a CUDA graph.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from nearpeak.ops.op import Phase, is_graph_launch
from nearpeak.trace.kineto.arguments import Argument, RecordedTensor, parse_arguments
from nearpeak.trace.kineto.host import (
    GARBAGE_COLLECTION,
    GRAPH_REPLAY,
    MARKER,
    NEW_TENSOR,
    PRINTED_TENSOR,
    STEP_END_WAIT,
    HostCall,
    kind_of_range,
    kind_of_runtime_call,
    line_of_mark,
)
from nearpeak.trace.kineto.operators import RecordedOperator, find_operator
from nearpeak.trace.kineto.recording import Recording, Span

CallKind = Literal["operator", "inductor", "graph", "unknown"]

_BACKWARD_NODE = "autograd::engine::evaluate_function"
_ACCUMULATE_GRAD = "torch::autograd::AccumulateGrad"
OPTIMIZER_PREFIX: Final = "Optimizer.step#"
_KERNEL_LAUNCH = re.compile(r"\w*Launch(?:Cooperative)?Kernel|urEnqueueKernelLaunch")
"""Calls that make a kernel run. Copies and fills are none: those of no bytes make nothing run."""
STEP_PREFIX: Final = "ProfilerStep#"
_COMPILED_REGION_PREFIX = "Torch-Compiled Region: "
_COMPILED_GRAPH_PREFIX = "## Call CompiledFxGraph"
AOT_CALL: Final = "## Call AOTICompiledModel ##"
"""The name of the range around a call of code that was compiled ahead of time; see `patches/inductor_cpp.py`."""
COMPILED_CODE: Final = "compiled_code"
"""The name of an op that stands for compiled code on a CPU whose kernels were not seen."""
_CPP_KERNEL = re.compile(r"(?:graph_\d+_)?cpp_(?:fused_|Cpp)\w*$")
"""A C++ kernel of Inductor's, as its own option for profiling (`cpp.enable_kernel_profile`) names the range."""


class ProfilerStep(NamedTuple):
    """One step of the profiler's schedule. Times are microseconds."""

    number: int
    start: float
    end: float


@dataclass(slots=True)
class OpCall:
    """One op of the recording."""

    span: Span
    kind: CallKind
    arguments: tuple[Argument, ...]
    operator: RecordedOperator | None
    phase: Phase
    module: str
    source: str
    forward_sequence: int | None
    """In the backward pass: the sequence number of the forward op that made its node."""
    thread: int
    """The number of its CPU thread."""
    graph: int | None = None
    """Of the launch of a CUDA graph: the number of the graph, if nearpeak knows its ops."""


class OpCalls:
    """All ops in the order of time, and how device events refer to them."""

    def __init__(self) -> None:
        self.calls: list[OpCall] = []
        self.by_external: dict[int, OpCall] = {}
        self.by_correlation: dict[int, OpCall] = {}
        self.launches: dict[int, Span] = {}
        """The launch of each device event, by correlation id."""
        self.steps: list[ProfilerStep] = []
        self.gradients: list[tuple[float, RecordedTensor]] = []
        """Gradients that the backward pass accumulated into leaves, with the time in microseconds; in that order."""
        self.missing_kernels: list[tuple[Span, OpCall | None]] = []
        """Launches whose kernel is not in the file, with their ops; without those that a graph captured."""
        self.captures: tuple[tuple[float, float], ...] = ()
        """When CUDA graphs were captured."""
        self.host: list[HostCall] = []
        """Host activity that can leave the device idle."""
        self.optimizers: list[Span] = []
        """Steps of optimizers."""
        self.regions: list[Span] = []
        """Runs of compiled code."""
        self.marker_launches: dict[int, int] = {}
        """The numbers of marker kernels, by the correlation ids of their launches; see `kineto/markers.py`."""
        self.marker_ranges: dict[int, int] = {}
        """The same by the ids of the ranges around them."""


class _OpenSpan(NamedTuple):
    """A span that contains the current one, and what holds for everything inside it."""

    end: float
    span: Span
    owner: OpCall | None
    hidden: bool
    """Inside a query or the compiler: nothing in here is an op."""
    phase: Phase
    closure: bool
    """Inside the step of an optimizer that runs a backward pass, so a forward pass too: `optimizer.step(closure)`."""
    module: str
    source: str
    forward_sequence: int | None
    graph: int | None = None
    """Inside a replay of a CUDA graph: its number."""
    marker: int | None = None
    """Inside the launch of a marker kernel: its number."""


def find_op_calls(recording: Recording) -> OpCalls:
    """The ops of all threads."""
    calls = _ThreadWalk(recording)
    for spans in recording.threads.values():
        calls.walk(spans)
    calls.locate()
    if not recording.device_spans:
        calls.add_unseen_kernels()
    calls.find_captures(recording)
    calls.calls.sort(key=lambda call: call.span.start)
    numbered = {step.number: step for step in calls.steps}  # the last range of a number counts
    calls.steps = sorted(numbered.values(), key=lambda step: step.start)
    calls.gradients.sort()
    return calls


class _ThreadWalk(OpCalls):
    """Adds the ops of one thread after the other."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._launched = {item.correlation for item in recording.device_spans} - {None}
        self._launchers = {item.external for item in recording.device_spans if not item.in_graph} - {None}
        self._thread = -1
        self._last_launch: Span | None = None
        self._forward: dict[int, tuple[str, str]] = {}
        self._parsed: dict[int, tuple[Argument, ...]] = {}
        self._compiled_graphs: list[tuple[int, _OpenSpan]] = []
        """The calls of compiled code, with the numbers of their threads."""
        self._backward_starts = sorted(
            span.start
            for spans in recording.threads.values()
            for span in spans
            if span.kind == "op" and span.name.startswith(_BACKWARD_NODE)
        )

    def walk(self, spans: Sequence[Span]) -> None:
        """Adds the ops of a thread."""
        self._thread += 1
        self._last_launch = None
        stack: list[_OpenSpan] = []
        parents: set[int] = set()
        """Positions of ops that contain others."""
        unknown: list[tuple[int, Span, _OpenSpan | None]] = []
        positions: list[int] = []
        launches, host = len(self.launches), len(self.host)
        for position, span in enumerate(spans):
            while stack and stack[-1].end <= span.start:
                stack.pop()
                positions.pop()
            outer = stack[-1] if stack else None
            if span.kind == "launch":
                self._launch(span, outer)
                continue
            if span.kind == "op" and positions and not span.name.startswith((GARBAGE_COLLECTION, GRAPH_REPLAY, MARKER)):
                parents.add(positions[-1])
            frame = self._enter(span, outer)
            if span.kind == "op" and frame.owner is None and not frame.hidden and "::" in span.name:
                unknown.append((position, span, outer))
            stack.append(frame)
            positions.append(position if span.kind == "op" else positions[-1] if positions else -1)
        if len(self.launches) == launches:  # a thread that only polls the device does not hold it up
            self.host[host:] = [call for call in self.host[host:] if call.span.kind != "launch"]
        for position, span, outer in unknown:
            if position not in parents and not span.name.startswith(("autograd::", "torch::")):
                self._leaf(span, outer)

    def find_captures(self, recording: Recording) -> None:
        """Adds captures whose begin and end are not recorded: a graph is made ready right after its capture.

        Then the launches since the last one that made something run went into the graph.
        """
        self.captures = recording.captures
        ran = sorted(launch.start for launch in self.launches.values())
        for time in recording.instantiations:
            last = bisect_left(ran, time) - 1
            since = ran[last] if last >= 0 else float("-inf")
            if not any(since < end <= time for _, end in self.captures):
                self.captures += ((since, time),)
        self.missing_kernels = [
            (launch, call) for launch, call in self.missing_kernels if not is_within(self.captures, launch.start)
        ]

    def locate(self) -> None:
        """Gives ops of the backward pass the module and line of their forward op."""
        for call in self.calls:
            if call.forward_sequence is not None and call.forward_sequence in self._forward:
                module, source = self._forward[call.forward_sequence]
                call.module, call.source = call.module or module, call.source or source

    def add_unseen_kernels(self) -> None:
        """On a CPU, compiled code without a visible kernel runs its kernels unseen: its time between ops is theirs.

        Some of that time may be Python's, which calls them; the file cannot tell.
        """
        for thread, frame in self._compiled_graphs:
            start, end = frame.span.start, frame.end
            inside = [call for call in self.calls if call.thread == thread and start <= call.span.start < end]
            if any(call.kind == "inductor" for call in inside):
                continue
            self._thread = thread
            for call in [*sorted(inside, key=lambda call: call.span.start), None]:
                until = end if call is None else call.span.start
                if until > start:
                    unseen = frame.span._replace(name=COMPILED_CODE, start=start, end=until, inputs=None, external=None)
                    self._call(frame, unseen, "unknown", (), None)
                if call is not None:
                    start = max(start, call.span.end)

    def _enter(self, span: Span, outer: _OpenSpan | None) -> _OpenSpan:
        frame = _inherit(span, outer)
        if span.kind == "python":
            return _enter_python_frame(frame, span.name)
        meaning = kind_of_range(span.name)
        if meaning is not None:
            self.host.append(HostCall(meaning, span, frame.owner))
            if meaning == "compilation":  # which runs the code on tensors without data
                return frame._replace(hidden=True)
        if span.name.startswith(_COMPILED_REGION_PREFIX):
            self.regions.append(span)
        if span.name.startswith((_COMPILED_GRAPH_PREFIX, AOT_CALL)) and frame.owner is None and not frame.hidden:
            self._compiled_graphs.append((self._thread, frame))
        if span.name.startswith((PRINTED_TENSOR, NEW_TENSOR)):
            return frame._replace(source=line_of_mark(span.name) or frame.source)
        if span.name.startswith(GRAPH_REPLAY):
            return frame._replace(graph=_number_after(GRAPH_REPLAY, span.name))
        if span.name.startswith(MARKER):
            marker = _number_after(MARKER, span.name)
            if marker is not None and span.external is not None:
                self.marker_ranges[span.external] = marker
            return frame._replace(marker=marker)
        if span.kind == "annotation":
            return self._annotated(frame, span)
        if span.name.startswith(_BACKWARD_NODE):
            return frame._replace(phase="backward", forward_sequence=span.sequence, module="", source="")
        if span.name == _ACCUMULATE_GRAD:
            self.gradients.extend(
                (span.start, item) for item in self._arguments(span)[:1] if isinstance(item, RecordedTensor)
            )
        if frame.hidden or frame.owner is not None:
            if frame.owner is not None and span.external is not None:
                self.by_external[span.external] = frame.owner
            return frame
        stack = span.facts.get("Call stack") if span.facts else None
        if isinstance(stack, str) and not frame.source:
            frame = frame._replace(source=_user_line(stack.partition(";")[0]))
        if span.sequence is not None and frame.closure and frame.phase == "optimizer":
            frame = frame._replace(phase="forward")  # only ops with gradients enabled have a number
        if span.sequence is not None and frame.phase == "forward":
            self._forward[span.sequence] = (frame.module, frame.source)
        return self._op(frame, span)

    def _op(self, frame: _OpenSpan, span: Span) -> _OpenSpan:
        arguments = self._arguments(span)
        if (span.facts is not None and "kernel_backend" in span.facts) or _CPP_KERNEL.match(span.name):
            return frame._replace(owner=self._call(frame, span, "inductor", arguments, None))
        operator = find_operator(span.name, arguments) if "::" in span.name and span.inputs is not None else None
        if operator is not None and operator.query:
            return frame._replace(hidden=True)
        if operator is not None and not operator.composite:
            return frame._replace(owner=self._call(frame, span, "operator", arguments, operator))
        if span.external in self._launchers:  # it launches kernels itself
            if operator is not None:
                return frame._replace(owner=self._call(frame, span, "operator", arguments, operator))
            self._call(frame, span, "unknown", arguments, None)  # the calls inside it are ops all the same
        return frame

    def _call(
        self,
        frame: _OpenSpan,
        span: Span,
        kind: CallKind,
        arguments: tuple[Argument, ...],
        operator: RecordedOperator | None,
    ) -> OpCall:
        call = OpCall(
            span=span,
            kind=kind,
            arguments=arguments,
            operator=operator,
            phase=frame.phase,
            module=frame.module,
            source=frame.source,
            forward_sequence=frame.forward_sequence,
            thread=self._thread,
        )
        self.calls.append(call)
        if span.external is not None:
            self.by_external[span.external] = call
        return call

    def _leaf(self, span: Span, outer: _OpenSpan | None) -> None:
        """An operator that this torch does not know and that calls no other: it must do something itself."""
        if span.external is None or span.external not in self.by_external:
            arguments = self._arguments(span)
            operator = find_operator(span.name, arguments) if span.inputs is not None else None
            if operator is None:
                self._call(_inherit(span, outer), span, "unknown", arguments, None)

    def _arguments(self, span: Span) -> tuple[Argument, ...]:
        if span.inputs is None:
            return ()
        parsed = self._parsed.get(id(span.inputs))  # the recording keeps them alive, so ids are unique
        if parsed is None:
            parsed = self._parsed[id(span.inputs)] = parse_arguments(span.inputs)
        return parsed

    def _must_run(self, span: Span) -> bool:
        """Whether a call made something run on the device, and the file has device events by the id of their call."""
        return (
            span.correlation is not None
            and bool(self._launched)
            and (_KERNEL_LAUNCH.match(span.name) is not None or is_graph_launch(span.name))
        )

    def _launch(self, span: Span, outer: _OpenSpan | None) -> None:
        # A call of the runtime may be recorded with the call of the driver inside it: one of them has the kernel.
        nested = self._last_launch is not None and span.end <= self._last_launch.end
        if not nested:
            self._last_launch = span
        if outer is not None and outer.marker is not None:
            if span.correlation is not None:
                self.marker_launches[span.correlation] = outer.marker
            return
        meaning = kind_of_runtime_call(span.name)
        if meaning is not None and (outer is None or outer.span.name != STEP_END_WAIT):
            self.host.append(HostCall(meaning, span, None if outer is None else outer.owner))
        if span.correlation is None or span.correlation not in self._launched:
            if self._must_run(span) and not nested:
                self.missing_kernels.append((span, None if outer is None else outer.owner))
            return
        if nested and self.missing_kernels and self.missing_kernels[-1][0] is self._last_launch:
            self.missing_kernels.pop()
        self.launches[span.correlation] = span
        if is_graph_launch(span.name):
            frame = _inherit(span, outer)
            call = self._call(frame, span._replace(external=None), "graph", (), None)
            call.graph = frame.graph
            self.by_correlation[span.correlation] = call
        elif outer is not None and outer.owner is not None:
            self.by_correlation[span.correlation] = outer.owner

    def _annotated(self, frame: _OpenSpan, span: Span) -> _OpenSpan:
        if span.name.startswith(STEP_PREFIX):
            number = _number_after(STEP_PREFIX, span.name)
            if number is not None:
                self.steps.append(ProfilerStep(number, span.start, span.end))
        if span.name.startswith(OPTIMIZER_PREFIX):
            self.optimizers.append(span)
        if span.name.startswith(OPTIMIZER_PREFIX) and frame.phase == "forward":
            first = bisect_left(self._backward_starts, span.start)
            closure = first < len(self._backward_starts) and self._backward_starts[first] < span.end
            return frame._replace(phase="optimizer", closure=closure)
        return frame


def is_within(windows: Sequence[tuple[float, float]], time: float) -> bool:
    """Whether a time is in one of these windows."""
    return any(start <= time <= end for start, end in windows)


def _number_after(prefix: str, name: str) -> int | None:
    number = name.removeprefix(prefix)
    return int(number) if number.isdecimal() and len(number) < 16 else None


def _inherit(span: Span, outer: _OpenSpan | None) -> _OpenSpan:
    if outer is None:
        return _OpenSpan(span.end, span, None, False, "forward", False, "", "", None)
    return outer._replace(end=min(span.end, outer.end), span=span)


def _enter_python_frame(frame: _OpenSpan, name: str) -> _OpenSpan:
    if name.startswith("nn.Module: "):
        inner = name.removeprefix("nn.Module: ")
        return frame._replace(module=f"{frame.module}.{inner}" if frame.module else inner)
    return frame._replace(source=_user_line(name))


def _user_line(name: str) -> str:
    """ "train.py:41" for a frame "src/train.py(41): step"; the line is that of the function's definition."""
    file, _, rest = name.partition("(")
    line = rest.partition(")")[0]
    return f"{file.rpartition('/')[2]}:{line}" if line.isdigit() else ""
