"""The kernels of `bias_gelu`, `bias_silu` and `bias_relu_squared`, and their formulas.

A program takes a tile of rows and columns. Tensors without a bias that lie in one piece are one long row. With a
gradient of the bias a program goes down a stretch of rows and keeps the sum of its columns; the sums of all stretches
are added in a second launch, always in the same order.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearpeak.kernels.configs import tuned
from nearpeak.kernels.jit.launch import launch, next_power_of_2
from nearpeak.kernels.jit.rows import as_rows, common_width, exponential

PROGRAMS = 1056
"""Programs that sum columns: 8 for each of 132 multiprocessors, which all run at once."""


@triton.jit
def activate(x, NAME: tl.constexpr):
    """The activation of x, in float32."""
    if NAME == "silu":
        value = x * sigmoid(x)
    elif NAME == "gelu":
        size = tl.minimum(tl.abs(x), 16.0)
        value = tl.where(x < 0.0, 0.0, x) - size * normal_tail(size)
    elif NAME == "gelu_tanh":
        # (1 + tanh u) / 2 is the sigmoid of 2 u, and loses nothing where the tanh is near to -1
        value = x * sigmoid(twice_the_angle(x))
    else:
        tl.static_assert(NAME == "relu_squared" or NAME == "relu")
        value = tl.where(x < 0.0, 0.0, x)  # so that what is not a number stays so
        if NAME == "relu_squared":
            value *= value
    return value


@triton.jit
def value_and_derivative(x, NAME: tl.constexpr):
    """The activation of x and its derivative there, in float32."""
    if NAME == "silu":
        part, slope = sigmoid_and_slope(x)
        derivative = part + x * slope
    elif NAME == "gelu":
        size = tl.minimum(tl.abs(x), 16.0)
        tail = normal_tail(size)
        part = tl.where(x < 0.0, tail, 1.0 - tail)
        density = 0.3989422804014327 * tl.exp2(-0.7213475204444817 * size * size)
        derivative = part + x * density
    elif NAME == "gelu_tanh":
        part, slope = sigmoid_and_slope(twice_the_angle(x))
        derivative = part + x * slope * (1.5957691216057308 + 0.21406444881780076 * x * x)
    elif NAME == "relu":
        part = tl.where(x < 0.0, 0.0, 1.0)
        derivative = tl.where(x <= 0.0, 0.0, 1.0)
    else:
        tl.static_assert(NAME == "relu_squared")
        part = tl.where(x < 0.0, 0.0, x)
        derivative = 2.0 * part
    return x * part, derivative


@triton.jit
def normal_tail(size):
    """What of a normal distribution is beyond `size`, from 0 to 16, where it is 0 in float32.

    A polynomial fitted here to its logarithm, weighted by what it is multiplied with: off by less than 3e-8 of the tail
    up to 3, and by 2e-5 at 7. The library's error function takes twice the instructions of this and is then what the
    GPU waits for instead of memory; and 1 + erf(x) has no digits left below -5.
    """
    power = -1.4232441891692815e-08 * size + 4.874133310295292e-07
    power = power * size - 7.032534085738007e-06
    power = power * size + 5.388275167206302e-05
    power = power * size - 2.0317765302024782e-04
    power = power * size - 1.567832805449143e-04
    power = power * size + 7.138372398912907e-03
    power = power * size - 5.257303640246391e-02
    power = power * size - 4.5917564630508423e-01
    power = power * size - 1.1511098146438599
    return tl.exp2(power * size - 1.0)


@triton.jit
def twice_the_angle(x):
    """2 u of GELU's tanh form: 2 sqrt(2 / pi) (x + 0.044715 x**3)."""
    return x * (1.5957691216057308 + 0.07135481627260025 * x * x)


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + exponential(-x))


@triton.jit
def sigmoid_and_slope(x):
    """The sigmoid and its derivative s (1 - s), without the loss of taking s from 1."""
    small = exponential(-tl.abs(x))
    part = 1.0 / (1.0 + small)
    return tl.where(x < 0.0, small * part, part), small * part * part


@triton.jit
def forward_kernel(
    x, bias, result, rows, columns, column_blocks, x_stride,
    NAME: tl.constexpr, HAS_BIAS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # nothing changes: the compiler is told of what all are multiples, and loads as wide as that allows
    columns, x_stride = columns // WIDTH * WIDTH, x_stride // WIDTH * WIDTH
    program = tl.program_id(0)
    first_row = (program // column_blocks).to(tl.int64) * ROWS
    first_column = (program % column_blocks).to(tl.int64) * BLOCK
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK)[None, :]
    inside = (row < rows - first_row) & (column < columns - first_column)
    offset = row.to(tl.int64)
    x += first_row * x_stride + first_column
    value = tl.load(x + offset * x_stride + column, mask=inside).to(tl.float32)
    if HAS_BIAS:
        value += tl.load(bias + first_column + column, mask=column < columns - first_column).to(tl.float32)
    result += first_row * columns + first_column
    tl.store(result + offset * columns + column, activate(value, NAME).to(result.dtype.element_ty), mask=inside)


@triton.jit
def backward_kernel(
    gradient, x, bias, x_gradient, partial, rows, columns, column_blocks, steps, gradient_stride, x_stride,
    NAME: tl.constexpr, HAS_BIAS: tl.constexpr, SUMS: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    columns, x_stride = columns // WIDTH * WIDTH, x_stride // WIDTH * WIDTH
    gradient_stride = gradient_stride // WIDTH * WIDTH
    program = tl.program_id(0)
    chunk = (program // column_blocks).to(tl.int64)
    first_column = (program % column_blocks).to(tl.int64) * BLOCK
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK)[None, :]
    is_column = column < columns - first_column
    offset = row.to(tl.int64)
    gradient += first_column + offset * gradient_stride + column
    x += first_column + offset * x_stride + column
    x_gradient += first_column + offset * columns + column
    if HAS_BIAS:
        added = tl.load(bias + first_column + column, mask=is_column, other=0.0).to(tl.float32)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for step in range(steps):
        first_row = (chunk * steps + step) * ROWS
        inside = (row < rows - first_row) & is_column
        upstream = tl.load(gradient + first_row * gradient_stride, mask=inside, other=0.0)
        value = tl.load(x + first_row * x_stride, mask=inside, other=0.0).to(tl.float32)
        if HAS_BIAS:
            value += added
        _, slope = value_and_derivative(value, NAME)
        slope *= upstream.to(tl.float32)
        tl.store(x_gradient + first_row * columns, slope.to(x_gradient.dtype.element_ty), mask=inside)
        if SUMS:
            total += tl.where(inside, slope, 0.0)  # where nothing is, 0 may have met an infinite slope
    if SUMS:
        partial += chunk * columns + first_column
        tl.store(partial + column, tl.sum(total, 0, keep_dims=True), mask=is_column)


@triton.jit
def sum_rows_kernel(partial, result, rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    first_column = tl.program_id(0).to(tl.int64) * BLOCK
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK)[None, :]
    is_column = column < columns - first_column
    partial += row.to(tl.int64) * columns + first_column + column
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, rows, ROWS):
        at = start + first_column * 0  # in 64 bits
        total += tl.load(partial + at * columns, mask=(row < rows - start) & is_column, other=0.0)
    result += first_column
    tl.store(result + column, tl.sum(total, 0, keep_dims=True).to(result.dtype.element_ty), mask=is_column)


def forward(x: Tensor, bias: Tensor | None, activation: str, *, config: dict[str, Any] | None = None) -> Tensor:
    """The activation of x + bias, contiguous. Copies x where its last stride is not 1."""
    result = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not x.numel():
        return result
    (x,) = as_tiles(x, flat=bias is None)
    rows, columns = x.shape
    config = config or tuned("activation_forward", columns, x.device) or tile(rows, columns)
    block, height = config["block"], config["rows"]
    column_blocks = triton.cdiv(columns, block)
    launch(
        forward_kernel, (column_blocks * triton.cdiv(rows, height), 1, 1),
        x, x if bias is None else bias.contiguous(), result, rows, columns, column_blocks, x.stride(0),
        activation, bias is not None, common_width(columns, x.stride(0)), height, block, warps=config["warps"],
    )  # fmt: skip
    return result


def backward(
    gradient: Tensor, x: Tensor, bias: Tensor | None, activation: str, *, config: dict[str, Any] | None = None
) -> Tensor:
    """The gradient of x, contiguous. Copies what has a last stride that is not 1."""
    result = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not x.numel():
        return result
    gradient, x = as_tiles(gradient, x, flat=bias is None)
    rows, columns = x.shape
    config = config or tuned("activation_backward", columns, x.device) or tile(rows, columns)
    block, height = config["block"], config["rows"]
    column_blocks = triton.cdiv(columns, block)
    launch(
        backward_kernel, (column_blocks * triton.cdiv(rows, height), 1, 1),
        gradient, x, x if bias is None else bias.contiguous(), result, x, rows, columns, column_blocks, 1,
        gradient.stride(0), x.stride(0), activation, bias is not None, False,
        common_width(columns, gradient.stride(0), x.stride(0)), height, block, warps=config["warps"],
    )  # fmt: skip
    return result


def backward_with_bias(
    gradient: Tensor, x: Tensor, bias: Tensor, activation: str, *, config: dict[str, Any] | None = None
) -> tuple[Tensor, Tensor]:
    """The gradients of x and bias, contiguous. Copies what has a last stride that is not 1."""
    result = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not x.numel():
        return result, torch.zeros_like(bias, memory_format=torch.contiguous_format)
    bias_gradient = torch.empty_like(bias, memory_format=torch.contiguous_format)
    gradient, x = as_tiles(gradient, x, flat=False)
    rows, columns = x.shape
    config = config or tuned("activation_backward_bias", columns, x.device) or tile_of_sums(rows, columns)
    block, height = config["block"], config["rows"]
    column_blocks = triton.cdiv(columns, block)
    steps = triton.cdiv(rows, height * max(1, config["programs"] // column_blocks))
    chunks = triton.cdiv(rows, height * steps)
    partial = torch.empty((chunks, columns), dtype=torch.float32, device=x.device)
    launch(
        backward_kernel, (column_blocks * chunks, 1, 1),
        gradient, x, bias.contiguous(), result, partial, rows, columns, column_blocks, steps,
        gradient.stride(0), x.stride(0), activation, True, True,
        common_width(columns, gradient.stride(0), x.stride(0)), height, block, warps=config["warps"],
    )  # fmt: skip
    width = 32  # 128 bytes, so that a short row too is shared among many programs
    launch(
        sum_rows_kernel, (triton.cdiv(columns, width), 1, 1), partial, bias_gradient, chunks, columns, 64, width
    )  # fmt: skip
    return result, bias_gradient


def as_tiles(*tensors: Tensor, flat: bool) -> list[Tensor]:
    """The tensors as rows with a last stride of 1: views where they can be, and else copies.

    With `flat`, tensors that all lie in one piece come as a single row, which is cut into full blocks but for the last.
    """
    if flat and all(tensor.is_contiguous() for tensor in tensors):
        return [tensor.view(1, -1) for tensor in tensors]
    return [as_rows(tensor) for tensor in tensors]


def tile(rows: int, columns: int, elements: int = 4096) -> dict[str, Any]:
    """What to launch with where nobody measured: two loads of 128 bits by each of 256 threads in bfloat16."""
    block = min(next_power_of_2(columns), elements)
    while columns % block and block > 1024:  # no half empty blocks at the ends of rows
        block //= 2
    return {"block": block, "rows": min(elements // block, next_power_of_2(rows)), "warps": 8}


def tile_of_sums(rows: int, columns: int) -> dict[str, Any]:
    """The same where columns are summed: a thread has 8 columns, so that it sums them without the others."""
    block = min(next_power_of_2(columns), 1024)
    return {"block": block, "rows": min(4096 // block, next_power_of_2(rows)), "warps": 4, "programs": PROGRAMS}


def candidates(size: int, kernel: str = "activation_forward") -> list[dict[str, Any]]:
    """Configurations worth measuring for rows of this length; "activation_backward_bias" has one more choice."""
    longest = next_power_of_2(size)
    found: list[dict[str, Any]] = []
    if kernel == "activation_backward_bias":
        for block, warps in ((256, 1), (512, 2), (1024, 4), (2048, 8)):
            for height in (2, 4, 8):
                width = min(block, longest)
                for programs in (PROGRAMS, 2 * PROGRAMS):
                    found.append(
                        {"block": width, "rows": height * block // width, "warps": warps, "programs": programs}
                    )
        return found
    for elements in (1024, 2048, 4096, 8192, 16384):
        for warps in (2, 4, 8, 16):
            if 8 <= elements // (32 * warps) <= 64:
                for block in sorted({min(longest, elements), min(longest, elements, 1024)}):
                    found.append({"block": block, "rows": elements // block, "warps": warps})
    return found
