"""`decode_attention`, `append` and `KVCache`: generation with keys and values in a cache.

`decode_attention` is the attention of a few new tokens to the cached keys and values. Memory traffic: the keys and
values of each sequence, up to its length and not up to the capacity, are read once for all heads and new tokens that
see them. Everything else is small: queries, results, and the partial sums where several programs share one sequence
(split-KV). There are no derivatives. More than 16 new tokens (prefill) run `attention_packed` over the cache: a
contiguous cache in the dtype of the query is not copied, pages are gathered first.

`append` writes new keys and values behind each sequence, rotated and cast on the way, each byte once. The host never
reads the lengths.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from nearpeak.errors import UsageError
from nearpeak.kernels._runtime.operator import Operator
from nearpeak.kernels._runtime.policy import FLOATS, cannot_run, fused, too_old
from nearpeak.kernels.attention import attention_packed
from nearpeak.kernels.quantize import FLOAT8
from nearpeak.kernels.rotary import check_arguments, rotate_reference
from nearpeak.kernels.rotary import empty_result as _empty_result

_MAX_TOKENS = 2**31 - 2**17


def _prefill_why_not(query: Tensor, keys: Tensor) -> str | None:
    """Why this does not take a query and keys, [batch, key_heads, capacity, dim], which fit each other."""
    batch, key_heads, capacity, _ = keys.shape
    if not batch * capacity * key_heads * query.shape[2]:
        return "there is nothing to attend to"
    if batch * key_heads * capacity > _MAX_TOKENS:
        return f"with many new tokens it takes up to {_MAX_TOKENS} tokens, times heads of keys, of all sequences"
    return None


def _prefill_attention(
    query: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, scale: float, window: int, softcap: float,
    sinks: Tensor | None, key_scale: float, key_scales: Tensor | None, value_scale: float, value_scales: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What `decode_attention` returns, for caches [batch, key_heads, capacity, dim] without pages."""
    batch, heads, new, dim = query.shape
    key_heads, capacity = keys.shape[1:3]
    keys, values = _cast_keys(keys, key_scales, query.dtype), values.to(query.dtype)
    apart = _sequence_stride(keys)
    if apart is None or apart != _sequence_stride(values):
        keys, values = (one.contiguous() for one in (keys, values))
        apart = key_heads * capacity
    firsts = apart * torch.arange(batch, dtype=torch.int32, device=query.device)
    ends = firsts + lengths.clamp(0, capacity).to(torch.int32)
    tokens = apart * (batch - 1) + capacity
    after = torch.full((1,), tokens, dtype=torch.int32, device=query.device)
    key_starts = torch.cat((torch.stack((firsts, ends), 1).flatten(), after))
    query_starts = (torch.arange(2 * batch + 1, dtype=torch.int32, device=query.device) + 1) // 2 * new
    result, lse = attention_packed(
        query.transpose(1, 2).reshape(batch * new, heads, dim), _as_one_sequence(keys, tokens), _as_one_sequence(values, tokens),
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


def _cast_keys(keys: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    if scales is None:
        return keys.to(dtype)
    return (keys.float() * scales.float()[:, None, None]).to(dtype)


def _sequence_stride(cache: Tensor) -> int | None:
    """How many tokens lie between the first of a sequence and the first of the next; None where that is no number."""
    batch, _, capacity, _ = cache.shape
    step = cache.stride(2)
    if batch == 1:
        return capacity
    if not step or cache.stride(0) % step or cache.stride(0) // step < capacity:
        return None
    return cache.stride(0) // step


def _as_one_sequence(cache: Tensor, tokens: int) -> Tensor:
    """The tokens of all sequences as [tokens, key_heads, dim], with others between them."""
    _, key_heads, _, dim = cache.shape
    return cache.as_strided((tokens, key_heads, dim), (cache.stride(2), cache.stride(1), cache.stride(3)))


MAX_NEW_TOKENS = 16
_MAX_HEAD_DIM = 256
_DECODE_MAX_TOKENS = 2**31 - 2**17
_MIN_FP8_CAPABILITY = (8, 9)
DecodeArguments = tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor | None, float, int, float, Tensor | None,
    float, Tensor | None, float, Tensor | None,
]  # fmt: skip
"""Those of the operator."""


def _decode_attention_reference(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, lengths: Tensor, *, pages: Tensor | None = None,
    scale: float | None = None, window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None,
    key_scale: float | Tensor | None = None, value_scale: float | Tensor | None = None, return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    arguments = _decode_arguments(
        query, key_cache, value_cache, lengths, pages, scale, window, softcap, sinks, key_scale, value_scale
    )
    result, lse = _decode_operator_reference(*arguments)
    return (result, lse) if return_lse else result


def _decode_operator_reference(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, lengths: Tensor, pages: Tensor | None, scale: float,
    window: int, softcap: float, sinks: Tensor | None, key_scale: float, key_scales: Tensor | None,
    value_scale: float, value_scales: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """With all scores in memory, over all of the capacity."""
    batch, heads, new, _ = query.shape
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    keys, values = (gather_pages(cache, pages).to(wide) for cache in (key_cache, value_cache))
    key_heads, capacity = keys.shape[1:3]
    lengths = lengths.long()[:, None, None]
    at = torch.arange(capacity, device=query.device)
    exists = (at < lengths)[..., None]  # behind the end of a sequence there may be anything, also what is no number
    keys = torch.where(exists, keys * _broadcast_scale(key_scale, key_scales, wide), 0.0)
    values = torch.where(exists, values * _broadcast_scale(value_scale, value_scales, wide), 0.0)
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


def gather_pages(cache: Tensor, pages: Tensor | None) -> Tensor:
    """A cache as [batch, key_heads, capacity, dim]."""
    if pages is None:
        return cache
    bits = cache.view(torch.uint8) if cache.dtype in FLOAT8 else cache
    # entries of the table for pages that a sequence has not reached may be anything
    found = bits[pages.long().clamp(0, max(0, cache.shape[0] - 1))]
    return found.flatten(1, 2).transpose(1, 2).view(cache.dtype)


def _broadcast_scale(scale: float, scales: Tensor | None, dtype: torch.dtype) -> float | Tensor:
    return scale if scales is None else scales.to(dtype)[:, None, None]


def _decode_arguments(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, lengths: Tensor, pages: Tensor | None,
    scale: float | None, window: int | None, softcap: float | None, sinks: Tensor | None,
    key_scale: float | Tensor | None, value_scale: float | Tensor | None,
) -> DecodeArguments:  # fmt: skip
    """The arguments of the operator; raises for what is wrong."""
    _check_cache(key_cache, value_cache, lengths, pages)
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
    if window is not None and window >= _DECODE_MAX_TOKENS:
        window = None
    return (
        query, key_cache, value_cache, lengths, pages, dim**-0.5 if scale is None else float(scale),
        -1 if window is None else window, 0.0 if softcap is None else float(softcap), sinks,
        *split_scale("key_scale", key_scale, key_heads), *split_scale("value_scale", value_scale, key_heads),
    )  # fmt: skip


def _check_cache(key_cache: Tensor, value_cache: Tensor, lengths: Tensor, pages: Tensor | None) -> None:
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


def split_scale(name: str, scale: float | Tensor | None, key_heads: int) -> tuple[float, Tensor | None]:
    """A scale as a number and a tensor [key_heads], to be multiplied."""
    if not isinstance(scale, Tensor):
        return 1.0 if scale is None else float(scale), None
    if scale.dim() == 0:
        scale = scale.expand(key_heads)
    if scale.shape != (key_heads,):
        raise UsageError(f"{name} is a number, or [key_heads], here [{key_heads}], and not {list(scale.shape)}.")
    return 1.0, scale


def _cache_why_not(
    key_cache: Tensor, value_cache: Tensor, lengths: Tensor, pages: Tensor | None, *others: Tensor | None
) -> str | None:
    """Why no kernel takes this cache, and other tensors beside it."""
    if key_cache.dtype != value_cache.dtype:
        return "it takes keys and values of one dtype"
    if max(key_cache.shape[-1], value_cache.shape[-1]) > _MAX_HEAD_DIM or not value_cache.shape[-1]:
        return f"it takes heads of 1 to {_MAX_HEAD_DIM} numbers"
    capacity = key_cache.shape[2] if pages is None else pages.shape[1] * key_cache.shape[1]
    if capacity > _DECODE_MAX_TOKENS:
        return f"it takes up to {_DECODE_MAX_TOKENS} tokens of a sequence"
    if torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in (key_cache, value_cache, *others)
    ):
        return "it has no derivatives, and one of these tensors requires a gradient"
    reason = cannot_run(*(other for other in others if other is not None), lengths, pages)
    reason = reason or cannot_run(key_cache, value_cache, lengths, dtypes=(*FLOATS, *FLOAT8))
    if reason is None and key_cache.dtype in FLOAT8:
        reason = too_old(key_cache.device, _MIN_FP8_CAPABILITY)
    return reason


def _decode_operator_why_not(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, lengths: Tensor, pages: Tensor | None, scale: float,
    window: int, softcap: float, sinks: Tensor | None, key_scale: float, key_scales: Tensor | None,
    value_scale: float, value_scales: Tensor | None,
) -> str | None:  # fmt: skip
    if query.shape[2] > MAX_NEW_TOKENS:
        return f"it takes up to {MAX_NEW_TOKENS} new tokens"
    return _cache_why_not(key_cache, value_cache, lengths, pages, query, sinks, key_scales, value_scales)


def _decode_attention_why_not(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, lengths: Tensor, *, pages: Tensor | None = None,
    scale: float | None = None, window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None,
    key_scale: float | Tensor | None = None, value_scale: float | Tensor | None = None, return_lse: bool = False,
) -> str | None:  # fmt: skip
    arguments = _decode_arguments(
        query, key_cache, value_cache, lengths, pages, scale, window, softcap, sinks, key_scale, value_scale
    )
    if query.shape[2] <= MAX_NEW_TOKENS:
        return _decode_operator_why_not(*arguments)
    others = (query, sinks, arguments[10], arguments[12])
    return _cache_why_not(key_cache, value_cache, lengths, pages, *others) or _prefill_why_not(query, key_cache)


def _fake_decode(query: Tensor, key_cache: Tensor, value_cache: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    shape = query.shape[:-1]
    return query.new_empty(*shape, value_cache.shape[-1]), query.new_empty(
        shape, dtype=torch.float64 if query.dtype == torch.float64 else torch.float32
    )


_decode_attention = Operator(
    "decode_attention(Tensor query, Tensor key_cache, Tensor value_cache, Tensor lengths, Tensor? pages, float scale,"
    " int window, float softcap, Tensor? sinks, float key_scale, Tensor? key_scales, float value_scale,"
    " Tensor? value_scales) -> (Tensor, Tensor)",
    backends={"nvidia": "decode.triton:decode_attention"},
    reference=_decode_operator_reference,
    fake=_fake_decode,
    why_not=_decode_operator_why_not,
)


@fused(reference=_decode_attention_reference, why_not=_decode_attention_why_not)
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
    arguments = _decode_arguments(
        query, key_cache, value_cache, lengths, pages, scale, window, softcap, sinks, key_scale, value_scale
    )
    if query.shape[2] <= MAX_NEW_TOKENS:
        result, lse = _decode_attention(*arguments)
    else:
        keys, values = gather_pages(key_cache, pages), gather_pages(value_cache, pages)
        result, lse = _prefill_attention(query, keys, values, lengths, *arguments[5:])
    return (result, lse) if return_lse else result


AppendArguments = tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, bool, int,
    float, Tensor | None, float, Tensor | None,
]  # fmt: skip
"""Those of the operators, without the query."""


def _append_reference(
    key_cache: Tensor, value_cache: Tensor, key: Tensor, value: Tensor, lengths: Tensor, *,
    pages: Tensor | None = None, cosines: Tensor | None = None, sines: Tensor | None = None, interleaved: bool = False,
    rotary_dim: int | None = None, key_scale: float | Tensor | None = None, value_scale: float | Tensor | None = None,
    query: Tensor | None = None,
) -> Tensor | None:  # fmt: skip
    arguments = _append_arguments(
        key_cache, value_cache, key, value, lengths, pages, cosines, sines, interleaved, rotary_dim, key_scale,
        value_scale, query,
    )  # fmt: skip
    if query is None or cosines is None:
        _append_operator_reference(*arguments)
        return query
    return _append_with_query_reference(*arguments, query)


def _append_operator_reference(
    key_cache: Tensor, value_cache: Tensor, key: Tensor, value: Tensor, lengths: Tensor, pages: Tensor | None,
    cosines: Tensor | None, sines: Tensor | None, interleaved: bool, rotary_dim: int, key_scale: float,
    key_scales: Tensor | None, value_scale: float, value_scales: Tensor | None,
) -> None:  # fmt: skip
    if cosines is not None and sines is not None:
        key = _rotate_at_lengths(key, cosines, sines, lengths, interleaved, rotary_dim)
    _write_cache(key_cache, key, lengths, pages, key_scale, key_scales)
    _write_cache(value_cache, value, lengths, pages, value_scale, value_scales)


def _append_with_query_reference(*args: object) -> Tensor:
    *rest, query = args
    lengths, _, cosines, sines, interleaved, rotary_dim = rest[4:10]
    rotated = _rotate_at_lengths(query, cosines, sines, lengths, interleaved, rotary_dim)  # type: ignore[arg-type]
    _append_operator_reference(*rest)  # type: ignore[arg-type]
    return _empty_result(query).copy_(rotated)  # type: ignore[arg-type]


def _rotate_at_lengths(
    x: Tensor, cosines: Tensor, sines: Tensor, lengths: Tensor, interleaved: bool, rotary_dim: int
) -> Tensor:  # fmt: skip
    """x rotated, not yet rounded to its dtype."""
    wide = _compute_dtype(x)
    positions = lengths.long()[:, None] + torch.arange(x.shape[2], device=x.device)
    cosines, sines = cosines.to(wide), sines.to(wide)
    return rotate_reference(x.to(wide), cosines, sines, positions, interleaved, False, True, rotary_dim)


def _compute_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _write_cache(
    cache: Tensor, x: Tensor, lengths: Tensor, pages: Tensor | None, scale: float, scales: Tensor | None
) -> None:  # fmt: skip
    batch, _, new, _ = x.shape
    capacity = cache.shape[2] if pages is None else pages.shape[1] * cache.shape[1]
    if not batch * new * capacity:
        return
    divisor = (
        torch.full((1,), scale, dtype=_compute_dtype(x), device=x.device)
        if scales is None
        else scales.to(_compute_dtype(x))
    )
    x = x.to(_compute_dtype(x)) * (1 / divisor)[:, None, None]
    if cache.dtype in FLOAT8:
        x = x.clamp(-torch.finfo(cache.dtype).max, torch.finfo(cache.dtype).max).to(cache.dtype).view(torch.uint8)
        cache = cache.view(torch.uint8)
    first = lengths.long()[:, None]
    # tokens that find no place write the last place once more, with what is or comes there anyhow
    at = (first + torch.arange(new, device=x.device)).clamp(max=capacity - 1)
    source, row = at - first, torch.arange(batch, device=x.device)[:, None]
    x = x.transpose(1, 2)[row, source.clamp(min=0)].to(cache.dtype)
    places = (row, slice(None), at)
    if pages is not None:
        size = cache.shape[1]
        places = (pages.long().gather(1, at // size), at % size)  # type: ignore[assignment]
    cache[places] = torch.where((source >= 0)[..., None, None], x, cache[places])


def _append_arguments(
    key_cache: Tensor, value_cache: Tensor, key: Tensor, value: Tensor, lengths: Tensor, pages: Tensor | None,
    cosines: Tensor | None, sines: Tensor | None, interleaved: bool, rotary_dim: int | None,
    key_scale: float | Tensor | None, value_scale: float | Tensor | None, query: Tensor | None,
) -> AppendArguments:  # fmt: skip
    """The arguments of the operators; raises for what is wrong."""
    _check_cache(key_cache, value_cache, lengths, pages)
    heads, batch = key_cache.shape[1 if pages is None else 2], len(lengths)
    for name, x, cache in (("key", key, key_cache), ("value", value, value_cache)):
        if x.dim() != 4 or (x.shape[0], x.shape[1], x.shape[3]) != (batch, heads, cache.shape[-1]):
            raise UsageError(
                f"{name} is [batch, key_heads, new, dim], for this cache [{batch}, {heads}, new, {cache.shape[-1]}],"
                f" and not {list(x.shape)}."
            )
    if key.shape[2] != value.shape[2]:
        raise UsageError(f"There are {key.shape[2]} new keys and {value.shape[2]} values; they need to be as many.")
    size = 0
    if (cosines is None) != (sines is None):
        raise UsageError("cosines and sines come together.")
    if query is not None and (query.dim() != 4 or query.shape[0] != batch or query.shape[2:] != key.shape[2:]):
        raise UsageError(f"query is [batch, heads, new, dim] for a key of {list(key.shape)}, not {list(query.shape)}.")
    if cosines is not None and sines is not None:
        if cosines.dim() != 2:
            raise UsageError(f"cosines and sines are [positions, columns], and not {list(cosines.shape)}.")
        _, size = check_arguments([key], cosines, sines, None, False, -2, rotary_dim)
    return (
        key_cache, value_cache, key, value, lengths, pages, cosines, sines, interleaved, size,
        *split_scale("key_scale", key_scale, heads), *split_scale("value_scale", value_scale, heads),
    )  # fmt: skip


def _append_operator_why_not(
    key_cache: Tensor, value_cache: Tensor, key: Tensor, value: Tensor, lengths: Tensor, pages: Tensor | None,
    cosines: Tensor | None, sines: Tensor | None, interleaved: bool, rotary_dim: int, key_scale: float,
    key_scales: Tensor | None, value_scale: float, value_scales: Tensor | None, query: Tensor | None = None,
) -> str | None:  # fmt: skip
    for cache in (key_cache, value_cache):
        if any(size > 1 and not stride for size, stride in zip(cache.shape, cache.stride(), strict=True)):
            return "it cannot write to what is many times at one address"
    if key.numel() // max(1, key.shape[-1]) > 2**31 - 2**16:
        return "it takes up to 2**31 - 2**16 heads of tokens"
    others = (key, value, cosines, sines, query, key_scales, value_scales)
    return _cache_why_not(key_cache, value_cache, lengths, pages, *others)


def _append_why_not(
    key_cache: Tensor, value_cache: Tensor, key: Tensor, value: Tensor, lengths: Tensor, *,
    pages: Tensor | None = None, cosines: Tensor | None = None, sines: Tensor | None = None, interleaved: bool = False,
    rotary_dim: int | None = None, key_scale: float | Tensor | None = None, value_scale: float | Tensor | None = None,
    query: Tensor | None = None,
) -> str | None:  # fmt: skip
    arguments = _append_arguments(
        key_cache, value_cache, key, value, lengths, pages, cosines, sines, interleaved, rotary_dim, key_scale,
        value_scale, query,
    )  # fmt: skip
    return _append_operator_why_not(*arguments, query)


_CACHE_SCHEMA = "Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor key, Tensor value, Tensor lengths, Tensor? pages"
_APPEND_SCHEMA = (
    "bool interleaved, int rotary_dim, float key_scale, Tensor? key_scales, float value_scale, Tensor? value_scales"
)
_append = Operator(
    f"append_({_CACHE_SCHEMA}, Tensor? cosines, Tensor? sines, {_APPEND_SCHEMA}) -> ()",
    backends={"nvidia": "decode.triton:append"},
    reference=_append_operator_reference,
    fake=lambda *args: None,
    why_not=_append_operator_why_not,
)
_append_with_query = Operator(
    f"append_with_query_({_CACHE_SCHEMA}, Tensor cosines, Tensor sines, {_APPEND_SCHEMA}, Tensor query) -> Tensor",
    backends={"nvidia": "decode.triton:append_with_query"},
    reference=_append_with_query_reference,
    fake=lambda *args: _empty_result(args[-1]),
    why_not=_append_operator_why_not,
)


@fused(reference=_append_reference, why_not=_append_why_not)
def append(
    key_cache: Tensor, value_cache: Tensor, key: Tensor, value: Tensor, lengths: Tensor, *,
    pages: Tensor | None = None, cosines: Tensor | None = None, sines: Tensor | None = None, interleaved: bool = False,
    rotary_dim: int | None = None, key_scale: float | Tensor | None = None, value_scale: float | Tensor | None = None,
    query: Tensor | None = None,
) -> Tensor | None:  # fmt: skip
    """Writes new keys and values behind the tokens that each sequence has, and returns the query rotated, if given.

    Token i of a sequence goes to position `lengths + i`, and is rotated by that row of cosines and sines. The lengths
    stay as they are: add the new tokens to them before `decode_attention`. Tokens beyond the capacity are dropped
    without a word, as are those whose page does not exist; `KVCache` says so before.

    Args:
        key_cache, value_cache: As of `decode_attention`, with pages or without. Written in place.
        key, value: [batch, key_heads, new, dim], any number of new tokens; cast to the dtype of the cache. Of any
            strides; copied where the last is not 1.
        lengths: [batch], how many tokens of each sequence the cache holds, without the new ones; int32.
        pages: [batch, most_pages], as of `decode_attention`.
        cosines, sines: [positions, pairs], or [positions, rotary_dim] with each angle twice. Without them nothing is
            rotated.
        interleaved, rotary_dim: As of `rotary`.
        key_scale, value_scale: What keys and values are divided by, as `decode_attention` multiplies by it.
        query: [batch, heads, new, dim], to be rotated as the keys are, in the same launch.
    """
    arguments = _append_arguments(
        key_cache, value_cache, key, value, lengths, pages, cosines, sines, interleaved, rotary_dim, key_scale,
        value_scale, query,
    )  # fmt: skip
    if query is None or cosines is None:
        _append(*arguments)
        return query
    return _append_with_query(*arguments, query)  # type: ignore[no-any-return]


class KVCache:
    """Keys and values of the tokens that a layer has seen, of several sequences.

    >>> cache = KVCache.create(batch=2, capacity=8, key_heads=1, dim=4)
    >>> key = torch.randn(2, 1, 3, 4)
    >>> cache.append(key, key)
    >>> cache.attend(torch.randn(2, 2, 3, 4)).shape, cache.lengths.tolist(), cache.fits(6)
    (torch.Size([2, 2, 3, 4]), [3, 3], False)

    The lengths are on the device and never read from there. The host counts along how many tokens were appended, at
    most: that is what says whether more fit. It does not see the replays of a CUDA graph, in which tokens without a
    place are dropped: there, the caller counts.

    Args:
        keys, values: [batch, key_heads, capacity, dim], or with `pages` [pages, page_size, key_heads, dim].
        pages: [batch, most_pages] in int32, which pages the tokens of each sequence are in.
        key_scale, value_scale: What is kept is divided by this: numbers or [key_heads]. For float8.
    """

    def __init__(
        self, keys: Tensor, values: Tensor, *, batch: int, pages: Tensor | None = None,
        key_scale: float | Tensor | None = None, value_scale: float | Tensor | None = None,
    ) -> None:  # fmt: skip
        self.keys, self.values, self.pages = keys, values, pages
        self.key_scale, self.value_scale = key_scale, value_scale
        self.capacity = keys.shape[2] if pages is None else pages.shape[1] * keys.shape[1]
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=keys.device)
        """[batch], how many tokens each sequence has."""
        # one number changes with each token, and not one for each sequence: compiled code looks at what changes
        self._longest = 0
        self._shorter = [0] * batch

    @classmethod
    def create(
        cls, batch: int, capacity: int, key_heads: int, dim: int, dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu", page_size: int | None = None, *, value_dim: int | None = None,
        key_scale: float | Tensor | None = None, value_scale: float | Tensor | None = None,
    ) -> KVCache:  # fmt: skip
        """An empty cache. With `page_size` in pages, of which each sequence has its own, one after the other.

        Other tables may be written to `pages`, so that sequences share what they begin with.
        """
        if min(batch, capacity, key_heads, dim) < 1 or (page_size is not None and page_size < 1):
            raise UsageError(
                f"A cache needs a batch, capacity, key_heads, dim and page_size of 1 or more, and these are {batch},"
                f" {capacity}, {key_heads}, {dim} and {page_size}."
            )
        sizes, pages = (dim, dim if value_dim is None else value_dim), None
        shape: tuple[int, ...] = (batch, key_heads, capacity)
        if page_size is not None:
            each = -(-capacity // page_size)
            shape = (batch * each, page_size, key_heads)
            pages = torch.arange(batch * each, dtype=torch.int32, device=device).view(batch, each)
        keys, values = (torch.empty((*shape, size), dtype=dtype, device=device) for size in sizes)
        return cls(keys, values, batch=batch, pages=pages, key_scale=key_scale, value_scale=value_scale)

    @property
    def most(self) -> list[int]:
        """How many tokens each sequence has, at most: what the host knows."""
        return [self._longest - shorter for shorter in self._shorter]

    def fits(self, new: int) -> bool:
        """Whether there is room for so many more tokens of each sequence."""
        return self._longest + new <= self.capacity

    def append(
        self, key: Tensor, value: Tensor, *, cosines: Tensor | None = None, sines: Tensor | None = None,
        interleaved: bool = False, rotary_dim: int | None = None, query: Tensor | None = None,
    ) -> Tensor | None:  # fmt: skip
        """Adds the tokens of `key` and `value`, [batch, key_heads, new, dim], to all sequences.

        With cosines and sines, keys are rotated by their positions, and the query too: it is returned. See `append` of
        this package.
        """
        new = key.shape[2] if key.dim() == 4 else 0
        if not self.fits(new):
            raise UsageError(
                f"The cache is full: it has room for {self.capacity} tokens of a sequence, up to"
                f" {self._longest} are there, and {new} are to come. Create it with more capacity, or reset() or"
                " truncate() it."
            )
        rotated = append(
            self.keys, self.values, key, value, self.lengths, pages=self.pages, cosines=cosines, sines=sines,
            interleaved=interleaved, rotary_dim=rotary_dim, key_scale=self.key_scale, value_scale=self.value_scale,
            query=query,
        )  # fmt: skip
        self.lengths.add_(new)
        self._longest += new
        return rotated

    def attend(
        self, query: Tensor, *, scale: float | None = None, window: int | None = None, softcap: float | None = None,
        sinks: Tensor | None = None, return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        """The attention of the tokens that were appended last to all tokens: `decode_attention` with this cache."""
        return decode_attention(
            query, self.keys, self.values, self.lengths, pages=self.pages, scale=scale, window=window, softcap=softcap,
            sinks=sinks, key_scale=self.key_scale, value_scale=self.value_scale, return_lse=return_lse,
        )  # fmt: skip

    def truncate(self, lengths: Tensor | Sequence[int]) -> None:
        """Keeps at most so many tokens of each sequence: after prompts with padding, or tokens that were rejected.

        Of a tensor on a GPU the host learns nothing, so that `fits` stays as it was.
        """
        if len(lengths) != len(self._shorter):
            raise UsageError(f"There are {len(self._shorter)} sequences, and lengths for {len(lengths)}.")
        if not isinstance(lengths, Tensor):
            self._count([min(most, length) for most, length in zip(self.most, lengths, strict=True)])
            lengths = torch.tensor(lengths, dtype=torch.int32)
        torch.minimum(self.lengths, lengths.to(self.lengths), out=self.lengths)

    def reset(self, sequences: Sequence[int] | None = None) -> None:
        """Empties the cache, or these sequences of it, by their numbers."""
        chosen = range(len(self._shorter)) if sequences is None else sequences
        self._count([0 if number in chosen else most for number, most in enumerate(self.most)])
        if sequences is None:
            self.lengths.zero_()
        else:
            self.lengths[torch.tensor(sequences, dtype=torch.int64, device=self.lengths.device)] = 0

    def _count(self, most: list[int]) -> None:
        """From now on sequences have at most so many tokens."""
        self._longest = max(most)
        self._shorter = [self._longest - one for one in most]
