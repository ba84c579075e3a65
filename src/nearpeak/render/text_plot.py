"""Lines and points on two axes as text, for a terminal."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from nearpeak.render.axis import Axis, trimmed
from nearpeak.render.plot import Series
from nearpeak.units import significant

COLUMNS, ROWS = 78, 16
MARKS = "ox+*#@%&"
"""One for each series; where two meet, the later one shows."""


def text_plot(
    series: Sequence[Series],
    *,
    log_x: bool = False,
    log_y: bool = False,
    x_format: Callable[[float], str] = significant,
    y_format: Callable[[float], str] = significant,
    columns: int = COLUMNS,
    rows: int = ROWS,
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
    finite = [(x, y) for one in series for x, y in one.points if math.isfinite(x) and math.isfinite(y)]
    if not finite:
        return "nothing to show"
    up = Axis.around([y for _, y in finite], log=log_y, start=rows - 1, end=0, limits=None)
    labels: dict[int, str] = {}
    for value in up.ticks():
        labels.setdefault(round(up.place(value)[0]), trimmed(y_format(value)))
    left = max(map(len, labels.values()), default=0) + 2
    right = Axis.around([x for x, _ in finite], log=log_x, start=0, end=columns - left - 4, limits=None)
    field = [[" "] * (columns - left - 3) for _ in range(rows)]
    for number, one in enumerate(series):
        for x, y in one.points:
            if math.isfinite(x) and math.isfinite(y):
                field[round(up.place(y)[0])][round(right.place(x)[0])] = MARKS[number % len(MARKS)]
    lines = [f"{labels.get(row, ''):>{left}} |{''.join(cells).rstrip()}" for row, cells in enumerate(field)]
    below = [" "] * (columns - left - 2)
    end = -2
    for value in right.ticks():
        name = trimmed(x_format(value))
        at = round(right.place(value)[0]) - len(name) // 2 + 1
        if at > end + 1 and at >= 0 and at + len(name) <= len(below):
            below[at : at + len(name)] = name
            end = at + len(name) - 1
    space = " " * left
    legend = [f"{space[:-1]} {MARKS[number % len(MARKS)]} {one.name}" for number, one in enumerate(series)]
    frame = f"{space} +{'-' * (columns - left - 2)}"
    return "\n".join(line.rstrip() for line in [*lines, frame, f"{space} {''.join(below)}", *legend])
