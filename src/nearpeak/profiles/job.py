"""`JobProfile`: the ranks of one job side by side, its collectives, which rank is late and why, and what that costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from nearpeak import _display
from nearpeak._records import Amount, Count, Rate, Seconds, Share, SignedSeconds
from nearpeak.profiles.idle import IdleCause
from nearpeak.profiles.rank_timeline import RankTimeline
from nearpeak.profiles.waterfall import Waterfall
from nearpeak.units import seconds as seconds_text

LateCause = Literal[
    "slower kernels",
    "lower clock",
    "more work",
    "input",
    "garbage collection",
    "python",
    "launching",
    "cannot tell",
]
CAUSE_TEXTS: Mapping[LateCause, str] = {
    "slower kernels": "its ops are the same and take longer",
    "lower clock": "its clock is lower",
    "more work": "it computes more",
    "input": "it waits for its input",
    "garbage collection": "Python collects garbage",
    "python": "its Python runs longer, or sleeps",
    "launching": "its host launches more slowly",
    "cannot tell": "no one cause explains most of it",
}
Pattern = Literal["always", "bursts", "rotates"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankParts:
    """One rank beside the others."""

    rank: Count
    host: str = ""
    device: str = ""
    waterfall: Waterfall | None = None
    """Of its own profile; None if it has none."""
    idle: tuple[IdleCause, ...] = ()
    """The largest causes of its idle time, with their lines."""
    clock_hz: Rate | None = None
    seconds: tuple[Seconds, ...] = ()
    """Of a step that all ranks recorded, by activity: the median over these steps, in the order of `ACTIVITIES`."""
    preempted_s: Seconds | None = None
    """Of such a step: the time in which other work had its processor."""
    waited_s: Seconds = 0.0
    """Of such a step: the time from its arrival at collectives to that of the last rank."""
    own_s: tuple[Seconds, ...] = ()
    """The time in which it did not wait for others, of each of these steps."""
    source: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCollective:
    """All collectives of one kind, size and group in a step. Times are means over ranks and calls."""

    kind: str
    group: str
    bytes: Amount | None
    ranks: Count
    """How many ranks take part."""
    per_step: Amount
    wait_s: Seconds
    """From the arrival of a rank to that of the last one."""
    transfer_s: Seconds
    """From the last arrival to the first end."""
    tail_s: Seconds
    """From the first end to that of the rank."""
    last_rank: Count
    """The rank that is last most often."""
    last_share: Share
    """How often."""

    @property
    def bus_bandwidth(self) -> float | None:
        """Bytes/s over each link if the transfer is a ring, with the factors of nccl-tests; None if it has none.

        An all-gather and a reduce-scatter have the whole as their size.
        """
        factors = {
            "all_reduce": 2.0 * (self.ranks - 1) / self.ranks,
            "all_gather": (self.ranks - 1) / self.ranks,
            "reduce_scatter": (self.ranks - 1) / self.ranks,
            "all_to_all": (self.ranks - 1) / self.ranks,
            "broadcast": 1.0,
            "reduce": 1.0,
        }
        factor = factors.get(self.kind)
        if factor is None or not self.bytes or self.transfer_s <= 0.0:
            return None
        return factor * self.bytes / self.transfer_s


@dataclass(frozen=True, slots=True, kw_only=True)
class LateRank:
    """A rank for which the others wait."""

    rank: Count | None
    """None if it is another one from step to step."""
    late_s: Seconds
    """In a step in which it is late: by how much, the median."""
    late_steps: Count
    steps: Count
    """The number of steps that were looked at."""
    pattern: Pattern
    cause: LateCause
    evidence: str
    """What it did more of, with the others beside it."""
    where: str = ""
    """The user's line; "" if it is not known."""

    @property
    def text(self) -> str:
        """One sentence."""
        if self.rank is None:
            who, how = "Another rank is late from step to step", f", in {self.late_steps} of {self.steps} steps"
        else:
            often = "in every step" if self.late_steps == self.steps else f"in {self.late_steps} of {self.steps} steps"
            who, how = f"Rank {self.rank} is late", f" {often}"
        at = f", at {self.where}" if self.where else ""
        return f"{who}{how}, by {seconds_text(self.late_s)}: {CAUSE_TEXTS[self.cause]}{at}. {self.evidence}".strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """A step without one cause, in the replay of the job."""

    what: str
    """ "rank 3's input": it takes as long as that of the other ranks."""
    step_s: Seconds
    saved_s: SignedSeconds


@dataclass(frozen=True, slots=True, kw_only=True)
class JobProfile(_display.Result):
    """One job of several ranks."""

    world_size: Count
    ranks: tuple[RankParts, ...]
    missing: tuple[Count, ...] = ()
    """Ranks of which nothing is known."""
    steps: Count
    """Steps that all ranks of `ranks` recorded."""
    step_s: Seconds
    """The time of such a step: the median over ranks and steps; it is slower than a clean one."""
    wall_s: Seconds
    """The time of a clean step: the median over ranks; that of the recorded steps if there is no other."""
    collectives: tuple[JobCollective, ...] = ()
    late: tuple[LateRank, ...] = ()
    what_ifs: tuple[WhatIf, ...] = ()
    replayed_s: Seconds | None = None
    """The time of a recorded step in the replay that has nothing removed; None if there is none."""
    matched: Share = 1.0
    """The share of collectives that were found on all ranks of their group."""
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        late = f", {self.late[0].text}" if self.late else ""
        return _display.headline(f"Job of {self.world_size} ranks: {seconds_text(self.wall_s)} a step{late}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """What a rank sends to rank 0."""

    timeline: RankTimeline
    wall_s: Seconds | None = None
    """Of a clean step."""
    waterfall: Waterfall | None = None
    idle: tuple[IdleCause, ...] = ()
    device: str = ""
