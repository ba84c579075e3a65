"""The time that ops would take in another form: in another dtype, with other sizes, or as fused attention."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from statistics import median
from typing import Any

from nearpeak.bound.expected import is_like_measured
from nearpeak.findings.step import Step
from nearpeak.ops.op import Op
from nearpeak.ops.tensor import Tensor


def with_dtype(op: Op, old: str, new: str) -> Op:
    """The op with all tensors of one dtype cast to another."""
    arguments = {name: _with_dtype(value, old, new) for name, value in op.arguments.items()}
    return dataclasses.replace(op, arguments=arguments, outputs=_with_dtype(op.outputs, old, new))


def _with_dtype(value: Any, old: str, new: str) -> Any:
    if isinstance(value, Tensor):
        return dataclasses.replace(value, dtype=new) if value.dtype == old else value
    if isinstance(value, (tuple, list)):
        return tuple(_with_dtype(item, old, new) for item in value)
    return value


def dense_strides_like(tensor: Tensor, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Dense strides for a shape, in the order of a tensor's dimensions; expanded ones stay expanded."""
    strides, size = [0] * len(shape), 1
    for place in sorted(range(len(shape)), key=lambda place: (tensor.strides[place], -place)):
        if tensor.strides[place]:
            strides[place] = size
            size *= shape[place]
    return tuple(strides)


def gemm_op(batch: int, m: int, n: int, k: int, *, dtype: str, tf32: bool = False) -> Op:
    """A GEMM of dense matrices of these sizes that are not in the step."""
    sizes = ((m, k), (k, n), (m, n))
    left, right, out = (
        Tensor(
            shape=(batch, rows, columns) if batch > 1 else (rows, columns),
            strides=(rows * columns, columns, 1) if batch > 1 else (columns, 1),
            dtype=dtype,
            storage=-1 - number,
        )
        for number, (rows, columns) in enumerate(sizes)
    )
    name = "aten.bmm.default" if batch > 1 else "aten.mm.default"
    return Op(name=name, arguments={"self": left, "mat2": right}, outputs=(out,), tf32_products=tf32)


def with_rows(step: Step, op: Op, times: int, grows: Callable[[Tensor], bool]) -> Op:
    """The op with so many times the first size of the tensors that grow; parameters and buffers stay as they are."""

    def grown(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(grown, value))
        if not isinstance(value, Tensor) or not grows(value):
            return value
        storage = step.trace.storages.get(value.storage)
        if storage is not None and storage.kind in ("parameter", "buffer"):
            return value
        return dataclasses.replace(value, shape=(value.shape[0] * times, *value.shape[1:]))

    arguments = {name: grown(value) for name, value in op.arguments.items()}
    return dataclasses.replace(op, arguments=arguments, outputs=grown(op.outputs))


def slowness(step: Step, index: int) -> float:
    """The measured time of an op over that of a good kernel; at least 1."""
    expected = step.expected(step.ops[index])
    return max(1.0, step.time(index) / expected) if expected else 1.0


_MAX_SLOWNESS = 5.0
"""A kernel on a CPU that takes so many times as long as a good one like it is slow because of something else than its
size."""


def seconds_by_size(step: Step, index: int) -> float:
    """The time of an op that grows with its sizes: all of it, unless the values that it reads make it slow.

    What subnormal numbers cost, for one, does not go with rows that have none.
    """
    op, took, expected = step.ops[index], step.time(index), step.measured[index].expected_s
    if step.machine.kind != "cpu" or not expected or not is_like_measured(op.name, step.costs[index].family):
        return took
    return took if took <= _MAX_SLOWNESS * step.pace * expected else step.pace * expected


def share_left(changes: Collection[float]) -> float:
    """The share of what some ops save that is left, where others take longer than before; 0 if nothing is."""
    saved_s = sum(changes)
    return saved_s / sum(max(0.0, change) for change in changes) if saved_s > 0.0 else 0.0


def median_slowness(step: Step, gemms: Collection[int]) -> float:
    """The median of the measured times of GEMMs over those of good kernels; at least 1."""
    ratios = [
        step.time(index) / expected
        for index in gemms
        if (expected := step.expected(step.ops[index])) and step.time(index)
    ]
    return max(1.0, median(ratios)) if ratios else 1.0


GATHERED_PASSES = {"gpu": 9.5, "cpu": 2.0}
"""The time of a gather, a product and `index_add` with the elements that are not zero, or of their gradient, over that
of one pass over as many rows. On an H200, 160,000 x 256 in float32, forward and backward: 9.5, since the gradient of
the gather sorts its rows. On a Xeon, 12,000 x 64 to 64,000 x 32: 1.6 to 2.3. torch's sparse products take less."""
MAX_HEAD_DIM = 256
"""The largest head dimension of torch's fused kernels for GPUs."""
CUDNN_MAX_HEAD_DIM = 128
_CUDNN_FIRST = ("hopper", "blackwell")
"""Architectures on which torch prefers the kernels of cuDNN."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """The shape of an attention call; `lead` are batch and heads."""

    lead: tuple[int, ...]
    queries: int
    keys: int
    width: int
    depth: int
    """The head dimension of the values."""
    dtype: str
    mask: Tensor | None
    causal: bool
    dropout: bool
    tf32: bool


def fused_attention_seconds(step: Step, shape: AttentionShape, *, backward: bool) -> float | None:
    """The time of torch's fused attention, with or without backward; None if torch has no fused kernel for it."""
    name = _attention_operator(step, shape)
    if name is None:
        return None
    heads = math.prod(shape.lead)
    last = max(step.trace.storages, default=0)

    def tensor(number: int, *size: int, dtype: str = shape.dtype) -> Tensor:
        strides = tuple(math.prod(size[place + 1 :]) for place in range(len(size)))
        return Tensor(shape=size, strides=strides, dtype=dtype, storage=last + number)

    query = tensor(1, 1, heads, shape.queries, shape.width)
    key = tensor(2, 1, heads, shape.keys, shape.width)
    value = tensor(3, 1, heads, shape.keys, shape.depth)
    out = tensor(4, 1, heads, shape.queries, shape.depth)
    statistics = tensor(5, 1, heads, shape.queries, dtype="float32")
    arguments: dict[str, Any] = {"query": query, "key": key, "value": value, "is_causal": shape.causal}
    if shape.mask is not None and not shape.causal:
        arguments["attn_mask" if "for_cpu" in name else "attn_bias"] = shape.mask
    forward = Op(name=f"aten.{name}.default", arguments=arguments, outputs=(out, statistics), tf32_products=shape.tf32)
    total = step.expected(forward)
    if total is None or not backward:
        return total
    gradients = (tensor(7, *query.shape), tensor(8, *key.shape), tensor(9, *value.shape))
    arguments |= {"grad_out": tensor(6, *out.shape), "out": out, "logsumexp": statistics}
    arguments |= {"grad_input_mask": (True, True, True, False)}
    backward_op = Op(
        name=f"aten.{name}_backward.default", arguments=arguments, outputs=gradients, tf32_products=shape.tf32
    )
    backward_s = step.expected(backward_op)
    return None if backward_s is None else total + backward_s


def _attention_operator(step: Step, shape: AttentionShape) -> str | None:
    """The operator that torch 2.11 and later chooses by default."""
    if step.machine.kind == "cpu":
        return None if shape.dropout else "_scaled_dot_product_flash_attention_for_cpu"
    if shape.width > MAX_HEAD_DIM or shape.depth > MAX_HEAD_DIM:
        return None
    half = shape.dtype in ("bfloat16", "float16")
    if half and step.machine.architecture in _CUDNN_FIRST and max(shape.width, shape.depth) <= CUDNN_MAX_HEAD_DIM:
        return "_scaled_dot_product_cudnn_attention"
    masked = shape.mask is not None and not shape.causal
    if half and not masked and shape.width == shape.depth:
        return "_scaled_dot_product_flash_attention"
    return "_scaled_dot_product_efficient_attention" if half or shape.dtype == "float32" else None
