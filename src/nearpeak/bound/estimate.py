"""`Estimate`: a trace on a machine: every op with its bound, the three floors of the whole, and what has no model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from nearpeak import _display
from nearpeak.bound.dataflow import touches_in
from nearpeak.bound.expected import expected_times
from nearpeak.bound.floors import group_times, ideal, written_times
from nearpeak.bound.fusion import FusionGroup, fusion_groups
from nearpeak.bound.roofline import Ceilings, limiting_resource
from nearpeak.bound.tiles import Tiling, tiling
from nearpeak.machines.machine import Machine
from nearpeak.ops.cost import Cost, costs_of
from nearpeak.ops.fast_init import fast_init, positional_constructor
from nearpeak.ops.low_gc import low_gc
from nearpeak.ops.op import Op, Origin, Phase, Trace
from nearpeak.ops.op_classes import classify_ops
from nearpeak.ops.work import Work
from nearpeak.units import seconds


@fast_init
@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatedOp:
    """One op of an estimate. `seconds` is its bound: no run of it on the machine is faster."""

    name: str
    family: str
    flops: float
    bytes_read: float
    bytes_written: float
    seconds: float
    limiter: str
    module: str
    phase: Phase
    source: str
    model: str
    """Where its cost comes from: "formula", "operands" or "none"."""
    engine: str = ""
    """Where most of its FLOPs run: "matrix", "vector", or "" without FLOPs."""
    dtype: str = ""
    """The dtype that it computes in, as ceilings name it."""
    shapes: tuple[tuple[int, ...], ...] = ()
    """Of its tensor operands."""
    tiling: Tiling | None = None
    """Tiles and waves of a matrix product on a GPU, which are no part of the bound."""
    expected_seconds: float | None = None
    """The time of a good kernel; None where nothing like it was measured."""
    origin: Origin = "torch"

    def __repr__(self) -> str:
        at = f" at {self.source}" if self.source else ""
        bound = "no bound" if self.model == "none" else f"bound {seconds(self.seconds)} ({self.limiter})"
        return _display.headline(f"{self.name} {self.phase}{at}: {bound}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """How much of a trace has a cost model: by number of ops, and by their share of the as-written time."""

    formula: int
    operands: int
    none: int
    seconds_share: float
    """Time of ops with a formula over the time of all."""
    unmodeled: Mapping[str, int]
    """Operators without a formula, and how often they ran."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate(_display.Result):
    """What the hardware allows for a piece of code. Three floors, each at or below the one before."""

    machine: str
    ceilings: Ceilings
    how: Literal["measured", "derated", "datasheet"]
    """Where the machine's ceilings come from."""
    as_written_s: float
    """Every op at its own roofline, in the order written."""
    fused_s: float
    """The same work with intermediates that need not reach memory kept out of it."""
    ideal_s: float
    """Parameters, inputs and results cross memory once; all FLOPs at the matrix rate."""
    work: Work
    ops: tuple[EstimatedOp, ...]
    groups: tuple[FusionGroup, ...]
    coverage: Coverage
    truncated: bool = False
    notes: tuple[str, ...] = ()
    group_seconds: tuple[float, ...] = ()
    """The bound of each of `groups` as one kernel."""
    expected_s: float | None = None
    """The time of the ops as written, one call after the other: that of their kernels, or of the host that calls them.
    No bound; None where it is not known."""
    expected_device_s: float | None = None
    """The time of their kernels alone: what a CUDA graph takes, or a host that is far ahead. On a CPU the same."""
    expected_from: str = ""
    """The machine whose kernels were measured for `expected_s`."""
    memory_bytes: float = 0.0
    """The part of `bytes` that the last-level cache does not serve: the least that crosses memory."""

    def __repr__(self) -> str:
        times = (("as written", self.as_written_s), ("fused", self.fused_s), ("ideal", self.ideal_s))
        floors = ", ".join(f"{name} {seconds(value)}" for name, value in times)
        return _display.headline(f"Estimate of {len(self.ops)} ops on {self.machine}: {floors}")

    @property
    def flops(self) -> float:
        """All floating-point operations, on both engines; convolutions count in the direct form.

        `work` has the least that a fast algorithm needs, as the bounds do.
        """
        return sum([op.flops for op in self.ops])

    @property
    def bytes(self) -> float:
        """All bytes that the ops as written move, wherever they are served from."""
        return self.work.bytes


def estimate_trace(trace: Trace, machine: Machine, *, ceilings: Ceilings = "achievable") -> Estimate:
    """The bounds of a trace on a machine."""
    with low_gc():
        return _estimate(trace, machine, ceilings)


def _estimate(trace: Trace, machine: Machine, ceilings: Ceilings) -> Estimate:
    kinds = classify_ops(trace.ops)
    costs = costs_of(trace.ops, kinds)
    touches = touches_in(trace, costs, kinds)
    written = written_times(trace, costs, machine, ceilings, touches)
    bounds = [limiting_resource(times) for times in written]
    fusion = fusion_groups(trace, costs, touches)
    reached = written
    if ceilings != "achievable" and machine.achievable is not None:
        reached = written_times(trace, costs, machine, "achievable", touches)
    expectation = expected_times(trace, costs, reached, machine, kinds)
    facts = [
        _facts(trace.ops[index], costs[index], machine, memo)
        for index, memo in zip(kinds.firsts, kinds.memos, strict=True)
    ]
    ops = tuple(
        [
            _estimated(op, facts[kind], bound, expected)
            for op, kind, bound, expected in zip(trace.ops, kinds.kinds, bounds, expectation.seconds, strict=True)
        ]
    )
    written_seconds = sum([op.seconds for op in ops])
    group_seconds = tuple([max(times) for times in group_times(trace, costs, fusion, machine, ceilings, touches)])
    achievable = machine.achievable
    return Estimate(
        machine=machine.id,
        ceilings=ceilings,
        how=achievable.how if ceilings == "achievable" and achievable is not None else "datasheet",
        as_written_s=written_seconds,
        fused_s=min(sum(group_seconds), written_seconds),
        ideal_s=ideal(trace, costs, machine, ceilings=ceilings).seconds,
        work=_total(facts, kinds.kinds),
        ops=ops,
        groups=fusion,
        coverage=_coverage(ops),
        truncated=trace.truncated,
        notes=trace.notes,
        group_seconds=group_seconds,
        expected_s=expectation.total,
        expected_device_s=expectation.device,
        expected_from=expectation.measured_on,
        memory_bytes=sum([times[0] for times in written]) * _bandwidth(machine, ceilings),
    )


def _bandwidth(machine: Machine, ceilings: Ceilings) -> float:
    limits = machine.achievable if ceilings == "achievable" else machine.theoretical
    return 0.0 if limits is None else limits.bandwidth


class _Facts(NamedTuple):
    """The fields of `EstimatedOp` that all ops of one kind share."""

    name: str
    family: str
    flops: float
    bytes_read: float
    bytes_written: float
    model: str
    engine: str
    dtype: str
    shapes: tuple[tuple[int, ...], ...]
    tiling: Tiling | None
    cost: Cost
    machine: Machine


def _facts(op: Op, cost: Cost, machine: Machine, memo: dict[str, Any]) -> _Facts:
    facts_before: _Facts | None = memo.get("facts")
    if facts_before is not None and facts_before.machine is machine and facts_before.cost.flops is cost.flops:
        return facts_before
    by_dtype = cost.flops if any(cost.flops.values()) else cost.vector_flops
    dtype = max(by_dtype, key=lambda name: by_dtype[name], default="")
    facts = _Facts(
        name=op.name,
        family=cost.family,
        flops=cost.direct_flops,
        bytes_read=sum([access.bytes for access in cost.reads]),
        bytes_written=sum([access.bytes for access in cost.writes]),
        model=cost.model,
        engine=("matrix" if by_dtype is cost.flops else "vector") if dtype else "",
        dtype=dtype,
        shapes=tuple(tensor.shape for tensor in op.inputs),
        tiling=tiling(op, machine) if cost.family == "matrix" else None,
        cost=cost,
        machine=machine,
    )
    memo["facts"] = facts
    return facts


def _estimated(op: Op, facts: _Facts, bound: tuple[float, str], expected: float | None) -> EstimatedOp:
    return _make_estimated(
        facts.name,
        facts.family,
        facts.flops,
        facts.bytes_read,
        facts.bytes_written,
        bound[0],
        bound[1],
        op.module,
        op.phase,
        op.source,
        facts.model,
        facts.engine,
        facts.dtype,
        facts.shapes,
        facts.tiling,
        expected,
        op.origin,
    )


_make_estimated = positional_constructor(EstimatedOp)


def _total(facts: Sequence[_Facts], kinds: Sequence[int]) -> Work:
    flops: dict[str, float] = {}
    vector: dict[str, float] = {}
    read = written = 0.0
    for kind in kinds:
        fact = facts[kind]
        for dtype, count in fact.cost.flops.items():
            flops[dtype] = flops.get(dtype, 0.0) + count
        for dtype, count in fact.cost.vector_flops.items():
            vector[dtype] = vector.get(dtype, 0.0) + count
        read += fact.bytes_read
        written += fact.bytes_written
    return Work(flops=flops, vector_flops=vector, bytes_read=read, bytes_written=written)


def _coverage(ops: tuple[EstimatedOp, ...]) -> Coverage:
    counts = {"formula": 0, "operands": 0, "none": 0}
    unmodeled: dict[str, int] = {}
    modeled = total = 0.0
    for op in ops:
        counts[op.model] += 1
        total += op.seconds
        if op.model == "formula":
            modeled += op.seconds
        else:
            unmodeled[op.name] = unmodeled.get(op.name, 0) + 1
    share = modeled / total if total else 1.0
    return Coverage(
        formula=counts["formula"],
        operands=counts["operands"],
        none=counts["none"],
        seconds_share=share,
        unmodeled=unmodeled,
    )
