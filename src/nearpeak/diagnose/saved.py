"""A profile as a file: one versioned JSON object, readable without torch, and never trusted.

    {"kind": "nearpeak profile", "profile": {... the fields of Profile; those in COLUMNS by columns ...}}

Only declared fields are built from plain data: nothing in a file is executed. `docs/profile_file.md` has every field.
"""

from __future__ import annotations

import dataclasses
import errno
import gzip
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, NoReturn, cast

from nearpeak.diagnose.columns import from_columns, to_columns
from nearpeak.diagnose.idle import Gap
from nearpeak.diagnose.profile import SCHEMA, DeviceKernel, Profile, ProfiledOp
from nearpeak.errors import EnvironmentProblem, UsageError
from nearpeak.files import replace_file
from nearpeak.records import from_json, to_json

KIND = "nearpeak profile"
COLUMNS: Mapping[str, type] = {"ops": ProfiledOp, "timeline": DeviceKernel, "gaps": Gap}
"""Fields of many records of one kind."""
ENDINGS = (".json", ".json.gz")
LARGEST = 2**30
"""Bytes of JSON, decompressed, that are read at most: ten million ops. A small file can claim to hold far more."""
LEVEL = 2
"""Of compression: with 6 a file of 100,000 ops is 6 % smaller and takes four times as long."""
_MACHINE_FAULTS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EFBIG)
"""Reasons why a file cannot be written that are no mistake of who named it."""


def save(profile: Profile, path: str | Path) -> None:
    """Writes a profile as .json, or compressed as .json.gz: whole, or not at all."""
    target = Path(path)
    check_name(target)
    replace(target, content(profile, compressed=target.suffix == ".gz"))


def replace(target: Path, made: bytes) -> None:
    """Writes a file that the user named; the error says whether the name or the machine is at fault."""
    try:
        replace_file(target, made)
    except OSError as error:
        fault = EnvironmentProblem if error.errno in _MACHINE_FAULTS else UsageError
        raise fault(f"{target} cannot be written: {error.strerror or error}.") from None


def check_name(path: str | Path) -> None:
    """UsageError where a profile cannot be saved under this name; to be asked before a long run."""
    target = Path(path)
    if not target.name.endswith(ENDINGS):
        raise UsageError(f"{target}: a profile is saved as .json or .json.gz.")
    if not target.parent.is_dir():
        raise UsageError(f"{target} cannot be written: there is no folder {target.parent}.")


def content(profile: Profile, *, compressed: bool) -> bytes:
    """The bytes of the file."""
    columns = {name: to_columns(record, getattr(profile, name)) for name, record in COLUMNS.items()}
    fields = to_json(_without_columns(profile))
    data = {"kind": KIND, "profile": {**fields, **columns}}
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).encode() + b"\n"
    return gzip.compress(text, compresslevel=LEVEL, mtime=0) if compressed else text


def is_saved(path: str | Path) -> bool:
    """Whether a file begins as a saved profile does."""
    try:
        with _open(Path(path)) as file:
            return KIND.encode() in file.read(200)
    except (OSError, EOFError, zlib.error):
        return False


def read(path: str | Path) -> Profile:
    """A saved profile; an error says what is wrong with a file that is none."""
    return _built(Path(path), whole=True)


def read_head(path: str | Path) -> Profile:
    """A saved profile without what is stored by columns: enough for a line in a list, and quick."""
    return _built(Path(path), whole=False)


def _without_columns(profile: Profile) -> Profile:
    nothing: dict[str, Any] = dict.fromkeys(COLUMNS, ())
    return dataclasses.replace(profile, **nothing)


def _built(source: Path, *, whole: bool) -> Profile:
    fields = _fields(source)
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


def _fields(source: Path) -> dict[str, Any]:
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
