"""The CTC loss of a live trace is that of the program alone: lengths in the host's memory are read into lists."""

import pytest
import torch
from torch import nn

from nearpeak.trace.trace import trace


def ctc_ops(step):
    return [op.name for op in trace(step, live=True).ops if "ctc" in op.name]


def by_torch(*args, **kwargs):
    return torch.ctc_loss(*args, **kwargs, reduction=1)


@pytest.mark.parametrize("make", [torch.tensor, tuple], ids=["tensors", "lists"])
@pytest.mark.parametrize(
    "loss",
    [nn.functional.ctc_loss, nn.CTCLoss(), by_torch],
    ids=["function", "module", "torch"],
)
def test_lengths_of_the_host_are_handed_on_as_lists(loss, make):
    scores = torch.randn(10, 2, 5, requires_grad=True)
    targets = torch.randint(1, 5, (2, 3))
    lengths, target_lengths = make((10, 8)), make((3, 2))
    seen = []

    def step():
        scores.grad = None
        value = loss(scores.log_softmax(-1), targets, lengths, target_lengths=target_lengths)
        value.backward()
        seen.append((value.detach(), scores.grad))

    step()
    original = torch.ctc_loss
    assert ctc_ops(step) == ["aten._ctc_loss.default", "aten._ctc_loss_backward.default"]
    assert torch.ctc_loss is original
    for alone, traced in zip(*seen, strict=True):
        assert torch.equal(alone, traced)


def test_a_sequence_without_a_batch():
    scores, targets = torch.randn(10, 5).log_softmax(-1), torch.tensor([1, 2, 3])
    assert ctc_ops(lambda: nn.functional.ctc_loss(scores, targets, torch.tensor(10), torch.tensor(3))) == [
        "aten._ctc_loss.default"
    ]


@pytest.mark.parametrize("make", [torch.tensor, tuple], ids=["tensors", "lists"])
def test_fake_tensors_have_no_memory_for_lengths(make):
    def step():
        scores, targets = torch.empty(10, 2, 5, requires_grad=True), torch.empty(2, 3, dtype=torch.long)
        nn.functional.ctc_loss(scores.log_softmax(-1), targets, make((10, 8)), make((3, 2))).backward()

    shapes = {op.name: [tensor.shape for tensor in op.outputs] for op in trace(step).ops if "ctc" in op.name}
    assert shapes["aten._ctc_loss.Tensor"] == [(2,), (2, 10, 7)]
    assert len(shapes) == 2
