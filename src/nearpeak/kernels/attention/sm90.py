"""Attention for Hopper in Gluon: warp-specialized forward and backward kernels.

Forward: one warp loads, two or three warpgroups compute. The loading warp copies blocks of keys and values into a ring
buffer in shared memory by TMA. Each warpgroup has 64 queries. While it computes the exponentials of one block of
scores, the tensor cores multiply the weights of the previous block by its values, and the queries by the next keys.
Blocks that are partly masked come first in a tile, in a loop of their own. A persistent program issues the first scores
of its next tile before it writes the results of the current one. Tiles with the most keys come first, and every other
round of programs goes through them backwards, so that all programs end at about the same time.

Backward: all gradients from one pass over the scores. A program has 128 keys and values, 64 for each of two
warpgroups, and loops over the queries that see them, in pairs of blocks of 64. Scores are transposed (keys by queries),
so that weights and their gradients are directly the left operands of the products for the gradients of values and keys,
which stay in registers to the end. Each program contributes to the gradient of queries: a fourth warp adds the partial
sums in global memory, in float32 and in a fixed order, so that results are bitwise reproducible. For each pair of
blocks of queries a counter says how many partial sums are there. The order in which programs visit queries, and the
order of the additions, are such that programs of one head rarely meet at the same queries:

- Without a causal mask, programs start at different queries and wrap around.
- With a causal mask, programs that start together begin at their diagonal and go to later queries. Where one head
  occupies all processors, programs of the next head, those with the most queries first, go from the last queries to
  their diagonal.
- Where a head has more programs than run at a time, a program may only wait for programs with a smaller number.
"""

from __future__ import annotations

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from nearpeak.kernels._runtime.sm90_layouts import wgmma_layout

ROWS = gl.constexpr(64)
"""Queries of a warpgroup, as many as its products have rows."""
LN_2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def tile_of_turn(turn, SNAKE: gl.constexpr):
    """The tile that this program has in a turn."""
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    if SNAKE:
        program = gl.where(turn % 2 == 0, program, programs - 1 - program)
    return turn * programs + program


@gluon.jit
def tile_count(tiles, SNAKE: gl.constexpr):
    """How many turns this program has."""
    whole = tiles // gl.num_programs(0)
    return whole + gl.where(tile_of_turn(whole, SNAKE) < tiles, 1, 0)


@gluon.jit
def block_and_head(tile, blocks, together, CAUSAL: gl.constexpr):
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
def _load_forward(
    query, key, value, rings, barriers, sizes, QUERIES: gl.constexpr, KEYS: gl.constexpr, CONSUMERS: gl.constexpr,
    STAGES: gl.constexpr, CAUSAL: gl.constexpr, SNAKE: gl.constexpr,
):  # fmt: skip
    """Copies the queries of each tile, and keys and values, the last ones first."""
    query_ring, key_ring, value_ring, _written = rings
    _queries, keys, heads, group, blocks, tiles, together, diagonal = sizes
    query_full, query_free, key_full, key_free, value_full, value_free = barriers
    count = 0
    for turn in range(tile_count(tiles, SNAKE)):
        block, number = block_and_head(tile_of_turn(turn, SNAKE), blocks, together, CAUSAL)
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
def _softmax_weights(
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
    layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=wgmma_layout(DIM), k_width=2)
    return gl.convert_layout(gl.join(even, odd).reshape([ROWS, KEYS]).to(dtype, bitcast=True), layout)


@gluon.jit
def _start_scores(
    query_ring, key_ring, slot, CONSUMER: gl.constexpr, KEYS: gl.constexpr, DIM: gl.constexpr, LAYOUT: gl.constexpr
):
    """Products of queries and keys, which are on their way."""
    query = query_ring.index(CONSUMER).reshape([ROWS, DIM])
    key = key_ring.index(slot).reshape([KEYS, DIM]).permute((1, 0))
    none = gl.zeros([ROWS, KEYS], gl.float32, layout=LAYOUT)
    return warpgroup_mma(query, key, none, use_acc=False, is_async=True)


@gluon.jit
def _forward_step(
    rings, barriers, weights, sums, top, total, factor, last, count, first, column, keys, diagonal,
    CONSUMER: gl.constexpr, KEYS: gl.constexpr, DIM: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Adds the values of the block before, and takes the weights of this one."""
    query_ring, key_ring, value_ring, _written = rings
    _query_full, query_free, key_full, key_free, value_full, value_free = barriers
    layout: gl.constexpr = wgmma_layout(KEYS)
    sum_layout: gl.constexpr = wgmma_layout(DIM)
    slot = count % STAGES
    before = (count - 1) % STAGES
    mbarrier.wait(key_full.index(slot), (count // STAGES) & 1)
    scores = _start_scores(query_ring, key_ring, slot, CONSUMER, KEYS, DIM, layout)
    mbarrier.wait(value_full.index(before), ((count - 1) // STAGES) & 1)
    left = _unpacked(weights, KEYS, DIM, value_ring.dtype)
    added = warpgroup_mma(left, value_ring.index(before).reshape([KEYS, DIM]), sums, is_async=True)
    scores = warpgroup_mma_wait(num_outstanding=1, deps=(scores,))
    mbarrier.arrive(key_free.index(slot), count=1)
    mbarrier.arrive(query_free, count=1, pred=last)
    found, top, total, less = _softmax_weights(
        scores, top, total, factor, first, column, keys, diagonal, KEYS, layout, CAUSAL, MASKED
    )
    sums = warpgroup_mma_wait(num_outstanding=0, deps=(added,))
    mbarrier.arrive(value_free.index(before), count=1)
    sums = sums * gl.convert_layout(less, gl.SliceLayout(1, sum_layout))[:, None]
    return _packed(found, KEYS, value_ring.dtype), sums, top, total


@gluon.jit
def _skip_hidden_blocks(
    count, tile, sizes, barriers, CONSUMER: gl.constexpr, QUERIES: gl.constexpr, KEYS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """The number of the first block of a tile of which this warpgroup sees something: earlier ones are for others."""
    _queries, keys, _heads, _group, blocks, _tiles, together, diagonal = sizes
    _query_full, _query_free, key_full, key_free, value_full, value_free = barriers
    block, _number = block_and_head(tile, blocks, together, True)
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
def _consume_forward(
    CONSUMER: gl.constexpr, result, lse, rings, barriers, factor, sizes, QUERIES: gl.constexpr,
    KEYS: gl.constexpr, DIM: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, SNAKE: gl.constexpr,
):  # fmt: skip
    """Results and logarithms of 64 queries of each tile."""
    query_ring, key_ring, value_ring, written = rings
    queries, keys, heads, _group, blocks, tiles, together, diagonal = sizes
    query_full, query_free, key_full, key_free, value_full, value_free = barriers
    layout: gl.constexpr = wgmma_layout(KEYS)
    sum_layout: gl.constexpr = wgmma_layout(DIM)
    turns = tile_count(tiles, SNAKE)
    mbarrier.wait(query_full, 0)
    count = 0
    if CAUSAL:
        count = _skip_hidden_blocks(count, tile_of_turn(0, SNAKE), sizes, barriers, CONSUMER, QUERIES, KEYS, STAGES)
    mbarrier.wait(key_full.index(count % STAGES), (count // STAGES) & 1)
    upcoming = _start_scores(query_ring, key_ring, count % STAGES, CONSUMER, KEYS, DIM, layout)
    for turn in range(turns):
        block, number = block_and_head(tile_of_turn(turn, SNAKE), blocks, together, CAUSAL)
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
            found, top, total, _less = _softmax_weights(
                scores, top, total, factor, first, column, keys, diagonal, KEYS, layout, CAUSAL, True
            )
        else:
            found, top, total, _less = _softmax_weights(
                scores, top, total, factor, first, column, keys, diagonal, KEYS, layout, CAUSAL, False
            )
        weights = _packed(found, KEYS, result.dtype)
        count += 1
        for step in range(1, seen - whole):
            weights, sums, top, total = _forward_step(
                rings, barriers, weights, sums, top, total, factor, step == seen - 1, count, first,
                column - step * KEYS, keys, diagonal, CONSUMER, KEYS, DIM, STAGES, CAUSAL, True,
            )  # fmt: skip
            count += 1
        for step in range(gl.maximum(seen - whole, 1), seen):
            weights, sums, top, total = _forward_step(
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
            count = _skip_hidden_blocks(
                count, tile_of_turn(turn + 1, SNAKE), sizes, barriers, CONSUMER, QUERIES, KEYS, STAGES
            )
        mbarrier.wait(query_full, (turn + 1) & 1, pred=more)
        mbarrier.wait(key_full.index(count % STAGES), (count // STAGES) & 1, pred=more)
        upcoming = _start_scores(query_ring, key_ring, count % STAGES, CONSUMER, KEYS, DIM, layout)
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
                (_consume_forward, (0, result, lse, rings, barriers, factor, sizes, QUERIES, KEYS, DIM, STAGES, CAUSAL, SNAKE)),
                (_consume_forward, (1, result, lse, rings, barriers, factor, sizes, QUERIES, KEYS, DIM, STAGES, CAUSAL, SNAKE)),
                (_load_forward, (query, key, value, rings, barriers, sizes, QUERIES, KEYS, CONSUMERS, STAGES, CAUSAL, SNAKE)),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume_forward, (0, result, lse, rings, barriers, factor, sizes, QUERIES, KEYS, DIM, STAGES, CAUSAL, SNAKE)),
                (_consume_forward, (1, result, lse, rings, barriers, factor, sizes, QUERIES, KEYS, DIM, STAGES, CAUSAL, SNAKE)),
                (_consume_forward, (2, result, lse, rings, barriers, factor, sizes, QUERIES, KEYS, DIM, STAGES, CAUSAL, SNAKE)),
                (_load_forward, (query, key, value, rings, barriers, sizes, QUERIES, KEYS, CONSUMERS, STAGES, CAUSAL, SNAKE)),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )  # fmt: skip


PAIR = gl.constexpr(128)
"""Queries of a pair of blocks, and keys of a program."""


@builtin
def async_add_shared_to_global(tensor_desc, coord, src, _semantic=None):
    """Has a tile in shared memory added to one in global memory, and does not wait. Gluon has no name for it yet."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, coord, src.handle)


@gluon.jit
def _wait_until_written():
    """Until all that this warp sent is in global memory; `store_wait` waits until it has left shared memory."""
    lanes = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
    asm: gl.constexpr = "cp.async.bulk.wait_group 0; mov.b32 $0, $1;"
    gl.inline_asm_elementwise(asm, "=r,r", [lanes], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def query_pairs(head, block, sizes, CAUSAL: gl.constexpr, ROTATED: gl.constexpr):
    """The first pair of blocks of queries that see a block of keys, how many do, and whether the last come first."""
    _queries, _keys, _heads, _group, pairs, blocks, diagonal, _rows, processors = sizes
    first = 0
    count = pairs
    down = 0
    if CAUSAL:
        first = gl.minimum(gl.maximum(block * PAIR - diagonal, 0) // PAIR, pairs)
        count = pairs - first
        down = 1
        if ROTATED:
            down = gl.where(2 * blocks > processors, head % 2, 0)
    elif ROTATED:
        first = block * pairs // blocks
    return first, count, down


@gluon.jit
def pair_of_step(step, first, count, down, pairs):
    """The pair of blocks of queries that a program has in a step."""
    pair = first + (step if down == 0 else count - 1 - step)
    return pair - pairs if pair >= pairs else pair


@gluon.jit
def turn_of_pair(block, pair, down, sizes, CAUSAL: gl.constexpr, ROTATED: gl.constexpr, SUMS: gl.constexpr):
    """To which sum of a pair the part of a block of keys is added, and how many parts are added before it."""
    _queries, _keys, _heads, _group, pairs, blocks, diagonal, _rows, _processors = sizes
    before = block
    if ROTATED:
        if CAUSAL:
            if down == 0:
                before = gl.minimum((pair * PAIR + PAIR - 1 + diagonal) // PAIR, blocks - 1) - block
        else:
            before = (((pair + 1) * blocks - 1) // pairs - block + blocks) % blocks
    return before % SUMS, before // SUMS


@gluon.jit
def add_query_gradients(
    sums, turns, dq_tiles, barriers, sizes, DIM: gl.constexpr, CAUSAL: gl.constexpr, ROTATED: gl.constexpr,
    SUMS: gl.constexpr,
):  # fmt: skip
    """Has parts of the queries' gradient added, each pair of blocks in its turn; the first of a sum is written."""
    _queries, _keys, _heads, group, pairs, blocks, _diagonal, rows, _processors = sizes
    _keys_full, _full, _free, ds_full, dq_free = barriers
    program = gl.program_id(0)
    block = program % blocks
    head = program // blocks
    first, count, down = query_pairs(head, block, sizes, CAUSAL, ROTATED)
    # a part is there when the gradients of scores of the turn after are: those of the first turn tell of nothing
    # and nothing is stored before they were seen, so that this warp is never a whole turn of barriers late
    for half in gl.static_range(2):
        mbarrier.wait(ds_full.index(half), 0, pred=group * count > 0)
        mbarrier.arrive(dq_free.index(half), count=1, pred=group * count > 0)
    done = 0
    for member in range(group):
        for step in range(count):
            pair = pair_of_step(step, first, count, down, pairs)
            place = (head * group + member) * pairs + pair
            number, before = turn_of_pair(block, pair, down, sizes, CAUSAL, ROTATED, SUMS)
            turn = turns + place * SUMS + number
            for half in gl.static_range(2):
                row = number * rows + place * PAIR + half * ROWS
                mbarrier.wait(ds_full.index(half), (done + 1) & 1)
                if half == 0:
                    there = gl.atomic_add(turn, 0, sem="relaxed")
                    while there < before:
                        there = gl.atomic_add(turn, 0, sem="relaxed")
                if before == 0:
                    tma.async_copy_shared_to_global(sums, [row, 0], dq_tiles.index(2 * half))
                    tma.async_copy_shared_to_global(sums, [row, DIM // 2], dq_tiles.index(2 * half + 1))
                else:
                    async_add_shared_to_global(sums, [row, 0], dq_tiles.index(2 * half))
                    async_add_shared_to_global(sums, [row, DIM // 2], dq_tiles.index(2 * half + 1))
                tma.store_wait(0)
                mbarrier.arrive(dq_free.index(half), count=1)
            _wait_until_written()
            gl.atomic_add(turn, 1, sem="release")
            done += 1


LOG2_E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _load_backward(
    query, key, value, gradient, lse, mean, tiles, barriers, sizes,
    STAGES: gl.constexpr, CAUSAL: gl.constexpr, ROTATED: gl.constexpr,
):  # fmt: skip
    """Copies the keys and values of this program, and queries, gradients and what is known of rows, block by block."""
    key_tiles, value_tiles, query_ring, gradient_ring, known, _ds_tiles, _dq_tiles = tiles
    _queries, _keys, heads, group, pairs, blocks, _diagonal, _rows, _processors = sizes
    keys_full, full, free, _ds_full, _dq_free = barriers
    program = gl.program_id(0)
    key_heads = heads // group
    block = program % blocks
    batch = program // blocks // key_heads
    head = program // blocks % key_heads
    mbarrier.expect(keys_full, 2 * key.block_type.nbytes + 2 * value.block_type.nbytes)
    for half in gl.static_range(2):
        place = [batch, head, block * PAIR + half * ROWS, 0]
        tma.async_copy_global_to_shared(key, place, keys_full, key_tiles.index(half))
        tma.async_copy_global_to_shared(value, place, keys_full, value_tiles.index(half))
    first, count, down = query_pairs(program // blocks, block, sizes, CAUSAL, ROTATED)
    lanes = gl.arange(0, ROWS, layout=gl.BlockedLayout([2], [32], [1], [0]))
    done = 0
    for member in range(group):
        for step in range(2 * count):
            pair = pair_of_step(step // 2, first, count, down, pairs)
            slot = done % STAGES
            mbarrier.wait(free.index(slot), ((done // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(slot), query.block_type.nbytes + gradient.block_type.nbytes)
            place = [batch, head * group + member, pair * PAIR + (step % 2) * ROWS, 0]
            tma.async_copy_global_to_shared(query, place, full.index(slot), query_ring.index(slot))
            tma.async_copy_global_to_shared(gradient, place, full.index(slot), gradient_ring.index(slot))
            row = (program // blocks * group + member).to(gl.int64) * (pairs * PAIR) + pair * PAIR + (step % 2) * ROWS
            logarithms = gl.load(lse + row + lanes)
            means = gl.load(mean + row + lanes)
            known.index(2 * slot).store(logarithms)
            known.index(2 * slot + 1).store(means)
            mbarrier.arrive(full.index(slot), count=1)
            done += 1


@gluon.jit
def _start_query_gradient(
    HALF: gl.constexpr, CONSUMER: gl.constexpr, ds_tiles, key_tiles, barriers, turn, zero, DIM: gl.constexpr
):
    """This warpgroup's half of the dimensions of the gradient of 64 queries, on its way."""
    _keys_full, _full, _free, ds_full, _dq_free = barriers
    mbarrier.wait(ds_full.index(HALF), turn & 1)
    found = gl.zeros([ROWS, DIM // 2], gl.float32, layout=wgmma_layout(DIM // 2))
    for part in gl.static_range(2):
        by_scores = ds_tiles.index(2 * HALF + part + zero).permute((1, 0))
        keys = key_tiles.index(part + zero).reshape([ROWS, DIM]).slice(CONSUMER * (DIM // 2), DIM // 2, dim=1)
        found = warpgroup_mma(by_scores, keys, found, use_acc=part == 1, is_async=True)
    return found


@gluon.jit
def _store_query_gradient(HALF: gl.constexpr, CONSUMER: gl.constexpr, found, dq_tiles, barriers, turn):
    """Stores a gradient of queries for the warp that adds it, which hears of it later."""
    _keys_full, _full, _free, _ds_full, dq_free = barriers
    mbarrier.wait(dq_free.index(HALF), turn & 1)
    dq_tiles.index(2 * HALF + CONSUMER).store(found)


@gluon.jit
def _start_products(left, right, half, DIM: gl.constexpr):
    """Products of 64 keys, or values, with 64 queries, or gradients, which are on their way."""
    columns = right.index(half).reshape([ROWS, DIM]).permute((1, 0))
    none = gl.zeros([ROWS, ROWS], gl.float32, layout=wgmma_layout(64))
    return warpgroup_mma(left, columns, none, use_acc=False, is_async=True)


@gluon.jit
def _left_operand(tiles, consumer, DIM: gl.constexpr):
    """Keys or values of a warpgroup as the left side of products.

    Those of 64 dimensions fit into registers. Read from shared memory for each product, they would be a third of what
    is read there, and that would be what everything waits for.
    """
    found = tiles.index(consumer).reshape([ROWS, DIM])
    if DIM == 64:
        found = found.load(gl.DotOperandLayout(operand_index=0, parent=wgmma_layout(64), k_width=2))
    return found


@gluon.jit
def _start_next_products(tiles, held, consumer, half, DIM: gl.constexpr):
    """Scores of the next 64 queries, on their way; where registers are left, the gradients of their weights too."""
    key_tiles, _value_tiles, query_ring, gradient_ring, _known, _ds_tiles, _dq_tiles = tiles
    if DIM == 64:
        found = (_start_products(held[0], query_ring, half, DIM), _start_products(held[1], gradient_ring, half, DIM))
    else:  # addresses anew
        found = (_start_products(_left_operand(key_tiles, consumer, DIM), query_ring, half, DIM),)  # type: ignore[assignment]
    return found


@gluon.jit
def _backward_half(
    HALF: gl.constexpr, CONSUMER: gl.constexpr, upcoming, held, by_key, by_value, tiles, barriers,
    row, turn, more, masked, factor, first, keys, diagonal,
    dtype: gl.constexpr, DIM: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """Adds what 64 queries give to the gradients of keys and values, and stores that of the 64 before.

    Their scores are on their way as it begins, and those of the next 64 as it ends: tensor cores work meanwhile. What
    is stored is seen by others after a fence, which takes long after a store: one is for both that are made here, long
    after that of the gradient of queries.
    """
    key_tiles, value_tiles, query_ring, gradient_ring, known, ds_tiles, dq_tiles = tiles
    _keys_full, full, free, ds_full, _dq_free = barriers
    layout: gl.constexpr = wgmma_layout(64)
    left: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=wgmma_layout(DIM), k_width=2)
    by_column: gl.constexpr = gl.SliceLayout(0, layout)
    # 0, which the compiler does not know, and each time another: it would keep all addresses in shared memory
    zero = (2 * turn + HALF) >> 30
    zero_too = (2 * turn + HALF + 4) >> 30
    query = query_ring.index(HALF + zero).reshape([ROWS, DIM])
    gradient = gradient_ring.index(HALF + zero).reshape([ROWS, DIM])
    if DIM == 64:
        if HALF == 0:
            scores, by_weights = warpgroup_mma_wait(num_outstanding=0, deps=upcoming)
        else:
            scores = warpgroup_mma_wait(num_outstanding=1, deps=(upcoming[0],))
            by_weights = upcoming[1]
    elif HALF == 0:
        scores = warpgroup_mma_wait(num_outstanding=0, deps=upcoming)
        by_weights = _start_products(_left_operand(value_tiles, CONSUMER + zero, DIM), gradient_ring, HALF + zero, DIM)
    else:
        by_weights = _start_products(_left_operand(value_tiles, CONSUMER + zero, DIM), gradient_ring, HALF + zero, DIM)
        scores = warpgroup_mma_wait(num_outstanding=1, deps=upcoming)
    weights = gl.exp2(scores * factor - known.index(2 * HALF + zero).load(by_column)[None, :])
    if masked:
        key_at = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
        if CAUSAL:
            last = gl.arange(0, ROWS, layout=by_column) + (row + HALF * ROWS + diagonal - first)
            last = gl.minimum(last, keys - first - 1)
            weights = gl.where(key_at[:, None] <= last[None, :], weights, 0.0)
        else:
            weights = gl.where((key_at < keys - first)[:, None], weights, 0.0)
    by_value = warpgroup_mma(gl.convert_layout(weights.to(dtype), left), gradient, by_value, is_async=True)
    if HALF == 1 or DIM > 64:
        by_weights = warpgroup_mma_wait(num_outstanding=1, deps=(by_weights,))
    means = known.index(2 * HALF + 1 + zero).load(by_column)
    by_scores = (weights * (by_weights - means[None, :])).to(dtype)
    # until both warpgroups have multiplied what was there: then they were also done with the half before this one
    if HALF == 0:
        mbarrier.wait(free.index(1), (turn & 1) ^ 1)
    else:
        mbarrier.wait(free.index(0), turn & 1)
    ds_tiles.index(2 * HALF + CONSUMER).store(by_scores)
    fence_async_shared()
    # this is also how the gradient of queries of this half of the turn before is known to be there
    mbarrier.arrive(ds_full.index(HALF), count=1)
    by_key = warpgroup_mma(gl.convert_layout(by_scores, left), query, by_key, is_async=True)
    if DIM > 64:
        by_value = warpgroup_mma_wait(num_outstanding=1, deps=(by_value,))
    if HALF == 1:
        found = _start_query_gradient(0, CONSUMER, ds_tiles, key_tiles, barriers, turn, zero, DIM)
        mbarrier.wait(full.index(0), (turn + 1) & 1, pred=more)
    else:
        found = _start_query_gradient(1, CONSUMER, ds_tiles, key_tiles, barriers, turn - 1, zero, DIM)
        mbarrier.wait(full.index(1), turn & 1)
    upcoming = _start_next_products(tiles, held, CONSUMER + zero_too, 1 - HALF + zero_too, DIM)
    on_their_way: gl.constexpr = 1 if DIM > 64 else 2
    by_value, by_key, found = warpgroup_mma_wait(num_outstanding=on_their_way, deps=(by_value, by_key, found))
    mbarrier.arrive(free.index(HALF), count=1)
    if HALF == 1:
        _store_query_gradient(0, CONSUMER, found, dq_tiles, barriers, turn)
    elif turn > 0:
        _store_query_gradient(1, CONSUMER, found, dq_tiles, barriers, turn - 1)
    return upcoming, by_key, by_value


@gluon.jit
def _consume_backward(
    CONSUMER: gl.constexpr, by_keys, by_values, tiles, barriers, scale, sizes,
    dtype: gl.constexpr, DIM: gl.constexpr, CAUSAL: gl.constexpr, ROTATED: gl.constexpr,
):  # fmt: skip
    """The gradients of 64 keys and their values, and half of the dimensions of that of queries."""
    key_tiles, value_tiles, _query_ring, _gradient_ring, _known, ds_tiles, dq_tiles = tiles
    _queries, keys, heads, group, pairs, blocks, diagonal, _rows, _processors = sizes
    keys_full, full, _free, ds_full, _dq_free = barriers
    program = gl.program_id(0)
    block = program % blocks
    first, count, down = query_pairs(program // blocks, block, sizes, CAUSAL, ROTATED)
    factor = scale * LOG2_E
    by_key = gl.zeros([ROWS, DIM], gl.float32, layout=wgmma_layout(DIM))
    by_value = gl.zeros([ROWS, DIM], gl.float32, layout=wgmma_layout(DIM))
    # pairs in which something is hidden are those at the diagonal; all of them where keys end
    masked = 0
    if CAUSAL:
        beyond = gl.cdiv(gl.maximum(block * PAIR + PAIR - 1 - diagonal, 0), PAIR)
        masked = gl.minimum(gl.maximum(beyond - first, 0), count)
    if (block + 1) * PAIR > keys:
        masked = count
    hidden = gl.where(down != 0, count - masked, 0)
    mbarrier.wait(keys_full, 0)
    turns = group * count
    mbarrier.wait(full.index(0), 0, pred=turns > 0)
    held = (_left_operand(key_tiles, CONSUMER, DIM), _left_operand(value_tiles, CONSUMER, DIM))
    upcoming = _start_next_products(tiles, held, CONSUMER, 0, DIM)
    first_key = block * PAIR + CONSUMER * ROWS
    step = 0
    for turn in range(turns):
        pair = pair_of_step(step, first, count, down, pairs)
        for half in gl.static_range(2):
            upcoming, by_key, by_value = _backward_half(
                half, CONSUMER, upcoming, held, by_key, by_value, tiles, barriers, pair * PAIR, turn, turn + 1 < turns,
                (step >= hidden) & (step < hidden + masked), factor, first_key, keys, diagonal, dtype, DIM, CAUSAL,
            )  # fmt: skip
        step += 1
        if step == count:  # the next head of those that have these keys
            step = 0
    warpgroup_mma_wait(num_outstanding=0, deps=upcoming)
    if turns > 0:
        fence_async_shared()
        mbarrier.arrive(ds_full.index(0), count=1)
        found = _start_query_gradient(1, CONSUMER, ds_tiles, key_tiles, barriers, turns - 1, 0, DIM)
        found = warpgroup_mma_wait(num_outstanding=0, deps=(found,))
        _store_query_gradient(1, CONSUMER, found, dq_tiles, barriers, turns - 1)
        fence_async_shared()
        mbarrier.arrive(ds_full.index(1), count=1)

    # through the tile of values, which nobody else reads
    key_heads = heads // group
    place = [program // blocks // key_heads, program // blocks % key_heads, first_key, 0]
    tile = value_tiles.index(CONSUMER)
    tile.reshape([ROWS, DIM]).store(by_value.to(dtype))
    fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(by_values, place, tile)
    tma.store_wait(0)
    gl.thread_barrier()  # one thread waits, and all write
    tile.reshape([ROWS, DIM]).store((by_key * scale).to(dtype))
    fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(by_keys, place, tile)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["queries", "keys", "heads", "group", "pairs", "blocks", "diagonal", "rows", "processors"])
def attention_hopper_backward_kernel(
    lse, mean, turns, by_keys, by_values, query, key, value, gradient, sums, scale,
    queries, keys, heads, group, pairs, blocks, diagonal, rows, processors,
    DIM: gl.constexpr, CAUSAL: gl.constexpr, ROTATED: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """Tensors are descriptors, but for turns, and logarithms, to the base 2, and means, which have whole pairs."""
    dtype: gl.constexpr = query.dtype
    STAGES: gl.constexpr = 2  # a slot for each half of a pair
    key_tiles = gl.allocate_shared_memory(dtype, [2, 1, 1, ROWS, DIM], key.layout)
    value_tiles = gl.allocate_shared_memory(dtype, [2, 1, 1, ROWS, DIM], value.layout)
    query_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, ROWS, DIM], query.layout)
    gradient_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, ROWS, DIM], gradient.layout)
    ds_tiles = gl.allocate_shared_memory(dtype, [2 * STAGES, ROWS, ROWS], gl.NVMMASharedLayout(128, 16, rank=2))
    dq_tiles = gl.allocate_shared_memory(gl.float32, [2 * STAGES, ROWS, DIM // 2], sums.layout)
    known = gl.allocate_shared_memory(gl.float32, [2 * STAGES, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    keys_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ds_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    dq_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(keys_full, count=1)
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=2)
        mbarrier.init(free.index(slot), count=2)
        mbarrier.init(dq_free.index(slot), count=1)
        mbarrier.init(ds_full.index(slot), count=2)
    fence_async_shared()
    barriers = (keys_full, full, free, ds_full, dq_free)
    tiles = (key_tiles, value_tiles, query_ring, gradient_ring, known, ds_tiles, dq_tiles)
    sizes = (queries, keys, heads, group, pairs, blocks, diagonal, rows, processors)
    gl.warp_specialize(
        [
            (
                _consume_backward,
                (0, by_keys, by_values, tiles, barriers, scale, sizes, dtype, DIM, CAUSAL, ROTATED),
            ),
            (
                _consume_backward,
                (1, by_keys, by_values, tiles, barriers, scale, sizes, dtype, DIM, CAUSAL, ROTATED),
            ),
            (_load_backward, (query, key, value, gradient, lse, mean, tiles, barriers, sizes, STAGES, CAUSAL, ROTATED)),
            (add_query_gradients, (sums, turns, dq_tiles, barriers, sizes, DIM, CAUSAL, ROTATED, SUMS)),
        ],
        [4, 1, 1],
        [240, 24, 24],
    )  # fmt: skip
