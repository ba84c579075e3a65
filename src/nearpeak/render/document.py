"""`Document`: an answer as paragraphs, tables and pictures, and its forms as text, Markdown and CSV."""

from __future__ import annotations

import csv
import io
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from nearpeak.render import markdown as md
from nearpeak.render.csv import guard_formula
from nearpeak.render.text import PLAIN, Style, table
from nearpeak.render.views.timing import plain
from nearpeak.render.views.verdict import elide

WIDTH = 80
BAR_COLUMNS = 20
"""Columns of the longest bar."""
NARROWEST = 12
"""Columns that a text keeps at least."""
_NUMBER = re.compile(r"[+-]?\d[\d.,]*(e[+-]?\d+)?( ?[%\w/]+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Paragraph:
    """One paragraph; "good" and "bad" are verdicts, and "small" is about how far to trust an answer."""

    text: str
    kind: Literal["plain", "good", "bad", "small"] = "plain"


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Cells that are text already. `bars` has a share for each row, drawn beside it."""

    title: str = ""
    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    align: str = ""
    bars: tuple[float, ...] = ()
    totals: int = 0
    """How many of the last rows are sums."""
    note: str = ""
    below: int | None = None
    """A column of long texts, which a terminal shows below its row."""

    @property
    def sides(self) -> str:
        """One letter per column."""
        return self.align or "l" + "r" * (len(self.headers) - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """An SVG file of our own making; left out of text."""

    title: str
    svg: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeBlock:
    """Source text, or what a command printed, line by line."""

    text: str
    language: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A title, a line of facts, and parts in order."""

    title: str
    facts: tuple[str, ...] = ()
    parts: tuple[Paragraph | Table | Picture | CodeBlock, ...]
    is_story: bool = False
    """Whether it is read from top to bottom: then a page has no parts beside each other."""

    @property
    def tables(self) -> tuple[Table, ...]:
        """The tables alone."""
        return tuple(part for part in self.parts if isinstance(part, Table))

    @property
    def pictures(self) -> tuple[Picture, ...]:
        """The pictures alone."""
        return tuple(part for part in self.parts if isinstance(part, Picture))


def text(document: Document, style: Style = PLAIN) -> str:
    """For a terminal: at most 80 columns where the cells allow it."""
    head = [style.paint(line, "bold") for line in _wrap(plain(document.title)).split("\n")]
    head += [_wrap(plain(fact)) for fact in document.facts]
    return "\n\n".join(["\n".join(head), *_blocks(document, style)])


def _blocks(document: Document, style: Style) -> Iterator[str]:
    for part in document.parts:
        if isinstance(part, Paragraph):
            lines = _wrap(plain(part.text))
            color = {"good": "green", "bad": "red", "small": "dim"}.get(part.kind)
            yield "\n".join(style.paint(line, color) for line in lines.split("\n")) if color else lines  # type: ignore[arg-type]
        elif isinstance(part, CodeBlock):
            yield "\n".join(_code_line(line) for line in part.text.rstrip().split("\n"))
        elif isinstance(part, Table) and part.rows:
            yield _table(part, style)


def _code_line(line: str) -> str:
    """A line of a listing, with its own indentation."""
    return f"    {' ' * (len(line) - len(line.lstrip()))}{plain(line.lstrip())}".rstrip()


def _table(part: Table, style: Style) -> str:
    rows = [[plain(cell) for cell in row] for row in part.rows]
    headers, align = list(part.headers), part.sides
    texts: list[str] = []
    if part.below is not None:
        texts = [row.pop(part.below) for row in rows]
        headers.pop(part.below)
        align = align[: part.below] + align[part.below + 1 :]
    rows = _fit_width(headers, rows, align)
    if part.bars:
        longest = max(part.bars) or 1.0
        bars = [style.bar(BAR_COLUMNS * share / longest) for share in part.bars]
        bars += [""] * (len(rows) - len(bars))
        room = WIDTH - len(table(headers, rows, align).split("\n")[1]) - 2
        if room >= BAR_COLUMNS:
            headers, align = [*headers, ""], align + "l"
            rows = [[*row, bar] for row, bar in zip(rows, bars, strict=True)]
    lines = [line.rstrip() for line in table(headers, rows, align).split("\n")]
    if part.totals:
        lines[-part.totals :] = [style.paint(line, "bold") for line in lines[-part.totals :]]
    if texts:
        pairs = zip(lines[2:], texts, strict=True)
        lines = [*lines[:2], *(line + (f"\n{_indent(below)}" if below else "") for line, below in pairs)]
    body = "\n".join(([_wrap(plain(part.title)), ""] if part.title else []) + lines)
    return body + (f"\n\n{_wrap(plain(part.note))}" if part.note else "")


def _fit_width(headers: list[str], rows: list[list[str]], align: str) -> list[list[str]]:
    """The rows with their longest texts cut, until the table has 80 columns; numbers are never cut."""
    widths = [max(len(cell) for cell in column) for column in zip(headers, *rows, strict=True)]
    over = sum(widths) + 2 * (len(widths) - 1) - WIDTH
    while over > 0:
        texts = [i for i, side in enumerate(align) if side == "l" and widths[i] > max(NARROWEST, len(headers[i]))]
        if not texts:
            break
        widest = max(texts, key=lambda i: widths[i])
        taken = min(over, widths[widest] - max(NARROWEST, len(headers[widest])))
        widths[widest] -= taken
        over -= taken
    return [
        [elide(cell, width) if len(cell) > width else cell for cell, width in zip(row, widths, strict=True)]
        for row in rows
    ]


def _indent(line: str) -> str:
    return textwrap.fill(line, WIDTH, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False)


def markdown(document: Document) -> str:
    """For a pull request or a page."""
    parts = [f"# {md.escape_text(document.title)}"]
    if document.facts:
        parts.append("\n".join(f"{md.escape_text(fact)}  " for fact in document.facts))
    for part in document.parts:
        if isinstance(part, Paragraph):
            said = md.escape_text(part.text, 4000)
            parts.append(f"**{said}**" if part.kind in ("good", "bad") else said)
        elif isinstance(part, CodeBlock):
            parts.append(md.code_block(part.text, part.language))
        elif isinstance(part, Table) and part.rows:
            if part.title:
                parts.append(f"## {md.escape_text(part.title)}")
            rows = [[md.escape_text(cell) for cell in row] for row in part.rows]
            parts.append(md.table([md.escape_text(header) for header in part.headers], rows, part.sides))
            if part.note:
                parts.append(md.escape_text(part.note, 4000))
    return "\n\n".join(parts) + "\n"


def csv_text(document: Document) -> str:
    """All tables: one after the other, each row after the title of its table where there are several."""
    target = io.StringIO()
    writer = csv.writer(target, lineterminator="\n")
    tables = [part for part in document.tables if part.rows]
    for part in tables:
        before = [part.title] if len(tables) > 1 else []
        writer.writerow([*(["table"] if before else []), *map(_cell, part.headers)])
        writer.writerows([*before, *map(_cell, row)] for row in part.rows)
    return target.getvalue()


def _cell(value: str) -> str:
    """A number as it is, nothing for what is not known, and a text that no spreadsheet takes for a formula."""
    if value == "-":
        return ""
    return value if _NUMBER.fullmatch(value) else guard_formula(value)


def _wrap(line: str) -> str:
    return textwrap.fill(line, WIDTH, break_on_hyphens=False, break_long_words=False)
