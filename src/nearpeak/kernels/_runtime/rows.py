"""What kernels over rows share: tensors as rows, the width of loads, exponentials, and values read a second time."""

from __future__ import annotations

from math import gcd, prod

import triton
import triton.language as tl
from torch import Tensor

LOWEST = tl.constexpr(-3.4028234663852886e38)
"""The lowest float32. A maximum starts from it and not from -inf, so that a difference from it is never inf - inf."""
LOG2_E = tl.constexpr(1.4426950408889634)
MAX_WIDTH = 16
"""A number that all sizes and strides are multiples of allows the widest loads for any dtype."""


def as_rows(x: Tensor) -> Tensor:
    """A tensor as [rows, columns], the columns next to each other in memory.

    This is a view where one stride leads from each row to the next, also a stride of 0, and a copy otherwise.
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


def common_width(*numbers: int) -> int:
    """The largest power of 2, up to 16, that divides all of these sizes and strides.

    Triton knows of multiples of 16 alone. A kernel that says `number // WIDTH * WIDTH` of each, as `multiple` does,
    loads several elements at once for others too.
    """
    return gcd(MAX_WIDTH, *numbers)


@triton.jit
def assume_multiple(number, WIDTH: tl.constexpr):
    """The same number, which the compiler now knows to be a multiple of WIDTH."""
    return number // WIDTH * WIDTH


@triton.jit
def exponential(x):
    """The exponential; of numbers below 1e-38 it is 0, which saves four instructions of each."""
    return tl.exp2(x * LOG2_E)


@triton.jit
def rematerialize(values, size, after):
    """The same values; those of 16 bits the compiler takes for others, known only once `after`, a number, is.

    Without this it converts a row to float32 once, and keeps that in twice the registers until it is used again.
    `size` is never negative, which the compiler cannot know.
    """
    if values.dtype.primitive_bitwidth == 16:
        never = ((after > 0) & (size < 0)).to(tl.int16)
        values = (values.to(tl.int16, bitcast=True) ^ never).to(values.dtype, bitcast=True)
    return values
