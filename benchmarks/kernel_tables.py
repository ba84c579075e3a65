"""The results of `benchmarks/kernels.py` as tables of Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kernel_attention_tables import attention_short, attention_table, decoding_table, memory_table
from kernel_product_tables import flops_table, linear_table, products_short
from markdown_table import table

Row = Mapping[str, Any]
COPY_BARS = {"forward": 0.92, "backward": 0.85, "eight bits": 0.9}
SAME = 1.02
"""What takes so many times as long as another is as fast."""
TRANSPOSE_BAR, PRODUCTS_BAR, MEMORY_BAR, LAUNCH_BAR = 5.0, 1.25, 2**30, 1.5


def microseconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1e6:.0f}" if seconds >= 100e-6 else f"{seconds * 1e6:.1f}"


def best_other(row: Row) -> str:
    """The fastest way beside nearpeak; empty where there is none."""
    others = {name: value for name, value in row["seconds"].items() if name != "nearpeak"}
    return min(others, key=lambda name: others[name]) if others else ""


def times_faster(row: Row) -> str:
    best = best_other(row)
    return f"{row['seconds'][best] / row['seconds']['nearpeak']:.2f}" if best else "-"


def _moved(rows: Sequence[Row], ways: Sequence[str], label: str) -> str:
    head = ["operation", "pass", label, "nearpeak, us", "of copy", *(f"{way}, us" for way in ways), "best other"]
    body = [
        [
            row["operation"],
            row["pass"],
            f"{row['rows']} x {row['columns']}",
            microseconds(row["seconds"]["nearpeak"]),
            f"{row['of_copy'] * 100:.0f} %",
            *(microseconds(row["seconds"].get(way)) for way in ways),
            times_faster(row),
        ]
        for row in rows
    ]
    return table(head, body, 3)


def rows_table(rows: Sequence[Row]) -> str:
    """`best other` is how many times as long the fastest of the others takes."""
    return _moved(rows, ("eager", "compile", "liger"), "rows x columns")


def copies_table(rows: Sequence[Row]) -> str:
    return _moved(rows, ("eager", "compile", "index_select"), "size")


def losses_table(rows: Sequence[Row]) -> str:
    head = ["operation", "way", "ms", "of three products", "more memory, MiB"]
    body = []
    for row in rows:
        for way, seconds in row["seconds"].items():
            ratio = row["of_products"].get(way)
            extra = row["extra_bytes"].get(way)
            body.append(
                [
                    f"{row['operation']}, {row['tokens']} x {row['vocabulary']}",
                    way + (" (waits for the GPU)" if way in row["waiting"] else ""),
                    f"{seconds * 1e3:.2f}",
                    "-" if ratio is None else f"{ratio:.2f}",
                    "-" if extra is None else f"{extra / 2**20:.1f}",
                ]
            )
    return table(head, body, 2)


def launches_table(rows: Sequence[Row]) -> str:
    head = ["operation", "nearpeak, us", "torch, us", "torch's operations", "nearpeak / torch"]
    body = [
        [
            row["operation"],
            f"{row['seconds']['nearpeak'] * 1e6:.2f}",
            f"{row['seconds']['eager'] * 1e6:.2f}",
            str(row["torch_ops"]),
            f"{row['ratio']:.2f}",
        ]
        for row in rows
    ]
    return table(head, body, 1)


TABLES = {
    "losses": losses_table,
    "copies": copies_table,
    "launch": launches_table,
    "attention": attention_table,
    "decoding": decoding_table,
    "attention_memory": memory_table,
    "products": flops_table,
    "experts": flops_table,
    "linear_attention": linear_table,
    "rows": rows_table,
}


def head_line(content: Row) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
    rate = content["copy_bytes_per_second"] / 1e12
    return f"{content['machine']}, {versions}, {content['date'][:10]}; a copy moves {rate:.2f} TB/s"


def shown(content: Row, only: Sequence[str] = ()) -> str:
    """All tables, what failed, and what is short of a bar."""
    parts = [head_line(content)]
    parts += [TABLES[name](content[name]) for name in TABLES if content.get(name) and (not only or name in only)]
    lines = [f"- {text}" for text in short_of_bars(content)]
    parts.append("Short of a bar:\n" + "\n".join(lines) if lines else "No bar is missed.")
    failed = [f"- {name}: {why}" for name, why in content["failed"].items()]
    for row in (row for name in TABLES if name != "launch" for row in content.get(name, ())):
        size = next(row[name] for name in ("size", "columns", "vocabulary", "tokens") if name in row)
        failed += [
            f"- {row['operation']} {row.get('pass', '')} {size}, {way}: {why}" for way, why in row["failed"].items()
        ]
    if failed:
        parts.append("Failed:\n" + "\n".join(failed))
    return "\n\n".join(parts)


def short_of_bars(content: Row) -> list[str]:
    """What was wanted of the kernels, and is not there."""
    found = []
    for row in content.get("rows", ()):
        best = best_other(row)
        what = f"{row['operation']} {row['pass']} {row['rows']} x {row['columns']}"
        if row["of_copy"] < COPY_BARS[row["pass"]]:
            found.append(f"{what}: {row['of_copy'] * 100:.1f} % of a copy")
        if best and row["seconds"][best] * SAME < row["seconds"]["nearpeak"]:
            found.append(f"{what}: {best} takes {row['seconds'][best] / row['seconds']['nearpeak']:.2f} of its time")
    for row in content.get("copies", ()):
        what = f"{row['operation']} {row['pass']}"
        if row["operation"].startswith(("quantise", "dequantise")) and row["of_copy"] < COPY_BARS["eight bits"]:
            found.append(f"{what}: {row['of_copy'] * 100:.0f} % of a copy")
        eager = row["seconds"].get("eager")
        if row["operation"] == "transpose_copy" and eager and eager < TRANSPOSE_BAR * row["seconds"]["nearpeak"]:
            found.append(f"{what}: {eager / row['seconds']['nearpeak']:.2f} times as fast as eager")
        if row["operation"].startswith("adamw") and eager and eager < row["seconds"]["nearpeak"]:
            found.append(f"{what}: eager takes {eager / row['seconds']['nearpeak']:.2f} of its time")
    for row in content.get("losses", ()):
        own, bar = row["seconds"]["nearpeak"], row["bar_seconds"]
        extra, ratio = row["extra_bytes"].get("nearpeak"), row["of_products"].get("nearpeak")
        if bar and own > bar:
            found.append(f"{row['operation']}: {own * 1e3:.2f} ms, and not {bar * 1e3:.2f}")
        if ratio is not None and ratio > PRODUCTS_BAR:
            found.append(f"{row['operation']}: {ratio:.2f} times the three products")
        allowed = MEMORY_BAR if ratio is not None else 2**20  # losses of rows and sums are some kilobytes
        if extra is not None and extra > allowed:
            found.append(f"{row['operation']}: {extra / 2**20:.0f} MiB more memory")
    for row in content.get("launch", ()):
        if row["ratio"] > LAUNCH_BAR:
            found.append(f"a call of {row['operation']}: {row['ratio']:.2f} times that of torch")
    return found + attention_short(content) + products_short(content)
