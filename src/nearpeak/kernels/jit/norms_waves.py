"""Gradients of norms over rows that do not fit into registers: the waves of `norms_backward`."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearpeak.kernels.jit.launch import launch, next_power_of_2
from nearpeak.kernels.jit.row_starts import Rows, row_start

GROUP_BYTES = 24 * 2**20
"""Of the two tensors that are read twice, so much at once stays in the L2 cache (50 MB) beside what is written."""
_NO_VARIANTS = ("first_sums", "first_rows", "last_rows", "sum_programs")
"""Arguments that differ with each launch of a wave, and are no reason to compile again."""


@triton.jit
def _add_split(
    gradient, x, statistics, weight, sums,
    rows, columns, middle, inner, gradient_outer, gradient_middle, gradient_inner, x_outer, x_middle, x_inner,
    offset, row, split,
    CENTRED: tl.constexpr, LEVELS: tl.constexpr, SPLIT: tl.constexpr, SPLITS: tl.constexpr, SUM_BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Adds up a part of a row: the products of gradient and normalised value and, for a LayerNorm, the gradient."""
    gradient_row = gradient + row_start(row, middle, inner, gradient_outer, gradient_middle, gradient_inner, LEVELS)
    x_row = x + row_start(row, middle, inner, x_outer, x_middle, x_inner, LEVELS)
    rstd = tl.load(statistics + row)
    mean = 0.0
    if CENTRED:
        mean = tl.load(statistics + rows + row)
    products = tl.zeros([SUM_BLOCK], tl.float32)
    plain = tl.zeros([SUM_BLOCK], tl.float32)
    for block in tl.range(0, SPLIT // SUM_BLOCK, num_stages=STAGES):
        column = split * SPLIT + block * SUM_BLOCK + tl.arange(0, SUM_BLOCK)
        inside = column < columns
        g = tl.load(gradient_row + column, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
        n = tl.load(x_row + column, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
        if weight is not None:
            factor = tl.load(weight + column, mask=inside, other=0.0, eviction_policy="evict_last")
            g *= factor.to(tl.float32) + tl.cast(offset, tl.float32)
        products += g * ((n - mean) * rstd)
        if CENTRED:
            plain += g
    tl.store(sums + row * SPLITS + split, tl.sum(products, 0))
    if CENTRED:
        tl.store(sums + (rows + row) * SPLITS + split, tl.sum(plain, 0))


@triton.jit
def write_gradient(
    result, sum_gradient, dx, dresidual, row, column, inside,
    columns, middle, inner, sum_outer, sum_middle, sum_inner, LEVELS: tl.constexpr,
):  # fmt: skip
    """Writes a gradient of rows, with that of their sum added where there was an addition."""
    if sum_gradient is not None:
        start = row_start(row, middle, inner, sum_outer, sum_middle, sum_inner, LEVELS)
        result += tl.load(
            sum_gradient + start[:, None] + column[None, :], mask=inside, other=0.0, eviction_policy="evict_first"
        ).to(tl.float32)
    written = (row * columns)[:, None] + column[None, :]
    if dx is not None:
        tl.store(dx + written, result.to(dx.dtype.element_ty), mask=inside)
    if dresidual is not None:
        tl.store(dresidual + written, result.to(dresidual.dtype.element_ty), mask=inside)


@triton.jit
def _write_chunk(
    gradient, x, sum_gradient, statistics, weight, dx, dresidual, partials, sums,
    rows, columns, middle, inner,
    gradient_outer, gradient_middle, gradient_inner, x_outer, x_middle, x_inner, sum_outer, sum_middle, sum_inner,
    offset, first_row, end, part, block, chunks, continued,
    CENTRED: tl.constexpr, LEVELS: tl.constexpr, WANTS_WEIGHT: tl.constexpr, WANTS_BIAS: tl.constexpr,
    SPLITS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Writes the gradient of a block of columns of some rows, and adds theirs to the partial sums of this part."""
    column = block * BLOCK + tl.arange(0, BLOCK)
    in_columns = column < columns
    share = 1.0 / columns
    split = tl.arange(0, SPLITS)
    if weight is not None:
        factor = tl.load(weight + column, mask=in_columns, other=0.0, eviction_policy="evict_last")
        scale = (factor.to(tl.float32) + tl.cast(offset, tl.float32))[None, :]
    weight_sum = tl.zeros([ROWS, BLOCK], tl.float32)
    bias_sum = tl.zeros([ROWS, BLOCK], tl.float32)
    for tile in tl.range(first_row, end, ROWS, num_stages=STAGES):
        row = tl.cast(tile, tl.int64) + tl.arange(0, ROWS)
        in_rows = row < end
        inside = in_rows[:, None] & in_columns[None, :]
        start = row_start(row, middle, inner, gradient_outer, gradient_middle, gradient_inner, LEVELS)
        g = tl.load(
            gradient + start[:, None] + column[None, :], mask=inside, other=0.0, eviction_policy="evict_first"
        ).to(tl.float32)
        start = row_start(row, middle, inner, x_outer, x_middle, x_inner, LEVELS)
        n = tl.load(x + start[:, None] + column[None, :], mask=inside, other=0.0, eviction_policy="evict_first").to(
            tl.float32
        )
        rstd = tl.load(statistics + row, mask=in_rows, other=0.0)[:, None]
        if CENTRED:
            n -= tl.load(statistics + rows + row, mask=in_rows, other=0.0)[:, None]
        n *= rstd
        if WANTS_WEIGHT:
            weight_sum += g * n
        if WANTS_BIAS:
            bias_sum += g
        if dx is not None or dresidual is not None:
            if weight is not None:
                g *= scale
            # without a mask: what rows after the last make of the sums of another is not written
            known = tl.minimum(row, rows - 1)
            at = sums + (known * SPLITS)[:, None] + split[None, :]
            result = g - n * (tl.sum(tl.load(at), 1) * share)[:, None]
            if CENTRED:
                at = sums + ((rows + known) * SPLITS)[:, None] + split[None, :]
                result -= (tl.sum(tl.load(at), 1) * share)[:, None]
            result *= rstd
            write_gradient(
                result, sum_gradient, dx, dresidual, row, column, inside,
                columns, middle, inner, sum_outer, sum_middle, sum_inner, LEVELS,
            )  # fmt: skip
    # the groups before this one have left their sums here: launches follow one another
    later = in_columns & continued
    if WANTS_WEIGHT:
        at = partials + part.to(tl.int64) * columns + column
        before = tl.load(at, mask=later, other=0.0)
        tl.store(at, before + tl.sum(weight_sum, 0), mask=in_columns)
    if WANTS_BIAS:
        if WANTS_WEIGHT:
            part += chunks
        at = partials + part.to(tl.int64) * columns + column
        before = tl.load(at, mask=later, other=0.0)
        tl.store(at, before + tl.sum(bias_sum, 0), mask=in_columns)


@triton.jit(do_not_specialize=_NO_VARIANTS)
def backward_wave(
    gradient, x, sum_gradient, statistics, weight, dx, dresidual, partials, sums,
    rows, columns, middle, inner,
    gradient_outer, gradient_middle, gradient_inner, x_outer, x_middle, x_inner, sum_outer, sum_middle, sum_inner,
    offset, first_sums, first_rows, last_rows, sum_programs, chunk, chunks,
    CENTRED: tl.constexpr, LEVELS: tl.constexpr, WANTS_WEIGHT: tl.constexpr, WANTS_BIAS: tl.constexpr,
    SPLIT: tl.constexpr, SPLITS: tl.constexpr, SUM_BLOCK: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """The first `sum_programs` programs add up splits of rows from `first_sums` on; the others write the gradient of
    the rows from `first_rows` to `last_rows`, whose sums an earlier launch has made."""
    program = tl.program_id(0)
    if program < sum_programs:
        _add_split(
            gradient, x, statistics, weight, sums,
            rows, columns, middle, inner, gradient_outer, gradient_middle, gradient_inner, x_outer, x_middle, x_inner,
            offset, (first_sums + program // SPLITS).to(tl.int64), program % SPLITS,
            CENTRED, LEVELS, SPLIT, SPLITS, SUM_BLOCK, STAGES,
        )  # fmt: skip
    else:
        part = (program - sum_programs) % chunks
        begin = first_rows + part * chunk
        _write_chunk(
            gradient, x, sum_gradient, statistics, weight, dx, dresidual, partials, sums,
            rows, columns, middle, inner, gradient_outer, gradient_middle, gradient_inner,
            x_outer, x_middle, x_inner, sum_outer, sum_middle, sum_inner,
            offset, begin, tl.minimum(begin + chunk, last_rows), part, (program - sum_programs) // chunks,
            chunks, first_rows > 0,
            CENTRED, LEVELS, WANTS_WEIGHT, WANTS_BIAS, SPLITS, ROWS, BLOCK, STAGES,
        )  # fmt: skip


def waves(
    found: Rows, tensors: tuple[Tensor | None, ...], rows: int, columns: int, offset: float, centred: bool,
    wants: list[bool], processors: int, config: dict[str, Any],
) -> tuple[Tensor | None, int]:  # fmt: skip
    gradient, x, _ = found.tensors
    assert gradient is not None
    assert x is not None
    device, tile, split = gradient.device, config["rows"], config["split"]
    splits = next_power_of_2(triton.cdiv(columns, split))  # some may have nothing to add: loads of all are wide
    blocks = triton.cdiv(columns, config["block"])
    row_bytes = columns * (gradient.element_size() + x.element_size())
    group = min(max(config["group_bytes"] // row_bytes, 1), rows)
    # enough programs to fill the processors twice; each has whole tiles of rows
    chunks = min(triton.cdiv(2 * processors, blocks), triton.cdiv(group, tile))
    chunk = triton.cdiv(triton.cdiv(group, chunks), tile) * tile
    chunks = triton.cdiv(group, chunk)
    partials = empty_partials(wants, chunks, columns, device)
    sums = torch.empty((2 if centred else 1, rows, splits), dtype=torch.float32, device=device)
    needs_sums = wants[0] or wants[1]
    for first in range(0 if needs_sums else group, rows + group, group):
        sum_programs = (min(first + group, rows) - first) * splits if needs_sums and first < rows else 0
        programs = sum_programs + (blocks * chunks if first else 0)
        launch(
            backward_wave, (programs, 1, 1), *found.tensors, *tensors, partials, sums,
            rows, columns, found.middle, found.inner, *found.strides[0], *found.strides[1], *found.strides[2], offset,
            first, first - group, min(first, rows), sum_programs, chunk, chunks,
            centred, found.levels, wants[2], wants[3],
            split, splits, config["sum_block"], tile, config["block"], config["stages"],
            warps=config["warps"],
        )  # fmt: skip
    return partials, chunks


def empty_partials(wants: list[bool], parts: int, columns: int, device: torch.device) -> Tensor | None:
    count = wants[2] + wants[3]
    return torch.empty((count, parts, columns), dtype=torch.float32, device=device) if count else None
