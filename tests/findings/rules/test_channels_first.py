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


def slower(**factors):
    """Ops whose names have these parts take so many times what a good kernel takes."""

    def times(op, expected):
        return expected * next((factor for part, factor in factors.items() if part in op.name), 1.0)

    return times


def test_batch_norms_with_given_statistics_are_slower_on_channels_first_images():
    def build():
        norm = torch.nn.BatchNorm2d(256).eval().to(torch.bfloat16)
        before, after = (torch.nn.Conv2d(256, 256, 3, padding=1, bias=False).to(torch.bfloat16) for _ in range(2))
        images = torch.randn(64, 256, 56, 56, dtype=torch.bfloat16)

        def step():
            with torch.no_grad():
                return after(norm(before(images)).relu())

        return step

    # 134 us on an H200 where a copy takes 47 us; 82 us on channels-last images.
    def measured(op, expected):
        return 134e-6 if "batch_norm" in op.name else expected

    step = converting(examined(build, times=measured))
    (waste,) = channels_first(step)
    (norm,) = (index for index, op in enumerate(step.ops) if "batch_norm" in op.packet)
    conversions = 0.5 * seconds_of(step, "convolution")
    assert waste.gains[norm] * conversions / waste.saving_s == pytest.approx(52e-6, rel=0.8)
    assert 0.3 < waste.gains[norm] / step.time(norm) < 0.5


def test_the_backward_pass_of_maxima_is_faster_on_channels_last_images():
    build = network(convolution(), lambda: torch.nn.MaxPool2d(2), convolution(), train=True)
    step = converting(examined(build, times=slower(max_pool2d_with_indices_backward=1.0)))
    (waste,) = channels_first(step)
    (maxima,) = (index for index, op in enumerate(step.ops) if op.packet.endswith("indices_backward"))
    assert waste.gains[maxima] > 0.3 * step.time(maxima)


@pytest.mark.parametrize("norms", [(), (lambda: torch.nn.BatchNorm2d(64),)], ids=["alone", "with norms"])
def test_convolutions_without_conversions_save_nothing(norms):
    assert not found_in(examined(network(convolution(), *norms, convolution(), train=True)), "channels-first")


def test_the_remedy_names_the_batch_and_not_what_a_layer_makes_of_it():
    step = converting(examined(network(convolution(3, 64), convolution(), convolution(), channels=3)))
    (waste,) = channels_first(step)
    assert "each batch: 32 x 3 x 56 x 56" in waste.remedy
    assert "the largest of 32 x 64 x 56 x 56" in waste.evidence


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
