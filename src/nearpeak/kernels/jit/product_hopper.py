"""The matrix product on Hopper, in Gluon: one warp loads, warpgroups multiply, and each has a warp that writes.

The loading warp has tiles of both factors copied into a ring in shared memory, as far ahead as the ring is long, also
into the next tile of the result. Each warpgroup has some rows of a tile of the result in its registers. When it is
done with the sums it applies what follows, a piece of columns at a time, into a buffer in shared memory, and goes on to
the next tile; the writing warp has the buffer copied to the result, and a piece of the residual copied into it before.

There are as many programs as processors, each of which goes from tile to tile. Rows of tiles are taken in groups, so
that what programs read at a time is near to a square and stays in the cache.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from nearpeak.kernels.jit.activations import activate
from nearpeak.kernels.jit.hopper_layouts import product_layout
from nearpeak.kernels.jit.product_hopper_sums import halves, load_factors, place_of, promoted_sums, sums


@gluon.jit
def _send(
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
def _write(
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
        row_tile, column_tile = place_of(tile, row_tiles, column_tiles, group)
        row = row_tile * (ROWS * CONSUMERS) + CONSUMER * ROWS
        for piece in gl.static_range(PIECES):
            column = column_tile * BLOCK_N + piece * width
            if HAS_RESIDUAL:  # there is one buffer then, which the result before has left
                mbarrier.expect(ready.index(CONSUMER), residual.block_type.nbytes)
                place = buffers.index(CONSUMER)
                tma.async_copy_global_to_shared(residual, [row, column], ready.index(CONSUMER), place)
            if KEEP:
                count = _send(CONSUMER, kept, row, column, buffers, ready, written, count, BUFFERS, False)
                if GATED:
                    count = _send(CONSUMER, kept_up, row, column, buffers, ready, written, count, BUFFERS, False)
            count = _send(CONSUMER, result, row, column, buffers, ready, written, count, BUFFERS, HAS_RESIDUAL)
    tma.store_wait(0)


@gluon.jit
def _scaled(
    value, bias, scales, row, column, rows, columns, offset, HAS_BIAS: gl.constexpr, OUTER: gl.constexpr,
    ROWS: gl.constexpr, WIDTH: gl.constexpr, BITS: gl.constexpr,
):  # fmt: skip
    """Sums times the scales of rows and columns, and the bias. What is outside is anything."""
    layout: gl.constexpr = product_layout(WIDTH, BITS)
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
def _hand_over(
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
        row_tile, column_tile = place_of(tile, row_tiles, column_tiles, group)
        row = row_tile * (ROWS * CONSUMERS) + CONSUMER * ROWS
        column = column_tile * BLOCK_N
        if PROMOTED:
            total, other, count = promoted_sums(
                CONSUMER, rings, barriers, count, steps, scales, row, column, columns, rows, ROWS, BLOCK_N, CONSUMERS,
                STAGES, GATED, BY_BLOCK,
            )  # fmt: skip
        else:
            total, other, count = sums(
                CONSUMER, rings, barriers, count, steps, ROWS, BLOCK_N, CONSUMERS, STAGES, GATED, A_ACROSS, B_ACROSS
            )
        for piece in gl.static_range(PIECES):
            value = _piece(total, piece, ROWS, BLOCK_N, PIECES, bits)
            start = column + piece * width
            value = _scaled(value, bias, scales, row, start, rows, columns, 0, HAS_BIAS, OUTER, ROWS, width, bits)
            if HAS_RESIDUAL:
                mbarrier.wait(ready.index(CONSUMER), turn & 1)
                added = buffers.index(CONSUMER).load(product_layout(width, bits))
                turn += 1
            if KEEP:
                turn = _hand_over(
                    CONSUMER, value, buffers, ready, written, turn, BUFFERS, HAS_RESIDUAL, HAS_RESIDUAL
                )  # fmt: skip
            if ACTIVATION != "":
                value = activate(value, ACTIVATION)
            if GATED:
                more = _piece(other, piece, ROWS, BLOCK_N, PIECES, bits)
                more = _scaled(
                    more, bias, scales, row, start, rows, columns, columns, HAS_BIAS, OUTER, ROWS, width, bits
                )  # fmt: skip
                if KEEP:
                    turn = _hand_over(CONSUMER, more, buffers, ready, written, turn, BUFFERS, False, HAS_RESIDUAL)
                value = value * more
            if HAS_RESIDUAL:
                value = value + added.to(gl.float32)
            turn = _hand_over(
                CONSUMER, value, buffers, ready, written, turn, BUFFERS, HAS_RESIDUAL and not KEEP, HAS_RESIDUAL
            )  # fmt: skip


@gluon.jit(
    do_not_specialize=[
        "rows", "columns", "steps", "row_tiles", "column_tiles", "group", "tiles", "a_scale_row", "a_scale_block",
        "b_scale_column", "b_scale_block",
    ]
)  # fmt: skip
def product_hopper_kernel(
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
                (load_factors, (
                    a, b, up, rings, barriers, sizes, ROWS, BLOCK_N, BLOCK_K, CONSUMERS, STAGES, GATED, A_ACROSS,
                    B_ACROSS,
                )),
                (_write, (
                    0, outputs, rings, barriers, sizes, ROWS, BLOCK_N, CONSUMERS, PIECES, BUFFERS, GATED, KEEP,
                    HAS_RESIDUAL,
                )),
                (_write, (
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
                (load_factors, (
                    a, b, up, rings, barriers, sizes, ROWS, BLOCK_N, BLOCK_K, CONSUMERS, STAGES, GATED, A_ACROSS,
                    B_ACROSS,
                )),
                (_write, (
                    0, outputs, rings, barriers, sizes, ROWS, BLOCK_N, CONSUMERS, PIECES, BUFFERS, GATED, KEEP,
                    HAS_RESIDUAL,
                )),
                (_write, (
                    1, outputs, rings, barriers, sizes, ROWS, BLOCK_N, CONSUMERS, PIECES, BUFFERS, GATED, KEEP,
                    HAS_RESIDUAL,
                )),
                (_write, (
                    2, outputs, rings, barriers, sizes, ROWS, BLOCK_N, CONSUMERS, PIECES, BUFFERS, GATED, KEEP,
                    HAS_RESIDUAL,
                )),
            ],
            [4, 4, 1, 1, 1, 1],
            [160, 160, 24, 24, 24, 24],
        )  # fmt: skip
