"""What a measurement is: `Timing` for one subject, `Comparison` for two. Plain data, no torch.

Every time says which kind it is:

    device     what one call occupies the device for, launch hidden: first kernel's start to last kernel's end
    graph      what one more call adds to a CUDA graph
    pipelined  wall time per call with many calls in flight, as in a training loop
    latency    wall time from an idle device to an idle device
    enqueue    host time until the call returns
    cpu        wall time of a call that runs on the CPU
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from nearpeak import forms
from nearpeak.measure.flags import Flag, Grade, grade
from nearpeak.measure.input_facts import InputStatistics
from nearpeak.units import percent, seconds_between
from nearpeak.work.model import Work

SCHEMA = 1

Kind = Literal["device", "graph", "pipelined", "latency", "enqueue", "cpu"]
Cache = Literal["cold", "hot"]
Regime = Literal["burst", "sustained"]
Verdict = Literal["FASTER", "SLOWER", "EQUIVALENT", "INCONCLUSIVE"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """The state of the machine, read between blocks; None where it cannot be read."""

    clock_hz: float | None = None
    memory_clock_hz: float | None = None
    power_watts: float | None = None
    temperature_celsius: float | None = None
    throttle: tuple[str, ...] = ()
    """Reasons that the driver or the system gives for running slower."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Calls made together. `seconds` per call is the block's reading; `readings` are what it was made from."""

    seconds: float
    readings: tuple[float, ...]
    launch_hidden: bool | None = None
    """Whether the device was still busy with the harness's own delay when the last call had been enqueued."""
    conditions: Conditions = field(default_factory=Conditions)


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Where and when."""

    device: str
    driver: str | None
    torch: str
    python: str
    nearpeak: str
    date: str
    threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One measurement. `seconds` is the median over blocks, `low` to `high` its interval within this run."""

    name: str
    seconds: float
    low: float
    high: float
    confidence: float
    kind: Kind
    method: str
    cache: Cache
    regime: Regime
    blocks: tuple[Block, ...]
    flags: tuple[Flag, ...]
    environment: Environment
    other_seconds: Mapping[str, float] = field(default_factory=dict)
    """The other kinds of time that were taken, by kind."""
    cpu_bound: bool | None = None
    """Whether the host cannot feed the device; None where that has no meaning or was not measured."""
    kernels: tuple[str, ...] = ()
    """Names of the kernels of one call, if the profiler could see them."""
    parameters: Mapping[str, str] = field(default_factory=dict)
    inputs: tuple[InputStatistics, ...] = ()
    """Statistics of the tensors that were passed."""
    work: Work | None = None
    bound_seconds: float | None = None
    bound_limiter: str | None = None
    bound_ceilings: Literal["measured", "derated"] | None = None
    """Whether the bound rests on this machine's calibration or on a datasheet's figures times a factor."""
    partial: bool = False
    """The run was interrupted; the figures are of what had been measured."""
    schema: int = SCHEMA

    @property
    def grade(self) -> Grade:
        """A to F, from the flags."""
        return grade(self.flags)

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

    def _repr_html_(self) -> str:
        """As a notebook shows it."""
        return forms.card(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two subjects in interleaved random pairs of blocks. `ratio` is the time of `b` over the time of `a`."""

    a: Timing
    b: Timing
    ratio: float
    low: float
    high: float
    confidence: float
    verdict: Verdict
    """Of b against a: FASTER, SLOWER, EQUIVALENT within `margin`, or INCONCLUSIVE."""
    margin: float
    detectable: float
    """The smallest relative difference that this run would have seen four times out of five."""
    pairs: int
    partial: bool = False
    schema: int = SCHEMA

    def __str__(self) -> str:
        return (
            f"{self.b.name} is {self.verdict} against {self.a.name}: {self.ratio:.4f} x the time "
            f"[{self.low:.4f}, {self.high:.4f}], {self.pairs} pairs, could see {percent(self.detectable, 2)}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """The timings of a grid of parameters, in the grid's order."""

    name: str
    parameters: Mapping[str, tuple[str, ...]]
    timings: tuple[Timing, ...]
    failures: Mapping[str, str] = field(default_factory=dict)
    """Grid points that could not be measured, with the reason."""
    partial: bool = False
    schema: int = SCHEMA
