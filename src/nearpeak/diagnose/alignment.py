"""`align`: the ops of one run of a step against those of another, in order.

A step is run more than once: profiled for its times, traced for its storages. Both see nearly the same ops. An op is
known by its name and shapes; where the sequences differ, the nearest place counts at which they agree again.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Sequence
from itertools import pairwise

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


def align_by(one: Sequence[Hashable], other: Sequence[Hashable], light: Collection[Hashable]) -> list[int | None]:
    """As `align`, but ops that are not `light` are aligned first, and those that are only between them.

    One run may have many views that the other does not have, so that no two ops in a row agree.

    >>> align_by(["t", "mm", "t", "sum"], ["t", "detach", "mm", "detach", "sum"], {"t", "detach"})
    [0, 2, None, 4]
    """
    here = [index for index, op in enumerate(one) if op not in light]
    there = [index for index, op in enumerate(other) if op not in light]
    found: list[int | None] = [None] * len(one)
    for index, to in zip(here, align([one[at] for at in here], [other[at] for at in there]), strict=True):
        found[index] = None if to is None else there[to]
    for (left, right), (left_end, right_end) in _gaps(found, len(one), len(other)):
        here = [index for index in range(left + 1, left_end) if one[index] in light]
        there = [index for index in range(right + 1, right_end) if other[index] in light]
        for index, to in zip(here, align([one[at] for at in here], [other[at] for at in there]), strict=True):
            found[index] = None if to is None else there[to]
    return found


def align_between(found: Sequence[int | None], one: Sequence[Hashable], other: Sequence[Hashable]) -> list[int | None]:
    """What was found, and between it what agrees by these keys, which tell less apart.

    >>> align_between([0, None, None, 3], ["mm", "add", "mul", "sum"], ["mm", "add", "exp", "sum"])
    [0, 1, None, 3]
    """
    filled = list(found)
    for (left, right), (left_end, right_end) in _gaps(found, len(one), len(other)):
        if left_end - left > 1 and right_end - right > 1:
            for at, to in enumerate(align(one[left + 1 : left_end], other[right + 1 : right_end]), left + 1):
                filled[at] = None if to is None else right + 1 + to
    return filled


def _gaps(found: Sequence[int | None], one: int, other: int) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """What lies between pairs that were found: the pair before and the pair after, the ends of both runs included."""
    return pairwise([(-1, -1), *((at, to) for at, to in enumerate(found) if to is not None), (one, other)])


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
