"""Declared costs of operators that torch.library registers."""

import pytest
import torch

from nearpeak.ops.cost import cost_of
from nearpeak.ops.declare import declare_cost, forget_cost, operator_name
from nearpeak.profiling.estimate import estimate
from nearpeak.trace.trace import trace


@torch.library.custom_op("nearpeak_tests::scaled", mutates_args=())
def scaled(x: torch.Tensor, factor: torch.Tensor, power: float) -> torch.Tensor:
    return x * factor**power


@scaled.register_fake
def _(x, factor, power):
    return torch.empty_like(x)


def _keep(ctx, inputs, output):
    _, ctx.factor, ctx.power = inputs


scaled.register_autograd(
    lambda ctx, gradient: (scaled(gradient, ctx.factor, ctx.power), None, None), setup_context=_keep
)


@torch.library.custom_op("nearpeak_tests::add_into", mutates_args=("target",))
def add_into(target: torch.Tensor, x: torch.Tensor) -> None:
    target.add_(x)


@pytest.fixture
def declared():
    """Declares costs and forgets them afterwards."""
    names = []

    def declare(operator, **options):
        names.append(operator)
        return declare_cost(operator, **options)

    yield declare
    for name in names:
        forget_cost(name)


def ops(function, *args, name):
    return [op for op in trace(function, *args).ops if op.packet == name]


def test_every_way_to_name_an_operator_is_the_same_name():
    name = "nearpeak_tests.scaled"
    operator = torch.ops.nearpeak_tests.scaled
    for way in ("nearpeak_tests::scaled", name, operator, operator.default, scaled):
        assert operator_name(way) == name
    assert operator_name("nearpeak_tests::scaled.default") == f"{name}.default"
    assert operator_name(torch.ops.aten.add.Tensor) == "aten.add.Tensor"
    assert operator_name(torch.ops.higher_order.cond) == "higher_order.cond"


def test_an_operator_without_a_declaration_is_charged_what_it_writes():
    (op,) = ops(lambda x: scaled(x, x, 2.0), torch.zeros(8, 8), name="nearpeak_tests.scaled")
    cost = cost_of(op)
    assert (cost.model, cost.work.bytes_read, cost.work.bytes_written) == ("operands", 0, 256)


def test_a_declared_cost_holds_in_forward_and_backward(declared):
    declared(scaled, reads=("x", "factor"), vector_flops=lambda op: 2 * op.tensor("x").elements)
    x, factor = torch.zeros(8, 8, requires_grad=True), torch.zeros(8)

    found = ops(lambda: scaled(x, factor, 2.0).sum().backward(), name="nearpeak_tests.scaled")
    assert [op.phase for op in found] == ["forward", "backward"]
    for op, read in zip(found, (256 + 32, 4 + 32), strict=True):  # the gradient of a sum is one number
        cost = cost_of(op)
        assert (cost.model, cost.work.bytes_read, cost.work.bytes_written) == ("formula", read, 256)
        assert cost.vector_flops == {"float32": 128}


def test_what_an_operator_changes_in_place_is_written(declared):
    declared(add_into, reads=("target", "x"))
    (op,) = ops(add_into, torch.zeros(8), torch.zeros(8), name="nearpeak_tests.add_into")
    assert op.mutated == ("target",)
    assert (cost_of(op).work.bytes_read, cost_of(op).work.bytes_written) == (64, 32)


def test_a_declared_operator_counts_as_covered(declared):
    x = torch.empty(16384, 8192)  # more than a cache holds
    before = estimate(scaled, x, x, 2.0, on="h100-sxm")
    declared("nearpeak_tests::scaled", reads=("x", "factor"))
    after = estimate(scaled, x, x, 2.0, on="h100-sxm")
    assert before.coverage.seconds_share == 0.0
    assert after.coverage.seconds_share == 1.0
    assert after.as_written_s > before.as_written_s
