"""`Watch`: told when each step of a run ends, it does with the next one what the schedule says."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from contextlib import suppress

import torch

from nearpeak.devices.backends import gpu_in_use
from nearpeak.errors import UsageError
from nearpeak.measure.options import Progress
from nearpeak.ops.op import Trace
from nearpeak.profiles.profile import CompilerFacts
from nearpeak.profiling.assemble import StepRecords
from nearpeak.profiling.schedule import CLEAN_STEPS, OUTLIER_RATIO, PROFILED_STEPS, Schedule, SchedulePhase
from nearpeak.profiling.steps import StepDetector, StepKind
from nearpeak.profiling.torch_profiler import (
    Profiler,
    StepEvents,
    compiled_graph_count,
    distributed_rank,
    graph_breaks_in,
    has_gpu,
    read_compiler_facts,
    synchronize,
)
from nearpeak.trace.kineto.kernels import graph_note
from nearpeak.trace.kineto.read import KinetoTrace
from nearpeak.trace.live import LiveTrace
from nearpeak.units import seconds

PHASE_MESSAGES = {
    "warm-up": "warming up",
    "clean": "taking the time of clean steps",
    "profiler start": "starting the profiler",
    "profiled": "profiling a step",
    "traced": "tracing a step",
    "done": "all that is needed was captured",
}

STEP_DEFINITION = (
    "A step ends with an optimizer's step, or with a module's call without gradients; --step MODULE:FUNCTION names a "
    "function each call of which is one."
)


class StopRun(BaseException):
    """Ends code that has given what is needed; no Exception, so that the code does not catch it."""


class Session:
    """One run of steps. It never fails the code that it watches: what went wrong is in `problem`.

    With `stop` the run is ended by `Stop` when all was captured. Without `traces` the caller traces a step itself, when
    the phase is "traced", and gives the result to `keep`.
    """

    def __init__(self, say: Progress, *, stop: bool = False, traces: bool = True) -> None:
        self.schedule = Schedule()
        self.steps: StepDetector | None = None
        """Who finds the steps: it looks at nothing but what it knows already while times are taken."""
        self.ended = time.monotonic()
        """When the last step did."""
        self.problem = ""
        self._say, self._stop, self._traces = say, stop, traces
        self._process = os.getpid()
        self._recorded: KinetoTrace | None = None
        self._profiled_wall = 0.0
        self._profiled_step = 0
        self._profiled: dict[int, tuple[float, int]] = {}
        """Of profiled steps, by the profiler's numbers of them: their wall times, and how many steps came before."""
        self._traced: Trace | None = None
        self._profiler: Profiler | None = None
        self._live: LiveTrace | None = None
        self._begun = 0.0
        self._settling = False
        """Whether this step is the last before the clean ones."""
        self._events = StepEvents()
        """Before the first clean step and after each of them."""
        self._quiet = 0
        """How many clean steps are only noted when they end: to decide on them takes as long as a few ops."""
        self._noted: list[tuple[float, int]] = []
        """When these ended, and how many graphs there were then."""
        self._usual: tuple[StepKind | None, bool] = None, False
        """The kind of the last step that was decided on, and whether it ran under a profiler of the code's own."""
        self._warm_graphs: int | None = None
        """How many graphs torch.compile had made when the run was warm for the first time."""
        self._compiler: CompilerFacts | None = None
        self._rank: tuple[int, int] | None = None
        """The rank of the process and the number of ranks, when the step was profiled."""
        self._earlier: tuple[Schedule, KinetoTrace, float, Trace, CompilerFacts | None] | None = None

    @property
    def is_done(self) -> bool:
        """Whether nothing more is needed."""
        return self.schedule.phase == "done"

    def optimizer_begins(self, optimizer: torch.optim.Optimizer) -> None:
        """Part of the traced step."""
        if self._live is not None:
            self._live.optimizer_begins(optimizer)

    def optimizer_ends(self) -> None:
        """Part of the traced step."""
        if self._live is not None:
            self._live.optimizer_ends()

    def training_begins(self) -> None:
        """What was called before was an evaluation; it counts only if no training step can be captured."""
        if self.schedule.steps == 0 or os.getpid() != self._process:
            return
        if self._recorded is not None and self._traced is not None:
            self._earlier = self.schedule, self._recorded, self._profiled_wall, self._traced, self._compiler
        self.abandon()
        self.schedule, self._recorded, self._traced = Schedule(), None, None
        self._quiet, self._noted = 0, []
        self._warm_graphs = self._compiler = None
        self._say("training begins: the steps before it do not count")

    def step_ends(self, kind: StepKind | None = None, *, between: Callable[[], object] | None = None) -> None:
        """A step is over. `between` runs before the next one begins, and is part of none."""
        self.ended = time.monotonic()
        if self.schedule.phase == "done" or self.problem or os.getpid() != self._process:  # a worker was forked
            self.schedule.steps += 1
            if between is not None:
                between()
            return
        if self._quiet > 1 and between is None and not self._settling and (kind, _profiler_runs()) == self._usual:
            self._quiet -= 1
            self._noted.append((time.perf_counter(), compiled_graph_count()))
            self._events.record()
            return
        seen = self.schedule.steps
        try:
            self._advance(kind, between)
        except Exception as error:  # whatever it is: the code that is watched must not end because of it
            self.schedule.steps = seen + 1
            self._give_up(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
        if self._stop and self.is_done:
            raise StopRun

    def keep(self, traced: Trace) -> None:
        """The trace of a step that the caller took."""
        self._keep(traced)
        self.schedule.step_ended(time.perf_counter())

    def abandon(self) -> None:
        """Ends what still runs when the code is over."""
        self._decide_on_noted()
        profiler, self._profiler, live, self._live = self._profiler, None, self._live, None
        self._profiled = {}
        # Of a device that is gone everything fails, and the code's own error has said so.
        if profiler is not None:
            with suppress(Exception):
                profiler.discard()
        if live is not None:
            with suppress(Exception):
                live.stop()

    def captured(self, source: str) -> StepRecords | None:
        """What the profile is made of; None where steps were too few."""
        found = self._earlier
        if self._recorded is not None and self._traced is not None:
            found = self.schedule, self._recorded, self._profiled_wall, self._traced, self._compiler
        if found is None:
            return None
        schedule, recorded, profiled_wall, traced, compiler = found
        return StepRecords(
            source=source,
            walls=tuple(schedule.typical_walls),
            wall_s=schedule.wall_s,
            recorded=recorded,
            profiled_wall=profiled_wall,
            traced=traced,
            host_ahead=schedule.host_ahead,
            notes=tuple(_notes(schedule, recorded)),
            compiler=compiler,
            rank=None if self._rank is None else self._rank[0],
            world_size=None if self._rank is None else self._rank[1],
        )

    def missing_reason(self, source: str) -> str:
        """Why there is no profile: what was seen, what is needed, and what to do."""
        schedule = self.schedule
        seen = f"{source} took {schedule.steps or 'no'} step{'s' * (schedule.steps != 1)}"
        wall = schedule.wall_s
        if wall is not None:
            seen += f", and {len(schedule.walls)} clean ones of {seconds(wall)}"
        if self.problem:
            return f"{seen}, but there is no account of one: {self.problem}"
        unused = self.steps.unused if self.steps is not None else 0
        if schedule.steps == 0 and unused:
            seen += f", but {unused} calls of modules with gradients: inference belongs into torch.no_grad()"
        return (
            f"{seen}. A profile needs about twenty-five, or seven that take long: some to warm up, some for their "
            f"wall time, some to profile and one to trace. {STEP_DEFINITION} Run it for longer, or profile one step "
            "with nearpeak.profile(fn, *args)."
        )

    def _give_up(self, why: str) -> None:
        self.problem = why
        self.abandon()
        self._say(f"no step is profiled: {why}")

    def _advance(self, given: StepKind | None, between: Callable[[], object] | None) -> None:
        schedule, before = self.schedule, self.schedule.phase
        if self._settling:
            self._settling = False
            schedule.steps += 1
            self._take_times(between)
            return
        if before in ("profiler start", "profiled", "traced"):  # their step ends with its last kernel
            synchronize()
        now = time.perf_counter()
        after = self._decide_on_noted()
        if after == before and not schedule.again:
            self._usual = given, self._profiler is None and _profiler_runs()
            kind = _step_kind(*self._usual)
            graphs = compiled_graph_count()
            usable = self._finish(now, kind, graphs)
            after = schedule.step_ended(now, kind, graphs=graphs, usable=usable)
        else:
            schedule.steps += 1
        if after == "clean" and self._warm_graphs is None:
            self._warm_graphs = compiled_graph_count()
        if before == "clean" and after not in ("clean", "warm-up"):
            self._events.record()
            synchronize()
            # the work of a CPU ends with the step, whatever was to be done here since
            schedule.device_ended(time.perf_counter() if has_gpu() else now, self._events.seconds())
            self._compiler = read_compiler_facts(self._warm_graphs or 0)
        if self.problem:
            return
        if between is not None:
            synchronize()
            between()
        if after != before:
            self._say(PHASE_MESSAGES[after])
            if self.steps is not None:
                self.steps.calls.search(after not in ("clean", "done"))
                # The interpreter's own caches begin anew where it has been told to look at less: one step refills them.
                self._settling = after == "clean"
        if after != before or schedule.again:
            self._begin(after)
        if between is not None or (after == "clean" and (before != "clean" or schedule.again)):
            self._resume()
        if after == "clean":
            self._events.record()

    def _decide_on_noted(self) -> SchedulePhase:
        """Tells the schedule of clean steps that were only noted, up to one that ends the phase or begins it anew."""
        noted, self._noted = self._noted, []
        self.schedule.again = False
        for at, (ended, graphs) in enumerate(noted):
            after = self.schedule.step_ended(ended, _step_kind(*self._usual), graphs=graphs)
            if after != "clean" or self.schedule.again:
                self.schedule.steps += len(noted) - at - 1
                break
        return self.schedule.phase

    def _take_times(self, between: Callable[[], object] | None) -> None:
        """The clean steps begin here."""
        if between is not None:
            synchronize()
            between()
        self._resume()
        self._events.record()

    def _resume(self) -> None:
        """The next step begins only now, with a device that has nothing left to do."""
        self._quiet = self.schedule.clean_steps_left
        self._events.prepare(CLEAN_STEPS + 1)
        synchronize()
        self.schedule.resumes(time.perf_counter())
        if not self.schedule.walls:
            self._events.clear()

    def _finish(self, now: float, kind: StepKind, graphs: int) -> bool:
        """Ends what was done to the step that is over; whether it can be used."""
        phase, fits = self.schedule.phase, self.schedule.fits(kind)
        if phase == "profiled":
            profiler, follows = self._profiler, self.schedule.after_profiled(now, kind, graphs=graphs)
            if profiler is None:
                return False
            if follows in ("go on", "with it"):
                self._profiled[profiler.number] = now - self._begun, self.schedule.steps
            if follows == "go on":
                profiler.end_step()
                return True
            walls, self._profiled, self._profiler = self._profiled, {}, None
            if follows == "anew":
                profiler.discard()
                return False
            try:
                recorded = profiler.stop(walls)
            except UsageError:
                self._give_up(
                    "torch's profiler shows no op of the step with its shapes. A step that is compiled as a whole has "
                    "none on a CPU: profile it without torch.compile."
                )
                return False
            if not recorded.trace.ops and not recorded.kernels:  # another profiler took over
                return False
            if not recorded.kernels and _gpu_was_used():
                self._give_up(
                    "torch's profiler saw no kernels although the GPU was used. It needs the permission to read "
                    "performance counters (NVreg_RestrictProfilingToAdminUsers=0, or CAP_SYS_ADMIN in a container), "
                    "and no other profiler may run beside it."
                )
                return False
            # without kernels the last step is what was read
            self._recorded = recorded
            self._rank = distributed_rank()
            last = now - self._begun, self.schedule.steps
            self._profiled_wall, self._profiled_step = walls.get(-1 if recorded.step is None else recorded.step, last)
            if self._compiler is not None:
                self._compiler = dataclasses.replace(self._compiler, breaks=graph_breaks_in(recorded.compiled_regions))
            return True
        if phase == "traced" and self._live is not None:
            traced = self._live.stop()
            self._live = None
            if fits:
                self._keep(traced)
        return fits

    def _keep(self, traced: Trace) -> None:
        self._traced = dataclasses.replace(traced, steps_since=self.schedule.steps - self._profiled_step)

    def _begin(self, phase: str) -> None:
        if phase in ("profiler start", "profiled"):
            # A second profiler would take the place of the first, and the code would find its own one empty.
            if self._profiler is not None:
                self._profiler.next_step()
            elif not _profiler_runs():
                self._profiler = Profiler()
            # ops are the kernels of a CPU, and it has no clock that they follow together
            self.schedule.most_profiled = PROFILED_STEPS if _gpu_was_used() else 1
            self._begun = time.perf_counter()
        elif phase == "traced":
            if self._recorded is None:
                self._give_up("the code has a profiler of its own running in every step. Switch it off, and try again.")
            elif self._traces:
                self._live = LiveTrace()


def _step_kind(given: StepKind | None, recorded: bool) -> StepKind:
    return dataclasses.replace(given or StepKind(), recorded=recorded)


def _notes(schedule: Schedule, recorded: KinetoTrace) -> list[str]:
    notes = []
    left_out = len(schedule.walls) - len(schedule.typical_walls)
    if left_out:
        notes.append(
            f"{left_out} of {len(schedule.walls)} clean steps took more than {OUTLIER_RATIO:g} times the usual time and do "
            "not count."
        )
    if schedule.others:
        notes.append(f"Steps of another kind that came between clean ones, and do not count: {schedule.others}.")
    if in_graphs := graph_note(recorded.kernels):
        notes.append(in_graphs)
    return notes


def _profiler_runs() -> bool:
    return bool(torch._C._autograd._profiler_enabled())


def _gpu_was_used() -> bool:
    backend = gpu_in_use()
    return backend is not None and backend.peak_allocated_bytes() > 0
