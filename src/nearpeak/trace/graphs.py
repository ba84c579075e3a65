"""The ops behind the kernels of CUDA graphs.

A replay runs kernels and dispatches no ops. So the ops are recorded while a graph is captured (`remember_graphs`), by
a recorder that asks the driver before and after each op how many nodes the graph has: those in between are the op's.
A trace of a step has the ops of each graph where the graph is replayed (`record_replays`). In torch's profiler the
range around a replay has the number of the graph (`kineto/marks.py`).

Nothing here calls the device, and the ops pass unchanged. Under a dispatch mode, torch's engine adds the gradients of a
tensor that was used twice into new memory instead of in place: the pool of a captured backward may be larger by one
gradient, and has the same kernels.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode

from nearpeak.devices.backends import gpu_in_use
from nearpeak.devices.cuda_graph import CapturedNodes
from nearpeak.trace.guard import Guard, watch_captures
from nearpeak.trace.modules import ModulePaths
from nearpeak.trace.patches.inductor_kernels import record_inductor_kernels
from nearpeak.trace.patches.shared_patch import SharedPatch, patch_attribute
from nearpeak.trace.patches.triton_kernels import record_triton_kernels
from nearpeak.trace.recorder import CapturedGraph, Location, Locations, Recorder, active_recorder
from nearpeak.trace.state_snapshot import StateSnapshot
from nearpeak.trace.storages import Storages

MAX_GRAPH_OPS = 200_000
"""The number of ops that are remembered of all graphs together."""


class _Graphs:
    """What is known about the graphs of this process."""

    def __init__(self) -> None:
        self.recorders: dict[int, CaptureRecorder] = {}
        """Of captures under way, by the id of the graph."""
        self.forget()

    def forget(self) -> None:
        """Forgets all graphs. Captures that are under way go on unrecorded."""
        for recorder in self.recorders.values():
            recorder.paused = True
        self.captured: weakref.WeakKeyDictionary[Any, CapturedGraph] = weakref.WeakKeyDictionary()
        self.recorders = {}
        self.count = 0
        self.ops = 0
        self.lines = threading.local()

    def lines_of_thread(self) -> dict[int, Location]:
        """Where the forward ops of earlier captures on this thread come from, by sequence number."""
        if not hasattr(self.lines, "by_sequence"):
            self.lines.by_sequence = {}
        lines: dict[int, Location] = self.lines.by_sequence
        return lines


_graphs = _Graphs()


class CaptureRecorder(Recorder):
    """Records the ops that are captured into a graph, each with the nodes that it adds."""

    def __init__(self, nodes: CapturedNodes, limit: int) -> None:
        snapshot = StateSnapshot(live=True)
        # to wait for values would end the capture
        super().__init__(mode=None, limit=limit, snapshot=snapshot, reads_values=False)
        self._memory = None  # what a graph allocates belongs to its pool
        self.storages = Storages(lambda number, storage, kind: None, asks_device=False)
        self.modules = _CapturedModules(self)
        self._locations = Locations(self.modules, snapshot)
        self._locations.share_lines(_graphs.lines_of_thread())
        self._gradients = None  # what becomes of them is not known before a replay
        self._nodes = nodes
        self._begun: list[tuple[int, int]] = []
        """Of ops that run now: the number of ops and of nodes before."""
        self._added: dict[int, tuple[int, int]] = {}
        """The nodes that each op added, by its index."""
        self._undo = ExitStack()

    @property
    def records_now(self) -> bool:
        """Only what is captured comes here."""
        return True

    def _note_lifted(self, made: torch.Tensor) -> None:
        self.storages.value(made, "intermediate")  # its values are not read either

    def launch_begins(self) -> None:
        """Counts the nodes."""
        count = None if self.failure else self._guard.call(self._nodes.count)
        self._begun.append((len(self.ops), -1 if count is None else count))

    def _program_resumes(self) -> None:
        self.launch_begins()

    def launch_ended(self) -> None:
        """Counts them again."""
        ops, before = self._begun.pop()
        count = None if self.failure else self._guard.call(self._nodes.count)
        if count is not None and before >= 0 and len(self.ops) == ops + 1:
            self._added[ops] = (before, count)

    def begin(self) -> None:
        """Records from now on, on this thread and in the backward passes that it starts."""
        self._undo.enter_context(record_inductor_kernels(self))
        self._undo.enter_context(record_triton_kernels())
        self._undo.enter_context(self.modules.watching())
        for register, hook in (
            (register_optimizer_step_pre_hook, self._before_optimizer),
            (register_optimizer_step_post_hook, self._after_optimizer),
        ):
            self._undo.callback(register(hook).remove)
        self._undo.enter_context(_on_mode_stack(self))

    def _before_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        return self._guard.call(self.optimizer_begins, optimizer, args, kwargs) if self._is_active() else None

    def _after_optimizer(self, _optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if self._is_active():
            self._guard.call(self.optimizer_ends)

    def _is_active(self) -> bool:
        return self.failure is None and active_recorder() is self

    def end(self) -> None:
        """Records nothing more, and lets go of modules and parameters."""
        self.paused = True
        self._undo.close()
        self._snapshot.release()
        self.modules.release()

    def captured_graph(self, number: int) -> CapturedGraph | None:
        """What was recorded, while the graph is still being captured; None if that is not everything."""
        if self.failure is not None or self.truncated:
            return None
        self._nodes.count()
        nodes = self._nodes.describe()
        edges = self._nodes.edges()
        with_nodes = [index for index, (before, after) in sorted(self._added.items()) if any(nodes[before:after])]
        owners = {number: place for place, index in enumerate(with_nodes) for number in range(*self._added[index])}
        ops = tuple(self.ops[index] for index in with_nodes)
        on_device = [number for number, node in enumerate(nodes) if node is not None]
        earlier = None if edges is None else nodes_before(len(nodes), edges, on_device)
        facts = self.storages.facts()
        used = {tensor.storage for op in ops for tensor in (*op.inputs, *op.outputs)}
        return CapturedGraph(
            number=number,
            ops=ops,
            nodes=tuple(
                replace(node, op=owners.get(number), earlier=None if earlier is None else earlier[number])
                for number, node in enumerate(nodes)
                if node is not None
            ),
            storages={storage: facts[storage] for storage in used},
            memory={storage: self.storages.memory[storage] for storage in used if storage in self.storages.memory},
        )


def nodes_before(count: int, edges: Sequence[tuple[int, int]], numbered: Sequence[int]) -> list[int]:
    """For each node those that it waits for, directly or not, as bits: 1 << place in `numbered`.

    >>> nodes_before(4, [(0, 1), (1, 3), (0, 2)], [0, 2, 3])
    [0, 1, 1, 1]
    """
    places = {node: place for place, node in enumerate(numbered)}
    waits_for: list[list[int]] = [[] for _ in range(count)]
    for before, after in edges:
        waits_for[after].append(before)
    sets = [0] * count
    for node in range(count):  # a node is added after all that it waits for
        for before in waits_for[node]:
            sets[node] |= sets[before] | (1 << places[before] if before in places else 0)
    return sets


class _CapturedModules(ModulePaths):
    """The modules that run where the recorder sees the ops: other threads go on while one captures."""

    def __init__(self, recorder: CaptureRecorder) -> None:
        super().__init__(recorder._add_root, recorder._guard)
        self._recorder = recorder

    def _enter(self, module: torch.nn.Module, inputs: Any) -> None:
        if active_recorder() is self._recorder:
            super()._enter(module, inputs)

    def _leave(self, module: torch.nn.Module) -> None:
        if active_recorder() is self._recorder:
            super()._leave(module)


@contextmanager
def _on_mode_stack(recorder: Recorder) -> Iterator[None]:
    """Inside, the recorder sees what is dispatched. The program may leave with other modes on the stack than before."""
    recorder.__enter__()
    try:
        yield
    finally:
        above = []
        while (stack := _get_current_dispatch_mode_stack()) and stack[-1] is not recorder and recorder in stack:
            above.append(_pop_mode())
        if stack and stack[-1] is recorder:
            recorder.__exit__(None, None, None)
        for mode in reversed(above):
            _push_mode(mode)


@SharedPatch
@contextmanager
def remember_graphs() -> Iterator[None]:
    """Inside, the ops of graphs are recorded while these are captured, and `record_replays` knows them."""
    guard = Guard()
    with watch_captures(), _patched_captures(guard):
        try:
            yield
        finally:
            _graphs.forget()


@contextmanager
def _patched_captures(guard: Guard) -> Iterator[None]:
    kind: Any = torch.cuda.CUDAGraph
    begin, end = kind.capture_begin, kind.capture_end  # as `watch_captures` has patched them

    @functools.wraps(begin)
    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = begin(self, *args, **kwargs)
        guard.call(_begin_recording, self)
        return result

    @functools.wraps(end)
    def capture_end(self: Any, *args: Any, **kwargs: Any) -> Any:
        guard.call(_end_recording, self)
        return end(self, *args, **kwargs)

    with (
        patch_attribute(kind, "capture_begin", capture_begin),
        patch_attribute(kind, "capture_end", capture_end),
    ):
        yield


def _begin_recording(graph: Any) -> None:
    _graphs.captured.pop(graph, None)  # what it was before
    backend = gpu_in_use()
    nodes = None if backend is None else backend.captured_nodes()
    if nodes is None or _graphs.ops >= MAX_GRAPH_OPS:
        return
    recorder = CaptureRecorder(nodes, MAX_GRAPH_OPS - _graphs.ops)
    _graphs.recorders[id(graph)] = recorder
    recorder.begin()


def _end_recording(graph: Any) -> None:
    recorder = _graphs.recorders.pop(id(graph), None)
    if recorder is None:
        return
    recorder.end()
    captured = recorder.captured_graph(_graphs.count)
    if captured is not None:
        _graphs.count += 1
        _graphs.ops += len(captured.ops)
        _graphs.captured[graph] = captured


def number_of(graph: Any) -> int | None:
    """The number of a graph whose ops are known; None for every other."""
    captured = _graphs.captured.get(graph)
    return None if captured is None else captured.number


@SharedPatch
@contextmanager
def record_replays() -> Iterator[None]:
    """Inside, a trace has the ops of graphs that are replayed."""
    kind: Any = torch.cuda.CUDAGraph
    original = kind.replay
    guard = Guard()

    @functools.wraps(original)
    def replay(self: Any) -> Any:
        guard.call(_record_replay, self)
        return original(self)

    with patch_attribute(kind, "replay", replay):
        yield


def _record_replay(graph: Any) -> None:
    recorder, captured = active_recorder(), _graphs.captured.get(graph)
    if recorder is not None and captured is not None:
        recorder.record_beside(recorder.record_replay, captured)
