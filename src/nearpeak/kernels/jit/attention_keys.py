"""The kernel of the gradients of keys and values: a block of keys, and all queries that see it, block by block.

Weights are computed again from what the forward pass left, as transposes: keys are rows. Where several heads of queries
have the same head of keys, one program takes them one after another, so that nothing is added up in memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nearpeak.kernels.jit.attention_queries import by_scores
from nearpeak.kernels.jit.attention_scores import (
    block_count,
    block_start,
    diagonal_of,
    head_row,
    known,
    seen_blocks,
    span,
    tile,
    token_row,
    write_tile,
)


@triton.jit
def _gather(
    key_sums, value_sums, keys_here, values_here, query, gradient, query_head_stride, query_stride,
    gradient_head_stride, gradient_stride, sums, means, bias, bias_head_stride, bias_query_stride, bias_key_stride,
    slopes, seed, first, begin, full_begin, full_end, end, diagonal, group, number, rows, queries, keys, left, right,
    scale, softcap, threshold, kept_scale,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_VALUE_DIM: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, PLAIN: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Adds what queries of full blocks, or of the others, give to both sums.

    One loop goes through the heads and their blocks: two, one in the other, take more registers than there are.
    """
    key_at = first + tl.arange(0, BLOCK_KEYS)[:, None]
    count = block_count(begin, full_begin, full_end, end, MASKED)
    for step in range(group * count):
        member = step // count
        start = block_start(step - member * count, begin, full_begin, full_end, BLOCK_QUERIES, MASKED)
        at = start + tl.arange(0, BLOCK_QUERIES)
        queries_here = tile(
            query + tl.cast(member, tl.int64) * query_head_stride, start, query_stride, queries,
            BLOCK_QUERIES, DIM, BLOCK_DIM, MASKED,
        )  # fmt: skip
        above = tile(
            gradient + tl.cast(member, tl.int64) * gradient_head_stride, start, gradient_stride, queries,
            BLOCK_QUERIES, VALUE_DIM, BLOCK_VALUE_DIM, MASKED,
        )  # fmt: skip
        sums_here = known(sums + tl.cast(member, tl.int64) * rows, at, queries, float("inf"), MASKED)
        means_here = known(means + tl.cast(member, tl.int64) * rows, at, queries, 0.0, MASKED)
        bias_here = None
        if bias is not None:
            bias_here = bias + tl.cast(member, tl.int64) * bias_head_stride
        slope = None
        if slopes is not None:
            slope = tl.load(slopes + member).to(tl.float32)
        used, by_score, derivative = by_scores(
            queries_here, keys_here, values_here, above, sums_here[None, :], means_here[None, :], at[None, :], key_at,
            diagonal, queries, keys, left, right, scale, softcap, bias_here, bias_query_stride, bias_key_stride, slope,
            seed, number + member, threshold, kept_scale, LEFT, RIGHT, SOFTCAP, PLAIN, MASKED, True,
        )  # fmt: skip
        if SOFTCAP:
            by_score *= derivative
        value_sums = tl.dot(used.to(above.dtype), above, value_sums, input_precision="ieee")
        key_sums = tl.dot(by_score.to(above.dtype), queries_here, key_sums, input_precision="ieee")
    return key_sums, value_sums


@triton.jit(do_not_specialize=["queries", "keys", "left", "right", "threshold", "blocks", "heads", "group"])
def attention_keys_kernel(
    query, key, value, gradient, sums, means, by_key, by_value, bias, slopes, seed, query_starts, key_starts,
    query_batch_stride, query_head_stride, query_stride, key_batch_stride, key_head_stride, key_stride,
    value_batch_stride, value_head_stride, value_stride,
    bias_batch_stride, bias_head_stride, bias_query_stride, bias_key_stride, slope_batch_stride,
    gradient_batch_stride, gradient_head_stride, gradient_stride,
    heads, group, queries, keys, blocks, left, right, scale, softcap, threshold, kept_scale,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_VALUE_DIM: tl.constexpr,
    BOTTOM_RIGHT: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, PLAIN: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr,
):  # fmt: skip
    """The gradients of one block of keys and their values, of one head of keys.

    The first keys are seen by the most queries where attention is causal, and begin first.
    """
    program = tl.program_id(0)
    key_heads = heads // group
    first = program % blocks * BLOCK_KEYS
    key_head = (program // blocks % key_heads).to(tl.int64)
    batch = (program // blocks // key_heads).to(tl.int64)
    query_begin, query_count = span(query_starts, batch, queries)
    key_begin, key_count = span(key_starts, batch, keys)
    if first >= key_count:
        return
    key += batch * key_batch_stride + key_head * key_head_stride + key_begin * key_stride
    value += batch * value_batch_stride + key_head * value_head_stride + key_begin * value_stride
    head = key_head * group  # the first that has these keys
    number = batch * heads + head
    query += batch * query_batch_stride + head * query_head_stride + query_begin * query_stride
    gradient += batch * gradient_batch_stride + head * gradient_head_stride + query_begin * gradient_stride
    row = head_row(query_starts, batch, query_begin, head, heads, queries)
    if bias is not None:
        bias += batch * bias_batch_stride + head * bias_head_stride
    if slopes is not None:
        slopes += batch * slope_batch_stride + head

    keys_here = tile(key, first, key_stride, key_count, BLOCK_KEYS, DIM, BLOCK_DIM, True)
    values_here = tile(value, first, value_stride, key_count, BLOCK_KEYS, VALUE_DIM, BLOCK_VALUE_DIM, True)
    key_sums = tl.zeros([BLOCK_KEYS, BLOCK_DIM], tl.float32)
    value_sums = tl.zeros([BLOCK_KEYS, BLOCK_VALUE_DIM], tl.float32)
    diagonal = diagonal_of(query_count, key_count, BOTTOM_RIGHT)
    last = tl.minimum(first + BLOCK_KEYS, key_count) - 1
    begin, full_begin, full_end, end = seen_blocks(
        first, last, -diagonal, query_count, right, left, RIGHT, LEFT, BLOCK_QUERIES
    )
    key_sums, value_sums = _gather(
        key_sums, value_sums, keys_here, values_here, query, gradient, query_head_stride, query_stride,
        gradient_head_stride, gradient_stride, sums + row, means + row, bias, bias_head_stride, bias_query_stride,
        bias_key_stride, slopes, seed, first, begin, full_begin, full_end, end, diagonal, group, number, queries,
        query_count, key_count, left, right, scale, softcap, threshold, kept_scale,
        DIM, VALUE_DIM, BLOCK_DIM, BLOCK_VALUE_DIM, LEFT, RIGHT, SOFTCAP, PLAIN, BLOCK_QUERIES, BLOCK_KEYS, False,
    )  # fmt: skip
    key_sums, value_sums = _gather(
        key_sums, value_sums, keys_here, values_here, query, gradient, query_head_stride, query_stride,
        gradient_head_stride, gradient_stride, sums + row, means + row, bias, bias_head_stride, bias_query_stride,
        bias_key_stride, slopes, seed, first, begin, full_begin, full_end, end, diagonal, group, number, queries,
        query_count, key_count, left, right, scale, softcap, threshold, kept_scale,
        DIM, VALUE_DIM, BLOCK_DIM, BLOCK_VALUE_DIM, LEFT, RIGHT, SOFTCAP, PLAIN, BLOCK_QUERIES, BLOCK_KEYS, True,
    )  # fmt: skip

    row = token_row(key_starts, batch, key_begin, keys) * key_heads + key_head
    key_sums *= tl.cast(scale, tl.float32)
    if seed is not None:
        value_sums *= tl.cast(kept_scale, tl.float32)
    write_tile(by_key + row * DIM, key_sums, first, key_heads * DIM, key_count, BLOCK_KEYS, DIM, BLOCK_DIM)
    write_tile(
        by_value + row * VALUE_DIM, value_sums, first, key_heads * VALUE_DIM, key_count, BLOCK_KEYS, VALUE_DIM,
        BLOCK_VALUE_DIM,
    )  # fmt: skip
