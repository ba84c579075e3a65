"""Attention is written as GEMM, softmax and GEMM: the score matrix goes through memory many times."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace

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


@rule("attention-written-out", compiles=True)
def attention_written_out(step: Step) -> Iterator[Waste]:
    """From each softmax back to a GEMM and on to one, with the backward ops that read what lies between.

    Where it is not known which tensors share memory, by the sizes of the tensors and the order of the ops.
    """
    certain = "storages" in step.knows
    for seed, attention in _by_data_flow(step) if certain else _by_sizes(step):
        predicted = fused_attention_seconds(step, attention.shape, backward=bool(attention.backward))
        if predicted is None:
            continue
        members = attention.forward | attention.backward
        predicted *= min(1.0, measured_over_expected(step, members))
        took = step.seconds(members)
        pairs = (*attention.shape.lead, attention.shape.queries, attention.shape.keys)
        moved = step.bytes(ops_that_launch(step, members))
        by_torch = _is_of_torch(step, seed)
        passes = "forward and backward" if attention.backward else "forward"
        yield Waste(
            title="Attention is written as product, softmax and product.",
            op=seed,
            gains=proportional_gains(step, members, predicted),
            gone=launches_removed(step, members, predicted),
            evidence=f"{len(ops_that_launch(step, members))} ops in {passes} move {quantity(moved, 'B')} in "
            f"{seconds(took)}, for a matrix of {shape_text(pairs)} "
            + ("that nothing else reads." if certain else "that goes through memory from each to the next."),
            reasoning=f"One kernel that never writes this matrix takes {seconds(predicted)} for {passes} here."
            + ("" if certain else " A trace file does not show whether anything else reads the matrix."),
            remedy=_WITHOUT_WEIGHTS if by_torch else _remedy(attention.shape, certain=certain),
            from_outside=by_torch,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenOutAttention:
    """The ops of an attention that is written out."""

    forward: set[int]
    backward: set[int]
    products: tuple[int, int]
    """Of queries and keys, and of probabilities and values."""
    shape: AttentionShape


def _by_data_flow(step: Step) -> Iterator[tuple[int, WrittenOutAttention]]:
    for seed, op in enumerate(step.ops):
        if op.phase == "forward" and op.packet in ("aten._softmax", "aten.exp", "aten.exp_"):
            attention = find_attention(step, seed)
            if attention is not None:
                yield seed, attention


NEARBY = 48
"""Ops, views not counted, between a softmax and a product of the same attention."""
_BATCHED_PRODUCTS = ("aten.bmm", "aten.baddbmm", "aten.baddbmm_", "aten.matmul")
"""Products whose two factors are both activations; a weight has no batch."""


def _by_sizes(step: Step) -> Iterator[tuple[int, WrittenOutAttention]]:
    """A softmax between two batched products: the first makes the matrix of scores, and the second multiplies it.

    What lies between and has a tensor of that size belongs to it. The backward passes run in the opposite order.
    """
    launching = [index for index, op in enumerate(step.measured) if op.kernels]
    found: list[tuple[int, Tensor, tuple[int, ...], list[int]]] = []
    backward: dict[int, list[set[int]]] = {}
    for place, index in enumerate(launching):
        name = step.ops[index].name.lower()
        if "softmax" not in name or "log_softmax" in name:
            continue
        before, after = launching[max(0, place - NEARBY) : place][::-1], launching[place + 1 : place + 1 + NEARBY]
        if "backward" in name:
            size = max((tensor.elements for tensor in step.ops[index].inputs), default=0)
            products = [*_products_of(step, before, size)[:2], *_products_of(step, after, size)[:2]]
            if len(products) == 4:
                passed = range(min(products), max(products) + 1)
                backward.setdefault(size, []).append({other for other in passed if _has_size(step, other, size)})
            continue
        scores = next((other for other in before if step.ops[other].packet in _BATCHED_PRODUCTS), None)
        pairs = _scores(step, scores, index)
        values = None if pairs is None else next(iter(_products_of(step, after, pairs.elements)), None)
        if scores is not None and pairs is not None and values is not None and _sums_over_keys(step, values, pairs):
            inside = [
                other for other in launching if scores < other < values and _has_size(step, other, pairs.elements)
            ]
            if all(step.costs[other].family in _BETWEEN for other in inside):
                found.append((index, pairs, (scores, values), [scores, *inside, index, values]))
    for seed, pairs, (scores, values), members in reversed(found):
        passes = backward.get(pairs.elements, [])
        shape = _shape(step, scores, values, {*members} - {seed}, pairs)
        if shape is not None:
            later = passes.pop(0) - {*members} if passes else set()
            shape = replace(shape, causal=False)  # whether a mask is, does not show
            yield seed, WrittenOutAttention(forward={*members}, backward=later, products=(scores, values), shape=shape)


_BETWEEN = CHAINED | {"normalization", "reduction", "unknown"}
"""Families of ops between the products; those of compiled kernels are not known."""


def _scores(step: Step, product: int | None, softmax: int) -> Tensor | None:
    """The matrix of scores that a product makes, if a softmax goes over its rows."""
    if product is None or not step.ops[product].outputs:
        return None
    out = step.ops[product].outputs[0]
    tensors = (*step.ops[softmax].inputs, *step.ops[softmax].outputs)
    dim = step.ops[softmax].arguments.get("dim", -1)
    sizes = [tensor for tensor in tensors if tensor.elements == out.elements]
    if tensors and not sizes:
        return None
    if isinstance(dim, int) and sizes and dim not in (-1, len(sizes[0].shape) - 1):
        return None
    return out if len(out.shape) > 2 else None


def _sums_over_keys(step: Step, product: int, pairs: Tensor) -> bool:
    """Whether a product sums the matrix over its columns, as attention does; a gradient sums over its rows."""
    operands = _operands(step.ops[product])
    if len(operands) != 2:
        return False
    left, right = operands
    keys = pairs.shape[-1]
    return (left.elements == pairs.elements and left.shape[-1] == keys) or (
        right.elements == pairs.elements and right.shape[-2] == keys
    )


def _products_of(step: Step, indices: Iterable[int], size: int) -> list[int]:
    """The batched products with a tensor of this size."""
    return [i for i in indices if step.ops[i].packet in _BATCHED_PRODUCTS and _has_size(step, i, size)]


def _has_size(step: Step, index: int, size: int) -> bool:
    op = step.ops[index]
    return any(tensor.elements == size for tensor in (*op.inputs, *op.outputs))


def find_attention(step: Step, seed: int) -> WrittenOutAttention | None:
    """The attention around a softmax, or around an exponential; None if there is none, or if others read its scores."""
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
    normalized = step.ops[seed].packet in ("aten._softmax", "aten._safe_softmax") or _sums(step, forward)
    backward = _backward_members(step, forward - {last}, last)
    if not normalized or backward is None:
        return None
    shape = _shape(step, first, last, forward, pairs)
    if shape is None:
        return None
    forward |= _copies(step, (first, last), forward | backward)
    return WrittenOutAttention(forward=forward, backward=backward, products=(first, last), shape=shape)


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
        members |= _gradient_of_probabilities(step, index, members)
    return members


def _gradient_of_probabilities(step: Step, index: int, members: Collection[int]) -> set[int]:
    """The product whose result an op of the backward pass reads, and what only leads from there to it: casts."""
    path: set[int] = set()
    waiting = [index]
    while waiting:
        for storage, producer in step.flow.producers[waiting.pop()].items():
            family = step.costs[producer].family
            if step.ops[producer].phase != "backward" or step.flow.written_by[producer] != (storage,):
                continue
            if family == "matrix":
                path.add(producer)
            elif family in FUSIBLE and {*step.flow.consumers[producer]} <= {*members, *path}:
                path.add(producer)
                waiting.append(producer)
    return path - {*members}


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


_WITHOUT_WEIGHTS = (
    "y, _ = attention(query, key, value, need_weights=False)  # torch.nn.MultiheadAttention; nobody reads its weights"
)


def _is_of_torch(step: Step, index: int) -> bool:
    """Whether an op is in torch's own module for attention, which writes the matrix to return its weights."""
    module = step.ops[index].module
    return step.trace.torch_modules.get(module, "").endswith(".MultiheadAttention")


def _remedy(shape: AttentionShape, *, certain: bool) -> str:
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
    if not certain:
        note += "\nIf the code calls it already, its math backend runs: an argument keeps the fused ones away."
    return call + note
