"""Loops over the experts of a mixture of experts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nearpeak.bound.tiles import FACTORS, product_sizes
from nearpeak.findings.loops import Loop
from nearpeak.findings.step import Step
from nearpeak.ops.formulas.matrix import result

MIN_EXPERTS = 4
"""The least number of experts in a loop."""
ROW_SELECTIONS = ("nonzero", "where", "index", "index_select", "masked_select", "gather", "argwhere", "nonzero_numpy")
"""Operators that find or take the rows of an expert."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLoop:
    """A loop whose turns each take some rows and multiply them with weights of their own."""

    loop: Loop
    backward: list[int]
    products: list[int]
    """The first product of each turn."""

    @property
    def members(self) -> list[int]:
        """All ops of the loop, forward and backward."""
        return [*self.loop.members, *self.backward]

    def places(self, step: Step) -> set[str]:
        """The lines of the loop, or modules if the line is not known."""
        return {step.ops[index].place for index in self.loop.members}


def expert_loops(step: Step) -> list[ExpertLoop]:
    """The loops over experts of a step, without loops inside of another one that is in the list."""
    loops: list[ExpertLoop] = []
    for loop in step.loops:
        if any(set(loop.members) & set(other.loop.members) for other in loops):
            continue
        products = [_selected_products(step, turn) for turn in loop.turns]
        if sum(bool(part) for part in products) < MIN_EXPERTS or step.ops[loop.members[0]].phase != "forward":
            continue
        if all(
            _have_own_weights(step, products[start:end]) and _are_independent(step, run, products[start:end])
            for run, (start, end) in zip(loop.runs, _run_bounds(loop), strict=True)
        ):
            firsts = [part[0] for part in products if part]
            loops.append(ExpertLoop(loop=loop, backward=loop.backward_members, products=firsts))
    return loops


def _run_bounds(loop: Loop) -> Iterator[tuple[int, int]]:
    start = 0
    for run in loop.runs:
        yield start, start + len(run)
        start += len(run)


def _selected_products(step: Step, turn: Sequence[int]) -> list[int]:
    """The products of a turn whose rows the turn has selected."""
    selected: set[int] = set()
    products = []
    for index in turn:
        op = step.ops[index]
        if op.packet.rpartition(".")[2] in ROW_SELECTIONS or selected & set(step.flow.producers[index].values()):
            selected.add(index)
            sizes = product_sizes(op)
            if sizes is not None and sizes[0] == 1:
                products.append(index)
    return products


def _have_own_weights(step: Step, products: Sequence[Sequence[int]]) -> bool:
    """Whether no two turns multiply with the same weight, and their weights have the same shapes."""
    by_turn = [{expert_weight(step, index, False) for index in turn} for turn in products if turn]
    shapes = {tuple(_weight_shape(step, index) for index in turn) for turn in products if turn}
    return len(shapes) == 1 and len(set().union(*by_turn)) == sum(map(len, by_turn))


def _are_independent(step: Step, run: Sequence[Sequence[int]], products: Sequence[Sequence[int]]) -> bool:
    """Whether the products of a turn need nothing of the turns before: layers of a network do, experts do not."""
    start = run[0][0]
    for turn, own in zip(run, products, strict=True):
        waiting, seen = list(own), set(own)
        while waiting:
            for writer in step.flow.producers[waiting.pop()].values():
                if start <= writer < turn[0]:
                    return False
                if writer >= turn[0] and writer not in seen:
                    seen.add(writer)
                    waiting.append(writer)
    return True


def _weight_shape(step: Step, index: int) -> tuple[int, ...]:
    op = step.ops[index]
    return op.tensor(FACTORS[op.packet][1]).shape


def expert_places(step: Step) -> set[str]:
    """The lines of loops over experts: what waits there is part of the findings about them."""
    return set().union(*(experts.places(step) for experts in expert_loops(step)))


def expert_weight(step: Step, index: int, gradient: bool) -> tuple[int, int]:
    """Where the weight of a product is in memory, or the gradient that the product computes."""
    op = step.ops[index]
    tensor = result(op) if gradient else op.tensor(FACTORS[op.packet][1])
    return tensor.storage, tensor.offset
