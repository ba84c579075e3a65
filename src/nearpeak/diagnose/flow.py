"""`Flow`: who wrote what an op reads, and who reads what it wrote; by storages, so that views are no obstacle."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from nearpeak.bound.dependencies import Touches
from nearpeak.work.op import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
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


def flow_of(trace: Trace, touches: Sequence[Touches]) -> Flow:
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
    return Flow(
        producers=producers,
        consumers=[tuple(readers) for readers in consumers],
        written_by=[tuple(touch.writes) for touch in touches],
        read_by=[tuple(touch.reads) for touch in touches],
        results=frozenset(trace.results),
    )


def between(flow: Flow, first: int, last: int) -> Iterable[int]:
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
