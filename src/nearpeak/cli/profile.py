"""Where the time of a step goes: measured, against what the hardware allows.

Runs SCRIPT with its arguments, as it is, finds its steps, and accounts for one of them. A training step ends with an
optimizer's step, an inference step with the call of a module. Options go before SCRIPT; what follows is its own.
FILE.py:FUNCTION profiles a case, as for `nearpeak bench`.

--trace FILE reads a file that torch.profiler wrote with record_shapes=True, on any machine, or a saved profile.

examples:
  nearpeak profile examples/train.py --steps 30
  nearpeak profile --save run.json --stop train.py config.yaml
  nearpeak profile --trace step.json.gz --by line
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from nearpeak.cli.output import narrate, show
from nearpeak.cli.values import step_number
from nearpeak.errors import UsageError

if TYPE_CHECKING:
    from nearpeak.diagnose.profile import Profile


def configure(parser: argparse.ArgumentParser) -> None:
    """Add this verb's arguments."""
    parser.add_argument("--trace", metavar="FILE", help="a trace of torch.profiler, or a saved profile")
    parser.add_argument(
        "--step", type=step_number, metavar="N", help="with --trace: the profiler's step, or all (last)"
    )
    parser.add_argument("--stop", action="store_true", help="end the script when its step was captured")
    parser.add_argument("--on", metavar="NAME", help="a machine of the catalogue (this one, or the trace's)")
    parser.add_argument("--ceilings", choices=("achievable", "theoretical"), default="achievable")
    output = parser.add_argument_group("results")
    output.add_argument("--by", choices=("op", "module", "line", "phase", "family"), default="op", help="what to rank")
    output.add_argument("--top", type=int, default=12, help="how many rows the ranking has at most (12)")
    output.add_argument("--save", metavar="FILE", help="keep the profile as .json or .json.gz")
    output.add_argument("--json", metavar="FILE", help="also write JSON to FILE; - writes JSON alone to stdout")
    parser.add_argument("script", metavar="SCRIPT", nargs="?", help="a script, or FILE.py:FUNCTION")
    parser.add_argument("arguments", metavar="...", nargs=argparse.REMAINDER, help="the script's arguments")


def run(arguments: argparse.Namespace) -> int:
    """Account for a step and print where its time goes."""
    if arguments.top < 1:
        raise UsageError(f"--top {arguments.top}: a table has at least one row.")
    if bool(arguments.script) == bool(arguments.trace):
        raise UsageError("Give a SCRIPT or --trace FILE, one of the two.")
    if arguments.script and arguments.step is not None:
        raise UsageError("--step belongs to --trace.")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler would write its own starts and stops to stderr
    if arguments.trace:
        return _show(_from_file(arguments), arguments)
    if ":" in Path(arguments.script).name:
        return _show(_from_case(arguments), arguments)
    return _script(arguments)


def _from_file(arguments: argparse.Namespace) -> Profile:
    from nearpeak.diagnose import saved
    from nearpeak.diagnose.load import profile_trace

    if not saved.is_saved(arguments.trace):
        return profile_trace(arguments.trace, on=arguments.on, step=arguments.step, ceilings=arguments.ceilings)
    if arguments.on or arguments.step is not None:
        raise UsageError(f"{arguments.trace} is a saved profile: --on and --step belong to a trace.")
    return saved.read(arguments.trace)


def _from_case(arguments: argparse.Namespace) -> Profile:
    from nearpeak.diagnose.run import profile
    from nearpeak.measure.case import load

    if arguments.arguments:
        raise UsageError(f"A case takes no arguments, and got {' '.join(arguments.arguments)}.")
    case = load(arguments.script).build()
    return profile(case, on=arguments.on, ceilings=arguments.ceilings, progress=narrate)


def _script(arguments: argparse.Namespace) -> int:
    """The script's own exit code, where it fails; its profile all the same, where it took enough steps."""
    from nearpeak.diagnose.script import profile_script

    ran = profile_script(
        arguments.script,
        arguments.arguments,
        on=arguments.on,
        ceilings=arguments.ceilings,
        stop=arguments.stop,
        progress=narrate,
    )
    if ran.profile is not None:
        _show(ran.profile, arguments)
        return ran.exit_code
    if ran.exit_code:
        narrate(f"nearpeak: {arguments.script} failed after {ran.steps} steps; there is no profile.")
        return ran.exit_code
    raise UsageError(
        f"{arguments.script} took {ran.steps} steps, and a profile needs about ten: some to warm up, some for their "
        "wall time, two to profile and one to trace. A step ends with an optimizer's step, or with a module's call "
        "without gradients. Run it for longer, or time one step with nearpeak.profile(fn, *args)."
    )


def _show(profile: Profile, arguments: argparse.Namespace) -> int:
    from nearpeak.diagnose import saved
    from nearpeak.render.profile import text

    if arguments.save:
        saved.save(profile, arguments.save)
        narrate(f"wrote {arguments.save}")
    show(text(profile, arguments.top, arguments.by), profile, arguments.json)
    return 0
