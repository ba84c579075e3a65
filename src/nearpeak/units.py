"""How quantities are written, once for all reports.

Inside the code every quantity is in its base unit: seconds, bytes, FLOP, bytes/s, FLOP/s, hertz, watts. Prefixes are
decimal (GB = 1e9 bytes, TB/s = 1e12 bytes per second) except for GiB = 2**30, which is used for memory capacity.
A fused multiply-add counts as 2 FLOP.
"""

from __future__ import annotations

import math
import re
from typing import Literal

GIB = 2**30

DTYPE_BYTES: dict[str, float] = {
    "float64": 8,
    "float32": 4,
    "tfloat32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8": 1,
    "int8": 1,
    "float6": 0.75,
    "float4": 0.5,
    "int4": 0.5,
}
"""Bytes of one element, by the dtype names that ceilings use."""

_PREFIXES = {-9: "n", -6: "u", -3: "m", 0: "", 3: "k", 6: "M", 9: "G", 12: "T", 15: "P"}


def quantity(value: float | None, unit: str, digits: int = 3) -> str:
    """`value` with a decimal prefix and `digits` significant digits; "-" for a value that was not measured.

    >>> quantity(4.25e12, "B/s"), quantity(12.3456e-6, "s"), quantity(0, "s"), quantity(None, "s")
    ('4.25 TB/s', '12.3 us', '0 s', '-')
    """
    if value is None:
        return "-"
    if value == 0 or not math.isfinite(value):
        return f"{value:g} {unit}"
    exponent = max(-9, min(15, 3 * math.floor(math.log10(abs(value)) / 3)))
    text = significant(value / 10.0**exponent, digits)
    if float(text) >= 1000 and exponent < 15:
        exponent += 3
        text = significant(value / 10.0**exponent, digits)
    return f"{text} {_PREFIXES[exponent]}{unit}"


UNITS: dict[Literal["s", "B"], dict[str, float]] = {
    "s": {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ns": 1e-9},
    "B": {"B": 1.0, "kB": 1e3, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
    | {"KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40},
}
"""The units that are read, by the base unit that they are multiples of."""


def parse_quantity(text: str, unit: Literal["s", "B"]) -> float | None:
    """A quantity that a person wrote, in its base unit; None if it has no number or another unit.

    >>> parse_quantity("80 GB", "B"), parse_quantity("80GiB", "B"), parse_quantity("12 ms", "s")
    (80000000000.0, 85899345920.0, 0.012)
    >>> parse_quantity("80 G", "B") is None
    True
    """
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([^\W\d_]+)\s*", text)
    factor = UNITS[unit].get(match[2]) if match else None
    return None if match is None or factor is None else float(match[1]) * factor


def significant(value: float, digits: int = 3) -> str:
    """`value` rounded to `digits` significant digits, without an exponent and without losing integer digits.

    >>> significant(0.012345), significant(1234.5), significant(9.999)
    ('0.0123', '1234', '10.0')
    """
    if value == 0:
        return "0"
    rounded = float(f"{value:.{digits - 1}e}")
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(rounded))))
    return f"{rounded:.{decimals}f}" if decimals else f"{value:.0f}"


def seconds(value: float | None, digits: int = 3) -> str:
    """A duration: `seconds(31.4e-6)` is "31.4 us"."""
    return quantity(value, "s", digits)


def seconds_between(middle: float, low: float, high: float) -> str:
    """A duration with its interval, all three in one unit and to the digit that the interval supports.

    >>> seconds_between(31.4142e-6, 31.2999e-6, 31.52e-6)
    '31.41 us [31.30, 31.52]'
    """
    scale, prefix = 1.0, ""
    for exponent in (-9, -6, -3, 0):
        scale, prefix = 10.0**exponent, _PREFIXES[exponent]
        if abs(middle) < scale * 1000:
            break
    spread = max((high - low) / scale, abs(middle) / scale * 1e-4, 1e-12)
    decimals = min(6, max(0, 1 - math.floor(math.log10(spread))))
    return f"{middle / scale:.{decimals}f} {prefix}s [{low / scale:.{decimals}f}, {high / scale:.{decimals}f}]"


def gibibytes(value: float | None) -> str:
    """A memory size: `gibibytes(2**31)` is "2.00 GiB"."""
    return "-" if value is None else f"{significant(value / GIB)} GiB"


def percent(value: float | None, digits: int = 1) -> str:
    """A share: `percent(0.0734)` is "7.3 %"."""
    return "-" if value is None else f"{100 * value:.{digits}f} %"
