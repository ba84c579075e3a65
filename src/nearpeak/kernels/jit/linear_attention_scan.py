"""The kernel of linear attention, for its result and for all three gradients, which are of one form.

    out_t = sum over s of (left_t . right_s - mean) * inner_s

    RESULT  left: features of query    right: features of key     inner: value              divided by their sum
    QUERY   left: gradient             right: value               inner: features of key
    KEY     left: value                right: gradient            inner: features of query / norm
    VALUE   left: features of key      right: features of query / norm   inner: gradient

With s up to t for the first two and from t on for the others, or over all. A program goes through the tokens of a
segment, chunk by chunk. Tokens of the same chunk are multiplied in pairs; those before it are in a state, the sum of
right_s inner_s^T, which starts as that of all segments before and takes up each chunk after it was used.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearpeak.kernels.jit.launch import launch
from nearpeak.kernels.jit.linear_attention_states import precision
from nearpeak.kernels.jit.linear_attention_tiles import computed, numbers_of, tokens_of

RESULT, QUERY, KEY, VALUE = 0, 1, 2, 3
_RESULT, _QUERY, _KEY, _VALUE = tl.constexpr(RESULT), tl.constexpr(QUERY), tl.constexpr(KEY), tl.constexpr(VALUE)


@triton.jit
def _times(own, vector, PRECISION: tl.constexpr):
    """own @ vector; of 16 bits by the tensor cores, whose operands stay where they are.

    There the vector is the sum of two numbers of the dtype of `own`, in two columns, so that it is as good as in
    float32.
    """
    if own.dtype == tl.float32:
        total = tl.sum(own * vector[None, :], 1)
    else:
        column = tl.arange(0, 16)[None, :]
        high = vector.to(own.dtype)
        low = (vector - high.to(tl.float32)).to(own.dtype)
        both = tl.where(column == 0, high[:, None], tl.where(column == 1, low[:, None], tl.zeros_like(low)[:, None]))
        total = tl.sum(tl.dot(own, both, input_precision=PRECISION), 1)
    return total


@triton.jit
def _within(
    sums, total, state, vector, left, mean, right, inner, norms, means, right_stride, inner_stride, first, tokens,
    first_column, KIND: tl.constexpr, WIDTH: tl.constexpr, INNER_WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    FLOAT16: tl.constexpr, PRECISION: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Adds the pairs of one chunk to sums, and the chunk to the state."""
    RIGHT_FEATURES: tl.constexpr = (KIND == _RESULT) | (KIND == _VALUE)
    BACKWARDS: tl.constexpr = (KIND == _KEY) | (KIND == _VALUE)
    # features of tokens after the last are divided by infinity, or else multiplied with results of no token alone
    others = tokens_of(right, first, right_stride, tokens, 0, WIDTH, ROWS, BLOCK, RIGHT_FEATURES, WHOLE, False)
    inners = tokens_of(
        inner, first, inner_stride, tokens, first_column, INNER_WIDTH, ROWS, COLUMNS, not RIGHT_FEATURES, WHOLE, False
    )
    if KIND == _VALUE:
        others *= (1.0 / numbers_of(norms, first, tokens, float("inf"), ROWS))[:, None]
    if KIND == _KEY:
        inners *= (1.0 / numbers_of(norms, first, tokens, float("inf"), ROWS))[:, None]
    others = computed(others, FLOAT16).to(left.dtype)
    inners = computed(inners, FLOAT16).to(left.dtype)
    # before the products, so that features are in registers no longer than it takes
    if KIND == _RESULT:
        vector += tl.sum(others.to(tl.float32), 0)
    elif KIND == _QUERY:
        vector += tl.sum(inners.to(tl.float32), 0)
    elif KIND == _KEY:
        mean = numbers_of(means, first, tokens, 0.0, ROWS)
        vector += tl.sum(inners.to(tl.float32) * mean[:, None], 0)
    weights = tl.dot(left, tl.trans(others), input_precision=PRECISION)
    if KIND == _QUERY:
        weights -= mean[:, None]
    if KIND == _KEY:
        weights -= mean[None, :]
    at = tl.arange(0, ROWS)
    if not BACKWARDS:
        seen = at[:, None] >= at[None, :]
    else:
        seen = at[:, None] <= at[None, :]
    weights = tl.where(seen, weights, 0.0)
    if KIND == _RESULT:
        total += tl.sum(weights, 1)
    sums = tl.dot(weights.to(left.dtype), inners, sums, input_precision=PRECISION)
    # what is as it was loaded goes first: the tensor cores take it transposed from where it is, and features do not
    # have to be computed a second time in another order
    if RIGHT_FEATURES:
        state = tl.dot(tl.trans(inners), others, state, input_precision=PRECISION)
    else:
        state = tl.dot(tl.trans(others), inners, state, input_precision=PRECISION)
    return sums, total, state, vector


@triton.jit(do_not_specialize=["heads", "group", "members", "tokens", "segment", "segments", "records"])
def linear_attention_kernel(
    out, left, right, inner, outer, norms, means, states,
    left_batch_stride, left_head_stride, left_stride, right_batch_stride, right_head_stride, right_stride,
    inner_batch_stride, inner_head_stride, inner_stride, outer_batch_stride, outer_head_stride, outer_stride,
    heads, group, members, tokens, segment, segments, records, eps,
    KIND: tl.constexpr, CAUSAL: tl.constexpr, WIDTH: tl.constexpr, INNER_WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_INNER: tl.constexpr, MANY: tl.constexpr, FLOAT16: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """COLUMNS of the results of one segment of one head.

    `group` heads in a row have the same right and inner, or a head has those of `members` heads, one after another. Of
    states there are `records` for each of these. The result is times the derivative of the features of
    `outer`, where there is one.
    """
    program = tl.program_id(0)
    blocks: tl.constexpr = BLOCK_INNER // COLUMNS
    first_column = program % blocks * COLUMNS
    number = (program // blocks).to(tl.int64)
    place = number % segments
    head, batch = number // segments % heads, number // segments // heads
    begin = place.to(tl.int32) * segment
    end = tl.minimum(begin + segment, tokens)
    WHOLE: tl.constexpr = WIDTH == BLOCK and INNER_WIDTH == BLOCK_INNER
    BACKWARDS: tl.constexpr = (KIND == _KEY) | (KIND == _VALUE)
    LEFT_FEATURES: tl.constexpr = (KIND == _RESULT) | (KIND == _VALUE)
    left += batch * left_batch_stride + head * left_head_stride
    other_head = head // group * members
    right += batch * right_batch_stride + other_head * right_head_stride
    inner += batch * inner_batch_stride + other_head * inner_head_stride
    if outer is not None:
        outer += batch * outer_batch_stride + head * outer_head_stride
    out += (batch * tokens * heads + head) * INNER_WIDTH
    if not BACKWARDS:
        norms += (batch * heads + head) * tokens
        if KIND == _QUERY:
            means += (batch * heads + head) * tokens
    elif CAUSAL:
        norms += (batch * heads + head) * members * tokens
        means += (batch * heads + head) * members * tokens

    rows = tl.arange(0, BLOCK)
    columns = first_column + tl.arange(0, COLUMNS)
    VECTOR: tl.constexpr = BLOCK if KIND == _RESULT else COLUMNS
    if states is not None:
        record = (batch * (heads // group) + head // group) * records
        if CAUSAL:
            record += place
        states += record * (BLOCK * BLOCK_INNER + (BLOCK if LEFT_FEATURES else BLOCK_INNER))
        behind = states + BLOCK * BLOCK_INNER
        if LEFT_FEATURES:  # transposed: it is kept with features first
            state = tl.load(states + rows[None, :] * BLOCK_INNER + columns[:, None])
        else:
            state = tl.load(states + columns[None, :] * BLOCK + rows[:, None])
        if KIND == _RESULT:
            vector = tl.load(behind + rows)
        elif KIND == _VALUE:
            vector = tl.zeros([VECTOR], tl.float32)
        else:
            vector = tl.load(behind + columns)
    else:
        if LEFT_FEATURES:
            state = tl.zeros([COLUMNS, BLOCK], tl.float32)
        else:
            state = tl.zeros([BLOCK, COLUMNS], tl.float32)
        vector = tl.zeros([VECTOR], tl.float32)

    chunks = tl.cdiv(end - begin, ROWS)
    for turn in range(chunks):
        first = begin + turn * ROWS
        if BACKWARDS:
            first = begin + (chunks - 1 - turn) * ROWS
        own = tokens_of(left, first, left_stride, tokens, 0, WIDTH, ROWS, BLOCK, LEFT_FEATURES, WHOLE, False)
        if FLOAT16:
            own = own.to(tl.float32)
        else:
            own = own.to(out.dtype.element_ty)
        total = tl.zeros([ROWS], tl.float32)
        mean = total
        sums = tl.zeros([ROWS, COLUMNS], tl.float32)
        if KIND == _RESULT:
            total = _times(own, vector, PRECISION)
        elif KIND == _QUERY:
            mean = numbers_of(means, first, tokens, 0.0, ROWS)
            sums -= mean[:, None] * vector[None, :]
        elif KIND == _KEY:
            sums -= vector[None, :]
        before = state.to(own.dtype)
        if LEFT_FEATURES:
            before = tl.trans(before)
        sums = tl.dot(own, before, sums, input_precision=PRECISION)
        if CAUSAL and not MANY:
            sums, total, state, vector = _within(
                sums, total, state, vector, own, mean, right, inner, norms, means, right_stride, inner_stride, first,
                tokens, first_column, KIND, WIDTH, INNER_WIDTH, BLOCK, FLOAT16, PRECISION, WHOLE, ROWS, COLUMNS,
            )  # fmt: skip
        elif CAUSAL:
            for member in range(members):
                sums, total, state, vector = _within(
                    sums, total, state, vector, own, mean, right + member * right_head_stride,
                    inner + member * inner_head_stride, norms + member * tokens, means + member * tokens,
                    right_stride, inner_stride, first, tokens, first_column, KIND, WIDTH, INNER_WIDTH, BLOCK, FLOAT16,
                    PRECISION, WHOLE, ROWS, COLUMNS,
                )  # fmt: skip

        at = first + tl.arange(0, ROWS)
        if KIND == _RESULT:
            total += tl.cast(eps, tl.float32)
            sums *= (1.0 / total)[:, None]
            if first_column == 0:
                tl.store(norms + at, total, mask=at < tokens)
        elif KIND == _QUERY:
            sums *= (1.0 / numbers_of(norms, first, tokens, 1.0, ROWS))[:, None]
        if outer is not None:
            outside = tokens_of(
                outer, first, outer_stride, tokens, first_column, INNER_WIDTH, ROWS, COLUMNS, False, WHOLE
            ).to(tl.float32)
            sums *= tl.where(outside > 0.0, 1.0, tl.exp(outside))
        there = (at < tokens)[:, None]
        if not WHOLE:
            there = there & (columns < INNER_WIDTH)[None, :]
        stride = heads * INNER_WIDTH
        places = out + tl.cast(first, tl.int64) * stride + (tl.arange(0, ROWS)[:, None] * stride + columns[None, :])
        tl.store(places, sums.to(out.dtype.element_ty), mask=there)


def scan(
    out: Tensor, kind: int, causal: bool, left: Tensor, right: Tensor, inner: Tensor, outer: Tensor | None,
    norms: Tensor, means: Tensor | None, states: Tensor | None, segment: int, blocks: tuple[int, int], eps: float,
    config: dict[str, Any],
) -> None:  # fmt: skip
    """Fills `out`, [batch, heads, tokens, dim] with tokens before heads in memory."""
    batches, heads, tokens, inner_width = out.shape
    other_heads = right.shape[1]
    group, members = (1, other_heads // heads) if kind in (KEY, VALUE) else (heads // other_heads, 1)
    segments = triton.cdiv(tokens, segment)
    block, block_inner = blocks
    columns = min(config["columns"], block_inner)
    launch(
        linear_attention_kernel, (block_inner // columns * segments * heads * batches, 1, 1), out, left, right, inner,
        outer, norms, means, states, *left.stride()[:3], *right.stride()[:3], *inner.stride()[:3],
        *((0, 0, 0) if outer is None else outer.stride()[:3]), heads, group, members, tokens, segment, segments,
        1 if states is None else states.shape[2], eps, kind, causal, left.shape[3], inner_width, block,
        block_inner, members > 1, out.dtype == torch.float16,
        precision(out.dtype), config["rows"], columns, warps=config["warps"], stages=config["stages"],
    )  # fmt: skip
