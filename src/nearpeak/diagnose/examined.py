"""`Examined`: all that is known of a step, for rules to look at."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from nearpeak.bound.dependencies import Touches, touches_in
from nearpeak.bound.expected import at, expected_seconds
from nearpeak.bound.times import Stream, roof
from nearpeak.diagnose.flow import Flow, flow_of
from nearpeak.diagnose.profile import Profile, ProfiledOp
from nearpeak.machines.model import Machine, Reached
from nearpeak.machines.reference import reference
from nearpeak.work.cost import Access, Cost, cost_of, costs_of
from nearpeak.work.op import Op, Trace

Known = Literal["storages", "lines", "host", "memory"]
"""What of a step can be known: which tensors share memory, the lines of ops, what the host did, the peak of memory."""


@dataclass(frozen=True, kw_only=True)
class Examined:
    """A step that was profiled, op by op: what it computes and moves, and how long each op took.

    `trace.ops`, `costs` and `measured` have one entry for each op, and rules name ops by their index.
    """

    trace: Trace
    profile: Profile
    machine: Machine
    knows: frozenset[Known]
    named: frozenset[int] = frozenset()
    """Ops that other rules claim something of, for a general rule, which looks after them."""

    def after(self, named: Iterable[int]) -> Examined:
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

    def own_kernel(self, call: str) -> str:
        """How nearpeak's own kernel for it is called; empty where the machine runs none."""
        return f"nearpeak.kernels.{call}" if self.machine.kind == "gpu" else ""

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
    def flow(self) -> Flow:
        """Who wrote what an op reads, and who reads what it wrote."""
        return flow_of(self.trace, self.touches)

    @cached_property
    def idle_worth(self) -> float:
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
        return max(0.0, 1.0 - slower * self.products_share / idle_s)

    @cached_property
    def products_share(self) -> float:
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
        stream = Stream(self.trace, self.machine, "achievable")
        times = stream.seconds(cost.reads, cost.writes, cost.flops, cost.vector_flops, launches=True, op=0)
        return expected_seconds(op, cost, times, self._efficiency)

    def as_one_kernel(self, members: Collection[int], *, kind: str = "pointwise", keep: Collection[int] = ()) -> float:
        """What a good kernel takes that does the work of several ops at once.

        It reads what comes from outside of them and writes what is wanted outside, each once. FLOPs count too, at the
        matrix rate where the ops run there.

        Args:
            members: Indices of the ops.
            kind: Kernels of which kind to take as a measure: "pointwise", "reduction", "normalisation", ...
            keep: Storages to write even if nobody outside reads them.
        """
        reads, writes = self.border(members, keep=keep)
        flops: dict[str, float] = {}
        vector: dict[str, float] = {}
        for index in members:
            for total, part in ((flops, self.costs[index].flops), (vector, self.costs[index].vector_flops)):
                for dtype, count in part.items():
                    total[dtype] = total.get(dtype, 0.0) + count
        return self.of_work(reads, writes, flops, vector, kind=kind)

    def of_work(
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
        return at(points, bound) if points else bound

    def least(
        self,
        reads: Sequence[Access],
        writes: Sequence[Access],
        flops: Mapping[str, float] | None = None,
        vector_flops: Mapping[str, float] | None = None,
    ) -> float:
        """What no kernel can beat for so much work."""
        stream = Stream(self.trace, self.machine, "achievable")
        bound, _ = roof(
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
    def _efficiency(self) -> Mapping[str, Sequence[Reached]]:
        achievable = self.machine.achievable
        if achievable is not None and achievable.efficiency:
            return achievable.efficiency
        return reference(self.machine.kind).efficiency
