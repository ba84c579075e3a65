"""Where rules about gradients and optimizers speak, and where they are silent."""

import pytest
import torch
from gpu_steps import examined, found_in

from nearpeak.findings.rules.gradients_zeroed import gradients_zeroed
from nearpeak.findings.rules.unfused_optimizer import unfused_optimizer


def training(passes=1, *, optimizer=None, zero=None, depth=3):
    """A step on this CPU, taken once before, so that gradients and states exist."""

    def build():
        model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(depth)))
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


def lerped(parameter, gradient, mean, square):
    mean.lerp_(gradient, 0.1)
    square.mul_(0.999)
    square.add_(gradient * gradient * 0.001)
    parameter.sub_(1e-5 * parameter)
    parameter.add_(-1e-3 * mean / (square.sqrt() + 1e-8))


def copied(parameter, gradient, mean, square):
    mean.copy_(0.9 * mean + 0.1 * gradient)
    square.copy_(0.999 * square + 0.001 * gradient**2)
    parameter.copy_(parameter * (1 - 1e-5) - 1e-3 * mean / (square.sqrt() + 1e-8))


def coupled(parameter, gradient, mean, square):
    gradient = gradient.add(parameter, alpha=1e-2)
    mean.mul_(0.9).add_(gradient, alpha=0.1)
    square.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
    parameter.addcdiv_(mean, square.sqrt().add_(1e-8), value=-1e-3)


def scaled(parameter, gradient, mean, square):
    square.mul_(0.99).addcmul_(gradient, gradient, value=0.01)
    parameter.addcdiv_(gradient, square.sqrt().add_(1e-8), value=-1e-3)


def with_momentum(parameter, gradient, mean, square):
    mean.mul_(0.9).add_(gradient)
    parameter.add_(mean, alpha=-0.1)


def by_signs(parameter, gradient, mean, square):
    parameter.mul_(0.99).add_((0.9 * mean + 0.1 * gradient).sign(), alpha=-1e-3)
    mean.lerp_(gradient, 0.01)


class ByHand(torch.optim.Optimizer):
    """An update of one parameter, in an optimizer."""

    def __init__(self, parameters, update):
        super().__init__(parameters, {})
        self.update = update

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            states = self.state.setdefault(parameter, [torch.zeros_like(parameter) for _ in range(2)])
            self.update(parameter, parameter.grad, *states)


class Loop:
    """The same without torch's class, as a script would write it."""

    def __init__(self, parameters, update):
        self.parameters, self.update = list(parameters), update
        self.states = [[torch.zeros_like(parameter) for _ in range(2)] for parameter in self.parameters]

    @torch.no_grad()
    def step(self):
        for parameter, states in zip(self.parameters, self.states, strict=True):
            self.update(parameter, parameter.grad, *states)


@pytest.mark.parametrize("kind", [ByHand, Loop])
@pytest.mark.parametrize(
    ("update", "remedy"),
    [
        (lerped, "torch.optim.AdamW(parameters, lr=..., fused=True)"),
        (copied, "torch.optim.AdamW(parameters, lr=..., fused=True)"),
        (coupled, "torch.optim.Adam(parameters, lr=..., fused=True)"),
        (scaled, "torch.optim.RMSprop(parameters, lr=..., foreach=True)"),
        (with_momentum, "torch.optim.SGD(parameters, lr=..., momentum=..., fused=True)"),
        (by_signs, "torch.compile("),
    ],
)
def test_an_update_by_hand_is_one_finding_with_the_optimizer_that_it_is(kind, update, remedy):
    step = training(optimizer=lambda parameters: kind(parameters, update), zero=True, depth=12)
    (waste,) = unfused_optimizer(step)
    assert remedy in waste.remedy.splitlines()[0]
    assert not {"per-tensor-loop", "unfused-pointwise"} & {finding.rule for finding in found_in(step)}


def test_an_average_of_the_parameters_is_an_update_of_its_own():
    class Averaged(Loop):
        def __init__(self, parameters):
            super().__init__(parameters, lerped)
            self.averages = [parameter.detach().clone() for parameter in self.parameters]

        @torch.no_grad()
        def step(self):
            super().step()
            for average, parameter in zip(self.averages, self.parameters, strict=True):
                average.mul_(0.99)
                average.add_(parameter, alpha=0.01)

    update, average = unfused_optimizer(training(optimizer=Averaged, zero=True, depth=12))
    assert "torch.optim.AdamW" in update.remedy and "torch._foreach_lerp_" in average.remedy


def test_parameters_that_are_clamped_are_a_loop_over_tensors_and_no_update():
    class Clamped(Loop):
        def __init__(self, parameters):
            super().__init__(parameters, None)

        @torch.no_grad()
        def step(self):
            for parameter in self.parameters:
                parameter.clamp_(-0.01, 0.01)

    assert not list(unfused_optimizer(training(optimizer=Clamped, zero=True, depth=20)))
