"""`analyze_job`: the ranks of a job side by side, its collectives, which rank is late, and why.

`join_timelines` finds the collectives of ranks in each other: by process group and sequence number, and where a
recording has none, by kind, size and order in the step. The clocks of one machine are one; those of several are aligned
by the ends of collectives, which are together.

A collective ends on all of its ranks at once, and begins when the last of them is there. So the time of a rank in it is
a wait for the last rank to arrive, the transfer, and a tail. A rank is late if it comes last by more than ranks and
steps scatter, and if it also did more of its own than the others did: that which it did more of is the cause. Where no
one thing explains most of it, the cause cannot be told.

`replay_job` runs the recorded steps again in a model, whole and with one cause removed. Each rank is a program of its
own work, calls and waits. A collective begins when all of its ranks have called it and those before it in its group are
done; a rank that waits for it goes on when it has ended. What is removed from a rank is set to what other ranks have in
the same place. The replay of the unchanged job must take as long as the job did, or nothing is predicted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median

from nearpeak.profiles.job import JobCollective, JobProfile, LateCause, LateRank, Pattern, RankParts, RankReport, WhatIf
from nearpeak.profiles.rank_timeline import (
    ACTIVITIES,
    COMMUNICATION,
    Activity,
    RankCollective,
    RankStep,
    RankTimeline,
    Segment,
)
from nearpeak.units import percent
from nearpeak.units import seconds as seconds_text

LEAST_LATE_SHARE = 0.04
"""Of a step: a rank that is late by less is not accused."""
_UNEXPLAINED = 2.0
"""Times as late as that: so late is a rank that is accused without a cause."""
LEAST_BURST_SHARE = 0.1
"""Of a step, for a rank that is late in some steps."""
STEADY_SHARE = 0.7
"""Of the steps in which a rank must be late, to be late always."""
EXPLAINED_SHARE = 0.5
"""Of its lateness that a cause must explain."""
_NOISE_FACTOR = 1.5
OWN_ACTIVITIES = tuple(name for name in ACTIVITIES if name != "communication")
_PREEMPTIBLE: tuple[Activity, ...] = ("ops", "garbage collection", "launching", "python")
"""Activities that take longer where other work has the processor; a sleep for input does not."""
SHARED = 0.1
"""Of a step: other work that has the processors for longer also slows down the ops that run beside it."""
LOWER_CLOCK = 0.97
MORE_WORK = 1.02
_POINT_TO_POINT = ("send", "recv", "send_recv")
MAX_CLOCK_SCATTER = 0.25
"""Of a step: clocks that the ends of collectives align no better are not aligned."""
TOLERANCE = 0.02
"""Of the measured time: a replay that is further off predicts nothing."""
_ACTIVITY_OF: Mapping[LateCause, Activity] = {
    "slower kernels": "ops",
    "lower clock": "ops",
    "more work": "ops",
    "input": "input",
    "garbage collection": "garbage collection",
    "python": "python",
    "launching": "launching",
}
_CAUSE_NAMES: Mapping[LateCause, str] = {
    "slower kernels": "slower kernels",
    "lower clock": "lower clock",
    "more work": "additional work",
    "input": "input stall",
    "garbage collection": "garbage collections",
    "python": "Python",
    "launching": "slow launches",
}
Work = Callable[[int, RankStep, int], float]
"""The seconds of a rank's own work in a segment, by the index of the segment in its step."""


def analyze_job(reports: Sequence[RankReport], world_size: int, *, notes: Sequence[str] = ()) -> JobProfile:
    """The job of these ranks."""
    reports = sorted(reports, key=lambda report: report.timeline.rank)
    joined = join_timelines(report.timeline for report in reports)
    steps = {
        rank: [step for step in timeline.steps if step.number in set(joined.common)]
        for rank, timeline in joined.timelines.items()
    }
    durations = [step.end_s - step.start_s for rank in steps for step in steps[rank]]
    step_s = median(durations) if durations else 0.0
    walls = [report.wall_s for report in reports if report.wall_s]
    lateness = _Lateness(joined, steps, step_s, {report.timeline.rank: report for report in reports})
    late = lateness.late_ranks() if joined.is_aligned and joined.joins and len(joined.common) >= 2 else ()
    wall_s = median(walls) if walls else step_s
    replay = replay_job(joined, late, wall_s)
    said = [*notes, *lateness.notes]
    if not joined.is_aligned:
        said.append("The clocks of the ranks cannot be aligned: which rank is late cannot be told.")
    if joined.joins and joined.matched < 0.9:
        said.append(f"{percent(joined.matched)} of the collectives were found on all ranks of their group.")
    if not joined.joins:
        said.append("No collective was found on two ranks: who waits for whom cannot be told.")
    if lateness.others_share >= SHARED and not lateness.notes:
        said.append(
            f"Other work, or more ranks than processors, kept a rank from its processor for "
            f"{percent(lateness.others_share)} of a step: times vary with that."
        )
    if replay.note:
        said.append(replay.note)
    ranks = tuple(_rank_parts(report, steps[report.timeline.rank], lateness) for report in reports)
    return JobProfile(
        world_size=max(world_size, len(reports)),
        ranks=ranks,
        missing=tuple(sorted(set(range(world_size)) - {parts.rank for parts in ranks})),
        steps=len(joined.common),
        step_s=step_s,
        wall_s=wall_s,
        collectives=_summarize(joined),
        late=late,
        what_ifs=replay.what_ifs,
        replayed_s=replay.step_s,
        matched=min(1.0, joined.matched),
        notes=tuple(said),
    )


def _rank_parts(report: RankReport, steps: Sequence[RankStep], lateness: _Lateness) -> RankParts:
    timeline = report.timeline
    preempted = [step.preempted_s for step in steps if step.preempted_s is not None]
    return RankParts(
        rank=timeline.rank,
        host=timeline.host,
        device=report.device,
        waterfall=report.waterfall,
        idle=report.idle,
        clock_hz=timeline.clock_hz,
        seconds=tuple(median([step.seconds(name) for step in steps] or [0.0]) for name in ACTIVITIES),
        preempted_s=median(preempted) if preempted else None,
        waited_s=median([lateness.waited(timeline.rank, step.number) for step in steps] or [0.0]),
        own_s=tuple(step.own_s for step in steps),
        source=timeline.source,
        notes=timeline.notes,
    )


def _summarize(joined: JobTimelines) -> tuple[JobCollective, ...]:
    """The collectives by kind, size and group, the longest first."""
    groups: dict[tuple[str, str, float | None], list[Join]] = {}
    for join in joined.joins:
        if join.facts.step in joined.common:
            groups.setdefault((join.facts.kind, join.facts.group, join.facts.bytes), []).append(join)
    rows = []
    for (kind, group, size), joins in groups.items():
        last, times = Counter(join.last_rank for join in joins).most_common(1)[0]
        count = len(joins)
        mean_wait = sum(join.start - sum(join.arrivals.values()) / len(join.arrivals) for join in joins) / count
        mean_tail = sum(sum(max(0.0, end - join.end) for end in join.ends.values()) / len(join.ends) for join in joins)
        rows.append(
            JobCollective(
                kind=kind,
                group=group,
                bytes=size,
                ranks=max(len(join.arrivals) for join in joins),
                per_step=count / max(1, len(joined.common)),
                wait_s=max(0.0, mean_wait),
                transfer_s=sum(join.end - join.start for join in joins) / count,
                tail_s=mean_tail / count,
                last_rank=last,
                last_share=times / count,
            )
        )
    return tuple(sorted(rows, key=lambda row: -row.per_step * (row.wait_s + row.transfer_s + row.tail_s)))


class _Lateness:
    """By how much ranks are late, and what they did meanwhile."""

    def __init__(
        self,
        joined: JobTimelines,
        steps: Mapping[int, Sequence[RankStep]],
        step_s: float,
        reports: Mapping[int, RankReport],
    ) -> None:
        self._joined, self._step_s, self._reports = joined, step_s, reports
        self._steps = {
            rank: [_undisturbed_step(step, joined.timelines[rank].on_device) for step in steps[rank]] for rank in steps
        }
        """Without the time in which other work had the processors."""
        self.notes: list[str] = []
        """What cannot be told of the ranks."""
        self._ranks = sorted(steps)
        self._count = len(joined.common)
        self._waited: dict[tuple[int, int], float] = defaultdict(float)
        self._caused: dict[tuple[int, int], float] = defaultdict(float)
        """Seconds by rank and step: those by which it was the last one, beyond the one before it."""
        for join in joined.joins:
            step = join.facts.step
            *_, before, last = sorted(join.arrivals.values())
            self._caused[join.last_rank, step] += last - before
            for rank, arrival in join.arrivals.items():
                self._waited[rank, step] += last - arrival
        self._own = {(rank, step.number): step.own_s for rank in self._ranks for step in self._steps[rank]}
        # Where the time is known that other work took from a rank, what is left of its own is exact. Its arrivals
        # are not: a rank that waits for a processor is last as well. A device goes on while its host waits for one.
        is_exact = all(
            step.preempted_s is not None and not joined.timelines[rank].on_device
            for rank in self._ranks
            for step in steps[rank]
        )
        self._undisturbed = _Model(joined, self._steps) if is_exact and joined.common else None
        self._ordered = {
            step: sorted(self._own[rank, step] for rank in self._ranks if (rank, step) in self._own)
            for step in joined.common
        }
        self._late = {
            key: max(0.0, excess if is_exact else min(self._caused[key], excess))
            for key in self._own
            for excess in [self._excess(*key)]
        }

    def waited(self, rank: int, step: int) -> float:
        """The time from the arrivals of a rank to those of the last one."""
        return self._waited[rank, step]

    def _excess(self, rank: int, step: int) -> float:
        """The own time of a rank beyond that of the others."""
        own = self._own[rank, step]
        return own - _median_of_others(self._ordered[step], own)

    def late_ranks(self) -> tuple[LateRank, ...]:
        """The ranks that stand out of the spread between steps and ranks, the latest first."""
        if len(self._ranks) < 2:
            return ()
        noise = self._noise()
        always = [late for rank in self._ranks if (late := self._always(rank, noise)) is not None]
        accused = {late.rank for late in always}
        bursts = [
            late for rank in self._ranks if rank not in accused and (late := self._in_bursts(rank, noise)) is not None
        ]
        found = [*always, *bursts]
        if not always and len({late.rank for late in bursts}) > 1 and len({late.cause for late in bursts}) == 1:
            found = [self._rotating(bursts)]
        return tuple(sorted(found, key=lambda late: -late.late_s * late.late_steps))

    def _noise(self) -> float:
        """The scatter of a rank's own time around its usual excess, of the usual rank."""
        spreads = []
        for rank in self._ranks:
            excess = [self._excess(rank, step) for step in self._joined.common]
            middle = median(excess)
            spreads.append(1.48 * median([abs(value - middle) for value in excess]))
        return median(spreads)

    def _always(self, rank: int, noise: float) -> LateRank | None:
        late = {step: self._late[rank, step] for step in self._joined.common}
        usual = median(late.values())
        # The error of a median of n values is about 1.25 of their scatter over the root of n.
        least = max(LEAST_LATE_SHARE * self._step_s, _NOISE_FACTOR * 1.25 * noise / self._count**0.5 * 2.0)
        steps = [step for step, seconds in late.items() if seconds >= usual / 3]
        if usual < least or len(steps) < STEADY_SHARE * self._count:
            return None
        if not self._is_awaited(rank, steps) and not self._would_be_awaited(rank, usual):
            return None
        found = self._late_rank(rank, steps, usual, "always")
        if found.cause == "cannot tell" and usual < _UNEXPLAINED * least:
            self.notes.append(
                f"Rank {rank} arrives {seconds_text(usual)} after the others, which no recorded activity explains: it "
                "is not called late."
            )
            return None
        if self._shares_cores(rank) and self._explained(rank, steps) < EXPLAINED_SHARE * usual:
            self.notes.append(
                f"Rank {rank} arrives {seconds_text(usual)} after the others. {found.evidence} Ranks of one machine "
                "share its cores, caches and memory, which may be the reason: the rank is not called late."
            )
            return None
        if self.others_share < SHARED or found.cause == "more work":  # its ops are counted, not timed
            return found
        if found.cause != "slower kernels" and self._is_steady(rank, found):
            return found
        seen = "Ops" if found.cause == "slower kernels" else "Not always the same parts"
        self.notes.append(
            f"{seen} of rank {rank} take longer. Other work had the processors of the ranks for "
            f"{percent(self.others_share)} of a step, and may be the reason: the rank is not called late."
        )
        return None

    def _shares_cores(self, rank: int) -> bool:
        """Whether its ops run on processors of a machine on which others of the ranks run too."""
        own = self._joined.timelines[rank]
        hosts = [timeline.host for each, timeline in self._joined.timelines.items() if each != rank]
        return not own.on_device and bool(own.host) and own.host in hosts

    def _is_steady(self, rank: int, late: LateRank) -> bool:
        """Whether the activity that makes a rank late does so from step to step: other work interrupts any of them."""
        activity = _ACTIVITY_OF.get(late.cause)
        if activity is None:
            return False
        seconds = {each: {step.number: step.seconds(activity) for step in self._steps[each]} for each in self._ranks}
        steady = [
            step
            for step in self._joined.common
            if seconds[rank][step] - median([seconds[each][step] for each in self._ranks if each != rank])
            >= late.late_s / 3
        ]
        return len(steady) >= STEADY_SHARE * self._count

    @property
    def others_share(self) -> float:
        """The share of a step in which other work had the processor of a rank, of the rank with most of it; 0 where ops
        run on a GPU, whose clock is known."""
        if any(timeline.clock_hz for timeline in self._joined.timelines.values()):
            return 0.0
        preempted = [median([step.preempted_s or 0.0 for step in self._steps[rank]] or [0.0]) for rank in self._ranks]
        return max(preempted) / self._step_s if self._step_s else 0.0

    def _is_awaited(self, rank: int, steps: Sequence[int]) -> bool:
        """Whether the others wait for it in these steps, and for nobody longer."""
        caused = {each: sum(self._caused[each, step] for step in steps) for each in self._ranks}
        return caused[rank] > 0.0 and caused[rank] >= max(caused.values())

    def _would_be_awaited(self, rank: int, late_s: float) -> bool:
        """Whether the others would wait for it if no other work had the processors of the ranks.

        Where other work interrupts the ranks, each of them is the last one in some steps, whoever is late. What is left
        of their own time without that still tells: the steps would be shorter without what this rank has more of.
        """
        if self._undisturbed is None:
            return False
        base, without = (
            self._undisturbed.run(self._undisturbed.without([(rank, name) for name in names]))
            for names in ((), OWN_ACTIVITIES)
        )
        return base is not None and without is not None and base - without >= EXPLAINED_SHARE * late_s

    def _in_bursts(self, rank: int, noise: float) -> LateRank | None:
        least = max(LEAST_BURST_SHARE * self._step_s, 4.0 * noise)
        steps = [step for step in self._joined.common if self._late[rank, step] >= least]
        if len(steps) < max(3, 0.15 * self._count) or not self._is_awaited(rank, steps):
            return None
        found = self._late_rank(rank, steps, median([self._late[rank, step] for step in steps]), "bursts")
        # What else runs on a machine interrupts Python and ops now and then: only what is marked counts.
        if found.cause not in ("garbage collection", "input", "more work"):
            return None
        agreeing = [step for step in steps if self._cause(rank, [step])[0] == found.cause]
        return found if len(agreeing) >= STEADY_SHARE * len(steps) else None

    def _rotating(self, bursts: Sequence[LateRank]) -> LateRank:
        ranks = ", ".join(f"{late.rank} ({late.late_steps})" for late in bursts)
        return LateRank(
            rank=None,
            late_s=median([late.late_s for late in bursts]),
            late_steps=min(self._count, sum(late.late_steps for late in bursts)),
            steps=self._count,
            pattern="rotates",
            cause=bursts[0].cause,
            evidence=f"Late ranks, with the number of steps: {ranks}.",
        )

    def _late_rank(self, rank: int, steps: Sequence[int], late_s: float, pattern: Pattern) -> LateRank:
        cause, evidence = self._cause(rank, steps)
        return LateRank(
            rank=rank,
            late_s=late_s,
            late_steps=len(steps),
            steps=self._count,
            pattern=pattern,
            cause=cause,
            evidence=evidence,
            where=self._line(rank, cause),
        )

    def _line(self, rank: int, cause: LateCause) -> str:
        idle = [item for item in self._reports[rank].idle if item.cause == cause and item.where]
        return max(idle, key=lambda item: item.seconds).where if idle else ""

    def _explained(self, rank: int, steps: Sequence[int]) -> float:
        """The seconds by which it is late in these steps for reasons other than that the same ops take longer."""
        excess, *_ = self._excesses(rank, steps)
        return sum(max(0.0, value) for cause, value in excess.items() if cause != "slower kernels")

    def _excesses(
        self, rank: int, steps: Sequence[int]
    ) -> tuple[dict[LateCause, float], dict[tuple[int, Activity], float], dict[Activity, float], str]:
        """Its seconds beyond those of the others by cause; those of each rank and the usual ones by activity; ops that
        it has more of."""
        numbered = {
            each: {step.number: step for step in self._steps[each] if step.number in set(steps)} for each in self._ranks
        }
        seconds = {
            (each, name): median([step.seconds(name) for step in numbered[each].values()])
            for each in self._ranks
            for name in ACTIVITIES
        }
        others = [each for each in self._ranks if each != rank]
        usual = {name: median([seconds[each, name] for each in others]) for name in ACTIVITIES}
        excess: dict[LateCause, float] = {
            "input": seconds[rank, "input"] - usual["input"],
            "garbage collection": seconds[rank, "garbage collection"] - usual["garbage collection"],
            "launching": seconds[rank, "launching"] - usual["launching"],
            "python": seconds[rank, "python"] - usual["python"],
        }
        in_ops = seconds[rank, "ops"] - usual["ops"]
        more, names = _more_work(numbered[rank], [numbered[each] for each in others])
        excess["more work"] = min(more, max(0.0, in_ops))
        excess["slower kernels"] = in_ops - excess["more work"]
        return excess, seconds, usual, names

    def _cause(self, rank: int, steps: Sequence[int]) -> tuple[LateCause, str]:
        """What most of its lateness in these steps comes from, and the evidence."""
        excess, seconds, usual, names = self._excesses(rank, steps)
        late_s = median([self._late[rank, step] for step in steps])
        cause = max(excess, key=lambda name: excess[name])
        rest = sum(value for name, value in excess.items() if name != cause and value > 0.0)
        if excess[cause] < EXPLAINED_SHARE * late_s or excess[cause] < rest:
            listed = [f"{name} {seconds_text(value)}" for name, value in _largest(excess) if value > 0.05 * late_s]
            return "cannot tell", f"Beyond the other ranks: {', '.join(listed) or 'nothing that was recorded'}."
        if cause in ("more work", "slower kernels"):
            pair = f"Its ops take {seconds_text(seconds[rank, 'ops'])}, {seconds_text(usual['ops'])} on the others"
            clock, clocks = self._clocks(rank)
            if cause == "slower kernels" and clock and clocks and clock < LOWER_CLOCK * median(clocks):
                return "lower clock", f"{clock / 1e6:,.0f} MHz, {median(clocks) / 1e6:,.0f} MHz on the others. {pair}."
            return cause, f"{pair}{f'; it runs more of {names}' if cause == 'more work' and names else ''}."
        name: Activity = cause  # type: ignore[assignment]  # the others have the names of their activities
        return cause, f"{seconds_text(seconds[rank, name])} of its step, {seconds_text(usual[name])} on the others."

    def _clocks(self, rank: int) -> tuple[float | None, list[float]]:
        clocks = {each: timeline.clock_hz for each, timeline in self._joined.timelines.items()}
        return clocks[rank], [clock for each, clock in clocks.items() if each != rank and clock]


def _largest(excess: Mapping[LateCause, float]) -> list[tuple[LateCause, float]]:
    return sorted(excess.items(), key=lambda item: -item[1])


def _undisturbed_step(step: RankStep, on_device: bool) -> RankStep:
    """The step without the time in which other work had the processor, taken from all of its segments alike.

    A thread that has waited for a collective may wait for a processor too before it goes on, which is no time of its
    own. So no more is taken than leaves the time in which the thread ran. Kernels of a device go on meanwhile.
    """
    if not step.preempted_s:
        return step
    names = [name for name in _PREEMPTIBLE if not on_device or name != "ops"]
    total = sum(step.seconds(name) for name in names)
    taken = min(step.preempted_s, total)
    if step.processor_s is not None and not on_device:
        taken = min(taken, max(0.0, step.own_s - step.processor_s))
    if taken <= 0.0:
        return step
    shares = [1.0 - taken / total if name in names else 1.0 for name in ACTIVITIES]
    segments = (
        replace(segment, seconds=tuple(seconds * share for seconds, share in zip(segment.seconds, shares, strict=True)))
        for segment in step.segments
    )
    return replace(step, segments=tuple(segments))


def _more_work(steps: Mapping[int, RankStep], others: Sequence[Mapping[int, RankStep]]) -> tuple[float, str]:
    """Seconds of ops that a rank runs more often or on larger tensors than the others, and the names of the largest."""
    found: dict[str, float] = {}
    for number, step in steps.items():
        for name, total in step.ops.items():
            there = [other[number].ops.get(name) for other in others if number in other]
            counts = median([0 if item is None else item.count for item in there] or [0])
            elements = median([0.0 if item is None else item.elements for item in there] or [0.0])
            if not counts:
                found[name] = found.get(name, 0.0) + total.seconds
                continue
            growth = total.elements / elements if elements else total.count / counts
            if growth > MORE_WORK:
                found[name] = found.get(name, 0.0) + total.seconds * (1.0 - 1.0 / growth)
    per_step = sum(found.values()) / max(1, len(steps))
    return per_step, ", ".join(name.removeprefix("aten::") for name in sorted(found, key=lambda name: -found[name])[:2])


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


@dataclass(frozen=True, slots=True, kw_only=True)
class JobReplay:
    """What the replay tells."""

    step_s: float | None = None
    """The time of a step with nothing removed; None without a replay."""
    what_ifs: tuple[WhatIf, ...] = ()
    note: str = ""
    """Why nothing is predicted."""


def replay_job(joined: JobTimelines, late: Sequence[LateRank], wall_s: float) -> JobReplay:
    """The step without each cause, and without all of them; `wall_s` is the time of a clean step."""
    if len(joined.timelines) < 2 or not joined.joins or len(joined.common) < 2 or not joined.is_aligned:
        return JobReplay()
    model = _Model(joined)
    measured = model.measured_s
    base = model.run(lambda rank, step, index: _own(step.segments[index]))
    if base is None:
        return JobReplay(note="The job cannot be replayed: its ranks wait for collectives that not all of them called.")
    if abs(base - measured) > TOLERANCE * measured:
        return JobReplay(
            step_s=base,
            note=f"What a cause costs cannot be told: the replay of the unchanged job is "
            f"{percent(abs(base - measured) / measured)} off.",
        )
    what_ifs = []

    def add(what: str, work: Work) -> None:
        without = model.run(work)
        if without is not None:
            saved = base - without
            # A stall takes as long without the profiler as with it. What is larger than a clean step allows for was
            # slower in the recorded steps, like everything in them.
            left = wall_s - saved if wall_s - saved >= 0.5 * wall_s * without / base else wall_s * without / base
            what_ifs.append(WhatIf(what=what, step_s=max(0.0, left), saved_s=wall_s - left))

    removed: list[tuple[int, Activity]] = []
    for item in late:
        activity = _ACTIVITY_OF.get(item.cause)
        if item.rank is not None and activity is not None:
            removed.append((item.rank, activity))
            add(f"rank {item.rank}'s {_CAUSE_NAMES[item.cause]}", model.without([(item.rank, activity)]))
    if len(removed) > 1:
        add("all of these", model.without(removed))
    everything = [(rank, name) for rank in joined.timelines for name in OWN_ACTIVITIES]
    add("differences between the ranks", model.without(everything))
    return JobReplay(step_s=base, what_ifs=tuple(what_ifs))


def _own(segment: Segment) -> float:
    """The seconds of a segment before its event; a wait is part of the model."""
    return segment.own_s if segment.event == "wait" else sum(segment.seconds)


class _Model:
    def __init__(self, joined: JobTimelines, steps: Mapping[int, Sequence[RankStep]] | None = None) -> None:
        """These steps of the ranks, which all of them have; the recorded ones if none are given."""
        self._joined = joined
        self._steps = steps or {
            rank: [step for step in timeline.steps if step.number in joined.common]
            for rank, timeline in joined.timelines.items()
        }
        self._shift = {rank: timeline.origin_s + joined.offsets[rank] for rank, timeline in joined.timelines.items()}
        self._first = min(steps[0].start_s + self._shift[rank] for rank, steps in self._steps.items())
        called = {
            number
            for rank, steps in self._steps.items()
            for step in steps
            for segment in step.segments
            if segment.event == "call" and segment.collective is not None
            if (number := joined.join_of.get((rank, segment.collective))) is not None
        }
        self._called = called
        self._service: dict[int, float] = {}
        """Seconds that each collective took once it could begin."""
        self._before: dict[int, int] = {}
        """The collective before each one in its group and stream, which run one after the other.

        Where a backend ran some at the same time, those alone that were still running when all ranks had called the
        next one.
        """
        self._ends = [join.end for join in joined.joins]
        lanes: dict[tuple[str, int], list[int]] = {}
        for number, join in enumerate(joined.joins):
            lanes.setdefault((join.facts.group, join.facts.stream), []).append(number)
        for numbers in lanes.values():
            in_turn = all(self._ends[first] <= self._ends[second] for first, second in pairwise(numbers))
            for first, second in pairwise(numbers):
                if in_turn or self._ends[first] > joined.joins[second].start:
                    self._before[second] = first
        for number, join in enumerate(joined.joins):
            start = max(join.start, self._ends[self._before[number]] if number in self._before else join.start)
            self._service[number] = max(0.0, self._ends[number] - start)
        parts = {
            (rank, step.number): _seconds_between_calls(step) for rank, steps in self._steps.items() for step in steps
        }
        self._between_calls = {key: rows for key, (rows, _) in parts.items()}
        self._calls_before = {key: counts for key, (_, counts) in parts.items()}
        self._sorted: dict[tuple[int, int | None, int | None, int], list[float]] = {}

    @property
    def measured_s(self) -> float:
        """The time of a step: the mean over the steps of a rank, and over ranks."""
        return self._mean({rank: steps[-1].end_s + self._shift[rank] for rank, steps in self._steps.items()})

    def _mean(self, ends: Mapping[int, float]) -> float:
        total = sum(end - self._steps[rank][0].start_s - self._shift[rank] for rank, end in ends.items())
        return total / len(ends) / len(self._joined.common)

    def run(self, work: Work) -> float | None:
        """The time of a step with this work; None if ranks wait for each other for ever."""
        joined = self._joined
        clocks = {rank: steps[0].start_s + self._shift[rank] for rank, steps in self._steps.items()}
        programs = {rank: self._program(rank) for rank in self._steps}
        places = dict.fromkeys(programs, 0)
        arrived: dict[int, float] = {}
        waiting_for = {number: len(joined.joins[number].arrivals) for number in self._called}
        ends: dict[int, float] = {}

        def end_of(number: int) -> float | None:
            pending = [number]  # a list, as thousands may not have been waited for yet
            while pending:
                current = pending[-1]
                before = self._before.get(current)
                if current in ends:
                    pending.pop()
                elif current not in self._called:  # it was called before the first of these steps
                    ends[current] = self._ends[current]
                elif waiting_for[current]:
                    return None
                elif before is not None and before not in ends:
                    pending.append(before)
                else:
                    start = arrived[current] if before is None else max(arrived[current], ends[before])
                    ends[current] = start + self._service[current]
            return ends[number]

        moved = True
        while moved:
            moved = False
            for rank, program in programs.items():
                while places[rank] < len(program):
                    step, index, gap_s = program[places[rank]]
                    segment = step.segments[index]
                    number = None if segment.collective is None else joined.join_of.get((rank, segment.collective))
                    if segment.event == "wait" and number is not None:
                        end = end_of(number)
                        if end is None:
                            break
                        tail = max(0.0, joined.joins[number].ends[rank] - self._ends[number]) + segment.after_s
                        clocks[rank] += work(rank, step, index)
                        clocks[rank] = max(clocks[rank], end + tail) if end > clocks[rank] - tail else clocks[rank]
                    else:
                        clocks[rank] += work(rank, step, index) if segment.event != "wait" else sum(segment.seconds)
                    if segment.event == "call" and number is not None:
                        arrived[number] = max(arrived.get(number, clocks[rank]), clocks[rank])
                        waiting_for[number] -= 1
                    clocks[rank] += gap_s
                    places[rank] += 1
                    moved = True
        if any(places[rank] < len(program) for rank, program in programs.items()):
            return None
        return self._mean(clocks)

    def _program(self, rank: int) -> list[tuple[RankStep, int, float]]:
        """The segments of a rank, each with the time until the next step if it is the last one of its step."""
        steps = self._steps[rank]
        gaps = [later.start_s - step.end_s for step, later in pairwise(steps)] + [0.0]
        return [
            (step, index, gap if index == len(step.segments) - 1 else 0.0)
            for step, gap in zip(steps, gaps, strict=True)
            for index in range(len(step.segments))
        ]

    def without(self, removed: Sequence[tuple[int, Activity]]) -> Work:
        """The work with what ranks have more of in these activities than the others removed."""
        places = {(rank, ACTIVITIES.index(name)) for rank, name in removed}

        def work(rank: int, step: RankStep, index: int) -> float:
            segment = step.segments[index]
            seconds = list(segment.seconds)
            for place in range(len(ACTIVITIES)):
                if (rank, place) in places:
                    seconds[place] = min(seconds[place], self._usual(rank, step, index, place))
            return sum(seconds) - (seconds[COMMUNICATION] if segment.event == "wait" else 0.0)

        return work

    def _usual(self, rank: int, step: RankStep, index: int, place: int) -> float:
        """The seconds of an activity in the same segment of other ranks; by share, where those have other segments."""
        rows, calls = self._between_calls[rank, step.number], self._calls_before[rank, step.number][index]
        mine = rows[calls][place]
        if mine <= 0.0:
            return step.segments[index].seconds[place]
        same = self._ordered(step.number, len(rows), calls, place)
        if len(same) > 1:
            share = _median_of_others(same, mine) / mine
        else:
            total = sum(row[place] for row in rows)
            share = _median_of_others(self._ordered(step.number, None, None, place), total) / total
        return step.segments[index].seconds[place] * min(1.0, share)

    def _ordered(self, step: int, rows: int | None, calls: int | None, place: int) -> list[float]:
        """The seconds of an activity of all ranks, in order: after so many calls on ranks with so many `rows` in this
        step, or in the whole step."""
        key = step, rows, calls, place
        if key not in self._sorted:
            self._sorted[key] = sorted(
                sum(row[place] for row in theirs) if calls is None else theirs[calls][place]
                for theirs in (self._between_calls[rank, step] for rank in self._steps)
                if rows in (None, len(theirs))
            )
        return self._sorted[key]


def _seconds_between_calls(step: RankStep) -> tuple[list[list[float]], list[int]]:
    """The seconds of each activity between calls of collectives, and of each segment the calls before it."""
    rows, calls_before = [[0.0] * len(ACTIVITIES)], []
    for segment in step.segments:
        calls_before.append(len(rows) - 1)
        for place, seconds in enumerate(segment.seconds):
            rows[-1][place] += seconds
        if segment.event != "wait":
            rows.append([0.0] * len(ACTIVITIES))
    return rows, calls_before


def _median_of_others(ordered: Sequence[float], own: float) -> float:
    """The median of the values without one that is `own`; 0 if there is no other.

    >>> _median_of_others([1.0, 2.0, 5.0, 9.0], 2.0), _median_of_others([1.0, 2.0, 6.0], 1.0)
    (5.0, 4.0)
    """
    count = len(ordered) - 1
    if count < 1:
        return 0.0
    left_out = bisect_left(ordered, own)
    low, high = ((place + (place >= left_out)) for place in ((count - 1) // 2, count // 2))
    return (ordered[low] + ordered[high]) / 2
