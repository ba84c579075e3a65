"""The step allocates memory from the driver after warm-up: torch's caching allocator does not serve it."""

from __future__ import annotations

from collections.abc import Iterator

from nearpeak.findings.engine import Waste, rule
from nearpeak.findings.step import Step, is_source_line
from nearpeak.profiles.idle import IdleCause
from nearpeak.units import seconds


@rule("allocator-growth", needs=["host"])
def allocator_growth(step: Step) -> Iterator[Waste]:
    """Idle time in allocation calls of the driver, in a step after warm-up."""
    causes = step.idle_causes("allocator")
    if not causes:
        return
    idle_s = sum(cause.seconds for cause in causes)
    largest = max(causes, key=lambda cause: cause.seconds)
    named = [cause for cause in causes if is_source_line(cause.where)]
    calls = ", ".join(f"{cause.count} of {cause.what}" for cause in causes[:4])
    title, remedy = _form(causes)
    yield Waste(
        title=title,
        op=None,
        source=max(named, key=lambda cause: cause.seconds).where if named else "",
        idle={"allocator": idle_s},
        evidence=f"Calls of the driver in a step after warm-up: {calls}. The device was idle for {seconds(idle_s)}, "
        f"{seconds(largest.seconds)} of it in {largest.what}.",
        reasoning="Memory from the cache of torch's allocator needs no call of the driver: all of it is saved.",
        remedy=remedy,
    )


def _form(causes: list[IdleCause]) -> tuple[str, str]:
    """Title and remedy by the calls that take longest: pinned memory, freed memory, or growing memory."""
    by_kind = {"host": 0.0, "device": 0.0}
    for cause in causes:
        by_kind["host" if "Host" in cause.what else "device"] += cause.seconds
    if by_kind["host"] > by_kind["device"]:
        return (
            "Pinned memory is allocated during the step.",
            "buffer = torch.empty(shape, pin_memory=True)   # once, before the first step\n"
            "buffer.copy_(batch); x = buffer.to(device, non_blocking=True)\n"
            "Or use DataLoader(..., pin_memory=True), which copies in a thread of its own.",
        )
    if any("Free" in cause.what or "Release" in cause.what or "Unmap" in cause.what for cause in causes):
        return (
            "Memory is freed to the driver and allocated again in the step.",
            "Leave torch.cuda.empty_cache() out of the step. If it is not called, memory is full, and the allocator "
            "frees its cache: set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, or make the "
            "batch smaller.",
        )
    return (
        "The step allocates more memory from the driver.",
        "Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True. Keep shapes the same from step to step: pad to a few "
        "lengths, and run the largest shape first. Detach what is kept: losses.append(loss.detach()).",
    )
