"""`profile_script`: runs a script or a module as `python` would, finds its steps, and profiles one of them."""

from __future__ import annotations

import ast
import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import FrameType, ModuleType, TracebackType
from typing import Any

import torch

from nearpeak.bound.roofline import Ceilings
from nearpeak.calibrate.machine import machine as find_machine
from nearpeak.devices.backends import gpu_visible
from nearpeak.errors import NearpeakError, UsageError
from nearpeak.machines import calibrations
from nearpeak.machines.machine import Machine
from nearpeak.measure.options import Progress
from nearpeak.profiles.profile import Profile
from nearpeak.profiling.session import PHASE_MESSAGES, STEP_DEFINITION, Session, StopRun
from nearpeak.profiling.step_function import STEP_DECORATOR, StepFunction
from nearpeak.profiling.steps import detect_steps
from nearpeak.units import seconds

_PACKAGE_FOLDER = str(Path(__file__).parent.parent)
EXIT_INTERRUPTED = 130


@dataclass(frozen=True, slots=True, kw_only=True)
class MainModule:
    """Code that is going to be `__main__`."""

    name: str
    """As the user gave it."""
    file: Path
    spec: ModuleSpec | None = None
    """Of a module that is found by its name."""

    def has(self, marked: StepFunction) -> bool:
        """Whether this is the code that a function belongs to."""
        return marked.is_in_main(self.file, None if self.spec is None else self.spec.name)

    def run(self, arguments: Sequence[str], marked: StepFunction | None = None) -> None:
        """Runs it with its arguments. Whatever it raises is the caller's."""
        main = ModuleType("__main__")
        loader = SourceFileLoader("__main__", str(self.file)) if self.spec is None else self.spec.loader
        main.__dict__.update(
            __file__=str(self.file),
            __cached__=None if self.spec is None else self.spec.cached,
            __loader__=loader,
            __package__=None if self.spec is None else self.spec.parent,
            __spec__=self.spec,
            __builtins__=__builtins__,
        )
        source = self.file.read_bytes()
        program: Any = source
        if marked is not None and self.has(marked):
            program = ast.parse(source, str(self.file))
            marked.decorate(program)
            main.__dict__[STEP_DECORATOR] = marked.mark
        code = compile(program, str(self.file), "exec", dont_inherit=True)
        with _as_main(main, [self.name if self.spec is None else str(self.file), *arguments]):
            threads = set(threading.enumerate())
            exec(code, main.__dict__)
            for thread in set(threading.enumerate()) - threads:  # the interpreter waits for them too
                if not thread.daemon:
                    thread.join()


def find_script(path: str | Path) -> MainModule:
    """The script at `path`."""
    file = Path(path)
    if file.is_dir():
        file = file / "__main__.py"
    if not file.is_file():
        raise UsageError(f"{path}: there is no such script.")
    return MainModule(name=str(path), file=file.absolute())


def find_module(name: str) -> MainModule:
    """The module `name`, found as `python -m` finds it; of a package its `__main__`."""
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            name = f"{name}.__main__"
            spec = importlib.util.find_spec(name)
    except (ImportError, ValueError) as error:
        raise UsageError(f"-m {name}: {error}.") from None
    if spec is None or spec.origin is None or not Path(spec.origin).is_file() or not spec.origin.endswith(".py"):
        raise UsageError(f"-m {name}: there is no module of this name with a source file (from {Path.cwd()}).")
    return MainModule(name=name, file=Path(spec.origin), spec=spec)


@contextmanager
def script_import_path(folder: Path) -> Iterator[None]:
    """Inside, modules are looked for in `folder` first, in the place of the folder of our own command."""
    before = list(sys.path)
    if not sys.flags.safe_path:
        sys.path[0:1] = [str(folder)]
    try:
        yield
    finally:
        sys.path[:] = before


@contextmanager
def _as_main(main: ModuleType, argv: list[str]) -> Iterator[None]:
    """Inside, `main` is the main module: what is pickled, and what worker processes import, is looked for there."""
    before = sys.modules["__main__"], sys.argv
    sys.modules["__main__"], sys.argv = main, argv
    try:
        yield
    finally:
        sys.modules["__main__"], sys.argv = before


def report_exit(error: BaseException) -> int:
    """What the interpreter ends with after this error, which is printed as the interpreter would print it."""
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return int(error.code or 0) & 0xFF
        print(error.code, file=sys.stderr)
        return 1
    if isinstance(error, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    if sys.excepthook is not sys.__excepthook__:
        sys.excepthook(type(error), error, _user_traceback(error.__traceback__))
    else:
        shown = traceback.TracebackException.from_exception(error)
        _drop_own_frames(shown)
        print("".join(shown.format()), end="", file=sys.stderr)
    return 1


def _user_traceback(found: TracebackType | None) -> TracebackType | None:
    while found is not None and found.tb_frame.f_code.co_filename.startswith(_PACKAGE_FOLDER):
        found = found.tb_next
    return found


def _drop_own_frames(shown: traceback.TracebackException | None) -> None:
    """Removes the frames of this package, here and in the errors behind it."""
    while shown is not None:
        kept = [frame for frame in shown.stack or () if not frame.filename.startswith(_PACKAGE_FOLDER)]
        shown.stack = traceback.StackSummary.from_list(kept) if kept else None  # type: ignore[assignment]
        if shown.__cause__ is not None:
            _drop_own_frames(shown.__cause__)
        shown = shown.__context__


FIRST_LINE_S = 60.0
LINE_INTERVAL_GROWTH = 2.0


class StepTimeout(BaseException):
    """No step ended in time; no Exception, so that the code does not catch it."""


@contextmanager
def step_timeout(
    watch: Session, say: Progress, wait_s: float | None, first_line_s: float = FIRST_LINE_S
) -> Iterator[None]:
    """Inside, a line is said when no step ended for a minute, and again after times that double.

    With `wait_s` the code is ended by `OutOfTime` when no step ended for so long; this needs the main thread.
    """
    over = threading.Event()
    talker = threading.Thread(
        target=_report_waiting, args=(watch, say, over, first_line_s), name="nearpeak-waiting", daemon=True
    )
    talker.start()
    with _timeout_alarm(watch, wait_s):
        try:
            yield
        finally:
            over.set()


def _report_waiting(watch: Session, say: Progress, over: threading.Event, first_line_s: float) -> None:
    patience = first_line_s
    seen = watch.schedule.steps
    while not over.wait(min(first_line_s, max(0.01, watch.ended + patience - time.monotonic()))):
        if watch.schedule.phase == "done" or watch.problem:
            return
        if watch.schedule.steps != seen:
            seen, patience = watch.schedule.steps, first_line_s
        if (passed := time.monotonic() - watch.ended) >= patience:
            which = "no step yet" if seen == 0 else f"no step after the first {seen}"
            say(f"{which} for {seconds(passed)}. {STEP_DEFINITION} Ctrl-C ends it.")
            patience *= LINE_INTERVAL_GROWTH


@contextmanager
def _timeout_alarm(watch: Session, wait_s: float | None) -> Iterator[None]:
    if wait_s is None or threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(_number: int, _frame: FrameType | None) -> None:
        if watch.schedule.phase == "done" or watch.problem:
            return
        left = watch.ended + wait_s - time.monotonic()
        if left <= 0:
            raise StepTimeout
        signal.setitimer(signal.ITIMER_REAL, left)

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, wait_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


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
    watch = Session(say, stop=stop)
    exit_code = 0
    with script_import_path(Path(path).resolve() if path is not None and Path(path).is_dir() else folder):
        main = find_script(path) if path is not None else find_module(module or "")
        machine = _find_machine_early(on, progress)
        say(f"running {main.name}")
        say(PHASE_MESSAGES["warm-up"])
        try:
            with ExitStack() as stack:
                steps = watch.steps = stack.enter_context(detect_steps(watch))
                marked = None if step is None else StepFunction(step, steps.mark)
                if marked is not None:
                    steps.told = True
                    if not main.has(marked):
                        stack.enter_context(marked.in_modules())
                stack.enter_context(step_timeout(watch, say, wait_s))
                main.run(arguments, marked)
        except StopRun:
            pass
        except NearpeakError:
            raise
        except StepTimeout:
            watch.problem = watch.problem or f"no step ended for {seconds(wait_s or 0.0)}, and it was ended as asked."
        except BaseException as error:  # also what is no Exception: it is the script's, and its report is ours
            exit_code = report_exit(error)
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
        missing="" if found is not None else watch.missing_reason(main.name),
        problem=bool(watch.problem),
    )


def _find_machine_early(on: str | Machine | None, progress: Progress | None) -> Machine | None:
    """The machine whose bounds count; None for a GPU here, which is looked at when the script is over.

    A script may choose its GPUs by CUDA_VISIBLE_DEVICES, which has no effect once the driver was asked for them. What
    is random in a script must not depend on what was measured before it.
    """
    if isinstance(on, Machine):
        return on
    if on is not None or not gpu_visible():
        with torch.random.fork_rng(devices=[]):
            return find_machine(on, progress=progress)
    if not any((calibrations.cache_folder() / "machines").glob("*.json")):
        (progress or (lambda line: None))("measuring this machine, once")
        subprocess.run([sys.executable, "-m", "nearpeak", "machine"], stdout=subprocess.DEVNULL, check=False)
    return None
