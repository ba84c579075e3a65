"""How a result shows itself: `card` gives its HTML for a notebook, `write` writes it to a file; and `printable`.

Results are data, and the code that renders them is above them in the order of imports. `nearpeak/__init__.py`, which is
imported before any other module, sets both functions.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

card: Callable[[Any], str]
write: Callable[[Any, str | Path], None]

_BLANK = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]")
"""Letters and marks, to Unicode, that show nothing."""


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
