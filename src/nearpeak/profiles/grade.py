"""`grade_profile`: how far a profile can be trusted, as one letter with its reasons. Every report asks here.

Each fact has its own letter, and the worst is the profile's:

    fact                                              A          B          C          F
    threads waited for a core, with others at work    <= 2 %     <= 5 %     <= 25 %    more
    other processes on the cores of a CPU's step      <= 10 %    <= 25 %    <= 60 %    more
    time without CPU quota                            <= 1 %     <= 5 %     more       -
    another process computes on the GPU, or it is hot            yes
    clean steps: slowest less fastest                 <= 5 %     <= 20 %    more       -
      over the root of their number, if alone                    <= 20 %    more       -
    steps after the recording, against those before   <= 3 %     <= 10 %    more       -
    fewer than 3 clean steps, or none                            yes
    ops found again in the traced step                >= 99 %    >= 95 %    >= 50 %    less
    kernel time with a bound                          >= 98 %    >= 90 %    >= 50 %    less
    launches of the step whose kernels are lost       0          <= 1 %     <= 10 %    more
    step under the profiler / clean step              <= 2       <= 4       more       -
    a calibration that contradicts itself                                   yes
    a part of the waterfall below zero                                                 yes

Below `LEAST_TRUSTED`, reports give the reason first, and neither a multiple of the ideal nor savings: these are ratios
and differences of figures that are doubtful themselves.

The wall time is a median, so that a spread is a doubt and not an error. The profiler slows a step down; kernel times on
a GPU stay correct, those on a CPU are scaled down, and idle time has no such correction.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from nearpeak.units import percent, seconds, significant

if TYPE_CHECKING:
    from nearpeak.profiles.profile import Profile

Letter = Literal["A", "B", "C", "F"]

LEAST_TRUSTED: Letter = "B"
"""The last grade with a multiple of the ideal and with savings."""
MIN_STEPS = 3
"""Fewer steps say little about the spread."""
WAITED = (0.02, 0.05, 0.25)
"""A step may take twice as much longer: the threads of an op wait for the last of them."""
OTHERS = (0.10, 0.25, 0.60)
"""Other work slows a CPU's step down through the memory and the caches too, without a wait."""
OWN_WORK = 0.05
"""Where others use less than this share of the cores, threads wait for each other: that is the step itself."""
BUSY_GPU = 0.90
"""A GPU that is busy for this share of the step does not wait for its host."""
THROTTLED = (0.01, 0.05)
SPREAD = (0.05, 0.20)
LATER = (0.03, 0.10)
"""A GPU slows down within a second or so to the clock that its power limit lets it sustain."""
MATCHED = (0.99, 0.95, 0.50)
MODELED = (0.98, 0.90, 0.50)
LOST = (0.0, 0.01, 0.10)
STRETCH = (2.0, 4.0)
_SLOWED = ("thermal (software)", "thermal (hardware)", "hardware slowdown", "power brake")
"""What the driver of a GPU says of one that is not well. A power limit is part of the machine."""

_WRONG_BOUND = "a bound of nearpeak's is wrong"
QUIET = "Measure again while nothing else runs."
MORE_STEPS = "Let it run for more steps: they differ from each other."
CALIBRATE = "Measure this machine again while nothing else runs: nearpeak machine --calibrate."


@dataclass(frozen=True, slots=True, kw_only=True)
class Grade:
    """A letter, why it is not an A, the worst reason first, and what to do about that."""

    letter: Letter
    reasons: tuple[str, ...] = ()
    remedy: str = ""

    @property
    def is_trusted(self) -> bool:
        """Whether a multiple of the ideal and savings may be told."""
        return self.letter <= LEAST_TRUSTED


@dataclass(frozen=True, slots=True)
class _Doubt:
    letter: Letter
    reason: str
    remedy: str = ""


def grade_profile(profile: Profile) -> Grade:
    """The grade of a measurement."""
    doubts = sorted(_doubts(profile), key=lambda doubt: doubt.letter, reverse=True)
    if not doubts:
        return Grade(letter="A")
    worst = [doubt for doubt in doubts if doubt.letter == doubts[0].letter]
    remedy = next((doubt.remedy for doubt in worst if doubt.remedy), "")
    return Grade(letter=doubts[0].letter, reasons=tuple(doubt.reason for doubt in doubts), remedy=remedy)


def broken_reason(profile: Profile) -> str:
    """What a part of the waterfall below zero means: kernels ran faster than their bounds.

    Bounds from ceilings that were measured here are too high where these are too low, which is the likelier cause.
    """
    return "measure this machine again" if profile.how == "measured" else _WRONG_BOUND


def _doubts(profile: Profile) -> Iterator[_Doubt]:
    """The facts that are worse than A; of equal letters, what concerns everything else comes first."""
    yield from _machine_doubts(profile)
    yield from _recording_doubts(profile)
    if profile.steps == 0:
        yield _Doubt("B", "no clean steps: the profiler is part of the wall time")
    elif profile.steps < MIN_STEPS:
        yield _Doubt("B", f"only {profile.steps} clean step{'' if profile.steps == 1 else 's'}")
    spread = profile.spread
    if spread is not None and spread > SPREAD[0]:
        if _was_alone(profile):  # steps differ by themselves: what counts is how well their median is known
            letter: Letter = "B" if spread / math.sqrt(profile.steps) <= SPREAD[1] else "C"
            yield _Doubt(letter, f"steps {percent(spread, 0)} apart, while nothing else ran", MORE_STEPS)
        else:
            yield _Doubt(_letter_above(spread, SPREAD), f"steps {percent(spread, 0)} apart", QUIET)
    if profile.later_s is not None and abs(profile.later_s / profile.wall_s - 1.0) > LATER[0]:
        change = profile.later_s / profile.wall_s - 1.0
        more = "longer" if change > 0.0 else "less"
        reason = f"later steps took {percent(abs(change), 0)} {more}, {seconds(profile.later_s)}"
        yield _Doubt(_letter_above(abs(change), LATER), reason, "Profile later steps: the first ones differ from them.")
    if profile.profiled_s is not None and profile.profiled_s > STRETCH[0] * profile.wall_s > 0.0:
        stretch = profile.profiled_s / profile.wall_s
        yield _Doubt(_letter_above(stretch, STRETCH), f"{significant(stretch, 2)} x as long under the profiler")


def _was_alone(profile: Profile) -> bool:
    """Whether it was seen that nothing else used the cores."""
    conditions = profile.conditions
    if conditions is None or conditions.waited_share is None or conditions.others_share is None:
        return False
    return conditions.waited_share <= WAITED[0] and conditions.others_share <= OWN_WORK


def _machine_doubts(profile: Profile) -> Iterator[_Doubt]:
    """Other work on the machine, and ceilings that were not those of the machine."""
    conditions, ceilings = profile.conditions, profile.ceilings
    if conditions is not None:
        waited, others = conditions.waited_share, conditions.others_share
        if waited is not None and waited > WAITED[0] and (others is None or others > OWN_WORK):
            idle = profile.waterfall.seconds("idle") / profile.wall_s
            busy = profile.device != "cpu" and idle < 1.0 - BUSY_GPU
            letter = "B" if busy else _letter_above(waited, WAITED)
            yield _Doubt(
                letter,
                f"other work held the cores for {percent(waited, 0)} of the time that the step needed them",
                QUIET,
            )
        elif others is not None and others > OTHERS[0] and profile.device == "cpu":
            yield _Doubt(_letter_above(others, OTHERS), f"other work used {percent(others, 0)} of the cores", QUIET)
        if conditions.throttled_share is not None and conditions.throttled_share > THROTTLED[0]:
            reason = f"its CPU quota was used up for {percent(conditions.throttled_share, 0)} of the time"
            yield _Doubt(
                _letter_above(conditions.throttled_share, THROTTLED), reason, "Raise the quota of the container."
            )
        if conditions.gpu_processes is not None and conditions.gpu_processes > 1:
            yield _Doubt("B", f"{conditions.gpu_processes} processes computed on the GPU", QUIET)
        for reason in conditions.throttle:
            if reason in _SLOWED:
                yield _Doubt("B", f"the GPU was slowed down: {reason}")
    for part in profile.waterfall.broken:
        reason = f"{part.name} is below zero: {broken_reason(profile)}"
        if profile.how == "measured" and not (ceilings is not None and ceilings.doubts):
            reason += f"; if it stays so, {_WRONG_BOUND}"
        yield _Doubt("F", reason, CALIBRATE if profile.how == "measured" else "")
    if ceilings is not None and ceilings.doubts:
        yield _Doubt("C", f"the calibration of this machine is doubtful: {ceilings.doubts[0]}", CALIBRATE)


def _recording_doubts(profile: Profile) -> Iterator[_Doubt]:
    """What the recording lacks, and what of it could not be understood."""
    completeness = profile.completeness
    if completeness is not None and not completeness.complete:
        lost = completeness.lost_share
        letter: Letter = "C" if lost is None else _letter_above(max(lost, 1e-9), LOST)
        if any(loss.count is None for loss in completeness.of_step):
            letter = max(letter, "C")
        reason = completeness.of_step[0].text.strip().removesuffix(".")
        yield _Doubt(letter, f"the recording is incomplete: {reason[:1].lower() + reason[1:]}", "Profile it again.")
    if profile.matched is not None and profile.matched < MATCHED[0]:
        yield _Doubt(_letter_below(profile.matched, MATCHED), f"{percent(profile.matched)} of the ops found again")
    if profile.modeled_share < MODELED[0]:
        reason = f"{percent(profile.modeled_share)} of the time has a bound"
        yield _Doubt(_letter_below(profile.modeled_share, MODELED), reason)


def _letter_above(value: float, limits: Sequence[float]) -> Letter:
    """The letter of a share that should be small: A up to the first limit, F above the third."""
    letters: tuple[Letter, ...] = ("A", "B", "C", "F")
    return letters[sum(value > limit for limit in limits)]


def _letter_below(value: float, limits: Sequence[float]) -> Letter:
    """The letter of a share that should be large: A from the first limit on, F below the third."""
    letters: tuple[Letter, ...] = ("A", "B", "C", "F")
    return letters[sum(value < limit for limit in limits)]
