"""A profile as text: a card with the verdict, the waterfall as bars, the ranking, and what is not known."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from nearpeak.diagnose.finding import Finding
from nearpeak.diagnose.grade import grade_of
from nearpeak.diagnose.profile import Profile
from nearpeak.diagnose.ranking import By, Rank, ranking
from nearpeak.diagnose.waterfall import PartName
from nearpeak.render.profile_card import card, filled, place, short_name, shortened
from nearpeak.render.profile_findings import MOST, findings_text, shown
from nearpeak.render.profile_rates import memory_text, rates_text
from nearpeak.render.style import PLAIN, Colour, Style
from nearpeak.render.table import table
from nearpeak.render.timing import plain
from nearpeak.units import percent, seconds

WIDTH = 80
BAR = 40
NARROWEST_KEY = 16
MOST_CAUSES = 8
SMALLEST_CAUSE = 0.001
"""Of the wall time."""
_COLOURS: Mapping[PartName, Colour] = {
    "ideal": "green",
    "traffic": "cyan",
    "fusion": "blue",
    "slow kernels": "red",
    "not modelled": "magenta",
    "communication": "magenta",
    "idle": "yellow",
}
_GRADES: Mapping[str, Colour] = {"A": "green", "B": "green", "C": "yellow", "F": "red"}


def text(
    profile: Profile,
    top: int = 12,
    by: By = "op",
    style: Style = PLAIN,
    *,
    findings: Sequence[Finding] | None = None,
    most_findings: int = MOST,
) -> str:
    """The whole report, within 80 columns. `findings` are those to show; those that save enough where it is None."""
    found = shown(profile) if findings is None else findings
    parts = [
        card(profile, style, found),
        _waterfall(profile, style),
        _idle(profile),
        findings_text(profile, found, most_findings, style),
        _ranking(profile, top, by),
        rates_text(profile.rates),
        memory_text(profile.memory),
        coverage_text(profile),
        measurement_text(profile, style),
    ]
    parts += [filled(plain(note)) for note in profile.notes]
    return "\n\n".join(part for part in parts if part)


def _waterfall(profile: Profile, style: Style) -> str:
    """Each bar begins where the one before it ended."""
    rows, bars = [], []
    reached = 0.0
    for part in profile.waterfall.parts:
        share = part.seconds / profile.wall_s if profile.wall_s else 0.0
        begin = round(BAR * min(max(reached, 0.0), 1.0))
        bar = " " * begin + style.paint(style.bar(BAR * min(share, 1.0)), _COLOURS[part.name])
        if part in profile.waterfall.broken:
            bar = style.paint("(below zero: a bound of nearpeak's is wrong)", "red")
        rows.append([part.name, seconds(part.seconds), percent(share)])
        bars.append(bar)
        reached += share
    rows.append(["wall", seconds(profile.wall_s), "100.0 %"])
    lines = table(["part", "time", "share"], rows).splitlines()
    return "\n".join(f"{line}  {bar}".rstrip() for line, bar in zip(lines, ["", "", *bars, ""], strict=True))


def _idle(profile: Profile) -> str:
    """Why nothing ran. What is too little to see in the waterfall gets no row."""
    least = SMALLEST_CAUSE * profile.wall_s
    shown = [cause for cause in profile.idle[:MOST_CAUSES] if cause.seconds > least]
    rows = []
    for cause in shown:
        what = plain(cause.what, 23)
        where = f"{place(cause.where, 32 - len(what))} {what}".strip()
        times = [seconds(cause.seconds), percent(cause.seconds / profile.wall_s)]
        rows.append([cause.cause, *times, str(cause.count or "-"), where])
    rest = profile.idle[len(shown) :]
    rest_s = sum(cause.seconds for cause in rest)
    if rest_s > least:
        count = str(sum(cause.count for cause in rest))
        rows.append(["other", seconds(rest_s), percent(rest_s / profile.wall_s), count, ""])
    return table(["idle because of", "time", "share", "times", "where"], rows, "lrrrl") if rows else ""


def _ranking(profile: Profile, top: int, by: By) -> str:
    """Measured, as written, fused and expected beside each other, in one unit so that they can be compared."""
    ranks = [rank for rank in ranking(profile, by) if rank.measured_s > 0][:top]
    if not ranks:
        return ""
    scale, unit, digits = _unit(max(rank.measured_s for rank in ranks))
    headers = ["ops", "measured", "written", "fused", "expected", "lost", "limit"]
    rows = [_figures(rank, scale, digits) for rank in ranks]
    taken = sum(2 + max(map(len, column)) for column in zip(headers, *rows, strict=True))
    room = max(NARROWEST_KEY, WIDTH - taken)
    keys = _keys(ranks, by, room)
    return table([f"{by}, in {unit}", *headers], [[key, *row] for key, row in zip(keys, rows, strict=True)], "lrrrrrrl")


def _unit(largest: float) -> tuple[float, str, int]:
    """Seconds in a unit, its name, and how many decimals give the largest time three digits or more."""
    exponent = min(0, max(-9, 3 * math.floor(math.log10(largest) / 3)))
    scale = 10.0**exponent
    return scale, {0: "s", -3: "ms", -6: "us", -9: "ns"}[exponent], 1 if largest >= 100 * scale else 2


def _figures(rank: Rank, scale: float, digits: int) -> list[str]:
    def number(value: float | None) -> str:
        return "-" if value is None or not rank.modelled else f"{value / scale:.{digits}f}"

    return [
        str(rank.ops),
        f"{rank.measured_s / scale:.{digits}f}",
        number(rank.bound_s),
        number(rank.fused_s),
        number(rank.expected_s),
        number(rank.lost_s),
        plain(rank.limiter, 8) if rank.modelled else "-",
    ]


def _keys(ranks: Sequence[Rank], by: By, room: int) -> list[str]:
    """What each row is about, in at most `room` columns."""
    if by == "line":
        return [place(rank.key, room) or "-" for rank in ranks]
    if by != "op":
        return [plain(rank.key, room) or "-" for rank in ranks]
    pairs = [rank.key.rsplit(" ", 1) for rank in ranks]
    short = [(_packet(name), phase) for name, phase in pairs]
    # overloads are named only where two of them are in the table
    names = [key[0] if short.count(key) == 1 else short_name(pair[0]) for key, pair in zip(short, pairs, strict=True)]
    return [_op_key(name, phase, room) for name, (_, phase) in zip(names, pairs, strict=True)]


def _packet(name: str) -> str:
    """An operator of torch without its overload; any other name as it is."""
    return short_name(name.rpartition(".")[0] if name.startswith("aten.") and name.count(".") == 2 else name)


def _op_key(name: str, phase: str, room: int) -> str:
    if "_backward" in name and phase == "backward":  # which need not be said twice
        return shortened(name, room)
    phase = plain(phase, 12)
    return f"{shortened(name, room - len(phase) - 1)} {phase}".rstrip()


def coverage_text(profile: Profile) -> str:
    """How much of the time has a bound, and what has none."""
    line = f"Modelled: {percent(profile.modelled_share)} of the {seconds(profile.kernel_s)} in which kernels ran."
    unknown: dict[str, float] = {}
    for op in profile.ops:
        if not op.modelled and op.measured_s:
            unknown[op.name] = unknown.get(op.name, 0.0) + op.measured_s
    if unknown:
        worst = sorted(unknown.items(), key=lambda item: -item[1])[:6]
        line += (
            " Without a bound: "
            + ", ".join(f"{shortened(short_name(name), 40)} {seconds(time)}" for name, time in worst)
            + "."
        )
    return filled(line)


def measurement_text(profile: Profile, style: Style = PLAIN) -> str:
    """The grade with its reasons, and the facts that it is made of."""
    grade = grade_of(profile)
    reasons = f" ({'; '.join(grade.reasons)})" if grade.reasons else ""
    facts = "; ".join(_facts(profile))
    line = filled(f"Grade: {grade.letter}{reasons}.{f' {facts}.' if facts else ''}")
    return line.replace(f"Grade: {grade.letter}", f"Grade: {style.paint(grade.letter, _GRADES[grade.letter])}", 1)


def _facts(profile: Profile) -> Sequence[str]:
    facts = []
    if profile.steps and profile.spread is not None:
        facts.append(
            f"{profile.steps} clean steps, the slowest and the fastest {percent(profile.spread)} apart"
            if profile.steps > 1
            else "1 clean step"
        )
    if profile.profiled_s is not None:
        facts.append(f"under the profiler a step took {seconds(profile.profiled_s)}")
    if profile.matched is not None:
        facts.append(f"{percent(profile.matched)} of its ops were found again in the trace")
    return facts
