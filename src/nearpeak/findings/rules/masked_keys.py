"""A mask hides the same keys from all queries, and attention reads them all the same: empty slots of a cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from nearpeak.bound.tiles import FACTORS, product_sizes
from nearpeak.findings.engine import Waste, rule, wastes_of
from nearpeak.findings.rules.attention_written_out import find_attention
from nearpeak.findings.step import Step, is_kept
from nearpeak.findings.what_if import dense_strides_like, gemm_op, seconds_by_size, share_left
from nearpeak.ops.op import Op, VisibleKeys
from nearpeak.ops.tensor import Tensor
from nearpeak.units import percent, seconds

_PREPARING = ("movement", "pointwise", "indexing")
"""Families of ops that make keys and values of other ones: copies for each head of a group, casts, scales."""
_PARTS = (
    "aten.slice",
    "aten.select",
    "aten.narrow",
    "aten.split",
    "aten.split_with_sizes",
    "aten.chunk",
    "aten.unbind",
)
_MASKS = ("attn_bias", "attn_mask")


@rule("masked-keys", needs=["storages"])
def masked_keys(step: Step) -> Iterator[Waste]:
    """Attention of which a mask hides keys at either end from every query, with what only prepares these keys.

    Padding that ends with the longest row is padding: `padded-batch` has it, where it is known.
    """
    padded: set[int] = set()
    if step.trace.visible_keys and step.trace.padding:
        padded = {index for waste in wastes_of(step, "padded-batch") for index in waste.gains}
    expected: dict[Hashable, float] = {}
    for index, visible in step.trace.visible_keys.items():
        attention = None if index in padded else _attention(step, index, visible.keys)
        if attention is None:
            continue
        changes = {
            member: seconds_by_size(step, member) * _share_saved(step, step.ops[member], shortened, expected)
            for member, shortened in attention.shortened(step, visible).items()
        }
        left = share_left(changes.values())  # what reads a slice may take longer
        gains = {member: left * change for member, change in changes.items() if left * change > 0.0}
        took = step.seconds(gains)
        where = _part_of_cache(step, *attention.key)
        cut = f"{'start' if visible.first else ''}:{'end' if visible.end < visible.keys else ''}"
        yield Waste(
            title=f"A mask hides {percent(visible.hidden_share, 0)} of the keys of an attention from all queries.",
            op=index if where is None else where,
            gains=gains,
            evidence=f"Of {visible.keys} keys ({step.ops[index].packet}), the mask shows none to any query of any row "
            f"but {visible.count}, from {visible.first} to {visible.end - 1}. {len(gains)} ops on all keys took "
            f"{seconds(took)}.",
            reasoning=f"With these {visible.count} keys, they take {seconds(took - sum(gains.values()))}, and the "
            "result is the same. Seen in one step: a cache has more to show as it fills. One length for all steps is "
            "worth it where a CUDA graph or compiled code reads the cache; this attention is in neither.",
            remedy=f"key, value, mask = key[:, :, {cut}], value[:, :, {cut}], mask[..., {cut}]  # before they are "
            "repeated or cast\n"
            "# Where the length changes in every step: round it up to a multiple of 64, so that kernels meet few of "
            "them.",
        )


DimOf = Callable[[str, Tensor], int | None]
"""The dimension of a tensor that runs along the keys, by the name of the argument; of a result, by its number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attention:
    """An attention, forward and backward, with the ops that prepare its keys and values."""

    products: Mapping[int, int]
    """GEMMs, and which of their sizes (batch, m, n, k) is that of the keys."""
    others: Mapping[int, DimOf]
    key: tuple[int, Tensor]
    """The keys before they were prepared, and the op that reads them so."""

    def shortened(self, step: Step, visible: VisibleKeys) -> dict[int, tuple[Op, Op]]:
        """Each op with all keys, and with those that are visible."""
        pairs = {}
        for index, place in self.products.items():
            sizes = product_sizes(step.ops[index])
            if sizes is not None:
                dtype, tf32 = _right_factor(step.ops[index]).dtype, step.ops[index].tf32_products
                batch, *shorter = sizes
                shorter[place - 1] = visible.count
                pairs[index] = gemm_op(*sizes, dtype=dtype, tf32=tf32), gemm_op(batch, *shorter, dtype=dtype, tf32=tf32)
        made = {storage for index in (*self.products, *self.others) for storage in step.flow.written_by[index]}
        for index, dim_of in self.others.items():
            pairs[index] = step.ops[index], _with_keys(step.ops[index], visible.count, dim_of, made)
        return pairs


def _attention(step: Step, index: int, keys: int) -> _Attention | None:
    """The attention of an op that was looked at."""
    op = step.ops[index]
    products: dict[int, int] = {}
    others: dict[int, DimOf] = {}
    if step.costs[index].family == "attention":
        is_backward = f"{op.packet}_backward"
        backward = [reader for reader in step.flow.consumers[index] if step.ops[reader].packet == is_backward]
        others = dict.fromkeys([index, *backward], _fused_dims(keys))
        operands = [(index, op.tensor("key"), -2), (index, op.tensor("value"), -2)]
        operands += [(index, mask, -1) for mask in op.tensors(*_MASKS)]
    else:
        attention = find_attention(step, index)
        if attention is None:
            return None
        scores, values = attention.products
        for member in attention.forward | attention.backward:
            sizes = product_sizes(step.ops[member])
            if sizes is None:
                others[member] = _last_dim(keys)
            elif keys in sizes[1:]:
                products[member] = {scores: 2, values: 3}.get(member, next(i for i in (2, 1, 3) if sizes[i] == keys))
        key, value = _right_factor(step.ops[scores]), _right_factor(step.ops[values])
        if key.shape[-1] != keys or value.shape[-2:-1] != (keys,):
            return None
        operands = [(scores, key, -1), (values, value, -2)]
    sources = []
    for reader, tensor, dim in operands:
        prepared, source = _prepared(step, {*products, *others}, reader, tensor, dim)
        others |= prepared
        sources.append(source)
    return _Attention(products=products, others=others, key=sources[0])


def _right_factor(product: Op) -> Tensor:
    return product.tensor(FACTORS[product.packet][1])


def _fused_dims(keys: int) -> DimOf:
    """Those of an attention operator and of its backward, whose results are gradients of query, key, value and mask."""
    along = {"key": -2, "value": -2, "1": -2, "2": -2, "3": -1, **dict.fromkeys(_MASKS, -1)}

    def dim_of(name: str, tensor: Tensor) -> int | None:
        dim = along.get(name)
        return dim if dim is not None and len(tensor.shape) > 1 and tensor.shape[dim] == keys else None

    return dim_of


def _last_dim(keys: int) -> DimOf:
    """Scores and masks have a column for each key."""
    return lambda name, tensor: -1 if tensor.shape[-1:] == (keys,) else None


def _prepared(
    step: Step, members: set[int], reader: int, tensor: Tensor, dim: int
) -> tuple[dict[int, DimOf], tuple[int, Tensor]]:
    """The ops that only prepare an operand for these members, and what they prepare it from, with its first reader."""
    found: dict[int, DimOf] = {}
    keys = tensor.shape[dim]
    while True:
        producer = step.flow.producers[reader].get(tensor.storage)
        if producer is None or producer in found or not _only_prepares(step, producer, members | {*found}):
            return found, (reader, tensor)
        out = step.ops[producer].outputs[0]
        steps = [place for place, size in enumerate(out.shape) if size == keys]
        places = [place for place in steps if out.strides[place] == tensor.strides[dim]] or steps
        sources = [
            (source, place)
            for source in step.ops[producer].inputs
            if len(places) == 1 and (place := _dim_like(source, out, places[0])) is not None
        ]
        if not sources:
            return found, (reader, tensor)
        found[producer] = _dims_like(out, places[0])
        reader, (tensor, dim) = producer, sources[0]


def _only_prepares(step: Step, index: int, members: set[int]) -> bool:
    op = step.ops[index]
    return (
        op.phase == "forward"
        and step.costs[index].family in _PREPARING
        and len(op.outputs) == 1
        and not op.mutated
        and {*step.flow.consumers[index]} <= members
        and not is_kept(step, index, op.outputs[0])
    )


def _dims_like(out: Tensor, place: int) -> DimOf:
    return lambda name, tensor: _dim_like(tensor, out, place)


def _dim_like(tensor: Tensor, out: Tensor, place: int) -> int | None:
    """The dimension of a tensor that runs along the same elements as one of a result."""
    keys = out.shape[place]
    if len(tensor.shape) == len(out.shape):
        return place if tensor.shape[place] == keys else None
    places = [other for other, size in enumerate(tensor.shape) if size == keys]
    return places[0] if len(places) == 1 else None


def _part_of_cache(step: Step, reader: int, keys: Tensor) -> int | None:
    """The view that takes the keys out of a cache, of the same length as this; None if that is not known.

    A cache is older than the step, or is written to in place.
    """
    in_place = (
        tensor.storage == keys.storage
        for index in step.touched_by.get(keys.storage, ())
        for tensor in step.ops[index].tensors(*step.ops[index].mutated)
    )
    if step.trace.storages[keys.storage].kind == "intermediate" and not any(in_place):
        return None
    for index in range(reader - 1, -1, -1):
        op = step.ops[index]
        if op.packet in _PARTS and op.source and any(_is_same_part(part, keys) for part in op.outputs):
            return index
    return None


def _is_same_part(part: Tensor, other: Tensor) -> bool:
    """Whether two views are of the same elements of a storage, in any order."""
    return (
        part.storage == other.storage
        and part.offset == other.offset
        and _dense_elements(part) == _dense_elements(other)
    )


def _dense_elements(tensor: Tensor) -> float:
    return tensor.bytes / tensor.item_bytes


def _share_saved(step: Step, op: Op, pair: tuple[Op, Op], expected: dict[Hashable, float]) -> float:
    """The share of the time of an op that good kernels save with fewer keys."""
    whole, shorter = pair
    tensors = (*whole.inputs, *whole.outputs, *shorter.inputs, *shorter.outputs)
    key = (op.name, op.tf32_products, tuple((tensor.shape, tensor.strides, tensor.dtype) for tensor in tensors))
    if key not in expected:
        whole_s, shorter_s = step.expected(whole), step.expected(shorter)
        expected[key] = 1 - shorter_s / whole_s if whole_s and shorter_s is not None else 0.0
    return expected[key]


def _with_keys(op: Op, count: int, dim_of: DimOf, made: Collection[int]) -> Op:
    """The op with so many keys: what is made with as many is dense, and the rest is a slice."""

    def shorter(name: str, value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return tuple(shorter(name, item) for item in value)
        dim = dim_of(name, value) if isinstance(value, Tensor) else None
        if dim is None:
            return value
        place = dim % len(value.shape)
        shape = (*value.shape[:place], count, *value.shape[place + 1 :])
        strides = dense_strides_like(value, shape) if value.storage in made else value.strides
        return dataclasses.replace(value, shape=shape, strides=strides, offset=0)

    return dataclasses.replace(
        op,
        arguments={name: shorter(name, value) for name, value in op.arguments.items()},
        outputs=tuple(shorter(str(number), tensor) for number, tensor in enumerate(op.outputs)),
    )
