"""The backward kernel of the norms over parts of rows in shared memory, in Gluon: see `parts` and `norms_gradient`.

A program has the same columns of all its rows, and keeps the sums over rows of these in registers.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from nearpeak.kernels.jit.launch import launch
from nearpeak.kernels.jit.norms_gradient import empty_partials
from nearpeak.kernels.jit.parts import plan
from nearpeak.kernels.jit.parts_rows import (
    GLOBAL,
    REGISTERS,
    SHARED,
    as_float32,
    bounds,
    chunk_of,
    clear,
    copy_row,
    folded,
    hold,
    look,
    place,
    read_parameter,
    read_parameters,
    room,
    tell,
    ticket,
    told,
    words_of,
    write,
)
from nearpeak.kernels.jit.row_starts import Rows

_UNSPECIALISED = ["rows", "columns", "gradient_stride", "x_stride", "sum_stride", "part", "parts", "groups"]
_AHEAD = 2
"""Chunks of the weight that are read before they are used."""


@gluon.jit
def weighted(factor, offset):
    """The weight as it counts; without an offset None is given."""
    factor = as_float32(factor)
    if offset is not None:
        factor += offset.to(gl.float32)
    return factor


@gluon.jit
def both(first, second, other_first, other_second):
    return first + other_first, second + other_second


@gluon.jit
def zeros(WANTED: gl.constexpr, FORM: gl.constexpr):
    """A sum over rows, of all chunks."""
    found = ()
    if WANTED:
        for _ in gl.static_range(FORM[2]):
            found += (gl.zeros([FORM[3]], gl.float32, FORM[4]),)  # type: ignore[assignment]
    return found


@gluon.jit
def sums_of(
    gradients, values, weight, held, weight_sums, bias_sums, slot, begin, stop, mean, rstd, offset,
    CENTRED: gl.constexpr, WANTS_WEIGHT: gl.constexpr, WANTS_BIAS: gl.constexpr, WHERE: gl.constexpr,
    FORM: gl.constexpr,
):  # fmt: skip
    """Of a part the sums of g * w * d along the row, and of g * w if CENTRED; and the sums over rows, with this one."""
    by_thread: gl.constexpr = gl.BlockedLayout([1, FORM[1]], [32, 1], [gl.num_warps(), 1], [1, 0])
    along = gl.zeros([FORM[3] // FORM[1]], gl.float32, gl.SliceLayout(1, by_thread))
    level = gl.zeros([FORM[3] // FORM[1]], gl.float32, gl.SliceLayout(1, by_thread))
    all_weights = ()
    all_biases = ()
    for c in gl.static_range(FORM[2]):
        g = chunk_of(gradients, slot, c, FORM)
        product = chunk_of(values, slot, c, FORM)
        if CENTRED:
            product -= mean
        product *= g  # after the end of a row 0, as g is
        if WANTS_WEIGHT:
            all_weights += (weight_sums[c] + product * rstd,)  # type: ignore[assignment]
        if WANTS_BIAS:
            all_biases += (bias_sums[c] + g,)  # type: ignore[assignment]
        if weight is not None:
            factor = weighted(read_parameter(weight, held, c, begin, 0, stop, WHERE, FORM), offset)
            product *= factor
            g *= factor
        along += folded(product, FORM)
        if CENTRED:
            level += folded(g, FORM)
    if CENTRED:
        total, total_level = gl.reduce((along, level), 0, both)
    else:
        total = gl.sum(along, 0)
        total_level = 0.0
    return total, total_level, all_weights, all_biases


@gluon.jit
def write_sums(partials, sums, begin, stop, FORM: gl.constexpr):
    for c in gl.static_range(FORM[2]):
        write(partials, sums[c], c, begin, 0, stop, FORM)


@gluon.jit(do_not_specialize=_UNSPECIALISED)
def norm_backward_parts(
    gradient, x, sum_gradient, statistics, weight, dx, dresidual, partials, words,
    rows, columns, gradient_stride, x_stride, sum_stride, offset, part, parts, groups,
    CENTRED: gl.constexpr, WANTS_WEIGHT: gl.constexpr, WANTS_BIAS: gl.constexpr, WHERE: gl.constexpr,
    AHEAD: gl.constexpr, RING: gl.constexpr, PARTS: gl.constexpr,
    MODE: gl.constexpr, VECTOR: gl.constexpr, CHUNKS: gl.constexpr, CHUNK: gl.constexpr,
):  # fmt: skip
    FORM: gl.constexpr = (MODE, VECTOR, CHUNKS, CHUNK, gl.BlockedLayout([VECTOR], [32], [gl.num_warps()], [0]))
    number = ticket(words, PARTS)
    group = number // parts
    own = number % parts
    begin, end = bounds(own, part, FORM)
    stop = gl.minimum(end, columns)
    turns = gl.cdiv(rows - group, groups)
    gradients = room(gradient.dtype.element_ty, RING, FORM)
    values = room(x.dtype.element_ty, RING, FORM)
    added = None
    if sum_gradient is not None:
        added = room(sum_gradient.dtype.element_ty, RING, FORM)
    held = None
    if WHERE == SHARED and weight is not None:
        held = hold(weight, begin, stop, FORM)
    for turn in gl.static_range(RING - 2):
        if turn < turns:
            row = group + turn * groups
            copy_row(gradient, gradients, row, turn, begin, stop, columns, gradient_stride, RING, FORM)
            copy_row(x, values, row, turn, begin, stop, columns, x_stride, RING, FORM)
            if sum_gradient is not None:
                copy_row(sum_gradient, added, row, turn, begin, stop, columns, sum_stride, RING, FORM)
        async_copy.commit_group()
    next_along = 0.0
    next_level = 0.0
    mean = 0.0
    weight_sums = zeros(WANTS_WEIGHT, FORM)
    bias_sums = zeros(WANTS_BIAS, FORM)
    for turn in range(-1, turns):
        row = group + turn * groups
        along = next_along
        level = next_level
        following = gl.minimum(row + groups, rows - 1)
        rstd = gl.load(statistics + following)
        if CENTRED:
            mean = gl.load(statistics + rows + following)
        if turn + RING - 1 < turns:
            ahead = row + (RING - 1) * groups
            copy_row(gradient, gradients, ahead, turn + RING - 1, begin, stop, columns, gradient_stride, RING, FORM)
            copy_row(x, values, ahead, turn + RING - 1, begin, stop, columns, x_stride, RING, FORM)
            if sum_gradient is not None:
                copy_row(sum_gradient, added, ahead, turn + RING - 1, begin, stop, columns, sum_stride, RING, FORM)
        async_copy.commit_group()
        there = words_of(words, group, turn, PARTS)
        if PARTS > 1:
            found_along = look(there, PARTS)
            if CENTRED:
                found_level = look(there + PARTS, PARTS)
        async_copy.wait_group(RING - 2)
        if turn + 1 < turns:
            next_along, next_level, weight_sums, bias_sums = sums_of(
                gradients, values, weight, held, weight_sums, bias_sums, (turn + 1) % RING, begin, stop,
                mean, rstd, offset, CENTRED, WANTS_WEIGHT, WANTS_BIAS, WHERE, FORM,
            )  # fmt: skip
            if PARTS > 1:
                mine = words_of(words, group, turn + 1, PARTS) + own
                tell(mine, next_along, turn + 2)
                if CENTRED:
                    tell(mine + PARTS, next_level, turn + 2)
        if turn >= 0:
            factors = read_parameters((), weight, held, begin, 0, AHEAD, 0, stop, WHERE, FORM)
            rstd = gl.load(statistics + row)  # again: no register is left to keep it in meanwhile
            if CENTRED:
                mean = gl.load(statistics + rows + row)
            if PARTS > 1:
                along = gl.sum(told(there, found_along, parts, turn + 1, PARTS), 0)
                if CENTRED:
                    level = gl.sum(told(there + PARTS, found_level, parts, turn + 1, PARTS), 0)
            share = rstd / columns
            slope = -along * share * rstd * rstd
            lift = -level * share
            slot = turn % RING
            _start, written, _shift = place(row, columns, x_stride, FORM)
            for c in gl.static_range(CHUNKS):
                factors = read_parameters(factors, weight, held, begin, c + AHEAD, c + AHEAD + 1, 0, stop, WHERE, FORM)
                result = chunk_of(values, slot, c, FORM)
                if CENTRED:
                    result = (result - mean) * slope + lift
                else:
                    result *= slope
                g = chunk_of(gradients, slot, c, FORM)
                if weight is not None:
                    g *= weighted(factors[c], offset)
                result += g * rstd
                if sum_gradient is not None:
                    result += chunk_of(added, slot, c, FORM)
                if dx is not None:
                    write(dx + written, result, c, begin, 0, stop, FORM)
                if dresidual is not None:
                    write(dresidual + written, result, c, begin, 0, stop, FORM)
    even = (columns // VECTOR * VECTOR).to(gl.int64)
    if WANTS_WEIGHT:
        write_sums(partials + group * even, weight_sums, begin, stop, FORM)
        if WANTS_BIAS:
            write_sums(partials + (groups + group) * even, bias_sums, begin, stop, FORM)
    elif WANTS_BIAS:
        write_sums(partials + group * even, bias_sums, begin, stop, FORM)
    clear(words, groups, PARTS)


def backward(
    found: Rows, statistics: Tensor, weight: Tensor | None, dx: Tensor | None, dresidual: Tensor | None,
    rows: int, columns: int, offset: float | None, centred: bool, wants: list[bool], config: dict[str, Any],
) -> tuple[Tensor | None, int] | None:  # fmt: skip
    """Writes the gradients of rows; what is left are sums over rows, and of how many parts they are.

    None where this is not for such rows, and nothing is done.
    """
    gradient, x, sum_gradient = found.tensors
    assert gradient is not None
    assert x is not None
    if found.levels > 1 or (dx is None and dresidual is None):
        return None
    tensors = zip(found.tensors, found.strides, strict=True)
    copied = [(one, strides[2]) for one, strides in tensors if one is not None]
    written = [one for one in (dx, dresidual) if one is not None]
    chosen = plan(rows, columns, config, copied, written, [] if weight is None else [weight], shifts=False)
    if chosen is None:
        return None
    # sums over rows are in registers, and no weight has room there
    where = GLOBAL.value if chosen.where == REGISTERS.value else chosen.where
    partials = empty_partials(wants, chosen.groups, columns, x.device)
    launch(
        norm_backward_parts, chosen.grid, gradient, x, sum_gradient, statistics, weight, dx, dresidual, partials,
        chosen.words(statistics), rows, columns, *(strides[2] for strides in found.strides), offset,
        chosen.part, chosen.parts, chosen.groups, centred, wants[2], wants[3], where,
        0 if where == SHARED.value else _AHEAD, chosen.ring, chosen.padded, *chosen.form,
        warps=chosen.warps, registers=chosen.registers,
    )  # fmt: skip
    return partials, chosen.groups
