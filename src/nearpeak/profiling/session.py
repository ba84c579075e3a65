"""`Session`: the steps of one run. It is told when each step ends, and times, profiles or traces the next one."""

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
from nearpeak.profiling.schedule import (
    CLEAN_STEPS,
    OUTLIER_RATIO,
    PROFILED_STEPS,
    ProfilerAction,
    Schedule,
    SchedulePhase,
)
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
    "clean": "timing clean steps",
    "profiler start": "starting the profiler",
    "profiled": "profiling a step",
    "traced": "tracing a step",
    "done": "everything needed has been recorded",
}

STEP_DEFINITION = (
    "A step ends with an optimizer's step, or with a module's call without gradients; --step MODULE:FUNCTION names a "
    "function each call of which is one."
)


class StopRun(BaseException):
    """Ends the profiled code once everything is recorded. Not an Exception, so that the code does not catch it."""


class Session:
    """The steps of one run. Errors of the session never reach the profiled code: they are in `problem`.

    With `stop`, `StopRun` ends the run once everything is recorded. Without `traces`, the caller traces a step itself
    when the phase is "traced", and passes the trace to `add_trace`.
    """

    def __init__(self, say: Progress, *, stop: bool = False, traces: bool = True) -> None:
        self.schedule = Schedule()
        self.steps: StepDetector | None = None
        """Finds the steps. While steps are timed, it looks for no new ones."""
        self.last_end = time.monotonic()
        """When the last step ended."""
        self.problem = ""
        self._say, self._stop, self._traces = say, stop, traces
        self._process = os.getpid()
        self._recorded: KinetoTrace | None = None
        self._profiled_wall = 0.0
        self._profiled_step = 0
        """The number of steps before the profiled one."""
        self._profiled: dict[int, tuple[float, int]] = {}
        """The wall time of profiled steps, and the number of steps before each, by the profiler's step number."""
        self._traced: Trace | None = None
        self._profiler: Profiler | None = None
        self._live: LiveTrace | None = None
        self._step_start = 0.0
        self._settling = False
        """Whether this step is the last before the clean ones."""
        self._events = StepEvents()
        """Before the first clean step and after each of them."""
        self._deferred_left = 0
        """The number of clean steps whose evaluation is deferred: it takes as long as a few ops."""
        self._deferred: list[tuple[float, int]] = []
        """When these steps ended, and the number of compiled graphs then."""
        self._last_kind: tuple[StepKind | None, bool] = None, False
        """The kind of the last evaluated step, and whether a profiler of the user's code was running."""
        self._warm_graphs: int | None = None
        """The number of compiled graphs when warm-up ended for the first time."""
        self._compiler: CompilerFacts | None = None
        self._rank: tuple[int, int] | None = None
        """The rank of the process and the number of ranks, when the step was profiled."""
        self._evaluation: StepRecords | None = None
        """Of steps before the first training step."""

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
        """The steps so far were an evaluation. They count only if no training step is recorded."""
        if self.schedule.steps == 0 or os.getpid() != self._process:
            return
        self._evaluation = self._records() or self._evaluation
        self.abandon()
        self.schedule, self._recorded, self._traced = Schedule(), None, None
        self._deferred_left, self._deferred = 0, []
        self._warm_graphs = self._compiler = None
        self._say("training begins: the steps before it do not count")

    def step_ends(self, kind: StepKind | None = None, *, between: Callable[[], object] | None = None) -> None:
        """Ends a step. `between` runs before the next one begins, and belongs to no step."""
        self.last_end = time.monotonic()
        if self.schedule.phase == "done" or self.problem or os.getpid() != self._process:  # a forked worker
            self.schedule.steps += 1
            if between is not None:
                between()
            return
        if (
            self._deferred_left > 1
            and between is None
            and not self._settling
            and (kind, _profiler_runs()) == self._last_kind
        ):
            self._deferred_left -= 1
            self._deferred.append((time.perf_counter(), compiled_graph_count()))
            self._events.record()
            return
        seen = self.schedule.steps
        try:
            self._advance(kind, between)
        except Exception as error:  # whatever it is, the profiled code must not end because of it
            self.schedule.steps = seen + 1
            self._give_up(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
        if self._stop and self.is_done:
            raise StopRun

    def add_trace(self, traced: Trace) -> None:
        """Adds the trace of a step that the caller ran."""
        self._set_trace(traced)
        self.schedule.step_ended(time.perf_counter())

    def abandon(self) -> None:
        """Stops the profiler or trace that is still running at the end of the code."""
        self._evaluate_deferred()
        profiler, self._profiler, live, self._live = self._profiler, None, self._live, None
        self._profiled = {}
        # If the device is lost, everything fails, and the code's own error says so.
        if profiler is not None:
            with suppress(Exception):
                profiler.discard()
        if live is not None:
            with suppress(Exception):
                live.stop()

    def records(self, source: str) -> StepRecords | None:
        """What a profile is assembled from; None if there were too few steps."""
        records = self._records() or self._evaluation
        return None if records is None else dataclasses.replace(records, source=source)

    def _records(self) -> StepRecords | None:
        if self._recorded is None or self._traced is None:
            return None
        rank, world_size = self._rank or (None, None)
        return StepRecords(
            source="",
            walls=tuple(self.schedule.typical_walls),
            wall_s=self.schedule.wall_s,
            recorded=self._recorded,
            profiled_wall=self._profiled_wall,
            traced=self._traced,
            host_ahead=self.schedule.host_ahead,
            notes=tuple(_notes(self.schedule, self._recorded)),
            compiler=self._compiler,
            rank=rank,
            world_size=world_size,
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
            seen += f", but {unused} calls of modules with gradients: run inference under torch.no_grad()"
        return (
            f"{seen}. A profile needs about twenty-five, or seven long ones: some to warm up, some for the wall time, "
            f"some to profile and one to trace. {STEP_DEFINITION} Run it for longer, or profile one step with "
            "nearpeak.profile(fn, *args)."
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
            self._begin_clean_steps(between)
            return
        if before in ("profiler start", "profiled", "traced"):  # the step ends with its last kernel
            synchronize()
        now = time.perf_counter()
        after = self._evaluate_deferred()
        if after == before and not schedule.again:
            self._last_kind = given, self._profiler is None and _profiler_runs()
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
            synchronize()
            # On a CPU, the work ends with the step, not with what was done here since.
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
                # The inline caches of the interpreter start empty after monitoring has changed: one step refills them.
                self._settling = after == "clean"
        if after != before or schedule.again:
            self._begin(after)
        if between is not None or (after == "clean" and (before != "clean" or schedule.again)):
            self._resume()
        if after == "clean":
            self._events.record()

    def _evaluate_deferred(self) -> SchedulePhase:
        """Evaluates the deferred clean steps, up to one that ends the phase or restarts it."""
        deferred, self._deferred = self._deferred, []
        self.schedule.again = False
        for position, (ended, graphs) in enumerate(deferred):
            after = self.schedule.step_ended(ended, _step_kind(*self._last_kind), graphs=graphs)
            if after != "clean" or self.schedule.again:
                self.schedule.steps += len(deferred) - position - 1
                break
        return self.schedule.phase

    def _begin_clean_steps(self, between: Callable[[], object] | None) -> None:
        if between is not None:
            synchronize()
            between()
        self._resume()
        self._events.record()

    def _resume(self) -> None:
        """Begins the next step now, with an idle device."""
        self._deferred_left = self.schedule.clean_steps_left
        self._events.prepare(CLEAN_STEPS + 1)
        synchronize()
        self.schedule.resumes(time.perf_counter())
        if not self.schedule.walls:
            self._events.clear()

    def _finish(self, now: float, kind: StepKind, graphs: int) -> bool:
        """Ends the profiling or tracing of the step that is over; returns whether the step can be used."""
        if self.schedule.phase == "profiled":
            return self._finish_profiled(now, kind, graphs)
        fits = self.schedule.fits(kind)
        if self.schedule.phase == "traced" and self._live is not None:
            traced = self._live.stop()
            self._live = None
            if fits:
                self._set_trace(traced)
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
            profiler.discard()
            return False
        try:
            recorded = profiler.stop(walls)
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
        self._recorded = recorded
        self._rank = distributed_rank()
        last = now - self._step_start, self.schedule.steps  # without kernels, the last step is read
        self._profiled_wall, self._profiled_step = walls.get(-1 if recorded.step is None else recorded.step, last)
        if self._compiler is not None:
            self._compiler = dataclasses.replace(self._compiler, breaks=graph_breaks_in(recorded.compiled_regions))
        return True

    def _set_trace(self, traced: Trace) -> None:
        self._traced = dataclasses.replace(traced, steps_since=self.schedule.steps - self._profiled_step)

    def _begin(self, phase: str) -> None:
        if phase in ("profiler start", "profiled"):
            # A second profiler would replace a running one, and the user's code would find its own one empty.
            if self._profiler is not None:
                self._profiler.next_step()
            elif not _profiler_runs():
                self._profiler = Profiler()
            # On a CPU, ops are the kernels, and there is no common clock to average over.
            self.schedule.most_profiled = PROFILED_STEPS if _gpu_was_used() else 1
            self._step_start = time.perf_counter()
        elif phase == "traced":
            if self._recorded is None:
                self._give_up("the code runs a profiler of its own in every step. Switch it off, and try again.")
            elif self._traces:
                self._live = LiveTrace()


def _step_kind(given: StepKind | None, recorded: bool) -> StepKind:
    return dataclasses.replace(given or StepKind(), recorded=recorded)


def _notes(schedule: Schedule, recorded: KinetoTrace) -> list[str]:
    notes = []
    left_out = len(schedule.walls) - len(schedule.typical_walls)
    if left_out:
        notes.append(
            f"{left_out} of {len(schedule.walls)} clean steps took more than {OUTLIER_RATIO:g} times the usual time "
            "and do not count."
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
