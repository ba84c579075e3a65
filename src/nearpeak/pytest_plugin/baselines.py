"""Baselines: what a test took before, one file for each name, with one figure for each machine."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from nearpeak.errors import EnvironmentProblem, UsageError
from nearpeak.files import replace_file
from nearpeak.machines.store import Key
from nearpeak.records import from_json, to_json

SCHEMA = 1
"""Raised whenever the meaning of a stored figure changes."""
LARGEST_FILE_BYTES = 2**20
"""A figure takes some 400 bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """One figure, and the machine that it is of. `low` to `high` is its interval within the run that took it."""

    key: Key
    seconds: float
    low: float
    high: float
    kind: str
    """Which time it is: "step", or the kind of a timing."""
    date: str
    nearpeak: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineFile:
    """All figures of one name, ordered by machine."""

    schema: int = SCHEMA
    baselines: tuple[Baseline, ...] = ()

    def of(self, key: Key) -> Baseline | None:
        """The figure of one machine; another driver or another torch is another machine."""
        return next((baseline for baseline in self.baselines if baseline.key == key), None)


def path_of(folder: Path, name: str) -> Path:
    """The file of a name."""
    return folder / f"{name}.json"


def read(path: Path) -> BaselineFile:
    """The figures in a file, none where there is no file. UsageError where it cannot be read or trusted."""
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST_FILE_BYTES + 1)
    except FileNotFoundError:
        return BaselineFile()
    except OSError as error:
        raise UsageError(f"The baseline {path} cannot be read: {error.strerror or error}.") from None
    try:
        found = from_json(BaselineFile, json.loads(content.decode("utf-8")))
        if found.schema != SCHEMA:
            raise ValueError(f"it has schema {found.schema}, this version of nearpeak reads {SCHEMA}")
        for each in found.baselines:
            if not 0 < each.low <= each.seconds <= each.high < math.inf:
                raise ValueError(f"no time is {each.seconds} [{each.low}, {each.high}]")
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"The baseline {path} cannot be used: {str(error)[:300]}. Delete it, and run with --nearpeak-update."
        ) from None
    return found


def write(path: Path, baseline: Baseline) -> None:
    """Puts a figure into a file in the place of the one of the same machine; those of others stay."""
    others = [each for each in read(path).baselines if each.key != baseline.key]
    ordered = sorted([*others, baseline], key=lambda each: (each.key.device, each.key.driver, each.key.torch))
    text = json.dumps(to_json(BaselineFile(baselines=tuple(ordered))), indent=1) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, text.encode())
    except OSError as error:
        raise EnvironmentProblem(f"The baseline {path} cannot be written: {error.strerror or error}.") from None


def machine_text(key: Key) -> str:
    """A machine in words."""
    return f"{key.device}, driver {key.driver}, torch {key.torch}"
