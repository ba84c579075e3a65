"""The kernel of `cross_entropy` for long rows."""

from __future__ import annotations

import triton
import triton.language as tl

from nearpeak.kernels.jit.cross_entropy_row import capped, finish_row, one_over, row_start, shares, slope
from nearpeak.kernels.jit.rows import LOWEST, exponential


@triton.jit
def absorb(
    values, column, inside, tops, totals, smooths, spreads, origin, weight,
    WEIGHTED: tl.constexpr, SMOOTH: tl.constexpr, ENTROPY: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Takes a block [repeats, lanes] into what each lane has: no thread waits for another before the row's end."""
    if MASKED:
        values = tl.where(inside, values, float("-inf"))
    higher = tl.maximum(tops, tl.max(values, 0))
    shrink = exponential(tops - higher)
    below = values - higher[None, :]
    powers = exponential(below)
    if ENTROPY:
        # the distances so far were from the top so far
        moved = tl.where(totals > 0.0, (tops - higher) * totals, 0.0)
        spreads = shrink * (spreads + moved) + tl.sum(tl.where(powers > 0.0, powers * below, 0.0), 0)
    if SMOOTH:
        distance = values - origin
        if MASKED:
            distance = tl.where(inside, distance, 0.0)
        if WEIGHTED:
            distance *= tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
        smooths += tl.sum(distance, 0)
    totals = totals * shrink + tl.sum(powers, 0)
    return higher, totals, smooths, spreads


@triton.jit
def write_block(
    source, sink, first, step, lead, end, wanted, top, factor, own, spread, extra, weight, cap,
    WEIGHTED: tl.constexpr, SMOOTH: tl.constexpr, CAP: tl.constexpr, Z: tl.constexpr,
    MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of one block of a row, whose elements begin at `first` from where the row's addresses do."""
    at = first + step
    inside = (at >= lead) & (at < end)
    if MASKED:
        values = tl.load(source + at, mask=inside, other=0.0, eviction_policy="evict_first")
    else:
        values = tl.load(source + at, eviction_policy="evict_first")
    values, bend = capped(values, cap, CAP)
    here = (wanted + lead >= first) & (wanted + lead < first + BLOCK)
    powers = exponential(values - top)
    result = slope(
        bend,
        powers,
        at - lead,
        wanted,
        here,
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
    ).to(sink.dtype.element_ty)
    if MASKED:
        tl.store(sink + at, result, mask=inside, eviction_policy="evict_first")
    else:
        tl.store(sink + at, result, eviction_policy="evict_first")


@triton.jit
def long_rows_kernel(
    logits, gradient, target, weight, weight_total, parts, losses, tops, totals, logprobs, entropies,
    rows, columns, inner, outer_stride, row_stride, gradient_outer, gradient_stride,
    ignore_index, smoothing, cap, z,
    OUTER: tl.constexpr, MEAN: tl.constexpr, SCALED: tl.constexpr, WEIGHTED: tl.constexpr, SMOOTH: tl.constexpr,
    CAP: tl.constexpr, Z: tl.constexpr, GRADIENT: tl.constexpr, LOGPROBS: tl.constexpr, ENTROPY: tl.constexpr,
    PARTS: tl.constexpr, REPEATS: tl.constexpr, LANES: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Rows of any length, one by a program: read once from memory, and again, from the cache, for the gradient.

    The second time goes from the end to the beginning, as what was read last is in the cache most surely. Where rows
    do not begin at multiples of 16 bytes, SHIFT is how many elements these are: blocks begin at the multiple before the
    row, and all but the first and the last need no mask, so that they are loaded and stored by 16 bytes too.
    """
    smoothing, cap, z = tl.cast(smoothing, tl.float32), tl.cast(cap, tl.float32), tl.cast(z, tl.float32)
    BLOCK: tl.constexpr = REPEATS * LANES
    row = tl.program_id(0).to(tl.int64)
    wanted = tl.load(target + row).to(tl.int64)
    kept = wanted != ignore_index
    valid = kept & (wanted >= 0) & (wanted < columns)
    start = row_start(row, inner, outer_stride, row_stride, OUTER)
    to = row_start(row, inner, gradient_outer, gradient_stride, OUTER)
    lead = 0
    first = 0
    if SHIFT:
        lead = (start % SHIFT).to(tl.int32)
        start = start // SHIFT * SHIFT
        to = to // SHIFT * SHIFT
        first = 1
    source, sink = logits + start, gradient + to
    end = columns + lead
    full = end // BLOCK
    last = tl.maximum(full, first)
    step = (tl.arange(0, REPEATS) * LANES)[:, None] + tl.arange(0, LANES)[None, :]
    if valid:
        scale = one_over(parts, MEAN, PARTS)
        logit = capped(tl.load(source + lead + wanted), cap, CAP)[0]
        own, all_terms, spread = shares(wanted, valid, weight, weight_total, smoothing, columns, WEIGHTED, SMOOTH)
        origin = tl.where(tl.abs(logit) < float("inf"), logit, 0.0)  # sums of distances from it do not cancel
        lane_tops = tl.full([LANES], LOWEST, tl.float32)
        lane_totals = tl.zeros([LANES], tl.float32)
        smooths, spreads = lane_totals, lane_totals
        if SHIFT:
            inside = (step >= lead) & (step < end)
            values = capped(tl.load(source + step, mask=inside, other=0.0), cap, CAP)[0]
            lane_tops, lane_totals, smooths, spreads = absorb(
                values, step - lead, inside, lane_tops, lane_totals, smooths, spreads, origin, weight,
                WEIGHTED, SMOOTH, ENTROPY, True,
            )  # fmt: skip
        for block in range(first, full):
            at = block * BLOCK + step
            if GRADIENT:
                loaded = tl.load(source + at, eviction_policy="evict_last")
            else:
                loaded = tl.load(source + at, eviction_policy="evict_first")
            values = capped(loaded, cap, CAP)[0]
            lane_tops, lane_totals, smooths, spreads = absorb(
                values, at - lead, at < end, lane_tops, lane_totals, smooths, spreads, origin, weight,
                WEIGHTED, SMOOTH, ENTROPY, False,
            )  # fmt: skip
        if last * BLOCK < end:
            at = last * BLOCK + step
            values = capped(tl.load(source + at, mask=at < end, other=0.0), cap, CAP)[0]
            lane_tops, lane_totals, smooths, spreads = absorb(
                values, at - lead, at < end, lane_tops, lane_totals, smooths, spreads, origin, weight,
                WEIGHTED, SMOOTH, ENTROPY, True,
            )  # fmt: skip
        top = tl.max(lane_tops, 0)
        shrink = exponential(lane_tops - top)
        total = tl.sum(lane_totals * shrink, 0)
        smooth, spread_of = total, total
        if SMOOTH:
            smooth = tl.sum(smooths, 0)
            if WEIGHTED:
                smooth += tl.load(weight_total) * (origin - top)
            else:
                smooth += columns * (origin - top)
        if ENTROPY:
            moved = tl.where(lane_totals > 0.0, (lane_tops - top) * lane_totals, 0.0)
            spread_of = tl.sum(shrink * (spreads + moved), 0)
        extra = finish_row(
            row, rows, kept, valid, logit, top, total, smooth, spread_of, own, all_terms, spread, z, scale,
            losses, tops, totals, logprobs, entropies, SMOOTH, Z, LOGPROBS, ENTROPY,
        )  # fmt: skip
        if GRADIENT:
            if not SCALED:
                scale = 1.0
            factor = scale * all_terms / total
            extra = scale * extra / total
            own = scale * own
            spread = scale * spread
            if last * BLOCK < end:
                write_block(
                    source, sink, last * BLOCK, step, lead, end, wanted, top, factor, own, spread, extra, weight, cap,
                    WEIGHTED, SMOOTH, CAP, Z, True, BLOCK,
                )  # fmt: skip
            for block in range(first, full):
                write_block(
                    source, sink, (full - 1 - block + first) * BLOCK, step, lead, end, wanted, top, factor, own,
                    spread, extra, weight, cap, WEIGHTED, SMOOTH, CAP, Z, False, BLOCK,
                )  # fmt: skip
            if SHIFT:
                write_block(
                    source, sink, 0, step, lead, end, wanted, top, factor, own, spread, extra, weight, cap,
                    WEIGHTED, SMOOTH, CAP, Z, True, BLOCK,
                )  # fmt: skip
    else:
        none = tl.where(kept, float("nan"), 0.0)
        tl.store(losses + row, none * one_over(parts, MEAN, PARTS))  # a mean of nothing is not a number
        tl.store(tops + row, 0.0)
        tl.store(totals + row, 1.0)
        if LOGPROBS:
            tl.store(logprobs + row, none)
        if ENTROPY:
            tl.store(entropies + row, none)
        if GRADIENT:
            blank = (tl.zeros([REPEATS, LANES], tl.float32) + none).to(gradient.dtype.element_ty)
            for block in range(last + 1):
                at = block * BLOCK + step
                tl.store(sink + at, blank, mask=(at >= lead) & (at < end))
