"""`Schedule`: what to do with each step of a run: skip it, take its time, profile it, trace it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Phase = Literal["warm-up", "clean", "profiler start", "profiled", "traced", "done"]

MOST_WARM_UP = 20
LEAST_WARM_UP = 3
SETTLED = 0.1
"""Warm-up ends when a step takes no less than the one before it, to this relative difference."""
CLEAN_STEPS = 10
LEAST_CLEAN = 3
CLEAN_SECONDS = 5.0


@dataclass(slots=True)
class Schedule:
    """Told when each step ends, it says what the next one is for. Times are seconds of any clock.

    >>> schedule = Schedule()
    >>> phases = [schedule.step_ended(float(second)) for second in range(20)]
    >>> [(phase, phases.count(phase)) for phase in dict.fromkeys(phases)]
    [('warm-up', 3), ('clean', 5), ('profiler start', 1), ('profiled', 1), ('traced', 1), ('done', 9)]
    """

    phase: Phase = "warm-up"
    walls: list[float] = field(default_factory=list)
    """Of the clean steps."""
    steps: int = 0
    _last: float | None = None
    _took: float = float("inf")
    _in_phase: int = 0
    _begun: float = 0.0

    def step_ended(self, now: float) -> Phase:
        """What the step that begins now is for."""
        self.steps += 1
        self._in_phase += 1
        took = None if self._last is None else now - self._last
        self._last = now
        if self.phase == "warm-up":
            settled = took is not None and took > (1 - SETTLED) * self._took
            self._took = self._took if took is None else took
            if (self._in_phase > LEAST_WARM_UP and settled) or self._in_phase >= MOST_WARM_UP:
                self._enter("clean", now)
        elif self.phase == "clean":
            assert took is not None
            self.walls.append(took)
            if len(self.walls) >= CLEAN_STEPS or (
                len(self.walls) >= LEAST_CLEAN and now - self._begun >= CLEAN_SECONDS
            ):
                self._enter("profiler start", now)
        elif self.phase != "done":
            order: tuple[Phase, ...] = ("profiler start", "profiled", "traced", "done")
            self._enter(order[order.index(self.phase) + 1], now)
        return self.phase

    def _enter(self, phase: Phase, now: float) -> None:
        self.phase, self._in_phase, self._begun = phase, 0, now
