"""Dimensions of a tensor along which all its elements are equal, whatever they are: known from how they were made.

Ones of any shape, and a column that is expanded to many, are equal along dimensions; a sum by index of such rows is
equal along the same ones. They are known by the strides in memory, so that a view of a tensor has them too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from nearpeak.findings.step import Step
from nearpeak.ops.op import Op
from nearpeak.ops.tensor import Tensor

_FILLED = """
    aten.full aten.full_like aten.new_full aten.new_ones aten.new_zeros aten.ones aten.ones_like aten.zeros
    aten.zeros_like aten.fill_ aten.zero_
""".split()
_COPIES = ("aten.clone", "aten._to_copy")
_NOT_ELEMENTWISE = ("aten.tril", "aten.triu", "aten.tril_", "aten.triu_", "aten.glu")
"""Of the family of pointwise ops; what they write depends on the place, or is of another place."""
_BY_INDEX = ("aten.scatter_add", "aten.scatter", "aten.scatter_reduce", "aten.index_add", "aten.index_copy")
_ALONG = ("aten.index_select", "aten.cumsum", "aten.cumprod", "aten.flip")
_SUMS = ("aten.sum", "aten.mean", "aten.amax", "aten.amin")
_PRODUCTS = ("aten.mm", "aten.bmm")

Dims = frozenset[int]
NONE: Dims = frozenset()


class EqualAlong(NamedTuple):
    """By the index of the op: the dimensions along which tensors are equal."""

    read: list[tuple[Dims, ...]]
    """Those of its inputs."""
    written: list[Dims]
    """Those of its result; none of views."""


def equal_along(step: Step) -> EqualAlong:
    """What is known of all ops of a step."""
    known: dict[int, frozenset[tuple[int, int]] | None] = {}
    """By storage, sizes with strides along which its elements are equal; None if all of them are."""
    found = EqualAlong([], [])

    def dims_of(tensor: Tensor) -> Dims:
        pairs = known.get(tensor.storage, frozenset())
        return frozenset(
            d
            for d, pair in enumerate(zip(tensor.shape, tensor.strides, strict=True))
            if not pair[1] or pair[0] == 1 or pairs is None or pair in pairs
        )

    for op, cost, touches in zip(step.ops, step.costs, step.touches, strict=True):
        inputs = tuple(op.inputs)
        read = tuple(map(dims_of, inputs))
        written = NONE
        if cost.family != "view":
            result = op.written[0] if len({tensor.storage for tensor in op.written}) == 1 else None
            filled = result is not None and op.packet in _FILLED
            if result is not None and not filled:
                written = _written(op, cost.family, result, inputs, read)
            for storage in touches.writes:
                known.pop(storage, None)
            if result is not None and result.bytes >= _size(step, result):
                if filled:
                    known[result.storage] = None
                elif written:
                    pairs = list(zip(result.shape, result.strides, strict=True))
                    known[result.storage] = frozenset(pairs[d] for d in written if pairs[d][0] > 1)
                written = dims_of(result)
            else:
                written = NONE
        found.read.append(read)
        found.written.append(written)
    return found


def repeats(tensor: Tensor, dims: Iterable[int]) -> int:
    """How often each element is in a tensor that is equal along these dimensions."""
    return math.prod(tensor.shape[d] for d in dims)


def _size(step: Step, tensor: Tensor) -> float:
    storage = step.trace.storages.get(tensor.storage)
    return storage.bytes if storage is not None else tensor.bytes


def _written(op: Op, family: str, result: Tensor, inputs: tuple[Tensor, ...], read: tuple[Dims, ...]) -> Dims:
    """The dimensions along which what an op writes is equal, from those of what it reads."""
    packet, every = op.packet.rstrip("_"), frozenset(range(len(result.shape)))
    if packet == "aten.copy":
        return _broadcast(result, inputs[-1:], read[-1:])
    if (family == "pointwise" and packet not in _NOT_ELEMENTWISE) or packet in _COPIES:
        return _broadcast(result, inputs, read)
    dim = op.arguments.get("dim")
    of = {id(tensor): dims for tensor, dims in zip(inputs, read, strict=True)}

    def known(name: str) -> Dims:
        value = op.arguments.get(name)
        return of.get(id(value), NONE) if isinstance(value, Tensor) else every

    if packet in _PRODUCTS:
        return known("mat2") & {len(result.shape) - 1}
    if packet in _SUMS:
        return _reduced(op, result, read[0])
    if not isinstance(dim, int) or not inputs or len(inputs[0].shape) != len(result.shape) or not result.shape:
        return NONE
    along = {dim % len(result.shape)}
    if packet in _ALONG:
        return known("self") - along
    if packet == "aten.gather":
        return (known("self") | along) & known("index")
    if packet in _BY_INDEX:
        if packet.startswith("aten.scatter"):
            index = op.tensor("index")
            every = known("index") & {d for d in every if index.shape[d] == result.shape[d]}
        return (known("self") & known("src") & known("source") & every) - along
    return NONE


def _broadcast(result: Tensor, inputs: tuple[Tensor, ...], read: tuple[Dims, ...]) -> Dims:
    dims = set(range(len(result.shape)))
    for tensor, equal in zip(inputs, read, strict=True):
        shift = len(result.shape) - len(tensor.shape)
        if shift < 0 or any(
            size not in (1, wanted) for size, wanted in zip(tensor.shape, result.shape[shift:], strict=True)
        ):
            return NONE
        dims &= {*range(shift), *(d + shift for d in equal)}
    return frozenset(dims) if inputs else NONE


def _reduced(op: Op, result: Tensor, equal: Dims) -> Dims:
    given, rank = op.arguments.get("dim"), len(op.inputs[0].shape)
    dims = {d % rank for d in (given if isinstance(given, (tuple, list)) else (given,)) if isinstance(d, int)}
    if not dims:
        return NONE
    kept = [d for d in range(rank) if d not in dims or len(result.shape) == rank]
    return frozenset(place for place, d in enumerate(kept) if d in equal and d not in dims)
