"""Many records of one dataclass as JSON by columns: each field's name once, and each text once.

A column of numbers or of true and false is a list with one entry per record. Any other column is an object: "values"
are the different values in the order in which they first come, "index" has one entry per record, the position among
them.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Iterable, Sequence
from math import isfinite
from operator import attrgetter
from typing import Any, TypeVar

from nearpeak.records import build, to_json
from nearpeak.work.garbage import rarely_collected
from nearpeak.work.quick import maker

Record = TypeVar("Record")

_TYPES: dict[Any, frozenset[type]] = {
    float: frozenset({float, int}),
    int: frozenset({int}),
    bool: frozenset({bool}),
    float | None: frozenset({float, int, type(None)}),
    int | None: frozenset({int, type(None)}),
}
"""What the entries of a plain column may be."""


def to_columns(cls: type[Record], records: Sequence[Record]) -> dict[str, Any]:
    """The records as plain JSON data, a column for each field."""
    return {
        name: _plain(map(attrgetter(name), records)) if hint in _TYPES else _indexed(map(attrgetter(name), records))
        for name, hint in _hints(cls).items()
    }


def from_columns(cls: type[Record], data: Any, where: str) -> tuple[Record, ...]:
    """The records again; ValueError says which column is wrong."""
    if not isinstance(data, dict):
        raise ValueError(f"{where}: expected an object of columns, found {type(data).__name__}")
    hints = _hints(cls)
    defaults = {field.name: field.default for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    needed = {name for name, default in defaults.items() if default is dataclasses.MISSING}
    if not needed <= set(data) <= set(hints):
        raise ValueError(f"{where}: expected the columns {', '.join(hints)}; found {', '.join(sorted(data))[:300]}")
    found = {name: _column(hints[name], column, f"{where}.{name}") for name, column in data.items()}
    lengths = {len(column) for column in found.values()}
    if len(lengths) != 1:
        raise ValueError(f"{where}: its columns have different lengths, {sorted(lengths)}")
    # What a file from before a field does not have, is its default.
    columns = [found.get(name) or [defaults[name]] * max(lengths) for name in hints]
    make: Callable[..., Record] = maker(cls)
    with rarely_collected():
        return tuple(map(make, *columns))


def _hints(cls: type[Any]) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def _plain(values: Iterable[Any]) -> list[Any]:
    return [None if type(value) is float and not isfinite(value) else value for value in values]  # as `to_json` does


def _indexed(values: Iterable[Any]) -> dict[str, Any]:
    seen: dict[Any, int] = {}
    index = [seen.setdefault(value, len(seen)) for value in values]
    return {"values": to_json(list(seen)), "index": index}


def _column(hint: Any, data: Any, where: str) -> list[Any]:
    if hint in _TYPES:
        if not isinstance(data, list):
            raise ValueError(f"{where}: expected a list, found {type(data).__name__}")
        if set(map(type, data)) - _TYPES[hint]:
            wrong = next(at for at, value in enumerate(data) if type(value) not in _TYPES[hint])
            build(hint, data[wrong], f"{where}[{wrong}]")
        return [build(hint, value, where) if type(value) is int and hint is not int else value for value in data]
    if not isinstance(data, dict) or set(data) != {"values", "index"}:
        raise ValueError(f'{where}: expected an object with "values" and "index"')
    values: tuple[Any, ...] = build(tuple[hint, ...], data["values"], f"{where}.values")
    index = data["index"]
    if not isinstance(index, list) or set(map(type, index)) - {int}:
        raise ValueError(f"{where}.index: expected a list of integers")
    if index and not (min(index) >= 0 and max(index) < len(values)):
        raise ValueError(f"{where}.index: not all between 0 and {len(values) - 1}")
    return [values[at] for at in index]
