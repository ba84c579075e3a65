"""`MeasuredTest`: what one test measures, judged against the bars of its marker; it fails, skips or passes by that.

A time is a median with an interval. A bar is missed when the whole interval misses it, and met when the median meets
it. In between nothing is decided, and the test is skipped: a test that fails now and then for noise is worse than one
that says so. Baselines are one file per name, with one figure per machine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar, get_args

import pytest

from nearpeak import __version__
from nearpeak._display import printable
from nearpeak._files import read_json, replace_file
from nearpeak._records import MeasuredSeconds, from_json, to_json
from nearpeak.errors import EnvironmentProblem, FileProblem, NearpeakError, UsageError, did_you_mean
from nearpeak.machines.calibrations import CalibrationKey
from nearpeak.machines.machine import Machine
from nearpeak.measure.case import Case
from nearpeak.measure.statistics import median_interval
from nearpeak.measure.timing import Grade, Timing
from nearpeak.profiles.finding import Finding, is_ignored
from nearpeak.profiles.grade import grade_profile
from nearpeak.profiles.profile import Profile
from nearpeak.pytest_plugin import WROTE
from nearpeak.render.text import elide_start, plain
from nearpeak.render.views.profile import select_findings
from nearpeak.render.views.timing import title
from nearpeak.render.views.verdict import sentences
from nearpeak.units import GIB, UNITS, gibibytes, parse_quantity, percent, quantity, seconds, seconds_between

Floor = Literal["as written", "fused", "ideal"]

GRADES: tuple[Grade, ...] = get_args(Grade)
"""The best first."""
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """The limits that a marker sets for a measurement; None for no limit. Times are in seconds, memory in bytes."""

    of_bound: float | None = None
    """The smallest share of the bound that passes."""
    floor: Floor = "as written"
    """The floor of a step that is its bound."""
    step_time: float | None = None
    peak_memory: float | None = None
    no_finding_above: float | None = None
    """The largest share of the step that a finding may save."""
    ignore: tuple[str, ...] = ()
    """Findings to ignore: a rule, or a rule at a line ("unfused-norm@model.py:41")."""
    baseline: str | None = None
    within: float | None = None
    """The largest slowdown against the baseline that passes, as a share."""
    device: str | None = None
    """The device that the test needs: "gpu", "cpu", or the name that a driver reports."""
    grade: Grade = "B"
    """The worst grade of a measurement that decides a test."""

    @property
    def limits(self) -> tuple[str, ...]:
        """The names of the bars that are set."""
        names = ("of_bound", "step_time", "peak_memory", "no_finding_above", "baseline")
        return tuple(name for name in names if getattr(self, name) is not None)


def bars_from_markers(markers: Iterable[tuple[Sequence[Any], Mapping[str, Any]]]) -> Bars:
    """The bars of a test's markers, the nearest first: its values override those of the others.

    >>> bars_from_markers([((), {"step_time": "12 ms"}), ((), {"step_time": "1 s", "of_bound": "50%"})]).step_time
    0.012
    """
    values: dict[str, Any] = {}
    for positional, named in markers:
        if positional:
            raise UsageError(f"The marker nearpeak takes names, as in of_bound=0.5, and got {positional[0]!r}.")
        values = {**named, **values}
    valid = [field.name for field in fields(Bars)]
    for name in values:
        if name not in valid:
            raise UsageError(f"The marker nearpeak has no {name!r}. {did_you_mean(name, valid)}")
    bars = Bars(**{name: _PARSERS[name](name, value) for name, value in values.items() if value is not None})
    if (bars.baseline is None) != (bars.within is None):
        raise UsageError('The marker nearpeak takes baseline="name" and within="5%" together.')
    return bars


def parse_share(name: str, value: Any) -> float:
    """A share as 0.05, "5%" or "5 %".

    >>> parse_share("within", "5%"), parse_share("within", 0.05)
    (0.05, 0.05)
    """
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*(%?)\s*", value)
        number = float(match[1]) / (100 if match[2] else 1) if match else None
    else:
        number = _number(value)
    if number is None:
        raise UsageError(f'{name}={value!r} is no share: write 0.05 or "5%".')
    return number


def parse_seconds(name: str, value: Any) -> float:
    """A time as "12 ms", or a number of seconds.

    >>> parse_seconds("step_time", "12 ms"), parse_seconds("step_time", 0.5)
    (0.012, 0.5)
    """
    return _parse_quantity(name, value, "s", 'a time: write "12 ms", or a number of seconds')


def parse_bytes(name: str, value: Any) -> float:
    """An amount of memory as "3 GiB", or a number of bytes.

    >>> parse_bytes("peak_memory", "3 GiB"), parse_bytes("peak_memory", "500 MB")
    (3221225472.0, 500000000.0)
    """
    return _parse_quantity(name, value, "B", 'an amount of memory: write "3 GiB", or a number of bytes')


def _parse_quantity(name: str, value: Any, unit: Literal["s", "B"], wanted: str) -> float:
    number = parse_quantity(value, unit) if isinstance(value, str) else _number(value)
    if number is None or number <= 0:
        raise UsageError(f"{name}={value!r} is not {wanted}. Units: {', '.join(UNITS[unit])}.")
    return number


def _number(value: Any) -> float | None:
    """A finite number that is not negative."""
    fits = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < float("inf")
    return float(value) if fits else None


def _parse_bound_share(name: str, value: Any) -> float:
    share = parse_share(name, value)
    if not 0 < share <= 1:
        raise UsageError(f"{name}={value!r}: nothing is faster than its bound. Give a share from 0 to 1, or a percent.")
    return share


def _parse_text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise UsageError(f"{name}={value!r} is no text.")
    return value.strip()


def _parse_file_name(name: str, value: Any) -> str:
    if not isinstance(value, str) or not _FILE_NAME.fullmatch(value):
        raise UsageError(
            f"{name}={value!r} cannot be the name of a file: use letters, digits, '.', '_' and '-', 100 at most."
        )
    return value


def _parse_rules(name: str, value: Any) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(_parse_text(name, rule) for rule in value)


def _parse_one_of(valid: Sequence[T]) -> Callable[[str, Any], T]:
    def read(name: str, value: Any) -> T:
        if value not in valid:
            raise UsageError(f"{name}={value!r}. Valid: {', '.join(map(repr, valid))}.")
        return valid[valid.index(value)]

    return read


_PARSERS: Mapping[str, Callable[[str, Any], Any]] = {
    "of_bound": _parse_bound_share,
    "floor": _parse_one_of(get_args(Floor)),
    "step_time": parse_seconds,
    "peak_memory": parse_bytes,
    "no_finding_above": parse_share,
    "ignore": _parse_rules,
    "baseline": _parse_file_name,
    "within": parse_share,
    "device": _parse_text,
    "grade": _parse_one_of(GRADES[:-1]),
}
"""The parser of each argument of the marker."""

SCHEMA = 1
"""Raised whenever the meaning of a stored figure changes."""
LARGEST_FILE_BYTES = 2**20
"""A figure takes some 400 bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """The time of a test on one machine. `low` to `high` is its interval within the run that measured it."""

    key: CalibrationKey
    seconds: MeasuredSeconds
    low: MeasuredSeconds
    high: MeasuredSeconds
    kind: str
    """ "step", or the kind of a timing."""
    date: str
    nearpeak: str

    def check(self) -> None:
        """ValueError where the time is outside of its interval."""
        if not self.low <= self.seconds <= self.high:
            raise ValueError(f"no time is {self.seconds} [{self.low}, {self.high}]")


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineFile:
    """The baselines of one name, ordered by machine."""

    schema: int = SCHEMA
    baselines: tuple[Baseline, ...] = ()

    def check(self) -> None:
        """ValueError where another version wrote it."""
        if self.schema != SCHEMA:
            raise ValueError(f"it has schema {self.schema}, this version of nearpeak reads {SCHEMA}")

    def of(self, key: CalibrationKey) -> Baseline | None:
        """The baseline of one machine. A machine with another driver or another torch counts as another one."""
        return next((baseline for baseline in self.baselines if baseline.key == key), None)


def baseline_path(folder: Path, name: str) -> Path:
    """The file of the baselines of a name."""
    return folder / f"{name}.json"


def read_baselines(path: Path) -> BaselineFile:
    """The baselines in a file; none where there is no file. UsageError where its content is not valid."""
    if not path.exists():
        return BaselineFile()
    try:
        stored = from_json(BaselineFile, read_json(path, largest=LARGEST_FILE_BYTES))
    except (FileProblem, ValueError) as error:
        reason = error.reason if isinstance(error, FileProblem) else str(error)[:300]
        raise UsageError(
            f"The baseline {path} cannot be used: {reason}. Delete it, and run with --nearpeak-update."
        ) from None
    return stored


def write_baseline(path: Path, baseline: Baseline) -> None:
    """Adds a baseline to a file. It replaces the one of the same machine; those of other machines stay."""
    others = [each for each in read_baselines(path).baselines if each.key != baseline.key]
    ordered = sorted([*others, baseline], key=lambda each: (each.key.device, each.key.driver, each.key.torch))
    text = json.dumps(to_json(BaselineFile(baselines=tuple(ordered))), indent=1) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, text.encode())
    except OSError as error:
        raise EnvironmentProblem(f"The baseline {path} cannot be written: {error.strerror or error}.") from None


def machine_text(key: CalibrationKey) -> str:
    """A machine as text."""
    return f"{key.device}, driver {key.driver}, torch {key.torch}"


Verdict = Literal["met", "missed", "unsure"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BarResult:
    """The result of one bar, and a sentence with the figure and the bar."""

    verdict: Verdict
    line: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """The time of a profile or of a timing, with its interval and its grade."""

    name: str
    kind: str
    """ "step", or the kind of a timing."""
    seconds: float
    low: float
    high: float
    grade: Grade
    doubts: tuple[str, ...]

    def __str__(self) -> str:
        return seconds_between(self.seconds, self.low, self.high)


def figure_of(measured: Profile | Timing) -> Figure:
    """The time of a step, or of a call."""
    if isinstance(measured, Timing):
        return Figure(
            name=title(measured),
            kind=measured.kind,
            seconds=measured.seconds,
            low=measured.low,
            high=measured.high,
            grade=measured.grade,
            doubts=tuple(plain(f"{flag.name}: {flag.evidence}") for flag in measured.flags if flag.severity != "note"),
        )
    interval = median_interval(measured.walls or (measured.wall_s,))
    grade = grade_profile(measured)
    return Figure(
        name=plain(measured.source, 60) or "the step",
        kind="step",
        seconds=measured.wall_s,
        low=min(interval.low, measured.wall_s),
        high=max(interval.high, measured.wall_s),
        grade=grade.letter,
        doubts=grade.reasons,
    )


def grade_too_low(figure: Figure, bars: Bars) -> bool:
    """Whether the grade of a measurement is below the worst one that the test accepts."""
    return GRADES.index(figure.grade) > GRADES.index(bars.grade)


def judge(measured: Profile | Timing, bars: Bars, baseline: Baseline | None = None) -> tuple[BarResult, ...]:
    """The result of every bar that is set. UsageError for a bar that the measurement cannot have."""
    return tuple(_bar_results(measured, figure_of(measured), bars, baseline))


def _bar_results(
    measured: Profile | Timing, figure: Figure, bars: Bars, baseline: Baseline | None
) -> Iterator[BarResult]:
    if bars.of_bound is not None:
        yield _judge_of_bound(measured, figure, bars, bars.of_bound)
    if bars.step_time is not None:
        line = f"step_time: {figure}, and the bar is {seconds(bars.step_time)}"
        yield BarResult(verdict=_verdict(figure, bars.step_time), line=line)
    if bars.peak_memory is not None:
        yield _judge_peak_memory(_require_profile(measured, "peak_memory"), bars.peak_memory)
    if bars.no_finding_above is not None:
        yield _judge_findings(_require_profile(measured, "no_finding_above"), bars.no_finding_above, bars)
    if baseline is not None and bars.within is not None:
        yield _judge_baseline(figure, baseline, bars.within)


def _verdict(figure: Figure, longest: float) -> Verdict:
    return "met" if figure.seconds <= longest else "missed" if figure.low > longest else "unsure"


def _require_profile(measured: Profile | Timing, bar: str) -> Profile:
    if isinstance(measured, Timing):
        raise UsageError(f"{bar} is a bar for nearpeak_profile: nearpeak_bench takes times alone.")
    return measured


def _judge_of_bound(measured: Profile | Timing, figure: Figure, bars: Bars, min_share: float) -> BarResult:
    if isinstance(measured, Timing):
        bound, name = measured.bound_seconds, f"{measured.bound_limiter} bound"
        if bars.floor != "as written":
            raise UsageError(f"floor={bars.floor!r} is for nearpeak_profile: a call has one bound, that of its work.")
        if measured.work is None:
            raise UsageError(
                "of_bound needs to know what a call must do: give nearpeak_bench(..., work=nearpeak.Work(...)), or use "
                "nearpeak_profile, which finds out by itself."
            )
    else:
        floors = {"as written": measured.as_written_s, "fused": measured.fused_s, "ideal": measured.ideal_s}
        bound, name = floors[bars.floor], f"{bars.floor} bound"
    if not bound:
        return BarResult(verdict="unsure", line="of_bound: there is no bound for it on this machine")
    line = (
        f"of_bound: {percent(bound / figure.seconds)} of the {name} ({seconds(bound)} of {figure}), and the bar is "
        f"{percent(min_share)}"
    )
    return BarResult(verdict=_verdict(figure, bound / min_share), line=line)


def _judge_peak_memory(profile: Profile, max_bytes: float) -> BarResult:
    if profile.memory is None:
        return BarResult(verdict="unsure", line="peak_memory: it is not known of this step")
    peak = profile.memory.peak_bytes
    text = gibibytes if max(peak, max_bytes) >= GIB else lambda value: quantity(value, "B")
    where = f" at {elide_start(profile.memory.source)}" if profile.memory.source else ""
    line = f"peak_memory: {text(peak)} on {plain(profile.memory.device, 20)}{where}, and the bar is {text(max_bytes)}"
    return BarResult(verdict="met" if peak <= max_bytes else "missed", line=line)


def _judge_findings(profile: Profile, max_share: float, bars: Bars) -> BarResult:
    findings = [
        finding
        for finding in profile.findings
        if finding.share > max_share and not is_ignored(finding.rule, finding.source, bars.ignore)
    ]
    if not findings:
        return BarResult(verdict="met", line=f"no_finding_above: none saves more than {percent(max_share)}")
    worst = max(findings, key=lambda finding: finding.share)
    count = f"{len(findings)} findings save" if len(findings) > 1 else "1 finding saves"
    line = f"no_finding_above: {count} more than {percent(max_share)}, the largest {_finding_line(worst)}"
    return BarResult(verdict="missed", line=line)


def _judge_baseline(figure: Figure, baseline: Baseline, within: float) -> BarResult:
    if baseline.kind != figure.kind:
        raise UsageError(
            f"The baseline is a {baseline.kind} time of {baseline.date}, and this is a {figure.kind} time: run with "
            "--nearpeak-update to replace it."
        )
    then = seconds_between(baseline.seconds, baseline.low, baseline.high)
    line = (
        f"baseline: {figure}, {percent(figure.seconds / baseline.seconds - 1)} more than {then} of "
        f"{plain(baseline.date)}, and the bar is {percent(within)}"
    )
    if figure.seconds <= baseline.seconds * (1 + within):
        return BarResult(verdict="met", line=line)
    # A time beyond the intervals of both measurements is a regression; one within them is not decided.
    return BarResult(verdict="missed" if figure.low > baseline.high * (1 + within) else "unsure", line=line)


def failure_message(measured: Profile | Timing, results: tuple[BarResult, ...]) -> str:
    """The message of a failing test: each missed bar, the top finding, and the grade of the measurement."""
    figure = figure_of(measured)
    missed = [f"  {each.line.rstrip('.')}." for each in results if each.verdict == "missed"]
    lines = [f"{figure.name} misses {'a bar' if len(missed) == 1 else f'{len(missed)} bars'}:", *missed]
    if isinstance(measured, Profile):
        findings = select_findings(measured)
        if findings:
            lines += [f"Top finding: {_finding_line(findings[0])}", *_remedy_lines(findings[0])]
        else:
            verdict = sentences(measured)
            lines += [f"No finding. {verdict['Why']}", verdict["Next"]]
        lines.append(f"Measured on {plain(measured.device, 60)}, {grade_text(figure)}.")
    else:
        lines.append(f"Measured on {plain(measured.environment.device, 60)}, {grade_text(figure)}.")
    return "\n".join(line for line in lines if line)


def grade_text(figure: Figure) -> str:
    """The grade with the reasons that it is not an A."""
    doubts = f" ({'; '.join(figure.doubts)})" if figure.doubts else ""
    return f"grade {figure.grade}{doubts}"


def _finding_line(finding: Finding) -> str:
    where = elide_start(finding.source) or elide_start(finding.module) or "the step"
    return f"{finding.saving_text}: {plain(finding.rule, 40)} at {where}: {plain(finding.title)}"


def _remedy_lines(finding: Finding) -> list[str]:
    lines = finding.remedy.strip("\n").splitlines()
    return (
        ["Instead:", *(f"    {' ' * (len(line) - len(line.lstrip()))}{plain(line)}" for line in lines)] if lines else []
    )


FOLDER = "tests/nearpeak_baselines"
"""The default folder of baselines."""
_baseline_owners = pytest.StashKey[dict[str, str]]()
"""The test that wrote the baseline of a name, in a run with --nearpeak-update."""


class MeasuredTest:
    """The measurements of one test, and the bars of its marker.

    A test whose bars cannot be decided on this machine is skipped, with the reason.
    """

    def __init__(self, item: pytest.Item) -> None:
        self._item = item
        self._marked = item.get_closest_marker("nearpeak") is not None
        self._count = 0
        try:
            self.bars = bars_from_markers((mark.args, mark.kwargs) for mark in item.iter_markers("nearpeak"))
        except UsageError as error:
            _fail(str(error))

    def begin(self) -> None:
        """Before the test: skips it on another device than the one that its marker names."""
        self._count = 0  # plugins may run a test again
        wanted = self.bars.device
        if wanted is None:
            return
        import_torch()
        from nearpeak.devices.backends import gpu_backend
        from nearpeak.measure.machine import this_machine_key

        kind = "cpu" if gpu_backend() is None else "gpu"
        if wanted in ("gpu", "cpu"):
            if wanted != kind:
                reason = "there is none" if wanted == "gpu" else "there is a GPU, which would be measured"
                _skip(f"nearpeak: needs a {wanted.upper()}, and {reason}")
        elif wanted != (device := this_machine_key().device):
            _skip(f"nearpeak: is for {wanted}, and this is {device}")

    def end(self) -> None:
        """After the test: fails it if it has bars and measured nothing."""
        __tracebackhide__ = True
        if self._marked and self._count == 0 and self.bars.limits:
            _fail(
                f"The test has bars ({', '.join(self.bars.limits)}) and measured nothing: call nearpeak_profile(fn, "
                "*args) or nearpeak_bench(fn, *args) in it."
            )

    def profile(
        self, fn: Callable[..., Any] | Case, *args: Any, on: str | Machine | None = None, **options: Any
    ) -> Profile:
        """`nearpeak.profile(fn, *args)`; the result is judged against the bars of the test."""
        __tracebackhide__ = True
        import_torch()
        from nearpeak.profiling import run

        machine = self._machine() if on is None else on
        try:
            measured = run.profile(fn, *args, on=machine, **options)
        except EnvironmentProblem as error:
            _skip(f"nearpeak: {error}")
        self._judge(measured)
        return measured

    def bench(self, fn: Callable[..., Any] | Case, *args: Any, **options: Any) -> Timing:
        """`nearpeak.bench(fn, *args)`; the result is judged against the bars of the test."""
        __tracebackhide__ = True
        import_torch()
        from nearpeak.measure import bench

        has_work = options.get("work") is not None or (isinstance(fn, Case) and fn.work is not None)
        if self.bars.of_bound is not None and has_work and options.get("on") is None:
            options["on"] = self._machine()
        try:
            measured = bench.bench(fn, *args, **options)
        except EnvironmentProblem as error:
            _skip(f"nearpeak: {error}")
        self._judge(measured)
        return measured

    def _machine(self) -> Machine:
        """This machine, if it is known; it is calibrated only with --nearpeak-calibrate."""
        __tracebackhide__ = True
        from nearpeak.calibrate.machine import machine
        from nearpeak.measure.machine import this_machine_if_known

        known = this_machine_if_known()
        if known is None and not self._option("--nearpeak-calibrate"):
            pytest.skip(
                "nearpeak: this machine was never measured, so there are no bounds: run `nearpeak machine "
                "--calibrate` once, or pytest with --nearpeak-calibrate"
            )
        return known or machine()

    def _judge(self, measured: Profile | Timing) -> None:
        """Fails or skips the test; returns if all bars are met."""
        __tracebackhide__ = True
        self._count += 1
        figure, bars = figure_of(measured), self.bars
        summary = f"{figure.name}: {figure} {figure.kind} time, grade {figure.grade}"
        self._item.user_properties.append(("nearpeak", summary))  # for --junit-xml
        if not bars.limits:
            return
        if grade_too_low(figure, bars):
            _skip(f"nearpeak: cannot tell: {figure} has {grade_text(figure)}, and the test wants {bars.grade}")
        baseline, missing = None, ""
        update = bool(self._option("--nearpeak-update"))
        try:
            if bars.baseline is not None and not update:
                baseline, missing = self._baseline()
            results = judge(measured, bars, baseline)
            if any(each.verdict == "missed" for each in results):
                pytest.fail(printable(failure_message(measured, results)))  # with the line that measured it
            if bars.baseline is not None and update:
                self._write(figure)
        except NearpeakError as error:
            _fail(str(error))
        unsure = "; ".join(each.line for each in results if each.verdict == "unsure")
        if unsure or missing:
            _skip(f"nearpeak: {missing or f'cannot tell: {unsure}'}")

    def _baseline(self) -> tuple[Baseline | None, str]:
        """The baseline of this machine, or None and the reason."""
        path, key = self._path(), key_of_machine()
        stored = read_baselines(path)
        baseline = stored.of(key)
        if baseline is not None:
            return baseline, ""
        others = "; ".join(machine_text(each.key) for each in stored.baselines)
        reason = f"there is one of {others}" if others else f"{self._shown(path)} is not there"
        return None, f"no baseline of this machine ({machine_text(key)}): {reason}. --nearpeak-update writes one"

    def _write(self, figure: Figure) -> None:
        path, node = self._path(), self._item.nodeid
        owners = self._item.config.stash.setdefault(_baseline_owners, {})
        owner = owners.setdefault(path.name, f"{node} {self._count}")
        if owner != f"{node} {self._count}":
            raise UsageError(
                f"The baseline {path.stem!r} holds one figure, and {owner.rpartition(' ')[0]} has measured it already: "
                "measure once in a test, and give every test a name of its own."
            )
        write_baseline(
            path,
            Baseline(
                key=key_of_machine(),
                seconds=figure.seconds,
                low=figure.low,
                high=figure.high,
                kind=figure.kind,
                date=datetime.now(UTC).isoformat(timespec="seconds"),
                nearpeak=__version__,
            ),
        )
        self._item.user_properties.append((WROTE, f"{self._shown(path)}: {figure}"))

    def _path(self) -> Path:
        """The file of the baseline; each set of parameters of a test has its own."""
        assert self.bars.baseline is not None
        config = self._item.config
        folder = config.rootpath / (str(config.getini("nearpeak_baselines")) or FOLDER)
        parameters = getattr(getattr(self._item, "callspec", None), "id", "")
        return baseline_path(folder, self.bars.baseline + (f"_{_parameters_name(parameters)}" if parameters else ""))

    def _shown(self, path: Path) -> str:
        root = self._item.config.rootpath
        return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)

    def _option(self, name: str) -> Any:
        return self._item.config.getoption(name)


def import_torch() -> None:
    """Skips the test where torch cannot be imported: nothing can be measured without it."""
    __tracebackhide__ = True
    try:
        import torch  # noqa: F401
    except ImportError as error:
        _skip(f"nearpeak: torch cannot be imported: {error}")


def key_of_machine() -> CalibrationKey:
    """The key of this machine's baselines."""
    from nearpeak.measure.machine import this_machine_key

    return this_machine_key()


def _parameters_name(parameters: str) -> str:
    """The id of a test's parameters as part of a file name; a hash is added where characters were replaced."""
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", parameters)[:60]
    if safe == parameters:
        return safe
    from hashlib import sha256

    return f"{safe}_{sha256(parameters.encode('utf-8', 'surrogatepass')).hexdigest()[:8]}"


def _skip(message: str) -> NoReturn:
    __tracebackhide__ = True
    pytest.skip(printable(message))


def _fail(message: str) -> NoReturn:
    __tracebackhide__ = True
    pytest.fail(printable(message), pytrace=False)
