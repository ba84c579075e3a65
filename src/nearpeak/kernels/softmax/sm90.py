"""Gluon kernels of softmax and log-softmax for Hopper, over ring buffers in shared memory: every byte moves once.

`_runtime.ring_buffer` explains how programs share rows; the phases of a turn are those of `norms.sm90`.

Exponentials are powers of 2. The scores are multiplied by log2(e) in the same instruction that subtracts the maximum,
which is multiplied once before; its rounding error cancels. A logarithm uses natural exponents.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from nearpeak.kernels._runtime import rows as shared
from nearpeak.kernels._runtime.launch import launch
from nearpeak.kernels._runtime.ring_buffer import RingConfig, plan_ring
from nearpeak.kernels._runtime.ring_buffer_sm90 import (
    FULL,
    SHIFTED,
    allocate_ring,
    clear_words,
    copy_row,
    draw_ticket,
    load_chunk,
    mask_chunk,
    opaque_slot,
    part_bounds,
    poll,
    publish,
    row_offsets,
    row_words,
    store_chunk,
    wait_for_values,
)

LOWEST = gl.constexpr(shared.LOWEST.value)
LOG2_E = gl.constexpr(shared.LOG2_E.value)


@gluon.jit
def load_score(ring, slot, c: gl.constexpr, begin, shift, stop, scale, PLAIN: gl.constexpr, FORM: gl.constexpr):
    """A chunk of scale * x, -inf outside of the row; if PLAIN the scale is 1."""
    values = load_chunk(ring, slot, c, FORM)
    if not PLAIN:
        values *= scale
    return mask_chunk(values, -float("inf"), c, begin, shift, stop, FORM)


@gluon.jit
def exp_score(score, top, PLAIN: gl.constexpr, LOG: gl.constexpr):
    """exp(score - top), of scores and maxima that are multiplied by log2(e) unless LOG or PLAIN."""
    if LOG:
        return gl.exp2((score - top) * LOG2_E)
    if PLAIN:
        return gl.exp2(gl.fma(score, LOG2_E, -top))
    return gl.exp2(score - top)


@gluon.jit
def part_statistics(
    ring, slot, begin, shift, stop, scale,
    PLAIN: gl.constexpr, LOG: gl.constexpr, KEPT: gl.constexpr, FORM: gl.constexpr,
):  # fmt: skip
    """The maximum m of a part, and the sum of exp(score - m)."""
    tops = gl.full([FORM[3]], LOWEST, gl.float32, FORM[4])
    for c in gl.static_range(FORM[2]):
        tops = gl.maximum(tops, load_score(ring, slot, c, begin, shift, stop, scale, PLAIN, FORM))
    top = gl.max(tops, 0)
    if PLAIN and not LOG:
        top = gl.maximum(top * LOG2_E, LOWEST)
    if not KEPT:
        slot = opaque_slot(slot, stop)
    sums = gl.zeros([FORM[3]], gl.float32, FORM[4])
    for c in gl.static_range(FORM[2]):
        sums += exp_score(load_score(ring, slot, c, begin, shift, stop, scale, PLAIN, FORM), top, PLAIN, LOG)
    return top, gl.sum(sums, 0)


@gluon.jit(do_not_specialize=["rows", "columns", "stride", "part", "parts", "groups"])
def softmax_parts(
    x, result, words, scale, rows, columns, stride, part, parts, groups,
    PLAIN: gl.constexpr, LOG: gl.constexpr, KEPT: gl.constexpr, RING: gl.constexpr, PARTS: gl.constexpr,
    MODE: gl.constexpr, VECTOR: gl.constexpr, CHUNKS: gl.constexpr, CHUNK: gl.constexpr,
):  # fmt: skip
    FORM: gl.constexpr = (MODE, VECTOR, CHUNKS, CHUNK, gl.BlockedLayout([VECTOR], [32], [gl.num_warps()], [0]))
    scale = scale.to(gl.float32)
    if not LOG:
        scale *= LOG2_E
    number = draw_ticket(words, PARTS)
    group = number // parts
    own = number % parts
    begin, end = part_bounds(own, part, FORM)
    turns = gl.cdiv(rows - group, groups)
    ring = allocate_ring(x.dtype.element_ty, RING, FORM)
    for turn in gl.static_range(RING - 2):
        if turn < turns:
            copy_row(x, ring, group + turn * groups, turn, begin, end, columns, stride, RING, FORM)
        async_copy.commit_group()
    next_top = 0.0
    next_total = 0.0
    for turn in range(-1, turns):
        row = group + turn * groups
        # start to copy the row RING - 1 turns ahead
        if turn + RING - 1 < turns:
            copy_row(x, ring, row + (RING - 1) * groups, turn + RING - 1, begin, end, columns, stride, RING, FORM)
        async_copy.commit_group()
        top = next_top
        total = next_total
        row_slot = row_words(words, group, turn, PARTS)
        if PARTS > 1:
            polled_tops = poll(row_slot, PARTS)
            polled_totals = poll(row_slot + PARTS, PARTS)
        async_copy.wait_group(RING - 2)
        # sums of the next row
        if turn + 1 < turns:
            _start, _written, shift = row_offsets(row + groups, columns, stride, FORM)
            stop = gl.minimum(end, shift + columns)
            next_top, next_total = part_statistics(
                ring, (turn + 1) % RING, begin, shift, stop, scale, PLAIN, LOG, KEPT, FORM
            )
            if PARTS > 1:
                own_words = row_words(words, group, turn + 1, PARTS) + own
                publish(own_words, next_top, turn + 2)
                publish(own_words + PARTS, next_total, turn + 2)
        # collect the sums of this row, and write it
        if turn >= 0:
            if PARTS > 1:
                each = gl.arange(0, PARTS, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
                tops = gl.where(each < parts, wait_for_values(row_slot, polled_tops, parts, turn + 1, PARTS), LOWEST)
                totals = wait_for_values(row_slot + PARTS, polled_totals, parts, turn + 1, PARTS)
                top = gl.max(tops, 0)
                total = gl.sum(totals * exp_score(tops, top, False, LOG), 0)
            # a row of -inf alone has a sum of 0
            if LOG:
                finish = gl.log(gl.where(total == 0, 1.0, total))
            else:
                finish = gl.where(total == 0, 0.0, 1.0 / total)
            _start, written, shift = row_offsets(row, columns, stride, FORM)
            stop = gl.minimum(end, shift + columns)
            for c in gl.static_range(CHUNKS):
                values = load_chunk(ring, turn % RING, c, FORM)
                if not PLAIN:
                    values *= scale
                if LOG:
                    values = values - top - finish
                else:
                    values = exp_score(values, top, PLAIN, LOG) * finish
                store_chunk(result + written, values, c, begin, shift, stop, FORM)
    clear_words(words, groups, PARTS)


@gluon.jit
def part_sum(gradients, results, slot, begin, shift, stop, LOG: gl.constexpr, FORM: gl.constexpr):
    """The sum of g * y over a part, or of g for a logarithm, without keys that are not seen."""
    sums = gl.zeros([FORM[3]], gl.float32, FORM[4])
    for c in gl.static_range(FORM[2]):
        product = load_chunk(gradients, slot, c, FORM)
        y = load_chunk(results, slot, c, FORM)
        if LOG:
            product = gl.where(y == -float("inf"), 0.0, product)
        else:
            product *= y
        if FORM[0] == SHIFTED:
            product = mask_chunk(product, 0.0, c, begin, shift, stop, FORM)
        sums += product
    return gl.sum(sums, 0)


@gluon.jit(do_not_specialize=["rows", "columns", "gradient_stride", "y_stride", "part", "parts", "groups"])
def softmax_backward_parts(
    gradient, y, dx, words, scale, rows, columns, gradient_stride, y_stride, part, parts, groups,
    LOG: gl.constexpr, RING: gl.constexpr, PARTS: gl.constexpr,
    MODE: gl.constexpr, VECTOR: gl.constexpr, CHUNKS: gl.constexpr, CHUNK: gl.constexpr,
):  # fmt: skip
    FORM: gl.constexpr = (MODE, VECTOR, CHUNKS, CHUNK, gl.BlockedLayout([VECTOR], [32], [gl.num_warps()], [0]))
    scale = scale.to(gl.float32)
    number = draw_ticket(words, PARTS)
    group = number // parts
    own = number % parts
    begin, end = part_bounds(own, part, FORM)
    turns = gl.cdiv(rows - group, groups)
    gradients = allocate_ring(gradient.dtype.element_ty, RING, FORM)
    results = allocate_ring(y.dtype.element_ty, RING, FORM)
    for turn in gl.static_range(RING - 2):
        if turn < turns:
            copy_row(gradient, gradients, group + turn * groups, turn, begin, end, columns, gradient_stride, RING, FORM)
            copy_row(y, results, group + turn * groups, turn, begin, end, columns, y_stride, RING, FORM)
        async_copy.commit_group()
    next_total = 0.0
    for turn in range(-1, turns):
        row = group + turn * groups
        # start to copy the row RING - 1 turns ahead
        if turn + RING - 1 < turns:
            ahead = row + (RING - 1) * groups
            copy_row(gradient, gradients, ahead, turn + RING - 1, begin, end, columns, gradient_stride, RING, FORM)
            copy_row(y, results, ahead, turn + RING - 1, begin, end, columns, y_stride, RING, FORM)
        async_copy.commit_group()
        total = next_total
        row_slot = row_words(words, group, turn, PARTS)
        if PARTS > 1:
            polled = poll(row_slot, PARTS)
        async_copy.wait_group(RING - 2)
        # sums of the next row
        if turn + 1 < turns:
            _start, _written, shift = row_offsets(row + groups, columns, y_stride, FORM)
            stop = gl.minimum(end, shift + columns)
            next_total = part_sum(gradients, results, (turn + 1) % RING, begin, shift, stop, LOG, FORM)
            if PARTS > 1:
                publish(row_words(words, group, turn + 1, PARTS) + own, next_total, turn + 2)
        # collect the sums of this row, and write it
        if turn >= 0:
            if PARTS > 1:
                total = gl.sum(wait_for_values(row_slot, polled, parts, turn + 1, PARTS), 0)
            _start, written, shift = row_offsets(row, columns, y_stride, FORM)
            stop = gl.minimum(end, shift + columns)
            for c in gl.static_range(CHUNKS):
                g = load_chunk(gradients, turn % RING, c, FORM)
                values = load_chunk(results, turn % RING, c, FORM)
                if LOG:
                    seen = scale * (g - gl.exp2(values * LOG2_E) * total)
                    values = gl.where(values == -float("inf"), 0.0, seen)
                else:
                    values = scale * values * (g - total)
                store_chunk(dx + written, values, c, begin, shift, stop, FORM)
    clear_words(words, groups, PARTS)


def forward(x: Tensor, result: Tensor, scale: float, config: RingConfig, *, log: bool) -> bool:
    """Writes the softmax of rows. Returns False, and does nothing, for unsupported rows."""
    rows, columns = x.shape
    plan = plan_ring(rows, columns, config, [(x, x.stride(0))], [result])
    if plan is None:
        return False
    launch(
        softmax_parts, plan.grid, x, result, plan.words(result), scale, rows, columns, x.stride(0),
        plan.part, plan.parts, plan.groups, scale == 1.0, log, config.kept and plan.mode == FULL.value,
        plan.ring, plan.padded, *plan.form, warps=plan.warps, registers=plan.registers,
    )  # fmt: skip
    return True


def backward(gradient: Tensor, y: Tensor, dx: Tensor, scale: float, config: RingConfig, *, log: bool) -> bool:
    """Writes the gradient of x from that of the result. Returns False, and does nothing, for unsupported rows."""
    rows, columns = y.shape
    strides = gradient.stride(0), y.stride(0)
    plan = plan_ring(rows, columns, config, [(gradient, strides[0]), (y, strides[1])], [dx])
    if plan is None:
        return False
    launch(
        softmax_backward_parts, plan.grid, gradient, y, dx, plan.words(dx), scale, rows, columns, *strides,
        plan.part, plan.parts, plan.groups, log, plan.ring, plan.padded, *plan.form,
        warps=plan.warps, registers=plan.registers,
    )  # fmt: skip
    return True
