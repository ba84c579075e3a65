"""The launchers of `grouped_gemm` and its portable Triton kernels.

How many rows an expert has is known on the device only. `group_rows_kernel` therefore writes a list of row tiles first, and
programs iterate over as many as there are; `groups_size` in `gemm.grouped` describes the list.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearpeak.kernels._runtime import gluon
from nearpeak.kernels._runtime.grid_counters import grid_counters
from nearpeak.kernels._runtime.launch import launch, next_power_of_2
from nearpeak.kernels._runtime.policy import INTERPRETED
from nearpeak.kernels._runtime.rows import as_rows
from nearpeak.kernels._runtime.tuning import processors, tuned
from nearpeak.kernels.gemm.grouped import count_rows, entries_offset, groups_size
from nearpeak.kernels.gemm.triton import compensated_dot
from nearpeak.kernels.pointwise.triton import activate

TILES_PER_GROUP = tl.constexpr(8)
"""Tiles of rows of one expert that are taken by the same columns, one after another, while the matrix is in cache."""
ENTRY_SIZE = tl.constexpr(8)
"""Numbers of an entry of the list: 5 are used, and no entry lies on two lines of the cache."""
SCALE_BLOCK = tl.constexpr(128)
"""Columns and rows of a matrix in 8 bits, and columns of a row, that share a scale."""
WIDEN_FP8 = tl.constexpr(INTERPRETED)
"""The interpreter multiplies no numbers of 8 bits."""


@triton.jit
def group_rows_kernel(counts, groups, experts, rows, entries, HEIGHT: tl.constexpr, EXPERTS: tl.constexpr):
    """Where the rows of one expert begin, and its tiles; the one behind the last has the rows of nobody."""
    expert = tl.program_id(0)
    at = tl.arange(0, EXPERTS)
    given = tl.load(counts + at, mask=at < experts, other=0).to(tl.int32)
    given = tl.maximum(given, 0)
    ends = tl.minimum(tl.cumsum(given, 0), rows)
    starts = tl.minimum(ends, tl.cumsum(given, 0) - given)
    begin = tl.max(tl.where(at < expert, ends, 0), 0)
    end = tl.max(tl.where(at == expert, ends, 0), 0)
    if expert == experts:
        end = rows
    tl.store(groups + expert, begin)
    first = tl.sum(tl.where(at < expert, tl.cdiv(ends - starts, HEIGHT), 0), 0)
    own = tl.cdiv(end - begin, HEIGHT)
    number = tl.where(expert == experts, -1, expert)
    if expert == experts:
        tl.store(groups + experts + 1, first + own)
    for base in range(0, own, 32):
        tile = base + tl.arange(0, 32)[:, None]
        leader = tile // TILES_PER_GROUP * TILES_PER_GROUP
        what = tl.arange(0, ENTRY_SIZE)[None, :]
        value = tl.where(what == 0, number, tl.zeros([32, ENTRY_SIZE], tl.int32))
        value = tl.where(what == 1, first + leader, value)
        value = tl.where(what == 2, tl.minimum(own - leader, TILES_PER_GROUP), value)
        value = tl.where(what == 3, begin + leader * HEIGHT, value)
        value = tl.where(what == 4, end, value)
        tl.store(groups + entries + (first + tile) * ENTRY_SIZE + what, value, mask=tile < own)


@triton.jit
def find_tile(groups, tile, column_tiles, entries, HEIGHT: tl.constexpr):
    """The expert of a tile, -1 for nobody, its first row, where the rows of the expert end, and its columns."""
    entry = groups + entries + tile // column_tiles * ENTRY_SIZE
    expert = tl.load(entry)
    leader = tl.load(entry + 1)
    count = tl.load(entry + 2)
    row = tl.load(entry + 3)
    end = tl.load(entry + 4)
    place = tile - leader * column_tiles
    return expert, row + place % count * HEIGHT, end, place // count


@triton.jit
def _dot(given, factors, total):
    if WIDEN_FP8 and given.dtype.primitive_bitwidth == 8:
        given = given.to(tl.float32)
        factors = factors.to(tl.float32)
    return tl.dot(given, factors, total)


@triton.jit
def _dot_add(given, factors, total, rest):
    """The product added to the sum, and the rest, which sums of float32 alone have."""
    if given.dtype == tl.float32:
        total, rest = compensated_dot(given, factors, total, rest)
    else:
        total = _dot(given, factors, total)
    return total, rest


@triton.jit
def _load_columns(pointer, column, columns, at, depth):
    return tl.load(pointer, mask=(at < depth)[:, None] & (column < columns)[None, :], other=0.0)


@triton.jit
def grouped_gemm_kernel(
    rows, sources, weight, groups, result, kept, row_scales, weight_scales, experts, columns, depth, entries,
    row_stride, expert_stride, column_stride, depth_stride, scale_row_stride, scale_expert_stride, scale_column_stride,
    NAME: tl.constexpr, SCALES: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Tiles of the result. NAME is an activation, where the result is that of the first columns times the second.

    `sources`, if any, has for each row which of `rows` it is, and with it that of `row_scales`.

    SCALES: "" for none, "whole" for one of each row and each expert, "blocks" for one of each 128 of the depth, of a
    row, and of 128 columns of a matrix.
    """
    column_tiles = tl.cdiv(columns, WIDTH)
    tiles = tl.load(groups + experts + 1) * column_tiles
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        expert, first, end, column_tile = find_tile(groups, tile, column_tiles, entries, HEIGHT)
        row = first + tl.arange(0, HEIGHT)
        column = column_tile * WIDTH + tl.arange(0, WIDTH)
        at = tl.arange(0, DEPTH)
        source = row
        if sources is not None:
            source = tl.load(sources + row, mask=row < end, other=0)
        given = rows + (source.to(tl.int64) * row_stride)[:, None] + at[None, :]
        own = weight + tl.maximum(expert, 0).to(tl.int64) * expert_stride
        matrix = own + at.to(tl.int64)[:, None] * depth_stride + (column.to(tl.int64) * column_stride)[None, :]
        second = matrix + tl.cast(columns, tl.int64) * column_stride
        total = tl.zeros([HEIGHT, WIDTH], tl.float32)
        other = tl.zeros([HEIGHT, WIDTH], tl.float32)
        rest = tl.zeros([HEIGHT, WIDTH], tl.float32)
        other_rest = tl.zeros([HEIGHT, WIDTH], tl.float32)
        for begin in range(0, tl.where(expert < 0, 0, depth), DEPTH):
            left = depth - begin
            values = tl.load(given, mask=(row < end)[:, None] & (at < left)[None, :], other=0.0)
            factors = _load_columns(matrix, column, columns, at, left)
            if SCALES == "blocks":
                by_row = tl.load(
                    row_scales + source.to(tl.int64) * scale_row_stride + begin // SCALE_BLOCK, mask=row < end
                )
                own_scales = weight_scales + expert.to(tl.int64) * scale_expert_stride + begin // SCALE_BLOCK
                by_column = tl.load(own_scales + column // SCALE_BLOCK * scale_column_stride, mask=column < columns)
                part = _dot(values, factors, tl.zeros([HEIGHT, WIDTH], tl.float32))
                total += part * by_row[:, None] * by_column[None, :]
            else:
                total, rest = _dot_add(values, factors, total, rest)
            if NAME != "":
                factors = _load_columns(second, column, columns, at, left)
                if SCALES == "blocks":
                    behind = (column + columns) // SCALE_BLOCK * scale_column_stride
                    by_column = tl.load(own_scales + behind, mask=column < columns)
                    part = _dot(values, factors, tl.zeros([HEIGHT, WIDTH], tl.float32))
                    other += part * by_row[:, None] * by_column[None, :]
                else:
                    other, other_rest = _dot_add(values, factors, other, other_rest)
            given += DEPTH
            matrix += DEPTH * depth_stride
            second += DEPTH * depth_stride
        inside = (row < end)[:, None] & (column < columns)[None, :]
        if SCALES == "whole":
            scale = tl.load(row_scales + source.to(tl.int64) * scale_row_stride, mask=row < end, other=0.0)
            scale *= tl.load(weight_scales + tl.maximum(expert, 0) * scale_expert_stride)
            total *= scale[:, None]
            other *= scale[:, None]
        if NAME != "":
            if kept is not None:
                line = kept + (row.to(tl.int64) * 2 * columns)[:, None] + column[None, :]
                tl.store(line, total.to(result.dtype.element_ty), mask=inside)
                tl.store(line + columns, other.to(result.dtype.element_ty), mask=inside)
            total = activate(total, NAME) * other
        place = result + (row.to(tl.int64) * columns)[:, None] + column[None, :]
        tl.store(place, total.to(result.dtype.element_ty), mask=inside)


@triton.jit
def grouped_weight_gradient_kernel(
    gradient, rows, sources, groups, result, experts, columns, depth, gradient_stride, row_stride,
    GATHERED: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The gradient of matrices: of each expert, the gradients of its rows by the rows. Zeros for one without rows.

    GATHERED, "gradient" or "rows", are those that `sources` name.
    """
    down = tl.cdiv(columns, COLUMNS)
    across = tl.cdiv(depth, DEPTH)
    for tile in range(tl.program_id(0), experts * down * across, tl.num_programs(0)):
        expert = tile // (down * across)
        column = tile % (down * across) // across * COLUMNS + tl.arange(0, COLUMNS)
        at = tile % across * DEPTH + tl.arange(0, DEPTH)
        begin = tl.load(groups + expert)
        end = tl.load(groups + expert + 1)
        total = tl.zeros([COLUMNS, DEPTH], tl.float32)
        rest = tl.zeros([COLUMNS, DEPTH], tl.float32)
        for first in range(begin, end, ROWS):
            row = first + tl.arange(0, ROWS)
            source = row
            if GATHERED != "":
                source = tl.load(sources + row, mask=row < end, other=0)
            by_row = (source if GATHERED == "gradient" else row).to(tl.int64) * gradient_stride
            upstream = gradient + by_row[:, None] + column[None, :]
            given = rows + ((source if GATHERED == "rows" else row).to(tl.int64) * row_stride)[:, None] + at[None, :]
            inside = (row < end)[:, None]
            one = tl.load(upstream, mask=inside & (column < columns)[None, :], other=0.0)
            other = tl.load(given, mask=inside & (at < depth)[None, :], other=0.0)
            total, rest = _dot_add(tl.trans(one), other, total, rest)
        place = result + ((expert.to(tl.int64) * columns + column) * depth)[:, None] + at[None, :]
        inside = (column < columns)[:, None] & (at < depth)[None, :]
        tl.store(place, total.to(result.dtype.element_ty), mask=inside)


SM90_HEIGHT = 128
"""Rows of a tile, of which each of two warpgroups has half."""
_WARPGROUP_ROWS = 64
_SM90_DEPTH = 64
SM90_CONFIGS: tuple[dict[str, int], ...] = (
    {"width": 256, "stages": 4, "buffers": 1},
    {"width": 256, "stages": 3, "buffers": 2},
    {"width": 128, "stages": 6, "buffers": 2},
)
"""What is worth measuring: columns of a tile, slots of the ring, and halves of tiles that each warpgroup has on their
way out. The first is for sizes at which nobody measured. In tables the size is how many rows an expert has on average.

By arithmetic, with 128 experts, 32,768 rows and 1,536 columns, tiles that are not full and programs that wait for the
last one leave the first two with 1.16 times the work of the rows, whether experts are drawn evenly or by Beta(1, 5). If
programs took tiles in turns, that were 1.29. Tiles with rows as columns of products, of 256 rows and up to 320 at an
expert's end, were 1.11 and 1.29, and on an H200 no faster in the former case and 13 % slower in the latter."""
SM90_GRADIENT_CONFIGS: tuple[dict[str, int], ...] = (
    {"width": 256, "depth": 32, "stages": 6},
    {"width": 256, "depth": 64, "stages": 3},
)
"""The same of the gradient of matrices; a step goes over so many rows. Steps of few rows waste less at an expert's end:
566 TFLOP/s and not 522 with 32,768 rows that 128 experts were drawn for evenly."""
_SM90_REGISTERS = 168
"""Of a thread, before warps that multiply take more from the one that loads."""
_FP8_WIDTH = 128
_FP8_DEPTH = 128
_FP8_STAGES = 5
_MOST_ROWS = 2**30
"""What the kernel of the gradient takes for the number of rows."""
_ALIGNED_BYTES = 16


def _is_copyable(x: Tensor) -> bool:
    """Whether tiles of a tensor can be copied by one instruction."""
    return (
        x.stride(-1) == 1
        and x.data_ptr() % _ALIGNED_BYTES == 0
        and 0 < max(x.shape) < 2**31
        and all(stride > 0 and stride * x.element_size() % _ALIGNED_BYTES == 0 for stride in x.stride()[:-1])
    )


def can_gather_sm90(tokens: Tensor) -> bool:
    """Whether rows are copied from wherever they are: whole pieces of 16 bytes, and places that are 32 bits long."""
    return tokens.shape[1] * tokens.element_size() % _ALIGNED_BYTES == 0 and tokens.shape[0] * tokens.stride(0) < 2**31


def takes_sm90(rows: Tensor, weight: Tensor, height: int, transposed: bool, gated: bool) -> bool:
    """Whether these kernels are for a product, on its device."""
    columns = weight.shape[2 if transposed else 1] // (2 if gated else 1)
    return (
        gluon.runs_on(rows.device)
        and height == SM90_HEIGHT
        and rows.dtype in (torch.bfloat16, torch.float16)
        and rows.shape[1] > 0
        and columns * rows.element_size() % _ALIGNED_BYTES == 0
        and _is_copyable(rows)
        and (_is_copyable(weight) or (not gated and _is_copyable(weight.mT)))
    )


def launch_sm90(
    rows: Tensor, weight: Tensor, groups: Tensor, result: Tensor, kept: Tensor | None, transposed: bool,
    activation: str, config: dict[str, int] | None = None, sources: Tensor | None = None,
) -> None:  # fmt: skip
    """Writes the products of rows, and with an activation what it is taken of where that is to be kept.

    With `sources` a product's row is the one that it names, and there are as many products as sources.
    """
    from nearpeak.kernels.gemm.grouped_sm90 import grouped_gemm_sm90_kernel

    name = "grouped_product_hopper" + ("_gated" if activation else "")
    number = result.shape[0]
    config = config or tuned(name, number // weight.shape[0], rows.device) or SM90_CONFIGS[0]
    width = config["width"]
    experts, columns = weight.shape[0], result.shape[1]
    along = (weight.stride(-1) == 1) != transposed
    matrices = weight if weight.stride(-1) == 1 else weight.mT
    block = [1, width, _SM90_DEPTH] if along else [1, _SM90_DEPTH, width]
    if activation:  # the same columns of gate and up
        matrices, block = matrices.unflatten(1, (2, columns)), [1, 2, width // 2, _SM90_DEPTH]
    column_tiles = triton.cdiv(columns, width // 2 if activation else width)
    tiles = (number // SM90_HEIGHT + experts + 1) * column_tiles
    written = _tile_descriptor(result, 1, width // 2)
    launch(
        grouped_gemm_sm90_kernel, (min(processors(rows.device), tiles), 1, 1), grid_counters(1, rows.device),
        groups, result, kept, None if sources is None else rows, sources,
        gluon.descriptor(rows, [_WARPGROUP_ROWS, _SM90_DEPTH]), gluon.descriptor(matrices, block), written,
        written if kept is None else _tile_descriptor(kept, 2, width // 2),
        experts, columns, rows.shape[1], entries_offset(experts), column_tiles, rows.stride(0),
        activation, along, width, _SM90_DEPTH, config["stages"], config["buffers"],
        warps=4, registers=_SM90_REGISTERS,
    )  # fmt: skip


def _tile_descriptor(x: Tensor, parts: int, columns: int) -> object:
    """Tiles of 64 rows and some columns of the parts that rows consist of."""
    return gluon.descriptor(x.view(x.shape[0], parts, -1).transpose(0, 1), [1, _WARPGROUP_ROWS, columns])


def takes_fp8_sm90(rows: Tensor, weight: Tensor, height: int, dtype: torch.dtype, activation: str) -> bool:
    """Whether the kernel for numbers of 8 bits is for a product, on its device."""
    columns = weight.shape[1] // (2 if activation else 1)
    return (
        gluon.runs_on(rows.device)
        and height == SM90_HEIGHT
        and dtype in (torch.bfloat16, torch.float16)
        and rows.shape[1] > 0
        and columns % (_FP8_WIDTH // 2 if activation else 8) == 0  # halves of tiles are within a block
        and _is_copyable(rows)
        and _is_copyable(weight)
    )


def launch_fp8_sm90(
    rows: Tensor, weight: Tensor, row_scales: Tensor, weight_scales: Tensor, groups: Tensor, result: Tensor,
    activation: str, sources: Tensor | None = None,
) -> None:  # fmt: skip
    """Writes the products of rows and matrices of 8 bits; with `sources` of the rows that they name."""
    from nearpeak.kernels.gemm.grouped_sm90 import grouped_gemm_fp8_sm90_kernel

    experts, columns = weight.shape[0], result.shape[1]
    chunk = _FP8_WIDTH // 2 if activation else _FP8_WIDTH
    block = [1, chunk, _FP8_DEPTH]
    if activation:
        weight, block = weight.unflatten(1, (2, columns)), [1, 2, chunk, _FP8_DEPTH]
    column_tiles = triton.cdiv(columns, chunk)
    programs = min(processors(rows.device), (result.shape[0] // SM90_HEIGHT + experts + 1) * column_tiles)
    blocks = weight_scales.dim() == 3
    launch(
        grouped_gemm_fp8_sm90_kernel, (programs, 1, 1), grid_counters(1, rows.device), groups, result, row_scales,
        weight_scales, None if sources is None else rows, sources,
        gluon.descriptor(rows, [_WARPGROUP_ROWS, _FP8_DEPTH]), gluon.descriptor(weight, block),
        gluon.descriptor(result[None], [1, _WARPGROUP_ROWS, chunk]),
        experts, columns, rows.shape[1], entries_offset(experts), column_tiles, weight_scales.shape[1] if blocks else 1,
        rows.stride(0),
        activation, blocks, _FP8_WIDTH, _FP8_DEPTH, _FP8_STAGES,
        warps=4, registers=_SM90_REGISTERS,
    )  # fmt: skip


def takes_weight_gradient_sm90(gradient: Tensor, rows: Tensor) -> bool:
    """Whether the kernel for the gradient of matrices is for these, on their device."""
    return (
        gluon.runs_on(rows.device)
        and gradient.dtype == rows.dtype
        and rows.dtype in (torch.bfloat16, torch.float16)
        and 0 < rows.shape[0] < _MOST_ROWS
        and rows.shape[1] * rows.element_size() % _ALIGNED_BYTES == 0
        and all(_is_copyable(x) and x.stride(0) < 2**31 for x in (gradient, rows))
    )


def launch_weight_gradient_sm90(
    gradient: Tensor, rows: Tensor, groups: Tensor, result: Tensor, config: dict[str, int] | None = None,
    sources: Tensor | None = None, gathered: str = "",
) -> None:  # fmt: skip
    """Writes the gradient of the matrices of all experts.

    What is `gathered`, "gradient" or "rows", has the rows that `sources` name.
    """
    from nearpeak.kernels.gemm.grouped_sm90 import grouped_weight_gradient_sm90_kernel

    experts, columns, depth = result.shape
    config = (
        config
        or tuned("grouped_gradient_hopper", count_rows(rows, sources) // experts, rows.device)
        or SM90_GRADIENT_CONFIGS[0]
    )
    width, depth_of_step = config["width"], config["depth"]
    down, across = triton.cdiv(columns, SM90_HEIGHT), triton.cdiv(depth, width)
    tiles = experts * down * across
    tokens = gradient if gathered == "gradient" else rows
    launch(
        grouped_weight_gradient_sm90_kernel, (min(processors(rows.device), tiles), 1, 1), grid_counters(1, rows.device), groups,
        tokens if gathered else None, sources,
        _ragged_descriptor(gradient, depth_of_step, _WARPGROUP_ROWS), _ragged_descriptor(rows, depth_of_step, width),
        gluon.descriptor(result, [1, _WARPGROUP_ROWS, width // 2]),
        tiles, down, across, tokens.stride(0), tokens.shape[1], gathered, width, depth_of_step, config["stages"],
        warps=4, registers=_SM90_REGISTERS,
    )  # fmt: skip


def _ragged_descriptor(x: Tensor, rows: int, columns: int) -> object:
    """Tiles of some rows of which those behind the last of an expert are zeros; see `grouped_product_gradient`."""
    stride = x.stride(0)
    shape = (2**31 - 1, 2**31 - 1, _MOST_ROWS, x.shape[1])
    return gluon.strided_descriptor(x, shape, (2**34 - stride, stride, stride, 1), [1, 1, rows, columns])


_PROGRAMS_PER_SM = 2
"""Programs that a multiprocessor runs at a time, or may."""


def group_rows(counts: Tensor, rows: int, height: int) -> Tensor:
    """Where the rows of each expert begin, and the list of tiles of rows."""
    experts = len(counts)
    groups = torch.empty(groups_size(experts, rows, height), dtype=torch.int32, device=counts.device)
    launch(
        group_rows_kernel, (experts + 1, 1, 1), counts.contiguous(), groups, experts, rows, entries_offset(experts),
        height, next_power_of_2(experts), warps=4,
    )  # fmt: skip
    return groups


def multiply(
    rows: Tensor, weight: Tensor, groups: Tensor, height: int, transposed: bool, sources: Tensor | None = None,
    *, config: dict[str, Any] | None = None,
) -> Tensor:  # fmt: skip
    """The rows by the matrices of their experts, contiguous; with `sources` those that they name.

    Copies rows with holes.
    """
    columns = weight.shape[2 if transposed else 1]
    result = torch.empty((count_rows(rows, sources), columns), dtype=rows.dtype, device=rows.device)
    if not result.numel():
        return result
    rows = as_rows(rows)
    if _may_use_sm90(config, rows, sources) and takes_sm90(rows, weight, height, transposed, False):
        launch_sm90(rows, weight, groups, result, None, transposed, "", config, sources)
        return result
    strides = weight.stride(0), weight.stride(2 if transposed else 1), weight.stride(1 if transposed else 2)
    _launch_portable(rows, sources, weight, groups, result, None, None, None, height, "", "", strides, config)
    return result


def multiply_gated(
    rows: Tensor, weight: Tensor, groups: Tensor, height: int, activation: str, keep: bool,
    sources: Tensor | None = None, *, config: dict[str, Any] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The activation of the first columns times the second, and both if they are to be kept, else nothing."""
    columns, number = weight.shape[1] // 2, count_rows(rows, sources)
    result = torch.empty((number, columns), dtype=rows.dtype, device=rows.device)
    kept = torch.empty((number, 2 * columns) if keep else 0, dtype=rows.dtype, device=rows.device)
    if not result.numel():
        return result, kept
    rows = as_rows(rows)
    to_keep = kept if keep else None
    if _may_use_sm90(config, rows, sources) and takes_sm90(rows, weight, height, False, True):
        launch_sm90(rows, weight, groups, result, to_keep, False, activation, config, sources)
    else:
        strides = weight.stride()
        _launch_portable(
            rows, sources, weight, groups, result, to_keep, None, None, height, activation, "", strides, config
        )
    return result, kept


def multiply_gathered(
    tokens: Tensor, weight: Tensor, groups: Tensor, height: int, transposed: bool, activation: str, sources: Tensor
) -> Tensor:
    """The products of the tokens that `sources` name, without derivatives."""
    if activation:
        return multiply_gated(tokens, weight, groups, height, activation, False, sources)[0]
    return multiply(tokens, weight, groups, height, transposed, sources)


def multiply_fp8(
    rows: Tensor, weight: Tensor, row_scales: Tensor, weight_scales: Tensor, groups: Tensor, height: int,
    activation: str, dtype: torch.dtype, sources: Tensor | None = None, *, config: dict[str, Any] | None = None,
) -> Tensor:  # fmt: skip
    """The same of numbers of 8 bits with scales, without derivatives."""
    columns = weight.shape[1] // (2 if activation else 1)
    result = torch.empty((count_rows(rows, sources), columns), dtype=dtype, device=rows.device)
    if not result.numel():
        return result
    rows = as_rows(rows)
    row_scales, weight_scales = row_scales.contiguous(), weight_scales.contiguous()
    scales = "whole" if weight_scales.dim() == 1 else "blocks"
    if _may_use_sm90(config, rows, sources) and takes_fp8_sm90(rows, weight, height, dtype, activation):
        launch_fp8_sm90(rows, weight, row_scales, weight_scales, groups, result, activation, sources)
    else:
        _launch_portable(
            rows, sources, weight, groups, result, None, row_scales, weight_scales, height, activation, scales,
            weight.stride(), config,
        )  # fmt: skip
    return result


def _launch_portable(
    rows: Tensor, sources: Tensor | None, weight: Tensor, groups: Tensor, result: Tensor, kept: Tensor | None,
    row_scales: Tensor | None, weight_scales: Tensor | None, height: int, activation: str, scales: str,
    strides: tuple[int, ...], config: dict[str, Any] | None,
) -> None:  # fmt: skip
    experts = weight.shape[0]
    columns = result.shape[1]
    bytes_each = rows.element_size()
    if _is_sm90_config(config):
        config = None  # one of the other kernels says nothing here
    chosen = config or _tuned_config(height, rows, activation) or heuristic(height, bytes_each, bool(activation))
    width = min(chosen["width"], max(16, next_power_of_2(columns)))
    tiles = (result.shape[0] // height + experts + 1) * triton.cdiv(columns, width)
    scale_strides = (0, 0, 0)
    if row_scales is not None and weight_scales is not None:
        scale_strides = (
            row_scales.stride(0),
            weight_scales.stride(0),
            weight_scales.stride(1 if scales == "blocks" else 0),
        )
    launch(
        grouped_gemm_kernel, (min(tiles, _programs(rows.device)), 1, 1), rows, sources, weight, groups, result, kept,
        row_scales, weight_scales, experts, columns, rows.shape[1], entries_offset(experts), rows.stride(0), *strides,
        *scale_strides, activation, scales, height, width, 128 if scales == "blocks" else chosen["depth"],
        warps=chosen["warps"], stages=chosen["stages"],
    )  # fmt: skip


def weight_gradient(
    gradient: Tensor, rows: Tensor, groups: Tensor, experts: int, sources: Tensor | None = None, gathered: str = "",
    *, config: dict[str, Any] | None = None,
) -> Tensor:  # fmt: skip
    """The gradient of the matrices, [experts, columns of the gradient, columns of rows]. Copies rows with holes.

    What is `gathered`, "gradient" or "rows", has the rows that `sources` name.
    """
    columns, depth = gradient.shape[1], rows.shape[1]
    result = torch.empty((experts, columns, depth), dtype=rows.dtype, device=rows.device)
    if not result.numel():
        return result
    gradient, rows = as_rows(gradient), as_rows(rows)
    tokens = gradient if gathered == "gradient" else rows
    if _may_use_sm90(config, tokens, sources) and takes_weight_gradient_sm90(gradient, rows):
        launch_weight_gradient_sm90(gradient, rows, groups, result, config, sources, gathered)
        return result
    if _is_sm90_config(config):
        config = None
    chosen = config or gradient_heuristic(rows.element_size())
    high, wide = (
        min(chosen[name], max(16, next_power_of_2(n))) for name, n in (("columns", columns), ("depth", depth))
    )
    tiles = experts * triton.cdiv(columns, high) * triton.cdiv(depth, wide)
    launch(
        grouped_weight_gradient_kernel, (min(tiles, _programs(rows.device)), 1, 1), gradient, rows, sources, groups, result,
        experts, columns, depth, gradient.stride(0), rows.stride(0), gathered, high, wide, chosen["rows"],
        warps=chosen["warps"], stages=chosen["stages"],
    )  # fmt: skip
    return result


def _may_use_sm90(config: dict[str, Any] | None, rows: Tensor, sources: Tensor | None) -> bool:
    """Whether a configuration is one of the kernels for Hopper, or of none, and they find the rows of `sources`."""
    return _is_sm90_config(config) and (sources is None or can_gather_sm90(rows))


def _is_sm90_config(config: dict[str, Any] | None) -> bool:
    return config is None or "warps" not in config


def _tuned_config(height: int, rows: Tensor, activation: str) -> dict[str, Any] | None:
    """What was measured for tiles of so many rows of 16 bits."""
    if rows.element_size() != 2:
        return None
    return tuned("grouped_product_gated" if activation else "grouped_product", height, rows.device)


def _programs(device: torch.device) -> int:
    return 3 if INTERPRETED else _PROGRAMS_PER_SM * processors(device)


def heuristic(height: int, bytes_each: int, two: bool) -> dict[str, Any]:
    """Tiles whose sums fit into registers; `two`: there are two sums."""
    if bytes_each == 4:  # with a rest beside each sum, and sums as exact as blocks of depth are short
        width = 32 if two or height == 128 else 64
        tall = height >= 64
        return {"width": width, "depth": 16, "warps": 8 if tall else 4, "stages": 2 if tall else 3}
    if height < 64:  # a few rows: what counts is how fast matrices are read
        return {"width": 64 if two else 128, "depth": 128 // bytes_each, "warps": 4, "stages": 4}
    width = 64 if two else 128
    return {"width": width, "depth": 128 // bytes_each, "warps": 8 if height == 128 else 4, "stages": 3}


def gradient_heuristic(bytes_each: int) -> dict[str, Any]:
    if bytes_each == 4:
        return {"columns": 64, "depth": 64, "rows": 16, "warps": 8, "stages": 2}
    return {"columns": 128, "depth": 128, "rows": 64, "warps": 8, "stages": 3}


def candidates(height: int, two: bool = False) -> list[dict[str, Any]]:
    """What is worth measuring of the portable kernel, for tiles of so many rows; `two`: there are two sums."""
    sums = 2 if two else 1
    return [
        {"width": width, "depth": 64, "warps": warps, "stages": stages}
        for width in (64, 128, 256)
        for warps in (4, 8)
        for stages in (3, 4)
        if 16 <= sums * height * width // (32 * warps) <= 128 and (height + sums * width) * 64 * 2 * stages < 220_000
    ]
