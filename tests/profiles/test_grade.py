import dataclasses

import pytest
from made_up import profile

from nearpeak.profiles.grade import grade_profile
from nearpeak.profiles.waterfall import build_waterfall

GOOD = {"steps": 7, "spread": 0.02, "matched": 1.0, "modeled_share": 1.0, "profiled_s": 12.0}


def graded(**changes):
    return grade_profile(dataclasses.replace(profile(), **(GOOD | changes)))


def test_a_good_measurement_has_an_a_and_no_reasons():
    assert (graded().letter, graded().reasons) == ("A", ())


@pytest.mark.parametrize(
    ("changes", "letter", "reason"),
    [
        ({"steps": 1, "spread": 0.0}, "B", "only 1 clean step"),
        ({"steps": 2}, "B", "only 2 clean steps"),
        ({"spread": 0.06}, "B", "steps 6 % apart"),
        ({"spread": 1.2}, "C", "steps 120 % apart"),
        ({"matched": 0.96}, "B", "96.0 % of the ops found again"),
        ({"matched": 0.6}, "C", "60.0 % of the ops found again"),
        ({"matched": 0.4}, "F", "40.0 % of the ops found again"),
        ({"modeled_share": 0.95}, "B", "95.0 % of the time has a bound"),
        ({"modeled_share": 0.8}, "C", "80.0 % of the time has a bound"),
        ({"modeled_share": 0.2}, "F", "20.0 % of the time has a bound"),
        ({"profiled_s": 30.0}, "B", "3.0 x as long under the profiler"),
        ({"profiled_s": 50.0}, "C", "5.0 x as long under the profiler"),
    ],
)
def test_each_fact_has_its_letter(changes, letter, reason):
    assert (graded(**changes).letter, graded(**changes).reasons) == (letter, (reason,))


def test_the_worst_counts_and_comes_first():
    found = graded(spread=0.06, matched=0.4)
    assert found.letter == "F"
    assert found.reasons == ("40.0 % of the ops found again", "steps 6 % apart")


def test_a_trace_file_has_no_clean_steps():
    found = graded(steps=0, spread=None, matched=None, profiled_s=None)
    assert found.letter == "B"
    assert "no clean steps" in found.reasons[0]


def test_a_bound_above_a_measurement_is_an_f():
    times = {"ideal_s": 1.0, "fused_s": 2.0, "as_written_s": 8.0, "modeled_s": 4.0, "kernel_s": 5.0}
    found = graded(waterfall=build_waterfall(wall_s=10.0, communication_s=1.0, **times))
    assert (found.letter, found.reasons) == ("F", ("slow kernels is below zero",))
