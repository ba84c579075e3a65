"""Dropout runs in a step without training: the model is in training mode."""

from __future__ import annotations

from collections.abc import Iterator

from nearpeak.findings.engine import Waste, rule
from nearpeak.findings.step import Step
from nearpeak.units import seconds

DROPOUTS = ("aten.native_dropout", "aten._fused_dropout")
"""Operators that draw and apply a mask in one kernel."""
DRAWS = ("aten.bernoulli_", "aten.bernoulli")
"""Operators that draw a mask, which others scale and apply."""


@rule("dropout-in-inference", needs=["storages"])
def dropout_in_inference(step: Step) -> Iterator[Waste]:
    """Masks that are drawn and multiplied with activations in a step without backward pass and optimizer."""
    if step.trace.graph_recorded or step.trains:
        return  # a later step may train what autograd records
    dropouts = [members for index in range(len(step.ops)) if (members := _dropout(step, index))]
    if not dropouts:
        return
    largest = max(dropouts, key=step.seconds)
    shape = " x ".join(str(size) for size in step.ops[largest[-1]].outputs[0].shape)
    members = [index for each in dropouts for index in each]
    yield Waste(
        title="Activations are dropped, though nothing is trained in this step.",
        op=largest[0],  # one setting changes all of them
        gains={member: step.time(member) for member in members},
        evidence=f"{len(dropouts)} dropout{'s' * (len(dropouts) > 1)}: {seconds(step.seconds(members))}, the longest "
        f"{seconds(step.seconds(largest))} for {shape} activations; the step has no backward pass and no optimizer.",
        reasoning="In evaluation mode dropout does nothing: all of its ops go away.",
        remedy="model.eval()  # once, before predicting; results then do not change from call to call either",
    )


def _dropout(step: Step, index: int) -> list[int]:
    """The ops of a dropout that begins here; empty if something else is drawn."""
    op = step.ops[index]
    if op.packet in DROPOUTS:
        return [index] if op.arguments.get("train") is not False and float(op.arguments["p"]) > 0 else []
    if op.packet not in DRAWS or not _is_activation(step, index):
        return []
    mask = step.touches[index].writes[0]
    members = [index]
    for after in range(index + 1, len(step.ops)):
        if mask not in (*step.touches[after].reads, *step.touches[after].writes):
            continue
        members.append(after)
        name = step.ops[after].packet
        if name in ("aten.mul", "aten.mul_") and any(storage != mask for storage in step.touches[after].reads):
            return members
        if name not in ("aten.div_", "aten.mul_") or mask not in step.touches[after].writes:
            return []
    return []


def _is_activation(step: Step, index: int) -> bool:
    """Whether a floating-point mask is drawn with one probability for all elements."""
    op = step.ops[index]
    written = op.written
    return isinstance(op.arguments.get("p"), float) and len(written) == 1 and written[0].is_floating
