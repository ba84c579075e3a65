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

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearpeak.kernels._runtime.launch import launch, next_power_of_2
from nearpeak.kernels.attention.triton import addressable
from nearpeak.kernels.linear_attention.tuning import LinearAttentionConfig, kernel_config, segment_length

_MEANS_ROWS = 64


@triton.jit
def feature_map(x):
    """1 + elu(x). It is 0 for -inf, the value of padding."""
    return tl.where(x > 0.0, x + 1.0, tl.exp(x))


@triton.jit
def as_dot_operand(values, FLOAT16: tl.constexpr):
    """An operand of a product: float16 as float32, other dtypes unchanged.

    Sums over tokens exceed the range of float16, and so do their inverses. The tensor cores take float32 with as many
    bits as float16 has (tf32).
    """
    if FLOAT16:
        values = values.to(tl.float32)
    return values


@triton.jit
def load_tokens(
    x, first, stride, tokens, first_column, COLUMNS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    FEATURES: tl.constexpr, WHOLE: tl.constexpr, EXACT: tl.constexpr = True,
):  # fmt: skip
    """A tile (ROWS, BLOCK) of tokens from `first` on, padded with zeros. FEATURES: the features of it, in float32.

    Not EXACT: features of padding tokens may be any finite number, which saves a select for each element.
    """
    row = tl.arange(0, ROWS)
    columns = first_column + tl.arange(0, BLOCK)
    pointers = x + tl.cast(first, tl.int64) * stride + (row[:, None] * stride + columns[None, :])
    mask = (first + row < tokens)[:, None]
    if not WHOLE:
        mask = mask & (columns < COLUMNS)[None, :]
    if FEATURES and WHOLE and not EXACT:
        values = feature_map(tl.load(pointers, mask=mask, other=0.0).to(tl.float32))
    elif FEATURES:
        values = feature_map(tl.load(pointers, mask=mask, other=float("-inf")).to(tl.float32))
    else:
        values = tl.load(pointers, mask=mask, other=0.0)
    return values


@triton.jit
def load_per_token(x, first, tokens, other, ROWS: tl.constexpr):
    """One float32 for each of ROWS tokens, such as its norm."""
    index = first + tl.arange(0, ROWS)
    return tl.load(x + index, mask=index < tokens, other=other)


_STATE_ELEMENTS = 512
"""Elements of a state that a program sums over segments."""
BEFORE, AFTER, ALL = 0, 1, 2
"""The segments that are summed for each segment: those before it, those after it, or all, only for the first."""
_AFTER, _ALL = tl.constexpr(AFTER), tl.constexpr(ALL)


@triton.jit
def _accumulate_state(
    state, vector, keys, values, norms, means, key_stride, value_stride, begin, end, first_column,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, SCALED: tl.constexpr, FLOAT16: tl.constexpr,
    PRECISION: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Adds tokens from `begin` to `end` to the state, (BLOCK_DIM, COLUMNS), and to the vector behind it."""
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
    """The state of one segment of one head, COLUMNS of its value dimensions.

    SCALED: the features are those of queries divided by their norms, and the vector behind the state sums them
    multiplied by the means. MANY: the state is that of several consecutive heads, `members`.
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
    norms_of_head, means_of_head = norms, means
    if SCALED:
        norms_of_head += number // segments * members * tokens
        means_of_head += number // segments * members * tokens
    if MANY:
        for _member in range(members):
            state, vector = _accumulate_state(
                state, vector, keys, values, norms_of_head, means_of_head, key_stride, value_stride, begin, end,
                first_column, DIM, VALUE_DIM, BLOCK_DIM, SCALED, FLOAT16, PRECISION, WHOLE, ROWS, COLUMNS,
            )  # fmt: skip
            keys += key_head_stride
            values += value_head_stride
            if SCALED:
                norms_of_head += tokens
                means_of_head += tokens
    else:
        state, vector = _accumulate_state(
            state, vector, keys, values, norms_of_head, means_of_head, key_stride, value_stride, begin, end,
            first_column, DIM, VALUE_DIM, BLOCK_DIM, SCALED, FLOAT16, PRECISION, WHOLE, ROWS, COLUMNS,
        )  # fmt: skip
    states += number * (BLOCK_DIM * BLOCK_VALUE_DIM + BLOCK_DIM)
    rows = tl.arange(0, BLOCK_DIM)
    columns = first_column + tl.arange(0, COLUMNS)
    tl.store(states + rows[:, None] * BLOCK_VALUE_DIM + columns[None, :], state)
    if first_column == 0:
        tl.store(states + BLOCK_DIM * BLOCK_VALUE_DIM + rows, vector)


@triton.jit(do_not_specialize=["segments"])
def linear_attention_sums_kernel(states, segments, SIZE: tl.constexpr, WHICH: tl.constexpr, ELEMENTS: tl.constexpr):
    """Exclusive prefix sum of the states of a head's segments, in place and in a fixed order; or their total (ALL)."""
    blocks: tl.constexpr = (SIZE + ELEMENTS - 1) // ELEMENTS
    program = tl.program_id(0)
    element = program % blocks * ELEMENTS + tl.arange(0, ELEMENTS)
    mask = element < SIZE
    states += (program // blocks).to(tl.int64) * segments * SIZE + element
    total = tl.zeros([ELEMENTS], tl.float32)
    for step in range(segments):
        segment = step
        if WHICH == _AFTER:
            segment = segments - 1 - step
        pointers = states + tl.cast(segment, tl.int64) * SIZE
        state = tl.load(pointers, mask=mask, other=0.0)
        if WHICH != _ALL:
            tl.store(pointers, total, mask=mask)
        total += state
    if WHICH == _ALL:
        tl.store(states, total, mask=mask)


RESULT, QUERY, KEY, VALUE = 0, 1, 2, 3
_RESULT, _QUERY, _KEY, _VALUE = tl.constexpr(RESULT), tl.constexpr(QUERY), tl.constexpr(KEY), tl.constexpr(VALUE)


@triton.jit
def _matvec(tile, vector, PRECISION: tl.constexpr):
    """tile @ vector; in 16 bits on the tensor cores, so that the operand stays where it is.

    There the vector is split into two numbers of 16 bits, in two columns, which keep the precision of float32.
    """
    if tile.dtype == tl.float32:
        total = tl.sum(tile * vector[None, :], 1)
    else:
        column = tl.arange(0, 16)[None, :]
        high = vector.to(tile.dtype)
        low = (vector - high.to(tl.float32)).to(tile.dtype)
        both = tl.where(column == 0, high[:, None], tl.where(column == 1, low[:, None], tl.zeros_like(low)[:, None]))
        total = tl.sum(tl.dot(tile, both, input_precision=PRECISION), 1)
    return total


@triton.jit
def _chunk_step(
    sums, total, state, vector, left, mean, right, inner, norms, means, right_stride, inner_stride, first, tokens,
    first_column, KIND: tl.constexpr, WIDTH: tl.constexpr, INNER_WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    FLOAT16: tl.constexpr, PRECISION: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Adds the pairs of tokens of one chunk to sums, (ROWS, COLUMNS), and the chunk to the state."""
    RIGHT_FEATURES: tl.constexpr = (KIND == _RESULT) | (KIND == _VALUE)
    BACKWARDS: tl.constexpr = (KIND == _KEY) | (KIND == _VALUE)
    # right_s and inner_s; features of padding tokens are divided by infinity, or only meet results of padding
    rights = load_tokens(right, first, right_stride, tokens, 0, WIDTH, ROWS, BLOCK, RIGHT_FEATURES, WHOLE, False)
    inners = load_tokens(
        inner, first, inner_stride, tokens, first_column, INNER_WIDTH, ROWS, COLUMNS, not RIGHT_FEATURES, WHOLE, False
    )
    if KIND == _VALUE:
        rights *= (1.0 / load_per_token(norms, first, tokens, float("inf"), ROWS))[:, None]
    if KIND == _KEY:
        inners *= (1.0 / load_per_token(norms, first, tokens, float("inf"), ROWS))[:, None]
    rights = as_dot_operand(rights, FLOAT16).to(left.dtype)
    inners = as_dot_operand(inners, FLOAT16).to(left.dtype)
    # the vector; before the products, so that features are in registers for a shorter time
    if KIND == _RESULT:
        vector += tl.sum(rights.to(tl.float32), 0)
    elif KIND == _QUERY:
        vector += tl.sum(inners.to(tl.float32), 0)
    elif KIND == _KEY:
        mean = load_per_token(means, first, tokens, 0.0, ROWS)
        vector += tl.sum(inners.to(tl.float32) * mean[:, None], 0)
    # weights of pairs, (ROWS, ROWS), masked
    weights = tl.dot(left, tl.trans(rights), input_precision=PRECISION)
    if KIND == _QUERY:
        weights -= mean[:, None]
    if KIND == _KEY:
        weights -= mean[None, :]
    row = tl.arange(0, ROWS)
    if not BACKWARDS:
        visible = row[:, None] >= row[None, :]
    else:
        visible = row[:, None] <= row[None, :]
    weights = tl.where(visible, weights, 0.0)
    if KIND == _RESULT:
        total += tl.sum(weights, 1)
    sums = tl.dot(weights.to(left.dtype), inners, sums, input_precision=PRECISION)
    # state += right^T inner, or its transpose: the operand that was loaded unchanged is transposed, as the tensor cores
    # read it from shared memory, and features need not be computed a second time in another order
    if RIGHT_FEATURES:
        state = tl.dot(tl.trans(inners), rights, state, input_precision=PRECISION)
    else:
        state = tl.dot(tl.trans(rights), inners, state, input_precision=PRECISION)
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

    `group` consecutive heads share right and inner, or a head sums over those of `members` heads. There are `records`
    states for each of these. The result is multiplied by the derivative of the features of `outer`, if there is one.
    """
    # this program's segment, and pointers to its head
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
    right_head = head // group * members
    right += batch * right_batch_stride + right_head * right_head_stride
    inner += batch * inner_batch_stride + right_head * inner_head_stride
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

    # the state and the vector at the start: (COLUMNS, BLOCK) where left are features, and otherwise (BLOCK, COLUMNS)
    rows = tl.arange(0, BLOCK)
    columns = first_column + tl.arange(0, COLUMNS)
    VECTOR: tl.constexpr = BLOCK if KIND == _RESULT else COLUMNS
    if states is not None:
        record = (batch * (heads // group) + head // group) * records
        if CAUSAL:
            record += place
        states += record * (BLOCK * BLOCK_INNER + (BLOCK if LEFT_FEATURES else BLOCK_INNER))
        vectors = states + BLOCK * BLOCK_INNER
        if LEFT_FEATURES:  # in memory, features are the rows
            state = tl.load(states + rows[None, :] * BLOCK_INNER + columns[:, None])
        else:
            state = tl.load(states + columns[None, :] * BLOCK + rows[:, None])
        if KIND == _RESULT:
            vector = tl.load(vectors + rows)
        elif KIND == _VALUE:
            vector = tl.zeros([VECTOR], tl.float32)
        else:
            vector = tl.load(vectors + columns)
    else:
        if LEFT_FEATURES:
            state = tl.zeros([COLUMNS, BLOCK], tl.float32)
        else:
            state = tl.zeros([BLOCK, COLUMNS], tl.float32)
        vector = tl.zeros([VECTOR], tl.float32)

    chunks = tl.cdiv(end - begin, ROWS)
    for step in range(chunks):
        first = begin + step * ROWS
        if BACKWARDS:
            first = begin + (chunks - 1 - step) * ROWS
        lefts = load_tokens(left, first, left_stride, tokens, 0, WIDTH, ROWS, BLOCK, LEFT_FEATURES, WHOLE, False)
        if FLOAT16:
            lefts = lefts.to(tl.float32)
        else:
            lefts = lefts.to(out.dtype.element_ty)

        # tokens of earlier chunks: left_t @ state, less the mean
        total = tl.zeros([ROWS], tl.float32)
        mean = total
        sums = tl.zeros([ROWS, COLUMNS], tl.float32)
        if KIND == _RESULT:
            total = _matvec(lefts, vector, PRECISION)
        elif KIND == _QUERY:
            mean = load_per_token(means, first, tokens, 0.0, ROWS)
            sums -= mean[:, None] * vector[None, :]
        elif KIND == _KEY:
            sums -= vector[None, :]
        before = state.to(lefts.dtype)
        if LEFT_FEATURES:
            before = tl.trans(before)
        sums = tl.dot(lefts, before, sums, input_precision=PRECISION)

        # pairs of tokens of this chunk
        if CAUSAL and not MANY:
            sums, total, state, vector = _chunk_step(
                sums, total, state, vector, lefts, mean, right, inner, norms, means, right_stride, inner_stride, first,
                tokens, first_column, KIND, WIDTH, INNER_WIDTH, BLOCK, FLOAT16, PRECISION, WHOLE, ROWS, COLUMNS,
            )  # fmt: skip
        elif CAUSAL:
            for member in range(members):
                sums, total, state, vector = _chunk_step(
                    sums, total, state, vector, lefts, mean, right + member * right_head_stride,
                    inner + member * inner_head_stride, norms + member * tokens, means + member * tokens,
                    right_stride, inner_stride, first, tokens, first_column, KIND, WIDTH, INNER_WIDTH, BLOCK, FLOAT16,
                    PRECISION, WHOLE, ROWS, COLUMNS,
                )  # fmt: skip

        # divide by the norms, multiply by the derivative of features, and store
        index = first + tl.arange(0, ROWS)
        if KIND == _RESULT:
            total += tl.cast(eps, tl.float32)
            sums *= (1.0 / total)[:, None]
            if first_column == 0:
                tl.store(norms + index, total, mask=index < tokens)
        elif KIND == _QUERY:
            sums *= (1.0 / load_per_token(norms, first, tokens, 1.0, ROWS))[:, None]
        if outer is not None:
            outers = load_tokens(
                outer, first, outer_stride, tokens, first_column, INNER_WIDTH, ROWS, COLUMNS, False, WHOLE
            ).to(tl.float32)
            sums *= tl.where(outers > 0.0, 1.0, tl.exp(outers))
        mask = (index < tokens)[:, None]
        if not WHOLE:
            mask = mask & (columns < INNER_WIDTH)[None, :]
        stride = heads * INNER_WIDTH
        pointers = out + tl.cast(first, tl.int64) * stride + (tl.arange(0, ROWS)[:, None] * stride + columns[None, :])
        tl.store(pointers, sums.to(out.dtype.element_ty), mask=mask)


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
    d_out = load_tokens(gradient, first, gradient_stride, tokens, 0, VALUE_DIM, ROWS, BLOCK, False, WHOLE)
    out = load_tokens(result, first, result_stride, tokens, 0, VALUE_DIM, ROWS, BLOCK, False, WHOLE)
    index = first + tl.arange(0, ROWS)
    mean = tl.sum(d_out.to(tl.float32) * out.to(tl.float32), 1)
    tl.store(means + number * tokens + index, mean, mask=index < tokens)


class _LinearAttentionProblem:
    """The sizes of a call, and the launches of its kernels."""

    def __init__(
        self, query: Tensor, key: Tensor, value: Tensor, causal: bool, config: LinearAttentionConfig | None
    ) -> None:
        self.query, self.key, self.value = addressable(query), addressable(key), addressable(value)
        self.batches, self.key_heads = key.shape[:2]
        self.causal = causal
        self.dtype, self.device = query.dtype, query.device
        # tf32 has as many bits as float16
        self.precision = "tf32" if query.dtype == torch.float16 else "ieee"
        dim, value_dim = query.shape[3], value.shape[3]
        self.blocks = (max(next_power_of_2(dim), 16), max(next_power_of_2(value_dim), 16))
        self.constants = (dim, value_dim, *self.blocks)
        self._fixed_config = config

    def config(self, kernel: str) -> LinearAttentionConfig:
        return self._fixed_config or kernel_config(kernel, max(self.blocks), self.dtype, self.device)

    def means(self, gradient: Tensor, result: Tensor) -> Tensor:
        """The sum of gradient * result of each query, [batch, heads, tokens]."""
        batches, heads, tokens, dim = gradient.shape
        means = torch.empty((batches, heads, tokens), dtype=torch.float32, device=self.device)
        blocks = triton.cdiv(tokens, _MEANS_ROWS)
        launch(
            linear_attention_means_kernel, (blocks * heads * batches, 1, 1), gradient, result, means,
            *gradient.stride()[:3], *result.stride()[:3], heads, tokens, blocks, dim, self.blocks[1], _MEANS_ROWS,
        )  # fmt: skip
        return means

    def states(
        self, keys: Tensor, values: Tensor, which: int, norms: Tensor | None = None, means: Tensor | None = None
    ) -> tuple[Tensor | None, int]:
        """The states that scans of one direction start with, [batch, heads, segments, size], and tokens of a segment.

        With norms and means, `keys` are queries, [batch, heads * members, tokens, dim], and `values` are gradients of
        results. None for a causal mask and one segment, which starts with zeros.
        """
        config = self.config("linear_attention_states")
        batches, all_heads, tokens, _ = keys.shape
        heads, (block_dim, block_value_dim) = self.key_heads, self.blocks
        columns = min(config.columns, block_value_dim)
        sequences = batches * (heads if which != BEFORE else self.query.shape[1])
        segment = segment_length(tokens, sequences, block_value_dim // columns, config.programs, self.device)
        if self.causal and tokens <= segment:
            return None, segment
        which = which if self.causal else ALL
        members = all_heads // max(heads, 1)
        segments = max(triton.cdiv(tokens, segment), 1)
        size = block_dim * block_value_dim + block_dim
        states = torch.empty((batches, heads, segments, size), dtype=torch.float32, device=self.device)
        launch(
            linear_attention_states_kernel, (block_value_dim // columns * segments * heads * batches, 1, 1), states,
            keys, values, norms, means, *keys.stride()[:3], *values.stride()[:3], heads, members, tokens, segment,
            segments, *self.constants, norms is not None, members > 1, self.dtype == torch.float16, self.precision,
            config.rows, columns, warps=config.warps, stages=config.stages,
        )  # fmt: skip
        if segments > 1 or which != ALL:
            grid = (triton.cdiv(size, _STATE_ELEMENTS) * heads * batches, 1, 1)
            launch(linear_attention_sums_kernel, grid, states, segments, size, which, _STATE_ELEMENTS)
        return states, segment

    def scan(
        self, kind: int, kernel: str, left: Tensor, right: Tensor, inner: Tensor, outer: Tensor | None, norms: Tensor,
        means: Tensor | None, states: Tensor | None, segment: int, eps: float = 0.0,
    ) -> Tensor:  # fmt: skip
        """The result or a gradient, [batch, heads, tokens, dim], token-major in memory."""
        batches, heads, tokens, width = left.shape
        inner_width, right_heads = inner.shape[3], right.shape[1]
        strides = (tokens * heads * inner_width, inner_width, heads * inner_width, 1)
        out = torch.empty_strided((batches, heads, tokens, inner_width), strides, dtype=self.dtype, device=self.device)
        block, block_inner = self.blocks if kind in (RESULT, VALUE) else self.blocks[::-1]
        group, members = (1, right_heads // heads) if kind in (KEY, VALUE) else (heads // right_heads, 1)
        config = self.config(kernel)
        columns = min(config.columns, block_inner)
        if not self.causal:
            segment = segment_length(tokens, batches * heads, block_inner // columns, config.programs, self.device)
        segments = triton.cdiv(tokens, segment)
        launch(
            linear_attention_kernel, (block_inner // columns * segments * heads * batches, 1, 1), out, left, right,
            inner, outer, norms, means, states, *left.stride()[:3], *right.stride()[:3], *inner.stride()[:3],
            *((0, 0, 0) if outer is None else outer.stride()[:3]), heads, group, members, tokens, segment, segments,
            1 if states is None else states.shape[2], eps, kind, self.causal, width, inner_width, block,
            block_inner, members > 1, self.dtype == torch.float16,
            self.precision, config.rows, columns, warps=config.warps, stages=config.stages,
        )  # fmt: skip
        return out


def forward(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, eps: float, *, config: LinearAttentionConfig | None = None
) -> tuple[Tensor, Tensor]:
    """The result, token-major in memory, and the norm of each query: the sum of its weights plus eps, in float32."""
    problem = _LinearAttentionProblem(query, key, value, causal, config)
    query, key, value = problem.query, problem.key, problem.value
    norms = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
    states = problem.states(key, value, BEFORE)
    result = problem.scan(RESULT, "linear_attention", query, key, value, None, norms, None, *states, eps)
    return result, norms


def backward(
    gradient: Tensor, result: Tensor, norms: Tensor, query: Tensor, key: Tensor, value: Tensor, causal: bool,
    for_query: bool, for_key: bool, for_value: bool, *, config: LinearAttentionConfig | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of query, key and value; empty tensors for those that are not needed."""
    problem = _LinearAttentionProblem(query, key, value, causal, config)
    query, key, value = problem.query, problem.key, problem.value
    gradient, norms = addressable(gradient), norms.contiguous()
    means = problem.means(gradient, addressable(result))
    by_query, by_key, by_value = (query.new_empty(0) for _ in range(3))
    if for_query:
        states = problem.states(key, value, BEFORE)
        by_query = problem.scan(QUERY, "linear_attention_query", gradient, value, key, query, norms, means, *states)
    if for_key or for_value:
        states = problem.states(query, gradient, AFTER, norms, means)
        if for_key:
            by_key = problem.scan(KEY, "linear_attention_key", value, gradient, query, key, norms, means, *states)
        if for_value:
            by_value = problem.scan(VALUE, "linear_attention_value", key, query, gradient, None, norms, means, *states)
    return by_query, by_key, by_value
