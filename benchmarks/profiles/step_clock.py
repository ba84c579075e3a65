"""The time of a program's steps, without nearpeak: `tick()` ends each step, and another process says when to measure.

    python -m benchmarks.profiles.step_clock SCRIPT ARGUMENTS...          # imports torch, waits for a line, runs SCRIPT
    python -m benchmarks.profiles.step_clock -m MODULE ARGUMENTS...       # the same for a module

Processes of several variants of a program are alive at once, and one runs at a time. Each is told "LEAD STEPS": it
takes LEAD steps that do not count (batches that were prepared while it waited), then STEPS steps, and answers with
their seconds. STEP_CLOCK holds the two file descriptors for that, "READ,WRITE".
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from pathlib import Path
from typing import IO

import torch

WARM_STEPS = 5
"""Steps before a process is ready: the allocator, the algorithms of libraries and compiled code settle meanwhile."""


def synchronize() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


class StepClock:
    """Counts steps down to the next time that something is to be done."""

    def __init__(self, requests: IO[str], answers: IO[str]) -> None:
        self._requests, self._answers = requests, answers
        self._left = WARM_STEPS
        self._steps = 0
        """How many steps are to be timed after the lead, or 0 while they are."""
        self._started: float | None = None

    def wait_for_start(self) -> None:
        """Returns when the script may run."""
        if not self._requests.readline():
            os._exit(0)

    def tick(self) -> None:
        """A step has ended."""
        self._left -= 1
        if self._left:
            return
        synchronize()
        if self._steps:  # the lead is over
            self._left, self._steps = self._steps, 0
            self._started = time.perf_counter()
            return
        self._answer("ready" if self._started is None else repr(time.perf_counter() - self._started))
        request = self._requests.readline().split()
        if not request:  # nothing more is wanted: what the program would do at its end does not matter
            os._exit(0)
        self._left, self._steps = int(request[0]), int(request[1])

    def _answer(self, text: str) -> None:
        self._answers.write(text + "\n")
        self._answers.flush()


_clock: StepClock | None = None


def tick() -> None:
    """A step has ended; programs that are measured call this where they have the comment "# step"."""
    assert _clock is not None, "run the program with python -m benchmarks.profiles.step_clock"
    _clock.tick()


def main() -> None:
    reading, writing = (int(descriptor) for descriptor in os.environ["STEP_CLOCK"].split(","))
    clock = StepClock(os.fdopen(reading, "r"), os.fdopen(writing, "w"))
    # The program imports this module by its name, which is another module than __main__.
    from benchmarks.profiles import step_clock

    step_clock._clock = clock
    sys.argv = sys.argv[1:]
    clock.wait_for_start()
    if sys.argv[0] == "-m":
        sys.argv = sys.argv[1:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
