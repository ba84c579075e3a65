"""A fixed model as a document: what was kept, what it saves against what was predicted, and what ran at each site."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nearpeak.fixes.record import AppliedFix, FixedSite, FixReport
from nearpeak.profiles.finding import common_module
from nearpeak.render.document import Block, Document, Fact, Facts, Items, Name, Paragraph, Table
from nearpeak.units import gibibytes, percent, seconds

LABEL = 9
MOST_SITES = 12
MOST_ITEMS = 5


def document(report: FixReport, *, full: bool = False) -> Document:
    """The report for a terminal; in full, as for a page, it has all sites, reasons and errors."""
    return Document(title=f"nearpeak fix: {verdict(report)}", parts=tuple(_parts(report, full)), is_titled=False)


def verdict(report: FixReport) -> str:
    """What became of the model, in one sentence."""
    speed = report.speed
    if speed is None:
        if not report.fixes:
            return f"nothing helps {report.model}: no fix applies to it. Nothing was changed."
        return f"nothing helps {report.model}: no fix was both right and faster. Nothing was changed."
    kind = "step" if report.trains else "call"
    times = f"{seconds(speed.before_s)} to {seconds(speed.after_s)} a {kind}"
    interval = f"{speed.ratio:.2f} x the time [{speed.low:.2f}, {speed.high:.2f}]"
    if speed.verdict != "FASTER":
        return f"{report.model}: {times}, {interval}: together the fixes were not seen to be faster."
    return f"{report.model} is faster: {times}, {interval}."


def _parts(report: FixReport, full: bool) -> Iterator[Block]:
    facts = [Fact(label="Verdict:", text=verdict(report), color="bold")]
    if report.errors:
        worst = max(report.errors, key=lambda each: each.fixed / max(each.allowed, 1e-300))
        checks = f"{len(report.errors)} checks of the whole model"
        facts.append(
            Fact(
                label="Proof:",
                text=f"{checks}; nearest to its limit: {worst.what}, error {worst.fixed:.1e} against "
                f"{worst.reference}, where the original has {worst.original:.1e} and {worst.allowed:.1e} is allowed.",
            )
        )
    speed = report.speed
    if speed is not None and speed.memory_before is not None and speed.memory_after is not None:
        facts.append(
            Fact(label="Memory:", text=f"peak {gibibytes(speed.memory_before)} to {gibibytes(speed.memory_after)}")
        )
    facts.append(Fact(label="Where:", text=f"{report.machine}, torch {report.torch}, batch {report.batch}"))
    yield Facts(facts=tuple(facts), width=LABEL)
    if report.fixes:
        yield _fixes(report)
        yield _sites(report.sites, len(report.sites) if full else MOST_SITES)
    saved = [each.speed.saved_s for each in report.kept() if each.speed is not None]
    if speed is not None and len(saved) > 1:
        yield Paragraph(
            text=f"One by one the fixes saved {seconds(sum(saved))}, together {seconds(max(speed.saved_s, 0.0))}.",
            kind="small",
        )
    reasons = [f"{each.id}: {each.why}" for each in report.fixes if each.why and each.status != "skipped"]
    notes = [*reasons, *report.notes]
    if full:
        if notes:
            yield Items(items=tuple(notes), marker="- ")
        yield _errors(report)
    elif notes:
        more = [f"and {len(notes) - MOST_ITEMS} more, in the JSON"] if len(notes) > MOST_ITEMS else []
        yield Items(items=(*notes[:MOST_ITEMS], *more), marker="- ", most_lines=3)


def _fixes(report: FixReport) -> Table:
    rows = []
    for each in report.fixes:
        sites = [site for site in report.sites if site.fix == each.id]
        times = (
            ("-", "-") if each.speed is None else (_signed(each.speed.saved_s), _signed(each.speed.saved_between_s[0]))
        )
        predicted = "-" if each.predicted_s is None else _signed(each.predicted_s)
        rows.append((Name(each.id), str(len(sites)), each.status, predicted, *times, _error(each)))
    return Table(
        headers=("fix", "sites", "", "predicted", "realized", "at least", "error"),
        rows=tuple(rows),
        align="lrlrrrr",
        note="saving per step; error: the largest one, as a share of what is allowed",
    )


def _signed(value: float) -> str:
    return seconds(value) if value >= 0 else f"-{seconds(-value)}"


def _error(each: AppliedFix) -> str:
    worst = each.worst
    if worst is None:
        return "-"
    return percent(worst.fixed / max(worst.allowed, 1e-300), 0) if worst.is_within else "wrong"


def _errors(report: FixReport) -> Table:
    """Every comparison: of each fix, and of the whole model with all that were kept."""
    groups = [(each.id, each.errors) for each in report.fixes] + [("together", report.errors)]
    return Table(
        title="Relative errors against the reference",
        headers=("fix", "what", "reference", "original", "fixed", "allowed"),
        rows=tuple(
            (name, each.what, each.reference, *(f"{x:.1e}" for x in (each.original, each.fixed, each.allowed)))
            for name, errors in groups
            for each in errors
        ),
        align="lllrrr",
    )


def _sites(sites: Sequence[FixedSite], most: int) -> Table:
    """Sites that differ in their path alone are one row."""
    groups: dict[tuple[str, str, str, str, tuple[str, ...]], list[FixedSite]] = {}
    for site in sites:
        groups.setdefault((site.fix, site.what, site.status, site.why, site.kernels), []).append(site)
    rows = []
    for (_, what, status, why, kernels), members in groups.items():
        count = f" x {len(members)}" if len(members) > 1 else ""
        ran = ", ".join(name.removeprefix("aten.").removesuffix(".default") for name in kernels)
        path = common_module([member.path for member in members]) or "the model"
        rows.append((Name(path, count), what, status, ran or (why if status == "skipped" else "")))
    note = f"and {len(rows) - most} kinds of sites more, in the JSON" if len(rows) > most else ""
    return Table(
        headers=("site", "what it computes", "", "what ran there after the fix"),
        rows=tuple(rows[:most]),
        align="llll",
        note=note,
        below=3,
    )
