"""Profiles as files: one versioned JSON object, readable without torch, validated on reading.

    {"kind": "nearpeak profile", "profile": {... the fields of Profile; those in COLUMNS by columns ...}}

Only declared fields are built from plain data; nothing in a file is executed. `docs/profile_file.md` documents every
field.

Fields with many records of one dataclass (ops, kernels, gaps) are stored by columns, so that each field name and each
string is written once. A column of numbers or booleans is a list with one entry per record. Any other column is an
object: "values" are the distinct values in the order of their first use, "index" has one entry per record, a position
in them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import json
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import isfinite
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

from nearpeak._files import InputFile, read_json, write_file
from nearpeak._records import brief, build, from_json, to_json
from nearpeak.errors import FileProblem, UsageError
from nearpeak.ops.fast_init import positional_constructor
from nearpeak.ops.low_gc import low_gc
from nearpeak.ops.op import origin_of_name
from nearpeak.profiles.grade import grade_profile
from nearpeak.profiles.idle import Gap
from nearpeak.profiles.profile import SCHEMA, DeviceKernel, Profile, ProfiledOp

KIND = "nearpeak profile"
COLUMNS: Mapping[str, type] = {"ops": ProfiledOp, "timeline": DeviceKernel, "gaps": Gap}
"""Fields with many records of one dataclass."""
ENDINGS = (".json", ".json.gz")
COMPRESSION_LEVEL = 2
"""With 6, a file of 100,000 ops is 6 % smaller and takes four times as long."""
Record = TypeVar("Record")


def save(profile: Profile, path: str | Path) -> None:
    """Writes a profile as .json, or compressed as .json.gz. The file is replaced atomically."""
    target = Path(path)
    check_path(target)
    write_file(target, to_bytes(profile, compressed=target.suffix == ".gz"))


def check_path(path: str | Path) -> None:
    """UsageError if a profile cannot be saved at this path; to be called before a long run."""
    target = Path(path)
    if not target.name.endswith(ENDINGS):
        raise UsageError(f"{target}: a profile is saved as .json or .json.gz.")
    if not target.parent.is_dir():
        raise UsageError(f"{target} cannot be written: there is no folder {target.parent}.")


def to_bytes(profile: Profile, *, compressed: bool) -> bytes:
    """The content of the file."""
    columns = {name: to_columns(record, getattr(profile, name)) for name, record in COLUMNS.items()}
    nothing: dict[str, Any] = dict.fromkeys(COLUMNS, ())
    fields = to_json(dataclasses.replace(with_grade(profile), **nothing))
    data = {"kind": KIND, "profile": {**fields, **columns}}
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).encode() + b"\n"
    return gzip.compress(text, compresslevel=COMPRESSION_LEVEL, mtime=0) if compressed else text


def with_grade(profile: Profile) -> Profile:
    """The profile with its grade as a field, for readers of JSON."""
    return dataclasses.replace(profile, grade=grade_profile(profile))


def is_profile_file(path: str | Path | InputFile) -> bool:
    """Whether a file begins like a saved profile."""
    with contextlib.nullcontext(path) if isinstance(path, InputFile) else InputFile(path) as file:
        return KIND.encode() in file.head(200)


def read(path: str | Path | InputFile) -> Profile:
    """Reads a saved profile; FileProblem says what is wrong with the file."""
    return _read(path, whole=True)


def read_head(path: str | Path | InputFile) -> Profile:
    """Reads a saved profile without the fields that are stored by columns: fast, for lists of profiles."""
    return _read(path, whole=False)


def _read(source: str | Path | InputFile, *, whole: bool) -> Profile:
    data = read_json(source)
    if not isinstance(data, dict) or data.get("kind") != KIND or not isinstance(data.get("profile"), dict):
        raise FileProblem(source, "it is no saved profile")
    fields: dict[str, Any] = data["profile"]
    schema = fields.get("schema")
    try:
        if schema == 2:
            _upgrade(fields)
        elif schema != SCHEMA:
            older = isinstance(schema, int) and schema < SCHEMA
            advice = "an older nearpeak wrote it: profile again" if older else "a newer nearpeak wrote it: update"
            reason = f"it has schema {brief(schema)}, and this version reads 2 and {SCHEMA}; {advice}"
            raise FileProblem(source, reason)
        columns = {name: fields.pop(name) for name in COLUMNS if name in fields}
        head = from_json(Profile, {**fields, "ops": []})
        head = dataclasses.replace(head, grade=None)  # it follows from the rest, by the rules of this version
        if not whole:
            return head
        if "ops" not in columns:
            raise ValueError("Profile.ops is missing")
        records: dict[str, Any] = {
            name: from_columns(COLUMNS[name], column, f"Profile.{name}") for name, column in columns.items()
        }
        profile = dataclasses.replace(head, **records)
        profile.check_indices()
        return profile
    except ValueError as error:
        raise FileProblem(source, f"it is damaged: {error}") from None


_SCHEMA_2_VALUES: Mapping[str, str] = {
    "synchronisation": "synchronization",
    "wave-quantisation": "wave-quantization",
    "not modelled": "not modeled",
    "normalisation": "normalization",
    "quantisation": "quantization",
}
"""Values that are spelled differently since schema 3: idle causes, rules, parts of the waterfall, families of ops."""
_SCHEMA_2_KEYS: Mapping[str, str] = {
    "late_s": "launch_wait_s",
    "modelled": "modeled",
    "modelled_share": "modeled_share",
}


def _upgrade(fields: dict[str, Any]) -> None:
    """Turns the fields of schema 2 into those of schema 3, in place. What is malformed is left for the reader."""
    fields["schema"] = 3
    _rename_keys(fields)
    _respell(fields.get("idle"), "cause")
    _respell(fields.get("findings"), "rule")
    if isinstance(waterfall := fields.get("waterfall"), dict):
        _respell(waterfall.get("parts"), "name")
    if isinstance(undecided := fields.get("undecided"), list):
        fields["undecided"] = [
            _SCHEMA_2_VALUES.get(name, name) if isinstance(name, str) else name for name in undecided
        ]
    for finding in _dicts(fields.get("findings")):
        module, usage = finding.pop("module", ""), finding.pop("fix", "")
        finding["modules"] = [module] if module else []
        if isinstance(usage, str) and usage:
            name = usage.removeprefix("nearpeak.kernels.").partition("(")[0]
            finding["fix"] = {"id": name, "usage": usage, "ops": finding.get("ops", []), "modules": finding["modules"]}
    rates = fields.get("rates")
    if isinstance(rates, dict) and fields.get("how") != "datasheet":
        rate, share = rates.get("bytes_per_s"), rates.get("bandwidth_share")
        if isinstance(rate, float) and isinstance(share, float) and share:
            fields["ceilings"] = {"bandwidth": rate / share}
    _upgrade_columns(fields)


def _upgrade_columns(fields: dict[str, Any]) -> None:
    ops, timeline, gaps = (fields.get(name) for name in COLUMNS)
    if isinstance(ops, dict):
        _rename_keys(ops)
        _respell_column(ops.get("family"))
        if isinstance(names := ops.get("name"), dict) and isinstance(names.get("values"), list):
            origins = [origin_of_name(str(name)) for name in names["values"]]
            ops["origin"] = {"values": origins, "index": names.get("index")}
    if isinstance(timeline, dict) and isinstance(flags := timeline.pop("communication", None), list):
        timeline["collective"] = {"values": [None, "unknown"], "index": [int(bool(flag)) for flag in flags]}
    if isinstance(gaps, dict):
        _respell_column(gaps.get("cause"))


def _rename_keys(data: dict[str, Any]) -> None:
    for old, new in _SCHEMA_2_KEYS.items():
        if old in data:
            data[new] = data.pop(old)


def _respell(records: Any, key: str) -> None:
    for record in _dicts(records):
        if isinstance(record.get(key), str):
            record[key] = _SCHEMA_2_VALUES.get(record[key], record[key])


def _respell_column(column: Any) -> None:
    if isinstance(column, dict) and isinstance(column.get("values"), list):
        values = column["values"]
        column["values"] = [_SCHEMA_2_VALUES.get(value, value) if isinstance(value, str) else value for value in values]


def _dicts(records: Any) -> list[dict[str, Any]]:
    return [record for record in records if isinstance(record, dict)] if isinstance(records, list) else []


_PLAIN_TYPES: Mapping[Any, frozenset[type]] = {
    float: frozenset({float, int}),
    int: frozenset({int}),
    bool: frozenset({bool}),
    float | None: frozenset({float, int, type(None)}),
    int | None: frozenset({int, type(None)}),
}
"""The field types that are stored as plain columns, with the types that JSON may give for them."""


def to_columns(cls: type[Record], records: Sequence[Record]) -> dict[str, Any]:
    """The records as plain JSON data, a column for each field."""
    return {
        name: _plain_column(values) if hint in _PLAIN_TYPES else _indexed_column(values)
        for name, hint in _hints(cls).items()
        for values in [map(attrgetter(name), records)]
    }


def from_columns(cls: type[Record], data: Any, where: str) -> tuple[Record, ...]:
    """The records of columns; ValueError says which column is wrong. Missing fields get their defaults."""
    if not isinstance(data, dict):
        raise ValueError(f"{where}: expected an object of columns, found {type(data).__name__}")
    hints = _hints(cls)
    defaults = {field.name: field.default for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    required = {name for name, default in defaults.items() if default is dataclasses.MISSING}
    if not required <= set(data) <= set(hints):
        raise ValueError(f"{where}: expected the columns {', '.join(hints)}; found {', '.join(sorted(data))[:300]}")
    annotated = typing.get_type_hints(cls, include_extras=True)
    columns = {
        name: _read_column(hints[name], annotated[name], column, f"{where}.{name}") for name, column in data.items()
    }
    lengths = {len(column) for column in columns.values()}
    if len(lengths) != 1:
        raise ValueError(f"{where}: its columns have different lengths, {sorted(lengths)}")
    ordered = [columns.get(name) or [defaults[name]] * max(lengths) for name in hints]
    make: Callable[..., Record] = positional_constructor(cls)
    with low_gc():
        return tuple(map(make, *ordered))


def _hints(cls: type[Any]) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def _plain_column(values: Iterable[Any]) -> list[Any]:
    return [None if type(value) is float and not isfinite(value) else value for value in values]  # as `to_json` does


def _indexed_column(values: Iterable[Any]) -> dict[str, Any]:
    positions: dict[Any, int] = {}
    index = [positions.setdefault(value, len(positions)) for value in values]
    return {"values": to_json(list(positions)), "index": index}


def _read_column(hint: Any, annotated: Any, data: Any, where: str) -> list[Any]:
    """A column. `hint` is the type of its field, `annotated` the same with the limits of numbers."""
    if hint in _PLAIN_TYPES:
        if not isinstance(data, list):
            raise ValueError(f"{where}: expected a list, found {type(data).__name__}")
        if set(map(type, data)) - _PLAIN_TYPES[hint]:
            wrong = next(place for place, value in enumerate(data) if type(value) not in _PLAIN_TYPES[hint])
            build(hint, data[wrong], f"{where}[{wrong}]")
        known = [value for value in data if value is not None]
        if known:  # where the smallest and the largest are valid, all are
            build(annotated, min(known), where)
            build(annotated, max(known), where)
        return [float(value) if type(value) is int and float in _PLAIN_TYPES[hint] else value for value in data]
    if not isinstance(data, dict) or set(data) != {"values", "index"}:
        raise ValueError(f'{where}: expected an object with "values" and "index"')
    values: tuple[Any, ...] = build(tuple[annotated, ...], data["values"], f"{where}.values")
    index = data["index"]
    if not isinstance(index, list) or set(map(type, index)) - {int}:
        raise ValueError(f"{where}.index: expected a list of integers")
    if index and not (min(index) >= 0 and max(index) < len(values)):
        raise ValueError(f"{where}.index: not all between 0 and {len(values) - 1}")
    return [values[position] for position in index]
