"""`append`: new keys and values written to the end of each sequence in a cache, rotated and cast on the way.

Bytes moved: what is new is read once and written once. The lengths are not read by the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nearpeak.errors import UsageError
from nearpeak.kernels.operations.decode import check_cache, scale_of, why_not_cache
from nearpeak.kernels.operations.quantise import FLOAT8
from nearpeak.kernels.operations.rotary import _fake as _empty_result
from nearpeak.kernels.operations.rotary import _settings, _turn
from nearpeak.kernels.operator import Operator
from nearpeak.kernels.policy import fused

Arguments = tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, bool, int,
    float, Tensor | None, float, Tensor | None,
]  # fmt: skip
"""Those of the operators, without the query."""


def reference(
    key_cache: Tensor, value_cache: Tensor, key: Tensor, value: Tensor, lengths: Tensor, *,
    pages: Tensor | None = None, cosines: Tensor | None = None, sines: Tensor | None = None, interleaved: bool = False,
    rotary_dim: int | None = None, key_scale: float | Tensor | None = None, value_scale: float | Tensor | None = None,
    query: Tensor | None = None,
) -> Tensor | None:  # fmt: skip
    arguments = _settled(
        key_cache, value_cache, key, value, lengths, pages, cosines, sines, interleaved, rotary_dim, key_scale,
        value_scale, query,
    )  # fmt: skip
    if query is None or cosines is None:
        _reference(*arguments)
        return query
    return _reference_with_query(*arguments, query)


def _reference(
    key_cache: Tensor, value_cache: Tensor, key: Tensor, value: Tensor, lengths: Tensor, pages: Tensor | None,
    cosines: Tensor | None, sines: Tensor | None, interleaved: bool, rotary_dim: int, key_scale: float,
    key_scales: Tensor | None, value_scale: float, value_scales: Tensor | None,
) -> None:  # fmt: skip
    if cosines is not None and sines is not None:
        key = _rotated(key, cosines, sines, lengths, interleaved, rotary_dim)
    _write(key_cache, key, lengths, pages, key_scale, key_scales)
    _write(value_cache, value, lengths, pages, value_scale, value_scales)


def _reference_with_query(*args: object) -> Tensor:
    *rest, query = args
    lengths, _, cosines, sines, interleaved, rotary_dim = rest[4:10]
    rotated = _rotated(query, cosines, sines, lengths, interleaved, rotary_dim)  # type: ignore[arg-type]
    _reference(*rest)  # type: ignore[arg-type]
    return _empty_result(query).copy_(rotated)  # type: ignore[arg-type]


def _rotated(
    x: Tensor, cosines: Tensor, sines: Tensor, lengths: Tensor, interleaved: bool, rotary_dim: int
) -> Tensor:  # fmt: skip
    """x rotated, not yet rounded to its dtype."""
    wide = _wide(x)
    positions = lengths.long()[:, None] + torch.arange(x.shape[2], device=x.device)
    cosines, sines = cosines.to(wide), sines.to(wide)
    return _turn(x.to(wide), cosines, sines, positions, interleaved, False, True, rotary_dim)


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _write(
    cache: Tensor, x: Tensor, lengths: Tensor, pages: Tensor | None, scale: float, scales: Tensor | None
) -> None:  # fmt: skip
    batch, _, new, _ = x.shape
    capacity = cache.shape[2] if pages is None else pages.shape[1] * cache.shape[1]
    if not batch * new * capacity:
        return
    divisor = torch.full((1,), scale, dtype=_wide(x), device=x.device) if scales is None else scales.to(_wide(x))
    x = x.to(_wide(x)) * (1 / divisor)[:, None, None]
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


def _settled(
    key_cache: Tensor, value_cache: Tensor, key: Tensor, value: Tensor, lengths: Tensor, pages: Tensor | None,
    cosines: Tensor | None, sines: Tensor | None, interleaved: bool, rotary_dim: int | None,
    key_scale: float | Tensor | None, value_scale: float | Tensor | None, query: Tensor | None,
) -> Arguments:  # fmt: skip
    """The arguments of the operators; raises for what is wrong."""
    check_cache(key_cache, value_cache, lengths, pages)
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
        _, size = _settings([key], cosines, sines, None, False, -2, rotary_dim)
    return (
        key_cache, value_cache, key, value, lengths, pages, cosines, sines, interleaved, size,
        *scale_of("key_scale", key_scale, heads), *scale_of("value_scale", value_scale, heads),
    )  # fmt: skip


def _operator_why_not(
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
    return why_not_cache(key_cache, value_cache, lengths, pages, *others)


def _why_not(
    key_cache: Tensor, value_cache: Tensor, key: Tensor, value: Tensor, lengths: Tensor, *,
    pages: Tensor | None = None, cosines: Tensor | None = None, sines: Tensor | None = None, interleaved: bool = False,
    rotary_dim: int | None = None, key_scale: float | Tensor | None = None, value_scale: float | Tensor | None = None,
    query: Tensor | None = None,
) -> str | None:  # fmt: skip
    arguments = _settled(
        key_cache, value_cache, key, value, lengths, pages, cosines, sines, interleaved, rotary_dim, key_scale,
        value_scale, query,
    )  # fmt: skip
    return _operator_why_not(*arguments, query)


_CACHES = "Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor key, Tensor value, Tensor lengths, Tensor? pages"
_REST = "bool interleaved, int rotary_dim, float key_scale, Tensor? key_scales, float value_scale, Tensor? value_scales"
_append = Operator(
    f"append_({_CACHES}, Tensor? cosines, Tensor? sines, {_REST}) -> ()",
    launch="cache_append:in_place",
    reference=_reference,
    fake=lambda *args: None,
    why_not=_operator_why_not,
)
_append_with_query = Operator(
    f"append_with_query_({_CACHES}, Tensor cosines, Tensor sines, {_REST}, Tensor query) -> Tensor",
    launch="cache_append:with_query",
    reference=_reference_with_query,
    fake=lambda *args: _empty_result(args[-1]),
    why_not=_operator_why_not,
)


@fused(reference=reference, why_not=_why_not)
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
    arguments = _settled(
        key_cache, value_cache, key, value, lengths, pages, cosines, sines, interleaved, rotary_dim, key_scale,
        value_scale, query,
    )  # fmt: skip
    if query is None or cosines is None:
        _append(*arguments)
        return query
    return _append_with_query(*arguments, query)  # type: ignore[no-any-return]
