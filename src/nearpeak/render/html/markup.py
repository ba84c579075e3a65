"""Text as markup: `element` escapes all that it is given but other markup, `visible` shows what cannot be seen."""

from __future__ import annotations

import html

from nearpeak._display import printable
from nearpeak.render.text import elide

LONGEST = 300
"""Characters of a name; longer names are generated."""
LONGEST_TEXT = 4000
"""Characters of a text of several lines."""


class Markup(str):
    """Text that is markup already."""

    __slots__ = ()


def visible(text: str, longest: int = LONGEST) -> str:
    """A text on one line, in which every character can be seen, its middle left out where it is too long.

    >>> visible("a\\u202eb\\n c"), visible("abc" * 10, 20)
    ('a\\\\u202eb c', 'abcabcab...bcabcabc')
    """
    return elide(printable(text if text.isprintable() else " ".join(text.split())), longest)


def visible_lines(text: str) -> str:
    """A text of several lines in which every character can be seen; indentation is kept, and a long end left out."""
    return printable(text if len(text) <= LONGEST_TEXT else text[: LONGEST_TEXT - 3] + "...")


def element(tag: str, *content: str | Markup, **attributes: str | float | bool | None) -> Markup:
    """An element with its content, in which every character can be seen. `class_` is class.

    Attributes that are None or False are left out.

    >>> element("td", "a < b", element("b", "c"), class_="number", hidden=True)
    '<td class="number" hidden>a &lt; b<b>c</b></td>'
    """
    pairs = "".join(_attribute(name, value) for name, value in attributes.items())
    return Markup(f"<{tag}{pairs}>{joined(*content)}</{tag}>")


def joined(*parts: str | Markup) -> Markup:
    """Parts one after the other, text escaped."""
    return Markup("".join(part if isinstance(part, Markup) else escape_html(part) for part in parts))


def escape_html(text: str) -> str:
    """Text as the content of an element."""
    return html.escape(printable(text), quote=False)


def _attribute(name: str, value: str | float | bool | None) -> str:
    if value is None or value is False:
        return ""
    name = name.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{html.escape(printable(str(value)), quote=True)}"'
