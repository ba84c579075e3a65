"""The kernel of the gradient of a bias: a block of the bias, and all scores that it was added to, one after another.

Scores are computed again, so that nothing of the size of all scores is in memory, but for a bias that has it. Sums are
made in the order of batches, heads, queries and keys.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from nearpeak.kernels.jit.attention_launch import Problem
from nearpeak.kernels.jit.attention_queries import by_scores
from nearpeak.kernels.jit.attention_scores import diagonal_of, known, seen_blocks, tile
from nearpeak.kernels.jit.launch import launch


@triton.jit(do_not_specialize=["queries", "keys", "left", "right", "threshold", "blocks", "heads", "group"])
def attention_bias_kernel(
    query, key, value, gradient, sums, means, by_bias, bias, slopes, seed,
    query_batch_stride, query_head_stride, query_stride, key_batch_stride, key_head_stride, key_stride,
    value_batch_stride, value_head_stride, value_stride,
    bias_batch_stride, bias_head_stride, bias_query_stride, bias_key_stride, slope_batch_stride,
    gradient_batch_stride, gradient_head_stride, gradient_stride,
    heads, group, queries, keys, blocks, left, right, scale, softcap, threshold, kept_scale,
    batches, bias_heads, query_blocks,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_VALUE_DIM: tl.constexpr,
    BOTTOM_RIGHT: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, PLAIN: tl.constexpr,
    ONE_BATCH: tl.constexpr, ONE_HEAD: tl.constexpr, ONE_QUERY: tl.constexpr, ONE_KEY: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr,
):  # fmt: skip
    """The gradient of one block of a bias, which is one for all batches, heads, queries or keys where ONE is said."""
    program = tl.program_id(0)
    key_first = program % blocks * BLOCK_KEYS
    query_first = program // blocks % query_blocks * BLOCK_QUERIES
    bias_head = (program // blocks // query_blocks % bias_heads).to(tl.int64)
    bias_batch = (program // blocks // query_blocks // bias_heads).to(tl.int64)
    first_batch, end_batch, first_head, end_head = bias_batch, bias_batch + 1, bias_head, bias_head + 1
    query_end, key_end = query_first + BLOCK_QUERIES, key_first + BLOCK_KEYS
    if ONE_BATCH:
        end_batch = first_batch * 0 + batches
    if ONE_HEAD:
        end_head = first_head * 0 + heads
    if ONE_QUERY:
        query_end = query_first * 0 + queries
    if ONE_KEY:
        key_end = key_first * 0 + keys
    diagonal = diagonal_of(queries, keys, BOTTOM_RIGHT)
    result = tl.zeros([BLOCK_QUERIES, BLOCK_KEYS], tl.float32)
    for batch_number in range(first_batch, end_batch):
        for head_number in range(first_head, end_head):
            batch = tl.cast(batch_number, tl.int64)
            head = tl.cast(head_number, tl.int64)
            number = batch * heads + head
            query_here = query + batch * query_batch_stride + head * query_head_stride
            gradient_here = gradient + batch * gradient_batch_stride + head * gradient_head_stride
            key_here = key + batch * key_batch_stride + head // group * key_head_stride
            value_here = value + batch * value_batch_stride + head // group * value_head_stride
            bias_here = bias + batch * bias_batch_stride + head * bias_head_stride
            slope = None
            if slopes is not None:
                slope = tl.load(slopes + batch * slope_batch_stride + head).to(tl.float32)
            for first in range(query_first, query_end, BLOCK_QUERIES):
                at = first + tl.arange(0, BLOCK_QUERIES)
                queries_here = tile(query_here, first, query_stride, queries, BLOCK_QUERIES, DIM, BLOCK_DIM, True)
                above = tile(
                    gradient_here, first, gradient_stride, queries, BLOCK_QUERIES, VALUE_DIM, BLOCK_VALUE_DIM, True
                )
                sums_here = known(sums + number * queries, at, queries, float("inf"), True)
                means_here = known(means + number * queries, at, queries, 0.0, True)
                last = tl.minimum(first + BLOCK_QUERIES, queries) - 1
                begin, _full_begin, _full_end, end = seen_blocks(
                    first, last, diagonal, keys, left, right, LEFT, RIGHT, BLOCK_KEYS
                )
                for start in range(
                    tl.maximum(begin * BLOCK_KEYS, key_first), tl.minimum(end * BLOCK_KEYS, key_end), BLOCK_KEYS
                ):
                    key_at = start + tl.arange(0, BLOCK_KEYS)[None, :]
                    keys_here = tile(key_here, start, key_stride, keys, BLOCK_KEYS, DIM, BLOCK_DIM, True)
                    values_here = tile(
                        value_here, start, value_stride, keys, BLOCK_KEYS, VALUE_DIM, BLOCK_VALUE_DIM, True
                    )
                    _used, by_score, _derivative = by_scores(
                        queries_here, keys_here, values_here, above, sums_here[:, None], means_here[:, None],
                        at[:, None], key_at, diagonal, queries, keys, left, right, scale, softcap, bias_here,
                        bias_query_stride, bias_key_stride, slope, seed, number, threshold, kept_scale,
                        LEFT, RIGHT, SOFTCAP, PLAIN, True, False,
                    )  # fmt: skip
                    result += by_score

    query_at = query_first + tl.arange(0, BLOCK_QUERIES)[:, None]
    key_at = key_first + tl.arange(0, BLOCK_KEYS)[None, :]
    rows, columns = queries, keys
    if ONE_QUERY:
        result = tl.sum(result, 0, keep_dims=True)
        query_at = tl.zeros([1, 1], tl.int32)
        rows = 1
    if ONE_KEY:
        result = tl.sum(result, 1, keep_dims=True)
        key_at = tl.zeros([1, 1], tl.int32)
        columns = 1
    by_bias += (bias_batch * bias_heads + bias_head) * rows * columns
    places = by_bias + query_at.to(tl.int64) * columns + key_at
    tl.store(places, result.to(by_bias.dtype.element_ty), mask=(query_at < rows) & (key_at < columns))


def bias_backward(problem: Problem, gradient: Tensor, sums: Tensor, means: Tensor, bias: Tensor) -> Tensor:
    """The gradient of a bias, of its shape and dtype."""
    sizes = (1,) * (4 - bias.dim()) + tuple(bias.shape)
    wanted = (problem.batches, problem.heads, problem.queries, problem.keys)
    one = [size == 1 for size in sizes]
    result = bias.new_empty(bias.shape)
    side = 64 if problem.itemsize == 2 and problem.widest <= 128 else 32
    query_blocks, key_blocks = (-(-size // side) for size in sizes[2:])
    grid = (key_blocks * query_blocks * sizes[1] * sizes[0], 1, 1)
    if 0 in wanted:
        return result.zero_()
    launch(
        attention_bias_kernel, grid, problem.query, problem.key, problem.value, gradient, sums, means, result,
        problem.bias, problem.slopes, problem.seed, *problem.strides(), *gradient.stride()[:3],
        *problem.numbers(key_blocks), problem.batches, sizes[1], query_blocks, *problem.constants(), *one, side, side,
        warps=4, stages=1,
    )  # fmt: skip
    return result
