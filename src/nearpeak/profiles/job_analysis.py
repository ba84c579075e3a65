"""`analyze_job`: the ranks of a job side by side, its collectives, which rank is late, and why.

A collective ends on all of its ranks at once, and begins when the last of them is there. So the time of a rank in it is
a wait for the last rank to arrive, the transfer, and a tail. A rank is late if it comes last by more than ranks and
steps scatter, and if it also did more of its own than the others did: that which it did more of is the cause. Where no
one thing explains most of it, the cause cannot be told.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from statistics import median

from nearpeak.profiles.job import JobCollective, JobProfile, LateCause, LateRank, Pattern, RankParts, RankReport
from nearpeak.profiles.job_replay import replay_job
from nearpeak.profiles.rank_joins import JobTimelines, Join, join_timelines
from nearpeak.profiles.rank_timeline import ACTIVITIES, Activity, RankStep
from nearpeak.units import percent
from nearpeak.units import seconds as seconds_text

LEAST_LATE_SHARE = 0.04
"""Of a step: a rank that is late by less is not accused."""
LEAST_BURST_SHARE = 0.1
"""Of a step, for a rank that is late in some steps."""
STEADY_SHARE = 0.7
"""Of the steps in which a rank must be late, to be late always."""
EXPLAINED_SHARE = 0.5
"""Of its lateness that a cause must explain."""
_NOISE_FACTOR = 1.5
_PREEMPTIBLE: tuple[Activity, ...] = ("ops", "garbage collection", "launching", "python")
"""Activities that take longer where other work has the processor; a sleep for input does not."""
LOWER_CLOCK = 0.97
MORE_WORK = 1.02


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
    said = list(notes)
    if not joined.is_aligned:
        said.append("The clocks of the ranks cannot be aligned: which rank is late cannot be told.")
    if joined.joins and joined.matched < 0.9:
        said.append(f"{percent(joined.matched)} of the collectives were found on all ranks of their group.")
    if not joined.joins:
        said.append("No collective was found on two ranks: who waits for whom cannot be told.")
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
        self._joined, self._steps, self._step_s, self._reports = joined, steps, step_s, reports
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
        self._own = {
            (rank, step.number): max(0.0, step.own_s - (step.preempted_s or 0.0))
            for rank in self._ranks
            for step in steps[rank]
        }
        # Where the time is known that other work took from a rank, what is left of its own is exact. Its arrivals
        # are not: a rank that waits for a processor is last as well.
        is_exact = all(step.preempted_s is not None for rank in self._ranks for step in steps[rank])
        self._late = {
            key: max(0.0, excess if is_exact else min(self._caused[key], excess))
            for key, own in self._own.items()
            if (excess := own - self._of_others(key, self._own)) is not None
        }

    def waited(self, rank: int, step: int) -> float:
        """The time from the arrivals of a rank to those of the last one."""
        return self._waited[rank, step]

    def _of_others(self, key: tuple[int, int], values: Mapping[tuple[int, int], float]) -> float:
        rank, step = key
        return median([values[other, step] for other in self._ranks if other != rank] or [0.0])

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
            excess = [self._own[rank, step] - self._of_others((rank, step), self._own) for step in self._joined.common]
            middle = median(excess)
            spreads.append(1.48 * median([abs(value - middle) for value in excess]))
        return median(spreads)

    def _always(self, rank: int, noise: float) -> LateRank | None:
        late = {step: self._late[rank, step] for step in self._joined.common}
        usual = median(late.values())
        # The error of a median of n values is about 1.25 of their scatter over the root of n.
        least = max(LEAST_LATE_SHARE * self._step_s, _NOISE_FACTOR * 1.25 * noise / self._count**0.5 * 2.0)
        steps = [step for step, seconds in late.items() if seconds >= usual / 3]
        if usual < least or len(steps) < STEADY_SHARE * self._count or not self._is_awaited(rank, steps):
            return None
        return self._late_rank(rank, steps, usual, "always")

    def _is_awaited(self, rank: int, steps: Sequence[int]) -> bool:
        """Whether the others wait for it in these steps, and for nobody longer."""
        caused = {each: sum(self._caused[each, step] for step in steps) for each in self._ranks}
        return caused[rank] > 0.0 and caused[rank] >= max(caused.values())

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

    def _cause(self, rank: int, steps: Sequence[int]) -> tuple[LateCause, str]:
        """What most of its lateness in these steps comes from, and the evidence."""
        numbered = {
            each: {step.number: step for step in self._steps[each] if step.number in set(steps)} for each in self._ranks
        }
        seconds = {
            (each, name): median([_undisturbed(step, name) for step in numbered[each].values()])
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


def _undisturbed(step: RankStep, activity: Activity) -> float:
    """The seconds of an activity without those in which other work had the processor."""
    seconds = step.seconds(activity)
    if not step.preempted_s or activity not in _PREEMPTIBLE:
        return seconds
    total = sum(step.seconds(name) for name in _PREEMPTIBLE)
    return seconds * max(0.0, 1.0 - step.preempted_s / total) if total > 0.0 else seconds


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
