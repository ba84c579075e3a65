"""Which lists of near pairs could be kept for several steps."""

import pytest
import torch
from gpu_steps import found_in, with_times

from nearpeak.trace.trace import trace

RULE = "pairs-listed-every-step"
RADIUS, BOX = 0.5, 4.0


def found(step):
    """The findings of a step on real tensors, where ops take the longer the more they read and write."""

    def times(op, expected):
        return 1e-9 * sum(tensor.bytes for tensor in (*op.inputs, *op.outputs)) if expected else 0.0

    with torch.no_grad():
        seen = with_times(trace(step, live=True, next_step=True), times)
    return seen, found_in(seen, RULE)


def by_differences(x):
    delta = x[:, None] - x[None]
    delta = delta - BOX * torch.round(delta / BOX)
    return (delta.norm(dim=-1) < RADIUS).triu(diagonal=1).nonzero().unbind(1)


def by_cdist(x):
    return torch.where(torch.cdist(x, x).le(RADIUS))


def by_products(x):
    squares = x.square().sum(-1)
    far = squares[:, None] + squares - 2 * x @ x.T
    first, second = torch.nonzero(far < RADIUS**2, as_tuple=True)
    return first, second


def by_mask(x):
    near = (x.unsqueeze(0) - x.unsqueeze(1)).square().sum(2) < RADIUS**2
    count = torch.arange(len(x))
    return count[:, None].expand(near.shape)[near], count.expand(near.shape)[near]


class Liquid:
    """Points that repel each other."""

    def __init__(self, pairs, every=1):
        self.x = BOX * torch.rand(128, 3)
        self.v = torch.zeros(128, 3)
        self.list_pairs, self.every, self.count = pairs, every, 0

    def forces(self, first, second):
        delta = self.x[first] - self.x[second]
        return torch.zeros_like(self.x).index_add(0, first, delta).index_add(0, second, -delta)

    def step(self):
        if self.count % self.every == 0:
            self.pairs = self.list_pairs(self.x)
        self.count += 1
        self.move()

    def move(self):
        self.v = 0.9 * self.v + 0.01 * self.forces(*self.pairs)
        self.x = torch.remainder(self.x + 0.01 * self.v, BOX)


class InPlace(Liquid):
    def move(self):
        self.v.mul_(0.9).add_(self.forces(*self.pairs), alpha=0.01)
        self.x.add_(self.v, alpha=0.01).remainder_(BOX)


@pytest.mark.parametrize("program", [Liquid, InPlace])
@pytest.mark.parametrize("pairs", [by_differences, by_cdist, by_products, by_mask])
def test_a_list_of_points_that_move_is_found_where_it_is_asked_for(program, pairs):
    seen, findings = found(program(pairs).step)
    (finding,) = findings
    assert finding.source == f"test_pairs_listed_every_step.py:{Liquid.step.__code__.co_firstlineno + 2}"
    assert finding.saving_s == pytest.approx(0.9 * seen.seconds(finding.ops))
    assert "128 rows" in finding.evidence


@pytest.mark.parametrize("pairs", [by_differences, by_cdist])
def test_a_list_that_is_kept_for_some_steps(pairs):
    assert not found(Liquid(pairs, every=10).step)[1]


def test_the_pairs_of_new_points_in_each_step():
    kept = []

    def step():
        points = torch.rand(128, 3) * BOX
        kept.append(points)
        return torch.zeros(128).index_add(0, by_cdist(points)[0], torch.ones(()).expand(len(by_cdist(points)[0])))

    assert not found(step)[1]


def test_points_that_stay_are_computed_every_step():
    points, state = torch.rand(128, 3), torch.rand(128, 3)

    def step():
        first, second = by_cdist(points)
        state.add_(torch.zeros_like(state).index_add(0, first, state[second]), alpha=0.1)

    assert not found(step)[1]


def test_products_of_rows_that_no_threshold_is_for():
    state = Liquid(by_cdist)

    def step():
        weights = torch.softmax(state.x @ state.x.T, -1)
        state.x = 0.5 * state.x + 0.5 * weights @ state.x

    assert not found(step)[1]
