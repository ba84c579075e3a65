"""Profiles as files: one versioned JSON object, readable without torch, validated on reading.

    {"kind": "nearpeak profile", "profile": {... the fields of Profile; those in COLUMNS by columns ...}}

Only declared fields are built from plain data; nothing in a file is executed. `docs/profile_file.md` documents every
field. Fields with many records of one dataclass (ops, kernels, gaps) are stored by columns, so that each field name and
each string is written once: a column of numbers or booleans is a list with one entry per record; any other column is an
object whose "values" are the distinct values and whose "index" has one entry per record, a position in them.
"""

from __future__ import annotations

import dataclasses
import errno
import gzip
import json
import typing
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import isfinite
from operator import attrgetter
from pathlib import Path
from typing import IO, Any, NoReturn, TypeVar, cast

from nearpeak._files import replace_file
from nearpeak._records import build, from_json, to_json
from nearpeak.errors import EnvironmentProblem, UsageError
from nearpeak.ops.fast_init import positional_constructor
from nearpeak.ops.low_gc import low_gc
from nearpeak.profiles.idle import Gap
from nearpeak.profiles.profile import SCHEMA, DeviceKernel, Profile, ProfiledOp

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
    make: Callable[..., Record] = positional_constructor(cls)
    with low_gc():
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


KIND = "nearpeak profile"
COLUMNS: Mapping[str, type] = {"ops": ProfiledOp, "timeline": DeviceKernel, "gaps": Gap}
"""Fields of many records of one kind."""
ENDINGS = (".json", ".json.gz")
LARGEST = 2**30
"""Bytes of JSON, decompressed, that are read at most: ten million ops. A small file can claim to hold far more."""
COMPRESSION_LEVEL = 2
"""Of compression: with 6 a file of 100,000 ops is 6 % smaller and takes four times as long."""
_ENVIRONMENT_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EFBIG)
"""Reasons why a file cannot be written that are no mistake of who named it."""


def save(profile: Profile, path: str | Path) -> None:
    """Writes a profile as .json, or compressed as .json.gz: whole, or not at all."""
    target = Path(path)
    check_path(target)
    write_file(target, to_bytes(profile, compressed=target.suffix == ".gz"))


def write_file(target: Path, made: bytes) -> None:
    """Writes a file that the user named; the error says whether the name or the machine is at fault."""
    try:
        replace_file(target, made)
    except OSError as error:
        fault = EnvironmentProblem if error.errno in _ENVIRONMENT_ERRNOS else UsageError
        raise fault(f"{target} cannot be written: {error.strerror or error}.") from None


def check_path(path: str | Path) -> None:
    """UsageError where a profile cannot be saved under this name; to be asked before a long run."""
    target = Path(path)
    if not target.name.endswith(ENDINGS):
        raise UsageError(f"{target}: a profile is saved as .json or .json.gz.")
    if not target.parent.is_dir():
        raise UsageError(f"{target} cannot be written: there is no folder {target.parent}.")


def to_bytes(profile: Profile, *, compressed: bool) -> bytes:
    """The bytes of the file."""
    columns = {name: to_columns(record, getattr(profile, name)) for name, record in COLUMNS.items()}
    fields = to_json(_without_columns(profile))
    data = {"kind": KIND, "profile": {**fields, **columns}}
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).encode() + b"\n"
    return gzip.compress(text, compresslevel=COMPRESSION_LEVEL, mtime=0) if compressed else text


def is_profile_file(path: str | Path) -> bool:
    """Whether a file begins as a saved profile does."""
    try:
        with _open(Path(path)) as file:
            return KIND.encode() in file.read(200)
    except (OSError, EOFError, zlib.error):
        return False


def read(path: str | Path) -> Profile:
    """A saved profile; an error says what is wrong with a file that is none."""
    return _build(Path(path), whole=True)


def read_head(path: str | Path) -> Profile:
    """A saved profile without what is stored by columns: enough for a line in a list, and quick."""
    return _build(Path(path), whole=False)


def _without_columns(profile: Profile) -> Profile:
    nothing: dict[str, Any] = dict.fromkeys(COLUMNS, ())
    return dataclasses.replace(profile, **nothing)


def _build(source: Path, *, whole: bool) -> Profile:
    fields = _read_fields(source)
    found = fields.get("schema")
    if found != SCHEMA:
        older = isinstance(found, int) and found < SCHEMA
        whose = "an older nearpeak wrote it: profile again" if older else "another nearpeak wrote it: read it with that"
        raise UsageError(f"{source} has schema {found!r}, and this version reads {SCHEMA}; {whose}.")
    stored = {name: fields.pop(name) for name in COLUMNS if name in fields}
    try:
        head = from_json(Profile, {**fields, "ops": []})
        if not whole:
            return head
        columns: dict[str, Any] = {
            name: from_columns(COLUMNS[name], columns, f"Profile.{name}") for name, columns in stored.items()
        }
        if "ops" not in columns:
            raise ValueError("Profile.ops is missing")
        return dataclasses.replace(head, **columns)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{source} is damaged: {error}.") from None


def _read_fields(source: Path) -> dict[str, Any]:
    try:
        with _open(source) as file:
            text = file.read(LARGEST + 1)
    except FileNotFoundError:
        raise UsageError(f"{source}: there is no such file.") from None
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(f"{source} cannot be read: {error}.") from None
    if len(text) > LARGEST:
        raise UsageError(f"{source} holds more than {LARGEST:,} bytes: no profile is that large, it is not read.")
    try:
        data: Any = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{source} is not valid JSON: {error}.") from None
    if not isinstance(data, dict) or data.get("kind") != KIND or not isinstance(data.get("profile"), dict):
        raise UsageError(f"{source} is no saved profile.")
    return cast(dict[str, Any], data["profile"])


def _open(path: Path) -> IO[bytes]:
    with path.open("rb") as file:
        compressed = file.read(2) == b"\x1f\x8b"
    return cast(IO[bytes], gzip.open(path, "rb")) if compressed else path.open("rb")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
