"""The results of measurements, as plain data without torch: `Timing`, `Comparison`, `Sweep`, their flags and grade.

Every time says which kind it is:

    device     what one call occupies the device for, launch hidden: first kernel's start to last kernel's end
    graph      what one more call adds to a CUDA graph
    pipelined  wall time per call with many calls in flight, as in a training loop
    latency    wall time from an idle device to an idle device
    enqueue    host time until the call returns
    cpu        wall time of a call that runs on the CPU

A flag says what is doubtful about a measurement, with evidence and a remedy. Flags are in one table, keyed by name. The
severity `note` does not lower the grade: it says what the number is. `doubt` means that the figure may be off or not
reproducible, `wrong` that it does not measure what was asked.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from nearpeak import _display
from nearpeak._records import Amount, Count, Seconds, Share, SignedSeconds
from nearpeak.devices.device import Conditions
from nearpeak.ops.work import Work
from nearpeak.units import percent, seconds_between

SCHEMA = 1
Kind = Literal["device", "graph", "pipelined", "latency", "enqueue", "cpu"]
Cache = Literal["cold", "hot"]
Regime = Literal["burst", "sustained"]
Verdict = Literal["FASTER", "SLOWER", "EQUIVALENT", "INCONCLUSIVE"]
Severity = Literal["note", "doubt", "wrong"]
Grade = Literal["A", "B", "C", "F"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing(_display.Result):
    """One measurement. `seconds` is the median over blocks, `low` to `high` its confidence interval within this run."""

    name: str
    seconds: SignedSeconds
    low: SignedSeconds
    high: SignedSeconds
    confidence: Share
    kind: Kind
    method: str
    cache: Cache
    regime: Regime
    blocks: tuple[Block, ...]
    flags: tuple[Flag, ...]
    environment: Environment
    other_seconds: Mapping[str, SignedSeconds] = field(default_factory=dict)
    """The other kinds of time that were taken, by kind."""
    quantiles: Mapping[str, SignedSeconds] = field(default_factory=dict)
    """Times of single calls: "p50", "p90", and "p99" where there were at least 100 of them. Empty where only loops of
    calls were timed."""
    cpu_bound: bool | None = None
    """Whether the host cannot feed the device; None where that has no meaning or was not measured."""
    kernels: tuple[str, ...] = ()
    """Names of the kernels of one call, if the profiler could see them."""
    parameters: Mapping[str, str] = field(default_factory=dict)
    inputs: tuple[InputStatistics, ...] = ()
    """Statistics of the tensors that were passed."""
    work: Work | None = None
    bound_seconds: Seconds | None = None
    bound_limiter: str | None = None
    bound_ceilings: Literal["measured", "derated"] | None = None
    """Whether the bound rests on this machine's calibration or on a datasheet's figures times a factor."""
    partial: bool = False
    """Whether the run was interrupted; the figures cover what was measured until then."""
    schema: int = SCHEMA

    def check(self) -> None:
        """ValueError where the time is outside of its interval."""
        if not self.low <= self.seconds <= self.high:
            raise ValueError(f"{self.name} has {self.seconds!r} s in [{self.low!r}, {self.high!r}]")

    @property
    def grade(self) -> Grade:
        """A to F, from the flags."""
        return grade_of(self.flags)

    @property
    def relative_half_width(self) -> float:
        """Half the interval as a share of the median."""
        return (self.high - self.low) / 2 / self.seconds if self.seconds else float("inf")

    @property
    def share_of_bound(self) -> float | None:
        """The bound over the time: 1 is at the roofline."""
        return self.bound_seconds / self.seconds if self.bound_seconds and self.seconds else None

    def __str__(self) -> str:
        text = f"{seconds_between(self.seconds, self.low, self.high)} {self.kind} time, {self.cache} cache"
        if self.cpu_bound:
            text += ", CPU-bound"
        if self.share_of_bound is not None:
            text += f", {percent(self.share_of_bound)} of the {self.bound_limiter} bound"
        return f"{text}, grade {self.grade}"

    def __repr__(self) -> str:
        interval = seconds_between(self.seconds, self.low, self.high)
        share = "" if self.share_of_bound is None else f", {percent(self.share_of_bound)} of the bound"
        return _display.headline(f"Timing of {self.name}: {interval} {self.kind} time{share}, grade {self.grade}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Calls that are timed together. `seconds` per call is the median of `readings`, or derived from them."""

    seconds: SignedSeconds
    readings: tuple[SignedSeconds, ...]
    launch_hidden: bool | None = None
    """Whether the device was still busy with the spin when the last call had been enqueued."""
    conditions: Conditions = field(default_factory=Conditions)


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Where and when a measurement was taken."""

    device: str
    driver: str | None
    torch: str
    python: str
    nearpeak: str
    date: str
    threads: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison(_display.Result):
    """Two cases timed in interleaved pairs of blocks. `ratio` is the time of `b` over the time of `a`."""

    a: Timing
    b: Timing
    ratio: Amount
    low: Amount
    high: Amount
    confidence: Share
    verdict: Verdict
    """Of b against a: FASTER, SLOWER, EQUIVALENT within `margin`, or INCONCLUSIVE."""
    margin: Amount
    detectable: Amount
    """The smallest relative difference that this run would have detected four times out of five."""
    pairs: Count
    partial: bool = False
    schema: int = SCHEMA

    def __str__(self) -> str:
        return _display.printable(
            f"{self.b.name} is {self.verdict} against {self.a.name}: {self.ratio:.4f} x the time "
            f"[{self.low:.4f}, {self.high:.4f}], {self.pairs} pairs, could see {percent(self.detectable, 2)}"
        )

    def __repr__(self) -> str:
        ratio = f"{self.ratio:.3f} x the time [{self.low:.3f}, {self.high:.3f}]"
        return _display.headline(f"Comparison: {self.b.name} is {self.verdict} against {self.a.name}, {ratio}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep(_display.Result):
    """The timings of a grid of parameters, in the grid's order."""

    name: str
    parameters: Mapping[str, tuple[str, ...]]
    timings: tuple[Timing, ...]
    failures: Mapping[str, str] = field(default_factory=dict)
    """Grid points that could not be measured, with the reason."""
    partial: bool = False
    schema: int = SCHEMA

    def __repr__(self) -> str:
        grid = " x ".join(f"{len(values)} {name}" for name, values in self.parameters.items())
        failures = f", {len(self.failures)} failed" if self.failures else ""
        return _display.headline(f"Sweep of {self.name} over {grid}: {len(self.timings)} timings{failures}")


@dataclass(frozen=True, slots=True, kw_only=True)
class InputStatistics:
    """The statistics of one tensor, by a sample where it is large. `None`: there was nothing to compute it from.

    Mean, standard deviation and range are those of the finite values; of a complex tensor, of its real and imaginary
    parts.
    """

    shape: tuple[Count, ...]
    dtype: str
    device: str
    mean: float | None
    std: float | None
    minimum: float | None
    maximum: float | None
    zero_fraction: Share | None
    nonfinite_fraction: Share | None
    distinct: Count
    """Distinct finite values among at most 4096 sampled ones."""
    sampled: bool
    """Whether only a sample of the tensor was looked at."""

    @property
    def degenerate(self) -> str | None:
        """Why this data would make a benchmark too fast or meaningless, or None. Masks (bool) and scalars never do."""
        elements = math.prod(self.shape)
        if elements <= 1 or self.dtype == "bool":
            return None
        values = "sampled values" if self.sampled else "values"
        if self.nonfinite_fraction:
            return f"{100 * self.nonfinite_fraction:.3g} % of the {values} are infinite or NaN"
        if self.zero_fraction == 1:
            return f"all {values} are zero"
        if self.minimum == self.maximum:
            return f"all {values} are {self.minimum:g}"
        if self.zero_fraction is not None and self.zero_fraction > 0.9:
            return f"{100 * self.zero_fraction:.3g} % of the {values} are zero"
        if self.dtype.startswith(("float", "bfloat", "complex")) and elements > 1024 and self.distinct < 8:
            return f"only {self.distinct} distinct values"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """One doubt about a measurement, or a note on it."""

    name: str
    severity: Severity
    evidence: str
    remedy: str


_FLAGS: dict[str, tuple[Severity, str]] = {
    "CPU_BOUND": ("note", "Capture it in a CUDA graph, use torch.compile, or do more work per call."),
    "CLOSURE_INPUTS": ("note", "Pass tensors as arguments, so that they can be described and watched."),
    "NO_KERNELS": ("note", "This is the time of the host: the call occupies the device for no time at all."),
    "NO_GRAPH": ("note", "Avoid host synchronization and host-side state in the call to make it capturable."),
    "LAUNCH_NOT_HIDDEN": ("wrong", "The time contains host delays: lower the host work per call or use a CUDA graph."),
    "SYNC_IN_REGION": ("doubt", "Remove .item(), .cpu(), nonzero or synchronize() from the call for a device time."),
    "OFF_STREAM": ("doubt", "Make the current stream wait for the side stream before the call returns."),
    "BELOW_RESOLUTION": ("doubt", "Time more work per call: the instrument's own uncertainty is a large share."),
    "CACHE_NOT_COLD": ("wrong", "The flush did not evict the inputs: enlarge it, or report a hot time."),
    "CACHE_STATE_UNPROVEN": ("note", "The cache size is unknown here, so the flush could not be sized."),
    "ABOVE_ROOFLINE": ("wrong", "Check the stated work, the calibration, and that the call really does the work."),
    "POWER_CAP": ("doubt", "Use regime='burst', or report it as a sustained time."),
    "THERMAL": ("doubt", "Let the device cool, and check its fans and its neighbors."),
    "HARDWARE_SLOWDOWN": ("doubt", "The board throttles itself: check power supply and cooling."),
    "CLOCK_VARIED": ("doubt", "Use regime='burst', or lock the clocks if you may."),
    "CPU_THROTTLED": ("doubt", "The container's CPU quota was exhausted: raise it or use fewer threads."),
    "CPU_CONTENDED": ("doubt", "Other work shares the cores: stop it, or pin this process."),
    "GPU_SHARED": ("doubt", "Another process computes on this GPU: stop it."),
    "DRIFT": ("doubt", "The time was still changing: warm up longer, or use compare() for differences."),
    "MULTIMODAL": ("doubt", "Two or more speeds alternate: look at the raw series, fix the seed, pin the threads."),
    "HEAVY_TAIL": ("note", "Rare calls take much longer: look at the raw series before promising a latency."),
    "MEMORY_ALLOCATED": (
        "doubt",
        "The allocator asked the system for memory while timing: warm up longer, reuse buffers.",
    ),
    "PAGE_FAULTS": (
        "note",
        "malloc returns freed memory to the system and maps new pages: reuse buffers, or keep 1 GB with "
        "MALLOC_TOP_PAD_=1000000000 in the environment.",
    ),
    "MEMORY_GROWS": ("doubt", "Each call keeps memory: do not store results between calls."),
    "COMPILED_DURING_TIMING": ("wrong", "Compilation ran inside the timed region: keep shapes fixed, warm up longer."),
    "DEGENERATE_INPUT": (
        "doubt",
        "Use random data of the real distribution: constant data runs faster than real data.",
    ),
    "INPUT_MUTATED": ("doubt", "The call changes its inputs: pass `reset` to restore them outside the timed region."),
    "OUTPUT_NONFINITE": ("doubt", "The result has infinities or NaNs: check the inputs, or pass `reset`."),
    "RANKS_SKEWED": (
        "note",
        "Ranks enter the call at different times, the last has the shortest: see what its host does beside it.",
    ),
    "WRONG_RESULT": ("wrong", "Do not train on it: check the link, the driver and the library of collectives."),
    "ABOVE_LINK": (
        "note",
        "A switch that reduces sends less than a ring; otherwise the catalogue has another link than this machine.",
    ),
    "PRECISION_NOT_REACHED": ("doubt", "Give it more time with max_seconds, or accept a wider interval."),
    "PARTIAL": ("doubt", "The run was interrupted: measure again."),
}


def make_flag(name: str, evidence: str) -> Flag:
    """The flag `name` with this evidence."""
    severity, remedy = _FLAGS[name]
    return Flag(name=name, severity=severity, evidence=evidence, remedy=remedy)


def flag_names() -> tuple[str, ...]:
    """All flags that a measurement can carry."""
    return tuple(_FLAGS)


def grade_of(flags: Iterable[Flag]) -> Grade:
    """A: nothing doubtful. B: one doubt. C: several. F: the figure is not what was asked for."""
    severities = [flag.severity for flag in flags]
    if "wrong" in severities:
        return "F"
    doubts = severities.count("doubt")
    return "A" if doubts == 0 else "B" if doubts == 1 else "C"
