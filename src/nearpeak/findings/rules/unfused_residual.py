"""An add right before a norm, as two kernels: the norm reads the sum that was only just written."""

from __future__ import annotations

from collections.abc import Iterator

from nearpeak.findings.engine import Waste, rule
from nearpeak.findings.step import Step, shape_text
from nearpeak.units import quantity, seconds

_NORMS = {
    "aten.native_layer_norm": "layer_norm",
    "aten._fused_rms_norm": "rms_norm",
}


@rule("unfused-residual", needs=["storages"])
def unfused_residual(step: Step) -> Iterator[Waste]:
    """Norms whose input an add has just made, in a step that does not train.

    Compiled code is what saves it, and is slower than torch's norm going backward: on an H200 ViT-B took 9 ms longer
    for a step of 50 ms with all of its sums and norms compiled, and BERT 7 ms of 55.
    """
    if step.trains:
        return
    for index, op in enumerate(step.ops):
        name = _NORMS.get(op.packet)
        if name is None:
            continue
        given = op.inputs[0]
        add = step.flow.producers[index].get(given.storage)
        if add is None or not _adds(step, add, given.elements):
            continue
        kept = set(step.flow.consumers[add]) != {index} or given.storage in step.flow.results
        took, norm_took = step.measured[add].measured_s, step.measured[index].measured_s
        # The norm reads nothing that is not at hand, and the add writes the sum only if others want it.
        gains = {index: norm_took * min(0.5, given.bytes / max(given.bytes, step.measured[index].bytes))}
        if not kept:
            gains[add] = took / 3
        spared = given.bytes * (1 if kept else 2)
        yield Waste(
            title="A residual is added in a kernel of its own, right before a norm.",
            at=add,
            gains=gains,
            gone=[add],
            evidence=f"add of {shape_text(given.shape)} took {seconds(took)}, and {op.packet} at "
            f"{op.source or 'the next op'} reads its result at once, in {seconds(norm_took)}.",
            reasoning=f"{quantity(spared, 'B')} need not be moved, at the speed of the ops that move them.",
            remedy="@torch.compile\ndef add_and_norm(x, residual, weight):\n    total = x + residual\n"
            f"    return torch.nn.functional.{name}(total, total.shape[-1:], weight), total",
            fix=step.nearpeak_kernel(f"add_{name}", "(x, residual, weight)"),
        )


def _adds(step: Step, index: int, elements: int) -> bool:
    op = step.ops[index]
    whole = [tensor for tensor in op.inputs if tensor.elements == elements]
    return op.packet == "aten.add" and len(whole) == 2
