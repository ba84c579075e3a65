"""When cuDNN is said to plan its attention."""

import dataclasses

import pytest
import torch
from gpu_steps import examined, found_in
from stalled import idle
from torch.nn.functional import scaled_dot_product_attention

from nearpeak.findings.engine import Waste, forget_rule, rule
from nearpeak.profiles.idle import LAUNCHED_LATE
from nearpeak.render.views.finding import document


def attending():
    def build():
        query = torch.randn(8, 16, 1, 64, dtype=torch.bfloat16)
        keys, values = torch.randn(2, 8, 16, 129, 64, dtype=torch.bfloat16)

        def step():
            with torch.no_grad():
                out = scaled_dot_product_attention(query, keys, values)
                return scaled_dot_product_attention(out, keys, values)

        return step

    return examined(build)


def waiting(step, wait_s, *, grew=True):
    """The same step, whose first attention was launched late, and had a key less in the step before."""
    first, *_ = (index for index, op in enumerate(step.ops) if "attention" in op.packet)
    ops = list(step.profile.ops)
    ops[first] = dataclasses.replace(ops[first], launch_wait_s=wait_s)
    late = idle("launching", wait_s, where=step.ops[first].source, what=LAUNCHED_LATE)
    profile = dataclasses.replace(
        step.profile, ops=tuple(ops), idle=(late,), wall_s=step.profile.wall_s + wait_s, steps=10
    )
    before = {first: {"key": (8, 16, 128, 64), "value": (8, 16, 128, 64)}} if grew else {}
    trace = dataclasses.replace(step.trace, shapes_before=before)
    return dataclasses.replace(step, profile=profile, trace=trace, knows=step.knows | {"host"})


def test_a_long_launch_of_a_new_length_is_a_plan():
    step = waiting(attending(), 30e-3)
    found, *others = found_in(step)
    assert found.rule == "attention-plan" and found.source == step.ops[0].source
    assert found.once_s == pytest.approx(30e-3)
    assert "8 x 16 x 129 x 64 for 8 x 16 x 128 x 64" in found.evidence and "enable_cudnn_sdp" in found.remedy
    assert not [item for item in others if item.rule == "launch-bound"]


@pytest.mark.parametrize(("wait_s", "grew"), [(30e-3, False), (20e-6, True)], ids=["of one length", "at once"])
def test_other_launches_are_not(wait_s, grew):
    assert not found_in(waiting(attending(), wait_s, grew=grew), "attention-plan")


def test_a_plan_is_no_saving_of_steps_whose_lengths_recur():
    step = waiting(attending(), 30e-3)
    copied = [index for index, op in enumerate(step.ops) if "attention" in op.packet][1]
    took_s = step.profile.wall_s - 30e-3

    def copies(step):
        yield Waste(title="", op=copied, gains={copied: step.time(copied)}, evidence="", reasoning="", remedy="")

    rule("copies")(copies)
    try:
        plan, copy = found_in(step)
    finally:
        forget_rule("copies")
    assert (plan.rule, plan.saving_s, plan.share, plan.together_s) == ("attention-plan", 0.0, 0.0, 0.0)
    assert "30.0 ms once for each new size" in repr(plan)
    assert document(plan).facts == ("Predicted saving: 30.0 ms once for each new size",)
    assert copy.share == pytest.approx(step.time(copied) / took_s)  # of a step that plans nothing
    assert copy.together_s == pytest.approx(step.time(copied))
