"""An estimate as a document: the three floors, where the time goes, fusion groups, intensities, and its roofline."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from nearpeak.bound.estimate import Estimate, EstimatedOp
from nearpeak.bound.tiles import Tiling
from nearpeak.machines.machine import Achievable, Machine
from nearpeak.render.document import Block, Document, Items, Paragraph, Table
from nearpeak.render.picture.roofline import (
    Wording,
    ceilings_of,
    draw_roofline,
    engine_rate,
    estimate_points,
    estimate_roofs,
)
from nearpeak.render.picture.scene import Scene
from nearpeak.render.text import packet_name, plain
from nearpeak.units import percent, quantity, seconds, significant

TOP = 12
CEILINGS = {"measured": "measured ceilings", "derated": "derated datasheet", "datasheet": "datasheet peaks"}
LOW_TILE_EFFICIENCY = 0.9
"""GEMMs whose tiles and waves leave less than this of the peak are shown."""
MOST_GEMMS = 6
NAME_COLUMNS = 28
"""How wide the column of names is at most, so that intensities fit in 80 columns."""
HOST_LIMITS = 1.1
"""How many times the kernel time an eager run must be expected to take before the host is said to limit it."""


def document(
    estimate: Estimate, top: int = TOP, *, intensities_on: Machine | None = None, groups: bool = False
) -> Document:
    """The report; with `intensities_on` or `groups`, these tables below the floors instead of the others."""
    parts = [*_heading(estimate)]
    if intensities_on is not None:
        parts += intensities(estimate, intensities_on, top)
    if groups:
        parts.append(fusion_groups(estimate, top))
    if intensities_on is None and not groups:
        parts += [_families(estimate), _top_ops(estimate, top), _tile_losses(estimate), _coverage(estimate)]
        if estimate.truncated:
            parts.append(Paragraph(text="The trace stopped at its limit: these are figures of its beginning."))
        if estimate.notes:
            parts.append(Items(items=estimate.notes, hanging=0, spaced=True))
    return Document(title=f"Estimate on {plain(estimate.machine, 60)}", is_titled=False, parts=tuple(parts))


def _heading(estimate: Estimate) -> Iterator[Block]:
    """The machine, the amount of work, the three floors, and what good kernels take."""
    count = f"{len(estimate.ops)} op{'' if len(estimate.ops) == 1 else 's'}"
    yield Paragraph(
        text=f"On {plain(estimate.machine, 40)}, {CEILINGS.get(estimate.how, plain(estimate.how, 40))}: {count}, "
        f"{quantity(estimate.flops, 'FLOP')}, {quantity(estimate.bytes, 'B')}"
    )
    floors = (estimate.as_written_s, estimate.fused_s, estimate.ideal_s)
    meanings = {
        "as written": "every op at its own roofline",
        "fused": "intermediates that need not reach memory do not",
        "ideal": "inputs, parameters and results cross memory once",
    }
    yield Table(
        headers=("floor", "time", "meaning"),
        rows=tuple(
            (name, seconds(time), meaning) for time, (name, meaning) in zip(floors, meanings.items(), strict=True)
        ),
        align="lrl",
        bars=floors,
    )
    kernels, eager = estimate.expected_device_s, estimate.expected_s
    if kernels is None or eager is None:
        return
    is_own = estimate.how == "measured" and estimate.expected_from == estimate.machine
    machine = "here" if is_own else f"on {plain(estimate.expected_from, 30)}"
    ratio = f", {significant(kernels / estimate.as_written_s)} x as written" if estimate.as_written_s else ""
    text = f"Expected: {seconds(kernels)}{ratio}, kernels as measured {machine}."
    if eager > HOST_LIMITS * kernels:
        text += f" Called op by op the host limits: {seconds(eager)}, as the host {machine} calls them."
    yield Paragraph(text=text)


def _families(estimate: Estimate) -> Table:
    totals: dict[str, list[float]] = {}
    for op in estimate.ops:
        entry = totals.setdefault(op.family, [0.0, 0.0, 0.0, 0.0])
        for i, value in enumerate((1.0, op.seconds, op.flops, op.bytes_read + op.bytes_written)):
            entry[i] += value
    rows = tuple(
        (
            family,
            f"{count:.0f}",
            seconds(time),
            percent(time / estimate.as_written_s if estimate.as_written_s else 0.0),
            quantity(flops, "FLOP"),
            quantity(size, "B"),
        )
        for family, (count, time, flops, size) in sorted(totals.items(), key=lambda item: -item[1][1])
        if time > 0
    )
    return Table(headers=("family", "ops", "as written", "share", "FLOPs", "bytes"), rows=rows)


def _top_ops(estimate: Estimate, top: int) -> Table:
    """The operators that take most, by operator and line."""
    totals: dict[tuple[str, str, str], list[float]] = {}
    examples: dict[tuple[str, str, str], EstimatedOp] = {}
    for op in estimate.ops:
        key = (op.name, op.phase, op.source)
        entry = totals.setdefault(key, [0.0, 0.0])
        entry[0] += 1
        entry[1] += op.seconds
        examples.setdefault(key, op)
    ranked = sorted(totals.items(), key=lambda item: -item[1][1])[:top]
    rows = tuple(
        (
            plain(name.removeprefix("aten."), NAME_COLUMNS),
            f"{count:.0f}",
            seconds(time),
            examples[name, phase, source].limiter,
            phase,
            plain(source.rpartition("/")[2], 20),
        )
        for (name, phase, source), (count, time) in ranked
        if time > 0
    )
    return Table(headers=("op", "count", "time", "limit", "phase", "line"), rows=rows, align="lrrlll")


def _tile_losses(estimate: Estimate) -> Table:
    """GEMMs, limited by compute, that lose much of the peak to tiles and waves."""
    losses: dict[tuple[str, Tiling], list[float]] = {}
    for op in estimate.ops:
        if op.tiling is not None and op.limiter == "compute" and op.tiling.efficiency < LOW_TILE_EFFICIENCY:
            entry = losses.setdefault((op.name, op.tiling), [0.0, 0.0])
            entry[0] += 1
            entry[1] += op.seconds * (1 / op.tiling.efficiency - 1)
    rows = []
    for (name, tiling), (count, time) in sorted(losses.items(), key=lambda item: -item[1][1])[:MOST_GEMMS]:
        batch = f"{tiling.batch} * " if tiling.batch > 1 else ""
        rows.append(
            (
                plain(packet_name(name), 14) + (f" x{count:.0f}" if count > 1 else ""),
                f"{batch}{tiling.m}x{tiling.n}x{tiling.k}",
                f"{tiling.tile[0]}x{tiling.tile[1]}",
                f"{tiling.tiles / tiling.processors:.2f}",
                percent(tiling.useful, 0),
                percent(tiling.efficiency, 0),
                seconds(time),
            )
        )
    processors = next(iter(losses))[1].processors if losses else 0
    return Table(
        title=f"Matrix products that fill the {processors} processors badly: what tiles and waves alone leave of the "
        "peak, and the time that costs. It is no part of the bounds.",
        headers=("op", "m x n x k", "tile", "waves", "useful", "left", "cost"),
        rows=tuple(rows),
        align="llrrrrr",
    )


def _coverage(estimate: Estimate) -> Paragraph:
    line = f"Modeled: {percent(estimate.coverage.seconds_share)} of the as-written time."
    if estimate.coverage.unmodeled:
        worst = sorted(estimate.coverage.unmodeled.items(), key=lambda item: -item[1])[:6]
        line += " Without a formula: " + ", ".join(f"{plain(name, 40)} x{count}" for name, count in worst) + "."
    return Paragraph(text=line)


@dataclass(slots=True)
class _GroupKind:
    """Fusion groups with the same operators in the same phase: the layers of a model."""

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

    @property
    def members(self) -> str:
        """Its operators with their numbers, and where they are."""
        counts: dict[str, int] = {}
        for name in self.names:
            counts[name] = counts.get(name, 0) + 1
        names = [f"{plain(name, 40)} x{count}" if count > 1 else plain(name, 40) for name, count in counts.items()]
        lines = [plain(source, 30) for source in self.sources]
        where = f" ({', '.join(lines[:3])}{', ...' if len(lines) > 3 else ''})" if lines else ""
        return ", ".join(names) + where


def fusion_groups(estimate: Estimate, top: int = TOP) -> Table | Paragraph:
    """Groups of more than one op that would run as one kernel, those that save most first."""
    kinds = [kind for kind in _merge_groups(estimate) if kind.saving > 0]
    ranked = sorted(kinds, key=lambda kind: -kind.saving)
    if not ranked:
        return Paragraph(text="Fusion saves nothing here: no group of ops is faster than its members.")
    rows = tuple(
        (
            kind.family,
            kind.phase,
            f"{kind.count}",
            seconds(kind.alone),
            seconds(kind.fused),
            seconds(kind.saving),
            quantity(kind.saved_bytes, "B"),
            kind.members,
        )
        for kind in ranked[:top]
    )
    saving = sum(kind.saving for kind in ranked)
    note = f"In all {seconds(saving)}, {percent(saving / estimate.as_written_s)} of the as-written time."
    if len(ranked) > top:
        note += f" {len(ranked) - top} more kinds of groups are not listed; --top shows them."
    return Table(
        headers=("around", "phase", "times", "alone", "fused", "saving", "bytes saved", "ops"),
        rows=rows,
        align="llrrrrrl",
        below=7,
        note=note,
    )


def _merge_groups(estimate: Estimate) -> list[_GroupKind]:
    merged: dict[tuple[object, ...], _GroupKind] = {}
    for group, fused in zip(estimate.groups, estimate.group_seconds, strict=True):
        members = [estimate.ops[index] for index in group.members]
        working = [op for op in members if op.family != "view"]
        if len(working) < 2:
            continue
        names = tuple(packet_name(op.name) for op in working)
        sources = tuple(dict.fromkeys(op.source.rpartition("/")[2] for op in working if op.source))
        phase = working[0].phase
        kind = _GroupKind(family=group.family, phase=phase, names=names, sources=sources)
        kind = merged.setdefault((names, sources, phase, group.family), kind)
        kind.count += 1
        kind.alone += sum(op.seconds for op in members)
        kind.fused += fused
        kind.saved_bytes += group.saved_bytes
    return list(merged.values())


def intensities(estimate: Estimate, machine: Machine, top: int = TOP) -> Iterator[Block]:
    """FLOPs, bytes and FLOP per byte of ops, merged by operator and shapes, beside the ridge of the machine."""
    ceilings = ceilings_of(machine, estimate)
    merged: dict[tuple[str, tuple[tuple[int, ...], ...], str, str, str], list[EstimatedOp]] = {}
    for op in estimate.ops:
        if op.seconds > 0:
            merged.setdefault((op.name, op.shapes, op.limiter, op.engine, op.dtype), []).append(op)
    ranked = sorted(merged.items(), key=lambda item: -sum(op.seconds for op in item[1]))
    rows = []
    for (name, shapes, limiter, engine, dtype), ops in ranked[:top]:
        rate = engine_rate(ceilings, engine, dtype) if dtype else None
        ridge = rate / ceilings.bandwidth if rate else None
        rows.append((*_intensity_row(name, ops, ridge, limiter), _shapes_text(shapes, 78)))
    yield Table(
        headers=("op and its operands", "FLOPs", "bytes", "FLOP/B", "ridge", "limit", "bound", "operands"),
        rows=tuple(rows),
        align="lrrrrlrl",
        below=7,
        indent=2,
        is_shown_empty=True,
    )
    left = sum(op.seconds for _, ops in ranked[top:] for op in ops)
    if left:
        share = percent(left / estimate.as_written_s)
        yield Paragraph(text=f"And {len(ranked) - top} more, {share} of the as-written time; --top shows them.")
    yield Paragraph(
        text="Below its ridge an op is limited by memory, above it by compute, unless a cache serves it. Bytes are all "
        "that it moves, wherever they are served from."
    )


def _intensity_row(name: str, ops: list[EstimatedOp], ridge: float | None, limiter: str) -> tuple[str, ...]:
    count = f" x{len(ops)}" if len(ops) > 1 else ""
    shown = packet_name(name)
    if len(shown) + len(count) > NAME_COLUMNS:
        shown = shown[: NAME_COLUMNS - len(count) - 3] + "..."
    flops = sum(op.flops for op in ops)
    moved = sum(op.bytes_read + op.bytes_written for op in ops)
    return (
        shown + count,
        quantity(flops, "").strip() if flops else "-",
        quantity(moved, "B"),
        significant(flops / moved) if flops and moved else "-",
        significant(ridge) if ridge and flops else "-",
        limiter,
        seconds(sum(op.seconds for op in ops)),
    )


def _shapes_text(shapes: tuple[tuple[int, ...], ...], longest: int) -> str:
    """ "8192x1024, 1024x4096": those with most dimensions first, and dots for what does not fit."""
    ordered = sorted(shapes, key=len, reverse=True)
    written = ["x".join(map(str, shape)) or "scalar" for shape in ordered]
    for count in range(len(written), 0, -1):
        line = ", ".join(written[:count]) + (", ..." if count < len(written) else "")
        if len(line) <= longest:
            return line
    return f"{len(written)} tensors" if written else ""


def roofline(estimate: Estimate, machine: Machine, *, title: str = "") -> Scene:
    """The picture of an estimate on the machine that it was made for."""
    ceilings = ceilings_of(machine, estimate)
    levels = {"memory": ceilings.bandwidth}
    if isinstance(ceilings, Achievable) and ceilings.cache_bandwidth and ceilings.cache_bandwidth > ceilings.bandwidth:
        levels["last-level cache"] = ceilings.cache_bandwidth
    wording = Wording(
        title=title or f"Roofline on {machine.name}",
        subtitle=f"{machine.name}, {CEILINGS.get(estimate.how, estimate.how)}: as written "
        f"{seconds(estimate.as_written_s)}, fused {seconds(estimate.fused_s)}, ideal {seconds(estimate.ideal_s)}",
        described=f"{title or 'Roofline'} on {machine.name}: FLOP per byte against FLOP per second.",
    )
    return draw_roofline(estimate_points(estimate), levels, estimate_roofs(estimate, ceilings), wording)
