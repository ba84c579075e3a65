"""Costs of many ops at once are those of each."""

import dataclasses

import torch

from nearpeak.ops.cost import cost_of, costs_of
from nearpeak.trace.trace import trace


def several(x, y):
    z = x
    for _ in range(3):
        z = torch.addmm(z, x, y).relu_() + x
        z = torch.cat([z, z], 1)[:, :8] * z.to(torch.float64).float()  # the same storage twice, and a view of it
    torch._foreach_mul_([x, y, z], 2.0)
    return z.softmax(-1), z + z, z + x, z.sum(), z.sum(0), z.sum(1), x.t() @ x, x @ x.t()


def test_costs_of_many_are_the_costs_of_each():
    recorded = trace(several, torch.zeros(8, 8), torch.zeros(8, 8))
    assert costs_of(recorded.ops) == tuple(cost_of(op) for op in recorded.ops)


def test_flags_and_types_of_numbers_are_seen():
    (product,) = trace(torch.mm, torch.zeros(8, 8), torch.zeros(8, 8)).ops
    fast = dataclasses.replace(product, tf32_products=True)
    assert [list(cost.flops) for cost in costs_of([product, fast, product])] == [[], ["tfloat32"], []]
    (power,) = trace(lambda x: x**2, torch.zeros(8)).ops
    others = [dataclasses.replace(power, arguments={**power.arguments, "exponent": value}) for value in (1, 1.0, True)]
    assert costs_of([power, *others]) == tuple(cost_of(op) for op in (power, *others))
