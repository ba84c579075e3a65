"""A tensor grows by `torch.cat`, which copies all of it to add a little: a KV cache, or results of a loop."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from nearpeak.findings.engine import Waste, rule
from nearpeak.findings.step import Step, shape_text
from nearpeak.ops.cost import Access
from nearpeak.ops.op import Op
from nearpeak.ops.tensor import Tensor
from nearpeak.units import quantity, seconds

_LEAST_GROWN = 8
"""The least ratio of what is copied to what is added."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Growth:
    index: int
    dim: int
    old: Tensor
    added_bytes: float
    across_steps: bool
    """Whether the tensor is from the step before; else an earlier `cat` of this step made it."""


@rule("grown-by-cat", needs=["storages"])
def grown_by_cat(step: Step) -> Iterator[Waste]:
    """`cat`s of a little to a tensor that an earlier `cat` made, in this step or in the one before."""
    growths = list(_growths(step))
    for growth in growths:
        op = step.ops[growth.index]
        took = step.time(growth.index)
        added = Access(storage=-1, bytes=growth.added_bytes)
        after = step.expected_for_work([added], [Access(storage=-2, bytes=growth.added_bytes)], kind="movement")
        read_s = _moved_read_seconds(step, growth)
        after += read_s
        if after >= took:
            continue
        longer = op.outputs[0]
        yield Waste(
            title="A tensor grows by `torch.cat`, which copies all of it each time.",
            op=growth.index,
            gains={growth.index: took - after},
            evidence=f"aten.cat adds {quantity(growth.added_bytes, 'B')} to {quantity(growth.old.bytes, 'B')} of "
            f"{shape_text(growth.old.shape)}, which "
            + ("the step before left" if growth.across_steps else "an earlier cat of the step made")
            + f", in {seconds(took)}.",
            reasoning="Memory that is large enough from the start takes the new part alone, in "
            f"{seconds(after - read_s)}. What reads the tensor reads as much as before"
            + (f", from memory and no longer from the cache: {seconds(read_s)} more." if read_s else "."),
            remedy=_remedy(longer, growth.dim, across_steps=growth.across_steps),
        )


def _moved_read_seconds(step: Step, growth: _Growth) -> float:
    """The time to read what grows, if the next op finds it in a CPU's cache now: without a copy, it reads memory."""
    longer = step.ops[growth.index].outputs[0]
    readers = [reader for reader in step.flow.consumers[growth.index] if step.ops[reader].packet != "aten.cat"]
    if step.machine.kind != "cpu" or not readers or longer.bytes > (step.machine.cache_bytes or 0.0):
        return 0.0
    return step.expected_for_work([Access(storage=-1, bytes=growth.old.bytes)], [], kind="movement")


def _growths(step: Step) -> Iterator[_Growth]:
    made: dict[int, int] = {}
    """The op that made each storage by a `cat`."""
    for index, op in enumerate(step.ops):
        if op.packet != "aten.cat" or not op.outputs or op.phase != "forward":
            continue
        tensors = op.tensors("tensors")
        if len(tensors) >= 2 and op.outputs[0].shape:
            dim = int(op.arguments.get("dim", 0)) % len(op.outputs[0].shape)
            old = max(tensors, key=lambda tensor: tensor.bytes)
            added = sum(tensor.bytes for tensor in tensors if tensor is not old)
            within = old.storage in made
            across = not within and _is_of_step_before(step, index, op, old)
            if old.bytes >= _LEAST_GROWN * added > 0.0 and (across or (within and _can_grow(step, index, made))):
                yield _Growth(index=index, dim=dim, old=old, added_bytes=added, across_steps=across)
        made[op.outputs[0].storage] = index


def _is_of_step_before(step: Step, index: int, op: Op, old: Tensor) -> bool:
    """Whether a tensor is older than the step, the longer one is there for the next step in its place, and ops that
    read it had other shapes in the step before."""
    known = step.trace.storages.get(old.storage)
    if known is None or known.kind != "input" or step.trains or old.storage in step.flow.producers[index]:
        return False
    if old.storage in step.trace.on_host and op.outputs[0].storage not in step.trace.on_host:
        return False
    lives = step.trace.lives.lives if step.trace.lives is not None else ()
    size = step.trace.storages[op.outputs[0].storage].bytes
    outlives = op.outputs[0].storage in step.flow.results or any(
        life.born == index and life.died is None and life.bytes == size for life in lives
    )
    return outlives and any(reader in step.trace.shapes_before for reader in step.flow.consumers[index])


def _can_grow(step: Step, index: int, made: dict[int, int]) -> bool:
    """Whether autograd allows to write the parts into one tensor: nobody reads the parts meanwhile, or no gradient."""
    if not step.trains:
        return True
    op = step.ops[index]
    earlier = {made[tensor.storage] for tensor in op.tensors("tensors") if tensor.storage in made}
    return all(step.forward_readers(member) == [index] for member in earlier)


def _remedy(longer: Tensor, dim: int, *, across_steps: bool) -> str:
    sizes = list(map(str, longer.shape))
    sizes[dim] = "longest"
    part = ", ".join([":"] * dim + ["length:length + new"])
    filled = ", ".join([":"] * dim + [":length + new"])
    written = (
        f"cache = torch.empty({', '.join(sizes)}, ...)  # once, before the first step\n"
        f"cache[{part}] = added                          # in place of torch.cat\n"
        f"read(cache[{filled}])                          # a view, no copy"
    )
    if across_steps:
        return f"{written}\n# transformers: model.generate(..., cache_implementation='static')"
    return (
        f"parts.append(added)             # in the loop\nwhole = torch.cat(parts, dim={dim})  # once, after it; or, if\
 it is read in the loop:\n{written}"
    )
