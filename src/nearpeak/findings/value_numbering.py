"""Value numbering: tensors of a step with the same values, since the same op computed them from the same inputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from nearpeak.findings.step import Step
from nearpeak.ops.op import Op
from nearpeak.ops.tensor import Tensor

_NOT_REPEATABLE = frozenset({"random", "creation", "view", "unknown", "collective", "optimizer", "declared"})
"""Families whose results differ between calls, must not be shared, or are not known well enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueNumbers:
    """By the index of the op."""

    reads: Sequence[Hashable]
    """The arguments of each op with value numbers for tensors: equal for two ops with equal arguments."""
    first: Sequence[int]
    """The earliest op with the same name and arguments; the op itself if there is none."""


def number_values(step: Step) -> ValueNumbers:
    """Numbers the values of a step. Memory that is written gets a new number, unless an equal op ran before."""
    values: dict[int, Hashable] = {}
    """The value number of each storage."""
    writes = Counter(storage for touched in step.touches for storage in touched.writes)
    known: dict[Hashable, int] = {}
    reads: list[Hashable] = []
    first: list[int] = []
    for index, op in enumerate(step.ops):
        arguments = tuple((name, _value_key(value, values)) for name, value in op.arguments.items())
        reads.append(arguments)
        first_index = index
        if _is_deterministic(step, index, op) and all(writes[tensor.storage] == 1 for tensor in op.outputs):
            first_index = known.setdefault((op.name, arguments, op.phase), index)
        first.append(first_index)
        for storage in step.touches[index].writes:
            values[storage] = (first_index, _output_position(op, storage))
    return ValueNumbers(reads=reads, first=first)


def _is_deterministic(step: Step, index: int, op: Op) -> bool:
    """Whether the results of an op follow from its arguments, and are in memory of their own."""
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
    """Which output of an op a storage is; negative for a mutated argument."""
    return next((place for place, tensor in enumerate(op.outputs) if tensor.storage == storage), -1 - storage)


def _value_key(value: Any, values: dict[int, Hashable]) -> Hashable:
    if isinstance(value, Tensor):
        number = values.get(value.storage, ("before", value.storage))
        return (number, value.shape, value.strides, value.dtype, value.offset)
    if isinstance(value, (tuple, list)):
        return tuple(_value_key(item, values) for item in value)
    return (type(value).__name__, value if isinstance(value, Hashable) else repr(value))
