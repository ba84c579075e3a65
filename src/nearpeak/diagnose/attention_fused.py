"""`seconds_fused`: what torch's fused attention takes on a machine for attention of some shape."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from nearpeak.diagnose.examined import Examined
from nearpeak.work.op import Op
from nearpeak.work.tensor import Tensor

MOST_WIDTH = 256
"""Of a head: beyond it torch's kernels for GPUs do not go."""
CUDNN_WIDTH = 128
_WITH_CUDNN = ("hopper", "blackwell")
"""Where torch takes the kernels of cuDNN first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Attention: `lead` are batch and heads."""

    lead: tuple[int, ...]
    queries: int
    keys: int
    width: int
    depth: int
    """Of a value."""
    dtype: str
    mask: Tensor | None
    causal: bool
    dropout: bool
    tf32: bool


def seconds_fused(step: Examined, shape: Shape, *, backward: bool) -> float | None:
    """With backward or without; None where torch would write the matrix of pairs all the same."""
    name = _operator(step, shape)
    if name is None:
        return None
    heads = math.prod(shape.lead)
    last = max(step.trace.storages, default=0)

    def tensor(at: int, *size: int, dtype: str = shape.dtype) -> Tensor:
        strides = tuple(math.prod(size[place + 1 :]) for place in range(len(size)))
        return Tensor(shape=size, strides=strides, dtype=dtype, storage=last + at)

    query = tensor(1, 1, heads, shape.queries, shape.width)
    key = tensor(2, 1, heads, shape.keys, shape.width)
    value = tensor(3, 1, heads, shape.keys, shape.depth)
    out = tensor(4, 1, heads, shape.queries, shape.depth)
    statistics = tensor(5, 1, heads, shape.queries, dtype="float32")
    given: dict[str, Any] = {"query": query, "key": key, "value": value, "is_causal": shape.causal}
    if shape.mask is not None and not shape.causal:
        given["attn_mask" if "for_cpu" in name else "attn_bias"] = shape.mask
    forward = Op(name=f"aten.{name}.default", arguments=given, outputs=(out, statistics), tf32_products=shape.tf32)
    total = step.expected(forward)
    if total is None or not backward:
        return total
    gradients = (tensor(7, *query.shape), tensor(8, *key.shape), tensor(9, *value.shape))
    given |= {"grad_out": tensor(6, *out.shape), "out": out, "logsumexp": statistics}
    given |= {"grad_input_mask": (True, True, True, False)}
    again = Op(name=f"aten.{name}_backward.default", arguments=given, outputs=gradients, tf32_products=shape.tf32)
    behind = step.expected(again)
    return None if behind is None else total + behind


def _operator(step: Examined, shape: Shape) -> str | None:
    """The operator that torch's choice falls on, with its own preferences and a torch from 2.11."""
    if step.machine.kind == "cpu":
        return None if shape.dropout else "_scaled_dot_product_flash_attention_for_cpu"
    if shape.width > MOST_WIDTH or shape.depth > MOST_WIDTH:
        return None
    half = shape.dtype in ("bfloat16", "float16")
    if half and step.machine.architecture in _WITH_CUDNN and max(shape.width, shape.depth) <= CUDNN_WIDTH:
        return "_scaled_dot_product_cudnn_attention"
    masked = shape.mask is not None and not shape.causal
    if half and not masked and shape.width == shape.depth:
        return "_scaled_dot_product_flash_attention"
    return "_scaled_dot_product_efficient_attention" if half or shape.dtype == "float32" else None
