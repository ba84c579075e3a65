"""Attention in plain torch: what the kernels compute, with all scores in memory, for any device and dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from nearpeak.kernels._runtime.philox import attention_keep_mask, keep_scale

_MINUS_INF = float("-inf")


def attention_forward(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, slopes: Tensor | None, sinks: Tensor | None,
    seed: Tensor | None, query_starts: Tensor | None, key_starts: Tensor | None, longest_query: int, longest_key: int,
    left: int, right: int, bottom_right: bool, scale: float, softcap: float, dropout: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The result and the log-sum-exp of the scores.

    Products are in the dtype of the tensors, and everything else is at least in float32, as in the kernels.
    """
    scores, _ = _scores(query, key, bias, slopes, query_starts, key_starts, left, right, bottom_right, scale, softcap)
    keys = scores.shape[-1]
    if sinks is not None:
        sink = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        if query_starts is not None:  # tokens that belong to no sequence have no sink
            number, _, _ = _sequence_of_tokens(query_starts, query.shape[2])
            sink = sink.masked_fill((number >= len(query_starts) - 1)[:, None], _MINUS_INF)
        scores = torch.cat([scores, sink], -1)
    hidden = scores == _MINUS_INF
    is_empty = hidden.all(-1, keepdim=True)
    # torch returns NaN for a row without keys, also in the backward pass: such rows get zeros, masked afterwards
    scores = scores.masked_fill(is_empty, 0.0)
    lse = torch.logsumexp(scores, -1).masked_fill(is_empty.squeeze(-1), _MINUS_INF)
    weights = torch.softmax(scores, -1).masked_fill(hidden, 0.0)[..., :keys]
    if seed is not None:
        mask = _dropout_mask(weights, seed, query_starts, key_starts, dropout)
        weights = torch.where(mask, weights * keep_scale(dropout), 0.0)
    result = weights.to(value.dtype) @ _repeat_heads(value, query)
    return result, lse.to(torch.promote_types(lse.dtype, torch.float32))


def attention_fp8_forward(
    query: Tensor, key: Tensor, value: Tensor, right: int, bottom_right: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """The same of operands that were quantized; weights are not, which the kernel rounds to 8 bits too."""
    dtype = value.dtype
    query, key, value = (_quantized_and_back(x) for x in (query, key, value))
    result, lse = attention_forward(
        query, key, value, None, None, None, None, None, None, 0, 0, -1, right, bottom_right, scale, 0.0, 0.0
    )
    return result.to(dtype), lse


def _quantized_and_back(x: Tensor) -> Tensor:
    """[batch, heads, tokens, dim] rounded to 8 bits, with one scale for each head; at least in float32."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if not x.numel():
        return wide
    scale = wide.abs().amax((2, 3), keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
    scale = torch.where(scale > 0.0, scale, 1.0)
    return (wide / scale).to(torch.float8_e4m3fn).to(wide.dtype) * scale


def attention_backward(
    gradient: Tensor, lse_gradient: Tensor | None, result: Tensor, lse: Tensor,
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, slopes: Tensor | None, sinks: Tensor | None,
    seed: Tensor | None, query_starts: Tensor | None, key_starts: Tensor | None, longest_query: int, longest_key: int,
    left: int, right: int, bottom_right: bool, scale: float, softcap: float, dropout: float,
    for_query: bool, for_keys: bool, for_bias: bool, for_sinks: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of query, key, value, bias and sinks; empty tensors for those that are not needed."""
    scores, derivative = _scores(
        query, key, bias, slopes, query_starts, key_starts, left, right, bottom_right, scale, softcap
    )
    wide = scores.dtype
    gradient = gradient.to(wide)
    weights = (scores - lse.masked_fill(lse == _MINUS_INF, 0.0)[..., None]).exp()
    delta = (gradient * result.to(wide)).sum(-1)
    if lse_gradient is not None:
        delta = delta - lse_gradient
    by_weight = gradient @ _repeat_heads(value, query).to(wide).mT
    dropped = weights
    if seed is not None:
        mask = _dropout_mask(weights, seed, query_starts, key_starts, dropout)
        dropped, by_weight = (torch.where(mask, x * keep_scale(dropout), 0.0) for x in (weights, by_weight))
    by_score = weights * (by_weight - delta[..., None])
    by_product = by_score * derivative * scale
    by_query = by_key = by_value = by_bias = by_sinks = query.new_empty(0)
    if for_query:
        by_query = to_token_major((by_product @ _repeat_heads(key, query).to(wide)).to(query.dtype))
    if for_keys:
        shape = (key.shape[1], -1)
        by_key = (by_product.mT @ query.to(wide)).unflatten(1, shape).sum(2)
        by_value = (dropped.mT @ gradient).unflatten(1, shape).sum(2)
        by_key, by_value = to_token_major(by_key.to(key.dtype)), to_token_major(by_value.to(value.dtype))
    if for_bias and bias is not None:
        by_bias = by_score.sum_to_size(bias.shape).to(bias.dtype).contiguous()
    if for_sinks and sinks is not None:
        sink_weights = torch.where(lse == _MINUS_INF, 0.0, (sinks.to(lse.dtype)[:, None] - lse).exp())
        by_sinks = -(sink_weights * delta).sum((0, 2)).to(sinks.dtype)
    return by_query, by_key, by_value, by_bias, by_sinks


def empty_token_major(like: Tensor, batches: int, heads: int, tokens: int, dim: int) -> Tensor:
    """An empty tensor [batch, heads, tokens, dim] with tokens before heads in memory."""
    return like.new_empty_strided((batches, heads, tokens, dim), (tokens * heads * dim, dim, heads * dim, 1))


def to_token_major(x: Tensor) -> Tensor:
    batches, heads, tokens, dim = x.shape
    return empty_token_major(x, batches, heads, tokens, dim).copy_(x)


def as_token_major(x: Tensor) -> Tensor:
    """The tensor itself if tokens come before heads in memory; otherwise a copy."""
    _, heads, tokens, dim = x.shape
    return x if x.stride() == (tokens * heads * dim, dim, heads * dim, 1) else to_token_major(x)


def _repeat_heads(x: Tensor, query: Tensor) -> Tensor:
    """Keys or values for each head of queries."""
    group = query.shape[1] // x.shape[1]
    return x if group == 1 else x.repeat_interleave(group, 1)


def _scores(
    query: Tensor, key: Tensor, bias: Tensor | None, slopes: Tensor | None, query_starts: Tensor | None,
    key_starts: Tensor | None, left: int, right: int, bottom_right: bool, scale: float, softcap: float,
) -> tuple[Tensor, Tensor | float]:  # fmt: skip
    """Scores, -inf for hidden keys, and their derivatives by the scaled products."""
    products = (query * scale) @ _repeat_heads(key, query).mT  # scaled first: float16 might overflow otherwise
    scores = products.to(torch.promote_types(products.dtype, torch.float32))
    derivative: Tensor | float = 1.0
    if softcap:
        capped = torch.tanh(scores / softcap)
        scores, derivative = capped * softcap, 1.0 - capped * capped
    distance, visible = _distances(query, key, query_starts, key_starts, bottom_right)
    if slopes is not None:
        scores = scores - slopes.to(scores.dtype)[..., None, None] * distance.abs()
    if bias is not None:
        scores = scores.masked_fill(~bias, _MINUS_INF) if bias.dtype == torch.bool else scores + bias.to(scores.dtype)
    if left >= 0:
        visible = visible & (distance <= left)
    if right >= 0:
        visible = visible & (distance >= -right)
    return scores.masked_fill(~visible, _MINUS_INF), derivative


def _sequence_of_tokens(starts: Tensor, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """The sequence of each token, its index there, and the length of the sequence."""
    token = torch.arange(tokens, device=starts.device)
    number = torch.searchsorted(starts[1:].to(token.dtype).contiguous(), token, right=True)
    existing = number.clamp(max=max(len(starts) - 2, 0))
    return number, token - starts[existing], (starts.diff())[existing] if len(starts) > 1 else token


def _distances(
    query: Tensor, key: Tensor, query_starts: Tensor | None, key_starts: Tensor | None, bottom_right: bool
) -> tuple[Tensor, Tensor]:
    """The distance of each key to the left of a query's diagonal, and whether both are of the same sequence."""
    queries, keys = query.shape[2], key.shape[2]
    if query_starts is None or key_starts is None:
        query_index = torch.arange(queries, device=query.device)[:, None] + (keys - queries if bottom_right else 0)
        distance = query_index - torch.arange(keys, device=query.device)
        return distance, torch.ones_like(distance, dtype=torch.bool)
    query_number, query_index, query_count = _sequence_of_tokens(query_starts, queries)
    key_number, key_index, _ = _sequence_of_tokens(key_starts, keys)
    if bottom_right and len(key_starts) > 1:
        query_index = query_index + key_starts.diff()[query_number.clamp(max=len(key_starts) - 2)] - query_count
    together = (query_number[:, None] == key_number) & (query_number < len(query_starts) - 1)[:, None]
    return query_index[:, None] - key_index, together


def _dropout_mask(
    weights: Tensor, seed: Tensor, query_starts: Tensor | None, key_starts: Tensor | None, dropout: float
) -> Tensor:
    """The weights that dropout keeps, as `dropout_mask` in the kernels."""
    batches, heads, queries, keys = weights.shape
    device = weights.device
    query_index, key_index = (torch.arange(size, device=device) for size in (queries, keys))
    sequence = torch.arange(batches, device=device)[:, None, None, None]
    if query_starts is not None and key_starts is not None:
        number, query_index, _ = _sequence_of_tokens(query_starts, queries)
        _, key_index, _ = _sequence_of_tokens(key_starts, keys)
        sequence = number[:, None]
    head = torch.arange(heads, device=device)[:, None, None]
    return attention_keep_mask(seed, sequence * heads + head, query_index[:, None], key_index, dropout)
