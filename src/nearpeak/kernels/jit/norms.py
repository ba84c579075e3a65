"""The forward kernels of `rms_norm`, `layer_norm` and both after an addition; CENTRED is a LayerNorm.

- tile: a program has one or more whole rows in registers. Every byte is moved once.
- split: for rows that do not fit. A program goes over its part of a row twice, the second time from its end to its
  start, as the end was read last and is most likely still in the L2 cache. A row has so many parts that the rows at
  work fit into that cache together; their programs tell each other what they found before they write.
- parts: the same on Hopper, from shared memory: every byte is moved once. See `parts`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearpeak.kernels.configs import tuned
from nearpeak.kernels.jit.gluon import runs_on
from nearpeak.kernels.jit.launch import launch, next_power_of_2
from nearpeak.kernels.jit.meeting import (
    ALL,
    FIRST,
    LAST,
    PHASES,
    as_measured,
    counters,
    meet,
    split,
    split_candidates,
    turn,
)
from nearpeak.kernels.jit.norms_configs import registers, table_key
from nearpeak.kernels.jit.parts import forward_candidates
from nearpeak.kernels.jit.row_starts import row_start, rows_of
from nearpeak.kernels.jit.rows import read_again

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
    CENTRED: tl.constexpr, LEVELS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Whole rows in registers: PACKED, as the 16 bits that were read, so that more programs run at a time."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    in_rows = row < rows
    in_columns = column < columns
    inside = in_rows[:, None] & in_columns[None, :]
    start = row_start(row, middle, inner, x_outer, x_middle, x_inner, LEVELS)
    kept = tl.load(x + start[:, None] + column[None, :], mask=inside, other=0.0)
    values = kept.to(tl.float32)
    written = (row * columns)[:, None] + column[None, :]
    if residual is not None:
        start = row_start(row, middle, inner, residual_outer, residual_middle, residual_inner, LEVELS)
        values += tl.load(residual + start[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float32)
        # normalised as it is written, and as a model computes it that adds and normalises apart
        kept = values.to(total.dtype.element_ty)
        tl.store(total + written, kept, mask=inside)
        values = kept.to(tl.float32)
    share = 1.0 / columns
    if CENTRED:
        mean = tl.div_rn(tl.sum(values, 1), tl.cast(columns, tl.float32))  # exact where it can be, unlike "/" on a GPU
        if PACKED:
            values = read_again(kept, columns, mean[:, None]).to(tl.float32)
        values = tl.where(inside, values - mean[:, None], 0.0)
        tl.store(statistics + rows + row, mean, mask=in_rows)
    rstd = tl.math.rsqrt(tl.sum(values * values, 1) * share + tl.cast(eps, tl.float32))
    tl.store(statistics + row, rstd, mask=in_rows)
    if PACKED:
        values = read_again(kept, columns, rstd[:, None]).to(tl.float32)
        if CENTRED:
            values -= mean[:, None]
    values *= rstd[:, None]
    if weight is not None:
        factor = tl.load(weight + column, mask=in_columns, other=0.0).to(tl.float32)
        values *= (factor + tl.cast(offset, tl.float32))[None, :]
    if bias is not None:
        values += tl.load(bias + column, mask=in_columns, other=0.0).to(tl.float32)[None, :]
    tl.store(result + written, values.to(result.dtype.element_ty), mask=inside)


@triton.jit
def read_part(x_row, residual_row, total_row, column, stop, HINTS: tl.constexpr):
    """Some columns, 0 from `stop` on; with a residual the sum, which is written."""
    inside = column < stop
    # what is read again soon is to stay in the cache, the sum if there is one
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
    CENTRED: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, HINTS: tl.constexpr,
):  # fmt: skip
    """Of the columns from `begin` to `stop` the mean, and the sum of squares, of differences from it if CENTRED.

    The mean of what is read `first`, c, is taken off all others. That loses few digits: where c is the mean of a share
    f of the numbers, its square distance from the mean of all is at most their variance divided by f.
    """
    lane = tl.arange(0, STEPS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    near = 0.0
    values = first.to(tl.float32)
    sums = tl.zeros([BLOCK], tl.float32)
    if CENTRED:
        count = tl.minimum(stop - begin, STEPS * BLOCK).to(tl.float32)
        near = tl.div_rn(tl.sum(tl.sum(values, 0), 0), tl.maximum(count, 1.0))
        values = tl.where(begin + lane < stop, values - near, 0.0)
        sums = tl.sum(values, 0)
    squares = tl.sum(values * values, 0)
    for start in tl.range(begin + STEPS * BLOCK, stop, STEPS * BLOCK, num_stages=STAGES):
        values = read_part(x_row, residual_row, total_row, start + lane, stop, HINTS).to(tl.float32)
        if CENTRED:
            values = tl.where(start + lane < stop, values - near, 0.0)
            sums += tl.sum(values, 0)
        squares += tl.sum(values * values, 0)
    if CENTRED:
        total = tl.sum(sums, 0)
        moved = tl.div_rn(total, tl.maximum(stop - begin, 1).to(tl.float32))
        return near + moved, tl.maximum(tl.sum(squares, 0) - total * moved, 0.0)
    return 0.0, tl.sum(squares, 0)


@triton.jit
def write_columns(
    values, weight, bias, result_row, column, stop, mean, rstd, offset, CENTRED: tl.constexpr,
):  # fmt: skip
    inside = column < stop
    values = values.to(tl.float32)
    if CENTRED:
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
    CENTRED: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, HINTS: tl.constexpr,
    KEPT: tl.constexpr,
):  # fmt: skip
    """Reads the columns from `begin` to `stop` again, from their end to their start, and writes them.

    What was read `first` is at hand if it was KEPT.
    """
    lane = tl.arange(0, STEPS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    blocks = tl.cdiv(stop - begin, STEPS * BLOCK)
    if KEPT:
        values = read_again(first, stop, rstd)
        write_columns(values, weight, bias, result_row, begin + lane, stop, mean, rstd, offset, CENTRED)
    for index in tl.range(0, blocks - (1 if KEPT else 0), num_stages=STAGES):
        column = begin + (blocks - 1 - index) * (STEPS * BLOCK) + lane
        values = tl.load(
            x_row + column, mask=column < stop, other=0.0, eviction_policy="evict_first" if HINTS else ""
        )  # fmt: skip
        write_columns(values, weight, bias, result_row, column, stop, mean, rstd, offset, CENTRED)


@triton.jit
def forward_split(
    x, residual, weight, bias, result, total, statistics, partial, counters,
    rows, columns, middle, inner,
    x_outer, x_middle, x_inner, residual_outer, residual_middle, residual_inner,
    eps, offset, part, parts,
    CENTRED: tl.constexpr, LEVELS: tl.constexpr, PARTS: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr, HINTS: tl.constexpr, KEPT: tl.constexpr, PHASE: tl.constexpr,
):  # fmt: skip
    """One part of one row; a row of one part needs to wait for nobody."""
    number = tl.program_id(0)
    if PARTS > 1:
        number = turn(counters, PHASE)
    row = (number // parts).to(tl.int64)
    own = number % parts
    begin = own * part
    stop = tl.minimum(begin + part, columns)
    x_row = x + row_start(row, middle, inner, x_outer, x_middle, x_inner, LEVELS)
    residual_row = None
    if residual is not None:
        residual_row = residual + row_start(row, middle, inner, residual_outer, residual_middle, residual_inner, LEVELS)
    total_row = total + row * columns
    mean = 0.0
    lane = tl.arange(0, STEPS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    first = read_part(x_row, residual_row, total_row, begin + lane, stop, HINTS)
    if PARTS == 1 or PHASE != LAST:
        mean, squares = part_statistics(
            x_row, residual_row, total_row, first, begin, stop, CENTRED, STEPS, BLOCK, STAGES, HINTS
        )
    if PARTS > 1:
        partial += row * 2 * parts
        if PHASE != LAST:
            if CENTRED:
                tl.store(partial + own, mean)
            tl.store(partial + parts + own, squares)
        if PHASE == ALL:
            meet(counters, row, parts)
        if PHASE != FIRST:
            each = tl.arange(0, PARTS)
            among = each < parts
            all_squares = tl.load(partial + parts + each, mask=among, other=0.0, cache_modifier=".cg")
            if CENTRED:
                counts = tl.where(among, tl.minimum(part, columns - each * part), 0).to(tl.float32)
                means = tl.load(partial + each, mask=among, other=0.0, cache_modifier=".cg")
                mean = tl.div_rn(tl.sum(means * counts, 0), columns.to(tl.float32))
                all_squares += counts * (means - mean) * (means - mean)
            squares = tl.sum(all_squares, 0)
    if PARTS == 1 or PHASE != FIRST:
        rstd = tl.math.rsqrt(squares / columns + tl.cast(eps, tl.float32))
        if own == 0:
            tl.store(statistics + row, rstd)
            if CENTRED:
                tl.store(statistics + rows + row, mean)
        if residual is not None:
            x_row = total_row
            tl.debug_barrier()  # the sum may be read by other threads than those that wrote it
        write_part(
            x_row, weight, bias, result + row * columns, first, begin, stop, mean, rstd, offset,
            CENTRED, STEPS, BLOCK, STAGES, HINTS, KEPT,
        )  # fmt: skip


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
    tensors = (*found.tensors, weight, bias, result, total, statistics)
    sizes = (rows, columns, found.middle, found.inner, *found.strides[0], *found.strides[1], eps, offset)
    key = table_key("norm_forward", centred, residual is not None)
    config = config or as_measured(tuned(key, size, x.device), rows) or heuristic(size)
    if config["variant"] == "parts":
        if runs_on(x.device):
            from nearpeak.kernels.jit import parts_norms

            written = (result, total, statistics)
            if parts_norms.forward(found, weight, bias, *written, rows, columns, eps, offset, centred, config):
                return written
        config = heuristic(size)
    if config["variant"] == "tile":
        grid = (triton.cdiv(rows, config["rows"]), 1, 1)
        block = next_power_of_2(columns)
        launch(
            forward_tile, grid, *tensors, *sizes, centred, found.levels, config["rows"], block,
            config.get("packed", False), warps=config["warps"],
            registers=registers(config["warps"], config["programs"]) if "programs" in config else None,
        )  # fmt: skip
        return result, total, statistics
    part, parts = split(rows, columns, columns * total.element_size(), x.device, config.get("part"))
    partial, counted = statistics, statistics
    if parts > 1:
        partial = torch.empty((rows, 2, parts), dtype=torch.float32, device=x.device)
        counted = counters(rows, x.device)
    block = min(16 // x.element_size() * 32 * config["warps"], next_power_of_2(part))
    for phase in PHASES if parts > 1 else PHASES[:1]:
        launch(
            forward_split, (rows * parts, 1, 1), *tensors, partial, counted, *sizes, part, parts, centred, found.levels,
            next_power_of_2(parts), config["steps"], block, config["stages"], config["hints"], config["kept"], phase,
            warps=config["warps"],
        )  # fmt: skip
    return result, total, statistics


def heuristic(size: int) -> dict[str, Any]:
    """What to launch with where nobody measured, for rows of so many times 16 bits."""
    block = next_power_of_2(size)
    if block <= LONGEST_TILE:
        warps = min(max(block // 1024, 4), 32)
        # 32 elements by thread, in 4 loads of 16 bytes
        rows = min(max(32 * 32 * warps // block, 1), MOST_ROWS)
        found = {"variant": "tile", "rows": rows, "warps": warps}
        return {**found, "programs": 2} if _is_full(warps, block) else found
    return {"variant": "split", "steps": 4, "warps": 16, "stages": 1, "hints": True, "kept": False}


def _is_full(warps: int, block: int) -> bool:
    """Whether a row takes half of the registers, and the compiler may take a few more than half for it."""
    return warps == 16 and block == LONGEST_TILE // 2


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
        found += [{**one, "programs": 2} for one in found if one["rows"] == 1 and _is_full(one["warps"], block)]
        found += [{**one, "packed": True} for one in found if one["rows"] == 1 and block >= 4096]
    if block >= LONGEST_TILE // 2:
        found += split_candidates(size) + forward_candidates(size, weights=True)
    return found
