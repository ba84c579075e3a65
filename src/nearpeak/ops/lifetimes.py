"""`Lives`: when the storages of a traced step were in memory, and what the allocator said beside it. Plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Category = Literal["parameters", "gradients", "optimizer", "activations"]
"""What a storage is for. Buffers of modules count as parameters, whatever is none of the others as an activation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifetime:
    """One storage, however many tensors look at it."""

    bytes: float
    born: int
    """The op that made it; -1 for what is older than the trace."""
    died: int | None
    """The last op during which it was there; None for what outlives the trace, -1 for what no op met."""
    category: Category


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifetimes:
    """The storages of one device during a trace. What the allocator says is None where there is none to ask."""

    device: str
    """As torch names it: "cpu", "cuda:0"."""
    capacity_bytes: float | None
    lives: tuple[Lifetime, ...]
    levels: Mapping[int, float] = field(default_factory=dict)
    """What the allocator had given out after an op, for each op after which the storages were more than ever before."""
    peak_bytes: float | None = None
    """The most that the allocator has given out so far, also inside of ops, in steps that were not traced."""
    reserved_bytes: float | None = None
    """The most that the allocator has taken from the device so far."""
