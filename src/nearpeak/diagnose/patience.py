"""`waiting_for_steps`: says so when no step ends for long, and ends the code after the time that was asked for."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from nearpeak.diagnose.watch import WHAT_A_STEP_IS, Watch
from nearpeak.measure.options import Progress
from nearpeak.units import seconds

FIRST_LINE_S = 60.0
GROWTH = 2.0


class OutOfTime(BaseException):
    """No step ended in time; no Exception, so that the code does not catch it."""


@contextmanager
def waiting_for_steps(
    watch: Watch, say: Progress, wait_s: float | None, first_line_s: float = FIRST_LINE_S
) -> Iterator[None]:
    """Inside, a line is said when no step ended for a minute, and again after times that double.

    With `wait_s` the code is ended by `OutOfTime` when no step ended for so long; this needs the main thread.
    """
    over = threading.Event()
    talker = threading.Thread(target=_talk, args=(watch, say, over, first_line_s), name="nearpeak-waiting", daemon=True)
    talker.start()
    with _alarm(watch, wait_s):
        try:
            yield
        finally:
            over.set()


def _talk(watch: Watch, say: Progress, over: threading.Event, first_line_s: float) -> None:
    patience = first_line_s
    seen = watch.schedule.steps
    while not over.wait(min(first_line_s, max(0.01, watch.ended + patience - time.monotonic()))):
        if watch.schedule.phase == "done" or watch.problem:
            return
        if watch.schedule.steps != seen:
            seen, patience = watch.schedule.steps, first_line_s
        if (passed := time.monotonic() - watch.ended) >= patience:
            which = "no step yet" if seen == 0 else f"no step after the first {seen}"
            say(f"{which} for {seconds(passed)}. {WHAT_A_STEP_IS} Ctrl-C ends it.")
            patience *= GROWTH


@contextmanager
def _alarm(watch: Watch, wait_s: float | None) -> Iterator[None]:
    if wait_s is None or threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(_number: int, _frame: FrameType | None) -> None:
        if watch.schedule.phase == "done" or watch.problem:
            return
        left = watch.ended + wait_s - time.monotonic()
        if left <= 0:
            raise OutOfTime
        signal.setitimer(signal.ITIMER_REAL, left)

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, wait_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
