"""`CalibrationProgress`: runs the tasks of a calibration, and tells in one line how far it is."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from nearpeak._display import StatusLine
from nearpeak._stage_times import stage
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
    """Runs tasks one after the other. `later_s` are the expected seconds of what follows the first `run`.

    >>> lines = []
    >>> task = Task(name="memory", seconds=2.0, measure=lambda: None)
    >>> CalibrationProgress(lines.append, "measuring").run([task, task])
    >>> lines[0]
    'measuring: 0 %, about 4 s left (memory)'
    """

    def __init__(
        self,
        say: Progress = lambda line: None,
        title: str = "",
        *,
        later_s: float = 0.0,
        budget_s: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.say = say
        self.left_out: list[str] = []
        """The tasks that were not needed, and for which there was no time."""
        self._title, self._later_s, self._budget_s, self._clock = title, later_s, budget_s, clock
        self._done_s = 0.0
        self._begun: float | None = None

    @property
    def elapsed_s(self) -> float:
        """Seconds since the first task began."""
        return 0.0 if self._begun is None else self._clock() - self._begun

    def run(self, tasks: Iterable[Task]) -> None:
        """Runs all tasks; without a budget left only those that are needed."""
        following = list(tasks)
        if self._begun is None:
            self._begun = self._clock()
        else:
            self._later_s = max(0.0, self._later_s - sum(task.seconds for task in following))
        while following:
            if self._has_time(following[0], self.elapsed_s):
                self.say(self._line(following))
                task = following.pop(0)
                with stage(f"calibrate: {task.name}"):
                    task.measure()
                self._done_s += task.seconds
            else:
                self.left_out.append(following.pop(0).name)

    def _has_time(self, task: Task, elapsed_s: float) -> bool:
        return task.needed or self._budget_s is None or elapsed_s + task.seconds <= self._budget_s

    def _line(self, following: Sequence[Task]) -> StatusLine:
        """How far it is before the first of the following tasks, those left out that there will be no time for."""
        elapsed_s = self.elapsed_s
        pace = (elapsed_s + PRIOR_S) / (self._done_s + PRIOR_S)
        left_s = self._later_s * pace
        for task in following:
            if self._has_time(task, elapsed_s + left_s):
                left_s += task.seconds * pace
        share = percent(elapsed_s / (elapsed_s + left_s), 0)
        return StatusLine(f"{self._title}: {share}, about {_rounded(max(1.0, left_s))} left ({following[0].name})")


def _rounded(seconds: float) -> str:
    """
    >>> _rounded(8.6), _rounded(200.0)
    ('9 s', '3 min')
    """
    return f"{seconds:.0f} s" if seconds < 100.0 else f"{seconds / 60.0:.0f} min"
