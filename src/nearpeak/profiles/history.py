"""The last ten runs, saved next to the calibrations: "@last" or "@1" is the last, "@2" the one before.

They are saved profiles, runs/<time>.json.gz. NEARPEAK_KEEP=0 in the environment disables this.
"""

from __future__ import annotations

import datetime
import os
import re
from dataclasses import dataclass
from pathlib import Path

from nearpeak._files import cache_folder, replace_file
from nearpeak.errors import FileProblem, UsageError
from nearpeak.profiles import file
from nearpeak.profiles.profile import Profile

MAX_RUNS = 10
_REFERENCE = re.compile(r"@(last|\d{1,9})")


@dataclass(frozen=True, slots=True, kw_only=True)
class PastRun:
    """One saved run."""

    number: int
    """1 is the last run."""
    path: Path
    profile: Profile | None
    """Without its ops; None if the file cannot be read."""
    problem: str = ""
    """Why it cannot be read."""


def folder() -> Path:
    """The folder of the runs."""
    return cache_folder() / "runs"


def is_enabled() -> bool:
    """Whether runs are saved: unless NEARPEAK_KEEP is 0."""
    return os.environ.get("NEARPEAK_KEEP", "") != "0"


def add_run(profile: Profile, path: Path | None = None) -> Path:
    """Saves a run, and removes the oldest ones beyond ten. OSError if the folder cannot be written.

    `path` is that of an earlier state of the same run, which is replaced.
    """
    runs = folder()
    runs.mkdir(parents=True, exist_ok=True)
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H-%M-%S.%f")  # sorts by time; no colons in file names
    path = path or runs / f"{now}Z.json.gz"
    replace_file(path, file.to_bytes(profile, compressed=True))
    for old in _files_newest_first()[MAX_RUNS:]:
        old.unlink(missing_ok=True)  # another run may remove the same one
    return path


def resolve(path: str | Path) -> Path:
    """The file of "@last" or "@2"; any other path unchanged. A file of such a name can be given as ./@last."""
    reference = _REFERENCE.fullmatch(str(path)) if isinstance(path, str) else None
    if reference is None:
        if isinstance(path, str) and path.startswith("@") and not Path(path).exists():
            raise UsageError(f"{path}: saved runs are @last, @1 (the same), @2 and so on up to @{MAX_RUNS}.")
        return Path(path)
    number = 1 if reference[1] == "last" else int(reference[1])
    files = _files_newest_first()
    if not files:
        raise UsageError(f"{path}: no runs are kept in {folder()}. `nearpeak profile SCRIPT` keeps one.")
    if not 1 <= number <= len(files):
        raise UsageError(
            f"{path}: there are @1 to @{len(files)}. `nearpeak profile --list` shows them."
            if len(files) > 1
            else f"{path}: there is only @1, the last run."
        )
    return files[number - 1]


def past_runs() -> tuple[PastRun, ...]:
    """All saved runs, the last one first."""
    return tuple(_read_run(number, path) for number, path in enumerate(_files_newest_first(), start=1))


def _read_run(number: int, path: Path) -> PastRun:
    try:
        return PastRun(number=number, path=path, profile=file.read_head(path))
    except FileProblem as error:
        return PastRun(number=number, path=path, profile=None, problem=f"{error.reason}.")


def _files_newest_first() -> list[Path]:
    try:
        return sorted(folder().glob("[0-9]*.json.gz"), reverse=True)
    except OSError:
        return []
