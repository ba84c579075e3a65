"""A forward runs a second time in the backward pass to save memory, and memory is plentiful."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nearpeak.findings.engine import Waste, rule
from nearpeak.findings.step import Step
from nearpeak.units import GIB, seconds

FULL = 0.85
"""The share of the memory that a step may need without recomputing: the rest is for what the allocator cannot use."""


@rule("needless-recompute", needs=["storages", "memory"])
def needless_recompute(step: Step) -> Iterator[Waste]:
    """Ops of checkpointed forwards, where all that they make would fit into memory at once."""
    memory = step.profile.memory
    if memory is None or memory.capacity_bytes is None:
        return
    again = [index for index, op in enumerate(step.ops) if op.recomputed]
    kept = _kept_bytes(step, again)
    needed = memory.peak_bytes + kept
    if not again or needed > FULL * memory.capacity_bytes:
        return
    took = step.seconds(again)
    yield Waste(
        title="A forward runs a second time in the backward pass, and there is memory enough to keep its results.",
        at=_main(step, again),
        gains={index: step.measured[index].measured_s for index in again},
        evidence=f"{len(again)} ops run again and take {seconds(took)}. The step needs "
        f"{memory.peak_bytes / GIB:.3g} GiB of {memory.capacity_bytes / GIB:.3g} GiB at its peak.",
        reasoning=f"Kept, what they make is {kept / GIB:.3g} GiB more at the most: {needed / GIB:.3g} GiB, under "
        f"{FULL:.0%} of the memory. The ops then run once.",
        remedy="Call the block itself, without torch.utils.checkpoint.checkpoint around it "
        "(transformers: model.gradient_checkpointing_disable()).",
    )


def _main(step: Step, again: Sequence[int]) -> int:
    """An op of the line that takes longest: one setting changes all lines."""
    lines: dict[str, list[int]] = {}
    for index in again:
        lines.setdefault(step.ops[index].source, []).append(index)
    return max(lines.values(), key=step.seconds)[0]


def _kept_bytes(step: Step, again: Sequence[int]) -> float:
    """What the recomputed ops write: the most that the backward pass would have to find in memory."""
    written = {storage for index in again for storage in step.flow.written_by[index]}
    return sum(step.trace.storages[storage].bytes for storage in written)
