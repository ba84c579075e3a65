"""Step detection: calls a listener at the end of each step of code that knows nothing of it.

A training step ends with an optimizer's step, whatever came before it: several forward passes, where gradients are
accumulated. Code that never trains takes a step with each top-level call of a module without gradients: a batch, or a
token of a generated text. Code that takes gradients and has no optimizer, such as one that follows forces or updates
its weights by hand, takes a step from the start of one such call to the next. These ends are the marks of the program:
where it repeats several of them as one (`PeriodFinder`), that period is the step, and so is a turn of a loop around the
loops that call models, if much of its time is outside of these (`OuterLoop`). A user who knows better names a function,
each call of which is a step.

Top-level calls are those inside no other module's call. While modules are searched for, every call is looked at
(`trace/modules.py`); the class of a module with a top-level call then gets a `__call__` of its own, so that other
calls cost nothing once the search is over. Hooks would be part of the module: of its copies, of files that it is
saved to, and of what torch.compile makes of it.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import inspect
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import FrameType, FunctionType, MethodType
from typing import Any, NamedTuple, Protocol

import torch
from torch import distributed, nn
from torch._dynamo.callback import callback_handler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from nearpeak.trace.graphs import remember_graphs
from nearpeak.trace.guard import Guard, OwnThread, undone_in_child
from nearpeak.trace.loop_turns import LoopTurn, LoopTurns
from nearpeak.trace.modules import keep_calls_watchable, note_compiler, watch_module_calls
from nearpeak.trace.source import user_line
from nearpeak.units import seconds

SIZE_TOLERANCE = 0.25
"""Sizes that differ by less than this share are similar: a text grows by a token, a batch is padded differently."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepKind:
    """What was called in a step: a decoded token is no prompt, an evaluation no training step.

    >>> StepKind(shape=(1, 32)).is_similar(StepKind(shape=(1, 33)))
    True
    >>> StepKind(shape=(1, 32)).is_similar(StepKind(shape=(1, 1)))
    False
    """

    trained: int = 0
    """Top-level calls of modules with gradients enabled."""
    evaluated: int = 0
    """Top-level calls without gradients."""
    module: int = 0
    """The id of the called module, if each call is a step."""
    shape: tuple[int, ...] = ()
    """The shape of its smallest argument: the new tokens, where everything else grows with the text."""
    recorded: bool = False
    """Whether the code ran a profiler of its own."""
    captured: bool = False
    """Whether it captured a graph, whose ops do not run."""
    irregular: bool = False
    """Whether something else came between the parts of a period."""
    words: str = ""
    """What it is, for people: "a call of Net without gradients"."""

    def is_similar(self, other: StepKind) -> bool:
        """Whether a step of this kind may stand for one of the other."""
        exact = (self.module, self.recorded, self.captured, self.irregular, len(self.shape))
        if exact != (other.module, other.recorded, other.captured, other.irregular, len(other.shape)):
            return False
        sizes = zip(
            (self.trained, self.evaluated, *self.shape), (other.trained, other.evaluated, *other.shape), strict=True
        )
        return all(is_similar_size(size, other_size) for size, other_size in sizes)


def is_similar_size(first: int, second: int) -> bool:
    """0 and 1 are similar to themselves alone: a step with one evaluation is not like a step without."""
    low, high = min(first, second), max(first, second)
    return low == high or (low > 1 and high - low <= max(1.0, SIZE_TOLERANCE * high))


MAX_CALLS = 20
"""Code that calls more different modules at the top level of a training step has no single model: calls are no longer
counted."""
MANY_CALLS = 2
"""From so many calls without gradients on, their number does not distinguish one mark from another: episodes vary."""
CALLS_WITHOUT_OPTIMIZER = 4
"""After so many calls with gradients and no optimizer in the program, it trains otherwise, or not at all."""
MIN_STRAY_MARKS = 3
"""So many marks in a row that cut a period short, or come between two, may be an exception, such as the next text whose
tokens are generated; and as many as two periods have. After more, each mark ends a step again."""
TRAINING_WAIT_S = 60.0
"""How long an optimizer that exists may take until its first step, after calls without gradients were recorded."""
ROLLOUT_WAITS, MIN_ROLLOUT_WAIT_S = 10.0, 5.0
"""How long calls without gradients that came before the first training step may take to come again: so many times as
long as they took, and at least so long."""


class Awaited(NamedTuple):
    """What may come and make a longer step of those so far."""

    what: str = ""
    """ "" if nothing is expected."""
    seconds: float = 0.0
    """How long it may take."""
    is_loop: bool = False
    """Whether it is a loop, which may turn out to be no step before."""


class StepListener(Protocol):
    """Receives the events of a `StepDetector`."""

    def optimizer_begins(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """An optimizer starts its step; returns other arguments for it, or None."""

    def optimizer_ends(self) -> None:
        """An optimizer has finished its step."""

    def training_begins(self) -> None:
        """From now on steps end with an optimizer's step; those before were something else."""

    def period_begins(self, words: str) -> None:
        """From now on a step is another number of marks, which `words` names for people."""

    def step_ends(self, kind: StepKind) -> None:
        """A step is over, and the next one begins."""


class StepDetector:
    """Reports steps to a listener while it is open, through a guard: what fails here does not reach the code."""

    def __init__(self, listener: StepListener, guard: Guard | None = None) -> None:
        self._guard = guard or Guard()
        self.is_open = False
        self.has_step_function = False
        """Whether a function is the step; then no other steps are detected."""
        self._function_name = ""
        self.calls = TopLevelCalls(self._before_module, self._after_module, self._guard)
        self._listener = listener
        self._first: torch.optim.Optimizer | None = None
        """The optimizer whose step ends a step, if there are several."""
        self._original_step: Any = None
        """Its `step` in its `__dict__`, if it had one."""
        self._own_step: Any = None
        """What replaced it."""
        self._first_step_runs = False
        """Whether it runs its first step, which is not seen by what replaces its `step`."""
        self._hooks = ExitStack()
        self._hook_runs = False
        self._ended_in_backward: Hashable | None = None
        """A mark whose optimizer ran inside the backward pass: it ends when the pass is over."""
        self._open_call: Hashable | None = None
        """The mark of a call with gradients, which ends when the next call begins."""
        self._has_optimizer: bool | None = None
        """Whether there is one that has not stepped yet; None before that was looked for."""
        self._mark = StepUnit()
        """Since the last mark."""
        self._unit = StepUnit(marks=0)
        """Since the last step; the last mark, where each mark ends one."""
        self._finder = PeriodFinder()
        self._period: tuple[Hashable, ...] = ()
        """The marks of a step; () if each mark ends one."""
        self._outer: OuterLoop | None = OuterLoop()
        """None once no loop is looked for."""
        self._call_began: float | None = None
        """When the call that runs now began, if loops around it are still to be looked at."""
        self._loop = ""
        """The line of the loop of which each turn is a step."""
        self._thread: OwnThread | None = None
        """The thread of the first mark."""
        self._stray_marks = 0
        """Periods in a row that were cut short."""
        self._before_training: Rollout | None = None
        self._called_since = 0.0
        """When the first call without gradients ended."""
        self._last_called = ""
        """The class of the module of the last one."""
        self.unfinished_calls = 0
        """Top-level calls with gradients since the last step ended."""
        self.calls_by_module: Counter[int] = Counter()
        """Top-level calls of each module, by id, since an optimizer's step."""

    @property
    def trains(self) -> bool:
        """Whether an optimizer has taken a step."""
        return self._first is not None

    def awaited(self) -> Awaited:
        """What may come and make a longer step of those so far."""
        if self.has_step_function:
            return Awaited()
        is_known = bool(self._period or self._loop or self._finder.refused)
        if self._first is None:
            optimizer = "" if is_known else _live_optimizer()
            if optimizer:
                return Awaited(f"the first step of {optimizer}", TRAINING_WAIT_S)
            loop = self.awaited_loop
            return (
                Awaited(f"the next iterations of the loop at {loop}", MAX_PERIOD_S, is_loop=True) if loop else Awaited()
            )
        rollout = self._before_training
        if is_known or rollout is None:
            return Awaited()
        wait_s = min(max(ROLLOUT_WAITS * rollout.seconds, MIN_ROLLOUT_WAIT_S), TRAINING_WAIT_S)
        return Awaited(f"calls of {rollout.module} without gradients again", wait_s)

    @property
    def awaited_loop(self) -> str:
        """The line of a loop whose turns may be the steps, which a few more of them will show; "" if there is none."""
        return "" if self._outer is None or self.trains else self._outer.awaited

    def notes(self) -> tuple[str, ...]:
        """What a reader of the profile must know about what was taken as a step."""
        return (self._finder.refused,) if self._finder.refused and not self._loop else ()

    def mark(self, function: Any) -> Any:
        """Wraps a function so that each of its calls is a step; of nested calls only the outer one."""
        self.has_step_function = True
        self._function_name = str(getattr(function, "__qualname__", "the function"))
        return wrap_step_function(function, self._guard.wrap(self._after_function))

    @contextmanager
    def open(self) -> Iterator[None]:
        """Inside, steps are detected."""
        self._hooks.enter_context(remember_graphs())
        for register, hook in (
            (register_optimizer_step_pre_hook, self._before_optimizer),
            (register_optimizer_step_post_hook, self._after_optimizer),
        ):
            self._hooks.callback(register(self._in_hook(self._guard.wrap(hook))).remove)
        self.is_open = True
        with undone_in_child(self._restore), undone_in_child(self.calls.restore_classes):
            try:
                self.calls.open()
                yield
                self._guard.call(self._end_open_mark)  # a last step that ended inside the backward pass
            finally:
                self.is_open = False
                self.stop()

    def stop(self, *, until_training: bool = False) -> None:
        """Undoes all changes to classes and optimizers; no more steps are reported.

        With `until_training`, code that has not trained yet is watched again from its first training step on.
        """
        self._guard.call(self.calls.close)
        self._guard.call(self._restore)
        if until_training and self._first is None and not self.has_step_function:
            return
        if not self._hook_runs:  # torch goes through its hooks: the list must not change
            self._guard.call(self._hooks.close)

    def _in_hook(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            if torch.compiler.is_compiling():
                return None
            with self._guard.own_time():
                self._hook_runs = True
                try:
                    return hook(*args)
                finally:
                    self._hook_runs = False

        return run

    def _after_function(self) -> None:
        if self.is_open:
            self._listener.step_ends(StepKind(words=f"a call of {self._function_name}"))

    def _before_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        replaced = self._listener.optimizer_begins(optimizer, args, kwargs)
        if self._first is None and not self.has_step_function:
            self._begin_training(optimizer)
        return replaced

    def _begin_training(self, optimizer: torch.optim.Optimizer) -> None:
        self._first = optimizer
        self._first_step_runs = True
        self._open_call = None
        if self._finder.count >= MANY_CALLS:
            took = self._guard.program_time() - self._called_since
            self._before_training = Rollout(module=self._last_called, seconds=took)
            self._mark.evaluated = self._finder.count
        self._finder, self._period, self._unit, self._thread = PeriodFinder(), (), StepUnit(marks=0), None
        self._outer, self._loop = None, ""
        self.calls.open()
        self._report_after(optimizer)
        self._listener.training_begins()

    def _after_optimizer(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        self._listener.optimizer_ends()
        self._mark.steps[type(optimizer).__name__] += 1
        if optimizer is not self._first:
            self._mark.other_optimizers.append(id(optimizer))
        else:
            self.unfinished_calls = 0
            self.calls_by_module.clear()
            if self._first_step_runs:
                self._first_step_runs = False
                self._step_ended()

    def _restore(self) -> None:
        """Restores the `step` of the optimizer, unless a learning rate scheduler has replaced it since."""
        if self._first is not None and self._own_step is not None:
            if self._first.__dict__.get("step") is not self._own_step:
                return
            del self._first.step
            if self._original_step is not None:
                self._first.step = self._original_step  # type: ignore[method-assign]

    def _before_module(self) -> None:
        self._end_open_mark()
        self._call_began = None
        if self._outer is not None and self._first is None and not self.has_step_function and not _in_backward():
            began = self._guard.program_time()
            if self._loop:
                self._look_at_loops(self._outer, sys._getframe(1), began)
            else:  # when the call is over: a device that waits for its first kernel would wait for this too
                self._call_began = began

    def _look_at_loops(self, outer: OuterLoop, frame: FrameType, began: float) -> None:
        """A call began: it may be the first in a turn of a loop."""
        if self._thread is not None and not self._thread:
            return
        before = outer.turn
        outer.call_begins(frame, began)
        if self._loop and outer.turn != before and self._unit.marks:
            unit, self._unit = self._unit, StepUnit(marks=0)
            kind = unit.kind(self._loop)
            self._listener.step_ends(dataclasses.replace(kind, irregular=True) if before is None else kind)
        if outer.found is not None and outer.line != self._loop:
            if _many_ranks():  # which must agree
                self._outer = None
                return
            if len(self._period) >= outer.calls_in_turn:  # a turn is a period, and known as such
                outer.refuse()
                return
            self._loop, self._period, self._unit = outer.line, (), StepUnit(marks=0)
            self._listener.period_begins(f"each iteration of the loop at {outer.line} is a step")
        elif outer.is_settled:
            self._outer = None

    def _end_open_mark(self) -> None:
        if self._ended_in_backward is not None and not _in_backward():
            symbol, self._ended_in_backward = self._ended_in_backward, None
            self._end_mark(symbol)
        if self._open_call is not None and not _in_backward():
            symbol, self._open_call = self._open_call, None
            self._end_mark(symbol)
            self.unfinished_calls = 0

    def _after_module(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if self._call_began is not None and self._outer is not None:
            self._look_at_loops(self._outer, sys._getframe(1), self._call_began)
        self.calls_by_module[id(module)] += 1
        mark = self._mark
        mark.modules.add(id(module))
        if torch.is_grad_enabled():
            mark.trained += 1
            self.unfinished_calls += 1
            if self._first is None and not self.has_step_function and not _in_backward() and self._lacks_optimizer():
                mark.trained_calls[type(module).__name__] += 1
                self._open_call = mark.note_call(module, (*args, *kwargs.values()))
            return
        mark.evaluated += 1
        self._last_called = type(module).__name__
        mark.calls[self._last_called] += 1
        if self._first is None and not self.has_step_function:
            if not self._finder.count:
                self._called_since = self._guard.program_time()
            self._end_mark(mark.note_call(module, (*args, *kwargs.values())))

    def _lacks_optimizer(self) -> bool:
        """Whether the program has no optimizer; looked for once it has called modules with gradients for a while."""
        if self._has_optimizer is None and self.unfinished_calls >= CALLS_WITHOUT_OPTIMIZER:
            self._has_optimizer = bool(_live_optimizer())
        return self._has_optimizer is False

    def _end_mark(self, symbol: Hashable) -> None:
        """Reports the end of a step, unless the mark is in the midst of a period."""
        mark, self._mark = self._mark, StepUnit()
        if self._thread is None:
            self._thread = OwnThread()
        if not self._thread:  # the marks of several threads come in any order
            self._listener.step_ends(mark.kind())
            return
        if self._loop:
            self._unit.add(mark)
            return
        if self._period:
            self._end_in_period(symbol, mark)
            return
        self._period = self._finder.add(symbol, self._guard.program_time())
        if not self._period:
            self._unit = mark
            self._listener.step_ends(mark.kind())
            return
        self._unit = StepUnit(marks=0)
        self._listener.period_begins(
            f"the program repeats {len(self._period)} {'steps' if self.trains else 'calls'} as one: these are the step"
        )

    def _end_in_period(self, symbol: Hashable, mark: StepUnit) -> None:
        is_next = symbol == self._period[self._unit.marks]
        self._unit.add(mark)
        if is_next and self._unit.marks < len(self._period):
            return
        unit, self._unit = self._unit, StepUnit(marks=0)
        if is_next:
            self._stray_marks = 0
            self._listener.step_ends(unit.kind())
            return
        # Something else came between. The next period begins after it, or has begun with it.
        self._stray_marks += 1
        if self._stray_marks < max(MIN_STRAY_MARKS, 2 * len(self._period)):
            if symbol == self._period[0]:
                self._unit = mark
            self._listener.step_ends(dataclasses.replace(unit.kind(), irregular=True))
        else:
            self._period = ()
            self._listener.period_begins("what the program repeated has changed: each end of a step counts again")

    def _report_after(self, optimizer: torch.optim.Optimizer) -> None:
        """Replaces `step` of an optimizer, so that steps end after it and not in its hooks.

        Hooks run inside a range of the profiler, and a profiler that is started in one such range and stopped in
        another corrupts its memory. A learning rate scheduler may have replaced the method already, and one that is
        created later needs a method.
        """
        self._original_step = optimizer.__dict__.get("step")
        original = optimizer.step

        @functools.wraps(original)
        def step(_optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if not torch.compiler.is_compiling():
                with self._guard.own_time():
                    self._guard.call(self._step_ended)
            return result

        self._own_step = optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]

    def _step_ended(self) -> None:
        mark = self._mark
        symbol = min(mark.evaluated, MANY_CALLS), min(mark.trained, MANY_CALLS), tuple(mark.other_optimizers)
        if min(mark.evaluated, self._unit.evaluated) >= MANY_CALLS and self._finder.count > 1:
            self._before_training = None  # all training steps have as many such calls
        if len(mark.modules) > MAX_CALLS:
            self.calls.close()
        if self.has_step_function:
            self._mark = StepUnit()
        elif _in_backward():  # torch's profiler cannot be started or stopped here
            self._ended_in_backward = symbol
        else:
            self._end_mark(symbol)


@dataclass(slots=True)
class StepUnit:
    """What the program did from one mark to the next, or in a step of several marks."""

    marks: int = 1
    trained: int = 0
    """Top-level calls of modules with gradients enabled."""
    evaluated: int = 0
    """Top-level calls without gradients."""
    calls: Counter[str] = field(default_factory=Counter)
    """Those without gradients by the class of the module."""
    trained_calls: Counter[str] = field(default_factory=Counter)
    """Those with gradients by the class of the module, if each of them is a mark."""
    steps: Counter[str] = field(default_factory=Counter)
    """Steps by the class of the optimizer."""
    other_optimizers: list[int] = field(default_factory=list)
    """The optimizers beside the first that took a step, by id."""
    modules: set[int] = field(default_factory=set)
    """All modules with a top-level call, by id."""
    module: int = 0
    shape: tuple[int, ...] = ()

    def note_call(self, module: nn.Module, values: tuple[Any, ...]) -> Hashable:
        """Notes the call of a module that is a mark; returns what marks of this call have in common."""
        self.module, self.shape = id(module), _smallest_shape(values)
        return self.module, user_line()[0]

    def add(self, mark: StepUnit) -> None:
        """Adds what came until the next mark."""
        self.marks += 1
        self.trained += mark.trained
        self.evaluated += mark.evaluated
        self.calls += mark.calls
        self.trained_calls += mark.trained_calls
        self.steps += mark.steps
        self.module, self.shape = mark.module, mark.shape

    def kind(self, loop: str = "") -> StepKind:
        """The kind of step that it is; `loop` is the line of the loop of which it is a turn."""
        if loop:
            return StepKind(trained=self.trained, evaluated=self.evaluated, words=self.words(loop))
        if self.module:
            return StepKind(module=self.module, shape=self.shape, words=self.words())
        return StepKind(trained=self.trained, evaluated=self.evaluated, words=self.words())

    def words(self, loop: str = "") -> str:
        """What it is, for people."""
        calls = [_count(number, "call", name) for name, number in self.calls.items()]
        steps = [_count(number, "step", name) for name, number in self.steps.items()]
        trained = [_count(number, "call", name) for name, number in self.trained_calls.items()]
        if calls:
            calls[-1] += " without gradients"
        if trained:
            trained[-1] += " with gradients"
            calls += trained
        if loop:
            return f"an iteration of the loop at {loop}, with {_and([*calls, *steps])}"
        if self.marks > 1:
            return f"a period of {_and([*calls, *steps])}"
        if not steps:
            return _and(calls)
        *_, last = self.steps
        return f"a training step, up to the step of {last}" + (f", with {_and(calls)}" if calls else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """Calls without gradients before the first training step: an evaluation, or a part of each step that recurs."""

    module: str
    seconds: float


def _count(number: int, noun: str, name: str) -> str:
    return f"a {noun} of {name}" if number == 1 else f"{number} {noun}s of {name}"


def _and(parts: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(parts[:-1]), *parts[-1:]]))


def _live_optimizer() -> str:
    """The class of an optimizer that exists; "" if there is none."""
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.optim.Optimizer):
            return type(thing).__name__
    return ""


def _many_ranks() -> bool:
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


@contextmanager
def detect_steps(listener: StepListener, guard: Guard | None = None) -> Iterator[StepDetector]:
    """Inside, steps are reported to `listener`."""
    detector = StepDetector(listener, guard)
    with detector.open():
        yield detector


def wrap_step_function(function: Any, ended: Callable[[], object]) -> Any:
    """A function that calls `ended` after each outermost call of `function` that does not raise."""
    if isinstance(function, (staticmethod, classmethod)):
        return type(function)(wrap_step_function(function.__func__, ended))
    depth = 0

    @contextmanager
    def counted_call() -> Iterator[None]:
        nonlocal depth
        depth += 1
        try:
            yield
        finally:
            depth -= 1
        if depth == 0:
            ended()

    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def awaited(*args: Any, **kwargs: Any) -> Any:
            with counted_call():
                return await function(*args, **kwargs)

        return awaited

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        with counted_call():
            return function(*args, **kwargs)

    return called


def _smallest_shape(values: tuple[Any, ...]) -> tuple[int, ...]:
    """The shape of the smallest tensor with at least two dimensions, or with fewer if there is no such tensor.

    It runs in every inference step: a loop takes a third of the time of `min` with a key.
    """
    smallest: torch.Tensor | None = None
    smallest_size = (True, 0)
    for value in values:
        if isinstance(value, torch.Tensor) and not value.is_nested:
            size = (value.dim() < 2, value.numel())
            if smallest is None or size < smallest_size:
                smallest, smallest_size = value, size
    return () if smallest is None else tuple(smallest.shape)


_OWN = "__nearpeak__"
"""The mark of a `__call__` of ours."""
CallEnded = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]


class TopLevelCalls:
    """While it is open, `begins` is called before each top-level call, and `ended` after each that did not raise."""

    def __init__(self, begins: Callable[[], None], ended: CallEnded, guard: Guard) -> None:
        self._guard = guard
        self._begins = guard.wrap(begins)
        self._ended = guard.wrap(ended)
        self._depth = 0
        self._nested = 0
        self._first: tuple[nn.Module, tuple[Any, ...]] | None = None
        self._classes: dict[type[nn.Module], Any] = {}
        """Classes with a patched `__call__`, and the one that they defined themselves."""
        self._search = ExitStack()
        self._kept = ExitStack()
        """Beginning and ending to search would make the program slower for a while."""
        self._is_open = False

    def open(self) -> None:
        """Begins to search for top-level calls."""
        if self._is_open:
            return
        self._is_open = True
        self._kept.enter_context(keep_calls_watchable())
        self._watch_compiler()
        self.search(True)

    def _watch_compiler(self) -> None:
        if self._before_compiling not in callback_handler.start_callbacks:  # torch._dynamo.reset() clears them
            callback_handler.register_start_callback(self._before_compiling)
            callback_handler.register_end_callback(self._after_compiling)
        note_compiler()

    def close(self) -> None:
        """Restores all classes."""
        self._is_open = False
        self._search.close()
        self._kept.close()
        for callbacks, callback in (
            (callback_handler.start_callbacks, self._before_compiling),
            (callback_handler.end_callbacks, self._after_compiling),
        ):
            if callback in callbacks:  # torch._dynamo.reset() clears them
                callbacks.remove(callback)
        self._unpatch()
        self._classes.clear()

    def search(self, on: bool) -> None:
        """Starts or stops to look for classes that were not called before, which slows every call down."""
        self._search.close()
        self._nested, self._first = 0, None
        if on and self._is_open:
            before, after = self._guard.wrap(self._before_any_call), self._guard.wrap(self._after_any_call)
            self._search.enter_context(watch_module_calls(before, after))

    def _before_any_call(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self._depth == 0 and self._nested == 0 and type(module) not in self._classes:
            self._begins()
            self._first = module, args
            self._classes[type(module)] = vars(type(module)).get("__call__")
            _set_class_call(type(module), self._call_of(type(module)))
        self._nested += 1

    def _after_any_call(self, _module: nn.Module) -> None:
        self._nested = max(0, self._nested - 1)
        if self._nested == 0 and self._first is not None:
            module, args = self._first
            self._first = None
            self._ended(module, args, {})

    def _call_of(self, kind: type[nn.Module]) -> Callable[..., Any]:
        own_call = self._classes[kind]
        above = next(base for base in kind.__mro__[1:] if "__call__" in vars(base))

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            original = above.__call__ if own_call is None else own_call
            if torch.compiler.is_compiling() or self._depth or self._nested or not self._is_open:
                # A model may have hundreds of modules of one class: this takes part of every such call.
                if type(original) is FunctionType:
                    return original(module, *args, **kwargs)
                return original.__get__(module, kind)(*args, **kwargs)  # any descriptor may be a method
            with self._guard.own_time():
                original = original.__get__(module, kind)
                self._watch_compiler()
                self._begins()
            self._depth += 1
            try:
                result = original(*args, **kwargs)
            finally:
                self._depth -= 1
            with self._guard.own_time():
                self._ended(module, args, kwargs)
            return result

        setattr(call, _OWN, True)
        return call

    def _before_compiling(self, _: Any) -> None:
        self._guard.call(self._unpatch)

    def _after_compiling(self, _: Any) -> None:
        self._guard.call(self._patch)

    def _unpatch(self) -> None:
        self._guard.call(self.restore_classes)

    def restore_classes(self) -> None:
        for kind, own_call in self._classes.items():
            if getattr(vars(kind).get("__call__"), _OWN, False):  # else the program has replaced it meanwhile
                _set_class_call(kind, own_call)

    def _patch(self) -> None:
        for kind, own_call in self._classes.items():
            if vars(kind).get("__call__") is own_call:
                self._guard.call(_set_class_call, kind, self._call_of(kind))


def _set_class_call(kind: type[nn.Module], call: Any) -> None:
    """By `type` itself: a metaclass of the program may refuse or count what is set."""
    if call is not None:
        type.__setattr__(kind, "__call__", call)
    elif "__call__" in vars(kind):
        type.__delattr__(kind, "__call__")


MAX_MARKS = 128
"""Of a period, and more cannot be told from epochs."""
MAX_PERIOD_S = 10.0
"""A longer period cannot be afforded: a profile needs about ten of them."""
MIN_REST_SHARE = 0.2
"""Of the time of a period that marks of its most frequent kind must leave: otherwise these are the step, and the rest
is an exception, such as an evaluation once in an epoch."""
MIN_REST_MARKS = 1 / 3
"""Of the marks of a period: so many are no exception, though they take no time, such as the drafts of a small model
that a large one checks."""
_SHORT = 8
"""Periods of fewer marks are seen three times before they count, longer ones twice."""
_HISTORY = 8 * MAX_MARKS


class PeriodFinder:
    """Is told of each mark, and knows the period as soon as it was seen often enough.

    A mark is the end of a training step, or of a call without gradients. A program may repeat several of them as one: a
    rollout before many optimizer steps, five steps of a critic and one of a generator, a guided and a free pass of a
    denoiser. The period is the number of marks that explains most of the sequence so far, back from its last mark.

    >>> finder = PeriodFinder()
    >>> [finder.add(symbol, float(second)) for second, symbol in enumerate("xabbabbabb")][-2:]
    [(), ('a', 'b', 'b')]
    """

    def __init__(self) -> None:
        self._symbols: list[Hashable] = []
        self._ends: list[float] = []
        self._agreeing: list[int] = [0]
        """For each distance: how many of the last marks are the same as the one so many before them."""
        self._constant = 0
        """The marks of one kind before any other."""
        self.refused = ""
        """Why a period is not the step, for people."""

    @property
    def count(self) -> int:
        """The number of marks so far."""
        return len(self._symbols)

    def add(self, symbol: Hashable, now: float) -> tuple[Hashable, ...]:
        """The marks of a period that ends with this one, if it is to be the step; () if each mark is a step of its own.

        `now` is in seconds of any clock.
        """
        symbols = self._symbols
        if len(symbols) >= _HISTORY:
            return ()
        symbols.append(symbol)
        self._ends.append(now)
        if self._constant == len(symbols) - 1 and symbol == symbols[0]:
            self._constant += 1
            return ()
        if len(self._agreeing) == 1:  # the first of another kind: so far every distance agreed
            self._agreeing += [max(0, self._constant - distance) for distance in range(1, MAX_MARKS + 1)]
        best, explained = 0, 0
        for distance in range(1, min(MAX_MARKS, len(symbols) - 1) + 1):
            agreeing = self._agreeing[distance] + 1 if symbols[-1 - distance] == symbol else 0
            self._agreeing[distance] = agreeing
            if agreeing >= distance and agreeing + distance > explained:
                best, explained = distance, agreeing + distance
        times = 3 if best < _SHORT else 2
        if best < 2 or explained < times * best or explained % best:
            return ()
        self.refused = self._refusal(best, times)
        return () if self.refused else tuple(symbols[-best:])

    def _refusal(self, period: int, times: int) -> str:
        """Why a period is not the step: it is too long, or its most frequent mark is nearly all of it."""
        if len(self._ends) <= times * period:  # the first mark has no beginning
            times -= 1
        took = [
            min(self._took(len(self._ends) - 1 - place - turn * period) for turn in range(times))
            for place in range(period)
        ]  # what nearpeak records in some of them makes those longer
        marks = self._symbols[-period:][::-1]
        whole_s = sum(took)
        if whole_s > MAX_PERIOD_S:
            return (
                f"The program repeats every {period} steps: {seconds(whole_s)} are too long to be profiled as one step."
            )
        frequent = Counter(marks).most_common(1)[0][0]
        rest = [taken for taken, mark in zip(took, marks, strict=True) if mark != frequent]
        rest_s = sum(rest)
        if rest_s >= MIN_REST_SHARE * whole_s or len(rest) >= MIN_REST_MARKS * period:
            return ""
        return (
            f"Once in {period} steps the program does something else, which is not in the step: "
            f"{rest_s / whole_s:.0%} of the time."
        )

    def _took(self, index: int) -> float:
        return self._ends[index] - self._ends[index - 1]


TURNS = 2
"""So many must have ended: what is recorded meanwhile makes one of them longer."""
LONELY_CALLS = 64
"""After so many calls that no two loops are around, none is expected any more."""


@dataclass(slots=True)
class _Turn:
    """A turn of a loop, from its first call to that of the next turn."""

    inner: dict[int, list[float]] = field(default_factory=dict)
    """Seconds from call to call, by the run of the loop inside of it that both are in."""
    rest_s: float = 0.0
    """From other calls to the next one."""
    calls: int = 0

    @property
    def rest(self) -> float:
        """Without the last call of each run of a loop inside of it, which is that loop's."""
        return self.rest_s - sum(statistics.median(gaps) for gaps in self.inner.values())

    @property
    def inside(self) -> float:
        """In loops inside of it."""
        return sum(sum(gaps) + statistics.median(gaps) for gaps in self.inner.values())


class OuterLoop:
    """The loop each turn of which is a step, where models are called in loops inside of it: is told of each call.

    A server reads a request and samples 24 values for it, one call of a model after the other; a solver takes as many
    steps as its error asks for. What runs once in a request is in no call and recurs after any number of them, so that
    no period of the calls shows it (`PeriodFinder`). The loops do: where the calls come from is compared from one to
    the next, as it is for the ops of a trace (`LoopTurns`).
    """

    def __init__(self) -> None:
        self._turns = LoopTurns()
        self._thread: OwnThread | None = None
        """That of the first call: those of others come in any order."""
        self._path: tuple[LoopTurn, ...] = ()
        """The loops around the last call, the outermost first."""
        self._now = 0.0
        self._open: dict[int, _Turn] = {}
        """The turns around the last call, by the runs of their loops."""
        self._ended: dict[int, list[_Turn]] = {}
        self._around: set[int] = set()
        """Loops that calls were in within another loop."""
        self._refused: set[int] = set()
        self._calls = 0
        self.found: int | None = None
        """The number of the loop each turn of which is a step."""
        self.line = ""
        """Its line."""
        self.calls_in_turn = 0
        """Of that loop."""

    def call_begins(self, frame: FrameType, now: float) -> None:
        """A call begins, below `frame`. `now` is in seconds of any clock."""
        if self._thread is None:
            self._thread = OwnThread()
        if not self._thread:
            return
        path = self._turns.around(frame)
        before, after = self._path, path
        gap, self._path, self._now = now - self._now, path, now
        self._calls += 1
        self._around.update(each.loop for each in path[:-1])
        common = 0
        while common < min(len(before), len(after)) and before[common].run == after[common].run:
            common += 1
        for depth, item in enumerate(after):
            if depth >= common:
                self._open[item.run] = _Turn(calls=1)
                continue
            turn = self._open[item.run]
            if turn.calls > MAX_MARKS:
                self._refused.add(item.loop)
            elif depth + 1 < common:
                turn.inner.setdefault(after[depth + 1].run, []).append(gap)
            else:
                turn.rest_s += gap
            if item.turn == before[depth].turn:
                turn.calls += 1
                continue
            self._open[item.run] = _Turn(calls=1)
            if not any(each.loop == self.found for each in after[:depth]):
                self._turn_ended(item.loop, turn)
        for item in before[common:]:
            self._open.pop(item.run, None)

    @property
    def turn(self) -> tuple[int, int] | None:
        """The turn of the loop that was found: its run and its number; None outside of the loop."""
        return next(((each.run, each.turn) for each in self._path if each.loop == self.found), None)

    @property
    def awaited(self) -> str:
        """The line of the outermost loop that may be the step, which more of its turns will show; "" if none."""
        for item in self._path[:-1] if self.found is None else ():
            if item.loop not in self._refused:
                return self._turns.line_of(item.loop)
        return ""

    @property
    def is_settled(self) -> bool:
        """Whether nothing more will be found."""
        return self.found is None and self._around <= self._refused and self._calls > LONELY_CALLS

    def refuse(self) -> None:
        """The loop that was found shall be none."""
        if self.found is not None:
            self._refused.add(self.found)
            self.found = None

    def _turn_ended(self, loop: int, turn: _Turn) -> None:
        if loop == self.found or loop in self._refused:
            return
        turns = self._ended.setdefault(loop, [])
        turns.append(turn)
        if len(turns) < TURNS:
            return
        rest, inside = min(each.rest for each in turns), min(each.inside for each in turns)
        if (
            all(each.inner for each in turns)
            and rest >= MIN_REST_SHARE * (rest + inside)
            and rest + inside <= MAX_PERIOD_S
        ):
            self.found, self.line = loop, self._turns.line_of(loop)
            self.calls_in_turn = min(each.calls for each in turns)
        else:
            self._refused.add(loop)
