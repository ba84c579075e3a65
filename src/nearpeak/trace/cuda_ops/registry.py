"""`lowering_for`: inside, operators on CPU tensors are composed of the operators that the target runs.

A lowering is a function for an operator that torch composes of others, differently by device. While a trace for a GPU
runs, it is registered with torch's dispatcher for the CPU's autograd, in place of torch's own composition. Tensors on a
real GPU do not come here: torch itself chooses for them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch

from nearpeak.trace.cuda_ops.target import Target
from nearpeak.trace.patches.shared_patch import SharedPatch, no_warnings

_IMPLICIT_KEY = torch._C.DispatchKey.CompositeImplicitAutograd

Lowering = Callable[..., Any]
"""A function of the target and the operator's arguments."""


class DispatcherKernel(NamedTuple):
    """A function for one operator under one key of torch's dispatcher."""

    operator: str
    key: str
    function: Callable[..., Any]


class _ActiveTrace(NamedTuple):
    """A running trace: its target, and what is undone at its end."""

    target: Target
    undo: ExitStack
    entered: set[SharedPatch]


class _ActiveTraces(threading.local):
    """The traces that run on this thread; other threads have torch's own operators."""

    def __init__(self) -> None:
        self.traces: list[_ActiveTrace] = []


LOWERINGS: dict[str, Lowering] = {}
"""By the operator's name as torch writes it: "dropout", "softmax.int"."""
OPAQUE_OPERATORS: set[str] = set()
"""Operators that torch can decompose, and that a GPU runs as one."""
RECOMPOSED_OPERATORS: set[torch._ops.OpOverload] = set()
"""Operators whose composition is a lowering now, in place of torch's."""
META_KERNELS: list[DispatcherKernel] = []
"""Shapes of operators that torch does not have."""
_active_traces = _ActiveTraces()


def lowers(*operators: str) -> Callable[[Lowering], Lowering]:
    """Registers a function as the lowering of operators."""

    def register(function: Lowering) -> Lowering:
        for operator in operators:
            if operator in LOWERINGS:
                raise ValueError(f"{operator} has two lowerings")
            LOWERINGS[operator] = function
        return function

    return register


def meta_kernel(operator: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a function that makes results without data, for an operator whose shapes torch does not know."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        META_KERNELS.append(DispatcherKernel(operator, "Meta", function))
        return function

    return register


def current_target() -> Target | None:
    """The target of the trace that runs on this thread."""
    return _active_traces.traces[-1].target if _active_traces.traces else None


@contextmanager
def lowering_for(target: Target) -> Iterator[None]:
    """Inside, on this thread, CPU tensors stand for the target's. Can be nested."""
    with _register_lowerings(), ExitStack() as undo:
        _active_traces.traces.append(_ActiveTrace(target, undo, set()))
        try:
            yield
        finally:
            _active_traces.traces.pop()


def enter_for_trace(patch: SharedPatch) -> None:
    """Enters a patch, once, until the trace on this thread ends."""
    running = _active_traces.traces[-1]
    if patch not in running.entered:
        running.entered.add(patch)
        running.undo.enter_context(patch())


@contextmanager
def register_kernels(kernels: Callable[[], list[DispatcherKernel]]) -> Iterator[None]:
    """Inside, torch's dispatcher has these kernels."""
    library = torch.library.Library("aten", "IMPL")
    try:
        with no_warnings():  # about replacing a kernel of torch's
            for operator, key, function in kernels():
                if overload_of(operator) is not None:
                    library.impl(operator, function, key, allow_override=True)
        yield
    finally:
        library._destroy()


def overload_of(operator: str) -> torch._ops.OpOverload | None:
    """The operator "name" or "name.overload" of aten; None if this torch has none."""
    name, _, overload = operator.partition(".")
    return getattr(getattr(torch.ops.aten, name, None), overload or "default", None)


def run_native(operator: str | torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Runs an operator as torch composes it."""
    overload = overload_of(operator) if isinstance(operator, str) else operator
    assert overload is not None
    return overload._op_dk(_IMPLICIT_KEY, *args, **kwargs)


@SharedPatch
@contextmanager
def _register_lowerings() -> Iterator[None]:
    overloads = {operator: overload_of(operator) for operator in (*LOWERINGS, *OPAQUE_OPERATORS)}
    compositions = {
        overload: _lowering_kernel(overload, LOWERINGS[operator]) if operator in LOWERINGS else _no_composition
        for operator, overload in overloads.items()
        if overload is not None
    }
    before = {overload: overload.py_kernels.get(_IMPLICIT_KEY) for overload in compositions}

    def kernels() -> list[DispatcherKernel]:
        lowerings = [(operator, overloads[operator]) for operator in LOWERINGS]
        composed = [
            DispatcherKernel(operator, "AutogradCPU", compositions[overload])
            for operator, overload in lowerings
            if overload
        ]
        return [*composed, *(kernel for kernel in META_KERNELS if not _has_meta_kernel(kernel))]

    with register_kernels(kernels):
        try:
            for overload, composition in compositions.items():  # inference mode bypasses autograd and uses these
                _set_composition(
                    overload,
                    _no_composition if overload.name().removeprefix("aten::") in OPAQUE_OPERATORS else composition,
                )
            yield
        finally:
            for overload, composition_before in before.items():
                _set_composition(overload, composition_before)
            RECOMPOSED_OPERATORS.clear()


def _has_meta_kernel(kernel: DispatcherKernel) -> bool:
    overload = overload_of(kernel.operator)
    return overload is not None and torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), kernel.key)


def _set_composition(overload: torch._ops.OpOverload, composition: Callable[..., Any] | None) -> None:
    RECOMPOSED_OPERATORS.add(overload)
    if composition is None:
        overload.py_kernels.pop(_IMPLICIT_KEY, None)
    else:
        overload.py_kernels[_IMPLICIT_KEY] = composition
    overload._dispatch_cache.clear()


def _lowering_kernel(overload: torch._ops.OpOverload, function: Lowering) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        target = current_target()
        if target is None or not _in_fake_mode() or not _on_cpu(args):
            return overload._op_dk(_IMPLICIT_KEY, *args, **kwargs)
        return function(target, *args, **kwargs)

    return kernel


def _no_composition(*args: Any, **kwargs: Any) -> Any:
    """No composition, on threads of autograd too: a forward pass may run again there."""
    return NotImplemented


def _in_fake_mode() -> bool:
    """Whether a fake mode is active: torch itself composes operators on real values, computed on the side."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def _on_cpu(args: tuple[Any, ...]) -> bool:
    first = next((value for value in args if isinstance(value, torch.Tensor)), None)
    return first is None or first.device.type == "cpu"
