"""Attention is written as GEMM, softmax and GEMM: the score matrix goes through memory many times."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from nearpeak.bound.dataflow import CHAINED
from nearpeak.findings.engine import Waste, rule
from nearpeak.findings.regions import (
    FUSIBLE,
    launches_removed,
    measured_over_expected,
    ops_that_launch,
    proportional_gains,
)
from nearpeak.findings.step import Step, shape_text
from nearpeak.findings.what_if import AttentionShape, fused_attention_seconds
from nearpeak.ops.op import Op
from nearpeak.ops.tensor import Tensor
from nearpeak.units import quantity, seconds

MAX_HOPS = 24


@rule("attention-written-out", needs=["storages"])
def attention_written_out(step: Step) -> Iterator[Waste]:
    """From each softmax back to a GEMM and on to one, with the backward ops that read what lies between."""
    for seed, op in enumerate(step.ops):
        if op.phase != "forward" or op.packet not in ("aten._softmax", "aten.exp", "aten.exp_"):
            continue
        attention = _find_attention(step, seed)
        if attention is None:
            continue
        predicted = fused_attention_seconds(step, attention.shape, backward=bool(attention.backward))
        if predicted is None:
            continue
        members = attention.forward | attention.backward
        predicted *= min(1.0, measured_over_expected(step, members))
        took = step.seconds(members)
        pairs = op.outputs[0]
        moved = step.bytes(ops_that_launch(step, members))
        passes = "forward and backward" if attention.backward else "forward"
        yield Waste(
            title="Attention is written as product, softmax and product.",
            op=seed,
            gains=proportional_gains(step, members, predicted),
            gone=launches_removed(step, members, predicted),
            evidence=f"{len(ops_that_launch(step, members))} ops in {passes} move {quantity(moved, 'B')} in "
            f"{seconds(took)}, for a matrix of {shape_text(pairs.shape)} that nothing else reads.",
            reasoning=f"One kernel that never writes this matrix takes {seconds(predicted)} for {passes} here.",
            remedy=_remedy(attention.shape),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _WrittenOutAttention:
    forward: set[int]
    backward: set[int]
    shape: AttentionShape


def _find_attention(step: Step, seed: int) -> _WrittenOutAttention | None:
    pairs = step.ops[seed].outputs[0] if step.ops[seed].outputs else None
    if (
        pairs is None
        or len(pairs.shape) < 2
        or step.ops[seed].arguments.get("dim", -1) not in (-1, len(pairs.shape) - 1)
    ):
        return None
    above = _walk(step, seed, pairs, forward=False)
    below = _walk(step, seed, pairs, forward=True)
    if above is None or below is None:
        return None
    first, last = above[-1], below[-1]
    forward = {seed, *above, *below} | _side_members(step, {seed, *above, *below} - {last}, pairs)
    normalized = step.ops[seed].packet == "aten._softmax" or _sums(step, forward)
    backward = _backward_members(step, forward - {last}, last)
    if not normalized or backward is None:
        return None
    shape = _shape(step, first, last, forward, pairs)
    if shape is None:
        return None
    forward |= _copies(step, (first, last), forward | backward)
    return _WrittenOutAttention(forward=forward, backward=backward, shape=shape)


def _walk(step: Step, index_now: int, pairs: Tensor, *, forward: bool) -> list[int] | None:
    """The path of ops from the softmax to a GEMM, through ops that can be fused."""
    path: list[int] = []
    for _ in range(MAX_HOPS):
        if forward:
            candidates = [index for index in step.flow.consumers[index_now] if step.ops[index].phase == "forward"]
            candidates = [index for index in candidates if step.costs[index].family not in ("reduction", "view")]
        else:
            whole = {tensor.storage for tensor in step.ops[index_now].inputs if tensor.elements == pairs.elements}
            candidates = [index for storage, index in step.flow.producers[index_now].items() if storage in whole]
            candidates = [index for index in candidates if step.costs[index].family not in ("random", "creation")]
        candidates = list(dict.fromkeys(candidates))
        if len(candidates) != 1 or step.ops[candidates[0]].phase != "forward":
            return None
        index_now = candidates[0]
        path.append(index_now)
        if step.costs[index_now].family == "matrix":
            return path
        if step.costs[index_now].family not in CHAINED:
            return None
    return None


def _side_members(step: Step, path: set[int], pairs: Tensor) -> set[int]:
    """Ops that only the path reads or feeds: dropout masks, the maximum and the sum of each row."""
    side: set[int] = set()
    for index in sorted(path):
        for producer in step.flow.producers[index].values():
            whole = any(tensor.elements == pairs.elements for tensor in step.ops[producer].outputs)
            if producer not in path and whole and step.costs[producer].family in CHAINED:
                side |= {producer, *_writers_before(step, producer)}
        for reader in step.flow.consumers[index]:
            if step.ops[reader].phase == "forward" and step.costs[reader].family == "reduction":
                side.add(reader)
    return side - path


def _writers_before(step: Step, index: int) -> set[int]:
    """The ops that wrote to the storages that an in-place op continues."""
    writers: set[int] = set()
    waiting = [index]
    while waiting:
        index_now = waiting.pop()
        for storage, producer in step.flow.producers[index_now].items():
            if storage in step.flow.written_by[index_now] and producer not in writers:
                writers.add(producer)
                waiting.append(producer)
    return writers


def _sums(step: Step, forward: set[int]) -> bool:
    """Whether exponentials are divided by their sum over the last dimension."""
    for index in forward:
        op = step.ops[index]
        if op.packet != "aten.sum" or step.costs[index].family != "reduction":
            continue
        size = op.inputs[0].shape[-1]
        if op.outputs[0].elements * size == op.inputs[0].elements:
            return any(step.ops[reader].packet in ("aten.div", "aten.div_") for reader in step.flow.consumers[index])
    return False


def _backward_members(step: Step, inner: set[int], last: int) -> set[int] | None:
    """The backward ops that read what lies between the GEMMs; None if anything else needs it."""
    between = {storage for index in inner for storage in step.flow.written_by[index]}
    if between & step.flow.results:
        return None
    members: set[int] = set()
    waiting = sorted({reader for index in inner for reader in step.flow.consumers[index]} - inner - {last})
    while waiting:
        index = waiting.pop()
        if index in members:
            continue
        family = step.costs[index].family
        if step.ops[index].phase != "backward" or family not in FUSIBLE | {"matrix", "normalization"}:
            return None
        members.add(index)
        if family == "matrix":
            continue
        if set(step.flow.written_by[index]) & step.flow.results:
            return None
        waiting += [reader for reader in step.flow.consumers[index] if reader not in members]
        for storage, producer in step.flow.producers[index].items():  # the gradient of the probabilities
            product = step.ops[producer].phase == "backward" and step.costs[producer].family == "matrix"
            if product and step.flow.written_by[producer] == (storage,):
                members.add(producer)
    return members


def _copies(step: Step, products: tuple[int, int], members: set[int]) -> set[int]:
    """Copies that only make operands contiguous: fused attention reads any strides."""
    copies = set()
    for product in products:
        for producer in step.flow.producers[product].values():
            op = step.ops[producer]
            if op.packet in ("aten.clone", "aten.contiguous") and set(step.flow.consumers[producer]) <= members:
                copies.add(producer)
    return copies - members


def _shape(step: Step, first: int, last: int, forward: set[int], pairs: Tensor) -> AttentionShape | None:
    queries, keys = pairs.shape[-2:]
    left = _operands(step.ops[first])
    right = _operands(step.ops[last])
    heads = math.prod(pairs.shape[:-2])
    if not (left and right and heads):
        return None
    width = left[0].shape[-1]
    depth = step.ops[last].outputs[0].elements / (heads * queries)
    probabilities = [tensor for tensor in right if tensor.elements == pairs.elements]
    if step.ops[first].outputs[0].elements != pairs.elements or not probabilities or depth != int(depth):
        return None
    mask, causal = _mask(step, forward - {last}, first, pairs)
    dropout = any(step.costs[index].family == "random" for index in forward)
    return AttentionShape(
        lead=pairs.shape[:-2],
        queries=queries,
        keys=keys,
        width=width,
        depth=int(depth),
        dtype=left[0].dtype,
        mask=mask,
        causal=causal,
        dropout=dropout,
        tf32=step.ops[first].tf32_products,
    )


def _operands(op: Op) -> list[Tensor]:
    names = (
        ("batch1", "batch2")
        if "batch1" in op.arguments
        else ("mat1", "mat2")
        if "mat1" in op.arguments
        else ("self", "mat2")
    )
    operands = [op.arguments.get(name) for name in names]
    return [tensor for tensor in operands if isinstance(tensor, Tensor)] if all(operands) else []


def _mask(step: Step, inner: set[int], first: int, pairs: Tensor) -> tuple[Tensor | None, bool]:
    """The mask that is added to the scores or selects them, and whether it is known to be causal."""
    written = {storage for index in inner for storage in step.flow.written_by[index]}
    for index in sorted(inner - {first}):
        for tensor in step.ops[index].inputs:
            if tensor.storage not in written and tensor.shape and tensor.shape[-1] == pairs.shape[-1]:
                producer = step.flow.producers[index].get(tensor.storage)
                return tensor, producer is not None and _causal(step, producer)
    return None, False


def _causal(step: Step, index: int) -> bool:
    """Whether a mask was computed in the step by `tril`, or by `triu` above the diagonal."""
    for _ in range(6):
        op = step.ops[index]
        if op.packet in ("aten.tril", "aten.tril_", "aten.triu", "aten.triu_"):
            return bool(op.arguments.get("diagonal", 0) == (0 if "tril" in op.packet else 1))
        before = list(dict.fromkeys(step.flow.producers[index].values()))
        if len(before) != 1:
            return False
        index = before[0]
    return False


def _remedy(shape: AttentionShape) -> str:
    arguments = ["query", "key", "value"]
    if shape.causal:
        arguments.append("is_causal=True")
    elif shape.mask is not None:
        arguments.append("attn_mask=mask")
    if shape.dropout:
        arguments.append("dropout_p=p")
    call = f"torch.nn.functional.scaled_dot_product_attention({', '.join(arguments)})"
    note = "  # scale=... if it is not 1 / sqrt(head)"
    if shape.mask is not None and not shape.causal:
        note += "; is_causal=True in place of the mask if it is causal, which is faster still"
    return call + note
