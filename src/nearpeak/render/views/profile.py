"""A profile as a document: verdict, waterfall, idle time, findings, the ranking of ops, rates, memory and coverage.

`OP_COLUMNS` is the one list of what is known of an op: columns of the CSV file, of the ranking and of the page's table.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from nearpeak.profiles.finding import MIN_SHOWN_SHARE, Finding, is_ignored, saved_together
from nearpeak.profiles.grade import broken_reason, grade_profile
from nearpeak.profiles.memory import PeakMemory
from nearpeak.profiles.profile import Profile, ProfiledOp
from nearpeak.profiles.ranking import GroupBy, RankedOps, ranking
from nearpeak.profiles.rates import StepRates
from nearpeak.profiles.waterfall import PART_MEANINGS, PartName
from nearpeak.render.csv import Value, rows_csv
from nearpeak.render.document import (
    Block,
    Cell,
    CodeBlock,
    Color,
    Details,
    Document,
    Fact,
    Facts,
    Items,
    Name,
    Paragraph,
    Section,
    Span,
    Table,
    Time,
)
from nearpeak.render.text import elide, elide_start, plain, short_name
from nearpeak.render.views.job import job_sections
from nearpeak.render.views.verdict import clock_sentence, sentences
from nearpeak.units import GIB, gibibytes, percent, quantity, seconds, significant

MOST_FINDINGS = 5
MOST_CAUSES = 8
MOST_RANKED = 12
MOST_ROWS = 100
SMALLEST_CAUSE = 0.001
"""Of the wall time."""
LABEL = 9
PART_COLORS: Mapping[PartName, Color] = {
    "ideal": "green",
    "traffic": "cyan",
    "fusion": "blue",
    "slow kernels": "red",
    "not modeled": "magenta",
    "communication": "magenta",
    "idle": "yellow",
}
_GRADE_COLORS: Mapping[str, Color] = {"A": "green", "B": "green", "C": "yellow", "F": "red"}
_UNITS = ((GIB, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportOptions:
    """What a report shows, where its format leaves a choice."""

    findings: Sequence[Finding] | None = None
    """The findings to show; None for those that save enough."""
    most_findings: int = MOST_FINDINGS
    most_causes: int = MOST_CAUSES
    top: int = MOST_RANKED
    by: GroupBy = "op"
    sections: frozenset[str] = frozenset()
    """The sections that one screen has whole: "findings", "ops"."""
    again: str = ""
    """The command that shows the profile again: "nearpeak report @last"."""
    is_in_python: bool = False
    """Whether the reader is in Python, where methods and not options of a command show more."""
    picture: Literal["ranks", "roofline", "waterfall"] | None = None
    """What an .svg shows; None for the ranks of a job, or else the waterfall."""
    dark: bool = False
    """A PNG for a dark page; all other formats follow the reader's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpColumn:
    """A column of the table of ops."""

    name: str
    """That of the field of `ProfiledOp`, and the header in CSV."""
    value: Callable[[ProfiledOp], Value]
    header: str = ""
    """In the ranking; "" for columns that it does not have."""
    ranked: Callable[[RankedOps], Cell] | None = None
    page: Literal["time", "amount"] | None = None
    """How the page's data has it, where equal ops share it."""


def _known(time: float | None) -> Cell:
    return "-" if time is None else Time(time)


OP_COLUMNS: tuple[OpColumn, ...] = (
    OpColumn(name="name", value=lambda op: op.name),
    OpColumn(name="family", value=lambda op: op.family),
    OpColumn(name="phase", value=lambda op: op.phase),
    OpColumn(name="module", value=lambda op: op.module),
    OpColumn(name="source", value=lambda op: op.source),
    OpColumn(name="shapes", value=lambda op: "; ".join("x".join(map(str, shape)) or "()" for shape in op.shapes)),
    OpColumn(name="kernels", value=lambda op: op.kernels),
    OpColumn(
        name="measured_s",
        value=lambda op: op.measured_s,
        header="measured",
        ranked=lambda rank: Time(rank.measured_s),
    ),
    OpColumn(name="typical_s", value=lambda op: op.typical_s),
    OpColumn(name="quickest_s", value=lambda op: op.quickest_s),
    OpColumn(name="slowest_s", value=lambda op: op.slowest_s),
    OpColumn(
        name="bound_s",
        value=lambda op: op.bound_s if op.modeled else None,
        header="written",
        ranked=lambda rank: _known(rank.bound_s if rank.modeled else None),
        page="time",
    ),
    OpColumn(
        name="fused_s",
        value=lambda op: op.fused_s if op.modeled else None,
        header="fused",
        ranked=lambda rank: _known(rank.fused_s if rank.modeled else None),
        page="time",
    ),
    OpColumn(
        name="expected_s",
        value=lambda op: op.expected_s,
        header="expected",
        ranked=lambda rank: _known(rank.expected_s if rank.modeled else None),
        page="time",
    ),
    OpColumn(
        name="lost_s",
        value=lambda op: op.lost_s if op.modeled else None,
        header="lost",
        ranked=lambda rank: _known(rank.lost_s if rank.modeled else None),
    ),
    OpColumn(name="launch_wait_s", value=lambda op: op.launch_wait_s),
    OpColumn(
        name="limiter",
        value=lambda op: op.limiter,
        header="limit",
        ranked=lambda rank: plain(rank.limiter, 8) if rank.modeled else "-",
    ),
    OpColumn(name="flops", value=lambda op: op.flops, page="amount"),
    OpColumn(name="bytes", value=lambda op: op.bytes, page="amount"),
    OpColumn(name="modeled", value=lambda op: op.modeled),
    OpColumn(name="origin", value=lambda op: op.origin),
)


def ops_csv(profile: Profile) -> str:
    """All ops as CSV, in the order in which they ran; times are in seconds."""
    rows = ([number, *(column.value(op) for column in OP_COLUMNS)] for number, op in enumerate(profile.ops))
    return rows_csv(["op", *(column.name for column in OP_COLUMNS)], rows)


def select_findings(
    profile: Profile, least_share: float = MIN_SHOWN_SHARE, ignore: Collection[str] = ()
) -> tuple[Finding, ...]:
    """The findings that save enough and are not ignored, the largest first."""
    return tuple(
        finding
        for finding in profile.findings
        if profile.share_of(finding) >= least_share and not is_ignored(finding.rule, finding.source, ignore)
    )


def document(profile: Profile, options: ReportOptions | None = None) -> Document:
    """The whole report."""
    options = options or ReportOptions()
    findings = select_findings(profile) if options.findings is None else options.findings
    return Document(
        title=f"Profile of {profile.source.rpartition('/')[2] or 'a step'} on {profile.device}",
        facts=(f"nearpeak; bounds against {profile.machine} ({profile.how}); {profile.date}",),
        parts=tuple(_parts(profile, findings, options)),
        is_titled=False,
        is_comment=True,
    )


def _parts(profile: Profile, findings: Sequence[Finding], options: ReportOptions) -> Iterator[Block]:
    verdict = tuple(
        Fact(label=f"{label}:", text=sentence, color="bold") for label, sentence in sentences(profile, findings).items()
    )
    yield Section(id="verdict", blocks=(Facts(facts=verdict, width=LABEL),))
    yield Section(id="waterfall", blocks=(_waterfall(profile),))
    if profile.job is not None:
        yield from job_sections(profile.job, full=True)
    idle = _idle(profile, options.most_causes)
    if idle.rows:
        yield Section(id="idle", title="Idle time", blocks=(idle,), is_folded=True)
    yield from findings_sections(profile, findings, options.most_findings)
    yield from ranking_section(profile, options)
    rates = tuple(_rates(profile.rates)) if profile.rates is not None else ()
    if rates:
        yield Section(id="rates", title="Rates", blocks=(Items(items=rates, hanging=0),), is_folded=True)
    if profile.memory is not None:
        yield Section(id="memory", title="Memory", blocks=tuple(_memory(profile.memory)), is_folded=True)
    yield Section(id="measurement", title="Measurement", blocks=tuple(_measurement(profile)), is_folded=True)


def part_bars(
    profile: Profile, meanings: Mapping[PartName, str], broken_text: str, least_share: float = 0.0
) -> tuple[list[tuple[str, ...]], list[Span]]:
    """A row and a bar for each part that is large enough; each bar begins where the one before it ended.

    `broken_text` is for parts below zero.
    """
    rows: list[tuple[str, ...]] = []
    spans: list[Span] = []
    reached = 0.0
    for part in profile.waterfall.parts:
        share = part.seconds / profile.wall_s if profile.wall_s else 0.0
        if abs(share) >= least_share:
            wrong = broken_text if part in profile.waterfall.broken else ""
            rows.append((part.name, seconds(part.seconds), percent(share), meanings[part.name]))
            spans.append(Span(begin=reached, length=share, kind=part.name, color=PART_COLORS[part.name], text=wrong))
        reached += share
    return rows, spans


def _waterfall(profile: Profile) -> Table:
    rows, spans = part_bars(profile, PART_MEANINGS, f"below zero: {broken_reason(profile)}")
    return Table(
        headers=("part", "time", "share", "meaning"),
        rows=(*rows, ("wall", seconds(profile.wall_s), "100.0 %", "")),
        align="lrrl",
        spans=tuple(spans),
        totals=1,
        wide=(3,),
    )


def _idle(profile: Profile, most: int) -> Table:
    """Why nothing ran. Causes that are too small to see in the waterfall get no row."""
    least = SMALLEST_CAUSE * profile.wall_s
    causes = [cause for cause in profile.idle[:most] if cause.seconds > least]
    rows: list[tuple[Cell, ...]] = [
        (
            cause.cause,
            seconds(cause.seconds),
            percent(cause.seconds / profile.wall_s),
            f"{cause.count:,}" if cause.count else "-",
            Name(cause.where, plain(cause.what, 23), "start"),
        )
        for cause in causes
    ]
    rest = profile.idle[len(causes) :]
    rest_s = sum(cause.seconds for cause in rest)
    if rest_s > least:
        times = f"{sum(cause.count for cause in rest):,}"
        rows.append(("other", seconds(rest_s), percent(rest_s / profile.wall_s), times, ""))
    return Table(headers=("idle because of", "time", "share", "times", "where"), rows=tuple(rows), align="lrrrl")


def findings_sections(profile: Profile, findings: Sequence[Finding], most: int) -> Iterator[Section]:
    """The findings with their evidence and remedies, and the rules that could not be decided."""
    trusted = grade_profile(profile).is_trusted
    blocks: list[Block] = [
        _finding(number, finding, with_saving=trusted) for number, finding in enumerate(findings[:most], 1)
    ]
    if len(findings) > most:
        blocks.append(Paragraph(text=f"And {len(findings) - most} more: --findings {len(findings)} shows them."))
    if trusted and (together := together_sentence(profile, findings)):
        blocks.append(Paragraph(text=together))
    yield Section(
        id="findings",
        title="Findings, by what they would save" if trusted else "Findings",
        blocks=tuple(blocks),
        is_titled=bool(findings[:most]),
        empty="No finding saves enough to be shown.",
    )
    if profile.undecided:
        names = ", ".join(plain(name, 40) for name in profile.undecided)
        line = Paragraph(text=f"Not decidable from what is known of this step: {names}.", kind="small")
        yield Section(id="undecided", blocks=(line,))


def together_sentence(profile: Profile, findings: Sequence[Finding]) -> str:
    """What all findings save at once; "" for one alone."""
    if len(findings) < 2:
        return ""
    saved_s = saved_together(findings)
    return (
        f"Each saving is that of one change alone. All {len(findings)} together save {seconds(saved_s)}, "
        f"{percent(saved_s / profile.long_run_s)} of the step."
    )


def _finding(number: int, finding: Finding, *, with_saving: bool) -> Details:
    places = f", {finding.places} places" if finding.places > 1 else ""
    where = elide_start(finding.where, 60)
    if finding.library:
        where += f" (in {plain(' '.join((finding.library, finding.inside)).strip(), 60)})"
    saving = f"{finding.saving_text}: " if with_saving else ""
    return Details(
        summary=f"{number}.  {saving}{plain(finding.rule, 40)} at {where}{places}",
        blocks=tuple(finding_blocks(finding)),
    )


def finding_blocks(finding: Finding) -> Iterator[Block]:
    """What is wasted, why, and what to write instead."""
    module = f" In {elide_start(finding.module, 60)}." if finding.module and finding.source else ""
    yield Paragraph(text=f"{finding.title}{module}")
    yield Paragraph(text=f"{finding.evidence} {finding.reasoning}".strip())
    remedy = finding.remedy.strip("\n")
    if remedy and "\n" not in remedy:
        yield Paragraph(text=f"Instead: {remedy.strip()}", kind="advice")
    elif remedy:
        yield Paragraph(text="Instead:", kind="advice")
        yield CodeBlock(text=remedy, language="python")
    if finding.fix:
        yield Paragraph(text=f"nearpeak has it: {finding.fix.usage}", kind="advice")


def ranking_section(profile: Profile, options: ReportOptions) -> Iterator[Section]:
    """The ranking, where there is one."""
    ranked = _ranking(profile, min(options.top, MOST_ROWS), options.by)
    if ranked.rows:
        yield Section(id="ops", title=f"Where most is lost, by {options.by}", blocks=(ranked,), is_folded=True)


def _ranking(profile: Profile, top: int, by: GroupBy) -> Table:
    """Measured, as written, fused and expected times beside each other."""
    ranks = [rank for rank in ranking(profile, by) if rank.measured_s > 0][:top]
    columns = [column for column in OP_COLUMNS if column.ranked is not None]
    rows = tuple(
        (name, str(rank.ops), *(column.ranked(rank) for column in columns if column.ranked is not None))
        for name, rank in zip(_rank_names(ranks, by), ranks, strict=True)
    )
    align = "lr" + "".join("l" if column.name == "limiter" else "r" for column in columns)
    return Table(headers=(by, "ops", *(column.header for column in columns)), rows=rows, align=align)


def _rank_names(ranks: Sequence[RankedOps], by: GroupBy) -> list[Cell]:
    """What each row is about."""
    if by != "op":
        return [Name(rank.key, "", "start" if by == "line" else "end") if rank.key else "-" for rank in ranks]
    pairs = [rank.key.rsplit(" ", 1) for rank in ranks]
    packets = [(_without_overload(name), phase) for name, phase in pairs]
    # overloads are named only where two of them are in the table
    names = [
        packet[0] if packets.count(packet) == 1 else short_name(pair[0])
        for packet, pair in zip(packets, pairs, strict=True)
    ]
    return [
        Name(name, "" if "_backward" in name and phase == "backward" else plain(phase, 12))
        for name, (_, phase) in zip(names, pairs, strict=True)
    ]


def _without_overload(name: str) -> str:
    """An operator of torch without its overload; any other name as it is."""
    return short_name(name.rpartition(".")[0] if name.startswith("aten.") and name.count(".") == 2 else name)


def _rates(rates: StepRates) -> Iterator[str]:
    """MFU and HFU with their convention, and what was achieved of the ceilings."""
    achieved = []
    if rates.hardware_flops:
        yield _utilization(rates)
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
        yield f"Achieved: {', '.join(achieved)}."


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


def _memory(memory: PeakMemory) -> Iterator[Block]:
    """How much of the memory is used at the peak, where that is, and by what."""
    where = ", ".join(plain(part, 40) for part in (memory.phase, memory.module, memory.source) if part)
    peak = _peak_of_capacity(memory.peak_bytes, memory.capacity_bytes)
    yield Paragraph(text=f"Memory: {peak} at the peak{f' ({where})' if where else ''}:")
    sizes = {
        "parameters": memory.parameters_bytes,
        "gradients": memory.gradients_bytes,
        "optimizer state": memory.optimizer_bytes,
        "activations": memory.activations_bytes,
        "used by no op": memory.other_bytes,
        "workspace, at most": memory.workspace_bytes,
        "reserved, unused": memory.unused_bytes,
    }
    rows = tuple(
        (name, _binary_size(value), "" if name == "reserved, unused" else percent(value / memory.peak_bytes))
        for name, value in sizes.items()
        if value is not None and memory.peak_bytes
    )
    yield Table(headers=("memory", "size", "share"), rows=rows, align="lrr")


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


def _measurement(profile: Profile) -> Iterator[Block]:
    """How much of the time has a bound, the grade with its reasons, and the notes."""
    yield Paragraph(text=_coverage(profile))
    grade = grade_profile(profile)
    reasons = f" ({'; '.join(grade.reasons)})" if grade.reasons else ""
    facts = "; ".join(_measurement_facts(profile))
    yield Paragraph(
        text=f"Grade: {grade.letter}{reasons}.{f' {facts}.' if facts else ''}",
        accent=(grade.letter, _GRADE_COLORS[grade.letter]),
    )
    if clock := clock_sentence(profile):
        yield Paragraph(text=clock)
    if profile.notes:
        yield Items(items=profile.notes, hanging=0, spaced=True)


def _coverage(profile: Profile) -> str:
    line = f"Modeled: {percent(profile.modeled_share)} of the {seconds(profile.kernel_s)} in which kernels ran."
    unknown: dict[str, float] = {}
    for op in profile.ops:
        if not op.modeled and op.measured_s:
            unknown[op.name] = unknown.get(op.name, 0.0) + op.measured_s
    if unknown:
        worst = sorted(unknown.items(), key=lambda item: -item[1])[:6]
        names = ", ".join(f"{elide(short_name(name), 40)} {seconds(time)}" for name, time in worst)
        line += f" Without a bound: {names}."
    return line


def _measurement_facts(profile: Profile) -> Iterator[str]:
    if profile.steps and profile.spread is not None:
        yield (
            f"{profile.steps} clean steps, the slowest and the fastest {percent(profile.spread)} apart"
            if profile.steps > 1
            else "1 clean step"
        )
    if profile.profiled_s is not None:
        yield f"under the profiler a step took {seconds(profile.profiled_s)}"
    if profile.matched is not None:
        yield f"{percent(profile.matched)} of its ops were found again in the trace"
    recorded = profile.completeness
    if recorded is not None and recorded.markers and not recorded.losses:
        yield (
            f"the recording has lost nothing: the {recorded.launches:,} launches of the step have their kernels, and "
            f"all {recorded.markers:,} marker kernels are there"
        )
