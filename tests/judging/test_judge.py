"""Judgements: exploits are caught by name, honest candidates are not accused, mistakes of the user are errors."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from benchmarks.judge.__main__ import bugs, exploits, honest, is_met, state_of, tasks
from nearpeak._records import from_json, to_json
from nearpeak.cli.main import main
from nearpeak.judging.judge import judge, judge_suite
from nearpeak.judging.judgement import CHARGES, Charge, Judgement

PAGE = (Path(__file__).parents[2] / "docs" / "judge.md").read_text(encoding="utf-8")
QUICK = {"timed": False, "max_seconds": 0.1, "device": "cpu"}
REFERENCE = """
import torch

def double(x):
    return x * 2

def inputs(rows=16, columns=32):
    return (torch.randn(rows, columns, requires_grad=True),)
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "reference.py").write_text(REFERENCE, encoding="utf-8")
    return tmp_path


def judged(folder, body, **options):
    (folder / "kernel.py").write_text(f"import os, time, torch\n\ndef double(x):\n    {body}\n", encoding="utf-8")
    return judge(f"{folder / 'kernel.py'}:double", against=f"{folder / 'reference.py'}:double", **{**QUICK, **options})


def test_the_page_explains_every_exploit_and_names_only_charges():
    for entry in exploits():
        assert f"| `{entry.name}` |" in PAGE, f"docs/judge.md has no row for {entry.name}"
        assert set(entry.charges) <= set(CHARGES)


def test_the_corpus_is_as_large_as_it_says():
    assert len(exploits()) >= 65 and len(bugs()) == 72 and len(honest()) >= 400 and len(tasks()) == 3


def test_an_honest_candidate_may_be_wrong_where_that_is_known_and_never_dishonest():
    row = {"expected": (), "known_wrong": ("WRONG_STRIDES",), "charges": ["WRONG_STRIDES"]}
    assert is_met(row) and state_of(row) == "known wrong"
    assert state_of({**row, "charges": []}) == "ok"
    assert state_of({**row, "charges": [], "undecided": True}) == "undecided"
    for charges in (["WRONG_STRIDES", "CACHED_RESULT"], ["RAISED"]):
        assert state_of({**row, "charges": charges}) == "MISS"


def test_a_charge_has_a_name_of_the_table():
    with pytest.raises(ValueError, match="no charge"):
        Charge(name="UGLY", evidence="").check()


@pytest.mark.slow
def test_an_honest_candidate_is_accepted_with_gradients_and_times(folder):
    judgement = judged(folder, "return x + x", timed=True, compile_reference=False, seed=3)
    assert judgement.charges == ()
    assert {"gradients", "sequence", "sizes", "strides", "nonfinite", "timed"} <= {c.kind for c in judgement.checks}
    assert [rival.name for rival in judgement.speeds[0].rivals] == ["reference"]
    assert judgement.deterministic is True and judgement.bytes_held == 0
    assert from_json(Judgement, json.loads(json.dumps(to_json(judgement)))) == judgement


WRONG = {
    "x.detach() * 2": "WRONG_GRADIENT",
    "torch.empty_like(x) if len(x) % 2 else x * 2": "UNINITIALIZED_MEMORY",
    "(x.bfloat16() * 2).float() * 1.0": "PRECISION_LOWERED",
    "x * 2 if x.is_contiguous() else x * 3": "WRONG_STRIDES",
    "(x * 2).nan_to_num(0.0)": "WRONG_NONFINITE",
    "os._exit(0)": "CRASHED",
    "time.sleep(60)": "HUNG",
    "x.double() * 2": "WRONG_FORM",
}


SOME = ("x.detach() * 2", "x * 2 if x.is_contiguous() else x * 3")
"""What is tried on every change; the rest takes a minute."""


@pytest.mark.parametrize(
    "body", [pytest.param(body, marks=pytest.mark.slow if body in SOME else pytest.mark.exhaustive) for body in WRONG]
)
def test_a_wrong_candidate_is_named(folder, body):
    judgement = judged(folder, f"return {body}", timeout=5.0 if "sleep" in body else 60.0)
    assert WRONG[body] in [charge.name for charge in judgement.charges]


@pytest.mark.exhaustive
def test_a_refusal_is_no_charge(folder):
    judgement = judged(folder, "assert x.is_contiguous(), 'contiguous only'\n    return x * 2")
    assert judgement.is_accepted and any("contiguous only" in check.detail for check in judgement.refusals)


@pytest.mark.slow
def test_last_words_are_kept(folder):
    judgement = judged(folder, "print('I am dying', flush=True)\n    os.abort()")
    assert "SIGABRT" in judgement.charges[0].evidence and "I am dying" in judgement.last_words


NEEDS_TIMES = (
    *("right_when_new", "patched_clock", "clock_by_ctypes", "skips_sometimes", "time_of_day"),
    *("forked_call", "worker_process"),
)
CHEAP = ("patched_checker", "lazy_tensor", "forged_report")


@pytest.mark.parametrize(
    "entry",
    [
        pytest.param(entry, id=entry.name, marks=pytest.mark.slow if entry.name in CHEAP else pytest.mark.exhaustive)
        for entry in exploits()
        if not entry.needs_gpu and entry.needs_python <= sys.version_info[:2]
    ],
)
def test_an_exploit_is_caught_and_named(entry):
    needs_times = entry.name in NEEDS_TIMES
    judgement = judge(
        entry.candidate, against=entry.reference, compile_reference=False, **{**QUICK, "timed": needs_times}
    )
    charges = [charge.name for charge in judgement.charges]
    row = {"expected": entry.charges, "charges": charges, "right": judgement.is_right}
    assert is_met(row), judgement.charges


@pytest.mark.slow
def test_a_budget_that_is_spent_says_what_was_left_out(folder):
    judgement = judged(folder, "time.sleep(0.05)\n    return x * 2", budget=0.5, max_seconds=60)
    assert judgement.is_accepted and {check.kind for check in judgement.checks} >= {"given", "sequence"}
    assert any("were made: 1 of given" in note for note in judgement.notes)
    assert any("were not compared with others" in note for note in judgement.notes)


@pytest.mark.slow
def test_a_candidate_without_times_that_were_asked_for_is_undecided(folder, capsys):
    body = "time.sleep(0.05)\n    return x * 2"
    options = {"timed": True, "compile_reference": False, "budget": 0.5}
    judgement = judged(folder, body, **options)
    assert judgement.is_undecided and not judgement.is_accepted and "undecided" in repr(judgement)
    assert "no times were taken" in judgement.untimed
    files = [f"{folder / 'kernel.py'}:double", "--against", f"{folder / 'reference.py'}:double"]
    assert main(["judge", *files, "--device", "cpu", "--no-compile", "--budget", "0.5"]) == 3
    out = " ".join(capsys.readouterr().out.split())
    assert "UNDECIDED" in out and "ACCEPTED" not in out and "honest not known" in out


@pytest.mark.slow
def test_a_process_that_ends_before_the_call_returns_is_no_escape(folder):
    body = (
        "__import__('subprocess').run(['true'], check=True) if x.shape == (16, 32) and time else None\n    return x * 2"
    )
    judgement = judged(folder, f"global time\n    {body.replace('return', 'time = None; return')}", timed=True)
    assert judgement.charges == ()


@pytest.mark.slow
def test_a_suite_and_its_exit_code(folder, capsys):
    task = folder / "tasks" / "double"
    task.mkdir(parents=True)
    (task / "reference.py").write_text(REFERENCE, encoding="utf-8")
    (task / "good.py").write_text("def double(x):\n    return x + x\n", encoding="utf-8")
    (task / "broken.py").write_text("x = 1\n", encoding="utf-8")
    suite = judge_suite(folder / "tasks", **QUICK)
    assert [judgement.is_accepted for judgement in suite.judgements] == [True]
    assert "no function" in suite.failures["double/broken.py"] and not suite.is_accepted
    (task / "broken.py").write_text("def double(x):\n    return x * 3\n", encoding="utf-8")
    options = ["--device", "cpu", "--no-times", "--max-seconds", "0.1"]
    assert main(["judge", "--suite", str(folder / "tasks"), *options]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "1 of 2 accepted" in out and "WRONG_VALUES" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["judge"], "Give a CANDIDATE and its reference"),
        (["judge", "a.py:f", "--against", "b.py:g", "--suite", "x"], "--suite takes neither"),
        (["judge", "a.py:f", "--against", "b.py:g", "--size", "rows"], "NAME=VALUE"),
        (["judge", "a.py:f", "--against", "b.py:g", "--size", "rows=0.5"], "whole number"),
        (["judge", "a.py:f", "--against", "b.py:g", "--timeout", "0"], "above 0"),
        (["judge", "kernel", "--against", "b.py:g", "--device", "cpu"], "Cannot read 'kernel' as a candidate"),
        (["judge", "missing.py:f", "--against", "b.py:g", "--device", "cpu"], "There is no file"),
        (["judge", "--suite", "no/such/folder", "--device", "cpu"], "there is no such folder"),
    ],
)
def test_mistakes_on_the_command_line(arguments, message, capsys):
    assert main(arguments) == 2
    assert message in " ".join(capsys.readouterr().err.split())


SANITIZER = """#!{python}
import subprocess, sys
assert sys.argv[1:4] == ["--tool", "memcheck", "--target-processes"], sys.argv
code = subprocess.call(sys.argv[sys.argv.index("--print-limit") + 2 :], close_fds=False)
print("========= COMPUTE-SANITIZER")
print("========= Invalid __global__ write of size 4 bytes" if {errors} else "")
print("========= ERROR SUMMARY: {errors} errors", flush=True)
sys.exit(code)
"""


@pytest.mark.parametrize(
    "errors", [pytest.param(0, marks=pytest.mark.exhaustive), pytest.param(2, marks=pytest.mark.slow)]
)
def test_compute_sanitizer_ends_by_itself_and_is_read(folder, monkeypatch, errors):
    tool = folder / "bin" / "compute-sanitizer"
    tool.parent.mkdir()
    tool.write_text(SANITIZER.format(python=sys.executable, errors=errors), encoding="utf-8")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tool.parent), prepend=os.pathsep)
    judgement = judged(folder, "return x + x", sanitize="memcheck")
    if errors:
        (charge,) = judgement.charges
        assert charge.name == "MEMORY_ERROR" and "2 of Invalid __global__ write" in charge.evidence
    else:
        assert judgement.is_accepted and "compute-sanitizer memcheck found nothing." in judgement.notes


@pytest.mark.slow
def test_a_call_that_needs_more_memory_than_it_may_have_says_so(folder):
    body = "big = torch.ones(1 << 26)\n    return x * 2 + 0 * big[0]"
    judgement = judged(folder, body, memory_bytes=64 << 20)
    (charge,) = judgement.charges
    assert charge.name == "OUT_OF_MEMORY" and "0.0625 GiB" in charge.evidence
