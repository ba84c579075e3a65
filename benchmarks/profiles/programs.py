"""Whole programs with planted wastes: what `nearpeak profile` finds in them, and what removing each really saves.

    PYTHONPATH=src python -m benchmarks.profiles.programs --json benchmarks/results/programs.json --keep profiles/
    python -m benchmarks.profiles.programs --only chat_decoder --device cpu
    python -m benchmarks.profiles.programs --show benchmarks/results/programs_h200.json

A program is one script of benchmarks/programs (--set takes another folder), written as users write them. Comments say
what is planted, and how the program reads without it:

    # cpu: --width 128               its arguments on a CPU and on a GPU; --steps N is one that every program has
    # cuda: --width 1024
    # block: 24                      steps that are timed in a row, where some steps are unlike others (an epoch)
    # rules: NAME RULE RULE          findings of other rules are not about this waste (all are, if this is not given)

    x = torch.sort(logits)           # waste: NAME       a line that a finding should name
    # instead: x = logits.topk(50)                       what that line becomes when NAME is mended
    # mend: NAME                                         lines from here to the next "# instead:" are replaced
    # instead:                                           by nothing
    # step                                               in the loop, where a step has ended

Every program is profiled as it stands. Then it runs without nearpeak, as it stands and with each waste mended, and with
all of them: processes of their own that are measured in turns (`step_clock.py`), so that a drift meets all of them.
Nothing else runs while one of them is measured; only torch is imported ahead (--ahead).

A waste that saves less than 3 % on this machine, or nothing in one of the turns, is none here, and a finding of 3 % for
it is a false one. A program without marks is clean.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import datetime
import json
import os
import re
import select
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from benchmarks.markdown_table import table
from nearpeak.measure.statistics import median, median_interval
from nearpeak.profiles.finding import likely_shares

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ROOT / "benchmarks" / "programs"
LARGE = 0.03
"""Of the step: what saves less is no waste, and what a clean program may have."""
CLOSE, NEAR = 0.2, 0.35
"""Errors of a prediction, as shares of the saving that was measured."""
BESIDE = 3
"""Lines between a finding and its waste at which the user still sees it."""
TURN_SECONDS = 0.3
LEAD_STEPS = 4
"""As many as a loader with two workers has prepared while the process waited."""
FIRST_STEPS, MOST_STEPS = 3, 200
"""In the turn that shows how long a step takes, and at most in each that is measured."""
PATIENCE_S = 300.0

Device = Literal["cpu", "cuda"]
Place = Literal["line", "call", "beside", "function", "elsewhere"]
PLACES: tuple[Place, ...] = ("line", "call", "beside", "function", "elsewhere")


class BadProgram(Exception):
    """The comments of a program do not fit together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A finding of a profile."""

    rule: str
    source: str
    share: float
    """What it saves alone, of the step."""
    added_share: float
    """What it adds to the saving of all larger findings."""
    title: str
    called_at: str = ""
    """The line that calls the function of the source."""
    waits: bool = False
    """Whether most of what it saves is idle time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Lines of a program, and what is written instead when a waste is mended."""

    waste: str
    first: int
    last: int
    """The last line of the region, its comments included."""
    instead: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A script with its marks."""

    path: Path
    lines: tuple[str, ...]
    arguments: Mapping[str, tuple[str, ...]]
    """By device."""
    block: int | None
    marks: Mapping[str, tuple[int, ...]]
    """The lines that a finding should name, by waste; numbers start at 1."""
    regions: tuple[Region, ...]
    rules: Mapping[str, tuple[str, ...]]
    """The rules whose findings may be about a waste, where not all may."""

    @property
    def name(self) -> str:
        return self.path.stem

    def variant(self, mended: Collection[str]) -> str:
        """The text with these wastes mended, in which every step ends with a tick of the clock."""
        lines: list[str] = []
        number = 1
        for region in [*(region for region in self.regions if region.waste in mended), None]:
            end = region.first if region else len(self.lines) + 1
            lines += self.lines[number - 1 : end - 1]
            if region:
                lines += region.instead
                number = region.last + 1
        call = "from benchmarks.profiles.step_clock import tick; tick()"
        return "\n".join(re.sub(r"^(\s*)# step$", rf"\1{call}", line) for line in lines) + "\n"

    def function_of(self, line: int) -> tuple[int, int]:
        """The first and last line of the innermost function around a line; of the script outside of functions."""
        spans = [
            (node.lineno, node.end_lineno or node.lineno)
            for node in ast.walk(ast.parse("\n".join(self.lines)))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        ]
        around = [span for span in spans if span[0] <= line <= span[1]]
        return min(around, key=lambda span: span[1] - span[0], default=(1, len(self.lines)))

    def place_of(self, finding: Seen, waste: str) -> tuple[Place, int]:
        """How near a finding's source ("train.py:41") is to a waste, and the lines between them."""
        file, _, number = finding.source.rpartition(":")
        is_about = finding.rule in self.rules.get(waste, (finding.rule,))
        if Path(file).name != self.path.name or not number.isdecimal() or not is_about:
            return "elsewhere", len(self.lines)
        line = int(number)
        distance = min(abs(line - mark) for mark in self.marks[waste])
        if distance == 0:
            return "line", 0
        caller, _, called_at = finding.called_at.rpartition(":")
        if Path(caller).name == self.path.name and called_at in map(str, self.marks[waste]):
            return "call", 0
        if distance <= BESIDE:
            return "beside", distance
        if any(self.function_of(line) == self.function_of(mark) for mark in self.marks[waste]):
            return "function", distance
        return "elsewhere", distance


def read_program(path: Path) -> Program:
    """A program with its marks; raises BadProgram where they do not fit together."""
    lines = tuple(path.read_text(encoding="utf-8").splitlines())
    marks: dict[str, list[int]] = {}
    regions: list[Region] = []
    arguments: dict[str, tuple[str, ...]] = {}
    rules: dict[str, tuple[str, ...]] = {}
    block: int | None = None
    opened: tuple[str, int] | None = None
    indent = ""
    """Of the line that opened the region: a comment below an `if` is indented like its block."""
    for number, line in enumerate(lines, 1):
        if header := re.fullmatch(r"# (cpu|cuda|block|rules):(.*)", line):
            if header[1] == "block":
                block = int(header[2])
            elif header[1] == "rules":
                waste, *named = header[2].split()
                rules[waste] = tuple(named)
            else:
                arguments[header[1]] = tuple(shlex.split(header[2]))
        elif opening := re.fullmatch(r"(\s*)# mend: (\S+)", line):
            if opened:
                raise BadProgram(f"{path.name}:{number}: {opened[0]} of line {opened[1]} has no '# instead:'")
            indent, opened = opening[1], (opening[2], number)
        elif mark := re.fullmatch(r"(\s*)\S.*# waste: (\S+)", line):
            marks.setdefault(mark[2], []).append(number)
            following = lines[number] if number < len(lines) else ""
            if not opened and re.match(r"\s*# instead:", following):
                indent, opened = mark[1], (mark[2], number)
        elif replaced := re.fullmatch(r"\s*# instead:(?: (.*))?", line):
            text = (indent + replaced[1],) if replaced[1] else ()
            if opened:
                regions.append(Region(waste=opened[0], first=opened[1], last=number, instead=text))
                opened = None
            elif regions and regions[-1].last == number - 1:
                last = regions[-1]
                regions[-1] = dataclasses.replace(last, last=number, instead=last.instead + text)
            else:
                raise BadProgram(f"{path.name}:{number}: '# instead:' of no waste")
    if opened:
        raise BadProgram(f"{path.name}: {opened[0]} of line {opened[1]} has no '# instead:'")
    if unknown := set(rules) - set(marks):
        raise BadProgram(f"{path.name}: '# rules:' of {sorted(unknown)}, which no line has")
    if set(marks) != {region.waste for region in regions}:
        raise BadProgram(f"{path.name}: marked are {sorted(marks)}, mended {sorted({r.waste for r in regions})}")
    if sum(line.strip() == "# step" for line in lines) != 1:
        raise BadProgram(f"{path.name}: one line is '# step'")
    if set(arguments) != {"cpu", "cuda"}:
        raise BadProgram(f"{path.name}: '# cpu:' and '# cuda:' are its arguments")
    return Program(
        path=path,
        lines=lines,
        arguments=arguments,
        block=block,
        marks={waste: tuple(numbers) for waste, numbers in marks.items()},
        regions=tuple(regions),
        rules=rules,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileResult:
    """What `nearpeak profile` said of a program."""

    findings: tuple[Seen, ...]
    wall_s: float
    grade: str
    seconds: float
    """That the command took, once torch was imported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """What mending saves of a step, as a share: the median of the turns and its interval."""

    share: float
    low: float
    high: float
    step_s: float
    """Of the program as it stands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A planted waste, or all of a program's together ("all")."""

    program: str
    waste: str
    measured: Saving | None
    predicted: float
    place: Place | Literal["missed", "not profiled"]
    findings: tuple[Seen, ...]

    @property
    def is_waste(self) -> bool:
        """Whether it is one on this machine, as far as it was measured."""
        return self.measured is None or (self.measured.share >= LARGE and self.measured.low > 0.0)

    @property
    def error(self) -> float | None:
        """Of the prediction, as a share of what was measured."""
        if self.measured is None or not self.is_waste or self.place == "not profiled":
            return None
        return abs(self.predicted - self.measured.share) / self.measured.share

    @property
    def is_in_range(self) -> bool:
        """Whether a part of the interval that was measured is in the range that is given for the prediction."""
        if self.measured is None or not self.findings:
            return False
        low, high = likely_shares(min(1.0, self.predicted))
        return self.measured.low <= high and low <= self.measured.high


@dataclass(slots=True, kw_only=True)
class Result:
    """All of one program."""

    program: str
    profile: ProfileResult | None = None
    rows: list[Row] = field(default_factory=list)
    others: tuple[Seen, ...] = ()
    """Findings that belong to no planted waste."""
    error: str = ""
    date: str = ""
    """Of the run, in UTC; "" where it is that of the file."""


def attribute(program: Program, findings: Sequence[Seen]) -> tuple[dict[str, tuple[Place, list[Seen]]], list[Seen]]:
    """The findings of each waste with the place of the nearest, and those that belong to none.

    A finding belongs to the waste that it is nearest to. Those at the lines of a waste, or beside them, count; only
    where there are none do those in the same function.
    """
    by_waste: dict[str, list[tuple[Place, Seen]]] = {waste: [] for waste in program.marks}
    others = []
    for finding in findings:
        places = {waste: program.place_of(finding, waste) for waste in program.marks}
        nearest = min(places, key=lambda waste: (PLACES.index(places[waste][0]), places[waste][1]), default=None)
        if nearest is None or places[nearest][0] == "elsewhere":
            others.append(finding)
        else:
            by_waste[nearest].append((places[nearest][0], finding))
    attributed: dict[str, tuple[Place, list[Seen]]] = {}
    for waste, pairs in by_waste.items():
        near = [pair for pair in pairs if pair[0] != "function"]
        others += [finding for place, finding in pairs if near and place == "function"]
        if pairs:
            place = min((place for place, _ in near or pairs), key=PLACES.index)
            attributed[waste] = (place, [finding for _, finding in near or pairs])
    return attributed, others


class Process:
    """A process that has imported torch and waits, with its log and the pipes of `step_clock`."""

    def __init__(self, command: Sequence[str], log: Path, device: Device) -> None:
        self._log, self._closed = log, False
        reading, self._requests = os.pipe()
        self._answers, writing = os.pipe()
        environment = {**os.environ, "STEP_CLOCK": f"{reading},{writing}", "PYTHONUNBUFFERED": "1"}
        given = os.environ.get("PYTHONPATH", "")
        environment["PYTHONPATH"] = os.pathsep.join(
            [str(ROOT), str(ROOT / "src"), *map(os.path.abspath, filter(None, given.split(os.pathsep)))]
        )  # it runs in another folder
        if device == "cpu":
            environment["CUDA_VISIBLE_DEVICES"] = ""
        with log.open("w", encoding="utf-8") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.profiles.step_clock", *command],
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
                pass_fds=(reading, writing),
                cwd=log.parent,
            )
        os.close(reading)
        os.close(writing)

    def tell(self, text: str) -> None:
        try:
            os.write(self._requests, text.encode() + b"\n")
        except BrokenPipeError:
            raise self.failure("ended") from None

    def hear(self) -> str:
        """The next answer."""
        heard = b""
        while not heard.endswith(b"\n"):
            ready, _, _ = select.select([self._answers], [], [], PATIENCE_S)
            part = os.read(self._answers, 100) if ready else b""
            if not part:
                raise self.failure("ended" if ready else f"said nothing for {PATIENCE_S:.0f} s")
            heard += part
        return heard.decode().strip()

    def wait(self) -> int:
        """Its exit code."""
        return self._process.wait(timeout=2 * PATIENCE_S)

    def close(self) -> None:
        """Ends it: at its next request, or now."""
        if self._closed:
            return
        self._closed = True
        os.close(self._requests)
        os.close(self._answers)
        try:
            self._process.wait(timeout=3.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def failure(self, what: str) -> RuntimeError:
        """An error with the end of its log."""
        return RuntimeError(f"{self._log.stem} {what}: {self._log.read_text(encoding='utf-8')[-2000:]}")


class ProfileJob:
    """A program under `nearpeak profile`."""

    def __init__(self, program: Program, device: Device, folder: Path, stop: bool) -> None:
        self._saved = folder / f"{program.name}.json.gz"
        self._saved.unlink(missing_ok=True)
        command = ["-m", "nearpeak", "profile", "--no-keep", "--save", str(self._saved)]
        command += ["--stop"] * stop + [str(program.path.resolve()), *program.arguments[device]]
        self.processes = [Process(command, folder / f"{program.name}.txt", device)]

    def run(self) -> ProfileResult:
        import nearpeak
        from nearpeak.profiles.finding import MIN_SHOWN_SHARE
        from nearpeak.profiles.grade import grade_profile

        start = time.perf_counter()
        self.processes[0].tell("start")
        code = self.processes[0].wait()
        seconds = time.perf_counter() - start
        if not self._saved.exists():
            raise self.processes[0].failure(f"ended with code {code}")
        profile = nearpeak.load(self._saved)
        findings, before_s = [], 0.0
        for finding in profile.findings:
            after_s = before_s + finding.saving_s if finding.together_s is None else finding.together_s
            seen = Seen(
                rule=finding.rule,
                source=finding.source,
                share=float(finding.share),
                added_share=(after_s - before_s) / profile.long_run_s,
                title=finding.title,
                called_at=finding.called_at,
                waits=finding.waits,
            )
            before_s = after_s
            if seen.share >= MIN_SHOWN_SHARE:
                findings.append(seen)
        return ProfileResult(
            findings=tuple(findings),
            wall_s=profile.wall_s,
            grade=str(grade_profile(profile).letter),
            seconds=seconds,
        )


class SavingsJob:
    """The variants of a program, measured in turns."""

    def __init__(self, program: Program, device: Device, folder: Path, turns: int) -> None:
        self._program, self._turns = program, turns
        wastes = list(program.marks)
        self._mended = {waste: {waste} for waste in wastes} | ({"all": set(wastes)} if len(wastes) > 1 else {})
        self.processes = []
        # about as many as are measured: some programs make room for all of them
        steps = FIRST_STEPS + turns * max(program.block or 0, MOST_STEPS) + (2 + turns) * (LEAD_STEPS + 1)
        for name, mended in {"": set(), **self._mended}.items():
            script = folder / (f"mended_{name}" if name else "as_it_stands") / program.path.name
            script.parent.mkdir(parents=True, exist_ok=True)
            script.write_text(program.variant(mended), encoding="utf-8")
            command = [str(script), *program.arguments[device], "--steps", str(steps)]
            log = script.with_suffix(".log")
            self.processes.append(Process(command, log, device))

    def run(self) -> dict[str, Saving]:
        for process in self.processes:
            process.tell("start")
        for process in self.processes:
            process.hear()
        first_s = self._turn(self.processes[0], FIRST_STEPS) / FIRST_STEPS
        for process in self.processes[1:]:  # all are at the same step, and therefore at the same token of a text
            self._turn(process, FIRST_STEPS)
        steps = self._program.block or min(MOST_STEPS, max(4, round(TURN_SECONDS / first_s)))
        rounds = [[self._turn(process, steps) / steps for process in self.processes] for _ in range(self._turns)]
        savings = {}
        for number, name in enumerate(self._mended, 1):
            shares = [1.0 - times[number] / times[0] for times in rounds]
            interval = median_interval(shares)
            step_s = median([times[0] for times in rounds])
            savings[name] = Saving(share=median(shares), low=interval.low, high=interval.high, step_s=step_s)
        return savings

    @staticmethod
    def _turn(process: Process, steps: int) -> float:
        process.tell(f"{LEAD_STEPS} {steps}")
        return float(process.hear())


def rows_of(program: Program, profile: ProfileResult | None, savings: Mapping[str, Saving]) -> Iterator[Row]:
    """A row for each waste, and one for all of them if there are several."""
    attributed, _ = attribute(program, profile.findings if profile else ())
    for waste in program.marks:
        place, findings = attributed.get(waste, ("missed" if profile else "not profiled", []))
        yield Row(
            program=program.name,
            waste=waste,
            measured=savings.get(waste),
            predicted=_predicted_share(findings),
            place=place,
            findings=tuple(findings),
        )
    if len(program.marks) > 1:
        together = tuple(finding for _, findings in attributed.values() for finding in findings)
        yield Row(
            program=program.name,
            waste="all",
            measured=savings.get("all"),
            predicted=_predicted_share(together),
            place="elsewhere" if profile else "not profiled",
            findings=together,
        )


def _predicted_share(findings: Sequence[Seen]) -> float:
    """The largest alone, and what each of the others adds: larger findings of other places are not mended."""
    largest = max(findings, key=lambda finding: finding.share, default=None)
    return sum(finding.share if finding is largest else finding.added_share for finding in findings)


def cells(row: Row) -> list[str]:
    measured = row.measured
    shares = f"{measured.share:.1%} [{measured.low:.1%}, {measured.high:.1%}]" if measured else "-"
    step = f"{measured.step_s * 1e3:.2f}" if measured else "-"
    error = "-" if row.error is None else f"{row.error:.0%}"
    points = "-" if measured is None else f"{100 * (row.predicted - measured.share):+.1f}"
    place = "" if row.waste == "all" else row.place if row.is_waste else "none here"
    by = ", ".join(f"{seen.rule}@{seen.source.rpartition(':')[2]}" for seen in row.findings) or "-"
    return [row.program, row.waste, place, by, step, f"{row.predicted:.1%}", shares, error, points]


HEAD = ("program", "waste", "found", "by", "step, ms", "predicted", "measured", "error", "points")


def report(results: Sequence[Result], device: str) -> str:
    """The table, what was missed, and the counts."""
    rows = [row for result in results for row in result.rows]
    wastes = [row for row in rows if row.is_waste and row.waste != "all"]
    found = {place: sum(row.place == place for row in wastes) for place in (*PLACES, "missed")}
    judged = [row for row in rows if row.error is not None]
    named = [row for row in judged if row.waste != "all" and row.place in ("line", "call", "beside")]
    within = {limit: sum(row.error <= limit for row in judged if row.error is not None) for limit in (CLOSE, NEAR)}
    clean = [result for result in results if not result.rows and not result.error]
    lines = [table(HEAD, [cells(row) for row in rows], texts=4), ""]
    for result in results:
        if result.error:
            lines.append(f"FAILED {result.program}: {result.error}")
    for row in wastes:
        if row.place in ("missed", "function"):
            lines.append(f"missed: {row.program}, {row.waste}" + (" (same function)" if row.findings else ""))
    for row in rows:
        if not row.is_waste and row.predicted >= LARGE and row.waste != "all":
            lines.append(f"false: {row.program}, {row.waste}: {row.predicted:.1%} predicted, nothing to save")
    for result in results:
        for seen in result.others:
            if seen.share >= LARGE:
                kind = "CLEAN PROGRAM" if not result.rows else "not planted"
                lines.append(f"{kind}: {result.program}: {seen.rule} at {seen.source} {seen.share:.1%}: {seen.title}")
    loud = sum(any(seen.share >= LARGE for seen in result.others) for result in clean)
    grades = ", ".join(f"{result.program} {result.profile.grade}" for result in results if result.profile)
    seconds = sum(result.profile.seconds for result in results if result.profile)
    lines += [
        f"grades: {grades}",
        f"{len(results)} programs on {device}: {len(wastes)} wastes, {found['line']} found at the line, "
        + (f"{found['call']} at the call of the line that is named, " if found["call"] else "")
        + f"{found['beside']} within {BESIDE} lines, {found['function']} in the function, {found['missed']} missed",
        f"{len(judged)} predictions: {within[CLOSE]} within {CLOSE:.0%}, {within[NEAR]} within {NEAR:.0%}; "
        f"{sum(row.is_in_range for row in named)} of {len(named)} of findings at or near the line are in their range",
        f"{len(clean)} clean programs: {loud} with a finding of {LARGE:.0%} or more",
        f"{seconds:.0f} s of profiles",
    ]
    if len(dates := sorted({result.date for result in results})) > 1:
        for date in dates:
            lines.append(f"run at {date}: {', '.join(result.program for result in results if result.date == date)}")
    return "\n".join(lines)


def result_from_json(data: Mapping[str, Any], date: str) -> Result:
    def seen(items: Sequence[Mapping[str, Any]]) -> tuple[Seen, ...]:
        return tuple(Seen(**item) for item in items)

    profile = data["profile"] and ProfileResult(**{**data["profile"], "findings": seen(data["profile"]["findings"])})
    rows = [
        Row(**{**row, "measured": row["measured"] and Saving(**row["measured"]), "findings": seen(row["findings"])})
        for row in data["rows"]
    ]
    return Result(
        program=data["program"],
        profile=profile,
        rows=rows,
        others=seen(data["others"]),
        error=data["error"],
        date=data.get("date") or date,
    )


def joined(results: Sequence[Result]) -> list[Result]:
    """One result for each program: savings of one run belong to the findings of another (`--parts`)."""
    by_program: dict[str, Result] = {}
    for result in results:
        before = by_program.get(result.program)
        if before is None:
            by_program[result.program] = result
            continue
        found = next((one for one in (result, before) if one.profile), result)
        measured = {row.waste: row.measured for one in (before, result) for row in one.rows if row.measured}
        by_program[result.program] = dataclasses.replace(
            found,
            rows=[dataclasses.replace(row, measured=measured.get(row.waste)) for row in found.rows],
            error=found.error,
        )
    return sorted(by_program.values(), key=lambda result: result.program)


def write_results(path: Path, results: Sequence[Result], head: Mapping[str, Any]) -> None:
    saved = {name: head[name] for name in ("date", "device", "torch")}
    saved["results"] = [dataclasses.asdict(result) for result in results]
    path.write_text(json.dumps(saved, indent=1) + "\n", encoding="utf-8")


def fill_compiler_cache(programs: Sequence[Program], device: Device, folder: Path) -> None:
    """Runs programs that compile for two steps, all at once, so that they find their kernels later."""
    processes = []
    for program in programs:
        if "--compile" in program.arguments[device]:
            command = [str(program.path.resolve()), *program.arguments[device], "--steps", "2"]
            processes.append(Process(command, folder / f"{program.name}.compile.log", device))
    for process in processes:
        process.tell("start")
    for process in processes:
        process.wait()
        process.close()


def run_all(programs: Sequence[Program], arguments: argparse.Namespace, folder: Path) -> Iterator[Result]:
    """The programs one after the other; processes of the next jobs import torch meanwhile."""
    device: Device = arguments.device
    wanted: list[tuple[Program, Literal["profile", "savings"]]] = []
    for program in programs:
        if "profile" in arguments.parts:
            wanted.append((program, "profile"))
        if "savings" in arguments.parts and program.marks:
            wanted.append((program, "savings"))
    jobs: list[ProfileJob | SavingsJob] = []
    outcomes: dict[str, dict[str, Any]] = {program.name: {} for program in programs}
    errors: dict[str, str] = {}
    try:
        for number, (program, part) in enumerate(wanted):
            for later, its_part in wanted[len(jobs) : number + 1 + arguments.ahead]:
                jobs.append(
                    ProfileJob(later, device, folder, arguments.stop)
                    if its_part == "profile"
                    else SavingsJob(later, device, folder, arguments.turns)
                )
            try:
                outcomes[program.name][part] = jobs[number].run()
            except (RuntimeError, subprocess.TimeoutExpired, OSError) as error:  # one must not end the others
                errors[program.name] = str(error)
            for process in jobs[number].processes:
                process.close()
            if number + 1 == len(wanted) or wanted[number + 1][0] is not program:
                profile = outcomes[program.name].get("profile")
                savings = outcomes[program.name].get("savings", {})
                yield Result(
                    program=program.name,
                    profile=profile,
                    rows=list(rows_of(program, profile, savings)),
                    others=tuple(attribute(program, profile.findings)[1]) if profile else (),
                    error=errors.get(program.name, ""),
                )
    finally:
        for job in jobs:
            for process in job.processes:
                process.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--set", type=Path, default=PROGRAMS, help="the folder of the programs")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these programs")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="the GPU if there is one")
    parser.add_argument("--parts", nargs="+", choices=("profile", "savings"), default=("profile", "savings"))
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--ahead", type=int, help="jobs whose processes import torch already (2; 0 with few cores)")
    parser.add_argument("--stop", action="store_true", help="end a profiled program when its step was captured")
    parser.add_argument("--json", type=Path, help="write the results here, as they come")
    parser.add_argument("--keep", type=Path, help="keep profiles, terminal outputs and variants here")
    parser.add_argument(
        "--show", type=Path, nargs="+", help="print the report of earlier runs; of profiles and savings, what each has"
    )
    arguments = parser.parse_args()
    if arguments.show:
        saved = [json.loads(path.read_text(encoding="utf-8")) for path in arguments.show]
        results = joined([result_from_json(item, one["date"]) for one in saved for item in one["results"]])
        print(report(results, saved[0]["device"]))
        if arguments.json:
            write_results(arguments.json, results, saved[0])
        return 0
    import torch

    arguments.device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if arguments.ahead is None:
        arguments.ahead = 2 if (os.cpu_count() or 1) >= 8 else 0
    paths = sorted(arguments.set.glob("*.py"))
    if unknown := set(arguments.only or ()) - {path.stem for path in paths}:
        parser.error(f"no program {', '.join(sorted(unknown))} in {arguments.set}: {[path.stem for path in paths]}")
    programs = [read_program(path) for path in paths if not arguments.only or path.stem in arguments.only]
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.keep or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        fill_compiler_cache(programs, arguments.device, folder)
        for result in run_all(programs, arguments, folder):
            results.append(result)
            for row in result.rows:
                print(" | ".join(cells(row)), flush=True)
            if not result.rows:
                shares = [f"{seen.rule} {seen.share:.1%}" for seen in result.others if seen.share >= LARGE]
                print(f"{result.program} | clean | {', '.join(shares) or 'quiet'}", flush=True)
            if result.error:
                print(f"FAILED {result.program}: {result.error}", flush=True)
            if arguments.json:
                head = {
                    "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                    "device": torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu",
                    "torch": torch.__version__,
                }
                write_results(arguments.json, results, head)
    print("\n" + report(results, arguments.device))
    return 1 if any(result.error for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
