"""`Times` and `Stream`: the roofline of kernels that run one after the other over one last-level cache."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Literal

from nearpeak.bound.cache import Residency, by_storage
from nearpeak.errors import UsageError, did_you_mean
from nearpeak.machines.model import Achievable, Machine, Theoretical
from nearpeak.work.cost import Access
from nearpeak.work.op import Trace

Ceilings = Literal["achievable", "theoretical"]
FloorLimiter = Literal["memory", "cache", "compute", "launch", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds for each resource; they overlap, so the longest is the bound."""

    memory_seconds: float
    cache_seconds: float
    compute_seconds: float
    launch_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """The roofline."""
        return max(self.memory_seconds, self.cache_seconds, self.compute_seconds, self.launch_seconds)

    def seconds_by_resource(self) -> dict[str, float]:
        """The fields, for a record that has others beside them."""
        return {field.name: getattr(self, field.name) for field in fields(Times)}

    @property
    def limiter(self) -> FloorLimiter:
        """The resource that sets `seconds`; "none" for what costs nothing."""
        if not self.seconds:
            return "none"
        named: tuple[tuple[FloorLimiter, float], ...] = (
            ("launch", self.launch_seconds),
            ("memory", self.memory_seconds),
            ("cache", self.cache_seconds),
            ("compute", self.compute_seconds),
        )
        return max(named, key=lambda item: item[1])[0]


class Stream:
    """Kernels in order on a machine: each call of `step` is the next one, and finds the cache as the last left it."""

    def __init__(self, trace: Trace, machine: Machine, ceilings: Ceilings, residency: Residency | None = None) -> None:
        limits: Achievable | Theoretical | None
        limits = machine.achievable if ceilings == "achievable" else machine.theoretical
        if limits is None:
            raise UsageError(f"{machine.name} has no {ceilings} ceilings. Run `nearpeak machine --calibrate` on it.")
        self.trace = trace
        self.machine = machine
        self.limits = limits
        self.residency = residency or Residency(machine.cache_bytes or 0.0)
        known = limits.cache_bandwidth if isinstance(limits, Achievable) else None
        # No byte is faster through the memory than through the cache before it, whatever two measurements say.
        self.cache_bandwidth = max(known, limits.bandwidth) if known else float("inf")
        on_gpu = isinstance(limits, Achievable) and machine.kind == "gpu"
        self.launch = (limits.launch.in_graph or 0.0) if on_gpu and isinstance(limits, Achievable) else 0.0

    def step(
        self,
        reads: Sequence[Access],
        writes: Sequence[Access],
        flops: Mapping[str, float],
        vector_flops: Mapping[str, float],
        *,
        launches: bool,
        op: int,
    ) -> Times:
        """The next kernel. Its reads run side by side, so all of them find the cache as it was before the kernel."""
        cache = self.residency
        before = cache.written_back
        read = by_storage(reads, self.trace.storages)
        written = by_storage(writes, self.trace.storages)
        missed = sum(max(size - cache.resident(storage), 0.0) for storage, size in read.items())
        for storage, size in read.items():
            cache.access(storage, size)
        for storage, size in written.items():
            known = self.trace.storages.get(storage)
            cache.write(storage, size, limit=known.bytes if known and known.bytes else float("inf"))
        moved = sum(read.values()) + sum(written.values())
        return Times(
            memory_seconds=(missed + cache.written_back - before) / self.limits.bandwidth,
            cache_seconds=moved / self.cache_bandwidth,
            compute_seconds=max(self.matrix_seconds(flops, op), self.vector_seconds(vector_flops, op)),
            launch_seconds=self.launch if launches else 0.0,
        )

    def release(self, storages: Iterable[int]) -> None:
        """Forgets storages that nobody wants any more: they are never written back."""
        for storage in storages:
            self.residency.release(storage)

    def matrix_seconds(self, flops: Mapping[str, float], op: int) -> float:
        """Matrix work of all dtypes, one after the other; at the vector rate of a dtype that has no matrix engine."""
        return sum(count / self._rates(dtype, op)[0] for dtype, count in flops.items() if count)

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
