"""A weight is copied in every step into another layout or dtype before a GEMM."""

from __future__ import annotations

from collections.abc import Iterator

from nearpeak.findings.engine import Waste, rule
from nearpeak.findings.step import Step, shape_text
from nearpeak.ops.op import Op
from nearpeak.ops.tensor import Tensor
from nearpeak.units import quantity, seconds

COPIES = ("aten.clone", "aten._to_copy", "aten.copy_")
PRODUCTS = ("matrix", "convolution", "attention")
SIDES = 2
"""The least number of dimensions of a weight; a bias has fewer."""
NARROWEST = 2
"""Bytes of an element. Weights of fewer bytes are quantized to save memory."""


@rule("weight-copied", needs=["storages"])
def weight_copied(step: Step) -> Iterator[Waste]:
    """Copies of parameters that GEMMs read; a cast is needed if the parameter is trained."""
    trained = step.trains
    for index, op in enumerate(step.ops):
        if op.phase != "forward" or not copies_weight(step, op):
            continue
        source, copy = _ends(op)
        cast = source.dtype != copy.dtype
        if trained and (cast or any(step.ops[reader].phase != "forward" for reader in step.flow.consumers[index])):
            continue
        products = [reader for reader in step.flow.consumers[index] if step.costs[reader].family in PRODUCTS]
        if not products or len(products) != len(step.flow.consumers[index]) or copy.storage in step.flow.results:
            continue
        took = step.time(index)
        first = step.ops[products[0]]
        changes = f"from {source.dtype} to {copy.dtype}" if cast else "into another order"
        yield Waste(
            title=f"A weight is copied {changes} in every step, before a product with it.",
            op=index,
            gains={index: took},
            evidence=f"{op.packet} copies a parameter of {shape_text(source.shape)} {changes}: "
            f"{quantity(step.bytes([index]), 'B')} in {seconds(took)}; {first.packet} at "
            f"{first.source or 'a later op'} reads the copy.",
            reasoning="The copy goes away; the product reads as many bytes as before.",
            remedy=_remedy(step, index, cast=cast),
        )


def _ends(op: Op) -> tuple[Tensor, Tensor]:
    copy = op.outputs[0]
    source = op.tensor("src") if op.packet == "aten.copy_" else op.tensor("self")
    return source, copy


def copies_weight(step: Step, op: Op) -> bool:
    """Whether a whole weight is copied, within one memory."""
    if op.packet not in COPIES:
        return False
    source, copy = _ends(op)
    storage = step.trace.storages[source.storage]
    if storage.kind != "parameter" or len(source.shape) < SIDES or source.storage == copy.storage:
        return False
    if not source.is_floating or source.item_bytes < NARROWEST:
        return False
    if (source.storage in step.trace.on_host) != (copy.storage in step.trace.on_host):
        return False  # it is offloaded to the host
    return source.bytes >= storage.bytes and copy.elements == source.elements


def _remedy(step: Step, index: int, *, cast: bool) -> str:
    source, copy = _ends(step.ops[index])
    name = step.trace.storages[source.storage].name or "weight"
    if cast:
        return f"model.to(torch.{copy.dtype})  # once, before predicting: {name} is then stored as it is used"
    if any(step.costs[reader].family == "convolution" for reader in step.flow.consumers[index]):
        return f"model.to(memory_format=torch.channels_last)  # once: {name} is then stored in the order that is used"
    return (
        f"Multiply with the view of {name} (.t(), .mT or .permute(...)) without .contiguous(): products read either "
        "order. Or store it once in the order that is used."
    )
