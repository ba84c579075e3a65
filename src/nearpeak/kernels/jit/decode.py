"""The kernels of `decode_attention`: over parts of the keys for several queries at a time, and over these parts.

All queries of the heads that share keys are rows of one tile, so that each key is read once. A part of the keys leaves
its largest score, its sum of powers and its sum of values in float32; a second kernel adds these up, in the order of
the keys. Where there are heads and sequences enough for all processors, there is one part and no second kernel.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearpeak.kernels.configs import processors, tuned
from nearpeak.kernels.jit.decode_row import (
    decode_row_kernel,
    in_base_2,
    log_of_sum,
    one_over,
    own_keys,
    page_of,
    rows_at,
    with_sink,
)
from nearpeak.kernels.jit.launch import launch, next_power_of_2
from nearpeak.kernels.jit.rows import LOWEST, common_width, multiple

MOST_SPLITS = 512
_LEAST_KEYS = 256
"""Of a part, at the least, where a sequence is as long as it can be."""
_ROUNDS = 4
"""How many times as many programs as run at a time are enough to keep processors busy to the end."""
_MOST_ROWS = 32
"""Of a tile, unless `rows` of a configuration says otherwise. Further queries read the keys again, from the cache. With
64 rows Triton takes the asynchronous matrix instructions of Hopper, for which Triton 3.6 is known to forget to wait."""
_TOGETHER = 16
"""Parts that the second kernel holds at a time."""


@triton.jit
def decode_kernel(
    query, keys, values, lengths, pages, sinks, key_scales, value_scales, result, logs, parts, statistics,
    scale, softcap, key_scale, value_scale, window, capacity, key_heads, row_blocks, rows,
    query_batch, query_head, query_token, query_column, key_batch, key_token, key_head,
    value_batch, value_token, value_head, length_stride, page_batch, sink_stride, key_scale_stride, value_scale_stride,
    GROUP: tl.constexpr, NEW: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PAGE: tl.constexpr,
    KEY_STEP: tl.constexpr, VALUE_STEP: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_KEY_SCALES: tl.constexpr, HAS_VALUE_SCALES: tl.constexpr, IN_PARTS: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, DIM_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Several queries, by products of matrices."""
    block, program = tl.program_id(0) % row_blocks, tl.program_id(0) // row_blocks
    batch, head = (program // key_heads).to(tl.int64), (program % key_heads).to(tl.int64)
    length = tl.load(lengths + batch * length_stride).to(tl.int32)
    first, end = own_keys(length, capacity, window, NEW, HAS_WINDOW, BLOCK)
    row = block * ROWS + tl.arange(0, ROWS)
    is_row = row < GROUP * NEW
    token = row % NEW
    query_heads = head * GROUP + row // NEW
    maximum = tl.full((ROWS,), LOWEST, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    sums = tl.zeros((ROWS, VALUE_BLOCK), tl.float32)
    column, value_column = tl.arange(0, DIM_BLOCK), tl.arange(0, VALUE_BLOCK)
    scale, softcap = tl.cast(scale, tl.float32), tl.cast(softcap, tl.float32)
    scale *= tl.cast(key_scale, tl.float32)
    if HAS_KEY_SCALES:
        scale *= tl.load(key_scales + head * key_scale_stride).to(tl.float32)
    asked = query + batch * query_batch + query_heads * query_head + token.to(tl.int64) * query_token
    asked = asked[:, None] + (column * query_column)[None, :]
    asked = tl.load(asked, mask=(is_row & (first < end))[:, None] & (column < DIM)[None, :], other=0.0)
    last = length - NEW + token  # what each query is the token after
    keys += multiple(head * key_head, WIDTH) + (column * KEY_STEP)[None, :]
    values += multiple(head * value_head, WIDTH) + (value_column * VALUE_STEP)[None, :]
    table = pages + batch * page_batch
    if PAGE == 0:
        keys += multiple(batch * key_batch, WIDTH)
        values += multiple(batch * value_batch, WIDTH)
    # in 16 bits where queries are of 16 bits and the cache of the same or of 8, which these hold exactly
    narrow: tl.constexpr = (keys.dtype.element_ty.primitive_bitwidth == 8) or (
        keys.dtype.element_ty == query.dtype.element_ty
    )
    work: tl.constexpr = query.dtype.element_ty if narrow else tl.float32
    asked = asked.to(work)
    for at in tl.range(first, end, BLOCK, num_stages=STAGES):
        key = at + tl.arange(0, BLOCK)
        inside = key < end
        page = 0
        if PAGE > 0:
            page = page_of(table, at, key, inside, PAGE, BLOCK)
        place = rows_at(page, at, key, key_batch, key_token, PAGE, BLOCK, WIDTH)
        some = tl.load(keys + place[:, None], mask=inside[:, None] & (column < DIM)[None, :], other=0.0)
        place = rows_at(page, at, key, value_batch, value_token, PAGE, BLOCK, WIDTH)
        here = inside[:, None] & (value_column < VALUE_DIM)[None, :]
        given = tl.load(values + place[:, None], mask=here, other=0.0)
        products = tl.dot(asked, tl.trans(some.to(work)), input_precision="ieee")
        seen = inside[None, :] & (key[None, :] <= last[:, None])
        if HAS_WINDOW:
            seen = seen & (key[None, :] >= last[:, None] - window)
        score = tl.where(seen, in_base_2(products, scale, softcap, HAS_SOFTCAP), float("-inf"))
        larger = tl.maximum(maximum, tl.max(score, 1))
        power, shrink = tl.exp2(score - larger[:, None]), tl.exp2(maximum - larger)
        total = total * shrink + tl.sum(power, 1)
        sums = tl.dot(power.to(work), given.to(work), sums * shrink[:, None], input_precision="ieee")
        maximum = larger
    number = (batch * key_heads * GROUP + query_heads) * NEW + token
    known = is_row[:, None] & (value_column < VALUE_DIM)[None, :]
    if IN_PARTS:
        part = number * tl.num_programs(1) + tl.program_id(1)
        tl.store(statistics + part, maximum, mask=is_row)
        tl.store(statistics + rows * tl.num_programs(1) + part, total, mask=is_row)
        if first < end:
            tl.store(parts + part[:, None] * VALUE_DIM + value_column[None, :], sums, mask=known)
    else:
        if HAS_SINKS:
            larger, total = with_sink(
                maximum, total, tl.load(sinks + query_heads * sink_stride, mask=is_row, other=0.0)
            )
            sums *= tl.exp2(maximum - larger)[:, None]
            maximum = larger
        factor = tl.cast(value_scale, tl.float32) * one_over(total)
        if HAS_VALUE_SCALES:
            factor *= tl.load(value_scales + head * value_scale_stride).to(tl.float32)
        found = (sums * factor[:, None]).to(result.dtype.element_ty)
        tl.store(result + number[:, None] * VALUE_DIM + value_column[None, :], found, mask=known)
        tl.store(logs + number, log_of_sum(maximum, total), mask=is_row)


@triton.jit
def combine_kernel(
    parts, statistics, sinks, value_scales, result, logs, value_scale, rows, splits, sink_stride, value_scale_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, NEW: tl.constexpr, VALUE_DIM: tl.constexpr, HAS_SINKS: tl.constexpr,
    HAS_VALUE_SCALES: tl.constexpr, SPLITS: tl.constexpr, TOGETHER: tl.constexpr, VALUE_BLOCK: tl.constexpr,
):  # fmt: skip
    """The parts of a row added up, in their order. Those without keys left a sum of 0, and no values."""
    row = tl.program_id(0).to(tl.int64)
    every = tl.arange(0, SPLITS)
    maxima = tl.load(statistics + row * splits + every, mask=every < splits, other=LOWEST)
    totals = tl.load(statistics + (rows + row) * splits + every, mask=every < splits, other=0.0)
    maximum = tl.max(maxima, 0)
    total = tl.sum(totals * tl.exp2(maxima - maximum), 0)
    column = tl.arange(0, VALUE_BLOCK)
    sums = tl.zeros((VALUE_BLOCK,), tl.float32)
    for first in range(0, splits, TOGETHER):
        part = first + tl.arange(0, TOGETHER)
        exists = part < splits
        some = row * splits + part
        # once more, from the cache: a program has no way to take a few of the numbers that it holds
        used = tl.load(statistics + rows * splits + some, mask=exists, other=0.0) > 0.0
        shrink = tl.exp2(tl.load(statistics + some, mask=used, other=LOWEST) - maximum)
        shrink = tl.where(used, shrink, 0.0)
        given = tl.load(
            parts + some[:, None] * VALUE_DIM + column[None, :],
            mask=used[:, None] & (column < VALUE_DIM)[None, :], other=0.0,
        )  # fmt: skip
        sums += tl.sum(given * shrink[:, None], 0)
    head = row // NEW % HEADS
    if HAS_SINKS:
        larger, total = with_sink(maximum, total, tl.load(sinks + head * sink_stride))
        sums *= tl.exp2(maximum - larger)
        maximum = larger
    factor = tl.cast(value_scale, tl.float32) * one_over(total)
    if HAS_VALUE_SCALES:
        factor *= tl.load(value_scales + head // GROUP * value_scale_stride).to(tl.float32)
    tl.store(result + row * VALUE_DIM + column, (sums * factor).to(result.dtype.element_ty), mask=column < VALUE_DIM)
    tl.store(logs + row, log_of_sum(maximum, total))


def forward(
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
        (key_heads, capacity), page, order = key_cache.shape[1:3], 0, (0, 2, 1)
    else:
        page, key_heads, order = key_cache.shape[1], key_cache.shape[2], (0, 1, 2)
        capacity = pages.shape[1] * page
    group = heads // max(key_heads, 1)
    rows = batch * heads * new
    if not rows:
        return result, logs
    in_group = group * new
    alone = in_group == 1
    size = dim * key_cache.element_size()
    config = config or _tuned(alone, page > 0, size, query.device)
    config = config or heuristic(dim, value_dim, key_cache.element_size(), alone, page > 0)
    block, warps = config["block"], config["warps"]
    tile = 1 if alone else max(16, min(next_power_of_2(in_group), config.get("rows", _MOST_ROWS)))
    narrow = key_cache.element_size() == 1 or key_cache.dtype == query.dtype
    if not alone and (query.dtype == torch.float32 or not narrow):
        # products in float32 are not for matrix units, and threads have no registers for larger ones
        block, tile, warps = 16, 16, 8
    row_blocks = triton.cdiv(in_group, tile)
    programs = batch * key_heads * row_blocks
    splits = config.get("splits") or _splits(programs, capacity, block, config["programs"], query.device)
    if splits > 1:
        parts = torch.empty((rows, splits, value_dim), dtype=torch.float32, device=query.device)
        statistics = torch.empty((2, rows, splits), dtype=torch.float32, device=query.device)
    else:
        parts, statistics = logs, logs
    strides = [tensor.stride(dimension) for tensor in (key_cache, value_cache) for dimension in order]
    options = sinks is not None, key_scales is not None, value_scales is not None
    steps = [0 if one is None else one.stride(0) for one in (sinks, key_scales, value_scales)]
    kernel = decode_row_kernel if alone else decode_kernel
    launch(
        kernel, (programs, splits, 1),
        query, key_cache, value_cache, lengths, lengths if pages is None else pages,
        *(logs if one is None else one for one in (sinks, key_scales, value_scales)), result, logs, parts, statistics,
        scale, softcap, key_scale, value_scale, window, capacity, key_heads, row_blocks, rows,
        *query.stride(), *strides, lengths.stride(0), 0 if pages is None else pages.stride(0), *steps,
        group, new, dim, value_dim, page, key_cache.stride(3), value_cache.stride(3), window >= 0, softcap > 0.0,
        *options, splits > 1, common_width(*strides), tile, block, max(16, next_power_of_2(dim)),
        max(16, next_power_of_2(value_dim)), config["stages"], warps=warps, stages=config["stages"],
    )  # fmt: skip
    if splits > 1:
        launch(
            combine_kernel, (rows, 1, 1),
            parts, statistics, *(logs if one is None else one for one in (sinks, value_scales)), result, logs,
            value_scale, rows, splits, steps[0], steps[2], heads, group, new, value_dim, options[0], options[2],
            next_power_of_2(splits), min(next_power_of_2(splits), _TOGETHER), max(16, next_power_of_2(value_dim)),
            warps=4 if value_dim > 64 else 2,
        )  # fmt: skip
    return result, logs


def _tuned(alone: bool, paged: bool, size: int, device: torch.device) -> dict[str, Any] | None:
    """What was measured for keys of so many bytes."""
    if alone:
        return tuned("decode_row_paged", size, device) if paged else tuned("decode_row", size, device)
    return tuned("decode_paged", size, device) if paged else tuned("decode", size, device)


def _splits(programs: int, capacity: int, block: int, wanted: int, device: torch.device) -> int:
    """How many parts the keys of a sequence have, where `wanted` programs run at a time on each processor.

    So many that all run at the same time. Where there are more programs than that in any case, parts are short, so that
    those that run last do not run alone for long. From what the host knows: the lengths are on the device, and a CUDA
    graph is for all of them.
    """
    together = wanted * processors(device)
    parts = together // programs if programs <= together else triton.cdiv(_ROUNDS * together, programs)
    return int(max(1, min(parts, capacity // max(_LEAST_KEYS, block), MOST_SPLITS)))


def heuristic(dim: int, value_dim: int, element_bytes: int, alone: bool, paged: bool) -> dict[str, Any]:
    """What to launch with where nobody measured: blocks of 16 KiB of keys, of which two are on their way."""
    width = max(16, next_power_of_2(max(dim, value_dim)))
    block = max(16, min(64 if width >= 128 else 128, 8192 // width, 16384 // (width * element_bytes)))
    # where a page has to be known first, and products follow, Triton takes two stages more for as many blocks
    stages = 5 if paged and not alone else 4 if element_bytes == 1 else 3
    # what registers and shared memory allow; those of rows by pages are many
    return {"block": block, "warps": 4, "stages": stages, "programs": 2 if paged and alone else 3}


def candidates(size: int, alone: bool = False, paged: bool = False) -> list[dict[str, Any]]:
    """Configurations worth measuring for keys of so many bytes."""
    more = 2 if paged and not alone else 0
    found: list[dict[str, Any]] = []
    for block in (16, 32, 64, 128):
        for warps, stages in ((4, 2), (4, 3), (4, 4), (2, 3), (2, 4), (8, 3)):
            kept = 2 * block * size * stages
            if 8192 <= block * size <= 32768 and kept <= 200 * 1024 and (alone or warps <= 4):
                fixed = {"block": block, "warps": warps, "stages": stages + more}
                found += [{**fixed, "programs": programs} for programs in (2, 4)]
    return found
