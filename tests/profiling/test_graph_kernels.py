"""Kernels of CUDA graphs and the ops that added their nodes."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import nearpeak
from nearpeak.ops.graph import GraphNode, GraphReplay
from nearpeak.profiling.assemble import match_graph_kernels
from nearpeak.trace.graphs import remember_graphs
from nearpeak.trace.kineto.kernels import GraphLaunch, KernelRun

GRID = {"gemm": (8, 1, 1), "add": (2, 1, 1)}


def node(name: str, op: int | None) -> GraphNode:
    if name == "memset":
        return GraphNode(kind="memset", op=op)
    return GraphNode(kind="kernel", name=name, grid=GRID[name], block=(128, 1, 1), op=op)


def kernel(name: str, start: float, number: int | None, *, graph: int | None = 0, launch: float = 0.0) -> KernelRun:
    replay = None
    if graph is not None:
        replay = GraphLaunch(
            graph=graph, start_s=launch, node=number, grid=GRID.get(name), block=(128, 1, 1) if name in GRID else None
        )
    return KernelRun(
        name=name,
        kind="memset" if name == "memset" else "kernel",
        start_s=start,
        seconds=1e-6,
        device=0,
        stream=7,
        op=None,
        in_graph=True,
        replay=replay,
    )


def replay(*nodes: GraphNode, graph: int = 0, chain: bool = True) -> GraphReplay:
    """A graph whose nodes wait for all before them, or for none."""
    nodes = tuple(replace(node, earlier=(1 << place) - 1 if chain else 0) for place, node in enumerate(nodes))
    return GraphReplay(graph=graph, nodes=nodes, ops=range(9))


CHAIN = (node("gemm", 0), node("add", 1), node("memset", 2), node("gemm", 3))
NAMES = ("gemm", "add", "memset", "gemm")


@pytest.mark.parametrize("with_ids", [True, False])
def test_each_kernel_has_the_op_that_added_its_node(with_ids: bool):
    kernels = [kernel(name, place, (5 << 32) + place if with_ids else None) for place, name in enumerate(NAMES)]
    found = match_graph_kernels(kernels, [replay(*CHAIN)])
    assert found.ops == {0: 0, 1: 1, 2: 2, 3: 3}
    assert (found.lost, found.note) == (0, "")


@pytest.mark.parametrize("with_ids", [True, False])
def test_a_fill_may_run_as_a_kernel_of_the_driver(with_ids: bool):
    names = ("gemm", "add", "memcpy32_post", "gemm")
    kernels = [kernel(name, place, (5 << 32) + place if with_ids else None) for place, name in enumerate(names)]
    assert match_graph_kernels(kernels, [replay(*CHAIN)]).ops == {0: 0, 1: 1, 2: 2, 3: 3}
    two = [kernel("memcpy32_post", 0, None), kernel("memset", 1, None)]
    fills = (node("memset", 0), node("memset", 1))
    assert match_graph_kernels(two, [replay(*fills, chain=False)]).ops == {}  # either may be the other
    assert match_graph_kernels(two, [replay(fills[0])]).ops == {}  # one of the two is no node of the graph


def test_without_names_of_nodes_grid_and_block_tell():
    nodes = [replace(item, name="") for item in CHAIN]
    kernels = [kernel(name, place, None) for place, name in enumerate(NAMES)]
    assert match_graph_kernels(kernels, [replay(*nodes)]).ops == {0: 0, 1: 1, 2: 2, 3: 3}


def test_branches_that_run_side_by_side_keep_their_nodes():
    order = (0, 2, 3, 1)  # what was added second runs last, on another stream
    kernels = [kernel(NAMES[place], when, place + 1) for when, place in enumerate(order)]
    found = match_graph_kernels(kernels, [replay(*CHAIN)])
    assert found.ops == {0: 0, 1: 2, 2: 3, 3: 1}


def test_kernels_of_one_op_may_run_in_any_order():
    nodes = (node("gemm", 0), node("add", 0), node("gemm", 0), node("add", 0))
    kernels = [kernel(name, when, None) for when, name in enumerate(("add", "gemm", "add", "gemm"))]
    assert match_graph_kernels(kernels, [replay(*nodes, chain=False)]).ops == dict.fromkeys(range(4), 0)


def test_side_by_side_nothing_tells_equal_kernels_of_two_ops_apart():
    nodes = (node("gemm", 0), node("add", 1), node("gemm", 2))
    kernels = [kernel(name, when, None) for when, name in enumerate(("gemm", "gemm", "add"))]
    found = match_graph_kernels(kernels, [replay(*nodes, chain=False)])
    assert found.ops == {2: 1} and "side by side" in found.note
    assert match_graph_kernels(kernels, [replay(*nodes)]).ops == {0: 0, 1: 2, 2: 1}


def test_a_lost_kernel_is_counted_and_takes_no_others_op():
    kernels = [kernel(name, place, place) for place, name in enumerate(NAMES) if place != 0]
    found = match_graph_kernels(kernels, [replay(*CHAIN)])
    assert found.lost == 1
    assert found.ops == {0: 1, 1: 2}  # either product may be the one that is left
    assert "1 kernels of 0.001 ms" in found.note and "no op was seen" in found.note


def test_another_grid_is_another_kernel():
    other = node("gemm", 4)
    nodes = [GraphNode(kind="kernel", name="gemm", grid=(9, 1, 1), block=(128, 1, 1), op=4), node("add", 1)]
    found = match_graph_kernels([kernel("gemm", 0, 1), kernel("add", 1, 2)], [replay(*nodes)])
    assert other.grid != nodes[0].grid and found.ops == {1: 1}


def test_launches_are_those_of_the_same_graph_in_order():
    kernels = [
        kernel("gemm", 0, 1, graph=3, launch=0.0),
        kernel("add", 1, 1, graph=4, launch=1.0),
        kernel("gemm", 2, 1, graph=3, launch=2.0),
    ]
    replays = [replay(node("gemm", 0), graph=3), replay(node("add", 1), graph=4), replay(node("gemm", 2), graph=3)]
    assert match_graph_kernels(kernels, replays).ops == {0: 0, 1: 1, 2: 2}


@pytest.mark.parametrize(
    ("kernels", "nodes", "why"),
    [
        ([kernel("gemm", 0, 1, graph=None)], (), "captured before nearpeak watched"),
        ([kernel("gemm", 0, 1)], (node("gemm", None),), "no op was seen to add them"),
    ],
)
def test_what_cannot_be_told_is_said(kernels: Any, nodes: Any, why: str):
    found = match_graph_kernels(kernels, [replay(*nodes)])
    assert found.ops == {} and why in found.note
    assert "not launched in the step that was traced" in match_graph_kernels([kernel("gemm", 0, 1)], []).note


def compiled() -> Callable[[], Any]:
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.LayerNorm(256), torch.nn.GELU()).to(
        "cuda", torch.bfloat16
    )
    call, x = torch.compile(model, mode="reduce-overhead"), torch.randn(64, 256, device="cuda", dtype=torch.bfloat16)

    def step() -> None:
        call(x).sum().backward()
        model.zero_grad()  # gradients lie in the memory of the graph, which the next step overwrites

    return step


def by_hand() -> Callable[[], Any]:
    weight, x = (torch.randn(256, 256, device="cuda", requires_grad=number == 0) for number in range(2))
    weight.grad = torch.zeros_like(weight)
    optimizer = torch.optim.SGD([weight], lr=1e-3)
    graph = torch.cuda.CUDAGraph()

    def work() -> None:
        (x @ weight).softmax(-1).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    def step() -> None:
        if not captured:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                work()
            torch.cuda.current_stream().wait_stream(stream)
            with torch.cuda.graph(graph):
                work()
            captured.append(True)
        graph.replay()

    captured: list[bool] = []
    return step


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # torch captures one for its pool of memory
@pytest.mark.parametrize("make", [compiled, by_hand])
def test_kernels_of_graphs_on_a_gpu_have_op_shape_line_and_bound(make: Any):
    profile = nearpeak.profile(make(), on="h200-sxm")
    inside = [kernel for kernel in profile.timeline if kernel.in_graph]
    assert len(inside) > 3
    for kernel in inside:
        assert kernel.op is not None, kernel.name
        op = profile.ops[kernel.op]
        assert op.shapes and op.modeled and "test_graph_kernels.py" in op.source, op
    assert profile.completeness is not None and profile.completeness.complete, profile.completeness
    if make is by_hand:
        assert {op.phase for op in profile.ops} == {"forward", "backward", "optimizer"}


def captured_kernels() -> list[str]:
    """The kernels of a graph of a forward and a backward pass that uses a tensor twice."""
    weight, x = (torch.ones(256, 256, device="cuda", requires_grad=number == 0) for number in range(2))
    weight.grad = torch.zeros_like(weight)

    def work() -> None:
        y = x @ weight
        (y * y.sigmoid()).cumsum(0)[1:].sum().backward()

    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        graph.replay()
        torch.cuda.synchronize()
    return [event.name for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]


@pytest.mark.gpu
def test_a_graph_is_the_one_that_is_captured_alone():
    alone = captured_kernels()
    with remember_graphs():
        watched = captured_kernels()
    assert len(alone) > 5 and watched == alone
