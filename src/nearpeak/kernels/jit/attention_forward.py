"""The kernel of the forward pass of attention: a block of queries, and all keys that they see, block by block.

Of each query the highest score so far is known, and the sum of the exponentials of scores over it. With a higher score
both the sum and the result so far are multiplied down. No score is ever in memory.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from nearpeak.kernels.jit.attention_configs import forward_heuristic
from nearpeak.kernels.jit.attention_launch import Problem
from nearpeak.kernels.jit.attention_scores import (
    LN_2,
    block_count,
    block_of_queries,
    block_start,
    diagonal_of,
    factor_of,
    head_row,
    is_kept,
    is_seen,
    scored,
    seen_blocks,
    span,
    tile,
    token_row,
    write_tile,
)
from nearpeak.kernels.jit.launch import launch
from nearpeak.kernels.jit.rows import LOG2_E, LOWEST


@triton.jit
def _attend(
    result, top, total, query, key, value, key_stride, value_stride, first, begin, full_begin, full_end, end,
    diagonal, queries, keys, left, right, scale, softcap, bias, bias_query_stride, bias_key_stride, slope, seed,
    number, threshold,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_VALUE_DIM: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, PLAIN: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Adds what keys of full blocks, or of the others, give to result, highest score and sum of exponentials."""
    factor = factor_of(scale, PLAIN)
    query_at = first + tl.arange(0, BLOCK_QUERIES)[:, None]
    for number_of_block in range(block_count(begin, full_begin, full_end, end, MASKED)):
        start = block_start(number_of_block, begin, full_begin, full_end, BLOCK_KEYS, MASKED)
        key_at = start + tl.arange(0, BLOCK_KEYS)[None, :]
        keys_here = tile(key, start, key_stride, keys, BLOCK_KEYS, DIM, BLOCK_DIM, MASKED)
        products = tl.dot(query, tl.trans(keys_here), input_precision="ieee")
        scores, _derivative = scored(
            products, query_at, key_at, diagonal, queries, keys, scale, softcap, bias, bias_query_stride,
            bias_key_stride, slope, SOFTCAP, PLAIN, query.dtype == tl.float32,
        )  # fmt: skip
        if MASKED:
            seen = is_seen(query_at, key_at, diagonal, keys, left, right, LEFT, RIGHT)
            scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1) * factor)
        weights = tl.exp2(scores * factor - higher[:, None])
        less = tl.exp2(top - higher)
        total = total * less + tl.sum(weights, 1)
        result = result * less[:, None]
        if seed is not None:
            weights = tl.where(is_kept(seed, number, query_at, key_at, threshold), weights, 0.0)
        values = tile(value, start, value_stride, keys, BLOCK_KEYS, VALUE_DIM, BLOCK_VALUE_DIM, MASKED)
        result = tl.dot(weights.to(values.dtype), values, result, input_precision="ieee")
        top = higher
    return result, top, total


@triton.jit(do_not_specialize=["queries", "keys", "left", "right", "threshold", "blocks", "heads", "group"])
def attention_forward_kernel(
    query, key, value, result, lse, bias, slopes, sinks, seed, query_starts, key_starts,
    query_batch_stride, query_head_stride, query_stride, key_batch_stride, key_head_stride, key_stride,
    value_batch_stride, value_head_stride, value_stride,
    bias_batch_stride, bias_head_stride, bias_query_stride, bias_key_stride, slope_batch_stride,
    heads, group, queries, keys, blocks, left, right, scale, softcap, threshold, kept_scale,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_VALUE_DIM: tl.constexpr,
    BOTTOM_RIGHT: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, PLAIN: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr,
):  # fmt: skip
    """The result and the logarithm of the sum of exponentials of one block of queries of one head."""
    block, head, batch = block_of_queries(blocks, heads, LEFT, RIGHT)
    number = batch * heads + head
    query_begin, query_count = span(query_starts, batch, queries)
    key_begin, key_count = span(key_starts, batch, keys)
    first = block * BLOCK_QUERIES
    if first >= query_count:
        return
    query += batch * query_batch_stride + head * query_head_stride + query_begin * query_stride
    key += batch * key_batch_stride + head // group * key_head_stride + key_begin * key_stride
    value += batch * value_batch_stride + head // group * value_head_stride + key_begin * value_stride
    if bias is not None:
        bias += batch * bias_batch_stride + head * bias_head_stride
    slope = None
    if slopes is not None:
        slope = tl.load(slopes + batch * slope_batch_stride + head).to(tl.float32)

    top = tl.full([BLOCK_QUERIES], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_QUERIES], tl.float32)
    if sinks is not None:  # a key without a value
        sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
        top = tl.maximum(top, sink)
        total += tl.exp2(sink - top)
    sums = tl.zeros([BLOCK_QUERIES, BLOCK_VALUE_DIM], tl.float32)
    queries_here = tile(query, first, query_stride, query_count, BLOCK_QUERIES, DIM, BLOCK_DIM, True)
    diagonal = diagonal_of(query_count, key_count, BOTTOM_RIGHT)
    last = tl.minimum(first + BLOCK_QUERIES, query_count) - 1
    begin, full_begin, full_end, end = seen_blocks(
        first, last, diagonal, key_count, left, right, LEFT, RIGHT, BLOCK_KEYS
    )
    sums, top, total = _attend(
        sums, top, total, queries_here, key, value, key_stride, value_stride, first,
        begin, full_begin, full_end, end, diagonal, query_count, key_count, left, right, scale, softcap,
        bias, bias_query_stride, bias_key_stride, slope, seed, number, threshold,
        DIM, VALUE_DIM, BLOCK_DIM, BLOCK_VALUE_DIM, LEFT, RIGHT, SOFTCAP, PLAIN, BLOCK_QUERIES, BLOCK_KEYS, False,
    )  # fmt: skip
    sums, top, total = _attend(
        sums, top, total, queries_here, key, value, key_stride, value_stride, first,
        begin, full_begin, full_end, end, diagonal, query_count, key_count, left, right, scale, softcap,
        bias, bias_query_stride, bias_key_stride, slope, seed, number, threshold,
        DIM, VALUE_DIM, BLOCK_DIM, BLOCK_VALUE_DIM, LEFT, RIGHT, SOFTCAP, PLAIN, BLOCK_QUERIES, BLOCK_KEYS, True,
    )  # fmt: skip

    share = 1.0 / total
    if seed is not None:
        share *= tl.cast(kept_scale, tl.float32)
    share = tl.where(total == 0.0, 0.0, share)  # a query that sees nothing
    result += (token_row(query_starts, batch, query_begin, queries) * heads + head) * VALUE_DIM
    write_tile(
        result, sums * share[:, None], first, heads * VALUE_DIM, query_count, BLOCK_QUERIES, VALUE_DIM, BLOCK_VALUE_DIM
    )
    at = first + tl.arange(0, BLOCK_QUERIES)
    lse += head_row(query_starts, batch, query_begin, head, heads, queries)
    logarithm = tl.where(total == 0.0, float("-inf"), (top + tl.log2(total)) * LN_2)
    tl.store(lse + at, logarithm, mask=at < query_count)


def forward(problem: Problem, *, config: dict[str, Any] | None = None) -> tuple[Tensor, Tensor]:
    """The result, tokens before heads in memory, and the logarithms of sums of exponentials, in float32."""
    result = problem.by_token(problem.batches, problem.queries, problem.heads, problem.value_dim)
    lse = problem.by_head(float("-inf"))
    config = config or problem.tuned("attention_forward")
    config = config or forward_heuristic(problem.widest, problem.itemsize, problem.is_plain)
    blocks = triton.cdiv(problem.most_queries, config["queries"])
    launch(
        attention_forward_kernel, (blocks * problem.heads * problem.sequences, 1, 1),
        problem.query, problem.key, problem.value, result, lse, problem.bias, problem.slopes,
        problem.sinks, *problem.of_both(), *problem.strides(), *problem.numbers(blocks),
        *problem.constants(), config["queries"], config["keys"],
        warps=config["warps"], stages=config["stages"],
    )  # fmt: skip
    return result, lse
