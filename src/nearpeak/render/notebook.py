"""A result as a fragment of HTML for a notebook: a `Document` with styles of its own.

A fragment has no script, no style sheet, no id and no link, so that it neither changes the page that it is shown in nor
needs anything from it. It has no colors of its own: what is drawn has the color of the text, on a light page and on a
dark one. All text from outside is escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from nearpeak._display import Result
from nearpeak.render.document import (
    Block,
    CodeBlock,
    Details,
    Document,
    Fact,
    Facts,
    Items,
    Paragraph,
    Section,
    Table,
    printable_document,
)
from nearpeak.render.html.markup import Markup, element, joined, visible, visible_lines
from nearpeak.render.results import document_of
from nearpeak.render.text import cell_text

LONGEST = 600
LONGEST_CELL = 80
_CARD = (
    "border:1px solid rgba(128,128,128,.5);border-radius:6px;padding:.6em .9em;margin:.3em 0;max-width:60em;"
    "overflow-x:auto"
)
_TABLE = "border-collapse:collapse;margin:.5em 0;background:none;color:inherit;font:inherit"
_TEXT = "text-align:left;padding:.1em 1em .1em 0;vertical-align:top;white-space:normal"
_NUMBER = "text-align:right;padding:.1em 1em .1em 0;vertical-align:top;white-space:nowrap"
_CODE = "background:none;margin:.3em 0 .3em 1em"
_QUIET = "opacity:.75"
_SPACE = "margin-top:.5em"
_NO_MATHEMATICS = "tex2jax_ignore mathjax_ignore"
"""Names of ops and files may have dollar signs in them, and a notebook would typeset what is between two."""


def card(result: Result) -> str:
    """What a notebook shows for a result."""
    return fragment(document_of(result))


def fragment(document: Document) -> str:
    """A document as a fragment of HTML."""
    document = printable_document(document)
    head = [element("b", visible(document.title, 160))]
    head += [element("div", visible(str(fact), LONGEST_CELL), style=_QUIET) for fact in document.facts]
    return str(element("div", element("div", *head), *_blocks(document.parts), class_=_NO_MATHEMATICS, style=_CARD))


def _blocks(blocks: Iterable[Block]) -> Iterator[Markup]:
    for block in blocks:
        if isinstance(block, Paragraph):
            yield element("div", visible(block.text, LONGEST), style=_QUIET if block.kind == "small" else _SPACE)
        elif isinstance(block, Facts):
            yield _table((), [(element("b", fact.label.rstrip(":")), _fact(fact)) for fact in block.facts], "ll")
        elif isinstance(block, Items):
            if block.title:
                yield element("div", visible(block.title, LONGEST), style=_SPACE)
            yield from (element("div", visible(item, LONGEST), style=_QUIET) for item in block.items)
        elif isinstance(block, CodeBlock):
            yield element("pre", visible_lines(block.text), style=_CODE)
        elif isinstance(block, Details):
            yield element("details", element("summary", visible(block.summary)), *_blocks(block.blocks))
        elif isinstance(block, Section):
            yield from _section(block)
        elif isinstance(block, Table) and block.rows:
            yield from _document_table(block)


def _section(section: Section) -> Iterator[Markup]:
    blocks = [*_blocks(section.blocks)] or [element("div", section.empty, style=_QUIET)]
    if section.is_folded:
        yield element("details", element("summary", visible(section.title)), *blocks)
        return
    if section.title:
        yield element("div", element("b", visible(section.title)), style=_SPACE)
    yield from blocks


def _fact(fact: Fact) -> Markup:
    text = visible(f"{fact.text} {fact.advice}".strip(), LONGEST)
    return joined(text, "" if fact.share is None else _bar(0.0, fact.share))


def _document_table(part: Table) -> Iterator[Markup]:
    rows: list[list[str | Markup]] = [[visible(cell_text(cell), LONGEST_CELL) for cell in row] for row in part.rows]
    bars: list[str | Markup] = [span.text or _bar(span.begin, span.length) for span in part.spans]
    longest = max(part.bars, default=0.0) or 1.0
    bars += [_bar(0.0, share / longest) for share in part.bars]
    headers, align = [*part.headers], part.sides
    if bars:
        column = part.bar_column
        headers.insert(column, "")
        align = f"{align[:column]}l{align[column:]}"
        for row, bar in zip(rows, [*bars, *[""] * (len(rows) - len(bars))], strict=True):
            row.insert(column, bar)
    if part.title:
        yield element("div", visible(part.title, LONGEST), style=_SPACE)
    yield _table(headers, rows, align)
    if part.note:
        yield element("div", visible(part.note, LONGEST), style=_QUIET)


def _table(headers: Sequence[str], rows: Iterable[Sequence[str | Markup]], align: str) -> Markup:
    styles = [_NUMBER if letter == "r" else _TEXT for letter in align]
    head = element("tr", *(element("th", text, style=style) for text, style in zip(headers, styles, strict=False)))
    body = [
        element("tr", *(element("td", cell, style=style) for cell, style in zip(row, styles, strict=True)))
        for row in rows
    ]
    return element("table", head if any(headers) else "", *body, style=_TABLE)


def _bar(begin: float, length: float) -> Markup:
    """A bar from `begin` to `begin + length` of the width, in the color of the text."""
    left = min(max(begin, 0.0), 1.0)
    width = min(max(length, 0.0), 1.0 - left)
    inner = element(
        "div",
        style=f"margin-left:{100 * left:.2f}%;width:{100 * width:.2f}%;height:.8em;background:currentColor;opacity:.55",
    )
    return element("div", inner, style="min-width:16em;margin-top:.3em")
