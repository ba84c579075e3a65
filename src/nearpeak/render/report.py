"""A profile, or any document, as a file in the format that the end of its name says.

`PROFILE_FORMATS` and `DOCUMENT_FORMATS` are the tables of formats: a new one is a writer and a line here.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from nearpeak._files import write_file
from nearpeak.errors import EnvironmentProblem, UsageError
from nearpeak.machines.machine import Machine
from nearpeak.profiles import file
from nearpeak.profiles.profile import Profile
from nearpeak.render.csv import csv_text
from nearpeak.render.document import Document
from nearpeak.render.html.document import document_page
from nearpeak.render.html.profile import profile_page
from nearpeak.render.markdown import markdown
from nearpeak.render.perfetto import trace_json
from nearpeak.render.picture.png import png
from nearpeak.render.picture.scene import Scene
from nearpeak.render.picture.svg import svg
from nearpeak.render.text import text
from nearpeak.render.views.job import ranks_picture
from nearpeak.render.views.plan.sliders import Sliders
from nearpeak.render.views.profile import ReportOptions, document, ops_csv, select_findings
from nearpeak.render.views.profile_pictures import profile_roofline, profile_waterfall
from nearpeak.render.views.profile_roofs import calibrated_machine, catalogue_machine

COMPRESSION_LEVEL = 6
"""For a timeline: names of kernels are long, and alike."""

DOCUMENT_FORMATS: Mapping[str, Callable[[Document, Sliders | None], str]] = {
    ".html": document_page,
    ".svg": lambda report, sliders: report.pictures[0].svg,
    ".md": lambda report, sliders: markdown(report),
    ".csv": lambda report, sliders: csv_text(report),
    ".txt": lambda report, sliders: text(report) + "\n",
}


def document_ending(path: str | Path, report: Document) -> str:
    """The ending of a name; UsageError where it is no format of documents, and for a picture of what has none.

    ".json" is one: its content is the answer itself, which a document no longer is.
    """
    ending = Path(path).suffix.lower()
    endings = [*DOCUMENT_FORMATS, ".json"]
    if ending not in endings:
        raise UsageError(f"{path}: a plan is written as one of {', '.join(endings)}.")
    if ending == ".svg" and not report.pictures:
        others = ", ".join(each for each in endings if each != ".svg")
        raise UsageError(f"{path}: this answer has no picture. It is written as one of {others}.")
    return ending


def _html(profile: Profile, options: ReportOptions) -> str:
    return profile_page(profile, machine=_roofline_machine(profile), findings=options.findings)


def _perfetto(profile: Profile, options: ReportOptions) -> str:
    return trace_json(profile, options.findings or ())


def _scene(profile: Profile, options: ReportOptions) -> Scene:
    if options.picture == "roofline":
        return profile_roofline(profile, _roofline_machine(profile))
    if options.picture == "ranks" and profile.job is None:
        raise UsageError("A profile of one process has no picture of ranks.")
    if profile.job is not None and options.picture in (None, "ranks"):
        return ranks_picture(profile.job)
    return profile_waterfall(profile, options.findings or ())


def _roofline_machine(profile: Profile) -> Machine | None:
    """The machine whose ceilings are drawn: as it was calibrated here, where the bounds are against that."""
    return calibrated_machine(profile) or catalogue_machine(profile)


PROFILE_FORMATS: Mapping[str, Callable[[Profile, ReportOptions], str | bytes]] = {
    ".html": _html,
    ".md": lambda profile, options: markdown(document(profile, options)),
    ".csv": lambda profile, options: ops_csv(profile),
    ".txt": lambda profile, options: text(document(profile, options)) + "\n",
    ".svg": lambda profile, options: svg(_scene(profile, options)),
    ".png": lambda profile, options: png(_scene(profile, options), dark=options.dark),
    ".perfetto.json": _perfetto,
    ".trace.json": _perfetto,
    ".json": lambda profile, options: file.to_bytes(profile, compressed=False),
}
"""The first ending that fits counts; JSON may also end in .gz."""


def profile_ending(path: str | Path) -> str:
    """The ending of a name that says the format of a profile; UsageError for any other.

    >>> profile_ending("run.html"), profile_ending("step.trace.json.gz"), profile_ending("run.json")
    ('.html', '.trace.json', '.json')
    """
    name = Path(path).name.lower()
    for ending in PROFILE_FORMATS:
        if name.endswith(ending) or (ending.endswith(".json") and name.endswith(f"{ending}.gz")):
            return ending
    endings = [each for ending in PROFILE_FORMATS for each in _with_gz(ending)]
    raise UsageError(f"{path}: a report is written as one of {', '.join(endings)}.")


def _with_gz(ending: str) -> tuple[str, ...]:
    return (ending, f"{ending}.gz") if ending.endswith(".json") else (ending,)


def check_path(path: str | Path) -> None:
    """UsageError where a report cannot be written under this name; to be asked before a long run."""
    ending = profile_ending(path)
    if not Path(path).parent.is_dir():
        raise UsageError(f"{path} cannot be written: there is no folder {Path(path).parent}.")
    if Path(path).is_dir():
        raise UsageError(f"{path} cannot be written: it is a folder.")
    if ending == ".png" and find_spec("PIL") is None:
        raise EnvironmentProblem(
            f"{path}: a PNG is drawn by Pillow, which is not installed. Install it with `pip install 'nearpeak[png]'`, "
            "or write an .svg, which needs nothing."
        )


def write(profile: Profile, path: str | Path, options: ReportOptions | None = None) -> None:
    """Writes a profile in the format that the name ends with: whole, or not at all."""
    target = Path(path)
    check_path(target)
    compressed = target.name.lower().endswith(".gz")
    write_file(target, content(profile, profile_ending(target), options, compressed=compressed))


def content(profile: Profile, ending: str, options: ReportOptions | None = None, *, compressed: bool = False) -> bytes:
    """The bytes of a file with this ending."""
    options = options or ReportOptions()
    if options.findings is None:
        options = replace(options, findings=select_findings(profile))
    report = PROFILE_FORMATS[ending](profile, options)
    if isinstance(report, str):
        report = report.encode("utf-8", "backslashreplace")  # a file may hold half a character
    return gzip.compress(report, compresslevel=COMPRESSION_LEVEL, mtime=0) if compressed else report
