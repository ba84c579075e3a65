"""Rows of several tensors of one shape, each with its own strides, addressed without copies.

The rows of a slice of a fused projection, or of transposed heads, are not one stride apart. A row number is split into
up to three indices, each with a stride.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from nearpeak.kernels._runtime.rows import assume_multiple, common_width

MOST_LEVELS = 3
Strides = tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class StridedRows:
    """Tensors of one shape as rows along their last dimension."""

    tensors: list[Tensor | None]
    """The tensors, or copies of them."""
    strides: list[Strides]
    """The strides of each tensor in elements, from the outermost index to the innermost."""
    middle: int
    inner: int
    """The sizes of the middle and the innermost index."""
    levels: int
    """The number of indices that are needed: with 1, one stride leads from each row to the next."""
    width: int
    """The power of 2 that divides the number of columns and all strides: how many elements a load may have."""


def strided_rows(*tensors: Tensor | None) -> StridedRows:
    """The rows of tensors of one shape; None stays None.

    A tensor is copied if its last dimension is not contiguous, and all are if more than three strides are needed.
    """
    present = [tensor for tensor in tensors if tensor is not None]
    if all(tensor.is_contiguous() for tensor in present):
        stride = present[0].shape[-1]
        return StridedRows(
            tensors=list(tensors),
            strides=[(0, 0, stride)] * len(tensors),
            middle=1,
            inner=1,
            levels=1,
            width=common_width(stride),
        )
    dense = [None if tensor is None else _with_dense_rows(tensor) for tensor in tensors]
    dimensions = _merge_dimensions(dense)
    if len(dimensions) > MOST_LEVELS:
        dense = [None if tensor is None else tensor.contiguous() for tensor in dense]
        dimensions = _merge_dimensions(dense)
    dimensions = [(1, (0,) * len(tensors))] * (MOST_LEVELS - len(dimensions)) + dimensions
    outer, middle, inner = (strides for _, strides in dimensions)
    return StridedRows(
        tensors=dense,
        strides=list(zip(outer, middle, inner, strict=True)),
        middle=dimensions[1][0],
        inner=dimensions[2][0],
        levels=3 if dimensions[0][0] > 1 else 2 if dimensions[1][0] > 1 else 1,
        width=common_width(present[0].shape[-1], *outer, *middle, *inner),
    )


def _with_dense_rows(x: Tensor) -> Tensor:
    return x if x.shape[-1] == 1 or x.stride(-1) == 1 else x.contiguous()


def _merge_dimensions(tensors: list[Tensor | None]) -> list[tuple[int, tuple[int, ...]]]:
    """The sizes of the dimensions before the last, and the strides of all tensors; adjacent dimensions are merged."""
    shape = next(tensor for tensor in tensors if tensor is not None).shape
    dimensions: list[tuple[int, tuple[int, ...]]] = []
    for dimension in range(len(shape) - 1):
        size = shape[dimension]
        if size == 1:
            continue
        strides = tuple(0 if tensor is None else tensor.stride(dimension) for tensor in tensors)
        if dimensions and all(
            before == size * stride for before, stride in zip(dimensions[-1][1], strides, strict=True)
        ):
            dimensions[-1] = (dimensions[-1][0] * size, strides)
        else:
            dimensions.append((size, strides))
    return dimensions


@triton.jit
def row_start(row, middle, inner, outer_stride, middle_stride, inner_stride, LEVELS: tl.constexpr, WIDTH: tl.constexpr):
    """The first element of rows; `row`, and with it the result, has 64 bits. WIDTH divides all strides."""
    if LEVELS == 1:
        return row * assume_multiple(inner_stride, WIDTH)
    start = row % inner * assume_multiple(inner_stride, WIDTH)
    if LEVELS == 2:
        return start + row // inner * assume_multiple(middle_stride, WIDTH)
    above = row // inner
    start += above // middle * assume_multiple(outer_stride, WIDTH)
    return start + above % middle * assume_multiple(middle_stride, WIDTH)
