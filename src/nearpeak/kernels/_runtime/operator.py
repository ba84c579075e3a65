"""`Operator`: a kernel as a torch operator, with a fast path for eager calls.

As `nearpeak::name` it is opaque to torch.compile, visible to profilers and traces, and differentiable. An eager call
bypasses torch's dispatcher, which takes longer than a launch, and calls the launcher directly.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

import torch

from nearpeak.kernels._runtime.capability import gpu_vendor
from nearpeak.kernels._runtime.replay import PLAIN_TENSORS, ReplayCache, is_observed

_library = torch.library.Library("nearpeak", "FRAGMENT")


class _CallOrigin(threading.local):
    """Who calls operators on this thread: functions of this package, which checked the arguments, or torch."""

    is_torch = False


_call_origin = _CallOrigin()


class Operator:
    """An operator `nearpeak::name`.

    Args:
        schema: In torch's syntax, without the namespace: "add(Tensor x, Tensor y) -> Tensor".
        backends: The launcher by GPU vendor, as "module:function" in `nearpeak.kernels`: {"nvidia":
            "pointwise.triton:add"}. Imported at the first call, since Triton may not be installed. Vendors without
            an entry run the reference.
        reference: The same in plain torch, for arguments that the kernel does not support.
        fake: Empty results of the right shape, dtype and strides.
        why_not: The reason why the kernel does not support these arguments, or None.
        finish: Gives results the strides of those of `fake`, which compiled code relies on. Eager calls have what the
            launcher returns. None if launchers return such strides anyway.
        setup_context: As in `torch.autograd.Function`: saves what the backward pass needs.
        backward: As in `torch.autograd.Function`. None for an operator without derivatives.
    """

    def __init__(
        self,
        schema: str,
        *,
        backends: Mapping[str, str],
        reference: Callable[..., Any],
        fake: Callable[..., Any],
        why_not: Callable[..., str | None],
        finish: Callable[..., Any] | None = None,
        setup_context: Callable[..., None] | None = None,
        backward: Callable[..., Any] | None = None,
    ) -> None:
        self.name = schema.partition("(")[0]
        self._backends = backends
        self._reference = reference
        self._why_not = why_not
        self._finish = finish
        self._launcher: Callable[..., Any] | None = None
        self._replays = ReplayCache()
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
        """Runs the kernel. The caller has checked that it supports these arguments."""
        if torch.compiler.is_compiling() or _call_origin.is_torch or is_observed() or not _all_plain_tensors(args):
            return self._operator(*args)
        if self._function is not None and torch.is_grad_enabled() and _any_requires_grad(args):
            return self._function.apply(*args)
        return self._launch(*args)

    def _launch(self, *args: Any) -> Any:
        if self._launcher is None:
            self._launcher = self._find_launcher()
        return self._replays.call(self._launcher, args, {})

    def _find_launcher(self) -> Callable[..., Any]:
        backend = self._backends.get(gpu_vendor())
        if backend is None:
            return self._reference
        module, _, function = backend.partition(":")
        launcher: Callable[..., Any] = getattr(import_module(f"nearpeak.kernels.{module}"), function)
        return launcher

    def _run(self, *args: Any) -> Any:
        """The implementation that torch's dispatcher calls: in compiled code, and for calls of the operator by name."""
        if self._why_not(*args) is not None:
            return self._reference(*args)
        result = self._launch(*args)
        return result if self._finish is None else self._finish(*result)


def refuse_second_derivative(name: str) -> None:
    """Raises inside of a backward pass that is itself differentiated."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"nearpeak.kernels.{name} has no second derivative. Compute it inside of nearpeak.kernels.using('off')."
        )


def _autograd_function(
    name: str, launch: Callable[..., Any], setup_context: Callable[..., None], backward: Callable[..., Any]
) -> type[torch.autograd.Function]:
    def forward(ctx: Any, *args: Any) -> Any:
        result = launch(*args)
        setup_context(ctx, args, result)
        return result

    def first_derivative(ctx: Any, *gradients: Any) -> Any:
        refuse_second_derivative(name)
        return backward(ctx, *gradients)

    methods = {"forward": staticmethod(forward), "backward": staticmethod(first_derivative)}
    return type(name, (torch.autograd.Function,), methods)


def _backward_from_dispatcher(backward: Callable[..., Any]) -> Callable[..., Any]:
    """The backward pass of an operator that torch called by name, with unchecked arguments.

    Its forward pass may have run the reference, so the operators of the backward pass check their arguments as well.
    """

    def call(ctx: Any, *gradients: Any) -> Any:
        if torch.compiler.is_compiling():
            return backward(ctx, *gradients)
        before = _call_origin.is_torch
        _call_origin.is_torch = True
        try:
            return backward(ctx, *gradients)
        finally:
            _call_origin.is_torch = before

    return call


def _all_plain_tensors(args: Sequence[Any]) -> bool:
    for argument in args:
        if isinstance(argument, torch.Tensor):
            if type(argument) not in PLAIN_TENSORS:
                return False
        elif isinstance(argument, list) and not _all_plain_tensors(argument):
            return False
    return True


def _any_requires_grad(args: Sequence[Any]) -> bool:
    return any(isinstance(argument, torch.Tensor) and argument.requires_grad for argument in args)
