"""Chains of small ops, one kernel each: intermediates go through memory needlessly."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from nearpeak.bound.fusion import fusion_groups
from nearpeak.findings.engine import Waste, rule
from nearpeak.findings.regions import (
    FUSIBLE,
    Region,
    connected_pieces,
    fusion_saving,
    measured_over_expected,
    ops_that_launch,
    reduces_last_dim,
    slowest_op,
    with_backward,
)
from nearpeak.findings.rules.unrolled_recurrence import ops_inside_cells
from nearpeak.findings.step import Step
from nearpeak.ops.op import Op
from nearpeak.units import seconds

LEAST_OPS = 3
LEAST_SAVED = 0.2
"""Of the time of a chain. A smaller saving is within the variation of compilers."""
_NOT_COMPILED = ("aten.multinomial",)
"""Operators among those of numbers that compilers call as they are."""
LONGEST_ROW = 1 << 16
"""Elements. Longer rows are not reduced and reused in one kernel."""


@rule("unfused-pointwise", needs=["storages"], general=True, compiles=True)
def unfused_pointwise(step: Step) -> Iterator[Waste]:
    """The groups of the fused floor, without GEMMs and without ops that other rules claim.

    A chain includes its backward ops: compiled together, they save no more than the inputs of the chain.
    """
    joins = {index for index in range(len(step.ops)) if _joins(step, index)} - _dropout(step) - ops_inside_cells(step)
    chains = [
        piece
        for group in fusion_groups(step.trace, step.costs, step.touches)
        for piece in connected_pieces(step, joins.intersection(group.members), siblings=False)
        if ops_that_launch(step, piece)
    ]
    forward = [chain for chain in chains if step.ops[min(chain)].phase == "forward"]
    regions = [
        Region(forward=region.forward, backward=region.backward & joins) for region in with_backward(step, forward)
    ]
    covered = {index for region in regions for index in region.backward}
    alone = [chain - covered for chain in chains if step.ops[min(chain)].phase == "backward"]
    regions += [Region(forward=frozenset(chain)) for chain in alone if chain]
    products = {
        (op.source, op.module) for op, cost in zip(step.ops, step.costs, strict=True) if cost.family == "matrix"
    }
    for region in regions:
        # At lines with GEMMs only, autocast casts and autograd adds: there is no code to compile.
        if all((step.ops[index].source, step.ops[index].module) in products for index in region.forward):
            continue
        waste = _waste(step, region) if len(ops_that_launch(step, region.members)) >= LEAST_OPS else None
        if waste is not None:
            yield waste


def _joins(step: Step, index: int) -> bool:
    op, cost = step.ops[index], step.costs[index]
    if index in step.claimed or op.phase == "optimizer" or op.recomputed or cost.family not in FUSIBLE:
        return False
    if op.origin == "inductor" or op.packet in _NOT_COMPILED:  # it is compiled already, or never
        return False
    if _leaves_device(step, op):  # a copy between device and host cannot be fused
        return False
    if cost.family == "reduction" and op.inputs and op.outputs:
        by_rows = reduces_last_dim(op) and op.inputs[0].shape[-1] <= LONGEST_ROW
        return by_rows or not any(step.ops[reader].phase == op.phase for reader in step.flow.consumers[index])
    return True


def _leaves_device(step: Step, op: Op) -> bool:
    """Whether an op has tensors in host memory and in device memory."""
    on_host = {tensor.storage in step.trace.on_host for tensor in (*op.inputs, *op.written) if tensor.elements > 1}
    return len(on_host) > 1


def _dropout(step: Step) -> set[int]:
    """The ops of torch's own dropout on a CPU: it is one call, and nothing better is available."""
    drawn = {
        storage
        for index, op in enumerate(step.ops)
        if op.packet == "aten.bernoulli_"
        for storage in step.flow.written_by[index]
    }
    return {index for index in range(len(step.ops)) if drawn.intersection(step.flow.read_by[index])}


def _waste(step: Step, region: Region) -> Waste | None:
    members = ops_that_launch(step, region.members)
    kind = "reduction" if any(step.costs[index].family == "reduction" for index in members) else "pointwise"
    # Kernels that are slower than others of their kind stay so: because of their strides, for example.
    function = _torch_function(step, region)
    saving = fusion_saving(
        step,
        region,
        times=measured_over_expected(step, members),
        kinds=(kind, kind),
        compiled=not function,
    )
    if saving.measured_s - saving.remaining_s < LEAST_SAVED * saving.measured_s:
        return None
    lines = sorted({step.ops[index].source for index in members} - {""})
    return Waste(
        title=f"{len(members)} small ops, each a kernel of its own, could be one.",
        op=_op_at_slowest_line(step, region.forward),
        gains=saving.gains,
        gone=saving.gone,
        evidence=saving.evidence(step, f" ({', '.join(lines)})" if 1 < len(lines) <= 4 else ""),
        reasoning=f"{saving.kernels} that reads and writes only what others need would take "
        f"{seconds(saving.remaining_s)}.",
        remedy=f"y = {function}  # it is in these lines, written out; or compile them"
        if function
        else _COMPILED[any(step.derivatives.get(index) for index in members if step.ops[index].phase == "backward")],
    )


_COMPILED = {
    False: "Put these lines into a function of its own and compile it:\n"
    "@torch.compile\ndef fused(...):  # the lines named above\n    ...",
    True: "Their backward pass is differentiated again, which torch.compile cannot do. Write the derivatives with "
    "torch.func, and compile the function:\n"
    "@torch.compile\ndef residuals(points):  # of all points; no torch.autograd.grad inside\n"
    "    slopes = torch.func.vmap(torch.func.jacrev(model))(points)\n    ...",
}
"""What to write instead, by whether derivatives of the backward pass are taken."""


def _op_at_slowest_line(step: Step, members: Collection[int]) -> int:
    """The slowest op of the line that takes most time; in a loop, that of many short ops."""
    times: dict[str, float] = {}
    for index in members:
        times[step.ops[index].source] = times.get(step.ops[index].source, 0.0) + step.time(index)
    slowest = max(times, key=lambda line: times[line])
    return slowest_op(step, [index for index in members if step.ops[index].source == slowest])


class _TorchFunction(NamedTuple):
    """A function of torch's, and what it looks like written out."""

    call: str
    packets: frozenset[str]
    """Operators that are all there."""
    constants: tuple[float, ...] = ()
    """Numbers one of which is there."""


_TORCH_FUNCTIONS = (
    _TorchFunction('torch.nn.functional.gelu(x, approximate="tanh")', frozenset({"aten.tanh"}), (0.044715,)),
    _TorchFunction("torch.nn.functional.gelu(x)", frozenset({"aten.erf"}), (math.sqrt(0.5), math.sqrt(2.0))),
    _TorchFunction("torch.softmax(x, -1)", frozenset({"aten.amax", "aten.exp", "aten.sum", "aten.div"})),
    _TorchFunction("torch.softmax(x, -1)", frozenset({"aten.max", "aten.exp", "aten.sum", "aten.div"})),
    _TorchFunction("torch.logsumexp(x, -1)", frozenset({"aten.exp", "aten.sum", "aten.log"})),
)


def _torch_function(step: Step, region: Region) -> str:
    """A call of a function of torch's that does the same, if the ops are one written out; else ""."""
    ops = [step.ops[index] for index in sorted(region.forward)]
    function = next((known.call for known in _TORCH_FUNCTIONS if _is_written_out(known, ops)), "")
    if not function and _multiplies_by_its_sigmoid(ops):
        function = "torch.nn.functional.silu(x)"
    return function


def _is_written_out(function: _TorchFunction, ops: Sequence[Op]) -> bool:
    if not function.packets <= {op.packet for op in ops}:
        return False
    numbers = [value for op in ops for value in op.arguments.values() if isinstance(value, (int, float))]
    return not function.constants or any(
        math.isclose(number, constant, rel_tol=1e-3) for number in numbers for constant in function.constants
    )


def _multiplies_by_its_sigmoid(ops: Sequence[Op]) -> bool:
    gates = [{op.inputs[0].storage, op.outputs[0].storage} for op in ops if op.packet == "aten.sigmoid" and op.outputs]
    return any({tensor.storage for tensor in op.inputs} in gates for op in ops if op.packet == "aten.mul")
