"""The table and the plot of docs/accuracy.md, from the results of `benchmarks.accuracy.durations`.

    python -m benchmarks.pages.durations benchmarks/results/kernel_durations_h200.json

writes docs/images/kernel_durations.svg and replaces the table in docs/accuracy.md. A test holds the page to the data.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from nearpeak.render.picture.plot import Band, Series, line_plot

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "accuracy.md"
PLOT = ROOT / "docs" / "images" / "kernel_durations.svg"
BEGIN, END = "<!-- table -->", "<!-- /table -->"


def times(row: dict[str, Any]) -> dict[str, float]:
    """What each harness says of one operation."""
    return {"nearpeak": row["nearpeak"], **row["others"]}


def table(result: dict[str, Any]) -> str:
    """The operations, shortest first: times in microseconds, then everyone's error against the profiler."""
    rows = sorted(result["rows"], key=lambda row: row["referee"])
    names = list(times(rows[0]))
    lines = [
        "| operation | profiler | ncu | nearpeak | "
        + " | ".join(f"error of {breakable(name)}" for name in names)
        + " |",
        "| --- |" + " ---: |" * (3 + len(names)),
    ]
    for row in rows:
        truth = row["referee"]
        microseconds = [f"{value * 1e6:.2f}" if value else "-" for value in (truth, row.get("ncu"), row["nearpeak"])]
        errors = [f"{100 * (value / truth - 1):+.1f}&nbsp;%" for value in times(row).values()]
        lines.append(
            f"| {row['name'].replace(' x ', '&nbsp;x&nbsp;')} | " + " | ".join([*microseconds, *errors]) + " |"
        )
    return "\n".join(lines)


def breakable(name: str) -> str:
    """A long name that a narrow column may break."""
    return name.replace("_cuda", "_<wbr>cuda").replace(".", ".<wbr>")


def plot(result: dict[str, Any]) -> str:
    """Relative error against the true duration, one series per harness."""
    rows = sorted(result["rows"], key=lambda row: row["referee"])
    series = [
        Series(
            name=name,
            points=tuple((row["referee"] * 1e6, 100 * (times(row)[name] / row["referee"] - 1)) for row in rows),
            labels=tuple(row["name"] for row in rows),
            line=False,
        )
        for name in reversed(list(times(rows[0])))
    ]
    return line_plot(
        series,
        title=f"20 operations on an {result['device']}: reported time against kernel duration",
        x_label="kernel duration by the profiler, us",
        y_label="error, %",
        log_x=True,
        y_limits=(-40.0, 120.0),
        bands=(Band(name="3 %", low=-3.0, high=3.0),),
    )


def page_with_table(text: str, result: dict[str, Any]) -> str:
    """The page with its table replaced."""
    before, rest = text.split(BEGIN, 1)
    after = rest.split(END, 1)[1]
    return f"{before}{BEGIN}\n{table(result)}\n{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, help="what benchmarks.accuracy.durations --json wrote")
    result = json.loads(parser.parse_args().results.read_text())
    PLOT.parent.mkdir(exist_ok=True)
    PLOT.write_text(plot(result))
    PAGE.write_text(page_with_table(PAGE.read_text(), result))


if __name__ == "__main__":
    main()
