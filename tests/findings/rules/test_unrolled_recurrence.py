"""Recurrent networks that run step by step in Python, and loops that are none."""

import dataclasses

import pytest
import torch
from gpu_steps import examined, found_in
from made_up import slow_cpu
from planted import load, planted
from stalled import idle
from torch import nn

from nearpeak.findings.rules.unrolled_recurrence import unrolled_recurrence

STEPS, BATCH, INPUTS, HIDDEN = 12, 4, 24, 32
RULE = "unrolled-recurrence"
CPU = slow_cpu()


class Cell(nn.Module):
    """An LSTM written by hand."""

    def __init__(self):
        super().__init__()
        self.of_input, self.of_state = nn.Linear(INPUTS, 4 * HIDDEN), nn.Linear(HIDDEN, 4 * HIDDEN, bias=False)

    def forward(self, x, h, c):
        i, f, g, o = (self.of_input(x) + self.of_state(h)).chunk(4, -1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(c), c


def by_hand(x):
    cell = Cell()

    def run():
        h, c, out = torch.zeros(BATCH, HIDDEN), torch.zeros(BATCH, HIDDEN), []
        for x_t in x.unbind(1):
            h, c = cell(x_t, h, c)
            out.append(h)
        return torch.stack(out, 1)

    return run


def of_torch(x):
    cell = nn.LSTMCell(INPUTS, HIDDEN)

    def run():
        h, c = torch.zeros(BATCH, HIDDEN), torch.zeros(BATCH, HIDDEN)
        for number in range(STEPS):
            h, c = cell(x[:, number], (h, c))
        return h

    return run


def stacked(x):
    cells = nn.ModuleList([nn.LSTMCell(INPUTS, HIDDEN), nn.LSTMCell(HIDDEN, HIDDEN)])

    def run():
        states = [(torch.zeros(BATCH, HIDDEN), torch.zeros(BATCH, HIDDEN)) for _ in cells]
        for number in range(STEPS):
            below = x[:, number]
            for level, cell in enumerate(cells):
                states[level] = cell(below, states[level])
                below = states[level][0]
        return below

    return run


def gated(x):
    """A GRU that multiplies input and state as one tensor."""
    update, reset, candidate = (nn.Linear(INPUTS + HIDDEN, HIDDEN) for _ in range(3))

    def run():
        h = torch.zeros(BATCH, HIDDEN)
        for number in range(STEPS):
            joined = torch.cat([x[:, number], h], -1)
            z, r = torch.sigmoid(update(joined)), torch.sigmoid(reset(joined))
            n = torch.tanh(candidate(torch.cat([x[:, number], r * h], -1)))
            h = (1 - z) * n + z * h
        return h

    return run


def plain(x):
    of_input, of_state = nn.Linear(INPUTS, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def run():
        h = torch.zeros(BATCH, HIDDEN)
        for number in range(STEPS):
            h = torch.tanh(of_input(x[:, number]) + of_state(h))
        return h

    return run


def step_of(make, *, train=False, live=True):
    def build():
        run = make(torch.randn(BATCH, STEPS, INPUTS))

        def step():
            out = run()
            return out.sum().backward() if train else out

        return step

    return examined(build, live=live, times=lambda op, expected: expected and max(expected, 3e-6))


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize(
    ("make", "call"),
    [
        (by_hand, f"torch.nn.LSTM({INPUTS}, {HIDDEN})"),
        (of_torch, f"torch.nn.LSTM({INPUTS}, {HIDDEN})"),
        (stacked, f"torch.nn.LSTM({INPUTS}, {HIDDEN}, num_layers=2)"),
        (gated, f"torch.nn.GRU({INPUTS}, {HIDDEN})"),
        (plain, f"torch.nn.RNN({INPUTS}, {HIDDEN})"),
    ],
)
def test_a_cell_in_a_loop_is_one_finding_with_the_call_that_replaces_it(make, call, train):
    step = step_of(make, train=train)
    (waste,) = unrolled_recurrence(step)
    assert call in waste.remedy
    products = {index for index, op in enumerate(step.ops) if op.packet.endswith("mm")}
    assert products <= set(waste.gains)  # forward and backward
    assert [(item.rule, item.places) for item in found_in(step) if item.share > 0.02] == [(RULE, 1)]


def test_the_fused_cell_of_a_gpu_is_known_too():
    (found,) = found_in(step_of(stacked, live=False), RULE)
    assert "num_layers=2" in found.remedy


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_the_corpus(device):
    module = load("unrolled_lstm")
    (found,) = found_in(examined(lambda: module.waste(device), live=device == "cpu"), RULE)
    assert found.source == planted("unrolled_lstm")
    assert not found_in(examined(lambda: module.clean(device), live=device == "cpu"), RULE)


def on_a_cpu(make, *, stretch_s=0.0):
    """A step that is trained on a CPU, with some stretches of Python at the line of the loop."""

    def build():
        run = make(torch.randn(BATCH, STEPS, INPUTS))
        return lambda: run().sum().backward()

    step = examined(build, live=True, machine=CPU, times=lambda op, expected: expected and max(expected, 20e-6))
    (waste,) = unrolled_recurrence(step)
    where = step.ops[waste.op].source
    causes = (idle("python", stretch_s, count=6, where=where),) if stretch_s else ()
    profile = dataclasses.replace(step.profile, wall_s=step.profile.wall_s + stretch_s, idle=causes)
    return dataclasses.replace(step, profile=profile)


def test_python_between_the_turns_goes_with_them_on_a_cpu():
    step = on_a_cpu(of_torch, stretch_s=5e-3)
    (waste,) = unrolled_recurrence(step)
    assert waste.idle == {"python": 5e-3}
    assert not found_in(step, "python-stretch")


def test_the_products_of_an_lstm_of_torch_are_about_as_fast_as_one_of_all_steps():
    """On a Xeon, 120 steps of 8 x 80 x 96: 8.5 ms with the backward pass, where the ops of the cell take 60."""
    (waste,) = unrolled_recurrence(step := on_a_cpu(of_torch))
    assert waste.saving_s > 0.8 * step.seconds(waste.gains)


def test_a_gru_of_torch_on_a_cpu_has_the_ops_of_its_cell():
    """On a Xeon, 64 steps of 16 x 64 x 128 take 35 ms with the backward pass, and 37 ms as cells."""
    (waste,) = unrolled_recurrence(step := on_a_cpu(gated))
    assert waste.saving_s < 0.5 * step.seconds(waste.gains)


def fed_back(x):
    """Each output is the next input: no call knows the inputs before."""
    cell = nn.LSTMCell(HIDDEN, HIDDEN)

    def run():
        h, c = torch.zeros(BATCH, HIDDEN), torch.zeros(BATCH, HIDDEN)
        for _ in range(STEPS):
            h, c = cell(h, (h, c))
        return h

    return run


def deep(x):
    """Layers with weights of their own."""
    layers = nn.ModuleList(nn.Linear(INPUTS, INPUTS) for _ in range(STEPS))

    def run():
        h = x
        for layer in layers:
            h = torch.tanh(layer(h))
        return h

    return run


def integrated(x):
    """A differential equation, by small steps."""
    field = nn.Linear(INPUTS, INPUTS)

    def run():
        h = x
        for _ in range(STEPS):
            h = h + 0.1 * torch.relu(field(h))
        return h

    return run


@pytest.mark.parametrize("make", [fed_back, deep, integrated])
def test_other_loops_are_not_named(make):
    assert not list(unrolled_recurrence(step_of(make)))


def test_ops_inside_of_a_cell_get_no_remedy_that_nobody_can_apply():
    rules = {finding.rule for finding in found_in(step_of(fed_back))}
    assert rules.isdisjoint({"unfused-gated-activation", "unfused-pointwise"})
