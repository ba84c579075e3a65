"""Elements are picked from a tensor that is repeated first: the repeated copy, or its gradient, is as large as that."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from nearpeak.findings.engine import Waste, rule
from nearpeak.findings.step import Step, shape_text
from nearpeak.ops.op import Op
from nearpeak.ops.tensor import Tensor
from nearpeak.units import seconds

_PICKS = ("aten.gather", "aten.index", "aten.index_select", "aten.take_along_dim")
_COPIES = ("aten.repeat", "aten.clone", "aten._to_copy", "aten.expand_copy", "aten.repeat_interleave")
_CREATIONS = ("aten.new_zeros", "aten.zeros", "aten.zeros_like", "aten.new_full")
_SUMS = ("aten.sum",)


class _Repeated(NamedTuple):
    """A tensor that ops pick elements from."""

    table: Tensor
    times: int
    """How often each element is in it."""
    copy: int | None
    """The op that wrote it; None for a view."""


@rule("gathered-from-expanded", needs=["storages"])
def gathered_from_expanded(step: Step) -> Iterator[Waste]:
    """Gathers from an expanded view or a repeated copy, with the ops of their backward pass that are as large."""
    for index, op in enumerate(step.ops):
        repeated = _repeated(step, index) if op.packet in _PICKS and op.phase == "forward" else None
        if repeated is None:
            continue
        table, times, copy = repeated
        in_backward = _backward(step, index, table)
        removed = [*([copy] if copy is not None else ()), *(i for i in in_backward if step.ops[i].packet in _SUMS)]
        smaller = [i for i in in_backward if i not in removed]
        gains = {i: step.time(i) for i in removed} | {i: step.time(i) * (1 - 1 / times) for i in smaller}
        took = step.seconds(gains)
        if not took:
            continue
        parts = [
            f"{step.ops[i].packet} takes {seconds(step.time(i))}" for i in sorted(gains, key=step.time, reverse=True)
        ]
        yield Waste(
            title=f"Elements are picked from a tensor that is repeated {times:,} times.",
            op=index,
            gains=gains,
            gone=removed,
            evidence=f"{op.packet} reads {shape_text(table.shape)}, in which each element is {times:,} times. "
            f"{'The copy and its gradient are' if copy is not None and in_backward else _ITS[copy is not None]} as "
            f"large: {', '.join(parts[:3])}.",
            reasoning="The elements can be picked from the tensor before it is repeated, by indices along its own "
            f"dimensions: what is written for the repeated one goes, or is {times:,} times smaller.",
            remedy="rows = x.flatten(0, 1).index_select(0, (index + offset).flatten())  # x: (batch, n, channels)\n"
            "# offset: torch.arange(batch)[:, None, None] * n; or x[batch_index, index], without x.expand(...)",
        )


_ITS = {True: "The copy is", False: "Its gradient is"}


def _repeated(step: Step, index: int) -> _Repeated | None:
    """What an op picks from, if each element is there more than once."""
    table = step.ops[index].inputs[0]
    if (times := _expansion(table)) > 1:
        return _Repeated(table, times, None)
    producer = step.flow.producers[index].get(table.storage)
    if producer is None or step.ops[producer].packet not in _COPIES or len(step.forward_readers(producer)) > 1:
        return None
    if table.storage in step.flow.results:
        return None
    times = _copied_times(step.ops[producer])
    return _Repeated(table, times, producer) if times > 1 else None


def _expansion(tensor: Tensor) -> int:
    times = 1
    for size, stride in zip(tensor.shape, tensor.strides, strict=True):
        times *= size if not stride and size > 1 else 1
    return times


def _copied_times(op: Op) -> int:
    """How often a copy has each element of what it copies."""
    if not op.inputs or not op.outputs or not op.inputs[0].elements:
        return 1
    source, copy = op.inputs[0], op.outputs[0]
    return copy.elements * _expansion(source) // source.elements


def _backward(step: Step, pick: int, table: Tensor) -> list[int]:
    """The ops of the backward pass that write a gradient of the repeated tensor, or add up its repetitions."""
    forward = step.ops[pick]
    found: list[int] = []
    scattered: set[int] = set()
    for index, op in enumerate(step.ops):
        if op.phase != "backward" or not op.outputs:
            continue
        at_line = op.source == forward.source and op.module == forward.module
        elements = op.outputs[0].elements
        if at_line and op.packet in _CREATIONS and elements == table.elements:
            found.append(index)
            scattered.update(step.flow.written_by[index])
        elif scattered.intersection(step.flow.read_by[index]):
            if elements == table.elements and step.costs[index].family == "indexing":
                scattered.update(step.flow.written_by[index])  # it adds to the zeros, where they are
            elif op.packet in _SUMS and op.inputs[0].elements == table.elements:
                found.append(index)
    return found
