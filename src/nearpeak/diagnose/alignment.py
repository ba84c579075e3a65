"""`align`: the ops of one run of a step against those of another, in order.

A step is run more than once: profiled for its times, traced for its storages. Both see nearly the same ops. An op is
known by its name and shapes; where the sequences differ, the nearest place counts at which they agree again.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

WINDOW = 64
"""How far ahead to look for a place of agreement."""
AGREED = 2
"""How many ops in a row must agree there, so that one common op does not mislead; fewer at the end."""


def align(one: Sequence[Hashable], other: Sequence[Hashable]) -> list[int | None]:
    """For each of `one` the index of the same op in `other`, None where there is none; indices only grow.

    >>> align(["mm", "add", "mul", "sum"], ["mm", "cast", "mul", "sum"])
    [0, None, 2, 3]
    """
    found: list[int | None] = [None] * len(one)
    left = right = 0
    while left < len(one) and right < len(other):
        if one[left] == other[right]:
            found[left] = right
            left, right = left + 1, right + 1
            continue
        step = _next_agreement(one, other, left, right)
        if step is None:  # too far apart: this op has no counterpart
            left += 1
        else:
            left, right = left + step[0], right + step[1]
    return found


def _next_agreement(
    one: Sequence[Hashable], other: Sequence[Hashable], left: int, right: int
) -> tuple[int, int] | None:
    """The least that both must go forward to agree again."""
    for distance in range(1, 2 * WINDOW):
        for forward in range(max(0, distance - WINDOW), min(distance, WINDOW) + 1):
            if _agree(one, other, left + forward, right + distance - forward):
                return forward, distance - forward
    return None


def _agree(one: Sequence[Hashable], other: Sequence[Hashable], left: int, right: int) -> bool:
    length = min(AGREED, len(one) - left, len(other) - right)
    return length > 0 and all(one[left + at] == other[right + at] for at in range(length))
