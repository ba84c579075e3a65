"""`Scene`: a picture as a list of shapes, for every form that it is written in (`svg.py`, `png.py`).

A colour is a name of the theme, "page", "ink", "muted" or "faint", or the number of one of its colours: "0", "1", ...
Coordinates are pixels, y downwards.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from nearpeak.render.theme import COLOURS, FAINT, INK, MUTED, PAGE

PALETTE: dict[str, tuple[str, str]] = {
    "page": PAGE,
    "ink": INK,
    "muted": MUTED,
    "faint": FAINT,
    **{str(number): pair for number, pair in enumerate(COLOURS)},
}
"""Each colour as (light, dark)."""

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
    colour: str = "ink"
    bold: bool = False
    angle: float = 0.0
    halo: bool = False
    """With an edge in the colour of the page, for text over lines."""


Shape = Line | Circle | Polygon | Text


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """Shapes in the order in which they are drawn; `described` is for those who cannot see them."""

    width: int
    height: int
    described: str
    shapes: tuple[Shape, ...]


def text_width(text: str, size: float) -> float:
    """About how wide a text is: fonts differ, so this is on the wide side."""
    return 0.56 * size * len(text)


MARKERS = ("circle", "square", "triangle", "diamond", "plus", "cross")


def marker(x: float, y: float, number: int, *, radius: float = 5.0, title: str = "") -> Shape:
    """The mark of a series: 36 numbers differ by colour or by form."""
    colour, form = number % len(COLOURS), MARKERS[(number + number // len(COLOURS)) % len(MARKERS)]
    if form == "circle":
        return Circle(x=x, y=y, radius=radius, fill=str(colour), stroke="page", title=title)
    outline = tuple((x + radius * right, y + radius * down) for right, down in _outline(form))
    return Polygon(points=outline, fill=str(colour), stroke="page", title=title)


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
