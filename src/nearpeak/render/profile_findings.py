"""The findings of a profile as text: what is wasted, where, what it costs, and what to write instead."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from nearpeak.diagnose.finding import LEAST_SHARE, Finding, is_silenced
from nearpeak.diagnose.profile import Profile
from nearpeak.render.profile_card import filled, place
from nearpeak.render.style import PLAIN, Style
from nearpeak.render.timing import plain
from nearpeak.units import percent, seconds

MOST = 5
INDENT = 4


def shown(profile: Profile, least_share: float = LEAST_SHARE, ignore: Collection[str] = ()) -> tuple[Finding, ...]:
    """Those that save enough and are not silenced, the largest first."""
    return tuple(
        finding
        for finding in profile.findings
        if finding.share >= least_share and not is_silenced(finding.rule, finding.source, ignore)
    )


def findings_text(profile: Profile, found: Sequence[Finding], most: int = MOST, style: Style = PLAIN) -> str:
    """A numbered list; a line says how many more there are."""
    parts = [_one(number, finding, style) for number, finding in enumerate(found[:most], 1)]
    if parts:
        parts.insert(0, style.paint("Findings, by what they would save:", "bold"))
    if len(found) > most:
        rest = sum(finding.saving_s for finding in found[most:])
        parts.append(f"and {len(found) - most} more, {seconds(rest)} together: --findings {len(found)} shows them.")
    if profile.undecided:
        names = ", ".join(plain(name, 40) for name in profile.undecided)
        parts.append(filled(f"Not decidable from what is known of this step: {names}."))
    return "\n\n".join(parts)


def _one(number: int, finding: Finding, style: Style) -> str:
    places = f", {finding.places} places" if finding.places > 1 else ""
    where = place(finding.source) or place(finding.module) or "the step"
    saving = f"{seconds(finding.saving_s)}, {percent(finding.share)}"
    head = f"{number}.  {saving}: {plain(finding.rule, 40)} at {where}{places}"
    module = f" In {place(finding.module, 60)}." if finding.module and finding.source else ""
    body = f"{plain(finding.title)}{module} {plain(finding.evidence)} {plain(finding.reasoning)}"
    lines = [style.paint(head, "yellow"), filled(" " * INDENT + " ".join(body.split()), INDENT)]
    remedy = [_code(line) for line in finding.remedy.strip("\n").splitlines()]
    if len(remedy) == 1:
        lines.append(filled(f"{' ' * INDENT}Instead: {remedy[0].strip()}", INDENT))
    elif remedy:
        lines.append(" " * INDENT + "Instead:")
        lines += [f"{' ' * (INDENT + 4)}{line}".rstrip() for line in remedy]
    if finding.fix:
        lines.append(filled(f"{' ' * INDENT}nearpeak has it: {plain(finding.fix)}", INDENT))
    return "\n".join(lines)


def _code(line: str) -> str:
    """A line of code as printable ASCII, its indentation kept."""
    return " " * (len(line) - len(line.lstrip(" "))) + plain(line)
