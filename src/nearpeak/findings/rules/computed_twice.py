"""The same op runs on the same numbers more than once in the same pass: the first result would do."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from nearpeak.findings.engine import Waste, rule
from nearpeak.findings.step import Step
from nearpeak.findings.value_numbering import number_values
from nearpeak.units import seconds


@rule("computed-twice", needs=["storages"])
def computed_twice(step: Step) -> Iterator[Waste]:
    """Forward ops whose name, arguments and inputs are those of an earlier one; together where they hang together."""
    numbers = number_values(step)
    again = {
        index
        for index, first in enumerate(numbers.first)
        if first != index and step.ops[index].phase == "forward" and _counts(step, first) and _counts(step, index)
    }
    for piece in _pieces(step, again):
        launched = [index for index in piece if step.measured[index].measured_s]
        if not launched:
            continue
        at = max(launched, key=lambda index: step.measured[index].measured_s)
        behind = {other for index in launched for other in _backward(step, index, numbers.first[index])}
        gains = {index: step.measured[index].measured_s for index in (*launched, *sorted(behind))}
        op, first = step.ops[at], step.ops[numbers.first[at]]
        shapes = ", ".join("x".join(map(str, tensor.shape)) for tensor in op.inputs[:3])
        more = f" and {len(launched) - 1} more with it" if len(launched) > 1 else ""
        yield Waste(
            title="The same is computed again from the same inputs.",
            at=at,
            gains=gains,
            evidence=f"{op.packet} of {shapes} ran at {first.source or 'an earlier op'} and again"
            f"{f' at {op.source}' if op.source != first.source else ''}, with nothing written in between; the later "
            f"one{more} took {seconds(step.seconds(launched))}"
            + (f", and {seconds(step.seconds(behind))} in backward." if behind else "."),
            reasoning="The later ops go away, and backward goes through the first one once. "
            "The first result is in memory for longer.",
            remedy=f"result = ...  # {op.packet.removeprefix('aten.')} once, at {first.source or 'its first use'}\n"
            f"# and `result` again at {op.source or 'the second'}",
        )


def _counts(step: Step, index: int) -> bool:
    """Whether somebody reads the result, and it is no cast: those have a rule of their own."""
    op = step.ops[index]
    if op.packet == "aten._to_copy":
        return False
    return bool(step.flow.consumers[index]) or any(tensor.storage in step.flow.results for tensor in op.outputs)


def _pieces(step: Step, again: Collection[int]) -> list[list[int]]:
    """Ops in pieces along their data: a function that is called twice is one waste."""
    piece_of: dict[int, list[int]] = {}
    for index in sorted(again):
        mine = [index]
        for producer in set(step.flow.producers[index].values()):
            other = piece_of.get(producer)
            if other is not None and other is not mine:
                other += mine
                mine = other
                for member in mine:
                    piece_of[member] = mine
        piece_of[index] = mine
    return [sorted(piece) for piece in {id(piece): piece for piece in piece_of.values()}.values()]


def _backward(step: Step, index: int, first: int) -> list[int]:
    """The ops that run backward through an op: of its family, at its line, on what it read or wrote."""
    op = step.ops[index]
    own = {tensor.storage for tensor in (*op.inputs, *op.outputs)}
    found = [
        at
        for at, other in enumerate(step.ops)
        if other.phase == "backward"
        and not other.recomputed
        and other.source == op.source != ""
        and other.module == op.module
        and step.costs[at].family == step.costs[index].family
        and any(tensor.storage in own for tensor in other.inputs)
    ]
    if step.ops[first].source == op.source:  # of both; backward begins with the later one
        return found[: len(found) // 2]
    return found
