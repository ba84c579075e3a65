"""`updates`: the ops of a step that update its parameters."""

from __future__ import annotations

from collections.abc import Hashable

from nearpeak.findings.step import Step
from nearpeak.ops.op import Op
from nearpeak.ops.tensor import Tensor

SINGLE_OPS = 8
"""The number of ops on single tensors from which lists of tensors are worth it."""
UPDATE_FAMILIES = ("pointwise", "optimizer", "movement", "creation", "view")
"""Families that a fused optimizer can do in one pass; norms and GEMMs need their results first."""


def updates(step: Step) -> list[list[int]]:
    """The ops of each update of parameters: of an optimizer, or written by hand in the step.

    Ops belong together if they are at one line, write the same storage, or read or write the same gradient or state;
    not if one reads the parameters that another wrote: an average of the parameters is an update of its own.
    """
    members = [index for index, op in enumerate(step.ops) if op.phase == "optimizer"]
    members += _written_by_hand(step)
    parent = {index: index for index in members}

    def root(index: int) -> int:
        while parent[index] != index:
            parent[index] = parent[parent[index]]
            index = parent[index]
        return index

    related: dict[Hashable, int] = {}
    for index in sorted(members):
        reads, writes = step.touches[index]
        keys: list[Hashable] = [
            storage
            for storage in {*reads, *writes}
            if not is_scalar(step, storage) and (storage in writes or not is_parameter(step, storage))
        ]
        if step.ops[index].source:
            keys.append(step.ops[index].source)
        for key in keys:
            parent[root(index)] = root(related.setdefault(key, index))
    groups: dict[int, list[int]] = {}
    for index in sorted(members):
        groups.setdefault(root(index), []).append(index)
    return list(groups.values())


def _written_by_hand(step: Step) -> list[int]:
    """Ops outside of any optimizer that change parameters in place, and those that compute the change.

    Parameters, and tensors of their shape that are changed by them, such as averages. Only ops on whole parameters
    count: a norm, or a number that depends on the loss, is not part of the update.
    """
    if not step.trains:
        return []
    found: set[int] = set()
    updated: set[int] = set()
    queue: list[tuple[int, tuple[int, ...]]] = []
    for index, op in enumerate(step.ops):
        if op.phase != "forward" or not op.mutated or step.costs[index].family not in UPDATE_FAMILIES:
            continue
        (target, *others) = op.tensors(*op.mutated) or (None,)
        if target is not None and not others and len(target.shape) and _is_updated(step, op, target):
            queue.append((index, target.shape))
            if sum(bool(tensor.shape) for tensor in op.inputs) > 1:
                updated.add(target.storage)
    # Parameters that are only clamped or scaled are not updated by anything.
    queue = [(index, shape) for index, shape in queue if not updated.isdisjoint(step.touches[index].writes)]
    while queue:
        index, shape = queue.pop()
        if index in found:
            continue
        found.add(index)
        for writer in step.flow.producers[index].values():
            op = step.ops[writer]
            if (
                op.phase == "forward"
                and step.costs[writer].family in UPDATE_FAMILIES
                and any(tensor.shape == shape for tensor in op.written)
            ):
                queue.append((writer, shape))
    touched = {storage for index in found for storage in step.flow.read_by[index] if not is_parameter(step, storage)}
    for index, op in enumerate(step.ops):  # states that are changed after they were used
        if op.phase == "forward" and op.mutated and step.costs[index].family in UPDATE_FAMILIES:
            (target, *others) = op.tensors(*op.mutated) or (None,)
            whole = [tensor for tensor in op.inputs if len(tensor.shape)]
            if target is not None and not others and len(whole) > 1 and target.storage in touched:
                found.add(index)
    return sorted(found)


def is_parameter(step: Step, storage: int) -> bool:
    return storage in step.trace.storages and step.trace.storages[storage].kind == "parameter"


def _is_updated(step: Step, op: Op, target: Tensor) -> bool:
    """Whether an op changes a parameter, or what follows the parameters."""
    if is_parameter(step, target.storage):
        return True
    known = step.trace.storages.get(target.storage)
    return (
        known is not None
        and known.kind != "intermediate"
        and any(tensor.shape == target.shape and is_parameter(step, tensor.storage) for tensor in op.inputs)
    )


def is_scalar(step: Step, storage: int) -> bool:
    known = step.trace.storages.get(storage)
    return known is None or known.bytes <= 8
