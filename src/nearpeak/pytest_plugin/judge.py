"""`judge`: a measurement against the bars of a test. Each is met, missed, or within what the measurement cannot tell.

A time is a median with an interval. A bar is missed when the whole interval misses it, and met when the median meets
it. In between nothing is decided: a test that fails now and then for noise is worse than one that says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from nearpeak.diagnose.finding import Finding, is_silenced
from nearpeak.diagnose.grade import grade_of
from nearpeak.diagnose.profile import Profile
from nearpeak.errors import UsageError
from nearpeak.measure.flags import Grade
from nearpeak.measure.statistics import median_interval
from nearpeak.measure.timing import Timing
from nearpeak.pytest_plugin.bars import GRADES, Bars
from nearpeak.pytest_plugin.baselines import Baseline
from nearpeak.render.profile_card import place, sentences
from nearpeak.render.profile_findings import shown
from nearpeak.render.timing import plain, title
from nearpeak.units import GIB, gibibytes, percent, quantity, seconds, seconds_between

Verdict = Literal["met", "missed", "unsure"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One bar: how it came out, and the figure beside the bar in one sentence."""

    verdict: Verdict
    line: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """What a profile and a timing have in common: a time with its interval, and how far it can be trusted."""

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
    grade = grade_of(measured)
    return Figure(
        name=plain(measured.source, 60) or "the step",
        kind="step",
        seconds=measured.wall_s,
        low=min(interval.low, measured.wall_s),
        high=max(interval.high, measured.wall_s),
        grade=grade.letter,
        doubts=grade.reasons,
    )


def too_low(figure: Figure, bars: Bars) -> bool:
    """Whether the measurement decides nothing."""
    return GRADES.index(figure.grade) > GRADES.index(bars.grade)


def judge(measured: Profile | Timing, bars: Bars, baseline: Baseline | None = None) -> tuple[Judged, ...]:
    """All bars that were asked for; that of the baseline where there is one. UsageError for a bar that has no sense."""
    return tuple(_judged(measured, figure_of(measured), bars, baseline))


def _judged(measured: Profile | Timing, figure: Figure, bars: Bars, baseline: Baseline | None) -> Iterator[Judged]:
    if bars.of_bound is not None:
        yield _of_bound(measured, figure, bars, bars.of_bound)
    if bars.step_time is not None:
        line = f"step_time: {figure}, and the bar is {seconds(bars.step_time)}"
        yield Judged(verdict=_verdict(figure, bars.step_time), line=line)
    if bars.peak_memory is not None:
        yield _peak_memory(_profile(measured, "peak_memory"), bars.peak_memory)
    if bars.no_finding_above is not None:
        yield _no_finding(_profile(measured, "no_finding_above"), bars.no_finding_above, bars)
    if baseline is not None and bars.within is not None:
        yield _baseline(figure, baseline, bars.within)


def _verdict(figure: Figure, longest: float) -> Verdict:
    return "met" if figure.seconds <= longest else "missed" if figure.low > longest else "unsure"


def _profile(measured: Profile | Timing, bar: str) -> Profile:
    if isinstance(measured, Timing):
        raise UsageError(f"{bar} is a bar for nearpeak_profile: nearpeak_bench takes times alone.")
    return measured


def _of_bound(measured: Profile | Timing, figure: Figure, bars: Bars, least: float) -> Judged:
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
        return Judged(verdict="unsure", line="of_bound: there is no bound for it on this machine")
    line = (
        f"of_bound: {percent(bound / figure.seconds)} of the {name} ({seconds(bound)} of {figure}), and the bar is "
        f"{percent(least)}"
    )
    return Judged(verdict=_verdict(figure, bound / least), line=line)


def _peak_memory(profile: Profile, most: float) -> Judged:
    if profile.memory is None:
        return Judged(verdict="unsure", line="peak_memory: it is not known of this step")
    peak = profile.memory.peak_bytes
    # GiB for what has some; a small step on a CPU has none
    text = gibibytes if max(peak, most) >= GIB else lambda value: quantity(value, "B")
    at = f" at {place(profile.memory.source)}" if profile.memory.source else ""
    line = f"peak_memory: {text(peak)} on {plain(profile.memory.device, 20)}{at}, and the bar is {text(most)}"
    return Judged(verdict="met" if peak <= most else "missed", line=line)


def _no_finding(profile: Profile, most: float, bars: Bars) -> Judged:
    found = [
        finding
        for finding in profile.findings
        if finding.share > most and not is_silenced(finding.rule, finding.source, bars.ignore)
    ]
    if not found:
        return Judged(verdict="met", line=f"no_finding_above: none saves more than {percent(most)}")
    worst = max(found, key=lambda finding: finding.share)
    count = f"{len(found)} findings save" if len(found) > 1 else "1 finding saves"
    line = f"no_finding_above: {count} more than {percent(most)}, the largest {_finding(worst)}"
    return Judged(verdict="missed", line=line)


def _baseline(figure: Figure, baseline: Baseline, within: float) -> Judged:
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
        return Judged(verdict="met", line=line)
    # Both were measured: only what lies beyond the intervals of both is a regression.
    return Judged(verdict="missed" if figure.low > baseline.high * (1 + within) else "unsure", line=line)


def failure(measured: Profile | Timing, judged: tuple[Judged, ...]) -> str:
    """What a failing test says: each bar that was missed, the top finding, and how far to trust it."""
    figure = figure_of(measured)
    missed = [f"  {each.line.rstrip('.')}." for each in judged if each.verdict == "missed"]
    lines = [f"{figure.name} misses {'a bar' if len(missed) == 1 else f'{len(missed)} bars'}:", *missed]
    if isinstance(measured, Profile):
        found = shown(measured)
        if found:
            lines += [f"Top finding: {_finding(found[0])}", *_remedy(found[0])]
        else:
            told = sentences(measured)
            lines += [f"No finding. {told['Why']}", told["Next"]]
        lines.append(f"Measured on {plain(measured.device, 60)}, {grade_text(figure)}.")
    else:
        lines.append(f"Measured on {plain(measured.environment.device, 60)}, {grade_text(figure)}.")
    return "\n".join(line for line in lines if line)


def grade_text(figure: Figure) -> str:
    """The grade with what keeps it from being an A."""
    doubts = f" ({'; '.join(figure.doubts)})" if figure.doubts else ""
    return f"grade {figure.grade}{doubts}"


def _finding(finding: Finding) -> str:
    where = place(finding.source) or place(finding.module) or "the step"
    saving = f"{seconds(finding.saving_s)}, {percent(finding.share)}"
    return f"{saving}: {plain(finding.rule, 40)} at {where}: {plain(finding.title)}"


def _remedy(finding: Finding) -> list[str]:
    lines = finding.remedy.strip("\n").splitlines()
    return (
        ["Instead:", *(f"    {' ' * (len(line) - len(line.lstrip()))}{plain(line)}" for line in lines)] if lines else []
    )
