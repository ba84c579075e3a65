"""`emulate_target`: code that runs inside on fake CPU tensors runs the operators and the optimizers of a target."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from nearpeak.kernels._runtime.policy import simulate_gpu
from nearpeak.trace.cuda_ops import attention, autocast, layers
from nearpeak.trace.cuda_ops.registry import current_target, lowering_for
from nearpeak.trace.cuda_ops.target import Target
from nearpeak.trace.patches.shared_patch import SharedPatch, patch_attribute

_DEVICE_LIST_FUNCTIONS = ("_get_foreach_kernels_supported_devices", "_get_capturable_supported_devices")
"""Functions of torch that list the devices of multi-tensor and of capturable optimizers."""
_TYPE_LIST = "_foreach_supported_types"
"""The name of torch's lists of parameter types that multi-tensor optimizers take by default."""


@SharedPatch
@contextmanager
def emulate_gpu_optimizers() -> Iterator[None]:
    """Inside, on threads that trace for a GPU, an optimizer on fake CPU tensors takes the path of GPU tensors.

    That is the multi-tensor path by default, and the capturable one, without synchronization, if the user chooses it.
    """
    with ExitStack() as stack:
        for module in _optimizer_modules():
            for name in _DEVICE_LIST_FUNCTIONS:
                if name in vars(module):
                    stack.enter_context(patch_attribute(module, name, _with_cpu(getattr(module, name))))
            if _TYPE_LIST in vars(module):
                stack.enter_context(patch_attribute(module, _TYPE_LIST, _TypesWithFake(getattr(module, _TYPE_LIST))))
        yield


class _TypesWithFake(list[type]):
    """A list of types that includes fake tensors on threads that trace for a GPU."""

    def __contains__(self, item: object) -> bool:
        return super().__contains__(item) or (item is FakeTensor and current_target() is not None)


def _optimizer_modules() -> list[Any]:
    names = [name for name in sys.modules if name.startswith("torch.optim.")]
    return [sys.modules[name] for name in (*names, "torch.utils._foreach_utils")]


def _with_cpu(listing: Any) -> Any:
    def devices(*args: Any, **kwargs: Any) -> list[str]:
        names: list[str] = listing(*args, **kwargs)
        return [*names, "cpu"] if current_target() is not None else names

    return devices


__all__ = ["attention", "autocast", "emulate_target", "layers"]


@contextmanager
def emulate_target(target: Target | None) -> Iterator[None]:
    """Inside, operators and optimizers are those of the target; None and a CPU change nothing."""
    if target is None or target.kind == "cpu":
        yield
        return
    simulated = target.capability or (8, 0)  # on AMD's GPUs, the portable kernels run
    with lowering_for(target), emulate_gpu_optimizers(), simulate_gpu(simulated):
        if torch.is_autocast_enabled("cpu"):
            autocast.use_cuda_autocast_rules()
        yield
