"""A dynamic tile scheduler for persistent Gluon kernels: one warp draws tiles from a global counter and publishes them in shared memory.

Where tiles take different times, a static schedule lets programs drift apart and end at different times: of two tiles that read
the same matrix one is then read long after the other, from DRAM again. Drawn in order, neighboring tiles start at nearly the
same time, and programs end within one tile of each other.

The counter is one of `grid_counters`. A program begins with the tile of its own number and draws the rest until a number is
beyond the last tile. As many numbers are drawn as there are tiles; the program with the last one resets the counter to 0.

A tile is published as four numbers; the last one is negative where there are no more tiles.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

SLOTS = gl.constexpr(2)
"""Tiles that may have been told and not yet read."""
SLOT_NUMBERS = gl.constexpr(4)
STEPS_AHEAD = gl.constexpr(3)
"""Steps of a tile that are still to be loaded when the next one is drawn: as long as an atomic addition takes, and no
longer, as who draws early takes tiles from those who are done before."""


@gluon.constexpr_function
def lanes_layout(warps):
    """One number for each thread of a warp, the same in all warps."""
    return gl.BlockedLayout([1], [32], [warps], [0])


@gluon.jit
def allocate_tile_slots(READERS: gl.constexpr):
    """Where tiles are told, to so many partitions: memory, and barriers for what is told and read."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    slots = gl.allocate_shared_memory(gl.int32, [SLOTS * SLOT_NUMBERS, 1], layout)
    told = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    read = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(told.index(slot), count=1)
        mbarrier.init(read.index(slot), count=READERS)
    return slots, told, read


@gluon.jit
def draw_tile_number(counter):
    """A number that nobody else draws, which is on its way: the first thread of the warp will have it."""
    lane = gl.arange(0, 32, layout=lanes_layout(1))
    one = gl.full([32], 1, gl.int32, layout=lanes_layout(1))
    return gl.atomic_add(counter + lane, one, mask=lane == 0, sem="relaxed")


@gluon.jit
def resolve_tile_number(number):
    """The tile of a number that was drawn, for all threads of the warp."""
    lane = gl.arange(0, 32, layout=lanes_layout(1))
    return gl.max(gl.where(lane == 0, number, 0), 0) + gl.num_programs(0)


@gluon.jit
def reset_tile_counter(counter, tile, tiles):
    """Sets the counter back, if what was drawn last by this program was the last of all."""
    if tile == tiles + gl.num_programs(0) - 1:
        gl.store(counter, 0)


@gluon.jit
def publish_tile(slots_of_tiles, turn, first, second, third, fourth):
    """What the next tile is, for the other partitions."""
    slots, told, read = slots_of_tiles
    slot = turn % SLOTS
    none = gl.zeros([1], gl.int32, layout=lanes_layout(1))
    mbarrier.wait(read.index(slot), ((turn // SLOTS) & 1) ^ 1)
    slots.index(SLOT_NUMBERS * slot).store(none + first)
    slots.index(SLOT_NUMBERS * slot + 1).store(none + second)
    slots.index(SLOT_NUMBERS * slot + 2).store(none + third)
    slots.index(SLOT_NUMBERS * slot + 3).store(none + fourth)
    gl.thread_barrier()  # one thread says so for all
    mbarrier.arrive(told.index(slot), count=1)


@gluon.jit
def receive_tile(slots_of_tiles, turn):
    """What the tile of a turn is."""
    slots, told, read = slots_of_tiles
    slot = turn % SLOTS
    layout: gl.constexpr = lanes_layout(gl.num_warps())
    mbarrier.wait(told.index(slot), (turn // SLOTS) & 1)
    first = gl.max(slots.index(SLOT_NUMBERS * slot).load(layout), 0)
    second = gl.max(slots.index(SLOT_NUMBERS * slot + 1).load(layout), 0)
    third = gl.max(slots.index(SLOT_NUMBERS * slot + 2).load(layout), 0)
    fourth = gl.max(slots.index(SLOT_NUMBERS * slot + 3).load(layout), 0)
    gl.thread_barrier()  # one thread says so for all
    mbarrier.arrive(read.index(slot), count=1)
    return first, second, third, fourth
