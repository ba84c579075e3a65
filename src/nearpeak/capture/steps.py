"""`watching_steps`: calls back at the end of each step of code that knows nothing of it.

A training step ends with an optimizer's step, whatever came before it: several forward passes, where gradients are
accumulated. Code that never trains takes a step with each call of a module that is not inside another one, without
gradients: a batch, or a token of a generated text.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


class Watcher(Protocol):
    """Who is told about steps."""

    def optimizer_begins(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer starts its step."""

    def optimizer_ends(self) -> None:
        """It is done."""

    def step_ends(self) -> None:
        """A step is over, and the next one begins."""


class _Steps:
    def __init__(self, watcher: Watcher) -> None:
        self.watcher = watcher
        self.depth = 0
        self.first: torch.optim.Optimizer | None = None
        """The optimizer that ends the steps, where there are several."""
        self.before: Any = None
        """The method that it had of its own."""

    def before_optimizer(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        self.watcher.optimizer_begins(optimizer)
        if self.first is None:
            self.first = optimizer
            self._tell_after(optimizer)

    def after_optimizer(self, _optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        self.watcher.optimizer_ends()

    def before_module(self, _module: torch.nn.Module, _args: Any) -> None:
        self.depth += 1

    def after_module(self, _module: torch.nn.Module, _args: Any, _result: Any) -> None:
        self.depth -= 1
        if self.depth == 0 and self.first is None and not torch.is_grad_enabled():
            self.watcher.step_ends()

    def leave(self) -> None:
        """Gives the optimizer its own method back."""
        if self.first is not None:
            self.first.__dict__.pop("step", None)
            if self.before is not None:
                self.first.step = self.before  # type: ignore[method-assign]

    def _tell_after(self, optimizer: torch.optim.Optimizer) -> None:
        """Steps end after the optimizer's own, not in its hooks, which run inside a range of the profiler.

        A profiler that is started in one such range and stopped in another corrupts its memory. A schedule of learning
        rates has put a method of its own there, whose marks are kept.
        """
        self.before = optimizer.__dict__.get("step")
        original = optimizer.step

        @functools.wraps(original)
        def step(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            self.watcher.step_ends()
            return result

        optimizer.step = step  # type: ignore[method-assign]


@contextmanager
def watching_steps(watcher: Watcher) -> Iterator[None]:
    """Inside, `watcher` is told about steps."""
    steps = _Steps(watcher)
    handles: list[Any] = [
        register_module_forward_pre_hook(steps.before_module),
        register_module_forward_hook(steps.after_module, always_call=True),
        register_optimizer_step_pre_hook(steps.before_optimizer),
        register_optimizer_step_post_hook(steps.after_optimizer),
    ]
    try:
        yield
    finally:
        steps.leave()
        for handle in handles:
            handle.remove()
