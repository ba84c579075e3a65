"""The kernel of `decode_attention` for several queries to each head of keys.

All queries of the heads that share keys are rows of one tile, so that each key is read once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nearpeak.kernels.jit.decode_eight import fitted, halves
from nearpeak.kernels.jit.decode_keys import near, own_keys, pages_of, starts, within
from nearpeak.kernels.jit.decode_parts import finish, leave, merged
from nearpeak.kernels.jit.decode_row import in_base_2
from nearpeak.kernels.jit.rows import LOWEST, multiple
from nearpeak.kernels.jit.tickets import is_last


@triton.jit
def decode_kernel(
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
    """Several queries, by products of matrices.

    EIGHT: keys and values are of 8 bits, and come as pairs, see `decode_eight`. Then `asked`, `keys` and `sums` are of
    even columns, and those of odd ones are summed apart.
    """
    block, program = tl.program_id(0) % row_blocks, tl.program_id(0) // row_blocks
    batch, head = (program // key_heads).to(tl.int64), (program % key_heads).to(tl.int64)
    length = tl.load(lengths + batch * length_stride).to(tl.int32)
    row = block * ROWS + tl.arange(0, ROWS)
    is_row = row < GROUP * NEW
    token = row % NEW
    column = tl.arange(0, DIM_BLOCK)
    asked = query + batch * query_batch + (head * GROUP + row // NEW) * query_head + token.to(tl.int64) * query_token
    asked = asked[:, None] + (column * query_column)[None, :]
    asked = tl.load(asked, mask=is_row[:, None] & (column < DIM)[None, :], other=0.0)
    first, end, used = own_keys(length, capacity, window, NEW, HAS_WINDOW, PAGE, BLOCK)
    if tl.program_id(1) >= used:
        return
    # in 16 bits where queries are of 16 bits and the cache of the same or of 8, which float16 holds exactly
    ASKED: tl.constexpr = query.dtype.element_ty
    IS_EIGHT: tl.constexpr = EIGHT is not None or keys.dtype.element_ty.primitive_bitwidth == 8
    NARROW: tl.constexpr = ASKED.primitive_bitwidth == 16 and (IS_EIGHT or keys.dtype.element_ty == ASKED)
    WORK: tl.constexpr = tl.float32 if not NARROW else tl.float16 if IS_EIGHT else ASKED
    # powers are up to 2**LIFT, as float16 has nothing between 0 and 2**-24
    LIFT: tl.constexpr = 14.0 if tl.float16 == WORK else 0.0
    IN_ONE: tl.constexpr = 1 if EIGHT is None else 2
    NOTHING: tl.constexpr = 0.0 if EIGHT is None else 0
    scale, softcap = tl.cast(scale, tl.float32), tl.cast(softcap, tl.float32)
    scale *= tl.cast(key_scale, tl.float32)
    if HAS_KEY_SCALES:
        scale *= tl.load(key_scales + head * key_scale_stride).to(tl.float32)
    if tl.float16 == WORK and tl.bfloat16 == ASKED:
        asked, up = fitted(asked)
        scale = (scale * up)[:, None]
    asked = asked.to(WORK)
    asked_odd = asked
    if EIGHT is not None:
        asked, asked_odd = tl.split(tl.reshape(asked, (ROWS, DIM_BLOCK // 2, 2)))
    last = length - NEW + token  # what each query is the token after
    maximum = tl.full((ROWS,), LOWEST, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    sums = tl.zeros((ROWS, VALUE_BLOCK // IN_ONE), tl.float32)
    sums_odd = tl.zeros((ROWS, VALUE_BLOCK // IN_ONE), tl.float32)
    keys += multiple(head * key_head, WIDTH)
    values += multiple(head * value_head, WIDTH)
    table = pages + batch * page_batch
    if PAGE == 0:
        keys += multiple(batch * key_batch, WIDTH)
        values += multiple(batch * value_batch, WIDTH)
    key_offsets = within(KEY_TOKEN, KEY_STEP, PAGE, BLOCK, DIM_BLOCK // IN_ONE)
    value_offsets = within(VALUE_TOKEN, VALUE_STEP, PAGE, BLOCK, VALUE_BLOCK // IN_ONE)
    is_key_column = (tl.arange(0, DIM_BLOCK // IN_ONE) < DIM // IN_ONE)[None, :]
    is_value_column = (tl.arange(0, VALUE_BLOCK // IN_ONE) < VALUE_DIM // IN_ONE)[None, :]
    own = tl.arange(0, BLOCK)
    end = near(table, first, end, PAGE, BLOCK)
    page = pages_of(table, first, end, PAGE, BLOCK)
    for at in tl.range(first, end, BLOCK, num_stages=STAGES):
        inside = own < end - at
        place = starts(keys, page, at, KEY_TOKEN, KEY_PAGE, PAGE, BLOCK)
        some = tl.load(place + key_offsets, mask=inside[:, None] & is_key_column, other=NOTHING)
        place = starts(values, page, at, VALUE_TOKEN, VALUE_PAGE, PAGE, BLOCK)
        given = tl.load(place + value_offsets, mask=inside[:, None] & is_value_column, other=NOTHING)
        page = pages_of(table, at + BLOCK, end, PAGE, BLOCK)  # ahead: loads of the next block wait for it
        if EIGHT is None:
            products = tl.dot(asked, tl.trans(some.to(WORK)), input_precision="ieee")
        else:
            even, odd = halves(some, EIGHT)
            products = tl.dot(asked_odd, tl.trans(odd), tl.dot(asked, tl.trans(even)))
        seen = inside[None, :]
        if NEW > 1:
            seen = seen & (own[None, :] <= last[:, None] - at)
        if HAS_WINDOW:
            seen = seen & (own[None, :] >= last[:, None] - window - at)
        score = tl.where(seen, in_base_2(products, scale, softcap, HAS_SOFTCAP), float("-inf"))
        larger = tl.maximum(maximum, tl.max(score, 1))
        power, shrink = tl.exp2(score - (larger - LIFT)[:, None]), tl.exp2(maximum - larger)
        total = total * shrink + tl.sum(power, 1)
        power = power.to(WORK)
        if EIGHT is None:
            sums = tl.dot(power, given.to(WORK), sums * shrink[:, None], input_precision="ieee")
        else:
            even, odd = halves(given, EIGHT)
            sums = tl.dot(power, even, sums * shrink[:, None])
            sums_odd = tl.dot(power, odd, sums_odd * shrink[:, None])
        maximum = larger
    if EIGHT is not None:
        sums = tl.reshape(tl.join(sums, sums_odd), (ROWS, VALUE_BLOCK))
    if LIFT > 0.0:
        lowered = tl.exp2(tl.zeros_like(total) - LIFT)
        total *= lowered
        sums *= lowered[:, None]
    if not IN_PARTS or used == 1:
        finish(
            result, logs, sinks, value_scales, value_scale, maximum, total, sums, batch, head, key_heads, block * ROWS,
            sink_stride, value_scale_stride, GROUP, NEW, VALUE_DIM, HAS_SINKS, HAS_VALUE_SCALES, ROWS, VALUE_BLOCK,
        )  # fmt: skip
    else:
        leave(parts, statistics, maximum, total, sums, ROWS, HELD, VALUE_BLOCK)
        if is_last(tickets + tl.program_id(0), used):
            all_maximum, all_total, all_sums = merged(parts, statistics, used, HELD, VALUE_BLOCK, TOGETHER)
            finish(
                result, logs, sinks, value_scales, value_scale, all_maximum, all_total, all_sums, batch, head,
                key_heads, block * ROWS, sink_stride, value_scale_stride, GROUP, NEW, VALUE_DIM, HAS_SINKS,
                HAS_VALUE_SCALES, HELD, VALUE_BLOCK,
            )  # fmt: skip
