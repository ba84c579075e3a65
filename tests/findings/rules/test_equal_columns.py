"""Which results have equal columns."""

import pytest
import torch
from gpu_steps import examined, found_in
from planted import load, planted

NAME = "equal-columns"
NODES, EDGES, WIDTH = 2000, 20000, 256


def of(compute):
    def build():
        index = torch.randint(NODES, (EDGES,), device="cuda")
        rows = torch.randn(EDGES, WIDTH, device="cuda")
        return lambda: compute(rows, index)

    return examined(build)


def wide(index):
    return index[:, None].expand(-1, WIDTH)


def test_the_corpus():
    module = load("equal_columns")
    (finding,) = found_in(examined(lambda: module.waste("cuda")), NAME)
    assert finding.source == planted("equal_columns")
    assert not found_in(examined(lambda: module.clean("cuda")), NAME)


@pytest.mark.parametrize(
    "compute",
    [
        lambda x, index: torch.zeros_like(x[:NODES]).scatter_add_(0, wide(index), torch.ones_like(x)).clamp(min=1),
        lambda x, index: x.new_zeros(NODES, WIDTH).index_add(0, index, torch.full_like(x, 2.0)),
        lambda x, index: x.new_zeros(NODES, WIDTH).index_add_(0, index, x[:, :1].expand_as(x).clone()),
        lambda x, index: x[:, :1].expand_as(x).exp().index_select(0, index),
        lambda x, index: torch.ones_like(x).cumsum(0),
        lambda x, index: x.new_zeros(NODES, EDGES) @ torch.ones_like(x),
        lambda x, index: (x[:, :1] > 0).expand_as(x).float().view(-1, 10, WIDTH).sum(1),
        lambda x, index: x.new_zeros(WIDTH, NODES).scatter_add_(1, wide(index).T, torch.ones_like(x.T)),
        lambda x, index: x.gather(1, (index % WIDTH)[:, None].expand_as(x)),
    ],
    ids=["counts", "twos", "clone", "select", "positions", "product", "mask", "transposed", "picked"],
)
def test_equal_columns(compute):
    step = of(compute)
    (finding,) = found_in(step, NAME)
    assert finding.saving_s > 0.5 * step.seconds(range(len(step.ops)))


@pytest.mark.parametrize(
    "compute",
    [
        lambda x, index: x.new_zeros(NODES, WIDTH).index_add_(0, index, x),
        lambda x, index: x.new_zeros(NODES).index_add_(0, index, torch.ones_like(x[:, 0])),
        lambda x, index: x.new_zeros(NODES, 1).index_add_(0, index, torch.ones_like(x[:, :1])),
        lambda x, index: x.clone().index_add_(0, index.clamp(max=5), torch.ones_like(x)),
        lambda x, index: x.gather(0, wide(index)),
        lambda x, index: torch.ones_like(x).tril().sum(0, keepdim=True),
        lambda x, index: torch.ones_like(x).mul_(x).index_select(0, index),
        lambda x, index: torch.ones_like(x) * x,
        lambda x, index: torch.ones_like(x).add_(torch.rand_like(x)).index_select(0, index),
        lambda x, index: x.new_zeros(NODES, WIDTH).scatter_add_(0, wide(index)[:, :9], torch.ones_like(x)),
    ],
    ids=["rows", "vector", "one", "added", "gather", "triangle", "written", "pointwise", "noise", "part"],
)
def test_other_columns_differ(compute):
    assert not found_in(of(compute), NAME)
