"""`Machine`: what a processor can do, as plain data.

A machine has two sets of ceilings, and they are different types so that they cannot be mixed up: `Theoretical` comes
from a datasheet (dense, with its source), `Achievable` was measured on the machine or derated by a stated factor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from nearpeak._display import Result, headline
from nearpeak.errors import UsageError, did_you_mean
from nearpeak.units import quantity


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A connection out of the processor; `bandwidth` is bytes/s in one direction, all lanes together."""

    name: str
    bandwidth: float
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Theoretical:
    """Datasheet ceilings: dense FLOP/s by dtype name, bytes/s of the memory."""

    matrix: Mapping[str, float]
    vector: Mapping[str, float]
    bandwidth: float
    source: str

    def peak(self, dtype: str) -> float:
        """FLOP/s of the matrix engine for `dtype`, or of the vector units where there is no such engine."""
        return _peak(self.matrix, self.vector, dtype, "datasheet figure")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceiling:
    """One measured ceiling: the best value reached, the spread of its repeats (relative), and how it was reached."""

    value: float
    spread: float
    how: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchCost:
    """Seconds around one launch; None where the machine has no such thing or it was not measured."""

    enqueue: float | None = None
    """Host time until a launch call returns."""
    in_graph: float | None = None
    """The time that one more empty kernel adds to a CUDA graph."""
    event_pair: float | None = None
    """The time between two events with nothing between them."""
    event_tick: float | None = None
    """The smallest step between event times."""
    host_call: float | None = None
    """Host time of one tiny PyTorch operation on the CPU."""
    cold_start: float | None = None
    """The extra time of the first operation on the CPU, when nothing of it is in a cache, its code included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EfficiencyPoint:
    """One measured efficiency: an op with a bound of `bound_seconds` took `ratio` times as long."""

    bound_seconds: float
    ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Achievable:
    """Ceilings that code can reach: measured, or a datasheet's figures times a stated factor."""

    how: Literal["measured", "derated"]
    note: str
    """When and with what it was measured, or the factors."""
    bandwidth: float
    matrix: Mapping[str, float]
    """Best short-burst rate, by dtype, whatever the numbers."""
    vector: Mapping[str, float]
    cache_bandwidth: float | None = None
    matrix_random: Mapping[str, float] = field(default_factory=dict)
    """Best short-burst rate with random numbers, which flip more bits and draw more power than others."""
    matrix_sustained: Mapping[str, float] = field(default_factory=dict)
    """Rate with random numbers after seconds of continuous work, where power or heat limit it."""
    host_to_device: float | None = None
    device_to_host: float | None = None
    host_to_device_pageable: float | None = None
    device_to_host_pageable: float | None = None
    device_to_device: float | None = None
    """Between two processors of this machine, one direction."""
    launch: LaunchCost = field(default_factory=LaunchCost)
    ceilings: Mapping[str, Ceiling] = field(default_factory=dict)
    """Every measured figure with spread and method, by name: "bandwidth.copy", "matrix.bfloat16", ..."""
    efficiency: Mapping[str, tuple[EfficiencyPoint, ...]] = field(default_factory=dict)
    """The efficiency of kernels by kind of op, in the order of bounds; empty where it was not measured."""
    clock_hz: float | None = None
    """The clock of a GPU's processors while its matrix units reached their ceilings; None where it was not read."""
    quick: bool = False
    """Whether only what most code needs was measured. Other peaks of a GPU are then derated from its datasheet, and
    kernels of a CPU are taken to be as efficient as those of the reference machine."""
    others_share: float | None = None
    """Of the time of the cores, the share that other processes used while it was measured; None if it is not known."""

    def peak(self, dtype: str) -> float:
        """FLOP/s of the matrix engine for `dtype`, or of the vector units where there is no such engine."""
        return _peak(self.matrix, self.vector, dtype, "measured figure" if self.how == "measured" else "figure")

    @property
    def derated_peaks(self) -> frozenset[str]:
        """The peaks, as "matrix.float8", that are derated although other ceilings were measured."""
        if not self.quick:
            return frozenset()
        rates = {"matrix": self.matrix, "vector": self.vector}
        return frozenset(f"{engine}.{dtype}" for engine in rates for dtype in rates[engine]) - self.ceilings.keys()


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine(Result):
    """What one processor can do. `theoretical` is None for a CPU, `achievable` is None before calibration."""

    id: str
    name: str
    kind: Literal["gpu", "cpu"]
    vendor: str
    architecture: str
    processors: int | None
    """Streaming multiprocessors, compute units or physical cores; None where the vendor does not say."""
    memory_bytes: float | None
    memory_kind: str | None = None
    cache_bytes: float | None = None
    """The last-level cache."""
    cache_levels: Mapping[str, float] = field(default_factory=dict)
    """CPU: bytes of L1d, L2, L3."""
    vector_bits: int | None = None
    """CPU: width of one vector register."""
    matrix_engine: str | None = None
    """CPU: AMX, SME or None."""
    shared_memory_bytes: float | None = None
    """Per multiprocessor."""
    clock_base_hz: float | None = None
    clock_boost_hz: float | None = None
    power_watts: float | None = None
    link: Link | None = None
    pcie: Link | None = None
    theoretical: Theoretical | None = None
    achievable: Achievable | None = None
    sources: Mapping[str, str] = field(default_factory=dict)
    """Where each figure comes from, by field name."""

    def __repr__(self) -> str:
        ceilings = self.achievable or self.theoretical
        if ceilings is None:
            return headline(f"Machine {self.id}: {self.name}, not calibrated")
        how = ceilings.how if isinstance(ceilings, Achievable) else "datasheet"
        rates = {**ceilings.vector, **ceilings.matrix}
        dtype = next((name for name in ("bfloat16", "float32") if name in rates), next(iter(rates), None))
        peak = f", {dtype} {quantity(rates[dtype], 'FLOP/s')}" if dtype else ""
        return headline(f"Machine {self.id}: {quantity(ceilings.bandwidth, 'B/s')}{peak} ({how})")

    def ridge(self, dtype: str) -> float:
        """FLOP per byte above which `dtype` matrix work is limited by compute rather than memory."""
        ceilings = self.achievable or self.theoretical
        if ceilings is None:
            raise UsageError(f"{self.name} has no ceilings yet. Run `nearpeak machine --calibrate` on it.")
        return ceilings.peak(dtype) / ceilings.bandwidth


def _peak(matrix: Mapping[str, float], vector: Mapping[str, float], dtype: str, what: str) -> float:
    dtype = dtype.removeprefix("torch.")
    value = matrix.get(dtype, vector.get(dtype))
    if value is None:
        valid = {*matrix, *vector}
        raise UsageError(f"No {what} for dtype {dtype!r} on this machine. {did_you_mean(dtype, valid)}")
    return value
