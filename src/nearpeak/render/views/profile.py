"""A profile as text: the verdict, the waterfall, idle time, findings, the ranking of ops, rates, memory and coverage."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from nearpeak.profiles.finding import MIN_SHOWN_SHARE, Finding, is_ignored
from nearpeak.profiles.grade import grade_profile
from nearpeak.profiles.memory import PeakMemory
from nearpeak.profiles.profile import Profile
from nearpeak.profiles.ranking import GroupBy, RankedOps, ranking
from nearpeak.profiles.rates import StepRates
from nearpeak.profiles.waterfall import PartName
from nearpeak.render.text import PLAIN, Color, Style, table
from nearpeak.render.views.timing import plain
from nearpeak.render.views.verdict import card, elide, elide_start, short_name, wrap_text
from nearpeak.units import GIB, gibibytes, percent, quantity, seconds, significant

MOST_FINDINGS = 5
INDENT = 4


def select_findings(
    profile: Profile, least_share: float = MIN_SHOWN_SHARE, ignore: Collection[str] = ()
) -> tuple[Finding, ...]:
    """Those that save enough and are not silenced, the largest first."""
    return tuple(
        finding
        for finding in profile.findings
        if finding.share >= least_share and not is_ignored(finding.rule, finding.source, ignore)
    )


def findings_text(profile: Profile, found: Sequence[Finding], most: int = MOST_FINDINGS, style: Style = PLAIN) -> str:
    """A numbered list; a line says how many more there are."""
    parts = [_finding_text(number, finding, style) for number, finding in enumerate(found[:most], 1)]
    if parts:
        parts.insert(0, style.paint("Findings, by what they would save:", "bold"))
    if len(found) > most:
        rest = sum(finding.saving_s for finding in found[most:])
        parts.append(f"and {len(found) - most} more, {seconds(rest)} together: --findings {len(found)} shows them.")
    if profile.undecided:
        names = ", ".join(plain(name, 40) for name in profile.undecided)
        parts.append(wrap_text(f"Not decidable from what is known of this step: {names}."))
    return "\n\n".join(parts)


def _finding_text(number: int, finding: Finding, style: Style) -> str:
    places = f", {finding.places} places" if finding.places > 1 else ""
    where = elide_start(finding.source) or elide_start(finding.module) or "the step"
    saving = f"{seconds(finding.saving_s)}, {percent(finding.share)}"
    head = f"{number}.  {saving}: {plain(finding.rule, 40)} at {where}{places}"
    module = f" In {elide_start(finding.module, 60)}." if finding.module and finding.source else ""
    body = f"{plain(finding.title)}{module} {plain(finding.evidence)} {plain(finding.reasoning)}"
    lines = [style.paint(head, "yellow"), wrap_text(" " * INDENT + " ".join(body.split()), INDENT)]
    remedy = [_code_line(line) for line in finding.remedy.strip("\n").splitlines()]
    if len(remedy) == 1:
        lines.append(wrap_text(f"{' ' * INDENT}Instead: {remedy[0].strip()}", INDENT))
    elif remedy:
        lines.append(" " * INDENT + "Instead:")
        lines += [f"{' ' * (INDENT + 4)}{line}".rstrip() for line in remedy]
    if finding.fix:
        lines.append(wrap_text(f"{' ' * INDENT}nearpeak has it: {plain(finding.fix.usage)}", INDENT))
    return "\n".join(lines)


def _code_line(line: str) -> str:
    """A line of code as printable ASCII, its indentation kept."""
    return " " * (len(line) - len(line.lstrip(" "))) + plain(line)


_UNITS = ((GIB, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def rates_text(rates: StepRates | None) -> str:
    """MFU and HFU with their convention, and what was achieved of the ceilings."""
    if rates is None:
        return ""
    lines = [_utilization(rates)] if rates.hardware_flops else []
    achieved = []
    if rates.hardware_flops:
        achieved.append(
            f"{quantity(rates.flops_per_s, 'FLOP/s')} of products"
            + _shares(rates.compute_share, rates.kernel_compute_share)
        )
    if rates.memory_bytes:
        achieved.append(
            f"at least {quantity(rates.bytes_per_s, 'B/s')} of memory traffic"
            + _shares(rates.bandwidth_share, rates.kernel_bandwidth_share)
        )
    if achieved:
        lines.append(f"Achieved: {', '.join(achieved)}.")
    return "\n".join(wrap_text(line) for line in lines)


def _utilization(rates: StepRates) -> str:
    if rates.mfu is None or rates.hfu is None:
        return "MFU and HFU are not known: the machine has no datasheet peak for these dtypes."
    convention = "of the dense datasheet peak (model and hardware FLOPs of products, convolutions and attention)"
    if not rates.recompute_known:
        return (
            f"MFU at most {percent(rates.mfu)}, HFU {percent(rates.hfu)} {convention}; a trace file does not tell "
            "which ops were computed again."
        )
    return f"MFU {percent(rates.mfu)}, HFU {percent(rates.hfu)} {convention}."


def _shares(wall: float | None, kernels: float | None) -> str:
    if wall is None:
        return ""
    while_kernels = "" if kernels is None else f", {percent(kernels)} while kernels ran"
    return f" ({percent(wall)} of the achievable{while_kernels})"


def memory_text(memory: PeakMemory | None) -> str:
    """How much of the memory is used at the peak, where that is, and by what."""
    if memory is None:
        return ""
    return "\n".join(
        [wrap_text(memory_head(memory)), "", table(["memory", "size", "share"], memory_rows(memory), "lrr")]
    )


def memory_head(memory: PeakMemory) -> str:
    """How much is used at the peak, and where that is."""
    where = ", ".join(plain(part, 40) for part in (memory.phase, memory.module, memory.source) if part)
    return f"Memory: {_peak_of_capacity(memory.peak_bytes, memory.capacity_bytes)} at the peak" + (
        f" ({where}):" if where else ":"
    )


def memory_rows(memory: PeakMemory) -> list[list[str]]:
    """Each category with its size and its share of the peak."""
    sizes = {
        "parameters": memory.parameters_bytes,
        "gradients": memory.gradients_bytes,
        "optimizer state": memory.optimizer_bytes,
        "activations": memory.activations_bytes,
        "used by no op": memory.other_bytes,
        "workspace, at most": memory.workspace_bytes,
        "reserved, unused": memory.unused_bytes,
    }
    return [
        [name, _binary_size(value), "" if name == "reserved, unused" else percent(value / memory.peak_bytes)]
        for name, value in sizes.items()
        if value is not None and memory.peak_bytes
    ]


def _peak_of_capacity(value: float, capacity: float | None) -> str:
    if capacity is None:
        return _binary_size(value)
    used = significant(value / GIB) if value >= GIB else _binary_size(value)
    return f"{used} of {gibibytes(capacity)}"


def _binary_size(value: float) -> str:
    for unit, name in _UNITS:
        if value >= unit:
            return f"{significant(value / unit)} {name}"
    return f"{value:.0f} B"


WIDTH = 80
BAR_COLUMNS = 40
NARROWEST_KEY = 16
MOST_CAUSES = 8
SMALLEST_CAUSE = 0.001
"""Of the wall time."""
_COLORS: Mapping[PartName, Color] = {
    "ideal": "green",
    "traffic": "cyan",
    "fusion": "blue",
    "slow kernels": "red",
    "not modeled": "magenta",
    "communication": "magenta",
    "idle": "yellow",
}
_GRADES: Mapping[str, Color] = {"A": "green", "B": "green", "C": "yellow", "F": "red"}


def text(
    profile: Profile,
    top: int = 12,
    by: GroupBy = "op",
    style: Style = PLAIN,
    *,
    findings: Sequence[Finding] | None = None,
    most_findings: int = MOST_FINDINGS,
) -> str:
    """The whole report, within 80 columns. `findings` are those to show; those that save enough where it is None."""
    found = select_findings(profile) if findings is None else findings
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
    parts += [wrap_text(plain(note)) for note in profile.notes]
    return "\n\n".join(part for part in parts if part)


def _waterfall(profile: Profile, style: Style) -> str:
    """Each bar begins where the one before it ended."""
    rows, bars = [], []
    reached = 0.0
    for part in profile.waterfall.parts:
        share = part.seconds / profile.wall_s if profile.wall_s else 0.0
        begin = round(BAR_COLUMNS * min(max(reached, 0.0), 1.0))
        bar = " " * begin + style.paint(style.bar(BAR_COLUMNS * min(share, 1.0)), _COLORS[part.name])
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
        where = f"{elide_start(cause.where, 32 - len(what))} {what}".strip()
        times = [seconds(cause.seconds), percent(cause.seconds / profile.wall_s)]
        rows.append([cause.cause, *times, str(cause.count or "-"), where])
    rest = profile.idle[len(shown) :]
    rest_s = sum(cause.seconds for cause in rest)
    if rest_s > least:
        count = str(sum(cause.count for cause in rest))
        rows.append(["other", seconds(rest_s), percent(rest_s / profile.wall_s), count, ""])
    return table(["idle because of", "time", "share", "times", "where"], rows, "lrrrl") if rows else ""


def _ranking(profile: Profile, top: int, by: GroupBy) -> str:
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


def _figures(rank: RankedOps, scale: float, digits: int) -> list[str]:
    def number(value: float | None) -> str:
        return "-" if value is None or not rank.modeled else f"{value / scale:.{digits}f}"

    return [
        str(rank.ops),
        f"{rank.measured_s / scale:.{digits}f}",
        number(rank.bound_s),
        number(rank.fused_s),
        number(rank.expected_s),
        number(rank.lost_s),
        plain(rank.limiter, 8) if rank.modeled else "-",
    ]


def _keys(ranks: Sequence[RankedOps], by: GroupBy, room: int) -> list[str]:
    """What each row is about, in at most `room` columns."""
    if by == "line":
        return [elide_start(rank.key, room) or "-" for rank in ranks]
    if by != "op":
        return [plain(rank.key, room) or "-" for rank in ranks]
    pairs = [rank.key.rsplit(" ", 1) for rank in ranks]
    short = [(_without_overload(name), phase) for name, phase in pairs]
    # overloads are named only where two of them are in the table
    names = [key[0] if short.count(key) == 1 else short_name(pair[0]) for key, pair in zip(short, pairs, strict=True)]
    return [_op_key(name, phase, room) for name, (_, phase) in zip(names, pairs, strict=True)]


def _without_overload(name: str) -> str:
    """An operator of torch without its overload; any other name as it is."""
    return short_name(name.rpartition(".")[0] if name.startswith("aten.") and name.count(".") == 2 else name)


def _op_key(name: str, phase: str, room: int) -> str:
    if "_backward" in name and phase == "backward":  # which need not be said twice
        return elide(name, room)
    phase = plain(phase, 12)
    return f"{elide(name, room - len(phase) - 1)} {phase}".rstrip()


def coverage_text(profile: Profile) -> str:
    """How much of the time has a bound, and what has none."""
    line = f"Modeled: {percent(profile.modeled_share)} of the {seconds(profile.kernel_s)} in which kernels ran."
    unknown: dict[str, float] = {}
    for op in profile.ops:
        if not op.modeled and op.measured_s:
            unknown[op.name] = unknown.get(op.name, 0.0) + op.measured_s
    if unknown:
        worst = sorted(unknown.items(), key=lambda item: -item[1])[:6]
        line += (
            " Without a bound: "
            + ", ".join(f"{elide(short_name(name), 40)} {seconds(time)}" for name, time in worst)
            + "."
        )
    return wrap_text(line)


def measurement_text(profile: Profile, style: Style = PLAIN) -> str:
    """The grade with its reasons, and the facts that it is made of."""
    grade = grade_profile(profile)
    reasons = f" ({'; '.join(grade.reasons)})" if grade.reasons else ""
    facts = "; ".join(_facts(profile))
    line = wrap_text(f"Grade: {grade.letter}{reasons}.{f' {facts}.' if facts else ''}")
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
