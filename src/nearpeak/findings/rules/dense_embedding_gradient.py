"""A large embedding of which a step uses few rows gets a dense gradient, and the optimizer updates all of it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from nearpeak.findings.engine import Waste, rule
from nearpeak.findings.step import Step
from nearpeak.ops.cost import Access
from nearpeak.ops.op import Op
from nearpeak.ops.tensor import Tensor
from nearpeak.units import quantity, seconds

FEW = 0.25
"""Of the rows of a table. With more, sorting and gathering them costs what is saved."""
_PASSES = {0: 3, 1: 7, 2: 14}
"""Passes over the used rows in a sparse update, by the number of state tensors: plain SGD, Adagrad, and Adam."""
_LAUNCHES = {0: 10, 1: 30, 2: 80}
"""Kernels of these updates: sorting and gathering rows takes many small ones."""
_LEAST_RATIO = {0: 1.0, 1: 2.0, 2: 4.0}
"""The least ratio of what goes away to what comes instead: SparseAdam is another algorithm, and a second optimizer."""
_SPARSE_LAUNCH = 1.6
"""The host's time for one of them over that of a launch: it also makes the sparse tensors. On an H200, SparseAdam takes
1.1 ms for its 80 kernels, all of it on the host, and plain SGD 160 us for each of twelve tables."""

_LOOKUPS = ("aten.embedding", "aten._embedding_bag", "aten._embedding_bag_forward_only")
_ADDITIONS = ("aten.add", "aten.add_")
_BACKWARD = ("aten.embedding_dense_backward", "aten._embedding_bag_dense_backward", "aten._embedding_bag_backward")


@rule("dense-embedding-gradient", needs=["storages"])
def dense_embedding_gradient(step: Step) -> Iterator[Waste]:
    """Dense gradients of tables that are used only for lookups, and are updated by plain SGD or Adam."""
    for lookup, backwards in _backwards_by_table(step).items():
        table = step.ops[lookup].tensor("weight")
        gradient = step.ops[backwards[0]].outputs[0]
        used = sum(step.ops[index].tensor("indices").elements for index in backwards)
        if used > FEW * gradient.shape[0]:
            continue
        sums, gradients = _sums(step, backwards)
        shares, touched = _optimizer(step, {table.storage, *gradients}, gradient.elements)
        written = {storage for member in shares for storage in step.flow.written_by[member]}
        # A gradient of the step before is read, and not written: a second optimizer may step after the step's end.
        states = sum(_stays(step, storage) for storage in (touched & written) - {table.storage, *gradients})
        if (
            states not in _PASSES
            or (states == 1 and not _is_adagrad(step, shares))
            or not shares
            or not _only_looked_up(step, {table.storage, *gradients}, {*backwards, *sums})
        ):
            continue
        gains = {member: share * step.time(member) for member, share in shares.items()}
        updated = sum(gains.values())
        gains |= {index: step.time(index) for index in (*backwards, *sums)}
        before = sum(gains.values())
        rows = Access(storage=-1, bytes=used * gradient.shape[-1] * gradient.item_bytes)
        rest = _PASSES[states] * step.expected_for_work(
            (rows,), (Access(storage=-2, bytes=rows.bytes),), kind="indexing"
        )
        launch = step.machine.achievable.launch.enqueue if step.machine.achievable else None
        rest = max(rest, _LAUNCHES[states] * _SPARSE_LAUNCH * (launch or 0.0))
        if before <= _LEAST_RATIO[states] * rest:
            continue
        op = step.ops[backwards[0]]
        yield Waste(
            title="A large table gets a dense gradient, though few of its rows are used.",
            op=lookup,
            source=step.line_that_writes(_class_name(step.ops[lookup])),
            gains={member: gain * (1 - rest / before) for member, gain in gains.items()},
            evidence=f"{used} of {gradient.shape[0]} rows are looked up at {step.ops[lookup].place}"
            f"{' and elsewhere' if len(backwards) > 1 else ''}, and {op.packet} writes all of "
            f"{quantity(gradient.bytes, 'B')}{f' {len(backwards)} times, which are added up,' if sums else ''} in "
            f"{seconds(before - updated)}. The optimizer's share for this table takes {seconds(updated)}.",
            reasoning="The gradient of the whole table, for which rows are sorted, and the optimizer's passes over the "
            f"table go away; {_PASSES[states]} passes over the rows that are used come instead, in some "
            f"{_LAUNCHES[states]} kernels: {seconds(rest)}.",
            remedy=_remedy(step, step.ops[lookup], gradient, states),
        )


def _backwards_by_table(step: Step) -> dict[int, list[int]]:
    """The dense gradients of lookups in each table, by the first of these lookups that has one."""
    found: dict[int, list[int]] = {}
    first: dict[int, int] = {}
    for index, op in enumerate(step.ops):
        if op.packet not in _BACKWARD or op.arguments.get("sparse") or not op.outputs:
            continue
        lookup = _lookup(step, index)
        if lookup is not None:
            known = first.setdefault(step.ops[lookup].tensor("weight").storage, lookup)
            found.setdefault(known, []).append(index)
    return found


def _sums(step: Step, backwards: Sequence[int]) -> tuple[list[int], set[int]]:
    """The ops that add up gradients of one table, and all storages that have a part of their sum."""
    gradients = {step.ops[index].outputs[0].storage for index in backwards}
    sums: list[int] = []
    for index in range(min(backwards) + 1, len(step.ops)):
        op, read = step.ops[index], step.flow.read_by[index]
        if op.phase == "backward" and op.packet in _ADDITIONS and read and gradients.issuperset(read):
            sums.append(index)
            gradients.update(step.flow.written_by[index])
    return sums, gradients


def _lookup(step: Step, backward: int) -> int | None:
    """The lookup that a gradient belongs to."""
    op = step.ops[backward]
    indices = op.tensor("indices")
    for index, candidate in enumerate(step.ops[:backward]):
        if candidate.packet not in _LOOKUPS or candidate.tensor("weight").shape != op.outputs[0].shape:
            continue
        looked_up = candidate.tensor("indices")
        if (looked_up.storage, looked_up.offset) == (indices.storage, indices.offset):
            return index
    return None


def _is_adagrad(step: Step, update: Collection[int]) -> bool:
    """Whether the one state of each parameter is a sum of squares, which can be kept for the used rows alone."""
    names = {optimizer.name for optimizer in step.trace.optimizers}
    takes_root = any("sqrt" in step.ops[index].packet for index in update)  # momentum does not
    return "torch.optim.Adagrad" in names and "torch.optim.RMSprop" not in names and takes_root


def _stays(step: Step, storage: int) -> bool:
    """Whether a storage is state: it exists before the step, or after it."""
    return step.trace.storages[storage].kind != "intermediate" or storage in step.flow.results


def _only_looked_up(step: Step, storages: Collection[int], known: Collection[int]) -> bool:
    """Whether only the optimizer needs the whole table or gradient, beside ops that are known: no tied head, no
    clipping."""
    return all(
        op.phase == "optimizer"
        or op.packet in _LOOKUPS
        or index in known
        or set(storages).isdisjoint(step.flow.read_by[index])
        for index, op in enumerate(step.ops)
    )


def _optimizer(step: Step, storages: set[int], elements: int) -> tuple[dict[int, float], set[int]]:
    """The share of a tensor's update in each op of the optimizer; and the storages of its state."""
    members = set(storages)
    ops = [(index, op) for index, op in enumerate(step.ops) if op.phase == "optimizer"]
    shares: dict[int, float] = {}
    while True:
        before = len(members)
        for index, op in ops:
            mine, total = _touched(op, members)
            members |= {tensor.storage for tensor in mine if tensor.elements == elements}
            if mine and step.costs[index].family != "view":
                shares[index] = min(1.0, sum(tensor.bytes for tensor in mine) / total) if total else 0.0
        if len(members) == before:
            return shares, members


def _touched(op: Op, members: set[int]) -> tuple[list[Tensor], float]:
    """The tensors of an op that belong to some storages, and the bytes of all; in lists, by their position."""
    values = [value for value in (*op.arguments.values(), op.outputs) if isinstance(value, tuple)]
    lists = [[item for item in value if isinstance(item, Tensor)] for value in values]
    longest = max((len(value) for value in lists), default=0)
    if longest <= 1:
        tensors = [*op.inputs, *op.outputs]
        mine = tensors if any(tensor.storage in members for tensor in tensors) else []
        return mine, sum(tensor.bytes for tensor in tensors)
    whole = [value for value in lists if len(value) == longest]
    places = {place for value in whole for place, tensor in enumerate(value) if tensor.storage in members}
    mine = [value[place] for value in whole for place in sorted(places)]
    return mine, sum(tensor.bytes for value in whole for tensor in value)


def _class_name(lookup: Op) -> str:
    return "Embedding" if lookup.packet == "aten.embedding" else "EmbeddingBag"


def _remedy(step: Step, lookup: Op, gradient: Tensor, states: int) -> str:
    seen = step.trace.optimizers
    rows, width = gradient.shape
    table = f"table = torch.nn.{_class_name(lookup)}({rows}, {width}, sparse=True)"
    if states < 2:
        return f"{table}  # torch.optim.{'Adagrad' if states else 'SGD'} takes sparse gradients as they are"
    optimizer = seen[0].name if len(seen) == 1 else "the_optimizer"
    return (
        f"{table}\noptimizers = [torch.optim.SparseAdam(table.parameters()), {optimizer}(the_others)]\n"
        "# Rows that a step does not use keep their moments, and there is no weight decay for the table."
    )
