"""Whether nearpeak changes programs: each runs alone and under nearpeak, and both runs are compared.

    python -m benchmarks.robustness.programs                                   # the corpus: every ingredient
    python -m benchmarks.robustness.programs --seed 7 --draw 40                # programs drawn from the ingredients
    python -m benchmarks.robustness.programs --only fork_late --ways script    # one program, with the differences
    python -m benchmarks.robustness.programs --show results.json

A program is made of `ingredients.toml`: one model, one loop and one ending, and any number of hooks, settings, tools,
threads and processes. Each ingredient alone, with the plain model, loop and ending, is a program of the corpus;
`--seed` combines several. It runs as `python prog.py`, and again under `nearpeak profile`, inside of a block
(`with nearpeak.profile()`), as a callable (`nearpeak.profile(step)`) and after `nearpeak.estimate(step)`. Compared are
its output, how it ended, the files and processes that it left, and what it saw of itself, its process and torch
(`probe.py`): where it ends, and once more when the interpreter exits. The steps of a callable are counted, and the
program alone takes as many.
"""

from __future__ import annotations

import argparse
import datetime
import difflib
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import random
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal, get_args

Kind = Literal["model", "loop", "hooks", "settings", "tools", "threads", "processes", "ending"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ingredient:
    """Some text at some places of a program:

    setup                        imports, classes and functions; also run in spawned processes
    model                        defines `model`, `optimizer` and `step()`
    if __name__ == "__main__":
        before                   after everything is defined
        loop                     STEPS steps, with the text of `inside` in each, which knows `number`
        after                    still part of the program
        ending                   its last words
    """

    name: str
    kind: Kind
    setup: str = ""
    model: str = ""
    loop: str = ""
    before: str = ""
    inside: str = ""
    after: str = ""
    ending: str = ""
    steps: int = 45
    """How many steps the program takes: enough for a profile, unless that is the point."""
    alone: bool = False
    """Whether it is combined with no other ingredient than an ending."""
    effects: str = ""
    """What its step does besides computing, which `estimate` repeats."""
    processes: int = 1
    """How many processes the program runs as; with more, each is started by the environment variables of torchrun."""
    compiled: bool = False
    needs: str = ""
    """A module without which it is skipped."""


def _read_ingredients() -> dict[str, Ingredient]:
    """The ingredients by name; a line <name> of a text is replaced by that of the table `shared`."""
    tables = tomllib.loads(Path(__file__).with_name("ingredients.toml").read_text())
    shared = {name: text.strip("\n") for name, text in tables.pop("shared").items()}

    def filled(value: Any) -> Any:
        if not isinstance(value, str):
            return value
        return re.sub(r"^<(\w+)>$", lambda found: shared[found[1]], value.strip("\n"), flags=re.MULTILINE)

    return {
        name: Ingredient(name=name, kind=kind, **{field: filled(value) for field, value in fields.items()})
        for kind, ingredients in tables.items()
        for name, fields in ingredients.items()
    }


INGREDIENTS = _read_ingredients()

Way = Literal["again", "script", "block", "callable", "estimate"]
WAYS: tuple[Way, ...] = ("script", "block", "callable", "estimate")
ROOT = Path(__file__).resolve().parents[2]
PROBE = Path(__file__).with_name("probe.py")
LIMIT_S = 60.0
GRACE_S = 0.2
"""Helpers of multiprocessing end so long after their program, or sooner."""
DEFAULTS = {"model": "mlp", "loop": "plain", "ending": "return"}

IN_THE_STEP = ("model", "hooks", "settings", "tools")
"""Kinds that change what one step does, or under which conditions."""
ENVIRONMENT = {"LANG": "C.UTF-8", "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}

NUMBERS = re.compile(
    r"0x[0-9a-f]{6,}|pid=\d+|\(pid \d+\)|\[W?\d+[^\]]*\]|[WIE]\d{4} [\d:.]+ \d+ |\d{4}-\d\d-\d\d [\d:]+ \d+:\d+"
)
"""Addresses, ids of processes, and the times in lines of torch's own logs: different in each run."""
COMMON = 3
"""A difference that so many programs had is not printed again."""

NARRATION = re.compile(
    r"running |warming up|timing clean steps|starting the profiler|profiling a step|tracing a step"
    r"|the calibration of this machine |measuring this machine|everything needed has been recorded|\S+ goes on\. Ctrl-C"
    r"|kept as @last|training begins|the program repeats|what the program repeated|each iteration of the loop at"
    r"|waiting up to|no step|wrote |nearpeak: "
)
"""Lines that nearpeak writes to stderr."""

OVER = re.compile(r"everything needed has been recorded|none could be profiled|no step is profiled")
"""Said when steps are no longer looked for."""

ALLOWED: tuple[tuple[Way, str, bool, str], ...] = (
    ("script", r"process / descriptors / 2\d\d:", True, "copies of stdout and stderr, which the program may close"),
    (
        "script",
        r"end: .*(__call__|optimizer hooks|compile callbacks)",
        False,
        "calls of modules and optimizers are seen",
    ),
    ("script", r"end: (torch / (dispatch modes|profiler)|interpreter / gc):", False, "a step is traced or profiled"),
    *(
        (way, r"child \d+ \w+: (torch|results) / .*(__call__|hooks|callbacks)", True, "forked while steps were seen")
        for way in ("script", "block")
    ),
    ("script", r"end: torch / optimizer hooks", True, "after an evaluation, training may begin"),
    ("script", r"(?s)end: results / .+ / attributes: \[\"step\"\]", False, "the end of an optimizer's step is seen"),
    *(
        (
            way,
            r"stderr lacks .*profiler_start",
            True,
            "torch's profiler logs its starts, unless the first was told not to",
        )
        for way in ("script", "block")
    ),
    ("script", r"stderr lacks .*KeyboardInterrupt'\]", True, "the report takes the place of the traceback"),
)
"""Differences that are meant: the way, the place, whether also when steps are no longer looked for, and the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A program made of ingredients."""

    name: str
    parts: tuple[Ingredient, ...]

    def _chosen(self, kind: Kind) -> Ingredient:
        return next((part for part in self.parts if part.kind == kind), INGREDIENTS[DEFAULTS[kind]])

    @property
    def processes(self) -> int:
        return max(part.processes for part in self.parts)

    def excluded(self, way: Way) -> str:
        """Why it does not run in this way; "" if it does."""
        for part in self.parts:
            if part.needs and importlib.util.find_spec(part.needs) is None:
                return f"{part.needs} is not installed"
            if way == "estimate" and part.effects:
                return f"its step {part.effects}, which a second run of it repeats"
        if way in ("callable", "estimate") and not any(part.kind in IN_THE_STEP for part in self.parts):
            return "what is special about it is outside of its step"
        return ""

    def text(self, way: Way | Literal["alone"], folder: Path, calls: int | None = None, on: str | None = None) -> str:
        """Its source. All ways have the same lines, so that tracebacks are comparable."""
        before = after = "pass"
        around = "if True:"
        model = next((part.model for part in self.parts if part.model), INGREDIENTS["mlp"].model)
        inside = [part.inside for part in self.parts if part.inside]
        loop = _filled(self._chosen("loop").loop, "\n".join(inside) or "pass")
        if way == "block":
            before, around = f"import nearpeak; _run = nearpeak.profile(on={on!r})", "with _run:"
            after = '_probe["attempt"]("profile", lambda: _run.profile)'
        elif way == "estimate":
            before = f'import nearpeak; _probe["attempt"]("estimate", lambda: nearpeak.estimate(step, on={on!r}))'
        elif way == "callable":
            loop = f'_probe["profile_callable"](step, {on!r})'
        elif calls is not None:
            loop = f'_probe["repeat"](step, {calls})'
        endings = [part.ending for part in self.parts if part.ending]
        guarded = "\n".join(
            [
                f'_probe = {{"FOLDER": "{folder}", "__name__": "probe"}}',
                f'exec(compile(open("{PROBE}").read(), "probe", "exec"), _probe)',
                *(part.before for part in self.parts),
                before,
                around,
                textwrap.indent(loop, "    "),
                after,
                *(part.after for part in self.parts),
                '_probe["look"]("end", globals())',
                *(endings or [INGREDIENTS["return"].ending]),
            ]
        )
        return "\n".join(
            [
                "import functools, os, random, sys, threading, time",
                "import numpy as np",
                "import torch",
                "from torch import nn",
                f"STEPS = {min(part.steps for part in self.parts)}",
                *(part.setup for part in self.parts),
                "random.seed(0); np.random.seed(0); torch.manual_seed(0)",
                model,
                "losses = []",
                'if __name__ == "__main__":',
                textwrap.indent(guarded, "    "),
                "",
            ]
        )


def _filled(loop: str, inside: str) -> str:
    lines = []
    for line in loop.splitlines():
        if line.strip() == "{inside}":
            line = textwrap.indent(inside, line[: len(line) - len(line.lstrip())])
        lines.append(line)
    return "\n".join(lines)


def corpus() -> list[Program]:
    """Every ingredient, each with the plain model, loop and ending."""
    return [Program(name=name, parts=(part,)) for name, part in INGREDIENTS.items()]


def draw(seed: int, count: int) -> list[Program]:
    """Programs of several ingredients: a model, a loop and an ending, and up to three of the others."""
    chance = random.Random(seed)
    by_kind = {kind: [part for part in INGREDIENTS.values() if part.kind == kind] for kind in get_args(Kind)}
    programs = []
    for number in range(count):
        free = [part for kind in ("hooks", "settings", "tools", "threads", "processes") for part in by_kind[kind]]
        parts = [chance.choice([part for part in by_kind[kind] if not part.alone]) for kind in ("model", "loop")]
        parts += chance.sample([part for part in free if not part.alone], chance.randint(1, 3))
        parts.append(chance.choice(by_kind["ending"]))
        if any(part.compiled for part in parts):  # a program that is traced by itself cannot be compiled
            parts = [part for part in parts if part.kind not in ("tools", "hooks")]
        name = f"drawn-{seed}-{number}: " + " ".join(part.name for part in parts)
        programs.append(Program(name=name, parts=tuple(parts)))
    return programs


@dataclass(slots=True, kw_only=True)
class Outcome:
    """One run of a program, by rank where it has several processes."""

    codes: list[int | None] = field(default_factory=list)
    """None for a run that was ended at the time limit."""
    outputs: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    states: dict[str, Any] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    """The commands of processes that still ran at its end."""
    seconds: float = 0.0
    kept_runs: int = 0

    def note(self, name: str) -> Any:
        for moment in ("end", "exit"):
            state = self.states.get(f"rank 0 main {moment}") or {}
            if isinstance(state, dict) and name in state.get("notes", {}):
                return state["notes"][name]
        return None


class Zygote:
    """An interpreter with everything imported, of which programs are forks."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("zygote.py"))],
            env=os.environ | ENVIRONMENT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def start(self, command: Sequence[str], work: Path, environment: dict[str, str]) -> Forked:
        """Starts a program. There is one at a time."""
        job = {"arguments": command, "folder": str(work / "work"), "environment": environment}
        job |= {"stdout": str(work / "stdout"), "stderr": str(work / "stderr")}
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(job).encode() + b"\n")
        self._process.stdin.flush()
        return Forked(int(self._process.stdout.readline()), self._process.stdout)

    def close(self) -> None:
        """Ends the interpreter."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


class Forked:
    """A program that a `Zygote` runs."""

    def __init__(self, pid: int, answers: IO[bytes]) -> None:
        self.pid, self._answers = pid, answers
        self._code: int | None = None

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        """The exit code as `subprocess` gives it; TimeoutExpired after the timeout."""
        if self._code is None:
            if not select.select([self._answers], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a program", timeout or 0.0)
            self._code = os.waitstatus_to_exitcode(int(self._answers.readline()))
        return self._code


class Bench:
    """A folder in which programs run, always at the same paths. Without a calibration, bounds are those of an H200."""

    def __init__(self, folder: Path, calibration: Path | None, zygote: Zygote | None = None) -> None:
        self.folder, self.calibration, self.zygote = folder, calibration, zygote
        self.on = "h200-sxm" if calibration is None else None

    def run(self, program: Program, way: Way | Literal["alone"], calls: int | None = None) -> Outcome:
        """Runs a program in one way."""
        options = [] if self.on is None else ["--on", self.on]
        command = ["nearpeak", "profile", *options, "prog.py"] if way == "script" else ["prog.py"]
        shutil.rmtree(self.folder / "run", ignore_errors=True)
        ranks = range(program.processes)
        for rank in ranks:
            work = self.folder / "run" / str(rank)
            for name in ("work", "probe", "home"):
                (work / name).mkdir(parents=True)
            if self.calibration is not None:
                shutil.copytree(self.calibration, work / "cache" / "machines")
            source = program.text("alone" if way in ("script", "again") else way, work / "probe", calls, self.on)
            (work / "work" / "prog.py").write_text(source)
        started = time.monotonic()
        processes = [self._start(command, rank, len(ranks)) for rank in ranks]
        outcome = Outcome()
        for rank, process in enumerate(processes):
            try:
                outcome.codes.append(process.wait(max(0.1, LIMIT_S - (time.monotonic() - started))))
            except subprocess.TimeoutExpired:
                outcome.codes.append(None)
            work = self.folder / "run" / str(rank)
            time.sleep(GRACE_S)
            outcome.left += end_session(process.pid)
            process.wait()
            outcome.outputs.append((work / "stdout").read_text(errors="replace"))
            outcome.errors.append((work / "stderr").read_text(errors="replace"))
            outcome.states |= _states(rank, work / "probe")
            for path in sorted((work / "work").rglob("*")):
                if path.is_file() and "__pycache__" not in path.parts:
                    outcome.files[str(path.relative_to(work))] = _digest(path.read_bytes())
            outcome.kept_runs += len(list((work / "cache" / "runs").glob("[0-9]*.json.gz")))
        outcome.seconds = time.monotonic() - started
        return outcome

    def _start(self, command: Sequence[str], rank: int, ranks: int) -> subprocess.Popen[bytes] | Forked:
        work = self.folder / "run" / str(rank)
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(work / "home"),
            "PYTHONPATH": os.environ.get("PYTHONPATH") or f"{ROOT / 'src'}:{ROOT}",
            **ENVIRONMENT,
            "TORCHINDUCTOR_CACHE_DIR": str(work / "inductor"),
            "NEARPEAK_CACHE_DIR": str(work / "cache"),
            "RENDEZVOUS": str(self.folder / "run" / "rendezvous"),
        }
        if ranks > 1:
            environment |= {"RANK": str(rank), "WORLD_SIZE": str(ranks)}
        if self.zygote is not None and ranks == 1:
            return self.zygote.start(command, work, environment)
        with (work / "stdout").open("wb") as out, (work / "stderr").open("wb") as err:
            return subprocess.Popen(
                [sys.executable, *(["-m"] if command[0] == "nearpeak" else []), *command],
                cwd=work / "work",
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )


def end_session(leader: int) -> list[str]:
    """Ends what still runs of a session, and returns the commands, sorted."""
    commands = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_text()
            name, rest = stat[stat.index("(") + 1 : stat.rindex(")")], stat[stat.rindex(")") + 2 :].split()
        except (OSError, ValueError):
            continue
        if rest[3] == str(leader) and rest[0] != "Z":
            commands.append(name)
            try:
                os.kill(int(entry.name), signal.SIGKILL)
            except ProcessLookupError:
                continue
    return sorted(commands)


def _states(rank: int, folder: Path) -> dict[str, Any]:
    """What the probe wrote; children are numbered by what they saw, since their ids are by chance."""
    states, children = {}, []
    for path in sorted(folder.glob("*.json")):
        who, moment = path.name.removesuffix(".json").rsplit(".", 1)
        try:
            state = json.loads(path.read_bytes())
        except ValueError:
            state = "not written whole"
        if who == "main":
            states[f"rank {rank} main {moment}"] = state
        else:
            children.append((moment, state))
    children.sort(key=lambda child: (child[0], json.dumps(child[1])))
    for number, (moment, state) in enumerate(children):
        states[f"rank {rank} child {number} {moment}"] = state
    return states


def differences(alone: Outcome, other: Outcome, way: Way) -> list[str]:
    """What differs between a program alone and under nearpeak, a line each."""
    found: list[str] = []
    for rank, (expected, code) in enumerate(zip(alone.codes, other.codes, strict=True)):
        if code is None and expected is not None:
            found.append(f"rank {rank}: hangs")
        elif expected != code and not (way == "script" and expected == 0 and declined(other.errors[rank])):
            found.append(f"rank {rank}: ends with {code} instead of {expected}")
        found += _output_differences("stdout", alone.outputs[rank], other.outputs[rank], way)
        found += _output_differences("stderr", alone.errors[rank], other.errors[rank], way)
    for place in sorted(set(alone.states) | set(other.states)):
        if place not in other.states:
            found.append(f"{place}: was not reached")
        elif place not in alone.states:
            found.append(f"{place}: was reached, and is not alone")
        elif set(alone.states) <= set(other.states):  # else it ended elsewhere, and has other results at its exit
            found += [f"{place}: {line}" for line in _state_differences(alone.states[place], other.states[place])]
    for name in sorted(set(alone.files) | set(other.files)):
        if alone.files.get(name) != other.files.get(name) and not name.endswith("prog.py"):
            found.append(f"file {name}: {other.files.get(name)} instead of {alone.files.get(name)}")
    if alone.left != other.left:
        found.append(f"processes left: {other.left} instead of {alone.left}")
    over = any(OVER.search(errors) for errors in other.errors)
    return [line for line in found if not _is_allowed(line, way, over)]


def _is_allowed(line: str, way: Way, over: bool) -> bool:
    return any(way == known and re.search(place, line) and (always or not over) for known, place, always, _ in ALLOWED)


def declined(errors: str) -> bool:
    """Whether nearpeak said that there is no profile: its own exit code is then that of the command."""
    return bool(re.search(r"^nearpeak: .*took (no|\d+) steps?", errors, re.MULTILINE))


def _digest(content: bytes) -> str:
    """Of a file; of text, without what differs in each run."""
    with suppress(UnicodeDecodeError):
        content = NUMBERS.sub("_", content.decode()).encode()
    return hashlib.sha256(content).hexdigest()[:12]


def _normal(text: str) -> list[str]:
    return [NUMBERS.sub("_", line) for line in text.splitlines()]


def _output_differences(stream: str, expected: str, got: str, way: Way) -> Iterator[str]:
    """Lines that are missing or new. Under `nearpeak profile`, its own lines and its report may come in between."""
    removed, added = [], []
    for line in difflib.ndiff(_normal(expected), _normal(got)):
        if line.startswith("- "):
            removed.append(line[2:])
        elif line.startswith("+ "):
            added.append(line[2:])
    if way == "script" and stream == "stderr":
        added = [line for line in added if not NARRATION.match(line)]
    elif way == "script":
        added = [line for line in added if re.search(r"Traceback|Warning:", line)]
    if removed:
        yield f"{stream} lacks {removed[:4]}"
    if added:
        yield f"{stream} has {added[-4:]}"


def _state_differences(expected: Any, got: Any, place: str = "") -> Iterator[str]:
    if isinstance(expected, dict) and isinstance(got, dict):
        for key in sorted(set(expected) | set(got)):
            if place or key != "notes":
                yield from _state_differences(expected.get(key), got.get(key), f"{place} / {key}" if place else key)
    elif expected != got:
        shown = [json.dumps(each) for each in (expected, got)]
        if isinstance(expected, list) and isinstance(got, list):
            shown = [
                json.dumps([each for each in one if each not in other])
                for one, other in ((expected, got), (got, expected))
            ]
        yield f"{place}: {shown[1][:300]} instead of {shown[0][:300]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """How one program fared in one way."""

    program: str
    way: str
    outcome: str
    """same, differs, hangs or skipped."""
    profile: str
    """Whether there was a profile or estimate, or why not."""
    differences: tuple[str, ...]
    seconds: float


def judge(bench: Bench, program: Program, ways: Sequence[Way]) -> Iterator[Row]:
    """Runs a program alone and in each of the ways."""
    if reason := program.excluded("script"):
        yield Row(program=program.name, way="all", outcome="skipped", profile=reason, differences=(), seconds=0.0)
        return
    alone = bench.run(program, "alone")
    if None in alone.codes:
        yield Row(program=program.name, way="alone", outcome="hangs", profile="", differences=(), seconds=alone.seconds)
        return
    for way in ways:
        if reason := program.excluded(way):
            yield Row(program=program.name, way=way, outcome="skipped", profile=reason, differences=(), seconds=0.0)
            continue
        other = bench.run(program, way)
        expected = bench.run(program, "alone", other.note("calls") or 0) if way == "callable" else alone
        found = differences(expected, other, way)
        outcome = "hangs" if None in other.codes else "differs" if found else "same"
        yield Row(
            program=program.name,
            way=way,
            outcome=outcome,
            profile=_profile_note(other, way),
            differences=tuple(found),
            seconds=other.seconds,
        )


def _profile_note(outcome: Outcome, way: Way) -> str:
    if way == "script":
        if outcome.kept_runs:
            return "a result"
        said = [
            line
            for line in outcome.errors[0].splitlines()
            if line.startswith("nearpeak: ") or "no step is profiled" in line
        ]
        return said[-1] if said else "none"
    return str(outcome.note("estimate" if way == "estimate" else "profile") or "none")


def find_calibration() -> Path:
    """The folder of this machine's calibrations, with one for programs of one thread."""
    from nearpeak._files import cache_folder

    folder = cache_folder() / "machines"
    if not any(folder.glob("*-1-threads_*.json")):
        print("measuring this machine, once", file=sys.stderr)
        machine = [sys.executable, "-m", "nearpeak", "machine"]
        subprocess.run(machine, env=os.environ | ENVIRONMENT, stdout=subprocess.DEVNULL, check=True)
    return folder


def receive_signals() -> None:
    """Undoes what a shell or nohup ignores for commands in the background, and programs would inherit."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)


def show(rows: Sequence[dict[str, Any]], *, verbose: bool = True) -> None:
    """Prints how many programs fared how, and each difference."""
    for way in dict.fromkeys(row["way"] for row in rows):
        counts = Counter(row["outcome"] for row in rows if row["way"] == way)
        results = sum(row["profile"] == "a result" for row in rows if row["way"] == way)
        print(f"{way:9s} {dict(counts)}, {results} with a result")
    if verbose:
        for row in rows:
            for line in row["differences"]:
                print(f"{row['program']} [{row['way']}] {line}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, help="also draw programs by this seed")
    parser.add_argument("--draw", type=int, default=20, help="how many programs to draw (20)")
    parser.add_argument("--only", help="the programs whose name matches this regular expression")
    parser.add_argument("--ways", default=",".join(WAYS), help="again runs a program alone twice")
    parser.add_argument("--jobs", type=int, choices=[1], default=1, help="one at a time: times are compared")
    parser.add_argument(
        "--forked", action="store_true", help="in forks of one interpreter: faster, and blind to what imports change"
    )
    parser.add_argument("--text", action="store_true", help="print the programs instead of running them")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--show", type=Path, help="print the results of a file")
    wanted = parser.parse_args()
    receive_signals()
    if wanted.show:
        show(json.loads(wanted.show.read_text())["rows"])
        return 0
    programs = corpus() if wanted.seed is None or wanted.only is None else []
    if wanted.seed is not None:
        programs = draw(wanted.seed, wanted.draw) + ([] if wanted.only is None else corpus())
    if wanted.only:
        programs = [
            program for program in programs if re.search(rf"^(?:{wanted.only})$|^(?:{wanted.only}):", program.name)
        ]
    ways: list[Way] = wanted.ways.split(",")
    if wanted.text:
        for program in programs:
            print(f"# {program.name}\n{program.text('alone', Path('probe'))}")
        return 0
    rows = []
    seen: Counter[tuple[str, str]] = Counter()
    calibration = find_calibration()
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="nearpeak-programs-") as folder:
        zygote = Zygote() if wanted.forked else None
        bench = Bench(Path(folder), calibration, zygote)
        for number, program in enumerate(programs, start=1):
            for row in judge(bench, program, ways):
                rows.append({name: getattr(row, name) for name in Row.__slots__})
                told = f"{row.outcome} ({row.profile[:80]}, {row.seconds:.1f} s)"
                print(f"{number}/{len(programs)} {row.program} [{row.way}] {told}", flush=True)
                for line in row.differences:
                    seen[row.way, line] += 1
                fresh = [line for line in row.differences if seen[row.way, line] <= COMMON]
                for line in fresh[:12]:
                    print(f"    {line}", flush=True)
                if len(fresh) < len(row.differences):
                    print(f"    and {len(row.differences) - len(fresh)} that {COMMON} programs had before", flush=True)
            if wanted.json:
                write_results(wanted.json, wanted.seed, rows, time.monotonic() - started)
        if zygote is not None:
            zygote.close()
    print()
    show(rows, verbose=False)
    return int(any(row["outcome"] in ("differs", "hangs") and row["way"] != "alone" for row in rows))


def write_results(path: Path, seed: int | None, rows: list[dict[str, Any]], seconds: float) -> None:
    """Writes what is known so far, with the machine and the date."""
    result = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": {"architecture": platform.machine(), "processor": processor(), "python": platform.python_version()},
        "torch": importlib.metadata.version("torch"),
        "seed": seed,
        "seconds": round(seconds),
        "rows": rows,
    }
    path.write_text(json.dumps(result, indent=1) + "\n")


def processor() -> str:
    found = re.search(r"^model name\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1] if found else platform.processor()


if __name__ == "__main__":
    sys.exit(main())
