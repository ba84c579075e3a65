"""Value numbering: tensors with the same values, since the same op computed them from the same inputs.

Numbers go on from a step to the one after it, if both were traced, so that what every step computes again has the same
number twice.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from nearpeak.bound.dataflow import touches_of
from nearpeak.findings.step import Step
from nearpeak.ops.cost import Cost, costs_of, registered
from nearpeak.ops.op import Op, name_without_origin
from nearpeak.ops.tensor import Tensor

_NOT_REPEATABLE = frozenset({"random", "view", "unknown", "collective", "optimizer", "declared"})
"""Families whose results differ between calls, or are not known well enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueNumbers:
    """By the index of the op."""

    reads: Sequence[tuple[tuple[str, Any], ...]]
    """The arguments of each op by name, with value numbers for tensors: equal for two ops with equal arguments. What a
    tensor is replaced by begins with the number of its memory."""
    first: Sequence[int]
    """The earliest op with the same name and arguments; the op itself if there is none."""
    writers: dict[int, list[int]]
    """The ops that write each storage, in order."""
    next_step: frozenset[int] = frozenset()
    """Ops whose results the next step computes again; of those that it computes elsewhere, the ops there."""
    carried: frozenset[int] = frozenset()
    """Ops of these that compute what other ops of the step before computed."""
    on_data: frozenset[int] = frozenset()
    """Ops whose results depend on random numbers, or on tensors from outside of the step that are neither parameters
    nor buffers."""
    new_data: bool = False
    """Whether the next step has other tensors of that kind. Where it has none, a program that measures itself, or that
    was shortened for a profile, runs on the same batch again and again."""


def number_values(step: Step) -> ValueNumbers:
    """Numbers the values of a step. Memory that is written gets a new number, unless an equal op ran before."""
    following = step.trace.next_step
    later = () if following is None else following.ops
    ops = (*step.ops, *later)
    costs = (*step.costs, *costs_of(later))
    storages = {**step.trace.storages, **({} if following is None else following.storages)}
    tables = _digests(step, step.trace.storages) & _digests(step, {} if following is None else following.storages)
    """What both steps make anew, and without an op: of lists of numbers, or of NumPy's arrays."""
    values: dict[int, Hashable] = {}
    """The value number of each storage."""
    from_data: set[int] = set()
    """Storages whose values depend on data."""
    known: dict[Hashable, int] = {}
    reads: list[tuple[tuple[str, Any], ...]] = []
    first: list[int] = []
    writers: dict[int, list[int]] = {}
    on_data: set[int] = set()
    seen_data: tuple[dict[int, set[Hashable]], dict[int, set[Hashable]]] = ({}, {})
    """The tensors from outside that forward passes of both steps read, by storage."""
    draws = False
    """Whether the step draws a batch, or which rows belong to it."""
    written: set[int] = set()
    """Storages that this step has written."""

    def value_of(storage: int) -> Hashable:
        digest = step.trace.contents.get(storage)
        return values.get(storage, ("before", storage) if digest is None else ("contents", digest))

    def key_of(value: Any) -> Hashable:
        if isinstance(value, Tensor):
            return (value_of(value.storage), value.shape, value.strides, value.dtype, value.offset)
        if isinstance(value, (tuple, list)):
            return tuple(key_of(item) for item in value)
        return (type(value).__name__, value if isinstance(value, Hashable) else repr(value))

    def is_data(storage: int, *, is_next: bool) -> bool:
        """Whether memory that the step has not written is data: not a state of the program, nor a table in its code."""
        if step.trace.contents.get(storage) in tables:
            return False
        kind = storages[storage].kind if storage in storages else "input"
        return kind == "input" or (kind == "intermediate" and is_next and storage in step.trace.storages)

    for index, op in enumerate(ops):
        if index == len(step.ops):
            written = set()
        is_next = index >= len(step.ops)
        arguments = tuple((name, key_of(value)) for name, value in op.arguments.items())
        writes = _writes(op, costs[index])
        if writes:
            for tensor in op.inputs:
                if tensor.storage not in written and is_data(tensor.storage, is_next=is_next):
                    from_data.add(tensor.storage)
                    if op.phase == "forward" and tensor.elements > 1:
                        seen_data[is_next].setdefault(tensor.storage, set()).add(key_of(tensor))
        is_deterministic = _is_deterministic(op, costs[index])
        if not is_next and _draws_data(op):
            draws = True
        if not is_deterministic or any(tensor.storage in from_data for tensor in op.inputs):
            on_data.add(index)
        first_index = index
        if is_deterministic:
            first_index = known.setdefault((op.name, arguments, op.phase), index)
        reads.append(arguments)
        first.append(first_index)
        for storage_number in writes:
            written.add(storage_number)
            (from_data.add if index in on_data else from_data.discard)(storage_number)
            values[storage_number] = (first_index, _output_position(op, storage_number))
            if not is_next:
                writers.setdefault(storage_number, []).append(index)
            for data in seen_data:  # a sum that every step adds to is no new data
                data.pop(storage_number, None)
    count = len(step.ops)
    repeated, carried = _recurring(ops, first, count)
    tensors, next_tensors = ({key for keys in data.values() for key in keys} for data in seen_data)
    return ValueNumbers(
        reads=reads[:count],
        first=first[:count],
        writers=writers,
        next_step=frozenset(index for index in range(count) if first[index] in repeated) | carried,
        carried=carried,
        on_data=frozenset(index for index in on_data if index < count),
        new_data=draws or bool(next_tensors - tensors),
    )


def _recurring(ops: Sequence[Op], first: Sequence[int], count: int) -> tuple[set[int], frozenset[int]]:
    """The ops of this step whose results the next one computes at the same place; and those at whose place the next
    step computes what other ops of this one did, as they themselves did for the step before."""
    repeated: set[int] = set()
    carried: set[int] = set()
    for place, (op, earlier) in enumerate(zip(ops[count:], first[count:], strict=True)):
        is_alike = place < count and (ops[place].name, ops[place].source) == (op.name, op.source)
        if is_alike and earlier < count and first[place] == place != earlier:
            carried.add(place)
        else:
            repeated.add(earlier)
    return repeated, frozenset(carried)


def _digests(step: Step, storages: Collection[int]) -> set[str]:
    return {digest for storage, digest in step.trace.contents.items() if storage in storages}


def reusable(numbers: ValueNumbers, candidates: Collection[int], *, first_stays: bool) -> set[int]:
    """Those of some repeated ops whose results can be kept: only such ops write to that memory afterwards.

    Args:
        numbers: Of the step.
        candidates: Indices of ops.
        first_stays: Whether the first op with the same results still runs, so that nothing else may write to its
            results either.
    """
    members = set(candidates)
    written_by = _written_storages(numbers)
    while True:
        stand_ins = {numbers.first[index] for index in members} if first_stays else members
        lost = {
            index
            for index in members
            for op, allowed in ((index, members), *([(numbers.first[index], stand_ins)] if first_stays else ()))
            for storage in written_by.get(op, ())
            if any(writer > op and writer not in allowed for writer in numbers.writers[storage])
        }
        if not lost:
            return members
        members -= lost


def _written_storages(numbers: ValueNumbers) -> dict[int, list[int]]:
    written: dict[int, list[int]] = {}
    for storage, writers in numbers.writers.items():
        for index in writers:
            written.setdefault(index, []).append(storage)
    return written


def _writes(op: Op, cost: Cost) -> Iterator[int] | tuple[int, ...]:
    """The storages that an op writes, also one in host memory, whose work is none of the device's.

    A view in place, such as `transpose_`, changes the sizes of a tensor, and none of its elements.
    """
    if op.origin != "host" and cost.family not in ("view", "creation"):
        return touches_of(op, cost).writes
    inputs = {tensor.storage for tensor in op.inputs}
    made = [tensor.storage for tensor in op.outputs if tensor.storage not in inputs]
    mutated = () if cost.family == "view" else op.tensors(*op.mutated)
    return tuple(dict.fromkeys((*made, *(tensor.storage for tensor in mutated))))


def _is_deterministic(op: Op, cost: Cost) -> bool:
    """Whether what an op writes follows from its arguments."""
    if op.recomputed or op.arguments.get("dropout_p") or not (op.outputs or op.mutated):
        return False
    if op.origin == "host":
        return name_without_origin(op.name) not in _random_operators()
    return cost.family not in _NOT_REPEATABLE


def _draws_data(op: Op) -> bool:
    """Whether an op draws random numbers that are no noise for another tensor."""
    name = name_without_origin(op.name).removeprefix("aten.").partition(".")[0]
    return name in _random_operators() and not op.inputs and any(tensor.elements > 1 for tensor in op.outputs)


@cache
def _random_operators() -> frozenset[str]:
    """Names of operators that draw random numbers, without their overloads."""
    names = (name for name, formula in registered().items() if formula.__module__.endswith(".random"))
    return frozenset(name.split(".")[1] for name in names)


def _output_position(op: Op, storage: int) -> int:
    """Which output of an op a storage is; negative for a mutated argument, of which there may be several."""
    outputs = [tensor.storage for tensor in op.outputs]
    if storage in outputs:
        return outputs.index(storage)
    mutated = [tensor.storage for tensor in op.tensors(*op.mutated)]
    return -1 - (mutated.index(storage) if storage in mutated else len(mutated))
