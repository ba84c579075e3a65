"""The peak of made-up lives."""

import pytest

from nearpeak.ops.lifetimes import Lifetime, Lifetimes
from nearpeak.ops.op import Op
from nearpeak.profiles.memory import peak_memory

OPS = [
    Op(
        name=f"aten.op{number}.default",
        arguments={},
        outputs=(),
        phase="backward",
        module=f"layer.{number}",
        source="a:1",
    )
    for number in range(4)
]


def life(size, born, died, category="activations"):
    return Lifetime(bytes=size, born=born, died=died, category=category)


LIVES = (
    life(100, -1, None, "parameters"),
    life(50, -1, -1),  # gone before the first op
    life(30, 0, 1),
    life(20, 1, 2),
    life(7, 2, None, "gradients"),
    life(5, -1, 2, "optimizer"),
)


def lives(**changes):
    return Lifetimes(**{"device": "cuda:0", "capacity_bytes": 1000.0, "lives": LIVES, **changes})


def test_the_peak_is_the_op_during_which_most_is_there():
    found = peak_memory(lives(), OPS)
    assert (found.op, found.phase, found.module, found.source) == ("aten.op1.default", "backward", "layer.1", "a:1")
    assert found.peak_bytes == 100 + 30 + 20 + 5
    sums = (found.parameters_bytes, found.gradients_bytes, found.optimizer_bytes, found.activations_bytes)
    assert sums == (100, 0, 5, 50)
    assert (found.other_bytes, found.workspace_bytes, found.unused_bytes) == (None, None, None)


def test_the_allocator_knows_of_more():
    found = peak_memory(lives(levels={0: 150.0, 1: 165.0}, peak_bytes=200.0, reserved_bytes=256.0), OPS)
    assert (found.other_bytes, found.workspace_bytes, found.unused_bytes) == (10.0, 35.0, 56.0)
    assert found.peak_bytes == 200.0


def test_a_peak_of_the_allocator_below_what_is_there_takes_nothing_away():
    found = peak_memory(lives(levels={1: 140.0}, peak_bytes=150.0, reserved_bytes=150.0), OPS)
    assert (found.other_bytes, found.workspace_bytes, found.unused_bytes) == (0.0, 0.0, 0.0)
    assert found.peak_bytes == 155.0


def test_the_first_of_equal_peaks_counts():
    assert peak_memory(lives(lives=(life(8, -1, None),)), OPS).op == "aten.op0.default"


def test_without_ops_there_is_no_peak():
    assert peak_memory(lives(), []) is None


@pytest.mark.parametrize("died", [2, None])
def test_what_is_born_at_the_last_op_counts(died):
    assert peak_memory(lives(lives=(life(8, 2, died),)), OPS[:3]).peak_bytes == 8
