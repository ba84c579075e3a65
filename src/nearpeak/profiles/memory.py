"""`PeakMemory`: the memory that a step needs at its peak, by kind, and the op at the peak."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from nearpeak._records import Amount
from nearpeak.ops.lifetimes import Category, Lifetime, Lifetimes
from nearpeak.ops.op import Op


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakMemory:
    """The memory of a device at the op during which tensors need most. Tensors that share memory count once.

    Parameters include the buffers of modules. Activations are all other tensors that ops of the step use: saved for the
    backward pass, inputs, temporaries.
    """

    device: str
    """As torch names it: "cpu", "cuda:0"."""
    capacity_bytes: Amount | None
    peak_bytes: Amount
    """The sum of the following, without `unused_bytes`."""
    parameters_bytes: Amount
    gradients_bytes: Amount
    optimizer_bytes: Amount
    activations_bytes: Amount
    other_bytes: Amount | None = None
    """Allocated and used by no op of the step: other tensors, libraries, rounding. None without a caching
    allocator."""
    workspace_bytes: Amount | None = None
    """Temporary memory inside of ops, at most: the peak of the allocator minus what was allocated at this op. None
    without a caching allocator."""
    unused_bytes: Amount | None = None
    """Reserved by the caching allocator and not allocated, at its peak. None without one."""
    op: str = ""
    """The op at the peak; its phase, module and line follow."""
    phase: str = ""
    module: str = ""
    source: str = ""


def peak_memory(lives: Lifetimes, ops: Sequence[Op]) -> PeakMemory | None:
    """The peak over the ops of a trace; None without ops."""
    if not ops:
        return None
    peak = _peak_op(lives.lives, len(ops))
    sums: dict[Category, float] = {"parameters": 0.0, "gradients": 0.0, "optimizer": 0.0, "activations": 0.0}
    for life in lives.lives:
        if life.born <= peak and (life.died is None or life.died >= peak):
            sums[life.category] += life.bytes
    known = sum(sums.values())
    level = lives.levels.get(peak)
    other_bytes = None if level is None else max(0.0, level - known)
    highest = known + (other_bytes or 0.0)
    workspace = None if lives.peak_bytes is None else max(0.0, lives.peak_bytes - highest)
    total = highest + (workspace or 0.0)
    op = ops[peak]
    return PeakMemory(
        device=lives.device,
        capacity_bytes=lives.capacity_bytes,
        peak_bytes=total,
        parameters_bytes=sums["parameters"],
        gradients_bytes=sums["gradients"],
        optimizer_bytes=sums["optimizer"],
        activations_bytes=sums["activations"],
        other_bytes=other_bytes,
        workspace_bytes=workspace,
        unused_bytes=None if lives.reserved_bytes is None else max(0.0, lives.reserved_bytes - total),
        op=op.name,
        phase=op.phase,
        module=op.module,
        source=op.source,
    )


def _peak_op(lives: Sequence[Lifetime], ops: int) -> int:
    """The first op during which the live tensors are largest."""
    changes = [0.0] * (ops + 1)
    for life in lives:
        if life.died is None or life.died >= 0:
            changes[min(max(life.born, 0), ops)] += life.bytes
            if life.died is not None:
                changes[min(life.died + 1, ops)] -= life.bytes
    levels = list(accumulate(changes[:ops]))
    return max(range(ops), key=levels.__getitem__)
