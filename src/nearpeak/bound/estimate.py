"""`Estimate`: a trace on a machine: every op with its bound, the three floors of the whole, and what has no model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nearpeak.bound.floors import as_written, fused_seconds, ideal_seconds
from nearpeak.bound.fusion import Group, groups
from nearpeak.bound.times import Ceilings
from nearpeak.machines.model import Machine
from nearpeak.work.cost import Cost, cost_of
from nearpeak.work.model import Work
from nearpeak.work.op import Op, Phase, Trace


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
    """How its cost was found: "formula", "operands" or "none"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """How much of a trace has a cost model: by number of ops, and by their share of the as-written time."""

    formula: int
    operands: int
    none: int
    seconds_share: float
    """Time of ops with a formula over the time of all."""
    unmodelled: Mapping[str, int]
    """Operators without a formula, and how often they ran."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What the hardware allows for a piece of code. Three floors, each at or below the one before."""

    machine: str
    ceilings: Ceilings
    how: str
    """Where the machine's ceilings come from: "measured", "derated" or "datasheet"."""
    as_written_s: float
    """Every op at its own roofline, in the order written."""
    fused_s: float
    """The same work with intermediates that need not reach memory kept out of it."""
    ideal_s: float
    """Parameters, inputs and results cross memory once; all FLOPs at the matrix rate."""
    work: Work
    ops: tuple[EstimatedOp, ...]
    groups: tuple[Group, ...]
    coverage: Coverage
    truncated: bool = False
    notes: tuple[str, ...] = ()

    @property
    def flops(self) -> float:
        """All floating-point operations, on both engines."""
        return sum(self.work.flops.values()) + sum(self.work.vector_flops.values())

    @property
    def bytes(self) -> float:
        """All bytes that the ops as written move, wherever they are served from."""
        return self.work.bytes


def estimate_trace(trace: Trace, machine: Machine, *, ceilings: Ceilings = "achievable") -> Estimate:
    """The bounds of a trace on a machine."""
    costs = tuple(cost_of(op) for op in trace.ops)
    bounds = as_written(trace, costs, machine, ceilings=ceilings)
    fusion = groups(trace, costs)
    ops = tuple(
        _estimated(op, cost, bound.seconds, bound.limiter)
        for op, cost, bound in zip(trace.ops, costs, bounds, strict=True)
    )
    achievable = machine.achievable
    return Estimate(
        machine=machine.id,
        ceilings=ceilings,
        how=achievable.how if ceilings == "achievable" and achievable is not None else "datasheet",
        as_written_s=sum(op.seconds for op in ops),
        fused_s=fused_seconds(trace, costs, fusion, machine, ceilings=ceilings, written=bounds),
        ideal_s=ideal_seconds(trace, costs, machine, ceilings=ceilings),
        work=_total(costs),
        ops=ops,
        groups=fusion,
        coverage=_coverage(ops),
        truncated=trace.truncated,
        notes=trace.notes,
    )


def _estimated(op: Op, cost: Cost, seconds: float, limiter: str) -> EstimatedOp:
    work = cost.work
    return EstimatedOp(
        name=op.name,
        family=cost.family,
        flops=sum(work.flops.values()) + sum(work.vector_flops.values()),
        bytes_read=work.bytes_read,
        bytes_written=work.bytes_written,
        seconds=seconds,
        limiter=limiter,
        module=op.module,
        phase=op.phase,
        source=op.source,
        model=cost.model,
    )


def _total(costs: tuple[Cost, ...]) -> Work:
    flops: dict[str, float] = {}
    vector: dict[str, float] = {}
    read = written = 0.0
    for cost in costs:
        work = cost.work
        for totals, parts in ((flops, work.flops), (vector, work.vector_flops)):
            for dtype, count in parts.items():
                totals[dtype] = totals.get(dtype, 0.0) + count
        read += work.bytes_read
        written += work.bytes_written
    return Work(flops=flops, vector_flops=vector, bytes_read=read, bytes_written=written)


def _coverage(ops: tuple[EstimatedOp, ...]) -> Coverage:
    counts = {"formula": 0, "operands": 0, "none": 0}
    unmodelled: dict[str, int] = {}
    modelled = total = 0.0
    for op in ops:
        counts[op.model] += 1
        total += op.seconds
        if op.model == "formula":
            modelled += op.seconds
        else:
            unmodelled[op.name] = unmodelled.get(op.name, 0) + 1
    share = modelled / total if total else 1.0
    return Coverage(
        formula=counts["formula"],
        operands=counts["operands"],
        none=counts["none"],
        seconds_share=share,
        unmodelled=unmodelled,
    )
