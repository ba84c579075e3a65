"""`run_fake`: runs an operator on fake tensors, also where torch's shapes for them refuse what its kernels take."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

_ALIGNMENT = 16
"""Bytes to which the rows of a grouped product's result are padded."""


def run_fake(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of `func(*args, **kwargs)`."""
    special = _SPECIAL.get(func)
    result = NotImplemented if special is None else special(*args, **kwargs)
    return func(*args, **kwargs) if result is NotImplemented else result


def _grouped_mm(
    left: torch.Tensor,
    right: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Any:
    """Products of groups in float32 and float16, which torch has kernels for, and shapes of bfloat16 alone."""
    if left.dtype == torch.bfloat16 or left.dtype != right.dtype or bias is not None:
        return NotImplemented
    if left.dim() == 2 and right.dim() == 2:  # groups of the inner dimension
        if offs is None:
            return NotImplemented
        shape: tuple[int, ...] = (offs.shape[0], left.shape[0], right.shape[1])
    elif left.dim() == 3 and right.dim() == 3:
        shape = (left.shape[0], left.shape[1], right.shape[2])
    else:  # groups of rows or of columns
        shape = (left.shape[-2], right.shape[-1])
    if (left.dim() == 3 or right.dim() == 3) and left.shape[-1] != right.shape[-2]:
        return NotImplemented
    dtype = out_dtype or left.dtype
    step = _ALIGNMENT // dtype.itemsize
    row = math.ceil(shape[-1] / step) * step
    strides = (row, 1) if len(shape) == 2 else (shape[1] * row, row, 1)
    return torch.empty_strided(shape, strides, dtype=dtype, device=left.device)


_SPECIAL: dict[Any, Callable[..., Any]] = {
    torch.ops.aten._grouped_mm.default: _grouped_mm,
}
