"""A tensor is copied as it is, and neither the copy nor the original changes afterwards: the original would do."""

from __future__ import annotations

from collections.abc import Iterator

from nearpeak.findings.engine import Waste, rule
from nearpeak.findings.step import Step, is_unchanged_copy, shape_text
from nearpeak.ops.op import Op
from nearpeak.units import seconds

_COPIES = ("aten.clone", "aten._to_copy", "aten.lift_fresh_copy")


@rule("needless-copy", needs=["storages", "lines"])
def needless_copy(step: Step) -> Iterator[Waste]:
    """Copies in the layout and dtype of the original, of which nothing is written while the copy is read."""
    for index, op in enumerate(step.ops):
        if op.phase != "forward" or op.recomputed or op.packet not in _COPIES or not step.time(index):
            continue
        if not _is_exact(step, op) or not is_unchanged_copy(step, index):
            continue
        source = op.inputs[0]
        readers = step.flow.consumers[index]
        yield Waste(
            title="A tensor is copied, and neither the copy nor the original changes.",
            op=index,
            gains={index: step.time(index)},
            evidence=f"{op.packet} of {shape_text(source.shape)} {source.dtype} takes {seconds(step.time(index))}. "
            f"{len(readers)} ops read the copy, and no op writes to it, or to the original before they have read it.",
            reasoning="The same ops can read the original.",
            remedy="y = x  # in place of x.clone(), x.to(dtype, copy=True) or copy.deepcopy(x)\n"
            "y = x.detach()  # where only the graph was to end; it shares the memory",
        )


def _is_exact(step: Step, op: Op) -> bool:
    """Whether the copy has the dtype, the strides and the device of the original."""
    if len(op.inputs) != 1 or len(op.outputs) != 1:
        return False
    (source,), (copied,) = op.inputs, op.outputs
    same_memory = (source.storage in step.trace.on_host) == (copied.storage in step.trace.on_host)
    # without dimensions of size 1, whose strides do not matter
    strides = [
        [(size, stride) for size, stride in zip(tensor.shape, tensor.strides, strict=True) if size != 1]
        for tensor in (source, copied)
    ]
    return same_memory and source.dtype == copied.dtype and strides[0] == strides[1]
