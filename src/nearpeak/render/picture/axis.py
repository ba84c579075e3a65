"""`Axis`: from values to pixels, with round ticks; linear or logarithmic."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """From values to pixels. Inside, a logarithmic axis works on log10 of the values."""

    log: bool
    low: float
    high: float
    start: float
    end: float

    @staticmethod
    def around(
        values: Sequence[float], *, log: bool, start: float, end: float, limits: tuple[float, float] | None
    ) -> Axis:
        """An axis over `limits`, or over `values` with a little room, between two pixels."""
        usable = [value for value in (limits or values) if value > 0 or not log]
        inner = [math.log10(value) if log else value for value in usable] or [0.0, 1.0]
        low, high = min(inner), max(inner)
        if limits is None:
            least = math.log10(1.5) if log else abs(high) * 0.1
            room = max(0.05 * (high - low), (least - (high - low)) / 2) or 0.5
            low, high = low - room, high + room
        return Axis(log=log, low=low, high=high, start=start, end=end)

    def place(self, value: float) -> tuple[float, bool]:
        """The pixel, and whether the value itself is shown there; otherwise it is the nearer edge."""
        if self.log and value <= 0:
            return self.start, False
        inner = math.log10(value) if self.log else value
        clamped = min(max(inner, self.low), self.high)
        share = (clamped - self.low) / (self.high - self.low) if self.high > self.low else 0.5
        return self.start + share * (self.end - self.start), abs(clamped - inner) < 1e-9 * max(1.0, abs(inner))

    def ticks(self, *, whole: bool = False) -> list[float]:
        """Round values inside the axis, about four to nine of them; of counts, which are `whole`, no fractions."""
        if not self.log:
            return _round_ticks(self.low, self.high, whole=whole)
        decades = range(math.floor(self.low), math.ceil(self.high) + 1)
        for digits in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7)):
            values = [digit * 10.0**decade for decade in decades for digit in digits]
            inside = [value for value in values if self.low <= math.log10(value) <= self.high]
            if len(inside) >= 4:
                return inside[:: math.ceil(len(inside) / 9)]
        return _round_ticks(10.0**self.low, 10.0**self.high)


def _round_ticks(low: float, high: float, *, whole: bool = False) -> list[float]:
    span = high - low
    if span <= 0:
        return [low]
    least = 10.0 ** math.floor(math.log10(span / 4))
    step = next(least * factor for factor in (1, 2, 2.5, 5, 10) if span / (least * factor) <= 8)
    if whole and not step.is_integer():
        least = max(1.0, least)
        step = next(least * factor for factor in (1, 2, 5, 10) if span / (least * factor) <= 9)
    first = math.ceil(low / step)
    return [number * step for number in range(first, math.floor(high / step) + 1)]


def trim_zeros(text: str) -> str:
    """A tick without zeros that say nothing: "10.0 ms" is "10 ms"."""
    return re.sub(r"(\.\d*?)0+(?!\d)", lambda match: match[1].rstrip("."), text)
