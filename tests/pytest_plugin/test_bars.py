"""What a marker may say, and what it is told when it says something else."""

from __future__ import annotations

import pytest

from nearpeak.errors import UsageError
from nearpeak.pytest_plugin.measured_test import Bars, bars_from_markers


def bars(**given: object) -> Bars:
    return bars_from_markers([((), given)])


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ({"of_bound": 0.5}, 0.5),
        ({"of_bound": "50%"}, 0.5),
        ({"of_bound": "50 %"}, 0.5),
        ({"of_bound": 1}, 1.0),
        ({"floor": "ideal"}, "ideal"),
        ({"step_time": "12 ms"}, 0.012),
        ({"step_time": "12ms"}, 0.012),
        ({"step_time": "1.5 s"}, 1.5),
        ({"step_time": "250 µs"}, 250e-6),
        ({"step_time": 2}, 2.0),
        ({"peak_memory": "3 GiB"}, 3 * 2**30),
        ({"peak_memory": "3 GB"}, 3e9),
        ({"peak_memory": 1024}, 1024.0),
        ({"no_finding_above": "5%"}, 0.05),
        ({"no_finding_above": 0}, 0.0),
        ({"ignore": "launch-bound"}, ("launch-bound",)),
        ({"ignore": ["a", "b@train.py:4"]}, ("a", "b@train.py:4")),
        ({"device": "gpu"}, "gpu"),
        ({"grade": "A"}, "A"),
    ],
)
def test_values(given: dict[str, object], read: object):
    assert getattr(bars(**given), next(iter(given))) == pytest.approx(read)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"of_bund": 0.5}, "no 'of_bund'. Did you mean 'of_bound'"),
        ({"of_bound": 1.5}, "nothing is faster than its bound"),
        ({"of_bound": 0}, "nothing is faster than its bound"),
        ({"of_bound": True}, "no share"),
        ({"of_bound": "half"}, "no share"),
        ({"of_bound": "-5%"}, "no share"),
        ({"of_bound": float("nan")}, "no share"),
        ({"floor": "written"}, "Valid: 'as written', 'fused', 'ideal'"),
        ({"step_time": "12"}, 'write "12 ms"'),
        ({"step_time": "12 minutes"}, "Units: s, ms, us"),
        ({"step_time": 0}, 'write "12 ms"'),
        ({"peak_memory": "3 Gib"}, "Units: B, kB"),
        ({"baseline": "a", "within": "x"}, "no share"),
        ({"baseline": "../a", "within": "5%"}, "cannot be the name of a file"),
        ({"baseline": "a/b", "within": "5%"}, "cannot be the name of a file"),
        ({"baseline": "a"}, "together"),
        ({"within": "5%"}, "together"),
        ({"device": ""}, "no text"),
        ({"grade": "F"}, "Valid: 'A', 'B', 'C'"),
    ],
)
def test_mistakes(given: dict[str, object], message: str):
    with pytest.raises(UsageError) as raised:
        bars(**given)
    assert message in str(raised.value)


def test_positional_arguments_are_a_mistake():
    with pytest.raises(UsageError, match=r"takes names, as in of_bound=0.5, and got 0.5"):
        bars_from_markers([((0.5,), {})])


def test_the_nearest_marker_counts():
    found = bars_from_markers([((), {"of_bound": 0.5}), ((), {"of_bound": 0.2, "step_time": "1 s"})])
    assert (found.of_bound, found.step_time) == (0.5, 1.0)
    assert found.limits == ("of_bound", "step_time")


def test_none_takes_a_bar_of_the_class_back():
    found = bars_from_markers([((), {"of_bound": None}), ((), {"of_bound": 0.2})])
    assert found.limits == ()
