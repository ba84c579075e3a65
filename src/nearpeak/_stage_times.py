"""`stage`: where the time of nearpeak itself goes, for its developers.

With NEARPEAK_TIMES=1 in the environment, a command ends with a table on stderr: the seconds of each stage on the clock
and on the processor. What a stage inside of another one takes does not count for the outer one.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

_NOTHING = nullcontext()


class StageTimes:
    """The seconds of stages, on the clock and on the processor, since it was made.

    >>> times = StageTimes("start")
    >>> with times.stage("findings"):
    ...     pass
    >>> [line.split()[0] for line in times.table().splitlines()]
    ['stage', 'start', 'findings', 'total']
    """

    def __init__(self, first: str) -> None:
        self._thread = threading.get_ident()
        self._stages = [first]
        self._seconds: dict[str, tuple[float, float]] = {}
        self._mark = time.perf_counter(), 0.0  # the processor's time counts from the start of the process

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Inside, time is that of the stage. On other threads than the first, time belongs to what the first does."""
        if threading.get_ident() != self._thread:
            yield
            return
        self._charge()
        self._stages.append(name)
        try:
            yield
        finally:
            self._charge()
            self._stages.pop()

    def table(self) -> str:
        """A row for each stage, in the order in which they were first left, and their sum."""
        self._charge()
        rows = [*self._seconds.items()]
        totals = [sum(column) for column in zip(*self._seconds.values(), strict=True)]
        lines = [f"{name:<36} {wall:8.2f} {cpu:8.2f}" for name, (wall, cpu) in [*rows, ("total", totals)]]
        return "\n".join([f"{'stage':<36} {'wall s':>8} {'CPU s':>8}", *lines])

    def _charge(self) -> None:
        now = time.perf_counter(), time.process_time()
        wall, cpu = self._seconds.get(self._stages[-1], (0.0, 0.0))
        self._seconds[self._stages[-1]] = wall + now[0] - self._mark[0], cpu + now[1] - self._mark[1]
        self._mark = now


TIMES = StageTimes("other") if os.environ.get("NEARPEAK_TIMES", "0") not in ("", "0") else None
"""Of this process; None where nobody asks."""


def stage(name: str) -> AbstractContextManager[None]:
    """Inside, time counts for the stage `name`."""
    return _NOTHING if TIMES is None else TIMES.stage(name)
