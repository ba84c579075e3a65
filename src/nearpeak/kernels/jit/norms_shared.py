"""Gradients of norms over rows that do not fit into registers: the variant `shared` of `norms_backward`.

A program has a part of the columns, of fixed width, and keeps the sums over rows of these in registers. The programs
of one group, one for each part, have the same rows and go through them in batches: each reads its part of the rows of
a batch and leaves the sums along them in a buffer; once those of all parts are there, it reads the rows again, from
the L2 cache, and writes their gradient. Batches are large, as a meeting waits for all that a program has stored, and
small enough that those at work fit into the cache. AHEAD, a program reads the next batch before it waits for this one.

That always ends, without a launch that needs all programs to run at once: which group and part a program has is a
ticket, drawn as it begins. So the programs of a group begin one after another, at most one group is not complete, and
those of complete groups wait only for each other, end, and make room for the last. A group is never larger than the
number of multiprocessors. A row of more parts than that is done in two launches, of which the second writes; nobody
waits there, and rows are read from memory twice. So it is in the interpreter, which runs programs one after another.

What a program adds up depends on its ticket alone and not on where it runs: results are the same in every run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearpeak.kernels.jit.launch import launch, next_power_of_2
from nearpeak.kernels.jit.meeting import ALL, FIRST, LAST, MOST_PARTS, PHASES, arrive, counters, turn, wait
from nearpeak.kernels.jit.norms_configs import registers
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
from nearpeak.kernels.jit.row_starts import Rows

CACHED = 34 * 2**20
"""Bytes of the two tensors that are read twice that stay in the L2 cache (50 MB) beside what is written."""


@triton.jit
def along_row(sums, row, parts, PARTS: tl.constexpr, PADDED: tl.constexpr):
    """The sums along rows, of all parts of each."""
    each = tl.arange(0, PARTS)[None, :]
    found = tl.load(sums + (row * PARTS)[:, None] + each, cache_modifier=".cg")
    if PADDED:
        found = tl.where(each < parts, found, 0.0)
    return tl.sum(found, 1)


@triton.jit
def backward_shared(
    gradient, x, sum_gradient, statistics, weight, dx, dresidual, partials, sums, counters,
    rows, columns, middle, inner,
    gradient_outer, gradient_middle, gradient_inner, x_outer, x_middle, x_inner, sum_outer, sum_middle, sum_inner,
    offset, parts, groups, batch,
    CENTRED: tl.constexpr, LEVELS: tl.constexpr, WANTS_WEIGHT: tl.constexpr, WANTS_BIAS: tl.constexpr,
    PARTS: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, FULL: tl.constexpr,
    EVEN: tl.constexpr, AHEAD: tl.constexpr, HINTS: tl.constexpr, STAGES: tl.constexpr, PHASE: tl.constexpr,
):  # fmt: skip
    """One part of the rows of one group; a row of one part needs to wait for nobody."""
    # what is read again soon is to stay in the cache, and to leave it then
    FIRST_POLICY: tl.constexpr = "evict_last" if HINTS else ""
    LAST_POLICY: tl.constexpr = "evict_first" if HINTS else ""
    number = tl.program_id(0)
    if PARTS > 1:
        number = turn(counters, PHASE)
    group = number // parts
    own = number % parts
    column = own * BLOCK + tl.arange(0, BLOCK)
    weight_sum = tl.zeros([BLOCK], tl.float32)
    bias_sum = tl.zeros([BLOCK], tl.float32)
    # AHEAD there is one more turn, in which nothing is left to be read
    for turn_of in range(group, tl.cdiv(rows, batch) + (groups if AHEAD else 0), groups):
        if PHASE != LAST:
            first = tl.cast(turn_of, tl.int64) * batch
            count = tl.minimum(rows - first, batch).to(tl.int32)
            for index in tl.range(0, count, ROWS, num_stages=STAGES):
                in_rows, in_columns, inside = within(index, count, column, columns, ROWS, FULL, EVEN)
                row = first + index + tl.arange(0, ROWS)
                g = read_rows(
                    gradient, row, column, inside, middle, inner,
                    gradient_outer, gradient_middle, gradient_inner, LEVELS, FIRST_POLICY,
                )  # fmt: skip
                n = read_rows(x, row, column, inside, middle, inner, x_outer, x_middle, x_inner, LEVELS, FIRST_POLICY)
                g, n = as_float32(g), as_float32(n)
                if CENTRED:
                    n -= tl.load(statistics + rows + row, mask=in_rows, other=0.0)[:, None]
                n *= g
                if WANTS_WEIGHT:
                    weight_sum += tl.sum(n * tl.load(statistics + row, mask=in_rows, other=0.0)[:, None], 0)
                if WANTS_BIAS:
                    bias_sum += tl.sum(g, 0)
                if dx is not None or dresidual is not None:
                    if weight is not None:
                        scale = widened(read_weight(weight, column, in_columns), offset)
                        n *= scale
                        if CENTRED:
                            g *= scale
                    tl.store(sums + row * PARTS + own, tl.sum(n, 1), mask=in_rows)
                    if CENTRED:
                        tl.store(sums + (rows + row) * PARTS + own, tl.sum(g, 1), mask=in_rows)
            if PHASE == ALL:
                if PARTS == 1:
                    tl.debug_barrier()  # sums are read by other threads than those that wrote them
                elif count > 0:
                    arrive(counters, turn_of)
        if PHASE != FIRST:
            before = turn_of - (groups if AHEAD else 0)
            if before >= 0:
                if PHASE == ALL and PARTS > 1:
                    wait(counters, before, parts)
                first = tl.cast(before, tl.int64) * batch
                count = tl.minimum(rows - first, batch).to(tl.int32)
                last = (count - 1) // ROWS * ROWS
                for back in tl.range(0, count, ROWS, num_stages=STAGES):
                    index = last - back  # what was read last is nearest
                    in_rows, in_columns, inside = within(index, count, column, columns, ROWS, FULL, EVEN)
                    row = first + index + tl.arange(0, ROWS)
                    g = read_rows(
                        gradient, row, column, inside, middle, inner,
                        gradient_outer, gradient_middle, gradient_inner, LEVELS, LAST_POLICY,
                    )  # fmt: skip
                    n = read_rows(
                        x, row, column, inside, middle, inner, x_outer, x_middle, x_inner, LEVELS, LAST_POLICY
                    )
                    added = None
                    if sum_gradient is not None:
                        added = read_rows(
                            sum_gradient, row, column, inside, middle, inner,
                            sum_outer, sum_middle, sum_inner, LEVELS, "",
                        )  # fmt: skip
                    # without a mask: what rows after the last make of the sums of another is not written
                    known = row if FULL else tl.minimum(row, rows - 1)
                    along = along_row(sums, known, parts, PARTS, PADDED)
                    level = 0.0
                    rstd = tl.load(statistics + row, mask=in_rows, other=0.0)
                    n = as_float32(n)
                    if CENTRED:
                        n -= tl.load(statistics + rows + row, mask=in_rows, other=0.0)[:, None]
                        level = along_row(sums, rows + known, parts, PARTS, PADDED)
                    slope, level = coefficients(along, level, rstd, columns, CENTRED)
                    factor = rstd[:, None]
                    if weight is not None:
                        factor *= widened(read_weight(weight, column, in_columns), offset)
                    result = n * slope[:, None]
                    if CENTRED:
                        result += level[:, None]
                    result += as_float32(g) * factor
                    write_rows(result, added, dx, dresidual, row, column, inside, columns)
    if PHASE != LAST:
        write_partials(
            partials, weight_sum, bias_sum, group, groups, column, column < columns, columns, WANTS_WEIGHT, WANTS_BIAS
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How rows are shared."""

    block: int
    """Columns of a part."""
    parts: int
    """Of a row, and programs of a group."""
    groups: int
    batch: int
    """Rows that a group reads before it meets."""
    warps: int
    registers: int
    """Of a thread, so that as many programs run on each processor as there are for it."""
    meets: bool
    """Whether there are few enough parts for their programs to wait for each other."""


def plan(rows: int, columns: int, widest: int, processors: int, config: dict[str, Any]) -> Plan:
    """How rows are shared; `widest` are the bytes of an element, and blocks of configurations are of 16 bits each."""
    most = min(MOST_PARTS, processors)
    block, warps = min(config["block"] * 2 // widest, next_power_of_2(columns)), config["warps"]
    programs = config["programs"]
    while triton.cdiv(columns, block) > most and warps < 32:  # as many elements by thread
        block, warps, programs = 2 * block, 2 * warps, max(programs // 2, 1)
    parts = triton.cdiv(columns, block)
    groups = max(programs * processors // parts, 1)
    room = CACHED // (groups * parts * block * 2 * widest * (2 if config["ahead"] else 1))
    batch = max(config.get("batch") or room, 1)
    # all groups are to have the same to do, and few rows are for as many of them as there can be
    batch = triton.cdiv(rows, groups * triton.cdiv(rows, groups * batch))
    if batch > config["rows"]:
        batch -= batch % config["rows"]
    batches = triton.cdiv(rows, batch)
    groups = triton.cdiv(batches, triton.cdiv(batches, groups))
    return Plan(
        block=block,
        parts=parts,
        groups=groups,
        batch=batch,
        warps=warps,
        registers=registers(warps, programs),
        meets=parts <= most,
    )


def shared(
    found: Rows, tensors: tuple[Tensor | None, ...], rows: int, columns: int, offset: float | None, centred: bool,
    wants: list[bool], processors: int, config: dict[str, Any],
) -> tuple[Tensor | None, int]:  # fmt: skip
    """Writes the gradients of rows; what is left are sums over rows, and of how many parts they are."""
    gradient, x, _ = found.tensors
    assert gradient is not None
    assert x is not None
    chosen = plan(rows, columns, max(gradient.element_size(), x.element_size()), processors, config)
    parts, height = chosen.parts, config["rows"]
    partials = empty_partials(wants, chosen.groups, columns, gradient.device)
    counted = sums = x
    phases: tuple[Any, ...]
    if not wants[0] and not wants[1]:
        phases = (FIRST,)
    else:
        # some may never be written: a power of 2 of them is read at once
        sums = torch.empty((2 if centred else 1, rows, next_power_of_2(parts)), dtype=torch.float32, device=x.device)
        if parts == 1:
            phases = (ALL,)
        else:
            phases = PHASES if chosen.meets else (FIRST, LAST)
            if phases[0] is ALL:
                counted = counters(triton.cdiv(rows, chosen.batch), x.device)
    for phase in phases:
        launch(
            backward_shared, (chosen.groups * parts, 1, 1), *found.tensors, *tensors, partials, sums, counted,
            rows, columns, found.middle, found.inner, *found.strides[0], *found.strides[1], *found.strides[2], offset,
            parts, chosen.groups, chosen.batch, centred, found.levels, wants[2], wants[3],
            next_power_of_2(parts), parts != next_power_of_2(parts), height, chosen.block,
            height == 1 or (rows % height == 0 and chosen.batch % height == 0), columns % chosen.block == 0,
            config["ahead"], config["hints"], config["stages"], phase,
            warps=chosen.warps, registers=chosen.registers,
        )  # fmt: skip
    return partials, chosen.groups
