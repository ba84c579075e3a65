"""What the page's script needs of a profile, as JSON by columns: small for 100,000 ops, and never markup.

Numbers that point to other columns are differences to the one before: ops follow each other in every layer alike.
A column is a list, {"all": value, "count": n}, or {"values": [...], "index": [...]}, whichever is shortest. Times are
in nanoseconds with four digits, which is what a page can show.
"""

from __future__ import annotations

import json
import math
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

from nearpeak.diagnose.finding import Finding
from nearpeak.diagnose.profile import DeviceKernel, Profile, ProfiledOp
from nearpeak.render.html.markup import visible
from nearpeak.render.html.roofs import Roofs
from nearpeak.render.profile_card import short_name

MOST_SPANS = 60_000
"""Of a timeline. Of more, the shortest neighbours are drawn as one."""
_ESCAPES = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}


def data_json(profile: Profile, findings: Sequence[Finding], roofs: Roofs) -> str:
    """The data as JSON that can stand inside of a script element: no end of it can be written in it."""
    data = {
        "wall": _number(profile.wall_s * 1e9),
        "ops": _ops(profile.ops),
        "timeline": _timeline(profile),
        "findings": [{"rule": visible(found.rule), "ops": _runs(found.ops)} for found in findings],
        "roofs": [{"kind": roof.kind, "name": visible(roof.name), "value": roof.value} for roof in roofs.roofs],
    }
    return json.dumps(data, separators=(",", ":"), allow_nan=False, ensure_ascii=False).translate(_ESCAPES)


def _ops(ops: Sequence[ProfiledOp]) -> dict[str, Any]:
    """Three levels: what is done, its kinds with their bounds, the ops with their modules and times."""
    whats: dict[Hashable, int] = {}
    kinds: dict[tuple[Any, ...], int] = {}
    exact: dict[tuple[Any, ...], int] = {}
    modules: dict[str, int] = {}
    kind_of, module_of = [], []
    for op in ops:
        what = whats.setdefault((op.name, op.family, op.phase, op.source, op.shapes), len(whats))
        times = (op.bound_s, op.expected_s, op.fused_s)
        figures = (what, op.limiter, op.kernels, op.modelled, op.flops, op.bytes, *times)
        if figures not in exact:  # rounding takes longer than looking
            rounded = tuple(None if time is None else _number(time * 1e9) for time in times)
            exact[figures] = kinds.setdefault((*figures[:6], *rounded), len(kinds))
        kind_of.append(exact[figures])
        module_of.append(modules.setdefault(op.module, len(modules)))
    name, family, phase, source, shapes = _columns(whats, 5)
    what_of, limiter, kernels, modelled, flops, moved, bound, expected, fused = _columns(kinds, 9)
    return {
        "name": _texts(name),
        "short": {visible(text): visible(short_name(text)) for text in dict.fromkeys(name)},
        "family": _texts(family),
        "phase": _texts(phase),
        "source": _texts(source),
        "shapes": _column([_shapes(each) for each in shapes]),
        "what": _column(_differences(what_of)),
        "limiter": _texts(limiter),
        "kernels": _column(kernels),
        "modelled": _column([int(each) for each in modelled]),
        "flops": _amounts(flops),
        "bytes": _amounts(moved),
        "bound": _column(bound),
        "expected": _column(expected),
        "fused": _column(fused),
        "kind": _column(_differences(kind_of)),
        "modules": [visible(module) for module in modules],
        "module": _column(_differences(module_of)),
        "measured": _numbers([op.measured_s for op in ops]),
    }


def _columns(rows: Iterable[Any], count: int) -> Sequence[Sequence[Any]]:
    return list(zip(*rows, strict=True)) or [()] * count


def _texts(values: Sequence[str]) -> Any:
    seen: dict[str, str] = {}
    for value in values:
        if value not in seen:
            seen[value] = visible(value)
    return _column([seen[value] for value in values])


def _shapes(shapes: tuple[tuple[int, ...], ...]) -> str:
    """Of each operand: "8 x 1024, 1024"; a scalar is "()"."""
    return visible(", ".join(" x ".join(map(str, shape)) or "()" for shape in shapes[:12]), 120)


def _numbers(values: Sequence[float | None], scale: float = 1e9) -> Any:
    return _column([None if value is None else _number(value * scale) for value in values])


def _amounts(values: Sequence[float]) -> dict[str, Any]:
    """Large numbers in a unit in which most of them have four digits before the point."""
    usual = sorted(value for value in values if value > 0.0)
    power = math.floor(math.log10(usual[len(usual) // 2])) - 3 if usual else 0
    return {"unit": float(f"1e{power}"), "column": _numbers(values, float(f"1e{-power}"))}


def _number(value: float) -> float:
    """Four digits, as an integer where it is one: that is shorter."""
    rounded = float(f"{value:.3e}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded


def _column(values: Sequence[Any]) -> Any:
    """The shortest form of a column."""
    seen: dict[Any, int] = {}
    for value in values:
        seen.setdefault(value, len(seen))
    if len(seen) == 1 and len(values) > 1:
        return {"all": values[0], "count": len(values)}
    sizes = {value: len(str(value)) + (3 if type(value) is str else 1) for value in seen}
    plain = sum(map(sizes.__getitem__, values))
    digits = sum(map([len(str(place)) + 1 for place in range(len(seen))].__getitem__, map(seen.__getitem__, values)))
    if sum(sizes.values()) + digits + 24 < plain:
        return {"values": list(seen), "index": [seen[value] for value in values]}
    return list(values)


def _runs(indices: Iterable[int]) -> list[int]:
    """Sorted indices as pairs: how many are left out, how many follow each other.

    >>> _runs([2, 3, 4, 9])
    [2, 3, 4, 1]
    """
    found: list[int] = []
    reached = 0
    for index in sorted(set(indices)):
        if found and index == reached:
            found[-1] += 1
        else:
            found += [index - reached, 1]
        reached = index + 1
    return found


def _timeline(profile: Profile) -> dict[str, Any] | None:
    """Starts as differences, in whole nanoseconds: neighbours are near each other, and digits cost most."""
    if not profile.timeline:
        return None
    spans = _merged(sorted(profile.timeline, key=lambda span: span.start_s))
    begin = min([spans[0][0].start_s, *(gap.start_s for gap in profile.gaps[:1])])
    starts = [round((span.start_s - begin) * 1e9) for span, _ in spans]
    gaps = [(round((gap.start_s - begin) * 1e9), gap) for gap in profile.gaps]
    ops = [-1 if span.op is None else span.op for span, _ in spans]
    return {
        "start": _column(_differences(starts)),
        "seconds": _numbers([span.seconds for span, _ in spans]),
        "stream": _column([span.stream for span, _ in spans]),
        "op": _column(_differences(ops)),
        "name": _texts([span.name for span, _ in spans]),
        "communication": _column([int(span.communication) for span, _ in spans]),
        "merged": _column([count for _, count in spans]),
        "gaps": {
            "start": _column(_differences([start for start, _ in gaps])),
            "seconds": _numbers([gap.seconds for _, gap in gaps]),
            "cause": _texts([gap.cause for _, gap in gaps]),
            "where": _texts([gap.where for _, gap in gaps]),
        },
    }


def _differences(values: Sequence[int]) -> list[int]:
    return [value - before for value, before in zip(values, [0, *values], strict=False)]


def _merged(spans: Sequence[DeviceKernel]) -> list[tuple[DeviceKernel, int]]:
    """The spans with how many each stands for; of too many, neighbours of a stream that are as good as one are one."""
    if len(spans) <= MOST_SPANS:
        return [(span, 1) for span in spans]
    end = max(span.start_s + span.seconds for span in spans)
    least = 2 * (end - spans[0].start_s) / MOST_SPANS  # any two that follow each other are longer together
    found: list[tuple[DeviceKernel, int]] = []
    open_at: dict[int, int] = {}
    for span in spans:
        at = open_at.get(span.stream)
        if at is not None:
            first, count = found[at]
            seconds = span.start_s + span.seconds - first.start_s
            gap = span.start_s - first.start_s - first.seconds
            if seconds <= least and gap <= least / 4:
                found[at] = (_longer(first, seconds), count + 1)
                continue
        open_at[span.stream] = len(found)
        found.append((span, 1))
    return found


def _longer(span: DeviceKernel, seconds: float) -> DeviceKernel:
    return DeviceKernel(
        name=span.name,
        start_s=span.start_s,
        seconds=seconds,
        op=span.op,
        communication=span.communication,
        stream=span.stream,
    )
