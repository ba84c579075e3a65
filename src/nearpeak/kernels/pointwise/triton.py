"""Triton kernels of the pointwise operations, their launchers and configurations.

Activations: a program takes a tile of rows and columns. Dense tensors without a bias are one long row. For the gradient
of a bias, a program goes down a stretch of rows and keeps the sums of its columns; the sums of all stretches are added
in a second launch, always in the same order.

Gated activations: the halves of a packed row are two tensors with a common stride. Interleaved ones are loaded together
and separated in registers.

Dropout: random numbers are computed where they are used, from a seed and the index of an element in a contiguous
tensor. Philox computes four numbers from one counter. The elements of a chunk have the four numbers of CHUNK / 4
counters: the first quarter the first numbers, the second quarter the second, and so on. So each quarter is loaded by
itself, and zeros moves between threads. This order is part of what a seed means: it does not depend on the number of
programs or threads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearpeak.kernels._runtime.launch import can_start_early, launch, next_power_of_2, wait_for_previous
from nearpeak.kernels._runtime.philox import CHUNK, ROUNDS, keep_scale, signed_threshold
from nearpeak.kernels._runtime.rows import as_rows, common_width, exponential
from nearpeak.kernels._runtime.tuning import from_row, tuned

_ADD_BLOCK = 4096
_PROGRAMS = 1056
"""Programs that sum columns: 8 for each of 132 multiprocessors, which all run at the same time."""
_FEW = 2**22
"""Elements from which on a GPU is busy, and tiles of many rows are not those of one."""
_MOST_Y = 65_535
"""Programs in the second dimension of a grid."""
_LEAST_BLOCK = 128
"""Columns: what 16 threads load of a row at once in 16 bits."""
_EMPTY_SHARE = 1.1
"""Blocks over a row may be so much longer than the row rounded up to `_LEAST_BLOCK`."""
_QUARTER = tl.constexpr(CHUNK // 4)
_ROUNDS = tl.constexpr(ROUNDS)
_LOWEST = tl.constexpr(-(2**31))


@triton.jit
def add_kernel(x, y, result, elements, BLOCK: tl.constexpr):
    # in 64 bits from the start: a tensor may have more than 2**31 elements
    element = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # (BLOCK,)
    inside = element < elements
    total = tl.load(x + element, mask=inside).to(tl.float32) + tl.load(y + element, mask=inside).to(tl.float32)
    tl.store(result + element, total.to(result.dtype.element_ty), mask=inside)


def add(x: Tensor, y: Tensor) -> Tensor:
    """The sum; tensors that are not contiguous are copied first."""
    x, y = x.contiguous(), y.contiguous()
    result = torch.empty_like(x)
    elements = x.numel()
    launch(add_kernel, (triton.cdiv(elements, _ADD_BLOCK), 1, 1), x, y, result, elements, _ADD_BLOCK, warps=8)
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class TileConfig:
    """The tile of a program."""

    block: int
    """Columns."""
    rows: int
    warps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnSumConfig:
    """The same where columns are summed."""

    block: int
    rows: int
    warps: int
    programs: int
    """In all."""


def tile_heuristic(rows: int, columns: int, elements: int = 4096) -> TileConfig:
    """Two loads of 128 bits by each of 256 threads in bfloat16; of a few elements one, and as many programs as run."""
    while elements > 512 and rows * columns < _PROGRAMS // 4 * elements:
        elements //= 2
    block = fitting_block(columns, elements)
    return TileConfig(block=block, rows=min(elements // block, next_power_of_2(rows)), warps=min(elements // 256, 8))


def tile_config(kernel: str, rows: int, columns: int, device: torch.device) -> TileConfig:
    """The heuristic, or the tile that was measured for as many elements in one row, in a shape that fits these."""
    elements = rows * columns
    measured = from_row(tuned(kernel, elements, device), TileConfig) if rows == 1 or elements <= _FEW else None
    if measured is None:
        return tile_heuristic(rows, columns)
    block = fitting_block(columns, measured.block) if rows > 1 else measured.block
    return TileConfig(block=block, rows=min(measured.block // block, next_power_of_2(rows)), warps=measured.warps)


def fitting_block(columns: int, most: int) -> int:
    """The largest block, up to `most` columns, of which blocks over a row leave hardly more empty than those of others.

    Threads whose columns are after the end of a row compute like others: in rows of 576 with one block of 1024, more
    than a third of them, which made the gradient of GELU 1.2 times as slow as that of torch.compile on an H200.
    """
    widest = min(next_power_of_2(columns), most)
    spans = {widest: triton.cdiv(columns, widest) * widest}
    while (block := min(spans) // 2) >= _LEAST_BLOCK:
        spans[block] = triton.cdiv(columns, block) * block
    return max(block for block, span in spans.items() if span <= _EMPTY_SHARE * min(spans.values()))


def tile_candidates(size: int) -> list[TileConfig]:
    """Configurations worth measuring for rows of this length."""
    longest = next_power_of_2(size)
    return [
        TileConfig(block=block, rows=elements // block, warps=warps)
        for elements in (1024, 2048, 4096, 8192, 16384)
        for warps in (2, 4, 8, 16)
        if 8 <= elements // (32 * warps) <= 64
        for block in sorted({min(longest, elements), min(longest, elements, 1024)})
    ]


def column_sum_heuristic(rows: int, columns: int) -> ColumnSumConfig:
    """A thread has 8 columns, and sums them without the other threads."""
    block = fitting_block(columns, 1024)
    return ColumnSumConfig(block=block, rows=min(4096 // block, next_power_of_2(rows)), warps=4, programs=_PROGRAMS)


def column_sum_candidates(size: int) -> list[ColumnSumConfig]:
    """Configurations worth measuring for rows of this length."""
    return [
        ColumnSumConfig(block=width, rows=height * block // width, warps=warps, programs=programs)
        for block, warps in ((256, 1), (512, 2), (1024, 4), (2048, 8))
        for width in (min(block, next_power_of_2(size)),)
        for height in (2, 4, 8)
        for programs in (_PROGRAMS, 2 * _PROGRAMS)
    ]


@triton.jit
def activate(x, NAME: tl.constexpr):
    """The activation of x, in float32."""
    if NAME == "silu":
        value = x * sigmoid(x)
    elif NAME == "gelu":
        size = tl.minimum(tl.abs(x), 16.0)
        value = tl.where(x < 0.0, 0.0, x) - size * normal_tail(size)
    elif NAME == "gelu_tanh":
        # (1 + tanh u) / 2 is the sigmoid of 2 u, and loses zeros where the tanh is near to -1
        value = x * sigmoid(gelu_tanh_argument(x))
    else:
        tl.static_assert(NAME == "relu_squared" or NAME == "relu")
        value = tl.where(x < 0.0, 0.0, x)  # NaN stays NaN
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
        part, slope = sigmoid_and_slope(gelu_tanh_argument(x))
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
    """The tail of the normal distribution beyond `size`, from 0 to 16, where it is 0 in float32.

    A polynomial fitted to its logarithm, weighted by what it is multiplied with: its relative error is below 3e-8 up to
    3, and 2e-5 at 7. The library's error function takes twice the instructions, which makes a kernel compute-bound; and
    1 + erf(x) has no digits left below -5.
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
def gelu_tanh_argument(x):
    """2 u, where u is the argument of the tanh in GELU: 2 sqrt(2 / pi) (x + 0.044715 x**3)."""
    return x * (1.5957691216057308 + 0.07135481627260025 * x * x)


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + exponential(-x))


@triton.jit
def sigmoid_and_slope(x):
    """The sigmoid s and its derivative s (1 - s), without the cancellation in 1 - s."""
    small = exponential(-tl.abs(x))
    part = 1.0 / (1.0 + small)
    return tl.where(x < 0.0, small * part, part), small * part * part


@triton.jit
def tile_start(column_blocks, ROWS: tl.constexpr, BLOCK: tl.constexpr, FLAT: tl.constexpr):
    """The first row and the first column of a tile. See `tile_grid`. FLAT: there is one row, a constant."""
    if FLAT:
        first_row, column_block = tl.cast(0, tl.int64), tl.program_id(0)
    else:
        if column_blocks is None:
            row_block, column_block = tl.program_id(1), tl.program_id(0)
        else:
            row_block, column_block = tl.program_id(0) // column_blocks, tl.program_id(0) % column_blocks
        first_row = row_block.to(tl.int64) * ROWS
    return first_row, column_block.to(tl.int64) * BLOCK


def tile_grid(rows: int, columns: int, height: int, block: int) -> tuple[tuple[int, int, int], int | None]:
    """The programs for all tiles, and the number of tiles in a row, or None if the programs are in two dimensions.

    A GPU divides integers in about 40 instructions, which shows in a kernel of one microsecond.
    """
    row_blocks, column_blocks = triton.cdiv(rows, height), triton.cdiv(columns, block)
    if row_blocks <= _MOST_Y:
        return (column_blocks, row_blocks, 1), None
    return (column_blocks * row_blocks, 1, 1), column_blocks


@triton.jit
def activation_kernel(
    x, bias, result, rows, columns, column_blocks, x_stride,
    NAME: tl.constexpr, HAS_BIAS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    FLAT: tl.constexpr,
):  # fmt: skip
    # tells the compiler that these are multiples of WIDTH, so that it loads as wide as that allows
    columns, x_stride = columns // WIDTH * WIDTH, x_stride // WIDTH * WIDTH
    first_row, first_column = tile_start(column_blocks, ROWS, BLOCK, FLAT)
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK)[None, :]  # (ROWS, 1), (1, BLOCK)
    inside = (row < rows - first_row) & (column < columns - first_column)
    offset = row.to(tl.int64)
    x += first_row * x_stride + first_column
    value = tl.load(x + offset * x_stride + column, mask=inside).to(tl.float32)
    if HAS_BIAS:
        value += tl.load(bias + first_column + column, mask=column < columns - first_column).to(tl.float32)
    result += first_row * columns + first_column
    tl.store(result + offset * columns + column, activate(value, NAME).to(result.dtype.element_ty), mask=inside)


@triton.jit
def activation_backward_kernel(
    gradient, x, bias, x_gradient, partial, rows, columns, column_blocks, steps, gradient_stride, x_stride,
    NAME: tl.constexpr, HAS_BIAS: tl.constexpr, SUMS: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    columns, x_stride = columns // WIDTH * WIDTH, x_stride // WIDTH * WIDTH
    gradient_stride = gradient_stride // WIDTH * WIDTH
    program = tl.program_id(0)
    if FLAT:
        chunk, first_column = tl.cast(0, tl.int64), program.to(tl.int64) * BLOCK
    else:
        chunk = (program // column_blocks).to(tl.int64)
        first_column = (program % column_blocks).to(tl.int64) * BLOCK
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK)[None, :]  # (ROWS, 1), (1, BLOCK)
    is_column = column < columns - first_column
    offset = row.to(tl.int64)
    gradient += first_column + offset * gradient_stride + column
    x += first_column + offset * x_stride + column
    x_gradient += first_column + offset * columns + column
    if HAS_BIAS:
        added = tl.load(bias + first_column + column, mask=is_column, other=0.0).to(tl.float32)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    # down a stretch of rows, one (ROWS, BLOCK) tile at a time
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
            total += tl.where(inside, slope, 0.0)  # outside, 0 times an infinite slope is NaN
    if SUMS:
        partial += chunk * columns + first_column
        tl.store(partial + column, tl.sum(total, 0, keep_dims=True), mask=is_column)


@triton.jit
def sum_rows_kernel(
    partial, result, rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    wait_for_previous(EARLY)
    first_column = tl.program_id(0).to(tl.int64) * BLOCK
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK)[None, :]  # (ROWS, 1), (1, BLOCK)
    is_column = column < columns - first_column
    partial += row.to(tl.int64) * columns + first_column + column
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, rows, ROWS):
        element = start + first_column * 0  # in 64 bits
        total += tl.load(partial + element * columns, mask=(row < rows - start) & is_column, other=0.0)
    result += first_column
    tl.store(result + column, tl.sum(total, 0, keep_dims=True).to(result.dtype.element_ty), mask=is_column)


def activation_forward(
    x: Tensor, bias: Tensor | None, activation: str, *, config: TileConfig | None = None, out: Tensor | None = None
) -> Tensor:
    """The activation of x + bias, contiguous. Copies x if its last stride is not 1."""
    result = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    if not x.numel():
        return result
    (x,) = as_tiles(x, flat=bias is None)
    rows, columns = x.shape
    row = tuned("activation_forward", columns, x.device)
    config = config or from_row(row, TileConfig) or tile_heuristic(rows, columns)
    block, height = config.block, config.rows
    grid, column_blocks = tile_grid(rows, columns, height, block)
    launch(
        activation_kernel, grid,
        x, x if bias is None else bias.contiguous(), result, rows, columns, column_blocks, x.stride(0),
        activation, bias is not None, common_width(columns, x.stride(0)), height, block, rows == 1, warps=config.warps,
    )  # fmt: skip
    return result


def activation_backward(
    gradient: Tensor, x: Tensor, bias: Tensor | None, activation: str, *, config: TileConfig | None = None
) -> Tensor:
    """The gradient of x, contiguous. Copies tensors whose last stride is not 1."""
    result = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not x.numel():
        return result
    gradient, x = as_tiles(gradient, x, flat=bias is None)
    rows, columns = x.shape
    row = tuned("activation_backward", columns, x.device)
    config = config or from_row(row, TileConfig) or tile_heuristic(rows, columns)
    block, height = config.block, config.rows
    column_blocks = triton.cdiv(columns, block)
    launch(
        activation_backward_kernel, (column_blocks * triton.cdiv(rows, height), 1, 1),
        gradient, x, x if bias is None else bias.contiguous(), result, x, rows, columns, column_blocks, 1,
        gradient.stride(0), x.stride(0), activation, bias is not None, False,
        common_width(columns, gradient.stride(0), x.stride(0)), height, block, rows == 1, warps=config.warps,
    )  # fmt: skip
    return result


def activation_backward_with_bias(
    gradient: Tensor, x: Tensor, bias: Tensor, activation: str, *, config: ColumnSumConfig | None = None
) -> tuple[Tensor, Tensor]:
    """The gradients of x and bias, contiguous. Copies tensors whose last stride is not 1."""
    result = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not x.numel():
        return result, torch.zeros_like(bias, memory_format=torch.contiguous_format)
    bias_gradient = torch.empty_like(bias, memory_format=torch.contiguous_format)
    gradient, x = as_tiles(gradient, x, flat=False)
    rows, columns = x.shape
    row = tuned("activation_backward_bias", columns, x.device)
    config = config or from_row(row, ColumnSumConfig) or column_sum_heuristic(rows, columns)
    block, height = config.block, config.rows
    column_blocks = triton.cdiv(columns, block)
    steps = triton.cdiv(rows, height * max(1, config.programs // column_blocks))
    chunks = triton.cdiv(rows, height * steps)
    partial = torch.empty((chunks, columns), dtype=torch.float32, device=x.device)
    launch(
        activation_backward_kernel, (column_blocks * chunks, 1, 1),
        gradient, x, bias.contiguous(), result, partial, rows, columns, column_blocks, steps,
        gradient.stride(0), x.stride(0), activation, True, True,
        common_width(columns, gradient.stride(0), x.stride(0)), height, block, False, warps=config.warps,
    )  # fmt: skip
    width = 32  # 128 bytes, so that a short row is split among many programs too
    early = can_start_early(x.device)
    launch(
        sum_rows_kernel, (triton.cdiv(columns, width), 1, 1), partial, bias_gradient, chunks, columns, 64, width, early,
        early=early,
    )  # fmt: skip
    return result, bias_gradient


def as_tiles(*tensors: Tensor, flat: bool) -> list[Tensor]:
    """The tensors as rows with a last stride of 1: views if possible, and copies otherwise.

    With `flat`, contiguous tensors become a single row, which has full blocks but for the last.
    """
    if flat and all(tensor.is_contiguous() for tensor in tensors):
        return [tensor.view(1, -1) for tensor in tensors]
    return [as_rows(tensor) for tensor in tensors]


@triton.jit
def load_pair(
    gate, up, first_row, first_column, rows, columns, gate_stride, up_stride,
    INTERLEAVED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A tile of the gate and one of the other factor, both (ROWS, BLOCK), in float32."""
    row = tl.arange(0, ROWS)[:, None]
    if INTERLEAVED:
        column = tl.arange(0, 2 * BLOCK)[None, :]
        inside = (row < rows - first_row) & (column < 2 * (columns - first_column))
        gate += first_row * gate_stride + 2 * first_column + row.to(tl.int64) * gate_stride
        both = tl.load(gate + column, mask=inside, other=0.0)
        gate_tile, up_tile = tl.split(tl.reshape(both, (ROWS, BLOCK, 2)))
    else:
        column = tl.arange(0, BLOCK)[None, :]
        inside = (row < rows - first_row) & (column < columns - first_column)
        gate += first_row * gate_stride + first_column + row.to(tl.int64) * gate_stride
        up += first_row * up_stride + first_column + row.to(tl.int64) * up_stride
        gate_tile = tl.load(gate + column, mask=inside, other=0.0)
        up_tile = tl.load(up + column, mask=inside, other=0.0)
    return gate_tile.to(tl.float32), up_tile.to(tl.float32)


@triton.jit
def gated_kernel(
    gate, up, result, rows, columns, column_blocks, gate_stride, up_stride,
    NAME: tl.constexpr, INTERLEAVED: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    FLAT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_previous(EARLY)
    columns, gate_stride, up_stride = columns // WIDTH * WIDTH, gate_stride // WIDTH * WIDTH, up_stride // WIDTH * WIDTH
    first_row, first_column = tile_start(column_blocks, ROWS, BLOCK, FLAT)
    gate_tile, up_tile = load_pair(
        gate, up, first_row, first_column, rows, columns, gate_stride, up_stride, INTERLEAVED, ROWS, BLOCK
    )
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK)[None, :]  # (ROWS, 1), (1, BLOCK)
    inside = (row < rows - first_row) & (column < columns - first_column)
    result += first_row * columns + first_column + row.to(tl.int64) * columns
    tl.store(result + column, (activate(gate_tile, NAME) * up_tile).to(result.dtype.element_ty), mask=inside)


@triton.jit
def gated_backward_kernel(
    gradient, gate, up, gate_gradient, up_gradient, rows, columns, column_blocks,
    gradient_stride, gate_stride, up_stride, result_stride,
    NAME: tl.constexpr, INTERLEAVED: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    FLAT: tl.constexpr,
):  # fmt: skip
    columns, gate_stride, up_stride = columns // WIDTH * WIDTH, gate_stride // WIDTH * WIDTH, up_stride // WIDTH * WIDTH
    gradient_stride, result_stride = gradient_stride // WIDTH * WIDTH, result_stride // WIDTH * WIDTH
    first_row, first_column = tile_start(column_blocks, ROWS, BLOCK, FLAT)
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK)[None, :]  # (ROWS, 1), (1, BLOCK)
    inside = (row < rows - first_row) & (column < columns - first_column)
    gradient += first_row * gradient_stride + first_column + row.to(tl.int64) * gradient_stride
    upstream = tl.load(gradient + column, mask=inside, other=0.0).to(tl.float32)
    gate_tile, up_tile = load_pair(
        gate, up, first_row, first_column, rows, columns, gate_stride, up_stride, INTERLEAVED, ROWS, BLOCK
    )
    value, slope = value_and_derivative(gate_tile, NAME)
    gate_slope = (upstream * up_tile * slope).to(gate_gradient.dtype.element_ty)
    up_slope = (upstream * value).to(gate_gradient.dtype.element_ty)
    line = first_row * result_stride + row.to(tl.int64) * result_stride
    if INTERLEAVED:
        both = tl.reshape(tl.join(gate_slope, up_slope), (ROWS, 2 * BLOCK))
        column = tl.arange(0, 2 * BLOCK)[None, :]
        inside = (row < rows - first_row) & (column < 2 * (columns - first_column))
        tl.store(gate_gradient + line + 2 * first_column + column, both, mask=inside)
    else:
        tl.store(gate_gradient + line + first_column + column, gate_slope, mask=inside)
        tl.store(up_gradient + line + first_column + column, up_slope, mask=inside)


def gated_forward(gate: Tensor, up: Tensor, activation: str, *, config: TileConfig | None = None) -> Tensor:
    """The activation of `gate` times `up`, contiguous. Copies tensors whose last stride is not 1."""
    result = torch.empty_like(gate, memory_format=torch.contiguous_format)
    if result.numel():
        gate, up = as_tiles(gate, up, flat=True)
        _launch_gated(gate, up, result, activation, False, config)
    return result


def gated_packed_forward(
    x: Tensor, activation: str, interleaved: bool, *, config: TileConfig | None = None, out: Tensor | None = None,
    early: bool = False,
) -> Tensor:  # fmt: skip
    """The same from one tensor that contains both factors. Copies x if its last stride is not 1.

    `early`: launched while the kernel that writes x runs.
    """
    result = x.new_empty([*x.shape[:-1], x.shape[-1] // 2]) if out is None else out
    if result.numel():
        _launch_gated(*_halves(as_rows(x), interleaved), result, activation, interleaved, config, early)
    return result


def gated_backward(
    gradient: Tensor, gate: Tensor, up: Tensor, activation: str, *, config: TileConfig | None = None
) -> tuple[Tensor, Tensor]:
    """The gradients of both factors, contiguous. Copies tensors whose last stride is not 1."""
    gate_gradient = torch.empty_like(gate, memory_format=torch.contiguous_format)
    up_gradient = torch.empty_like(up, memory_format=torch.contiguous_format)
    if gate.numel():
        gradient, gate, up = as_tiles(gradient, gate, up, flat=True)
        gradients = gate_gradient.view(gate.shape), up_gradient.view(gate.shape)
        _launch_gated_backward(gradient, gate, up, *gradients, activation, False, config)
    return gate_gradient, up_gradient


def gated_packed_backward(
    gradient: Tensor, x: Tensor, activation: str, interleaved: bool, *, config: TileConfig | None = None
) -> Tensor:
    """The gradient of the tensor that contains both factors, contiguous. Copies tensors whose last stride is not 1."""
    result = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.numel():
        x = as_rows(x)
        factors, gradients = _halves(x, interleaved), _halves(result.view(x.shape), interleaved)
        _launch_gated_backward(as_rows(gradient), *factors, *gradients, activation, interleaved, config)
    return result


def _halves(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    if interleaved:
        return x, x
    half = x.shape[1] // 2
    return x[:, :half], x[:, half:]


def _launch_gated(
    gate: Tensor, up: Tensor, result: Tensor, activation: str, interleaved: bool, config: TileConfig | None,
    early: bool = False,
) -> None:  # fmt: skip
    rows = gate.shape[0]
    columns = gate.shape[1] // (2 if interleaved else 1)
    config = config or tile_config("gated_forward", rows, columns, gate.device)
    block, height = config.block, config.rows
    grid, column_blocks = tile_grid(rows, columns, height, block)
    early = early and can_start_early(gate.device)
    launch(
        gated_kernel, grid,
        gate, up, result, rows, columns, column_blocks, gate.stride(0), up.stride(0),
        activation, interleaved, common_width(columns, gate.stride(0), up.stride(0)), height, block, rows == 1, early,
        warps=config.warps, early=early,
    )  # fmt: skip


def _launch_gated_backward(
    gradient: Tensor, gate: Tensor, up: Tensor, gate_gradient: Tensor, up_gradient: Tensor,
    activation: str, interleaved: bool, config: TileConfig | None,
) -> None:  # fmt: skip
    rows, columns = gradient.shape
    strides = gradient.stride(0), gate.stride(0), up.stride(0), gate_gradient.stride(0)
    config = config or tile_config("gated_backward", rows, columns, gate.device)
    block, height = config.block, config.rows
    grid, column_blocks = tile_grid(rows, columns, height, block)
    launch(
        gated_backward_kernel, grid,
        gradient, gate, up, gate_gradient, up_gradient, rows, columns, column_blocks, *strides,
        activation, interleaved, common_width(columns, *strides), height, block, rows == 1, warps=config.warps,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class DropoutConfig:
    """How many chunks a program has."""

    chunks: int
    warps: int


def dropout_candidates(elements: int) -> list[DropoutConfig]:
    """Configurations worth measuring."""
    return [DropoutConfig(chunks=chunks, warps=warps) for chunks in (1, 2, 4) for warps in (2, 4, 8)]


@triton.jit
def philox_numbers(key, counter, zeros):
    """The four random numbers of each 64-bit counter; `zeros` has as many elements."""
    low = (counter & 0xFFFFFFFF).to(tl.uint32) + zeros
    high = (counter >> 32).to(tl.uint32) + zeros
    return tl.philox(key, low, high, zeros, zeros, _ROUNDS)


@triton.jit
def _read(x, element, elements, WHOLE: tl.constexpr):
    inside = None if WHOLE else element < elements
    return tl.load(x + element, mask=inside, other=None if WHOLE else 0.0).to(tl.float32)


@triton.jit
def _write(values, added, result, element, elements, random, threshold, scale, WHOLE: tl.constexpr):
    # compares unsigned numbers as signed ones: with the highest bit flipped, their order is the same
    keep = (random.to(tl.int32, bitcast=True) ^ _LOWEST) < threshold
    values = tl.where(keep, values * tl.cast(scale, tl.float32), 0.0)
    if added is not None:
        values += added
    tl.store(result + element, values.to(result.dtype.element_ty), mask=None if WHOLE else element < elements)


@triton.jit
def _dropout_chunk(x, residual, result, key, chunk, elements, threshold, scale, WHOLE: tl.constexpr):
    element = chunk * (4 * _QUARTER) + tl.arange(0, _QUARTER)
    values0 = _read(x, element, elements, WHOLE)
    values1 = _read(x, element + _QUARTER, elements, WHOLE)
    values2 = _read(x, element + 2 * _QUARTER, elements, WHOLE)
    values3 = _read(x, element + 3 * _QUARTER, elements, WHOLE)
    added0, added1, added2, added3 = None, None, None, None
    if residual is not None:  # all loads come first: none passes a store
        added0 = _read(residual, element, elements, WHOLE)
        added1 = _read(residual, element + _QUARTER, elements, WHOLE)
        added2 = _read(residual, element + 2 * _QUARTER, elements, WHOLE)
        added3 = _read(residual, element + 3 * _QUARTER, elements, WHOLE)
    # zeros in the layout of the loaded values: each thread computes the random numbers of its own elements, which
    # otherwise would go through shared memory
    zeros = (values0.to(tl.uint32, bitcast=True).to(tl.uint64) >> 32).to(tl.uint32)
    counter = chunk * _QUARTER + tl.arange(0, _QUARTER)
    random0, random1, random2, random3 = philox_numbers(key, counter, zeros)
    _write(values0, added0, result, element, elements, random0, threshold, scale, WHOLE)
    _write(values1, added1, result, element + _QUARTER, elements, random1, threshold, scale, WHOLE)
    _write(values2, added2, result, element + 2 * _QUARTER, elements, random2, threshold, scale, WHOLE)
    _write(values3, added3, result, element + 3 * _QUARTER, elements, random3, threshold, scale, WHOLE)


@triton.jit(do_not_specialize=["threshold"])
def dropout_kernel(x, residual, result, seed, elements, threshold, scale, CHUNKS: tl.constexpr):
    """Dropout of x, plus the residual if there is one. A program has CHUNKS chunks."""
    key = tl.load(seed)
    for number in tl.static_range(CHUNKS):
        chunk = tl.program_id(0).to(tl.int64) * CHUNKS + number
        if (chunk + 1) * (4 * _QUARTER) <= elements:  # without masks, which an odd number of elements has at each one
            _dropout_chunk(x, residual, result, key, chunk, elements, threshold, scale, True)
        else:
            _dropout_chunk(x, residual, result, key, chunk, elements, threshold, scale, False)


def dropout_add(x: Tensor, residual: Tensor, seed: Tensor, p: float, *, config: DropoutConfig | None = None) -> Tensor:
    """Tensors that are not contiguous are copied first."""
    dtype = torch.promote_types(x.dtype, residual.dtype)
    result = torch.empty(x.shape, dtype=dtype, device=x.device)
    _launch_dropout(x.contiguous(), residual.contiguous(), result, seed, p, config)
    return result


def dropout_backward(
    gradient: Tensor, seed: Tensor, p: float, dtype: torch.dtype, *, config: DropoutConfig | None = None
) -> Tensor:
    """The gradient of x; one that is not contiguous is copied first."""
    result = torch.empty(gradient.shape, dtype=dtype, device=gradient.device)
    _launch_dropout(gradient.contiguous(), None, result, seed, p, config)
    return result


def _launch_dropout(
    x: Tensor, residual: Tensor | None, result: Tensor, seed: Tensor, p: float, config: DropoutConfig | None
) -> None:
    elements = x.numel()
    config = config or from_row(tuned("dropout_add", elements, x.device), DropoutConfig)
    config = config or DropoutConfig(chunks=1, warps=4)
    grid = (triton.cdiv(elements, config.chunks * CHUNK), 1, 1)
    arguments = (x, residual, result, seed, elements, signed_threshold(p), keep_scale(p))
    launch(dropout_kernel, grid, *arguments, config.chunks, warps=config.warps)
