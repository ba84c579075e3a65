"""Which linear layers could run on means."""

import pytest
import torch
from gpu_steps import examined, found_in
from planted import load, planted
from torch import nn

NAME = "linear-before-mean"
BATCH, TOKENS, WIDTH = 64, 256, 512


def of(compute, shape=(BATCH, TOKENS, WIDTH), trained=True):
    def build():
        linear, convolution = nn.Linear(WIDTH, WIDTH, device="cuda"), nn.Conv2d(WIDTH, WIDTH, 1, device="cuda")
        x = torch.randn(shape, device="cuda", requires_grad=trained)

        def step():
            y = compute(x, convolution if len(shape) == 4 else linear)
            return y.square().sum().backward() if trained else y.detach()

        return step

    return examined(build)


def test_the_corpus():
    module = load("linear_before_mean")
    (finding,) = found_in(examined(lambda: module.waste("cuda")), NAME)
    assert finding.source == planted("linear_before_mean")
    assert not found_in(examined(lambda: module.clean("cuda")), NAME)


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize(
    "compute",
    [
        lambda x, linear: linear(x).mean(dim=1),
        lambda x, linear: linear(x).sum(dim=1, keepdim=True),
        lambda x, linear: linear(x).view(BATCH, 4, -1, WIDTH).mean(dim=2),
        lambda x, linear: x.view(-1, WIDTH).matmul(linear.weight).view(x.shape).mean(1),
    ],
)
def test_means_over_rows(compute, trained):
    step = of(compute, trained=trained)
    (finding,) = found_in(step, NAME)
    products = [i for i, op in enumerate(step.ops) if op.packet in ("aten.mm", "aten.addmm")]
    assert finding.saving_s > 0.9 * step.seconds(products)


@pytest.mark.parametrize(
    "compute",
    [
        lambda x, convolution: convolution(x).mean(dim=(2, 3)),
        lambda x, convolution: nn.functional.adaptive_avg_pool2d(convolution(x), 1),
    ],
)
def test_convolutions_of_pixels(compute):
    assert found_in(of(compute, (16, WIDTH, 32, 32)), NAME)


@pytest.mark.parametrize(
    "compute",
    [
        lambda x, linear: linear(x.mean(dim=1)),
        lambda x, linear: linear(x).mean(dim=2),
        lambda x, linear: linear(x).relu().mean(dim=1),
        lambda x, linear: linear(x).mean(),
        lambda x, linear: (y := linear(x)).mean(dim=1) + y[:, 0],
        lambda x, linear: linear(x).amax(dim=1),
    ],
)
def test_what_is_no_mean_of_rows_alone(compute):
    assert not found_in(of(compute), NAME)


def test_convolutions_of_more_than_a_pixel():
    def build():
        convolution = nn.Conv2d(64, 64, 3, padding=1, device="cuda")
        x = torch.randn(16, 64, 32, 32, device="cuda")
        return lambda: convolution(x).mean(dim=(2, 3)).sum().backward()

    assert not found_in(examined(build), NAME)
