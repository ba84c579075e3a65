"""`Session`: the steps of one run. It is told when each step ends, and times, profiles or traces the next one.

`Schedule` decides what each step is for, from their times and kinds alone.
"""

from __future__ import annotations

import _thread
import dataclasses
import gc
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch.utils._python_dispatch import _disable_current_modes

from nearpeak._stage_times import stage
from nearpeak.devices.backends import gpu_in_use
from nearpeak.devices.device import Conditions, ConditionsReader
from nearpeak.devices.host_load import HostLoad, HostReading, ThreadSeconds
from nearpeak.errors import UsageError, message_of
from nearpeak.measure.options import Progress
from nearpeak.measure.statistics import median
from nearpeak.ops.op import Trace
from nearpeak.profiles.conditions import StepConditions, worst_conditions
from nearpeak.profiles.profile import CompilerFacts
from nearpeak.profiles.rank_timeline import RankTimeline
from nearpeak.profiling.assemble import StepRecords
from nearpeak.profiling.inject import FaultInjector
from nearpeak.profiling.job import Team, read_timeline
from nearpeak.profiling.loader_starts import LoaderStarts
from nearpeak.profiling.steps import Awaited, StepDetector, StepKind
from nearpeak.profiling.torch_profiler import (
    Profiler,
    StepEvents,
    distributed_rank,
    graph_breaks_in,
    read_compiler_facts,
    synchronize,
)
from nearpeak.trace.guard import Guard, OwnThread, capture_count, is_capturing
from nearpeak.trace.kineto.read import KinetoTrace
from nearpeak.trace.live import LiveTrace
from nearpeak.trace.modules import compiled_graph_count
from nearpeak.units import seconds

SchedulePhase = Literal[
    "warm-up", "clean", "profiler start", "profiled", "traced", "traced next", "clean again", "done"
]


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
JOB_STEPS = 16
JOB_SECONDS = 8.0
"""So many steps more are profiled of a job of several ranks, or as many as fit into this time: which rank is late shows
in several steps."""
SHORT_STEPS_SECONDS = 0.05
"""Clean steps that take no longer in all are taken again while they get faster, where none are taken later."""
MAX_REPEATS = 3
"""How often."""
AGREE_SECONDS = 60.0
"""How long a rank waits for the others to have warmed up."""
AGAIN_STEPS = 40
AGAIN_SECONDS = 1.0
"""So many clean steps, or as many as fit into this time, are timed after everything is recorded, if there are as many:
ten steps in a row say little about a CPU whose speed changes within a second."""
OUTLIER_RATIO = 1.5
"""A clean step that takes this many times the median did something else too."""
HOST_AHEAD_SHARE = 0.2
"""The host is ahead if the device runs for this share of a step after the last step was launched."""
IDLE_SYNC_SECONDS = 5e-5
"""A synchronization that takes less found the device idle."""
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
    times_again: bool = False
    """Whether clean steps are timed again at the end. Not where a GPU waits for its host: once a profiler ran, launches
    take longer."""
    repeats_left: int = 0
    """How often short clean steps may still be taken again."""
    agree: Callable[[int, float], tuple[int, float | None] | None] | None = None
    """Asked once warm-up is over, with the number of steps and the time of one: from which step all ranks of the job
    measure, and by which step time they count, so that all do the same in the same steps; None if others warm up
    still."""
    pace: float | None = None
    """That step time; None for a rank on its own, which goes by its clock."""
    compares_steps: bool = False
    """Whether the step after the traced one is traced too, to see what both compute from the same values."""
    later_walls: list[float] = field(default_factory=list)
    """Of these clean steps."""
    later_device_walls: list[float] = field(default_factory=list)
    """These steps on the clock of a device that does not wait for its host."""
    host_ahead: bool = False
    """Whether the device still had work when the last clean step was launched, so that none of them began with a wait
    for the host."""
    ends_unseen: bool = False
    """Whether only a host that was ahead saw the ends of clean steps: their sum is exact, and no single time."""
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
    _asked_since: float | None = None

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
            if self.pace is not None:
                self.again = self._in_phase < PROFILER_STEPS + self._fitting(JOB_STEPS, JOB_SECONDS)
            if not self.again and (
                self.pace is not None or self._in_phase >= PROFILER_STEPS or now - self._begun >= PROFILER_SECONDS
            ):
                self._enter("profiled", now)
        elif self.phase == "profiled":
            self._take_profiled(now, kind, action if usable or self._retakes >= MAX_RETAKES else ProfilerAction.RESTART)
        elif self.phase == "traced":
            if self._retakes < MAX_RETAKES and not (usable and self.fits(kind) and not compiled):
                self._retakes += 1
                self.again = True
            elif took is not None and took < LONG_STEP_SECONDS and self.compares_steps:
                self._enter("traced next", now)
            else:
                self._end_traces(now)
        elif self.phase == "traced next":
            self._end_traces(now)
        elif self.phase == "clean again":
            if took is not None and self.fits(kind) and not compiled:
                self.later_walls.append(took)
            enough = sum(self.later_walls) >= AGAIN_SECONDS
            if self.pace is not None:
                enough = self._in_phase >= self._fitting(AGAIN_STEPS, AGAIN_SECONDS)
            if self._in_phase >= AGAIN_STEPS or enough:
                self._enter("done", now)
        return self.phase

    def after_profiled(self, now: float, kind: StepKind, *, graphs: int = 0) -> ProfilerAction:
        """What to do with the profiler if the step that ends now is a profiled one."""
        if self._retakes < MAX_RETAKES and not (self.fits(kind) and graphs == self._graphs):
            return ProfilerAction.STOP_EXCLUDING if self._profiled else ProfilerAction.RESTART
        count = self._profiled + 1
        step_s = self.pace or (now - self._profiled_since) / count
        if count < self.most_profiled and (count + 1) * step_s <= PROFILED_SECONDS:
            return ProfilerAction.CONTINUE
        return ProfilerAction.STOP_INCLUDING

    def fits(self, kind: StepKind) -> bool:
        """Whether a step of this kind can represent the usual ones."""
        return self._usual is None or self._usual.is_similar(kind) or self._retakes >= MAX_RETAKES

    @property
    def clean_steps_left(self) -> int:
        """How many clean steps may pass without a decision; 1 for long ones, which are limited by time."""
        if self.phase == "clean again" and self._took * AGAIN_STEPS <= AGAIN_SECONDS:
            return max(1, AGAIN_STEPS - self._in_phase)
        if self.phase != "clean" or self._took * CLEAN_STEPS > CLEAN_SECONDS:
            return 1
        return max(1, max(MIN_CLEAN, CLEAN_STEPS >> self.others) - len(self.walls))

    def steps_left(self, profiled: int) -> int:
        """How many more steps a profile needs, if they go on like the last one; `profiled` of them on a GPU.

        >>> Schedule().steps_left(1), Schedule(phase="traced").steps_left(1)
        (20, 1)
        """
        took = min(self._took, LONG_STEP_SECONDS) if math.isfinite(self._took) else 0.0
        is_long = took >= LONG_STEP_SECONDS

        def fitting(limit_s: float, most: int) -> int:
            return most if most * took <= limit_s else min(most, math.ceil(limit_s / took))

        needs: dict[SchedulePhase, int] = {
            "warm-up": 1 + fitting(WARM_UP_SECONDS, MIN_WARM_UP),
            # the first only refills the caches of the interpreter
            "clean": 1 + (2 if is_long else max(MIN_CLEAN, fitting(CLEAN_SECONDS, CLEAN_STEPS >> self.others))),
            "profiler start": 0 if is_long else fitting(PROFILER_SECONDS, PROFILER_STEPS),
            "profiled": max(1, min(profiled, fitting(PROFILED_SECONDS, PROFILED_STEPS))),
            "traced": 1,
        }
        if self.phase not in needs:
            return 0
        reached = list(needs).index(self.phase)
        in_phase = self._in_phase if self.phase == "warm-up" else len(self.walls) if self.phase == "clean" else 0
        return max(1, list(needs.values())[reached] - in_phase) + sum(list(needs.values())[reached + 1 :])

    def continue_warm(self, now: float) -> None:
        """A step begins now, of a program that has warmed up with steps of another length: one more is enough."""
        self._last, self._in_phase = now, MIN_WARM_UP - 1

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
            self.ends_unseen = len(walls) != len(self.walls)
            self.walls = self.walls if self.ends_unseen else list(walls)

    def device_ended_again(self, walls: Sequence[float]) -> None:
        """The device has finished the steps that were timed again; `walls` are their times on its own clock."""
        if len(walls) == len(self.later_walls) >= MIN_CLEAN:
            self.later_device_walls = list(walls)

    @property
    def wall_s(self) -> float | None:
        """The time of a clean step: the median. None without clean steps.

        There is no synchronization between clean steps. If the host was ahead and the device told no times, only their
        sum is exact: then it is the mean.
        """
        if not self.walls:
            return None
        if self._block_s is not None and self.ends_unseen:
            return self._block_s / len(self.walls)
        return median(self.typical_walls)

    @property
    def typical_walls(self) -> list[float]:
        """The clean steps without outliers; all of them if only a host that is ahead saw their ends."""
        walls = self._considered
        if self.ends_unseen or not walls:
            return walls
        typical = median(walls)
        return [wall for wall in walls if wall <= OUTLIER_RATIO * typical]

    @property
    def clean_steps(self) -> int:
        """The number of clean steps behind the step time, outliers included."""
        return len(self._considered)

    @property
    def _considered(self) -> list[float]:
        """Steps that come late are of a program that has warmed up: they count alone if there are enough of them."""
        if self.host_ahead or not self.later_walls:
            return self.walls
        return [*(self.walls if len(self.later_walls) < len(self.walls) else ()), *self.later_walls]

    def _warm_up(self, now: float, took: float | None, kind: StepKind, compiled: bool) -> None:
        if took is None or self._in_phase == 1:
            self._begun = now
        usual = self._count(kind)
        settled = took is not None and usual and not compiled and took > (1 - SETTLED_CHANGE) * self._took
        if usual and took is not None:
            self._took = took
        if (
            self._asked_since is not None  # all ranks begin with the same step, whatever this one takes now
            or (self._in_phase > MIN_WARM_UP and settled)
            or self._in_phase >= MAX_WARM_UP
            or (self._in_phase > 1 and now - self._begun >= WARM_UP_SECONDS and not compiled)
        ):
            if not self._all_begin(now):
                return
            self._usual = max(self._kinds, key=lambda entry: entry[1])[0]
            self._enter("clean", now)

    def _all_begin(self, now: float) -> bool:
        """Whether the clean steps begin: on all ranks of a job with the same step."""
        if self.agree is None or self.pace is not None:
            return True
        if self._asked_since is None:
            self._asked_since = now
        agreed = self.agree(self.steps, self._took if math.isfinite(self._took) else 0.0)
        if agreed is None:
            return now - self._asked_since >= AGREE_SECONDS
        start, pace = agreed
        if self.steps < start:
            return False
        self.pace = None if pace is None else max(pace, 1e-6)
        self._took = self.pace or self._took
        return True

    def _fitting(self, most: int, limit_s: float) -> int:
        """As many steps as fit into a time, by the pace of the job."""
        return max(1, min(most, math.ceil(limit_s / (self.pace or 1.0))))

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
        if self.pace is not None:
            is_long = self.pace >= LONG_STEP_SECONDS
            least = 2 if is_long else max(MIN_CLEAN, self._fitting(CLEAN_STEPS >> self.others, CLEAN_SECONDS))
            if number >= least:
                self._enter("profiled" if is_long else "profiler start", now)
        elif (
            number >= max(MIN_CLEAN, CLEAN_STEPS >> self.others)
            or (number >= MIN_CLEAN and seconds >= CLEAN_SECONDS)
            or (number >= 2 and seconds >= LONG_STEP_SECONDS * number)
        ):
            if self.repeats_left and seconds <= SHORT_STEPS_SECONDS and _gets_faster(self.walls):
                self.repeats_left -= 1
                self.walls.clear()
                self.again = True
                return
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

    def _end_traces(self, now: float) -> None:
        self._enter("clean again" if self.times_again else "done", now)

    def _follow(self, kind: StepKind) -> None:
        """Compares the next step with this one: a generated text grows from step to step."""
        self._usual = kind

    def _enter(self, phase: SchedulePhase, now: float) -> None:
        self.phase, self._in_phase, self._retakes = phase, 0, 0
        if phase == "warm-up":
            self._begun = now
        elif phase == "profiled":
            self._profiled, self._profiled_since = 0, now


def _gets_faster(walls: Sequence[float]) -> bool:
    """Whether each step of the second half was faster than each of the first.

    >>> _gets_faster([4.8, 4.2, 4.5, 3.6, 3.1, 3.2]), _gets_faster([4.8, 3.2, 4.5, 3.6, 3.1, 4.2])
    (True, False)
    """
    half = len(walls) // 2
    return max(walls[half:]) < min(walls[:half], default=0.0)


PHASE_MESSAGES = {
    "warm-up": "warming up",
    "clean": "timing clean steps",
    "profiler start": "starting the profiler",
    "profiled": "profiling a step",
    "traced": "tracing a step",
    "clean again": "timing clean steps again",
    "done": "everything needed has been recorded",
}

_CLEAN: tuple[SchedulePhase, ...] = ("clean", "clean again")

STEP_DEFINITION = (
    "A step ends with an optimizer's step, or with a module's call without gradients, or, where there is no optimizer, "
    "before the next call; --step MODULE:FUNCTION names a function each call of which is one."
)


class StopRun(BaseException):
    """Ends the profiled code once everything is recorded. Not an Exception, so that the code does not catch it."""


class Session:
    """The steps of one run. Errors of the session never reach the profiled code: they are in `problem`.

    With `stop`, `StopRun` ends the run once everything is recorded. Without `traces`, the caller traces a step itself
    when the phase is "traced", and passes the trace to `add_trace`. `completed` is called when everything is recorded;
    from then on steps are counted only if `follows`.
    """

    def __init__(
        self,
        say: Progress,
        *,
        stop: bool = False,
        traces: bool = True,
        follows: bool = False,
        completed: Callable[[], object] = lambda: None,
    ) -> None:
        self.guard = Guard(lambda error: self._give_up(_error_text(error)))
        self.team: Team | None = None
        """The ranks of the job; None for a process on its own."""
        self.injector: FaultInjector | None = None
        self._timeline: RankTimeline | None = None
        """Of all profiled steps, in a job of several ranks."""
        self._first_profiled = 0
        """The number of steps before the profiler was started."""
        self.schedule = Schedule(compares_steps=traces, agree=self._agree)
        self.loaders = LoaderStarts(self.guard)
        """What data loaders do at the ends of epochs, while it is watched."""
        self.steps: StepDetector | None = None
        """Finds the steps. While steps are timed, it looks for no new ones."""
        self.last_end = self.guard.program_time()
        """When the last step ended, on the clock of the program: what nearpeak does itself is no wait for a step."""
        self.problem = ""
        self._say, self._stop, self._traces = _quietly(say), stop, traces
        self._follows, self._completed = follows, completed
        self._recorded: KinetoTrace | None = None
        self._profiled_wall = 0.0
        self._profiled_step = 0
        """The number of steps before the profiled one."""
        self._step = ""
        """What the profiled step was, for people."""
        self._profiled: dict[int, tuple[float, int]] = {}
        """The wall time of profiled steps, and the number of steps before each, by the profiler's step number."""
        self._traced: Trace | None = None
        self._untraced_reason = "the code ended before a step was traced"
        """Why there is no trace, if there is none."""
        self._home = OwnThread()
        self._thread: OwnThread | None = None
        """The thread whose steps count: that of the first step."""
        self._profiler: Profiler | None = None
        self._live: LiveTrace | None = None
        self._first_live: LiveTrace | None = None
        """What recorded the traced step, while the next one is recorded."""
        self._step_start = 0.0
        self._settling = False
        """Whether this step is the last before the clean ones."""
        self._watch = ConditionsWatch()
        """Of the clean steps, and of the profiled ones."""
        self._events = StepEvents()
        """Before the first clean step and after each of them."""
        self._deferred_left = 0
        """The number of clean steps whose evaluation is deferred: it takes as long as a few ops."""
        self._deferred: list[tuple[float, int]] = []
        """When these steps ended, and the number of compiled graphs then."""
        self._last_kind: tuple[StepKind | None, bool, bool] = None, False, False
        """The kind of the last evaluated step, whether a profiler of the user's code ran, and a graph was captured."""
        self._captures = capture_count()
        """The number of captures before this step."""
        self._warm_graphs: int | None = None
        """The number of compiled graphs when warm-up ended for the first time."""
        self._clean_begun: tuple[Sequence[int], int] = (), 0
        """Garbage collections and steps before the clean steps."""
        self._collections: tuple[float, ...] | None = None
        """Garbage collections in a clean step, by generation."""
        self._compiler: CompilerFacts | None = None
        self._rank: tuple[int, int] | None = None
        """The rank of the process and the number of ranks, when the step was profiled."""
        self._steps_before_training = 0
        self._evaluation: StepRecords | None = None
        """Of steps before the first training step, or before the first whole period."""
        self._wait_ends: float | None = None
        """Until when a longer step may come, once everything is recorded."""
        self._waits_for_loop = False

    @property
    def steps_seen(self) -> int:
        """The number of steps, those of an evaluation before training included."""
        return self._steps_before_training + self.schedule.steps

    @property
    def is_done(self) -> bool:
        """Whether nothing more is needed."""
        return self.schedule.phase == "done"

    def optimizer_begins(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Part of the traced step."""
        return None if self._live is None else self._live.optimizer_begins(optimizer, args, kwargs)

    def optimizer_ends(self) -> None:
        """Part of the traced step."""
        if self._live is not None:
            self._live.optimizer_ends()

    def training_begins(self) -> None:
        """The steps so far were an evaluation. They count only if no training step is recorded."""
        if self.schedule.steps:
            self._restart("training begins: the steps before it do not count")

    def period_begins(self, words: str) -> None:
        """The steps so far were parts of steps. They count only if none of the whole ones is recorded."""
        with self.guard.own_time():
            self._restart(words)
            self.schedule.continue_warm(self.guard.program_time())

    def _restart(self, words: str) -> None:
        if self.guard.in_child:
            return
        self._evaluation = self._records() or self._evaluation
        self._steps_before_training += self.schedule.steps
        self._wait_ends = None
        self.abandon()
        self.schedule, self._recorded, self._traced = self._new_schedule(), None, None
        self._first_live = None
        self._deferred_left, self._deferred, self._thread = 0, [], None
        self._watch.forget()
        self._warm_graphs = self._compiler = None
        self._say(words)

    def _new_schedule(self) -> Schedule:
        return Schedule(compares_steps=self._traces, agree=self._agree)

    def _agree(self, steps: int, step_s: float) -> tuple[int, float | None] | None:
        """See `Schedule.agree`."""
        if self.team is None:
            self.team = Team.join()
        return (steps, None) if self.team is None else self.team.agree(steps, step_s)

    def step_ends(self, kind: StepKind | None = None, *, between: Callable[[], object] | None = None) -> None:
        """Ends a step. `between` runs before the next one begins, and belongs to no step.

        What ends while a graph is captured is no step: it did not run.
        """
        with self.guard.own_time():
            self.loaders.steps += 1
            self._step_ends(kind, between)
        if self.injector is not None:
            with self.guard.as_program():
                self.injector.step_begins()

    def _step_ends(self, kind: StepKind | None, between: Callable[[], object] | None) -> None:
        self.last_end = self.guard.program_time()
        if is_capturing():
            return
        if kind is not None and kind.module and not self._home:
            self.schedule.steps += 1  # training may begin on another thread, which could not end what this one began
            return
        if self._thread is None:
            self._thread = OwnThread()
        if not self._thread:  # profilers and traces belong to a thread
            self.schedule.steps += 1
            return
        if self.schedule.phase == "done" or self.problem or self.guard.in_child:
            self.schedule.steps += 1
            if between is not None:
                between()
            if self._wait_ends is not None and not self.guard.in_child and not self.problem:
                self._complete()
            return
        if (
            self._deferred_left > 1
            and self.schedule.phase in _CLEAN
            and between is None
            and not self._settling
            and (kind, _profiler_runs(), self._captures != capture_count()) == self._last_kind
        ):
            self._deferred_left -= 1
            self._deferred.append((self.guard.program_time(), compiled_graph_count()))
            self._events.record()
            return
        seen, before = self.schedule.steps, self.schedule.phase
        with stage("ends of steps"):
            self.guard.call(self._advance, kind, between)
        self.schedule.steps = max(self.schedule.steps, seen + 1)  # also if it failed
        if self.is_done:
            self._complete()
        elif self.schedule.phase == "clean again" and before in ("traced", "traced next"):
            self._tell_completed()

    def _complete(self) -> None:
        """Ends the recording, unless a longer step than those recorded may come."""
        if self._awaits_longer_step():
            return
        self.loaders.stop()
        if self.steps is not None and not self._follows:
            self.steps.stop(until_training=True)
        self._tell_completed()
        if self._stop:
            raise StopRun

    def _tell_completed(self) -> None:
        # What is done with the records is no part of recording them, and modes of the code do not see it.
        with suppress(Exception), _disable_current_modes(), torch._C.DisableTorchFunction():
            self._completed()

    def _awaits_longer_step(self) -> bool:
        if self.steps is None or self.problem:
            return False
        now = self.guard.program_time()
        if self._wait_ends is None:
            awaited = self.guard.call(self.steps.awaited) or Awaited()
            if awaited.what:
                self._wait_ends = now + awaited.seconds
                self._waits_for_loop = awaited.is_loop
                self._say(f"waiting up to {seconds(awaited.seconds)} for {awaited.what}: these may be one step")
            return bool(awaited.what)
        if now < self._wait_ends and not (self._waits_for_loop and not self.steps.awaited_loop):
            return True
        self._wait_ends = None
        return False

    def add_trace(self, traced: Trace | str) -> None:
        """Adds the trace of a step that the caller ran, or the reason why there is none."""
        if isinstance(traced, str):
            self._untraced_reason = traced
        else:
            self._set_trace(traced)
        self.schedule.step_ended(self.guard.program_time(), graphs=compiled_graph_count())
        if self.schedule.phase == "clean again":
            self._say(PHASE_MESSAGES["clean again"])
            self._resume()

    def abandon(self) -> None:
        """Stops the profiler or trace that is still running at the end of the code."""
        if self.guard.in_child or is_capturing():
            return
        self._evaluate_deferred()
        self._watch.cancel()
        profiler, self._profiler, live, self._live = self._profiler, None, self._live, None
        self._profiled = {}
        # If the device is lost, everything fails, and the code's own error says so.
        if profiler is not None:
            with suppress(Exception):
                profiler.discard()
        if live is not None:
            with suppress(Exception):
                live.stop() if self._thread else live.cancel()

    def records(self, source: str) -> StepRecords | None:
        """What a profile is assembled from; None if there were too few steps."""
        records = self._records() or self._evaluation
        return None if records is None else dataclasses.replace(records, source=source)

    def _records(self) -> StepRecords | None:
        if self._recorded is None:
            return None
        rank, world_size = self._rank or (None, None)
        return StepRecords(
            source="",
            step=self._step,
            walls=tuple(self.schedule.typical_walls),
            wall_s=self.schedule.wall_s,
            recorded=self._recorded,
            profiled_wall=self._profiled_wall,
            traced=self._traced,
            untraced_reason=self._untraced_reason,
            host_ahead=self.schedule.host_ahead,
            later_walls=tuple(self.schedule.later_device_walls),
            conditions=self._watch.conditions,
            notes=(*_notes(self.schedule), *(() if self.steps is None else self.steps.notes())),
            compiler=self._compiler,
            worker_starts=self.loaders.costs(),
            collections=self._collections,
            rank=rank,
            world_size=world_size,
            timeline=self._timeline,
        )

    def missing_reason(self, source: str) -> str:
        """Why there is no profile: the steps so far, what is needed, and what to do."""
        schedule = self.schedule
        seen = f"{source} took {schedule.steps or 'no'} step{'s' * (schedule.steps != 1)}"
        wall = schedule.wall_s
        if wall is not None:
            seen += f", and {len(schedule.walls)} clean ones of {seconds(wall)}"
        if self.problem:
            return f"{seen}, but none could be profiled: {self.problem}"
        unused = self.steps.unfinished_calls if self.steps is not None else 0
        if schedule.steps == 0 and unused:
            calls = "a call of a module" if unused == 1 else f"{unused} calls of modules"
            seen += f", but {calls} with gradients and no step of an optimizer"
        needed = schedule.steps + schedule.steps_left(PROFILED_STEPS if _gpu_was_used() else 1)
        return (
            f"{seen}. A profile needs about {needed} of them: some to warm up, some for the wall time, some to profile "
            f"and one to trace. {STEP_DEFINITION} Run it for longer, or profile one step with "
            "nearpeak.profile(fn, *args)."
        )

    def _give_up(self, why: str) -> None:
        self.problem = why
        self.abandon()
        if self.steps is not None and not self._follows:
            self.steps.stop()
        self._say(f"no step is profiled: {why}")

    def _advance(self, given: StepKind | None, between: Callable[[], object] | None) -> None:
        schedule, before = self.schedule, self.schedule.phase
        if self._settling:
            self._settling = False
            schedule.steps += 1
            self._begin_clean_steps(between)
            return
        now = self.guard.program_time()
        if before in ("profiler start", "profiled", "traced", "traced next"):  # the step ends with its last kernel
            synchronize()
            now = self.guard.program_time(now=True)
        after = self._evaluate_deferred()
        if after == before and not schedule.again:
            captures, self._captures = self._captures, capture_count()
            self._last_kind = given, self._profiler is None and _profiler_runs(), captures != self._captures
            kind = _step_kind(*self._last_kind)
            graphs = compiled_graph_count()
            usable = self._finish(now, kind, graphs)
            after = schedule.step_ended(now, kind, graphs=graphs, usable=usable)
        else:
            schedule.steps += 1
        if after == "clean" and self._warm_graphs is None:
            self._warm_graphs = compiled_graph_count()
        if before == "clean" and after not in ("clean", "warm-up"):
            self._events.record()
            waited_from = self.guard.program_time(now=True)
            synchronize()
            ended, times = self.guard.program_time(now=True), self._events.seconds()
            # Without a wait, the work ended with the step, or while its times were evaluated here; a CPU's always does.
            schedule.device_ended(ended if times and ended - waited_from > IDLE_SYNC_SECONDS else now, times)
            self._watch.end()
            begun, steps = self._clean_begun
            self._collections = tuple(
                (now - before) / max(1, schedule.steps - steps)
                for before, now in zip(begun, _garbage_collections(), strict=False)
            )
            self._compiler = read_compiler_facts(self._warm_graphs or 0)
        elif before == "clean again" and after != before:
            if schedule.host_ahead:
                self._events.record()
                synchronize()
                schedule.device_ended_again(self._events.seconds())
            self._watch.end()
        if self.problem:
            return
        if between is not None:
            synchronize()
            with torch._C._EnableTorchFunction():
                between()
        if after != before:
            if after in PHASE_MESSAGES:
                self._say(PHASE_MESSAGES[after])
            if self.steps is not None:
                self.steps.calls.search(after not in (*_CLEAN, "done"))
                # Caches of the interpreter may start empty after that: one step refills those of most instructions.
                self._settling = after in _CLEAN
            if after == "clean":
                self._watch.prepare()
                schedule.repeats_left = MAX_REPEATS if _gpu_was_used() else 0
            elif after == "warm-up":
                self._watch.cancel()
        if after != before or schedule.again:
            self._begin(after)
        if between is not None or (after in _CLEAN and (before != after or schedule.again)):
            self._resume()
        if after in _CLEAN:
            self._events.record()

    def _evaluate_deferred(self) -> SchedulePhase:
        """Evaluates the deferred clean steps, up to one that ends the phase or restarts it."""
        deferred, self._deferred = self._deferred, []
        before = self.schedule.phase
        self.schedule.again = False
        for position, (ended, graphs) in enumerate(deferred):
            after = self.schedule.step_ended(ended, _step_kind(*self._last_kind), graphs=graphs)
            if after != before or self.schedule.again:
                self.schedule.steps += len(deferred) - position - 1
                break
        return self.schedule.phase

    def _begin_clean_steps(self, between: Callable[[], object] | None) -> None:
        if between is not None:
            synchronize()
            with torch._C._EnableTorchFunction():
                between()
        self._resume()
        self._events.record()

    def _resume(self) -> None:
        """Begins the next step now, with an idle device."""
        self._deferred_left = self.schedule.clean_steps_left
        again = self.schedule.phase == "clean again"
        self._events.prepare((AGAIN_STEPS if again else CLEAN_STEPS) + 1)
        synchronize()
        self.schedule.resumes(self.guard.program_time())
        if not (self.schedule.later_walls if again else self.schedule.walls):
            self._events.clear()
            if self.schedule.phase in _CLEAN:
                self._watch.begin(with_gpu=not again)
            if not again:
                self._clean_begun = _garbage_collections(), self.schedule.steps

    def _finish(self, now: float, kind: StepKind, graphs: int) -> bool:
        """Ends the profiling or tracing of the step that is over; returns whether the step can be used."""
        if self.schedule.phase == "profiled":
            return self._finish_profiled(now, kind, graphs)
        fits = self.schedule.fits(kind)
        if self._live is None:
            return fits
        live, self._live = self._live, None
        if self.schedule.phase == "traced next":
            first, self._first_live = self._first_live, None
            if first is not None and self._traced is not None:
                with suppress(Exception):  # the trace is worth a profile without it
                    self._traced = live.stop_next_step(self._traced, first)
            return fits
        try:
            traced = live.stop()
        except Exception as error:  # the profiled step is worth a profile without it
            self._untraced_reason = _error_text(error)
        else:
            if fits:
                self._set_trace(traced)
                self._first_live = live
        return fits

    def _finish_profiled(self, now: float, kind: StepKind, graphs: int) -> bool:
        profiler, action = self._profiler, self.schedule.after_profiled(now, kind, graphs=graphs)
        if profiler is None:
            return False
        if action in (ProfilerAction.CONTINUE, ProfilerAction.STOP_INCLUDING):
            self._profiled[profiler.number] = now - self._step_start, self.schedule.steps
        if action == ProfilerAction.CONTINUE:
            profiler.end_step()
            return True
        walls, self._profiled, self._profiler = self._profiled, {}, None
        if action == ProfilerAction.RESTART:
            self._watch.cancel()
            profiler.discard()
            return False
        self._watch.end()
        try:
            if self.team is None:
                recorded = profiler.stop(walls)
            else:
                recorded = profiler.stop(walls, partial(self._read_timeline, self.team, profiler.thread_seconds))
        except UsageError:
            self._give_up(
                "torch's profiler shows no op of the step with its shapes. A step that is compiled as a whole has none "
                "on a CPU: profile it without torch.compile."
            )
            return False
        if not recorded.trace.ops and not recorded.kernels:  # another profiler took over
            return False
        if not recorded.kernels and _gpu_was_used():
            self._give_up(
                "torch's profiler saw no kernels although the GPU was used. It needs the permission to read "
                "performance counters (NVreg_RestrictProfilingToAdminUsers=0, or CAP_SYS_ADMIN in a container), and no "
                "other profiler may run at the same time."
            )
            return False
        self._recorded, self._step = recorded, kind.words
        self._rank = distributed_rank()
        last = now - self._step_start, self.schedule.steps  # without kernels, the last step is read
        self._profiled_wall, self._profiled_step = walls.get(-1 if recorded.step is None else recorded.step, last)
        if self._compiler is not None:
            self._compiler = dataclasses.replace(self._compiler, breaks=graph_breaks_in(recorded.compiled_regions))
        return True

    def _read_timeline(self, team: Team, seconds: Mapping[int, ThreadSeconds], file: Path) -> None:
        with suppress(Exception):  # the step is worth a profile without it
            self._timeline = read_timeline(file, team, self._first_profiled, seconds)

    def _set_trace(self, traced: Trace) -> None:
        self._traced = dataclasses.replace(traced, steps_since=self.schedule.steps - self._profiled_step)

    def _begin(self, phase: str) -> None:
        if phase in ("profiler start", "profiled"):
            # All of this before the step begins: it would be time of the host in it, milliseconds the first time.
            # On a CPU, ops are the kernels, and there is no common clock to average over.
            on_gpu = _gpu_was_used()
            self.schedule.most_profiled = PROFILED_STEPS if on_gpu else 1
            self.schedule.times_again = not self._stop and (self.schedule.host_ahead or not on_gpu)
            if phase == "profiled" and not self._profiled:
                self._watch.begin()
            # A second profiler would replace a running one, and the user's code would find its own one empty.
            if self._profiler is not None:
                self._profiler.next_step()
            elif not _profiler_runs():
                self._profiler = Profiler()
                self._first_profiled = self.schedule.steps
            self._step_start = self.guard.program_time()
        elif phase == "traced next" and self._first_live is not None:
            with suppress(Exception):
                self._live = LiveTrace(reads_values=False)  # those of the traced step tell
        elif phase == "traced":
            if self._recorded is None:
                self._give_up("the code runs a profiler of its own in every step. Switch it off, and try again.")
            elif self._traces:
                try:
                    self._live = LiveTrace()
                except Exception as error:
                    self._untraced_reason = _error_text(error)


def _garbage_collections() -> list[int]:
    """How often Python has collected garbage, by generation."""
    return [generation["collections"] for generation in gc.get_stats()]


def _step_kind(given: StepKind | None, recorded: bool, captured: bool) -> StepKind:
    return dataclasses.replace(given or StepKind(), recorded=recorded, captured=captured)


def _error_text(error: Exception) -> str:
    return f"{type(error).__name__}: {message_of(error)}"


def _quietly(say: Progress) -> Progress:
    """A line that cannot be shown, because the code has closed the stream, is no error of the code."""

    def say_quietly(line: str) -> None:
        with suppress(Exception):
            say(line)

    return say_quietly


def _notes(schedule: Schedule) -> list[str]:
    notes = []
    clean_steps, left_out = schedule.clean_steps, schedule.clean_steps - len(schedule.typical_walls)
    if left_out:
        notes.append(
            f"{left_out} of {clean_steps} clean steps took more than {OUTLIER_RATIO:g} times the usual time "
            "and do not count."
        )
    if schedule.others:
        notes.append(f"Steps of another kind that came between clean ones, and do not count: {schedule.others}.")
    return notes


def _profiler_runs() -> bool:
    return bool(torch._C._autograd._profiler_enabled())


def _gpu_was_used() -> bool:
    backend = gpu_in_use()
    return backend is not None and backend.peak_allocated_bytes() > 0


READING_INTERVAL_S = 0.1
"""Between two readings of the GPU. Each takes the interpreter from the program for some tens of microseconds."""
FIRST_READING_S = 0.02
HELD_SHARE = 0.25
"""A reason for a lower clock counts where it held in this share of the readings."""


class ConditionsWatch:
    """Windows of time in which steps ran, one after the other, and what the host and the GPU did in all of them.

    The host's counters are read before and after. The GPU's clock is read by a thread of its own, through the driver's
    management library: a call to the device itself would be part of the step. The thread is none of Python's
    `threading`, so that the program does not see it, and it sleeps nearly all of the time.
    """

    def __init__(self) -> None:
        self._host = HostLoad()
        self._begun: HostReading | None = None
        self._windows: list[StepConditions] = []
        self._reader: ConditionsReader | None = None
        self._gpu: _GpuReadings | None = None

    def prepare(self) -> None:
        """Opens the driver's library, which takes a while, before a window begins."""
        backend = gpu_in_use()
        if self._reader is None and backend is not None:
            self._reader = backend.conditions(backend.current())

    def begin(self, *, with_gpu: bool = False) -> None:
        """A window begins; `with_gpu` it has the clock of the GPU too. An open one is forgotten."""
        self.cancel()
        self._begun = self._host.read()
        if with_gpu and self._reader is not None and self._reader.missing is None:
            self._gpu = _GpuReadings(self._reader)

    def cancel(self) -> None:
        """Forgets the window that is open."""
        self._begun = None
        if self._gpu is not None:
            self._gpu.stop()
            self._gpu = None

    def end(self) -> None:
        """The window ends."""
        begun, gpu = self._begun, self._gpu
        self.cancel()
        if begun is None:
            return
        shares = self._host.shares(begun, self._host.read())
        readings = gpu.readings if gpu is not None else []
        clocks = [reading.clock_hz for reading in readings if reading.clock_hz]
        powers = [reading.power_watts for reading in readings if reading.power_watts is not None]
        reasons = Counter(reason for reading in readings for reason in reading.throttle)
        self._windows.append(
            StepConditions(
                waited_share=shares.waited,
                others_share=shares.others,
                throttled_share=shares.throttled,
                clock_hz=median(clocks) if clocks else None,
                power_watts=median(powers) if powers else None,
                throttle=tuple(reason for reason, count in reasons.items() if count >= HELD_SHARE * len(readings)),
                gpu_processes=self._reader.processes() if gpu is not None and self._reader is not None else None,
            )
        )

    def forget(self) -> None:
        """Forgets all windows: their steps do not count."""
        self.cancel()
        self._windows.clear()

    @property
    def conditions(self) -> StepConditions | None:
        """Those of all windows that ended; None without any."""
        return worst_conditions(self._windows)


class _GpuReadings:
    """Reads the conditions of a GPU now and then, on a thread, until it is stopped."""

    def __init__(self, reader: ConditionsReader) -> None:
        self.readings: list[Conditions] = []
        self._reader = reader
        self._running = _thread.allocate_lock()
        self._running.acquire()
        with suppress(RuntimeError):  # no thread can be started any more
            _thread.start_new_thread(self._read, ())

    def stop(self) -> None:
        """No further reading begins."""
        if self._running.locked():
            self._running.release()

    def _read(self) -> None:
        wait_s = FIRST_READING_S
        with suppress(Exception):  # nobody could be told
            while not self._running.acquire(timeout=wait_s):
                self.readings.append(self._reader.read())
                wait_s = READING_INTERVAL_S
