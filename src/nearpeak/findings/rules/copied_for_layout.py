"""A tensor is made contiguous for a GEMM or attention that reads strided tensors equally fast."""

from __future__ import annotations

from collections.abc import Iterator

from nearpeak.findings.engine import Waste, rule
from nearpeak.findings.step import Step, is_unchanged_copy
from nearpeak.ops.op import Op
from nearpeak.ops.tensor import Tensor
from nearpeak.units import quantity, seconds

_PRODUCTS = ("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm")
_ATTENTION = ("aten._scaled_dot_product_flash", "aten._scaled_dot_product_cudnn", "aten._scaled_dot_product_efficient")
_ALIGNED = 8
"""Elements. Kernels for GPUs need rows that begin at multiples of this."""


@rule("copied-for-layout", needs=["storages"])
def copied_for_layout(step: Step) -> Iterator[Waste]:
    """Copies into contiguous memory that are read only by ops that could read the original."""
    for index, op in enumerate(step.ops):
        if not _copies(step, index):
            continue
        source, copy = op.inputs[0], op.outputs[0]
        readers = step.flow.consumers[index]
        if not is_unchanged_copy(step, index):
            continue
        if not all(_reads_strides(step.ops[reader], source, copy) for reader in readers):
            continue
        took = step.time(index)
        first = step.ops[readers[0]]
        yield Waste(
            title="A tensor is made contiguous for an op that would read it as it is.",
            op=index,
            gains={index: took},
            evidence=f"{op.packet} copies {'x'.join(map(str, source.shape))} with strides "
            f"{tuple(source.strides)}: {quantity(step.bytes([index]), 'B')} in {seconds(took)}. Only "
            f"{', '.join(dict.fromkeys(step.ops[reader].packet for reader in readers))} "
            f"at {first.source or 'a later op'} read it.",
            reasoning="The copy goes away. The ops after it read the same number of bytes, in whole rows as before.",
            remedy="Leave `.contiguous()` or `.clone()` out, and pass the view.",
        )


def _copies(step: Step, index: int) -> bool:
    """Whether a forward op only copies an activation into another layout."""
    op = step.ops[index]
    if op.packet != "aten.clone" or op.phase != "forward" or op.recomputed:
        return False
    source, copy = op.inputs[0], op.outputs[0]
    known = step.trace.storages[source.storage]
    expanded = any(stride == 0 and size > 1 for size, stride in zip(source.shape, source.strides, strict=True))
    return known.kind != "parameter" and not expanded and source.strides != copy.strides and source.shape == copy.shape


def _reads_strides(op: Op, source: Tensor, copy: Tensor) -> bool:
    """Whether an op accepts the source in place of the copy, and is as fast with it."""
    operands = [tensor for tensor in op.inputs if tensor.storage == copy.storage]
    if op.packet.startswith(_ATTENTION):
        operands_of_attention = [op.arguments.get(name) for name in ("query", "key", "value")]
        aligned = all(stride % _ALIGNED == 0 for stride in (*source.strides[:-1], source.offset))
        return (
            source.strides[-1] == 1
            and aligned
            and all(tensor in operands_of_attention and tensor == copy for tensor in operands)
        )
    if op.packet not in _PRODUCTS or len(source.shape) not in (2, 3):
        return False
    turned = (*source.shape[:-2], source.shape[-1], source.shape[-2])
    rows, columns = source.shape[-2:]
    down, across = source.strides[-2:]
    dense = (across == 1 and down >= columns) or (down == 1 and across >= rows)
    return dense and all(tensor.shape in (source.shape, turned) for tensor in operands)
