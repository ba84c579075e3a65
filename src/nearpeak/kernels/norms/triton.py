"""Portable Triton kernels of the norms, forward and backward, and their launchers. CENTERED is a LayerNorm.

Forward, by the length of rows:

- tile: a program has one or more whole rows in registers. Every byte moves once.
- split: rows that do not fit into registers. A program reads its part of a row twice, the second time from its end to
  its start, as the end was read last and is most likely still in the L2 cache. A row has enough parts for the rows in
  flight to fit into that cache; their programs exchange statistics at a barrier before they write.
- ring: the same on Hopper, from shared memory, where every byte moves once: `norms.sm90`.

Backward, in one pass, the gradient of rows and partial gradients of weight and bias. Programs sum over their rows in
float32, and a second kernel adds the partial sums in a fixed order, so that results are the same in every run.

- tile: a fixed number of programs, each with whole rows in registers, goes over all rows. Every byte moves once.
- groups: rows that do not fit. A group of programs shares a row and reads it twice: see `backward_shared`.
- ring: the same on Hopper: `norms.sm90`.
- apart: few rows. A program for each row, and others for sums over all rows of a few columns, which read the rows once
  more, in one launch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearpeak.kernels._runtime.gluon import runs_on
from nearpeak.kernels._runtime.launch import can_start_early, launch, next_power_of_2, wait_for_previous
from nearpeak.kernels._runtime.ring_buffer import RingConfig
from nearpeak.kernels._runtime.row_barrier import (
    ALL,
    FIRST,
    LAST,
    MAX_PARTS,
    PHASES,
    arrive,
    arrive_and_wait,
    barrier_counters,
    claim_part,
    split_row,
    wait,
)
from nearpeak.kernels._runtime.rows import assume_multiple, common_width, rematerialize
from nearpeak.kernels._runtime.strided_rows import StridedRows, row_start, strided_rows
from nearpeak.kernels._runtime.tuning import processors
from nearpeak.kernels.norms import library
from nearpeak.kernels.norms.tuning import (
    ApartConfig,
    BackwardConfig,
    BackwardTileConfig,
    ForwardConfig,
    ForwardTileConfig,
    GroupConfig,
    backward_config,
    backward_heuristic,
    column_tile,
    forward_config,
    forward_heuristic,
    reads_early,
    registers_per_thread,
)

_CACHE_BYTES = 34 * 2**20
"""Bytes, of the two tensors that are read twice, that stay in the L2 cache (50 MB) beside what is written."""
Gradients = tuple[Tensor, Tensor, Tensor, Tensor]


@triton.jit
def forward_tile(
    x, residual, weight, bias, result, total, statistics,
    rows, columns, middle, inner,
    x_outer, x_middle, x_inner, residual_outer, residual_middle, residual_inner,
    eps, offset,
    CENTERED: tl.constexpr, LEVELS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    PACKED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Whole rows in registers: PACKED, as the 16 bits that were read, so that more programs run at a time.

    EARLY, weight and bias are read with the rows, and not after their sums: see `reads_early`.
    """
    columns = assume_multiple(columns, WIDTH)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # (ROWS,)
    column = tl.arange(0, BLOCK)  # (BLOCK,)
    in_rows = row < rows
    in_columns = column < columns
    inside = in_rows[:, None] & in_columns[None, :]
    if EARLY:
        factor, shift = read_parameters(weight, bias, column, in_columns)
    # load x, and add the residual
    start = row_start(row, middle, inner, x_outer, x_middle, x_inner, LEVELS, WIDTH)
    loaded = tl.load(x + start[:, None] + column[None, :], mask=inside, other=0.0)  # (ROWS, BLOCK)
    values = loaded.to(tl.float32)
    written = (row * columns)[:, None] + column[None, :]
    if residual is not None:
        start = row_start(row, middle, inner, residual_outer, residual_middle, residual_inner, LEVELS, WIDTH)
        values += tl.load(residual + start[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float32)
        # the rounded sum is normalized, as in a model that adds and normalizes in two steps
        loaded = values.to(total.dtype.element_ty)
        tl.store(total + written, loaded, mask=inside)
        values = loaded.to(tl.float32)
    # statistics of each row
    share = 1.0 / columns
    if CENTERED:
        mean = tl.div_rn(tl.sum(values, 1), tl.cast(columns, tl.float32))  # exact where it can be, unlike "/" on a GPU
        if PACKED:
            values = rematerialize(loaded, columns, mean[:, None]).to(tl.float32)
        values = tl.where(inside, values - mean[:, None], 0.0)
        tl.store(statistics + rows + row, mean, mask=in_rows)
    rstd = tl.math.rsqrt(tl.sum(values * values, 1) * share + tl.cast(eps, tl.float32))
    tl.store(statistics + row, rstd, mask=in_rows)
    if PACKED:
        values = rematerialize(loaded, columns, rstd[:, None]).to(tl.float32)
        if CENTERED:
            values -= mean[:, None]
    # normalize, scale and shift
    values *= rstd[:, None]
    if not EARLY:
        factor, shift = read_parameters(weight, bias, column, in_columns)
    if weight is not None:
        values *= (factor.to(tl.float32) + tl.cast(offset, tl.float32))[None, :]
    if bias is not None:
        values += shift.to(tl.float32)[None, :]
    tl.store(result + written, values.to(result.dtype.element_ty), mask=inside)


@triton.jit
def read_parameters(weight, bias, column, in_columns):
    """Weight and bias as they are, (BLOCK,); 0 for those that there are not, which nobody reads."""
    factor, shift = 0.0, 0.0
    if weight is not None:
        factor = tl.load(weight + column, mask=in_columns, other=0.0)
    if bias is not None:
        shift = tl.load(bias + column, mask=in_columns, other=0.0)
    return factor, shift


@triton.jit
def read_part(x_row, residual_row, total_row, column, stop, HINTS: tl.constexpr):
    """Columns of x, 0 from `stop` on; with a residual the sum, which is also written."""
    inside = column < stop
    # what is read again soon should stay in the cache: the sum if there is one
    again: tl.constexpr = "evict_last" if HINTS and residual_row is None else ""
    values = tl.load(x_row + column, mask=inside, other=0.0, eviction_policy=again)
    if residual_row is not None:
        added = tl.load(residual_row + column, mask=inside, other=0.0)
        values = (values.to(tl.float32) + added.to(tl.float32)).to(total_row.dtype.element_ty)
        tl.store(total_row + column, values, mask=inside, eviction_policy="evict_last" if HINTS else "")
    return values


@triton.jit
def part_statistics(
    x_row, residual_row, total_row, first, begin, stop,
    CENTERED: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, HINTS: tl.constexpr,
):  # fmt: skip
    """The mean of the columns from `begin` to `stop`, and their sum of squares, of differences from it if CENTERED.

    The mean c of the chunk that was read `first` is subtracted from all numbers. That loses few digits: if c is the
    mean of a fraction f of the numbers, its squared distance from the mean of all is at most their variance over f.
    """
    lane = tl.arange(0, STEPS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]  # (STEPS, BLOCK)
    near = 0.0
    values = first.to(tl.float32)
    sums = tl.zeros([BLOCK], tl.float32)
    if CENTERED:
        count = tl.minimum(stop - begin, STEPS * BLOCK).to(tl.float32)
        near = tl.div_rn(tl.sum(tl.sum(values, 0), 0), tl.maximum(count, 1.0))
        values = tl.where(begin + lane < stop, values - near, 0.0)
        sums = tl.sum(values, 0)
    squares = tl.sum(values * values, 0)
    for start in tl.range(begin + STEPS * BLOCK, stop, STEPS * BLOCK, num_stages=STAGES):
        values = read_part(x_row, residual_row, total_row, start + lane, stop, HINTS).to(tl.float32)
        if CENTERED:
            values = tl.where(start + lane < stop, values - near, 0.0)
            sums += tl.sum(values, 0)
        squares += tl.sum(values * values, 0)
    if CENTERED:
        total = tl.sum(sums, 0)
        moved = tl.div_rn(total, tl.maximum(stop - begin, 1).to(tl.float32))
        return near + moved, tl.maximum(tl.sum(squares, 0) - total * moved, 0.0)
    return 0.0, tl.sum(squares, 0)


@triton.jit
def write_columns(
    values, weight, bias, result_row, column, stop, mean, rstd, offset, CENTERED: tl.constexpr,
):  # fmt: skip
    inside = column < stop
    values = values.to(tl.float32)
    if CENTERED:
        values -= mean
    values *= rstd
    if weight is not None:
        factor = tl.load(weight + column, mask=inside, other=0.0)
        values *= factor.to(tl.float32) + tl.cast(offset, tl.float32)
    if bias is not None:
        values += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(result_row + column, values.to(result_row.dtype.element_ty), mask=inside)


@triton.jit
def write_part(
    x_row, weight, bias, result_row, first, begin, stop, mean, rstd, offset,
    CENTERED: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, HINTS: tl.constexpr,
    KEPT: tl.constexpr,
):  # fmt: skip
    """Reads the columns from `begin` to `stop` again, from their end to their start, and writes them normalized.

    The chunk that was read `first` is still in registers if KEPT.
    """
    lane = tl.arange(0, STEPS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    blocks = tl.cdiv(stop - begin, STEPS * BLOCK)
    if KEPT:
        values = rematerialize(first, stop, rstd)
        write_columns(values, weight, bias, result_row, begin + lane, stop, mean, rstd, offset, CENTERED)
    for index in tl.range(0, blocks - (1 if KEPT else 0), num_stages=STAGES):
        column = begin + (blocks - 1 - index) * (STEPS * BLOCK) + lane
        values = tl.load(
            x_row + column, mask=column < stop, other=0.0, eviction_policy="evict_first" if HINTS else ""
        )  # fmt: skip
        write_columns(values, weight, bias, result_row, column, stop, mean, rstd, offset, CENTERED)


@triton.jit
def forward_split(
    x, residual, weight, bias, result, total, statistics, partial, counters,
    rows, columns, middle, inner,
    x_outer, x_middle, x_inner, residual_outer, residual_middle, residual_inner,
    eps, offset, part, parts,
    CENTERED: tl.constexpr, LEVELS: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr, STEPS: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr, HINTS: tl.constexpr, KEPT: tl.constexpr, PHASE: tl.constexpr,
):  # fmt: skip
    """One part of one row; a row of one part needs no barrier."""
    columns = assume_multiple(columns, WIDTH)
    number = tl.program_id(0)
    if PARTS > 1:
        number = claim_part(counters, PHASE)
    row = (number // parts).to(tl.int64)
    own = number % parts
    begin = own * part
    stop = tl.minimum(begin + part, columns)
    x_row = x + row_start(row, middle, inner, x_outer, x_middle, x_inner, LEVELS, WIDTH)
    residual_row = None
    if residual is not None:
        residual_row = residual + row_start(
            row, middle, inner, residual_outer, residual_middle, residual_inner, LEVELS, WIDTH
        )
    total_row = total + row * columns
    mean = 0.0
    # first pass: statistics of this part
    lane = tl.arange(0, STEPS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]  # (STEPS, BLOCK)
    first = read_part(x_row, residual_row, total_row, begin + lane, stop, HINTS)
    if PARTS == 1 or PHASE != LAST:
        mean, squares = part_statistics(
            x_row, residual_row, total_row, first, begin, stop, CENTERED, STEPS, BLOCK, STAGES, HINTS
        )
    # exchange them with the other parts of the row
    if PARTS > 1:
        partial += row * 2 * parts
        if PHASE != LAST:
            if CENTERED:
                tl.store(partial + own, mean)
            tl.store(partial + parts + own, squares)
        if PHASE == ALL:
            arrive_and_wait(counters, row, parts)
        if PHASE != FIRST:
            each = tl.arange(0, PARTS)
            among = each < parts
            all_squares = tl.load(partial + parts + each, mask=among, other=0.0, cache_modifier=".cg")
            if CENTERED:
                counts = tl.where(among, tl.minimum(part, columns - each * part), 0).to(tl.float32)
                means = tl.load(partial + each, mask=among, other=0.0, cache_modifier=".cg")
                mean = tl.div_rn(tl.sum(means * counts, 0), columns.to(tl.float32))
                all_squares += counts * (means - mean) * (means - mean)
            squares = tl.sum(all_squares, 0)
    # second pass: normalize and write
    if PARTS == 1 or PHASE != FIRST:
        rstd = tl.math.rsqrt(squares / columns + tl.cast(eps, tl.float32))
        if own == 0:
            tl.store(statistics + row, rstd)
            if CENTERED:
                tl.store(statistics + rows + row, mean)
        if residual is not None:
            x_row = total_row
            tl.debug_barrier()  # the sum may be read by other threads than those that wrote it
        write_part(
            x_row, weight, bias, result + row * columns, first, begin, stop, mean, rstd, offset,
            CENTERED, STEPS, BLOCK, STAGES, HINTS, KEPT,
        )  # fmt: skip


def rms_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float,
    *, config: ForwardConfig | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if config is None and library.chooses_torch(x, weight, bias, offset, False):
        return library.rms_norm(x, weight, eps)
    result, _, statistics = _forward(x, None, weight, bias, eps, offset, False, config)
    return result, statistics


def layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, *, config: ForwardConfig | None = None
) -> tuple[Tensor, Tensor]:
    if config is None and library.chooses_torch(x, weight, bias, 0.0, True):
        return library.layer_norm(x, weight, bias, eps)
    result, _, statistics = _forward(x, None, weight, bias, eps, 0.0, True, config)
    return result, statistics


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float,
    *, config: ForwardConfig | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return _forward(x, residual, weight, bias, eps, offset, False, config)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float,
    *, config: ForwardConfig | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return _forward(x, residual, weight, bias, eps, 0.0, True, config)


def _forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float,
    centered: bool, config: ForwardConfig | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The result, the sum (x itself without a residual), and float32 statistics: (1 or 2, rows), rstd and mean."""
    columns = x.shape[-1]
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = x if residual is None else torch.empty(x.shape, dtype=residual.dtype, device=x.device)
    rows = x.numel() // columns if columns else x.shape[:-1].numel()
    statistics = torch.empty((2 if centered else 1, rows), dtype=torch.float32, device=x.device)
    if not x.numel():
        return result, total, statistics.zero_()
    size = columns * max(x.element_size(), total.element_size()) // 2
    strided = strided_rows(x, residual)
    if weight is not None:
        weight = weight.contiguous()
    if bias is not None:
        bias = bias.contiguous()
    config = config or forward_config(size, rows, x.device, centered=centered, added=residual is not None)
    results = (result, total, statistics)
    if isinstance(config, RingConfig):
        if runs_on(x.device):
            from nearpeak.kernels.norms import sm90

            if sm90.forward(strided, weight, bias, *results, rows, columns, eps, offset, centered, config):
                return results
        config = forward_heuristic(size, rows, processors(x.device))
    tensors = (*strided.tensors, weight, bias, *results)
    sizes = (rows, columns, strided.middle, strided.inner, *strided.strides[0], *strided.strides[1], eps, offset)
    warps = config.warps
    if isinstance(config, ForwardTileConfig):
        launch(
            forward_tile, (triton.cdiv(rows, config.rows), 1, 1), *tensors, *sizes, centered, strided.levels,
            strided.width, config.rows, next_power_of_2(columns), config.packed,
            reads_early(config, next_power_of_2(size), rows, processors(x.device)), warps=warps,
            registers=None if config.programs is None else registers_per_thread(warps, config.programs),
        )  # fmt: skip
        return results
    part, parts = split_row(rows, columns, columns * total.element_size(), x.device, config.part)
    partial = counters = statistics
    if parts > 1:
        partial = torch.empty((rows, 2, parts), dtype=torch.float32, device=x.device)
        counters = barrier_counters(rows, x.device)
    block = min(16 // x.element_size() * 32 * warps, next_power_of_2(part))
    for phase in PHASES if parts > 1 else PHASES[:1]:
        launch(
            forward_split, (rows * parts, 1, 1), *tensors, partial, counters, *sizes, part, parts, centered,
            strided.levels, strided.width, next_power_of_2(parts), config.steps, block, config.stages, config.hints,
            config.kept, phase, warps=warps,
        )  # fmt: skip
    return results


# Backward. With g = gradient, w = weight and d = x, less its mean for a LayerNorm, n = d * rstd is the normalized row.
#
#     dx = rstd * (g * w - n * mean(g * w * n) - mean(g * w)), the last term for a LayerNorm alone
#        = g * (w * rstd) + d * slope + level, with two numbers for each row,
#
# plus the gradient of the sum where there was an addition.


@triton.jit
def row_and_column_masks(index, count, column, columns, ROWS: tl.constexpr, FULL: tl.constexpr, EVEN: tl.constexpr):
    """Masks of rows (ROWS,), columns (BLOCK,) and both (ROWS, BLOCK); constants where FULL and EVEN, at no cost."""
    if FULL:
        in_rows = tl.full([ROWS], True, tl.int1)
    else:
        in_rows = index + tl.arange(0, ROWS) < count
    if EVEN:
        in_columns = tl.full(column.shape, True, tl.int1)
    else:
        in_columns = column < columns
    if FULL and EVEN:
        inside = tl.full([ROWS, column.shape[0]], True, tl.int1)
    else:
        inside = in_rows[:, None] & in_columns[None, :]
    return in_rows, in_columns, inside


@triton.jit
def as_float32(values):
    """Converts to float32. The second of two bfloat16 in a register takes one instruction like this, and not two."""
    if values.dtype == tl.bfloat16:
        return (values.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return values.to(tl.float32)


@triton.jit
def read_rows(
    tensor, row, column, inside, middle, inner, outer_stride, middle_stride, inner_stride,
    LEVELS: tl.constexpr, WIDTH: tl.constexpr, POLICY: tl.constexpr,
):  # fmt: skip
    start = row_start(row, middle, inner, outer_stride, middle_stride, inner_stride, LEVELS, WIDTH)
    return tl.load(tensor + start[:, None] + column[None, :], mask=inside, other=0.0, eviction_policy=POLICY)


@triton.jit
def read_weight(weight, column, in_columns):
    """The weight, loaded from the L1 cache for each row: registers are scarcer than this load."""
    # as a row, so that each thread gets the columns that it has of other tensors
    return tl.load(weight + column[None, :], mask=in_columns[None, :], other=0.0, eviction_policy="evict_last")


@triton.jit
def effective_weight(factor, offset):
    """weight + offset in float32; an offset of None is 0."""
    factor = as_float32(factor)
    if offset is not None:
        factor += tl.cast(offset, tl.float32)
    return factor


@triton.jit
def gradient_coefficients(along, level, rstd, columns, CENTERED: tl.constexpr):
    """The slope and the level of each row, from the sums of g * w * d (`along`) and of g * w (`level`) over it."""
    share = rstd / columns
    if CENTERED:
        level = -level * share
    return -along * share * rstd * rstd, level


@triton.jit
def write_rows(result, added, dx, dresidual, row, column, inside, columns):
    """Writes the gradient of rows, plus that of the sum where there was an addition."""
    if added is not None:
        result += as_float32(added)
    written = (row * columns)[:, None] + column[None, :]
    if dx is not None:
        tl.store(dx + written, result.to(dx.dtype.element_ty), mask=inside)
    if dresidual is not None:
        tl.store(dresidual + written, result.to(dresidual.dtype.element_ty), mask=inside)


@triton.jit
def write_partials(
    partials, weight_sum, bias_sum, part, parts, column, in_columns, columns,
    WANTS_WEIGHT: tl.constexpr, WANTS_BIAS: tl.constexpr,
):  # fmt: skip
    """Writes the sums over the rows of a program: all parts for the weight, then all parts for the bias."""
    part = part.to(tl.int64)
    if WANTS_WEIGHT:
        tl.store(partials + part * columns + column, weight_sum, mask=in_columns)
        part += parts
    if WANTS_BIAS:
        tl.store(partials + part * columns + column, bias_sum, mask=in_columns)


@triton.jit
def backward_tile(
    gradient, x, sum_gradient, statistics, weight, dx, dresidual, partials,
    rows, columns, middle, inner,
    gradient_outer, gradient_middle, gradient_inner, x_outer, x_middle, x_inner, sum_outer, sum_middle, sum_inner,
    offset,
    CENTERED: tl.constexpr, LEVELS: tl.constexpr, WIDTH: tl.constexpr, WANTS_WEIGHT: tl.constexpr,
    WANTS_BIAS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, FULL: tl.constexpr, EVEN: tl.constexpr,
    STAGES: tl.constexpr, AGAIN: tl.constexpr,
):  # fmt: skip
    columns = assume_multiple(columns, WIDTH)
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    column = tl.arange(0, BLOCK)
    weight_sum = tl.zeros([ROWS, BLOCK], tl.float32)
    bias_sum = tl.zeros([ROWS, BLOCK], tl.float32)
    for tile in tl.range(program, tl.cdiv(rows, ROWS), programs, num_stages=STAGES):
        first = tl.cast(tile, tl.int64) * ROWS
        row = first + tl.arange(0, ROWS)
        in_rows, in_columns, inside = row_and_column_masks(first, rows, column, columns, ROWS, FULL, EVEN)
        # load g, x and the gradient of the sum: (ROWS, BLOCK)
        g_read = read_rows(
            gradient,
            row,
            column,
            inside,
            middle,
            inner,
            gradient_outer,
            gradient_middle,
            gradient_inner,
            LEVELS,
            WIDTH,
            "",
        )
        x_read = read_rows(x, row, column, inside, middle, inner, x_outer, x_middle, x_inner, LEVELS, WIDTH, "")
        added = None
        if sum_gradient is not None and (dx is not None or dresidual is not None):
            added = read_rows(
                sum_gradient, row, column, inside, middle, inner, sum_outer, sum_middle, sum_inner, LEVELS, WIDTH, ""
            )
        rstd = tl.load(statistics + row, mask=in_rows, other=0.0)
        g = as_float32(g_read)
        n = as_float32(x_read)
        if CENTERED:
            mean = tl.load(statistics + rows + row, mask=in_rows, other=0.0)[:, None]
            n -= mean
        # sums over rows, for weight and bias
        product = n * g
        if WANTS_WEIGHT:
            weight_sum += product * rstd[:, None]
        if WANTS_BIAS:
            bias_sum += g
        # sums along rows, then the gradient of rows
        if dx is not None or dresidual is not None:
            level = 0.0
            if weight is not None:
                factor = read_weight(weight, column, in_columns)
                scale = effective_weight(factor, offset)
                product *= scale
                g *= scale
            along = tl.sum(product, 1)
            if CENTERED:
                level = tl.sum(g, 1)
            slope, level = gradient_coefficients(along, level, rstd, columns, CENTERED)
            if AGAIN:
                # rows wait for their sums as the 16 bits that were read, not as float32
                n = rematerialize(x_read, columns, along[:, None]).to(tl.float32)
                if CENTERED:
                    n -= mean
                g = rematerialize(g_read, columns, along[:, None]).to(tl.float32)
                if weight is not None:
                    if ROWS == 1 and weight.dtype.element_ty.primitive_bitwidth == 16:
                        scale = effective_weight(rematerialize(factor, columns, along[:, None]), offset)
                    g *= scale
            result = n * slope[:, None]
            if CENTERED:
                result += level[:, None]
            result += g * rstd[:, None]
            write_rows(result, added, dx, dresidual, row, column, inside, columns)
    write_partials(
        partials, tl.sum(weight_sum, 0), tl.sum(bias_sum, 0), program, programs, column, column < columns, columns,
        WANTS_WEIGHT, WANTS_BIAS,
    )  # fmt: skip


@triton.jit
def sum_over_parts(sums, row, parts, PARTS: tl.constexpr, PADDED: tl.constexpr):
    """The sums over whole rows, (rows,), from those of their parts."""
    each = tl.arange(0, PARTS)[None, :]
    partial = tl.load(sums + (row * PARTS)[:, None] + each, cache_modifier=".cg")  # (rows, PARTS)
    if PADDED:
        partial = tl.where(each < parts, partial, 0.0)
    return tl.sum(partial, 1)


@triton.jit
def backward_shared(
    gradient, x, sum_gradient, statistics, weight, dx, dresidual, partials, sums, counters,
    rows, columns, middle, inner,
    gradient_outer, gradient_middle, gradient_inner, x_outer, x_middle, x_inner, sum_outer, sum_middle, sum_inner,
    offset, parts, groups, batch,
    CENTERED: tl.constexpr, LEVELS: tl.constexpr, WIDTH: tl.constexpr, WANTS_WEIGHT: tl.constexpr,
    WANTS_BIAS: tl.constexpr, PARTS: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    FULL: tl.constexpr, EVEN: tl.constexpr, AHEAD: tl.constexpr, HINTS: tl.constexpr, STAGES: tl.constexpr,
    PHASE: tl.constexpr,
):  # fmt: skip
    """One part of the rows of one group; a row of one part needs no barrier.

    A program has BLOCK columns and keeps the sums over rows of these in registers. The programs of a group, one for
    each part, have the same rows and go through them in batches: each reads its part of a batch and writes the sums
    along its rows to a buffer. Once those of all parts have arrived, it reads the batch again, from the L2 cache, and
    writes the gradient. Batches are large, as a barrier waits for all stores of a program, and small enough to stay in
    the cache. AHEAD, a program reads the next batch before it waits for this one.

    A program draws its group and part as a ticket when it starts. So at most one group is incomplete, and the programs
    of complete groups wait only for each other, finish, and make room for it. A row of more parts than the GPU has
    multiprocessors takes two launches, without a barrier, of which the second writes.
    """
    columns = assume_multiple(columns, WIDTH)
    # what is read again soon should stay in the cache, and leave it then
    FIRST_POLICY: tl.constexpr = "evict_last" if HINTS else ""
    LAST_POLICY: tl.constexpr = "evict_first" if HINTS else ""
    number = tl.program_id(0)
    if PARTS > 1:
        number = claim_part(counters, PHASE)
    group = number // parts
    own = number % parts
    column = own * BLOCK + tl.arange(0, BLOCK)
    weight_sum = tl.zeros([BLOCK], tl.float32)
    bias_sum = tl.zeros([BLOCK], tl.float32)
    # AHEAD there is one more turn, with nothing left to read
    for turn in range(group, tl.cdiv(rows, batch) + (groups if AHEAD else 0), groups):
        # first pass over a batch: sums along rows, and over rows
        if PHASE != LAST:
            first = tl.cast(turn, tl.int64) * batch
            count = tl.minimum(rows - first, batch).to(tl.int32)
            for index in tl.range(0, count, ROWS, num_stages=STAGES):
                in_rows, in_columns, inside = row_and_column_masks(index, count, column, columns, ROWS, FULL, EVEN)
                row = first + index + tl.arange(0, ROWS)
                g = read_rows(
                    gradient, row, column, inside, middle, inner,
                    gradient_outer, gradient_middle, gradient_inner, LEVELS, WIDTH, FIRST_POLICY,
                )  # fmt: skip
                n = read_rows(
                    x, row, column, inside, middle, inner, x_outer, x_middle, x_inner, LEVELS, WIDTH, FIRST_POLICY
                )
                g, n = as_float32(g), as_float32(n)
                if CENTERED:
                    n -= tl.load(statistics + rows + row, mask=in_rows, other=0.0)[:, None]
                n *= g
                if WANTS_WEIGHT:
                    weight_sum += tl.sum(n * tl.load(statistics + row, mask=in_rows, other=0.0)[:, None], 0)
                if WANTS_BIAS:
                    bias_sum += tl.sum(g, 0)
                if dx is not None or dresidual is not None:
                    if weight is not None:
                        scale = effective_weight(read_weight(weight, column, in_columns), offset)
                        n *= scale
                        if CENTERED:
                            g *= scale
                    tl.store(sums + row * PARTS + own, tl.sum(n, 1), mask=in_rows)
                    if CENTERED:
                        tl.store(sums + (rows + row) * PARTS + own, tl.sum(g, 1), mask=in_rows)
            if PHASE == ALL:
                if PARTS == 1:
                    tl.debug_barrier()  # other threads read the sums than wrote them
                elif count > 0:
                    arrive(counters, turn)
        # second pass: the gradient of rows
        if PHASE != FIRST:
            before = turn - (groups if AHEAD else 0)
            if before >= 0:
                if PHASE == ALL and PARTS > 1:
                    wait(counters, before, parts)
                first = tl.cast(before, tl.int64) * batch
                count = tl.minimum(rows - first, batch).to(tl.int32)
                last = (count - 1) // ROWS * ROWS
                for back in tl.range(0, count, ROWS, num_stages=STAGES):
                    index = last - back  # what was read last is most likely still in the cache
                    in_rows, in_columns, inside = row_and_column_masks(index, count, column, columns, ROWS, FULL, EVEN)
                    row = first + index + tl.arange(0, ROWS)
                    g = read_rows(
                        gradient, row, column, inside, middle, inner,
                        gradient_outer, gradient_middle, gradient_inner, LEVELS, WIDTH, LAST_POLICY,
                    )  # fmt: skip
                    n = read_rows(
                        x, row, column, inside, middle, inner, x_outer, x_middle, x_inner, LEVELS, WIDTH, LAST_POLICY
                    )
                    added = None
                    if sum_gradient is not None:
                        added = read_rows(
                            sum_gradient, row, column, inside, middle, inner,
                            sum_outer, sum_middle, sum_inner, LEVELS, WIDTH, "",
                        )  # fmt: skip
                    # no mask: rows after the last read the sums of the last, and are not written
                    known = row if FULL else tl.minimum(row, rows - 1)
                    along = sum_over_parts(sums, known, parts, PARTS, PADDED)
                    level = 0.0
                    rstd = tl.load(statistics + row, mask=in_rows, other=0.0)
                    n = as_float32(n)
                    if CENTERED:
                        n -= tl.load(statistics + rows + row, mask=in_rows, other=0.0)[:, None]
                        level = sum_over_parts(sums, rows + known, parts, PARTS, PADDED)
                    slope, level = gradient_coefficients(along, level, rstd, columns, CENTERED)
                    factor = rstd[:, None]
                    if weight is not None:
                        factor *= effective_weight(read_weight(weight, column, in_columns), offset)
                    result = n * slope[:, None]
                    if CENTERED:
                        result += level[:, None]
                    result += as_float32(g) * factor
                    write_rows(result, added, dx, dresidual, row, column, inside, columns)
    if PHASE != LAST:
        write_partials(
            partials, weight_sum, bias_sum, group, groups, column, column < columns, columns, WANTS_WEIGHT, WANTS_BIAS
        )


@triton.jit
def add_partials(
    partials, dweight, dbias, programs, columns,
    WANTS_WEIGHT: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Sums the (1 or 2, programs, columns) partial sums over programs, for weight and bias."""
    wait_for_previous(EARLY)
    columns = assume_multiple(columns, WIDTH)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    in_columns = column < columns
    row = tl.arange(0, ROWS)
    which = tl.program_id(1).to(tl.int64)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in range(0, programs, ROWS):
        at = (which * programs + first + row) * columns
        inside = (first + row < programs)[:, None] & in_columns[None, :]
        total += tl.load(partials + at[:, None] + column[None, :], mask=inside, other=0.0)
    result = tl.sum(total, 0)
    if WANTS_WEIGHT:
        mine = in_columns & (which == 0)
        tl.store(dweight + column, result.to(dweight.dtype.element_ty), mask=mine)
    if dbias is not None:
        mine = in_columns & (which == (1 if WANTS_WEIGHT else 0))
        tl.store(dbias + column, result.to(dbias.dtype.element_ty), mask=mine)


@triton.jit
def sums_over_rows(
    gradient, x, statistics, dweight, dbias, first_column,
    rows, columns, middle, inner,
    gradient_outer, gradient_middle, gradient_inner, x_outer, x_middle, x_inner,
    CENTERED: tl.constexpr, LEVELS: tl.constexpr, WIDTH: tl.constexpr, HEIGHT: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Writes the gradients of weight and bias in SPAN columns, from HEIGHT rows at a time."""
    column = first_column + tl.arange(0, SPAN)
    in_columns = column < columns
    weight_sum = tl.zeros([HEIGHT, SPAN], tl.float32)
    bias_sum = tl.zeros([HEIGHT, SPAN], tl.float32)
    for first in range(0, rows, HEIGHT):
        row = tl.cast(first, tl.int64) + tl.arange(0, HEIGHT)
        in_rows = row < rows
        inside = in_rows[:, None] & in_columns[None, :]
        g = read_rows(
            gradient, row, column, inside, middle, inner,
            gradient_outer, gradient_middle, gradient_inner, LEVELS, WIDTH, "",
        )  # fmt: skip
        g = as_float32(g)
        if dweight is not None:
            n = read_rows(x, row, column, inside, middle, inner, x_outer, x_middle, x_inner, LEVELS, WIDTH, "")
            n = as_float32(n)
            rstd = tl.load(statistics + row, mask=in_rows, other=0.0)
            if CENTERED:
                n -= tl.load(statistics + rows + row, mask=in_rows, other=0.0)[:, None]
            weight_sum += n * g * rstd[:, None]
        if dbias is not None:
            bias_sum += g
    if dweight is not None:
        tl.store(dweight + column, tl.sum(weight_sum, 0).to(dweight.dtype.element_ty), mask=in_columns)
    if dbias is not None:
        tl.store(dbias + column, tl.sum(bias_sum, 0).to(dbias.dtype.element_ty), mask=in_columns)


@triton.jit
def backward_apart(
    gradient, x, sum_gradient, statistics, weight, dx, dresidual, dweight, dbias,
    rows, columns, middle, inner,
    gradient_outer, gradient_middle, gradient_inner, x_outer, x_middle, x_inner, sum_outer, sum_middle, sum_inner,
    offset, spans,
    CENTERED: tl.constexpr, LEVELS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    HEIGHT: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Programs for spans of columns, which sum over all rows, and then one for each row.

    None waits for another: the statistics of all rows are known from the forward pass. Partial sums, in place of a
    second read, would take a second launch, which for few rows takes longer than all reads.
    """
    columns = assume_multiple(columns, WIDTH)
    program = tl.program_id(0)
    if program < spans:
        sums_over_rows(
            gradient, x, statistics, dweight, dbias, program * SPAN, rows, columns, middle, inner,
            gradient_outer, gradient_middle, gradient_inner, x_outer, x_middle, x_inner,
            CENTERED, LEVELS, WIDTH, HEIGHT, SPAN,
        )  # fmt: skip
    else:
        row = tl.cast(program - spans, tl.int64) + tl.arange(0, 1)
        column = tl.arange(0, BLOCK)
        inside = (column < columns)[None, :]
        # load g, x and the gradient of the sum: (1, BLOCK)
        g = read_rows(
            gradient, row, column, inside, middle, inner,
            gradient_outer, gradient_middle, gradient_inner, LEVELS, WIDTH, "",
        )  # fmt: skip
        n = read_rows(x, row, column, inside, middle, inner, x_outer, x_middle, x_inner, LEVELS, WIDTH, "")
        added = None
        if sum_gradient is not None:
            added = read_rows(
                sum_gradient, row, column, inside, middle, inner, sum_outer, sum_middle, sum_inner, LEVELS, WIDTH, ""
            )
        rstd = tl.load(statistics + row)
        g, n = as_float32(g), as_float32(n)
        if CENTERED:
            n -= tl.load(statistics + rows + row)[:, None]
        if weight is not None:
            g *= effective_weight(read_weight(weight, column, column < columns), offset)
        # sums along the row, then its gradient
        along, level = tl.sum(n * g, 1), 0.0
        if CENTERED:
            level = tl.sum(g, 1)
        slope, level = gradient_coefficients(along, level, rstd, columns, CENTERED)
        result = n * slope[:, None] + g * rstd[:, None]
        if CENTERED:
            result += level[:, None]
        write_rows(result, added, dx, dresidual, row, column, inside, columns)


def norm_backward(
    gradient: Tensor, x: Tensor, sum_gradient: Tensor | None, statistics: Tensor, weight: Tensor | None,
    bias: Tensor | None, offset: float, centered: bool, wants: list[bool], *, config: BackwardConfig | None = None,
) -> Gradients:  # fmt: skip
    """The gradients of x, residual, weight and bias, each without elements if it is not wanted.

    `x` is what was normalized: the sum where there was an addition. The gradient of x has the dtype of `gradient`, that
    of the residual has the dtype of `x`.
    """
    if config is None and library.backward_chooses_torch(
        gradient, x, sum_gradient, statistics, weight, bias, offset, centered, wants
    ):
        return library.norm_backward(gradient, x, statistics, weight, bias, centered, wants)
    dx = _empty_gradient(gradient, gradient.dtype, wants[0])
    dresidual = _empty_gradient(gradient, x.dtype, wants[1])
    dweight = _empty_parameter_gradient(gradient, weight, wants[2])
    dbias = _empty_parameter_gradient(gradient, bias, wants[3])
    if not gradient.numel():
        return dx, dresidual, dweight.zero_(), dbias.zero_()
    if not any(wants):
        return dx, dresidual, dweight, dbias
    columns = gradient.shape[-1]
    rows = gradient.numel() // columns
    size = columns * max(gradient.element_size(), x.element_size()) // 2
    strided = strided_rows(gradient, x, sum_gradient)
    if weight is not None:
        weight = weight.contiguous()
    config = config or backward_config(size, rows, x.device, centered=centered, added=sum_gradient is not None)
    tensors = (statistics, weight, dx if wants[0] else None, dresidual if wants[1] else None)
    arguments = (strided, *tensors, rows, columns, offset or None, centered, wants)
    if isinstance(config, ApartConfig):
        _backward_apart(*arguments, dweight, dbias, config)
        return dx, dresidual, dweight, dbias
    sums = None
    if isinstance(config, RingConfig):
        if runs_on(x.device):
            from nearpeak.kernels.norms import sm90

            sums = sm90.backward(*arguments, config)
        config = backward_heuristic(size, centered=centered)
    if isinstance(config, BackwardTileConfig):
        sums = sums or _backward_by_tiles(*arguments, config)
    else:
        sums = sums or _backward_by_groups(*arguments, config)
    partials, parts = sums
    if wants[2] or wants[3]:
        # all partial sums are read at once: programs are few, and have little to do
        height = min(next_power_of_2(parts), 1024)
        width = max(4096 // height, 32 if columns > 2048 else 8)
        early = can_start_early(x.device)
        launch(
            add_partials, (triton.cdiv(columns, width), wants[2] + wants[3], 1),
            partials, dweight, dbias if wants[3] else None, parts, columns, wants[2],
            common_width(columns), height, width, early,
            warps=height * width // 1024, early=early,
        )  # fmt: skip
    return dx, dresidual, dweight, dbias


def _backward_apart(
    strided: StridedRows, statistics: Tensor, weight: Tensor | None, dx: Tensor | None, dresidual: Tensor | None,
    rows: int, columns: int, offset: float | None, centered: bool, wants: list[bool], dweight: Tensor, dbias: Tensor,
    config: ApartConfig,
) -> None:  # fmt: skip
    """Writes all gradients."""
    height, span = column_tile(config, rows, columns)
    spans = triton.cdiv(columns, span) if wants[2] or wants[3] else 0
    programs = spans + (0 if dx is None and dresidual is None else rows)
    launch(
        backward_apart, (programs, 1, 1), *strided.tensors, statistics, weight, dx, dresidual,
        dweight if wants[2] else None, dbias if wants[3] else None,
        rows, columns, strided.middle, strided.inner, *strided.strides[0], *strided.strides[1], *strided.strides[2],
        offset, spans, centered, strided.levels, strided.width, next_power_of_2(columns), height, span,
        warps=config.warps,
    )  # fmt: skip


def _backward_by_tiles(
    strided: StridedRows, statistics: Tensor, weight: Tensor | None, dx: Tensor | None, dresidual: Tensor | None,
    rows: int, columns: int, offset: float | None, centered: bool, wants: list[bool], config: BackwardTileConfig,
) -> tuple[Tensor | None, int]:  # fmt: skip
    """Writes the gradients of rows. Returns the sums over rows, (1 or 2, parts, columns), and the number of parts."""
    gradient, x, _ = strided.tensors
    assert gradient is not None
    assert x is not None
    height, block = config.rows, next_power_of_2(columns)
    programs = min(triton.cdiv(rows, height), config.programs * processors(gradient.device))
    partials = _empty_partials(wants, programs, columns, gradient.device)
    launch(
        backward_tile, (programs, 1, 1), *strided.tensors, statistics, weight, dx, dresidual, partials,
        rows, columns, strided.middle, strided.inner, *strided.strides[0], *strided.strides[1], *strided.strides[2],
        offset, centered, strided.levels, strided.width, wants[2], wants[3], height, block, rows % height == 0,
        columns == block, config.stages, max(gradient.element_size(), x.element_size()) == 2, warps=config.warps,
        registers=registers_per_thread(config.warps, config.programs) if height <= 4 else None,
    )  # fmt: skip
    return partials, programs


def _backward_by_groups(
    strided: StridedRows, statistics: Tensor, weight: Tensor | None, dx: Tensor | None, dresidual: Tensor | None,
    rows: int, columns: int, offset: float | None, centered: bool, wants: list[bool], config: GroupConfig,
) -> tuple[Tensor | None, int]:  # fmt: skip
    """The same by groups of programs."""
    gradient, x, _ = strided.tensors
    assert gradient is not None
    assert x is not None
    widest = max(gradient.element_size(), x.element_size())
    plan = plan_groups(rows, columns, widest, processors(x.device), config)
    parts, padded, height = plan.parts, next_power_of_2(plan.parts), config.rows
    partials = _empty_partials(wants, plan.groups, columns, gradient.device)
    counters = sums = x
    phases: tuple[Any, ...]
    if dx is None and dresidual is None:
        phases = (FIRST,)
    else:
        # some elements are never written: a power of 2 of them is read at once
        sums = torch.empty((2 if centered else 1, rows, padded), dtype=torch.float32, device=x.device)
        if parts == 1:
            phases = (ALL,)
        else:
            phases = PHASES if plan.waits else (FIRST, LAST)
            if phases[0] is ALL:
                counters = barrier_counters(triton.cdiv(rows, plan.batch), x.device)
    for phase in phases:
        launch(
            backward_shared, (plan.groups * parts, 1, 1), *strided.tensors, statistics, weight, dx, dresidual, partials,
            sums, counters, rows, columns, strided.middle, strided.inner,
            *strided.strides[0], *strided.strides[1], *strided.strides[2], offset,
            parts, plan.groups, plan.batch, centered, strided.levels, strided.width, wants[2], wants[3],
            padded, parts != padded, height, plan.block,
            height == 1 or (rows % height == 0 and plan.batch % height == 0), columns % plan.block == 0,
            config.ahead, config.hints, config.stages, phase, warps=plan.warps, registers=plan.registers,
        )  # fmt: skip
    return partials, plan.groups


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """How groups of programs share rows."""

    block: int
    """Columns per program."""
    parts: int
    """Parts per row, and programs per group."""
    groups: int
    batch: int
    """Rows between two barriers of a group."""
    warps: int
    registers: int
    """Registers per thread, so that all programs of a multiprocessor run at the same time."""
    waits: bool
    """Whether a group is small enough for its programs to wait for each other."""


def plan_groups(rows: int, columns: int, widest: int, processors: int, config: GroupConfig) -> GroupPlan:
    """How to share rows whose widest elements have this many bytes; blocks of configurations are of 16 bits."""
    max_parts = min(MAX_PARTS, processors)
    block, warps = min(config.block * 2 // widest, next_power_of_2(columns)), config.warps
    programs = config.programs
    while triton.cdiv(columns, block) > max_parts and warps < 32:  # as many elements per thread
        block, warps, programs = 2 * block, 2 * warps, max(programs // 2, 1)
    parts = triton.cdiv(columns, block)
    groups = max(programs * processors // parts, 1)
    cached_rows = _CACHE_BYTES // (groups * parts * block * 2 * widest * (2 if config.ahead else 1))
    batch = max(config.batch or cached_rows, 1)
    # all groups get equal work, and a few rows are spread over as many groups as possible
    batch = triton.cdiv(rows, groups * triton.cdiv(rows, groups * batch))
    if batch > config.rows:
        batch -= batch % config.rows
    batches = triton.cdiv(rows, batch)
    groups = triton.cdiv(batches, triton.cdiv(batches, groups))
    return GroupPlan(
        block=block,
        parts=parts,
        groups=groups,
        batch=batch,
        warps=warps,
        registers=registers_per_thread(warps, programs),
        waits=parts <= max_parts,
    )


def _empty_gradient(gradient: Tensor, dtype: torch.dtype, wanted: bool) -> Tensor:
    return torch.empty(gradient.shape if wanted else (0,), dtype=dtype, device=gradient.device)


def _empty_parameter_gradient(gradient: Tensor, parameter: Tensor | None, wanted: bool) -> Tensor:
    if parameter is None or not wanted:
        return gradient.new_empty((0,))
    return torch.empty(parameter.shape, dtype=parameter.dtype, device=gradient.device)


def _empty_partials(wants: list[bool], parts: int, columns: int, device: torch.device) -> Tensor | None:
    sums = wants[2] + wants[3]
    return torch.empty((sums, parts, columns), dtype=torch.float32, device=device) if sums else None
