"""Portable Triton kernels of softmax and log-softmax, forward and backward, and their launchers.

A row that fits is in registers (`TileConfig`). Of a longer one a program reads its part twice (`SplitConfig`), the
second time backward, as what was read last is most likely still in the cache. A row has several parts if there are few
rows, or if those in flight would not fit into the cache: their programs exchange the maximum and the sum of their parts
at a barrier before they write. On Hopper, parts may be in shared memory instead, where nothing is read twice:
`softmax.sm90`.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearpeak.kernels._runtime.launch import launch
from nearpeak.kernels._runtime.ring_buffer import RingConfig
from nearpeak.kernels._runtime.row_barrier import (
    ALL,
    FIRST,
    LAST,
    PHASES,
    arrive_and_wait,
    barrier_counters,
    claim_part,
    split_row,
)
from nearpeak.kernels._runtime.rows import (
    LOWEST,
    as_rows,
    common_width,
    exponential,
    merge_dimensions,
    rematerialize,
)
from nearpeak.kernels.softmax.tuning import Config, TileConfig, choose_config, chunk_shape, heuristic

NONE, BOOLEAN, ADDITIVE = 0, 1, 2
MaskStrides = tuple[int, int, int, int, int, int]
"""Rows per outer and per middle step, the strides of outer, middle and inner steps, and that of columns."""


def mask_layout(mask: Tensor, x: Tensor) -> tuple[int, Tensor, MaskStrides]:
    """The kind of a mask, its memory, and the strides by which `mask_offset` finds the mask of a row of `x`.

    A mask is not expanded in memory. It is copied if its columns are not dense, or if more than three strides lead
    through its rows, which takes `x` of five dimensions or more.
    """
    kind = BOOLEAN if mask.dtype == torch.bool else ADDITIVE
    if mask.dim() and mask.shape[-1] > 1 and mask.stride(-1) > 1:
        # without the dimensions that it is expanded in
        mask = mask[tuple(slice(None) if stride else slice(1) for stride in mask.stride())].contiguous()
    expanded = mask.expand(x.shape)
    merged = merge_dimensions(expanded.shape[:-1], expanded.stride()[:-1])
    if len(merged) > 3:
        expanded = expanded.contiguous()
        merged = merge_dimensions(expanded.shape[:-1], expanded.stride()[:-1])
    (_, outer_step), (middle, middle_step), (inner, inner_step) = [(1, 0)] * (3 - len(merged)) + merged
    step = expanded.stride(-1) if expanded.dim() else 0
    return kind, expanded, (middle * inner, inner, outer_step, middle_step, inner_step, step)


@triton.jit
def mask_offset(row, outer, middle, outer_step, middle_step, inner_step, WIDTH: tl.constexpr):
    """The offset at which the mask of a row starts; `outer` and `middle` are rows per step."""
    return (
        row // outer * (outer_step // WIDTH * WIDTH)
        + row % outer // middle * (middle_step // WIDTH * WIDTH)
        + row % middle * (inner_step // WIDTH * WIDTH)
    )


@triton.jit
def visible_keys(row, columns, queries, CAUSAL: tl.constexpr):
    """How many keys a row sees, counted from the first."""
    end = columns
    if CAUSAL:
        end = tl.minimum(tl.maximum((row % queries).to(tl.int32) + (columns - queries + 1), 0), columns)
    return end


@triton.jit
def padding_value(PLAIN: tl.constexpr):
    """The value of elements that are not loaded: -inf as a score, or 0 if a mask is added to it."""
    return float("-inf") if PLAIN else 0.0


@triton.jit
def masked_score(values, mask, step, column, loaded, end, scale, MASK: tl.constexpr, PLAIN: tl.constexpr):
    """scale * x + mask in float32, -inf for keys that are not seen."""
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
def normalize_score(score, top, total, LOG: tl.constexpr):
    """The result, from the maximum and the sum of a row; a row without visible keys has a sum of 0."""
    if LOG:
        return score - top - tl.log(tl.where(total == 0, 1.0, total))
    return exponential(score - top) * tl.where(total == 0, 0.0, 1.0 / total)


@triton.jit
def softmax_tile_kernel(
    x, mask, result, scale, rows, columns, queries, stride, outer, middle, outer_step, middle_step, inner_step, step,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, MASK: tl.constexpr, PLAIN: tl.constexpr,
    CAUSAL: tl.constexpr, LOG: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    scale = tl.cast(scale, tl.float32)
    columns = columns // WIDTH * WIDTH
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # (ROWS, 1)
    column = tl.arange(0, BLOCK)[None, :]  # (1, BLOCK)
    end = visible_keys(row, columns, queries, CAUSAL)
    loaded = column < (end + (WIDTH - 1)) // WIDTH * WIDTH  # whole vectors: part of one would make all loads narrow
    if ROWS > 1:
        loaded = loaded & (row < rows)
    if MASK:
        mask += mask_offset(row, outer, middle, outer_step, middle_step, inner_step, WIDTH)
    values = tl.load(x + row * (stride // WIDTH * WIDTH) + column, mask=loaded, other=padding_value(PLAIN))
    # (ROWS, BLOCK) scores; maximum and sum of each row
    score = masked_score(values, mask, step, column, loaded, end, scale, MASK, PLAIN)
    top = tl.maximum(tl.max(score, 1, keep_dims=True), LOWEST)
    if PACKED:
        score = masked_score(rematerialize(values, columns, top), mask, step, column, loaded, end, scale, MASK, PLAIN)
    total = tl.sum(exponential(score - top), 1, keep_dims=True)
    if PACKED:
        score = masked_score(rematerialize(values, columns, total), mask, step, column, loaded, end, scale, MASK, PLAIN)
    stored = column < columns
    if ROWS > 1:
        stored = stored & (row < rows)
    value = normalize_score(score, top, total, LOG).to(result.dtype.element_ty)
    tl.store(result + row * columns + column, value, mask=stored)


@triton.jit
def load_first_chunk(x, begin, end, column, WIDTH: tl.constexpr, PLAIN: tl.constexpr, HINTS: tl.constexpr):
    position = begin // WIDTH * WIDTH + column
    loaded = position < (end + (WIDTH - 1)) // WIDTH * WIDTH
    return tl.load(x + position, mask=loaded, other=padding_value(PLAIN), eviction_policy="evict_last" if HINTS else "")


@triton.jit
def part_statistics(
    x, mask, step, first, begin, end, scale, column,
    STEPS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, MASK: tl.constexpr, PLAIN: tl.constexpr,
    STAGES: tl.constexpr, HINTS: tl.constexpr,
):  # fmt: skip
    """The maximum m of the columns from `begin` to `end`, and the sum of exp(score - m).

    Each column of a chunk has a maximum and a sum of its own, so that threads reduce once, after the loop. The `first`
    chunk is already in registers.
    """
    reach = (end + (WIDTH - 1)) // WIDTH * WIDTH
    position = begin // WIDTH * WIDTH + column
    score = masked_score(first, mask, step, position, position < reach, end, scale, MASK, PLAIN)
    top = tl.maximum(tl.max(score, 0), LOWEST)
    total = tl.sum(exponential(score - top[None, :]), 0)
    for start in tl.range(begin + STEPS * BLOCK, end, STEPS * BLOCK, num_stages=STAGES):
        position = start // WIDTH * WIDTH + column
        loaded = position < reach
        values = tl.load(
            x + position, mask=loaded, other=padding_value(PLAIN), eviction_policy="evict_last" if HINTS else ""
        )
        score = masked_score(values, mask, step, position, loaded, end, scale, MASK, PLAIN)
        higher = tl.maximum(top, tl.max(score, 0))
        total = total * exponential(top - higher) + tl.sum(exponential(score - higher[None, :]), 0)
        top = higher
    highest = tl.max(top, 0)
    return highest, tl.sum(total * exponential(top - highest), 0)


@triton.jit
def write_part(
    x, mask, step, first, result, begin, end, stop, scale, top, total, column,
    CHUNK: tl.constexpr, WIDTH: tl.constexpr, MASK: tl.constexpr, PLAIN: tl.constexpr, LOG: tl.constexpr,
    STAGES: tl.constexpr, HINTS: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """Writes the columns from `begin` to `stop`, of which those up to `end` are read again, backward.

    The `first` chunk is still in registers if KEPT.
    """
    reach = (end + (WIDTH - 1)) // WIDTH * WIDTH
    chunks = (tl.maximum(end - begin, 0) + (CHUNK - 1)) // CHUNK
    if KEPT:
        position = begin // WIDTH * WIDTH + column
        score = masked_score(
            rematerialize(first, stop, total), mask, step, position, position < reach, end, scale, MASK, PLAIN
        )
        tl.store(
            result + position, normalize_score(score, top, total, LOG).to(result.dtype.element_ty), mask=position < stop
        )
        chunks = tl.maximum(chunks, 1)
    for index in tl.range(0, chunks - (1 if KEPT else 0), num_stages=STAGES):
        position = (begin + (chunks - 1 - index) * CHUNK) // WIDTH * WIDTH + column
        loaded = position < reach
        values = tl.load(
            x + position, mask=loaded, other=padding_value(PLAIN), eviction_policy="evict_first" if HINTS else ""
        )
        score = masked_score(values, mask, step, position, loaded, end, scale, MASK, PLAIN)
        value = normalize_score(score, top, total, LOG).to(result.dtype.element_ty)
        tl.store(result + position, value, mask=position < stop)
    for start in range(begin + chunks * CHUNK, stop, CHUNK):  # after the last visible key: nothing to read
        position = start // WIDTH * WIDTH + column
        hidden = tl.full(column.shape, float("-inf") if LOG else 0.0, result.dtype.element_ty)
        tl.store(result + position, hidden, mask=position < stop)


@triton.jit
def softmax_split_kernel(
    x, mask, result, partial, counters, scale, rows, columns, queries, stride, outer, middle, outer_step, middle_step,
    inner_step, step, part, parts, PARTS: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
    MASK: tl.constexpr, PLAIN: tl.constexpr, CAUSAL: tl.constexpr, LOG: tl.constexpr, PHASE: tl.constexpr,
    STAGES: tl.constexpr, HINTS: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """One part of one row; a row of one part needs no barrier."""
    scale = tl.cast(scale, tl.float32)
    columns = columns // WIDTH * WIDTH
    number = tl.program_id(0)
    if PARTS > 1:
        number = claim_part(counters, PHASE)
    row = (number // parts).to(tl.int64)
    begin = number % parts * (part // WIDTH * WIDTH)
    stop = tl.minimum(begin + part // WIDTH * WIDTH, columns)
    end = tl.minimum(visible_keys(row, columns, queries, CAUSAL), stop)
    column = tl.arange(0, STEPS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]  # (STEPS, BLOCK)
    x += row * (stride // WIDTH * WIDTH)
    if MASK:
        mask += mask_offset(row, outer, middle, outer_step, middle_step, inner_step, WIDTH)
    first = load_first_chunk(x, begin, end, column, WIDTH, PLAIN, HINTS)
    # first pass: maximum and sum of this part
    if PARTS == 1 or PHASE != LAST:
        top, total = part_statistics(
            x, mask, step, first, begin, end, scale, column, STEPS, BLOCK, WIDTH, MASK, PLAIN, STAGES, HINTS
        )
    # exchange them with the other parts of the row
    if PARTS > 1:
        partial += row * 2 * parts
        if PHASE != LAST:
            tl.store(partial + number % parts, top)
            tl.store(partial + parts + number % parts, total)
        if PHASE == ALL:
            arrive_and_wait(counters, row, parts)
        if PHASE != FIRST:
            each = tl.arange(0, PARTS)
            among = each < parts
            tops = tl.load(partial + each, mask=among, other=LOWEST, cache_modifier=".cg")
            totals = tl.load(partial + parts + each, mask=among, other=0.0, cache_modifier=".cg")
            top = tl.max(tops, 0)
            total = tl.sum(totals * exponential(tops - top), 0)
    # second pass: write the result
    if PARTS == 1 or PHASE != FIRST:
        write_part(
            x, mask, step, first, result + row * columns, begin, end, stop, scale, top, total, column,
            STEPS * BLOCK, WIDTH, MASK, PLAIN, LOG, STAGES, HINTS, KEPT,
        )  # fmt: skip


def _forward(
    x: Tensor, mask: Tensor | None, scale: float, causal: bool, dtype: torch.dtype, *, log: bool,
    config: Config | None = None,
) -> Tensor:  # fmt: skip
    """The softmax of the last dimension, contiguous; `x` is copied if its last stride is not 1."""
    result = torch.empty(x.shape, dtype=dtype, device=x.device)
    if not x.numel():
        return result
    flat = as_rows(x)
    rows, columns = flat.shape
    kind, masks, mask_strides = (NONE, flat, (1, 1, 0, 0, 0, 0)) if mask is None else mask_layout(mask, x)
    queries = x.shape[-2] if causal else 1
    stride = flat.stride(0)
    width = common_width(columns, stride, *mask_strides[2:5])
    plain = kind == NONE and not causal and scale == 1.0
    sizes = (rows, columns, queries, stride, *mask_strides)
    config = choose_config("softmax", rows, columns, x, masked=kind != NONE, config=config)
    if isinstance(config, RingConfig):  # `choose_config` knows that it can run
        from nearpeak.kernels.softmax import sm90

        if kind == NONE and not causal and sm90.forward(flat, result, scale, config, log=log):
            return result
        config = choose_config("softmax", rows, columns, x, masked=kind != NONE, config=heuristic(columns))
        assert not isinstance(config, RingConfig)
    if isinstance(config, TileConfig):
        launch(
            softmax_tile_kernel, (triton.cdiv(rows, config.rows), 1, 1), flat, masks, result, scale, *sizes,
            config.rows, triton.next_power_of_2(columns), width, kind, plain, causal, log, config.packed,
            warps=config.warps,
        )  # fmt: skip
        return result
    constants = (*chunk_shape(config, x, bytewise=kind == BOOLEAN), width, kind, plain, causal, log)
    part, parts = split_row(rows, columns, columns * x.element_size(), x.device, config.part)
    partial = counters = flat
    if parts > 1:
        partial = torch.empty((rows, 2, parts), dtype=torch.float32, device=x.device)
        counters = barrier_counters(rows, x.device)
    for phase in PHASES if parts > 1 else PHASES[:1]:
        launch(
            softmax_split_kernel, (rows * parts, 1, 1), flat, masks, result, partial, counters, scale, *sizes,
            part, parts, triton.next_power_of_2(parts), *constants, phase,
            config.stages, config.hints, config.kept, warps=config.warps,
        )  # fmt: skip
    return result


forward = functools.partial(_forward, log=False)
log_forward = functools.partial(_forward, log=True)


@triton.jit
def contribution(gradient, y, LOG: tl.constexpr):
    """What an element adds to the sum over its row: g * y, or g for a logarithm; nothing for keys that are not seen."""
    gradient, y = gradient.to(tl.float32), y.to(tl.float32)
    if LOG:
        return tl.where(y == float("-inf"), 0.0, gradient)
    return gradient * y


@triton.jit
def input_gradient(gradient, y, total, scale, LOG: tl.constexpr):
    """The gradient of x, from the sum over its row."""
    gradient, y = gradient.to(tl.float32), y.to(tl.float32)
    if LOG:
        return tl.where(y == float("-inf"), 0.0, scale * (gradient - exponential(y) * total))
    return scale * y * (gradient - total)


@triton.jit
def softmax_backward_tile_kernel(
    gradient, y, result, scale, rows, columns, queries, gradient_stride, y_stride,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, CAUSAL: tl.constexpr, LOG: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    scale = tl.cast(scale, tl.float32)
    columns = columns // WIDTH * WIDTH
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    end = visible_keys(row, columns, queries, CAUSAL)
    loaded = column < (end + (WIDTH - 1)) // WIDTH * WIDTH
    stored = column < columns
    if ROWS > 1:
        loaded = loaded & (row < rows)
        stored = stored & (row < rows)
    gradient += row * (gradient_stride // WIDTH * WIDTH)
    y += row * (y_stride // WIDTH * WIDTH)
    hidden = float("-inf") if LOG else 0.0
    upstream = tl.load(gradient + column, mask=loaded, other=0.0)
    values = tl.load(y + column, mask=loaded, other=hidden)
    if CAUSAL:  # elements after the last visible key were loaded too, whose gradient may be anything
        upstream = tl.where(column < end, upstream, 0.0)
    total = tl.sum(contribution(upstream, values, LOG), 1, keep_dims=True)
    if PACKED:
        upstream, values = rematerialize(upstream, columns, total), rematerialize(values, columns, total)
    value = input_gradient(upstream, values, total, scale, LOG).to(result.dtype.element_ty)
    tl.store(result + row * columns + column, value, mask=stored)


@triton.jit
def load_chunk(source, position, reach, other, policy: tl.constexpr):
    return tl.load(source + position, mask=position < reach, other=other, eviction_policy=policy)


@triton.jit
def part_sum(
    gradient, y, first_gradient, first_y, begin, end, column,
    STEPS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, LOG: tl.constexpr,
    STAGES: tl.constexpr, HINTS: tl.constexpr,
):  # fmt: skip
    """The sum over the columns from `begin` to `end`; the first chunk is already in registers."""
    reach = (end + (WIDTH - 1)) // WIDTH * WIDTH
    position = begin // WIDTH * WIDTH + column
    total = tl.sum(contribution(tl.where(position < end, first_gradient, 0.0), first_y, LOG), 0)
    again: tl.constexpr = "evict_last" if HINTS else ""
    for start in tl.range(begin + STEPS * BLOCK, end, STEPS * BLOCK, num_stages=STAGES):
        position = start // WIDTH * WIDTH + column
        upstream = load_chunk(gradient, position, reach, 0.0, again)
        values = load_chunk(y, position, reach, float("-inf") if LOG else 0.0, again)
        total += tl.sum(contribution(tl.where(position < end, upstream, 0.0), values, LOG), 0)
    return tl.sum(total, 0)


@triton.jit
def write_part_gradient(
    gradient, y, first_gradient, first_y, result, begin, end, stop, scale, total, column,
    CHUNK: tl.constexpr, WIDTH: tl.constexpr, LOG: tl.constexpr, STAGES: tl.constexpr, HINTS: tl.constexpr,
    KEPT: tl.constexpr,
):  # fmt: skip
    """Writes the columns from `begin` to `stop`, of which those up to `end` are read again, backward.

    The first chunk is still in registers if KEPT.
    """
    reach = (end + (WIDTH - 1)) // WIDTH * WIDTH
    chunks = (tl.maximum(end - begin, 0) + (CHUNK - 1)) // CHUNK
    if KEPT:
        position = begin // WIDTH * WIDTH + column
        upstream = tl.where(position < end, rematerialize(first_gradient, stop, total), 0.0)
        value = input_gradient(upstream, rematerialize(first_y, stop, total), total, scale, LOG)
        tl.store(result + position, value.to(result.dtype.element_ty), mask=position < stop)
        chunks = tl.maximum(chunks, 1)
    last: tl.constexpr = "evict_first" if HINTS else ""
    for index in tl.range(0, chunks - (1 if KEPT else 0), num_stages=STAGES):
        position = (begin + (chunks - 1 - index) * CHUNK) // WIDTH * WIDTH + column
        upstream = load_chunk(gradient, position, reach, 0.0, last)
        values = load_chunk(y, position, reach, float("-inf") if LOG else 0.0, last)
        value = input_gradient(tl.where(position < end, upstream, 0.0), values, total, scale, LOG)
        tl.store(result + position, value.to(result.dtype.element_ty), mask=position < stop)
    for start in range(begin + chunks * CHUNK, stop, CHUNK):
        position = start // WIDTH * WIDTH + column
        zero = tl.zeros(column.shape, result.dtype.element_ty)
        tl.store(result + position, zero, mask=position < stop)


@triton.jit
def softmax_backward_split_kernel(
    gradient, y, result, partial, counters, scale, rows, columns, queries, gradient_stride, y_stride, part, parts,
    PARTS: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, CAUSAL: tl.constexpr,
    LOG: tl.constexpr, PHASE: tl.constexpr, STAGES: tl.constexpr, HINTS: tl.constexpr,
    KEPT: tl.constexpr,
):  # fmt: skip
    """One part of one row; a row of one part needs no barrier."""
    scale = tl.cast(scale, tl.float32)
    columns = columns // WIDTH * WIDTH
    number = tl.program_id(0)
    if PARTS > 1:
        number = claim_part(counters, PHASE)
    row = (number // parts).to(tl.int64)
    begin = number % parts * (part // WIDTH * WIDTH)
    stop = tl.minimum(begin + part // WIDTH * WIDTH, columns)
    end = tl.minimum(visible_keys(row, columns, queries, CAUSAL), stop)
    column = tl.arange(0, STEPS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]  # (STEPS, BLOCK)
    gradient += row * (gradient_stride // WIDTH * WIDTH)
    y += row * (y_stride // WIDTH * WIDTH)
    position = begin // WIDTH * WIDTH + column
    reach = (end + (WIDTH - 1)) // WIDTH * WIDTH
    first_gradient = load_chunk(gradient, position, reach, 0.0, "evict_last" if HINTS else "")
    first_y = load_chunk(y, position, reach, float("-inf") if LOG else 0.0, "evict_last" if HINTS else "")
    # first pass: sum of this part
    if PARTS == 1 or PHASE != LAST:
        total = part_sum(
            gradient, y, first_gradient, first_y, begin, end, column, STEPS, BLOCK, WIDTH, LOG, STAGES, HINTS
        )
    # exchange them with the other parts of the row
    if PARTS > 1:
        partial += row * parts
        if PHASE != LAST:
            tl.store(partial + number % parts, total)
        if PHASE == ALL:
            arrive_and_wait(counters, row, parts)
        if PHASE != FIRST:
            each = tl.arange(0, PARTS)
            total = tl.sum(tl.load(partial + each, mask=each < parts, other=0.0, cache_modifier=".cg"), 0)
    # second pass: write the result
    if PARTS == 1 or PHASE != FIRST:
        write_part_gradient(
            gradient, y, first_gradient, first_y, result + row * columns, begin, end, stop, scale, total, column,
            STEPS * BLOCK, WIDTH, LOG, STAGES, HINTS, KEPT,
        )  # fmt: skip


def _backward(
    gradient: Tensor, y: Tensor, scale: float, causal: bool, dtype: torch.dtype, *, log: bool,
    config: Config | None = None,
) -> Tensor:  # fmt: skip
    """The gradient of x, contiguous, from the result y and its gradient; copies those without a last stride of 1."""
    result = torch.empty(y.shape, dtype=dtype, device=y.device)
    if not y.numel():
        return result
    upstream, values = as_rows(gradient), as_rows(y)
    rows, columns = values.shape
    strides = upstream.stride(0), values.stride(0)
    width = common_width(columns, *strides)
    widest = max(upstream, values, key=Tensor.element_size)
    sizes = (rows, columns, y.shape[-2] if causal else 1, *strides)
    config = choose_config("softmax_backward", rows, columns, widest, masked=False, config=config)
    if isinstance(config, RingConfig):  # `choose_config` knows that it can run
        from nearpeak.kernels.softmax import sm90

        if not causal and sm90.backward(upstream, values, result, scale, config, log=log):
            return result
        guess = heuristic(columns, backward=True)
        config = choose_config("softmax_backward", rows, columns, widest, masked=False, config=guess)
        assert not isinstance(config, RingConfig)
    if isinstance(config, TileConfig):
        launch(
            softmax_backward_tile_kernel, (triton.cdiv(rows, config.rows), 1, 1), upstream, values, result, scale,
            *sizes, config.rows, triton.next_power_of_2(columns), width, causal, log, config.packed,
            warps=config.warps,
        )  # fmt: skip
        return result
    constants = (*chunk_shape(config, widest), width, causal, log)
    row_bytes = columns * (upstream.element_size() + values.element_size())
    part, parts = split_row(rows, columns, row_bytes, y.device, config.part)
    partial = counters = values
    if parts > 1:
        partial = torch.empty((rows, parts), dtype=torch.float32, device=y.device)
        counters = barrier_counters(rows, y.device)
    for phase in PHASES if parts > 1 else PHASES[:1]:
        launch(
            softmax_backward_split_kernel, (rows * parts, 1, 1), upstream, values, result, partial, counters, scale,
            *sizes, part, parts, triton.next_power_of_2(parts), *constants, phase,
            config.stages, config.hints, config.kept, warps=config.warps,
        )  # fmt: skip
    return result


backward = functools.partial(_backward, log=False)
log_backward = functools.partial(_backward, log=True)
