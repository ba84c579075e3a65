"""The fusion groups of an estimate as text: who would run as one kernel, and what that saves."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from nearpeak.bound.estimate import Estimate
from nearpeak.bound.fusion import Group
from nearpeak.render.roofline_points import short_name
from nearpeak.render.table import table
from nearpeak.render.timing import plain
from nearpeak.units import percent, quantity, seconds

INDENT = 4


@dataclass(slots=True)
class _Alike:
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


def text(estimate: Estimate, top: int = 12) -> str:
    """Groups of more than one op, those that save most first, within 80 columns."""
    alike = _alike(estimate)
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
        found += [line, *_members(one)]
    saving = sum(one.saving for one in ranked)
    found += ["", f"In all {seconds(saving)}, {percent(saving / estimate.as_written_s)} of the as-written time."]
    if len(ranked) > top:
        found[-1] += f" {len(ranked) - top} more kinds of groups are not listed; --top shows them."
    return "\n".join(found)


def _alike(estimate: Estimate) -> list[_Alike]:
    merged: dict[tuple[object, ...], _Alike] = {}
    for group, fused in zip(estimate.groups, estimate.group_seconds, strict=True):
        members = [estimate.ops[index] for index in group.members]
        working = [op for op in members if op.family != "view"]
        if len(working) < 2:
            continue
        names = tuple(short_name(op.name) for op in working)
        sources = tuple(dict.fromkeys(op.source.rpartition("/")[2] for op in working if op.source))
        key = (names, sources, working[0].phase, group.family)
        entry = merged.setdefault(key, _new(group, working[0].phase, names, sources))
        entry.count += 1
        entry.alone += sum(op.seconds for op in members)
        entry.fused += fused
        entry.saved_bytes += group.saved_bytes
    return list(merged.values())


def _new(group: Group, phase: str, names: tuple[str, ...], sources: tuple[str, ...]) -> _Alike:
    return _Alike(family=group.family, phase=phase, names=names, sources=sources)


def _members(one: _Alike) -> list[str]:
    counts: dict[str, int] = {}
    for name in one.names:
        counts[name] = counts.get(name, 0) + 1
    names = ", ".join(f"{plain(name, 40)} x{count}" if count > 1 else plain(name, 40) for name, count in counts.items())
    lines = [plain(source, 30) for source in one.sources]
    where = f" ({', '.join(lines[:3])}{', ...' if len(lines) > 3 else ''})" if lines else ""
    margin = " " * INDENT
    return textwrap.wrap(names + where, 80, initial_indent=margin, subsequent_indent=margin)
