"""Triton kernels of `transpose_copy`, the launcher and its configurations.

A program takes a tile: a thread loads several neighbors of a row at once, and stores several neighbors of a column at
once; between the two, the tile goes through shared memory. For numbers of 2 bytes Triton uses the instruction that
transposes 8 x 8 of them on the way. Numbers of 1 byte are combined from two rows, and go the same way in pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearpeak.kernels._runtime.launch import launch, next_power_of_2
from nearpeak.kernels._runtime.rows import common_width, merge_dimensions
from nearpeak.kernels._runtime.tuning import from_row, tuned

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Numbers are moved as integers of their size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransposeConfig:
    """The tile of a program."""

    rows: int
    columns: int
    group: int
    """Rows of tiles that are processed together, to be near each other in the source and in the result."""
    warps: int


@triton.jit
def tile_of_program(row_blocks, column_blocks, GROUP: tl.constexpr):
    """The batch, and the row and column of a tile; GROUP rows of tiles are processed together."""
    program = tl.program_id(0)
    tiles = row_blocks * column_blocks
    batch = program // tiles
    program = program % tiles
    group = program // (GROUP * column_blocks)
    first = group * GROUP
    height = tl.minimum(row_blocks - first, GROUP)
    program = program % (GROUP * column_blocks)
    return batch.to(tl.int64), (first + program % height).to(tl.int64), (program // height).to(tl.int64)


@triton.jit
def transpose_kernel(
    x, result, rows, columns, row_blocks, column_blocks, inner, outer_stride, inner_stride, row_stride, column_stride,
    ROW_WIDTH: tl.constexpr, COLUMN_WIDTH: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    rows, columns = rows // WIDTH * WIDTH, columns // WIDTH * WIDTH
    outer_stride, inner_stride = outer_stride // WIDTH * WIDTH, inner_stride // WIDTH * WIDTH
    row_stride, column_stride = row_stride // ROW_WIDTH * ROW_WIDTH, column_stride // COLUMN_WIDTH * COLUMN_WIDTH
    batch, row_block, column_block = tile_of_program(row_blocks, column_blocks, GROUP)
    first_row, first_column = row_block * ROWS, column_block * COLUMNS
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)  # (ROWS,), (COLUMNS,)
    is_row, is_column = row < rows - first_row, column < columns - first_column
    x += (batch // inner) * outer_stride + (batch % inner) * inner_stride
    x += first_row * row_stride + first_column * column_stride
    at = row.to(tl.int64)[:, None] * row_stride + column.to(tl.int64)[None, :] * column_stride
    values = tl.load(x + at, mask=is_row[:, None] & is_column[None, :])
    result += batch * rows * columns + first_column * rows + first_row
    at = column.to(tl.int64)[:, None] * rows + row[None, :]
    tl.store(result + at, tl.trans(values), mask=is_column[:, None] & is_row[None, :])


@triton.jit
def transpose_pairs_kernel(
    x, result, rows, columns, row_blocks, column_blocks, inner, outer_stride, inner_stride, row_stride,
    ROW_WIDTH: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Transposes 1-byte numbers as pairs in 2 bytes.

    All sizes and strides count pairs, `rows` and ROWS pairs of rows; but `row_stride` leads from one row to the next.
    """
    rows, columns = rows // WIDTH * WIDTH, columns // WIDTH * WIDTH
    outer_stride, inner_stride = outer_stride // WIDTH * WIDTH, inner_stride // WIDTH * WIDTH
    row_stride = row_stride // ROW_WIDTH * ROW_WIDTH
    batch, row_block, column_block = tile_of_program(row_blocks, column_blocks, GROUP)
    first_row, first_column = row_block * ROWS, column_block * COLUMNS
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)  # (ROWS,), (COLUMNS,)
    is_row, is_column = row < rows - first_row, column < columns - first_column
    inside = is_row[:, None] & is_column[None, :]
    x += (batch // inner) * outer_stride + (batch % inner) * inner_stride
    x += 2 * first_row * row_stride + first_column
    at = row.to(tl.int64)[:, None] * 2 * row_stride + column[None, :]
    upper = tl.load(x + at, mask=inside, other=0)
    lower = tl.load(x + row_stride + at, mask=inside, other=0)
    left = (upper & 0xFF) | (lower << 8)
    right = ((upper >> 8) & 0xFF) | (lower & -256)
    inside = is_column[:, None] & is_row[None, :]
    result += batch * 2 * columns * rows + 2 * first_column * rows + first_row
    at = column.to(tl.int64)[:, None] * 2 * rows + row[None, :]
    tl.store(result + at, tl.trans(left), mask=inside)
    tl.store(result + rows + at, tl.trans(right), mask=inside)


def forward(x: Tensor, *, config: TransposeConfig | None = None) -> Tensor:
    """A contiguous copy of x with its last two dimensions swapped.

    Copies x first if more than two strides lead through the dimensions before these.
    """
    *batch, rows, columns = x.shape
    result = x.new_empty([*batch, columns, rows])
    if not x.numel():
        return result
    integer = INTEGERS[x.element_size()]
    x = x.resolve_neg()  # the imaginary part of a conjugate has other signs than its memory
    batches = merge_dimensions(x.shape[:-2], x.stride()[:-2])
    if len(batches) > 2:
        x = x.contiguous()
        batches = [(x.numel() // (rows * columns), rows * columns)]
    (outer, outer_stride), (inner, inner_stride) = [(1, 0)] * (2 - len(batches)) + batches
    row_stride, column_stride = x.stride(-2), x.stride(-1)
    row = tuned(f"transpose_{x.element_size()}", min(rows, columns), x.device)
    config = config or from_row(row, TransposeConfig) or heuristic(rows, columns, x.element_size())
    source, target = x.view(integer), result.view(integer)
    strides = outer_stride, inner_stride, row_stride
    pairs = column_stride == 1 and _are_pairs(source, rows, columns, *strides)
    height, width = config.rows, config.columns
    if pairs:
        source, target = _as_pairs(source), _as_pairs(target)
        rows, columns, height, width = rows // 2, columns // 2, height // 2, width // 2
        outer_stride, inner_stride, row_stride = outer_stride // 2, inner_stride // 2, row_stride // 2
    row_blocks, column_blocks = triton.cdiv(rows, height), triton.cdiv(columns, width)
    grid = (row_blocks * column_blocks * outer * inner, 1, 1)
    sizes = (rows, columns, row_blocks, column_blocks, inner, outer_stride, inner_stride, row_stride)
    constants = (common_width(rows, columns, outer_stride, inner_stride), height, width, config.group)
    row_width, column_width = common_width(row_stride), common_width(column_stride)
    if pairs:
        launch(transpose_pairs_kernel, grid, source, target, *sizes, row_width, *constants, warps=config.warps)
    else:
        launch(
            transpose_kernel, grid, source, target, *sizes, column_stride, row_width, column_width, *constants,
            warps=config.warps,
        )  # fmt: skip
    return result


def _are_pairs(source: Tensor, *sizes: int) -> bool:
    """Whether numbers have 1 byte, all rows start at even addresses, and sizes and strides are even."""
    return source.element_size() == 1 and source.data_ptr() % 2 == 0 and not any(size % 2 for size in sizes)


def _as_pairs(numbers: Tensor) -> Tensor:
    """The address, as one of numbers of 2 bytes; strides are passed separately."""
    return numbers.as_strided((2,), (1,)).view(torch.int16)


def heuristic(rows: int, columns: int, size: int) -> TransposeConfig:
    """Tiles whose rows and columns have 128 to 256 bytes."""
    side = {1: 128, 2: 64, 4: 32, 8: 32}[size]
    height, width = (min(side, max(16, next_power_of_2(length))) for length in (rows, columns))
    return TransposeConfig(rows=height, columns=width, group=8, warps=4)


def candidates(size: int, element_size: int = 2) -> list[TransposeConfig]:
    """Configurations worth measuring for matrices whose shorter side has this length."""
    longest = max(16, next_power_of_2(size))
    sides = {1: (64, 128, 256), 2: (32, 64, 128), 4: (32, 64, 128), 8: (16, 32, 64)}[element_size]
    configs: list[TransposeConfig] = []
    for height in sides:
        for width in sides:
            rows, columns = min(height, longest), min(width, longest)
            for warps in (2, 4, 8):
                if not 32 <= rows * columns * element_size // (32 * warps) <= 128:
                    continue
                for group in (1, 8) if height == width else (8,):
                    config = TransposeConfig(rows=rows, columns=columns, group=group, warps=warps)
                    if config not in configs:
                        configs.append(config)
    return configs
