"""The kernel of `append`.

A program takes some tokens and some heads: of the query, of the keys, or of the values. It finds where these tokens go
from the length of their sequence, rotates what is to be rotated, and writes it there, in the dtype of the cache.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearpeak.kernels.configs import tuned
from nearpeak.kernels.jit.launch import launch, next_power_of_2
from nearpeak.kernels.jit.quantise import CLAMPS
from nearpeak.kernels.jit.rotary import empty_result
from nearpeak.kernels.jit.rows import common_width, multiple

_MANY = 4096
"""Tokens of which programs take four times as much: below, there are too few programs otherwise."""


@triton.jit
def _stored(target, x, factor, inside, LARGEST: tl.constexpr):
    """Stores x * factor; in 8 bits nothing is beyond their largest number."""
    x = x.to(tl.float32) * factor
    if CLAMPS and LARGEST > 0.0:
        x = tl.where(x > LARGEST, LARGEST, x)
        x = tl.where(x < -LARGEST, -LARGEST, x)
    tl.store(target, x.to(target.dtype.element_ty), mask=inside)


@triton.jit
def _rotated(
    source, target, inside, cosine, sine, factor, LARGEST: tl.constexpr, STEP: tl.constexpr,
    HALF: tl.constexpr, REST: tl.constexpr, INTERLEAVED: tl.constexpr,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr,
):  # fmt: skip
    """Heads with their first 2 * HALF numbers rotated, and the REST as it is. `source` and `target` are [t, h, 1]."""
    if HALF > 0:
        if INTERLEAVED:
            column = tl.arange(0, 2 * BLOCK)[None, None, :]
            here = inside & (column < 2 * HALF)
            both = tl.load(source + column, mask=here, other=0.0).to(tl.float32)
            one, other = tl.split(tl.reshape(both, (TOKENS, HEADS, BLOCK, 2)))
            both = tl.join(one * cosine - other * sine, other * cosine + one * sine)
            _stored(target + column * STEP, tl.reshape(both, (TOKENS, HEADS, 2 * BLOCK)), factor, here, LARGEST)
        else:
            column = tl.arange(0, BLOCK)[None, None, :]
            here = inside & (column < HALF)
            one = tl.load(source + column, mask=here, other=0.0).to(tl.float32)
            other = tl.load(source + HALF + column, mask=here, other=0.0).to(tl.float32)
            _stored(target + column * STEP, one * cosine - other * sine, factor, here, LARGEST)
            _stored(target + (HALF + column) * STEP, other * cosine + one * sine, factor, here, LARGEST)
    if REST > 0:
        column = tl.arange(0, REST_BLOCK)[None, None, :]
        here = inside & (column < REST)
        rest = tl.load(source + 2 * HALF + column, mask=here, other=0.0)
        _stored(target + (2 * HALF + column) * STEP, rest, factor, here, LARGEST)


@triton.jit
def _factor(scale, scales, head, inside, stride, HAS_SCALES: tl.constexpr):
    """What numbers are multiplied by: the inverse of their scale."""
    scale = tl.cast(scale, tl.float32) + tl.zeros(head.shape, tl.float32)
    if HAS_SCALES:
        scale *= tl.load(scales + head * stride, mask=inside, other=1.0).to(tl.float32)
    return tl.div_rn(tl.zeros_like(scale) + 1.0, scale)


@triton.jit
def append_kernel(
    query, rotated, key, value, keys, values, lengths, pages, cosines, sines, key_scales, value_scales,
    key_scale, value_scale, tokens, new, heads, key_heads, query_blocks, key_blocks, capacity, page_count, table_rows,
    query_batch, query_head, query_token, rotated_batch, rotated_head, rotated_token,
    key_batch, key_head, key_token, value_batch, value_head, value_token,
    keys_batch, keys_token, keys_head, values_batch, values_token, values_head,
    length_stride, page_batch, cosine_token, sine_token, key_scale_stride, value_scale_stride,
    PAGE: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, INTERLEAVED: tl.constexpr, TABLE_STEP: tl.constexpr,
    VALUE_DIM: tl.constexpr, KEY_STEP: tl.constexpr, VALUE_STEP: tl.constexpr, HAS_KEY_SCALES: tl.constexpr,
    HAS_VALUE_SCALES: tl.constexpr, LARGEST: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None, None]
    is_token = token < tokens
    batch, place = token // new, token % new
    position = tl.load(lengths + batch * length_stride, mask=is_token, other=0).to(tl.int64) + place
    cosine, sine = 1.0, 0.0
    if HALF > 0:
        pair = tl.arange(0, BLOCK)[None, None, :]
        # a position that the table does not have shows as NaN, as in `rotary`
        known = is_token & (position >= 0) & (position < table_rows) & (pair < HALF)
        pair *= TABLE_STEP
        cosine = tl.load(cosines + position * cosine_token + pair, mask=known, other=float("nan")).to(tl.float32)
        sine = tl.load(sines + position * sine_token + pair, mask=known, other=float("nan")).to(tl.float32)
    block = tl.program_id(1)
    each = tl.arange(0, HEADS)[None, :, None]
    if block < query_blocks:
        head = block * HEADS + each
        inside = is_token & (head < heads)
        head = head.to(tl.int64)
        query_rows = multiple(batch * query_batch, WIDTH) + multiple(place * query_token, WIDTH)
        query_rows += multiple(head * query_head, WIDTH)
        rotated_rows = multiple(batch * rotated_batch, WIDTH) + multiple(place * rotated_token, WIDTH)
        rotated_rows += multiple(head * rotated_head, WIDTH)
        _rotated(
            query + query_rows, rotated + rotated_rows, inside, cosine, sine, 1.0, 0.0, 1,
            HALF, REST, INTERLEAVED, TOKENS, HEADS, BLOCK, REST_BLOCK,
        )  # fmt: skip
    else:
        fits = is_token & (position >= 0) & (position < capacity)
        outer, inner = batch, position
        if PAGE > 0:
            outer = tl.load(pages + batch * page_batch + position // PAGE, mask=fits, other=-1).to(tl.int64)
            fits = fits & (outer >= 0) & (outer < page_count)
            inner = position % PAGE
        head = (block - query_blocks) % key_blocks * HEADS + each
        inside = fits & (head < key_heads)
        is_head = head < key_heads
        head = head.to(tl.int64)
        if block < query_blocks + key_blocks:
            source = multiple(batch * key_batch, WIDTH) + multiple(place * key_token, WIDTH)
            source += multiple(head * key_head, WIDTH)
            target = multiple(outer * keys_batch, WIDTH) + multiple(inner * keys_token, WIDTH)
            target += multiple(head * keys_head, WIDTH)
            factor = _factor(key_scale, key_scales, head, is_head, key_scale_stride, HAS_KEY_SCALES)
            _rotated(
                key + source, keys + target, inside, cosine, sine, factor, LARGEST, KEY_STEP,
                HALF, REST, INTERLEAVED, TOKENS, HEADS, BLOCK, REST_BLOCK,
            )  # fmt: skip
        else:
            source = multiple(batch * value_batch, WIDTH) + multiple(place * value_token, WIDTH)
            source += multiple(head * value_head, WIDTH)
            target = multiple(outer * values_batch, WIDTH) + multiple(inner * values_token, WIDTH)
            target += multiple(head * values_head, WIDTH)
            factor = _factor(value_scale, value_scales, head, is_head, value_scale_stride, HAS_VALUE_SCALES)
            _rotated(
                value + source, values + target, inside, 1.0, 0.0, factor, LARGEST, VALUE_STEP,
                0, VALUE_DIM, INTERLEAVED, TOKENS, HEADS, BLOCK, VALUE_BLOCK,
            )  # fmt: skip


def in_place(
    key_cache: Tensor, value_cache: Tensor, key: Tensor, value: Tensor, lengths: Tensor, pages: Tensor | None,
    cosines: Tensor | None, sines: Tensor | None, interleaved: bool, rotary_dim: int, key_scale: float,
    key_scales: Tensor | None, value_scale: float, value_scales: Tensor | None, *, config: dict[str, Any] | None = None,
) -> None:  # fmt: skip
    """Writes keys and values to the caches. Copies them first where their last stride is not 1."""
    _append(
        None, None, key_cache, value_cache, key, value, lengths, pages, cosines, sines, interleaved, rotary_dim,
        key_scale, key_scales, value_scale, value_scales, config,
    )  # fmt: skip


def with_query(
    key_cache: Tensor, value_cache: Tensor, key: Tensor, value: Tensor, lengths: Tensor, pages: Tensor | None,
    cosines: Tensor, sines: Tensor, interleaved: bool, rotary_dim: int, key_scale: float,
    key_scales: Tensor | None, value_scale: float, value_scales: Tensor | None, query: Tensor,
    *, config: dict[str, Any] | None = None,
) -> Tensor:  # fmt: skip
    """Writes keys and values to the caches, and returns the query rotated."""
    rotated = empty_result(query)
    _append(
        query, rotated, key_cache, value_cache, key, value, lengths, pages, cosines, sines, interleaved, rotary_dim,
        key_scale, key_scales, value_scale, value_scales, config,
    )  # fmt: skip
    return rotated


def _append(
    query: Tensor | None, rotated: Tensor | None, key_cache: Tensor, value_cache: Tensor, key: Tensor, value: Tensor,
    lengths: Tensor, pages: Tensor | None, cosines: Tensor | None, sines: Tensor | None, interleaved: bool,
    rotary_dim: int, key_scale: float, key_scales: Tensor | None, value_scale: float, value_scales: Tensor | None,
    config: dict[str, Any] | None,
) -> None:  # fmt: skip
    batch, key_heads, new, dim = key.shape
    if not batch * new:
        return
    key, value = _dense(key), _dense(value)
    asked, written = (key, key) if query is None or rotated is None else (_dense(query), rotated)
    cos, sin = (key, key) if cosines is None or sines is None else (_dense(cosines), _dense(sines))
    half = 0 if cosines is None else rotary_dim // 2
    step = 2 if interleaved and cos.shape[-1] == rotary_dim else 1
    if pages is None:
        capacity, page, order = key_cache.shape[2], 0, (0, 2, 1)
    else:
        page, order = key_cache.shape[1], (0, 1, 2)
        capacity = pages.shape[1] * page
    strides = [one.stride(dimension) for one in (asked, written, key, value) for dimension in (0, 1, 2)]
    strides += [one.stride(dimension) for one in (key_cache, value_cache) for dimension in order]
    steps = [0 if one is None else one.stride(0) for one in (key_scales, value_scales)]
    largest = torch.finfo(key_cache.dtype).max if key_cache.element_size() == 1 else 0.0
    config = config or tuned("cache_append", dim, key.device) or tile(batch * new, key_heads, dim)
    many, together = config["tokens"], config["heads"]
    query_blocks = 0 if query is None else triton.cdiv(query.shape[1], together)
    key_blocks = triton.cdiv(key_heads, together)
    launch(
        append_kernel, (triton.cdiv(batch * new, many), query_blocks + 2 * key_blocks, 1),
        asked, written, key, value, key_cache, value_cache, lengths, lengths if pages is None else pages, cos, sin,
        *(lengths if one is None else one for one in (key_scales, value_scales)), key_scale, value_scale,
        batch * new, new, asked.shape[1], key_heads, query_blocks, key_blocks, capacity, key_cache.shape[0],
        cos.shape[0], *strides, lengths.stride(0), 0 if pages is None else pages.stride(0), cos.stride(0),
        sin.stride(0), *steps, page, half, dim - 2 * half, interleaved, step, value.shape[-1],
        key_cache.stride(-1), value_cache.stride(-1), key_scales is not None, value_scales is not None, largest,
        common_width(*strides), many, together, next_power_of_2(half), next_power_of_2(dim - 2 * half),
        next_power_of_2(value.shape[-1]), warps=config["warps"],
    )  # fmt: skip
    for cache in (key_cache, value_cache):
        if not cache.is_inference():
            torch.autograd.graph.increment_version(cache)  # so that autograd knows what it kept to be no longer there


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def tile(tokens: int, heads: int, dim: int) -> dict[str, Any]:
    """What to launch with where nobody measured: 16 bytes of 16 bits for each thread, and more for many tokens."""
    together = min(next_power_of_2(heads), 8)
    numbers = together * next_power_of_2(dim)
    if tokens < _MANY:
        return {"tokens": 1, "heads": together, "warps": max(1, min(4, numbers // 256))}
    return {"tokens": max(1, min(16, 4096 // numbers)), "heads": together, "warps": 4}


def candidates(size: int, heads: int = 8) -> list[dict[str, Any]]:
    """Configurations worth measuring for heads of this length."""
    found: list[dict[str, Any]] = []
    for tokens in (1, 2, 4, 8):
        for together in sorted({min(next_power_of_2(heads), number) for number in (1, 2, 4, 8)}):
            for warps in (1, 2, 4):
                if 4 <= tokens * together * next_power_of_2(size) // (32 * warps) <= 32:
                    found.append({"tokens": tokens, "heads": together, "warps": warps})
    return found
