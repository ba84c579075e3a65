"""What becomes of the gradients of a live trace, and the lines of the user's own behind each op."""

import torch
from torch import nn

from nearpeak.trace.trace import trace


def step_of(change):
    """A step on two layers of which an optimizer has the first; `change` is called after the backward pass."""
    first, second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.SGD(first.parameters(), lr=0.1)
    x = torch.randn(2, 4)

    def step():
        second(first(x)).sum().backward()
        change(first, second, optimizer)

    step()
    return trace(step, live=True).gradients


def plain(first, second, optimizer):
    optimizer.step()
    optimizer.zero_grad()


def test_gradients_of_parameters_that_no_optimizer_has():
    second, first = step_of(plain)
    assert (first.was_none, first.is_stepped, first.is_left) == (True, True, False)
    assert len(first.optimizer_steps) == 1
    assert (second.was_none, second.is_stepped, second.is_left) == (False, False, True)
    assert second.optimizer_steps is None


def test_gradients_that_are_dropped_before_the_optimizer_takes_its_step():
    def change(first, second, optimizer):
        first.zero_grad()
        optimizer.step()

    _, first = step_of(change)
    assert not first.is_stepped and not first.is_left and len(first.optimizer_steps) == 1


def test_an_optimizer_that_takes_no_step_still_has_its_parameters():
    _, first = step_of(lambda first, second, optimizer: None)
    assert first.is_left and not first.is_stepped and first.optimizer_steps == ()


def test_hooks_watch_a_gradient():
    seen = []

    def change(first, second, optimizer):
        if not seen:
            second.weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter))
            seen.append(None)

    second, first = step_of(change)
    assert second.is_watched and not first.is_watched


def test_sparse_gradients_have_readers_that_are_not_seen():
    table = nn.Embedding(8, 4, sparse=True)
    gradients = trace(lambda: table(torch.tensor([1])).sum().backward(), live=True).gradients
    assert not [gradient for gradient in gradients if not gradient.is_watched]


def test_an_op_of_autograd_has_the_stack_of_the_forward_op_behind_it():
    weight = nn.Parameter(torch.randn(4, 4))

    def called():
        return (weight @ weight).sum()

    def step():
        called().backward()

    traced = trace(step, live=True)
    assert len(traced.stacks) == len(traced.ops)
    (forward, *backward) = [
        (op.phase, stack) for op, stack in zip(traced.ops, traced.stacks, strict=True) if op.packet == "aten.mm"
    ]
    assert forward[0] == "forward" and {phase for phase, _ in backward} == {"backward"}
    assert [line.rpartition(":")[0] for line in forward[1][-2:]] == ["test_gradients.py"] * 2
    assert {stack for _, stack in backward} == {forward[1]}
