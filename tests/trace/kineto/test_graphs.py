"""Steps that launch CUDA graphs, alone and beside ops."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nearpeak.errors import UsageError
from nearpeak.trace.kineto.read import read_trace

Write = Callable[..., Path]
H200 = [{"id": 0, "name": "NVIDIA H200", "computeMajor": 9}]
IN_GRAPH = {"graph id": 3, "graph node id": 12884901888}


def replays(make: Any, launch: float = 5.0) -> list[dict[str, Any]]:
    """Two steps of 100 us; each launches a graph of three kernels of 20 us with 2 us between them."""
    events = []
    for number, start in ((1, 1000.0), (2, 1100.0)):
        events += [
            make.span(f"ProfilerStep#{number}", start, 100, "user_annotation", **{"External id": number}),
            make.span("cudaGraphLaunch", start + 10, launch, "cuda_runtime", correlation=number),
            *(
                make.kernel(f"k{number}{place}", start + 20 + 22 * place, 20, correlation=number, **IN_GRAPH)
                for place in range(3)
            ),
        ]
    return events


def test_a_step_that_only_replays_a_graph_has_kernels_and_no_ops(write_trace: Write, make: Any):
    found = read_trace(write_trace(*replays(make), deviceProperties=H200))
    assert found.trace.ops == ()
    assert (found.steps, found.step) == ((1, 2), 2)
    assert [(item.name, item.op, item.in_graph) for item in found.kernels] == [
        ("k20", None, True),
        ("k21", None, True),
        ("k22", None, True),
    ]
    assert found.wall_s == pytest.approx(100e-6)
    assert found.notes == (
        "3 kernels of 0.060 ms were launched by CUDA graphs and have no ops, so they are measured without bounds.",
    )


def test_a_graphs_kernels_are_of_the_step_that_launched_it(write_trace: Write, make: Any):
    late = replays(make)
    for event in late:
        if event["name"].startswith("k1"):
            event["ts"] += 85  # runs in the second step
    path = write_trace(*late)
    assert [item.name for item in read_trace(path, step=1).kernels] == ["k10", "k11", "k12"]
    assert [item.launched_s for item in read_trace(path, step=1).kernels] == pytest.approx([15e-6] * 3)
    assert read_trace(path, step=2).free_from_s == pytest.approx(69e-6)


def test_all_of_a_graph_is_launched_when_its_first_kernel_runs(write_trace: Write, make: Any):
    found = read_trace(write_trace(*replays(make, launch=60.0)))
    assert [item.launched_s for item in found.kernels] == pytest.approx([20e-6] * 3)


def test_beside_ops_the_kernels_of_graphs_are_counted(write_trace: Write, make: Any):
    path = write_trace(
        make.tensor_op("aten::exp", 0, 10, [64, 64], **{"External id": 1}),
        make.span("cudaLaunchKernel", 2, 5, "cuda_runtime", correlation=4),
        make.span("cudaGraphLaunch", 30, 10, "cuda_runtime", correlation=5),
        make.kernel("exp", 20, 5, correlation=4, **{"External id": 1}),
        make.kernel("k0", 50, 5, correlation=5, **IN_GRAPH),
        make.kernel("k1", 56, 5, correlation=5, **IN_GRAPH),
        make.kernel("stray", 70, 5, correlation=6),
    )
    found = read_trace(path)
    assert [item.op for item in found.kernels] == [0, 1, 1, None]
    assert any(note.startswith("2 kernels of 0.010 ms were launched by CUDA graphs") for note in found.notes)
    assert any(note.startswith("1 kernels of 0.005 ms belong to no op") for note in found.notes)
    assert not any("cudaGraphLaunch" in note for note in found.notes)


def test_a_graph_that_compiled_code_launches_alone(write_trace: Write, make: Any):
    inside = {"External id": 9}
    path = write_trace(
        make.span("Torch-Compiled Region: 0/0", 0, 50, **inside),
        make.span("cudaGraphLaunch", 10, 10, "cuda_runtime", correlation=5, **inside),
        make.kernel("k0", 50, 5, correlation=5, **IN_GRAPH, **inside),
    )
    found = read_trace(path)
    assert (found.trace.ops, [item.op for item in found.kernels]) == ((), [None])
    assert found.compiled_regions == {"Torch-Compiled Region: 0/0"}


def test_what_has_no_ops_and_no_graphs_is_an_error_as_before(write_trace: Write, make: Any):
    step = make.span("ProfilerStep#1", 0, 100, "user_annotation")
    launch = make.span("cudaLaunchKernel", 10, 5, "cuda_runtime", correlation=4)
    with pytest.raises(UsageError, match="has no ops of the CPU"):
        read_trace(write_trace(step))
    with pytest.raises(UsageError, match="has no ops of the CPU"):
        read_trace(write_trace(step, launch, make.kernel("k", 20, 5, correlation=4)))
    with pytest.raises(UsageError, match="no shapes"):
        read_trace(write_trace(*replays(make), make.span("aten::exp", 1010, 5)))


def test_replays_of_a_graph_that_nearpeak_marked_have_the_same_kernels(write_trace: Write, make: Any):
    events = replays(make)
    for event in events:
        for fact in IN_GRAPH:  # as torch 2.11 writes it
            event["args"].pop(fact, None)
    marks = [make.span("nearpeak: replay of graph 4", start + 8, 10) for start in (1000.0, 1100.0)]
    whole = read_trace(write_trace(*events, *marks))
    assert {kernel.replay.graph for kernel in whole.kernels if kernel.replay is not None} == {4}
    assert whole.completeness.losses == ()
    path = write_trace(*(event for event in events if event["name"] != "k21"), *marks)
    (loss,) = read_trace(path, step=2).completeness.losses
    assert (loss.kind, loss.count, loss.in_step) == ("kernels", 1, True)
    (loss,) = read_trace(path, step=1).completeness.losses
    assert (loss.kind, loss.count, loss.in_step) == ("kernels", 1, False)
