"""The kernels of softmax and log-softmax, backward, from the result and its gradient, in the ways of `softmax`."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearpeak.kernels.jit.launch import launch
from nearpeak.kernels.jit.meeting import ALL, FIRST, LAST, PHASES, counters, meet, split, turn
from nearpeak.kernels.jit.rows import as_rows, common_width, exponential, read_again
from nearpeak.kernels.jit.softmax import seen
from nearpeak.kernels.jit.softmax_configs import chosen, chunk_of, heuristic


@triton.jit
def contribution(gradient, y, LOG: tl.constexpr):
    """What an element adds to the sum over its row. Keys that are not seen have no part in it."""
    gradient, y = gradient.to(tl.float32), y.to(tl.float32)
    if LOG:
        return tl.where(y == float("-inf"), 0.0, gradient)
    return gradient * y


@triton.jit
def combined(gradient, y, total, scale, LOG: tl.constexpr):
    """The gradient of x by the sum over its row."""
    gradient, y = gradient.to(tl.float32), y.to(tl.float32)
    if LOG:
        return tl.where(y == float("-inf"), 0.0, scale * (gradient - exponential(y) * total))
    return scale * y * (gradient - total)


@triton.jit
def tile_kernel(
    gradient, y, result, scale, rows, columns, queries, gradient_stride, y_stride,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, CAUSAL: tl.constexpr, LOG: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    scale = tl.cast(scale, tl.float32)
    columns = columns // WIDTH * WIDTH
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    end = seen(row, columns, queries, CAUSAL)
    loaded = column < (end + (WIDTH - 1)) // WIDTH * WIDTH
    stored = column < columns
    if ROWS > 1:
        loaded = loaded & (row < rows)
        stored = stored & (row < rows)
    gradient += row * (gradient_stride // WIDTH * WIDTH)
    y += row * (y_stride // WIDTH * WIDTH)
    nothing = float("-inf") if LOG else 0.0
    upstream = tl.load(gradient + column, mask=loaded, other=0.0)
    values = tl.load(y + column, mask=loaded, other=nothing)
    if CAUSAL:  # some after the last key that is seen were loaded: their gradient may be anything
        upstream = tl.where(column < end, upstream, 0.0)
    total = tl.sum(contribution(upstream, values, LOG), 1, keep_dims=True)
    if PACKED:
        upstream, values = read_again(upstream, columns, total), read_again(values, columns, total)
    value = combined(upstream, values, total, scale, LOG).to(result.dtype.element_ty)
    tl.store(result + row * columns + column, value, mask=stored)


@triton.jit
def chunk(source, at, reach, other, policy: tl.constexpr):
    return tl.load(source + at, mask=at < reach, other=other, eviction_policy=policy)


@triton.jit
def sum_of(
    gradient, y, first_gradient, first_y, begin, end, column,
    STEPS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, LOG: tl.constexpr,
    STAGES: tl.constexpr, HINTS: tl.constexpr,
):  # fmt: skip
    """The sum over the columns from `begin` to `end`; the first chunk is at hand."""
    reach = (end + (WIDTH - 1)) // WIDTH * WIDTH
    at = begin // WIDTH * WIDTH + column
    total = tl.sum(contribution(tl.where(at < end, first_gradient, 0.0), first_y, LOG), 0)
    again: tl.constexpr = "evict_last" if HINTS else ""
    for start in tl.range(begin + STEPS * BLOCK, end, STEPS * BLOCK, num_stages=STAGES):
        at = start // WIDTH * WIDTH + column
        upstream = chunk(gradient, at, reach, 0.0, again)
        values = chunk(y, at, reach, float("-inf") if LOG else 0.0, again)
        total += tl.sum(contribution(tl.where(at < end, upstream, 0.0), values, LOG), 0)
    return tl.sum(total, 0)


@triton.jit
def write(
    gradient, y, first_gradient, first_y, result, begin, end, stop, scale, total, column,
    CHUNK: tl.constexpr, WIDTH: tl.constexpr, LOG: tl.constexpr, STAGES: tl.constexpr, HINTS: tl.constexpr,
    KEPT: tl.constexpr,
):  # fmt: skip
    """Writes the columns from `begin` to `stop`, of which those up to `end` are read again, backwards.

    The first chunk is at hand if it was KEPT.
    """
    reach = (end + (WIDTH - 1)) // WIDTH * WIDTH
    chunks = (tl.maximum(end - begin, 0) + (CHUNK - 1)) // CHUNK
    if KEPT:
        at = begin // WIDTH * WIDTH + column
        upstream = tl.where(at < end, read_again(first_gradient, stop, total), 0.0)
        value = combined(upstream, read_again(first_y, stop, total), total, scale, LOG)
        tl.store(result + at, value.to(result.dtype.element_ty), mask=at < stop)
        chunks = tl.maximum(chunks, 1)
    last: tl.constexpr = "evict_first" if HINTS else ""
    for index in tl.range(0, chunks - (1 if KEPT else 0), num_stages=STAGES):
        at = (begin + (chunks - 1 - index) * CHUNK) // WIDTH * WIDTH + column
        upstream = chunk(gradient, at, reach, 0.0, last)
        values = chunk(y, at, reach, float("-inf") if LOG else 0.0, last)
        value = combined(tl.where(at < end, upstream, 0.0), values, total, scale, LOG)
        tl.store(result + at, value.to(result.dtype.element_ty), mask=at < stop)
    for start in range(begin + chunks * CHUNK, stop, CHUNK):
        at = start // WIDTH * WIDTH + column
        zero = tl.zeros(column.shape, result.dtype.element_ty)
        tl.store(result + at, zero, mask=at < stop)


@triton.jit
def split_kernel(
    gradient, y, result, partial, counters, scale, rows, columns, queries, gradient_stride, y_stride, part, parts,
    PARTS: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, CAUSAL: tl.constexpr,
    LOG: tl.constexpr, PHASE: tl.constexpr, STAGES: tl.constexpr, HINTS: tl.constexpr,
    KEPT: tl.constexpr,
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
    gradient += row * (gradient_stride // WIDTH * WIDTH)
    y += row * (y_stride // WIDTH * WIDTH)
    at = begin // WIDTH * WIDTH + column
    reach = (end + (WIDTH - 1)) // WIDTH * WIDTH
    first_gradient = chunk(gradient, at, reach, 0.0, "evict_last" if HINTS else "")
    first_y = chunk(y, at, reach, float("-inf") if LOG else 0.0, "evict_last" if HINTS else "")
    if PARTS == 1 or PHASE != LAST:
        total = sum_of(
            gradient, y, first_gradient, first_y, begin, end, column, STEPS, BLOCK, WIDTH, LOG, STAGES, HINTS
        )
    if PARTS > 1:
        partial += row * parts
        if PHASE != LAST:
            tl.store(partial + number % parts, total)
        if PHASE == ALL:
            meet(counters, row, parts)
        if PHASE != FIRST:
            each = tl.arange(0, PARTS)
            total = tl.sum(tl.load(partial + each, mask=each < parts, other=0.0, cache_modifier=".cg"), 0)
    if PARTS == 1 or PHASE != FIRST:
        there = result + row * columns
        write(
            gradient, y, first_gradient, first_y, there, begin, end, stop, scale, total, column,
            STEPS * BLOCK, WIDTH, LOG, STAGES, HINTS, KEPT,
        )  # fmt: skip


def _backward(
    gradient: Tensor, y: Tensor, scale: float, causal: bool, dtype: torch.dtype, *, log: bool,
    config: dict[str, Any] | None = None,
) -> Tensor:  # fmt: skip
    """The gradient of x, contiguous; what has a last stride other than 1 is copied."""
    result = torch.empty(y.shape, dtype=dtype, device=y.device)
    if not y.numel():
        return result
    upstream, values = as_rows(gradient), as_rows(y)
    rows, columns = values.shape
    strides = upstream.stride(0), values.stride(0)
    width = common_width(columns, *strides)
    widest = max(upstream, values, key=Tensor.element_size)
    config = chosen("softmax_backward", rows, columns, widest, masked=False, config=config)
    warps = config["warps"]
    sizes = (rows, columns, y.shape[-2] if causal else 1, *strides)
    if config["variant"] == "parts":  # `chosen` knows that it can run
        from nearpeak.kernels.jit import parts_softmax

        if not causal and parts_softmax.backward(upstream, values, result, scale, config, log=log):
            return result
        guess = heuristic(columns, backward=True)
        config = chosen("softmax_backward", rows, columns, widest, masked=False, config=guess)
        warps = config["warps"]
    if config["variant"] == "tile":
        height = config["rows"]
        launch(
            tile_kernel, (triton.cdiv(rows, height), 1, 1), upstream, values, result, scale, *sizes,
            height, triton.next_power_of_2(columns), width, causal, log, config["packed"], warps=warps,
        )  # fmt: skip
        return result
    constants = (*chunk_of(config, widest), width, causal, log)
    row_bytes = columns * (upstream.element_size() + values.element_size())
    part, parts = split(rows, columns, row_bytes, y.device, config.get("part"))
    partial, counted = values, values
    if parts > 1:
        partial = torch.empty((rows, parts), dtype=torch.float32, device=y.device)
        counted = counters(rows, y.device)
    for phase in PHASES if parts > 1 else PHASES[:1]:
        launch(
            split_kernel, (rows * parts, 1, 1), upstream, values, result, partial, counted, scale, *sizes,
            part, parts, triton.next_power_of_2(parts), *constants, phase,
            config["stages"], config["hints"], config["kept"], warps=warps,
        )  # fmt: skip
    return result


backward = functools.partial(_backward, log=False)
log_backward = functools.partial(_backward, log=True)
