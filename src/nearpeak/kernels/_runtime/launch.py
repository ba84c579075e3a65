"""`launch`: starts a Triton kernel with less to do on the host than Triton's own way.

Triton looks at every argument of every launch to find out which of its compiled variants is wanted, and takes longer
for that than torch for a whole op. What decides is the dtype and the alignment of a pointer, whether an integer is 1 or
a multiple of 16, and the constants: the variant that Triton chose for these is remembered and started directly.
A call that is recorded, see `plans`, has even these decided.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton

from nearpeak.errors import KernelUnavailable
from nearpeak.kernels._runtime.policy import INTERPRETED
from nearpeak.kernels._runtime.replay import active_recording, is_tensor_descriptor

if INTERPRETED:
    import numpy

    from nearpeak.kernels._runtime.interpreter import patch_interpreter

    patch_interpreter()

Grid = tuple[int, int, int]
_LAUNCHES_DIRECTLY = (3, 6) <= tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 10)
"""Of these versions it is known how they start what they compiled."""
_runtime: Any = triton.knobs.runtime if _LAUNCHES_DIRECTLY else None
_specializations: dict[tuple[Any, ...], Specialization] = {}
_constexpr_flags: dict[int, tuple[bool, ...]] = {}
"""Which arguments of a kernel are constants, by its id: a kernel's own hash is that of its source, behind a lock."""


class Specialization:
    """A kernel as Triton compiled it for arguments of some kind, and for one device."""

    __slots__ = ("_compiled", "_function", "_metadata", "_run")

    def __init__(self, compiled: Any) -> None:
        self._compiled = compiled
        self._run: Any = None
        if _LAUNCHES_DIRECTLY:
            self._run, self._function, self._metadata = compiled.run, compiled.function, compiled.packed_metadata

    def start(self, grid: Grid, stream: int, args: Sequence[Any]) -> None:
        """Starts it on the current device. Tensors among `args` may be pointers."""
        try:
            hooked = self._run is None or _runtime.launch_enter_hook.calls or _runtime.launch_exit_hook.calls
        except AttributeError:  # something else was put in the place of the hooks
            hooked = True
        if hooked:
            self._compiled[grid](*args, stream=stream)
        else:  # nobody, as Triton's own profiler, is to be told; Triton would go and see at each launch
            x, y, z = grid
            self._run(x, y, z, stream, self._function, self._metadata, None, None, None, *args)


def launch(kernel: Any, grid: Grid, *args: Any, warps: int = 4, stages: int = 2, registers: int | None = None) -> None:
    """Starts a kernel on the device of its first argument, a tensor. Constants come in their places among `args`.

    A thread has no more than `registers`, so that as many programs as wanted run at a time on a processor.
    """
    if 0 in grid:
        return
    if INTERPRETED:
        with numpy.errstate(all="ignore"):  # a GPU does not warn of an infinity
            kernel[grid](*args)
        return
    device = args[0].device.index
    if device == torch._C._cuda_getDevice():
        _launch_on_device(kernel, grid, args, device, warps, stages, registers)
    elif device is None:  # a tensor of the CPU; torch takes a device of None for the current one, and says nothing
        raise KernelUnavailable(
            f"A kernel cannot start with a tensor on {args[0].device.type}; it needs a CUDA device."
        )
    else:
        with torch.cuda.device(device):
            _launch_on_device(kernel, grid, args, device, warps, stages, registers)


def _launch_on_device(
    kernel: Any, grid: Grid, args: tuple[Any, ...], device: int, warps: int, stages: int, registers: int | None
) -> None:
    """Starts a kernel on the current device, which is this one."""
    constants = _constexpr_flags.get(id(kernel))
    if constants is None:
        constants = _constexpr_flags[id(kernel)] = tuple(parameter.is_constexpr for parameter in kernel.params)
    key = (id(kernel), device, warps, stages, registers, *map(_specialization_key, args, constants))
    found = _specializations.get(key)
    if found is None:
        settings = {"num_warps": warps, "num_stages": stages, "maxnreg": registers, "enable_fp_fusion": True}
        found = _specializations[key] = Specialization(kernel[grid](*args, **settings))
    else:
        found.start(grid, torch._C._cuda_getCurrentRawStream(device), args)
    recorder = active_recording()
    if recorder is not None:
        recorder.launched(found.start, grid, args)


def _specialization_key(argument: Any, constant: bool) -> Any:
    """What of an argument decides on the variant of a kernel, at least as finely as Triton does."""
    if constant:
        return argument
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if type(argument) is int:
        if argument == 1:
            return 1
        return argument % 16 == 0, -(2**31) <= argument < 2**31
    if type(argument) is float:
        return float  # any value: a learning rate that changes with every step asks for no other variant
    if is_tensor_descriptor(argument):
        return argument.base.dtype, *argument.block_shape, getattr(argument, "layout", None)  # Gluon's have one
    return argument


def next_power_of_2(number: int) -> int:
    """The next power of 2, which the sizes of blocks must be."""
    return int(triton.next_power_of_2(max(number, 1)))
