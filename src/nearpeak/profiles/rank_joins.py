"""`join_timelines`: the collectives of ranks found in each other, and the clocks of the ranks aligned by them.

Collectives are matched by process group and sequence number; where a recording has none, by kind, size and order in the
step. The clocks of one machine are one; those of several are aligned by the ends of collectives, which are together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median

from nearpeak.profiles.rank_timeline import RankCollective, RankTimeline

_POINT_TO_POINT = ("send", "recv", "send_recv")
MAX_CLOCK_SCATTER = 0.25
"""Of a step: clocks that the ends of collectives align no better are not aligned."""


class Join:
    """A collective on all ranks: arrivals and ends on one clock, in seconds."""

    __slots__ = ("arrivals", "ends", "facts", "key")

    def __init__(self, key: tuple[object, ...], facts: RankCollective) -> None:
        self.key, self.facts = key, facts
        self.arrivals: dict[int, float] = {}
        self.ends: dict[int, float] = {}

    @property
    def last_rank(self) -> int:
        """The rank that arrived last."""
        return max(self.arrivals, key=lambda rank: self.arrivals[rank])

    @property
    def start(self) -> float:
        """When all were there."""
        return max(self.arrivals.values())

    @property
    def end(self) -> float:
        """When the first rank was done; not before all were there."""
        return max(min(self.ends.values()), self.start)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTimelines:
    """The timelines of a job on one clock, and its collectives in the order of their starts."""

    timelines: Mapping[int, RankTimeline]
    joins: tuple[Join, ...]
    join_of: Mapping[tuple[int, int], int]
    """The index of the join, by rank and index of the collective in its timeline."""
    offsets: Mapping[int, float]
    """What is added to the times of a rank."""
    common: tuple[int, ...]
    """The numbers of steps that all ranks have."""
    matched: float
    is_aligned: bool


def join_timelines(timelines: Iterable[RankTimeline]) -> JobTimelines:
    """Finds the collectives of ranks in each other, and aligns the clocks of the ranks."""
    by_rank = {timeline.rank: timeline for timeline in timelines}
    places: dict[tuple[object, ...], dict[int, int]] = {}
    total = 0
    for rank, timeline in by_rank.items():
        ordinals: Counter[tuple[object, ...]] = Counter()
        for index, item in enumerate(timeline.collectives):
            if item.kind in _POINT_TO_POINT:
                continue
            total += 1
            members: object = timeline.groups.get(item.group, item.group)
            if item.sequence is not None:
                key: tuple[object, ...] = (item.group, members, item.sequence, item.kind)
            else:
                place = (item.step, item.group, members, item.kind, item.bytes)
                key = (*place, ordinals[place])
                ordinals[place] += 1
            places.setdefault(key, {})[rank] = index
    whole = {key: ranks for key, ranks in places.items() if _is_whole(key, ranks, by_rank)}
    offsets, is_aligned = _align_clocks(by_rank, whole.values())
    joins = []
    for key, ranks in whole.items():
        first = next(iter(ranks))
        join = Join(key, by_rank[first].collectives[ranks[first]])
        for rank, index in ranks.items():
            item, shift = by_rank[rank].collectives[index], by_rank[rank].origin_s + offsets[rank]
            join.arrivals[rank], join.ends[rank] = item.called_s + shift, item.end_s + shift
        joins.append((join, ranks))
    joins.sort(key=lambda pair: pair[0].start)
    common = (
        set.intersection(*({step.number for step in line.steps} for line in by_rank.values())) if by_rank else set()
    )
    return JobTimelines(
        timelines=by_rank,
        joins=tuple(join for join, _ in joins),
        join_of={(rank, index): number for number, (_, ranks) in enumerate(joins) for rank, index in ranks.items()},
        offsets=offsets,
        common=tuple(sorted(common)),
        matched=sum(len(ranks) for _, ranks in joins) / total if total else 1.0,
        is_aligned=is_aligned,
    )


def _is_whole(key: tuple[object, ...], ranks: Mapping[int, int], by_rank: Mapping[int, RankTimeline]) -> bool:
    """Whether all ranks of its group that are here have a collective."""
    members = next((part for part in key if isinstance(part, tuple)), None)
    if members is None:
        first = next(iter(ranks))
        size = by_rank[first].collectives[ranks[first]].ranks
        return len(ranks) == min(size or len(by_rank), len(by_rank)) and len(ranks) > 1
    return len(ranks) > 1 and all(rank in ranks for rank in by_rank if rank in members)


def _align_clocks(
    by_rank: Mapping[int, RankTimeline], matched: Iterable[Mapping[int, int]]
) -> tuple[dict[int, float], bool]:
    """What to add to the times of each rank, and whether that puts all of them on one clock.

    The clocks of one machine are one clock. Those of different ones are aligned by the ends of collectives, from one
    rank to those that it shares collectives with.
    """
    offsets = dict.fromkeys(by_rank, 0.0)
    hosts = {timeline.host for timeline in by_rank.values()}
    if len(by_rank) < 2 or (len(hosts) == 1 and "" not in hosts):
        return offsets, True
    ends: dict[tuple[int, int], list[float]] = {}
    for ranks in matched:
        absolute = {
            rank: by_rank[rank].collectives[index].end_s + by_rank[rank].origin_s for rank, index in ranks.items()
        }
        first = min(absolute)
        for rank, end in absolute.items():
            if rank != first:
                ends.setdefault((first, rank), []).append(absolute[first] - end)
    step_s = median([step.end_s - step.start_s for line in by_rank.values() for step in line.steps] or [0.0])
    known = {min(by_rank)}
    scatter = 0.0
    is_new = True
    while is_new:
        is_new = False
        for (first, rank), differences in ends.items():
            for here, there, sign in ((first, rank, 1.0), (rank, first, -1.0)):
                if here in known and there not in known:
                    middle = median(differences)
                    offsets[there] = offsets[here] + sign * middle
                    scatter = max(scatter, median([abs(value - middle) for value in differences]))
                    known.add(there)
                    is_new = True
    return offsets, len(known) == len(by_rank) and scatter <= MAX_CLOCK_SCATTER * step_s
