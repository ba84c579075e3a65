"""The forward kernels of `rms_norm`, `layer_norm` and both after an addition; CENTRED is a LayerNorm.

- tile: a program has one or more whole rows in registers. Every byte is moved once.
- loop: a program goes over a row twice, the second time from its end to its start, as the end was read last and is most
  likely still in the L2 cache. For rows that do not fit into registers.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearpeak.kernels.configs import tuned
from nearpeak.kernels.jit.launch import launch, next_power_of_2
from nearpeak.kernels.jit.row_starts import row_start, rows_of

LONGEST_TILE = 32768
"""A row of more than so many times 16 bits does not fit into the registers of 32 warps."""

MOST_ROWS = 128
"""Of a program: each takes registers of its own for its address and its statistics."""


@triton.jit
def forward_tile(
    x, residual, weight, bias, result, total, statistics,
    rows, columns, middle, inner,
    x_outer, x_middle, x_inner, residual_outer, residual_middle, residual_inner,
    eps, offset,
    CENTRED: tl.constexpr, LEVELS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    in_rows = row < rows
    in_columns = column < columns
    inside = in_rows[:, None] & in_columns[None, :]
    start = row_start(row, middle, inner, x_outer, x_middle, x_inner, LEVELS)
    values = tl.load(x + start[:, None] + column[None, :], mask=inside, other=0.0, eviction_policy="evict_first").to(
        tl.float32
    )
    written = (row * columns)[:, None] + column[None, :]
    if residual is not None:
        start = row_start(row, middle, inner, residual_outer, residual_middle, residual_inner, LEVELS)
        values += tl.load(
            residual + start[:, None] + column[None, :], mask=inside, other=0.0, eviction_policy="evict_first"
        ).to(tl.float32)
        # normalised as it is written, and as a model computes it that adds and normalises apart
        rounded = values.to(total.dtype.element_ty)
        tl.store(total + written, rounded, mask=inside)
        values = rounded.to(tl.float32)
    share = 1.0 / columns
    if CENTRED:
        mean = tl.div_rn(tl.sum(values, 1), tl.cast(columns, tl.float32))  # exact where it can be, unlike "/" on a GPU
        values = tl.where(inside, values - mean[:, None], 0.0)
        tl.store(statistics + rows + row, mean, mask=in_rows)
    rstd = tl.math.rsqrt(tl.sum(values * values, 1) * share + tl.cast(eps, tl.float32))
    tl.store(statistics + row, rstd, mask=in_rows)
    values *= rstd[:, None]
    if weight is not None:
        factor = tl.load(weight + column, mask=in_columns, other=0.0, eviction_policy="evict_last").to(tl.float32)
        values *= (factor + tl.cast(offset, tl.float32))[None, :]
    if bias is not None:
        values += tl.load(bias + column, mask=in_columns, other=0.0, eviction_policy="evict_last").to(tl.float32)[
            None, :
        ]
    tl.store(result + written, values.to(result.dtype.element_ty), mask=inside)


@triton.jit
def forward_loop(
    x, residual, weight, bias, result, total, statistics,
    rows, columns, middle, inner,
    x_outer, x_middle, x_inner, residual_outer, residual_middle, residual_inner,
    eps, offset,
    CENTRED: tl.constexpr, LEVELS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, BLOCK)
    blocks = tl.cdiv(columns, BLOCK)
    share = 1.0 / columns
    for number in range(tl.program_id(0), rows, tl.num_programs(0)):
        row = tl.cast(number, tl.int64)
        x_row = x + row_start(row, middle, inner, x_outer, x_middle, x_inner, LEVELS)
        written = row * columns
        if residual is not None:
            residual_row = residual + row_start(
                row, middle, inner, residual_outer, residual_middle, residual_inner, LEVELS
            )
        # of each lane: the sum of squares; or the mean, and the sum of squared differences from it (Welford)
        squares = tl.zeros([BLOCK], tl.float32)
        means = tl.zeros([BLOCK], tl.float32)
        for block in tl.range(0, blocks, num_stages=STAGES):
            column = block * BLOCK + lane
            inside = column < columns
            values = tl.load(x_row + column, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
            if residual is not None:
                values += tl.load(residual_row + column, mask=inside, other=0.0, eviction_policy="evict_first").to(
                    tl.float32
                )
                rounded = values.to(total.dtype.element_ty)
                tl.store(total + written + column, rounded, mask=inside, eviction_policy="evict_last")
                values = rounded.to(tl.float32)
            if CENTRED:
                difference = tl.where(inside, values - means, 0.0)
                means += difference * tl.div_rn(1.0, tl.cast(block + 1, tl.float32))
                squares += difference * (values - means)
            else:
                squares += values * values
        if CENTRED:
            counts = tl.maximum((columns - lane + BLOCK - 1) // BLOCK, 0).to(tl.float32)
            mean = tl.div_rn(tl.sum(means * counts, 0), tl.cast(columns, tl.float32))
            difference = means - mean
            squares += counts * difference * difference
            tl.store(statistics + rows + row, mean)
        rstd = tl.math.rsqrt(tl.sum(squares, 0) * share + tl.cast(eps, tl.float32))
        tl.store(statistics + row, rstd)
        if residual is not None:
            x_row = total + written
            tl.debug_barrier()  # the sum may be read by other threads than those that wrote it
        for index in tl.range(0, blocks, num_stages=STAGES):
            column = (blocks - 1 - index) * BLOCK + lane
            inside = column < columns
            values = tl.load(x_row + column, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
            if CENTRED:
                values -= mean
            values *= rstd
            if weight is not None:
                factor = tl.load(weight + column, mask=inside, other=0.0, eviction_policy="evict_last")
                values *= factor.to(tl.float32) + tl.cast(offset, tl.float32)
            if bias is not None:
                values += tl.load(bias + column, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
            tl.store(
                result + written + column,
                values.to(result.dtype.element_ty),
                mask=inside,
                eviction_policy="evict_first",
            )


def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    offset: float,
    *,
    config: dict[str, Any] | None = None,
) -> tuple[Tensor, Tensor]:
    result, _, statistics = _forward(x, None, weight, bias, eps, offset, False, config)
    return result, statistics


def layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, *, config: dict[str, Any] | None = None
) -> tuple[Tensor, Tensor]:
    result, _, statistics = _forward(x, None, weight, bias, eps, 0.0, True, config)
    return result, statistics


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float,
    *, config: dict[str, Any] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return _forward(x, residual, weight, bias, eps, offset, False, config)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float,
    *, config: dict[str, Any] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return _forward(x, residual, weight, bias, eps, 0.0, True, config)


def _forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float,
    centred: bool, config: dict[str, Any] | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The result, the sum (x itself without a residual) and [1 or 2, rows] of float32: 1 / deviation, and the mean."""
    columns = x.shape[-1]
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = x if residual is None else torch.empty(x.shape, dtype=residual.dtype, device=x.device)
    rows = x.numel() // columns if columns else x.shape[:-1].numel()
    statistics = torch.empty((2 if centred else 1, rows), dtype=torch.float32, device=x.device)
    if not x.numel():
        return result, total, statistics.zero_()
    size = columns * max(x.element_size(), total.element_size()) // 2
    found = rows_of(x, residual)
    if weight is not None:
        weight = weight.contiguous()
    if bias is not None:
        bias = bias.contiguous()
    arguments = (
        *found.tensors, weight, bias, result, total, statistics, rows, columns, found.middle, found.inner,
        *found.strides[0], *found.strides[1], eps, offset, centred, found.levels,
    )  # fmt: skip
    config = config or tuned("norm_forward", size, x.device) or heuristic(size)
    if config["variant"] == "tile":
        grid = (triton.cdiv(rows, config["rows"]), 1, 1)
        block = next_power_of_2(columns)
        launch(forward_tile, grid, *arguments, config["rows"], block, warps=config["warps"])
    else:
        grid = (min(rows, config["programs"]), 1, 1)
        block = min(config["block"], next_power_of_2(columns))
        launch(forward_loop, grid, *arguments, block, config["stages"], warps=config["warps"])
    return result, total, statistics


def heuristic(size: int) -> dict[str, Any]:
    """What to launch with where nobody measured, for rows of so many times 16 bits."""
    block = next_power_of_2(size)
    if block <= LONGEST_TILE:
        warps = min(max(block // 1024, 4), 32)
        # 32 elements by thread, in 4 loads of 16 bytes
        rows = min(max(32 * 32 * warps // block, 1), MOST_ROWS)
        return {"variant": "tile", "rows": rows, "warps": warps}
    # as many rows at once as the L2 cache has room for, twice over the 132 processors at most
    programs = min(max(40 * 2**20 // (2 * size), 66), 264)
    return {"variant": "loop", "block": 8192, "warps": 16, "stages": 1, "programs": programs}


def candidates(size: int) -> list[dict[str, Any]]:
    """Configurations worth measuring for rows of so many times 16 bits."""
    block = next_power_of_2(size)
    found: list[dict[str, Any]] = []
    if block <= LONGEST_TILE:
        for warps in (1, 2, 4, 8, 16, 32):
            for elements in (8, 16, 32, 64):  # by thread
                rows = min(elements * 32 * warps // block, MOST_ROWS)
                if rows and elements * warps <= 1024 and (rows > 1 or elements * 32 * warps == block):
                    config = {"variant": "tile", "rows": rows, "warps": warps}
                    found += [config] if config not in found else []
    if block > LONGEST_TILE // 2:
        for programs in (66, 88, 132, 264):
            for size, warps in ((4096, 8), (8192, 16), (8192, 32), (16384, 32)):
                if programs * warps <= 132 * 64:
                    found += [
                        {"variant": "loop", "block": size, "warps": warps, "stages": stages, "programs": programs}
                        for stages in (1, 3)
                    ]
    return found
