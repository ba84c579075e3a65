"""`StepConditions`: what else the machine did while steps were timed and profiled, and what a lower clock costs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nearpeak._records import Amount, Count, Rate, Share

if TYPE_CHECKING:
    from nearpeak.profiles.profile import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class StepConditions:
    """The state of the host and of the device while steps ran; None where it could not be read."""

    waited_share: Share | None = None
    """Of the time in which threads of the process could have run, the share in which they waited for a core."""
    others_share: Share | None = None
    """Of the time of its cores, the share that other processes used."""
    throttled_share: Share | None = None
    """Of the time, the share in which the CPU quota of its cgroup was used up."""
    clock_hz: Rate | None = None
    """The clock of the GPU's processors during clean steps, the median of its readings."""
    power_watts: Amount | None = None
    """What the GPU drew meanwhile, the median."""
    throttle: tuple[str, ...] = ()
    """The driver's reasons for a lower clock, those that held in a quarter of the readings."""
    gpu_processes: Count | None = None
    """The number of processes that computed on the GPU."""


def worst_conditions(windows: Iterable[StepConditions]) -> StepConditions | None:
    """The conditions of several windows of time as one: of each share the largest; the GPU's are those of the first."""
    found = list(windows)
    if not found:
        return None

    def largest(name: str) -> float | None:
        return max((value for each in found if (value := getattr(each, name)) is not None), default=None)

    first = next((each for each in found if each.clock_hz is not None), found[0])
    return StepConditions(
        waited_share=largest("waited_share"),
        others_share=largest("others_share"),
        throttled_share=largest("throttled_share"),
        clock_hz=first.clock_hz,
        power_watts=first.power_watts,
        throttle=first.throttle,
        gpu_processes=max((each.gpu_processes for each in found if each.gpu_processes is not None), default=None),
    )


def clock_loss_s(profile: Profile) -> float | None:
    """The part of "slow kernels" that a lower clock explains; None if a clock is not known.

    The ceilings were reached at a clock of their own. Kernels that are limited by compute take longer in proportion to
    a lower one, and no kernel loses more to it than it loses at all. Those that are limited by memory do not count.
    """
    share = clock_share(profile)
    if share is None:
        return None
    return sum(
        min(max(0.0, op.lost_s), share * op.measured_s) for op in profile.ops if op.modeled and op.limiter == "compute"
    )


def clock_share(profile: Profile) -> float | None:
    """By what share the clock was below that of the ceilings; None if one of the two is not known."""
    ceilings, conditions = profile.ceilings, profile.conditions
    if ceilings is None or ceilings.clock_hz is None or conditions is None or conditions.clock_hz is None:
        return None
    return max(0.0, 1.0 - conditions.clock_hz / ceilings.clock_hz)
