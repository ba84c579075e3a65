"""Whether Gluon kernels run on a device (`runs_on`), and tensor descriptors for their tiles (`descriptor`)."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from nearpeak.kernels._runtime.capability import is_hopper
from nearpeak.kernels._runtime.policy import INTERPRETED

_TRITON_VERSION = (3, 6)
"""The version whose Gluon the kernels of this package are written for; Gluon changes with each."""
_TRITON_DTYPE_NAMES = {"float8_e4m3fn": "float8e4nv", "float8_e5m2": "float8e5"}
"""The dtypes that Triton names differently than torch."""


def runs_on(device: torch.device) -> bool:
    """Whether Gluon kernels for Hopper run on a device, or can be compiled if there is no GPU."""
    return not INTERPRETED and _has_supported_gluon() and (device.type != "cuda" or is_hopper(device.index or 0))


@functools.cache
def _has_supported_gluon() -> bool:
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    return version == _TRITON_VERSION and importlib.util.find_spec("triton.experimental.gluon") is not None


def descriptor(x: Tensor, block: list[int]) -> Any:
    """The descriptor by which TMA copies blocks of a tensor, in the layout that the tensor cores read."""
    return strided_descriptor(x, x.shape, x.stride(), block)


def strided_descriptor(x: Tensor, shape: Sequence[int], strides: Sequence[int], block: list[int]) -> Any:
    """The same for another shape and strides, which may exceed what a tensor can have."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return TensorDescriptor(x, list(shape), list(strides), block, _shared_layout(x.dtype, tuple(block)))


@functools.cache
def _shared_layout(dtype: torch.dtype, block: tuple[int, ...]) -> Any:
    from triton.experimental.gluon import language as gl

    name = str(dtype).removeprefix("torch.")
    return gl.NVMMASharedLayout.get_default_for(list(block), getattr(gl, _TRITON_DTYPE_NAMES.get(name, name)))
