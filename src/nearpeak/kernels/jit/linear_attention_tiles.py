"""What the kernels of linear attention share: features, and tiles of tokens with features in the place of numbers."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def features(x):
    """1 + elu(x). That of -inf is 0, which is what tokens and columns that do not exist are to have."""
    return tl.where(x > 0.0, x + 1.0, tl.exp(x))


@triton.jit
def computed(values, FLOAT16: tl.constexpr):
    """As products take them: bfloat16 and float32 are as they are, float16 becomes float32.

    The sums over tokens that are multiplied here pass the largest float16, and their inverses its smallest. The tensor
    cores take float32 with as many bits as float16 has.
    """
    if FLOAT16:
        values = values.to(tl.float32)
    return values


@triton.jit
def tokens_of(
    x, first, stride, tokens, first_column, COLUMNS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    FEATURES: tl.constexpr, WHOLE: tl.constexpr, EXACT: tl.constexpr = True,
):  # fmt: skip
    """ROWS tokens from `first` on, BLOCK of their columns, zeros where there are none; in float32 as features.

    Not EXACT: tokens that do not exist may have any finite features, which saves looking at each number.
    """
    at = tl.arange(0, ROWS)
    columns = first_column + tl.arange(0, BLOCK)
    places = x + tl.cast(first, tl.int64) * stride + (at[:, None] * stride + columns[None, :])
    there = (first + at < tokens)[:, None]
    if not WHOLE:
        there = there & (columns < COLUMNS)[None, :]
    if FEATURES and WHOLE and not EXACT:
        values = features(tl.load(places, mask=there, other=0.0).to(tl.float32))
    elif FEATURES:
        values = features(tl.load(places, mask=there, other=float("-inf")).to(tl.float32))
    else:
        values = tl.load(places, mask=there, other=0.0)
    return values


@triton.jit
def numbers_of(x, first, tokens, other, ROWS: tl.constexpr):
    """One float32 for each of ROWS tokens."""
    at = first + tl.arange(0, ROWS)
    return tl.load(x + at, mask=at < tokens, other=other)
