"""Loops of the user's code, found again in the ops of a step."""

import pytest
import torch
from torch import nn

from nearpeak.findings.loops import find_loops
from nearpeak.trace.trace import trace


def loops_of(step):
    return find_loops(trace(step, live=True).ops)


def shape(loop):
    """How often a loop runs, and the turns of each run."""
    return [len(run) for run in loop.runs]


def test_a_loop_has_its_turns_and_all_of_their_ops():
    weight, x = torch.randn(4, 4), torch.randn(4, 4)

    def step():
        h = x
        for _ in range(10):
            h = torch.tanh(h @ weight)
        return h.sum()

    (loop,) = loops_of(step)
    assert shape(loop) == [10]
    assert {len(turn) for turn in loop.turns} == {2} and len(loop.members) == 20


def test_modules_and_shapes_may_differ_between_turns():
    layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

    def step():
        return [layer(torch.zeros(2 + number, 8)).relu() for number, layer in enumerate(layers)]

    (loop,) = loops_of(step)
    assert shape(loop) == [6]


def test_a_function_that_is_called_twice_runs_its_loop_twice():
    def power(x):
        for _ in range(5):
            x = x @ x
        return x

    def step():
        first = power(torch.eye(3)) + 1
        return power(first) * 2

    (loop,) = loops_of(step)
    assert shape(loop) == [5, 5]


def test_inner_and_outer_loops_are_both_found():
    def step():
        total = torch.zeros(3)
        for _ in range(4):
            total = total + 1
            for _ in range(6):
                total = total * 2
        return total

    assert sorted(map(shape, loops_of(step)), key=len) == [[4], [6] * 4]


@pytest.mark.parametrize("empty", [[0], [2], [1, 2, 5], [7]])
def test_a_turn_that_ends_early_is_a_turn(empty):
    def step():
        out = []
        for number in range(8):
            mask = torch.zeros(3)
            if number in empty:
                continue
            out.append((mask + number).exp())
        return out

    (loop,) = loops_of(step)
    assert shape(loop) == [8]


def test_three_terms_and_straight_code_are_no_loops():
    x = torch.randn(4, 4)

    def step():
        y = torch.tanh(x + x + x)
        return torch.relu(y) @ x

    assert not loops_of(step)


def test_a_turn_begins_with_its_first_op_also_if_it_has_that_twice():
    first, second, x = nn.Linear(4, 4), nn.Linear(4, 4), torch.randn(2, 4)

    def step():
        h = x
        for _ in range(6):
            h = first(h) + second(h)
        return h

    (loop,) = loops_of(step)
    assert len(loop.members) == 6 * 5  # two transposed weights, two products, a sum
    assert len({len(turn) for turn in loop.turns}) == 1


def test_a_branch_that_some_turns_take_does_not_end_the_loop():
    def step():
        best, total = 0, torch.zeros(3)
        for number in range(12):
            total = total + 1
            if number in (1, 4, 5):
                best = best + torch.ones(3) * 2
        return total + best

    assert [12] in map(shape, loops_of(step))
