"""`quantize` and `dequantize`: tensors in 8 bits with a scale for each block.

Bytes moved for a number of 16 bits: 3, 2 read and 1 written; with one scale for the whole tensor 5, as it is read once
for the scale and once for the values, less what the cache still has of it.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from nearpeak.errors import UsageError, did_you_mean
from nearpeak.kernels._runtime.operator import Operator
from nearpeak.kernels._runtime.policy import FLOATS, cannot_run, fused, too_old

Block = Literal["tensor", "row"] | tuple[int, int]
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_SMALLEST = torch.finfo(torch.float32).tiny
_MAX_BLOCK_ELEMENTS = 32768
"""A program keeps a block in registers."""
_MIN_CAPABILITY = (8, 9)


@torch.no_grad()
def quantize_reference(
    x: Tensor, *, block: Block, dtype: torch.dtype = torch.float8_e4m3fn, power_of_two: bool = False
) -> tuple[Tensor, Tensor]:
    rows, columns = _block_sizes(x, block)
    _check_dtype(dtype)
    return _quantize_operator_reference(x, rows, columns, dtype, power_of_two)


def _quantize_operator_reference(
    x: Tensor, rows: int, columns: int, dtype: torch.dtype, power_of_two: bool
) -> tuple[Tensor, Tensor]:
    shape = scales_shape(x.shape, rows, columns)
    if not x.numel():
        return torch.empty(x.shape, dtype=dtype, device=x.device), torch.ones(shape, device=x.device)
    wide = x.to(torch.float32)
    blocks = _blocks(wide, rows, columns)
    size = blocks.abs()
    largest = torch.where(size.isfinite(), size, 0.0).amax((-3, -1), keepdim=True)
    limit = torch.finfo(dtype).max
    # divided by a tensor: for a number, torch multiplies by its inverse on a GPU, which rounds twice
    scale = (largest / torch.full_like(largest, limit)).clamp(min=_SMALLEST)
    if power_of_two:
        scale = ((scale.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    scale = torch.where(largest > 0, scale, 1.0)
    values = (blocks * (1 / scale)).clamp(-limit, limit).to(dtype)
    return _unblocked(values, x.shape).contiguous(), scale.reshape(shape)


@torch.no_grad()
def dequantize_reference(
    values: Tensor, scales: Tensor, *, block: Block, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    rows, columns = _block_sizes(values, block)
    _check_scales(values, scales, rows, columns)
    return _dequantize_operator_reference(values, scales, rows, columns, dtype)


def _dequantize_operator_reference(
    values: Tensor, scales: Tensor, rows: int, columns: int, dtype: torch.dtype
) -> Tensor:
    if not values.numel():
        return torch.empty(values.shape, dtype=dtype, device=values.device)
    blocks = _blocks(values.to(torch.float32), rows, columns)
    down, across = blocks.shape[-4], blocks.shape[-2]
    result = blocks * scales.to(torch.float32).reshape(*blocks.shape[:-4], down, 1, across, 1)
    return _unblocked(result, values.shape).to(dtype).contiguous()


def _blocks(x: Tensor, rows: int, columns: int) -> Tensor:
    """(..., blocks down, rows, blocks across, columns), padded with zeros."""
    if rows == 0:
        return x.reshape(1, 1, 1, -1)
    x = x.reshape(-1, 1, x.shape[-1]) if rows == 1 else x.reshape(-1, *x.shape[-2:])
    columns = columns or x.shape[-1]
    x = functional.pad(x, (0, -x.shape[-1] % columns, 0, -x.shape[-2] % rows))
    return x.reshape(len(x), x.shape[-2] // rows, rows, x.shape[-1] // columns, columns)


def _unblocked(blocks: Tensor, shape: torch.Size) -> Tensor:
    if blocks.dim() == 4:
        return blocks.reshape(shape)
    count, down, rows, across, columns = blocks.shape
    whole = blocks.reshape(count, down * rows, across * columns)
    return whole[:, : math.prod(shape) // (count * shape[-1]), : shape[-1]].reshape(shape)


def scales_shape(shape: torch.Size, rows: int, columns: int) -> list[int]:
    """The shape of the scales: one for each block of `rows` and `columns`; 0 stands for all."""
    if rows == 0:
        return []
    if columns == 0:
        return list(shape[:-1])
    across = -(-shape[-1] // columns)
    return [*shape[:-1], across] if rows == 1 else [*shape[:-2], -(-shape[-2] // rows), across]


def _block_sizes(x: Tensor, block: Block) -> tuple[int, int]:
    """The rows and columns of a block, 0 for all."""
    if isinstance(block, str):
        if block not in ("tensor", "row"):
            raise UsageError(f"There is no block {block!r}. {did_you_mean(block, ['tensor', 'row'])}")
        rows, columns = (0, 0) if block == "tensor" else (1, 0)
    else:
        rows, columns = block
        if (
            rows < 1
            or columns < 16
            or rows & (rows - 1)
            or columns & (columns - 1)
            or rows * columns > _MAX_BLOCK_ELEMENTS
        ):
            raise UsageError(
                f"A block of {rows} x {columns} cannot be quantized. Its sides are powers of two, columns from 16,"
                f" and no more than {_MAX_BLOCK_ELEMENTS} elements, as (1, 128) and (128, 128)."
            )
    needed = 0 if rows == 0 else 1 if rows == 1 else 2
    if x.dim() < needed:
        raise UsageError(f"Blocks of {block} need a tensor of {needed} dimensions or more, and this has {x.dim()}.")
    return rows, columns


def _check_dtype(dtype: torch.dtype) -> None:
    if dtype not in FLOAT8:
        raise UsageError(f"quantize makes torch.float8_e4m3fn and torch.float8_e5m2, and not {dtype}.")


def _check_scales(values: Tensor, scales: Tensor, rows: int, columns: int) -> None:
    if values.dtype not in FLOAT8:
        raise UsageError(f"dequantize takes torch.float8_e4m3fn and torch.float8_e5m2, and not {values.dtype}.")
    wanted = scales_shape(values.shape, rows, columns)
    if list(scales.shape) != wanted:
        raise UsageError(
            f"Values of the shape {tuple(values.shape)} have scales of the shape {tuple(wanted)} with these blocks, and"
            f" these have {tuple(scales.shape)}."
        )


def _quantize_why_not(
    x: Tensor, *, block: Block, dtype: torch.dtype = torch.float8_e4m3fn, power_of_two: bool = False
) -> str | None:
    _block_sizes(x, block)
    _check_dtype(dtype)
    return _tensor_why_not(x)


def _tensor_why_not(x: Tensor, *_: object) -> str | None:
    if not x.is_floating_point():
        return f"it takes floating point numbers, and this is {x.dtype}"
    return cannot_run(x) or too_old(x.device, _MIN_CAPABILITY)


def _dequantize_why_not(
    values: Tensor, scales: Tensor, *, block: Block, dtype: torch.dtype = torch.bfloat16
) -> str | None:
    rows, columns = _block_sizes(values, block)
    _check_scales(values, scales, rows, columns)
    return _tensors_why_not(values, scales, rows, columns, dtype)


def _tensors_why_not(values: Tensor, scales: Tensor, rows: int, columns: int, dtype: torch.dtype) -> str | None:
    if dtype not in FLOATS:
        return f"it makes float32, bfloat16 and float16, and not {dtype}"
    return cannot_run(values, scales, dtypes=(*FLOATS, *FLOAT8)) or too_old(values.device, _MIN_CAPABILITY)


def _fake(x: Tensor, rows: int, columns: int, dtype: torch.dtype, power_of_two: bool) -> tuple[Tensor, Tensor]:
    shape = scales_shape(x.shape, rows, columns)
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(shape, dtype=torch.float32)


_quantize = Operator(
    "quantize(Tensor x, int rows, int columns, ScalarType dtype, bool power_of_two) -> (Tensor, Tensor)",
    backends={"nvidia": "quantize.triton:quantize"},
    reference=_quantize_operator_reference,
    fake=_fake,
    why_not=_tensor_why_not,
)
_dequantize = Operator(
    "dequantize(Tensor values, Tensor scales, int rows, int columns, ScalarType dtype) -> Tensor",
    backends={"nvidia": "quantize.triton:dequantize"},
    reference=_dequantize_operator_reference,
    fake=lambda values, scales, rows, columns, dtype: values.new_empty(values.shape, dtype=dtype),
    why_not=_tensors_why_not,
)


@fused(reference=quantize_reference, why_not=_quantize_why_not)
@torch.no_grad()
def quantize(
    x: Tensor, *, block: Block, dtype: torch.dtype = torch.float8_e4m3fn, power_of_two: bool = False
) -> tuple[Tensor, Tensor]:
    """Quantizes `x` to 8 bits. Returns contiguous values and the float32 scales to multiply them by.

    The scale of a block is its largest magnitude over the largest number of the dtype, divided in float32 and rounded
    once, the same on all devices; 1 for a block of zeros, and at least 2**-126. A value is `x * (1 / scale)`, each step
    in float32, rounded to the nearest. Infinities do not count for the scale and become the largest number of the
    dtype; NaN stays NaN and does not count either. No derivatives. A tensor whose rows are not dense is copied first.

    Args:
        x: float32, bfloat16 or float16, any shape.
        block: What shares a scale: "tensor" (scales of shape ()), "row" (x.shape[:-1]), or the rows and columns of a
            block in the last two dimensions, powers of two such as (1, 128) and (128, 128); the last blocks may be
            partial. The scales of blocks have the shape (..., rows / block rows, columns / block columns), rounded up.
        dtype: torch.float8_e4m3fn (up to 448) or torch.float8_e5m2 (up to 57344).
        power_of_two: Rounds scales up to powers of two, as the scale format UE8M0 requires; x / scale is then exact.
    """
    rows, columns = _block_sizes(x, block)
    return _quantize(x, rows, columns, dtype, power_of_two)  # type: ignore[no-any-return]


@fused(reference=dequantize_reference, why_not=_dequantize_why_not)
@torch.no_grad()
def dequantize(values: Tensor, scales: Tensor, *, block: Block, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Multiplies values by their scales, in float32, and rounds to `dtype`. Contiguous; no derivatives.

    Args:
        values: The values that `quantize` returned, torch.float8_e4m3fn or torch.float8_e5m2.
        scales: The scales that it returned.
        block: The `block` that it was called with.
        dtype: float32, bfloat16 or float16.
    """
    rows, columns = _block_sizes(values, block)
    return _dequantize(values, scales, rows, columns, dtype)  # type: ignore[no-any-return]
