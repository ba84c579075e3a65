"""The Triton kernels of routing, permutation and the MoE layer, and their launchers.

A choice is a pair of a token and one of its k experts, and has a row of its own. The rows of the first expert come
first; the rows of dropped choices come after those of the last expert. `row_map` holds the row of each choice, and the
row's complement `~row`, which is negative, for a dropped one. `sources` holds the token of each row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearpeak.kernels._runtime.launch import launch, next_power_of_2
from nearpeak.kernels._runtime.rows import as_rows, common_width
from nearpeak.kernels._runtime.tuning import from_row, tuned
from nearpeak.kernels.gemm.grouped_triton import multiply, multiply_gated
from nearpeak.kernels.pointwise.triton import sigmoid_and_slope, value_and_derivative

NO_EXPERT = tl.constexpr(-(2**63))
"""Less than the key of any expert."""
TINY = tl.constexpr(1e-20)
"""Added to a sum of scores before it divides."""
_SORT_STEP = 128
"""Choices that are compared pairwise, to rank those of the same expert."""
_SORT_PARTS = 128
"""The most programs of the sort: about one per multiprocessor. Each reads the counts of all."""
_MOST_UNROLLED = 16
"""The most experts of a token for which the loop over them is unrolled, so that all loads are in flight at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteConfig:
    """Of the routing kernels: tokens of a program."""

    tokens: int
    warps: int


def route_heuristic(experts: int) -> RouteConfig:
    """About 8 scores per thread, and rows within a warp, so that reductions need no shared memory."""
    block = next_power_of_2(experts)
    return RouteConfig(tokens=max(1, 1024 // block), warps=max(4, min(16, block // 256)))


def route_candidates(experts: int) -> list[RouteConfig]:
    """Configurations of `route` and `route_backward` worth measuring."""
    block = next_power_of_2(experts)
    return [
        RouteConfig(tokens=tokens, warps=warps)
        for tokens in (1, 2, 4, 8, 16, 32)
        for warps in (1, 2, 4, 8, 16)
        if 4 <= block * tokens // (32 * warps) <= 16
    ]


def route(
    logits: Tensor, bias: Tensor | None, k: int, scores: str, renormalize: bool, scale: float,
    *, config: RouteConfig | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The weights and experts of each token. Copies logits whose rows are not contiguous."""
    tokens, experts = logits.shape
    weights = torch.empty((tokens, k), dtype=torch.float32, device=logits.device)
    chosen = torch.empty((tokens, k), dtype=torch.int32, device=logits.device)
    if not tokens:
        return weights, chosen
    logits = as_rows(logits)
    config = config or from_row(tuned("route", experts, logits.device), RouteConfig) or route_heuristic(experts)
    launch(
        route_kernel, (triton.cdiv(tokens, config.tokens), 1, 1), logits,
        None if bias is None else bias.contiguous(), weights, chosen, tokens, experts, logits.stride(0), scale,
        k, scores == "softmax", renormalize, config.tokens, next_power_of_2(experts), next_power_of_2(k),
        warps=config.warps,
    )  # fmt: skip
    return weights, chosen


def route_backward(
    gradient: Tensor, logits: Tensor, experts: Tensor, scores: str, renormalize: bool, scale: float,
    *, config: RouteConfig | None = None,
) -> Tensor:  # fmt: skip
    """The gradient of the logits, contiguous. Copies logits whose rows are not contiguous."""
    tokens, count = logits.shape
    result = torch.empty((tokens, count), dtype=logits.dtype, device=logits.device)
    if not tokens:
        return result
    logits = as_rows(logits)
    config = config or from_row(tuned("route_backward", count, logits.device), RouteConfig) or route_heuristic(count)
    launch(
        route_backward_kernel, (triton.cdiv(tokens, config.tokens), 1, 1), gradient, logits, experts.contiguous(),
        result, tokens, count, logits.stride(0), *gradient.stride(), scale, experts.shape[1], scores == "softmax",
        renormalize, config.tokens, next_power_of_2(count), warps=config.warps,
    )  # fmt: skip
    return result


@triton.jit
def _load_scores(logits, token, expert, tokens, experts, stride, SOFTMAX: tl.constexpr):
    """The scores of tokens, (tokens, experts), and the derivatives of sigmoids."""
    inside = (token < tokens)[:, None] & (expert < experts)[None, :]
    logit = tl.load(logits + (token * stride)[:, None] + expert[None, :], mask=inside, other=float("-inf"))
    logit = logit.to(tl.float32)
    if SOFTMAX:
        top = tl.max(logit, 1)
        top = tl.where(top == float("-inf"), 0.0, top)  # of tokens beyond the last
        power = tl.exp(logit - top[:, None])
        score = power / tl.sum(power, 1)[:, None]
        slope = score
    else:
        score, slope = sigmoid_and_slope(logit)
    return score, slope


@triton.jit
def route_kernel(
    logits, bias, weights, chosen, tokens, experts, stride, scale,
    K: tl.constexpr, SOFTMAX: tl.constexpr, RENORMALIZE: tl.constexpr,
    TOKENS: tl.constexpr, EXPERTS: tl.constexpr, CHOICES: tl.constexpr,
):  # fmt: skip
    """Some tokens, with the scores of all experts in registers. The best expert is selected K times."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    expert = tl.arange(0, EXPERTS)
    choice = tl.arange(0, CHOICES)
    score, _ = _load_scores(logits, token, expert, tokens, experts, stride, SOFTMAX)
    preference = score  # (tokens, experts)
    if bias is not None:
        preference += tl.load(bias + expert, mask=expert < experts, other=0.0).to(tl.float32)[None, :]
    # a key of 64 bits orders by score, and equal scores by expert: one reduction per choice
    bits = (preference + 0.0).to(tl.int32, bitcast=True)  # no negative zero
    ordered = tl.where(preference == preference, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)
    key = (ordered.to(tl.int64) << 32) | (experts - 1 - expert).to(tl.int64)[None, :]
    key = tl.where((expert < experts)[None, :], key, NO_EXPERT)
    selected_weights = tl.zeros([TOKENS, CHOICES], tl.float32)
    selected_experts = tl.zeros([TOKENS, CHOICES], tl.int32)
    for turn in range(K):
        best = tl.max(key, 1)
        number = experts - 1 - best.to(tl.int32)
        is_best = expert[None, :] == number[:, None]
        weight = tl.sum(tl.where(is_best, score, 0.0), 1)
        is_turn = (choice == turn)[None, :]
        selected_weights = tl.where(is_turn, weight[:, None], selected_weights)
        selected_experts = tl.where(is_turn, number[:, None], selected_experts)
        key = tl.where(is_best, NO_EXPERT, key)
    if RENORMALIZE:
        selected_weights = selected_weights / (tl.sum(selected_weights, 1) + TINY)[:, None]
    place = (token * K)[:, None] + choice[None, :]
    inside = (token < tokens)[:, None] & (choice < K)[None, :]
    tl.store(weights + place, selected_weights * tl.cast(scale, tl.float32), mask=inside)
    tl.store(chosen + place, selected_experts, mask=inside)


@triton.jit
def route_backward_kernel(
    gradient, logits, chosen, result, tokens, experts, stride, gradient_stride, gradient_step, scale,
    K: tl.constexpr, SOFTMAX: tl.constexpr, RENORMALIZE: tl.constexpr, TOKENS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """The gradient of the logits of some tokens, from scores that are computed again."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    expert = tl.arange(0, EXPERTS)
    score, slope = _load_scores(logits, token, expert, tokens, experts, stride, SOFTMAX)
    # scatter the gradients of the weights to their experts
    upstream = tl.zeros([TOKENS, EXPERTS], tl.float32)
    is_chosen = tl.zeros([TOKENS, EXPERTS], tl.int1)
    for turn in range(K):
        number = tl.load(chosen + token * K + turn, mask=token < tokens, other=0)
        by_weight = tl.load(gradient + token * gradient_stride + turn * gradient_step, mask=token < tokens, other=0.0)
        is_expert = expert[None, :] == number[:, None]
        upstream = tl.where(is_expert, by_weight.to(tl.float32)[:, None] * tl.cast(scale, tl.float32), upstream)
        is_chosen = is_chosen | is_expert
    if RENORMALIZE:
        total = tl.sum(tl.where(is_chosen, score, 0.0), 1) + TINY
        mean = tl.sum(tl.where(is_chosen, upstream * score, 0.0), 1) / total
        upstream = tl.where(is_chosen, (upstream - mean[:, None]) / total[:, None], 0.0)
    if SOFTMAX:
        by_logit = score * (upstream - tl.sum(upstream * score, 1)[:, None])
    else:
        by_logit = tl.where(is_chosen, upstream * slope, 0.0)
    place = (token * experts)[:, None] + expert[None, :]
    inside = (token < tokens)[:, None] & (expert < experts)[None, :]
    tl.store(result + place, by_logit.to(result.dtype.element_ty), mask=inside)


def sort_tokens(experts: Tensor, number_of_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """The number of choices of each expert, the row of each choice, and the token of each row.

    A counting sort in two launches: deterministic, without waiting for the device.
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
        count_choices_kernel, (parts, 1, 1), experts, counts, choices, number_of_experts, per_part, _SORT_STEP, bins,
        warps=4,
    )  # fmt: skip
    launch(
        place_choices_kernel, (parts, 1, 1), experts, counts, totals, row_map, sources, choices, experts.shape[1],
        number_of_experts, per_part, parts, _SORT_STEP, bins, max(1, min(32, 8192 // bins)), warps=16,
    )  # fmt: skip
    return totals, row_map, sources


@triton.jit
def _expert_bins(experts, choice, choices, number_of_experts):
    """The expert of a choice; the next number for a dropped choice, and the one after it beyond the last choice."""
    expert = tl.load(experts + choice, mask=choice < choices, other=0)  # compared before narrowing to 32 bits
    expert = tl.where((expert >= 0) & (expert < number_of_experts), expert, number_of_experts)
    return tl.where(choice < choices, expert, number_of_experts + 1).to(tl.int32)


@triton.jit
def count_choices_kernel(experts, counts, choices, number_of_experts, per_part, STEP: tl.constexpr, BINS: tl.constexpr):
    """Counts the choices of each expert in one part."""
    part = tl.program_id(0).to(tl.int64)
    count = tl.zeros([BINS], tl.int32)
    for begin in range(0, per_part, STEP):
        count += tl.histogram(
            _expert_bins(experts, part * per_part + begin + tl.arange(0, STEP), choices, number_of_experts), BINS
        )
    tl.store(counts + part * BINS + tl.arange(0, BINS), count)


@triton.jit
def place_choices_kernel(
    experts, counts, totals, row_map, sources, choices, k, number_of_experts, per_part, parts,
    STEP: tl.constexpr, BINS: tl.constexpr, PARTS_PER_LOAD: tl.constexpr,
):  # fmt: skip
    """Assigns rows to the choices of one part, from the counts of all parts."""
    # how many choices each expert has in all parts, and in those before
    part = tl.program_id(0).to(tl.int64)
    bins = tl.arange(0, BINS)
    before = tl.zeros([BINS], tl.int32)
    total = tl.zeros([BINS], tl.int32)
    for first in range(0, parts, PARTS_PER_LOAD):
        some_part = first + tl.arange(0, PARTS_PER_LOAD)[:, None]
        count = tl.load(counts + some_part * BINS + bins[None, :], mask=some_part < parts, other=0)
        total += tl.sum(count, 0)
        before += tl.sum(tl.where(some_part < part, count, 0), 0)
    if part == 0:
        tl.store(totals + bins, total, mask=bins < number_of_experts)
    next_row = tl.cumsum(total, 0) - total + before  # (bins,)
    # rank the choices of each step among those of the same expert
    index = tl.arange(0, STEP)
    for begin in range(0, per_part, STEP):
        choice = part * per_part + begin + index
        expert = _expert_bins(experts, choice, choices, number_of_experts)
        is_earlier = (expert[None, :] == expert[:, None]) & (index[None, :] < index[:, None])
        rank = tl.sum(is_earlier.to(tl.int32), 1)
        row = tl.gather(next_row, expert, 0) + rank
        tl.store(row_map + choice, tl.where(expert == number_of_experts, ~row, row), mask=choice < choices)
        tl.store(sources + row, (choice // k).to(tl.int32), mask=choice < choices)
        next_row += tl.histogram(expert, BINS)


@dataclass(frozen=True, slots=True, kw_only=True)
class PermuteConfig:
    """Of `permute_kernel` and `unpermute_kernel`: columns and tokens of a program."""

    columns: int
    tokens: int
    warps: int


def permute_heuristic(columns: int) -> PermuteConfig:
    """Blocks of 1024 elements, which waste little of a row of 7168, and several short rows."""
    block = min(next_power_of_2(columns), 1024)
    return PermuteConfig(columns=block, tokens=max(1, 1024 // block), warps=4)


def permute_candidates(columns: int) -> list[PermuteConfig]:
    """Configurations of `permute_copy` and `unpermute_sum` worth measuring, for rows of so many columns."""
    return [
        PermuteConfig(columns=block, tokens=tokens, warps=warps)
        for block in (512, 1024, 2048, 4096, 8192)
        for tokens in (1, 2, 4)
        for warps in (2, 4, 8)
        if block < 2 * columns and 8 <= block * tokens // (32 * warps) <= 32
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenConfig:
    """Of `unpermute_backward_kernel` and `gate_backward_kernel`: columns that a program loads at once."""

    columns: int
    warps: int


def unpermute_backward_candidates(columns: int) -> list[TokenConfig]:
    """Configurations of `unpermute_backward` worth measuring."""
    return [
        TokenConfig(columns=block, warps=warps)
        for block in (1024, 2048, 4096, 8192, 16384)
        for warps in (2, 4, 8, 16)
        if block < 2 * columns and 8 <= block // (32 * warps) <= 64
    ]


def permute_rows(x: Tensor, row_map: Tensor, *, config: PermuteConfig | None = None) -> Tensor:
    """For each choice its token's row, or zeros if it is dropped. Copies `x` if its rows are not contiguous."""
    tokens, choices = row_map.shape
    columns = x.shape[1]
    rows = torch.empty(tokens * choices, columns, dtype=x.dtype, device=x.device)
    if not rows.numel():
        return rows
    x, row_map = as_rows(x), row_map.contiguous()
    config = config or from_row(tuned("permute_copy", columns, x.device), PermuteConfig) or permute_heuristic(columns)
    grid = triton.cdiv(tokens, config.tokens), triton.cdiv(columns, config.columns), 1
    launch(
        permute_kernel, grid, x, row_map, rows, tokens, columns, x.stride(0), choices, config.tokens, config.columns,
        warps=config.warps,
    )  # fmt: skip
    return rows


def unpermute_rows(
    rows: Tensor, row_map: Tensor, weights: Tensor | None, *, config: PermuteConfig | None = None
) -> Tensor:
    """The sum of each token's rows in the order of its choices, in float32. Copies rows that are not contiguous."""
    tokens, choices = row_map.shape
    columns = rows.shape[1]
    result = torch.empty(tokens, columns, dtype=rows.dtype, device=rows.device)
    if not result.numel():
        return result
    if not choices:
        return result.zero_()
    rows, row_map = as_rows(rows), row_map.contiguous()
    config = (
        config or from_row(tuned("unpermute_sum", columns, rows.device), PermuteConfig) or permute_heuristic(columns)
    )
    grid = triton.cdiv(tokens, config.tokens), triton.cdiv(columns, config.columns), 1
    launch(
        unpermute_kernel, grid, rows, row_map, None if weights is None else weights.contiguous(), result, tokens,
        columns, rows.stride(0), choices, choices <= _MOST_UNROLLED, config.tokens, config.columns,
        warps=config.warps,
    )  # fmt: skip
    return result


def unpermute_rows_backward(
    gradient: Tensor, rows: Tensor, row_map: Tensor, weights: Tensor, *, config: TokenConfig | None = None
) -> tuple[Tensor, Tensor]:
    """The gradients of rows and weights."""
    tokens, choices = row_map.shape
    columns = rows.shape[1]
    grad_rows = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
    grad_weights = torch.empty(weights.shape, dtype=weights.dtype, device=rows.device)
    if not grad_rows.numel():
        return grad_rows, grad_weights.zero_()
    gradient, rows = as_rows(gradient), as_rows(rows)
    size = next_power_of_2(columns)
    config = config or from_row(tuned("unpermute_backward", columns, rows.device), TokenConfig)
    config = config or TokenConfig(columns=min(size, 4096), warps=max(1, min(8, size // 512)))
    block = min(config.columns, size)
    launch(
        unpermute_backward_kernel, (tokens, 1, 1), gradient, rows, row_map.contiguous(), weights.contiguous(),
        grad_rows, grad_weights, columns, gradient.stride(0), rows.stride(0), choices, block, block >= columns,
        warps=config.warps,
    )  # fmt: skip
    return grad_rows, grad_weights


@triton.jit
def permute_kernel(
    x, row_map, rows, tokens, columns, stride, K: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Copies some columns of some tokens to their K rows; zeros to the rows of dropped choices."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (token < tokens)[:, None] & (column < columns)[None, :]
    values = tl.load(x + (token * stride)[:, None] + column[None, :], mask=inside)  # (tokens, columns)
    for choice in range(K):
        row = tl.load(row_map + token * K + choice, mask=token < tokens, other=0)
        target = tl.where(row < 0, ~row, row).to(tl.int64) * columns
        stored = tl.where((row < 0)[:, None], tl.zeros_like(values), values)
        tl.store(rows + target[:, None] + column[None, :], stored, mask=inside)


@triton.jit
def _add_row(total, rows, row_map, weights, token, choice, column, inside, tokens, stride, K: tl.constexpr):
    """The sum, (tokens, columns), plus the weighted rows of one choice of each token."""
    row = tl.load(row_map + token * K + choice, mask=token < tokens, other=-1)
    is_taken = inside & (row >= 0)[:, None]
    values = tl.load(rows + (row.to(tl.int64) * stride)[:, None] + column[None, :], mask=is_taken, other=0.0).to(
        tl.float32
    )
    if weights is not None:
        weight = tl.load(weights + token * K + choice, mask=(token < tokens) & (row >= 0), other=0.0)
        values = values * weight.to(tl.float32)[:, None]
        # a weight that is not finite must not reach other elements as 0 * inf
        values = tl.where(is_taken, values, 0.0)
    return total + values


@triton.jit
def unpermute_kernel(
    rows, row_map, weights, result, tokens, columns, stride,
    K: tl.constexpr, UNROLLED: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sums the K rows of some tokens, over some columns."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (token < tokens)[:, None] & (column < columns)[None, :]
    total = tl.zeros([TOKENS, COLUMNS], tl.float32)
    if UNROLLED:
        for choice in tl.static_range(K):
            total = _add_row(total, rows, row_map, weights, token, choice, column, inside, tokens, stride, K)
    else:
        for choice in range(K):
            total = _add_row(total, rows, row_map, weights, token, choice, column, inside, tokens, stride, K)
    tl.store(result + (token * columns)[:, None] + column[None, :], total.to(result.dtype.element_ty), mask=inside)


@triton.jit
def unpermute_backward_kernel(
    gradient, rows, row_map, weights, grad_rows, grad_weights, columns, gradient_stride, stride,
    K: tl.constexpr, COLUMNS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """The gradients of the K rows and weights of one token. WHOLE: its gradient fits into registers."""
    token = tl.program_id(0).to(tl.int64)
    gradient += token * gradient_stride
    column = tl.arange(0, COLUMNS)
    if WHOLE:
        token_gradient = tl.load(gradient + column, mask=column < columns, other=0.0).to(tl.float32)
    for choice in range(K):
        row = tl.load(row_map + token * K + choice)
        is_taken = row >= 0
        weight = tl.load(weights + token * K + choice).to(tl.float32)
        target = tl.where(is_taken, row, ~row).to(tl.int64)
        dot = tl.zeros([COLUMNS], tl.float32)
        for begin in range(0, columns, COLUMNS):
            inside = begin + column < columns
            if WHOLE:
                upstream = token_gradient
            else:
                upstream = tl.load(gradient + begin + column, mask=inside, other=0.0).to(tl.float32)
            values = tl.load(rows + target * stride + begin + column, mask=inside & is_taken, other=0.0).to(tl.float32)
            dot += tl.where(is_taken, values * upstream, 0.0)
            scaled = tl.where(is_taken, upstream * weight, 0.0).to(grad_rows.dtype.element_ty)
            tl.store(grad_rows + target * columns + begin + column, scaled, mask=inside)
        tl.store(grad_weights + token * K + choice, tl.sum(dot, 0).to(grad_weights.dtype.element_ty))


def moe_forward(
    x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, groups: Tensor, row_map: Tensor, sources: Tensor,
    height: int, activation: str, keep: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The results of tokens, and gate and up of their inner rows, or an empty tensor without `keep`."""
    inner, gate_and_up = multiply_gated(x, gate_up, groups, height, activation, keep, sources)
    return unpermute_rows(multiply(inner, down, groups, height, False), row_map, weights), gate_and_up


def gate_backward(
    upstream: Tensor, kept: Tensor, weights: Tensor, row_map: Tensor, activation: str,
    *, config: TokenConfig | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of gate and up, the weighted inner rows, and the gradients of the weights.

    `upstream` are the gradients of the inner rows before they are weighted, and `kept` is gate and up side by side. One
    pass over rows of the inner size; the weighted inner rows serve the gradient of the second matrices.
    """
    grad_gate_up, weighted = torch.empty_like(kept), torch.empty_like(upstream)
    grad_weights = torch.empty(weights.shape, dtype=weights.dtype, device=weights.device)
    columns = upstream.shape[1]
    if not upstream.numel():
        return grad_gate_up, weighted, grad_weights.zero_()
    block = min(next_power_of_2(columns), 512)
    config = config or TokenConfig(columns=block, warps=max(1, block // 256))
    launch(
        gate_backward_kernel, (row_map.numel(), 1, 1), upstream, kept, weights.contiguous(), row_map.contiguous(),
        grad_gate_up, weighted, grad_weights, columns, activation, common_width(columns), config.columns,
        warps=config.warps,
    )  # fmt: skip
    return grad_gate_up, weighted, grad_weights


@triton.jit
def gate_backward_kernel(
    upstream, gate_and_up, weights, row_map, grad_gate_up, weighted, grad_weights, columns,
    NAME: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One choice. The rows of dropped choices are left uninitialized."""
    columns = columns // WIDTH * WIDTH
    choice = tl.program_id(0).to(tl.int64)
    row = tl.load(row_map + choice).to(tl.int64)
    weight = tl.load(weights + choice).to(tl.float32)
    dot = tl.zeros([COLUMNS], tl.float32)
    if row >= 0:
        upstream += row * columns
        weighted += row * columns
        gate_and_up += row * 2 * columns
        grad_gate_up += row * 2 * columns
        for begin in range(0, columns, COLUMNS):
            column = begin + tl.arange(0, COLUMNS)
            inside = column < columns
            gradient = tl.load(upstream + column, mask=inside, other=0.0).to(tl.float32)
            gate = tl.load(gate_and_up + column, mask=inside, other=0.0).to(tl.float32)
            up = tl.load(gate_and_up + columns + column, mask=inside, other=0.0).to(tl.float32)
            value, slope = value_and_derivative(gate, NAME)
            inner = value * up
            dot += gradient * inner
            gradient *= weight
            tl.store(grad_gate_up + column, (gradient * up * slope).to(grad_gate_up.dtype.element_ty), mask=inside)
            tl.store(grad_gate_up + columns + column, (gradient * value).to(grad_gate_up.dtype.element_ty), mask=inside)
            tl.store(weighted + column, (inner * weight).to(weighted.dtype.element_ty), mask=inside)
    tl.store(grad_weights + choice, tl.sum(dot, 0).to(grad_weights.dtype.element_ty))
