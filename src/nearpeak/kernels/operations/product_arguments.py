"""What `product` takes: shapes, activations, and which scales go with which blocks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nearpeak.errors import UsageError, did_you_mean

ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "relu_squared", "silu")
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
BLOCK = 128
"""Features that share a scale, where blocks have them."""
NONE, OUTER, BLOCKS = range(3)
"""Kinds of scales: none, factors of whole rows and columns of the result, or factors of blocks of features."""


def check(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: Any, gated: bool, residual: Tensor | None,
    scale_x: Tensor | None, scale_weight: Tensor | None, out_dtype: torch.dtype | None,
) -> None:  # fmt: skip
    """Raises where arguments do not go together."""
    if weight.dim() != 2 or not x.dim() or x.shape[-1] != weight.shape[1]:
        features = x.shape[-1] if x.dim() else "features"
        raise UsageError(
            f"The weight needs the shape [results, {features}] for x of {tuple(x.shape)}, and has"
            f" {tuple(weight.shape)}."
        )
    if activation is not None and activation not in ACTIVATIONS:
        raise UsageError(f"There is no activation {activation!r}. {did_you_mean(str(activation), ACTIVATIONS)}")
    results = weight.shape[0]
    if gated and (activation is None or results % 2):
        raise UsageError(
            f"With a gate, product needs an activation and an even number of results, and got {activation!r} and"
            f" {results}."
        )
    if bias is not None and tuple(bias.shape) != (results,):
        raise UsageError(f"The bias needs the shape {(results,)}, and has {tuple(bias.shape)}.")
    shape = (*x.shape[:-1], results // 2 if gated else results)
    if residual is not None and tuple(residual.shape) != shape:
        raise UsageError(f"The residual needs the shape {shape} of the result, and has {tuple(residual.shape)}.")
    if out_dtype is not None and not out_dtype.is_floating_point:
        raise UsageError(f"out_dtype is a dtype of floating point, and not {out_dtype}.")
    _check_scale(x, scale_x, 1, "scale_x")
    _check_scale(weight, scale_weight, BLOCK, "scale_weight")


def _check_scale(values: Tensor, scale: Tensor | None, rows: int, name: str) -> None:
    if scale is None:
        return
    if values.dtype not in FLOAT8:
        raise UsageError(f"{name} goes with values of torch.float8_e4m3fn, and these are {values.dtype}.")
    shapes = _shapes(values, rows)
    if tuple(scale.shape) not in shapes:
        raise UsageError(
            f"{name} needs one of the shapes {', '.join(map(str, shapes))} for values of {tuple(values.shape)}, and has"
            f" {tuple(scale.shape)}."
        )


def _shapes(values: Tensor, rows: int) -> list[tuple[int, ...]]:
    """Shapes of scales: of the tensor, of rows, and of blocks of so many rows and 128 columns."""
    before, across = tuple(values.shape[:-1]), -(-values.shape[-1] // BLOCK)
    by_block = (*before, across) if rows == 1 else (*before[:-1], -(-before[-1] // rows), across)
    return [(), before, by_block]


def kind_of_scales(x: Tensor, scale_x: Tensor | None, weight: Tensor, scale_weight: Tensor | None) -> int | None:
    """Which scales these are; None for those of blocks for one factor and others for the other."""
    of_blocks = [
        scale is not None and scale.dim() == values.dim() for values, scale in ((x, scale_x), (weight, scale_weight))
    ]
    if all(of_blocks):
        return BLOCKS
    if any(of_blocks):
        return None
    return NONE if scale_x is None and scale_weight is None else OUTER


def dequantised(values: Tensor, scale: Tensor | None, rows: int) -> Tensor:
    """The numbers that values of 8 bits stand for, in float32."""
    wide = values.to(torch.float32)
    if scale is None:
        return wide
    if scale.dim() < values.dim():
        return wide * (scale[..., None] if scale.dim() else scale)
    scale = scale.repeat_interleave(BLOCK, -1)[..., : values.shape[-1]]
    if rows > 1:
        scale = scale.repeat_interleave(rows, -2)[..., : values.shape[-2], :]
    return wide * scale


def result_dtype(x: Tensor, out_dtype: torch.dtype | None) -> torch.dtype:
    """The dtype of the result, but for what autocast says."""
    if out_dtype is not None:
        return out_dtype
    return torch.bfloat16 if x.dtype in FLOAT8 else x.dtype
