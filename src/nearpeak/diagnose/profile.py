"""`Profile`: a step with measured time per op beside its bounds; what every report of a run is made from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from nearpeak import forms
from nearpeak.bound.estimate import Estimate, EstimatedOp
from nearpeak.diagnose.compiler import CompilerFacts
from nearpeak.diagnose.finding import Finding
from nearpeak.diagnose.fused import fused_seconds
from nearpeak.diagnose.idle import Gap, Idle, IdleCause
from nearpeak.diagnose.intervals import Interval, charges, length
from nearpeak.diagnose.memory import Memory
from nearpeak.diagnose.rates import Rates
from nearpeak.diagnose.waterfall import Waterfall, waterfall
from nearpeak.units import seconds as seconds_text
from nearpeak.work.quick import quick

SCHEMA = 2
"""Raised whenever the meaning of a saved field changes."""


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceKernel:
    """Something that ran on the device, and the index of the op that launched it."""

    name: str
    start_s: float
    """From the start of the profiled step."""
    seconds: float
    op: int | None
    communication: bool = False
    stream: int = 0

    @property
    def interval(self) -> Interval:
        """From when to when it ran."""
        return self.start_s, self.start_s + self.seconds


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledOp:
    """One op as it ran. `lost_s` is what its kernels took beyond its bound."""

    name: str
    family: str
    phase: str
    module: str
    source: str
    shapes: tuple[tuple[int, ...], ...]
    kernels: int
    measured_s: float
    """How long its kernels ran, without instants in which an earlier one ran too."""
    bound_s: float
    expected_s: float | None
    limiter: str
    flops: float
    bytes: float
    modelled: bool
    fused_s: float | None = None
    """Its share of the floor of the group that it can be fused into; None where groups are not known."""
    late_s: float = 0.0
    """The idle time before its kernels that its launches are to blame for: gone if it is."""
    typical_s: float | None = None
    """`measured_s` is of one of the profiled steps; this is the mean of all but the least and the most. None where one
    step was profiled."""
    quickest_s: float | None = None
    """Its time in the profiled step whose kernels took least."""
    slowest_s: float | None = None
    """Its time in the profiled step whose kernels took most."""

    @property
    def compared_s(self) -> float:
        """What to compare with another run."""
        return self.measured_s if self.typical_s is None else self.typical_s

    @property
    def lost_s(self) -> float:
        """Measured less bound; 0 for what has no bound."""
        return self.measured_s - self.bound_s if self.modelled else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """One step of a run."""

    schema: int
    source: str
    """What was run, or the file that it was read from."""
    date: str
    device: str
    """What it ran on, as the driver names it."""
    machine: str
    """Whose ceilings the bounds are against."""
    how: str
    """Where these ceilings come from: "measured", "derated" or "datasheet"."""
    wall_s: float
    kernel_s: float
    communication_s: float
    as_written_s: float
    fused_s: float
    ideal_s: float
    expected_s: float | None
    waterfall: Waterfall
    modelled_share: float
    """Of the time in which kernels ran, the share of those with a bound."""
    flops: float
    ops: tuple[ProfiledOp, ...]
    notes: tuple[str, ...] = ()
    idle: tuple[IdleCause, ...] = ()
    """Why nothing ran on the device, the largest cause first; they sum to the idle part of the waterfall."""
    steps: int = 0
    """How many clean steps the wall time is the median of; 0 where it is that of the profiled step itself."""
    walls: tuple[float, ...] = ()
    """The wall times of these steps, in their order."""
    spread: float | None = None
    """The slowest clean step less the fastest, over the median; None without clean steps."""
    matched: float | None = None
    """The share of the profiled step's ops that were found again in the traced one; None without a traced one."""
    profiled_s: float | None = None
    """How long the step took under the profiler; None where it is the wall time itself."""
    rates: Rates | None = None
    memory: Memory | None = None
    """At the peak of the step; None where it did not run under a trace here."""
    findings: tuple[Finding, ...] = ()
    """What is wasted, the largest saving first."""
    undecided: tuple[str, ...] = ()
    """Rules that cannot be decided from what is known of the step."""
    compiler: CompilerFacts | None = None
    """What torch.compile did until the step; None where it was not used, and for a trace file."""
    timeline: tuple[DeviceKernel, ...] = ()
    """What ran on the device in the profiled step, in the order of time; of a CPU, its ops."""
    gaps: tuple[Gap, ...] = ()
    """When nothing ran in the profiled step, with the main cause of each time."""

    def save(self, path: str | Path) -> None:
        """Writes it in the format that the name ends with.

        .json or .json.gz for `nearpeak.load`, .html, .md, .csv, .txt, .svg or .png for people, .perfetto.json for
        Perfetto.
        """
        forms.write(self, path)

    def __repr__(self) -> str:
        """One line; thousands of ops would be none."""
        return (
            f"<Profile of {self.source} on {self.device}: {seconds_text(self.wall_s)} a step, as written "
            f"{seconds_text(self.as_written_s)}, ideal {seconds_text(self.ideal_s)}>"
        )

    def _repr_html_(self) -> str:
        """As a notebook shows it."""
        return forms.card(self)


def profile_of(
    estimate: Estimate, kernels: Sequence[DeviceKernel], *, wall_s: float, source: str, date: str, device: str
) -> Profile:
    """Joins a step's bounds with its measured kernels, whose `op` are indices into the ops of the estimate."""
    computing = [kernel for kernel in kernels if not kernel.communication]
    charged = charges([kernel.interval for kernel in computing])
    measured = [0.0] * len(estimate.ops)
    counts = [0] * len(estimate.ops)
    modelled_s = 0.0
    for kernel, seconds in zip(computing, charged, strict=True):
        if kernel.op is not None:
            measured[kernel.op] += seconds
            counts[kernel.op] += 1
            if _has_bound(estimate.ops[kernel.op]):
                modelled_s += seconds
    kernel_s = sum(charged)
    communication_s = length(kernel.interval for kernel in kernels) - kernel_s
    wall_s = max(wall_s, kernel_s + communication_s)
    return Profile(
        schema=SCHEMA,
        source=source,
        date=date,
        device=device,
        machine=estimate.machine,
        how=estimate.how,
        wall_s=wall_s,
        kernel_s=kernel_s,
        communication_s=communication_s,
        as_written_s=estimate.as_written_s,
        fused_s=estimate.fused_s,
        ideal_s=estimate.ideal_s,
        expected_s=estimate.expected_s,
        waterfall=waterfall(
            wall_s=wall_s,
            ideal_s=estimate.ideal_s,
            fused_s=estimate.fused_s,
            as_written_s=estimate.as_written_s,
            modelled_s=modelled_s,
            kernel_s=kernel_s,
            communication_s=communication_s,
        ),
        modelled_share=modelled_s / kernel_s if kernel_s else 1.0,
        flops=estimate.flops,
        ops=tuple(
            _profiled(op, seconds, count, fused)
            for op, seconds, count, fused in zip(estimate.ops, measured, counts, fused_seconds(estimate), strict=True)
        ),
        notes=estimate.notes,
        timeline=tuple(sorted(kernels, key=lambda kernel: kernel.start_s)),
    )


def with_idle(profile: Profile, idle: Idle) -> Profile:
    """A profile with its idle time explained."""
    ops = list(profile.ops)
    for index, seconds in idle.late_s.items():
        ops[index] = replace(ops[index], late_s=seconds)
    return replace(profile, idle=idle.causes, gaps=idle.gaps, ops=tuple(ops))


def _has_bound(op: EstimatedOp) -> bool:
    return op.model == "formula" or op.seconds > 0.0


def _profiled(op: EstimatedOp, measured_s: float, kernels: int, fused_s: float | None) -> ProfiledOp:
    return ProfiledOp(
        name=op.name,
        family=op.family,
        phase=op.phase,
        module=op.module,
        source=op.source,
        shapes=op.shapes,
        kernels=kernels,
        measured_s=measured_s,
        bound_s=op.seconds,
        expected_s=op.expected_seconds,
        limiter=op.limiter,
        flops=op.flops,
        bytes=op.bytes_read + op.bytes_written,
        modelled=_has_bound(op),
        fused_s=fused_s,
    )
