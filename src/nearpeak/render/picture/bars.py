"""Stacked bars against a limit, as a picture."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from nearpeak.render.html.markup import visible
from nearpeak.render.picture.axis import Axis, trim_zeros
from nearpeak.render.picture.scene import Line, Polygon, Scene, Shape, Text, rectangle, text_width, truncate

WIDTH = 960
LEFT, RIGHT, TOP = 130, 40, 100
MARGIN = 28
ROW, HEIGHT = 34, 22
MOST_BARS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A bar of pieces one after the other, each with its name and size."""

    name: str
    pieces: tuple[tuple[str, float], ...]

    @property
    def total(self) -> float:
        """All pieces together."""
        return sum(value for _, value in self.pieces)


def stacked_bars(
    bars: Sequence[Bar],
    *,
    title: str,
    subtitle: str,
    shown: Callable[[float], str],
    limit: float | None = None,
    limit_name: str = "",
    totals: bool = False,
) -> Scene:
    """Bars from left to right, a legend above, and a line at the limit; pieces keep the order of the first bar.

    With `totals`, the sum of its pieces stands beside each bar.
    """
    if len(bars) > MOST_BARS:
        half = MOST_BARS // 2
        bars = [*bars[:half], *bars[-half:]]
    names = [name for name, _ in bars[0].pieces if any(dict(bar.pieces).get(name) for bar in bars)]
    longest = max([bar.total for bar in bars] + ([limit] if limit else [])) or 1.0
    left = max([LEFT, *(MARGIN + text_width(_label(bar), 12) + 10 for bar in bars)])
    right = float(RIGHT)
    if totals:
        right = max(RIGHT, *(text_width(shown(bar.total), 12) + 12 for bar in bars))
    axis = Axis(log=False, low=0.0, high=1.04 * longest, start=left, end=WIDTH - right)
    bottom = TOP + ROW * len(bars)
    shapes: list[Shape] = [
        Text(x=MARGIN, y=32, text=visible(title, 90), size=17, bold=True),
        Text(x=MARGIN, y=54, text=truncate(visible(subtitle, 200), 135), color="muted"),
        *_legend(names if len(names) > 1 else ()),
    ]
    for value in axis.ticks():
        place, _ = axis.place(value)
        shapes.append(Line(points=((place, TOP - 6), (place, bottom)), stroke="faint"))
        shapes.append(Text(x=place, y=bottom + 18, text=trim_zeros(shown(value)), anchor="middle", color="muted"))
    for number, bar in enumerate(bars):
        shapes += _bar(bar, TOP + ROW * number + (ROW - HEIGHT) / 2, axis, names, shown)
        if totals:
            place, _ = axis.place(bar.total)
            middle = TOP + ROW * number + ROW / 2
            shapes.append(Text(x=place + 6, y=middle + 4, text=shown(bar.total), bold=True, halo=True))
    if limit is not None:
        place, _ = axis.place(limit)
        shapes.append(Line(points=((place, TOP - 10), (place, bottom + 2)), stroke="ink", width=2, dashed=True))
        inside = place + text_width(limit_name, 12) / 2 < WIDTH - MARGIN
        anchored = Text(
            x=place, y=bottom + 38, text=limit_name, anchor="middle" if inside else "end", bold=True, halo=True
        )
        shapes.append(anchored)
    described = f"{title}. " + " ".join(f"{bar.name}: {shown(bar.total)}." for bar in bars)
    return Scene(width=WIDTH, height=bottom + 56, described=described, shapes=tuple(shapes))


def _legend(names: Sequence[str]) -> Iterator[Shape]:
    left = float(MARGIN)
    for number, name in enumerate(names):
        yield Polygon(points=rectangle(left, 70, 12, 12), fill=str(number % 6), opacity=_opacity(number))
        yield Text(x=left + 17, y=80, text=name, color="muted")
        left += 34 + text_width(name, 12)


def _bar(bar: Bar, top: float, axis: Axis, names: Sequence[str], shown: Callable[[float], str]) -> Iterator[Shape]:
    yield Text(x=axis.start - 10, y=top + 15, text=_label(bar), anchor="end")
    begun = 0.0
    pieces = dict(bar.pieces)
    for number, name in enumerate(names):
        value = pieces.get(name, 0.0)
        (start, _), (end, _) = axis.place(begun), axis.place(begun + value)
        begun += value
        if end - start < 0.2:
            continue
        yield Polygon(
            points=rectangle(start, top, end - start, HEIGHT),
            fill=str(number % 6),
            opacity=_opacity(number),
            title=f"{name}: {shown(value)}",
        )
        if text_width(shown(value), 11) + 8 < end - start:
            yield Text(x=(start + end) / 2, y=top + 15, text=shown(value), size=11, anchor="middle", halo=True)


def _label(bar: Bar) -> str:
    return truncate(visible(bar.name, 60), 18)


def _opacity(number: int) -> float:
    return 0.8 if number < 6 else 0.45
