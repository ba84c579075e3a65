"""The ops of CUDA graphs, recorded at their capture. A graph of the CPU stands for one: it runs nothing again."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

import nearpeak
from nearpeak.bound.estimate import estimate_trace
from nearpeak.ops.graph import GraphNode
from nearpeak.trace import graphs, recorder, seen_values, storages
from nearpeak.trace.graphs import CaptureRecorder, record_replays, remember_graphs
from nearpeak.trace.guard import capture_count, is_capturing
from nearpeak.trace.live import LiveTrace

VIEWS = ("aten.t.default", "aten.view.default", "aten.detach.default", "aten.empty.memory_format")


class Graph:
    """As torch.cuda.CUDAGraph has it."""

    def capture_begin(self, pool: Any = None) -> None:
        pass

    def capture_end(self) -> None:
        pass

    def replay(self) -> None:
        pass


class Nodes:
    """The nodes of a capture: every op but a view adds one."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def count(self) -> int:
        return len(self.names)

    def edges(self) -> list[tuple[int, int]]:
        return [(number, number + 1) for number in range(len(self.names) - 1)]

    def describe(self) -> list[GraphNode | None]:
        return [GraphNode(kind="kernel", name=name, grid=(1, 1, 1), block=(32, 1, 1)) for name in self.names]


class Device(TorchDispatchMode):
    """Launches a kernel for each op."""

    def __init__(self, nodes: Nodes) -> None:
        super().__init__()
        self.nodes = nodes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if str(func) not in VIEWS:
            self.nodes.names.append(str(func))
        return result


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Nodes:
    nodes = Nodes()

    class Backend:
        def captured_nodes(self) -> Nodes:
            nodes.names.clear()
            return nodes

        def is_capturing(self) -> bool:
            return False

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(graphs, "gpu_in_use", Backend)
    return nodes


def capture(graph: Graph, nodes: Nodes, code: Any) -> None:
    with Device(nodes):
        graph.capture_begin()
        code()
        graph.capture_end()


def test_a_replay_is_the_ops_that_were_captured(nodes: Nodes):
    x, weight = torch.ones(4, 8), torch.ones(2, 8)
    graph = Graph()
    with remember_graphs():
        capture(graph, nodes, lambda: torch.nn.functional.linear(x, weight).relu_())
        live = LiveTrace()
        x.mul_(2)
        graph.replay()
        graph.replay()
        trace = live.stop()
    assert [op.name for op in trace.ops[1:]] == ["aten.mm.default", "aten.relu_.default"] * 2
    assert trace.ops[1].inputs[0].shape == (4, 8)
    assert "test_graphs.py" in trace.ops[1].source
    first, second = trace.replays
    assert (first.graph, first.ops, second.ops) == (0, range(1, 3), range(3, 5))
    assert [(node.name, node.op, node.earlier) for node in second.nodes] == [
        ("aten.mm.default", 3, 0b00),
        ("aten.relu_.default", 4, 0b01),
    ]


def test_no_values_are_read_during_a_capture(nodes: Nodes, monkeypatch: pytest.MonkeyPatch):
    looks: list[str] = []
    for module, name in ((seen_values, "nonzeros_of"), (seen_values, "padding_of"), (recorder, "contents_digest")):
        original = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *args, f=original, name=name, **kw: looks.append(name) or f(*args, **kw)
        )
    x, table, ids = torch.ones(128, 64), torch.ones(8, 64), torch.arange(8).repeat(4, 8)

    def code() -> None:
        (torch.nn.functional.embedding(ids, table) @ x.T).mul_(torch.tensor(2.0))

    with remember_graphs():
        capture(Graph(), nodes, code)
        assert not looks  # on a device, that would end the capture
        live = LiveTrace()
        code()
        live.stop()
    assert set(looks) == {"nonzeros_of", "padding_of", "contents_digest"}


def test_a_node_that_no_op_added_has_none(nodes: Nodes):
    graph, x = Graph(), torch.ones(4)

    def code() -> None:
        y = x + 1
        nodes.names.append("a kernel of an extension")
        y.mul_(2)

    with remember_graphs():
        capture(graph, nodes, code)
        with record_replays():
            live = LiveTrace()
            graph.replay()
            trace = live.stop()
    assert [(node.name, node.op) for node in trace.replays[0].nodes] == [
        ("aten.add.Tensor", 0),
        ("a kernel of an extension", None),
        ("aten.mul_.Tensor", 1),
    ]


def test_a_graph_that_was_captured_before_has_no_ops(nodes: Nodes):
    graph = Graph()
    capture(graph, nodes, lambda: torch.ones(3))
    with remember_graphs():
        live = LiveTrace()
        graph.replay()
        trace = live.stop()
    assert trace.replays == () and trace.ops == ()


def test_a_graph_that_is_captured_again_has_its_new_ops(nodes: Nodes):
    graph, x = Graph(), torch.ones(3)
    with remember_graphs():
        capture(graph, nodes, lambda: x + 1)
        capture(graph, nodes, lambda: x * 2)
        live = LiveTrace()
        graph.replay()
        trace = live.stop()
    assert [op.name for op in trace.ops] == ["aten.mul.Tensor"]


def test_a_forward_and_a_backward_that_are_captured_apart_have_the_same_lines(nodes: Nodes):
    forward, backward, x = Graph(), Graph(), torch.ones(3, 3, requires_grad=True)
    results: list[torch.Tensor] = []
    with remember_graphs():
        capture(forward, nodes, lambda: results.append((x @ x).exp().sum()))
        capture(backward, nodes, lambda: torch.autograd.grad(results[0], x))
        live = LiveTrace()
        forward.replay()
        backward.replay()
        trace = live.stop()
    lines = {op.name: op.source for op in trace.ops if op.phase == "forward"}
    products = [op for op in trace.ops if op.name == "aten.mm.default"]
    assert [op.phase for op in products] == ["forward", "backward", "backward"]
    assert {op.source for op in products} == {lines["aten.mm.default"]} != {""}


def test_what_an_optimizer_does_in_a_capture_is_its_phase(nodes: Nodes):
    graph, weight = Graph(), torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1, foreach=False)
    weight.grad = torch.ones(3)

    def code() -> None:
        weight.grad.mul_(2)
        optimizer.step()
        weight.grad.mul_(2)

    with remember_graphs():
        capture(graph, nodes, code)
        live = LiveTrace()
        graph.replay()
        trace = live.stop()
    assert [(op.name, op.phase) for op in trace.ops] == [
        ("aten.mul_.Tensor", "forward"),
        ("aten.add_.Tensor", "optimizer"),
        ("aten.mul_.Tensor", "forward"),
    ]


class Constant(Nodes):
    """Every question finds one node more."""

    def count(self) -> int:
        self.names.append("kernel")
        return len(self.names)


def test_gradients_are_accumulated_as_without_a_recorder():
    weight = torch.nn.Parameter(torch.ones(3, 3))
    weight.grad = before = torch.ones(3, 3)
    other = torch.nn.Parameter(torch.ones(3, 3))
    other.grad = torch.zeros(3, 3)
    recorder = CaptureRecorder(Constant(), 100)  # type: ignore[arg-type]
    recorder.begin()
    (other @ (weight * 2).exp()).sum().backward()
    recorder.end()
    assert weight.grad is before and before[0, 0] > 1  # in place, so that a replay adds to the same memory
    assert recorder.failure is None
    names = [op.name for op in recorder.ops]
    assert names.count("aten.add_.Tensor") == 2
    assert "aten.exp.default" in names and names.count("aten.mm.default") == 3
    assert _get_current_dispatch_mode_stack() == []


def test_a_mode_that_the_program_leaves_on_the_stack_stays_there():
    recorder = CaptureRecorder(Constant(), 100)  # type: ignore[arg-type]
    recorder.begin()
    mode = Device(Nodes())
    mode.__enter__()
    recorder.end()
    try:
        assert _get_current_dispatch_mode_stack() == [mode]
    finally:
        mode.__exit__(None, None, None)


def test_an_error_of_the_recorder_does_not_reach_the_capture(nodes: Nodes, monkeypatch: pytest.MonkeyPatch):
    graph, x = Graph(), torch.ones(3)
    with remember_graphs():
        monkeypatch.setattr(nodes, "count", lambda: 1 / 0)
        capture(graph, nodes, lambda: x + 1)
        assert graphs.number_of(graph) is None
    assert _get_current_dispatch_mode_stack() == []


def test_classes_and_memory_are_left_as_they_were(nodes: Nodes):
    before = dict(vars(Graph))
    graph = Graph()
    with remember_graphs():
        capture(graph, nodes, lambda: torch.ones(3) + 1)
        assert graphs.number_of(graph) == 0
    assert dict(vars(Graph)) == before
    assert graphs.number_of(graph) is None


def test_a_capture_is_known_on_all_threads(nodes: Nodes):
    graph, before = Graph(), capture_count()
    known: list[bool] = []
    with remember_graphs():
        capture(graph, nodes, lambda: known.append(_on_another_thread(is_capturing)))
        assert (known, is_capturing(), capture_count()) == ([True], False, before + 1)


def test_what_other_threads_run_meanwhile_is_not_captured(nodes: Nodes):
    graph, x, layer = Graph(), torch.ones(4, 8), torch.nn.Linear(8, 2)

    def code() -> None:
        _on_another_thread(lambda: layer(x))
        x.mul(2)

    with remember_graphs():
        capture(graph, nodes, code)
        live = LiveTrace()
        graph.replay()
        trace = live.stop()
    assert [(op.name, op.module) for op in trace.ops] == [("aten.mul.Tensor", "")]


def _on_another_thread(function: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


@pytest.fixture
def addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of the CPU stands for that of a device."""

    def address(tensor: torch.Tensor) -> int | None:
        return tensor.untyped_storage().data_ptr() or None

    monkeypatch.setattr(storages, "memory_address", address)


@pytest.mark.usefixtures("addresses")
@pytest.mark.parametrize("graphs_of_step", [1, 2])
def test_the_floors_of_replays_are_those_of_the_same_ops(nodes: Nodes, graphs_of_step: int):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    x = torch.randn(32, 64)
    losses: list[torch.Tensor] = []

    def forward() -> None:
        losses[:] = [model(x).square().mean()]

    def backward() -> None:
        losses[0].backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    def step() -> None:
        forward()
        backward()

    step()
    parts = [step] if graphs_of_step == 1 else [forward, backward]
    captured = [Graph() for _ in parts]
    with remember_graphs():
        for graph, part in zip(captured, parts, strict=True):
            capture(graph, nodes, part)
        live = LiveTrace()
        x.mul_(1)
        for graph in captured:
            graph.replay()
        replayed = live.stop()
    live = LiveTrace()
    x.mul_(1)
    step()
    plain = live.stop()
    machine = nearpeak.machine("h200-sxm")
    first, second = (estimate_trace(replace(trace, lives=None), machine) for trace in (replayed, plain))
    assert first.as_written_s == pytest.approx(second.as_written_s, rel=0.02)
    assert first.ideal_s == pytest.approx(second.ideal_s, rel=0.02)
    assert first.fused_s == pytest.approx(second.fused_s, rel=0.05)
