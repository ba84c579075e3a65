"""Keys and values are copied for each head of a group before attention, which could read one copy for all."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from nearpeak.findings.engine import Waste, rule
from nearpeak.findings.step import Step, shape_text
from nearpeak.findings.what_if import dense_strides_like
from nearpeak.ops.op import Op
from nearpeak.ops.tensor import Tensor
from nearpeak.units import quantity, seconds

_TILE_ROWS = 64
"""Of the queries that a kernel computes at once: a head with as many reads its keys once for them anyway."""
_FOLDED = (
    "out = scaled_dot_product_attention(query.unflatten(1, (key.shape[1], -1)).flatten(2, 3), key, value)\n"
    "# the queries of a group as rows of one head, a mask repeated for them; then\n"
    "out = out.unflatten(2, (groups, -1)).flatten(1, 2)\n"
    "# or, which may read the keys of a group more than once:\n"
)


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
        faster = {
            reader: gain for reader in readers if (gain := _gain_of_attention(step, reader, op.outputs[0], times))
        }
        attention = (
            f" Attention with the {times} queries of a group as rows of one head reads each key once: "
            f"{seconds(sum(faster.values()))} of {seconds(step.seconds(faster))} less."
        )
        yield Waste(
            title=f"Keys and values are copied {times} times, once for each query head of a group.",
            op=index,
            gains={index: took, **faster},
            evidence=f"{op.packet} writes {quantity(op.outputs[0].bytes, 'B')} of {shape_text(shape)} from "
            f"{quantity(op.outputs[0].bytes / times, 'B')} in {seconds(took)}; only attention reads them.",
            reasoning="The copy goes away: attention's kernels read the heads that a group shares."
            + (attention if faster else ""),
            remedy=(_FOLDED if any(_has_few_queries(step.ops[reader]) for reader in readers) else "")
            + "scaled_dot_product_attention(query, key, value, enable_gqa=True)  # key, value as they were\n"
            "# transformers: attn_implementation='flash_attention_2', which does not repeat heads",
        )


def _gain_of_attention(step: Step, index: int, copy: Tensor, times: int) -> float:
    """What an attention of few queries saves if those of a group are rows of one head: it reads each key and value
    once. It goes with the copy of the keys."""
    op = step.ops[index]
    operands = {name: op.arguments.get(name) for name in ("query", "key", "value")}
    is_whole = all(isinstance(operand, Tensor) for operand in operands.values())
    if op.phase != "forward" or not is_whole or not _has_few_queries(op):
        return 0.0
    query, key, value = op.tensors("query", "key", "value")
    if key.storage != copy.storage or key.shape != value.shape or query.shape[-3] != key.shape[-3]:
        return 0.0

    def folded(tensor: Tensor, rows: int) -> Tensor:
        *lead, heads, length, width = tensor.shape
        shape = (*lead, heads // times, length * rows, width)
        return dataclasses.replace(tensor, shape=shape, strides=dense_strides_like(tensor, shape))

    arguments = {**op.arguments, "query": folded(query, times), "key": folded(key, 1), "value": folded(value, 1)}
    now = step.expected(op)
    then = step.expected(
        dataclasses.replace(op, arguments=arguments, outputs=(folded(op.outputs[0], times), *op.outputs[1:]))
    )
    return step.time(index) * max(0.0, 1.0 - then / now) if now and then is not None else 0.0


def _has_few_queries(op: Op) -> bool:
    """Whether the queries of an attention may be in any order, and are fewer than a kernel computes at once."""
    query = op.arguments.get("query")
    rows = query.shape[-2] if isinstance(query, Tensor) and len(query.shape) > 1 else _TILE_ROWS
    return rows < _TILE_ROWS and not (op.arguments.get("is_causal") and rows > 1)


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
