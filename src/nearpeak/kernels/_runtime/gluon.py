"""`runs_on`, `descriptor`: whether kernels in Gluon run on a device, and what their tiles are copied by."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from nearpeak.kernels._runtime.policy import INTERPRETED

_TRITON_VERSION = (3, 6)
"""The version whose Gluon the kernels of this package were written with; it changes with each."""
_TRITON_DTYPE_NAMES = {"float8_e4m3fn": "float8e4nv", "float8_e5m2": "float8e5"}
"""What Triton calls other than torch does."""


def runs_on(device: torch.device) -> bool:
    """Whether kernels in Gluon for Hopper run on a device, or can be compiled where there is no GPU."""
    return not INTERPRETED and _has_supported_gluon() and _is_hopper(device.index if device.type == "cuda" else None)


@functools.cache
def _has_supported_gluon() -> bool:
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    return version == _TRITON_VERSION and importlib.util.find_spec("triton.experimental.gluon") is not None


@functools.cache
def _is_hopper(index: int | None) -> bool:
    return index is None or torch.cuda.get_device_capability(index) == (9, 0)


def descriptor(x: Tensor, block: list[int]) -> Any:
    """What a block of a tensor is copied by, to where the tensor cores find it."""
    return strided_descriptor(x, x.shape, x.stride(), block)


def strided_descriptor(x: Tensor, shape: Sequence[int], strides: Sequence[int], block: list[int]) -> Any:
    """The same of a tensor as if it had another shape and strides, which may be more than a tensor can have."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return TensorDescriptor(x, list(shape), list(strides), block, _shared_layout(x.dtype, tuple(block)))


@functools.cache
def _shared_layout(dtype: torch.dtype, block: tuple[int, ...]) -> Any:
    from triton.experimental.gluon import language as gl

    name = str(dtype).removeprefix("torch.")
    return gl.NVMMASharedLayout.get_default_for(list(block), getattr(gl, _TRITON_DTYPE_NAMES.get(name, name)))
