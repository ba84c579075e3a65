"""`written_out`: attention that was written as product, softmax and product, found in a trace.

From each softmax the search goes back along the largest operand to a product, and on to the product that reads the
result, through ops that can run inside a kernel (scale, mask, cast, dropout). It is attention only if nobody outside
touches a storage on that way, and none is a result: probabilities that autograd keeps for backward have to be written.
A softmax that is itself spelled out as maximum, exponential and sum is not recognised.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from nearpeak.bound.dependencies import CHAINED, Touches
from nearpeak.work.cost import Access, Cost
from nearpeak.work.op import Trace

MOST_HOPS = 32


def written_out(trace: Trace, costs: Sequence[Cost], touches: Sequence[Touches]) -> dict[int, int]:
    """The first product of the attention that an op belongs to, by the op's index."""
    softmaxes = [
        index
        for index, (op, cost) in enumerate(zip(trace.ops, costs, strict=True))
        if cost.family == "normalisation" and "softmax" in op.name and not ("backward" in op.name or "log" in op.name)
    ]
    if not softmaxes:
        return {}
    search = _Search(trace, costs, touches)
    found: dict[int, int] = {}
    for softmax in softmaxes:
        members = search.around(softmax)
        if members and not any(member in found for member in members):
            found.update(dict.fromkeys(members, min(members)))
    return found


class _Search:
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
        """All members, or none."""
        members, path = {softmax}, set[int]()
        for forward in (False, True):
            at = softmax
            for _ in range(MOST_HOPS):
                step = self._step(at, forward)
                if step is None:
                    return set()
                at, storage = step
                members.add(at)
                path.add(storage)
                if self.costs[at].family == "matrix":
                    break
            else:
                return set()
        if any(user not in members for storage in path for user in self.users[storage]):
            return set()
        return members

    def _step(self, at: int, forward: bool) -> tuple[int, int] | None:
        accesses: Sequence[Access] = self.costs[at].writes if forward else self.costs[at].reads
        for access in sorted(accesses, key=lambda access: -access.bytes):
            known = self.trace.storages.get(access.storage)
            if known is None or known.kind != "intermediate" or access.storage in self.trace.results:
                continue
            ops = (self.users if forward else self.writers).get(access.storage, [])
            position = bisect_right(ops, at) if forward else bisect_left(ops, at) - 1
            if not 0 <= position < len(ops):
                continue
            other = ops[position]
            family = self.costs[other].family
            same_phase = self.trace.ops[other].phase == self.trace.ops[at].phase
            if same_phase and (family == "matrix" or family in CHAINED):
                return other, access.storage
        return None
