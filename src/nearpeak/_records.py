"""JSON for frozen dataclasses, derived from their fields, so that a field list is written once.

`to_json` gives plain dictionaries, lists, strings and numbers; `from_json` rebuilds the dataclass and rejects unknown,
missing or mistyped fields. Nothing that is read is ever executed: only declared field types are built.

A number that is read is finite, and an integer has 64 bits. What else a field can be is said by its type (`Seconds`,
`Share`, ...: `Annotated` with `Limits`); what several fields must agree on, by a method `check` that raises ValueError.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import reprlib
import types
import typing
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

T = TypeVar("T")

LARGEST_INTEGER = 2**63
LONGEST_TEXT = 100_000
"""Characters. Names of kernels can have thousands."""
_LONGEST_VALUE = 80
"""Characters of a value in a message."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The numbers that a field can have."""

    least: float
    most: float

    def check(self, value: float, where: str) -> None:
        """ValueError where the number is outside."""
        if not self.least <= value <= self.most:
            raise ValueError(f"{where}: expected a number from {self.least:g} to {self.most:g}, found {brief(value)}")


Seconds = Annotated[float, Limits(least=0.0, most=1e9)]
SignedSeconds = Annotated[float, Limits(least=-1e9, most=1e9)]
"""A difference, or a time from some start."""
MeasuredSeconds = Annotated[float, Limits(least=1e-12, most=1e9)]
"""What no clock reads as zero, so that it can be divided by."""
Amount = Annotated[float, Limits(least=0.0, most=1e30)]
"""Bytes, FLOPs, rates and ratios."""
Rate = Annotated[float, Limits(least=1e-3, most=1e30)]
"""A ceiling: not zero."""
Share = Annotated[float, Limits(least=0.0, most=1.0 + 1e-6)]
"""A part of a whole; sums are rounded."""
Count = Annotated[int, Limits(least=0, most=2**53)]


def brief(value: Any) -> str:
    """A value in a message: the start of its text."""
    text = reprlib.repr(value) if isinstance(value, (dict, list, tuple)) else repr(value)
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 3] + "..."


def to_json(value: Any) -> Any:
    """`value` as plain JSON data; an infinity or NaN becomes None, as JSON has neither."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def from_json(cls: type[T], data: Any) -> T:
    """`data` as an instance of the dataclass `cls`; ValueError says which field is wrong."""
    return typing.cast(T, build(cls, data, cls.__name__))


def build(expected: Any, data: Any, where: str) -> Any:
    """`data` as a value of the type `expected`; ValueError begins with `where`."""
    origin = typing.get_origin(expected)
    arguments = typing.get_args(expected)
    if expected is Any:
        return data
    if origin is Annotated:
        value = build(arguments[0], data, where)
        for limits in arguments[1:]:
            limits.check(value, where)
        return value
    if origin in (typing.Union, types.UnionType):
        return _build_union(arguments, data, where)
    if origin is typing.Literal:
        if data not in arguments:
            raise ValueError(f"{where}: {brief(data)} is not one of {', '.join(map(repr, arguments))}")
        return data
    if dataclasses.is_dataclass(expected) and isinstance(expected, type):
        return _build_dataclass(expected, data, where)
    if origin is tuple:
        _require(isinstance(data, list), where, "a list", data)
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return tuple(build(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(data))
        _require(len(data) == len(arguments), where, f"a list of {len(arguments)}", data)
        pairs = zip(arguments, data, strict=True)
        return tuple(build(kind, item, f"{where}[{i}]") for i, (kind, item) in enumerate(pairs))
    if origin is not None and issubclass(origin, Mapping):
        _require(isinstance(data, dict), where, "an object", data)
        return {key: build(arguments[1], item, f"{where}.{key}") for key, item in data.items()}
    if expected is float:
        _require(isinstance(data, (int, float)) and not isinstance(data, bool), where, "a number", data)
        try:
            number = float(data)
        except OverflowError:
            number = math.inf
        _require(math.isfinite(number), where, "a finite number", number)
        return number
    if expected is int:
        _require(isinstance(data, int) and not isinstance(data, bool), where, "an integer", data)
        if not -LARGEST_INTEGER <= data < LARGEST_INTEGER:
            raise ValueError(f"{where}: expected an integer of 64 bits, found one of {data.bit_length():,}")
        return data
    if expected in (str, bool, type(None)):
        _require(isinstance(data, expected), where, expected.__name__, data)
        if expected is str and len(data) > LONGEST_TEXT:
            raise ValueError(f"{where}: expected a text, found one of {len(data):,} characters")
        return data
    raise TypeError(f"{where}: no JSON form for {expected!r}")  # a field type of ours that this module lacks


def _build_union(arguments: tuple[Any, ...], data: Any, where: str) -> Any:
    if data is None and type(None) in arguments:
        return None
    problems = []
    for kind in arguments:
        if kind is not type(None):
            try:
                return build(kind, data, where)
            except ValueError as problem:
                problems.append(str(problem))
    raise ValueError("; ".join(problems) or f"{where}: unexpected null")


def _build_dataclass(cls: type[Any], data: Any, where: str) -> Any:
    _require(isinstance(data, dict), where, "an object", data)
    fields = _fields(cls)  # type: ignore[arg-type]
    unknown = set(data) - set(fields)
    _require(not unknown, where, "known fields only", sorted(unknown))
    values = {}
    for name, (field, hint) in fields.items():
        if name in data:
            values[name] = build(hint, data[name], f"{where}.{name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ValueError(f"{where}: the field {name!r} is missing")
    record = cls(**values)
    if hasattr(cls, "check"):
        try:
            record.check()
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
    return record


@functools.cache  # resolving the hints takes most of the time of building a small record
def _fields(cls: type[Any]) -> dict[str, tuple[dataclasses.Field[Any], Any]]:
    hints = typing.get_type_hints(cls, include_extras=True)
    return {field.name: (field, hints[field.name]) for field in dataclasses.fields(cls)}


def _require(condition: bool, where: str, expected: str, data: Any) -> None:
    if not condition:
        raise ValueError(f"{where}: expected {expected}, found {brief(data)}")
