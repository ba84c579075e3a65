"""JSON for frozen dataclasses, derived from their fields, so that a field list is written once.

`to_json` gives plain dictionaries, lists, strings and numbers; `from_json` rebuilds the dataclass and rejects unknown,
missing or mistyped fields. Nothing that is read is ever executed: only declared field types are built.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

T = TypeVar("T")


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
    if origin in (typing.Union, types.UnionType):
        return _build_union(arguments, data, where)
    if origin is typing.Literal:
        if data not in arguments:
            raise ValueError(f"{where}: {data!r} is not one of {', '.join(map(repr, arguments))}")
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
            return float(data)
        except OverflowError:
            raise ValueError(f"{where}: a number too large") from None
    if expected is int:
        _require(isinstance(data, int) and not isinstance(data, bool), where, "an integer", data)
        return data
    if expected in (str, bool, type(None)):
        _require(isinstance(data, expected), where, expected.__name__, data)
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
    return cls(**values)


@functools.cache  # resolving the hints takes most of the time of building a small record
def _fields(cls: type[Any]) -> dict[str, tuple[dataclasses.Field[Any], Any]]:
    hints = typing.get_type_hints(cls)
    return {field.name: (field, hints[field.name]) for field in dataclasses.fields(cls)}


def _require(condition: bool, where: str, expected: str, data: Any) -> None:
    if not condition:
        text = repr(data)
        raise ValueError(f"{where}: expected {expected}, found {text[:80]}")
