"""`launch`: starts a Triton kernel with less to do on the host than Triton's own way.

Triton looks at every argument of every launch to find out which of its compiled variants is wanted, and takes longer
for that than torch for a whole op. What decides is the dtype and the alignment of a pointer, whether an integer is 1 or
a multiple of 16, and the constants: the variant that Triton chose for these is remembered and started directly.
"""

from __future__ import annotations

from typing import Any

import torch
import triton

from nearpeak.errors import KernelUnavailable
from nearpeak.kernels.policy import INTERPRETED

if INTERPRETED:
    import numpy

    from nearpeak.kernels.jit.interpreter import repair

    repair()

Grid = tuple[int, int, int]
_compiled: dict[tuple[Any, ...], Any] = {}
_constants: dict[int, tuple[bool, ...]] = {}
"""Which arguments of a kernel are constants, by its id: a kernel's own hash is that of its source, behind a lock."""


def launch(kernel: Any, grid: Grid, *args: Any, warps: int = 4, stages: int = 2) -> None:
    """Starts a kernel on the device of its first argument, a tensor. Constants come in their places among `args`."""
    if 0 in grid:
        return
    if INTERPRETED:
        with numpy.errstate(all="ignore"):  # a GPU does not warn of an infinity
            kernel[grid](*args)
        return
    device = args[0].device.index
    if device == torch._C._cuda_getDevice():
        _start(kernel, grid, args, device, warps, stages)
    elif device is None:  # a tensor of the CPU; torch takes a device of None for the current one, and says nothing
        raise KernelUnavailable(
            f"A kernel cannot start with a tensor on {args[0].device.type}; it needs a CUDA device."
        )
    else:
        with torch.cuda.device(device):
            _start(kernel, grid, args, device, warps, stages)


def _start(kernel: Any, grid: Grid, args: tuple[Any, ...], device: int, warps: int, stages: int) -> None:
    """Starts a kernel on the current device, which is this one."""
    constants = _constants.get(id(kernel))
    if constants is None:
        constants = _constants[id(kernel)] = tuple(parameter.is_constexpr for parameter in kernel.params)
    key = (id(kernel), device, warps, stages, *map(_decides, args, constants))
    found = _compiled.get(key)
    if found is None:
        _compiled[key] = kernel[grid](*args, num_warps=warps, num_stages=stages, enable_fp_fusion=True)
    else:
        # Triton would ask for the device again to find the stream
        found[grid](*args, stream=torch._C._cuda_getCurrentRawStream(device))


def _decides(argument: Any, constant: bool) -> Any:
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
    return argument


def next_power_of_2(number: int) -> int:
    """The next power of 2, which the sizes of blocks must be."""
    return int(triton.next_power_of_2(max(number, 1)))
