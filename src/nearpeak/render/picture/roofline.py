"""The roofline as a picture: what the machine allows at each intensity, and where the ops lie.

Both axes are logarithmic. A slanted roof is a bandwidth, a flat one the rate of an engine for a dtype; roofs that no op
uses are muted. Each mark is at (FLOP per byte, FLOP/s), in a circle whose area is its share of the time. Ops without
FLOPs have no place on such axes and stand in a column of their own. Labels are placed so that none covers another label
or mark.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from nearpeak.bound.estimate import Estimate, EstimatedOp
from nearpeak.errors import UsageError
from nearpeak.machines.machine import Achievable, Machine, Theoretical
from nearpeak.ops.cost import Family
from nearpeak.profiles.profile import ProfiledOp
from nearpeak.render.picture.axis import Axis, trim_zeros
from nearpeak.render.picture.scene import Circle, Line, Point, Polygon, Scene, Shape, Text, marker, text_width, truncate
from nearpeak.render.text import packet_name, plain
from nearpeak.units import percent, quantity, seconds, significant

MOST_POINTS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class OpPoint:
    """Ops that are one point: the same operator at the same place with the same limiter, over all layers.

    Those that compute nothing are merged over all places.
    """

    name: str
    place: str
    """The module with "*" for the numbers of layers, or the line where there is no module."""
    phase: str
    family: str
    limiter: str
    count: int
    flops: float
    bytes: float
    seconds: float
    share: float
    """Of the as-written time."""

    @property
    def intensity(self) -> float | None:
        """FLOP per byte; None where nothing is computed, infinite where nothing moves."""
        if not self.flops:
            return None
        return self.flops / self.bytes if self.bytes else float("inf")

    @property
    def rate(self) -> float:
        """FLOP/s at the bound: what the machine allows for these ops."""
        return self.flops / self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Roof:
    """A rate of arithmetic that no op exceeds. `used` says whether an op runs on it."""

    name: str
    rate: float
    used: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedOp:
    """An op with the seconds and the bytes that count for its point."""

    op: EstimatedOp | ProfiledOp
    seconds: float
    bytes: float


def estimate_points(estimate: Estimate, most: int = MOST_POINTS) -> tuple[OpPoint, ...]:
    """The ops as points, largest share of the as-written time first; beyond `most`, those of a family are one."""
    ops = [
        WeightedOp(op=op, seconds=op.seconds, bytes=op.bytes_read + op.bytes_written)
        for op in estimate.ops
        if op.seconds > 0
    ]
    return merge_points(ops, estimate.as_written_s, most)


def merge_points(ops: Iterable[WeightedOp], total: float, most: int = MOST_POINTS) -> tuple[OpPoint, ...]:
    """Ops merged into points; shares are of `total` seconds. Beyond `most` points, those of a family are one."""
    merged: dict[tuple[str, ...], list[WeightedOp]] = {}
    for weighted in ops:
        op = weighted.op
        computes, where = ("computes", _module_or_line(op)) if op.flops else ("", "")
        merged.setdefault((op.name, where, op.phase, op.family, op.limiter, computes), []).append(weighted)
    ranked = sorted(merged.items(), key=lambda item: -sum(weighted.seconds for weighted in item[1]))
    rest: dict[tuple[str, ...], list[WeightedOp]] = {}
    for (_, _, _, family, limiter, computes), group in ranked[most:]:
        rest.setdefault((f"other {family}", "", "", family, limiter, computes), []).extend(group)
    points = [_merge_ops(key, group, total) for key, group in (*ranked[:most], *rest.items())]
    return tuple(sorted(points, key=lambda point: -point.seconds))


def _merge_ops(key: tuple[str, ...], ops: list[WeightedOp], total: float) -> OpPoint:
    name, place, phase, family, limiter, _ = key
    seconds = sum(weighted.seconds for weighted in ops)
    return OpPoint(
        name=packet_name(name),
        place=plain(place, 60),
        phase=plain(phase, 20),
        family=plain(family, 20),
        limiter=plain(limiter, 20),
        count=len(ops),
        flops=sum(weighted.op.flops for weighted in ops),
        bytes=sum(weighted.bytes for weighted in ops),
        seconds=seconds,
        share=seconds / total if total else 0.0,
    )


def is_above_bandwidth(point: OpPoint, bandwidth: float) -> bool:
    """Whether a point lies above the roof of a bandwidth: then a cache served a part of its bytes."""
    return point.intensity is not None and point.rate > 1.02 * point.intensity * bandwidth


def _module_or_line(op: EstimatedOp | ProfiledOp) -> str:
    if op.module:
        return re.sub(r"(?<![^.])\d+(?![^.])", "*", op.module)
    return op.source.rpartition("/")[2]


def ceilings_of(machine: Machine, estimate: Estimate) -> Achievable | Theoretical:
    """The ceilings that the estimate was computed with."""
    if machine.id != estimate.machine:
        raise UsageError(f"The estimate is for {estimate.machine}, and the machine that was given is {machine.id}.")
    limits = machine.achievable if estimate.ceilings == "achievable" else machine.theoretical
    if limits is None:
        raise UsageError(f"{machine.name} has no {estimate.ceilings} ceilings.")
    return limits


def engine_rate(limits: Achievable | Theoretical, engine: str, dtype: str) -> float | None:
    """FLOP/s of an engine; that of the other engine if it has no figure for the dtype."""
    rates = limits.matrix if _engine_of(limits, engine, dtype) == "matrix" else limits.vector
    return rates.get(dtype)


def _engine_of(limits: Achievable | Theoretical, engine: str, dtype: str) -> str:
    fallback, rates = ("vector", limits.matrix) if engine == "matrix" else ("matrix", limits.vector)
    return engine if dtype in rates else fallback


def estimate_roofs(estimate: Estimate, limits: Achievable | Theoretical) -> tuple[Roof, ...]:
    """The roofs of all dtypes, highest first; dtypes of one engine with the same rate share one."""
    used = {(_engine_of(limits, op.engine, op.dtype), op.dtype) for op in estimate.ops if op.flops}
    roofs = [*_engine_roofs("matrix", limits.matrix, used), *_engine_roofs("vector", limits.vector, used)]
    return tuple(sorted(roofs, key=lambda roof: -roof.rate))


def _engine_roofs(engine: str, rates: Mapping[str, float], used: Iterable[tuple[str, str]]) -> list[Roof]:
    by_rate: dict[float, list[str]] = {}
    for dtype, rate in rates.items():
        if rate > 0:
            by_rate.setdefault(rate, []).append(dtype)
    return [
        Roof(
            name=f"{', '.join(dtypes)} {engine}",
            rate=rate,
            used=any((engine, dtype) in used for dtype in dtypes),
        )
        for rate, dtypes in by_rate.items()
    ]


Box = tuple[float, float, float, float]
"""Left, top, right, bottom."""
MARK_RADIUS = 7.0
"""How far leaders stay from the middle of a disc, where its mark is."""
_DISTANCES = (5.0, 18.0, 34.0, 52.0, 74.0, 100.0, 130.0)
_ANGLES = (0, 25, -25, 50, -50, 90, -90, 130, -130, 155, -155, 180)
"""Degrees clockwise from the right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """The text beside a disc."""

    lines: tuple[str, ...]
    x: float
    y: float
    radius: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedLabel:
    """The position of a label; `leader` is the line to its disc, if the label is not beside it."""

    lines: tuple[tuple[float, float, str], ...]
    """Each line with its x, which `anchor` refers to, and the y of its baseline."""
    anchor: Literal["start", "end"]
    leader: tuple[Point, Point] | None


@dataclass(slots=True)
class Obstacles:
    """What labels avoid: `boxes` always, lines and `discs` if possible. Labels stay inside `frame`."""

    frame: Box
    boxes: list[Box] = field(default_factory=list)
    lines: list[tuple[Point, Point]] = field(default_factory=list)
    thin_lines: list[tuple[Point, Point]] = field(default_factory=list)
    discs: list[tuple[float, float, float]] = field(default_factory=list)


def place_labels(labels: Sequence[Label], obstacles: Obstacles, *, size: float) -> list[PlacedLabel]:
    """Each label at its cheapest free position; labels without a free position are left out."""
    occupied = list(obstacles.boxes)
    leaders: list[tuple[Point, Point]] = []
    placed = []
    for label in labels:
        best: tuple[float, PlacedLabel, Box] | None = None
        for candidate, box in _label_candidates(label, size):
            if any(_boxes_overlap(box, obstacle) for obstacle in occupied) or not _box_inside(box, obstacles.frame):
                continue
            leader = candidate.leader
            if any(_line_crosses_box(line, box) for line in leaders):
                continue
            if leader is not None and any(
                _line_crosses_box(leader, obstacle) for obstacle in occupied if not _box_contains(obstacle, label)
            ):
                continue
            cost = _label_cost(label, candidate, box, obstacles)
            if best is None or cost < best[0]:
                best = (cost, candidate, box)
        if best is None:
            continue
        _, chosen, box = best
        placed.append(chosen)
        occupied.append(box)
        if chosen.leader is not None:
            leaders.append(chosen.leader)
    return placed


def _label_candidates(label: Label, size: float) -> Iterator[tuple[PlacedLabel, Box]]:
    """Positions around the disc, the nearest first."""
    width, step = max(text_width(line, size) for line in label.lines), 1.25 * size
    height = step * len(label.lines)
    anchors: tuple[Literal["start", "end"], ...] = ("start", "end")
    for distance in _DISTANCES:
        for degrees in _ANGLES:
            right, down = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
            reach = label.radius + distance
            x, y = label.x + reach * right, label.y + reach * down
            top = y - height / 2 + down * (height - step) / 2  # a block above its disc ends there, one below begins
            for anchor in anchors:
                if (anchor == "start" and right < -0.1) or (anchor == "end" and right > 0.1):
                    continue
                left = x if anchor == "start" else x - width
                leader = None
                if distance > _DISTANCES[0]:
                    mark = (label.x + MARK_RADIUS * right, label.y + MARK_RADIUS * down)
                    leader = (mark, (x - 3 * right, y - 3 * down))
                lines = tuple((x, top + step * i + 0.86 * size, line) for i, line in enumerate(label.lines))
                box = (left - 2, top, left + width + 2, top + height)
                yield PlacedLabel(lines=lines, anchor=anchor, leader=leader), box


def _label_cost(label: Label, candidate: PlacedLabel, box: Box, obstacles: Obstacles) -> float:
    near = (min(max(label.x, box[0]), box[2]), min(max(label.y, box[1]), box[3]))
    cost = 0.04 * math.hypot(near[0] - label.x, near[1] - label.y)
    cost += 3.0 * sum(_line_crosses_box(line, box) for line in obstacles.lines)
    cost += 1.0 * sum(_line_crosses_box(line, box) for line in obstacles.thin_lines)
    for x, y, radius in obstacles.discs:
        near = (min(max(x, box[0]), box[2]), min(max(y, box[1]), box[3]))
        cost += 1.5 * (math.hypot(near[0] - x, near[1] - y) < radius)
    return cost + (0.5 if candidate.leader is not None else 0.0)


def _box_contains(box: Box, label: Label) -> bool:
    return box[0] <= label.x <= box[2] and box[1] <= label.y <= box[3]


def _box_inside(box: Box, frame: Box) -> bool:
    return box[0] >= frame[0] and box[1] >= frame[1] and box[2] <= frame[2] and box[3] <= frame[3]


def _boxes_overlap(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _line_crosses_box(line: tuple[Point, Point], box: Box) -> bool:
    """Whether a line segment intersects a box: clips it at the four edges."""
    (x0, y0), (x1, y1) = line
    low, high = 0.0, 1.0
    for start, step, least, most in ((x0, x1 - x0, box[0], box[2]), (y0, y1 - y0, box[1], box[3])):
        if step == 0:
            if not least <= start <= most:
                return False
            continue
        ends = sorted(((least - start) / step, (most - start) / step))
        low, high = max(low, ends[0]), min(high, ends[1])
    return low <= high


WIDTH = 960
LEFT, RIGHT, TOP, BOTTOM = 92, 186, 72, 560
COLUMN = 92
"""How wide the column of ops without FLOPs is."""
LARGEST = 36.0
"""Radius of the largest circle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """The axes, and the scale of the circles."""

    x: Axis
    y: Axis
    radius: float
    """Of a circle that stands for the whole time."""

    def spot(self, point: OpPoint) -> tuple[float, float]:
        return self.x.place(point.intensity or 0.0)[0], self.y.place(point.rate)[0]

    def size(self, point: OpPoint) -> float:
        return max(3.0, self.radius * math.sqrt(point.share))


def fit_frame(
    computing: Sequence[OpPoint], moving: Sequence[OpPoint], levels: Mapping[str, float], ceilings: Sequence[Roof]
) -> Frame:
    """Axes around all points and the roofs that they use, with room above for the circles at the highest.

    Roofs that no op uses are within the picture if they lie above the lowest point.
    """
    used = [roof.rate for roof in ceilings if roof.used] or [roof.rate for roof in ceilings[:1]] or [1e12]
    intensities = [point.intensity for point in computing if point.intensity and math.isfinite(point.intensity)]
    intensities += [rate / levels["memory"] for rate in used]
    rates = [*(point.rate for point in computing), *used]
    lowest, highest = min(rates) / 4, max([*rates, *(roof.rate for roof in ceilings)]) * 1.5
    largest = max((point.share for point in (*computing, *moving)), default=1.0)
    left = LEFT + (COLUMN if moving else 0)
    limits = (min(intensities) / 3, max(intensities) * 3)
    x = Axis.around([], log=True, start=left, end=WIDTH - RIGHT, limits=limits)
    while True:
        y = Axis.around([], log=True, start=BOTTOM, end=TOP, limits=(lowest, highest))
        frame = Frame(x=x, y=y, radius=min(64.0, LARGEST / math.sqrt(largest or 1.0)))
        if all(frame.spot(point)[1] - frame.size(point) > TOP + 4 for point in computing):
            return frame
        highest *= 1.25


def draw_grid(frame: Frame, *, has_column: bool, rate: str) -> Iterator[Shape]:
    left, right = frame.x.start, frame.x.end
    for value in _decades(frame.x):
        pixel, _ = frame.x.place(value)
        yield Line(points=((pixel, TOP), (pixel, BOTTOM)), stroke="faint")
        yield Text(x=pixel, y=BOTTOM + 18, text=trim_zeros(significant(value)), anchor="middle")
    for value in _decades(frame.y):
        pixel, _ = frame.y.place(value)
        yield Line(points=((left, pixel), (right, pixel)), stroke="faint")
        yield Text(x=LEFT - 8, y=pixel + 4, text=trim_zeros(quantity(value, "")), anchor="end")
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
    powers = [10.0**power for power in range(math.ceil(axis.low), math.floor(axis.high) + 1)]
    return powers if len(powers) >= 3 else axis.ticks()


@dataclass(slots=True)
class RoofShapes:
    """The roofs as shapes, and their parts that labels avoid."""

    shapes: list[Shape] = field(default_factory=list)
    lines: list[tuple[Point, Point]] = field(default_factory=list)
    thin_lines: list[tuple[Point, Point]] = field(default_factory=list)
    boxes: list[Box] = field(default_factory=list)


def draw_roofs(
    frame: Frame, levels: Mapping[str, float], ceilings: Sequence[Roof], computing: Sequence[OpPoint]
) -> RoofShapes:
    """Slanted roofs are labeled along the line, flat roofs at the right; unused roofs are muted."""
    roofing = RoofShapes()
    ceilings = [roof for roof in ceilings if roof.rate > 10.0**frame.y.low]
    highest = max((roof.rate for roof in ceilings), default=10.0**frame.y.high)
    spots = [(*frame.spot(point), frame.size(point)) for point in computing]
    high = [point.rate for point in computing if is_above_bandwidth(point, max(levels.values()))]
    for name, bandwidth in levels.items():
        low = max(10.0**frame.x.low, 10.0**frame.y.low / bandwidth)
        top = min(10.0**frame.x.high, highest / bandwidth)
        if low < top:
            start, end = (
                (frame.x.place(intensity)[0], frame.y.place(intensity * bandwidth)[0]) for intensity in (low, top)
            )
            described = f"{name}: {quantity(bandwidth, 'B/s')}"
            roofing.shapes.append(Line(points=(start, end), stroke="ink", width=1.6, title=described))
            roofing.lines.append((start, end))
            _label_slope(roofing, described, start, end, spots)
    heights = _spread_apart([frame.y.place(roof.rate)[0] for roof in ceilings], 14.0)
    for roof, height in sorted(zip(ceilings, heights, strict=True), key=lambda item: item[0].used):
        beyond = any(0.98 * roof.rate < rate < 1.02 * roof.rate for rate in high)
        _draw_flat_roof(roofing, frame, roof, height, levels, beyond=beyond)
    return roofing


def _label_slope(
    roofing: RoofShapes, text: str, start: Point, end: Point, spots: Sequence[tuple[float, float, float]]
) -> None:
    """Writes a name along a line, where the line is farthest from all points."""
    (x0, y0), (x1, y1) = start, end
    angle = math.atan2(y0 - y1, x1 - x0)
    half = text_width(text, 12) / 2

    def free(share: float) -> float:
        x, y = x0 + share * (x1 - x0), y0 + share * (y1 - y0)
        return min((math.hypot(a - x, b - y) - radius for a, b, radius in spots), default=0.0)

    share = max(
        (step / 20 for step in range(4, 16)), key=lambda position: (round(min(free(position), half + 10)), -position)
    )
    x, y = x0 + share * (x1 - x0) - 6 * math.sin(angle), y0 + share * (y1 - y0) - 6 * math.cos(angle)
    roofing.shapes.append(Text(x=x, y=y, text=text, angle=math.degrees(angle), halo=True, anchor="middle"))
    for step in range(-3, 4):
        along = half * step / 3
        roofing.boxes.append(box_around(x + along * math.cos(angle), y - 4 - along * math.sin(angle), 9.0))


def _draw_flat_roof(
    roofing: RoofShapes, frame: Frame, roof: Roof, height: float, levels: Mapping[str, float], *, beyond: bool
) -> None:
    """Draws a flat roof; with `beyond`, its continuation above the roof of the memory."""
    level, end = frame.y.place(roof.rate)[0], frame.x.end
    start = frame.x.place(max(roof.rate / max(levels.values()), 10.0**frame.x.low))[0]
    color, width = ("ink", 1.6) if roof.used else ("muted", 0.8)
    described = f"{roof.name}: {quantity(roof.rate, 'FLOP/s')}"
    roofing.shapes += [
        Line(points=((start, level), (end, level)), stroke=color, width=width, dashed=not roof.used, title=described),
        Line(points=((end, level), (end + 8, height)), stroke=color, width=0.8),
        Text(
            x=end + 12,
            y=height + 4,
            text=f"{_short_dtypes(roof.name)} {quantity(roof.rate, '')}",
            color=color,
            size=11,
            bold=roof.used,
        ),
    ]
    if not roof.used:
        roofing.thin_lines.append(((start, level), (end, level)))
        return
    roofing.lines.append(((start, level), (end, level)))
    if beyond:
        roofing.shapes.append(
            Line(points=((frame.x.start, level), (start, level)), stroke="muted", width=0.8, dashed=True)
        )
        roofing.thin_lines.append(((frame.x.start, level), (start, level)))
    ridge = roof.rate / levels["memory"]
    foot, shown = frame.x.place(ridge)
    if shown:
        text = f"ridge {significant(ridge)}"
        roofing.shapes.append(Line(points=((foot, level), (foot, BOTTOM)), stroke="muted", width=0.8, dashed=True))
        roofing.thin_lines.append(((foot, level), (foot, BOTTOM)))
        roofing.shapes.append(Text(x=foot + 5, y=BOTTOM - 7, text=text, size=11, color="muted", halo=True))
        roofing.boxes.append((foot, BOTTOM - 20, foot + 6 + text_width(text, 11), BOTTOM - 3))


def _short_dtypes(name: str) -> str:
    for long, short in (("bfloat", "bf"), ("tfloat", "tf"), ("float", "fp")):
        name = name.replace(long, short)
    return name


def _spread_apart(heights: Sequence[float], least: float) -> list[float]:
    """Rising heights, at least `least` apart: each is moved down if it is too near to the one before."""
    moved: list[float] = []
    for height in heights:
        moved.append(max(height, moved[-1] + least) if moved else height)
    return moved


def box_around(x: float, y: float, reach: float) -> Box:
    return x - reach, y - reach, x + reach, y + reach


MOST_LABELS = 14
LEAST_LABELED = 0.01
"""Points with a smaller share of the time have their name in the hover text alone."""
MOST_IN_COLUMN = 6
LABEL_SIZE = 11.5
"""Height of the names of points."""
_FIRST = ("matrix", "attention", "pointwise", "normalization", "optimizer", "movement", "convolution", "random")
FAMILIES = (*_FIRST, *(family for family in get_args(Family) if family not in (*_FIRST, "view")))
"""In the order of their colors and marks, so that a family looks the same in every picture."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wording:
    """The texts of a roofline."""

    title: str
    subtitle: str
    described: str
    rate: str = "FLOP/s that the machine allows"
    """The label of the vertical axis."""
    time: str = "as-written time"
    """The time that circles are shares of."""


def draw_roofline(
    points: Sequence[OpPoint], levels: Mapping[str, float], ceilings: Sequence[Roof], wording: Wording
) -> Scene:
    """Draws points under roofs; `levels` are the bandwidths of the memory and its caches."""
    computing, moving = [point for point in points if point.flops], [point for point in points if not point.flops]
    frame = fit_frame(computing, moving, levels, ceilings)
    column, in_column = _draw_column(moving, frame)
    roofing = draw_roofs(frame, levels, ceilings, computing)
    shapes: list[Shape] = [
        Text(x=LEFT, y=28, text=truncate(wording.title, 90), size=17, bold=True),
        Text(x=LEFT, y=50, text=truncate(wording.subtitle, 130), size=12, color="muted"),
        *draw_grid(frame, has_column=bool(moving), rate=wording.rate),
        *roofing.shapes,
        *_draw_points(computing, frame),
        *_draw_labels(computing, frame, roofing),
        *column,
    ]
    if not points:
        shapes.append(Text(x=(LEFT + WIDTH - RIGHT) / 2, y=TOP + 80, text="nothing to show", anchor="middle"))
    legend, bottom = _legend(points, frame, BOTTOM + 70, wording.time)
    shapes += legend
    for line in _caption(computing, moving, in_column, levels):
        shapes.append(Text(x=LEFT, y=bottom, text=line, size=11.5, color="muted"))
        bottom += 17
    return Scene(width=WIDTH, height=round(bottom), described=wording.described, shapes=tuple(shapes))


def _draw_points(computing: Sequence[OpPoint], frame: Frame) -> Iterator[Shape]:
    """Circles first, the largest at the bottom, then all marks: no mark is hidden."""
    for point in computing:
        x, y = frame.spot(point)
        yield _circle(point, x, y, frame)
    for point in computing:
        x, y = frame.spot(point)
        yield marker(x, y, _family_index(point.family), title=_point_facts(point))


def _circle(point: OpPoint, x: float, y: float, frame: Frame) -> Circle:
    color = str(_family_index(point.family) % 6)
    return Circle(
        x=x,
        y=y,
        radius=frame.size(point),
        fill=color,
        opacity=0.2,
        stroke=color,
        width=1.2,
        title=_point_facts(point),
    )


def _family_index(family: str) -> int:
    """Of its color and mark; a family that this version does not know looks like the last."""
    return FAMILIES.index(family) if family in FAMILIES else len(FAMILIES) - 1


def _point_facts(point: OpPoint) -> str:
    where = f" in {point.place}" if point.place else ""
    intensity = point.intensity
    computed = (
        f"{quantity(point.flops, 'FLOP')}, {significant(intensity)} FLOP per byte, {quantity(point.rate, 'FLOP/s')}; "
        if intensity is not None and math.isfinite(intensity)
        else ""
    )
    return (
        f"{point.name}{where}{f', {point.phase}' if point.phase else ''}, {point.count} times: {computed}"
        f"{quantity(point.bytes, 'B')}; {seconds(point.seconds)}, {percent(point.share)} of the time; "
        f"limit: {point.limiter}"
    )


def _draw_labels(computing: Sequence[OpPoint], frame: Frame, roofing: RoofShapes) -> Iterator[Shape]:
    spots = [(*frame.spot(point), frame.size(point)) for point in computing]
    obstacles = Obstacles(
        frame=(frame.x.start + 2, TOP + 2, frame.x.end - 2, BOTTOM - 4),
        boxes=[*(box_around(x, y, 7.0) for x, y, _ in spots), *roofing.boxes],
        lines=roofing.lines,
        thin_lines=roofing.thin_lines,
        discs=spots,
    )
    labels = [
        Label(lines=tuple(_point_name(point) for point in together), x=x, y=y, radius=max(radius, 6.0))
        for together, (x, y, radius) in _group_labels(computing, spots)
    ]
    for placed in place_labels(labels, obstacles, size=LABEL_SIZE):
        if placed.leader is not None:
            yield Line(points=placed.leader, stroke="muted", width=0.8)
        for x, y, text in placed.lines:
            yield Text(x=x, y=y, text=text, size=LABEL_SIZE, anchor=placed.anchor, halo=True)


def _group_labels(
    computing: Sequence[OpPoint], spots: Sequence[tuple[float, float, float]]
) -> list[tuple[list[OpPoint], tuple[float, float, float]]]:
    """Points with labels; points at nearly the same position share one."""
    groups: list[tuple[list[OpPoint], tuple[float, float, float]]] = []
    for point, spot in zip(computing[:MOST_LABELS], spots, strict=False):
        if point.share < LEAST_LABELED:
            continue
        near = [group for group, (x, y, _) in groups if math.hypot(x - spot[0], y - spot[1]) < 7 and len(group) < 4]
        if near:
            near[0].append(point)
        else:
            groups.append(([point], spot))
    return groups


def _point_name(point: OpPoint) -> str:
    name = point.name.removeprefix("_scaled_dot_product_").removeprefix("native_").replace("_for_cpu", "")
    place = ".".join(point.place.split(".")[-2:])
    where = f" {truncate(place, 22)}" if place and place != name else ""
    backward = " (bwd)" if point.phase == "backward" else ""
    return f"{truncate(name, 26)}{where}{backward} {percent(point.share, 0)}"


def _draw_column(moving: Sequence[OpPoint], frame: Frame) -> tuple[list[Shape], int]:
    """Ops without FLOPs below each other, the largest at the top, as many as fit; and their number."""
    shapes: list[Shape] = []
    x, y = LEFT + (COLUMN - 8) / 2, TOP + 10.0
    shown = 0
    for point in moving[:MOST_IN_COLUMN]:
        radius = max(frame.size(point), 6.0)
        if y + 2 * radius + 34 > BOTTOM:
            break
        shapes += [
            _circle(point, x, y + radius, frame),
            marker(x, y + radius, _family_index(point.family), title=_point_facts(point)),
        ]
        y += 2 * radius + 13
        shapes.append(Text(x=x, y=y, text=truncate(point.name, 14), size=10.5, anchor="middle"))
        shapes.append(Text(x=x, y=y + 12, text=percent(point.share), size=10.5, anchor="middle", color="muted"))
        y += 24
        shown += 1
    return shapes, shown


def _legend(points: Sequence[OpPoint], frame: Frame, top: float, time: str) -> tuple[list[Shape], float]:
    """Families with their shares, in rows, and circles that show the scale; and the y where the legend ends."""
    shares: dict[str, float] = {}
    for point in points:
        shares[point.family] = shares.get(point.family, 0.0) + point.share
    shapes: list[Shape] = []
    x = float(LEFT)
    for family, share in sorted(shares.items(), key=lambda item: -item[1]):
        text = f"{family} {percent(share)}"
        wide = 18 + text_width(text, 12) + 22
        if x + wide > WIDTH - 20:
            x, top = float(LEFT), top + 22
        shapes += [marker(x + 6, top - 4, _family_index(family)), Text(x=x + 18, y=top, text=text)]
        x += wide
    if points:
        top += 16 + frame.radius * math.sqrt(0.1)
        x = float(LEFT)
        for share in (0.1, 0.01):
            radius = frame.radius * math.sqrt(share)
            shapes.append(Circle(x=x + radius, y=top - 4, radius=radius, fill="muted", opacity=0.15, stroke="muted"))
            text = f"{percent(share, 0)} of the {time}"
            shapes.append(Text(x=x + 2 * radius + 6, y=top, text=text, size=11.5))
            x += 2 * radius + 6 + text_width(text, 11.5) + 24
    return shapes, top + 14 + frame.radius * math.sqrt(0.1)


def _caption(
    computing: Sequence[OpPoint], moving: Sequence[OpPoint], in_column: int, levels: Mapping[str, float]
) -> list[str]:
    text = "A mark is an operator at one place in the code, over all layers; its circle is its share of the time."
    if moving:
        share = sum(point.share for point in moving)
        left = len(moving) - in_column
        text += f" {percent(share)} of the time goes to ops that compute nothing; they are in the column at the left"
        text += f", but for {left} small ones." if left else "."
    if any(is_above_bandwidth(point, levels["memory"]) for point in computing):
        text += " What lies above the memory's roof is served by the last-level cache"
        text += "." if len(levels) > 1 else ", whose speed is not known for this machine."
    return textwrap.wrap(text, 140)
