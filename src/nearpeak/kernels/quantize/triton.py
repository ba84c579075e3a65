"""Triton kernels of `quantize` and `dequantize`, their launchers and configurations.

A tensor is a sequence of rows, cut into pieces of COLUMNS elements that are numbered through all rows. A program has
several pieces, so that short rows, odd ones and strided ones are all one case.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearpeak.kernels._runtime.launch import launch, next_power_of_2
from nearpeak.kernels._runtime.policy import INTERPRETED
from nearpeak.kernels._runtime.rows import assume_multiple, common_width
from nearpeak.kernels._runtime.tuning import from_row, processors, spread_rows, tuned
from nearpeak.kernels.quantize import scales_shape

MAX_REGISTER_ROW = 16384
"""Elements of a row that a program keeps in registers; longer ones are read twice, the second time from the cache."""
CLAMPS = tl.constexpr(INTERPRETED)
"""A GPU saturates in the conversion to 8 bits; the interpreter does not."""
_MAX_PARTIAL_MAXIMA = 1024
"""Partial maxima of a tensor, all of which each program of the second launch reads."""
_LEAST_ELEMENTS = 256
"""Of a program."""
_Constants = tuple[float, bool]
"""The largest number of the dtype, and whether scales are powers of two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PiecesConfig:
    """Blocks of one row, or whole rows."""

    pieces: int
    """Pieces per program."""
    warps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TilesConfig:
    """Blocks of several rows, one per program."""

    warps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopConfig:
    """Long rows, or a whole tensor, in steps."""

    block: int
    """Elements per step."""
    warps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DequantizeConfig:
    """Pieces to multiply by their scales."""

    elements: int
    """Elements per program."""
    warps: int


QuantizeConfig = PiecesConfig | TilesConfig | LoopConfig


@triton.jit
def _finite_magnitude(x):
    """Absolute values, and 0 for numbers that are not finite."""
    size = tl.abs(x)
    return tl.where(size < float("inf"), size, 0.0)


@triton.jit
def _largest(x):
    """The largest finite magnitude of each row; elements are tested one by one only if some are not finite."""
    largest = tl.max(tl.abs(x), 1)
    if not (tl.max(largest, 0) < float("inf")):
        largest = tl.max(_finite_magnitude(x), 1)
    return largest


@triton.jit
def _scale(largest, LARGEST: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    # rounded as in torch, and not below the smallest normal number, whose inverse is finite
    scale = tl.div_rn(largest, tl.zeros_like(largest) + LARGEST)
    scale = tl.maximum(scale, 1.1754943508222875e-38)
    if POWER_OF_TWO:
        bits = scale.to(tl.int32, bitcast=True)
        scale = ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.where(largest > 0.0, scale, 1.0)


@triton.jit
def _values(x, inverse, LARGEST: tl.constexpr, dtype: tl.constexpr):
    y = x * inverse
    if CLAMPS:  # by comparisons, which keep NaN
        y = tl.where(y > LARGEST, LARGEST, y)
        y = tl.where(y < -LARGEST, -LARGEST, y)
    return y.to(dtype)


@triton.jit
def _inverse(scale):
    return tl.div_rn(tl.zeros_like(scale) + 1.0, scale)


@triton.jit
def locate_pieces(
    columns, stride, per_row, pieces,
    COLUMNS: tl.constexpr, PIECES: tl.constexpr, ONE_ROW: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The pieces of a program, (PIECES,): their numbers, whether they exist, their rows and numbers in the row, the
    offsets to read and write, and their lengths.

    ONE_ROW: all are in one row, so that each program divides only small numbers.
    """
    each = tl.arange(0, PIECES)
    if ONE_ROW:
        programs = (per_row + (PIECES - 1)) // PIECES
        row = tl.program_id(0) // programs
        first = (tl.program_id(0) % programs).to(tl.int64) * PIECES
        own = first + each
        piece = row.to(tl.int64) * per_row + own
        exists = own < per_row
        begin = first * COLUMNS
        left = tl.minimum(tl.maximum(columns - begin, 0), PIECES * COLUMNS).to(tl.int32) - each * COLUMNS
        reads = assume_multiple(row.to(tl.int64) * stride + begin, WIDTH) + each * COLUMNS
        writes = assume_multiple(row.to(tl.int64) * columns + begin, WIDTH) + each * COLUMNS
    else:
        piece = tl.program_id(0).to(tl.int64) * PIECES + each
        row = piece // per_row
        own = piece % per_row
        exists = piece < pieces
        # the rest of the row in 32 bits, and 0 after the last row
        left = tl.where(exists, tl.minimum(columns - own * COLUMNS, COLUMNS), 0).to(tl.int32)
        reads = assume_multiple(row * stride + own * COLUMNS, WIDTH)
        writes = assume_multiple(row * columns + own * COLUMNS, WIDTH)
    return piece, exists, row, own, reads, writes, left


@triton.jit
def pieces_kernel(
    x, values, scales, columns, stride, per_row, pieces,
    LARGEST: tl.constexpr, POWER_OF_TWO: tl.constexpr, COLUMNS: tl.constexpr, PIECES: tl.constexpr,
    ONE_ROW: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    piece, exists, _, _, reads, writes, left = locate_pieces(
        columns, stride, per_row, pieces, COLUMNS, PIECES, ONE_ROW, WIDTH
    )
    column = tl.arange(0, COLUMNS)[None, :]  # (1, COLUMNS)
    inside = column < assume_multiple(left, WIDTH)[:, None]  # (PIECES, COLUMNS)
    source = tl.load(x + reads[:, None] + column, mask=inside, other=0.0).to(tl.float32)
    scale = _scale(_largest(source), LARGEST, POWER_OF_TWO)
    quantized = _values(source, _inverse(scale)[:, None], LARGEST, values.dtype.element_ty)
    tl.store(values + writes[:, None] + column, quantized, mask=inside)
    tl.store(scales + piece, scale, mask=exists)


@triton.jit
def tiles_kernel(
    x, values, scales, rows, columns, stride, down, across,
    LARGEST: tl.constexpr, POWER_OF_TWO: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    begin = (program % across) * COLUMNS
    tile = program // across
    matrix = tile // down
    first = (tile % down) * ROWS
    row = (tl.arange(0, ROWS))[:, None]  # (ROWS, 1)
    column = tl.arange(0, COLUMNS)[None, :]  # (1, COLUMNS)
    inside = (row < rows - first) & (column < columns - begin)
    top = matrix * rows + first
    source = tl.load(x + (top + row) * stride + (begin + column), mask=inside, other=0.0).to(tl.float32)
    scale = _scale(tl.max(_largest(source), 0), LARGEST, POWER_OF_TWO)
    quantized = _values(source, _inverse(scale), LARGEST, values.dtype.element_ty)
    tl.store(values + (top + row) * columns + (begin + column), quantized, mask=inside)
    tl.store(scales + program, scale)


@triton.jit
def long_rows_kernel(
    x, values, scales, columns, stride, LARGEST: tl.constexpr, POWER_OF_TWO: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x += row * stride
    values += row * columns
    column = tl.arange(0, COLUMNS)
    largest = tl.zeros([COLUMNS], tl.float32)
    for begin in range(0, columns, COLUMNS):
        inside = begin + column < columns
        source = tl.load(x + begin + column, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
        largest = tl.maximum(largest, _finite_magnitude(source))
    scale = _scale(tl.max(largest, 0), LARGEST, POWER_OF_TWO)
    inverse = _inverse(scale)
    for begin in range(0, columns, COLUMNS):
        inside = begin + column < columns
        source = tl.load(x + begin + column, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        tl.store(values + begin + column, _values(source, inverse, LARGEST, values.dtype.element_ty), mask=inside)
    tl.store(scales + row, scale)


@triton.jit
def maxima_kernel(x, maxima, columns, stride, per_row, pieces, COLUMNS: tl.constexpr):
    column = tl.arange(0, COLUMNS)
    largest = tl.zeros([COLUMNS], tl.float32)
    # programs read neighbors at the same time, and the end of the tensor last: the second launch starts there
    for number in range(tl.program_id(0), pieces, tl.num_programs(0)):
        piece = tl.cast(number, tl.int64)
        begin = (piece % per_row) * COLUMNS
        inside = column < tl.minimum(columns - begin, COLUMNS).to(tl.int32)
        source = tl.load(x + (piece // per_row) * stride + begin + column, mask=inside, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, _finite_magnitude(source))
    tl.store(maxima + tl.program_id(0), tl.max(largest, 0))


@triton.jit
def whole_kernel(
    x, values, scales, maxima, parts, columns, stride, per_row, pieces,
    LARGEST: tl.constexpr, POWER_OF_TWO: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    part = tl.arange(0, PARTS)
    scale = _scale(tl.max(tl.load(maxima + part, mask=part < parts, other=0.0), 0), LARGEST, POWER_OF_TWO)
    piece = pieces - 1 - tl.program_id(0).to(tl.int64)  # backward: the end is still in the cache
    row = piece // per_row
    begin = (piece % per_row) * COLUMNS
    column = tl.arange(0, COLUMNS)
    inside = column < tl.minimum(columns - begin, COLUMNS).to(tl.int32)
    source = tl.load(x + row * stride + begin + column, mask=inside, other=0.0).to(tl.float32)
    quantized = _values(source, _inverse(scale), LARGEST, values.dtype.element_ty)
    tl.store(values + row * columns + begin + column, quantized, mask=inside)
    if piece == 0:
        tl.store(scales, scale)


@triton.jit
def dequantize_kernel(
    values, scales, result, columns, stride, per_row, pieces, matrix, down, across, rows_of_scale,
    BY_PIECE: tl.constexpr, COLUMNS: tl.constexpr, PIECES: tl.constexpr, ONE_ROW: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    _, exists, row, own, reads, writes, left = locate_pieces(
        columns, stride, per_row, pieces, COLUMNS, PIECES, ONE_ROW, WIDTH
    )
    column = tl.arange(0, COLUMNS)[None, :]  # (1, COLUMNS)
    inside = column < assume_multiple(left, WIDTH)[:, None]  # (PIECES, COLUMNS)
    of_scale = ((row // matrix) * down + (row % matrix) // rows_of_scale) * across
    if BY_PIECE:  # otherwise a row has one scale
        of_scale += own
    scale = tl.load(scales + of_scale + tl.zeros([PIECES], tl.int32), mask=exists, other=1.0)
    source = tl.load(values + reads[:, None] + column, mask=inside, other=0.0).to(tl.float32)
    product = source * scale.to(tl.float32)[:, None]
    tl.store(result + writes[:, None] + column, product.to(result.dtype.element_ty), mask=inside)


def quantize(
    x: Tensor, rows: int, columns: int, dtype: torch.dtype, power_of_two: bool, *, config: QuantizeConfig | None = None
) -> tuple[Tensor, Tensor]:
    """Values and scales of blocks of `rows` and `columns`; 0 stands for all. Copies `x` if its rows are not dense."""
    values = torch.empty(x.shape, dtype=dtype, device=x.device)
    scales = torch.empty(scales_shape(x.shape, rows, columns), dtype=torch.float32, device=x.device)
    if not x.numel():
        return values, scales.fill_(1.0)
    lines = _dense_rows(x)
    constants = torch.finfo(dtype).max, power_of_two
    if rows == 0:
        assert config is None or isinstance(config, LoopConfig)
        _quantize_tensor(lines, values, scales, constants, config)
    elif rows > 1:
        assert config is None or isinstance(config, TilesConfig)
        _quantize_tiles(x.shape[-2], lines, values, scales, rows, columns, constants, config)
    elif columns == 0 and lines.shape[1] > MAX_REGISTER_ROW:
        assert config is None or isinstance(config, LoopConfig)
        _quantize_long_rows(lines, values, scales, constants, config)
    else:
        assert config is None or isinstance(config, PiecesConfig)
        _quantize_pieces(lines, values, scales, columns or next_power_of_2(lines.shape[1]), constants, config)
    return values, scales


def _quantize_pieces(
    lines: Tensor, values: Tensor, scales: Tensor, columns: int, constants: _Constants, config: PiecesConfig | None
) -> None:
    if lines.shape[1] % columns == 0:
        lines = _flat(lines)
    size = lines.shape[1]
    per_row = triton.cdiv(size, columns)
    pieces = len(lines) * per_row
    config = config or from_row(tuned("quantize_pieces", columns, lines.device), PiecesConfig)
    config = config or heuristic(columns, pieces, processors(lines.device))
    one_row, programs = _programs(len(lines), per_row, config.pieces)
    launch(
        pieces_kernel, (programs, 1, 1), lines, values, scales, size, lines.stride(0), per_row, pieces, *constants,
        columns, config.pieces, one_row, common_width(size, lines.stride(0), columns), warps=config.warps,
    )  # fmt: skip


def _programs(rows: int, per_row: int, pieces: int) -> tuple[bool, int]:
    """Whether the pieces of a program are all in one row, if that leaves few of them empty; and how many programs."""
    one_row = rows == 1 or per_row % pieces == 0 or per_row > 8 * pieces
    return one_row, rows * triton.cdiv(per_row, pieces) if one_row else triton.cdiv(rows * per_row, pieces)


def _quantize_tiles(
    matrix: int, lines: Tensor, values: Tensor, scales: Tensor, rows: int, columns: int, constants: _Constants,
    config: TilesConfig | None,
) -> None:  # fmt: skip
    config = config or from_row(tuned("quantize_tiles", rows * columns, lines.device), TilesConfig)
    config = config or TilesConfig(warps=max(1, rows * columns // 2048))
    down, across = triton.cdiv(matrix, rows), triton.cdiv(lines.shape[1], columns)
    launch(
        tiles_kernel, (len(lines) // matrix * down * across, 1, 1), lines, values, scales, matrix, lines.shape[1],
        lines.stride(0), down, across, *constants, rows, columns, warps=config.warps,
    )  # fmt: skip


def _quantize_long_rows(
    lines: Tensor, values: Tensor, scales: Tensor, constants: _Constants, config: LoopConfig | None
) -> None:
    size = lines.shape[1]
    config = config or from_row(tuned("quantize_long_rows", size, lines.device), LoopConfig)
    config = config or LoopConfig(block=8192, warps=16)
    launch(
        long_rows_kernel, (len(lines), 1, 1), lines, values, scales, size, lines.stride(0), *constants,
        config.block, warps=config.warps,
    )  # fmt: skip


def _quantize_tensor(
    lines: Tensor, values: Tensor, scales: Tensor, constants: _Constants, config: LoopConfig | None
) -> None:
    """One scale for all: a launch for partial maxima, and one that reduces these and writes the values."""
    lines = _flat(lines)
    size = lines.shape[1]
    config = config or from_row(tuned("quantize_whole", lines.numel(), lines.device), LoopConfig)
    config = config or LoopConfig(block=8192, warps=8)
    block = min(config.block, next_power_of_2(size))
    per_row = triton.cdiv(size, block)
    pieces = len(lines) * per_row
    parts = min(pieces, _MAX_PARTIAL_MAXIMA)
    maxima = torch.empty(parts, dtype=torch.float32, device=lines.device)
    sizes = size, lines.stride(0), per_row, pieces
    launch(maxima_kernel, (parts, 1, 1), lines, maxima, *sizes, block, warps=config.warps)
    launch(
        whole_kernel, (pieces, 1, 1), lines, values, scales, maxima, parts, *sizes, *constants, block,
        _MAX_PARTIAL_MAXIMA, warps=config.warps,
    )  # fmt: skip


def dequantize(
    values: Tensor, scales: Tensor, rows: int, columns: int, dtype: torch.dtype, *,
    config: DequantizeConfig | None = None,
) -> Tensor:  # fmt: skip
    """Values times their scales. Copies values whose rows are not dense, and scales that are not contiguous."""
    result = torch.empty(values.shape, dtype=dtype, device=values.device)
    if not values.numel():
        return result
    lines = _dense_rows(values)
    if rows == 0 or (rows == 1 and columns and lines.shape[1] % columns == 0):
        lines = _flat(lines)
    count, size = lines.shape
    matrix = values.shape[-2] if rows > 1 else count
    config = config or from_row(tuned("dequantize", size, values.device), DequantizeConfig)
    config = config or DequantizeConfig(elements=4096, warps=8)
    block = min(next_power_of_2(size), columns or 1024)
    per_row = triton.cdiv(size, block)
    pieces = max(1, config.elements // block)
    one_row, programs = _programs(count, per_row, pieces)
    launch(
        dequantize_kernel, (programs, 1, 1), lines, scales.contiguous(), result, size, lines.stride(0), per_row,
        count * per_row, matrix, triton.cdiv(matrix, rows or matrix), triton.cdiv(size, columns or size),
        rows or matrix, columns == block, block, pieces, one_row, common_width(size, lines.stride(0), block),
        warps=config.warps,
    )  # fmt: skip
    return result


def _dense_rows(x: Tensor) -> Tensor:
    """A tensor as a matrix of its rows, each dense: a view if possible. One number is a row."""
    x = x.reshape(1, 1) if x.dim() == 0 else x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def _flat(lines: Tensor) -> Tensor:
    """All rows as one if there are no gaps between them."""
    return lines.view(1, -1) if lines.is_contiguous() else lines


def heuristic(columns: int, pieces: int, processors: int) -> PiecesConfig:
    """Some thousand elements per program, at most 32 per thread; of few pieces fewer, down to a load of a warp."""
    elements = max(columns, 4096)
    warps = min(16, max(4, elements // 1024))
    together, warps = spread_rows(elements // columns, warps, columns, pieces, processors)
    return PiecesConfig(pieces=max(together, _LEAST_ELEMENTS // columns), warps=warps)


def candidates(columns: int) -> list[PiecesConfig]:
    """Configurations worth measuring for "quantize_pieces", by the columns of a block or of a row, a power of 2."""
    return [
        PiecesConfig(pieces=elements // columns, warps=warps)
        for elements in (1024, 2048, 4096, 8192, 16384)
        for warps in (1, 2, 4, 8, 16, 32)
        if elements >= columns and 8 <= elements // (32 * warps) <= 64
    ]


def tiles_candidates() -> list[TilesConfig]:
    return [TilesConfig(warps=warps) for warps in (4, 8, 16, 32)]


def loop_candidates() -> list[LoopConfig]:
    return [LoopConfig(block=size, warps=warps) for size, warps in _steps()]


def dequantize_candidates() -> list[DequantizeConfig]:
    return [DequantizeConfig(elements=size, warps=warps) for size, warps in _steps()]


def _steps() -> list[tuple[int, int]]:
    """Elements and warps, with 8 to 64 elements per thread."""
    sizes = (1024, 2048, 4096, 8192, 16384)
    return [(size, warps) for size in sizes for warps in (4, 8, 16, 32) if 8 <= size // (32 * warps) <= 64]
