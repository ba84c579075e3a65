"""`Touches`: which storages an op reads and writes, whether or not bytes are charged for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nearpeak.work.cost import Cost, Family
from nearpeak.work.op import Op, Trace

CHAINED: frozenset[Family] = frozenset({"pointwise", "movement", "creation", "random"})
"""Families whose ops can run inside another op's kernel."""


@dataclass(frozen=True, slots=True)
class Touches:
    """Storages that an op depends on and storages that it changes. A view has neither."""

    reads: tuple[int, ...]
    writes: tuple[int, ...]


_NOTHING = Touches((), ())


def touches_in(trace: Trace, costs: Sequence[Cost]) -> tuple[Touches, ...]:
    """For each op of a trace."""
    return tuple([touches_of(op, cost) for op, cost in zip(trace.ops, costs, strict=True)])


def touches_of(op: Op, cost: Cost) -> Touches:
    """From the tensors as well as from the cost: a formula may charge nothing for a tensor that is read."""
    if cost.family == "view":
        return _NOTHING
    reads = {tensor.storage: None for tensor in op.inputs}
    for access in cost.reads:
        reads[access.storage] = None
    writes = {access.storage: None for access in cost.writes}
    if cost.family != "creation" or writes:  # `empty` writes nothing
        for tensor in op.outputs:
            writes[tensor.storage] = None
    if op.mutated:
        for tensor in op.tensors(*op.mutated):
            writes[tensor.storage] = None
    return Touches(tuple(reads), tuple(writes))
