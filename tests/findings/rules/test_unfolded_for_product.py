"""Which copies of windows a convolution would not need."""

import pytest
import torch
from gpu_steps import examined, found_in
from torch import nn
from torch.nn import functional

CHANNELS, OUT, SIDE = 32, 64, 64


def multiplying(fn, *, trained=False):
    def build():
        x = torch.randn(16, CHANNELS, SIDE, SIDE, device="cuda", requires_grad=trained)
        weight = nn.Parameter(torch.randn(OUT, CHANNELS * 9, device="cuda"), requires_grad=trained)

        def step():
            y = fn(x, weight)
            return y.square().mean().backward() if trained else y

        return step

    return build


def slid(x):
    return functional.pad(x, (1, 1, 1, 1)).unfold(2, 3, 1).unfold(3, 3, 1)


SLOW = [
    lambda x, weight: (weight @ functional.unfold(x, 3, padding=1)).unflatten(2, (SIDE, SIDE)),
    lambda x, weight: functional.linear(functional.unfold(x, 3, padding=1).transpose(1, 2), weight),
    lambda x, weight: torch.einsum("bchwij,ocij->bohw", slid(x), weight.view(OUT, CHANNELS, 3, 3)),
    lambda x, weight: slid(x).permute(0, 2, 3, 1, 4, 5).reshape(-1, CHANNELS * 9) @ weight.T,
]
QUIET = [
    lambda x, weight: functional.conv2d(x, weight.view(OUT, CHANNELS, 3, 3), padding=1),
    lambda x, weight: functional.unfold(x, 4, stride=4).transpose(1, 2) @ weight.T.repeat(2, 1)[: CHANNELS * 16],
    lambda x, weight: (w := functional.unfold(x, 3, padding=1)).softmax(1).sum(1) + (weight @ w).sum(1),
    # attention in windows: the other factor is no weight
    lambda x, weight: functional.unfold(x, 3, padding=1).mT @ functional.unfold(x, 3, padding=1)[:, :, :8].relu(),
    lambda x, weight: functional.unfold(x, 3, padding=1).unflatten(1, (CHANNELS, 9)).amax(2),
]


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("fn", SLOW)
def test_windows_that_are_copied_for_a_product_with_a_weight(fn, trained):
    step = examined(multiplying(fn, trained=trained))
    (found,) = found_in(step, "unfolded-for-product")
    packets = {step.ops[index].packet for index in found.ops}
    assert packets & {"aten.im2col", "aten.clone"}
    assert bool(packets & {"aten.col2im", "aten.unfold_backward"}) == trained
    assert found.saving_s == pytest.approx(step.seconds(found.ops))
    assert "conv2d" in found.remedy


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("fn", QUIET)
def test_windows_that_a_convolution_does_not_replace(fn, trained):
    if trained and fn is QUIET[1]:
        pytest.skip("the weight is no multiple of the patches")
    assert not found_in(examined(multiplying(fn, trained=trained)), "unfolded-for-product")


def test_frames_of_a_sound_overlap_little():
    def build():
        sound, filters = torch.randn(16, 64_000, device="cuda"), torch.randn(400, 80, device="cuda")
        return lambda: sound.unfold(-1, 400, 160) @ filters

    assert not found_in(examined(build), "unfolded-for-product")
