"""Convolutions and their gradients.

Counted by the direct form: one multiply-add for each output element, input channel of its group and kernel tap that
falls on the input. Taps on padding multiply zeros and are free; taps that never fall on the input are not read, nor are
input positions that no tap meets (three quarters of them in a 1x1 convolution of stride 2).

Fast algorithms do fewer multiplications, so the direct count is no floor where they apply: stride 1, no dilation,
not depthwise (where the transforms cost what they save). There the count is divided

- on the vector units by 2/3 of the number of taps where that is above 1: a Fourier transform leaves half a spectrum of
  complex products, three multiplications each, for any kernel; this covers Winograd's tiles (F(4x4, 3x3): 4);
- on the matrix engine by the larger of two factors.
  One is Winograd's with tiles of 4x4 results, for square kernels in two dimensions: (4 k)^2 multiplications in the
  direct form, (k + 3)^2 in the tile, so 4 for a 3x3 kernel and 6.25 for 5x5. Such kernels exist: cuDNN lists its
  Winograd without fusion, which takes 3x3 and 5x5, among its algorithms for tensor cores in all three directions, and
  TVM's template for tensor cores in float16 uses these tiles. No library is known to use larger ones in these dtypes,
  whose precision they exceed.
  The other is the Fourier transform's 2/3 of the taps over 8. cuDNN does not list its transforms among the algorithms
  for tensor cores; they run on the vector units, which are 8 times slower or more on every data-center GPU (8 on V100
  and MI300X, 15 on H100). It counts for large kernels: 10 for 11x11.

The bias is added on the accumulator and costs its bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from nearpeak.ops.cost import Cost, Part, accesses, formula
from nearpeak.ops.formulas.matrix import engines, result, vector_dtype
from nearpeak.ops.op import Op
from nearpeak.ops.tensor import Tensor

VECTOR_LAG = 8
"""How many times slower the vector units are than the matrix engine, at the least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """How a sliding window meets a line, in one dimension: over all windows, the taps that fall on the line."""

    taps: int
    """Pairs of a window and a tap on the line."""
    line: float
    """Fraction of the line that some tap meets."""
    windows: float
    """Fraction of the windows that have a tap on the line."""
    kernel: float
    """Fraction of the kernel that falls on the line in some window."""


@lru_cache(maxsize=4096)
def overlap(line: int, windows: int, kernel: int, stride: int, padding: int, dilation: int) -> Overlap:
    """Tap t of window w is at `w * stride - padding + t * dilation`.

    >>> overlap(4, 4, 3, 1, 1, 1).taps  # of 12, two fall on the padding
    10
    """
    total, used = 0, 0
    met: set[int] = set()
    live: set[int] = set()
    shortcut = dilation == 1 and kernel >= stride  # windows touch: what they meet has no gaps
    for tap in range(kernel):
        shift = tap * dilation - padding
        first = max(0, -(shift // stride))
        last = min(windows - 1, (line - 1 - shift) // stride)
        if last < first:
            continue
        total += last - first + 1
        used += 1
        if shortcut:
            met.update((first * stride + shift, last * stride + shift))
            live.update((first, last))
        else:
            met.update(range(first * stride + shift, last * stride + shift + 1, stride))
            live.update(range(first, last + 1))
    if not total:
        return Overlap(taps=0, line=0.0, windows=0.0, kernel=0.0)
    touched = max(met) - min(met) + 1 if shortcut else len(met)
    alive = max(live) - min(live) + 1 if shortcut else len(live)
    return Overlap(taps=total, line=touched / line, windows=alive / windows, kernel=used / kernel)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Geometry:
    """A convolution: what it must multiply, and which fraction of its three tensors takes part."""

    multiply_adds: float
    input: float
    weight: float
    output: float
    fast: bool
    kernel: tuple[int, ...]


def _geometry(op: Op, data: Tensor, weight: Tensor, out: Tensor, *, transposed: bool) -> _Geometry:
    kernel = weight.shape[2:]
    dimensions = len(kernel)
    stride = _sizes(op.arguments.get("stride", 1), dimensions)
    dilation = _sizes(op.arguments.get("dilation", 1), dimensions)
    padding = _paddings(op.arguments.get("padding", 0), kernel, dilation)
    lines, windows = data.shape[-dimensions:], out.shape[-dimensions:]
    if transposed:  # the windows slide over the output, one for each position of the input
        lines, windows = windows, lines
    overlaps = [overlap(*sizes) for sizes in zip(lines, windows, kernel, stride, padding, dilation, strict=True)]
    line, window, taps = (math.prod(getattr(each, side) for each in overlaps) for side in ("line", "windows", "kernel"))
    batch = out.elements // math.prod(out.shape[-dimensions - 1 :])
    groups = (out if transposed else data).shape[-dimensions - 1] // max(1, weight.shape[1])
    depthwise = weight.shape[0] == groups and weight.shape[1] == 1
    return _Geometry(
        multiply_adds=float(batch * weight.shape[0] * weight.shape[1] * math.prod(each.taps for each in overlaps)),
        input=window if transposed else line,
        weight=taps,
        output=line if transposed else window,
        fast=not depthwise and set(stride) == {1} and set(dilation) == {1},
        kernel=kernel,
    )


def _sizes(value: Any, dimensions: int) -> tuple[int, ...]:
    """One number for each dimension, where one for all may be given."""
    if not isinstance(value, Sequence):
        return (int(value),) * dimensions
    return tuple(value) * dimensions if len(value) == 1 else tuple(value)


def _paddings(value: Any, kernel: tuple[int, ...], dilation: tuple[int, ...]) -> tuple[int, ...]:
    if value == "same":
        return tuple(step * (size - 1) // 2 for size, step in zip(kernel, dilation, strict=True))
    return _sizes(0 if value == "valid" else value, len(kernel))


def _flops(
    op: Op, geometry: _Geometry, dtype: str, products: int = 1
) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    """On the matrix engine, on the vector units, and those of the direct form."""
    tf32 = bool(op.arguments.get("allow_tf32", op.tf32_convolutions)) and "mkldnn" not in op.name
    matrix, vector = engines(dtype, 2 * products * geometry.multiply_adds, tf32=tf32)
    direct = dict(matrix or vector)
    if geometry.fast:
        spectrum = max(1.0, math.prod(geometry.kernel) / 1.5)
        saved = max(winograd(geometry.kernel), spectrum / VECTOR_LAG)
        matrix = {name: flops / saved for name, flops in matrix.items()}
        vector = {name: flops / spectrum for name, flops in vector.items()}
    return matrix, vector, direct


def winograd(kernel: tuple[int, ...]) -> float:
    """Multiplications of the direct form over those of Winograd's with tiles of 4x4 results; 1 where it has none.

    >>> winograd((3, 3)), winograd((5, 5)), winograd((3,))
    (4.0, 6.25, 1.0)
    """
    if len(kernel) != 2 or kernel[0] != kernel[1]:
        return 1.0
    return (4 * kernel[0] / (kernel[0] + 3)) ** 2


def _forward(op: Op, data: str, *, transposed: bool, added: tuple[str, ...] = ("bias",), pointwise: int = 0) -> Cost:
    source, weight, out = op.tensor(data), op.tensor("weight"), result(op)
    extra = [tensor for name in added for tensor in op.tensors(name)]
    if not out.elements:
        return Cost(family="convolution")
    geometry = _geometry(op, source, weight, out, transposed=transposed)
    matrix, vector, direct = _flops(op, geometry, source.dtype)
    if pointwise:
        name = vector_dtype(out.dtype)
        vector[name] = vector.get(name, 0.0) + pointwise * out.elements
    return Cost(
        family="convolution",
        reads=accesses((source, source.bytes * geometry.input), (weight, weight.bytes * geometry.weight), *extra),
        writes=accesses(*op.written),
        flops=matrix,
        vector_flops=vector,
        products=direct,
    )


@formula("aten.convolution", "aten._convolution", "aten.convolution_overrideable")
def _convolution(op: Op) -> Cost:
    return _forward(op, "input", transposed=bool(op.arguments["transposed"]))


@formula("aten.conv1d", "aten.conv2d", "aten.conv3d", "aten._nnpack_spatial_convolution")
def _whole(op: Op) -> Cost:
    return _forward(op, "input", transposed=False)


@formula("aten.conv_transpose1d", "aten.conv_transpose2d", "aten.conv_transpose3d")
def _whole_transposed(op: Op) -> Cost:
    return _forward(op, "input", transposed=True)


@formula(
    "aten.cudnn_convolution",
    "aten.miopen_convolution",
    "aten.miopen_depthwise_convolution",
    "aten.mkldnn_convolution",
    "aten._conv_depthwise2d",
    "aten.conv_depthwise3d",
    "aten._slow_conv2d_forward",
    "aten.slow_conv3d_forward",
    "aten.slow_conv_dilated2d",
    "aten.slow_conv_dilated3d",
)
def _backend(op: Op) -> Cost:
    return _forward(op, "self", transposed=False)


@formula(
    "aten.cudnn_convolution_transpose",
    "aten.miopen_convolution_transpose",
    "aten.slow_conv_transpose2d",
    "aten.slow_conv_transpose3d",
)
def _backend_transposed(op: Op) -> Cost:
    return _forward(op, "self", transposed=True)


@formula("aten.cudnn_convolution_relu", "aten.miopen_convolution_relu")
def _with_relu(op: Op) -> Cost:
    return _forward(op, "self", transposed=False, pointwise=1)


@formula("aten.cudnn_convolution_add_relu", "aten.miopen_convolution_add_relu")
def _with_add_and_relu(op: Op) -> Cost:
    """Reads `z`, which it adds."""
    return _forward(op, "self", transposed=False, added=("bias", "z"), pointwise=1)


@formula("aten.conv_tbc")
def _time_first(op: Op) -> Cost:
    """One dimension, with time, batch and channels in this order; the kernel has taps, channels in, channels out."""
    source, weight, out = op.tensor("self"), op.tensor("weight"), result(op)
    if not out.elements:
        return Cost(family="convolution")
    met = overlap(source.shape[0], out.shape[0], weight.shape[0], 1, int(op.arguments["pad"]), 1)
    count = float(met.taps * source.shape[1] * weight.shape[1] * weight.shape[2])
    geometry = _Geometry(
        multiply_adds=count, input=met.line, weight=met.kernel, output=met.windows, fast=True, kernel=weight.shape[:1]
    )
    matrix, vector, direct = _flops(op, geometry, source.dtype)
    return Cost(
        family="convolution",
        reads=accesses((source, source.bytes * met.line), (weight, weight.bytes * met.kernel), *op.tensors("bias")),
        writes=accesses(*op.written),
        flops=matrix,
        vector_flops=vector,
        products=direct,
    )


@formula("aten._slow_conv2d_backward")
def _slow_backward(op: Op) -> Cost:
    """As `convolution_backward`, with other names for its arguments; the form with outputs gives all three."""
    arguments = {
        "groups": 1,
        "transposed": False,
        "dilation": 1,
        "output_mask": (True, True, True),
        **op.arguments,
        "input": op.arguments["self"],
    }
    return _backward(replace(op, arguments=arguments))


@formula("aten.convolution_backward", "aten.convolution_backward_overrideable")
def _backward(op: Op) -> Cost:
    """Only the wanted gradients: each of input and weight is one product; that of the bias adds up `grad_output`."""
    grad, source, weight = op.tensor("grad_output"), op.tensor("input"), op.tensor("weight")
    for_input, for_weight, for_bias = op.arguments["output_mask"]
    channels = weight.shape[1] * op.arguments["groups"] if op.arguments["transposed"] else weight.shape[0]
    shapes = (source.shape, weight.shape, (channels,))  # kernels return gradients that are not requested
    wanted_shapes = [shape for shape, wanted in zip(shapes, op.arguments["output_mask"], strict=True) if wanted]
    writes = accesses(
        *replace(op, outputs=tuple(output for output in op.outputs if output.shape in wanted_shapes)).written
    )
    if not grad.elements:
        return Cost(family="convolution", writes=writes)
    geometry = _geometry(op, source, weight, grad, transposed=bool(op.arguments["transposed"]))
    matrix, vector, direct = _flops(op, geometry, grad.dtype, products=int(for_input) + int(for_weight))
    reads: list[Part] = []
    if for_input:
        reads.append((weight, weight.bytes * geometry.weight))
    if for_weight:
        reads.append((source, source.bytes * geometry.input))
    if for_bias:
        name = vector_dtype(grad.dtype)
        vector[name] = vector.get(name, 0.0) + grad.elements - channels
        reads.append(grad)
    elif for_input or for_weight:
        reads.append((grad, grad.bytes * geometry.output))
    return Cost(
        family="convolution",
        reads=accesses(*reads),
        writes=writes,
        flops=matrix,
        vector_flops=vector,
        products=direct,
    )
