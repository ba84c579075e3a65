"""`with_repeats`: a profile whose ops have their times in all profiled steps, not in one alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from nearpeak.diagnose.profile import DeviceKernel, Profile


def with_repeats(profile: Profile, kernels: Sequence[DeviceKernel], repeats: Sequence[Sequence[float]]) -> Profile:
    """Fills in `typical_s`, `quickest_s` and `slowest_s` of the ops.

    Args:
        profile: One step.
        kernels: What it was made of.
        repeats: Of each kernel, its seconds in all profiled steps.
    """
    count = len(repeats[0]) if repeats else 0
    if count < 2:
        return profile
    totals = [sum(row[step] for row in repeats) for step in range(count)]
    quickest, slowest = totals.index(min(totals)), totals.index(max(totals))
    own: dict[int, float] = {}
    times: dict[int, list[float]] = {}
    for kernel, row in zip(kernels, repeats, strict=True):
        if kernel.op is not None and not kernel.communication:
            own[kernel.op] = own.get(kernel.op, 0.0) + kernel.seconds
            known = times.get(kernel.op)
            times[kernel.op] = list(row) if known is None else [a + b for a, b in zip(known, row, strict=True)]
    ops = list(profile.ops)
    for index, seen in times.items():
        # what ran beside an earlier kernel does not count, in the other steps as little as in this one
        alone = ops[index].measured_s / own[index] if own[index] > 0.0 else 0.0
        ops[index] = replace(
            ops[index],
            typical_s=alone * typical(seen),
            quickest_s=alone * seen[quickest],
            slowest_s=alone * seen[slowest],
        )
    return replace(profile, ops=tuple(ops))


def typical(times: Sequence[float]) -> float:
    """The mean without the least and the most, where there are more than two.

    >>> typical([3.0, 1.0, 90.0, 5.0]), typical([1.0, 2.0])
    (4.0, 1.5)
    """
    ordered = sorted(times)
    return fmean(ordered[1:-1] if len(ordered) > 2 else ordered)
