"""`HostLoad`: whether other work took the cores of this process from it, between two readings of Linux's counters.

The time that the process's own threads waited for a core is counted in nanoseconds (`schedstat`), what all processes
used of the cores in ticks of 10 ms (`/proc/stat`). Child processes, such as the workers of a data loader, count as the
process's own. What a system does not count is None.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from nearpeak.machines.cgroups import parse_number, read_text

LEAST_TICKS = 10
"""A window of fewer ticks of the cores says nothing about what others used of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostShares:
    """What happened on the cores of this process in a window of time."""

    waited: float | None = None
    """Of the time in which the process's threads could have run, the share in which they waited for a core."""
    others: float | None = None
    """Of the time of its cores, the share that other processes used, or the host of a virtual machine took."""
    throttled: float | None = None
    """Of the window, the share in which the quota of its cgroup was used up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReading:
    """Counters at one moment, in seconds."""

    at: float
    own: dict[int, tuple[float, float]] = field(default_factory=dict)
    """By thread of the process and its children: the time that it ran, and the time that it waited to run."""
    busy: float | None = None
    """All cores of the process together: what all processes ran, and what was stolen."""
    throttled: float | None = None


class HostLoad:
    """Reads the counters. `root` and `cpus` (numbers of cores) stand in for the real ones in tests."""

    def __init__(self, root: Path = Path("/"), cpus: Collection[int] | None = None) -> None:
        self._root = root
        known = getattr(os, "sched_getaffinity", None)
        self._cpus = set(cpus if cpus is not None else known(0) if known is not None else ())
        self._tick = 1.0 / os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 0.01

    def read(self) -> HostReading:
        """The counters now."""
        throttled = [
            parse_number(line.partition(" ")[2])
            for line in read_text(self._root / "sys/fs/cgroup/cpu.stat").splitlines()
            if line.startswith("throttled_usec ")
        ]
        return HostReading(
            at=time.perf_counter(),
            own=dict(self._threads(os.getpid())),
            busy=self._busy(),
            throttled=None if not throttled or throttled[0] is None else 1e-6 * throttled[0],
        )

    def shares(self, before: HostReading, after: HostReading) -> HostShares:
        """What happened between two readings."""
        elapsed = after.at - before.at
        if elapsed <= 0.0:
            return HostShares()
        ran = waited = 0.0
        for thread, (run_s, wait_s) in after.own.items():
            run_before, wait_before = before.own.get(thread, (0.0, 0.0))
            ran += max(0.0, run_s - run_before)
            waited += max(0.0, wait_s - wait_before)
        others = None
        if before.busy is not None and after.busy is not None and elapsed >= LEAST_TICKS * self._tick:
            others = (after.busy - before.busy - ran) / (elapsed * len(self._cpus))
        throttled = None
        if before.throttled is not None and after.throttled is not None:
            throttled = (after.throttled - before.throttled) / elapsed
        return HostShares(
            waited=waited / (ran + waited) if ran + waited > 0.0 else None,
            others=None if others is None else min(1.0, max(0.0, others)),
            throttled=None if throttled is None else min(1.0, max(0.0, throttled)),
        )

    def _threads(self, process: int) -> Iterator[tuple[int, tuple[float, float]]]:
        """The threads of a process and of its children, with the times that they ran and waited."""
        try:
            threads = [int(folder.name) for folder in (self._root / f"proc/{process}/task").iterdir()]
        except (OSError, ValueError):  # not Linux, or a child that has ended meanwhile
            return
        for thread in threads:
            folder = self._root / f"proc/{process}/task/{thread}"
            times = [parse_number(text) for text in read_text(folder / "schedstat").split()[:2]]
            if len(times) == 2 and times[0] is not None and times[1] is not None:
                yield thread, (1e-9 * times[0], 1e-9 * times[1])
            for child in read_text(folder / "children").split():
                yield from self._threads(int(child))

    def _busy(self) -> float | None:
        """The columns of /proc/stat that are neither idle nor counted twice: user to system, and irq to steal."""
        ticks = None
        for line in read_text(self._root / "proc/stat").splitlines():
            name, *columns = line.split()
            if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in self._cpus and len(columns) >= 8:
                counted = [parse_number(columns[place]) or 0.0 for place in (0, 1, 2, 5, 6, 7)]
                ticks = (ticks or 0.0) + sum(counted)
        return None if ticks is None else self._tick * ticks


class ThreadSeconds(NamedTuple):
    """What a thread did with its processor since it started; in a difference, meanwhile."""

    ran_s: float
    waited_s: float
    """It could have run, and other work had the processor."""

    def since(self, before: ThreadSeconds) -> ThreadSeconds:
        """The seconds between two readings."""
        return ThreadSeconds(self.ran_s - before.ran_s, self.waited_s - before.waited_s)


def thread_seconds() -> ThreadSeconds | None:
    """Those of this thread; None if they are not counted."""
    times = [parse_number(text) for text in read_text(Path("/proc/thread-self/schedstat")).split()[:2]]
    if len(times) < 2 or times[0] is None or times[1] is None:
        return None
    return ThreadSeconds(1e-9 * times[0], 1e-9 * times[1])
