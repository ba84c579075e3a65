"""The frame around the verbs: help, exit codes, and how errors end."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

import nearpeak
from nearpeak.cli import main as cli
from nearpeak.errors import CaseError, EnvironmentProblem, NearpeakError, UntrustworthyMeasurement, UsageError

Install = Callable[[Callable[[], int]], None]


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Adds a verb `try` to the command line that does what it is given."""

    def install(action: Callable[[], int]) -> None:
        module = ModuleType("try", "Tries 100 % of it.\n\nAnd says more.")
        module.configure = lambda parser: parser.add_argument("--loud", action="store_true")
        module.run = lambda arguments: action()
        monkeypatch.setitem(cli.VERBS, "try", module)

    monkeypatch.delenv("NEARPEAK_DEBUG", raising=False)
    return install


def raising(error: BaseException) -> Callable[[], int]:
    def action() -> int:
        raise error

    return action


def test_no_arguments_is_help_and_a_usage_error(capsys: pytest.CaptureFixture[str]):
    assert cli.main([]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("usage: nearpeak")


def test_help_lists_the_verbs_and_the_exit_codes(capsys: pytest.CaptureFixture[str], verb: Install):
    verb(lambda: 0)
    with pytest.raises(SystemExit) as end:
        cli.main(["--help"])
    assert end.value.code == 0
    output = capsys.readouterr().out
    for name, module in cli.VERBS.items():
        assert name in output
        assert module.__doc__, f"the verb {name} has no docstring"
    assert "Tries 100 % of it." in output
    assert "And says more." not in output
    for code in range(6):
        assert f"\n  {code}  " in output


@pytest.mark.parametrize("name", list(cli.VERBS))
def test_every_verb_has_help(name: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as end:
        cli.main([name, "--help"])
    assert end.value.code == 0
    first_line = cli.VERBS[name].__doc__.strip().partition("\n")[0]
    assert first_line in capsys.readouterr().out


@pytest.mark.parametrize("flag", ["-V", "--version"])
def test_version(flag: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as end:
        cli.main([flag])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"nearpeak {nearpeak.__version__}\n"


@pytest.mark.parametrize(
    ("command", "answer"),
    [
        ("bnech", "There is no verb 'bnech'. Did you mean 'bench'?"),
        ("profil train.py", "Did you mean 'profile'?"),
        ("train.py --epochs 3", "To profile a script: nearpeak profile train.py --epochs 3"),
        ("--nonsense", "nearpeak has no option --nonsense."),
        ("doctor --nonsense", "nearpeak doctor has no option --nonsense."),
        ("doctor nonsense", "nearpeak doctor does not take 'nonsense'."),
        ("bench --margn 1 x.py:f", "Did you mean --margin?"),
        ("profile --steps 3 few.py", "Options of the script go after it: nearpeak profile few.py --steps 3\n"),
        (
            "profile --stop --lr 0.1 few.py --steps 3",
            "Options of the script go after it: nearpeak profile --stop few.py --lr 0.1 --steps 3\n",
        ),
        ("profile --stpo few.py", "The nearest option of nearpeak is --stop."),
    ],
)
def test_an_unknown_word_is_answered_with_what_was_meant(command: str, answer: str, capsys: pytest.CaptureFixture[str]):
    assert cli.main(command.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("nearpeak: ")
    assert answer in captured.err


@pytest.mark.parametrize("code", [0, 1, 3])
def test_the_code_of_the_verb_is_the_exit_code(code: int, verb: Install):
    verb(lambda: code)
    assert cli.main(["try"]) == code


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (NearpeakError("no."), 1),
        (UsageError("no."), 2),
        (CaseError("no."), 2),
        (UntrustworthyMeasurement("no."), 3),
        (EnvironmentProblem("no."), 4),
    ],
)
def test_an_error_is_one_message_and_its_code(
    error: NearpeakError, code: int, verb: Install, capsys: pytest.CaptureFixture[str]
):
    verb(raising(error))
    assert cli.main(["try"]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "nearpeak: no.\n"


def test_an_error_with_a_cause_says_how_to_see_it(verb: Install, capsys: pytest.CaptureFixture[str]):
    def action() -> int:
        try:
            raise ZeroDivisionError("inside")
        except ZeroDivisionError as cause:
            raise CaseError("the case raised.") from cause

    verb(action)
    assert cli.main(["try"]) == 2
    assert capsys.readouterr().err == "nearpeak: the case raised.\nNEARPEAK_DEBUG=1 shows the traceback.\n"


def test_debug_shows_the_traceback(verb: Install, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("NEARPEAK_DEBUG", "1")
    verb(raising(UsageError("no.")))
    assert cli.main(["try"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("Traceback")
    assert "UsageError: no." in error


@pytest.mark.parametrize("error", [ZeroDivisionError("ours\x1b[31m"), RecursionError("ours"), OSError("ours")])
def test_a_bug_is_one_message_and_a_code_of_its_own(
    error: Exception, verb: Install, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    verb(raising(error))
    assert cli.main(["try"]) == cli.INTERNAL_ERROR == 5
    found = capsys.readouterr().err
    assert found.startswith(f"nearpeak: internal error: {type(error).__name__}: ours")
    assert "\x1b" not in found and "Traceback" not in found
    monkeypatch.setenv("NEARPEAK_DEBUG", "1")
    assert cli.main(["try"]) == 5
    assert capsys.readouterr().err.startswith("Traceback")


def test_too_little_memory_is_the_fault_of_the_machine(verb: Install, capsys: pytest.CaptureFixture[str]):
    verb(raising(MemoryError()))
    assert cli.main(["try"]) == 4
    assert capsys.readouterr().err == "nearpeak: there is not enough memory.\n"


def test_messages_show_no_control_characters(verb: Install, capsys: pytest.CaptureFixture[str]):
    verb(raising(UsageError("a\x1b]0;title\x07 b\u202ec")))
    assert cli.main(["try"]) == 2
    assert capsys.readouterr().err == "nearpeak: a\\x1b]0;title\\x07 b\\u202ec\n"
    assert cli.main(["doctor", "--\x1b[31m"]) == 2
    assert "\x1b" not in capsys.readouterr().err


def test_ctrl_c_ends_with_one_line(verb: Install, capsys: pytest.CaptureFixture[str]):
    verb(raising(KeyboardInterrupt()))
    assert cli.main(["try"]) == cli.EXIT_INTERRUPTED
    assert capsys.readouterr().err == "nearpeak: interrupted\n"


def test_a_reader_that_leaves_early_is_no_error():
    code = """
import sys
from types import ModuleType
from nearpeak.cli import main as cli
module = ModuleType("flood", "Writes a lot.")
module.configure = lambda parser: None
module.run = lambda arguments: print("x" * 10_000_000) or 0
cli.VERBS["flood"] = module
sys.exit(cli.main(["flood"]))
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with process:
        process.stdout.read(10)
        process.stdout.close()
        error = process.stderr.read()
    assert error == b""
    assert process.returncode == cli.BROKEN_PIPE


def test_the_module_is_the_command():
    end = subprocess.run([sys.executable, "-m", "nearpeak", "--version"], capture_output=True, text=True, check=True)
    assert end.stdout == f"nearpeak {nearpeak.__version__}\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a disk that is always full")
def test_a_full_disk_behind_stdout_is_a_problem_of_the_machine():
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "nearpeak", "machine", "--list"]
        ran = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (ran.returncode, ran.stderr) == (4, "nearpeak: stdout cannot be written: No space left on device.\n")
