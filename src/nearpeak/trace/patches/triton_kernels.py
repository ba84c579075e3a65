"""`record_triton_kernels`: inside a trace, a Triton kernel that the code launches itself is an op of its own.

`kernel[grid](x, y, n)` bypasses torch's dispatcher. On fake tensors nothing is launched, compiled or tuned; live, the
launch follows. What a kernel reads and writes does not show from outside: each tensor may be written, and none is
charged unless `declare_cost("triton::kernel", ...)` says what it must do.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from nearpeak.ops.op import name_with_origin
from nearpeak.trace.patches.shared_patch import SharedPatch, patch_attribute
from nearpeak.trace.recorder import active_recorder
from nearpeak.trace.schema import OperatorSchema

_LAUNCHERS = (
    ("triton.runtime.jit", "JITFunction", "run"),
    ("triton.runtime.autotuner", "Autotuner", "run"),
    ("triton.runtime.autotuner", "Heuristics", "run"),
    ("triton.runtime.interpreter", "InterpretedFunction", "run"),
    ("torch._higher_order_ops.triton_kernel_wrap", "TraceableTritonKernelWrapper", "run"),
    ("torch._higher_order_ops.triton_kernel_wrap", "TraceableTritonKernelWrapper", "__call__"),
)
_LAUNCH_OPTIONS = ("grid", "warmup")


@SharedPatch
@contextmanager
def record_triton_kernels() -> Iterator[None]:
    """Inside, Triton kernels are recorded. Nothing is imported: code with kernels has imported Triton."""
    with ExitStack() as stack:
        for module, name, method in _LAUNCHERS:
            kind = getattr(sys.modules.get(module), name, None)
            if kind is not None and method in vars(kind):
                stack.enter_context(patch_attribute(kind, method, _recording_launch(vars(kind)[method])))
        yield


def _recording_launch(launch: Callable[..., Any]) -> Callable[..., Any]:
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = active_recorder()
        if recorder is None or kwargs.get("warmup"):
            return launch(self, *args, **kwargs)
        recorder.launch_begins()
        if not recorder.record_launch(lambda: _launch_as_op(self, args, kwargs)):
            return None
        with _disable_current_modes():  # autotuning runs ops itself
            result = launch(self, *args, **kwargs)
        recorder.launch_ended()
        return result

    return run


def _launch_as_op(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[OperatorSchema, dict[str, Any]]:
    """A launch as an op: its schema and its arguments."""
    arguments = _named_arguments(kernel, args, kwargs)
    schema = OperatorSchema(
        name=name_with_origin("triton", _kernel_name(kernel)),
        arguments=tuple(arguments),
        defaults={},
        mutated=tuple(name for name, value in arguments.items() if isinstance(value, torch.Tensor)),
        origin="triton",
    )
    return schema, arguments


def _innermost_function(kernel: Any) -> Any:
    """The function below its autotuner, its heuristics and torch's wrapper."""
    while type(kernel).__name__ in ("Autotuner", "Heuristics", "TraceableTritonKernelWrapper"):
        kernel = kernel.kernel if hasattr(kernel, "kernel") else kernel.fn
    return kernel


def _kernel_name(kernel: Any) -> str:
    function = _innermost_function(kernel)
    name = getattr(function, "__name__", None) or getattr(function.fn, "__name__", "kernel")
    return str(name)


def _named_arguments(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments by name, without options of the launch such as the number of warps."""
    names = _innermost_function(kernel).arg_names
    values = dict(zip(names, args, strict=False))
    values.update((name, value) for name, value in kwargs.items() if name not in _LAUNCH_OPTIONS)
    return {name: _underlying_tensor(values[name]) for name in names if name in values}


def _underlying_tensor(value: Any) -> Any:
    """The tensor behind a tensor descriptor; else the value."""
    base = getattr(value, "base", None)
    return base if isinstance(base, torch.Tensor) and not isinstance(value, torch.Tensor) else value
