"""The results of products, experts and linear attention as tables of Markdown, and what was wanted of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from markdown_table import table

Row = Mapping[str, Any]
PRODUCT_BAR, EIGHT_BAR = 1.03, 1.05
"""Times what torch takes, at the most: products beside cuBLAS, and those of 8 bits beside `_scaled_mm`."""
UNIFORM_BAR, SKEWED_BAR = 600e12, 0.95
"""FLOP/s of grouped products where tokens choose experts uniformly; and the share of that under Beta(1, 5)."""
LAYER_BAR = 1.4
"""Times the rate of the fastest other layer of experts, both passes."""
ERRORS_BAR = 2.0
"""Times the largest error of the others."""
LINEAR = ("nearpeak", "naive", "quadratic")
SOFTMAX = ("attention", "sdpa")
"""Ways to attention by softmax; the faster of them is what linear attention is beside."""


def teraflops(row: Row, way: str) -> float | None:
    seconds = row["seconds"].get(way)
    return None if seconds is None else float(row["flops"] / seconds / 1e12)


def others(row: Row) -> dict[str, float]:
    """Seconds of all ways but nearpeak's."""
    return {name: seconds for name, seconds in row["seconds"].items() if name != "nearpeak"}


def best_other(row: Row) -> str:
    found = others(row)
    return min(found, key=lambda name: found[name]) if found else ""


def flops_table(rows: Sequence[Row]) -> str:
    """A line for each way: TFLOP/s, and how many times the rate of the fastest other nearpeak has."""
    head = ["operation", "pass", "size", "kind", "way", "ms", "TFLOP/s", "nearpeak / best other", "error"]
    body = []
    for row in rows:
        best = best_other(row)
        for way, seconds in row["seconds"].items():
            error = row["errors"].get(way)
            ratio = row["seconds"][best] / seconds if way == "nearpeak" and best else None
            body.append(
                [
                    row["operation"],
                    row["pass"],
                    row["size"],
                    row["kind"] or "-",
                    way + (" (waits for the GPU)" if way in row["waiting"] else ""),
                    f"{seconds * 1e3:.3f}",
                    f"{row['flops'] / seconds / 1e12:.0f}",
                    "-" if ratio is None else f"{ratio:.3f}",
                    "-" if error is None else f"{error:.1e}",
                ]
            )
    return table(head, body, 5)


def linear_table(rows: Sequence[Row]) -> str:
    """Milliseconds; `-` is what does not fit into memory, or does not run."""
    ways = (*LINEAR, *SOFTMAX)
    head = ["pass", "sequences", *(f"{way}, ms" for way in ways), "softmax / nearpeak"]
    body = []
    for row in rows:
        fastest = softmax_seconds(row)
        body.append(
            [
                row["pass"],
                f"{row['batch']} x {row['tokens']}",
                *(_milliseconds(row["seconds"].get(way)) for way in ways),
                "-" if fastest is None else f"{fastest / row['seconds']['nearpeak']:.2f}",
            ]
        )
    return table(head, body, 2) + "\n\n" + " ".join(crossover_text(rows, step) for step in ("forward", "both"))


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.3f}"


def softmax_seconds(row: Row) -> float | None:
    """Of the faster way to attention by softmax."""
    return min((row["seconds"][way] for way in SOFTMAX if way in row["seconds"]), default=None)


def crossover(rows: Sequence[Row], step: str) -> float | None:
    """From how many tokens on linear attention is faster than softmax, between sizes by logarithms of both.

    The smallest size where it is faster from there on at every size; None where it is not so even at the largest.
    """
    found: float | None = None
    before: tuple[float, float] | None = None
    for row in sorted((row for row in rows if row["pass"] == step), key=lambda row: row["tokens"]):
        softmax = softmax_seconds(row)
        if softmax is None:
            continue
        gain, tokens = math.log(softmax / row["seconds"]["nearpeak"]), math.log(row["tokens"])
        if gain <= 0.0:
            found = None
        elif found is None:
            found = row["tokens"]
            if before is not None and before[1] <= 0.0:
                share = -before[1] / (gain - before[1])
                found = math.exp(before[0] + share * (tokens - before[0]))
        before = tokens, gain
    return found


def crossover_text(rows: Sequence[Row], step: str) -> str:
    what = "Forward" if step == "forward" else "With the backward pass"
    found = crossover(rows, step)
    if found is None:
        return f"{what}, linear attention is not faster at the largest size."
    if found <= min(row["tokens"] for row in rows if row["pass"] == step):
        return f"{what}, linear attention is faster at every size."
    return f"{what}, linear attention is faster from {found:.0f} tokens on."


def products_short(content: Row) -> list[str]:
    """What was wanted of the three sections, and is not there."""
    found = []
    for row in content.get("products", ()):
        what = _what(row)
        own = row["seconds"]["nearpeak"]
        if row["operation"] == "product":
            found += _behind(what, own, row["seconds"].get("cublas"), PRODUCT_BAR, "cuBLAS")
        elif row["operation"] == "fp8":
            found += _behind(what, own, row["seconds"].get("scaled_mm"), EIGHT_BAR, "_scaled_mm")
        else:
            best = best_other(row)
            found += _behind(what, own, row["seconds"].get(best), 1.0, best or "another way")
        found += _error_short(what, row)
    return found + _experts_short(content.get("experts", ())) + _linear_short(content.get("linear_attention", ()))


def _what(row: Row) -> str:
    return f"{row['operation']} {row['pass']} {row['size']}" + (f", {row['kind']}" if row["kind"] else "")


def _behind(what: str, own: float, other: float | None, bar: float, name: str) -> list[str]:
    if other is None:
        return [f"{what}: {name} did not run, and nothing is known of this bar"]
    return [f"{what}: {own / other:.3f} times as long as {name}"] if own > bar * other else []


def _error_short(what: str, row: Row) -> list[str]:
    errors = row["errors"]
    of_others = [error for way, error in errors.items() if way != "nearpeak"]
    if of_others and errors.get("nearpeak", 0.0) > ERRORS_BAR * max(of_others):
        return [f"{what}: an error of {errors['nearpeak']:.1e}, and the others' is {max(of_others):.1e}"]
    return []


def _experts_short(rows: Sequence[Row]) -> list[str]:
    found, rates = [], {}
    for row in rows:
        what = _what(row)
        found += _error_short(what, row)
        if row["operation"] == "grouped_product" and row["pass"] == "forward":
            rates[row["kind"]] = row["flops"] / row["seconds"]["nearpeak"]
        if row["operation"] == "experts layer" and row["pass"] == "both":
            best = best_other(row)
            if not best:
                found.append(f"{what}: nothing else ran, and nothing is known of this bar")
            elif row["seconds"][best] < LAYER_BAR * row["seconds"]["nearpeak"]:
                ratio = row["seconds"][best] / row["seconds"]["nearpeak"]
                found.append(f"{what}: {ratio:.2f} times the rate of {best}, and not {LAYER_BAR}")
    uniform, skewed = rates.get("uniform"), rates.get("beta")
    if uniform is not None and uniform < UNIFORM_BAR:
        found.append(f"grouped_product, uniform: {uniform / 1e12:.0f} TFLOP/s, and not {UNIFORM_BAR / 1e12:.0f}")
    if uniform is not None and skewed is not None and skewed < SKEWED_BAR * uniform:
        found.append(f"grouped_product, beta: {skewed / uniform * 100:.0f} % of the rate with uniform choices")
    return found


def _linear_short(rows: Sequence[Row]) -> list[str]:
    found = []
    for step in dict.fromkeys(row["pass"] for row in rows):
        mine = [row for row in rows if row["pass"] == step]
        where = crossover(mine, step)
        if where is None:
            found.append(f"linear_attention {step}: not faster than attention at the largest size")
        for row in mine:
            naive, softmax = row["seconds"].get("naive"), softmax_seconds(row)
            below = where is None or row["tokens"] < where
            if below and naive is not None and softmax is not None and naive < softmax:
                found.append(f"linear_attention {step} {row['tokens']}: the naive form is faster than attention")
    for row in rows:
        found += _error_short(f"linear_attention {row['pass']} {row['tokens']}", row)
    return found
