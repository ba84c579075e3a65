"""`document_page`: a `Document` as one HTML file that works without a network.

All text goes through `markup`, data is JSON in which markup is escaped, and the content security policy allows one
script and one style by their hashes.
"""

from __future__ import annotations

import html
import json
import re
from functools import cache

from nearpeak._records import to_json
from nearpeak.render.document import CodeBlock, Document, Paragraph, Picture, Table
from nearpeak.render.html.markup import Markup, element, joined, visible, visible_lines
from nearpeak.render.html.profile import asset, csp_hash
from nearpeak.render.picture.scene import COLORS, FAINT, INK, PAGE, PALETTE
from nearpeak.render.views.plan.sliders import Sliders

SCRIPTS = ("units.js", "dom.js", "theme.js", "plan_memory.js", "plan_decode.js", "plan.js")
"""In the order in which they are joined."""
LONGEST_TEXT = 4000
LONG = 30
"""Characters of a text that may be broken into lines."""
NARROW = 72
"""Characters of a row that half of a wide page has room for."""
_PLACEHOLDER = re.compile(r"<!--hole:(\w+)-->")


def document_page(document: Document, sliders: Sliders | None = None) -> str:
    """The report, with sliders where there is something to compute again."""
    holes = {
        "policy": html.escape(policy(), quote=True),
        "title": html.escape(f"{visible(document.title, 120)} - nearpeak"),
        "style": style(),
        "head": _head(document),
        "sliders": _sliders(sliders),
        "parts": joined(*_sections(document)),
        "data": _data(sliders),
        "script": script(),
    }
    return _PLACEHOLDER.sub(lambda hole: holes[hole.group(1)], asset("plan.html"))


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
    """All of the CSS, with the colors of pictures."""
    return "\n".join((asset("style.css"), asset("plan.css"), _picture_colors()))


def _picture_colors() -> str:
    """The colors that pictures bring as files of their own, as ones that follow the page."""

    def pair(colors: tuple[str, str]) -> str:
        return f"light-dark({colors[0]},{colors[1]})"

    rules = [f".np-f-{name}{{fill:{pair(both)}}}.np-s-{name}{{stroke:{pair(both)}}}" for name, both in PALETTE.items()]
    rules += [f".np-s{i}{{stroke:{pair(both)}}}.np-f{i}{{fill:{pair(both)}}}" for i, both in enumerate(COLORS)]
    rules += [f".np-page,.np-hollow{{fill:{pair(PAGE)}}}.picture text:not([class]){{fill:{pair(INK)}}}"]
    rules += [f".np-frame{{stroke:{pair(INK)}}}.np-grid{{stroke:{pair(FAINT)}}}.np-band{{fill:{pair(INK)}}}"]
    return "\n".join(rules)


def _head(document: Document) -> Markup:
    facts = [element("span", visible(fact, LONGEST_TEXT)) for fact in document.facts]
    return joined(element("h1", visible(document.title, 300)), element("p", *facts, class_="facts"))


def _sections(document: Document) -> list[Markup]:
    """Paragraphs go with the table before them; a picture and a table are a card each."""
    cards: list[list[Markup]] = [[]]
    wide: list[bool] = [False]
    for part in document.parts:
        if isinstance(part, Paragraph):
            cards[-1].append(element("p", visible(part.text, LONGEST_TEXT), class_=f"said {part.kind}"))
        elif isinstance(part, CodeBlock):
            cards[-1].append(element("pre", visible_lines(part.text), class_="scroll", tabindex="0"))
        elif isinstance(part, Table) and part.rows:
            cards.append([_table(part)])
            wide.append(_characters(part) > NARROW)
        elif isinstance(part, Picture):
            cards.append([_picture(part)])
            wide.append(True)
    made = []
    for content, is_wide in zip(cards, wide, strict=True):
        if content:
            made.append(element("section", *content, class_="card wide" if is_wide or document.is_story else "card"))
    return made


def _characters(part: Table) -> int:
    columns = zip(part.headers, *part.rows, strict=True)
    return sum(3 + max(len(cell) for cell in column) for column in columns)


def _table(part: Table) -> Markup:
    longest = max(part.bars, default=0.0) or 1.0
    kinds = [
        "number" if side == "r" else "long" if max(map(len, column)) > LONG else None
        for side, column in zip(part.sides, zip(*part.rows, strict=True), strict=True)
    ]
    rows = []
    for number, row in enumerate(part.rows):
        cells = [
            element(
                "td" if column else "th",
                visible(cell, LONGEST_TEXT),
                class_=kind,
                scope=None if column else "row",
            )
            for column, (cell, kind) in enumerate(zip(row, kinds, strict=True))
        ]
        if part.bars:
            share = part.bars[number] / longest if number < len(part.bars) else 0.0
            cells.append(element("td", _bar(share), class_="bar"))
        total = number >= len(part.rows) - part.totals
        rows.append(element("tr", *cells, class_="total" if total else None))
    heads = [
        element("th", header, class_="number" if side == "r" else None, scope="col")
        for header, side in zip(part.headers, part.sides, strict=True)
    ]
    if part.bars:
        heads.append(element("td"))
    body = element("table", element("thead", element("tr", *heads)), element("tbody", *rows), class_="plan")
    scroll = element("div", body, class_="scroll", tabindex="0", role="region", aria_label=part.title or "Table")
    title = [element("h2", visible(part.title, 200))] if part.title else []
    note = [element("p", visible(part.note, LONGEST_TEXT), class_="note")] if part.note else []
    return joined(*title, scroll, *note)


def _bar(share: float) -> Markup:
    bar = element("rect", width=f"{max(0.0, 100 * share):.2f}", height="12", class_="fusion")
    return element("svg", bar, class_="strip", viewBox="0 0 100 12", preserveAspectRatio="none", aria_hidden="true")


def _picture(part: Picture) -> Markup:
    """The file without what it brings to stand alone: its style, which the policy would not let in."""
    inner = re.sub(r"<style>.*?</style>", "", part.svg, flags=re.DOTALL)
    inner = re.sub(r' style="[^"]*"', "", inner, count=1)
    return joined(
        element("h2", visible(part.title, 200)),
        element("div", Markup(inner), class_="picture scroll", tabindex="0", role="region", aria_label=part.title),
    )


def _sliders(sliders: Sliders | None) -> Markup:
    if sliders is None:
        return Markup("")
    return element(
        "section",
        element("h2", sliders.title),
        element("p", sliders.note, class_="note"),
        element("div", id="controls", class_="controls"),
        element("div", id="answer", class_="answer"),
        id="what-if",
        class_="card wide script-only",
    )


def _data(sliders: Sliders | None) -> str:
    text = json.dumps(None if sliders is None else to_json(sliders), allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
