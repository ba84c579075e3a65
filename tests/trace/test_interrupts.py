"""Ctrl-C in a trace: at once in the user's code, and after the op inside of torch, where it would end the process."""

from __future__ import annotations

import queue
import signal
import subprocess
import sys
import threading

import pytest
import torch

from nearpeak.trace import interrupts
from nearpeak.trace.interrupts import defer_signals
from nearpeak.trace.trace import trace

SOURCE = "import signal; signal.raise_signal(signal.SIGINT)"
IN_TORCH = compile(SOURCE, torch.__file__, "exec")
IN_LIBRARY = compile(SOURCE, threading.__file__, "exec")


@pytest.fixture(autouse=True)
def interruptible():
    """Python's own handler, also where a shell ignores SIGINT for commands in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert not interrupts.pending
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    ("code", "reached"), [(IN_TORCH, ["before", "after"]), (IN_LIBRARY, ["before"]), (None, ["before"])]
)
def test_where_a_handler_runs(code, reached):
    seen = []
    with pytest.raises(KeyboardInterrupt), defer_signals():
        seen.append("before")
        if code is None:
            signal.raise_signal(signal.SIGINT)
        else:
            exec(code, {})
        seen.append("after")
    assert seen == reached


def test_a_second_one_does_not_wait():
    seen = []
    with pytest.raises(KeyboardInterrupt), defer_signals():
        exec(IN_TORCH, {})
        seen.append("first")
        exec(IN_TORCH, {})
        seen.append("second")
    interrupts.pending.clear()
    assert seen == ["first"]


def test_an_error_does_not_lose_it():
    with pytest.raises(KeyboardInterrupt) as raised, defer_signals():
        exec(IN_TORCH, {})
        raise ValueError
    assert isinstance(raised.value.__context__, ValueError)


def test_handlers_of_the_user_are_called_and_may_return():
    seen = []
    signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    with defer_signals():
        exec(IN_TORCH, {})
        assert seen == []
    assert seen == [signal.SIGINT]
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_a_trace_ends_after_the_op():
    seen = queue.SimpleQueue()  # which a trace does not put back

    def step(x):
        exec(IN_TORCH, {})
        seen.put("interrupted")
        x = x + 1
        seen.put("an op later")
        return x

    with pytest.raises(KeyboardInterrupt):
        trace(step, torch.ones(2))
    assert (seen.get_nowait(), seen.empty()) == ("interrupted", True)


def test_other_threads_have_no_handlers():
    failures = []

    def run():
        try:
            trace(lambda x: x + 1, torch.ones(2))
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert failures == []


def test_a_signal_that_ends_the_process_waits():
    code = """
import os, signal
from nearpeak.trace.interrupts import defer_signals
with defer_signals(deadly=True):
    exec(compile("os.kill(os.getpid(), signal.SIGTERM)", os.__file__, "exec"))
    print("saved", flush=True)
print("not reached")
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (-signal.SIGTERM, "saved\n")
