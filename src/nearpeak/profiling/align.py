"""`align`: two runs of the same code, item by item, as a longest common subsequence."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True, kw_only=True)
class OpKey:
    """What identifies an op in two runs of a step."""

    kind: Hashable
    """Its name and the number of dimensions of its tensors, which do not change from step to step."""
    exact: Hashable
    """The same with all sizes."""
    shapes: tuple[tuple[int, ...], ...] = ()


def align(keys: Sequence[Hashable], others: Sequence[Hashable]) -> list[int | None]:
    """For each key the index of its counterpart in `others`, or None: a longest common subsequence.

    The rows of the usual table are bit vectors (Crochemore et al., 2001; Hyyrö, 2004): a zero bit is a column where the
    length grows. A row takes two additions of long integers, so that steps of 10,000 ops are aligned in 0.1 s.

    >>> align(["mm", "add", "mul", "sum"], ["mm", "cast", "mul", "sum"])
    [0, None, 2, 3]
    """
    positions: list[int | None] = [None] * len(keys)
    shorter = min(len(keys), len(others))
    start = next((at for at in range(shorter) if keys[at] != others[at]), shorter)
    end = next((at for at in range(shorter - start) if keys[-1 - at] != others[-1 - at]), shorter - start)
    for at in range(start):
        positions[at] = at
    for at in range(end):
        positions[len(keys) - 1 - at] = len(others) - 1 - at

    columns: dict[Hashable, int] = {}  # the bits of the columns of each key
    for column, other in enumerate(others[start : len(others) - end]):
        columns[other] = columns.get(other, 0) | 1 << column
    rows = [(1 << (len(others) - end - start)) - 1]
    for key in keys[start : len(keys) - end]:
        row = rows[-1]
        common = row & columns.get(key, 0)
        rows.append((row + common | row - common) & rows[0])
    row_at, column = len(rows) - 1, len(others) - end - start
    while row_at and column:
        bit = 1 << (column - 1)
        if rows[row_at] & bit:
            column -= 1
        elif rows[row_at - 1] & bit:
            row_at, column = row_at - 1, column - 1
            positions[start + row_at] = start + column
        else:
            row_at -= 1
    return positions


def align_ops(keys: Sequence[OpKey], others: Sequence[OpKey], light: Collection[Hashable] = ()) -> list[int | None]:
    """For each op the index of its counterpart, an op of the same kind, or None; indices increase.

    Ops of equal sizes are aligned first, and the rest between them by kind. In a step whose sizes all change, the few
    ops of equal sizes mislead: then the alignment by kind alone finds more. Ops whose kind is `light` are aligned
    between the others, since one run may have many views that the other does not have.

    >>> one = [OpKey(kind=name, exact=(name, size)) for name, size in [("mm", 1), ("mm", 2), ("add", 7)]]
    >>> other = [OpKey(kind=name, exact=(name, size)) for name, size in [("mm", 2), ("add", 8)]]
    >>> align_ops(one, other)
    [None, 0, 1]
    """
    kinds, other_kinds = [key.kind for key in keys], [key.kind for key in others]
    exact, other_exact = [key.exact for key in keys], [key.exact for key in others]

    def fill(
        positions: list[int | None], some: Sequence[Hashable], other_some: Sequence[Hashable], *, heavy: bool
    ) -> None:
        """Aligns ops between those that have a position: the light ones, or the others."""
        pairs = [(index, position) for index, position in enumerate(positions) if position is not None]
        for (left, right), (left_end, right_end) in pairwise([(-1, -1), *pairs, (len(keys), len(others))]):
            indices = [index for index in range(left + 1, left_end) if (kinds[index] in light) != heavy]
            other_indices = [index for index in range(right + 1, right_end) if (other_kinds[index] in light) != heavy]
            if indices and other_indices:
                matches = align([some[index] for index in indices], [other_some[index] for index in other_indices])
                for index, match in zip(indices, matches, strict=True):
                    positions[index] = None if match is None else other_indices[match]

    def found(*steps: tuple[Sequence[Hashable], Sequence[Hashable]]) -> list[int | None]:
        positions: list[int | None] = [None] * len(keys)
        for heavy in (True, False):
            for some, other_some in steps:
                fill(positions, some, other_some, heavy=heavy)
        return positions

    by_size = found((exact, other_exact), (kinds, other_kinds))
    if None not in by_size:
        return by_size
    by_kind = found((kinds, other_kinds))
    return by_size if by_size.count(None) <= by_kind.count(None) else by_kind
