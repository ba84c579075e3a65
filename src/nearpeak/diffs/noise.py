"""`step_noise`: how far the step times of two runs of the same code may differ. `RunSummary`: what is compared.

The clean steps of a run follow each other and share clock, temperature and memory placement, so their spread says too
little about another run. On an H200, five models in separate processes differed by -0.3 to +0.6 % if steps of the same
numbers were compared, and by up to 3 % if not: clean steps begin when step times have settled, a few steps earlier or
later. Short steps even share the clock of one instant, so that many of them are one sample.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev

from nearpeak.profiles.profile import Profile

GPU_RUN_NOISE = 0.015
"""The largest relative difference of wall times of the same code between processes, on an otherwise unused GPU."""
CPU_RUN_NOISE = 0.10
"""The same for a CPU with other processes. A guess: on a busy machine with two cores they differed by far more, and so
did their steps."""
PROFILED_STEP_NOISE = 0.10
"""The same if the step of a run was one under the profiler."""
SIGNIFICANT_ERRORS = 3.0
"""Standard errors from which a change is significant."""
UNSTEADY_SPREAD = 0.20
"""With a larger spread between clean steps, something else ran in between, and may have run all the time."""
HOST_AHEAD_SHARE = 0.15
"""If the median of the clean steps is further from the wall time, the host did not see when they ended."""
CLOCK_PERIOD_S = 0.1
"""Seconds for which a GPU at its power limit stays at one clock: steps within them are one sample."""
MIN_STEPS = 6
"""With fewer steps, a single slow one moves the median."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """One run, without its ops."""

    source: str
    date: str
    device: str
    machine: str
    how: str
    wall_s: float
    """As in its report: the mean clean step."""
    step_s: float
    """The median clean step, which a slow first step does not move; the wall time if one run does not have it."""
    steps: int
    spread: float | None
    kernel_s: float
    """The typical kernel time of the profiled steps, as ops are compared."""
    flops: float
    peak_bytes: float | None
    """Of memory."""


def summarize_runs(before: Profile, after: Profile) -> tuple[RunSummary, RunSummary]:
    """Both runs, with the median clean step of both or the wall time of both as the time of a step."""
    has_median = all(len(_clean_walls(profile)) >= MIN_STEPS for profile in (before, after))
    first, second = (
        RunSummary(
            source=profile.source,
            date=profile.date,
            device=profile.device,
            machine=profile.machine,
            how=profile.how,
            wall_s=profile.wall_s,
            step_s=median(profile.walls) if has_median else profile.wall_s,
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
    """The largest insignificant change of the step time, as a logarithm."""
    runs = CPU_RUN_NOISE if "cpu" in (before.device, after.device) else GPU_RUN_NOISE
    noise = math.hypot(runs, *(SIGNIFICANT_ERRORS * _step_error(profile) for profile in (before, after)))
    return max(noise, *(profile.spread or 0.0 for profile in (before, after) if is_unsteady(profile)), 0.0)


def is_unsteady(profile: Profile) -> bool:
    """Whether the clean steps are too far apart for one of them to represent the others."""
    return profile.spread is not None and profile.spread > UNSTEADY_SPREAD


def _clean_walls(profile: Profile) -> Sequence[float]:
    """The clean steps, if the host saw the end of each."""
    walls = profile.walls
    return walls if walls and abs(median(walls) - profile.wall_s) <= HOST_AHEAD_SHARE * profile.wall_s else ()


def _step_error(profile: Profile) -> float:
    """The relative standard error of the step time, from the clean steps alone."""
    walls = _clean_walls(profile)
    if not profile.steps:
        return PROFILED_STEP_NOISE / SIGNIFICANT_ERRORS
    if len(walls) < 2:  # only their range is known: for so many steps, three to four standard deviations
        if profile.steps > 1:
            return (profile.spread or 0.0) / 3.0 / math.sqrt(profile.steps)
        return UNSTEADY_SPREAD / SIGNIFICANT_ERRORS / 2
    samples = min(len(walls), max(1.0, sum(walls) / CLOCK_PERIOD_S))
    if len(walls) < MIN_STEPS:
        return stdev(walls) / fmean(walls) / math.sqrt(samples) * (1.0 + 2.0 / len(walls))
    middle = median(walls)
    return 1.2533 * 1.4826 * median(abs(wall - middle) for wall in walls) / middle / math.sqrt(samples)
