"""More is computed than is used: of a result, later ops read a small part, and the rest could be left out before."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from nearpeak.findings.engine import Waste, rule, wastes_of
from nearpeak.findings.liveness import left_storages
from nearpeak.findings.step import Step, shape_text
from nearpeak.findings.what_if import seconds_by_size
from nearpeak.ops.op import Op
from nearpeak.ops.tensor import Tensor
from nearpeak.units import seconds

_MAX_USED = 0.5
"""The share of a result that is used. With more, leaving out the rest saves little."""
_INDEXED = {"aten.index_select": 0, "aten.embedding": 0}
"""Operators that pick rows by indices, and the argument that they pick from."""
_PER_IMAGE = ("upsample", "avg_pool", "max_pool", "adaptive", "grid_sampler", "reflection_pad", "replication_pad")
"""Parts of the names of operators that treat images, and their channels, one by one."""
_REDUCTIONS = (
    *("aten.sum", "aten.mean", "aten.amax", "aten.amin", "aten.argmax", "aten.argmin", "aten.max", "aten.min"),
    "aten.linalg_vector_norm",
)
_NORMS = {"aten.native_layer_norm": "input", "aten._fused_rms_norm": "input"}
_SOFTMAXES = ("aten._softmax", "aten._log_softmax")
_COPIES = ("aten._to_copy", "aten.clone")
_JOINS = ("aten.cat", "aten.stack")
_CREATIONS = ("creation", "random")
_DISTANCES = ("_cdist_forward", "_euclidean_dist")
"""Distances of all pairs of rows of `x1` and `x2`."""
_PRODUCTS = {
    "mm": (1, "self", "mat2"),
    "addmm": (1, "mat1", "mat2"),
    "bmm": (2, "self", "mat2"),
    "baddbmm": (2, "batch1", "batch2"),
}
"""The dimension of the columns of a product, and its factors."""

Sizes = tuple[int, ...]
"""How many elements of each dimension are used."""
Path = tuple[str, ...]
"""Lines of the user's own that led to an op, the outermost first."""
Dims = tuple[int, int]
"""Two dimensions of a tensor of all pairs, of which a diagonal is used."""


class _Used(NamedTuple):
    """The ops of whose first result a part is used."""

    sizes: Mapping[int, Sizes]
    """What is used of it. Of a diagonal, one column."""
    diagonals: Mapping[int, Dims]
    """Where it is a diagonal, its dimensions."""


@rule("partly-used", needs=["storages", "lines"])
def partly_used(step: Step) -> Iterator[Waste]:
    """Ops of a forward pass of whose results half or less is read, where the rest can be left out before them."""
    used, diagonals = _used_parts(step)
    if not used:
        return
    paths = [step.stack(index) for index in range(len(step.ops))]
    remaining: set[int] = set(used)
    products = {waste.op for waste in wastes_of(step, "logits-kept")}  # that rule knows more about them
    for last in sorted(used, reverse=True):
        if last not in remaining or not _is_cut(step, last, diagonals if last in diagonals else used):
            continue
        if last in diagonals:
            members = _ancestors(step, diagonals, last)
            remaining -= set(members)
            yield from _waste_of_pairs(step, paths, _Used(used, diagonals), members)
            continue
        members, line = _whole_units(step, paths, used, last, _ancestors(step, used.keys() - diagonals, last))
        remaining -= set(members)
        if products.isdisjoint(members):
            yield from _waste(step, paths, used, members, line)


def _waste(
    step: Step, paths: Sequence[Path], used: Mapping[int, Sizes], members: Sequence[int], line: str
) -> Iterator[Waste]:
    gains = {index: _gain(step, index, used[index]) for index in members}
    shares = {
        (paths[index], step.ops[index].module): _share(step.ops[index], used[index])
        for index in members
        if step.ops[index].phase == "forward"
    }
    for index, op in enumerate(step.ops):  # what the backward pass does for the rest goes too
        share = shares.get((paths[index], op.module))
        if op.phase == "backward" and share is not None and step.touches[index].writes:
            gains[index] = (1 - share) * seconds_by_size(step, index)
    gains = {index: gain for index, gain in gains.items() if gain > 0.0}
    if not gains:
        return
    largest = max(members, key=lambda index: gains.get(index, 0.0))
    op = step.ops[largest]
    whole, part = op.outputs[0].shape, used[largest]
    took = f"{len(gains)} ops that compute the rest too take" if len(gains) > 1 else "It takes"
    yield Waste(
        title=f"{_percent(_share(op, part))} of what is computed here is used.",
        op=largest,
        gains=gains,
        source=line,
        evidence=f"{op.packet} computes {shape_text(whole)}, and later ops read {shape_text(part)} of it. "
        f"{took} {seconds(step.seconds(gains))}.",
        reasoning=f"On the used part alone that would be {seconds(step.seconds(gains) - sum(gains.values()))}.",
        remedy=_remedy(op, whole, part),
    )


def _waste_of_pairs(step: Step, paths: Sequence[Path], used: _Used, members: Sequence[int]) -> Iterator[Waste]:
    """All pairs are computed for a diagonal: `members` are the ops on pairs, the last first."""
    last, first = members[0], members[-1]
    # Values and layouts that make some ops slow go with the pairs: all of their time counts.
    gains = {index: _saved_share(step, index, used.sizes[index]) * step.time(index) for index in members}
    reader = next(index for index in _readers_of_diagonal(step, last) if index not in used.diagonals)
    shares = {(paths[index], step.ops[index].module): _share(step.ops[index], used.sizes[index]) for index in members}
    shares.setdefault((paths[reader], step.ops[reader].module), _share(step.ops[last], used.sizes[last]))
    pairs = min(step.ops[index].outputs[0].elements for index in members)
    for index, op in enumerate(step.ops):  # what the backward pass does for the other pairs goes too
        share = shares.get((paths[index], op.module))
        if op.phase == "backward" and share is not None and _works_on(step, index, pairs):
            gains[index] = (1 - share) * step.time(index)
    gains = {index: gain for index, gain in gains.items() if gain > 0.0}
    if not gains:
        return
    largest = max(members, key=lambda index: gains.get(index, 0.0))
    op = step.ops[largest]
    rows = op.outputs[0].shape[used.diagonals[largest][0]]
    forward_s = step.seconds([index for index in gains if step.ops[index].phase == "forward"])
    backward_s = step.seconds(gains) - forward_s
    count = f"{len(members)} ops on all pairs take" if len(members) > 1 else "It takes"
    if _reads_pairs(step, first, used.diagonals):
        remedy = "x = x.diagonal()  # before this line: compute on the diagonal alone"
    elif any(step.ops[index].packet.rpartition(".")[2] in _PRODUCTS for index in members):
        remedy = "scores = (a * b).sum(-1)  # row i of a with row i of b: not (a @ b.T) and its diagonal"
    else:
        remedy = (
            "pairs = f(a, b)  # row i of a with row i of b, without the added dimension: "
            "not f(a[:, None], b[None]) and its diagonal"
        )
    yield Waste(
        title=f"All pairs of {rows:,} rows are computed, and the diagonal is used.",
        op=largest,
        gains=gains,
        source=_line_of_pairs(paths, first, reader) or step.ops[first].place,
        evidence=f"{op.packet} computes {shape_text(op.outputs[0].shape)}, and of these {rows:,} x {rows:,} pairs "
        f"later ops read the {rows:,} of a row with itself"
        + (f", at {step.ops[reader].source}" if step.ops[reader].source else "")
        + f". {count} {seconds(forward_s)}"
        + (f", and {seconds(backward_s)} in backward." if backward_s else "."),
        reasoning=f"Row by row that would be {seconds(step.seconds(gains) - sum(gains.values()))}.",
        remedy=remedy,
    )


def _reads_pairs(step: Step, index: int, diagonals: Mapping[int, Dims]) -> bool:
    """Whether an op on all pairs reads a tensor that has them already, rather than one with a row of each pair."""
    one, other = diagonals[index]
    sources = _dims_of_inputs(step, index, {one: 0, other: 1}) or ()
    return any(len(places) > 1 and all(source.strides[place] for place in places) for source, places in sources)


def _readers_of_diagonal(step: Step, index: int) -> Iterator[int]:
    """The forward ops that take a diagonal of a result: views, and ops that read it."""
    storage = step.ops[index].outputs[0].storage
    readers = set(step.flow.consumers[index])
    for reader, op in enumerate(step.ops):
        is_view = reader > index and op.packet == "aten.diagonal" and op.inputs[0].storage == storage
        if op.phase == "forward" and (reader in readers or is_view):
            yield reader


def _works_on(step: Step, index: int, elements: int) -> bool:
    """Whether an op writes something, and reads or writes a tensor of so many elements."""
    op = step.ops[index]
    return bool(step.touches[index].writes) and any(tensor.elements >= elements for tensor in (*op.inputs, *op.outputs))


def _line_of_pairs(paths: Sequence[Path], first: int, reader: int) -> str:
    """Where pairs are made, in the function that takes their diagonal."""
    depth = min(len(_common_prefix(paths[first], paths[reader])), len(paths[reader]) - 1, len(paths[first]) - 1)
    return paths[first][depth] if depth >= 0 else ""


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.01 else f"{100 * share:.2g} %"


def _remedy(op: Op, whole: Sizes, part: Sizes) -> str:
    if op.packet.rpartition(".")[2] == "randperm":
        return (
            f"torch.randint({whole[0]}, ({part[0]},))  # with repetitions, which are rare; without any: "
            f"random.sample(range({whole[0]}), {part[0]})"
        )
    return "x = x[part]  # before this line: take the part that is used first, and compute on that alone"


def _share(op: Op, used: Sizes) -> float:
    return math.prod(used) / max(1, op.outputs[0].elements)


def _gain(step: Step, index: int, used: Sizes) -> float:
    """What an op takes less if it computes the used part alone."""
    return _saved_share(step, index, used) * seconds_by_size(step, index)


def _saved_share(step: Step, index: int, used: Sizes) -> float:
    """The share of the time of an op that it saves if it computes the used part alone."""
    op = step.ops[index]
    share = _share(op, used)
    inputs = {id(tensor): part for tensor, part in _inputs_of_part(step, index, used)}
    smaller = dataclasses.replace(
        op,
        arguments={name: _with_parts(value, inputs) for name, value in op.arguments.items()},
        outputs=(_part_of(op.outputs[0], used), *op.outputs[1:]),
    )
    whole_s, part_s = step.expected(op), step.expected(smaller)
    if whole_s and part_s is not None and op.inputs:
        share = min(1.0, max(share, part_s / whole_s))
    return 1 - share


def _with_parts(value: Any, parts: Mapping[int, Sizes]) -> Any:
    if isinstance(value, Tensor):
        return _part_of(value, parts[id(value)]) if id(value) in parts else value
    if isinstance(value, tuple):
        return tuple(_with_parts(item, parts) for item in value)
    return value


def _part_of(tensor: Tensor, sizes: Sizes) -> Tensor:
    return dataclasses.replace(tensor, shape=sizes)


def _used_parts(step: Step) -> _Used:
    """The ops of whose first result a part is used, and that would do for that part what they do for all."""
    used: dict[int, Sizes] = {}
    diagonals: dict[int, Dims] = {}
    left = left_storages(step)
    for index in range(len(step.ops) - 1, -1, -1):
        op = step.ops[index]
        if op.phase != "forward" or op.recomputed or not op.outputs or not step.touches[index].writes:
            continue
        output = op.outputs[0]
        if not output.elements or any(_is_read_whole(step, index, tensor, left) for tensor in op.outputs):
            continue
        if any(
            tensor.storage in step.flow.read_by[reader]
            for tensor in op.outputs[1:]
            if tensor.storage != output.storage
            for reader in step.forward_readers(index)
        ):
            continue  # the places of maxima, say
        dims = _diagonal_used(step, index, diagonals)
        if dims is not None:
            if _is_diagonal_separable(step, index, dims):
                diagonals[index] = dims
                used[index] = tuple(1 if place == dims[1] else size for place, size in enumerate(output.shape))
            continue
        views = [
            view
            for reader in step.flow.consumers[index]
            if step.ops[reader].phase == "forward"
            for view in _views_read(step, reader, output, used, diagonals)
        ]
        sizes = _union(output, views)
        if sizes is not None and math.prod(sizes) <= _MAX_USED * output.elements and _is_separable(step, index, sizes):
            used[index] = sizes
    return _Used(used, diagonals)


def _is_read_whole(step: Step, index: int, tensor: Tensor, left: Collection[tuple[int, int]]) -> bool:
    """Whether what an op wrote may be read as a whole: after the step, by an optimizer, or by ops that are not seen."""
    readers = step.flow.consumers[index]
    forward = [reader for reader in readers if step.ops[reader].phase == "forward"]
    return (
        (tensor.storage in {*step.touches[index].writes} and step.trace.storages[tensor.storage].kind != "intermediate")
        or tensor.storage in step.flow.results
        or (index, tensor.storage) in left
        or (tensor is step.ops[index].outputs[0] and not forward)
        or any(step.ops[reader].phase == "optimizer" for reader in readers)
    )


def _views_read(
    step: Step, reader: int, whole: Tensor, used: Mapping[int, Sizes], diagonals: Mapping[int, Dims]
) -> Iterator[Tensor]:
    """What an op reads of a result, as views; for an op of which a part is used, what that part takes."""
    op, storage = step.ops[reader], whole.storage
    if step.costs[reader].family == "creation" and not op.mutated:  # ones_like reads a shape
        return
    if storage in step.touches[reader].writes and reader not in used:  # what it leaves is read later
        yield whole
        return
    if reader in used and reader not in diagonals:
        parts = {id(tensor): part for tensor, part in _inputs_of_part(step, reader, used[reader])}
        for tensor in op.inputs:
            if tensor.storage == storage:
                yield _part_of(tensor, parts[id(tensor)]) if id(tensor) in parts else tensor
        return
    picked = _picked(op)
    for tensor in op.inputs:
        if tensor.storage == storage:
            yield _part_of(tensor, picked[1]) if picked is not None and tensor is picked[0] else tensor


def _picked(op: Op) -> tuple[Tensor, Sizes] | None:
    """The tensor that an op picks rows of by their indices, and how many of each dimension at most."""
    if op.packet == "aten.index":
        table, indices = op.tensor("self"), op.arguments["indices"]
        places = [place for place, item in enumerate(indices) if isinstance(item, Tensor)]
        shapes = [item.shape for item in indices if isinstance(item, Tensor) and item.dtype != "bool"]
        if len(shapes) < len(places) or not places:
            return None
        rows = max(math.prod(shape) for shape in shapes)
    elif op.packet in _INDEXED:
        table = op.inputs[0]
        places = [int(op.arguments.get("dim", 0))]
        rows = op.inputs[1].elements
    else:
        return None
    if not table.elements:
        return None
    sizes = list(table.shape)
    places = [place for place in places if table.strides[place]]  # an expanded dimension has the same rows again
    for place in reversed(places):  # as many of the last dimension as there are, then of the one before
        sizes[place], rows = min(sizes[place], rows), max(1, math.ceil(rows / sizes[place]))
    return table, tuple(sizes)


def _union(whole: Tensor, views: Sequence[Tensor]) -> Sizes | None:
    """How much of each dimension some views take together; None if that cannot be told, or is all of it."""
    distinct = {(view.shape, view.strides, view.offset): view for view in views}
    parts = [_coverage(whole, view) for view in distinct.values()]
    known = [part for part in parts if part is not None]
    if not known or len(known) < len(parts):
        return None
    sizes = list(known[0])
    for part in known[1:]:
        different = [place for place, (one, other) in enumerate(zip(sizes, part, strict=True)) if one != other]
        partial = [place for place, size in enumerate(whole.shape) if min(sizes[place], part[place]) < size]
        if len(different or partial) > 1 or len(set(different) | set(partial)) > 1:
            return None
        for place in partial:
            sizes[place] = min(whole.shape[place], sizes[place] + part[place])
    return tuple(sizes) if sizes != list(whole.shape) else None


def _coverage(whole: Tensor, view: Tensor) -> Sizes | None:
    """How many elements of each dimension a view of a tensor takes; None if its layout does not tell.

    >>> whole = Tensor(shape=(8, 4), strides=(4, 1), dtype="float32", storage=0)
    >>> _coverage(whole, Tensor(shape=(2, 4), strides=(16, 1), dtype="float32", storage=0))
    (2, 4)
    >>> _coverage(whole, Tensor(shape=(32,), strides=(1,), dtype="float32", storage=0))
    (8, 4)
    """
    order = sorted(
        (place for place, size in enumerate(whole.shape) if size > 1), key=lambda place: whole.strides[place]
    )
    if any(whole.strides[place] == 0 for place in order) or view.dtype != whole.dtype or not view.elements:
        return None
    sizes = [1] * len(whole.shape)
    for size, stride in zip(view.shape, view.strides, strict=True):
        if size == 1 or stride == 0:
            continue
        inner = [place for place in order if stride % whole.strides[place] == 0]
        if not inner:
            return None
        place = inner[-1]
        step, left = stride // whole.strides[place], size
        for outer in order[order.index(place) :]:  # a dimension of the view may be several of the tensor
            here = min(left, max(1, whole.shape[outer] // step))
            sizes[outer] *= here
            left, step = -(-left // here), 1
            if left == 1:
                break
        if left > 1:
            return None
    return tuple(min(size, limit) for size, limit in zip(sizes, whole.shape, strict=True))


def _is_separable(step: Step, index: int, used: Sizes) -> bool:
    """Whether an op computes the used part of its result from a part of its inputs, or from nothing."""
    op = step.ops[index]
    if op.packet.rpartition(".")[2] == "randperm":
        return True
    if step.costs[index].family in _CREATIONS:
        return not op.mutated and (not op.inputs or step.costs[index].family == "creation")
    return _reduced_dims(step, index, used) is not None


def _reduced_dims(step: Step, index: int, used: Sizes) -> list[tuple[Tensor, dict[int, int]]] | None:
    """The inputs of an op with the sizes that remain of their dimensions; None if all of the inputs are needed."""
    whole = step.ops[index].outputs[0].shape
    return _dims_of_inputs(step, index, {place: size for place, size in enumerate(used) if size < whole[place]})


def _dims_of_inputs(step: Step, index: int, dims: dict[int, int]) -> list[tuple[Tensor, dict[int, int]]] | None:
    """The dimensions of inputs that are some dimensions of the result, with what is given of each of these; None if
    an op computes elements along them from others."""
    op = step.ops[index]
    whole = op.outputs[0].shape
    name = op.packet.rpartition(".")[2]
    if name in _PRODUCTS:
        rows, left, right = _PRODUCTS[name]
        return [
            (op.tensor(left), {place: size for place, size in dims.items() if place < rows}),
            (op.tensor(right), {place: size for place, size in dims.items() if place == rows or place < rows - 1}),
        ]
    if name in _DISTANCES:
        first, second = op.tensor("x1"), op.tensor("x2")
        last = len(whole) - 1
        rows_of_second = {place - (place == last): size for place, size in dims.items() if place != last - 1}
        return [(first, {place: size for place, size in dims.items() if place < last}), (second, rows_of_second)]
    if name == "convolution":
        return [(op.tensor("input"), dims)] if set(dims) <= {0} else None
    if op.packet in _NORMS:
        inner = len(op.arguments["normalized_shape"])
        return [(op.tensor(_NORMS[op.packet]), dims)] if max(dims) < len(whole) - inner else None
    if op.packet in _SOFTMAXES:
        return [(op.tensor("self"), dims)] if op.arguments["dim"] % len(whole) not in dims else None
    if any(part in name for part in _PER_IMAGE):
        return [(op.inputs[0], dims)] if set(dims) <= {0, 1} else None
    if op.packet in _REDUCTIONS:
        return _before_reduction(op, dims)
    if op.packet in _JOINS:
        return _before_join(op, dims)
    if step.costs[index].family == "pointwise" or op.packet in _COPIES:
        return _before_pointwise(op, dims)
    return None


def _before_reduction(op: Op, dims: dict[int, int]) -> list[tuple[Tensor, dict[int, int]]] | None:
    whole = op.tensor("self")
    given = op.arguments.get("dim")
    if given is None or not whole.shape:
        return None
    gone = {int(place) % len(whole.shape) for place in (given if isinstance(given, (tuple, list)) else (given,))}
    left = (
        list(range(len(whole.shape)))
        if op.arguments.get("keepdim")
        else [place for place in range(len(whole.shape)) if place not in gone]
    )
    return [(whole, {left[place]: size for place, size in dims.items()})]


def _before_join(op: Op, dims: dict[int, int]) -> list[tuple[Tensor, dict[int, int]]] | None:
    """For tensors that are joined along another dimension than those of which a part is used."""
    joined = int(op.arguments.get("dim", 0)) % len(op.outputs[0].shape)
    if joined in dims:
        return None
    is_new = op.packet == "aten.stack"
    before = {place - (is_new and place > joined): size for place, size in dims.items()}
    return [(tensor, before) for tensor in op.tensors("tensors") if tensor.elements]


def _before_pointwise(op: Op, dims: dict[int, int]) -> list[tuple[Tensor, dict[int, int]]] | None:
    """For an op on elements of the same places; a dimension that is expanded has no part to leave out."""
    whole = op.outputs[0].shape
    inputs = []
    for tensor in op.inputs:
        shift = len(whole) - len(tensor.shape)
        if shift < 0 or any(size not in (1, whole[place + shift]) for place, size in enumerate(tensor.shape)):
            return None
        inputs.append(
            (
                tensor,
                {
                    place - shift: size
                    for place, size in dims.items()
                    if place >= shift and tensor.shape[place - shift] == whole[place]
                },
            )
        )
    return inputs if any(parts for _, parts in inputs) else None


def _inputs_of_part(step: Step, index: int, used: Sizes) -> Iterator[tuple[Tensor, Sizes]]:
    """The inputs of which an op needs a part for the used part of its result, and the sizes of these."""
    op = step.ops[index]
    if step.costs[index].family in _CREATIONS or op.packet.rpartition(".")[2] == "randperm":
        return
    for tensor, parts in _reduced_dims(step, index, used) or ():
        if parts:
            yield tensor, tuple(parts.get(place, size) for place, size in enumerate(tensor.shape))


def _diagonal_used(step: Step, index: int, diagonals: Mapping[int, Dims]) -> Dims | None:
    """The two dimensions of a result of which later ops read the diagonal alone; None if they read something else."""
    op = step.ops[index]
    whole = op.outputs[0]
    if len(op.outputs) > 1 or len(whole.shape) < 2:
        return None
    found: set[Dims | None] = set()
    for reader in step.flow.consumers[index]:
        other = step.ops[reader]
        if other.phase != "forward" or (step.costs[reader].family == "creation" and not other.mutated):
            continue
        if whole.storage in step.touches[reader].writes and reader not in diagonals:
            return None  # what it leaves is read later
        for tensor in other.inputs:
            if tensor.storage == whole.storage:
                found.add(_diagonal_read(step, reader, tensor, whole, diagonals))
    return found.pop() if len(found) == 1 else None


def _diagonal_read(
    step: Step, reader: int, tensor: Tensor, whole: Tensor, diagonals: Mapping[int, Dims]
) -> Dims | None:
    """The dimensions of `whole` of which an op reads the diagonal in `tensor`, a view of it."""
    op = step.ops[reader]
    if reader in diagonals:
        one, other = diagonals[reader]
        for source, places in _dims_of_inputs(step, reader, {one: 0, other: 1}) or ():
            if source is tensor:
                return _dims_in(whole, tensor, sorted(places)) if len(places) == len(diagonals[reader]) else None
        return None
    count = len(tensor.shape)
    if op.packet == "aten.diagonal_copy":
        if op.arguments.get("offset"):
            return None
        return _dims_in(whole, tensor, [int(op.arguments[name]) % count for name in ("dim1", "dim2")])
    if op.packet == "aten.trace":
        return _dims_in(whole, tensor, [0, 1])
    if op.packet == "aten.index":
        indices = op.arguments["indices"]
        indexed = [place for place, item in enumerate(indices) if isinstance(item, Tensor)]
        is_diagonal = tensor is op.arguments["self"] and len(indexed) == 2 and _are_equal(step, reader, indexed)
        return _dims_in(whole, tensor, indexed) if is_diagonal else None
    return _diagonal_view(whole, tensor)


def _are_equal(step: Step, reader: int, places: Sequence[int]) -> bool:
    """Whether two lists of indices are the same, as a tensor or as a range."""
    one, other = (step.ops[reader].arguments["indices"][place] for place in places)
    if one.dtype == "bool" or (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    if (one.storage, one.offset, one.strides) == (other.storage, other.offset, other.strides):
        return True
    producers = step.flow.producers[reader]
    if one.storage not in producers or other.storage not in producers:
        return False
    made = [step.ops[producers[tensor.storage]] for tensor in (one, other)]
    return made[0].packet == "aten.arange" and made[0].name == made[1].name and made[0].arguments == made[1].arguments


def _dims_in(whole: Tensor, view: Tensor, places: Sequence[int]) -> Dims | None:
    """The dimensions of a tensor that two of a view are, if both have the same rows.

    >>> whole = Tensor(shape=(8, 8, 4), strides=(32, 4, 1), dtype="float32", storage=0)
    >>> _dims_in(whole, Tensor(shape=(8, 8), strides=(4, 32), dtype="float32", storage=0, offset=1), [0, 1])
    (0, 1)
    """
    if view.dtype != whole.dtype or len({view.shape[place] for place in places}) > 1:
        return None
    found = []
    for place in places:
        found += [
            dim
            for dim, (size, stride) in enumerate(zip(whole.shape, whole.strides, strict=True))
            if size == view.shape[place] > 1 and stride == view.strides[place] != 0
        ]
    return (min(found), max(found)) if len(found) == 2 and found[0] != found[1] else None


def _diagonal_view(whole: Tensor, view: Tensor) -> Dims | None:
    """The dimensions of a tensor of which a view has nothing but the diagonal.

    >>> whole = Tensor(shape=(8, 8, 4), strides=(32, 4, 1), dtype="float32", storage=0)
    >>> _diagonal_view(whole, Tensor(shape=(4, 8), strides=(1, 36), dtype="float32", storage=0))
    (0, 1)
    """
    if view.dtype != whole.dtype:
        return None
    steps = [(size, stride) for size, stride in zip(view.shape, view.strides, strict=True) if size > 1 and stride]
    start = _first_place(whole, view)
    for one, size in enumerate(whole.shape):
        for other in range(one + 1, len(whole.shape)):
            if size != whole.shape[other] or start[one] != start[other]:
                continue
            along = [step for step in steps if step[1] == whole.strides[one] + whole.strides[other]]
            outside = [place for place in range(len(whole.shape)) if place not in (one, other)]
            if (
                len(along) == 1
                and start[one] + along[0][0] <= size
                and all(_is_within(whole, outside, step) for step in steps if step not in along)
            ):
                return one, other
    return None


def _first_place(whole: Tensor, view: Tensor) -> list[int]:
    """Where the first element of a view is in a tensor, by its dimensions."""
    left = view.offset - whole.offset
    first = [0] * len(whole.shape)
    for place in sorted(range(len(whole.shape)), key=lambda place: -whole.strides[place]):
        if whole.strides[place] > 0:
            first[place], left = divmod(left, whole.strides[place])
    return first


def _is_within(whole: Tensor, places: Sequence[int], step: tuple[int, int]) -> bool:
    """Whether a dimension of a view stays within one of some dimensions of a tensor."""
    size, stride = step
    return any(
        stride % whole.strides[place] == 0 and (size - 1) * stride < whole.shape[place] * whole.strides[place]
        for place in places
        if whole.strides[place]
    )


def _is_diagonal_separable(step: Step, index: int, dims: Dims) -> bool:
    """Whether an op computes an element of the diagonal from one row of each input, or from nothing."""
    if step.costs[index].family in _CREATIONS:
        op = step.ops[index]
        return not op.mutated and (not op.inputs or step.costs[index].family == "creation")
    return _dims_of_inputs(step, index, {dims[0]: 0, dims[1]: 1}) is not None


def _is_cut(step: Step, index: int, used: Collection[int]) -> bool:
    """Whether an op reads a part of a result whose own result is used as a whole."""
    return any(reader not in used for reader in step.flow.consumers[index] if step.ops[reader].phase == "forward")


def _whole_units(
    step: Step, paths: Sequence[Path], used: Mapping[int, Sizes], last: int, before: Sequence[int]
) -> tuple[list[int], str]:
    """The ops before a cut that a user would run on a part, and the line to change.

    These are whole calls in the function that takes the part, from the last one backward: half of a call would mean to
    write another function. If the part is taken of what a call returns, and not all of the call serves it, its own last
    calls are looked at.
    """
    reader = next(
        reader for reader in step.flow.consumers[last] if reader not in used and step.ops[reader].phase == "forward"
    )
    depth = len(_common_prefix(paths[last], paths[reader]))
    depth = min(depth, max(0, len(paths[last]) - 1))
    while True:
        members = _units_at(step, paths, used, before, depth)
        if members or depth >= len(paths[last]):
            break
        depth += 1
    if not members:
        return [last], (paths[last] or (step.ops[last].place,))[-1]
    longest = max(members, key=step.time)
    return members, paths[longest][min(depth, len(paths[longest]) - 1)] if paths[longest] else step.ops[longest].place


def _ancestors(step: Step, used: Collection[int], last: int) -> list[int]:
    """An op and the partly used ones that it is computed from, the last first."""
    found, pending = {last}, [last]
    while pending:
        for producer in step.flow.producers[pending.pop()].values():
            if producer in used and producer not in found:
                found.add(producer)
                pending.append(producer)
    return sorted(found, reverse=True)


def _units_at(
    step: Step, paths: Sequence[Path], used: Mapping[int, Sizes], before: Sequence[int], depth: int
) -> list[int]:
    """The ops of the calls at one depth of the stack that are partly used as a whole, from the last one backward."""

    def unit(index: int) -> tuple[Path, str]:
        path = paths[index]
        return path[: depth + 1], step.ops[index].module if len(path) <= depth + 1 else ""

    wanted = {unit(index) for index in before}
    incomplete = {
        unit(index)
        for index, op in enumerate(step.ops[: before[0]])
        if op.phase == "forward"
        and step.touches[index].writes
        and index not in used
        and (op.inputs or step.costs[index].family != "creation")  # indices of the whole need not be made
        and unit(index) in wanted
    }
    members = []
    for index in before:
        if unit(index) in incomplete:
            break
        members.append(index)
    return members


def _common_prefix(first: Path, second: Path) -> Path:
    shared = []
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        shared.append(one)
    return tuple(shared)
