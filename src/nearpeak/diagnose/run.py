"""`profile`: runs a step that it is given, measures it, and accounts for its time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from nearpeak.bound.times import Ceilings
from nearpeak.capture.machine import machine as find_machine
from nearpeak.capture.trace import trace
from nearpeak.diagnose.captured import Captured, Profiler, synchronize
from nearpeak.diagnose.profile import Profile
from nearpeak.diagnose.schedule import Schedule
from nearpeak.machines.model import Machine
from nearpeak.measure.case import Case, as_case
from nearpeak.measure.options import Progress


def profile(
    fn: Callable[..., Any] | Case,
    *args: Any,
    on: str | Machine | None = None,
    ceilings: Ceilings = "achievable",
    progress: Progress | None = None,
) -> Profile:
    """Where the time of `fn(*args)` goes: a whole training step, or anything else that is one step.

    It is run some fifteen times: to warm up, for its wall time, twice under torch's profiler for the time of each op,
    and once under a trace for the bounds. All of these are real runs, on the real tensors.

    Args:
        fn: One step, or a `Case`.
        args: Its arguments.
        on: The machine whose bounds count: one of the catalogue by name, a `Machine`, or None for this machine.
        ceilings: Against what the machine achieves, or against its datasheet.
        progress: Called with a line of text now and then.
    """
    case = as_case(fn, args, {})
    say = progress or (lambda line: None)
    machine = on if isinstance(on, Machine) else find_machine(on, progress=progress)
    schedule = Schedule()
    say("warming up")
    while schedule.phase in ("warm-up", "clean"):
        before = schedule.phase
        _run(case)
        if schedule.step_ended(time.perf_counter()) != before and schedule.phase == "clean":
            say("taking the time of clean steps")
    say("profiling a step")
    profiler = Profiler()
    _run(case)  # the profiler's own start is not in the step that counts
    profiler.stop()
    profiler = Profiler()
    start = time.perf_counter()
    _run(case)
    profiled_wall = time.perf_counter() - start
    recorded = profiler.stop()
    say("tracing a step")
    traced = trace(case.fn, *case.args, kwargs=dict(case.kwargs), live=True)
    captured = Captured(
        source=case.name, walls=tuple(schedule.walls), recorded=recorded, profiled_wall=profiled_wall, traced=traced
    )
    return captured.profile(machine, ceilings=ceilings)


def _run(case: Case) -> None:
    case.call()
    synchronize()
