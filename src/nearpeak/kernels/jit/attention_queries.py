"""The kernel of the gradient of queries: a block of queries, and all keys that they see, block by block."""

from __future__ import annotations

import triton
import triton.language as tl

from nearpeak.kernels.jit.attention_scores import (
    block_count,
    block_of_queries,
    block_start,
    diagonal_of,
    factor_of,
    head_row,
    is_kept,
    is_seen,
    known,
    scored,
    seen_blocks,
    span,
    tile,
    token_row,
    write_tile,
)


@triton.jit
def by_scores(
    query, keys_here, values_here, above, sums, means, query_at, key_at, diagonal, queries, keys, left, right, scale,
    softcap, bias, bias_query_stride, bias_key_stride, slope, seed, number, threshold, kept_scale,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, PLAIN: tl.constexpr, MASKED: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """The weights of a tile that were kept, the gradient of its scores, and their derivative by scaled products.

    All are [queries, keys], or TRANSPOSED; sums, means and places come in a shape that broadcasts to that.
    """
    if TRANSPOSED:
        products = tl.dot(keys_here, tl.trans(query), input_precision="ieee")
    else:
        products = tl.dot(query, tl.trans(keys_here), input_precision="ieee")
    scores, derivative = scored(
        products, query_at, key_at, diagonal, queries, keys, scale, softcap, bias, bias_query_stride,
        bias_key_stride, slope, SOFTCAP, PLAIN, query.dtype == tl.float32,
    )  # fmt: skip
    if MASKED:
        seen = is_seen(query_at, key_at, diagonal, keys, left, right, LEFT, RIGHT)
        scores = tl.where(seen, scores, float("-inf"))
    weights = tl.exp2(scores * factor_of(scale, PLAIN) - sums)
    if TRANSPOSED:
        by_weight = tl.dot(values_here, tl.trans(above), input_precision="ieee")
    else:
        by_weight = tl.dot(above, tl.trans(values_here), input_precision="ieee")
    used = weights
    if seed is not None:
        kept = is_kept(seed, number, query_at, key_at, threshold)
        by_weight = tl.where(kept, by_weight * tl.cast(kept_scale, tl.float32), 0.0)
        used = tl.where(kept, weights, 0.0)
    return used, weights * (by_weight - means), derivative


@triton.jit
def _gather(
    result, query, above, sums, means, key, value, key_stride, value_stride, first, begin, full_begin, full_end, end,
    diagonal, queries, keys, left, right, scale, softcap, bias, bias_query_stride, bias_key_stride, slope, seed,
    number, threshold, kept_scale,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_VALUE_DIM: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, PLAIN: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Adds what the keys of full blocks, or of the others, give to the result."""
    query_at = first + tl.arange(0, BLOCK_QUERIES)[:, None]
    for number_of_block in range(block_count(begin, full_begin, full_end, end, MASKED)):
        start = block_start(number_of_block, begin, full_begin, full_end, BLOCK_KEYS, MASKED)
        key_at = start + tl.arange(0, BLOCK_KEYS)[None, :]
        keys_here = tile(key, start, key_stride, keys, BLOCK_KEYS, DIM, BLOCK_DIM, MASKED)
        values_here = tile(value, start, value_stride, keys, BLOCK_KEYS, VALUE_DIM, BLOCK_VALUE_DIM, MASKED)
        _used, by_score, derivative = by_scores(
            query, keys_here, values_here, above, sums[:, None], means[:, None], query_at, key_at, diagonal,
            queries, keys, left, right, scale, softcap, bias, bias_query_stride, bias_key_stride, slope, seed, number,
            threshold, kept_scale,
            LEFT, RIGHT, SOFTCAP, PLAIN, MASKED, False,
        )  # fmt: skip
        if SOFTCAP:
            by_score *= derivative
        result = tl.dot(by_score.to(keys_here.dtype), keys_here, result, input_precision="ieee")
    return result


@triton.jit(do_not_specialize=["queries", "keys", "left", "right", "threshold", "blocks", "heads", "group"])
def attention_queries_kernel(
    query, key, value, gradient, sums, means, by_query, bias, slopes, seed, query_starts, key_starts,
    query_batch_stride, query_head_stride, query_stride, key_batch_stride, key_head_stride, key_stride,
    value_batch_stride, value_head_stride, value_stride,
    bias_batch_stride, bias_head_stride, bias_query_stride, bias_key_stride, slope_batch_stride,
    gradient_batch_stride, gradient_head_stride, gradient_stride,
    heads, group, queries, keys, blocks, left, right, scale, softcap, threshold, kept_scale,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_VALUE_DIM: tl.constexpr,
    BOTTOM_RIGHT: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, PLAIN: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr,
):  # fmt: skip
    """The gradient of one block of queries of one head."""
    block, head, batch = block_of_queries(blocks, heads, LEFT, RIGHT)
    number = batch * heads + head
    query_begin, query_count = span(query_starts, batch, queries)
    key_begin, key_count = span(key_starts, batch, keys)
    first = block * BLOCK_QUERIES
    if first >= query_count:
        return
    query += batch * query_batch_stride + head * query_head_stride + query_begin * query_stride
    gradient += batch * gradient_batch_stride + head * gradient_head_stride + query_begin * gradient_stride
    key += batch * key_batch_stride + head // group * key_head_stride + key_begin * key_stride
    value += batch * value_batch_stride + head // group * value_head_stride + key_begin * value_stride
    if bias is not None:
        bias += batch * bias_batch_stride + head * bias_head_stride
    slope = None
    if slopes is not None:
        slope = tl.load(slopes + batch * slope_batch_stride + head).to(tl.float32)

    queries_here = tile(query, first, query_stride, query_count, BLOCK_QUERIES, DIM, BLOCK_DIM, True)
    above = tile(gradient, first, gradient_stride, query_count, BLOCK_QUERIES, VALUE_DIM, BLOCK_VALUE_DIM, True)
    row = head_row(query_starts, batch, query_begin, head, heads, queries)
    at = first + tl.arange(0, BLOCK_QUERIES)
    sums_here = known(sums + row, at, query_count, float("inf"), True)
    means_here = known(means + row, at, query_count, 0.0, True)
    result = tl.zeros([BLOCK_QUERIES, BLOCK_DIM], tl.float32)
    diagonal = diagonal_of(query_count, key_count, BOTTOM_RIGHT)
    last = tl.minimum(first + BLOCK_QUERIES, query_count) - 1
    begin, full_begin, full_end, end = seen_blocks(
        first, last, diagonal, key_count, left, right, LEFT, RIGHT, BLOCK_KEYS
    )
    result = _gather(
        result, queries_here, above, sums_here, means_here, key, value, key_stride, value_stride, first,
        begin, full_begin, full_end, end, diagonal, query_count, key_count, left, right, scale, softcap,
        bias, bias_query_stride, bias_key_stride, slope, seed, number, threshold, kept_scale,
        DIM, VALUE_DIM, BLOCK_DIM, BLOCK_VALUE_DIM, LEFT, RIGHT, SOFTCAP, PLAIN, BLOCK_QUERIES, BLOCK_KEYS, False,
    )  # fmt: skip
    result = _gather(
        result, queries_here, above, sums_here, means_here, key, value, key_stride, value_stride, first,
        begin, full_begin, full_end, end, diagonal, query_count, key_count, left, right, scale, softcap,
        bias, bias_query_stride, bias_key_stride, slope, seed, number, threshold, kept_scale,
        DIM, VALUE_DIM, BLOCK_DIM, BLOCK_VALUE_DIM, LEFT, RIGHT, SOFTCAP, PLAIN, BLOCK_QUERIES, BLOCK_KEYS, True,
    )  # fmt: skip

    result *= tl.cast(scale, tl.float32)
    by_query += (token_row(query_starts, batch, query_begin, queries) * heads + head) * DIM
    write_tile(by_query, result, first, heads * DIM, query_count, BLOCK_QUERIES, DIM, BLOCK_DIM)
