"""Plots of docs/kernels.md: panels of grouped bars with their values, and curves with logarithmic axes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from nearpeak.render.picture.axis import Axis
from nearpeak.render.picture.scene import Circle, Line, Polygon, Scene, Shape, Text, text_width

WIDTH, LEFT, RIGHT, TOP = 872, 152, 16, 74
PANEL, GAP, LABELS = 84, 30, 15


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """How high it is, the number above it, and what is said where it is hovered over."""

    value: float
    text: str
    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BarGroup:
    """Bars by way, side by side."""

    label: str
    bars: Mapping[str, Bar]


@dataclass(frozen=True, slots=True, kw_only=True)
class BarPanel:
    """Groups with one axis."""

    name: str
    groups: Sequence[BarGroup]


@dataclass(frozen=True, slots=True, kw_only=True)
class BarAxis:
    """What is at the top of panels, and the values with a line, as texts."""

    highest: float
    lines: Mapping[float, str]


def bar_panels(title: str, described: str, ways: Mapping[str, str], axis: BarAxis, shown: Sequence[BarPanel]) -> Scene:
    """A picture of panels one below the other; ways have the numbers of their colors."""
    legend = _legend(ways)
    top = TOP + max(one.y for one in legend if isinstance(one, Text)) - 52
    height = int(top) + len(shown) * (PANEL + GAP) + 6
    shapes: list[Shape] = [Text(x=WIDTH / 2, y=26, text=title, size=15, anchor="middle", bold=True), *legend]
    for number, panel in enumerate(shown):
        shapes += _bar_panel(panel, axis, ways, top + number * (PANEL + GAP))
    return Scene(width=WIDTH, height=height, described=described, shapes=tuple(shapes))


def _legend(ways: Mapping[str, str]) -> list[Shape]:
    """Boxes with names, in as many lines as they need."""
    shapes: list[Shape] = []
    left, top = float(LEFT), 42.0
    for way, color in ways.items():
        wide = 40 + text_width(way, 12)
        if left > LEFT and left + wide > WIDTH:
            left, top = float(LEFT), top + 18
        shapes += [_box(left, top, 12.0, 12.0, color), Text(x=left + 18, y=top + 10, text=way)]
        left += wide
    return shapes


def _bar_panel(panel: BarPanel, axis: BarAxis, ways: Mapping[str, str], top: float) -> Iterator[Shape]:
    bottom, right = top + PANEL, WIDTH - RIGHT
    yield Text(x=LEFT - 42, y=top + PANEL / 2 + 4, text=panel.name, anchor="end", size=12, bold=True)
    for value, text in axis.lines.items():
        level = bottom - PANEL * value / axis.highest
        yield Line(points=((LEFT, level), (right, level)), stroke="faint")
        yield Text(x=LEFT - 6, y=level + 4, text=text, anchor="end", size=10, color="muted")
    room = (right - LEFT) / len(panel.groups)
    for number, group in enumerate(panel.groups):
        left = LEFT + number * room + 0.12 * room
        wide = 0.76 * room / len(ways)
        for place, (way, color) in enumerate(ways.items()):
            bar = group.bars.get(way)
            if bar is None:
                continue
            high = PANEL * min(bar.value, axis.highest) / axis.highest
            yield _box(left + place * wide + 1, bottom - high, wide - 2, high, color, bar.title)
            yield Text(
                x=left + (place + 0.5) * wide, y=bottom - high - 3, text=bar.text, size=9, anchor="middle", halo=True
            )
        yield Text(x=left + 0.38 * room, y=bottom + LABELS, text=group.label, size=10, anchor="middle", color="muted")
    yield Line(points=((LEFT, bottom), (right, bottom)), stroke="ink")


def _box(left: float, top: float, width: float, height: float, fill: str, title: str = "") -> Polygon:
    right, bottom = left + width, top + height
    return Polygon(points=((left, top), (right, top), (right, bottom), (left, bottom)), fill=fill, title=title)


CURVES_WIDTH, CURVES_LEFT, CURVES_RIGHT, CURVES_TOP, CURVES_PANEL, CURVES_GAP = 872, 72, 16, 80, 260, 64
Points = Mapping[float, float]


def curves(title: str, described: str, ways: Mapping[str, str], shown: Mapping[str, Mapping[str, Points]]) -> Scene:
    """Panels one below the other, by name; of each way the seconds by size. Ways have the numbers of their colors."""
    shapes: list[Shape] = [Text(x=CURVES_WIDTH / 2, y=26, text=title, size=15, anchor="middle", bold=True)]
    left = float(CURVES_LEFT)
    for way, color in ways.items():
        shapes.append(Circle(x=left + 6, y=48, radius=5, fill=color))
        shapes.append(Text(x=left + 18, y=52, text=way))
        left += 40 + text_width(way, 12)
    for number, (name, panel) in enumerate(shown.items()):
        shapes += _curves_panel(name, panel, ways, CURVES_TOP + number * (CURVES_PANEL + CURVES_GAP))
    height = CURVES_TOP + len(shown) * (CURVES_PANEL + CURVES_GAP)
    return Scene(width=CURVES_WIDTH, height=height, described=described, shapes=tuple(shapes))


def _curves_panel(name: str, panel: Mapping[str, Points], ways: Mapping[str, str], top: float) -> Iterator[Shape]:
    sizes = sorted({size for points in panel.values() for size in points})
    seconds = [one for points in panel.values() for one in points.values()]
    across = Axis.around(sizes, log=True, start=CURVES_LEFT, end=CURVES_WIDTH - CURVES_RIGHT, limits=None)
    down = Axis.around(seconds, log=True, start=top + CURVES_PANEL, end=top, limits=None)
    yield Text(x=CURVES_LEFT, y=top - 4, text=name, size=12, bold=True)
    for tick in down.ticks():
        level, _ = down.place(tick)
        yield Line(points=((CURVES_LEFT, level), (CURVES_WIDTH - CURVES_RIGHT, level)), stroke="faint")
        yield Text(x=CURVES_LEFT - 6, y=level + 4, text=_time(tick), anchor="end", size=10, color="muted")
    for size in sizes:
        place, _ = across.place(size)
        yield Text(x=place, y=top + CURVES_PANEL + 15, text=_tokens(size), anchor="middle", size=10, color="muted")
    for way, color in ways.items():
        points = panel.get(way, {})
        places = [(across.place(size)[0], down.place(points[size])[0]) for size in sorted(points)]
        if len(places) > 1:
            yield Line(points=tuple(places), stroke=color, width=2.0, title=way)
        yield from _dots(way, color, points, places)
    yield Line(
        points=((CURVES_LEFT, top + CURVES_PANEL), (CURVES_WIDTH - CURVES_RIGHT, top + CURVES_PANEL)), stroke="ink"
    )


def _dots(way: str, color: str, points: Points, places: Sequence[tuple[float, float]]) -> Iterator[Shape]:
    for size, (x, y) in zip(sorted(points), places, strict=True):
        title = f"{way}, {size:.0f} tokens: {points[size] * 1e3:.3f} ms"
        yield Circle(x=x, y=y, radius=3.5, fill=color, title=title)


def _time(seconds: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds * factor >= 0.9995:
            return f"{seconds * factor:g} {unit}"
    return f"{seconds * 1e6:g} us"


def _tokens(size: float) -> str:
    return f"{size / 1024:.0f}k" if size >= 1024 else f"{size:.0f}"
