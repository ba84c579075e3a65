"""Panels of bars: of each group one bar for each way to do the same, with its number above it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from nearpeak.render.scene import Line, Polygon, Scene, Shape, Text, text_width

WIDTH, LEFT, RIGHT, TOP = 872, 152, 16, 74
PANEL, GAP, LABELS = 84, 30, 15


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """How high it is, the number above it, and what is said where it is hovered over."""

    value: float
    text: str
    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Bars by way, side by side."""

    label: str
    bars: Mapping[str, Bar]


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """Groups with one axis."""

    name: str
    groups: Sequence[Group]


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """What is at the top of panels, and the values with a line, as texts."""

    highest: float
    lines: Mapping[float, str]


def panels(title: str, described: str, ways: Mapping[str, str], axis: Axis, shown: Sequence[Panel]) -> Scene:
    """A picture of panels one below the other; ways have the numbers of their colours."""
    legend = _legend(ways)
    top = TOP + max(one.y for one in legend if isinstance(one, Text)) - 52
    height = int(top) + len(shown) * (PANEL + GAP) + 6
    shapes: list[Shape] = [Text(x=WIDTH / 2, y=26, text=title, size=15, anchor="middle", bold=True), *legend]
    for number, panel in enumerate(shown):
        shapes += _panel(panel, axis, ways, top + number * (PANEL + GAP))
    return Scene(width=WIDTH, height=height, described=described, shapes=tuple(shapes))


def _legend(ways: Mapping[str, str]) -> list[Shape]:
    """Boxes with names, in as many lines as they need."""
    found: list[Shape] = []
    left, top = float(LEFT), 42.0
    for way, colour in ways.items():
        wide = 40 + text_width(way, 12)
        if left > LEFT and left + wide > WIDTH:
            left, top = float(LEFT), top + 18
        found += [_box(left, top, 12.0, 12.0, colour), Text(x=left + 18, y=top + 10, text=way)]
        left += wide
    return found


def _panel(panel: Panel, axis: Axis, ways: Mapping[str, str], top: float) -> Iterator[Shape]:
    bottom, right = top + PANEL, WIDTH - RIGHT
    yield Text(x=LEFT - 42, y=top + PANEL / 2 + 4, text=panel.name, anchor="end", size=12, bold=True)
    for value, text in axis.lines.items():
        level = bottom - PANEL * value / axis.highest
        yield Line(points=((LEFT, level), (right, level)), stroke="faint")
        yield Text(x=LEFT - 6, y=level + 4, text=text, anchor="end", size=10, colour="muted")
    room = (right - LEFT) / len(panel.groups)
    for number, group in enumerate(panel.groups):
        left = LEFT + number * room + 0.12 * room
        wide = 0.76 * room / len(ways)
        for place, (way, colour) in enumerate(ways.items()):
            bar = group.bars.get(way)
            if bar is None:
                continue
            high = PANEL * min(bar.value, axis.highest) / axis.highest
            yield _box(left + place * wide + 1, bottom - high, wide - 2, high, colour, bar.title)
            yield Text(
                x=left + (place + 0.5) * wide, y=bottom - high - 3, text=bar.text, size=9, anchor="middle", halo=True
            )
        yield Text(x=left + 0.38 * room, y=bottom + LABELS, text=group.label, size=10, anchor="middle", colour="muted")
    yield Line(points=((LEFT, bottom), (right, bottom)), stroke="ink")


def _box(left: float, top: float, width: float, height: float, fill: str, title: str = "") -> Polygon:
    right, bottom = left + width, top + height
    return Polygon(points=((left, top), (right, top), (right, bottom), (left, bottom)), fill=fill, title=title)
