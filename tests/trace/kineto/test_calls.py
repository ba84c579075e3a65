from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from nearpeak.trace.kineto.kernels import seconds_by_op
from nearpeak.trace.kineto.read import read_trace

Write = Callable[..., Path]
MATRIX = [8, 8]


def names(path: Path) -> list[str]:
    return [op.name for op in read_trace(path).trace.ops]


def test_composite_operators_are_taken_apart_and_others_are_not(write_trace: Write, make: Any):
    path = write_trace(
        make.tensor_op("aten::matmul", 0, 100, MATRIX, MATRIX),
        make.tensor_op("aten::mm", 10, 80, MATRIX, MATRIX),
        make.tensor_op("aten::exp", 200, 50, MATRIX),
        make.tensor_op("aten::copy_", 210, 10, MATRIX, MATRIX),
    )
    assert names(path) == ["aten.mm.default", "aten.exp.default"]


def test_the_order_of_events_in_the_file_does_not_matter(write_trace: Write, make: Any):
    events = [make.tensor_op("aten::exp", start, 10, MATRIX) for start in (0, 20)]
    events.append(make.tensor_op("aten::mm", 40, 10, MATRIX, MATRIX))
    assert names(write_trace(*events)) == names(write_trace(*reversed(events)))


def test_phases(write_trace: Write, make: Any):
    path = write_trace(
        make.tensor_op("aten::exp", 0, 10, MATRIX),
        make.span("autograd::engine::evaluate_function: ExpBackward0", 20, 30),
        make.span("ExpBackward0", 21, 28),
        make.tensor_op("aten::mul", 22, 10, MATRIX, MATRIX),
        make.span("Optimizer.step#AdamW.step", 60, 30, "user_annotation"),
        make.tensor_op("aten::sqrt", 70, 10, MATRIX),
        make.span("Optimizer.zero_grad#AdamW.zero_grad", 100, 30, "user_annotation"),
        make.tensor_op("aten::zero_", 110, 10, MATRIX),
    )
    assert [op.phase for op in read_trace(path).trace.ops] == ["forward", "backward", "optimizer", "forward"]


def test_each_kernel_belongs_to_one_op(write_trace: Write, make: Any):
    path = write_trace(
        make.tensor_op("aten::matmul", 0, 100, MATRIX, MATRIX, **{"External id": 1}),
        make.tensor_op("aten::mm", 10, 80, MATRIX, MATRIX, **{"External id": 2}),
        make.tensor_op("aten::empty_like", 12, 5, MATRIX, **{"External id": 3}),
        make.span("cudaLaunchKernel", 20, 5, "cuda_runtime", correlation=50, **{"External id": 2}),
        make.span("cudaMemsetAsync", 30, 5, "cuda_runtime", correlation=51),
        make.kernel("gemm", 120, 40, correlation=50, **{"External id": 2}),
        make.kernel("Memset (Device)", 170, 1, "gpu_memset", correlation=51, bytes=4),
        make.kernel("inner", 180, 2, **{"External id": 3}),
        make.kernel("stray", 190, 3, correlation=99),
        deviceProperties=[{"id": 0, "name": "NVIDIA H200"}],
    )
    found = read_trace(path)
    assert [(item.name, item.op) for item in found.kernels] == [
        ("gemm", 0),
        ("Memset (Device)", 0),
        ("inner", 0),
        ("stray", None),
    ]
    assert {op: round(seconds * 1e6) for op, seconds in seconds_by_op(found.kernels).items()} == {0: 43, None: 3}
    assert [item.bytes for item in found.kernels] == [None, 4, None, None]
    assert found.kernels[0].start_s == 110e-6
    assert found.device == "NVIDIA H200"
    assert any("1 kernels of 0.003 ms belong to no op" in note for note in found.notes)


def test_an_operator_of_somebody_elses_is_an_op_without_a_cost(write_trace: Write, make: Any):
    path = write_trace(
        make.tensor_op("vllm::moe_forward", 0, 100, MATRIX, **{"External id": 1}),
        make.tensor_op("aten::mm", 10, 20, MATRIX, MATRIX, **{"External id": 2}),
        make.span("MyFunction", 200, 50, **{"External id": 3}),
        make.tensor_op("quiet::leaf", 300, 50, MATRIX, **{"External id": 4}),
        make.kernel("moe", 400, 40, **{"External id": 1}),
        make.kernel("gemm", 440, 40, **{"External id": 2}),
        make.kernel("triton_", 480, 40, **{"External id": 3}),
    )
    found = read_trace(path)
    assert [op.name for op in found.trace.ops] == [
        "unknown.vllm::moe_forward",
        "aten.mm.default",
        "unknown.MyFunction",
        "unknown.quiet::leaf",
    ]
    assert [item.op for item in found.kernels] == [0, 1, 2]


def test_kernels_of_a_cuda_graph_belong_to_its_launch(write_trace: Write, make: Any):
    path = write_trace(
        make.tensor_op("aten::exp", 0, 10, MATRIX, **{"External id": 1}),
        make.span("cudaLaunchKernel", 2, 5, "cuda_runtime", correlation=6, **{"External id": 1}),
        make.kernel("exp", 12, 5, correlation=6, **{"External id": 1}),
        make.span("## Call CompiledFxGraph f ##", 20, 50, "user_annotation", **{"External id": 2}),
        make.span("cudaGraphLaunch", 30, 10, "cuda_runtime", correlation=7, **{"External id": 2}),
        *(
            make.kernel("k", 50 + 10 * n, 5, correlation=7, **{"External id": 2, "graph node id": n + 1})
            for n in (0, 1)
        ),
    )
    found = read_trace(path)
    assert [op.name for op in found.trace.ops] == ["aten.exp.default", "unknown.cudaGraphLaunch"]
    assert [(item.op, item.in_graph) for item in found.kernels] == [(0, False), (1, True), (1, True)]
    assert any("2 kernels of 0.010 ms were launched by CUDA graphs" in note for note in found.notes)


def test_kernels_of_a_step_are_those_that_it_launched(write_trace: Write, make: Any):
    events = []
    for number, start in enumerate((0, 100)):
        events += [
            make.span(f"ProfilerStep#{number}", start, 90, "user_annotation"),
            make.tensor_op("aten::exp", start + 10, 10, MATRIX, **{"External id": number + 1}),
            make.span("cudaLaunchKernel", start + 12, 5, "cuda_runtime", correlation=number + 10),
            make.kernel(f"k{number}", start + 95, 100, correlation=number + 10, **{"External id": number + 1}),
        ]
    path = write_trace(*events)
    first = read_trace(path, step=0)
    assert [(item.name, item.op) for item in first.kernels] == [("k0", 0)]
    assert first.wall_s == 100e-6  # the kernel is longer than the step on the CPU
    assert [item.name for item in read_trace(path).kernels] == ["k1"]
    assert len(read_trace(path, step="all").kernels) == 2


def test_a_call_stack_in_the_op_gives_the_line(write_trace: Write, make: Any):
    stack = {"Call stack": "src/train.py(41): step;train.py(90): <module>"}
    path = write_trace(make.tensor_op("aten::exp", 0, 10, MATRIX, **stack))
    assert [op.source for op in read_trace(path).trace.ops] == ["train.py:41"]


def test_ops_of_a_closure_are_not_the_optimizers(tmp_path):
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)

    def closure():
        loss = model(torch.ones(2, 4)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    with torch.profiler.profile(record_shapes=True) as profiler:
        optimizer.step(closure)
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    phases = {op.packet: op.phase for op in read_trace(tmp_path / "trace.json").trace.ops}
    assert (phases["aten.addmm"], phases["aten.mm"]) == ("forward", "backward")
    assert (phases["aten._foreach_mul_"] if "aten._foreach_mul_" in phases else phases["aten.mul_"]) == "optimizer"
