"""`nearpeak report`."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "render" / "html"))

from synthetic import profile  # type: ignore[import-not-found]

from nearpeak.cli.main import main
from nearpeak.profiles import file, history
from nearpeak.render.report import PROFILE_FORMATS
from nearpeak.render.text import text
from nearpeak.render.views.profile import document
from nearpeak.render.views.screen import screen

EAGER = str(Path(__file__).parents[1] / "data" / "kineto_eager.json.gz")
LARGE = 7000
"""Ops: as many as the training step of a mixture of experts has."""


@pytest.fixture
def run(tmp_path):
    path = tmp_path / "run.json.gz"
    file.save(profile(300), path)
    return str(path)


def test_without_a_file_it_is_the_report_of_the_terminal(run, capsys):
    for options, view in (([], screen), (["--full"], document)):
        assert main(["report", run, *options]) == 0
        captured = capsys.readouterr()
        assert captured.out == text(view(profile(300))) + "\n"
        assert captured.err == ""
        assert max(map(len, captured.out.splitlines())) <= 80


def test_it_shows_what_profile_shows(run, capsys):
    options = ["--by", "module", "--top", "3", "--least", "10", "--ignore", "unfused-norm"]
    main(["report", run, *options])
    first = capsys.readouterr().out
    main(["profile", "--trace", run, *options])
    assert capsys.readouterr().out == first
    assert "unfused-norm" not in first


@pytest.mark.slow
def test_files_are_written_and_nothing_is_printed(run, tmp_path, capsys):
    names = [str(tmp_path / f"out{ending}") for ending in PROFILE_FORMATS]
    assert main(["report", run, *(part for name in names for part in ("-o", name))]) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [f"wrote {name}" for name in names]
    assert all(Path(name).stat().st_size > 500 for name in names)


def test_a_written_profile_is_the_same_again(run, tmp_path):
    assert main(["report", run, "-o", str(tmp_path / "again.json")]) == 0
    assert file.read(tmp_path / "again.json") == profile(300)


def test_the_last_run_and_a_trace_are_runs_too(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("NEARPEAK_CACHE_DIR", str(tmp_path))
    history.add_run(profile(20))
    assert main(["report", "@last", "-o", str(tmp_path / "last.md")]) == 0
    assert "train.py" in (tmp_path / "last.md").read_text()
    assert main(["report", EAGER, "-o", str(tmp_path / "trace.perfetto.json")]) == 0
    assert json.loads((tmp_path / "trace.perfetto.json").read_text())["traceEvents"]
    assert main(["report", "@last", "--on", "h100-sxm"]) == 2
    assert "belong to a trace" in capsys.readouterr().err


def test_pictures_are_chosen(run, tmp_path):
    for picture in ("waterfall", "roofline"):
        assert main(["report", run, "-o", str(tmp_path / f"{picture}.svg"), "--picture", picture]) == 0
    assert "Where a step of train.py goes" in (tmp_path / "waterfall.svg").read_text()
    assert "Roofline of a step of train.py" in (tmp_path / "roofline.svg").read_text()


def test_json_is_the_same_as_that_of_profile(run, capsys):
    assert main(["report", run, "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["wall_s"] == profile(300).wall_s


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["-o", "x.doc"], "x.doc: a report is written as one of .html, .md"),
        (["-o", "no/such/x.html"], "there is no folder no/such"),
        (["--picture", "roofline"], "name an .svg or a .png"),
        (["--picture", "roofline", "-o", "x.html"], "name an .svg or a .png"),
        (["--dark", "-o", "x.svg"], "name a .png"),
        (["--top", "0"], "at least one row"),
        (["--ignore", "no-such-rule"], "There is no rule called 'no-such-rule'"),
    ],
)
def test_what_cannot_be_done_is_said(options, message, run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["report", run, *options]) == 2
    assert message in capsys.readouterr().err
    assert [each.name for each in tmp_path.iterdir()] == [Path(run).name]


def test_a_rule_of_the_users_own_can_be_ignored(tmp_path, capsys):
    made = profile(50)
    own = dataclasses.replace(made.findings[0], rule="my-own")
    file.save(dataclasses.replace(made, findings=(own,)), tmp_path / "run.json")
    assert main(["report", str(tmp_path / "run.json"), "--ignore", "my-own"]) == 0
    assert "my-own" not in capsys.readouterr().out


@pytest.mark.parametrize("content", ["", "{", "[]", '{"traceEvents": []}'])
def test_a_file_that_is_no_run_is_one_message(content, tmp_path, capsys):
    path = tmp_path / "run.json"
    path.write_text(content)
    assert main(["report", str(path)]) == 2
    assert capsys.readouterr().err.startswith("nearpeak: ")
    assert main(["report", str(tmp_path / "missing.json")]) == 2


@pytest.mark.slow
def test_a_report_of_a_large_profile_imports_no_torch(tmp_path):
    file.save(profile(LARGE), tmp_path / "run.json.gz")
    code = f"""
import sys
from nearpeak.cli.main import main
for name in ("x.html", "x.md", "x.csv", "x.svg", "x.perfetto.json", "x.txt"):
    assert main(["report", {str(tmp_path / "run.json.gz")!r}, "-o", {str(tmp_path)!r} + "/" + name]) == 0
print(*{{name.partition(".")[0] for name in sys.modules}} & {{"torch", "triton", "numpy"}})
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == ""
