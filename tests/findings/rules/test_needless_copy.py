"""Which copies nobody needs."""

import pytest
import torch
from gpu_steps import examined, found_in
from planted import load, planted

NAME = "needless-copy"
SHAPE = (4096, 256)


def of(compute):
    def build():
        x = torch.randn(SHAPE, device="cuda")
        return lambda: compute(x)

    return found_in(examined(build), NAME)


def test_the_corpus():
    module = load("needless_copy")
    (finding,) = found_in(examined(lambda: module.waste("cuda")), NAME)
    assert finding.source == planted("needless_copy")
    assert not found_in(examined(lambda: module.clean("cuda")), NAME)


def test_copies_for_reading():
    assert of(lambda x: (x.clone() + 1).sum())
    assert of(lambda x: (x.T.clone() + 1).sum())
    assert of(lambda x: (x.to(torch.float32, copy=True) + 1).sum())


def written_copy(x):
    return x.clone().add_(1).sum()


def written_original(x):
    before = x.clone()
    x.add_(1)
    return (x - before).sum()


def written_view_of_the_original(x):
    before = x.clone()
    x[0].zero_()
    return (x - before).sum()


def returned(x):
    return x.clone()


def other_layout(x):
    return (x.T.contiguous() + 1).sum()


def other_dtype(x):
    return (x.to(torch.bfloat16) + 1).sum()


def expanded(x):
    return (x[:1].expand(64, -1).clone() + 1).sum()


@pytest.mark.parametrize(
    "compute",
    [
        written_copy,
        written_original,
        written_view_of_the_original,
        returned,
        other_layout,
        other_dtype,
        expanded,
    ],
)
def test_copies_for_something(compute):
    assert not of(compute)


def test_a_copy_that_is_kept():
    def build():
        x, kept = torch.randn(SHAPE), []

        def step():
            kept.append(x.clone())
            return kept[-1].sum()

        return step

    assert not found_in(examined(build, live=True), NAME)
