"""The backward kernels of the norms: the gradient of rows and, in the same pass, partial gradients of weight and bias.

Sums over rows are kept in float32 by each program and added in a fixed order by a second kernel, so that results are
the same in every run.

- tile: a fixed number of programs, each with whole rows in registers, goes over all rows. Every byte is moved once.
- shared: for rows that do not fit, in `norms_shared`. A row has several programs, which read it twice.
- parts: the same on Hopper, from shared memory: every byte is moved once. See `parts`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearpeak.kernels.configs import processors, tuned
from nearpeak.kernels.jit.gluon import runs_on
from nearpeak.kernels.jit.launch import launch, next_power_of_2
from nearpeak.kernels.jit.norms_configs import heuristic, registers, table_key
from nearpeak.kernels.jit.norms_gradient import (
    as_float32,
    coefficients,
    empty_partials,
    read_rows,
    read_weight,
    widened,
    within,
    write_partials,
    write_rows,
)
from nearpeak.kernels.jit.norms_shared import shared
from nearpeak.kernels.jit.row_starts import Rows, rows_of
from nearpeak.kernels.jit.rows import read_again


@triton.jit
def backward_tile(
    gradient, x, sum_gradient, statistics, weight, dx, dresidual, partials,
    rows, columns, middle, inner,
    gradient_outer, gradient_middle, gradient_inner, x_outer, x_middle, x_inner, sum_outer, sum_middle, sum_inner,
    offset,
    CENTRED: tl.constexpr, LEVELS: tl.constexpr, WANTS_WEIGHT: tl.constexpr, WANTS_BIAS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, FULL: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr,
    AGAIN: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    column = tl.arange(0, BLOCK)
    weight_sum = tl.zeros([ROWS, BLOCK], tl.float32)
    bias_sum = tl.zeros([ROWS, BLOCK], tl.float32)
    for tile in tl.range(program, tl.cdiv(rows, ROWS), programs, num_stages=STAGES):
        first = tl.cast(tile, tl.int64) * ROWS
        row = first + tl.arange(0, ROWS)
        in_rows, in_columns, inside = within(first, rows, column, columns, ROWS, FULL, EVEN)
        g_read = read_rows(
            gradient, row, column, inside, middle, inner, gradient_outer, gradient_middle, gradient_inner, LEVELS, ""
        )
        x_read = read_rows(x, row, column, inside, middle, inner, x_outer, x_middle, x_inner, LEVELS, "")
        added = None
        if sum_gradient is not None and (dx is not None or dresidual is not None):
            added = read_rows(
                sum_gradient, row, column, inside, middle, inner, sum_outer, sum_middle, sum_inner, LEVELS, ""
            )
        rstd = tl.load(statistics + row, mask=in_rows, other=0.0)
        g = as_float32(g_read)
        n = as_float32(x_read)
        if CENTRED:
            mean = tl.load(statistics + rows + row, mask=in_rows, other=0.0)[:, None]
            n -= mean
        product = n * g
        if WANTS_WEIGHT:
            weight_sum += product * rstd[:, None]
        if WANTS_BIAS:
            bias_sum += g
        if dx is not None or dresidual is not None:
            level = 0.0
            if weight is not None:
                factor = read_weight(weight, column, in_columns)
                scale = widened(factor, offset)
                product *= scale
                g *= scale
            along = tl.sum(product, 1)
            if CENTRED:
                level = tl.sum(g, 1)
            slope, level = coefficients(along, level, rstd, columns, CENTRED)
            if AGAIN:
                # rows wait for their sums as the 16 bits that were read, and not as float32
                n = read_again(x_read, columns, along[:, None]).to(tl.float32)
                if CENTRED:
                    n -= mean
                g = read_again(g_read, columns, along[:, None]).to(tl.float32)
                if weight is not None:
                    if ROWS == 1 and weight.dtype.element_ty.primitive_bitwidth == 16:
                        scale = widened(read_again(factor, columns, along[:, None]), offset)
                    g *= scale
            result = n * slope[:, None]
            if CENTRED:
                result += level[:, None]
            result += g * rstd[:, None]
            write_rows(result, added, dx, dresidual, row, column, inside, columns)
    write_partials(
        partials, tl.sum(weight_sum, 0), tl.sum(bias_sum, 0), program, programs, column, column < columns, columns,
        WANTS_WEIGHT, WANTS_BIAS,
    )  # fmt: skip


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
    added = sum_gradient is not None
    config = config or tuned(table_key("norm_backward", centred, added), size, x.device)
    config = config or heuristic(size, centred=centred, added=added)
    tensors = (statistics, weight, dx if wants[0] else None, dresidual if wants[1] else None)
    rows, at_hand = gradient.numel() // columns, processors(x.device)
    left = None
    if config["variant"] == "parts":
        if runs_on(x.device):
            from nearpeak.kernels.jit import parts_norms_backward

            left = parts_norms_backward.backward(found, *tensors, rows, columns, offset or None, centred, wants, config)
        config = heuristic(size, centred=centred, added=added)
    if left is None:
        run = _tile if config["variant"] == "tile" else shared
        left = run(found, tensors, rows, columns, offset or None, centred, wants, at_hand, config)
    partials, parts = left
    if wants[2] or wants[3]:
        # all is read at once: programs are few, and have little to do
        height = min(next_power_of_2(parts), 1024)
        width = max(4096 // height, 32 if columns > 2048 else 8)
        launch(
            add_partials, (triton.cdiv(columns, width), wants[2] + wants[3], 1),
            partials, dweight, dbias if wants[3] else None, parts, columns, wants[2], height, width,
            warps=height * width // 1024,
        )  # fmt: skip
    return dx, dresidual, dweight, dbias


def _tile(
    found: Rows, tensors: tuple[Tensor | None, ...], rows: int, columns: int, offset: float | None, centred: bool,
    wants: list[bool], at_hand: int, config: dict[str, Any],
) -> tuple[Tensor | None, int]:  # fmt: skip
    gradient, x, _ = found.tensors
    assert gradient is not None
    assert x is not None
    device = gradient.device
    height, block = config["rows"], next_power_of_2(columns)
    programs = min(triton.cdiv(rows, height), config["programs"] * at_hand)
    partials = empty_partials(wants, programs, columns, device)
    launch(
        backward_tile, (programs, 1, 1), *found.tensors, *tensors, partials,
        rows, columns, found.middle, found.inner, *found.strides[0], *found.strides[1], *found.strides[2], offset,
        centred, found.levels, wants[2], wants[3], height, block, rows % height == 0, columns == block,
        config["stages"], max(gradient.element_size(), x.element_size()) == 2,
        warps=config["warps"], registers=registers(config["warps"], config["programs"]) if height <= 4 else None,
    )  # fmt: skip
    return partials, programs


def _like(gradient: Tensor, dtype: torch.dtype, wanted: bool) -> Tensor:
    return torch.empty(gradient.shape if wanted else (0,), dtype=dtype, device=gradient.device)


def _like_parameter(gradient: Tensor, parameter: Tensor | None, wanted: bool) -> Tensor:
    if parameter is None or not wanted:
        return gradient.new_empty((0,))
    return torch.empty(parameter.shape, dtype=parameter.dtype, device=gradient.device)
