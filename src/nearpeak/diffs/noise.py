"""`Run`: what two runs are compared by, and `noise_of`: how far the steps of runs of the same code differ.

The clean steps of a run follow each other: they share clocks, temperature and where memory lies, so how far they differ
says too little about another run. On an H200, five models in separate processes differed by -0.3 to +0.6 % where steps
of the same numbers were compared, and by up to 3 % where they were not; clean steps begin when steps have settled, a
few steps earlier or later. Short steps share even the clock of one instant, so that many of them are one look.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev

from nearpeak.profiles.profile import Profile

GPU_RUN_NOISE = 0.015
"""How much wall times of the same code differ from process to process at most, on a GPU that nobody else uses."""
CPU_RUN_NOISE = 0.10
"""The same of a CPU, which others use too. A guess: on a busy machine of two cores they differed by far more, and so
did their steps."""
PROFILED_STEP_NOISE = 0.10
"""The same where the step of a run was one under the profiler."""
SIGNIFICANT_ERRORS = 3.0
"""Standard errors that a change must be away from none."""
UNSTEADY_SPREAD = 0.20
"""Clean steps that are further apart: something else ran in between, and it may as well have run all the time."""
HOST_AHEAD_SHARE = 0.15
"""Where the median of the clean steps is further from the wall time, the host did not see when they ended."""
CLOCK_PERIOD_S = 0.1
"""Seconds in which a GPU that is at the limit of its power stays at one clock: steps within them are one look at it."""
MIN_STEPS = 6
"""Fewer steps have no middle that a single slow one could not move."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """One run, without its ops."""

    source: str
    date: str
    device: str
    machine: str
    how: str
    wall_s: float
    """As in its report: clean steps over their number."""
    step_s: float
    """The median clean step, which a slow first one does not move; the wall time where one run does not have it."""
    steps: int
    spread: float | None
    kernel_s: float
    """Over all profiled steps, as ops are compared."""
    flops: float
    peak_bytes: float | None
    """Of memory."""


def summarize_runs(before: Profile, after: Profile) -> tuple[RunSummary, RunSummary]:
    """What two runs are compared by: the median clean step of both, or the wall time of both."""
    seen = all(len(_clean_walls(profile)) >= MIN_STEPS for profile in (before, after))
    first, second = (
        RunSummary(
            source=profile.source,
            date=profile.date,
            device=profile.device,
            machine=profile.machine,
            how=profile.how,
            wall_s=profile.wall_s,
            step_s=median(profile.walls) if seen else profile.wall_s,
            steps=profile.steps,
            spread=profile.spread,
            kernel_s=profile.kernel_s + sum(op.compared_s - op.measured_s for op in profile.ops),
            flops=profile.flops,
            peak_bytes=None if profile.memory is None else profile.memory.peak_bytes,
        )
        for profile in (before, after)
    )
    return first, second


def step_noise(before: Profile, after: Profile) -> float:
    """The change of a step's time, as a logarithm, that could be chance."""
    runs = CPU_RUN_NOISE if "cpu" in (before.device, after.device) else GPU_RUN_NOISE
    noise = math.hypot(runs, *(SIGNIFICANT_ERRORS * _step_error(profile) for profile in (before, after)))
    return max(noise, *(profile.spread or 0.0 for profile in (before, after) if is_unsteady(profile)), 0.0)


def is_unsteady(profile: Profile) -> bool:
    """Whether its clean steps are too far apart for one of them to stand for the others."""
    return profile.spread is not None and profile.spread > UNSTEADY_SPREAD


def _clean_walls(profile: Profile) -> Sequence[float]:
    """The clean steps, where they were seen one by one."""
    seen = bool(profile.walls) and abs(median(profile.walls) - profile.wall_s) <= HOST_AHEAD_SHARE * profile.wall_s
    return profile.walls if seen else ()


def _step_error(profile: Profile) -> float:
    """The relative standard error of the time of a step, from its clean steps alone."""
    walls = _clean_walls(profile)
    if not profile.steps:
        return PROFILED_STEP_NOISE / SIGNIFICANT_ERRORS
    if len(walls) < 2:  # only how far they are apart is known: for so many, three to four standard deviations
        return (
            (profile.spread or 0.0) / 3.0 / math.sqrt(profile.steps)
            if profile.steps > 1
            else UNSTEADY_SPREAD / SIGNIFICANT_ERRORS / 2
        )
    looks = min(len(walls), max(1.0, sum(walls) / CLOCK_PERIOD_S))
    if len(walls) < MIN_STEPS:
        return stdev(walls) / fmean(walls) / math.sqrt(looks) * (1.0 + 2.0 / len(walls))
    middle = median(walls)
    return 1.2533 * 1.4826 * median(abs(wall - middle) for wall in walls) / middle / math.sqrt(looks)
