"""The same tensor is cast to the same dtype more than once in a step, with nothing written to it in between."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

from nearpeak.diagnose.examined import Examined
from nearpeak.diagnose.finding import Waste
from nearpeak.diagnose.findings import rule
from nearpeak.diagnose.held import numbered
from nearpeak.units import quantity, seconds


@rule("repeated-cast", needs=["storages"])
def repeated_cast(step: Examined) -> Iterator[Waste]:
    """Casts of the same numbers in the same layout to the same dtype; the first of them stays."""
    numbers = numbered(step)
    groups: dict[Hashable, list[int]] = {}
    for index in range(len(step.ops)):
        if _casts(step, index):
            groups.setdefault(numbers.reads[index], []).append(index)
    for casts in groups.values():
        later = [index for index in casts[1:] if step.measured[index].measured_s]
        if not later or step.ops[casts[0]].phase != "forward":  # backward alone is nobody's code
            continue
        behind = _backward(step, casts)
        op = step.ops[later[0]]
        given, made = op.inputs[0], op.outputs[0]
        known = step.trace.storages[given.storage]
        what = f"{known.kind} {known.name}".strip() if known.kind != "intermediate" else "tensor"
        size = "x".join(map(str, given.shape))
        article = "An" if what[0] in "aeiou" else "A"
        lines = list(dict.fromkeys(step.ops[index].source for index in casts if step.ops[index].source))
        yield Waste(
            title=f"The same {what} is cast to {made.dtype} {len(casts)} times in a step.",
            at=max(later, key=lambda index: step.measured[index].measured_s),
            gains={index: step.measured[index].measured_s for index in (*later, *behind)},
            evidence=f"{article} {what} of {size}, {quantity(given.bytes, 'B')} of {given.dtype}, "
            f"goes to {made.dtype} at {', '.join(lines[:4]) or 'lines that are not known'}; the casts after the first "
            f"took {seconds(step.seconds(later))}"
            + (f", and those of its gradients {seconds(step.seconds(behind))}." if behind else "."),
            reasoning="All casts but the first go away. "
            f"Its result stays in memory until the last use: {quantity(made.bytes, 'B')}.",
            remedy=f"cast = tensor.to(torch.{made.dtype})  # once, before {lines[0] if lines else 'the first use'}\n"
            "# and `cast` at every use; under torch.autocast: one context around all uses",
        )


def _casts(step: Examined, index: int) -> bool:
    """Whether an op only makes a copy in another dtype, which nobody writes to and somebody reads."""
    op = step.ops[index]
    if op.packet != "aten._to_copy" or op.recomputed or op.phase == "optimizer" or len(op.outputs) != 1:
        return False
    made = op.outputs[0]
    alone = step.flow.written_by[index] == (made.storage,) and not any(
        made.storage in step.flow.written_by[reader] for reader in step.flow.consumers[index]
    )
    return alone and bool(step.flow.consumers[index]) and op.inputs[0].dtype != made.dtype


def _backward(step: Examined, casts: Sequence[int]) -> list[int]:
    """Casts of gradients back, one for each cast of forward; only the last of them is needed."""
    op = step.ops[casts[0]]
    given, made = op.inputs[0], op.outputs[0]
    lines = {step.ops[index].source for index in casts} - {""}
    found = [
        index
        for index, other in enumerate(step.ops)
        if other.phase == "backward"
        and other.packet == "aten._to_copy"
        and not other.recomputed
        and other.source in lines
        and other.inputs[0].shape == given.shape
        and (other.inputs[0].dtype, other.outputs[0].dtype) == (made.dtype, given.dtype)
    ]
    forward = [index for index in casts if step.ops[index].phase == "forward"]
    return found[:-1] if len(found) == len(forward) else []
