"""Which convolutions are called channels-first, and what the other layout saves."""

import dataclasses

import pytest
import torch
from gpu_steps import examined, found_in
from made_up import slow_cpu

from nearpeak.findings.rules.channels_first import channels_first
from nearpeak.profiles.profile import DeviceKernel
from nearpeak.trace.cuda_ops.target import Target

CPU = slow_cpu()
HOST = Target(kind="cpu")


def network(*layers, layout=torch.contiguous_format, train=False, channels=64, dtype=torch.bfloat16):
    def build():
        model = torch.nn.Sequential(*(layer() for layer in layers)).to(dtype).to(memory_format=layout)
        images = torch.randn(32, channels, 56, 56, dtype=dtype).to(memory_format=layout)

        def step():
            with torch.set_grad_enabled(train):
                out = model(images)
            return out.sum().backward() if train else out

        return step

    return build


def convolution(inputs=64, outputs=64, size=3, groups=1):
    return lambda: torch.nn.Conv2d(inputs, outputs, size, padding=size // 2, bias=False, groups=groups)


def converting(step, share=0.5):
    """The same step, in which a share of each convolution's time is that of conversions."""
    timeline = []
    for kernel in step.profile.timeline:
        part = share if step.costs[kernel.op].family == "convolution" else 0.0
        timeline.append(dataclasses.replace(kernel, seconds=kernel.seconds * (1 - part)))
        if part:
            name = "void cudnn::ops::nchwToNhwcKernel<__nv_bfloat16, __nv_bfloat16, float, false, true>"
            start = kernel.start_s + kernel.seconds * (1 - part)
            timeline.append(DeviceKernel(name=name, start_s=start, seconds=kernel.seconds * part, op=kernel.op))
    return dataclasses.replace(step, profile=dataclasses.replace(step.profile, timeline=tuple(timeline)))


def seconds_of(step, family):
    return sum(op.measured_s for op, cost in zip(step.measured, step.costs, strict=True) if cost.family == family)


def test_the_conversions_that_were_seen_go():
    step = converting(examined(network(convolution(), convolution(), convolution())))
    (found,) = found_in(step, "channels-first")
    assert found.saving_s == pytest.approx(0.5 * seconds_of(step, "convolution"), rel=0.1)
    assert "torch.channels_last)" in found.remedy
    assert "3 convolutions" in found.evidence


def test_backward_converts_too():
    step = converting(examined(network(convolution(), torch.nn.ReLU, convolution(), train=True)))
    (found,) = found_in(step, "channels-first")
    backward = [index for index in found.ops if step.ops[index].phase == "backward"]
    assert len(backward) == 2
    assert found.saving_s == pytest.approx(0.5 * seconds_of(step, "convolution"), rel=0.15)


def test_batch_norms_follow_the_layout():
    step = converting(examined(network(convolution(), lambda: torch.nn.BatchNorm2d(64), train=True)))
    (found,) = found_in(step, "channels-first")
    norms = [index for index in found.ops if "batch_norm" in step.ops[index].packet]
    assert norms


def test_convolutions_without_conversions_save_nothing():
    assert not found_in(examined(network(convolution(), convolution())), "channels-first")


@pytest.mark.parametrize(
    "build",
    [
        network(convolution(), convolution(), layout=torch.channels_last),
        lambda: lambda: torch.randn(64, 64) @ torch.randn(64, 64),
    ],
    ids=["channels-last", "no convolutions"],
)
def test_other_steps_are_not_named(build):
    assert not found_in(converting(examined(build)), "channels-first")


def test_conversions_next_to_a_group_norm_stay():
    norm = lambda: torch.nn.GroupNorm(8, 64)  # noqa: E731
    layers = (norm, torch.nn.SiLU, convolution(), norm, torch.nn.SiLU, convolution(), norm)
    waste = next(iter(channels_first(converting(examined(network(*layers))))), None)
    step = converting(examined(network(convolution(), convolution())))
    (without,) = channels_first(step)
    assert waste is None or waste.saving_s < 0.1 * without.saving_s


def test_the_few_channels_of_a_first_image_are_padded_in_either_layout():
    step = converting(examined(network(convolution(3, 8), channels=3)))
    waste = next(iter(channels_first(step)), None)
    whole = 0.5 * seconds_of(step, "convolution")
    assert waste is None or waste.saving_s < 0.9 * whole


def test_on_a_cpu_the_copies_are_expected_ones():
    step = examined(network(convolution(), convolution(), dtype=torch.float32), machine=CPU, target=HOST)
    (waste,) = channels_first(step)
    assert 0.0 < waste.saving_s < seconds_of(step, "convolution")
    assert "expected to take" in waste.evidence
