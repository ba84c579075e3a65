"""Measurements in a CSV file against the planner.

The columns of the file say what it holds: training runs, serving runs,
collectives, or pairs of layouts with their winner. Each source is predicted by
constants that were fitted without it. Errors by source, architecture, GPU and
scale, and the rows that are furthest off.

--fail-over 10% ends with exit code 1 where a mean error is above it.

examples:
  nearpeak plan validate benchmarks/measurements/measured_training.csv
  nearpeak plan validate benchmarks/measurements/measured_collectives.csv --worst 20 -o collectives.html
  nearpeak plan validate benchmarks/measurements/layout_pairs.csv
"""

from __future__ import annotations

import argparse
from pathlib import Path

from nearpeak.cli.argument_types import share
from nearpeak.cli.output import narrate
from nearpeak.cli.plan.options import add_results, write_plan
from nearpeak.errors import UsageError


def configure(parser: argparse.ArgumentParser) -> None:
    """Add this question's arguments."""
    parser.add_argument("file", metavar="FILE", help="a CSV file of measurements")
    parser.add_argument("--seen", action="store_true", help="use the constants that were fitted on all sources")
    parser.add_argument("--runs", metavar="FOLDER", help="pairs: where the files are whose rows they name")
    parser.add_argument("--worst", type=int, default=10, metavar="N", help="how many of the worst rows to show (10)")
    parser.add_argument("--fail-over", type=share, metavar="SHARE", help="exit code 1 where a mean error is above it")
    add_results(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the errors, and say whether the gate holds."""
    from nearpeak.plan.validation.validate import validate
    from nearpeak.render.views.plan.validation import document

    if arguments.worst < 0:
        raise UsageError(f"--worst {arguments.worst}: must be at least 0. Nearest: --worst 0.")
    found = validate(
        Path(arguments.file),
        leave_out=not arguments.seen,
        worst=arguments.worst,
        runs=None if arguments.runs is None else Path(arguments.runs),
    )
    write_plan(document(found), found, arguments)
    limit = arguments.fail_over
    if limit is None:
        return 0
    above = [group for group in found.whole if group.mean_absolute > limit]
    for group in above:
        narrate(f"nearpeak: failed: {group.name}: a mean error of {group.mean_absolute:.1%} is above {limit:.1%}.")
    return 1 if above else 0
