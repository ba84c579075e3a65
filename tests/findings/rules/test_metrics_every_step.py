"""Which work of a training step nobody but the host reads."""

import dataclasses

import pytest
import torch
from gpu_steps import as_expected, examined, found_in, with_times
from planted import load, planted
from torch import nn
from torch.nn import functional

from nearpeak.trace.trace import trace

NAME = "metrics-every-step"
ROWS, WIDTH = 4096, 64


def of(after, on_host=False):
    """What is found in a training step that does this with its model and its scores, too."""

    def build():
        torch.manual_seed(0)
        model, other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        x, kept = torch.randn(ROWS, WIDTH), []

        def step():
            scores = model(x)
            scores.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                after(scores.detach(), kept, other, x)

        return step

    traced = trace(build(), live=True)
    if not on_host:
        traced = dataclasses.replace(traced, on_host=frozenset())
    return found_in(with_times(traced, as_expected), NAME)


def spread(scores):
    return (scores.sort(dim=1).values[:, -1] - scores.mean(dim=1)).std()


def test_the_corpus():
    module = load("metrics_every_step")
    (finding,) = found_in(examined(lambda: module.waste("cpu"), live=True), NAME)
    assert finding.source == planted("metrics_every_step")
    assert not found_in(examined(lambda: module.clean("cpu"), live=True), NAME)


def test_a_number_that_the_host_reads():
    (finding,) = of(lambda scores, kept, other, x: spread(scores).item())
    assert finding.title == "The step computes what only the host reads."
    assert "aten.sort" in finding.evidence


def dropped(scores, kept, other, x):
    scores.sort(dim=1).values.cumsum(1).numpy()


def test_what_is_dropped_in_the_memory_of_the_device():
    (finding,) = of(dropped)
    assert finding.title == "The step computes what no op reads."


def test_numpy_may_read_the_memory_of_the_host():
    assert not of(dropped, on_host=True)


def updated_state(scores, kept, other, x):
    other.bias.add_(spread(scores))


def kept_tensor(scores, kept, other, x):
    kept.append(spread(scores))


def action_of_a_network(scores, kept, other, x):
    return other(x).argmax(1).tolist()


def nothing(scores, kept, other, x):
    """The forward ops of the loss itself, whose values the backward pass does not read."""


@pytest.mark.parametrize("wanted", [updated_state, kept_tensor, action_of_a_network, nothing])
def test_what_is_wanted(wanted):
    assert not of(wanted)


def test_a_loss_with_gradients_that_backward_does_not_read():
    def build():
        model, optimizer, x, labels = load("metrics_every_step").built("cpu")

        def step():
            functional.mse_loss(model(x)[:, 0], labels).backward()
            optimizer.step()

        return step

    assert not found_in(examined(build, live=True), NAME)


def test_inference_may_be_for_the_host():
    def build():
        model, x = nn.Linear(WIDTH, WIDTH), torch.randn(ROWS, WIDTH)
        return lambda: spread(model(x).detach()).item()

    assert not found_in(examined(build, live=True), NAME)


@pytest.mark.parametrize("is_read_later", [False, True])
def test_a_variable_that_the_next_step_makes_anew(is_read_later):
    def build():
        torch.manual_seed(0)
        model, x = nn.Linear(WIDTH, WIDTH), torch.randn(ROWS, WIDTH)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        latest = {}

        def step():
            if is_read_later and latest:
                latest["sum"] = latest["spread"] + 1.0
            scores = model(x)
            latest["spread"] = spread(scores.detach())
            latest["spread"].item()
            scores.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    found = found_in(with_times(trace(build(), live=True, next_step=True), as_expected), NAME)
    assert bool(found) != is_read_later
