"""When cuDNN is said to plan its attention."""

import dataclasses

import pytest
import torch
from gpu_steps import examined, found_in
from stalled import idle
from torch.nn.functional import scaled_dot_product_attention

from nearpeak.profiles.idle import LAUNCHED_LATE


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
    assert found.saving_s == pytest.approx(30e-3)
    assert "8 x 16 x 129 x 64 for 8 x 16 x 128 x 64" in found.evidence and "enable_cudnn_sdp" in found.remedy
    assert not [item for item in others if item.rule == "launch-bound"]


@pytest.mark.parametrize(("wait_s", "grew"), [(30e-3, False), (20e-6, True)], ids=["of one length", "at once"])
def test_other_launches_are_not(wait_s, grew):
    assert not found_in(waiting(attending(), wait_s, grew=grew), "attention-plan")
