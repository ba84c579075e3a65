"""A profile as a file: one versioned JSON object, readable without torch, and never trusted."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from nearpeak.diagnose.profile import SCHEMA, Profile
from nearpeak.errors import UsageError
from nearpeak.records import from_json, to_json

KIND = "nearpeak profile"


def save(profile: Profile, path: str | Path) -> None:
    """Writes a profile as .json, or compressed as .json.gz."""
    target = Path(path)
    if not target.name.endswith((".json", ".json.gz")):
        raise UsageError(f"{target}: a profile is saved as .json or .json.gz.")
    text = json.dumps({"kind": KIND, "profile": to_json(profile)}, indent=None, separators=(",", ":"), allow_nan=False)
    try:
        if target.suffix == ".gz":
            with gzip.open(target, "wt", encoding="utf-8") as file:
                file.write(text)
        else:
            target.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{target} cannot be written: {error.strerror or error}.") from None


def is_saved(path: str | Path) -> bool:
    """Whether a file begins as a saved profile does."""
    try:
        with _open(Path(path)) as file:
            return KIND in file.read(200)
    except (OSError, EOFError, UnicodeDecodeError):
        return False


def read(path: str | Path) -> Profile:
    """A saved profile; an error says what is wrong with a file that is none."""
    source = Path(path)
    try:
        with _open(source) as file:
            content: Any = json.loads(file.read())
    except FileNotFoundError:
        raise UsageError(f"{source}: there is no such file.") from None
    except (OSError, EOFError) as error:
        raise UsageError(f"{source} cannot be read: {error}.") from None
    except ValueError as error:
        raise UsageError(f"{source} is not valid JSON: {error}.") from None
    if not isinstance(content, dict) or content.get("kind") != KIND or not isinstance(content.get("profile"), dict):
        raise UsageError(f"{source} is no saved profile.")
    found = content["profile"].get("schema")
    if found != SCHEMA:
        raise UsageError(f"{source} has schema {found!r}, this version reads {SCHEMA}. Profile again.")
    try:
        return from_json(Profile, content["profile"])
    except ValueError as error:
        raise UsageError(f"{source} is damaged: {error}.") from None


def _open(path: Path) -> Any:
    with path.open("rb") as file:
        compressed = file.read(2) == b"\x1f\x8b"
    return gzip.open(path, "rt", encoding="utf-8") if compressed else path.open(encoding="utf-8")
