"""Whether autograd recorded a forward is known of a live trace."""

import pytest
import torch

from nearpeak.trace.trace import trace

MODEL, X = torch.nn.Linear(8, 8), torch.randn(2, 8)


@pytest.mark.parametrize(
    ("fn", "recorded"),
    [
        (MODEL, True),
        (lambda x: MODEL(x).sum().backward(), True),
        (torch.no_grad()(lambda x: MODEL(x)), False),
        (torch.inference_mode()(lambda x: MODEL(x)), False),
        (lambda x: x.relu(), False),
        (lambda x: torch._foreach_mul([MODEL.weight, MODEL.bias], 2.0), True),
    ],
    ids=["a forward", "a training step", "no_grad", "inference_mode", "nothing requires gradients", "a list"],
)
def test_a_recorded_forward(fn, recorded):
    assert trace(fn, X, live=True).graph_recorded is recorded


def test_looking_at_gradients_keeps_no_tensor_alive():
    lives = trace(lambda x: x.exp().relu().sum(), X, live=True).lives
    assert [life.died for life in lives.lives if life.born == 0] == [1]
