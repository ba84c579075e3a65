"""Products of rows with the matrices of their experts, for any GPU: a tile of the result at a time.

How many rows an expert has is known on the device alone. So a kernel before, `group_kernel`, writes a list of tiles of
rows, and programs go through as many as there are; see `groups_size` of `operations.grouped_product` for the list.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nearpeak.kernels.jit.activations import activate
from nearpeak.kernels.jit.product_portable import add_float32
from nearpeak.kernels.policy import INTERPRETED

TOGETHER = tl.constexpr(8)
"""Tiles of rows of one expert that are taken by the same columns, one after another, while the matrix is in cache."""
ENTRY = tl.constexpr(8)
"""Numbers of an entry of the list: 5 are used, and no entry lies on two lines of the cache."""
BLOCK = tl.constexpr(128)
"""Columns and rows of a matrix in 8 bits, and columns of a row, that share a scale."""
WIDENS = tl.constexpr(INTERPRETED)
"""The interpreter multiplies no numbers of 8 bits."""


@triton.jit
def group_kernel(counts, groups, experts, rows, entries, HEIGHT: tl.constexpr, EXPERTS: tl.constexpr):
    """Where the rows of one expert begin, and its tiles; the one behind the last has the rows of nobody."""
    expert = tl.program_id(0)
    at = tl.arange(0, EXPERTS)
    given = tl.load(counts + at, mask=at < experts, other=0).to(tl.int32)
    given = tl.maximum(given, 0)
    ends = tl.minimum(tl.cumsum(given, 0), rows)
    starts = tl.minimum(ends, tl.cumsum(given, 0) - given)
    begin = tl.max(tl.where(at < expert, ends, 0), 0)
    end = tl.max(tl.where(at == expert, ends, 0), 0)
    if expert == experts:
        end = rows
    tl.store(groups + expert, begin)
    first = tl.sum(tl.where(at < expert, tl.cdiv(ends - starts, HEIGHT), 0), 0)
    own = tl.cdiv(end - begin, HEIGHT)
    number = tl.where(expert == experts, -1, expert)
    if expert == experts:
        tl.store(groups + experts + 1, first + own)
    for base in range(0, own, 32):
        tile = base + tl.arange(0, 32)[:, None]
        leader = tile // TOGETHER * TOGETHER
        what = tl.arange(0, ENTRY)[None, :]
        value = tl.where(what == 0, number, tl.zeros([32, ENTRY], tl.int32))
        value = tl.where(what == 1, first + leader, value)
        value = tl.where(what == 2, tl.minimum(own - leader, TOGETHER), value)
        value = tl.where(what == 3, begin + leader * HEIGHT, value)
        value = tl.where(what == 4, end, value)
        tl.store(groups + entries + (first + tile) * ENTRY + what, value, mask=tile < own)


@triton.jit
def find_tile(groups, tile, column_tiles, entries, HEIGHT: tl.constexpr):
    """The expert of a tile, -1 for nobody, its first row, where the rows of the expert end, and its columns."""
    entry = groups + entries + tile // column_tiles * ENTRY
    expert = tl.load(entry)
    leader = tl.load(entry + 1)
    count = tl.load(entry + 2)
    row = tl.load(entry + 3)
    end = tl.load(entry + 4)
    place = tile - leader * column_tiles
    return expert, row + place % count * HEIGHT, end, place // count


@triton.jit
def _multiply(given, factors, total):
    if WIDENS and given.dtype.primitive_bitwidth == 8:
        given = given.to(tl.float32)
        factors = factors.to(tl.float32)
    return tl.dot(given, factors, total)


@triton.jit
def _multiply_add(given, factors, total, rest):
    """The product added to the sum, and the rest, which sums of float32 alone have."""
    if given.dtype == tl.float32:
        total, rest = add_float32(given, factors, total, rest)
    else:
        total = _multiply(given, factors, total)
    return total, rest


@triton.jit
def _load_columns(pointer, column, columns, at, depth):
    return tl.load(pointer, mask=(at < depth)[:, None] & (column < columns)[None, :], other=0.0)


@triton.jit
def grouped_kernel(
    rows, sources, weight, groups, result, kept, row_scales, weight_scales, experts, columns, depth, entries,
    row_stride, expert_stride, column_stride, depth_stride, scale_row_stride, scale_expert_stride, scale_column_stride,
    NAME: tl.constexpr, SCALES: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Tiles of the result. NAME is an activation, where the result is that of the first columns times the second.

    `sources`, if any, has for each row which of `rows` it is, and with it that of `row_scales`.

    SCALES: "" for none, "whole" for one of each row and each expert, "blocks" for one of each 128 of the depth, of a
    row, and of 128 columns of a matrix.
    """
    column_tiles = tl.cdiv(columns, WIDTH)
    tiles = tl.load(groups + experts + 1) * column_tiles
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        expert, first, end, column_tile = find_tile(groups, tile, column_tiles, entries, HEIGHT)
        row = first + tl.arange(0, HEIGHT)
        column = column_tile * WIDTH + tl.arange(0, WIDTH)
        at = tl.arange(0, DEPTH)
        source = row
        if sources is not None:
            source = tl.load(sources + row, mask=row < end, other=0)
        given = rows + (source.to(tl.int64) * row_stride)[:, None] + at[None, :]
        own = weight + tl.maximum(expert, 0).to(tl.int64) * expert_stride
        matrix = own + at.to(tl.int64)[:, None] * depth_stride + (column.to(tl.int64) * column_stride)[None, :]
        second = matrix + tl.cast(columns, tl.int64) * column_stride
        total = tl.zeros([HEIGHT, WIDTH], tl.float32)
        other = tl.zeros([HEIGHT, WIDTH], tl.float32)
        rest = tl.zeros([HEIGHT, WIDTH], tl.float32)
        other_rest = tl.zeros([HEIGHT, WIDTH], tl.float32)
        for begin in range(0, tl.where(expert < 0, 0, depth), DEPTH):
            left = depth - begin
            values = tl.load(given, mask=(row < end)[:, None] & (at < left)[None, :], other=0.0)
            factors = _load_columns(matrix, column, columns, at, left)
            if SCALES == "blocks":
                by_row = tl.load(row_scales + source.to(tl.int64) * scale_row_stride + begin // BLOCK, mask=row < end)
                own_scales = weight_scales + expert.to(tl.int64) * scale_expert_stride + begin // BLOCK
                by_column = tl.load(own_scales + column // BLOCK * scale_column_stride, mask=column < columns)
                part = _multiply(values, factors, tl.zeros([HEIGHT, WIDTH], tl.float32))
                total += part * by_row[:, None] * by_column[None, :]
            else:
                total, rest = _multiply_add(values, factors, total, rest)
            if NAME != "":
                factors = _load_columns(second, column, columns, at, left)
                if SCALES == "blocks":
                    behind = (column + columns) // BLOCK * scale_column_stride
                    by_column = tl.load(own_scales + behind, mask=column < columns)
                    part = _multiply(values, factors, tl.zeros([HEIGHT, WIDTH], tl.float32))
                    other += part * by_row[:, None] * by_column[None, :]
                else:
                    other, other_rest = _multiply_add(values, factors, other, other_rest)
            given += DEPTH
            matrix += DEPTH * depth_stride
            second += DEPTH * depth_stride
        inside = (row < end)[:, None] & (column < columns)[None, :]
        if SCALES == "whole":
            scale = tl.load(row_scales + source.to(tl.int64) * scale_row_stride, mask=row < end, other=0.0)
            scale *= tl.load(weight_scales + tl.maximum(expert, 0) * scale_expert_stride)
            total *= scale[:, None]
            other *= scale[:, None]
        if NAME != "":
            if kept is not None:
                line = kept + (row.to(tl.int64) * 2 * columns)[:, None] + column[None, :]
                tl.store(line, total.to(result.dtype.element_ty), mask=inside)
                tl.store(line + columns, other.to(result.dtype.element_ty), mask=inside)
            total = activate(total, NAME) * other
        place = result + (row.to(tl.int64) * columns)[:, None] + column[None, :]
        tl.store(place, total.to(result.dtype.element_ty), mask=inside)


@triton.jit
def grouped_gradient_kernel(
    gradient, rows, sources, groups, result, experts, columns, depth, gradient_stride, row_stride,
    GATHERED: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The gradient of matrices: of each expert, the gradients of its rows by the rows. Zeros for one without rows.

    GATHERED, "gradient" or "rows", are those that `sources` name.
    """
    down = tl.cdiv(columns, COLUMNS)
    across = tl.cdiv(depth, DEPTH)
    for tile in range(tl.program_id(0), experts * down * across, tl.num_programs(0)):
        expert = tile // (down * across)
        column = tile % (down * across) // across * COLUMNS + tl.arange(0, COLUMNS)
        at = tile % across * DEPTH + tl.arange(0, DEPTH)
        begin = tl.load(groups + expert)
        end = tl.load(groups + expert + 1)
        total = tl.zeros([COLUMNS, DEPTH], tl.float32)
        rest = tl.zeros([COLUMNS, DEPTH], tl.float32)
        for first in range(begin, end, ROWS):
            row = first + tl.arange(0, ROWS)
            source = row
            if GATHERED != "":
                source = tl.load(sources + row, mask=row < end, other=0)
            by_row = (source if GATHERED == "gradient" else row).to(tl.int64) * gradient_stride
            upstream = gradient + by_row[:, None] + column[None, :]
            given = rows + ((source if GATHERED == "rows" else row).to(tl.int64) * row_stride)[:, None] + at[None, :]
            inside = (row < end)[:, None]
            one = tl.load(upstream, mask=inside & (column < columns)[None, :], other=0.0)
            other = tl.load(given, mask=inside & (at < depth)[None, :], other=0.0)
            total, rest = _multiply_add(tl.trans(one), other, total, rest)
        place = result + ((expert.to(tl.int64) * columns + column) * depth)[:, None] + at[None, :]
        inside = (column < columns)[:, None] & (at < depth)[None, :]
        tl.store(place, total.to(result.dtype.element_ty), mask=inside)
