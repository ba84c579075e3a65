"""Writes rows of the table of configurations for numbers of rows, from measured spread cells.

    python -m benchmarks.kernels.fit_rows spread.json ... [--table src/nearpeak/kernels/tables/sm90.json]

Reads results of `python -m benchmarks.kernels.tune --spread SEEDS`. Cells of a kernel whose columns have the same next
power of 2, and whose rows lie between the same powers of 4, are a class. A class takes the candidate that is fastest on
average over its cells, if that gains more than `MARGIN` over what the kernel takes by itself; neighbors that take the
same are one row of the table. Rows of earlier fits are dropped for kernels that were measured.

Prints, for each kernel, how much slower than their fastest candidate cells are, by default and by the new table.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from math import exp, log
from pathlib import Path
from typing import Any

from nearpeak.kernels._runtime.tuning import BY_ROWS

TABLE = Path("src/nearpeak/kernels/tables/sm90.json")
DEFAULT = "default"
MARGIN = 0.01
Row = Mapping[str, Any]
Place = tuple[int, int]
"""The power of 2 up to which columns are, and the power of 4 up to which rows are, as exponents."""


def place_of(row: Row) -> Place:
    """Of a flat kernel, which has no rows of its own, the power of 2 of its elements and 0."""
    bits = (row["size"] - 1).bit_length()
    return (bits, (_rows(row) - 1).bit_length() + 1 >> 1) if row["kernel"].endswith(BY_ROWS) else (bits, 0)


def _rows(row: Row) -> int:
    shape = row["shape"]
    if row["operation"] == "rotary":
        return int(shape["batch"] * shape["tokens"] * shape["heads"])
    return int(shape["rows"])


def losses(cells: Sequence[Row]) -> dict[str, float]:
    """Of each candidate that all cells of a class have, the mean logarithm of its time over that of the fastest."""
    names = set.intersection(*(set(cell["seconds"]) for cell in cells))
    return {
        name: sum(log(cell["seconds"][name] / min(cell["seconds"].values())) for cell in cells) / len(cells)
        for name in names
    }


def chosen(cells: Sequence[Row]) -> str:
    """The candidate of a class, or the default."""
    by_name = losses(cells)
    best = min(by_name, key=lambda name: by_name[name])
    return best if by_name[DEFAULT] - by_name[best] > MARGIN else DEFAULT


def classes(rows: Iterable[Row]) -> dict[Place, list[Row]]:
    by_place: dict[Place, list[Row]] = {}
    for row in rows:
        by_place.setdefault(place_of(row), []).append(row)
    return dict(sorted(by_place.items()))


def entries(kernel: str, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The rows of the table of a kernel."""
    fitted: list[dict[str, Any]] = []
    for (bits, fours), cells in classes(rows).items():
        name = chosen(cells)
        if name == DEFAULT:
            continue
        config = json.loads(name)
        sizes = {"above": 2 ** (bits - 1), "up_to": 2**bits}
        if not kernel.endswith(BY_ROWS):
            fitted.append({**sizes, **config})
            continue
        below = 4 ** (fours - 1)
        if fitted and fitted[-1] == {**fitted[-1], **sizes, "rows_up_to": below, **config}:
            fitted[-1]["rows_up_to"] = 4**fours
        else:
            fitted.append({**sizes, "rows_above": below, "rows_up_to": 4**fours, **config})
    return fitted


def merged(table: Mapping[str, list[dict[str, Any]]], rows: Sequence[Row]) -> dict[str, list[dict[str, Any]]]:
    """The table with the rows of these cells; of flat kernels, rows for other sizes stay."""
    result = dict(table)
    for kernel in dict.fromkeys(row["kernel"] for row in rows):
        mine = [row for row in rows if row["kernel"] == kernel]
        fitted = entries(kernel, mine)
        if not kernel.endswith(BY_ROWS):
            longest = max(2**bits for bits, _ in classes(mine))
            fitted += [entry for entry in table.get(kernel, []) if entry.get("above", 0) >= longest]
        result[kernel] = fitted
    return {kernel: result[kernel] for kernel in sorted(result) if result[kernel]}


def described(kernel: str, rows: Sequence[Row]) -> str:
    by_default = [log(row["seconds"][DEFAULT] / min(row["seconds"].values())) for row in rows]
    by_table = []
    for cells in classes(rows).values():
        name = chosen(cells)
        by_table += [log(cell["seconds"][name] / min(cell["seconds"].values())) for cell in cells]
    return f"{kernel:40s} {len(rows):4d} cells: by default {_slower(by_default)}; by the table {_slower(by_table)}"


def _slower(values: Sequence[float]) -> str:
    share = sum(value > log(1.03) for value in values) / len(values)
    return f"{exp(sum(values) / len(values)) - 1:6.2%} slower, {share:4.0%} by more than 3 %"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--table", type=Path, default=TABLE)
    options = parser.parse_args()
    rows = [row for path in options.results for row in json.loads(path.read_text(encoding="utf-8"))]
    for kernel in dict.fromkeys(row["kernel"] for row in rows):
        print(described(kernel, [row for row in rows if row["kernel"] == kernel]))
    table = merged(json.loads(options.table.read_text(encoding="utf-8")), rows)
    options.table.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
