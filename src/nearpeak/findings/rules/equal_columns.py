"""Equal columns go through sums, products and gathers at their full number: one of them has all there is to know."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from nearpeak.findings.engine import Waste, rule
from nearpeak.findings.equal_values import EqualAlong, equal_along, repeats
from nearpeak.findings.step import Step, shape_text
from nearpeak.ops.cost import Access
from nearpeak.units import seconds

_COSTLY = ("indexing", "reduction", "matrix", "sorting")
"""Families of ops for which the columns are repeated. An op that goes over them alone may want them for another."""
_LEAST_REPEATS = 4


@rule("equal-columns", needs=["storages"])
def equal_columns(step: Step) -> Iterator[Waste]:
    """Sums by index, products and the like whose results are equal along a dimension, with what makes and follows
    them."""
    equal = equal_along(step)
    seen: set[int] = set()
    for index, cost in enumerate(step.costs):
        if index in seen or cost.family not in _COSTLY or not _is_repeated(step, equal, index):
            continue
        members = _with_neighbours(step, equal, index)
        seen |= members
        left = {member: _left(step, equal, member) for member in members}
        gains = {member: step.time(member) - left_s for member, left_s in left.items() if step.time(member) > left_s}
        if index not in gains:
            continue
        op = step.ops[index]
        result = op.written[0]
        along = sorted(d for d in equal.written[index] if result.shape[d] > 1)
        times = repeats(result, along)
        names = "columns" if along == [len(result.shape) - 1] else "parts along a dimension"
        yield Waste(
            title=f"{times:,} equal {names} are computed, where one would do.",
            op=max((m for m in gains if step.costs[m].family in _COSTLY), key=step.time),
            gains=gains,
            evidence=f"{op.packet} writes {shape_text(result.shape)}, equal along dimension "
            f"{', '.join(map(str, along))} by how it was made. With {len(gains) - 1} ops that make or follow it, "
            f"{seconds(step.seconds(gains))} are spent on equal numbers.",
            reasoning=f"With one of the {times:,} {names}, these ops take {seconds(sum(left[m] for m in gains))}; ops "
            "that read the result broadcast it.",
            remedy="count = torch.zeros(n, 1).index_add_(0, index, torch.ones(m, 1))  # one column; y / count "
            "broadcasts it\ncount = torch.bincount(index, minlength=n)  # once, if the indices do not change",
        )


def _is_repeated(step: Step, equal: EqualAlong, index: int) -> bool:
    op = step.ops[index]
    is_forward = op.phase == "forward" and not op.recomputed and op.origin == "torch"
    return is_forward and len(op.written) == 1 and repeats(op.written[0], equal.written[index]) >= _LEAST_REPEATS


def _with_neighbours(step: Step, equal: EqualAlong, index: int) -> set[int]:
    """An op with what follows it and is equal along dimensions too, and what makes such tensors for these alone."""
    members, waiting = {index}, [index]
    while waiting:
        for reader in step.forward_readers(waiting.pop()):
            if reader not in members and _is_repeated(step, equal, reader):
                members.add(reader)
                waiting.append(reader)
    waiting = list(members)
    while waiting:
        for producer in step.flow.producers[waiting.pop()].values():
            if (
                producer not in members
                and _is_repeated(step, equal, producer)
                and members.issuperset(step.forward_readers(producer))
                and step.flow.results.isdisjoint(step.flow.written_by[producer])
            ):
                members.add(producer)
                waiting.append(producer)
    return members


def _left(step: Step, equal: EqualAlong, index: int) -> float:
    """The time of an op on one of the equal parts."""
    op, cost = step.ops[index], step.costs[index]
    times: dict[int, int] = {}
    result = op.written[0]
    for tensor, dims in ((result, equal.written[index]), *zip(op.inputs, equal.read[index], strict=True)):
        shared = {d for d in dims if tensor.strides[d]}
        if len(tensor.shape) == len(result.shape):  # what is equal in the result
            shared &= equal.written[index]
        times[tensor.storage] = max(times.get(tensor.storage, 1), repeats(tensor, shared))

    def one_of(accesses: Collection[Access]) -> list[Access]:
        return [Access(storage=a.storage, bytes=a.bytes / times.get(a.storage, 1)) for a in accesses]

    share = 1 / repeats(result, equal.written[index])
    flops = {dtype: count * share for dtype, count in cost.flops.items()}
    return step.expected_for_work(one_of(cost.reads), one_of(cost.writes), flops, kind=cost.family)
