"""Code of the user that raises, ends the process or returns what is no case: one message and no traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

from nearpeak.cli.main import main

CASES = """
import os, sys
import torch

class Own(BaseException):
    pass

class Unprintable(Exception):
    def __str__(self):
        raise ValueError("no text")

def _step(error):
    x = torch.ones(4)
    def step():
        y = x + 1
        raise error
    return step

def raises(): return _step(ValueError("wrong\\x1b[31m"))
def exits(): return _step(SystemExit(0))
def exits_with_text(): return _step(SystemExit("bye"))
def exits_with_none(): return lambda: sys.exit()
def own(): return _step(Own("mine"))
def unprintable(): return _step(Unprintable())
def stops(): return _step(StopIteration())
def recursive():
    def step(): return step()
    return step
def shapes(): return torch.mm, torch.ones(2, 3), torch.ones(2, 3)
def builds_and_exits(): sys.exit(0)
def builds_and_raises(): return [][0]
def returns_nothing(): pass
def returns_number(): return 5
def returns_strings(): return "a", "b"
def yields(): yield torch.ones(2)
async def awaits(): return torch.ones(2)
def coroutine():
    async def step(): return torch.ones(2)
    return step
def generator():
    def step(): yield torch.ones(2)
    return step
def unshowable(): return Unshowable()
def wrong_work():
    import nearpeak
    return nearpeak.Case(torch.add, torch.ones(2), 1, work="lots")
def resets():
    import nearpeak
    return nearpeak.Case(torch.add, torch.ones(2), 1, reset=lambda: sys.exit(0))
class Unshowable:
    def __repr__(self): raise ValueError("no text")
not_callable = 3
"""
FAILING = {
    "raises": "ValueError: wrong",
    "exits": "SystemExit: 0",
    "exits_with_text": "SystemExit: bye",
    "exits_with_none": "SystemExit:",
    "own": "Own: mine",
    "unprintable": "Unprintable: ",
    "stops": "StopIteration",
    "recursive": "RecursionError",
    "shapes": "RuntimeError: ",
    "builds_and_exits": "SystemExit: 0",
    "builds_and_raises": "IndexError: ",
    "returns_nothing": "returned None",
    "returns_number": "returned 5",
    "returns_strings": "returned ('a', 'b')",
    "yields": "generator",
    "awaits": "async",
    "coroutine": "a call of it runs nothing",
    "generator": "a call of it runs nothing",
    "unshowable": "returned a Unshowable",
    "wrong_work": "is a nearpeak.Work",
    "not_callable": "is not callable",
    "absent": "does not exist",
}
VERBS = {
    "estimate": ("estimate", "{}", "--on", "h100-sxm"),
    "bench": ("bench", "{}", "--max-seconds", "0.01"),
    "profile": ("profile", "--on", "h100-sxm", "--no-keep", "{}"),
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("case", FAILING)
def test_a_case_that_fails_is_one_message(
    verb: str, case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("NEARPEAK_DEBUG", raising=False)
    (tmp_path / "cases.py").write_text(CASES)
    monkeypatch.chdir(tmp_path)
    assert main([word.format(f"cases.py:{case}") for word in VERBS[verb]]) == 2
    captured = capsys.readouterr()
    messages = [line for line in captured.err.splitlines() if line.startswith("nearpeak: ")]
    assert len(messages) == 1, captured.err
    assert FAILING[case] in messages[0]
    assert "Traceback" not in captured.err and "\x1b" not in captured.err and captured.out == ""
    line = next((number for number, text in enumerate(CASES.split("\n"), 1) if f"def {case}(" in text), 0)
    if case in ("exits_with_none", "builds_and_exits", "builds_and_raises"):
        assert f"cases.py:{line})" in messages[0]
    elif case in ("raises", "exits", "own", "stops"):
        assert f"cases.py:{CASES.split(chr(10)).index('        raise error') + 1})" in messages[0]


@pytest.mark.parametrize("verb", ["bench", "profile"])
def test_a_reset_that_ends_the_process(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cases.py").write_text(CASES)
    monkeypatch.chdir(tmp_path)
    assert main([word.format("cases.py:resets") for word in VERBS[verb]]) == 2
    assert "SystemExit: 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content", ["import sys\nsys.exit(0)", "raise BaseException('x')", "1 +", "import nothing_of_this_name", "\0"]
)
@pytest.mark.parametrize("verb", VERBS)
def test_a_file_that_cannot_be_imported(
    verb: str, content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cases.py").write_text(content)
    monkeypatch.chdir(tmp_path)
    assert main([word.format("cases.py:case") for word in VERBS[verb]]) == 2
    error = capsys.readouterr().err
    assert "cases.py failed while it was imported" in error and "Traceback" not in error


@pytest.mark.parametrize("verb", ["estimate", "profile", pytest.param("bench", marks=pytest.mark.slow)])
def test_what_a_case_prints_is_no_part_of_the_result(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    content = (
        "import torch\nprint('imported')\ndef case():\n    print('built')\n    return torch.add, torch.ones(4), 1\n"
    )
    (tmp_path / "cases.py").write_text(content)
    monkeypatch.chdir(tmp_path)
    assert main([word.format("cases.py:case") for word in VERBS[verb]]) in (0, 3)
    captured = capsys.readouterr()
    assert "imported" in captured.err and "built" in captured.err
    assert "imported" not in captured.out and "built" not in captured.out


@pytest.mark.parametrize("content", ["import sys\nsys.exit(0)", "raise ValueError('x')", "1 +"])
def test_rules_that_fail(content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rules.py").write_text(content)
    assert main(["profile", "--rules", str(tmp_path / "rules.py"), "train.py"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"nearpeak: --rules {tmp_path / 'rules.py'} failed: ") and "Traceback" not in error
