"""The kernels of softmax and log-softmax, forward.

A row that fits is held in registers (`tile`). Of a longer one a program reads its part twice (`split`), the second time
backwards, as what was read last is nearest. A row has several parts where there are few rows, or where those at work
would not fit into the cache: their programs tell each other the maximum and the sum of their parts before they write.
On Hopper they may have these in shared memory instead, where nothing is read twice (`parts`).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearpeak.kernels.jit.launch import launch
from nearpeak.kernels.jit.meeting import ALL, FIRST, LAST, PHASES, counters, meet, split, turn
from nearpeak.kernels.jit.rows import LOWEST, as_rows, common_width, exponential, read_again
from nearpeak.kernels.jit.softmax_configs import chosen, chunk_of, heuristic
from nearpeak.kernels.jit.softmax_masks import BOOLEAN, NONE, locate, masked_by


@triton.jit
def seen(row, columns, queries, CAUSAL: tl.constexpr):
    """How many of its first keys a row sees."""
    end = columns
    if CAUSAL:
        end = tl.minimum(tl.maximum((row % queries).to(tl.int32) + (columns - queries + 1), 0), columns)
    return end


@triton.jit
def unseen(PLAIN: tl.constexpr):
    """What stands for what is not loaded: a score of its own, or what any number can be added to."""
    return float("-inf") if PLAIN else 0.0


@triton.jit
def scored(values, mask, step, column, loaded, end, scale, MASK: tl.constexpr, PLAIN: tl.constexpr):
    """scale * x + mask in float32, -inf where a key is not seen."""
    score = values.to(tl.float32)
    if PLAIN:
        return score
    score *= scale
    visible = column < end
    if MASK == 1:
        visible = visible & tl.load(mask + column * step, mask=loaded, other=0)
    if MASK == 2:
        score += tl.load(mask + column * step, mask=loaded, other=0.0).to(tl.float32)
    return tl.where(visible, score, float("-inf"))


@triton.jit
def finished(score, top, total, LOG: tl.constexpr):
    """The result by the maximum and the sum of a row; a row without any key has a sum of 0."""
    if LOG:
        return score - top - tl.log(tl.where(total == 0, 1.0, total))
    return exponential(score - top) * tl.where(total == 0, 0.0, 1.0 / total)


@triton.jit
def tile_kernel(
    x, mask, result, scale, rows, columns, queries, stride, outer, middle, outer_step, middle_step, inner_step, step,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, MASK: tl.constexpr, PLAIN: tl.constexpr,
    CAUSAL: tl.constexpr, LOG: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    scale = tl.cast(scale, tl.float32)
    columns = columns // WIDTH * WIDTH
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    end = seen(row, columns, queries, CAUSAL)
    loaded = column < (end + (WIDTH - 1)) // WIDTH * WIDTH  # whole loads: a part of one would make all of them narrow
    if ROWS > 1:
        loaded = loaded & (row < rows)
    if MASK:
        mask += locate(row, outer, middle, outer_step, middle_step, inner_step, WIDTH)
    values = tl.load(x + row * (stride // WIDTH * WIDTH) + column, mask=loaded, other=unseen(PLAIN))
    score = scored(values, mask, step, column, loaded, end, scale, MASK, PLAIN)
    top = tl.maximum(tl.max(score, 1, keep_dims=True), LOWEST)
    if PACKED:
        score = scored(read_again(values, columns, top), mask, step, column, loaded, end, scale, MASK, PLAIN)
    total = tl.sum(exponential(score - top), 1, keep_dims=True)
    if PACKED:
        score = scored(read_again(values, columns, total), mask, step, column, loaded, end, scale, MASK, PLAIN)
    stored = column < columns
    if ROWS > 1:
        stored = stored & (row < rows)
    value = finished(score, top, total, LOG).to(result.dtype.element_ty)
    tl.store(result + row * columns + column, value, mask=stored)


@triton.jit
def first_chunk(x, begin, end, column, WIDTH: tl.constexpr, PLAIN: tl.constexpr, HINTS: tl.constexpr):
    at = begin // WIDTH * WIDTH + column
    loaded = at < (end + (WIDTH - 1)) // WIDTH * WIDTH
    return tl.load(x + at, mask=loaded, other=unseen(PLAIN), eviction_policy="evict_last" if HINTS else "")


@triton.jit
def statistics(
    x, mask, step, first, begin, end, scale, column,
    STEPS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, MASK: tl.constexpr, PLAIN: tl.constexpr,
    STAGES: tl.constexpr, HINTS: tl.constexpr,
):  # fmt: skip
    """The maximum of the columns from `begin` to `end`, and the sum of the exponentials of what is below it.

    Each column of a chunk has a maximum and a sum of its own, so that threads meet once, after the loop. The `first`
    chunk is at hand.
    """
    reach = (end + (WIDTH - 1)) // WIDTH * WIDTH
    at = begin // WIDTH * WIDTH + column
    score = scored(first, mask, step, at, at < reach, end, scale, MASK, PLAIN)
    top = tl.maximum(tl.max(score, 0), LOWEST)
    total = tl.sum(exponential(score - top[None, :]), 0)
    for start in tl.range(begin + STEPS * BLOCK, end, STEPS * BLOCK, num_stages=STAGES):
        at = start // WIDTH * WIDTH + column
        loaded = at < reach
        values = tl.load(x + at, mask=loaded, other=unseen(PLAIN), eviction_policy="evict_last" if HINTS else "")
        score = scored(values, mask, step, at, loaded, end, scale, MASK, PLAIN)
        higher = tl.maximum(top, tl.max(score, 0))
        total = total * exponential(top - higher) + tl.sum(exponential(score - higher[None, :]), 0)
        top = higher
    highest = tl.max(top, 0)
    return highest, tl.sum(total * exponential(top - highest), 0)


@triton.jit
def write(
    x, mask, step, first, result, begin, end, stop, scale, top, total, column,
    CHUNK: tl.constexpr, WIDTH: tl.constexpr, MASK: tl.constexpr, PLAIN: tl.constexpr, LOG: tl.constexpr,
    STAGES: tl.constexpr, HINTS: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """Writes the columns from `begin` to `stop`, of which those up to `end` are read again, backwards.

    The `first` chunk is at hand if it was KEPT.
    """
    reach = (end + (WIDTH - 1)) // WIDTH * WIDTH
    chunks = (tl.maximum(end - begin, 0) + (CHUNK - 1)) // CHUNK
    if KEPT:
        at = begin // WIDTH * WIDTH + column
        score = scored(read_again(first, stop, total), mask, step, at, at < reach, end, scale, MASK, PLAIN)
        tl.store(result + at, finished(score, top, total, LOG).to(result.dtype.element_ty), mask=at < stop)
        chunks = tl.maximum(chunks, 1)
    for index in tl.range(0, chunks - (1 if KEPT else 0), num_stages=STAGES):
        at = (begin + (chunks - 1 - index) * CHUNK) // WIDTH * WIDTH + column
        loaded = at < reach
        values = tl.load(x + at, mask=loaded, other=unseen(PLAIN), eviction_policy="evict_first" if HINTS else "")
        score = scored(values, mask, step, at, loaded, end, scale, MASK, PLAIN)
        value = finished(score, top, total, LOG).to(result.dtype.element_ty)
        tl.store(result + at, value, mask=at < stop)
    for start in range(begin + chunks * CHUNK, stop, CHUNK):  # after the last key that is seen: nothing to read
        at = start // WIDTH * WIDTH + column
        nothing = tl.full(column.shape, float("-inf") if LOG else 0.0, result.dtype.element_ty)
        tl.store(result + at, nothing, mask=at < stop)


@triton.jit
def split_kernel(
    x, mask, result, partial, counters, scale, rows, columns, queries, stride, outer, middle, outer_step, middle_step,
    inner_step, step, part, parts, PARTS: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
    MASK: tl.constexpr, PLAIN: tl.constexpr, CAUSAL: tl.constexpr, LOG: tl.constexpr, PHASE: tl.constexpr,
    STAGES: tl.constexpr, HINTS: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """One part of one row; a row of one part needs to wait for nobody."""
    scale = tl.cast(scale, tl.float32)
    columns = columns // WIDTH * WIDTH
    number = tl.program_id(0)
    if PARTS > 1:
        number = turn(counters, PHASE)
    row = (number // parts).to(tl.int64)
    begin = number % parts * (part // WIDTH * WIDTH)
    stop = tl.minimum(begin + part // WIDTH * WIDTH, columns)
    end = tl.minimum(seen(row, columns, queries, CAUSAL), stop)
    column = tl.arange(0, STEPS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x += row * (stride // WIDTH * WIDTH)
    if MASK:
        mask += locate(row, outer, middle, outer_step, middle_step, inner_step, WIDTH)
    first = first_chunk(x, begin, end, column, WIDTH, PLAIN, HINTS)
    if PARTS == 1 or PHASE != LAST:
        top, total = statistics(
            x, mask, step, first, begin, end, scale, column, STEPS, BLOCK, WIDTH, MASK, PLAIN, STAGES, HINTS
        )
    if PARTS > 1:
        partial += row * 2 * parts
        if PHASE != LAST:
            tl.store(partial + number % parts, top)
            tl.store(partial + parts + number % parts, total)
        if PHASE == ALL:
            meet(counters, row, parts)
        if PHASE != FIRST:
            each = tl.arange(0, PARTS)
            among = each < parts
            tops = tl.load(partial + each, mask=among, other=LOWEST, cache_modifier=".cg")
            totals = tl.load(partial + parts + each, mask=among, other=0.0, cache_modifier=".cg")
            top = tl.max(tops, 0)
            total = tl.sum(totals * exponential(tops - top), 0)
    if PARTS == 1 or PHASE != FIRST:
        write(
            x, mask, step, first, result + row * columns, begin, end, stop, scale, top, total, column,
            STEPS * BLOCK, WIDTH, MASK, PLAIN, LOG, STAGES, HINTS, KEPT,
        )  # fmt: skip


def _forward(
    x: Tensor, mask: Tensor | None, scale: float, causal: bool, dtype: torch.dtype, *, log: bool,
    config: dict[str, Any] | None = None,
) -> Tensor:  # fmt: skip
    """The softmax of the last dimension, contiguous; `x` is copied where its last stride is not 1."""
    result = torch.empty(x.shape, dtype=dtype, device=x.device)
    if not x.numel():
        return result
    flat = as_rows(x)
    rows, columns = flat.shape
    kind, masks, place = (NONE, flat, (1, 1, 0, 0, 0, 0)) if mask is None else masked_by(mask, x)
    queries = x.shape[-2] if causal else 1
    stride = flat.stride(0)
    width = common_width(columns, stride, *place[2:5])
    config = chosen("softmax", rows, columns, x, masked=kind != NONE, config=config)
    warps = config["warps"]
    plain = kind == NONE and not causal and scale == 1.0
    sizes = (rows, columns, queries, stride, *place)
    if config["variant"] == "parts":  # `chosen` knows that it can run
        from nearpeak.kernels.jit import parts_softmax

        if kind == NONE and not causal and parts_softmax.forward(flat, result, scale, config, log=log):
            return result
        config = chosen("softmax", rows, columns, x, masked=kind != NONE, config=heuristic(columns))
        warps = config["warps"]
    if config["variant"] == "tile":
        height, block = config["rows"], triton.next_power_of_2(columns)
        launch(
            tile_kernel, (triton.cdiv(rows, height), 1, 1), flat, masks, result, scale, *sizes,
            height, block, width, kind, plain, causal, log, config["packed"], warps=warps,
        )  # fmt: skip
        return result
    constants = (*chunk_of(config, x, bytewise=kind == BOOLEAN), width, kind, plain, causal, log)
    part, parts = split(rows, columns, columns * x.element_size(), x.device, config.get("part"))
    partial, counted = flat, flat
    if parts > 1:
        partial = torch.empty((rows, 2, parts), dtype=torch.float32, device=x.device)
        counted = counters(rows, x.device)
    for phase in PHASES if parts > 1 else PHASES[:1]:
        launch(
            split_kernel, (rows * parts, 1, 1), flat, masks, result, partial, counted, scale, *sizes,
            part, parts, triton.next_power_of_2(parts), *constants, phase,
            config["stages"], config["hints"], config["kept"], warps=warps,
        )  # fmt: skip
    return result


forward = functools.partial(_forward, log=False)
log_forward = functools.partial(_forward, log=True)
