"""An add right before a norm, as two kernels: the norm reads the sum that was just written."""

from __future__ import annotations

from collections.abc import Iterator

from nearpeak.findings.engine import Waste, rule
from nearpeak.findings.step import Step, shape_text
from nearpeak.units import quantity, seconds

_NORMS = {
    "aten.native_layer_norm": "layer_norm",
    "aten._fused_rms_norm": "rms_norm",
}


@rule("unfused-residual", needs=["storages"], compiles=True)
def unfused_residual(step: Step) -> Iterator[Waste]:
    """Norms whose input is the result of an add, in a step without training.

    The remedy is compiled code, whose backward is slower than that of torch's norm: on an H200, a step of ViT-B of 50
    ms took 9 ms longer with all of its sums and norms compiled, and one of BERT of 55 ms took 7 ms longer.
    """
    if step.trains:
        return
    for index, op in enumerate(step.ops):
        name = _NORMS.get(op.packet)
        if name is None:
            continue
        total = op.inputs[0]
        add = step.flow.producers[index].get(total.storage)
        if add is None or not _adds(step, add, total.elements):
            continue
        sum_needed = set(step.flow.consumers[add]) != {index} or total.storage in step.flow.results
        took, norm_took = step.time(add), step.time(index)
        # Fused, the norm does not read the sum, and the add writes it only if other ops need it.
        gains = {index: norm_took * min(0.5, total.bytes / max(total.bytes, step.measured[index].bytes))}
        if not sum_needed:
            gains[add] = took / 3
        spared = total.bytes * (1 if sum_needed else 2)
        yield Waste(
            title="A residual is added in a kernel of its own, right before a norm.",
            op=add,
            gains=gains,
            gone=[add],
            evidence=f"add of {shape_text(total.shape)} took {seconds(took)}, and {op.packet} at "
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
