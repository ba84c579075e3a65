"""The portable kernel of `product`: tiles of the result by pointers, for all strides, sizes and GPUs.

Programs of `group` rows of tiles go down before they go across, so that those that run at a time share what they read.
With a gate, a program has the gate and the other factor of its columns, in two sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from nearpeak.kernels.configs import processors
from nearpeak.kernels.jit.activations import activate
from nearpeak.kernels.jit.launch import launch, next_power_of_2
from nearpeak.kernels.operations.product_arguments import BLOCK, BLOCKS, kind_of_scales

GROUP = 8
"""Rows of tiles that are worked on together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Epilogue:
    """What follows a product."""

    bias: Tensor | None = None
    residual: Tensor | None = None
    activation: str = ""
    gated: bool = False
    keep: bool = False
    """Whether what the activation is of is written too."""


class Scales:
    """The scales of factors of 8 bits, and how far apart in memory those of rows and of blocks of features are."""

    def __init__(
        self, x: Tensor, scale_x: Tensor | None, weight: Tensor, scale_weight: Tensor | None, fast: bool
    ) -> None:
        found = kind_of_scales(x, scale_x, weight, scale_weight)
        assert found is not None
        self.kind = found
        self.fast = fast
        self.x, self.x_strides = _strided(scale_x, x.dim() - 1)
        self.weight, self.weight_strides = _strided(scale_weight, weight.dim() - 1)


def _strided(scale: Tensor | None, rows_dim: int) -> tuple[Tensor | None, tuple[int, int]]:
    """A scale as [rows, blocks of features], and strides, which are 0 where one is for all."""
    if scale is None or not scale.dim():
        return scale, (0, 0)
    if scale.dim() == rows_dim:
        scale = scale.reshape(-1)
        return scale, (scale.stride(0), 0)
    scale = scale.reshape(-1, scale.shape[-1])
    return scale, (scale.stride(0), scale.stride(1))


@triton.jit
def add_float32(a, b, total, rest):
    """The sum and the product of a block of float32, and the rest that rounding took, for the next block to begin with.

    Added up one after another, the products of a depth of 1,280 would have 8 times the error (Kahan's sum).
    """
    part = tl.dot(a, b, rest, input_precision="ieee")
    whole = total + part
    rest = part - (whole - total)
    rest = tl.where(tl.abs(rest) < float("inf"), rest, 0.0)  # a sum that is infinite has none, and is to stay so
    return whole, rest


@triton.jit
def multiply_add(a, b, total, rest, PRECISION: tl.constexpr, FAST: tl.constexpr, BLOCK_K: tl.constexpr):
    """The product added to the sum, and the rest, which sums of float32 alone have.

    Sums of 8 bits are made of sums of one block each, unless it is to be fast.
    """
    if a.dtype.primitive_bitwidth == 8 and not FAST:
        total = tl.dot(a, b, total, max_num_imprecise_acc=BLOCK_K)
    elif a.dtype == tl.float32 and PRECISION == "ieee":
        total, rest = add_float32(a, b, total, rest)
    else:
        total = tl.dot(a, b, total, input_precision=PRECISION)
    return total, rest


@triton.jit
def finish(
    total, bias, a_scale, b_scale, row, column, columns, a_scale_row, b_scale_column, HAS_BIAS: tl.constexpr,
    HAS_A_SCALE: tl.constexpr, HAS_B_SCALE: tl.constexpr,
):  # fmt: skip
    """The sum times the scales of its row and column, and the bias."""
    if HAS_A_SCALE:
        total *= tl.load(a_scale + row.to(tl.int64) * a_scale_row).to(tl.float32)[:, None]
    if HAS_B_SCALE:
        total *= tl.load(b_scale + column.to(tl.int64) * b_scale_column, mask=column < columns).to(tl.float32)[None, :]
    if HAS_BIAS:
        total += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    return total


@triton.jit
def product_kernel(
    a, b, bias, residual, a_scale, b_scale, result, kept, rows, columns, depth, a_row, a_depth, b_column, b_depth,
    residual_row, residual_column, a_scale_row, a_scale_block, b_scale_column, b_scale_block, row_tiles, column_tiles,
    group,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, KEEP: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, HAS_A_SCALE: tl.constexpr, HAS_B_SCALE: tl.constexpr, BY_BLOCK: tl.constexpr,
    FAST: tl.constexpr, PRECISION: tl.constexpr, EVEN: tl.constexpr, SCALE_BLOCK: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """`columns` are those of the result; with a gate, the other factor's are so many further on."""
    program = tl.program_id(0)
    in_group = group * column_tiles
    first_tile = program // in_group * group
    high = tl.minimum(row_tiles - first_tile, group)
    row = (first_tile + program % in_group % high) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = program % in_group // high * BLOCK_N + tl.arange(0, BLOCK_N)
    # what is outside reads what is inside once more, which needs no masks, and is not written
    safe_row, safe_column = row % rows, column % columns
    at = tl.arange(0, BLOCK_K)
    a += safe_row.to(tl.int64)[:, None] * a_row + at.to(tl.int64)[None, :] * a_depth
    b += safe_column.to(tl.int64)[None, :] * b_column + at.to(tl.int64)[:, None] * b_depth
    across = tl.cast(columns, tl.int64) * b_column
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    rest = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if GATED:
        other = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        other_rest = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if BY_BLOCK:
        a_scales = a_scale + safe_row.to(tl.int64) * a_scale_row
        b_scales = b_scale + (safe_column // SCALE_BLOCK).to(tl.int64) * b_scale_column
        up_scales = b_scale + ((safe_column + columns) // SCALE_BLOCK).to(tl.int64) * b_scale_column
    a_step, b_step = tl.cast(a_depth, tl.int64) * BLOCK_K, tl.cast(b_depth, tl.int64) * BLOCK_K
    for start in range(0, depth, BLOCK_K):
        if EVEN:
            left, right = tl.load(a), tl.load(b)
        else:
            left = tl.load(a, mask=(at < depth - start)[None, :], other=0.0)
            right = tl.load(b, mask=(at < depth - start)[:, None], other=0.0)
        if BY_BLOCK:
            block = start // SCALE_BLOCK
            left_scale = tl.load(a_scales + block * a_scale_block).to(tl.float32)[:, None]
            right_scale = tl.load(b_scales + block * b_scale_block).to(tl.float32)[None, :]
            total += tl.dot(left, right) * (left_scale * right_scale)
        else:
            total, rest = multiply_add(left, right, total, rest, PRECISION, FAST, BLOCK_K)
        if GATED:
            if EVEN:
                up = tl.load(b + across)
            else:
                up = tl.load(b + across, mask=(at < depth - start)[:, None], other=0.0)
            if BY_BLOCK:
                up_scale = tl.load(up_scales + block * b_scale_block).to(tl.float32)[None, :]
                other += tl.dot(left, up) * (left_scale * up_scale)
            else:
                other, other_rest = multiply_add(left, up, other, other_rest, PRECISION, FAST, BLOCK_K)
        a += a_step
        b += b_step
    outer_a: tl.constexpr = HAS_A_SCALE and not BY_BLOCK
    outer_b: tl.constexpr = HAS_B_SCALE and not BY_BLOCK
    total = finish(
        total,
        bias,
        a_scale,
        b_scale,
        safe_row,
        column,
        columns,
        a_scale_row,
        b_scale_column,
        HAS_BIAS,
        outer_a,
        outer_b,
    )
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    line = row.to(tl.int64)[:, None]
    if KEEP:
        kept += line * (columns * (2 if GATED else 1)) + column[None, :]
        tl.store(kept, total.to(kept.dtype.element_ty), mask=inside)
    if ACTIVATION != "":
        total = activate(total, ACTIVATION)
    if GATED:
        other = finish(
            other, bias + columns, a_scale, b_scale + tl.cast(columns, tl.int64) * b_scale_column, safe_row, column,
            columns, a_scale_row, b_scale_column, HAS_BIAS, outer_a, outer_b,
        )  # fmt: skip
        if KEEP:
            tl.store(kept + columns, other.to(kept.dtype.element_ty), mask=inside)
        total *= other
    if HAS_RESIDUAL:
        residual += line * residual_row + column.to(tl.int64)[None, :] * residual_column
        total += tl.load(residual, mask=inside, other=0.0).to(tl.float32)
    tl.store(result + line * columns + column[None, :], total.to(result.dtype.element_ty), mask=inside)


def multiply(
    a: Tensor, b: Tensor, result: Tensor, kept: Tensor | None, epilogue: Epilogue, scales: Scales | None, tf32: bool,
    config: dict[str, Any] | None = None,
) -> None:  # fmt: skip
    """Writes a @ b.T and what follows it into `result`, which is contiguous and not empty."""
    rows, columns = result.shape
    depth = a.shape[1]
    config = config or tile(a, result, epilogue.gated, tf32)
    block_m, block_n, block_k = config["block_m"], config["block_n"], config["block_k"]
    row_tiles, column_tiles = triton.cdiv(rows, block_m), triton.cdiv(columns, block_n)
    residual = None if epilogue.residual is None else epilogue.residual.reshape(rows, columns)
    bias = None if epilogue.bias is None else epilogue.bias.contiguous()
    left, right = (None, None) if scales is None else (scales.x, scales.weight)
    by_block = scales is not None and scales.kind == BLOCKS
    launch(
        product_kernel, (row_tiles * column_tiles, 1, 1),
        a, b, a if bias is None else bias, a if residual is None else residual, a if left is None else left,
        a if right is None else right, result, a if kept is None else kept, rows, columns, depth, *a.stride(),
        *b.stride(), *((0, 0) if residual is None else residual.stride()),
        *((0, 0) if scales is None else scales.x_strides), *((0, 0) if scales is None else scales.weight_strides),
        row_tiles, column_tiles, GROUP,
        epilogue.activation, epilogue.gated, kept is not None, bias is not None, residual is not None,
        left is not None, right is not None, by_block, scales is not None and scales.fast,
        "tf32" if tf32 else "ieee", depth % block_k == 0, BLOCK, block_m, block_n, block_k,
        warps=config["warps"], stages=config["stages"],
    )  # fmt: skip


def tile(a: Tensor, result: Tensor, has_gate: bool, tf32: bool) -> dict[str, Any]:
    """What to launch with. The shape of a result decides, more than its size, so that there is no table of these."""
    rows, columns = (max(16, next_power_of_2(size)) for size in result.shape)
    wanted = processors(result.device)
    # scales are those of 128 features, so that a block may not have more; float32 without tensor cores takes registers,
    # and its sums are as exact as blocks are short
    block_k = {4: 32 if tf32 else 16, 2: 64, 1: 128}[a.element_size()]
    # sums of float32 have rests beside them; where blocks are not full too, larger tiles had no registers left
    crowded = a.element_size() == 4 and not tf32 and a.shape[1] % block_k != 0
    block_m, block_n = min(rows, 128), min(columns, 64 if has_gate or crowded else 128)
    # small results, of which there are few tiles, have smaller ones
    while block_n > 32 and triton.cdiv(result.shape[0], block_m) * triton.cdiv(result.shape[1], block_n) < wanted:
        if block_m > 64:
            block_m //= 2
        else:
            block_n //= 2
    warps = 8 if block_m * block_n * (2 if has_gate else 1) >= (4096 if crowded else 16384) else 4
    return {"block_m": block_m, "block_n": block_n, "block_k": block_k, "warps": warps, "stages": 3}
