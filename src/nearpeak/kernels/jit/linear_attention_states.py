"""The states of linear attention: sums over tokens of the products of features and values, by segments.

A state is [dim, value dim] and a row of [dim] behind it, in float32, padded to powers of 2: S = sum of f_t v_t^T, and
z = sum of f_t. Segments are summed up side by side, so that one long sequence fills a GPU, and then each gets the sum
of those before it (or after it, for gradients of keys and values), or of all.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearpeak.kernels.jit.launch import launch
from nearpeak.kernels.jit.linear_attention_tiles import computed, numbers_of, tokens_of

_ELEMENTS = 512
"""Of a state, by program, where states are added up."""
BEFORE, AFTER, ALL = 0, 1, 2
"""Which segments are added up for each: those before it, after it, or all, for the first alone."""
_AFTER, _ALL = tl.constexpr(AFTER), tl.constexpr(ALL)


@triton.jit
def _added(
    state, vector, keys, values, norms, means, key_stride, value_stride, begin, end, first_column,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, SCALED: tl.constexpr, FLOAT16: tl.constexpr,
    PRECISION: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The state with tokens from `begin` to `end` added."""
    for first in range(begin, end, ROWS):
        right = computed(
            tokens_of(values, first, value_stride, end, first_column, VALUE_DIM, ROWS, COLUMNS, False, WHOLE), FLOAT16
        )
        left = tokens_of(keys, first, key_stride, end, 0, DIM, ROWS, BLOCK_DIM, True, WHOLE, not SCALED)
        if SCALED:
            left *= (1.0 / numbers_of(norms, first, end, float("inf"), ROWS))[:, None]
        left = left.to(right.dtype)
        state = tl.dot(tl.trans(left), right, state, input_precision=PRECISION)
        if SCALED:
            vector += tl.sum(left.to(tl.float32) * numbers_of(means, first, end, 0.0, ROWS)[:, None], 0)
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
            state, vector = _added(
                state, vector, keys, values, norms_here, means_here, key_stride, value_stride, begin, end,
                first_column, DIM, VALUE_DIM, BLOCK_DIM, SCALED, FLOAT16, PRECISION, WHOLE, ROWS, COLUMNS,
            )  # fmt: skip
            keys += key_head_stride
            values += value_head_stride
            if SCALED:
                norms_here += tokens
                means_here += tokens
    else:
        state, vector = _added(
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


def states_of(
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
        *constants, norms is not None, members > 1, keys.dtype == torch.float16, precision(keys.dtype),
        config["rows"], columns, warps=config["warps"], stages=config["stages"],
    )  # fmt: skip
    if segments > 1 or which != ALL:
        grid = (triton.cdiv(size, _ELEMENTS) * heads * batches, 1, 1)
        launch(linear_attention_sums_kernel, grid, states, segments, size, which, _ELEMENTS)
    return states


def precision(dtype: torch.dtype) -> str:
    """Of products of float32: as they are, or with the bits that float16 has, for what was float16."""
    return "tf32" if dtype == torch.float16 else "ieee"
