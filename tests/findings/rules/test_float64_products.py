"""Which steps are said to be in float64 for no reason, and what float32 saves."""

import dataclasses

import pytest
import torch
from gpu_steps import examined, found_in
from made_up import slow_cpu
from torch import nn

RULE = "float64-products"


def network(dtype, last=lambda y: y.square().mean().backward()):
    def build():
        model, x = nn.Linear(256, 256).to(dtype), torch.randn(512, 256, dtype=dtype)
        return lambda: last(model(x))

    machine = slow_cpu()
    limits = dataclasses.replace(machine.achievable, vector={"float32": 5e10, "float64": 2.5e10})
    return examined(build, live=True, machine=dataclasses.replace(machine, achievable=limits))


def test_a_network_in_float64_saves_about_half_of_its_time():
    step = network(torch.float64)
    (found,) = found_in(step, RULE)
    assert 0.3 < found.share < 0.8
    assert {step.ops[index].packet for index in found.ops} >= {"aten.addmm", "aten.mm"}
    assert found.source.startswith("test_float64_products.py:")


@pytest.mark.parametrize(
    "step",
    [
        lambda: network(torch.float32),
        lambda: network(torch.float32, lambda y: (y.double() @ y.double().t()).logdet()),
        lambda: network(torch.float64, lambda y: torch.linalg.cholesky(y.t() @ y).diagonal().log().sum().backward()),
    ],
    ids=["float32", "linear algebra in float64", "a factorization of what weights made"],
)
def test_others_are_not(step):
    assert not found_in(step(), RULE)
