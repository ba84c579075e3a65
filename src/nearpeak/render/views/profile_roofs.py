"""The roofs of a profile's roofline: the ceilings of the machine that its bounds are against."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from nearpeak.errors import UnknownMachine
from nearpeak.machines import calibrations, catalogue
from nearpeak.machines.machine import Achievable, Machine, Theoretical
from nearpeak.profiles.profile import Profile

BANDWIDTH_TOLERANCE = 0.001
"""How far two bandwidths of one calibration may be apart, relatively."""
RATE_TOLERANCE = 0.2
"""How far a rate may be from the datasheet's derated one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRoof:
    """A ceiling: bytes/s of a memory, or FLOP/s of an engine for some dtypes."""

    kind: Literal["memory", "cache", "matrix", "vector"]
    name: str
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRoofs:
    """The roofs, the memories first, then the engines from the fastest; and where their figures come from."""

    roofs: tuple[ProfileRoof, ...]
    origin: str


def calibrated_machine(profile: Profile) -> Machine | None:
    """The machine with the ceilings that the profile's bounds are against, where its calibration is kept here."""
    if profile.how != "measured":
        return None
    memory = _roofs_from_rates(profile).get("memory")
    for stored in calibrations.load_all():
        ceilings = stored.machine.achievable
        if stored.machine.id != profile.machine or ceilings is None:
            continue
        if memory is None or math.isclose(memory.value, ceilings.bandwidth, rel_tol=BANDWIDTH_TOLERANCE):
            return stored.machine
    return None


def catalogue_machine(profile: Profile) -> Machine | None:
    """The machine of the catalogue that a profile names; None for one that is only known where it ran."""
    try:
        return catalogue.find(profile.machine)
    except UnknownMachine:
        return None


def profile_roofs(profile: Profile, machine: Machine | None) -> ProfileRoofs:
    """The roofs that the profile's bounds are against, as far as they are known.

    A catalogue has no measured figures. Where those of the profile were measured, its bandwidth is told by its rates,
    and the rates of products by the bounds of those that compute limits.
    """
    limits = None if machine is None else _ceilings(profile, machine)
    how = limits.how if isinstance(limits, Achievable) else "datasheet"
    own = _roofs_from_rates(profile)
    if limits is None:
        return ProfileRoofs(roofs=tuple(own.values()), origin=_ORIGINS["own"] if own else "")
    roofs = [ProfileRoof(kind="memory", name="memory", value=limits.bandwidth)]
    cache = limits.cache_bandwidth if isinstance(limits, Achievable) else None
    if cache:
        roofs.append(ProfileRoof(kind="cache", name="last-level cache", value=cache))
    engines = [*_engine_roofs("matrix", limits.matrix), *_engine_roofs("vector", limits.vector)]
    origin = _ORIGINS[how]
    if profile.how == "measured" != how:
        roofs = [own["memory"]] if "memory" in own else roofs
        engines = _rates_from_bounds(profile, engines)
        origin = _ORIGINS["mixed" if "memory" in own else "other"]
    return ProfileRoofs(roofs=(*roofs, *sorted(engines, key=lambda roof: -roof.value)), origin=origin)


_ORIGINS: Mapping[str, str] = {
    "measured": "The roofs were measured on this machine.",
    "derated": "The roofs are the datasheet's figures, derated by what good kernels reach.",
    "datasheet": "The roofs are the datasheet's figures.",
    "mixed": "The bounds are against ceilings that were measured where the profile was made. The roofs of the memory "
    "and of the products of this step are those; others are the datasheet's figures, derated by what good kernels "
    "reach.",
    "other": "The bounds are against ceilings that were measured where the profile was made. The roofs are the "
    "datasheet's figures, derated by what good kernels reach.",
    "own": "The machine is not in the catalogue: the roofs are those that the rates of the profile tell.",
}


def _rates_from_bounds(profile: Profile, engines: Sequence[ProfileRoof]) -> list[ProfileRoof]:
    """The roofs of products at the rates that bounds are against, where it is plain which roof a rate is."""
    rates: dict[float, int] = {}
    for op in profile.ops:
        if op.family == "matrix" and op.limiter == "compute" and op.bound_s > 0.0:
            rate = float(f"{op.flops / op.bound_s:.5e}")
            rates[rate] = rates.get(rate, 0) + 1
    found = list(engines)
    for rate, _ in sorted(rates.items(), key=lambda item: item[1]):  # the most frequent one stays
        near = [number for number, roof in enumerate(engines) if abs(rate / roof.value - 1.0) < RATE_TOLERANCE]
        if len(near) == 1:
            found[near[0]] = replace(engines[near[0]], value=rate)
    return found


def _ceilings(profile: Profile, machine: Machine) -> Achievable | Theoretical | None:
    if profile.how == "datasheet":
        return machine.theoretical
    return machine.achievable or machine.theoretical


def _roofs_from_rates(profile: Profile) -> dict[str, ProfileRoof]:
    """What shares of ceilings tell about these: a rate over its share."""
    rates = profile.rates
    if rates is None or profile.how == "datasheet":
        return {}
    found = {}
    if rates.bandwidth_share:
        found["memory"] = ProfileRoof(kind="memory", name="memory", value=rates.bytes_per_s / rates.bandwidth_share)
    if rates.compute_share:
        value = rates.flops_per_s / rates.compute_share
        found["matrix"] = ProfileRoof(kind="matrix", name="products of this step", value=value)
    return found


def _engine_roofs(kind: Literal["matrix", "vector"], rates: Mapping[str, float]) -> list[ProfileRoof]:
    """Dtypes with the same rate share a roof."""
    by_rate: dict[float, list[str]] = {}
    for dtype, rate in rates.items():
        if rate > 0.0:
            by_rate.setdefault(rate, []).append(dtype)
    return [ProfileRoof(kind=kind, name=f"{', '.join(dtypes)} {kind}", value=rate) for rate, dtypes in by_rate.items()]
