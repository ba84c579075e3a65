"""Keys and values are copied for each head of a group before attention, which could read one copy for all."""

from __future__ import annotations

from collections.abc import Iterator

from nearpeak.findings.engine import Waste, rule
from nearpeak.findings.step import Step, shape_text
from nearpeak.ops.op import Op
from nearpeak.ops.tensor import Tensor
from nearpeak.units import quantity, seconds


@rule("repeated-heads", needs=["storages"])
def repeated_heads(step: Step) -> Iterator[Waste]:
    """Copies of expanded tensors that only attention reads, as keys or values."""
    for index, op in enumerate(step.ops):
        times = _repeats(op)
        if times <= 1 or op.phase != "forward" or not step.time(index):
            continue
        readers = step.forward_readers(index)
        if not readers or not all(_is_key_or_value(step, reader, op.outputs[0]) for reader in readers):
            continue
        took = step.time(index)
        shape = op.outputs[0].shape
        yield Waste(
            title=f"Keys and values are copied {times} times, once for each query head of a group.",
            op=index,
            gains={index: took},
            evidence=f"{op.packet} writes {quantity(op.outputs[0].bytes, 'B')} of {shape_text(shape)} from "
            f"{quantity(op.outputs[0].bytes / times, 'B')} in {seconds(took)}; only attention reads them.",
            reasoning="The copy goes away: attention's kernels read the heads that a group shares. That they read "
            "fewer bytes is not counted.",
            remedy="scaled_dot_product_attention(query, key, value, enable_gqa=True)  # key, value as they were\n"
            "# transformers: attn_implementation='flash_attention_2', which does not repeat heads",
        )


def _repeats(op: Op) -> int:
    """How often an op copies each element of a tensor of heads."""
    if not op.outputs or len(op.outputs[0].shape) < 4 or not op.inputs:
        return 1
    source = op.inputs[0]
    if op.packet in ("aten.clone", "aten.copy_", "aten._to_copy", "aten._unsafe_view"):
        return max(
            [size for size, stride in zip(source.shape, source.strides, strict=True) if not stride and size > 1],
            default=1,
        )
    if op.packet in ("aten.repeat", "aten.index_select", "aten.repeat_interleave") and source.elements:
        return op.outputs[0].elements // source.elements
    return 1


def _is_key_or_value(step: Step, index: int, copy: Tensor) -> bool:
    op = step.ops[index]
    if step.costs[index].family != "attention":
        return False
    operands = [op.arguments.get(name) for name in ("key", "value")]
    return any(isinstance(operand, Tensor) and operand.storage == copy.storage for operand in operands)
