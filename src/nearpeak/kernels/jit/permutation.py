"""The kernels of `permute_tokens` and `unpermute_tokens`: a counting sort in two launches, and copies of rows.

A choice is a pair of a token and one of its k experts. Each choice has a row of its own: those of the first expert come
first, and behind those of the last expert the rows of choices that are dropped. `row_map` has the row of each choice,
and for a dropped one that row's complement, `~row`, which is negative. `sources` has the token of each row.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearpeak.kernels.configs import tuned
from nearpeak.kernels.jit.launch import launch, next_power_of_2

_STEP = 128
"""Choices that are compared with each other at once, to find out how many of the same expert come before each."""
_PARTS = 128
"""Programs of the sort, at most: about one for each multiprocessor. Each reads the counts of all."""
_UNROLLED = 16
"""Experts of a token up to which the loop over them is unrolled, so that all loads are under way at once."""


@triton.jit
def _bins(experts, at, choices, number_of_experts):
    """The expert of a choice; one more for a dropped choice; two more behind the end."""
    expert = tl.load(experts + at, mask=at < choices, other=0)  # compared as they are: 64 bits may not fit into 32
    expert = tl.where((expert >= 0) & (expert < number_of_experts), expert, number_of_experts)
    return tl.where(at < choices, expert, number_of_experts + 1).to(tl.int32)


@triton.jit
def count_kernel(experts, counts, choices, number_of_experts, per_part, STEP: tl.constexpr, BINS: tl.constexpr):
    part = tl.program_id(0).to(tl.int64)
    found = tl.zeros([BINS], tl.int32)
    for begin in range(0, per_part, STEP):
        found += tl.histogram(
            _bins(experts, part * per_part + begin + tl.arange(0, STEP), choices, number_of_experts), BINS
        )
    tl.store(counts + part * BINS + tl.arange(0, BINS), found)


@triton.jit
def place_kernel(
    experts, counts, totals, row_map, sources, choices, k, number_of_experts, per_part, parts,
    STEP: tl.constexpr, BINS: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0).to(tl.int64)
    bins = tl.arange(0, BINS)
    before = tl.zeros([BINS], tl.int32)
    total = tl.zeros([BINS], tl.int32)
    for first in range(0, parts, TOGETHER):
        other = first + tl.arange(0, TOGETHER)[:, None]
        found = tl.load(counts + other * BINS + bins[None, :], mask=other < parts, other=0)
        total += tl.sum(found, 0)
        before += tl.sum(tl.where(other < part, found, 0), 0)
    if part == 0:
        tl.store(totals + bins, total, mask=bins < number_of_experts)
    place = tl.cumsum(total, 0) - total + before  # the row of the next choice of each expert
    at = tl.arange(0, STEP)
    for begin in range(0, per_part, STEP):
        choice = part * per_part + begin + at
        expert = _bins(experts, choice, choices, number_of_experts)
        earlier = (expert[None, :] == expert[:, None]) & (at[None, :] < at[:, None])
        rank = tl.sum(earlier.to(tl.int32), 1)
        row = tl.gather(place, expert, 0) + rank
        tl.store(row_map + choice, tl.where(expert == number_of_experts, ~row, row), mask=choice < choices)
        tl.store(sources + row, (choice // k).to(tl.int32), mask=choice < choices)
        place += tl.histogram(expert, BINS)


@triton.jit
def copy_kernel(
    x, row_map, rows, tokens, columns, stride, K: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    at = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (token < tokens)[:, None] & (at < columns)[None, :]
    given = tl.load(x + (token * stride)[:, None] + at[None, :], mask=inside)
    for choice in range(K):
        row = tl.load(row_map + token * K + choice, mask=token < tokens, other=0)
        target = tl.where(row < 0, ~row, row).to(tl.int64) * columns
        kept = tl.where((row < 0)[:, None], tl.zeros_like(given), given)
        tl.store(rows + target[:, None] + at[None, :], kept, mask=inside)


@triton.jit
def _add_row(total, rows, row_map, weights, token, choice, at, inside, tokens, stride, K: tl.constexpr):
    row = tl.load(row_map + token * K + choice, mask=token < tokens, other=-1)
    taken = inside & (row >= 0)[:, None]
    given = tl.load(rows + (row.to(tl.int64) * stride)[:, None] + at[None, :], mask=taken, other=0.0).to(tl.float32)
    if weights is not None:
        weight = tl.load(weights + token * K + choice, mask=(token < tokens) & (row >= 0), other=0.0)
        given = given * weight.to(tl.float32)[:, None]
        # a weight that is not finite stays where its row is taken, and nowhere else
        given = tl.where(taken, given, 0.0)
    return total + given


@triton.jit
def sum_kernel(
    rows, row_map, weights, result, tokens, columns, stride,
    K: tl.constexpr, UNROLLED: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    at = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (token < tokens)[:, None] & (at < columns)[None, :]
    total = tl.zeros([TOKENS, COLUMNS], tl.float32)
    if UNROLLED:
        for choice in tl.static_range(K):
            total = _add_row(total, rows, row_map, weights, token, choice, at, inside, tokens, stride, K)
    else:
        for choice in range(K):
            total = _add_row(total, rows, row_map, weights, token, choice, at, inside, tokens, stride, K)
    tl.store(result + (token * columns)[:, None] + at[None, :], total.to(result.dtype.element_ty), mask=inside)


@triton.jit
def sum_backward_kernel(
    gradient, rows, row_map, weights, to_rows, to_weights, columns, gradient_stride, stride,
    K: tl.constexpr, COLUMNS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    gradient += token * gradient_stride
    at = tl.arange(0, COLUMNS)
    if WHOLE:  # the gradient of the token stays in registers
        held = tl.load(gradient + at, mask=at < columns, other=0.0).to(tl.float32)
    for choice in range(K):
        row = tl.load(row_map + token * K + choice)
        taken = row >= 0
        weight = tl.load(weights + token * K + choice).to(tl.float32)
        target = tl.where(taken, row, ~row).to(tl.int64)
        product = tl.zeros([COLUMNS], tl.float32)
        for begin in range(0, columns, COLUMNS):
            inside = begin + at < columns
            if WHOLE:
                upstream = held
            else:
                upstream = tl.load(gradient + begin + at, mask=inside, other=0.0).to(tl.float32)
            given = tl.load(rows + target * stride + begin + at, mask=inside & taken, other=0.0).to(tl.float32)
            product += tl.where(taken, given * upstream, 0.0)
            scaled = tl.where(taken, upstream * weight, 0.0).to(to_rows.dtype.element_ty)
            tl.store(to_rows + target * columns + begin + at, scaled, mask=inside)
        tl.store(to_weights + token * K + choice, tl.sum(product, 0).to(to_weights.dtype.element_ty))


def sort(experts: Tensor, number_of_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Choices of each expert, the row of each choice, and the token of each row.

    Deterministic, without waiting for the device.
    """
    device = experts.device
    row_map = torch.empty(experts.shape, dtype=torch.int32, device=device)
    totals = torch.empty(number_of_experts, dtype=torch.int32, device=device)
    choices = experts.numel()
    sources = torch.empty(choices, dtype=torch.int32, device=device)
    if not choices:
        return totals.zero_(), row_map, sources
    bins = next_power_of_2(number_of_experts + 2)
    per_part = triton.cdiv(triton.cdiv(choices, _PARTS), _STEP) * _STEP
    parts = triton.cdiv(choices, per_part)
    counts = torch.empty(parts, bins, dtype=torch.int32, device=device)
    experts = experts.contiguous()
    launch(count_kernel, (parts, 1, 1), experts, counts, choices, number_of_experts, per_part, _STEP, bins, warps=4)
    launch(
        place_kernel, (parts, 1, 1), experts, counts, totals, row_map, sources, choices, experts.shape[1],
        number_of_experts, per_part, parts, _STEP, bins, max(1, min(32, 8192 // bins)), warps=16,
    )  # fmt: skip
    return totals, row_map, sources


def copy(x: Tensor, row_map: Tensor, *, config: dict[str, Any] | None = None) -> Tensor:
    """The row of each choice: that of its token, or zeros if it is dropped. Copies `x` if its rows have holes."""
    tokens, choices = row_map.shape
    columns = x.shape[1]
    rows = torch.empty(tokens * choices, columns, dtype=x.dtype, device=x.device)
    if not rows.numel():
        return rows
    x, row_map = _without_holes(x), row_map.contiguous()
    chosen = config or tuned("permute_copy", columns, x.device) or heuristic(columns)
    block = chosen["columns"]
    grid = triton.cdiv(tokens, chosen["tokens"]), triton.cdiv(columns, block), 1
    launch(
        copy_kernel, grid, x, row_map, rows, tokens, columns, x.stride(0), choices, chosen["tokens"], block,
        warps=chosen["warps"],
    )  # fmt: skip
    return rows


def sum_rows(rows: Tensor, row_map: Tensor, weights: Tensor | None, *, config: dict[str, Any] | None = None) -> Tensor:
    """The rows of each token added in the order of its choices, in float32. Copies `rows` if they have holes."""
    tokens, choices = row_map.shape
    columns = rows.shape[1]
    result = torch.empty(tokens, columns, dtype=rows.dtype, device=rows.device)
    if not result.numel():
        return result
    if not choices:
        return result.zero_()
    rows, row_map = _without_holes(rows), row_map.contiguous()
    chosen = config or tuned("unpermute_sum", columns, rows.device) or heuristic(columns)
    block = chosen["columns"]
    grid = triton.cdiv(tokens, chosen["tokens"]), triton.cdiv(columns, block), 1
    launch(
        sum_kernel, grid, rows, row_map, None if weights is None else weights.contiguous(), result, tokens, columns,
        rows.stride(0), choices, choices <= _UNROLLED, chosen["tokens"], block, warps=chosen["warps"],
    )  # fmt: skip
    return result


def sum_rows_backward(
    gradient: Tensor, rows: Tensor, row_map: Tensor, weights: Tensor, *, config: dict[str, Any] | None = None
) -> tuple[Tensor, Tensor]:
    """The gradients of rows and weights."""
    tokens, choices = row_map.shape
    columns = rows.shape[1]
    to_rows = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
    to_weights = torch.empty(weights.shape, dtype=weights.dtype, device=rows.device)
    if not to_rows.numel():
        return to_rows, to_weights.zero_()
    gradient, rows = _without_holes(gradient), _without_holes(rows)
    size = next_power_of_2(columns)
    chosen = config or tuned("unpermute_backward", columns, rows.device)
    chosen = chosen or {"columns": min(size, 4096), "warps": max(1, min(8, size // 512))}
    block = min(chosen["columns"], size)
    launch(
        sum_backward_kernel, (tokens, 1, 1), gradient, rows, row_map.contiguous(), weights.contiguous(), to_rows,
        to_weights, columns, gradient.stride(0), rows.stride(0), choices, block, block >= columns,
        warps=chosen["warps"],
    )  # fmt: skip
    return to_rows, to_weights


def _without_holes(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def heuristic(columns: int) -> dict[str, Any]:
    """Pieces of rows of 1024 elements, which waste little of a row of 7168, and several short rows."""
    block = min(next_power_of_2(columns), 1024)
    return {"columns": block, "tokens": max(1, 1024 // block), "warps": 4}


def candidates(columns: int) -> list[dict[str, Any]]:
    """What is worth measuring of `permute_copy` and `unpermute_sum`; `columns` is the size of a row."""
    return [
        {"columns": block, "tokens": tokens, "warps": warps}
        for block in (512, 1024, 2048, 4096, 8192)
        for tokens in (1, 2, 4)
        for warps in (2, 4, 8)
        if block < 2 * columns and 8 <= block * tokens // (32 * warps) <= 32
    ]


def backward_candidates(columns: int) -> list[dict[str, Any]]:
    """What is worth measuring of `unpermute_backward`."""
    return [
        {"columns": block, "warps": warps}
        for block in (1024, 2048, 4096, 8192, 16384)
        for warps in (2, 4, 8, 16)
        if block < 2 * columns and 8 <= block // (32 * warps) <= 64
    ]
