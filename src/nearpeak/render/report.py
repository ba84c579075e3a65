"""`write`: a profile as a file, in the format that the end of its name says."""

from __future__ import annotations

import gzip
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from nearpeak.errors import EnvironmentProblem, UsageError
from nearpeak.machines.machine import Machine
from nearpeak.profiles import file
from nearpeak.profiles.finding import Finding
from nearpeak.profiles.profile import Profile
from nearpeak.profiles.ranking import GroupBy
from nearpeak.render.csv import ops_csv
from nearpeak.render.html.profile import profile_page
from nearpeak.render.perfetto import trace_json
from nearpeak.render.picture.png import png
from nearpeak.render.picture.scene import Scene
from nearpeak.render.picture.svg import svg
from nearpeak.render.views.profile import MOST_FINDINGS, select_findings, text
from nearpeak.render.views.profile_markdown import markdown
from nearpeak.render.views.profile_pictures import profile_roofline, profile_waterfall
from nearpeak.render.views.profile_roofs import calibrated_machine, catalogue_machine

Format = Literal["html", "markdown", "csv", "text", "svg", "png", "perfetto", "profile"]
PictureKind = Literal["waterfall", "roofline"]

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
COMPRESSION_LEVEL = 6
"""Of compression, for a timeline: names of kernels are long, and alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportOptions:
    """What a report shows, where its format leaves a choice."""

    findings: Sequence[Finding] | None = None
    """Those to show; those that save enough where it is None."""
    most_findings: int = MOST_FINDINGS
    top: int = 12
    by: GroupBy = "op"
    picture: PictureKind = "waterfall"
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


def check_path(path: str | Path) -> None:
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


def write(profile: Profile, path: str | Path, choices: ReportOptions | None = None) -> None:
    """Writes a profile in the format that the name ends with: whole, or not at all."""
    target = Path(path)
    check_path(target)
    compressed = target.name.lower().endswith(".gz")
    file.write_file(target, content(profile, format_of(target), choices or ReportOptions(), compressed=compressed))


def content(profile: Profile, form: Format, choices: ReportOptions, *, compressed: bool = False) -> bytes:
    """The bytes of the file."""
    if form == "profile":
        return file.to_bytes(profile, compressed=compressed)
    found = select_findings(profile) if choices.findings is None else choices.findings
    if form == "png":
        return png(_scene(profile, found, choices.picture), dark=choices.dark)
    made = _render_text(profile, form, found, choices).encode(
        "utf-8", "backslashreplace"
    )  # a file may hold half a character
    return gzip.compress(made, compresslevel=COMPRESSION_LEVEL, mtime=0) if compressed else made


def ceilings_machine(profile: Profile) -> Machine | None:
    """The machine whose ceilings are drawn: as it was calibrated here, where the bounds are against that."""
    return calibrated_machine(profile) or catalogue_machine(profile)


def _render_text(profile: Profile, form: Format, found: Sequence[Finding], choices: ReportOptions) -> str:
    most = choices.most_findings
    if form == "html":
        return profile_page(profile, machine=ceilings_machine(profile), findings=found)
    if form == "markdown":
        return markdown(profile, found, top=choices.top, by=choices.by, most_findings=most)
    if form == "csv":
        return ops_csv(profile)
    if form == "perfetto":
        return trace_json(profile, found)
    if form == "svg":
        return svg(_scene(profile, found, choices.picture))
    return text(profile, choices.top, choices.by, findings=found, most_findings=most) + "\n"


def _scene(profile: Profile, found: Sequence[Finding], picture: PictureKind) -> Scene:
    if picture == "roofline":
        return profile_roofline(profile, ceilings_machine(profile))
    return profile_waterfall(profile, found)
