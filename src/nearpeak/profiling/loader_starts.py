"""`LoaderStarts`: the time in which data loaders start and end worker processes, epoch after epoch.

A loader without `persistent_workers` does this at the ends of an epoch, in one step of many. Clean steps are judged by
their median, which does not have it: the share of one step is added.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from nearpeak.trace.guard import Guard, OwnThread
from nearpeak.trace.patches.shared_patch import patch_attribute
from nearpeak.trace.source import user_line


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStarts:
    """What the workers of one loop cost."""

    line: str
    """The line that iterates over the loader."""
    epoch_steps: float
    """The mean number of steps from one start to the next."""
    start_s: float
    """The mean time of an end and the next start."""

    @property
    def seconds_per_step(self) -> float:
        """The share of one step."""
        return self.start_s / self.epoch_steps


@dataclass(slots=True)
class _Loop:
    steps: list[int] = field(default_factory=list)
    """The number of steps before each start."""
    seconds: float = 0.0
    """Of the starts but the first, and of the ends before them."""
    ended_s: float = 0.0
    """Of the ends since the last start."""


class LoaderStarts:
    """Counts starts of workers by the line that iterates over their loader."""

    def __init__(self, guard: Guard, clock: Callable[[], float] = time.perf_counter) -> None:
        self.steps = 0
        """The number of steps so far."""
        self._guard, self._clock = guard, clock
        self._loops: dict[str, _Loop] = {}
        self._lines: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
        """The lines of running iterators."""
        self._patches = ExitStack()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, starts are counted, until `stop`."""
        module = sys.modules.get("torch.utils.data.dataloader")
        if module is not None:
            self._patch(module._MultiProcessingDataLoaderIter)
        try:
            yield
        finally:
            self.stop()

    def stop(self) -> None:
        """Nothing more is counted."""
        self._patches.close()

    def costs(self) -> WorkerStarts | None:
        """Of the loop that costs most; None if none was seen to start its workers twice, some steps apart."""
        known = [
            WorkerStarts(
                line=line,
                epoch_steps=(loop.steps[-1] - loop.steps[0]) / (len(loop.steps) - 1),
                start_s=loop.seconds / (len(loop.steps) - 1),
            )
            for line, loop in self._loops.items()
            if len(loop.steps) > 1 and loop.steps[-1] - loop.steps[0] > len(loop.steps) - 1
        ]
        return max(known, key=lambda starts: starts.seconds_per_step, default=None)

    def _patch(self, iterator: Any) -> None:
        start, end, home = iterator.__init__, iterator._shutdown_workers, OwnThread()

        def timed_start(own: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
            began = self._clock()
            line = self._guard.call(user_line, sys._getframe(1)) if home else None
            start(own, loader, *args, **kwargs)
            if line and line[0] and not loader.persistent_workers:
                self._guard.call(self._started, own, line[0], self._clock() - began)

        def timed_end(own: Any, *args: Any, **kwargs: Any) -> Any:
            began = self._clock()
            try:
                return end(own, *args, **kwargs)
            finally:
                if home:
                    self._guard.call(self._ended, own, self._clock() - began)

        self._patches.enter_context(patch_attribute(iterator, "__init__", timed_start))
        self._patches.enter_context(patch_attribute(iterator, "_shutdown_workers", timed_end))

    def _started(self, iterator: Any, line: str, seconds: float) -> None:
        loop = self._loops.setdefault(line, _Loop())
        self._lines[iterator] = line
        if loop.steps:
            loop.seconds += loop.ended_s + seconds
        loop.ended_s = 0.0
        loop.steps.append(self.steps)

    def _ended(self, iterator: Any, seconds: float) -> None:
        line = self._lines.get(iterator)
        if line is not None:
            self._loops[line].ended_s += seconds
