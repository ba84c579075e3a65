"""Rows by the matrices of their experts on Hopper, in Gluon: one warp loads, two warpgroups multiply.

A program goes from tile to tile of 128 rows of one expert and WIDTH columns, which are written in two halves; where
there is an activation, they are half as many of the gate and the same ones of the other factor. The loading warp draws
tiles, see `drawn_tiles`, has rows and a piece of the matrix copied into a ring in shared memory, and runs ahead into
the next tile. Tiles of the same columns of a matrix follow each other, so that it comes from DRAM once. Each warpgroup
has 64 of the rows; where an expert's last tile has no more than 64, the second has nothing to multiply, and half of the
work is saved.

A tile may reach beyond the rows of its expert. The rows of the next are then loaded, and not written: full tiles are
copied out by one instruction, and others element by element.

Rows may be those of tokens, in the order of experts or not: then two more warps copy them, see `gathered_rows`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
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
from nearpeak.kernels.jit.gathered_rows import THREADS, copy_of_tokens, gathered_layout
from nearpeak.kernels.jit.hopper_layouts import product_layout

ROWS = gl.constexpr(64)
"""Rows of a warpgroup, as many as its products have."""
HEIGHT = gl.constexpr(128)
ENTRY = gl.constexpr(8)


@gluon.constexpr_function
def written_layout(columns):
    """The elements of 64 rows of 16 bits as a warpgroup writes them, 16 bytes by each thread at once."""
    return gl.BlockedLayout([1, 8], [32 * 8 // columns, columns // 8], [4, 1], [1, 0])


@gluon.jit
def find_tile(groups, tile, column_tiles, entries):
    """The expert of a tile, -1 for nobody, its first row, where the rows of the expert end, and its columns."""
    entry = groups + entries + tile // column_tiles * ENTRY
    expert = gl.load(entry)
    leader = gl.load(entry + 1)
    count = gl.load(entry + 2)
    row = gl.load(entry + 3)
    end = gl.load(entry + 4)
    place = tile - leader * column_tiles
    return expert, row + place % count * HEIGHT, end, place // count


@gluon.jit
def _copy_pieces(
    rows, weight, rings, barriers, expert, row, end, place, count, begin, steps, GATHERED: gl.constexpr,
    GATED: gl.constexpr, ALONG: gl.constexpr, WIDTH: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copies some steps of a tile into the ring. How many steps of all tiles there have been."""
    row_ring, weight_ring, _written = rings
    full, free = barriers
    both = row + ROWS < end
    for step in range(begin, steps):
        slot = count % STAGES
        at = step * DEPTH
        mbarrier.wait(free.index(slot), ((count // STAGES) & 1) ^ 1)
        if GATHERED:
            mbarrier.expect(full.index(slot), weight.block_type.nbytes)
        else:
            mbarrier.expect(full.index(slot), weight.block_type.nbytes + 2 * rows.block_type.nbytes, pred=both)
            mbarrier.expect(full.index(slot), weight.block_type.nbytes + rows.block_type.nbytes, pred=both == 0)
            tma.async_copy_global_to_shared(rows, [row, at], full.index(slot), row_ring.index(2 * slot))
            tma.async_copy_global_to_shared(
                rows, [row + ROWS, at], full.index(slot), row_ring.index(2 * slot + 1), pred=both
            )
        if GATED:
            tma.async_copy_global_to_shared(
                weight, [expert, 0, place * (WIDTH // 2), at], full.index(slot), weight_ring.index(slot)
            )
        elif ALONG:
            tma.async_copy_global_to_shared(
                weight, [expert, place * WIDTH, at], full.index(slot), weight_ring.index(slot)
            )
        else:
            tma.async_copy_global_to_shared(
                weight, [expert, at, place * WIDTH], full.index(slot), weight_ring.index(slot)
            )
        count += 1
    return count


@gluon.jit
def load_tiles(
    counter, groups, rows, weight, rings, barriers, slots, sizes, GATHERED: gl.constexpr, GATED: gl.constexpr,
    ALONG: gl.constexpr, WIDTH: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copies pieces of rows and of matrices. ALONG: the depth of matrices is what lies together in memory."""
    experts, _columns, depth, entries, column_tiles = sizes
    tiles = gl.load(groups + experts + 1) * column_tiles
    tile = gl.program_id(0)
    count = 0
    turn = 0
    while tile < tiles:
        expert, row, end, place = find_tile(groups, tile, column_tiles, entries)
        tell_tile(slots, turn, expert, row, end, place)
        steps = gl.where(expert < 0, 0, gl.cdiv(depth, DEPTH))
        most = gl.maximum(steps - AHEAD, 0)
        count = _copy_pieces(
            rows, weight, rings, barriers, expert, row, end, place, count, 0, most, GATHERED, GATED, ALONG, WIDTH,
            DEPTH, STAGES,
        )  # fmt: skip
        number = draw(counter)
        count = _copy_pieces(
            rows, weight, rings, barriers, expert, row, end, place, count, most, steps, GATHERED, GATED, ALONG, WIDTH,
            DEPTH, STAGES,
        )  # fmt: skip
        tile = drawn_tile(number)
        turn += 1
    tell_tile(slots, turn, 0, 0, 0, -1)
    end_of_draws(counter, tile, tiles)


@gluon.jit
def gather_tiles(
    tokens, stride, sources, row_ring, barriers, slots, depth, DEPTH: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """Copies pieces of the rows of tokens."""
    full, free = barriers
    bits: gl.constexpr = row_ring.dtype.primitive_bitwidth
    down = gl.arange(0, ROWS, layout=gl.SliceLayout(1, gathered_layout(bits)))
    depth = depth // (128 // bits) * (128 // bits)  # it is a multiple of 16 bytes, and now the compiler knows
    stride = stride // (128 // bits) * (128 // bits)
    count = 0
    turn = 0
    expert, row, end, place = told_tile(slots, turn)
    while place >= 0:
        steps = gl.where(expert < 0, 0, gl.cdiv(depth, DEPTH))
        first = row + down
        second = first + ROWS
        one = gl.load(sources + first, mask=first < end, other=0) * stride
        other = gl.load(sources + second, mask=second < end, other=0) * stride
        for step in range(steps):
            slot = count % STAGES
            mbarrier.wait(free.index(slot), ((count // STAGES) & 1) ^ 1)
            copy_of_tokens(row_ring.index(2 * slot), tokens, one, first < end, step * DEPTH, depth)
            copy_of_tokens(row_ring.index(2 * slot + 1), tokens, other, second < end, step * DEPTH, depth)
            async_copy.mbarrier_arrive(full.index(slot), increment_count=False)
            count += 1
        turn += 1
        expert, row, end, place = told_tile(slots, turn)


@gluon.jit
def write_tile(
    chunk, written, turn, target, pointer, row, end, column, columns, stride, part,
    CONSUMER: gl.constexpr, BUFFERS: gl.constexpr,
):  # fmt: skip
    """Writes 64 rows and some columns of a part; rows from the end on belong to others. The number of the next copy."""
    dtype: gl.constexpr = target.dtype
    wide: gl.constexpr = chunk.shape[1]
    layout: gl.constexpr = written_layout(wide)
    columns = columns // 8 * 8  # they are a multiple of 8, and now the compiler knows
    stride = stride // 8 * 8
    buffer = written.index(CONSUMER * BUFFERS + turn % BUFFERS)
    if row + ROWS <= end:
        tma.store_wait(BUFFERS - 1)
        gl.thread_barrier()  # one thread waits for the last copy from here, and all write
        buffer.store(chunk.to(dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(target, [part, row, column], buffer.reshape([1, ROWS, wide]))
        turn += 1
    else:
        tma.store_wait(0)
        gl.thread_barrier()
        buffer.store(chunk.to(dtype))
        values = buffer.load(layout)
        row_at = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
        column_at = column + gl.arange(0, wide, layout=gl.SliceLayout(0, layout))
        inside = (row_at < end)[:, None] & (column_at < columns)[None, :]
        place = (row_at.to(gl.int64) * stride)[:, None] + (part * columns + column_at)[None, :]
        gl.store(pointer + place, values, mask=inside)
    return turn


@gluon.jit
def halves(total):
    """The first and the second half of the columns."""
    width: gl.constexpr = total.shape[1] // 2
    return total.reshape([ROWS, 2, width]).permute((0, 2, 1)).split()


@gluon.jit
def _consume(
    CONSUMER: gl.constexpr, targets, rings, barriers, slots, columns, depth, GATHERED: gl.constexpr,
    NAME: gl.constexpr, ALONG: gl.constexpr, WIDTH: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr,
    BUFFERS: gl.constexpr,
):  # fmt: skip
    """The products of 64 rows of each tile."""
    result, kept, result_tiles, kept_tiles = targets
    row_ring, weight_ring, written = rings
    full, free = barriers
    GATED: gl.constexpr = NAME != ""
    HALF: gl.constexpr = WIDTH // 2
    layout: gl.constexpr = product_layout(WIDTH)
    count = 0
    copies = 0
    turn = 0
    expert, row, end, place = told_tile(slots, turn)
    while place >= 0:
        steps = gl.where(expert < 0, 0, gl.cdiv(depth, DEPTH))
        own = row + CONSUMER * ROWS
        total = gl.zeros([ROWS, WIDTH], gl.float32, layout=layout)
        if own < end:
            for step in range(steps):
                slot = count % STAGES
                mbarrier.wait(full.index(slot), (count // STAGES) & 1)
                if GATHERED:
                    fence_async_shared()
                given = row_ring.index(2 * slot + CONSUMER)
                if ALONG:
                    matrix = weight_ring.index(slot).reshape([WIDTH, DEPTH]).permute((1, 0))
                else:
                    matrix = weight_ring.index(slot).reshape([DEPTH, WIDTH])
                added = warpgroup_mma(given, matrix, total, is_async=True)
                total = warpgroup_mma_wait(num_outstanding=1, deps=(added,))
                # the product before this one is done with its pieces
                mbarrier.arrive(free.index((count + STAGES - 1) % STAGES), count=1, pred=step > 0)
                count += 1
            total = warpgroup_mma_wait(num_outstanding=0, deps=(total,))
            mbarrier.arrive(free.index((count + STAGES - 1) % STAGES), count=1, pred=steps > 0)
            one, other = halves(total)
            column = place * (HALF if GATED else WIDTH)
            if GATED and kept is not None:
                copies = write_tile(
                    one, written, copies, kept_tiles, kept, own, end, column, columns, 2 * columns, 0, CONSUMER, BUFFERS
                )
                copies = write_tile(
                    other, written, copies, kept_tiles, kept, own, end, column, columns, 2 * columns, 1, CONSUMER,
                    BUFFERS,
                )  # fmt: skip
            if GATED:
                one = activate(one, NAME) * other
            copies = write_tile(
                one, written, copies, result_tiles, result, own, end, column, columns, columns, 0, CONSUMER, BUFFERS
            )
            if not GATED and column + HALF < columns:
                copies = write_tile(
                    other, written, copies, result_tiles, result, own, end, column + HALF, columns, columns, 0,
                    CONSUMER, BUFFERS,
                )  # fmt: skip
        else:
            for _step in range(steps):
                slot = count % STAGES
                mbarrier.wait(full.index(slot), (count // STAGES) & 1)
                mbarrier.arrive(free.index(slot), count=1)
                count += 1
        turn += 1
        expert, row, end, place = told_tile(slots, turn)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["experts", "columns", "depth", "entries", "column_tiles", "stride"])
def grouped_hopper_kernel(
    counter, groups, result, kept, tokens, sources, rows, weight, result_tiles, kept_tiles, experts, columns, depth,
    entries, column_tiles, stride, NAME: gl.constexpr, ALONG: gl.constexpr, WIDTH: gl.constexpr, DEPTH: gl.constexpr,
    STAGES: gl.constexpr, BUFFERS: gl.constexpr,
):  # fmt: skip
    """From `rows` to `kept_tiles` they are descriptors, of tiles with a part before rows.

    Where there are `sources`, each row is that of a token, and `rows` says of their tiles no more than how they lie.
    """
    dtype: gl.constexpr = rows.dtype
    GATED: gl.constexpr = NAME != ""
    GATHERED: gl.constexpr = sources is not None
    HALF: gl.constexpr = WIDTH // 2
    row_ring = gl.allocate_shared_memory(dtype, [2 * STAGES, ROWS, DEPTH], rows.layout)
    if GATED:
        weight_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 2, HALF, DEPTH], weight.layout)
    elif ALONG:
        weight_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, WIDTH, DEPTH], weight.layout)
    else:
        weight_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, DEPTH, WIDTH], weight.layout)
    written = gl.allocate_shared_memory(
        result_tiles.dtype, [2 * BUFFERS, ROWS, HALF], gl.NVMMASharedLayout(128, 16, rank=2)
    )
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
    targets = (result, kept, result_tiles, kept_tiles)
    if GATHERED:
        gl.warp_specialize(
            [
                (_consume, (
                    0, targets, rings, barriers, slots, columns, depth, True, NAME, ALONG, WIDTH, DEPTH, STAGES,
                    BUFFERS,
                )),
                (_consume, (
                    1, targets, rings, barriers, slots, columns, depth, True, NAME, ALONG, WIDTH, DEPTH, STAGES,
                    BUFFERS,
                )),
                (load_tiles, (
                    counter, groups, rows, weight, rings, barriers, slots, sizes, True, GATED, ALONG, WIDTH, DEPTH,
                    STAGES,
                )),
                (gather_tiles, (
                    tokens, stride, sources, row_ring, barriers, slots, depth, DEPTH, STAGES
                )),
            ],
            [4, 1, 2],
            [224, 56, 56],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (
                    0, targets, rings, barriers, slots, columns, depth, False, NAME, ALONG, WIDTH, DEPTH, STAGES,
                    BUFFERS,
                )),
                (_consume, (
                    1, targets, rings, barriers, slots, columns, depth, False, NAME, ALONG, WIDTH, DEPTH, STAGES,
                    BUFFERS,
                )),
                (load_tiles, (
                    counter, groups, rows, weight, rings, barriers, slots, sizes, False, GATED, ALONG, WIDTH, DEPTH,
                    STAGES,
                )),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip
