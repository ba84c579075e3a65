"""Liveness: the ops of backward passes whose results lead to nothing but gradients that nobody reads.

A gradient is unread if no op but the additions of autograd touches it, no optimizer takes a step with it and no hook
watches it, until it is dropped or filled with zeros; or if it stays, in a step that updates parameters, and no
optimizer of the program has its parameter. A gradient that stays otherwise may be read in a later step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nearpeak.findings.loops import ADDITIONS
from nearpeak.findings.step import Step
from nearpeak.ops.op import AddedGradient, Op

_FILLS = ("zero_", "fill_", "_foreach_zero_")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadWork:
    """Ops of backward passes that nobody needs."""

    gradients: Sequence[AddedGradient]
    """Those that nobody reads."""
    ops: frozenset[int]
    """Ops of which nothing is needed."""
    parts: Mapping[int, frozenset[int]]
    """Ops of which some results are not needed, with the storages of these."""


def dead_work(step: Step) -> DeadWork:
    """What backward passes of a step do for gradients that nobody reads."""
    gradients = _unread_gradients(step)
    if not gradients:
        return DeadWork(gradients=(), ops=frozenset(), parts={})
    ends: dict[int, list[int]] = {}
    for gradient in gradients:
        ends.setdefault(gradient.storage, []).append(gradient.op)
    left = left_storages(step)
    dead: set[int] = set()
    parts: dict[int, frozenset[int]] = {}
    for index in range(len(step.ops) - 1, -1, -1):
        written = step.touches[index].writes
        if step.ops[index].phase != "backward" or not written:
            continue
        unneeded = {
            storage
            for storage in written
            if (storage in ends or (storage not in step.flow.results and (index, storage) not in left))
            and _is_unneeded(step, index, storage, dead, ends.get(storage, ()))
        }
        if len(unneeded) == len(written):
            dead.add(index)
        elif unneeded and step.ops[index].arguments.get("output_mask"):
            parts[index] = frozenset(unneeded)
    return DeadWork(gradients=gradients, ops=frozenset(dead), parts=parts)


def without_results(op: Op, storages: frozenset[int]) -> Op | None:
    """An op with an `output_mask` that does not compute some of its results; None if they are not known by the mask."""
    mask = tuple(op.arguments["output_mask"])
    wanted = [place for place, is_wanted in enumerate(mask) if is_wanted]
    if len(op.outputs) == len(mask):
        places: Sequence[int] = range(len(mask))
    elif len(op.outputs) == len(wanted):
        places = wanted
    else:
        return None
    kept = [
        (place, output)
        for place, output in zip(places, op.outputs, strict=True)
        if mask[place] and output.storage not in storages
    ]
    new_mask = tuple(place in {place for place, _ in kept} for place in range(len(mask)))
    return dataclasses.replace(
        op, arguments={**op.arguments, "output_mask": new_mask}, outputs=tuple(output for _, output in kept)
    )


def _unread_gradients(step: Step) -> list[AddedGradient]:
    additions = {(gradient.op, gradient.storage) for gradient in step.trace.gradients}
    first_op: dict[int, AddedGradient] = {}
    for gradient in step.trace.gradients:
        first_op.setdefault(gradient.leaf, gradient)
    updates = _updates_parameters(step)
    unread = []
    for gradient in step.trace.gradients:
        touching = [index for index in step.touched_by.get(gradient.storage, ()) if index > gradient.op]
        fill = next((index for index in touching if is_fill(step, index)), None)
        until = [index for index in touching if fill is None or index < fill]
        if gradient.is_watched or any((index, gradient.storage) not in additions for index in until):
            continue
        steps = [count for count in gradient.optimizer_steps or () if count > gradient.op]
        if gradient.is_stepped and steps and (fill is None or steps[0] <= fill):
            continue
        if fill is not None or not gradient.is_left:
            unread.append(gradient)
        elif gradient.optimizer_steps is None:
            if updates:
                unread.append(gradient)
        elif (
            gradient.optimizer_steps
            and gradient.optimizer_steps[0] > first_op[gradient.leaf].op
            and _began_without(step, first_op[gradient.leaf])
        ):  # It is there when the step ends. The next step drops it unread if this one dropped what it found.
            unread.append(gradient)
    return unread


def is_fill(step: Step, index: int) -> bool:
    """Whether an op fills memory without reading it."""
    return not step.costs[index].reads and step.ops[index].packet.rpartition(".")[2] in _FILLS


def _began_without(step: Step, first: AddedGradient) -> bool:
    """Whether a parameter had no gradient, or zeros, when its first one of the step was added."""
    return first.was_none or is_fill(step, step.touched_by[first.storage][0])


def _updates_parameters(step: Step) -> bool:
    return any(
        op.phase == "optimizer"
        or (
            op.phase == "forward"
            and any(step.trace.storages[tensor.storage].kind == "parameter" for tensor in op.tensors(*op.mutated))
        )
        for op in step.ops
    )


def left_storages(step: Step) -> set[tuple[int, int]]:
    """Ops, and storages that they allocated and that are there when the step ends, for something else than to be freed
    in the next one."""
    if step.trace.lives is None:
        return set()
    dropped = frozenset() if step.trace.next_step is None else step.trace.next_step.dropped
    left = {(life.born, life.bytes) for life in step.trace.lives.lives if life.died is None}
    return {
        (index, tensor.storage)
        for index, op in enumerate(step.ops)
        for tensor in op.outputs
        if tensor.storage not in dropped and (index, step.trace.storages[tensor.storage].bytes) in left
    }


def _is_unneeded(step: Step, index: int, storage: int, dead: set[int], ends: Sequence[int]) -> bool:
    """Whether all that comes of what an op wrote is dead: ops, or a gradient that ends here."""
    touching = [after for after in step.touched_by[storage] if after > index]
    until = next((after for after in touching if is_fill(step, after)), len(step.ops))
    touching = [after for after in touching if after < until]
    is_end = any(index <= end < until for end in ends)
    return all(after in dead for after in touching) and (bool(touching) or is_end)


def gradient_sums(step: Step) -> tuple[set[int], set[int]]:
    """The ops that add to the gradient of a parameter, and those whose results they add or that write the first one."""
    added = {gradient.op for gradient in step.trace.gradients if step.ops[gradient.op].packet in ADDITIONS}
    stored = {gradient.op for gradient in step.trace.gradients} - added
    return added, stored | {producer for index in added for producer in step.flow.producers[index].values()} - added
