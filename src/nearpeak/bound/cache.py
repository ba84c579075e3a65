"""`Residency`: which bytes the last-level cache may still hold, as a least-recently-used model over a stream of ops.

The model serves a lower bound, so wherever it cannot know, it assumes the case that moves fewer bytes:

* A read of bytes that are resident does not go to memory. Where only a part of a storage is resident, that part is
  taken to be the one that is asked for.
* The cache writes back. Written bytes reach memory only when they are evicted while somebody still wants them: an
  intermediate that is consumed and dead before that (`release`) never does, since its memory is used again and its
  lines are overwritten in place. So a write costs memory traffic only for what does not fit, at the op that pushes
  it out; what is still in the cache at the end never costs any. (`times.Stream` charges an op no more than its own
  bytes: what others wrote may have gone to memory while they ran.)
* Evicting a storage gives up its clean bytes first.
* How much room a storage takes (`least`) and how much of it can be hit (`most`) are kept apart, because accesses name
  no addresses: two slices written one after the other may be the same slice (room for one) or not (both can be hit).

One access evicts at most what was admitted before it: the time per access is constant, amortized.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence

from nearpeak.ops.cost import Access
from nearpeak.ops.op import Storage

_Entry = list[float]
"""Of one storage: `least`, `most`, and how many of its bytes are dirty. A list, since one is made for every result."""


class Residency:
    """The state of a cache of `capacity_bytes`. 0 is no cache: every byte goes to memory.

    >>> cache = Residency(100)
    >>> cache.access(1, 80), cache.access(1, 80)  # cold, then warm
    (0.0, 80)
    >>> cache.write(2, 60)  # pushes half of storage 1 out, which is clean
    >>> cache.resident(1), cache.resident(2), cache.written_back
    (40.0, 60.0, 0.0)
    >>> cache.write(3, 100)  # pushes storage 2 out, which is not
    >>> cache.written_back
    60.0
    """

    def __init__(self, capacity_bytes: float) -> None:
        self.capacity_bytes = capacity_bytes
        self.written_back = 0.0
        """Bytes that had to go to memory because they were evicted, or never fitted; only grows."""
        self._entries: OrderedDict[int, _Entry] = OrderedDict()
        self._occupied = 0.0

    def resident(self, storage: int) -> float:
        """The most bytes of a storage that can be hit now."""
        entry = self._entries.get(storage)
        return entry[1] if entry else 0.0

    def access(self, storage: int, size: float) -> float:
        """Reads `size` bytes of a storage, which become resident; returns how many of them were so before."""
        hit = min(size, self.resident(storage))
        held = size if size < self.capacity_bytes else self.capacity_bytes
        entry = self._touch(storage, held)
        if held > entry[1]:
            entry[1] = held
        if self._occupied > self.capacity_bytes:
            self._evict()
        return hit

    def write(self, storage: int, size: float, *, limit: float = math.inf) -> None:
        """Writes `size` bytes of a storage, which has no more than `limit` bytes; they become resident."""
        capacity = self.capacity_bytes
        held = size if size < capacity else capacity
        self.written_back += size - held
        entry = self._touch(storage, held)
        most = entry[1]
        highest = max(limit, most, held) if limit < capacity else capacity
        entry[1] = most + held if most + held < highest else highest
        if held > entry[2]:
            entry[2] = held
        if self._occupied > capacity:
            self._evict()

    def kernel(
        self, reads: Sequence[Access], writes: Sequence[Access], storages: Mapping[int, Storage], *, wanted: bool = True
    ) -> float:
        """Runs a kernel whose reads are of different storages, and so its writes; returns how many bytes it missed.

        Its reads run side by side, so all of them find the cache as it was before the kernel. What it writes need not
        reach memory unless it is `wanted`.
        """
        entries, capacity = self._entries, self.capacity_bytes
        missed = 0.0
        for access in reads:
            entry = entries.get(access.storage)
            size = access.bytes
            if entry is None:
                missed += size
            elif size > entry[1]:
                missed += size - entry[1]
        for access in reads:
            size = access.bytes
            held = size if size < capacity else capacity
            entry = entries.get(access.storage)
            if entry is None:
                entries[access.storage] = [held, held, 0.0]
                self._occupied += held
            else:
                entries.move_to_end(access.storage)
                if held > entry[0]:
                    self._occupied += held - entry[0]
                    entry[0] = held
                if held > entry[1]:
                    entry[1] = held
            if self._occupied > capacity:
                self._evict()
        for access in writes:
            known = storages.get(access.storage)
            self.write(access.storage, access.bytes, limit=known.bytes if known and known.bytes else math.inf)
            if not wanted:
                self.unwanted(access.storage)
        return missed

    def may_hold(self, storage: int, size: float) -> None:
        """Up to `size` bytes of a storage may have become resident: they can be hit, and are sure of no room."""
        entry = self._touch(storage, 0.0)
        entry[1] = max(entry[1], min(size, self.capacity_bytes))

    def unwanted(self, storage: int) -> None:
        """What was written of a storage need not reach memory, but can be hit as before."""
        entry = self._entries.get(storage)
        if entry:
            entry[2] = 0.0

    def release(self, storage: int) -> None:
        """Nobody wants the storage any more: its room is free, and its bytes need not reach memory."""
        entry = self._entries.pop(storage, None)
        if entry:
            self._occupied -= entry[0]

    def _touch(self, storage: int, held: float) -> _Entry:
        entry = self._entries.get(storage)
        if entry is None:
            entry = self._entries[storage] = [0.0, 0.0, 0.0]
        else:
            self._entries.move_to_end(storage)
        if held > entry[0]:
            self._occupied += held - entry[0]
            entry[0] = held
        return entry

    def _evict(self) -> None:
        entries, capacity = self._entries, self.capacity_bytes
        while self._occupied > capacity and len(entries) > 1:
            storage = next(iter(entries))
            entry = entries[storage]
            least, _, dirty = entry
            kept = capacity - (self._occupied - least)
            if kept < 0.0:
                kept = 0.0
            self._occupied -= least - kept
            if dirty > kept:
                self.written_back += dirty - kept
            if kept > 0.0:
                entry[:] = kept, kept, dirty if dirty < kept else kept
                return
            del entries[storage]


def distinct(accesses: tuple[Access, ...], storages: Mapping[int, Storage]) -> tuple[Access, ...]:
    """One access to each storage: those to views of the same storage add up, to no more than it has."""
    count = len(accesses)
    if count < 2 or (count == 2 and accesses[0].storage != accesses[1].storage):
        return accesses
    sizes: dict[int, float] = {}
    for access in accesses:
        sizes[access.storage] = sizes.get(access.storage, 0.0) + access.bytes
    if len(sizes) == count:
        return accesses
    for storage, size in sizes.items():
        known = storages.get(storage)
        if known is not None and size > known.bytes > 0:
            sizes[storage] = known.bytes
    return tuple([Access(storage=storage, bytes=size) for storage, size in sizes.items()])
