"""`write`: a profile as a file, in the format that the end of its name says."""

from __future__ import annotations

import gzip
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from nearpeak.diagnose import saved
from nearpeak.diagnose.finding import Finding
from nearpeak.diagnose.profile import Profile
from nearpeak.diagnose.ranking import By
from nearpeak.errors import EnvironmentProblem, UsageError
from nearpeak.machines.model import Machine
from nearpeak.render.html.page import page
from nearpeak.render.html.roofs import calibrated, machine_of
from nearpeak.render.perfetto import trace_json
from nearpeak.render.png import png
from nearpeak.render.profile import text
from nearpeak.render.profile_csv import csv_text
from nearpeak.render.profile_findings import MOST, shown
from nearpeak.render.profile_markdown import markdown
from nearpeak.render.profile_roofline import profile_roofline
from nearpeak.render.profile_waterfall import profile_waterfall
from nearpeak.render.scene import Scene
from nearpeak.render.svg import svg

Format = Literal["html", "markdown", "csv", "text", "svg", "png", "perfetto", "profile"]
Picture = Literal["waterfall", "roofline"]

ENDINGS: Mapping[str, Format] = {
    ".html": "html",
    ".md": "markdown",
    ".csv": "csv",
    ".txt": "text",
    ".svg": "svg",
    ".png": "png",
    ".perfetto.json": "perfetto",
    ".perfetto.json.gz": "perfetto",
    ".trace.json": "perfetto",
    ".trace.json.gz": "perfetto",
    ".json": "profile",
    ".json.gz": "profile",
}
"""The first that fits counts."""
LEVEL = 6
"""Of compression, for a timeline: names of kernels are long, and alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """What a report shows, where its format leaves a choice."""

    findings: Sequence[Finding] | None = None
    """Those to show; those that save enough where it is None."""
    most_findings: int = MOST
    top: int = 12
    by: By = "op"
    picture: Picture = "waterfall"
    dark: bool = False
    """A PNG for a dark page; all other formats follow the reader's."""


def format_of(path: str | Path) -> Format:
    """The format that a name ends with; UsageError for any other.

    >>> format_of("run.html"), format_of("step.trace.json.gz"), format_of("run.json")
    ('html', 'perfetto', 'profile')
    """
    name = Path(path).name.lower()
    found = next((form for ending, form in ENDINGS.items() if name.endswith(ending)), None)
    if found is None:
        raise UsageError(f"{path}: a report is written as one of {', '.join(ENDINGS)}.")
    return found


def check_name(path: str | Path) -> None:
    """UsageError where a report cannot be written under this name; to be asked before a long run."""
    form = format_of(path)
    if not Path(path).parent.is_dir():
        raise UsageError(f"{path} cannot be written: there is no folder {Path(path).parent}.")
    if Path(path).is_dir():
        raise UsageError(f"{path} cannot be written: it is a folder.")
    if form == "png" and find_spec("PIL") is None:
        raise EnvironmentProblem(
            f"{path}: a PNG is drawn by Pillow, which is not installed. Install it with `pip install 'nearpeak[png]'`, "
            "or write an .svg, which needs nothing."
        )


def write(profile: Profile, path: str | Path, choices: Choices | None = None) -> None:
    """Writes a profile in the format that the name ends with: whole, or not at all."""
    target = Path(path)
    check_name(target)
    compressed = target.name.lower().endswith(".gz")
    saved.replace(target, content(profile, format_of(target), choices or Choices(), compressed=compressed))


def content(profile: Profile, form: Format, choices: Choices, *, compressed: bool = False) -> bytes:
    """The bytes of the file."""
    if form == "profile":
        return saved.content(profile, compressed=compressed)
    found = shown(profile) if choices.findings is None else choices.findings
    if form == "png":
        return png(_scene(profile, found, choices.picture), dark=choices.dark)
    made = _text(profile, form, found, choices).encode("utf-8", "backslashreplace")  # a file may hold half a character
    return gzip.compress(made, compresslevel=LEVEL, mtime=0) if compressed else made


def machine_for(profile: Profile) -> Machine | None:
    """The machine whose ceilings are drawn: as it was calibrated here, where the bounds are against that."""
    return calibrated(profile) or machine_of(profile)


def _text(profile: Profile, form: Format, found: Sequence[Finding], choices: Choices) -> str:
    most = choices.most_findings
    if form == "html":
        return page(profile, machine=machine_for(profile), findings=found)
    if form == "markdown":
        return markdown(profile, found, top=choices.top, by=choices.by, most_findings=most)
    if form == "csv":
        return csv_text(profile)
    if form == "perfetto":
        return trace_json(profile, found)
    if form == "svg":
        return svg(_scene(profile, found, choices.picture))
    return text(profile, choices.top, choices.by, findings=found, most_findings=most) + "\n"


def _scene(profile: Profile, found: Sequence[Finding], picture: Picture) -> Scene:
    if picture == "roofline":
        return profile_roofline(profile, machine_for(profile))
    return profile_waterfall(profile, found)
