"""Which convolutions could run before an image is enlarged."""

import pytest
import torch
from gpu_steps import examined, found_in
from torch import nn
from torch.nn.functional import interpolate


def convolving(fn, *, kernel=1, channels=(64, 16), trained=False):
    def build():
        layer = nn.Conv2d(*channels, kernel, padding=kernel // 2, device="cuda")
        before = nn.Conv2d(64, 64, 1, device="cuda")
        x = torch.randn(8, 64, 64, 64, device="cuda")

        def step():
            with torch.set_grad_enabled(trained):
                y = fn(before(x), layer)
            return y.square().mean().backward() if trained else y

        return step

    return build


SLOW = [
    lambda x, layer: layer(interpolate(x, scale_factor=4)),
    lambda x, layer: layer(nn.Upsample(scale_factor=4, mode="bilinear", align_corners=False)(x)),
    lambda x, layer: layer(interpolate(x, size=(256, 256), mode="bicubic")),
    lambda x, layer: nn.functional.conv2d(nn.functional.upsample_nearest(x, scale_factor=4), layer.weight),
]
QUIET = [
    lambda x, layer: interpolate(layer(x), scale_factor=4),
    lambda x, layer: layer(interpolate(x, scale_factor=4).relu()),
    lambda x, layer: layer(y := interpolate(x, scale_factor=4)) + y[:, :16],
    lambda x, layer: layer(interpolate(x, scale_factor=0.5)),
]


@pytest.mark.filterwarnings("ignore:.*upsample_nearest")
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("fn", SLOW)
def test_a_convolution_of_single_pixels_after_an_interpolation(fn, trained):
    step = examined(convolving(fn, trained=trained))
    (found,) = found_in(step, "enlarged-before-convolution")
    assert "16 times" in found.title
    names = {step.ops[index].packet for index in found.ops}
    assert "aten.convolution" in names
    assert ("aten.convolution_backward" in names) == trained
    assert 0.5 * step.seconds(found.ops) < found.saving_s < step.seconds(found.ops)


@pytest.mark.parametrize("fn", QUIET)
def test_other_orders_and_other_readers(fn):
    assert not found_in(examined(convolving(fn)), "enlarged-before-convolution")


def test_a_wider_kernel_mixes_pixels():
    assert not found_in(examined(convolving(SLOW[0], kernel=3)), "enlarged-before-convolution")


def test_more_channels_to_interpolate_count_against_it():
    few, many = (
        found_in(examined(convolving(SLOW[1], channels=(64, channels))), "enlarged-before-convolution")
        for channels in (16, 1024)
    )
    assert few and (not many or many[0].share < few[0].share)
