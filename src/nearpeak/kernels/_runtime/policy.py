"""When a kernel runs and when its reference does: `supports`, `using`, and the decorator `fused` behind both."""

from __future__ import annotations

import functools
import importlib.util
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, ParamSpec, TypeVar, get_args

import torch

from nearpeak.errors import KernelUnavailable, UsageError, did_you_mean
from nearpeak.kernels._runtime.replay import ReplayCache

Mode = Literal["auto", "require", "off"]
_P = ParamSpec("_P")
_R = TypeVar("_R")

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Kernels run in Triton's interpreter, on tensors of the CPU: slow, and good for tests."""
_OLDEST = (8, 0)
_HAS_TRITON = importlib.util.find_spec("triton") is not None
_mode: Mode = "auto"


class _SimulatedGpu(threading.local):
    """What fake tensors stand for on this thread."""

    capability: tuple[int, int] | None = None


_simulated_gpu = _SimulatedGpu()


@dataclass(frozen=True, slots=True, kw_only=True)
class Support:
    """Whether a kernel takes these arguments. True in a condition where it does."""

    reason: str
    """Why not; empty where it does."""

    def __bool__(self) -> bool:
        return not self.reason


def supports(function: Callable[_P, object], *args: _P.args, **kwargs: _P.kwargs) -> Support:
    """Whether a function of `nearpeak.kernels` runs its kernel for these arguments, and why not.

    >>> import torch, nearpeak.kernels as kernels
    >>> kernels.supports(kernels.add, torch.ones(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)).reason
    'it takes float32, bfloat16 and float16, and this is float64'
    """
    why_not = getattr(function, "why_not", None)
    if why_not is None:
        raise UsageError(f"supports() asks about a function of nearpeak.kernels, and {function!r} is none.")
    return Support(reason=why_not(*args, **kwargs) or "")


@contextmanager
def using(mode: Mode) -> Iterator[None]:
    """Inside of the block, for the whole process: "auto" runs kernels where they can run and references elsewhere,
    "require" raises `KernelUnavailable` instead of running a reference, "off" runs references alone.

    The variable NEARPEAK_KERNELS has the mode that a process starts with.
    """
    before = _mode
    _set_mode(mode)
    try:
        yield
    finally:
        _set_mode(before)


def _set_mode(mode: str) -> None:
    global _mode  # one for all threads: a backward pass runs in threads of autograd's own
    if mode not in get_args(Mode):
        raise UsageError(f"There is no mode {mode!r} of kernels. {did_you_mean(mode, get_args(Mode))}")
    _mode = mode  # type: ignore[assignment]


@contextmanager
def simulate_gpu(capability: tuple[int, int]) -> Iterator[None]:
    """Inside, on this thread, fake tensors, also of the CPU, stand for those of a GPU of this compute capability."""
    before = _simulated_gpu.capability
    _simulated_gpu.capability = capability
    try:
        yield
    finally:
        _simulated_gpu.capability = before


def _simulated_capability() -> tuple[int, int] | None:
    """The compute capability that fake tensors stand for; None where tensors have data, and kernels would run."""
    if torch.compiler.is_compiling() or _simulated_gpu.capability is None:  # in this order: the compiler reads no more
        return None
    fake = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
    return _simulated_gpu.capability if fake else None


def fused(
    *, reference: Callable[_P, _R], why_not: Callable[_P, str | None], remembered: bool = True
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Makes a function that runs its own body where `why_not` has no reason against it, and `reference` elsewhere.

    A reference is plain torch: on a CPU, in float64 and for second derivatives everything works as torch does.

    Args:
        remembered: What the body does follows from the arguments alone, not from autocast for example, so that a call
            like one before need not ask or decide anything.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        plans = ReplayCache()

        @functools.wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            if _mode == "off":
                return reference(*args, **kwargs)
            if remembered:
                return plans.call(decided, args, kwargs)  # type: ignore[no-any-return]
            return decided(*args, **kwargs)

        def decided(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            reason = why_not(*args, **kwargs)
            if reason is None:
                return function(*args, **kwargs)
            if _mode == "require":
                raise KernelUnavailable(f"The kernel of {function.__name__} cannot run: {reason}.")
            return reference(*args, **kwargs)

        call.why_not = why_not  # type: ignore[attr-defined]
        call.reference = reference  # type: ignore[attr-defined]
        return call

    return decorate


def cannot_run(*tensors: torch.Tensor | None, dtypes: tuple[torch.dtype, ...] = FLOATS) -> str | None:
    """Why no kernel takes these tensors: what is common to all kernels. Others than floats are not looked at."""
    device = None
    for tensor in tensors:
        if tensor is None:
            continue
        if device is None:
            device = tensor.device
            if device.type != "cuda" and not (
                device.type == "cpu" and (INTERPRETED or _simulated_capability() is not None)
            ):
                return f"it needs a CUDA device, and this tensor is on {device.type}"
        elif tensor.device != device:
            return f"its tensors are on {device} and {tensor.device}"
        if tensor.is_floating_point() and tensor.dtype not in dtypes:
            return f"it takes {_dtype_names(dtypes)}, and this is {_dtype_name(tensor.dtype)}"
    if not _HAS_TRITON and _simulated_capability() is None:  # a GPU that is not here has a Triton of its own
        return "Triton is not installed"
    return None if device is None else too_old(device, _OLDEST)


def too_old(device: torch.device, oldest: tuple[int, int]) -> str | None:
    """Why a kernel for GPUs of the compute capability `oldest` and later does not run on this device."""
    if torch.compiler.is_compiling():  # asked again when compiled code runs
        return None
    found = None if _simulated_gpu.capability is None else _simulated_capability()
    if found is None and device.type == "cuda":
        found = _capability(device.index or 0)
    if found is None or found >= oldest:
        return None
    return f"it needs compute capability {oldest[0]}.{oldest[1]}, and this GPU has {found[0]}.{found[1]}"


@functools.cache
def _capability(index: int) -> tuple[int, int] | None:
    if not torch.cuda.is_available() or index >= torch.cuda.device_count():  # a fake tensor of a GPU that is not there
        return None
    return torch.cuda.get_device_capability(index)


def _dtype_names(dtypes: tuple[torch.dtype, ...]) -> str:
    names = [_dtype_name(dtype) for dtype in dtypes]
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0]


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_set_mode(os.environ.get("NEARPEAK_KERNELS", "auto"))
