"""Threads of which one runs at a time, and which one goes on is drawn by lot: the same for the same seed.

A thread is left where it calls `pause`, which may be until something is so. If that is so for none of those left, they
wait for ever: that is found at once, and the error says where each of them is.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable
from typing import Any

_local = threading.local()


class Stopped(BaseException):
    """Ends a thread, as another one has failed."""


def here() -> Any:
    """The thread that runs; what it has of its own is kept in attributes."""
    return _local.thread


def pause(until: Callable[[], bool] | None = None) -> None:
    """Lets others go on, and returns when something is so."""
    _local.thread.pause(until)


class Thread:
    def __init__(self, schedule: Schedule, function: Callable[[], None], name: str, weight: float) -> None:
        self.schedule, self.function, self.name, self.weight = schedule, function, name, weight
        self.gate = threading.Semaphore(0)
        self.until: Callable[[], bool] | None = None
        self.ended = False
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        _local.thread = self
        self.gate.acquire()
        try:
            if not self.schedule.stopped:
                self.function()
        except Stopped:
            pass
        except BaseException as error:
            self.schedule.failure = self.schedule.failure or error
        self.ended = True
        if not self.schedule.stopped:
            self.schedule.threads.remove(self)
            self.schedule.go_on()

    def pause(self, until: Callable[[], bool] | None) -> None:
        self.until = until
        if self.schedule.go_on() is not self:
            self.gate.acquire()
        if self.schedule.stopped:
            raise Stopped

    def place(self) -> str:
        """The lines it is at, the innermost last, without those of what it waits by."""
        frame, lines = sys._current_frames()[self.thread.ident], []
        while frame is not None:
            if "/src/" in frame.f_code.co_filename:
                lines.append(f"{frame.f_code.co_name}:{frame.f_lineno}")
            frame = frame.f_back
        return f"{self.name} at {' > '.join(reversed(lines))}"


class Schedule:
    """Threads, by a seed. Some are slow: each has a chance of its own to go on, which may be a hundred times smaller.

    One whose name ends in `slowest` goes on only where nobody else can.
    """

    def __init__(self, seed: int = 0, slowest: str | None = None) -> None:
        self.random = random.Random(seed)
        self.slowest = slowest
        self.threads: list[Thread] = []
        self.failure: BaseException | None = None
        self.over = threading.Semaphore(0)
        self.stopped = False

    def start(self, function: Callable[[], None], name: str) -> Thread:
        is_slowest = self.slowest is not None and name.endswith(self.slowest)
        weight = 0.0 if is_slowest else 10.0 ** self.random.uniform(-2.0, 0.0)
        self.threads.append(Thread(self, function, name, weight))
        return self.threads[-1]

    def run(self) -> None:
        """Returns when all threads have ended, or one has failed."""
        self.go_on()
        self.over.acquire()
        self.stopped = True
        for one in self.threads:
            one.gate.release()
            one.thread.join()
        if self.failure is not None:
            raise self.failure

    def go_on(self) -> Thread | None:
        """Draws a thread and has it run; one that has drawn itself need not wait."""
        chosen = None if self.failure is not None else self._drawn()
        if chosen is None:
            self.over.release()
        elif chosen is not getattr(_local, "thread", None):
            chosen.gate.release()
        return chosen

    def _drawn(self) -> Thread | None:
        able = [one for one in self.threads if one.until is None or one.until()]
        if not able:
            if self.threads:
                places = "\n".join(one.place() for one in self.threads)
                self.failure = AssertionError(f"they wait for ever:\n{places}")
            return None
        weights = [one.weight for one in able]
        return self.random.choices(able, weights)[0] if any(weights) else able[0]
