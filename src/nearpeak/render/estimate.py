"""An estimate as text: the three floors, where the time goes, and what has no model."""

from __future__ import annotations

import textwrap

from nearpeak.bound.estimate import Estimate, EstimatedOp
from nearpeak.bound.tiles import Tiling
from nearpeak.render.roofline_points import short_name
from nearpeak.render.table import table
from nearpeak.render.timing import plain
from nearpeak.units import percent, quantity, seconds, significant

TOP = 12
WIDTH = 80
CEILINGS = {"measured": "measured ceilings", "derated": "derated datasheet", "datasheet": "datasheet peaks"}
BADLY_FILLED = 0.9
"""Products whose tiles and waves leave less than this of the peak are shown."""
MOST_PRODUCTS = 6


def text(estimate: Estimate, top: int = TOP) -> str:
    """The whole report, within 80 columns."""
    parts = [
        heading(estimate),
        _families(estimate),
        _top(estimate, top),
        _badly_filled(estimate),
        _coverage(estimate),
    ]
    if estimate.truncated:
        parts.append("The trace stopped at its limit: these are figures of its beginning.")
    parts += [textwrap.fill(plain(note), WIDTH) for note in estimate.notes]
    return "\n\n".join(part for part in parts if part)


def heading(estimate: Estimate) -> str:
    """The machine, the amount of work and the three floors."""
    count = f"{len(estimate.ops)} op{'' if len(estimate.ops) == 1 else 's'}"
    line = (
        f"On {plain(estimate.machine, 40)}, {CEILINGS.get(estimate.how, estimate.how)}: {count}, "
        f"{quantity(estimate.flops, 'FLOP')}, {quantity(estimate.bytes, 'B')}"
    )
    return "\n\n".join(part for part in (line, _floors(estimate), _expected(estimate)) if part)


def _expected(estimate: Estimate) -> str:
    """No floor: what good kernels take."""
    if estimate.expected_s is None:
        return ""
    own = estimate.how == "measured" and estimate.expected_from == estimate.machine
    whose = "here" if own else f"on {plain(estimate.expected_from, 30)}"
    times = (
        f", {significant(estimate.expected_s / estimate.as_written_s)} x as written" if estimate.as_written_s else ""
    )
    return f"Expected: {seconds(estimate.expected_s)}{times}, kernels as measured {whose}."


def _floors(estimate: Estimate) -> str:
    rows = [
        ["as written", seconds(estimate.as_written_s), "every op at its own roofline"],
        ["fused", seconds(estimate.fused_s), "intermediates that need not reach memory do not"],
        ["ideal", seconds(estimate.ideal_s), "inputs, parameters and results cross memory once"],
    ]
    return table(["floor", "time", "meaning"], rows, "lrl")


def _families(estimate: Estimate) -> str:
    totals: dict[str, list[float]] = {}
    for op in estimate.ops:
        entry = totals.setdefault(op.family, [0.0, 0.0, 0.0, 0.0])
        for i, value in enumerate((1.0, op.seconds, op.flops, op.bytes_read + op.bytes_written)):
            entry[i] += value
    rows = [
        [
            family,
            f"{count:.0f}",
            seconds(time),
            percent(time / estimate.as_written_s if estimate.as_written_s else 0.0),
            quantity(flops, "FLOP"),
            quantity(size, "B"),
        ]
        for family, (count, time, flops, size) in sorted(totals.items(), key=lambda item: -item[1][1])
        if time > 0
    ]
    return table(["family", "ops", "as written", "share", "FLOPs", "bytes"], rows)


def _top(estimate: Estimate, top: int) -> str:
    """The operators that take most, by operator and place."""
    totals: dict[tuple[str, str, str], list[float]] = {}
    examples: dict[tuple[str, str, str], EstimatedOp] = {}
    for op in estimate.ops:
        key = (op.name, op.phase, op.source)
        entry = totals.setdefault(key, [0.0, 0.0])
        entry[0] += 1
        entry[1] += op.seconds
        examples.setdefault(key, op)
    ranked = sorted(totals.items(), key=lambda item: -item[1][1])[:top]
    rows = [
        [
            plain(name.removeprefix("aten."), 28),
            f"{count:.0f}",
            seconds(time),
            examples[name, phase, source].limiter,
            phase,
            plain(source.rpartition("/")[2], 20),
        ]
        for (name, phase, source), (count, time) in ranked
        if time > 0
    ]
    return table(["op", "count", "time", "limit", "phase", "line"], rows, "lrrlll")


def _badly_filled(estimate: Estimate) -> str:
    """Matrix products, limited by compute, that lose much of the peak to tiles and waves; "" where there are none."""
    lost: dict[tuple[str, Tiling], list[float]] = {}
    for op in estimate.ops:
        if op.tiling is not None and op.limiter == "compute" and op.tiling.efficiency < BADLY_FILLED:
            entry = lost.setdefault((op.name, op.tiling), [0.0, 0.0])
            entry[0] += 1
            entry[1] += op.seconds * (1 / op.tiling.efficiency - 1)
    if not lost:
        return ""
    rows = []
    for (name, tiling), (count, time) in sorted(lost.items(), key=lambda item: -item[1][1])[:MOST_PRODUCTS]:
        batch = f"{tiling.batch} * " if tiling.batch > 1 else ""
        rows.append(
            [
                plain(short_name(name), 14) + (f" x{count:.0f}" if count > 1 else ""),
                f"{batch}{tiling.m}x{tiling.n}x{tiling.k}",
                f"{tiling.tile[0]}x{tiling.tile[1]}",
                f"{tiling.tiles / tiling.processors:.2f}",
                percent(tiling.useful, 0),
                percent(tiling.efficiency, 0),
                seconds(time),
            ]
        )
    processors = next(iter(lost))[1].processors
    title = (
        f"Matrix products that fill the {processors} processors badly: what tiles and waves alone\n"
        "leave of the peak, and the time that costs. It is no part of the bounds."
    )
    return f"{title}\n\n{table(['op', 'm x n x k', 'tile', 'waves', 'useful', 'left', 'cost'], rows, 'llrrrrr')}"


def _coverage(estimate: Estimate) -> str:
    coverage = estimate.coverage
    line = f"Modelled: {percent(coverage.seconds_share)} of the as-written time."
    if coverage.unmodelled:
        worst = sorted(coverage.unmodelled.items(), key=lambda item: -item[1])[:6]
        line += " Without a formula: " + ", ".join(f"{plain(name, 40)} x{count}" for name, count in worst) + "."
    return textwrap.fill(line, WIDTH)
