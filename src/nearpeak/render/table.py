"""Aligned plain-text tables, for every report that goes to a terminal or a file."""

from __future__ import annotations

from collections.abc import Sequence


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], align: str = "") -> str:
    """The rows under their headers, columns two spaces apart, no line ending in a space.

    `align` has one letter per column, "l" or "r"; without it the first column is left and the others are right.

    >>> print(table(["op", "time"], [["add", "29.4 us"], ["matmul", "1.20 ms"]]))
    op         time
    ------  -------
    add     29.4 us
    matmul  1.20 ms
    """
    align = align or "l" + "r" * (len(headers) - 1)
    if len(align) != len(headers) or set(align) - set("lr"):
        raise ValueError(f"align must have {len(headers)} letters, each l or r; found {align!r}")
    for row in rows:
        if len(row) != len(headers):
            raise ValueError(f"a row of {len(row)} cells under {len(headers)} headers: {list(row)!r}")
    widths = [max(len(cell) for cell in column) for column in zip(headers, *rows, strict=True)]
    rule = ["-" * width for width in widths]
    return "\n".join(_line(row, widths, align) for row in (headers, rule, *rows))


def _line(cells: Sequence[str], widths: Sequence[int], align: str) -> str:
    padded = [
        cell.ljust(width) if side == "l" else cell.rjust(width)
        for cell, width, side in zip(cells, widths, align, strict=True)
    ]
    return "  ".join(padded).rstrip()
