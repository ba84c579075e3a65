"""What the kernels of `decode_attention` share, and the one for a single query to each head of keys.

A program takes a part of the keys of one head and one sequence, for all queries that see them. Which part follows from
the length of the sequence, which only the device knows: all programs of a sequence have about as many keys, in whole
blocks, and those for which none are left end at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nearpeak.kernels.jit.cross_entropy_row import tanh
from nearpeak.kernels.jit.rows import LOG2_E, LOWEST, multiple


@triton.jit
def own_keys(length, capacity, window, NEW: tl.constexpr, HAS_WINDOW: tl.constexpr, BLOCK: tl.constexpr):
    """The first key of this program, which a block begins with, and the end of its keys."""
    end = tl.minimum(length, capacity)
    begin = tl.zeros_like(end)
    if HAS_WINDOW:
        begin = tl.maximum(length - NEW - window, 0) // BLOCK * BLOCK
    blocks = (tl.maximum(end - begin, 0) + (BLOCK - 1)) // BLOCK
    splits = tl.num_programs(1)
    each = (blocks + splits - 1) // splits * BLOCK
    first = begin + tl.program_id(1) * each
    return first, tl.minimum(first + each, end)


@triton.jit
def page_of(table, first, key, inside, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """The pages of a block of keys, in 64 bits: one for all of them where pages consist of blocks."""
    if PAGE % BLOCK == 0:
        page = tl.load(table + first // PAGE)
    else:
        page = tl.load(table + key // PAGE, mask=inside, other=0)
    return page.to(tl.int64)


@triton.jit
def rows_at(
    page, first, key, page_stride, token_stride, PAGE: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Where the rows of a block of keys begin, in elements."""
    if PAGE == 0:
        place = key
    elif PAGE % BLOCK == 0:
        place = (first % PAGE) + tl.arange(0, BLOCK)
    else:
        place = key % PAGE
    rows = multiple(place.to(tl.int64) * token_stride, WIDTH)
    if PAGE > 0:
        rows += multiple(page * page_stride, WIDTH)
    return rows


@triton.jit
def in_base_2(products, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """Scores for powers of 2, from products of queries and keys."""
    if HAS_SOFTCAP:
        bent, _ = tanh(products * (scale / softcap))
        scores = bent * (softcap * LOG2_E)
    else:
        scores = products * (scale * LOG2_E)
    return scores


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
def decode_row_kernel(
    query, keys, values, lengths, pages, sinks, key_scales, value_scales, result, logs, parts, statistics,
    scale, softcap, key_scale, value_scale, window, capacity, key_heads, row_blocks, rows,
    query_batch, query_head, query_token, query_column, key_batch, key_token, key_head,
    value_batch, value_token, value_head, length_stride, page_batch, sink_stride, key_scale_stride, value_scale_stride,
    GROUP: tl.constexpr, NEW: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PAGE: tl.constexpr,
    KEY_STEP: tl.constexpr, VALUE_STEP: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_KEY_SCALES: tl.constexpr, HAS_VALUE_SCALES: tl.constexpr, IN_PARTS: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, DIM_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """One query. Each place in a block has a maximum, a sum and an accumulator of its own, so that threads meet once,
    at the end, and not at each block."""
    batch, head = (tl.program_id(0) // key_heads).to(tl.int64), (tl.program_id(0) % key_heads).to(tl.int64)
    length = tl.load(lengths + batch * length_stride).to(tl.int32)
    first, end = own_keys(length, capacity, window, NEW, HAS_WINDOW, BLOCK)
    maximum = tl.full((BLOCK,), LOWEST, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    sums = tl.zeros((BLOCK, VALUE_BLOCK), tl.float32)
    column, value_column = tl.arange(0, DIM_BLOCK), tl.arange(0, VALUE_BLOCK)
    scale, softcap = tl.cast(scale, tl.float32), tl.cast(softcap, tl.float32)
    scale *= tl.cast(key_scale, tl.float32)
    if HAS_KEY_SCALES:
        scale *= tl.load(key_scales + head * key_scale_stride).to(tl.float32)
    asked = query + batch * query_batch + head * query_head + column * query_column
    asked = tl.load(asked, mask=(column < DIM) & (first < end), other=0.0).to(tl.float32)[None, :]
    keys += multiple(head * key_head, WIDTH) + (column * KEY_STEP)[None, :]
    values += multiple(head * value_head, WIDTH) + (value_column * VALUE_STEP)[None, :]
    table = pages + batch * page_batch
    if PAGE == 0:
        keys += multiple(batch * key_batch, WIDTH)
        values += multiple(batch * value_batch, WIDTH)
    for at in tl.range(first, end, BLOCK, num_stages=STAGES):
        key = at + tl.arange(0, BLOCK)
        inside = key < end
        page = 0
        if PAGE > 0:
            page = page_of(table, at, key, inside, PAGE, BLOCK)
        place = rows_at(page, at, key, key_batch, key_token, PAGE, BLOCK, WIDTH)
        some = tl.load(keys + place[:, None], mask=inside[:, None] & (column < DIM)[None, :], other=0.0)
        place = rows_at(page, at, key, value_batch, value_token, PAGE, BLOCK, WIDTH)
        here = inside[:, None] & (value_column < VALUE_DIM)[None, :]
        given = tl.load(values + place[:, None], mask=here, other=0.0)
        score = in_base_2(tl.sum(some.to(tl.float32) * asked, 1), scale, softcap, HAS_SOFTCAP)
        seen = inside
        if HAS_WINDOW:
            seen = seen & (key >= length - 1 - window)
        score = tl.where(seen, score, float("-inf"))
        larger = tl.maximum(maximum, score)
        power, shrink = tl.exp2(score - larger), tl.exp2(maximum - larger)
        total = total * shrink + power
        sums = sums * shrink[:, None] + power[:, None] * given.to(tl.float32)
        maximum = larger
    largest = tl.max(maximum, 0)
    shrink = tl.exp2(maximum - largest)
    total = tl.sum(total * shrink, 0)
    number = batch * key_heads + head
    known = value_column < VALUE_DIM
    if IN_PARTS:
        part = number * tl.num_programs(1) + tl.program_id(1)
        tl.store(statistics + part, largest)
        tl.store(statistics + rows * tl.num_programs(1) + part, total)
        if first < end:
            tl.store(parts + part * VALUE_DIM + value_column, tl.sum(sums * shrink[:, None], 0), mask=known)
    else:
        if HAS_SINKS:
            larger, total = with_sink(largest, total, tl.load(sinks + head * sink_stride))
            shrink *= tl.exp2(largest - larger)
            largest = larger
        factor = tl.cast(value_scale, tl.float32) * one_over(total)
        if HAS_VALUE_SCALES:
            factor *= tl.load(value_scales + head * value_scale_stride).to(tl.float32)
        found = tl.sum(sums * shrink[:, None], 0) * factor
        tl.store(result + number * VALUE_DIM + value_column, found.to(result.dtype.element_ty), mask=known)
        tl.store(logs + number, log_of_sum(largest, total))
