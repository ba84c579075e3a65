"""A profile on one screen: at most 35 lines of 80 columns, for a terminal.

What was taken as a step, the verdict, the parts of the wall time, the findings that save most with their lines, what to
do next, and which command shows the rest. Options that ask for more of one section get that section whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from nearpeak.profiles.finding import Finding, saved_together
from nearpeak.profiles.grade import grade_profile
from nearpeak.profiles.profile import Profile
from nearpeak.profiles.waterfall import PartName
from nearpeak.render.document import Block, Document, Fact, Facts, Items, Paragraph, Section, Table
from nearpeak.render.text import WIDTH, elide_start, plain, text
from nearpeak.render.views.job import job_sections
from nearpeak.render.views.profile import (
    LABEL,
    ReportOptions,
    findings_sections,
    part_bars,
    ranking_section,
    select_findings,
)
from nearpeak.render.views.verdict import findings_by_library, group_name, next_finding, saving_text, sentences
from nearpeak.units import percent, seconds

MOST_LINES = 35
MOST_FINDINGS = 3
SMALL_SAVING = 0.03
"""Of the wall time. Less may be within the error of a prediction, and is listed only when it is asked for."""
SMALLEST_PART = 0.0005
"""Of the wall time. Smaller parts get no bar."""
_LINES: Mapping[str, int] = {"Step": 2, "Verdict": 4, "Why": 5, "Next": 5}
"""How many lines each sentence has at most; with bars, findings and the last two lines they make `MOST_LINES`."""
_DANGLING = re.compile(r"(;|[;,]? or)$")
"""The end of a line of a remedy that leads to the next line, which a screen leaves out."""
_MEANINGS: Mapping[PartName, str] = {
    "ideal": "cannot be avoided",
    "traffic": "memory traffic it needs",
    "fusion": "saved by fusing ops",
    "slow kernels": "slower than the hardware",
    "not modeled": "no bound is known",
    "communication": "between devices, alone",
    "idle": "nothing runs",
}


def screen(profile: Profile, options: ReportOptions | None = None) -> Document:
    """The report that a terminal shows without being asked for more."""
    options = options or ReportOptions()
    roomy = _document(profile, options, remedy_lines=2)
    return roomy if text(roomy).count("\n") < MOST_LINES else _document(profile, options, remedy_lines=1)


def _document(profile: Profile, options: ReportOptions, remedy_lines: int) -> Document:
    findings = select_findings(profile) if options.findings is None else options.findings
    return Document(
        title=f"Profile of {profile.source.rpartition('/')[2] or 'a step'} on {profile.device}",
        parts=tuple(_parts(profile, findings, options, remedy_lines)),
        is_titled=False,
    )


def _parts(profile: Profile, findings: Sequence[Finding], options: ReportOptions, remedy_lines: int) -> Iterator[Block]:
    said = {"Step": _step(profile), **sentences(profile, findings)}
    facts = tuple(
        Fact(label=f"{label}:", text=sentence, color="bold", most_lines=_LINES[label])
        for label, sentence in said.items()
    )
    yield Section(id="verdict", blocks=(Facts(facts=facts, width=LABEL),))
    yield Section(id="waterfall", blocks=(_bars(profile),))
    if profile.job is not None:
        yield from job_sections(profile.job, full=False)
    if "findings" in options.sections:
        yield from findings_sections(profile, findings, options.most_findings)
    elif (first := _first_findings(profile, findings, remedy_lines)).items:
        yield Section(id="findings", blocks=(first,))
    if "ops" in options.sections:
        yield from ranking_section(profile, options)
    yield Paragraph(text=_rest(findings, options))


def _step(profile: Profile) -> str:
    name = plain(profile.source.rpartition("/")[2] or "a callable", 30)
    what = f"{plain(profile.step, 100)}" if profile.step else "one step"
    timed = f"; {profile.steps} timed" if profile.steps else ""
    return f"{name}: {what}{timed}"


def _bars(profile: Profile) -> Table:
    rows, spans = part_bars(profile, _MEANINGS, "below zero", SMALLEST_PART)
    return Table(
        headers=("part", "time", "share", "meaning"),
        rows=(*rows, ("step", seconds(profile.wall_s), "100.0 %", "")),
        align="lrrl",
        spans=tuple(spans),
        beside=3,
        is_headed=False,
    )


_SHORTEST_PLACE = 16
"""Columns for the end of a source line."""


def _first_findings(profile: Profile, findings: Sequence[Finding], remedy_lines: int) -> Items:
    """For each what is saved and where, in one line, and what to write there; small ones are left to `--findings`."""
    trusted = grade_profile(profile).is_trusted
    first = next_finding(profile, findings)
    groups = findings_by_library(findings)
    shown = [group for group in groups if sum(map(profile.share_of, group)) >= SMALL_SAVING][:MOST_FINDINGS]
    if not shown:
        return Items(title="", items=())
    if first is not None and not any(first in group for group in shown):
        shown[-1] = next(group for group in groups if first in group)
    items = [
        line
        for number, group in enumerate(shown, 1)
        for line in (f"{number}.  {_what_and_where(group, trusted, WIDTH - 4)}", f"    {_remedy(group)}")
    ]
    title = "What would save most:" if trusted else "Findings:"
    if trusted and len(findings) > 1:
        saved_s = saved_together(findings)
        all_ = "both" if len(findings) == 2 else f"all {len(findings)}"
        title = f"What would save most ({all_} at once: {percent(saved_s / profile.long_run_s)}):"
    return Items(title=title, items=tuple(items), most_lines=remedy_lines)


def _what_and_where(group: Sequence[Finding], trusted: bool, room: int) -> str:
    """In one line of `room` columns, of which the number of the source line is the last to go."""
    first = group[0]
    saving = saving_text(group) + ": " if trusted else ""
    what = f"{saving}{group_name(group)}"
    if not (first.source or first.module):
        return plain(what, room)
    inside = f", in {plain(first.library.removeprefix('torch.'), 24)}" if first.library else ""
    for where in (f"{elide_start(first.where, 60)}{inside}", elide_start(first.where, 60), plain(first.source)):
        if where and len(what) + len(" at ") + len(where) <= room:
            return f"{what} at {where}"
    left = max(room - len(what) - len(" at "), _SHORTEST_PLACE)
    return f"{plain(what, room - left - len(' at '))} at {elide_start(first.source or first.module, left)}"


def _remedy(group: Sequence[Finding]) -> str:
    """The first line of the remedy that is neither a comment nor an import; with the next one, if it leads to that."""
    lines = [line.strip() for line in group[0].remedy.split("\n") if line.strip()]
    code = [line for line in lines if not line.startswith(("#", "import ", "from "))] or lines or [""]
    remedy = _DANGLING.sub("", " ".join(code[:2]) if code[0].endswith(":") else code[0])
    names = ", ".join(dict.fromkeys(plain(finding.rule, 40) for finding in group))
    return f"{remedy.partition('  #')[0]}  # {names}" if len(group) > 1 else remedy


def _rest(findings: Sequence[Finding], options: ReportOptions) -> str:
    """What shows what is not here."""
    if options.is_in_python:
        return 'report(full=True) has all tables; save("run.html") writes the page.'
    again = f"`{options.again} --full`" if options.again else "--full"
    page = f"`{options.again} --open`" if options.again else "--open"
    more = f"; --findings {len(findings)} explains the findings" if findings else ""
    return f"{again} prints all tables{more}; {page} shows the page."
