"""Made-up measurements against bars: met, missed, and what cannot be told."""

from __future__ import annotations

import dataclasses

import pytest
from figures import DOUBTFUL, FINDING, KEY, profile, timing  # type: ignore[import-not-found]

from nearpeak.errors import UsageError
from nearpeak.pytest_plugin.measured_test import Bars, Baseline, failure_message, figure_of, grade_too_low, judge


def verdict(measured: object, baseline: Baseline | None = None, **bars: object) -> str:
    (judged,) = judge(measured, Bars(**bars), baseline)
    return judged.verdict


def line(measured: object, baseline: Baseline | None = None, **bars: object) -> str:
    (judged,) = judge(measured, Bars(**bars), baseline)
    return judged.line


def before(seconds: float = 10.0, width: float = 0.0, kind: str = "step") -> Baseline:
    return Baseline(
        key=KEY,
        seconds=seconds,
        low=seconds - width,
        high=seconds + width,
        kind=kind,
        date="2026-01-01T00:00:00+00:00",
        nearpeak="0.1.0",
    )


def test_the_interval_of_a_step_is_that_of_its_clean_steps():
    figure = figure_of(profile())
    assert figure.low < figure.seconds == 10.0 < figure.high
    assert figure.low > 9.9 and figure.high < 10.1  # narrower than their range
    assert (figure.kind, figure.grade) == ("step", "A")


def test_a_step_without_clean_steps_has_no_interval():
    figure = figure_of(profile(walls=(), steps=0, spread=None))
    assert figure.low == figure.seconds == figure.high


@pytest.mark.parametrize(
    ("bar", "expected"), [(12.0, "met"), (10.0, "met"), (9.98, "unsure"), (9.9, "missed"), (5.0, "missed")]
)
def test_step_time(bar: float, expected: str):
    assert verdict(profile(), step_time=bar) == expected


def test_step_time_of_a_call():
    assert verdict(timing(), step_time=10e-6) == "met"
    assert verdict(timing(), step_time=9.95e-6) == "unsure"
    assert verdict(timing(), step_time=9e-6) == "missed"
    assert line(timing(), step_time=9e-6) == "step_time: 10.00 us [9.90, 10.10], and the bar is 9.00 us"


@pytest.mark.parametrize(
    ("floor", "share"), [("as written", 0.30), ("fused", 0.20), ("ideal", 0.10)], ids=lambda value: str(value)
)
def test_of_bound_of_a_step(floor: str, share: float):
    assert verdict(profile(), of_bound=share - 0.01, floor=floor) == "met"
    assert verdict(profile(), of_bound=share + 0.01, floor=floor) == "missed"
    assert verdict(profile(), of_bound=share * 1.001, floor=floor) == "unsure"


def test_of_bound_says_the_figure_and_the_bar():
    found = line(profile(), of_bound=0.5)
    assert found.startswith("of_bound: 30.0 % of the as written bound (3.00 s of 10.00")
    assert found.endswith("and the bar is 50.0 %")


def test_of_bound_of_a_call():
    assert verdict(timing(), of_bound=0.5) == "met"
    assert verdict(timing(), of_bound=0.6) == "missed"
    assert "50.0 % of the memory bound (5.00 us of" in line(timing(), of_bound=0.6)


def test_of_bound_of_a_call_needs_its_work():
    with pytest.raises(UsageError, match=r"work=nearpeak.Work"):
        verdict(timing(work=None, bound_seconds=None), of_bound=0.5)
    with pytest.raises(UsageError, match="floor='fused' is for nearpeak_profile"):
        verdict(timing(), of_bound=0.5, floor="fused")


def test_no_bound_cannot_tell():
    assert verdict(timing(bound_seconds=None), of_bound=0.5) == "unsure"


def test_peak_memory():
    assert verdict(profile(), peak_memory=2.0 * 2**30) == "met"
    assert verdict(profile(), peak_memory=2.0 * 2**30 - 1) == "missed"
    found = line(profile(), peak_memory=2.0**30)
    assert found == "peak_memory: 2.00 GiB on cuda:0 at model.py:7, and the bar is 1.00 GiB"
    assert verdict(profile(memory=None), peak_memory=1.0) == "unsure"


def test_small_memory_is_not_written_as_zero_gibibytes():
    small = dataclasses.replace(profile().memory, peak_bytes=3000.0)
    assert line(profile(memory=small), peak_memory=2000.0).endswith(
        "3.00 kB on cuda:0 at model.py:7, and the bar is 2.00 kB"
    )


def test_no_finding_above():
    assert verdict(profile(), no_finding_above=0.08) == "met"
    assert verdict(profile(), no_finding_above=0.05) == "missed"
    assert verdict(profile(), no_finding_above=0.05, ignore=("unfused-norm",)) == "met"
    assert verdict(profile(), no_finding_above=0.05, ignore=("unfused-norm@model.py:41",)) == "met"
    assert verdict(profile(), no_finding_above=0.05, ignore=("unfused-norm@model.py:42",)) == "missed"
    assert "1 finding saves more than 5.0 %, the largest 800 ms, 8.0 %: unfused-norm at model.py:41" in line(
        profile(), no_finding_above=0.05
    )


@pytest.mark.parametrize("bar", ["peak_memory", "no_finding_above"])
def test_bars_of_steps_make_no_sense_for_calls(bar: str):
    with pytest.raises(UsageError, match=f"{bar} is a bar for nearpeak_profile"):
        verdict(timing(), **{bar: 0.5})


def test_baseline():
    assert verdict(profile(), before(10.0), within=0.05) == "met"
    assert verdict(profile(), before(12.0), within=0.05) == "met"  # faster is no regression
    assert verdict(profile(), before(9.0), within=0.05) == "missed"
    assert verdict(profile(), before(9.0, width=0.9), within=0.05) == "unsure"
    found = line(profile(), before(9.0), within=0.05)
    assert "11.1 % more than 9.00" in found and found.endswith("and the bar is 5.0 %")


def test_a_baseline_of_another_kind_of_time_is_not_compared():
    with pytest.raises(UsageError, match="The baseline is a cpu time of"):
        verdict(profile(), before(kind="cpu"), within=0.05)


def test_a_grade_that_is_too_low():
    assert not grade_too_low(figure_of(profile()), Bars(grade="A"))
    assert grade_too_low(figure_of(profile(spread=0.1)), Bars(grade="A"))
    assert not grade_too_low(figure_of(profile(spread=0.1)), Bars(grade="B"))
    assert grade_too_low(figure_of(timing(flags=DOUBTFUL)), Bars())


def test_failure_of_a_step_names_its_top_finding():
    judged = judge(profile(), Bars(of_bound=0.5, step_time=5.0, peak_memory=1e12), None)
    text = failure_message(profile(), judged).splitlines()
    assert text[0] == "train.py misses 2 bars:"
    assert [part.split(":")[0] for part in text[1:3]] == ["  of_bound", "  step_time"]
    assert text[3:] == [
        "Top finding: 800 ms, 8.0 %: unfused-norm at model.py:41: A norm is written as 5 ops.",
        "Instead:",
        "    x = norm(x)",
        "    if x:",
        "        y",
        "Measured on Toy 1, grade A.",
    ]


def test_failure_without_a_finding_says_where_the_time_goes():
    measured = profile(findings=())
    text = failure_message(measured, judge(measured, Bars(step_time=5.0)))
    assert "No finding. Most is lost to " in text


def test_failure_of_a_call():
    measured = timing()
    assert failure_message(measured, judge(measured, Bars(step_time=5e-6))).splitlines() == [
        "softmax misses a bar:",
        "  step_time: 10.00 us [9.90, 10.10], and the bar is 5.00 us.",
        "Measured on Toy 1, grade A.",
    ]


def test_hostile_names_stay_on_one_line_of_plain_text():
    evil = "\x1b[31m</script>\u202e\n" * 50
    finding = dataclasses.replace(FINDING, title=evil, source=evil, rule=evil, remedy=evil)
    measured = profile(source=evil, device=evil, findings=(finding,))
    text = failure_message(measured, judge(measured, Bars(step_time=5.0, no_finding_above=0.01)))
    assert text.isascii() and "\x1b" not in text
