"""`fusion_groups`: the ops of a trace grouped into kernels, so that intermediates stay out of memory where they can.

Ops share a group, and so a kernel, if they are

* pointwise ops, copies, casts, creation and random numbers, in chains and trees; a view is free and belongs to the op
  that wrote what it views;
* reductions, normalizations and losses, with such ops before and after them;
* one matrix product, convolution or attention, with such ops as prologue and epilogue, but no reduction;
* unfused attention: product, pointwise ops and a softmax, product, where no other op uses what lies between.

A group stays within one phase, so what autograd saves for the backward pass is still written. It is executable: no path
leads from a member to a member through an op outside of the group. Ops merge along a storage that one writes and the
other reads, and only if the graph of groups stays free of cycles. Each group has a level, every dependency leads to a
higher one, and two groups merge only where a level lies between all that they need and all that needs them. That test
may refuse a merge that would do no harm; it never allows one that would, and it takes no search.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from operator import attrgetter

from nearpeak.bound.cache import distinct
from nearpeak.bound.dataflow import CHAINED, Touches, touches_in
from nearpeak.ops.cost import Access, Cost, Family
from nearpeak.ops.fast_init import fast_init, positional_constructor
from nearpeak.ops.op import Trace

REDUCING: frozenset[Family] = frozenset({"reduction", "normalization", "loss"})
ANCHORS: frozenset[Family] = frozenset({"matrix", "convolution", "attention"})
CENTERS: tuple[Family, ...] = (
    *("attention", "matrix", "convolution", "normalization", "loss", "reduction"),
    *("pointwise", "random", "movement", "creation"),
)
"""A group is named after the first of these that it has."""
NEIGHBORS = CHAINED | REDUCING
MAX_NEIGHBORS = 64
"""Groups with more groups before or after them do not grow: no kernel has that many operands, and the work per merge
stays bounded."""


@fast_init
@dataclass(frozen=True, slots=True, kw_only=True)
class FusionGroup:
    """Ops that run as one kernel, and what it reads and writes."""

    members: tuple[int, ...]
    """Indices of ops, in order."""
    family: Family
    """The family of the op that the others are grouped around."""
    reads: tuple[Access, ...]
    writes: tuple[Access, ...]
    flops: Mapping[str, float]
    vector_flops: Mapping[str, float]
    saved_bytes: float
    """Bytes that the members read and write on their own, less `reads` and `writes`."""
    launches: bool
    """Whether it needs a kernel: a view alone does not."""


def fusion_groups(
    trace: Trace, costs: Sequence[Cost], touches: Sequence[Touches] | None = None
) -> tuple[FusionGroup, ...]:
    """The groups of a trace in an order in which they can run. Each op is in exactly one.

    `touches` is the result of `touches_in`, for a caller that has it.
    """
    if touches is None:
        touches = touches_in(trace, costs)
    merged = _Merger(trace, costs)
    merged.run(touches, find_unfused_attention(trace, costs, touches))
    members: dict[int, list[int]] = {}
    for index in range(len(trace.ops)):
        members.setdefault(merged.root(index), []).append(index)
    private = _private(trace, costs, touches, merged)
    return tuple(
        _group(trace, costs, indices, private) if len(indices) > 1 else _alone(indices[0], costs[indices[0]])
        for indices in (members[root] for root in _ordered(members, merged))
    )


class _Merger:
    """A union-find over op indices; the root of each tree holds the facts of its group."""

    def __init__(self, trace: Trace, costs: Sequence[Cost]) -> None:
        count = len(trace.ops)
        self.trace = trace
        self.costs = costs
        self.parent = list(range(count))
        self.level = [0.0] * count
        self.before: list[AbstractSet[int]] = [frozenset()] * count
        self.after: list[set[int]] = [set() for _ in range(count)]
        self.anchored = [cost.family in ANCHORS for cost in costs]
        self.reducing = [cost.family in REDUCING for cost in costs]
        self.joins = [
            cost.model != "none"
            and (cost.family in ANCHORS or (cost.family in NEIGHBORS and not (cost.flops and any(cost.flops.values()))))
            for cost in costs
        ]

    def root(self, index: int) -> int:
        parent = self.parent
        while parent[index] != index:
            parent[index] = parent[parent[index]]
            index = parent[index]
        return index

    def run(self, touches: Sequence[Touches], attentions: Mapping[int, int]) -> None:
        """Merges groups in one pass over the ops; `attentions` is the result of `find_unfused_attention`."""
        writer: dict[int, int] = {}
        readers: dict[int, list[int]] = {}
        root, levels, costs = self.root, self.level, self.costs
        for index, (reads, writes) in enumerate(touches):
            if costs[index].family == "view":
                self._follow(index, writer)
                continue
            needed: set[int] = set()
            for storage in reads:
                if storage in writer:
                    needed.add(root(writer[storage]))
            for storage in writes:
                if storage in writer:
                    needed.add(root(writer[storage]))
                if storage in readers:
                    needed.update([root(needed_root) for needed_root in readers.pop(storage)])
            level = 0.0
            for needed_root in needed:
                self.after[needed_root].add(index)
                if levels[needed_root] > level:
                    level = levels[needed_root]
            self.before[index] = needed
            levels[index] = 1.0 + level
            if self.joins[index] or index in attentions:
                self._join(index, writer, attentions.get(index))
            for storage in writes:
                writer[storage] = index
            for storage in reads:
                readers.setdefault(storage, []).append(index)

    def _follow(self, index: int, writer: Mapping[int, int]) -> None:
        op = self.trace.ops[index]
        source = next((writer[tensor.storage] for tensor in op.inputs if tensor.storage in writer), None)
        if source is not None and self.trace.ops[source].phase == op.phase:
            self.parent[index] = self.root(source)

    def _join(self, index: int, writer: Mapping[int, int], attention: int | None) -> None:
        if attention is not None and attention != index and self._merge(index, attention, as_attention=True):
            index = self.root(index)
        if not self.joins[index]:
            return
        written = [access for access in self.costs[index].reads if access.storage in writer]
        if len(written) > 1:
            written.sort(key=attrgetter("bytes"), reverse=True)
        for access in written:
            self._merge(index, writer[access.storage])

    def _merge(self, index: int, other: int, *, as_attention: bool = False) -> bool:
        first, second = self.root(index), self.root(other)
        if first == second or not (self.joins[first] and self.joins[second]):
            return first == second
        if self.trace.ops[first].phase != self.trace.ops[second].phase:
            return False
        anchored = self.anchored[first] or self.anchored[second]
        reducing = self.reducing[first] or self.reducing[second]
        if not as_attention and ((self.anchored[first] and self.anchored[second]) or (anchored and reducing)):
            return False
        sizes = (len(self.before[first]) + len(self.before[second]), len(self.after[first]) + len(self.after[second]))
        if max(sizes) > MAX_NEIGHBORS:
            return False
        inside = {first, second}
        before = set(map(self.root, self.before[first] | self.before[second])) - inside
        after = set(map(self.root, self.after[first] | self.after[second])) - inside
        low, high = 0.0, float("inf")
        for group in before:
            if self.level[group] > low:
                low = self.level[group]
        for group in after:
            if self.level[group] < high:
                high = self.level[group]
        level = low + 1.0 if low + 1.0 < high else (low + high) / 2
        if not low < level < high:
            return False
        self.parent[first] = second
        self.level[second], self.before[second], self.after[second] = level, before, after
        self.anchored[second], self.reducing[second] = anchored, reducing and not as_attention
        self.before[first] = self.after[first] = set()
        return True


def _private(trace: Trace, costs: Sequence[Cost], touches: Sequence[Touches], merged: _Merger) -> set[int]:
    """Intermediates that only one group touches and reads, and that are no result: they need not reach memory."""
    owner: dict[int, int | None] = {}
    read: set[int] = set()
    for index, touched in enumerate(touches):
        if touched.reads or touched.writes:
            root = merged.root(index)
            for storages in touched:
                for storage in storages:
                    if owner.setdefault(storage, root) != root:
                        owner[storage] = None
        for access in costs[index].reads:
            read.add(access.storage)
    return {
        storage
        for storage, root in owner.items()
        if root is not None
        and storage in read
        and storage not in trace.results
        and (known := trace.storages.get(storage)) is not None
        and known.kind == "intermediate"
    }


def _group(trace: Trace, costs: Sequence[Cost], members: Sequence[int], private: set[int]) -> FusionGroup:
    """The group of several ops: it reads what it does not write itself, and writes what ops outside may read.

    Where several members read one storage, the largest read counts: they may read the same bytes.
    """
    reads: dict[int, float] = {}
    writes: dict[int, float] = {}
    flops: dict[str, float] = {}
    vector_flops: dict[str, float] = {}
    total = 0.0
    for index in members:
        cost = costs[index]
        if cost.family == "view":
            continue
        for dtype, count in cost.flops.items():
            flops[dtype] = flops.get(dtype, 0.0) + count
        for dtype, count in cost.vector_flops.items():
            vector_flops[dtype] = vector_flops.get(dtype, 0.0) + count
        for access in distinct(cost.reads, trace.storages):
            storage, size = access.storage, access.bytes
            total += size
            if storage not in writes and storage not in private:
                reads[storage] = max(reads.get(storage, 0.0), size)
        for access in distinct(cost.writes, trace.storages):
            storage, size = access.storage, access.bytes
            total += size
            writes[storage] = max(writes.get(storage, 0.0), size)
    writes = {storage: size for storage, size in writes.items() if storage not in private}
    return FusionGroup(
        members=tuple(members),
        family=_family([costs[index].family for index in members]),
        reads=tuple(Access(storage=storage, bytes=size) for storage, size in reads.items()),
        writes=tuple(Access(storage=storage, bytes=size) for storage, size in writes.items()),
        flops=flops,
        vector_flops=vector_flops,
        saved_bytes=total - sum(reads.values()) - sum(writes.values()),
        launches=any(does_anything(costs[index]) for index in members),
    )


def _alone(index: int, cost: Cost) -> FusionGroup:
    launches = does_anything(cost)
    return _make_group((index,), cost.family, cost.reads, cost.writes, cost.flops, cost.vector_flops, 0.0, launches)


_make_group = positional_constructor(FusionGroup)


def does_anything(cost: Cost) -> bool:
    """Whether an op needs a kernel: it moves a byte or computes."""
    if cost.reads or cost.writes:
        return True
    return any(cost.flops.values()) or any(cost.vector_flops.values())


def _family(families: Sequence[Family]) -> Family:
    if sum(family == "matrix" for family in families) > 1:
        return "attention"
    others = [family for family in families if family != "view"]
    return next((family for family in CENTERS if family in others), others[0] if others else "view")


def _ordered(members: Mapping[int, Sequence[int]], merged: _Merger) -> list[int]:
    """Roots in an order in which the groups can run, as near to the order of the ops as their dependencies allow."""
    waiting: dict[int, int] = dict.fromkeys(members, 0)
    after: dict[int, set[int]] = {root: set() for root in members}
    for root in members:
        for later in {merged.root(needed) for needed in merged.before[root]} - {root}:
            after[later].add(root)
            waiting[root] += 1
    ready = [(members[root][-1], root) for root, count in waiting.items() if not count]
    heapq.heapify(ready)
    ordered: list[int] = []
    while ready:
        _, root = heapq.heappop(ready)
        ordered.append(root)
        for later in after[root]:
            waiting[later] -= 1
            if not waiting[later]:
                heapq.heappush(ready, (members[later][-1], later))
    assert len(ordered) == len(members), "the graph of groups has a cycle"
    return ordered


MAX_ATTENTION_HOPS = 32
"""Ops between a softmax and each of its two products, at most."""


def find_unfused_attention(trace: Trace, costs: Sequence[Cost], touches: Sequence[Touches]) -> dict[int, int]:
    """Unfused attention in a trace: the index of its first product, by the index of each op that belongs to it.

    From each softmax the search goes back along the largest operand to a product, and forward to the product that reads
    the result, through ops that can run inside a kernel (scale, mask, cast, dropout). It is attention only if no other
    op touches a storage on that path, and none is a result: probabilities that autograd saves have to be written. A
    softmax that is spelled out as maximum, exponential and sum is not recognized.
    """
    softmaxes = [
        index
        for index, (op, cost) in enumerate(zip(trace.ops, costs, strict=True))
        if cost.family == "normalization" and "softmax" in op.name and not ("backward" in op.name or "log" in op.name)
    ]
    if not softmaxes:
        return {}
    search = _AttentionSearch(trace, costs, touches)
    first_products: dict[int, int] = {}
    for softmax in softmaxes:
        members = search.around(softmax)
        if members and not any(member in first_products for member in members):
            first_products.update(dict.fromkeys(members, min(members)))
    return first_products


class _AttentionSearch:
    def __init__(self, trace: Trace, costs: Sequence[Cost], touches: Sequence[Touches]) -> None:
        self.trace = trace
        self.costs = costs
        self.users: dict[int, list[int]] = {}
        self.writers: dict[int, list[int]] = {}
        for index, touched in enumerate(touches):
            for storage in dict.fromkeys((*touched.reads, *touched.writes)):
                self.users.setdefault(storage, []).append(index)
            for storage in touched.writes:
                self.writers.setdefault(storage, []).append(index)

    def around(self, softmax: int) -> set[int]:
        """The ops of the attention around a softmax; empty where there is none."""
        members, path = {softmax}, set[int]()
        for forward in (False, True):
            op = softmax
            for _ in range(MAX_ATTENTION_HOPS):
                step = self._step(op, forward)
                if step is None:
                    return set()
                op, storage = step
                members.add(op)
                path.add(storage)
                if self.costs[op].family == "matrix":
                    break
            else:
                return set()
        if any(user not in members for storage in path for user in self.users[storage]):
            return set()
        return members

    def _step(self, op: int, forward: bool) -> tuple[int, int] | None:
        accesses: Sequence[Access] = self.costs[op].writes if forward else self.costs[op].reads
        for access in sorted(accesses, key=lambda access: -access.bytes):
            storage = self.trace.storages.get(access.storage)
            if storage is None or storage.kind != "intermediate" or access.storage in self.trace.results:
                continue
            ops = (self.users if forward else self.writers).get(access.storage, [])
            position = bisect_right(ops, op) if forward else bisect_left(ops, op) - 1
            if not 0 <= position < len(ops):
                continue
            neighbor = ops[position]
            family = self.costs[neighbor].family
            same_phase = self.trace.ops[neighbor].phase == self.trace.ops[op].phase
            if same_phase and (family == "matrix" or family in CHAINED):
                return neighbor, access.storage
        return None
