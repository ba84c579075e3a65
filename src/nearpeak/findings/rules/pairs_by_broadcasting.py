"""All pairs of rows are compared by broadcasting, which writes a row for each pair: a GEMM writes one number."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from nearpeak.findings.engine import Waste, rule
from nearpeak.findings.regions import Region, describe_ops, launches_removed, ops_that_launch, proportional_gains
from nearpeak.findings.regions import with_backward as regions_with_backward
from nearpeak.findings.step import Step, shape_text
from nearpeak.findings.what_if import gemm_op
from nearpeak.ops.cost import Access
from nearpeak.ops.op import Op
from nearpeak.ops.tensor import Tensor
from nearpeak.units import quantity, seconds

_DIFFERENCES = ("aten.sub", "aten.rsub")
_SQUARED_DIFFERENCES = ("aten.mse_loss",)
_PRODUCTS = ("aten.mul",)
_SQUARES = ("aten.pow", "aten.square")
_NORMS = ("aten.linalg_vector_norm", "aten.norm")
_SUMS = ("aten.sum", "aten.mean")
_SCALED = ("aten.neg", "aten._to_copy", "aten.clone", "aten.add", "aten.sub", "aten.mul", "aten.div")
"""Ops with a number that leave it a sum over columns."""
_COPIES = ("aten.clone", "aten._to_copy", "aten.repeat", "aten.expand_copy")
_PASSES = {"distance": 3, "product": 0}
"""Over one number for each pair, with a GEMM in place of broadcasting: norms are added, it is clamped, and has its
root taken."""

Kind = Literal["distance", "product"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pairs:
    """Ops that compare all rows of one tensor with all rows of another one."""

    kind: Kind
    op: int
    """That makes a row of each pair."""
    shape: tuple[int, ...]
    sizes: tuple[int, int, int, int]
    """Batch, rows, other rows, columns."""
    forward: frozenset[int]


@rule("pairs-by-broadcasting", needs=["storages"])
def pairs_by_broadcasting(step: Step) -> Iterator[Waste]:
    """Differences or products of all pairs of rows, whose columns are summed up and not read otherwise."""
    constant = constant_strides(step)
    found: list[_Pairs] = []
    taken: set[int] = set()
    for index, op in enumerate(step.ops):
        if op.packet in (*_DIFFERENCES, *_SQUARED_DIFFERENCES, *_PRODUCTS) and index not in taken:
            pairs = _pairs(step, index, constant)
            if pairs is not None:
                found.append(pairs)
                taken |= pairs.forward
    regions = {min(region.forward): region for region in regions_with_backward(step, [one.forward for one in found])}
    for pairs in found:
        yield from _waste(step, pairs, regions[min(pairs.forward)])


def _waste(step: Step, pairs: _Pairs, region: Region) -> Iterator[Waste]:
    elements = math.prod(pairs.shape)
    backward = {index for index in region.backward if _touches(step.ops[index], elements)}
    members = ops_that_launch(step, pairs.forward | backward)
    remaining_s = _seconds_of_gemms(step, pairs, trained=bool(backward))
    took = step.seconds(members)
    if remaining_s >= took:
        return
    batch, rows, others, columns = pairs.sizes
    what = "differences" if pairs.kind == "distance" else "products"
    large = [
        tensor.bytes for index in pairs.forward for tensor in step.ops[index].outputs if tensor.elements == elements
    ]
    yield Waste(
        title=f"The {what} of all pairs of rows are written, to sum up each.",
        op=pairs.op,
        gains=proportional_gains(step, members, remaining_s),
        gone=launches_removed(step, members, remaining_s),
        replaces=True,
        evidence=f"{rows:,} rows and {others:,} rows of {columns:,} make {shape_text(pairs.shape)} elements, "
        f"{quantity(max(large, default=0.0), 'B')}: {describe_ops(step, members)} take {seconds(took)}. "
        "Only the sums are read.",
        reasoning=f"A GEMM of {f'{batch} x ' if batch > 1 else ''}{rows} x {columns} and {columns} x {others}"
        + (" and those of its backward" if backward else "")
        + (", with what makes distances of its results," if pairs.kind == "distance" else "")
        + f" would take {seconds(remaining_s)}.",
        remedy=_REMEDIES[pairs.kind],
    )


_REMEDIES = {
    "distance": "distances = torch.cdist(a, b)  # (n, d) and (m, d), in place of (a[:, None] - b).norm(dim=-1)\n"
    "squared = a.square().sum(-1)[:, None] - 2 * a @ b.T + b.square().sum(-1)\n"
    '# Rows that are nearly the same: cdist(..., compute_mode="donot_use_mm_for_euclid_dist") rounds less.',
    "product": "scores = a @ b.T  # in place of (a[:, None] * b).sum(-1)\n"
    "cosines = F.normalize(a, dim=-1) @ F.normalize(b, dim=-1).T  # in place of cosine_similarity(a[:, None], b)",
}


def constant_strides(step: Step) -> dict[int, set[int]]:
    """By storage, the strides along which what forward ops wrote is the same everywhere, as it was expanded before."""
    strides: dict[int, set[int]] = {}
    for index, op in enumerate(step.ops):
        if op.phase != "forward" or len(op.outputs) != 1 or not step.touches[index].writes:
            continue
        result = op.outputs[0]
        dims = _constant_dims_of_result(step, index, strides)
        if dims:
            strides[result.storage] = {result.strides[dim] for dim in dims}
        else:
            strides.pop(result.storage, None)
    return strides


def constant_dims(tensor: Tensor, strides: dict[int, set[int]]) -> set[int]:
    """The dimensions along which a tensor is the same everywhere."""
    own = strides.get(tensor.storage, ())
    return {
        dim
        for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.strides, strict=True))
        if size > 1 and (stride == 0 or stride in own)
    }


def _constant_dims_of_result(step: Step, index: int, strides: dict[int, set[int]]) -> set[int]:
    op, family = step.ops[index], step.costs[index].family
    shape = op.outputs[0].shape
    if op.packet == "aten.repeat":
        return _repeated_dims(op.inputs[0], shape)
    if family == "reduction":
        if len(op.inputs) != 1:
            return set()
        source, gone = op.inputs[0], reduced_dims(op)
        left = [dim for dim in range(len(source.shape)) if dim not in gone]
        if len(shape) == len(source.shape):
            left = list(range(len(source.shape)))
        return {left.index(dim) for dim in constant_dims(source, strides) if dim not in gone and dim in left}
    is_copy = op.packet in _COPIES and bool(op.inputs) and op.inputs[0].shape == shape
    if not op.inputs or not (is_copy or family == "pointwise"):
        return set()
    dims = [_dims_in(tensor, shape, strides) for tensor in op.inputs]
    return set.intersection(*dims)


def _repeated_dims(source: Tensor, shape: tuple[int, ...]) -> set[int]:
    """The dimensions of a repeated tensor that it repeats as a whole."""
    new = len(shape) - len(source.shape)
    return {dim for dim, size in enumerate(shape) if size > 1 and (dim < new or source.shape[dim - new] == 1)}


def _dims_in(tensor: Tensor, shape: tuple[int, ...], strides: dict[int, set[int]]) -> set[int]:
    """The dimensions of a result along which one of its operands is the same, as it is broadcast or was before."""
    own = {dim + len(shape) - len(tensor.shape) for dim in constant_dims(tensor, strides)}
    return own | _repeated_dims(tensor, shape)


def reduced_dims(op: Op) -> set[int]:
    """The dimensions of its operand that a reduction goes over."""
    dims, rank = op.arguments.get("dim"), len(op.inputs[0].shape)
    dims = (dims,) if isinstance(dims, int) else dims
    return {dim % rank for dim in dims} if dims else set(range(rank))


def _pairs(step: Step, index: int, constant: dict[int, set[int]]) -> _Pairs | None:
    """The comparison that begins with an op, if all that is made of its pairs is summed up by rows."""
    op = step.ops[index]
    if op.phase != "forward" or op.recomputed or len(op.inputs) != 2 or not op.outputs:
        return None
    shape = op.outputs[0].shape
    left, right = (_dims_in(tensor, shape, constant) for tensor in op.inputs)
    if not left - right or not right - left or left & right:
        return None
    is_distance = op.packet not in _PRODUCTS
    chain = _summed_up(step, index, {dim for dim, size in enumerate(shape) if dim not in left | right}, is_distance)
    if chain is None:
        return None
    members, gone = chain
    columns = math.prod(shape[dim] for dim in gone)
    rows, others = (math.prod(shape[dim] for dim in dims) for dims in (right, left))
    if columns < 2:
        return None
    return _Pairs(
        kind="distance" if is_distance else "product",
        op=index,
        shape=shape,
        sizes=(math.prod(shape) // (rows * others * columns), rows, others, columns),
        forward=frozenset(members | _makers(step, members, index, constant)),
    )


def _summed_up(step: Step, first: int, columns: set[int], is_distance: bool) -> tuple[set[int], set[int]] | None:
    """The ops from a row for each pair to one number, and the dimensions that are summed up; None if others read it."""
    shape = step.ops[first].outputs[0].shape
    members, waiting, gone = {first}, [first], set[int]()
    squared, powers = step.ops[first].packet in _SQUARED_DIFFERENCES, 0
    ends = 0
    while waiting:
        index = waiting.pop()
        if step.flow.results.intersection(step.flow.written_by[index]):
            return None
        for reader in step.forward_readers(index):
            op = step.ops[reader]
            if reader in members:
                continue
            if op.packet in (*_SUMS, *_NORMS) and op.inputs[0].shape == shape:
                dims = reduced_dims(op)
                if not dims <= columns or (gone and dims != gone) or not (op.packet in _SUMS or _order(op) == 2):
                    return None
                gone, ends = dims, ends + 1
                squared = squared or op.packet in _NORMS
                members.add(reader)
                continue
            if not op.outputs or op.outputs[0].shape != shape or op.mutated:
                return None
            whole = [tensor for tensor in op.inputs if tensor.elements > 1]
            of_pairs = {storage for member in members for storage in step.flow.written_by[member]}
            if not {tensor.storage for tensor in whole} <= of_pairs:
                return None
            if _is_square(op, len(whole)):
                powers += 1
            elif len(whole) > 1 or op.packet not in _SCALED:
                return None
            members.add(reader)
            waiting.append(reader)
    powers += squared
    return (members, gone) if ends and powers == is_distance else None


def _order(op: Op) -> float:
    """Of the norm that an op computes."""
    value = op.arguments.get("ord", op.arguments.get("p", 2))
    return 2.0 if value is None else float(value) if isinstance(value, (int, float)) else math.nan


def _is_square(op: Op, operands: int) -> bool:
    if op.packet in _SQUARES:
        return op.packet == "aten.square" or op.arguments.get("exponent") == 2
    same = [tensor.storage for tensor in op.inputs]
    return op.packet == "aten.mul" and operands == 2 and len(set(same)) == 1


def _makers(step: Step, members: set[int], first: int, constant: dict[int, set[int]]) -> set[int]:
    """The ops before that work on repeated rows for this comparison alone: copies of them, and what normalizes them."""
    elements = step.ops[first].outputs[0].elements
    made: set[int] = set()
    waiting = [first]
    while waiting:
        for storage, producer in step.flow.producers[waiting.pop()].items():
            op = step.ops[producer]
            inside = members | made
            if producer in inside or op.phase != "forward" or storage in step.flow.results:
                continue
            repeated = op.packet == "aten.repeat" or storage in constant
            if repeated and _touches(op, elements) and inside.issuperset(step.forward_readers(producer)):
                made.add(producer)
                waiting.append(producer)
            elif repeated and op.outputs and len(op.outputs[0].shape) == len(step.ops[first].outputs[0].shape):
                waiting.append(producer)  # norms of rows, which ops before compute
                if inside.issuperset(step.forward_readers(producer)):
                    made.add(producer)
    return made


def _touches(op: Op, elements: int) -> bool:
    """Whether an op reads or writes a tensor with a row for each pair."""
    return any(tensor.elements == elements for tensor in (*op.inputs, *op.outputs))


def _seconds_of_gemms(step: Step, pairs: _Pairs, *, trained: bool) -> float:
    """The time of the same with a GEMM: in backward two of them, and as many passes as in forward."""
    batch, rows, others, columns = pairs.sizes
    dtype = step.ops[pairs.op].outputs[0].dtype
    gemms = [(rows, others, columns)]
    if trained:
        gemms += [(rows, columns, others), (others, columns, rows)]
    total_s = sum(step.expected(gemm_op(batch, m, n, k, dtype=dtype)) or 0.0 for m, n, k in gemms)
    size = batch * rows * others * step.ops[pairs.op].outputs[0].item_bytes
    a_pass_s = step.expected_for_work([Access(storage=-1, bytes=size)], [Access(storage=-2, bytes=size)])
    return total_s + (1 + trained) * _PASSES[pairs.kind] * a_pass_s
