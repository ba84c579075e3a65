"""`profile_page`: a profile as one HTML file that works without a network.

Text and tables are the blocks of the profile's `Document`, so that they can be read without JavaScript. What scripts
draw is JSON by columns: small for 100,000 ops, and never markup. Indices into other columns are differences to the one
before, because layers repeat. A column is a list, {"all": value, "count": n}, or {"values": [...], "index": [...]},
whichever is shortest. Times are nanoseconds with four digits.
"""

from __future__ import annotations

import ast
import itertools
import json
import math
import re
import textwrap
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

from nearpeak.machines.machine import Machine
from nearpeak.ops.low_gc import low_gc
from nearpeak.profiles.excerpt import LONGEST_LINE, MOST_EXCERPTS, NEIGHBORS, SourceExcerpt
from nearpeak.profiles.finding import Finding
from nearpeak.profiles.grade import grade_profile
from nearpeak.profiles.idle import CAUSE_MEANINGS, CauseName, IdleCause
from nearpeak.profiles.job import JobProfile
from nearpeak.profiles.profile import DeviceKernel, Profile, ProfiledOp
from nearpeak.profiles.waterfall import PART_MEANINGS
from nearpeak.render.document import Block, CodeBlock, Document, Paragraph, Section, Table
from nearpeak.render.html.document import (
    PART_CLASSES,
    asset,
    blocks_html,
    code_parts,
    fill_page,
    join_scripts,
    picture_style,
)
from nearpeak.render.html.markup import Markup, element, joined, visible, visible_lines
from nearpeak.render.text import count, short_name
from nearpeak.render.views.job import job_sections
from nearpeak.render.views.profile import (
    OP_COLUMNS,
    SMALLEST_CAUSE,
    ReportOptions,
    document,
    finding_blocks,
    select_findings,
    together_sentence,
)
from nearpeak.render.views.profile_roofs import ProfileRoofs, catalogue_machine, profile_roofs
from nearpeak.units import gibibytes, percent, quantity, seconds, significant

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
    "glossary.js",
    "copy.js",
    "theme.js",
    "main.js",
)
"""In the order in which they are joined."""
OPEN_FINDINGS = 3
MOST_CAUSES = 20
"""Places of one cause of idle time."""
MOST_SPANS = 60_000
"""Of a timeline. Of more, the shortest neighbors are drawn as one."""
_ESCAPES = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}


def profile_page(profile: Profile, *, machine: Machine | None = None, findings: Sequence[Finding] | None = None) -> str:
    """The report of a profile: verdict, waterfall, findings, timeline, roofline, modules, all ops, memory, machine.

    Args:
        profile: What to show.
        machine: The machine that its bounds are against, for the roofs; None for that of the catalogue.
        findings: Those to show; None for those that save enough.
    """
    shown = select_findings(profile) if findings is None else tuple(findings)
    machine = catalogue_machine(profile) if machine is None else machine
    with low_gc():  # a large profile makes many objects, and none of them garbage
        options = ReportOptions(findings=shown, most_findings=0)
        report = document(profile, options)
        roofs = profile_roofs(profile, machine)
        return fill_page(
            "page.html",
            script=join_scripts(SCRIPTS),
            style=asset("style.css") if profile.job is None else "\n".join((asset("style.css"), picture_style())),
            title=profile.source,
            content={
                "head": _head(profile),
                "card": _verdict(profile, report),
                "job": _job(profile.job),
                "waterfall": joined(*_section(report, "waterfall")),
                "idle": _idle(profile),
                "findings": _findings(profile, report, shown),
                "memory": joined(*_section(report, "memory", "Not known: the step did not run under a trace here.")),
                "machine": _machine(profile, machine, roofs),
                "measurement": _measurement(profile, report),
                "glossary": glossary_list(),
                "data": data_json(profile, shown, roofs),
            },
        )


def _section(report: Document, id: str, missing: str = "") -> list[Markup]:
    """The blocks of a section; a note where the document has none."""
    for part in report.parts:
        if isinstance(part, Section) and part.id == id:
            return [*blocks_html(part.blocks, id, Explainer())]
    return [element("p", missing, class_="note")] if missing else []


def _job(job: JobProfile | None) -> Markup:
    """Who is late and why, and the ranks side by side: a card each; the other tables are folded."""
    cards = []
    for section in () if job is None else job_sections(job, full=True):
        content = blocks_html(section.blocks, "job", Explainer())
        if section.is_folded:
            shown = element("details", element("summary", section.title), *content)
        else:
            shown = joined(element("h2", section.title), *content)
        cards.append(element("section", shown, id=section.id, class_="card", aria_label=section.title))
    return joined(*cards)


def _head(profile: Profile) -> Markup:
    """What was run, on what, and when."""
    facts = [profile.device, f"against {profile.machine} ({profile.how})", profile.date]
    spans = [element("span", visible(fact, 80)) for fact in facts if fact]
    return joined(element("h1", visible(profile.source, 120) or "A step"), element("p", *spans, class_="facts"))


def _verdict(profile: Profile, document: Document) -> Markup:
    """The verdict in figures, then in the sentences of the terminal."""
    grade = grade_profile(profile)
    ratio = significant(profile.wall_s / profile.ideal_s) + " x" if profile.ideal_s > 0.0 and grade.is_trusted else "-"
    loss = profile.waterfall.largest_loss
    mfu = None if profile.rates is None else profile.rates.mfu
    share = loss.seconds / profile.wall_s if profile.wall_s else 0.0
    lost = joined("lost to ", term(loss.name))
    tiles = [
        _tile("a step", seconds(profile.wall_s)),
        _tile(term("ideal"), seconds(profile.ideal_s)),
        _tile("the ideal", ratio),
        _tile(lost, percent(share, 0), PART_CLASSES.get(loss.name, loss.name)),
        *([_tile(term("MFU"), percent(mfu))] if mfu is not None else []),
        _tile(term("grade", "grade of the measurement"), grade.letter, f"grade-{grade.letter.lower()}"),
    ]
    return joined(element("div", *tiles, class_="tiles"), *_section(document, "verdict"))


def _tile(label: str | Markup, value: str, class_: str = "") -> Markup:
    return element("div", element("b", value), element("span", label), class_=f"tile {class_}".strip())


def _idle(profile: Profile) -> Markup:
    """The causes of idle time, each with its places folded below it."""
    causes: dict[CauseName, list[IdleCause]] = {}
    for cause in profile.idle:
        causes.setdefault(cause.cause, []).append(cause)
    totals = {name: sum(place.seconds for place in places) for name, places in causes.items()}
    parts = [
        _idle_cause(profile, name, causes[name])
        for name in sorted(totals, key=lambda name: -totals[name])
        if totals[name] > SMALLEST_CAUSE * profile.wall_s
    ]
    return joined(*parts) if parts else element("p", "No cause of idle time is known.", class_="note")


def _idle_cause(profile: Profile, name: CauseName, places: Sequence[IdleCause]) -> Markup:
    total_s = sum(place.seconds for place in places)
    times = sum(place.count for place in places)
    summary = element(
        "summary",
        element("span", term(name), class_="rule"),
        element("span", seconds(total_s), class_="saving"),
        element("span", percent(total_s / profile.wall_s), class_="share"),
        element("span", f"{times:,} times" if times > 1 else "", class_="where"),
    )
    rows = [
        (
            seconds(place.seconds),
            percent(place.seconds / profile.wall_s),
            f"{place.count:,}" if place.count else "-",
            place.where or "-",
            place.what or "-",
        )
        for place in places[:MOST_CAUSES]
    ]
    rest = places[MOST_CAUSES:]
    if rest:
        rest_s = sum(place.seconds for place in rest)
        rows.append((seconds(rest_s), percent(rest_s / profile.wall_s), f"{len(rest):,} places", "other", ""))
    table = Table(headers=("time", "share", "times", "where", "what"), rows=tuple(rows), align="rrrll")
    return element("details", summary, *blocks_html([table], "places"), class_="finding cause")


def _findings(profile: Profile, report: Document, findings: Sequence[Finding]) -> Markup:
    """Each with what it saves, where it is, why, and what to write instead."""
    with_saving = grade_profile(profile).is_trusted
    excerpts = {excerpt.source: excerpt for excerpt in profile.excerpts}
    parts = [
        _finding(number, finding, excerpts.get(finding.source), with_saving=with_saving)
        for number, finding in enumerate(findings)
    ]
    if not parts:
        parts = [element("p", "No rule found a waste that is worth a change.", class_="note")]
    if with_saving and (together := together_sentence(profile, findings)):
        parts.append(element("p", together, class_="note"))
    return joined(*parts, *_section(report, "undecided"))


def _finding(number: int, finding: Finding, excerpt: SourceExcerpt | None, *, with_saving: bool) -> Markup:
    where = visible(finding.where, 80)
    places = f", {finding.places:,} places" if finding.places > 1 else ""
    summary = element(
        "summary",
        element("span", str(number + 1), class_="rank"),
        element("span", seconds(finding.found_s) if with_saving else "-", class_="saving"),
        element("span", _share(finding) if with_saving else "-", class_="share", title=_range(finding, with_saving)),
        element("span", visible(finding.rule, 60), class_="rule"),
        element("code", f"{where}{places}", class_="where"),
    )
    blocks = [part for block in finding_blocks(finding) for part in _without_prose(block)]
    body = [*blocks_html(blocks, write=Explainer())]
    if excerpt is not None:
        body.insert(1, _excerpt(excerpt))
    if finding.ops:
        label = f"Show its {count(len(finding.ops), 'op')} in the table"
        body.append(element("button", label, type="button", class_="show-ops", data_finding=number))
    return element("details", summary, *body, class_="finding", open=number < OPEN_FINDINGS)


def _share(finding: Finding) -> str:
    return "once" if finding.once_s else percent(finding.share)


def _range(finding: Finding, with_saving: bool) -> str | None:
    """What is shown where the pointer rests on the share."""
    if finding.once_s or not with_saving:
        return None
    low, high = (percent(end, 0) for end in finding.likely_shares)
    return f"likely {low} to {high} of the step: eight of ten changes saved what was predicted within such a range"


def _excerpt(excerpt: SourceExcerpt) -> Markup:
    """The lines with their numbers, the one that is named marked."""
    named = excerpt.source.rpartition(":")[2]
    lines = [
        element("mark" if str(number) == named else "span", element("i", str(number)), text)
        for number, text in enumerate(_excerpt_lines(excerpt), excerpt.first_line)
    ]
    return element("pre", element("code", *lines), class_="excerpt scroll", tabindex="0")


def _excerpt_lines(excerpt: SourceExcerpt) -> list[str]:
    """As text of one line each; a file may hold anything."""
    lines = excerpt.lines[: 2 * NEIGHBORS + 1]
    return [visible_lines(line[:LONGEST_LINE].replace("\n", " ")) or " " for line in lines]


def _without_prose(block: Block) -> Iterator[Block]:
    """Sentences among code as paragraphs, which wrap; code after "Instead:" as a block, which can be copied."""
    if isinstance(block, Paragraph) and block.kind == "advice":
        label, _, rest = block.text.partition(": ")
        if rest and not _is_prose(rest):
            yield replace(block, text=f"{label}:")
            yield CodeBlock(text=rest, language="python")
            return
    if not isinstance(block, CodeBlock):
        yield block
        return
    for is_prose, lines in itertools.groupby(block.text.split("\n"), _is_prose):
        text = "\n".join(lines)
        if is_prose:
            yield Paragraph(text=text)
        elif text.strip():
            yield CodeBlock(text=textwrap.dedent(text).strip("\n"), language=block.language)


def _is_prose(line: str) -> bool:
    """Whether a line is a sentence: it begins at the margin, has no comment of code, and is no Python.

    >>> [_is_prose(line) for line in ("Keep the shape:", "with graph:", "    x = y", "PATH=a python  # runs it")]
    [True, False, False, False]
    """
    if not line[:1].isalpha() or "  #" in line:
        return False
    try:
        ast.parse(f"{line} pass" if line.endswith(":") else line)
    except (SyntaxError, ValueError):
        return True
    return False


def _machine(profile: Profile, machine: Machine | None, roofs: ProfileRoofs) -> Markup:
    """The machine, with the ceilings that are drawn."""
    name = (
        visible(profile.machine, 60) if machine is None else f"{visible(machine.name, 80)} ({visible(machine.id, 60)})"
    )
    facts = [name]
    if machine is not None and machine.memory_bytes is not None:
        facts.append(f"{gibibytes(machine.memory_bytes)} {visible(machine.memory_kind or '', 20)}".strip())
    if machine is not None and machine.processors is not None:
        facts.append(f"{machine.processors} {'cores' if machine.kind == 'cpu' else 'processors'}")
    rows = tuple(
        (roof.name, quantity(roof.value, "B/s" if roof.kind in ("memory", "cache") else "FLOP/s"))
        for roof in roofs.roofs
    )
    table = Table(headers=("ceiling", "rate"), rows=rows, note=roofs.origin)
    return joined(element("p", ", ".join(facts) + "."), *blocks_html([table], "machine"))


def _measurement(profile: Profile, report: Document) -> Markup:
    """The rates, the coverage, the grade with its reasons, the compiler and the notes."""
    parts = [*_section(report, "rates"), *_section(report, "measurement")]
    if profile.compiler is not None:
        breaks = sum(each.count for each in profile.compiler.breaks)
        graphs = f"torch.compile had made {profile.compiler.graphs:,} graphs, with {breaks:,} breaks"
        late = f"{profile.compiler.recompiled_in_steps:,} were made after the first warm-up"
        parts.append(element("p", f"{graphs}; {late}."))
    return joined(*parts)


def data_json(profile: Profile, findings: Sequence[Finding], roofs: ProfileRoofs) -> str:
    """The data as JSON that can stand inside of a script element: no end of it can be written in it."""
    data = {
        "wall": _round4(profile.wall_s * 1e9),
        "excerpts": {
            visible(excerpt.source): {"first": excerpt.first_line, "lines": _excerpt_lines(excerpt)}
            for excerpt in profile.excerpts[:MOST_EXCERPTS]
        },
        "ops": _op_columns(profile.ops),
        "timeline": _timeline_columns(profile),
        "findings": [{"rule": visible(finding.rule), "ops": _index_runs(finding.ops)} for finding in findings],
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
    amount_names = [column.name for column in OP_COLUMNS if column.page == "amount"]
    time_names = [column.name for column in OP_COLUMNS if column.page == "time"]
    amounts_of, times_of = attrgetter(*amount_names), attrgetter(*time_names)
    for op in ops:
        what = whats.setdefault((op.name, op.family, op.phase, op.source, op.shapes), len(whats))
        times = times_of(op)
        figures = (what, op.limiter, op.kernels, op.modeled, *amounts_of(op), *times)
        if figures not in exact:  # rounding takes longer than looking
            rounded = tuple(None if time is None else _round4(time * 1e9) for time in times)
            exact[figures] = kinds.setdefault((*figures[: -len(times)], *rounded), len(kinds))
        kind_of.append(exact[figures])
        module_of.append(modules.setdefault(op.module, len(modules)))
    name, family, phase, source, shapes = _columns(whats, 5)
    what_of, limiter, kernels, modeled, *figures_of = _columns(kinds, 4 + len(amount_names) + len(time_names))
    amounts, bounds = figures_of[: len(amount_names)], figures_of[len(amount_names) :]
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
        "amounts": {name: _amount_column(values) for name, values in zip(amount_names, amounts, strict=True)},
        "times": {name.removesuffix("_s"): _column(values) for name, values in zip(time_names, bounds, strict=True)},
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

    >>> _index_runs([2, 3, 4, 9])
    [2, 3, 4, 1]
    """
    runs: list[int] = []
    reached = 0
    for index in sorted(set(indices)):
        if runs and index == reached:
            runs[-1] += 1
        else:
            runs += [index - reached, 1]
        reached = index + 1
    return runs


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
    merged: list[tuple[DeviceKernel, int]] = []
    open_spans: dict[int, int] = {}
    for span in spans:
        index = open_spans.get(span.stream)
        if index is not None:
            first, count = merged[index]
            seconds = span.start_s + span.seconds - first.start_s
            gap = span.start_s - first.start_s - first.seconds
            if seconds <= least and gap <= least / 4:
                merged[index] = (_extend_span(first, seconds), count + 1)
                continue
        open_spans[span.stream] = len(merged)
        merged.append((span, 1))
    return merged


def _extend_span(span: DeviceKernel, seconds: float) -> DeviceKernel:
    return DeviceKernel(
        name=span.name,
        start_s=span.start_s,
        seconds=seconds,
        op=span.op,
        stream=span.stream,
        collective=span.collective,
    )


GLOSSARY: Mapping[str, str] = {
    "step": "One round of the loop: an iteration of training, a batch, a request, or one call of the function.",
    "clean step": "A step that ran without the profiler. Its time is the time of a step in this report.",
    "wall": "The time of a step as a clock on the wall shows it.",
    "waterfall": "The time of a step in parts that sum to it, from what is unavoidable to what is lost.",
    "kernel": "A function that runs on the device; on a CPU, the code of one op.",
    "op": "One operation of torch: a matrix product, an addition, a copy.",
    "bound": "The least time that the hardware allows for the work of an op: no run of it on this machine is faster.",
    "as written": "As a time: the bounds of all ops in the order written, summed.",
    "fused": "Joined into one kernel, so that what lies between ops need not go through memory. As a time: the bound "
    "of the step with all ops joined that can be.",
    "expected": "The time of a good kernel for an op, as it was measured or modeled. It is longer than the bound.",
    "lost": "The measured time less the bound.",
    "limit": "What makes the bound what it is: memory traffic, cache traffic, arithmetic, or the launch of a kernel.",
    "launch wait": "Idle time of the device before a kernel, because the host launched it late.",
    "roofline": "The most that a machine can compute, by how many operations it does on each byte that it reads.",
    "phase": "Forward pass, backward pass, or optimizer.",
    "module": "The path of the torch.nn.Module that an op belongs to; a star stands for parts that differ.",
    "MFU": "Model FLOP utilization: the FLOPs that the model needs, over what the datasheet allows in that time.",
    "HFU": "Hardware FLOP utilization: as MFU, with FLOPs that are computed again in the backward pass.",
    "grade": "How far the measurement can be trusted, from A to F. Below B, the report tells no ratios and no savings.",
    "measured ceilings": "Rates of memory and arithmetic as they were measured on this machine.",
    "derated": "Ceilings that are the datasheet's figures times a factor.",
    **{name: f"{meaning[0].upper()}{meaning[1:]}." for name, meaning in PART_MEANINGS.items()},
    **{name: f"{meaning[0].upper()}{meaning[1:]}." for name, meaning in CAUSE_MEANINGS.items() if name != "unknown"},
}
LABELS = {
    "step",
    "kernel",
    "op",
    "module",
    "phase",
    "limit",
    "wall",
    "lost",
    "traffic",
    "communication",
    *CAUSE_MEANINGS,
}
"""Words that readers know, or that have a wider meaning in a sentence: they are explained where they are a label."""


def term(word: str, text: str = "") -> str | Markup:
    """A word with its explanation, for the pointer and the keyboard; the word alone if it has none."""
    about = GLOSSARY.get(word)
    return text or word if about is None else element("span", text or word, class_="term", tabindex="0", title=about)


class Explainer:
    """Writes the texts of one section: the first occurrence of each word of the glossary is explained."""

    def __init__(self) -> None:
        self._left = sorted(GLOSSARY.keys() - LABELS, key=lambda word: (-len(word), word))

    def __call__(self, text: str) -> str | Markup:
        if text in GLOSSARY:  # a label
            return term(text)
        parts = code_parts(text)
        for word in list(self._left):
            pattern = re.compile(rf"(?<![\w.-]){re.escape(word)}s?(?![\w-])")
            for index, part in enumerate(parts):
                match = None if isinstance(part, Markup) else pattern.search(part)
                if match is not None:
                    parts[index : index + 1] = [part[: match.start()], term(word, match[0]), part[match.end() :]]
                    self._left.remove(word)
                    break
        return joined(*parts)


def glossary_list() -> Markup:
    """All words, in the order of the alphabet."""
    words = sorted(GLOSSARY, key=str.lower)
    rows = [joined(element("dt", word), element("dd", GLOSSARY[word])) for word in words]
    return element("dl", *rows, class_="glossary")
