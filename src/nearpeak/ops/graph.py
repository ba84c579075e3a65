"""`GraphReplay`: a CUDA graph among the ops of a trace, with the op of each of its nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

NodeKind = Literal["kernel", "memcpy", "memset"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphNode:
    """A kernel, a copy or a fill that a graph runs on the device."""

    kind: NodeKind
    name: str = ""
    """Of a kernel, as a profiler writes it; "" if the driver does not tell."""
    grid: tuple[int, ...] | None = None
    """Of a kernel: the number of its blocks along each axis."""
    block: tuple[int, ...] | None = None
    """Of a kernel: the number of threads of a block along each axis."""
    op: int | None = None
    """The index of the op that added it; None if nothing did that was seen."""
    earlier: int | None = None
    """The nodes that have run when it begins, as a set of bits: 1 << place of the node. None if that is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphReplay:
    """One launch of a graph, whose ops were recorded when it was captured."""

    graph: int
    """The number of the graph in this process."""
    nodes: tuple[GraphNode, ...]
    """In the order in which they were added; `op` is an index into the ops of the trace."""
    ops: range
    """The indices of its ops in the trace."""
