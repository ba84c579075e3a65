"""Activation checkpointing recomputes a forward, although there is enough memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nearpeak.findings.engine import Waste, rule
from nearpeak.findings.step import FULL_MEMORY, Step
from nearpeak.units import GIB, seconds


@rule("needless-recompute", needs=["storages", "memory"])
def needless_recompute(step: Step) -> Iterator[Waste]:
    """Ops of checkpointed forwards whose results would all fit into memory."""
    memory = step.profile.memory
    if memory is None or memory.capacity_bytes is None:
        return
    recomputed = [index for index, op in enumerate(step.ops) if op.recomputed]
    saved_bytes = _saved_bytes(step, recomputed)
    needed = memory.peak_bytes + saved_bytes
    if not recomputed or needed > FULL_MEMORY * memory.capacity_bytes:
        return
    took = step.seconds(recomputed)
    yield Waste(
        title="A forward is recomputed in the backward pass, although there is enough memory to keep its results.",
        op=_main(step, recomputed),
        gains={index: step.time(index) for index in recomputed},
        evidence=f"{len(recomputed)} ops are recomputed and take {seconds(took)}. The step needs "
        f"{memory.peak_bytes / GIB:.3g} GiB of {memory.capacity_bytes / GIB:.3g} GiB at its peak.",
        reasoning=f"Their results take {saved_bytes / GIB:.3g} GiB more at most: {needed / GIB:.3g} GiB, under "
        f"{FULL_MEMORY:.0%} of the memory. Each op then runs once.",
        remedy="Call the block itself, without torch.utils.checkpoint.checkpoint around it "
        "(transformers: model.gradient_checkpointing_disable()).",
    )


def _main(step: Step, recomputed: Sequence[int]) -> int:
    """An op of the line with the longest time: one setting changes all lines."""
    lines: dict[str, list[int]] = {}
    for index in recomputed:
        lines.setdefault(step.ops[index].source, []).append(index)
    return max(lines.values(), key=step.seconds)[0]


def _saved_bytes(step: Step, recomputed: Sequence[int]) -> float:
    """The bytes that the recomputed ops write: the most that would have to be kept for the backward pass."""
    written = {storage for index in recomputed for storage in step.flow.written_by[index]}
    return sum(step.trace.storages[storage].bytes for storage in written)
