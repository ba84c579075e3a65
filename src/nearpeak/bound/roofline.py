"""`Bound`: the least time that `Work` takes on a `Machine`, and what limits it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from nearpeak.errors import UsageError
from nearpeak.machines.model import Achievable, Machine, Theoretical
from nearpeak.work.model import Work

Limiter = Literal["memory", "compute", "launch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """Seconds for each resource; they overlap, so the longest is the bound."""

    memory_seconds: float
    compute_seconds: float
    launch_seconds: float
    intensity: float | None
    """FLOP per byte; None where no byte moves."""

    @property
    def seconds(self) -> float:
        """The roofline: no run of this work on this machine is faster."""
        return max(self.memory_seconds, self.compute_seconds, self.launch_seconds)

    @property
    def limiter(self) -> Limiter:
        """The resource that sets `seconds`."""
        if self.launch_seconds >= max(self.memory_seconds, self.compute_seconds):
            return "launch"
        return "memory" if self.memory_seconds >= self.compute_seconds else "compute"


def bound(work: Work, machine: Machine, *, ceilings: Literal["achievable", "theoretical"] = "achievable") -> Bound:
    """What `machine` allows for `work`, against its achievable or its theoretical ceilings.

    Matrix work of different dtypes runs one after the other on the same engine; vector work runs beside it.
    """
    limits: Achievable | Theoretical | None = machine.achievable if ceilings == "achievable" else machine.theoretical
    if limits is None:
        raise UsageError(f"{machine.name} has no {ceilings} ceilings. Run `nearpeak machine --calibrate` on it.")
    matrix = sum(flops / limits.peak(dtype) for dtype, flops in work.flops.items())
    vector = sum(flops / limits.vector.get(dtype, limits.peak(dtype)) for dtype, flops in work.vector_flops.items())
    launch = limits.launch.in_graph or limits.launch.host_call or 0.0 if isinstance(limits, Achievable) else 0.0
    flops = sum(work.flops.values()) + sum(work.vector_flops.values())
    return Bound(
        memory_seconds=work.bytes / limits.bandwidth,
        compute_seconds=max(matrix, vector),
        launch_seconds=launch,
        intensity=flops / work.bytes if work.bytes else None,
    )
