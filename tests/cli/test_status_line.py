"""A line of progress that is rewritten in place on a terminal, and seldom printed elsewhere."""

import io

import pytest

from nearpeak._display import StatusLine
from nearpeak.cli import output
from nearpeak.cli.output import Streams, narrate, print_text


@pytest.fixture(autouse=True)
def nothing_shown(monkeypatch):
    monkeypatch.setattr(output._Status, "stands", False)
    monkeypatch.setattr(output._Status, "printed_at", float("-inf"))


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    """Stderr as a terminal; a function that returns what was written to it."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "40")
    stream = Terminal()
    monkeypatch.setattr(Streams, "stderr", classmethod(lambda cls: stream))
    return stream.getvalue


def screen(written):
    """The lines that a terminal shows."""
    lines = [""]
    for part in written.replace("\r\n", "\n").replace("\r\x1b[2K", "\x00").replace("\n", "\n\x01").split("\x01"):
        text = part.removesuffix("\n").rpartition("\x00")[2] if "\x00" in part else lines[-1] + part.removesuffix("\n")
        lines[-1] = text
        if part.endswith("\n"):
            lines.append("")
    return lines


def test_on_a_terminal_one_line_is_rewritten_and_then_replaced(terminal):
    for share in range(0, 100, 10):
        narrate(StatusLine(f"measuring: {share} %"))
    written = terminal()
    assert "\n" not in written
    assert written.count("\r\x1b[2K") == 10
    assert screen(written) == ["measuring: 90 %"]
    narrate("measured this machine")
    assert screen(terminal()) == ["measured this machine", ""]


def test_on_a_terminal_it_never_wraps(terminal):
    narrate(StatusLine("measuring: " + "x" * 200))
    assert len(screen(terminal())[0]) == 39


def test_a_result_does_not_stand_behind_it(terminal, capsys):
    narrate(StatusLine("measuring: 10 %"))
    print_text("a result")
    assert screen(terminal()) == [""]


def test_elsewhere_there_are_few_lines(capsys, monkeypatch):
    now = 0.0
    monkeypatch.setattr(output.time, "monotonic", lambda: now)
    for share in range(100):
        narrate(StatusLine(f"measuring: {share} %"))
        now += 0.4  # 40 seconds in all
    narrate("measured this machine")
    assert capsys.readouterr().err == ("measuring: 0 %\nmeasuring: 38 %\nmeasuring: 76 %\nmeasured this machine\n")


def test_a_terminal_that_can_do_nothing_gets_lines(terminal, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    narrate(StatusLine("measuring: 10 %"))
    assert terminal() == "measuring: 10 %\n"
