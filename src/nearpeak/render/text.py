"""Plain text for terminals: `Style` (colors and bars) and aligned tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Color = Literal["bold", "dim", "red", "green", "yellow", "blue", "magenta", "cyan"]

_CODES: dict[Color, int] = {
    "bold": 1,
    "dim": 2,
    "red": 31,
    "green": 32,
    "yellow": 33,
    "blue": 34,
    "magenta": 35,
    "cyan": 36,
}
_EIGHTHS = " ▏▎▍▌▋▊▉"


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """What the place that a report goes to can show."""

    color: bool = False
    """In the colors that the terminal's owner chose: only the sixteen basic ones are used."""
    blocks: bool = False
    """Bars of block characters, to an eighth of a column."""

    def paint(self, text: str, color: Color) -> str:
        """The text in a color, where there are colors.

        >>> Style().paint("idle", "red"), Style(color=True).paint("idle", "red")
        ('idle', '\\x1b[31midle\\x1b[0m')
        """
        return f"\x1b[{_CODES[color]}m{text}\x1b[0m" if self.color and text else text

    def bar(self, columns: float) -> str:
        """A bar of a length in columns; what is more than nothing shows, where eighths can.

        >>> Style().bar(3.4), Style(blocks=True).bar(3.5), Style(blocks=True).bar(0.01)
        ('###', '███▌', '▏')
        """
        if columns <= 0.0:
            return ""
        if not self.blocks:
            return "#" * round(columns)
        eighths = max(1, round(8 * columns))
        return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


PLAIN = Style()


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
