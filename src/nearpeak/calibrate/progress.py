"""`CalibrationProgress`: runs the tasks of a calibration, and tells in one line how far it is."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from nearpeak._display import StatusLine
from nearpeak.measure.options import Progress
from nearpeak.units import percent

PRIOR_S = 2.0
"""Seconds of tasks that are taken to have run as fast as expected: the first tasks say little about the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One part of a calibration."""

    name: str
    """What it measures."""
    seconds: float
    """About how long it takes on two quiet cores, or on an H200: its share of the whole."""
    measure: Callable[[], object]
    needed: bool = True
    """Whether it is done although the time for a quick calibration is over."""


class CalibrationProgress:
    """Runs tasks one after the other. `whole_s` are the expected seconds of all of them.

    >>> lines = []
    >>> task = Task(name="memory", seconds=2.0, measure=lambda: None)
    >>> CalibrationProgress(lines.append, "measuring", whole_s=4.0).run([task, task])
    >>> lines[0]
    'measuring: 0 %, about 4 s left (memory)'
    """

    def __init__(
        self,
        say: Progress = lambda line: None,
        title: str = "",
        *,
        whole_s: float = 1.0,
        budget_s: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.say = say
        self.left_out: list[str] = []
        """The tasks that were not needed, and for which there was no time."""
        self._title, self._whole_s, self._budget_s, self._clock = title, whole_s, budget_s, clock
        self._done_s = 0.0
        self._begun = clock()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the first task began."""
        return self._clock() - self._begun

    def run(self, tasks: Iterable[Task]) -> None:
        """Runs all tasks; without a budget left only those that are needed."""
        for task in tasks:
            if task.needed or self._budget_s is None or self.elapsed_s + task.seconds <= self._budget_s:
                self.say(self._line(task.name))
                task.measure()
            else:
                self.left_out.append(task.name)
            self._done_s += task.seconds

    def _line(self, name: str) -> StatusLine:
        share = min(self._done_s / self._whole_s, 0.99)
        pace = (self.elapsed_s + PRIOR_S) / (self._done_s + PRIOR_S)
        left_s = max(1.0, (self._whole_s - self._done_s) * pace)
        return StatusLine(f"{self._title}: {percent(share, 0)}, about {_rounded(left_s)} left ({name})")


def _rounded(seconds: float) -> str:
    """
    >>> _rounded(8.6), _rounded(200.0)
    ('9 s', '3 min')
    """
    return f"{seconds:.0f} s" if seconds < 100.0 else f"{seconds / 60.0:.0f} min"
