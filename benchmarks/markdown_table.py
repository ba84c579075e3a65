"""`table`: rows of texts as a table of Markdown."""

from __future__ import annotations

from collections.abc import Sequence


def table(head: Sequence[str], rows: Sequence[Sequence[str]], texts: int) -> str:
    """The first so many columns are texts, and the others numbers."""
    marks = ["---"] * texts + ["---:"] * (len(head) - texts)
    lines = [head, marks, *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
