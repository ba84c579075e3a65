"""Attention in portable Triton: the forward kernel, the backward kernels, and their launchers.

Forward is FlashAttention: a program has one block of queries and loops over the blocks of keys that these see. It keeps
the running maximum of the scores and the sum of exponentials relative to it, and rescales the sum and the result when
the maximum grows. No score is ever stored.

Backward recomputes the weights from the log-sum-exp of the forward pass. In the notation of the paper, with scores S,
weights P = softmax(S), result O = P V and upstream gradient dO:

    delta = rowsum(dO * O)      dP = dO V^T          dS = P * (dP - delta)
    dV = P^T dO                 dK = dS^T Q          dQ = dS K

One kernel computes delta. One has a block of keys and loops over queries (dK, dV), one has a block of queries and loops
over keys (dQ), and one has a block of the bias. Each gradient is accumulated in registers, in a fixed order, and
written once, so that results are bitwise reproducible.

Scores are in base 2: a weight is exp2(score - lse). The functions on tiles take indices of queries and keys as columns
and rows or the other way round, so that the same code serves tiles of scores and their transposes.
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
from nearpeak.kernels.attention.tuning import TileConfig, tile_config

_MAX_ROW_STRIDE = 2**31 // 256
"""Rows of a tile, fewer than 256, are addressed in 32 bits from its first element."""
_MAX_WINDOW = 2**29
"""More than any number of tokens."""
_DELTA_ROWS = 64
_TAIL_PROGRAMS, _TAIL_BLOCK = 256, 1024
"""Programs that look for tokens after the last sequence, and elements that each of them fills at a time."""

Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""Of query, key, value, bias and sinks; empty tensors for those that are not needed."""


class AttentionProblem:
    """The sizes, strides and options of a call, from the arguments of the operator.

    Tensors are [batch, heads, tokens, dim]. Packed sequences are one batch, with the start of each sequence.
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
        self.group = self.heads // max(self.key_heads, 1)
        """Heads of queries that share a head of keys."""
        self.packed = query_starts is not None
        self.query_starts = None if query_starts is None else query_starts.contiguous()
        self.key_starts = None if key_starts is None else key_starts.contiguous()
        self.sequences = self.batches if query_starts is None else query_starts.numel() - 1
        self.is_square = (
            self.queries == self.keys
            if self.query_starts is None or self.key_starts is None
            else (self.query_starts.data_ptr() == self.key_starts.data_ptr())
        )
        """Whether each sequence is known to have as many queries as keys."""
        self.max_queries = longest_query if self.packed else self.queries
        self.max_keys = longest_key if self.packed else self.keys
        self.original_bias = bias
        self.bias = None if bias is None else bias.expand(self.batches, self.heads, self.queries, self.keys)
        self.slopes = None if slopes is None else slopes.contiguous()
        self.sinks = None if sinks is None else sinks.contiguous()
        self.seed = seed
        self.left, self.right, self.bottom_right = left, right, bottom_right
        self.scale, self.softcap, self.dropout = scale, softcap, dropout
        self.is_plain = bias is None and slopes is None and softcap == 0.0 and scale > 0.0
        """Whether scores are scaled products and nothing else: then the exponential applies the scale."""
        self.itemsize = query.element_size()
        self.block_dim, self.block_value_dim = (max(next_power_of_2(dim), 16) for dim in (self.dim, self.value_dim))
        self.widest = max(self.block_dim, self.block_value_dim)

    def config(self, kernel: str) -> TileConfig:
        """The configuration of a portable kernel."""
        return tile_config(
            kernel, self.right >= 0, self.widest, self.itemsize, self.is_plain, self.seed is not None, self.query.device
        )

    def new_token_major(self, batches: int, tokens: int, heads: int, dim: int) -> Tensor:
        """A new tensor [batch, heads, tokens, dim] with tokens before heads in memory, uninitialized."""
        shape, strides = (batches, heads, tokens, dim), (tokens * heads * dim, dim, heads * dim, 1)
        return torch.empty_strided(shape, strides, dtype=self.query.dtype, device=self.query.device)

    def new_lse(self) -> Tensor:
        """A new tensor [batch, heads, queries] of float32, uninitialized."""
        return torch.empty((self.batches, self.heads, self.queries), dtype=torch.float32, device=self.query.device)

    # arguments that all kernels take, in their order

    def seed_and_starts(self) -> tuple[Any, ...]:
        return self.seed, self.query_starts, self.key_starts

    def strides(self) -> tuple[int, ...]:
        strides: list[int] = []
        for x in (self.query, self.key, self.value):
            strides += (0 if self.packed else x.stride(0), x.stride(1), x.stride(2))
        strides += (0, 0, 0, 0) if self.bias is None else self.bias.stride()
        strides.append(self.heads if self.slopes is not None and self.slopes.dim() == 2 else 0)
        return tuple(strides)

    def numbers(self, blocks: int) -> tuple[Any, ...]:
        return (
            self.heads, self.group, self.queries, self.keys, blocks, min(max(self.left, 0), _MAX_WINDOW),
            min(max(self.right, 0), _MAX_WINDOW), self.scale, self.softcap, signed_threshold(self.dropout),
            keep_scale(self.dropout),
        )  # fmt: skip

    def constants(self) -> tuple[Any, ...]:
        return (
            self.dim, self.value_dim, self.block_dim, self.block_value_dim, self.bottom_right, self.left >= 0,
            self.right >= 0, self.softcap != 0.0, self.is_plain,
        )  # fmt: skip


def addressable(x: Tensor) -> Tensor:
    """The tensor [batch, heads, tokens, dim], or a copy if the kernels cannot address it."""
    if (x.stride(-1) == 1 or x.shape[-1] == 1) and x.stride(-2) < _MAX_ROW_STRIDE:
        return x
    return x.contiguous()


def takes(problem: AttentionProblem) -> bool:
    """These kernels take every problem."""
    return True


LN_2 = tl.constexpr(0.6931471805599453)
_PHILOX_ROUNDS = tl.constexpr(ROUNDS)
_INT32_MIN = tl.constexpr(-(2**31))


@triton.jit
def query_block_of_program(blocks, heads, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """The block of queries, the head and the batch of this program."""
    program = tl.program_id(0)
    block = program % blocks
    if RIGHT and not LEFT:
        block = blocks - 1 - block  # the last queries see the most keys, and start first
    return block, (program // blocks % heads).to(tl.int64), (program // blocks // heads).to(tl.int64)


@triton.jit
def sequence_span(starts, batch, tokens):
    """The first token of a sequence among all tokens, and its length. Without starts, a sequence is a batch."""
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
    """The offset of a sequence's first token in a tensor [batch, heads, tokens] or [heads, all tokens]."""
    row = head * tokens + begin
    if starts is None:
        row = (batch * heads + head) * tokens
    return row


@triton.jit
def diagonal_of(queries, keys, BOTTOM_RIGHT: tl.constexpr):
    """The offset of the diagonal: query i is aligned with key i + diagonal."""
    diagonal = queries * 0
    if BOTTOM_RIGHT:
        diagonal = keys - queries
    return diagonal


@triton.jit
def visible_blocks(
    first, last, diagonal, keys, left, right, LEFT: tl.constexpr, RIGHT: tl.constexpr, BLOCK: tl.constexpr
):
    """The blocks of keys that queries `first` to `last` see: begin, full_begin, full_end, end, by number.

    Blocks from full_begin to full_end need no mask: each of these queries sees all of their keys. With queries and
    keys swapped, left and right swapped, and the diagonal negated, these are the queries that see keys.
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
def block_count(begin, full_begin, full_end, end, MASKED: tl.constexpr):
    """The number of blocks that need a mask, or of those that do not."""
    count = full_end - full_begin
    if MASKED:
        count = full_begin - begin + end - full_end
    return count


@triton.jit
def block_start(number, begin, full_begin, full_end, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """The first row of a block: the MASKED ones are before and after the full ones."""
    block = full_begin + number
    if MASKED:
        before = full_begin - begin
        block = tl.where(number < before, begin + number, full_end + number - before)
    return block * BLOCK


@triton.jit
def is_visible(query_index, key_index, diagonal, keys, left, right, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """The mask of a tile of scores: keys that exist, within the window of the query."""
    visible = (key_index < keys) & (query_index == query_index)
    if LEFT:
        visible = visible & (query_index + diagonal - key_index <= left)
    if RIGHT:
        visible = visible & (key_index - query_index - diagonal <= right)
    return visible


@triton.jit
def load_tile(
    x, first, stride, rows, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr
):
    """ROWS rows of x from `first` on, padded with zeros to BLOCK columns, and below `rows` if MASKED."""
    row = tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    # the start of a tile in 64 bits, and the offsets from it in 32
    pointers = x + tl.cast(first, tl.int64) * stride + (row[:, None] * stride + column[None, :])  # (ROWS, BLOCK)
    is_row = (first + row < rows)[:, None]
    is_column = (column < COLUMNS)[None, :]
    if MASKED and COLUMNS == BLOCK:
        values = tl.load(pointers, mask=is_row, other=0.0)
    elif MASKED:
        values = tl.load(pointers, mask=is_row & is_column, other=0.0)
    elif COLUMNS == BLOCK:
        values = tl.load(pointers)
    else:
        values = tl.load(pointers, mask=is_column, other=0.0)
    return values


@triton.jit
def store_tile(
    x, values, first, stride, rows, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Stores what a masked `load_tile` loads."""
    row = tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    pointers = x + tl.cast(first, tl.int64) * stride + (row[:, None] * stride + column[None, :])  # (ROWS, BLOCK)
    mask = (first + row < rows)[:, None]
    if COLUMNS != BLOCK:
        mask = mask & (column < COLUMNS)[None, :]
    tl.store(pointers, values.to(x.dtype.element_ty), mask=mask)


@triton.jit
def load_per_query(x, index, queries, padding, MASKED: tl.constexpr):
    """One number of each query, such as its log-sum-exp."""
    if MASKED:
        values = tl.load(x + index, mask=index < queries, other=padding)
    else:
        values = tl.load(x + index)
    return values


@triton.jit
def tanh(x, EXACT: tl.constexpr):
    value = 1.0 - 2.0 / (1.0 + tl.exp2(x * (2.0 * LOG2_E)))
    if EXACT:  # near 0 the difference cancels bits that float32 has and products of 16 bits do not have
        square = x * x
        small = x + x * square * (-0.33333334 + square * (0.13333334 + square * (-0.053968254 + square * 0.02186949)))
        value = tl.where(square < 0.04, small, value)
    return value


@triton.jit
def exp2_scale(scale, PLAIN: tl.constexpr):
    """The factor that is left for PLAIN scores of `scores_and_derivative`: a multiply-add with the exponent is free."""
    factor = 1.0
    if PLAIN:
        factor = tl.cast(scale, tl.float32) * LOG2_E
    return factor


@triton.jit
def scores_and_derivative(
    products, query_index, key_index, diagonal, queries, keys, scale, softcap, bias, bias_query_stride,
    bias_key_stride, slope, SOFTCAP: tl.constexpr, PLAIN: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """The scores of a tile in base 2, and their derivative by the scaled products.

    PLAIN scores are the products, still to be multiplied by `exp2_scale`. `bias` points to this batch and head.
    """
    scores = products
    derivative = 1.0
    if not PLAIN:
        scale = tl.cast(scale, tl.float32)
        if SOFTCAP:
            softcap = tl.cast(softcap, tl.float32)
            capped = tanh(products * (scale / softcap), EXACT)
            scores = capped * (softcap * LOG2_E)
            derivative = 1.0 - capped * capped
        else:
            scores = products * (scale * LOG2_E)
        if slope is not None:  # ALiBi
            scores -= tl.abs((query_index + diagonal - key_index).to(tl.float32)) * (slope * LOG2_E)
        if bias is not None:
            mask = (query_index < queries) & (key_index < keys)
            offsets = query_index.to(tl.int64) * bias_query_stride + key_index.to(tl.int64) * bias_key_stride
            bias_tile = tl.load(bias + offsets, mask=mask, other=0)
            if bias.dtype.element_ty == tl.int1:
                scores = tl.where(bias_tile != 0, scores, float("-inf"))
            else:
                scores += bias_tile.to(tl.float32) * LOG2_E
    return scores, derivative


@triton.jit
def dropout_mask(seed, head_index, query_index, key_index, threshold):
    """The weights that dropout keeps: Philox of the indices of key and query, and of the head among all batches."""
    key = tl.load(seed)
    zeros = (query_index * 0 + key_index * 0).to(tl.uint32)
    low = key_index.to(tl.uint32) + zeros
    high = query_index.to(tl.uint32) + zeros
    random, _, _, _ = tl.philox(key, low, high, head_index.to(tl.uint32) + zeros, zeros, _PHILOX_ROUNDS)
    return (random.to(tl.int32, bitcast=True) ^ _INT32_MIN) < threshold


@triton.jit
def _accumulate_values(
    result, maximum, total, q, key, value, key_stride, value_stride, first, begin, full_begin, full_end, end,
    diagonal, queries, keys, left, right, scale, softcap, bias, bias_query_stride, bias_key_stride, slope, seed,
    head_index, threshold,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_VALUE_DIM: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, PLAIN: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Online softmax: adds the keys of the full blocks, or of the MASKED ones, to result, maximum and total."""
    factor = exp2_scale(scale, PLAIN)
    query_index = first + tl.arange(0, BLOCK_QUERIES)[:, None]
    for number in range(block_count(begin, full_begin, full_end, end, MASKED)):
        start = block_start(number, begin, full_begin, full_end, BLOCK_KEYS, MASKED)
        key_index = start + tl.arange(0, BLOCK_KEYS)[None, :]
        # S = Q K^T
        k = load_tile(key, start, key_stride, keys, BLOCK_KEYS, DIM, BLOCK_DIM, MASKED)  # (BLOCK_KEYS, BLOCK_DIM)
        products = tl.dot(q, tl.trans(k), input_precision="ieee")  # (BLOCK_QUERIES, BLOCK_KEYS)
        scores, _derivative = scores_and_derivative(
            products, query_index, key_index, diagonal, queries, keys, scale, softcap, bias, bias_query_stride,
            bias_key_stride, slope, SOFTCAP, PLAIN, q.dtype == tl.float32,
        )  # fmt: skip
        if MASKED:
            visible = is_visible(query_index, key_index, diagonal, keys, left, right, LEFT, RIGHT)
            scores = tl.where(visible, scores, float("-inf"))
        # P = exp2(S - maximum); what was summed before is rescaled to the new maximum
        new_maximum = tl.maximum(maximum, tl.max(scores, 1) * factor)  # (BLOCK_QUERIES,)
        weights = tl.exp2(scores * factor - new_maximum[:, None])
        rescale = tl.exp2(maximum - new_maximum)
        total = total * rescale + tl.sum(weights, 1)
        result = result * rescale[:, None]
        if seed is not None:  # after the sum: dropout is applied to normalized weights
            weights = tl.where(dropout_mask(seed, head_index, query_index, key_index, threshold), weights, 0.0)
        # O += P V
        v = load_tile(value, start, value_stride, keys, BLOCK_KEYS, VALUE_DIM, BLOCK_VALUE_DIM, MASKED)
        result = tl.dot(weights.to(v.dtype), v, result, input_precision="ieee")  # (BLOCK_QUERIES, BLOCK_VALUE_DIM)
        maximum = new_maximum
    return result, maximum, total


@triton.jit(do_not_specialize=["queries", "keys", "left", "right", "threshold", "blocks", "heads", "group"])
def attention_forward_kernel(
    query, key, value, result, lse, bias, slopes, sinks, seed, query_starts, key_starts,
    query_batch_stride, query_head_stride, query_stride, key_batch_stride, key_head_stride, key_stride,
    value_batch_stride, value_head_stride, value_stride,
    bias_batch_stride, bias_head_stride, bias_query_stride, bias_key_stride, slope_batch_stride,
    heads, group, queries, keys, blocks, left, right, scale, softcap, threshold, dropout_scale,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_VALUE_DIM: tl.constexpr,
    BOTTOM_RIGHT: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, PLAIN: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr,
):  # fmt: skip
    """The result and the log-sum-exp of one block of queries of one head."""
    # this program's block, and pointers to its head and sequence
    block, head, batch = query_block_of_program(blocks, heads, LEFT, RIGHT)
    head_index = batch * heads + head
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

    # running maximum, sum of exponentials and accumulator
    maximum = tl.full([BLOCK_QUERIES], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_QUERIES], tl.float32)
    if sinks is not None:  # a key without a value
        sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
        maximum = tl.maximum(maximum, sink)
        total += tl.exp2(sink - maximum)
    accumulator = tl.zeros([BLOCK_QUERIES, BLOCK_VALUE_DIM], tl.float32)
    q = load_tile(query, first, query_stride, query_count, BLOCK_QUERIES, DIM, BLOCK_DIM, True)

    # blocks of keys that need no mask, and then those that do
    diagonal = diagonal_of(query_count, key_count, BOTTOM_RIGHT)
    last = tl.minimum(first + BLOCK_QUERIES, query_count) - 1
    begin, full_begin, full_end, end = visible_blocks(
        first, last, diagonal, key_count, left, right, LEFT, RIGHT, BLOCK_KEYS
    )
    for MASKED in tl.static_range(2):
        accumulator, maximum, total = _accumulate_values(
            accumulator, maximum, total, q, key, value, key_stride, value_stride, first,
            begin, full_begin, full_end, end, diagonal, query_count, key_count, left, right, scale, softcap,
            bias, bias_query_stride, bias_key_stride, slope, seed, head_index, threshold,
            DIM, VALUE_DIM, BLOCK_DIM, BLOCK_VALUE_DIM, LEFT, RIGHT, SOFTCAP, PLAIN, BLOCK_QUERIES, BLOCK_KEYS, MASKED,
        )  # fmt: skip

    # normalize and store
    inverse = 1.0 / total
    if seed is not None:
        inverse *= tl.cast(dropout_scale, tl.float32)
    inverse = tl.where(total == 0.0, 0.0, inverse)  # a query that sees no key
    result += (token_row(query_starts, batch, query_begin, queries) * heads + head) * VALUE_DIM
    store_tile(
        result, accumulator * inverse[:, None], first, heads * VALUE_DIM, query_count, BLOCK_QUERIES, VALUE_DIM,
        BLOCK_VALUE_DIM,
    )  # fmt: skip
    index = first + tl.arange(0, BLOCK_QUERIES)
    lse += head_row(query_starts, batch, query_begin, head, heads, queries)
    log_sum_exp = tl.where(total == 0.0, float("-inf"), (maximum + tl.log2(total)) * LN_2)
    tl.store(lse + index, log_sum_exp, mask=index < query_count)


@triton.jit(do_not_specialize=["sequences", "tokens", "width", "second_width", "heads"])
def fill_tail_kernel(
    first, second, lse, starts, sequences, tokens, width, second_width, heads, BLOCK: tl.constexpr
):  # fmt: skip
    """Zeros in [tokens, width], and -inf in [heads, tokens], after the last sequence."""
    end = tl.load(starts + sequences).to(tl.int64)
    all_tokens = tl.cast(tokens, tl.int64)
    _zero_rows(first, end, all_tokens, tl.cast(width, tl.int64), BLOCK)
    if second is not None:
        _zero_rows(second, end, all_tokens, tl.cast(second_width, tl.int64), BLOCK)
    if lse is not None:
        for head in range(tl.program_id(0), heads, tl.num_programs(0)):
            row = lse + tl.cast(head, tl.int64) * all_tokens
            for token in range(end, all_tokens, BLOCK):
                index = token + tl.arange(0, BLOCK)
                tl.store(row + index, tl.full([BLOCK], float("-inf"), tl.float32), mask=index < all_tokens)


@triton.jit
def _zero_rows(x, first, last, width, BLOCK: tl.constexpr):
    """Zeros in the rows `first` to `last`: this program's blocks of them."""
    begin = first * width + tl.program_id(0).to(tl.int64) * BLOCK
    for place in range(begin, last * width, tl.num_programs(0).to(tl.int64) * BLOCK):
        index = place + tl.arange(0, BLOCK)
        tl.store(x + index, tl.zeros([BLOCK], x.dtype.element_ty), mask=index < last * width)


def fill_tail(starts: Tensor, first: Tensor, second: Tensor | None = None, lse: Tensor | None = None) -> None:
    """Fills what belongs to no packed sequence, the tokens after the last one, which only the device knows.

    Args:
        starts: The first token of each sequence, and the end of the last one.
        first: [1, heads, tokens, dim] with tokens before heads in memory; gets zeros.
        second: Another one with as many tokens.
        lse: [1, heads, tokens] in float32, contiguous; gets -inf.
    """
    tokens = first.shape[2]
    width, second_width = (0 if x is None else x.shape[1] * x.shape[3] for x in (first, second))
    heads = 0 if lse is None else lse.shape[1]
    if tokens:
        launch(
            fill_tail_kernel, (_TAIL_PROGRAMS, 1, 1), first, second, lse, starts, starts.numel() - 1, tokens, width,
            second_width, heads, _TAIL_BLOCK,
        )  # fmt: skip


def forward(problem: AttentionProblem, *, config: TileConfig | None = None) -> tuple[Tensor, Tensor]:
    """The result, token-major in memory, and the log-sum-exp of the scores in float32."""
    result = problem.new_token_major(problem.batches, problem.queries, problem.heads, problem.value_dim)
    lse = problem.new_lse()
    config = config or problem.config("attention_forward")
    blocks = triton.cdiv(problem.max_queries, config.queries)
    launch(
        attention_forward_kernel, (blocks * problem.heads * problem.sequences, 1, 1),
        problem.query, problem.key, problem.value, result, lse, problem.bias, problem.slopes,
        problem.sinks, *problem.seed_and_starts(), *problem.strides(), *problem.numbers(blocks),
        *problem.constants(), config.queries, config.keys,
        warps=config.warps, stages=config.stages,
    )  # fmt: skip
    if problem.query_starts is not None:
        fill_tail(problem.query_starts, result, lse=lse)
    return result, lse


@triton.jit(do_not_specialize=["heads", "queries", "padded", "blocks"])
def attention_delta_kernel(
    gradient, result, lse, lse_gradient, lse2, delta, gradient_batch_stride, gradient_head_stride, gradient_stride,
    result_batch_stride, result_head_stride, result_stride, heads, queries, padded, blocks,
    VALUE_DIM: tl.constexpr, BLOCK_VALUE_DIM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """delta = rowsum(dO * O), less the gradient of the lse, and the lse in base 2.

    The lse of a query that sees no key, and of the padding, is infinity: its weights are 0.
    """
    program = tl.num_programs(0) - 1 - tl.program_id(0)  # the next kernel starts with the first rows: last in the cache
    first = program % blocks * ROWS
    head_index = (program // blocks).to(tl.int64)
    batch, head = head_index // heads, head_index % heads
    gradient += batch * gradient_batch_stride + head * gradient_head_stride
    result += batch * result_batch_stride + head * result_head_stride
    d_out = load_tile(gradient, first, gradient_stride, queries, ROWS, VALUE_DIM, BLOCK_VALUE_DIM, True)
    out = load_tile(result, first, result_stride, queries, ROWS, VALUE_DIM, BLOCK_VALUE_DIM, True)
    row_sum = tl.sum(d_out.to(tl.float32) * out.to(tl.float32), 1)  # (ROWS,)
    index = first + tl.arange(0, ROWS)
    if lse_gradient is not None:
        row_sum -= tl.load(lse_gradient + head_index * queries + index, mask=index < queries, other=0.0)
    tl.store(delta + head_index * padded + index, row_sum, mask=index < padded)
    logarithm = tl.load(lse + head_index * queries + index, mask=index < queries, other=float("-inf"))
    logarithm = tl.where(logarithm == float("-inf"), float("inf"), logarithm * LOG2_E)
    tl.store(lse2 + head_index * padded + index, logarithm, mask=index < padded)


def statistics(
    problem: AttentionProblem, gradient: Tensor, lse: Tensor, lse_gradient: Tensor | None, result: Tensor, padded: int
) -> tuple[Tensor, Tensor]:
    """The lse in base 2, and delta, each [batch, heads, padded queries]."""
    lse2, delta = (torch.empty((*lse.shape[:2], padded), dtype=torch.float32, device=lse.device) for _ in range(2))
    blocks = triton.cdiv(padded, _DELTA_ROWS)
    launch(
        attention_delta_kernel, (blocks * problem.heads * problem.batches, 1, 1), gradient, result,
        lse, None if lse_gradient is None else lse_gradient.contiguous(), lse2, delta, *gradient.stride()[:3],
        *result.stride()[:3], problem.heads, problem.queries, padded, blocks, problem.value_dim,
        problem.block_value_dim, _DELTA_ROWS,
    )  # fmt: skip
    return lse2, delta


@triton.jit
def score_gradients(
    q, k, v, d_out, lse2, delta, query_index, key_index, diagonal, queries, keys, left, right, scale,
    softcap, bias, bias_query_stride, bias_key_stride, slope, seed, head_index, threshold, dropout_scale,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, PLAIN: tl.constexpr, MASKED: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """The weights of a tile after dropout, the gradient dS of its scores, and the derivative of these by products.

    All are (queries, keys), or TRANSPOSED; lse2, delta and the indices have shapes that broadcast to that.
    """
    # P, recomputed
    if TRANSPOSED:
        products = tl.dot(k, tl.trans(q), input_precision="ieee")
    else:
        products = tl.dot(q, tl.trans(k), input_precision="ieee")
    scores, derivative = scores_and_derivative(
        products, query_index, key_index, diagonal, queries, keys, scale, softcap, bias, bias_query_stride,
        bias_key_stride, slope, SOFTCAP, PLAIN, q.dtype == tl.float32,
    )  # fmt: skip
    if MASKED:
        visible = is_visible(query_index, key_index, diagonal, keys, left, right, LEFT, RIGHT)
        scores = tl.where(visible, scores, float("-inf"))
    weights = tl.exp2(scores * exp2_scale(scale, PLAIN) - lse2)
    # dP = dO V^T
    if TRANSPOSED:
        d_weights = tl.dot(v, tl.trans(d_out), input_precision="ieee")
    else:
        d_weights = tl.dot(d_out, tl.trans(v), input_precision="ieee")
    dropped = weights
    if seed is not None:
        mask = dropout_mask(seed, head_index, query_index, key_index, threshold)
        d_weights = tl.where(mask, d_weights * tl.cast(dropout_scale, tl.float32), 0.0)
        dropped = tl.where(mask, weights, 0.0)
    # dS = P * (dP - delta)
    return dropped, weights * (d_weights - delta), derivative


@triton.jit
def _accumulate_key_gradients(
    d_k, d_v, k, v, query, gradient, query_head_stride, query_stride,
    gradient_head_stride, gradient_stride, lse2, delta, bias, bias_head_stride, bias_query_stride, bias_key_stride,
    slopes, seed, first, begin, full_begin, full_end, end, diagonal, group, head_index, rows, queries, keys, left,
    right, scale, softcap, threshold, dropout_scale,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_VALUE_DIM: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, PLAIN: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Adds the queries of the full blocks, or of the MASKED ones, to dK and dV.

    One loop over the heads of a group and their blocks: two nested ones need more registers than there are.
    """
    key_index = first + tl.arange(0, BLOCK_KEYS)[:, None]
    count = block_count(begin, full_begin, full_end, end, MASKED)
    for step in range(group * count):
        member = step // count
        start = block_start(step - member * count, begin, full_begin, full_end, BLOCK_QUERIES, MASKED)
        query_index = start + tl.arange(0, BLOCK_QUERIES)
        # a block of queries of one head of the group
        q = load_tile(
            query + tl.cast(member, tl.int64) * query_head_stride, start, query_stride, queries,
            BLOCK_QUERIES, DIM, BLOCK_DIM, MASKED,
        )  # fmt: skip
        d_out = load_tile(
            gradient + tl.cast(member, tl.int64) * gradient_head_stride, start, gradient_stride, queries,
            BLOCK_QUERIES, VALUE_DIM, BLOCK_VALUE_DIM, MASKED,
        )  # fmt: skip
        lse2_rows = load_per_query(
            lse2 + tl.cast(member, tl.int64) * rows, query_index, queries, float("inf"), MASKED
        )  # fmt: skip
        delta_rows = load_per_query(delta + tl.cast(member, tl.int64) * rows, query_index, queries, 0.0, MASKED)
        bias_of_head = None
        if bias is not None:
            bias_of_head = bias + tl.cast(member, tl.int64) * bias_head_stride
        slope = None
        if slopes is not None:
            slope = tl.load(slopes + member).to(tl.float32)
        # P^T and dS^T: (BLOCK_KEYS, BLOCK_QUERIES)
        weights, d_scores, derivative = score_gradients(
            q, k, v, d_out, lse2_rows[None, :], delta_rows[None, :], query_index[None, :], key_index,
            diagonal, queries, keys, left, right, scale, softcap, bias_of_head, bias_query_stride, bias_key_stride,
            slope, seed, head_index + member, threshold, dropout_scale, LEFT, RIGHT, SOFTCAP, PLAIN, MASKED, True,
        )  # fmt: skip
        if SOFTCAP:
            d_scores *= derivative
        # dV += P^T dO, dK += dS^T Q
        d_v = tl.dot(weights.to(d_out.dtype), d_out, d_v, input_precision="ieee")
        d_k = tl.dot(d_scores.to(d_out.dtype), q, d_k, input_precision="ieee")
    return d_k, d_v


@triton.jit(do_not_specialize=["queries", "keys", "left", "right", "threshold", "blocks", "heads", "group"])
def attention_keys_kernel(
    query, key, value, gradient, lse2, delta, key_gradient, value_gradient, bias, slopes, seed, query_starts,
    key_starts, query_batch_stride, query_head_stride, query_stride, key_batch_stride, key_head_stride, key_stride,
    value_batch_stride, value_head_stride, value_stride,
    bias_batch_stride, bias_head_stride, bias_query_stride, bias_key_stride, slope_batch_stride,
    gradient_batch_stride, gradient_head_stride, gradient_stride,
    heads, group, queries, keys, blocks, left, right, scale, softcap, threshold, dropout_scale,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_VALUE_DIM: tl.constexpr,
    BOTTOM_RIGHT: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, PLAIN: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr,
):  # fmt: skip
    """dK and dV of one block of keys of one head of keys, for all heads of queries that share it.

    With a causal mask the first keys are seen by the most queries, and start first.
    """
    # this program's block, and pointers to its head and sequence
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
    head = key_head * group  # the first of the group
    head_index = batch * heads + head
    query += batch * query_batch_stride + head * query_head_stride + query_begin * query_stride
    gradient += batch * gradient_batch_stride + head * gradient_head_stride + query_begin * gradient_stride
    row = head_row(query_starts, batch, query_begin, head, heads, queries)
    if bias is not None:
        bias += batch * bias_batch_stride + head * bias_head_stride
    if slopes is not None:
        slopes += batch * slope_batch_stride + head

    k = load_tile(key, first, key_stride, key_count, BLOCK_KEYS, DIM, BLOCK_DIM, True)
    v = load_tile(value, first, value_stride, key_count, BLOCK_KEYS, VALUE_DIM, BLOCK_VALUE_DIM, True)
    d_k = tl.zeros([BLOCK_KEYS, BLOCK_DIM], tl.float32)
    d_v = tl.zeros([BLOCK_KEYS, BLOCK_VALUE_DIM], tl.float32)

    # blocks of queries that need no mask, and then those that do
    diagonal = diagonal_of(query_count, key_count, BOTTOM_RIGHT)
    last = tl.minimum(first + BLOCK_KEYS, key_count) - 1
    begin, full_begin, full_end, end = visible_blocks(
        first, last, -diagonal, query_count, right, left, RIGHT, LEFT, BLOCK_QUERIES
    )
    for MASKED in tl.static_range(2):
        d_k, d_v = _accumulate_key_gradients(
            d_k, d_v, k, v, query, gradient, query_head_stride, query_stride,
            gradient_head_stride, gradient_stride, lse2 + row, delta + row, bias, bias_head_stride, bias_query_stride,
            bias_key_stride, slopes, seed, first, begin, full_begin, full_end, end, diagonal, group, head_index,
            queries, query_count, key_count, left, right, scale, softcap, threshold, dropout_scale,
            DIM, VALUE_DIM, BLOCK_DIM, BLOCK_VALUE_DIM, LEFT, RIGHT, SOFTCAP, PLAIN, BLOCK_QUERIES, BLOCK_KEYS, MASKED,
        )  # fmt: skip

    row = token_row(key_starts, batch, key_begin, keys) * key_heads + key_head
    d_k *= tl.cast(scale, tl.float32)
    if seed is not None:
        d_v *= tl.cast(dropout_scale, tl.float32)
    store_tile(key_gradient + row * DIM, d_k, first, key_heads * DIM, key_count, BLOCK_KEYS, DIM, BLOCK_DIM)
    store_tile(
        value_gradient + row * VALUE_DIM, d_v, first, key_heads * VALUE_DIM, key_count, BLOCK_KEYS, VALUE_DIM,
        BLOCK_VALUE_DIM,
    )  # fmt: skip


@triton.jit
def _accumulate_query_gradient(
    d_q, q, d_out, lse2, delta, key, value, key_stride, value_stride, first, begin, full_begin, full_end, end,
    diagonal, queries, keys, left, right, scale, softcap, bias, bias_query_stride, bias_key_stride, slope, seed,
    head_index, threshold, dropout_scale,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_VALUE_DIM: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, PLAIN: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Adds the keys of the full blocks, or of the MASKED ones, to dQ."""
    query_index = first + tl.arange(0, BLOCK_QUERIES)[:, None]
    for number in range(block_count(begin, full_begin, full_end, end, MASKED)):
        start = block_start(number, begin, full_begin, full_end, BLOCK_KEYS, MASKED)
        key_index = start + tl.arange(0, BLOCK_KEYS)[None, :]
        k = load_tile(key, start, key_stride, keys, BLOCK_KEYS, DIM, BLOCK_DIM, MASKED)
        v = load_tile(value, start, value_stride, keys, BLOCK_KEYS, VALUE_DIM, BLOCK_VALUE_DIM, MASKED)
        # dS: (BLOCK_QUERIES, BLOCK_KEYS)
        _weights, d_scores, derivative = score_gradients(
            q, k, v, d_out, lse2[:, None], delta[:, None], query_index, key_index, diagonal,
            queries, keys, left, right, scale, softcap, bias, bias_query_stride, bias_key_stride, slope, seed,
            head_index, threshold, dropout_scale,
            LEFT, RIGHT, SOFTCAP, PLAIN, MASKED, False,
        )  # fmt: skip
        if SOFTCAP:
            d_scores *= derivative
        # dQ += dS K
        d_q = tl.dot(d_scores.to(k.dtype), k, d_q, input_precision="ieee")
    return d_q


@triton.jit(do_not_specialize=["queries", "keys", "left", "right", "threshold", "blocks", "heads", "group"])
def attention_queries_kernel(
    query, key, value, gradient, lse2, delta, query_gradient, bias, slopes, seed, query_starts, key_starts,
    query_batch_stride, query_head_stride, query_stride, key_batch_stride, key_head_stride, key_stride,
    value_batch_stride, value_head_stride, value_stride,
    bias_batch_stride, bias_head_stride, bias_query_stride, bias_key_stride, slope_batch_stride,
    gradient_batch_stride, gradient_head_stride, gradient_stride,
    heads, group, queries, keys, blocks, left, right, scale, softcap, threshold, dropout_scale,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_VALUE_DIM: tl.constexpr,
    BOTTOM_RIGHT: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, PLAIN: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr,
):  # fmt: skip
    """dQ of one block of queries of one head."""
    # this program's block, and pointers to its head and sequence
    block, head, batch = query_block_of_program(blocks, heads, LEFT, RIGHT)
    head_index = batch * heads + head
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

    q = load_tile(query, first, query_stride, query_count, BLOCK_QUERIES, DIM, BLOCK_DIM, True)
    d_out = load_tile(gradient, first, gradient_stride, query_count, BLOCK_QUERIES, VALUE_DIM, BLOCK_VALUE_DIM, True)
    row = head_row(query_starts, batch, query_begin, head, heads, queries)
    index = first + tl.arange(0, BLOCK_QUERIES)
    lse2_rows = load_per_query(lse2 + row, index, query_count, float("inf"), True)
    delta_rows = load_per_query(delta + row, index, query_count, 0.0, True)
    d_q = tl.zeros([BLOCK_QUERIES, BLOCK_DIM], tl.float32)

    # blocks of keys that need no mask, and then those that do
    diagonal = diagonal_of(query_count, key_count, BOTTOM_RIGHT)
    last = tl.minimum(first + BLOCK_QUERIES, query_count) - 1
    begin, full_begin, full_end, end = visible_blocks(
        first, last, diagonal, key_count, left, right, LEFT, RIGHT, BLOCK_KEYS
    )
    for MASKED in tl.static_range(2):
        d_q = _accumulate_query_gradient(
            d_q, q, d_out, lse2_rows, delta_rows, key, value, key_stride, value_stride, first,
            begin, full_begin, full_end, end, diagonal, query_count, key_count, left, right, scale, softcap,
            bias, bias_query_stride, bias_key_stride, slope, seed, head_index, threshold, dropout_scale,
            DIM, VALUE_DIM, BLOCK_DIM, BLOCK_VALUE_DIM, LEFT, RIGHT, SOFTCAP, PLAIN, BLOCK_QUERIES, BLOCK_KEYS, MASKED,
        )  # fmt: skip

    d_q *= tl.cast(scale, tl.float32)
    query_gradient += (token_row(query_starts, batch, query_begin, queries) * heads + head) * DIM
    store_tile(query_gradient, d_q, first, heads * DIM, query_count, BLOCK_QUERIES, DIM, BLOCK_DIM)


@triton.jit(do_not_specialize=["queries", "keys", "left", "right", "threshold", "blocks", "heads", "group"])
def attention_bias_kernel(
    query, key, value, gradient, lse2, delta, bias_gradient, bias, slopes, seed,
    query_batch_stride, query_head_stride, query_stride, key_batch_stride, key_head_stride, key_stride,
    value_batch_stride, value_head_stride, value_stride,
    bias_batch_stride, bias_head_stride, bias_query_stride, bias_key_stride, slope_batch_stride,
    gradient_batch_stride, gradient_head_stride, gradient_stride,
    heads, group, queries, keys, blocks, left, right, scale, softcap, threshold, dropout_scale,
    batches, bias_heads, query_blocks,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_VALUE_DIM: tl.constexpr,
    BOTTOM_RIGHT: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, PLAIN: tl.constexpr,
    ONE_BATCH: tl.constexpr, ONE_HEAD: tl.constexpr, ONE_QUERY: tl.constexpr, ONE_KEY: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr,
):  # fmt: skip
    """The gradient of one block of a bias: the sum of dS over the dimensions in which the bias is broadcast (ONE_...).

    Scores are recomputed, so that nothing larger than the bias is in memory. The order of the sum is batches, heads,
    queries, keys.
    """
    # the range of this block in each dimension; all of a dimension in which the bias is broadcast
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
    total = tl.zeros([BLOCK_QUERIES, BLOCK_KEYS], tl.float32)
    for batch_number in range(first_batch, end_batch):
        for head_number in range(first_head, end_head):
            batch = tl.cast(batch_number, tl.int64)
            head = tl.cast(head_number, tl.int64)
            head_index = batch * heads + head
            query_of_head = query + batch * query_batch_stride + head * query_head_stride
            gradient_of_head = gradient + batch * gradient_batch_stride + head * gradient_head_stride
            key_of_head = key + batch * key_batch_stride + head // group * key_head_stride
            value_of_head = value + batch * value_batch_stride + head // group * value_head_stride
            bias_of_head = bias + batch * bias_batch_stride + head * bias_head_stride
            slope = None
            if slopes is not None:
                slope = tl.load(slopes + batch * slope_batch_stride + head).to(tl.float32)
            for first in range(query_first, query_end, BLOCK_QUERIES):
                index = first + tl.arange(0, BLOCK_QUERIES)
                q = load_tile(query_of_head, first, query_stride, queries, BLOCK_QUERIES, DIM, BLOCK_DIM, True)
                d_out = load_tile(
                    gradient_of_head, first, gradient_stride, queries, BLOCK_QUERIES, VALUE_DIM, BLOCK_VALUE_DIM, True
                )
                lse2_rows = load_per_query(lse2 + head_index * queries, index, queries, float("inf"), True)
                delta_rows = load_per_query(delta + head_index * queries, index, queries, 0.0, True)
                last = tl.minimum(first + BLOCK_QUERIES, queries) - 1
                begin, _full_begin, _full_end, end = visible_blocks(
                    first, last, diagonal, keys, left, right, LEFT, RIGHT, BLOCK_KEYS
                )
                for start in range(
                    tl.maximum(begin * BLOCK_KEYS, key_first), tl.minimum(end * BLOCK_KEYS, key_end), BLOCK_KEYS
                ):
                    key_index = start + tl.arange(0, BLOCK_KEYS)[None, :]
                    k = load_tile(key_of_head, start, key_stride, keys, BLOCK_KEYS, DIM, BLOCK_DIM, True)
                    v = load_tile(
                        value_of_head, start, value_stride, keys, BLOCK_KEYS, VALUE_DIM, BLOCK_VALUE_DIM, True
                    )
                    _weights, d_scores, _derivative = score_gradients(
                        q, k, v, d_out, lse2_rows[:, None], delta_rows[:, None],
                        index[:, None], key_index, diagonal, queries, keys, left, right, scale, softcap, bias_of_head,
                        bias_query_stride, bias_key_stride, slope, seed, head_index, threshold, dropout_scale,
                        LEFT, RIGHT, SOFTCAP, PLAIN, True, False,
                    )  # fmt: skip
                    total += d_scores

    # reduce over broadcast queries or keys, and store
    query_index = query_first + tl.arange(0, BLOCK_QUERIES)[:, None]
    key_index = key_first + tl.arange(0, BLOCK_KEYS)[None, :]
    rows, columns = queries, keys
    if ONE_QUERY:
        total = tl.sum(total, 0, keep_dims=True)
        query_index = tl.zeros([1, 1], tl.int32)
        rows = 1
    if ONE_KEY:
        total = tl.sum(total, 1, keep_dims=True)
        key_index = tl.zeros([1, 1], tl.int32)
        columns = 1
    bias_gradient += (bias_batch * bias_heads + bias_head) * rows * columns
    pointers = bias_gradient + query_index.to(tl.int64) * columns + key_index
    mask = (query_index < rows) & (key_index < columns)
    tl.store(pointers, total.to(bias_gradient.dtype.element_ty), mask=mask)


def bias_backward(problem: AttentionProblem, gradient: Tensor, lse2: Tensor, delta: Tensor, bias: Tensor) -> Tensor:
    """The gradient of a bias, in its shape and dtype."""
    sizes = (1,) * (4 - bias.dim()) + tuple(bias.shape)
    is_broadcast = [size == 1 for size in sizes]
    result = bias.new_empty(bias.shape)
    side = 64 if problem.itemsize == 2 and problem.widest <= 128 else 32
    query_blocks, key_blocks = (-(-size // side) for size in sizes[2:])
    grid = (key_blocks * query_blocks * sizes[1] * sizes[0], 1, 1)
    if 0 in (problem.batches, problem.heads, problem.queries, problem.keys):
        return result.zero_()
    launch(
        attention_bias_kernel, grid, problem.query, problem.key, problem.value, gradient, lse2, delta, result,
        problem.bias, problem.slopes, problem.seed, *problem.strides(), *gradient.stride()[:3],
        *problem.numbers(key_blocks), problem.batches, sizes[1], query_blocks, *problem.constants(), *is_broadcast,
        side, side, warps=4, stages=1,
    )  # fmt: skip
    return result


def sinks_backward(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """The gradient of sinks: dS = P * (dP - delta), where dP is 0, as a sink has no value."""
    weights = torch.where(lse == float("-inf"), 0.0, (sinks.to(lse.dtype)[:, None] - lse).exp())
    return -(weights * delta).sum((0, 2)).to(sinks.dtype)


def backward(
    problem: AttentionProblem, gradient: Tensor, lse_gradient: Tensor | None, result: Tensor, lse: Tensor,
    for_query: bool, for_keys: bool, for_bias: bool, for_sinks: bool, *, config: TileConfig | None = None,
) -> Gradients:  # fmt: skip
    """The gradients that are needed."""
    gradient, lse = addressable(gradient), lse.contiguous()
    lse2, delta = statistics(problem, gradient, lse, lse_gradient, addressable(result), problem.queries)
    inputs = (problem.query, problem.key, problem.value, gradient, lse2, delta)
    gradient_strides = (0 if problem.packed else gradient.stride(0), gradient.stride(1), gradient.stride(2))
    options = (problem.bias, problem.slopes, *problem.seed_and_starts(), *problem.strides(), *gradient_strides)
    by_query = by_key = by_value = by_bias = by_sinks = gradient.new_empty(0)
    if for_keys:
        by_key = problem.new_token_major(problem.batches, problem.keys, problem.key_heads, problem.dim)
        by_value = problem.new_token_major(problem.batches, problem.keys, problem.key_heads, problem.value_dim)
        tile = config or problem.config("attention_keys")
        blocks = triton.cdiv(problem.max_keys, tile.keys)
        launch(
            attention_keys_kernel, (blocks * problem.key_heads * problem.sequences, 1, 1), *inputs, by_key, by_value,
            *options, *problem.numbers(blocks), *problem.constants(), tile.queries, tile.keys,
            warps=tile.warps, stages=tile.stages,
        )  # fmt: skip
        if problem.key_starts is not None:
            fill_tail(problem.key_starts, by_key, by_value)
    if for_query:
        by_query = problem.new_token_major(problem.batches, problem.queries, problem.heads, problem.dim)
        tile = config or problem.config("attention_queries")
        blocks = triton.cdiv(problem.max_queries, tile.queries)
        launch(
            attention_queries_kernel, (blocks * problem.heads * problem.sequences, 1, 1), *inputs, by_query,
            *options, *problem.numbers(blocks), *problem.constants(), tile.queries, tile.keys,
            warps=tile.warps, stages=tile.stages,
        )  # fmt: skip
        if problem.query_starts is not None:
            fill_tail(problem.query_starts, by_query)
    if for_bias and problem.original_bias is not None:
        by_bias = bias_backward(problem, gradient, lse2, delta, problem.original_bias)
    if for_sinks and problem.sinks is not None:
        by_sinks = sinks_backward(problem.sinks, lse, delta)
    return by_query, by_key, by_value, by_bias, by_sinks
