"""A `Document` as Markdown of GitHub's dialect, for a pull request, an issue or a page.

Text from outside is only text: nothing in it becomes markup, a link, a mention of somebody or a reference to an issue.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from nearpeak.render.document import (
    Block,
    Cell,
    CodeBlock,
    Details,
    Document,
    Fact,
    Facts,
    Items,
    Name,
    Paragraph,
    Section,
    Span,
    Table,
    printable_document,
)
from nearpeak.render.html.markup import visible, visible_lines
from nearpeak.render.text import cell_text

LARGEST_COMMENT = 65_000
"""Characters; GitHub takes 65,536."""
LONGEST_TEXT = 4000
BAR_CHARACTERS = 20
_PUNCTUATION = re.compile(r"([\\`*_\[\]~$])")
_LINKS = re.compile(r"@|#|://|www\.|GH-", re.IGNORECASE)
_LINK_BREAK = "<!-- -->"
"""Between two characters it is invisible, and keeps them from becoming a link."""
_LINE_START = re.compile(r"^([-+=]|\d+[.)](?= |$))")
"""What would make a list or a heading of a line."""
_ENTITIES = {ord("&"): "&amp;", ord("<"): "&lt;", ord(">"): "&gt;", ord("|"): "&#124;"}
"""A pipe would end a cell, and whether a backslash before it helps depends on what is before that."""


def markdown(document: Document) -> str:
    """The whole text; of a comment, as many parts as fit, from the first on."""
    document = printable_document(document)
    level = 3 if document.is_comment else 1
    parts = [f"{'#' * level} {escape_text(document.title)}"]
    if document.facts:
        parts.append("\n".join(f"{escape_text(str(fact))}  " for fact in document.facts))
    parts += _blocks(document.parts, level + 1)
    whole = "\n\n".join(parts)
    while document.is_comment and len(whole) > LARGEST_COMMENT and len(parts) > 1:
        del parts[-1]
        whole = "\n\n".join([*parts, "The rest does not fit into a comment."])
    return whole + "\n"


def _blocks(blocks: Iterable[Block], level: int) -> Iterator[str]:
    for block in blocks:
        if isinstance(block, Paragraph):
            text = escape_text(block.text, LONGEST_TEXT)
            yield f"**{text}**" if block.kind in ("good", "bad") else text
        elif isinstance(block, Facts):
            yield "\n".join(_fact(fact) for fact in block.facts)
        elif isinstance(block, Items):
            if block.title:
                yield escape_text(block.title)
            yield "\n".join(f"- {escape_text(item, LONGEST_TEXT)}" for item in block.items)
        elif isinstance(block, CodeBlock):
            yield code_block(block.text, block.language)
        elif isinstance(block, Details):
            yield details(escape_summary(block.summary), *_blocks(block.blocks, level))
        elif isinstance(block, Section) and block.is_folded:
            yield details(escape_summary(block.title), *_blocks(block.blocks, level))
        elif isinstance(block, Section):
            if block.title:
                yield f"{'#' * level} {escape_text(block.title)}"
            yield from _blocks(block.blocks, level)
        elif isinstance(block, Table) and block.rows:
            if block.title:
                yield f"{'#' * level} {escape_text(block.title)}"
            yield _table(block)
            if block.note:
                yield escape_text(block.note, LONGEST_TEXT)


def _fact(fact: Fact) -> str:
    advice = f" {escape_text(fact.advice)}" if fact.advice else ""
    return f"- **{escape_text(fact.label).rstrip(':')}:** {escape_text(fact.text)}{advice}"


def _table(part: Table) -> str:
    headers, align = [escape_text(header) for header in part.headers], part.sides
    rows = [[_cell(cell) for cell in row] for row in part.rows]
    if part.totals:
        rows[-part.totals :] = [[f"**{cell}**" if cell else "" for cell in row] for row in rows[-part.totals :]]
    if part.spans:
        column = part.bar_column
        headers.insert(column, "")
        align = f"{align[:column]}l{align[column:]}"
        for row, bar in zip(rows, [*map(_span, part.spans), *[""] * (len(rows) - len(part.spans))], strict=True):
            row.insert(column, bar)
    return table(headers, rows, align)


def _cell(cell: Cell) -> str:
    if isinstance(cell, Name):
        return f"{code(cell.name) if cell.name else ''} {escape_text(cell.suffix, 60)}".strip() or "-"
    return escape_text(cell_text(cell))


def _span(span: Span) -> str:
    """Where in the whole a part lies. Anything above zero has one block."""
    if span.text:
        return escape_text(span.text)
    if span.length <= 0.0:
        return ""
    start = min(round(BAR_CHARACTERS * min(max(span.begin, 0.0), 1.0)), BAR_CHARACTERS - 1)
    length = max(1, min(round(BAR_CHARACTERS * (span.begin + span.length)), BAR_CHARACTERS) - start)
    return f"`{'░' * start}{'█' * length}{'░' * (BAR_CHARACTERS - start - length)}`"


def escape_text(value: str, longest: int = 1000) -> str:
    """One line of text inside of a paragraph, a cell or a list.

    >>> escape_text("a*b | <img> of @octocat")
    'a\\\\*b &#124; &lt;img&gt; of @<!-- -->octocat'
    """
    shown = _PUNCTUATION.sub(r"\\\1", visible(value, longest).strip())
    shown = _LINE_START.sub(lambda match: f"{match[0][:-1]}\\{match[0][-1]}", shown)
    return _break_links(shown.translate(_ENTITIES)).replace("](", f"]{_LINK_BREAK}(")


def escape_summary(value: str, longest: int = 200) -> str:
    """One line of text inside of an HTML element, in which Markdown means nothing."""
    return _break_links(visible(value, longest).strip().translate(_ENTITIES)).replace("](", f"]{_LINK_BREAK}(")


def _break_links(escaped: str) -> str:
    """`&#124;` is no reference to an issue."""
    parts = escaped.split("&#124;")
    return "&#124;".join(_LINKS.sub(lambda match: match[0][:1] + _LINK_BREAK + match[0][1:], part) for part in parts)


def code(value: str, longest: int = 80) -> str:
    """A name as code, also inside of a table; "-" for none.

    What could be markup for a reader other than GitHub's is escaped in it.

    >>> code("aten.mm"), code("`x`"), code("a|b"), code("")
    ('`aten.mm`', '`` `x` ``', '<code>a&#124;b</code>', '-')
    """
    shown = visible(value, longest).strip()
    if not shown:
        return "-"
    if re.search(r"[|<>]|\]\(", shown):
        return f"<code>{escape_text(shown, longest)}</code>"
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", shown)), default=0))
    room = " " if shown.startswith("`") or shown.endswith("`") else ""
    return f"{fence}{room}{shown}{room}{fence}"


def code_block(value: str, language: str = "") -> str:
    """Lines as a block of code, whatever is in them."""
    lines = visible_lines(value.strip("\n"))
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", lines)), default=0))
    return f"{fence}{language}\n{lines}\n{fence}"


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], align: str) -> str:
    """A table of cells that are Markdown already; `align` has "l" or "r" for each column."""
    marks = [{"l": ":--", "r": "--:"}[side] for side in align]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (headers, marks, *rows))


def details(summary: str, *parts: str) -> str:
    """Parts that are shown when the summary, which is HTML, is clicked on."""
    inside = "\n\n".join(part for part in parts if part)
    return f"<details>\n<summary>{summary}</summary>\n\n{inside}\n\n</details>"
