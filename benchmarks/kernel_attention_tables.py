"""The results of attention and decoding as tables of Markdown, and what was wanted of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from markdown_table import table

Row = Mapping[str, Any]
WAYS = ("nearpeak", "portable", "cudnn", "flash", "flex")
FASTER, FASTER_CELLS = 1.05, 10
"""Of the forward pass beside cuDNN: so many times its rate, in at least so many cells."""
BACKWARD_LEAST, BACKWARD_CELLS = 0.95, 8
"""Of the backward pass: this share of its rate everywhere, and above it in so many cells."""
RATES = {(128, False, 16384): 640e12, (128, True, 16384): 600e12}
"""FLOP/s of the forward pass, by size of heads, mask and tokens."""
DECODING_BAR, PAGES_BAR = 0.9, 1.1
PAIRS_BAR = 1 / 8
"""Bytes of memory for each pair of a query and a key: a mask in bits would be as much."""
ERRORS_BAR = 2.0
"""Times the largest error of the ways of torch."""


def teraflops(row: Row, way: str) -> float | None:
    seconds = row["seconds"].get(way)
    return None if seconds is None else float(row["flops"] / seconds / 1e12)


def cell(row: Row) -> str:
    return f"{row['dim']} {'causal' if row['causal'] else 'full'} {row['tokens']}"


def attention_table(rows: Sequence[Row]) -> str:
    """TFLOP/s. `of cuDNN` is how many times its rate nearpeak has, and `of flash` that of the portable kernels."""
    head = ["pass", "heads", "mask", "tokens", *(f"{way}, TFLOP/s" for way in WAYS), "of cuDNN", "portable of flash"]
    body = [
        [
            row["pass"],
            f"{row['heads']} x {row['dim']}",
            "causal" if row["causal"] else "full",
            f"{row['batch']} x {row['tokens']}",
            *(_number(teraflops(row, way)) for way in WAYS),
            _times(row, "nearpeak", "cudnn"),
            _times(row, "portable", "flash"),
        ]
        for row in rows
    ]
    return table(head, body, 4)


def decoding_table(rows: Sequence[Row]) -> str:
    """TB/s of the bytes of the cache, and what share of a copy that is."""
    head = ["sequences", "cache", "us", "TB/s", "of copy", "of one piece", "error"]
    body = []
    for row in rows:
        for way, seconds in row["seconds"].items():
            whole = row["seconds"].get("float8" if way.startswith("float8") else "nearpeak")
            error = row["errors"].get(way)
            body.append(
                [
                    f"{row['batch']} x {row['tokens']}",
                    {"nearpeak": "one piece", "float8": "float8, one piece", "sdpa": "sdpa of torch"}.get(way, way),
                    f"{seconds * 1e6:.1f}",
                    f"{row['bytes'][way] / seconds / 1e12:.2f}",
                    f"{row['of_copy'][way] * 100:.0f} %",
                    "-" if whole is None or way == "sdpa" else f"{seconds / whole:.2f}",
                    "-" if error is None else f"{error:.1e}",
                ]
            )
    return table(head, body, 2)


def memory_table(rows: Sequence[Row]) -> str:
    head = ["tokens", "pass", "way", "more memory, MiB", "a byte for each pair, MiB", "ms", "error"]
    body = []
    for row in rows:
        for way, seconds in row["seconds"].items():
            extra, error = row["extra_bytes"].get(way), row["errors"].get(way)
            body.append(
                [
                    str(row["tokens"]),
                    row["pass"],
                    way,
                    "-" if extra is None else f"{extra / 2**20:.0f}",
                    f"{row['pair_bytes'] / 2**20:.0f}",
                    f"{seconds * 1e3:.1f}",
                    "-" if error is None else f"{error:.1e}",
                ]
            )
    return table(head, body, 3)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def _times(row: Row, way: str, other: str) -> str:
    if way not in row["seconds"] or other not in row["seconds"]:
        return "-"
    return f"{row['seconds'][other] / row['seconds'][way]:.2f}"


def attention_short(content: Row) -> list[str]:
    """What was wanted, and is not there."""
    found = []
    for name in ("forward", "backward"):
        found += _pass_short(name, [row for row in content.get("attention", ()) if row["pass"] == name])
    for row in content.get("decoding", ()):
        what = f"decoding {row['batch']} x {row['tokens']}"
        for way, share in row["of_copy"].items():
            if way in ("nearpeak", "float8") and share < DECODING_BAR:
                found.append(f"{what}, {way}: {share * 100:.0f} % of a copy")
            whole = row["seconds"]["float8" if way.startswith("float8") else "nearpeak"]
            if "pages" in way and row["seconds"][way] > PAGES_BAR * whole:
                found.append(f"{what}, {way}: {row['seconds'][way] / whole:.2f} times one piece")
    for row in content.get("attention_memory", ()):
        extra = row["extra_bytes"].get("nearpeak")
        if extra is not None and extra > PAIRS_BAR * row["pair_bytes"]:
            found.append(f"attention to {row['tokens']} tokens: {extra / 2**20:.0f} MiB more memory")
    return found


def _pass_short(name: str, rows: Sequence[Row]) -> list[str]:
    found, ratios = [], []
    for row in rows:
        what = f"attention {name} {cell(row)}"
        own, rate = teraflops(row, "nearpeak"), RATES.get((row["dim"], row["causal"], row["tokens"]))
        if name == "forward" and rate and own and own * 1e12 < rate:
            found.append(f"{what}: {own:.0f} TFLOP/s, and not {rate / 1e12:.0f}")
        if row["repeated"]["different"]:
            found.append(f"{what}: {row['repeated']['different']} of {row['repeated']['runs']} runs differ")
        portable, flash = teraflops(row, "portable"), teraflops(row, "flash")
        if portable and flash and portable < flash:
            found.append(f"{what}: the portable kernel has {portable / flash:.2f} of the rate of FlashAttention-2")
        errors = row["errors"]
        of_torch = [error for way, error in errors.items() if way not in ("nearpeak", "portable")]
        if of_torch and errors.get("nearpeak", 0.0) > ERRORS_BAR * max(of_torch):
            found.append(f"{what}: an error of {errors['nearpeak']:.1e}, and torch's is {max(of_torch):.1e}")
        cudnn = teraflops(row, "cudnn")
        if own and cudnn:
            ratios.append(own / cudnn)
            if ratios[-1] < (1.0 if name == "forward" else BACKWARD_LEAST):
                found.append(f"{what}: {ratios[-1]:.2f} of the rate of cuDNN")
    wanted, cells = (FASTER, FASTER_CELLS) if name == "forward" else (1.0, BACKWARD_CELLS)
    better = sum(ratio >= wanted for ratio in ratios)
    if ratios and better < min(cells, len(ratios)):
        found.append(f"attention {name}: {better} cells at {wanted:.2f} of the rate of cuDNN, and not {cells}")
    return found
