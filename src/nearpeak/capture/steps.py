"""`watching_steps`: calls back at the end of each step of code that knows nothing of it.

A training step ends with an optimizer's step, whatever came before it: several forward passes, where gradients are
accumulated. Code that never trains takes a step with each call of a module that is not inside another one, without
gradients: a batch, or a token of a generated text. Who knows better marks a function, each call of which is a step.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MethodType
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from nearpeak.capture.outermost import OutermostCalls
from nearpeak.capture.step_kind import StepKind

MOST_CALLS = 20
"""Code with more outermost calls in a training step has no model: counting them would cost more than it tells."""


class Watcher(Protocol):
    """Who is told about steps."""

    def optimizer_begins(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer starts its step."""

    def optimizer_ends(self) -> None:
        """It is done."""

    def training_begins(self) -> None:
        """Steps end with an optimizer's from now on; those before were something else."""

    def step_ends(self, kind: StepKind) -> None:
        """A step is over, and the next one begins."""


class Steps:
    """Tells a watcher about steps while it is open."""

    def __init__(self, watcher: Watcher) -> None:
        self.is_open = False
        self.told = False
        """Whether functions are marked; then no steps are looked for."""
        self.calls = OutermostCalls(self._module_ended)
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
        return marked(function, self._function_ended)

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
                self._watcher.step_ends(StepKind(module=id(module), shape=_smallest((*args, *kwargs.values()))))

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
            if kind.trained + kind.evaluated > MOST_CALLS:
                self.calls.close()
            if not self.told:
                self._watcher.step_ends(kind)
            return result

        optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]


@contextmanager
def watching_steps(watcher: Watcher) -> Iterator[Steps]:
    """Inside, `watcher` is told about steps."""
    steps = Steps(watcher)
    with steps.open():
        yield steps


def marked(function: Any, ended: Callable[[], None]) -> Any:
    """The function, and after each of its calls from outside `ended()`; not where it raises."""
    if isinstance(function, (staticmethod, classmethod)):
        return type(function)(marked(function.__func__, ended))
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


def _smallest(values: tuple[Any, ...]) -> tuple[int, ...]:
    """The shape of the smallest tensor with at least two dimensions, or with fewer where there is none such.

    It is asked in every step of an inference: a loop takes a third of the time of `min` with a key.
    """
    found: torch.Tensor | None = None
    least = (True, 0)
    for value in values:
        if isinstance(value, torch.Tensor):
            size = (value.dim() < 2, value.numel())
            if found is None or size < least:
                found, least = value, size
    return () if found is None else tuple(found.shape)
