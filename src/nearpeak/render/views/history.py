"""Past runs as a table: number, time, what was run, the step time and the largest loss."""

from __future__ import annotations

from collections.abc import Sequence

from nearpeak.profiles.grade import grade_profile
from nearpeak.profiles.history import PastRun
from nearpeak.render.document import Document, Table
from nearpeak.render.text import elide_start, plain
from nearpeak.units import percent, seconds, significant

SOURCE_COLUMNS = 20
VERDICT_COLUMNS = 25


def document(runs: Sequence[PastRun]) -> Document:
    """One line for each run."""
    headers = ("run", "when (UTC)", "what", "step", "verdict")
    table = Table(headers=headers, rows=tuple(map(_row, runs)), align="lllrl")
    return Document(title="Past runs", is_titled=False, parts=(table,))


def _row(run: PastRun) -> tuple[str, ...]:
    profile = run.profile
    if profile is None:
        when = run.path.name[:16].replace("T", " ")
        return f"@{run.number}", plain(when[:13] + ":" + when[14:], 16), "-", "-", plain(run.problem, VERDICT_COLUMNS)
    loss = profile.waterfall.largest_loss
    share = percent(loss.seconds / profile.wall_s, 0) if profile.wall_s else "-"
    grade = grade_profile(profile)
    times = f"{significant(profile.wall_s / profile.ideal_s, 2)} x, " if profile.ideal_s > 0.0 else ""
    if not grade.is_trusted:
        times = f"grade {grade.letter}, "
    return (
        f"@{run.number}",
        plain(profile.date[:16].replace("T", " "), 16),
        elide_start(profile.source, SOURCE_COLUMNS),
        seconds(profile.wall_s),
        plain(f"{times}{loss.name} {share}", VERDICT_COLUMNS),
    )
