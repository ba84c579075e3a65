"""Lines and points on two axes, as one SVG (`line_plot`) and as text (`text_plot`).

The SVG is light and dark, readable in print, escaped, and has no script. Series differ by color and by marker, so that
a plot reads without color. A value that an axis cannot show (zero on a logarithmic one, or outside the limits) is drawn
hollow at the edge, never dropped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nearpeak.render.picture.axis import Axis, trim_zeros
from nearpeak.render.picture.scene import COLORS, FAINT, INK, PAGE, escape_xml, truncate
from nearpeak.units import significant

WIDTH, HEIGHT = 860, 480
LEFT, RIGHT, TOP, BOTTOM = 84, 24, 48, 62
LEGEND_ROW = 20
CHARACTER = 7.0
"""About how wide a character of the legend is, in pixels."""

_MARKERS = ("circle", "square", "triangle", "diamond", "plus", "cross")


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Points with a name. `bars` are (low, high) around each y. `color` picks a color and marker by number."""

    name: str
    points: tuple[tuple[float, float], ...]
    bars: tuple[tuple[float, float], ...] = ()
    labels: tuple[str, ...] = ()
    """What a point is, shown when it is hovered over."""
    texts: tuple[str, ...] = ()
    """Written beside the points, where there is room."""
    line: bool = True
    markers: bool = True
    dashed: bool = False
    color: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """A shaded range of y, such as a tolerance."""

    name: str
    low: float
    high: float


def line_plot(
    series: Sequence[Series],
    *,
    title: str,
    x_label: str,
    y_label: str,
    log_x: bool = False,
    log_y: bool = False,
    x_ticks: Sequence[tuple[float, str]] = (),
    y_limits: tuple[float, float] | None = None,
    x_format: Callable[[float], str] = significant,
    y_format: Callable[[float], str] = significant,
    bands: Sequence[Band] = (),
) -> str:
    """The plot as a complete SVG file. `x_ticks` are (value, text) in place of round numbers."""
    _check(series)
    finite = [(x, y) for each in series for x, y in each.points if math.isfinite(x) and math.isfinite(y)]
    ends = [end for each in series for bar in each.bars for end in bar if math.isfinite(end)]
    edges = [edge for band in bands for edge in (band.low, band.high) if math.isfinite(edge)]
    legend = _legend_rows([*(band.name for band in bands), *(each.name for each in series)])
    height = HEIGHT + LEGEND_ROW * len(legend)
    x = Axis.around([x for x, _ in finite], log=log_x, start=LEFT, end=WIDTH - RIGHT, limits=None)
    y = Axis.around(
        [*(y for _, y in finite), *ends, *edges], log=log_y, start=HEIGHT - BOTTOM, end=TOP, limits=y_limits
    )
    counts = all(float(value).is_integer() for value, _ in finite)
    described = f"{title}. {x_label} against {y_label}."
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img" aria-label="{escape_xml(described)}" font-family="system-ui, sans-serif" font-size="12">',
        _style(),
        f'<rect class="np-page" width="{WIDTH}" height="{height}"/>',
        _label(WIDTH / 2, 26, title, size=15, shorten=100),
        *(_band(band, y) for band in bands),
        *_grid_x(x, x_ticks or [(value, trim_zeros(x_format(value))) for value in x.ticks(whole=counts)]),
        *_grid_y(y, y_format),
        f'<path class="np-frame" d="M{LEFT} {TOP}V{HEIGHT - BOTTOM}H{WIDTH - RIGHT}"/>',
        _label((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 18, x_label, shorten=100),
        _label(18, (TOP + HEIGHT - BOTTOM) / 2, y_label, turned=True, shorten=60),
    ]
    if not finite:
        parts.append(_label((LEFT + WIDTH - RIGHT) / 2, (TOP + HEIGHT - BOTTOM) / 2, "nothing to show"))
    styles = [each.color if each.color is not None else i for i, each in enumerate(series)]
    parts += [_series(each, style, x, y) for each, style in zip(series, styles, strict=True)]
    parts += _texts(series, x, y)
    parts += _legend(legend, bands, series, styles)
    return "\n".join(part for part in [*parts, "</svg>"] if part) + "\n"


def _check(series: Sequence[Series]) -> None:
    for each in series:
        for what, extra in (("bars", each.bars), ("labels", each.labels), ("texts", each.texts)):
            if extra and len(extra) != len(each.points):
                raise ValueError(f"{each.name}: {len(extra)} {what} for {len(each.points)} points")


def _style() -> str:
    def rules(page: str, ink: str, faint: str, dark: int) -> str:
        colors = "".join(
            f".np-s{i}{{stroke:{pair[dark]}}}.np-f{i}{{fill:{pair[dark]}}}" for i, pair in enumerate(COLORS)
        )
        return (
            f".np-page{{fill:{page}}}.np-hollow{{fill:{page}}}text{{fill:{ink}}}.np-frame{{stroke:{ink}}}"
            f".np-grid{{stroke:{faint}}}.np-band{{fill:{ink}}}{colors}"
        )

    shape = (
        ".np-frame,.np-grid,.np-line,.np-bar{fill:none}.np-line{stroke-width:2}.np-bar{stroke-width:1.3}"
        ".np-dashed{stroke-dasharray:7 5;stroke-width:1.5}.np-mark{stroke-width:1.5}.np-band{fill-opacity:.07}"
    )
    light, dark = (rules(PAGE[i], INK[i], FAINT[i], i) for i in (0, 1))
    return f"<style>{shape}{light}@media(prefers-color-scheme:dark){{{dark}}}</style>"


def _grid_x(axis: Axis, ticks: Sequence[tuple[float, str]]) -> list[str]:
    parts, last = [], -math.inf
    for value, text in ticks:
        place, shown = axis.place(value)
        if not shown:
            continue
        parts.append(f'<path class="np-grid" d="M{place:.1f} {TOP}V{HEIGHT - BOTTOM}"/>')
        width = CHARACTER * len(truncate(text, 20))
        if place - width / 2 > last + 6:  # a text that would run into the one before is left out
            parts.append(_label(place, HEIGHT - BOTTOM + 18, text, shorten=20))
            last = place + width / 2
    return parts


def _grid_y(axis: Axis, format_value: Callable[[float], str]) -> list[str]:
    parts = []
    for value in axis.ticks():
        place, _ = axis.place(value)
        parts.append(f'<path class="np-grid" d="M{LEFT} {place:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(_label(LEFT - 8, place + 4, trim_zeros(format_value(value)), anchor="end", shorten=10))
    return parts


def _band(band: Band, axis: Axis) -> str:
    (bottom, _), (top, _) = axis.place(band.low), axis.place(band.high)
    return (
        f'<rect class="np-band" x="{LEFT}" y="{top:.1f}" width="{WIDTH - RIGHT - LEFT}" '
        f'height="{max(0.0, bottom - top):.1f}"><title>{escape_xml(band.name)}</title></rect>'
    )


def _series(series: Series, style: int, x: Axis, y: Axis) -> str:
    parts, path = [], []
    color = style % len(COLORS)
    for i, (x_value, y_value) in enumerate(series.points):
        if not (math.isfinite(x_value) and math.isfinite(y_value)):
            continue
        (column, x_shown), (row, y_shown) = x.place(x_value), y.place(y_value)
        path.append(f"{column:.1f} {row:.1f}")
        if series.bars:
            (low, _), (high, _) = (y.place(end) for end in series.bars[i])
            bar = f"M{column - 4:.1f} {low:.1f}h8m-4 0V{high:.1f}m-4 0h8"
            parts.append(f'<path class="np-bar np-s{color}" d="{bar}"/>')
        if series.markers:
            name = series.labels[i] if series.labels else f"{series.name}: {significant(y_value)}"
            parts.append(_mark(column, row, style, solid=x_shown and y_shown, name=name))
    if series.line and len(path) > 1:
        dashed = " np-dashed" if series.dashed else ""
        parts.insert(0, f'<path class="np-line np-s{color}{dashed}" d="M{"L".join(path)}"/>')
    return "\n".join(parts)


def _texts(series: Sequence[Series], x: Axis, y: Axis) -> list[str]:
    """The texts of points, each at the first place beside its point where nothing else is: no text and no marker."""
    places = [[(x.place(a)[0], y.place(b)[0]) for a, b in each.points] for each in series]
    taken = [(column - 5, row - 5, column + 5, row + 5) for points in places for column, row in points]
    parts = []
    for each, points in zip(series, places, strict=True):
        for text, (column, row) in zip(each.texts, points, strict=False):
            width = 6.2 * len(text)
            boxes = {
                (side, down): (left, row + down - 6, left + width, row + down + 6)
                for down in (0, -13, 13, 26, -26)
                for side, left in (("start", column + 8), ("end", column - 8 - width))
                if left > LEFT and left + width < WIDTH
            }
            free = (place for place, box in boxes.items() if not any(_overlap(box, other) for other in taken))
            place = next(free, None)
            if text and place is not None:
                taken.append(boxes[place])
                start = column + 8 if place[0] == "start" else column - 8
                parts.append(_label(start, row + place[1] + 4, text, anchor=place[0], size=11))
    return parts


def _overlap(one: tuple[float, float, float, float], other: tuple[float, float, float, float]) -> bool:
    """Whether two boxes of (left, top, right, bottom) have a point in common."""
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _mark(column: float, row: float, style: int, *, solid: bool, name: str = "") -> str:
    color = style % len(COLORS)
    shape = _MARKERS[(style + style // len(COLORS)) % len(_MARKERS)]
    fill = f"np-f{color}" if solid else "np-hollow"
    start = f"M{column:.1f} {row:.1f}"
    paths = {
        "circle": f"{start}m-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0z",
        "square": f"{start}m-3.6 -3.6h7.2v7.2h-7.2z",
        "triangle": f"{start}m0 -4.8l4.6 8h-9.2z",
        "diamond": f"{start}m0 -5l5 5l-5 5l-5 -5z",
        "plus": f"{start}m-5 0h10m-5 -5v10",
        "cross": f"{start}m-4 -4l8 8m-8 0l8 -8",
    }
    described = f"<title>{escape_xml(name)}</title>" if name else ""
    return f'<path class="np-mark np-s{color} {fill}" d="{paths[shape]}">{described}</path>'


def _legend_rows(names: Sequence[str]) -> list[list[int]]:
    """Numbers of the entries, in rows that fit the width."""
    rows: list[list[int]] = []
    used = math.inf
    for i, name in enumerate(names):
        width = _entry_width(name)
        if used + width > WIDTH - LEFT - RIGHT:
            rows.append([])
            used = 0.0
        rows[-1].append(i)
        used += width
    return rows


def _entry_width(name: str) -> float:
    return 46 + CHARACTER * len(truncate(name, 60))


def _legend(rows: list[list[int]], bands: Sequence[Band], series: Sequence[Series], styles: Sequence[int]) -> list[str]:
    parts = []
    for number, row in enumerate(rows):
        left, level = float(LEFT), HEIGHT + LEGEND_ROW * number + 4
        for entry in row:
            if entry < len(bands):
                name = bands[entry].name
                parts.append(f'<rect class="np-band" x="{left:.1f}" y="{level - 6}" width="24" height="12"/>')
            else:
                entry_series, style = series[entry - len(bands)], styles[entry - len(bands)]
                name = entry_series.name
                if entry_series.line:
                    dashed = " np-dashed" if entry_series.dashed else ""
                    color = style % len(COLORS)
                    parts.append(f'<path class="np-line np-s{color}{dashed}" d="M{left:.1f} {level}h24"/>')
                if entry_series.markers:
                    parts.append(_mark(left + 12, level, style, solid=True))
            parts.append(_label(left + 30, level + 4, name, anchor="start", shorten=60))
            left += _entry_width(name)
    return parts


def _label(
    column: float,
    row: float,
    text: str,
    *,
    anchor: str = "middle",
    size: int = 12,
    turned: bool = False,
    shorten: int = 200,
) -> str:
    turn = f' transform="rotate(-90 {column:.1f} {row:.1f})"' if turned else ""
    weight = ' font-weight="600"' if size > 12 else ""
    shown = escape_xml(truncate(text, shorten))
    return (
        f'<text x="{column:.1f}" y="{row:.1f}" text-anchor="{anchor}" font-size="{size}"{weight}{turn}>{shown}</text>'
    )


TEXT_COLUMNS, TEXT_ROWS = 78, 16
TEXT_MARKS = "ox+*#@%&"
"""One for each series; where two meet, the later one shows."""


def text_plot(
    series: Sequence[Series],
    *,
    log_x: bool = False,
    log_y: bool = False,
    x_format: Callable[[float], str] = significant,
    y_format: Callable[[float], str] = significant,
    columns: int = TEXT_COLUMNS,
    rows: int = TEXT_ROWS,
) -> str:
    """The plot in so many columns, with the marks and names of series below it.

    >>> print(text_plot([Series(name="time", points=((1, 1), (2, 4)))], columns=30, rows=4))
        4 |                    o
        3 |
      1.5 |
        1 | o
          +-----------------------
            1  1.2 1.4    1.8  2
         o time
    """
    finite = [(x, y) for each in series for x, y in each.points if math.isfinite(x) and math.isfinite(y)]
    if not finite:
        return "nothing to show"
    up = Axis.around([y for _, y in finite], log=log_y, start=rows - 1, end=0, limits=None)
    labels: dict[int, str] = {}
    for value in up.ticks():
        labels.setdefault(round(up.place(value)[0]), trim_zeros(y_format(value)))
    left = max(map(len, labels.values()), default=0) + 2
    right = Axis.around([x for x, _ in finite], log=log_x, start=0, end=columns - left - 4, limits=None)
    field = [[" "] * (columns - left - 3) for _ in range(rows)]
    for number, each in enumerate(series):
        for x, y in each.points:
            if math.isfinite(x) and math.isfinite(y):
                field[round(up.place(y)[0])][round(right.place(x)[0])] = TEXT_MARKS[number % len(TEXT_MARKS)]
    lines = [f"{labels.get(row, ''):>{left}} |{''.join(cells).rstrip()}" for row, cells in enumerate(field)]
    below = [" "] * (columns - left - 2)
    end = -2
    for value in right.ticks():
        name = trim_zeros(x_format(value))
        column = round(right.place(value)[0]) - len(name) // 2 + 1
        if column > end + 1 and column >= 0 and column + len(name) <= len(below):
            below[column : column + len(name)] = name
            end = column + len(name) - 1
    space = " " * left
    legend = [f"{space[:-1]} {TEXT_MARKS[number % len(TEXT_MARKS)]} {each.name}" for number, each in enumerate(series)]
    frame = f"{space} +{'-' * (columns - left - 2)}"
    return "\n".join(line.rstrip() for line in [*lines, frame, f"{space} {''.join(below)}", *legend])
