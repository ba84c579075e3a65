"""`transpose_copy`: swaps the last two dimensions in memory, not only in the strides.

Bytes moved, forward and backward: x is read once and written once. Nothing is saved for the backward pass, which is the
same operation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nearpeak.errors import UsageError
from nearpeak.kernels._runtime.operator import Operator
from nearpeak.kernels._runtime.policy import FLOATS, cannot_run, fused

_DTYPES = (*FLOATS, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2)


def _reference(x: Tensor) -> Tensor:
    if x.dim() < 2:
        raise UsageError(f"transpose_copy takes two dimensions or more, and not the shape {tuple(x.shape)}.")
    return x.transpose(-1, -2).clone(memory_format=torch.contiguous_format)


def _why_not(x: Tensor) -> str | None:
    if x.dim() < 2:
        return f"it takes two dimensions or more, and this has {x.dim()}"
    if x.is_complex() or x.is_quantized:
        return f"it takes real numbers, and this is {str(x.dtype).removeprefix('torch.')}"
    return cannot_run(x, dtypes=_DTYPES)


def _fake(x: Tensor) -> Tensor:
    *many, rows, columns = x.shape
    return x.new_empty([*many, columns, rows])


def _setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    """Saves nothing."""


def _backward(ctx: Any, gradient: Tensor) -> Tensor:
    return _transpose_copy(gradient)  # type: ignore[no-any-return]


_transpose_copy = Operator(
    "transpose_copy(Tensor x) -> Tensor",
    backends={"nvidia": "transpose.triton:forward"},
    reference=_reference,
    fake=_fake,
    why_not=_why_not,
    setup_context=_setup_context,
    backward=_backward,
)


@fused(reference=_reference, why_not=_why_not)
def transpose_copy(x: Tensor) -> Tensor:
    """`x.transpose(-1, -2).contiguous()`, always a copy.

    x has any real dtype and any strides. It is copied first only if more than two strides lead through the dimensions
    before the last two.
    """
    return _transpose_copy(x)  # type: ignore[no-any-return]
