"""`nearpeak bench`: small cases on the CPU for real, and everything that can be asked for wrongly."""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest

from nearpeak.cli.argument_types import assignment, assignments, share
from nearpeak.cli.main import main
from nearpeak.cli.verbs import bench as verb
from nearpeak.errors import UntrustworthyMeasurement
from nearpeak.measure.options import Evict, Method
from nearpeak.measure.results import load_result
from nearpeak.measure.timing import Cache, Comparison, Kind, Regime, Sweep, Timing, make_flag

CASES = """
import torch
print("the case file speaks")
WIDTH = 3

def neg(n: int = 64, dtype: str = "float32"):
    print("the case speaks")
    return torch.neg, torch.rand(n).to(getattr(torch, dtype))

def absolute(n: int = 64):
    return torch.abs, torch.rand(n)

def closure():
    x = torch.rand(8)
    return lambda: x + 1

def needs(n):
    return torch.neg, torch.rand(n)

def unbuildable():
    raise RuntimeError("no inputs today")

def raises():
    def fail(x):
        raise ValueError("cannot add")
    return fail, torch.rand(4)

def nothing():
    torch.rand(4)

def number():
    return 3

def picky(n: int = 1):
    if n > 2:
        raise MemoryError("too large")
    return torch.neg, torch.rand(n)
"""

QUICK = ["--max-seconds", "0.03", "--cache", "hot"]


@pytest.fixture
def cases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "cases.py").write_text(CASES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NEARPEAK_DEBUG", raising=False)
    return "cases.py"


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    verb.configure(parser)
    return parser.parse_args(arguments)


@pytest.mark.slow
def test_one_case_prints_a_card(cases, capsys):
    assert main(["bench", f"{cases}:neg", "--set", "n=1k", *QUICK]) in (0, 3)
    captured = capsys.readouterr()
    assert captured.out.startswith("neg  n=1024\n")
    assert "cpu time, hot cache" in captured.out
    assert "float32 1024" in captured.out
    assert "speaks" not in captured.out
    assert "the case file speaks\nthe case speaks\n" in captured.err


@pytest.mark.slow
def test_json_alone_on_stdout_is_the_timing(cases, capsys, tmp_path):
    main(["bench", f"{cases}:neg", "--json", "-", *QUICK])
    output = capsys.readouterr().out
    assert json.loads(output)["nearpeak"] == "timing"
    (tmp_path / "t.json").write_text(output)
    result = load_result(tmp_path / "t.json")
    assert isinstance(result, Timing)
    assert result.name == "neg"


@pytest.mark.slow
def test_two_cases_are_compared(cases, capsys, tmp_path):
    main(["bench", f"{cases}:neg", f"{cases}:absolute", "--set", "n=32", "--margin", "50%", "--json", "c.json", *QUICK])
    output = capsys.readouterr().out
    assert output.startswith(("absolute is ", "INCONCLUSIVE"))
    result = load_result(tmp_path / "c.json")
    assert isinstance(result, Comparison)
    assert result.margin == 0.5
    assert (result.a.name, result.b.name) == ("neg", "absolute")


@pytest.mark.slow
def test_a_sweep_with_table_file_plot_and_baseline(cases, capsys, tmp_path):
    arguments = ["bench", f"{cases}:neg", "--sweep", "n=16,1k", "--set", "dtype=float64", *QUICK]
    main([*arguments, "--json", "s.json", "--svg", "s.svg"])
    captured = capsys.readouterr()
    assert captured.out.startswith("neg  dtype=float64\n")
    assert captured.err.endswith("wrote s.json\nwrote s.svg\n")
    result = load_result(tmp_path / "s.json")
    assert isinstance(result, Sweep)
    assert [timing.parameters["n"] for timing in result.timings] == ["16", "1024"]
    ElementTree.parse(tmp_path / "s.svg")

    main([*arguments, "--baseline", "s.json", "--json", "-"])
    captured = capsys.readouterr()
    assert json.loads(captured.out)["nearpeak"] == "sweep"
    assert "NOT INTERLEAVED" in captured.err


@pytest.mark.slow
def test_a_point_that_fails_is_shown_and_the_others_stay(cases, capsys):
    assert main(["bench", f"{cases}:picky", "--sweep", "n=1,4", *QUICK]) in (0, 3)
    output = capsys.readouterr().out
    assert "Not measured:\n  n=4: " in output
    assert "MemoryError: too large" in " ".join(output.split())


@pytest.mark.slow
def test_a_sweep_in_which_nothing_works_is_an_error(cases, capsys):
    assert main(["bench", f"{cases}:picky", "--sweep", "n=4,5", *QUICK]) == 2
    assert "No point of the sweep could be measured." in capsys.readouterr().err


@pytest.mark.slow
def test_an_interrupted_run_shows_what_there_is(cases, capsys, monkeypatch):
    from nearpeak.measure import bench as library

    real, taken = library.measured_block, []

    def block(subject):
        if len(taken) == 8:
            raise KeyboardInterrupt
        taken.append(real(subject))
        return taken[-1]

    monkeypatch.setattr(library, "measured_block", block)
    assert main(["bench", f"{cases}:neg", *QUICK]) == 3
    output = capsys.readouterr().out
    assert "PARTIAL: interrupted" in output
    assert "PARTIAL: stopped by hand after 8 blocks" in output


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("missing.py:neg", "There is no file 'missing.py'"),
        ("cases.py", "Write FILE.py:FUNCTION"),
        ("cases.py:negg", "Did you mean 'neg'?"),
        ("cases.py:WIDTH", "'WIDTH' is not callable"),
        ("cases.py:unbuildable", "failed while building its inputs: RuntimeError: no inputs today"),
        ("cases.py:raises", "raises raised an error on its first call: ValueError: cannot add"),
        ("cases.py:nothing", "returned None. A case builds its inputs and returns what to time"),
        ("cases.py:number", "returned 3."),
        ("cases.py:needs", "missing 1 required positional argument"),
    ],
)
def test_a_case_that_cannot_be_timed(case, message, cases, capsys):
    assert main(["bench", case, *QUICK]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert "Traceback" not in captured.err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Give one CASE"),
        (["a.py:a", "b.py:b", "c.py:c"], "Give one CASE"),
        (["cases.py:neg", "--svg", "x.svg"], "--svg belongs to --sweep"),
        (["cases.py:neg", "--margin", "1%"], "--margin belongs to"),
        (["cases.py:neg", "--quick"], "belong to --selftest"),
        (["cases.py:neg", "--selftest"], "--selftest takes no CASE"),
        (["cases.py:neg", "cases.py:neg", "--sweep", "n=1,2"], "--sweep takes one CASE"),
        (["cases.py:neg", "cases.py:neg", "--baseline", "x"], "--baseline takes one CASE"),
        (["cases.py:neg", "--set", "n=1", "--set", "n=2"], "'n' is given twice"),
        (["cases.py:neg", "--set", "n=1", "--sweep", "n=1,2"], "both in --set and in --sweep"),
        (["cases.py:neg", "--set", "m=1"], "has no parameter 'm'"),
        (["cases.py:neg", "--sweep", "dtpe=int8,int32"], "Did you mean 'dtype'?"),
        (["cases.py:neg", "--kind", "divice"], "Did you mean 'device'?"),
        (["cases.py:neg", "--kind", "device"], "use kind='cpu'"),
        (["cases.py:neg", "--baseline", "missing.json"], "missing.json: there is no such file"),
        (["cases.py:neg", "--json", "missing/x.json", *QUICK], "missing/x.json cannot be written"),
    ],
)
def test_what_cannot_be_asked_for(arguments, message, cases, capsys):
    assert main(["bench", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    "arguments",
    [
        ["--set", "n"],
        ["--set", "=3"],
        ["--set", "n="],
        ["--sweep", "n=1,,2"],
        ["--sweep", "n=8..1"],
        ["--sweep", "n=0..8*2"],
        ["--sweep", "n=1..8*1"],
        ["--sweep", "n=a..b"],
        ["--sweep", "n=0..9g+1"],
        ["--sweep", "n=1,1"],
        ["--precision", "tight"],
    ],
)
def test_values_that_cannot_be_read(arguments, capsys):
    with pytest.raises(SystemExit) as end:
        main(["bench", "cases.py:neg", *arguments])
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert f"error: argument {arguments[0]}: " in error
    assert "'" + arguments[1].removeprefix("n=") in error or repr(arguments[1]) in error


@pytest.mark.parametrize(
    ("text", "value"),
    [("n=3", 3), ("n=-1", -1), ("n=2M", 2**21), ("n=0.5", 0.5), ("n=1e-3", 1e-3), ("n=True", True), ("n=a=b", "a=b")],
)
def test_a_value_has_the_type_it_looks_like(text, value):
    name, found = assignment(text)
    assert (name, found, type(found)) == ("n", value, type(value))


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("n=1k..16k*2", [1024, 2048, 4096, 8192, 16384]),
        ("n=1..100*10", [1, 10, 100]),
        ("n=1..5", [1, 2, 4]),
        ("n=0..64+32", [0, 32, 64]),
        ("n=1,4..16*4,100", [1, 4, 16, 100]),
        ("n=float32,bfloat16", ["float32", "bfloat16"]),
    ],
)
def test_values_of_a_sweep(text, values):
    assert assignments(text) == ("n", values)


def test_shares():
    assert (share("1%"), share("0.01")) == (0.01, 0.01)


def test_the_help_names_every_value_of_every_option():
    text = verb.configure.__globals__["__doc__"] + " ".join(action.help or "" for action in _parser()._actions)
    for choices in (Kind, Method, Cache, Evict, Regime):
        for choice in get_args(choices):
            assert choice in text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    verb.configure(parser)
    return parser


@pytest.fixture
def graded(cases, monkeypatch):
    """Makes `bench` return a timing with the flags that it is given."""
    from nearpeak.measure import bench as library

    real = library.bench

    def install(*flags: str) -> None:
        def bench(case: object, **options: object) -> Timing:
            timing = real(case, **options)
            return dataclasses.replace(timing, flags=tuple(make_flag(flag, "made up") for flag in flags))

        monkeypatch.setattr(library, "bench", bench)

    return install


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "strict", "code"),
    [
        ((), True, 0),
        (("DRIFT",), True, 0),
        (("DRIFT", "THERMAL"), False, 0),
        (("DRIFT", "THERMAL"), True, 3),
        (("LAUNCH_NOT_HIDDEN",), False, 3),
        (("LAUNCH_NOT_HIDDEN",), True, 3),
    ],
)
def test_exit_codes_by_grade(flags, strict, code, graded, capsys):
    graded(*flags)
    assert main(["bench", "cases.py:neg", *QUICK, *(["--strict"] if strict else [])]) == code
    captured = capsys.readouterr()
    assert captured.out.startswith("neg\n")
    assert ("grade" in captured.err) == (strict and code == 3)


@pytest.mark.slow
def test_strict_is_an_error_with_the_reasons(graded):
    graded("DRIFT", "THERMAL")
    with pytest.raises(UntrustworthyMeasurement, match=r"THERMAL: made up\. Let the device cool"):
        verb.run(parse("cases.py:neg", *QUICK, "--strict"))


@pytest.mark.slow
def test_narration_only_where_it_is_wanted(cases, capsys):
    main(["bench", f"{cases}:closure", *QUICK])
    assert "probing" not in capsys.readouterr().err
    main(["bench", f"{cases}:closure", *QUICK, "--verbose"])
    assert "closure: probing\n" in capsys.readouterr().err


class Terminal(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [[], ["--sweep", "n=8,16"]])
def test_on_a_terminal_progress_is_shown_and_taken_away(arguments, cases, capsys, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    assert main(["bench", f"{cases}:neg", *QUICK, *arguments]) in (0, 3)
    shown = terminal.getvalue()
    assert "\x1b" not in capsys.readouterr().out
    assert shown.endswith("\x1b[2K")
    assert ("probing" in shown) != bool(arguments)
    assert ("1/2" in shown) == bool(arguments)


@pytest.mark.parametrize(("passed", "code"), [(True, 0), (False, 3)])
def test_the_self_test(passed, code, monkeypatch, capsys):
    from nearpeak.measure import selftest
    from nearpeak.render.views import selftest as render

    asked = []

    def run(names=(), quick=False, progress=None):
        asked.append((list(names), quick))
        return SimpleNamespace(passed=passed)

    monkeypatch.setattr(selftest, "run", run)
    monkeypatch.setattr(render, "text", lambda report: "the table")
    assert main(["bench", "--selftest", "--quick", "--experiment", "sleep"]) == code
    assert capsys.readouterr().out == "the table\n"
    assert asked == [(["sleep"], True)]


def test_help_imports_no_torch():
    code = (
        "import sys\n"
        "from nearpeak.cli.main import main\n"
        "try:\n    main(['bench', '--help'])\nexcept SystemExit:\n    pass\n"
        "assert not {'torch', 'nearpeak.measure.timing'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
