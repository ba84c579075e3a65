"""Fits which backend of a kernel is fastest, by the sizes of a call, and writes the table of choices.

    python -m benchmarks.kernels.fit_choices RESULTS.json ... [--out src/nearpeak/kernels/tables/sm90_choices.json]

Reads results of `python -m benchmarks.kernels`, of its own shapes and of random ones, and of
`benchmarks.kernels.attention_variants`; the first file says on which machine. Each operation gets a decision tree
(`nearpeak.kernels._runtime.choice`). A leaf has the mean time of each backend over that of the fastest backend of each
cell, and runs the one with the least. A split is made where it saves the most time, if it saves `LEAST_SAVED` of the
time of a cell, and leaves `FEWEST_CELLS` on either side; any number for an option, which is on or off. For sizes
outside of the measured ones, each backend has the seconds of a launch and of a unit of work, by least squares of
relative errors.

Prints, for each operation, how many cells the choice runs within 3 % of their fastest backend; "unseen" is by a tree
that was fitted without the cell.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import exp, log, sqrt
from pathlib import Path
from typing import Any

from nearpeak.kernels._runtime.choice import ChoiceModel, choose
from nearpeak.kernels.attention.backends import FEATURES as ATTENTION_FEATURES
from nearpeak.kernels.attention.backends import work as attention_work
from nearpeak.kernels.gemm.triton import FEATURES as GEMM_FEATURES
from nearpeak.kernels.gemm.triton import filled
from nearpeak.kernels.gemm.triton import work as gemm_work
from nearpeak.kernels.norms.library import FEATURES as NORM_FEATURES
from nearpeak.kernels.norms.library import padding
from nearpeak.kernels.norms.library import work as norm_work

TABLE = Path("src/nearpeak/kernels/tables/sm90_choices.json")
LEAST_SAVED = 0.03
FEWEST_CELLS = 3
DEEPEST = 6
CLOSE = 1.03
FOLDS = 5
PROCESSORS = 132
"""Of an H200."""
ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
FEATURES = {
    "attention": ATTENTION_FEATURES,
    "attention_backward": ATTENTION_FEATURES,
    "gemm": GEMM_FEATURES,
    "gemm_fp8": GEMM_FEATURES,
    **dict.fromkeys(("rms_norm", "rms_norm_backward", "layer_norm", "layer_norm_backward"), NORM_FEATURES),
}
WORK = {
    name: {ATTENTION_FEATURES: attention_work, GEMM_FEATURES: gemm_work, NORM_FEATURES: norm_work}[features]
    for name, features in FEATURES.items()
}
OPTIONS = (
    "bias", "activation", "gated", "kept", "residual", "a_by_columns", "b_by_columns", "causal", "packed",
    "tokens_first", "weighted", "scales_by_row", "scales_by_block", "fast",
)  # fmt: skip
PEERS = {
    "attention": {"cudnn": ("cudnn",), "flash": ("flash",)},
    "gemm": {"torch": ("cublas", "cublas + nearpeak", "cublas fused", "cublas + torch", "eager")},
    "gemm_fp8": {"torch": ("scaled_mm",)},
    "rms_norm": {"torch": ("eager",)},
    "layer_norm": {"torch": ("eager",)},
}
"""Peers that run what a backend of torch runs: the backend is as fast as the fastest of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """What was measured of one call."""

    operation: str
    features: Mapping[str, float]
    seconds: Mapping[str, float]
    """By backend."""

    @property
    def work(self) -> float:
        """What the time of a large call is proportional to."""
        return WORK[self.operation](self.features)

    @property
    def losses(self) -> dict[str, float]:
        """The logarithm of the time of each backend over that of the fastest one."""
        best = min(self.seconds.values())
        return {name: log(seconds / best) for name, seconds in self.seconds.items()}


def read_cells(path: Path) -> Iterator[Cell]:
    """The cells of a file of results that have a choice."""
    data = json.loads(path.read_text())
    if isinstance(data, list):
        for row in data:
            yield from _attention_variants(row)
        return
    if "cells" in data:
        for row in data["cells"]:
            yield from _random_cell(row)
        return
    for row in data["attention"]:
        shape = {**row, "key_heads": row["heads"], "queries": row["tokens"], "keys": row["tokens"]}
        yield from _attention(row, {**shape, "value_dim": row["dim"], "layout": "heads first"}, "bfloat16")
    for row in data["products"]:
        yield from _table_product(row)
    for row in data["rows"]:
        if row["operation"] in ("rms_norm", "layer_norm"):
            yield from _norm(row, row, "bfloat16")


def _attention_variants(row: Mapping[str, Any]) -> Iterator[Cell]:
    """A cell of `attention_variants`. Its fastest configuration for Hopper is the one that the launchers take."""
    ours = [time for name, time in row["seconds"].items() if name.startswith("hopper")]
    if row.get("fp8") or not ours:
        return
    seconds = {name: time for name, time in row["seconds"].items() if not name.startswith("hopper")}
    seconds["nearpeak"] = min(ours)
    one_pass = "backward" if row["backward"] else "forward"
    shape = {**row, "queries": row["tokens"], "keys": row["tokens"], "layout": "tokens first"}
    yield from _attention({"seconds": seconds, "backend": "gluon", "pass": one_pass}, shape, "bfloat16")


def _random_cell(row: Mapping[str, Any]) -> Iterator[Cell]:
    shape, operation = row["shape"], row["operation"]
    if operation in ("attention", "attention packed"):
        yield from _attention(row, shape, row["dtype"])
    elif operation in ("gemm", "gemm few rows", "gemm swiglu") and row["pass"] == "forward":
        gated = operation == "gemm swiglu"
        sizes = shape["rows"], shape["results"], shape["features"]
        yield from _product(row, sizes, ITEM_BYTES[row["dtype"]], gated=gated, activation=gated, **_flags(shape))
    elif operation == "gemm backward":  # both products were timed together, and both have this time
        rows, results, features = shape["rows"], shape["results"], shape["features"]
        itemsize = ITEM_BYTES[row["dtype"]]
        yield from _product(row, (rows, features, results), itemsize, b_by_columns=True)
        yield from _product(row, (results, features, rows), itemsize, a_by_columns=True, b_by_columns=True)
    elif operation == "gemm fp8":
        sizes = shape["rows"], shape["results"], shape["features"]
        yield from _product(row, sizes, 1, **_scale_flags(shape["scales"]), fast=bool(shape.get("fast")))
    elif operation in ("rms_norm", "layer_norm"):
        yield from _norm(row, shape, row["dtype"])


def _flags(shape: Mapping[str, Any]) -> dict[str, bool]:
    return {name: bool(shape[name]) for name in ("bias", "residual") if name in shape}


def _attention(row: Mapping[str, Any], shape: Mapping[str, Any], dtype: str) -> Iterator[Cell]:
    packed = "sequences" in shape
    longest = shape.get("longest")
    queries, keys = (longest, longest) if packed else (shape["queries"], shape["keys"])
    values = (
        shape["heads"] * (1 if packed else shape["batch"]), shape["heads"] // shape["key_heads"], queries, keys,
        shape["dim"], shape["value_dim"], shape["causal"], shape.get("window") or 0, packed,
        packed or shape["layout"] == "tokens first", ITEM_BYTES[dtype],
    )  # fmt: skip
    if row["pass"] != "both":
        name = "attention" if row["pass"] == "forward" else "attention_backward"
        yield from _cell(name, values, row, "gluon" if shape["dim"] in (64, 128) else "triton")


def _table_product(row: Mapping[str, Any]) -> Iterator[Cell]:
    """A product of the table of fixed shapes: "8192 x 4096 x 2 x 14336" with a gate, or the side of a square."""
    kinds = {
        "gemm": {}, "residual": {"residual": True}, "bias gelu": {"bias": True, "activation": True},
        "swiglu": {"gated": True, "activation": True},
    }  # fmt: skip
    transposed = {
        "forward": {},
        "by x": {"b_by_columns": True},
        "by weight": {"a_by_columns": True, "b_by_columns": True},
    }
    if row["operation"] == "fp8":
        side = int(row["size"])
        scales, _, accumulation = row["kind"].partition(", ")
        yield from _product(row, (side, side, side), 1, **_scale_flags(scales), fast=accumulation == "fast")
        return
    if row["operation"] not in kinds or row["pass"] not in transposed:
        return
    numbers = [int(number) for number in row["size"].split(" x ")]
    rows, depth, columns = (numbers * 3)[:3] if len(numbers) == 1 else (numbers[0], numbers[1], numbers[-1])
    yield from _product(row, (rows, columns, depth), 2, **kinds[row["operation"]], **transposed[row["pass"]])


def _scale_flags(scales: str) -> dict[str, bool]:
    """Of "tensor", "row", and "128" or "blocks of 128"."""
    return {"scales_by_row": scales == "row", "scales_by_block": scales.endswith("128")}


def _product(row: Mapping[str, Any], sizes: tuple[int, int, int], itemsize: int, **flags: bool) -> Iterator[Cell]:
    rows, columns, depth = sizes
    share = filled(rows, columns * (2 if flags.get("gated") else 1), PROCESSORS)
    values = (rows, columns, depth, itemsize, *(flags.get(name, False) for name in GEMM_FEATURES[4:-1]), share)
    yield from _cell("gemm" if itemsize > 1 else "gemm_fp8", values, row, "gluon")


def _norm(row: Mapping[str, Any], shape: Mapping[str, Any], dtype: str) -> Iterator[Cell]:
    if row["pass"] != "both":
        name = row["operation"] + ("_backward" if row["pass"] == "backward" else "")
        columns = shape["columns"]
        values = (shape["rows"], columns, padding(columns), ITEM_BYTES[dtype], True)
        yield from _cell(name, values, row, "triton")


def _cell(operation: str, values: Sequence[float], row: Mapping[str, Any], own: str) -> Iterator[Cell]:
    """The cell, if two backends were measured. `own` is the backend of "nearpeak" in a file that does not say."""
    measured = row["seconds"]
    seconds = {name.partition("/")[2]: time for name, time in measured.items() if name.startswith("nearpeak/")}
    if "portable" in measured:
        seconds["triton"] = measured["portable"]
    if "nearpeak" in measured:
        seconds.setdefault(row.get("backend") or own, measured["nearpeak"])
    known = ("cudnn", "flash") if operation.startswith("attention") else ("torch",)
    seconds = {name: time for name, time in seconds.items() if name in ("gluon", "triton", *known)}  # no mixtures
    for name, peers in PEERS[operation.removesuffix("_backward")].items():
        times = [measured[peer] for peer in peers if peer in measured]
        is_candidate = name in row.get("candidates", (name,))  # a peer may do more, such as windows
        if times and is_candidate:
            seconds[name] = min([*times, *([seconds[name]] if name in seconds else [])])
    if len(seconds) > 1:
        features = dict(zip(FEATURES[operation], map(float, values), strict=True))
        yield Cell(operation=operation, features=features, seconds=seconds)


def fit_tree(cells: Sequence[Cell], depth: int = DEEPEST) -> dict[str, Any]:
    """The tree of least loss, by greedy splits."""
    split = _best_split(cells) if depth else None
    if split is None:
        return {"cells": len(cells), "relative": {k: round(exp(v), 4) for k, v in _mean_losses(cells).items()}}
    feature, at_most = split
    below, above = _divide(cells, feature, at_most)
    return {
        "feature": feature,
        "at_most": at_most,
        "below": fit_tree(below, depth - 1),
        "above": fit_tree(above, depth - 1),
    }


def _mean_losses(cells: Sequence[Cell]) -> dict[str, float]:
    """The mean loss of each backend that was measured in all of these cells, or in most of many."""
    losses = [cell.losses for cell in cells]
    names = {name for loss in losses for name in loss}
    by_name = {name: [loss[name] for loss in losses if name in loss] for name in sorted(names)}
    fewest = min(len(cells), max(FEWEST_CELLS, len(cells) * 2 / 3))
    return {name: sum(one) / len(one) for name, one in by_name.items() if len(one) >= fewest}


def _least_loss(cells: Sequence[Cell]) -> float:
    """What the best single backend loses in all cells."""
    return len(cells) * min(_mean_losses(cells).values(), default=0.0)


def _best_split(cells: Sequence[Cell]) -> tuple[str, float] | None:
    """The split that saves the most time. An option may save it with the next split, by size, of either side."""
    least, best = _least_loss(cells) - LEAST_SAVED, None
    for feature, at_most, below, above in _splits(cells):
        loss = _least_loss(below) + _least_loss(above)
        if feature in OPTIONS:
            loss = _loss_of_split(below) + _loss_of_split(above)
        if loss < least:
            least, best = loss, (feature, at_most)
    return best


def _loss_of_split(cells: Sequence[Cell]) -> float:
    """What the best backends on either side of the best split lose; a split must save something."""
    losses = [_least_loss(below) + _least_loss(above) + LEAST_SAVED for _, _, below, above in _splits(cells)]
    return min([_least_loss(cells), *losses])


def _splits(cells: Sequence[Cell]) -> Iterator[tuple[str, float, list[Cell], list[Cell]]]:
    """All splits: the feature, the largest number of the cells below, and the cells below and above."""
    for feature in FEATURES[cells[0].operation]:
        for low, high in pairwise(sorted({cell.features[feature] for cell in cells})):
            at_most = round(sqrt(low * high), 3) if low > 0 else (low + high) / 2
            below, above = _divide(cells, feature, at_most)
            if feature in OPTIONS or min(len(below), len(above)) >= FEWEST_CELLS:
                yield feature, at_most, below, above


def _divide(cells: Sequence[Cell], feature: str, at_most: float) -> tuple[list[Cell], list[Cell]]:
    below = [cell for cell in cells if cell.features[feature] <= at_most]
    return below, [cell for cell in cells if cell.features[feature] > at_most]


def fit_model(cells: Sequence[Cell]) -> dict[str, Any]:
    """The model of an operation, as it is written."""
    ranges = {
        name: [min(cell.features[name] for cell in cells), max(cell.features[name] for cell in cells)]
        for name in FEATURES[cells[0].operation]
    }
    return {"cells": len(cells), "ranges": ranges, "tree": fit_tree(cells), "costs": fit_costs(cells)}


def fit_costs(cells: Sequence[Cell]) -> dict[str, list[float]]:
    """By backend, the seconds of a launch and of a unit of work."""
    costs = {}
    for name in sorted({name for cell in cells for name in cell.seconds}):
        # both over the time of the cell, so that their sum should be 1
        terms = [(1 / cell.seconds[name], cell.work / cell.seconds[name]) for cell in cells if name in cell.seconds]
        launches, units = (sum(term[place] for term in terms) for place in (0, 1))
        ll, lu, uu = (sum(one[i] * one[j] for one in terms) for i, j in ((0, 0), (0, 1), (1, 1)))
        determinant = ll * uu - lu * lu
        launch, unit = 0.0, units / uu
        if determinant > 1e-9 * ll * uu:
            launch, unit = (launches * uu - units * lu) / determinant, (units * ll - launches * lu) / determinant
        if launch < 0.0:
            launch, unit = 0.0, units / uu
        elif unit < 0.0:
            launch, unit = launches / ll, 0.0
        costs[name] = [float(f"{launch:.4g}"), float(f"{unit:.4g}")]
    return costs


def chosen_loss(cell: Cell, model: Mapping[str, Any]) -> float:
    """What the choice of a model loses in a cell."""
    order = ("torch", "cudnn", "flash", "gluon", "triton")  # of candidates without a model
    names = tuple(name for name in order if name in cell.seconds)
    read = ChoiceModel(ranges=model["ranges"], tree=model["tree"], costs=model["costs"])
    return cell.losses[choose(cell.operation, names, cell.features, cell.work, read).backend]


def describe(cells: Sequence[Cell], model: Mapping[str, Any]) -> str:
    """One line on how good the choices of a model are."""
    seen = [chosen_loss(cell, model) for cell in cells]
    # the two products of a backward pass were timed together: neither is fitted on the other
    measured = list(dict.fromkeys(tuple(cell.seconds.values()) for cell in cells))
    fold_of = [measured.index(tuple(cell.seconds.values())) % FOLDS for cell in cells]
    unseen = []
    for fold in range(FOLDS):
        rest = [cell for cell, its in zip(cells, fold_of, strict=True) if its != fold]
        if len(measured) > FOLDS:
            without = fit_model(rest)
            unseen += [chosen_loss(cell, without) for cell, its in zip(cells, fold_of, strict=True) if its == fold]
    shares = [
        f"{name} {sum(loss <= log(CLOSE) for loss in losses) / len(losses):.0%}, worst {exp(max(losses)):.2f}"
        for name, losses in (("within 3 %:", seen), ("unseen", unseen))
        if losses
    ]
    return f"{cells[0].operation}: {len(cells)} cells, {'; '.join(shares)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=TABLE)
    options = parser.parse_args()
    cells = [cell for path in options.results for cell in read_cells(path)]
    operations = {}
    for name in FEATURES:
        ours = [cell for cell in cells if cell.operation == name]
        if ours:
            operations[name] = fit_model(ours)
            print(describe(ours, operations[name]))
    first = json.loads(options.results[0].read_text())
    table = {
        "machine": first["machine"],
        "versions": first["versions"],
        "results": [path.name for path in options.results],
        "operations": operations,
    }
    options.out.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
