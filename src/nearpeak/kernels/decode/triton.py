"""Decode attention and cache append in portable Triton: kernels and launchers.

Append: a program takes some tokens and some heads of the query, the keys or the values. It finds where the tokens go
from the length of their sequence, rotates them, and writes them in the dtype of the cache.

Decode: a program takes a range of the keys of one head and one sequence, for all queries that see them. The range
follows from the length of the sequence, which only the device knows: keys are split evenly among programs, and programs
without keys exit at once. Strides of tokens and pages are constants, so that most of an address is known at compile
time. Where several programs share a sequence (split-KV), each stores its maximum, its sum of exponentials and its
accumulator in float32 and increments a counter; the last one merges all of them in the order of the keys, so that the
result does not depend on which program that is.

There are two kernels: one query per head of keys (a matrix-vector product on CUDA cores), and several queries per head
of keys, which are rows of one tile for the tensor cores. Keys and values in fp8 are loaded in pairs and converted to
float16, which represents them exactly; even and odd columns are multiplied separately.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearpeak.kernels._runtime.grid_counters import grid_counters, is_last_program
from nearpeak.kernels._runtime.launch import launch, next_power_of_2
from nearpeak.kernels._runtime.policy import INTERPRETED
from nearpeak.kernels._runtime.rows import LOG2_E, LOWEST, assume_multiple, common_width
from nearpeak.kernels._runtime.tuning import processors, tuned
from nearpeak.kernels.losses.triton import tanh
from nearpeak.kernels.quantize.triton import CLAMPS
from nearpeak.kernels.rotary.triton import empty_result

_MANY_TOKENS = 4096
"""Tokens of which programs take four times as much: below, there are too few programs otherwise."""


@triton.jit
def _store_scaled(target, x, factor, inside, LARGEST: tl.constexpr):
    """Stores x * factor; in 8 bits nothing is beyond their largest number."""
    x = x.to(tl.float32) * factor
    if CLAMPS and LARGEST > 0.0:
        x = tl.where(x > LARGEST, LARGEST, x)
        x = tl.where(x < -LARGEST, -LARGEST, x)
    tl.store(target, x.to(target.dtype.element_ty), mask=inside)


@triton.jit
def _store_rotated(
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
            _store_scaled(target + column * STEP, tl.reshape(both, (TOKENS, HEADS, 2 * BLOCK)), factor, here, LARGEST)
        else:
            column = tl.arange(0, BLOCK)[None, None, :]
            here = inside & (column < HALF)
            one = tl.load(source + column, mask=here, other=0.0).to(tl.float32)
            other = tl.load(source + HALF + column, mask=here, other=0.0).to(tl.float32)
            _store_scaled(target + column * STEP, one * cosine - other * sine, factor, here, LARGEST)
            _store_scaled(target + (HALF + column) * STEP, other * cosine + one * sine, factor, here, LARGEST)
    if REST > 0:
        column = tl.arange(0, REST_BLOCK)[None, None, :]
        here = inside & (column < REST)
        rest = tl.load(source + 2 * HALF + column, mask=here, other=0.0)
        _store_scaled(target + (2 * HALF + column) * STEP, rest, factor, here, LARGEST)


@triton.jit
def _inverse_scale(scale, scales, head, inside, stride, HAS_SCALES: tl.constexpr):
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
        query_rows = assume_multiple(batch * query_batch, WIDTH) + assume_multiple(place * query_token, WIDTH)
        query_rows += assume_multiple(head * query_head, WIDTH)
        rotated_rows = assume_multiple(batch * rotated_batch, WIDTH) + assume_multiple(place * rotated_token, WIDTH)
        rotated_rows += assume_multiple(head * rotated_head, WIDTH)
        _store_rotated(
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
            source = assume_multiple(batch * key_batch, WIDTH) + assume_multiple(place * key_token, WIDTH)
            source += assume_multiple(head * key_head, WIDTH)
            target = assume_multiple(outer * keys_batch, WIDTH) + assume_multiple(inner * keys_token, WIDTH)
            target += assume_multiple(head * keys_head, WIDTH)
            factor = _inverse_scale(key_scale, key_scales, head, is_head, key_scale_stride, HAS_KEY_SCALES)
            _store_rotated(
                key + source, keys + target, inside, cosine, sine, factor, LARGEST, KEY_STEP,
                HALF, REST, INTERLEAVED, TOKENS, HEADS, BLOCK, REST_BLOCK,
            )  # fmt: skip
        else:
            source = assume_multiple(batch * value_batch, WIDTH) + assume_multiple(place * value_token, WIDTH)
            source += assume_multiple(head * value_head, WIDTH)
            target = assume_multiple(outer * values_batch, WIDTH) + assume_multiple(inner * values_token, WIDTH)
            target += assume_multiple(head * values_head, WIDTH)
            factor = _inverse_scale(value_scale, value_scales, head, is_head, value_scale_stride, HAS_VALUE_SCALES)
            _store_rotated(
                value + source, values + target, inside, 1.0, 0.0, factor, LARGEST, VALUE_STEP,
                0, VALUE_DIM, INTERLEAVED, TOKENS, HEADS, BLOCK, VALUE_BLOCK,
            )  # fmt: skip


def append(
    key_cache: Tensor, value_cache: Tensor, key: Tensor, value: Tensor, lengths: Tensor, pages: Tensor | None,
    cosines: Tensor | None, sines: Tensor | None, interleaved: bool, rotary_dim: int, key_scale: float,
    key_scales: Tensor | None, value_scale: float, value_scales: Tensor | None, *, config: dict[str, Any] | None = None,
) -> None:  # fmt: skip
    """Writes keys and values to the caches. Copies them first where their last stride is not 1."""
    _launch_append(
        None, None, key_cache, value_cache, key, value, lengths, pages, cosines, sines, interleaved, rotary_dim,
        key_scale, key_scales, value_scale, value_scales, config,
    )  # fmt: skip


def append_with_query(
    key_cache: Tensor, value_cache: Tensor, key: Tensor, value: Tensor, lengths: Tensor, pages: Tensor | None,
    cosines: Tensor, sines: Tensor, interleaved: bool, rotary_dim: int, key_scale: float,
    key_scales: Tensor | None, value_scale: float, value_scales: Tensor | None, query: Tensor,
    *, config: dict[str, Any] | None = None,
) -> Tensor:  # fmt: skip
    """Writes keys and values to the caches, and returns the query rotated."""
    rotated = empty_result(query)
    _launch_append(
        query, rotated, key_cache, value_cache, key, value, lengths, pages, cosines, sines, interleaved, rotary_dim,
        key_scale, key_scales, value_scale, value_scales, config,
    )  # fmt: skip
    return rotated


def _launch_append(
    query: Tensor | None, rotated: Tensor | None, key_cache: Tensor, value_cache: Tensor, key: Tensor, value: Tensor,
    lengths: Tensor, pages: Tensor | None, cosines: Tensor | None, sines: Tensor | None, interleaved: bool,
    rotary_dim: int, key_scale: float, key_scales: Tensor | None, value_scale: float, value_scales: Tensor | None,
    config: dict[str, Any] | None,
) -> None:  # fmt: skip
    batch, key_heads, new, dim = key.shape
    if not batch * new:
        return
    key, value = _with_dense_rows(key), _with_dense_rows(value)
    asked, written = (key, key) if query is None or rotated is None else (_with_dense_rows(query), rotated)
    cos, sin = (key, key) if cosines is None or sines is None else (_with_dense_rows(cosines), _with_dense_rows(sines))
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
    config = config or tuned("cache_append", dim, key.device) or append_heuristic(batch * new, key_heads, dim)
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


def _with_dense_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def append_heuristic(tokens: int, heads: int, dim: int) -> dict[str, Any]:
    """What to launch with where nobody measured: 16 bytes of 16 bits for each thread, and more for many tokens."""
    together = min(next_power_of_2(heads), 8)
    numbers = together * next_power_of_2(dim)
    if tokens < _MANY_TOKENS:
        return {"tokens": 1, "heads": together, "warps": max(1, min(4, numbers // 256))}
    return {"tokens": max(1, min(16, 4096 // numbers)), "heads": together, "warps": 4}


def append_candidates(size: int, heads: int = 8) -> list[dict[str, Any]]:
    """Configurations worth measuring for heads of this length."""
    found: list[dict[str, Any]] = []
    for tokens in (1, 2, 4, 8):
        for together in sorted({min(next_power_of_2(heads), number) for number in (1, 2, 4, 8)}):
            for warps in (1, 2, 4):
                if 4 <= tokens * together * next_power_of_2(size) // (32 * warps) <= 32:
                    found.append({"tokens": tokens, "heads": together, "warps": warps})
    return found


_GRAIN = tl.constexpr(16)
_INT32_RANGE = tl.constexpr(2**31)


@triton.jit
def split_range(
    length, capacity, window, NEW: tl.constexpr, HAS_WINDOW: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The first key of this program, the end of its keys, and how many programs have some: at least one."""
    # where parts begin, which addresses within a block do not depend on
    GRAIN: tl.constexpr = BLOCK if PAGE > 0 and PAGE % BLOCK == 0 else PAGE if PAGE > _GRAIN else _GRAIN
    end = tl.minimum(length, capacity)
    begin = tl.zeros_like(end)
    if HAS_WINDOW:
        begin = tl.maximum(length - NEW - window, 0) // GRAIN * GRAIN
    keys = tl.maximum(end - begin, 0)
    splits = tl.num_programs(1)
    each = ((keys + (GRAIN - 1)) // GRAIN + splits - 1) // splits * GRAIN
    each = tl.maximum(each, BLOCK)
    first = begin + tl.program_id(1) * each
    return first, tl.minimum(first + each, end), tl.maximum((keys + each - 1) // each, 1)


@triton.jit
def load_pages(table, first, end, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """The pages of a block of keys: one for all of them where pages consist of blocks."""
    if PAGE == 0:
        page = 0
    elif PAGE % BLOCK == 0:
        page = tl.load(table + first // PAGE, mask=first < end, other=0)
    elif BLOCK % PAGE == 0:
        own = tl.arange(0, BLOCK)
        page = tl.load(table + first // PAGE + own // PAGE, mask=own < end - first, other=0)
    else:
        key = first + tl.arange(0, BLOCK)
        page = tl.load(table + key // PAGE, mask=key < end, other=0)
    return page


@triton.jit
def prefetch_pages(table, first, end, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """The same `end`, known once the pages of the first blocks are in the nearest cache: on the way there together.

    The first loads would otherwise wait for the page of the first block, then for that of the second, and so on.
    """
    if PAGE > 0:
        NUMBER: tl.constexpr = 4 if PAGE >= BLOCK else 4 * BLOCK // PAGE if BLOCK % PAGE == 0 else 4 * BLOCK
        entry = first // PAGE + tl.arange(0, NUMBER)
        page = tl.load(table + entry, mask=(first < end) & (entry <= (end - 1) // PAGE), other=0)
        end = tl.where(tl.min(page, 0) == -(2**31), first, end)  # of what is no page
    return end


@triton.jit
def block_offsets(
    TOKEN: tl.constexpr, STEP: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr
):
    """Offsets of numbers within a block of keys, [BLOCK, WIDTH]: what is the same for all blocks."""
    own, column = tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    if BLOCK * TOKEN + WIDTH * STEP >= _INT32_RANGE:
        own, column = own.to(tl.int64), column.to(tl.int64)
    if PAGE == 0 or PAGE % BLOCK == 0:
        rows = own * TOKEN
    elif BLOCK % PAGE == 0:
        rows = own % PAGE * TOKEN
    else:
        rows = own * 0
    return rows[:, None] + (column * STEP)[None, :]


@triton.jit
def block_pointers(
    cache, page, first, TOKEN: tl.constexpr, PAGE_STRIDE: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Pointers that offsets `within` a block are added to: one, or [BLOCK, 1]."""
    if PAGE == 0:
        start = cache + tl.cast(first, tl.int64) * TOKEN
    elif PAGE % BLOCK == 0:
        start = cache + page.to(tl.int64) * PAGE_STRIDE + tl.cast(first % PAGE, tl.int64) * TOKEN
    elif BLOCK % PAGE == 0:
        start = cache + (page.to(tl.int64) * PAGE_STRIDE)[:, None]
    else:
        place = (first + tl.arange(0, BLOCK)) % PAGE
        start = cache + (page.to(tl.int64) * PAGE_STRIDE + place.to(tl.int64) * TOKEN)[:, None]
    return start


@triton.jit
def add_sink(maximum, total, sink):
    """The maximum and the sum of powers with one more score, in base e, of which there is no value."""
    sink = sink.to(tl.float32) * LOG2_E
    larger = tl.maximum(tl.maximum(maximum, sink), LOWEST)
    return larger, total * tl.exp2(maximum - larger) + tl.exp2(sink - larger)


@triton.jit
def log_sum_exp(maximum, total):
    """The logarithm, in base e, of the sum of exponentials; -inf where nothing was summed."""
    return tl.where(total > 0.0, (maximum + tl.log2(total)) / LOG2_E, float("-inf"))


@triton.jit
def reciprocal_or_zero(total):
    """1 / total; 0 where nothing was summed, so that the result is 0 there."""
    return tl.where(total > 0.0, 1.0 / total, 0.0)


@triton.jit
def store_partial(
    parts, statistics, maximum, total, sums, ROWS: tl.constexpr, HELD: tl.constexpr, VALUE_BLOCK: tl.constexpr
):  # fmt: skip
    """Stores the part of this program. Of a tile of ROWS, the first HELD are kept."""
    row, column = tl.arange(0, ROWS), tl.arange(0, VALUE_BLOCK)
    part = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    statistics += part * (2 * HELD)
    tl.store(statistics + row, maximum, mask=row < HELD)
    tl.store(statistics + HELD + row, total, mask=row < HELD)
    places = parts + part * (HELD * VALUE_BLOCK) + row[:, None] * VALUE_BLOCK + column[None, :]
    tl.store(places, sums, mask=(row < HELD)[:, None])


@triton.jit
def merge_partials(
    parts, statistics, used, HELD: tl.constexpr, VALUE_BLOCK: tl.constexpr, TOGETHER: tl.constexpr
):  # fmt: skip
    """The maximum, the sum of powers and of values of HELD rows, over `used` parts."""
    row, own, column = tl.arange(0, HELD), tl.arange(0, TOGETHER), tl.arange(0, VALUE_BLOCK)
    first_part = tl.program_id(0).to(tl.int64) * tl.num_programs(1)
    statistics += first_part * (2 * HELD)
    parts += first_part * (HELD * VALUE_BLOCK)
    # [row, part, column]: warps have rows of their own, and threads add up what they loaded themselves
    offsets = row[:, None, None] * VALUE_BLOCK + column[None, None, :]
    maximum = tl.full((HELD,), LOWEST, tl.float32)
    total = tl.zeros((HELD,), tl.float32)
    sums = tl.zeros((HELD, VALUE_BLOCK), tl.float32)
    for first in tl.range(0, used, TOGETHER, num_stages=1):
        exists = (own < used - first)[None, :]
        part = tl.minimum(first + own, used - 1)  # the last part again rather than a mask of all that is loaded
        place = row[:, None] + (part * (2 * HELD))[None, :]
        maxima = tl.where(exists, tl.load(statistics + place), LOWEST)
        totals = tl.load(statistics + HELD + place)
        given = tl.load(parts + (part * (HELD * VALUE_BLOCK))[None, :, None] + offsets)
        larger = tl.maximum(maximum, tl.max(maxima, 1))
        shrink, before = tl.where(exists, tl.exp2(maxima - larger[:, None]), 0.0), tl.exp2(maximum - larger)
        total = total * before + tl.sum(totals * shrink, 1)
        sums = sums * before[:, None] + tl.sum(given * shrink[:, :, None], 1)
        maximum = larger
    return maximum, total, sums


@triton.jit
def store_result(
    result, logs, sinks, value_scales, value_scale, maximum, total, sums, batch, head, key_heads, first_row,
    sink_stride, value_scale_stride, GROUP: tl.constexpr, NEW: tl.constexpr, VALUE_DIM: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_VALUE_SCALES: tl.constexpr, ROWS: tl.constexpr, VALUE_BLOCK: tl.constexpr,
):  # fmt: skip
    """Stores results, from sums over all keys."""
    row, column = first_row + tl.arange(0, ROWS), tl.arange(0, VALUE_BLOCK)
    is_row = row < GROUP * NEW
    query_head = head * GROUP + row // NEW
    if HAS_SINKS:
        larger, total = add_sink(maximum, total, tl.load(sinks + query_head * sink_stride, mask=is_row, other=0.0))
        sums *= tl.exp2(maximum - larger)[:, None]
        maximum = larger
    factor = tl.cast(value_scale, tl.float32) * reciprocal_or_zero(total)
    if HAS_VALUE_SCALES:
        factor *= tl.load(value_scales + head * value_scale_stride).to(tl.float32)
    number = (batch * key_heads * GROUP + query_head) * NEW + row % NEW
    found = (sums * factor[:, None]).to(result.dtype.element_ty)
    known = is_row[:, None] & (column < VALUE_DIM)[None, :]
    tl.store(result + number[:, None] * VALUE_DIM + column[None, :], found, mask=known)
    tl.store(logs + number, log_sum_exp(maximum, total), mask=is_row)


_INTERPRETED = tl.constexpr(INTERPRETED)
_FP8_DTYPES = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}


def as_fp8_pairs(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, tl.dtype] | None:
    """Both as pairs, and what these consist of; None where bytes of a pair are not beside each other."""
    for cache in (keys, values):
        offsets = (cache.shape[-1], cache.storage_offset(), *cache.stride()[:-1])
        if cache.stride(-1) != 1 or cache.data_ptr() % 2 or any(offset % 2 for offset in offsets):
            return None
    return keys.view(torch.int16), values.view(torch.int16), _FP8_DTYPES[keys.dtype]


@triton.jit
def unpack_fp8_pairs(pairs, DTYPE: tl.constexpr):
    """The first and the second of each pair, in float16.

    Two pairs at a time, by instructions that do what the interpreter is told: of that, Triton would make eight for each
    two pairs, and not two or three.
    """
    if _INTERPRETED:
        first = pairs.to(tl.uint8).to(DTYPE, bitcast=True).to(tl.float16)
        second = (pairs >> 8).to(tl.uint8).to(DTYPE, bitcast=True).to(tl.float16)
    elif tl.float8e5 == DTYPE:  # the upper half of a float16
        first, second = tl.inline_asm_elementwise(
            """{
            prmt.b32 $0, $2, 0, 0x2404;
            and.b32 $1, $2, 0xff00ff00;
            }""",
            "=&r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        first, second = tl.inline_asm_elementwise(
            """{
            .reg .b32 sorted;
            .reg .b16 firsts, seconds;
            prmt.b32 sorted, $2, 0, 0x3120;
            mov.b32 {firsts, seconds}, sorted;
            cvt.rn.f16x2.e4m3x2 $0, firsts;
            cvt.rn.f16x2.e4m3x2 $1, seconds;
            }""",
            "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    return first, second


@triton.jit
def scale_to_float16(asked):
    """Queries as float16, and the powers of 2 that they are to be multiplied by: bfloat16 has a larger range."""
    wide = asked.to(tl.float32)
    exponent = tl.max(tl.abs(wide), 1).to(tl.int32, bitcast=True) >> 23
    exponent = tl.minimum(tl.maximum(exponent, 1), 253)
    up, down = (exponent << 23).to(tl.float32, bitcast=True), ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    return (wide * down[:, None]).to(tl.float16), up


@triton.jit
def base2_scores(products, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """Scores for powers of 2, from products of queries and keys."""
    if HAS_SOFTCAP:
        bent, _ = tanh(products * (scale / softcap))
        scores = bent * (softcap * LOG2_E)
    else:
        scores = products * (scale * LOG2_E)
    return scores


@triton.jit
def decode_row_kernel(
    query, keys, values, lengths, pages, sinks, key_scales, value_scales, result, logs, parts, statistics, tickets,
    scale, softcap, key_scale, value_scale, window, capacity, key_heads, row_blocks,
    query_batch, query_head, query_token, query_column, key_batch, key_head, value_batch, value_head,
    length_stride, page_batch, sink_stride, key_scale_stride, value_scale_stride,
    GROUP: tl.constexpr, NEW: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PAGE: tl.constexpr,
    KEY_PAGE: tl.constexpr, KEY_TOKEN: tl.constexpr, KEY_STEP: tl.constexpr,
    VALUE_PAGE: tl.constexpr, VALUE_TOKEN: tl.constexpr, VALUE_STEP: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_KEY_SCALES: tl.constexpr,
    HAS_VALUE_SCALES: tl.constexpr, IN_PARTS: tl.constexpr, EIGHT: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, HELD: tl.constexpr, BLOCK: tl.constexpr, DIM_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr,
    TOGETHER: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One query. Each place in a block has a maximum, a sum and an accumulator of its own, so that threads meet once,
    at the end, and not at each block."""
    batch, head = (tl.program_id(0) // key_heads).to(tl.int64), (tl.program_id(0) % key_heads).to(tl.int64)
    length = tl.load(lengths + batch * length_stride).to(tl.int32)
    column, value_column = tl.arange(0, DIM_BLOCK), tl.arange(0, VALUE_BLOCK)
    asked = query + batch * query_batch + head * query_head + column * query_column
    asked = tl.load(asked, mask=column < DIM, other=0.0).to(tl.float32)[None, :]
    first, end, used = split_range(length, capacity, window, NEW, HAS_WINDOW, PAGE, BLOCK)
    if tl.program_id(1) >= used:
        return
    maximum = tl.full((BLOCK,), LOWEST, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    sums = tl.zeros((BLOCK, VALUE_BLOCK), tl.float32)
    scale, softcap = tl.cast(scale, tl.float32), tl.cast(softcap, tl.float32)
    scale *= tl.cast(key_scale, tl.float32)
    if HAS_KEY_SCALES:
        scale *= tl.load(key_scales + head * key_scale_stride).to(tl.float32)
    keys += assume_multiple(head * key_head, WIDTH)
    values += assume_multiple(head * value_head, WIDTH)
    table = pages + batch * page_batch
    if PAGE == 0:
        keys += assume_multiple(batch * key_batch, WIDTH)
        values += assume_multiple(batch * value_batch, WIDTH)
    key_offsets = block_offsets(KEY_TOKEN, KEY_STEP, PAGE, BLOCK, DIM_BLOCK)
    value_offsets = block_offsets(VALUE_TOKEN, VALUE_STEP, PAGE, BLOCK, VALUE_BLOCK)
    own = tl.arange(0, BLOCK)
    end = prefetch_pages(table, first, end, PAGE, BLOCK)
    page = load_pages(table, first, end, PAGE, BLOCK)
    for at in tl.range(first, end, BLOCK, num_stages=STAGES):
        inside = own < end - at
        place = block_pointers(keys, page, at, KEY_TOKEN, KEY_PAGE, PAGE, BLOCK)
        some = tl.load(place + key_offsets, mask=inside[:, None] & (column < DIM)[None, :], other=0.0)
        place = block_pointers(values, page, at, VALUE_TOKEN, VALUE_PAGE, PAGE, BLOCK)
        here = inside[:, None] & (value_column < VALUE_DIM)[None, :]
        given = tl.load(place + value_offsets, mask=here, other=0.0)
        page = load_pages(table, at + BLOCK, end, PAGE, BLOCK)  # ahead: loads of the next block wait for it
        score = base2_scores(tl.sum(some.to(tl.float32) * asked, 1), scale, softcap, HAS_SOFTCAP)
        seen = inside
        if HAS_WINDOW:
            seen = seen & (at + own >= length - 1 - window)
        score = tl.where(seen, score, float("-inf"))
        larger = tl.maximum(maximum, score)
        power, shrink = tl.exp2(score - larger), tl.exp2(maximum - larger)
        total = total * shrink + power
        sums = sums * shrink[:, None] + power[:, None] * given.to(tl.float32)
        maximum = larger
    largest = tl.max(maximum, 0)
    shrink = tl.exp2(maximum - largest)
    all_total = tl.sum(total * shrink, 0)[None]
    all_sums = tl.sum(sums * shrink[:, None], 0)[None, :]
    largest = largest[None]
    if not IN_PARTS or used == 1:
        store_result(
            result, logs, sinks, value_scales, value_scale, largest, all_total, all_sums, batch, head, key_heads, 0,
            sink_stride, value_scale_stride, 1, 1, VALUE_DIM, HAS_SINKS, HAS_VALUE_SCALES, 1, VALUE_BLOCK,
        )  # fmt: skip
    else:
        store_partial(parts, statistics, largest, all_total, all_sums, 1, 1, VALUE_BLOCK)
        if is_last_program(tickets + tl.program_id(0), used):
            largest, all_total, all_sums = merge_partials(parts, statistics, used, 1, VALUE_BLOCK, TOGETHER)
            store_result(
                result, logs, sinks, value_scales, value_scale, largest, all_total, all_sums, batch, head, key_heads, 0,
                sink_stride, value_scale_stride, 1, 1, VALUE_DIM, HAS_SINKS, HAS_VALUE_SCALES, 1, VALUE_BLOCK,
            )  # fmt: skip


@triton.jit
def decode_kernel(
    query, keys, values, lengths, pages, sinks, key_scales, value_scales, result, logs, parts, statistics, tickets,
    scale, softcap, key_scale, value_scale, window, capacity, key_heads, row_blocks,
    query_batch, query_head, query_token, query_column, key_batch, key_head, value_batch, value_head,
    length_stride, page_batch, sink_stride, key_scale_stride, value_scale_stride,
    GROUP: tl.constexpr, NEW: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PAGE: tl.constexpr,
    KEY_PAGE: tl.constexpr, KEY_TOKEN: tl.constexpr, KEY_STEP: tl.constexpr,
    VALUE_PAGE: tl.constexpr, VALUE_TOKEN: tl.constexpr, VALUE_STEP: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_KEY_SCALES: tl.constexpr,
    HAS_VALUE_SCALES: tl.constexpr, IN_PARTS: tl.constexpr, EIGHT: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, HELD: tl.constexpr, BLOCK: tl.constexpr, DIM_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr,
    TOGETHER: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Several queries, by products of matrices.

    EIGHT: keys and values are of 8 bits, and come as pairs, see `decode_eight`. Then `asked`, `keys` and `sums` are of
    even columns, and those of odd ones are summed apart.
    """
    block, program = tl.program_id(0) % row_blocks, tl.program_id(0) // row_blocks
    batch, head = (program // key_heads).to(tl.int64), (program % key_heads).to(tl.int64)
    length = tl.load(lengths + batch * length_stride).to(tl.int32)
    row = block * ROWS + tl.arange(0, ROWS)
    is_row = row < GROUP * NEW
    token = row % NEW
    column = tl.arange(0, DIM_BLOCK)
    asked = query + batch * query_batch + (head * GROUP + row // NEW) * query_head + token.to(tl.int64) * query_token
    asked = asked[:, None] + (column * query_column)[None, :]
    asked = tl.load(asked, mask=is_row[:, None] & (column < DIM)[None, :], other=0.0)
    first, end, used = split_range(length, capacity, window, NEW, HAS_WINDOW, PAGE, BLOCK)
    if tl.program_id(1) >= used:
        return
    # in 16 bits where queries are of 16 bits and the cache of the same or of 8, which float16 holds exactly
    ASKED: tl.constexpr = query.dtype.element_ty
    IS_EIGHT: tl.constexpr = EIGHT is not None or keys.dtype.element_ty.primitive_bitwidth == 8
    NARROW: tl.constexpr = ASKED.primitive_bitwidth == 16 and (IS_EIGHT or keys.dtype.element_ty == ASKED)
    WORK: tl.constexpr = tl.float32 if not NARROW else tl.float16 if IS_EIGHT else ASKED
    # powers are up to 2**LIFT, as float16 has nothing between 0 and 2**-24
    LIFT: tl.constexpr = 14.0 if tl.float16 == WORK else 0.0
    IN_ONE: tl.constexpr = 1 if EIGHT is None else 2
    NOTHING: tl.constexpr = 0.0 if EIGHT is None else 0
    scale, softcap = tl.cast(scale, tl.float32), tl.cast(softcap, tl.float32)
    scale *= tl.cast(key_scale, tl.float32)
    if HAS_KEY_SCALES:
        scale *= tl.load(key_scales + head * key_scale_stride).to(tl.float32)
    if tl.float16 == WORK and tl.bfloat16 == ASKED:
        asked, up = scale_to_float16(asked)
        scale = (scale * up)[:, None]
    asked = asked.to(WORK)
    asked_odd = asked
    if EIGHT is not None:
        asked, asked_odd = tl.split(tl.reshape(asked, (ROWS, DIM_BLOCK // 2, 2)))
    last = length - NEW + token  # what each query is the token after
    maximum = tl.full((ROWS,), LOWEST, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    sums = tl.zeros((ROWS, VALUE_BLOCK // IN_ONE), tl.float32)
    sums_odd = tl.zeros((ROWS, VALUE_BLOCK // IN_ONE), tl.float32)
    keys += assume_multiple(head * key_head, WIDTH)
    values += assume_multiple(head * value_head, WIDTH)
    table = pages + batch * page_batch
    if PAGE == 0:
        keys += assume_multiple(batch * key_batch, WIDTH)
        values += assume_multiple(batch * value_batch, WIDTH)
    key_offsets = block_offsets(KEY_TOKEN, KEY_STEP, PAGE, BLOCK, DIM_BLOCK // IN_ONE)
    value_offsets = block_offsets(VALUE_TOKEN, VALUE_STEP, PAGE, BLOCK, VALUE_BLOCK // IN_ONE)
    is_key_column = (tl.arange(0, DIM_BLOCK // IN_ONE) < DIM // IN_ONE)[None, :]
    is_value_column = (tl.arange(0, VALUE_BLOCK // IN_ONE) < VALUE_DIM // IN_ONE)[None, :]
    own = tl.arange(0, BLOCK)
    end = prefetch_pages(table, first, end, PAGE, BLOCK)
    page = load_pages(table, first, end, PAGE, BLOCK)
    for at in tl.range(first, end, BLOCK, num_stages=STAGES):
        inside = own < end - at
        place = block_pointers(keys, page, at, KEY_TOKEN, KEY_PAGE, PAGE, BLOCK)
        some = tl.load(place + key_offsets, mask=inside[:, None] & is_key_column, other=NOTHING)
        place = block_pointers(values, page, at, VALUE_TOKEN, VALUE_PAGE, PAGE, BLOCK)
        given = tl.load(place + value_offsets, mask=inside[:, None] & is_value_column, other=NOTHING)
        page = load_pages(table, at + BLOCK, end, PAGE, BLOCK)  # ahead: loads of the next block wait for it
        if EIGHT is None:
            products = tl.dot(asked, tl.trans(some.to(WORK)), input_precision="ieee")
        else:
            even, odd = unpack_fp8_pairs(some, EIGHT)
            products = tl.dot(asked_odd, tl.trans(odd), tl.dot(asked, tl.trans(even)))
        seen = inside[None, :]
        if NEW > 1:
            seen = seen & (own[None, :] <= last[:, None] - at)
        if HAS_WINDOW:
            seen = seen & (own[None, :] >= last[:, None] - window - at)
        score = tl.where(seen, base2_scores(products, scale, softcap, HAS_SOFTCAP), float("-inf"))
        larger = tl.maximum(maximum, tl.max(score, 1))
        power, shrink = tl.exp2(score - (larger - LIFT)[:, None]), tl.exp2(maximum - larger)
        total = total * shrink + tl.sum(power, 1)
        power = power.to(WORK)
        if EIGHT is None:
            sums = tl.dot(power, given.to(WORK), sums * shrink[:, None], input_precision="ieee")
        else:
            even, odd = unpack_fp8_pairs(given, EIGHT)
            sums = tl.dot(power, even, sums * shrink[:, None])
            sums_odd = tl.dot(power, odd, sums_odd * shrink[:, None])
        maximum = larger
    if EIGHT is not None:
        sums = tl.reshape(tl.join(sums, sums_odd), (ROWS, VALUE_BLOCK))
    if LIFT > 0.0:
        lowered = tl.exp2(tl.zeros_like(total) - LIFT)
        total *= lowered
        sums *= lowered[:, None]
    if not IN_PARTS or used == 1:
        store_result(
            result, logs, sinks, value_scales, value_scale, maximum, total, sums, batch, head, key_heads, block * ROWS,
            sink_stride, value_scale_stride, GROUP, NEW, VALUE_DIM, HAS_SINKS, HAS_VALUE_SCALES, ROWS, VALUE_BLOCK,
        )  # fmt: skip
    else:
        store_partial(parts, statistics, maximum, total, sums, ROWS, HELD, VALUE_BLOCK)
        if is_last_program(tickets + tl.program_id(0), used):
            all_maximum, all_total, all_sums = merge_partials(parts, statistics, used, HELD, VALUE_BLOCK, TOGETHER)
            store_result(
                result, logs, sinks, value_scales, value_scale, all_maximum, all_total, all_sums, batch, head,
                key_heads, block * ROWS, sink_stride, value_scale_stride, GROUP, NEW, VALUE_DIM, HAS_SINKS,
                HAS_VALUE_SCALES, HELD, VALUE_BLOCK,
            )  # fmt: skip


MAX_SPLITS = 512
_MIN_KEYS_OF_SPLIT = 256
"""Of a part, at the least, where a sequence is as long as it can be."""
_FULL_WAVE = 0.95
"""The share of the places for programs on all processors that is to be taken."""
_WAVES = range(4, 9)
"""How many times as many programs as run at a time keep processors busy to the end, where they are more than that."""
_MAX_TILE_ROWS = 32
"""Of a tile, unless `rows` of a configuration says otherwise. Further queries read the keys again, from the cache. With
64 rows Triton takes the asynchronous matrix instructions of Hopper, for which Triton 3.6 is known to forget to wait."""
_MERGED_ELEMENTS = 2048
"""Numbers of parts that a warp loads at a time, to add them up: 64 of each thread."""


def decode_attention(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, lengths: Tensor, pages: Tensor | None, scale: float,
    window: int, softcap: float, sinks: Tensor | None, key_scale: float, key_scales: Tensor | None,
    value_scale: float, value_scales: Tensor | None, *, config: dict[str, Any] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The result and the logarithms of the sums of exponentials. Copies nothing, whatever the strides.

    A negative `window` and a softcap of 0 stand for none. With `splits` in `config` there are as many parts.
    """
    batch, heads, new, dim = query.shape
    value_dim = value_cache.shape[-1]
    result = torch.empty((batch, heads, new, value_dim), dtype=query.dtype, device=query.device)
    logs = torch.empty((batch, heads, new), dtype=torch.float32, device=query.device)
    if pages is None:
        (key_heads, capacity), page = key_cache.shape[1:3], 0
        outer, head_dim, token_dim = 0, 1, 2
    else:
        page, key_heads = key_cache.shape[1:3]
        outer, head_dim, token_dim = 0, 2, 1
        capacity = pages.shape[1] * page
    group = heads // max(key_heads, 1)
    if not batch * heads * new:
        return result, logs
    in_group, size, eight = group * new, key_cache.element_size(), key_cache.element_size() == 1
    narrow = query.dtype != torch.float32 and (eight or key_cache.dtype == query.dtype)
    # numbers of 8 bits take less to be made numbers of 16, and to be multiplied by matrix units, than to be made of 32
    alone = in_group == 1 and not (eight and narrow)
    config = config or _tuned_decode(alone, page > 0, dim * size, query.device)
    config = config or decode_heuristic(dim, value_dim, size, alone, in_group > 16)
    block, warps, tile = config["block"], config["warps"], 1
    pairs = as_fp8_pairs(key_cache, value_cache) if eight and narrow else None
    if not alone and not narrow:
        # products in float32 are not for matrix units, and threads have no registers for larger ones
        block, warps, tile = 16, 8, 16
    elif not alone:
        tile = max(16, min(next_power_of_2(in_group), config.get("rows", _MAX_TILE_ROWS)))
        if eight and pairs is None:  # bytes one by one take registers
            block = min(block, 32)
    key_cache, value_cache, of_pairs = pairs or (key_cache, value_cache, None)
    dim_block, value_block = (max(16 if pairs is None else 32, next_power_of_2(one)) for one in (dim, value_dim))
    held = min(next_power_of_2(in_group), tile)
    row_blocks = triton.cdiv(in_group, tile)
    programs = batch * key_heads * row_blocks
    places = config["programs"] * processors(query.device)
    splits = config.get("splits") or _choose_splits(programs, places, capacity // max(_MIN_KEYS_OF_SPLIT, block))
    together = max(1, min(next_power_of_2(splits), _MERGED_ELEMENTS * warps // (held * value_block)))
    parts, statistics, counted = logs, logs, lengths
    if splits > 1:
        parts = torch.empty((programs, splits, held, value_block), dtype=torch.float32, device=query.device)
        statistics = torch.empty((programs, splits, 2, held), dtype=torch.float32, device=query.device)
        counted = grid_counters(programs, query.device)
    caches = (key_cache, value_cache)
    strides = [cache.stride(dimension) for cache in caches for dimension in (outer, head_dim)]
    steps = [
        (cache.stride(outer) if page else 0, cache.stride(token_dim), cache.stride(3)) for cache in caches
    ]  # fmt: skip
    options = sinks is not None, key_scales is not None, value_scales is not None
    scale_strides = [0 if one is None else one.stride(0) for one in (sinks, key_scales, value_scales)]
    launch(
        decode_row_kernel if alone else decode_kernel, (programs, splits, 1),
        query, *caches, lengths, lengths if pages is None else pages,
        *(logs if one is None else one for one in (sinks, key_scales, value_scales)), result, logs, parts, statistics,
        counted, scale, softcap, key_scale, value_scale, window, capacity, key_heads, row_blocks,
        *query.stride(), *strides, lengths.stride(0), 0 if pages is None else pages.stride(0), *scale_strides,
        group, new, dim, value_dim, page, *steps[0], *steps[1], window >= 0, softcap > 0.0, *options, splits > 1,
        of_pairs, common_width(*strides), tile, held, block, dim_block, value_block, together, config["stages"],
        warps=warps, stages=config["stages"], registers=_max_registers(warps, config["programs"]) if narrow else None,
    )  # fmt: skip
    return result, logs


def _max_registers(warps: int, programs: int) -> int | None:
    """What a thread may have, so that as many programs run at a time on a processor as parts were counted for."""
    most = 65536 // (32 * warps * programs) // 8 * 8
    return most if most < 255 else None


def _tuned_decode(alone: bool, paged: bool, size: int, device: torch.device) -> dict[str, Any] | None:
    """What was measured for keys of so many bytes."""
    if alone:
        return tuned("decode_row_paged", size, device) if paged else tuned("decode_row", size, device)
    return tuned("decode_paged", size, device) if paged else tuned("decode", size, device)


@functools.lru_cache(maxsize=4096)
def _choose_splits(programs: int, places: int, most: int) -> int:
    """How many parts the keys of a sequence have, where so many programs run at a time in all `places`.

    So many that all run at the same time, and no place is empty. Where these are too unlike numbers for that, as few as
    take several rounds, the last of them almost full. From what the host knows: the lengths are on the device, and a
    CUDA graph is for all of them.
    """
    most = max(1, min(most, MAX_SPLITS))
    once = min(places // programs, most)
    if once == most or once * programs >= _FULL_WAVE * places:
        return once
    found, best = max(once, 1), 0.0
    for parts in range(1, most + 1):
        rounds = triton.cdiv(programs * parts, places)
        taken = programs * parts / (rounds * places)
        if rounds in _WAVES and taken > best:
            found, best = parts, taken
        if rounds >= _WAVES.stop or best >= _FULL_WAVE:
            break
    return found


def decode_heuristic(dim: int, value_dim: int, element_bytes: int, alone: bool, many: bool) -> dict[str, Any]:
    """What to launch with where nobody measured: blocks of up to 32 KiB of keys and as much of values, of which a
    processor has three to six, some in use and the others on their way. One query sees a head of keys `alone`, or
    `many` do."""
    width = max(16, next_power_of_2(max(dim, value_dim)))
    whole = element_bytes > 1 and not alone and not many
    # sums of a query alone are as many as a block of values has numbers, in registers
    block = max(16, min(128, (32768 if whole else 16384) // (width * element_bytes), 8192 // width if alone else 128))
    stages, programs = 4, 2
    if whole:  # one program, so that there are few parts to put together
        stages, programs = 3, 1
    elif many:  # and their sums take memory too
        stages = 3
    elif element_bytes == 1 and not alone:  # more instructions by byte, and so more warps to hide how long these take
        stages, programs = 3, 3
    return {"block": block, "warps": 8 if alone else 4, "stages": stages, "programs": programs}


def decode_candidates(size: int, alone: bool = False, paged: bool = False) -> list[dict[str, Any]]:
    """Configurations worth measuring for keys of so many bytes."""
    found: list[dict[str, Any]] = []
    for block in (16, 32, 64, 128):
        for warps in (2, 4, 8):
            for stages, programs in ((3, 1), (3, 2), (3, 3), (4, 1), (4, 2), (4, 3), (6, 1), (3, 4)):
                moving = 2 * block * size * (stages - 1) * programs
                fits = 96 * 1024 <= moving <= 200 * 1024 and 8192 <= block * size <= 32768
                if fits and (warps == 4 or moving >= 160 * 1024) and (alone or warps <= 4):
                    found.append({"block": block, "warps": warps, "stages": stages, "programs": programs})
    return found
