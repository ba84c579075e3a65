"""The dataflow of a trace: which storages each op reads and writes, whether or not bytes are charged for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from nearpeak.ops.cost import Cost, Family
from nearpeak.ops.op import Op, Trace
from nearpeak.ops.op_classes import OpClasses

CHAINED: frozenset[Family] = frozenset({"pointwise", "movement", "creation", "random"})
"""Families whose ops can run inside another op's kernel."""


class Touches(NamedTuple):
    """The storages that an op reads and writes. A view has neither."""

    reads: tuple[int, ...]
    writes: tuple[int, ...]


_NOTHING = Touches((), ())


def touches_in(trace: Trace, costs: Sequence[Cost], kinds: OpClasses | None = None) -> tuple[Touches, ...]:
    """The storages that each op touches; `kinds` is the result of `classify_ops`, for a caller that has it."""
    if kinds is None:
        return tuple([touches_of(op, cost) for op, cost in zip(trace.ops, costs, strict=True)])
    known: list[Touches | None] = [memo.get("touches") for memo in kinds.memos]
    result = []
    for index, (kind, storages) in enumerate(zip(kinds.kinds, kinds.storages, strict=True)):
        touches = known[kind]
        if touches is _NOTHING:
            result.append(_NOTHING)
        elif touches is not None:
            result.append(
                Touches(
                    tuple([storages[place] for place in touches.reads]),
                    tuple([storages[place] for place in touches.writes]),
                )
            )
        else:
            touches = touches_of(trace.ops[index], costs[index])
            result.append(touches)
            places = {storage: place for place, storage in enumerate(storages)}
            if touches is _NOTHING:
                known[kind] = kinds.memos[kind]["touches"] = _NOTHING
            elif all(storage in places for storage in (*touches.reads, *touches.writes)):
                known[kind] = kinds.memos[kind]["touches"] = Touches(
                    tuple(places[storage] for storage in touches.reads),
                    tuple(places[storage] for storage in touches.writes),
                )
    return tuple(result)


def touches_of(op: Op, cost: Cost) -> Touches:
    """The storages of an op, from its tensors and its cost: a formula may charge nothing for a tensor that is read."""
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
