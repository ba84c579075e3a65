"""Devices exchange data while nothing else runs on them."""

from __future__ import annotations

from collections.abc import Iterator

from nearpeak.findings.engine import Waste, rule
from nearpeak.findings.step import Step
from nearpeak.ops.op import Phase
from nearpeak.units import quantity, seconds


@rule("exposed-communication", needs=["host"])
def exposed_communication(step: Step) -> Iterator[Waste]:
    """The exposed communication of the whole step, as far as there are kernels to overlap it with."""
    exposed = step.profile.communication_s
    if exposed <= 0.0:
        return
    collectives = [index for index, cost in enumerate(step.costs) if cost.family == "collective"]
    phases: set[Phase] = {step.ops[index].phase for index in collectives}
    compute = sum(
        op.measured_s
        for index, op in enumerate(step.measured)
        if step.costs[index].family != "collective" and (not phases or op.phase in phases)
    )
    saving = min(exposed, compute)
    moved = sum(access.bytes for index in collectives for access in step.costs[index].reads)
    sends = f" {len(collectives)} collectives send {quantity(moved, 'B')}." if collectives else ""
    where = f"in {' and '.join(sorted(phases))} " if phases else ""
    yield Waste(
        title="Devices exchange data while nothing else runs on them.",
        op=collectives[0] if collectives else None,
        idle={"communication": saving},
        evidence=f"For {seconds(exposed)} of {seconds(step.profile.wall_s)} only communication ran.{sends}",
        reasoning=f"Kernels {where}run for {seconds(compute)}: communication on a stream of its own can overlap with "
        "them, except for its last piece.",
        remedy=_remedy(phases),
    )


def _remedy(phases: set[Phase]) -> str:
    if "forward" in phases:
        return (
            "FSDP: fully_shard each layer, so that the parameters of the next one are gathered while this one runs "
            "(set_modules_to_forward_prefetch). Collectives of your own: async_op=True, and wait() just before the "
            "result is used."
        )
    return (
        "DistributedDataParallel begins to reduce a bucket as soon as its gradients are there: smaller buckets "
        "(bucket_cap_mb=10) begin earlier and leave less at the end; gradient_as_bucket_view=True saves a copy. "
        "Gradients in bfloat16 (a communication hook) halve what is sent. With gradient accumulation, no_sync() for "
        "all steps but the last."
    )
