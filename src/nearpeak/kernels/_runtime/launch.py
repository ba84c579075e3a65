"""`launch`: starts a Triton kernel with less host time than Triton's own launcher.

Triton inspects every argument of every launch to select one of its compiled specializations, and takes longer for that
than torch for a whole operator. The selection depends on the dtype and the alignment of pointers, on whether an integer
is 1 or a multiple of 16, and on the constants: the specialization for these is cached and started directly. A replayed
call, see `replay`, skips even this.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from nearpeak.errors import KernelUnavailable
from nearpeak.kernels._runtime.capability import cuda_capability
from nearpeak.kernels._runtime.policy import INTERPRETED
from nearpeak.kernels._runtime.replay import active_recording, is_tensor_descriptor

if INTERPRETED:
    import numpy

    from nearpeak.kernels._runtime.interpreter import patch_interpreter

    patch_interpreter()

try:
    from triton.language.extra.cuda import gdc_wait
except ImportError:  # an older Triton
    gdc_wait = None

Grid = tuple[int, int, int]
_LAUNCHES_DIRECTLY = (3, 6) <= tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 10)
"""The versions whose compiled kernels can be started directly."""
_runtime: Any = triton.knobs.runtime if _LAUNCHES_DIRECTLY else None
_specializations: dict[tuple[Any, ...], Specialization] = {}
_constexpr_flags: dict[int, tuple[bool, ...]] = {}
"""Which arguments of a kernel are constants, by its id: hashing a kernel hashes its source, behind a lock."""


class Specialization:
    """A kernel that is compiled for some kind of arguments, and loaded on one device."""

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
        except AttributeError:  # the hooks were replaced by something else
            hooked = True
        if hooked:
            self._compiled[grid](*args, stream=stream)
        else:  # no hooks, such as those of Triton's profiler, which Triton would look up at each launch
            x, y, z = grid
            self._run(x, y, z, stream, self._function, self._metadata, None, None, None, *args)


def can_start_early(device: torch.device) -> bool:
    """Whether a kernel can be launched while the one before it in its stream runs: programmatic dependent launch."""
    if INTERPRETED or gdc_wait is None or device.type != "cuda":
        return False
    return (cuda_capability(device.index) or (0, 0)) >= (9, 0)


@triton.jit
def wait_for_previous(EARLY: tl.constexpr):
    """Until the kernel before this one in its stream has ended, and all that it wrote can be read."""
    if EARLY:
        gdc_wait()


def launch(
    kernel: Any, grid: Grid, *args: Any, warps: int = 4, stages: int = 2, registers: int | None = None,
    early: bool = False,
) -> None:  # fmt: skip
    """Starts a kernel on the device of its first argument, a tensor. Constants come in their places among `args`.

    `registers` limits those of a thread, so that enough programs fit on a multiprocessor. `early`: the kernel calls
    `wait_for_previous` before anything else, and is launched while the one before it runs, as `can_start_early` allows.
    """
    if 0 in grid:
        return
    if INTERPRETED:
        with numpy.errstate(all="ignore"):  # a GPU does not warn of an infinity
            kernel[grid](*args)
        return
    device = args[0].device.index
    if device == torch._C._cuda_getDevice():
        _launch_on_device(kernel, grid, args, device, warps, stages, registers, early)
    elif device is None:  # a CPU tensor; torch would silently take None for the current device
        raise KernelUnavailable(f"A kernel needs tensors on a CUDA device, and this one is on {args[0].device.type}.")
    else:
        with torch.cuda.device(device):
            _launch_on_device(kernel, grid, args, device, warps, stages, registers, early)


def _launch_on_device(
    kernel: Any, grid: Grid, args: tuple[Any, ...], device: int, warps: int, stages: int, registers: int | None,
    early: bool = False,
) -> None:  # fmt: skip
    """Starts a kernel on the current device, which is this one."""
    constants = _constexpr_flags.get(id(kernel))
    if constants is None:
        constants = _constexpr_flags[id(kernel)] = tuple(parameter.is_constexpr for parameter in kernel.params)
    key = (id(kernel), device, warps, stages, registers, early, *map(_specialization_key, args, constants))
    specialization = _specializations.get(key)
    if specialization is None:
        settings = {"num_warps": warps, "num_stages": stages, "maxnreg": registers, "enable_fp_fusion": True}
        if early:
            settings["launch_pdl"] = True
        specialization = _specializations[key] = Specialization(kernel[grid](*args, **settings))
    else:
        specialization.start(grid, torch._C._cuda_getCurrentRawStream(device), args)
    recorder = active_recording()
    if recorder is not None:
        recorder.add_launch(specialization.start, grid, args)


def _specialization_key(argument: Any, constant: bool) -> Any:
    """The properties of an argument that select a specialization, at least as fine as Triton's."""
    if constant:
        return argument
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if type(argument) is int:
        if argument == 1:
            return 1
        return argument % 16 == 0, -(2**31) <= argument < 2**31
    if type(argument) is float:
        return float  # any value: a learning rate changes with every step
    if is_tensor_descriptor(argument):
        return argument.base.dtype, *argument.block_shape, getattr(argument, "layout", None)  # Gluon's have one
    return argument


def next_power_of_2(number: int) -> int:
    """The next power of 2: block sizes must be one."""
    return int(triton.next_power_of_2(max(number, 1)))
