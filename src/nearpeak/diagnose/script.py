"""`profile_script`: runs a script or a module as it is, finds its steps, and accounts for the time of one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from nearpeak.bound.times import Ceilings
from nearpeak.capture.machine import machine as find_machine
from nearpeak.capture.marked import MarkedFunction
from nearpeak.capture.steps import watching_steps
from nearpeak.diagnose import main_module
from nearpeak.diagnose.patience import OutOfTime, waiting_for_steps
from nearpeak.diagnose.profile import Profile
from nearpeak.diagnose.watch import SAYS, Stop, Watch
from nearpeak.errors import NearpeakError, UsageError
from nearpeak.machines import store
from nearpeak.machines.model import Machine
from nearpeak.measure.options import Progress
from nearpeak.units import seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptRun:
    """A script's profile and its own exit code."""

    profile: Profile | None
    """None where it took too few steps, or where they could not be profiled."""
    exit_code: int
    steps: int
    """How many steps were seen."""
    wall_s: float | None = None
    """How long a clean step took; known before there is a profile."""
    missing: str = ""
    """Why there is no profile, and what to do."""
    problem: bool = False
    """Whether that is for lack of something on this machine, not of steps."""


def profile_script(
    path: str | Path | None = None,
    arguments: Sequence[str] = (),
    *,
    module: str | None = None,
    step: str | None = None,
    on: str | Machine | None = None,
    ceilings: Ceilings = "achievable",
    stop: bool = False,
    wait_s: float | None = None,
    progress: Progress | None = None,
) -> ScriptRun:
    """Runs a script with its arguments, as `python path ...` would, and profiles one of its steps.

    Steps are found: a training step ends with an optimizer's step, an inference step with the call of a module. The
    script's results are its own; it only takes longer for two profiled steps and a traced one.

    Args:
        path: The script.
        arguments: Its command line.
        module: A module instead, as `python -m module ...`.
        step: A function each call of which is a step, as MODULE:FUNCTION, FILE.py:FUNCTION or __main__:FUNCTION.
        on: The machine whose bounds count; this one where it is None.
        ceilings: Against what the machine achieves, or against its datasheet.
        stop: End the script as soon as a step was captured, instead of running it to its end.
        wait_s: End the script when no step ended for so many seconds; None waits for ever.
        progress: Called with a line of text now and then.
    """
    if (path is None) == (module is None):
        raise UsageError("Give a script or a module, one of the two.")
    say = progress or (lambda line: None)
    folder = Path.cwd() if path is None else Path(path).resolve().parent
    process = os.getpid()
    watch = Watch(say, stop=stop)
    exit_code = 0
    with main_module.path_of(Path(path).resolve() if path is not None and Path(path).is_dir() else folder):
        main = main_module.script(path) if path is not None else main_module.module(module or "")
        machine = _machine_before(on, progress)
        say(f"running {main.name}")
        say(SAYS["warm-up"])
        try:
            with ExitStack() as stack:
                steps = watch.steps = stack.enter_context(watching_steps(watch))
                marked = None if step is None else MarkedFunction(step, steps.mark)
                if marked is not None:
                    steps.told = True
                    if not main.has(marked):
                        stack.enter_context(marked.in_modules())
                stack.enter_context(waiting_for_steps(watch, say, wait_s))
                main.run(arguments, marked)
        except Stop:
            pass
        except NearpeakError:
            raise
        except OutOfTime:
            watch.problem = watch.problem or f"no step ended for {seconds(wait_s or 0.0)}, and it was ended as asked."
        except BaseException as error:  # also what is no Exception: it is the script's, and its report is ours
            exit_code = main_module.exit_code_of(error)
        finally:
            watch.abandon()
    if os.getpid() != process:  # a child that the script forked, and that came to its end
        sys.exit(exit_code)
    if marked is not None and not marked.found and exit_code == 0:
        raise UsageError(f"--step {step}: {main.name} imported no module {marked.place!r}.")
    captured = watch.captured(main.name)
    found = None
    if captured is not None:
        found = captured.profile(machine or find_machine(progress=progress), ceilings=ceilings)
    return ScriptRun(
        profile=found,
        exit_code=exit_code,
        steps=watch.schedule.steps,
        wall_s=watch.schedule.wall_s,
        missing="" if found is not None else watch.what_is_missing(main.name),
        problem=bool(watch.problem),
    )


def _machine_before(on: str | Machine | None, progress: Progress | None) -> Machine | None:
    """The machine whose bounds count; None for a GPU here, which is looked at when the script is over.

    A script may choose its GPUs by CUDA_VISIBLE_DEVICES, which has no effect once the driver was asked for them. What
    is random in a script must not depend on what was measured before it.
    """
    if isinstance(on, Machine):
        return on
    if on is not None or not _has_gpu():
        with torch.random.fork_rng(devices=[]):
            return find_machine(on, progress=progress)
    if not any((store.folder() / "machines").glob("*.json")):
        (progress or (lambda line: None))("measuring this machine, once")
        subprocess.run([sys.executable, "-m", "nearpeak", "machine"], stdout=subprocess.DEVNULL, check=False)
    return None


def _has_gpu() -> bool:
    """Whether there is one, without starting CUDA in this process."""
    name, before = "PYTORCH_NVML_BASED_CUDA_CHECK", os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK")
    os.environ[name] = "1"
    try:
        return torch.cuda.is_available()
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
