"""The grouped GEMM kernels for Hopper, in Gluon: forward, fp8, and the gradient of the weights.

One warp loads, two warpgroups multiply. A program goes from tile to tile of 128 rows of one expert and WIDTH columns, stored in
two halves; with an activation these are the same columns of gate and up. The load warp draws tiles (`dynamic_tiles`), copies rows
and weights into a ring buffer in shared memory, and runs ahead into the next tile. Tiles of the same columns of a matrix follow
each other, so that it is read from DRAM once. Each warpgroup has 64 of the rows; where the last tile of an expert has no more
than 64, the second warpgroup is idle and half of the work is saved.

A tile may reach beyond the rows of its expert. The rows of the next expert are then loaded but not stored: full tiles are stored
by TMA, others element by element.

Rows may be gathered from tokens: two more warps copy them with asynchronous copies, 16 bytes per thread, and arrive at the
barrier of the step; consumers put a fence between that barrier and the matrix instruction.
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

from nearpeak.kernels._runtime.dynamic_tiles import (
    STEPS_AHEAD,
    allocate_tile_slots,
    draw_tile_number,
    publish_tile,
    receive_tile,
    reset_tile_counter,
    resolve_tile_number,
)
from nearpeak.kernels._runtime.sm90_layouts import wgmma_layout
from nearpeak.kernels.pointwise.triton import activate

GATHER_THREADS = gl.constexpr(64)
"""Of two warps: as many arrive at the barrier of a step."""


@gluon.constexpr_function
def gathered_layout(bits=16):
    """Elements of 8 rows, 16 bytes for each thread."""
    return gl.BlockedLayout([1, 128 // bits], [4, 8], [2, 1], [1, 0])


@gluon.jit
def copy_tokens(target, tokens, own, inside, column, columns):
    """Has some columns of rows copied that begin at `own`. What is not inside, or behind the columns, becomes zeros."""
    wide: gl.constexpr = target.shape[1]
    layout: gl.constexpr = gathered_layout(target.dtype.primitive_bitwidth)
    column += gl.arange(0, wide, layout=gl.SliceLayout(0, layout))
    async_copy.async_copy_global_to_shared(
        target, tokens + (own[:, None] + column[None, :]), inside[:, None] & (column < columns)[None, :]
    )


ROWS = gl.constexpr(64)
"""Rows of a warpgroup, as many as its products have."""
HEIGHT = gl.constexpr(128)
ENTRY_SIZE = gl.constexpr(8)


@gluon.constexpr_function
def written_layout(columns):
    """The elements of 64 rows of 16 bits as a warpgroup writes them, 16 bytes by each thread at once."""
    return gl.BlockedLayout([1, 8], [32 * 8 // columns, columns // 8], [4, 1], [1, 0])


@gluon.jit
def find_tile(groups, tile, column_tiles, entries):
    """The expert of a tile, -1 for nobody, its first row, where the rows of the expert end, and its columns."""
    entry = groups + entries + tile // column_tiles * ENTRY_SIZE
    expert = gl.load(entry)
    leader = gl.load(entry + 1)
    count = gl.load(entry + 2)
    row = gl.load(entry + 3)
    end = gl.load(entry + 4)
    place = tile - leader * column_tiles
    return expert, row + place % count * HEIGHT, end, place // count


@gluon.jit
def _load_steps(
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
        publish_tile(slots, turn, expert, row, end, place)
        steps = gl.where(expert < 0, 0, gl.cdiv(depth, DEPTH))
        most = gl.maximum(steps - STEPS_AHEAD, 0)
        count = _load_steps(
            rows, weight, rings, barriers, expert, row, end, place, count, 0, most, GATHERED, GATED, ALONG, WIDTH,
            DEPTH, STAGES,
        )  # fmt: skip
        number = draw_tile_number(counter)
        count = _load_steps(
            rows, weight, rings, barriers, expert, row, end, place, count, most, steps, GATHERED, GATED, ALONG, WIDTH,
            DEPTH, STAGES,
        )  # fmt: skip
        tile = resolve_tile_number(number)
        turn += 1
    publish_tile(slots, turn, 0, 0, 0, -1)
    reset_tile_counter(counter, tile, tiles)


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
    expert, row, end, place = receive_tile(slots, turn)
    while place >= 0:
        steps = gl.where(expert < 0, 0, gl.cdiv(depth, DEPTH))
        first = row + down
        second = first + ROWS
        one = gl.load(sources + first, mask=first < end, other=0) * stride
        other = gl.load(sources + second, mask=second < end, other=0) * stride
        for step in range(steps):
            slot = count % STAGES
            mbarrier.wait(free.index(slot), ((count // STAGES) & 1) ^ 1)
            copy_tokens(row_ring.index(2 * slot), tokens, one, first < end, step * DEPTH, depth)
            copy_tokens(row_ring.index(2 * slot + 1), tokens, other, second < end, step * DEPTH, depth)
            async_copy.mbarrier_arrive(full.index(slot), increment_count=False)
            count += 1
        turn += 1
        expert, row, end, place = receive_tile(slots, turn)


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
    layout: gl.constexpr = wgmma_layout(WIDTH)
    count = 0
    copies = 0
    turn = 0
    expert, row, end, place = receive_tile(slots, turn)
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
        expert, row, end, place = receive_tile(slots, turn)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["experts", "columns", "depth", "entries", "column_tiles", "stride"])
def grouped_gemm_sm90_kernel(
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
        mbarrier.init(full.index(slot), count=1 + GATHER_THREADS if GATHERED else 1)
        mbarrier.init(free.index(slot), count=2)
    slots = allocate_tile_slots(3 if GATHERED else 2)
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


SCALE_BLOCK = gl.constexpr(128)
"""Of the depth, and of columns, what shares a scale."""


@gluon.jit
def _load_scales(
    row_scales, weight_scales, expert, row_at, inside, column_at, step, columns, down, across,
    GATED: gl.constexpr, WIDTH: gl.constexpr,
):  # fmt: skip
    """The scales of rows, and of columns, of one block of the depth."""
    by_row = gl.load(row_scales + row_at.to(gl.int64) * across + step, mask=inside, other=0.0)
    own = weight_scales + expert.to(gl.int64) * down * across + step
    if GATED:  # a half of the tile is within one block of columns
        first = gl.load(own + column_at // SCALE_BLOCK * across)
        second = gl.load(own + (columns + column_at) // SCALE_BLOCK * across)
    else:
        first = gl.load(own + column_at // SCALE_BLOCK * across)
        second = first
    return by_row, first, second


@gluon.jit
def _consume_fp8(
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
    layout: gl.constexpr = wgmma_layout(WIDTH, 8)
    count = 0
    copies = 0
    turn = 0
    across = gl.cdiv(depth, DEPTH)
    expert, row, end, place = receive_tile(slots, turn)
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
                by_row, one_scale, other_scale = _load_scales(
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
                    next_row, next_one, next_other = _load_scales(
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
        expert, row, end, place = receive_tile(slots, turn)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["experts", "columns", "depth", "entries", "column_tiles", "down", "stride"])
def grouped_gemm_fp8_sm90_kernel(
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
        mbarrier.init(full.index(slot), count=1 + GATHER_THREADS if GATHERED else 1)
        mbarrier.init(free.index(slot), count=2)
    slots = allocate_tile_slots(3 if GATHERED else 2)
    fence_async_shared()
    rings = (row_ring, weight_ring, written)
    barriers = (full, free)
    sizes = (experts, columns, depth, entries, column_tiles)
    targets = (result, result_tiles)
    scales = (row_scales, weight_scales)
    if GATHERED:
        gl.warp_specialize(
            [
                (_consume_fp8, (
                    0, targets, scales, sources, rings, barriers, slots, columns, depth, down, NAME, BLOCKS, WIDTH,
                    DEPTH, STAGES,
                )),
                (_consume_fp8, (
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
                (_consume_fp8, (
                    0, targets, scales, None, rings, barriers, slots, columns, depth, down, NAME, BLOCKS, WIDTH, DEPTH,
                    STAGES,
                )),
                (_consume_fp8, (
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


MAX_ROWS = gl.constexpr(2**30)
"""Rows that there seem to be."""


@gluon.jit
def _expert_rows(groups, expert):
    """The first row of an expert, and how many it has."""
    begin = gl.load(groups + expert)
    return begin, gl.load(groups + expert + 1) - begin


@gluon.jit
def _load_gradient_steps(
    gradient, rows, rings, barriers, last, number, column, at, count, begin, steps, GATHERED: gl.constexpr,
    DEPTH: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copies some steps of a tile into the ring. How many steps of all tiles there have been."""
    gradient_ring, row_ring, _written = rings
    full, free = barriers
    for step in range(begin, steps):
        slot = count % STAGES
        row = MAX_ROWS - number + step * DEPTH
        mbarrier.wait(free.index(slot), ((count // STAGES) & 1) ^ 1)
        if GATHERED == "gradient":
            mbarrier.expect(full.index(slot), rows.block_type.nbytes)
        elif GATHERED == "rows":
            mbarrier.expect(full.index(slot), 2 * gradient.block_type.nbytes)
        else:
            mbarrier.expect(full.index(slot), 2 * gradient.block_type.nbytes + rows.block_type.nbytes)
        if GATHERED != "gradient":
            for half in gl.static_range(2):
                tma.async_copy_global_to_shared(
                    gradient,
                    [MAX_ROWS, last, row, column + half * ROWS],
                    full.index(slot),
                    gradient_ring.index(2 * slot + half),
                )
        if GATHERED != "rows":
            tma.async_copy_global_to_shared(rows, [MAX_ROWS, last, row, at], full.index(slot), row_ring.index(slot))
        count += 1
    return count


@gluon.jit
def _load_gradient_tiles(
    counter, groups, gradient, rows, rings, barriers, slots, sizes, GATHERED: gl.constexpr, WIDTH: gl.constexpr,
    DEPTH: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    tiles, down, across = sizes
    tile = gl.program_id(0)
    count = 0
    turn = 0
    while tile < tiles:
        expert = tile // (down * across)
        begin, number = _expert_rows(groups, expert)
        column = tile % (down * across) // across * HEIGHT
        at = tile % across * WIDTH
        publish_tile(slots, turn, expert, number, column, at)
        steps = gl.cdiv(number, DEPTH)
        most = gl.maximum(steps - STEPS_AHEAD, 0)
        last = begin + number
        count = _load_gradient_steps(
            gradient, rows, rings, barriers, last, number, column, at, count, 0, most, GATHERED, DEPTH, STAGES
        )
        drawn = draw_tile_number(counter)
        count = _load_gradient_steps(
            gradient, rows, rings, barriers, last, number, column, at, count, most, steps, GATHERED, DEPTH, STAGES
        )
        tile = resolve_tile_number(drawn)
        turn += 1
    publish_tile(slots, turn, 0, 0, 0, -1)
    reset_tile_counter(counter, tile, tiles)


@gluon.jit
def _gather_gradient_step(
    tokens, own, stride, number, column, columns, rings, barriers, count, step, GATHERED: gl.constexpr,
    WIDTH: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copies the rows of tokens for one step, if there is such a step. How many there have been."""
    gradient_ring, row_ring, _written = rings
    full, free = barriers
    first = step * DEPTH
    if first < number:
        inside = first + gl.arange(0, DEPTH, layout=gl.SliceLayout(1, gathered_layout())) < number
        slot = count % STAGES
        mbarrier.wait(free.index(slot), ((count // STAGES) & 1) ^ 1)
        if GATHERED == "gradient":
            for half in gl.static_range(2):
                target = gradient_ring.index(2 * slot + half).reshape([DEPTH, ROWS])
                copy_tokens(target, tokens, own * stride, inside, column + half * ROWS, columns)
        else:
            copy_tokens(row_ring.index(slot).reshape([DEPTH, WIDTH]), tokens, own * stride, inside, column, columns)
        async_copy.mbarrier_arrive(full.index(slot), increment_count=False)
        count += 1
    return count


@gluon.jit
def _gather_gradient_tiles(
    groups, tokens, stride, columns, sources, rings, barriers, slots, GATHERED: gl.constexpr, WIDTH: gl.constexpr,
    DEPTH: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copies pieces of the rows of tokens. Where they are is loaded for four steps at a time."""
    down = gl.arange(0, DEPTH, layout=gl.SliceLayout(1, gathered_layout()))
    columns = columns // 8 * 8  # they are multiples of 8, and now the compiler knows
    stride = stride // 8 * 8
    count = 0
    turn = 0
    expert, number, column, at = receive_tile(slots, turn)
    while at >= 0:
        own = sources + gl.load(groups + expert) + down
        place = (column if GATHERED == "gradient" else at) // ROWS * ROWS
        for step in range(0, gl.cdiv(number, DEPTH), 4):
            left = number - step * DEPTH - down
            four = (
                gl.load(own, mask=left > 0, other=0),
                gl.load(own + DEPTH, mask=left > DEPTH, other=0),
                gl.load(own + 2 * DEPTH, mask=left > 2 * DEPTH, other=0),
                gl.load(own + 3 * DEPTH, mask=left > 3 * DEPTH, other=0),
            )
            for ahead in gl.static_range(4):
                count = _gather_gradient_step(
                    tokens, four[ahead], stride, number, place, columns, rings, barriers, count, step + ahead, GATHERED,
                    WIDTH, DEPTH, STAGES,
                )  # fmt: skip
            own += 4 * DEPTH
        turn += 1
        expert, number, column, at = receive_tile(slots, turn)


@gluon.jit
def _consume_gradient(
    CONSUMER: gl.constexpr, result, rings, barriers, slots, GATHERED: gl.constexpr, WIDTH: gl.constexpr,
    DEPTH: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """64 rows of each tile of the result."""
    gradient_ring, row_ring, written = rings
    full, free = barriers
    HALF: gl.constexpr = WIDTH // 2
    layout: gl.constexpr = wgmma_layout(WIDTH)
    count = 0
    turn = 0
    expert, number, column, at = receive_tile(slots, turn)
    while at >= 0:
        steps = gl.cdiv(number, DEPTH)
        total = gl.zeros([ROWS, WIDTH], gl.float32, layout=layout)
        for step in range(steps):
            slot = count % STAGES
            mbarrier.wait(full.index(slot), (count // STAGES) & 1)
            if GATHERED != "":
                fence_async_shared()
            upstream = gradient_ring.index(2 * slot + CONSUMER).reshape([DEPTH, ROWS]).permute((1, 0))
            given = row_ring.index(slot).reshape([DEPTH, WIDTH])
            added = warpgroup_mma(upstream, given, total, is_async=True)
            total = warpgroup_mma_wait(num_outstanding=1, deps=(added,))
            mbarrier.arrive(free.index((count + STAGES - 1) % STAGES), count=1, pred=step > 0)
            count += 1
        total = warpgroup_mma_wait(num_outstanding=0, deps=(total,))
        mbarrier.arrive(free.index((count + STAGES - 1) % STAGES), count=1, pred=steps > 0)

        row = column + CONSUMER * ROWS
        one, other = halves(total)
        tma.store_wait(1)  # the first half of the tile before is out; one thread waits, and all write
        gl.thread_barrier()
        written.index(2 * CONSUMER).store(one.to(result.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(result, [expert, row, at], written.index(2 * CONSUMER).reshape([1, ROWS, HALF]))
        tma.store_wait(1)
        gl.thread_barrier()
        written.index(2 * CONSUMER + 1).store(other.to(result.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(
            result, [expert, row, at + HALF], written.index(2 * CONSUMER + 1).reshape([1, ROWS, HALF])
        )
        turn += 1
        expert, number, column, at = receive_tile(slots, turn)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["tiles", "down", "across", "stride", "columns"])
def grouped_weight_gradient_sm90_kernel(
    counter, groups, tokens, sources, gradient, rows, result, tiles, down, across, stride, columns,
    GATHERED: gl.constexpr, WIDTH: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """From `gradient` to `result` they are descriptors, of gradients and rows those with two more dimensions.

    GATHERED: "gradient" or "rows" where these are those of tokens, which `sources` name, or "".
    """
    dtype: gl.constexpr = rows.dtype
    gradient_ring = gl.allocate_shared_memory(dtype, [2 * STAGES, 1, 1, DEPTH, ROWS], gradient.layout)
    row_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, DEPTH, WIDTH], rows.layout)
    written = gl.allocate_shared_memory(dtype, [4, ROWS, WIDTH // 2], gl.NVMMASharedLayout(128, 16, rank=2))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1 if GATHERED == "" else 1 + GATHER_THREADS)
        mbarrier.init(free.index(slot), count=2)
    slots = allocate_tile_slots(2 if GATHERED == "" else 3)
    fence_async_shared()
    rings = (gradient_ring, row_ring, written)
    barriers = (full, free)
    sizes = (tiles, down, across)
    if GATHERED == "":
        gl.warp_specialize(
            [
                (_consume_gradient, (0, result, rings, barriers, slots, GATHERED, WIDTH, DEPTH, STAGES)),
                (_consume_gradient, (1, result, rings, barriers, slots, GATHERED, WIDTH, DEPTH, STAGES)),
                (
                    _load_gradient_tiles,
                    (counter, groups, gradient, rows, rings, barriers, slots, sizes, "", WIDTH, DEPTH, STAGES),
                ),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_consume_gradient, (0, result, rings, barriers, slots, GATHERED, WIDTH, DEPTH, STAGES)),
                (_consume_gradient, (1, result, rings, barriers, slots, GATHERED, WIDTH, DEPTH, STAGES)),
                (_load_gradient_tiles, (
                    counter, groups, gradient, rows, rings, barriers, slots, sizes, GATHERED, WIDTH, DEPTH, STAGES
                )),
                (_gather_gradient_tiles, (
                    groups, tokens, stride, columns, sources, rings, barriers, slots, GATHERED, WIDTH, DEPTH, STAGES,
                )),
            ],
            [4, 1, 2],
            [224, 56, 56],
        )  # fmt: skip
