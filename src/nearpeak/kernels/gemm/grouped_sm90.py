"""The grouped GEMM kernels for Hopper, in Gluon: forward, fp8, and the gradient of the weights.

One warp loads, two warpgroups multiply. A program goes from tile to tile of 128 rows of one expert and WIDTH columns,
stored in two halves; with an activation these are the same columns of gate and up. The load warp draws tiles (see
`dynamic_tiles`), copies rows and weights into a ring buffer in shared memory, and runs ahead into the next tile. Tiles
of the same columns of a matrix follow each other, so that it is read from DRAM once. Each warpgroup has 64 of the rows.
If the last tile of an expert has no more than 64, the second warpgroup multiplies nothing: half of the work is saved.

A tile may reach beyond the rows of its expert. The rows of the next expert are then loaded but not stored: full tiles
are stored by TMA, others element by element.

Rows may be gathered from tokens, in any order. TMA copies rows that are a fixed stride apart, so two more warps copy
them instead, 16 bytes per thread, and arrive at the barrier of a step. Tensor cores read shared memory through another
path than threads write it: warpgroups put a fence between that barrier and the matrix instruction.
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
"""Threads of two warps: as many arrive at the barrier of a step."""


@gluon.constexpr_function
def gathered_layout(bits=16):
    """Elements of 8 rows, 16 bytes per thread."""
    return gl.BlockedLayout([1, 128 // bits], [4, 8], [2, 1], [1, 0])


@gluon.jit
def copy_tokens(target, tokens, row_offset, inside, column, columns):
    """Starts copies of some columns of the rows at `row_offset`. Elements that are not inside become zeros."""
    width: gl.constexpr = target.shape[1]
    layout: gl.constexpr = gathered_layout(target.dtype.primitive_bitwidth)
    column += gl.arange(0, width, layout=gl.SliceLayout(0, layout))
    async_copy.async_copy_global_to_shared(
        target, tokens + (row_offset[:, None] + column[None, :]), inside[:, None] & (column < columns)[None, :]
    )


ROWS = gl.constexpr(64)
"""Rows of a warpgroup: those of one matrix instruction."""
HEIGHT = gl.constexpr(128)
ENTRY_SIZE = gl.constexpr(8)


@gluon.constexpr_function
def written_layout(columns):
    """64 rows of 16-bit elements as a warpgroup stores them, 16 bytes per thread."""
    return gl.BlockedLayout([1, 8], [32 * 8 // columns, columns // 8], [4, 1], [1, 0])


@gluon.jit
def find_tile(groups, tile, column_tiles, entries):
    """The expert of a tile (-1 for none), its first row, the end of the expert's rows, and its column tile."""
    entry = groups + entries + tile // column_tiles * ENTRY_SIZE
    expert = gl.load(entry)
    leader = gl.load(entry + 1)
    count = gl.load(entry + 2)
    row = gl.load(entry + 3)
    end = gl.load(entry + 4)
    offset = tile - leader * column_tiles
    return expert, row + offset % count * HEIGHT, end, offset // count


@gluon.jit
def _load_steps(
    rows, weight, rings, barriers, expert, row, end, column_tile, count, begin, steps, GATHERED: gl.constexpr,
    GATED: gl.constexpr, ALONG: gl.constexpr, WIDTH: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copies some steps of a tile into the ring buffer. Returns the number of steps of all tiles so far."""
    row_ring, weight_ring, _stores = rings
    full, free = barriers
    has_second_half = row + ROWS < end
    for step in range(begin, steps):
        slot = count % STAGES
        feature = step * DEPTH
        mbarrier.wait(free.index(slot), ((count // STAGES) & 1) ^ 1)
        if GATHERED:
            mbarrier.expect(full.index(slot), weight.block_type.nbytes)
        else:
            mbarrier.expect(
                full.index(slot), weight.block_type.nbytes + 2 * rows.block_type.nbytes, pred=has_second_half
            )
            mbarrier.expect(
                full.index(slot), weight.block_type.nbytes + rows.block_type.nbytes, pred=has_second_half == 0
            )
            tma.async_copy_global_to_shared(rows, [row, feature], full.index(slot), row_ring.index(2 * slot))
            tma.async_copy_global_to_shared(
                rows, [row + ROWS, feature], full.index(slot), row_ring.index(2 * slot + 1), pred=has_second_half
            )
        if GATED:
            tma.async_copy_global_to_shared(
                weight, [expert, 0, column_tile * (WIDTH // 2), feature], full.index(slot), weight_ring.index(slot)
            )
        elif ALONG:
            tma.async_copy_global_to_shared(
                weight, [expert, column_tile * WIDTH, feature], full.index(slot), weight_ring.index(slot)
            )
        else:
            tma.async_copy_global_to_shared(
                weight, [expert, feature, column_tile * WIDTH], full.index(slot), weight_ring.index(slot)
            )
        count += 1
    return count


@gluon.jit
def load_tiles(
    counter, groups, rows, weight, rings, barriers, slots, sizes, GATHERED: gl.constexpr, GATED: gl.constexpr,
    ALONG: gl.constexpr, WIDTH: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The load warp: draws tiles and copies rows and weights. ALONG: weights are contiguous along the depth."""
    experts, _columns, depth, entries, column_tiles = sizes
    tiles = gl.load(groups + experts + 1) * column_tiles
    tile = gl.program_id(0)
    count = 0
    turn = 0
    while tile < tiles:
        expert, row, end, column_tile = find_tile(groups, tile, column_tiles, entries)
        publish_tile(slots, turn, expert, row, end, column_tile)
        steps = gl.where(expert < 0, 0, gl.cdiv(depth, DEPTH))
        early_steps = gl.maximum(steps - STEPS_AHEAD, 0)
        count = _load_steps(
            rows, weight, rings, barriers, expert, row, end, column_tile, count, 0, early_steps, GATHERED, GATED,
            ALONG, WIDTH, DEPTH, STAGES,
        )  # fmt: skip
        number = draw_tile_number(counter)
        count = _load_steps(
            rows, weight, rings, barriers, expert, row, end, column_tile, count, early_steps, steps, GATHERED, GATED,
            ALONG, WIDTH, DEPTH, STAGES,
        )  # fmt: skip
        tile = resolve_tile_number(number)
        turn += 1
    publish_tile(slots, turn, 0, 0, 0, -1)
    reset_tile_counter(counter, tile, tiles)


@gluon.jit
def gather_tiles(
    tokens, stride, sources, row_ring, barriers, slots, depth, DEPTH: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """The gather warps: copy the rows of tokens."""
    full, free = barriers
    bits: gl.constexpr = row_ring.dtype.primitive_bitwidth
    row_index = gl.arange(0, ROWS, layout=gl.SliceLayout(1, gathered_layout(bits)))
    depth = depth // (128 // bits) * (128 // bits)  # tells the compiler that it is a multiple of 16 bytes
    stride = stride // (128 // bits) * (128 // bits)
    count = 0
    turn = 0
    expert, row, end, column_tile = receive_tile(slots, turn)
    while column_tile >= 0:
        steps = gl.where(expert < 0, 0, gl.cdiv(depth, DEPTH))
        first = row + row_index
        second = first + ROWS
        first_offset = gl.load(sources + first, mask=first < end, other=0) * stride
        second_offset = gl.load(sources + second, mask=second < end, other=0) * stride
        for step in range(steps):
            slot = count % STAGES
            mbarrier.wait(free.index(slot), ((count // STAGES) & 1) ^ 1)
            copy_tokens(row_ring.index(2 * slot), tokens, first_offset, first < end, step * DEPTH, depth)
            copy_tokens(row_ring.index(2 * slot + 1), tokens, second_offset, second < end, step * DEPTH, depth)
            async_copy.mbarrier_arrive(full.index(slot), increment_count=False)
            count += 1
        turn += 1
        expert, row, end, column_tile = receive_tile(slots, turn)


@gluon.jit
def write_tile(
    chunk, stores, turn, target, pointer, row, end, column, columns, stride, part,
    CONSUMER: gl.constexpr, BUFFERS: gl.constexpr,
):  # fmt: skip
    """Stores 64 rows and some columns of a part, up to row `end`. Returns the number of the next copy."""
    dtype: gl.constexpr = target.dtype
    width: gl.constexpr = chunk.shape[1]
    layout: gl.constexpr = written_layout(width)
    columns = columns // 8 * 8  # tells the compiler that it is a multiple of 8
    stride = stride // 8 * 8
    buffer = stores.index(CONSUMER * BUFFERS + turn % BUFFERS)
    if row + ROWS <= end:
        tma.store_wait(BUFFERS - 1)
        gl.thread_barrier()  # one thread waits for the last copy from this buffer, and all overwrite it
        buffer.store(chunk.to(dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(target, [part, row, column], buffer.reshape([1, ROWS, width]))
        turn += 1
    else:
        tma.store_wait(0)
        gl.thread_barrier()
        buffer.store(chunk.to(dtype))
        values = buffer.load(layout)
        row_index = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
        column_index = column + gl.arange(0, width, layout=gl.SliceLayout(0, layout))
        inside = (row_index < end)[:, None] & (column_index < columns)[None, :]
        offset = (row_index.to(gl.int64) * stride)[:, None] + (part * columns + column_index)[None, :]
        gl.store(pointer + offset, values, mask=inside)
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
    """A warpgroup: the products of its 64 rows of each tile."""
    result, gate_up, result_tiles, gate_up_tiles = targets
    row_ring, weight_ring, stores = rings
    full, free = barriers
    GATED: gl.constexpr = NAME != ""
    HALF: gl.constexpr = WIDTH // 2
    layout: gl.constexpr = wgmma_layout(WIDTH)
    count = 0
    copies = 0
    turn = 0
    expert, row, end, column_tile = receive_tile(slots, turn)
    while column_tile >= 0:
        steps = gl.where(expert < 0, 0, gl.cdiv(depth, DEPTH))
        first_row = row + CONSUMER * ROWS
        total = gl.zeros([ROWS, WIDTH], gl.float32, layout=layout)
        if first_row < end:
            for step in range(steps):
                slot = count % STAGES
                mbarrier.wait(full.index(slot), (count // STAGES) & 1)
                if GATHERED:
                    fence_async_shared()
                left = row_ring.index(2 * slot + CONSUMER)
                if ALONG:
                    right = weight_ring.index(slot).reshape([WIDTH, DEPTH]).permute((1, 0))
                else:
                    right = weight_ring.index(slot).reshape([DEPTH, WIDTH])
                product = warpgroup_mma(left, right, total, is_async=True)
                total = warpgroup_mma_wait(num_outstanding=1, deps=(product,))
                # the previous product has read its slot
                mbarrier.arrive(free.index((count + STAGES - 1) % STAGES), count=1, pred=step > 0)
                count += 1
            total = warpgroup_mma_wait(num_outstanding=0, deps=(total,))
            mbarrier.arrive(free.index((count + STAGES - 1) % STAGES), count=1, pred=steps > 0)
            first_half, second_half = halves(total)
            column = column_tile * (HALF if GATED else WIDTH)
            if GATED and gate_up is not None:
                copies = write_tile(
                    first_half, stores, copies, gate_up_tiles, gate_up, first_row, end, column, columns, 2 * columns,
                    0, CONSUMER, BUFFERS,
                )  # fmt: skip
                copies = write_tile(
                    second_half, stores, copies, gate_up_tiles, gate_up, first_row, end, column, columns,
                    2 * columns, 1, CONSUMER, BUFFERS,
                )  # fmt: skip
            if GATED:
                first_half = activate(first_half, NAME) * second_half
            copies = write_tile(
                first_half, stores, copies, result_tiles, result, first_row, end, column, columns, columns, 0,
                CONSUMER, BUFFERS,
            )  # fmt: skip
            if not GATED and column + HALF < columns:
                copies = write_tile(
                    second_half, stores, copies, result_tiles, result, first_row, end, column + HALF, columns,
                    columns, 0, CONSUMER, BUFFERS,
                )  # fmt: skip
        else:
            for _step in range(steps):
                slot = count % STAGES
                mbarrier.wait(full.index(slot), (count // STAGES) & 1)
                mbarrier.arrive(free.index(slot), count=1)
                count += 1
        turn += 1
        expert, row, end, column_tile = receive_tile(slots, turn)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["experts", "columns", "depth", "entries", "column_tiles", "stride"])
def grouped_gemm_sm90_kernel(
    counter, groups, result, gate_up, tokens, sources, rows, weight, result_tiles, gate_up_tiles, experts, columns,
    depth, entries, column_tiles, stride, NAME: gl.constexpr, ALONG: gl.constexpr, WIDTH: gl.constexpr,
    DEPTH: gl.constexpr,
    STAGES: gl.constexpr, BUFFERS: gl.constexpr,
):  # fmt: skip
    """`rows` to `gate_up_tiles` are TMA descriptors, those of results with a leading dimension of parts.

    With `sources`, rows are gathered from `tokens`, and only the layout of the descriptor `rows` is used.
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
    stores = gl.allocate_shared_memory(
        result_tiles.dtype, [2 * BUFFERS, ROWS, HALF], gl.NVMMASharedLayout(128, 16, rank=2)
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1 + GATHER_THREADS if GATHERED else 1)
        mbarrier.init(free.index(slot), count=2)
    slots = allocate_tile_slots(3 if GATHERED else 2)
    fence_async_shared()
    rings = (row_ring, weight_ring, stores)
    barriers = (full, free)
    sizes = (experts, columns, depth, entries, column_tiles)
    targets = (result, gate_up, result_tiles, gate_up_tiles)
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
"""Depth and columns of a block that shares an fp8 scale."""


@gluon.jit
def _load_scales(
    row_scales, weight_scales, expert, row_index, inside, column, step, columns, column_blocks, depth_blocks,
    GATED: gl.constexpr, WIDTH: gl.constexpr,
):  # fmt: skip
    """The scales of rows, of gate columns and of up columns, of one block of the depth."""
    row_scale = gl.load(row_scales + row_index.to(gl.int64) * depth_blocks + step, mask=inside, other=0.0)
    expert_scales = weight_scales + expert.to(gl.int64) * column_blocks * depth_blocks + step
    if GATED:  # half a tile is within one block of columns
        first = gl.load(expert_scales + column // SCALE_BLOCK * depth_blocks)
        second = gl.load(expert_scales + (columns + column) // SCALE_BLOCK * depth_blocks)
    else:
        first = gl.load(expert_scales + column // SCALE_BLOCK * depth_blocks)
        second = first
    return row_scale, first, second


@gluon.jit
def _consume_fp8(
    CONSUMER: gl.constexpr, targets, scales, sources, rings, barriers, slots, columns, depth, down,
    NAME: gl.constexpr, BLOCKS: gl.constexpr, WIDTH: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A warpgroup: the products of its 64 rows of each tile."""
    result, result_tiles = targets
    row_scales, weight_scales = scales
    row_ring, weight_ring, stores = rings
    full, free = barriers
    GATED: gl.constexpr = NAME != ""
    CHUNK: gl.constexpr = WIDTH // 2 if GATED else WIDTH
    layout: gl.constexpr = wgmma_layout(WIDTH, 8)
    count = 0
    copies = 0
    turn = 0
    across = gl.cdiv(depth, DEPTH)
    expert, row, end, column_tile = receive_tile(slots, turn)
    while column_tile >= 0:
        steps = gl.where(expert < 0, 0, across)
        first_row = row + CONSUMER * ROWS
        column = column_tile * CHUNK
        if first_row < end:
            row_index = first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
            inside = row_index < end
            if sources is not None:
                row_index = gl.load(sources + row_index, mask=inside, other=0)
            is_gate = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout)) < WIDTH // 2
            total = gl.zeros([ROWS, WIDTH], gl.float32, layout=layout)
            weight_expert = gl.maximum(expert, 0)
            if BLOCKS:
                row_scale, gate_scale, up_scale = _load_scales(
                    row_scales, weight_scales, weight_expert, row_index, inside, column, 0, columns, down, across,
                    GATED, WIDTH,
                )  # fmt: skip
            for step in range(steps):
                slot = count % STAGES
                mbarrier.wait(full.index(slot), (count // STAGES) & 1)
                if sources is not None:
                    fence_async_shared()
                left = row_ring.index(2 * slot + CONSUMER)
                right = weight_ring.index(slot).reshape([WIDTH, DEPTH]).permute((1, 0))
                zeros = gl.zeros([ROWS, WIDTH], gl.float32, layout=layout)
                product = warpgroup_mma(left, right, zeros, use_acc=False, is_async=True)
                if BLOCKS:  # loads overlap with the tensor cores
                    next_row, next_gate, next_up = _load_scales(
                        row_scales, weight_scales, weight_expert, row_index, inside, column,
                        gl.minimum(step + 1, steps - 1), columns, down, across, GATED, WIDTH,
                    )  # fmt: skip
                part = warpgroup_mma_wait(num_outstanding=0, deps=(product,))
                mbarrier.arrive(free.index(slot), count=1)
                if BLOCKS:
                    if GATED:
                        column_scale = gl.where(is_gate, gate_scale, up_scale)
                        total += part * row_scale[:, None] * column_scale[None, :]
                    else:
                        total += part * (row_scale * gate_scale)[:, None]
                    row_scale = next_row
                    gate_scale = next_gate
                    up_scale = next_up
                else:
                    total += part
                count += 1
            if not BLOCKS:
                scale = gl.load(row_scales + row_index, mask=inside, other=0.0) * gl.load(weight_scales + weight_expert)
                total = total * scale[:, None]
            if GATED:
                gate, up = halves(total)
                total = activate(gate, NAME) * up
            copies = write_tile(
                total, stores, copies, result_tiles, result, first_row, end, column, columns, columns, 0, CONSUMER, 1,
            )  # fmt: skip
        else:
            for _step in range(steps):
                slot = count % STAGES
                mbarrier.wait(full.index(slot), (count // STAGES) & 1)
                mbarrier.arrive(free.index(slot), count=1)
                count += 1
        turn += 1
        expert, row, end, column_tile = receive_tile(slots, turn)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["experts", "columns", "depth", "entries", "column_tiles", "down", "stride"])
def grouped_gemm_fp8_sm90_kernel(
    counter, groups, result, row_scales, weight_scales, tokens, sources, rows, weight, result_tiles, experts, columns,
    depth, entries, column_tiles, down, stride, NAME: gl.constexpr, BLOCKS: gl.constexpr, WIDTH: gl.constexpr,
    DEPTH: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The same for fp8 with scales, and tiles of 128 columns. `down` is the number of scale blocks along the columns.

    The tensor cores accumulate fp8 products with about 14 bits. So the sum of each 128 of the depth is taken from them,
    multiplied by its scales if there are any for it, and added in float32; meanwhile the other warpgroup multiplies.
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
    stores = gl.allocate_shared_memory(result_tiles.dtype, [2, ROWS, CHUNK], gl.NVMMASharedLayout(128, 16, rank=2))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1 + GATHER_THREADS if GATHERED else 1)
        mbarrier.init(free.index(slot), count=2)
    slots = allocate_tile_slots(3 if GATHERED else 2)
    fence_async_shared()
    rings = (row_ring, weight_ring, stores)
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
"""The number of rows that descriptors pretend there are."""


@gluon.jit
def _expert_rows(groups, expert):
    """The first row of an expert, and the number of its rows."""
    begin = gl.load(groups + expert)
    return begin, gl.load(groups + expert + 1) - begin


@gluon.jit
def _load_gradient_steps(
    gradient, rows, rings, barriers, last, number, column, feature, count, begin, steps, GATHERED: gl.constexpr,
    DEPTH: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copies some steps of a tile into the ring buffer. Returns the number of steps of all tiles so far."""
    gradient_ring, row_ring, _stores = rings
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
            tma.async_copy_global_to_shared(
                rows, [MAX_ROWS, last, row, feature], full.index(slot), row_ring.index(slot)
            )
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
        feature = tile % across * WIDTH
        publish_tile(slots, turn, expert, number, column, feature)
        steps = gl.cdiv(number, DEPTH)
        early_steps = gl.maximum(steps - STEPS_AHEAD, 0)
        last = begin + number
        count = _load_gradient_steps(
            gradient, rows, rings, barriers, last, number, column, feature, count, 0, early_steps, GATHERED, DEPTH,
            STAGES,
        )  # fmt: skip
        drawn = draw_tile_number(counter)
        count = _load_gradient_steps(
            gradient, rows, rings, barriers, last, number, column, feature, count, early_steps, steps, GATHERED, DEPTH,
            STAGES,
        )  # fmt: skip
        tile = resolve_tile_number(drawn)
        turn += 1
    publish_tile(slots, turn, 0, 0, 0, -1)
    reset_tile_counter(counter, tile, tiles)


@gluon.jit
def _gather_gradient_step(
    tokens, tokens_of_rows, stride, number, column, columns, rings, barriers, count, step, GATHERED: gl.constexpr,
    WIDTH: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copies the rows of tokens for one step, if there is one. Returns the number of steps so far."""
    gradient_ring, row_ring, _stores = rings
    full, free = barriers
    first = step * DEPTH
    if first < number:
        inside = first + gl.arange(0, DEPTH, layout=gl.SliceLayout(1, gathered_layout())) < number
        slot = count % STAGES
        mbarrier.wait(free.index(slot), ((count // STAGES) & 1) ^ 1)
        if GATHERED == "gradient":
            for half in gl.static_range(2):
                target = gradient_ring.index(2 * slot + half).reshape([DEPTH, ROWS])
                copy_tokens(target, tokens, tokens_of_rows * stride, inside, column + half * ROWS, columns)
        else:
            copy_tokens(
                row_ring.index(slot).reshape([DEPTH, WIDTH]), tokens, tokens_of_rows * stride, inside, column, columns
            )
        async_copy.mbarrier_arrive(full.index(slot), increment_count=False)
        count += 1
    return count


@gluon.jit
def _gather_gradient_tiles(
    groups, tokens, stride, columns, sources, rings, barriers, slots, GATHERED: gl.constexpr, WIDTH: gl.constexpr,
    DEPTH: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The gather warps: copy the rows of tokens, whose indices they load four steps at a time."""
    row_index = gl.arange(0, DEPTH, layout=gl.SliceLayout(1, gathered_layout()))
    columns = columns // 8 * 8  # tells the compiler that these are multiples of 8
    stride = stride // 8 * 8
    count = 0
    turn = 0
    expert, number, column, feature = receive_tile(slots, turn)
    while feature >= 0:
        source_index = sources + gl.load(groups + expert) + row_index
        first_column = (column if GATHERED == "gradient" else feature) // ROWS * ROWS
        for step in range(0, gl.cdiv(number, DEPTH), 4):
            rows_left = number - step * DEPTH - row_index
            next_tokens = (
                gl.load(source_index, mask=rows_left > 0, other=0),
                gl.load(source_index + DEPTH, mask=rows_left > DEPTH, other=0),
                gl.load(source_index + 2 * DEPTH, mask=rows_left > 2 * DEPTH, other=0),
                gl.load(source_index + 3 * DEPTH, mask=rows_left > 3 * DEPTH, other=0),
            )
            for index in gl.static_range(4):
                count = _gather_gradient_step(
                    tokens, next_tokens[index], stride, number, first_column, columns, rings, barriers, count,
                    step + index, GATHERED, WIDTH, DEPTH, STAGES,
                )  # fmt: skip
            source_index += 4 * DEPTH
        turn += 1
        expert, number, column, feature = receive_tile(slots, turn)


@gluon.jit
def _consume_gradient(
    CONSUMER: gl.constexpr, result, rings, barriers, slots, GATHERED: gl.constexpr, WIDTH: gl.constexpr,
    DEPTH: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A warpgroup: 64 rows of each tile of the gradient."""
    gradient_ring, row_ring, stores = rings
    full, free = barriers
    HALF: gl.constexpr = WIDTH // 2
    layout: gl.constexpr = wgmma_layout(WIDTH)
    count = 0
    turn = 0
    expert, number, column, feature = receive_tile(slots, turn)
    while feature >= 0:
        steps = gl.cdiv(number, DEPTH)
        total = gl.zeros([ROWS, WIDTH], gl.float32, layout=layout)
        for step in range(steps):
            slot = count % STAGES
            mbarrier.wait(full.index(slot), (count // STAGES) & 1)
            if GATHERED != "":
                fence_async_shared()
            left = gradient_ring.index(2 * slot + CONSUMER).reshape([DEPTH, ROWS]).permute((1, 0))
            right = row_ring.index(slot).reshape([DEPTH, WIDTH])
            product = warpgroup_mma(left, right, total, is_async=True)
            total = warpgroup_mma_wait(num_outstanding=1, deps=(product,))
            mbarrier.arrive(free.index((count + STAGES - 1) % STAGES), count=1, pred=step > 0)
            count += 1
        total = warpgroup_mma_wait(num_outstanding=0, deps=(total,))
        mbarrier.arrive(free.index((count + STAGES - 1) % STAGES), count=1, pred=steps > 0)

        row = column + CONSUMER * ROWS
        first_half, second_half = halves(total)
        tma.store_wait(1)  # the first half of the previous tile is stored; one thread waits, and all overwrite it
        gl.thread_barrier()
        stores.index(2 * CONSUMER).store(first_half.to(result.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(
            result, [expert, row, feature], stores.index(2 * CONSUMER).reshape([1, ROWS, HALF])
        )
        tma.store_wait(1)
        gl.thread_barrier()
        stores.index(2 * CONSUMER + 1).store(second_half.to(result.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(
            result, [expert, row, feature + HALF], stores.index(2 * CONSUMER + 1).reshape([1, ROWS, HALF])
        )
        turn += 1
        expert, number, column, feature = receive_tile(slots, turn)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["tiles", "down", "across", "stride", "columns"])
def grouped_weight_gradient_sm90_kernel(
    counter, groups, tokens, sources, gradient, rows, result, tiles, down, across, stride, columns,
    GATHERED: gl.constexpr, WIDTH: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The gradient of the weights: one warp loads, two warpgroups multiply.

    A tile is 128 columns of the gradients of an expert's rows by WIDTH columns of the rows. The product goes over the
    rows, DEPTH at a time, up to those of the next expert; rows beyond are loaded as zeros. Experts mostly have a few
    hundred rows, and storing a tile takes nearly as long as multiplying: a warpgroup puts its tile into shared memory,
    and TMA copies it from there while the next one is multiplied.

    TMA checks bounds against one size per dimension, the same for all experts. So rows are described as if there were
    2**30 of them, the last of which are those of the expert, and two more dimensions move the address back to where
    these are: address arithmetic wraps around at 2**64.

    GATHERED: "gradient" or "rows" if these are gathered from `tokens` by `sources`, or "". `gradient`, `rows` and
    `result` are TMA descriptors.
    """
    dtype: gl.constexpr = rows.dtype
    gradient_ring = gl.allocate_shared_memory(dtype, [2 * STAGES, 1, 1, DEPTH, ROWS], gradient.layout)
    row_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, DEPTH, WIDTH], rows.layout)
    stores = gl.allocate_shared_memory(dtype, [4, ROWS, WIDTH // 2], gl.NVMMASharedLayout(128, 16, rank=2))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1 if GATHERED == "" else 1 + GATHER_THREADS)
        mbarrier.init(free.index(slot), count=2)
    slots = allocate_tile_slots(2 if GATHERED == "" else 3)
    fence_async_shared()
    rings = (gradient_ring, row_ring, stores)
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
