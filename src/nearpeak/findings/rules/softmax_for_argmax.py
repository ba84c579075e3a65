"""A softmax of which only the order is used: the logits have the same order."""

from __future__ import annotations

from collections.abc import Iterator

from nearpeak.findings.engine import Waste, rule
from nearpeak.findings.step import Step, is_kept, shape_text
from nearpeak.ops.op import Op
from nearpeak.units import quantity, seconds

SOFTMAXES = ("aten._softmax", "aten._log_softmax")


@rule("softmax-for-argmax", needs=["storages"])
def softmax_for_argmax(step: Step) -> Iterator[Waste]:
    """Softmaxes that are read only by an `argmax` or the like over the same dimension."""
    for index, op in enumerate(step.ops):
        if op.packet not in SOFTMAXES:
            continue
        readers = step.flow.consumers[index]
        if not readers or is_kept(step, index, op.outputs[0]):
            continue
        if not all(_asks_for_order(step, reader, op) for reader in readers):
            continue
        took, moved = step.time(index), step.bytes([index])
        first = step.ops[readers[0]]
        yield Waste(
            title="Probabilities are computed only to find the largest ones.",
            op=index,
            gains={index: took},
            evidence=f"{op.packet} over {shape_text(op.outputs[0].shape)} takes {seconds(took)} "
            f"for {quantity(moved, 'B')}; only {first.packet} at {first.source or 'a later op'} reads the result.",
            reasoning="The order of the logits is that of the probabilities: the op goes away, and its reader takes "
            "as long on the logits.",
            remedy=_remedy(op, first),
        )


def _asks_for_order(step: Step, index: int, softmax: Op) -> bool:
    """Whether an op uses only the positions of the largest values, over the dimension of the softmax."""
    op, outputs = step.ops[index], softmax.outputs[0]
    dimensions = len(outputs.shape)
    if op.packet == "aten.argmax":
        along = op.arguments.get("dim")
        if along is None:
            return dimensions == 1 or all(
                size == 1 for place, size in enumerate(outputs.shape) if place != softmax.arguments["dim"] % dimensions
            )
    elif op.name in ("aten.max.dim", "aten.topk.default"):
        if not _values_unused(step, index):
            return False
        along = op.arguments.get("dim", -1)
    else:
        return False
    seen = op.tensor("self")
    return seen.shape == outputs.shape and along % dimensions == softmax.arguments["dim"] % dimensions


def _values_unused(step: Step, index: int) -> bool:
    """Whether the values, which are probabilities, are unused."""
    values = step.ops[index].outputs[0]
    if is_kept(step, index, values):
        return False
    return not any(values.storage in step.flow.read_by[reader] for reader in step.flow.consumers[index])


def _remedy(softmax: Op, reader: Op) -> str:
    name = reader.packet.rpartition(".")[2]
    amount = f"{reader.arguments['k']}, " if name == "topk" else ""
    return f"logits.{name}({amount}dim={softmax.arguments['dim']})  # without {softmax.packet.rpartition('._')[2]}"
