"""Functions of rows: ops that compute each row of a tensor by itself, from rows that were gathered and from constants.

A frozen model that is asked about minibatches of the same rows, epoch after epoch, computes the same function of each
row again, though no two batches are equal.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import NamedTuple

from nearpeak.findings.equal_values import EqualAlong, equal_along
from nearpeak.findings.step import Step
from nearpeak.findings.value_numbering import ValueNumbers
from nearpeak.ops.op import Op
from nearpeak.ops.tensor import Tensor

_PRODUCTS = {"aten.mm": "self", "aten.addmm": "mat1"}
_COPIES = ("aten.clone", "aten._to_copy")
_NORMS = ("aten.native_layer_norm", "aten._softmax", "aten._log_softmax")
_SUMS = ("aten.sum", "aten.mean")


class _Rows(NamedTuple):
    """What is in a storage: a function of the rows of a tensor that some indices pick."""

    function: Hashable
    indices: Hashable
    source_rows: int
    rows: int


class RowFunction(NamedTuple):
    """Ops that compute one function of rows of one tensor."""

    ops: list[int]
    source_rows: int
    """The rows of that tensor."""
    rows: int
    """Those that the ops compute, together."""


def row_functions(step: Step, numbers: ValueNumbers) -> list[RowFunction]:
    """The functions of rows that forward ops without a backward compute, each at least twice for other rows."""
    if step.trains and not step.trace.derivative_of:
        return []  # not known which of them have one
    equal = equal_along(step)
    known: dict[int, _Rows] = {}
    groups: dict[Hashable, RowFunction] = {}
    for index, op in enumerate(step.ops):
        if step.costs[index].family == "view":
            continue
        found = (
            _function_of(step, numbers, equal, known, index) if op.phase == "forward" and not op.recomputed else None
        )
        for storage in step.touches[index].writes:
            known.pop(storage, None)
        if found is None:
            continue
        known[op.outputs[0].storage] = found
        if _picked(op) is None and index not in step.derivatives and numbers.first[index] == index:
            before = groups.get(found.function, RowFunction([], found.source_rows, 0))
            groups[found.function] = before._replace(ops=[*before.ops, index], rows=before.rows + found.rows)
    return [group for group in groups.values() if len(group.ops) > 1]


def _function_of(
    step: Step, numbers: ValueNumbers, equal: EqualAlong, known: dict[int, _Rows], index: int
) -> _Rows | None:
    op, reads = step.ops[index], dict(numbers.reads[index])
    if len(op.outputs) != 1 and op.packet != "aten.native_layer_norm":
        return None
    if op.mutated or not op.outputs or not op.outputs[0].shape:
        return None
    made = op.outputs[0]
    picked = _picked(op)
    if picked is not None:
        source, name = picked
        return _Rows(("rows", reads["self"], made.dtype), reads[name], source.shape[0], made.shape[0])
    inputs = [(name, tensor) for name, tensor in _named(op) if tensor.storage in known and tensor.shape]
    if not inputs or not _computes_rows(step, equal, index, {name for name, _ in inputs}):
        return None
    parts = {name: known[tensor.storage] for name, tensor in inputs}
    (indices, *others) = {part.indices for part in parts.values()}
    first = next(iter(parts.values()))
    if others or any(tensor.shape[0] != first.rows for _, tensor in inputs) or made.shape[0] != first.rows:
        return None
    key = tuple(
        (name, (parts[name].function, tensor_shape(op, name)) if name in parts else value)
        for name, value in reads.items()
    )
    return _Rows((op.name, key), indices, first.source_rows, first.rows)


def tensor_shape(op: Op, name: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The sizes and strides of the rows of an argument."""
    tensor = op.tensor(name)
    return tensor.shape[1:], tensor.strides


def _named(op: Op) -> Iterator[tuple[str, Tensor]]:
    for name, value in op.arguments.items():
        if isinstance(value, Tensor):
            yield name, value


def _picked(op: Op) -> tuple[Tensor, str] | None:
    """The tensor of which an op picks rows, and the argument that says which."""
    if op.packet == "aten.index_select" and op.arguments.get("dim") == 0:
        return op.tensor("self"), "index"
    indices = op.arguments.get("indices")
    if op.packet == "aten.index" and isinstance(indices, (tuple, list)) and len(indices) == 1:
        (rows,) = indices
        if isinstance(rows, Tensor) and rows.dtype == "int64" and len(rows.shape) == 1:
            return op.tensor("self"), "indices"
    return None


def _computes_rows(step: Step, equal: EqualAlong, index: int, of_rows: set[str]) -> bool:
    """Whether an op computes each row from the same rows of these arguments, and from others as a whole."""
    op, rank = step.ops[index], len(step.ops[index].outputs[0].shape)
    if op.packet in _PRODUCTS:
        return of_rows == {_PRODUCTS[op.packet]}
    if op.packet in _NORMS:
        return of_rows in ({"input"}, {"self"}) and rank > 1
    if op.packet in _SUMS:
        given = op.arguments.get("dim")
        dims = given if isinstance(given, (tuple, list)) else (given,)
        full = len(op.inputs[0].shape)
        return bool(dims) and all(isinstance(dim, int) and dim % full for dim in dims)
    if (step.costs[index].family == "pointwise" or op.packet in _COPIES) and len(op.inputs) == len(list(_named(op))):
        read = zip(_named(op), equal.read[index], strict=True)
        return all(len(op.tensor(name).shape) == rank for name in of_rows) and all(
            len(tensor.shape) < rank or 0 in dims for (name, tensor), dims in read if name not in of_rows
        )
    return False
