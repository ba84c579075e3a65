"""`Residency`: a least-recently-used model of the last-level cache over a stream of ops.

The model serves a lower bound, so where something is not known, it assumes the case that moves fewer bytes:

* A read of resident bytes does not go to memory. Where only a part of a storage is resident, that part is assumed to be
  the one that is read.
* The cache writes back. Written bytes reach memory only when they are evicted while a later op still reads them. An
  intermediate that is dead before that (`release`) never does: its memory is reused and its lines are overwritten in
  place. So a write causes memory traffic only for what does not fit, at the op that evicts it; what is in the cache at
  the end causes none. (`KernelStream` charges an op no more than its own bytes: what other ops wrote may have gone to
  memory while they ran.)
* Evicting a storage drops its clean bytes first.
* The room that a storage takes and the bytes of it that can be hit are counted apart, because accesses have no
  addresses: two slices written one after the other may be the same slice (room for one) or not (both can be hit).

One access evicts at most what was admitted before it: the time per access is constant, amortized.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence

from nearpeak.ops.cost import Access
from nearpeak.ops.op import Storage

_Entry = list[float]
"""The bytes of one storage that take room, that can be hit, and that are dirty. A list, since many are made."""


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
        """Bytes that went to memory because they were evicted or never fitted; only grows."""
        self._entries: OrderedDict[int, _Entry] = OrderedDict()
        self._occupied = 0.0

    def resident(self, storage: int) -> float:
        """The most bytes of a storage that can be hit now."""
        entry = self._entries.get(storage)
        return entry[1] if entry else 0.0

    def access(self, storage: int, size: float) -> float:
        """Reads `size` bytes of a storage, which become resident; returns how many were a hit."""
        hit = min(size, self.resident(storage))
        resident = size if size < self.capacity_bytes else self.capacity_bytes
        entry = self._touch(storage, resident)
        if resident > entry[1]:
            entry[1] = resident
        if self._occupied > self.capacity_bytes:
            self._evict()
        return hit

    def write(self, storage: int, size: float, *, limit: float = math.inf) -> None:
        """Writes `size` bytes of a storage, which has no more than `limit` bytes; they become resident."""
        capacity = self.capacity_bytes
        resident = size if size < capacity else capacity
        self.written_back += size - resident
        entry = self._touch(storage, resident)
        hittable = entry[1]
        highest = max(limit, hittable, resident) if limit < capacity else capacity
        entry[1] = hittable + resident if hittable + resident < highest else highest
        if resident > entry[2]:
            entry[2] = resident
        if self._occupied > capacity:
            self._evict()

    def kernel(
        self, reads: Sequence[Access], writes: Sequence[Access], storages: Mapping[int, Storage], *, wanted: bool = True
    ) -> float:
        """Runs a kernel that reads distinct storages and writes distinct storages; returns the bytes that missed.

        Its reads run side by side, so all of them find the cache as it was before the kernel. Unless `wanted`, what it
        writes need not reach memory.
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
            resident = size if size < capacity else capacity
            entry = entries.get(access.storage)
            if entry is None:
                entries[access.storage] = [resident, resident, 0.0]
                self._occupied += resident
            else:
                entries.move_to_end(access.storage)
                if resident > entry[0]:
                    self._occupied += resident - entry[0]
                    entry[0] = resident
                if resident > entry[1]:
                    entry[1] = resident
            if self._occupied > capacity:
                self._evict()
        for access in writes:
            storage = storages.get(access.storage)
            self.write(access.storage, access.bytes, limit=storage.bytes if storage and storage.bytes else math.inf)
            if not wanted:
                self.unwanted(access.storage)
        return missed

    def may_hold(self, storage: int, size: float) -> None:
        """Up to `size` bytes of a storage may have become resident: they can be hit, and take no room for certain."""
        entry = self._touch(storage, 0.0)
        entry[1] = max(entry[1], min(size, self.capacity_bytes))

    def unwanted(self, storage: int) -> None:
        """The written bytes of a storage need not reach memory, but can be hit as before."""
        entry = self._entries.get(storage)
        if entry:
            entry[2] = 0.0

    def release(self, storage: int) -> None:
        """No later op uses the storage: its room is free, and its bytes need not reach memory."""
        entry = self._entries.pop(storage, None)
        if entry:
            self._occupied -= entry[0]

    def _touch(self, storage: int, resident: float) -> _Entry:
        entry = self._entries.get(storage)
        if entry is None:
            entry = self._entries[storage] = [0.0, 0.0, 0.0]
        else:
            self._entries.move_to_end(storage)
        if resident > entry[0]:
            self._occupied += resident - entry[0]
            entry[0] = resident
        return entry

    def _evict(self) -> None:
        entries, capacity = self._entries, self.capacity_bytes
        while self._occupied > capacity and len(entries) > 1:
            storage = next(iter(entries))
            entry = entries[storage]
            occupied, _, dirty = entry
            remaining = capacity - (self._occupied - occupied)
            if remaining < 0.0:
                remaining = 0.0
            self._occupied -= occupied - remaining
            if dirty > remaining:
                self.written_back += dirty - remaining
            if remaining > 0.0:
                entry[:] = remaining, remaining, dirty if dirty < remaining else remaining
                return
            del entries[storage]


def distinct(accesses: tuple[Access, ...], storages: Mapping[int, Storage]) -> tuple[Access, ...]:
    """One access per storage: accesses to views of the same storage add up, to no more than its size."""
    count = len(accesses)
    if count < 2 or (count == 2 and accesses[0].storage != accesses[1].storage):
        return accesses
    sizes: dict[int, float] = {}
    for access in accesses:
        sizes[access.storage] = sizes.get(access.storage, 0.0) + access.bytes
    if len(sizes) == count:
        return accesses
    for storage, size in sizes.items():
        facts = storages.get(storage)
        if facts is not None and size > facts.bytes > 0:
            sizes[storage] = facts.bytes
    return tuple([Access(storage=storage, bytes=size) for storage, size in sizes.items()])
