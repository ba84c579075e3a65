"""`grade_profile`: how far a profile can be trusted, as one letter with its reasons.

Each fact has its own letter, and the worst is the profile's:

    fact                                   A          B          C          F
    clean steps: slowest less fastest      <= 5 %     <= 20 %    more       -
    ops found again in the traced step     >= 99 %    >= 95 %    >= 50 %    less
    kernel time with a bound               >= 98 %    >= 90 %    >= 50 %    less
    step under the profiler / clean step   <= 2       <= 4       more       -
    fewer than 3 clean steps, or none                 B
    a part of the waterfall below zero                                      F

The wall time is a median, so a large spread is a doubt and not an error. The profiler slows a step down; kernel times
on a GPU stay correct, those on a CPU are scaled down, and idle time has no such correction.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from nearpeak.profiles.profile import Profile
from nearpeak.units import percent, significant

Letter = Literal["A", "B", "C", "F"]

MIN_STEPS = 3
"""Fewer steps say little about the spread."""
SPREAD = (0.05, 0.20)
MATCHED = (0.99, 0.95, 0.50)
MODELED = (0.98, 0.90, 0.50)
STRETCH = (2.0, 4.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grade:
    """A letter, and why it is not an A, the worst reason first."""

    letter: Letter
    reasons: tuple[str, ...] = ()


def grade_profile(profile: Profile) -> Grade:
    """The grade of a measurement."""
    doubts = sorted(_doubts(profile), key=lambda doubt: doubt[0], reverse=True)
    return Grade(letter=doubts[0][0] if doubts else "A", reasons=tuple(reason for _, reason in doubts))


def _doubts(profile: Profile) -> Iterator[tuple[Letter, str]]:
    """The facts that are worse than A, with their letters."""
    for part in profile.waterfall.broken:
        yield "F", f"{part.name} is below zero"
    if profile.steps == 0:
        yield "B", "no clean steps: the profiler is part of the wall time"
    elif profile.steps < MIN_STEPS:
        yield "B", f"only {profile.steps} clean step{'' if profile.steps == 1 else 's'}"
    if profile.spread is not None and profile.spread > SPREAD[0]:
        yield ("B" if profile.spread <= SPREAD[1] else "C"), f"steps {percent(profile.spread, 0)} apart"
    if profile.matched is not None and profile.matched < MATCHED[0]:
        yield _letter_of_share(profile.matched, MATCHED), f"{percent(profile.matched)} of the ops found again"
    if profile.modeled_share < MODELED[0]:
        yield (
            _letter_of_share(profile.modeled_share, MODELED),
            f"{percent(profile.modeled_share)} of the time has a bound",
        )
    if profile.profiled_s is not None and profile.profiled_s > STRETCH[0] * profile.wall_s > 0.0:
        stretch = profile.profiled_s / profile.wall_s
        yield ("B" if stretch <= STRETCH[1] else "C"), f"{significant(stretch, 2)} x as long under the profiler"


def _letter_of_share(share: float, thresholds: tuple[float, float, float]) -> Letter:
    return "B" if share >= thresholds[1] else "C" if share >= thresholds[2] else "F"
