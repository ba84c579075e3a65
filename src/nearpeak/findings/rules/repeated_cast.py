"""The same tensor is cast to the same dtype more than once in a step, with nothing written to it in between."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence

from nearpeak.findings.engine import Waste, rule
from nearpeak.findings.step import Step
from nearpeak.findings.value_numbering import number_values
from nearpeak.findings.what_if import with_dtype
from nearpeak.units import quantity, seconds


@rule("repeated-cast", needs=["storages"], compiles=True)
def repeated_cast(step: Step) -> Iterator[Waste]:
    """Casts of the same values in the same layout to the same dtype; the first of them stays."""
    numbers = number_values(step)
    groups: dict[Hashable, list[int]] = {}
    for index in range(len(step.ops)):
        if _casts(step, index):
            groups.setdefault(numbers.reads[index], []).append(index)
    for casts in groups.values():
        later = [index for index in casts[1:] if step.time(index)]
        if not later or step.ops[casts[0]].phase != "forward":  # casts in backward alone have no line of their own
            continue
        backward_casts = _backward(step, casts)
        sums = _sums(step, backward_casts)
        op = step.ops[later[0]]
        source, result = op.inputs[0], op.outputs[0]
        known = step.trace.storages[source.storage]
        what = f"{known.kind} {known.name}".strip() if known.kind != "intermediate" else "tensor"
        size = "x".join(map(str, source.shape))
        article = "An" if what[0] in "aeiou" else "A"
        lines = list(dict.fromkeys(step.ops[index].source for index in casts if step.ops[index].source))
        yield Waste(
            title=f"The same {what} is cast to {result.dtype} {len(casts)} times in a step.",
            op=max(later, key=step.time),
            gains={index: step.time(index) for index in (*later, *backward_casts[:-1])} | sums,
            evidence=f"{article} {what} of {size}, {quantity(source.bytes, 'B')} of {source.dtype}, "
            f"is cast to {result.dtype} at {', '.join(lines[:4]) or 'unknown lines'}; the casts after the first "
            f"took {seconds(step.seconds(later))}"
            + (
                f", and those of its gradients {seconds(step.seconds(backward_casts[:-1]))}." if backward_casts else "."
            ),
            reasoning=f"All casts but the first go away. {_of_sums(sums, result.dtype)}"
            f"Its result stays in memory until the last use: {quantity(result.bytes, 'B')}.",
            remedy=f"cast = tensor.to(torch.{result.dtype})  # once, before {lines[0] if lines else 'the first use'}\n"
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
    source, result = op.inputs[0], op.outputs[0]
    places = {(step.ops[index].source, step.ops[index].module) for index in casts if step.ops[index].source}
    backward_casts = [
        index
        for index, candidate in enumerate(step.ops)
        if candidate.phase == "backward"
        and candidate.packet == "aten._to_copy"
        and not candidate.recomputed
        and (candidate.source, candidate.module) in places
        and candidate.inputs[0].shape == source.shape
        and (candidate.inputs[0].dtype, candidate.outputs[0].dtype) == (result.dtype, source.dtype)
    ]
    forward = [index for index in casts if step.ops[index].phase == "forward"]
    return backward_casts if len(backward_casts) == len(forward) else []


def _sums(step: Step, backward_casts: Sequence[int]) -> dict[int, float]:
    """The savings of gradient sums in the narrower dtype: autograd adds the gradients of all uses.

    A gradient from elsewhere, such as a residual connection, may be among them: its sum stays as it is.
    """
    gradients = set(backward_casts)
    savings: dict[int, float] = {}
    for index in range(min(backward_casts, default=len(step.ops)), len(step.ops)):
        op = step.ops[index]
        operands = [step.flow.producers[index].get(tensor.storage) for tensor in op.inputs]
        if op.packet not in ("aten.add", "aten.add_") or len(operands) != 2 or gradients.isdisjoint(operands):
            continue
        gradients.add(index)
        if not gradients.issuperset(operands) or len(savings) == len(backward_casts) - 1:
            continue
        short = step.ops[backward_casts[0]].inputs[0].dtype
        now, then = step.expected(op), step.expected(with_dtype(op, op.outputs[0].dtype, short))
        if now and then is not None and then < now:
            savings[index] = step.time(index) * (1 - then / now)
    return savings
