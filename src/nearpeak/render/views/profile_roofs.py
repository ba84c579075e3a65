"""The roofs of a profile's roofline: the ceilings that its bounds are computed with."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from nearpeak.errors import UnknownMachine
from nearpeak.machines import calibrations, catalogue
from nearpeak.machines.machine import Machine
from nearpeak.profiles.profile import Profile, ProfileCeilings, profile_ceilings

BANDWIDTH_TOLERANCE = 0.001
"""The relative difference up to which two bandwidths are of one calibration."""
RATE_TOLERANCE = 0.2
"""The relative difference up to which a rate belongs to a roof."""


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
    """The machine that a profile was measured against, if its calibration is stored here."""
    if profile.how != "measured":
        return None
    for stored in calibrations.load_all():
        achievable = stored.machine.achievable
        if stored.machine.id != profile.machine or achievable is None:
            continue
        ceilings = profile.ceilings
        if ceilings is None or math.isclose(ceilings.bandwidth, achievable.bandwidth, rel_tol=BANDWIDTH_TOLERANCE):
            return stored.machine
    return None


def catalogue_machine(profile: Profile) -> Machine | None:
    """The machine of the catalogue that a profile names; None for one that is only known where it ran."""
    try:
        return catalogue.find(profile.machine)
    except UnknownMachine:
        return None


def profile_roofs(profile: Profile, machine: Machine | None) -> ProfileRoofs:
    """The roofs of a profile.

    A profile that was saved before it had all of its ceilings has at most its bandwidth: `machine` gives the others.
    """
    if profile.ceilings is not None and (profile.ceilings.matrix or profile.ceilings.vector):
        return ProfileRoofs(roofs=_roofs(profile.ceilings), origin=_ORIGINS[profile.how])
    how, known = _machine_ceilings(profile, machine)
    if profile.ceilings is None or profile.how != "measured" or how == "measured":
        if known is None:
            return ProfileRoofs(roofs=(), origin="")
        origin = _ORIGINS["not the measured ones" if profile.how == "measured" != how else how]
        return ProfileRoofs(roofs=_roofs(known), origin=origin)
    measured = ProfileCeilings(bandwidth=profile.ceilings.bandwidth)
    if known is None:
        return ProfileRoofs(roofs=_roofs(measured), origin=_ORIGINS["bandwidth only"])
    engines = [roof for roof in _roofs(known) if roof.kind in ("matrix", "vector")]
    return ProfileRoofs(roofs=(*_roofs(measured), *engines), origin=_ORIGINS["measured bandwidth"])


_ORIGINS: Mapping[str, str] = {
    "measured": "The roofs were measured on this machine.",
    "derated": "The roofs are the datasheet's figures, derated by what good kernels reach.",
    "datasheet": "The roofs are the datasheet's figures.",
    "measured bandwidth": "The bounds are against ceilings that were measured where the profile was made. The roof of "
    "the memory is one of them; the others are the datasheet's figures, derated by what good kernels reach.",
    "not the measured ones": "The bounds are against ceilings that were measured where the profile was made. The roofs "
    "are the datasheet's figures, derated by what good kernels reach.",
    "bandwidth only": "The machine is not in the catalogue: only the bandwidth of its memory is known.",
}


def _machine_ceilings(profile: Profile, machine: Machine | None) -> tuple[str, ProfileCeilings | None]:
    """Ceilings of a machine of the kind that a profile has, and where they come from."""
    if machine is None:
        return "", None
    if profile.how != "datasheet" and machine.achievable is not None:
        return machine.achievable.how, profile_ceilings(machine, "achievable")
    return "datasheet", profile_ceilings(machine, "theoretical")


def _roofs(ceilings: ProfileCeilings) -> tuple[ProfileRoof, ...]:
    memories = [ProfileRoof(kind="memory", name="memory", value=ceilings.bandwidth)]
    if ceilings.cache_bandwidth:
        memories.append(ProfileRoof(kind="cache", name="last-level cache", value=ceilings.cache_bandwidth))
    engines = [*_engine_roofs("matrix", ceilings.matrix), *_engine_roofs("vector", ceilings.vector)]
    return (*memories, *sorted(engines, key=lambda roof: -roof.value))


def _engine_roofs(kind: Literal["matrix", "vector"], rates: Mapping[str, float]) -> list[ProfileRoof]:
    """Dtypes with the same rate share a roof."""
    by_rate: dict[float, list[str]] = {}
    for dtype, rate in rates.items():
        if rate > 0.0:
            by_rate.setdefault(rate, []).append(dtype)
    return [ProfileRoof(kind=kind, name=f"{', '.join(dtypes)} {kind}", value=rate) for rate, dtypes in by_rate.items()]
