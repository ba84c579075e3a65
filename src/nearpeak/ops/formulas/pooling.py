"""Pooling and interpolation: the elements that the windows touch are read once, results are written once."""

from __future__ import annotations

import math
from functools import lru_cache

from nearpeak.ops.cost import Cost, accesses, formula
from nearpeak.ops.formulas.pointwise import arithmetic, distinct, read
from nearpeak.ops.op import Op
from nearpeak.ops.tensor import Tensor


@lru_cache(maxsize=1024)
def touched(size: int, outputs: int, kernel: int, stride: int, padding: int, dilation: int) -> int:
    """How many of `size` positions the windows of one dimension touch.

    >>> touched(size=10, outputs=5, kernel=1, stride=2, padding=0, dilation=1)  # every second
    5
    """
    starts = range(-padding, outputs * stride - padding, stride)
    positions = {start + step * dilation for start in starts for step in range(kernel)}
    return sum(0 <= position < size for position in positions)


def _spread(value: object, dimensions: int) -> tuple[int, ...]:
    """An argument for all dimensions: one number stands for each."""
    values = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    return values * dimensions if len(values) == 1 else values


def _part(tensor: Tensor, count: float) -> tuple[Tensor, float]:
    return tensor, min(count * tensor.item_bytes, tensor.bytes)


@formula(
    "aten.max_pool2d_with_indices",
    "aten.max_pool3d_with_indices",
    "aten.avg_pool1d",
    "aten.avg_pool2d",
    "aten.avg_pool3d",
)
def window_pool(op: Op) -> Cost:
    """Reads what the windows touch: all of the input, unless the stride leaves gaps. Writes values and indices.

    Operations: each element that is read joins one window at the least, so n - 1 for a window of n.
    """
    source, result = op.tensor("self"), op.outputs[0]
    dimensions = int(op.packet.partition("pool")[2][0])
    kernel = _spread(op.arguments["kernel_size"], dimensions)
    stride = _spread(op.arguments.get("stride") or kernel, dimensions)
    padding = _spread(op.arguments.get("padding", 0), dimensions)
    dilation = _spread(op.arguments.get("dilation", 1), dimensions)
    windows = zip(
        source.shape[-dimensions:], result.shape[-dimensions:], kernel, stride, padding, dilation, strict=True
    )
    count = math.prod(source.shape[:-dimensions]) * math.prod(touched(*window) for window in windows)
    count = min(count, int(distinct(source)))
    return Cost(
        family="pooling",
        reads=accesses(_part(source, count)),
        writes=accesses(*op.written),
        vector_flops=arithmetic((source,), (), float(max(count - result.elements, 0))),
    )


@formula(
    "aten._adaptive_avg_pool2d",
    "aten._adaptive_avg_pool3d",
    "aten.adaptive_avg_pool1d",
    "aten.adaptive_avg_pool2d",
    "aten.adaptive_avg_pool3d",
    "aten.adaptive_max_pool2d",
    "aten.adaptive_max_pool3d",
)
def adaptive_pool(op: Op) -> Cost:
    """Reads all of the input: adaptive windows leave no gaps. Writes values and indices."""
    source = op.tensor("self")
    return Cost(
        family="pooling",
        reads=accesses(source),
        writes=accesses(*op.written),
        vector_flops=arithmetic((source,), (), max(distinct(source) - op.outputs[0].elements, 0.0)),
    )


@formula(
    "aten.max_pool2d_with_indices_backward",
    "aten.max_pool3d_with_indices_backward",
    "aten.avg_pool2d_backward",
    "aten.avg_pool3d_backward",
    "aten._adaptive_avg_pool2d_backward",
    "aten._adaptive_avg_pool3d_backward",
    "aten.adaptive_avg_pool3d_backward",
    "aten.adaptive_max_pool2d_backward",
    "aten.adaptive_max_pool3d_backward",
    "aten.fractional_max_pool2d_backward",
    "aten.fractional_max_pool3d_backward",
)
def pool_backward(op: Op) -> Cost:
    """Reads the gradient and the indices, not the input; writes the whole gradient of the input."""
    return Cost(family="pooling", reads=accesses(*read(op, unread=("self",))), writes=accesses(*op.written))


@formula("aten.fractional_max_pool2d", "aten.fractional_max_pool3d")
def fractional_pool(op: Op) -> Cost:
    """Reads the random numbers and what the windows touch, writes values and indices.

    Windows start at rising places from the first to the last possible, so that along each dimension they touch a
    window and one more place for each further result at the least, or everything.
    """
    source, result = op.tensor("self"), op.outputs[0]
    kernel = tuple(op.arguments["kernel_size"])
    sizes = zip(source.shape[-len(kernel) :], result.shape[-len(kernel) :], kernel, strict=True)
    touched_places = (min(size, wanted + window - 1) for size, wanted, window in sizes)
    count = math.prod(source.shape[: -len(kernel)]) * math.prod(touched_places) if result.elements else 0
    return Cost(
        family="pooling",
        reads=accesses(_part(source, count), *op.tensors("random_samples")),
        writes=accesses(*op.written),
        vector_flops=arithmetic((source,), (), float(max(min(count, distinct(source)) - result.elements, 0))),
    )


@formula("aten.affine_grid_generator", "aten.cudnn_affine_grid_generator", "aten.cudnn_affine_grid_generator_backward")
def affine_grid(op: Op) -> Cost:
    """Reads the matrices (or the gradient of the grid), writes the grid (or theirs)."""
    return Cost(family="pooling", reads=accesses(*op.tensors("theta", "grad")), writes=accesses(*op.written))


@formula("aten.max_unpool2d", "aten.max_unpool3d")
def unpool(op: Op) -> Cost:
    """Reads values and indices, writes the whole result."""
    return Cost(family="pooling", reads=accesses(*read(op)), writes=accesses(*op.written))


_NEAREST = (
    *(f"aten.upsample_nearest{dimensions}d" for dimensions in (1, 2, 3)),
    *(f"aten._upsample_nearest_exact{dimensions}d" for dimensions in (1, 2, 3)),
)
_SMOOTH = ("aten.upsample_linear1d", "aten.upsample_bilinear2d", "aten.upsample_bicubic2d", "aten.upsample_trilinear3d")
_ANTIALIASED = ("aten._upsample_bilinear2d_aa", "aten._upsample_bicubic2d_aa", "aten._upsample_lanczos2d_aa")


@formula(*_NEAREST, *_SMOOTH)
def interpolate(op: Op) -> Cost:
    """Reads the elements that the results come from, one per result and dimension at the least; writes the result.

    Making an image smaller skips elements: no more are charged than there are results along each dimension. A scale
    that is given and does not divide evenly may skip the last element. Mixing neighbors takes an operation per result.
    """
    source = op.tensor("self" if "self" in op.arguments else "input")
    result = op.outputs[0]
    pairs = zip(source.shape[2:], result.shape[2:], _scales(op, source), strict=True)
    count = math.prod(source.shape[:2]) * math.prod(_sources(*pair) for pair in pairs)
    mixes = op.packet in _SMOOTH and result.shape != source.shape
    operations = min(float(result.elements), distinct(source)) if mixes else 0.0
    return Cost(
        family="pooling",
        reads=accesses(_part(source, count)),
        writes=accesses(*op.written),
        vector_flops=arithmetic((source,), (), operations),
    )


def _scales(op: Op, source: Tensor) -> tuple[float | None, ...]:
    """The scale of each dimension where it is given and matters: neighbors make up for it when values are mixed."""
    dimensions = len(source.shape) - 2
    scales: list[float | None] = []
    for name, value in op.arguments.items():
        if name.startswith("scale"):
            scales.extend(value if isinstance(value, tuple) else (value,))
    return tuple(scales) if op.packet in _NEAREST and len(scales) == dimensions else (None,) * dimensions


def _sources(size: int, wanted: int, scale: float | None) -> int:
    if scale is None or wanted < size:
        return min(size, wanted)
    return min(size, int((wanted - 1) / scale) + 1)


@formula(*_ANTIALIASED)
def interpolate_smoothed(op: Op) -> Cost:
    """Reads all of the input, for its filter widens as the result shrinks; writes the result."""
    return Cost(family="pooling", reads=accesses(*read(op)), writes=accesses(*op.written))


@formula(*(f"{name}_backward" for name in (*_NEAREST, *_SMOOTH, *_ANTIALIASED)))
def interpolate_backward(op: Op) -> Cost:
    """Reads the gradient, writes the whole gradient of the input."""
    return Cost(family="pooling", reads=accesses(*read(op)), writes=accesses(*op.written))


@formula(
    "aten.grid_sampler_2d",
    "aten.grid_sampler_3d",
    "aten.cudnn_grid_sampler",
    "aten._grid_sampler_2d_cpu_fallback",
)
def grid_sample(op: Op) -> Cost:
    """Reads the grid and writes the result. Which elements of the input it needs is data: none are charged."""
    return Cost(family="pooling", reads=accesses(op.tensor("grid")), writes=accesses(*op.written))


@formula(
    "aten.grid_sampler_2d_backward",
    "aten.grid_sampler_3d_backward",
    "aten.cudnn_grid_sampler_backward",
    "aten._grid_sampler_2d_cpu_fallback_backward",
)
def grid_sample_backward(op: Op) -> Cost:
    """Reads the grid and the gradient, writes the gradients that are asked for, that of the input in full."""
    outputs, wanted = op.outputs, op.arguments.get("output_mask")
    if isinstance(wanted, tuple) and len(wanted) == len(outputs):
        outputs = tuple(tensor for tensor, keep in zip(outputs, wanted, strict=True) if keep)
    return Cost(
        family="pooling", reads=accesses(op.tensor("grid"), op.tensor("grad_output")), writes=accesses(*outputs)
    )
