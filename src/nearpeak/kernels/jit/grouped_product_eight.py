"""Rows by the matrices of their experts on Hopper, in numbers of 8 bits with scales, in Gluon.

As `grouped_product_hopper`, with tiles of 128 columns. Tensor cores add up products of 8 bits with 14 bits or so. So
the sum of each 128 of the depth is taken from them, multiplied by its scales where there are any for it, and added in
float32; while one warpgroup does that, the other one multiplies.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from nearpeak.kernels.jit.activations import activate
from nearpeak.kernels.jit.drawn_tiles import slots_for_tiles, told_tile
from nearpeak.kernels.jit.gathered_rows import THREADS
from nearpeak.kernels.jit.grouped_product_hopper import ROWS, gather_tiles, halves, load_tiles, write_tile
from nearpeak.kernels.jit.hopper_layouts import product_layout

BLOCK = gl.constexpr(128)
"""Of the depth, and of columns, what shares a scale."""


@gluon.jit
def _scales(
    row_scales, weight_scales, expert, row_at, inside, column_at, step, columns, down, across,
    GATED: gl.constexpr, WIDTH: gl.constexpr,
):  # fmt: skip
    """The scales of rows, and of columns, of one block of the depth."""
    by_row = gl.load(row_scales + row_at.to(gl.int64) * across + step, mask=inside, other=0.0)
    own = weight_scales + expert.to(gl.int64) * down * across + step
    if GATED:  # a half of the tile is within one block of columns
        first = gl.load(own + column_at // BLOCK * across)
        second = gl.load(own + (columns + column_at) // BLOCK * across)
    else:
        first = gl.load(own + column_at // BLOCK * across)
        second = first
    return by_row, first, second


@gluon.jit
def _consume(
    CONSUMER: gl.constexpr, targets, scales, sources, rings, barriers, slots, columns, depth, down,
    NAME: gl.constexpr, BLOCKS: gl.constexpr, WIDTH: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The products of 64 rows of each tile."""
    result, result_tiles = targets
    row_scales, weight_scales = scales
    row_ring, weight_ring, written = rings
    full, free = barriers
    GATED: gl.constexpr = NAME != ""
    CHUNK: gl.constexpr = WIDTH // 2 if GATED else WIDTH
    layout: gl.constexpr = product_layout(WIDTH, 8)
    count = 0
    copies = 0
    turn = 0
    across = gl.cdiv(depth, DEPTH)
    expert, row, end, place = told_tile(slots, turn)
    while place >= 0:
        steps = gl.where(expert < 0, 0, across)
        own = row + CONSUMER * ROWS
        column = place * CHUNK
        if own < end:
            row_at = own + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
            inside = row_at < end
            if sources is not None:
                row_at = gl.load(sources + row_at, mask=inside, other=0)
            half = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout)) < WIDTH // 2
            total = gl.zeros([ROWS, WIDTH], gl.float32, layout=layout)
            some = gl.maximum(expert, 0)
            if BLOCKS:
                by_row, one_scale, other_scale = _scales(
                    row_scales, weight_scales, some, row_at, inside, column, 0, columns, down, across, GATED, WIDTH
                )
            for step in range(steps):
                slot = count % STAGES
                mbarrier.wait(full.index(slot), (count // STAGES) & 1)
                if sources is not None:
                    fence_async_shared()
                given = row_ring.index(2 * slot + CONSUMER)
                matrix = weight_ring.index(slot).reshape([WIDTH, DEPTH]).permute((1, 0))
                none = gl.zeros([ROWS, WIDTH], gl.float32, layout=layout)
                added = warpgroup_mma(given, matrix, none, use_acc=False, is_async=True)
                if BLOCKS:  # on their way while tensor cores work
                    next_row, next_one, next_other = _scales(
                        row_scales, weight_scales, some, row_at, inside, column, gl.minimum(step + 1, steps - 1),
                        columns, down, across, GATED, WIDTH,
                    )  # fmt: skip
                part = warpgroup_mma_wait(num_outstanding=0, deps=(added,))
                mbarrier.arrive(free.index(slot), count=1)
                if BLOCKS:
                    if GATED:
                        by_column = gl.where(half, one_scale, other_scale)
                        total += part * by_row[:, None] * by_column[None, :]
                    else:
                        total += part * (by_row * one_scale)[:, None]
                    by_row = next_row
                    one_scale = next_one
                    other_scale = next_other
                else:
                    total += part
                count += 1
            if not BLOCKS:
                scale = gl.load(row_scales + row_at, mask=inside, other=0.0) * gl.load(weight_scales + some)
                total = total * scale[:, None]
            if GATED:
                one, other = halves(total)
                total = activate(one, NAME) * other
            copies = write_tile(
                total, written, copies, result_tiles, result, own, end, column, columns, columns, 0, CONSUMER, 1
            )
        else:
            for _step in range(steps):
                slot = count % STAGES
                mbarrier.wait(full.index(slot), (count // STAGES) & 1)
                mbarrier.arrive(free.index(slot), count=1)
                count += 1
        turn += 1
        expert, row, end, place = told_tile(slots, turn)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["experts", "columns", "depth", "entries", "column_tiles", "down", "stride"])
def grouped_eight_hopper_kernel(
    counter, groups, result, row_scales, weight_scales, tokens, sources, rows, weight, result_tiles, experts, columns,
    depth, entries, column_tiles, down, stride, NAME: gl.constexpr, BLOCKS: gl.constexpr, WIDTH: gl.constexpr,
    DEPTH: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """`down` is how many blocks the columns of a matrix have; `rows`, `weight`, `result_tiles` are descriptors.

    For `tokens` and `sources` see `grouped_hopper_kernel`.
    """
    dtype: gl.constexpr = rows.dtype
    GATED: gl.constexpr = NAME != ""
    GATHERED: gl.constexpr = sources is not None
    CHUNK: gl.constexpr = WIDTH // 2 if GATED else WIDTH
    row_ring = gl.allocate_shared_memory(dtype, [2 * STAGES, ROWS, DEPTH], rows.layout)
    if GATED:
        weight_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 2, CHUNK, DEPTH], weight.layout)
    else:
        weight_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, CHUNK, DEPTH], weight.layout)
    written = gl.allocate_shared_memory(result_tiles.dtype, [2, ROWS, CHUNK], gl.NVMMASharedLayout(128, 16, rank=2))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1 + THREADS if GATHERED else 1)
        mbarrier.init(free.index(slot), count=2)
    slots = slots_for_tiles(3 if GATHERED else 2)
    fence_async_shared()
    rings = (row_ring, weight_ring, written)
    barriers = (full, free)
    sizes = (experts, columns, depth, entries, column_tiles)
    targets = (result, result_tiles)
    scales = (row_scales, weight_scales)
    if GATHERED:
        gl.warp_specialize(
            [
                (_consume, (
                    0, targets, scales, sources, rings, barriers, slots, columns, depth, down, NAME, BLOCKS, WIDTH,
                    DEPTH, STAGES,
                )),
                (_consume, (
                    1, targets, scales, sources, rings, barriers, slots, columns, depth, down, NAME, BLOCKS, WIDTH,
                    DEPTH, STAGES,
                )),
                (load_tiles, (
                    counter, groups, rows, weight, rings, barriers, slots, sizes, True, GATED, True, WIDTH, DEPTH,
                    STAGES,
                )),
                (gather_tiles, (tokens, stride, sources, row_ring, barriers, slots, depth, DEPTH, STAGES)),
            ],
            [4, 1, 2],
            [224, 56, 56],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (
                    0, targets, scales, None, rings, barriers, slots, columns, depth, down, NAME, BLOCKS, WIDTH, DEPTH,
                    STAGES,
                )),
                (_consume, (
                    1, targets, scales, None, rings, barriers, slots, columns, depth, down, NAME, BLOCKS, WIDTH, DEPTH,
                    STAGES,
                )),
                (load_tiles, (
                    counter, groups, rows, weight, rings, barriers, slots, sizes, False, GATED, True, WIDTH, DEPTH,
                    STAGES,
                )),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip
