"""`Style`: how a report for a terminal is drawn: with or without colour, with block characters or plain ASCII."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Colour = Literal["bold", "dim", "red", "green", "yellow", "blue", "magenta", "cyan"]

_CODES: dict[Colour, int] = {
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

    colour: bool = False
    """In the colours that the terminal's owner chose: only the sixteen basic ones are used."""
    blocks: bool = False
    """Bars of block characters, to an eighth of a column."""

    def paint(self, text: str, colour: Colour) -> str:
        """The text in a colour, where there are colours.

        >>> Style().paint("idle", "red"), Style(colour=True).paint("idle", "red")
        ('idle', '\\x1b[31midle\\x1b[0m')
        """
        return f"\x1b[{_CODES[colour]}m{text}\x1b[0m" if self.colour and text else text

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
