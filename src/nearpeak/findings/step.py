"""`Step`: everything that is known about a profiled step, as rules see it: ops, costs, times and the data flow between ops."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from nearpeak.bound.dataflow import Touches, touches_in
from nearpeak.bound.expected import expected_seconds, interpolate
from nearpeak.bound.roofline import KernelStream, limiting_resource
from nearpeak.machines.machine import EfficiencyPoint, Machine
from nearpeak.machines.reference import reference_efficiency
from nearpeak.ops.cost import Access, Cost, cost_of, costs_of
from nearpeak.ops.op import Op, Trace
from nearpeak.profiles.finding import Fix
from nearpeak.profiles.profile import Profile, ProfiledOp


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFlow:
    """The data flow of a trace. All are by the index of the op."""

    producers: Sequence[dict[int, int]]
    """For each storage that an op reads: the op that wrote it last. What existed before the step has no entry."""
    consumers: Sequence[tuple[int, ...]]
    """The ops that read what an op wrote, before something else overwrote it; in order."""
    written_by: Sequence[tuple[int, ...]]
    """The storages that an op writes."""
    read_by: Sequence[tuple[int, ...]]
    """The storages that an op reads."""
    results: frozenset[int]
    """Storages that outlive the step."""

    def private(self, members: Collection[int]) -> set[int]:
        """Storages that only ops of `members` write and read: as one kernel they need no memory."""
        inside = set(members)
        found = set()
        for index in inside:
            if all(reader in inside for reader in self.consumers[index]):
                found |= {storage for storage in self.written_by[index] if storage not in self.results}
        shared = {
            storage
            for index in inside
            if not all(reader in inside for reader in self.consumers[index])
            for storage in self.written_by[index]
        }
        return found - shared


def data_flow(trace: Trace, touches: Sequence[Touches]) -> DataFlow:
    """In one pass over the ops."""
    writer: dict[int, int] = {}
    producers: list[dict[int, int]] = []
    consumers: list[list[int]] = [[] for _ in touches]
    for index, (reads, writes) in enumerate(touches):
        found = {storage: writer[storage] for storage in reads if storage in writer}
        producers.append(found)
        for producer in dict.fromkeys(found.values()):
            if producer != index:
                consumers[producer].append(index)
        for storage in writes:
            writer[storage] = index
    return DataFlow(
        producers=producers,
        consumers=[tuple(readers) for readers in consumers],
        written_by=[tuple(touch.writes) for touch in touches],
        read_by=[tuple(touch.reads) for touch in touches],
        results=frozenset(trace.results),
    )


def between(flow: DataFlow, first: int, last: int) -> Iterable[int]:
    """The ops on any path of data from one op to another, both included."""
    behind = {last}
    for index in range(last, first, -1):
        if index in behind:
            behind.update(flow.producers[index].values())
    ahead = {first}
    for index in range(first, last + 1):
        if index in ahead:
            ahead.update(flow.consumers[index])
    return sorted(ahead & behind & set(range(first, last + 1)))


StepFact = Literal["storages", "lines", "host", "memory"]
"""What of a step can be known: which tensors share memory, the lines of ops, what the host did, the peak of memory."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step that was profiled, op by op: what it computes and moves, and how long each op took.

    `trace.ops`, `costs` and `measured` have one entry for each op, and rules name ops by their index.
    """

    trace: Trace
    profile: Profile
    machine: Machine
    knows: frozenset[StepFact]
    named: frozenset[int] = frozenset()
    """Ops that other rules claim something of, for a general rule, which looks after them."""

    def after(self, named: Iterable[int]) -> Step:
        """The same step when other rules have looked at it; what was found out about it is kept."""
        again = copy.copy(self)
        object.__setattr__(again, "named", frozenset(named))
        return again

    @property
    def ops(self) -> Sequence[Op]:
        """What ran: arguments, tensors, phase, module and line."""
        return self.trace.ops

    @property
    def measured(self) -> Sequence[ProfiledOp]:
        """The same ops with their times, `measured_s`, `bound_s` and `expected_s`."""
        return self.profile.ops

    def nearpeak_kernel(self, name: str, arguments: str) -> Fix | None:
        """The fix that a function of `nearpeak.kernels` offers; None if the machine does not run these kernels."""
        return Fix(id=name, usage=f"nearpeak.kernels.{name}{arguments}") if self.machine.kind == "gpu" else None

    @cached_property
    def trains(self) -> bool:
        """Whether the step has a backward pass or an optimizer; else it is inference."""
        return any(op.phase != "forward" for op in self.trace.ops)

    @cached_property
    def costs(self) -> tuple[Cost, ...]:
        """What each op must do at the least: family, reads and writes by storage, FLOPs."""
        return costs_of(self.trace.ops)

    @cached_property
    def touches(self) -> tuple[Touches, ...]:
        """The storages that each op reads and writes; a view touches none."""
        return touches_in(self.trace, self.costs)

    @cached_property
    def flow(self) -> DataFlow:
        """Who wrote what an op reads, and who reads what it wrote."""
        return data_flow(self.trace, self.touches)

    @cached_property
    def idle_value(self) -> float:
        """What a second of idle time is worth: less than 1 where products run faster than they can for long.

        A GPU at its limit of power lowers its clock. Products of a step that rests often may run above what the
        machine sustains; without the rests they do not, as far as products are what the device does.
        """
        limits = self.machine.achievable
        idle_s = sum(cause.seconds for cause in self.profile.idle)
        if limits is None or not limits.matrix_sustained or not idle_s or not self.profile.kernel_s:
            return 1.0
        slower = 0.0
        for cost, op in zip(self.costs, self.measured, strict=True):
            rates = limits.matrix_sustained
            lasting = sum(count / rates[dtype] for dtype, count in cost.flops.items() if dtype in rates)
            if lasting and op.measured_s:
                slower += max(0.0, lasting - op.measured_s)
        return max(0.0, 1.0 - slower * self.matrix_time_share / idle_s)

    @cached_property
    def matrix_time_share(self) -> float:
        """The share of the time in which kernels ran that ops of the matrix engine have."""
        products = sum(op.measured_s for cost, op in zip(self.costs, self.measured, strict=True) if cost.flops)
        return products / self.profile.kernel_s if self.profile.kernel_s else 0.0

    def seconds(self, indices: Iterable[int]) -> float:
        """What some ops took together."""
        return sum(self.measured[index].measured_s for index in indices)

    def bytes(self, indices: Iterable[int]) -> float:
        """What they move at the least, each on its own."""
        return sum(self.measured[index].bytes for index in indices)

    def expected(self, op: Op) -> float | None:
        """What a good kernel takes on this machine for an op that need not be in the step, its inputs not in cache."""
        cost = cost_of(op)
        stream = KernelStream(self.trace, self.machine, "achievable")
        times = stream.seconds(cost.reads, cost.writes, cost.flops, cost.vector_flops, launches=True, op=0)
        return expected_seconds(op, cost, times, self._efficiency)

    def expected_fused(self, members: Collection[int], *, kind: str = "pointwise", keep: Collection[int] = ()) -> float:
        """What a good kernel takes that does the work of several ops at once.

        It reads what comes from outside of them and writes what is wanted outside, each once. FLOPs count too, at the
        matrix rate where the ops run there.

        Args:
            members: Indices of the ops.
            kind: Kernels of which kind to take as a measure: "pointwise", "reduction", "normalization", ...
            keep: Storages to write even if nobody outside reads them.
        """
        reads, writes = self.border(members, keep=keep)
        flops: dict[str, float] = {}
        vector: dict[str, float] = {}
        for index in members:
            for total, part in ((flops, self.costs[index].flops), (vector, self.costs[index].vector_flops)):
                for dtype, count in part.items():
                    total[dtype] = total.get(dtype, 0.0) + count
        return self.expected_for_work(reads, writes, flops, vector, kind=kind)

    def expected_for_work(
        self,
        reads: Sequence[Access],
        writes: Sequence[Access],
        flops: Mapping[str, float] | None = None,
        vector_flops: Mapping[str, float] | None = None,
        *,
        kind: str = "pointwise",
    ) -> float:
        """What a good kernel takes for so much work, as kernels of some kind come near to their bounds."""
        bound = self.least(reads, writes, flops, vector_flops)
        points = self._efficiency.get(kind) or self._efficiency.get("any")
        return interpolate(points, bound) if points else bound

    def least(
        self,
        reads: Sequence[Access],
        writes: Sequence[Access],
        flops: Mapping[str, float] | None = None,
        vector_flops: Mapping[str, float] | None = None,
    ) -> float:
        """What no kernel can beat for so much work."""
        stream = KernelStream(self.trace, self.machine, "achievable")
        bound, _ = limiting_resource(
            stream.seconds(
                tuple(reads), tuple(writes), dict(flops or {}), dict(vector_flops or {}), launches=True, op=0
            )
        )
        return bound

    def border(
        self, members: Collection[int], *, keep: Collection[int] = ()
    ) -> tuple[tuple[Access, ...], tuple[Access, ...]]:
        """What ops read that none of them wrote before, and what they write that is wanted outside."""
        private = self.flow.private(members) - set(keep)
        reads: dict[int, float] = {}
        writes: dict[int, float] = {}
        inside: set[int] = set()
        for index in sorted(members):
            for access in self.costs[index].reads:
                if access.storage not in inside:
                    reads[access.storage] = max(reads.get(access.storage, 0.0), access.bytes)
            for access in self.costs[index].writes:
                inside.add(access.storage)
                if access.storage not in private:
                    writes[access.storage] = max(writes.get(access.storage, 0.0), access.bytes)
        return (
            tuple(Access(storage=storage, bytes=size) for storage, size in reads.items()),
            tuple(Access(storage=storage, bytes=size) for storage, size in writes.items()),
        )

    @cached_property
    def _efficiency(self) -> Mapping[str, Sequence[EfficiencyPoint]]:
        achievable = self.machine.achievable
        if achievable is not None and achievable.efficiency:
            return achievable.efficiency
        return reference_efficiency(self.machine.kind).efficiency


PROFILER_SECONDS_PER_OP = 2e-5
"""Seconds that the profiler adds to an op of the host, at most."""


def is_recurring_stall(profile: Profile, seconds: float) -> bool:
    """Whether a stall of the profiled step is not the reason why that step took longer than clean ones.

    A collection, a slow batch or another process may come into one step of many: then the profiled step is longer than
    the clean ones by the stall, and by more than the profiler's own work.
    """
    if profile.profiled_s is None:
        return True
    longer = profile.profiled_s - profile.wall_s - PROFILER_SECONDS_PER_OP * len(profile.ops)
    return longer < 0.5 * seconds


def is_source_line(where: str) -> bool:
    """Whether a place is a line of code, and no module.

    >>> is_line("train.py:41"), is_line("model.layers.0")
    (True, False)
    """
    return where.rpartition(":")[2].isdigit()
