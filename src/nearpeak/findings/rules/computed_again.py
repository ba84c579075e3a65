"""The same is computed again from the same values. The first result could be kept.

computed-twice: The same op runs on the same values more than once in the same pass: the first result could be reused.
computed-every-step: Every step computes the same again, from inputs that do not change: the result could be kept.
weight-copied: A weight is copied in every step into another layout or dtype before a GEMM.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from nearpeak.findings.engine import Waste, rule
from nearpeak.findings.row_values import row_functions
from nearpeak.findings.step import Step, is_source_line, shape_text
from nearpeak.findings.value_numbering import ValueNumbers, number_values, reusable
from nearpeak.ops.op import Op, name_without_origin
from nearpeak.ops.tensor import Tensor
from nearpeak.profiles.idle import CauseName, IdleCause
from nearpeak.units import quantity, seconds

_COPIES = ("aten.clone", "aten._to_copy", "aten.copy_")
_PRODUCTS = ("matrix", "convolution", "attention")
_SORTS = ("aten.sort", "aten.argsort")
_RANKS = ("aten.kthvalue", "aten.median", "aten.nanmedian")
"""Operators that find an element of each row by its rank."""
_WEIGHT_DIMENSIONS = 2
"""The least number of dimensions of a weight; a bias has fewer."""
_LEAST_TURNS = 1.5
"""How often each row is computed on average, at least: batches may share some rows by chance."""
_LEAST_ITEM_BYTES = 2
"""Bytes of an element. Weights of fewer bytes are quantized to save memory."""
_HOST_CAUSES: tuple[CauseName, ...] = ("host ops", "python", "synchronization")
"""Idle time that goes with the work at a line: of the host, and of the wait for a copy of its result."""


@rule("computed-twice", needs=["storages"], compiles=True)
def computed_twice(step: Step) -> Iterator[Waste]:
    """Forward ops whose name, arguments and inputs equal those of an earlier one, by the line that runs them again."""
    numbers = number_values(step)
    later = {
        index
        for index, first in enumerate(numbers.first)
        if first != index and _counts(step, first) and _counts(step, index)
    }
    later = reusable(numbers, later, first_stays=True)
    for piece in _pieces(step, numbers, later, alike=later | {numbers.first[index] for index in later}):
        launched = [index for index in piece.ops if step.time(index)]
        longest = max(launched or piece.ops, key=lambda index: _weight(step, index))
        backward = {other for index in piece.ops for other in _backward(step, index, numbers.first[index])}
        backward |= {
            other for view in _views_between(step, piece.ops, later) for other in step.derivatives.get(view, ())
        }
        backward_s, sums_s = step.seconds(backward), _sums_of_gradients(step, piece.ops) if backward else 0.0
        stays = min(1.0, sums_s / backward_s) if backward_s else 0.0
        op, first = step.ops[longest], step.ops[numbers.first[longest]]
        shapes = ", ".join("x".join(map(str, tensor.shape)) for tensor in op.inputs[:3])
        more = f" and {len(piece.ops) - 1} more with it" if len(piece.ops) > 1 else ""
        causes = _host_causes(step, piece.ops)
        levels = _work_of_levels(step, piece.ops, longest)
        yield Waste(
            title="The same is computed again from the same inputs.",
            op=longest,
            source=piece.line,
            gains={index: step.time(index) for index in launched}
            | {index: step.time(index) * (1 - stays) for index in sorted(backward) if step.time(index)}
            | levels,
            gone=(*piece.ops, *sorted(backward), *levels),
            idle=_sums(causes),
            causes=causes,
            evidence=f"{_operator(step, longest)} of {shapes or 'no tensors'} ran at {first.source or 'an earlier op'} "
            f"and again{f' at {op.source}' if op.source != first.source else ''}, with nothing written in between; the "
            f"later one{more} took {_took(step, launched, causes)}"
            + (f", and {seconds(backward_s)} in backward." if backward else ".")
            + (
                f" {len(levels)} other ops of these calls take an element of each row: {seconds(step.seconds(levels))}."
                if levels
                else ""
            ),
            reasoning="The later ops go away, and backward goes through the first one once"
            + (f", with the sum of the gradients, which takes {seconds(sums_s)}. " if sums_s else ". ")
            + "The first result is in memory for longer."
            if not levels
            else "One call sorts once, and takes the elements of all levels in the ops that take those of one now.",
            remedy=f"result = ...  # once, at {first.source or 'its first use'}, before a loop that needs it\n"
            f"# and `result` again at {piece.line or op.source or 'the second'}"
            if not levels
            else "torch.quantile(x, torch.tensor([...]), dim=...)  # all levels in one call, which sorts once",
        )
    yield from _ordered_again(step, numbers)
    yield from _rows_again(step, numbers, later | {numbers.first[index] for index in later})


def _rows_again(step: Step, numbers: ValueNumbers, alike: AbstractSet[int]) -> Iterator[Waste]:
    """Functions of rows that are computed for more rows than there are, by the line that computes nothing else."""
    groups = [group for group in row_functions(step, numbers) if group.rows >= _LEAST_TURNS * group.source_rows]
    group_of = {index: group for group in groups for index in group.ops}
    left = {index: group.source_rows / group.rows for index, group in group_of.items()}
    for piece in _pieces(step, numbers, left.keys(), alike=alike | left.keys()):
        longest = max(piece.ops, key=step.time)
        computed, count = group_of[longest].rows, group_of[longest].source_rows
        yield Waste(
            title="The same function of the same rows is computed again.",
            op=longest,
            source=piece.line,
            gains={index: step.time(index) * (1 - left[index]) for index in piece.ops},
            evidence=f"{len(piece.ops)} ops compute {computed:,} rows from {count:,} rows of the same tensor, with "
            f"weights that nothing writes in between: {seconds(step.seconds(piece.ops))}.",
            reasoning=f"Each row is computed {computed / count:.2g} times. All rows computed once leave "
            f"{count / computed:.0%} of it; batches pick their rows of the result.",
            remedy="result = model(rows)  # once, before the loop over batches\n... = result[indices]  # in each batch",
        )


def _work_of_levels(step: Step, again: Sequence[int], longest: int) -> dict[int, float]:
    """Where rows are sorted again for other quantiles of them: what the later calls do besides, with the seconds that a
    call for all levels saves of it."""
    if step.ops[longest].packet not in _SORTS or not _is_interpolated(step, longest):
        return {}
    stack, members = _stack(step, longest), set(again)
    calls: list[list[int]] = []
    for index in range(min(again), len(step.ops)):
        if _stack(step, index) != stack or step.ops[index].phase != "forward":
            continue
        if step.ops[index].packet == step.ops[longest].packet:
            calls.append([])
        if calls:
            calls[-1].append(index)
    gains = {}
    for index in (index for call in calls for index in call if index not in members and step.time(index)):
        count = len(calls) + 1
        reads, writes = (
            [dataclasses.replace(access, bytes=count * access.bytes) for access in accesses]
            for accesses in (step.costs[index].reads, step.costs[index].writes)
        )
        together_s = min(count * step.time(index), step.expected_for_work(reads, writes))
        gains[index] = step.time(index) - together_s / count
    return {index: gain for index, gain in gains.items() if gain > 0.0}


def _is_interpolated(step: Step, index: int) -> bool:
    """Whether sorted rows are searched for NaN, and single elements of them are gathered: so quantiles are computed."""
    return {"aten.isnan", "aten.gather"} <= {step.ops[reader].packet for reader in step.forward_readers(index)}


def _ordered_again(step: Step, numbers: ValueNumbers) -> Iterator[Waste]:
    """Rows that are sorted or searched again for other elements, which a sort or a larger `topk` of them has."""
    groups: dict[Hashable, list[int]] = {}
    for index in range(len(step.ops)):
        key = _rows_in_order(step, numbers, index)
        if key is not None and numbers.first[index] == index and _counts(step, index) and step.time(index):
            groups.setdefault(key, []).append(index)
    for members in groups.values():
        sorts = [index for index in members if step.ops[index].packet in _SORTS]
        if sorts:
            yield from _read_from(step, sorts[0], [index for index in members if index != sorts[0]])
            continue
        for largest in (True, False):
            tops = [
                index
                for index in members
                if step.ops[index].packet == "aten.topk" and step.ops[index].arguments.get("largest", True) is largest
            ]
            if len(tops) > 1:
                most = max(tops, key=lambda index: step.ops[index].arguments["k"])
                if step.ops[most].arguments.get("sorted", True):
                    yield from _read_from(step, most, [index for index in tops if index != most])
        ranks = [index for index in members if step.ops[index].packet in _RANKS]
        if len(ranks) > 1:
            yield from _sorted_for_ranks(step, ranks)


def _rows_in_order(step: Step, numbers: ValueNumbers, index: int) -> Hashable | None:
    """The rows that an op sorts, or of which it finds some by their order. A transposed view has the same ones.

    None for other ops, and for one whose results are written to afterwards.
    """
    op = step.ops[index]
    if op.packet not in (*_SORTS, *_RANKS, "aten.topk") or op.origin == "host":
        return None
    rows = op.tensor("self")
    if "dim" not in op.arguments or not rows.shape:
        return None
    if any(len(numbers.writers.get(tensor.storage, ())) != 1 for tensor in op.outputs):
        return None
    value = dict(numbers.reads[index])["self"][0]
    dim = op.arguments["dim"] % len(rows.shape)
    steps = list(zip(rows.shape, rows.strides, strict=True))
    others = sorted(step for place, step in enumerate(steps) if place != dim and step[0] > 1)
    return value, rows.dtype, rows.offset, steps[dim], tuple(others)


def _read_from(step: Step, stays: int, later: Sequence[int]) -> Iterator[Waste]:
    """Ops whose results are elements of what another op finds."""
    op = step.ops[stays]
    where = op.source or "another line"
    for index in later:
        other = step.ops[index]
        if op.packet == "aten.topk":
            few, many = other.arguments["k"], op.arguments["k"]
            remedy = f"values, indices = x.topk({many}, ...)  # once: its first {few} are those of x.topk({few}, ...)"
        else:
            remedy = (
                "ordered, order = x.sort(...)  # once: its first or last k are those of topk(k), and element k - 1 is "
                "that of kthvalue(k)"
            )
        yield Waste(
            title="The same rows are ordered again.",
            op=index,
            gains={index: step.time(index)},
            gone=(index,),
            evidence=f"{other.packet} of {shape_text(other.tensor('self').shape)} takes {seconds(step.time(index))}; "
            f"{op.packet} at {where} orders the same rows, with nothing written in between.",
            reasoning=f"What {other.packet} finds is a part of what {op.packet} has, and is read there. Of equal "
            "elements, it may have others.",
            remedy=remedy,
        )


def _sorted_for_ranks(step: Step, ranks: Sequence[int]) -> Iterator[Waste]:
    """Elements of several ranks, each of which is searched for: one sort has all."""
    first = step.ops[ranks[0]]
    rows = first.tensor("self")
    last = max(step.trace.storages, default=0)
    ordered = dataclasses.replace(rows, storage=last + 1, offset=0)
    places = dataclasses.replace(rows, storage=last + 2, offset=0, dtype="int64")
    arguments = {"self": rows, "dim": first.arguments["dim"], "descending": False}
    after = step.expected(Op(name="aten.sort.default", arguments=arguments, outputs=(ordered, places)))
    took = step.seconds(ranks)
    if after is None or after >= took:
        return
    longest = max(ranks, key=step.time)
    yield Waste(
        title=f"The same rows are searched {len(ranks)} times for elements of different ranks.",
        op=longest,
        gains={index: step.time(index) * (1 - after / took) for index in ranks},
        evidence=f"{step.ops[longest].packet} of {shape_text(rows.shape)} is called {len(ranks)} times on the same "
        f"values, in {seconds(took)}.",
        reasoning=f"One sort of these rows, which has the elements of all ranks, takes {seconds(after)}.",
        remedy="ordered = x.sort(dim).values  # once, before a loop over ranks: ordered.select(dim, k - 1) for each k",
    )


@rule("computed-every-step", needs=["storages"])
def computed_every_step(step: Step) -> Iterator[Waste]:
    """Forward ops that compute in this step what the next one computes too, by the line that runs them.

    Two steps in a row on the same data tell nothing about what depends on the data.
    """
    numbers = number_values(step)
    same = {
        index
        for index in numbers.next_step
        if _counts(step, index, casts=True) and (numbers.new_data or index not in numbers.on_data)
    }
    same = reusable(numbers, same, first_stays=False)
    for piece in _pieces(step, numbers, same, alike=same, by_callee=True):
        launched = [index for index in piece.ops if step.time(index)]
        if launched and all(_copies_weight(step, step.ops[index]) for index in launched):
            continue  # which has a rule of its own
        longest = max(piece.ops, key=lambda index: _weight(step, index))
        causes = _host_causes(step, piece.ops)
        on_data = any(index in numbers.on_data for index in piece.ops)
        is_carried = not numbers.carried.isdisjoint(piece.ops)
        what = f"{len(piece.ops)} ops" if len(piece.ops) > 1 else "One op"
        yield Waste(
            title="A step computes again what the one before it computed."
            if is_carried
            else "Every step computes the same again.",
            op=longest,
            source=piece.line,
            gains={index: step.time(index) for index in launched},
            gone=piece.ops,
            idle=_sums(causes),
            causes=causes,
            evidence=f"{what} at {piece.line or step.ops[longest].source or 'unknown lines'} had the same inputs "
            f"{'as others in the step before' if is_carried else 'in two steps in a row'}, and nothing wrote to them "
            f"in between: {_took(step, launched, causes)} in a step, "
            f"most in {_operator(step, longest)} at {step.ops[longest].source or 'an unknown line'}.",
            reasoning="These ops go away in all steps but the first, with the Python that calls them. The result stays "
            "in memory.",
            remedy="Keep the result of the step before: it has these values, from the same inputs."
            if is_carried
            else "Move this line before the loop, and keep its result until its inputs change."
            if on_data
            else "Compute it once and keep it: self.register_buffer(...) in the constructor of a module, "
            "@functools.cache on a function of plain numbers, or before the loop.",
        )


def _counts(step: Step, index: int, *, casts: bool = False) -> bool:
    """Whether the result of a forward op is used, and the op is not a cast on one device, which has a rule of its
    own."""
    op = step.ops[index]
    if op.phase != "forward" or op.recomputed:
        return False
    if op.origin == "host":
        return True
    if op.packet == "aten._to_copy" and not casts:
        on_host = step.trace.on_host
        if (op.inputs[0].storage in on_host) == (op.outputs[0].storage in on_host):
            return False
    return bool(step.flow.consumers[index]) or any(tensor.storage in step.flow.results for tensor in op.written)


def _operator(step: Step, index: int) -> str:
    op = step.ops[index]
    return name_without_origin(op.name) if op.origin == "host" else op.packet


def _took(step: Step, launched: Collection[int], causes: Sequence[IdleCause]) -> str:
    host_s = sum(cause.seconds for cause in causes)
    device = seconds(step.seconds(launched))
    return f"{device}, and {seconds(host_s)} of the host" if host_s else device


def _weight(step: Step, index: int) -> tuple[float, float]:
    """By which the main op of some is chosen: its time, or for ops on the host its bytes."""
    return step.time(index), sum(tensor.bytes for tensor in step.ops[index].outputs)


def _sums(causes: Sequence[IdleCause]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for cause in causes:
        sums[cause.cause] = sums.get(cause.cause, 0.0) + cause.seconds
    return sums


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """Ops that go together."""

    line: str
    """The line to change; "" if no stacks are known."""
    ops: Sequence[int]


_Call = tuple[str, ...]
"""Lines on the stack, the outermost first."""


def _pieces(
    step: Step,
    numbers: ValueNumbers,
    members: Collection[int],
    *,
    alike: Collection[int],
    by_callee: bool = False,
) -> Iterator[_Piece]:
    """The members by the outermost line all of whose work is repeated: the call of an encoder, not its layers.

    What a function computes from no data, such as a table, is at the lines of the function itself, where it can be
    kept. Lines of one function that feed each other are one piece.

    Args:
        step: The step.
        numbers: Its value numbers.
        members: The ops to be divided.
        alike: Ops that do not keep a line from being repeated as a whole.
        by_callee: A function that several lines call is one piece, at its own lines.
    """
    calls = _outermost_calls(step, numbers, members, alike)
    groups: dict[_Call, list[int]] = {}
    for index in sorted(members):
        groups.setdefault(calls[index], []).append(index)
    joined: dict[_Call, _Call] = {}

    def root(call: _Call) -> _Call:
        while joined.get(call, call) != call:
            call = joined[call]
        return call

    def join(one: _Call, other: _Call) -> None:
        if root(one) != root(other):
            joined[root(one)] = root(other)

    written_by: dict[int, int] = {}
    callers: dict[_Call, _Call] = {}
    functions = _called_functions(step, calls) if by_callee else {}
    for index in sorted(members):
        if callee := functions.get(index):
            join(calls[index], callers.setdefault(callee, calls[index]))
        for tensor in step.ops[index].inputs:
            before = written_by.get(tensor.storage)
            one, other = calls[index], calls[index] if before is None else calls[before]
            if one[:-1] == other[:-1]:
                join(one, other)
        for tensor in step.ops[index].written:
            written_by[tensor.storage] = index
    pieces: dict[_Call, list[int]] = {}
    for call, group in groups.items():
        pieces.setdefault(root(call), []).extend(group)
    for group in pieces.values():
        if all(step.costs[index].family == "creation" for index in group):
            continue  # a buffer that is filled anew
        yield _Piece(line=_line(step, numbers, group, calls, functions), ops=tuple(sorted(group)))


def _stack(step: Step, index: int) -> _Call:
    return step.stack(index) or ("",)


def _outermost_calls(
    step: Step, numbers: ValueNumbers, members: Collection[int], alike: Collection[int]
) -> Mapping[int, _Call]:
    """For each member the outermost line on its stack under which all ops are alike, or do no work."""
    mixed: set[_Call] = set()
    writing = frozenset(index for writers in numbers.writers.values() for index in writers)
    for index, op in enumerate(step.ops):
        if index in alike or index not in writing or op.phase != "forward":
            continue
        stack = _stack(step, index)
        mixed.update(stack[:depth] for depth in range(1, len(stack) + 1))
    calls = {}
    for index in members:
        stack = _stack(step, index)
        depth = next((depth for depth in range(1, len(stack)) if stack[:depth] not in mixed), len(stack))
        calls[index] = stack[:depth]
    return calls


def _called_functions(step: Step, calls: Mapping[int, _Call]) -> dict[int, _Call]:
    """For ops of a function that a line calls, and that is no other module, the lines on the stack from there."""
    functions = {}
    for index, call in calls.items():
        callee = _stack(step, index)[len(call) :]
        if callee and step.ops[index].module in step.modules_of_calls.get(call[:-1], ("",)):
            functions[index] = callee
    return functions


def _line(
    step: Step,
    numbers: ValueNumbers,
    group: Sequence[int],
    calls: Mapping[int, _Call],
    functions: Mapping[int, _Call],
) -> str:
    """The line of the group that takes longest; in the function that it calls, if that computes from no data, or if
    several lines call it."""
    callers: dict[_Call, set[_Call]] = {}
    for index in group:
        if callee := functions.get(index):
            callers.setdefault(callee, set()).add(calls[index])
    is_shared = any(len(lines) > 1 for lines in callers.values())
    inside = 1 if is_shared or not any(index in numbers.on_data for index in group) else 0
    totals: dict[str, list[float]] = {}
    for index in group:
        stack, call = _stack(step, index), calls[index]
        line = stack[min(len(stack), len(call) + inside) - 1]
        total = totals.setdefault(line, [0.0, 0.0])
        for place, amount in enumerate(_weight(step, index)):
            total[place] += amount
    for cause in _host_causes(step, group):
        if cause.where in totals:
            totals[cause.where][0] += cause.seconds
    return max(totals, key=lambda line: totals[line])


def _host_causes(step: Step, ops: Collection[int]) -> list[IdleCause]:
    """The idle time that goes with some ops: at lines where nothing else runs, or before an op that follows theirs."""
    members = set(ops)
    others = {
        op.place for index, op in enumerate(step.ops) if index not in members and step.costs[index].family != "view"
    }
    lines = {step.ops[index].place for index in members} - others
    lines = {line for line in lines if is_source_line(line)} | _places_after(step, members)
    return [
        cause
        for cause in step.profile.idle
        if cause.cause in _HOST_CAUSES and cause.where in lines and (cause.cause != "python" or not cause.what)
    ]


def _places_after(step: Step, members: AbstractSet[int]) -> set[str]:
    """The places of ops before which the host computed nothing but members, on tensors in its own memory.

    The profiler shows small ops on the host as one stretch before the next launch.
    """
    places: dict[str, bool] = {}
    python = step.trace.python or {}
    before: list[int] = []
    """Ops on the host since the last launch that stays."""
    for index, op in enumerate(step.ops):
        if op.origin == "host":
            before.append(index)
        elif index not in members and step.time(index):
            if before and index not in python:
                places[op.place] = places.get(op.place, True) and members >= set(before)
            before = []
    return {place for place, all_members in places.items() if all_members and is_source_line(place)}


def _backward(step: Step, index: int, first: int) -> Sequence[int]:
    """The backward ops of an op, if the first one has some too: what the trace saw, else those of its family, at its
    line, on what it read or wrote."""
    if step.trace.derivative_of:
        return step.derivatives.get(index, ()) if first in step.derivatives else ()
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


def _views_between(step: Step, again: Sequence[int], later: AbstractSet[int]) -> Iterator[int]:
    """The views of what only ops read that are computed again too: in backward, a view may be a copy or a sum."""
    for index in again:
        if index in step.derivatives and later >= set(step.forward_readers(index)):
            yield from step.views_of.get(index, ())


def _sums_of_gradients(step: Step, again: Collection[int]) -> float:
    """The time to add the gradients of results that other ops read, to those of the first results."""
    members, total_s = set(again), 0.0
    for index in again:
        if index in step.derivatives and not members.issuperset(step.forward_readers(index)):
            written = step.costs[index].writes
            total_s += step.expected_for_work((*written, *written), written) if written else 0.0
    return total_s


@rule("weight-copied", needs=["storages"])
def weight_copied(step: Step) -> Iterator[Waste]:
    """Copies of parameters that GEMMs read; a cast is needed if the parameter is trained."""
    trained = step.trains
    for index, op in enumerate(step.ops):
        if op.phase != "forward" or not _copies_weight(step, op):
            continue
        source, copy = _source_and_copy(op)
        cast = source.dtype != copy.dtype
        if trained and (cast or any(step.ops[reader].phase != "forward" for reader in step.flow.consumers[index])):
            continue
        products = [reader for reader in step.flow.consumers[index] if step.costs[reader].family in _PRODUCTS]
        if not products or len(products) != len(step.flow.consumers[index]) or copy.storage in step.flow.results:
            continue
        took = step.time(index)
        first = step.ops[products[0]]
        changes = f"from {source.dtype} to {copy.dtype}" if cast else "into another order"
        yield Waste(
            title=f"A weight is copied {changes} in every step, before a product with it.",
            op=index,
            gains={index: took},
            evidence=f"{op.packet} copies a parameter of {shape_text(source.shape)} {changes}: "
            f"{quantity(step.bytes([index]), 'B')} in {seconds(took)}; {first.packet} at "
            f"{first.source or 'a later op'} reads the copy.",
            reasoning="The copy goes away; the product reads as many bytes as before.",
            remedy=_weight_remedy(step, index, cast=cast),
        )


def _source_and_copy(op: Op) -> tuple[Tensor, Tensor]:
    copy = op.outputs[0]
    source = op.tensor("src") if op.packet == "aten.copy_" else op.tensor("self")
    return source, copy


def _copies_weight(step: Step, op: Op) -> bool:
    """Whether a whole weight is copied, within one memory."""
    if op.packet not in _COPIES:
        return False
    source, copy = _source_and_copy(op)
    storage = step.trace.storages[source.storage]
    if storage.kind != "parameter" or len(source.shape) < _WEIGHT_DIMENSIONS or source.storage == copy.storage:
        return False
    if not source.is_floating or source.item_bytes < _LEAST_ITEM_BYTES:
        return False
    if (source.storage in step.trace.on_host) != (copy.storage in step.trace.on_host):
        return False  # it is offloaded to the host
    return source.bytes >= storage.bytes and copy.elements == source.elements


def _weight_remedy(step: Step, index: int, *, cast: bool) -> str:
    source, copy = _source_and_copy(step.ops[index])
    name = step.trace.storages[source.storage].name or "weight"
    if cast:
        return f"model.to(torch.{copy.dtype})  # once, before predicting: {name} is then stored as it is used"
    if any(step.costs[reader].family == "convolution" for reader in step.flow.consumers[index]):
        return f"model.to(memory_format=torch.channels_last)  # once: {name} is then stored in the order that is used"
    return (
        f"Multiply with the view of {name} (.t(), .mT or .permute(...)) without .contiguous(): products read either "
        "order. Or store it once in the order that is used."
    )
