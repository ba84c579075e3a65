"""The step asks the driver for memory, although it ran before: the cache of torch's allocator does not serve it."""

from __future__ import annotations

from collections.abc import Iterator

from nearpeak.findings.engine import Waste, rule
from nearpeak.findings.step import Step, is_source_line
from nearpeak.profiles.idle import IdleCause
from nearpeak.units import seconds


@rule("allocator-growth", needs=["host"])
def allocator_growth(step: Step) -> Iterator[Waste]:
    """Idle time in calls of the driver for memory, in a step after the first ones."""
    found = step.idle_causes("allocator")
    if not found:
        return
    idle_s = sum(cause.seconds for cause in found)
    most = max(found, key=lambda cause: cause.seconds)
    named = [cause for cause in found if is_source_line(cause.where)]
    calls = ", ".join(f"{cause.count} of {cause.what}" for cause in found[:4])
    title, remedy = _form(found)
    yield Waste(
        title=title,
        at=None,
        source=max(named, key=lambda cause: cause.seconds).where if named else "",
        idle={"allocator": idle_s},
        evidence=f"Calls of the driver in a step that ran before: {calls}. The device was idle for {seconds(idle_s)}, "
        f"{seconds(most.seconds)} of it in {most.what}.",
        reasoning="Memory that torch's allocator keeps is given out without a call of the driver: all of it is saved.",
        remedy=remedy,
    )


def _form(found: list[IdleCause]) -> tuple[str, str]:
    """What is wrong, by the calls that took most: pinned memory, memory given back, or more and more memory."""
    by_kind = {"host": 0.0, "device": 0.0}
    for cause in found:
        by_kind["host" if "Host" in cause.what else "device"] += cause.seconds
    if by_kind["host"] > by_kind["device"]:
        return (
            "Pinned memory is allocated during the step.",
            "kept = torch.empty(shape, pin_memory=True)   # once, before the first step\n"
            "kept.copy_(batch); x = kept.to(device, non_blocking=True)\n"
            "Or let DataLoader(..., pin_memory=True) do it, in a thread of its own.",
        )
    if any("Free" in cause.what or "Release" in cause.what or "Unmap" in cause.what for cause in found):
        return (
            "Memory goes back to the driver and is asked for again in the step.",
            "Leave torch.cuda.empty_cache() out of the step. Where nobody calls it, memory is full, and the allocator "
            "frees what it keeps in order to go on: set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, or make the "
            "batch smaller.",
        )
    return (
        "The step asks the driver for more memory.",
        "Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True. Keep shapes the same from step to step: pad to a few "
        "lengths, and run the largest shape first. Detach what is kept: losses.append(loss.detach()).",
    )
