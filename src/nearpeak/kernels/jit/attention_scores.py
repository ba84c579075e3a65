"""What all kernels of attention share: where a sequence is, which keys a query sees, and scores from products.

Scores are to the base 2: a weight is exp2(score - lse). Functions take places of queries and of keys as columns and
rows or the other way round, so that the same code serves tiles of scores and of their transposes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nearpeak.kernels.jit.rows import LOG2_E
from nearpeak.kernels.philox import ROUNDS

LN_2 = tl.constexpr(0.6931471805599453)
_ROUNDS = tl.constexpr(ROUNDS)
_LOWEST = tl.constexpr(-(2**31))


@triton.jit
def block_of_queries(blocks, heads, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """The block of queries, the head and the batch of this program."""
    program = tl.program_id(0)
    block = program % blocks
    if RIGHT and not LEFT:
        block = blocks - 1 - block  # the last queries see the most keys, and begin first
    return block, (program // blocks % heads).to(tl.int64), (program // blocks // heads).to(tl.int64)


@triton.jit
def span(starts, batch, tokens):
    """Where among all tokens a sequence begins, and how many it has; without starts it has its batch for itself."""
    begin, count = batch * 0, tokens
    if starts is not None:
        begin = tl.load(starts + batch).to(tl.int64)
        count = (tl.load(starts + batch + 1) - begin).to(tl.int32)
    return begin, count


@triton.jit
def token_row(starts, batch, begin, tokens):
    """The row of a sequence's first token in a tensor [batch, tokens, ...] or [all tokens, ...]."""
    row = begin
    if starts is None:
        row = batch * tokens
    return row


@triton.jit
def head_row(starts, batch, begin, head, heads, tokens):
    """The place of a sequence's first token in a tensor [batch, heads, tokens] or [heads, all tokens]."""
    row = head * tokens + begin
    if starts is None:
        row = (batch * heads + head) * tokens
    return row


@triton.jit
def diagonal_of(queries, keys, BOTTOM_RIGHT: tl.constexpr):
    """Query i is beside key i + diagonal."""
    diagonal = queries * 0
    if BOTTOM_RIGHT:
        diagonal = keys - queries
    return diagonal


@triton.jit
def seen_blocks(first, last, diagonal, keys, left, right, LEFT: tl.constexpr, RIGHT: tl.constexpr, BLOCK: tl.constexpr):
    """The blocks of keys that queries `first` to `last` see: begin, full_begin, full_end, end, by number.

    Those from full_begin to full_end are seen whole by each of these queries. With queries and keys changed round, left
    and right too, and the diagonal turned, these are the queries that see keys.
    """
    begin = keys * 0
    full_begin = keys * 0
    seen = keys
    full_end = keys // BLOCK
    if RIGHT:
        seen = tl.minimum(keys, tl.maximum(last + diagonal + right + 1, 0))
        full_end = tl.minimum(full_end, tl.maximum(first + diagonal + right + 1, 0) // BLOCK)
    if LEFT:
        begin = tl.maximum(first + diagonal - left, 0) // BLOCK
        full_begin = (tl.maximum(last + diagonal - left, 0) + BLOCK - 1) // BLOCK
    end = (seen + BLOCK - 1) // BLOCK
    full_begin = tl.minimum(tl.maximum(full_begin, begin), tl.maximum(end, begin))
    return begin, full_begin, tl.maximum(full_begin, full_end), tl.maximum(end, full_begin)


@triton.jit
def block_start(number, begin, full_begin, full_end, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """Where a block starts: one of the full ones, or of the others, which are before and after these."""
    block = full_begin + number
    if MASKED:
        before = full_begin - begin
        block = tl.where(number < before, begin + number, full_end + number - before)
    return block * BLOCK


@triton.jit
def block_count(begin, full_begin, full_end, end, MASKED: tl.constexpr):
    """How many blocks are full, or the others."""
    count = full_end - full_begin
    if MASKED:
        count = full_begin - begin + end - full_end
    return count


@triton.jit
def is_seen(query_at, key_at, diagonal, keys, left, right, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """Which keys are there, and within the window of a query."""
    seen = (key_at < keys) & (query_at == query_at)
    if LEFT:
        seen = seen & (query_at + diagonal - key_at <= left)
    if RIGHT:
        seen = seen & (key_at - query_at - diagonal <= right)
    return seen


@triton.jit
def tile(x, first, stride, rows, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """ROWS rows of x from `first` on, with zeros to the right of COLUMNS, and below `rows` where MASKED."""
    at = tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    # the start of a tile in 64 bits, and what is added to it in 32
    places = x + tl.cast(first, tl.int64) * stride + (at[:, None] * stride + columns[None, :])
    there = (first + at < rows)[:, None]
    within = (columns < COLUMNS)[None, :]
    if MASKED and COLUMNS == BLOCK:
        values = tl.load(places, mask=there, other=0.0)
    elif MASKED:
        values = tl.load(places, mask=there & within, other=0.0)
    elif COLUMNS == BLOCK:
        values = tl.load(places)
    else:
        values = tl.load(places, mask=within, other=0.0)
    return values


@triton.jit
def write_tile(
    x, values, first, stride, rows, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The opposite of a masked `tile`."""
    at = tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    places = x + tl.cast(first, tl.int64) * stride + (at[:, None] * stride + columns[None, :])
    there = (first + at < rows)[:, None]
    if COLUMNS != BLOCK:
        there = there & (columns < COLUMNS)[None, :]
    tl.store(places, values.to(x.dtype.element_ty), mask=there)


@triton.jit
def tanh(x, EXACT: tl.constexpr):
    value = 1.0 - 2.0 / (1.0 + tl.exp2(x * (2.0 * LOG2_E)))
    if EXACT:  # near 0 the difference has lost bits that float32 has and products of 16 bits have not
        square = x * x
        small = x + x * square * (-0.33333334 + square * (0.13333334 + square * (-0.053968254 + square * 0.02186949)))
        value = tl.where(square < 0.04, small, value)
    return value


@triton.jit
def factor_of(scale, PLAIN: tl.constexpr):
    """What scores of `scored` are still to be multiplied by, which the exponential does in the same instruction."""
    factor = 1.0
    if PLAIN:
        factor = tl.cast(scale, tl.float32) * LOG2_E
    return factor


@triton.jit
def scored(
    products, query_at, key_at, diagonal, queries, keys, scale, softcap, bias, bias_query_stride, bias_key_stride,
    slope, SOFTCAP: tl.constexpr, PLAIN: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Scores of products of queries and keys, and their derivative, over the scale.

    PLAIN scores are products, to be multiplied by `factor_of` yet. `bias` begins at this batch and head.
    """
    scores = products
    derivative = 1.0
    if not PLAIN:
        scale = tl.cast(scale, tl.float32)
        if SOFTCAP:
            softcap = tl.cast(softcap, tl.float32)
            share = tanh(products * (scale / softcap), EXACT)
            scores = share * (softcap * LOG2_E)
            derivative = 1.0 - share * share
        else:
            scores = products * (scale * LOG2_E)
        if slope is not None:
            scores -= tl.abs((query_at + diagonal - key_at).to(tl.float32)) * (slope * LOG2_E)
        if bias is not None:
            there = (query_at < queries) & (key_at < keys)
            places = query_at.to(tl.int64) * bias_query_stride + key_at.to(tl.int64) * bias_key_stride
            added = tl.load(bias + places, mask=there, other=0)
            if bias.dtype.element_ty == tl.int1:
                scores = tl.where(added != 0, scores, float("-inf"))
            else:
                scores += added.to(tl.float32) * LOG2_E
    return scores, derivative


@triton.jit
def is_kept(seed, number, query_at, key_at, threshold):
    """Which weights a dropout keeps: Philox of the places of key and query, and the number of the head in the batch."""
    key = tl.load(seed)
    nothing = (query_at * 0 + key_at * 0).to(tl.uint32)
    low = key_at.to(tl.uint32) + nothing
    high = query_at.to(tl.uint32) + nothing
    random, _, _, _ = tl.philox(key, low, high, number.to(tl.uint32) + nothing, nothing, _ROUNDS)
    return (random.to(tl.int32, bitcast=True) ^ _LOWEST) < threshold


@triton.jit
def known(x, at, queries, otherwise, MASKED: tl.constexpr):
    """What is known of queries, one number of each."""
    if MASKED:
        values = tl.load(x + at, mask=at < queries, other=otherwise)
    else:
        values = tl.load(x + at)
    return values
