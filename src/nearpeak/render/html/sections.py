"""The parts of the page that are only text and tables: written here, so that they are there without JavaScript."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nearpeak.diagnose.finding import Finding
from nearpeak.diagnose.grade import grade_of
from nearpeak.diagnose.idle import MEANINGS as CAUSES
from nearpeak.diagnose.profile import Profile
from nearpeak.diagnose.waterfall import MEANINGS, PartName
from nearpeak.machines.model import Machine
from nearpeak.render.html.markup import LONGEST_TEXT, Markup, element, joined, visible, visible_lines
from nearpeak.render.html.roofs import Roofs
from nearpeak.render.profile import coverage_text, measurement_text
from nearpeak.render.profile_card import sentences
from nearpeak.render.profile_rates import memory_head, memory_rows, rates_text
from nearpeak.units import gibibytes, percent, quantity, seconds, significant

OPEN_FINDINGS = 3
MOST_CAUSES = 20
CLASSES: Mapping[PartName, str] = {
    "ideal": "ideal",
    "traffic": "traffic",
    "fusion": "fusion",
    "slow kernels": "slow",
    "not modelled": "unknown",
    "communication": "communication",
    "idle": "idle",
}


def head(profile: Profile) -> Markup:
    """What was run, on what, and when."""
    facts = [profile.device, f"against {profile.machine} ({profile.how})", profile.date]
    spans = [element("span", visible(fact, 80)) for fact in facts if fact]
    return joined(element("h1", visible(profile.source, 120) or "A step"), element("p", *spans, class_="facts"))


def card(profile: Profile, findings: Sequence[Finding]) -> Markup:
    """The verdict in figures, then in the sentences of the terminal."""
    grade = grade_of(profile)
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


def waterfall(profile: Profile) -> Markup:
    """Each bar begins where the one before it ended."""
    rows, reached = [], 0.0
    for part in profile.waterfall.parts:
        share = part.seconds / profile.wall_s if profile.wall_s else 0.0
        begin, width = min(max(reached, 0.0), 1.0), max(0.0, min(share, 1.0))
        meaning = MEANINGS[part.name]
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


def idle(profile: Profile) -> Markup:
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


def findings_list(profile: Profile, findings: Sequence[Finding]) -> Markup:
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
        body.append(element("p", f"nearpeak has it: {visible(finding.fix, LONGEST_TEXT)}"))
    if finding.ops:
        label = (
            f"Show its {len(finding.ops):,} ops in the table" if len(finding.ops) > 1 else "Show its op in the table"
        )
        body.append(element("button", label, type="button", class_="show-ops", data_finding=number))
    return element("details", summary, *body, class_="finding", open=number < OPEN_FINDINGS)


def memory(profile: Profile) -> Markup:
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


def machine_table(profile: Profile, machine: Machine | None, roofs: Roofs) -> Markup:
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


def measurement(profile: Profile) -> Markup:
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
