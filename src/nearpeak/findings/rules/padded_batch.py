"""Batches of sequences are padded to one length, and the step computes on the padding."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from nearpeak.bound.tiles import FACTORS
from nearpeak.findings.engine import Waste, rule
from nearpeak.findings.step import Step
from nearpeak.findings.what_if import dense_strides_like, seconds_by_size
from nearpeak.ops.op import Op, Padding
from nearpeak.ops.tensor import Tensor
from nearpeak.units import percent, seconds

_LEAST = 0.05
"""Of the length: padding that every row has is not worth a remedy below this."""
_LEAST_MIXED = 0.3
"""Of the batch: less padding up to the longest row is usual."""
_MOST_OF_IT = 0.6
"""The longest row is the length to pad to where that removes this share of what rows of similar lengths would."""
_BUCKETS = 8
"""Into so many batches of similar lengths sequences are sorted."""


_MULTIPLE = 8
"""Rows are padded to a multiple of this: products and attention run on whole tiles."""


@rule("padded-batch", needs=["storages"])
def padded_batch(step: Step) -> Iterator[Waste]:
    """Ops on sequences with padding, compared with the same ops on rows without it, or with less of it."""
    reached: set[int] = set()
    """What was computed from a batch that was seen has the same padding."""
    for storage, padding in step.trace.padding.items():
        lengths = _better_lengths(padding)
        if storage in reached or not lengths or storage not in step.touched_by:
            continue
        places = _Places(storage, padding.stride)
        gains = _gains(step, places, [length / padding.length for length in lengths])
        if gains and not any(_is_layer(step, index) for index in gains):
            continue  # labels, which lead to a loss and its gradients: what has no label may be read all the same
        reached.update(places.storages)
        if not gains:
            continue
        op, line = _enters(step, storage, padding)
        took = step.seconds(gains)
        left_s = took - sum(gains.values())
        rows = len(padding.lengths)
        by_length = len(lengths) > 1
        yield Waste(
            title=f"{percent(1 - padding.mean / padding.length, 0)} of a batch of sequences is padding.",
            op=op,
            source=line,
            gains=gains,
            evidence=f"{rows} rows of {padding.length} are padded: {padding.mean:.0f} of them are used on average, "
            f"{padding.longest} by the longest row. {len(gains)} ops on padded rows took {seconds(took)}.",
            reasoning=(
                f"In batches of similar lengths ({min(lengths)} to {max(lengths)}), these ops take {seconds(left_s)} "
                "on average. "
                if by_length
                else f"With rows of {lengths[0]}, for the longest of this batch, these ops take {seconds(left_s)}. "
                "Batches of similar lengths would save more. "
            )
            + "Seen in one batch: others may differ.",
            remedy=_BY_LENGTH if by_length else _TO_THE_LONGEST,
        )


_TO_THE_LONGEST = (
    "pad_sequence(sequences, batch_first=True)  # to the longest of the batch, in the loader's collate_fn\n"
    "# transformers: tokenizer(texts, padding='longest'), not 'max_length'\n"
    "# More still: a batch_sampler that draws sequences of similar lengths."
)
_BY_LENGTH = (
    "sequences.sort(key=len)  # before they are cut into batches, each padded to its own longest; or a batch_sampler\n"
    "# that draws sequences of similar lengths. Or none is padded: all in one row, with the borders of each for\n"
    "# attention (nested tensors, flex_attention, pack_padded_sequence for an RNN)."
)


def _better_lengths(padding: Padding) -> list[int]:
    """The lengths of rows that batches should have; none where this one is as it should be."""
    rounded = [min(padding.length, max(1, -(-length // _MULTIPLE)) * _MULTIPLE) for length in padding.lengths]
    to_longest = 1 - rounded[-1] / padding.length
    size = max(2, -(-len(rounded) // _BUCKETS))
    buckets = [max(rounded[at : at + size]) for at in range(0, len(rounded), size)]
    by_length = 1 - sum(buckets) / len(buckets) / padding.length
    if to_longest >= max(_LEAST, _MOST_OF_IT * by_length):
        return [rounded[-1]]
    if 1 - padding.mean / padding.length >= _LEAST_MIXED:
        return buckets
    return [rounded[-1]] if to_longest >= _LEAST else []


def _enters(step: Step, storage: int, padding: Padding) -> tuple[int, str]:
    """The op that made the rows as long as they are, and its line; "" for that of the op.

    A batch that a worker of a data loader made was padded in the function for that, if there is one. Another one from
    before the step enters it where it is copied, where a part of all data is taken, or where the model is called.
    """
    reader = next(
        i for i in step.touched_by[storage] if any(tensor.storage == storage for tensor in step.ops[i].inputs)
    )
    index, came_from = reader, storage
    while (made := _made_by(step, came_from, index)) is not None and step.ops[made].source:
        index = made
        wide = [tensor for tensor in step.ops[made].inputs if _holds(tensor, padding)]
        if not wide:
            break
        came_from = wide[0].storage
    is_copy = any(name in step.ops[index].name for name in ("_to_copy", "_pin_memory"))
    if (index == reader or is_copy) and (line := step.line_that_writes("collate_fn")):
        return index, line
    if made is None and (taken := _taken_from_data(step, came_from, padding, index)) is not None:
        return taken, ""
    return index, step.calling_line(reader) if index == reader else ""


def _taken_from_data(step: Step, storage: int, padding: Padding, reader: int) -> int | None:
    """The view outside of models that takes the batch from more data, and could take less of it."""
    for index in range(reader):
        op = step.ops[index]
        if op.packet in _PARTS and not op.module and op.inputs[0].storage == storage:
            part = op.outputs[0]
            if part.elements < op.inputs[0].elements and _holds(part, padding):
                return index
    return None


_PARTS = ("aten.slice", "aten.select", "aten.narrow", "aten.split", "aten.chunk", "aten.unbind")


def _made_by(step: Step, storage: int, before: int) -> int | None:
    """The op that made a storage, on the host too, which has no data flow; None for one from before the step."""
    for index in range(before - 1, -1, -1):
        op = step.ops[index]
        is_written = any(tensor.storage == storage for tensor in op.outputs)
        if is_written and all(tensor.storage != storage for tensor in op.inputs):
            return None if "set_" in op.name else index  # memory that another process has filled
    return None


def _holds(tensor: Tensor, padding: Padding) -> bool:
    """Whether a tensor may hold these rows, with this padding or another."""
    return len(padding.lengths) in tensor.shape and any(size >= padding.longest for size in tensor.shape[1:])


class _Places:
    """Which dimensions of tensors run along the sequences, by the strides of places in their storages.

    A stride tells that for every view of a storage: of (rows, length, width) with strides (length * width, width, 1),
    places are `width` apart, whether dimensions are split, flattened or transposed.
    """

    def __init__(self, storage: int, stride: int) -> None:
        self._strides = {storage: {stride}}

    @property
    def storages(self) -> Collection[int]:
        """Those that hold sequences."""
        return self._strides.keys()

    def dims(self, tensor: Tensor) -> dict[int, int]:
        """The dimensions that run along the sequences, with the step of one place in them: 1 if it is the innermost."""
        return {
            dim: place // stride
            for place in self._strides.get(tensor.storage, ())
            for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.strides, strict=True))
            if size > 1 and 0 < stride <= place < stride * size
        }

    def add(self, tensor: Tensor, dim: int, step: int) -> None:
        """A dimension of a tensor runs along the sequences."""
        if tensor.strides[dim]:
            self._strides.setdefault(tensor.storage, set()).add(tensor.strides[dim] * step)

    def follow(self, op: Op, family: str) -> None:
        """Finds the dimensions of what an op writes from those of what it reads."""
        for number, written in enumerate(op.written):
            for source, dims in self._sources(op, family, number):
                for dim, place in self._result_dims(op, family, source, dims, written).items():
                    self.add(written, dim, place)

    def _sources(self, op: Op, family: str, number: int) -> list[tuple[Tensor, dict[int, int]]]:
        """The tensors that a result is like."""
        if family == "attention":  # its output is as long as the queries, and each gradient as what it belongs to
            names = ("query", "key", "value")
            likes = op.tensors(names[min(number, 2)] if "backward" in op.name else "query")
        elif family == "convolution":
            likes = op.tensors("input", "self") if number == 0 else ()
        elif "embedding" in op.packet:
            likes = op.tensors("indices") if "backward" not in op.packet else ()
        else:
            likes = op.inputs
        return [(tensor, dims) for tensor in likes if (dims := self.dims(tensor))]

    def _result_dims(
        self, op: Op, family: str, source: Tensor, dims: dict[int, int], written: Tensor
    ) -> dict[int, int]:
        if op.packet in FACTORS:
            return _product_dims(op, source, dims, written)
        ranks = len(source.shape), len(written.shape)
        if ranks[0] == ranks[1]:
            changed = [dim for dim, (a, b) in enumerate(zip(source.shape, written.shape, strict=True)) if a != b]
            if family == "convolution":
                changed = [dim for dim in changed if dim > 1] if len(changed) < 2 else []
            # Where one dimension alone is another one, it was cut, padded or concatenated.
            kept = {dim: place for dim, place in dims.items() if dim not in changed}
            if family == "convolution" or len(changed) == 1:
                kept |= {dim: place for dim, place in dims.items() if written.shape[dim] > 1}
            if kept:
                return kept
        if family == "reduction" and isinstance(op.arguments.get("dim"), (tuple, list, int)):
            gone = op.arguments["dim"]
            gone = {dim % ranks[0] for dim in ((gone,) if isinstance(gone, int) else gone)}
            left = [dim for dim in range(ranks[0]) if dim not in gone]
            if len(left) == ranks[1]:
                return {left.index(dim): place for dim, place in dims.items() if dim in left}
        more = ranks[1] - ranks[0]
        if family == "pointwise" and more > 0:
            return {dim + more: place for dim, place in dims.items() if written.shape[dim + more] == source.shape[dim]}
        if written.shape[: ranks[0]] == source.shape or source.shape[: ranks[1]] == written.shape:
            return {dim: place for dim, place in dims.items() if dim < ranks[1]}
        others = {size for dim, size in enumerate(source.shape) if dim not in dims}
        sizes = {source.shape[dim]: place for dim, place in dims.items() if source.shape[dim] not in others}
        return {dim: sizes[size] for dim, size in enumerate(written.shape) if size in sizes}


def _product_dims(op: Op, source: Tensor, dims: dict[int, int], written: Tensor) -> dict[int, int]:
    """Rows of a product are those of its left factor, columns those of its right one."""
    left, right = (op.arguments.get(name) for name in FACTORS[op.packet])
    last, rank = len(written.shape) - 1, len(source.shape)
    if op.packet == "aten.linear":
        return {dim: place for dim, place in dims.items() if source is left and dim < rank - 1}
    result: dict[int, int] = {}
    for dim, place in dims.items():
        if (source is left and dim < rank - 1) or (source is right and dim < rank - 2):
            result[dim] = place
        elif source is right and dim == rank - 1:
            result[last] = place
    return {dim: place for dim, place in result.items() if dim <= last}


def _gains(step: Step, places: _Places, shares: Sequence[float]) -> dict[int, float]:
    """What ops save on average if these shares of the rows are left: as good kernels do."""
    gains: dict[int, float] = {}
    known: dict[Any, float] = {}
    for index, op in enumerate(step.ops):
        if op.phase == "optimizer":
            continue
        family = step.costs[index].family
        if family != "view" and not any(_is_parameter(step, tensor) for tensor in op.written):
            places.follow(op, family)
        took = step.time(index)
        dims = {id(tensor): tuple(places.dims(tensor)) for tensor in (*op.inputs, *op.written)}
        if not took or not any(dims.values()):
            continue
        key = (op.name, tuple((t.shape, t.strides, t.dtype, dims[id(t)]) for t in (*op.inputs, *op.written)))
        if key not in known:
            whole = step.expected(op)
            shorter = [step.expected(_shortened(op, family, dims, share)) for share in shares]
            known[key] = 1 - sum(map(float, filter(None, shorter))) / len(shares) / whole if whole else 0.0
        if known[key] > 0.0:
            gains[index] = seconds_by_size(step, index) * known[key]
    return gains


_LAYERS = ("matrix", "attention", "convolution", "recurrent")


def _is_layer(step: Step, index: int) -> bool:
    """Whether an op of a forward pass is one of a layer that the sequences go through."""
    op = step.ops[index]
    return op.phase == "forward" and (step.costs[index].family in _LAYERS or "embedding" in op.packet)


def _is_parameter(step: Step, tensor: Tensor) -> bool:
    storage = step.trace.storages.get(tensor.storage)
    return storage is not None and storage.kind == "parameter"


def _shortened(op: Op, family: str, dims: Mapping[int, tuple[int, ...]], share: float) -> Op:
    """The op on rows of which a share is left."""
    along: set[tuple[int, int]] = set()
    """Dimensions of results that run along the sequences, counted from the last, with their sizes."""
    if family == "pointwise":
        along = {
            (len(tensor.shape) - dim, tensor.shape[dim]) for tensor in op.outputs for dim in dims.get(id(tensor), ())
        }

    def shorter(value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return tuple(shorter(item) for item in value)
        if not isinstance(value, Tensor):
            return value
        rank = len(value.shape)
        own = {*dims.get(id(value), ()), *(dim for dim in range(rank) if (rank - dim, value.shape[dim]) in along)}
        if not own:
            return value
        shape = tuple(max(1, round(size * share)) if dim in own else size for dim, size in enumerate(value.shape))
        return dataclasses.replace(value, shape=shape, strides=dense_strides_like(value, shape), offset=0)

    return dataclasses.replace(
        op,
        arguments={name: shorter(value) for name, value in op.arguments.items()},
        outputs=tuple(shorter(tensor) for tensor in op.outputs),
    )
