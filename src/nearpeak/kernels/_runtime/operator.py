"""`Operator`: a kernel as an operator of torch, with little in the way when torch runs eagerly.

As `nearpeak::name` it is opaque to torch.compile, seen by profilers and traces, and differentiable. An eager call goes
past the dispatcher, which takes longer than a launch, straight to the launcher.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch

from nearpeak.kernels._runtime.replay import PLAIN_TENSORS, ReplayCache, is_observed

_library = torch.library.Library("nearpeak", "FRAGMENT")


class _CallOrigin(threading.local):
    """How operators are called on this thread: by those who have looked at their arguments, or by torch."""

    by_torch = False


_call_origin = _CallOrigin()


class Operator:
    """An operator `nearpeak::name`.

    Args:
        schema: As torch writes it, without the namespace: "add(Tensor x, Tensor y) -> Tensor".
        launch: Where the launcher is, "module:function" in `nearpeak.kernels`. It is imported at the first call,
            as Triton may not be there.
        reference: The same in plain torch, for calls of the operator with tensors that the kernel does not take.
        fake: Empty results of the right shape, dtype and strides.
        why_not: Why the kernel does not take these arguments, or None.
        setup_context: As of `torch.autograd.Function`: keeps what the backward pass needs.
        backward: As of `torch.autograd.Function`: the gradients by those of the results. None for an operator without
            derivatives.
    """

    def __init__(
        self,
        schema: str,
        *,
        launch: str,
        reference: Callable[..., Any],
        fake: Callable[..., Any],
        why_not: Callable[..., str | None],
        setup_context: Callable[..., None] | None = None,
        backward: Callable[..., Any] | None = None,
    ) -> None:
        self.name = schema.partition("(")[0]
        self._home = launch
        self._reference = reference
        self._why_not = why_not
        self._launcher: Callable[..., Any] | None = None
        self._plans = ReplayCache()
        _library.define(schema)
        _library.impl(self.name, self._run, "CompositeExplicitAutograd")
        qualified = f"nearpeak::{self.name}"
        torch.library.register_fake(qualified, fake, lib=_library)
        self._function: type[torch.autograd.Function] | None = None
        if backward is not None:
            assert setup_context is not None
            torch.library.register_autograd(
                qualified, _backward_from_dispatcher(backward), setup_context=setup_context, lib=_library
            )
            self._function = _autograd_function(self.name, self._launch, setup_context, backward)
        self._operator = getattr(torch.ops.nearpeak, self.name).default

    def __call__(self, *args: Any) -> Any:
        """Runs the kernel; its arguments have been looked at before."""
        if torch.compiler.is_compiling() or _call_origin.by_torch or is_observed() or not _all_plain_tensors(args):
            return self._operator(*args)
        if self._function is not None and torch.is_grad_enabled() and _any_requires_grad(args):
            return self._function.apply(*args)
        return self._launch(*args)

    def _launch(self, *args: Any) -> Any:
        if self._launcher is None:
            module, _, function = self._home.partition(":")
            self._launcher = getattr(import_module(f"nearpeak.kernels.{module}"), function)
        return self._plans.call(self._launcher, args, {})

    def _run(self, *args: Any) -> Any:
        """What the dispatcher calls: for compiled code, and for whoever calls the operator by its name."""
        return self._launch(*args) if self._why_not(*args) is None else self._reference(*args)


def _autograd_function(
    name: str, launch: Callable[..., Any], setup_context: Callable[..., None], backward: Callable[..., Any]
) -> type[torch.autograd.Function]:
    def forward(ctx: Any, *args: Any) -> Any:
        result = launch(*args)
        setup_context(ctx, args, result)
        return result

    def once(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"nearpeak.kernels.{name} has no second derivative. Ask for it inside of nearpeak.kernels.using('off')."
            )
        return backward(ctx, *gradients)

    return type(name, (torch.autograd.Function,), {"forward": staticmethod(forward), "backward": staticmethod(once)})


def _backward_from_dispatcher(backward: Callable[..., Any]) -> Callable[..., Any]:
    """The backward pass of an operator that torch called by its name, with tensors that nobody has looked at.

    A reference may have run forward. So the operators of the backward pass look at their arguments too.
    """

    def call(ctx: Any, *gradients: Any) -> Any:
        if torch.compiler.is_compiling():
            return backward(ctx, *gradients)
        before = _call_origin.by_torch
        _call_origin.by_torch = True
        try:
            return backward(ctx, *gradients)
        finally:
            _call_origin.by_torch = before

    return call


def _all_plain_tensors(args: Sequence[Any]) -> bool:
    for one in args:
        if isinstance(one, torch.Tensor):
            if type(one) not in PLAIN_TENSORS:
                return False
        elif isinstance(one, list) and not _all_plain_tensors(one):
            return False
    return True


def _any_requires_grad(args: Sequence[Any]) -> bool:
    return any(isinstance(one, torch.Tensor) and one.requires_grad for one in args)
