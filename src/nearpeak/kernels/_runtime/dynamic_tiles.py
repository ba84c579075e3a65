"""A dynamic tile scheduler for persistent Gluon kernels: one warp draws tiles from a global counter and publishes them
to the other warps in shared memory.

Tiles may take different times. With a static schedule programs then drift apart and end at different times: of two
tiles that read the same matrix one is read long after the other, from DRAM again. Drawn in order, neighboring tiles
start at nearly the same time, and programs end within one tile of each other.

The counter is one of `grid_counters`. A program begins with the tile of its own number and draws the rest until a
number is beyond the last tile. As many numbers are drawn as there are tiles; the program that draws the last one resets
the counter to 0.

A tile is published as four numbers; the last one is negative if there are no more tiles.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

SLOTS = gl.constexpr(2)
"""Tiles that may be published and not yet received."""
SLOT_NUMBERS = gl.constexpr(4)
STEPS_AHEAD = gl.constexpr(3)
"""Steps of a tile that are still to be loaded when the next tile is drawn: enough to hide the atomic addition, and no
more, since a program that draws early takes tiles from those that finish before it."""


@gluon.constexpr_function
def lanes_layout(warps):
    """One number per thread of a warp, the same in all warps."""
    return gl.BlockedLayout([1], [32], [warps], [0])


@gluon.jit
def allocate_tile_slots(READERS: gl.constexpr):
    """Shared memory for published tiles, and barriers for those published and received, for so many partitions."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    slots = gl.allocate_shared_memory(gl.int32, [SLOTS * SLOT_NUMBERS, 1], layout)
    published = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    received = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(published.index(slot), count=1)
        mbarrier.init(received.index(slot), count=READERS)
    return slots, published, received


@gluon.jit
def draw_tile_number(counter):
    """Starts drawing the next number. It arrives in the first thread of the warp."""
    lane = gl.arange(0, 32, layout=lanes_layout(1))
    one = gl.full([32], 1, gl.int32, layout=lanes_layout(1))
    return gl.atomic_add(counter + lane, one, mask=lane == 0, sem="relaxed")


@gluon.jit
def resolve_tile_number(number):
    """The tile of a drawn number, in all threads of the warp."""
    lane = gl.arange(0, 32, layout=lanes_layout(1))
    return gl.max(gl.where(lane == 0, number, 0), 0) + gl.num_programs(0)


@gluon.jit
def reset_tile_counter(counter, tile, tiles):
    """Resets the counter, if this program drew the last number of all."""
    if tile == tiles + gl.num_programs(0) - 1:
        gl.store(counter, 0)


@gluon.jit
def publish_tile(tile_slots, turn, first, second, third, fourth):
    """Publishes the next tile to the other partitions."""
    slots, published, received = tile_slots
    slot = turn % SLOTS
    zero = gl.zeros([1], gl.int32, layout=lanes_layout(1))
    mbarrier.wait(received.index(slot), ((turn // SLOTS) & 1) ^ 1)
    slots.index(SLOT_NUMBERS * slot).store(zero + first)
    slots.index(SLOT_NUMBERS * slot + 1).store(zero + second)
    slots.index(SLOT_NUMBERS * slot + 2).store(zero + third)
    slots.index(SLOT_NUMBERS * slot + 3).store(zero + fourth)
    gl.thread_barrier()  # one thread arrives for all
    mbarrier.arrive(published.index(slot), count=1)


@gluon.jit
def receive_tile(tile_slots, turn):
    """Waits for the tile of a turn."""
    slots, published, received = tile_slots
    slot = turn % SLOTS
    layout: gl.constexpr = lanes_layout(gl.num_warps())
    mbarrier.wait(published.index(slot), (turn // SLOTS) & 1)
    first = gl.max(slots.index(SLOT_NUMBERS * slot).load(layout), 0)
    second = gl.max(slots.index(SLOT_NUMBERS * slot + 1).load(layout), 0)
    third = gl.max(slots.index(SLOT_NUMBERS * slot + 2).load(layout), 0)
    fourth = gl.max(slots.index(SLOT_NUMBERS * slot + 3).load(layout), 0)
    gl.thread_barrier()  # one thread arrives for all
    mbarrier.arrive(received.index(slot), count=1)
    return first, second, third, fourth
