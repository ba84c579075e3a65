"""Gluon kernels of the norms for Hopper, over ring buffers in shared memory: every byte moves once.

`_runtime.ring_buffer` explains how programs share rows. A turn of a kernel has four phases: start the copies of the row
RING - 1 turns ahead, compute and publish the sums of the next row, collect the sums of this row, and write it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from nearpeak.kernels._runtime.launch import launch
from nearpeak.kernels._runtime.ring_buffer import RingConfig, plan_ring
from nearpeak.kernels._runtime.ring_buffer_sm90 import (
    FULL,
    GLOBAL,
    REGISTERS,
    SHARED,
    SHIFTED,
    allocate_ring,
    as_float32,
    broadcast_by_thread,
    chunk_mask,
    clear_words,
    copy_parameter,
    copy_row,
    draw_ticket,
    is_edge,
    load_chunk,
    mask_chunk,
    parameter_float32,
    part_bounds,
    poll,
    publish,
    read_parameter,
    read_parameters,
    row_offsets,
    row_words,
    store_chunk,
    sum_by_thread,
    wait_for_values,
)
from nearpeak.kernels._runtime.strided_rows import StridedRows

_FORWARD_UNSPECIALIZED = ["rows", "columns", "x_stride", "residual_stride", "part", "parts", "groups"]
_AHEAD = 2
"""Chunks of the weight and the bias that are read before they are used."""


@gluon.jit
def load_values(ring, added, slot, c: gl.constexpr, dtype: gl.constexpr, FORM: gl.constexpr):
    """A chunk of the row to normalize: of the rounded sum where there is an addition."""
    values = load_chunk(ring, slot, c, FORM)
    if added is not None:
        values = as_float32((values + load_chunk(added, slot, c, FORM)).to(dtype))
    return values


@gluon.jit
def part_squares(ring, added, total_row, slot, begin, shift, stop, FORM: gl.constexpr):
    """The sum of squares of a part. Where there is an addition, this writes the sum."""
    squares = gl.zeros([FORM[3]], gl.float32, FORM[4])
    for c in gl.static_range(FORM[2]):
        values = load_values(ring, added, slot, c, total_row.dtype.element_ty, FORM)
        if added is not None:
            store_chunk(total_row, values, c, begin, shift, stop, FORM)
        if FORM[0] == SHIFTED:  # in other modes these columns are 0
            values = mask_chunk(values, 0.0, c, begin, shift, stop, FORM)
        squares += values * values
    return gl.sum(squares, 0)


@gluon.jit
def merge_moments(count, mean, squares, other_count, other_mean, other_squares):
    """Merges the counts, means and sums of squared differences from the mean of two sets of numbers."""
    total = count + other_count
    share = other_count / gl.maximum(total, 1.0)
    moved = other_mean - mean
    return total, mean + moved * share, squares + other_squares + moved * moved * (count * share)


@gluon.jit
def merge_equal_moments(count, mean, squares, other_count, other_mean, other_squares):
    """The same for sets of equal size, as the threads of a program have: without a division."""
    moved = other_mean - mean
    return count + other_count, (mean + other_mean) * 0.5, squares + other_squares + moved * moved * (count * 0.5)


@gluon.jit
def part_moments(ring, added, total_row, slot, begin, shift, stop, FORM: gl.constexpr):
    """The mean of a part and the sum of squared differences from it, in one pass; this writes the sum of an addition.

    Each thread subtracts the mean c of its first numbers from all of them. That loses few digits: if c is the mean of a
    fraction f of the numbers, its squared distance from the mean of all is at most their variance over f.
    """
    dtype: gl.constexpr = total_row.dtype.element_ty
    counts = gl.zeros([FORM[3]], gl.float32, FORM[4])
    for c in gl.static_range(FORM[2]):
        if is_edge(c, FORM):
            counts += chunk_mask(c, begin, shift, stop, FORM).to(gl.float32)
        else:
            counts += 1.0
    count = sum_by_thread(counts, FORM)
    values = load_values(ring, added, slot, 0, dtype, FORM)
    if is_edge(0, FORM):
        first_count = gl.maximum(sum_by_thread(chunk_mask(0, begin, shift, stop, FORM).to(gl.float32), FORM), 1.0)
        near = gl.div_rn(sum_by_thread(mask_chunk(values, 0.0, 0, begin, shift, stop, FORM), FORM), first_count)
    else:
        near = sum_by_thread(values, FORM) * (1.0 / FORM[1])
    close = broadcast_by_thread(near, FORM)
    sums = gl.zeros([FORM[3]], gl.float32, FORM[4])
    squares = gl.zeros([FORM[3]], gl.float32, FORM[4])
    for c in gl.static_range(FORM[2]):
        if c > 0:
            values = load_values(ring, added, slot, c, dtype, FORM)
        if added is not None:
            store_chunk(total_row, values, c, begin, shift, stop, FORM)
        values = mask_chunk(values - close, 0.0, c, begin, shift, stop, FORM)
        sums += values
        squares += values * values
    distance = sum_by_thread(sums, FORM)
    if FORM[0] == FULL:
        moved = distance * (1.0 / (FORM[1] * FORM[2]))
        rest = gl.maximum(sum_by_thread(squares, FORM) - distance * moved, 0.0)
        _count, mean, all_squares = gl.reduce((count, near + moved, rest), 0, merge_equal_moments)
    else:
        moved = gl.div_rn(distance, gl.maximum(count, 1.0))
        rest = gl.maximum(sum_by_thread(squares, FORM) - distance * moved, 0.0)
        _count, mean, all_squares = gl.reduce((count, near + moved, rest), 0, merge_moments)
    return mean, all_squares


@gluon.jit
def row_moments(means, squares, part, parts, shift, columns, PARTS: gl.constexpr, FORM: gl.constexpr):
    """The mean of a row and the sum of squared differences from it, from those of its parts."""
    each = gl.arange(0, PARTS, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    begin, end = part_bounds(each, part, FORM)
    counts = gl.minimum(end, shift + columns) - gl.maximum(begin, shift)
    counts = gl.where(each < parts, gl.maximum(counts, 0), 0).to(gl.float32)
    mean = gl.div_rn(gl.sum(means * counts, 0), columns.to(gl.float32))
    return mean, gl.sum(squares + counts * (means - mean) * (means - mean), 0)


@gluon.jit(do_not_specialize=_FORWARD_UNSPECIALIZED)
def norm_forward_parts(
    x, residual, weight, bias, result, total, statistics, words, rows, columns, x_stride, residual_stride, eps, offset,
    part, parts, groups, CENTERED: gl.constexpr, WHERE: gl.constexpr, AHEAD: gl.constexpr,
    RING: gl.constexpr, PARTS: gl.constexpr,
    MODE: gl.constexpr, VECTOR: gl.constexpr, CHUNKS: gl.constexpr, CHUNK: gl.constexpr,
):  # fmt: skip
    FORM: gl.constexpr = (MODE, VECTOR, CHUNKS, CHUNK, gl.BlockedLayout([VECTOR], [32], [gl.num_warps()], [0]))
    number = draw_ticket(words, PARTS)
    group = number // parts
    own = number % parts
    begin, end = part_bounds(own, part, FORM)
    turns = gl.cdiv(rows - group, groups)
    ring = allocate_ring(x.dtype.element_ty, RING, FORM)
    added = None
    if residual is not None:
        added = allocate_ring(residual.dtype.element_ty, RING, FORM)
    shared_weight = None
    shared_bias = None
    if WHERE == SHARED:  # copied with the first row
        if weight is not None:
            shared_weight = copy_parameter(weight, begin, gl.minimum(end, columns), FORM)
        if bias is not None:
            shared_bias = copy_parameter(bias, begin, gl.minimum(end, columns), FORM)
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
        # start to copy the row RING - 1 turns ahead
        if turn + RING - 1 < turns:
            ahead = row + (RING - 1) * groups
            copy_row(x, ring, ahead, turn + RING - 1, begin, end, columns, x_stride, RING, FORM)
            if residual is not None:
                copy_row(residual, added, ahead, turn + RING - 1, begin, end, columns, residual_stride, RING, FORM)
        async_copy.commit_group()
        mean = next_mean
        squares = next_squares
        row_slot = row_words(words, group, turn, PARTS)
        if PARTS > 1:
            polled_squares = poll(row_slot + PARTS, PARTS)
            if CENTERED:
                polled_means = poll(row_slot, PARTS)
        async_copy.wait_group(RING - 2)
        # sums of the next row
        if turn + 1 < turns:
            _start, written, shift = row_offsets(row + groups, columns, x_stride, FORM)
            slot = (turn + 1) % RING
            stop = gl.minimum(end, shift + columns)
            if CENTERED:
                next_mean, next_squares = part_moments(ring, added, total + written, slot, begin, shift, stop, FORM)
            else:
                next_squares = part_squares(ring, added, total + written, slot, begin, shift, stop, FORM)
            if PARTS > 1:
                own_words = row_words(words, group, turn + 1, PARTS) + own
                publish(own_words + PARTS, next_squares, turn + 2)
                if CENTERED:
                    publish(own_words, next_mean, turn + 2)
        # collect the sums of this row, and write it
        if turn >= 0:
            _start, written, shift = row_offsets(row, columns, x_stride, FORM)
            stop = gl.minimum(end, shift + columns)
            if WHERE != REGISTERS:
                factors = read_parameters((), weight, shared_weight, begin, 0, AHEAD, shift, stop, WHERE, FORM)
                levels = read_parameters((), bias, shared_bias, begin, 0, AHEAD, shift, stop, WHERE, FORM)
            if PARTS > 1:
                all_squares = wait_for_values(row_slot + PARTS, polled_squares, parts, turn + 1, PARTS)
                if CENTERED:
                    means = wait_for_values(row_slot, polled_means, parts, turn + 1, PARTS)
                    mean, squares = row_moments(means, all_squares, part, parts, shift, columns, PARTS, FORM)
                else:
                    squares = gl.sum(all_squares, 0)
            rstd = gl.rsqrt(squares / columns + eps.to(gl.float32))
            if own == 0:
                gl.store(statistics + row, rstd)
                if CENTERED:
                    gl.store(statistics + rows + row, mean)
            for c in gl.static_range(CHUNKS):
                if WHERE != REGISTERS:
                    factors = read_parameters(
                        factors, weight, shared_weight, begin, c + AHEAD, c + AHEAD + 1, shift, stop, WHERE, FORM
                    )
                    levels = read_parameters(
                        levels, bias, shared_bias, begin, c + AHEAD, c + AHEAD + 1, shift, stop, WHERE, FORM
                    )
                values = load_values(ring, added, turn % RING, c, total.dtype.element_ty, FORM)
                if CENTERED:
                    values -= mean
                values *= rstd
                if weight is not None:
                    factor = parameter_float32(factors[c], FORM)
                    if offset is not None:
                        factor += offset.to(gl.float32)
                    values *= factor
                if bias is not None:
                    values += parameter_float32(levels[c], FORM)
                store_chunk(result + written, values, c, begin, shift, stop, FORM)
    clear_words(words, groups, PARTS)


def forward(
    strided: StridedRows, weight: Tensor | None, bias: Tensor | None, result: Tensor, total: Tensor, statistics: Tensor,
    rows: int, columns: int, eps: float, offset: float, centered: bool, config: RingConfig,
) -> bool:  # fmt: skip
    """Writes the result, the sum and the statistics of rows. Returns False, and does nothing, for unsupported rows."""
    x, residual = strided.tensors
    assert x is not None
    strides = [strided.strides[0][2], strided.strides[1][2]]
    if strided.levels > 1:
        return False
    copied = [(x, strides[0])] if residual is None else [(x, strides[0]), (residual, strides[1])]
    written = [result] if residual is None else [result, total]
    parameters = [parameter for parameter in (weight, bias) if parameter is not None]
    plan = plan_ring(rows, columns, config, copied, written, parameters)
    if plan is None:
        return False
    # a chunk from shared memory needs no prefetch
    ahead = 0 if plan.where == SHARED.value else 1 if plan.mode == SHIFTED.value else _AHEAD
    launch(
        norm_forward_parts, plan.grid, x, residual, weight, bias, result, total, statistics, plan.words(statistics),
        rows, columns, *strides, eps, offset or None, plan.part, plan.parts, plan.groups, centered, plan.where, ahead,
        plan.ring, plan.padded, *plan.form, warps=plan.warps, registers=plan.registers,
    )  # fmt: skip
    return True


_BACKWARD_UNSPECIALIZED = ["rows", "columns", "gradient_stride", "x_stride", "sum_stride", "part", "parts", "groups"]


@gluon.jit
def effective_weight(factor, offset):
    """weight + offset in float32; an offset of None is 0."""
    factor = as_float32(factor)
    if offset is not None:
        factor += offset.to(gl.float32)
    return factor


@gluon.jit
def add_pairs(first, second, other_first, other_second):
    return first + other_first, second + other_second


@gluon.jit
def zero_sums(WANTED: gl.constexpr, FORM: gl.constexpr):
    """Zeroed sums over rows, one (chunk,) for each chunk."""
    sums = ()
    if WANTED:
        for _ in gl.static_range(FORM[2]):
            sums += (gl.zeros([FORM[3]], gl.float32, FORM[4]),)  # type: ignore[assignment]
    return sums


@gluon.jit
def part_sums(
    gradients, values, weight, shared_weight, weight_sums, bias_sums, slot, begin, stop, mean, rstd, offset,
    CENTERED: gl.constexpr, WANTS_WEIGHT: gl.constexpr, WANTS_BIAS: gl.constexpr, WHERE: gl.constexpr,
    FORM: gl.constexpr,
):  # fmt: skip
    """The sums along a part of g * w * d, and of g * w if CENTERED; and the sums over rows, including this one."""
    by_thread: gl.constexpr = gl.BlockedLayout([1, FORM[1]], [32, 1], [gl.num_warps(), 1], [1, 0])
    along = gl.zeros([FORM[3] // FORM[1]], gl.float32, gl.SliceLayout(1, by_thread))
    level = gl.zeros([FORM[3] // FORM[1]], gl.float32, gl.SliceLayout(1, by_thread))
    all_weights = ()
    all_biases = ()
    for c in gl.static_range(FORM[2]):
        g = load_chunk(gradients, slot, c, FORM)
        product = load_chunk(values, slot, c, FORM)
        if CENTERED:
            product -= mean
        product *= g  # 0 after the end of a row, like g
        if WANTS_WEIGHT:
            all_weights += (weight_sums[c] + product * rstd,)  # type: ignore[assignment]
        if WANTS_BIAS:
            all_biases += (bias_sums[c] + g,)  # type: ignore[assignment]
        if weight is not None:
            factor = effective_weight(read_parameter(weight, shared_weight, c, begin, 0, stop, WHERE, FORM), offset)
            product *= factor
            g *= factor
        along += sum_by_thread(product, FORM)
        if CENTERED:
            level += sum_by_thread(g, FORM)
    if CENTERED:
        total, total_level = gl.reduce((along, level), 0, add_pairs)
    else:
        total = gl.sum(along, 0)
        total_level = 0.0
    return total, total_level, all_weights, all_biases


@gluon.jit
def store_sums(partials, sums, begin, stop, FORM: gl.constexpr):
    for c in gl.static_range(FORM[2]):
        store_chunk(partials, sums[c], c, begin, 0, stop, FORM)


@gluon.jit(do_not_specialize=_BACKWARD_UNSPECIALIZED)
def norm_backward_parts(
    gradient, x, sum_gradient, statistics, weight, dx, dresidual, partials, words,
    rows, columns, gradient_stride, x_stride, sum_stride, offset, part, parts, groups,
    CENTERED: gl.constexpr, WANTS_WEIGHT: gl.constexpr, WANTS_BIAS: gl.constexpr, WHERE: gl.constexpr,
    AHEAD: gl.constexpr, RING: gl.constexpr, PARTS: gl.constexpr,
    MODE: gl.constexpr, VECTOR: gl.constexpr, CHUNKS: gl.constexpr, CHUNK: gl.constexpr,
):  # fmt: skip
    FORM: gl.constexpr = (MODE, VECTOR, CHUNKS, CHUNK, gl.BlockedLayout([VECTOR], [32], [gl.num_warps()], [0]))
    number = draw_ticket(words, PARTS)
    group = number // parts
    own = number % parts
    begin, end = part_bounds(own, part, FORM)
    stop = gl.minimum(end, columns)
    turns = gl.cdiv(rows - group, groups)
    gradients = allocate_ring(gradient.dtype.element_ty, RING, FORM)
    values = allocate_ring(x.dtype.element_ty, RING, FORM)
    added = None
    if sum_gradient is not None:
        added = allocate_ring(sum_gradient.dtype.element_ty, RING, FORM)
    shared_weight = None
    if WHERE == SHARED and weight is not None:
        shared_weight = copy_parameter(weight, begin, stop, FORM)
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
    weight_sums = zero_sums(WANTS_WEIGHT, FORM)
    bias_sums = zero_sums(WANTS_BIAS, FORM)
    for turn in range(-1, turns):
        row = group + turn * groups
        along = next_along
        level = next_level
        following = gl.minimum(row + groups, rows - 1)
        rstd = gl.load(statistics + following)
        if CENTERED:
            mean = gl.load(statistics + rows + following)
        if turn + RING - 1 < turns:
            ahead = row + (RING - 1) * groups
            copy_row(gradient, gradients, ahead, turn + RING - 1, begin, stop, columns, gradient_stride, RING, FORM)
            copy_row(x, values, ahead, turn + RING - 1, begin, stop, columns, x_stride, RING, FORM)
            if sum_gradient is not None:
                copy_row(sum_gradient, added, ahead, turn + RING - 1, begin, stop, columns, sum_stride, RING, FORM)
        async_copy.commit_group()
        row_slot = row_words(words, group, turn, PARTS)
        if PARTS > 1:
            polled_along = poll(row_slot, PARTS)
            if CENTERED:
                polled_level = poll(row_slot + PARTS, PARTS)
        async_copy.wait_group(RING - 2)
        # sums of the next row
        if turn + 1 < turns:
            next_along, next_level, weight_sums, bias_sums = part_sums(
                gradients, values, weight, shared_weight, weight_sums, bias_sums, (turn + 1) % RING, begin, stop,
                mean, rstd, offset, CENTERED, WANTS_WEIGHT, WANTS_BIAS, WHERE, FORM,
            )  # fmt: skip
            if PARTS > 1:
                own_words = row_words(words, group, turn + 1, PARTS) + own
                publish(own_words, next_along, turn + 2)
                if CENTERED:
                    publish(own_words + PARTS, next_level, turn + 2)
        # collect the sums of this row, and write it
        if turn >= 0:
            factors = read_parameters((), weight, shared_weight, begin, 0, AHEAD, 0, stop, WHERE, FORM)
            rstd = gl.load(statistics + row)  # loaded again: no register is left to keep it in
            if CENTERED:
                mean = gl.load(statistics + rows + row)
            if PARTS > 1:
                along = gl.sum(wait_for_values(row_slot, polled_along, parts, turn + 1, PARTS), 0)
                if CENTERED:
                    level = gl.sum(wait_for_values(row_slot + PARTS, polled_level, parts, turn + 1, PARTS), 0)
            share = rstd / columns
            slope = -along * share * rstd * rstd
            lift = -level * share
            slot = turn % RING
            _start, written, _shift = row_offsets(row, columns, x_stride, FORM)
            for c in gl.static_range(CHUNKS):
                factors = read_parameters(
                    factors, weight, shared_weight, begin, c + AHEAD, c + AHEAD + 1, 0, stop, WHERE, FORM
                )
                result = load_chunk(values, slot, c, FORM)
                if CENTERED:
                    result = (result - mean) * slope + lift
                else:
                    result *= slope
                g = load_chunk(gradients, slot, c, FORM)
                if weight is not None:
                    g *= effective_weight(factors[c], offset)
                result += g * rstd
                if sum_gradient is not None:
                    result += load_chunk(added, slot, c, FORM)
                if dx is not None:
                    store_chunk(dx + written, result, c, begin, 0, stop, FORM)
                if dresidual is not None:
                    store_chunk(dresidual + written, result, c, begin, 0, stop, FORM)
    even = (columns // VECTOR * VECTOR).to(gl.int64)
    if WANTS_WEIGHT:
        store_sums(partials + group * even, weight_sums, begin, stop, FORM)
        if WANTS_BIAS:
            store_sums(partials + (groups + group) * even, bias_sums, begin, stop, FORM)
    elif WANTS_BIAS:
        store_sums(partials + group * even, bias_sums, begin, stop, FORM)
    clear_words(words, groups, PARTS)


def backward(
    strided: StridedRows, statistics: Tensor, weight: Tensor | None, dx: Tensor | None, dresidual: Tensor | None,
    rows: int, columns: int, offset: float | None, centered: bool, wants: list[bool], config: RingConfig,
) -> tuple[Tensor | None, int] | None:  # fmt: skip
    """Writes the gradients of rows. Returns the sums over rows, (1 or 2, parts, columns), and the number of parts.

    Returns None, and does nothing, for unsupported rows.
    """
    gradient, x, sum_gradient = strided.tensors
    assert gradient is not None
    assert x is not None
    if strided.levels > 1 or (dx is None and dresidual is None):
        return None
    tensors = zip(strided.tensors, strided.strides, strict=True)
    copied = [(tensor, strides[2]) for tensor, strides in tensors if tensor is not None]
    written = [tensor for tensor in (dx, dresidual) if tensor is not None]
    plan = plan_ring(rows, columns, config, copied, written, [] if weight is None else [weight], shifts=False)
    if plan is None:
        return None
    # sums over rows take the registers, and leave none for the weight
    where = GLOBAL.value if plan.where == REGISTERS.value else plan.where
    sums = wants[2] + wants[3]
    partials = x.new_empty((sums, plan.groups, columns), dtype=torch.float32) if sums else None
    launch(
        norm_backward_parts, plan.grid, gradient, x, sum_gradient, statistics, weight, dx, dresidual, partials,
        plan.words(statistics), rows, columns, *(strides[2] for strides in strided.strides), offset,
        plan.part, plan.parts, plan.groups, centered, wants[2], wants[3], where,
        0 if where == SHARED.value else _AHEAD, plan.ring, plan.padded, *plan.form,
        warps=plan.warps, registers=plan.registers,
    )  # fmt: skip
    return partials, plan.groups
