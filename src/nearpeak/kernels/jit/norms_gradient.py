"""What the backward kernels of norms share: rows as they are read, the gradient as it is written, partial sums.

With g = gradient, w = weight and d = x, less its mean for a LayerNorm, n = d * rstd is the normalised row, and

    dx = rstd * (g * w - n * mean(g * w * n) - mean(g * w)), the last for a LayerNorm alone
       = g * (w * rstd) + d * slope + level, with two numbers for each row,

plus the gradient of the sum where there was an addition.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearpeak.kernels.jit.row_starts import row_start


@triton.jit
def within(index, count, column, columns, ROWS: tl.constexpr, FULL: tl.constexpr, EVEN: tl.constexpr):
    """Which rows and which columns there are, and both together; with FULL and EVEN all, which costs nothing."""
    if FULL:
        in_rows = tl.full([ROWS], True, tl.int1)
    else:
        in_rows = index + tl.arange(0, ROWS) < count
    if EVEN:
        in_columns = tl.full(column.shape, True, tl.int1)
    else:
        in_columns = column < columns
    if FULL and EVEN:
        inside = tl.full([ROWS, column.shape[0]], True, tl.int1)
    else:
        inside = in_rows[:, None] & in_columns[None, :]
    return in_rows, in_columns, inside


@triton.jit
def as_float32(values):
    """The same numbers; of two of bfloat16 in a register the second is one instruction from this, and not two."""
    if values.dtype == tl.bfloat16:
        return (values.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return values.to(tl.float32)


@triton.jit
def read_rows(
    tensor, row, column, inside, middle, inner, outer_stride, middle_stride, inner_stride,
    LEVELS: tl.constexpr, POLICY: tl.constexpr,
):  # fmt: skip
    start = row_start(row, middle, inner, outer_stride, middle_stride, inner_stride, LEVELS)
    return tl.load(tensor + start[:, None] + column[None, :], mask=inside, other=0.0, eviction_policy=POLICY)


@triton.jit
def read_weight(weight, column, in_columns):
    """From the L1 cache again for each row: its registers are worth more than this load."""
    # as a row, so that it arrives in the threads that have the columns of others
    return tl.load(weight + column[None, :], mask=in_columns[None, :], other=0.0, eviction_policy="evict_last")


@triton.jit
def widened(factor, offset):
    """The weight as it counts; without an offset None is given."""
    factor = as_float32(factor)
    if offset is not None:
        factor += tl.cast(offset, tl.float32)
    return factor


@triton.jit
def coefficients(along, level, rstd, columns, CENTRED: tl.constexpr):
    """What the elements of a row less their mean are multiplied by, and what is added.

    `along` is the sum of g * w * d along the row, and `level` that of g * w.
    """
    share = rstd / columns
    if CENTRED:
        level = -level * share
    return -along * share * rstd * rstd, level


@triton.jit
def write_rows(result, added, dx, dresidual, row, column, inside, columns):
    """Writes a gradient of rows, with that of their sum added where there was an addition."""
    if added is not None:
        result += as_float32(added)
    written = (row * columns)[:, None] + column[None, :]
    if dx is not None:
        tl.store(dx + written, result.to(dx.dtype.element_ty), mask=inside)
    if dresidual is not None:
        tl.store(dresidual + written, result.to(dresidual.dtype.element_ty), mask=inside)


@triton.jit
def write_partials(
    partials, weight_sum, bias_sum, part, parts, column, in_columns, columns,
    WANTS_WEIGHT: tl.constexpr, WANTS_BIAS: tl.constexpr,
):  # fmt: skip
    """Leaves the sums over the rows of one part: first all parts for the weight, then all for the bias."""
    part = part.to(tl.int64)
    if WANTS_WEIGHT:
        tl.store(partials + part * columns + column, weight_sum, mask=in_columns)
        part += parts
    if WANTS_BIAS:
        tl.store(partials + part * columns + column, bias_sum, mask=in_columns)


def empty_partials(wants: list[bool], parts: int, columns: int, device: torch.device) -> Tensor | None:
    count = wants[2] + wants[3]
    return torch.empty((count, parts, columns), dtype=torch.float32, device=device) if count else None
