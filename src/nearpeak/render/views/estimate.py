"""An estimate as text: the three floors, where the time goes, fusion groups, intensities, and what has no model."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from nearpeak.bound.estimate import Estimate, EstimatedOp
from nearpeak.bound.fusion import FusionGroup
from nearpeak.bound.tiles import Tiling
from nearpeak.machines.machine import Machine
from nearpeak.render.picture.roofline_points import ceilings_of, engine_rate, operator_name
from nearpeak.render.text import table
from nearpeak.render.views.timing import plain
from nearpeak.units import percent, quantity, seconds, significant

TOP = 12
WIDTH = 80
CEILINGS = {"measured": "measured ceilings", "derated": "derated datasheet", "datasheet": "datasheet peaks"}
LOW_TILE_EFFICIENCY = 0.9
"""Products whose tiles and waves leave less than this of the peak are shown."""
MOST_GEMMS = 6


def text(estimate: Estimate, top: int = TOP) -> str:
    """The whole report, within 80 columns."""
    parts = [
        heading(estimate),
        _families(estimate),
        _top_ops(estimate, top),
        _tile_losses(estimate),
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


def _top_ops(estimate: Estimate, top: int) -> str:
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


def _tile_losses(estimate: Estimate) -> str:
    """Matrix products, limited by compute, that lose much of the peak to tiles and waves; "" where there are none."""
    lost: dict[tuple[str, Tiling], list[float]] = {}
    for op in estimate.ops:
        if op.tiling is not None and op.limiter == "compute" and op.tiling.efficiency < LOW_TILE_EFFICIENCY:
            entry = lost.setdefault((op.name, op.tiling), [0.0, 0.0])
            entry[0] += 1
            entry[1] += op.seconds * (1 / op.tiling.efficiency - 1)
    if not lost:
        return ""
    rows = []
    for (name, tiling), (count, time) in sorted(lost.items(), key=lambda item: -item[1][1])[:MOST_GEMMS]:
        batch = f"{tiling.batch} * " if tiling.batch > 1 else ""
        rows.append(
            [
                plain(operator_name(name), 14) + (f" x{count:.0f}" if count > 1 else ""),
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
    line = f"Modeled: {percent(coverage.seconds_share)} of the as-written time."
    if coverage.unmodeled:
        worst = sorted(coverage.unmodeled.items(), key=lambda item: -item[1])[:6]
        line += " Without a formula: " + ", ".join(f"{plain(name, 40)} x{count}" for name, count in worst) + "."
    return textwrap.fill(line, WIDTH)


MEMBER_INDENT = 4


@dataclass(slots=True)
class _GroupKind:
    """Groups with the same operators in the same phase: the layers of a model."""

    family: str
    phase: str
    names: tuple[str, ...]
    sources: tuple[str, ...]
    count: int = 0
    alone: float = 0.0
    fused: float = 0.0
    saved_bytes: float = 0.0

    @property
    def saving(self) -> float:
        return self.alone - self.fused


def fusion_groups_text(estimate: Estimate, top: int = 12) -> str:
    """Groups of more than one op, those that save most first, within 80 columns."""
    alike = _merge_groups(estimate)
    ranked = sorted((one for one in alike if one.saving > 0), key=lambda one: -one.saving)
    if not ranked:
        return "Fusion saves nothing here: no group of ops is faster than its members."
    headers = ["around", "phase", "times", "alone", "fused", "saving", "bytes saved"]
    rows = [
        [
            one.family,
            one.phase,
            f"{one.count}",
            seconds(one.alone),
            seconds(one.fused),
            seconds(one.saving),
            quantity(one.saved_bytes, "B"),
        ]
        for one in ranked[:top]
    ]
    heading, rule, *lines = table(headers, rows, "llrrrrr").splitlines()
    found = [heading, rule]
    for line, one in zip(lines, ranked[:top], strict=True):
        found += [line, *_member_lines(one)]
    saving = sum(one.saving for one in ranked)
    found += ["", f"In all {seconds(saving)}, {percent(saving / estimate.as_written_s)} of the as-written time."]
    if len(ranked) > top:
        found[-1] += f" {len(ranked) - top} more kinds of groups are not listed; --top shows them."
    return "\n".join(found)


def _merge_groups(estimate: Estimate) -> list[_GroupKind]:
    merged: dict[tuple[object, ...], _GroupKind] = {}
    for group, fused in zip(estimate.groups, estimate.group_seconds, strict=True):
        members = [estimate.ops[index] for index in group.members]
        working = [op for op in members if op.family != "view"]
        if len(working) < 2:
            continue
        names = tuple(operator_name(op.name) for op in working)
        sources = tuple(dict.fromkeys(op.source.rpartition("/")[2] for op in working if op.source))
        key = (names, sources, working[0].phase, group.family)
        entry = merged.setdefault(key, _new_kind(group, working[0].phase, names, sources))
        entry.count += 1
        entry.alone += sum(op.seconds for op in members)
        entry.fused += fused
        entry.saved_bytes += group.saved_bytes
    return list(merged.values())


def _new_kind(group: FusionGroup, phase: str, names: tuple[str, ...], sources: tuple[str, ...]) -> _GroupKind:
    return _GroupKind(family=group.family, phase=phase, names=names, sources=sources)


def _member_lines(one: _GroupKind) -> list[str]:
    counts: dict[str, int] = {}
    for name in one.names:
        counts[name] = counts.get(name, 0) + 1
    names = ", ".join(f"{plain(name, 40)} x{count}" if count > 1 else plain(name, 40) for name, count in counts.items())
    lines = [plain(source, 30) for source in one.sources]
    where = f" ({', '.join(lines[:3])}{', ...' if len(lines) > 3 else ''})" if lines else ""
    margin = " " * MEMBER_INDENT
    return textwrap.wrap(names + where, 80, initial_indent=margin, subsequent_indent=margin)


NAME_COLUMNS = 28
"""How wide the column of names is at most, so that all fits in 80 columns."""

_OpKey = tuple[str, tuple[tuple[int, ...], ...], str, str, str]


def intensities_text(estimate: Estimate, machine: Machine, top: int = 12) -> str:
    """Ops merged by operator and shapes, those that take most of the time first."""
    limits = ceilings_of(machine, estimate)
    merged: dict[_OpKey, list[EstimatedOp]] = {}
    for op in estimate.ops:
        if op.seconds > 0:
            merged.setdefault((op.name, op.shapes, op.limiter, op.engine, op.dtype), []).append(op)
    ranked = sorted(merged.items(), key=lambda item: -sum(op.seconds for op in item[1]))
    rows, operands = [], []
    for (name, shapes, limiter, engine, dtype), ops in ranked[:top]:
        rate = engine_rate(limits, engine, dtype) if dtype else None
        rows.append(_intensity_row(name, ops, rate / limits.bandwidth if rate else None, limiter))
        operands.append("  " + _shapes_text(shapes, 78))
    headers = ["op and its operands", "FLOPs", "bytes", "FLOP/B", "ridge", "limit", "bound"]
    heading, rule, *lines = table(headers, rows, "lrrrrlr").splitlines()
    parts = ["\n".join([heading, rule, *(line for pair in zip(lines, operands, strict=True) for line in pair)])]
    left = sum(op.seconds for _, ops in ranked[top:] for op in ops)
    if left:
        share = percent(left / estimate.as_written_s)
        parts.append(f"And {len(ranked) - top} more, {share} of the as-written time; --top shows them.")
    parts.append(
        "Below its ridge an op is limited by memory, above it by compute, unless a cache\n"
        "serves it. Bytes are all that it moves, wherever they are served from."
    )
    return "\n\n".join(parts)


def _intensity_row(name: str, ops: list[EstimatedOp], ridge: float | None, limiter: str) -> list[str]:
    count = f" x{len(ops)}" if len(ops) > 1 else ""
    shown = operator_name(name)
    if len(shown) + len(count) > NAME_COLUMNS:
        shown = shown[: NAME_COLUMNS - len(count) - 3] + "..."
    flops = sum(op.flops for op in ops)
    moved = sum(op.bytes_read + op.bytes_written for op in ops)
    return [
        shown + count,
        quantity(flops, "").strip() if flops else "-",
        quantity(moved, "B"),
        significant(flops / moved) if flops and moved else "-",
        significant(ridge) if ridge and flops else "-",
        limiter,
        seconds(sum(op.seconds for op in ops)),
    ]


def _shapes_text(shapes: tuple[tuple[int, ...], ...], longest: int) -> str:
    """ "8192x1024, 1024x4096": those with most dimensions first, and dots for what does not fit."""
    ordered = sorted(shapes, key=len, reverse=True)
    written = ["x".join(map(str, shape)) or "scalar" for shape in ordered]
    for count in range(len(written), 0, -1):
        found = ", ".join(written[:count]) + (", ..." if count < len(written) else "")
        if len(found) <= longest:
            return found
    return f"{len(written)} tensors" if written else ""
