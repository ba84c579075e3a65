"""What `nearpeak profile` prints, keeps and writes."""

import argparse
import dataclasses
import errno
import io
import json
import os
import sys
from pathlib import Path

import pytest
from made_up import profile  # type: ignore[import-not-found]

from nearpeak.cli.main import main
from nearpeak.cli.output import terminal_style
from nearpeak.cli.verbs import profile as verbs_profile
from nearpeak.profiles import file, history

EAGER = str(Path(__file__).parents[1] / "data" / "kineto_eager.json.gz")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NEARPEAK_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("NEARPEAK_KEEP", raising=False)


def shown(*options, run=True):
    parser = argparse.ArgumentParser()
    verbs_profile.add_results(parser)
    arguments = parser.parse_args(options)
    verbs_profile.check_results(arguments)
    files = verbs_profile.ResultFiles(arguments, keep=run)
    return verbs_profile.show_profile(profile(), arguments, files)


def no_space(*arguments, **keywords):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_run_is_kept_and_shown_again(capsys):
    assert shown() == 0
    first = capsys.readouterr()
    assert first.err == "kept as @last; `nearpeak report @last` shows it again\n"
    assert main(["profile", "--trace", "@last"]) == 0
    again = capsys.readouterr()
    last = "`nearpeak report @last --full` prints all tables"
    assert last in first.out
    assert again.out.rpartition("\n\n")[0] == first.out.rpartition("\n\n")[0]
    assert "kept" not in again.err
    assert len(history.past_runs()) == 1


def test_files_that_are_written_again_are_named_once_when_all_is_recorded(tmp_path, capsys):
    parser = argparse.ArgumentParser()
    verbs_profile.add_results(parser)
    path = tmp_path / "run.json"
    arguments = parser.parse_args(["-o", str(path)])
    files = verbs_profile.ResultFiles(arguments, keep=True)
    files.write(profile(), is_final=False)
    assert path.exists()
    assert len(history.past_runs()) == 1
    assert capsys.readouterr().err == ""
    last = profile()
    files.write(last)
    files.write(last)
    kept = "kept as @last; `nearpeak report @last` shows it again"
    assert capsys.readouterr().err.splitlines() == [f"wrote {path}", kept]
    assert len(history.past_runs()) == 1
    files.write(profile())  # with the other ranks of its job
    assert capsys.readouterr().err == ""


def test_runs_are_listed(capsys):
    assert main(["profile", "--list"]) == 0
    assert "No runs are kept" in capsys.readouterr().err
    shown()
    shown()
    capsys.readouterr()
    assert main(["profile", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["run", "---", "@1", "@2"]
    assert "train.py" in lines[2]
    assert main(["profile", "--list", "--trace", "@last"]) == 2


@pytest.mark.parametrize("how", ["option", "environment", "trace"])
def test_what_is_not_to_be_kept_is_not(how, monkeypatch, capsys):
    if how == "environment":
        monkeypatch.setenv("NEARPEAK_KEEP", "0")
    assert shown(*(["--no-keep"] if how == "option" else []), run=how != "trace") == 0
    assert history.past_runs() == ()
    assert capsys.readouterr().err == ""


def test_a_trace_file_is_not_kept():
    assert main(["profile", "--trace", EAGER, "--top", "1"]) == 0
    assert history.past_runs() == ()


def test_a_cache_that_cannot_be_written_costs_a_line_and_no_report(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NEARPEAK_CACHE_DIR", str(tmp_path / "file" / "inside"))
    assert shown() == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("Step:")
    assert captured.err.startswith("nearpeak: this run was not kept: ")
    assert captured.err.count("\n") == 1


def test_a_full_disk_loses_no_report(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(os, "fsync", no_space)
    path = tmp_path / "run.json"
    assert shown("--save", str(path)) == 4
    captured = capsys.readouterr()
    assert captured.out.startswith("Step:")
    assert f"nearpeak: {path} cannot be written: No space left on device." in captured.err
    assert "this run was not kept" in captured.err
    assert not path.exists()


def test_json_that_cannot_be_written_loses_neither_the_report_nor_the_run(tmp_path, capsys):
    assert shown("--json", str(tmp_path / "no" / "run.json")) == 2
    captured = capsys.readouterr()
    assert captured.out.startswith("Step:")
    assert "cannot be written" in captured.err
    assert len(history.past_runs()) == 1


def test_a_reader_that_is_gone_does_not_cost_the_run(tmp_path, monkeypatch):
    def gone(*arguments, **keywords):
        raise BrokenPipeError

    monkeypatch.setattr(sys.stdout, "write", gone)
    with pytest.raises(BrokenPipeError):
        shown("--save", str(tmp_path / "run.json"))
    assert len(history.past_runs()) == 1
    assert file.read(tmp_path / "run.json") == profile()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--save", "out.doc"], "is written as one of .html"),
        (["-o", "run.html", "-o", "out.doc"], "is written as one of .html"),
        (["--save", "no/such/run.json"], "there is no folder no/such"),
    ],
)
def test_a_name_that_cannot_work_is_refused_before_the_run(options, message, tmp_path, capsys):
    script = tmp_path / "never.py"
    script.write_text("raise SystemExit('it ran')")
    assert main(["profile", *options, str(script)]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert "it ran" not in captured.err


def test_json_to_a_file_and_the_report_to_stdout(tmp_path, capsys):
    assert shown("--json", str(tmp_path / "run.json")) == 0
    assert capsys.readouterr().out.startswith("Step:")
    assert json.loads((tmp_path / "run.json").read_text())["wall_s"] == 10.0


class Terminal(io.StringIO):
    """Something that says what a stream says about itself."""

    def __init__(self, terminal, encoding):
        super().__init__()
        self._terminal, self._encoding = terminal, encoding

    @property
    def encoding(self):
        return self._encoding

    def isatty(self):
        return self._terminal


@pytest.mark.parametrize(
    ("stream", "environment", "color", "blocks"),
    [
        (Terminal(True, "utf-8"), {}, True, True),
        (Terminal(True, "UTF8"), {"NO_COLOR": ""}, True, True),
        (Terminal(True, "utf-8"), {"NO_COLOR": "0"}, False, True),
        (Terminal(True, "ascii"), {}, True, False),
        (Terminal(True, "utf-8"), {"TERM": "dumb"}, False, False),
        (Terminal(False, "utf-8"), {}, False, False),
        (Terminal(False, None), {}, False, False),
    ],
)
def test_colors_and_blocks_only_where_they_can_be_shown(stream, environment, color, blocks, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    style = terminal_style(stream)
    assert (style.color, style.blocks) == (color, blocks)


def test_a_script_that_changes_the_folder_changes_no_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    parser = argparse.ArgumentParser()
    verbs_profile.add_results(parser)
    arguments = parser.parse_args(["--save", "run.json", "--json", "all.json"])
    verbs_profile.check_results(arguments)
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert verbs_profile.show_profile(profile(), arguments, verbs_profile.ResultFiles(arguments, keep=True)) == 0
    assert (tmp_path / "run.json").exists()
    assert (tmp_path / "all.json").exists()


def test_several_files_are_written_and_one_that_fails_stops_no_other(tmp_path, capsys):
    names = [str(tmp_path / name) for name in ("run.html", "run.perfetto.json", "run.md")]
    made = dataclasses.replace(profile(), timeline=())
    parser = argparse.ArgumentParser()
    verbs_profile.add_results(parser)
    arguments = parser.parse_args([part for name in names for part in ("-o", name)])
    verbs_profile.check_results(arguments)
    assert verbs_profile.show_profile(made, arguments, verbs_profile.ResultFiles(arguments, keep=False)) == 2
    captured = capsys.readouterr()
    assert captured.out.startswith("Step:")
    (told,) = (line for line in captured.err.splitlines() if line.startswith("nearpeak: "))
    assert told.startswith(f"nearpeak: {names[1]}: the profile of ")
    assert "has no timeline" in told
    assert [Path(name).exists() for name in names] == [True, False, True]


def test_open_opens_the_page_that_was_written(tmp_path, monkeypatch, capsys):
    opened = []
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.setattr("webbrowser.open", lambda address: opened.append(address) or True)
    path = tmp_path / "run.html"
    assert shown("--open", "-o", str(tmp_path / "run.json"), "-o", str(path), run=False) == 0
    assert opened == [path.as_uri()]
    assert capsys.readouterr().err.splitlines()[-1] == f"opened {path.as_uri()}"
