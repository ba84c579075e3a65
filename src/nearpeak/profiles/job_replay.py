"""`replay_job`: the recorded steps of a job run again in a model, whole and with one cause removed.

Each rank is a program of its own work, calls and waits. A collective begins when all of its ranks have called it and
those before it in its group are done; a rank that waits for it goes on when it has ended. What is removed from a rank
is set to what the other ranks have in the same place. The replay of the unchanged job must take as long as the job did,
or nothing is predicted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from nearpeak.profiles.job import LateCause, LateRank, WhatIf
from nearpeak.profiles.rank_joins import JobTimelines
from nearpeak.profiles.rank_timeline import ACTIVITIES, COMMUNICATION, Activity, RankStep, Segment
from nearpeak.units import percent

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
    everything = [(rank, name) for rank in joined.timelines for name in ACTIVITIES if name != "communication"]
    add("differences between the ranks", model.without(everything))
    return JobReplay(step_s=base, what_ifs=tuple(what_ifs))


def _own(segment: Segment) -> float:
    """The seconds of a segment before its event; a wait is part of the model."""
    return segment.own_s if segment.event == "wait" else sum(segment.seconds)


class _Model:
    def __init__(self, joined: JobTimelines) -> None:
        self._joined = joined
        common = set(joined.common)
        self._steps = {
            rank: [step for step in timeline.steps if step.number in common]
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
        """The collective before each one in its group, if it was still running when all ranks had called this one."""
        last: dict[tuple[str, int], int] = {}
        for number, join in enumerate(joined.joins):
            lane = join.facts.group, join.facts.stream
            start = join.start
            if lane in last and joined.joins[last[lane]].end > start:
                self._before[number] = last[lane]
                start = joined.joins[last[lane]].end
            last[lane] = number
            self._service[number] = max(0.0, join.end - start)
        self._medians: dict[tuple[int, int, int, str], float] = {}

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
        waiting_for = {
            number: sum(1 for rank in join.arrivals)
            for number, join in enumerate(joined.joins)
            if number in self._called
        }
        ends: dict[int, float] = {}

        def end_of(number: int) -> float | None:
            if number not in self._called:  # it was called before the first of these steps
                return joined.joins[number].end
            if number in ends:
                return ends[number]
            if waiting_for[number]:
                return None
            before = self._before.get(number)
            start = arrived[number]
            if before is not None:
                earlier = end_of(before)
                if earlier is None:
                    return None
                start = max(start, earlier)
            ends[number] = start + self._service[number]
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
                        tail = max(0.0, joined.joins[number].ends[rank] - joined.joins[number].end) + segment.after_s
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
        key = rank, step.number, index, ACTIVITIES[place]
        if key not in self._medians:
            others = [
                other
                for each, steps in self._steps.items()
                if each != rank
                for other in steps
                if other.number == step.number
            ]
            events = [segment.event for segment in step.segments if segment.event != "wait"]
            same = [
                other
                for other in others
                if [segment.event for segment in other.segments if segment.event != "wait"] == events
            ]
            calls = sum(segment.event != "wait" for segment in step.segments[:index])
            mine = _between_calls(step, calls, place)
            if same:
                theirs = median([_between_calls(other, calls, place) for other in same])
            else:
                total = sum(segment.seconds[place] for segment in step.segments)
                usual = median([sum(segment.seconds[place] for segment in other.segments) for other in others])
                theirs = mine * min(1.0, usual / total) if total > 0.0 else 0.0
            share = min(1.0, theirs / mine) if mine > 0.0 else 1.0
            self._medians[key] = step.segments[index].seconds[place] * share
        return self._medians[key]


def _between_calls(step: RankStep, calls: int, place: int) -> float:
    """The seconds of an activity after so many calls of collectives, up to the next one."""
    total, seen = 0.0, 0
    for segment in step.segments:
        if seen == calls:
            total += segment.seconds[place]
        seen += segment.event != "wait"
    return total
