"""The launchers of `gemm` and its portable Triton kernel.

A product is `a @ b.T` of two matrices with any strides. On Hopper, operands whose tiles TMA can copy go to the kernel in `sm90`;
all others, other GPUs, and results of few tiles go to the portable kernel, which has smaller tiles and so more programs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearpeak.kernels._runtime import gluon
from nearpeak.kernels._runtime.launch import launch, next_power_of_2
from nearpeak.kernels._runtime.tuning import processors, tuned
from nearpeak.kernels.gemm import BLOCK_SCALES, OUTER_SCALES, SCALE_BLOCK_SIZE, scale_kind
from nearpeak.kernels.pointwise import triton as pointwise_triton
from nearpeak.kernels.pointwise.triton import activate

TILE_GROUP = 8
"""Rows of tiles that are worked on together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Epilogue:
    """What follows a product."""

    bias: Tensor | None = None
    residual: Tensor | None = None
    activation: str = ""
    gated: bool = False
    keep: bool = False
    """Whether what the activation is of is written too."""


class Scales:
    """The scales of factors of 8 bits, and how far apart in memory those of rows and of blocks of features are."""

    def __init__(
        self, x: Tensor, scale_x: Tensor | None, weight: Tensor, scale_weight: Tensor | None, fast: bool
    ) -> None:
        found = scale_kind(x, scale_x, weight, scale_weight)
        assert found is not None
        self.kind = found
        self.fast = fast
        self.x, self.x_strides = _scale_and_strides(scale_x, x.dim() - 1)
        self.weight, self.weight_strides = _scale_and_strides(scale_weight, weight.dim() - 1)


def _scale_and_strides(scale: Tensor | None, rows_dim: int) -> tuple[Tensor | None, tuple[int, int]]:
    """A scale as [rows, blocks of features], and strides, which are 0 where one is for all."""
    if scale is None or not scale.dim():
        return scale, (0, 0)
    if scale.dim() == rows_dim:
        scale = scale.reshape(-1)
        return scale, (scale.stride(0), 0)
    scale = scale.reshape(-1, scale.shape[-1])
    return scale, (scale.stride(0), scale.stride(1))


@triton.jit
def compensated_dot(a, b, total, rest):
    """The sum and the product of a block of float32, and the rest that rounding took, for the next block to begin with.

    Added up one after another, the products of a depth of 1,280 would have 8 times the error (Kahan's sum).
    """
    part = tl.dot(a, b, rest, input_precision="ieee")
    whole = total + part
    rest = part - (whole - total)
    rest = tl.where(tl.abs(rest) < float("inf"), rest, 0.0)  # a sum that is infinite has none, and is to stay so
    return whole, rest


@triton.jit
def dot_add(a, b, total, rest, PRECISION: tl.constexpr, FAST: tl.constexpr, BLOCK_K: tl.constexpr):
    """The product added to the sum, and the rest, which sums of float32 alone have.

    Sums of 8 bits are made of sums of one block each, unless it is to be fast.
    """
    if a.dtype.primitive_bitwidth == 8 and not FAST:
        total = tl.dot(a, b, total, max_num_imprecise_acc=BLOCK_K)
    elif a.dtype == tl.float32 and PRECISION == "ieee":
        total, rest = compensated_dot(a, b, total, rest)
    else:
        total = tl.dot(a, b, total, input_precision=PRECISION)
    return total, rest


@triton.jit
def scale_and_bias(
    total, bias, a_scale, b_scale, row, column, columns, a_scale_row, b_scale_column, HAS_BIAS: tl.constexpr,
    HAS_A_SCALE: tl.constexpr, HAS_B_SCALE: tl.constexpr,
):  # fmt: skip
    """The sum times the scales of its row and column, and the bias."""
    if HAS_A_SCALE:
        total *= tl.load(a_scale + row.to(tl.int64) * a_scale_row).to(tl.float32)[:, None]
    if HAS_B_SCALE:
        total *= tl.load(b_scale + column.to(tl.int64) * b_scale_column, mask=column < columns).to(tl.float32)[None, :]
    if HAS_BIAS:
        total += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    return total


@triton.jit
def gemm_kernel(
    a, b, bias, residual, a_scale, b_scale, result, kept, rows, columns, depth, a_row, a_depth, b_column, b_depth,
    residual_row, residual_column, a_scale_row, a_scale_block, b_scale_column, b_scale_block, row_tiles, column_tiles,
    group,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, KEEP: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, HAS_A_SCALE: tl.constexpr, HAS_B_SCALE: tl.constexpr, BY_BLOCK: tl.constexpr,
    FAST: tl.constexpr, PRECISION: tl.constexpr, EVEN: tl.constexpr, SCALE_BLOCK: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """`columns` are those of the result; with a gate, the other factor's are so many further on."""
    program = tl.program_id(0)
    in_group = group * column_tiles
    first_tile = program // in_group * group
    high = tl.minimum(row_tiles - first_tile, group)
    row = (first_tile + program % in_group % high) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = program % in_group // high * BLOCK_N + tl.arange(0, BLOCK_N)
    # what is outside reads what is inside once more, which needs no masks, and is not written
    safe_row, safe_column = row % rows, column % columns
    at = tl.arange(0, BLOCK_K)
    a += safe_row.to(tl.int64)[:, None] * a_row + at.to(tl.int64)[None, :] * a_depth
    b += safe_column.to(tl.int64)[None, :] * b_column + at.to(tl.int64)[:, None] * b_depth
    across = tl.cast(columns, tl.int64) * b_column
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    rest = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if GATED:
        other = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        other_rest = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if BY_BLOCK:
        a_scales = a_scale + safe_row.to(tl.int64) * a_scale_row
        b_scales = b_scale + (safe_column // SCALE_BLOCK).to(tl.int64) * b_scale_column
        up_scales = b_scale + ((safe_column + columns) // SCALE_BLOCK).to(tl.int64) * b_scale_column
    a_step, b_step = tl.cast(a_depth, tl.int64) * BLOCK_K, tl.cast(b_depth, tl.int64) * BLOCK_K
    for start in range(0, depth, BLOCK_K):
        if EVEN:
            left, right = tl.load(a), tl.load(b)
        else:
            left = tl.load(a, mask=(at < depth - start)[None, :], other=0.0)
            right = tl.load(b, mask=(at < depth - start)[:, None], other=0.0)
        if BY_BLOCK:
            block = start // SCALE_BLOCK
            left_scale = tl.load(a_scales + block * a_scale_block).to(tl.float32)[:, None]
            right_scale = tl.load(b_scales + block * b_scale_block).to(tl.float32)[None, :]
            total += tl.dot(left, right) * (left_scale * right_scale)
        else:
            total, rest = dot_add(left, right, total, rest, PRECISION, FAST, BLOCK_K)
        if GATED:
            if EVEN:
                up = tl.load(b + across)
            else:
                up = tl.load(b + across, mask=(at < depth - start)[:, None], other=0.0)
            if BY_BLOCK:
                up_scale = tl.load(up_scales + block * b_scale_block).to(tl.float32)[None, :]
                other += tl.dot(left, up) * (left_scale * up_scale)
            else:
                other, other_rest = dot_add(left, up, other, other_rest, PRECISION, FAST, BLOCK_K)
        a += a_step
        b += b_step
    outer_a: tl.constexpr = HAS_A_SCALE and not BY_BLOCK
    outer_b: tl.constexpr = HAS_B_SCALE and not BY_BLOCK
    total = scale_and_bias(
        total,
        bias,
        a_scale,
        b_scale,
        safe_row,
        column,
        columns,
        a_scale_row,
        b_scale_column,
        HAS_BIAS,
        outer_a,
        outer_b,
    )
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    line = row.to(tl.int64)[:, None]
    if KEEP:
        kept += line * (columns * (2 if GATED else 1)) + column[None, :]
        tl.store(kept, total.to(kept.dtype.element_ty), mask=inside)
    if ACTIVATION != "":
        total = activate(total, ACTIVATION)
    if GATED:
        other = scale_and_bias(
            other, bias + columns, a_scale, b_scale + tl.cast(columns, tl.int64) * b_scale_column, safe_row, column,
            columns, a_scale_row, b_scale_column, HAS_BIAS, outer_a, outer_b,
        )  # fmt: skip
        if KEEP:
            tl.store(kept + columns, other.to(kept.dtype.element_ty), mask=inside)
        total *= other
    if HAS_RESIDUAL:
        residual += line * residual_row + column.to(tl.int64)[None, :] * residual_column
        total += tl.load(residual, mask=inside, other=0.0).to(tl.float32)
    tl.store(result + line * columns + column[None, :], total.to(result.dtype.element_ty), mask=inside)


def multiply_portable(
    a: Tensor, b: Tensor, result: Tensor, kept: Tensor | None, epilogue: Epilogue, scales: Scales | None, tf32: bool,
    config: dict[str, Any] | None = None,
) -> None:  # fmt: skip
    """Writes a @ b.T and what follows it into `result`, which is contiguous and not empty."""
    rows, columns = result.shape
    depth = a.shape[1]
    config = config or portable_heuristic(a, result, epilogue.gated, tf32)
    block_m, block_n, block_k = config["block_m"], config["block_n"], config["block_k"]
    row_tiles, column_tiles = triton.cdiv(rows, block_m), triton.cdiv(columns, block_n)
    residual = None if epilogue.residual is None else epilogue.residual.reshape(rows, columns)
    bias = None if epilogue.bias is None else epilogue.bias.contiguous()
    left, right = (None, None) if scales is None else (scales.x, scales.weight)
    by_block = scales is not None and scales.kind == BLOCK_SCALES
    launch(
        gemm_kernel, (row_tiles * column_tiles, 1, 1),
        a, b, a if bias is None else bias, a if residual is None else residual, a if left is None else left,
        a if right is None else right, result, a if kept is None else kept, rows, columns, depth, *a.stride(),
        *b.stride(), *((0, 0) if residual is None else residual.stride()),
        *((0, 0) if scales is None else scales.x_strides), *((0, 0) if scales is None else scales.weight_strides),
        row_tiles, column_tiles, TILE_GROUP,
        epilogue.activation, epilogue.gated, kept is not None, bias is not None, residual is not None,
        left is not None, right is not None, by_block, scales is not None and scales.fast,
        "tf32" if tf32 else "ieee", depth % block_k == 0, SCALE_BLOCK_SIZE, block_m, block_n, block_k,
        warps=config["warps"], stages=config["stages"],
    )  # fmt: skip


def portable_heuristic(a: Tensor, result: Tensor, has_gate: bool, tf32: bool) -> dict[str, Any]:
    """What to launch with. The shape of a result decides, more than its size, so that there is no table of these."""
    rows, columns = (max(16, next_power_of_2(size)) for size in result.shape)
    wanted = processors(result.device)
    # scales are those of 128 features, so that a block may not have more; float32 without tensor cores takes registers,
    # and its sums are as exact as blocks are short
    block_k = {4: 32 if tf32 else 16, 2: 64, 1: 128}[a.element_size()]
    # sums of float32 have rests beside them; where blocks are not full too, larger tiles had no registers left
    crowded = a.element_size() == 4 and not tf32 and a.shape[1] % block_k != 0
    block_m, block_n = min(rows, 128), min(columns, 64 if has_gate or crowded else 128)
    # small results, of which there are few tiles, have smaller ones
    while block_n > 32 and triton.cdiv(result.shape[0], block_m) * triton.cdiv(result.shape[1], block_n) < wanted:
        if block_m > 64:
            block_m //= 2
        else:
            block_n //= 2
    warps = 8 if block_m * block_n * (2 if has_gate else 1) >= (4096 if crowded else 16384) else 4
    return {"block_m": block_m, "block_n": block_n, "block_k": block_k, "warps": warps, "stages": 3}


_ALIGNED_BYTES = 16
_SMALLEST_TILE = 128
"""Rows and columns of the smallest tile."""
_SHARED_BYTES = 232_448
"""Shared memory of a program, at most."""
_BARRIER_BYTES = 512
_ROW_BYTES = 128
"""A row of a tile of a factor: as wide as what shared memory is swizzled by."""
_LEAST_STAGES, _MOST_STAGES = 3, 6
_CACHED_ROWS = 2048
"""Rows of the result that are worked on at a time: with as many columns, their factors stay in the cache."""


def takes_sm90(a: Tensor, b: Tensor, result: Tensor, epilogue: Epilogue, scales: Scales | None) -> bool:
    """Whether the kernel is for a product, on its device."""
    if not gluon.runs_on(a.device) or a.dtype not in (torch.bfloat16, torch.float16, torch.float8_e4m3fn):
        return False
    if a.dtype == torch.float8_e4m3fn and (_is_across(a) or _is_across(b)):
        return False
    if epilogue.gated and _is_across(b):
        return False  # tiles of both halves would not lie next to each other
    if scales is not None and scales.kind == BLOCK_SCALES and epilogue.gated and b.shape[0] % 256:
        return False  # a tile of the second factor would have two scales
    written = [result] if epilogue.residual is None else [result, epilogue.residual.reshape(result.shape)]
    return (
        0 not in a.shape
        and max(*a.shape, *b.shape) < 2**30
        and all(map(_is_copyable, (*_gate_and_up(a, False), *_gate_and_up(b, epilogue.gated))))
        and all(_is_copyable(one) and not _is_across(one) and one.dtype == result.dtype for one in written)
        and result.dtype in (torch.bfloat16, torch.float16, torch.float32)
        and (
            not epilogue.keep
            or (result.dtype == a.dtype and result.shape[1] * result.element_size() % _ALIGNED_BYTES == 0)
        )
    )


def fills_gpu(result: Tensor) -> bool:
    """Whether a result has tiles for a quarter of the processors, as others have no more than four times as many."""
    rows, columns = result.shape
    tiles: int = triton.cdiv(rows, _SMALLEST_TILE) * triton.cdiv(columns, _SMALLEST_TILE)
    return 4 * tiles >= processors(result.device)


def _is_across(x: Tensor) -> bool:
    """Whether what is next to each other in memory are rows."""
    return x.stride(1) != 1 and x.shape[1] != 1


def _is_copyable(x: Tensor) -> bool:
    """Whether tiles of a matrix can be copied by one instruction."""
    inner = int(not _is_across(x))
    apart = x.stride(1 - inner) * x.element_size()
    return (
        (x.stride(inner) == 1 or x.shape[inner] == 1)
        and x.data_ptr() % _ALIGNED_BYTES == 0
        and (x.shape[1 - inner] == 1 or (apart > 0 and apart % _ALIGNED_BYTES == 0))
    )


def _gate_and_up(b: Tensor, gated: bool) -> tuple[Tensor, Tensor]:
    """The rows of the gate and those of the other factor; twice the same without a gate."""
    half = b.shape[0] // 2
    return (b[:half], b[half:]) if gated else (b, b)


def _tile_descriptor(x: Tensor, lines: int, width: int) -> Any:
    """Tiles of so many rows and columns of a matrix; of its transpose where rows are next to each other in memory."""
    block = [lines, width]
    if _is_across(x):
        x, block = x.t(), [width, lines]
    # the stride of a single row says nothing, and must be a multiple of 16 bytes all the same
    apart = x.stride(0) if x.shape[0] > 1 else -(-x.shape[1] // _ALIGNED_BYTES) * _ALIGNED_BYTES
    if x.stride() != (apart, 1):
        x = torch.as_strided(x, x.shape, (apart, 1))
    return gluon.descriptor(x, block)


def multiply_sm90(
    a: Tensor, b: Tensor, result: Tensor, kept: Tensor | None, epilogue: Epilogue, scales: Scales | None,
    config: dict[str, Any] | None = None,
) -> None:  # fmt: skip
    """Writes a @ b.T and what follows it into `result`."""
    from nearpeak.kernels.gemm.sm90 import gemm_sm90_kernel

    rows, columns = result.shape
    promoted = scales is not None and (scales.kind == BLOCK_SCALES or not scales.fast)
    name = sm90_table_name(result.element_size(), epilogue, scales)
    config = (
        config
        or (tuned(name, result.numel(), a.device) if name else None)
        or sm90_heuristic(a, result, epilogue, scales)
    )
    lines, consumers, block_n, pieces = config["rows"], config["consumers"], config["block_n"], config["pieces"]
    depth = _ROW_BYTES // a.element_size()
    row_tiles, column_tiles = triton.cdiv(rows, lines * consumers), triton.cdiv(columns, block_n)
    tiles = row_tiles * column_tiles
    piece = block_n // pieces
    gate, up = (_tile_descriptor(one, block_n, depth) for one in _gate_and_up(b, epilogue.gated))
    out = _tile_descriptor(result, lines, piece)
    kept_gate, kept_up = (out, out) if kept is None else _kept_descriptors(kept, lines, piece, epilogue.gated)
    residual = out
    if epilogue.residual is not None:
        residual = _tile_descriptor(epilogue.residual.reshape(rows, columns), lines, piece)
    bias = epilogue.bias
    outer = scales is not None and scales.kind == OUTER_SCALES
    left, right, strides = _scale_arguments(scales, result)
    launch(
        gemm_sm90_kernel, (min(processors(a.device), tiles), 1, 1),
        result if bias is None else bias.contiguous(), left, right, _tile_descriptor(a, lines, depth), gate, up, out,
        kept_gate, kept_up, residual, rows, columns, triton.cdiv(a.shape[1], depth), row_tiles, column_tiles,
        config.get("group") or max(1, _CACHED_ROWS // (lines * consumers)), tiles, *strides,
        lines, block_n, depth, consumers, config["stages"], pieces, config["buffers"], epilogue.activation,
        epilogue.gated, kept is not None, bias is not None, epilogue.residual is not None, outer,
        scales is not None and scales.kind == BLOCK_SCALES, promoted, _is_across(a), _is_across(b),
        warps=4, registers=168 if consumers == 2 else 128,
    )  # fmt: skip


def _kept_descriptors(kept: Tensor, lines: int, piece: int, gated: bool) -> tuple[Any, Any]:
    half = kept.shape[1] // 2
    both = (kept[:, :half], kept[:, half:]) if gated else (kept, kept)
    return _tile_descriptor(both[0], lines, piece), _tile_descriptor(both[1], lines, piece)


def _scale_arguments(scales: Scales | None, none: Tensor) -> tuple[Tensor, Tensor, tuple[int, int, int, int]]:
    if scales is None:
        return none, none, (0, 0, 0, 0)
    one = torch.ones((), device=none.device) if scales.x is None or scales.weight is None else none
    left, right = one if scales.x is None else scales.x, one if scales.weight is None else scales.weight
    return left, right, (*scales.x_strides, *scales.weight_strides)


def sm90_config_kind(epilogue: Epilogue, scales: Scales | None) -> str:
    """The name of products that have configurations in common."""
    bits = "16_bits" if scales is None else "8_bits_fast" if scales.kind != BLOCK_SCALES and scales.fast else "8_bits"
    return bits + ("_gated" if epilogue.gated else "")


def sm90_table_name(itemsize: int, epilogue: Epilogue, scales: Scales | None) -> str | None:
    """What a product is called in tables, where its size is the number of results; None where nobody measures.

    Those with a residual or results of 32 bits need more shared memory than configurations that were measured leave.
    """
    if epilogue.residual is not None or itemsize != 2:
        return None
    return f"product_hopper_{sm90_config_kind(epilogue, scales)}" + ("_kept" if epilogue.keep else "")


def sm90_shared_bytes(config: dict[str, Any], gated: bool, itemsize: int) -> int:
    """The shared memory that a configuration takes, for a result whose elements have so many bytes."""
    columns = config["block_n"] * (2 if gated else 1)
    lines = config["rows"] * config["consumers"]
    ring: int = config["stages"] * (lines + columns) * _ROW_BYTES
    buffers: int = config["buffers"] * lines * config["block_n"] // config["pieces"] * itemsize
    return ring + buffers + _BARRIER_BYTES


def sm90_heuristic(a: Tensor, result: Tensor, epilogue: Epilogue, scales: Scales | None) -> dict[str, Any]:
    """What to launch with where nobody measured: of the tiles of two warpgroups, those that leave least to wait for."""
    found = sm90_candidates(
        result.numel(),
        sm90_config_kind(epilogue, scales),
        result.element_size(),
        epilogue.residual is not None,
        epilogue.keep,
    )
    busy = processors(a.device)

    def cost(config: dict[str, Any]) -> float:
        tall, wide = config["rows"] * config["consumers"], config["block_n"]
        tiles = triton.cdiv(result.shape[0], tall) * triton.cdiv(result.shape[1], wide)
        # a small tile reads more for each product, and has to be written as well
        found: float = triton.cdiv(tiles, busy) * (tall * wide + 2048.0) * (1.0 + 16.0 / tall + 16.0 / wide)
        return found

    return min((one for one in found if one["consumers"] == 2), key=cost)


def sm90_candidates(
    size: int, kind: str = "16_bits", itemsize: int = 2, has_residual: bool = False, keep: bool = False
) -> list[dict[str, Any]]:  # fmt: skip
    """Configurations worth measuring, the likely one first: rows and columns of a tile decide, not the whole `size`.

    A result that is written by pieces leaves room for a longer ring; a residual is there in time if it comes whole.
    What is kept for the backward pass takes registers, so that pieces are smaller.
    """
    gated = kind.endswith("_gated")
    if kind.startswith("8_bits") and "fast" not in kind:  # each sum is there twice: what it was, and what is added
        shapes = [(64, 2, 64), (64, 3, 64)] if gated else [(64, 2, 128), (64, 3, 128)]
    elif gated:
        shapes = [(64, 2, 128), (64, 2, 64)] if keep else [(64, 2, 128), (128, 2, 64), (64, 2, 64)]
    else:
        shapes = [(64, 2, 256), (128, 2, 128), (64, 2, 128)]
    found = []
    for rows, consumers, block_n in shapes:
        for pieces, buffers in _store_options(rows, block_n, has_residual, keep):
            config = {
                "rows": rows, "consumers": consumers, "block_n": block_n, "pieces": pieces, "buffers": buffers,
                "stages": _MOST_STAGES,
            }  # fmt: skip
            while sm90_shared_bytes(config, gated, itemsize) > _SHARED_BYTES:
                config["stages"] -= 1
            if config["stages"] >= _LEAST_STAGES:
                found.append(config)
    return found


def _store_options(rows: int, columns: int, has_residual: bool, keep: bool) -> list[tuple[int, int]]:
    """Into how many pieces a warpgroup's part of a tile is cut, and in how many buffers they are."""
    narrow = columns // 64  # of 16 bits, that is what shared memory is swizzled by
    if keep:
        return [(min(narrow, 4), 1 if has_residual else 2)]
    if rows * columns <= 8192:
        return [(1, 1)]
    if has_residual:
        return [(1, 1), (min(narrow, 2), 1)]
    return [(narrow, 2), (2, 1), (1, 1)]


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str, gated: bool,
    dtype: torch.dtype, tf32: bool, keep: bool, *, config: dict[str, Any] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The result, and what the activation was of, in the dtype of x; an empty tensor where nobody keeps it."""
    epilogue = Epilogue(bias=bias, residual=residual, activation=activation, gated=gated, keep=keep)
    result, kept = _allocate_results(x, weight, epilogue, dtype)
    _multiply(as_matrix(x), weight, result, kept, epilogue, None, tf32, config)
    return result, x.new_empty(0) if kept is None else kept


def fp8_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, scale_x: Tensor | None,
    scale_weight: Tensor | None, activation: str, gated: bool, dtype: torch.dtype, fast_accumulate: bool, *,
    config: dict[str, Any] | None = None,
) -> Tensor:  # fmt: skip
    """The result of factors of 8 bits and their scales."""
    epilogue = Epilogue(bias=bias, residual=residual, activation=activation, gated=gated, keep=False)
    result, _ = _allocate_results(x, weight, epilogue, dtype)
    scales = Scales(x, scale_x, weight, scale_weight, fast_accumulate)
    _multiply(as_matrix(x), weight, result, None, epilogue, scales, False, config)
    return result


def backward(
    gradient: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, before: Tensor | None, activation: str,
    gated: bool, tf32: bool, for_x: bool, for_weight: bool, for_bias: bool, *, config: dict[str, Any] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of x, weight and bias, contiguous; empty tensors for what nobody wants."""
    rows = as_matrix(_activation_backward(gradient, x, weight, bias, before, activation, gated, tf32)).to(x.dtype)
    by_x = x.new_empty(x.shape if for_x else (0,))
    by_weight = weight.new_empty(weight.shape if for_weight else (0,))
    none = Epilogue()
    if for_x:
        _multiply(rows, weight.t(), by_x, None, none, None, tf32, config)
    if for_weight:
        _multiply(rows.t(), as_matrix(x).t(), by_weight, None, none, None, tf32, config)
    bias_dtype = weight.dtype if bias is None else bias.dtype
    if not for_bias:
        return by_x, by_weight, weight.new_empty(0, dtype=bias_dtype)
    return by_x, by_weight, rows.sum(0, dtype=torch.float32).to(bias_dtype)


def _activation_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, before: Tensor | None, activation: str,
    has_gate: bool, tf32: bool,
) -> Tensor:  # fmt: skip
    """The gradient of what the activation was of."""
    if not activation:
        return gradient
    if before is None:
        before, _ = forward(x, weight, bias, None, "", False, x.dtype, tf32, False)
    if has_gate:
        return pointwise_triton.gated_packed_backward(gradient, before, activation, False)
    return pointwise_triton.activation_backward(gradient, before, None, activation)


def as_matrix(x: Tensor) -> Tensor:
    """[rows, columns]: a view where one stride leads from each row to the next, and a copy otherwise."""
    return x if x.dim() == 2 else x.reshape(-1 if x.numel() else _count_rows(x), x.shape[-1])


def _count_rows(x: Tensor) -> int:
    """Rows of a tensor without elements."""
    rows = 1
    for size in x.shape[:-1]:
        rows *= size
    return rows


def _allocate_results(
    x: Tensor, weight: Tensor, epilogue: Epilogue, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    columns = weight.shape[0]
    result = x.new_empty([*x.shape[:-1], columns // 2 if epilogue.gated else columns], dtype=dtype)
    return result, x.new_empty([*x.shape[:-1], columns]) if epilogue.keep else None


def _multiply(
    a: Tensor, b: Tensor, result: Tensor, kept: Tensor | None, epilogue: Epilogue, scales: Scales | None, tf32: bool,
    config: dict[str, Any] | None,
) -> None:  # fmt: skip
    """Writes a @ b.T and what follows it into `result`, and what the activation is of into `kept`."""
    if not result.numel():
        return
    result = result.view(-1, result.shape[-1])
    kept = None if kept is None else kept.view(-1, kept.shape[-1])
    on_hopper = fills_gpu(result) if config is None else "consumers" in config
    if on_hopper and takes_sm90(a, b, result, epilogue, scales):
        multiply_sm90(a, b, result, kept, epilogue, scales, config)
    else:
        own = config is not None and "block_m" in config  # a configuration of the other kernel says nothing here
        multiply_portable(a, b, result, kept, epilogue, scales, tf32, config if own else None)
