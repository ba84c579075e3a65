"""The Triton kernels of routing, permutation and the MoE layer, and their launchers."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearpeak.kernels._runtime.launch import launch, next_power_of_2
from nearpeak.kernels._runtime.rows import common_width
from nearpeak.kernels._runtime.tuning import tuned
from nearpeak.kernels.gemm.grouped_triton import multiply, multiply_gated
from nearpeak.kernels.pointwise.triton import sigmoid_and_slope, value_and_derivative

NO_EXPERT = tl.constexpr(-(2**63))
"""Below all keys of experts."""
TINY = tl.constexpr(1e-20)


@triton.jit
def _load_scores(logits, token, expert, tokens, experts, stride, SOFTMAX: tl.constexpr):
    """The scores of tokens, and the slopes of sigmoids."""
    inside = (token < tokens)[:, None] & (expert < experts)[None, :]
    given = tl.load(logits + (token * stride)[:, None] + expert[None, :], mask=inside, other=float("-inf"))
    given = given.to(tl.float32)
    if SOFTMAX:
        top = tl.max(given, 1)
        top = tl.where(top == float("-inf"), 0.0, top)  # of tokens behind the last
        power = tl.exp(given - top[:, None])
        score = power / tl.sum(power, 1)[:, None]
        slope = score
    else:
        score, slope = sigmoid_and_slope(given)
    return score, slope


@triton.jit
def route_kernel(
    logits, bias, weights, chosen, tokens, experts, stride, scale,
    K: tl.constexpr, SOFTMAX: tl.constexpr, RENORMALIZE: tl.constexpr,
    TOKENS: tl.constexpr, EXPERTS: tl.constexpr, CHOICES: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    expert = tl.arange(0, EXPERTS)
    choice = tl.arange(0, CHOICES)
    score, _ = _load_scores(logits, token, expert, tokens, experts, stride, SOFTMAX)
    preference = score
    if bias is not None:
        preference += tl.load(bias + expert, mask=expert < experts, other=0.0).to(tl.float32)[None, :]
    bits = (preference + 0.0).to(tl.int32, bitcast=True)  # no negative zero
    ordered = tl.where(preference == preference, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)
    key = (ordered.to(tl.int64) << 32) | (experts - 1 - expert).to(tl.int64)[None, :]
    key = tl.where((expert < experts)[None, :], key, NO_EXPERT)
    found = tl.zeros([TOKENS, CHOICES], tl.float32)
    numbers = tl.zeros([TOKENS, CHOICES], tl.int32)
    for turn in range(K):
        best = tl.max(key, 1)
        number = experts - 1 - best.to(tl.int32)
        taken = expert[None, :] == number[:, None]
        weight = tl.sum(tl.where(taken, score, 0.0), 1)
        here = (choice == turn)[None, :]
        found = tl.where(here, weight[:, None], found)
        numbers = tl.where(here, number[:, None], numbers)
        key = tl.where(taken, NO_EXPERT, key)
    if RENORMALIZE:
        found = found / (tl.sum(found, 1) + TINY)[:, None]
    at = (token * K)[:, None] + choice[None, :]
    inside = (token < tokens)[:, None] & (choice < K)[None, :]
    tl.store(weights + at, found * tl.cast(scale, tl.float32), mask=inside)
    tl.store(chosen + at, numbers, mask=inside)


@triton.jit
def route_backward_kernel(
    gradient, logits, chosen, result, tokens, experts, stride, gradient_stride, gradient_step, scale,
    K: tl.constexpr, SOFTMAX: tl.constexpr, RENORMALIZE: tl.constexpr, TOKENS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    expert = tl.arange(0, EXPERTS)
    score, slope = _load_scores(logits, token, expert, tokens, experts, stride, SOFTMAX)
    upstream = tl.zeros([TOKENS, EXPERTS], tl.float32)
    among = tl.zeros([TOKENS, EXPERTS], tl.int1)
    for turn in range(K):
        number = tl.load(chosen + token * K + turn, mask=token < tokens, other=0)
        given = tl.load(gradient + token * gradient_stride + turn * gradient_step, mask=token < tokens, other=0.0)
        taken = expert[None, :] == number[:, None]
        upstream = tl.where(taken, given.to(tl.float32)[:, None] * tl.cast(scale, tl.float32), upstream)
        among = among | taken
    if RENORMALIZE:
        total = tl.sum(tl.where(among, score, 0.0), 1) + TINY
        mean = tl.sum(tl.where(among, upstream * score, 0.0), 1) / total
        upstream = tl.where(among, (upstream - mean[:, None]) / total[:, None], 0.0)
    if SOFTMAX:
        by_logit = score * (upstream - tl.sum(upstream * score, 1)[:, None])
    else:
        by_logit = tl.where(among, upstream * slope, 0.0)
    at = (token * experts)[:, None] + expert[None, :]
    inside = (token < tokens)[:, None] & (expert < experts)[None, :]
    tl.store(result + at, by_logit.to(result.dtype.element_ty), mask=inside)


def route(
    logits: Tensor, bias: Tensor | None, k: int, scores: str, renormalize: bool, scale: float,
    *, config: dict[str, Any] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Weights and experts of each token. Copies logits whose rows have holes."""
    tokens, experts = logits.shape
    weights = torch.empty((tokens, k), dtype=torch.float32, device=logits.device)
    chosen = torch.empty((tokens, k), dtype=torch.int32, device=logits.device)
    if not tokens:
        return weights, chosen
    logits = _without_holes(logits)
    config = config or tuned("route", experts, logits.device) or route_heuristic(experts)
    launch(
        route_kernel, (triton.cdiv(tokens, config["tokens"]), 1, 1), logits,
        None if bias is None else bias.contiguous(), weights, chosen, tokens, experts, logits.stride(0), scale,
        k, scores == "softmax", renormalize, config["tokens"], next_power_of_2(experts), next_power_of_2(k),
        warps=config["warps"],
    )  # fmt: skip
    return weights, chosen


def route_backward(
    gradient: Tensor, logits: Tensor, experts: Tensor, scores: str, renormalize: bool, scale: float,
    *, config: dict[str, Any] | None = None,
) -> Tensor:  # fmt: skip
    """The gradient of the logits, contiguous. Copies logits whose rows have holes."""
    tokens, number = logits.shape
    result = torch.empty((tokens, number), dtype=logits.dtype, device=logits.device)
    if not tokens:
        return result
    logits = _without_holes(logits)
    config = config or tuned("route_backward", number, logits.device) or route_heuristic(number)
    launch(
        route_backward_kernel, (triton.cdiv(tokens, config["tokens"]), 1, 1), gradient, logits, experts.contiguous(),
        result, tokens, number, logits.stride(0), *gradient.stride(), scale, experts.shape[1], scores == "softmax",
        renormalize, config["tokens"], next_power_of_2(number), warps=config["warps"],
    )  # fmt: skip
    return result


def _without_holes(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def route_heuristic(experts: int) -> dict[str, Any]:
    """About 8 scores of each thread, and rows within a warp, where reductions need no shared memory."""
    block = next_power_of_2(experts)
    return {"tokens": max(1, 1024 // block), "warps": max(4, min(16, block // 256))}


def route_candidates(experts: int) -> list[dict[str, Any]]:
    """What is worth measuring of `route` and `route_backward`."""
    block = next_power_of_2(experts)
    return [
        {"tokens": tokens, "warps": warps}
        for tokens in (1, 2, 4, 8, 16, 32)
        for warps in (1, 2, 4, 8, 16)
        if 4 <= block * tokens // (32 * warps) <= 16
    ]


_SORT_STEP = 128
"""Choices that are compared with each other at once, to find out how many of the same expert come before each."""
_SORT_PARTS = 128
"""Programs of the sort, at most: about one for each multiprocessor. Each reads the counts of all."""
_MOST_UNROLLED = 16
"""Experts of a token up to which the loop over them is unrolled, so that all loads are under way at once."""


@triton.jit
def _expert_bins(experts, at, choices, number_of_experts):
    """The expert of a choice; one more for a dropped choice; two more behind the end."""
    expert = tl.load(experts + at, mask=at < choices, other=0)  # compared as they are: 64 bits may not fit into 32
    expert = tl.where((expert >= 0) & (expert < number_of_experts), expert, number_of_experts)
    return tl.where(at < choices, expert, number_of_experts + 1).to(tl.int32)


@triton.jit
def count_choices_kernel(experts, counts, choices, number_of_experts, per_part, STEP: tl.constexpr, BINS: tl.constexpr):
    part = tl.program_id(0).to(tl.int64)
    found = tl.zeros([BINS], tl.int32)
    for begin in range(0, per_part, STEP):
        found += tl.histogram(
            _expert_bins(experts, part * per_part + begin + tl.arange(0, STEP), choices, number_of_experts), BINS
        )
    tl.store(counts + part * BINS + tl.arange(0, BINS), found)


@triton.jit
def place_choices_kernel(
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
        expert = _expert_bins(experts, choice, choices, number_of_experts)
        earlier = (expert[None, :] == expert[:, None]) & (at[None, :] < at[:, None])
        rank = tl.sum(earlier.to(tl.int32), 1)
        row = tl.gather(place, expert, 0) + rank
        tl.store(row_map + choice, tl.where(expert == number_of_experts, ~row, row), mask=choice < choices)
        tl.store(sources + row, (choice // k).to(tl.int32), mask=choice < choices)
        place += tl.histogram(expert, BINS)


@triton.jit
def permute_kernel(
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
def unpermute_kernel(
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
def unpermute_backward_kernel(
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


def sort_tokens(experts: Tensor, number_of_experts: int) -> tuple[Tensor, Tensor, Tensor]:
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
    per_part = triton.cdiv(triton.cdiv(choices, _SORT_PARTS), _SORT_STEP) * _SORT_STEP
    parts = triton.cdiv(choices, per_part)
    counts = torch.empty(parts, bins, dtype=torch.int32, device=device)
    experts = experts.contiguous()
    launch(
        count_choices_kernel,
        (parts, 1, 1),
        experts,
        counts,
        choices,
        number_of_experts,
        per_part,
        _SORT_STEP,
        bins,
        warps=4,
    )
    launch(
        place_choices_kernel, (parts, 1, 1), experts, counts, totals, row_map, sources, choices, experts.shape[1],
        number_of_experts, per_part, parts, _SORT_STEP, bins, max(1, min(32, 8192 // bins)), warps=16,
    )  # fmt: skip
    return totals, row_map, sources


def permute_rows(x: Tensor, row_map: Tensor, *, config: dict[str, Any] | None = None) -> Tensor:
    """The row of each choice: that of its token, or zeros if it is dropped. Copies `x` if its rows have holes."""
    tokens, choices = row_map.shape
    columns = x.shape[1]
    rows = torch.empty(tokens * choices, columns, dtype=x.dtype, device=x.device)
    if not rows.numel():
        return rows
    x, row_map = _without_holes(x), row_map.contiguous()
    chosen = config or tuned("permute_copy", columns, x.device) or permute_heuristic(columns)
    block = chosen["columns"]
    grid = triton.cdiv(tokens, chosen["tokens"]), triton.cdiv(columns, block), 1
    launch(
        permute_kernel, grid, x, row_map, rows, tokens, columns, x.stride(0), choices, chosen["tokens"], block,
        warps=chosen["warps"],
    )  # fmt: skip
    return rows


def unpermute_rows(
    rows: Tensor, row_map: Tensor, weights: Tensor | None, *, config: dict[str, Any] | None = None
) -> Tensor:
    """The rows of each token added in the order of its choices, in float32. Copies `rows` if they have holes."""
    tokens, choices = row_map.shape
    columns = rows.shape[1]
    result = torch.empty(tokens, columns, dtype=rows.dtype, device=rows.device)
    if not result.numel():
        return result
    if not choices:
        return result.zero_()
    rows, row_map = _without_holes(rows), row_map.contiguous()
    chosen = config or tuned("unpermute_sum", columns, rows.device) or permute_heuristic(columns)
    block = chosen["columns"]
    grid = triton.cdiv(tokens, chosen["tokens"]), triton.cdiv(columns, block), 1
    launch(
        unpermute_kernel, grid, rows, row_map, None if weights is None else weights.contiguous(), result, tokens, columns,
        rows.stride(0), choices, choices <= _MOST_UNROLLED, chosen["tokens"], block, warps=chosen["warps"],
    )  # fmt: skip
    return result


def unpermute_rows_backward(
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
        unpermute_backward_kernel, (tokens, 1, 1), gradient, rows, row_map.contiguous(), weights.contiguous(), to_rows,
        to_weights, columns, gradient.stride(0), rows.stride(0), choices, block, block >= columns,
        warps=chosen["warps"],
    )  # fmt: skip
    return to_rows, to_weights


def permute_heuristic(columns: int) -> dict[str, Any]:
    """Pieces of rows of 1024 elements, which waste little of a row of 7168, and several short rows."""
    block = min(next_power_of_2(columns), 1024)
    return {"columns": block, "tokens": max(1, 1024 // block), "warps": 4}


def permute_candidates(columns: int) -> list[dict[str, Any]]:
    """What is worth measuring of `permute_copy` and `unpermute_sum`; `columns` is the size of a row."""
    return [
        {"columns": block, "tokens": tokens, "warps": warps}
        for block in (512, 1024, 2048, 4096, 8192)
        for tokens in (1, 2, 4)
        for warps in (2, 4, 8)
        if block < 2 * columns and 8 <= block * tokens // (32 * warps) <= 32
    ]


def unpermute_backward_candidates(columns: int) -> list[dict[str, Any]]:
    """What is worth measuring of `unpermute_backward`."""
    return [
        {"columns": block, "warps": warps}
        for block in (1024, 2048, 4096, 8192, 16384)
        for warps in (2, 4, 8, 16)
        if block < 2 * columns and 8 <= block // (32 * warps) <= 64
    ]


@triton.jit
def gate_backward_kernel(
    upstream, kept, weights, row_map, by_factors, weighted, by_weights, columns,
    NAME: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One choice: of a token and one of its experts. Rows of dropped choices are left as they are."""
    columns = columns // WIDTH * WIDTH
    choice = tl.program_id(0).to(tl.int64)
    row = tl.load(row_map + choice).to(tl.int64)
    weight = tl.load(weights + choice).to(tl.float32)
    product = tl.zeros([COLUMNS], tl.float32)
    if row >= 0:
        upstream += row * columns
        weighted += row * columns
        kept += row * 2 * columns
        by_factors += row * 2 * columns
        for begin in range(0, columns, COLUMNS):
            at = begin + tl.arange(0, COLUMNS)
            inside = at < columns
            given = tl.load(upstream + at, mask=inside, other=0.0).to(tl.float32)
            gate = tl.load(kept + at, mask=inside, other=0.0).to(tl.float32)
            up = tl.load(kept + columns + at, mask=inside, other=0.0).to(tl.float32)
            value, slope = value_and_derivative(gate, NAME)
            inner = value * up
            product += given * inner
            given *= weight
            tl.store(by_factors + at, (given * up * slope).to(by_factors.dtype.element_ty), mask=inside)
            tl.store(by_factors + columns + at, (given * value).to(by_factors.dtype.element_ty), mask=inside)
            tl.store(weighted + at, (inner * weight).to(weighted.dtype.element_ty), mask=inside)
    tl.store(by_weights + choice, tl.sum(product, 0).to(by_weights.dtype.element_ty))


def moe_forward(
    x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, groups: Tensor, row_map: Tensor, sources: Tensor,
    height: int, activation: str, keep: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The results of tokens, and both factors of the inner rows if they are to be kept, else nothing."""
    inner, kept = multiply_gated(x, gate_up, groups, height, activation, keep, sources)
    return unpermute_rows(multiply(inner, down, groups, height, False), row_map, weights), kept


def gate_backward(
    upstream: Tensor, kept: Tensor, weights: Tensor, row_map: Tensor, activation: str,
    *, config: dict[str, Any] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of the factors, the weighted inner rows, and the gradients of weights."""
    by_factors, weighted = torch.empty_like(kept), torch.empty_like(upstream)
    by_weights = torch.empty(weights.shape, dtype=weights.dtype, device=weights.device)
    columns = upstream.shape[1]
    if not upstream.numel():
        return by_factors, weighted, by_weights.zero_()
    chosen = config or gate_backward_heuristic(columns)
    launch(
        gate_backward_kernel, (row_map.numel(), 1, 1), upstream, kept, weights.contiguous(), row_map.contiguous(),
        by_factors, weighted, by_weights, columns, activation, common_width(columns), chosen["columns"],
        warps=chosen["warps"],
    )  # fmt: skip
    return by_factors, weighted, by_weights


def gate_backward_heuristic(columns: int) -> dict[str, Any]:
    block = min(next_power_of_2(columns), 512)
    return {"columns": block, "warps": max(1, block // 256)}
