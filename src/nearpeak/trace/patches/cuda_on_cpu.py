"""`cuda_on_cpu`: code written for CUDA runs on CPU tensors where torch has no CUDA."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from nearpeak.trace.cuda_ops.autocast import clear_cast_cache, use_cuda_autocast_rules
from nearpeak.trace.patches.shared_patch import SharedPatch, Since, ThreadCounter, patch_attribute

_cuda_requests = ThreadCounter()
"""How often code asked for CUDA and got the CPU, because this torch has no CUDA."""


@contextmanager
def cuda_on_cpu() -> Iterator[Since]:
    """Sends what asks for CUDA to the CPU where torch has no CUDA; does nothing elsewhere.

    Fake CUDA tensors abort the whole process inside autograd in a CPU build of torch. `torch.cuda.is_available()` stays
    False, and the device of a tensor is "cpu".
    """
    with ExitStack() as stack:
        if not torch.cuda.is_available():
            stack.enter_context(_CudaOnCpuMode())
            stack.enter_context(_patch_cuda())
        yield _cuda_requests.since()


def _is_cuda(device: object) -> bool:
    if isinstance(device, str):
        return device == "cuda" or device.startswith("cuda:")
    return isinstance(device, torch.device) and device.type == "cuda"


def _to_cpu(device: Any) -> Any:
    if _is_cuda(device):
        _cuda_requests.count += 1
        return "cpu"
    return device


_WITH_DEVICE = frozenset({torch.Tensor.pin_memory, torch.Tensor.cuda, torch.Tensor.to})


class _CudaOnCpuMode(TorchFunctionMode):
    """Rewrites the device arguments of every torch function; memory is not pinned."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not kwargs and func not in _WITH_DEVICE:  # most calls
            for value in args:
                if type(value) is torch.device:
                    break
            else:
                return func(*args)
        kwargs = dict(kwargs) if kwargs else {}
        if "device" in kwargs:
            kwargs["device"] = _to_cpu(kwargs["device"])
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if func is torch.Tensor.pin_memory:
            return args[0]
        if func is torch.Tensor.cuda:
            _cuda_requests.count += 1
            return args[0].to("cpu")
        if func is torch.Tensor.to and len(args) > 1:
            target = args[1]
            if isinstance(target, int) and not isinstance(target, bool):  # an index of a CUDA device
                target = f"cuda:{target}"
            args = (args[0], _to_cpu(target), *args[2:])
        elif torch.device in map(type, args):
            args = tuple(_to_cpu(value) if isinstance(value, torch.device) else value for value in args)
        return func(*args, **kwargs)


@SharedPatch
@contextmanager
def _patch_cuda() -> Iterator[None]:
    """Inside, what torch disables without CUDA works: autocast, gradient scaling, synchronization."""
    clear = torch.clear_autocast_cache

    def clear_casts() -> None:
        clear_cast_cache()
        clear()

    def synchronize(device: Any = None) -> None:
        _cuda_requests.count += 1

    with (
        _autocast_on_cpu(),
        patch_attribute(torch, "clear_autocast_cache", clear_casts),
        patch_attribute(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False),
        patch_attribute(torch.cuda, "synchronize", synchronize),
    ):
        yield


@contextmanager
def _autocast_on_cpu() -> Iterator[None]:
    """`torch.autocast("cuda")` casts on the CPU as well, and torch says that it is enabled for CUDA.

    Its default dtype stays CUDA's float16.
    """
    kind = torch.amp.autocast_mode.autocast
    init, enter, leave = kind.__init__, kind.__enter__, kind.__exit__

    def redirected_init(
        self: Any, device_type: str, dtype: torch.dtype | None = None, *args: Any, **kwargs: Any
    ) -> None:
        self.stands_for_cuda = _is_cuda(device_type)
        if self.stands_for_cuda:
            device_type = _to_cpu(device_type)
            dtype = dtype or torch.get_autocast_dtype("cuda")
        init(self, device_type, dtype, *args, **kwargs)

    def redirected_enter(self: Any) -> Any:
        use_cuda_autocast_rules()
        if getattr(self, "stands_for_cuda", False):
            self.cuda_before = (torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda"))
            torch.set_autocast_enabled("cuda", self._enabled)
            torch.set_autocast_dtype("cuda", self.fast_dtype)
        return enter(self)  # type: ignore[no-untyped-call]

    def redirected_exit(self: Any, *error: Any) -> Any:
        if getattr(self, "stands_for_cuda", False):
            enabled, dtype = self.cuda_before
            torch.set_autocast_enabled("cuda", enabled)
            torch.set_autocast_dtype("cuda", dtype)
        return leave(self, *error)

    with (
        patch_attribute(kind, "__init__", redirected_init),
        patch_attribute(kind, "__enter__", redirected_enter),
        patch_attribute(kind, "__exit__", redirected_exit),
    ):
        yield
