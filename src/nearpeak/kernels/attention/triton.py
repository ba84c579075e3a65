"""Attention in portable Triton: the forward kernel, the three backward kernels, and their launchers.

Forward is FlashAttention: a program has one block of queries and loops over the blocks of keys that these see. It keeps
the running maximum of the scores and the sum of exponentials relative to it, and rescales sum and result when the
maximum grows. No score is ever stored.

Backward recomputes the weights from the logarithms of the sums (`lse`). First a kernel computes for each query the sum
of gradient * result, which is the mean of its gradients by weights. Then one kernel has a block of keys and loops over
queries (gradients of keys and values), one has a block of queries and loops over keys (gradient of queries), and one
has a block of the bias. Each gradient is accumulated in registers, in a fixed order, and written once.

Scores are in base 2: a weight is exp2(score - lse). The functions on tiles take positions of queries and keys as rows
and columns or the other way round, so that the same code serves tiles of scores and their transposes.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearpeak.kernels._runtime.launch import launch, next_power_of_2
from nearpeak.kernels._runtime.philox import ROUNDS, keep_scale, signed_threshold
from nearpeak.kernels._runtime.rows import LOG2_E, LOWEST
from nearpeak.kernels._runtime.tuning import shared_bytes, tuned
from nearpeak.kernels.attention.tuning import forward_heuristic, keys_heuristic, queries_heuristic

_MAX_ROW_STRIDE = 2**31 // 256
"""Rows of a tile may be so far apart: a tile has fewer than 256, and is addressed in 32 bits from its start."""
_MAX_WINDOW = 2**29
"""A window of more than any number of tokens."""
_TUNED_SHARED_BYTES = 227 * 1024
"""Of the GPU on which configurations were measured, which may take all of it; GPUs for desktops have 99 KB."""


def portable_kernel_name(kernel: str, causal: bool) -> str:
    """What a portable kernel is called in tables, where its size is that of heads."""
    return kernel + ("_causal" if causal else "")


def addressable(x: Tensor) -> Tensor:
    """The tensor [batch, heads, tokens, dim], or a copy where the kernel cannot address it."""
    if (x.stride(-1) == 1 or x.shape[-1] == 1) and x.stride(-2) < _MAX_ROW_STRIDE:
        return x
    return x.contiguous()


class AttentionProblem:
    """Sizes, strides and options, from the arguments of the operator.

    Tensors are [batch, heads, tokens, dim]; with starts, of one batch.
    """

    def __init__(
        self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, slopes: Tensor | None,
        sinks: Tensor | None, seed: Tensor | None, query_starts: Tensor | None, key_starts: Tensor | None,
        longest_query: int, longest_key: int, left: int, right: int, bottom_right: bool, scale: float, softcap: float,
        dropout: float,
    ) -> None:  # fmt: skip
        self.query, self.key, self.value = addressable(query), addressable(key), addressable(value)
        self.batches, self.heads, self.queries, self.dim = query.shape
        _, self.key_heads, self.keys, self.value_dim = value.shape
        self.packed = query_starts is not None
        self.query_starts = None if query_starts is None else query_starts.contiguous()
        self.key_starts = None if key_starts is None else key_starts.contiguous()
        self.sequences = self.batches if query_starts is None else query_starts.numel() - 1
        self.max_queries = longest_query if self.packed else self.queries
        self.max_keys = longest_key if self.packed else self.keys
        self.original_bias = bias
        self.bias = None if bias is None else bias.expand(self.batches, self.heads, self.queries, self.keys)
        self.slopes = None if slopes is None else slopes.contiguous()
        self.sinks = None if sinks is None else sinks.contiguous()
        self.seed = seed
        self.left, self.right, self.bottom_right = left, right, bottom_right
        self.scale, self.softcap, self.dropout = scale, softcap, dropout
        self.itemsize = query.element_size()
        self.block_dim, self.block_value_dim = (max(next_power_of_2(dim), 16) for dim in (self.dim, self.value_dim))
        self.widest = max(self.block_dim, self.block_value_dim)

    @property
    def group(self) -> int:
        """How many heads of queries have the same head of keys."""
        return self.heads // max(self.key_heads, 1)

    def tuned(self, kernel: str) -> dict[str, Any] | None:
        """What was measured to be best for a portable kernel, where scores are plain: others need more registers."""
        device = self.query.device
        if (
            not self.is_plain
            or self.seed is not None
            or self.itemsize == 4
            or shared_bytes(device) < _TUNED_SHARED_BYTES
        ):
            return None
        return tuned(portable_kernel_name(kernel, self.right >= 0), self.widest, device)

    def by_token(self, batches: int, tokens: int, heads: int, dim: int) -> Tensor:
        """A new tensor [batch, heads, tokens, dim] with tokens before heads in memory.

        It is empty, or zeros where sequences are packed, as there may be tokens that are of none.
        """
        strides = (tokens * heads * dim, dim, heads * dim, 1)
        shape = (batches, heads, tokens, dim)
        made = torch.empty_strided(shape, strides, dtype=self.query.dtype, device=self.query.device)
        return made.zero_() if self.packed else made

    def by_head(self, outside: float) -> Tensor:
        """A new tensor [batch, heads, queries] of float32; of queries that are of no sequence it has this value."""
        shape = (self.batches, self.heads, self.queries)
        made = torch.empty(shape, dtype=torch.float32, device=self.query.device)
        return made.fill_(outside) if self.packed else made

    def seed_and_starts(self) -> tuple[Any, ...]:
        return self.seed, self.query_starts, self.key_starts

    def strides(self) -> tuple[int, ...]:
        found: list[int] = []
        for one in (self.query, self.key, self.value):
            found += (0 if self.packed else one.stride(0), one.stride(1), one.stride(2))
        found += (0, 0, 0, 0) if self.bias is None else self.bias.stride()
        found.append(self.heads if self.slopes is not None and self.slopes.dim() == 2 else 0)
        return tuple(found)

    def numbers(self, blocks: int) -> tuple[Any, ...]:
        return (
            self.heads, self.group, self.queries, self.keys, blocks, min(max(self.left, 0), _MAX_WINDOW),
            min(max(self.right, 0), _MAX_WINDOW), self.scale, self.softcap, signed_threshold(self.dropout),
            keep_scale(self.dropout),
        )  # fmt: skip

    @property
    def is_plain(self) -> bool:
        """Whether scores are products times the scale, which can be left to the exponential."""
        return self.bias is None and self.slopes is None and self.softcap == 0.0 and self.scale > 0.0

    def constants(self) -> tuple[Any, ...]:
        return (
            self.dim, self.value_dim, self.block_dim, self.block_value_dim, self.bottom_right, self.left >= 0,
            self.right >= 0, self.softcap != 0.0, self.is_plain,
        )  # fmt: skip


LN_2 = tl.constexpr(0.6931471805599453)
_PHILOX_ROUNDS = tl.constexpr(ROUNDS)
_INT32_MIN = tl.constexpr(-(2**31))


@triton.jit
def query_block_of_program(blocks, heads, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """The block of queries, the head and the batch of this program."""
    program = tl.program_id(0)
    block = program % blocks
    if RIGHT and not LEFT:
        block = blocks - 1 - block  # the last queries see the most keys, and begin first
    return block, (program // blocks % heads).to(tl.int64), (program // blocks // heads).to(tl.int64)


@triton.jit
def sequence_span(starts, batch, tokens):
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
def visible_blocks(
    first, last, diagonal, keys, left, right, LEFT: tl.constexpr, RIGHT: tl.constexpr, BLOCK: tl.constexpr
):
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
def is_visible(query_at, key_at, diagonal, keys, left, right, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """Which keys are there, and within the window of a query."""
    seen = (key_at < keys) & (query_at == query_at)
    if LEFT:
        seen = seen & (query_at + diagonal - key_at <= left)
    if RIGHT:
        seen = seen & (key_at - query_at - diagonal <= right)
    return seen


@triton.jit
def load_tile(
    x, first, stride, rows, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr
):
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
def store_tile(
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
def exp2_scale(scale, PLAIN: tl.constexpr):
    """What scores of `scored` are still to be multiplied by, which the exponential does in the same instruction."""
    factor = 1.0
    if PLAIN:
        factor = tl.cast(scale, tl.float32) * LOG2_E
    return factor


@triton.jit
def scores_and_derivative(
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
def dropout_mask(seed, number, query_at, key_at, threshold):
    """Which weights a dropout keeps: Philox of the places of key and query, and the number of the head in the batch."""
    key = tl.load(seed)
    nothing = (query_at * 0 + key_at * 0).to(tl.uint32)
    low = key_at.to(tl.uint32) + nothing
    high = query_at.to(tl.uint32) + nothing
    random, _, _, _ = tl.philox(key, low, high, number.to(tl.uint32) + nothing, nothing, _PHILOX_ROUNDS)
    return (random.to(tl.int32, bitcast=True) ^ _INT32_MIN) < threshold


@triton.jit
def load_per_query(x, at, queries, otherwise, MASKED: tl.constexpr):
    """What is known of queries, one number of each."""
    if MASKED:
        values = tl.load(x + at, mask=at < queries, other=otherwise)
    else:
        values = tl.load(x + at)
    return values


@triton.jit
def _accumulate_values(
    result, top, total, query, key, value, key_stride, value_stride, first, begin, full_begin, full_end, end,
    diagonal, queries, keys, left, right, scale, softcap, bias, bias_query_stride, bias_key_stride, slope, seed,
    number, threshold,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_VALUE_DIM: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, PLAIN: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Adds what keys of full blocks, or of the others, give to result, highest score and sum of exponentials."""
    factor = exp2_scale(scale, PLAIN)
    query_at = first + tl.arange(0, BLOCK_QUERIES)[:, None]
    for number_of_block in range(block_count(begin, full_begin, full_end, end, MASKED)):
        start = block_start(number_of_block, begin, full_begin, full_end, BLOCK_KEYS, MASKED)
        key_at = start + tl.arange(0, BLOCK_KEYS)[None, :]
        keys_here = load_tile(key, start, key_stride, keys, BLOCK_KEYS, DIM, BLOCK_DIM, MASKED)
        products = tl.dot(query, tl.trans(keys_here), input_precision="ieee")
        scores, _derivative = scores_and_derivative(
            products, query_at, key_at, diagonal, queries, keys, scale, softcap, bias, bias_query_stride,
            bias_key_stride, slope, SOFTCAP, PLAIN, query.dtype == tl.float32,
        )  # fmt: skip
        if MASKED:
            seen = is_visible(query_at, key_at, diagonal, keys, left, right, LEFT, RIGHT)
            scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1) * factor)
        weights = tl.exp2(scores * factor - higher[:, None])
        less = tl.exp2(top - higher)
        total = total * less + tl.sum(weights, 1)
        result = result * less[:, None]
        if seed is not None:
            weights = tl.where(dropout_mask(seed, number, query_at, key_at, threshold), weights, 0.0)
        values = load_tile(value, start, value_stride, keys, BLOCK_KEYS, VALUE_DIM, BLOCK_VALUE_DIM, MASKED)
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
    block, head, batch = query_block_of_program(blocks, heads, LEFT, RIGHT)
    number = batch * heads + head
    query_begin, query_count = sequence_span(query_starts, batch, queries)
    key_begin, key_count = sequence_span(key_starts, batch, keys)
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
    queries_here = load_tile(query, first, query_stride, query_count, BLOCK_QUERIES, DIM, BLOCK_DIM, True)
    diagonal = diagonal_of(query_count, key_count, BOTTOM_RIGHT)
    last = tl.minimum(first + BLOCK_QUERIES, query_count) - 1
    begin, full_begin, full_end, end = visible_blocks(
        first, last, diagonal, key_count, left, right, LEFT, RIGHT, BLOCK_KEYS
    )
    sums, top, total = _accumulate_values(
        sums, top, total, queries_here, key, value, key_stride, value_stride, first,
        begin, full_begin, full_end, end, diagonal, query_count, key_count, left, right, scale, softcap,
        bias, bias_query_stride, bias_key_stride, slope, seed, number, threshold,
        DIM, VALUE_DIM, BLOCK_DIM, BLOCK_VALUE_DIM, LEFT, RIGHT, SOFTCAP, PLAIN, BLOCK_QUERIES, BLOCK_KEYS, False,
    )  # fmt: skip
    sums, top, total = _accumulate_values(
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
    store_tile(
        result, sums * share[:, None], first, heads * VALUE_DIM, query_count, BLOCK_QUERIES, VALUE_DIM, BLOCK_VALUE_DIM
    )
    at = first + tl.arange(0, BLOCK_QUERIES)
    lse += head_row(query_starts, batch, query_begin, head, heads, queries)
    logarithm = tl.where(total == 0.0, float("-inf"), (top + tl.log2(total)) * LN_2)
    tl.store(lse + at, logarithm, mask=at < query_count)


def forward(problem: AttentionProblem, *, config: dict[str, Any] | None = None) -> tuple[Tensor, Tensor]:
    """The result, tokens before heads in memory, and the logarithms of sums of exponentials, in float32."""
    result = problem.by_token(problem.batches, problem.queries, problem.heads, problem.value_dim)
    lse = problem.by_head(float("-inf"))
    config = config or problem.tuned("attention_forward")
    config = config or forward_heuristic(problem.widest, problem.itemsize, problem.is_plain)
    blocks = triton.cdiv(problem.max_queries, config["queries"])
    launch(
        attention_forward_kernel, (blocks * problem.heads * problem.sequences, 1, 1),
        problem.query, problem.key, problem.value, result, lse, problem.bias, problem.slopes,
        problem.sinks, *problem.seed_and_starts(), *problem.strides(), *problem.numbers(blocks),
        *problem.constants(), config["queries"], config["keys"],
        warps=config["warps"], stages=config["stages"],
    )  # fmt: skip
    return result, lse


@triton.jit
def score_gradients(
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
    scores, derivative = scores_and_derivative(
        products, query_at, key_at, diagonal, queries, keys, scale, softcap, bias, bias_query_stride,
        bias_key_stride, slope, SOFTCAP, PLAIN, query.dtype == tl.float32,
    )  # fmt: skip
    if MASKED:
        seen = is_visible(query_at, key_at, diagonal, keys, left, right, LEFT, RIGHT)
        scores = tl.where(seen, scores, float("-inf"))
    weights = tl.exp2(scores * exp2_scale(scale, PLAIN) - sums)
    if TRANSPOSED:
        by_weight = tl.dot(values_here, tl.trans(above), input_precision="ieee")
    else:
        by_weight = tl.dot(above, tl.trans(values_here), input_precision="ieee")
    used = weights
    if seed is not None:
        kept = dropout_mask(seed, number, query_at, key_at, threshold)
        by_weight = tl.where(kept, by_weight * tl.cast(kept_scale, tl.float32), 0.0)
        used = tl.where(kept, weights, 0.0)
    return used, weights * (by_weight - means), derivative


@triton.jit
def _accumulate_query_gradient(
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
        keys_here = load_tile(key, start, key_stride, keys, BLOCK_KEYS, DIM, BLOCK_DIM, MASKED)
        values_here = load_tile(value, start, value_stride, keys, BLOCK_KEYS, VALUE_DIM, BLOCK_VALUE_DIM, MASKED)
        _used, by_score, derivative = score_gradients(
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
    block, head, batch = query_block_of_program(blocks, heads, LEFT, RIGHT)
    number = batch * heads + head
    query_begin, query_count = sequence_span(query_starts, batch, queries)
    key_begin, key_count = sequence_span(key_starts, batch, keys)
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

    queries_here = load_tile(query, first, query_stride, query_count, BLOCK_QUERIES, DIM, BLOCK_DIM, True)
    above = load_tile(gradient, first, gradient_stride, query_count, BLOCK_QUERIES, VALUE_DIM, BLOCK_VALUE_DIM, True)
    row = head_row(query_starts, batch, query_begin, head, heads, queries)
    at = first + tl.arange(0, BLOCK_QUERIES)
    sums_here = load_per_query(sums + row, at, query_count, float("inf"), True)
    means_here = load_per_query(means + row, at, query_count, 0.0, True)
    result = tl.zeros([BLOCK_QUERIES, BLOCK_DIM], tl.float32)
    diagonal = diagonal_of(query_count, key_count, BOTTOM_RIGHT)
    last = tl.minimum(first + BLOCK_QUERIES, query_count) - 1
    begin, full_begin, full_end, end = visible_blocks(
        first, last, diagonal, key_count, left, right, LEFT, RIGHT, BLOCK_KEYS
    )
    result = _accumulate_query_gradient(
        result, queries_here, above, sums_here, means_here, key, value, key_stride, value_stride, first,
        begin, full_begin, full_end, end, diagonal, query_count, key_count, left, right, scale, softcap,
        bias, bias_query_stride, bias_key_stride, slope, seed, number, threshold, kept_scale,
        DIM, VALUE_DIM, BLOCK_DIM, BLOCK_VALUE_DIM, LEFT, RIGHT, SOFTCAP, PLAIN, BLOCK_QUERIES, BLOCK_KEYS, False,
    )  # fmt: skip
    result = _accumulate_query_gradient(
        result, queries_here, above, sums_here, means_here, key, value, key_stride, value_stride, first,
        begin, full_begin, full_end, end, diagonal, query_count, key_count, left, right, scale, softcap,
        bias, bias_query_stride, bias_key_stride, slope, seed, number, threshold, kept_scale,
        DIM, VALUE_DIM, BLOCK_DIM, BLOCK_VALUE_DIM, LEFT, RIGHT, SOFTCAP, PLAIN, BLOCK_QUERIES, BLOCK_KEYS, True,
    )  # fmt: skip

    result *= tl.cast(scale, tl.float32)
    by_query += (token_row(query_starts, batch, query_begin, queries) * heads + head) * DIM
    store_tile(by_query, result, first, heads * DIM, query_count, BLOCK_QUERIES, DIM, BLOCK_DIM)


@triton.jit
def _accumulate_key_gradients(
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
        queries_here = load_tile(
            query + tl.cast(member, tl.int64) * query_head_stride, start, query_stride, queries,
            BLOCK_QUERIES, DIM, BLOCK_DIM, MASKED,
        )  # fmt: skip
        above = load_tile(
            gradient + tl.cast(member, tl.int64) * gradient_head_stride, start, gradient_stride, queries,
            BLOCK_QUERIES, VALUE_DIM, BLOCK_VALUE_DIM, MASKED,
        )  # fmt: skip
        sums_here = load_per_query(sums + tl.cast(member, tl.int64) * rows, at, queries, float("inf"), MASKED)
        means_here = load_per_query(means + tl.cast(member, tl.int64) * rows, at, queries, 0.0, MASKED)
        bias_here = None
        if bias is not None:
            bias_here = bias + tl.cast(member, tl.int64) * bias_head_stride
        slope = None
        if slopes is not None:
            slope = tl.load(slopes + member).to(tl.float32)
        used, by_score, derivative = score_gradients(
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
    query_begin, query_count = sequence_span(query_starts, batch, queries)
    key_begin, key_count = sequence_span(key_starts, batch, keys)
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

    keys_here = load_tile(key, first, key_stride, key_count, BLOCK_KEYS, DIM, BLOCK_DIM, True)
    values_here = load_tile(value, first, value_stride, key_count, BLOCK_KEYS, VALUE_DIM, BLOCK_VALUE_DIM, True)
    key_sums = tl.zeros([BLOCK_KEYS, BLOCK_DIM], tl.float32)
    value_sums = tl.zeros([BLOCK_KEYS, BLOCK_VALUE_DIM], tl.float32)
    diagonal = diagonal_of(query_count, key_count, BOTTOM_RIGHT)
    last = tl.minimum(first + BLOCK_KEYS, key_count) - 1
    begin, full_begin, full_end, end = visible_blocks(
        first, last, -diagonal, query_count, right, left, RIGHT, LEFT, BLOCK_QUERIES
    )
    key_sums, value_sums = _accumulate_key_gradients(
        key_sums, value_sums, keys_here, values_here, query, gradient, query_head_stride, query_stride,
        gradient_head_stride, gradient_stride, sums + row, means + row, bias, bias_head_stride, bias_query_stride,
        bias_key_stride, slopes, seed, first, begin, full_begin, full_end, end, diagonal, group, number, queries,
        query_count, key_count, left, right, scale, softcap, threshold, kept_scale,
        DIM, VALUE_DIM, BLOCK_DIM, BLOCK_VALUE_DIM, LEFT, RIGHT, SOFTCAP, PLAIN, BLOCK_QUERIES, BLOCK_KEYS, False,
    )  # fmt: skip
    key_sums, value_sums = _accumulate_key_gradients(
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
    store_tile(by_key + row * DIM, key_sums, first, key_heads * DIM, key_count, BLOCK_KEYS, DIM, BLOCK_DIM)
    store_tile(
        by_value + row * VALUE_DIM, value_sums, first, key_heads * VALUE_DIM, key_count, BLOCK_KEYS, VALUE_DIM,
        BLOCK_VALUE_DIM,
    )  # fmt: skip


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
                queries_here = load_tile(query_here, first, query_stride, queries, BLOCK_QUERIES, DIM, BLOCK_DIM, True)
                above = load_tile(
                    gradient_here, first, gradient_stride, queries, BLOCK_QUERIES, VALUE_DIM, BLOCK_VALUE_DIM, True
                )
                sums_here = load_per_query(sums + number * queries, at, queries, float("inf"), True)
                means_here = load_per_query(means + number * queries, at, queries, 0.0, True)
                last = tl.minimum(first + BLOCK_QUERIES, queries) - 1
                begin, _full_begin, _full_end, end = visible_blocks(
                    first, last, diagonal, keys, left, right, LEFT, RIGHT, BLOCK_KEYS
                )
                for start in range(
                    tl.maximum(begin * BLOCK_KEYS, key_first), tl.minimum(end * BLOCK_KEYS, key_end), BLOCK_KEYS
                ):
                    key_at = start + tl.arange(0, BLOCK_KEYS)[None, :]
                    keys_here = load_tile(key_here, start, key_stride, keys, BLOCK_KEYS, DIM, BLOCK_DIM, True)
                    values_here = load_tile(
                        value_here, start, value_stride, keys, BLOCK_KEYS, VALUE_DIM, BLOCK_VALUE_DIM, True
                    )
                    _used, by_score, _derivative = score_gradients(
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


def bias_backward(problem: AttentionProblem, gradient: Tensor, sums: Tensor, means: Tensor, bias: Tensor) -> Tensor:
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


_MEANS_ROWS = 64


@triton.jit(do_not_specialize=["heads", "queries", "padded", "blocks"])
def attention_means_kernel(
    gradient, result, lse, lse_gradient, sums, means, gradient_batch_stride, gradient_head_stride, gradient_stride,
    result_batch_stride, result_head_stride, result_stride, heads, queries, padded, blocks,
    VALUE_DIM: tl.constexpr, BLOCK_VALUE_DIM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The mean of the gradients by weights, which is the sum of gradient * result, less the gradient of the lse.

    And the logarithm of the sum to the base 2, infinity for a query that sees nothing, so that its weights are 0, and
    for those up to a padded number that do not exist.
    """
    program = tl.num_programs(0) - 1 - tl.program_id(0)  # what comes next begins with the first, then in the cache
    first = program % blocks * ROWS
    number = (program // blocks).to(tl.int64)
    batch, head = number // heads, number % heads
    gradient += batch * gradient_batch_stride + head * gradient_head_stride
    result += batch * result_batch_stride + head * result_head_stride
    above = load_tile(gradient, first, gradient_stride, queries, ROWS, VALUE_DIM, BLOCK_VALUE_DIM, True)
    here = load_tile(result, first, result_stride, queries, ROWS, VALUE_DIM, BLOCK_VALUE_DIM, True)
    mean = tl.sum(above.to(tl.float32) * here.to(tl.float32), 1)
    at = first + tl.arange(0, ROWS)
    if lse_gradient is not None:
        mean -= tl.load(lse_gradient + number * queries + at, mask=at < queries, other=0.0)
    tl.store(means + number * padded + at, mean, mask=at < padded)
    logarithm = tl.load(lse + number * queries + at, mask=at < queries, other=float("-inf"))
    logarithm = tl.where(logarithm == float("-inf"), float("inf"), logarithm * LOG2_E)
    tl.store(sums + number * padded + at, logarithm, mask=at < padded)


def statistics(
    problem: AttentionProblem, gradient: Tensor, lse: Tensor, lse_gradient: Tensor | None, result: Tensor, padded: int
) -> tuple[Tensor, Tensor]:
    """Logarithms of sums, to the base 2, and means, of so many queries, each [batch, heads, queries]."""
    sums, means = (torch.empty((*lse.shape[:2], padded), dtype=torch.float32, device=lse.device) for _ in range(2))
    blocks = triton.cdiv(padded, _MEANS_ROWS)
    launch(
        attention_means_kernel, (blocks * problem.heads * problem.batches, 1, 1), gradient, result,
        lse, None if lse_gradient is None else lse_gradient.contiguous(), sums, means, *gradient.stride()[:3],
        *result.stride()[:3], problem.heads, problem.queries, padded, blocks, problem.value_dim,
        problem.block_value_dim, _MEANS_ROWS,
    )  # fmt: skip
    return sums, means


def backward(
    problem: AttentionProblem, gradient: Tensor, lse_gradient: Tensor | None, result: Tensor, lse: Tensor,
    for_query: bool, for_keys: bool, for_bias: bool, for_sinks: bool, *, config: dict[str, Any] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of query, key, value, bias and sinks; empty tensors for those that nobody wants."""
    gradient, lse = addressable(gradient), lse.contiguous()
    sums, means = statistics(problem, gradient, lse, lse_gradient, addressable(result), problem.queries)
    inputs = (problem.query, problem.key, problem.value, gradient, sums, means)
    of_all = (
        problem.bias,
        problem.slopes,
        *problem.seed_and_starts(),
        *problem.strides(),
        *_gradient_strides(problem, gradient),
    )
    by_query = by_key = by_value = by_bias = by_sinks = gradient.new_empty(0)
    if for_keys:
        by_key = problem.by_token(problem.batches, problem.keys, problem.key_heads, problem.dim)
        by_value = problem.by_token(problem.batches, problem.keys, problem.key_heads, problem.value_dim)
        chosen = config or problem.tuned("attention_keys")
        chosen = chosen or keys_heuristic(problem.widest, problem.itemsize)
        blocks = triton.cdiv(problem.max_keys, chosen["keys"])
        launch(
            attention_keys_kernel, (blocks * problem.key_heads * problem.sequences, 1, 1), *inputs, by_key, by_value,
            *of_all, *problem.numbers(blocks), *problem.constants(), chosen["queries"], chosen["keys"],
            warps=chosen["warps"], stages=chosen["stages"],
        )  # fmt: skip
    if for_query:
        by_query = problem.by_token(problem.batches, problem.queries, problem.heads, problem.dim)
        chosen = config or problem.tuned("attention_queries")
        chosen = chosen or queries_heuristic(problem.widest, problem.itemsize)
        blocks = triton.cdiv(problem.max_queries, chosen["queries"])
        launch(
            attention_queries_kernel, (blocks * problem.heads * problem.sequences, 1, 1), *inputs, by_query,
            *of_all, *problem.numbers(blocks), *problem.constants(), chosen["queries"], chosen["keys"],
            warps=chosen["warps"], stages=chosen["stages"],
        )  # fmt: skip
    if for_bias and problem.original_bias is not None:
        by_bias = bias_backward(problem, gradient, sums, means, problem.original_bias)
    if for_sinks and problem.sinks is not None:
        by_sinks = sinks_backward(problem.sinks, lse, means)
    return by_query, by_key, by_value, by_bias, by_sinks


def _gradient_strides(problem: AttentionProblem, gradient: Tensor) -> tuple[int, ...]:
    batch, head, token = gradient.stride()[:3]
    return (0 if problem.packed else batch, head, token)


def sinks_backward(sinks: Tensor, lse: Tensor, means: Tensor) -> Tensor:
    """The gradient of sinks: the weight of each times what its gradient is short of the mean, which is all of it."""
    logarithms = sinks.to(lse.dtype)[:, None] - lse
    weights = torch.where(lse == float("-inf"), 0.0, logarithms.exp())
    return -(weights * means).sum((0, 2)).to(sinks.dtype)
