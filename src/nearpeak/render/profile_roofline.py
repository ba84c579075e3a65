"""The roofline of a profile as a picture: the rates that its ops reached, under the ceilings that they are bound by."""

from __future__ import annotations

from nearpeak.diagnose.profile import Profile
from nearpeak.errors import UsageError
from nearpeak.machines.model import Machine
from nearpeak.render.html.markup import visible
from nearpeak.render.html.roofs import NEAR, roofs_of
from nearpeak.render.profile_card import verdict
from nearpeak.render.roofline import Wording, drawn
from nearpeak.render.roofline_points import Counted, Roof, points_of
from nearpeak.render.scene import Scene

LEAST_SHARE = 1e-3
"""Of the kernel time. Ops that take less would stretch the axes, and their circles could not be seen."""


def profile_roofline(profile: Profile, machine: Machine | None) -> Scene:
    """Each point is at the FLOP/s that were measured; how far below the roof it is, is what it loses."""
    found = roofs_of(profile, machine)
    levels = {roof.name: roof.value for roof in found.roofs if roof.kind in ("memory", "cache")}
    if "memory" not in levels:
        raise UsageError(
            f"There is no roofline for {visible(profile.machine, 60)}: its ceilings are not in the profile, not in "
            "the catalogue and not calibrated here."
        )
    counted = [
        Counted(op=op, seconds=op.measured_s, bytes=op.bytes) for op in profile.ops if op.modelled and op.measured_s > 0
    ]
    told = {op.flops / op.bound_s for op in profile.ops if op.limiter == "compute" and op.bound_s}
    ceilings = [
        Roof(
            name=roof.name,
            rate=roof.value,
            used=any(abs(rate / roof.value - 1.0) < NEAR / 2 for rate in told),
        )
        for roof in found.roofs
        if roof.kind in ("matrix", "vector")
    ]
    points = [point for point in points_of(counted, profile.kernel_s) if point.share >= LEAST_SHARE]
    name = visible(profile.source.rpartition("/")[2], 60)
    wording = Wording(
        title=f"Roofline of a step of {name}",
        subtitle=f"{visible(profile.device, 40)}: {verdict(profile)}",
        described=f"Roofline of a step of {name}: FLOP per byte against FLOP per second as measured.",
        rate="FLOP/s as measured",
        time="kernel time",
    )
    return drawn(points, levels, ceilings, wording)
