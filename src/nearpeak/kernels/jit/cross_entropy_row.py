"""What the kernels of `cross_entropy` share: the arithmetic of a row.

Of a row the loss needs its maximum, the sum of exponentials below it, and the logit of the target; the gradient is
    scale * ((all terms + extra) * softmax - own at the target - spread * class weights) * slope of the softcap
with numbers that are the same for a whole row. Rows that are ignored are not read.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nearpeak.kernels.jit.rows import exponential


@triton.jit
def tanh(x):
    """The hyperbolic tangent and its slope in float32.

    From one exponential, and near 0, where that cancels, a polynomial: off by 1.5e-7 of its value at most.
    """
    size = tl.abs(x)
    decay = exponential(-2.0 * size)
    inverse = 1.0 / (1.0 + decay)
    far = 1.0 - 2.0 * decay * inverse
    square = size * size
    series = 0.0206324477 - 0.0056934003 * square
    series = -0.0537390970 + square * series
    series = 0.1333145648 + square * series
    series = -0.3333328366 + square * series
    near = size + size * square * series
    result = tl.where(size < 0.6, near, far)
    # the slope from the exponential: 1 - tanh**2 would cancel where that is near 1
    return tl.where(x < 0.0, -result, result), 4.0 * decay * inverse * inverse


@triton.jit
def capped(values, cap, CAP: tl.constexpr):
    """Logits in float32 and below the softcap, and the slope of that."""
    values = values.to(tl.float32)
    bend = values
    if CAP:
        part, bend = tanh(values / cap)
        values = cap * part
    return values, bend


@triton.jit
def row_start(row, inner, outer_stride, row_stride, OUTER: tl.constexpr):
    """Where a row begins, in elements: rows are `row_stride` apart, and blocks of `inner` rows `outer_stride`."""
    if OUTER:
        start = row // inner * outer_stride + row % inner * row_stride
    else:
        start = row * row_stride
    return start


@triton.jit
def one_over(parts, MEAN: tl.constexpr, PARTS: tl.constexpr):
    """What a mean multiplies each row with; 1 for a sum."""
    scale = 1.0
    if MEAN:
        scale = 1.0 / tl.sum(tl.load(parts + tl.arange(0, PARTS)))
    return scale


@triton.jit
def shares(target, valid, weight, weight_total, smoothing, columns, WEIGHTED: tl.constexpr, SMOOTH: tl.constexpr):
    """What the target's own term and all terms together weigh in a row's loss, and what each class weighs besides."""
    own = 1.0
    if WEIGHTED:
        own = tl.load(weight + target, mask=valid, other=0.0).to(tl.float32)
    all_terms = own
    spread = 0.0
    if SMOOTH:
        spread = smoothing / columns
        own = own * (1.0 - smoothing)
        if WEIGHTED:
            all_terms = own + spread * tl.load(weight_total)
        else:
            all_terms = own + smoothing
    return own, all_terms, spread


@triton.jit
def finish_row(
    row, rows, kept, valid, logit, top, total, smooth, spread_of, own, all_terms, spread, z, scale,
    losses, tops, totals, logprobs, entropies, SMOOTH: tl.constexpr, Z: tl.constexpr,
    LOGPROBS: tl.constexpr, ENTROPY: tl.constexpr,
):  # fmt: skip
    """Stores the loss of rows and what was asked for besides; gives by what the z-loss multiplies the softmax.

    `smooth` is the sum of the (weighted) distances of all logits from the top, `spread_of` that of the softmax.
    """
    inside = row < rows
    log_total = tl.log(total)
    below = top - logit  # before the logarithm: the difference of two large numbers is exact, their sums are not
    loss = own * (below + log_total)
    extra = 0.0
    if SMOOTH:
        loss += (all_terms - own) * log_total - spread * smooth
    if Z:
        normaliser = top + log_total
        loss += z * normaliser * normaliser
        extra = 2.0 * z * normaliser
    none = tl.where(kept, float("nan"), 0.0)
    # 0 times infinity where all are ignored: a mean of nothing is not a number
    tl.store(losses + row, tl.where(valid, loss, none) * scale, mask=inside)
    tl.store(tops + row, tl.where(valid, top, 0.0), mask=inside)
    tl.store(totals + row, tl.where(valid, total, 1.0), mask=inside)
    if LOGPROBS:
        tl.store(logprobs + row, tl.where(valid, -(below + log_total), none), mask=inside)
    if ENTROPY:
        tl.store(entropies + row, tl.where(valid, log_total - spread_of / total, none), mask=inside)
    return extra


@triton.jit
def slope(
    bend, powers, column, wanted, here, factor, own, spread, extra, weight, inside,
    WEIGHTED: tl.constexpr, SMOOTH: tl.constexpr, CAP: tl.constexpr, Z: tl.constexpr,
):  # fmt: skip
    """The gradient by logits from their exponentials and slopes of the softcap; `here`: the target may be here."""
    result = powers * factor
    if here:
        result = tl.where(column == wanted, result - own, result)
    if Z:
        result += powers * extra  # after the difference, which may be of almost equal numbers
    if SMOOTH:
        if WEIGHTED:
            result -= spread * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
        else:
            result -= spread
    if CAP:
        result = result * bend
    return result
