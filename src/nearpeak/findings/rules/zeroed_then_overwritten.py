"""A buffer is filled and then completely overwritten before it is read: the fill is not needed."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from nearpeak.findings.engine import Waste, rule
from nearpeak.findings.step import Step
from nearpeak.ops.op import Op
from nearpeak.units import quantity, seconds


@rule("zeroed-then-overwritten", needs=["storages"], compiles=True)
def zeroed_then_overwritten(step: Step) -> Iterator[Waste]:
    """Fills whose result is completely overwritten by the next op that touches it."""
    for storage, ops in step.touched_by.items():
        for fill, after in pairwise(ops):
            if not _fills(step, fill, storage) or not _overwrites(step, after, storage):
                continue
            op = step.ops[fill]
            took, moved = step.time(fill), step.costs[fill].writes[0].bytes
            yield Waste(
                title="A buffer is filled, and then completely overwritten before it is read.",
                op=fill,
                gains={fill: took},
                evidence=f"{op.packet} fills {quantity(moved, 'B')} in {seconds(took)}; {step.ops[after].packet} at "
                f"{step.ops[after].source or 'a later op'} writes all of it.",
                reasoning="The fill goes away, and nothing else changes.",
                remedy=_remedy(op),
            )


def _fills(step: Step, index: int, storage: int) -> bool:
    """Whether an op only fills a whole storage with a constant."""
    cost = step.costs[index]
    whole = step.trace.storages[storage].bytes
    return (
        cost.family == "creation"
        and not cost.reads
        and any(access.storage == storage and access.bytes >= whole for access in cost.writes)
    )


def _overwrites(step: Step, index: int, storage: int) -> bool:
    cost = step.costs[index]
    whole = step.trace.storages[storage].bytes
    reads = {access.storage for access in cost.reads}
    return storage not in reads and any(access.storage == storage and access.bytes >= whole for access in cost.writes)


def _remedy(op: Op) -> str:
    name = op.packet.rpartition(".")[2]
    if name.endswith("_"):
        return f"Leave the call of `{name}` out."
    instead = {"zeros": "empty", "ones": "empty", "full": "empty", "new_zeros": "new_empty", "new_ones": "new_empty"}
    to = instead.get(name, "empty_like" if name.endswith("_like") else "empty")
    return (
        f"torch.{to}(...) in place of {name}(...)"
        if not name.startswith("new_")
        else f".{to}(...) in place of .{name}(...)"
    )
