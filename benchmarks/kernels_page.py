"""The results of `benchmarks/kernels.py` in docs/kernels.md, and their plots.

    python benchmarks/kernels_page.py benchmarks/results/kernels_h200.json

writes docs/images/kernels_forward.svg and kernels_backward.svg, and replaces what stands between the marks of the page.
A test holds the page to the data.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kernel_tables import copies_table, head_line, launches_table, losses_table, rows_table

from nearpeak.render.scene import Line, Polygon, Scene, Shape, Text, text_width
from nearpeak.render.svg import svg

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "kernels.md"
RESULT = ROOT / "benchmarks" / "results" / "kernels_h200.json"
IMAGES = ROOT / "docs" / "images"
BEGIN, END = "<!-- results -->", "<!-- /results -->"
NOT_YET = "Not on this page yet: results will be here, each with the command that gave it."
PASSES = ("forward", "backward")
WAYS = {"nearpeak": "0", "eager": "5", "compile": "1", "liger": "2"}
"""The ways of the plot, with the numbers of their colours."""

WIDTH, LEFT, RIGHT, TOP = 872, 152, 16, 74
PANEL, GAP, LABELS = 84, 30, 15
HIGHEST = 1.1
"""Share of a copy at the top of a panel: a cache gives a little more than a copy."""

Row = Mapping[str, Any]


def plot(content: Row, name: str) -> str:
    """The plot of one pass, as an SVG file."""
    return svg(scene(content, name))


def scene(content: Row, name: str) -> Scene:
    """Shares of a copy, one panel for each operation, a group of bars for each size, a bar for each way."""
    rows = [row for row in content["rows"] if row["pass"] == name]
    operations = list(dict.fromkeys(row["operation"] for row in rows))
    height = TOP + len(operations) * (PANEL + GAP) + 6
    title = f"{name.capitalize()} pass: bytes that must move, by time, as a share of a copy"
    shapes: list[Shape] = [Text(x=WIDTH / 2, y=26, text=title, size=15, anchor="middle", bold=True)]
    shapes += _legend()
    for number, operation in enumerate(operations):
        group = [row for row in rows if row["operation"] == operation]
        shapes += _panel(operation, group, content["copy_bytes_per_second"], TOP + number * (PANEL + GAP))
    described = f"{title}, of {len(operations)} operations on an {content['machine']}: {', '.join(operations)}."
    return Scene(width=WIDTH, height=height, described=described, shapes=tuple(shapes))


def _legend() -> Iterator[Shape]:
    left = float(LEFT)
    for way, colour in WAYS.items():
        yield _box(left, 42.0, 12.0, 12.0, colour)
        yield Text(x=left + 18, y=52, text=way)
        left += 40 + text_width(way, 12)


def _panel(operation: str, rows: Sequence[Row], copy_rate: float, top: float) -> Iterator[Shape]:
    bottom, right = top + PANEL, WIDTH - RIGHT
    yield Text(x=LEFT - 42, y=top + PANEL / 2 + 4, text=operation, anchor="end", size=12, bold=True)
    for share in (0.5, 1.0):
        level = bottom - PANEL * share / HIGHEST
        yield Line(points=((LEFT, level), (right, level)), stroke="faint")
        yield Text(x=LEFT - 6, y=level + 4, text=f"{share * 100:.0f} %", anchor="end", size=10, colour="muted")
    room = (right - LEFT) / len(rows)
    for number, row in enumerate(rows):
        left = LEFT + number * room + 0.12 * room
        wide = 0.76 * room / len(WAYS)
        for place, (way, colour) in enumerate(WAYS.items()):
            seconds = row["seconds"].get(way)
            if seconds is None:
                continue
            share = row["bytes"] / seconds / copy_rate
            high = PANEL * min(share, HIGHEST) / HIGHEST
            title = f"{way}, {operation} {row['rows']} x {row['columns']}: {seconds * 1e6:.1f} us, {share * 100:.0f} %"
            yield _box(left + place * wide + 1, bottom - high, wide - 2, high, colour, title)
            text = f"{share * 100:.0f}"
            yield Text(
                x=left + (place + 0.5) * wide, y=bottom - high - 3, text=text, size=9, anchor="middle", halo=True
            )
        label = f"{row['rows']} x {row['columns']}"
        yield Text(x=left + 0.38 * room, y=bottom + LABELS, text=label, size=10, anchor="middle", colour="muted")
    yield Line(points=((LEFT, bottom), (right, bottom)), stroke="ink")


def _box(left: float, top: float, width: float, height: float, fill: str, title: str = "") -> Polygon:
    right, bottom = left + width, top + height
    return Polygon(points=((left, top), (right, top), (right, bottom), (left, bottom)), fill=fill, title=title)


def part(content: Row | None) -> str:
    """What stands between the marks."""
    if content is None:
        return NOT_YET
    pictures = [
        f"![Share of a copy of each operation on rows, {name} pass](images/kernels_{name}.svg)" for name in PASSES
    ]
    return "\n\n".join(
        [
            head_line(content) + ".",
            *pictures,
            "**Operations on rows**, in bfloat16. The last column is how many times as long the fastest of the others"
            " takes; `-` is what a library does not take.",
            rows_table(content["rows"]),
            "**Losses**, both passes together, in bfloat16. Memory is what is taken beyond inputs, and beyond gradients"
            " where the logits are no input.",
            losses_table(content["losses"]),
            "**Copies.** Of a tensor with one scale for the whole, which is read twice, 5 bytes are counted for each"
            " element; of AdamW, 7 numbers for each parameter.",
            copies_table(content["copies"]),
            "**Calls** of operations on 256 x 256 without gradients, on the host.",
            launches_table(content["launch"]),
        ]
    )


def page_with_results(text: str, content: Row | None) -> str:
    """The page with what stands between the marks replaced."""
    before, rest = text.split(BEGIN, 1)
    after = rest.split(END, 1)[1]
    return f"{before}{BEGIN}\n\n{part(content)}\n\n{END}{after}"


def main() -> None:
    content = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    IMAGES.mkdir(exist_ok=True)
    for name in PASSES:
        (IMAGES / f"kernels_{name}.svg").write_text(plot(content, name), encoding="utf-8")
    PAGE.write_text(page_with_results(PAGE.read_text(encoding="utf-8"), content), encoding="utf-8")


if __name__ == "__main__":
    main()
