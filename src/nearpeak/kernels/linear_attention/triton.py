"""Linear attention in portable Triton, forward and backward: states of segments, and a scan over each segment.

Memory traffic in units of one tensor [tokens, heads, dim]: forward 6, of which 2 are keys and values read once more for
the states of segments; 4 where sequences and heads fill all multiprocessors, with one segment each. Backward 20 (16
with one segment), where 8 is the minimum: 2 for the means, 2 for the states of each direction, and 5, 5 and 4 for the
gradients of query, key and value. Programs that have different columns of the same tokens read these at about the same
time, from the L2 cache.

A state is [dim, value dim] followed by a row of [dim], in float32, padded to powers of 2: S = sum of f_t v_t^T and
z = sum of f_t. Segments are summed in parallel, so that one long sequence fills a GPU. Then each gets the sum of those
before it (or after it, for the gradients of keys and values), or of all.

One kernel computes the result and all three gradients, which have the same form:

    out_t = sum over s of (left_t . right_s - mean) * inner_s

    RESULT  left: features of query    right: features of key     inner: value              divided by their sum
    QUERY   left: gradient             right: value               inner: features of key
    KEY     left: value                right: gradient            inner: features of query / norm
    VALUE   left: features of key      right: features of query / norm   inner: gradient

with s up to t for the first two and from t on for the others, or over all s. A program goes through a segment chunk by
chunk. Tokens of the same chunk are multiplied pairwise; earlier ones are in the state, which starts as the sum of all
segments before and accumulates each chunk after its use.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearpeak.kernels._runtime.launch import launch, next_power_of_2
from nearpeak.kernels.attention.triton import addressable
from nearpeak.kernels.linear_attention.tuning import config_of, segment_of


@triton.jit
def feature_map(x):
    """1 + elu(x). That of -inf is 0, which is what tokens and columns that do not exist are to have."""
    return tl.where(x > 0.0, x + 1.0, tl.exp(x))


@triton.jit
def as_dot_operand(values, FLOAT16: tl.constexpr):
    """As products take them: bfloat16 and float32 are as they are, float16 becomes float32.

    The sums over tokens that are multiplied here pass the largest float16, and their inverses its smallest. The tensor
    cores take float32 with as many bits as float16 has.
    """
    if FLOAT16:
        values = values.to(tl.float32)
    return values


@triton.jit
def load_tokens(
    x, first, stride, tokens, first_column, COLUMNS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    FEATURES: tl.constexpr, WHOLE: tl.constexpr, EXACT: tl.constexpr = True,
):  # fmt: skip
    """ROWS tokens from `first` on, BLOCK of their columns, zeros where there are none; in float32 as features.

    Not EXACT: tokens that do not exist may have any finite features, which saves looking at each number.
    """
    at = tl.arange(0, ROWS)
    columns = first_column + tl.arange(0, BLOCK)
    places = x + tl.cast(first, tl.int64) * stride + (at[:, None] * stride + columns[None, :])
    there = (first + at < tokens)[:, None]
    if not WHOLE:
        there = there & (columns < COLUMNS)[None, :]
    if FEATURES and WHOLE and not EXACT:
        values = feature_map(tl.load(places, mask=there, other=0.0).to(tl.float32))
    elif FEATURES:
        values = feature_map(tl.load(places, mask=there, other=float("-inf")).to(tl.float32))
    else:
        values = tl.load(places, mask=there, other=0.0)
    return values


@triton.jit
def load_per_token(x, first, tokens, other, ROWS: tl.constexpr):
    """One float32 for each of ROWS tokens."""
    at = first + tl.arange(0, ROWS)
    return tl.load(x + at, mask=at < tokens, other=other)


_STATE_ELEMENTS = 512
"""Of a state, by program, where states are added up."""
BEFORE, AFTER, ALL = 0, 1, 2
"""Which segments are added up for each: those before it, after it, or all, for the first alone."""
_AFTER, _ALL = tl.constexpr(AFTER), tl.constexpr(ALL)


@triton.jit
def _accumulate_state(
    state, vector, keys, values, norms, means, key_stride, value_stride, begin, end, first_column,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, SCALED: tl.constexpr, FLOAT16: tl.constexpr,
    PRECISION: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The state with tokens from `begin` to `end` added."""
    for first in range(begin, end, ROWS):
        right = as_dot_operand(
            load_tokens(values, first, value_stride, end, first_column, VALUE_DIM, ROWS, COLUMNS, False, WHOLE), FLOAT16
        )
        left = load_tokens(keys, first, key_stride, end, 0, DIM, ROWS, BLOCK_DIM, True, WHOLE, not SCALED)
        if SCALED:
            left *= (1.0 / load_per_token(norms, first, end, float("inf"), ROWS))[:, None]
        left = left.to(right.dtype)
        state = tl.dot(tl.trans(left), right, state, input_precision=PRECISION)
        if SCALED:
            vector += tl.sum(left.to(tl.float32) * load_per_token(means, first, end, 0.0, ROWS)[:, None], 0)
        else:
            vector += tl.sum(left.to(tl.float32), 0)
    return state, vector


@triton.jit(do_not_specialize=["heads", "members", "tokens", "segment", "segments"])
def linear_attention_states_kernel(
    states, keys, values, norms, means, key_batch_stride, key_head_stride, key_stride, value_batch_stride,
    value_head_stride, value_stride, heads, members, tokens, segment, segments,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_VALUE_DIM: tl.constexpr,
    SCALED: tl.constexpr, MANY: tl.constexpr, FLOAT16: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """The state of one segment of one head, COLUMNS of its value dims.

    SCALED: features are of queries, and divided by the norms of these; the row behind the state has them times the
    means. MANY: the state is of several heads in a row, `members`.
    """
    program = tl.program_id(0)
    blocks: tl.constexpr = BLOCK_VALUE_DIM // COLUMNS
    first_column = program % blocks * COLUMNS
    number = (program // blocks).to(tl.int64)
    begin = (number % segments).to(tl.int32) * segment
    end = tl.minimum(begin + segment, tokens)
    head, batch = number // segments % heads, number // segments // heads
    WHOLE: tl.constexpr = DIM == BLOCK_DIM and VALUE_DIM == BLOCK_VALUE_DIM
    state = tl.zeros([BLOCK_DIM, COLUMNS], tl.float32)
    vector = tl.zeros([BLOCK_DIM], tl.float32)
    keys += batch * key_batch_stride + head * members * key_head_stride
    values += batch * value_batch_stride + head * members * value_head_stride
    norms_here, means_here = norms, means
    if SCALED:
        norms_here += number // segments * members * tokens
        means_here += number // segments * members * tokens
    if MANY:
        for _member in range(members):
            state, vector = _accumulate_state(
                state, vector, keys, values, norms_here, means_here, key_stride, value_stride, begin, end,
                first_column, DIM, VALUE_DIM, BLOCK_DIM, SCALED, FLOAT16, PRECISION, WHOLE, ROWS, COLUMNS,
            )  # fmt: skip
            keys += key_head_stride
            values += value_head_stride
            if SCALED:
                norms_here += tokens
                means_here += tokens
    else:
        state, vector = _accumulate_state(
            state, vector, keys, values, norms_here, means_here, key_stride, value_stride, begin, end, first_column,
            DIM, VALUE_DIM, BLOCK_DIM, SCALED, FLOAT16, PRECISION, WHOLE, ROWS, COLUMNS,
        )  # fmt: skip
    states += number * (BLOCK_DIM * BLOCK_VALUE_DIM + BLOCK_DIM)
    rows = tl.arange(0, BLOCK_DIM)
    columns = first_column + tl.arange(0, COLUMNS)
    tl.store(states + rows[:, None] * BLOCK_VALUE_DIM + columns[None, :], state)
    if first_column == 0:
        tl.store(states + BLOCK_DIM * BLOCK_VALUE_DIM + rows, vector)


@triton.jit(do_not_specialize=["segments"])
def linear_attention_sums_kernel(states, segments, SIZE: tl.constexpr, WHICH: tl.constexpr, ELEMENTS: tl.constexpr):
    """Adds up the states of a head's segments, in their place; always in one order."""
    blocks: tl.constexpr = (SIZE + ELEMENTS - 1) // ELEMENTS
    program = tl.program_id(0)
    at = program % blocks * ELEMENTS + tl.arange(0, ELEMENTS)
    there = at < SIZE
    states += (program // blocks).to(tl.int64) * segments * SIZE + at
    total = tl.zeros([ELEMENTS], tl.float32)
    for turn in range(segments):
        number = turn
        if WHICH == _AFTER:
            number = segments - 1 - turn
        place = states + tl.cast(number, tl.int64) * SIZE
        here = tl.load(place, mask=there, other=0.0)
        if WHICH != _ALL:
            tl.store(place, total, mask=there)
        total += here
    if WHICH == _ALL:
        tl.store(states, total, mask=there)


def segment_states(
    keys: Tensor, values: Tensor, heads: int, segment: int, which: int, config: dict[str, Any],
    constants: tuple[int, int, int, int], norms: Tensor | None = None, means: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """A state for each segment of so many tokens, [batch, heads, segments, size], of segments before, after, or all.

    With norms and means the features are of queries, [batch, heads * members, tokens, dim], and the values are
    gradients of results.
    """
    batches, all_heads, tokens, _ = keys.shape
    members = all_heads // max(heads, 1)
    _, _, block_dim, block_value_dim = constants
    size = block_dim * block_value_dim + block_dim
    segments = max(triton.cdiv(tokens, segment), 1)
    states = torch.empty((batches, heads, segments, size), dtype=torch.float32, device=keys.device)
    columns = min(config["columns"], block_value_dim)
    launch(
        linear_attention_states_kernel, (block_value_dim // columns * segments * heads * batches, 1, 1), states, keys,
        values, norms, means, *keys.stride()[:3], *values.stride()[:3], heads, members, tokens, segment, segments,
        *constants, norms is not None, members > 1, keys.dtype == torch.float16, dot_precision(keys.dtype),
        config["rows"], columns, warps=config["warps"], stages=config["stages"],
    )  # fmt: skip
    if segments > 1 or which != ALL:
        grid = (triton.cdiv(size, _STATE_ELEMENTS) * heads * batches, 1, 1)
        launch(linear_attention_sums_kernel, grid, states, segments, size, which, _STATE_ELEMENTS)
    return states


def dot_precision(dtype: torch.dtype) -> str:
    """Of products of float32: as they are, or with the bits that float16 has, for what was float16."""
    return "tf32" if dtype == torch.float16 else "ieee"


RESULT, QUERY, KEY, VALUE = 0, 1, 2, 3
_RESULT, _QUERY, _KEY, _VALUE = tl.constexpr(RESULT), tl.constexpr(QUERY), tl.constexpr(KEY), tl.constexpr(VALUE)


@triton.jit
def _matvec(own, vector, PRECISION: tl.constexpr):
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
def _chunk_step(
    sums, total, state, vector, left, mean, right, inner, norms, means, right_stride, inner_stride, first, tokens,
    first_column, KIND: tl.constexpr, WIDTH: tl.constexpr, INNER_WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    FLOAT16: tl.constexpr, PRECISION: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Adds the pairs of one chunk to sums, and the chunk to the state."""
    RIGHT_FEATURES: tl.constexpr = (KIND == _RESULT) | (KIND == _VALUE)
    BACKWARDS: tl.constexpr = (KIND == _KEY) | (KIND == _VALUE)
    # features of tokens after the last are divided by infinity, or else multiplied with results of no token alone
    others = load_tokens(right, first, right_stride, tokens, 0, WIDTH, ROWS, BLOCK, RIGHT_FEATURES, WHOLE, False)
    inners = load_tokens(
        inner, first, inner_stride, tokens, first_column, INNER_WIDTH, ROWS, COLUMNS, not RIGHT_FEATURES, WHOLE, False
    )
    if KIND == _VALUE:
        others *= (1.0 / load_per_token(norms, first, tokens, float("inf"), ROWS))[:, None]
    if KIND == _KEY:
        inners *= (1.0 / load_per_token(norms, first, tokens, float("inf"), ROWS))[:, None]
    others = as_dot_operand(others, FLOAT16).to(left.dtype)
    inners = as_dot_operand(inners, FLOAT16).to(left.dtype)
    # before the products, so that features are in registers no longer than it takes
    if KIND == _RESULT:
        vector += tl.sum(others.to(tl.float32), 0)
    elif KIND == _QUERY:
        vector += tl.sum(inners.to(tl.float32), 0)
    elif KIND == _KEY:
        mean = load_per_token(means, first, tokens, 0.0, ROWS)
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
        own = load_tokens(left, first, left_stride, tokens, 0, WIDTH, ROWS, BLOCK, LEFT_FEATURES, WHOLE, False)
        if FLOAT16:
            own = own.to(tl.float32)
        else:
            own = own.to(out.dtype.element_ty)
        total = tl.zeros([ROWS], tl.float32)
        mean = total
        sums = tl.zeros([ROWS, COLUMNS], tl.float32)
        if KIND == _RESULT:
            total = _matvec(own, vector, PRECISION)
        elif KIND == _QUERY:
            mean = load_per_token(means, first, tokens, 0.0, ROWS)
            sums -= mean[:, None] * vector[None, :]
        elif KIND == _KEY:
            sums -= vector[None, :]
        before = state.to(own.dtype)
        if LEFT_FEATURES:
            before = tl.trans(before)
        sums = tl.dot(own, before, sums, input_precision=PRECISION)
        if CAUSAL and not MANY:
            sums, total, state, vector = _chunk_step(
                sums, total, state, vector, own, mean, right, inner, norms, means, right_stride, inner_stride, first,
                tokens, first_column, KIND, WIDTH, INNER_WIDTH, BLOCK, FLOAT16, PRECISION, WHOLE, ROWS, COLUMNS,
            )  # fmt: skip
        elif CAUSAL:
            for member in range(members):
                sums, total, state, vector = _chunk_step(
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
            sums *= (1.0 / load_per_token(norms, first, tokens, 1.0, ROWS))[:, None]
        if outer is not None:
            outside = load_tokens(
                outer, first, outer_stride, tokens, first_column, INNER_WIDTH, ROWS, COLUMNS, False, WHOLE
            ).to(tl.float32)
            sums *= tl.where(outside > 0.0, 1.0, tl.exp(outside))
        there = (at < tokens)[:, None]
        if not WHOLE:
            there = there & (columns < INNER_WIDTH)[None, :]
        stride = heads * INNER_WIDTH
        places = out + tl.cast(first, tl.int64) * stride + (tl.arange(0, ROWS)[:, None] * stride + columns[None, :])
        tl.store(places, sums.to(out.dtype.element_ty), mask=there)


def launch_scan(
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
        dot_precision(out.dtype), config["rows"], columns, warps=config["warps"], stages=config["stages"],
    )  # fmt: skip


_MEANS_ROWS = 64
Config = dict[str, Any]


@triton.jit(do_not_specialize=["heads", "tokens", "blocks"])
def linear_attention_means_kernel(
    gradient, result, means, gradient_batch_stride, gradient_head_stride, gradient_stride, result_batch_stride,
    result_head_stride, result_stride, heads, tokens, blocks,
    VALUE_DIM: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The sum of gradient * result of each query, which is the mean of its gradients by weights."""
    program = tl.program_id(0)
    first = program % blocks * ROWS
    number = (program // blocks).to(tl.int64)
    batch, head = number // heads, number % heads
    gradient += batch * gradient_batch_stride + head * gradient_head_stride
    result += batch * result_batch_stride + head * result_head_stride
    WHOLE: tl.constexpr = VALUE_DIM == BLOCK
    above = load_tokens(gradient, first, gradient_stride, tokens, 0, VALUE_DIM, ROWS, BLOCK, False, WHOLE)
    here = load_tokens(result, first, result_stride, tokens, 0, VALUE_DIM, ROWS, BLOCK, False, WHOLE)
    at = first + tl.arange(0, ROWS)
    mean = tl.sum(above.to(tl.float32) * here.to(tl.float32), 1)
    tl.store(means + number * tokens + at, mean, mask=at < tokens)


class _LinearAttentionProblem:
    """Sizes, and what follows from them."""

    def __init__(self, query: Tensor, key: Tensor, value: Tensor, causal: bool, config: Config | None) -> None:
        self.query, self.key, self.value = addressable(query), addressable(key), addressable(value)
        self.batches, self.key_heads = key.shape[:2]
        self.causal = causal
        self.dtype, self.device = query.dtype, query.device
        dim, value_dim = query.shape[3], value.shape[3]
        self.blocks = (max(next_power_of_2(dim), 16), max(next_power_of_2(value_dim), 16))
        self.constants = (dim, value_dim, *self.blocks)
        self._given = config

    def config(self, kernel: str) -> Config:
        return self._given or config_of(kernel, max(self.blocks), self.dtype, self.device)

    def run(
        self, kind: int, name: str, left: Tensor, right: Tensor, inner: Tensor, outer: Tensor | None, norms: Tensor,
        means: Tensor | None, states: _SegmentStates, eps: float = 0.0,
    ) -> Tensor:  # fmt: skip
        """A result or gradient, [batch, heads, tokens, dim] with tokens before heads in memory."""
        batches, heads, tokens, _ = left.shape
        dim = inner.shape[3]
        strides = (tokens * heads * dim, dim, heads * dim, 1)
        out = torch.empty_strided((batches, heads, tokens, dim), strides, dtype=self.dtype, device=self.device)
        blocks = self.blocks if kind in (RESULT, VALUE) else self.blocks[::-1]
        config = self.config(name)
        segment = states.segment
        if not self.causal:
            columns = min(config["columns"], blocks[1])
            segment = segment_of(tokens, batches * heads, blocks[1] // columns, config, self.device)
        launch_scan(
            out, kind, self.causal, left, right, inner, outer, norms, means, states.tensor, segment, blocks, eps, config
        )
        return out


class _SegmentStates:
    """The states that scans of one direction start with."""

    def __init__(
        self, problem: _LinearAttentionProblem, keys: Tensor, values: Tensor, which: int, norms: Tensor | None = None,
        means: Tensor | None = None,
    ) -> None:  # fmt: skip
        config = problem.config("linear_attention_states")
        block = problem.blocks[1]
        columns = min(config["columns"], block)
        sequences = problem.batches * (problem.key_heads if which != BEFORE else problem.query.shape[1])
        self.segment = segment_of(keys.shape[2], sequences, block // columns, config, problem.device)
        self.tensor: Tensor | None = None
        if keys.shape[2] > self.segment or not problem.causal:
            self.tensor = segment_states(
                keys, values, problem.key_heads, self.segment, which if problem.causal else ALL, config,
                problem.constants, norms, means,
            )  # fmt: skip


def forward(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, eps: float, *, config: Config | None = None
) -> tuple[Tensor, Tensor]:
    """The result, tokens before heads in memory, and the sum of the weights of each query, with eps, in float32."""
    problem = _LinearAttentionProblem(query, key, value, causal, config)
    query, key, value = problem.query, problem.key, problem.value
    norms = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
    states = _SegmentStates(problem, key, value, BEFORE)
    result = problem.run(RESULT, "linear_attention", query, key, value, None, norms, None, states, eps)
    return result, norms


def backward(
    gradient: Tensor, result: Tensor, norms: Tensor, query: Tensor, key: Tensor, value: Tensor, causal: bool,
    for_query: bool, for_key: bool, for_value: bool, *, config: Config | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of query, key and value; empty tensors for those that nobody wants."""
    problem = _LinearAttentionProblem(query, key, value, causal, config)
    query, key, value = problem.query, problem.key, problem.value
    gradient, norms = addressable(gradient), norms.contiguous()
    means = _gradient_means(gradient, addressable(result), problem.blocks[1])
    by_query, by_key, by_value = (query.new_empty(0) for _ in range(3))
    if for_query:
        states = _SegmentStates(problem, key, value, BEFORE)
        by_query = problem.run(
            QUERY, "linear_attention_query", gradient, value, key, query, norms, means, states
        )  # fmt: skip
    if for_key or for_value:
        states = _SegmentStates(problem, query, gradient, AFTER, norms, means)
        if for_key:
            by_key = problem.run(
                KEY, "linear_attention_key", value, gradient, query, key, norms, means, states
            )  # fmt: skip
        if for_value:
            by_value = problem.run(
                VALUE, "linear_attention_value", key, query, gradient, None, norms, means, states
            )  # fmt: skip
    return by_query, by_key, by_value


def _gradient_means(gradient: Tensor, result: Tensor, block: int) -> Tensor:
    batches, heads, tokens, dim = gradient.shape
    means = torch.empty((batches, heads, tokens), dtype=torch.float32, device=gradient.device)
    blocks = triton.cdiv(tokens, _MEANS_ROWS)
    launch(
        linear_attention_means_kernel, (blocks * heads * batches, 1, 1), gradient, result, means,
        *gradient.stride()[:3], *result.stride()[:3], heads, tokens, blocks, dim, block, _MEANS_ROWS,
    )  # fmt: skip
    return means
