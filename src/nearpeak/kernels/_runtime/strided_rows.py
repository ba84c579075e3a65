"""Rows of several tensors of one shape, each with its own strides, addressed without copies.

The rows of a slice of a fused projection, or of transposed heads, are not one stride apart. A row number is split into up to
three indices, each with a stride.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

MOST_LEVELS = 3
Strides = tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class StridedRows:
    """Tensors of one shape as rows along their last dimension."""

    tensors: list[Tensor | None]
    """As given, but for those that had to be copied."""
    strides: list[Strides]
    """Of each tensor, in elements, from the outermost index to the innermost."""
    middle: int
    inner: int
    """The sizes of the middle and the innermost index."""
    levels: int
    """How many of the indices count: 1 means that one stride leads from each row to the next."""


def strided_rows(*tensors: Tensor | None) -> StridedRows:
    """The rows of tensors of one shape; None stays None.

    A tensor is copied where its last dimension is not dense, and all are where more than three strides are needed.
    """
    given = [one for one in tensors if one is not None]
    if all(one.is_contiguous() for one in given):
        stride = given[0].shape[-1]
        return StridedRows(tensors=list(tensors), strides=[(0, 0, stride)] * len(tensors), middle=1, inner=1, levels=1)
    dense = [None if one is None else _with_dense_rows(one) for one in tensors]
    found = _merge_dimensions(dense)
    if len(found) > MOST_LEVELS:
        dense = [None if one is None else one.contiguous() for one in dense]
        found = _merge_dimensions(dense)
    found = [(1, (0,) * len(tensors))] * (MOST_LEVELS - len(found)) + found
    outer, middle, inner = (strides for _, strides in found)
    return StridedRows(
        tensors=dense,
        strides=list(zip(outer, middle, inner, strict=True)),
        middle=found[1][0],
        inner=found[2][0],
        levels=3 if found[0][0] > 1 else 2 if found[1][0] > 1 else 1,
    )


def _with_dense_rows(x: Tensor) -> Tensor:
    return x if x.shape[-1] == 1 or x.stride(-1) == 1 else x.contiguous()


def _merge_dimensions(tensors: list[Tensor | None]) -> list[tuple[int, tuple[int, ...]]]:
    """The sizes of the dimensions before the last, and the strides of all tensors; neighbors joined where they can."""
    shape = next(one for one in tensors if one is not None).shape
    found: list[tuple[int, tuple[int, ...]]] = []
    for dimension in range(len(shape) - 1):
        size = shape[dimension]
        if size == 1:
            continue
        strides = tuple(0 if one is None else one.stride(dimension) for one in tensors)
        if found and all(before == size * stride for before, stride in zip(found[-1][1], strides, strict=True)):
            found[-1] = (found[-1][0] * size, strides)
        else:
            found.append((size, strides))
    return found


@triton.jit
def row_start(row, middle, inner, outer_stride, middle_stride, inner_stride, LEVELS: tl.constexpr):
    """Where rows start, in elements; `row` and with it the result are of 64 bits."""
    if LEVELS == 1:
        start = row * inner_stride
    elif LEVELS == 2:
        start = row // inner * middle_stride + row % inner * inner_stride
    else:
        above = row // inner
        start = above // middle * outer_stride + above % middle * middle_stride + row % inner * inner_stride
    return start
