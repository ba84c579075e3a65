"""The report on one screen: at most 35 lines of 80 columns, whatever the profile."""

import dataclasses
import gzip
import re
from pathlib import Path

import pytest
import synthetic  # type: ignore[import-not-found]
from made_up import profile as small_profile  # type: ignore[import-not-found]

from nearpeak.profiles import file
from nearpeak.profiles.conditions import StepConditions
from nearpeak.profiles.finding import Finding
from nearpeak.profiles.profile import Profile
from nearpeak.profiling.load import profile_trace
from nearpeak.render.text import Style, text
from nearpeak.render.views.profile import ReportOptions, select_findings
from nearpeak.render.views.screen import MOST_LINES, screen

DATA = Path(__file__).parents[2] / "data"
REMEDY = "model.compile()  # a word about it\n# a second line\n" + "x = very_long_name(x)\n" * 20


def finding(rule="unfused-norm", source="train.py:41", share=0.05, **fields):
    made = {"title": f"{rule} is seen here, which is a sentence.", "modules": (), "places": 1, "evidence": "Seen."}
    made |= {"reasoning": "So.", "remedy": REMEDY, "saving_s": 10.0 * share, "share": share, "rule": rule}
    return Finding(source=source, **(made | fields))


def saved_profiles() -> dict[str, Profile]:
    """All profiles at hand: saved ones, made-up ones, and those with names and doubts that are as long as can be."""
    made = synthetic.profile(400)
    endless = synthetic.profile(60, name="very_long_and_never_ending_name_of_" * 4 + "{}")
    busy = StepConditions(waited_share=0.5, others_share=0.5, throttled_share=0.3, gpu_processes=3)
    many = tuple(finding(f"rule-{number}", share=0.3 / (number + 1)) for number in range(12))
    profiles = {
        "small": small_profile(),
        "made": made,
        "without ops": synthetic.profile(0),
        "endless names": endless,
        "doubtful": dataclasses.replace(endless, device="cpu", conditions=busy, spread=3.0, steps=2, matched=0.2),
        "many findings": dataclasses.replace(made, findings=many),
    }
    for path in DATA.glob("*.json*"):
        raw = path.read_bytes()
        if b'"nearpeak profile"' in (gzip.decompress(raw) if path.suffix == ".gz" else raw):
            profiles[path.name] = file.read(path)
    return profiles


PROFILES = saved_profiles()


@pytest.mark.parametrize("name", PROFILES)
def test_no_report_has_more_than_35_lines_of_80_columns(name):
    profile = PROFILES[name]
    for style in (Style(), Style(blocks=True)):
        lines = text(screen(profile, ReportOptions(again="nearpeak report @last")), style).split("\n")
        assert len(lines) <= MOST_LINES == 35
        assert max(map(len, lines)) <= 80
        assert [line[:9].strip() for line in lines if line[:1].isupper()][:2] == ["Step:", "Verdict:"]


def test_the_bars_say_what_they_mean_and_have_their_units():
    shown = text(screen(small_profile()))
    assert re.search(r"^idle +4.00 s +40.0 % +#{8}  nothing runs$", shown, re.MULTILINE)
    assert re.search(r"^step +10.0 s +100.0 %$", shown, re.MULTILINE)
    assert "part  " not in shown  # no headers: each cell has its unit


def test_parts_that_are_nothing_have_no_bar():
    shown = text(screen(PROFILES["made"]))
    assert "communication" not in shown


def test_three_findings_are_shown_with_their_lines_and_what_to_write():
    made = dataclasses.replace(small_profile(), modeled_share=1.0, findings=PROFILES["many findings"].findings)
    shown = text(screen(made))
    first = "1.  3.00 s, 30.0 % (18 to 55 %): rule-0 at train.py:41\n    model.compile()  # a word about it\n2.  "
    assert first in shown
    assert "\n3.  " in shown
    assert "\n4.  " not in shown
    assert "--findings 12 explains the findings" in " ".join(shown.split())


@pytest.mark.parametrize("file", ["train.py", "shop_two_tower.py", "a_package_with_a_long_name/and_a_file_with_one.py"])
@pytest.mark.parametrize("called_at", ["", "{}:207", "another_script.py:88"])
def test_the_number_of_the_line_is_always_shown(file, called_at):
    """And the line that calls it where there is room."""
    far = finding("dense-embedding-gradient", f"{file}:45", 0.373, called_at=called_at.format(file))
    made = dataclasses.replace(small_profile(), modeled_share=1.0, findings=(far,))
    (line,) = [line for line in text(screen(made)).split("\n") if line.startswith("1.  ")]
    assert len(line) <= 80
    assert ":45" in line
    assert "..." not in line or line.endswith(":45")


def test_findings_of_a_library_that_one_line_calls_are_one():
    inside = [
        finding("unfused-norm", "train.py:7", 0.04, library="layers", inside="norm.py:3"),
        finding("unfused-rotary", "train.py:7", 0.03, library="layers", inside="rotary.py:8"),
    ]
    own = finding("repeated-cast", "train.py:9", 0.05)
    made = dataclasses.replace(small_profile(), modeled_share=1.0, findings=(own, *inside))
    shown = text(screen(made))
    assert "1.  700 ms, 7.0 % (4 to 26 %): 2 findings at train.py:7, in layers" in shown
    assert "    model.compile()  # unfused-norm, unfused-rotary" in shown
    assert "2.  500 ms, 5.0 % (3 to 22 %): repeated-cast at train.py:9" in shown


def test_savings_are_those_of_each_change_and_once_of_all_at_once():
    first, second = finding("padded-batch", "train.py:7", 0.5), finding("unused-gradients", "train.py:9", 0.4)
    findings = (
        dataclasses.replace(first, together_s=first.saving_s),
        dataclasses.replace(second, together_s=0.7 * small_profile().wall_s),
    )
    made = dataclasses.replace(small_profile(), modeled_share=1.0, findings=findings)
    shown = text(screen(made))
    assert "What would save most (both at once: 70.0 %):" in shown
    assert "50.0 % (33 to 69 %): padded-batch" in shown and "40.0 % (25 to 62 %): unused-gradients" in shown
    explained = " ".join(text(screen(made, ReportOptions(sections=frozenset({"findings"}), findings=findings))).split())
    assert "All 2 together save 7.00 s, 70.0 % of the step." in explained


def test_what_is_asked_for_is_there_whole():
    made = dataclasses.replace(PROFILES["made"], modeled_share=1.0)
    options = {"findings": select_findings(made)}
    brief = text(screen(made, ReportOptions(**options)))
    ranked = text(screen(made, ReportOptions(sections=frozenset({"ops"}), by="module", **options)))
    explained = text(screen(made, ReportOptions(sections=frozenset({"findings"}), **options)))
    assert "measured  written" in ranked
    assert "measured  written" not in brief
    assert "Findings, by what they would save:" in explained
    assert "Findings, by what they would save:" not in brief


def test_the_last_lines_say_where_the_rest_is():
    shown = " ".join(text(screen(small_profile(), ReportOptions(again="nearpeak report @last"))).split())
    assert shown.endswith(
        "`nearpeak report @last --full` prints all tables; `nearpeak report @last --open` shows the page."
    )


def test_the_step_is_told():
    made = dataclasses.replace(small_profile(), step="a training step, up to the step of AdamW", steps=12)
    first = text(screen(made)).split("\n")[0]
    assert first == "Step:    train.py: a training step, up to the step of AdamW; 12 timed"


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(DATA.glob("kineto_*.json.gz")), ids=lambda path: path.name)
def test_no_report_of_a_trace_file_has_more_than_35_lines_of_80_columns(path):
    lines = text(screen(profile_trace(path, on="h200-sxm"))).split("\n")
    assert len(lines) <= MOST_LINES
    assert max(map(len, lines)) <= 80


def test_savings_below_three_percent_are_listed_only_when_they_are_asked_for():
    def listed(*findings):
        lines = text(screen(dataclasses.replace(PROFILES["made"], findings=findings))).split("\n")
        return [line.split(" at ")[0].split()[-1] for line in lines if re.match(r"\d\.  ", line)]

    assert listed(finding(share=0.02), finding("repeated-cast", share=0.015)) == []
    assert listed(finding(share=0.2), finding("repeated-cast", share=0.015)) == ["unfused-norm"]


@pytest.mark.parametrize(
    ("remedy", "shown"),
    [
        ("switch(False)  # takes any length; or\npad(to=64)", "    switch(False)  # takes any length\n"),
        ("y = f(items)  # once,\n# and split", "    y = f(items)  # once,\n"),
        ("a = b;\nc = d", "    a = b\n"),
    ],
)
def test_a_remedy_of_several_lines_ends_where_its_first_does(remedy, shown):
    own = dataclasses.replace(finding("a-rule", "train.py:9", 0.5), remedy=remedy)
    made = dataclasses.replace(small_profile(), modeled_share=1.0, findings=(own,))
    assert shown in text(screen(made))


def test_a_long_remedy_is_cut_between_words():
    words = " ".join(f"word{number:03}" for number in range(60))
    own = dataclasses.replace(finding("a-rule", "train.py:9", 0.5), remedy=words)
    made = dataclasses.replace(small_profile(), modeled_share=1.0, findings=(own,))
    assert re.search(r" word\d{3} \.\.\.\n", text(screen(made)))
