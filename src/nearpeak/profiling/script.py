"""`profile_script`: runs a script or a module as `python` would, finds its steps, and profiles one of them."""

from __future__ import annotations

import _thread
import ast
import importlib.machinery
import importlib.util
import inspect
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import FunctionType, ModuleType, TracebackType
from typing import Any, Self

from nearpeak._stage_times import stage
from nearpeak.bound.roofline import Ceilings
from nearpeak.calibrate.machine import known_machine, start_gpu_calibration
from nearpeak.calibrate.machine import machine as find_machine
from nearpeak.devices.backends import gpu_visible
from nearpeak.devices.process_state import preserve_random_state
from nearpeak.errors import EXIT_INTERRUPTED, NearpeakError, UsageError, did_you_mean
from nearpeak.findings.engine import rules
from nearpeak.machines.machine import Machine
from nearpeak.measure.options import Progress
from nearpeak.profiles.profile import Profile
from nearpeak.profiling.assemble import StepRecords
from nearpeak.profiling.hang import HangWatch
from nearpeak.profiling.inject import Fault, FaultInjector
from nearpeak.profiling.job import COLLECT_SECONDS, launched_rank, rank_report
from nearpeak.profiling.session import PHASE_MESSAGES, STEP_DEFINITION, Session, StopRun
from nearpeak.profiling.steps import detect_steps
from nearpeak.profiling.torch_profiler import initialize_kineto
from nearpeak.trace.interrupts import defer_signals
from nearpeak.units import seconds

_PACKAGE_FOLDER = str(Path(__file__).parent.parent)
FIRST_LINE_S = 60.0
"""Seconds without a step until the first line about it."""
LINE_INTERVAL_GROWTH = 2.0
EARLY_REPORT_S = 10.0
"""How long a script may go on after everything was recorded until its report is shown beside it."""
FAILED_COLLECT_S = 3.0
"""How long rank 0 waits for the reports of others when its own script has failed."""
GRACE_S = 10.0
"""How long code may take to end after it was interrupted."""
_POOLS = (("concurrent.futures.thread", "_threads_queues"), ("concurrent.futures.process", "_threads_wakeups"))
"""Modules with pools, and their tables of the threads in these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptRun:
    """The profile of a script, and its exit code."""

    profile: Profile | None
    """None if the script took too few steps, or if they could not be profiled."""
    exit_code: int
    steps: int
    """The number of steps."""
    wall_s: float | None = None
    """The time of a clean step, which is known before there is a profile."""
    missing: str = ""
    """Why there is no profile, and what to do."""
    problem: bool = False
    """Whether the machine lacks something, rather than the script steps."""


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
    captured: Callable[[Profile, bool], object] = lambda profile, is_final: None,
    goes_on: Callable[[Profile], object] = lambda profile: None,
    abort: Callable[[ScriptRun], object] = lambda run: None,
    ends_process: bool = False,
    inject: Fault | None = None,
    hang: Progress | None = None,
    calibration: subprocess.Popen[bytes] | None = None,
) -> ScriptRun:
    """Runs a script with its arguments, as `python path ...` would, and profiles one of its steps.

    Steps are detected: a training step ends with the step of an optimizer, an inference step with the call of a module.
    The results of the script do not change; the profiled steps and the traced one take longer.

    Args:
        path: The script.
        arguments: Its command line.
        module: A module instead, as `python -m module ...`.
        step: A function each call of which is a step, as MODULE:FUNCTION, FILE.py:FUNCTION or __main__:FUNCTION.
        on: The machine that the bounds are for; None for this machine.
        ceilings: The achievable ceilings of the machine, or those of its datasheet.
        stop: End the script as soon as everything is recorded.
        wait_s: Interrupt the script if no step ends for so many seconds; None for no limit.
        progress: Called with lines of text.
        captured: Called with the profile as soon as there is one, while the script still runs: it may end in any way.
            The second argument says whether this is the last profile.
        goes_on: Called on another thread with the profile of a script that still runs `EARLY_REPORT_S` after everything
            was recorded.
        abort: Called on another thread, to end the process, with what there is of a script that was interrupted for
            `wait_s` and did not end.
        ends_process: Whether nothing but the report follows the script: its thread pools are then ended, as at the
            exit of the interpreter.
        inject: A fault for one rank of a job.
        hang: Called with lines about a job whose ranks wait for one that does not come, on one of its ranks.
        calibration: The process that measures the GPU, if it was started before (`start_gpu_calibration`).
    """
    if (path is None) == (module is None):
        raise UsageError("Give either a script or a module.")
    say = progress or (lambda line: None)
    folder = Path.cwd() if path is None else Path(path).resolve().parent
    exit_code = 0
    profile: Profile | None = None
    assembled: StepRecords | None = None
    """What `profile` was assembled from."""
    has_ended = False
    """Whether the script takes no more steps."""
    timed_out = False

    def assemble(records: StepRecords, on: Machine) -> None:
        nonlocal profile, assembled
        with stage("assembling"):
            known = records.update(profile, assembled) if profile is not None and assembled is not None else None
            profile, assembled = known or records.profile(on, ceilings=ceilings), records
        tell_team(records)
        captured(profile, session.is_done or has_ended)

    def tell_team(records: StepRecords) -> None:
        """Sends what this rank recorded to rank 0."""
        if profile is not None and records.timeline is not None and session.team is not None:
            with suppress(Exception):  # the store is gone with the rank that had it
                session.team.publish(rank_report(profile, records.timeline))

    def add_job() -> None:
        """Adds the other ranks to the profile of rank 0."""
        nonlocal profile
        team, timeline = session.team, None if assembled is None else assembled.timeline
        if profile is not None and profile.job is None and team is not None and team.rank == 0 and timeline is not None:
            with stage("the other ranks"), suppress(RuntimeError):
                wait_s = FAILED_COLLECT_S if exit_code else COLLECT_SECONDS
                profile = replace(profile, job=team.job(rank_report(profile, timeline), wait_s))
                captured(profile, True)

    def complete() -> None:
        records = session.records(main.name)
        now = machine or known_machine()
        if records is not None and now is not None:
            with defer_signals(deadly=True):  # a job that is out of time is told so now, and has its profile
                assemble(records, now)
        if session.is_done and not stop:
            say(f"{main.name} goes on. Ctrl-C ends it and gives the report now; --stop does that by itself")
            if profile is not None:
                watchdog.report_later(report_now)

    def report_now() -> None:
        add_job()
        if profile is not None:
            goes_on(profile)

    def result() -> ScriptRun:
        nonlocal has_ended
        has_ended = True
        records = session.records(main.name)
        seen = None if profile is None else (profile.step, profile.steps)
        if records is not None and seen != (records.step, len(records.walls)):
            assemble(records, machine or find_machine(progress=progress))
        add_job()
        if timed_out and not session.problem:
            session.problem = f"no step ended for {seconds(wait_s or 0.0)}, and it was ended as asked."
        return ScriptRun(
            profile=profile,
            exit_code=exit_code,
            steps=session.schedule.steps,
            wall_s=session.schedule.wall_s,
            missing="" if profile is not None else session.missing_reason(main.name),
            problem=bool(session.problem),
        )

    def abort_run() -> None:
        nonlocal timed_out
        timed_out = True
        abort(result())

    def tell_hang(line: str) -> None:
        (hang or say)(line)

    session = Session(say, stop=stop, follows=wait_s is not None, completed=complete)
    imported_from = Path(path).resolve() if path is not None and Path(path).is_dir() else folder
    with script_import_path(imported_from, restore=not ends_process):
        main = find_script(path) if path is not None else find_module(module or "")
        with stage("calibration"):
            machine = _find_machine_early(on, calibration, progress)
        with stage("imports"):
            _import_before()
        with stage("profiler: start"):
            initialize_kineto()
        say(f"running {main.name}")
        say(PHASE_MESSAGES["warm-up"])
        watchdog = Watchdog(session, say, wait_s, abort_run, early_report_s=EARLY_REPORT_S)

        def report(error: BaseException) -> None:
            """The script's own error, SystemExit included; the profile is still reported."""
            nonlocal exit_code
            if isinstance(error, NearpeakError):
                raise error
            if not isinstance(error, StopRun) and not (watchdog.timed_out and isinstance(error, KeyboardInterrupt)):
                exit_code = report_exit(error)
                if exit_code and isinstance(error, Exception) and hang_watch is not None:
                    hang_watch.failed(error)

        hang_watch: HangWatch | None = None
        try:
            with ExitStack() as stack:
                steps = session.steps = stack.enter_context(detect_steps(session, session.guard))
                stack.enter_context(session.loaders.watching())
                if inject is not None:
                    session.injector = FaultInjector(inject, launched_rank()[0])
                    stack.enter_context(session.injector.slow_loaders())
                step_function = None if step is None else StepFunction(step, steps.mark)
                if step_function is not None:
                    steps.has_step_function = True
                    if not main.has(step_function):
                        stack.enter_context(step_function.in_modules())
                session.last_end = session.guard.program_time()
                stack.enter_context(watchdog)
                hang_watch = stack.enter_context(HangWatch(tell_hang))
                with stage("script"):
                    main.run(arguments, step_function, report, end_pools=ends_process)
        except BaseException as error:  # while its threads were waited for
            report(error)
        finally:
            session.abandon()
        timed_out = watchdog.timed_out
    if session.guard.in_child:  # a child process of the script that ends here
        sys.exit(exit_code)
    if step_function is not None and not step_function.is_wrapped and exit_code == 0:
        raise UsageError(f"--step {step}: {main.name} imported no module {step_function.place!r}.")
    return result()


def _import_before() -> None:
    """Imports what is imported at first use elsewhere: a script may change where modules are found."""
    rules()
    for module in ("torch._subclasses.schema_check_mode", "torch.profiler._cupti_monitor", "encodings.utf_8_sig"):
        with suppress(ImportError):
            importlib.import_module(module)


def _find_machine_early(
    on: str | Machine | None, calibration: subprocess.Popen[bytes] | None, progress: Progress | None
) -> Machine | None:
    """The machine that the bounds are for; None for a GPU of this machine, which is detected after the script.

    Random numbers of the script must not depend on a calibration before it.
    """
    if isinstance(on, Machine):
        return on
    if on is not None or not gpu_visible():
        with preserve_random_state():
            return find_machine(on, progress=progress)
    calibration = calibration or start_gpu_calibration(progress)
    if calibration is not None:
        with calibration:
            calibration.wait()
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class MainModule:
    """A script or module that is run as `__main__`."""

    name: str
    """As the user gave it."""
    file: Path
    spec: ModuleSpec | None = None
    """Of a module that was found by its name."""

    def has(self, step_function: StepFunction) -> bool:
        """Whether the step function is defined in it."""
        return step_function.is_in_main(self.file, None if self.spec is None else self.spec.name)

    def run(
        self,
        arguments: Sequence[str],
        step_function: StepFunction | None,
        report: Callable[[BaseException], None],
        *,
        end_pools: bool,
    ) -> None:
        """Runs it with its arguments, and waits for its threads. `report` gets the exception that ends it."""
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
        if step_function is not None and self.has(step_function):
            program = ast.parse(source, str(self.file))
            step_function.decorate(program)
            main.__dict__[STEP_DECORATOR] = step_function.wrap
        # Functions that run at the exit of the interpreter see the script too.
        with _as_main(main, [self.name if self.spec is None else str(self.file), *arguments], restore=not end_pools):
            threads = set(threading.enumerate())
            process = os.getpid()
            try:
                exec(compile(program, str(self.file), "exec", dont_inherit=True), main.__dict__)
            except BaseException as error:
                report(error)
                if isinstance(error, StopRun):
                    return
            if os.getpid() == process:
                _end_threads(threads, end_pools=end_pools)


def find_script(path: str | Path) -> MainModule:
    """The script at `path`."""
    file = Path(path)
    if file.is_dir():
        file = file / "__main__.py"
    if not file.is_file():
        raise UsageError(f"{path}: there is no such script.")
    return MainModule(name=str(path), file=file.absolute())


def find_module(name: str) -> MainModule:
    """The module `name`, found as `python -m` finds it; for a package, its `__main__`."""
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
def script_import_path(folder: Path, *, restore: bool) -> Iterator[None]:
    """Inside, modules are looked for in `folder` first, in the place of the folder of our own command."""
    before = list(sys.path)
    if not sys.flags.safe_path:
        sys.path[0:1] = [str(folder)]
    try:
        yield
    finally:
        if restore:
            sys.path[:] = before


@contextmanager
def _as_main(main: ModuleType, argv: list[str], *, restore: bool) -> Iterator[None]:
    """Makes `main` the main module, where pickle and worker processes look for names."""
    before = sys.modules["__main__"], sys.argv
    sys.modules["__main__"], sys.argv = main, argv
    try:
        yield
    finally:
        if restore:
            sys.modules["__main__"], sys.argv = before


def report_exit(error: BaseException) -> int:
    """Prints an error as the interpreter would, and returns the exit code that it would end with."""
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return int(error.code or 0) & 0xFF
        if sys.stderr is None:  # the interpreter writes to the descriptor then
            with suppress(OSError):
                os.write(2, f"{error.code}\n".encode(errors="backslashreplace"))
        else:
            print(error.code, file=sys.stderr)
        return 1
    interrupted = isinstance(error, KeyboardInterrupt)
    _drop_own_frames(error, set())
    if sys.excepthook is not sys.__excepthook__:
        sys.excepthook(type(error), error, error.__traceback__)
    elif not interrupted:  # the report follows instead
        traceback.print_exception(error)
    return EXIT_INTERRUPTED if interrupted else 1


def _drop_own_frames(error: BaseException | None, seen: set[int]) -> None:
    """Removes the frames of this package from the traceback of an error, and from those of its causes.

    From the error itself: whatever shows it, as the hook of torch.distributed does, takes them from there.
    """
    if error is None or id(error) in seen:
        return
    seen.add(id(error))
    frames: list[TracebackType] = []
    frame = error.__traceback__
    while frame is not None:
        if not frame.tb_frame.f_code.co_filename.startswith(_PACKAGE_FOLDER):
            frames.append(frame)
        frame = frame.tb_next
    kept: TracebackType | None = None
    for frame in reversed(frames):
        kept = TracebackType(kept, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    error.__traceback__ = kept
    _drop_own_frames(error.__cause__, seen)
    _drop_own_frames(error.__context__, seen)


class Watchdog:
    """Reports when no step has ended for a minute, and again at doubling intervals.

    Only the program's own time counts. What `report_later` was given is called if the code still runs by then.
    With `wait_s`, it interrupts the main thread as Ctrl-C does if no step ends for so long, and calls `abort` if the
    code has not ended `GRACE_S` later. It is a thread that `threading` does not list, and changes no signal handler:
    the code sees neither.
    """

    def __init__(
        self,
        session: Session,
        say: Progress,
        wait_s: float | None = None,
        abort: Callable[[], object] = lambda: None,
        first_line_s: float = FIRST_LINE_S,
        early_report_s: float = EARLY_REPORT_S,
    ) -> None:
        self.timed_out = False
        """Whether it has interrupted the code."""
        self._session, self._say, self._wait_s, self._abort = session, say, wait_s, abort
        self._first_line_s, self._early_report_s = first_line_s, early_report_s
        self._report: tuple[float, Callable[[], object]] | None = None
        """What is called later, and when."""
        self._running = _thread.allocate_lock()
        self._process = os.getpid()

    def __enter__(self) -> Self:
        self._running.acquire()
        _thread.start_new_thread(self._watch, ())
        return self

    def __exit__(self, *error: object) -> None:
        self._running.release()

    def report_later(self, report: Callable[[], object]) -> None:
        """Calls `report` on another thread if the code still runs some seconds later."""
        self._report = time.monotonic() + self._early_report_s, report

    def _watch(self) -> None:
        with suppress(Exception):  # nobody could be told
            begun = self._session.last_end
            steps, interval, line_due = 0, self._first_line_s, begun + self._first_line_s
            while not self._ended(within_s=self._seconds_left(line_due)):
                session, report = self._session, self._report
                now = session.guard.program_time()
                if report is not None and time.monotonic() >= report[0]:
                    self._report = None
                    report[1]()
                if self._wait_s is not None and now - session.last_end >= self._wait_s:
                    self._interrupt()
                    return
                if session.schedule.phase == "done" or session.problem:
                    line_due = float("inf")
                elif session.schedule.steps != steps:
                    steps, interval = session.schedule.steps, self._first_line_s
                    line_due = session.last_end + interval
                elif now >= line_due:
                    which = "no step yet" if steps == 0 else f"no step after the first {steps}"
                    self._say(f"{which} for {seconds(now - session.last_end)}. {STEP_DEFINITION} Ctrl-C ends it.")
                    interval *= LINE_INTERVAL_GROWTH
                    line_due = session.last_end + interval

    def _seconds_left(self, line_due: float) -> float:
        timeout = float("inf") if self._wait_s is None else self._session.last_end + self._wait_s
        left_s = min(line_due, timeout) - self._session.guard.program_time()
        return min(max(left_s, 0.01), self._first_line_s, self._early_report_s / 2)

    def _ended(self, within_s: float) -> bool:
        ended = self._running.acquire(timeout=within_s)
        if ended:
            self._running.release()
        return ended

    def _interrupt(self) -> None:
        self.timed_out = True
        main = threading.main_thread().ident
        if main is not None:
            signal.pthread_kill(main, signal.SIGINT)
        if not self._ended(within_s=GRACE_S):
            self._abort()


def _end_threads(before: set[threading.Thread], *, end_pools: bool) -> None:
    """Waits for the threads of the code, as the interpreter does at exit.

    The threads of a pool that was left open end when the interpreter ends all pools, which it does first. That is for
    good, so a process that goes on does not wait for them.
    """
    if end_pools:
        threading._shutdown()  # type: ignore[attr-defined]  # also tells those who wait for the main thread
        return
    in_pools = {
        thread
        for module, threads in _POOLS
        if module in sys.modules
        for thread in getattr(sys.modules[module], threads, ())
    }
    for thread in set(threading.enumerate()) - before - in_pools:
        if not thread.daemon:
            thread.join()


STEP_DECORATOR = "__nearpeak_step__"
MAX_LISTED_NAMES = 30


class StepFunction:
    """The function of a reference MODULE:FUNCTION, FILE.py:FUNCTION, or __main__:FUNCTION; a method is CLASS.METHOD.

    `wrap` makes the function that replaces it when it is defined. A function of the script itself is decorated in its
    syntax tree, on its own lines. A function of a module is replaced when that module was imported, before anyone else
    can take it from there.
    """

    def __init__(self, reference: str, wrap: Callable[[Any], Any]) -> None:
        self.reference = reference
        self.place, separator, self.name = reference.rpartition(":")
        if not separator or not self.place or not all(part.isidentifier() for part in self.name.split(".")):
            raise UsageError(
                f"Cannot read {reference!r} as a function. Write MODULE:FUNCTION, FILE.py:FUNCTION, or "
                "__main__:FUNCTION for one of the script itself; a method is CLASS.METHOD."
            )
        self._file = Path(self.place).resolve() if self.place.endswith(".py") else None
        if self._file is not None and not self._file.is_file():
            raise UsageError(f"{reference}: there is no file {self.place!r} (from {Path.cwd()}).")
        self.wrap = wrap
        self.is_wrapped = False

    def is_in_main(self, file: Path, module: str | None) -> bool:
        """Whether it is a function of the code that runs as `__main__`."""
        return self.place == "__main__" or self.place == module or self._file == file.resolve()

    def decorate(self, tree: ast.Module) -> None:
        """Decorates the function in a syntax tree, whose namespace then needs `STEP_DECORATOR`."""
        functions = dict(_functions_in_tree(tree.body, ""))
        function = functions.get(self.name)
        if function is None:
            raise self._unknown(functions)
        decorator = ast.Name(id=STEP_DECORATOR, ctx=ast.Load())
        function.decorator_list.insert(
            0, ast.copy_location(decorator, function.decorator_list[0] if function.decorator_list else function)
        )
        self.is_wrapped = True

    @contextmanager
    def in_modules(self) -> Iterator[None]:
        """Inside, the function is wrapped in its module: now if that is imported already, else on import."""
        for name, module in list(sys.modules.items()):
            if self.is_home(name, getattr(module, "__file__", None)):
                self.wrap_in(module)
        sys.meta_path.insert(0, finder := _ImportHook(self))
        try:
            yield
        finally:
            sys.meta_path.remove(finder)

    def is_home(self, name: str, file: str | None) -> bool:
        """Whether a module defines the function."""
        return name == self.place or (
            self._file is not None and name != "__main__" and file is not None and Path(file).resolve() == self._file
        )

    def wrap_in(self, module: ModuleType) -> None:
        """Replaces the function in its module."""
        owner: Any = module
        *path, name = self.name.split(".")
        for part in path:
            owner = getattr(owner, part, None)
        function = inspect.getattr_static(owner, name, None)
        if not (callable(function) or isinstance(function, (staticmethod, classmethod))):
            raise self._unknown(dict(_functions_in_module(module)))
        if not self.is_wrapped:
            setattr(owner, name, self.wrap(function))
            self.is_wrapped = True

    def _unknown(self, functions: dict[str, Any]) -> UsageError:
        if not functions:
            return UsageError(f"--step {self.reference}: {self.place} has no functions.")
        names = sorted(functions)
        hint = did_you_mean(self.name, names)
        if hint.startswith("Valid"):
            more = f", and {len(names) - MAX_LISTED_NAMES} more" if len(names) > MAX_LISTED_NAMES else ""
            hint = f"It has {', '.join(names[:MAX_LISTED_NAMES])}{more}."
        return UsageError(f"--step {self.reference}: {self.place} has no function {self.name!r}. {hint}")


class _ImportHook:
    """An import finder that delegates to the others, and wraps the function after its module was executed."""

    def __init__(self, function: StepFunction) -> None:
        self._function = function

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The module spec of another finder."""
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec: importlib.machinery.ModuleSpec | None = None
            if finder is not self and find is not None:
                spec = find(name, path, target)
            if spec is not None:
                if self._function.is_home(name, spec.origin):
                    self._wrap_after(spec.loader)
                return spec
        return None

    def _wrap_after(self, loader: Any) -> None:
        original = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            original(module)
            self._function.wrap_in(module)

        loader.exec_module = exec_module


def _functions_in_tree(
    body: Sequence[ast.AST], prefix: str
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """All functions below some statements, by name: of classes and of other functions as OUTER.INNER."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield prefix + node.name, node
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield from _functions_in_tree(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, (ast.stmt, ast.ExceptHandler, ast.match_case)):
            yield from _functions_in_tree(list(ast.iter_child_nodes(node)), prefix)


def _functions_in_module(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """The functions and methods that a module defines itself."""
    for name, value in vars(module).items():
        if getattr(value, "__module__", None) != module.__name__:
            continue
        if inspect.isfunction(value):
            yield name, value
        elif inspect.isclass(value):
            methods = inspect.getmembers_static(
                value, lambda part: isinstance(part, (staticmethod, classmethod, FunctionType))
            )
            yield from ((f"{name}.{key}", method) for key, method in methods if key in vars(value))
