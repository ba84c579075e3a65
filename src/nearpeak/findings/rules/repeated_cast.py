"""The same tensor is cast to the same dtype more than once in a step, with nothing written to it in between."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence

from nearpeak.findings.engine import Waste, rule
from nearpeak.findings.step import Step
from nearpeak.findings.value_numbering import number_values
from nearpeak.findings.what_if import with_dtype
from nearpeak.units import quantity, seconds


@rule("repeated-cast", needs=["storages"])
def repeated_cast(step: Step) -> Iterator[Waste]:
    """Casts of the same numbers in the same layout to the same dtype; the first of them stays."""
    numbers = number_values(step)
    groups: dict[Hashable, list[int]] = {}
    for index in range(len(step.ops)):
        if _casts(step, index):
            groups.setdefault(numbers.reads[index], []).append(index)
    for casts in groups.values():
        later = [index for index in casts[1:] if step.measured[index].measured_s]
        if not later or step.ops[casts[0]].phase != "forward":  # backward alone is nobody's code
            continue
        behind = _backward(step, casts)
        sums = _sums(step, behind)
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
            gains={index: step.measured[index].measured_s for index in (*later, *behind[:-1])} | sums,
            evidence=f"{article} {what} of {size}, {quantity(given.bytes, 'B')} of {given.dtype}, "
            f"goes to {made.dtype} at {', '.join(lines[:4]) or 'lines that are not known'}; the casts after the first "
            f"took {seconds(step.seconds(later))}"
            + (f", and those of its gradients {seconds(step.seconds(behind[:-1]))}." if behind else "."),
            reasoning=f"All casts but the first go away. {_of_sums(sums, made.dtype)}"
            f"Its result stays in memory until the last use: {quantity(made.bytes, 'B')}.",
            remedy=f"cast = tensor.to(torch.{made.dtype})  # once, before {lines[0] if lines else 'the first use'}\n"
            "# and `cast` at every use; under torch.autocast: one context around all uses",
        )


def _of_sums(sums: Mapping[int, float], dtype: str) -> str:
    return f"Its gradients are added in {dtype}, which saves {seconds(sum(sums.values()))}. " if sums else ""


def _casts(step: Step, index: int) -> bool:
    """Whether an op only makes a copy in another dtype, which nobody writes to and somebody reads."""
    op = step.ops[index]
    if op.packet != "aten._to_copy" or op.recomputed or op.phase == "optimizer" or len(op.outputs) != 1:
        return False
    made = op.outputs[0]
    alone = step.flow.written_by[index] == (made.storage,) and not any(
        made.storage in step.flow.written_by[reader] for reader in step.flow.consumers[index]
    )
    return alone and bool(step.flow.consumers[index]) and op.inputs[0].dtype != made.dtype


def _backward(step: Step, casts: Sequence[int]) -> list[int]:
    """Casts of gradients back, one for each cast of forward; only the last of them is needed.

    A line may run in many modules: a gradient belongs to the cast of its line in its module.
    """
    op = step.ops[casts[0]]
    given, made = op.inputs[0], op.outputs[0]
    places = {(step.ops[index].source, step.ops[index].module) for index in casts if step.ops[index].source}
    found = [
        index
        for index, other in enumerate(step.ops)
        if other.phase == "backward"
        and other.packet == "aten._to_copy"
        and not other.recomputed
        and (other.source, other.module) in places
        and other.inputs[0].shape == given.shape
        and (other.inputs[0].dtype, other.outputs[0].dtype) == (made.dtype, given.dtype)
    ]
    forward = [index for index in casts if step.ops[index].phase == "forward"]
    return found if len(found) == len(forward) else []


def _sums(step: Step, behind: Sequence[int]) -> dict[int, float]:
    """What sums of these gradients save in the dtype of the casts: autograd adds those of all uses.

    A gradient that comes from somewhere else, past a residual, say, may be among them: its sum stays as it is.
    """
    added = set(behind)
    found: dict[int, float] = {}
    for index in range(min(behind, default=len(step.ops)), len(step.ops)):
        op = step.ops[index]
        given = [step.flow.producers[index].get(tensor.storage) for tensor in op.inputs]
        if op.packet not in ("aten.add", "aten.add_") or len(given) != 2 or added.isdisjoint(given):
            continue
        added.add(index)
        if not added.issuperset(given) or len(found) == len(behind) - 1:
            continue
        short = step.ops[behind[0]].inputs[0].dtype
        now, then = step.expected(op), step.expected(with_dtype(op, op.outputs[0].dtype, short))
        if now and then is not None and then < now:
            found[index] = step.measured[index].measured_s * (1 - then / now)
    return found
