"""Compiled code leaves its graphs, and the device waits for what the host does in between."""

from __future__ import annotations

from collections.abc import Iterator

from nearpeak.diagnose.examined import Examined
from nearpeak.diagnose.finding import Waste
from nearpeak.diagnose.findings import rule
from nearpeak.diagnose.rules.launch_bound import LEAST, breaks, claimed, clean_seconds, late_launches
from nearpeak.units import seconds

ENQUEUE = 5e-6
"""Seconds of the host for a launch from compiled code, where it was not measured."""


@rule("graph-breaks", needs=["host"])
def graph_breaks(step: Examined) -> Iterator[Waste]:
    """Idle time in which the host was between compiled regions, beyond what launches of one region take."""
    profile = step.profile
    late = late_launches(profile)
    found = breaks(step)
    if step.machine.kind != "gpu" or not found or not late:
        return
    idle_s = sum(cause.seconds for cause in late)
    launch = (step.machine.achievable.launch.enqueue if step.machine.achievable else None) or ENQUEUE
    kernels = sum(op.kernels for op in profile.ops)
    remains_s = max(0.0, kernels * launch - profile.kernel_s)
    saving = clean_seconds(profile, idle_s) - remains_s
    if saving < LEAST * profile.wall_s:
        return
    first = next((item for item in found if item.source), found[0])
    named = "; ".join(f"{item.source or 'an unknown line'} ({item.reason})" for item in found[:3])
    yield Waste(
        title="Compiled code leaves its graphs, and the device waits for what the host does in between.",
        at=None,
        source=first.source,
        idle=claimed(late, saving),
        evidence=f"torch.compile left its graphs at {len(found)} lines: {named}. The device was idle for "
        f"{seconds(idle_s)} of {seconds(profile.wall_s)} because the next kernel was not launched yet.",
        reasoning=f"In one graph the host launches a kernel in {seconds(launch)}. Beside {seconds(profile.kernel_s)} "
        f"of {kernels:,} kernels, {seconds(remains_s)} of waiting remain.",
        remedy="torch.compile(step, fullgraph=True)   # stops at the first break, and says why\n"
        "Take what it names out of the code that is compiled: prints, `.item()`, decisions on values, calls of other "
        "libraries. Then mode='reduce-overhead' records the whole as a CUDA graph.",
    )
