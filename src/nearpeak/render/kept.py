"""The kept runs as a table: number, time, what was run, how long a step took and what was lost most."""

from __future__ import annotations

from collections.abc import Sequence

from nearpeak.diagnose.kept import Kept
from nearpeak.render.profile_card import place
from nearpeak.render.table import table
from nearpeak.render.timing import plain
from nearpeak.units import percent, seconds, significant

SOURCE = 20
VERDICT = 25


def text(runs: Sequence[Kept]) -> str:
    """One line for each run, within 80 columns."""
    return table(["run", "when (UTC)", "what", "step", "verdict"], [_row(run) for run in runs], "lllrl")


def _row(run: Kept) -> list[str]:
    profile = run.profile
    if profile is None:
        when = run.path.name[:16].replace("T", " ")
        return [f"@{run.number}", plain(when[:13] + ":" + when[14:], 16), "-", "-", plain(run.problem, VERDICT)]
    loss = profile.waterfall.largest_loss
    share = percent(loss.seconds / profile.wall_s, 0) if profile.wall_s else "-"
    times = f"{significant(profile.wall_s / profile.ideal_s, 2)} x, " if profile.ideal_s > 0.0 else ""
    return [
        f"@{run.number}",
        plain(profile.date[:16].replace("T", " "), 16),
        place(profile.source, SOURCE),
        seconds(profile.wall_s),
        plain(f"{times}{loss.name} {share}", VERDICT),
    ]
