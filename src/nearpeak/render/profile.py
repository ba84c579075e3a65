"""A profile as text: a card with the verdict, the waterfall as bars, the ranking, and what is not known."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping

from nearpeak.diagnose.profile import Profile
from nearpeak.diagnose.ranking import By, Rank, ranking
from nearpeak.diagnose.waterfall import MEANINGS, PartName
from nearpeak.render.table import table
from nearpeak.render.timing import plain
from nearpeak.units import percent, seconds, significant

WIDTH = 80
BAR = 24
_NEXT: Mapping[PartName, str] = {
    "traffic": "Larger batches or lower precision; the traffic itself is needed.",
    "fusion": "Fuse the ops in between: torch.compile, or fused kernels for norms, activations and the loss.",
    "slow kernels": "Look at the top of the ranking: another backend, layout or shape for these ops.",
    "not modelled": "Ops without a bound: nothing can be said about them; their names are below.",
    "communication": "Overlap communication with computation, or send less.",
    "idle": "Keep the device busy: CUDA graphs or torch.compile, no synchronisation, faster input.",
}


def text(profile: Profile, top: int = 12, by: By = "op") -> str:
    """The whole report, within 80 columns."""
    parts = [_card(profile), _waterfall(profile), _ranking(profile, top, by), _coverage(profile)]
    parts += [textwrap.fill(plain(note), WIDTH) for note in profile.notes]
    return "\n\n".join(part for part in parts if part)


def _card(profile: Profile) -> str:
    loss = profile.waterfall.largest_loss
    share = loss.seconds / profile.wall_s if profile.wall_s else 0.0
    times = significant(profile.wall_s / profile.ideal_s) if profile.ideal_s else "-"
    lines = {
        "Verdict": f"{seconds(profile.wall_s)} a step, {times} x the ideal {seconds(profile.ideal_s)} on "
        f"{plain(profile.machine, 30)}.",
        "Why": f"Most is lost to {loss.name}: {seconds(loss.seconds)}, {percent(share)} of the step "
        f"({MEANINGS[loss.name]}).",
        "Next": _NEXT[loss.name],
    }
    return "\n".join(
        textwrap.fill(f"{name + ':':9}{line}", WIDTH, subsequent_indent=" " * 9) for name, line in lines.items()
    )


def _waterfall(profile: Profile) -> str:
    rows = []
    for part in profile.waterfall.parts:
        share = part.seconds / profile.wall_s if profile.wall_s else 0.0
        bar = "#" * round(BAR * max(share, 0.0))
        broken = " (below zero: a bound of nearpeak's is wrong)" if part in profile.waterfall.broken else ""
        rows.append([part.name, seconds(part.seconds), percent(share), bar + broken])
    rows.append(["wall", seconds(profile.wall_s), "100.0 %", ""])
    return table(["part", "time", "share", ""], rows, "lrrl")


def _ranking(profile: Profile, top: int, by: By) -> str:
    ranks = [rank for rank in ranking(profile, by) if rank.measured_s > 0][:top]
    if not ranks:
        return ""
    return table(
        [by, "ops", "measured", "bound", "expected", "lost", "limit"], [_row(rank) for rank in ranks], "lrrrrrl"
    )


def _row(rank: Rank) -> list[str]:
    return [
        plain(rank.key.removeprefix("aten.") or "-", 30),
        str(rank.ops),
        seconds(rank.measured_s),
        seconds(rank.bound_s) if rank.modelled else "-",
        "-" if rank.expected_s is None or not rank.modelled else seconds(rank.expected_s),
        seconds(rank.lost_s) if rank.modelled else "-",
        rank.limiter if rank.modelled else "-",
    ]


def _coverage(profile: Profile) -> str:
    line = f"Modelled: {percent(profile.modelled_share)} of the {seconds(profile.kernel_s)} in which kernels ran."
    unknown: dict[str, float] = {}
    for op in profile.ops:
        if not op.modelled and op.measured_s:
            unknown[op.name] = unknown.get(op.name, 0.0) + op.measured_s
    if unknown:
        worst = sorted(unknown.items(), key=lambda item: -item[1])[:6]
        line += " Without a bound: " + ", ".join(f"{plain(name, 40)} {seconds(time)}" for name, time in worst) + "."
    return textwrap.fill(line, WIDTH)
