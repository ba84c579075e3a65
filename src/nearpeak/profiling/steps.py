"""Step detection: calls a listener at the end of each step of code that knows nothing of it.

A training step ends with an optimizer's step, whatever came before it: several forward passes, where gradients are
accumulated. Code that never trains takes a step with each top-level call of a module without gradients: a batch, or a
token of a generated text. A user who knows better names a function, each call of which is a step.

Top-level calls are those inside no other module's call. While modules are searched for, every call is looked at
(`trace/modules.py`); the class of a module with a top-level call then gets a `__call__` of its own, so that other
calls cost nothing once the search is over. Hooks would be part of the module: of its copies, of files that it is
saved to, and of what torch.compile makes of it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any, Protocol

import torch
from torch import nn
from torch._dynamo.callback import callback_handler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from nearpeak.trace.modules import watch_module_calls

SIZE_TOLERANCE = 0.25
"""Sizes that differ by less than this are alike: a text grows by a token, a batch is padded to another length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepKind:
    """What was called in a step. Steps of one kind are alike: a decoded token is no prompt, an evaluation no training.

    >>> StepKind(shape=(1, 1)).alike(StepKind(shape=(1, 32))), StepKind(shape=(1, 32)).alike(StepKind(shape=(1, 33)))
    (False, True)
    """

    trained: int = 0
    """Calls of outermost modules with gradients."""
    evaluated: int = 0
    """Those without."""
    module: int = 0
    """Which module was called, where each call is a step."""
    shape: tuple[int, ...] = ()
    """Of the smallest tensor that it was given: new tokens, where everything else grows with the text."""
    recorded: bool = False
    """Whether a profiler of the code's own was running."""

    def alike(self, other: StepKind) -> bool:
        """Whether a step of this kind may stand for one of the other."""
        if (self.module, self.recorded, len(self.shape)) != (other.module, other.recorded, len(other.shape)):
            return False
        sizes = zip(
            (self.trained, self.evaluated, *self.shape), (other.trained, other.evaluated, *other.shape), strict=True
        )
        return all(_similar_size(size, other_size) for size, other_size in sizes)


def _similar_size(first: int, second: int) -> bool:
    """Nothing is near to none or one: a step with one evaluation is not like a step without."""
    low, high = min(first, second), max(first, second)
    return low == high or (low > 1 and high - low <= max(1.0, SIZE_TOLERANCE * high))


CallEnded = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]


class TopLevelCalls:
    """While it is open, `ended` is told each outermost call that ended without an error."""

    def __init__(self, ended: CallEnded) -> None:
        self._ended = ended
        self._depth = 0
        self._nested = 0
        self._first: tuple[nn.Module, tuple[Any, ...]] | None = None
        self._classes: dict[type[nn.Module], Any] = {}
        """Those with a `__call__` of ours, and the one that they had themselves."""
        self._search = ExitStack()
        self._is_open = False

    def open(self) -> None:
        """Begins."""
        self._is_open = True
        callback_handler.register_start_callback(self._hide)
        callback_handler.register_end_callback(self._show)
        self.search(True)

    def close(self) -> None:
        """Leaves everything as it was, for good."""
        self._is_open = False
        self._search.close()
        for callbacks, callback in (
            (callback_handler.start_callbacks, self._hide),
            (callback_handler.end_callbacks, self._show),
        ):
            if callback in callbacks:  # torch._dynamo.reset() forgets them all
                callbacks.remove(callback)
        self._hide()
        self._classes.clear()

    def search(self, on: bool) -> None:
        """Whether to look for modules that were not called before: this makes every call slower."""
        self._search.close()
        self._nested, self._first = 0, None
        if on and self._is_open:
            self._search.enter_context(watch_module_calls(self._before_any_call, self._after_any_call))

    def _before_any_call(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self._depth == 0 and self._nested == 0 and type(module) not in self._classes:
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
            if self._depth or self._nested or torch.compiler.is_compiling():
                return original(module, *args, **kwargs)
            self._depth += 1
            try:
                result = original(module, *args, **kwargs)
            finally:
                self._depth -= 1
            self._ended(module, args, kwargs)
            return result

        return call

    def _hide(self, _: Any = None) -> None:
        for kind, own_call in self._classes.items():
            _set_class_call(kind, own_call)

    def _show(self, _: Any = None) -> None:
        for kind in self._classes:
            _set_class_call(kind, self._call_of(kind))


def _set_class_call(kind: type[nn.Module], call: Any) -> None:
    if call is not None:
        kind.__call__ = call  # type: ignore[method-assign]
    elif "__call__" in vars(kind):
        del kind.__call__


MAX_CALLS = 20
"""Code with more outermost calls in a training step has no model: counting them would cost more than it tells."""


class StepListener(Protocol):
    """Who is told about steps."""

    def optimizer_begins(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer starts its step."""

    def optimizer_ends(self) -> None:
        """It is done."""

    def training_begins(self) -> None:
        """Steps end with an optimizer's from now on; those before were something else."""

    def step_ends(self, kind: StepKind) -> None:
        """A step is over, and the next one begins."""


class StepDetector:
    """Tells a watcher about steps while it is open."""

    def __init__(self, watcher: StepListener) -> None:
        self.is_open = False
        self.told = False
        """Whether functions are marked; then no steps are looked for."""
        self.calls = TopLevelCalls(self._module_ended)
        self._watcher = watcher
        self._first: torch.optim.Optimizer | None = None
        """The optimizer that ends the steps, where there are several."""
        self._before: Any = None
        """The method that it had of its own."""
        self._trained = 0
        self._evaluated = 0
        self.unused = 0
        """Calls with gradients that no step has ended yet."""

    def mark(self, function: Any) -> Any:
        """The function, each call of which is a step from now on; only the outer one of calls inside each other."""
        self.told = True
        return wrap_step_function(function, self._function_ended)

    @contextmanager
    def open(self) -> Iterator[None]:
        """Inside, steps are found."""
        handles: list[Any] = [
            register_optimizer_step_pre_hook(self._before_optimizer),
            register_optimizer_step_post_hook(self._after_optimizer),
        ]
        self.calls.open()
        self.is_open = True
        try:
            yield
        finally:
            self.is_open = False
            self.calls.close()
            self._leave()
            for handle in handles:
                handle.remove()

    def _function_ended(self) -> None:
        if self.is_open:
            self._watcher.step_ends(StepKind())

    def _before_optimizer(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._watcher.optimizer_begins(optimizer)
        if self._first is None and not self.told:
            self._first = optimizer
            self._tell_after(optimizer)
            self._watcher.training_begins()

    def _after_optimizer(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._watcher.optimizer_ends()
        if optimizer is self._first:
            self.unused = 0

    def _leave(self) -> None:
        """Gives the optimizer its own method back."""
        if self._first is not None:
            self._first.__dict__.pop("step", None)
            if self._before is not None:
                self._first.step = self._before  # type: ignore[method-assign]

    def _module_ended(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if torch.is_grad_enabled():
            self._trained += 1
            self.unused += 1
        else:
            self._evaluated += 1
            if self._first is None and not self.told:
                self._trained = self._evaluated = 0
                self._watcher.step_ends(StepKind(module=id(module), shape=_smallest_shape((*args, *kwargs.values()))))

    def _tell_after(self, optimizer: torch.optim.Optimizer) -> None:
        """Steps end after the optimizer's own, not in its hooks, which run inside a range of the profiler.

        A profiler that is started in one such range and stopped in another corrupts its memory. A schedule of learning
        rates has put a method of its own there, whose marks are kept; one that comes later asks for a method.
        """
        self._before = optimizer.__dict__.get("step")
        self._trained = self._evaluated = 0
        original = optimizer.step

        @functools.wraps(original)
        def step(_optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            kind = StepKind(trained=self._trained, evaluated=self._evaluated)
            self._trained = self._evaluated = 0
            if kind.trained + kind.evaluated > MAX_CALLS:
                self.calls.close()
            if not self.told:
                self._watcher.step_ends(kind)
            return result

        optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]


@contextmanager
def detect_steps(watcher: StepListener) -> Iterator[StepDetector]:
    """Inside, `watcher` is told about steps."""
    steps = StepDetector(watcher)
    with steps.open():
        yield steps


def wrap_step_function(function: Any, ended: Callable[[], None]) -> Any:
    """The function, and after each of its calls from outside `ended()`; not where it raises."""
    if isinstance(function, (staticmethod, classmethod)):
        return type(function)(wrap_step_function(function.__func__, ended))
    depth = 0

    @contextmanager
    def one_step() -> Iterator[None]:
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
            with one_step():
                return await function(*args, **kwargs)

        return awaited

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        with one_step():
            return function(*args, **kwargs)

    return called


def _smallest_shape(values: tuple[Any, ...]) -> tuple[int, ...]:
    """The shape of the smallest tensor with at least two dimensions, or with fewer where there is none such.

    It is asked in every step of an inference: a loop takes a third of the time of `min` with a key.
    """
    smallest: torch.Tensor | None = None
    smallest_size = (True, 0)
    for value in values:
        if isinstance(value, torch.Tensor):
            size = (value.dim() < 2, value.numel())
            if smallest is None or size < smallest_size:
                smallest, smallest_size = value, size
    return () if smallest is None else tuple(smallest.shape)
