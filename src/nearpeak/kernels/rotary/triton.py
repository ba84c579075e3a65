"""The Triton kernel of `rotary`, its launchers and configurations.

A program takes some heads of some tokens of a first tensor, and of a second one if there is one, with the same cosines
and sines for both. All strides but the last are free.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearpeak.kernels._runtime.launch import launch, next_power_of_2
from nearpeak.kernels._runtime.rows import assume_multiple, common_width
from nearpeak.kernels._runtime.tuning import from_row, processors, tuned, tuned_by_rows
from nearpeak.kernels.rotary import empty_result

_PAIRS = 1024
"""Pairs of numbers in a tile: a load of 128 bits for each half by each of 128 threads in bfloat16."""
_HEADS_PER_TILE = 4
"""On an H200, tiles of 4 tokens and 4 heads of 128 are 2 to 4 % faster than those of 32 heads."""
_FEW_PROGRAMS = 48
"""Of a multiprocessor, of which it has 12 at a time: up to so many, a program that waits for memory twice shows."""
_MOST_Y = 65_535
"""Programs in the second dimension of a grid, and in the third."""
_EMPTY_SHARE = 1.125
"""Tiles of each sequence may have so many times its tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryConfig:
    """The tile of a program."""

    tokens: int
    """Tokens per program."""
    heads: int
    """Heads per program."""
    warps: int
    apart: bool = False
    """Programs of its own for the second tensor, in place of heads of both in one."""


@triton.jit
def head_rows(x, batch, place, head, batch_stride, token_stride, head_stride, WIDTH: tl.constexpr):
    """Where heads of tokens begin, (TOKENS, HEADS, 1). WIDTH divides all strides."""
    x += batch * assume_multiple(batch_stride, WIDTH) + place * assume_multiple(token_stride, WIDTH)
    return x + head.to(tl.int64) * assume_multiple(head_stride, WIDTH)


@triton.jit
def load_halves(
    source, is_head, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The first and the second number of HALF pairs of each head, both (TOKENS, HEADS, BLOCK), in float32."""
    if INTERLEAVED:
        column = tl.arange(0, 2 * BLOCK)[None, None, :]
        both = tl.load(source + column, mask=is_head & (column < 2 * HALF), other=0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(both, (TOKENS, HEADS, BLOCK, 2)))
    else:
        column = tl.arange(0, BLOCK)[None, None, :]
        inside = is_head & (column < HALF)
        first = tl.load(source + column, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(source + HALF + column, mask=inside, other=0.0).to(tl.float32)
    return first, second


@triton.jit
def write_rotated(
    source, target, first, second, is_head, cosine, sine,
    HALF: tl.constexpr, REST: tl.constexpr, INTERLEAVED: tl.constexpr,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes HALF rotated pairs of numbers of each head, and copies the REST."""
    dtype = target.dtype.element_ty
    if INTERLEAVED:
        column = tl.arange(0, 2 * BLOCK)[None, None, :]
        both = tl.join(first * cosine - second * sine, second * cosine + first * sine)
        both = tl.reshape(both, (TOKENS, HEADS, 2 * BLOCK))
        tl.store(target + column, both.to(dtype), mask=is_head & (column < 2 * HALF))
    else:
        column = tl.arange(0, BLOCK)[None, None, :]
        inside = is_head & (column < HALF)
        tl.store(target + column, (first * cosine - second * sine).to(dtype), mask=inside)
        tl.store(target + HALF + column, (second * cosine + first * sine).to(dtype), mask=inside)
    if REST > 0:
        column = tl.arange(0, REST_BLOCK)[None, None, :]
        inside = is_head & (column < REST)
        tl.store(target + 2 * HALF + column, tl.load(source + 2 * HALF + column, mask=inside), mask=inside)


@triton.jit
def rotate(
    x, result, batch, place, head, is_head, cosine, sine,
    x_batch, x_token, x_head, result_batch, result_token, result_head,
    HALF: tl.constexpr, REST: tl.constexpr, INTERLEAVED: tl.constexpr, WIDTH: tl.constexpr,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr,
):  # fmt: skip
    source = head_rows(x, batch, place, head, x_batch, x_token, x_head, WIDTH)
    target = head_rows(result, batch, place, head, result_batch, result_token, result_head, WIDTH)
    first, second = load_halves(source, is_head, HALF, INTERLEAVED, TOKENS, HEADS, BLOCK)
    write_rotated(
        source, target, first, second, is_head, cosine, sine,
        HALF, REST, INTERLEAVED, TOKENS, HEADS, BLOCK, REST_BLOCK,
    )  # fmt: skip


@triton.jit
def rotary_kernel(
    first, first_result, second, second_result, cosines, sines, positions,
    tokens, length, table_rows, first_heads, second_heads, head_blocks, second_block,
    first_batch, first_token, first_head, first_result_batch, first_result_token, first_result_head,
    second_batch, second_token, second_head, second_result_batch, second_result_token, second_result_head,
    cosine_batch, cosine_token, sine_batch, sine_token, position_batch, position_token,
    TABLE_STEP: tl.constexpr, REVERSE: tl.constexpr, HAS_POSITIONS: tl.constexpr, HAS_SECOND: tl.constexpr,
    APART: tl.constexpr, BY_SEQUENCE: tl.constexpr,
    HALF: tl.constexpr, REST: tl.constexpr, INTERLEAVED: tl.constexpr, WIDTH: tl.constexpr,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr,
):  # fmt: skip
    """Heads of one tensor, APART, or of both."""
    if head_blocks is None:  # see `_rotary_grid`
        head_block, token_block = tl.program_id(0), tl.program_id(1)
    else:
        head_block, token_block = tl.program_id(0) % head_blocks, tl.program_id(0) // head_blocks
    head = head_block * HEADS + tl.arange(0, HEADS)[None, :, None]  # (1, HEADS, 1)
    token = token_block * TOKENS + tl.arange(0, TOKENS)[:, None, None]  # (TOKENS, 1, 1)
    if BY_SEQUENCE:  # integers are divided in about 40 instructions, which shows in a kernel of two microseconds
        is_token = token < length
        batch, place = tl.program_id(2).to(tl.int64), token.to(tl.int64)
    else:
        is_token = token < tokens
        batch, place = (token // length).to(tl.int64), (token % length).to(tl.int64)
    # cosines and sines of each token, (TOKENS, HEADS, BLOCK): each thread reads those of its own numbers, which
    # otherwise would go through shared memory
    position, known = place, is_token
    if HAS_POSITIONS:
        position = tl.load(positions + batch * position_batch + place * position_token, mask=is_token, other=0).to(
            tl.int64
        )
        known = is_token & (position >= 0) & (position < table_rows)
    column = tl.arange(0, BLOCK)[None, None, :] + tl.zeros([1, HEADS, 1], tl.int32)
    known = known & (column < HALF)
    # positions outside of the table become NaN, where memory beyond the table would look like numbers
    cosine = tl.load(
        cosines + batch * cosine_batch + position * cosine_token + column * TABLE_STEP, mask=known, other=float("nan")
    ).to(tl.float32)
    sine = tl.load(
        sines + batch * sine_batch + position * sine_token + column * TABLE_STEP, mask=known, other=float("nan")
    ).to(tl.float32)
    if REVERSE:
        sine = -sine
    if APART:  # blocks of heads of the second tensor come after those of the first
        if head_block < second_block:
            rotate(
                first, first_result, batch, place, head, is_token & (head < first_heads), cosine, sine,
                first_batch, first_token, first_head, first_result_batch, first_result_token, first_result_head,
                HALF, REST, INTERLEAVED, WIDTH, TOKENS, HEADS, BLOCK, REST_BLOCK,
            )  # fmt: skip
        else:
            head -= second_block * HEADS
            rotate(
                second, second_result, batch, place, head, is_token & (head < second_heads), cosine, sine,
                second_batch, second_token, second_head, second_result_batch, second_result_token, second_result_head,
                HALF, REST, INTERLEAVED, WIDTH, TOKENS, HEADS, BLOCK, REST_BLOCK,
            )  # fmt: skip
    else:
        in_first = is_token & (head < first_heads)
        source = head_rows(first, batch, place, head, first_batch, first_token, first_head, WIDTH)
        target = head_rows(
            first_result, batch, place, head, first_result_batch, first_result_token, first_result_head, WIDTH
        )
        x0, x1 = load_halves(source, in_first, HALF, INTERLEAVED, TOKENS, HEADS, BLOCK)
        if HAS_SECOND:
            in_second = is_token & (head < second_heads)
            other_source = head_rows(second, batch, place, head, second_batch, second_token, second_head, WIDTH)
            y0, y1 = load_halves(other_source, in_second, HALF, INTERLEAVED, TOKENS, HEADS, BLOCK)
        write_rotated(
            source, target, x0, x1, in_first, cosine, sine, HALF, REST, INTERLEAVED, TOKENS, HEADS, BLOCK, REST_BLOCK
        )
        if HAS_SECOND and head_block * HEADS < second_heads:
            target = head_rows(
                second_result, batch, place, head, second_result_batch, second_result_token, second_result_head, WIDTH
            )
            write_rotated(
                other_source, target, y0, y1, in_second, cosine, sine,
                HALF, REST, INTERLEAVED, TOKENS, HEADS, BLOCK, REST_BLOCK,
            )  # fmt: skip


def forward(
    x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None,
    interleaved: bool, reverse: bool, heads_first: bool, rotary_dim: int, *, config: RotaryConfig | None = None,
) -> Tensor:  # fmt: skip
    """x rotated. Copies x, and the tables, if their last stride is not 1."""
    result = empty_result(x)
    _rotate([(x, result)], cos, sin, positions, interleaved, reverse, heads_first, rotary_dim, config)
    return result


def forward_pair(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None,
    interleaved: bool, reverse: bool, heads_first: bool, rotary_dim: int, *, config: RotaryConfig | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """q and k rotated, in one launch."""
    results = empty_result(q), empty_result(k)
    pairs = [(q, results[0]), (k, results[1])]
    _rotate(pairs, cos, sin, positions, interleaved, reverse, heads_first, rotary_dim, config)
    return results


def in_place(
    tensors: list[Tensor], cos: Tensor, sin: Tensor, positions: Tensor | None,
    interleaved: bool, heads_first: bool, rotary_dim: int, *, config: RotaryConfig | None = None,
) -> None:  # fmt: skip
    """Rotates one or two tensors in place; the last stride must be 1."""
    pairs = [(x, x) for x in tensors]
    _rotate(pairs, cos, sin, positions, interleaved, False, heads_first, rotary_dim, config)
    for x in tensors:
        if not x.is_inference():
            torch.autograd.graph.increment_version(x)  # so that autograd notices a saved tensor that has changed


def _rotate(
    pairs: list[tuple[Tensor, Tensor]], cos: Tensor, sin: Tensor, positions: Tensor | None,
    interleaved: bool, reverse: bool, heads_first: bool, rotary_dim: int, config: RotaryConfig | None,
) -> None:  # fmt: skip
    """Launches the kernel for one or two pairs of an input and a result, which are the same tensor in place."""
    sizes, strides = [], []
    pairs = [(x if x.stride(-1) == 1 else x.contiguous(), result) for x, result in pairs]
    for pair in pairs:
        for tensor in pair:
            batch, length, heads, *steps = _geometry(tensor, heads_first)
            strides += steps
        sizes.append(heads)
    if not batch * length or not any(sizes):
        return
    head_dim = pairs[0][0].shape[-1]
    half = rotary_dim // 2
    # a table of whole rows has each angle twice, side by side or half a row apart
    step = 2 if interleaved and cos.shape[-1] == rotary_dim else 1
    cos, sin = (table if table.stride(-1) == 1 else table.contiguous() for table in (cos, sin))
    table_strides = [*_batch_strides(cos, 3, -2), *_batch_strides(sin, 3, -2)]
    position_strides = (0, 0) if positions is None else _batch_strides(positions, 2, -1)
    rest = 0 if pairs[0][0] is pairs[0][1] else head_dim - rotary_dim
    tokens = batch * length
    row = tuned_by_rows("rotary", head_dim, tokens * max(sizes), cos.device) or tuned("rotary", head_dim, cos.device)
    config = config or from_row(row, RotaryConfig)
    config = config or heuristic(tokens, max(sizes), half, rest, processors(cos.device))
    blocks = [triton.cdiv(heads, config.heads) for heads in sizes]
    apart = config.apart and len(pairs) == 2
    by_sequence = has_tiles_by_sequence(batch, length, config.tokens)
    grid, head_blocks = _rotary_grid(
        triton.cdiv(length if by_sequence else tokens, config.tokens),
        sum(blocks) if apart else max(blocks),
        batch if by_sequence else 1,
    )
    launch(
        rotary_kernel, grid, *pairs[0], *pairs[-1], cos, sin, cos if positions is None else positions,
        tokens, length, cos.shape[-2], sizes[0], sizes[-1], head_blocks, blocks[0],
        *strides[:6], *strides[-6:], *table_strides, *position_strides,
        step, reverse, positions is not None, len(pairs) == 2, apart, by_sequence, half, rest, interleaved,
        common_width(*strides), config.tokens, config.heads, next_power_of_2(half), next_power_of_2(rest),
        warps=config.warps,
    )  # fmt: skip


def has_tiles_by_sequence(batch: int, length: int, tokens: int) -> bool:
    """Whether tiles of so many tokens begin with each sequence: if that leaves few of their tokens empty."""
    return batch <= _MOST_Y and triton.cdiv(length, tokens) * tokens <= _EMPTY_SHARE * length


def _rotary_grid(token_blocks: int, head_blocks: int, sequences: int) -> tuple[tuple[int, int, int], int | None]:
    """The programs, and the number of blocks of heads, or None if those have a dimension of their own.

    Blocks of heads of the same tokens come after one another: tokens are read in the order of their memory.
    """
    if token_blocks <= _MOST_Y:
        return (head_blocks, token_blocks, sequences), None
    return (head_blocks * token_blocks, 1, sequences), head_blocks


def _geometry(x: Tensor, heads_first: bool) -> tuple[int, int, int, int, int, int]:
    """The sizes of batch, sequence and heads, and their strides."""
    token, head = (-2, -3) if heads_first else (-3, -2)
    batch, batch_stride = (x.shape[0], x.stride(0)) if x.dim() == 4 else (1, 0)
    return batch, x.shape[token], x.shape[head], batch_stride, x.stride(token), x.stride(head)


def _batch_strides(table: Tensor, dimensions: int, dimension: int) -> tuple[int, int]:
    """The stride of the batch, 0 if all sequences share a table, and that of a dimension."""
    return table.stride(0) if table.dim() == dimensions and table.shape[0] > 1 else 0, table.stride(dimension)


def heuristic(tokens: int, heads: int, half: int, rest: int, processors: int) -> RotaryConfig:
    """A few heads of a few tokens."""
    heads_per_tile = min(next_power_of_2(heads), _HEADS_PER_TILE)
    width = max(next_power_of_2(half), next_power_of_2(rest) // 2)
    tokens_per_tile = min(max(1, _PAIRS // (heads_per_tile * width)), 32)
    programs = triton.cdiv(tokens, tokens_per_tile) * triton.cdiv(heads, heads_per_tile)
    return RotaryConfig(
        tokens=tokens_per_tile, heads=heads_per_tile, warps=4, apart=programs <= _FEW_PROGRAMS * processors
    )


def candidates(size: int, heads: int = 32) -> list[RotaryConfig]:
    """Configurations worth measuring for heads of this length, all of them rotated."""
    half = next_power_of_2(size // 2)
    configs = []
    for pairs in (1024, 2048, 4096):
        for heads_per_tile in sorted({min(next_power_of_2(heads), number) for number in (1, 4, 8, 16, 32)}):
            tokens = pairs // (heads_per_tile * half)
            for warps in (2, 4, 8):
                if 1 <= tokens <= 64 and 8 <= pairs // (32 * warps) <= 32:
                    configs.append(RotaryConfig(tokens=tokens, heads=heads_per_tile, warps=warps))
    return configs


def few_candidates(size: int, heads: int) -> list[RotaryConfig]:
    """Configurations worth measuring for few tokens: 2 to 8 pairs per thread."""
    half = next_power_of_2(size // 2)
    shapes = {
        (max(pairs // (many * half), 1), many, max(pairs // (32 * per_thread), 1))
        for pairs, per_thread in ((256, 8), (256, 4), (256, 2), (512, 8), (512, 4), (512, 2), (1024, 8), (1024, 4))
        for many in {min(next_power_of_2(heads), number) for number in (4, 8)}
    }
    configs = [
        RotaryConfig(tokens=tokens, heads=many, warps=warps, apart=True) for tokens, many, warps in sorted(shapes)
    ]
    return [heuristic(2**24, heads, size // 2, 0, 1), *configs]
