"""`profile`: profiles a callable, or the steps of a block of code."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Self, TypeVar, overload

from nearpeak._display import headline
from nearpeak.bound.roofline import Ceilings
from nearpeak.calibrate.machine import machine as find_machine
from nearpeak.errors import EnvironmentProblem, UsageError
from nearpeak.machines.machine import Machine
from nearpeak.measure.case import Case, as_case
from nearpeak.measure.options import Progress
from nearpeak.ops.op import Trace
from nearpeak.profiles.profile import Profile
from nearpeak.profiling.session import Session
from nearpeak.profiling.steps import StepDetector
from nearpeak.profiling.torch_profiler import initialize_kineto
from nearpeak.trace.graphs import remember_graphs
from nearpeak.trace.source import user_line
from nearpeak.trace.trace import UnrecordedOps, trace

F = TypeVar("F", bound=Callable[..., Any])


class ProfiledBlock:
    """A block of code whose steps are profiled: `with nearpeak.profile() as run: ...`, and `run.profile` afterwards.

    Steps are detected as in a script. `@run.step` declares a function instead, each call of which is a step.
    """

    def __init__(self, *, on: str | Machine | None, ceilings: Ceilings, progress: Progress | None, name: str) -> None:
        self._on = on if on is None or isinstance(on, Machine) else find_machine(on)
        self._ceilings, self._progress, self._name = ceilings, progress, name
        self._session = Session(progress or (lambda line: None))
        self._session.steps = self._steps = StepDetector(self._session, self._session.guard)
        self._opened = ExitStack()
        self._profile: Profile | None = None

    def __repr__(self) -> str:
        return headline(f"ProfiledBlock {self._name}: {self._session.steps_seen} steps; its result is `.profile`")

    def step(self, function: F) -> F:
        """Declares a function: each call inside the block is a step, and no others are detected."""
        marked: F = self._steps.mark(function)
        return marked

    def __enter__(self) -> Self:
        if self._session.schedule.steps:
            raise UsageError("A block is profiled once: call nearpeak.profile() for each.")
        initialize_kineto()
        self._opened.enter_context(self._steps.open())
        self._opened.enter_context(self._session.loaders.watching())
        return self

    def __exit__(self, *error: object) -> None:
        self._opened.close()
        self._session.abandon()

    @property
    def is_one_step(self) -> bool:
        """Whether the block was no loop: it took one training step or none, and called no module twice beside it."""
        steps = self._session.steps_seen if self._steps.trains else 0
        return steps + max(self._steps.calls_by_module.values(), default=0) <= 1

    @property
    def profile(self) -> Profile:
        """The profile of one step of the block; the error says what is missing if there were too few."""
        if self._profile is None:
            self._profile = _assemble_profile(self._session, self._name, self._on, self._ceilings, self._progress)
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
    """Profiles `fn(*args)`: a whole training step, or anything else that is one step.

    It runs about twenty times: to warm up, for the wall time, under torch's profiler for the time of each op, and once
    under a trace for the bounds. All of these are real runs on the real tensors. Without `fn`, a block of code is
    profiled: `with nearpeak.profile() as run: ...` detects the steps in it, and `run.profile` is the result.

    Args:
        fn: One step, or a `Case`.
        args: Its arguments.
        on: The machine that the bounds are for: a name of the catalogue, a `Machine`, or None for this machine.
        ceilings: The achievable ceilings of the machine, or those of its datasheet.
        progress: Called with lines of text.
    """
    if fn is None:
        return ProfiledBlock(on=on, ceilings=ceilings, progress=progress, name=user_line()[0] or "the block")
    case = as_case(fn, args, {})
    say = progress or (lambda line: None)
    machine = on if isinstance(on, Machine) else find_machine(on, progress=progress)
    session = Session(say, traces=False)
    say("warming up")
    if case.reset is not None:
        case.reset()
    try:
        with remember_graphs(), session.loaders.watching():
            while session.schedule.phase != "traced" and not session.problem:
                case.call()
                session.step_ends(between=case.reset)
            if not session.problem:
                session.add_trace(_trace_step(case))
        if session.schedule.phase == "clean again" and case.reset is not None:
            case.reset()
        while session.schedule.phase == "clean again" and not session.problem:
            case.call()
            session.step_ends(between=case.reset)
    finally:
        session.abandon()
    return _assemble_profile(session, case.name, machine, ceilings, progress)


def _trace_step(case: Case) -> Trace | str:
    """The trace of a step, or why there is none: the step is worth a profile without it."""
    try:
        return trace(
            case.fn, *case.args, kwargs=dict(case.kwargs), live=True, keep_compiled=True, next_step=case.reset is None
        )
    except UnrecordedOps as error:
        return str(error)


def _assemble_profile(
    session: Session, name: str, machine: Machine | None, ceilings: Ceilings, progress: Progress | None
) -> Profile:
    records = session.records(name)
    if records is not None:
        return records.profile(machine or find_machine(progress=progress), ceilings=ceilings)
    raise (EnvironmentProblem if session.problem else UsageError)(session.missing_reason(name))
