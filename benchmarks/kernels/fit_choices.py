"""Writes the table by which the backend of a kernel is chosen, from measured cells.

    python -m benchmarks.kernels.fit_choices RESULTS.json ... [--out src/nearpeak/kernels/tables/sm90_choices.json]

Reads results of `python -m benchmarks.kernels`, of its own shapes and of random ones, and of
`benchmarks.kernels.attention_variants`; the first file says on which machine. Each operation gets its cells, the
features of a call with the time of each backend over that of the fastest one; `nearpeak.kernels._runtime.choice` says
how they decide.

Prints, for each operation, how much slower than their fastest backend calls are, on average and at worst, and the share
that is slower by more than 3 %: of all cells when the table has them, and of random ones when it does not: when the
cell is left out of the table ("one left out"), and when all cells of its seed are.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from pathlib import Path
from typing import Any

from nearpeak.kernels._runtime.choice import choose, read_model
from nearpeak.kernels.attention.backends import BACKWARD_FEATURES as ATTENTION_BACKWARD_FEATURES
from nearpeak.kernels.attention.backends import FEATURES as ATTENTION_FEATURES
from nearpeak.kernels.attention.backends import MOST_NARROW_DIM, effective_batches, key_tiles
from nearpeak.kernels.gemm.triton import FEATURES as GEMM_FEATURES
from nearpeak.kernels.gemm.triton import filled, is_odd
from nearpeak.kernels.norms.library import FEATURES as NORM_FEATURES
from nearpeak.kernels.norms.library import padding

TABLE = Path("src/nearpeak/kernels/tables/sm90_choices.json")
CLOSE = 1.03
_ONE_LINE = re.compile(r'\{\s+"features": \{[^{}]*\},\s+"relative": \{[^{}]*\}\s+\}')
"""A cell of the table."""
PROCESSORS = 132
"""Of an H200."""
ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
FEATURES = {
    "attention": ATTENTION_FEATURES,
    "attention_backward": ATTENTION_BACKWARD_FEATURES,
    "gemm": GEMM_FEATURES,
    "gemm_fp8": GEMM_FEATURES,
    **dict.fromkeys(("rms_norm", "rms_norm_backward", "layer_norm", "layer_norm_backward"), NORM_FEATURES),
}
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
    seed: int | None = None
    """Of a random cell."""

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
            yield from (replace(cell, seed=row["seed"]) for cell in _random_cell(row))
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
    if row["pass"] == "both":
        return
    backward = row["pass"] == "backward"
    packed = "lengths" in shape
    queries, keys = (max(shape["lengths"]),) * 2 if packed else (shape["queries"], shape["keys"])
    sequences, total = (len(shape["lengths"]), sum(shape["lengths"])) if packed else (shape["batch"], 0)
    if backward:
        extent = key_tiles(shape["key_heads"], total or sequences * keys, sequences, PROCESSORS)
    else:
        extent = shape["heads"] * (effective_batches(total, queries) if packed else sequences)
    value_dim = shape.get("value_dim", shape["dim"])
    values = (
        extent, shape["heads"] // shape["key_heads"], queries, keys, shape["dim"], value_dim,
        max(shape["dim"], value_dim) > MOST_NARROW_DIM, shape["causal"], shape.get("window") or 0, packed,
        packed or shape["layout"] == "tokens first", ITEM_BYTES[dtype],
    )  # fmt: skip
    if packed and "varlen" in row["seconds"]:  # which "flash" runs
        row = {**row, "seconds": {**row["seconds"], "flash": row["seconds"]["varlen"]}, "candidates": ("flash",)}
    name = "attention_backward" if backward else "attention"
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
    strides = rows if flags.get("a_by_columns") else depth, columns if flags.get("b_by_columns") else depth
    values = (
        rows, columns, depth, itemsize, *(flags.get(name, False) for name in [*GEMM_FEATURES][4:-3]), share,
        is_odd(columns * (2 if flags.get("gated") else 1), itemsize), any(is_odd(one, itemsize) for one in strides),
    )  # fmt: skip
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


def table_cell(cell: Cell) -> dict[str, Any]:
    """A cell as the table has it: features that are 0 are left out."""
    fastest = min(cell.seconds.values())
    return {
        "features": {name: int(value) for name, value in cell.features.items() if value},
        "relative": {name: round(seconds / fastest, 4) for name, seconds in cell.seconds.items()},
    }


def chosen_losses(cells: Sequence[Cell], others: Sequence[Cell]) -> list[float]:
    """What the choices by other cells lose in cells of one operation."""
    if not cells:
        return []
    order = ("torch", "cudnn", "flash", "gluon", "triton")  # of candidates
    features = FEATURES[cells[0].operation]
    model = read_model([table_cell(other) for other in others], features)
    losses = []
    for cell in cells:
        names = tuple(name for name in order if name in cell.seconds)
        choice = choose(cell.operation, names, features, [*cell.features.values()], model)
        losses.append(cell.losses[choice.backend])
    return losses


def describe(cells: Sequence[Cell]) -> str:
    """Some lines on how good the choices by these cells are."""
    random = [cell for cell in cells if cell.seed is not None]
    # the two products of a backward pass were timed together: neither decides for the other
    without_cell = [
        loss for cell in random for loss in chosen_losses([cell], [o for o in cells if o.seconds != cell.seconds])
    ]
    without_seed = [
        loss
        for seed in dict.fromkeys(cell.seed for cell in random)
        for loss in chosen_losses([o for o in random if o.seed == seed], [o for o in cells if o.seed != seed])
    ]
    kinds = {"in the table": chosen_losses(cells, cells), "one left out": without_cell, "seed left out": without_seed}
    return "\n".join(_line(cells[0].operation, name, losses) for name, losses in kinds.items() if losses)


def _line(operation: str, kind: str, losses: Sequence[float]) -> str:
    mean, share = exp(sum(losses) / len(losses)) - 1, sum(loss > log(CLOSE) for loss in losses) / len(losses)
    return (
        f"{operation:20s} {kind:13s} {len(losses):4d} cells: {mean:6.2%} slower, {share:4.0%} by more than 3 %,"
        f" worst {exp(max(losses)):.2f}"
    )


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
            operations[name] = {"cells": [table_cell(cell) for cell in ours]}
            print(describe(ours))
    first = json.loads(options.results[0].read_text())
    table = {
        "machine": first["machine"],
        "versions": first["versions"],
        "results": [path.name for path in options.results],
        "operations": operations,
    }
    text = json.dumps(table, indent=1)
    options.out.write_text(_ONE_LINE.sub(lambda match: " ".join(match[0].split()), text) + "\n")


if __name__ == "__main__":
    main()
