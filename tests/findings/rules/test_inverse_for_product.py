"""Which inverses are made for a product."""

import pytest
import torch
from gpu_steps import examined, found_in
from planted import load, planted

NAME = "inverse-for-product"
SIZE = 512


def slow_inverse(op, expected):
    return 1e-2 if "inv" in op.name else expected


def of(compute, size=SIZE):
    def build():
        a, b = torch.randn(size, size, device="cuda"), torch.randn(size, 4, device="cuda")
        return lambda: compute(a, b)

    return found_in(examined(build, times=slow_inverse), NAME)


def test_the_corpus():
    module = load("inverse_for_product")
    (finding,) = found_in(examined(lambda: module.waste("cuda"), times=slow_inverse), NAME)
    assert finding.source == planted("inverse_for_product")
    assert not found_in(examined(lambda: module.clean("cuda"), times=slow_inverse), NAME)


@pytest.mark.parametrize(
    "compute",
    [
        lambda a, b: torch.linalg.inv(a) @ b,
        lambda a, b: b.T @ a.inverse() @ b,
        lambda a, b: a.inverse() @ b[:, 0],
        lambda a, b: (i := torch.linalg.inv(a)) @ b + i @ (2 * b),
    ],
)
def test_products_with_few_columns(compute):
    assert of(compute)


@pytest.mark.parametrize(
    "compute",
    [
        lambda a, b: a.inverse(),
        lambda a, b: a.inverse() + 0 * a,
        lambda a, b: a.inverse() @ a,
        lambda a, b: (i := a.inverse()) @ b + i.diagonal()[:, None],
        lambda a, b: torch.linalg.solve(a, b),
    ],
)
def test_inverses_for_something_else(compute):
    assert not of(compute)


def test_small_matrices_take_a_launch():
    assert not of(lambda a, b: a.inverse() @ b, size=4)


def test_its_gradient_is_products_of_whole_matrices():
    def build():
        a, b = torch.eye(64, requires_grad=True), torch.randn(64, 4)
        return lambda: (torch.linalg.inv(a) @ b).square().sum().backward()

    step = examined(build, times=slow_inverse, live=True)
    (finding,) = found_in(step, NAME)
    square = [i for i, op in enumerate(step.ops) if op.phase == "backward" and op.packet == "aten.mm"]
    of_inverse = [i for i in square if step.ops[i].inputs[0].shape == step.ops[i].inputs[1].shape]
    assert len(of_inverse) == 2
    assert set(of_inverse) <= set(finding.ops)
