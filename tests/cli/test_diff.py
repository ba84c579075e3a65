"""`nearpeak diff`: what it prints, and its exit codes."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from made_up import profile as made_up  # type: ignore[import-not-found]
from real_runs import real, scaled  # type: ignore[import-not-found]

from nearpeak.cli.main import main
from nearpeak.profiles import history

DATA = Path(__file__).parents[1] / "data"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NEARPEAK_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def files(tmp_path):
    """A run, and one that is 20 % slower."""
    run = real("vit_second")
    names = [str(tmp_path / "a.json.gz"), str(tmp_path / "b.json.gz")]
    run.save(names[0])
    scaled(run, lambda op: True, 1.2).save(names[1])
    return names


def test_the_report_goes_to_stdout(files, capsys):
    assert main(["diff", *files]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("Verdict: Slower: ")
    assert shown.err == ""


def test_the_gate_fails_a_slower_step_and_says_why_on_stderr(files, capsys):
    assert main(["diff", *files, "--fail-over", "3%"]) == 1
    assert capsys.readouterr().err.startswith("nearpeak: failed: a step takes 19.5 % longer, and 3.0 % is allowed")
    assert main(["diff", *files, "--fail-over", "0.3"]) == 0
    assert capsys.readouterr().err.startswith("nearpeak: passed: ")
    assert main(["diff", *reversed(files), "--fail-over", "3%"]) == 0


def test_the_gate_cannot_tell_without_clean_steps(files, tmp_path, capsys):
    other = str(tmp_path / "c.json")
    replace(real("vit_second"), steps=0, walls=(), spread=None).save(other)
    assert main(["diff", files[0], other, "--fail-over", "3%"]) == 3
    assert "no clean steps" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--fail-over=-1%", "--fail-over=inf", "--fail-over=nan", "--top=0"])
def test_values_that_make_no_sense(files, option, capsys):
    assert main(["diff", *files, option]) == 2
    assert option.partition("=")[0] in capsys.readouterr().err


def test_files_that_are_not_there(files, capsys):
    assert main(["diff", files[0], "nowhere.json"]) == 2
    assert main(["diff", "@2", "@last"]) == 2
    assert "no runs are kept" in capsys.readouterr().err


def test_kept_runs(capsys):
    history.add_run(made_up(10.0))
    history.add_run(made_up(20.0))
    assert main(["diff", "@2", "@last"]) == 0
    assert "20.0 s a step against 10.0 s" in capsys.readouterr().out


def test_json_has_the_fields(files, capsys):
    assert main(["diff", *files, "--json", "-", "--fail-over", "3%"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"] == "slower"
    assert found["before"]["device"] == "NVIDIA H200"
    assert "ops" not in found["before"]


def test_markdown_goes_to_stdout(files, capsys):
    assert main(["diff", *files, "--markdown"]) == 0
    assert "### nearpeak: the step is slower" in capsys.readouterr().out


def test_traces_of_the_profiler(capsys):
    assert main(["diff", str(DATA / "kineto_eager.json.gz"), str(DATA / "kineto_compiled.json.gz")]) == 0
    assert "no clean steps" in capsys.readouterr().out


def test_saved_profiles_need_no_torch(files):
    code = (
        "import sys; from nearpeak.cli.main import main; "
        f"code = main(['diff', {files[0]!r}, {files[1]!r}, '--markdown']); "
        "assert code == 0 and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
