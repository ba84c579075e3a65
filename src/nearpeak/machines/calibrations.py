"""The stored calibrations of machines: one JSON file per device, driver and torch version in the cache folder.

A file is used only if its schema, its key, its checksum and every figure in it are valid. Otherwise the reason is
returned, and the caller measures again. A broken file or a folder that cannot be written raises nothing: calibration
works without a cache, only more slowly.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from nearpeak._files import cache_folder, read_json, replace_file
from nearpeak._records import brief, from_json, to_json
from nearpeak.errors import FileProblem
from nearpeak.machines.machine import Machine

SCHEMA = 1
"""Increased when the meaning of a stored figure changes; machines with files of another schema are measured again."""
MAXIMUM_FILE_BYTES = 4 * 2**20
"""A calibration takes some 10 KB."""
_MAY_BE_ZERO = re.compile(r"\.spread$|\.launch\.\w+$|\.others_share$")


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationKey:
    """What a calibration is valid for: another driver or torch may reach other ceilings."""

    device: str
    driver: str
    torch: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """A calibrated machine in the cache; `date` is ISO 8601 in UTC."""

    machine: Machine
    key: CalibrationKey
    date: str
    path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class UnusableFile:
    """A file that cannot be read, trusted or written, and the reason."""

    path: Path
    reason: str


def path_of(key: CalibrationKey) -> Path:
    """The file for `key`: readable names, and a hash so that two keys never share a file."""
    names = "_".join(re.sub(r"[^a-z0-9.]+", "-", part.lower())[:40] for part in (key.device, key.driver, key.torch))
    return cache_folder() / "machines" / f"{names}_{_checksum(to_json(key))[:8]}.json"


def load(key: CalibrationKey) -> Calibration | UnusableFile | None:
    """The calibrated machine for `key`; None where there is none yet, Unusable where the file must not be trusted."""
    path = path_of(key)
    if not path.exists():
        return None
    try:
        return _decode(read_json(path, largest=MAXIMUM_FILE_BYTES), key, path)
    except FileProblem as problem:
        return UnusableFile(path=path, reason=problem.reason)
    except ValueError as error:
        return UnusableFile(path=path, reason=str(error)[:300])


def load_all() -> list[Calibration]:
    """All valid calibrations, for any driver and torch, the newest first."""
    calibrations = []
    try:
        paths = sorted((cache_folder() / "machines").glob("*.json"))
    except OSError:
        return []
    for path in paths:
        try:
            data = read_json(path, largest=MAXIMUM_FILE_BYTES)
            key = from_json(CalibrationKey, data.get("key") if isinstance(data, dict) else None)
        except (FileProblem, ValueError):
            continue
        calibration = load(key) if path == path_of(key) else None  # a copy under another name is no calibration
        if isinstance(calibration, Calibration):
            calibrations.append(calibration)
    return sorted(calibrations, key=lambda calibration: calibration.date, reverse=True)


def save(machine: Machine, key: CalibrationKey) -> Calibration | UnusableFile:
    """Keep `machine` for `key`; Unusable where its figures make no sense or the folder cannot be written."""
    path = path_of(key)
    date = datetime.now(UTC).isoformat(timespec="seconds")
    try:
        _check_figures(machine)
    except ValueError as error:
        return UnusableFile(path=path, reason=str(error))
    payload = {"schema": SCHEMA, "key": to_json(key), "date": date, "machine": to_json(machine)}
    text = json.dumps({**payload, "sha256": _checksum(payload)}, indent=1, allow_nan=False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, text.encode())
    except OSError as error:
        return UnusableFile(path=path, reason=f"cannot be written: {error.strerror or error}")
    return Calibration(machine=machine, key=key, date=date, path=path)


def _decode(payload: Any, key: CalibrationKey, path: Path) -> Calibration:
    if not isinstance(payload, dict) or payload.get("schema") != SCHEMA:
        schema = payload.get("schema") if isinstance(payload, dict) else None
        raise ValueError(f"has schema {brief(schema)}, this version reads {SCHEMA}")
    if payload.get("key") != to_json(key):
        raise ValueError(f"belongs to another machine or software: {brief(payload.get('key'))}")
    checksum = payload.pop("sha256", None)
    if checksum != _checksum(payload):
        raise ValueError("its checksum does not match its content: it was edited or damaged")
    if set(payload) != {"schema", "key", "date", "machine"}:
        raise ValueError(f"has unexpected fields: {brief(sorted(payload))}")
    date = payload["date"]
    if not isinstance(date, str):
        raise ValueError(f"has no date but {brief(date)}")
    datetime.fromisoformat(date)
    machine = from_json(Machine, payload["machine"])
    _check_figures(machine)
    return Calibration(machine=machine, key=key, date=date, path=path)


def _check_figures(machine: Machine) -> None:
    if machine.achievable is None or machine.achievable.how != "measured":
        raise ValueError("holds no measured ceilings")
    for name, value in _figures(machine, "machine"):
        if not math.isfinite(value) or value < 0 or (value == 0 and not _MAY_BE_ZERO.search(name)):
            raise ValueError(f"the figure {name} is {value!r}, which no machine has")


def _figures(value: object, name: str) -> Iterator[tuple[str, float]]:
    """Every number of a record with its dotted name; infinities too, which `to_json` would hide."""
    if dataclasses.is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _figures(item, f"{name}.{key}")
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield name, value


def _checksum(payload: Any) -> str:
    """SHA-256 of the canonical JSON; floats survive, as Python writes the shortest text that reads back the same."""
    text = json.dumps(payload, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()
