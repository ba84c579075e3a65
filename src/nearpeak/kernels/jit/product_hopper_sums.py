"""The sums of the product on Hopper: how tiles of the factors come into shared memory, and are multiplied."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from nearpeak.kernels.jit.hopper_layouts import product_layout

SCALE_BLOCK = gl.constexpr(128)
"""Features, and columns, that share a scale, where blocks have them."""


@gluon.jit
def place_of(tile, row_tiles, column_tiles, group):
    """The row and the column of a tile among all, where `group` rows are gone down before the next column."""
    in_group = group * column_tiles
    first = tile // in_group * group
    high = gl.minimum(row_tiles - first, group)
    rest = tile % in_group
    return first + rest % high, rest // high


@gluon.jit
def _copy(source, line, feature, barrier, target, ACROSS: gl.constexpr):
    """Has a tile copied; ACROSS: features come first in memory, and lines, rows or columns of the result, are apart."""
    if ACROSS:
        tma.async_copy_global_to_shared(source, [feature, line], barrier, target)
    else:
        tma.async_copy_global_to_shared(source, [line, feature], barrier, target)


@gluon.jit
def load_factors(
    a, b, up, rings, barriers, sizes, ROWS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    CONSUMERS: gl.constexpr, STAGES: gl.constexpr, GATED: gl.constexpr, A_ACROSS: gl.constexpr,
    B_ACROSS: gl.constexpr,
):  # fmt: skip
    a_ring, b_ring, _buffers = rings
    full, free, _ready, _written = barriers
    _rows, _columns, steps, row_tiles, column_tiles, group, tiles = sizes
    size: gl.constexpr = CONSUMERS * a.block_type.nbytes + (2 if GATED else 1) * b.block_type.nbytes
    count = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row_tile, column_tile = place_of(tile, row_tiles, column_tiles, group)
        row = row_tile * (ROWS * CONSUMERS)
        column = column_tile * BLOCK_N
        for step in range(steps):
            slot = count % STAGES
            there = full.index(slot)
            mbarrier.wait(free.index(slot), ((count // STAGES) & 1) ^ 1)
            mbarrier.expect(there, size)
            for consumer in gl.static_range(CONSUMERS):
                target = a_ring.index(slot * CONSUMERS + consumer)
                _copy(a, row + consumer * ROWS, step * BLOCK_K, there, target, A_ACROSS)
            if GATED:  # next to each other, so that they are one factor
                _copy(b, column, step * BLOCK_K, there, b_ring.index(slot).slice(0, BLOCK_N), B_ACROSS)
                _copy(up, column, step * BLOCK_K, there, b_ring.index(slot).slice(BLOCK_N, BLOCK_N), B_ACROSS)
            else:
                _copy(b, column, step * BLOCK_K, there, b_ring.index(slot), B_ACROSS)
            count += 1


@gluon.jit
def _factor(tile, ACROSS: gl.constexpr):
    """A tile in shared memory with lines first."""
    if ACROSS:
        tile = tile.permute((1, 0))
    return tile


@gluon.jit
def halves(value, ROWS: gl.constexpr, WIDTH: gl.constexpr, BITS: gl.constexpr):
    """The first and the second half of columns, WIDTH each, which are in registers of their own."""
    first, second = value.reshape([ROWS, 2, WIDTH]).permute((0, 2, 1)).split()
    layout: gl.constexpr = product_layout(WIDTH, BITS)
    first = gl.convert_layout(first, layout, assert_trivial=True)
    return first, gl.convert_layout(second, layout, assert_trivial=True)


@gluon.jit
def sums(
    CONSUMER: gl.constexpr, rings, barriers, count, steps, ROWS: gl.constexpr, BLOCK_N: gl.constexpr,
    CONSUMERS: gl.constexpr, STAGES: gl.constexpr, GATED: gl.constexpr, A_ACROSS: gl.constexpr,
    B_ACROSS: gl.constexpr,
):  # fmt: skip
    """The sums of a tile, and with a gate those of the other factor. One product is on its way as the next begins."""
    a_ring, b_ring, _buffers = rings
    full, free, _ready, _written = barriers
    bits: gl.constexpr = a_ring.dtype.primitive_bitwidth
    wide: gl.constexpr = BLOCK_N * (2 if GATED else 1)
    total = gl.zeros([ROWS, wide], gl.float32, layout=product_layout(wide, bits))
    for step in range(steps):
        slot = count % STAGES
        mbarrier.wait(full.index(slot), (count // STAGES) & 1)
        left = _factor(a_ring.index(slot * CONSUMERS + CONSUMER), A_ACROSS)
        right = _factor(b_ring.index(slot), B_ACROSS).permute((1, 0))
        total = warpgroup_mma(left, right, total, use_acc=step > 0, is_async=True)
        total = warpgroup_mma_wait(num_outstanding=1, deps=(total,))
        mbarrier.arrive(free.index((count + STAGES - 1) % STAGES), count=1, pred=step > 0)
        count += 1
    total = warpgroup_mma_wait(num_outstanding=0, deps=(total,))
    mbarrier.arrive(free.index((count + STAGES - 1) % STAGES), count=1)
    other = total
    if GATED:
        total, other = halves(total, ROWS, BLOCK_N, bits)
    return total, other, count


@gluon.jit
def promoted_sums(
    CONSUMER: gl.constexpr, rings, barriers, count, steps, scales, row, column, columns, rows, ROWS: gl.constexpr,
    BLOCK_N: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr, GATED: gl.constexpr,
    BY_BLOCK: gl.constexpr,
):  # fmt: skip
    """The same of factors of 8 bits, each product added in float32: tensor cores would keep 14 bits of the sum.

    While one warpgroup adds, another one's product is computed.
    """
    a_ring, b_ring, _buffers = rings
    full, free, _ready, _written = barriers
    a_scale, b_scale, a_scale_row, a_scale_block, b_scale_column, b_scale_block = scales
    wide: gl.constexpr = BLOCK_N * (2 if GATED else 1)
    layout: gl.constexpr = product_layout(BLOCK_N, 8)
    total = gl.zeros([ROWS, BLOCK_N], gl.float32, layout=layout)
    other = total
    if BY_BLOCK:
        line = gl.minimum(row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout)), rows - 1)
        a_at = a_scale + line.to(gl.int64) * a_scale_row
        b_at = b_scale + column // SCALE_BLOCK * b_scale_column
        up_at = b_scale + (column + columns) // SCALE_BLOCK * b_scale_column
    for step in range(steps):
        slot = count % STAGES
        if BY_BLOCK:
            by_row = gl.load(a_at + step * a_scale_block).to(gl.float32)
            by_tile = gl.load(b_at + step * b_scale_block).to(gl.float32)
            if GATED:
                by_up = gl.load(up_at + step * b_scale_block).to(gl.float32)
        mbarrier.wait(full.index(slot), (count // STAGES) & 1)
        left = a_ring.index(slot * CONSUMERS + CONSUMER)
        right = b_ring.index(slot).permute((1, 0))
        none = gl.zeros([ROWS, wide], gl.float32, layout=product_layout(wide, 8))
        part = warpgroup_mma(left, right, none, use_acc=False, is_async=True)
        part = warpgroup_mma_wait(num_outstanding=0, deps=(part,))
        mbarrier.arrive(free.index(slot), count=1)
        if GATED:
            part, more = halves(part, ROWS, BLOCK_N, 8)
        if BY_BLOCK:
            total = total + part * (by_row * by_tile)[:, None]
            if GATED:
                other = other + more * (by_row * by_up)[:, None]
        else:
            total = total + part
            if GATED:
                other = other + more
        count += 1
    return total, other, count
