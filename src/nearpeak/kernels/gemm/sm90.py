"""The GEMM kernel for Hopper, in Gluon: one warp loads, warpgroups multiply, and each warpgroup has a warp that stores.

The load warp copies tiles of both operands into a ring buffer in shared memory, running ahead into the next output
tile. Each warpgroup holds some rows of an output tile in registers. After the main loop it applies the epilogue, one
slice of columns at a time, into a buffer in shared memory and continues with the next tile. The store warp copies the
buffer to the result, and before that a slice of the residual into the buffer.

The kernel is persistent: one program per multiprocessor. Rows of tiles are taken in groups, so that the tiles in flight
form nearly a square and their operands stay in the L2 cache.
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
"""Features, and columns, that share an fp8 scale, if scales are by block."""


@gluon.jit
def tile_coordinates(tile, row_tiles, column_tiles, group):
    """The row and the column of a tile. Tiles go down `group` rows before the next column."""
    in_group = group * column_tiles
    first = tile // in_group * group
    high = gl.minimum(row_tiles - first, group)
    rest = tile % in_group
    return first + rest % high, rest // high


@gluon.jit
def _copy_tile(source, row_index, feature, barrier, target, COLUMN_MAJOR: gl.constexpr):
    """Starts the copy of a tile. COLUMN_MAJOR: rows of the operand are contiguous in memory, and not features."""
    if COLUMN_MAJOR:
        tma.async_copy_global_to_shared(source, [feature, row_index], barrier, target)
    else:
        tma.async_copy_global_to_shared(source, [row_index, feature], barrier, target)


@gluon.jit
def load_operands(
    a, b, up, rings, barriers, sizes, ROWS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    CONSUMERS: gl.constexpr, STAGES: gl.constexpr, GATED: gl.constexpr, A_COLUMN_MAJOR: gl.constexpr,
    B_COLUMN_MAJOR: gl.constexpr,
):  # fmt: skip
    """The load warp: copies the tiles of both operands into the ring buffer, as far ahead as it is long."""
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
            is_full = full.index(slot)
            mbarrier.wait(free.index(slot), ((count // STAGES) & 1) ^ 1)
            mbarrier.expect(is_full, size)
            for consumer in gl.static_range(CONSUMERS):
                target = a_ring.index(slot * CONSUMERS + consumer)
                _copy_tile(a, row + consumer * ROWS, step * BLOCK_K, is_full, target, A_COLUMN_MAJOR)
            if GATED:  # adjacent, so that they are one operand
                _copy_tile(b, column, step * BLOCK_K, is_full, b_ring.index(slot).slice(0, BLOCK_N), B_COLUMN_MAJOR)
                _copy_tile(
                    up, column, step * BLOCK_K, is_full, b_ring.index(slot).slice(BLOCK_N, BLOCK_N), B_COLUMN_MAJOR
                )
            else:
                _copy_tile(b, column, step * BLOCK_K, is_full, b_ring.index(slot), B_COLUMN_MAJOR)
            count += 1


@gluon.jit
def _operand(tile, COLUMN_MAJOR: gl.constexpr):
    """A tile in shared memory as (rows, features)."""
    if COLUMN_MAJOR:
        tile = tile.permute((1, 0))
    return tile


@gluon.jit
def halves(value, ROWS: gl.constexpr, WIDTH: gl.constexpr, BITS: gl.constexpr):
    """The first and the second WIDTH columns, which are in different registers."""
    first, second = value.reshape([ROWS, 2, WIDTH]).permute((0, 2, 1)).split()
    layout: gl.constexpr = wgmma_layout(WIDTH, BITS)
    first = gl.convert_layout(first, layout, assert_trivial=True)
    return first, gl.convert_layout(second, layout, assert_trivial=True)


@gluon.jit
def accumulate(
    CONSUMER: gl.constexpr, rings, barriers, count, steps, ROWS: gl.constexpr, BLOCK_N: gl.constexpr,
    CONSUMERS: gl.constexpr, STAGES: gl.constexpr, GATED: gl.constexpr, A_COLUMN_MAJOR: gl.constexpr,
    B_COLUMN_MAJOR: gl.constexpr,
):  # fmt: skip
    """The main loop of a tile: its sums, (rows, block_n), and those of `up` with a gate. Two products are in flight."""
    a_ring, b_ring, _buffers = rings
    full, free, _ready, _written = barriers
    bits: gl.constexpr = a_ring.dtype.primitive_bitwidth
    wide: gl.constexpr = BLOCK_N * (2 if GATED else 1)
    total = gl.zeros([ROWS, wide], gl.float32, layout=wgmma_layout(wide, bits))
    for step in range(steps):
        slot = count % STAGES
        mbarrier.wait(full.index(slot), (count // STAGES) & 1)
        left = _operand(a_ring.index(slot * CONSUMERS + CONSUMER), A_COLUMN_MAJOR)
        right = _operand(b_ring.index(slot), B_COLUMN_MAJOR).permute((1, 0))
        total = warpgroup_mma(left, right, total, use_acc=step > 0, is_async=True)
        total = warpgroup_mma_wait(num_outstanding=1, deps=(total,))
        mbarrier.arrive(free.index((count + STAGES - 1) % STAGES), count=1, pred=step > 0)
        count += 1
    total = warpgroup_mma_wait(num_outstanding=0, deps=(total,))
    mbarrier.arrive(free.index((count + STAGES - 1) % STAGES), count=1)
    up_total = total
    if GATED:
        total, up_total = halves(total, ROWS, BLOCK_N, bits)
    return total, up_total, count


@gluon.jit
def accumulate_promoted(
    CONSUMER: gl.constexpr, rings, barriers, count, steps, scales, row, column, columns, rows, ROWS: gl.constexpr,
    BLOCK_N: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr, GATED: gl.constexpr,
    BY_BLOCK: gl.constexpr,
):  # fmt: skip
    """The same for fp8, with each product added in float32: the tensor cores would keep 14 bits of the sum.

    While one warpgroup adds, the tensor cores work for another.
    """
    a_ring, b_ring, _buffers = rings
    full, free, _ready, _written = barriers
    a_scale, b_scale, a_scale_row, a_scale_block, b_scale_column, b_scale_block = scales
    wide: gl.constexpr = BLOCK_N * (2 if GATED else 1)
    layout: gl.constexpr = wgmma_layout(BLOCK_N, 8)
    total = gl.zeros([ROWS, BLOCK_N], gl.float32, layout=layout)
    up_total = total
    if BY_BLOCK:
        row_index = gl.minimum(row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout)), rows - 1)
        a_scales = a_scale + row_index.to(gl.int64) * a_scale_row
        b_scales = b_scale + column // SCALE_BLOCK * b_scale_column
        up_scales = b_scale + (column + columns) // SCALE_BLOCK * b_scale_column
    for step in range(steps):
        slot = count % STAGES
        if BY_BLOCK:
            a_factor = gl.load(a_scales + step * a_scale_block).to(gl.float32)
            b_factor = gl.load(b_scales + step * b_scale_block).to(gl.float32)
            if GATED:
                up_factor = gl.load(up_scales + step * b_scale_block).to(gl.float32)
        mbarrier.wait(full.index(slot), (count // STAGES) & 1)
        left = a_ring.index(slot * CONSUMERS + CONSUMER)
        right = b_ring.index(slot).permute((1, 0))
        zeros = gl.zeros([ROWS, wide], gl.float32, layout=wgmma_layout(wide, 8))
        part = warpgroup_mma(left, right, zeros, use_acc=False, is_async=True)
        part = warpgroup_mma_wait(num_outstanding=0, deps=(part,))
        mbarrier.arrive(free.index(slot), count=1)
        if GATED:
            part, up_value = halves(part, ROWS, BLOCK_N, 8)
        if BY_BLOCK:
            total = total + part * (a_factor * b_factor)[:, None]
            if GATED:
                up_total = up_total + up_value * (a_factor * up_factor)[:, None]
        else:
            total = total + part
            if GATED:
                up_total = up_total + up_value
        count += 1
    return total, up_total, count


@gluon.jit
def _store_buffer(
    CONSUMER: gl.constexpr, target, row, column, buffers, ready, written, count, BUFFERS: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr,
):  # fmt: skip
    """Starts the copy of a buffer to global memory, and frees the one that was copied before."""
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
    CONSUMERS: gl.constexpr, SLICES: gl.constexpr, BUFFERS: gl.constexpr, GATED: gl.constexpr, KEEP: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr,
):  # fmt: skip
    """The store warp: copies the buffers of a warpgroup to global memory, and the residual into them before."""
    result, kept_gate, kept_up, residual = outputs
    _a_ring, _b_ring, buffers = rings
    _full, _free, ready, written = barriers
    _rows, _columns, _steps, row_tiles, column_tiles, group, tiles = sizes
    width: gl.constexpr = BLOCK_N // SLICES
    count = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row_tile, column_tile = tile_coordinates(tile, row_tiles, column_tiles, group)
        row = row_tile * (ROWS * CONSUMERS) + CONSUMER * ROWS
        for index in gl.static_range(SLICES):
            column = column_tile * BLOCK_N + index * width
            if HAS_RESIDUAL:  # there is one buffer then, and the result before has been copied from it
                mbarrier.expect(ready.index(CONSUMER), residual.block_type.nbytes)
                buffer = buffers.index(CONSUMER)
                tma.async_copy_global_to_shared(residual, [row, column], ready.index(CONSUMER), buffer)
            if KEEP:
                count = _store_buffer(CONSUMER, kept_gate, row, column, buffers, ready, written, count, BUFFERS, False)
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
    """Sums times the scales of rows and columns, plus the bias. Arbitrary beyond the last row and column."""
    layout: gl.constexpr = wgmma_layout(WIDTH, BITS)
    column_index = gl.minimum(column + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout)), columns - 1) + offset
    if OUTER:
        a_scale, b_scale, a_scale_row, _a_scale_block, b_scale_column, _b_scale_block = scales
        row_index = gl.minimum(row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout)), rows - 1)
        value = value * gl.load(a_scale + row_index.to(gl.int64) * a_scale_row).to(gl.float32)[:, None]
        value = value * gl.load(b_scale + column_index.to(gl.int64) * b_scale_column).to(gl.float32)[None, :]
    if HAS_BIAS:
        value = value + gl.load(bias + column_index).to(gl.float32)[None, :]
    return value


@gluon.jit
def _hand_to_writer(
    CONSUMER: gl.constexpr, value, buffers, ready, written, turn, BUFFERS: gl.constexpr, IS_FREE: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr,
):  # fmt: skip
    """Hands a slice to the store warp, once a buffer is free. IS_FREE: it is known to be.

    A buffer with a residual becomes free when the residual has arrived.
    """
    slot = CONSUMER * BUFFERS + turn % BUFFERS
    if not IS_FREE:
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
def _column_slice(
    total, INDEX: gl.constexpr, ROWS: gl.constexpr, BLOCK_N: gl.constexpr, SLICES: gl.constexpr, BITS: gl.constexpr
):
    """One slice of the columns of a tile, which are in different registers."""
    value = total
    if SLICES > 1:
        first, second = halves(value, ROWS, BLOCK_N // 2, BITS)
        value = second if INDEX >= SLICES // 2 else first
        if SLICES == 4:
            first, second = halves(value, ROWS, BLOCK_N // 4, BITS)
            value = second if INDEX % 2 == 1 else first
    return value


@gluon.jit
def _consume(
    CONSUMER: gl.constexpr, bias, scales, rings, barriers, sizes, ROWS: gl.constexpr, BLOCK_N: gl.constexpr,
    CONSUMERS: gl.constexpr, STAGES: gl.constexpr, SLICES: gl.constexpr, BUFFERS: gl.constexpr,
    ACTIVATION: gl.constexpr, GATED: gl.constexpr, KEEP: gl.constexpr, HAS_BIAS: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr, OUTER: gl.constexpr, BY_BLOCK: gl.constexpr, PROMOTED: gl.constexpr,
    A_COLUMN_MAJOR: gl.constexpr, B_COLUMN_MAJOR: gl.constexpr,
):  # fmt: skip
    """A warpgroup: the main loop and the epilogue of its rows of each tile."""
    a_ring, _b_ring, buffers = rings
    _full, _free, ready, written = barriers
    rows, columns, steps, row_tiles, column_tiles, group, tiles = sizes
    width: gl.constexpr = BLOCK_N // SLICES
    bits: gl.constexpr = a_ring.dtype.primitive_bitwidth
    count = 0
    turn = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row_tile, column_tile = tile_coordinates(tile, row_tiles, column_tiles, group)
        row = row_tile * (ROWS * CONSUMERS) + CONSUMER * ROWS
        column = column_tile * BLOCK_N
        if PROMOTED:
            total, up_total, count = accumulate_promoted(
                CONSUMER, rings, barriers, count, steps, scales, row, column, columns, rows, ROWS, BLOCK_N, CONSUMERS,
                STAGES, GATED, BY_BLOCK,
            )  # fmt: skip
        else:
            total, up_total, count = accumulate(
                CONSUMER, rings, barriers, count, steps, ROWS, BLOCK_N, CONSUMERS, STAGES, GATED, A_COLUMN_MAJOR,
                B_COLUMN_MAJOR,
            )  # fmt: skip
        for index in gl.static_range(SLICES):
            value = _column_slice(total, index, ROWS, BLOCK_N, SLICES, bits)
            start = column + index * width
            value = _scale_and_bias(
                value, bias, scales, row, start, rows, columns, 0, HAS_BIAS, OUTER, ROWS, width, bits
            )
            if HAS_RESIDUAL:
                mbarrier.wait(ready.index(CONSUMER), turn & 1)
                residual_value = buffers.index(CONSUMER).load(wgmma_layout(width, bits))
                turn += 1
            if KEEP:
                turn = _hand_to_writer(
                    CONSUMER, value, buffers, ready, written, turn, BUFFERS, HAS_RESIDUAL, HAS_RESIDUAL
                )  # fmt: skip
            if ACTIVATION != "":
                value = activate(value, ACTIVATION)
            if GATED:
                up_value = _column_slice(up_total, index, ROWS, BLOCK_N, SLICES, bits)
                up_value = _scale_and_bias(
                    up_value, bias, scales, row, start, rows, columns, columns, HAS_BIAS, OUTER, ROWS, width, bits
                )  # fmt: skip
                if KEEP:
                    turn = _hand_to_writer(
                        CONSUMER, up_value, buffers, ready, written, turn, BUFFERS, False, HAS_RESIDUAL
                    )
                value = value * up_value
            if HAS_RESIDUAL:
                value = value + residual_value.to(gl.float32)
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
    bias, a_scale, b_scale, a, b, up, result, kept_gate, kept_up, residual, rows, columns, steps, row_tiles,
    column_tiles, group, tiles, a_scale_row, a_scale_block, b_scale_column, b_scale_block,
    ROWS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr,
    SLICES: gl.constexpr, BUFFERS: gl.constexpr, ACTIVATION: gl.constexpr, GATED: gl.constexpr, KEEP: gl.constexpr,
    HAS_BIAS: gl.constexpr, HAS_RESIDUAL: gl.constexpr, OUTER: gl.constexpr, BY_BLOCK: gl.constexpr,
    PROMOTED: gl.constexpr, A_COLUMN_MAJOR: gl.constexpr, B_COLUMN_MAJOR: gl.constexpr,
):  # fmt: skip
    """Operands, results and the residual are TMA descriptors; `columns` are those of the result, BLOCK_N of a tile."""
    width: gl.constexpr = BLOCK_N // SLICES
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
    outputs = (result, kept_gate, kept_up, residual)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consume, (
                    0, bias, scales, rings, barriers, sizes, ROWS, BLOCK_N, CONSUMERS, STAGES, SLICES, BUFFERS,
                    ACTIVATION, GATED, KEEP, HAS_BIAS, HAS_RESIDUAL, OUTER, BY_BLOCK, PROMOTED,
                    A_COLUMN_MAJOR, B_COLUMN_MAJOR,
                )),
                (_consume, (
                    1, bias, scales, rings, barriers, sizes, ROWS, BLOCK_N, CONSUMERS, STAGES, SLICES, BUFFERS,
                    ACTIVATION, GATED, KEEP, HAS_BIAS, HAS_RESIDUAL, OUTER, BY_BLOCK, PROMOTED,
                    A_COLUMN_MAJOR, B_COLUMN_MAJOR,
                )),
                (load_operands, (
                    a, b, up, rings, barriers, sizes, ROWS, BLOCK_N, BLOCK_K, CONSUMERS, STAGES, GATED, A_COLUMN_MAJOR,
                    B_COLUMN_MAJOR,
                )),
                (_write_tiles, (
                    0, outputs, rings, barriers, sizes, ROWS, BLOCK_N, CONSUMERS, SLICES, BUFFERS, GATED, KEEP,
                    HAS_RESIDUAL,
                )),
                (_write_tiles, (
                    1, outputs, rings, barriers, sizes, ROWS, BLOCK_N, CONSUMERS, SLICES, BUFFERS, GATED, KEEP,
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
                    0, bias, scales, rings, barriers, sizes, ROWS, BLOCK_N, CONSUMERS, STAGES, SLICES, BUFFERS,
                    ACTIVATION, GATED, KEEP, HAS_BIAS, HAS_RESIDUAL, OUTER, BY_BLOCK, PROMOTED,
                    A_COLUMN_MAJOR, B_COLUMN_MAJOR,
                )),
                (_consume, (
                    1, bias, scales, rings, barriers, sizes, ROWS, BLOCK_N, CONSUMERS, STAGES, SLICES, BUFFERS,
                    ACTIVATION, GATED, KEEP, HAS_BIAS, HAS_RESIDUAL, OUTER, BY_BLOCK, PROMOTED,
                    A_COLUMN_MAJOR, B_COLUMN_MAJOR,
                )),
                (_consume, (
                    2, bias, scales, rings, barriers, sizes, ROWS, BLOCK_N, CONSUMERS, STAGES, SLICES, BUFFERS,
                    ACTIVATION, GATED, KEEP, HAS_BIAS, HAS_RESIDUAL, OUTER, BY_BLOCK, PROMOTED,
                    A_COLUMN_MAJOR, B_COLUMN_MAJOR,
                )),
                (load_operands, (
                    a, b, up, rings, barriers, sizes, ROWS, BLOCK_N, BLOCK_K, CONSUMERS, STAGES, GATED, A_COLUMN_MAJOR,
                    B_COLUMN_MAJOR,
                )),
                (_write_tiles, (
                    0, outputs, rings, barriers, sizes, ROWS, BLOCK_N, CONSUMERS, SLICES, BUFFERS, GATED, KEEP,
                    HAS_RESIDUAL,
                )),
                (_write_tiles, (
                    1, outputs, rings, barriers, sizes, ROWS, BLOCK_N, CONSUMERS, SLICES, BUFFERS, GATED, KEEP,
                    HAS_RESIDUAL,
                )),
                (_write_tiles, (
                    2, outputs, rings, barriers, sizes, ROWS, BLOCK_N, CONSUMERS, SLICES, BUFFERS, GATED, KEEP,
                    HAS_RESIDUAL,
                )),
            ],
            [4, 4, 1, 1, 1, 1],
            [160, 160, 24, 24, 24, 24],
        )  # fmt: skip
