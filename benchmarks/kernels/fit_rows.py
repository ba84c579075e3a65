"""Writes rows of the table of configurations for numbers of rows, from measured spread cells.

    python -m benchmarks.kernels.fit_rows spread.json ... [--table src/nearpeak/kernels/tables/sm90.json]

Reads results of `python -m benchmarks.kernels.tune --spread SEEDS`. Sizes whose columns have the same next power of 2,
and whose rows lie between the same powers of 4, are a class. What a candidate loses in a class is estimated from the
cells near it, also of other forms of the same kernel (with and without a sum, centered or not): one cell says little,
as a tenth of a microsecond is noise. A class takes the candidate that is expected to lose least, if that is less by
`MARGIN` than what the kernel takes by itself; neighbors that take the same are one row of the table. Rows of earlier
fits are dropped for kernels that were measured.

Prints, for each kernel, how much slower than their fastest candidate cells are: by default, and by a table that is
fitted without the cell.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from math import dist, exp, log, log2
from pathlib import Path
from typing import Any

from nearpeak.kernels._runtime.tuning import BY_ROWS

TABLE = Path("src/nearpeak/kernels/tables/sm90.json")
DEFAULT = "default"
MARGIN = 0.01
OTHER_FORM = 0.5
"""How much a cell of another form of the kernel counts."""
DOUBT, PRIOR_LOSS = 0.1, 0.2
"""A candidate that was not measured near a place is taken to lose so much, with so much weight."""
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


def _family(kernel: str) -> str:
    """The kernel whose forms share candidates."""
    return kernel.removesuffix(BY_ROWS).replace("_centered", "").replace("_added", "")


def _coordinates(row: Row) -> tuple[float, float]:
    """The logarithms of what a program works on, and of how many rows there are."""
    return log2(row["size"]), log2(_rows(row)) if row["kernel"].endswith(BY_ROWS) else 0.0


def expected_losses(kernel: str, at: tuple[float, float], cells: Iterable[Row]) -> dict[str, float]:
    """Of each candidate, the expected logarithm of its time over that of the fastest, from cells of the family."""
    sums: dict[str, float] = defaultdict(float)
    weights: dict[str, float] = defaultdict(float)
    for cell in cells:
        distance = dist(at, _coordinates(cell))
        weight = exp(-(distance**2) / 2) * (1.0 if cell["kernel"] == kernel else OTHER_FORM)
        fastest = min(cell["seconds"].values())
        for name, seconds in cell["seconds"].items():
            sums[name] += weight * log(seconds / fastest)
            weights[name] += weight
    doubt = {name: 0.0 if name == DEFAULT else DOUBT for name in sums}
    return {
        name: (sums[name] + doubt[name] * PRIOR_LOSS) / (weights[name] + doubt[name])
        for name in sums
        if weights[name] + doubt[name] > 0
    }


def chosen(kernel: str, at: tuple[float, float], cells: Iterable[Row], allowed: Collection[str]) -> str:
    """The candidate for a place, of those allowed, or the default."""
    by_name = expected_losses(kernel, at, cells)
    best = min((name for name in by_name if name in allowed), key=lambda name: by_name[name], default=DEFAULT)
    return best if by_name.get(DEFAULT, 0.0) - by_name.get(best, 0.0) > MARGIN else DEFAULT


def entries(kernel: str, cells: Sequence[Row]) -> list[dict[str, Any]]:
    """The rows of the table of a kernel, from cells of its family."""
    by_rows = kernel.endswith(BY_ROWS)
    heights: dict[str, list[float]] = defaultdict(list)  # of the cells in which a candidate was measured
    for cell in cells:
        for name in cell["seconds"]:
            heights[name].append(_coordinates(cell)[1])
    fitted: list[dict[str, Any]] = []
    near_by_bits = _by_bits(cells)
    for bits, mine in sorted(_by_bits(cell for cell in cells if cell["kernel"] == kernel).items()):
        near = near_by_bits[bits]
        lowest, *_, highest = sorted(_coordinates(cell)[1] for cell in [*near, *near])
        fours = [place_of(cell)[1] for cell in mine]
        for four in range(min(fours), max(fours) + 1):
            height = min(max(2 * four - 1.0, lowest), highest) if by_rows else 0.0
            # a configuration may need so many columns, or be made for few rows: only those that ran at this width, and
            # not with fewer rows alone, or with more rows alone
            ran = {name for cell in near for name in cell["seconds"]}
            allowed = {name for name in ran if min(heights[name]) <= height <= max(heights[name])}
            name = chosen(kernel, (bits - 0.5, height), cells, allowed)
            if name == DEFAULT:
                continue
            config = json.loads(name)
            sizes = {"above": 2 ** (bits - 1), "up_to": 2**bits}
            if not by_rows:
                fitted.append({**sizes, **config})
                continue
            below = 4 ** (four - 1)
            if fitted and fitted[-1] == {**fitted[-1], **sizes, "rows_up_to": below, **config}:
                fitted[-1]["rows_up_to"] = 4**four
            else:
                fitted.append({**sizes, "rows_above": below, "rows_up_to": 4**four, **config})
    return fitted


def _by_bits(cells: Iterable[Row]) -> dict[int, list[Row]]:
    """Cells by the power of 2 up to which their columns are."""
    groups: dict[int, list[Row]] = defaultdict(list)
    for cell in cells:
        groups[place_of(cell)[0]].append(cell)
    return groups


def _families(cells: Iterable[Row]) -> dict[str, list[Row]]:
    families: dict[str, list[Row]] = defaultdict(list)
    for cell in cells:
        families[_family(cell["kernel"])].append(cell)
    return families


def merged(table: Mapping[str, list[dict[str, Any]]], cells: Sequence[Row]) -> dict[str, list[dict[str, Any]]]:
    """The table with the rows of these cells; of flat kernels, rows for other sizes stay."""
    result = dict(table)
    families = _families(cells)
    for kernel in dict.fromkeys(cell["kernel"] for cell in cells):
        fitted = entries(kernel, families[_family(kernel)])
        if not kernel.endswith(BY_ROWS):
            longest = max(2 ** place_of(cell)[0] for cell in cells if cell["kernel"] == kernel)
            fitted += [entry for entry in table.get(kernel, []) if entry.get("above", 0) >= longest]
        result[kernel] = fitted
    return {kernel: result[kernel] for kernel in sorted(result) if result[kernel]}


def described(kernel: str, cells: Sequence[Row]) -> str:
    """How good the default is, and a table fitted without the cell, of candidates that were measured there."""
    by_default, by_table = [], []
    for cell in (cell for cell in cells if cell["kernel"] == kernel):
        others = [other for other in cells if other is not cell]
        name = chosen(kernel, _coordinates(cell), others, cell["seconds"])
        fastest = min(cell["seconds"].values())
        by_default.append(log(cell["seconds"][DEFAULT] / fastest))
        by_table.append(log(cell["seconds"][name] / fastest))
    return f"{kernel:40s} {len(by_table):4d} cells: by default {_slower(by_default)}; left out {_slower(by_table)}"


def _slower(values: Sequence[float]) -> str:
    share = sum(value > log(1.03) for value in values) / len(values)
    return f"{exp(sum(values) / len(values)) - 1:6.2%} slower, {share:4.0%} by more than 3 %"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--table", type=Path, default=TABLE)
    options = parser.parse_args()
    rows = [row for path in options.results for row in json.loads(path.read_text(encoding="utf-8"))]
    families = _families(rows)
    for kernel in dict.fromkeys(row["kernel"] for row in rows):
        print(described(kernel, families[_family(kernel)]))
    table = merged(json.loads(options.table.read_text(encoding="utf-8")), rows)
    options.table.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
