"""`Profile`: one step with the measured time of each op next to its bounds. Every report is made from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean

from nearpeak import _display
from nearpeak.bound.estimate import Estimate, EstimatedOp
from nearpeak.bound.roofline import Ceilings
from nearpeak.machines.machine import Achievable, Machine
from nearpeak.ops.fast_init import fast_init
from nearpeak.ops.op import Origin, origin_of_name
from nearpeak.profiles.finding import Finding
from nearpeak.profiles.idle import Gap, IdleCause, IdleTime
from nearpeak.profiles.memory import PeakMemory
from nearpeak.profiles.rates import StepRates
from nearpeak.profiles.waterfall import Interval, Waterfall, build_waterfall, covered_seconds, exclusive_seconds
from nearpeak.units import seconds as seconds_text

SCHEMA = 3
"""Raised whenever the meaning of a saved field changes; `profiles.file` upgrades older files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileCeilings:
    """The rates that the bounds of a profile are computed with, in bytes/s and FLOP/s."""

    bandwidth: float
    cache_bandwidth: float | None = None
    """Of the last-level cache; None if it was not measured."""
    matrix: Mapping[str, float] = field(default_factory=dict)
    """By dtype; empty for profiles that were saved before they had ceilings."""
    vector: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphBreak:
    """A place where torch.compile ends one graph and begins another."""

    reason: str
    """The first line of torch's explanation."""
    source: str
    """The line of the user's code; "" if it is not known."""
    count: int
    """How often the break occurred during compilation, not how often it ran."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompilerFacts:
    """What torch.compile did from the start of the process to the clean steps."""

    graphs: int
    """The number of compiled graphs."""
    breaks: tuple[GraphBreak, ...]
    """The graph breaks of the code that ran in the profiled step, the most frequent first."""
    recompiled_in_steps: int
    """The number of graphs compiled after warm-up."""


@fast_init
@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceKernel:
    """Something that ran on the device, and the index of the op that launched it."""

    name: str
    start_s: float
    """From the start of the profiled step."""
    seconds: float
    op: int | None
    stream: int = 0
    collective: str | None = None
    """The collective that a communication kernel runs: "all_reduce", "all_gather", ...; "unknown" if its name does not
    say. None for every other kernel."""

    @property
    def communication(self) -> bool:
        """Whether it is a communication kernel."""
        return self.collective is not None

    @property
    def interval(self) -> Interval:
        """From when to when it ran."""
        return self.start_s, self.start_s + self.seconds


@fast_init
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
    modeled: bool
    fused_s: float | None = None
    """Its share of the floor of the group that it can be fused into; None where groups are not known."""
    launch_wait_s: float = 0.0
    """The idle time before its kernels that its launches are to blame for: gone if it is."""
    typical_s: float | None = None
    """`measured_s` is of one of the profiled steps; this is the mean of all but the least and the most. None where one
    step was profiled."""
    quickest_s: float | None = None
    """Its time in the profiled step whose kernels took least."""
    slowest_s: float | None = None
    """Its time in the profiled step whose kernels took most."""
    origin: Origin = "torch"

    @property
    def compared_s(self) -> float:
        """What to compare with another run."""
        return self.measured_s if self.typical_s is None else self.typical_s

    @property
    def lost_s(self) -> float:
        """Measured less bound; 0 for what has no bound."""
        return self.measured_s - self.bound_s if self.modeled else 0.0


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
    modeled_share: float
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
    rates: StepRates | None = None
    memory: PeakMemory | None = None
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
    ceilings: ProfileCeilings | None = None
    """The rates that the bounds are computed with; None if they are not known."""
    rank: int | None = None
    """The rank of the process in its torch.distributed group; None for a run on its own."""
    world_size: int | None = None
    """The number of ranks in that group."""

    def save(self, path: str | Path) -> None:
        """Writes it in the format that the name ends with.

        .json or .json.gz for `nearpeak.load`, .html, .md, .csv, .txt, .svg or .png for people, .perfetto.json for
        Perfetto.
        """
        _display.write(self, path)

    def __repr__(self) -> str:
        """One line; thousands of ops would be none."""
        return (
            f"<Profile of {self.source} on {self.device}: {seconds_text(self.wall_s)} a step, as written "
            f"{seconds_text(self.as_written_s)}, ideal {seconds_text(self.ideal_s)}>"
        )

    def _repr_html_(self) -> str:
        """As a notebook shows it."""
        return _display.card(self)


def profile_ceilings(machine: Machine, ceilings: Ceilings) -> ProfileCeilings | None:
    """The ceilings of a machine that bounds are computed with; None if it has none of this kind."""
    rates = machine.achievable if ceilings == "achievable" else machine.theoretical
    if rates is None:
        return None
    return ProfileCeilings(
        bandwidth=rates.bandwidth,
        cache_bandwidth=rates.cache_bandwidth if isinstance(rates, Achievable) else None,
        matrix=dict(rates.matrix),
        vector=dict(rates.vector),
    )


def build_profile(
    estimate: Estimate,
    kernels: Sequence[DeviceKernel],
    *,
    wall_s: float,
    source: str,
    date: str,
    device: str,
    ceilings: ProfileCeilings | None = None,
) -> Profile:
    """Joins a step's bounds with its measured kernels, whose `op` are indices into the ops of the estimate."""
    computing = [kernel for kernel in kernels if not kernel.communication]
    charged = exclusive_seconds([kernel.interval for kernel in computing])
    measured = [0.0] * len(estimate.ops)
    counts = [0] * len(estimate.ops)
    modeled_s = 0.0
    for kernel, seconds in zip(computing, charged, strict=True):
        if kernel.op is not None:
            measured[kernel.op] += seconds
            counts[kernel.op] += 1
            if _has_bound(estimate.ops[kernel.op]):
                modeled_s += seconds
    kernel_s = sum(charged)
    communication_s = covered_seconds(kernel.interval for kernel in kernels) - kernel_s
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
        waterfall=build_waterfall(
            wall_s=wall_s,
            ideal_s=estimate.ideal_s,
            fused_s=estimate.fused_s,
            as_written_s=estimate.as_written_s,
            modeled_s=modeled_s,
            kernel_s=kernel_s,
            communication_s=communication_s,
        ),
        modeled_share=modeled_s / kernel_s if kernel_s else 1.0,
        flops=estimate.flops,
        ops=tuple(
            _profiled_op(op, seconds, count, fused)
            for op, seconds, count, fused in zip(estimate.ops, measured, counts, fused_seconds(estimate), strict=True)
        ),
        notes=estimate.notes,
        timeline=tuple(sorted(kernels, key=lambda kernel: kernel.start_s)),
        ceilings=ceilings,
    )


def fused_seconds(estimate: Estimate) -> list[float | None]:
    """For each op its share of the bound of its group as one kernel; None for all where no groups are known.

    A group has one time, and no op of it has one of its own. It is shared out in proportion to the bounds of the ops as
    written, so that they sum to the floor of the whole. An op may get a little more than its bound: regrouped, what it
    reads may have left the cache.
    """
    if not estimate.group_seconds:
        return [None] * len(estimate.ops)
    bounds = [op.seconds for op in estimate.ops]
    if (
        sum(estimate.group_seconds) >= estimate.as_written_s
    ):  # regrouping would not pay: the ops stay as they are written
        return list(bounds)
    shared: list[float | None] = [0.0] * len(bounds)
    for group, seconds in zip(estimate.groups, estimate.group_seconds, strict=True):
        written = sum(bounds[member] for member in group.members)
        for member in group.members:
            shared[member] = seconds * bounds[member] / written if written else seconds / len(group.members)
    return shared


def add_idle(profile: Profile, idle: IdleTime) -> Profile:
    """A profile with its idle time explained."""
    ops = list(profile.ops)
    for index, seconds in idle.launch_wait_s.items():
        ops[index] = replace(ops[index], launch_wait_s=seconds)
    return replace(profile, idle=idle.causes, gaps=idle.gaps, ops=tuple(ops))


def _has_bound(op: EstimatedOp) -> bool:
    return op.model == "formula" or op.seconds > 0.0


def _profiled_op(op: EstimatedOp, measured_s: float, kernels: int, fused_s: float | None) -> ProfiledOp:
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
        modeled=_has_bound(op),
        fused_s=fused_s,
        origin=origin_of_name(op.name),
    )


def add_step_spread(profile: Profile, kernels: Sequence[DeviceKernel], repeats: Sequence[Sequence[float]]) -> Profile:
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
            typical_s=alone * typical_seconds(seen),
            quickest_s=alone * seen[quickest],
            slowest_s=alone * seen[slowest],
        )
    return replace(profile, ops=tuple(ops))


def typical_seconds(times: Sequence[float]) -> float:
    """The mean without the least and the most, where there are more than two.

    >>> typical([3.0, 1.0, 90.0, 5.0]), typical([1.0, 2.0])
    (4.0, 1.5)
    """
    ordered = sorted(times)
    return fmean(ordered[1:-1] if len(ordered) > 2 else ordered)
