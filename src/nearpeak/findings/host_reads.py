"""Where a step reads tensors on the host: numbers in a loop, and copies for a long stretch of Python."""

from __future__ import annotations

from collections.abc import Sequence

from nearpeak.findings.loops import Loop
from nearpeak.findings.step import READS, Step
from nearpeak.ops.op import Op, name_without_origin
from nearpeak.ops.tensor import Tensor

MIN_READS = 32
"""Of a loop in a step. Fewer numbers may be a summary that is printed."""
_MAX_ELEMENTS = 1024
"""Of the tensors of ops whose results are read: the loop is about numbers, not about tensors."""
COPIES = ("aten._to_copy", "aten.copy", "aten.copy_")
_BULK_ELEMENTS = 16
"""Elements of a tensor from which a copy to the host is data for Python code, not a number to be logged."""
_MAX_OPS_BETWEEN_COPIES = 4
MIN_STRETCH_S = 5e-4
"""Shorter stretches of Python are the overhead of calling ops."""


def reading_places(step: Step) -> set[str]:
    """The lines of loops that read numbers: what waits there is part of the findings about them."""
    return {step.ops[index].place for loop in reading_loops(step) for index in loop.members if is_read(step.ops[index])}


def is_read(op: Op) -> bool:
    """Whether an op reads a number of a tensor, on the device or in the memory of the host."""
    return op.packet in READS or (op.origin == "host" and f"aten.{name_without_origin(op.name)}" in READS)


def reading_loops(step: Step) -> list[Loop]:
    """Loops whose turns read numbers, and whose other ops serve only these reads."""
    loops: list[Loop] = []
    for loop in step.loops:
        members = set(loop.members)
        if any(members & set(other.members) for other in loops):
            continue
        reads = [index for index in loop.members if is_read(step.ops[index])]
        if len(reads) >= MIN_READS and all(_serves_reads(step, index, members) for index in members):
            loops.append(loop)
    return loops


def _serves_reads(step: Step, index: int, members: set[int]) -> bool:
    """Whether an op is a view, a read, a small op whose result nothing but such ops need, or writes one number."""
    op = step.ops[index]
    if op.origin == "host":
        return all(tensor.elements <= _MAX_ELEMENTS for tensor in op.outputs)
    if step.costs[index].family == "view" or op.packet in READS:
        return True
    if op.mutated:  # a result that is filled element by element, which a list can be
        return all(tensor.elements == 1 for tensor in (*op.inputs, *op.outputs))
    small = all(tensor.elements <= _MAX_ELEMENTS for tensor in (*op.inputs, *op.outputs))
    written = set(step.flow.written_by[index])
    return small and not written & step.flow.results and set(step.flow.consumers[index]) <= members


def reads_for_python(step: Step) -> dict[str, str]:
    """Places at which tensors are copied to the host for a long stretch of Python: by place, that of the next op.

    At most a few ops are between the copies and the stretch, so that the code in the stretch waits for them.
    """
    stretches = {
        cause.where
        for cause in step.profile.idle
        if cause.cause == "python" and not cause.what and cause.where and cause.seconds >= MIN_STRETCH_S
    }
    reads: dict[str, str] = {}
    copied: dict[str, int] = {}
    """The places of copies, with the number of ops since."""
    for index, op in enumerate(step.ops):
        if _is_bulk_read(step, op):
            copied[op.place] = 0
        elif step.costs[index].family != "view" and op.packet not in READS and op.origin != "host":
            if op.place in stretches:
                reads.update((place, op.place) for place in copied if place != op.place)
            copied = {place: ops + 1 for place, ops in copied.items() if ops < _MAX_OPS_BETWEEN_COPIES}
    return reads


def _is_bulk_read(step: Step, op: Op) -> bool:
    return is_copy_to_host(step, op) and any(
        tensor.storage in step.trace.on_host and tensor.elements >= _BULK_ELEMENTS for tensor in op.written
    )


def copy_sources(op: Op) -> Sequence[Tensor]:
    """What a copy reads."""
    return op.tensors("src") if op.packet != "aten._to_copy" else op.tensors("self")


def is_copy_to_host(step: Step, op: Op) -> bool:
    """Whether an op copies from device to host memory; False if storages are not known."""
    host = step.trace.on_host
    return (
        op.packet in COPIES
        and any(tensor.storage in host for tensor in op.written)
        and not all(tensor.storage in host for tensor in copy_sources(op))
    )


def is_copy_to_device(step: Step, op: Op) -> bool:
    """Whether an op copies from host to device memory; False if storages are not known."""
    written = op.written
    return (
        op.packet in COPIES
        and bool(written)
        and not any(tensor.storage in step.trace.on_host for tensor in written)
        and any(tensor.storage in step.trace.on_host for tensor in copy_sources(op))
    )
