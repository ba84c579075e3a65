"""`numbered`: which tensors of a step hold the same numbers, because the same op made them of the same inputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from nearpeak.findings.step import Step
from nearpeak.ops.op import Op
from nearpeak.ops.tensor import Tensor

_NOT_REPEATABLE = frozenset({"random", "creation", "view", "unknown", "collective", "optimizer", "declared"})
"""Families of ops whose results differ, whose results are wanted apart, or of which not enough is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueNumbers:
    """What ops read, and which of them do again what an earlier one did. By the index of the op."""

    reads: Sequence[Hashable]
    """What each op is given: the same for two ops that have the same arguments, numbers in tensors included."""
    first: Sequence[int]
    """The earliest op with the same name, arguments and numbers; the op itself where there is none."""


def number_values(step: Step) -> ValueNumbers:
    """In one pass. Memory that is written gets new numbers, unless the same was computed before."""
    held: dict[int, Hashable] = {}
    writes = Counter(storage for touched in step.touches for storage in touched.writes)
    known: dict[Hashable, int] = {}
    reads: list[Hashable] = []
    first: list[int] = []
    for index, op in enumerate(step.ops):
        given = tuple((name, _value_key(value, held)) for name, value in op.arguments.items())
        reads.append(given)
        again = index
        if _is_deterministic(step, index, op) and all(writes[tensor.storage] == 1 for tensor in op.outputs):
            again = known.setdefault((op.name, given, op.phase), index)
        first.append(again)
        for storage in step.touches[index].writes:
            held[storage] = (again, _output_position(op, storage))
    return ValueNumbers(reads=reads, first=first)


def _is_deterministic(step: Step, index: int, op: Op) -> bool:
    """Whether the results of an op follow from what it is given, and are in memory of their own."""
    inputs = {tensor.storage for tensor in op.inputs}
    return (
        step.costs[index].family not in _NOT_REPEATABLE
        and bool(inputs)
        and not op.mutated
        and not op.recomputed
        and not op.arguments.get("dropout_p")
        and bool(op.outputs)
        and all(tensor.storage not in inputs for tensor in op.outputs)
    )


def _output_position(op: Op, storage: int) -> int:
    """Which of an op's results a storage is; one that it mutates is none."""
    return next((place for place, tensor in enumerate(op.outputs) if tensor.storage == storage), -1 - storage)


def _value_key(value: Any, held: dict[int, Hashable]) -> Hashable:
    if isinstance(value, Tensor):
        number = held.get(value.storage, ("before", value.storage))
        return (number, value.shape, value.strides, value.dtype, value.offset)
    if isinstance(value, (tuple, list)):
        return tuple(_value_key(item, held) for item in value)
    return (type(value).__name__, value if isinstance(value, Hashable) else repr(value))
