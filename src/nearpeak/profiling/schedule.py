"""`Schedule`: what each step of a run is for: warm-up, timing, profiling or tracing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Literal

from nearpeak.measure.statistics import median
from nearpeak.profiling.steps import StepKind

SchedulePhase = Literal["warm-up", "clean", "profiler start", "profiled", "traced", "done"]


class ProfilerAction(Enum):
    """What to do with the profiler after a profiled step."""

    CONTINUE = auto()
    """Profile another step as well."""
    STOP_INCLUDING = auto()
    """Stop, and use this step with those before it."""
    STOP_EXCLUDING = auto()
    """Stop, and use the steps before this one, which is of another kind."""
    RESTART = auto()
    """Start over: the step is of another kind, and there are none before it."""


MAX_WARM_UP = 20
MIN_WARM_UP = 3
WARM_UP_SECONDS = 20.0
"""Long steps warm up for this long after the first step, and for at least one step."""
SETTLED_CHANGE = 0.1
"""Warm-up ends when a step is not faster than the one before it by more than this relative difference."""
CLEAN_STEPS = 10
"""In a row. The number is halved after each step of another kind."""
MIN_CLEAN = 3
CLEAN_SECONDS = 5.0
LONG_STEP_SECONDS = 10.0
"""Of longer steps, two clean ones suffice, and the start of the profiler is negligible."""
PROFILER_STEPS = 3
PROFILER_SECONDS = 1.0
"""The profiler runs for so many steps, or so long, before the step that counts. Its start is not in that step, and a
GPU that rested meanwhile is back at the clock of the clean steps."""
PROFILED_STEPS = 5
PROFILED_SECONDS = 1.5
"""So many steps are profiled on a GPU, or as many as fit into this time, and at least one: the clock changes from step
to step, so that a single step says little, and each step takes time to read."""
OUTLIER_RATIO = 1.5
"""A clean step that takes this many times the median did something else too."""
HOST_AHEAD_SHARE = 0.2
"""The host is ahead if the device runs for this share of a step after the last step was launched."""
MAX_RETAKES = 10
"""How many steps of another kind are skipped before any kind is accepted."""
MAX_RESTARTS = 3
"""How often warm-up restarts because something was compiled."""


@dataclass(slots=True)
class Schedule:
    """Says after each step what the next one is for. Times are seconds of any clock.

    >>> schedule = Schedule()
    >>> phases = [schedule.step_ended(float(second)) for second in range(20)]
    >>> [(phase, phases.count(phase)) for phase in dict.fromkeys(phases)]
    [('warm-up', 3), ('clean', 5), ('profiler start', 1), ('profiled', 1), ('traced', 1), ('done', 9)]
    """

    phase: SchedulePhase = "warm-up"
    walls: list[float] = field(default_factory=list)
    """Of the clean steps, as seen by the host, which may be ahead of the device."""
    others: int = 0
    """The number of steps of another kind among the clean ones. Each restarts the clean steps."""
    steps: int = 0
    again: bool = False
    """Whether the next step repeats the current phase: the last one could not be used, or the phase takes several."""
    most_profiled: int = 1
    """The largest number of steps to profile."""
    host_ahead: bool = False
    """Whether the device still had work when the last clean step was launched, so that none of them began with a wait
    for the host."""
    _last: float | None = None
    _took: float = float("inf")
    _in_phase: int = 0
    _begun: float = 0.0
    _kinds: list[tuple[StepKind, int]] = field(default_factory=list)
    _usual: StepKind | None = None
    _graphs: int = 0
    _retakes: int = 0
    _restarts: int = 0
    _profiled: int = 0
    _profiled_since: float = 0.0
    _block_s: float | None = None
    _ends_unseen: bool = False

    def step_ended(
        self, now: float, kind: StepKind | None = None, *, graphs: int = 0, usable: bool = True
    ) -> SchedulePhase:
        """The phase of the step that begins now.

        `graphs` is the number of compiled graphs. A step that is not `usable` does not count for its phase.
        """
        kind = kind or StepKind()
        self.steps += 1
        self._in_phase += 1
        self.again = False
        took = None if self._last is None else now - self._last
        self._last = now
        action = self.after_profiled(now, kind, graphs=graphs)
        compiled, self._graphs = graphs != self._graphs, graphs
        if self.phase == "warm-up":
            self._warm_up(now, took, kind, compiled)
        elif self.phase == "clean":
            assert took is not None
            self._clean(now, took, kind, compiled)
        elif self.phase == "profiler start":
            if self._in_phase >= PROFILER_STEPS or now - self._begun >= PROFILER_SECONDS:
                self._enter("profiled", now)
        elif self.phase == "profiled":
            self._take_profiled(now, kind, action if usable or self._retakes >= MAX_RETAKES else ProfilerAction.RESTART)
        elif self.phase == "traced":
            if self._retakes < MAX_RETAKES and not (usable and self.fits(kind) and not compiled):
                self._retakes += 1
                self.again = True
            else:
                self._enter("done", now)
        return self.phase

    def after_profiled(self, now: float, kind: StepKind, *, graphs: int = 0) -> ProfilerAction:
        """What to do with the profiler if the step that ends now is a profiled one."""
        if self._retakes < MAX_RETAKES and not (self.fits(kind) and graphs == self._graphs):
            return ProfilerAction.STOP_EXCLUDING if self._profiled else ProfilerAction.RESTART
        count = self._profiled + 1
        step_s = (now - self._profiled_since) / count
        if count < self.most_profiled and (count + 1) * step_s <= PROFILED_SECONDS:
            return ProfilerAction.CONTINUE
        return ProfilerAction.STOP_INCLUDING

    def fits(self, kind: StepKind) -> bool:
        """Whether a step of this kind can represent the usual ones."""
        return self._usual is None or self._usual.is_similar(kind) or self._retakes >= MAX_RETAKES

    @property
    def clean_steps_left(self) -> int:
        """How many clean steps may pass without a decision; 1 for long ones, which are limited by time."""
        if self.phase != "clean" or self._took * CLEAN_STEPS > CLEAN_SECONDS:
            return 1
        return max(1, max(MIN_CLEAN, CLEAN_STEPS >> self.others) - len(self.walls))

    def resumes(self, now: float) -> None:
        """The next step begins now, with an idle device."""
        self._last = self._begun = now

    def device_ended(self, now: float, walls: Sequence[float] = ()) -> None:
        """The device has finished the last clean step; `walls` are the step times on its own clock, if it has one.

        They are used if the host was ahead: it launched steps faster than they ran.
        """
        assert self._last is not None
        self._block_s = now - self._begun
        self.host_ahead = now - self._last > HOST_AHEAD_SHARE * median(self.walls)
        if self.host_ahead:
            self._ends_unseen = len(walls) != len(self.walls)
            self.walls = self.walls if self._ends_unseen else list(walls)

    @property
    def wall_s(self) -> float | None:
        """The time of a clean step: the mean of all, or the median without outliers if there are some.

        There is no synchronization between clean steps, so the host may be ahead, and only their sum is exact. None
        without clean steps.
        """
        if not self.walls:
            return None
        usual = self.typical_walls
        if self._block_s is not None and len(usual) == len(self.walls):
            return self._block_s / len(self.walls)
        return median(usual)

    @property
    def typical_walls(self) -> list[float]:
        """The clean steps without outliers; all of them if only a host that is ahead saw their ends."""
        if self._ends_unseen or not self.walls:
            return self.walls
        typical = median(self.walls)
        return [wall for wall in self.walls if wall <= OUTLIER_RATIO * typical]

    def _warm_up(self, now: float, took: float | None, kind: StepKind, compiled: bool) -> None:
        if took is None or self._in_phase == 1:
            self._begun = now
        usual = self._count(kind)
        settled = took is not None and usual and not compiled and took > (1 - SETTLED_CHANGE) * self._took
        if usual and took is not None:
            self._took = took
        if (
            (self._in_phase > MIN_WARM_UP and settled)
            or self._in_phase >= MAX_WARM_UP
            or (self._in_phase > 1 and now - self._begun >= WARM_UP_SECONDS and not compiled)
        ):
            self._usual = max(self._kinds, key=lambda entry: entry[1])[0]
            self._enter("clean", now)

    def _count(self, kind: StepKind) -> bool:
        """Counts a kind of step; returns whether no other kind is more frequent."""
        position = next((place for place, (known, _) in enumerate(self._kinds) if known.is_similar(kind)), None)
        times = 1 if position is None else self._kinds.pop(position)[1] + 1
        self._kinds.insert(0, (kind, times))  # the latest of several that are as frequent
        return all(other <= times for _, other in self._kinds)

    def _clean(self, now: float, took: float, kind: StepKind, compiled: bool) -> None:
        if compiled and self._restarts < MAX_RESTARTS:
            self._restarts += 1
            self.walls.clear()
            self._took = float("inf")
            self._enter("warm-up", now)
            return
        if not self.fits(kind):
            self._retakes += 1
            self.others += 1
            self.walls.clear()
            self.again = True
            return
        self._follow(kind)
        self.walls.append(took)
        number, seconds = len(self.walls), sum(self.walls)
        if (
            number >= max(MIN_CLEAN, CLEAN_STEPS >> self.others)
            or (number >= MIN_CLEAN and seconds >= CLEAN_SECONDS)
            or (number >= 2 and seconds >= LONG_STEP_SECONDS * number)
        ):
            self._enter("profiled" if seconds >= LONG_STEP_SECONDS * number else "profiler start", now)

    def _take_profiled(self, now: float, kind: StepKind, action: ProfilerAction) -> None:
        if action == ProfilerAction.RESTART:
            self._retakes += 1
            self._profiled, self._profiled_since = 0, now
            self.again = True
            return
        if action != ProfilerAction.STOP_EXCLUDING:
            self._profiled += 1
            self._follow(kind)
        if action == ProfilerAction.CONTINUE:
            self.again = True
        else:
            self._enter("traced", now)

    def _follow(self, kind: StepKind) -> None:
        """Compares the next step with this one: a generated text grows from step to step."""
        self._usual = kind

    def _enter(self, phase: SchedulePhase, now: float) -> None:
        self.phase, self._in_phase, self._retakes = phase, 0, 0
        if phase == "warm-up":
            self._begun = now
        elif phase == "profiled":
            self._profiled, self._profiled_since = 0, now
