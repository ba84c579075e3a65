"""The three floors of a traced step: as written, fused and ideal.

Each is a sum, or one application, of the same roofline, `max(memory, cache, compute, launch)`:

* memory: bytes that the cache model sends to memory, over the memory's bandwidth;
* cache: all bytes, since each crosses the last-level cache, over its bandwidth; 0 where that is not known;
* compute: matrix FLOPs of all dtypes one after the other, vector FLOPs beside them. Matrix work of a dtype without a
  matrix engine runs at its vector rate, and the other way round. A dtype with neither is an error;
* launch: one more kernel in a CUDA graph, on a GPU with measured ceilings; 0 on a CPU, where compiled code need not
  make a call per op, and 0 at the datasheet's ceilings.

The floors are in order by construction. Fused is never above as written: regrouping removes accesses, which can make
a least-recently-used cache miss more; where that costs more than it saves in all, nothing is regrouped. Ideal is not
above either: both streams start with a cold cache, so they fetch what was there before at least once, and they push
out all results but what one cache holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nearpeak.bound.cache import Residency, distinct
from nearpeak.bound.dataflow import Touches, touches_in
from nearpeak.bound.fusion import FusionGroup, does_anything
from nearpeak.bound.roofline import Ceilings, KernelBound, KernelStream, ResourceSeconds
from nearpeak.machines.machine import Machine
from nearpeak.ops.cost import Cost
from nearpeak.ops.op import Op, Trace


def as_written(
    trace: Trace,
    costs: Sequence[Cost],
    machine: Machine,
    *,
    ceilings: Ceilings = "achievable",
    residency: Residency | None = None,
    touches: Sequence[Touches] | None = None,
) -> tuple[KernelBound, ...]:
    """Every op at its own roofline, in the order written.

    The cache starts cold, or as `residency` is, which is updated: run a trace twice through one `Residency` for the
    bound of the second, warm run.
    """
    times = written_times(trace, costs, machine, ceilings, touches or touches_in(trace, costs), residency)
    return tuple(KernelBound.of(seconds) for seconds in times)


def written_times(
    trace: Trace,
    costs: Sequence[Cost],
    machine: Machine,
    ceilings: Ceilings,
    touches: Sequence[Touches],
    residency: Residency | None = None,
) -> list[ResourceSeconds]:
    """The resource seconds of `as_written`, as tuples."""
    stream = KernelStream(trace, machine, ceilings, residency)
    released = _dead_after(trace, touches, None)
    times = []
    for index, cost in enumerate(costs):
        times.append(
            stream.seconds(
                cost.reads, cost.writes, cost.flops, cost.vector_flops, launches=does_anything(cost), op=index
            )
        )
        if (trace.guessed_storages or cost.model != "formula") and cost.family != "view":
            _may_hold(stream, trace.ops[index])
        if index in released:
            stream.release(released[index])
    return times


def group_times(
    trace: Trace,
    costs: Sequence[Cost],
    grouped: Sequence[FusionGroup],
    machine: Machine,
    ceilings: Ceilings,
    touches: Sequence[Touches],
) -> list[ResourceSeconds]:
    """Every group of `fusion_groups` at the roofline of what it reads and writes, one launch each."""
    stream = KernelStream(trace, machine, ceilings)
    released = _dead_after(trace, touches, [group.members for group in grouped])
    unknown = _unknown(costs)
    times = []
    for position, group in enumerate(grouped):
        times.append(
            stream.seconds(
                group.reads, group.writes, group.flops, group.vector_flops, launches=group.launches, op=group.members[0]
            )
        )
        for index in unknown.intersection(group.members) if unknown else ():
            _may_hold(stream, trace.ops[index])
        if position in released:
            stream.release(released[position])
    return times


def _unknown(costs: Sequence[Cost]) -> frozenset[int]:
    """Ops without a formula: what they leave in the cache is not known."""
    return frozenset(index for index, cost in enumerate(costs) if cost.model != "formula" and cost.family != "view")


def _may_hold(stream: KernelStream, op: Op) -> None:
    """Whatever an op touches may be in the cache after it."""
    for tensor in (*op.inputs, *op.written):
        stream.residency.may_hold(tensor.storage, tensor.bytes)


def ideal(trace: Trace, costs: Sequence[Cost], machine: Machine, *, ceilings: Ceilings = "achievable") -> KernelBound:
    """The whole step as one kernel: no intermediates, no launches, all work at the best rate.

    Of a storage that was there before, the largest single read counts, unless it was written first, or an op without a
    formula may have read it too. Of a result, the largest single write; what the cache can hold of all results together
    need not reach memory.
    """
    read: dict[int, float] = {}
    written: dict[int, float] = {}
    stream = KernelStream(trace, machine, ceilings)
    storages = trace.storages
    before = {storage for storage, known in storages.items() if known.kind != "intermediate"}
    for index in _unknown(costs):
        before.difference_update(tensor.storage for tensor in (*trace.ops[index].inputs, *trace.ops[index].written))
    matrix_seconds = vector_seconds = 0.0
    for index, cost in enumerate(costs):
        if cost.reads:
            for access in distinct(cost.reads, storages):
                storage = access.storage
                if storage in before and storage not in written and access.bytes > read.get(storage, 0.0):
                    read[storage] = access.bytes
        if cost.writes:
            for access in distinct(cost.writes, storages):
                storage = access.storage
                if access.bytes > written.get(storage, -1.0):
                    written[storage] = access.bytes
        if cost.flops:
            matrix_seconds += stream.matrix_seconds(cost.flops, index)
        if cost.vector_flops:
            vector_seconds += stream.vector_seconds(cost.vector_flops, index, best=True)
    reads = sum(read.values())
    warm = min(reads, stream.residency.capacity_bytes) if trace.guessed_storages else 0.0
    results = sum(size for storage, size in written.items() if storage in trace.results)
    return KernelBound(
        memory_seconds=(reads - warm + max(results - stream.residency.capacity_bytes, 0.0)) / stream.limits.bandwidth,
        cache_seconds=(reads + results) / stream.cache_bandwidth,
        compute_seconds=max(matrix_seconds, vector_seconds),
    )


def _dead_after(
    trace: Trace, touches: Sequence[Touches], kernels: Sequence[Sequence[int]] | None
) -> Mapping[int, Sequence[int]]:
    """Intermediates that no later kernel uses, by the position of the last kernel that does.

    `kernels` are their members; None is one kernel for each op.
    """
    last: dict[int, int] = {}
    for position, members in enumerate(kernels or zip(range(len(touches)), strict=True)):
        for index in members:
            for storages in touches[index]:
                for storage in storages:
                    last[storage] = position
    dead: dict[int, list[int]] = {}
    for storage, position in last.items():
        known = trace.storages.get(storage)
        if known is not None and known.kind == "intermediate" and storage not in trace.results:
            dead.setdefault(position, []).append(storage)
    return dead
