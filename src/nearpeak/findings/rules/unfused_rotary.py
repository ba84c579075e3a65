"""A rotary embedding as separate ops, `x * cos + rotated(x) * sin`, with a kernel for each copy and multiplication."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator

from nearpeak.findings.engine import Waste, rule
from nearpeak.findings.regions import fusion_saving, measured_over_expected, ops_that_launch, with_backward
from nearpeak.findings.step import Step, shape_text
from nearpeak.ops.tensor import Tensor
from nearpeak.units import seconds

_SUMS = ("aten.add", "aten.sub", "aten.add_", "aten.sub_")
_PRODUCTS = ("aten.mul", "aten.mul_")
_JOINS = ("aten.cat", "aten.stack")
_TURNS = (*_JOINS, "aten.neg", "aten.clone", "aten.roll", "aten.index_select", "aten.index")
"""Ops between a tensor and its rotated copy."""


_STRIDED = 2.0
"""The time of compiled code over that of a good pointwise kernel if heads and positions of its inputs are transposed,
as they are in most models. On an H200, 2.3 in training Qwen3-MoE, 5 in training Llama-1B; 1.1 for contiguous
tensors."""


@rule("unfused-rotary", needs=["storages"], compiles=True)
def unfused_rotary(step: Step) -> Iterator[Waste]:
    """Sums of two multiplications of one tensor with smaller tables."""
    embeddings = {}
    for index in range(len(step.ops)):
        inner = _whole(step, index) or _halves(step, index)
        if inner is not None:
            embeddings[frozenset(inner | _casts(step, inner, index))] = index
    for region in with_backward(step, list(embeddings)):
        last = embeddings[region.forward]
        members = ops_that_launch(step, region.members)
        strided = _STRIDED if _swapped(step, members) else 1.0
        saving = fusion_saving(step, region, times=strided * min(1.0, measured_over_expected(step, members)))
        yield Waste(
            title=f"A rotary embedding is written as {len(ops_that_launch(step, region.forward))} ops, a kernel each.",
            op=last,
            gains=saving.gains,
            gone=saving.gone,
            evidence=saving.evidence(step, f" on {shape_text(step.ops[last].outputs[0].shape)}"),
            reasoning=f"{saving.kernels} that reads the tensor and the tables and writes the result would take "
            f"{seconds(saving.remaining_s)} as a compiler writes it.",
            remedy="@torch.compile\ndef rotate(x, cos, sin):\n    left, right = x.chunk(2, dim=-1)\n"
            "    return x * cos + torch.cat((-right, left), dim=-1) * sin\n# and rotate(query, cos, sin), "
            "rotate(key, cos, sin) at this line",
            fix=step.nearpeak_kernel("rotary_pair", "(query, key, cos, sin)"),
        )


def _swapped(step: Step, members: Collection[int]) -> bool:
    """Whether a rotated tensor is not contiguous."""
    tensors = [tensor for index in members for tensor in step.ops[index].inputs]
    largest = max(tensor.elements for tensor in tensors)
    return any(tensor.elements == largest and list(tensor.strides) != _in_order(tensor) for tensor in tensors)


def _in_order(tensor: Tensor) -> list[int]:
    """The strides of a contiguous tensor of its shape."""
    return [math.prod(tensor.shape[place + 1 :]) for place in range(len(tensor.shape))]


def _whole(step: Step, index: int) -> set[int] | None:
    """A sum of x times a table and of a rotated copy of x times another table."""
    products = _products(step, index)
    if products is None:
        return None
    result = step.ops[index].outputs[0]
    sources = [_sources(step, product, result) for product in products]
    for straight, turned in (sources, sources[::-1]):
        turning = turned[1]
        joined = any(
            step.ops[index_now].packet in _TURNS[:2] or step.ops[index_now].packet in _TURNS[3:]
            for index_now in turning
        )
        if straight[0] and straight[0] == turned[0] and joined and not straight[1]:
            return {index, *products, *turning}
    return None


def _halves(step: Step, index: int) -> set[int] | None:
    """Two sums of products of the halves of x, concatenated."""
    op = step.ops[index]
    if op.phase != "forward" or op.packet not in _JOINS or len(op.inputs) != 2:
        return None
    sums = list(dict.fromkeys(step.flow.producers[index].values()))
    products = [_products(step, member) for member in sums]
    if len(sums) != 2 or products[0] is None or products[1] is None:
        return None
    members = {index, *sums, *products[0], *products[1]}
    half = step.ops[sums[0]].outputs[0]
    sources = {source for member in (*products[0], *products[1]) for source in _sources(step, member, half)[0]}
    return members if len(sources) == 1 else None


def _products(step: Step, index: int) -> list[int] | None:
    """The two multiplications with tables that only this sum reads."""
    op = step.ops[index]
    if op.phase != "forward" or op.recomputed or op.packet not in _SUMS:
        return None
    products = list(dict.fromkeys(step.flow.producers[index].values()))
    if len(products) != 2 or any(
        step.ops[product].packet not in _PRODUCTS or _table(step, product) is None for product in products
    ):
        return None
    alone = all(set(step.forward_readers(product)) == {index} for product in products)
    return products if alone else None


def _table(step: Step, product: int) -> Tensor | None:
    """The factor that is broadcast over heads or batch and has the positions and the head dimension."""
    result = step.ops[product].outputs[0]
    for tensor in step.ops[product].inputs:
        strides = zip(tensor.shape, tensor.strides, strict=True)
        distinct = 1
        for size, stride in strides:
            distinct *= size if stride else 1
        wide = len(tensor.shape) >= 2 and tensor.shape[-1] == result.shape[-1]
        if wide and distinct < result.elements and distinct > tensor.shape[-1]:
            return tensor
    return None


def _sources(step: Step, product: int, result: Tensor) -> tuple[frozenset[int], list[int]]:
    """The storages that the other factor comes from, and the ops that rotated it."""
    table = _table(step, product)
    waiting = [(product, tensor) for tensor in step.ops[product].inputs if tensor is not table]
    sources, turning = set[int](), list[int]()
    while waiting:
        index, tensor = waiting.pop()
        producer = step.flow.producers[index].get(tensor.storage)
        turns = producer is not None and step.ops[producer].packet in _TURNS and tensor.elements <= result.elements
        if turns and producer is not None and step.ops[producer].phase == "forward" and len(turning) < 8:
            if producer not in turning:
                turning.append(producer)
                waiting += [
                    (producer, tensor_before)
                    for tensor_before in step.ops[producer].inputs
                    if tensor_before.is_floating
                ]
        else:
            sources.add(tensor.storage)
    return frozenset(sources), turning


def _casts(step: Step, members: Collection[int], last: int) -> set[int]:
    """A cast before that only these ops read, and one after."""
    before = {
        producer
        for index in members
        for producer in step.flow.producers[index].values()
        if producer not in members
        and step.ops[producer].packet == "aten._to_copy"
        and set(step.forward_readers(producer)) <= set(members)
        and step.ops[producer].outputs[0].elements >= step.ops[last].outputs[0].elements
    }
    after = step.forward_readers(last)
    cast = len(after) == 1 and step.ops[after[0]].packet == "aten._to_copy"
    return before | ({after[0]} if cast else set())
