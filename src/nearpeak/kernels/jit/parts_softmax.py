"""The kernels of softmax and log-softmax over parts of rows in shared memory, in Gluon: see `parts`.

Exponentials are powers of 2, of numbers that were multiplied by log2(e) in the same instruction that takes the maximum
off them; the maximum is multiplied before, once, and any error of that cancels. A logarithm takes natural numbers.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from nearpeak.kernels.jit import rows as shared
from nearpeak.kernels.jit.launch import launch
from nearpeak.kernels.jit.parts import plan
from nearpeak.kernels.jit.parts_rows import (
    FULL,
    SHIFTED,
    another,
    bounds,
    chunk_of,
    cleaned,
    clear,
    copy_row,
    look,
    place,
    room,
    tell,
    ticket,
    told,
    words_of,
    write,
)

LOWEST = gl.constexpr(shared.LOWEST.value)
LOG2_E = gl.constexpr(shared.LOG2_E.value)


@gluon.jit
def score_of(ring, slot, c: gl.constexpr, begin, shift, stop, scale, PLAIN: gl.constexpr, FORM: gl.constexpr):
    """A chunk of scale * x, -inf for what is not of the row; if PLAIN the scale of x is 1."""
    values = chunk_of(ring, slot, c, FORM)
    if not PLAIN:
        values *= scale
    return cleaned(values, -float("inf"), c, begin, shift, stop, FORM)


@gluon.jit
def power(score, top, PLAIN: gl.constexpr, LOG: gl.constexpr):
    """The exponential of what a score is below the maximum."""
    if LOG:
        return gl.exp2((score - top) * LOG2_E)
    if PLAIN:
        return gl.exp2(gl.fma(score, LOG2_E, -top))
    return gl.exp2(score - top)


@gluon.jit
def statistics_of(
    ring, slot, begin, shift, stop, scale,
    PLAIN: gl.constexpr, LOG: gl.constexpr, KEPT: gl.constexpr, FORM: gl.constexpr,
):  # fmt: skip
    """Of a part the maximum, and the sum of the exponentials of what is below it."""
    tops = gl.full([FORM[3]], LOWEST, gl.float32, FORM[4])
    for c in gl.static_range(FORM[2]):
        tops = gl.maximum(tops, score_of(ring, slot, c, begin, shift, stop, scale, PLAIN, FORM))
    top = gl.max(tops, 0)
    if PLAIN and not LOG:
        top = gl.maximum(top * LOG2_E, LOWEST)
    if not KEPT:
        slot = another(slot, stop)
    sums = gl.zeros([FORM[3]], gl.float32, FORM[4])
    for c in gl.static_range(FORM[2]):
        sums += power(score_of(ring, slot, c, begin, shift, stop, scale, PLAIN, FORM), top, PLAIN, LOG)
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
    number = ticket(words, PARTS)
    group = number // parts
    own = number % parts
    begin, end = bounds(own, part, FORM)
    turns = gl.cdiv(rows - group, groups)
    ring = room(x.dtype.element_ty, RING, FORM)
    for turn in gl.static_range(RING - 2):
        if turn < turns:
            copy_row(x, ring, group + turn * groups, turn, begin, end, columns, stride, RING, FORM)
        async_copy.commit_group()
    next_top = 0.0
    next_total = 0.0
    for turn in range(-1, turns):
        row = group + turn * groups
        if turn + RING - 1 < turns:
            copy_row(x, ring, row + (RING - 1) * groups, turn + RING - 1, begin, end, columns, stride, RING, FORM)
        async_copy.commit_group()
        top = next_top
        total = next_total
        there = words_of(words, group, turn, PARTS)
        if PARTS > 1:
            found_tops = look(there, PARTS)
            found_totals = look(there + PARTS, PARTS)
        async_copy.wait_group(RING - 2)
        if turn + 1 < turns:
            _start, _written, shift = place(row + groups, columns, stride, FORM)
            stop = gl.minimum(end, shift + columns)
            next_top, next_total = statistics_of(
                ring, (turn + 1) % RING, begin, shift, stop, scale, PLAIN, LOG, KEPT, FORM
            )
            if PARTS > 1:
                mine = words_of(words, group, turn + 1, PARTS) + own
                tell(mine, next_top, turn + 2)
                tell(mine + PARTS, next_total, turn + 2)
        if turn >= 0:
            if PARTS > 1:
                each = gl.arange(0, PARTS, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
                tops = gl.where(each < parts, told(there, found_tops, parts, turn + 1, PARTS), LOWEST)
                totals = told(there + PARTS, found_totals, parts, turn + 1, PARTS)
                top = gl.max(tops, 0)
                total = gl.sum(totals * power(tops, top, False, LOG), 0)
            # a row of nothing but -inf has a sum of 0
            if LOG:
                finish = gl.log(gl.where(total == 0, 1.0, total))
            else:
                finish = gl.where(total == 0, 0.0, 1.0 / total)
            _start, written, shift = place(row, columns, stride, FORM)
            stop = gl.minimum(end, shift + columns)
            for c in gl.static_range(CHUNKS):
                values = chunk_of(ring, turn % RING, c, FORM)
                if not PLAIN:
                    values *= scale
                if LOG:
                    values = values - top - finish
                else:
                    values = power(values, top, PLAIN, LOG) * finish
                write(result + written, values, c, begin, shift, stop, FORM)
    clear(words, groups, PARTS)


@gluon.jit
def sum_of(gradients, results, slot, begin, shift, stop, LOG: gl.constexpr, FORM: gl.constexpr):
    """Of a part the sum of g * y, or of g for a logarithm; keys that are not seen have no part in it."""
    sums = gl.zeros([FORM[3]], gl.float32, FORM[4])
    for c in gl.static_range(FORM[2]):
        product = chunk_of(gradients, slot, c, FORM)
        y = chunk_of(results, slot, c, FORM)
        if LOG:
            product = gl.where(y == -float("inf"), 0.0, product)
        else:
            product *= y
        if FORM[0] == SHIFTED:
            product = cleaned(product, 0.0, c, begin, shift, stop, FORM)
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
    number = ticket(words, PARTS)
    group = number // parts
    own = number % parts
    begin, end = bounds(own, part, FORM)
    turns = gl.cdiv(rows - group, groups)
    gradients = room(gradient.dtype.element_ty, RING, FORM)
    results = room(y.dtype.element_ty, RING, FORM)
    for turn in gl.static_range(RING - 2):
        if turn < turns:
            copy_row(gradient, gradients, group + turn * groups, turn, begin, end, columns, gradient_stride, RING, FORM)
            copy_row(y, results, group + turn * groups, turn, begin, end, columns, y_stride, RING, FORM)
        async_copy.commit_group()
    next_total = 0.0
    for turn in range(-1, turns):
        row = group + turn * groups
        if turn + RING - 1 < turns:
            ahead = row + (RING - 1) * groups
            copy_row(gradient, gradients, ahead, turn + RING - 1, begin, end, columns, gradient_stride, RING, FORM)
            copy_row(y, results, ahead, turn + RING - 1, begin, end, columns, y_stride, RING, FORM)
        async_copy.commit_group()
        total = next_total
        there = words_of(words, group, turn, PARTS)
        if PARTS > 1:
            found = look(there, PARTS)
        async_copy.wait_group(RING - 2)
        if turn + 1 < turns:
            _start, _written, shift = place(row + groups, columns, y_stride, FORM)
            stop = gl.minimum(end, shift + columns)
            next_total = sum_of(gradients, results, (turn + 1) % RING, begin, shift, stop, LOG, FORM)
            if PARTS > 1:
                tell(words_of(words, group, turn + 1, PARTS) + own, next_total, turn + 2)
        if turn >= 0:
            if PARTS > 1:
                total = gl.sum(told(there, found, parts, turn + 1, PARTS), 0)
            _start, written, shift = place(row, columns, y_stride, FORM)
            stop = gl.minimum(end, shift + columns)
            for c in gl.static_range(CHUNKS):
                g = chunk_of(gradients, turn % RING, c, FORM)
                values = chunk_of(results, turn % RING, c, FORM)
                if LOG:
                    seen = scale * (g - gl.exp2(values * LOG2_E) * total)
                    values = gl.where(values == -float("inf"), 0.0, seen)
                else:
                    values = scale * values * (g - total)
                write(dx + written, values, c, begin, shift, stop, FORM)
    clear(words, groups, PARTS)


def forward(x: Tensor, result: Tensor, scale: float, config: dict[str, Any], *, log: bool) -> bool:
    """Writes the softmax of rows; False where this is not for them, and nothing is done."""
    rows, columns = x.shape
    chosen = plan(rows, columns, config, [(x, x.stride(0))], [result])
    if chosen is None:
        return False
    launch(
        softmax_parts, chosen.grid, x, result, chosen.words(result), scale, rows, columns, x.stride(0),
        chosen.part, chosen.parts, chosen.groups, scale == 1.0, log, config["kept"] and chosen.mode == FULL.value,
        chosen.ring, chosen.padded, *chosen.form, warps=chosen.warps, registers=chosen.registers,
    )  # fmt: skip
    return True


def backward(gradient: Tensor, y: Tensor, dx: Tensor, scale: float, config: dict[str, Any], *, log: bool) -> bool:
    """Writes the gradient of x from that of the result; False where this is not for such rows, and nothing is done."""
    rows, columns = y.shape
    strides = gradient.stride(0), y.stride(0)
    chosen = plan(rows, columns, config, [(gradient, strides[0]), (y, strides[1])], [dx])
    if chosen is None:
        return False
    launch(
        softmax_backward_parts, chosen.grid, gradient, y, dx, chosen.words(dx), scale, rows, columns, *strides,
        chosen.part, chosen.parts, chosen.groups, log, chosen.ring, chosen.padded, *chosen.form,
        warps=chosen.warps, registers=chosen.registers,
    )  # fmt: skip
    return True
