"""Decode attention and cache append in plain torch, with the arguments of their operators."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from nearpeak.kernels.quantize import FLOAT8
from nearpeak.kernels.rotary import empty_result, rotate_reference


def decode_attention(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, lengths: Tensor, pages: Tensor | None, scale: float,
    window: int, softcap: float, sinks: Tensor | None, key_scale: float, key_scales: Tensor | None,
    value_scale: float, value_scales: Tensor | None, shared: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The result and the log-sum-exp, with all scores in memory, over the whole capacity.

    That values are columns of keys, `shared`, makes no difference here.
    """
    batch, heads, new, _ = query.shape
    wide = _compute_dtype(query)
    keys, values = (gather_pages(cache, pages).to(wide) for cache in (key_cache, value_cache))
    key_heads, capacity = keys.shape[1:3]
    group = heads // key_heads
    lengths = lengths.long()[:, None, None]
    key_index = torch.arange(capacity, device=query.device)
    exists = (key_index < lengths)[..., None]  # memory behind the end of a sequence is arbitrary, and may hold NaN
    keys = torch.where(exists, keys * _broadcast_scale(key_scale, key_scales, wide), 0.0)
    values = torch.where(exists, values * _broadcast_scale(value_scale, value_scales, wide), 0.0)
    rows = query.to(wide).reshape(batch, key_heads, group * new, query.shape[-1])
    scores = (scale * (rows @ keys.transpose(-1, -2))).reshape(batch, heads, new, capacity)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    last = (lengths - new + torch.arange(new, device=query.device)[:, None])[:, None]
    visible = key_index <= last
    if window >= 0:
        visible = visible & (key_index >= last - window)
    scores = scores.masked_fill(~visible, -math.inf)
    with_sinks = scores
    if sinks is not None:
        with_sinks = torch.cat((scores, sinks.to(wide)[:, None, None].expand(batch, heads, new, 1)), -1)
    lse = scores.new_full(scores.shape[:-1], -math.inf)
    if with_sinks.shape[-1]:
        lse = torch.logsumexp(with_sinks, -1)
    weights = torch.exp(scores - torch.where(lse == -math.inf, 0.0, lse)[..., None])
    result = weights.reshape(batch, key_heads, group * new, capacity) @ values
    result = result.reshape(batch, heads, new, values.shape[-1]).to(query.dtype)
    return result.contiguous(), lse.contiguous()


def gather_pages(cache: Tensor, pages: Tensor | None) -> Tensor:
    """A cache as [batch, key_heads, capacity, dim]."""
    if pages is None:
        return cache
    bits = cache.view(torch.uint8) if cache.dtype in FLOAT8 else cache
    # table entries of pages that a sequence has not reached are arbitrary
    gathered = bits[pages.long().clamp(0, max(0, cache.shape[0] - 1))]
    return gathered.flatten(1, 2).transpose(1, 2).view(cache.dtype)


def append(
    key_cache: Tensor, value_cache: Tensor, key: Tensor, value: Tensor, lengths: Tensor, pages: Tensor | None,
    cosines: Tensor | None, sines: Tensor | None, interleaved: bool, rotary_dim: int, key_scale: float,
    key_scales: Tensor | None, value_scale: float, value_scales: Tensor | None,
) -> None:  # fmt: skip
    """Writes keys and values to the caches."""
    if cosines is not None and sines is not None:
        key = _rotate_at_lengths(key, cosines, sines, lengths, interleaved, rotary_dim)
    _write_cache(key_cache, key, lengths, pages, key_scale, key_scales)
    _write_cache(value_cache, value, lengths, pages, value_scale, value_scales)


def append_with_query(*arguments: Any) -> Tensor:
    """Writes keys and values to the caches, and returns the rotated query."""
    *rest, query = arguments
    lengths, _, cosines, sines, interleaved, rotary_dim = rest[4:10]
    rotated = _rotate_at_lengths(query, cosines, sines, lengths, interleaved, rotary_dim)
    append(*rest)
    return empty_result(query).copy_(rotated)


def _rotate_at_lengths(
    x: Tensor, cosines: Tensor, sines: Tensor, lengths: Tensor, interleaved: bool, rotary_dim: int
) -> Tensor:  # fmt: skip
    """x rotated, not yet rounded to its dtype."""
    wide = _compute_dtype(x)
    positions = lengths.long()[:, None] + torch.arange(x.shape[2], device=x.device)
    return rotate_reference(
        x.to(wide), cosines.to(wide), sines.to(wide), positions, interleaved, False, True, rotary_dim
    )


def _write_cache(
    cache: Tensor, x: Tensor, lengths: Tensor, pages: Tensor | None, scale: float, scales: Tensor | None
) -> None:  # fmt: skip
    batch, _, new, _ = x.shape
    capacity = cache.shape[2] if pages is None else pages.shape[1] * cache.shape[1]
    if not batch * new * capacity:
        return
    wide = _compute_dtype(x)
    divisor = torch.full((1,), scale, dtype=wide, device=x.device) if scales is None else scales.to(wide)
    x = x.to(wide) * (1 / divisor)[:, None, None]
    if cache.dtype in FLOAT8:
        largest = torch.finfo(cache.dtype).max
        x = x.clamp(-largest, largest).to(cache.dtype).view(torch.uint8)
        cache = cache.view(torch.uint8)
    first = lengths.long()[:, None]
    # tokens beyond the capacity write to the last position, the value that it has or gets anyway
    position = (first + torch.arange(new, device=x.device)).clamp(max=capacity - 1)
    source, row = position - first, torch.arange(batch, device=x.device)[:, None]
    x = x.transpose(1, 2)[row, source.clamp(min=0)].to(cache.dtype)
    places = (row, slice(None), position)
    if pages is not None:
        size = cache.shape[1]
        places = (pages.long().gather(1, position // size), position % size)  # type: ignore[assignment]
    cache[places] = torch.where((source >= 0)[..., None, None], x, cache[places])


def _broadcast_scale(scale: float, scales: Tensor | None, dtype: torch.dtype) -> float | Tensor:
    return scale if scales is None else scales.to(dtype)[:, None, None]


def _compute_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
