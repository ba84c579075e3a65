"""What a report tells of a profile with a low grade: the reason first, no multiple of the ideal and no savings."""

import dataclasses
import json
import re

import pytest
from synthetic import profile  # type: ignore[import-not-found]

from nearpeak.profiles import file
from nearpeak.profiles.conditions import StepConditions, clock_loss_s
from nearpeak.profiles.profile import ProfileCeilings
from nearpeak.render.notebook import card
from nearpeak.render.report import content
from nearpeak.units import percent, seconds

BUSY = StepConditions(waited_share=0.52, others_share=0.5)
REASON = "other work held the cores for 52 % of the time that the step needed them"


def made(**changes):
    return dataclasses.replace(profile(60), modeled_share=1.0, **changes)


def shown(found, ending):
    text = re.sub(r"\s+", " ", card(found) if ending == "card" else content(found, ending).decode())
    return re.sub(r'<span class="term"[^>]*>([^<]*)</span>', r"\1", text)  # words that the page explains


READABLE = [".txt", ".md", ".html", "card", ".svg"]


@pytest.mark.parametrize("ending", READABLE)
def test_a_trusted_profile_tells_the_multiple_the_saving_and_the_grade(ending):
    text = shown(made(), ending)
    assert "x the ideal" in text
    assert "Grade A" in text
    assert percent(made().findings[0].share) in text


@pytest.mark.parametrize("ending", READABLE)
def test_a_busy_machine_tells_the_reason_and_neither(ending):
    found = made(device="cpu", conditions=BUSY)
    text = shown(found, ending)
    assert f"Grade F: {REASON}" in text.replace("-<wbr>", "-")
    assert "x the ideal" not in text
    # the seconds may also be those of ops
    told = [each for each in found.findings if f"{seconds(each.saving_s)}, {percent(each.share)}" in text]
    assert told == []
    assert "saves" not in re.sub(r"<script.*</script>|<style.*</style>", "", text)


def test_the_reason_stands_first():
    assert shown(made(device="cpu", conditions=BUSY), ".txt").startswith(f"Verdict: Grade F: {REASON}")


def test_a_file_has_the_grade_and_reading_it_forgets_it(tmp_path):
    found = made(device="cpu", conditions=BUSY)
    data = json.loads(content(found, ".json"))["profile"]
    assert (data["grade"]["letter"], data["grade"]["reasons"]) == ("F", [REASON])
    found.save(tmp_path / "run.json")
    assert file.read(tmp_path / "run.json") == found  # the grade follows from the rest


def test_a_lower_clock_is_told_as_a_part_of_the_slow_kernels():
    found = made()
    ops = tuple(
        dataclasses.replace(op, limiter="compute", modeled=True, measured_s=2.0 * op.bound_s) for op in found.ops
    )
    ceilings = ProfileCeilings(bandwidth=1e12, clock_hz=2.0e9)
    conditions = StepConditions(clock_hz=1.5e9, power_watts=699.6, throttle=("power cap",))
    found = dataclasses.replace(found, ops=ops, ceilings=ceilings, conditions=conditions)
    lost = 0.25 * sum(op.measured_s for op in ops)
    text = shown(found, ".txt")
    assert "The GPU ran at 1,500 MHz of the 2,000 MHz at which its ceilings were measured, drawing 700 W" in text
    assert f"(power cap): {seconds(lost)}, {percent(lost / found.wall_s)} of the step, are slow kernels for" in text


def test_a_clock_explains_no_more_than_is_lost_and_nothing_of_what_memory_limits():
    found = made()
    first, second, *rest = found.ops
    first = dataclasses.replace(first, limiter="compute", modeled=True, bound_s=0.9, measured_s=1.0)
    second = dataclasses.replace(second, limiter="memory", modeled=True, bound_s=0.5, measured_s=1.0)
    rest = [dataclasses.replace(op, limiter="memory") for op in rest]
    found = dataclasses.replace(
        found,
        ops=(first, second, *rest),
        ceilings=ProfileCeilings(bandwidth=1e12, clock_hz=2.0e9),
        conditions=StepConditions(clock_hz=1.0e9),
    )
    assert clock_loss_s(found) == pytest.approx(0.1)
    assert clock_loss_s(dataclasses.replace(found, conditions=None)) is None
    faster = dataclasses.replace(found, conditions=StepConditions(clock_hz=2.5e9))
    assert clock_loss_s(faster) == 0.0
