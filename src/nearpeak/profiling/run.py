"""`profile`: runs a step that it is given, or watches a block of code, and accounts for the time of a step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Self, TypeVar, overload

from nearpeak.bound.roofline import Ceilings
from nearpeak.calibrate.machine import machine as find_machine
from nearpeak.errors import EnvironmentProblem, UsageError
from nearpeak.machines.machine import Machine
from nearpeak.measure.case import Case, as_case
from nearpeak.measure.options import Progress
from nearpeak.profiles.profile import Profile
from nearpeak.profiling.session import Session
from nearpeak.profiling.steps import StepDetector
from nearpeak.trace.source import user_line
from nearpeak.trace.trace import trace

F = TypeVar("F", bound=Callable[..., Any])


class ProfiledBlock:
    """A block of code whose steps are watched: `with nearpeak.profile() as run: ...`, and `run.profile` after it.

    Steps are found as in a script. `@run.step` marks a function instead, each call of which is one.
    """

    def __init__(self, *, on: str | Machine | None, ceilings: Ceilings, progress: Progress | None, name: str) -> None:
        self._on = on if on is None or isinstance(on, Machine) else find_machine(on)
        self._ceilings, self._progress, self._name = ceilings, progress, name
        self._watch = Session(progress or (lambda line: None))
        self._watch.steps = self._steps = StepDetector(self._watch)
        self._opened = ExitStack()
        self._profile: Profile | None = None

    def step(self, function: F) -> F:
        """Marks a function: each of its calls inside the block is a step, and no others are looked for."""
        marked: F = self._steps.mark(function)
        return marked

    def __enter__(self) -> Self:
        if self._watch.schedule.steps:
            raise UsageError("A block is profiled once: call nearpeak.profile() for each.")
        self._opened.enter_context(self._steps.open())
        return self

    def __exit__(self, *error: object) -> None:
        self._opened.close()
        self._watch.abandon()

    @property
    def profile(self) -> Profile:
        """Of one of the block's steps; an error says what was missing where there were too few."""
        if self._profile is None:
            self._profile = _assemble_profile(self._watch, self._name, self._on, self._ceilings, self._progress)
        return self._profile


@overload
def profile(
    *, on: str | Machine | None = None, ceilings: Ceilings = "achievable", progress: Progress | None = None
) -> ProfiledBlock: ...
@overload
def profile(
    fn: Callable[..., Any] | Case,
    *args: Any,
    on: str | Machine | None = None,
    ceilings: Ceilings = "achievable",
    progress: Progress | None = None,
) -> Profile: ...
def profile(
    fn: Callable[..., Any] | Case | None = None,
    *args: Any,
    on: str | Machine | None = None,
    ceilings: Ceilings = "achievable",
    progress: Progress | None = None,
) -> Profile | ProfiledBlock:
    """Where the time of `fn(*args)` goes: a whole training step, or anything else that is one step.

    It is run some twenty times: to warm up, for its wall time, under torch's profiler for the time of each op, and once
    under a trace for the bounds. All of these are real runs, on the real tensors. Without `fn`, a block of
    code is watched: `with nearpeak.profile() as run: ...` finds the steps in it, and `run.profile` is the result.

    Args:
        fn: One step, or a `Case`.
        args: Its arguments.
        on: The machine whose bounds count: one of the catalogue by name, a `Machine`, or None for this machine.
        ceilings: Against what the machine achieves, or against its datasheet.
        progress: Called with a line of text now and then.
    """
    if fn is None:
        return ProfiledBlock(on=on, ceilings=ceilings, progress=progress, name=user_line()[0] or "the block")
    case = as_case(fn, args, {})
    say = progress or (lambda line: None)
    machine = on if isinstance(on, Machine) else find_machine(on, progress=progress)
    watch = Session(say, traces=False)
    say("warming up")
    if case.reset is not None:
        case.reset()
    try:
        while watch.schedule.phase != "traced" and not watch.problem:
            case.call()
            watch.step_ends(between=case.reset)
        if not watch.problem:
            watch.keep(trace(case.fn, *case.args, kwargs=dict(case.kwargs), live=True, as_it_runs=True))
    finally:
        watch.abandon()
    return _assemble_profile(watch, case.name, machine, ceilings, progress)


def _assemble_profile(
    watch: Session, name: str, machine: Machine | None, ceilings: Ceilings, progress: Progress | None
) -> Profile:
    captured = watch.captured(name)
    if captured is not None:
        return captured.profile(machine or find_machine(progress=progress), ceilings=ceilings)
    raise (EnvironmentProblem if watch.problem else UsageError)(watch.missing_reason(name))
