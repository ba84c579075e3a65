"""`Tunable`: one entry of the table of configurations, and the sizes at which entries are measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kernel_cases import SIZES
from kernel_copies import CopySizes

MANY = 2**40
"""Up to so many: no end."""
FEW = 2**22
"""Elements from which on a GPU is busy, and their number no longer matters."""
Config = dict[str, Any]


class Where(NamedTuple):
    """The size at which an entry is measured, and for which it holds: above one, up to the other."""

    size: int
    above: int
    up_to: int


def near_of(size: int) -> Where:
    """An entry that holds for sizes whose next power of 2 is that of this one."""
    longest = 1 << (size - 1).bit_length()
    return Where(size, longest // 2, longest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tunable:
    """One entry of the table: a kernel at a size, measured through an operation."""

    kernel: str
    operation: str
    where: Where
    candidates: list[Config]
    make: Callable[[], Callable[[], Any]]
    """Makes inputs, and what to call."""
    least_bytes: int
    checked: bool = True
    """Whether all candidates give the same numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedSizes:
    """At which kernels are tuned."""

    rows: Sequence[tuple[int, int]] = SIZES
    activations: Sequence[tuple[int, int]] = ((16384, 4096), (4096, 16384))
    quantised_rows: Sequence[tuple[int, int]] = ((16384, 4096), (8192, 8192))
    long_rows: tuple[int, int] = (2048, 65536)
    losses: Sequence[tuple[int, int]] = ((8192, 32000), (2048, 128256))
    copies: CopySizes = field(default_factory=CopySizes)
    cache: tuple[int, int, int, int] = (32, 8, 8192, 128)
    """Sequences, heads of keys, capacity, numbers of a head."""
    attention: Sequence[int] = (2048, 4096, 8192, 16384)
    """Tokens of a sequence, of as many sequences as have the most of these tokens together."""
    attention_heads: int = 16
    portable_attention: int = 8192
    products: Sequence[tuple[int, int]] = ((4096, 4096), (8192, 8192))
    """Rows and columns of the result, and the depth."""
    experts: Sequence[tuple[int, int, int, int]] = ((128, 512, 1536, 2048), (8, 4096, 8192, 4096))
    """How many, rows of each, and columns and depth of their matrices."""
    experts_of_few: tuple[int, int, int] = (128, 1536, 2048)
    """How many, and columns and depth, where each has but a few rows."""
    routed: tuple[int, Sequence[int]] = (65536, (8, 128))
    """Tokens, and numbers of experts."""
    linear_attention: tuple[int, int, int, Sequence[int]] = (2, 16, 8192, (64, 128))
    """Sequences, heads, tokens, and numbers of a head."""

    @classmethod
    def tiny(cls) -> TunedSizes:
        """At which every kernel runs in a moment, also in Triton's interpreter."""
        return cls(
            rows=[(4, 256)],
            activations=[(4, 256)],
            quantised_rows=[(4, 128)],
            long_rows=(2, 16_400),
            losses=[(3, 4160)],
            copies=CopySizes(side=128, tokens=6, choices=2, experts=4, hidden=1024, width=8, layers=2, vocabulary=16),
            cache=(1, 1, 128, 64),
            attention=(32, 64),
            attention_heads=1,
            portable_attention=64,
            products=[(768, 64)],  # as many tiles as the kernel for Hopper wants to have
            experts=[(2, 64, 64, 64)],
            experts_of_few=(4, 64, 64),
            routed=(5, (8,)),
            linear_attention=(1, 1, 300, (64,)),  # of two segments
        )
