"""Text from outside as Markdown that is only text: for tables, paragraphs, code and headings of GitHub's dialect.

Nothing in it becomes markup, a link, a mention of somebody or a reference to an issue.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from nearpeak.render.html.markup import visible, visible_lines

_PUNCTUATION = re.compile(r"([\\`*_\[\]~$])")
_LINKS = re.compile(r"@|#|://|www\.|GH-", re.IGNORECASE)
_LINK_BREAK = "<!-- -->"
"""Between two characters it is not seen, and keeps them from becoming a link."""
_LINE_START = re.compile(r"^([-+=]|\d+[.)](?= |$))")
"""What would make a list or a heading of a line."""
_ENTITIES = {ord("&"): "&amp;", ord("<"): "&lt;", ord(">"): "&gt;", ord("|"): "&#124;"}
"""A pipe would end a cell, and whether a backslash before it helps depends on what is before that."""


def escape_text(value: str, longest: int = 1000) -> str:
    """One line of text inside of a paragraph, a cell or a list.

    >>> text("a*b | <img> of @octocat")
    'a\\\\*b &#124; &lt;img&gt; of @<!-- -->octocat'
    """
    shown = _PUNCTUATION.sub(r"\\\1", visible(value, longest).strip())
    shown = _LINE_START.sub(lambda found: f"{found[0][:-1]}\\{found[0][-1]}", shown)
    return _break_links(shown.translate(_ENTITIES))


def escape_summary(value: str, longest: int = 200) -> str:
    """One line of text inside of an HTML element, in which Markdown means nothing."""
    return _break_links(visible(value, longest).strip().translate(_ENTITIES))


def _break_links(escaped: str) -> str:
    """`&#124;` is no reference to an issue."""
    parts = escaped.split("&#124;")
    return "&#124;".join(_LINKS.sub(lambda found: found[0][:1] + _LINK_BREAK + found[0][1:], part) for part in parts)


def code(value: str, longest: int = 80) -> str:
    """A name as code, also inside of a table; "-" for none.

    >>> code("aten.mm"), code("`x`"), code("a|b"), code("")
    ('`aten.mm`', '`` `x` ``', '<code>a&#124;b</code>', '-')
    """
    shown = visible(value, longest).strip()
    if not shown:
        return "-"
    if "|" in shown:
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
