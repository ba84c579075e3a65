"""Rows that are repeated go through layers: each result is computed as often as its row is there."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from nearpeak.findings.engine import Waste, rule
from nearpeak.findings.step import Step, shape_text
from nearpeak.findings.what_if import dense_strides_like, seconds_by_size, share_left
from nearpeak.ops.cost import Access
from nearpeak.ops.op import Op
from nearpeak.ops.tensor import Tensor
from nearpeak.units import seconds

_LAYERS = ("matrix", "attention", "convolution", "recurrent")
"""Families of ops of which there is one among those that repeat their results; others may be fused with what repeats
the rows."""
_COPIES = ("aten.clone", "aten._to_copy", "aten.expand_copy")
_OF_OTHER_PLACES = ("aten.tril", "aten.triu", "aten.glu")
"""Of the family of pointwise ops; what they write depends on the place, or is of another place."""
_NORMS = ("aten.native_layer_norm", "aten._fused_rms_norm")
_BY_ROW = (
    *("aten.native_group_norm", "aten._native_batch_norm_legit_no_training", "aten._thnn_fused_lstm_cell"),
    *("aten._thnn_fused_gru_cell"),
)
"""Ops that compute each of the first sizes by itself, as convolutions and poolings do."""
_ALONG = """
    aten._softmax aten._log_softmax aten.cumsum aten.cumprod aten.sort aten.topk aten.argsort aten.argmax aten.argmin
    aten.sum aten.mean aten.amax aten.amin aten.max aten.min aten.logsumexp aten.flip aten.any aten.all aten.prod
""".split()
"""Ops that compute along some dimensions, for all others by itself."""


class _Digit(NamedTuple):
    """A dimension whose elements `i` and `i + step` are equal, `times` in a row: 4 rows, each 2 times, are
    a a b b c c d d with steps of 1, or a b c d a b c d with steps of 4."""

    times: int
    step: int
    """Elements of the dimension; in a storage, elements of the storage."""


class _Axis(NamedTuple):
    """Dimensions of results and arguments: the op computes each of their places from the same places."""

    made: Sequence[tuple[Tensor, int]]
    read: Sequence[tuple[Tensor, int]]


@dataclass(slots=True)
class _Known:
    """What is repeated in a storage, and the group of ops that it came through."""

    digits: frozenset[_Digit] | None
    """None if all elements are equal."""
    group: int


@dataclass(slots=True)
class _Group:
    """Ops that compute on the same repeated rows."""

    sources: dict[int, int] = field(default_factory=dict)
    """The ops that repeat the rows, and how often they do."""
    less: dict[int, Op] = field(default_factory=dict)
    """The others, as they would be on rows that are there once."""
    readers: dict[int, set[int]] = field(default_factory=dict)
    """The forward ops that read what sources wrote."""


@rule("repeated-rows", needs=["storages"])
def repeated_rows(step: Step) -> Iterator[Waste]:
    """Layers on rows that were repeated, as for the samples of one history, with what comes before and after them."""
    for group in _groups_of_long_run(step):
        if any(step.costs[index].family in _LAYERS for index in group.less):
            waste = _waste(step, group)
            if waste is not None:
                yield waste


def _waste(step: Step, group: _Group) -> Waste | None:
    left = {index: _share_left(step, step.ops[index], less) for index, less in group.less.items()}
    inside = {*group.sources, *left}
    gone = [index for index in group.sources if inside.issuperset(group.readers[index])]
    remaining = left | dict.fromkeys(gone, 0.0)
    remaining |= {other: share for index, share in remaining.items() for other in step.derivatives.get(index, ())}
    changes = {index: seconds_by_size(step, index) * (1.0 - share) for index, share in remaining.items()}
    repeat_s = sum(_repeat_seconds(step, index, less, inside) for index, less in group.less.items())
    remains = share_left([*changes.values(), -repeat_s])
    gains = {index: change * remains for index, change in changes.items() if change > 0.0}
    layers = [index for index in left if step.costs[index].family in _LAYERS and index in gains]
    if not layers:
        return None
    largest = max(layers, key=lambda index: gains[index])
    times = _times(step.ops[largest], group.less[largest])
    source = max(group.sources, key=lambda index: (group.sources[index] == times, step.time(index)))
    table = step.ops[source].outputs[0]
    return Waste(
        title=f"Rows that are repeated {times:,} times go through layers, each with the same result.",
        op=largest,
        source=step.line_of_all([*inside, *(i for i in gains if step.ops[i].phase == "backward")], largest),
        gains=gains,
        gone=gone if repeat_s == 0.0 else (),
        evidence=f"{step.ops[source].packet} at {step.ops[source].place} writes {shape_text(table.shape)}, in which "
        f"each element is {group.sources[source]:,} times. {len(left)} ops compute on such rows alone, and take "
        f"{seconds(step.seconds(left))}, {step.ops[largest].packet} {seconds(step.time(largest))} of it.",
        reasoning=f"On rows that are there once, they take {seconds(sum(left[i] * step.time(i) for i in left))}"
        + (f", and repeating what others read takes {seconds(repeat_s)}." if repeat_s else "."),
        remedy="y = layer(x).repeat_interleave(n, dim=0)  # in place of layer(x.repeat_interleave(n, dim=0)); of an "
        "LSTM,\n# the state is repeated too: tuple(part.repeat_interleave(n, dim=1) for part in state)",
    )


def _times(op: Op, less: Op) -> int:
    return max(
        before.elements // max(1, after.elements) for before, after in zip(op.outputs, less.outputs, strict=True)
    )


def _repeat_seconds(step: Step, index: int, less: Op, inside: Collection[int]) -> float:
    """What repeating the results of an op takes, for other ops that read them, and adding up their gradients."""
    op, total_s = step.ops[index], 0.0
    for tensor, small in zip(op.outputs, less.outputs, strict=True):
        read = [tensor.bytes] if tensor.storage in step.flow.results else []
        for reader in step.forward_readers(index):
            if reader not in inside:
                read += [item.bytes for item in step.ops[reader].inputs if item.storage == tensor.storage]
        if read and small.elements < tensor.elements:
            whole = min(tensor.bytes, max(read))
            part = whole * small.elements / tensor.elements
            accesses = [Access(storage=-1, bytes=part)], [Access(storage=tensor.storage, bytes=whole)]
            total_s += step.expected_for_work(*accesses, kind="movement") * (2 if step.derivatives.get(index) else 1)
    return total_s


def _share_left(step: Step, op: Op, less: Op) -> float:
    whole_s, less_s = step.expected(op), step.expected(less)
    return min(1.0, less_s / whole_s) if whole_s and less_s else 1.0 / _times(op, less)


def _groups_of_long_run(step: Step) -> Iterator[_Group]:
    """The groups with what a step computes of rows that the step before it repeated, at the place of the same ops."""
    following = step.trace.next_step
    if following is None:
        groups, both = _groups(step), step
    else:
        ops, storages = (*step.ops, *following.ops), {**step.trace.storages, **following.storages}
        trace = dataclasses.replace(step.trace, ops=ops, storages=storages, next_step=None)
        both = dataclasses.replace(step, trace=trace)
        groups = _groups(both)
    own = len(step.ops)

    def place(index: int) -> int | None:
        if index < own:
            return index
        here = index - own
        is_same = here < own and _form(step.ops[here]) == _form(both.ops[index])
        return here if is_same else None

    seen: set[int] = set()
    for group in groups:
        less = {
            here: _as_run(op, step.ops[here]) for index, op in group.less.items() if (here := place(index)) is not None
        }
        sources = {here: times for index, times in group.sources.items() if (here := place(index)) is not None}
        if seen.issuperset(less) or not sources:
            continue
        seen.update(less)
        readers = {
            index: {here for reader in both.forward_readers(index) if (here := place(reader)) is not None}
            for index in sources
        }
        yield _Group(sources=sources, less=less, readers=readers)


def _as_run(op: Op, like: Op) -> Op:
    """An op of the next step, with the arithmetic of the same op in this one, which the machine has."""
    return dataclasses.replace(op, tf32_products=like.tf32_products, tf32_convolutions=like.tf32_convolutions)


def _form(op: Op) -> tuple[str, tuple[tuple[int, ...], ...]]:
    return op.name, tuple(tensor.shape for tensor in (*op.inputs, *op.outputs))


def _groups(step: Step) -> list[_Group]:
    """The groups of forward ops whose results are repeated, because all that they read is."""
    known: dict[int, _Known] = {}
    groups: list[_Group] = []
    merged: dict[int, int] = {}

    def root(number: int) -> int:
        while number in merged:
            number = merged[number]
        return number

    for index, op in enumerate(step.ops):
        if step.costs[index].family == "view":
            continue
        axes = list(_axes(step, index)) if op.phase == "forward" and not op.recomputed else []
        filled = bool(op.outputs) and step.costs[index].family == "creation" and not op.mutated
        repeated = [(axis, digit) for axis in axes for digit in _shared_digits(axis, known)]
        of_copy = _copied_digits(op)
        repeated += [(_Axis([(op.outputs[0], dim)], []), digit) for dim, digit in of_copy]
        numbers = {
            root(known[t.storage].group) for t in op.inputs if t.storage in known and known[t.storage].group >= 0
        }
        for storage in step.touches[index].writes:
            known.pop(storage, None)
        if filled:
            known |= {tensor.storage: _Known(None, -1) for tensor in op.outputs}
        if not repeated:
            continue
        if not numbers:
            groups.append(_Group())
            numbers = {len(groups) - 1}
        number, *others = sorted(numbers)
        group = groups[number]
        for other in others:
            merged[other] = number
            group.sources |= groups[other].sources
            group.less |= groups[other].less
        if _is_source(op, axes, of_copy, known, numbers):
            group.sources[index] = max(digit.times for _, digit in repeated)
        else:
            group.less[index] = _on_rows_once(op, repeated)
        for axis, digit in repeated:
            for tensor, dim in axis.made:
                _note(step, known, tensor, dim, digit, number)
    return [group for number, group in enumerate(groups) if number not in merged and group.sources and group.less]


def _is_source(
    op: Op, axes: Sequence[_Axis], of_copy: object, known: Mapping[int, _Known], numbers: Collection[int]
) -> bool:
    """Whether an op repeats rows: it copies an expanded view, or one tensor several times."""
    if of_copy:
        return True
    return op.packet in _COPIES and any(
        not tensor.strides[dim] and tensor.shape[dim] > 1 for axis in axes for tensor, dim in axis.read
    )


def _note(step: Step, known: dict[int, _Known], tensor: Tensor, dim: int, digit: _Digit, group: int) -> None:
    storage = step.trace.storages.get(tensor.storage)
    if tensor.bytes < (storage.bytes if storage is not None else tensor.bytes):
        return
    before = known.get(tensor.storage)
    digits = before.digits if before is not None and before.digits is not None else frozenset()
    known[tensor.storage] = _Known(digits | {_Digit(digit.times, digit.step * tensor.strides[dim])}, group)


def _shared_digits(axis: _Axis, known: Mapping[int, _Known]) -> list[_Digit]:
    """In what all that an op reads along an axis is repeated: of several ways, that which repeats most."""
    sizes = {tensor.shape[dim] for tensor, dim in axis.made}
    if len(sizes) != 1 or not axis.read:
        return []
    (size,) = sizes
    found = {digit for tensor, dim in axis.read for digit in _digits_of(tensor, dim, known)}
    shared = [
        digit
        for digit in found
        if size % (digit.times * digit.step) == 0 and all(_is_repeated(t, d, digit, known) for t, d in axis.read)
    ]
    return [max(shared, key=lambda digit: digit.times)] if shared else []


def _digits_of(tensor: Tensor, dim: int, known: Mapping[int, _Known]) -> Iterator[_Digit]:
    size, stride = tensor.shape[dim], tensor.strides[dim]
    if size > 1 and not stride:
        yield _Digit(size, 1)
        return
    what = known.get(tensor.storage)
    for times, distance in (what.digits or ()) if what is not None else ():
        if distance % stride == 0 and size % (times * (distance // stride)) == 0:
            yield _Digit(times, distance // stride)


def _is_repeated(tensor: Tensor, dim: int, digit: _Digit, known: Mapping[int, _Known]) -> bool:
    if tensor.shape[dim] == 1 or not tensor.strides[dim]:
        return True
    what = known.get(tensor.storage)
    if what is None:
        return False
    distance = digit.step * tensor.strides[dim]
    return what.digits is None or any(
        distance % step == 0 and (times * step) % (digit.times * distance) == 0 for times, step in what.digits
    )


def _copied_digits(op: Op) -> list[tuple[int, _Digit]]:
    """Along which dimensions of its result an op puts one tensor several times."""
    if len(op.outputs) != 1 or op.mutated or not op.outputs[0].shape:
        return []
    made = op.outputs[0]
    if op.packet == "aten.repeat":
        source = op.tensor("self")
        shape = (1,) * (len(made.shape) - len(source.shape)) + source.shape
        return [
            (dim, _Digit(size // before, before))
            for dim, (size, before) in enumerate(zip(made.shape, shape, strict=True))
            if before and size > before
        ]
    if op.packet in ("aten.cat", "aten.stack"):
        parts, dim = op.tensors("tensors"), op.arguments.get("dim", 0)
        if len(parts) > 1 and isinstance(dim, int) and all(part == parts[0] for part in parts):
            dim %= len(made.shape)
            return [(dim, _Digit(len(parts), made.shape[dim] // len(parts)))]
    return []


def _on_rows_once(op: Op, repeated: Sequence[tuple[_Axis, _Digit]]) -> Op:
    """The op with each repeated dimension as long as its rows are without repetition."""
    sizes: dict[int, dict[int, int]] = {}
    for axis, digit in repeated:
        for tensor, dim in (*axis.made, *axis.read):
            if tensor.shape[dim] > 1:
                sizes.setdefault(id(tensor), {})[dim] = tensor.shape[dim] // digit.times

    def smaller(value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return tuple(map(smaller, value))
        if not isinstance(value, Tensor) or id(value) not in sizes:
            return value
        shape = tuple(sizes[id(value)].get(dim, size) for dim, size in enumerate(value.shape))
        return dataclasses.replace(value, shape=shape, strides=dense_strides_like(value, shape))

    arguments = {name: smaller(value) for name, value in op.arguments.items()}
    return dataclasses.replace(op, arguments=arguments, outputs=smaller(op.outputs))


def _axes(step: Step, index: int) -> Iterator[_Axis]:
    """The dimensions along which an op computes each place by itself; none of an op that is not known."""
    op, packet, family = step.ops[index], step.ops[index].packet, step.costs[index].family
    if not op.outputs or packet in _OF_OTHER_PLACES:
        return
    made = op.outputs[0]
    rank = len(made.shape)
    if packet in _COPIES or (family == "pointwise" and (not op.mutated or len(op.written) == 1)):
        yield from _broadcast_axes(op, op.written[0])
    elif packet in ("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm"):
        rows = op.tensor("mat1" if packet == "aten.addmm" else "batch1" if packet == "aten.baddbmm" else "self")
        other = op.tensor("batch2" if packet == "aten.baddbmm" else "mat2")
        added = op.tensors("self") if packet in ("aten.addmm", "aten.baddbmm") else ()
        for dim in range(rank - 1):
            factors = [rows, other] if dim < rank - 2 else [rows]
            sums = [(item, dim) for item in added if len(item.shape) == rank]
            yield _Axis([(made, dim)], [*((factor, dim) for factor in factors), *sums])
    elif packet in _NORMS:
        rows, whole = op.tensor("input"), len(op.arguments["normalized_shape"])
        for dim in range(len(rows.shape) - whole):
            yield _Axis([(out, dim) for out in op.outputs if len(out.shape) > dim], [(rows, dim)])
    elif packet in _ALONG:
        yield from _axes_along(op)
    elif family == "attention" and "query" in op.arguments:
        read = op.tensors("query", "key", "value", "attn_bias", "attn_mask")
        batch = op.tensor("query").shape[0]
        outputs = [(out, 0) for out in op.outputs[:2] if out.shape and out.shape[0] == batch]
        yield _Axis(outputs, [(tensor, 0) for tensor in read if len(tensor.shape) == len(made.shape)])
    elif packet in ("aten.cat", "aten.stack"):
        along = op.arguments.get("dim", 0) % rank
        for dim in (dim for dim in range(rank) if dim != along):
            of_part = dim - (packet == "aten.stack" and dim > along)
            yield _Axis([(made, dim)], [(part, of_part) for part in op.tensors("tensors") if len(part.shape) > of_part])
    elif packet == "aten.embedding":
        indices = op.tensor("indices")
        yield from (_Axis([(made, dim)], [(indices, dim)]) for dim in range(len(indices.shape)))
    elif packet == "aten.index_select" and op.tensor("index").shape:
        dim = op.arguments["dim"] % rank
        yield _Axis([(made, dim)], [(op.tensor("index"), 0)])
    elif family == "recurrent":
        yield from _axes_of_recurrence(op)
    elif packet in _BY_ROW or family in ("convolution", "pooling"):
        read = op.inputs[:1]
        if rank > 1 and read and len(read[0].shape) > 1 and read[0].shape[0] == made.shape[0]:
            yield _Axis([(made, 0)], [(read[0], 0)])


def _broadcast_axes(op: Op, made: Tensor) -> Iterator[_Axis]:
    rank = len(made.shape)
    for dim in range(rank):
        read = [(tensor, dim - rank + len(tensor.shape)) for tensor in op.inputs]
        yield _Axis([(made, dim)], [(tensor, place) for tensor, place in read if place >= 0])


def _axes_along(op: Op) -> Iterator[_Axis]:
    whole, made = op.inputs[0], op.outputs[0]
    rank, given = len(whole.shape), op.arguments.get("dim", op.arguments.get("dims"))
    along = {dim % rank for dim in (given if isinstance(given, (tuple, list)) else (given,)) if isinstance(dim, int)}
    kept = [dim for dim in range(rank) if dim not in along]
    if not along or len(made.shape) not in (rank, len(kept)):
        return
    for place, dim in enumerate(kept):
        yield _Axis([(out, dim if len(out.shape) == rank else place) for out in op.outputs], [(whole, dim)])


def _axes_of_recurrence(op: Op) -> Iterator[_Axis]:
    """The batch of a recurrent network: the first size of its input, or the second, and of each state the last but
    one."""
    if not isinstance(op.arguments.get("input"), Tensor) or op.arguments.get("batch_sizes"):
        return
    rows = op.tensor("input")
    first = op.packet != "aten.mkldnn_rnn_layer" and bool(op.arguments.get("batch_first"))
    batch = 0 if first else 1
    dropped = op.arguments.get("dropout") and op.arguments.get("train")
    if len(rows.shape) != 3 or dropped:
        return
    states = op.tensors("hx", "cx", "hx_", "cx_")
    made = [(op.outputs[0], batch)]
    made += [(out, len(out.shape) - 2) for out in op.outputs[1:3] if len(out.shape) > 1]
    yield _Axis(made, [(rows, batch), *((state, len(state.shape) - 2) for state in states)])
