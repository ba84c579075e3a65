"""`profile_script`: runs a script as it is, finds its steps, and accounts for the time of one."""

from __future__ import annotations

import runpy
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from nearpeak.bound.times import Ceilings
from nearpeak.capture.kineto.read import KinetoTrace
from nearpeak.capture.live import LiveTrace
from nearpeak.capture.machine import machine as find_machine
from nearpeak.capture.steps import watching_steps
from nearpeak.diagnose.captured import Captured, Profiler, synchronize
from nearpeak.diagnose.profile import Profile
from nearpeak.diagnose.schedule import Schedule
from nearpeak.errors import UsageError
from nearpeak.machines.model import Machine
from nearpeak.measure.options import Progress
from nearpeak.work.op import Trace

SAYS = {
    "clean": "taking the time of clean steps",
    "profiler start": "starting the profiler",
    "profiled": "profiling a step",
    "traced": "tracing a step",
    "done": "all that is needed was captured",
}


class _Stop(BaseException):
    """Ends a script that has given what is needed; no Exception, so that the script does not catch it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptRun:
    """A script's profile and its own exit code; the profile is None where it took too few steps."""

    profile: Profile | None
    exit_code: int
    steps: int
    """How many steps were seen."""


class _Watcher:
    """Does with each step what the schedule says."""

    def __init__(self, say: Progress, *, stop: bool) -> None:
        self.schedule = Schedule()
        self.recorded: KinetoTrace | None = None
        self.profiled_wall = 0.0
        self.traced: Trace | None = None
        self._say, self._stop = say, stop
        self._profiler: Profiler | None = None
        self._live: LiveTrace | None = None
        self._begun = 0.0

    def optimizer_begins(self, optimizer: torch.optim.Optimizer) -> None:
        if self._live is not None:
            self._live.optimizer_begins(optimizer)

    def optimizer_ends(self) -> None:
        if self._live is not None:
            self._live.optimizer_ends()

    def step_ends(self) -> None:
        before = self.schedule.phase
        if before == "done":
            return
        if before != "warm-up":  # what is timed ends with its last kernel
            synchronize()
        self._finish(before)
        now = self.schedule.step_ended(time.perf_counter())
        if now != before:
            self._say(SAYS[now])
            self._begin(now)

    def _finish(self, phase: str) -> None:
        """Ends what was done to the step that is over."""
        if phase == "profiled" and self._profiler is not None:
            self.profiled_wall = time.perf_counter() - self._begun
            self.recorded = self._profiler.stop()
            self._profiler = None
        elif phase == "profiler start" and self._profiler is not None:
            self._profiler.stop()
            self._profiler = None
        elif phase == "traced" and self._live is not None:
            self.traced = self._live.stop()
            self._live = None

    def _begin(self, phase: str) -> None:
        if phase in ("profiler start", "profiled"):
            self._profiler = Profiler()
            self._begun = time.perf_counter()
        elif phase == "traced":
            self._live = LiveTrace()
        elif phase == "done" and self._stop:
            raise _Stop

    def abandon(self) -> None:
        """Ends what still runs when the script is over."""
        if self._profiler is not None:
            self._profiler.stop()
        if self._live is not None:
            self._live.stop()


def profile_script(
    path: str | Path,
    arguments: Sequence[str] = (),
    *,
    on: str | Machine | None = None,
    ceilings: Ceilings = "achievable",
    stop: bool = False,
    progress: Progress | None = None,
) -> ScriptRun:
    """Runs a script with its arguments, as `python path ...` would, and profiles one of its steps.

    Steps are found: a training step ends with an optimizer's step, an inference step with the call of a module. The
    script's results are its own; it only takes longer for two profiled steps and a traced one.

    Args:
        path: The script.
        arguments: Its command line.
        on: The machine whose bounds count; this one where it is None.
        ceilings: Against what the machine achieves, or against its datasheet.
        stop: End the script as soon as a step was captured, instead of running it to its end.
        progress: Called with a line of text now and then.
    """
    script = Path(path)
    if not script.is_file():
        raise UsageError(f"{script}: there is no such script.")
    say = progress or (lambda line: None)
    machine = on if isinstance(on, Machine) else find_machine(on, progress=progress)
    watcher = _Watcher(say, stop=stop)
    exit_code = 0
    before = sys.argv, sys.path[0]
    sys.argv, sys.path[0] = [str(script), *arguments], str(script.resolve().parent)
    say(f"running {script}")
    try:
        with watching_steps(watcher):
            runpy.run_path(str(script), run_name="__main__")
    except _Stop:
        pass
    except SystemExit as error:
        exit_code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except Exception:
        traceback.print_exc()
        exit_code = 1
    finally:
        sys.argv, sys.path[0] = before
        watcher.abandon()
    found: Profile | None = None
    if watcher.recorded is not None and watcher.traced is not None:
        captured = Captured(
            source=str(script),
            walls=tuple(watcher.schedule.walls),
            recorded=watcher.recorded,
            profiled_wall=watcher.profiled_wall,
            traced=watcher.traced,
        )
        found = captured.profile(machine, ceilings=ceilings)
    return ScriptRun(profile=found, exit_code=exit_code, steps=watcher.schedule.steps)
