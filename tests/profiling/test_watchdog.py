"""Code that takes no step: what is said about it, and how `--wait` ends it."""

import signal
import subprocess
import sys
import threading
import time

import pytest

from nearpeak.profiling.script import Watchdog
from nearpeak.profiling.session import Session


def wait_until(happened):
    """A busy machine is late, and not wrong."""
    until = time.monotonic() + 60
    while not happened() and time.monotonic() < until:
        time.sleep(0.01)
    assert happened()


def test_a_line_is_said_when_no_step_ends_and_again_after_longer_times():
    lines = []
    session = Session(lines.append)
    threads = threading.enumerate()
    with Watchdog(session, lines.append, first_line_s=0.05):
        assert threading.enumerate() == threads  # the code does not see its thread
        wait_until(lambda: len(lines) >= 2)
        assert lines[0].startswith("no step yet for")
        assert "--step MODULE:FUNCTION" in lines[0]
        session.step_ends()
        wait_until(lambda: any("no step after the first 1 for" in line for line in lines))


def test_only_the_time_of_the_program_counts(monkeypatch):
    """Reading a long recording is no wait for a step, and does not end a script for `--wait`."""
    lines = []
    session = Session(lines.append)
    with session.guard.own_time(), Watchdog(session, lines.append, 0.2, first_line_s=0.05) as watchdog:
        time.sleep(0.4)
        assert lines == []
    assert not watchdog.timed_out


def test_what_comes_later_comes_if_the_code_still_runs():
    reports = []
    with Watchdog(Session(lambda line: None), lambda line: None, early_report_s=0.02) as watchdog:
        watchdog.report_later(lambda: reports.append("report"))
        wait_until(lambda: reports)
        time.sleep(0.1)
    assert reports == ["report"]  # once
    with Watchdog(Session(lambda line: None), lambda line: None, early_report_s=60.0) as watchdog:
        watchdog.report_later(lambda: reports.append("too late"))
    assert reports == ["report"]


@pytest.mark.slow
def test_steps_give_more_time_and_their_absence_interrupts_the_code():
    session = Session(lambda line: None)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored
    try:
        with pytest.raises(KeyboardInterrupt), Watchdog(session, lambda line: None, 3.0) as watchdog:
            for _ in range(3):
                time.sleep(0.1)
                session.step_ends()
            ended = time.monotonic()
            time.sleep(60)
    finally:
        signal.signal(signal.SIGINT, before)
    assert watchdog.timed_out
    assert time.monotonic() - ended < 55


@pytest.mark.slow
def test_code_that_cannot_be_interrupted_is_ended_with_its_report(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import signal, threading, torch\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "model = torch.nn.Linear(4, 4)\n"
        "with torch.no_grad():\n"
        "    for _ in range(61): model(torch.ones(2, 4))\n"
        "print('steps taken', flush=True)\n"
        "threading.Event().wait()\n"
    )
    command = (
        "import sys; from nearpeak.profiling import script; from nearpeak.cli.main import main; script.GRACE_S = 0.1; "
        f"sys.argv[1:] = ['profile', '--on', 'h200-sxm', '--wait', '5', {str(script)!r}]; sys.exit(main())"
    )
    ended = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("steps taken\nStep:")
