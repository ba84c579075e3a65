"""`Scene`: a picture as a list of shapes, for every format that it is written in (`svg`, `png`), and its colors.

A color is a name of the theme ("page", "ink", "muted", "faint") or the number of a series color: "0", "1", ...
Coordinates are pixels, y downwards.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from nearpeak._display import printable

PAGE = ("#ffffff", "#16191d")
INK = ("#1f2328", "#dfe3e8")
MUTED = ("#6a737d", "#959da5")
FAINT = ("#e3e6ea", "#30363d")
"""Each as (light, dark)."""

# Okabe and Ito's colors, which color-blind readers can tell apart; the second of each pair is for a dark page.
COLORS = (
    ("#0072b2", "#56b4e9"),
    ("#d55e00", "#f0854a"),
    ("#009e73", "#3fc79a"),
    ("#b4508f", "#dd8fc0"),
    ("#8a6d00", "#e6c229"),
    ("#555555", "#b8b8b8"),
)


def truncate(text: str, longest: int) -> str:
    """`text`, its end replaced by dots where it is longer than `longest`."""
    return text if len(text) <= longest else text[: longest - 3] + "..."


def escape_xml(text: str) -> str:
    """For XML: markup escaped, and characters that cannot be seen, which XML does not allow either."""
    return html.escape(printable(text), quote=True)


PALETTE: dict[str, tuple[str, str]] = {
    "page": PAGE,
    "ink": INK,
    "muted": MUTED,
    "faint": FAINT,
    **{str(number): pair for number, pair in enumerate(COLORS)},
}
"""Each color as (light, dark)."""

Point = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Straight pieces from point to point."""

    points: tuple[Point, ...]
    stroke: str
    width: float = 1.0
    dashed: bool = False
    title: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Circle:
    """A disc with an edge. `opacity` is that of the inside; `title` is shown when it is hovered over."""

    x: float
    y: float
    radius: float
    fill: str
    opacity: float = 1.0
    stroke: str = ""
    width: float = 1.0
    title: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Polygon:
    """A closed shape with an edge."""

    points: tuple[Point, ...]
    fill: str
    opacity: float = 1.0
    stroke: str = ""
    width: float = 1.0
    title: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """One line of text: x is where `anchor` says, y the baseline, `angle` degrees upwards around both."""

    x: float
    y: float
    text: str
    size: float = 12.0
    anchor: Literal["start", "middle", "end"] = "start"
    color: str = "ink"
    bold: bool = False
    angle: float = 0.0
    halo: bool = False
    """With an edge in the color of the page, for text over lines."""


Shape = Line | Circle | Polygon | Text


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """Shapes in the order in which they are drawn; `described` is for those who cannot see them."""

    width: int
    height: int
    described: str
    shapes: tuple[Shape, ...]


def rectangle(left: float, top: float, width: float, height: float) -> tuple[Point, ...]:
    """The corners of a rectangle, for a polygon."""
    return ((left, top), (left + width, top), (left + width, top + height), (left, top + height))


def text_width(text: str, size: float) -> float:
    """The approximate width of a text. Fonts differ: this is an upper estimate."""
    return 0.56 * size * len(text)


MARKERS = ("circle", "square", "triangle", "diamond", "plus", "cross")


def marker(x: float, y: float, number: int, *, radius: float = 5.0, title: str = "") -> Shape:
    """The mark of a series: 36 numbers differ by color or by form."""
    color, form = number % len(COLORS), MARKERS[(number + number // len(COLORS)) % len(MARKERS)]
    if form == "circle":
        return Circle(x=x, y=y, radius=radius, fill=str(color), stroke="page", title=title)
    outline = tuple((x + radius * right, y + radius * down) for right, down in _outline(form))
    return Polygon(points=outline, fill=str(color), stroke="page", title=title)


def _outline(form: str) -> Iterator[Point]:
    if form == "square":
        yield from ((-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9))
    elif form == "triangle":
        yield from ((0.0, -1.2), (1.15, 0.85), (-1.15, 0.85))
    elif form == "diamond":
        yield from ((0.0, -1.25), (1.25, 0.0), (0.0, 1.25), (-1.25, 0.0))
    else:
        turn = math.pi / 4 if form == "cross" else 0.0
        arm, half = 1.25, 0.42
        corner = ((half, -arm), (half, -half), (arm, -half))
        for quarter in range(4):
            angle = turn + quarter * math.pi / 2
            for right, down in corner:
                yield (
                    right * math.cos(angle) - down * math.sin(angle),
                    right * math.sin(angle) + down * math.cos(angle),
                )
