"""Where the time of a step goes: measured kernels against what the hardware allows.

--trace FILE reads a file that torch.profiler wrote with record_shapes=True, on any machine and with any tool around
it; no GPU is needed. FILE can be a profile that was saved with --save, too.

examples:
  nearpeak profile --trace step.json.gz
  nearpeak profile --trace step.json.gz --on h100-sxm --by line --save step.profile.json
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from nearpeak.cli.values import step_number
from nearpeak.errors import UsageError


def configure(parser: argparse.ArgumentParser) -> None:
    """Add this verb's arguments."""
    parser.add_argument("--trace", metavar="FILE", required=True, help="a trace of torch.profiler, or a saved profile")
    parser.add_argument("--step", type=step_number, metavar="N", help="the profiler's step, or all (the last)")
    parser.add_argument("--on", metavar="NAME", help="a machine of the catalogue (the one that the file names)")
    parser.add_argument("--ceilings", choices=("achievable", "theoretical"), default="achievable")
    output = parser.add_argument_group("results")
    output.add_argument("--by", choices=("op", "module", "line", "phase", "family"), default="op", help="what to rank")
    output.add_argument("--top", type=int, default=12, help="how many rows the ranking has at most (12)")
    output.add_argument("--save", metavar="FILE", help="keep the profile as .json or .json.gz")
    output.add_argument("--json", metavar="FILE", help="also write JSON to FILE; - writes JSON alone to stdout")


def run(arguments: argparse.Namespace) -> int:
    """Account for a step and print where its time goes."""
    from nearpeak.diagnose import saved
    from nearpeak.diagnose.load import profile_trace
    from nearpeak.records import to_json
    from nearpeak.render.profile import text

    if arguments.top < 1:
        raise UsageError(f"--top {arguments.top}: a table has at least one row.")
    if saved.is_saved(arguments.trace):
        if arguments.on or arguments.step is not None:
            raise UsageError(f"{arguments.trace} is a saved profile: --on and --step belong to a trace.")
        profile = saved.read(arguments.trace)
    else:
        profile = profile_trace(arguments.trace, on=arguments.on, step=arguments.step, ceilings=arguments.ceilings)
    if arguments.save:
        saved.save(profile, arguments.save)
        print(f"wrote {arguments.save}", file=sys.stderr)
    content = json.dumps(to_json(profile), indent=1) if arguments.json else ""
    if arguments.json == "-":
        print(content)
        return 0
    if arguments.json:
        Path(arguments.json).write_text(content + "\n", encoding="utf-8")
    print(text(profile, arguments.top, arguments.by))
    return 0
