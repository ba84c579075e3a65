"""Where the keys and values are that a program of `decode_attention` reads.

A program takes a part of the keys of one head and one sequence, for all queries that see them. Which part follows from
the length of the sequence, which only the device knows: the keys of a sequence are dealt out evenly, and programs for
which none are left end at once.

Strides of tokens and of pages are constants: then most of an address is known to the compiler, and what is left is one
addition in 64 bits for a whole block, or a product for each token where each has a page of its own.
"""

from __future__ import annotations

import triton
import triton.language as tl

_GRAIN = tl.constexpr(16)
_FAR = tl.constexpr(2**31)


@triton.jit
def own_keys(
    length, capacity, window, NEW: tl.constexpr, HAS_WINDOW: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The first key of this program, the end of its keys, and how many programs have some: at least one."""
    # where parts begin, which addresses within a block do not depend on
    GRAIN: tl.constexpr = BLOCK if PAGE > 0 and PAGE % BLOCK == 0 else PAGE if PAGE > _GRAIN else _GRAIN
    end = tl.minimum(length, capacity)
    begin = tl.zeros_like(end)
    if HAS_WINDOW:
        begin = tl.maximum(length - NEW - window, 0) // GRAIN * GRAIN
    keys = tl.maximum(end - begin, 0)
    splits = tl.num_programs(1)
    each = ((keys + (GRAIN - 1)) // GRAIN + splits - 1) // splits * GRAIN
    each = tl.maximum(each, BLOCK)
    first = begin + tl.program_id(1) * each
    return first, tl.minimum(first + each, end), tl.maximum((keys + each - 1) // each, 1)


@triton.jit
def pages_of(table, first, end, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """The pages of a block of keys: one for all of them where pages consist of blocks."""
    if PAGE == 0:
        page = 0
    elif PAGE % BLOCK == 0:
        page = tl.load(table + first // PAGE, mask=first < end, other=0)
    elif BLOCK % PAGE == 0:
        own = tl.arange(0, BLOCK)
        page = tl.load(table + first // PAGE + own // PAGE, mask=own < end - first, other=0)
    else:
        key = first + tl.arange(0, BLOCK)
        page = tl.load(table + key // PAGE, mask=key < end, other=0)
    return page


@triton.jit
def near(table, first, end, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """The same `end`, known once the pages of the first blocks are in the nearest cache: on the way there together.

    The first loads would otherwise wait for the page of the first block, then for that of the second, and so on.
    """
    if PAGE > 0:
        NUMBER: tl.constexpr = 4 if PAGE >= BLOCK else 4 * BLOCK // PAGE if BLOCK % PAGE == 0 else 4 * BLOCK
        entry = first // PAGE + tl.arange(0, NUMBER)
        page = tl.load(table + entry, mask=(first < end) & (entry <= (end - 1) // PAGE), other=0)
        end = tl.where(tl.min(page, 0) == -(2**31), first, end)  # of what is no page
    return end


@triton.jit
def within(TOKEN: tl.constexpr, STEP: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """Offsets of numbers within a block of keys, [BLOCK, WIDTH]: what is the same for all blocks."""
    own, column = tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    if BLOCK * TOKEN + WIDTH * STEP >= _FAR:
        own, column = own.to(tl.int64), column.to(tl.int64)
    if PAGE == 0 or PAGE % BLOCK == 0:
        rows = own * TOKEN
    elif BLOCK % PAGE == 0:
        rows = own % PAGE * TOKEN
    else:
        rows = own * 0
    return rows[:, None] + (column * STEP)[None, :]


@triton.jit
def starts(
    cache, page, first, TOKEN: tl.constexpr, PAGE_STRIDE: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Pointers that offsets `within` a block are added to: one, or [BLOCK, 1]."""
    if PAGE == 0:
        start = cache + tl.cast(first, tl.int64) * TOKEN
    elif PAGE % BLOCK == 0:
        start = cache + page.to(tl.int64) * PAGE_STRIDE + tl.cast(first % PAGE, tl.int64) * TOKEN
    elif BLOCK % PAGE == 0:
        start = cache + (page.to(tl.int64) * PAGE_STRIDE)[:, None]
    else:
        place = (first + tl.arange(0, BLOCK)) % PAGE
        start = cache + (page.to(tl.int64) * PAGE_STRIDE + place.to(tl.int64) * TOKEN)[:, None]
    return start
