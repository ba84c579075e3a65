import pytest
from made_up import profile

from nearpeak.profiles.ranking import ranking


def test_each_instant_is_charged_once():
    found = profile()
    assert [op.measured_s for op in found.ops] == [2.0, 2.0, 1.0]
    assert [op.kernels for op in found.ops] == [1, 1, 1]
    assert found.kernel_s == 5.0
    assert found.communication_s == 1.0


def test_the_waterfall_has_every_second():
    found = profile().waterfall
    assert {part.name: part.seconds for part in found.parts} == {
        "ideal": 1.0,
        "traffic": 1.0,
        "fusion": 1.0,
        "slow kernels": 1.0,
        "not modeled": 1.0,
        "communication": 1.0,
        "idle": 4.0,
    }


def test_what_has_no_bound_loses_nothing_that_is_known():
    found = profile()
    assert [op.lost_s for op in found.ops] == [1.0, 0.0, 0.0]
    assert found.modeled_share == pytest.approx(4 / 5)


def test_a_wall_time_below_what_the_kernels_took_is_theirs():
    assert profile(wall_s=1.0).wall_s == 6.0


def test_the_ranking_is_by_loss_and_what_is_unknown_by_its_time():
    by_op = ranking(profile())
    assert [rank.key for rank in by_op] == [
        "aten.mul.Tensor forward",
        "mine.kernel forward",
        "aten.mul.Tensor backward",
    ]
    by_line = ranking(profile(), "line")
    assert [(rank.key, rank.ops, rank.measured_s, rank.lost_s) for rank in by_line] == [
        ("train.py:4", 2, 4.0, 1.0),
        ("train.py:9", 1, 1.0, 0.0),
    ]
    assert [rank.key for rank in ranking(profile(), "module")] == ["layer.0", "layer.1"]


def test_it_is_named_in_one_line():
    assert repr(profile()) == "<Profile of train.py on Toy 1: 10.0 s a step, ideal 1.00 s>"
