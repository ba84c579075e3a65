"""How a result shows itself: `Result` for its class, `headline` for its `repr`; and `printable`.

Results are data, and the code that renders them is above them in the order of imports. `nearpeak/__init__.py`, which is
imported before any other module, sets the functions that render: `report`, `card` and `write`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

report: Callable[[Any, bool], str]
"""A result as text: in full, or no more than one screen."""
card: Callable[[Any], str]
"""A result as HTML for a notebook."""
write: Callable[[Any, str | Path], None]
"""Writes a result to a file."""

LONGEST_HEADLINE = 100


class Result:
    """What a public function returns: `report()` is its text, and a notebook shows its card.

    `render/results.py` has the view of each class; its `repr` is a `headline`.
    """

    __slots__ = ()

    def report(self, *, full: bool = False) -> str:
        """The report as text of 80 columns, as the command line prints it; `full` has all tables of a profile."""
        return report(self, full)  # noqa: F821  # `nearpeak/__init__.py` sets it

    def _repr_html_(self) -> str:
        """The card that a notebook shows."""
        return card(self)  # noqa: F821  # the same


def headline(text: str) -> str:
    """The `repr` of a result: one line of at most 100 characters, all of which can be seen.

    >>> headline("Profile of train.py: 12 ms a step")
    '<Profile of train.py: 12 ms a step>'
    >>> len(headline("x" * 1000))
    100
    """
    line = printable(" ".join(text.split()))
    room = LONGEST_HEADLINE - 2
    if len(line) > room:  # names begin it, figures end it
        line = f"{line[: room // 2 - 2]}...{line[room // 2 + 1 - room :]}"
    return f"<{line}>"


_BLANK = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]")
"""Letters and marks, to Unicode, that show nothing."""


class StatusLine(str):
    """How far something is: a line that the next one replaces, where lines can be replaced."""

    __slots__ = ()


def printable(text: str) -> str:
    """Text in which every character can be seen, for everything that shows text from outside of this package.

    Control characters, direction marks, characters without a width, halves of characters and those that no font has
    become escapes; line breaks stay, and a tab is four spaces.

    >>> printable("a\\u202eb\\x1b[31m\\n  c")
    'a\\\\u202eb\\\\x1b[31m\\n  c'
    """
    if text.isprintable() and (text.isascii() or not _BLANK.search(text)):
        return text
    lines = text.replace("\r\n", "\n").replace("\t", "    ")
    return "".join(c if c == "\n" or (c.isprintable() and not _BLANK.match(c)) else _escaped(c) for c in lines)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")
