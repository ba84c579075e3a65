"""The kernels of `cross_entropy` for short rows, for its gradient alone, and for what is done once for all rows."""

from __future__ import annotations

import triton
import triton.language as tl

from nearpeak.kernels.jit.cross_entropy_row import capped, finish_row, one_over, row_start, shares, slope
from nearpeak.kernels.jit.rows import LOWEST, exponential


@triton.jit
def count_kernel(
    target, weight, parts, rows, columns, ignore_index, chunk, WEIGHTED: tl.constexpr, EACH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The sum of the weights of the targets that are kept, in parts, of which a program writes EACH."""
    program = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, chunk, BLOCK):
        step = start + tl.arange(0, BLOCK)
        row = program * chunk + step
        inside = (step < chunk) & (row < rows)
        wanted = tl.load(target + row, mask=inside, other=0).to(tl.int64)
        valid = inside & (wanted != ignore_index) & (wanted >= 0) & (wanted < columns)
        if WEIGHTED:
            total += tl.load(weight + wanted, mask=valid, other=0.0).to(tl.float32)
        else:
            total += valid.to(tl.float32)
    tl.store(parts + program * EACH + tl.arange(0, EACH), tl.sum(tl.reshape(total, [EACH, BLOCK // EACH]), 1))


@triton.jit
def whole_rows_kernel(
    logits, gradient, target, weight, weight_total, parts, losses, tops, totals, logprobs, entropies,
    rows, columns, inner, outer_stride, row_stride, gradient_outer, gradient_stride,
    ignore_index, smoothing, cap, z,
    OUTER: tl.constexpr, MEAN: tl.constexpr, SCALED: tl.constexpr, WEIGHTED: tl.constexpr, SMOOTH: tl.constexpr,
    CAP: tl.constexpr, Z: tl.constexpr, GRADIENT: tl.constexpr, LOGPROBS: tl.constexpr, ENTROPY: tl.constexpr,
    PARTS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows that fit into registers, several by a program: each byte is read once."""
    smoothing, cap, z = tl.cast(smoothing, tl.float32), tl.cast(cap, tl.float32), tl.cast(z, tl.float32)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    scale = one_over(parts, MEAN, PARTS)
    wanted = tl.load(target + row, mask=row < rows, other=0).to(tl.int64)
    kept = (row < rows) & (wanted != ignore_index)
    valid = kept & (wanted >= 0) & (wanted < columns)
    start = row_start(row, inner, outer_stride, row_stride, OUTER)
    column = tl.arange(0, BLOCK)[None, :]
    inside = valid[:, None] & (column < columns)
    loaded = tl.load(logits + start[:, None] + column, mask=inside, other=float("-inf"))
    values, bend = capped(loaded, cap, CAP)
    logit = capped(tl.load(logits + start + wanted, mask=valid, other=0.0), cap, CAP)[0]
    own, all_terms, spread = shares(wanted, valid, weight, weight_total, smoothing, columns, WEIGHTED, SMOOTH)
    if CAP:
        values = tl.where(inside, values, float("-inf"))
    top = tl.maximum(tl.max(values, 1), LOWEST)
    below = values - top[:, None]
    powers = exponential(below)
    total = tl.sum(powers, 1)
    smooth, spread_of = total, total
    if SMOOTH:
        distance = tl.where(inside, below, 0.0)
        if WEIGHTED:
            distance *= tl.load(weight + column, mask=column < columns, other=0.0).to(tl.float32)
        smooth = tl.sum(distance, 1)
    if ENTROPY:
        spread_of = tl.sum(tl.where(powers > 0.0, powers * below, 0.0), 1)
    extra = finish_row(
        row, rows, kept, valid, logit, top, total, smooth, spread_of, own, all_terms, spread, z, scale,
        losses, tops, totals, logprobs, entropies, SMOOTH, Z, LOGPROBS, ENTROPY,
    )  # fmt: skip
    if GRADIENT:
        if not SCALED:
            scale = 1.0
        factor = (scale * all_terms / total)[:, None]
        extra = (scale * extra / total)[:, None]
        own = (own + tl.zeros_like(total)) * scale
        result = slope(
            bend, powers, column, wanted[:, None], True, factor, own[:, None], scale * spread, extra, weight,
            column < columns, WEIGHTED, SMOOTH, CAP, Z,
        )  # fmt: skip
        none = tl.where(kept, float("nan"), 0.0)[:, None]
        result = tl.where(valid[:, None], result, none)
        to = row_start(row, inner, gradient_outer, gradient_stride, OUTER)
        tl.store(
            gradient + to[:, None] + column,
            result.to(gradient.dtype.element_ty),
            mask=(row < rows)[:, None] & (column < columns),
        )


@triton.jit
def gradient_kernel(
    upstream, logits, gradient, target, weight, weight_total, parts, tops, totals,
    rows, columns, inner, outer_stride, row_stride, gradient_outer, gradient_stride, upstream_stride,
    ignore_index, smoothing, cap, z,
    OUTER: tl.constexpr, MEAN: tl.constexpr, WEIGHTED: tl.constexpr, SMOOTH: tl.constexpr,
    CAP: tl.constexpr, Z: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    SHIFT: tl.constexpr,
):  # fmt: skip
    """The gradient from the logits and what the forward pass found of each row; SHIFT as above, for single rows."""
    smoothing, cap, z = tl.cast(smoothing, tl.float32), tl.cast(cap, tl.float32), tl.cast(z, tl.float32)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    known = row < rows
    wanted = tl.load(target + row, mask=known, other=0).to(tl.int64)
    kept = known & (wanted != ignore_index)
    valid = kept & (wanted >= 0) & (wanted < columns)
    top = tl.load(tops + row, mask=known, other=0.0)
    total = tl.load(totals + row, mask=known, other=1.0)
    scale = one_over(parts, MEAN, PARTS) * tl.load(upstream + row * upstream_stride, mask=known, other=0.0)
    scale = scale.to(tl.float32)
    own, all_terms, spread = shares(wanted, valid, weight, weight_total, smoothing, columns, WEIGHTED, SMOOTH)
    extra = 0.0
    if Z:
        extra = 2.0 * z * (top + tl.log(total))
    factor = (scale * all_terms / total)[:, None]
    extra = (scale * extra / total)[:, None]
    own = (scale * own)[:, None]
    spread = (scale * spread)[:, None]
    none = tl.where(kept, float("nan"), 0.0)[:, None]
    start = row_start(row, inner, outer_stride, row_stride, OUTER)
    to = row_start(row, inner, gradient_outer, gradient_stride, OUTER)
    lead = tl.zeros([ROWS], tl.int32)
    if SHIFT:
        lead = (start % SHIFT).to(tl.int32)
        start = start // SHIFT * SHIFT
        to = to // SHIFT * SHIFT
    lead = lead[:, None]
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    column = at - lead
    inside = known[:, None] & (column >= 0) & (column < columns)
    source, sink = logits + start[:, None] + at, gradient + to[:, None] + at
    # of one row, all but the first and last block need no mask
    unmasked = (ROWS == 1) & (tl.program_id(1) > 0) & ((tl.program_id(1) + 1) * BLOCK <= columns)
    if unmasked:
        loaded = tl.load(source)
    else:
        loaded = tl.load(source, mask=inside & valid[:, None], other=0.0)
    values, bend = capped(loaded, cap, CAP)
    powers = exponential(values - top[:, None])
    result = slope(
        bend,
        powers,
        column,
        wanted[:, None],
        True,
        factor,
        own,
        spread,
        extra,
        weight,
        inside,
        WEIGHTED,
        SMOOTH,
        CAP,
        Z,
    )
    result = tl.where(valid[:, None], result, none).to(gradient.dtype.element_ty)
    if unmasked:
        tl.store(sink, result)
    else:
        tl.store(sink, result, mask=inside)


@triton.jit
def scale_kernel(gradient, factor, elements, BLOCK: tl.constexpr):
    """Multiplies a gradient by one number, in place; where this is 1, it reads no more than that number."""
    by = tl.load(factor).to(tl.float32)
    if by != 1.0:
        for block in range(tl.program_id(0).to(tl.int64), tl.cdiv(elements, BLOCK), tl.num_programs(0)):
            at = block * BLOCK + tl.arange(0, BLOCK)
            inside = at < elements
            values = tl.load(gradient + at, mask=inside)
            tl.store(gradient + at, (values.to(tl.float32) * by).to(gradient.dtype.element_ty), mask=inside)
