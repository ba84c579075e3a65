"""Which pairs of a query and a key an attention computes, by position alone."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """For one head: how many pairs, and the first and the number of the queries and keys that are in any."""

    count: int
    queries: tuple[int, int]
    keys: tuple[int, int]


def banded(queries: int, keys: int, *, left: int | None = None, right: int | None = None, offset: int = 0) -> Pairs:
    """Query i sees the keys from i + offset - left to i + offset + right; None has no limit.

    `offset` is 0 for a mask aligned top left, `keys - queries` for one aligned bottom right.

    >>> banded(4, 6, right=0), banded(4, 6, right=0, offset=2).count
    (Pairs(count=10, queries=(0, 4), keys=(0, 4)), 18)
    """
    low = -queries if left is None else offset - left  # of key - query, both ends included
    high = keys if right is None else offset + right
    first_query, last_query = max(0, -high), min(queries - 1, keys - 1 - low)
    first_key, last_key = max(0, low), min(keys - 1, queries - 1 + high)
    if last_query < first_query or last_key < first_key or high < low:
        return Pairs(count=0, queries=(0, 0), keys=(0, 0))
    return Pairs(
        count=_up_to(queries, keys, high) - _up_to(queries, keys, low - 1),
        queries=(first_query, last_query - first_query + 1),
        keys=(first_key, last_key - first_key + 1),
    )


def packed(
    queries: int,
    keys: int,
    sequences: int,
    *,
    same: bool,
    left: int | None = None,
    right: int | None = None,
    aligned_right: bool = True,
) -> Pairs:
    """The least for sequences of unknown lengths, packed one after the other.

    With the same lengths for queries and keys (`same`), a sequence of n has a number of pairs that is convex in n, so
    equal lengths have the fewest. With lengths that differ, each key is in one pair at the least, where no mask
    can hide it (aligned top left, or a window) and every sequence has a query (assumed); else nothing is certain.
    """
    if not queries or not keys or not sequences:
        return Pairs(count=0, queries=(0, 0), keys=(0, 0))
    if same:
        short, longer = divmod(queries, sequences)
        count = longer * banded(short + 1, short + 1, left=left, right=right).count
        count += (sequences - longer) * banded(short, short, left=left, right=right).count
        return Pairs(count=count, queries=(0, queries), keys=(0, keys))
    if left is not None or right not in (None, 0) or (right == 0 and not aligned_right):
        return Pairs(count=0, queries=(0, 0), keys=(0, 0))
    return Pairs(count=keys, queries=(0, 0) if right == 0 else (0, queries), keys=(0, keys))


def _up_to(queries: int, keys: int, difference: int) -> int:
    """Pairs with key - query <= difference: the sum of clamp(query + difference + 1, 0, keys)."""
    start = difference + 1
    return _clamped(start + queries, keys) - _clamped(start, keys)


def _clamped(stop: int, limit: int) -> int:
    """The sum of clamp(t, 0, limit) for all t < stop."""
    if stop <= 0:
        return 0
    ramp = min(stop, limit + 1)
    return ramp * (ramp - 1) // 2 + (stop - ramp) * limit
