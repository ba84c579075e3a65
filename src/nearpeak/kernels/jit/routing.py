"""The kernels of `route`. A program has some tokens with the scores of all experts in registers.

The best expert is found k times. A score and the number of its expert are one number of 64 bits, of which the largest
is the best score, and of equal ones the first: one reduction for each choice.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearpeak.kernels.configs import tuned
from nearpeak.kernels.jit.activations import sigmoid_and_slope
from nearpeak.kernels.jit.launch import launch, next_power_of_2

NOBODY = tl.constexpr(-(2**63))
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
    K: tl.constexpr, SOFTMAX: tl.constexpr, RENORMALISE: tl.constexpr,
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
    key = tl.where((expert < experts)[None, :], key, NOBODY)
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
        key = tl.where(taken, NOBODY, key)
    if RENORMALISE:
        found = found / (tl.sum(found, 1) + TINY)[:, None]
    at = (token * K)[:, None] + choice[None, :]
    inside = (token < tokens)[:, None] & (choice < K)[None, :]
    tl.store(weights + at, found * tl.cast(scale, tl.float32), mask=inside)
    tl.store(chosen + at, numbers, mask=inside)


@triton.jit
def route_backward_kernel(
    gradient, logits, chosen, result, tokens, experts, stride, gradient_stride, gradient_step, scale,
    K: tl.constexpr, SOFTMAX: tl.constexpr, RENORMALISE: tl.constexpr, TOKENS: tl.constexpr, EXPERTS: tl.constexpr,
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
    if RENORMALISE:
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


def forward(
    logits: Tensor, bias: Tensor | None, k: int, scores: str, renormalise: bool, scale: float,
    *, config: dict[str, Any] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Weights and experts of each token. Copies logits whose rows have holes."""
    tokens, experts = logits.shape
    weights = torch.empty((tokens, k), dtype=torch.float32, device=logits.device)
    chosen = torch.empty((tokens, k), dtype=torch.int32, device=logits.device)
    if not tokens:
        return weights, chosen
    logits = _without_holes(logits)
    config = config or tuned("route", experts, logits.device) or heuristic(experts)
    launch(
        route_kernel, (triton.cdiv(tokens, config["tokens"]), 1, 1), logits,
        None if bias is None else bias.contiguous(), weights, chosen, tokens, experts, logits.stride(0), scale,
        k, scores == "softmax", renormalise, config["tokens"], next_power_of_2(experts), next_power_of_2(k),
        warps=config["warps"],
    )  # fmt: skip
    return weights, chosen


def backward(
    gradient: Tensor, logits: Tensor, experts: Tensor, scores: str, renormalise: bool, scale: float,
    *, config: dict[str, Any] | None = None,
) -> Tensor:  # fmt: skip
    """The gradient of the logits, contiguous. Copies logits whose rows have holes."""
    tokens, number = logits.shape
    result = torch.empty((tokens, number), dtype=logits.dtype, device=logits.device)
    if not tokens:
        return result
    logits = _without_holes(logits)
    config = config or tuned("route_backward", number, logits.device) or heuristic(number)
    launch(
        route_backward_kernel, (triton.cdiv(tokens, config["tokens"]), 1, 1), gradient, logits, experts.contiguous(),
        result, tokens, number, logits.stride(0), *gradient.stride(), scale, experts.shape[1], scores == "softmax",
        renormalise, config["tokens"], next_power_of_2(number), warps=config["warps"],
    )  # fmt: skip
    return result


def _without_holes(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def heuristic(experts: int) -> dict[str, Any]:
    """About 8 scores of each thread, and rows within a warp, where reductions need no shared memory."""
    block = next_power_of_2(experts)
    return {"tokens": max(1, 1024 // block), "warps": max(4, min(16, block // 256))}


def candidates(experts: int) -> list[dict[str, Any]]:
    """What is worth measuring of `route` and `route_backward`."""
    block = next_power_of_2(experts)
    return [
        {"tokens": tokens, "warps": warps}
        for tokens in (1, 2, 4, 8, 16, 32)
        for warps in (1, 2, 4, 8, 16)
        if 4 <= block * tokens // (32 * warps) <= 16
    ]
