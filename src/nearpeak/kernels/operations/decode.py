"""`decode_attention`: the attention of a few new tokens to the keys and values that a cache holds.

Bytes moved: the keys and values of each sequence, up to its length and not up to the capacity, are read once for all
heads and new tokens that see them. Everything else is small: queries, results, and where the keys of a sequence are
shared by several programs, the sums of each in float32. No derivatives: this is for generation.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nearpeak.errors import UsageError
from nearpeak.kernels.operations.decode_many import attend_many, why_not_many
from nearpeak.kernels.operations.quantise import FLOAT8
from nearpeak.kernels.operator import Operator
from nearpeak.kernels.policy import FLOATS, cannot_run, fused, too_old

MOST_NEW = 16
_WIDEST = 256
_LONGEST = 2**31 - 2**17
_OLDEST_FLOAT8 = (8, 9)
Arguments = tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor | None, float, int, float, Tensor | None,
    float, Tensor | None, float, Tensor | None,
]  # fmt: skip
"""Those of the operator."""


def reference(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, lengths: Tensor, *, pages: Tensor | None = None,
    scale: float | None = None, window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None,
    key_scale: float | Tensor | None = None, value_scale: float | Tensor | None = None, return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    arguments = _settled(
        query, key_cache, value_cache, lengths, pages, scale, window, softcap, sinks, key_scale, value_scale
    )
    result, lse = _reference(*arguments)
    return (result, lse) if return_lse else result


def _reference(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, lengths: Tensor, pages: Tensor | None, scale: float,
    window: int, softcap: float, sinks: Tensor | None, key_scale: float, key_scales: Tensor | None,
    value_scale: float, value_scales: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """With all scores in memory, over all of the capacity."""
    batch, heads, new, _ = query.shape
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    keys, values = (in_order(cache, pages).to(wide) for cache in (key_cache, value_cache))
    key_heads, capacity = keys.shape[1:3]
    lengths = lengths.long()[:, None, None]
    at = torch.arange(capacity, device=query.device)
    exists = (at < lengths)[..., None]  # behind the end of a sequence there may be anything, also what is no number
    keys = torch.where(exists, keys * _by_head(key_scale, key_scales, wide), 0.0)
    values = torch.where(exists, values * _by_head(value_scale, value_scales, wide), 0.0)
    group = heads // key_heads
    rows = query.to(wide).reshape(batch, key_heads, group * new, query.shape[-1])
    scores = (scale * (rows @ keys.transpose(-1, -2))).reshape(batch, heads, new, capacity)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    last = (lengths - new + torch.arange(new, device=query.device)[:, None])[:, None]
    seen = at <= last
    if window >= 0:
        seen = seen & (at >= last - window)
    scores = scores.masked_fill(~seen, -math.inf)
    others = scores
    if sinks is not None:
        others = torch.cat((scores, sinks.to(wide)[:, None, None].expand(batch, heads, new, 1)), -1)
    lse = torch.logsumexp(others, -1) if others.shape[-1] else scores.new_full(scores.shape[:-1], -math.inf)
    powers = torch.exp(scores - torch.where(lse == -math.inf, 0.0, lse)[..., None])
    result = powers.reshape(batch, key_heads, group * new, capacity) @ values
    result = result.reshape(batch, heads, new, values.shape[-1]).to(query.dtype)
    return result.contiguous(), lse.contiguous()


def in_order(cache: Tensor, pages: Tensor | None) -> Tensor:
    """A cache as [batch, key_heads, capacity, dim]."""
    if pages is None:
        return cache
    bits = cache.view(torch.uint8) if cache.dtype in FLOAT8 else cache
    # entries of the table for pages that a sequence has not reached may be anything
    found = bits[pages.long().clamp(0, max(0, cache.shape[0] - 1))]
    return found.flatten(1, 2).transpose(1, 2).view(cache.dtype)


def _by_head(scale: float, scales: Tensor | None, dtype: torch.dtype) -> float | Tensor:
    return scale if scales is None else scales.to(dtype)[:, None, None]


def _settled(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, lengths: Tensor, pages: Tensor | None,
    scale: float | None, window: int | None, softcap: float | None, sinks: Tensor | None,
    key_scale: float | Tensor | None, value_scale: float | Tensor | None,
) -> Arguments:  # fmt: skip
    """The arguments of the operator; raises for what is wrong."""
    check_cache(key_cache, value_cache, lengths, pages)
    if query.dim() != 4:
        raise UsageError(f"query is [batch, heads, new, dim], and not {list(query.shape)}.")
    batch, heads, _, dim = query.shape
    key_heads = key_cache.shape[1 if pages is None else 2]
    if batch != len(lengths):
        raise UsageError(f"query is for {batch} sequences, and lengths for {len(lengths)}.")
    if dim != key_cache.shape[-1] or not dim:
        raise UsageError(f"Heads of query have {dim} numbers, and keys {key_cache.shape[-1]}; they need as many.")
    if not key_heads or heads % key_heads:
        raise UsageError(f"The {heads} heads of query are no multiple of the {key_heads} of keys.")
    if window is not None and window < 0:
        raise UsageError(f"window is the number of keys before a query's own that it sees, and not {window}.")
    if softcap is not None and softcap <= 0.0:
        raise UsageError(f"softcap is positive, or None, and not {softcap}.")
    if sinks is not None and sinks.shape != (heads,):
        raise UsageError(f"sinks are [heads], here [{heads}], and not {list(sinks.shape)}.")
    if window is not None and window >= _LONGEST:
        window = None
    return (
        query, key_cache, value_cache, lengths, pages, dim**-0.5 if scale is None else float(scale),
        -1 if window is None else window, 0.0 if softcap is None else float(softcap), sinks,
        *scale_of("key_scale", key_scale, key_heads), *scale_of("value_scale", value_scale, key_heads),
    )  # fmt: skip


def check_cache(key_cache: Tensor, value_cache: Tensor, lengths: Tensor, pages: Tensor | None) -> None:
    """Raises where these are no cache."""
    form = "[batch, key_heads, capacity, dim]" if pages is None else "[pages, page_size, key_heads, dim]"
    if key_cache.dim() != 4 or value_cache.dim() != 4 or key_cache.shape[:-1] != value_cache.shape[:-1]:
        raise UsageError(
            f"Caches are {form}, alike but for the last dimension, and not {list(key_cache.shape)} and"
            f" {list(value_cache.shape)}."
        )
    if lengths.dim() != 1 or lengths.dtype not in (torch.int32, torch.int64):
        raise UsageError(f"lengths are [batch] in int32, and not {list(lengths.shape)} in {lengths.dtype}.")
    if pages is None:
        if len(lengths) != len(key_cache):
            raise UsageError(f"The caches are for {len(key_cache)} sequences, and lengths for {len(lengths)}.")
    elif pages.dim() != 2 or len(pages) != len(lengths) or pages.dtype not in (torch.int32, torch.int64):
        raise UsageError(
            f"pages are [batch, most_pages] in int32, here [{len(lengths)}, most_pages], and not {list(pages.shape)}"
            f" in {pages.dtype}."
        )
    elif not key_cache.shape[1]:
        raise UsageError("Pages hold at least 1 token, and these none.")


def scale_of(name: str, scale: float | Tensor | None, key_heads: int) -> tuple[float, Tensor | None]:
    """A scale as a number and a tensor [key_heads], to be multiplied."""
    if not isinstance(scale, Tensor):
        return 1.0 if scale is None else float(scale), None
    if scale.dim() == 0:
        scale = scale.expand(key_heads)
    if scale.shape != (key_heads,):
        raise UsageError(f"{name} is a number, or [key_heads], here [{key_heads}], and not {list(scale.shape)}.")
    return 1.0, scale


def why_not_cache(
    key_cache: Tensor, value_cache: Tensor, lengths: Tensor, pages: Tensor | None, *others: Tensor | None
) -> str | None:
    """Why no kernel takes this cache, and other tensors beside it."""
    if key_cache.dtype != value_cache.dtype:
        return "it takes keys and values of one dtype"
    if max(key_cache.shape[-1], value_cache.shape[-1]) > _WIDEST or not value_cache.shape[-1]:
        return f"it takes heads of 1 to {_WIDEST} numbers"
    capacity = key_cache.shape[2] if pages is None else pages.shape[1] * key_cache.shape[1]
    if capacity > _LONGEST:
        return f"it takes up to {_LONGEST} tokens of a sequence"
    if torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in (key_cache, value_cache, *others)
    ):
        return "it has no derivatives, and one of these tensors requires a gradient"
    reason = cannot_run(*(other for other in others if other is not None), lengths, pages)
    reason = reason or cannot_run(key_cache, value_cache, lengths, dtypes=(*FLOATS, *FLOAT8))
    if reason is None and key_cache.dtype in FLOAT8:
        reason = too_old(key_cache.device, _OLDEST_FLOAT8)
    return reason


def _operator_why_not(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, lengths: Tensor, pages: Tensor | None, scale: float,
    window: int, softcap: float, sinks: Tensor | None, key_scale: float, key_scales: Tensor | None,
    value_scale: float, value_scales: Tensor | None,
) -> str | None:  # fmt: skip
    if query.shape[2] > MOST_NEW:
        return f"it takes up to {MOST_NEW} new tokens"
    return why_not_cache(key_cache, value_cache, lengths, pages, query, sinks, key_scales, value_scales)


def _why_not(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, lengths: Tensor, *, pages: Tensor | None = None,
    scale: float | None = None, window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None,
    key_scale: float | Tensor | None = None, value_scale: float | Tensor | None = None, return_lse: bool = False,
) -> str | None:  # fmt: skip
    arguments = _settled(
        query, key_cache, value_cache, lengths, pages, scale, window, softcap, sinks, key_scale, value_scale
    )
    if query.shape[2] <= MOST_NEW:
        return _operator_why_not(*arguments)
    others = (query, sinks, arguments[10], arguments[12])
    return why_not_cache(key_cache, value_cache, lengths, pages, *others) or why_not_many(query, key_cache)


def _fake(query: Tensor, key_cache: Tensor, value_cache: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    shape = query.shape[:-1]
    return query.new_empty(*shape, value_cache.shape[-1]), query.new_empty(
        shape, dtype=torch.float64 if query.dtype == torch.float64 else torch.float32
    )


_decode_attention = Operator(
    "decode_attention(Tensor query, Tensor key_cache, Tensor value_cache, Tensor lengths, Tensor? pages, float scale,"
    " int window, float softcap, Tensor? sinks, float key_scale, Tensor? key_scales, float value_scale,"
    " Tensor? value_scales) -> (Tensor, Tensor)",
    launch="decode:forward",
    reference=_reference,
    fake=_fake,
    why_not=_operator_why_not,
)


@fused(reference=reference, why_not=_why_not)
def decode_attention(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, lengths: Tensor, *, pages: Tensor | None = None,
    scale: float | None = None, window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None,
    key_scale: float | Tensor | None = None, value_scale: float | Tensor | None = None, return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """The attention of the last tokens of each sequence to all of its tokens, whose keys and values are in a cache.

    Rows that see no key are 0. Computed in float32; where a query has 16 bits, weights of values are rounded to 16 bits
    first, as matrix units want it: to float16 where the cache has 8 bits, and otherwise to the dtype of the query, if
    more than one query sees a head of keys. Nothing is copied, whatever the strides. The lengths are not read by the
    host, so that one CUDA graph serves all of them.

    Args:
        query: [batch, heads, new, dim], the last `new` tokens of each sequence, which see each other as in a causal
            mask. More than 16 are for `attention_packed`, before which pages are gathered up to the capacity, and a
            cache of another dtype than the query's is cast. Their result has tokens before heads in memory.
        key_cache, value_cache: [batch, key_heads, capacity, dim], or with `pages` [pages, page_size, key_heads, dim].
            heads is a multiple of key_heads, and values may be of another size than keys, both up to 256. float32,
            bfloat16 or float16, or float8 with scales.
        lengths: [batch], how many tokens of each sequence the cache holds, the new ones included; int32.
        pages: [batch, most_pages], the number of the page that holds the first `page_size` tokens of a sequence, the
            next ones, and so on; int32. Only those that the length reaches are read; these have to exist.
        scale: Multiplies the scores; 1 / sqrt(dim) by default.
        window: How many keys before its own a query sees; all by default.
        softcap: Scores become `softcap * tanh(score / softcap)`.
        sinks: [heads], a score for each head that takes its share of the softmax, and has no value.
        key_scale, value_scale: What keys and values are to be multiplied by: a number, or [key_heads].
        return_lse: Also returns the logarithms of the sums of exponentials, [batch, heads, new] in float32.
    """
    arguments = _settled(
        query, key_cache, value_cache, lengths, pages, scale, window, softcap, sinks, key_scale, value_scale
    )
    if query.shape[2] <= MOST_NEW:
        result, lse = _decode_attention(*arguments)
    else:
        keys, values = in_order(key_cache, pages), in_order(value_cache, pages)
        result, lse = attend_many(query, keys, values, lengths, *arguments[5:])
    return (result, lse) if return_lse else result
