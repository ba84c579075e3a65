"""The kernel of `decode_attention` for a single query to each head of keys, and how scores are made."""

from __future__ import annotations

import triton
import triton.language as tl

from nearpeak.kernels.jit.cross_entropy_row import tanh
from nearpeak.kernels.jit.decode_keys import near, own_keys, pages_of, starts, within
from nearpeak.kernels.jit.decode_parts import finish, leave, merged
from nearpeak.kernels.jit.rows import LOG2_E, LOWEST, multiple
from nearpeak.kernels.jit.tickets import is_last


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
def decode_row_kernel(
    query, keys, values, lengths, pages, sinks, key_scales, value_scales, result, logs, parts, statistics, tickets,
    scale, softcap, key_scale, value_scale, window, capacity, key_heads, row_blocks,
    query_batch, query_head, query_token, query_column, key_batch, key_head, value_batch, value_head,
    length_stride, page_batch, sink_stride, key_scale_stride, value_scale_stride,
    GROUP: tl.constexpr, NEW: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PAGE: tl.constexpr,
    KEY_PAGE: tl.constexpr, KEY_TOKEN: tl.constexpr, KEY_STEP: tl.constexpr,
    VALUE_PAGE: tl.constexpr, VALUE_TOKEN: tl.constexpr, VALUE_STEP: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_KEY_SCALES: tl.constexpr,
    HAS_VALUE_SCALES: tl.constexpr, IN_PARTS: tl.constexpr, EIGHT: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, HELD: tl.constexpr, BLOCK: tl.constexpr, DIM_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr,
    TOGETHER: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One query. Each place in a block has a maximum, a sum and an accumulator of its own, so that threads meet once,
    at the end, and not at each block."""
    batch, head = (tl.program_id(0) // key_heads).to(tl.int64), (tl.program_id(0) % key_heads).to(tl.int64)
    length = tl.load(lengths + batch * length_stride).to(tl.int32)
    column, value_column = tl.arange(0, DIM_BLOCK), tl.arange(0, VALUE_BLOCK)
    asked = query + batch * query_batch + head * query_head + column * query_column
    asked = tl.load(asked, mask=column < DIM, other=0.0).to(tl.float32)[None, :]
    first, end, used = own_keys(length, capacity, window, NEW, HAS_WINDOW, PAGE, BLOCK)
    if tl.program_id(1) >= used:
        return
    maximum = tl.full((BLOCK,), LOWEST, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    sums = tl.zeros((BLOCK, VALUE_BLOCK), tl.float32)
    scale, softcap = tl.cast(scale, tl.float32), tl.cast(softcap, tl.float32)
    scale *= tl.cast(key_scale, tl.float32)
    if HAS_KEY_SCALES:
        scale *= tl.load(key_scales + head * key_scale_stride).to(tl.float32)
    keys += multiple(head * key_head, WIDTH)
    values += multiple(head * value_head, WIDTH)
    table = pages + batch * page_batch
    if PAGE == 0:
        keys += multiple(batch * key_batch, WIDTH)
        values += multiple(batch * value_batch, WIDTH)
    key_offsets = within(KEY_TOKEN, KEY_STEP, PAGE, BLOCK, DIM_BLOCK)
    value_offsets = within(VALUE_TOKEN, VALUE_STEP, PAGE, BLOCK, VALUE_BLOCK)
    own = tl.arange(0, BLOCK)
    end = near(table, first, end, PAGE, BLOCK)
    page = pages_of(table, first, end, PAGE, BLOCK)
    for at in tl.range(first, end, BLOCK, num_stages=STAGES):
        inside = own < end - at
        place = starts(keys, page, at, KEY_TOKEN, KEY_PAGE, PAGE, BLOCK)
        some = tl.load(place + key_offsets, mask=inside[:, None] & (column < DIM)[None, :], other=0.0)
        place = starts(values, page, at, VALUE_TOKEN, VALUE_PAGE, PAGE, BLOCK)
        here = inside[:, None] & (value_column < VALUE_DIM)[None, :]
        given = tl.load(place + value_offsets, mask=here, other=0.0)
        page = pages_of(table, at + BLOCK, end, PAGE, BLOCK)  # ahead: loads of the next block wait for it
        score = in_base_2(tl.sum(some.to(tl.float32) * asked, 1), scale, softcap, HAS_SOFTCAP)
        seen = inside
        if HAS_WINDOW:
            seen = seen & (at + own >= length - 1 - window)
        score = tl.where(seen, score, float("-inf"))
        larger = tl.maximum(maximum, score)
        power, shrink = tl.exp2(score - larger), tl.exp2(maximum - larger)
        total = total * shrink + power
        sums = sums * shrink[:, None] + power[:, None] * given.to(tl.float32)
        maximum = larger
    largest = tl.max(maximum, 0)
    shrink = tl.exp2(maximum - largest)
    all_total = tl.sum(total * shrink, 0)[None]
    all_sums = tl.sum(sums * shrink[:, None], 0)[None, :]
    largest = largest[None]
    if not IN_PARTS or used == 1:
        finish(
            result, logs, sinks, value_scales, value_scale, largest, all_total, all_sums, batch, head, key_heads, 0,
            sink_stride, value_scale_stride, 1, 1, VALUE_DIM, HAS_SINKS, HAS_VALUE_SCALES, 1, VALUE_BLOCK,
        )  # fmt: skip
    else:
        leave(parts, statistics, largest, all_total, all_sums, 1, 1, VALUE_BLOCK)
        if is_last(tickets + tl.program_id(0), used):
            largest, all_total, all_sums = merged(parts, statistics, used, 1, VALUE_BLOCK, TOGETHER)
            finish(
                result, logs, sinks, value_scales, value_scale, largest, all_total, all_sums, batch, head, key_heads, 0,
                sink_stride, value_scale_stride, 1, 1, VALUE_DIM, HAS_SINKS, HAS_VALUE_SCALES, 1, VALUE_BLOCK,
            )  # fmt: skip
