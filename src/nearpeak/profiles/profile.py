"""`Profile`: one step with the measured time of each op next to its bounds. Every report is made from it."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Literal

from nearpeak import _display
from nearpeak._records import Amount, Count, MeasuredSeconds, Rate, Seconds, Share, SignedSeconds
from nearpeak.bound.estimate import Estimate, EstimatedOp
from nearpeak.bound.roofline import Ceilings
from nearpeak.machines.machine import Achievable, Machine
from nearpeak.machines.physics import calibration_doubts
from nearpeak.ops.fast_init import fast_init
from nearpeak.ops.op import Origin
from nearpeak.profiles.completeness import Completeness
from nearpeak.profiles.conditions import StepConditions
from nearpeak.profiles.excerpt import SourceExcerpt
from nearpeak.profiles.finding import Finding
from nearpeak.profiles.grade import Grade
from nearpeak.profiles.idle import Gap, IdleCause, IdleTime
from nearpeak.profiles.job import JobProfile
from nearpeak.profiles.memory import PeakMemory
from nearpeak.profiles.rates import StepRates
from nearpeak.profiles.waterfall import Interval, Waterfall, build_waterfall, covered_seconds, exclusive_seconds
from nearpeak.units import seconds as seconds_text

SCHEMA = 3
"""Raised whenever the meaning of a saved field changes; `profiles.file` upgrades older files."""


@fast_init
@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledOp:
    """One op as it ran."""

    name: str
    family: str
    phase: str
    module: str
    source: str
    shapes: tuple[tuple[Count, ...], ...]
    kernels: Count
    measured_s: Seconds
    """The time in which its kernels ran, without instants in which an earlier kernel ran too."""
    bound_s: Seconds
    expected_s: Seconds | None
    limiter: str
    flops: Amount
    bytes: Amount
    modeled: bool
    """Whether it has a bound."""
    fused_s: Seconds | None = None
    """Its share of the bound of the group that it can be fused into; None if groups are not known."""
    launch_wait_s: Seconds = 0.0
    """The idle time before its kernels that its launches cause. Without the op, it is gone."""
    typical_s: Seconds | None = None
    """The mean over the profiled steps, without the smallest and the largest time; `measured_s` is of one of them. None
    if one step was profiled."""
    quickest_s: Seconds | None = None
    """Its time in the profiled step with the smallest kernel time."""
    slowest_s: Seconds | None = None
    """Its time in the profiled step with the largest kernel time."""
    origin: Origin = "torch"

    def __repr__(self) -> str:
        bound = f", bound {seconds_text(self.bound_s)} ({self.limiter})" if self.modeled else ", no bound"
        at = f" at {self.source}" if self.source else ""
        return _display.headline(f"{self.name} {self.phase}{at}: {seconds_text(self.measured_s)}{bound}")

    @property
    def compared_s(self) -> float:
        """The time to compare with another run."""
        return self.measured_s if self.typical_s is None else self.typical_s

    @property
    def lost_s(self) -> float:
        """The measured time beyond the bound; 0 without a bound."""
        return self.measured_s - self.bound_s if self.modeled else 0.0


@fast_init
@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceKernel:
    """A kernel, copy or fill that ran on the device."""

    name: str
    start_s: SignedSeconds
    """From the start of the profiled step."""
    seconds: Seconds
    op: Count | None
    """The index of the op that launched it."""
    stream: int = 0
    collective: str | None = None
    """The collective that a communication kernel runs: "all_reduce", "all_gather", ...; "unknown" if its name does not
    say. None for every other kernel."""
    in_graph: bool = False
    """Whether a CUDA graph launched it, with all other kernels of the graph."""

    @property
    def communication(self) -> bool:
        """Whether it is a communication kernel."""
        return self.collective is not None

    @property
    def interval(self) -> Interval:
        """Its start and end."""
        return self.start_s, self.start_s + self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileCeilings:
    """The rates that the bounds of a profile are computed with, in bytes/s and FLOP/s."""

    bandwidth: Rate
    cache_bandwidth: Rate | None = None
    """Of the last-level cache; None if it was not measured."""
    matrix: Mapping[str, Rate] = field(default_factory=dict)
    """By dtype; empty for profiles that were saved before they had ceilings."""
    vector: Mapping[str, Rate] = field(default_factory=dict)
    clock_hz: Rate | None = None
    """The clock of the GPU at which the matrix ceilings were reached; None if it is not known."""
    doubts: tuple[str, ...] = ()
    """Why the calibration that they are from is not to be trusted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphBreak:
    """A place where torch.compile ends one graph and begins another."""

    reason: str
    """The first line of torch's explanation."""
    source: str
    """The line of the user's code; "" if it is not known."""
    count: Count
    """How often the break occurred during compilation, not how often it ran."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompilerFacts:
    """What torch.compile did from the start of the process to the clean steps."""

    graphs: Count
    """The number of compiled graphs."""
    breaks: tuple[GraphBreak, ...]
    """The graph breaks of the code that ran in the profiled step, the most frequent first."""
    recompiled_in_steps: Count
    """The number of graphs compiled after warm-up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile(_display.Result):
    """One step of a run."""

    schema: int
    source: str
    """What was run, or the trace file."""
    date: str
    device: str
    """The device that it ran on, as the driver names it."""
    machine: str
    """The machine that the bounds are for."""
    how: Literal["measured", "derated", "datasheet"]
    """Where its ceilings come from."""
    wall_s: MeasuredSeconds
    kernel_s: Seconds
    communication_s: Seconds
    """The time in which only communication ran."""
    as_written_s: Seconds
    fused_s: Seconds
    ideal_s: Seconds
    expected_s: Seconds | None
    waterfall: Waterfall
    modeled_share: Share
    """The share of the kernel time whose ops have a bound."""
    flops: Amount
    ops: tuple[ProfiledOp, ...]
    notes: tuple[str, ...] = ()
    idle: tuple[IdleCause, ...] = ()
    """The causes of idle time, the largest first; they sum to the idle part of the waterfall."""
    step: str = ""
    """What was taken as a step: "a training step, up to the step of AdamW"; "" if it is not known."""
    steps: Count = 0
    """The number of clean steps behind the wall time; 0 if it is that of the profiled step itself."""
    walls: tuple[MeasuredSeconds, ...] = ()
    """The wall times of these steps, in order."""
    spread: Amount | None = None
    """The slowest clean step minus the fastest, over the median, without the outer tenths; None without clean steps."""
    matched: Share | None = None
    """The share of the profiled step's ops that were found in the traced step; None without a traced step."""
    profiled_s: Seconds | None = None
    """The time of the step under the profiler; None if it is the wall time itself."""
    rates: StepRates | None = None
    memory: PeakMemory | None = None
    """None if the step was not traced here."""
    findings: tuple[Finding, ...] = ()
    """The largest saving first."""
    undecided: tuple[str, ...] = ()
    """Rules that cannot be decided from what is known about the step."""
    compiler: CompilerFacts | None = None
    """None if torch.compile was not used, and for a trace file."""
    timeline: tuple[DeviceKernel, ...] = ()
    """What ran on the device in the profiled step, by start; on a CPU, its ops."""
    gaps: tuple[Gap, ...] = ()
    """The times in which nothing ran in the profiled step, with the main cause of each."""
    ceilings: ProfileCeilings | None = None
    """The rates that the bounds are computed with; None if they are not known."""
    rank: Count | None = None
    """The rank of the process in its torch.distributed group; None for a run on its own."""
    world_size: Count | None = None
    """The number of ranks in that group."""
    job: JobProfile | None = None
    """All ranks of the job, on rank 0 of several; None for a run on its own."""
    completeness: Completeness | None = None
    """What the recording of the step is known to lack; None if it was not checked."""
    conditions: StepConditions | None = None
    """What else the machine did meanwhile; None for a trace file."""
    later_s: Seconds | None = None
    """The time of a step on a GPU that does not wait for its host, after everything was recorded: at the clock that it
    sustains. None if there were no such steps."""
    excerpts: tuple[SourceExcerpt, ...] = ()
    """The text of the source lines that findings, idle time and the ops that lose most name, read when the step ran;
    none for a trace file."""
    callers: Mapping[str, str] = field(default_factory=dict)
    """The line of the user's own that calls an installed package, by the line in that package."""
    settings: tuple[str, ...] = ()
    """Settings of the process that slow steps down and were on, such as "anomaly mode"; none for a trace file."""
    replayed_s: Seconds | None = None
    """The time of the step in the replay of host and device that its savings come from; None if they are sums."""
    grade: Grade | None = None
    """How far the profile can be trusted, in a file for its readers. `grade_profile` follows it from the rest."""

    @property
    def long_run_s(self) -> float:
        """The wall time without what is spent once for each new size: that of steps whose sizes recur."""
        return self.wall_s - sum(finding.once_s for finding in self.findings)

    def share_of(self, finding: Finding) -> float:
        """The share of a finding: of a step in the long run, or of this one for what is spent once."""
        return finding.once_s / self.wall_s if finding.once_s else finding.share

    @property
    def ops_in_graphs(self) -> frozenset[int]:
        """The indices of ops whose kernels CUDA graphs launched."""
        inside = {kernel.op for kernel in self.timeline if kernel.in_graph}
        outside = {kernel.op for kernel in self.timeline if not kernel.in_graph}
        return frozenset(op for op in inside - outside if op is not None)

    def check_indices(self) -> None:
        """ValueError where a kernel or a finding names an op that there is not."""
        kernels = (span.op for span in self.timeline if span.op is not None)
        named = [op for finding in self.findings for op in (*finding.ops, *(finding.fix.ops if finding.fix else ()))]
        last = max(itertools.chain(kernels, named), default=-1)
        if last >= len(self.ops):
            raise ValueError(f"it names the op {last:,}, and has {len(self.ops):,}")

    def save(self, path: str | Path) -> None:
        """Writes it in the format of the file name's ending.

        .json or .json.gz for `nearpeak.load`, .html, .md, .csv, .txt, .svg or .png for people, .perfetto.json for
        Perfetto.
        """
        _display.write(self, path)

    def __repr__(self) -> str:
        times = f"{seconds_text(self.wall_s)} a step, ideal {seconds_text(self.ideal_s)}"
        return _display.headline(f"Profile of {self.source} on {self.device}: {times}")


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
    """Joins the bounds of a step with its measured kernels, whose `op` are indices into the ops of the estimate."""
    compute_kernels = [kernel for kernel in kernels if not kernel.communication]
    kernel_seconds = exclusive_seconds([kernel.interval for kernel in compute_kernels])
    measured = [0.0] * len(estimate.ops)
    counts = [0] * len(estimate.ops)
    modeled_s = 0.0
    for kernel, seconds in zip(compute_kernels, kernel_seconds, strict=True):
        if kernel.op is not None:
            measured[kernel.op] += seconds
            counts[kernel.op] += 1
            if _has_bound(estimate.ops[kernel.op]):
                modeled_s += seconds
    # The floors are of what the kernels compute: the time of communication is counted beside them.
    sent_s = sum(
        estimate.ops[index].seconds
        for index in {kernel.op for kernel in kernels if kernel.communication and kernel.op is not None}
        if not counts[index]
    )
    as_written_s, fused_s = (max(0.0, floor - sent_s) for floor in (estimate.as_written_s, estimate.fused_s))
    ideal_s = min(estimate.ideal_s, fused_s)
    kernel_s = sum(kernel_seconds)
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
        as_written_s=as_written_s,
        fused_s=fused_s,
        ideal_s=ideal_s,
        expected_s=estimate.expected_device_s,
        waterfall=build_waterfall(
            wall_s=wall_s,
            ideal_s=ideal_s,
            fused_s=fused_s,
            as_written_s=as_written_s,
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


def profile_ceilings(
    machine: Machine, ceilings: Ceilings, dtypes: Collection[str] | None = None
) -> ProfileCeilings | None:
    """The ceilings of a machine that bounds are computed with; None if it has none of this kind.

    Doubts about the peaks of `dtypes` count, or of all; `computed_dtypes` has those of a step.
    """
    rates = machine.achievable if ceilings == "achievable" else machine.theoretical
    if rates is None:
        return None
    return ProfileCeilings(
        bandwidth=rates.bandwidth,
        cache_bandwidth=rates.cache_bandwidth if isinstance(rates, Achievable) else None,
        matrix=dict(rates.matrix),
        vector=dict(rates.vector),
        clock_hz=rates.clock_hz if isinstance(rates, Achievable) else None,
        doubts=calibration_doubts(machine, dtypes) if isinstance(rates, Achievable) else (),
    )


def computed_dtypes(estimate: Estimate) -> frozenset[str]:
    """The dtypes that the ops of a step compute in."""
    return frozenset(op.dtype for op in estimate.ops if op.engine)


def calibration_notes(machine: Machine, estimate: Estimate) -> tuple[str, ...]:
    """What the figures of a step rest on that a quick calibration of its machine did not measure."""
    achievable = machine.achievable
    if estimate.ceilings != "achievable" or achievable is None or not achievable.quick:
        return ()
    derated = sorted({op.dtype for op in estimate.ops if f"{op.engine}.{op.dtype}" in achievable.derated_peaks})
    notes = []
    if derated:
        notes.append(
            f"Derated from the datasheet, not measured: the peak of {', '.join(derated)}. `nearpeak machine "
            "--calibrate` measures it."
        )
    if machine.kind == "cpu":
        notes.append(
            f"What good kernels take was measured on {estimate.expected_from}: the calibration here was a quick one. "
            "`nearpeak machine --calibrate` measures that too."
        )
    return tuple(notes)


def fused_seconds(estimate: Estimate) -> list[float | None]:
    """The share of each op in the bound of its fusion group; None for all ops if no groups are known.

    A group has one bound. It is divided among its ops in proportion to their bounds as written, so that they sum to the
    fused floor. An op may get a little more than its bound: after regrouping, its inputs may have left the cache.
    """
    if not estimate.group_seconds:
        return [None] * len(estimate.ops)
    bounds = [op.seconds for op in estimate.ops]
    if sum(estimate.group_seconds) >= estimate.as_written_s:  # fusing does not pay
        return list(bounds)
    shares: list[float | None] = [0.0] * len(bounds)
    for group, seconds in zip(estimate.groups, estimate.group_seconds, strict=True):
        as_written = sum(bounds[member] for member in group.members)
        for member in group.members:
            shares[member] = seconds * bounds[member] / as_written if as_written else seconds / len(group.members)
    return shares


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
        origin=op.origin,
    )


def add_idle(profile: Profile, idle: IdleTime) -> Profile:
    """The profile with the causes of its idle time."""
    ops = list(profile.ops)
    for index, seconds in idle.launch_wait_s.items():
        ops[index] = replace(ops[index], launch_wait_s=seconds)
    return replace(profile, idle=idle.causes, gaps=idle.gaps, ops=tuple(ops))


def add_step_spread(profile: Profile, kernels: Sequence[DeviceKernel], repeats: Sequence[Sequence[float]]) -> Profile:
    """The profile with `typical_s`, `quickest_s` and `slowest_s` of its ops.

    Args:
        profile: One step.
        kernels: Its kernels.
        repeats: For each kernel, its seconds in all profiled steps.
    """
    count = len(repeats[0]) if repeats else 0
    if count < 2:
        return profile
    totals = [sum(row[step] for row in repeats) for step in range(count)]
    quickest, slowest = totals.index(min(totals)), totals.index(max(totals))
    own: dict[int, float] = {}
    step_times: dict[int, list[float]] = {}
    for kernel, row in zip(kernels, repeats, strict=True):
        if kernel.op is not None and not kernel.communication:
            own[kernel.op] = own.get(kernel.op, 0.0) + kernel.seconds
            known = step_times.get(kernel.op)
            step_times[kernel.op] = list(row) if known is None else [a + b for a, b in zip(known, row, strict=True)]
    ops = list(profile.ops)
    for index, times in step_times.items():
        # Time next to an earlier kernel does not count, in the other steps as little as in this one.
        exclusive = ops[index].measured_s / own[index] if own[index] > 0.0 else 0.0
        ops[index] = replace(
            ops[index],
            typical_s=exclusive * typical_seconds(times),
            quickest_s=exclusive * times[quickest],
            slowest_s=exclusive * times[slowest],
        )
    return replace(profile, ops=tuple(ops))


def typical_seconds(times: Sequence[float]) -> float:
    """The mean without the smallest and the largest, if there are more than two.

    >>> typical_seconds([3.0, 1.0, 90.0, 5.0]), typical_seconds([1.0, 2.0])
    (4.0, 1.5)
    """
    ordered = sorted(times)
    return fmean(ordered[1:-1] if len(ordered) > 2 else ordered)
