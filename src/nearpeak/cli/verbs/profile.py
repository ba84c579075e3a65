"""Where the time of a step goes: measured times against hardware limits.

Runs SCRIPT, or -m MODULE, with its arguments, detects its steps, and profiles one of them. A training step ends with an
optimizer's step, an inference step with the call of a module. --step MODULE:FUNCTION makes each call of a function a
step: a function of a module, of a file (FILE.py:FUNCTION), or of the script itself (__main__:FUNCTION). Options go
before SCRIPT; what follows SCRIPT are its own arguments. SCRIPT may be FILE.py:FUNCTION, a case of `nearpeak bench`.

Below torchrun, each rank is profiled, and rank 0 reports the job: torchrun --nproc-per-node 4 -m nearpeak profile
SCRIPT. --inject rank=1,delay=5ms tries that out: a fault in one rank, by delay, input, work or gc.

--trace FILE reads a trace that torch.profiler wrote with record_shapes=True, on any machine, or a saved profile; of a
folder, all ranks of a job, one file each, or the dumps of torch's flight recorder after a hang. The last ten runs are
kept: @last is the last one, @2 the one before it.

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
import contextlib
import hashlib
import os
import re
import sys
import warnings
import webbrowser
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from nearpeak._files import InputFile, fixed_cache_folder
from nearpeak._stage_times import stage
from nearpeak.cli.argument_types import step_number
from nearpeak.cli.output import (
    Streams,
    TextStream,
    json_text,
    narrate,
    narrate_text,
    print_text,
    terminal_style,
    write_file,
)
from nearpeak.errors import EnvironmentProblem, NearpeakError, UsageError

if TYPE_CHECKING:
    from nearpeak.profiles.profile import Profile
    from nearpeak.profiling.script import ScriptRun
    from nearpeak.render.views.profile import ReportOptions

MOST_PAGES = 10
"""How many HTML reports the cache folder keeps."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add this verb's arguments."""
    parser.add_argument("--trace", metavar="FILE", help="a trace of torch.profiler, a folder of them by rank, ...")
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
    parser.add_argument(
        "--inject", metavar="FAULT", help="a fault in one rank of a job, to see it found: rank=2,delay=5ms"
    )
    parser.add_argument("--on", metavar="NAME", help="a machine of the catalogue (this one, or the trace's)")
    parser.add_argument("--ceilings", choices=("achievable", "theoretical"), default="achievable")
    add_results(parser)
    parser.add_argument(
        "-m", dest="module", metavar="MODULE", nargs=argparse.REMAINDER, help="a module with its arguments; comes last"
    )
    parser.add_argument("script", metavar="SCRIPT", nargs="?", help="a script, or FILE.py:FUNCTION")
    parser.add_argument("arguments", metavar="...", nargs=argparse.REMAINDER, help="the script's arguments")


def run(arguments: argparse.Namespace) -> int:
    """Profile a step and print where its time goes."""
    if arguments.list:
        if arguments.script or arguments.trace:
            raise UsageError("--list takes neither a SCRIPT nor --trace.")
        return print_history()
    check_results(arguments)
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
    if arguments.trace and Path(arguments.trace).is_dir():
        return _show_folder(arguments)
    if arguments.trace:
        return show_profile(from_file(arguments.trace, arguments), arguments, ResultFiles(arguments, keep=False))
    if arguments.script and ":" in Path(arguments.script).name:
        return show_profile(_from_case(arguments), arguments, ResultFiles(arguments, keep=True))
    return _run_script(arguments)


def from_file(name: str, arguments: argparse.Namespace) -> Profile:
    """Reads a saved profile or a trace; --on, --step and --ceilings apply to a trace."""
    from nearpeak.profiles import file, history
    from nearpeak.profiling.load import profile_trace

    with InputFile(history.resolve(name)) as source:
        if not file.is_profile_file(source):
            return profile_trace(source, on=arguments.on, step=arguments.step, ceilings=arguments.ceilings)
        if arguments.on or arguments.step is not None:
            raise UsageError(f"{name} is a saved profile: --on and --step belong to a trace.")
        return file.read(source)


def _show_folder(arguments: argparse.Namespace) -> int:
    """The job of a folder of traces, or what dumps of torch's flight recorder say about one that hung."""
    from nearpeak.profiles.profile import Profile
    from nearpeak.profiling.flight_recorder import hang_in_dumps
    from nearpeak.profiling.load import profile_folder
    from nearpeak.render.html.markup import LONGEST_TEXT, visible
    from nearpeak.render.text import text
    from nearpeak.render.views.job import document

    if arguments.step is not None:
        raise UsageError(f"--step {arguments.step}: a folder of traces has all steps that its ranks share.")
    hang = hang_in_dumps(Path(arguments.trace))
    if hang is not None:
        if arguments.save or arguments.json:
            raise UsageError(f"{arguments.trace} has dumps of torch's flight recorder: there is no profile to save.")
        print_text("\n".join(visible(line, LONGEST_TEXT) for line in hang))
        return 0
    job = profile_folder(arguments.trace, on=arguments.on, ceilings=arguments.ceilings)
    if isinstance(job, Profile):
        return show_profile(job, arguments, ResultFiles(arguments, keep=False))
    if arguments.save:
        narrate("nearpeak: there is no profile of a rank to save, only what follows.")
    print_text(json_text(job) if arguments.json == "-" else text(document(job), terminal_style(Streams.stdout())))
    return 0


def _from_case(arguments: argparse.Namespace) -> Profile:
    from nearpeak.measure.case import case_errors, load
    from nearpeak.profiling.run import profile

    if arguments.step is not None or arguments.stop or arguments.wait is not None:
        raise UsageError("A case is one step: --step, --stop and --wait belong to a script.")
    if arguments.arguments:
        raise UsageError(f"A case takes no arguments, and got {' '.join(arguments.arguments)}.")
    with contextlib.redirect_stdout(sys.stderr):  # stdout is for the report: what the case prints goes to stderr
        case = load(arguments.script).build()
        with case_errors(arguments.script, "while it was profiled"):
            return profile(case, on=arguments.on, ceilings=arguments.ceilings, progress=narrate)


def _run_script(arguments: argparse.Namespace) -> int:
    """Runs and profiles a script. Returns its exit code if it fails; a profile is shown if it took enough steps."""
    with ExitStack() as stack, stage("imports"):
        from nearpeak.calibrate.machine import start_gpu_calibration

        calibration = start_gpu_calibration(narrate) if _script_exists(arguments) and arguments.on is None else None
        if calibration is not None:
            stack.callback(calibration.kill)
        from nearpeak.profiling.inject import read_fault
        from nearpeak.profiling.job import launched_rank
        from nearpeak.profiling.script import profile_script
        from nearpeak.render import text as _text  # noqa: F401  # while modules are found where they are
        from nearpeak.render.views import profile as _view  # noqa: F401
        from nearpeak.render.views import screen as _screen  # noqa: F401

        stack.pop_all()  # `profile_script` waits for it

    module, *script_arguments = arguments.module or [None, *arguments.arguments]
    fault = None if arguments.inject is None else read_fault(arguments.inject)
    is_first = launched_rank()[0] == 0
    files = ResultFiles(arguments, keep=True)

    def goes_on(profile: Profile) -> None:
        """Shows the report of a script that still runs, on stderr: stdout belongs to the script meanwhile."""
        narrate(f"The report of the step that was captured; {profile.source} still runs, and Ctrl-C ends it.")
        narrate_text(report_text(profile, options_of(profile, arguments), full=False, stream=Streams.stderr()))

    def abort(ran: ScriptRun) -> None:
        """Ends the process although the script does not end."""
        try:
            code = _show_run(ran, arguments, files, script_arguments)
        except NearpeakError as error:
            narrate(f"nearpeak: {error}")
            code = error.exit_code
        with suppress(Exception):
            sys.stdout.flush()
        os._exit(code)

    with ExitStack() as stack:
        stack.enter_context(fixed_cache_folder())
        if not arguments.ends_process:  # else functions that run at exit see what the script has set
            stack.enter_context(warnings.catch_warnings())
        # Those that torch adds on import stay.
        warnings.filters[:] = [each for each in warnings.filters if each != arguments.own_filter]  # type: ignore[index]
        ran = profile_script(
            arguments.script,
            script_arguments,
            module=module,
            step=arguments.step,
            on=arguments.on,
            ceilings=arguments.ceilings,
            stop=arguments.stop,
            wait_s=arguments.wait,
            progress=narrate if is_first else None,
            captured=files.write if is_first else lambda profile, is_final: None,
            goes_on=goes_on if is_first else lambda profile: None,
            abort=abort,
            ends_process=arguments.ends_process,
            inject=fault,
            hang=narrate,
            calibration=calibration,
        )
        with suppress(Exception):  # the script may have closed it
            sys.stdout.flush()
        if ran.profile is not None and not is_first:  # rank 0 reports for all, unless the job has failed
            if ran.exit_code:
                arguments.save = [_with_rank(path, launched_rank()[0]) for path in arguments.save]
                ResultFiles(arguments, keep=False).write(ran.profile)
            return ran.exit_code
        return _show_run(ran, arguments, files, script_arguments)


def _with_rank(path: str, rank: int) -> str:
    """The file of one rank: run.rank3.json for run.json."""
    name, dot, endings = Path(path).name.partition(".")
    return str(Path(path).with_name(f"{name}.rank{rank}{dot}{endings}"))


def _show_run(
    ran: ScriptRun, arguments: argparse.Namespace, files: ResultFiles, script_arguments: Sequence[str]
) -> int:
    if ran.profile is not None:
        code = show_profile(ran.profile, arguments, files)
        return ran.exit_code or code
    if ran.exit_code == 0:
        raise (EnvironmentProblem if ran.problem else UsageError)(ran.missing)
    how = f"it ended with exit code {ran.exit_code}" if ran.exit_code > 0 else "it was interrupted"
    narrate(f"nearpeak: {how}, and there is no profile. {ran.missing}")
    misplaced = [each for each in script_arguments if each.partition("=")[0] in _own_options()]
    if ran.exit_code == 2 and misplaced:
        narrate(f"nearpeak: {misplaced[0]} was given to the script. Options of nearpeak go before it.")
    return ran.exit_code


def _script_exists(arguments: argparse.Namespace) -> bool:
    """Whether a calibration may start before the code is looked for: a module is found later."""
    return bool(arguments.script) and Path(arguments.script).exists()


def _own_options() -> set[str]:
    parser = argparse.ArgumentParser()
    configure(parser)
    return set(parser._option_string_actions) - {"-h", "--help", "-m"}


def _step(text: str) -> int | str:
    """MODULE:FUNCTION, or the number of a step."""
    return text if _is_function(text) else step_number(text)


def _is_function(step: int | str) -> bool:
    return isinstance(step, str) and ":" in step


def add_results(parser: argparse.ArgumentParser) -> None:
    """Add the options for results."""
    output = parser.add_argument_group("results")
    add_choices(output)
    output.add_argument("--rules", action="append", default=[], metavar="FILE.py", help="run a file with more rules")
    output.add_argument(
        "-o",
        "--save",
        action="append",
        default=[],
        metavar="FILE",
        help="also write the profile as .json or .json.gz, or a report of it as .html, .md, .csv ...",
    )
    output.add_argument("--open", action="store_true", help="show the HTML report in the browser at the end")
    output.add_argument("--json", metavar="FILE", help="also write JSON to FILE; - writes JSON alone to stdout")
    output.add_argument("--no-keep", action="store_true", help="do not keep this run (nor does NEARPEAK_KEEP=0)")
    output.add_argument("--list", action="store_true", help="list the saved runs: @last, @2 ...")


def add_choices(output: argparse._ArgumentGroup) -> None:
    """Add the options for the content of a report."""
    output.add_argument("--full", action="store_true", help="print all tables, not one screen of them")
    output.add_argument(
        "--by", choices=("op", "module", "line", "phase", "family"), help="rank what is lost, by this (op)"
    )
    output.add_argument("--top", type=int, metavar="N", help="rank what is lost, in at most N rows (12)")
    output.add_argument("--findings", type=int, metavar="N", help="explain at most N findings (5)")
    output.add_argument("--least", type=float, default=1.0, metavar="PERCENT", help="of the step, for a finding (1)")
    output.add_argument(
        "--ignore", action="append", default=[], metavar="RULE", help="do not show it; RULE@train.py:41 for one line"
    )


def check_results(arguments: argparse.Namespace) -> None:
    """Checks options before the run that would otherwise fail after it; raises UsageError."""
    with stage("imports"):
        from nearpeak.findings.engine import add_rules, check_ignored_rules

    check_choices(arguments)
    for file in arguments.rules:
        add_rules(file)
    check_ignored_rules(arguments.ignore)
    arguments.save = [str(Path(path).absolute()) for path in arguments.save]  # the script may change the folder
    if arguments.json and arguments.json != "-":
        arguments.json = str(Path(arguments.json).absolute())


def check_choices(arguments: argparse.Namespace) -> None:
    """Checks numbers and file names; raises UsageError."""
    from nearpeak.render.report import check_path

    if arguments.top is not None and arguments.top < 1:
        raise UsageError(f"--top {arguments.top}: a table has at least one row.")
    if (arguments.findings or 0) < 0 or not arguments.least >= 0.0:
        raise UsageError("--findings and --least are not below zero.")
    for path in arguments.save:
        check_path(path)


def options_of(profile: Profile, arguments: argparse.Namespace, again: str = "") -> ReportOptions:
    """The options of the command line as options of the report; `again` is the command that shows it again."""
    from nearpeak.render.views.profile import MOST_FINDINGS, MOST_RANKED, ReportOptions, select_findings

    asked = {"findings": arguments.findings is not None, "ops": bool(arguments.by or arguments.top)}
    return ReportOptions(
        findings=select_findings(profile, arguments.least / 100, arguments.ignore),
        most_findings=MOST_FINDINGS if arguments.findings is None else arguments.findings,
        top=arguments.top or MOST_RANKED,
        by=arguments.by or "op",
        sections=frozenset(section for section, is_asked in asked.items() if is_asked),
        again=again,
    )


class ResultFiles:
    """The files of a run: the kept run, and those that the user asked for.

    They are written as soon as there is a profile, before the report is printed: however the process ends after that,
    they are there. An error in one of them does not stop the others. What was written is said once, when all is
    recorded, although files may be written again: with the other ranks of a job.
    """

    def __init__(self, arguments: argparse.Namespace, *, keep: bool) -> None:
        self.code = 0
        """The exit code of the last error."""
        self._lines: list[str] = []
        """What is to be said of the last files that were written."""
        self._said: set[str] = set()
        from nearpeak.profiles import history

        self._arguments, self._keep = arguments, keep and not arguments.no_keep and history.is_enabled()
        self._kept: Path | None = None
        self._written: Profile | None = None

    @property
    def again(self) -> str:
        """The command that shows the run again; "" if it was not kept."""
        return "" if self._kept is None else "nearpeak report @last"

    def write(self, profile: Profile, is_final: bool = True) -> None:
        """Writes all files; once for each profile."""
        if profile is not self._written:
            self._lines = []
            with stage("files"):
                self._write(profile)
            self._written = profile
        if is_final:
            for line in self._lines:
                if line not in self._said:
                    narrate(line)
            self._said.update(self._lines)
            self._lines = []

    def _write(self, profile: Profile) -> None:
        kept = self._keep_run(profile) if self._keep else []
        self.code = 0
        if self._arguments.json and self._arguments.json != "-":
            from nearpeak.profiles.file import with_grade

            try:
                write_file(self._arguments.json, json_text(with_grade(profile)) + "\n", say=self._lines.append)
            except NearpeakError as error:
                self._lines.append(f"nearpeak: {error}")
                self.code = error.exit_code
        options = options_of(profile, self._arguments)
        code = write_reports(profile, self._arguments.save, options, opened=False, say=self._lines.append)
        self.code = code or self.code
        self._lines += kept

    def _keep_run(self, profile: Profile) -> list[str]:
        """Adds the run to the history, and gives what is to be said of that."""
        from nearpeak.profiles import history

        try:
            self._kept = history.add_run(profile, self._kept)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            return [f"nearpeak: this run was not kept: {history.folder()} cannot be written: {reason}."]
        return ["kept as @last; `nearpeak report @last` shows it again"]


def show_profile(profile: Profile, arguments: argparse.Namespace, files: ResultFiles) -> int:
    """Writes the files, prints the report, and opens its page; the exit code tells of the last error."""
    from nearpeak.profiles.file import with_grade

    files.write(profile)
    options = options_of(profile, arguments, files.again)
    printed = with_grade(profile) if arguments.json == "-" else None
    with stage("report"):
        print_text(report_text(profile, options, full=arguments.full) if printed is None else json_text(printed))
    return (show_page(profile, arguments.save, options) if arguments.open else 0) or files.code


def report_text(profile: Profile, options: ReportOptions, *, full: bool, stream: TextStream | None = None) -> str:
    """The report as text, in the style of the terminal that it is for (stdout): one screen, or all of it."""
    from nearpeak.render.text import text
    from nearpeak.render.views.profile import document
    from nearpeak.render.views.screen import screen

    return text((document if full else screen)(profile, options), terminal_style(stream or Streams.stdout()))


def write_reports(
    profile: Profile,
    paths: Sequence[str],
    options: ReportOptions,
    *,
    opened: bool,
    say: Callable[[str], object] = narrate,
) -> int:
    """Writes each file, also after an error, and opens the first page; returns the exit code of the last error."""
    from nearpeak.render.report import write

    code = 0
    for path in paths:
        try:
            write(profile, path, options)
        except NearpeakError as error:
            say(f"nearpeak: {error}" if path in str(error) else f"nearpeak: {path}: {error}")
            code = error.exit_code
            continue
        say(f"wrote {path}")
    return (show_page(profile, paths, options) if opened else 0) or code


def show_page(profile: Profile, paths: Sequence[str], options: ReportOptions) -> int:
    """Opens the page among the files that were written, or one in the cache folder; returns an exit code."""
    from nearpeak.render.report import profile_ending

    page = next((Path(path) for path in paths if profile_ending(path) == ".html" and Path(path).is_file()), None)
    try:
        open_page(page or cached_page(profile, options))
    except NearpeakError as error:
        narrate(f"nearpeak: {error}")
        return error.exit_code
    return 0


def print_history() -> int:
    """Prints the runs in the history."""
    from nearpeak.profiles import history
    from nearpeak.render.text import text
    from nearpeak.render.views.history import document

    runs = history.past_runs()
    if not runs:
        narrate(f"No runs are kept in {history.folder()}. `nearpeak profile SCRIPT` keeps one.")
        return 0
    print_text(text(document(runs)))
    return 0


def cached_page(profile: Profile, options: ReportOptions) -> Path:
    """Writes the HTML report into the cache folder, under a name that depends on its content."""
    from nearpeak._files import cache_folder, replace_file
    from nearpeak.render.report import content

    page = content(profile, ".html", options)
    folder = cache_folder() / "reports"
    name = re.sub(r"[^A-Za-z0-9.]+", "-", Path(profile.source).stem)[:40].strip("-.") or "step"
    path = folder / f"{name}-{hashlib.sha256(page).hexdigest()[:10]}.html"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(path, page)
        files = sorted(folder.glob("*.html"), key=lambda file: file.stat().st_mtime, reverse=True)
        for old in files[MOST_PAGES:]:
            old.unlink(missing_ok=True)
    except OSError as error:
        raise EnvironmentProblem(
            f"{folder} cannot be written: {error.strerror or error}. -o FILE.html puts the report elsewhere."
        ) from None
    return path


def open_page(path: Path) -> None:
    """Opens a file in the browser; without a browser, prints the address of the file."""
    address = path.absolute().as_uri()
    if _has_display() and webbrowser.open(address):
        narrate(f"opened {address}")
    else:
        narrate(f"There is no browser to open here. The report is {address}")


def _has_display() -> bool:
    """Whether there is a display. Without one, `webbrowser` would start a text browser in this terminal."""
    if sys.platform in ("darwin", "win32") or os.environ.get("BROWSER"):
        return True
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
