"""A GEMM computes many rows of which few are needed: logits of all positions, although only the last are read, or only
those with a label count."""

from __future__ import annotations

from collections.abc import Iterator

from nearpeak.bound.tiles import FACTORS, product_sizes
from nearpeak.findings.engine import Waste, rule
from nearpeak.findings.step import Step
from nearpeak.findings.what_if import gemm_op
from nearpeak.ops.op import Op
from nearpeak.units import quantity, seconds

_UNREAD = 0.25
"""The least share of unread rows; a shift by one token leaves one row of a sequence unread."""
_LEAST_COLUMNS = 1024
_SAME_SIZE = ("pointwise", "movement")
_MOVING = ("creation", "indexing", "movement")
_SOFTMAX = ("aten._log_softmax",)
_LOSSES = ("aten.nll_loss_forward", "aten.nll_loss2d_forward")


@rule("logits-kept", needs=["storages"])
def logits_kept(step: Step) -> Iterator[Waste]:
    """Wide GEMMs, with casts and the like of their results, of which only some rows are read, or count in a loss."""
    for index, op in enumerate(step.ops):
        sizes = product_sizes(op) if op.packet in FACTORS and op.phase == "forward" else None
        if sizes is None or (sizes[0] > 1 and not _has_one_weight(op)) or sizes[2] < _LEAST_COLUMNS:
            continue
        rows, columns, depth = sizes[0] * sizes[1], *sizes[2:]
        if rows < 2:
            continue
        chain = _chain(step, index)
        read = _read(step, chain[-1])
        counted, losses = _counted(step, chain[-1]) if read == 1 else (1.0, [])
        read = read and min(read, counted)
        if read is None or read > 1 - _UNREAD:
            continue
        fewer = max(1, round(rows * read))
        backward = _backward(step, op)
        passes = [*chain[1:], *losses, *(_before_gemms(step, backward, op.outputs[0].elements) if losses else ())]
        gains = {member: step.time(member) * (1 - read) for member in passes}
        for member in (index, *backward):
            gains[member] = _gain(step, member, rows, fewer)
        selecting = () if losses else _selecting(step, chain[-1], backward, op.outputs[0].elements)
        for member in selecting:  # they run before the GEMM instead
            gains[member] = step.time(member) * max(0.0, 1 - depth / columns)
        if gains[index] <= 0:
            continue
        out = op.outputs[0]
        if losses:
            takes = f"the loss counts {fewer} of the {rows} rows"
        else:
            takes = f"what reads it takes {quantity(out.bytes * read, 'B')} of that"
        yield Waste(
            title=f"A product gives {rows} rows of {columns}, of which {fewer} are {'counted' if losses else 'read'}.",
            op=index,
            gains=gains,
            evidence=f"{op.packet} of {rows} x {depth} by {depth} x {columns} writes {quantity(out.bytes, 'B')}; "
            f"{takes}. {len(gains)} ops of this size take "
            f"{seconds(step.seconds(gains))}.",
            reasoning=f"The same products with {fewer} rows, as a good kernel takes them; other passes in proportion."
            + (" Seen in one batch: others may differ." if losses else ""),
            remedy=f"Take the {fewer} rows that are wanted before the product:\n"
            + (
                "logits = head(hidden[:, prompt:])  # where the rows with a label are a part of each sequence\n"
                "logits = head(hidden[labels != -100])  # anywhere; their number is read, which waits for the device"
                if losses
                else "logits = head(hidden[:, -1:])  # for the last token; hidden[wanted] for a mask; "
                "not head(hidden)[:, -1:]"
            ),
        )


def _has_one_weight(op: Op) -> bool:
    """Whether a batch of products has the same second factor: a layer on rows that are not side by side."""
    weight = op.tensors(*FACTORS[op.packet])[1]
    return len(weight.shape) == 3 and not weight.strides[0]


def _chain(step: Step, index: int) -> list[int]:
    """The GEMM and the chain of ops after it that have results of the same size."""
    chain = [index]
    elements = step.ops[index].outputs[0].elements
    while True:
        last = chain[-1]
        readers = step.forward_readers(last)
        if len(readers) != 1:
            return chain
        op = step.ops[readers[0]]
        whole = op.outputs and op.outputs[0].elements == elements and step.costs[readers[0]].family in _SAME_SIZE
        if not whole or readers[0] in chain:
            return chain
        chain.append(readers[0])


def _read(step: Step, index: int) -> float | None:
    """The share of an op's result that later forward ops read; None if that is not known."""
    out = step.ops[index].outputs[0]
    readers = step.forward_readers(index)
    if out.storage in step.flow.results or not readers or not out.elements:
        return None
    parts: set[tuple[int, tuple[int, ...], tuple[int, ...], int]] = set()
    for reader in readers:
        op = step.ops[reader]
        for tensor in op.inputs:
            if tensor.storage == out.storage:
                if not tensor.shape or (tensor.shape[-1], tensor.strides[-1]) != (out.shape[-1], out.strides[-1]):
                    return None  # a part of the columns, or a diagonal
                elements_read = tensor.elements
                if (
                    step.costs[reader].family == "indexing"
                    and op.outputs
                    and op.outputs[0].shape[-1:] == out.shape[-1:]
                ):
                    elements_read = min(elements_read, op.outputs[0].elements)
                parts.add((tensor.offset, tensor.shape, tensor.strides, elements_read))
    return min(1.0, sum(elements_read for *_, elements_read in parts) / out.elements)


def _counted(step: Step, index: int) -> tuple[float, list[int]]:
    """The share of the rows of an op's result that the loss over them counts, and the ops of that loss."""
    members: list[int] = []
    for wanted in (_SOFTMAX, _LOSSES):
        readers = step.forward_readers(members[-1] if members else index)
        while members and len(readers) == 1 and step.ops[readers[0]].packet == "aten._to_copy":
            members.append(readers[0])  # autocast: the loss may be in float32, and the softmax not
            readers = step.forward_readers(members[-1])
        if len(readers) != 1 or step.ops[readers[0]].packet not in wanted:
            return 1.0, []
        members.append(readers[0])
    loss = step.ops[members[-1]]
    storages = (loss.tensor("target").storage, loss.outputs[0].storage)
    return min(step.trace.counted.get(storage, 1.0) for storage in storages), members


def _before_gemms(step: Step, gemms: list[int], elements: int) -> list[int]:
    """Backward ops that write the gradient of the whole result, which GEMMs read, and those before them."""
    found: list[int] = []
    waiting = list(gemms)
    while waiting:
        for producer in step.flow.producers[waiting.pop()].values():
            op = step.ops[producer]
            large = any(tensor.elements == elements for tensor in op.written)
            if op.phase == "backward" and large and producer not in (*found, *gemms):
                found.append(producer)
                waiting.append(producer)
    return found


def _backward(step: Step, product: Op) -> list[int]:
    """Backward GEMMs with a gradient of the whole size: the rows of unread results are zeros."""
    elements = product.outputs[0].elements
    factor_storages = {tensor.storage for tensor in product.tensors(*FACTORS[product.packet])}
    gemms = []
    for index, op in enumerate(step.ops):
        if op.phase == "backward" and op.packet in FACTORS:
            factors = op.tensors(*FACTORS[op.packet])
            if any(tensor.elements == elements for tensor in factors) and factor_storages & {
                factor.storage for factor in factors
            }:
                gemms.append(index)
    return gemms


def _selecting(step: Step, last: int, backward: list[int], elements: int) -> set[int]:
    """Ops that copy the needed rows out of the result, and those that scatter their gradient into zeros."""
    selecting = {
        reader
        for reader in step.flow.consumers[last]
        if step.ops[reader].phase == "forward" and step.costs[reader].family in ("indexing", "movement")
    }
    waiting = list(backward)
    while waiting:
        for producer in step.flow.producers[waiting.pop()].values():
            op = step.ops[producer]
            large = any(tensor.elements == elements for tensor in op.written)
            if (
                op.phase == "backward"
                and large
                and producer not in selecting
                and step.costs[producer].family in _MOVING
            ):
                selecting.add(producer)
                waiting.append(producer)
    return selecting


def _gain(step: Step, index: int, rows: int, fewer: int) -> float:
    """The gain of a GEMM in which these rows are rows of the result or the contracted dimension."""
    op, took = step.ops[index], step.time(index)
    sizes = product_sizes(op)
    if sizes is None:
        return 0.0
    batch, m, n, k = sizes
    cut = (fewer, n, k) if batch * m == rows else (m, n, fewer)
    dtype = op.inputs[-1].dtype
    now = step.expected(gemm_op(batch, m, n, k, dtype=dtype, tf32=op.tf32_products))
    then = step.expected(gemm_op(1, *cut, dtype=dtype, tf32=op.tf32_products))
    return took * (1 - then / now) if now and then is not None else 0.0
