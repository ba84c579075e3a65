"""When a kernel runs and when its reference does: `supports`, `using`, and the decorator `fused` behind both."""

from __future__ import annotations

import functools
import importlib.util
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar, get_args

import torch

from nearpeak.errors import KernelUnavailable, UsageError, did_you_mean
from nearpeak.kernels._runtime.capability import cuda_capability, gpu_vendor
from nearpeak.kernels._runtime.replay import FindNative, ReplayCache

if TYPE_CHECKING:
    from nearpeak.kernels._runtime.choice import Choice

Mode = Literal["auto", "require", "off"]
_P = ParamSpec("_P")
_R = TypeVar("_R")

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Kernels run in Triton's interpreter on CPU tensors: slow, for tests."""
VENDORS = ("nvidia",)
"""Vendors of the GPUs that operations have kernels for."""
_is_any_autocast_enabled = torch._C._is_any_autocast_enabled
_OLDEST = (8, 0)
_HAS_TRITON = importlib.util.find_spec("triton") is not None
_mode: Mode = "auto"


class _SimulatedGpu(threading.local):
    """The GPU that fake tensors stand for on this thread."""

    capability: tuple[int, int] | None = None


_simulated_gpu = _SimulatedGpu()


@dataclass(frozen=True, slots=True, kw_only=True)
class Support:
    """Whether a kernel supports the arguments of a call. True in a condition if it does."""

    reason: str
    """Why not; empty if it does."""
    choice: Choice | None = None
    """Which backend runs the forward pass, and why, where the operation has several; None elsewhere."""

    def __bool__(self) -> bool:
        return not self.reason


def supports(function: Callable[_P, object], *args: _P.args, **kwargs: _P.kwargs) -> Support:
    """Whether a function of `nearpeak.kernels` runs its kernel for these arguments, and the reason if not.

    >>> import torch, nearpeak.kernels as kernels
    >>> kernels.supports(kernels.add, torch.ones(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)).reason
    'it takes float32, bfloat16 and float16, and this is float64'
    """
    why_not = getattr(function, "why_not", None)
    if why_not is None:
        raise UsageError(f"supports() takes a function of nearpeak.kernels, and {function!r} is none.")
    reason = why_not(*args, **kwargs) or ""
    if reason or not getattr(function, "has_choice", False):
        return Support(reason=reason)
    from nearpeak.kernels._runtime.choice import explained_choice

    with _without_replays():
        return Support(reason="", choice=explained_choice(function, args, kwargs))


@contextmanager
def using(mode: Mode | None = None, *, backend: str | None = None) -> Iterator[None]:
    """Sets the mode inside of the block, for the whole process: "auto" runs kernels where they can run and references
    elsewhere, "require" raises `KernelUnavailable` instead of running a reference, "off" always runs references.

    Args:
        mode: None leaves the mode as it is. The environment variable NEARPEAK_KERNELS sets the one that a process
            starts with.
        backend: "gluon", "triton", "torch", "cudnn" or "flash": operations that have several backends take this one,
            forward and backward, and raise `KernelUnavailable` where it does not support the arguments. "nearpeak"
            leaves them the choice between "gluon" and "triton", None between all.
    """
    from nearpeak.kernels._runtime.choice import BACKENDS, force_backend, forced_backend

    if backend is not None and backend not in BACKENDS:
        raise UsageError(f"There is no backend {backend!r} of kernels. {did_you_mean(backend, BACKENDS)}")
    before, backend_before = _mode, forced_backend()
    _set_mode(before if mode is None else mode)
    if backend is None:
        try:
            yield
        finally:
            _set_mode(before)
        return
    force_backend(backend)
    try:
        with _without_replays():
            yield
    finally:
        force_backend(backend_before)
        _set_mode(before)


@contextmanager
def _without_replays() -> Iterator[None]:
    """Inside, calls do what they would do the first time."""
    before = ReplayCache.enabled
    ReplayCache.enabled = False
    try:
        yield
    finally:
        ReplayCache.enabled = before


def _set_mode(mode: str) -> None:
    global _mode  # one for all threads: autograd runs a backward pass on its own threads
    if mode not in get_args(Mode):
        raise UsageError(f"There is no mode {mode!r} of kernels. {did_you_mean(mode, get_args(Mode))}")
    _mode = mode  # type: ignore[assignment]


@contextmanager
def simulate_gpu(capability: tuple[int, int]) -> Iterator[None]:
    """Inside, on this thread, fake tensors, even on the CPU, stand for those of an NVIDIA GPU of this capability."""
    before = _simulated_gpu.capability
    _simulated_gpu.capability = capability
    try:
        yield
    finally:
        _simulated_gpu.capability = before


def _simulated_capability() -> tuple[int, int] | None:
    """The compute capability that fake tensors stand for; None if tensors have data and kernels would run."""
    if torch.compiler.is_compiling() or _simulated_gpu.capability is None:  # in this order: the compiler stops here
        return None
    fake = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
    return _simulated_gpu.capability if fake else None


def fused(
    *,
    reference: Callable[..., Any],
    why_not: Callable[..., str | None],
    replayable: bool = True,
    has_choice: bool = False,
    native: FindNative | None = None,
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Makes a function run its own body if `why_not` returns no reason against it, and `reference` otherwise.

    A reference is plain torch: on a CPU, in float64 and for second derivatives everything works as in torch.

    Args:
        replayable: Whether the arguments alone determine what the body does. False if it depends on autocast, for
            example: then calls are never replayed.
        has_choice: Whether its operator has several backends, of which `supports` names the one that runs.
        native: The function of torch that does the same as a call with these arguments that chose torch's backend, or
            None. Without gradients it is called directly then.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        replays = ReplayCache(native, replays=replayable)

        @functools.wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            if _mode == "off":
                return reference(*args, **kwargs)  # type: ignore[no-any-return]
            if replayable or (native and not torch.compiler.is_compiling() and not _is_any_autocast_enabled()):
                return replays.call(dispatch, args, kwargs)  # type: ignore[no-any-return]
            return dispatch(*args, **kwargs)

        def dispatch(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            reason = why_not(*args, **kwargs)
            if reason is None:
                return function(*args, **kwargs)
            if _mode == "require":
                raise KernelUnavailable(f"The kernel of {function.__name__} cannot run: {reason}.")
            return reference(*args, **kwargs)  # type: ignore[no-any-return]

        call.why_not = why_not  # type: ignore[attr-defined]
        call.reference = reference  # type: ignore[attr-defined]
        call.has_choice = has_choice  # type: ignore[attr-defined]
        return call

    return decorate


def cannot_run(*tensors: torch.Tensor | None, dtypes: tuple[torch.dtype, ...] = FLOATS) -> str | None:
    """The reason why no kernel supports these tensors, or None. Only floating point dtypes are checked."""
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
    if (not _HAS_TRITON or gpu_vendor() not in VENDORS) and _simulated_capability() is None:
        return f"there are no kernels for {gpu_vendor()} GPUs" if _HAS_TRITON else "Triton is not installed"
    return None if device is None else too_old(device, _OLDEST)


def too_old(device: torch.device, oldest: tuple[int, int]) -> str | None:
    """The reason why a kernel for compute capability `oldest` and later does not run on this device, or None."""
    if torch.compiler.is_compiling():  # checked again when compiled code runs
        return None
    capability = None if _simulated_gpu.capability is None else _simulated_capability()
    if capability is None and device.type == "cuda":
        capability = cuda_capability(device.index or 0)
    if capability is None or capability >= oldest:
        return None
    return f"it needs compute capability {oldest[0]}.{oldest[1]}, and this GPU has {capability[0]}.{capability[1]}"


_AUTOCAST_DEVICES = tuple(name for name in ("cpu", "cuda", "xpu", "mps") if torch.amp.is_autocast_available(name))
"""Asked once: torch 2.11 cannot compile the question."""


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype of autocast on a device; None where it is off, or where torch has none, as for meta tensors."""
    if device.type not in _AUTOCAST_DEVICES or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Tensors cast as `torch.nn.functional.linear` casts them: to the autocast dtype, if autocast is enabled."""
    dtype = autocast_dtype(tensors[0].device)
    return tensors if dtype is None else tuple(tensor.to(dtype) for tensor in tensors)


def _dtype_names(dtypes: tuple[torch.dtype, ...]) -> str:
    names = [_dtype_name(dtype) for dtype in dtypes]
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0]


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_set_mode(os.environ.get("NEARPEAK_KERNELS", "auto"))
