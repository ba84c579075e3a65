"""`runs_on`, `descriptor`: whether kernels in Gluon run on a device, and what their tiles are copied by."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch
import triton
from torch import Tensor

from nearpeak.kernels.policy import INTERPRETED

_TRITON = (3, 6)
"""The version whose Gluon the kernels of this package were written with; it changes with each."""


def runs_on(device: torch.device) -> bool:
    """Whether kernels in Gluon for Hopper run on a device, or can be compiled where there is no GPU."""
    return not INTERPRETED and _is_there() and _is_hopper(device.index if device.type == "cuda" else None)


@functools.cache
def _is_there() -> bool:
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    return version == _TRITON and importlib.util.find_spec("triton.experimental.gluon") is not None


@functools.cache
def _is_hopper(index: int | None) -> bool:
    return index is None or torch.cuda.get_device_capability(index) == (9, 0)


def descriptor(x: Tensor, block: list[int]) -> Any:
    """What a block of a tensor is copied by, to where the tensor cores find it."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return TensorDescriptor.from_tensor(x, block, _layout(x.dtype, tuple(block)))


@functools.cache
def _layout(dtype: torch.dtype, block: tuple[int, ...]) -> Any:
    from triton.experimental.gluon import language as gl

    return gl.NVMMASharedLayout.get_default_for(list(block), getattr(gl, str(dtype).removeprefix("torch.")))
