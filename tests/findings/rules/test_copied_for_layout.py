"""Copies into contiguous memory are named only where every reader takes strides."""

import torch
from gpu_steps import examined, found_in


def found(step):
    seen = examined(lambda: step, times=lambda op, expected: 1e-3, live=True)
    return [finding.source for finding in found_in(seen, "copied-for-layout")]


X = torch.ones(64, 128)
BATCHED = torch.ones(4, 64, 128)


def test_products_read_transposed_operands():
    assert len(found(lambda: X.t().contiguous() @ X)) == 1
    assert len(found(lambda: torch.bmm(BATCHED.transpose(1, 2).contiguous(), BATCHED))) == 1


def test_a_copy_that_another_op_reads_stays():
    def step():
        copy = X.t().contiguous()
        return copy @ X, copy.exp()

    assert found(step) == []


def test_a_copy_that_is_returned_stays():
    def step():
        copy = X.t().contiguous()
        return copy @ X, copy

    assert found(step) == []


def test_a_copy_of_what_is_then_overwritten_stays():
    x = torch.ones(64, 128)

    def step():
        copy = x.t().contiguous()
        x.add_(1)
        return copy @ x

    assert found(step) == []


def test_a_view_without_rows_is_copied():
    assert found(lambda: X[:, ::2].contiguous() @ X) == []
    assert found(lambda: torch.ones(1, 64).expand(64, 64).contiguous() @ X) == []


def test_the_copy_of_a_weight_is_for_another_rule():
    layer = torch.nn.Linear(128, 64)

    def step():
        with torch.no_grad():
            return X @ layer.weight.t().contiguous()

    assert found(step) == []
