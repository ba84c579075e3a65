"""Backward passes in a live trace: which ops each has, and that the program sees none of the watching."""

from __future__ import annotations

import warnings

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from nearpeak.trace.trace import trace


def test_each_pass_has_its_ops_and_the_lines_that_began_it():
    model, x = nn.Linear(4, 4), torch.ones(2, 4)

    def step():
        model(x).sum().backward()
        model.weight.grad.norm()
        model(x).mean().backward()

    traced = trace(step, live=True)
    assert len(traced.passes) == 2
    in_passes = {index for each in traced.passes for index in each.ops}
    assert in_passes == {index for index, op in enumerate(traced.ops) if op.phase == "backward"}
    first, second = (each.stack[-1].rpartition(":")[2] for each in traced.passes)
    assert int(second) == int(first) + 2


def test_a_pass_inside_of_another_one_is_part_of_it():
    model, x = nn.Linear(4, 4), torch.ones(2, 4, requires_grad=True)
    traced = trace(lambda: checkpoint(model, x, use_reentrant=True).sum().backward(), live=True)
    assert len(traced.passes) == 1
    assert all(index in traced.passes[0].ops for index, op in enumerate(traced.ops) if op.phase == "backward")


def test_a_pass_that_fails_ends_with_the_next_op():
    x = torch.ones(3, requires_grad=True)

    def step():
        y = x.exp()
        y.sum().backward()
        try:
            y.sum().backward()  # its graph is gone
        except RuntimeError:
            return x.detach() + 1
        raise AssertionError

    traced = trace(step, live=True)
    assert traced.ops[-1].packet == "aten.add"
    assert not any(len(traced.ops) - 1 in each.ops for each in traced.passes)


def test_warnings_in_a_backward_pass_name_the_lines_that_they_name_alone():
    """torch names a line so many calls above: a function of nearpeak's on the stack would shift it."""
    model, x = nn.Linear(4, 4), torch.ones(2, 4)
    model.register_full_backward_hook(lambda module, inputs, outputs: None)

    def places(run):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            run()
        return [(each.filename, each.lineno) for each in seen if "backward hook" in str(each.message)]

    def step():
        model(x).sum().backward()

    alone = places(step)
    assert alone and places(lambda: trace(step, live=True)) == alone
