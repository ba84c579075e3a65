"""Backward passes through the same ops, in the ways that people write them; and passes that are needed."""

from pathlib import Path

import pytest
import torch
from gpu_steps import examined
from torch import nn

from nearpeak.findings.rules.repeated_backward import repeated_backward

TASKS, ROWS, WIDTH = 3, 16, 32


def network():
    torch.manual_seed(0)
    trunk = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.Tanh())
    heads = nn.ModuleList([nn.Linear(WIDTH, 4) for _ in range(TASKS)])
    x = torch.randn(ROWS, WIDTH)
    return trunk, heads, x


def for_each_loss():
    trunk, heads, x = network()

    def step():
        shared = trunk(x)
        for head in heads:
            head(shared).square().mean().backward(retain_graph=True)

    return step


def two_losses():
    trunk, heads, x = network()

    def step():
        shared = trunk(x)
        fit, penalty = heads[0](shared).square().mean(), shared.abs().mean()
        fit.backward(retain_graph=True)
        penalty.backward()

    return step


def wastes(build):
    step = examined(build, live=True, times=lambda op, expected: expected and max(expected, 3e-6))
    return step, list(repeated_backward(step))


@pytest.mark.parametrize(("build", "times"), [(for_each_loss, TASKS), (two_losses, 2)])
def test_all_passes_but_one_go(build, times):
    step, (waste,) = wastes(build)
    assert waste.title.startswith(f"{times} backward passes")
    gone = [step.ops[index] for index in waste.gains]
    assert {op.phase for op in gone} == {"backward"}
    removed = sum(op.packet == "aten.mm" for op in gone)
    assert removed == 3 * (times - 1)  # of two layers, the first of which needs no gradient of its input
    assert any(op.packet == "aten.threshold_backward" for op in gone)
    assert any(op.packet == "aten.add_" for op in gone)  # nothing is left to be added up
    assert step.ops[waste.op].source.startswith("test_repeated_backward.py:")


def summed():
    trunk, heads, x = network()

    def step():
        shared = trunk(x)
        sum(head(shared).square().mean() for head in heads).backward()

    return step


def similarities():
    trunk, _, x = network()

    def step():
        z = trunk(x)
        (z @ z.t()).square().mean().backward()

    return step


def read_in_between():
    trunk, heads, x = network()
    weight = trunk[0].weight

    def step():
        shared = trunk(x)
        norms = []
        for head in heads:
            head(shared).square().mean().backward(retain_graph=True)
            norms.append(weight.grad.norm())
        return norms

    return step


def added_up_over_batches():
    trunk, heads, x = network()

    def step():
        for part in x.split(ROWS // 4):
            heads[0](trunk(part)).square().mean().backward()

    return step


def gradient_penalty():
    trunk, heads, x = network()
    x.requires_grad_()

    def step():
        out = heads[0](trunk(x)).mean()
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        (out + slope.square().mean()).backward()

    return step


def for_all_inputs():
    net, x, y = of_two_inputs()

    def step():
        u = net(torch.cat([x, y], dim=1))
        u_x, u_y = torch.autograd.grad(u, [x, y], torch.ones_like(u), create_graph=True)
        (u_x + u_y).square().mean().backward()

    return step


def of_two_inputs():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
    return net, *(torch.randn(ROWS, 1, requires_grad=True) for _ in range(2))


def for_each_input():
    net, x, y = of_two_inputs()

    def derivative(u, of):
        (along,) = torch.autograd.grad(u, of, torch.ones_like(u), create_graph=True)
        return along

    def step():
        u = net(torch.cat([x, y], dim=1))
        u_x = derivative(u, x)
        u_y = derivative(u, y)  # again
        (u_x + u_y).square().mean().backward()

    return step


def test_a_pass_for_each_input():
    step, (waste,) = wastes(for_each_input)
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    line = next(number for number, text in enumerate(lines, 1) if text.endswith("# again"))
    assert waste.source == f"test_repeated_backward.py:{line}"
    whole, _ = wastes(for_all_inputs)
    fewer = len([op for op in step.ops if op.packet == "aten.mm"]) - len(
        [op for op in whole.ops if op.packet == "aten.mm"]
    )
    gone = [step.ops[index] for index in waste.gone]
    assert sum(op.packet == "aten.mm" for op in gone) == fewer


def test_second_derivatives_differentiate_the_pass_that_is_left():
    def laplacian(*, at_once):
        net, x, y = of_two_inputs()

        def derivatives(u, of):
            return torch.autograd.grad(u, of, torch.ones_like(u), create_graph=True)

        def step():
            u = net(torch.cat([x, y], dim=1))
            u_x, u_y = derivatives(u, (x, y)) if at_once else (*derivatives(u, x), *derivatives(u, y))
            (u_xx,), (u_yy,) = derivatives(u_x, x), derivatives(u_y, y)
            (u_x * u + u_xx + u_yy).square().mean().backward()

        return step

    step, (waste,) = wastes(lambda: laplacian(at_once=False))
    whole, _ = wastes(lambda: laplacian(at_once=True))
    for packet in ("aten.mm", "aten.tanh_backward"):
        fewer = sum(op.packet == packet for op in step.ops) - sum(op.packet == packet for op in whole.ops)
        assert sum(step.ops[index].packet == packet for index in waste.gone) == fewer > 0


@pytest.mark.parametrize(
    "build",
    [summed, similarities, read_in_between, added_up_over_batches, gradient_penalty, for_all_inputs],
    ids=lambda b: b.__name__,
)
def test_passes_that_are_needed_are_left_alone(build):
    assert not wastes(build)[1]
