"""The frame of a roofline: its axes, its grid, and the ceilings of the machine as roofs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from nearpeak.render.axis import Axis, trimmed
from nearpeak.render.labels import Box
from nearpeak.render.roofline_points import OpPoint, Roof, above
from nearpeak.render.scene import Line, Point, Polygon, Shape, Text, text_width
from nearpeak.units import quantity, significant

WIDTH = 960
LEFT, RIGHT, TOP, BOTTOM = 92, 186, 72, 560
COLUMN = 92
"""How wide the column of ops without FLOPs is."""
LARGEST = 36.0
"""Radius of the largest circle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """The axes, and how large a share is drawn."""

    x: Axis
    y: Axis
    radius: float
    """Of a circle for all of the time."""

    def spot(self, point: OpPoint) -> tuple[float, float]:
        return self.x.place(point.intensity or 0.0)[0], self.y.place(point.rate)[0]

    def size(self, point: OpPoint) -> float:
        return max(3.0, self.radius * math.sqrt(point.share))


def frame_around(
    computing: Sequence[OpPoint], moving: Sequence[OpPoint], levels: Mapping[str, float], ceilings: Sequence[Roof]
) -> Frame:
    """Axes around all points and the roofs that they use, with room above for the circles at the highest.

    Roofs that no op uses are within the picture if they lie above the lowest point.
    """
    used = [roof.rate for roof in ceilings if roof.used] or [roof.rate for roof in ceilings[:1]] or [1e12]
    intensities = [one.intensity for one in computing if one.intensity and math.isfinite(one.intensity)]
    intensities += [rate / levels["memory"] for rate in used]
    rates = [*(one.rate for one in computing), *used]
    lowest, highest = min(rates) / 4, max([*rates, *(roof.rate for roof in ceilings)]) * 1.5
    largest = max((one.share for one in (*computing, *moving)), default=1.0)
    left = LEFT + (COLUMN if moving else 0)
    limits = (min(intensities) / 3, max(intensities) * 3)
    x = Axis.around([], log=True, start=left, end=WIDTH - RIGHT, limits=limits)
    while True:
        y = Axis.around([], log=True, start=BOTTOM, end=TOP, limits=(lowest, highest))
        frame = Frame(x=x, y=y, radius=min(64.0, LARGEST / math.sqrt(largest or 1.0)))
        if all(frame.spot(point)[1] - frame.size(point) > TOP + 4 for point in computing):
            return frame
        highest *= 1.25


def grid(frame: Frame, *, has_column: bool, rate: str) -> Iterator[Shape]:
    left, right = frame.x.start, frame.x.end
    for value in _decades(frame.x):
        at, _ = frame.x.place(value)
        yield Line(points=((at, TOP), (at, BOTTOM)), stroke="faint")
        yield Text(x=at, y=BOTTOM + 18, text=trimmed(significant(value)), anchor="middle")
    for value in _decades(frame.y):
        at, _ = frame.y.place(value)
        yield Line(points=((left, at), (right, at)), stroke="faint")
        yield Text(x=LEFT - 8, y=at + 4, text=trimmed(quantity(value, "")), anchor="end")
    yield Line(points=((left, TOP), (left, BOTTOM), (right, BOTTOM)), stroke="ink")
    if has_column:
        corners = ((LEFT, TOP), (left - 8, TOP), (left - 8, BOTTOM), (LEFT, BOTTOM))
        yield Polygon(points=corners, fill="faint", opacity=0.5)
        yield Text(x=LEFT + (COLUMN - 8) / 2, y=BOTTOM + 18, text="no FLOP", anchor="middle")
    yield Text(x=(left + right) / 2, y=BOTTOM + 40, text="FLOP per byte", anchor="middle", size=13)
    middle = (TOP + BOTTOM) / 2
    yield Text(x=24, y=middle, text=rate, anchor="middle", angle=90, size=13)


def _decades(axis: Axis) -> list[float]:
    """The powers of ten on an axis, or its round values where there are fewer than three."""
    found = [10.0**power for power in range(math.ceil(axis.low), math.floor(axis.high) + 1)]
    return found if len(found) >= 3 else axis.ticks()


@dataclass(slots=True)
class Roofing:
    """The roofs as shapes, and what of them labels keep away from."""

    shapes: list[Shape] = field(default_factory=list)
    lines: list[tuple[Point, Point]] = field(default_factory=list)
    thin_lines: list[tuple[Point, Point]] = field(default_factory=list)
    boxes: list[Box] = field(default_factory=list)


def draw_roofs(
    frame: Frame, levels: Mapping[str, float], ceilings: Sequence[Roof], computing: Sequence[OpPoint]
) -> Roofing:
    """Slanted ones with their names along them, flat ones with their names at the right, unused ones muted."""
    roofing = Roofing()
    ceilings = [roof for roof in ceilings if roof.rate > 10.0**frame.y.low]
    highest = max((roof.rate for roof in ceilings), default=10.0**frame.y.high)
    spots = [(*frame.spot(point), frame.size(point)) for point in computing]
    high = [point.rate for point in computing if above(point, max(levels.values()))]
    for name, bandwidth in levels.items():
        low = max(10.0**frame.x.low, 10.0**frame.y.low / bandwidth)
        top = min(10.0**frame.x.high, highest / bandwidth)
        if low < top:
            start, end = ((frame.x.place(at)[0], frame.y.place(at * bandwidth)[0]) for at in (low, top))
            described = f"{name}: {quantity(bandwidth, 'B/s')}"
            roofing.shapes.append(Line(points=(start, end), stroke="ink", width=1.6, title=described))
            roofing.lines.append((start, end))
            _name_slope(roofing, described, start, end, spots)
    heights = _apart([frame.y.place(roof.rate)[0] for roof in ceilings], 14.0)
    for roof, height in sorted(zip(ceilings, heights, strict=True), key=lambda item: item[0].used):
        beyond = any(0.98 * roof.rate < rate < 1.02 * roof.rate for rate in high)
        _flat(roofing, frame, roof, height, levels, beyond=beyond)
    return roofing


def _name_slope(
    roofing: Roofing, text: str, start: Point, end: Point, spots: Sequence[tuple[float, float, float]]
) -> None:
    """Writes along a line, where it is farthest from all points."""
    (x0, y0), (x1, y1) = start, end
    angle = math.atan2(y0 - y1, x1 - x0)
    half = text_width(text, 12) / 2

    def free(share: float) -> float:
        x, y = x0 + share * (x1 - x0), y0 + share * (y1 - y0)
        return min((math.hypot(a - x, b - y) - radius for a, b, radius in spots), default=0.0)

    share = max((step / 20 for step in range(4, 16)), key=lambda at: (round(min(free(at), half + 10)), -at))
    x, y = x0 + share * (x1 - x0) - 6 * math.sin(angle), y0 + share * (y1 - y0) - 6 * math.cos(angle)
    roofing.shapes.append(Text(x=x, y=y, text=text, angle=math.degrees(angle), halo=True, anchor="middle"))
    for step in range(-3, 4):
        along = half * step / 3
        roofing.boxes.append(around(x + along * math.cos(angle), y - 4 - along * math.sin(angle), 9.0))


def _flat(
    roofing: Roofing, frame: Frame, roof: Roof, height: float, levels: Mapping[str, float], *, beyond: bool
) -> None:
    """One flat roof; `beyond` shows how it goes on above the memory's."""
    at, end = frame.y.place(roof.rate)[0], frame.x.end
    start = frame.x.place(max(roof.rate / max(levels.values()), 10.0**frame.x.low))[0]
    colour, width = ("ink", 1.6) if roof.used else ("muted", 0.8)
    described = f"{roof.name}: {quantity(roof.rate, 'FLOP/s')}"
    roofing.shapes += [
        Line(points=((start, at), (end, at)), stroke=colour, width=width, dashed=not roof.used, title=described),
        Line(points=((end, at), (end + 8, height)), stroke=colour, width=0.8),
        Text(
            x=end + 12,
            y=height + 4,
            text=f"{_dtypes(roof.name)} {quantity(roof.rate, '')}",
            colour=colour,
            size=11,
            bold=roof.used,
        ),
    ]
    if not roof.used:
        roofing.thin_lines.append(((start, at), (end, at)))
        return
    roofing.lines.append(((start, at), (end, at)))
    if beyond:
        roofing.shapes.append(Line(points=((frame.x.start, at), (start, at)), stroke="muted", width=0.8, dashed=True))
        roofing.thin_lines.append(((frame.x.start, at), (start, at)))
    ridge = roof.rate / levels["memory"]
    foot, shown = frame.x.place(ridge)
    if shown:
        text = f"ridge {significant(ridge)}"
        roofing.shapes.append(Line(points=((foot, at), (foot, BOTTOM)), stroke="muted", width=0.8, dashed=True))
        roofing.thin_lines.append(((foot, at), (foot, BOTTOM)))
        roofing.shapes.append(Text(x=foot + 5, y=BOTTOM - 7, text=text, size=11, colour="muted", halo=True))
        roofing.boxes.append((foot, BOTTOM - 20, foot + 6 + text_width(text, 11), BOTTOM - 3))


def _dtypes(name: str) -> str:
    for long, short in (("bfloat", "bf"), ("tfloat", "tf"), ("float", "fp")):
        name = name.replace(long, short)
    return name


def _apart(heights: Sequence[float], least: float) -> list[float]:
    """Heights in rising order moved down where they are too near to the one before."""
    moved: list[float] = []
    for height in heights:
        moved.append(max(height, moved[-1] + least) if moved else height)
    return moved


def around(x: float, y: float, reach: float) -> Box:
    return x - reach, y - reach, x + reach, y + reach
