"""`Document`: a report as data, before it has a format.

`views/` makes one of each kind of result. `text`, `markdown`, `html/document`, `notebook` and `csv` write it, each in
its own format. Texts in it are as they come from the result: a writer begins with `printable_document`, and escapes
what its format gives a meaning to.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Literal, TypeVar

from nearpeak._display import printable

Color = Literal["bold", "dim", "red", "green", "yellow", "blue", "magenta", "cyan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Paragraph:
    """One paragraph; "good" and "bad" are verdicts, "small" is about how far to trust a result, "advice" what to do."""

    text: str
    kind: Literal["plain", "good", "bad", "small", "advice"] = "plain"
    accent: tuple[str, Color] | None = None
    """A word of the text, and its color on a terminal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """A label with a sentence about it; `advice` is shown after it, `share` as a bar where there are bars."""

    label: str
    text: str
    advice: str = ""
    share: float | None = None
    color: Color | None = None
    most_lines: int | None = None
    """On a terminal; what does not fit is cut off."""

    def __str__(self) -> str:
        return f"{self.label}: {self.text}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Facts below each other; on a terminal their labels take `width` columns."""

    facts: tuple[Fact, ...]
    width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Items:
    """A list under a title. On a terminal items have `marker` before them, and an empty line between if `spaced`."""

    items: tuple[str, ...]
    title: str = ""
    marker: str = ""
    hanging: int = 2
    """Columns by which the further lines of an item are indented."""
    spaced: bool = False
    most_lines: int | None = None
    """Of an item on a terminal, which then keeps its own indentation; what does not fit is cut off."""


@dataclass(frozen=True, slots=True)
class Time:
    """A cell: a time in seconds. Text writes those of a table in one unit, so that they can be compared."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Name:
    """A cell: a name that is code, and what follows it. Text leaves out a part of a long name, and never the suffix."""

    name: str
    suffix: str = ""
    cut: Literal["start", "middle", "end"] = "middle"


Cell = str | Time | Name


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A bar beside a row: where it begins and how long it is, as shares of the whole; or a text in its place."""

    begin: float
    length: float
    kind: str
    """The part of the waterfall that it is, which has a color."""
    color: Color
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of cells under headers.

    `bars` has a share for each row, drawn beside it and scaled to the longest; `spans` are bars that begin somewhere.
    """

    title: str = ""
    headers: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    align: str = ""
    bars: tuple[float, ...] = ()
    spans: tuple[Span, ...] = ()
    totals: int = 0
    """How many of the last rows are sums."""
    note: str = ""
    below: int | None = None
    """A column of long texts, which a terminal shows below its row."""
    indent: int = 4
    """Columns by which such a text is indented."""
    is_shown_empty: bool = False
    """Whether headers without rows are shown."""
    wide: tuple[int, ...] = ()
    """Columns that a terminal has no room for."""
    beside: int | None = None
    """A column that a terminal shows beside the spans, which are half as long then."""
    is_headed: bool = True
    """Whether a terminal shows the headers."""

    @property
    def sides(self) -> str:
        """One letter per column: "l" or "r"."""
        return self.align or "l" + "r" * (len(self.headers) - 1)

    def without_empty_columns(self, first: int = 0) -> Table:
        """The table without the columns, from the `first` on, in which all cells are "-"."""
        columns = range(len(self.headers))
        known = [i for i in columns if i < first or any(row[i] != "-" for row in self.rows)]
        return replace(
            self,
            headers=tuple(self.headers[i] for i in known),
            rows=tuple(tuple(row[i] for i in known) for row in self.rows),
            align="".join(self.sides[i] for i in known),
        )

    @property
    def bar_column(self) -> int:
        """The column before which bars stand, in formats that have room for all columns."""
        return min(self.wide, default=len(self.headers))


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
class Details:
    """Blocks under a summary: folded where a format can fold, indented in text."""

    summary: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Blocks that belong together. Text shows its title only if `is_titled`; other formats fold it if `is_folded`."""

    id: str
    title: str = ""
    blocks: tuple[Block, ...]
    is_titled: bool = False
    is_folded: bool = False
    empty: str = ""
    """In place of blocks where there are none, in pages."""


Block = Paragraph | Facts | Items | Table | Picture | CodeBlock | Details | Section


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A title, facts below it, and blocks in order."""

    title: str
    facts: tuple[str | Fact, ...] = ()
    parts: tuple[Block, ...]
    is_story: bool = False
    """Whether it is read from top to bottom: then a page has no parts beside each other."""
    is_titled: bool = True
    """Whether text shows the title and the facts: not where the first block says it."""
    is_comment: bool = False
    """Whether its Markdown is for a comment on a pull request: with small headings, and of a limited length."""

    def blocks(self) -> Iterator[Block]:
        """All blocks, and those inside of sections and details after them."""
        pending = list(reversed(self.parts))
        while pending:
            block = pending.pop()
            yield block
            if isinstance(block, Section | Details):
                pending.extend(reversed(block.blocks))

    @property
    def tables(self) -> tuple[Table, ...]:
        """The tables alone."""
        return tuple(block for block in self.blocks() if isinstance(block, Table))

    @property
    def pictures(self) -> tuple[Picture, ...]:
        """The pictures alone."""
        return tuple(block for block in self.blocks() if isinstance(block, Picture))


Part = TypeVar("Part")


def printable_document(part: Part) -> Part:
    """A document, or a part of one, in which every character of every text can be seen."""
    changed: Any = part
    if isinstance(part, str):
        changed = printable(part)
    elif isinstance(part, tuple):
        changed = tuple(map(printable_document, part))
    elif isinstance(part, Picture):  # its text was escaped where it was drawn
        changed = replace(part, title=printable(part.title))
    elif is_dataclass(part) and not isinstance(part, type):
        changed = replace(part, **{each.name: printable_document(getattr(part, each.name)) for each in fields(part)})
    return changed  # type: ignore[no-any-return]
