"""Gradients are filled with zeros in every step, and the new gradients are added to them."""

from __future__ import annotations

from collections.abc import Iterator

from nearpeak.findings.engine import Waste, rule
from nearpeak.findings.step import Step
from nearpeak.units import quantity, seconds

ADDS = ("aten.add", "aten.add_")
COPIED = 2 / 3
"""Of the traffic of an addition. A gradient that is shared is copied if there is none yet, without reading one."""


@rule("gradients-zeroed", needs=["storages"])
def gradients_zeroed(step: Step) -> Iterator[Waste]:
    """Fills of existing storages to which the next op that touches them, in a backward pass, adds."""
    for fill, cost in enumerate(step.costs):
        op = step.ops[fill]
        if cost.reads or not cost.writes or not op.mutated or not _zeroes(op.packet) or op.phase == "backward":
            continue
        adds: dict[int, float] = {}
        zeroed = 0.0
        for access in cost.writes:
            ops = step.touched_by[access.storage]
            # The next step begins like this one.
            after = ops[(ops.index(fill) + 1) % len(ops)]
            if step.trace.storages[access.storage].kind == "intermediate" or not _accumulates(
                step, after, access.storage
            ):
                continue
            adds[after] = step.time(after) * (1.0 if _is_its_own(step, after, access.storage) else 1 - COPIED)
            zeroed += access.bytes
        if not adds:
            continue
        took = step.time(fill)
        share = zeroed / sum(access.bytes for access in cost.writes)
        yield Waste(
            title="Gradients are filled with zeros, to which the backward pass adds the new ones.",
            op=fill,
            gains={fill: share * took, **adds},
            evidence=f"{op.packet} fills {quantity(zeroed, 'B')} of gradients in {seconds(share * took)}; "
            f"{len(adds)} addition{'s' * (len(adds) > 1)} of the backward pass to these zeros took "
            f"{seconds(step.seconds(adds))}.",
            reasoning="Without old gradients the new ones are kept as they are: the fill and the additions go away.",
            remedy="optimizer.zero_grad()  # set_to_none=True, the default; by hand: parameter.grad = None",
        )


def _zeroes(packet: str) -> bool:
    return packet.rpartition(".")[2] in ("zero_", "fill_", "_foreach_zero_")


def _accumulates(step: Step, index: int, storage: int) -> bool:
    """Whether an op of the backward pass adds to all of a storage."""
    op = step.ops[index]
    return (
        op.phase == "backward"
        and op.packet in ADDS
        and len(op.inputs) == 2
        and op.inputs[0].shape == op.inputs[1].shape
        and storage in {tensor.storage for tensor in op.inputs}
    )


def _is_its_own(step: Step, index: int, storage: int) -> bool:
    """Whether nothing else uses what is added: then autograd takes it over without a copy."""
    added = next((tensor.storage for tensor in step.ops[index].inputs if tensor.storage != storage), storage)
    producer = step.flow.producers[index].get(added)
    return producer is not None and step.flow.consumers[producer] == (index,) and added not in step.trace.results
