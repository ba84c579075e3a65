"""`SourceExcerpt`: a source line with its neighbors, as it was when the step ran. Part of a saved profile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nearpeak._records import Count

NEIGHBORS = 2
"""Lines before a line and after it."""
LONGEST_LINE = 200
"""Characters; the rest of a line is left out."""
MOST_EXCERPTS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceExcerpt:
    """The text of a line of code that a report names, and of the lines around it."""

    source: str
    """The line: "train.py:41"."""
    first_line: Count
    """The number of the first of `lines`."""
    lines: tuple[str, ...]


def excerpt(source: str, lines: Sequence[str]) -> SourceExcerpt | None:
    """The excerpt of a file with these lines, without empty ones at its ends; None if it has no such line.

    >>> excerpt("train.py:2", ["import torch", "x = torch.ones(3)", "", "y = x + 1"]).lines
    ('import torch', 'x = torch.ones(3)', '', 'y = x + 1')
    """
    number = source.rpartition(":")[2]
    index = int(number) - 1 if number.isdecimal() else -1
    if not 0 <= index < len(lines) or not lines[index].strip():
        return None
    first, last = max(0, index - NEIGHBORS), min(len(lines), index + NEIGHBORS + 1)
    while not lines[first].strip():
        first += 1
    while not lines[last - 1].strip():
        last -= 1
    return SourceExcerpt(
        source=source,
        first_line=first + 1,
        lines=tuple(line.rstrip()[:LONGEST_LINE] for line in lines[first:last]),
    )
