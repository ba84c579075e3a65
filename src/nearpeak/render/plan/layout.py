"""Words for a training layout, in the order in which people say them."""

from __future__ import annotations

from nearpeak.plan.training.job import Job
from nearpeak.plan.training.layout import Layout

_SHARDING = {"none": "replicated", "zero1": "ZeRO-1", "zero2": "ZeRO-2", "zero3": "ZeRO-3/FSDP", "hsdp": "HSDP"}


def degrees(layout: Layout) -> str:
    """The degrees alone: "tp 4, pp 4 x 5, dp 4"."""
    parts = []
    for name, value in (("tp", layout.tp), ("cp", layout.cp)):
        if value > 1:
            parts.append(f"{name} {value}")
    if layout.pp > 1:
        parts.append(f"pp {layout.pp}" + (f" x {layout.virtual}" if layout.virtual > 1 else ""))
    if layout.ep > 1:
        parts.append(f"ep {layout.ep}" + (f" x etp {layout.etp}" if layout.etp > 1 else ""))
    parts.append(f"dp {layout.dp}")
    return ", ".join(parts)


def sharding(layout: Layout) -> str:
    """How states are spread: "ZeRO-1"."""
    name = _SHARDING[layout.sharding]
    return f"{name} in groups of {layout.shard_group}" if layout.sharding == "hsdp" and layout.shard_group else name


def recompute(layout: Layout) -> str:
    """What is computed again: "none", "full", or the modules."""
    return "full" if "layer" in layout.recompute else "+".join(layout.recompute) or "none"


def described(job: Job) -> str:
    """The whole layout on one line."""
    layout = job.layout
    parts = [
        f"{layout.gpus} GPU{'s' if layout.gpus > 1 else ''}: {degrees(layout)}",
        sharding(layout),
        f"recompute {recompute(layout)}",
        f"microbatch {layout.microbatch} x {job.sequence} tokens",
        f"{layout.microbatches} per step" if layout.microbatches > 1 else "one per step",
    ]
    if layout.schedule != "1f1b":
        parts.append(layout.schedule)
    if layout.offload != "none":
        parts.append(f"{layout.offload} in host memory")
    return ", ".join(parts)
