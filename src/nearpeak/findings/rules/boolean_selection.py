"""A boolean mask selects most elements: they are counted, copied into a shorter tensor, and scattered in backward."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from nearpeak.findings.engine import Waste, rule
from nearpeak.findings.step import Step, shape_text
from nearpeak.ops.op import Op
from nearpeak.ops.tensor import Tensor
from nearpeak.units import seconds

_MOST = 0.5
"""The least share of elements that is selected: what follows is done for all of them afterwards."""
_SCATTERS = ("aten.index_put", "aten.index_put_", "aten._index_put_impl_", "aten.masked_scatter")


@rule("boolean-selection", needs=["storages"])
def boolean_selection(step: Step) -> Iterator[Waste]:
    """`x[mask]` of most elements, with the gradient's `index_put`, where masking in place of selecting would do."""
    for index, op in enumerate(step.ops):
        mask = _mask(op) if op.phase == "forward" and op.packet in ("aten.index", "aten.masked_select") else None
        if mask is None or not op.outputs:
            continue
        table, selected = op.tensor("self"), op.outputs[0]
        share = selected.elements / max(1, table.elements)
        if share < _MOST or table.dtype == "bool":
            continue
        members = [index, *_backward(step, index, mask, table)]
        gains = {}
        for member in members:
            left = step.expected(_masked(step.ops[member], table, mask))
            gains[member] = max(0.0, step.time(member) - (step.time(member) if left is None else left))
        took = step.seconds(gains)
        if sum(gains.values()) <= 0.0:
            continue
        backward = f", and {seconds(step.seconds(members[1:]))} in backward" if members[1:] else ""
        yield Waste(
            title=f"A boolean mask selects {share:.0%} of the elements.",
            op=index,
            gains=gains,
            evidence=f"{op.packet} of {shape_text(table.shape)} {table.dtype} by a mask of {shape_text(mask.shape)} "
            f"takes {seconds(step.time(index))}{backward}. The places of the mask are listed in each of them; in "
            "backward they may be sorted, too.",
            reasoning="What does not count is set to a value without effect, and the shape stays: one pass over the "
            f"elements, forward and backward, takes {seconds(took - sum(gains.values()))}. Nothing is counted, so "
            "that the host does not wait.",
            remedy='x.masked_fill(~mask, float("-inf"))  # before a softmax or a maximum, in place of x[mask]\n'
            "(x * mask).sum() / mask.sum()  # in place of x[mask].mean()",
        )


def _mask(op: Op) -> Tensor | None:
    """The mask, if it alone selects."""
    if op.packet == "aten.masked_select":
        mask = op.arguments.get("mask")
    else:
        given = op.arguments.get("indices")
        indices = [each for each in given if each is not None] if isinstance(given, list | tuple) else []
        mask = indices[0] if len(indices) == 1 else None
    return mask if isinstance(mask, Tensor) and mask.dtype == "bool" else None


def _backward(step: Step, index: int, mask: Tensor, table: Tensor) -> Iterator[int]:
    """The ops that write the gradient of the tensor that was selected from."""
    for later in range(index + 1, len(step.ops)):
        op = step.ops[later]
        if op.phase != "backward" or op.packet not in _SCATTERS or op.tensor("self").shape != table.shape:
            continue
        used = _mask(op) if op.packet != "aten.masked_scatter" else op.tensor("mask")
        if used is not None and (used.storage, used.shape) == (mask.storage, mask.shape):
            yield later


def _masked(op: Op, table: Tensor, mask: Tensor) -> Op:
    """The op as one pass that leaves the shape as it is."""
    arguments = {"self": table, "mask": mask, "value": 0.0}
    return dataclasses.replace(op, name="aten.masked_fill.Scalar", arguments=arguments, outputs=(table,), mutated=())
