"""`place`: where labels of points go so that none covers another label or a mark."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from nearpeak.render.scene import Point, text_width

Box = tuple[float, float, float, float]
"""Left, top, right, bottom."""
MARK = 7.0
"""How far leaders stay from the middle of a disc, where its mark is."""
_DISTANCES = (5.0, 18.0, 34.0, 52.0, 74.0, 100.0, 130.0)
_ANGLES = (0, 25, -25, 50, -50, 90, -90, 130, -130, 155, -155, 180)
"""Degrees clockwise from the right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """What to write beside a disc, the most important first."""

    lines: tuple[str, ...]
    x: float
    y: float
    radius: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """Where a label goes; `leader` is the line to its disc where it is not beside it."""

    lines: tuple[tuple[float, float, str], ...]
    """Each with its place: x where `anchor` says, y of the baseline."""
    anchor: Literal["start", "end"]
    leader: tuple[Point, Point] | None


@dataclass(slots=True)
class Obstacles:
    """What labels keep away from: `boxes` always, lines and `discs` where they can. They stay inside `frame`."""

    frame: Box
    boxes: list[Box] = field(default_factory=list)
    lines: list[tuple[Point, Point]] = field(default_factory=list)
    thin_lines: list[tuple[Point, Point]] = field(default_factory=list)
    discs: list[tuple[float, float, float]] = field(default_factory=list)


def place(labels: Sequence[Label], obstacles: Obstacles, *, size: float) -> list[Placed]:
    """The labels that have a place, each at its best one; the others are left out."""
    taken = list(obstacles.boxes)
    leaders: list[tuple[Point, Point]] = []
    found = []
    for label in labels:
        best: tuple[float, Placed, Box] | None = None
        for candidate, box in _candidates(label, size):
            if any(_overlap(box, other) for other in taken) or not _inside(box, obstacles.frame):
                continue
            leader = candidate.leader
            if any(_crosses(line, box) for line in leaders):
                continue
            if leader is not None and any(_crosses(leader, other) for other in taken if not _holds(other, label)):
                continue
            cost = _cost(label, candidate, box, obstacles)
            if best is None or cost < best[0]:
                best = (cost, candidate, box)
        if best is None:
            continue
        _, chosen, box = best
        found.append(chosen)
        taken.append(box)
        if chosen.leader is not None:
            leaders.append(chosen.leader)
    return found


def _candidates(label: Label, size: float) -> Iterator[tuple[Placed, Box]]:
    """Places around the disc, nearest first."""
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
                    mark = (label.x + MARK * right, label.y + MARK * down)
                    leader = (mark, (x - 3 * right, y - 3 * down))
                lines = tuple((x, top + step * i + 0.86 * size, line) for i, line in enumerate(label.lines))
                box = (left - 2, top, left + width + 2, top + height)
                yield Placed(lines=lines, anchor=anchor, leader=leader), box


def _cost(label: Label, candidate: Placed, box: Box, obstacles: Obstacles) -> float:
    near = (min(max(label.x, box[0]), box[2]), min(max(label.y, box[1]), box[3]))
    cost = 0.04 * math.hypot(near[0] - label.x, near[1] - label.y)
    cost += 3.0 * sum(_crosses(line, box) for line in obstacles.lines)
    cost += 1.0 * sum(_crosses(line, box) for line in obstacles.thin_lines)
    for x, y, radius in obstacles.discs:
        near = (min(max(x, box[0]), box[2]), min(max(y, box[1]), box[3]))
        cost += 1.5 * (math.hypot(near[0] - x, near[1] - y) < radius)
    return cost + (0.5 if candidate.leader is not None else 0.0)


def _holds(box: Box, label: Label) -> bool:
    return box[0] <= label.x <= box[2] and box[1] <= label.y <= box[3]


def _inside(box: Box, frame: Box) -> bool:
    return box[0] >= frame[0] and box[1] >= frame[1] and box[2] <= frame[2] and box[3] <= frame[3]


def _overlap(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _crosses(line: tuple[Point, Point], box: Box) -> bool:
    """Whether a straight line has a point in a box: what is left of it after cutting at the four edges."""
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
