"""The kernel of `rotary`.

A program takes some heads of some tokens, of a first tensor, and of a second one if there is one: of both with the same
cosines and sines. The heads of the same tokens are neighbors. All strides but the last are free.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearpeak.kernels._runtime.launch import launch, next_power_of_2
from nearpeak.kernels._runtime.rows import common_width
from nearpeak.kernels._runtime.tuning import tuned

ELEMENTS = 1024
"""Pairs of numbers in a tile: a load of 128 bits for each half by each of 128 threads in bfloat16."""
_HEADS_PER_TILE = 4
"""Heads of a tile. On an H200 tiles of 4 tokens and 4 heads of 128 are 2 to 4 % faster than those of 32 heads."""


@triton.jit
def rotate(
    x, result, batch, place, is_token, cosine, sine, first_head, heads,
    x_batch, x_token, x_head, result_batch, result_token, result_head,
    HALF: tl.constexpr, REST: tl.constexpr, INTERLEAVED: tl.constexpr, WIDTH: tl.constexpr,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr,
):  # fmt: skip
    """Rotates HEADS of some tokens. `batch`, `place` and `is_token` are [tokens, 1, 1], the tables [tokens, 1, n].

    HALF is the number of pairs, and REST of numbers beyond them, which are copied.
    """
    x += batch * x_batch // WIDTH * WIDTH + place * x_token // WIDTH * WIDTH
    result += batch * result_batch // WIDTH * WIDTH + place * result_token // WIDTH * WIDTH
    x_head, result_head = x_head // WIDTH * WIDTH, result_head // WIDTH * WIDTH
    head = first_head + tl.arange(0, HEADS)[None, :, None]
    is_head = is_token & (head < heads)
    head = head.to(tl.int64)
    source, target = x + head * x_head, result + head * result_head
    if INTERLEAVED:
        column = tl.arange(0, 2 * BLOCK)[None, None, :]
        inside = is_head & (column < 2 * HALF)
        both = tl.load(source + column, mask=inside, other=0.0).to(tl.float32)
        one, other = tl.split(tl.reshape(both, (TOKENS, HEADS, BLOCK, 2)))
        both = tl.join(one * cosine - other * sine, other * cosine + one * sine)
        both = tl.reshape(both, (TOKENS, HEADS, 2 * BLOCK))
        tl.store(target + column, both.to(result.dtype.element_ty), mask=inside)
    else:
        column = tl.arange(0, BLOCK)[None, None, :]
        inside = is_head & (column < HALF)
        one = tl.load(source + column, mask=inside, other=0.0).to(tl.float32)
        other = tl.load(source + HALF + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(target + column, (one * cosine - other * sine).to(result.dtype.element_ty), mask=inside)
        tl.store(target + HALF + column, (other * cosine + one * sine).to(result.dtype.element_ty), mask=inside)
    if REST > 0:
        column = tl.arange(0, REST_BLOCK)[None, None, :]
        inside = is_head & (column < REST)
        tl.store(target + 2 * HALF + column, tl.load(source + 2 * HALF + column, mask=inside), mask=inside)


@triton.jit
def rotary_kernel(
    first, first_result, second, second_result, cosines, sines, positions,
    tokens, length, table_rows, first_heads, second_heads,
    first_batch, first_token, first_head, first_result_batch, first_result_token, first_result_head,
    second_batch, second_token, second_head, second_result_batch, second_result_token, second_result_head,
    cosine_batch, cosine_token, sine_batch, sine_token, position_batch, position_token,
    TABLE_STEP: tl.constexpr, REVERSE: tl.constexpr, HAS_POSITIONS: tl.constexpr, HAS_SECOND: tl.constexpr,
    HALF: tl.constexpr, REST: tl.constexpr, INTERLEAVED: tl.constexpr, WIDTH: tl.constexpr,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(tl.maximum(first_heads, second_heads), HEADS)
    head = tl.program_id(0) % blocks * HEADS
    token = tl.program_id(0) // blocks * TOKENS + tl.arange(0, TOKENS)[:, None, None]
    is_token = token < tokens
    batch, place = (token // length).to(tl.int64), (token % length).to(tl.int64)
    at, known = place, is_token
    if HAS_POSITIONS:
        at = tl.load(positions + batch * position_batch + place * position_token, mask=is_token, other=0).to(tl.int64)
        known = is_token & (at >= 0) & (at < table_rows)
    column = tl.arange(0, BLOCK)[None, None, :]
    known = known & (column < HALF)
    # a position that the table does not have shows as NaN, where memory beyond the table would look like numbers
    cosine = tl.load(
        cosines + batch * cosine_batch + at * cosine_token + column * TABLE_STEP, mask=known, other=float("nan")
    ).to(tl.float32)
    sine = tl.load(
        sines + batch * sine_batch + at * sine_token + column * TABLE_STEP, mask=known, other=float("nan")
    ).to(tl.float32)
    if REVERSE:
        sine = -sine
    rotate(
        first, first_result, batch, place, is_token, cosine, sine, head, first_heads,
        first_batch, first_token, first_head, first_result_batch, first_result_token, first_result_head,
        HALF, REST, INTERLEAVED, WIDTH, TOKENS, HEADS, BLOCK, REST_BLOCK,
    )  # fmt: skip
    if HAS_SECOND and head < second_heads:
        rotate(
            second, second_result, batch, place, is_token, cosine, sine, head, second_heads,
            second_batch, second_token, second_head, second_result_batch, second_result_token, second_result_head,
            HALF, REST, INTERLEAVED, WIDTH, TOKENS, HEADS, BLOCK, REST_BLOCK,
        )  # fmt: skip


def empty_result(x: Tensor) -> Tensor:
    """Where the rotated x goes: dimensions in the order that they have in memory, and the last one next to itself."""
    result = torch.empty_like(x) if x.stride(-1) == 1 else x
    return result if result.stride(-1) == 1 else torch.empty_like(x, memory_format=torch.contiguous_format)


def forward(
    x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None,
    interleaved: bool, reverse: bool, heads_first: bool, rotary_dim: int, *, config: dict[str, Any] | None = None,
) -> Tensor:  # fmt: skip
    """x rotated. Copies x, and the tables, where their last stride is not 1."""
    result = empty_result(x)
    _rotate([(x, result)], cos, sin, positions, interleaved, reverse, heads_first, rotary_dim, config)
    return result


def forward_pair(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None,
    interleaved: bool, reverse: bool, heads_first: bool, rotary_dim: int, *, config: dict[str, Any] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """q and k rotated, in one launch."""
    results = empty_result(q), empty_result(k)
    pairs = [(q, results[0]), (k, results[1])]
    _rotate(pairs, cos, sin, positions, interleaved, reverse, heads_first, rotary_dim, config)
    return results


def in_place(
    tensors: list[Tensor], cos: Tensor, sin: Tensor, positions: Tensor | None,
    interleaved: bool, heads_first: bool, rotary_dim: int, *, config: dict[str, Any] | None = None,
) -> None:  # fmt: skip
    """Rotates one or two tensors where they are; the last stride must be 1."""
    pairs = [(x, x) for x in tensors]
    _rotate(pairs, cos, sin, positions, interleaved, False, heads_first, rotary_dim, config)
    for x in tensors:
        if not x.is_inference():
            torch.autograd.graph.increment_version(x)  # so that autograd knows what it kept to be no longer there


def _rotate(
    pairs: list[tuple[Tensor, Tensor]], cos: Tensor, sin: Tensor, positions: Tensor | None,
    interleaved: bool, reverse: bool, heads_first: bool, rotary_dim: int, config: dict[str, Any] | None,
) -> None:  # fmt: skip
    sizes, strides = [], []
    pairs = [(x if x.stride(-1) == 1 else x.contiguous(), result) for x, result in pairs]
    for pair in pairs:
        for one in pair:
            batch, length, heads, *steps = _geometry(one, heads_first)
            strides += steps
        sizes.append(heads)
    if not batch * length or not any(sizes):
        return
    head_dim = pairs[0][0].shape[-1]
    half = rotary_dim // 2
    # in a table of whole rows each angle is there twice, side by side or half the row apart
    step = 2 if interleaved and cos.shape[-1] == rotary_dim else 1
    cos, sin = (table if table.stride(-1) == 1 else table.contiguous() for table in (cos, sin))
    table_strides = [*_batch_strides(cos, 3, -2), *_batch_strides(sin, 3, -2)]
    position_strides = (0, 0) if positions is None else _batch_strides(positions, 2, -1)
    rest = 0 if pairs[0][0] is pairs[0][1] else head_dim - rotary_dim
    config = config or tuned("rotary", head_dim, cos.device) or heuristic(max(sizes), half, rest)
    many, tokens = config["tokens"], batch * length
    launch(
        rotary_kernel, (triton.cdiv(tokens, many) * triton.cdiv(max(sizes), config["heads"]), 1, 1),
        *pairs[0], *pairs[-1], cos, sin, cos if positions is None else positions,
        tokens, length, cos.shape[-2], sizes[0], sizes[-1],
        *strides[:6], *strides[-6:], *table_strides, *position_strides,
        step, reverse, positions is not None, len(pairs) == 2, half, rest, interleaved, common_width(*strides),
        many, config["heads"], next_power_of_2(half), next_power_of_2(rest), warps=config["warps"],
    )  # fmt: skip


def _geometry(x: Tensor, heads_first: bool) -> tuple[int, int, int, int, int, int]:
    """Batch, length and heads: how many, and their strides."""
    token, head = (-2, -3) if heads_first else (-3, -2)
    has_batch = x.dim() == 4
    batch, batch_stride = (x.shape[0], x.stride(0)) if has_batch else (1, 0)
    return batch, x.shape[token], x.shape[head], batch_stride, x.stride(token), x.stride(head)


def _batch_strides(table: Tensor, dimensions: int, dimension: int) -> tuple[int, int]:
    """The strides from one batch to the next, 0 where all have the same, and of a dimension."""
    return table.stride(0) if table.dim() == dimensions and table.shape[0] > 1 else 0, table.stride(dimension)


def heuristic(heads: int, half: int, rest: int) -> dict[str, Any]:
    """What to launch with where nobody measured: a few heads of a few tokens."""
    together = min(next_power_of_2(heads), _HEADS_PER_TILE)
    width = max(next_power_of_2(half), next_power_of_2(rest) // 2)
    tokens = max(1, ELEMENTS // (together * width))
    return {"tokens": min(tokens, 32), "heads": together, "warps": 4}


def candidates(size: int, heads: int = 32) -> list[dict[str, Any]]:
    """Configurations worth measuring for heads of this length, all of them rotated."""
    half = next_power_of_2(size // 2)
    found: list[dict[str, Any]] = []
    for elements in (1024, 2048, 4096):
        for together in sorted({min(next_power_of_2(heads), number) for number in (1, 4, 8, 16, 32)}):
            tokens = elements // (together * half)
            for warps in (2, 4, 8):
                if 1 <= tokens <= 64 and 8 <= elements // (32 * warps) <= 32:
                    found.append({"tokens": tokens, "heads": together, "warps": warps})
    return found
