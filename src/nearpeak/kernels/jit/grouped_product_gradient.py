"""The gradient of experts' matrices on Hopper, in Gluon: one warp loads, two warpgroups multiply.

A tile is 128 columns of the gradients of an expert's rows by WIDTH columns of the rows. The product goes over the rows,
DEPTH at a time, and ends where the next expert's begin: what is behind is loaded as zeros. With the few hundred rows
that experts mostly have, writing tiles takes nearly as long as multiplying: a warpgroup puts its tile down in shared
memory and has it copied from there, while it multiplies the next.

A copy of a tile in bounds is the hardware's: it knows the size of each dimension, and that is one number for all
experts. So rows are described as if there were 2**30 of them, of which the last ones are those of the expert, and two
more dimensions take the address back to where these are; sums of addresses wrap around at 2**64.

Either the gradients or the rows may be those of tokens, in whatever order: two more warps copy these, see
`gathered_rows`.
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
from nearpeak.kernels.jit.grouped_product_hopper import HEIGHT, ROWS, halves
from nearpeak.kernels.jit.hopper_layouts import product_layout

MOST = gl.constexpr(2**30)
"""Rows that there seem to be."""


@gluon.jit
def _rows_of(groups, expert):
    """The first row of an expert, and how many it has."""
    begin = gl.load(groups + expert)
    return begin, gl.load(groups + expert + 1) - begin


@gluon.jit
def _copy_pieces(
    gradient, rows, rings, barriers, last, number, column, at, count, begin, steps, GATHERED: gl.constexpr,
    DEPTH: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copies some steps of a tile into the ring. How many steps of all tiles there have been."""
    gradient_ring, row_ring, _written = rings
    full, free = barriers
    for step in range(begin, steps):
        slot = count % STAGES
        row = MOST - number + step * DEPTH
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
                    [MOST, last, row, column + half * ROWS],
                    full.index(slot),
                    gradient_ring.index(2 * slot + half),
                )
        if GATHERED != "rows":
            tma.async_copy_global_to_shared(rows, [MOST, last, row, at], full.index(slot), row_ring.index(slot))
        count += 1
    return count


@gluon.jit
def _load(
    counter, groups, gradient, rows, rings, barriers, slots, sizes, GATHERED: gl.constexpr, WIDTH: gl.constexpr,
    DEPTH: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    tiles, down, across = sizes
    tile = gl.program_id(0)
    count = 0
    turn = 0
    while tile < tiles:
        expert = tile // (down * across)
        begin, number = _rows_of(groups, expert)
        column = tile % (down * across) // across * HEIGHT
        at = tile % across * WIDTH
        tell_tile(slots, turn, expert, number, column, at)
        steps = gl.cdiv(number, DEPTH)
        most = gl.maximum(steps - AHEAD, 0)
        last = begin + number
        count = _copy_pieces(
            gradient, rows, rings, barriers, last, number, column, at, count, 0, most, GATHERED, DEPTH, STAGES
        )
        drawn = draw(counter)
        count = _copy_pieces(
            gradient, rows, rings, barriers, last, number, column, at, count, most, steps, GATHERED, DEPTH, STAGES
        )
        tile = drawn_tile(drawn)
        turn += 1
    tell_tile(slots, turn, 0, 0, 0, -1)
    end_of_draws(counter, tile, tiles)


@gluon.jit
def _gather_step(
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
                copy_of_tokens(target, tokens, own * stride, inside, column + half * ROWS, columns)
        else:
            copy_of_tokens(row_ring.index(slot).reshape([DEPTH, WIDTH]), tokens, own * stride, inside, column, columns)
        async_copy.mbarrier_arrive(full.index(slot), increment_count=False)
        count += 1
    return count


@gluon.jit
def _gather(
    groups, tokens, stride, columns, sources, rings, barriers, slots, GATHERED: gl.constexpr, WIDTH: gl.constexpr,
    DEPTH: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copies pieces of the rows of tokens. Where they are is loaded for four steps at a time."""
    down = gl.arange(0, DEPTH, layout=gl.SliceLayout(1, gathered_layout()))
    columns = columns // 8 * 8  # they are multiples of 8, and now the compiler knows
    stride = stride // 8 * 8
    count = 0
    turn = 0
    expert, number, column, at = told_tile(slots, turn)
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
                count = _gather_step(
                    tokens, four[ahead], stride, number, place, columns, rings, barriers, count, step + ahead, GATHERED,
                    WIDTH, DEPTH, STAGES,
                )  # fmt: skip
            own += 4 * DEPTH
        turn += 1
        expert, number, column, at = told_tile(slots, turn)


@gluon.jit
def _consume(
    CONSUMER: gl.constexpr, result, rings, barriers, slots, GATHERED: gl.constexpr, WIDTH: gl.constexpr,
    DEPTH: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """64 rows of each tile of the result."""
    gradient_ring, row_ring, written = rings
    full, free = barriers
    HALF: gl.constexpr = WIDTH // 2
    layout: gl.constexpr = product_layout(WIDTH)
    count = 0
    turn = 0
    expert, number, column, at = told_tile(slots, turn)
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
        expert, number, column, at = told_tile(slots, turn)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["tiles", "down", "across", "stride", "columns"])
def grouped_gradient_hopper_kernel(
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
        mbarrier.init(full.index(slot), count=1 if GATHERED == "" else 1 + THREADS)
        mbarrier.init(free.index(slot), count=2)
    slots = slots_for_tiles(2 if GATHERED == "" else 3)
    fence_async_shared()
    rings = (gradient_ring, row_ring, written)
    barriers = (full, free)
    sizes = (tiles, down, across)
    if GATHERED == "":
        gl.warp_specialize(
            [
                (_consume, (0, result, rings, barriers, slots, GATHERED, WIDTH, DEPTH, STAGES)),
                (_consume, (1, result, rings, barriers, slots, GATHERED, WIDTH, DEPTH, STAGES)),
                (_load, (counter, groups, gradient, rows, rings, barriers, slots, sizes, "", WIDTH, DEPTH, STAGES)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (0, result, rings, barriers, slots, GATHERED, WIDTH, DEPTH, STAGES)),
                (_consume, (1, result, rings, barriers, slots, GATHERED, WIDTH, DEPTH, STAGES)),
                (_load, (
                    counter, groups, gradient, rows, rings, barriers, slots, sizes, GATHERED, WIDTH, DEPTH, STAGES
                )),
                (_gather, (
                    groups, tokens, stride, columns, sources, rings, barriers, slots, GATHERED, WIDTH, DEPTH, STAGES,
                )),
            ],
            [4, 1, 2],
            [224, 56, 56],
        )  # fmt: skip
