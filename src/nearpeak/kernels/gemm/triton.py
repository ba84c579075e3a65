"""The launchers of `gemm`, which choose its backend, and its portable Triton kernel.

A product is `a @ b.T` of two matrices with any strides. On Hopper, operands whose tiles TMA can copy may go to the
kernel in `sm90` ("gluon"), all others to the portable kernel ("triton"), and all but some fp8 products to cuBLAS
("torch"), with the epilogue by a kernel of its own. Each product of a backward pass chooses for itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearpeak.kernels._runtime import gluon
from nearpeak.kernels._runtime.choice import Chooser, torch_runs_on
from nearpeak.kernels._runtime.launch import launch
from nearpeak.kernels._runtime.tuning import from_row, processors, tuned
from nearpeak.kernels.gemm import BLOCK_SCALES, OUTER_SCALES, SCALE_BLOCK_SIZE, scale_kind
from nearpeak.kernels.gemm.tuning import (
    SM90_ROW_BYTES,
    PortableConfig,
    Sm90Config,
    portable_heuristic,
    sm90_heuristic,
)
from nearpeak.kernels.pointwise.triton import (
    activate,
    activation_backward,
    activation_forward,
    gated_packed_backward,
    gated_packed_forward,
)


def _version(text: str | None) -> tuple[int, ...]:
    return tuple(int(part) for part in (text or "0.0").split(".")[:2])


_TILE_GROUP = 8
"""Rows of tiles that the portable kernel takes together."""
_CACHED_ROWS = 2048
"""Rows of the result in flight on Hopper: with as many columns, their operands stay in the L2 cache."""
_SMALLEST_TILE = 128
"""Rows and columns of the smallest tile on Hopper."""
_ALIGNED_BYTES = 16
_SCALES_BLOCKS = _version(torch.__version__) >= (2, 9) and _version(torch.version.cuda) >= (12, 9)
"""Whether torch multiplies fp8 operands with scales by block."""
_FUSED_BY_CUBLAS = ("relu", "gelu_tanh")
"""Activations of a product and a bias that cuBLAS applies itself."""

Config = PortableConfig | Sm90Config
_OPTIONS = (
    "bias", "activation", "gated", "kept", "residual", "a_by_columns", "b_by_columns", "scales_by_row",
    "scales_by_block", "fast",
)  # fmt: skip
FEATURES = {
    "rows": 0.5, "columns": 0.5, "depth": 0.5, "itemsize": 0.5, **dict.fromkeys(_OPTIONS, 1.0), "filled": 0.5,
    "odd_result": 3.0, "odd_operands": 3.0,
}  # fmt: skip
"""By which a backend is chosen, with their weights. Columns are those of the result; see `filled` and `is_odd`."""

_chooser, _fp8_chooser = Chooser("gemm", FEATURES), Chooser("gemm_fp8", FEATURES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Epilogue:
    """The operations on a product before it is stored."""

    bias: Tensor | None = None
    residual: Tensor | None = None
    activation: str = ""
    gated: bool = False
    keep: bool = False
    """Whether the input of the activation is stored too."""


class Scales:
    """The scales of fp8 operands, and their strides from row to row and from feature block to feature block."""

    def __init__(
        self, x: Tensor, scale_x: Tensor | None, weight: Tensor, scale_weight: Tensor | None, fast: bool
    ) -> None:
        kind = scale_kind(x, scale_x, weight, scale_weight)
        assert kind is not None
        self.kind = kind
        self.fast = fast
        self.x, self.x_strides = _scale_and_strides(scale_x, x.dim() - 1)
        self.weight, self.weight_strides = _scale_and_strides(scale_weight, weight.dim() - 1)

    @property
    def by_block(self) -> bool:
        return self.kind == BLOCK_SCALES


def _scale_and_strides(scale: Tensor | None, rows_dim: int) -> tuple[Tensor | None, tuple[int, int]]:
    """A scale as (rows, feature blocks), and its strides, 0 along a dimension that shares one scale."""
    if scale is None or not scale.dim():
        return scale, (0, 0)
    if scale.dim() == rows_dim:
        scale = scale.reshape(-1)
        return scale, (scale.stride(0), 0)
    scale = scale.reshape(-1, scale.shape[-1])
    return scale, (scale.stride(0), scale.stride(1))


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str, gated: bool,
    dtype: torch.dtype, tf32: bool, keep: bool, *, config: Config | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The result, and the input of the activation in the dtype of x, or an empty tensor without `keep`."""
    epilogue = Epilogue(bias=bias, residual=residual, activation=activation, gated=gated, keep=keep)
    result = x.new_empty(_result_shape(x, weight, gated), dtype=dtype)
    preactivation = x.new_empty([*x.shape[:-1], weight.shape[0]] if keep else 0)
    _multiply(as_matrix(x), weight, result, preactivation if keep else None, epilogue, None, tf32, config)
    return result, preactivation


def fp8_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, scale_x: Tensor | None,
    scale_weight: Tensor | None, activation: str, gated: bool, dtype: torch.dtype, fast_accumulate: bool, *,
    config: Config | None = None,
) -> Tensor:  # fmt: skip
    """The result of fp8 operands and their scales."""
    epilogue = Epilogue(bias=bias, residual=residual, activation=activation, gated=gated)
    result = x.new_empty(_result_shape(x, weight, gated), dtype=dtype)
    scales = Scales(x, scale_x, weight, scale_weight, fast_accumulate)
    _multiply(as_matrix(x), weight, result, None, epilogue, scales, False, config)
    return result


def backward(
    gradient: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, before: Tensor | None, activation: str,
    gated: bool, tf32: bool, for_x: bool, for_weight: bool, for_bias: bool, *, config: Config | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of x, weight and bias, contiguous; empty tensors for those that are not requested."""
    gradient = _activation_backward(gradient, x, weight, bias, before, activation, gated, tf32)
    rows = as_matrix(gradient).to(x.dtype)
    grad_x = x.new_empty(x.shape if for_x else (0,))
    grad_weight = weight.new_empty(weight.shape if for_weight else (0,))
    if for_x:
        _multiply(rows, weight.t(), grad_x, None, Epilogue(), None, tf32, config)
    if for_weight:
        _multiply(rows.t(), as_matrix(x).t(), grad_weight, None, Epilogue(), None, tf32, config)
    bias_dtype = weight.dtype if bias is None else bias.dtype
    if not for_bias:
        return grad_x, grad_weight, weight.new_empty(0, dtype=bias_dtype)
    return grad_x, grad_weight, rows.sum(0, dtype=torch.float32).to(bias_dtype)


def _activation_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, before: Tensor | None, activation: str,
    gated: bool, tf32: bool,
) -> Tensor:  # fmt: skip
    """The gradient of the input of the activation, which is recomputed where it was not kept."""
    if not activation:
        return gradient
    if before is None:
        before, _ = forward(x, weight, bias, None, "", False, x.dtype, tf32, False)
    if gated:
        return gated_packed_backward(gradient, before, activation, False)
    return activation_backward(gradient, before, None, activation)


def as_matrix(x: Tensor) -> Tensor:
    """(rows, columns): a view where one stride leads from each row to the next, and a copy otherwise."""
    return x if x.dim() == 2 else x.reshape(-1 if x.numel() else prod(x.shape[:-1]), x.shape[-1])


def _result_shape(x: Tensor, weight: Tensor, gated: bool) -> list[int]:
    return [*x.shape[:-1], weight.shape[0] // 2 if gated else weight.shape[0]]


def _multiply(
    a: Tensor, b: Tensor, result: Tensor, preactivation: Tensor | None, epilogue: Epilogue, scales: Scales | None,
    tf32: bool, config: Config | None,
) -> None:  # fmt: skip
    """Computes a @ b.T and the epilogue into `result`, and the input of the activation into `preactivation`."""
    if not result.numel():
        return
    result = result.view(-1, result.shape[-1])
    preactivation = None if preactivation is None else preactivation.view(-1, preactivation.shape[-1])
    if config is None:
        backend = _choose(a, b, result, epilogue, scales)
    else:
        takes = isinstance(config, Sm90Config) and takes_sm90(a, b, result, epilogue, scales)
        backend = "gluon" if takes else "triton"
    if backend == "torch":
        if scales is None:
            multiply_torch(a, b, result, preactivation, epilogue)
        else:
            multiply_fp8_torch(a, b, result, scales)
    elif backend == "gluon":
        sm90_config = config if isinstance(config, Sm90Config) else None
        multiply_sm90(a, b, result, preactivation, epilogue, scales, sm90_config)
    else:
        portable_config = config if isinstance(config, PortableConfig) else None
        multiply_portable(a, b, result, preactivation, epilogue, scales, tf32, portable_config)


def _choose(a: Tensor, b: Tensor, result: Tensor, epilogue: Epilogue, scales: Scales | None) -> str:
    """The backend of a product. `result` is a matrix."""
    residual = epilogue.residual
    key = (
        a.shape, a.stride(), b.shape, b.stride(), a.dtype, result.dtype, a.device,
        (a.data_ptr() | b.data_ptr() | (0 if residual is None else residual.data_ptr())) % _ALIGNED_BYTES,
        epilogue.bias is not None, epilogue.activation, epilogue.gated, epilogue.keep,
        None if residual is None else (residual.stride(), residual.dtype),
        None if scales is None else (scales.kind, scales.fast, scales.x_strides, scales.weight_strides),
    )  # fmt: skip
    chooser = _chooser if scales is None else _fp8_chooser
    known = chooser.known(key)
    if known is not None:
        return known
    names = candidates(a, b, result, epilogue, scales)
    return chooser.choose(key, names, features(a, b, epilogue, scales), a.device)


def candidates(a: Tensor, b: Tensor, result: Tensor, epilogue: Epilogue, scales: Scales | None) -> list[str]:
    """The backends that take a product: cuBLAS first."""
    takes = result.dtype == a.dtype if scales is None else takes_fp8_torch(a, b, result, epilogue, scales)
    names = ["torch"] if takes and torch_runs_on(a.device) else []
    if not takes_sm90(a, b, result, epilogue, scales):
        return [*names, "triton"]
    if scales is not None and scales.by_block:  # the portable kernel is slow with these
        return [*names, "gluon", "triton"]
    # results of few tiles: the portable kernel has smaller ones, and so more programs
    return [*names, *(("gluon", "triton") if fills_gpu(result) else ("triton", "gluon"))]


def features(a: Tensor, b: Tensor, epilogue: Epilogue, scales: Scales | None) -> tuple[float, ...]:
    """The values of `FEATURES`."""
    by_block = scales is not None and scales.by_block
    by_row = scales is not None and not by_block and (scales.x_strides[0] or scales.weight_strides[0]) != 0
    rows, columns = a.shape[0], b.shape[0] // (2 if epilogue.gated else 1)
    return (
        rows, columns, a.shape[1], a.element_size(), epilogue.bias is not None, bool(epilogue.activation),
        epilogue.gated, epilogue.keep, epilogue.residual is not None, _is_column_major(a), _is_column_major(b),
        by_row, by_block, scales is not None and scales.fast and not by_block,
        filled(rows, b.shape[0], processors(a.device)), is_odd(b.shape[0], a.element_size()),
        any(is_odd(max(x.stride()), x.element_size()) for x in (a, b)),
    )  # fmt: skip


def filled(rows: int, columns: int, programs: int) -> int:
    """The share of what tiles of 128 x 256 compute that is in the result, in percent.

    The rest is beyond its edges, or is the time of multiprocessors that have no tile in the last wave.
    """
    waves = -(-(-(-rows // 128) * -(-columns // 256)) // programs)
    return round(100 * rows * columns / (waves * programs * 128 * 256))


def is_odd(row: int, itemsize: int) -> bool:
    """Whether rows of so many elements do not all begin at multiples of 16 bytes.

    Kernels load and store such matrices in small pieces: cuBLAS takes three times as long for 10 rows.
    """
    return row * itemsize % _ALIGNED_BYTES != 0


def multiply_torch(a: Tensor, b: Tensor, result: Tensor, preactivation: Tensor | None, epilogue: Epilogue) -> None:
    """Computes a @ b.T by cuBLAS, and what it does not fuse of the epilogue by the next kernel.

    The product is rounded to the dtype of the result before its activation.
    """
    bias = None if epilogue.bias is None else epilogue.bias.to(a.dtype)
    residual = None if epilogue.residual is None else epilogue.residual.reshape(result.shape)
    if not epilogue.activation:
        if bias is None and residual is not None and residual.dtype == result.dtype:
            torch.addmm(residual, a, b.t(), out=result)
            return
        _linear_into(result, a, b, bias)
    elif (
        bias is not None
        and epilogue.activation in _FUSED_BY_CUBLAS
        and not (epilogue.gated or epilogue.keep)
        and a.is_cuda  # elsewhere its GELU is another one
    ):
        gelu = epilogue.activation != "relu"
        torch._addmm_activation(bias, a, b.t(), use_gelu=gelu, out=result)
    else:
        product = a.new_empty(a.shape[0], b.shape[0]) if preactivation is None else preactivation
        _linear_into(product, a, b, bias)
        if epilogue.gated:
            gated_packed_forward(product, epilogue.activation, False, out=result, early=True)
        else:
            activation_forward(product, None, epilogue.activation, out=result)
    if residual is not None:
        result.add_(residual)


def takes_fp8_torch(a: Tensor, b: Tensor, result: Tensor, epilogue: Epilogue, scales: Scales) -> bool:
    """Whether `torch._scaled_mm` supports an fp8 product: scales of both operands of one kind, and no epilogue."""
    rows, columns = result.shape
    multiple = SCALE_BLOCK_SIZE if scales.by_block else _ALIGNED_BYTES
    if scales.x is None or scales.weight is None or (scales.by_block and not _SCALES_BLOCKS):
        return False
    return (
        epilogue == Epilogue()
        and result.dtype == torch.bfloat16
        and a.is_contiguous()
        and b.is_contiguous()
        and a.shape[1] % multiple == 0
        and columns % multiple == 0
        and (scales.by_block or scales.x.numel() == (rows if scales.weight.numel() > 1 else 1))
        and (scales.by_block or scales.weight.numel() in (1, columns))
    )


def multiply_fp8_torch(a: Tensor, b: Tensor, result: Tensor, scales: Scales) -> None:
    """Computes a @ b.T of fp8 operands by `torch._scaled_mm`."""
    assert scales.x is not None
    assert scales.weight is not None
    if scales.by_block:  # torch takes the scales of a block of features next to those of the next row
        scale_x, scale_weight = scales.x.t().contiguous().t(), scales.weight.t()
    elif scales.weight.numel() > 1:
        scale_x, scale_weight = scales.x.contiguous().view(-1, 1), scales.weight.contiguous().view(1, -1)
    else:
        scale_x, scale_weight = scales.x.view(()), scales.weight.view(())
    fast = scales.fast and not scales.by_block
    torch._scaled_mm(a, b.t(), scale_x, scale_weight, out_dtype=result.dtype, use_fast_accum=fast, out=result)


def _linear_into(result: Tensor, a: Tensor, b: Tensor, bias: Tensor | None) -> None:
    if bias is None:
        torch.mm(a, b.t(), out=result)
    else:
        torch.addmm(bias, a, b.t(), out=result)


def multiply_portable(
    a: Tensor, b: Tensor, result: Tensor, preactivation: Tensor | None, epilogue: Epilogue, scales: Scales | None,
    tf32: bool, config: PortableConfig | None = None,
) -> None:  # fmt: skip
    """Computes a @ b.T and the epilogue by the portable kernel. `result` is contiguous and not empty."""
    rows, columns = result.shape
    depth = a.shape[1]
    config = config or portable_heuristic(a, result, epilogue.gated, tf32)
    row_tiles, column_tiles = triton.cdiv(rows, config.block_m), triton.cdiv(columns, config.block_n)
    residual = None if epilogue.residual is None else epilogue.residual.reshape(rows, columns)
    bias = None if epilogue.bias is None else epilogue.bias.contiguous()
    a_scale, b_scale = (None, None) if scales is None else (scales.x, scales.weight)
    launch(
        gemm_kernel, (row_tiles * column_tiles, 1, 1),
        a, b, a if bias is None else bias, a if residual is None else residual, a if a_scale is None else a_scale,
        a if b_scale is None else b_scale, result, a if preactivation is None else preactivation, rows, columns, depth,
        *a.stride(), *b.stride(), *((0, 0) if residual is None else residual.stride()),
        *((0, 0) if scales is None else scales.x_strides), *((0, 0) if scales is None else scales.weight_strides),
        row_tiles, column_tiles, _TILE_GROUP,
        epilogue.activation, epilogue.gated, preactivation is not None, bias is not None, residual is not None,
        a_scale is not None, b_scale is not None, scales is not None and scales.by_block,
        scales is not None and scales.fast, "tf32" if tf32 else "ieee", depth % config.block_k == 0, SCALE_BLOCK_SIZE,
        config.block_m, config.block_n, config.block_k, warps=config.warps, stages=config.stages,
    )  # fmt: skip


@triton.jit
def compensated_dot(a, b, total, rest):
    """The float32 sum plus a @ b, and its rounding error, which the next block starts from (Kahan's summation).

    Without compensation, sums over a depth of 1,280 have 8 times the error.
    """
    part = tl.dot(a, b, rest, input_precision="ieee")
    whole = total + part
    rest = part - (whole - total)
    rest = tl.where(tl.abs(rest) < float("inf"), rest, 0.0)  # an infinite sum stays infinite, and not NaN
    return whole, rest


@triton.jit
def dot_add(a, b, total, rest, PRECISION: tl.constexpr, FAST: tl.constexpr, BLOCK_K: tl.constexpr):
    """The sum plus a @ b, and the rounding error of float32 sums.

    fp8 products are accumulated by the tensor cores within one block, and in float32 across blocks, unless FAST.
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
    """The sum times the scales of its row and column, plus the bias."""
    if HAS_A_SCALE:
        total *= tl.load(a_scale + row.to(tl.int64) * a_scale_row).to(tl.float32)[:, None]
    if HAS_B_SCALE:
        total *= tl.load(b_scale + column.to(tl.int64) * b_scale_column, mask=column < columns).to(tl.float32)[None, :]
    if HAS_BIAS:
        total += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    return total


@triton.jit
def gemm_kernel(
    a, b, bias, residual, a_scale, b_scale, result, preactivation, rows, columns, depth, a_row, a_depth, b_column,
    b_depth, residual_row, residual_column, a_scale_row, a_scale_block, b_scale_column, b_scale_block, row_tiles,
    column_tiles, group,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, KEEP: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, HAS_A_SCALE: tl.constexpr, HAS_B_SCALE: tl.constexpr, BY_BLOCK: tl.constexpr,
    FAST: tl.constexpr, PRECISION: tl.constexpr, EVEN: tl.constexpr, SCALE_BLOCK: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One tile of the result. `columns` are those of the result; those of `up` follow those of the gate in b."""
    # the tile: programs of one group go down its rows first, so that those in flight share what they read
    program = tl.program_id(0)
    in_group = group * column_tiles
    first_tile = program // in_group * group
    high = tl.minimum(row_tiles - first_tile, group)
    row = (first_tile + program % in_group % high) * BLOCK_M + tl.arange(0, BLOCK_M)  # (block_m,)
    column = program % in_group // high * BLOCK_N + tl.arange(0, BLOCK_N)  # (block_n,)
    # rows and columns beyond the end wrap around: loads need no masks, and the results are not stored
    safe_row, safe_column = row % rows, column % columns
    step = tl.arange(0, BLOCK_K)
    a += safe_row.to(tl.int64)[:, None] * a_row + step.to(tl.int64)[None, :] * a_depth  # (block_m, block_k)
    b += safe_column.to(tl.int64)[None, :] * b_column + step.to(tl.int64)[:, None] * b_depth  # (block_k, block_n)
    to_up = tl.cast(columns, tl.int64) * b_column
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    rest = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if GATED:
        up_total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        up_rest = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if BY_BLOCK:
        a_scales = a_scale + safe_row.to(tl.int64) * a_scale_row
        b_scales = b_scale + (safe_column // SCALE_BLOCK).to(tl.int64) * b_scale_column
        up_scales = b_scale + ((safe_column + columns) // SCALE_BLOCK).to(tl.int64) * b_scale_column
    a_step, b_step = tl.cast(a_depth, tl.int64) * BLOCK_K, tl.cast(b_depth, tl.int64) * BLOCK_K
    # main loop
    for start in range(0, depth, BLOCK_K):
        if EVEN:
            left, right = tl.load(a), tl.load(b)
        else:
            left = tl.load(a, mask=(step < depth - start)[None, :], other=0.0)
            right = tl.load(b, mask=(step < depth - start)[:, None], other=0.0)
        if BY_BLOCK:
            block = start // SCALE_BLOCK
            left_scale = tl.load(a_scales + block * a_scale_block).to(tl.float32)[:, None]
            right_scale = tl.load(b_scales + block * b_scale_block).to(tl.float32)[None, :]
            total += tl.dot(left, right) * (left_scale * right_scale)
        else:
            total, rest = dot_add(left, right, total, rest, PRECISION, FAST, BLOCK_K)
        if GATED:
            if EVEN:
                up = tl.load(b + to_up)
            else:
                up = tl.load(b + to_up, mask=(step < depth - start)[:, None], other=0.0)
            if BY_BLOCK:
                up_scale = tl.load(up_scales + block * b_scale_block).to(tl.float32)[None, :]
                up_total += tl.dot(left, up) * (left_scale * up_scale)
            else:
                up_total, up_rest = dot_add(left, up, up_total, up_rest, PRECISION, FAST, BLOCK_K)
        a += a_step
        b += b_step
    # epilogue, in float32
    outer_a: tl.constexpr = HAS_A_SCALE and not BY_BLOCK
    outer_b: tl.constexpr = HAS_B_SCALE and not BY_BLOCK
    total = scale_and_bias(
        total, bias, a_scale, b_scale, safe_row, column, columns, a_scale_row, b_scale_column, HAS_BIAS, outer_a,
        outer_b,
    )  # fmt: skip
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    line = row.to(tl.int64)[:, None]
    if KEEP:
        preactivation += line * (columns * (2 if GATED else 1)) + column[None, :]
        tl.store(preactivation, total.to(preactivation.dtype.element_ty), mask=inside)
    if ACTIVATION != "":
        total = activate(total, ACTIVATION)
    if GATED:
        up_total = scale_and_bias(
            up_total, bias + columns, a_scale, b_scale + tl.cast(columns, tl.int64) * b_scale_column, safe_row, column,
            columns, a_scale_row, b_scale_column, HAS_BIAS, outer_a, outer_b,
        )  # fmt: skip
        if KEEP:
            tl.store(preactivation + columns, up_total.to(preactivation.dtype.element_ty), mask=inside)
        total *= up_total
    if HAS_RESIDUAL:
        residual += line * residual_row + column.to(tl.int64)[None, :] * residual_column
        total += tl.load(residual, mask=inside, other=0.0).to(tl.float32)
    tl.store(result + line * columns + column[None, :], total.to(result.dtype.element_ty), mask=inside)


def fills_gpu(result: Tensor) -> bool:
    """Whether a result has tiles for a quarter of the multiprocessors. Smaller tiles would be no more than four times
    as many.
    """
    rows, columns = result.shape
    tiles: int = triton.cdiv(rows, _SMALLEST_TILE) * triton.cdiv(columns, _SMALLEST_TILE)
    return 4 * tiles >= processors(result.device)


def takes_sm90(a: Tensor, b: Tensor, result: Tensor, epilogue: Epilogue, scales: Scales | None) -> bool:
    """Whether the kernel for Hopper supports a product on its device: 16- or 8-bit operands that TMA can copy."""
    if not gluon.runs_on(a.device) or a.dtype not in (torch.bfloat16, torch.float16, torch.float8_e4m3fn):
        return False
    if a.dtype == torch.float8_e4m3fn and (_is_column_major(a) or _is_column_major(b)):
        return False
    if epilogue.gated and _is_column_major(b):
        return False  # tiles of gate and up would not be adjacent in shared memory
    if scales is not None and scales.by_block and epilogue.gated and b.shape[0] % 256:
        return False  # a tile of `up` would have two scales
    stored = [result] if epilogue.residual is None else [result, epilogue.residual.reshape(result.shape)]
    return (
        0 not in a.shape
        and max(*a.shape, *b.shape) < 2**30
        and all(map(_is_copyable, (*_gate_and_up(a, False), *_gate_and_up(b, epilogue.gated))))
        and all(_is_copyable(x) and not _is_column_major(x) and x.dtype == result.dtype for x in stored)
        and result.dtype in (torch.bfloat16, torch.float16, torch.float32)
        and (
            not epilogue.keep
            or (result.dtype == a.dtype and result.shape[1] * result.element_size() % _ALIGNED_BYTES == 0)
        )
    )


def _is_column_major(x: Tensor) -> bool:
    return x.stride(1) != 1 and x.shape[1] != 1


def _is_copyable(x: Tensor) -> bool:
    """Whether TMA copies tiles of a matrix: one dimension is contiguous, the other strided by multiples of 16 bytes."""
    inner = int(not _is_column_major(x))
    stride_bytes = x.stride(1 - inner) * x.element_size()
    return (
        (x.stride(inner) == 1 or x.shape[inner] == 1)
        and x.data_ptr() % _ALIGNED_BYTES == 0
        and (x.shape[1 - inner] == 1 or (stride_bytes > 0 and stride_bytes % _ALIGNED_BYTES == 0))
    )


def _gate_and_up(b: Tensor, gated: bool) -> tuple[Tensor, Tensor]:
    """The rows of the gate and those of `up`; twice the same tensor without a gate."""
    half = b.shape[0] // 2
    return (b[:half], b[half:]) if gated else (b, b)


def _tile_descriptor(x: Tensor, rows: int, columns: int) -> Any:
    """The TMA descriptor for tiles of a matrix; of its transpose if it is column-major."""
    block = [rows, columns]
    if _is_column_major(x):
        x, block = x.t(), [columns, rows]
    # the stride of a single row is arbitrary, and must be a multiple of 16 bytes all the same
    stride = x.stride(0) if x.shape[0] > 1 else -(-x.shape[1] // _ALIGNED_BYTES) * _ALIGNED_BYTES
    if x.stride() != (stride, 1):
        x = torch.as_strided(x, x.shape, (stride, 1))
    return gluon.descriptor(x, block)


def multiply_sm90(
    a: Tensor, b: Tensor, result: Tensor, preactivation: Tensor | None, epilogue: Epilogue, scales: Scales | None,
    config: Sm90Config | None = None,
) -> None:  # fmt: skip
    """Computes a @ b.T and the epilogue by the kernel for Hopper."""
    from nearpeak.kernels.gemm.sm90 import gemm_sm90_kernel

    rows, columns = result.shape
    if config is None:
        config = _tuned_sm90(a, result, epilogue, scales) or sm90_heuristic(
            result, sm90_config_kind(epilogue, scales), epilogue.residual is not None, epilogue.keep
        )
    depth = SM90_ROW_BYTES // a.element_size()
    row_tiles, column_tiles = triton.cdiv(rows, config.block_m), triton.cdiv(columns, config.block_n)
    tiles = row_tiles * column_tiles
    slice_width = config.block_n // config.slices
    gate, up = (_tile_descriptor(x, config.block_n, depth) for x in _gate_and_up(b, epilogue.gated))
    out = _tile_descriptor(result, config.rows, slice_width)
    kept_gate = kept_up = residual = out
    if preactivation is not None:
        half = preactivation.shape[1] // 2
        halves = (preactivation[:, :half], preactivation[:, half:]) if epilogue.gated else (preactivation,) * 2
        kept_gate, kept_up = (_tile_descriptor(x, config.rows, slice_width) for x in halves)
    if epilogue.residual is not None:
        residual = _tile_descriptor(epilogue.residual.reshape(rows, columns), config.rows, slice_width)
    a_scale, b_scale, scale_strides = _scale_arguments(scales, result)
    launch(
        gemm_sm90_kernel, (min(processors(a.device), tiles), 1, 1),
        result if epilogue.bias is None else epilogue.bias.contiguous(), a_scale, b_scale,
        _tile_descriptor(a, config.rows, depth), gate, up, out, kept_gate, kept_up, residual, rows, columns,
        triton.cdiv(a.shape[1], depth), row_tiles, column_tiles,
        config.tile_group or max(1, _CACHED_ROWS // config.block_m), tiles, *scale_strides,
        config.rows, config.block_n, depth, config.consumers, config.stages, config.slices, config.buffers,
        epilogue.activation, epilogue.gated, preactivation is not None, epilogue.bias is not None,
        epilogue.residual is not None, scales is not None and scales.kind == OUTER_SCALES,
        scales is not None and scales.by_block, scales is not None and (scales.by_block or not scales.fast),
        _is_column_major(a), _is_column_major(b),
        warps=4, registers=168 if config.consumers == 2 else 128,
    )  # fmt: skip


def _scale_arguments(scales: Scales | None, unused: Tensor) -> tuple[Tensor, Tensor, tuple[int, int, int, int]]:
    """Both scales, 1 for one that is missing, and their strides."""
    if scales is None:
        return unused, unused, (0, 0, 0, 0)
    one = torch.ones((), device=unused.device) if scales.x is None or scales.weight is None else unused
    a_scale, b_scale = one if scales.x is None else scales.x, one if scales.weight is None else scales.weight
    return a_scale, b_scale, (*scales.x_strides, *scales.weight_strides)


def sm90_config_kind(epilogue: Epilogue, scales: Scales | None) -> str:
    """The name of the products that share configurations."""
    bits = "16_bits" if scales is None else "8_bits_fast" if scales.fast and not scales.by_block else "8_bits"
    return bits + ("_gated" if epilogue.gated else "")


def sm90_table_name(itemsize: int, epilogue: Epilogue, scales: Scales | None) -> str | None:
    """The name of a product in the table, where its size is the number of results; None if none are measured.

    A residual and results of 32 bits need more shared memory than the measured configurations leave.
    """
    if epilogue.residual is not None or itemsize != 2:
        return None
    return f"gemm_sm90_{sm90_config_kind(epilogue, scales)}" + ("_kept" if epilogue.keep else "")


def _tuned_sm90(a: Tensor, result: Tensor, epilogue: Epilogue, scales: Scales | None) -> Sm90Config | None:
    name = sm90_table_name(result.element_size(), epilogue, scales)
    return from_row(tuned(name, result.numel(), a.device), Sm90Config) if name else None
