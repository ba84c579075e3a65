"""A profile as a file of any format."""

import dataclasses
import gzip
import json
import sys

import pytest
from synthetic import profile  # type: ignore[import-not-found]

import nearpeak
from nearpeak.errors import EnvironmentProblem, UsageError
from nearpeak.render import report
from nearpeak.render.report import PROFILE_FORMATS, check_path, content, profile_ending, write
from nearpeak.render.text import text
from nearpeak.render.views.profile import ReportOptions, document

BEGINNINGS = {
    ".html": b"<!DOCTYPE html>",
    ".md": b"### Profile of train.py on NVIDIA H200",
    ".csv": b"op,name,family",
    ".txt": b"Verdict:",
    ".svg": b"<svg ",
    ".png": b"\x89PNG",
    ".perfetto.json": b'{"displayTimeUnit"',
    ".trace.json": b'{"displayTimeUnit"',
    ".json": b'{"kind":"nearpeak profile"',
}


@pytest.mark.parametrize("ending", [*PROFILE_FORMATS, ".json.gz", ".perfetto.json.gz", ".trace.json.gz"])
def test_the_end_of_a_name_says_the_format(ending, tmp_path):
    path = tmp_path / f"a.run{ending}"
    write(profile(60), path)
    made = path.read_bytes()
    if ending.endswith(".gz"):
        made = gzip.decompress(made)
    assert made.startswith(BEGINNINGS[profile_ending(path)])
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("name", "ending"), [("RUN.HTML", ".html"), ("a.pt.trace.json.gz", ".trace.json"), ("x.json", ".json")]
)
def test_names_are_read_whatever_their_case(name, ending):
    assert profile_ending(name) == ending


@pytest.mark.parametrize("name", ["run", "run.doc", "html", "run.gz", "run.html.gz"])
def test_another_name_is_refused_with_those_that_are_known(name):
    with pytest.raises(UsageError, match=r"\.html, \.md, \.csv"):
        check_path(name)


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UsageError, match="there is no folder"):
        check_path(tmp_path / "no" / "run.html")
    (tmp_path / "x.html").mkdir()
    with pytest.raises(UsageError, match="it is a folder"):
        check_path(tmp_path / "x.html")


def test_a_png_without_pillow_is_refused_before_the_run(monkeypatch):
    monkeypatch.setattr(report, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentProblem, match="nearpeak\\[png\\]"):
        check_path("run.png")
    check_path("run.svg")


def test_a_profile_saves_itself_in_any_format(tmp_path):
    made = profile(60)
    made.save(tmp_path / "run.html")
    assert (tmp_path / "run.html").read_bytes() == content(made, ".html", ReportOptions())
    made.save(str(tmp_path / "run.json.gz"))
    assert nearpeak.load(tmp_path / "run.json.gz") == made


@pytest.mark.slow
def test_equal_profiles_give_equal_files():
    for form in BEGINNINGS:
        assert content(profile(60), form, ReportOptions()) == content(profile(60), form, ReportOptions())


@pytest.mark.slow
def test_choices_reach_every_format_that_has_them():
    made = profile(60)
    found = made.findings[1:]
    choices = ReportOptions(findings=found, by="module", top=2)
    assert content(made, ".txt", choices).decode() == text(document(made, choices)) + "\n"
    for form in (".html", ".md", ".txt", ".perfetto.json", ".svg"):
        assert b"unfused-norm" not in content(made, form, choices)
        assert b"unfused-norm" in content(made, form, ReportOptions())
    assert b"Roofline" in content(made, ".svg", ReportOptions(picture="roofline"))
    assert content(made, ".png", ReportOptions(dark=True)) != content(made, ".png", ReportOptions())


def test_half_a_character_in_a_name_is_no_error():
    made = dataclasses.replace(profile(10, name="{}\ud800"))
    for form in BEGINNINGS:
        content(made, form, ReportOptions())


@pytest.mark.slow
def test_a_report_grows_no_faster_than_its_profile():
    """Calls of Python functions are counted: they do not depend on how busy the machine is."""

    def calls(form: str, ops: int) -> int:
        made, count = profile(ops), 0

        def event(frame, kind, argument):
            nonlocal count
            count += kind == "call"

        sys.setprofile(event)
        try:
            content(made, form, ReportOptions())
        finally:
            sys.setprofile(None)
        return count

    for form in (".html", ".csv", ".perfetto.json", ".md"):
        assert calls(form, 4000) < 4.5 * calls(form, 1000) + 1000, form


def test_the_saved_form_is_what_load_reads(tmp_path):
    write(profile(5), tmp_path / "run.json")
    assert json.loads((tmp_path / "run.json").read_text())["profile"]["wall_s"] == profile(5).wall_s
