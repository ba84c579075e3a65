"""A profile as a report: HTML, Markdown, CSV, pictures, Perfetto, or text.

RUN is a saved profile, @last (the last run; @2 the one before), or a trace that torch.profiler wrote with
record_shapes=True. The end of a file's name says what is written:

  .html                        one page that needs no network
  .md                          for a pull request or an issue
  .csv                         all ops, for a spreadsheet
  .svg, .png                   the waterfall, or --picture roofline
  .perfetto.json, .trace.json  the timeline with what is known of each op, for ui.perfetto.dev; also .gz
  .json, .json.gz              the profile itself
  .txt                         what --full prints

examples:
  nearpeak report run.json -o run.html
  nearpeak report @last --open
  nearpeak report step.json.gz --on h100-sxm -o step.html -o step.perfetto.json.gz
  nearpeak report run.json -o roofline.svg --picture roofline
"""

from __future__ import annotations

import argparse
import dataclasses

from nearpeak.cli.argument_types import step_number
from nearpeak.cli.output import print_result
from nearpeak.cli.verbs.profile import add_choices, check_choices, from_file, options_of, report_text, write_reports
from nearpeak.errors import UsageError


def configure(parser: argparse.ArgumentParser) -> None:
    """Add this verb's arguments."""
    parser.add_argument("run", metavar="RUN", help="a saved profile, @last, or a trace of torch.profiler")
    parser.add_argument(
        "-o",
        "--output",
        dest="save",
        action="append",
        default=[],
        metavar="FILE",
        help="write it there, in the format that the name ends with; may be given again",
    )
    parser.add_argument("--open", action="store_true", help="show the HTML report in the browser")
    output = parser.add_argument_group("what is shown")
    add_choices(output)
    output.add_argument(
        "--picture",
        choices=("waterfall", "roofline", "ranks"),
        help="what .svg and .png show (the ranks of a job, or else the waterfall)",
    )
    output.add_argument("--dark", action="store_true", help="a .png for a dark page; an .svg follows its page")
    output.add_argument("--json", metavar="FILE", help="also write JSON to FILE; - writes JSON alone to stdout")
    traces = parser.add_argument_group("traces")
    traces.add_argument("--step", type=step_number, metavar="N", help="the profiler's step N, or all (last)")
    traces.add_argument("--on", metavar="NAME", help="a machine of the catalogue (the trace's)")
    traces.add_argument("--ceilings", choices=("achievable", "theoretical"), default="achievable")


def run(arguments: argparse.Namespace) -> int:
    """Read the profile, and print it or write reports."""
    from nearpeak.findings.engine import check_ignored_rules
    from nearpeak.profiles.file import with_grade
    from nearpeak.render.report import profile_ending

    check_choices(arguments)
    endings = {profile_ending(path) for path in arguments.save}
    if arguments.picture and not endings & {".svg", ".png"}:
        raise UsageError(f"--picture {arguments.picture}: name an .svg or a .png with -o.")
    if arguments.dark and ".png" not in endings:
        raise UsageError("--dark: name a .png with -o.")
    profile = from_file(arguments.run, arguments)
    known = {finding.rule for finding in profile.findings}  # some may be rules of the user's own
    check_ignored_rules(item for item in arguments.ignore if item.partition("@")[0] not in known)
    options = dataclasses.replace(
        options_of(profile, arguments),
        picture=arguments.picture,
        dark=arguments.dark,
    )
    if arguments.json or not (arguments.save or arguments.open):
        print_result(report_text(profile, options, full=arguments.full), with_grade(profile), arguments.json)
    return write_reports(profile, arguments.save, options, opened=arguments.open)
