"""The roofline of an estimate as a picture: what the machine allows at each intensity, and where the ops lie.

Both axes are logarithmic. A slanted roof is a bandwidth, a flat one the rate of an engine for a dtype; those that no op
uses are muted. Each mark is at (FLOP per byte, FLOP/s at its bound), in a circle whose area is its share of the
as-written time. Ops that compute nothing have no place on such axes and stand in a column of their own.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from nearpeak.bound.estimate import Estimate
from nearpeak.machines.model import Achievable, Machine
from nearpeak.render.estimate import CEILINGS
from nearpeak.render.labels import Label, Obstacles, place
from nearpeak.render.roofline_frame import (
    BOTTOM,
    COLUMN,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Frame,
    Roofing,
    around,
    draw_roofs,
    frame_around,
    grid,
)
from nearpeak.render.roofline_points import OpPoint, Roof, above, limits_of, points, roofs
from nearpeak.render.scene import Circle, Line, Scene, Shape, Text, marker, text_width
from nearpeak.render.theme import cut
from nearpeak.units import percent, quantity, seconds, significant
from nearpeak.work.cost import Family

MOST_LABELS = 14
LEAST_LABELLED = 0.01
"""Points with a smaller share of the time have their name in the hover text alone."""
MOST_IN_COLUMN = 6
LABEL = 11.5
"""Height of the names of points."""
_FIRST = ("matrix", "attention", "pointwise", "normalisation", "optimizer", "movement", "convolution", "random")
FAMILIES = (*_FIRST, *(family for family in get_args(Family) if family not in (*_FIRST, "view")))
"""In the order of their colours and marks, so that a family looks the same in every picture."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wording:
    """What the words of a roofline are about."""

    title: str
    subtitle: str
    described: str
    rate: str = "FLOP/s that the machine allows"
    """What is upwards."""
    time: str = "as-written time"
    """What circles are shares of."""


def roofline(estimate: Estimate, machine: Machine, *, title: str = "") -> Scene:
    """The picture of an estimate on the machine that it was made for."""
    limits = limits_of(machine, estimate)
    levels = {"memory": limits.bandwidth}
    if isinstance(limits, Achievable) and limits.cache_bandwidth and limits.cache_bandwidth > limits.bandwidth:
        levels["last-level cache"] = limits.cache_bandwidth
    wording = Wording(
        title=title or f"Roofline on {machine.name}",
        subtitle=_subtitle(estimate, machine),
        described=f"{title or 'Roofline'} on {machine.name}: FLOP per byte against FLOP per second.",
    )
    return drawn(points(estimate), levels, roofs(estimate, limits), wording)


def drawn(found: Sequence[OpPoint], levels: Mapping[str, float], ceilings: Sequence[Roof], wording: Wording) -> Scene:
    """Points under roofs: `levels` are the bandwidths of the memory and its caches."""
    computing, moving = [one for one in found if one.flops], [one for one in found if not one.flops]
    frame = frame_around(computing, moving, levels, ceilings)
    column, in_column = _column(moving, frame)
    roofing = draw_roofs(frame, levels, ceilings, computing)
    shapes: list[Shape] = [
        Text(x=LEFT, y=28, text=cut(wording.title, 90), size=17, bold=True),
        Text(x=LEFT, y=50, text=cut(wording.subtitle, 130), size=12, colour="muted"),
        *grid(frame, has_column=bool(moving), rate=wording.rate),
        *roofing.shapes,
        *_circles(computing, frame),
        *_names(computing, frame, roofing),
        *column,
    ]
    if not found:
        shapes.append(Text(x=(LEFT + WIDTH - RIGHT) / 2, y=TOP + 80, text="nothing to show", anchor="middle"))
    legend, bottom = _legend(found, frame, BOTTOM + 70, wording.time)
    shapes += legend
    for line in _caption(computing, moving, in_column, levels):
        shapes.append(Text(x=LEFT, y=bottom, text=line, size=11.5, colour="muted"))
        bottom += 17
    return Scene(width=WIDTH, height=round(bottom), described=wording.described, shapes=tuple(shapes))


def _subtitle(estimate: Estimate, machine: Machine) -> str:
    return (
        f"{machine.name}, {CEILINGS.get(estimate.how, estimate.how)}: as written {seconds(estimate.as_written_s)}, "
        f"fused {seconds(estimate.fused_s)}, ideal {seconds(estimate.ideal_s)}"
    )


def _circles(computing: Sequence[OpPoint], frame: Frame) -> Iterator[Shape]:
    """Circles first, the largest at the bottom, then all marks, so that none is hidden."""
    for point in computing:
        x, y = frame.spot(point)
        yield _circle(point, x, y, frame)
    for point in computing:
        x, y = frame.spot(point)
        yield marker(x, y, _number(point.family), title=_facts(point))


def _circle(point: OpPoint, x: float, y: float, frame: Frame) -> Circle:
    colour = str(_number(point.family) % 6)
    return Circle(
        x=x, y=y, radius=frame.size(point), fill=colour, opacity=0.2, stroke=colour, width=1.2, title=_facts(point)
    )


def _number(family: str) -> int:
    """Of its colour and mark; a family from an estimate of another version looks like the last."""
    return FAMILIES.index(family) if family in FAMILIES else len(FAMILIES) - 1


def _facts(point: OpPoint) -> str:
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


def _names(computing: Sequence[OpPoint], frame: Frame, roofing: Roofing) -> Iterator[Shape]:
    spots = [(*frame.spot(point), frame.size(point)) for point in computing]
    obstacles = Obstacles(
        frame=(frame.x.start + 2, TOP + 2, frame.x.end - 2, BOTTOM - 4),
        boxes=[*(around(x, y, 7.0) for x, y, _ in spots), *roofing.boxes],
        lines=roofing.lines,
        thin_lines=roofing.thin_lines,
        discs=spots,
    )
    labels = [
        Label(lines=tuple(_name(point) for point in together), x=x, y=y, radius=max(radius, 6.0))
        for together, (x, y, radius) in _together(computing, spots)
    ]
    for placed in place(labels, obstacles, size=LABEL):
        if placed.leader is not None:
            yield Line(points=placed.leader, stroke="muted", width=0.8)
        for x, y, text in placed.lines:
            yield Text(x=x, y=y, text=text, size=LABEL, anchor=placed.anchor, halo=True)


def _together(
    computing: Sequence[OpPoint], spots: Sequence[tuple[float, float, float]]
) -> list[tuple[list[OpPoint], tuple[float, float, float]]]:
    """Points to be named, those at nearly the same spot together."""
    found: list[tuple[list[OpPoint], tuple[float, float, float]]] = []
    for point, spot in zip(computing[:MOST_LABELS], spots, strict=False):
        if point.share < LEAST_LABELLED:
            continue
        near = [one for one, (x, y, _) in found if math.hypot(x - spot[0], y - spot[1]) < 7 and len(one) < 4]
        if near:
            near[0].append(point)
        else:
            found.append(([point], spot))
    return found


def _name(point: OpPoint) -> str:
    name = point.name.removeprefix("_scaled_dot_product_").removeprefix("native_").replace("_for_cpu", "")
    place = ".".join(point.place.split(".")[-2:])
    where = f" {cut(place, 22)}" if place and place != name else ""
    backward = " (bwd)" if point.phase == "backward" else ""
    return f"{cut(name, 26)}{where}{backward} {percent(point.share, 0)}"


def _column(moving: Sequence[OpPoint], frame: Frame) -> tuple[list[Shape], int]:
    """Ops without FLOPs below each other, the largest at the top, as many as there is room for; and how many."""
    shapes: list[Shape] = []
    x, y = LEFT + (COLUMN - 8) / 2, TOP + 10.0
    shown = 0
    for point in moving[:MOST_IN_COLUMN]:
        radius = max(frame.size(point), 6.0)
        if y + 2 * radius + 34 > BOTTOM:
            break
        shapes += [
            _circle(point, x, y + radius, frame),
            marker(x, y + radius, _number(point.family), title=_facts(point)),
        ]
        y += 2 * radius + 13
        shapes.append(Text(x=x, y=y, text=cut(point.name, 14), size=10.5, anchor="middle"))
        shapes.append(Text(x=x, y=y + 12, text=percent(point.share), size=10.5, anchor="middle", colour="muted"))
        y += 24
        shown += 1
    return shapes, shown


def _legend(found: Sequence[OpPoint], frame: Frame, top: float, time: str) -> tuple[list[Shape], float]:
    """Families with their shares, in rows; then what an area means. And where it ends."""
    shares: dict[str, float] = {}
    for point in found:
        shares[point.family] = shares.get(point.family, 0.0) + point.share
    shapes: list[Shape] = []
    x = float(LEFT)
    for family, share in sorted(shares.items(), key=lambda item: -item[1]):
        text = f"{family} {percent(share)}"
        wide = 18 + text_width(text, 12) + 22
        if x + wide > WIDTH - 20:
            x, top = float(LEFT), top + 22
        shapes += [marker(x + 6, top - 4, _number(family)), Text(x=x + 18, y=top, text=text)]
        x += wide
    if found:
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
    if any(above(point, levels["memory"]) for point in computing):
        text += " What lies above the memory's roof is served by the last-level cache"
        text += "." if len(levels) > 1 else ", whose speed is not known for this machine."
    return textwrap.wrap(text, 140)
