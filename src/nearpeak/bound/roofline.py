"""The roofline: `bound` of one `Work`, and `KernelStream` for kernels in order over one last-level cache."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from nearpeak.bound.cache import Residency, distinct
from nearpeak.errors import UsageError, did_you_mean
from nearpeak.machines.machine import Achievable, Machine, Theoretical
from nearpeak.ops.cost import Access
from nearpeak.ops.op import Trace
from nearpeak.ops.work import Work

Limiter = Literal["memory", "compute", "launch"]
Ceilings = Literal["achievable", "theoretical"]
FloorLimiter = Literal["memory", "cache", "compute", "launch", "none"]
ResourceSeconds = tuple[float, float, float, float]
"""The fields of `KernelBound` as a tuple, for when many are made: memory, cache, compute, launch."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelBound:
    """Seconds for each resource; they overlap, so the longest is the bound."""

    memory_seconds: float
    cache_seconds: float
    compute_seconds: float
    launch_seconds: float = 0.0

    @staticmethod
    def of(times: ResourceSeconds) -> KernelBound:
        """The bound with these seconds."""
        memory, cache, compute, launch = times
        return KernelBound(memory_seconds=memory, cache_seconds=cache, compute_seconds=compute, launch_seconds=launch)

    @property
    def seconds(self) -> float:
        """The roofline."""
        return max(self.memory_seconds, self.cache_seconds, self.compute_seconds, self.launch_seconds)

    @property
    def limiter(self) -> FloorLimiter:
        """The resource that sets `seconds`; "none" for what costs nothing."""
        return limiting_resource((self.memory_seconds, self.cache_seconds, self.compute_seconds, self.launch_seconds))[
            1
        ]


def limiting_resource(times: ResourceSeconds) -> tuple[float, FloorLimiter]:
    """The longest of the four, and its name.

    >>> limiting_resource((2.0, 1.0, 3.0, 0.0))
    (3.0, 'compute')
    """
    memory, cache, _, launch = times
    seconds = max(times)
    if not seconds:
        return seconds, "none"
    if launch == seconds:
        return seconds, "launch"
    if memory == seconds:
        return seconds, "memory"
    return seconds, "cache" if cache == seconds else "compute"


def _least_launch(limits: Achievable) -> float:
    """The time of an empty kernel, less the resolution of a clock that reads its start and its end."""
    cost = limits.launch
    return max(0.0, (cost.in_graph or 0.0) - 2 * (cost.event_tick or 0.0))


class KernelStream:
    """Kernels in order on a machine: each call of `seconds` is the next, and finds the cache as the last left it."""

    def __init__(self, trace: Trace, machine: Machine, ceilings: Ceilings, residency: Residency | None = None) -> None:
        limits: Achievable | Theoretical | None
        limits = machine.achievable if ceilings == "achievable" else machine.theoretical
        if limits is None:
            raise UsageError(f"{machine.name} has no {ceilings} ceilings. Run `nearpeak machine --calibrate` on it.")
        self.trace = trace
        self.machine = machine
        self.limits = limits
        self._bandwidth = limits.bandwidth
        self._computed: dict[tuple[int, int], tuple[Mapping[str, float], Mapping[str, float], float]] = {}
        self._guessed = trace.guessed_storages
        self.residency = residency or Residency(machine.cache_bytes or 0.0)
        self._warm = self.residency.capacity_bytes if trace.guessed_storages else 0.0  # left there by what ran before
        cache_bandwidth = limits.cache_bandwidth if isinstance(limits, Achievable) else None
        # No byte is faster through the memory than through the cache before it, whatever two measurements say.
        self.cache_bandwidth = max(cache_bandwidth, limits.bandwidth) if cache_bandwidth else float("inf")
        on_gpu = isinstance(limits, Achievable) and machine.kind == "gpu"
        self.launch = _least_launch(limits) if on_gpu and isinstance(limits, Achievable) else 0.0

    def seconds(
        self,
        reads: tuple[Access, ...],
        writes: tuple[Access, ...],
        flops: Mapping[str, float],
        vector_flops: Mapping[str, float],
        *,
        launches: bool,
        op: int,
    ) -> ResourceSeconds:
        """The seconds of the next kernel for memory, cache, compute and launch."""
        compute = self.compute_seconds(flops, vector_flops, op) if flops or vector_flops else 0.0
        launch = self.launch if launches else 0.0
        if not (reads or writes):
            return 0.0, 0.0, compute, launch
        cache, storages = self.residency, self.trace.storages
        before = cache.written_back
        reads, writes = distinct(reads, storages), distinct(writes, storages)
        missed = cache.kernel(reads, writes, storages, wanted=not self._guessed)
        if self._warm:
            warm = min(missed, self._warm)
            self._warm -= warm
            missed -= warm
        moved = 0.0
        for access in reads:
            moved += access.bytes
        for access in writes:
            moved += access.bytes
        # What it evicts, earlier kernels wrote, and may have brought to memory themselves: its own bytes are the most.
        traffic = min(missed + cache.written_back - before, moved)
        return traffic / self._bandwidth, moved / self.cache_bandwidth, compute, launch

    def release(self, storages: Iterable[int]) -> None:
        """Drops storages that no later kernel uses: they are never written back."""
        for storage in storages:
            self.residency.release(storage)

    def compute_seconds(self, flops: Mapping[str, float], vector_flops: Mapping[str, float], op: int) -> float:
        """Matrix and vector work side by side, memoized by the two mappings: ops of one kind share theirs."""
        if not (flops or vector_flops):
            return 0.0
        key = (id(flops), id(vector_flops))
        memo = self._computed.get(key)
        if memo is None:  # the memo holds the mappings, so that their ids stay unique
            seconds = max(self.matrix_seconds(flops, op), self.vector_seconds(vector_flops, op))
            memo = self._computed[key] = (flops, vector_flops, seconds)
        return memo[2]

    def matrix_seconds(self, flops: Mapping[str, float], op: int) -> float:
        """Matrix work of all dtypes, one after the other; at the vector rate of a dtype that has no matrix engine."""
        total = 0.0
        for dtype, count in flops.items():
            if count:
                total += count / self._rates(dtype, op)[0]
        return total

    def vector_seconds(self, flops: Mapping[str, float], op: int, *, best: bool = False) -> float:
        """Vector work of all dtypes; at the matrix rate where there is no other, or where it is better and `best`."""
        total = 0.0
        for dtype, count in flops.items():
            if count:
                matrix, vector = self._rates(dtype, op)
                total += count / (max(matrix, vector) if best else vector)
        return total

    def _rates(self, dtype: str, op: int) -> tuple[float, float]:
        limits = self.limits
        matrix, vector = limits.matrix.get(dtype), limits.vector.get(dtype)
        if matrix is None and vector is None:
            raise UsageError(
                f"{self.trace.ops[op].name} (op {op}) computes in {dtype}, for which {self.machine.name} has no peak. "
                f"{did_you_mean(dtype, {*limits.matrix, *limits.vector})} A machine of your own gets its figures from "
                "`nearpeak machine --calibrate`."
            )
        return matrix or vector or 0.0, vector or matrix or 0.0
