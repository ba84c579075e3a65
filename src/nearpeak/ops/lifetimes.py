"""`Lifetimes`: when the storages of a traced step were in memory, and the allocator's statistics. Plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Category = Literal["parameters", "gradients", "optimizer", "activations"]
"""The use of a storage. Buffers of modules count as parameters, everything else as activations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifetime:
    """One storage, however many tensors view it."""

    bytes: float
    born: int
    """The op that allocated it; -1 if it is older than the trace."""
    died: int | None
    """The last op during which it was allocated; None if it outlives the trace, -1 if no op touched it."""
    category: Category


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifetimes:
    """The storages of one device during a trace. Statistics of the allocator are None where it keeps none."""

    device: str
    """As torch names it: "cpu", "cuda:0"."""
    capacity_bytes: float | None
    lives: tuple[Lifetime, ...]
    levels: Mapping[int, float] = field(default_factory=dict)
    """Bytes that the allocator had handed out after an op, for each op that set a new maximum."""
    peak_bytes: float | None = None
    """The most bytes that the allocator has handed out so far, also inside of ops and in steps that were not traced."""
    reserved_bytes: float | None = None
    """The most bytes that the allocator has reserved on the device so far."""
