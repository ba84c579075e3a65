"""More is computed than is used: of a result, later ops read a small part, and the rest could be left out before."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

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
_REDUCTIONS = ("aten.sum", "aten.mean", "aten.amax", "aten.amin", "aten.argmax", "aten.argmin", "aten.max", "aten.min")
_NORMS = {"aten.native_layer_norm": "input", "aten._fused_rms_norm": "input"}
_SOFTMAXES = ("aten._softmax", "aten._log_softmax")
_COPIES = ("aten._to_copy", "aten.clone")
_JOINS = ("aten.cat", "aten.stack")
_CREATIONS = ("creation", "random")

Sizes = tuple[int, ...]
"""How many elements of each dimension are used."""
Path = tuple[str, ...]
"""Lines of the user's own that led to an op, the outermost first."""


@rule("partly-used", needs=["storages", "lines"])
def partly_used(step: Step) -> Iterator[Waste]:
    """Ops of a forward pass of whose results half or less is read, where the rest can be left out before them."""
    used = _used_parts(step)
    if not used:
        return
    paths = [step.stack(index) for index in range(len(step.ops))]
    remaining: set[int] = set(used)
    products = {waste.op for waste in wastes_of(step, "logits-kept")}  # that rule knows more about them
    for last in sorted(used, reverse=True):
        if last not in remaining or not _is_cut(step, last, used):
            continue
        members, line = _whole_units(step, paths, used, last)
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
    return (1 - share) * seconds_by_size(step, index)


def _with_parts(value: Any, parts: Mapping[int, Sizes]) -> Any:
    if isinstance(value, Tensor):
        return _part_of(value, parts[id(value)]) if id(value) in parts else value
    if isinstance(value, tuple):
        return tuple(_with_parts(item, parts) for item in value)
    return value


def _part_of(tensor: Tensor, sizes: Sizes) -> Tensor:
    return dataclasses.replace(tensor, shape=sizes)


def _used_parts(step: Step) -> dict[int, Sizes]:
    """The ops of whose first result a part is used, and that would do for that part what they do for all."""
    used: dict[int, Sizes] = {}
    left = left_storages(step)
    for index in range(len(step.ops) - 1, -1, -1):
        op = step.ops[index]
        if op.phase != "forward" or op.recomputed or not op.outputs or not step.touches[index].writes:
            continue
        output = op.outputs[0]
        if not output.elements or any(_is_read_whole(step, index, tensor, left) for tensor in op.outputs):
            continue
        views = [
            view
            for reader in step.flow.consumers[index]
            if step.ops[reader].phase == "forward"
            for view in _views_read(step, reader, output.storage, used)
        ]
        sizes = _union(output, views)
        if sizes is not None and math.prod(sizes) <= _MAX_USED * output.elements and _is_separable(step, index, sizes):
            used[index] = sizes
    return used


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


def _views_read(step: Step, reader: int, storage: int, used: Mapping[int, Sizes]) -> Iterator[Tensor]:
    """What an op reads of a storage, as views; for an op of which a part is used, what that part takes."""
    op = step.ops[reader]
    if step.costs[reader].family == "creation" and not op.mutated:  # ones_like reads a shape
        return
    if reader in used:
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
        if len(order) == 2 and stride == whole.strides[order[0]] + whole.strides[order[1]]:  # a diagonal
            sizes[order[1]] *= size
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
    op = step.ops[index]
    whole = op.outputs[0].shape
    dims = {place: size for place, size in enumerate(used) if size < whole[place]}
    name = op.packet.rpartition(".")[2]
    family_rows = {"mm": (1, "self"), "addmm": (1, "mat1"), "bmm": (2, "self"), "baddbmm": (2, "batch1")}
    if name in family_rows:
        rows, left = family_rows[name]
        inputs = [(op.tensor(left), {place: size for place, size in dims.items() if place < rows})]
        right = op.tensor({"mm": "mat2", "addmm": "mat2", "bmm": "mat2", "baddbmm": "batch2"}[name])
        return [*inputs, (right, {place: size for place, size in dims.items() if place == rows or place < rows - 1})]
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


def _is_cut(step: Step, index: int, used: Mapping[int, Sizes]) -> bool:
    """Whether an op reads a part of a result whose own result is used as a whole."""
    return any(reader not in used for reader in step.flow.consumers[index] if step.ops[reader].phase == "forward")


def _whole_units(step: Step, paths: Sequence[Path], used: Mapping[int, Sizes], last: int) -> tuple[list[int], str]:
    """The ops before a cut that a user would run on a part, and the line to change.

    These are whole calls in the function that takes the part, from the last one backward: half of a call would mean to
    write another function. If the part is taken of what a call returns, and not all of the call serves it, its own last
    calls are looked at.
    """
    reader = next(
        reader for reader in step.flow.consumers[last] if reader not in used and step.ops[reader].phase == "forward"
    )
    before = _ancestors(step, used, last)
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


def _ancestors(step: Step, used: Mapping[int, Sizes], last: int) -> list[int]:
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
