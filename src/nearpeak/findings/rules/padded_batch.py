"""Batches of sequences are padded to one length, and the step computes on the padding."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from nearpeak.findings.engine import Waste, rule
from nearpeak.findings.step import Step
from nearpeak.ops.op import Op, Padding
from nearpeak.ops.tensor import Tensor
from nearpeak.units import percent, seconds

_LEAST = 0.05
"""Of the length: padding below this is not worth a remedy."""


@rule("padded-batch", needs=["storages"])
def padded_batch(step: Step) -> Iterator[Waste]:
    """Ops on sequences with padding that every row of the batch has, compared with the same ops without it."""
    for storage, padding in step.trace.padding.items():
        reader = next((index for index, op in enumerate(step.ops) if _begins(step, index, op, storage)), None)
        if reader is None or padding.length - padding.longest < _LEAST * padding.length:
            continue  # as long as its longest row, as each batch may be
        first = next(index for index, op in enumerate(step.ops) if _reads(op, storage))
        gains = _gains(step, first, padding, padding.longest)
        if not gains:
            continue
        took = step.seconds(gains)
        yield Waste(
            title=f"{percent(1 - padding.mean / padding.length, 0)} of a batch of sequences is padding.",
            op=_enters(step, reader, storage),
            gains=gains,
            evidence=f"{padding.rows} rows of {padding.length} are padded: {padding.mean:.0f} of them are used on "
            f"average, {padding.longest} by the longest row. {len(gains)} ops on padded rows took {seconds(took)}.",
            reasoning=f"With rows of {padding.longest}, the longest of this batch, these ops take "
            f"{seconds(took - sum(gains.values()))}. Seen in one batch: others may differ. Batches of similar lengths "
            "would save more.",
            remedy="pad_sequence(sequences, batch_first=True)  # to the longest of the batch, in the loader's "
            "collate_fn\n"
            "# transformers: tokenizer(texts, padding='longest'), not 'max_length'\n"
            "# More still: a batch_sampler that draws sequences of similar lengths.",
        )


def _reads(op: Op, storage: int) -> bool:
    return any(tensor.storage == storage for tensor in op.inputs) and bool(op.outputs)


def _begins(step: Step, index: int, op: Op, storage: int) -> bool:
    """Whether an op looks up ids, or runs a recurrent network on frames."""
    return _reads(op, storage) and (op.packet == "aten.embedding" or step.costs[index].family == "recurrent")


def _enters(step: Step, reader: int, storage: int) -> int:
    """The op with which a batch enters the step: the first of those that made it, or the one that reads it."""
    index, made = reader, step.flow.producers[reader].get(storage)
    while made is not None and made < index and step.ops[made].source:
        index = made
        made = min(step.flow.producers[index].values(), default=None)
    return index


def _gains(step: Step, first: int, padding: Padding, length: int) -> dict[int, float]:
    """What ops on the sequences save with shorter rows: their share of the expected time."""
    lengths: dict[int, int] = {}
    """The length of the rows in each storage: convolutions and poolings change it."""
    gains: dict[int, float] = {}
    for tensor in step.ops[first].inputs:
        if _scaled_dims(tensor, padding.rows, padding.length):
            lengths[tensor.storage] = padding.length
    for index in range(first, len(step.ops)):
        op = step.ops[index]
        known = [lengths[tensor.storage] for tensor in op.inputs if tensor.storage in lengths]
        if not known:
            continue
        now = max(known)
        for tensor in op.written:
            if _scaled_dims(tensor, padding.rows, now):
                lengths[tensor.storage] = now
            elif step.costs[index].family in ("convolution", "pooling"):
                lengths[tensor.storage] = tensor.shape[-1]
        took = step.time(index)
        if not took:
            continue
        whole = step.expected(op)
        shorter = step.expected(_shortened(op, padding.rows, now, length / padding.length))
        if whole and shorter is not None and shorter < whole:
            gains[index] = took * (1 - shorter / whole)
    return gains


def _scaled_dims(tensor: Tensor, rows: int, length: int) -> tuple[int, ...]:
    """The dimensions of a tensor that grow with the length of the sequences.

    Tensors are (rows, length, ...), (length, rows, ...), (rows, heads, length, ...), (rows * heads, length, ...),
    (rows * length, ...) or that transposed, and (rows, channels, length).
    """
    shape = tensor.shape
    if len(shape) >= 2 and shape[:2] in ((rows, length), (length, rows)):
        return (shape[:2].index(length) if rows != length else 1,)
    if len(shape) == 4 and shape[0] == rows and shape[2] == length:
        return (2, 3) if shape[3] == length else (2,)
    if len(shape) == 4 and shape[0] == rows and shape[3] == length:
        return (3,)
    if len(shape) == 3 and shape[0] % rows == 0 and length in shape[1:]:
        return tuple(place for place in (1, 2) if shape[place] == length)
    flat = tuple(place for place, size in enumerate(shape[:2]) if size == rows * length)
    return flat[:1]


def _shortened(op: Op, rows: int, length: int, share: float) -> Op:
    """The op on rows of which a share is left."""
    attention = "query" in op.arguments

    def shorter(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(shorter(item) for item in value)
        if not isinstance(value, Tensor):
            return value
        dims = _scaled_dims(value, rows, length)
        if attention and len(value.shape) == 4 and 2 in dims:
            dims = (2,)  # the last is the width of a head
        shape = tuple(max(1, round(size * share)) if place in dims else size for place, size in enumerate(value.shape))
        if not dims:
            return value
        strides = _strides_like(value, shape)
        return dataclasses.replace(value, shape=shape, strides=strides, offset=0)

    return dataclasses.replace(
        op,
        arguments={name: shorter(value) for name, value in op.arguments.items()},
        outputs=tuple(shorter(tensor) for tensor in op.outputs),
    )


def _strides_like(tensor: Tensor, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Dense strides for a shape, in the order of a tensor's dimensions; expanded ones stay expanded."""
    strides, size = [0] * len(shape), 1
    for place in sorted(range(len(shape)), key=lambda place: (tensor.strides[place], -place)):
        if tensor.strides[place]:
            strides[place] = size
            size *= shape[place]
    return tuple(strides)
