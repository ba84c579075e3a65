"""The launchers of `grouped_gemm` and its portable Triton kernels.

Only the device knows how many rows an expert has. `group_rows_kernel` therefore writes a list of row tiles first, and
programs iterate over as many as there are; `groups_size` in `gemm.grouped` describes the list.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearpeak.kernels._runtime import gluon
from nearpeak.kernels._runtime.grid_counters import grid_counters
from nearpeak.kernels._runtime.launch import launch, next_power_of_2
from nearpeak.kernels._runtime.policy import INTERPRETED
from nearpeak.kernels._runtime.rows import as_rows
from nearpeak.kernels._runtime.tuning import from_row, processors, tuned
from nearpeak.kernels.gemm.grouped import count_rows, entries_offset, groups_size
from nearpeak.kernels.gemm.triton import compensated_dot
from nearpeak.kernels.gemm.tuning import (
    SM90_GROUPED_CONFIGS,
    SM90_GROUPED_GRADIENT_CONFIGS,
    GroupedConfig,
    GroupedGradientConfig,
    Sm90GroupedConfig,
    Sm90GroupedGradientConfig,
    grouped_gradient_heuristic,
    grouped_heuristic,
)
from nearpeak.kernels.pointwise.triton import activate

TILES_PER_GROUP = tl.constexpr(8)
"""Row tiles of one expert that take the same columns one after another, while the weight is in cache."""
ENTRY_SIZE = tl.constexpr(8)
"""Numbers of an entry of the list: 5 are used, and no entry straddles two cache lines."""
SCALE_BLOCK = tl.constexpr(128)
"""Columns and depth of a weight block, and depth of a row block, that share an fp8 scale."""
WIDEN_FP8 = tl.constexpr(INTERPRETED)
"""The interpreter does not multiply fp8."""
_PROGRAMS_PER_SM = 2
SM90_HEIGHT = 128
"""Rows of a tile on Hopper: half for each of two warpgroups."""
_WARPGROUP_ROWS = 64
_SM90_DEPTH = 64
_SM90_REGISTERS = 168
"""Registers of a thread, before the warps that multiply take more from the one that loads."""
_FP8_WIDTH = 128
_FP8_DEPTH = 128
_FP8_STAGES = 5
_MOST_ROWS = 2**30
"""The number of rows that the weight gradient kernel for Hopper pretends there are."""
_ALIGNED_BYTES = 16


def group_rows(counts: Tensor, rows: int, height: int) -> Tensor:
    """The first row of each expert, and the list of row tiles."""
    experts = len(counts)
    groups = torch.empty(groups_size(experts, rows, height), dtype=torch.int32, device=counts.device)
    launch(
        group_rows_kernel, (experts + 1, 1, 1), counts.contiguous(), groups, experts, rows, entries_offset(experts),
        height, next_power_of_2(experts), warps=4,
    )  # fmt: skip
    return groups


def multiply(
    rows: Tensor, weight: Tensor, groups: Tensor, height: int, transposed: bool, sources: Tensor | None = None,
    *, config: GroupedConfig | Sm90GroupedConfig | None = None,
) -> Tensor:  # fmt: skip
    """Each row times the matrix of its expert, contiguous; with `sources`, of the rows that they index.

    Copies rows whose elements are not contiguous.
    """
    columns = weight.shape[2 if transposed else 1]
    result = torch.empty((count_rows(rows, sources), columns), dtype=rows.dtype, device=rows.device)
    if not result.numel():
        return result
    rows = as_rows(rows)
    if _may_use_sm90(config, rows, sources) and takes_sm90(rows, weight, height, transposed, False):
        launch_sm90(rows, weight, groups, result, None, transposed, "", _sm90_config(config), sources)
        return result
    strides = weight.stride(0), weight.stride(2 if transposed else 1), weight.stride(1 if transposed else 2)
    _launch_portable(rows, sources, weight, groups, result, None, None, None, height, "", "", strides, config)
    return result


def multiply_gated(
    rows: Tensor, weight: Tensor, groups: Tensor, height: int, activation: str, keep: bool,
    sources: Tensor | None = None, *, config: GroupedConfig | Sm90GroupedConfig | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`activation(gate) * up`, and gate and up side by side, or an empty tensor without `keep`."""
    columns, count = weight.shape[1] // 2, count_rows(rows, sources)
    result = torch.empty((count, columns), dtype=rows.dtype, device=rows.device)
    gate_and_up = torch.empty((count, 2 * columns) if keep else 0, dtype=rows.dtype, device=rows.device)
    if not result.numel():
        return result, gate_and_up
    rows = as_rows(rows)
    stored = gate_and_up if keep else None
    if _may_use_sm90(config, rows, sources) and takes_sm90(rows, weight, height, False, True):
        launch_sm90(rows, weight, groups, result, stored, False, activation, _sm90_config(config), sources)
    else:
        strides = weight.stride()
        _launch_portable(
            rows, sources, weight, groups, result, stored, None, None, height, activation, "", strides, config
        )
    return result, gate_and_up


def multiply_gathered(
    tokens: Tensor, weight: Tensor, groups: Tensor, height: int, transposed: bool, activation: str, sources: Tensor
) -> Tensor:
    """The products of the tokens that `sources` index, without derivatives."""
    if activation:
        return multiply_gated(tokens, weight, groups, height, activation, False, sources)[0]
    return multiply(tokens, weight, groups, height, transposed, sources)


def multiply_fp8(
    rows: Tensor, weight: Tensor, row_scales: Tensor, weight_scales: Tensor, groups: Tensor, height: int,
    activation: str, dtype: torch.dtype, sources: Tensor | None = None, *, config: GroupedConfig | None = None,
) -> Tensor:  # fmt: skip
    """The products of fp8 rows and matrices with scales, without derivatives."""
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


def weight_gradient(
    gradient: Tensor, rows: Tensor, groups: Tensor, experts: int, sources: Tensor | None = None, gathered: str = "",
    *, config: GroupedGradientConfig | Sm90GroupedGradientConfig | None = None,
) -> Tensor:  # fmt: skip
    """The gradient of the matrices, (experts, columns of the gradient, columns of rows).

    `gathered` is "gradient" or "rows" if these are indexed by `sources`. Copies rows whose elements are not contiguous.
    """
    columns, depth = gradient.shape[1], rows.shape[1]
    result = torch.empty((experts, columns, depth), dtype=rows.dtype, device=rows.device)
    if not result.numel():
        return result
    gradient, rows = as_rows(gradient), as_rows(rows)
    tokens = gradient if gathered == "gradient" else rows
    if (
        not isinstance(config, GroupedGradientConfig)
        and (sources is None or can_gather_sm90(tokens))
        and takes_weight_gradient_sm90(gradient, rows)
    ):
        launch_weight_gradient_sm90(gradient, rows, groups, result, config, sources, gathered)
        return result
    if not isinstance(config, GroupedGradientConfig):  # a configuration for Hopper means nothing here
        config = grouped_gradient_heuristic(rows.element_size())
    block_columns = min(config.columns, max(16, next_power_of_2(columns)))
    block_depth = min(config.depth, max(16, next_power_of_2(depth)))
    tiles = experts * triton.cdiv(columns, block_columns) * triton.cdiv(depth, block_depth)
    launch(
        grouped_weight_gradient_kernel, (min(tiles, _max_programs(rows.device)), 1, 1), gradient, rows, sources,
        groups, result, experts, columns, depth, gradient.stride(0), rows.stride(0), gathered, block_columns,
        block_depth, config.rows, warps=config.warps, stages=config.stages,
    )  # fmt: skip
    return result


def _may_use_sm90(config: GroupedConfig | Sm90GroupedConfig | None, rows: Tensor, sources: Tensor | None) -> bool:
    """Whether the kernels for Hopper are wanted, and can gather the rows that `sources` index."""
    return not isinstance(config, GroupedConfig) and (sources is None or can_gather_sm90(rows))


def _sm90_config(config: GroupedConfig | Sm90GroupedConfig | None) -> Sm90GroupedConfig | None:
    return config if isinstance(config, Sm90GroupedConfig) else None


def _max_programs(device: torch.device) -> int:
    return 3 if INTERPRETED else _PROGRAMS_PER_SM * processors(device)


def _launch_portable(
    rows: Tensor, sources: Tensor | None, weight: Tensor, groups: Tensor, result: Tensor, gate_and_up: Tensor | None,
    row_scales: Tensor | None, weight_scales: Tensor | None, height: int, activation: str, scales: str,
    strides: tuple[int, ...], config: GroupedConfig | Sm90GroupedConfig | None,
) -> None:  # fmt: skip
    experts, columns, itemsize = weight.shape[0], result.shape[1], rows.element_size()
    if not isinstance(config, GroupedConfig):  # a configuration for Hopper means nothing here
        name = "grouped_gemm_gated" if activation else "grouped_gemm"
        row = tuned(name, height, rows.device) if itemsize == 2 else None
        config = from_row(row, GroupedConfig) or grouped_heuristic(height, itemsize, bool(activation))
    width = min(config.width, max(16, next_power_of_2(columns)))
    tiles = (result.shape[0] // height + experts + 1) * triton.cdiv(columns, width)
    scale_strides = (0, 0, 0)
    if row_scales is not None and weight_scales is not None:
        scale_strides = (
            row_scales.stride(0),
            weight_scales.stride(0),
            weight_scales.stride(1 if scales == "blocks" else 0),
        )
    launch(
        grouped_gemm_kernel, (min(tiles, _max_programs(rows.device)), 1, 1), rows, sources, weight, groups, result,
        gate_and_up, row_scales, weight_scales, experts, columns, rows.shape[1], entries_offset(experts),
        rows.stride(0), *strides, *scale_strides, activation, scales, height, width,
        SCALE_BLOCK.value if scales == "blocks" else config.depth, warps=config.warps, stages=config.stages,
    )  # fmt: skip


@triton.jit
def group_rows_kernel(counts, groups, experts, rows, entries, HEIGHT: tl.constexpr, EXPERTS: tl.constexpr):
    """Writes the first row of one expert and the entries of its tiles.

    The program after the last expert does so for the rows that belong to no expert.
    """
    expert = tl.program_id(0)
    index = tl.arange(0, EXPERTS)
    count = tl.load(counts + index, mask=index < experts, other=0).to(tl.int32)
    count = tl.maximum(count, 0)
    ends = tl.minimum(tl.cumsum(count, 0), rows)
    starts = tl.minimum(ends, tl.cumsum(count, 0) - count)
    begin = tl.max(tl.where(index < expert, ends, 0), 0)
    end = tl.max(tl.where(index == expert, ends, 0), 0)
    if expert == experts:
        end = rows
    tl.store(groups + expert, begin)
    first = tl.sum(tl.where(index < expert, tl.cdiv(ends - starts, HEIGHT), 0), 0)
    own = tl.cdiv(end - begin, HEIGHT)
    number = tl.where(expert == experts, -1, expert)
    if expert == experts:
        tl.store(groups + experts + 1, first + own)
    # 32 entries at a time: expert, first tile of the group, tiles of the group, its first row, the expert's end
    for base in range(0, own, 32):
        tile = base + tl.arange(0, 32)[:, None]
        leader = tile // TILES_PER_GROUP * TILES_PER_GROUP
        field = tl.arange(0, ENTRY_SIZE)[None, :]
        value = tl.where(field == 0, number, tl.zeros([32, ENTRY_SIZE], tl.int32))
        value = tl.where(field == 1, first + leader, value)
        value = tl.where(field == 2, tl.minimum(own - leader, TILES_PER_GROUP), value)
        value = tl.where(field == 3, begin + leader * HEIGHT, value)
        value = tl.where(field == 4, end, value)
        tl.store(groups + entries + (first + tile) * ENTRY_SIZE + field, value, mask=tile < own)


@triton.jit
def find_tile(groups, tile, column_tiles, entries, HEIGHT: tl.constexpr):
    """The expert of a tile (-1 for none), its first row, the end of the expert's rows, and its column tile."""
    entry = groups + entries + tile // column_tiles * ENTRY_SIZE
    expert = tl.load(entry)
    leader = tl.load(entry + 1)
    count = tl.load(entry + 2)
    row = tl.load(entry + 3)
    end = tl.load(entry + 4)
    place = tile - leader * column_tiles
    return expert, row + place % count * HEIGHT, end, place // count


@triton.jit
def _dot(left, right, total):
    if WIDEN_FP8 and left.dtype.primitive_bitwidth == 8:
        left = left.to(tl.float32)
        right = right.to(tl.float32)
    return tl.dot(left, right, total)


@triton.jit
def _dot_add(left, right, total, rest):
    """The sum plus left @ right, and the rounding error of float32 sums."""
    if left.dtype == tl.float32:
        total, rest = compensated_dot(left, right, total, rest)
    else:
        total = _dot(left, right, total)
    return total, rest


@triton.jit
def _load_columns(pointer, column, columns, step, depth):
    return tl.load(pointer, mask=(step < depth)[:, None] & (column < columns)[None, :], other=0.0)


@triton.jit
def grouped_gemm_kernel(
    rows, sources, weight, groups, result, gate_and_up, row_scales, weight_scales, experts, columns, depth, entries,
    row_stride, expert_stride, column_stride, depth_stride, scale_row_stride, scale_expert_stride, scale_column_stride,
    NAME: tl.constexpr, SCALES: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Tiles of the result. NAME is an activation: the result is that of the gate, times `up`.

    `sources`, if any, index `rows` and `row_scales` for each row of the result.

    SCALES: "" for none, "whole" for one per row and per expert, "blocks" for one per 128 of the depth of a row, and per
    128 x 128 of a matrix.
    """
    column_tiles = tl.cdiv(columns, WIDTH)
    tiles = tl.load(groups + experts + 1) * column_tiles
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        expert, first, end, column_tile = find_tile(groups, tile, column_tiles, entries, HEIGHT)
        row = first + tl.arange(0, HEIGHT)  # (height,)
        column = column_tile * WIDTH + tl.arange(0, WIDTH)  # (width,)
        step = tl.arange(0, DEPTH)
        source = row
        if sources is not None:
            source = tl.load(sources + row, mask=row < end, other=0)
        left = rows + (source.to(tl.int64) * row_stride)[:, None] + step[None, :]  # (height, depth)
        own = weight + tl.maximum(expert, 0).to(tl.int64) * expert_stride
        right = own + step.to(tl.int64)[:, None] * depth_stride + (column.to(tl.int64) * column_stride)[None, :]
        up = right + tl.cast(columns, tl.int64) * column_stride  # (depth, width)
        total = tl.zeros([HEIGHT, WIDTH], tl.float32)
        up_total = tl.zeros([HEIGHT, WIDTH], tl.float32)
        rest = tl.zeros([HEIGHT, WIDTH], tl.float32)
        up_rest = tl.zeros([HEIGHT, WIDTH], tl.float32)
        # main loop; rows without an expert have no steps, and become zeros
        for begin in range(0, tl.where(expert < 0, 0, depth), DEPTH):
            left_depth = depth - begin
            values = tl.load(left, mask=(row < end)[:, None] & (step < left_depth)[None, :], other=0.0)
            factors = _load_columns(right, column, columns, step, left_depth)
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
                factors = _load_columns(up, column, columns, step, left_depth)
                if SCALES == "blocks":
                    to_up = (column + columns) // SCALE_BLOCK * scale_column_stride
                    by_column = tl.load(own_scales + to_up, mask=column < columns)
                    part = _dot(values, factors, tl.zeros([HEIGHT, WIDTH], tl.float32))
                    up_total += part * by_row[:, None] * by_column[None, :]
                else:
                    up_total, up_rest = _dot_add(values, factors, up_total, up_rest)
            left += DEPTH
            right += DEPTH * depth_stride
            up += DEPTH * depth_stride
        # epilogue
        inside = (row < end)[:, None] & (column < columns)[None, :]
        if SCALES == "whole":
            scale = tl.load(row_scales + source.to(tl.int64) * scale_row_stride, mask=row < end, other=0.0)
            scale *= tl.load(weight_scales + tl.maximum(expert, 0) * scale_expert_stride)
            total *= scale[:, None]
            up_total *= scale[:, None]
        if NAME != "":
            if gate_and_up is not None:
                line = gate_and_up + (row.to(tl.int64) * 2 * columns)[:, None] + column[None, :]
                tl.store(line, total.to(result.dtype.element_ty), mask=inside)
                tl.store(line + columns, up_total.to(result.dtype.element_ty), mask=inside)
            total = activate(total, NAME) * up_total
        place = result + (row.to(tl.int64) * columns)[:, None] + column[None, :]
        tl.store(place, total.to(result.dtype.element_ty), mask=inside)


@triton.jit
def grouped_weight_gradient_kernel(
    gradient, rows, sources, groups, result, experts, columns, depth, gradient_stride, row_stride,
    GATHERED: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """`gradient.T @ rows` over the rows of each expert; zeros for an expert without rows.

    GATHERED: "gradient" or "rows" if these are indexed by `sources`.
    """
    down = tl.cdiv(columns, COLUMNS)
    across = tl.cdiv(depth, DEPTH)
    for tile in range(tl.program_id(0), experts * down * across, tl.num_programs(0)):
        expert = tile // (down * across)
        column = tile % (down * across) // across * COLUMNS + tl.arange(0, COLUMNS)
        feature = tile % across * DEPTH + tl.arange(0, DEPTH)
        begin = tl.load(groups + expert)
        end = tl.load(groups + expert + 1)
        total = tl.zeros([COLUMNS, DEPTH], tl.float32)
        rest = tl.zeros([COLUMNS, DEPTH], tl.float32)
        for first in range(begin, end, ROWS):
            row = first + tl.arange(0, ROWS)
            source = row
            if GATHERED != "":
                source = tl.load(sources + row, mask=row < end, other=0)
            gradient_row = (source if GATHERED == "gradient" else row).to(tl.int64) * gradient_stride
            upstream = gradient + gradient_row[:, None] + column[None, :]  # (rows, columns)
            own_row = (source if GATHERED == "rows" else row).to(tl.int64) * row_stride
            own = rows + own_row[:, None] + feature[None, :]  # (rows, depth)
            inside = (row < end)[:, None]
            left = tl.load(upstream, mask=inside & (column < columns)[None, :], other=0.0)
            right = tl.load(own, mask=inside & (feature < depth)[None, :], other=0.0)
            total, rest = _dot_add(tl.trans(left), right, total, rest)
        place = result + ((expert.to(tl.int64) * columns + column) * depth)[:, None] + feature[None, :]
        inside = (column < columns)[:, None] & (feature < depth)[None, :]
        tl.store(place, total.to(result.dtype.element_ty), mask=inside)


def _is_copyable(x: Tensor) -> bool:
    """Whether TMA copies tiles of a tensor."""
    return (
        x.stride(-1) == 1
        and x.data_ptr() % _ALIGNED_BYTES == 0
        and 0 < max(x.shape) < 2**31
        and all(stride > 0 and stride * x.element_size() % _ALIGNED_BYTES == 0 for stride in x.stride()[:-1])
    )


def can_gather_sm90(tokens: Tensor) -> bool:
    """Whether the kernels for Hopper gather rows: multiples of 16 bytes, with offsets that fit into 32 bits."""
    return tokens.shape[1] * tokens.element_size() % _ALIGNED_BYTES == 0 and tokens.shape[0] * tokens.stride(0) < 2**31


def takes_sm90(rows: Tensor, weight: Tensor, height: int, transposed: bool, gated: bool) -> bool:
    """Whether the kernel for Hopper supports a product on its device."""
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
    rows: Tensor, weight: Tensor, groups: Tensor, result: Tensor, gate_and_up: Tensor | None, transposed: bool,
    activation: str, config: Sm90GroupedConfig | None = None, sources: Tensor | None = None,
) -> None:  # fmt: skip
    """Computes products by the kernel for Hopper; with an activation also gate and up, if there is a tensor for them.

    With `sources` there is a product for each of them, of the row that it indexes.
    """
    from nearpeak.kernels.gemm.grouped_sm90 import grouped_gemm_sm90_kernel

    name = "grouped_gemm_sm90" + ("_gated" if activation else "")
    count = result.shape[0]
    if config is None:
        row = tuned(name, count // weight.shape[0], rows.device)
        config = from_row(row, Sm90GroupedConfig) or SM90_GROUPED_CONFIGS[0]
    width = config.width
    experts, columns = weight.shape[0], result.shape[1]
    along = (weight.stride(-1) == 1) != transposed
    matrices = weight if weight.stride(-1) == 1 else weight.mT
    block = [1, width, _SM90_DEPTH] if along else [1, _SM90_DEPTH, width]
    if activation:  # the same columns of gate and up
        matrices, block = matrices.unflatten(1, (2, columns)), [1, 2, width // 2, _SM90_DEPTH]
    column_tiles = triton.cdiv(columns, width // 2 if activation else width)
    tiles = (count // SM90_HEIGHT + experts + 1) * column_tiles
    result_tiles = _tile_descriptor(result, 1, width // 2)
    launch(
        grouped_gemm_sm90_kernel, (min(processors(rows.device), tiles), 1, 1), grid_counters(1, rows.device),
        groups, result, gate_and_up, None if sources is None else rows, sources,
        gluon.descriptor(rows, [_WARPGROUP_ROWS, _SM90_DEPTH]), gluon.descriptor(matrices, block), result_tiles,
        result_tiles if gate_and_up is None else _tile_descriptor(gate_and_up, 2, width // 2),
        experts, columns, rows.shape[1], entries_offset(experts), column_tiles, rows.stride(0),
        activation, along, width, _SM90_DEPTH, config.stages, config.buffers,
        warps=4, registers=_SM90_REGISTERS,
    )  # fmt: skip


def _tile_descriptor(x: Tensor, parts: int, columns: int) -> object:
    """The TMA descriptor for tiles of 64 rows of each of the parts that rows consist of."""
    return gluon.descriptor(x.view(x.shape[0], parts, -1).transpose(0, 1), [1, _WARPGROUP_ROWS, columns])


def takes_fp8_sm90(rows: Tensor, weight: Tensor, height: int, dtype: torch.dtype, activation: str) -> bool:
    """Whether the fp8 kernel for Hopper supports a product on its device."""
    columns = weight.shape[1] // (2 if activation else 1)
    return (
        gluon.runs_on(rows.device)
        and height == SM90_HEIGHT
        and dtype in (torch.bfloat16, torch.float16)
        and rows.shape[1] > 0
        and columns % (_FP8_WIDTH // 2 if activation else 8) == 0  # half a tile must not straddle two scale blocks
        and _is_copyable(rows)
        and _is_copyable(weight)
    )


def launch_fp8_sm90(
    rows: Tensor, weight: Tensor, row_scales: Tensor, weight_scales: Tensor, groups: Tensor, result: Tensor,
    activation: str, sources: Tensor | None = None,
) -> None:  # fmt: skip
    """Computes products of fp8 rows and matrices by the kernel for Hopper; with `sources`, of the rows they index."""
    from nearpeak.kernels.gemm.grouped_sm90 import grouped_gemm_fp8_sm90_kernel

    experts, columns = weight.shape[0], result.shape[1]
    chunk = _FP8_WIDTH // 2 if activation else _FP8_WIDTH
    block = [1, chunk, _FP8_DEPTH]
    if activation:
        weight, block = weight.unflatten(1, (2, columns)), [1, 2, chunk, _FP8_DEPTH]
    column_tiles = triton.cdiv(columns, chunk)
    programs = min(processors(rows.device), (result.shape[0] // SM90_HEIGHT + experts + 1) * column_tiles)
    by_block = weight_scales.dim() == 3
    launch(
        grouped_gemm_fp8_sm90_kernel, (programs, 1, 1), grid_counters(1, rows.device), groups, result, row_scales,
        weight_scales, None if sources is None else rows, sources,
        gluon.descriptor(rows, [_WARPGROUP_ROWS, _FP8_DEPTH]), gluon.descriptor(weight, block),
        gluon.descriptor(result[None], [1, _WARPGROUP_ROWS, chunk]),
        experts, columns, rows.shape[1], entries_offset(experts), column_tiles,
        weight_scales.shape[1] if by_block else 1, rows.stride(0),
        activation, by_block, _FP8_WIDTH, _FP8_DEPTH, _FP8_STAGES,
        warps=4, registers=_SM90_REGISTERS,
    )  # fmt: skip


def takes_weight_gradient_sm90(gradient: Tensor, rows: Tensor) -> bool:
    """Whether the weight gradient kernel for Hopper supports these tensors on their device."""
    return (
        gluon.runs_on(rows.device)
        and gradient.dtype == rows.dtype
        and rows.dtype in (torch.bfloat16, torch.float16)
        and 0 < rows.shape[0] < _MOST_ROWS
        and rows.shape[1] * rows.element_size() % _ALIGNED_BYTES == 0
        and all(_is_copyable(x) and x.stride(0) < 2**31 for x in (gradient, rows))
    )


def launch_weight_gradient_sm90(
    gradient: Tensor, rows: Tensor, groups: Tensor, result: Tensor, config: Sm90GroupedGradientConfig | None = None,
    sources: Tensor | None = None, gathered: str = "",
) -> None:  # fmt: skip
    """Computes the gradient of the matrices by the kernel for Hopper.

    `gathered` is "gradient" or "rows" if these are indexed by `sources`.
    """
    from nearpeak.kernels.gemm.grouped_sm90 import grouped_weight_gradient_sm90_kernel

    experts, columns, depth = result.shape
    if config is None:
        row = tuned("grouped_weight_gradient_sm90", count_rows(rows, sources) // experts, rows.device)
        config = from_row(row, Sm90GroupedGradientConfig) or SM90_GROUPED_GRADIENT_CONFIGS[0]
    down, across = triton.cdiv(columns, SM90_HEIGHT), triton.cdiv(depth, config.width)
    tiles = experts * down * across
    tokens = gradient if gathered == "gradient" else rows
    launch(
        grouped_weight_gradient_sm90_kernel, (min(processors(rows.device), tiles), 1, 1),
        grid_counters(1, rows.device), groups, tokens if gathered else None, sources,
        _ragged_descriptor(gradient, config.depth, _WARPGROUP_ROWS),
        _ragged_descriptor(rows, config.depth, config.width),
        gluon.descriptor(result, [1, _WARPGROUP_ROWS, config.width // 2]),
        tiles, down, across, tokens.stride(0), tokens.shape[1], gathered, config.width, config.depth, config.stages,
        warps=4, registers=_SM90_REGISTERS,
    )  # fmt: skip


def _ragged_descriptor(x: Tensor, rows: int, columns: int) -> object:
    """The TMA descriptor for tiles that are zero beyond the last row of an expert; see the kernel in `grouped_sm90`."""
    stride = x.stride(0)
    shape = (2**31 - 1, 2**31 - 1, _MOST_ROWS, x.shape[1])
    return gluon.strided_descriptor(x, shape, (2**34 - stride, stride, stride, 1), [1, 1, rows, columns])
