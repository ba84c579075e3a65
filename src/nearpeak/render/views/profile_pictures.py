"""The waterfall and the roofline of a profile as pictures."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence

from nearpeak.errors import UsageError
from nearpeak.machines.machine import Machine
from nearpeak.profiles.finding import Finding
from nearpeak.profiles.grade import broken_reason
from nearpeak.profiles.profile import Profile
from nearpeak.profiles.waterfall import PART_MEANINGS, PartName
from nearpeak.render.html.markup import visible
from nearpeak.render.picture.axis import Axis, trim_zeros
from nearpeak.render.picture.roofline import Roof, WeightedOp, Wording, draw_roofline, merge_points
from nearpeak.render.picture.scene import Line, Polygon, Scene, Shape, Text, rectangle, truncate
from nearpeak.render.views.profile_roofs import RATE_TOLERANCE, profile_roofs
from nearpeak.render.views.verdict import sentences, verdict_sentence
from nearpeak.units import percent, seconds

WIDTH = 960
LEFT, RIGHT, TOP = 270, 40, 84
MARGIN = 28
ROW, BAR = 34, 22
LINE = 17
"""Pixels of a line of the text below the bars."""
CHARACTERS = 140
COLORS: Mapping[PartName, tuple[str, float]] = {
    "ideal": ("2", 1.0),
    "traffic": ("0", 0.55),
    "fusion": ("0", 1.0),
    "slow kernels": ("1", 1.0),
    "not modeled": ("5", 1.0),
    "communication": ("3", 1.0),
    "idle": ("4", 1.0),
}
"""With how much of it covers the page; the same as in the HTML report."""


def profile_waterfall(profile: Profile, findings: Sequence[Finding] = ()) -> Scene:
    """The picture, with the verdict's sentences below it. `findings` are those that they name."""
    verdict = sentences(profile, findings)
    verdict["Next"] = re.sub(r" below\.$", ".", verdict["Next"])  # the findings are not in the picture
    name = visible(profile.source.rpartition("/")[2], 60)
    bottom = TOP + ROW * (len(profile.waterfall.parts) + 1)
    axis = Axis(log=False, low=0.0, high=profile.wall_s or 1.0, start=LEFT, end=WIDTH - RIGHT)
    shapes: list[Shape] = [
        Text(x=MARGIN, y=32, text=f"Where a step of {name} goes", size=17, bold=True),
        Text(
            x=MARGIN,
            y=54,
            text=truncate(f"{visible(profile.device, 40)}: {verdict.pop('Verdict')}", 130),
            color="muted",
        ),
        *_grid(axis, bottom),
        *_rows(profile, axis),
    ]
    below = bottom + 48.0
    for label, sentence in verdict.items():
        for number, line in enumerate(textwrap.wrap(visible(sentence, 600), CHARACTERS)):
            if number == 0:
                shapes.append(Text(x=MARGIN, y=below, text=label, size=11.5, bold=True))
            shapes.append(Text(x=MARGIN + 42, y=below, text=line, size=11.5, color="muted"))
            below += LINE
    parts = ", ".join(f"{part.name} {seconds(part.seconds)}" for part in profile.waterfall.parts)
    described = f"Waterfall of a step of {name}: {parts}; wall {seconds(profile.wall_s)}."
    return Scene(width=WIDTH, height=round(below + 6), described=described, shapes=tuple(shapes))


def _grid(axis: Axis, bottom: float) -> Iterator[Shape]:
    for value in axis.ticks():
        pixel, _ = axis.place(value)
        yield Line(points=((pixel, TOP - 8), (pixel, bottom)), stroke="faint")
        yield Text(x=pixel, y=bottom + 18, text=trim_zeros(seconds(value)), anchor="middle", size=11.5, color="muted")


def _rows(profile: Profile, axis: Axis) -> Iterator[Shape]:
    reached, top = 0.0, float(TOP)
    broken = profile.waterfall.broken
    for part in profile.waterfall.parts:
        ended = reached + part.seconds
        begin, end = sorted((axis.place(reached)[0], axis.place(ended)[0]))
        share = percent(part.seconds / profile.wall_s if profile.wall_s else 0.0)
        yield from _label(top, part.name, part.seconds, share)
        if part in broken:
            text = f"below zero: {broken_reason(profile)}"
            yield Text(x=end + 8, y=top + 15, text=text, size=11.5, color="1", halo=True)
        elif end > begin:
            color, opacity = COLORS[part.name]
            width = max(end - begin, 1.0)  # what is more than nothing is seen
            title = f"{part.name}: {seconds(part.seconds)}, {share} ({PART_MEANINGS[part.name]})"
            yield _box(begin, top, width, color, opacity, title)
        pixel = axis.place(ended)[0]
        joint = top if part.seconds == 0.0 else top + BAR  # a part of nothing is only passed
        yield Line(points=((pixel, joint), (pixel, top + ROW)), stroke="muted", width=0.8)
        reached, top = ended, top + ROW
    yield from _label(top, "wall", profile.wall_s, percent(1.0), bold=True)
    yield _box(axis.start, top, axis.end - axis.start, "muted", 0.35, f"wall: {seconds(profile.wall_s)}")


def _label(top: float, name: str, time: float, share: str, *, bold: bool = False) -> Iterator[Shape]:
    y = top + 15
    yield Text(x=MARGIN, y=y, text=name, size=13, bold=bold)
    yield Text(x=LEFT - 76, y=y, text=seconds(time), size=13, anchor="end", bold=bold)
    yield Text(x=LEFT - 14, y=y, text=share, size=12, anchor="end", color="muted")


def _box(x: float, y: float, width: float, fill: str, opacity: float, title: str) -> Polygon:
    return Polygon(points=rectangle(x, y, width, BAR), fill=fill, opacity=opacity, title=title)


LEAST_SHARE = 1e-3
"""Of the kernel time. Ops that take less would stretch the axes, and their circles could not be seen."""


def profile_roofline(profile: Profile, machine: Machine | None) -> Scene:
    """Each point is at the FLOP/s that were measured; how far below the roof it is, is what it loses."""
    roofs = profile_roofs(profile, machine)
    levels = {roof.name: roof.value for roof in roofs.roofs if roof.kind in ("memory", "cache")}
    if "memory" not in levels:
        raise UsageError(
            f"There is no roofline for {visible(profile.machine, 60)}: its ceilings are not in the profile, not in "
            "the catalogue and not calibrated here."
        )
    counted = [
        WeightedOp(op=op, seconds=op.measured_s, bytes=op.bytes)
        for op in profile.ops
        if op.modeled and op.measured_s > 0
    ]
    engines = sorted(roof.value for roof in roofs.roofs if roof.kind in ("matrix", "vector"))
    rates = set()
    for op in profile.ops:
        if op.limiter == "compute" and op.bound_s:
            rate = op.flops / op.bound_s
            # A convolution counts in the direct form, and its bound is that of an algorithm that does far less.
            if op.family == "convolution":
                rate = max((value for value in engines if value <= rate * (1 + RATE_TOLERANCE)), default=rate)
            rates.add(rate)
    ceilings = [
        Roof(
            name=roof.name,
            rate=roof.value,
            used=any(abs(rate / roof.value - 1.0) < RATE_TOLERANCE / 2 for rate in rates),
        )
        for roof in roofs.roofs
        if roof.kind in ("matrix", "vector")
    ]
    points = [point for point in merge_points(counted, profile.kernel_s) if point.share >= LEAST_SHARE]
    name = visible(profile.source.rpartition("/")[2], 60)
    wording = Wording(
        title=f"Roofline of a step of {name}",
        subtitle=f"{visible(profile.device, 40)}: {verdict_sentence(profile)}",
        described=f"Roofline of a step of {name}: FLOP per byte against FLOP per second as measured.",
        rate="FLOP/s as measured",
        time="kernel time",
    )
    return draw_roofline(points, levels, ceilings, wording)
