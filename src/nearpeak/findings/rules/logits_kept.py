"""A product gives many rows of which few are read: logits of all positions, where those of the last are wanted."""

from __future__ import annotations

from collections.abc import Iterator

from nearpeak.bound.tiles import FACTORS, product_sizes
from nearpeak.findings.engine import Waste, rule
from nearpeak.findings.step import Step
from nearpeak.findings.what_if import gemm_op
from nearpeak.ops.op import Op
from nearpeak.units import quantity, seconds

_UNREAD = 0.25
"""The least share of the rows that nobody reads; a shift by one token leaves one row of a sequence."""
_LEAST_COLUMNS = 1024
_SAME_SIZE = ("pointwise", "movement")
_MOVING = ("creation", "indexing", "movement")


@rule("logits-kept", needs=["storages"])
def logits_kept(step: Step) -> Iterator[Waste]:
    """Wide products, and casts and the like of their results, of which later ops read a part of the rows alone."""
    for index, op in enumerate(step.ops):
        sizes = product_sizes(op) if op.packet in FACTORS and op.phase == "forward" else None
        if sizes is None or sizes[0] > 1 or sizes[2] < _LEAST_COLUMNS or sizes[1] < 2:
            continue
        chain = _chain(step, index)
        read = _read(step, chain[-1])
        if read is None or read > 1 - _UNREAD:
            continue
        rows, columns, depth = sizes[1:]
        fewer = max(1, round(rows * read))
        gains = {at: step.measured[at].measured_s * (1 - read) for at in chain[1:]}
        backward = _backward(step, op)
        for at in (index, *backward):
            gains[at] = _gain(step, at, rows, fewer)
        for at in _selecting(step, chain[-1], backward, op.outputs[0].elements):  # done before the product instead
            gains[at] = step.measured[at].measured_s * max(0.0, 1 - depth / columns)
        if gains[index] <= 0:
            continue
        out = op.outputs[0]
        yield Waste(
            title=f"A product gives {rows} rows of {columns}, of which {fewer} are read.",
            at=index,
            gains=gains,
            evidence=f"{op.packet} of {rows} x {depth} by {depth} x {columns} writes {quantity(out.bytes, 'B')}; "
            f"what reads it takes {quantity(out.bytes * read, 'B')} of that. {len(gains)} ops of this size take "
            f"{seconds(step.seconds(gains))}.",
            reasoning=f"The same products with {fewer} rows, as a good kernel takes them; other passes in proportion.",
            remedy=f"Take the {fewer} rows that are wanted before the product:\n"
            f"logits = head(hidden[:, -1:])  # for the last token; hidden[wanted] for a mask; not head(hidden)[:, -1:]",
        )


def _chain(step: Step, index: int) -> list[int]:
    """The product and ops behind it, one after the other, that make a tensor of the same size of all of it."""
    chain = [index]
    elements = step.ops[index].outputs[0].elements
    while True:
        at = chain[-1]
        readers = step.forward_readers(at)
        if len(readers) != 1:
            return chain
        op = step.ops[readers[0]]
        whole = op.outputs and op.outputs[0].elements == elements and step.costs[readers[0]].family in _SAME_SIZE
        if not whole or readers[0] in chain:
            return chain
        chain.append(readers[0])


def _read(step: Step, index: int) -> float | None:
    """The share of an op's result that later ops of the forward read; None where that is not known."""
    out = step.ops[index].outputs[0]
    readers = step.forward_readers(index)
    if out.storage in step.flow.results or not readers or not out.elements:
        return None
    parts: set[tuple[int, tuple[int, ...], tuple[int, ...], int]] = set()
    for reader in readers:
        op = step.ops[reader]
        for tensor in op.inputs:
            if tensor.storage == out.storage:
                if not tensor.shape or tensor.shape[-1] != out.shape[-1]:
                    return None  # a part of the columns
                taken = tensor.elements
                if (
                    step.costs[reader].family == "indexing"
                    and op.outputs
                    and op.outputs[0].shape[-1:] == out.shape[-1:]
                ):
                    taken = min(taken, op.outputs[0].elements)
                parts.add((tensor.offset, tensor.shape, tensor.strides, taken))
    return min(1.0, sum(taken for *_, taken in parts) / out.elements)


def _backward(step: Step, product: Op) -> list[int]:
    """Products of the backward that take a gradient of the whole size: its rows that nobody read are zeros."""
    elements = product.outputs[0].elements
    given = {tensor.storage for tensor in product.tensors(*FACTORS[product.packet])}
    found = []
    for at, op in enumerate(step.ops):
        if op.phase == "backward" and op.packet in FACTORS:
            factors = op.tensors(*FACTORS[op.packet])
            if any(tensor.elements == elements for tensor in factors) and given & {one.storage for one in factors}:
                found.append(at)
    return found


def _selecting(step: Step, last: int, backward: list[int], elements: int) -> set[int]:
    """Ops that copy the wanted rows out of the result, and those that put their gradient among zeros."""
    found = {
        reader
        for reader in step.flow.consumers[last]
        if step.ops[reader].phase == "forward" and step.costs[reader].family in ("indexing", "movement")
    }
    waiting = list(backward)
    while waiting:
        for producer in step.flow.producers[waiting.pop()].values():
            op = step.ops[producer]
            large = any(tensor.elements == elements for tensor in op.written)
            if op.phase == "backward" and large and producer not in found and step.costs[producer].family in _MOVING:
                found.add(producer)
                waiting.append(producer)
    return found


def _gain(step: Step, index: int, rows: int, fewer: int) -> float:
    """Of a product in which as many rows as these are rows of the result, of a factor or of the contraction."""
    op, took = step.ops[index], step.measured[index].measured_s
    sizes = product_sizes(op)
    if sizes is None:
        return 0.0
    batch, m, n, k = sizes
    cut = (fewer, n, k) if m == rows else (m, n, fewer)
    dtype = op.inputs[-1].dtype
    now = step.expected(gemm_op(batch, m, n, k, dtype=dtype, tf32=op.tf32_products))
    then = step.expected(gemm_op(batch, *cut, dtype=dtype, tf32=op.tf32_products))
    return took * (1 - then / now) if now and then is not None else 0.0
