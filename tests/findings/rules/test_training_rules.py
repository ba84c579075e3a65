"""Where rules about gradients and optimizers speak, and where they are silent."""

import pytest
import torch
from gpu_steps import examined

from nearpeak.findings.rules.gradients_zeroed import gradients_zeroed
from nearpeak.findings.rules.unfused_optimizer import unfused_optimizer


def training(passes=1, *, optimizer=None, zero=None):
    """A step on this CPU, taken once before, so that gradients and states exist."""

    def build():
        model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(3)))
        x = torch.randn(8, 64)
        made = None if optimizer is None else optimizer(model.parameters())

        def step():
            for _ in range(passes):
                model(x).sum().backward()
            if made is not None:
                made.step()
            if zero is not None:
                model.zero_grad(set_to_none=zero)

        step()
        step()
        return step

    return examined(build, live=True)


def test_only_additions_to_zeros_are_saved():
    once = list(gradients_zeroed(training(zero=False)))
    twice = list(gradients_zeroed(training(2, zero=False)))
    assert [len(waste.gains) for waste in once] == [len(waste.gains) for waste in twice] == [2, 2, 2]  # fill, addition


def test_gradients_that_are_dropped_or_kept_are_not_named():
    assert not list(gradients_zeroed(training(zero=True)))
    assert not list(gradients_zeroed(training(2, zero=True)))
    assert not list(gradients_zeroed(training()))


@pytest.mark.parametrize("how", [{"foreach": True}, {"foreach": False}])
@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_the_remedy_is_for_the_optimizer_that_runs(how, name):
    kind = getattr(torch.optim, name)
    (waste,) = unfused_optimizer(training(optimizer=lambda parameters: kind(parameters, lr=1e-3, **how), zero=True))
    assert waste.remedy == f"torch.optim.{name}(parameters, lr=..., fused=True)"


def test_the_remedy_for_an_optimizer_without_a_fused_kernel():
    class Mine(torch.optim.NAdam):
        """It has foreach=True alone."""

    (waste,) = unfused_optimizer(training(optimizer=lambda parameters: Mine(parameters, foreach=False), zero=True))
    assert "Mine(parameters, lr=..., foreach=True)" in waste.remedy


class Scaled(torch.optim.Optimizer):
    """It needs the norm of each gradient before it can change anything."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(parameter.grad / parameter.grad.norm())


@pytest.mark.parametrize("made", [lambda parameters: torch.optim.AdamW(parameters, fused=True), Scaled])
def test_other_optimizers_are_not_named(made):
    assert not list(unfused_optimizer(training(optimizer=made, zero=True)))
