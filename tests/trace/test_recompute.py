"""Which ops of a backward pass are a forward that runs again."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from nearpeak.trace.trace import trace

PRODUCTS = ("aten.mm.default", "aten.addmm.default")


def products(found):
    """Of each product: its phase, and whether it was recomputed."""
    return [(op.phase, op.recomputed) for op in found.ops if op.name in PRODUCTS]


@pytest.mark.parametrize("live", [False, True], ids=["fake", "live"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["by hooks", "reentrant"])
def test_a_checkpointed_forward_is_known_when_it_runs_again(reentrant, live):
    block = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())

    def step(x):
        checkpoint(block, x, use_reentrant=reentrant).sum().backward()

    found = products(trace(step, torch.ones(4, 8, requires_grad=True), live=live))
    assert found == [("forward", False), ("backward", True), ("backward", False), ("backward", False)]


@pytest.mark.parametrize("reentrant", [False, True], ids=["by hooks", "reentrant"])
def test_a_checkpointed_function_without_a_module_is_known_too(reentrant):
    def step(x, weight):
        checkpoint(lambda a: torch.mm(a, weight).exp(), x, use_reentrant=reentrant).sum().backward()

    x, weight = torch.ones(4, 8, requires_grad=True), torch.ones(8, 8, requires_grad=True)
    found = products(trace(step, x, weight, live=True))
    assert found == [("forward", False), ("backward", True), ("backward", False), ("backward", False)]


def test_what_a_checkpointed_module_does_without_gradients_runs_again_too():
    class Half(torch.nn.Module):
        def forward(self, x):
            with torch.no_grad():
                scale = torch.mm(x, x.t()).mean()
            return (x * scale).exp()

    half = Half()

    def step(x):
        checkpoint(half, x, use_reentrant=False).sum().backward()

    found = products(trace(step, torch.ones(4, 4, requires_grad=True), live=True))
    assert found == [("forward", False), ("backward", True)]


def test_a_backward_pass_that_is_differentiated_itself_is_no_forward():
    model = torch.nn.Linear(8, 8)

    def step(x):
        (slope,) = torch.autograd.grad(model(x).exp().sum(), x, create_graph=True)
        slope.square().sum().backward()

    found = trace(step, torch.ones(4, 8, requires_grad=True), live=True)
    assert len(products(found)) > 4
    assert not any(op.recomputed for op in found.ops)


def test_the_backward_of_a_function_of_the_users_own_is_no_forward():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            context.save_for_backward(x)
            return torch.mm(x, x)

        @staticmethod
        def backward(context, gradient):
            (x,) = context.saved_tensors
            return torch.mm(gradient, x.t()) + torch.mm(x.t(), gradient)

    def step(x):
        Double.apply(x).sum().backward()

    found = products(trace(step, torch.ones(4, 4, requires_grad=True), live=True))
    assert found == [("forward", False), ("backward", False), ("backward", False)]
