"""An estimate as text: the three floors, where the time goes, and what has no model."""

from __future__ import annotations

from nearpeak.bound.estimate import Estimate, EstimatedOp
from nearpeak.render.table import table
from nearpeak.render.timing import plain
from nearpeak.units import percent, quantity, seconds

TOP = 12


def text(estimate: Estimate, top: int = TOP) -> str:
    """The whole report, within 80 columns."""
    ceilings = {"measured": "measured ceilings", "derated": "derated datasheet", "datasheet": "datasheet peaks"}
    count = f"{len(estimate.ops)} op{'' if len(estimate.ops) == 1 else 's'}"
    parts = [
        f"On {plain(estimate.machine, 40)}, {ceilings.get(estimate.how, estimate.how)}: {count}, "
        f"{quantity(estimate.flops, 'FLOP')}, {quantity(estimate.bytes, 'B')}",
        _floors(estimate),
        _families(estimate),
        _top(estimate, top),
        _coverage(estimate),
    ]
    if estimate.truncated:
        parts.append("The trace stopped at its limit: these are figures of its beginning.")
    parts += [plain(note) for note in estimate.notes]
    return "\n\n".join(part for part in parts if part)


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


def _coverage(estimate: Estimate) -> str:
    coverage = estimate.coverage
    line = f"Modelled: {percent(coverage.seconds_share)} of the as-written time."
    if coverage.unmodelled:
        worst = sorted(coverage.unmodelled.items(), key=lambda item: -item[1])[:6]
        line += " Without a formula: " + ", ".join(f"{plain(name, 40)} x{count}" for name, count in worst) + "."
    return line
