"""The forward pass of attention on Hopper, in Gluon: one warp loads, two or three warpgroups compute.

The loading warp has blocks of keys and values copied into a ring in shared memory. Each warpgroup has 64 queries. While
it takes the exponentials of one block of scores, the tensor cores multiply the weights of the block before by its
values and the queries by the next keys, so that both are busy. Blocks of keys of which queries see only some are the
first of a tile, and have a loop of their own. Where programs go from tile to tile, the first scores of the next are on
their way while the results of one are written.

Tiles with the most keys are the first, and every other turn of the programs goes through them backwards, so that all
end at about the same time.
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

from nearpeak.kernels.jit.hopper_layouts import product_layout

ROWS = gl.constexpr(64)
"""Queries of a warpgroup, as many as its products have rows."""
LN_2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def tile_of(turn, SNAKE: gl.constexpr):
    """The tile that this program has in a turn."""
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    if SNAKE:
        program = gl.where(turn % 2 == 0, program, programs - 1 - program)
    return turn * programs + program


@gluon.jit
def turns_of(tiles, SNAKE: gl.constexpr):
    """How many turns this program has."""
    whole = tiles // gl.num_programs(0)
    return whole + gl.where(tile_of(whole, SNAKE) < tiles, 1, 0)


@gluon.jit
def place_of(tile, blocks, together, CAUSAL: gl.constexpr):
    """The block of queries of a tile, and its head among those of all batches.

    So many heads are worked on together, few enough for their keys and values to stay in the cache.
    """
    rest = tile % (blocks * together)
    block = rest // together
    if CAUSAL:
        block = blocks - 1 - block
    return block, tile // (blocks * together) * together + rest % together


@gluon.jit
def key_blocks(first, keys, diagonal, QUERIES: gl.constexpr, KEYS: gl.constexpr, CAUSAL: gl.constexpr):
    """How many blocks of keys the queries from the first on see, at least one, and how many all of them see whole."""
    seen = gl.cdiv(keys, KEYS)
    whole = keys // KEYS
    if CAUSAL:
        seen = gl.minimum(seen, gl.cdiv(gl.maximum(first + QUERIES + diagonal, 0), KEYS))
        whole = gl.minimum(whole, gl.maximum(first + diagonal + 1, 0) // KEYS)
    seen = gl.maximum(seen, 1)
    return seen, gl.minimum(whole, seen)


@gluon.jit
def _load(
    query, key, value, rings, barriers, sizes, QUERIES: gl.constexpr, KEYS: gl.constexpr, CONSUMERS: gl.constexpr,
    STAGES: gl.constexpr, CAUSAL: gl.constexpr, SNAKE: gl.constexpr,
):  # fmt: skip
    """Copies the queries of each tile, and keys and values, the last ones first."""
    query_ring, key_ring, value_ring, _written = rings
    _queries, keys, heads, group, blocks, tiles, together, diagonal = sizes
    query_full, query_free, key_full, key_free, value_full, value_free = barriers
    count = 0
    for turn in range(turns_of(tiles, SNAKE)):
        block, number = place_of(tile_of(turn, SNAKE), blocks, together, CAUSAL)
        batch = number // heads
        head = number % heads
        seen, _whole = key_blocks(block * QUERIES, keys, diagonal, QUERIES, KEYS, CAUSAL)
        mbarrier.wait(query_free, (turn & 1) ^ 1)
        mbarrier.expect(query_full, CONSUMERS * query.block_type.nbytes)
        for consumer in gl.static_range(CONSUMERS):
            row = block * QUERIES + consumer * ROWS
            tma.async_copy_global_to_shared(query, [batch, head, row, 0], query_full, query_ring.index(consumer))
        for step in range(seen):
            row = (seen - 1 - step) * KEYS
            slot = count % STAGES
            phase = (count // STAGES) & 1
            mbarrier.wait(key_free.index(slot), phase ^ 1)
            mbarrier.expect(key_full.index(slot), key.block_type.nbytes)
            place = [batch, head // group, row, 0]
            tma.async_copy_global_to_shared(key, place, key_full.index(slot), key_ring.index(slot))
            mbarrier.wait(value_free.index(slot), phase ^ 1)
            mbarrier.expect(value_full.index(slot), value.block_type.nbytes)
            tma.async_copy_global_to_shared(value, place, value_full.index(slot), value_ring.index(slot))
            count += 1


@gluon.jit
def _weights(
    scores, top, total, factor, first, column, keys, diagonal,
    KEYS: gl.constexpr, LAYOUT: gl.constexpr, CAUSAL: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Weights over the highest score so far, that score, the sum so far, and what earlier results shrink by."""
    if MASKED:
        key_at = gl.arange(0, KEYS, layout=gl.SliceLayout(0, LAYOUT))
        query_at = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
        end = gl.full([ROWS], 0, gl.int32, layout=gl.SliceLayout(1, LAYOUT)) + (keys - column)
        if CAUSAL:
            end = gl.minimum(end, query_at + (first + diagonal + 1 - column))
        scores = gl.where(key_at[None, :] < end[:, None], scores, -float("inf"))
    higher = gl.maximum(top, gl.max(scores, 1) * factor)
    base = higher
    if MASKED:  # a query that has seen nothing yet
        base = gl.where(higher == -float("inf"), 0.0, higher)
    weights = gl.exp2(scores * factor - base[:, None])
    less = gl.exp2(top - base)
    return weights, higher, total * less + gl.sum(weights, 1), less


@gluon.jit
def _packed(weights, KEYS: gl.constexpr, dtype: gl.constexpr):
    """Weights in 16 bits, two in a register: a loop would carry one in each, and take them apart and together again."""
    even, odd = weights.reshape([ROWS, KEYS // 2, 2]).split()
    asm: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;" if dtype == gl.bfloat16 else "cvt.rn.f16x2.f32 $0, $2, $1;"
    return gl.inline_asm_elementwise(asm, "=r,f,f", [even, odd], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _unpacked(packed, KEYS: gl.constexpr, DIM: gl.constexpr, dtype: gl.constexpr):
    """The left side of a product with values."""
    asm: gl.constexpr = "mov.b32 {$0, $1}, $2;"
    even, odd = gl.inline_asm_elementwise(asm, "=h,=h,r", [packed], (gl.int16, gl.int16), is_pure=True, pack=1)
    layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=product_layout(DIM), k_width=2)
    return gl.convert_layout(gl.join(even, odd).reshape([ROWS, KEYS]).to(dtype, bitcast=True), layout)


@gluon.jit
def _scores(
    query_ring, key_ring, slot, CONSUMER: gl.constexpr, KEYS: gl.constexpr, DIM: gl.constexpr, LAYOUT: gl.constexpr
):
    """Products of queries and keys, which are on their way."""
    query = query_ring.index(CONSUMER).reshape([ROWS, DIM])
    key = key_ring.index(slot).reshape([KEYS, DIM]).permute((1, 0))
    none = gl.zeros([ROWS, KEYS], gl.float32, layout=LAYOUT)
    return warpgroup_mma(query, key, none, use_acc=False, is_async=True)


@gluon.jit
def _step(
    rings, barriers, weights, sums, top, total, factor, last, count, first, column, keys, diagonal,
    CONSUMER: gl.constexpr, KEYS: gl.constexpr, DIM: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Adds the values of the block before, and takes the weights of this one."""
    query_ring, key_ring, value_ring, _written = rings
    _query_full, query_free, key_full, key_free, value_full, value_free = barriers
    layout: gl.constexpr = product_layout(KEYS)
    sum_layout: gl.constexpr = product_layout(DIM)
    slot = count % STAGES
    before = (count - 1) % STAGES
    mbarrier.wait(key_full.index(slot), (count // STAGES) & 1)
    scores = _scores(query_ring, key_ring, slot, CONSUMER, KEYS, DIM, layout)
    mbarrier.wait(value_full.index(before), ((count - 1) // STAGES) & 1)
    left = _unpacked(weights, KEYS, DIM, value_ring.dtype)
    added = warpgroup_mma(left, value_ring.index(before).reshape([KEYS, DIM]), sums, is_async=True)
    scores = warpgroup_mma_wait(num_outstanding=1, deps=(scores,))
    mbarrier.arrive(key_free.index(slot), count=1)
    mbarrier.arrive(query_free, count=1, pred=last)
    found, top, total, less = _weights(
        scores, top, total, factor, first, column, keys, diagonal, KEYS, layout, CAUSAL, MASKED
    )
    sums = warpgroup_mma_wait(num_outstanding=0, deps=(added,))
    mbarrier.arrive(value_free.index(before), count=1)
    sums = sums * gl.convert_layout(less, gl.SliceLayout(1, sum_layout))[:, None]
    return _packed(found, KEYS, value_ring.dtype), sums, top, total


@gluon.jit
def _passed(
    count, tile, sizes, barriers, CONSUMER: gl.constexpr, QUERIES: gl.constexpr, KEYS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """The number of the first block of a tile of which this warpgroup sees something: earlier ones are for others."""
    _queries, keys, _heads, _group, blocks, _tiles, together, diagonal = sizes
    _query_full, _query_free, key_full, key_free, value_full, value_free = barriers
    block, _number = place_of(tile, blocks, together, True)
    seen, _whole = key_blocks(block * QUERIES, keys, diagonal, QUERIES, KEYS, True)
    own, _whole = key_blocks(block * QUERIES + CONSUMER * ROWS, keys, diagonal, ROWS, KEYS, True)
    for _ in range(seen - own):
        slot = count % STAGES
        phase = (count // STAGES) & 1
        mbarrier.wait(key_full.index(slot), phase)
        mbarrier.arrive(key_free.index(slot), count=1)
        mbarrier.wait(value_full.index(slot), phase)
        mbarrier.arrive(value_free.index(slot), count=1)
        count += 1
    return count


@gluon.jit
def _consume(
    CONSUMER: gl.constexpr, result, lse, rings, barriers, factor, sizes, QUERIES: gl.constexpr,
    KEYS: gl.constexpr, DIM: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, SNAKE: gl.constexpr,
):  # fmt: skip
    """Results and logarithms of 64 queries of each tile."""
    query_ring, key_ring, value_ring, written = rings
    queries, keys, heads, _group, blocks, tiles, together, diagonal = sizes
    query_full, query_free, key_full, key_free, value_full, value_free = barriers
    layout: gl.constexpr = product_layout(KEYS)
    sum_layout: gl.constexpr = product_layout(DIM)
    turns = turns_of(tiles, SNAKE)
    mbarrier.wait(query_full, 0)
    count = 0
    if CAUSAL:
        count = _passed(count, tile_of(0, SNAKE), sizes, barriers, CONSUMER, QUERIES, KEYS, STAGES)
    mbarrier.wait(key_full.index(count % STAGES), (count // STAGES) & 1)
    upcoming = _scores(query_ring, key_ring, count % STAGES, CONSUMER, KEYS, DIM, layout)
    for turn in range(turns):
        block, number = place_of(tile_of(turn, SNAKE), blocks, together, CAUSAL)
        first = block * QUERIES + CONSUMER * ROWS
        seen, whole = key_blocks(first, keys, diagonal, ROWS, KEYS, CAUSAL)
        top = gl.full([ROWS], -float("inf"), gl.float32, layout=gl.SliceLayout(1, layout))
        total = gl.full([ROWS], 0.0, gl.float32, layout=gl.SliceLayout(1, layout))
        sums = gl.zeros([ROWS, DIM], gl.float32, layout=sum_layout)
        scores = warpgroup_mma_wait(num_outstanding=0, deps=(upcoming,))
        mbarrier.arrive(key_free.index(count % STAGES), count=1)
        mbarrier.arrive(query_free, count=1, pred=seen == 1)
        column = (seen - 1) * KEYS
        if seen > whole:
            found, top, total, _less = _weights(
                scores, top, total, factor, first, column, keys, diagonal, KEYS, layout, CAUSAL, True
            )
        else:
            found, top, total, _less = _weights(
                scores, top, total, factor, first, column, keys, diagonal, KEYS, layout, CAUSAL, False
            )
        weights = _packed(found, KEYS, result.dtype)
        count += 1
        for step in range(1, seen - whole):
            weights, sums, top, total = _step(
                rings, barriers, weights, sums, top, total, factor, step == seen - 1, count, first,
                column - step * KEYS, keys, diagonal, CONSUMER, KEYS, DIM, STAGES, CAUSAL, True,
            )  # fmt: skip
            count += 1
        for step in range(gl.maximum(seen - whole, 1), seen):
            weights, sums, top, total = _step(
                rings, barriers, weights, sums, top, total, factor, step == seen - 1, count, first,
                column - step * KEYS, keys, diagonal, CONSUMER, KEYS, DIM, STAGES, CAUSAL, False,
            )  # fmt: skip
            count += 1
        last = (count - 1) % STAGES
        mbarrier.wait(value_full.index(last), ((count - 1) // STAGES) & 1)
        left = _unpacked(weights, KEYS, DIM, result.dtype)
        added = warpgroup_mma(left, value_ring.index(last).reshape([KEYS, DIM]), sums, is_async=True)
        # the first scores of the next tile; after the last one they are of no use, and nobody waits for their keys
        more = turn + 1 < turns
        if CAUSAL and more:
            count = _passed(count, tile_of(turn + 1, SNAKE), sizes, barriers, CONSUMER, QUERIES, KEYS, STAGES)
        mbarrier.wait(query_full, (turn + 1) & 1, pred=more)
        mbarrier.wait(key_full.index(count % STAGES), (count // STAGES) & 1, pred=more)
        upcoming = _scores(query_ring, key_ring, count % STAGES, CONSUMER, KEYS, DIM, layout)
        sums = warpgroup_mma_wait(num_outstanding=1, deps=(added,))
        mbarrier.arrive(value_free.index(last), count=1)

        share = gl.where(total == 0.0, 0.0, 1.0 / total)  # a query that sees nothing has zeros
        sums = sums * gl.convert_layout(share, gl.SliceLayout(1, sum_layout))[:, None]
        tma.store_wait(0)
        gl.thread_barrier()  # one thread waits for the copy of the tile before, and all write
        written.index(CONSUMER).store(sums.to(result.dtype))
        fence_async_shared()
        tile = written.index(CONSUMER).reshape([1, 1, ROWS, DIM])
        tma.async_copy_shared_to_global(result, [number // heads, number % heads, first, 0], tile)
        at = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
        logarithm = gl.where(total == 0.0, -float("inf"), (top + gl.log2(total)) * LN_2)
        gl.store(lse + number.to(gl.int64) * queries + at, logarithm, mask=at < queries)
    warpgroup_mma_wait(num_outstanding=0, deps=(upcoming,))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["queries", "keys", "heads", "group", "blocks", "tiles", "together", "diagonal"])
def attention_hopper_kernel(
    lse, query, key, value, result, factor, queries, keys, heads, group, blocks, tiles, together, diagonal,
    KEYS: gl.constexpr, DIM: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
    SNAKE: gl.constexpr,
):  # fmt: skip
    """Tensors but the logarithms are descriptors of [batch, heads, tokens, dim]; key i is beside query i - diagonal."""
    dtype: gl.constexpr = query.dtype
    QUERIES: gl.constexpr = CONSUMERS * ROWS
    query_ring = gl.allocate_shared_memory(dtype, [CONSUMERS, 1, 1, ROWS, DIM], query.layout)
    key_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, KEYS, DIM], key.layout)
    value_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, KEYS, DIM], value.layout)
    written = gl.allocate_shared_memory(dtype, [CONSUMERS, ROWS, DIM], gl.NVMMASharedLayout(128, 16, rank=2))
    query_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    query_free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    key_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    key_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    value_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    value_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(query_full, count=1)
    mbarrier.init(query_free, count=CONSUMERS)
    for slot in gl.static_range(STAGES):
        mbarrier.init(key_full.index(slot), count=1)
        mbarrier.init(key_free.index(slot), count=CONSUMERS)
        mbarrier.init(value_full.index(slot), count=1)
        mbarrier.init(value_free.index(slot), count=CONSUMERS)
    fence_async_shared()
    barriers = (query_full, query_free, key_full, key_free, value_full, value_free)
    rings = (query_ring, key_ring, value_ring, written)
    sizes = (queries, keys, heads, group, blocks, tiles, together, diagonal)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consume, (0, result, lse, rings, barriers, factor, sizes, QUERIES, KEYS, DIM, STAGES, CAUSAL, SNAKE)),
                (_consume, (1, result, lse, rings, barriers, factor, sizes, QUERIES, KEYS, DIM, STAGES, CAUSAL, SNAKE)),
                (_load, (query, key, value, rings, barriers, sizes, QUERIES, KEYS, CONSUMERS, STAGES, CAUSAL, SNAKE)),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (0, result, lse, rings, barriers, factor, sizes, QUERIES, KEYS, DIM, STAGES, CAUSAL, SNAKE)),
                (_consume, (1, result, lse, rings, barriers, factor, sizes, QUERIES, KEYS, DIM, STAGES, CAUSAL, SNAKE)),
                (_consume, (2, result, lse, rings, barriers, factor, sizes, QUERIES, KEYS, DIM, STAGES, CAUSAL, SNAKE)),
                (_load, (query, key, value, rings, barriers, sizes, QUERIES, KEYS, CONSUMERS, STAGES, CAUSAL, SNAKE)),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )  # fmt: skip
