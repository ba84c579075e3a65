"""Where a profile goes: the report to stdout, then the run to the kept ones, then the files that were asked for."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nearpeak.cli.output import narrate, show, style_of
from nearpeak.errors import NearpeakError, UsageError

if TYPE_CHECKING:
    from nearpeak.diagnose.profile import Profile
    from nearpeak.render.report import Choices


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of the results."""
    output = parser.add_argument_group("results")
    add_choices(output)
    output.add_argument("--rules", action="append", default=[], metavar="FILE.py", help="run a file with more rules")
    output.add_argument(
        "-o",
        "--save",
        action="append",
        default=[],
        metavar="FILE",
        help="also write the profile as .json or .json.gz, or a report of it as .html, .md, .csv ...",
    )
    output.add_argument("--open", action="store_true", help="show the HTML report in the browser at the end")
    output.add_argument("--json", metavar="FILE", help="also write JSON to FILE; - writes JSON alone to stdout")
    output.add_argument("--no-keep", action="store_true", help="do not keep this run (nor does NEARPEAK_KEEP=0)")
    output.add_argument("--list", action="store_true", help="list the kept runs: @last, @2 ...")


def add_choices(output: argparse._ArgumentGroup) -> None:
    """Add the options that say what a report shows."""
    output.add_argument("--by", choices=("op", "module", "line", "phase", "family"), default="op", help="what to rank")
    output.add_argument("--top", type=int, default=12, help="how many rows the ranking has at most (12)")
    output.add_argument("--findings", type=int, default=5, metavar="N", help="how many findings to show at most (5)")
    output.add_argument("--least", type=float, default=1.0, metavar="PERCENT", help="of the step, for a finding (1)")
    output.add_argument(
        "--ignore", action="append", default=[], metavar="RULE", help="do not show it; RULE@train.py:41 for one line"
    )


def check(arguments: argparse.Namespace) -> None:
    """UsageError for what would fail only after the run."""
    from nearpeak.diagnose.findings import add_rules, check_names

    check_choices(arguments)
    for file in arguments.rules:
        add_rules(file)
    check_names(arguments.ignore)
    arguments.save = [str(Path(path).absolute()) for path in arguments.save]  # the script may change the folder
    if arguments.json and arguments.json != "-":
        arguments.json = str(Path(arguments.json).absolute())


def check_choices(arguments: argparse.Namespace) -> None:
    """UsageError for numbers and names of files that cannot be."""
    from nearpeak.render.report import check_name

    if arguments.top < 1:
        raise UsageError(f"--top {arguments.top}: a table has at least one row.")
    if arguments.findings < 0 or not arguments.least >= 0.0:
        raise UsageError("--findings and --least are not below zero.")
    for path in arguments.save:
        check_name(path)


def choices_of(profile: Profile, arguments: argparse.Namespace) -> Choices:
    """What was asked for, for all formats."""
    from nearpeak.render.profile_findings import shown
    from nearpeak.render.report import Choices

    return Choices(
        findings=shown(profile, arguments.least / 100, arguments.ignore),
        most_findings=arguments.findings,
        top=arguments.top,
        by=arguments.by,
    )


def show_profile(profile: Profile, arguments: argparse.Namespace, *, run: bool) -> int:
    """Prints the report, and after it writes what was asked for; the exit code says whether all of that was written.

    A report that was printed is not lost to a full disk, nor is a run to a terminal that is gone.
    """
    code = 0
    choices = choices_of(profile, arguments)
    try:
        show(report_text(profile, choices), profile, arguments.json)
        sys.stdout.flush()
    except NearpeakError as error:
        narrate(f"nearpeak: {error}")
        code = error.exit_code
    finally:
        if run and not arguments.no_keep:
            _keep(profile)
        code = write_reports(profile, arguments.save, choices, opened=arguments.open) or code
    return code


def report_text(profile: Profile, choices: Choices) -> str:
    """The report for the terminal."""
    from nearpeak.render.profile import text

    return text(
        profile,
        choices.top,
        choices.by,
        style_of(sys.stdout),
        findings=choices.findings,
        most_findings=choices.most_findings,
    )


def write_reports(profile: Profile, paths: Sequence[str], choices: Choices, *, opened: bool) -> int:
    """Writes each file, whatever happens to the others, and opens the first page; the exit code of the last error."""
    from nearpeak.cli.browser import open_page, own_page
    from nearpeak.render.report import format_of, write

    code = 0
    page: Path | None = None
    for path in paths:
        try:
            write(profile, path, choices)
        except NearpeakError as error:
            narrate(f"nearpeak: {error}")
            code = error.exit_code
            continue
        narrate(f"wrote {path}")
        page = page or (Path(path) if format_of(path) == "html" else None)
    if opened:
        try:
            open_page(page or own_page(profile, choices))
        except NearpeakError as error:
            narrate(f"nearpeak: {error}")
            code = error.exit_code
    return code


def list_runs() -> int:
    """Prints the kept runs."""
    from nearpeak.diagnose import kept
    from nearpeak.render.kept import text

    runs = kept.kept()
    if not runs:
        narrate(f"No runs are kept in {kept.folder()}. `nearpeak profile SCRIPT` keeps one.")
        return 0
    print(text(runs))
    return 0


def _keep(profile: Profile) -> None:
    from nearpeak.diagnose import kept

    if not kept.wanted():
        return
    try:
        kept.keep(profile)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        narrate(f"nearpeak: this run was not kept: {kept.folder()} cannot be written: {reason}.")
    else:
        narrate("kept as @last; `nearpeak report @last` shows it again")
