"""`nan_to_num` reads and writes a whole tensor where less would do: new memory, or rows that are masked completely."""

from __future__ import annotations

from collections.abc import Iterator

from nearpeak.findings.engine import Waste, rule
from nearpeak.findings.step import Step, shape_text
from nearpeak.ops.tensor import Tensor
from nearpeak.units import quantity, seconds

FILL_SHARE = 0.63
"""Of the time of a pass that reads and writes: on an H200, a fill reaches 3.37 TB/s and a copy 4.25 TB/s."""


@rule("nan-to-num-for-fill", needs=["storages"])
def nan_to_num_for_fill(step: Step) -> Iterator[Waste]:
    """Calls whose input is uninitialized memory, or a softmax of masked scores."""
    for index, op in enumerate(step.ops):
        if op.packet not in ("aten.nan_to_num", "aten.nan_to_num_") or op.phase != "forward":
            continue
        source, took = op.inputs[0], step.time(index)
        writes = step.flow.producers[index].get(source.storage)
        if writes is None and step.trace.storages[source.storage].kind == "intermediate":
            fill = FILL_SHARE * took
            yield Waste(
                title="`nan_to_num` runs on uninitialized memory: a fill would do.",
                op=index,
                gains={index: took - fill},
                evidence=f"{op.packet} reads and writes {_size(source)} in {seconds(took)}, right after it was "
                "allocated.",
                reasoning=f"A fill only writes, half the bytes at four fifths of the speed: {seconds(fill)}.",
                remedy=f"torch.zeros({source.shape}, dtype=torch.{source.dtype}, device=...)  # or buffer.zero_()",
            )
        elif writes is not None and _masked_softmax(step, writes):
            rows = Tensor(shape=source.shape[:-1], strides=(0,) * (len(source.shape) - 1), dtype="bool", storage=0)
            yield Waste(
                title="`nan_to_num` goes through a whole softmax for the rows that are masked completely.",
                op=index,
                gains={index: took},
                evidence=f"{op.packet} reads and writes {_size(source)} in {seconds(took)}; only a softmax over masked "
                f"scores wrote it, so that only rows without any key can be NaN, out of {rows.elements}.",
                reasoning="The pass goes away; a mask that leaves one key in each such row costs nothing more, as its "
                "result is not used.",
                remedy="mask[..., 0] |= ~mask.any(-1)  # once, where the mask is made: an empty row then sees one key\n"
                "# and zero the few rows of the result afterwards, where they are read at all",
            )


def _masked_softmax(step: Step, index: int) -> bool:
    if step.ops[index].packet != "aten._softmax":
        return False
    before = set(step.flow.producers[index].values())
    return any(
        step.ops[producer].packet in ("aten.masked_fill", "aten.masked_fill_", "aten.where") for producer in before
    )


def _size(tensor: Tensor) -> str:
    return f"{shape_text(tensor.shape)} of {tensor.dtype}, {quantity(tensor.bytes, 'B')},"
