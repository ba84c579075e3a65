"""When cuDNN is said to search for algorithms."""

import dataclasses

import pytest
import torch
from gpu_steps import examined, found_in
from stalled import idle

from nearpeak.profiles.profile import DeviceKernel


def convolving():
    def build():
        model = torch.nn.Conv2d(64, 64, 3, padding=1, bias=False).to(torch.bfloat16)
        images = torch.randn(8, 64, 57, 57, dtype=torch.bfloat16)

        def step():
            with torch.no_grad():
                return model(images)

        return step

    return examined(build)


def running(step, names, causes=()):
    """The same step, whose convolution runs kernels of these names, a millisecond each."""
    (index,) = (place for place, cost in enumerate(step.costs) if cost.family == "convolution")
    kernels = tuple(
        DeviceKernel(name=name, start_s=number * 1e-3, seconds=1e-3, op=index) for number, name in enumerate(names)
    )
    ops = list(step.profile.ops)
    ops[index] = dataclasses.replace(ops[index], measured_s=1e-3 * len(names), kernels=len(names))
    wall_s = 1e-3 * len(names) + sum(cause.seconds for cause in causes)
    profile = dataclasses.replace(
        step.profile, timeline=kernels, ops=tuple(ops), wall_s=wall_s, kernel_s=1e-3 * len(names), idle=tuple(causes)
    )
    return dataclasses.replace(step, profile=profile, knows=step.knows | {"host"})


ALGORITHMS = [f"sm90_xmma_fprop_implicit_gemm_{number}" for number in range(6)] * 4


def test_many_algorithms_in_one_convolution_are_a_search():
    step = convolving()
    (line,) = {op.source for op in step.ops if op.packet == "aten.convolution"}
    wait = idle("synchronization", 2e-3, where=line, what="cudaEventSynchronize")
    found = found_in(running(step, ALGORITHMS, [wait]))
    (search,) = (item for item in found if item.rule == "convolution-search")
    assert search.source == line
    assert 0.024 < search.saving_s <= 0.026
    assert "benchmark = False" in search.remedy
    assert not [item for item in found if item.rule == "synchronization"]


@pytest.mark.parametrize(
    "names",
    [
        ["nchwToNhwcKernel", "nchwToNhwcKernel", "sm90_xmma_fprop", "nhwcToNchwKernel"],
        ["sm90_xmma_fprop"] * 20,
        ["nchwToNhwcKernel"] * 8 + ["nhwcToNchwKernel"] * 8 + ["sm90_xmma_fprop", "splitk_reduce"],
    ],
    ids=["one algorithm", "one kernel many times", "conversions"],
)
def test_other_convolutions_are_not(names):
    assert not found_in(running(convolving(), names), "convolution-search")


def test_the_line_is_that_of_the_setting_where_there_is_one():
    step = running(convolving(), ALGORITHMS)
    (line,) = {op.source for op in step.ops if op.packet == "aten.convolution"}

    def source(*lines):
        trace = dataclasses.replace(step.trace, written_at={"cudnn.benchmark": lines})
        (found,) = found_in(dataclasses.replace(step, trace=trace), "convolution-search")
        assert line in found.evidence
        return found.source

    here = f"{line.rpartition(':')[0]}:3"
    assert source("train.py:68") == "train.py:68"
    assert source("train.py:68", here) == here  # in a file of the step's ops
    assert source("train.py:68", "other.py:4") == line
