"""`nearpeak profile`."""

import json
from pathlib import Path

import pytest

from nearpeak.cli.main import main
from nearpeak.cli.output import narrate_text
from nearpeak.cli.verbs import profile as verb
from nearpeak.profiling import script as script_module

EAGER = str(Path(__file__).parents[1] / "data" / "kineto_eager.json.gz")


def test_a_trace_file_gives_the_card_and_the_waterfall(capsys):
    assert main(["profile", "--trace", EAGER]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Step:    kineto_eager.json.gz: one step\nVerdict:")
    for part in ("ideal", "slow kernels", "idle", "step"):
        assert f"\n{part}" in out


@pytest.mark.parametrize(
    ("options", "has_findings", "has_ranking"),
    [
        ([], False, False),
        (["--findings", "2"], True, False),
        (["--by", "module"], False, True),
        (["--top", "3"], False, True),
        (["--full"], True, True),
    ],
)
def test_options_that_ask_for_more_get_the_section_that_they_name(options, has_findings, has_ranking, capsys):
    assert main(["profile", "--trace", EAGER, *options]) == 0
    out = capsys.readouterr().out
    assert ("Findings, by what they would save:" in out) == has_findings
    assert ("measured  written" in out) == has_ranking
    assert ("Modeled: " in out) == (options == ["--full"])
    assert len(out.splitlines()) <= 35 or options


def test_a_saved_profile_is_shown_again(tmp_path, capsys):
    path = tmp_path / "run.json.gz"
    assert main(["profile", "--trace", EAGER, "--save", str(path)]) == 0
    first = capsys.readouterr()
    assert f"wrote {path}" in first.err
    assert main(["profile", "--trace", str(path)]) == 0
    assert capsys.readouterr().out == first.out


def test_json_alone(capsys):
    assert main(["profile", "--trace", EAGER, "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sum(part["seconds"] for part in found["waterfall"]["parts"]) == pytest.approx(found["wall_s"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--trace", "no/such.json"], "no such file"),
        (["--trace", EAGER, "--top", "0"], "at least one row"),
        (["--trace", EAGER, "--step", "7"], "7"),
        (["--trace", EAGER, "--on", "h200"], "Did you mean"),
        (["--trace", EAGER, "--save", "out.doc"], "is written as one of .html"),
    ],
)
def test_what_cannot_be_done_is_said(options, message, capsys):
    assert main(["profile", *options]) == 2
    assert message in capsys.readouterr().err


def test_a_saved_profile_belongs_to_its_machine(tmp_path, capsys):
    path = tmp_path / "run.json"
    main(["profile", "--trace", EAGER, "--save", str(path)])
    assert main(["profile", "--trace", str(path), "--on", "b200"]) == 2
    assert "is a saved profile" in capsys.readouterr().err


def test_a_step_that_is_no_number_is_a_usage_error(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["profile", "--trace", EAGER, "--step", "last"])
    assert caught.value.code == 2
    assert "neither the number of a step nor all" in capsys.readouterr().err


TRAIN = """
import sys
import torch

model = torch.nn.Linear(16, 16)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(int(sys.argv[1])):
    model(torch.randn(4, 16)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
print("arguments", sys.argv[1:])
sys.exit(int(sys.argv[2]))
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    return str(path)


def test_a_script_is_run_with_its_arguments_and_profiled(script, tmp_path, capsys):
    saved = tmp_path / "run.json"
    assert main(["profile", "--on", "h200-sxm", "--save", str(saved), script, "25", "0", "--own", "x"]) == 0
    captured = capsys.readouterr()
    assert "arguments ['25', '0', '--own', 'x']" in captured.out
    assert "Verdict:" in captured.out
    assert "profiling a step" in captured.err
    assert json.loads(saved.read_text())["profile"]["source"] == script


def test_a_script_that_fails_keeps_its_exit_code_and_gives_its_profile(script, capsys):
    assert main(["profile", "--on", "h200-sxm", script, "25", "7"]) == 7
    assert "Verdict:" in capsys.readouterr().out


def test_a_script_that_goes_on_has_its_report_on_stderr_meanwhile(tmp_path, capsys, monkeypatch):
    flag, path = tmp_path / "shown", tmp_path / "train.py"
    waiting = f"import pathlib, time\nwait = pathlib.Path({str(flag)!r}).exists\n"
    waiting += "for _ in range(1000): wait() or time.sleep(0.01)\n#"
    path.write_text(TRAIN.replace("sys.exit", waiting))

    def show(text):
        narrate_text(text)
        flag.touch()

    monkeypatch.setattr(script_module, "EARLY_REPORT_S", 0.01)
    monkeypatch.setattr(verb, "narrate_text", show)
    assert main(["profile", "--on", "h200-sxm", "--full", str(path), "200", "0"]) == 0
    captured = capsys.readouterr()
    assert "train.py goes on. Ctrl-C ends it and gives the report now; --stop does that by itself\n" in captured.err
    header, early = captured.err.split("still runs, and Ctrl-C ends it.\n")
    assert "everything needed has been recorded" in header
    assert "Verdict:" in early
    assert captured.out.startswith("arguments ['200', '0']\n")
    assert captured.out.count("Verdict:") == 1  # the whole report, at the end


def test_with_stop_nothing_is_said_of_a_script_that_goes_on(script, capsys):
    assert main(["profile", "--on", "h200-sxm", "--stop", script, "61", "0"]) == 0
    captured = capsys.readouterr()
    assert "goes on" not in captured.err
    assert "Verdict:" in captured.out


def test_too_few_steps_are_said(script, capsys):
    assert main(["profile", "--on", "h200-sxm", script, "3", "0"]) == 2
    assert "took 3 steps. A profile needs about 20 of them" in capsys.readouterr().err
    assert main(["profile", "--on", "h200-sxm", script, "3", "5"]) == 5
    assert main(["profile", "--on", "h200-sxm", "no/such.py"]) == 2
    assert "no such script" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "SCRIPT, -m MODULE or --trace"),
        (["--trace", EAGER, "x.py"], "one of them"),
        (["--trace", EAGER, "-m", "x"], "one of them"),
        (["-m"], "needs the name"),
        (["--step", "1", "x.py"], "a trace has steps by number"),
        (["--step", "x:y", "--trace", EAGER], "a trace has steps by number"),
        (["--wait", "0", "x.py"], "more than 0"),
        (["--stop", "cases.py:x"], "A case is one step"),
        (["-m", "no.such.module"], "-m no.such.module"),
        (["-m", "json.decoder.nothing"], "-m json.decoder.nothing"),
        (["--step", "x.py:3", "{script}"], "Cannot read 'x.py:3' as a function"),
        (["--step", "nosuch.py:f", "{script}"], "no file 'nosuch.py'"),
    ],
)
def test_a_script_and_a_file_are_told_apart(options, message, script, capsys):
    assert main(["profile", "--on", "h200-sxm", *(option.format(script=script) for option in options)]) == 2
    assert message in capsys.readouterr().err
