"""`profile_page`: a profile as one HTML file that works without a network.

Text and tables are written here, so that they can be read without JavaScript. What the scripts draw is JSON by columns:
small for 100,000 ops, and never markup. Indices into other columns are differences to the one before, because layers
repeat. A column is a list, {"all": value, "count": n}, or {"values": [...], "index": [...]}, whichever is shortest.
Times are nanoseconds with four digits.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any

from nearpeak.machines.machine import Machine
from nearpeak.ops.low_gc import low_gc
from nearpeak.profiles.finding import Finding
from nearpeak.profiles.grade import grade_profile
from nearpeak.profiles.idle import CAUSE_MEANINGS as CAUSES
from nearpeak.profiles.profile import DeviceKernel, Profile, ProfiledOp
from nearpeak.profiles.waterfall import PART_MEANINGS, PartName
from nearpeak.render.html.markup import LONGEST_TEXT, Markup, element, joined, visible, visible_lines
from nearpeak.render.views.profile import (
    coverage_text,
    measurement_text,
    memory_head,
    memory_rows,
    rates_text,
    select_findings,
)
from nearpeak.render.views.profile_roofs import ProfileRoofs, catalogue_machine, profile_roofs
from nearpeak.render.views.verdict import sentences, short_name
from nearpeak.units import gibibytes, percent, quantity, seconds, significant

MOST_SPANS = 60_000
"""Of a timeline. Of more, the shortest neighbors are drawn as one."""
_ESCAPES = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}


def data_json(profile: Profile, findings: Sequence[Finding], roofs: ProfileRoofs) -> str:
    """The data as JSON that can stand inside of a script element: no end of it can be written in it."""
    data = {
        "wall": _round4(profile.wall_s * 1e9),
        "ops": _op_columns(profile.ops),
        "timeline": _timeline_columns(profile),
        "findings": [{"rule": visible(found.rule), "ops": _index_runs(found.ops)} for found in findings],
        "roofs": [{"kind": roof.kind, "name": visible(roof.name), "value": roof.value} for roof in roofs.roofs],
    }
    return json.dumps(data, separators=(",", ":"), allow_nan=False, ensure_ascii=False).translate(_ESCAPES)


def _op_columns(ops: Sequence[ProfiledOp]) -> dict[str, Any]:
    """Three levels: what is done, its kinds with their bounds, the ops with their modules and times."""
    whats: dict[Hashable, int] = {}
    kinds: dict[tuple[Any, ...], int] = {}
    exact: dict[tuple[Any, ...], int] = {}
    modules: dict[str, int] = {}
    kind_of, module_of = [], []
    for op in ops:
        what = whats.setdefault((op.name, op.family, op.phase, op.source, op.shapes), len(whats))
        times = (op.bound_s, op.expected_s, op.fused_s)
        figures = (what, op.limiter, op.kernels, op.modeled, op.flops, op.bytes, *times)
        if figures not in exact:  # rounding takes longer than looking
            rounded = tuple(None if time is None else _round4(time * 1e9) for time in times)
            exact[figures] = kinds.setdefault((*figures[:6], *rounded), len(kinds))
        kind_of.append(exact[figures])
        module_of.append(modules.setdefault(op.module, len(modules)))
    name, family, phase, source, shapes = _columns(whats, 5)
    what_of, limiter, kernels, modeled, flops, moved, bound, expected, fused = _columns(kinds, 9)
    return {
        "name": _text_column(name),
        "short": {visible(text): visible(short_name(text)) for text in dict.fromkeys(name)},
        "family": _text_column(family),
        "phase": _text_column(phase),
        "source": _text_column(source),
        "shapes": _column([_shapes(each) for each in shapes]),
        "what": _column(_differences(what_of)),
        "limiter": _text_column(limiter),
        "kernels": _column(kernels),
        "modeled": _column([int(each) for each in modeled]),
        "flops": _amount_column(flops),
        "bytes": _amount_column(moved),
        "bound": _column(bound),
        "expected": _column(expected),
        "fused": _column(fused),
        "kind": _column(_differences(kind_of)),
        "modules": [visible(module) for module in modules],
        "module": _column(_differences(module_of)),
        "measured": _number_column([op.measured_s for op in ops]),
    }


def _columns(rows: Iterable[Any], count: int) -> Sequence[Sequence[Any]]:
    return list(zip(*rows, strict=True)) or [()] * count


def _text_column(values: Sequence[str]) -> Any:
    seen: dict[str, str] = {}
    for value in values:
        if value not in seen:
            seen[value] = visible(value)
    return _column([seen[value] for value in values])


def _shapes(shapes: tuple[tuple[int, ...], ...]) -> str:
    """Of each operand: "8 x 1024, 1024"; a scalar is "()"."""
    return visible(", ".join(" x ".join(map(str, shape)) or "()" for shape in shapes[:12]), 120)


def _number_column(values: Sequence[float | None], scale: float = 1e9) -> Any:
    return _column([None if value is None else _round4(value * scale) for value in values])


def _amount_column(values: Sequence[float]) -> dict[str, Any]:
    """Large numbers in a unit in which most of them have four digits before the point."""
    usual = sorted(value for value in values if value > 0.0)
    power = math.floor(math.log10(usual[len(usual) // 2])) - 3 if usual else 0
    return {"unit": float(f"1e{power}"), "column": _number_column(values, float(f"1e{-power}"))}


def _round4(value: float) -> float:
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


def _index_runs(indices: Iterable[int]) -> list[int]:
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


def _timeline_columns(profile: Profile) -> dict[str, Any] | None:
    """Starts as differences, in whole nanoseconds: neighbors are near each other, and digits cost most."""
    if not profile.timeline:
        return None
    spans = _merge_spans(sorted(profile.timeline, key=lambda span: span.start_s))
    begin = min([spans[0][0].start_s, *(gap.start_s for gap in profile.gaps[:1])])
    starts = [round((span.start_s - begin) * 1e9) for span, _ in spans]
    gaps = [(round((gap.start_s - begin) * 1e9), gap) for gap in profile.gaps]
    ops = [-1 if span.op is None else span.op for span, _ in spans]
    return {
        "start": _column(_differences(starts)),
        "seconds": _number_column([span.seconds for span, _ in spans]),
        "stream": _column([span.stream for span, _ in spans]),
        "op": _column(_differences(ops)),
        "name": _text_column([span.name for span, _ in spans]),
        "communication": _column([int(span.communication) for span, _ in spans]),
        "merged": _column([count for _, count in spans]),
        "gaps": {
            "start": _column(_differences([start for start, _ in gaps])),
            "seconds": _number_column([gap.seconds for _, gap in gaps]),
            "cause": _text_column([gap.cause for _, gap in gaps]),
            "where": _text_column([gap.where for _, gap in gaps]),
        },
    }


def _differences(values: Sequence[int]) -> list[int]:
    return [value - before for value, before in zip(values, [0, *values], strict=False)]


def _merge_spans(spans: Sequence[DeviceKernel]) -> list[tuple[DeviceKernel, int]]:
    """The spans with how many each stands for; of too many, neighbors of a stream that are as good as one are one."""
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
                found[at] = (_extend_span(first, seconds), count + 1)
                continue
        open_at[span.stream] = len(found)
        found.append((span, 1))
    return found


def _extend_span(span: DeviceKernel, seconds: float) -> DeviceKernel:
    return DeviceKernel(
        name=span.name,
        start_s=span.start_s,
        seconds=seconds,
        op=span.op,
        stream=span.stream,
        collective=span.collective,
    )


OPEN_FINDINGS = 3
MOST_CAUSES = 20
CLASSES: Mapping[PartName, str] = {
    "ideal": "ideal",
    "traffic": "traffic",
    "fusion": "fusion",
    "slow kernels": "slow",
    "not modeled": "unknown",
    "communication": "communication",
    "idle": "idle",
}


def head_section(profile: Profile) -> Markup:
    """What was run, on what, and when."""
    facts = [profile.device, f"against {profile.machine} ({profile.how})", profile.date]
    spans = [element("span", visible(fact, 80)) for fact in facts if fact]
    return joined(element("h1", visible(profile.source, 120) or "A step"), element("p", *spans, class_="facts"))


def verdict_section(profile: Profile, findings: Sequence[Finding]) -> Markup:
    """The verdict in figures, then in the sentences of the terminal."""
    grade = grade_profile(profile)
    ratio = significant(profile.wall_s / profile.ideal_s) + " x" if profile.ideal_s > 0.0 else "-"
    loss = profile.waterfall.largest_loss
    mfu = None if profile.rates is None else profile.rates.mfu
    share = loss.seconds / profile.wall_s if profile.wall_s else 0.0
    tiles = [
        _tile("a step", seconds(profile.wall_s)),
        _tile("ideal", seconds(profile.ideal_s)),
        _tile("the ideal", ratio),
        _tile(f"lost to {loss.name}", percent(share, 0), CLASSES[loss.name]),
        *([_tile("MFU", percent(mfu))] if mfu is not None else []),
        _tile("grade of the measurement", grade.letter, f"grade-{grade.letter.lower()}"),
    ]
    rows = [
        joined(element("dt", name), element("dd", visible(text, 1000)))
        for name, text in sentences(profile, findings).items()
    ]
    return joined(element("div", *tiles, class_="tiles"), element("dl", *rows, class_="sentences"))


def _tile(label: str, value: str, class_: str = "") -> Markup:
    return element("div", element("b", value), element("span", label), class_=f"tile {class_}".strip())


def waterfall_section(profile: Profile) -> Markup:
    """Each bar begins where the one before it ended."""
    rows, reached = [], 0.0
    for part in profile.waterfall.parts:
        share = part.seconds / profile.wall_s if profile.wall_s else 0.0
        begin, width = min(max(reached, 0.0), 1.0), max(0.0, min(share, 1.0))
        meaning = PART_MEANINGS[part.name]
        if part in profile.waterfall.broken:
            meaning = "below zero: a bound of nearpeak's is wrong"
        cells = [
            element("th", part.name, scope="row"),
            element("td", seconds(part.seconds), class_="number"),
            element("td", percent(share), class_="number"),
            element("td", _bar(begin, width, CLASSES[part.name]), class_="bar"),
            element("td", meaning, class_="meaning"),
        ]
        rows.append(element("tr", *cells))
        reached += share
    total = [
        element("th", "wall", scope="row"),
        element("td", seconds(profile.wall_s), class_="number"),
        element("td", percent(1.0), class_="number"),
        element("td", class_="bar"),
        element("td", class_="meaning"),
    ]
    rows.append(element("tr", *total, class_="total"))
    return _table(("part", "time", "share", "", "what it is"), rows, "waterfall")


def _bar(begin: float, width: float, class_: str) -> Markup:
    rectangle = element("rect", x=f"{100 * begin:.3f}%", width=f"{100 * width:.3f}%", height="100%", class_=class_)
    return element("svg", rectangle, class_="strip", aria_hidden="true", focusable="false")


def idle_section(profile: Profile) -> Markup:
    """Why nothing ran on the device, the largest cause first."""
    rows = []
    for cause in profile.idle[:MOST_CAUSES]:
        place = ", ".join(visible(text, 80) for text in (cause.where, cause.what) if text)
        cells = [
            element("th", cause.cause, scope="row", title=CAUSES.get(cause.cause)),
            element("td", seconds(cause.seconds), class_="number"),
            element("td", percent(cause.seconds / profile.wall_s if profile.wall_s else 0.0), class_="number"),
            element("td", f"{cause.count:,}" if cause.count else "-", class_="number"),
            element("td", place or "-", class_="place"),
        ]
        rows.append(element("tr", *cells))
    rest = profile.idle[MOST_CAUSES:]
    if rest:
        more = f"{len(rest)} more, {seconds(sum(cause.seconds for cause in rest))} together"
        rows.append(element("tr", element("td", more, colspan="5")))
    if not rows:
        return element("p", "No cause of idle time is known.", class_="note")
    return _table(("because of", "time", "share", "times", "where"), rows, "idle")


def findings_section(profile: Profile, findings: Sequence[Finding]) -> Markup:
    """Each with what it saves, where it is, why, and what to write instead."""
    parts = [_finding(number, finding) for number, finding in enumerate(findings)]
    if not parts:
        parts = [element("p", "No rule found a waste that is worth a change.", class_="note")]
    if profile.undecided:
        names = ", ".join(visible(name, 40) for name in profile.undecided)
        parts.append(element("p", f"Not decidable from what is known of this step: {names}.", class_="note"))
    return joined(*parts)


def _finding(number: int, finding: Finding) -> Markup:
    where = visible(finding.source or finding.module, 80) or "the step"
    places = f", {finding.places:,} places" if finding.places > 1 else ""
    summary = element(
        "summary",
        element("span", str(number + 1), class_="rank"),
        element("span", seconds(finding.saving_s), class_="saving"),
        element("span", percent(finding.share), class_="share"),
        element("span", visible(finding.rule, 60), class_="rule"),
        element("code", f"{where}{places}", class_="where"),
    )
    body = [element("p", visible(finding.title, LONGEST_TEXT), class_="title")]
    if finding.module and finding.source:
        body.append(element("p", "In ", element("code", visible(finding.module)), "."))
    body += [element("p", visible(text, LONGEST_TEXT)) for text in (finding.evidence, finding.reasoning) if text]
    if finding.remedy:
        remedy = visible_lines(finding.remedy.strip("\n"))
        body += [element("p", "Instead:", class_="instead"), element("pre", element("code", remedy), tabindex="0")]
    if finding.fix:
        body.append(element("p", f"nearpeak has it: {visible(finding.fix.usage, LONGEST_TEXT)}"))
    if finding.ops:
        label = (
            f"Show its {len(finding.ops):,} ops in the table" if len(finding.ops) > 1 else "Show its op in the table"
        )
        body.append(element("button", label, type="button", class_="show-ops", data_finding=number))
    return element("details", summary, *body, class_="finding", open=number < OPEN_FINDINGS)


def memory_section(profile: Profile) -> Markup:
    """What the memory is needed for at the peak."""
    found = profile.memory
    if found is None:
        return element("p", "Not known: the step did not run under a trace here.", class_="note")
    rows = [
        element(
            "tr",
            element("th", name, scope="row"),
            element("td", size, class_="number"),
            element("td", share, class_="number"),
        )
        for name, size, share in memory_rows(found)
    ]
    sentence = memory_head(found).removeprefix("Memory: ").rstrip(":") + "."
    return joined(element("p", sentence), _table(("category", "size", "share"), rows, "memory"))


def machine_section(profile: Profile, machine: Machine | None, roofs: ProfileRoofs) -> Markup:
    """The machine, with the ceilings that are drawn."""
    name = (
        visible(profile.machine, 60) if machine is None else f"{visible(machine.name, 80)} ({visible(machine.id, 60)})"
    )
    facts = [name]
    if machine is not None and machine.memory_bytes is not None:
        facts.append(f"{gibibytes(machine.memory_bytes)} {visible(machine.memory_kind or '', 20)}".strip())
    if machine is not None and machine.processors is not None:
        facts.append(f"{machine.processors} {'cores' if machine.kind == 'cpu' else 'processors'}")
    rows = []
    for roof in roofs.roofs:
        unit = "B/s" if roof.kind in ("memory", "cache") else "FLOP/s"
        cells = [
            element("th", visible(roof.name, 60), scope="row"),
            element("td", quantity(roof.value, unit), class_="number"),
        ]
        rows.append(element("tr", *cells))
    table = _table(("ceiling", "rate"), rows, "machine") if rows else ""
    note = element("p", roofs.origin, class_="note") if roofs.origin else ""
    return joined(element("p", ", ".join(facts) + "."), table, note)


def measurement_section(profile: Profile) -> Markup:
    """The grade with its reasons, the coverage, the rates and the notes."""
    texts = [measurement_text(profile), coverage_text(profile), rates_text(profile.rates)]
    paragraphs = [element("p", " ".join(text.split())) for text in texts if text]
    notes = [element("li", visible(note, LONGEST_TEXT)) for note in profile.notes]
    if profile.compiler is not None:
        found = profile.compiler
        breaks = sum(each.count for each in found.breaks)
        sentence = f"torch.compile had made {found.graphs:,} graphs, with {breaks:,} breaks"
        paragraphs.append(element("p", f"{sentence}; {found.recompiled_in_steps:,} were made after the first warm-up."))
    return joined(*paragraphs, element("ul", *notes, class_="notes") if notes else "")


def _table(headers: Sequence[str], rows: Sequence[Markup], class_: str) -> Markup:
    heads = [element("th", name, scope="col") if name else element("td") for name in headers]
    return element("table", element("thead", element("tr", *heads)), element("tbody", *rows), class_=class_)


SCRIPTS = (
    "units.js",
    "dom.js",
    "sorting.js",
    "model.js",
    "columns.js",
    "table.js",
    "filters.js",
    "axes.js",
    "roofs.js",
    "roofline.js",
    "icicle.js",
    "timeline_data.js",
    "timeline_paint.js",
    "timeline.js",
    "findings.js",
    "theme.js",
    "main.js",
)
"""In the order in which they are joined."""
_PLACEHOLDER = re.compile(r"<!--hole:(\w+)-->")


def profile_page(profile: Profile, *, machine: Machine | None = None, findings: Sequence[Finding] | None = None) -> str:
    """The report of a profile: verdict, waterfall, findings, timeline, roofline, modules, all ops, memory, machine.

    Args:
        profile: What to show.
        machine: The machine that its bounds are against, for the roofs; that of the catalogue where it is None.
        findings: Those to show; those that save enough where it is None.
    """
    with low_gc():  # a large profile makes many objects, and none of them garbage
        return _fill_page(profile, machine, select_findings(profile) if findings is None else tuple(findings))


def _fill_page(profile: Profile, machine: Machine | None, found: Sequence[Finding]) -> str:
    machine = catalogue_machine(profile) if machine is None else machine
    roofs = profile_roofs(profile, machine)
    holes = {
        "policy": html.escape(policy(), quote=True),
        "title": html.escape(f"{visible(profile.source, 80)} - nearpeak"),
        "style": style(),
        "head": head_section(profile),
        "card": verdict_section(profile, found),
        "waterfall": waterfall_section(profile),
        "idle": idle_section(profile),
        "findings": findings_section(profile, found),
        "memory": memory_section(profile),
        "machine": machine_section(profile, machine, roofs),
        "measurement": measurement_section(profile),
        "data": data_json(profile, found, roofs),
        "script": script(),
    }
    return _PLACEHOLDER.sub(lambda hole: holes[hole.group(1)], asset("page.html"))


def policy() -> str:
    """The content security policy: this script, this style, and nothing from anywhere."""
    return (
        f"default-src 'none'; script-src '{csp_hash(script())}'; style-src '{csp_hash(style())}'; "
        "base-uri 'none'; form-action 'none'"
    )


@cache
def script() -> str:
    """All of the JavaScript, in a scope of its own."""
    parts = "\n".join(asset(name) for name in SCRIPTS)
    return f'"use strict";\n(() => {{\n{parts}\nmain();\n}})();\n'


@cache
def style() -> str:
    """All of the CSS."""
    return asset("style.css")


def asset(name: str) -> str:
    """A file of the page as text."""
    return resources.files("nearpeak.render.html").joinpath("assets", name).read_text(encoding="utf-8")


def csp_hash(content: str) -> str:
    """A script or a style as a content security policy names it."""
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
