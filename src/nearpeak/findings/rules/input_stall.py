"""The device is idle because a data loader does not have the next batch ready."""

from __future__ import annotations

import math
from collections.abc import Iterator

from nearpeak.findings.engine import Waste, rule
from nearpeak.findings.step import Step, is_source_line
from nearpeak.profiles.idle import WORKERS_STARTED
from nearpeak.units import seconds

HANDOVER = 2e-4
"""Seconds to receive a batch from a worker: a message, and mapped memory."""
MOST_WORKERS = 16


@rule("input-stall", needs=["host"])
def input_stall(step: Step) -> Iterator[Waste]:
    """Idle time in a data loader, beyond the time to receive a batch from a worker."""
    stalls = [cause for cause in step.idle_causes("input") if cause.what != WORKERS_STARTED]
    idle_s = sum(cause.seconds for cause in stalls)
    batches = sum(cause.count for cause in stalls)
    saving = idle_s - batches * HANDOVER
    if saving <= 0.0:
        return
    rest_s = max(step.profile.wall_s - idle_s, 1e-9)
    has_workers = any("with workers" in cause.what for cause in stalls)
    places = sorted((cause for cause in stalls if is_source_line(cause.where)), key=lambda cause: -cause.seconds)
    asked_at = places[0].where if places else ""
    yield Waste(
        title="The device waits for a data loader.",
        op=None,
        source=step.line_that_writes("DataLoader") or asked_at,
        idle={"input": saving},
        causes=tuple(stalls),
        evidence=f"The loader was asked for {batches} {'batch' if batches == 1 else 'batches'}"
        + (f" at {asked_at}" if asked_at else "")
        + ", and the device was "
        f"idle for {seconds(idle_s)} until it had {'it' if batches == 1 else 'them'}; the rest of the step takes "
        f"{seconds(rest_s)}. "
        + ("It has workers already." if has_workers else "It has no workers: batches are made in the step."),
        reasoning=f"Workers prepare the next batches during the step. Receiving one takes {seconds(HANDOVER)}. "
        "Contention of the workers with the step for cores is not counted.",
        remedy=_more(idle_s, rest_s)
        if has_workers
        else _workers(math.ceil(1.2 * idle_s / rest_s), on_gpu=step.machine.kind == "gpu"),
    )


def _workers(needed: int, *, on_gpu: bool) -> str:
    workers = min(max(2, needed), MOST_WORKERS)
    too_few = (
        f"\nMore than {MOST_WORKERS} workers would be needed: make samples cheaper too (decode them beforehand)."
        if needed > MOST_WORKERS
        else ""
    )
    pinned, copied = (", pin_memory=True", "\nbatch = batch.to(device, non_blocking=True)") if on_gpu else ("", "")
    loader = f"DataLoader(..., num_workers={workers}, prefetch_factor=2, persistent_workers=True{pinned})"
    return f"{loader}{copied}{too_few}"


def _more(idle_s: float, rest_s: float) -> str:
    return (
        f"num_workers times {1.0 + idle_s / rest_s:.1f}, as long as there are cores for them; a larger prefetch_factor "
        "where samples differ in cost; and less work for each sample (decode and tokenize beforehand, collate whole "
        "arrays)."
    )
