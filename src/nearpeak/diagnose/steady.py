"""`in_every_step`: whether what was seen in the one profiled step can be in the clean ones too."""

from __future__ import annotations

from nearpeak.diagnose.profile import Profile

PROFILER_PER_OP = 2e-5
"""Seconds that the profiler adds to an op of the host, at most."""


def in_every_step(profile: Profile, seconds: float) -> bool:
    """Whether a stall of the profiled step is not the reason why that step took longer than clean ones.

    A collection, a slow batch or another process may come into one step of many: then the profiled step is longer than
    the clean ones by the stall, and by more than the profiler's own work.
    """
    if profile.profiled_s is None:
        return True
    longer = profile.profiled_s - profile.wall_s - PROFILER_PER_OP * len(profile.ops)
    return longer < 0.5 * seconds


def is_line(where: str) -> bool:
    """Whether a place is a line of code, and no module.

    >>> is_line("train.py:41"), is_line("model.layers.0")
    (True, False)
    """
    return where.rpartition(":")[2].isdigit()
