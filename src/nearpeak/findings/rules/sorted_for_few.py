"""All elements are sorted for the largest few, or for the rank of one: finding those takes less time than sorting."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from nearpeak.findings.engine import Waste, rule
from nearpeak.findings.step import Step, is_kept, shape_text
from nearpeak.ops.op import Op
from nearpeak.ops.tensor import Tensor
from nearpeak.units import seconds

_SORTS = ("aten.sort", "aten.argsort", "aten.msort")
_LEAST = 1024
"""Elements of a row. Shorter rows are sorted about as fast as they are searched."""
_LEAST_FOR_RANK = 64
"""Elements of a row that are compared faster than sorted."""
SAMPLED = 1024
"""Tokens to sample from, with the remedy: those beyond have next to no probability together."""
_DRAWS = ("aten.multinomial", "aten.argmax", "aten.searchsorted")
"""Ops that pick one element of a row."""


@rule("sorted-for-few", needs=["storages"])
def sorted_for_few(step: Step) -> Iterator[Waste]:
    """Sorts of long rows of which only the first or last few elements are read, or that only limit what is sampled."""
    for index, op in enumerate(step.ops):
        if op.packet not in _SORTS or not step.time(index):
            continue
        rows = op.tensor("self")
        dim = int(op.arguments.get("dim", -1)) % max(1, len(rows.shape))
        length = rows.shape[dim] if rows.shape else 0
        if length >= _LEAST_FOR_RANK and _is_for_rank(step, index, dim):
            yield _for_rank(step, index, dim, length)
            continue
        if length < _LEAST:
            continue
        few = _elements_read(step, index, dim, length)
        if few is not None:
            yield from _for_few(step, index, dim, length, few)
        elif dim == len(rows.shape) - 1:
            yield from _for_sampling(step, index, length)


def _for_few(step: Step, index: int, dim: int, length: int, few: int) -> Iterator[Waste]:
    """`topk` in place of a sort: the same elements."""
    after = _topk_seconds(step, index, dim, few)
    took = step.time(index)
    if after is None or after >= took:
        return
    op = step.ops[index]
    largest = bool(op.arguments.get("descending", False)) == _reads_first(step, index, dim)
    yield Waste(
        title=f"All {length:,} elements of each row are sorted, and {few:,} of them are used.",
        op=index,
        gains={index: took - after},
        evidence=f"{op.packet} of {shape_text(op.tensor('self').shape)} takes {seconds(took)}; ops after it read "
        f"{few:,} of {length:,} elements.",
        reasoning=f"torch.topk finds the same elements, in order, in {seconds(after)}.",
        remedy=f"values, indices = x.topk({few}, dim={op.arguments.get('dim', -1)}"
        f"{'' if largest else ', largest=False'})  # sorted, in place of sort",
    )


def _is_for_rank(step: Step, index: int, dim: int) -> bool:
    """Whether the order of a sort is only compared with one index of each row: that asks where the index stands."""
    order = step.ops[index].outputs[-1]
    if any(is_kept(step, index, output) for output in step.ops[index].outputs):
        return False
    readers = step.flow.consumers[index]
    return bool(readers) and all(
        step.ops[reader].packet == "aten.eq"
        and order.storage in step.flow.read_by[reader]
        and _is_one_of_each_row(step.ops[reader], order, dim)
        for reader in readers
    )


def _is_one_of_each_row(op: Op, order: Tensor, dim: int) -> bool:
    whole, *others = sorted(op.inputs, key=lambda tensor: tensor.storage != order.storage)
    if whole.shape != order.shape or len(others) > 1:
        return False
    place = dim - len(order.shape)
    return not others or len(others[0].shape) < -place or others[0].shape[place] == 1 or others[0].strides[place] == 0


def _for_rank(step: Step, index: int, dim: int, length: int) -> Waste:
    """A comparison with the score itself in place of a sort; it is made of all scores, as that of all indices was."""
    op, took = step.ops[index], step.time(index)
    greater = ">" if op.arguments.get("descending", False) else "<"
    return Waste(
        title=f"All {length:,} elements of each row are sorted, to find the rank of one.",
        op=index,
        gains={index: took},
        evidence=f"{op.packet} of {shape_text(op.tensor('self').shape)} takes {seconds(took)}; its order is only "
        "compared with an index of each row.",
        reasoning="The rank of an element is the number of those before it: the elements are compared instead of their "
        "places, which takes as long, and the sort goes away.",
        remedy=f"rank = (x {greater} x.gather({dim}, index)).sum({dim})  # index has one element of each row",
    )


def _for_sampling(step: Step, index: int, length: int) -> Iterator[Waste]:
    """Nucleus sampling among the most likely tokens in place of all."""
    region = _sampling_ops(step, index, length)
    few = min(SAMPLED, length // 8)
    first = _topk_seconds(step, index, len(step.ops[index].tensor("self").shape) - 1, few)
    if not region or first is None:
        return
    gains = {index: max(0.0, step.time(index) - first)}
    for member in region:
        share = _share_of_few(step, member, length, few)
        if share < 1.0 and step.time(member):
            gains[member] = step.time(member) * (1 - share)
    op = step.ops[index]
    took = step.seconds(gains)
    yield Waste(
        title="The whole vocabulary is sorted to sample from its most likely tokens.",
        op=index,
        gains=gains,
        evidence=f"{op.packet} of {shape_text(op.tensor('self').shape)} takes {seconds(step.time(index))}, and "
        f"{len(gains) - 1} ops that work on all {length:,} tokens until one is drawn "
        f"{seconds(took - step.time(index))}.",
        reasoning=f"torch.topk of {few:,} tokens takes {seconds(first)}, and what follows it works on those alone. "
        "Less likely tokens are then never drawn.",
        remedy=f"top, tokens = logits.topk({few}, dim=-1)  # in order, the most likely first\n"
        "probabilities = top.softmax(dim=-1)\n"
        "probabilities = probabilities.masked_fill(probabilities.cumsum(-1) - probabilities > top_p, 0.0)\n"
        "token = tokens.gather(-1, probabilities.multinomial(1))",
    )


def _parts_read(step: Step, index: int) -> list[Tensor] | None:
    """The parts of a sort's results that other ops read; None if a result outlives the step."""
    parts = []
    for result in step.ops[index].outputs:
        if is_kept(step, index, result):
            return None
        for reader in step.flow.consumers[index]:
            parts += [tensor for tensor in step.ops[reader].inputs if tensor.storage == result.storage]
    return parts


def _elements_read(step: Step, index: int, dim: int, length: int) -> int | None:
    """How many elements of each row are read, if they are the first or the last ones; None if it is most of them."""
    parts = _parts_read(step, index)
    if not parts:
        return None
    ends = [_span(step.ops[index], part, dim, length) for part in parts]
    known = [end for end in ends if end is not None]
    if len(known) < len(ends):
        return None
    first, last = min(start for start, _ in known), max(end for _, end in known)
    few = last if first < length - last else length - first
    return few if few <= length // 4 else None


def _reads_first(step: Step, index: int, dim: int) -> bool:
    parts = _parts_read(step, index) or []
    spans = [_span(step.ops[index], part, dim, step.ops[index].tensor("self").shape[dim]) for part in parts]
    return any(span is not None and span[0] == 0 for span in spans)


def _span(op: Op, part: Tensor, dim: int, length: int) -> tuple[int, int] | None:
    """Where the elements of a part begin and end in each sorted row; None if that cannot be told from its layout."""
    result = op.outputs[-1]
    stride = result.strides[dim]
    inner = part.offset % (stride * length) if stride else 0
    start = inner // stride if stride else 0
    sizes = [size for size, own in zip(part.shape, part.strides, strict=True) if own == stride and size > 1]
    expanded = math.prod(size for size, own in zip(part.shape, part.strides, strict=True) if not own)
    rest = part.elements // max(1, math.prod(sizes) * expanded)
    rows = result.elements // length
    if stride != 1 or len(sizes) > 1 or rest > rows:
        return None
    size = sizes[0] if sizes else 1
    return (start, start + size) if start + size <= length else None


def _topk_seconds(step: Step, index: int, dim: int, few: int) -> float | None:
    """The time of a good `topk` in place of a sort."""
    op = step.ops[index]
    rows = op.tensor("self")
    shape = tuple(few if place == dim else size for place, size in enumerate(rows.shape))
    strides = tuple(math.prod(shape[place + 1 :]) for place in range(len(shape)))
    last = max(step.trace.storages, default=0)
    values = Tensor(shape=shape, strides=strides, dtype=rows.dtype, storage=last + 1)
    places = Tensor(shape=shape, strides=strides, dtype="int64", storage=last + 2)
    arguments: dict[str, Any] = {"self": rows, "k": few, "dim": dim, "largest": True, "sorted": True}
    return step.expected(Op(name="aten.topk.default", arguments=arguments, outputs=(values, places)))


def _sampling_ops(step: Step, index: int, length: int) -> list[int]:
    """The ops from a sort to the draw of a token, if all that is computed from the sort serves that draw.

    Nucleus sampling sums up the sorted probabilities: without a cumulative sum, the order may be wanted for itself.
    """
    region: list[int] = []
    near = [index]
    while near:
        member = near.pop()
        for reader in step.flow.consumers[member]:
            if reader not in region and _is_as_long(step.ops[reader], length):
                region.append(reader)
                near.append(reader)
    region.sort()
    packets = {step.ops[member].packet for member in region}
    draws = packets & set(_DRAWS)
    kept = any(
        is_kept(step, member, tensor)
        for member in (index, *region)
        for tensor in step.ops[member].outputs
        if tensor.shape and tensor.shape[-1] == length
    )
    return region if draws and "aten.cumsum" in packets and not kept else []


def _is_as_long(op: Op, length: int) -> bool:
    """Whether an op reads rows of this length, or of one less, as a shifted mask has."""
    return any(tensor.shape and tensor.shape[-1] in (length, length - 1) for tensor in op.inputs)


def _share_of_few(step: Step, index: int, length: int, few: int) -> float:
    """The share of an op's time that remains on rows of a few elements."""
    op = step.ops[index]
    whole = step.expected(op)
    part = step.expected(
        dataclasses.replace(
            op,
            arguments={name: _with_few(value, length, few) for name, value in op.arguments.items()},
            outputs=tuple(_with_few(tensor, length, few) for tensor in op.outputs),
        )
    )
    return min(1.0, part / whole) if whole and part is not None else 1.0


def _with_few(value: Any, length: int, few: int) -> Any:
    if isinstance(value, tuple):
        return tuple(_with_few(item, length, few) for item in value)
    if not isinstance(value, Tensor) or not value.shape or value.shape[-1] not in (length, length - 1):
        return value
    shape = (*value.shape[:-1], few)
    return dataclasses.replace(
        value, shape=shape, strides=tuple(math.prod(shape[place + 1 :]) for place in range(len(shape))), offset=0
    )
