"""The backward pass of attention on Hopper, in Gluon: all gradients from one pass over the scores.

A program has 128 keys and their values, 64 for each of two warpgroups, and goes through the queries that see them, in
pairs of blocks of 64. Scores are kept transposed, keys by queries, so that weights and their gradients are at once the
left sides of the products for the gradients of values and keys, which stay in registers to the end.

The gradient of queries has parts from all programs. Each part goes through shared memory to a warp that has it added in
global memory, in float32 and in a fixed order: see `attention_hopper_turns`.
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

from nearpeak.kernels.jit.attention_hopper import ROWS
from nearpeak.kernels.jit.attention_hopper_turns import PAIR, add_in_turn, pair_at, pairs_of
from nearpeak.kernels.jit.hopper_layouts import product_layout

LOG2_E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _load(
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
    first, count, down = pairs_of(program // blocks, block, sizes, CAUSAL, ROTATED)
    lanes = gl.arange(0, ROWS, layout=gl.BlockedLayout([2], [32], [1], [0]))
    done = 0
    for member in range(group):
        for step in range(2 * count):
            pair = pair_at(step // 2, first, count, down, pairs)
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
def _query_products(
    HALF: gl.constexpr, CONSUMER: gl.constexpr, ds_tiles, key_tiles, barriers, turn, zero, DIM: gl.constexpr
):
    """This warpgroup's half of the dimensions of the gradient of 64 queries, on its way."""
    _keys_full, _full, _free, ds_full, _dq_free = barriers
    mbarrier.wait(ds_full.index(HALF), turn & 1)
    found = gl.zeros([ROWS, DIM // 2], gl.float32, layout=product_layout(DIM // 2))
    for part in gl.static_range(2):
        by_scores = ds_tiles.index(2 * HALF + part + zero).permute((1, 0))
        keys = key_tiles.index(part + zero).reshape([ROWS, DIM]).slice(CONSUMER * (DIM // 2), DIM // 2, dim=1)
        found = warpgroup_mma(by_scores, keys, found, use_acc=part == 1, is_async=True)
    return found


@gluon.jit
def _store_part(HALF: gl.constexpr, CONSUMER: gl.constexpr, found, dq_tiles, barriers, turn):
    """Stores a gradient of queries for the warp that adds it, which hears of it later."""
    _keys_full, _full, _free, _ds_full, dq_free = barriers
    mbarrier.wait(dq_free.index(HALF), turn & 1)
    dq_tiles.index(2 * HALF + CONSUMER).store(found)


@gluon.jit
def _products(left, right, half, DIM: gl.constexpr):
    """Products of 64 keys, or values, with 64 queries, or gradients, which are on their way."""
    columns = right.index(half).reshape([ROWS, DIM]).permute((1, 0))
    none = gl.zeros([ROWS, ROWS], gl.float32, layout=product_layout(64))
    return warpgroup_mma(left, columns, none, use_acc=False, is_async=True)


@gluon.jit
def _left(tiles, consumer, DIM: gl.constexpr):
    """Keys or values of a warpgroup as the left side of products.

    Those of 64 dimensions fit into registers. Read from shared memory for each product, they would be a third of what
    is read there, and that would be what everything waits for.
    """
    found = tiles.index(consumer).reshape([ROWS, DIM])
    if DIM == 64:
        found = found.load(gl.DotOperandLayout(operand_index=0, parent=product_layout(64), k_width=2))
    return found


@gluon.jit
def _upcoming(tiles, held, consumer, half, DIM: gl.constexpr):
    """Scores of the next 64 queries, on their way; where registers are left, the gradients of their weights too."""
    key_tiles, _value_tiles, query_ring, gradient_ring, _known, _ds_tiles, _dq_tiles = tiles
    if DIM == 64:
        found = (_products(held[0], query_ring, half, DIM), _products(held[1], gradient_ring, half, DIM))
    else:  # addresses anew
        found = (_products(_left(key_tiles, consumer, DIM), query_ring, half, DIM),)  # type: ignore[assignment]
    return found


@gluon.jit
def _half(
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
    layout: gl.constexpr = product_layout(64)
    left: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=product_layout(DIM), k_width=2)
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
        by_weights = _products(_left(value_tiles, CONSUMER + zero, DIM), gradient_ring, HALF + zero, DIM)
    else:
        by_weights = _products(_left(value_tiles, CONSUMER + zero, DIM), gradient_ring, HALF + zero, DIM)
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
        found = _query_products(0, CONSUMER, ds_tiles, key_tiles, barriers, turn, zero, DIM)
        mbarrier.wait(full.index(0), (turn + 1) & 1, pred=more)
    else:
        found = _query_products(1, CONSUMER, ds_tiles, key_tiles, barriers, turn - 1, zero, DIM)
        mbarrier.wait(full.index(1), turn & 1)
    upcoming = _upcoming(tiles, held, CONSUMER + zero_too, 1 - HALF + zero_too, DIM)
    on_their_way: gl.constexpr = 1 if DIM > 64 else 2
    by_value, by_key, found = warpgroup_mma_wait(num_outstanding=on_their_way, deps=(by_value, by_key, found))
    mbarrier.arrive(free.index(HALF), count=1)
    if HALF == 1:
        _store_part(0, CONSUMER, found, dq_tiles, barriers, turn)
    elif turn > 0:
        _store_part(1, CONSUMER, found, dq_tiles, barriers, turn - 1)
    return upcoming, by_key, by_value


@gluon.jit
def _consume(
    CONSUMER: gl.constexpr, by_keys, by_values, tiles, barriers, scale, sizes,
    dtype: gl.constexpr, DIM: gl.constexpr, CAUSAL: gl.constexpr, ROTATED: gl.constexpr,
):  # fmt: skip
    """The gradients of 64 keys and their values, and half of the dimensions of that of queries."""
    key_tiles, value_tiles, _query_ring, _gradient_ring, _known, ds_tiles, dq_tiles = tiles
    _queries, keys, heads, group, pairs, blocks, diagonal, _rows, _processors = sizes
    keys_full, full, _free, ds_full, _dq_free = barriers
    program = gl.program_id(0)
    block = program % blocks
    first, count, down = pairs_of(program // blocks, block, sizes, CAUSAL, ROTATED)
    factor = scale * LOG2_E
    by_key = gl.zeros([ROWS, DIM], gl.float32, layout=product_layout(DIM))
    by_value = gl.zeros([ROWS, DIM], gl.float32, layout=product_layout(DIM))
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
    held = (_left(key_tiles, CONSUMER, DIM), _left(value_tiles, CONSUMER, DIM))
    upcoming = _upcoming(tiles, held, CONSUMER, 0, DIM)
    first_key = block * PAIR + CONSUMER * ROWS
    step = 0
    for turn in range(turns):
        pair = pair_at(step, first, count, down, pairs)
        for half in gl.static_range(2):
            upcoming, by_key, by_value = _half(
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
        found = _query_products(1, CONSUMER, ds_tiles, key_tiles, barriers, turns - 1, 0, DIM)
        found = warpgroup_mma_wait(num_outstanding=0, deps=(found,))
        _store_part(1, CONSUMER, found, dq_tiles, barriers, turns - 1)
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
                _consume,
                (0, by_keys, by_values, tiles, barriers, scale, sizes, dtype, DIM, CAUSAL, ROTATED),
            ),
            (
                _consume,
                (1, by_keys, by_values, tiles, barriers, scale, sizes, dtype, DIM, CAUSAL, ROTATED),
            ),
            (_load, (query, key, value, gradient, lse, mean, tiles, barriers, sizes, STAGES, CAUSAL, ROTATED)),
            (add_in_turn, (sums, turns, dq_tiles, barriers, sizes, DIM, CAUSAL, ROTATED, SUMS)),
        ],
        [4, 1, 1],
        [240, 24, 24],
    )  # fmt: skip
