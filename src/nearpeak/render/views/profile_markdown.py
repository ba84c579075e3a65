"""A profile as Markdown, for a pull request or an issue: the verdict, the waterfall, the findings, and details to open.

It stays below the 65,536 characters that GitHub takes for a comment.
"""

from __future__ import annotations

from collections.abc import Sequence

from nearpeak.profiles.finding import Finding
from nearpeak.profiles.profile import Profile
from nearpeak.profiles.ranking import GroupBy, RankedOps, ranking
from nearpeak.profiles.waterfall import PART_MEANINGS
from nearpeak.render.markdown import code, code_block, details, escape_summary, escape_text, table
from nearpeak.render.views.profile import (
    MOST_FINDINGS,
    coverage_text,
    measurement_text,
    memory_head,
    memory_rows,
    rates_text,
)
from nearpeak.render.views.timing import plain
from nearpeak.render.views.verdict import elide_start, sentences, short_name
from nearpeak.units import percent, seconds

LARGEST = 65_000
BAR = 20
"""Characters of a bar for the whole step."""
MOST_CAUSES = 8
MOST_NOTES = 12
LONGEST_REMEDY = 1500
MOST_ROWS = 100


def markdown(
    profile: Profile,
    findings: Sequence[Finding],
    *,
    top: int = 12,
    by: GroupBy = "op",
    most_findings: int = MOST_FINDINGS,
) -> str:
    """The whole text. `findings` are those to show."""
    name = profile.source.rpartition("/")[2]
    parts = [
        f"### nearpeak: {code(name, 60)} on {escape_text(profile.device, 60)}",
        _card(profile, findings),
        _waterfall(profile),
        _findings(profile, findings, most_findings),
        _ranks(profile, top, by),
        _idle(profile),
        _memory(profile),
        _measurement(profile),
    ]
    return _fitting([part for part in parts if part])


def _fitting(parts: list[str]) -> str:
    """As many parts, from the first on, as a comment can hold."""
    whole = "\n\n".join(parts)
    while len(whole) > LARGEST and len(parts) > 1:
        del parts[-1]
        whole = "\n\n".join([*parts, "More does not fit into a comment."])
    return whole + "\n"


def _card(profile: Profile, findings: Sequence[Finding]) -> str:
    return "\n".join(f"- **{name}:** {escape_text(line)}" for name, line in sentences(profile, findings).items())


def _waterfall(profile: Profile) -> str:
    rows, reached = [], 0.0
    for part in profile.waterfall.parts:
        share = part.seconds / profile.wall_s if profile.wall_s else 0.0
        meaning = PART_MEANINGS[part.name]
        if part in profile.waterfall.broken:
            meaning = "below zero: a bound of nearpeak's is wrong"
        rows.append([part.name, seconds(part.seconds), percent(share), _bar(reached, share), meaning])
        reached += share
    rows.append(["**wall**", f"**{seconds(profile.wall_s)}**", percent(1.0), "", ""])
    return table(["part", "time", "share", "", "what it is"], rows, "lrrll")


def _bar(begin: float, share: float) -> str:
    """Where in the step a part lies. What is more than nothing has one block."""
    if share <= 0.0:
        return ""
    start = min(round(BAR * min(max(begin, 0.0), 1.0)), BAR - 1)
    length = max(1, min(round(BAR * (begin + share)), BAR) - start)
    return f"`{'░' * start}{'█' * length}{'░' * (BAR - start - length)}`"


def _findings(profile: Profile, findings: Sequence[Finding], most: int) -> str:
    parts = [f"#### Findings, by what they would save ({len(findings)})"] if findings else []
    parts += [_finding(number, finding) for number, finding in enumerate(findings[:most], 1)]
    rest = findings[most:]
    if rest:
        saving = seconds(sum(finding.saving_s for finding in rest))
        parts.append(f"And {len(rest)} more, {saving} together.")
    if profile.undecided:
        names = ", ".join(code(name, 40) for name in profile.undecided[:20])
        parts.append(f"Not decidable from what is known of this step: {names}.")
    return "\n\n".join(parts)


def _finding(number: int, finding: Finding) -> str:
    where = escape_summary(elide_start(finding.source or finding.module, 60)) or "the step"
    places = f", {finding.places:,} places" if finding.places > 1 else ""
    saving = f"<b>{seconds(finding.saving_s)}</b> ({percent(finding.share)})"
    summary = f"{number}. {saving}: {escape_summary(finding.rule, 40)} at <code>{where}</code>{places}"
    return details(
        summary,
        escape_text(finding.title),
        f"In {code(finding.module)}." if finding.module and finding.source else "",
        escape_text(f"{finding.evidence} {finding.reasoning}"),
        _remedy(finding.remedy.strip()),
        f"nearpeak has it: {escape_text(finding.fix.usage)}" if finding.fix else "",
    )


def _remedy(remedy: str) -> str:
    """Code as code; what is one sentence as that."""
    if "\n" not in remedy and remedy.endswith("."):
        return f"Instead: {escape_text(remedy)}"
    return "Instead:\n\n" + code_block(remedy[:LONGEST_REMEDY], "python") if remedy else ""


def _ranks(profile: Profile, top: int, by: GroupBy) -> str:
    ranks = [rank for rank in ranking(profile, by) if rank.measured_s > 0][: min(top, MOST_ROWS)]
    if not ranks:
        return ""
    headers = [by, "ops", "measured", "as written", "fused", "expected", "lost", "limit"]
    rows = [[_key(rank, by), f"{rank.ops:,}", seconds(rank.measured_s), *_figures(rank)] for rank in ranks]
    return details(f"Where most is lost, by {by}", table(headers, rows, "lrrrrrrl"))


def _key(rank: RankedOps, by: GroupBy) -> str:
    if by != "op":
        return code(rank.key)
    name, _, phase = rank.key.rpartition(" ")
    return f"{code(short_name(name), 60)} {escape_text(phase, 12)}"


def _figures(rank: RankedOps) -> list[str]:
    if not rank.modeled:
        return ["-"] * 5
    times = (rank.bound_s, rank.fused_s, rank.expected_s, rank.lost_s)
    return [*map(seconds, times), escape_text(rank.limiter, 20)]


def _idle(profile: Profile) -> str:
    if not profile.idle:
        return ""
    rows = []
    for cause in profile.idle[:MOST_CAUSES]:
        share = percent(cause.seconds / profile.wall_s if profile.wall_s else 0.0)
        where = " ".join(code(each, 60) for each in (cause.where, cause.what) if each)
        rows.append([cause.cause, seconds(cause.seconds), share, f"{cause.count:,}" if cause.count else "-", where])
    rest = sum(cause.seconds for cause in profile.idle[MOST_CAUSES:])
    more = f"And {seconds(rest)} of {len(profile.idle) - MOST_CAUSES} other causes." if rest > 0.0 else ""
    return details("Why nothing ran", table(["because of", "time", "share", "times", "where"], rows, "lrrrl"), more)


def _memory(profile: Profile) -> str:
    if profile.memory is None:
        return ""
    head = escape_summary(memory_head(profile.memory).rstrip(":"))
    return details(head, table(["category", "size", "share"], memory_rows(profile.memory), "lrr"))


def _measurement(profile: Profile) -> str:
    said = [measurement_text(profile), coverage_text(profile), rates_text(profile.rates)]
    facts = [
        f"Bounds against {code(profile.machine, 60)} ({escape_text(profile.how, 20)}); {escape_text(profile.date, 40)}.",
        *(escape_text(" ".join(line.split())) for line in said if line),
        *(escape_text(plain(note)) for note in profile.notes[:MOST_NOTES]),
    ]
    return details("The measurement", "\n".join(f"- {fact}" for fact in facts))
