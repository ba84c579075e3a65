"""`Schedule`: what to do with each step of a run: skip it, take its time, profile it, trace it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from nearpeak.measure.statistics import median
from nearpeak.profiling.steps import StepKind

SchedulePhase = Literal["warm-up", "clean", "profiler start", "profiled", "traced", "done"]
ProfilerAction = Literal["go on", "with it", "without it", "anew"]
"""Profile another step as well; stop, and use the step with those before it; stop, and use those before it, as it is of
another kind; begin anew, as there are none before it."""

MAX_WARM_UP = 20
MIN_WARM_UP = 3
WARM_UP_SECONDS = 20.0
"""Long steps warm up for this long after the first one, and for at least one step."""
SETTLED_CHANGE = 0.1
"""Warm-up ends when a step takes no less than the one before it, to this relative difference."""
CLEAN_STEPS = 10
"""Without a step of another kind between them; half as many after each of these."""
MIN_CLEAN = 3
CLEAN_SECONDS = 5.0
LONG_STEP_SECONDS = 10.0
"""Two clean steps are enough of these, and the start of the profiler is little beside one."""
PROFILER_STEPS = 3
PROFILER_SECONDS = 1.0
"""The profiler runs for so many steps, or so long, before the step that counts. Its own start is not in that step, and
a device that rested while it started is no longer faster than in the clean steps."""
PROFILED_STEPS = 5
PROFILED_SECONDS = 1.5
"""So many steps are profiled on a GPU, or as many as fit into this time, and at least one: its clock moves from step to
step, so that one alone says little, and each of them is one more to read."""
OUTLIER_RATIO = 1.5
"""A clean step that took this many times the median did something else too."""
HOST_AHEAD_SHARE = 0.2
"""The device is behind the host where it works on for this share of a step after the last one was launched."""
MAX_RETAKES = 10
"""How often a step of another kind is let pass, before any kind is taken."""
MAX_RESTARTS = 3
"""How often warm-up begins anew because something was compiled."""


@dataclass(slots=True)
class Schedule:
    """Told when each step ends, it says what the next one is for. Times are seconds of any clock.

    >>> schedule = Schedule()
    >>> phases = [schedule.step_ended(float(second)) for second in range(20)]
    >>> [(phase, phases.count(phase)) for phase in dict.fromkeys(phases)]
    [('warm-up', 3), ('clean', 5), ('profiler start', 1), ('profiled', 1), ('traced', 1), ('done', 9)]
    """

    phase: SchedulePhase = "warm-up"
    walls: list[float] = field(default_factory=list)
    """Of the clean steps, as the host saw them end: it may be ahead of the device."""
    others: int = 0
    """Steps of another kind among the clean ones, which were begun anew after them."""
    steps: int = 0
    again: bool = False
    """Whether the next step is for the same as the one that ended: that was not what the phase is for, or the phase
    takes several."""
    most_profiled: int = 1
    """How many steps are to be profiled."""
    host_ahead: bool = False
    """Whether the device still had work when the last clean step was launched: none of them began with a wait for the
    host, then."""
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
        """What the step that begins now is for.

        `graphs` counts what was compiled so far; a step that is not `usable` does not count for what it was for.
        """
        kind = kind or StepKind()
        self.steps += 1
        self._in_phase += 1
        self.again = False
        took = None if self._last is None else now - self._last
        self._last = now
        follows = self.after_profiled(now, kind, graphs=graphs)
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
            self._take_profiled(now, kind, follows if usable or self._retakes >= MAX_RETAKES else "anew")
        elif self.phase == "traced":
            if self._retakes < MAX_RETAKES and not (usable and self.fits(kind) and not compiled):
                self._retakes += 1
                self.again = True
            else:
                self._enter("done", now)
        return self.phase

    def after_profiled(self, now: float, kind: StepKind, *, graphs: int = 0) -> ProfilerAction:
        """What to do with the profiler where the step that ends now is a profiled one."""
        if self._retakes < MAX_RETAKES and not (self.fits(kind) and graphs == self._graphs):
            return "without it" if self._profiled else "anew"
        count = self._profiled + 1
        as_long = (now - self._profiled_since) / count
        return "go on" if count < self.most_profiled and (count + 1) * as_long <= PROFILED_SECONDS else "with it"

    def fits(self, kind: StepKind) -> bool:
        """Whether a step of this kind may stand for the usual ones."""
        return self._usual is None or self._usual.alike(kind) or self._retakes >= MAX_RETAKES

    @property
    def clean_steps_left(self) -> int:
        """How many clean steps may pass before anything need be decided; 1 for long ones, which are counted by time."""
        if self.phase != "clean" or self._took * CLEAN_STEPS > CLEAN_SECONDS:
            return 1
        return max(1, max(MIN_CLEAN, CLEAN_STEPS >> self.others) - len(self.walls))

    def resumes(self, now: float) -> None:
        """The next step begins only now; clean steps begin with a device that has nothing left to do."""
        self._last = self._begun = now

    def device_ended(self, now: float, walls: Sequence[float] = ()) -> None:
        """The device has done the last of the clean steps; `walls` are their times as it saw them, where it can tell.

        These count where the host was ahead: it launched steps in less time than they took.
        """
        assert self._last is not None
        self._block_s = now - self._begun
        self.host_ahead = now - self._last > HOST_AHEAD_SHARE * median(self.walls)
        if self.host_ahead:
            self._ends_unseen = len(walls) != len(self.walls)
            self.walls = self.walls if self._ends_unseen else list(walls)

    @property
    def wall_s(self) -> float | None:
        """A clean step's time: that of all of them by their number, or of the usual ones where some are outliers.

        Without a synchronization between them the host may be ahead, and only the sum is known. None without any.
        """
        if not self.walls:
            return None
        usual = self.typical_walls
        if self._block_s is not None and len(usual) == len(self.walls):
            return self._block_s / len(self.walls)
        return median(usual)

    @property
    def typical_walls(self) -> list[float]:
        """The clean steps without outliers. Where nothing but a host that is ahead saw their ends, all of them."""
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
            self._usual = max(self._kinds, key=lambda found: found[1])[0]
            self._enter("clean", now)

    def _count(self, kind: StepKind) -> bool:
        """Whether no kind was seen more often."""
        at = next((at for at, (known, _) in enumerate(self._kinds) if known.alike(kind)), None)
        times = 1 if at is None else self._kinds.pop(at)[1] + 1
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

    def _take_profiled(self, now: float, kind: StepKind, follows: ProfilerAction) -> None:
        if follows == "anew":
            self._retakes += 1
            self._profiled, self._profiled_since = 0, now
            self.again = True
            return
        if follows != "without it":
            self._profiled += 1
            self._follow(kind)
        if follows == "go on":
            self.again = True
        else:
            self._enter("traced", now)

    def _follow(self, kind: StepKind) -> None:
        """A text grows: the next step is compared with this one."""
        self._usual = kind

    def _enter(self, phase: SchedulePhase, now: float) -> None:
        self.phase, self._in_phase, self._retakes = phase, 0, 0
        if phase == "warm-up":
            self._begun = now
        elif phase == "profiled":
            self._profiled, self._profiled_since = 0, now
