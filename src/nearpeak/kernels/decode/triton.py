"""Decode attention and cache append in portable Triton: kernels and launchers.

Append: a program takes some tokens and some heads of the query, the keys or the values. It finds where the tokens go
from the length of their sequence, rotates them, and writes them in the dtype of the cache.

Decode: a program takes a range of the keys of one head and one sequence, for all queries that see them. The range
follows from the length of the sequence, which only the device knows: keys are split evenly among programs, and programs
without keys exit at once. Strides of tokens and pages are constants: most of an address is known at compile time, and
what is left is one 64-bit addition per block, or a product per token if each has a page of its own. If several programs
share a sequence (split-KV), each stores its maximum, its sum of exponentials and its accumulator in float32 and
increments a counter. The last one merges all of them, in the order of the keys: the result does not depend on which
program that is.

There are two kernels: one query per head of keys (a matrix-vector product, not on tensor cores), and several queries
per head of keys, which are rows of one tile, so that each key is read once. In multi-head latent attention values are
the first columns of keys, and read once as well.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearpeak.kernels._runtime.grid_counters import grid_counters, is_last_program
from nearpeak.kernels._runtime.launch import launch, next_power_of_2
from nearpeak.kernels._runtime.policy import INTERPRETED
from nearpeak.kernels._runtime.rows import LOG2_E, LOWEST, assume_multiple, common_width, tanh
from nearpeak.kernels._runtime.tuning import processors
from nearpeak.kernels.decode.tuning import (
    MAX_TILE_ROWS,
    SHARED_ROWS,
    AppendConfig,
    DecodeConfig,
    append_config,
    choose_splits,
    decode_config,
    faster_of,
    shared_config,
    takes_several_waves,
)
from nearpeak.kernels.quantize.triton import CLAMPS
from nearpeak.kernels.rotary import empty_result

_MIN_SPLIT_KEYS = 256
"""The fewest keys of a split, in a sequence that fills the capacity."""
_LEAST_BLOCK = 16
"""Keys: matrix products have no smaller sides."""
_MERGED_ELEMENTS = 2048
"""Elements of partial results that a warp loads at a time to merge them: 64 per thread."""


@triton.jit
def _store_scaled(target, x, factor, mask, LARGEST: tl.constexpr):
    """Stores x * factor; in fp8, clamped to the range of the dtype."""
    x = x.to(tl.float32) * factor
    if CLAMPS and LARGEST > 0.0:
        x = tl.where(x > LARGEST, LARGEST, x)
        x = tl.where(x < -LARGEST, -LARGEST, x)
    tl.store(target, x.to(target.dtype.element_ty), mask=mask)


@triton.jit
def _store_rotated(
    source, target, mask, cosine, sine, factor, LARGEST: tl.constexpr, STEP: tl.constexpr,
    HALF: tl.constexpr, REST: tl.constexpr, INTERLEAVED: tl.constexpr,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr,
):  # fmt: skip
    """Stores heads with the first 2 * HALF elements rotated, and the REST unchanged.

    `source` and `target` are pointers (TOKENS, HEADS, 1), cosine and sine are (TOKENS, 1, BLOCK).
    """
    if HALF > 0:
        if INTERLEAVED:
            column = tl.arange(0, 2 * BLOCK)[None, None, :]
            inside = mask & (column < 2 * HALF)
            x = tl.load(source + column, mask=inside, other=0.0).to(tl.float32)
            even, odd = tl.split(tl.reshape(x, (TOKENS, HEADS, BLOCK, 2)))
            x = tl.join(even * cosine - odd * sine, odd * cosine + even * sine)
            _store_scaled(target + column * STEP, tl.reshape(x, (TOKENS, HEADS, 2 * BLOCK)), factor, inside, LARGEST)
        else:
            column = tl.arange(0, BLOCK)[None, None, :]
            inside = mask & (column < HALF)
            first = tl.load(source + column, mask=inside, other=0.0).to(tl.float32)
            second = tl.load(source + HALF + column, mask=inside, other=0.0).to(tl.float32)
            _store_scaled(target + column * STEP, first * cosine - second * sine, factor, inside, LARGEST)
            _store_scaled(target + (HALF + column) * STEP, second * cosine + first * sine, factor, inside, LARGEST)
    if REST > 0:
        column = tl.arange(0, REST_BLOCK)[None, None, :]
        inside = mask & (column < REST)
        rest = tl.load(source + 2 * HALF + column, mask=inside, other=0.0)
        _store_scaled(target + (2 * HALF + column) * STEP, rest, factor, inside, LARGEST)


@triton.jit
def _inverse_scale(scale, scales, head, mask, stride, HAS_SCALES: tl.constexpr):
    """1 / scale of each head."""
    scale = tl.cast(scale, tl.float32) + tl.zeros(head.shape, tl.float32)
    if HAS_SCALES:
        scale *= tl.load(scales + head * stride, mask=mask, other=1.0).to(tl.float32)
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
    """Some tokens of some heads. The second program index selects heads of the query, then of keys, then of values."""
    # positions of the tokens, (TOKENS, 1, 1), and their angles, (TOKENS, 1, BLOCK)
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None, None]
    is_token = token < tokens
    batch, offset = token // new, token % new
    position = tl.load(lengths + batch * length_stride, mask=is_token, other=0).to(tl.int64) + offset
    cosine, sine = 1.0, 0.0
    if HALF > 0:
        pair = tl.arange(0, BLOCK)[None, None, :]
        # positions beyond the table give NaN, as in `rotary`
        in_table = is_token & (position >= 0) & (position < table_rows) & (pair < HALF)
        pair *= TABLE_STEP
        cosine = tl.load(cosines + position * cosine_token + pair, mask=in_table, other=float("nan")).to(tl.float32)
        sine = tl.load(sines + position * sine_token + pair, mask=in_table, other=float("nan")).to(tl.float32)
    block = tl.program_id(1)
    head_of_block = tl.arange(0, HEADS)[None, :, None]
    if block < query_blocks:
        # the query: rotated into a tensor of its own
        head = block * HEADS + head_of_block
        inside = is_token & (head < heads)
        head = head.to(tl.int64)
        source = assume_multiple(batch * query_batch, WIDTH) + assume_multiple(offset * query_token, WIDTH)
        source += assume_multiple(head * query_head, WIDTH)
        target = assume_multiple(batch * rotated_batch, WIDTH) + assume_multiple(offset * rotated_token, WIDTH)
        target += assume_multiple(head * rotated_head, WIDTH)
        _store_rotated(
            query + source, rotated + target, inside, cosine, sine, 1.0, 0.0, 1,
            HALF, REST, INTERLEAVED, TOKENS, HEADS, BLOCK, REST_BLOCK,
        )  # fmt: skip
    else:
        # where the tokens go in the cache; tokens without a place, or whose page does not exist, are dropped
        fits = is_token & (position >= 0) & (position < capacity)
        outer, inner = batch, position
        if PAGE > 0:
            outer = tl.load(pages + batch * page_batch + position // PAGE, mask=fits, other=-1).to(tl.int64)
            fits = fits & (outer >= 0) & (outer < page_count)
            inner = position % PAGE
        head = (block - query_blocks) % key_blocks * HEADS + head_of_block
        inside = fits & (head < key_heads)
        is_head = head < key_heads
        head = head.to(tl.int64)
        if block < query_blocks + key_blocks:
            source = assume_multiple(batch * key_batch, WIDTH) + assume_multiple(offset * key_token, WIDTH)
            source += assume_multiple(head * key_head, WIDTH)
            target = assume_multiple(outer * keys_batch, WIDTH) + assume_multiple(inner * keys_token, WIDTH)
            target += assume_multiple(head * keys_head, WIDTH)
            factor = _inverse_scale(key_scale, key_scales, head, is_head, key_scale_stride, HAS_KEY_SCALES)
            _store_rotated(
                key + source, keys + target, inside, cosine, sine, factor, LARGEST, KEY_STEP,
                HALF, REST, INTERLEAVED, TOKENS, HEADS, BLOCK, REST_BLOCK,
            )  # fmt: skip
        else:
            source = assume_multiple(batch * value_batch, WIDTH) + assume_multiple(offset * value_token, WIDTH)
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
    key_scales: Tensor | None, value_scale: float, value_scales: Tensor | None, *, config: AppendConfig | None = None,
) -> None:  # fmt: skip
    """Writes keys and values to the caches. Copies them first if their last stride is not 1."""
    _launch_append(
        None, None, key_cache, value_cache, key, value, lengths, pages, cosines, sines, interleaved, rotary_dim,
        key_scale, key_scales, value_scale, value_scales, config,
    )  # fmt: skip


def append_with_query(
    key_cache: Tensor, value_cache: Tensor, key: Tensor, value: Tensor, lengths: Tensor, pages: Tensor | None,
    cosines: Tensor, sines: Tensor, interleaved: bool, rotary_dim: int, key_scale: float,
    key_scales: Tensor | None, value_scale: float, value_scales: Tensor | None, query: Tensor,
    *, config: AppendConfig | None = None,
) -> Tensor:  # fmt: skip
    """Writes keys and values to the caches, and returns the rotated query."""
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
    config: AppendConfig | None,
) -> None:  # fmt: skip
    batch, key_heads, new, dim = key.shape
    if not batch * new:
        return
    key, value = _with_dense_rows(key), _with_dense_rows(value)
    source, target = (key, key) if query is None or rotated is None else (_with_dense_rows(query), rotated)
    cos, sin = (key, key)
    if cosines is not None and sines is not None:
        cos, sin = _with_dense_rows(cosines), _with_dense_rows(sines)
    half = 0 if cosines is None else rotary_dim // 2
    table_step = 2 if interleaved and cos.shape[-1] == rotary_dim else 1
    if pages is None:
        capacity, page, order = key_cache.shape[2], 0, (0, 2, 1)
    else:
        page, order = key_cache.shape[1], (0, 1, 2)
        capacity = pages.shape[1] * page
    strides = [x.stride(dimension) for x in (source, target, key, value) for dimension in (0, 1, 2)]
    strides += [cache.stride(dimension) for cache in (key_cache, value_cache) for dimension in order]
    scale_strides = [0 if scales is None else scales.stride(0) for scales in (key_scales, value_scales)]
    largest = torch.finfo(key_cache.dtype).max if key_cache.element_size() == 1 else 0.0
    config = config or append_config(batch * new, key_heads, dim, key.device)
    query_blocks = 0 if query is None else triton.cdiv(query.shape[1], config.heads)
    key_blocks = triton.cdiv(key_heads, config.heads)
    launch(
        append_kernel, (triton.cdiv(batch * new, config.tokens), query_blocks + 2 * key_blocks, 1),
        source, target, key, value, key_cache, value_cache, lengths, lengths if pages is None else pages, cos, sin,
        *(lengths if scales is None else scales for scales in (key_scales, value_scales)), key_scale, value_scale,
        batch * new, new, source.shape[1], key_heads, query_blocks, key_blocks, capacity, key_cache.shape[0],
        cos.shape[0], *strides, lengths.stride(0), 0 if pages is None else pages.stride(0), cos.stride(0),
        sin.stride(0), *scale_strides, page, half, dim - 2 * half, interleaved, table_step, value.shape[-1],
        key_cache.stride(-1), value_cache.stride(-1), key_scales is not None, value_scales is not None, largest,
        common_width(*strides), config.tokens, config.heads, next_power_of_2(half), next_power_of_2(dim - 2 * half),
        next_power_of_2(value.shape[-1]), warps=config.warps,
    )  # fmt: skip
    for cache in (key_cache, value_cache):
        if not cache.is_inference():
            torch.autograd.graph.increment_version(cache)  # autograd raises if it saved the old contents


def _with_dense_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


_GRAIN = tl.constexpr(16)
_INT32_RANGE = tl.constexpr(2**31)
_INTERPRETED = tl.constexpr(INTERPRETED)
_FP8_DTYPES = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}


@triton.jit
def split_range(
    length, capacity, window, NEW: tl.constexpr, HAS_WINDOW: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The first key of this program, the end of its keys, and how many programs have keys: at least one."""
    # splits begin at multiples of this, so that offsets within a block do not depend on them
    GRAIN: tl.constexpr = BLOCK if PAGE > 0 and PAGE % BLOCK == 0 else PAGE if PAGE > _GRAIN else _GRAIN
    end = tl.minimum(length, capacity)
    begin = tl.zeros_like(end)
    if HAS_WINDOW:
        begin = tl.maximum(length - NEW - window, 0) // GRAIN * GRAIN
    keys = tl.maximum(end - begin, 0)
    splits = tl.num_programs(1)
    size = ((keys + (GRAIN - 1)) // GRAIN + splits - 1) // splits * GRAIN
    size = tl.maximum(size, BLOCK)
    first = begin + tl.program_id(1) * size
    return first, tl.minimum(first + size, end), tl.maximum((keys + size - 1) // size, 1)


@triton.jit
def load_pages(table, first, end, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """The pages of a block of keys: one for all of them if pages consist of blocks."""
    if PAGE == 0:
        page = 0
    elif PAGE % BLOCK == 0:
        page = tl.load(table + first // PAGE, mask=first < end, other=0)
    elif BLOCK % PAGE == 0:
        row = tl.arange(0, BLOCK)
        page = tl.load(table + first // PAGE + row // PAGE, mask=row < end - first, other=0)
    else:
        key = first + tl.arange(0, BLOCK)
        page = tl.load(table + key // PAGE, mask=key < end, other=0)
    return page


@triton.jit
def prefetch_pages(table, first, end, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """The same `end`, available once the pages of the first blocks are in the L1 cache, loaded together.

    Otherwise the first loads wait for the page of the first block, then for that of the second, and so on.
    """
    if PAGE > 0:
        NUMBER: tl.constexpr = 4 if PAGE >= BLOCK else 4 * BLOCK // PAGE if BLOCK % PAGE == 0 else 4 * BLOCK
        entry = first // PAGE + tl.arange(0, NUMBER)
        page = tl.load(table + entry, mask=(first < end) & (entry <= (end - 1) // PAGE), other=0)
        end = tl.where(tl.min(page, 0) == -(2**31), first, end)  # never: no page has this number
    return end


@triton.jit
def block_offsets(
    TOKEN: tl.constexpr, STEP: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr
):
    """Offsets of the elements of a block of keys, (BLOCK, WIDTH): the part that is the same for all blocks."""
    row, column = tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    if BLOCK * TOKEN + WIDTH * STEP >= _INT32_RANGE:
        row, column = row.to(tl.int64), column.to(tl.int64)
    if PAGE == 0 or PAGE % BLOCK == 0:
        rows = row * TOKEN
    elif BLOCK % PAGE == 0:
        rows = row % PAGE * TOKEN
    else:
        rows = row * 0
    return rows[:, None] + (column * STEP)[None, :]


@triton.jit
def block_pointers(
    cache, page, first, TOKEN: tl.constexpr, PAGE_STRIDE: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The pointers to which `block_offsets` are added: one, or (BLOCK, 1)."""
    if PAGE == 0:
        start = cache + tl.cast(first, tl.int64) * TOKEN
    elif PAGE % BLOCK == 0:
        start = cache + page.to(tl.int64) * PAGE_STRIDE + tl.cast(first % PAGE, tl.int64) * TOKEN
    elif BLOCK % PAGE == 0:
        start = cache + (page.to(tl.int64) * PAGE_STRIDE)[:, None]
    else:
        row = (first + tl.arange(0, BLOCK)) % PAGE
        start = cache + (page.to(tl.int64) * PAGE_STRIDE + row.to(tl.int64) * TOKEN)[:, None]
    return start


@triton.jit
def base2_scores(products, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """Scores in base 2, from products of queries and keys."""
    if HAS_SOFTCAP:
        capped, _ = tanh(products * (scale / softcap))
        scores = capped * (softcap * LOG2_E)
    else:
        scores = products * (scale * LOG2_E)
    return scores


@triton.jit
def add_sink(maximum, total, sink):
    """The maximum and the sum of exponentials with the score of one more key, in base e."""
    sink = sink.to(tl.float32) * LOG2_E
    new_maximum = tl.maximum(tl.maximum(maximum, sink), LOWEST)
    return new_maximum, total * tl.exp2(maximum - new_maximum) + tl.exp2(sink - new_maximum)


@triton.jit
def log_sum_exp(maximum, total):
    """The log-sum-exp in base e; -inf for an empty sum."""
    return tl.where(total > 0.0, (maximum + tl.log2(total)) / LOG2_E, float("-inf"))


@triton.jit
def reciprocal_or_zero(total):
    """1 / total; 0 for an empty sum, so that the result is 0."""
    return tl.where(total > 0.0, 1.0 / total, 0.0)


@triton.jit
def store_partial(
    partials, statistics, maximum, total, accumulator, ROWS: tl.constexpr, KEPT_ROWS: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
):  # fmt: skip
    """Stores the partial result of this program: the first KEPT_ROWS rows of a tile of ROWS."""
    row, column = tl.arange(0, ROWS), tl.arange(0, VALUE_BLOCK)
    split = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    statistics += split * (2 * KEPT_ROWS)
    tl.store(statistics + row, maximum, mask=row < KEPT_ROWS)
    tl.store(statistics + KEPT_ROWS + row, total, mask=row < KEPT_ROWS)
    pointers = partials + split * (KEPT_ROWS * VALUE_BLOCK) + row[:, None] * VALUE_BLOCK + column[None, :]
    tl.store(pointers, accumulator, mask=(row < KEPT_ROWS)[:, None])


@triton.jit
def merge_partials(
    partials, statistics, used, KEPT_ROWS: tl.constexpr, VALUE_BLOCK: tl.constexpr, TOGETHER: tl.constexpr
):  # fmt: skip
    """The maximum, the sum of exponentials and the accumulator of KEPT_ROWS rows, over `used` splits."""
    row, number, column = tl.arange(0, KEPT_ROWS), tl.arange(0, TOGETHER), tl.arange(0, VALUE_BLOCK)
    first_split = tl.program_id(0).to(tl.int64) * tl.num_programs(1)
    statistics += first_split * (2 * KEPT_ROWS)
    partials += first_split * (KEPT_ROWS * VALUE_BLOCK)
    # (row, split, column): warps have rows of their own, and threads add up what they loaded themselves
    offsets = row[:, None, None] * VALUE_BLOCK + column[None, None, :]
    maximum = tl.full((KEPT_ROWS,), LOWEST, tl.float32)
    total = tl.zeros((KEPT_ROWS,), tl.float32)
    accumulator = tl.zeros((KEPT_ROWS, VALUE_BLOCK), tl.float32)
    for first in tl.range(0, used, TOGETHER, num_stages=1):
        exists = (number < used - first)[None, :]
        split = tl.minimum(first + number, used - 1)  # the last split again, rather than a mask of all elements
        pointers = row[:, None] + (split * (2 * KEPT_ROWS))[None, :]
        maxima = tl.where(exists, tl.load(statistics + pointers), LOWEST)  # (KEPT_ROWS, TOGETHER)
        totals = tl.load(statistics + KEPT_ROWS + pointers)
        some = tl.load(partials + (split * (KEPT_ROWS * VALUE_BLOCK))[None, :, None] + offsets)
        new_maximum = tl.maximum(maximum, tl.max(maxima, 1))
        factors, rescale = tl.where(exists, tl.exp2(maxima - new_maximum[:, None]), 0.0), tl.exp2(maximum - new_maximum)
        total = total * rescale + tl.sum(totals * factors, 1)
        accumulator = accumulator * rescale[:, None] + tl.sum(some * factors[:, :, None], 1)
        maximum = new_maximum
    return maximum, total, accumulator


@triton.jit
def store_result(
    result, lse, sinks, value_scales, value_scale, maximum, total, accumulator, batch, head, key_heads, first_row,
    sink_stride, value_scale_stride, GROUP: tl.constexpr, NEW: tl.constexpr, VALUE_DIM: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_VALUE_SCALES: tl.constexpr, ROWS: tl.constexpr, VALUE_BLOCK: tl.constexpr,
):  # fmt: skip
    """Adds the sinks, normalizes, and stores results and log-sum-exp."""
    row, column = first_row + tl.arange(0, ROWS), tl.arange(0, VALUE_BLOCK)
    is_row = row < GROUP * NEW
    query_head = head * GROUP + row // NEW
    if HAS_SINKS:  # a key without a value
        sink = tl.load(sinks + query_head * sink_stride, mask=is_row, other=0.0)
        new_maximum, total = add_sink(maximum, total, sink)
        accumulator *= tl.exp2(maximum - new_maximum)[:, None]
        maximum = new_maximum
    factor = tl.cast(value_scale, tl.float32) * reciprocal_or_zero(total)
    if HAS_VALUE_SCALES:
        factor *= tl.load(value_scales + head * value_scale_stride).to(tl.float32)
    index = (batch * key_heads * GROUP + query_head) * NEW + row % NEW
    normalized = (accumulator * factor[:, None]).to(result.dtype.element_ty)
    mask = is_row[:, None] & (column < VALUE_DIM)[None, :]
    tl.store(result + index[:, None] * VALUE_DIM + column[None, :], normalized, mask=mask)
    tl.store(lse + index, log_sum_exp(maximum, total), mask=is_row)


@triton.jit
def decode_row_kernel(
    query, keys, values, lengths, pages, sinks, key_scales, value_scales, result, lse, partials, statistics, counters,
    scale, softcap, key_scale, value_scale, window, capacity, key_heads, row_blocks,
    query_batch, query_head, query_token, query_column, key_batch, key_head, value_batch, value_head,
    length_stride, page_batch, sink_stride, key_scale_stride, value_scale_stride,
    GROUP: tl.constexpr, NEW: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PAGE: tl.constexpr,
    KEY_PAGE: tl.constexpr, KEY_TOKEN: tl.constexpr, KEY_STEP: tl.constexpr,
    VALUE_PAGE: tl.constexpr, VALUE_TOKEN: tl.constexpr, VALUE_STEP: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_KEY_SCALES: tl.constexpr,
    HAS_VALUE_SCALES: tl.constexpr, SPLIT: tl.constexpr, FP8: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, KEPT_ROWS: tl.constexpr, BLOCK: tl.constexpr, DIM_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr, TOGETHER: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One query per head of keys.

    Each row of a block has a maximum, a sum and an accumulator of its own, so that threads synchronize once, at the
    end, and not for each block.
    """
    batch, head = (tl.program_id(0) // key_heads).to(tl.int64), (tl.program_id(0) % key_heads).to(tl.int64)
    length = tl.load(lengths + batch * length_stride).to(tl.int32)
    column, value_column = tl.arange(0, DIM_BLOCK), tl.arange(0, VALUE_BLOCK)
    q = query + batch * query_batch + head * query_head + column * query_column
    q = tl.load(q, mask=column < DIM, other=0.0).to(tl.float32)[None, :]  # (1, DIM_BLOCK)
    first, end, used = split_range(length, capacity, window, NEW, HAS_WINDOW, PAGE, BLOCK)
    if tl.program_id(1) >= used:
        return
    maximum = tl.full((BLOCK,), LOWEST, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    accumulator = tl.zeros((BLOCK, VALUE_BLOCK), tl.float32)
    scale, softcap = tl.cast(scale, tl.float32), tl.cast(softcap, tl.float32)
    scale *= tl.cast(key_scale, tl.float32)
    if HAS_KEY_SCALES:
        scale *= tl.load(key_scales + head * key_scale_stride).to(tl.float32)

    # pointers to this head, and sequence
    keys += assume_multiple(head * key_head, WIDTH)
    values += assume_multiple(head * value_head, WIDTH)
    table = pages + batch * page_batch
    if PAGE == 0:
        keys += assume_multiple(batch * key_batch, WIDTH)
        values += assume_multiple(batch * value_batch, WIDTH)
    key_offsets = block_offsets(KEY_TOKEN, KEY_STEP, PAGE, BLOCK, DIM_BLOCK)
    value_offsets = block_offsets(VALUE_TOKEN, VALUE_STEP, PAGE, BLOCK, VALUE_BLOCK)
    row = tl.arange(0, BLOCK)
    end = prefetch_pages(table, first, end, PAGE, BLOCK)
    page = load_pages(table, first, end, PAGE, BLOCK)

    # online softmax, by row
    for start in tl.range(first, end, BLOCK, num_stages=STAGES):
        inside = row < end - start
        pointers = block_pointers(keys, page, start, KEY_TOKEN, KEY_PAGE, PAGE, BLOCK)
        k = tl.load(pointers + key_offsets, mask=inside[:, None] & (column < DIM)[None, :], other=0.0)
        pointers = block_pointers(values, page, start, VALUE_TOKEN, VALUE_PAGE, PAGE, BLOCK)
        value_mask = inside[:, None] & (value_column < VALUE_DIM)[None, :]
        v = tl.load(pointers + value_offsets, mask=value_mask, other=0.0)
        page = load_pages(table, start + BLOCK, end, PAGE, BLOCK)  # ahead: loads of the next block wait for it
        score = base2_scores(tl.sum(k.to(tl.float32) * q, 1), scale, softcap, HAS_SOFTCAP)  # (BLOCK,)
        visible = inside
        if HAS_WINDOW:
            visible = visible & (start + row >= length - 1 - window)
        score = tl.where(visible, score, float("-inf"))
        new_maximum = tl.maximum(maximum, score)
        weight, rescale = tl.exp2(score - new_maximum), tl.exp2(maximum - new_maximum)
        total = total * rescale + weight
        accumulator = accumulator * rescale[:, None] + weight[:, None] * v.to(tl.float32)
        maximum = new_maximum

    # reduce the rows, and then the splits
    row_maximum = tl.max(maximum, 0)
    rescale = tl.exp2(maximum - row_maximum)
    row_total = tl.sum(total * rescale, 0)[None]
    row_accumulator = tl.sum(accumulator * rescale[:, None], 0)[None, :]  # (1, VALUE_BLOCK)
    row_maximum = row_maximum[None]
    if not SPLIT or used == 1:
        store_result(
            result, lse, sinks, value_scales, value_scale, row_maximum, row_total, row_accumulator, batch, head,
            key_heads, 0, sink_stride, value_scale_stride, 1, 1, VALUE_DIM, HAS_SINKS, HAS_VALUE_SCALES, 1, VALUE_BLOCK,
        )  # fmt: skip
    else:
        store_partial(partials, statistics, row_maximum, row_total, row_accumulator, 1, 1, VALUE_BLOCK)
        if is_last_program(counters + tl.program_id(0), used):
            row_maximum, row_total, row_accumulator = merge_partials(
                partials, statistics, used, 1, VALUE_BLOCK, TOGETHER
            )
            store_result(
                result, lse, sinks, value_scales, value_scale, row_maximum, row_total, row_accumulator, batch, head,
                key_heads, 0, sink_stride, value_scale_stride, 1, 1, VALUE_DIM, HAS_SINKS, HAS_VALUE_SCALES, 1,
                VALUE_BLOCK,
            )  # fmt: skip


@triton.jit
def unpack_fp8_pairs(pairs, DTYPE: tl.constexpr):
    """The first and the second element of each pair, in float16, which represents fp8 exactly.

    Keys and values are loaded as pairs of 16 bits: the product of weights and values is over tokens, of which a thread
    needs several for each column, and the instruction that loads these from shared memory takes elements of 16 bits.
    Even and odd columns are multiplied separately. The assembly converts two pairs with two or three instructions;
    Triton takes eight for what the interpreter runs.
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
def powers_for_float16(largest):
    """Powers of 2 to divide rows by, so that their largest numbers fit into float16, and the inverses.

    bfloat16 has a larger range.
    """
    exponent = largest.to(tl.int32, bitcast=True) >> 23
    exponent = tl.minimum(tl.maximum(exponent, 1), 253)
    return (exponent << 23).to(tl.float32, bitcast=True), ((254 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def decode_kernel(
    query, keys, values, lengths, pages, sinks, key_scales, value_scales, result, lse, partials, statistics, counters,
    scale, softcap, key_scale, value_scale, window, capacity, key_heads, row_blocks,
    query_batch, query_head, query_token, query_column, key_batch, key_head, value_batch, value_head,
    length_stride, page_batch, sink_stride, key_scale_stride, value_scale_stride,
    GROUP: tl.constexpr, NEW: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PAGE: tl.constexpr,
    KEY_PAGE: tl.constexpr, KEY_TOKEN: tl.constexpr, KEY_STEP: tl.constexpr,
    VALUE_PAGE: tl.constexpr, VALUE_TOKEN: tl.constexpr, VALUE_STEP: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_KEY_SCALES: tl.constexpr,
    HAS_VALUE_SCALES: tl.constexpr, SPLIT: tl.constexpr, FP8: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, KEPT_ROWS: tl.constexpr, BLOCK: tl.constexpr, DIM_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr, TOGETHER: tl.constexpr, STAGES: tl.constexpr, REST: tl.constexpr,
    REST_BLOCK: tl.constexpr,
):  # fmt: skip
    """Several queries per head of keys: rows of a tile are the new tokens of all heads of queries that share it.

    FP8: keys and values come as pairs of this dtype, see `unpack_fp8_pairs`. Then `q` and `accumulator` have the even
    columns, and `q_odd` and `accumulator_odd` the odd ones.

    REST: values are the first columns of keys, which have so many more, as in multi-head latent attention. What is
    loaded as values is then the first part of keys, `q_rest` are the REST columns of queries, and DIM is VALUE_DIM.
    """
    # the queries of this tile, (ROWS, DIM_BLOCK)
    block, program = tl.program_id(0) % row_blocks, tl.program_id(0) // row_blocks
    batch, head = (program // key_heads).to(tl.int64), (program % key_heads).to(tl.int64)
    length = tl.load(lengths + batch * length_stride).to(tl.int32)
    row = block * ROWS + tl.arange(0, ROWS)
    is_row = row < GROUP * NEW
    token = row % NEW
    column = tl.arange(0, DIM_BLOCK)
    q = query + batch * query_batch + (head * GROUP + row // NEW) * query_head + token.to(tl.int64) * query_token
    q_row = q[:, None]
    q = tl.load(q_row + (column * query_column)[None, :], mask=is_row[:, None] & (column < DIM)[None, :], other=0.0)
    q_rest = q
    if REST > 0:
        rest = tl.arange(0, REST_BLOCK)[None, :]
        q_rest = tl.load(q_row + (DIM + rest) * query_column, mask=is_row[:, None] & (rest < REST), other=0.0)
    first, end, used = split_range(length, capacity, window, NEW, HAS_WINDOW, PAGE, BLOCK)
    if tl.program_id(1) >= used:
        return

    # products are of 16 bits if the query has 16 bits and the cache the same dtype, or fp8, which float16 represents
    QUERY_DTYPE: tl.constexpr = query.dtype.element_ty
    IS_FP8: tl.constexpr = FP8 is not None or keys.dtype.element_ty.primitive_bitwidth == 8
    NARROW: tl.constexpr = QUERY_DTYPE.primitive_bitwidth == 16 and (IS_FP8 or keys.dtype.element_ty == QUERY_DTYPE)
    WORK: tl.constexpr = tl.float32 if not NARROW else tl.float16 if IS_FP8 else QUERY_DTYPE
    # weights are up to 2**LIFT, as float16 has no number between 0 and 2**-24
    LIFT: tl.constexpr = 14.0 if tl.float16 == WORK else 0.0
    PACKED: tl.constexpr = 1 if FP8 is None else 2
    ZERO: tl.constexpr = 0.0 if FP8 is None else 0
    scale, softcap = tl.cast(scale, tl.float32), tl.cast(softcap, tl.float32)
    scale *= tl.cast(key_scale, tl.float32)
    if HAS_KEY_SCALES:
        scale *= tl.load(key_scales + head * key_scale_stride).to(tl.float32)
    if tl.float16 == WORK and tl.bfloat16 == QUERY_DTYPE:
        largest = tl.max(tl.abs(q.to(tl.float32)), 1)
        if REST > 0:
            largest = tl.maximum(largest, tl.max(tl.abs(q_rest.to(tl.float32)), 1))
        up, down = powers_for_float16(largest)
        q = q.to(tl.float32) * down[:, None]
        if REST > 0:
            q_rest = q_rest.to(tl.float32) * down[:, None]
        scale = (scale * up)[:, None]
    q, q_rest = q.to(WORK), q_rest.to(WORK)
    q_odd, q_rest_odd = q, q_rest
    if FP8 is not None:
        q, q_odd = tl.split(tl.reshape(q, (ROWS, DIM_BLOCK // 2, 2)))
        if REST > 0:
            q_rest, q_rest_odd = tl.split(tl.reshape(q_rest, (ROWS, REST_BLOCK // 2, 2)))
    last = length - NEW + token  # the last key that each query sees
    maximum = tl.full((ROWS,), LOWEST, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    accumulator = tl.zeros((ROWS, VALUE_BLOCK // PACKED), tl.float32)
    accumulator_odd = tl.zeros((ROWS, VALUE_BLOCK // PACKED), tl.float32)

    # pointers to this head, and sequence
    keys += assume_multiple(head * key_head, WIDTH)
    values += assume_multiple(head * value_head, WIDTH)
    table = pages + batch * page_batch
    if PAGE == 0:
        keys += assume_multiple(batch * key_batch, WIDTH)
        values += assume_multiple(batch * value_batch, WIDTH)
    key_offsets = block_offsets(KEY_TOKEN, KEY_STEP, PAGE, BLOCK, DIM_BLOCK // PACKED)
    value_offsets = block_offsets(VALUE_TOKEN, VALUE_STEP, PAGE, BLOCK, VALUE_BLOCK // PACKED)
    is_key_column = (tl.arange(0, DIM_BLOCK // PACKED) < DIM // PACKED)[None, :]
    is_value_column = (tl.arange(0, VALUE_BLOCK // PACKED) < VALUE_DIM // PACKED)[None, :]
    rest_offsets = block_offsets(KEY_TOKEN, KEY_STEP, PAGE, BLOCK, REST_BLOCK // PACKED) + DIM // PACKED * KEY_STEP
    is_rest_column = (tl.arange(0, REST_BLOCK // PACKED) < REST // PACKED)[None, :]
    key_row = tl.arange(0, BLOCK)
    end = prefetch_pages(table, first, end, PAGE, BLOCK)
    page = load_pages(table, first, end, PAGE, BLOCK)

    # online softmax
    for start in tl.range(first, end, BLOCK, num_stages=STAGES):
        inside = key_row < end - start
        pointers = block_pointers(keys, page, start, KEY_TOKEN, KEY_PAGE, PAGE, BLOCK)
        k = tl.load(pointers + key_offsets, mask=inside[:, None] & is_key_column, other=ZERO)
        if REST > 0:
            k_rest = tl.load(pointers + rest_offsets, mask=inside[:, None] & is_rest_column, other=ZERO)
            v = k
        else:
            pointers = block_pointers(values, page, start, VALUE_TOKEN, VALUE_PAGE, PAGE, BLOCK)
            v = tl.load(pointers + value_offsets, mask=inside[:, None] & is_value_column, other=ZERO)
        page = load_pages(table, start + BLOCK, end, PAGE, BLOCK)  # ahead: loads of the next block wait for it
        # S = Q K^T, (ROWS, BLOCK)
        if FP8 is None:
            products = tl.dot(q, tl.trans(k.to(WORK)), input_precision="ieee")
            if REST > 0:
                products = tl.dot(q_rest, tl.trans(k_rest.to(WORK)), products, input_precision="ieee")
        else:
            even, odd = unpack_fp8_pairs(k, FP8)
            products = tl.dot(q_odd, tl.trans(odd), tl.dot(q, tl.trans(even)))
            if REST > 0:
                even_rest, odd_rest = unpack_fp8_pairs(k_rest, FP8)
                products = tl.dot(q_rest_odd, tl.trans(odd_rest), tl.dot(q_rest, tl.trans(even_rest), products))
        visible = inside[None, :]
        if NEW > 1:
            visible = visible & (key_row[None, :] <= last[:, None] - start)
        if HAS_WINDOW:
            visible = visible & (key_row[None, :] >= last[:, None] - window - start)
        score = tl.where(visible, base2_scores(products, scale, softcap, HAS_SOFTCAP), float("-inf"))
        # P = exp2(S - maximum)
        new_maximum = tl.maximum(maximum, tl.max(score, 1))
        weight, rescale = tl.exp2(score - (new_maximum - LIFT)[:, None]), tl.exp2(maximum - new_maximum)
        total = total * rescale + tl.sum(weight, 1)
        weight = weight.to(WORK)
        # O += P V
        if FP8 is None:
            accumulator = tl.dot(weight, v.to(WORK), accumulator * rescale[:, None], input_precision="ieee")
        else:
            if REST == 0:
                even, odd = unpack_fp8_pairs(v, FP8)
            accumulator = tl.dot(weight, even, accumulator * rescale[:, None])
            accumulator_odd = tl.dot(weight, odd, accumulator_odd * rescale[:, None])
        maximum = new_maximum
    if FP8 is not None:
        accumulator = tl.reshape(tl.join(accumulator, accumulator_odd), (ROWS, VALUE_BLOCK))
    if LIFT > 0.0:
        lowered = tl.exp2(tl.zeros_like(total) - LIFT)
        total *= lowered
        accumulator *= lowered[:, None]

    # merge the splits
    if not SPLIT or used == 1:
        store_result(
            result, lse, sinks, value_scales, value_scale, maximum, total, accumulator, batch, head, key_heads,
            block * ROWS, sink_stride, value_scale_stride, GROUP, NEW, VALUE_DIM, HAS_SINKS, HAS_VALUE_SCALES, ROWS,
            VALUE_BLOCK,
        )  # fmt: skip
    else:
        store_partial(partials, statistics, maximum, total, accumulator, ROWS, KEPT_ROWS, VALUE_BLOCK)
        if is_last_program(counters + tl.program_id(0), used):
            all_maximum, all_total, all_accumulator = merge_partials(
                partials, statistics, used, KEPT_ROWS, VALUE_BLOCK, TOGETHER
            )
            store_result(
                result, lse, sinks, value_scales, value_scale, all_maximum, all_total, all_accumulator, batch, head,
                key_heads, block * ROWS, sink_stride, value_scale_stride, GROUP, NEW, VALUE_DIM, HAS_SINKS,
                HAS_VALUE_SCALES, KEPT_ROWS, VALUE_BLOCK,
            )  # fmt: skip


def as_fp8_pairs(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, tl.dtype] | None:
    """Both caches as pairs of 16 bits, and their dtype; None if the bytes of a pair are not next to each other."""
    for cache in (keys, values):
        offsets = (cache.shape[-1], cache.storage_offset(), *cache.stride()[:-1])
        if cache.stride(-1) != 1 or cache.data_ptr() % 2 or any(offset % 2 for offset in offsets):
            return None
    return keys.view(torch.int16), values.view(torch.int16), _FP8_DTYPES[keys.dtype]


def decode_attention(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, lengths: Tensor, pages: Tensor | None, scale: float,
    window: int, softcap: float, sinks: Tensor | None, key_scale: float, key_scales: Tensor | None,
    value_scale: float, value_scales: Tensor | None, shared: bool = False, *, config: DecodeConfig | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The result and the log-sum-exp. Nothing is copied, whatever the strides.

    A negative `window` and a softcap of 0 stand for none. `shared`: values are the first columns of keys.
    """
    batch, heads, new, dim = query.shape
    value_dim = value_cache.shape[-1]
    result = torch.empty((batch, heads, new, value_dim), dtype=query.dtype, device=query.device)
    lse = torch.empty((batch, heads, new), dtype=torch.float32, device=query.device)
    if pages is None:
        (key_heads, capacity), page = key_cache.shape[1:3], 0
        head_dim, token_dim = 1, 2
    else:
        page, key_heads = key_cache.shape[1:3]
        head_dim, token_dim = 2, 1
        capacity = pages.shape[1] * page
    group = heads // max(key_heads, 1)
    if not batch * heads * new:
        return result, lse
    rows, element_bytes = group * new, key_cache.element_size()
    is_fp8 = element_bytes == 1
    narrow = query.dtype != torch.float32 and (is_fp8 or key_cache.dtype == query.dtype)
    # fp8 is converted to 16 bits and multiplied on tensor cores in fewer instructions than to 32 bits
    rest = dim - value_dim if shared else 0
    alone = rows == 1 and not (is_fp8 and narrow) and not rest
    # of keys and values that are read
    token_bytes, tokens = (dim + (0 if shared else value_dim)) * element_bytes, capacity
    if window >= 0:
        tokens = min(capacity, window + new)
    if config is None and shared:
        sequences = batch * key_heads * triton.cdiv(rows, SHARED_ROWS)
        most = capacity // _MIN_SPLIT_KEYS
        config = shared_config(dim, element_bytes, narrow, sequences, most, processors(query.device))
    elif config is None:
        sequences, count = batch * key_heads * triton.cdiv(rows, MAX_TILE_ROWS), processors(query.device)
        several = takes_several_waves(sequences, count)
        config = decode_config(dim, value_dim, element_bytes, alone, rows > 16, page > 0, several, query.device)
        if several and config.splits is None and config.block >= 2 * _LEAST_BLOCK:
            most = capacity // max(_MIN_SPLIT_KEYS, config.block)
            config = faster_of((config, config.halved()), sequences, most, token_bytes, tokens, count)
    block, warps, tile = config.block, config.warps, 1
    pairs = as_fp8_pairs(key_cache, value_cache) if is_fp8 and narrow else None
    if not alone and not narrow:
        # products in float32 do not run on tensor cores, and threads have no registers for larger ones
        block, warps, tile = 16, 8, 16
    elif not alone:
        tile = max(16, min(next_power_of_2(rows), config.rows))
        if is_fp8 and pairs is None:  # single bytes take registers
            block = min(block, 32)
    key_cache, value_cache, pair_dtype = pairs or (key_cache, value_cache, None)
    dim -= rest
    dim_block, value_block, rest_block = (
        max(16 if pairs is None else 32, next_power_of_2(size)) for size in (dim, value_dim, rest)
    )
    kept_rows = min(next_power_of_2(rows), tile)
    row_blocks = triton.cdiv(rows, tile)
    programs = batch * key_heads * row_blocks
    slots = config.programs * processors(query.device)
    splits = config.splits or choose_splits(
        programs, slots, capacity // max(_MIN_SPLIT_KEYS, block), tokens * token_bytes,
        config.bytes_in_flight(token_bytes),
    )  # fmt: skip
    together = max(1, min(next_power_of_2(splits), _MERGED_ELEMENTS * warps // (kept_rows * value_block)))
    partials, statistics, counters = lse, lse, lengths  # not used without splits
    if splits > 1:
        partials = torch.empty((programs, splits, kept_rows, value_block), dtype=torch.float32, device=query.device)
        statistics = torch.empty((programs, splits, 2, kept_rows), dtype=torch.float32, device=query.device)
        counters = grid_counters(programs, query.device)
    caches = (key_cache, value_cache)
    strides = [cache.stride(dimension) for cache in caches for dimension in (0, head_dim)]
    steps = [(cache.stride(0) if page else 0, cache.stride(token_dim), cache.stride(3)) for cache in caches]
    optional = (sinks, key_scales, value_scales)
    launch(
        decode_row_kernel if alone else decode_kernel, (programs, splits, 1),
        query, *caches, lengths, lengths if pages is None else pages,
        *(lse if x is None else x for x in optional), result, lse, partials, statistics,
        counters, scale, softcap, key_scale, value_scale, window, capacity, key_heads, row_blocks,
        *query.stride(), *strides, lengths.stride(0), 0 if pages is None else pages.stride(0),
        *(0 if x is None else x.stride(0) for x in optional),
        group, new, dim, value_dim, page, *steps[0], *steps[1], window >= 0, softcap > 0.0,
        *(x is not None for x in optional), splits > 1, pair_dtype, common_width(*strides), tile, kept_rows, block,
        dim_block, value_block, together, config.stages, *(() if alone else (rest, rest_block)),
        warps=warps, stages=config.stages, registers=config.max_registers() if narrow else None,
    )  # fmt: skip
    return result, lse
