"""`Work`: the least work of an operation, independent of any machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from nearpeak._records import Amount


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """FLOPs by engine and dtype name, bytes read and bytes written. A multiply-add is 2 FLOPs. Works add up.

    >>> a = Work(flops={"bfloat16": 2e9}, bytes_read=4e6, bytes_written=2e6)
    >>> (a + a).flops, (a + a).bytes
    ({'bfloat16': 4000000000.0}, 12000000.0)
    """

    flops: Mapping[str, Amount] = field(default_factory=dict)
    """On the matrix engine."""
    vector_flops: Mapping[str, Amount] = field(default_factory=dict)
    bytes_read: Amount = 0.0
    bytes_written: Amount = 0.0

    @property
    def bytes(self) -> float:
        """All bytes that cross the memory."""
        return self.bytes_read + self.bytes_written

    def __add__(self, other: Work) -> Work:
        return Work(
            flops=_sum(self.flops, other.flops),
            vector_flops=_sum(self.vector_flops, other.vector_flops),
            bytes_read=self.bytes_read + other.bytes_read,
            bytes_written=self.bytes_written + other.bytes_written,
        )


def _sum(a: Mapping[str, float], b: Mapping[str, float]) -> dict[str, float]:
    return {key: a.get(key, 0.0) + b.get(key, 0.0) for key in (*a, *(key for key in b if key not in a))}
