"""Near pairs are looked for among all pairs in every step, although what they are pairs of moves little in a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nearpeak.findings.engine import Waste, rule
from nearpeak.findings.regions import describe_ops
from nearpeak.findings.step import Step, is_source_line
from nearpeak.ops.cost import Cost, costs_of
from nearpeak.ops.op import Op
from nearpeak.units import quantity, seconds

_LISTS = ("aten.nonzero", "aten.nonzero_numpy", "aten.argwhere", "aten.masked_select", "aten.index")
_COMPARISONS = ("aten.lt", "aten.le", "aten.gt", "aten.ge")
_LEAST = 64
"""Rows. The pairs of fewer take no time."""
_KEPT_STEPS = 10
"""A list is good for so many steps with a small margin: the usual choice in molecular dynamics is 10 to 20."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Listing:
    """Ops that list near pairs among all pairs."""

    members: tuple[int, ...]
    rows: int
    source: int
    """The storage that has the rows."""
    elements: int
    """Of the rows."""
    readers: tuple[int, ...]
    """The members that read it."""


@rule("pairs-listed-every-step", needs=["storages", "lines"])
def pairs_listed_every_step(step: Step) -> Iterator[Waste]:
    """Comparisons of all pairs of rows with a threshold, where the step moves the rows and the next compares them."""
    if step.trace.next_step is None:
        return
    costs = (*step.costs, *costs_of(step.trace.next_step.ops))
    for listing in _listings(step):
        if not _is_of_moving_rows(step, costs, listing):
            continue
        took = step.seconds(listing.members)
        largest = max(listing.members, key=step.time)
        size = max(tensor.bytes for i in listing.members for tensor in step.ops[i].outputs)
        yield Waste(
            title="Near pairs are looked for among all pairs in every step.",
            op=largest,
            source=_line(step, listing.members),
            gains={i: step.time(i) * (1 - 1 / _KEPT_STEPS) for i in listing.members if step.time(i)},
            evidence=f"All pairs of {listing.rows:,} rows are compared, and up to {quantity(size, 'B')} written for "
            f"them: {describe_ops(step, [i for i in listing.members if step.time(i)])} take {seconds(took)}. The step "
            "moves the rows, and the next one compares all of them again.",
            reasoning=f"A list with a margin is good for many steps: made in one of {_KEPT_STEPS}, it takes "
            f"{seconds(took / _KEPT_STEPS)} in a step on average.",
            remedy="pairs = list_pairs(positions, cutoff + skin)  # again once something has moved by skin / 2, or\n"
            "if step % 10 == 0: ...                            # every few steps; pairs beyond the cutoff count 0\n"
            "# Many rows: sort them into cells as wide as the cutoff, and compare those of neighboring cells.",
        )


def _listings(step: Step) -> Iterator[_Listing]:
    """Each with all lists that are made of the same comparisons."""
    found: list[_Listing] = []
    for index, op in enumerate(step.ops):
        listing = _listing(step, index) if op.packet in _LISTS and op.phase == "forward" else None
        if listing is None:
            continue
        if found and not set(found[-1].members).isdisjoint(listing.members):
            members = tuple(sorted({*found[-1].members, *listing.members}))
            found[-1] = dataclasses.replace(listing, members=members)
        else:
            found.append(listing)
    yield from found


def _listing(step: Step, index: int) -> _Listing | None:
    """The ops from some rows to a list of their near pairs, if an op makes such a list of a mask."""
    op = step.ops[index]
    mask = next((tensor for tensor in op.inputs if tensor.dtype == "bool" and len(tensor.shape) >= 2), None)
    if mask is None or mask.shape[-1] != mask.shape[-2] or mask.shape[-1] < _LEAST:
        return None
    pairs, rows = mask.elements, mask.shape[-1]
    producer = step.flow.producers[index].get(mask.storage)
    members, waiting = {index}, [] if producer is None else [producer]
    sources: dict[int, list[int]] = {}
    elements: dict[int, int] = {}
    compares = False
    while waiting:
        member = waiting.pop()
        if member in members:
            continue
        members.add(member)
        compares = compares or step.ops[member].packet in _COMPARISONS
        for tensor in step.ops[member].inputs:
            before = step.flow.producers[member].get(tensor.storage)
            if before is not None and _writes(step.ops[before], pairs):
                waiting.append(before)
            elif tensor.shape and rows in tensor.shape and tensor.elements < pairs:
                sources.setdefault(tensor.storage, []).append(member)
                elements[tensor.storage] = max(elements.get(tensor.storage, 0), tensor.elements)
    _follow_norms(step, sources, elements)
    if len(sources) != 1 or not compares:
        return None
    ((source, readers),) = sources.items()
    return _Listing(
        members=tuple(sorted(members)),
        rows=rows,
        source=source,
        elements=elements[source],
        readers=tuple(readers),
    )


def _writes(op: Op, pairs: int) -> bool:
    return op.phase == "forward" and any(tensor.elements >= pairs for tensor in op.outputs)


def _follow_norms(step: Step, sources: dict[int, list[int]], elements: dict[int, int]) -> None:
    """Replaces what was computed from one source alone, such as the norms of its rows, by that source."""
    for storage in list(sources):
        reader = sources[storage][0]
        producer, hops = step.flow.producers[reader].get(storage), 0
        while producer is not None and hops < 4:
            read = {tensor.storage for tensor in step.ops[producer].inputs if tensor.elements > 1}
            if len(read) != 1:
                break
            (before,) = read
            if before in sources and before != storage:
                sources[before] += sources.pop(storage)
                elements.pop(storage)
                break
            producer, hops = step.flow.producers[producer].get(before), hops + 1


def _is_of_moving_rows(step: Step, costs: Sequence[Cost], listing: _Listing) -> bool:
    """Whether the next step lists the pairs of rows that were computed, one by one, from those of this step."""
    following = step.trace.next_step
    assert following is not None
    ops = (*step.ops, *following.ops)
    lines = {(step.ops[i].name, step.ops[i].source) for i in listing.readers}
    same, moved = {listing.source}, set[int]()
    first = min(listing.members)
    for index in range(first, len(ops)):
        op = ops[index]
        read = {tensor.storage for tensor in op.inputs if tensor.elements == listing.elements}
        if index >= len(step.ops) and (op.name, op.source) in lines:
            near = {tensor.storage for tensor in op.inputs if tensor.elements <= listing.elements}
            if near & moved or listing.source in moved:  # in place
                return True
        if costs[index].family not in ("pointwise", "movement") or not read & (same | moved):
            continue
        if index not in listing.members:
            moved.update(tensor.storage for tensor in op.written if tensor.elements == listing.elements)
    return False


def _line(step: Step, members: Sequence[int]) -> str:
    """The outermost line that runs nothing else but what leads to the list or follows from it alone."""
    line = step.line_of_all(_with_connected(step, members), max(members, key=step.time))
    return line if is_source_line(line) else ""


def _with_connected(step: Step, members: Sequence[int]) -> set[int]:
    """The members, ops that only they read, and ops that read nothing else."""
    inside, flow = set(members), step.flow
    for index in range(max(members), -1, -1):
        if flow.consumers[index] and inside.issuperset(flow.consumers[index]):
            inside.add(index)
    for index in range(min(members), len(step.ops)):
        read = flow.read_by[index]
        if read and all(flow.producers[index].get(storage) in inside for storage in read):
            inside.add(index)
    return inside
