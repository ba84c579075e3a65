import pytest
import torch

from nearpeak.capture.live import LiveTrace
from nearpeak.capture.steps import watching_steps


class Watcher:
    def __init__(self):
        self.events = []

    def optimizer_begins(self, optimizer):
        self.events.append("begins")

    def optimizer_ends(self):
        self.events.append("ends")

    def step_ends(self):
        self.events.append("step")


@pytest.fixture
def watcher():
    return Watcher()


def train(model, optimizer, steps, *, accumulated=1, scheduler=None):
    for _ in range(steps):
        for _ in range(accumulated):
            model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


@pytest.mark.parametrize("accumulated", [1, 3])
def test_a_training_step_ends_after_the_optimizers(watcher, accumulated):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters())
    with watching_steps(watcher):
        train(model, optimizer, 4, accumulated=accumulated)
    # The first one is not seen to end: the optimizer was not known before.
    assert watcher.events == ["begins", "ends"] + ["begins", "ends", "step"] * 3
    assert "step" not in vars(optimizer)


def test_the_first_of_several_optimizers_ends_the_steps(watcher):
    models = [torch.nn.Linear(4, 4) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters()) for model in models]
    with watching_steps(watcher):
        for _ in range(3):
            for model, optimizer in zip(models, optimizers, strict=True):
                train(model, optimizer, 1)
    assert watcher.events.count("step") == 2


def test_a_schedule_of_learning_rates_works_on_and_is_left_as_it_was(watcher):
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    own = vars(optimizer)["step"]
    with watching_steps(watcher):
        train(model, optimizer, 3, scheduler=scheduler)  # a warning of the scheduler's would be an error here
    assert watcher.events.count("step") == 2
    assert vars(optimizer)["step"] is own


def test_inference_takes_a_step_with_each_outermost_module(watcher):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    with watching_steps(watcher):
        with torch.no_grad():
            for _ in range(3):
                model(torch.randn(2, 4))
        model(torch.randn(2, 4))  # with gradients: a training step that is not over
    assert watcher.events == ["step"] * 3


def test_a_live_trace_between_two_moments_knows_phases_and_changes_nothing():
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters())
    live = LiveTrace()
    model(torch.ones(2, 4)).sum().backward()
    live.optimizer_begins(optimizer)
    optimizer.step()
    live.optimizer_ends()
    traced = live.stop()
    assert [op.phase for op in traced.ops if op.packet == "aten.addmm"] == ["forward"]
    assert {"forward", "backward", "optimizer"} == {op.phase for op in traced.ops}
    before = len(traced.ops)
    model(torch.ones(2, 4))
    assert len(traced.ops) == before
    assert model.weight.grad is not None
