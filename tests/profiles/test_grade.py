import dataclasses

import pytest
from made_up import profile

from nearpeak.profiles.completeness import Completeness, Loss
from nearpeak.profiles.conditions import StepConditions
from nearpeak.profiles.grade import grade_profile
from nearpeak.profiles.profile import ProfileCeilings
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
        ({"later_s": 10.8}, "B", "later steps took 8 % longer, 10.8 s"),
        ({"later_s": 11.5}, "C", "later steps took 15 % longer, 11.5 s"),
        ({"later_s": 9.5}, "B", "later steps took 5 % less, 9.50 s"),
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


def test_steps_that_differ_by_themselves_have_a_median():
    alone = StepConditions(waited_share=0.01, others_share=0.02)
    assert graded(spread=0.04, conditions=alone).letter == "A"
    assert graded(spread=0.69, steps=40, conditions=alone).letter == "B"
    assert graded(spread=0.69, steps=40, conditions=alone).reasons == ("steps 69 % apart, while nothing else ran",)
    assert graded(spread=0.69, steps=7, conditions=alone).letter == "C"
    assert graded(spread=0.69, steps=40, conditions=StepConditions(others_share=0.02)).letter == "C"  # cannot tell


def test_the_worst_counts_and_comes_first():
    found = graded(spread=0.06, matched=0.4)
    assert found.letter == "F"
    assert found.reasons == ("40.0 % of the ops found again", "steps 6 % apart")


def test_a_trace_file_has_no_clean_steps():
    found = graded(steps=0, spread=None, matched=None, profiled_s=None)
    assert found.letter == "B"
    assert "no clean steps" in found.reasons[0]


TOO_FAST = build_waterfall(
    wall_s=10.0, ideal_s=1.0, fused_s=2.0, as_written_s=8.0, modeled_s=4.0, kernel_s=5.0, communication_s=1.0
)
DOUBTFUL = ProfileCeilings(bandwidth=1e9, doubts=("the cache was slower than the memory (3 GB/s, 6 GB/s)",))


def test_a_bound_above_a_measurement_is_an_f():
    found = graded(waterfall=TOO_FAST, how="derated")
    assert (found.letter, found.remedy) == ("F", "")
    assert found.reasons == ("slow kernels is below zero: a bound of nearpeak's is wrong",)


def test_where_the_ceilings_were_measured_here_they_are_the_first_suspect():
    found = graded(waterfall=TOO_FAST)
    assert found.reasons[0].startswith("slow kernels is below zero: measure this machine again; if it stays so")
    assert "nearpeak machine --calibrate" in found.remedy


def test_a_poor_calibration_is_what_such_a_bound_means():
    found = graded(waterfall=TOO_FAST, ceilings=DOUBTFUL)
    assert (found.letter, found.reasons[0]) == ("F", "slow kernels is below zero: measure this machine again")
    assert "a bound of nearpeak's" not in " ".join(found.reasons)
    assert "nearpeak machine --calibrate" in found.remedy


def test_a_poor_calibration_is_a_doubt_on_its_own():
    found = graded(ceilings=DOUBTFUL)
    assert (found.letter, found.is_trusted) == ("C", False)
    assert found.reasons[0].startswith("the calibration of this machine is doubtful: the cache was slower")


@pytest.mark.parametrize(
    ("conditions", "letter"),
    [
        ({"waited_share": 0.01, "others_share": 0.5}, "C"),
        ({"waited_share": 0.01, "others_share": 0.05}, "A"),
        ({"waited_share": 0.03, "others_share": 0.3}, "B"),
        ({"waited_share": 0.1, "others_share": 0.3}, "C"),
        ({"waited_share": 0.5, "others_share": 0.5}, "F"),
        ({"waited_share": 0.5}, "F"),  # nobody counted what others did
        ({"waited_share": 0.5, "others_share": 0.01}, "A"),  # its own threads are more than the cores
        ({"others_share": 0.2}, "B"),
        ({"others_share": 0.7}, "F"),
        ({"throttled_share": 0.03}, "B"),
        ({"throttled_share": 0.3}, "C"),
        ({"gpu_processes": 2}, "B"),
        ({"gpu_processes": 1, "throttle": ("power cap",)}, "A"),
        ({"throttle": ("thermal (hardware)",)}, "B"),
    ],
)
def test_other_work_on_the_machine_is_a_doubt(conditions, letter):
    assert graded(device="cpu", conditions=StepConditions(**conditions)).letter == letter


def test_a_gpu_that_is_busy_does_not_wait_for_its_host():
    conditions = StepConditions(waited_share=0.4, others_share=0.9)
    assert graded(conditions=conditions).letter == "F"  # idle for 40 % of the step
    floors = {"ideal_s": 1.0, "fused_s": 2.0, "as_written_s": 3.0, "modeled_s": 9.7, "kernel_s": 9.7}
    assert graded(conditions=conditions, waterfall=build_waterfall(wall_s=10.0, **floors)).letter == "B"


def losses(*counts, launches=1000):
    lost = (Loss(kind="kernels", count=count, in_step=True, text="Launches without a kernel.") for count in counts)
    return Completeness(launches=launches, losses=tuple(lost))


@pytest.mark.parametrize(
    ("completeness", "letter"),
    [(losses(), "A"), (losses(5), "B"), (losses(50), "C"), (losses(500), "F"), (losses(None), "C")],
)
def test_a_recording_that_lacks_something_is_a_doubt(completeness, letter):
    found = graded(completeness=completeness)
    assert found.letter == letter
    assert letter == "A" or found.reasons == ("the recording is incomplete: launches without a kernel",)


def test_a_multiple_and_savings_are_told_down_to_b():
    assert [graded(spread=spread).is_trusted for spread in (0.0, 0.1, 0.5)] == [True, True, False]
    assert not graded(matched=0.1).is_trusted


def test_the_remedy_is_that_of_the_worst_doubt():
    assert graded(spread=0.06, modeled_share=0.8).remedy == ""
    assert graded(spread=0.4, modeled_share=0.95).remedy == "Measure again while nothing else runs."
