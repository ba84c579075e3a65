"""`started`: a stand-in for a GPU, so that tests on a CPU go the way that launches go on one.

Where a compiled kernel would be started with pointers, the interpreter runs it with tensors at these pointers. All
before it, what the host does, is as on a GPU.
"""

from __future__ import annotations

import ctypes
import gc
from typing import Any

import numpy
import torch
from torch.utils._python_dispatch import _disable_current_modes
from triton.runtime.interpreter import InterpretedFunction

from nearpeak.kernels._runtime import launch
from nearpeak.kernels._runtime.replay import ReplayCache

_subscript = InterpretedFunction.__getitem__


class Parameter:
    def __init__(self, is_constexpr):
        self.is_constexpr = is_constexpr


class Compiled:
    """Stands for what Triton compiled."""

    function = packed_metadata = None

    def __init__(self, kernel, args, runs):
        self.kernel = kernel
        self.dtypes = [one.dtype if isinstance(one, torch.Tensor) else None for one in args]
        self.runs = runs

    def run(self, x, y, z, stream, function, metadata, launch_metadata, enter, leave, *args):
        self.runs.append(self.kernel.__name__)
        if self.runs.interprets:
            interpret(self.kernel, (x, y, z), [at(*one) for one in zip(args, self.dtypes, strict=True)])


class Runs(list):
    """The names of the kernels that were started again, in order."""

    asked = 0
    """How many launches went through Triton, as the first of each variant does."""
    interprets = True


def at(argument: Any, dtype: torch.dtype | None) -> Any:
    """A tensor of one element at a pointer: the interpreter goes on from there."""
    if dtype is None or isinstance(argument, torch.Tensor):
        return argument
    if not argument:  # of a tensor without elements
        return torch.empty(1, dtype=dtype)
    memory = (ctypes.c_uint8 * dtype.itemsize).from_address(argument)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype)[:1]


def interpret(kernel, grid, args):
    with _disable_current_modes(), numpy.errstate(all="ignore"):
        _subscript(kernel, grid)(*args)


def started(monkeypatch) -> Runs:
    """From here on launches go as on a GPU. What is returned is told of those that Triton was not asked for."""
    runs = Runs()
    for one in gc.get_objects():
        if type(one) is ReplayCache:  # what it has is told to who asked before
            one._known.clear()

    def subscript(kernel, grid):
        def run(*args, **settings):
            runs.asked += 1
            interpret(kernel, grid, args)
            return Compiled(kernel, args, runs)

        return run

    def params(kernel):
        return [Parameter("constexpr" in str(kernel.fn.__annotations__.get(name))) for name in kernel.arg_names]

    monkeypatch.setattr(InterpretedFunction, "__getitem__", subscript)
    monkeypatch.setattr(InterpretedFunction, "params", property(params), raising=False)
    monkeypatch.setattr(launch, "INTERPRETED", False)
    monkeypatch.setattr(launch, "_specializations", {})
    monkeypatch.setattr(torch._C, "_cuda_getDevice", type(None), raising=False)  # the index of the CPU
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    monkeypatch.setattr(ReplayCache, "enabled", True)
    monkeypatch.setattr(ReplayCache, "device", "cpu")
    return runs
