"""What tensors and rows are known by must not outlive what it says."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

from nearpeak.trace import memo
from nearpeak.trace.fake import fake
from nearpeak.trace.trace import trace


def assigned(x):
    """Other views of the same storage, without an op."""
    y = x + 1
    y.data = y.data.t()
    z = y * 2
    y.data = y.data[1:]
    return z, y * 2


def other_storage(x):
    y = x + 1
    y.data = torch.zeros(8, 8)
    return y * 2


def resized(x):
    y = x + 1
    y.untyped_storage().resize_(1024)
    return y * 2


def turned(x):
    y = x + 1
    z = y * 2
    y.t_()
    w = y * 2
    y.unsqueeze_(0)
    v = y * 2
    y.resize_(4)
    v2 = y * 2
    y.set_(x)
    return z, w, v, v2, y * 2


def by_rows(x):
    many = [x + 1, x.t() + 1, x * 2, x[:2] * 2]
    torch._foreach_mul_(many, 2.0)
    torch._foreach_mul_(many, torch.full((), 2.0))
    torch._foreach_mul_(many, [1.0, 2.0, 3.0, 4.0])
    torch._foreach_mul_(many, [1, 2.0, 3, 4])
    torch._foreach_add_([many[0], many[0]], [many[0], many[1]])
    torch._foreach_add_(many, many, alpha=2)
    roots = torch._foreach_sqrt(many)
    torch._foreach_addcdiv_(many, roots, roots, [1.0, 1.0, 2.0, 2.0])
    views = torch._foreach_mul(list(x.unbind(0)), 3)
    return roots, views, torch._foreach_norm(many), torch._foreach_add(many, [torch.zeros(())] * 4)


CASES = [assigned, other_storage, resized, turned, by_rows]


@pytest.mark.parametrize("run", CASES)
@pytest.mark.parametrize("inference", [False, True])
def test_the_same_ops_with_and_without_memory(run, inference, monkeypatch):
    if inference and run in (assigned, other_storage, turned):
        pytest.skip("torch forbids it in inference mode")
    with fake(), torch.inference_mode(inference):
        x = torch.zeros(4, 4)
        monkeypatch.setattr(memo, "recipes", {})
        monkeypatch.setattr(memo, "_row_recipes", {})
        first, second = trace(run, x), trace(run, x)
        monkeypatch.setattr(memo, "can_memoize", lambda mode: False)
        asked = trace(run, x)
    assert first == asked
    assert second == asked


def test_assignment_is_watched_in_traces_only():
    assert "data" not in vars(FakeTensor)
    trace(assigned, torch.zeros(4, 4))
    assert "data" not in vars(FakeTensor)


def test_rows_of_one_shape_are_asked_for_once(monkeypatch):
    monkeypatch.setattr(memo, "_row_recipes", {})
    trace(lambda x: torch._foreach_mul_([x + 1 for _ in range(20)], 2.0), torch.zeros(4, 4))
    assert len(memo._row_recipes) == 1
