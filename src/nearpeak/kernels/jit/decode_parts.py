"""How programs of `decode_attention` that share the keys of a sequence put their parts together, in one launch.

Each leaves its largest score, its sum of powers and its sum of values in float32, and takes a ticket. The one that
takes the last adds all up, in the order of the keys: whichever program that is, the result is the same.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nearpeak.kernels.jit.rows import LOG2_E, LOWEST


@triton.jit
def with_sink(maximum, total, sink):
    """The maximum and the sum of powers with one more score, in base e, of which there is no value."""
    sink = sink.to(tl.float32) * LOG2_E
    larger = tl.maximum(tl.maximum(maximum, sink), LOWEST)
    return larger, total * tl.exp2(maximum - larger) + tl.exp2(sink - larger)


@triton.jit
def log_of_sum(maximum, total):
    """The logarithm, in base e, of the sum of exponentials; -inf where nothing was summed."""
    return tl.where(total > 0.0, (maximum + tl.log2(total)) / LOG2_E, float("-inf"))


@triton.jit
def one_over(total):
    """1 / total; 0 where nothing was summed, so that the result is 0 there."""
    return tl.where(total > 0.0, 1.0 / total, 0.0)


@triton.jit
def leave(
    parts, statistics, maximum, total, sums, ROWS: tl.constexpr, HELD: tl.constexpr, VALUE_BLOCK: tl.constexpr
):  # fmt: skip
    """Stores the part of this program. Of a tile of ROWS, the first HELD are kept."""
    row, column = tl.arange(0, ROWS), tl.arange(0, VALUE_BLOCK)
    part = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    statistics += part * (2 * HELD)
    tl.store(statistics + row, maximum, mask=row < HELD)
    tl.store(statistics + HELD + row, total, mask=row < HELD)
    places = parts + part * (HELD * VALUE_BLOCK) + row[:, None] * VALUE_BLOCK + column[None, :]
    tl.store(places, sums, mask=(row < HELD)[:, None])


@triton.jit
def merged(
    parts, statistics, used, HELD: tl.constexpr, VALUE_BLOCK: tl.constexpr, TOGETHER: tl.constexpr
):  # fmt: skip
    """The maximum, the sum of powers and of values of HELD rows, over `used` parts."""
    row, own, column = tl.arange(0, HELD), tl.arange(0, TOGETHER), tl.arange(0, VALUE_BLOCK)
    first_part = tl.program_id(0).to(tl.int64) * tl.num_programs(1)
    statistics += first_part * (2 * HELD)
    parts += first_part * (HELD * VALUE_BLOCK)
    # [row, part, column]: warps have rows of their own, and threads add up what they loaded themselves
    offsets = row[:, None, None] * VALUE_BLOCK + column[None, None, :]
    maximum = tl.full((HELD,), LOWEST, tl.float32)
    total = tl.zeros((HELD,), tl.float32)
    sums = tl.zeros((HELD, VALUE_BLOCK), tl.float32)
    for first in tl.range(0, used, TOGETHER, num_stages=1):
        exists = (own < used - first)[None, :]
        part = tl.minimum(first + own, used - 1)  # the last part again rather than a mask of all that is loaded
        place = row[:, None] + (part * (2 * HELD))[None, :]
        maxima = tl.where(exists, tl.load(statistics + place), LOWEST)
        totals = tl.load(statistics + HELD + place)
        given = tl.load(parts + (part * (HELD * VALUE_BLOCK))[None, :, None] + offsets)
        larger = tl.maximum(maximum, tl.max(maxima, 1))
        shrink, before = tl.where(exists, tl.exp2(maxima - larger[:, None]), 0.0), tl.exp2(maximum - larger)
        total = total * before + tl.sum(totals * shrink, 1)
        sums = sums * before[:, None] + tl.sum(given * shrink[:, :, None], 1)
        maximum = larger
    return maximum, total, sums


@triton.jit
def finish(
    result, logs, sinks, value_scales, value_scale, maximum, total, sums, batch, head, key_heads, first_row,
    sink_stride, value_scale_stride, GROUP: tl.constexpr, NEW: tl.constexpr, VALUE_DIM: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_VALUE_SCALES: tl.constexpr, ROWS: tl.constexpr, VALUE_BLOCK: tl.constexpr,
):  # fmt: skip
    """Stores results, from sums over all keys."""
    row, column = first_row + tl.arange(0, ROWS), tl.arange(0, VALUE_BLOCK)
    is_row = row < GROUP * NEW
    query_head = head * GROUP + row // NEW
    if HAS_SINKS:
        larger, total = with_sink(maximum, total, tl.load(sinks + query_head * sink_stride, mask=is_row, other=0.0))
        sums *= tl.exp2(maximum - larger)[:, None]
        maximum = larger
    factor = tl.cast(value_scale, tl.float32) * one_over(total)
    if HAS_VALUE_SCALES:
        factor *= tl.load(value_scales + head * value_scale_stride).to(tl.float32)
    number = (batch * key_heads * GROUP + query_head) * NEW + row % NEW
    found = (sums * factor[:, None]).to(result.dtype.element_ty)
    known = is_row[:, None] & (column < VALUE_DIM)[None, :]
    tl.store(result + number[:, None] * VALUE_DIM + column[None, :], found, mask=known)
    tl.store(logs + number, log_of_sum(maximum, total), mask=is_row)
