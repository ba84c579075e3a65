from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nearpeak.profiling.assemble import attribute_idle
from nearpeak.trace.kineto.host import STEP_END_WAIT, kind_of_range, kind_of_runtime_call, line_of_mark
from nearpeak.trace.kineto.read import read_trace

Write = Callable[..., Path]
MATRIX = [8, 8]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("cudaStreamSynchronize", "synchronization"),
        ("cudaEventSynchronize", "synchronization"),
        ("hipDeviceSynchronize", "synchronization"),
        ("cudaMemcpy", "synchronization"),
        ("hipMemcpyWithStream", "synchronization"),
        ("cuMemcpyDtoH_v2", "synchronization"),
        ("cudaMemcpyAsync", None),
        ("cuMemcpyHtoDAsync_v2", None),
        ("cudaStreamWaitEvent", None),
        ("cudaMalloc", "allocator"),
        ("cudaFree", "allocator"),
        ("cudaHostAlloc", "allocator"),
        ("cudaMallocAsync", "allocator"),
        ("cuMemCreate", "allocator"),
        ("hipFree", "allocator"),
        ("cudaFuncGetAttributes", None),
        ("cudaMemsetAsync", None),
        ("cudaLaunchKernel", None),
        ("cuModuleLoadData", "compilation"),
    ],
)
def test_calls_of_the_runtime(name: str, kind: str | None):
    assert kind_of_runtime_call(name) == kind


def test_ranges():
    assert kind_of_range("_compile.compile_inner (dynamo_timed)") == "compilation"
    assert kind_of_range("dynamo") == "compilation"
    assert kind_of_range("TorchDynamo Cache Lookup") is None
    assert kind_of_range("TorchDynamo Cache Lookup") is None
    assert kind_of_range("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__") == "input"
    assert kind_of_range("aten::mm") is None


def of_a_step(write_trace: Write, make: Any) -> Path:
    return write_trace(
        make.span("ProfilerStep#0", 100, 900, "user_annotation"),
        make.span("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 110, 50, "user_annotation"),
        make.tensor_op("aten::exp", 200, 40, MATRIX, **{"External id": 1}),
        make.span("cudaMalloc", 205, 10, "cuda_runtime", correlation=9),
        make.span("cudaLaunchKernel", 220, 10, "cuda_runtime", correlation=10),
        make.tensor_op("aten::item", 300, 100, [], **{"External id": 2}),
        make.tensor_op("aten::_local_scalar_dense", 301, 98, [], **{"External id": 3}),
        make.span("cudaMemcpyAsync", 310, 10, "cuda_runtime", correlation=11),
        make.span("cudaStreamSynchronize", 325, 70, "cuda_runtime", correlation=12),
        make.tensor_op("aten::_to_copy", 500, 60, MATRIX, **{"External id": 4}),
        make.span("cudaMemcpyAsync", 510, 45, "cuda_runtime", correlation=13),
        make.span(STEP_END_WAIT, 700, 100, "user_annotation"),
        make.span("cudaDeviceSynchronize", 710, 80, "cuda_runtime", correlation=14),
        make.kernel("exp", 230, 130, correlation=10, **{"External id": 1}),
        make.kernel("Memcpy DtoH (Device -> Pinned)", 361, 2, "gpu_memcpy", correlation=11, bytes=4),
        make.kernel("Memcpy HtoD (Pageable -> Device)", 530, 10, "gpu_memcpy", correlation=13, bytes=256),
        {**make.span("Activity Buffer Request", 215, 3, "overhead"), "pid": -1, "tid": 0},
        {**make.span("cudaEventSynchronize", 150, 500, "cuda_runtime", correlation=15), "tid": 2},
    )


def test_what_the_host_did_has_its_op_and_the_clock_of_the_kernels(write_trace: Write, make: Any):
    found = read_trace(of_a_step(write_trace, make))
    names = [op.packet for op in found.trace.ops]
    assert [
        (span.kind, None if span.op is None else names[span.op], round(span.start_s * 1e6), round(span.seconds * 1e6))
        for span in found.host
    ] == [
        ("input", None, 10, 50),
        ("allocator", "aten.exp", 105, 10),
        ("profiler", None, 115, 3),
        ("synchronization", "aten._local_scalar_dense", 225, 70),
        ("synchronization", "aten._to_copy", 410, 45),  # its memory is pageable: the call waits
    ]  # neither our own wait nor that of a thread that launches nothing
    assert [round((item.launched_s or 0.0) * 1e6) for item in found.kernels] == [130, 220, 455]
    assert [(round(start * 1e6), round(end * 1e6)) for start, end in found.host_working] == [(50, 550), (610, 690)]
    assert found.free_from_s == 0.0


def test_kernels_of_the_step_before_keep_the_device_busy(write_trace: Write, make: Any):
    events = []
    for number, start in enumerate((0, 100)):
        events += [
            make.span(f"ProfilerStep#{number}", start, 90, "user_annotation"),
            make.tensor_op("aten::exp", start + 10, 10, MATRIX, **{"External id": number + 1}),
            make.span("cudaLaunchKernel", start + 12, 5, "cuda_runtime", correlation=number + 10),
            make.kernel(f"k{number}", start + 60, 80, correlation=number + 10, **{"External id": number + 1}),
        ]
    path = write_trace(*events)
    assert read_trace(path).free_from_s == pytest.approx(40e-6)
    assert read_trace(path, step=0).free_from_s == 0.0


def test_a_printed_tensor_is_one_wait_with_its_line(write_trace: Write, make: Any):
    path = write_trace(
        make.span("ProfilerStep#0", 100, 900, "user_annotation"),
        make.tensor_op("aten::exp", 200, 40, MATRIX, **{"External id": 1}),
        make.span("cudaLaunchKernel", 220, 10, "cuda_runtime", correlation=10),
        make.span("nearpeak: printed tensor at train.py:41", 300, 300, "cpu_op"),
        make.tensor_op("aten::_to_copy", 310, 60, MATRIX, **{"External id": 4}),
        make.span("cudaMemcpyAsync", 320, 10, "cuda_runtime", correlation=13),
        make.span("cudaStreamSynchronize", 335, 20, "cuda_runtime", correlation=14),
        make.kernel("exp", 230, 100, correlation=10, **{"External id": 1}),
        make.kernel("Memcpy DtoH (Device -> Pageable)", 340, 2, "gpu_memcpy", correlation=13, bytes=256),
    )
    recorded = read_trace(path)
    assert [(span.kind, line_of_mark(span.name)) for span in recorded.host] == [("synchronization", "train.py:41")]
    assert [op.source for op in recorded.trace.ops] == ["", "train.py:41"]
    causes = attribute_idle(recorded, idle_s=4e-4, clean=False).causes
    assert ("synchronization", "train.py:41", "print") in {(item.cause, item.where, item.what) for item in causes}


def test_what_the_compiler_runs_is_no_op(write_trace: Write, make: Any):
    path = write_trace(
        make.span("_compile.compile_inner (dynamo_timed)", 0, 100),
        make.span("bytecode_tracing (dynamo_timed)", 10, 50),
        make.tensor_op("aten::mm", 20, 5, MATRIX, MATRIX),
        make.tensor_op("aten::exp", 200, 5, MATRIX),
    )
    found = read_trace(path, step="all")
    assert [op.packet for op in found.trace.ops] == ["aten.exp"]
    assert [span.name for span in found.host] == []  # before the first op of a file without steps
    path = write_trace(
        make.tensor_op("aten::exp", 0, 5, MATRIX),
        make.span("_compile.compile_inner (dynamo_timed)", 10, 100),
        make.span("bytecode_tracing (dynamo_timed)", 20, 50),
        make.tensor_op("aten::exp", 200, 5, MATRIX),
    )
    assert [span.name for span in read_trace(path).host] == ["_compile.compile_inner (dynamo_timed)"]
