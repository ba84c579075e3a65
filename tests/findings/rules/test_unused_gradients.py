"""Which gradients are unused, and the line at which they can be avoided."""

import inspect

import pytest
import torch
from gpu_steps import examined
from torch import nn

from nearpeak.findings.rules.unused_gradients import unused_gradients

SIZE = 32
X = torch.randn(4, SIZE)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)

    def forward(self, x):
        x = self.first(x).relu()
        return self.second(x)


def sgd(*models):
    return torch.optim.SGD([parameter for model in models for parameter in model.parameters()], lr=1e-3, fused=True)


def loss_of(model, x=X):
    return model(x).square().mean()


def frozen_reference():
    policy, reference = Net(), Net()
    optimizer = sgd(policy)

    def step():
        ours = loss_of(policy)
        theirs = loss_of(reference)  # here
        (ours - theirs).square().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def two_models_at_one_line():
    student, teacher = Net(), Net()
    optimizer = sgd(student)

    def step():
        optimizer.zero_grad()
        nn.functional.mse_loss(student(X), teacher(X)).backward()  # here
        optimizer.step()

    return step


class Tower(nn.Module):
    """Has ops of its own at several lines."""

    def __init__(self):
        super().__init__()
        self.patch, self.position = nn.Linear(SIZE, SIZE), nn.Parameter(torch.randn(SIZE))
        self.blocks = nn.ModuleList(Net() for _ in range(3))

    def forward(self, x):
        x = self.patch(x) + self.position
        for block in self.blocks:
            x = block(x)
        return x


class Captioner(nn.Module):
    def __init__(self):
        super().__init__()
        self.tower, self.projector = Tower(), Net()

    def forward(self, x):
        return self.projector(self.tower(x))  # here


def frozen_tower_of_several_lines():
    model = Captioner()
    optimizer = sgd(model.projector)

    def step():
        loss_of(model).backward()
        optimizer.step()
        model.zero_grad()

    return step


def frozen_backbone():
    backbone, head = Net(), nn.Linear(SIZE, 4)
    optimizer = sgd(head)

    def step():
        features = backbone(X)  # here
        head(features).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def critics(detached):
    maker, critic = Net(), Net()
    of_maker, of_critic = sgd(maker), sgd(critic)

    def step():
        made = maker(X)
        shown = made.detach() if detached else made
        judged = critic(shown)  # here
        of_critic.zero_grad()
        judged.mean().backward(retain_graph=True)
        of_critic.step()
        critic.requires_grad_(False)
        loss = critic(made).mean()
        of_maker.zero_grad()
        loss.backward()
        of_maker.step()
        critic.requires_grad_(True)

    return step


def not_detached():
    return critics(detached=False)


def convolutions_not_detached():
    maker, critic = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 1, 3)
    of_maker, of_critic = sgd(maker), sgd(critic)
    x = torch.randn(1, 1, 16, 16)

    def step():
        made = maker(x)
        of_critic.zero_grad()
        critic(made).mean().backward(retain_graph=True)  # here
        of_critic.step()
        critic.requires_grad_(False)
        of_maker.zero_grad()
        critic(made).mean().backward()
        of_maker.step()
        critic.requires_grad_(True)

    return step


def critic_gets_gradients_of_the_other_pass():
    maker, critic = Net(), Net()
    of_maker, of_critic = sgd(maker), sgd(critic)

    def step():
        made = maker(X)
        of_critic.zero_grad()
        critic(made.detach()).mean().backward()
        of_critic.step()
        of_maker.zero_grad()
        critic(made).mean().backward()  # here
        of_maker.step()

    return step


def attack():
    model = Net()
    optimizer = sgd(model)

    def step():
        x = X.clone().requires_grad_()
        loss_of(model, x).backward()  # here
        harder = (X + 0.1 * x.grad.sign()).detach()
        optimizer.zero_grad(set_to_none=False)
        loss_of(model, harder).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    return step


def line_of(build):
    written = {not_detached: critics, frozen_tower_of_several_lines: Captioner}.get(build, build)
    lines, first = inspect.getsourcelines(written)
    return next(f"test_unused_gradients.py:{first + place}" for place, line in enumerate(lines) if "# here" in line)


def wastes(build):
    def warm():
        step = build()
        step()
        step()
        return step

    return list(unused_gradients(examined(warm, live=True)))


@pytest.mark.parametrize(
    ("build", "what"),
    [
        (frozen_reference, "no_grad"),
        (two_models_at_one_line, "no_grad"),
        (frozen_tower_of_several_lines, "no_grad"),
        (frozen_backbone, "no_grad"),
        (not_detached, "detach"),
        (convolutions_not_detached, "detach"),
        (critic_gets_gradients_of_the_other_pass, "requires_grad_"),
        (attack, "autograd.grad"),
    ],
)
def test_the_line_and_the_remedy(build, what):
    (waste,) = wastes(build)
    assert waste.source == line_of(build)
    assert what in waste.remedy


def test_all_of_the_backward_pass_of_a_frozen_model_goes():
    (waste,) = wastes(frozen_backbone)
    # of each layer a product and a sum, and what is added to the gradients that are there; the activation; and for the
    # head and the second layer the gradient of the input
    assert len(waste.gains) == 2 * (2 + 2) + 1 + 2


def test_of_an_attack_only_the_gradients_of_the_parameters_go():
    step_wastes = wastes(attack)
    assert len(step_wastes[0].gains) == 2 * (2 + 2)


def accumulated():
    model = Net()
    optimizer, count = sgd(model), [0]

    def step():
        loss_of(model).backward()
        count[0] += 1
        if count[0] % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()

    return step


def updated_by_hand():
    model = Net()

    def step():
        loss_of(model).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 1e-3 * parameter.grad
                parameter.grad = None

    return step


def clipped_together():
    policy, reference = Net(), Net()
    optimizer = sgd(policy)

    def step():
        (loss_of(policy) - loss_of(reference)).backward()
        nn.utils.clip_grad_norm_([*policy.parameters(), *reference.parameters()], 1.0)
        optimizer.step()
        policy.zero_grad()
        reference.zero_grad()

    return step


def optimizer_first():
    model = Net()
    optimizer = sgd(model)

    def step():
        optimizer.step()
        optimizer.zero_grad()
        loss_of(model).backward()

    return step


def one_of_two_optimizers():
    policy, other = Net(), Net()
    optimizer, later = sgd(policy), sgd(other)

    def step():
        (loss_of(policy) + loss_of(other)).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert later  # it takes a step now and then

    return step


def hooked():
    policy, other = Net(), Net()
    optimizer = sgd(policy)
    for parameter in other.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: None)

    def step():
        (loss_of(policy) + loss_of(other)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@pytest.mark.parametrize(
    "build",
    [
        accumulated,
        updated_by_hand,
        clipped_together,
        optimizer_first,
        one_of_two_optimizers,
        hooked,
        lambda: critics(detached=True),
    ],
)
def test_gradients_that_somebody_may_read(build):
    assert not wastes(build)
