"""`attend_many`: more new tokens than the kernel of `decode_attention` takes, by `attention_packed` over the cache.

A cache in one piece, of the dtype of the query, is not copied: its sequences are seen as one row of tokens, in which
what lies behind the end of a sequence is a sequence of its own that nobody asks for. Pages are gathered first, up to
the capacity, and numbers of another dtype are cast.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nearpeak.kernels.operations.attention import attention_packed

_MOST_TOKENS = 2**31 - 2**17


def why_not_many(query: Tensor, keys: Tensor) -> str | None:
    """Why this does not take a query and keys, [batch, key_heads, capacity, dim], which fit each other."""
    batch, key_heads, capacity, _ = keys.shape
    if not batch * capacity * key_heads * query.shape[2]:
        return "there is nothing to attend to"
    if batch * key_heads * capacity > _MOST_TOKENS:
        return f"with many new tokens it takes up to {_MOST_TOKENS} tokens, times heads of keys, of all sequences"
    return None


def attend_many(
    query: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, scale: float, window: int, softcap: float,
    sinks: Tensor | None, key_scale: float, key_scales: Tensor | None, value_scale: float, value_scales: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What `decode_attention` returns, for caches [batch, key_heads, capacity, dim] without pages."""
    batch, heads, new, dim = query.shape
    key_heads, capacity = keys.shape[1:3]
    keys, values = _cast(keys, key_scales, query.dtype), values.to(query.dtype)
    apart = _apart(keys)
    if apart is None or apart != _apart(values):
        keys, values = (one.contiguous() for one in (keys, values))
        apart = key_heads * capacity
    firsts = apart * torch.arange(batch, dtype=torch.int32, device=query.device)
    ends = firsts + lengths.clamp(0, capacity).to(torch.int32)
    tokens = apart * (batch - 1) + capacity
    after = torch.full((1,), tokens, dtype=torch.int32, device=query.device)
    key_starts = torch.cat((torch.stack((firsts, ends), 1).flatten(), after))
    query_starts = (torch.arange(2 * batch + 1, dtype=torch.int32, device=query.device) + 1) // 2 * new
    result, lse = attention_packed(
        query.transpose(1, 2).reshape(batch * new, heads, dim), _row(keys, tokens), _row(values, tokens),
        query_starts, key_starts, new, capacity, causal=True, window=None if window < 0 else (window, None),
        scale=scale * key_scale, softcap=softcap or None, sinks=sinks, return_lse=True,
    )  # fmt: skip
    if value_scales is not None:
        by_head = value_scale * value_scales.float().repeat_interleave(heads // key_heads)
        result = (result * by_head[:, None]).to(query.dtype)
    elif value_scale != 1.0:
        result = result * value_scale
    result = result.unflatten(0, (batch, new)).transpose(1, 2)
    return result, lse.unflatten(1, (batch, new)).transpose(0, 1)


def _cast(keys: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    if scales is None:
        return keys.to(dtype)
    return (keys.float() * scales.float()[:, None, None]).to(dtype)


def _apart(cache: Tensor) -> int | None:
    """How many tokens lie between the first of a sequence and the first of the next; None where that is no number."""
    batch, _, capacity, _ = cache.shape
    step = cache.stride(2)
    if batch == 1:
        return capacity
    if not step or cache.stride(0) % step or cache.stride(0) // step < capacity:
        return None
    return cache.stride(0) // step


def _row(cache: Tensor, tokens: int) -> Tensor:
    """The tokens of all sequences as [tokens, key_heads, dim], with others between them."""
    _, key_heads, _, dim = cache.shape
    return cache.as_strided((tokens, key_heads, dim), (cache.stride(2), cache.stride(1), cache.stride(3)))
