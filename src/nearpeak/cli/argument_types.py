"""Types of arguments: numbers with k, shares with %, NAME=VALUE, and ranges."""

from __future__ import annotations

import argparse
import re
from typing import Literal

Value = int | float | bool | str

MOST_VALUES = 10_000
_SUFFIXES = {"k": 2**10, "m": 2**20, "g": 2**30}


def value(text: str) -> Value:
    """An int, a float, a bool, or the text itself. A whole number may end in k, m or g: 2**10, 2**20, 2**30.

    >>> value("8k"), value("0.5"), value("true"), value("bfloat16")
    (8192, 0.5, True, 'bfloat16')
    """
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if match := re.fullmatch(r"([+-]?\d+)([kmg]?)", text.lower()):
        return int(match[1]) * _SUFFIXES.get(match[2], 1)
    if re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", text.lower()):
        return float(text)
    return text


def values(text: str) -> list[Value]:
    """Values by commas, each a value or a range A..B*FACTOR or A..B+STEP; A..B alone doubles.

    >>> values("1k..8k*2"), values("0..6+3,10"), values("a,b")
    ([1024, 2048, 4096, 8192], [0, 3, 6, 10], ['a', 'b'])
    """
    numbers: list[Value] = []
    for part in text.split(","):
        numbers += _range(part) if ".." in part else [value(part)]
    if "" in numbers:
        raise argparse.ArgumentTypeError(f"{text!r} has an empty value")
    repeated = [each for each in numbers if numbers.count(each) > 1] if len(numbers) <= 1000 else []
    if repeated:
        raise argparse.ArgumentTypeError(f"{text!r} has {repeated[0]!r} twice")
    return numbers


def assignment(text: str) -> tuple[str, Value]:
    """NAME=VALUE."""
    name, right = _split(text)
    return name, value(right)


def assignments(text: str) -> tuple[str, list[Value]]:
    """NAME=VALUES."""
    name, right = _split(text)
    return name, values(right)


def derating(text: str) -> dict[str, float]:
    """One factor for all, or NAME=FACTOR by commas.

    >>> derating("0.9"), derating("memory=0.9,matrix=70%")
    ({'memory': 0.9, 'matrix': 0.9, 'vector': 0.9}, {'memory': 0.9, 'matrix': 0.7})
    """
    if "=" not in text:
        return dict.fromkeys(("memory", "matrix", "vector"), share(text))
    pairs = [_split(part) for part in text.split(",")]
    return {name: share(right) for name, right in pairs}


def share(text: str) -> float:
    """A share, as 0.01 or as 1%.

    >>> share("0.02"), share("2%")
    (0.02, 0.02)
    """
    try:
        return float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no share; write 0.01 or 1%") from None


def step_number(text: str) -> int | Literal["all"]:
    """The number of a step, or all of them.

    >>> step_number("3"), step_number("all")
    (3, 'all')
    """
    if text == "all":
        return "all"
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is neither the number of a step nor all")
    return int(text)


def _split(text: str) -> tuple[str, str]:
    name, separator, right = text.partition("=")
    if not separator or not name.isidentifier() or not right:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE, such as rows=4096")
    return name, right


def _range(text: str) -> list[Value]:
    match = re.fullmatch(r"([\w+-]+)\.\.([\w-]+)(?:([*+])(\w+))?", text)
    ends = [value(match[i] or "2") for i in (1, 2, 4)] if match else []
    whole = [end for end in ends if isinstance(end, int) and not isinstance(end, bool)]
    if match is None or len(whole) != 3:
        raise argparse.ArgumentTypeError(f"{text!r} is no range of whole numbers, such as 1k..16k*2 or 0..64+16")
    low, high, step = whole
    adding = match[3] == "+"
    if low > high or step < (1 if adding else 2) or (low < 1 and not adding):
        raise argparse.ArgumentTypeError(
            f"{text!r} never gets from {low} to {high} in steps of {match[3] or '*'}{step}"
        )
    numbers: list[Value] = []
    while low <= high:
        numbers.append(low)
        if len(numbers) > MOST_VALUES:
            raise argparse.ArgumentTypeError(f"{text!r} has more than {MOST_VALUES} values")
        low = low + step if adding else low * step
    return numbers
