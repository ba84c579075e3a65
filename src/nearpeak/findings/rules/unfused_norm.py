"""A normalization of rows is written as separate ops, a kernel each: square, mean, rsqrt, multiply."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from nearpeak.bound.dataflow import CHAINED
from nearpeak.findings.engine import Waste, rule
from nearpeak.findings.regions import (
    describe_ops,
    fusion_saving,
    measured_over_expected,
    ops_that_launch,
    reduces_last_dim,
    with_backward,
)
from nearpeak.findings.step import Step
from nearpeak.ops.tensor import Tensor
from nearpeak.units import quantity, seconds

MAX_HOPS = 6
KINDS = ("aten.native_layer_norm", "aten.native_layer_norm_backward")
SHORT_ROW = 256
"""Elements. torch's kernels use a thread block per row, most of which is idle in a shorter row. On an H200, `rms_norm`
of rows of 64 and 1024 in training Qwen3-MoE took 2.4 times as long as expected."""
_ROOTS = ("aten.rsqrt", "aten.rsqrt_", "aten.sqrt", "aten.sqrt_", "aten.pow")
_BEFORE = ("aten._to_copy", "aten.pow", "aten.square", "aten.mul", "aten.sub", "aten.mean", "aten.abs")
"""Ops between a tensor and the mean of its squares."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Norm:
    members: frozenset[int]
    root: int
    given: Tensor
    size: int
    centered: bool
    """Whether the mean is subtracted: a LayerNorm."""


@rule("unfused-norm", needs=["storages"], compiles=True)
def unfused_norm(step: Step) -> Iterator[Waste]:
    """From each square root of a mean over rows: back to the rows, and on to the division by it."""
    norms = [norm for index in range(len(step.ops)) if (norm := _find_norm(step, index)) is not None]
    by_members = {norm.members: norm for norm in norms}
    for region in with_backward(step, list(by_members)):
        norm = by_members[region.forward]
        times = min(1.0, measured_over_expected(step, ops_that_launch(step, region.members)))
        saving = fusion_saving(step, region, times=times, kinds=KINDS)
        name = "LayerNorm" if norm.centered else "RMSNorm"
        passes = "forward and backward" if region.backward else "forward"
        yield Waste(
            title=f"{name} is written as {len(ops_that_launch(step, norm.members))} ops, a kernel each.",
            op=norm.root,
            gains=saving.gains,
            gone=saving.gone,
            evidence=f"{describe_ops(step, saving.members)} on rows of {norm.size} move "
            f"{quantity(saving.moved_bytes, 'B')} in {seconds(saving.measured_s)}, {passes}; as one op "
            f"{quantity(saving.needed_bytes, 'B')} would do.",
            reasoning=f"One kernel for each of {passes}, at the speed of torch's LayerNorm: "
            f"{seconds(saving.remaining_s)}.",
            remedy=_remedy(step, norm),
            fix=step.nearpeak_kernel("layer_norm", "(x, weight, bias)")
            if norm.centered
            else step.nearpeak_kernel("rms_norm", "(x, weight)"),
        )


def _find_norm(step: Step, root: int) -> _Norm | None:
    op = step.ops[root]
    if op.phase != "forward" or op.packet not in _ROOTS or not op.outputs:
        return None
    if op.packet == "aten.pow" and op.arguments.get("exponent") not in (0.5, -0.5):
        return None
    rows = op.outputs[0].elements
    reduced = _reduction(step, root, rows)
    if reduced is None:
        return None
    first, above = reduced
    rows_tensor = step.ops[first].inputs[0]
    size = rows_tensor.elements // rows
    below = _applied(step, root, rows, rows_tensor.elements)
    if below is None or size < 2 or not reduces_last_dim(step.ops[first]):
        return None
    members = {root, *above, *below}
    members |= _leading(step, members, rows_tensor.elements)
    members |= _trailing(step, below[-1], rows_tensor.elements, size)
    source = _source(step, members, rows_tensor.elements)
    squares = [index for index in members if step.ops[index].packet in ("aten.pow", "aten.square", "aten.mul")]
    if source is None or not (squares or "var" in step.ops[first].packet or "norm" in step.ops[first].packet):
        return None
    centered = "var" in step.ops[first].packet or any(step.ops[index].packet == "aten.sub" for index in members)
    return _Norm(members=frozenset(members), root=root, given=source, size=size, centered=centered)


def _reduction(step: Step, root: int, rows: int) -> tuple[int, list[int]] | None:
    """The reduction over rows before a square root, with the ops between."""
    index, path = root, list[int]()
    for _ in range(MAX_HOPS):
        before = list(dict.fromkeys(step.flow.producers[index].values()))
        if len(before) != 1 or step.ops[before[0]].phase != "forward":
            return None
        index = before[0]
        path.append(index)
        if step.costs[index].family == "reduction" and step.ops[index].outputs[0].elements == rows:
            return index, path
        if step.costs[index].family != "pointwise" or step.ops[index].outputs[0].elements != rows:
            return None
    return None


def _applied(step: Step, root: int, rows: int, elements: int) -> list[int] | None:
    """The ops from a square root to the one that multiplies or divides whole rows by it."""
    index, path = root, list[int]()
    for _ in range(MAX_HOPS):
        after = step.forward_readers(index)
        if len(after) != 1 or step.costs[after[0]].family != "pointwise":
            return None
        index = after[0]
        path.append(index)
        elements_now = step.ops[index].outputs[0].elements
        if elements_now == elements:
            return path if step.ops[index].packet in ("aten.mul", "aten.div", "aten.mul_", "aten.div_") else None
        if elements_now != rows:
            return None
    return None


def _leading(step: Step, members: set[int], elements: int) -> set[int]:
    """Squares, means, differences and casts before the norm that only it reads."""
    leading: set[int] = set()
    for _ in range(MAX_HOPS):
        inside = members | leading
        new = {
            producer
            for index in inside
            for producer in step.flow.producers[index].values()
            if producer not in inside
            and step.ops[producer].phase == "forward"
            and step.ops[producer].packet in _BEFORE
            and all(reader in inside or step.ops[reader].phase != "forward" for reader in step.flow.consumers[producer])
            and step.ops[producer].inputs[0].elements == elements
        }
        if not new:
            break
        leading |= new
    return leading


def _trailing(step: Step, last: int, elements: int, size: int) -> set[int]:
    """Weight, bias and casts after the norm."""
    trailing: set[int] = set()
    for _ in range(MAX_HOPS):
        after = step.forward_readers(last)
        if len(after) != 1 or step.costs[after[0]].family not in CHAINED:
            return trailing
        last = after[0]
        others = [
            tensor
            for tensor in step.ops[last].inputs
            if tensor.elements != elements and tensor.elements not in (1, size)
        ]
        weighted = any(tensor.elements == size for tensor in step.ops[last].inputs)
        cast = step.ops[last].packet == "aten._to_copy"
        if others or not (cast or (weighted and step.ops[last].packet in ("aten.mul", "aten.add", "aten.mul_"))):
            return trailing
        trailing.add(last)
    return trailing


def _source(step: Step, members: set[int], elements: int) -> Tensor | None:
    """The only input of whole rows."""
    outside: dict[int, Tensor] = {}
    for index in sorted(members):
        for tensor in step.ops[index].inputs:
            producer = step.flow.producers[index].get(tensor.storage)
            if tensor.elements == elements and producer not in members:
                outside[tensor.storage] = tensor
    return next(iter(outside.values())) if len(outside) == 1 else None


def _remedy(step: Step, norm: _Norm) -> str:
    if norm.size < SHORT_ROW and step.machine.kind == "gpu":
        return (
            f"Compile the function that has this line, `@torch.compile`: rows of {norm.size} are too short for torch's "
            "own kernels."
        )
    if norm.centered:
        return f"torch.nn.functional.layer_norm(x, ({norm.size},), weight, bias, eps)"
    if step.machine.kind == "cpu":
        return "Compile the function that has this line, `@torch.compile`: torch has no kernel of RMSNorm for CPUs."
    cast = f"  # x as {norm.given.dtype}: the kernel sums in float32" if norm.given.dtype != "float32" else ""
    return f"torch.nn.functional.rms_norm(x, ({norm.size},), weight, eps){cast}"
