"""The forward kernel of the norms over parts of rows in shared memory, in Gluon: see `parts`."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from nearpeak.kernels.jit.launch import launch
from nearpeak.kernels.jit.parts import plan
from nearpeak.kernels.jit.parts_rows import (
    FULL,
    REGISTERS,
    SHARED,
    SHIFTED,
    as_float32,
    bounds,
    chunk_of,
    cleaned,
    clear,
    copy_row,
    folded,
    hold,
    inside,
    is_edge,
    look,
    parameter_float32,
    place,
    read_parameters,
    room,
    tell,
    ticket,
    told,
    unfolded,
    words_of,
    write,
)
from nearpeak.kernels.jit.row_starts import Rows

_UNSPECIALISED = ["rows", "columns", "x_stride", "residual_stride", "part", "parts", "groups"]
_AHEAD = 2
"""Chunks of weights that are read before they are used."""


@gluon.jit
def value_of(ring, added, slot, c: gl.constexpr, dtype: gl.constexpr, FORM: gl.constexpr):
    """A chunk of what is normalised: of the sum, as it is written, where there is an addition."""
    values = chunk_of(ring, slot, c, FORM)
    if added is not None:
        values = as_float32((values + chunk_of(added, slot, c, FORM)).to(dtype))
    return values


@gluon.jit
def squares_of(ring, added, total_row, slot, begin, shift, stop, FORM: gl.constexpr):
    """The sum of squares of a part. Where there is an addition, its sum is written."""
    squares = gl.zeros([FORM[3]], gl.float32, FORM[4])
    for c in gl.static_range(FORM[2]):
        values = value_of(ring, added, slot, c, total_row.dtype.element_ty, FORM)
        if added is not None:
            write(total_row, values, c, begin, shift, stop, FORM)
        if FORM[0] == SHIFTED:  # otherwise there is 0
            values = cleaned(values, 0.0, c, begin, shift, stop, FORM)
        squares += values * values
    return gl.sum(squares, 0)


@gluon.jit
def together(count, mean, squares, other_count, other_mean, other_squares):
    """Counts, means and sums of squares of differences from these, of two sets of numbers as one."""
    total = count + other_count
    share = other_count / gl.maximum(total, 1.0)
    moved = other_mean - mean
    return total, mean + moved * share, squares + other_squares + moved * moved * (count * share)


@gluon.jit
def alike_together(count, mean, squares, other_count, other_mean, other_squares):
    """The same of as many each, as the threads of a program have: without a division."""
    moved = other_mean - mean
    return count + other_count, (mean + other_mean) * 0.5, squares + other_squares + moved * moved * (count * 0.5)


@gluon.jit
def centred_of(ring, added, total_row, slot, begin, shift, stop, FORM: gl.constexpr):
    """The mean of a part and the sum of squares of differences from it, in one pass; of an addition the sum is written.

    Each thread takes the mean of its first numbers, c, off all others. That loses few digits: where c is the mean of a
    share f of the numbers, its square distance from the mean of all is at most their variance divided by f.
    """
    dtype: gl.constexpr = total_row.dtype.element_ty
    counts = gl.zeros([FORM[3]], gl.float32, FORM[4])
    for c in gl.static_range(FORM[2]):
        if is_edge(c, FORM):
            counts += inside(c, begin, shift, stop, FORM).to(gl.float32)
        else:
            counts += 1.0
    count = folded(counts, FORM)
    values = value_of(ring, added, slot, 0, dtype, FORM)
    if is_edge(0, FORM):
        some = gl.maximum(folded(inside(0, begin, shift, stop, FORM).to(gl.float32), FORM), 1.0)
        near = gl.div_rn(folded(cleaned(values, 0.0, 0, begin, shift, stop, FORM), FORM), some)
    else:
        near = folded(values, FORM) * (1.0 / FORM[1])
    close = unfolded(near, FORM)
    sums = gl.zeros([FORM[3]], gl.float32, FORM[4])
    squares = gl.zeros([FORM[3]], gl.float32, FORM[4])
    for c in gl.static_range(FORM[2]):
        if c > 0:
            values = value_of(ring, added, slot, c, dtype, FORM)
        if added is not None:
            write(total_row, values, c, begin, shift, stop, FORM)
        values = cleaned(values - close, 0.0, c, begin, shift, stop, FORM)
        sums += values
        squares += values * values
    distance = folded(sums, FORM)
    if FORM[0] == FULL:
        moved = distance * (1.0 / (FORM[1] * FORM[2]))
        rest = gl.maximum(folded(squares, FORM) - distance * moved, 0.0)
        _count, mean, all_squares = gl.reduce((count, near + moved, rest), 0, alike_together)
    else:
        moved = gl.div_rn(distance, gl.maximum(count, 1.0))
        rest = gl.maximum(folded(squares, FORM) - distance * moved, 0.0)
        _count, mean, all_squares = gl.reduce((count, near + moved, rest), 0, together)
    return mean, all_squares


@gluon.jit
def merged(means, squares, part, parts, shift, columns, PARTS: gl.constexpr, FORM: gl.constexpr):
    """The mean of a row and the sum of squares of differences from it, by those of its parts."""
    each = gl.arange(0, PARTS, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    begin, end = bounds(each, part, FORM)
    counts = gl.minimum(end, shift + columns) - gl.maximum(begin, shift)
    counts = gl.where(each < parts, gl.maximum(counts, 0), 0).to(gl.float32)
    mean = gl.div_rn(gl.sum(means * counts, 0), columns.to(gl.float32))
    return mean, gl.sum(squares + counts * (means - mean) * (means - mean), 0)


@gluon.jit(do_not_specialize=_UNSPECIALISED)
def norm_forward_parts(
    x, residual, weight, bias, result, total, statistics, words, rows, columns, x_stride, residual_stride, eps, offset,
    part, parts, groups, CENTRED: gl.constexpr, WHERE: gl.constexpr, AHEAD: gl.constexpr,
    RING: gl.constexpr, PARTS: gl.constexpr,
    MODE: gl.constexpr, VECTOR: gl.constexpr, CHUNKS: gl.constexpr, CHUNK: gl.constexpr,
):  # fmt: skip
    FORM: gl.constexpr = (MODE, VECTOR, CHUNKS, CHUNK, gl.BlockedLayout([VECTOR], [32], [gl.num_warps()], [0]))
    number = ticket(words, PARTS)
    group = number // parts
    own = number % parts
    begin, end = bounds(own, part, FORM)
    turns = gl.cdiv(rows - group, groups)
    ring = room(x.dtype.element_ty, RING, FORM)
    added = None
    if residual is not None:
        added = room(residual.dtype.element_ty, RING, FORM)
    held_weight = None
    held_bias = None
    if WHERE == SHARED:  # copied with the first row
        if weight is not None:
            held_weight = hold(weight, begin, gl.minimum(end, columns), FORM)
        if bias is not None:
            held_bias = hold(bias, begin, gl.minimum(end, columns), FORM)
    if WHERE == REGISTERS:
        factors = read_parameters((), weight, None, begin, 0, CHUNKS, 0, gl.minimum(end, columns), WHERE, FORM)
        levels = read_parameters((), bias, None, begin, 0, CHUNKS, 0, gl.minimum(end, columns), WHERE, FORM)
    for turn in gl.static_range(RING - 2):
        if turn < turns:
            copy_row(x, ring, group + turn * groups, turn, begin, end, columns, x_stride, RING, FORM)
            if residual is not None:
                copy_row(residual, added, group + turn * groups, turn, begin, end, columns, residual_stride, RING, FORM)
        async_copy.commit_group()
    next_mean = 0.0
    next_squares = 0.0
    for turn in range(-1, turns):
        row = group + turn * groups
        if turn + RING - 1 < turns:
            ahead = row + (RING - 1) * groups
            copy_row(x, ring, ahead, turn + RING - 1, begin, end, columns, x_stride, RING, FORM)
            if residual is not None:
                copy_row(residual, added, ahead, turn + RING - 1, begin, end, columns, residual_stride, RING, FORM)
        async_copy.commit_group()
        mean = next_mean
        squares = next_squares
        there = words_of(words, group, turn, PARTS)
        if PARTS > 1:
            found_squares = look(there + PARTS, PARTS)
            if CENTRED:
                found_means = look(there, PARTS)
        async_copy.wait_group(RING - 2)
        if turn + 1 < turns:
            _start, written, shift = place(row + groups, columns, x_stride, FORM)
            slot = (turn + 1) % RING
            stop = gl.minimum(end, shift + columns)
            if CENTRED:
                next_mean, next_squares = centred_of(ring, added, total + written, slot, begin, shift, stop, FORM)
            else:
                next_squares = squares_of(ring, added, total + written, slot, begin, shift, stop, FORM)
            if PARTS > 1:
                mine = words_of(words, group, turn + 1, PARTS) + own
                tell(mine + PARTS, next_squares, turn + 2)
                if CENTRED:
                    tell(mine, next_mean, turn + 2)
        if turn >= 0:
            _start, written, shift = place(row, columns, x_stride, FORM)
            stop = gl.minimum(end, shift + columns)
            if WHERE != REGISTERS:
                factors = read_parameters((), weight, held_weight, begin, 0, AHEAD, shift, stop, WHERE, FORM)
                levels = read_parameters((), bias, held_bias, begin, 0, AHEAD, shift, stop, WHERE, FORM)
            if PARTS > 1:
                all_squares = told(there + PARTS, found_squares, parts, turn + 1, PARTS)
                if CENTRED:
                    means = told(there, found_means, parts, turn + 1, PARTS)
                    mean, squares = merged(means, all_squares, part, parts, shift, columns, PARTS, FORM)
                else:
                    squares = gl.sum(all_squares, 0)
            rstd = gl.rsqrt(squares / columns + eps.to(gl.float32))
            if own == 0:
                gl.store(statistics + row, rstd)
                if CENTRED:
                    gl.store(statistics + rows + row, mean)
            for c in gl.static_range(CHUNKS):
                if WHERE != REGISTERS:
                    factors = read_parameters(
                        factors, weight, held_weight, begin, c + AHEAD, c + AHEAD + 1, shift, stop, WHERE, FORM
                    )
                    levels = read_parameters(
                        levels, bias, held_bias, begin, c + AHEAD, c + AHEAD + 1, shift, stop, WHERE, FORM
                    )
                values = value_of(ring, added, turn % RING, c, total.dtype.element_ty, FORM)
                if CENTRED:
                    values -= mean
                values *= rstd
                if weight is not None:
                    factor = parameter_float32(factors[c], FORM)
                    if offset is not None:
                        factor += offset.to(gl.float32)
                    values *= factor
                if bias is not None:
                    values += parameter_float32(levels[c], FORM)
                write(result + written, values, c, begin, shift, stop, FORM)
    clear(words, groups, PARTS)


def forward(
    found: Rows, weight: Tensor | None, bias: Tensor | None, result: Tensor, total: Tensor, statistics: Tensor,
    rows: int, columns: int, eps: float, offset: float, centred: bool, config: dict[str, Any],
) -> bool:  # fmt: skip
    """Writes the result, the sum and the statistics of rows; False where this is not for them, and nothing is done."""
    x, residual = found.tensors
    assert x is not None
    strides = [found.strides[0][2], found.strides[1][2]]
    if found.levels > 1:
        return False
    copied = [(x, strides[0])] if residual is None else [(x, strides[0]), (residual, strides[1])]
    written = [result] if residual is None else [result, total]
    held = [one for one in (weight, bias) if one is not None]
    chosen = plan(rows, columns, config, copied, written, held)
    if chosen is None:
        return False
    # a chunk from shared memory is there at once
    ahead = 0 if chosen.where == SHARED.value else 1 if chosen.mode == SHIFTED.value else _AHEAD
    launch(
        norm_forward_parts, chosen.grid, x, residual, weight, bias, result, total, statistics,
        chosen.words(statistics), rows, columns, *strides, eps, offset or None, chosen.part, chosen.parts,
        chosen.groups,
        centred, chosen.where, ahead, chosen.ring, chosen.padded,
        *chosen.form, warps=chosen.warps, registers=chosen.registers,
    )  # fmt: skip
    return True
