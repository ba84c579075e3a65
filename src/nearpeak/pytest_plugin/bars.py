"""`Bars`: what a marker asks of the measurements of a test, and how its texts are read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar, get_args

from nearpeak.errors import UsageError, did_you_mean
from nearpeak.measure.flags import Grade

Floor = Literal["as written", "fused", "ideal"]

GRADES: tuple[Grade, ...] = get_args(Grade)
"""The best first."""
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ns": 1e-9}
_BYTES = {
    "B": 1.0,
    "kB": 1e3,
    "KB": 1e3,
    "MB": 1e6,
    "GB": 1e9,
    "TB": 1e12,
    "KiB": 2.0**10,
    "MiB": 2.0**20,
    "GiB": 2.0**30,
    "TiB": 2.0**40,
}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """What is asked of a measurement; None where nothing is. Times are seconds, memory is bytes."""

    of_bound: float | None = None
    """The share of the bound that must be reached at least."""
    floor: Floor = "as written"
    """Which of a step's floors is the bound."""
    step_time: float | None = None
    peak_memory: float | None = None
    no_finding_above: float | None = None
    """No finding may save more than this share of the step."""
    ignore: tuple[str, ...] = ()
    """Findings that do not count: a rule, or a rule at a line ("unfused-norm@model.py:41")."""
    baseline: str | None = None
    within: float | None = None
    """How much longer than the baseline it may take."""
    device: str | None = None
    """What the test needs: "gpu", "cpu", or a device by the name that its driver gives."""
    grade: Grade = "B"
    """A measurement with a worse grade decides nothing."""

    @property
    def asked(self) -> tuple[str, ...]:
        """The bars that a measurement is held against."""
        names = ("of_bound", "step_time", "peak_memory", "no_finding_above", "baseline")
        return tuple(name for name in names if getattr(self, name) is not None)


def bars_of(markers: Iterable[tuple[Sequence[Any], Mapping[str, Any]]]) -> Bars:
    """The bars of a test's markers, the nearest first: what it says counts.

    >>> bars_of([((), {"step_time": "12 ms"}), ((), {"step_time": "1 s", "of_bound": "50%"})]).step_time
    0.012
    """
    given: dict[str, Any] = {}
    for positional, named in markers:
        if positional:
            raise UsageError(f"The marker nearpeak takes names, as in of_bound=0.5, and got {positional[0]!r}.")
        given = {**named, **given}
    valid = [field.name for field in fields(Bars)]
    for name in given:
        if name not in valid:
            raise UsageError(f"The marker nearpeak has no {name!r}. {did_you_mean(name, valid)}")
    bars = Bars(**{name: _READ[name](name, value) for name, value in given.items() if value is not None})
    if (bars.baseline is None) != (bars.within is None):
        raise UsageError('The marker nearpeak takes baseline="name" and within="5%" together.')
    return bars


def share(name: str, value: Any) -> float:
    """A share as 0.05, "5%" or "5 %".

    >>> share("within", "5%"), share("within", 0.05)
    (0.05, 0.05)
    """
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*(%?)\s*", value)
        number = float(match[1]) / (100 if match[2] else 1) if match else None
    else:
        number = _number(value)
    if number is None:
        raise UsageError(f'{name}={value!r} is no share: write 0.05 or "5%".')
    return number


def seconds(name: str, value: Any) -> float:
    """A time as "12 ms", or a number of seconds.

    >>> seconds("step_time", "12 ms"), seconds("step_time", 0.5)
    (0.012, 0.5)
    """
    return _quantity(name, value, _SECONDS, 'a time: write "12 ms", or a number of seconds')


def size(name: str, value: Any) -> float:
    """An amount of memory as "3 GiB", or a number of bytes.

    >>> size("peak_memory", "3 GiB"), size("peak_memory", "500 MB")
    (3221225472.0, 500000000.0)
    """
    return _quantity(name, value, _BYTES, 'an amount of memory: write "3 GiB", or a number of bytes')


def _quantity(name: str, value: Any, units: Mapping[str, float], wanted: str) -> float:
    number = _number(value)
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([^\W\d_]+)\s*", value)
        number = float(match[1]) * units[match[2]] if match and match[2] in units else None
    if number is None or number <= 0:
        raise UsageError(f"{name}={value!r} is not {wanted}. Units: {', '.join(units)}.")
    return number


def _number(value: Any) -> float | None:
    """A finite number that is not negative."""
    fits = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < float("inf")
    return float(value) if fits else None


def _part_of_one(name: str, value: Any) -> float:
    found = share(name, value)
    if not 0 < found <= 1:
        raise UsageError(f"{name}={value!r}: nothing is faster than its bound. Give a share from 0 to 1, or a percent.")
    return found


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise UsageError(f"{name}={value!r} is no text.")
    return value.strip()


def _file_name(name: str, value: Any) -> str:
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise UsageError(
            f"{name}={value!r} cannot be the name of a file: use letters, digits, '.', '_' and '-', 100 at most."
        )
    return value


def _rules(name: str, value: Any) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(_text(name, one) for one in value)


def _one_of(valid: Sequence[T]) -> Callable[[str, Any], T]:
    def read(name: str, value: Any) -> T:
        if value not in valid:
            raise UsageError(f"{name}={value!r}. Valid: {', '.join(map(repr, valid))}.")
        return valid[valid.index(value)]

    return read


_READ: Mapping[str, Callable[[str, Any], Any]] = {
    "of_bound": _part_of_one,
    "floor": _one_of(get_args(Floor)),
    "step_time": seconds,
    "peak_memory": size,
    "no_finding_above": share,
    "ignore": _rules,
    "baseline": _file_name,
    "within": share,
    "device": _text,
    "grade": _one_of(GRADES[:-1]),
}
"""How the value of each argument is read."""
