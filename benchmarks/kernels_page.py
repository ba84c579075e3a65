"""The results of `benchmarks/kernels.py` in docs/kernels.md, and their plots.

    python benchmarks/kernels_page.py benchmarks/results/kernels_h200.json

writes docs/images/kernels_forward.svg, kernels_backward.svg and those of attention, products, experts and linear
attention, and replaces what stands between the marks of the page. A test holds the page to the data.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kernel_attention_page import attention_parts, attention_plots
from kernel_plots import Axis, Bar, Group, Panel, panels
from kernel_product_page import product_parts, product_plots
from kernel_tables import copies_table, head_line, launches_table, losses_table, rows_table

from nearpeak.render.scene import Scene
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

SHARES = Axis(highest=1.1, lines={0.5: "50 %", 1.0: "100 %"})
"""Of a copy: a cache gives a little more than one."""

Row = Mapping[str, Any]


def plot(content: Row, name: str) -> str:
    """The plot of one pass, as an SVG file."""
    return svg(scene(content, name))


def scene(content: Row, name: str) -> Scene:
    """Shares of a copy, one panel for each operation, a group of bars for each size, a bar for each way."""
    rows = [row for row in content["rows"] if row["pass"] == name]
    operations = list(dict.fromkeys(row["operation"] for row in rows))
    title = f"{name.capitalize()} pass: bytes that must move, by time, as a share of a copy"
    described = f"{title}, of {len(operations)} operations on an {content['machine']}: {', '.join(operations)}."
    shown = [
        Panel(name=operation, groups=[_group(row, content) for row in rows if row["operation"] == operation])
        for operation in operations
    ]
    return panels(title, described, WAYS, SHARES, shown)


def _group(row: Row, content: Row) -> Group:
    size = f"{row['rows']} x {row['columns']}"
    bars = {}
    for way, seconds in row["seconds"].items():
        share = row["bytes"] / seconds / content["copy_bytes_per_second"]
        title = f"{way}, {row['operation']} {size}: {seconds * 1e6:.1f} us, {share * 100:.0f} %"
        bars[way] = Bar(value=share, text=f"{share * 100:.0f}", title=title)
    return Group(label=size, bars=bars)


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
            *attention_parts(content),
            *product_parts(content),
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
    for file, picture in (attention_plots(content) | product_plots(content)).items():
        (IMAGES / f"{file}.svg").write_text(svg(picture), encoding="utf-8")
    PAGE.write_text(page_with_results(PAGE.read_text(encoding="utf-8"), content), encoding="utf-8")


if __name__ == "__main__":
    main()
