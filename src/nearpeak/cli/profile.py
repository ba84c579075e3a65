"""Where the time of a step goes: measured, against what the hardware allows.

Runs SCRIPT, or -m MODULE, with its arguments, as it is, finds its steps, and accounts for one of them. A training step
ends with an optimizer's step, an inference step with the call of a module. --step MODULE:FUNCTION says that each call
of a function is a step: of a module, of a file (FILE.py:FUNCTION), or of the script itself (__main__:FUNCTION).
Options go before SCRIPT; what follows is its own. SCRIPT may be FILE.py:FUNCTION, a case as for `nearpeak bench`.

--trace FILE reads a file that torch.profiler wrote with record_shapes=True, on any machine, or a saved profile. The
last ten runs are kept: @last is the last one, @2 the one before.

examples:
  nearpeak profile examples/train.py --steps 30
  nearpeak profile --save run.json --stop train.py config.yaml
  nearpeak profile --open -o run.html train.py
  nearpeak profile --step __main__:Trainer.train_batch -m package.train
  nearpeak profile --trace step.json.gz --by line
  nearpeak profile --trace @last --by module
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from nearpeak.cli import profile_results
from nearpeak.cli.output import narrate
from nearpeak.cli.profile_results import show_profile
from nearpeak.cli.values import step_number
from nearpeak.errors import EnvironmentProblem, UsageError

if TYPE_CHECKING:
    from nearpeak.diagnose.profile import Profile


def configure(parser: argparse.ArgumentParser) -> None:
    """Add this verb's arguments."""
    parser.add_argument("--trace", metavar="FILE", help="a trace of torch.profiler, a saved profile, or @last")
    parser.add_argument(
        "--step",
        type=_step,
        metavar="WHICH",
        help="MODULE:FUNCTION each call of which is a step; with --trace the profiler's step N, or all (last)",
    )
    parser.add_argument("--stop", action="store_true", help="end the script when its step was captured")
    parser.add_argument(
        "--wait", type=float, metavar="SECONDS", help="end the script when no step ended for so long (never)"
    )
    parser.add_argument("--on", metavar="NAME", help="a machine of the catalogue (this one, or the trace's)")
    parser.add_argument("--ceilings", choices=("achievable", "theoretical"), default="achievable")
    profile_results.configure(parser)
    parser.add_argument(
        "-m", dest="module", metavar="MODULE", nargs=argparse.REMAINDER, help="a module with its arguments; comes last"
    )
    parser.add_argument("script", metavar="SCRIPT", nargs="?", help="a script, or FILE.py:FUNCTION")
    parser.add_argument("arguments", metavar="...", nargs=argparse.REMAINDER, help="the script's arguments")


def run(arguments: argparse.Namespace) -> int:
    """Account for a step and print where its time goes."""
    if arguments.list:
        if arguments.script or arguments.trace:
            raise UsageError("--list takes neither a SCRIPT nor --trace.")
        return profile_results.list_runs()
    profile_results.check(arguments)
    if arguments.module is not None and not arguments.module:
        raise UsageError("-m needs the name of a module.")
    if [bool(arguments.script), bool(arguments.module), bool(arguments.trace)].count(True) != 1:
        raise UsageError("Give a SCRIPT, -m MODULE or --trace FILE, one of them.")
    if arguments.step is not None and _is_function(arguments.step) == bool(arguments.trace):
        raise UsageError(
            f"--step {arguments.step}: a trace has steps by number, code has MODULE:FUNCTION each call of which is one."
        )
    if arguments.wait is not None and not arguments.wait > 0.0:
        raise UsageError(f"--wait {arguments.wait:g}: seconds are more than 0.")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler would write its own starts and stops to stderr
    if arguments.trace:
        return show_profile(from_file(arguments.trace, arguments), arguments, run=False)
    if arguments.script and ":" in Path(arguments.script).name:
        return show_profile(_from_case(arguments), arguments, run=True)
    return _script(arguments)


def from_file(name: str, arguments: argparse.Namespace) -> Profile:
    """The saved profile or the trace of this name; --on, --step and --ceilings belong to a trace."""
    from nearpeak.diagnose import kept, saved
    from nearpeak.diagnose.load import profile_trace

    path = kept.resolve(name)
    if not saved.is_saved(path):
        return profile_trace(path, on=arguments.on, step=arguments.step, ceilings=arguments.ceilings)
    if arguments.on or arguments.step is not None:
        raise UsageError(f"{name} is a saved profile: --on and --step belong to a trace.")
    return saved.read(path)


def _from_case(arguments: argparse.Namespace) -> Profile:
    from nearpeak.diagnose.run import profile
    from nearpeak.measure.case import load

    if arguments.step is not None or arguments.stop or arguments.wait is not None:
        raise UsageError("A case is one step: --step, --stop and --wait belong to a script.")
    if arguments.arguments:
        raise UsageError(f"A case takes no arguments, and got {' '.join(arguments.arguments)}.")
    case = load(arguments.script).build()
    return profile(case, on=arguments.on, ceilings=arguments.ceilings, progress=narrate)


def _script(arguments: argparse.Namespace) -> int:
    """The script's own exit code, where it fails; its profile all the same, where it took enough steps."""
    from nearpeak.diagnose.script import profile_script

    module, *given = arguments.module or [None, *arguments.arguments]
    ran = profile_script(
        arguments.script,
        given,
        module=module,
        step=arguments.step,
        on=arguments.on,
        ceilings=arguments.ceilings,
        stop=arguments.stop,
        wait_s=arguments.wait,
        progress=narrate,
    )
    if ran.profile is not None:
        shown = show_profile(ran.profile, arguments, run=True)
        return ran.exit_code or shown
    if ran.exit_code == 0:
        raise (EnvironmentProblem if ran.problem else UsageError)(ran.missing)
    narrate(f"nearpeak: it ended with exit code {ran.exit_code}, and there is no profile. {ran.missing}")
    own = [argument for argument in given if argument.partition("=")[0] in _own_options()]
    if ran.exit_code == 2 and own:
        narrate(f"nearpeak: {own[0]} was given to the script. Options of nearpeak go before it.")
    return ran.exit_code


def _own_options() -> set[str]:
    parser = argparse.ArgumentParser()
    configure(parser)
    return set(parser._option_string_actions) - {"-h", "--help", "-m"}


def _step(text: str) -> int | str:
    """A function by its place and name, or the number of a step."""
    return text if _is_function(text) else step_number(text)


def _is_function(step: int | str) -> bool:
    return isinstance(step, str) and ":" in step
