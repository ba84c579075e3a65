from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nearpeak.trace.kineto.collectives import collective_named, device_collectives, groups_of, host_collectives
from nearpeak.trace.kineto.read import read_trace
from nearpeak.trace.kineto.recording import load_recording
from tests.trace.kineto.conftest import kernel, span, tensor_op


def on_thread(event: dict[str, Any], thread: int) -> dict[str, Any]:
    return {**event, "tid": thread}


CALL = tensor_op("c10d::allreduce_", 100.0, 10.0, [1000])
WORK = on_thread(span("gloo:all_reduce", 120.0, 300.0, "user_annotation"), 2)


def test_a_collective_of_a_cpu_has_its_call_and_the_work_of_its_backend(write_trace: Callable[..., Path]):
    (found,) = host_collectives(load_recording(write_trace(CALL, WORK)).threads)
    assert (found.kind, found.called, found.start, found.end) == ("all_reduce", 100.0, 120.0, 420.0)
    assert found.bytes == 4000.0


def test_the_work_of_a_backend_and_waits_for_it_are_communication(write_trace: Callable[..., Path]):
    step = span("ProfilerStep#1", 0.0, 600.0, "user_annotation")
    wait = span("_c10d_functional::wait_tensor", 200.0, 220.0)
    pow_op = tensor_op("aten::mul", 190.0, 260.0, [8], [8])
    read = read_trace(write_trace(step, CALL, WORK, pow_op, wait))
    sent = [
        (span.kind, round(span.start_s * 1e6), round(span.seconds * 1e6), span.is_wait) for span in read.communication
    ]
    assert sent == [("all_reduce", 120, 300, False), ("unknown", 200, 220, True)]


def test_a_functional_collective_counts_once(write_trace: Callable[..., Path]):
    outer = tensor_op("_c10d_functional::all_reduce", 90.0, 30.0, [1000])
    assert len(host_collectives(load_recording(write_trace(outer, CALL, WORK)).threads)) == 1


def test_the_kernel_of_a_collective_has_its_group_and_number(write_trace: Callable[..., Path]):
    facts = {
        "Collective name": "_allgather_base",
        "Process Group Name": "3",
        "Seq": 17,
        "In msg nelems": 100,
        "Out msg nelems": 800,
        "dtype": "BFloat16",
        "Group size": 8,
    }
    recording = load_recording(
        write_trace(
            kernel("ncclDevKernel_AllGather_RING_LL(...)", 10.0, 5.0, **facts),
            kernel("ampere_bf16_gemm", 20.0, 5.0),
            kernel("ncclKernel_AllReduce", 30.0, 5.0),
            distributedInfo={"pg_config": [{"pg_name": "3", "ranks": [0, 1]}]},
        )
    )
    gather, reduce = device_collectives(recording)
    assert (gather.kind, gather.group, gather.sequence, gather.bytes, gather.ranks) == (
        "all_gather",
        "3",
        17,
        1600.0,
        8,
    )
    assert (reduce.kind, reduce.group, reduce.sequence) == ("all_reduce", "", None)
    assert groups_of(recording.metadata) == {"3": (0, 1)}


@pytest.mark.parametrize(
    ("name", "kind"),
    [("c10d::alltoall_", "all_to_all"), ("c10d::recv_", "recv"), ("gloo:barrier", "barrier"), ("aten::mm", None)],
)
def test_names_of_collectives(name: str, kind: str | None):
    assert collective_named(name) == kind
