"""`decode_attention`, `append` and `KVCache`: generation with keys and values in a cache.

`decode_attention` is the attention of a few new tokens to the cached keys and values. Memory traffic: the keys and
values of each sequence, up to its length and not up to the capacity, are read once for all heads and new tokens that
see them. Everything else is small: queries, results, and the partial results if several programs share one sequence
(split-KV). There are no derivatives. More than 16 new tokens (prefill) run `attention_packed` over the cache: a
contiguous cache in the dtype of the query is not copied, pages are gathered first.

`append` writes new keys and values behind each sequence, rotated and cast on the way. Memory traffic: they are read
once and written once. The host never reads the lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nearpeak.errors import UsageError
from nearpeak.kernels._runtime.operator import Operator
from nearpeak.kernels._runtime.policy import FLOATS, cannot_run, fused, too_old
from nearpeak.kernels.attention import attention_packed
from nearpeak.kernels.decode import reference
from nearpeak.kernels.quantize import FLOAT8
from nearpeak.kernels.rotary import check_arguments, empty_result

MAX_NEW_TOKENS = 16
"""More new tokens are a prefill."""
_MAX_HEAD_DIM = 256
_MAX_SHARED_VALUE_DIM, _MAX_REST_DIM = 512, 128
"""Of values that are the first columns of keys, and of the columns of keys that are no values."""
_NARROW_BYTES = 2
_MAX_TOKENS = 2**31 - 2**17
_MIN_FP8_CAPABILITY = (8, 9)
DecodeArguments = tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor | None, float, int, float, Tensor | None,
    float, Tensor | None, float, Tensor | None, bool,
]  # fmt: skip
"""The arguments of the operator of `decode_attention`."""
AppendArguments = tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, bool, int,
    float, Tensor | None, float, Tensor | None,
]  # fmt: skip
"""The arguments of the operators of `append`, without the query."""


def _check_cache(key_cache: Tensor, value_cache: Tensor, lengths: Tensor, pages: Tensor | None) -> None:
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
        raise UsageError("Pages have at least 1 token, and these have none.")


def _split_scale(name: str, scale: float | Tensor | None, key_heads: int) -> tuple[float, Tensor | None]:
    """A scale as the product of a number and a tensor [key_heads]."""
    if not isinstance(scale, Tensor):
        return 1.0 if scale is None else float(scale), None
    if scale.dim() == 0:
        scale = scale.expand(key_heads)
    if scale.shape != (key_heads,):
        raise UsageError(f"{name} is a number, or [key_heads], here [{key_heads}], and not {list(scale.shape)}.")
    return 1.0, scale


def _cache_why_not(
    key_cache: Tensor, value_cache: Tensor, lengths: Tensor, pages: Tensor | None, *others: Tensor | None,
    shared: bool = False,
) -> str | None:  # fmt: skip
    """Why the kernels do not support a cache, and other tensors beside it."""
    if key_cache.dtype != value_cache.dtype:
        return "it takes keys and values of one dtype"
    if shared:
        rest = key_cache.shape[-1] - value_cache.shape[-1]
        if not value_cache.shape[-1] or value_cache.shape[-1] > _MAX_SHARED_VALUE_DIM or rest > _MAX_REST_DIM:
            return (
                f"it takes values that are up to {_MAX_SHARED_VALUE_DIM} columns of keys, which have up to"
                f" {_MAX_REST_DIM} more"
            )
    elif max(key_cache.shape[-1], value_cache.shape[-1]) > _MAX_HEAD_DIM or not value_cache.shape[-1]:
        return f"it takes heads of 1 to {_MAX_HEAD_DIM} dimensions"
    capacity = key_cache.shape[2] if pages is None else pages.shape[1] * key_cache.shape[1]
    if capacity > _MAX_TOKENS:
        return f"it takes up to {_MAX_TOKENS} tokens of a sequence"
    if torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in (key_cache, value_cache, *others)
    ):
        return "it has no derivatives, and one of these tensors requires a gradient"
    reason = cannot_run(*(other for other in others if other is not None), lengths, pages)
    reason = reason or cannot_run(key_cache, value_cache, lengths, dtypes=(*FLOATS, *FLOAT8))
    if reason is None and key_cache.dtype in FLOAT8:
        reason = too_old(key_cache.device, _MIN_FP8_CAPABILITY)
    return reason


def _decode_arguments(
    query: Tensor, key_cache: Tensor, value_cache: Tensor | int, lengths: Tensor, *, pages: Tensor | None = None,
    scale: float | None = None, window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None,
    key_scale: float | Tensor | None = None, value_scale: float | Tensor | None = None,
) -> DecodeArguments:  # fmt: skip
    """Checks the arguments of `decode_attention`, and returns those of its operator."""
    shared = isinstance(value_cache, int)
    if isinstance(value_cache, int):
        if not 0 < value_cache < key_cache.shape[-1]:
            raise UsageError(
                f"Values are so many of the first columns of keys, fewer than all {key_cache.shape[-1]}, and not"
                f" {value_cache}."
            )
        if value_scale is not None:
            raise UsageError("Values that are columns of keys have the scale of keys, and no value_scale.")
        value_cache, value_scale = key_cache[..., :value_cache], key_scale
    _check_cache(key_cache, value_cache, lengths, pages)
    if query.dim() != 4:
        raise UsageError(f"query is [batch, heads, new, dim], and not {list(query.shape)}.")
    batch, heads, _, dim = query.shape
    key_heads = key_cache.shape[1 if pages is None else 2]
    if batch != len(lengths):
        raise UsageError(f"query is for {batch} sequences, and lengths for {len(lengths)}.")
    if dim != key_cache.shape[-1] or not dim:
        raise UsageError(f"Heads of query have {dim} dimensions, and keys {key_cache.shape[-1]}; they must be equal.")
    if not key_heads or heads % key_heads:
        raise UsageError(f"The {heads} heads of query are no multiple of the {key_heads} of keys.")
    if window is not None and window < 0:
        raise UsageError(f"window is the number of keys before its own that a query sees, and not {window}.")
    if softcap is not None and softcap <= 0.0:
        raise UsageError(f"softcap is positive, or None, and not {softcap}.")
    if sinks is not None and sinks.shape != (heads,):
        raise UsageError(f"sinks are [heads], here [{heads}], and not {list(sinks.shape)}.")
    if window is not None and window >= _MAX_TOKENS:
        window = None
    return (
        query, key_cache, value_cache, lengths, pages, dim**-0.5 if scale is None else float(scale),
        -1 if window is None else window, 0.0 if softcap is None else float(softcap), sinks,
        *_split_scale("key_scale", key_scale, key_heads), *_split_scale("value_scale", value_scale, key_heads), shared,
    )  # fmt: skip


def _decode_attention_reference(*args: Any, return_lse: bool = False, **options: Any) -> Any:
    result, lse = reference.decode_attention(*_decode_arguments(*args, **options))
    return (result, lse) if return_lse else result


def _decode_attention_why_not(*args: Any, return_lse: bool = False, **options: Any) -> str | None:
    arguments = _decode_arguments(*args, **options)
    query, key_cache, value_cache, lengths, pages, _, _, _, sinks, _, key_scales, _, value_scales, _ = arguments
    if query.shape[2] <= MAX_NEW_TOKENS:
        return _decode_operator_why_not(*arguments)
    reason = _cache_why_not(key_cache, value_cache, lengths, pages, query, sinks, key_scales, value_scales)
    return reason or _prefill_why_not(query, key_cache)


def _decode_operator_why_not(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, lengths: Tensor, pages: Tensor | None, scale: float,
    window: int, softcap: float, sinks: Tensor | None, key_scale: float, key_scales: Tensor | None,
    value_scale: float, value_scales: Tensor | None, shared: bool = False,
) -> str | None:  # fmt: skip
    if query.shape[2] > MAX_NEW_TOKENS:
        return f"it takes up to {MAX_NEW_TOKENS} new tokens"
    if shared and (query.element_size() != _NARROW_BYTES or key_cache.dtype not in (query.dtype, *FLOAT8)):
        return "it takes queries of 16 bits if values are columns of keys, which have the same dtype or are float8"
    others = (query, sinks, key_scales, value_scales)
    return _cache_why_not(key_cache, value_cache, lengths, pages, *others, shared=shared)


def _fake_decode(query: Tensor, key_cache: Tensor, value_cache: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    lse_dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    return query.new_empty(*query.shape[:-1], value_cache.shape[-1]), query.new_empty(query.shape[:-1], dtype=lse_dtype)


_decode_attention = Operator(
    "decode_attention(Tensor query, Tensor key_cache, Tensor value_cache, Tensor lengths, Tensor? pages, float scale,"
    " int window, float softcap, Tensor? sinks, float key_scale, Tensor? key_scales, float value_scale,"
    " Tensor? value_scales, bool shared=False) -> (Tensor, Tensor)",
    backends={"nvidia": "decode.triton:decode_attention"},
    reference=reference.decode_attention,
    fake=_fake_decode,
    why_not=_decode_operator_why_not,
)


@fused(reference=_decode_attention_reference, why_not=_decode_attention_why_not)
def decode_attention(
    query: Tensor, key_cache: Tensor, value_cache: Tensor | int, lengths: Tensor, *, pages: Tensor | None = None,
    scale: float | None = None, window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None,
    key_scale: float | Tensor | None = None, value_scale: float | Tensor | None = None, return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """The attention of the last tokens of each sequence to all of its tokens, with keys and values in a cache.

    Rows that see no key are 0. Sums are in float32. If the query has 16 bits, weights are rounded to 16 bits for the
    tensor cores: to float16 if the cache is float8, and otherwise to the dtype of the query if more than one query sees
    a head of keys. Nothing is copied, whatever the strides. The host does not read the lengths, so that one CUDA graph
    serves all lengths.

    Args:
        query: [batch, heads, new, dim], the last `new` tokens of each sequence, with a causal mask among them. More
            than 16 run `attention_packed`: pages are gathered up to the capacity first, and a cache of another dtype
            than the query is cast. Then the result is token-major in memory.
        key_cache, value_cache: [batch, key_heads, capacity, dim], or with `pages` [pages, page_size, key_heads, dim].
            heads is a multiple of key_heads. Values may have another dim than keys; both are up to 256. float32,
            bfloat16 or float16, or float8 with scales. A number in place of the values: these are so many of the first
            columns of keys, up to 512, which are read once, as in multi-head latent attention (576 and 512).
        lengths: [batch], the number of tokens of each sequence in the cache, including the new ones; int32.
        pages: [batch, most_pages], the page table: the page of the first `page_size` tokens of a sequence, of the next
            ones, and so on; int32. Only entries within the length are read, and their pages must exist.
        scale: Multiplies the scores; 1 / sqrt(dim) by default.
        window: The number of keys before its own that a query sees; all by default.
        softcap: Scores become `softcap * tanh(score / softcap)`.
        sinks: [heads], the score of one more key per head, without a value.
        key_scale, value_scale: Factors of keys and values: a number, or [key_heads].
        return_lse: Also returns the log-sum-exp of the scores, [batch, heads, new] in float32.
    """
    arguments = _decode_arguments(
        query, key_cache, value_cache, lengths, pages=pages, scale=scale, window=window, softcap=softcap, sinks=sinks,
        key_scale=key_scale, value_scale=value_scale,
    )  # fmt: skip
    if query.shape[2] <= MAX_NEW_TOKENS:
        result, lse = _decode_attention(*arguments)
    else:
        keys, values = (reference.gather_pages(cache, pages) for cache in arguments[1:3])
        result, lse = _prefill_attention(query, keys, values, lengths, *arguments[5:-1])
    return (result, lse) if return_lse else result


def _prefill_why_not(query: Tensor, keys: Tensor) -> str | None:
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
    """`attention_packed` over caches [batch, key_heads, capacity, dim].

    A cache in one piece is not copied: its sequences are packed sequences, and what lies behind the end of each is a
    packed sequence without queries.
    """
    batch, heads, new, dim = query.shape
    key_heads, capacity = keys.shape[1:3]
    values = values.to(query.dtype)
    if key_scales is None:
        keys = keys.to(query.dtype)
    else:
        keys = (keys.float() * key_scales.float()[:, None, None]).to(query.dtype)
    stride = _sequence_stride(keys)
    if stride is None or stride != _sequence_stride(values):
        keys, values = keys.contiguous(), values.contiguous()
        stride = key_heads * capacity
    firsts = stride * torch.arange(batch, dtype=torch.int32, device=query.device)
    ends = firsts + lengths.clamp(0, capacity).to(torch.int32)
    tokens = stride * (batch - 1) + capacity
    end = torch.full((1,), tokens, dtype=torch.int32, device=query.device)
    key_starts = torch.cat((torch.stack((firsts, ends), 1).flatten(), end))
    query_starts = (torch.arange(2 * batch + 1, dtype=torch.int32, device=query.device) + 1) // 2 * new
    keys, values = (
        cache.as_strided((tokens, key_heads, cache.shape[3]), (cache.stride(2), cache.stride(1), cache.stride(3)))
        for cache in (keys, values)
    )
    result, lse = attention_packed(
        query.transpose(1, 2).reshape(batch * new, heads, dim), keys, values, query_starts, key_starts, new, capacity,
        causal=True, window=None if window < 0 else (window, None), scale=scale * key_scale, softcap=softcap or None,
        sinks=sinks, return_lse=True,
    )  # fmt: skip
    if value_scales is not None:
        by_head = value_scale * value_scales.float().repeat_interleave(heads // key_heads)
        result = (result * by_head[:, None]).to(query.dtype)
    elif value_scale != 1.0:
        result = result * value_scale
    result = result.unflatten(0, (batch, new)).transpose(1, 2)
    return result, lse.unflatten(1, (batch, new)).transpose(0, 1)


def _sequence_stride(cache: Tensor) -> int | None:
    """The number of tokens from the start of a sequence to the start of the next; None if it is not an integer."""
    batch, _, capacity, _ = cache.shape
    step = cache.stride(2)
    if batch == 1:
        return capacity
    if not step or cache.stride(0) % step or cache.stride(0) // step < capacity:
        return None
    return cache.stride(0) // step


def _append_arguments(
    key_cache: Tensor, value_cache: Tensor, key: Tensor, value: Tensor, lengths: Tensor, *,
    pages: Tensor | None = None, cosines: Tensor | None = None, sines: Tensor | None = None, interleaved: bool = False,
    rotary_dim: int | None = None, key_scale: float | Tensor | None = None, value_scale: float | Tensor | None = None,
    query: Tensor | None = None,
) -> AppendArguments:  # fmt: skip
    """Checks the arguments of `append`, and returns those of its operators."""
    _check_cache(key_cache, value_cache, lengths, pages)
    heads, batch = key_cache.shape[1 if pages is None else 2], len(lengths)
    for name, x, cache in (("key", key, key_cache), ("value", value, value_cache)):
        if x.dim() != 4 or (x.shape[0], x.shape[1], x.shape[3]) != (batch, heads, cache.shape[-1]):
            raise UsageError(
                f"{name} is [batch, key_heads, new, dim], for this cache [{batch}, {heads}, new, {cache.shape[-1]}],"
                f" and not {list(x.shape)}."
            )
    if key.shape[2] != value.shape[2]:
        raise UsageError(f"There are {key.shape[2]} new keys and {value.shape[2]} values; there must be as many.")
    size = 0
    if (cosines is None) != (sines is None):
        raise UsageError("cosines and sines must be given together.")
    if query is not None and (query.dim() != 4 or query.shape[0] != batch or query.shape[2:] != key.shape[2:]):
        raise UsageError(f"query is [batch, heads, new, dim] for a key of {list(key.shape)}, not {list(query.shape)}.")
    if cosines is not None and sines is not None:
        if cosines.dim() != 2:
            raise UsageError(f"cosines and sines are [positions, columns], and not {list(cosines.shape)}.")
        _, size = check_arguments([key], cosines, sines, None, False, -2, rotary_dim)
    return (
        key_cache, value_cache, key, value, lengths, pages, cosines, sines, interleaved, size,
        *_split_scale("key_scale", key_scale, heads), *_split_scale("value_scale", value_scale, heads),
    )  # fmt: skip


def _append_reference(*args: Any, query: Tensor | None = None, **options: Any) -> Tensor | None:
    arguments = _append_arguments(*args, query=query, **options)
    if query is None or arguments[6] is None:
        reference.append(*arguments)
        return query
    return reference.append_with_query(*arguments, query)


def _append_why_not(*args: Any, query: Tensor | None = None, **options: Any) -> str | None:
    return _append_operator_why_not(*_append_arguments(*args, query=query, **options), query)


def _append_operator_why_not(
    key_cache: Tensor, value_cache: Tensor, key: Tensor, value: Tensor, lengths: Tensor, pages: Tensor | None,
    cosines: Tensor | None, sines: Tensor | None, interleaved: bool, rotary_dim: int, key_scale: float,
    key_scales: Tensor | None, value_scale: float, value_scales: Tensor | None, query: Tensor | None = None,
) -> str | None:  # fmt: skip
    for cache in (key_cache, value_cache):
        if any(size > 1 and not stride for size, stride in zip(cache.shape, cache.stride(), strict=True)):
            return "it cannot write to an expanded cache, which has many elements at one address"
    if key.numel() // max(1, key.shape[-1]) > 2**31 - 2**16:
        return "it takes up to 2**31 - 2**16 heads of tokens"
    others = (key, value, cosines, sines, query, key_scales, value_scales)
    return _cache_why_not(key_cache, value_cache, lengths, pages, *others)


_CACHE_SCHEMA = "Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor key, Tensor value, Tensor lengths, Tensor? pages"
_APPEND_SCHEMA = (
    "bool interleaved, int rotary_dim, float key_scale, Tensor? key_scales, float value_scale, Tensor? value_scales"
)
_append = Operator(
    f"append_({_CACHE_SCHEMA}, Tensor? cosines, Tensor? sines, {_APPEND_SCHEMA}) -> ()",
    backends={"nvidia": "decode.triton:append"},
    reference=reference.append,
    fake=lambda *args: None,
    why_not=_append_operator_why_not,
)
_append_with_query = Operator(
    f"append_with_query_({_CACHE_SCHEMA}, Tensor cosines, Tensor sines, {_APPEND_SCHEMA}, Tensor query) -> Tensor",
    backends={"nvidia": "decode.triton:append_with_query"},
    reference=reference.append_with_query,
    fake=lambda *args: empty_result(args[-1]),
    why_not=_append_operator_why_not,
)


@fused(reference=_append_reference, why_not=_append_why_not)
def append(
    key_cache: Tensor, value_cache: Tensor, key: Tensor, value: Tensor, lengths: Tensor, *,
    pages: Tensor | None = None, cosines: Tensor | None = None, sines: Tensor | None = None, interleaved: bool = False,
    rotary_dim: int | None = None, key_scale: float | Tensor | None = None, value_scale: float | Tensor | None = None,
    query: Tensor | None = None,
) -> Tensor | None:  # fmt: skip
    """Writes new keys and values behind the tokens of each sequence, and returns the rotated query, if there is one.

    Token i of a sequence goes to position `lengths + i`, and is rotated by that row of cosines and sines. The lengths
    do not change: add the new tokens to them before `decode_attention`. Tokens beyond the capacity, and those whose
    page does not exist, are dropped silently; `KVCache` raises an error.

    Args:
        key_cache, value_cache: As in `decode_attention`, with or without pages. Written in place.
        key, value: [batch, key_heads, new, dim], any number of new tokens; cast to the dtype of the cache. Copied first
            if the last stride is not 1.
        lengths: [batch], the number of tokens of each sequence in the cache, without the new ones; int32.
        pages: [batch, most_pages], as in `decode_attention`.
        cosines, sines: [positions, pairs], or [positions, rotary_dim] with each angle twice. Without them nothing is
            rotated.
        interleaved, rotary_dim: As in `rotary`.
        key_scale, value_scale: Keys and values are divided by these, and multiplied by them in `decode_attention`.
        query: [batch, heads, new, dim], rotated as the keys are, in the same launch.
    """
    arguments = _append_arguments(
        key_cache, value_cache, key, value, lengths, pages=pages, cosines=cosines, sines=sines,
        interleaved=interleaved, rotary_dim=rotary_dim, key_scale=key_scale, value_scale=value_scale, query=query,
    )  # fmt: skip
    if query is None or cosines is None:
        _append(*arguments)
        return query
    return _append_with_query(*arguments, query)  # type: ignore[no-any-return]


class KVCache:
    """Keys and values of one layer, of several sequences, for a fixed number of tokens.

    >>> cache = KVCache.create(batch=2, capacity=8, key_heads=1, dim=4)
    >>> key = torch.randn(2, 1, 3, 4)
    >>> cache.append(key, key)
    >>> cache.attend(torch.randn(2, 2, 3, 4)).shape, cache.lengths.tolist(), cache.fits(6)
    (torch.Size([2, 2, 3, 4]), [3, 3], False)

    The lengths are on the device and are never read from there. The host counts the appended tokens: an upper bound,
    which decides whether more fit. It does not see the replays of a CUDA graph, in which tokens beyond the capacity are
    dropped; there the caller counts.

    Args:
        keys, values: [batch, key_heads, capacity, dim], or with `pages` [pages, page_size, key_heads, dim].
        pages: [batch, most_pages] in int32, the page table of each sequence.
        key_scale, value_scale: Keys and values are stored divided by these: numbers or [key_heads]. For float8.
    """

    def __init__(
        self, keys: Tensor, values: Tensor, *, batch: int, pages: Tensor | None = None,
        key_scale: float | Tensor | None = None, value_scale: float | Tensor | None = None,
    ) -> None:  # fmt: skip
        self.keys, self.values, self.pages = keys, values, pages
        self.key_scale, self.value_scale = key_scale, value_scale
        self.capacity = keys.shape[2] if pages is None else pages.shape[1] * keys.shape[1]
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=keys.device)
        """[batch], the number of tokens of each sequence."""
        # one number changes with each token, not one per sequence: torch.compile guards on numbers that change
        self._longest = 0
        self._shorter_by = [0] * batch

    @classmethod
    def create(
        cls, batch: int, capacity: int, key_heads: int, dim: int, dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu", page_size: int | None = None, *, value_dim: int | None = None,
        key_scale: float | Tensor | None = None, value_scale: float | Tensor | None = None,
    ) -> KVCache:  # fmt: skip
        """An empty cache; with `page_size` in pages, of which each sequence has its own, in order.

        Other tables may be written to `pages`, for example to share the pages of a common prefix.
        """
        if min(batch, capacity, key_heads, dim) < 1 or (page_size is not None and page_size < 1):
            raise UsageError(
                f"A cache needs a batch, capacity, key_heads, dim and page_size of 1 or more, and these are {batch},"
                f" {capacity}, {key_heads}, {dim} and {page_size}."
            )
        sizes, pages = (dim, dim if value_dim is None else value_dim), None
        shape: tuple[int, ...] = (batch, key_heads, capacity)
        if page_size is not None:
            pages_each = -(-capacity // page_size)
            shape = (batch * pages_each, page_size, key_heads)
            pages = torch.arange(batch * pages_each, dtype=torch.int32, device=device).view(batch, pages_each)
        keys, values = (torch.empty((*shape, size), dtype=dtype, device=device) for size in sizes)
        return cls(keys, values, batch=batch, pages=pages, key_scale=key_scale, value_scale=value_scale)

    @property
    def max_lengths(self) -> list[int]:
        """An upper bound of the tokens of each sequence, which the host knows."""
        return [self._longest - shorter for shorter in self._shorter_by]

    def fits(self, new: int) -> bool:
        """Whether there is room for so many more tokens in each sequence."""
        return self._longest + new <= self.capacity

    def append(
        self, key: Tensor, value: Tensor, *, cosines: Tensor | None = None, sines: Tensor | None = None,
        interleaved: bool = False, rotary_dim: int | None = None, query: Tensor | None = None,
    ) -> Tensor | None:  # fmt: skip
        """Appends `key` and `value`, [batch, key_heads, new, dim], to all sequences.

        With cosines and sines, keys are rotated by their positions, and so is the query, which is returned. See
        `nearpeak.kernels.append`.
        """
        new = key.shape[2] if key.dim() == 4 else 0
        if not self.fits(new):
            raise UsageError(
                f"The cache is full: it has room for {self.capacity} tokens per sequence, holds up to"
                f" {self._longest}, and {new} are to be appended. Create it with more capacity, or reset() or"
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
        """The attention of the last appended tokens to all tokens: `decode_attention` with this cache."""
        return decode_attention(
            query, self.keys, self.values, self.lengths, pages=self.pages, scale=scale, window=window, softcap=softcap,
            sinks=sinks, key_scale=self.key_scale, value_scale=self.value_scale, return_lse=return_lse,
        )  # fmt: skip

    def truncate(self, lengths: Tensor | Sequence[int]) -> None:
        """Keeps at most so many tokens of each sequence: after padded prompts, or rejected tokens of a draft model.

        The host does not read a tensor on a GPU: then `fits` does not change.
        """
        if len(lengths) != len(self._shorter_by):
            raise UsageError(f"There are {len(self._shorter_by)} sequences, and lengths for {len(lengths)}.")
        if not isinstance(lengths, Tensor):
            self._set_max_lengths([min(*pair) for pair in zip(self.max_lengths, lengths, strict=True)])
            lengths = torch.tensor(lengths, dtype=torch.int32)
        torch.minimum(self.lengths, lengths.to(self.lengths), out=self.lengths)

    def reset(self, sequences: Sequence[int] | None = None) -> None:
        """Empties the cache, or some of its sequences, by their numbers."""
        emptied = range(len(self._shorter_by)) if sequences is None else sequences
        self._set_max_lengths(
            [0 if number in emptied else length for number, length in enumerate(self.max_lengths)]
        )  # fmt: skip
        if sequences is None:
            self.lengths.zero_()
        else:
            self.lengths[torch.tensor(sequences, dtype=torch.int64, device=self.lengths.device)] = 0

    def _set_max_lengths(self, lengths: list[int]) -> None:
        self._longest = max(lengths)
        self._shorter_by = [self._longest - length for length in lengths]
