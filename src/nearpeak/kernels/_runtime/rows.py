"""What kernels over rows share: tensors as rows, the width of loads, exponential, tanh, and rematerialized values."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd, prod

import triton
import triton.language as tl
from torch import Tensor

LOWEST = tl.constexpr(-3.4028234663852886e38)
"""The lowest float32. A maximum starts from it and not from -inf, so that a difference from it is never inf - inf."""
LOG2_E = tl.constexpr(1.4426950408889634)
MAX_WIDTH = 16
"""Sizes and strides that are multiples of this allow the widest loads, whatever the dtype."""


def as_rows(x: Tensor) -> Tensor:
    """A tensor as (rows, columns) with a column stride of 1.

    This is a view if rows are one stride apart, also a stride of 0, and a copy otherwise.
    """
    columns = x.shape[-1] if x.dim() else 1
    shape = (prod(x.shape[:-1]), columns)
    if columns > 1 and x.stride(-1) != 1:
        return x.contiguous().view(shape)
    if x.dim() == 2:
        return x
    if x.is_contiguous():
        return x.view(shape)
    return x.reshape(shape)


def merge_dimensions(shape: Sequence[int], strides: Sequence[int]) -> list[tuple[int, int]]:
    """Sizes and strides of dimensions; neighbors that one stride leads through are merged, sizes of 1 dropped."""
    merged: list[tuple[int, int]] = []
    for size, stride in zip(shape, strides, strict=True):
        if size == 1:
            continue
        if merged and merged[-1][1] == size * stride:
            merged[-1] = (merged[-1][0] * size, stride)
        else:
            merged.append((size, stride))
    return merged


def common_width(*numbers: int) -> int:
    """The largest power of 2, up to 16, that divides all of these sizes and strides.

    By itself, Triton notices only multiples of 16. A kernel that applies `assume_multiple` to each of them loads
    several elements at once for smaller powers too.
    """
    return gcd(MAX_WIDTH, *numbers)


@triton.jit
def assume_multiple(number, WIDTH: tl.constexpr):
    """The same number, as a multiple of WIDTH to the compiler."""
    return number // WIDTH * WIDTH


@triton.jit
def exponential(x):
    """The exponential; results below 1e-38 become 0, which saves four instructions each."""
    return tl.exp2(x * LOG2_E)


@triton.jit
def tanh(x):
    """The hyperbolic tangent and its derivative in float32.

    From one exponential, and near 0, where that cancels, from a polynomial: the relative error is 1.5e-7 at most.
    """
    size = tl.abs(x)
    decay = exponential(-2.0 * size)
    inverse = 1.0 / (1.0 + decay)
    far = 1.0 - 2.0 * decay * inverse
    square = size * size
    series = 0.0206324477 - 0.0056934003 * square
    series = -0.0537390970 + square * series
    series = 0.1333145648 + square * series
    series = -0.3333328366 + square * series
    near = size + size * square * series
    result = tl.where(size < 0.6, near, far)
    # the derivative from the exponential: 1 - tanh**2 would cancel where tanh is near 1
    return tl.where(x < 0.0, -result, result), 4.0 * decay * inverse * inverse


@triton.jit
def rematerialize(values, size, after):
    """The same values; to the compiler, values of 16 bits are new ones that depend on the number `after`.

    Otherwise it converts a row to float32 once, and keeps that in twice the registers until it is used again. `size` is
    never negative, which the compiler cannot know.
    """
    if values.dtype.primitive_bitwidth == 16:
        never = ((after > 0) & (size < 0)).to(tl.int16)
        values = (values.to(tl.int16, bitcast=True) ^ never).to(values.dtype, bitcast=True)
    return values
