"""What changed from one run to another, and whether the change is significant.

A and B are saved profiles, traces of torch.profiler, or runs in the history: @last is the last one, @2 the one before
it. Step time, waterfall, ops, idle time, memory and findings of B are compared with those of A. Ops are matched across
renamed modules, other kernels and fusion.

--fail-over 3% ends with exit code 1 if a step of B is slower by more than 3 % and the change is significant, with 3 if
the runs cannot decide it, and with 0 otherwise. A line on stderr gives the reason.

examples:
  nearpeak diff @2 @last
  nearpeak diff main.json.gz change.json.gz --fail-over 3%
  nearpeak diff main.json.gz change.json.gz --markdown > comment.md
"""

from __future__ import annotations

import argparse
import sys

from nearpeak.cli.argument_types import share
from nearpeak.cli.output import narrate, print_result, terminal_style
from nearpeak.errors import UsageError

CODES = {"passed": 0, "failed": 1, "not known": 3}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add this verb's arguments."""
    parser.add_argument("before", metavar="A", help="the run to compare with")
    parser.add_argument("after", metavar="B", help="the run that is compared")
    parser.add_argument(
        "--fail-over", type=share, metavar="SHARE", help="exit code 1 where a step is slower by more: 3%% or 0.03"
    )
    parser.add_argument("--top", type=int, default=12, help="how many ops to list at most (12)")
    parser.add_argument("--markdown", action="store_true", help="print Markdown, for a comment on a pull request")
    parser.add_argument("--json", metavar="FILE", help="also write JSON to FILE; - writes JSON alone to stdout")


def run(arguments: argparse.Namespace) -> int:
    """Compare two runs, print what changed, and say whether the gate holds."""
    from nearpeak.diffs.difference import difference
    from nearpeak.diffs.gate import gate
    from nearpeak.profiling.load import load
    from nearpeak.render.markdown import markdown
    from nearpeak.render.text import text
    from nearpeak.render.views.difference import MARKER, document

    if arguments.top < 1:
        raise UsageError(f"--top {arguments.top}: a table has at least one row.")
    limit = arguments.fail_over
    if limit is not None and not 0.0 <= limit < float("inf"):
        raise UsageError(f"--fail-over {limit:g}: a share is not below zero; 3% allows a step to take 3 % longer.")
    changes = difference(load(arguments.before), load(arguments.after))
    result = None if limit is None else gate(changes, limit)
    names = arguments.before, arguments.after
    if arguments.markdown:
        report = f"{MARKER}\n{markdown(document(changes, arguments.top, names=names, gate=result))}".rstrip()
    else:
        report = text(document(changes, arguments.top, names=names), terminal_style(sys.stdout))
    print_result(report, changes, arguments.json)
    if result is None:
        return 0
    sys.stdout.flush()
    narrate(f"nearpeak: {result.outcome}: {result.reason}.")
    return CODES[result.outcome]
