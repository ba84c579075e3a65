"""Several backward passes go through the same ops: one for the sum of the losses, or for all inputs, would do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Sequence

from nearpeak.findings.engine import Waste, rule
from nearpeak.findings.liveness import gradient_sums
from nearpeak.findings.step import Step
from nearpeak.findings.value_numbering import number_values, reusable
from nearpeak.units import seconds

_PRODUCTS = ("matrix", "convolution")

_Place = tuple[str, str]
"""The line and the module of an op; those of a backward op are those of its forward op."""


@rule("repeated-backward", needs=["storages", "lines"])
def repeated_backward(step: Step) -> Iterator[Waste]:
    """Gradients that are added up, from passes of several losses; and passes of one result for one input each."""
    yield from _of_several_losses(step)
    yield from _of_one_result(step)


def _of_several_losses(step: Step) -> Iterator[Waste]:
    """Gradients of weights that are computed more often from the same results of forward than forward used these."""
    backward = [
        index
        for index, op in enumerate(step.ops)
        if op.phase == "backward" and op.source and not op.recomputed and step.touches[index].writes
    ]
    added, summands = gradient_sums(step)
    passes = _passes(step, [index for index in backward if index in summands], added)
    if not passes:
        return
    passes |= _places_between(step, backward, set(passes.values()))
    later = _later_ops(step, backward, passes)
    later |= {index for index in added if not later.isdisjoint(step.flow.producers[index].values())}
    gains = {index: step.time(index) for index in sorted(later) if step.time(index)}
    if not gains:
        return
    times = max(passes.values())
    first = next((index for index in backward if _place(step, index) not in passes), None)
    yield Waste(
        title=f"{times} backward passes go through the same ops, and add up their gradients.",
        op=max(gains, key=gains.__getitem__) if first is None else first,
        gains=gains,
        gone=sorted(later),
        evidence=f"Backward goes {times} times through what {len(passes)} modules or lines have computed once: "
        f"{len(gains)} ops of all passes but one take {seconds(sum(gains.values()))}. Nothing reads the gradients in "
        "between.",
        reasoning="The gradient of a sum is the sum of the gradients: one pass of the sum of the losses goes through "
        "each op once.",
        remedy="loss = loss_a + loss_b  # all of them, each with its weight\n"
        "loss.backward()  # once, in place of one .backward(retain_graph=True) for each",
    )


def _of_one_result(step: Step) -> Iterator[Waste]:
    """Passes that compute what an earlier one has computed, on the way to another input."""
    pass_of = {index: number for number, each in enumerate(step.trace.passes) for index in each.ops}
    if len(set(pass_of.values())) < 2:
        return
    numbers = number_values(step)
    same = {
        index
        for index, number in pass_of.items()
        if numbers.first[index] != index
        and step.ops[index].phase == step.ops[numbers.first[index]].phase == "backward"
        and not step.ops[index].recomputed
        and pass_of.get(numbers.first[index], number) != number
    }
    same = reusable(numbers, same, first_stays=True)
    products = Counter(number for index, number in pass_of.items() if step.costs[index].family in _PRODUCTS)
    again = Counter(pass_of[index] for index in same if step.costs[index].family in _PRODUCTS)
    later = {number for number, count in again.items() if 2 * count >= products[number]}
    same = {index for index in same if pass_of[index] in later}
    if not same:
        return
    # A pass that differentiates a later gradient alone differentiates the first one then; of both, it goes through one.
    differentiated = {(behind, pass_of.get(index)) for index, behind in step.trace.derivative_of.items()}
    through = {
        index
        for index, behind in step.trace.derivative_of.items()
        if behind in same and (numbers.first[behind], pass_of.get(index)) in differentiated
    } - same
    gains = {index: step.time(index) for index in sorted(same | through) if step.time(index)}
    lines = _lines_of_passes(step, later)
    took: dict[str, float] = {}
    for index in same:
        line = lines[pass_of[index]]
        took[line] = took.get(line, 0.0) + step.time(index)
    more = f", and {seconds(step.seconds(through))} where they are differentiated" if through else ""
    yield Waste(
        title="Backward passes compute the same gradients again, on the way to another input.",
        op=max(gains, key=gains.__getitem__),
        source=max(took, key=took.__getitem__),
        gains=gains,
        gone=sorted(same | through),
        evidence=f"{len(later)} of {len(step.trace.passes)} backward passes run {len(same)} ops on the values of an "
        f"earlier pass: they take {seconds(step.seconds(same))}{more}.",
        reasoning="One pass for all inputs of a result goes through each op once.",
        remedy="u_x, u_y = torch.autograd.grad(u, [x, y], ...)  # in place of a call for each input\n"
        "# or one input for all: torch.autograd.grad(u, xy)[0].unbind(1)",
    )


def _lines_of_passes(step: Step, later: Collection[int]) -> dict[int, str]:
    """For each of some passes the outermost line that began no other one."""
    others = {
        each.stack[:depth]
        for number, each in enumerate(step.trace.passes)
        if number not in later
        for depth in range(1, len(each.stack) + 1)
    }
    lines = {}
    for number in later:
        stack = step.trace.passes[number].stack
        own = (line for depth, line in enumerate(stack, 1) if stack[:depth] not in others)
        lines[number] = next(own, stack[-1] if stack else "")
    return lines


def _place(step: Step, index: int) -> _Place:
    return step.ops[index].source, step.ops[index].module


def _passes(step: Step, weight_gradients: Sequence[int], added: set[int]) -> dict[_Place, int]:
    """How often backward goes through the ops of a place, for products through which it goes repeatedly."""
    passes: dict[_Place, int] = {}
    for place, uses, group in _uses(step, [i for i in weight_gradients if step.costs[i].family in _PRODUCTS]):
        if len(group) > uses and len(group) % uses == 0:
            if not all(_is_only_added(step, index, added) for index in group):
                return {}  # a gradient that is read before the next pass is needed by itself
            passes[place] = min(passes.get(place, len(group)), len(group) // uses)
    return passes


def _places_between(step: Step, backward: Sequence[int], times: Collection[int]) -> dict[_Place, int]:
    """The places of other ops through which backward goes as often."""
    others = [index for index in backward if step.costs[index].family not in _PRODUCTS]
    return {
        place: len(group) // uses
        for place, uses, group in _uses(step, others)
        if len(group) % uses == 0 and len(group) // uses in times
    }


def _uses(step: Step, backward: Sequence[int]) -> Iterator[tuple[_Place, int, list[int]]]:
    """Backward ops that read the same result of forward, and the number of forward ops of their place that have it."""
    uses: Counter[tuple[_Place, int]] = Counter()
    for index, op in enumerate(step.ops):
        if op.phase == "forward" and step.touches[index].writes:
            touched = {*step.touches[index].reads, *step.touches[index].writes}
            uses.update((_place(step, index), storage) for storage in touched)
    groups: dict[tuple[str, _Place, int], list[int]] = {}
    for index in backward:
        for storage in _activations(step, index):
            groups.setdefault((step.ops[index].name, _place(step, index), storage), []).append(index)
    for (_, place, storage), group in groups.items():
        if uses[place, storage]:
            yield place, uses[place, storage], group


def _activations(step: Step, index: int) -> Iterator[int]:
    """What a backward op reads of forward that is no parameter."""
    for storage in step.flow.read_by[index]:
        producer = step.flow.producers[index].get(storage)
        known = step.trace.storages.get(storage)
        if producer is not None:
            if step.ops[producer].phase == "forward":
                yield storage
        elif known is not None and known.kind == "input":
            yield storage


def _is_only_added(step: Step, index: int, added: set[int]) -> bool:
    """Whether nothing but a sum of gradients reads the gradient that an op writes, nor that sum before the last one."""
    readers = step.flow.consumers[index]
    for reader in readers:
        further = step.flow.consumers[reader] if reader in added else ()
        if reader not in added or (not added.isdisjoint(further) and not added.issuperset(further)):
            return False
    return bool(readers)


def _later_ops(step: Step, backward: Sequence[int], passes: dict[_Place, int]) -> set[int]:
    """The backward ops of all passes but the first at the places that several go through."""
    groups: dict[Hashable, list[int]] = {}
    for index in backward:
        if _place(step, index) in passes:
            op = step.ops[index]
            shapes = tuple(tensor.shape for tensor in op.outputs)
            groups.setdefault((op.name, _place(step, index), shapes), []).append(index)
    later: set[int] = set()
    for group in groups.values():
        times = passes[_place(step, group[0])]
        if len(group) % times == 0:
            later.update(group[len(group) // times :])
    return later
