"""The same op runs on the same values more than once in the same pass: the first result could be reused."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from nearpeak.findings.engine import Waste, rule
from nearpeak.findings.step import Step
from nearpeak.findings.value_numbering import number_values
from nearpeak.units import seconds


@rule("computed-twice", needs=["storages"], compiles=True)
def computed_twice(step: Step) -> Iterator[Waste]:
    """Forward ops whose name, arguments and inputs equal those of an earlier one, grouped along their data flow."""
    numbers = number_values(step)
    repeated = {
        index
        for index, first in enumerate(numbers.first)
        if first != index and step.ops[index].phase == "forward" and _counts(step, first) and _counts(step, index)
    }
    for piece in _pieces(step, repeated):
        launched = [index for index in piece if step.time(index)]
        if not launched:
            continue
        longest = max(launched, key=step.time)
        backward = {backward_op for index in launched for backward_op in _backward(step, index, numbers.first[index])}
        gains = {index: step.time(index) for index in (*launched, *sorted(backward))}
        op, first = step.ops[longest], step.ops[numbers.first[longest]]
        shapes = ", ".join("x".join(map(str, tensor.shape)) for tensor in op.inputs[:3])
        more = f" and {len(launched) - 1} more with it" if len(launched) > 1 else ""
        yield Waste(
            title="The same is computed again from the same inputs.",
            op=longest,
            gains=gains,
            evidence=f"{op.packet} of {shapes} ran at {first.source or 'an earlier op'} and again"
            f"{f' at {op.source}' if op.source != first.source else ''}, with nothing written in between; the later "
            f"one{more} took {seconds(step.seconds(launched))}"
            + (f", and {seconds(step.seconds(backward))} in backward." if backward else "."),
            reasoning="The later ops go away, and backward goes through the first one once. "
            "The first result is in memory for longer.",
            remedy=f"result = ...  # {op.packet.removeprefix('aten.')} once, at {first.source or 'its first use'}\n"
            f"# and `result` again at {op.source or 'the second'}",
        )


def _counts(step: Step, index: int) -> bool:
    """Whether the result is used, and the op is not a cast, which has a rule of its own."""
    op = step.ops[index]
    if op.packet == "aten._to_copy":
        return False
    return bool(step.flow.consumers[index]) or any(tensor.storage in step.flow.results for tensor in op.outputs)


def _pieces(step: Step, repeated: Collection[int]) -> list[list[int]]:
    """Groups of ops along their data flow: a function that is called twice is one waste."""
    piece_of: dict[int, list[int]] = {}
    for index in sorted(repeated):
        mine = [index]
        for producer in set(step.flow.producers[index].values()):
            piece = piece_of.get(producer)
            if piece is not None and piece is not mine:
                piece += mine
                mine = piece
                for member in mine:
                    piece_of[member] = mine
        piece_of[index] = mine
    return [sorted(piece) for piece in {id(piece): piece for piece in piece_of.values()}.values()]


def _backward(step: Step, index: int, first: int) -> list[int]:
    """The backward ops of an op: of its family, at its line, on what it read or wrote."""
    op = step.ops[index]
    own = {tensor.storage for tensor in (*op.inputs, *op.outputs)}
    ops = [
        position
        for position, candidate in enumerate(step.ops)
        if candidate.phase == "backward"
        and not candidate.recomputed
        and candidate.source == op.source != ""
        and candidate.module == op.module
        and step.costs[position].family == step.costs[index].family
        and any(tensor.storage in own for tensor in candidate.inputs)
    ]
    if step.ops[first].source == op.source:  # of both ops; backward begins with the later one
        return ops[: len(ops) // 2]
    return ops
