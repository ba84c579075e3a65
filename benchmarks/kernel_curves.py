"""Curves of seconds by size, both axes with logarithms: one for each way to do the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from nearpeak.render.axis import Axis
from nearpeak.render.scene import Circle, Line, Scene, Shape, Text, text_width

WIDTH, LEFT, RIGHT, TOP, PANEL, GAP = 872, 72, 16, 80, 260, 64
Points = Mapping[float, float]


def curves(title: str, described: str, ways: Mapping[str, str], shown: Mapping[str, Mapping[str, Points]]) -> Scene:
    """Panels one below the other, by name; of each way the seconds by size. Ways have the numbers of their colours."""
    shapes: list[Shape] = [Text(x=WIDTH / 2, y=26, text=title, size=15, anchor="middle", bold=True)]
    left = float(LEFT)
    for way, colour in ways.items():
        shapes.append(Circle(x=left + 6, y=48, radius=5, fill=colour))
        shapes.append(Text(x=left + 18, y=52, text=way))
        left += 40 + text_width(way, 12)
    for number, (name, panel) in enumerate(shown.items()):
        shapes += _panel(name, panel, ways, TOP + number * (PANEL + GAP))
    height = TOP + len(shown) * (PANEL + GAP)
    return Scene(width=WIDTH, height=height, described=described, shapes=tuple(shapes))


def _panel(name: str, panel: Mapping[str, Points], ways: Mapping[str, str], top: float) -> Iterator[Shape]:
    sizes = sorted({size for points in panel.values() for size in points})
    seconds = [one for points in panel.values() for one in points.values()]
    across = Axis.around(sizes, log=True, start=LEFT, end=WIDTH - RIGHT, limits=None)
    down = Axis.around(seconds, log=True, start=top + PANEL, end=top, limits=None)
    yield Text(x=LEFT, y=top - 4, text=name, size=12, bold=True)
    for tick in down.ticks():
        level, _ = down.place(tick)
        yield Line(points=((LEFT, level), (WIDTH - RIGHT, level)), stroke="faint")
        yield Text(x=LEFT - 6, y=level + 4, text=_time(tick), anchor="end", size=10, colour="muted")
    for size in sizes:
        place, _ = across.place(size)
        yield Text(x=place, y=top + PANEL + 15, text=_tokens(size), anchor="middle", size=10, colour="muted")
    for way, colour in ways.items():
        points = panel.get(way, {})
        places = [(across.place(size)[0], down.place(points[size])[0]) for size in sorted(points)]
        if len(places) > 1:
            yield Line(points=tuple(places), stroke=colour, width=2.0, title=way)
        yield from _dots(way, colour, points, places)
    yield Line(points=((LEFT, top + PANEL), (WIDTH - RIGHT, top + PANEL)), stroke="ink")


def _dots(way: str, colour: str, points: Points, places: Sequence[tuple[float, float]]) -> Iterator[Shape]:
    for size, (x, y) in zip(sorted(points), places, strict=True):
        title = f"{way}, {size:.0f} tokens: {points[size] * 1e3:.3f} ms"
        yield Circle(x=x, y=y, radius=3.5, fill=colour, title=title)


def _time(seconds: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds * factor >= 0.9995:
            return f"{seconds * factor:g} {unit}"
    return f"{seconds * 1e6:g} us"


def _tokens(size: float) -> str:
    return f"{size / 1024:.0f}k" if size >= 1024 else f"{size:.0f}"
