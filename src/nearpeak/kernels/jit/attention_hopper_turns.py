"""Which queries a program of the backward pass has when, and how it adds its parts of their gradient, each in its turn.

So that sums are the same in every run, parts are added in a fixed order: for each pair of blocks of queries there is a
counter of the parts that are there. There may be several sums of each pair, which are added up at the end, so that a
turn comes sooner. Which queries a program has first, and the order of turns, are such that programs of one head are
hardly ever at the same queries, and that the turn of each comes when the program before it has passed:

- Where all see all queries, programs begin at different ones, and go round.
- In causal attention, programs that begin together start at their diagonal, and go to later queries. If all processors
  have programs of one head, these end one after the other, and those of the next head begin, the ones with the most
  queries first: they go from the last queries to their diagonal. They end together, and so on.
- Where a head has more programs than run at a time, a program may wait only for those that have begun before it: the
  order is that of their numbers.
"""

from __future__ import annotations

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from nearpeak.kernels.jit.attention_hopper import ROWS

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
def pairs_of(head, block, sizes, CAUSAL: gl.constexpr, ROTATED: gl.constexpr):
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
def pair_at(step, first, count, down, pairs):
    """The pair of blocks of queries that a program has in a step."""
    pair = first + (step if down == 0 else count - 1 - step)
    return pair - pairs if pair >= pairs else pair


@gluon.jit
def turn_of(block, pair, down, sizes, CAUSAL: gl.constexpr, ROTATED: gl.constexpr, SUMS: gl.constexpr):
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
def add_in_turn(
    sums, turns, dq_tiles, barriers, sizes, DIM: gl.constexpr, CAUSAL: gl.constexpr, ROTATED: gl.constexpr,
    SUMS: gl.constexpr,
):  # fmt: skip
    """Has parts of the queries' gradient added, each pair of blocks in its turn; the first of a sum is written."""
    _queries, _keys, _heads, group, pairs, blocks, _diagonal, rows, _processors = sizes
    _keys_full, _full, _free, ds_full, dq_free = barriers
    program = gl.program_id(0)
    block = program % blocks
    head = program // blocks
    first, count, down = pairs_of(head, block, sizes, CAUSAL, ROTATED)
    # a part is there when the gradients of scores of the turn after are: those of the first turn tell of nothing
    # and nothing is stored before they were seen, so that this warp is never a whole turn of barriers late
    for half in gl.static_range(2):
        mbarrier.wait(ds_full.index(half), 0, pred=group * count > 0)
        mbarrier.arrive(dq_free.index(half), count=1, pred=group * count > 0)
    done = 0
    for member in range(group):
        for step in range(count):
            pair = pair_at(step, first, count, down, pairs)
            place = (head * group + member) * pairs + pair
            number, before = turn_of(block, pair, down, sizes, CAUSAL, ROTATED, SUMS)
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
