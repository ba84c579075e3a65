"""Rows by the matrices of their experts on Hopper, with the rows as the columns of the tensor cores' products.

A product of tensor cores has 64 rows, and any multiple of 8 columns. Where an expert has a few hundred rows, tiles of
64 of them are on average half empty at its end. Here a tile is 128 columns of a matrix, 64 of each warpgroup, by 256
rows of the expert, and the last tile of an expert up to 320: so one with a few more than 256 has one tile all the same,
which costs as many products as it has rows, rounded up to 32, and reads the matrix once.

With an activation, a warpgroup has 32 columns of the gate and the same ones of the other factor, 8 of each in turns: a
thread then has both of what it multiplies.
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
from nearpeak.kernels.jit.drawn_tiles import (
    AHEAD,
    draw,
    drawn_tile,
    end_of_draws,
    slots_for_tiles,
    tell_tile,
    told_tile,
)
from nearpeak.kernels.jit.grouped_product_hopper import ENTRY, ROWS, halves
from nearpeak.kernels.jit.hopper_layouts import product_layout

TALL = gl.constexpr(256)
"""Rows of a tile."""
MORE = gl.constexpr(64)
"""Rows that the last tile of an expert may have more."""
CHUNK = gl.constexpr(128)
"""Rows that are written at a time."""
COLUMNS = gl.constexpr(128)


@gluon.jit
def _find_tile(groups, tile, column_tiles, entries):
    """The expert of a tile, -1 for nobody, its first row, how many it has, and its columns."""
    entry = groups + entries + tile // column_tiles * ENTRY
    expert = gl.load(entry)
    leader = gl.load(entry + 1)
    count = gl.load(entry + 2)
    first = gl.load(entry + 3)
    end = gl.load(entry + 4)
    place = tile - leader * column_tiles
    row = first + place % count * TALL
    left = end - row
    return expert, row, gl.where(left <= TALL + MORE, left, TALL), place // count


@gluon.jit
def _copy_pieces(
    rows, more_rows, weight, rings, barriers, expert, row, number, place, count, begin, steps,
    GATED: gl.constexpr, ALONG: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copies some steps of a tile into the ring. How many steps of all tiles there have been."""
    row_ring, more_ring, weight_ring, _written = rings
    full, free = barriers
    more = number > TALL
    few: gl.constexpr = 2 * weight.block_type.nbytes + rows.block_type.nbytes
    for step in range(begin, steps):
        slot = count % STAGES
        at = step * DEPTH
        mbarrier.wait(free.index(slot), ((count // STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(slot), few + more_rows.block_type.nbytes, pred=more)
        mbarrier.expect(full.index(slot), few, pred=more == 0)
        for half in gl.static_range(2):
            column = place * COLUMNS + half * ROWS
            if GATED:
                tma.async_copy_global_to_shared(
                    weight, [expert, column // 16, 0, 0, at], full.index(slot), weight_ring.index(2 * slot + half)
                )
            elif ALONG:
                tma.async_copy_global_to_shared(
                    weight, [expert, column, at], full.index(slot), weight_ring.index(2 * slot + half)
                )
            else:
                tma.async_copy_global_to_shared(
                    weight, [expert, at, column], full.index(slot), weight_ring.index(2 * slot + half)
                )
        tma.async_copy_global_to_shared(rows, [row, at], full.index(slot), row_ring.index(slot))
        tma.async_copy_global_to_shared(more_rows, [row + TALL, at], full.index(slot), more_ring.index(slot), pred=more)
        count += 1
    return count


@gluon.jit
def _load(
    counter, groups, rows, more_rows, weight, rings, barriers, slots, sizes, GATED: gl.constexpr, ALONG: gl.constexpr,
    DEPTH: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copies pieces of rows and of matrices. ALONG: the depth of matrices is what lies together in memory."""
    experts, _columns, depth, entries, column_tiles = sizes
    tiles = gl.load(groups + experts + 2) * column_tiles
    tile = gl.program_id(0)
    count = 0
    turn = 0
    while tile < tiles:
        expert, row, number, place = _find_tile(groups, tile, column_tiles, entries)
        tell_tile(slots, turn, expert, row, number, place)
        steps = gl.where(expert < 0, 0, gl.cdiv(depth, DEPTH))
        most = gl.maximum(steps - AHEAD, 0)
        count = _copy_pieces(
            rows, more_rows, weight, rings, barriers, expert, row, number, place, count, 0, most, GATED, ALONG, DEPTH,
            STAGES,
        )  # fmt: skip
        drawn = draw(counter)
        count = _copy_pieces(
            rows, more_rows, weight, rings, barriers, expert, row, number, place, count, most, steps, GATED, ALONG,
            DEPTH, STAGES,
        )  # fmt: skip
        tile = drawn_tile(drawn)
        turn += 1
    tell_tile(slots, turn, 0, 0, 0, -1)
    end_of_draws(counter, tile, tiles)


@gluon.jit
def _write(chunk, buffer, target, pointer, row, end, column, columns, stride, part):
    """Writes columns of a part by some rows, the other way round."""
    dtype: gl.constexpr = target.dtype
    high: gl.constexpr = chunk.shape[0]
    wide: gl.constexpr = chunk.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // high, high // 8], [4, 1], [1, 0])
    columns = columns // 8 * 8  # they are a multiple of 8, and now the compiler knows
    stride = stride // 8 * 8
    if row < end:
        tma.store_wait(0)
        gl.thread_barrier()  # one thread waits for the copy before, and all write
        rows = buffer.slice(0, wide, dim=0)
        rows.store(chunk.to(dtype).permute((1, 0)))
        if wide == CHUNK and row + wide <= end:
            fence_async_shared()
            tma.async_copy_shared_to_global(target, [part, row, column], buffer.reshape([1, CHUNK, high]))
        else:
            values = rows.load(layout)
            row_at = row + gl.arange(0, wide, layout=gl.SliceLayout(1, layout))
            column_at = column + gl.arange(0, high, layout=gl.SliceLayout(0, layout))
            inside = (row_at < end)[:, None] & (column_at < columns)[None, :]
            place = (row_at.to(gl.int64) * stride)[:, None] + (part * columns + column_at)[None, :]
            gl.store(pointer + place, values, mask=inside)


@gluon.jit
def _finish(chunk, buffer, targets, kept_tiles, kept, row, end, column, columns, NAME: gl.constexpr):
    """Writes the results of some rows, and what their activation was taken of where that is kept."""
    result_tiles, result = targets
    if NAME != "":
        wide: gl.constexpr = chunk.shape[1]
        gate, up = chunk.reshape([ROWS // 16, 2, 8, wide]).permute((0, 2, 3, 1)).split()
        gate = gate.reshape([ROWS // 2, wide])
        up = up.reshape([ROWS // 2, wide])
        if kept is not None:
            _write(gate, buffer, kept_tiles, kept, row, end, column, columns, 2 * columns, 0)
            _write(up, buffer, kept_tiles, kept, row, end, column, columns, 2 * columns, 1)
        _write(activate(gate, NAME) * up, buffer, result_tiles, result, row, end, column, columns, columns, 0)
    else:
        _write(chunk, buffer, result_tiles, result, row, end, column, columns, columns, 0)


@gluon.jit
def _multiply(
    rings, barriers, count, steps, targets, kept_tiles, kept, row, number, column, columns,
    CONSUMER: gl.constexpr, NAME: gl.constexpr, ALONG: gl.constexpr, NUMBER: gl.constexpr, EXTRA: gl.constexpr,
    DEPTH: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A tile of so many rows, of which each warpgroup has 64 columns."""
    row_ring, more_ring, weight_ring, written = rings
    full, free = barriers
    total = gl.zeros([ROWS, NUMBER], gl.float32, layout=product_layout(NUMBER))
    if EXTRA > 0:
        extra = gl.zeros([ROWS, EXTRA], gl.float32, layout=product_layout(EXTRA))
    for step in range(steps):
        slot = count % STAGES
        mbarrier.wait(full.index(slot), (count // STAGES) & 1)
        piece = weight_ring.index(2 * slot + CONSUMER).reshape([ROWS, DEPTH])
        if not ALONG:
            piece = weight_ring.index(2 * slot + CONSUMER).reshape([DEPTH, ROWS]).permute((1, 0))
        given = row_ring.index(slot).slice(0, NUMBER, dim=0).permute((1, 0))
        added = warpgroup_mma(piece, given, total, is_async=True)
        if EXTRA > 0:
            behind = more_ring.index(slot).slice(0, EXTRA, dim=0).permute((1, 0))
            also = warpgroup_mma(piece, behind, extra, is_async=True)
            total, extra = warpgroup_mma_wait(num_outstanding=2, deps=(added, also))
        else:
            total = warpgroup_mma_wait(num_outstanding=1, deps=(added,))
        mbarrier.arrive(free.index((count + STAGES - 1) % STAGES), count=1, pred=step > 0)
        count += 1
    if EXTRA > 0:
        total, extra = warpgroup_mma_wait(num_outstanding=0, deps=(total, extra))
    else:
        total = warpgroup_mma_wait(num_outstanding=0, deps=(total,))
    mbarrier.arrive(free.index((count + STAGES - 1) % STAGES), count=1, pred=steps > 0)
    end = row + number
    buffer = written.index(CONSUMER)
    if NUMBER > CHUNK:
        one, other = halves(total)
        _finish(one, buffer, targets, kept_tiles, kept, row, end, column, columns, NAME)
        _finish(other, buffer, targets, kept_tiles, kept, row + CHUNK, end, column, columns, NAME)
    else:
        _finish(total, buffer, targets, kept_tiles, kept, row, end, column, columns, NAME)
    if EXTRA > 0:
        _finish(extra, buffer, targets, kept_tiles, kept, row + TALL, end, column, columns, NAME)
    return count


@gluon.jit
def _consume(
    CONSUMER: gl.constexpr, targets, kept_tiles, kept, rings, barriers, slots, columns, depth, NAME: gl.constexpr,
    ALONG: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Of each tile the products of 64 columns of the matrix."""
    count = 0
    turn = 0
    expert, row, number, place = told_tile(slots, turn)
    while place >= 0:
        steps = gl.where(expert < 0, 0, gl.cdiv(depth, DEPTH))
        column = place * COLUMNS + CONSUMER * ROWS
        if NAME != "":
            column = column // 2
        if number <= CHUNK:
            count = _multiply(
                rings, barriers, count, steps, targets, kept_tiles, kept, row, number, column, columns, CONSUMER, NAME,
                ALONG, CHUNK, 0, DEPTH, STAGES,
            )  # fmt: skip
        elif number <= TALL:
            count = _multiply(
                rings, barriers, count, steps, targets, kept_tiles, kept, row, number, column, columns, CONSUMER, NAME,
                ALONG, TALL, 0, DEPTH, STAGES,
            )  # fmt: skip
        elif number <= TALL + MORE // 2:
            count = _multiply(
                rings, barriers, count, steps, targets, kept_tiles, kept, row, number, column, columns, CONSUMER, NAME,
                ALONG, TALL, MORE // 2, DEPTH, STAGES,
            )  # fmt: skip
        else:
            count = _multiply(
                rings, barriers, count, steps, targets, kept_tiles, kept, row, number, column, columns, CONSUMER, NAME,
                ALONG, TALL, MORE, DEPTH, STAGES,
            )  # fmt: skip
        turn += 1
        expert, row, number, place = told_tile(slots, turn)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["experts", "columns", "depth", "entries", "column_tiles"])
def grouped_wide_hopper_kernel(
    counter, groups, result, kept, rows, more_rows, weight, result_tiles, kept_tiles, experts, columns, depth, entries,
    column_tiles, NAME: gl.constexpr, ALONG: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """From `rows` to `kept_tiles` they are descriptors, of tiles with a part before rows."""
    dtype: gl.constexpr = rows.dtype
    GATED: gl.constexpr = NAME != ""
    HIGH: gl.constexpr = ROWS // 2 if GATED else ROWS
    row_ring = gl.allocate_shared_memory(dtype, [STAGES, TALL, DEPTH], rows.layout)
    more_ring = gl.allocate_shared_memory(dtype, [STAGES, MORE, DEPTH], more_rows.layout)
    if GATED:
        weight_ring = gl.allocate_shared_memory(dtype, [2 * STAGES, 1, ROWS // 16, 2, 8, DEPTH], weight.layout)
    elif ALONG:
        weight_ring = gl.allocate_shared_memory(dtype, [2 * STAGES, 1, ROWS, DEPTH], weight.layout)
    else:
        weight_ring = gl.allocate_shared_memory(dtype, [2 * STAGES, 1, DEPTH, ROWS], weight.layout)
    written = gl.allocate_shared_memory(dtype, [2, CHUNK, HIGH], gl.NVMMASharedLayout(2 * HIGH, 16, rank=2))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(free.index(slot), count=2)
    slots = slots_for_tiles(2)
    fence_async_shared()
    rings = (row_ring, more_ring, weight_ring, written)
    barriers = (full, free)
    sizes = (experts, columns, depth, entries, column_tiles)
    targets = (result_tiles, result)
    gl.warp_specialize(
        [
            (_consume, (
                0, targets, kept_tiles, kept, rings, barriers, slots, columns, depth, NAME, ALONG, DEPTH, STAGES
            )),
            (_consume, (
                1, targets, kept_tiles, kept, rings, barriers, slots, columns, depth, NAME, ALONG, DEPTH, STAGES
            )),
            (_load, (
                counter, groups, rows, more_rows, weight, rings, barriers, slots, sizes, GATED, ALONG, DEPTH, STAGES
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
