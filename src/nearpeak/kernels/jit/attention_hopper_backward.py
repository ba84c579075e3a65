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

from nearpeak.kernels.jit.attention_hopper import ROWS, product_layout
from nearpeak.kernels.jit.attention_hopper_turns import PAIR, add_in_turn, pairs_of

LOG2_E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _load(
    query, key, value, gradient, tiles, barriers, sizes,
    STAGES: gl.constexpr, CAUSAL: gl.constexpr, ROTATED: gl.constexpr,
):  # fmt: skip
    """Copies the keys and values of this program, and queries and gradients, block by block."""
    key_tiles, value_tiles, query_ring, gradient_ring, _ds_tiles, _dq_tiles = tiles
    _queries, _keys, heads, group, pairs, blocks, diagonal, _rows = sizes
    keys_full, full, free, _ds_full, _ds_free, _dq_full, _dq_free = barriers
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
    first, count = pairs_of(block, pairs, blocks, diagonal, CAUSAL, ROTATED)
    done = 0
    for member in range(group):
        for step in range(2 * count):
            pair = first + step // 2
            if pair >= pairs:
                pair -= pairs
            slot = done % STAGES
            mbarrier.wait(free.index(slot), ((done // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(slot), query.block_type.nbytes + gradient.block_type.nbytes)
            place = [batch, head * group + member, pair * PAIR + (step % 2) * ROWS, 0]
            tma.async_copy_global_to_shared(query, place, full.index(slot), query_ring.index(slot))
            tma.async_copy_global_to_shared(gradient, place, full.index(slot), gradient_ring.index(slot))
            done += 1


@gluon.jit
def _query_products(
    HALF: gl.constexpr, CONSUMER: gl.constexpr, ds_tiles, key_tiles, barriers, turn, zero, DIM: gl.constexpr
):
    """This warpgroup's half of the dimensions of the gradient of 64 queries, on its way."""
    _keys_full, _full, _free, ds_full, _ds_free, _dq_full, _dq_free = barriers
    mbarrier.wait(ds_full.index(HALF), turn & 1)
    found = gl.zeros([ROWS, DIM // 2], gl.float32, layout=product_layout(DIM // 2))
    for part in gl.static_range(2):
        by_scores = ds_tiles.index(2 * HALF + part + zero).permute((1, 0))
        keys = key_tiles.index(part + zero).reshape([ROWS, DIM]).slice(CONSUMER * (DIM // 2), DIM // 2, dim=1)
        found = warpgroup_mma(by_scores, keys, found, use_acc=part == 1, is_async=True)
    return found


@gluon.jit
def _hand_over(HALF: gl.constexpr, CONSUMER: gl.constexpr, found, dq_tiles, barriers):
    """Gives a gradient of queries to the warp that writes it."""
    _keys_full, _full, _free, _ds_full, ds_free, dq_full, dq_free = barriers
    mbarrier.arrive(ds_free.index(HALF), count=1)
    mbarrier.wait(dq_free, 1 - HALF)
    dq_tiles.index(CONSUMER).store(found)
    fence_async_shared()
    mbarrier.arrive(dq_full, count=1)


@gluon.jit
def _half(
    HALF: gl.constexpr, MASKED: gl.constexpr, CONSUMER: gl.constexpr, by_key, by_value, tiles, barriers,
    lse, mean, row, turn, factor, first, keys, diagonal, dtype: gl.constexpr, DIM: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """Adds what 64 queries give to the gradients of keys and values, and hands over that of the 64 before."""
    key_tiles, value_tiles, query_ring, gradient_ring, ds_tiles, dq_tiles = tiles
    _keys_full, full, free, ds_full, ds_free, _dq_full, _dq_free = barriers
    layout: gl.constexpr = product_layout(64)
    left: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=product_layout(DIM), k_width=2)
    # 0, which the compiler does not know: it would keep every address in shared memory in a register
    zero = turn >> 30
    query = query_ring.index(HALF + zero).reshape([ROWS, DIM])
    gradient = gradient_ring.index(HALF + zero).reshape([ROWS, DIM])
    key = key_tiles.index(CONSUMER + zero).reshape([ROWS, DIM])
    value = value_tiles.index(CONSUMER + zero).reshape([ROWS, DIM])
    columns = gl.arange(0, ROWS, layout=gl.SliceLayout(0, layout))
    logarithms = gl.load(lse + HALF * ROWS + columns.to(gl.int64))
    none = gl.zeros([ROWS, ROWS], gl.float32, layout=layout)
    mbarrier.wait(full.index(HALF), turn & 1)
    scores = warpgroup_mma(key, query.permute((1, 0)), none, use_acc=False, is_async=True)
    by_weights = warpgroup_mma(value, gradient.permute((1, 0)), none, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(num_outstanding=1, deps=(scores,))
    weights = gl.exp2(scores * factor - logarithms[None, :])
    if MASKED:
        key_at = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
        seen = (key_at < keys)[:, None]
        if CAUSAL:
            last = row + HALF * ROWS + diagonal + columns
            seen = seen & (key_at[:, None] <= last[None, :])
        weights = gl.where(seen, weights, 0.0)
    means = gl.load(mean + HALF * ROWS + columns.to(gl.int64))
    by_value = warpgroup_mma(gl.convert_layout(weights.to(dtype), left), gradient, by_value, is_async=True)
    by_weights = warpgroup_mma_wait(num_outstanding=1, deps=(by_weights,))
    by_scores = (weights * (by_weights - means[None, :])).to(dtype)
    mbarrier.wait(ds_free.index(HALF), (turn & 1) ^ 1)
    ds_tiles.index(2 * HALF + CONSUMER).store(by_scores)
    fence_async_shared()
    mbarrier.arrive(ds_full.index(HALF), count=1)
    by_key = warpgroup_mma(gl.convert_layout(by_scores, left), query, by_key, is_async=True)
    if HALF == 1:
        found = _query_products(0, CONSUMER, ds_tiles, key_tiles, barriers, turn, zero, DIM)
        by_value, by_key, found = warpgroup_mma_wait(num_outstanding=0, deps=(by_value, by_key, found))
        mbarrier.arrive(free.index(HALF), count=1)
        _hand_over(0, CONSUMER, found, dq_tiles, barriers)
    else:
        if turn > 0:
            found = _query_products(1, CONSUMER, ds_tiles, key_tiles, barriers, turn - 1, zero, DIM)
            found = warpgroup_mma_wait(num_outstanding=0, deps=(found,))
            _hand_over(1, CONSUMER, found, dq_tiles, barriers)
        by_value, by_key = warpgroup_mma_wait(num_outstanding=0, deps=(by_value, by_key))
        mbarrier.arrive(free.index(HALF), count=1)
    return by_key, by_value


@gluon.jit
def _pairs(
    begin, end, MASKED: gl.constexpr, CONSUMER: gl.constexpr, by_key, by_value, tiles, barriers,
    lse, mean, head, first, turn, factor, sizes, dtype: gl.constexpr, DIM: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """Both halves of some of the pairs of blocks of one head."""
    _queries, keys, _heads, _group, pairs, blocks, diagonal, _rows = sizes
    first_key = gl.program_id(0) % blocks * PAIR + CONSUMER * ROWS
    for step in range(begin, end):
        pair = first + step
        if pair >= pairs:
            pair -= pairs
        row = pair * PAIR
        base = head.to(gl.int64) * (pairs * PAIR) + row
        for half in gl.static_range(2):
            by_key, by_value = _half(
                half, MASKED, CONSUMER, by_key, by_value, tiles, barriers, lse + base,
                mean + base, row, turn, factor, first_key, keys, diagonal, dtype, DIM, CAUSAL,
            )  # fmt: skip
        turn += 1
    return by_key, by_value, turn


@gluon.jit
def _consume(
    CONSUMER: gl.constexpr, by_keys, by_values, lse, mean, tiles, barriers, scale, sizes, strides,
    dtype: gl.constexpr, DIM: gl.constexpr, CAUSAL: gl.constexpr, ROTATED: gl.constexpr,
):  # fmt: skip
    """The gradients of 64 keys and their values, and half of the dimensions of that of queries."""
    key_tiles, _value_tiles, _query_ring, _gradient_ring, ds_tiles, dq_tiles = tiles
    _queries, keys, heads, group, pairs, blocks, diagonal, _rows = sizes
    batch_stride, head_stride, stride = strides
    keys_full = barriers[0]
    program = gl.program_id(0)
    block = program % blocks
    first, count = pairs_of(block, pairs, blocks, diagonal, CAUSAL, ROTATED)
    factor = scale * LOG2_E
    by_key = gl.zeros([ROWS, DIM], gl.float32, layout=product_layout(DIM))
    by_value = gl.zeros([ROWS, DIM], gl.float32, layout=product_layout(DIM))
    # pairs in which something is hidden are the first, those at the diagonal; all of them where keys end
    masked = 0
    if CAUSAL:
        beyond = gl.cdiv(gl.maximum(block * PAIR + PAIR - 1 - diagonal, 0), PAIR)
        masked = gl.minimum(gl.maximum(beyond - first, 0), count)
    if (block + 1) * PAIR > keys:
        masked = count
    mbarrier.wait(keys_full, 0)
    turn = 0
    for member in range(group):
        head = program // blocks * group + member
        by_key, by_value, turn = _pairs(
            0, masked, True, CONSUMER, by_key, by_value, tiles, barriers, lse, mean, head, first,
            turn, factor, sizes, dtype, DIM, CAUSAL,
        )  # fmt: skip
        by_key, by_value, turn = _pairs(
            masked, count, False, CONSUMER, by_key, by_value, tiles, barriers, lse, mean, head, first,
            turn, factor, sizes, dtype, DIM, CAUSAL,
        )  # fmt: skip
    if turn > 0:
        found = _query_products(1, CONSUMER, ds_tiles, key_tiles, barriers, turn - 1, 0, DIM)
        found = warpgroup_mma_wait(num_outstanding=0, deps=(found,))
        _hand_over(1, CONSUMER, found, dq_tiles, barriers)

    wide: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // DIM, DIM // 8], [4, 1], [1, 0])
    token = block * PAIR + CONSUMER * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, wide))
    column = gl.arange(0, DIM, layout=gl.SliceLayout(0, wide))
    key_heads = heads // group
    batch = program // blocks // key_heads
    head = program // blocks % key_heads
    base = batch.to(gl.int64) * batch_stride + head.to(gl.int64) * head_stride
    place = base + token.to(gl.int64)[:, None] * stride + column[None, :]
    there = (token < keys)[:, None]
    gl.store(by_keys + place, gl.convert_layout((by_key * scale).to(dtype), wide), mask=there)
    gl.store(by_values + place, gl.convert_layout(by_value.to(dtype), wide), mask=there)


@gluon.jit(do_not_specialize=["queries", "keys", "heads", "group", "pairs", "blocks", "diagonal", "rows"])
def attention_hopper_backward_kernel(
    by_keys, by_values, lse, mean, turns, query, key, value, gradient, sums, batch_stride, head_stride, stride, scale,
    queries, keys, heads, group, pairs, blocks, diagonal, rows,
    DIM: gl.constexpr, CAUSAL: gl.constexpr, ROTATED: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """Query, key, value, gradient and sums are descriptors; logarithms, to the base 2, and means have whole pairs."""
    dtype: gl.constexpr = query.dtype
    STAGES: gl.constexpr = 2  # a slot for each half of a pair
    key_tiles = gl.allocate_shared_memory(dtype, [2, 1, 1, ROWS, DIM], key.layout)
    value_tiles = gl.allocate_shared_memory(dtype, [2, 1, 1, ROWS, DIM], value.layout)
    query_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, ROWS, DIM], query.layout)
    gradient_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, ROWS, DIM], gradient.layout)
    ds_tiles = gl.allocate_shared_memory(dtype, [2 * STAGES, ROWS, ROWS], gl.NVMMASharedLayout(128, 16, rank=2))
    dq_tiles = gl.allocate_shared_memory(gl.float32, [2, ROWS, DIM // 2], sums.layout)
    keys_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ds_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ds_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    dq_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    dq_free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(keys_full, count=1)
    mbarrier.init(dq_full, count=2)
    mbarrier.init(dq_free, count=1)
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(free.index(slot), count=2)
        mbarrier.init(ds_full.index(slot), count=2)
        mbarrier.init(ds_free.index(slot), count=2)
    fence_async_shared()
    barriers = (keys_full, full, free, ds_full, ds_free, dq_full, dq_free)
    tiles = (key_tiles, value_tiles, query_ring, gradient_ring, ds_tiles, dq_tiles)
    sizes = (queries, keys, heads, group, pairs, blocks, diagonal, rows)
    strides = (batch_stride, head_stride, stride)
    gl.warp_specialize(
        [
            (
                _consume,
                (0, by_keys, by_values, lse, mean, tiles, barriers, scale, sizes, strides, dtype, DIM, CAUSAL, ROTATED),
            ),
            (
                _consume,
                (1, by_keys, by_values, lse, mean, tiles, barriers, scale, sizes, strides, dtype, DIM, CAUSAL, ROTATED),
            ),
            (_load, (query, key, value, gradient, tiles, barriers, sizes, STAGES, CAUSAL, ROTATED)),
            (add_in_turn, (sums, turns, dq_tiles, barriers, sizes, DIM, CAUSAL, ROTATED, SUMS)),
        ],
        [4, 1, 1],
        [240, 24, 24],
    )  # fmt: skip
