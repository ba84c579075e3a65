"""The backward kernels of the norms: the gradient of rows and, in the same pass, partial gradients of weight and bias.

With g = gradient * weight and n = the normalised row: dx = rstd * (g - n * mean(g * n) - mean(g)), the last for a
LayerNorm alone, plus the gradient of the sum where there was an addition. Sums over rows are kept in float32 by each
program and added in a fixed order by a second kernel, so that results are the same in every run.

- tile: a fixed number of programs, each with whole rows in registers, goes over all rows. Every byte is moved once.
- waves: for rows that do not fit. The sums along a row must be known before its first element can be written, so rows
  are read twice; they go through in groups that fit into the L2 cache, and one launch has the second reading of a group
  beside the first reading of the next, so that memory is read and written at the same time.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearpeak.kernels.configs import tuned
from nearpeak.kernels.jit.launch import launch, next_power_of_2
from nearpeak.kernels.jit.norms import MOST_ROWS
from nearpeak.kernels.jit.norms_waves import GROUP_BYTES, empty_partials, waves, write_gradient
from nearpeak.kernels.jit.row_starts import Rows, row_start, rows_of
from nearpeak.kernels.jit.rows import read_again

LONGEST_TILE = 16384


@triton.jit
def backward_tile(
    gradient, x, sum_gradient, statistics, weight, dx, dresidual, partials,
    rows, columns, middle, inner,
    gradient_outer, gradient_middle, gradient_inner, x_outer, x_middle, x_inner, sum_outer, sum_middle, sum_inner,
    offset,
    CENTRED: tl.constexpr, LEVELS: tl.constexpr, WANTS_WEIGHT: tl.constexpr, WANTS_BIAS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, AGAIN: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    column = tl.arange(0, BLOCK)
    in_columns = column < columns
    share = 1.0 / columns
    if WANTS_WEIGHT:
        weight_sum = tl.zeros([ROWS, BLOCK], tl.float32)
    if WANTS_BIAS:
        bias_sum = tl.zeros([ROWS, BLOCK], tl.float32)
    if weight is not None and ROWS > 1:
        factor = tl.load(weight + column, mask=in_columns, other=0.0, eviction_policy="evict_last")
        scale = (factor.to(tl.float32) + tl.cast(offset, tl.float32))[None, :]
    for tile in tl.range(program, tl.cdiv(rows, ROWS), programs, num_stages=STAGES):
        row = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        in_rows = row < rows
        inside = in_rows[:, None] & in_columns[None, :]
        start = row_start(row, middle, inner, gradient_outer, gradient_middle, gradient_inner, LEVELS)
        g_read = tl.load(
            gradient + start[:, None] + column[None, :], mask=inside, other=0.0, eviction_policy="evict_first"
        )
        start = row_start(row, middle, inner, x_outer, x_middle, x_inner, LEVELS)
        x_read = tl.load(x + start[:, None] + column[None, :], mask=inside, other=0.0, eviction_policy="evict_first")
        rstd = tl.load(statistics + row, mask=in_rows, other=0.0)[:, None]
        n = x_read.to(tl.float32)
        if CENTRED:
            mean = tl.load(statistics + rows + row, mask=in_rows, other=0.0)[:, None]
            n -= mean
        n *= rstd
        g = g_read.to(tl.float32)
        if WANTS_WEIGHT:
            weight_sum += g * n
        if WANTS_BIAS:
            bias_sum += g
        if dx is not None or dresidual is not None:
            if weight is not None:
                if ROWS == 1:
                    # from the L1 cache again for each row: its registers are worth more than this load
                    factor = tl.load(weight + column, mask=in_columns, other=0.0, eviction_policy="evict_last")
                    scale = (factor.to(tl.float32) + tl.cast(offset, tl.float32))[None, :]
                g *= scale
            along = (tl.sum(g * n, 1) * share)[:, None]
            if CENTRED:
                level = (tl.sum(g, 1) * share)[:, None]
            if AGAIN:
                # rows wait for their sums as the 16 bits that were read, and not as float32
                n = read_again(x_read, columns, along).to(tl.float32)
                if CENTRED:
                    n -= mean
                n *= rstd
                g = read_again(g_read, columns, along).to(tl.float32)
                if weight is not None:
                    if ROWS == 1 and weight.dtype.element_ty.primitive_bitwidth == 16:
                        scale = read_again(factor[None, :], columns, along).to(tl.float32)
                        scale += tl.cast(offset, tl.float32)
                    g *= scale
            result = g - n * along
            if CENTRED:
                result -= level
            result *= rstd
            write_gradient(
                result, sum_gradient, dx, dresidual, row, column, inside,
                columns, middle, inner, sum_outer, sum_middle, sum_inner, LEVELS,
            )  # fmt: skip
    if WANTS_WEIGHT:
        at = partials + program.to(tl.int64) * columns + column
        tl.store(at, tl.sum(weight_sum, 0), mask=in_columns)
    if WANTS_BIAS:
        part = program + programs if WANTS_WEIGHT else program
        tl.store(partials + part.to(tl.int64) * columns + column, tl.sum(bias_sum, 0), mask=in_columns)


@triton.jit
def add_partials(
    partials, dweight, dbias, programs, columns,
    WANTS_WEIGHT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sums of [programs, columns] of float32, one after the other for weight and bias."""
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


Gradients = tuple[Tensor, Tensor, Tensor, Tensor]


def norm_backward(
    gradient: Tensor, x: Tensor, sum_gradient: Tensor | None, statistics: Tensor, weight: Tensor | None,
    bias: Tensor | None, offset: float, centred: bool, wants: list[bool], *, config: dict[str, Any] | None = None,
) -> Gradients:  # fmt: skip
    """The gradients of x, residual, weight and bias, each of no elements where it is not wanted.

    `x` is what was normalised: the sum where there was an addition. The gradient of x has the dtype of `gradient`, that
    of the residual has the dtype of `x`.
    """
    dx = _like(gradient, gradient.dtype, wants[0])
    dresidual = _like(gradient, x.dtype, wants[1])
    dweight = _like_parameter(gradient, weight, wants[2])
    dbias = _like_parameter(gradient, bias, wants[3])
    if not gradient.numel():
        return dx, dresidual, dweight.zero_(), dbias.zero_()
    if not any(wants):
        return dx, dresidual, dweight, dbias
    columns = gradient.shape[-1]
    size = columns * max(gradient.element_size(), x.element_size()) // 2
    found = rows_of(gradient, x, sum_gradient)
    if weight is not None:
        weight = weight.contiguous()
    config = config or tuned("norm_backward", size, x.device) or heuristic(size, wants[2] + wants[3])
    run = _tile if config["variant"] == "tile" else waves
    tensors = (statistics, weight, dx if wants[0] else None, dresidual if wants[1] else None)
    rows, processors = gradient.numel() // columns, _processors(x.device.index)
    partials, parts = run(found, tensors, rows, columns, offset, centred, wants, processors, config)
    if wants[2] or wants[3]:
        tile, warps = (256, 8) if columns <= 2048 else (64, 4)
        launch(
            add_partials, (triton.cdiv(columns, 32), wants[2] + wants[3], 1),
            partials, dweight, dbias if wants[3] else None, parts, columns, wants[2], tile, 32, warps=warps,
        )  # fmt: skip
    return dx, dresidual, dweight, dbias


def _tile(
    found: Rows, tensors: tuple[Tensor | None, ...], rows: int, columns: int, offset: float, centred: bool,
    wants: list[bool], processors: int, config: dict[str, Any],
) -> tuple[Tensor | None, int]:  # fmt: skip
    gradient, x, _ = found.tensors
    assert gradient is not None
    assert x is not None
    device = gradient.device
    programs = min(triton.cdiv(rows, config["rows"]), config["programs"] * processors)
    partials = empty_partials(wants, programs, columns, device)
    launch(
        backward_tile, (programs, 1, 1), *found.tensors, *tensors, partials,
        rows, columns, found.middle, found.inner, *found.strides[0], *found.strides[1], *found.strides[2], offset,
        centred, found.levels, wants[2], wants[3], config["rows"], next_power_of_2(columns), config["stages"],
        max(gradient.element_size(), x.element_size()) == 2,
        warps=config["warps"],
    )  # fmt: skip
    return partials, programs


def _like(gradient: Tensor, dtype: torch.dtype, wanted: bool) -> Tensor:
    return torch.empty(gradient.shape if wanted else (0,), dtype=dtype, device=gradient.device)


def _like_parameter(gradient: Tensor, parameter: Tensor | None, wanted: bool) -> Tensor:
    if parameter is None or not wanted:
        return gradient.new_empty((0,))
    return torch.empty(parameter.shape, dtype=parameter.dtype, device=gradient.device)


@functools.cache
def _processors(index: int | None) -> int:
    """How many multiprocessors the GPU has; those of an H200 where there is none."""
    return 132 if index is None else torch.cuda.get_device_properties(index).multi_processor_count


def heuristic(size: int, sums: int = 2) -> dict[str, Any]:
    """What to launch with where nobody measured, for rows of so many times 16 bits and for so many sums over rows."""
    block = next_power_of_2(size)
    if block <= LONGEST_TILE:
        # 16 elements by thread; 32 in the longest rows with two sums, which leave too few registers to 32 warps
        warps = 16 if block == LONGEST_TILE and sums > 1 else min(max(block // 512, 4), 32)
        rows = min(max(16 * 32 * warps // block, 1), MOST_ROWS)
        return {"variant": "tile", "rows": rows, "warps": warps, "stages": 1, "programs": max(24 // warps, 1)}
    common = {"variant": "waves", "split": max(block // 8, 16384), "stages": 1, "group_bytes": GROUP_BYTES}
    return {**common, "sum_block": 4096, "rows": 4, "block": 1024, "warps": 8}


def candidates(size: int) -> list[dict[str, Any]]:
    """Configurations worth measuring for rows of so many times 16 bits; `programs` are by multiprocessor."""
    block = next_power_of_2(size)
    found: list[dict[str, Any]] = []
    if block <= LONGEST_TILE:
        for warps in (4, 8, 16, 32):
            for elements in (8, 16, 32):  # by thread
                rows = min(elements * 32 * warps // block, MOST_ROWS)
                if rows and elements * warps <= 512 and (rows > 1 or elements * 32 * warps == block):
                    found += [
                        {"variant": "tile", "rows": rows, "warps": warps, "stages": stages, "programs": programs}
                        for programs in (1, 2, 4, 8)
                        for stages in (1, 2)
                        if programs * warps in (16, 32)
                    ]
    if block >= LONGEST_TILE:
        for warps, rows, width, sum_block in ((4, 4, 512, 2048), (8, 4, 1024, 4096), (8, 2, 2048, 4096)):
            common = {"variant": "waves", "split": max(block // 8, 16384), "sum_block": sum_block}
            found += [
                {**common, "rows": rows, "block": width, "warps": warps, "stages": stages, "group_bytes": group_bytes}
                for group_bytes in (12 * 2**20, 20 * 2**20, 28 * 2**20, 2**40)
                for stages in (1, 3)
            ]
    return found
