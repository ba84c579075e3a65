"""Colours of pictures for a light and a dark page, and text from outside made safe for them."""

from __future__ import annotations

import html

PAGE = ("#ffffff", "#16191d")
INK = ("#1f2328", "#dfe3e8")
MUTED = ("#6a737d", "#959da5")
FAINT = ("#e3e6ea", "#30363d")
"""Each as (light, dark)."""

# Okabe and Ito's colours, which colour-blind readers can tell apart; the second of each pair is for a dark page.
COLOURS = (
    ("#0072b2", "#56b4e9"),
    ("#d55e00", "#f0854a"),
    ("#009e73", "#3fc79a"),
    ("#b4508f", "#dd8fc0"),
    ("#8a6d00", "#e6c229"),
    ("#555555", "#b8b8b8"),
)


def cut(text: str, longest: int) -> str:
    """`text`, its end replaced by dots where it is longer than `longest`."""
    return text if len(text) <= longest else text[: longest - 3] + "..."


def escape(text: str) -> str:
    """For XML: markup escaped, and characters that XML does not allow replaced."""
    allowed = (c if c >= " " and not "\ud800" <= c <= "\udfff" and c not in "\ufffe\uffff" else "?" for c in text)
    return html.escape("".join(allowed), quote=True)
