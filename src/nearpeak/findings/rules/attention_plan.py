"""cuDNN plans its attention in the step, since a sequence has a new length: the host compiles, the device waits."""

from __future__ import annotations

from collections.abc import Iterator

from nearpeak.findings.engine import Waste, rule
from nearpeak.findings.step import Step, shape_text
from nearpeak.units import seconds

_CUDNN = "aten._scaled_dot_product_cudnn_attention"
_LEAST_WAIT_S = 2e-3
"""A launch takes a hundredth of that. On an H200, a plan takes 25 to 40 ms of the host."""


@rule("attention-plan", needs=["host"])
def attention_plan(step: Step) -> Iterator[Waste]:
    """Calls of cuDNN's attention with other lengths than in the step before, for which the device waited long."""
    planned = [
        index
        for index, op in enumerate(step.ops)
        if op.packet.startswith(_CUDNN)
        and index in step.trace.shapes_before
        and step.measured[index].launch_wait_s > _LEAST_WAIT_S
    ]
    launch = step.machine.achievable.launch.enqueue if step.machine.achievable else None
    for index in planned:
        op = step.ops[index]
        before = next(iter(step.trace.shapes_before[index].values()))
        now = op.tensor(next(iter(step.trace.shapes_before[index]))).shape
        wait_s = step.measured[index].launch_wait_s
        others = [
            step.measured[other].launch_wait_s
            for other, candidate in enumerate(step.ops)
            if candidate.packet == op.packet and other not in planned
        ]
        yield Waste(
            title="cuDNN plans its attention again, since the length changes.",
            op=index,
            idle={"launching": wait_s},
            launch_s={index: launch or 0.0},
            is_once=True,
            evidence=f"{op.packet} had {shape_text(now)} for {shape_text(before)} in the step before, and the device "
            f"waited {seconds(wait_s)} for its launch"
            + (f"; for {len(others)} more of it, {seconds(sum(others))}." if others else "."),
            reasoning="The plan for a length is made once in a process: steps that come back to a length do not wait. "
            "A run spends this time on each length that it meets, and there are as many as its sequences may be long; "
            "in the long run it saves nothing. FlashAttention's kernels, which torch has too, need no plan. That they "
            "may take longer themselves is not counted.",
            remedy="torch.backends.cuda.enable_cudnn_sdp(False)  # FlashAttention takes any length as it is; or\n"
            "give keys and values one length in all steps, with a mask for what is not used, so that one plan serves",
        )
