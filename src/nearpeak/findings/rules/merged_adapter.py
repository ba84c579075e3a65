"""An adapter of low rank is merged into its weight in every training step: thin products would do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nearpeak.findings.engine import Waste, rule
from nearpeak.findings.step import Step
from nearpeak.findings.what_if import gemm_op, share_left
from nearpeak.ops.cost import Access
from nearpeak.ops.tensor import Tensor
from nearpeak.units import seconds

_PRODUCTS = {"aten.mm": ("self", "mat2"), "aten.addmm": ("mat1", "mat2"), "aten.bmm": ("self", "mat2")}
"""Products of rows with a weight, and the names of these arguments; `einsum` makes a batch of one."""
_COPIES = ("aten._to_copy", "aten.clone")
_SCALES = (*_COPIES, "aten.mul", "aten.div", "aten.mul_", "aten.div_")
_SUMS = ("aten.add", "aten.add_", "aten.sub")
MOST_RANK = 0.25
"""Of the smaller size of the weight. Products of a higher rank are not much less than that with the weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Merged:
    """An adapter that is written out and added to a weight, and what multiplies with the sum."""

    product: int
    """Of the factors."""
    written: Sequence[int]
    """Ops as large as the weight, up to the sum; a cast of the sum is not among them."""
    casts: Sequence[int]
    readers: Sequence[int]


@rule("merged-adapter", needs=["storages"])
def merged_adapter(step: Step) -> Iterator[Waste]:
    """Products of two thin matrices that are added to a weight which is not trained, and are trained themselves."""
    for index, op in enumerate(step.ops):
        if (
            op.packet not in ("aten.mm", "aten.addmm")
            or op.phase != "forward"
            or op.recomputed
            or not step.derivatives.get(index)
        ):
            continue
        merged = _merged(step, index)
        backward = None if merged is None else _backward(step, merged)
        if merged is None or backward is None:
            continue
        rank, (outputs, inputs) = op.tensor("mat2").shape[0], op.outputs[0].shape
        thin_s = sum(_thin_seconds(step, reader, op.outputs[0], rank) for reader in merged.readers)
        gone = [*merged.written, *backward]
        remains = share_left([*(step.time(member) for member in gone), -thin_s])
        if not remains:
            continue
        weights = [member for member in backward if step.trace.derivative_of[member] in merged.readers]
        yield Waste(
            title=f"An adapter of rank {rank} is multiplied out and added to its weight in every step.",
            op=merged.written[-1],
            gains={member: step.time(member) * remains for member in gone},
            evidence=f"The sum, {outputs} x {inputs}, is written in {seconds(step.seconds(merged.written))}. In "
            f"backward, the gradient of the whole weight takes {seconds(step.seconds(weights))}, and nothing but the "
            "factors reads it.",
            reasoning="Rows times one factor, times the other, added to rows times the weight, take "
            f"{seconds(thin_s)} with their gradients; the gradient of the weight goes.",
            remedy="y = F.linear(x, weight) + scale * F.linear(F.linear(x, a), b)  # in training; merged once for "
            "inference: weight + scale * (b @ a)",
        )


def _merged(step: Step, product: int) -> _Merged | None:
    op, made = step.ops[product], step.ops[product].outputs[0]
    if op.tensor("mat2").shape[0] > MOST_RANK * min(made.shape):
        return None
    written, casts, index = [product], list[int](), product
    is_summed = op.packet == "aten.addmm" and op.tensor("self").elements == made.elements
    while True:
        readers = step.forward_readers(index)
        if not readers or not step.flow.results.isdisjoint(step.flow.written_by[index]):
            return None
        if is_summed and all(_is_weight_of(step, reader, index) for reader in readers):
            return _Merged(product=product, written=written, casts=casts, readers=readers)
        if len(readers) != 1:
            return None
        index = readers[0]
        op = step.ops[index]
        if not op.written or op.written[0].shape != made.shape:
            return None
        if is_summed:
            if op.packet not in _COPIES:
                return None
            casts.append(index)
            continue
        whole = [tensor for tensor in op.inputs if tensor.elements == made.elements]
        is_summed = op.packet in _SUMS and len(whole) == 2
        if not is_summed and not (op.packet in _SCALES and len(whole) == 1):
            return None
        written.append(index)


def _is_weight_of(step: Step, reader: int, index: int) -> bool:
    """Whether an op multiplies rows with what another one wrote."""
    op = step.ops[reader]
    if op.packet not in _PRODUCTS:
        return False
    rows, weight = (op.tensor(name) for name in _PRODUCTS[op.packet])
    storages = step.flow.written_by[index]
    return weight.storage in storages and rows.storage not in storages and (len(rows.shape) == 2 or rows.shape[0] == 1)


def _backward(step: Step, merged: _Merged) -> list[int] | None:
    """The ops that go of the backward pass; None if something else reads the gradient of the weight: it is trained."""
    size = step.ops[merged.product].outputs[0].elements
    whole = [index for reader in merged.readers for index in _gradients(step, reader)[0]]
    whole += [
        index
        for behind in (*merged.casts, *merged.written[1:])
        for index in step.derivatives.get(behind, ())
        if step.ops[index].written and step.ops[index].written[0].elements == size and step.time(index)
    ]
    gone = [*whole, *step.derivatives[merged.product]]
    for index in whole:
        if not step.flow.results.isdisjoint(step.flow.written_by[index]):
            return None
        if not set(gone).issuperset(step.flow.consumers[index]):
            return None
    return gone


def _gradients(step: Step, reader: int) -> tuple[list[int], list[int]]:
    """The products of the backward pass of a product that read the rows, for the gradient of the weight; and others."""
    rows = step.ops[reader].tensor(_PRODUCTS[step.ops[reader].packet][0])
    products = [index for index in step.derivatives.get(reader, ()) if step.ops[index].packet in _PRODUCTS]
    of_weight = [index for index in products if rows.storage in step.flow.read_by[index]]
    return of_weight, [index for index in products if index not in of_weight]


def _thin_seconds(step: Step, reader: int, weight: Tensor, rank: int) -> float:
    """What the products with the factors take in place of one with the sum, forward and backward."""
    op = step.ops[reader]
    rows, (outputs, inputs) = op.tensor(_PRODUCTS[op.packet][0]), weight.shape
    if rows.shape[-1] != inputs:
        outputs, inputs = inputs, outputs
    count, dtype = rows.shape[-2], op.outputs[0].dtype
    sizes = [(count, rank, inputs), (count, outputs, rank)]
    sizes += [(count, rank, outputs), (outputs, rank, count), (rank, inputs, count)]
    added = [op.outputs[0]]
    for index in _gradients(step, reader)[1]:
        sizes.append((count, inputs, rank))
        added.append(step.ops[index].outputs[0])
    products_s = sum(step.expected(gemm_op(1, m, n, k, dtype=dtype, tf32=op.tf32_products)) or 0.0 for m, n, k in sizes)
    return products_s + sum(_addition_seconds(step, tensor) for tensor in added)


def _addition_seconds(step: Step, tensor: Tensor) -> float:
    read = [Access(storage=-number, bytes=tensor.bytes) for number in (1, 2)]
    return step.expected_for_work(read, [Access(storage=-3, bytes=tensor.bytes)])
