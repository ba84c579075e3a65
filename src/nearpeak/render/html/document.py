"""`document_page`: a `Document` as one HTML file that works without a network.

All text goes through `markup`, data is JSON in which markup is escaped, and the content security policy allows one
script and one style by their hashes. `blocks_html` writes the blocks of a document, also for the page of a profile.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from importlib import resources
from typing import Any

from nearpeak._display import printable
from nearpeak._records import to_json
from nearpeak.render.document import (
    Block,
    Cell,
    CodeBlock,
    Details,
    Document,
    Facts,
    Items,
    Name,
    Paragraph,
    Picture,
    Section,
    Span,
    Table,
    printable_document,
)
from nearpeak.render.html.markup import Markup, element, joined, visible, visible_lines
from nearpeak.render.picture.scene import COLORS, FAINT, INK, PAGE, PALETTE
from nearpeak.render.text import cell_text
from nearpeak.render.views.plan.sliders import Sliders

SCRIPTS = ("units.js", "dom.js", "theme.js", "plan_training.js", "plan_decode.js", "plan.js")
"""In the order in which they are joined."""
LONGEST_TEXT = 4000
LONG = 30
"""Characters of a text that may be broken into lines."""
NARROW = 72
"""Characters of a row that half of a wide page has room for."""
PART_CLASSES = {"slow kernels": "slow", "not modeled": "unknown"}
"""Classes of the parts of a waterfall whose names are none."""
_PLACEHOLDER = re.compile(r"<!--hole:(\w+)-->")


def document_page(document: Document, sliders: Sliders | None = None) -> str:
    """The report, with sliders where there is something to compute again."""
    document = printable_document(document)
    return fill_page(
        "plan.html",
        script=join_scripts(SCRIPTS),
        style=_style(),
        title=document.title,
        content={
            "head": _head(document),
            "sliders": _sliders(sliders),
            "parts": joined(*_cards(document)),
            "data": _data(sliders),
        },
    )


def fill_page(template: str, *, script: str, style: str, title: str, content: Mapping[str, str]) -> str:
    """A page of `assets` with its placeholders filled. Its policy allows this script, this style, and nothing else."""
    policy = (
        f"default-src 'none'; script-src '{csp_hash(script)}'; style-src '{csp_hash(style)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    values = {
        "policy": html.escape(policy, quote=True),
        "title": html.escape(f"{visible(title, 120)} - nearpeak"),
        "style": style,
        "script": script,
        **content,
    }
    return _PLACEHOLDER.sub(lambda placeholder: values[placeholder.group(1)], asset(template))


@cache
def join_scripts(names: tuple[str, ...]) -> str:
    """JavaScript files as one script, in a scope of its own."""
    parts = "\n".join(asset(name) for name in names)
    return f'"use strict";\n(() => {{\n{parts}\nmain();\n}})();\n'


@cache
def _style() -> str:
    return "\n".join((asset("style.css"), picture_style(), asset("plan.css")))


@cache
def asset(name: str) -> str:
    """A file of the pages as text."""
    return resources.files("nearpeak.render.html").joinpath("assets", name).read_text(encoding="utf-8")


def csp_hash(content: str) -> str:
    """A script or a style as a content security policy names it."""
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()


def picture_style() -> str:
    """Of pictures in a page: the colors that they bring as files of their own, as ones that follow the page."""

    def pair(colors: tuple[str, str]) -> str:
        return f"light-dark({colors[0]},{colors[1]})"

    rules = [f".np-f-{name}{{fill:{pair(both)}}}.np-s-{name}{{stroke:{pair(both)}}}" for name, both in PALETTE.items()]
    rules += [f".np-s{i}{{stroke:{pair(both)}}}.np-f{i}{{fill:{pair(both)}}}" for i, both in enumerate(COLORS)]
    rules += [f".np-page,.np-hollow{{fill:{pair(PAGE)}}}.picture text:not([class]){{fill:{pair(INK)}}}"]
    rules += [f".np-frame{{stroke:{pair(INK)}}}.np-grid{{stroke:{pair(FAINT)}}}.np-band{{fill:{pair(INK)}}}"]
    return "\n".join((asset("picture.css"), *rules))


def _head(document: Document) -> Markup:
    facts = [element("span", visible(str(fact), LONGEST_TEXT)) for fact in document.facts]
    return joined(element("h1", visible(document.title, 300)), element("p", *facts, class_="facts"))


def _cards(document: Document) -> Iterator[Markup]:
    """Paragraphs go with the table before them; a picture, a table and a section are a card each."""
    cards: list[tuple[list[Markup], bool]] = [([], False)]
    for part in document.parts:
        tables = [each for each in (part.blocks if isinstance(part, Section) else [part]) if isinstance(each, Table)]
        if isinstance(part, (Picture, Section)) or (tables and tables[0].rows):
            is_wide = any(table.rows and _characters(table) > NARROW for table in tables)
            cards.append(([], isinstance(part, Picture) or is_wide))
        cards[-1][0].extend(blocks_html([part]))
    for content, is_wide in cards:
        if content:
            yield element("section", *content, class_="card wide" if is_wide or document.is_story else "card")


def _characters(part: Table) -> int:
    columns = zip(part.headers, *([cell_text(cell) for cell in row] for row in part.rows), strict=True)
    return sum(3 + max(len(cell) for cell in column) for column in columns)


def code_parts(text: str) -> list[str | Markup]:
    """A text on one line in parts: what stands between backticks is code."""
    parts = visible(text, LONGEST_TEXT).split("`")
    if len(parts) % 2 == 0:  # one without its partner
        return ["`".join(parts)]
    return [element("code", part) if index % 2 else part for index, part in enumerate(parts)]


def prose(text: str) -> Markup:
    """A text on one line as markup.

    >>> prose("pass `x < y` itself")
    'pass <code>x &lt; y</code> itself'
    """
    return joined(*code_parts(text))


Writer = Callable[[str], str | Markup]


def blocks_html(blocks: Iterable[Block], table_class: str = "plan", write: Writer = prose) -> Iterator[Markup]:
    """Blocks as elements; tables have a class, and `write` writes sentences and the names of rows."""
    for block in blocks:
        if isinstance(block, Paragraph):
            yield element("p", write(block.text), class_=f"said {block.kind}")
        elif isinstance(block, Facts):
            facts = [
                joined(
                    element("dt", fact.label.rstrip(":")), element("dd", write(f"{fact.text} {fact.advice}".strip()))
                )
                for fact in block.facts
            ]
            yield element("dl", *facts, class_="sentences")
        elif isinstance(block, Items):
            if block.title:
                yield element("p", write(block.title), class_="said heading")
            yield element("ul", *(element("li", write(item)) for item in block.items), class_="notes")
        elif isinstance(block, CodeBlock):
            code = element("pre", element("code", visible_lines(block.text)), class_="scroll", tabindex="0")
            yield element("div", code, class_="code")
        elif isinstance(block, Details):
            summary = element("summary", visible(block.summary))
            yield element("details", summary, *blocks_html(block.blocks, table_class, write), class_="finding")
        elif isinstance(block, Section):
            if block.title:
                yield element("h2", visible(block.title, 200))
            yield from blocks_html(block.blocks, table_class, write)
        elif isinstance(block, Table) and block.rows:
            yield _table(block, table_class, write)
        elif isinstance(block, Picture):
            yield _picture(block)


def _table(part: Table, class_: str, write: Writer) -> Markup:
    longest = max(part.bars, default=0.0) or 1.0
    bars: list[str | Markup] = [_bar(0.0, share / longest, "fusion") for share in part.bars]
    bars += [_span(span) for span in part.spans]
    kinds = [_column_kind(part, i) for i in range(len(part.headers))]
    rows = []
    for number, row in enumerate(part.rows):
        cells = [
            element(
                "td" if i else "th", _cell(cell) if i else write(_cell(cell)), class_=kind, scope=None if i else "row"
            )
            for i, (cell, kind) in enumerate(zip(row, kinds, strict=True))
        ]
        if bars:
            cells.insert(part.bar_column, element("td", bars[number] if number < len(bars) else "", class_="bar"))
        is_total = number >= len(part.rows) - part.totals
        rows.append(element("tr", *cells, class_="total" if is_total else None))
    heads = [
        element("th", header, class_="number" if side == "r" else None, scope="col") if header else element("td")
        for header, side in zip(part.headers, part.sides, strict=True)
    ]
    if bars:
        heads.insert(part.bar_column, element("td"))
    body = element("table", element("thead", element("tr", *heads)), element("tbody", *rows), class_=class_)
    label = part.title or part.headers[0] or "Table"
    scroll = element("div", body, class_="scroll", tabindex="0", role="region", aria_label=label)
    title = [element("h2", visible(part.title, 200))] if part.title else []
    note = [element("p", visible(part.note, LONGEST_TEXT), class_="note")] if part.note else []
    return joined(*title, scroll, *note)


def _column_kind(part: Table, column: int) -> str | None:
    cells = [row[column] for row in part.rows]
    if part.sides[column] == "r":
        return "number"
    if column in part.wide:
        return "meaning"
    if any(isinstance(cell, Name) for cell in cells):
        return "place"
    return "long" if max(len(cell_text(cell)) for cell in cells) > LONG else None


def _cell(cell: Cell) -> str:
    return visible(cell_text(cell), LONGEST_TEXT)


def _span(span: Span) -> str | Markup:
    class_ = PART_CLASSES.get(span.kind, span.kind)
    return span.text or _bar(min(max(span.begin, 0.0), 1.0), min(span.length, 1.0), class_)


def _bar(begin: float, length: float, class_: str) -> Markup:
    width = f"{100 * max(0.0, length):.3f}%"
    rectangle = element("rect", x=f"{100 * begin:.3f}%", width=width, height="100%", class_=class_)
    return element("svg", rectangle, class_="strip", aria_hidden="true", focusable="false")


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
    data = None if sliders is None else _printable_data(to_json(sliders))
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _printable_data(data: Any) -> Any:
    if isinstance(data, dict):
        return {printable(key): _printable_data(value) for key, value in data.items()}
    if isinstance(data, list):
        return [_printable_data(value) for value in data]
    return printable(data) if isinstance(data, str) else data
