"""The GEMM kernel for Hopper, in Gluon: one warp loads, warpgroups multiply, and each warpgroup has a warp that stores.

The load warp copies tiles of both operands into a ring buffer in shared memory, running ahead into the next output tile. Each
warpgroup holds some rows of an output tile in registers. After the main loop it applies the epilogue, a slice of columns at a
time, into a buffer in shared memory and continues with the next tile; the store warp copies the buffer to the result, and a slice
of the residual into the buffer before.

The kernel is persistent: one program per multiprocessor. Rows of tiles are taken in groups, so that the tiles in flight form
nearly a square and their operands stay in the L2 cache.
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

from nearpeak.kernels._runtime.sm90_layouts import wgmma_layout
from nearpeak.kernels.pointwise.triton import activate

SCALE_BLOCK = gl.constexpr(128)
"""Features, and columns, that share a scale, where blocks have them."""


@gluon.jit
def tile_coordinates(tile, row_tiles, column_tiles, group):
    """The row and the column of a tile among all, where `group` rows are gone down before the next column."""
    in_group = group * column_tiles
    first = tile // in_group * group
    high = gl.minimum(row_tiles - first, group)
    rest = tile % in_group
    return first + rest % high, rest // high


@gluon.jit
def _copy_tile(source, line, feature, barrier, target, ACROSS: gl.constexpr):
    """Has a tile copied; ACROSS: features come first in memory, and lines, rows or columns of the result, are apart."""
    if ACROSS:
        tma.async_copy_global_to_shared(source, [feature, line], barrier, target)
    else:
        tma.async_copy_global_to_shared(source, [line, feature], barrier, target)


@gluon.jit
def load_operands(
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
        row_tile, column_tile = tile_coordinates(tile, row_tiles, column_tiles, group)
        row = row_tile * (ROWS * CONSUMERS)
        column = column_tile * BLOCK_N
        for step in range(steps):
            slot = count % STAGES
            there = full.index(slot)
            mbarrier.wait(free.index(slot), ((count // STAGES) & 1) ^ 1)
            mbarrier.expect(there, size)
            for consumer in gl.static_range(CONSUMERS):
                target = a_ring.index(slot * CONSUMERS + consumer)
                _copy_tile(a, row + consumer * ROWS, step * BLOCK_K, there, target, A_ACROSS)
            if GATED:  # next to each other, so that they are one factor
                _copy_tile(b, column, step * BLOCK_K, there, b_ring.index(slot).slice(0, BLOCK_N), B_ACROSS)
                _copy_tile(up, column, step * BLOCK_K, there, b_ring.index(slot).slice(BLOCK_N, BLOCK_N), B_ACROSS)
            else:
                _copy_tile(b, column, step * BLOCK_K, there, b_ring.index(slot), B_ACROSS)
            count += 1


@gluon.jit
def _operand(tile, ACROSS: gl.constexpr):
    """A tile in shared memory with lines first."""
    if ACROSS:
        tile = tile.permute((1, 0))
    return tile


@gluon.jit
def halves(value, ROWS: gl.constexpr, WIDTH: gl.constexpr, BITS: gl.constexpr):
    """The first and the second half of columns, WIDTH each, which are in registers of their own."""
    first, second = value.reshape([ROWS, 2, WIDTH]).permute((0, 2, 1)).split()
    layout: gl.constexpr = wgmma_layout(WIDTH, BITS)
    first = gl.convert_layout(first, layout, assert_trivial=True)
    return first, gl.convert_layout(second, layout, assert_trivial=True)


@gluon.jit
def accumulate(
    CONSUMER: gl.constexpr, rings, barriers, count, steps, ROWS: gl.constexpr, BLOCK_N: gl.constexpr,
    CONSUMERS: gl.constexpr, STAGES: gl.constexpr, GATED: gl.constexpr, A_ACROSS: gl.constexpr,
    B_ACROSS: gl.constexpr,
):  # fmt: skip
    """The sums of a tile, and with a gate those of the other factor. One product is on its way as the next begins."""
    a_ring, b_ring, _buffers = rings
    full, free, _ready, _written = barriers
    bits: gl.constexpr = a_ring.dtype.primitive_bitwidth
    wide: gl.constexpr = BLOCK_N * (2 if GATED else 1)
    total = gl.zeros([ROWS, wide], gl.float32, layout=wgmma_layout(wide, bits))
    for step in range(steps):
        slot = count % STAGES
        mbarrier.wait(full.index(slot), (count // STAGES) & 1)
        left = _operand(a_ring.index(slot * CONSUMERS + CONSUMER), A_ACROSS)
        right = _operand(b_ring.index(slot), B_ACROSS).permute((1, 0))
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
def accumulate_promoted(
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
    layout: gl.constexpr = wgmma_layout(BLOCK_N, 8)
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
        none = gl.zeros([ROWS, wide], gl.float32, layout=wgmma_layout(wide, 8))
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


@gluon.jit
def _store_buffer(
    CONSUMER: gl.constexpr, target, row, column, buffers, ready, written, count, BUFFERS: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr,
):  # fmt: skip
    """Has a buffer copied to where it goes, and gives back the one that was copied before it."""
    slot = CONSUMER * BUFFERS + count % BUFFERS
    mbarrier.wait(written.index(slot), (count // BUFFERS) & 1)
    tma.async_copy_shared_to_global(target, [row, column], buffers.index(slot))
    tma.store_wait(BUFFERS - 1)
    if BUFFERS == 2:
        mbarrier.arrive(ready.index(CONSUMER * BUFFERS + (count + 1) % 2), count=1, pred=count > 0)
    elif not HAS_RESIDUAL:
        mbarrier.arrive(ready.index(slot), count=1)
    return count + 1


@gluon.jit
def _write_tiles(
    CONSUMER: gl.constexpr, outputs, rings, barriers, sizes, ROWS: gl.constexpr, BLOCK_N: gl.constexpr,
    CONSUMERS: gl.constexpr, PIECES: gl.constexpr, BUFFERS: gl.constexpr, GATED: gl.constexpr, KEEP: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr,
):  # fmt: skip
    """Has what a warpgroup leaves in its buffers copied to where it goes, and the residual into the buffer before."""
    result, kept, kept_up, residual = outputs
    _a_ring, _b_ring, buffers = rings
    _full, _free, ready, written = barriers
    _rows, _columns, _steps, row_tiles, column_tiles, group, tiles = sizes
    width: gl.constexpr = BLOCK_N // PIECES
    count = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row_tile, column_tile = tile_coordinates(tile, row_tiles, column_tiles, group)
        row = row_tile * (ROWS * CONSUMERS) + CONSUMER * ROWS
        for piece in gl.static_range(PIECES):
            column = column_tile * BLOCK_N + piece * width
            if HAS_RESIDUAL:  # there is one buffer then, which the result before has left
                mbarrier.expect(ready.index(CONSUMER), residual.block_type.nbytes)
                place = buffers.index(CONSUMER)
                tma.async_copy_global_to_shared(residual, [row, column], ready.index(CONSUMER), place)
            if KEEP:
                count = _store_buffer(CONSUMER, kept, row, column, buffers, ready, written, count, BUFFERS, False)
                if GATED:
                    count = _store_buffer(
                        CONSUMER, kept_up, row, column, buffers, ready, written, count, BUFFERS, False
                    )
            count = _store_buffer(CONSUMER, result, row, column, buffers, ready, written, count, BUFFERS, HAS_RESIDUAL)
    tma.store_wait(0)


@gluon.jit
def _scale_and_bias(
    value, bias, scales, row, column, rows, columns, offset, HAS_BIAS: gl.constexpr, OUTER: gl.constexpr,
    ROWS: gl.constexpr, WIDTH: gl.constexpr, BITS: gl.constexpr,
):  # fmt: skip
    """Sums times the scales of rows and columns, and the bias. What is outside is anything."""
    layout: gl.constexpr = wgmma_layout(WIDTH, BITS)
    at = gl.minimum(column + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout)), columns - 1) + offset
    if OUTER:
        a_scale, b_scale, a_scale_row, _a_scale_block, b_scale_column, _b_scale_block = scales
        line = gl.minimum(row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout)), rows - 1)
        value = value * gl.load(a_scale + line.to(gl.int64) * a_scale_row).to(gl.float32)[:, None]
        value = value * gl.load(b_scale + at.to(gl.int64) * b_scale_column).to(gl.float32)[None, :]
    if HAS_BIAS:
        value = value + gl.load(bias + at).to(gl.float32)[None, :]
    return value


@gluon.jit
def _hand_to_writer(
    CONSUMER: gl.constexpr, value, buffers, ready, written, turn, BUFFERS: gl.constexpr, IS_THERE: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr,
):  # fmt: skip
    """Gives a piece to the warp that writes it, once a buffer is free: IS_THERE where that is known.

    A buffer for a residual is free for the first time once the residual is there.
    """
    slot = CONSUMER * BUFFERS + turn % BUFFERS
    if not IS_THERE:
        if HAS_RESIDUAL:
            mbarrier.wait(ready.index(slot), turn & 1)
        else:
            mbarrier.wait(ready.index(slot), ((turn // BUFFERS) & 1) ^ 1)
        turn += 1
    buffers.index(slot).store(value.to(buffers.dtype))
    fence_async_shared()
    mbarrier.arrive(written.index(slot), count=1)
    return turn


@gluon.jit
def _piece(
    total, INDEX: gl.constexpr, ROWS: gl.constexpr, BLOCK_N: gl.constexpr, PIECES: gl.constexpr, BITS: gl.constexpr
):
    """Some of the columns of a tile, which are in registers of their own."""
    value = total
    if PIECES > 1:
        first, second = halves(value, ROWS, BLOCK_N // 2, BITS)
        value = second if INDEX >= PIECES // 2 else first
        if PIECES == 4:
            first, second = halves(value, ROWS, BLOCK_N // 4, BITS)
            value = second if INDEX % 2 == 1 else first
    return value


@gluon.jit
def _consume(
    CONSUMER: gl.constexpr, bias, scales, rings, barriers, sizes, ROWS: gl.constexpr, BLOCK_N: gl.constexpr,
    CONSUMERS: gl.constexpr, STAGES: gl.constexpr, PIECES: gl.constexpr, BUFFERS: gl.constexpr,
    ACTIVATION: gl.constexpr, GATED: gl.constexpr, KEEP: gl.constexpr, HAS_BIAS: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr, OUTER: gl.constexpr, BY_BLOCK: gl.constexpr, PROMOTED: gl.constexpr,
    A_ACROSS: gl.constexpr, B_ACROSS: gl.constexpr,
):  # fmt: skip
    """This warpgroup's rows of each tile."""
    a_ring, _b_ring, buffers = rings
    _full, _free, ready, written = barriers
    rows, columns, steps, row_tiles, column_tiles, group, tiles = sizes
    width: gl.constexpr = BLOCK_N // PIECES
    bits: gl.constexpr = a_ring.dtype.primitive_bitwidth
    count = 0
    turn = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row_tile, column_tile = tile_coordinates(tile, row_tiles, column_tiles, group)
        row = row_tile * (ROWS * CONSUMERS) + CONSUMER * ROWS
        column = column_tile * BLOCK_N
        if PROMOTED:
            total, other, count = accumulate_promoted(
                CONSUMER, rings, barriers, count, steps, scales, row, column, columns, rows, ROWS, BLOCK_N, CONSUMERS,
                STAGES, GATED, BY_BLOCK,
            )  # fmt: skip
        else:
            total, other, count = accumulate(
                CONSUMER, rings, barriers, count, steps, ROWS, BLOCK_N, CONSUMERS, STAGES, GATED, A_ACROSS, B_ACROSS
            )
        for piece in gl.static_range(PIECES):
            value = _piece(total, piece, ROWS, BLOCK_N, PIECES, bits)
            start = column + piece * width
            value = _scale_and_bias(
                value, bias, scales, row, start, rows, columns, 0, HAS_BIAS, OUTER, ROWS, width, bits
            )
            if HAS_RESIDUAL:
                mbarrier.wait(ready.index(CONSUMER), turn & 1)
                added = buffers.index(CONSUMER).load(wgmma_layout(width, bits))
                turn += 1
            if KEEP:
                turn = _hand_to_writer(
                    CONSUMER, value, buffers, ready, written, turn, BUFFERS, HAS_RESIDUAL, HAS_RESIDUAL
                )  # fmt: skip
            if ACTIVATION != "":
                value = activate(value, ACTIVATION)
            if GATED:
                more = _piece(other, piece, ROWS, BLOCK_N, PIECES, bits)
                more = _scale_and_bias(
                    more, bias, scales, row, start, rows, columns, columns, HAS_BIAS, OUTER, ROWS, width, bits
                )  # fmt: skip
                if KEEP:
                    turn = _hand_to_writer(CONSUMER, more, buffers, ready, written, turn, BUFFERS, False, HAS_RESIDUAL)
                value = value * more
            if HAS_RESIDUAL:
                value = value + added.to(gl.float32)
            turn = _hand_to_writer(
                CONSUMER, value, buffers, ready, written, turn, BUFFERS, HAS_RESIDUAL and not KEEP, HAS_RESIDUAL
            )  # fmt: skip


@gluon.jit(
    do_not_specialize=[
        "rows", "columns", "steps", "row_tiles", "column_tiles", "group", "tiles", "a_scale_row", "a_scale_block",
        "b_scale_column", "b_scale_block",
    ]
)  # fmt: skip
def gemm_sm90_kernel(
    bias, a_scale, b_scale, a, b, up, result, kept, kept_up, residual, rows, columns, steps, row_tiles, column_tiles,
    group, tiles, a_scale_row, a_scale_block, b_scale_column, b_scale_block,
    ROWS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr,
    PIECES: gl.constexpr, BUFFERS: gl.constexpr, ACTIVATION: gl.constexpr, GATED: gl.constexpr, KEEP: gl.constexpr,
    HAS_BIAS: gl.constexpr, HAS_RESIDUAL: gl.constexpr, OUTER: gl.constexpr, BY_BLOCK: gl.constexpr,
    PROMOTED: gl.constexpr, A_ACROSS: gl.constexpr, B_ACROSS: gl.constexpr,
):  # fmt: skip
    """Factors, results and the residual are descriptors; `columns` are those of the result, BLOCK_N those of a tile."""
    width: gl.constexpr = BLOCK_N // PIECES
    a_ring = gl.allocate_shared_memory(a.dtype, [STAGES * CONSUMERS, a.block_shape[0], a.block_shape[1]], a.layout)
    lines: gl.constexpr = b.block_shape[0] * (2 if GATED else 1)
    b_ring = gl.allocate_shared_memory(b.dtype, [STAGES, lines, b.block_shape[1]], b.layout)
    buffers = gl.allocate_shared_memory(result.dtype, [CONSUMERS * BUFFERS, ROWS, width], result.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [CONSUMERS * BUFFERS, 1], mbarrier.MBarrierLayout())
    written = gl.allocate_shared_memory(gl.int64, [CONSUMERS * BUFFERS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(free.index(slot), count=CONSUMERS)
    for slot in gl.static_range(CONSUMERS * BUFFERS):
        mbarrier.init(ready.index(slot), count=1)
        mbarrier.init(written.index(slot), count=1)
    fence_async_shared()
    rings = (a_ring, b_ring, buffers)
    barriers = (full, free, ready, written)
    sizes = (rows, columns, steps, row_tiles, column_tiles, group, tiles)
    scales = (a_scale, b_scale, a_scale_row, a_scale_block, b_scale_column, b_scale_block)
    outputs = (result, kept, kept_up, residual)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consume, (
                    0, bias, scales, rings, barriers, sizes, ROWS, BLOCK_N, CONSUMERS, STAGES, PIECES, BUFFERS,
                    ACTIVATION, GATED, KEEP, HAS_BIAS, HAS_RESIDUAL, OUTER, BY_BLOCK, PROMOTED, A_ACROSS, B_ACROSS,
                )),
                (_consume, (
                    1, bias, scales, rings, barriers, sizes, ROWS, BLOCK_N, CONSUMERS, STAGES, PIECES, BUFFERS,
                    ACTIVATION, GATED, KEEP, HAS_BIAS, HAS_RESIDUAL, OUTER, BY_BLOCK, PROMOTED, A_ACROSS, B_ACROSS,
                )),
                (load_operands, (
                    a, b, up, rings, barriers, sizes, ROWS, BLOCK_N, BLOCK_K, CONSUMERS, STAGES, GATED, A_ACROSS,
                    B_ACROSS,
                )),
                (_write_tiles, (
                    0, outputs, rings, barriers, sizes, ROWS, BLOCK_N, CONSUMERS, PIECES, BUFFERS, GATED, KEEP,
                    HAS_RESIDUAL,
                )),
                (_write_tiles, (
                    1, outputs, rings, barriers, sizes, ROWS, BLOCK_N, CONSUMERS, PIECES, BUFFERS, GATED, KEEP,
                    HAS_RESIDUAL,
                )),
            ],
            [4, 1, 1, 1],
            [240, 24, 24, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (
                    0, bias, scales, rings, barriers, sizes, ROWS, BLOCK_N, CONSUMERS, STAGES, PIECES, BUFFERS,
                    ACTIVATION, GATED, KEEP, HAS_BIAS, HAS_RESIDUAL, OUTER, BY_BLOCK, PROMOTED, A_ACROSS, B_ACROSS,
                )),
                (_consume, (
                    1, bias, scales, rings, barriers, sizes, ROWS, BLOCK_N, CONSUMERS, STAGES, PIECES, BUFFERS,
                    ACTIVATION, GATED, KEEP, HAS_BIAS, HAS_RESIDUAL, OUTER, BY_BLOCK, PROMOTED, A_ACROSS, B_ACROSS,
                )),
                (_consume, (
                    2, bias, scales, rings, barriers, sizes, ROWS, BLOCK_N, CONSUMERS, STAGES, PIECES, BUFFERS,
                    ACTIVATION, GATED, KEEP, HAS_BIAS, HAS_RESIDUAL, OUTER, BY_BLOCK, PROMOTED, A_ACROSS, B_ACROSS,
                )),
                (load_operands, (
                    a, b, up, rings, barriers, sizes, ROWS, BLOCK_N, BLOCK_K, CONSUMERS, STAGES, GATED, A_ACROSS,
                    B_ACROSS,
                )),
                (_write_tiles, (
                    0, outputs, rings, barriers, sizes, ROWS, BLOCK_N, CONSUMERS, PIECES, BUFFERS, GATED, KEEP,
                    HAS_RESIDUAL,
                )),
                (_write_tiles, (
                    1, outputs, rings, barriers, sizes, ROWS, BLOCK_N, CONSUMERS, PIECES, BUFFERS, GATED, KEEP,
                    HAS_RESIDUAL,
                )),
                (_write_tiles, (
                    2, outputs, rings, barriers, sizes, ROWS, BLOCK_N, CONSUMERS, PIECES, BUFFERS, GATED, KEEP,
                    HAS_RESIDUAL,
                )),
            ],
            [4, 4, 1, 1, 1, 1],
            [160, 160, 24, 24, 24, 24],
        )  # fmt: skip
