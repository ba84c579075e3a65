"""The Triton kernels of `cross_entropy`, and the launchers of both losses.

Bytes moved, for n logits of b bytes: n * b for the loss alone; 2 * n * b with the gradient stored in the same pass;
3 * n * b if the gradient is stored by a backward pass.

The loss of a row needs its maximum, the sum of exponentials relative to it, and the target's logit. The gradient is
    scale * ((all terms + extra) * softmax - own at the target - spread * class weights) * derivative of the softcap
with factors that are the same for a whole row. Ignored rows are not read.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import ClassVar, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearpeak.kernels._runtime.launch import launch, next_power_of_2
from nearpeak.kernels._runtime.rows import LOWEST, exponential, merge_dimensions, tanh
from nearpeak.kernels._runtime.tuning import from_row, processors, tuned
from nearpeak.kernels.losses import PARTS

LONGEST_WHOLE_ROW = 16384
"""The longest row that is kept in registers: one of 32,000 leaves room for one program on a multiprocessor, which waits
between its phases, and takes 1.5 times as long as block by block."""
_LONGEST_NARROW_ROW = 4096
"""The same for rows that do not begin at multiples of 16 elements: longer ones load faster block by block."""
_COUNT_BLOCK = 1024
_SCALE_BLOCK = 8192
_SCALE_PROGRAMS = 132 * 8
CHUNK_BYTES = 2**30
"""The most memory for the logits of a chunk, unless the caller says how many tokens it has."""
FEW_CHUNKS = 8
"""Up to so many chunks, the gradient of the weight is accumulated in the dtype of the weight."""
_SLICE_BYTES = 64 * 2**20
_ROW_MULTIPLE = 64
"""Of elements: a row of logits begins at a multiple of 128 bytes."""
_FLOP_PER_BYTE = 170
"""16-bit FLOP in the time of one byte to or from memory: 700 TFLOP/s and 4.2 TB/s of large GEMMs and copies on an H200,
`benchmarks/results/kernels_h200.json`."""
_FLOP_PER_CHUNK = 1.4e10
"""The same for the launches of a chunk, 20 us."""
_WORTH = 1.003
"""A chunk that needs more memory must be faster by this factor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeRowConfig:
    """Of the kernel that keeps whole rows in registers: rows of a program."""

    variant: ClassVar[str] = "whole"
    rows: int
    warps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LongRowConfig:
    """Of the kernel for long rows: loads of 16 bytes that a thread has in flight."""

    variant: ClassVar[str] = "long"
    repeats: int
    warps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientConfig:
    """Of the kernel that computes the gradient alone: elements of a program."""

    elements: int = 4096
    warps: int = 4


RowConfig = WholeRowConfig | LongRowConfig


def cross_entropy_heuristic(columns: int, rows: int, wide: bool, gradient: bool, slots: int) -> RowConfig:
    """The configuration where none was measured, on so many multiprocessors (`slots`)."""
    if columns <= (LONGEST_WHOLE_ROW if wide else _LONGEST_NARROW_ROW):
        block = next_power_of_2(columns)
        several = max(1, min(4096 // block, next_power_of_2(triton.cdiv(rows, 264))))
        return WholeRowConfig(rows=several, warps=max(1, min(32, several * block // 1024)))
    if not gradient:
        return LongRowConfig(repeats=2, warps=16)
    # four programs of 8 warps on a multiprocessor, if there are as many rows: one computes while others load. Fewer of
    # longer rows, most of which then stay in the L2 cache until they are read again
    return LongRowConfig(repeats=4 if wide else 2, warps=8 if columns <= 65536 and rows > 2 * slots else 16)


def cross_entropy_candidates(columns: int) -> list[RowConfig]:
    """Configurations worth measuring, of forward passes that store the gradient, for rows of this length."""
    block = next_power_of_2(columns)
    whole = [
        WholeRowConfig(rows=rows, warps=warps)
        for rows in (1, 2, 4, 8, 16, 32)
        for warps in (1, 2, 4, 8, 16, 32)
        if 8 <= rows * block // (32 * warps) <= 64 and (rows == 1 or rows * block <= 16384)
    ]
    long = [
        LongRowConfig(repeats=repeats, warps=warps)
        for repeats in (1, 2, 4)
        for warps in (4, 8, 16, 32)
        if repeats * warps * 256 <= columns and repeats * warps <= 64
    ]
    return [*(whole if columns <= LONGEST_WHOLE_ROW else []), *(long if columns > _LONGEST_NARROW_ROW else [])]


class LossSettings(NamedTuple):
    """The options of a loss."""

    ignore_index: int
    label_smoothing: float
    softcap: float
    z_loss: float
    reduction: str


def cross_entropy_forward(
    logits: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, label_smoothing: float, softcap: float,
    z_loss: float, reduction: str, with_gradient: bool, *, config: RowConfig | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The loss; the gradient of the logits or an empty tensor; top and sum of each row; the denominator of a mean."""
    settings = LossSettings(ignore_index, label_smoothing, softcap, z_loss, reduction)
    gradient = torch.empty(logits.shape if with_gradient else (0,), dtype=logits.dtype, device=logits.device)
    loss, statistics, parts = _forward(logits, target, weight, settings, gradient if with_gradient else None, config)
    return loss, gradient, statistics, parts


def cross_entropy_forward_(
    logits: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, label_smoothing: float, softcap: float,
    z_loss: float, reduction: str, *, config: RowConfig | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The loss, and top and sum of each row. The gradient overwrites the logits."""
    settings = LossSettings(ignore_index, label_smoothing, softcap, z_loss, reduction)
    return _forward(logits, target, weight, settings, logits, config)[:2]


def _forward(
    logits: Tensor, target: Tensor, weight: Tensor | None, settings: LossSettings, gradient: Tensor | None,
    config: RowConfig | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    flat = target.reshape(-1).contiguous()
    losses = torch.empty(flat.numel(), dtype=torch.float32, device=logits.device)
    statistics = torch.empty(2, flat.numel(), dtype=torch.float32, device=logits.device)
    weight = None if weight is None else weight.contiguous()
    parts = denominator(flat, weight, logits.shape[-1], settings)
    total = weight_total(weight, settings)
    tops, totals = statistics.unbind()
    write_rows(logits, flat, weight, total, parts, losses, tops, totals, settings, gradient=gradient, config=config)
    return reduce_losses(losses, target.shape, settings), statistics, parts


def denominator(target: Tensor, weight: Tensor | None, columns: int, settings: LossSettings) -> Tensor:
    """The sum of the weights of the targets that are not ignored, in parts, on the device; empty unless for a mean."""
    rows = target.numel()
    parts = torch.empty(PARTS if settings.reduction == "mean" else 0, dtype=torch.float32, device=target.device)
    if settings.reduction == "mean":
        programs = min(PARTS, next_power_of_2(triton.cdiv(rows, _COUNT_BLOCK)))
        launch(
            count_targets_kernel, (programs, 1, 1), target, target if weight is None else weight, parts, rows, columns,
            settings.ignore_index, triton.cdiv(rows, programs), weight is not None, PARTS // programs, _COUNT_BLOCK,
            warps=4,
        )  # fmt: skip
    return parts


def weight_total(weight: Tensor | None, settings: LossSettings) -> Tensor | None:
    """The sum of all class weights, if label smoothing needs it."""
    if weight is None or not settings.label_smoothing:
        return None
    return weight.sum(dtype=torch.float32)


def reduce_losses(losses: Tensor, shape: torch.Size, settings: LossSettings) -> Tensor:
    """The loss from that of each row, which a mean has divided already."""
    if settings.reduction == "none":
        return losses.view(shape)
    if settings.reduction == "mean" and not losses.numel():
        return losses.new_full((), float("nan"))
    return losses.sum()


def write_rows(
    logits: Tensor, target: Tensor, weight: Tensor | None, total: Tensor | None, parts: Tensor, losses: Tensor,
    tops: Tensor, totals: Tensor, settings: LossSettings, *, gradient: Tensor | None = None, scaled: bool = True,
    logprobs: Tensor | None = None, entropies: Tensor | None = None, config: RowConfig | None = None,
) -> None:  # fmt: skip
    """Stores the loss of each row, its top and sum of exponentials, and the rest if there is a tensor for it.

    `target` is contiguous and of one dimension, `gradient` may be `logits`. With `scaled` the gradient is that of a
    mean if the loss is one.
    """
    source, sink = _source_and_sink(logits, gradient)
    rows, columns = source.rows, source.columns
    wide = _is_wide(columns, source.outer_stride, source.row_stride, sink.outer_stride, sink.row_stride)
    if config is None:
        name = "cross_entropy" if wide else "cross_entropy_narrow"
        config = from_row(tuned(name, columns, logits.device), WholeRowConfig, LongRowConfig)
    config = config or cross_entropy_heuristic(columns, rows, wide, gradient is not None, processors(logits.device))
    shared = (
        source.tensor, sink.tensor, target, losses if weight is None else weight, losses if total is None else total,
        parts, losses, tops, totals, losses if logprobs is None else logprobs,
        losses if entropies is None else entropies,
        rows, columns, source.inner, source.outer_stride, source.row_stride, sink.outer_stride, sink.row_stride,
        settings.ignore_index, float(settings.label_smoothing), float(settings.softcap or 1.0), float(settings.z_loss),
        source.has_outer, settings.reduction == "mean", scaled, weight is not None, settings.label_smoothing != 0.0,
        settings.softcap != 0.0, settings.z_loss != 0.0, gradient is not None, logprobs is not None,
        entropies is not None, PARTS,
    )  # fmt: skip
    if isinstance(config, WholeRowConfig):
        grid = (triton.cdiv(rows, config.rows), 1, 1)
        launch(
            cross_entropy_whole_rows_kernel, grid, *shared, config.rows, next_power_of_2(columns), warps=config.warps
        )
    else:
        lanes = config.warps * 32 * (16 // source.tensor.element_size())
        shift = _shift(source, sink)
        is_plain = weight is None and entropies is None and not settings.label_smoothing and not settings.softcap
        launch(
            cross_entropy_long_rows_kernel, (rows, 1, 1), *shared, config.repeats, lanes, shift, warps=config.warps,
            # the compiler takes more for the ends of rows, and half as many programs run at a time
            registers=64 if shift and is_plain and config.repeats <= 2 else None,
        )  # fmt: skip
    if gradient is logits and sink.tensor is not logits:
        logits.copy_(sink.tensor)  # its strides could not be addressed: the kernel wrote to a copy


def cross_entropy_backward(
    upstream: Tensor, logits: Tensor, target: Tensor, weight: Tensor | None, statistics: Tensor, parts: Tensor,
    ignore_index: int, label_smoothing: float, softcap: float, z_loss: float, reduction: str,
    *, config: GradientConfig | None = None,
) -> Tensor:  # fmt: skip
    """The gradient of the logits, contiguous."""
    settings = LossSettings(ignore_index, label_smoothing, softcap, z_loss, reduction)
    gradient = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    write_gradient(upstream, logits, gradient, target, weight, statistics[0], statistics[1], parts, settings, config)
    return gradient


def cross_entropy_backward_(
    upstream: Tensor, logits: Tensor, target: Tensor, weight: Tensor | None, statistics: Tensor, parts: Tensor,
    ignore_index: int, label_smoothing: float, softcap: float, z_loss: float, reduction: str,
    *, config: GradientConfig | None = None,
) -> None:  # fmt: skip
    """Overwrites the logits with their gradient."""
    settings = LossSettings(ignore_index, label_smoothing, softcap, z_loss, reduction)
    write_gradient(upstream, logits, logits, target, weight, statistics[0], statistics[1], parts, settings, config)


def write_gradient(
    upstream: Tensor, logits: Tensor, gradient: Tensor, target: Tensor, weight: Tensor | None, tops: Tensor,
    totals: Tensor, parts: Tensor, settings: LossSettings, config: GradientConfig | None = None,
) -> None:  # fmt: skip
    """Stores the gradient; `upstream` is a scalar or has one number per row, `gradient` may be `logits`."""
    source, sink = _source_and_sink(logits, gradient)
    rows, columns = source.rows, source.columns
    weight = None if weight is None else weight.contiguous()
    total = weight_total(weight, settings)
    upstream = upstream.reshape(-1)
    shift = _shift(source, sink)
    config = config or from_row(tuned("cross_entropy_gradient", columns, logits.device), GradientConfig)
    config = config or GradientConfig()
    block = min(next_power_of_2(columns), config.elements)
    several = 1 if shift and columns > _LONGEST_NARROW_ROW else config.elements // block
    shift = shift if several == 1 else 0
    grid = (triton.cdiv(rows, several), triton.cdiv(columns + max(shift - 1, 0), block), 1)
    launch(
        cross_entropy_gradient_kernel, grid, upstream, source.tensor, sink.tensor, target.reshape(-1).contiguous(),
        tops if weight is None else weight, tops if total is None else total, parts, tops, totals,
        rows, columns, source.inner, source.outer_stride, source.row_stride, sink.outer_stride, sink.row_stride,
        0 if upstream.numel() == 1 else upstream.stride(0),
        settings.ignore_index, float(settings.label_smoothing), float(settings.softcap or 1.0), float(settings.z_loss),
        source.has_outer, settings.reduction == "mean", weight is not None, settings.label_smoothing != 0.0,
        settings.softcap != 0.0, settings.z_loss != 0.0, PARTS, several, block, shift, warps=config.warps,
    )  # fmt: skip
    if gradient is logits and sink.tensor is not logits:
        logits.copy_(sink.tensor)


def scale_gradient_(gradient: Tensor, factor: Tensor) -> None:
    """Multiplies in place by a scalar on the device, at the cost of a launch alone if that is 1."""
    if not gradient.is_contiguous():
        gradient.mul_(factor)
        return
    programs = min(triton.cdiv(gradient.numel(), _SCALE_BLOCK), _SCALE_PROGRAMS)
    launch(scale_gradient_kernel, (programs, 1, 1), gradient, factor, gradient.numel(), _SCALE_BLOCK, warps=8)


class LogitRows(NamedTuple):
    """Logits as rows, without a copy if two strides address all of them, as in logits[:, :-1]."""

    tensor: Tensor
    rows: int
    columns: int
    inner: int
    outer_stride: int
    row_stride: int

    @property
    def has_outer(self) -> bool:
        return self.inner < self.rows


def logit_rows(logits: Tensor) -> LogitRows:
    """A tensor (..., columns) as rows. It is copied if the last stride is not 1, or if rows need more than two."""
    columns = logits.shape[-1]
    count = prod(logits.shape[:-1])
    if columns > 1 and logits.stride(-1) != 1:
        logits = logits.contiguous()
    levels = merge_dimensions(logits.shape[:-1], logits.stride()[:-1])
    if len(levels) > 2:
        logits = logits.contiguous()
        levels = [(count, columns)]
    levels = [(1, 0)] * (2 - len(levels)) + levels
    return LogitRows(logits, count, columns, levels[1][0], levels[0][1], levels[1][1])


def _source_and_sink(logits: Tensor, gradient: Tensor | None) -> tuple[LogitRows, LogitRows]:
    """The rows of logits and of their gradient, which is contiguous or the logits, with the same `inner`."""
    source = logit_rows(logits)
    if gradient is None or gradient is logits:
        return source, source
    columns = source.columns
    return source, LogitRows(gradient, source.rows, columns, source.inner, source.inner * columns, columns)


def _is_wide(*numbers: int) -> bool:
    return not any(number % 16 for number in numbers)


def _shift(source: LogitRows, sink: LogitRows) -> int:
    """The number of elements in 16 bytes, if rows of both begin equally far from a multiple of these but not at one."""
    numbers = (source.outer_stride, source.row_stride, sink.outer_stride, sink.row_stride)
    width = 16 // source.tensor.element_size()
    if _is_wide(*numbers) or source.tensor.dtype != sink.tensor.dtype:
        return 0
    differences = (source.outer_stride - sink.outer_stride, source.row_stride - sink.row_stride)
    return 0 if any(number % width for number in differences) else width


@triton.jit
def capped(values, cap, CAP: tl.constexpr):
    """Logits in float32 with the softcap applied, and its derivative."""
    values = values.to(tl.float32)
    cap_slope = values
    if CAP:
        part, cap_slope = tanh(values / cap)
        values = cap * part
    return values, cap_slope


@triton.jit
def row_start(row, inner, outer_stride, row_stride, OUTER: tl.constexpr):
    """The first element of a row: rows are `row_stride` apart, and blocks of `inner` rows `outer_stride`."""
    if OUTER:
        start = row // inner * outer_stride + row % inner * row_stride
    else:
        start = row * row_stride
    return start


@triton.jit
def mean_scale(parts, MEAN: tl.constexpr, PARTS: tl.constexpr):
    """The factor of each row in a mean; 1 for a sum."""
    scale = 1.0
    if MEAN:
        scale = 1.0 / tl.sum(tl.load(parts + tl.arange(0, PARTS)))
    return scale


@triton.jit
def loss_weights(target, valid, weight, weight_total, smoothing, columns, WEIGHTED: tl.constexpr, SMOOTH: tl.constexpr):
    """The weights in a row's loss of the target's own term, of all terms together, and of each class besides."""
    own = 1.0
    if WEIGHTED:
        own = tl.load(weight + target, mask=valid, other=0.0).to(tl.float32)
    all_terms = own
    spread = 0.0
    if SMOOTH:
        spread = smoothing / columns
        own = own * (1.0 - smoothing)
        if WEIGHTED:
            all_terms = own + spread * tl.load(weight_total)
        else:
            all_terms = own + smoothing
    return own, all_terms, spread


@triton.jit
def finish_row(
    row, rows, is_kept, valid, logit, top, total, smooth, entropy_sum, own, all_terms, spread, z, scale,
    losses, tops, totals, logprobs, entropies, SMOOTH: tl.constexpr, Z: tl.constexpr,
    LOGPROBS: tl.constexpr, ENTROPY: tl.constexpr,
):  # fmt: skip
    """Stores the loss and the statistics of rows. Returns the factor of the softmax in the gradient of the z-loss.

    `smooth` is the sum of the (weighted) distances of all logits from the top, `entropy_sum` that weighted by softmax.
    """
    inside = row < rows
    log_total = tl.log(total)
    below = top - logit  # first: a difference of large numbers is exact, their sums are not
    loss = own * (below + log_total)
    extra = 0.0
    if SMOOTH:
        loss += (all_terms - own) * log_total - spread * smooth
    if Z:
        normalizer = top + log_total
        loss += z * normalizer * normalizer
        extra = 2.0 * z * normalizer
    invalid = tl.where(is_kept, float("nan"), 0.0)
    # 0 times infinity if all are ignored: the mean of no rows is NaN
    tl.store(losses + row, tl.where(valid, loss, invalid) * scale, mask=inside)
    tl.store(tops + row, tl.where(valid, top, 0.0), mask=inside)
    tl.store(totals + row, tl.where(valid, total, 1.0), mask=inside)
    if LOGPROBS:
        tl.store(logprobs + row, tl.where(valid, -(below + log_total), invalid), mask=inside)
    if ENTROPY:
        tl.store(entropies + row, tl.where(valid, log_total - entropy_sum / total, invalid), mask=inside)
    return extra


@triton.jit
def logit_gradient(
    cap_slope, powers, column, label, may_have_label, factor, own, spread, extra, weight, inside,
    WEIGHTED: tl.constexpr, SMOOTH: tl.constexpr, CAP: tl.constexpr, Z: tl.constexpr,
):  # fmt: skip
    """The gradient of logits, from their exponentials and the derivative of the softcap."""
    result = powers * factor
    if may_have_label:
        result = tl.where(column == label, result - own, result)
    if Z:
        result += powers * extra  # after the difference, which may cancel
    if SMOOTH:
        if WEIGHTED:
            result -= spread * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
        else:
            result -= spread
    if CAP:
        result = result * cap_slope
    return result


@triton.jit
def count_targets_kernel(
    target, weight, parts, rows, columns, ignore_index, chunk, WEIGHTED: tl.constexpr, EACH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Sums the weights of the targets that are not ignored, in parts, of which a program writes EACH."""
    program = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, chunk, BLOCK):
        step = start + tl.arange(0, BLOCK)
        row = program * chunk + step
        inside = (step < chunk) & (row < rows)
        label = tl.load(target + row, mask=inside, other=0).to(tl.int64)
        valid = inside & (label != ignore_index) & (label >= 0) & (label < columns)
        if WEIGHTED:
            total += tl.load(weight + label, mask=valid, other=0.0).to(tl.float32)
        else:
            total += valid.to(tl.float32)
    tl.store(parts + program * EACH + tl.arange(0, EACH), tl.sum(tl.reshape(total, [EACH, BLOCK // EACH]), 1))


@triton.jit
def cross_entropy_whole_rows_kernel(
    logits, gradient, target, weight, weight_total, parts, losses, tops, totals, logprobs, entropies,
    rows, columns, inner, outer_stride, row_stride, gradient_outer, gradient_stride,
    ignore_index, smoothing, cap, z,
    OUTER: tl.constexpr, MEAN: tl.constexpr, SCALED: tl.constexpr, WEIGHTED: tl.constexpr, SMOOTH: tl.constexpr,
    CAP: tl.constexpr, Z: tl.constexpr, GRADIENT: tl.constexpr, LOGPROBS: tl.constexpr, ENTROPY: tl.constexpr,
    PARTS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows that fit into registers, several per program: each byte is read once."""
    smoothing, cap, z = tl.cast(smoothing, tl.float32), tl.cast(cap, tl.float32), tl.cast(z, tl.float32)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    scale = mean_scale(parts, MEAN, PARTS)
    label = tl.load(target + row, mask=row < rows, other=0).to(tl.int64)
    is_kept = (row < rows) & (label != ignore_index)
    valid = is_kept & (label >= 0) & (label < columns)
    start = row_start(row, inner, outer_stride, row_stride, OUTER)
    column = tl.arange(0, BLOCK)[None, :]
    inside = valid[:, None] & (column < columns)
    # logits, (rows, block), and the statistics of rows
    loaded = tl.load(logits + start[:, None] + column, mask=inside, other=float("-inf"))
    values, cap_slope = capped(loaded, cap, CAP)
    logit = capped(tl.load(logits + start + label, mask=valid, other=0.0), cap, CAP)[0]
    own, all_terms, spread = loss_weights(label, valid, weight, weight_total, smoothing, columns, WEIGHTED, SMOOTH)
    if CAP:
        values = tl.where(inside, values, float("-inf"))
    top = tl.maximum(tl.max(values, 1), LOWEST)
    below = values - top[:, None]
    powers = exponential(below)
    total = tl.sum(powers, 1)
    smooth, entropy_sum = total, total
    if SMOOTH:
        distance = tl.where(inside, below, 0.0)
        if WEIGHTED:
            distance *= tl.load(weight + column, mask=column < columns, other=0.0).to(tl.float32)
        smooth = tl.sum(distance, 1)
    if ENTROPY:
        entropy_sum = tl.sum(tl.where(powers > 0.0, powers * below, 0.0), 1)
    extra = finish_row(
        row, rows, is_kept, valid, logit, top, total, smooth, entropy_sum, own, all_terms, spread, z, scale,
        losses, tops, totals, logprobs, entropies, SMOOTH, Z, LOGPROBS, ENTROPY,
    )  # fmt: skip
    # the gradient, from the logits in registers
    if GRADIENT:
        if not SCALED:
            scale = 1.0
        factor = (scale * all_terms / total)[:, None]
        extra = (scale * extra / total)[:, None]
        own = (own + tl.zeros_like(total)) * scale
        result = logit_gradient(
            cap_slope, powers, column, label[:, None], True, factor, own[:, None], scale * spread, extra, weight,
            column < columns, WEIGHTED, SMOOTH, CAP, Z,
        )  # fmt: skip
        invalid = tl.where(is_kept, float("nan"), 0.0)[:, None]
        result = tl.where(valid[:, None], result, invalid)
        gradient_start = row_start(row, inner, gradient_outer, gradient_stride, OUTER)
        tl.store(
            gradient + gradient_start[:, None] + column,
            result.to(gradient.dtype.element_ty),
            mask=(row < rows)[:, None] & (column < columns),
        )


@triton.jit
def cross_entropy_gradient_kernel(
    upstream, logits, gradient, target, weight, weight_total, parts, tops, totals,
    rows, columns, inner, outer_stride, row_stride, gradient_outer, gradient_stride, upstream_stride,
    ignore_index, smoothing, cap, z,
    OUTER: tl.constexpr, MEAN: tl.constexpr, WEIGHTED: tl.constexpr, SMOOTH: tl.constexpr,
    CAP: tl.constexpr, Z: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    SHIFT: tl.constexpr,
):  # fmt: skip
    """The gradient, from the logits and the statistics of the forward pass. SHIFT as in the long-row kernel."""
    smoothing, cap, z = tl.cast(smoothing, tl.float32), tl.cast(cap, tl.float32), tl.cast(z, tl.float32)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = row < rows
    label = tl.load(target + row, mask=is_row, other=0).to(tl.int64)
    is_kept = is_row & (label != ignore_index)
    valid = is_kept & (label >= 0) & (label < columns)
    top = tl.load(tops + row, mask=is_row, other=0.0)
    total = tl.load(totals + row, mask=is_row, other=1.0)
    scale = mean_scale(parts, MEAN, PARTS) * tl.load(upstream + row * upstream_stride, mask=is_row, other=0.0)
    scale = scale.to(tl.float32)
    own, all_terms, spread = loss_weights(label, valid, weight, weight_total, smoothing, columns, WEIGHTED, SMOOTH)
    extra = 0.0
    if Z:
        extra = 2.0 * z * (top + tl.log(total))
    factor = (scale * all_terms / total)[:, None]
    extra = (scale * extra / total)[:, None]
    own = (scale * own)[:, None]
    spread = (scale * spread)[:, None]
    invalid = tl.where(is_kept, float("nan"), 0.0)[:, None]
    start = row_start(row, inner, outer_stride, row_stride, OUTER)
    gradient_start = row_start(row, inner, gradient_outer, gradient_stride, OUTER)
    shift = tl.zeros([ROWS], tl.int32)
    if SHIFT:
        shift = (start % SHIFT).to(tl.int32)
        start = start // SHIFT * SHIFT
        gradient_start = gradient_start // SHIFT * SHIFT
    shift = shift[:, None]
    offset = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    column = offset - shift
    inside = is_row[:, None] & (column >= 0) & (column < columns)
    logit_row, gradient_row = logits + start[:, None] + offset, gradient + gradient_start[:, None] + offset
    # with one row per program, only the first and the last block need a mask
    unmasked = (ROWS == 1) & (tl.program_id(1) > 0) & ((tl.program_id(1) + 1) * BLOCK <= columns)
    if unmasked:
        loaded = tl.load(logit_row)
    else:
        loaded = tl.load(logit_row, mask=inside & valid[:, None], other=0.0)
    values, cap_slope = capped(loaded, cap, CAP)
    powers = exponential(values - top[:, None])
    result = logit_gradient(
        cap_slope, powers, column, label[:, None], True, factor, own, spread, extra, weight, inside, WEIGHTED, SMOOTH,
        CAP, Z,
    )  # fmt: skip
    result = tl.where(valid[:, None], result, invalid).to(gradient.dtype.element_ty)
    if unmasked:
        tl.store(gradient_row, result)
    else:
        tl.store(gradient_row, result, mask=inside)


@triton.jit
def scale_gradient_kernel(gradient, factor, elements, BLOCK: tl.constexpr):
    """Multiplies a gradient by a scalar in place; if that is 1, it reads nothing else."""
    scale = tl.load(factor).to(tl.float32)
    if scale != 1.0:
        for block in range(tl.program_id(0).to(tl.int64), tl.cdiv(elements, BLOCK), tl.num_programs(0)):
            offset = block * BLOCK + tl.arange(0, BLOCK)
            inside = offset < elements
            values = tl.load(gradient + offset, mask=inside)
            tl.store(gradient + offset, (values.to(tl.float32) * scale).to(gradient.dtype.element_ty), mask=inside)


@triton.jit
def absorb_block(
    values, column, inside, tops, totals, smooths, spreads, origin, weight,
    WEIGHTED: tl.constexpr, SMOOTH: tl.constexpr, ENTROPY: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Adds a block, (repeats, lanes), to the statistics of each lane; lanes are reduced at the end of the row."""
    if MASKED:
        values = tl.where(inside, values, float("-inf"))
    higher = tl.maximum(tops, tl.max(values, 0))
    shrink = exponential(tops - higher)
    below = values - higher[None, :]
    powers = exponential(below)
    if ENTROPY:
        # the distances so far are from the previous top
        moved = tl.where(totals > 0.0, (tops - higher) * totals, 0.0)
        spreads = shrink * (spreads + moved) + tl.sum(tl.where(powers > 0.0, powers * below, 0.0), 0)
    if SMOOTH:
        distance = values - origin
        if MASKED:
            distance = tl.where(inside, distance, 0.0)
        if WEIGHTED:
            distance *= tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
        smooths += tl.sum(distance, 0)
    totals = totals * shrink + tl.sum(powers, 0)
    return higher, totals, smooths, spreads


@triton.jit
def lane_sums(tops, totals, smooths, spreads, top):
    """The statistics of all lanes together, relative to the top of the row."""
    shrink = exponential(tops - top)
    moved = tl.where(totals > 0.0, (tops - top) * totals, 0.0)
    return tl.sum(totals * shrink, 0), tl.sum(smooths, 0), tl.sum(shrink * (spreads + moved), 0)


@triton.jit
def write_block(
    logit_row, gradient_row, offset, inside, shift, label, may_have_label, top, factor, own, spread, extra, weight, cap,
    WEIGHTED: tl.constexpr, SMOOTH: tl.constexpr, CAP: tl.constexpr, Z: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Stores the gradient of the elements of a row at these offsets."""
    if MASKED:
        values = tl.load(logit_row + offset, mask=inside, other=0.0, eviction_policy="evict_first")
    else:
        values = tl.load(logit_row + offset, eviction_policy="evict_first")
    values, cap_slope = capped(values, cap, CAP)
    powers = exponential(values - top)
    result = logit_gradient(
        cap_slope, powers, offset - shift, label, may_have_label, factor, own, spread, extra, weight, inside, WEIGHTED,
        SMOOTH, CAP, Z,
    ).to(gradient_row.dtype.element_ty)  # fmt: skip
    if MASKED:
        tl.store(gradient_row + offset, result, mask=inside, eviction_policy="evict_first")
    else:
        tl.store(gradient_row + offset, result, eviction_policy="evict_first")


@triton.jit
def cross_entropy_long_rows_kernel(
    logits, gradient, target, weight, weight_total, parts, losses, tops, totals, logprobs, entropies,
    rows, columns, inner, outer_stride, row_stride, gradient_outer, gradient_stride,
    ignore_index, smoothing, cap, z,
    OUTER: tl.constexpr, MEAN: tl.constexpr, SCALED: tl.constexpr, WEIGHTED: tl.constexpr, SMOOTH: tl.constexpr,
    CAP: tl.constexpr, Z: tl.constexpr, GRADIENT: tl.constexpr, LOGPROBS: tl.constexpr, ENTROPY: tl.constexpr,
    PARTS: tl.constexpr, REPEATS: tl.constexpr, LANES: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Rows of any length, one per program: read once from memory, and again, from the cache, for the gradient.

    The second pass goes from the end to the beginning, since what was read last is most likely still in the cache. If
    rows do not begin at multiples of 16 bytes, SHIFT is the number of elements in 16 bytes: blocks begin at the
    multiple before the row and have whole multiples, so that loads and stores are of 16 bytes too. What is left at both
    ends of the row, less than 16 bytes each, is a block of its own.
    """
    smoothing, cap, z = tl.cast(smoothing, tl.float32), tl.cast(cap, tl.float32), tl.cast(z, tl.float32)
    BLOCK: tl.constexpr = REPEATS * LANES
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(target + row).to(tl.int64)
    is_kept = label != ignore_index
    valid = is_kept & (label >= 0) & (label < columns)
    start = row_start(row, inner, outer_stride, row_stride, OUTER)
    gradient_start = row_start(row, inner, gradient_outer, gradient_stride, OUTER)
    shift = 0
    if SHIFT:
        shift = (start % SHIFT).to(tl.int32)
        start = start // SHIFT * SHIFT
        gradient_start = gradient_start // SHIFT * SHIFT
    logit_row, gradient_row = logits + start, gradient + gradient_start
    end = columns + shift
    begin, stop, first = 0, end, 0  # of what blocks have, and the first block without a mask
    step = (tl.arange(0, REPEATS) * LANES)[:, None] + tl.arange(0, LANES)[None, :]  # (repeats, lanes)
    if SHIFT:
        begin, stop, first = (shift + SHIFT - 1) // SHIFT * SHIFT, end // SHIFT * SHIFT, 1
        lane = tl.arange(0, 2 * SHIFT)[None, :]
        ends = tl.where(lane < SHIFT, lane, stop + lane - SHIFT)  # (1, 2 * SHIFT)
        is_head = (lane < SHIFT) & (lane >= shift) & (lane < begin) & (lane < end)
        in_ends = is_head | ((lane >= SHIFT) & (ends >= begin) & (ends < end))
    full = stop // BLOCK
    last = tl.maximum(full, first)
    if valid:
        scale = mean_scale(parts, MEAN, PARTS)
        logit = capped(tl.load(logit_row + shift + label), cap, CAP)[0]
        own, all_terms, spread = loss_weights(label, valid, weight, weight_total, smoothing, columns, WEIGHTED, SMOOTH)
        origin = tl.where(tl.abs(logit) < float("inf"), logit, 0.0)  # distances from it add up without cancellation
        lane_tops = tl.full([LANES], LOWEST, tl.float32)
        lane_totals = tl.zeros([LANES], tl.float32)
        smooths, spreads = lane_totals, lane_totals
        # first pass: the statistics of lanes, over both ends, a masked first block, full blocks and a masked last block
        if SHIFT:
            end_totals = tl.zeros([2 * SHIFT], tl.float32)
            values = capped(tl.load(logit_row + ends, mask=in_ends, other=0.0), cap, CAP)[0]
            end_tops, end_totals, end_smooths, end_spreads = absorb_block(
                values, ends - shift, in_ends, end_totals + LOWEST, end_totals, end_totals, end_totals, origin, weight,
                WEIGHTED, SMOOTH, ENTROPY, True,
            )  # fmt: skip
            inside = (step >= begin) & (step < stop)
            values = capped(tl.load(logit_row + step, mask=inside, other=0.0), cap, CAP)[0]
            lane_tops, lane_totals, smooths, spreads = absorb_block(
                values, step - shift, inside, lane_tops, lane_totals, smooths, spreads, origin, weight,
                WEIGHTED, SMOOTH, ENTROPY, True,
            )  # fmt: skip
        for block in range(first, full):
            offset = block * BLOCK + step
            if GRADIENT:
                loaded = tl.load(logit_row + offset, eviction_policy="evict_last")
            else:
                loaded = tl.load(logit_row + offset, eviction_policy="evict_first")
            values = capped(loaded, cap, CAP)[0]
            lane_tops, lane_totals, smooths, spreads = absorb_block(
                values, offset - shift, offset < stop, lane_tops, lane_totals, smooths, spreads, origin, weight,
                WEIGHTED, SMOOTH, ENTROPY, False,
            )  # fmt: skip
        if last * BLOCK < stop:
            offset = last * BLOCK + step
            values = capped(tl.load(logit_row + offset, mask=offset < stop, other=0.0), cap, CAP)[0]
            lane_tops, lane_totals, smooths, spreads = absorb_block(
                values, offset - shift, offset < stop, lane_tops, lane_totals, smooths, spreads, origin, weight,
                WEIGHTED, SMOOTH, ENTROPY, True,
            )  # fmt: skip
        # reduce the lanes to the statistics of the row
        top = tl.max(lane_tops, 0)
        if SHIFT:
            top = tl.maximum(top, tl.max(end_tops, 0))
        total, smooth, entropy_sum = lane_sums(lane_tops, lane_totals, smooths, spreads, top)
        if SHIFT:
            end_total, end_smooth, end_entropy = lane_sums(end_tops, end_totals, end_smooths, end_spreads, top)
            total += end_total
            smooth += end_smooth
            entropy_sum += end_entropy
        if SMOOTH:
            if WEIGHTED:
                smooth += tl.load(weight_total) * (origin - top)
            else:
                smooth += columns * (origin - top)
        extra = finish_row(
            row, rows, is_kept, valid, logit, top, total, smooth, entropy_sum, own, all_terms, spread, z, scale,
            losses, tops, totals, logprobs, entropies, SMOOTH, Z, LOGPROBS, ENTROPY,
        )  # fmt: skip
        # second pass, from the end: the gradient
        if GRADIENT:
            if not SCALED:
                scale = 1.0
            factor = scale * all_terms / total
            extra = scale * extra / total
            own = scale * own
            spread = scale * spread
            place = label + shift
            if last * BLOCK < stop:
                offset = last * BLOCK + step
                write_block(
                    logit_row, gradient_row, offset, offset < stop, shift, label, place >= last * BLOCK, top, factor,
                    own, spread, extra, weight, cap, WEIGHTED, SMOOTH, CAP, Z, True,
                )  # fmt: skip
            for block in range(first, full):
                start_of = (full - 1 - block + first) * BLOCK
                offset = start_of + step
                write_block(
                    logit_row, gradient_row, offset, offset < stop, shift, label,
                    (place >= start_of) & (place < start_of + BLOCK), top, factor, own, spread, extra, weight, cap,
                    WEIGHTED, SMOOTH, CAP, Z, False,
                )  # fmt: skip
            if SHIFT:
                write_block(
                    logit_row, gradient_row, step, (step >= begin) & (step < stop), shift, label, place < BLOCK, top,
                    factor, own, spread, extra, weight, cap, WEIGHTED, SMOOTH, CAP, Z, True,
                )  # fmt: skip
                write_block(
                    logit_row, gradient_row, ends, in_ends, shift, label, True, top, factor, own, spread, extra,
                    weight, cap, WEIGHTED, SMOOTH, CAP, Z, True,
                )  # fmt: skip
    else:
        invalid = tl.where(is_kept, float("nan"), 0.0)
        tl.store(losses + row, invalid * mean_scale(parts, MEAN, PARTS))  # the mean of no rows is NaN
        tl.store(tops + row, 0.0)
        tl.store(totals + row, 1.0)
        if LOGPROBS:
            tl.store(logprobs + row, invalid)
        if ENTROPY:
            tl.store(entropies + row, invalid)
        if GRADIENT:
            blank = (tl.zeros([REPEATS, LANES], tl.float32) + invalid).to(gradient.dtype.element_ty)
            for block in range(tl.cdiv(end, BLOCK)):
                offset = block * BLOCK + step
                tl.store(gradient_row + offset, blank, mask=(offset >= shift) & (offset < end))


def tokens_per_chunk(tokens: int, weight: Tensor, itemsize: int, requested: int) -> int:
    """The number of tokens in a chunk: chunks of equal size, and a multiple of 128, for full tiles in the GEMMs.

    The smallest one that takes hardly more than the least time by `_chunk_cost`.
    """
    if requested > 0:
        return min(requested, max(tokens, 1))
    columns, depth = weight.shape
    return _fastest_chunk(tokens, columns, depth, itemsize, processors(weight.device))


@functools.lru_cache(maxsize=1024)
def _fastest_chunk(tokens: int, columns: int, depth: int, itemsize: int, programs: int) -> int:
    largest = max(128, CHUNK_BYTES // (columns * itemsize) // 128 * 128)
    fewest = max(1, -(-tokens // largest))
    most = max(fewest, min(-(-tokens // 128), 2 * fewest + FEW_CHUNKS))
    sizes = {-(-tokens // (128 * number)) * 128 for number in range(fewest, most + 1)}
    costs = {size: _chunk_cost(tokens, size, columns, depth, itemsize, programs) for size in sizes if size}
    least = min(costs.values(), default=0.0)
    return max(1, min([tokens, *(size for size, cost in costs.items() if cost <= _WORTH * least)]))


def _chunk_cost(tokens: int, chunk: int, columns: int, depth: int, itemsize: int, programs: int) -> float:
    """What depends on the size of chunks, in FLOP: multiprocessors without a tile, and the gradient of the weight,
    which each chunk but the first one reads and writes again.
    """
    chunks = -(-tokens // chunk)
    cost = 0.0
    for number, size in ((tokens // chunk, chunk), (1, tokens % chunk)):
        # the logits, and the gradients of hidden and of the weight: rows and columns of each result
        for rows, width in ((size, columns), (size, depth), (columns, depth)):
            tiles = -(-rows // 128) * -(-width // 256)
            waves = -(-tiles // programs)
            cost += number * 2.0 * size * columns * depth * waves * programs / max(tiles, 1)
    # in float32: a product written and read, and the sum read and written
    weight_bytes = 2 * itemsize if chunks <= FEW_CHUNKS else 2 * itemsize + 8
    return cost + (chunks - 1) * weight_bytes * columns * depth * _FLOP_PER_BYTE + chunks * _FLOP_PER_CHUNK


class _GradientAccumulator:
    """Accumulates the gradients of hidden, weight and bias over chunks; empty tensors for those not requested."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, chunks: int, float32: bool | None,
        wanted: tuple[bool, bool, bool],
    ) -> None:  # fmt: skip
        self.weight = weight
        self.for_hidden, self.for_weight, self.for_bias = wanted
        self.any = any(wanted)
        self.by_hidden = torch.empty(hidden.shape if wanted[0] else (0,), dtype=hidden.dtype, device=hidden.device)
        dtype = torch.float32 if (chunks > FEW_CHUNKS if float32 is None else float32) else weight.dtype
        shape = weight.shape if wanted[1] else (0,)
        self.by_weight = torch.empty(shape, dtype=dtype, device=weight.device)
        if not len(hidden):
            self.by_weight.zero_()
        self.by_bias = torch.zeros(weight.shape[0] if wanted[2] else 0, dtype=torch.float32, device=weight.device)
        self.bias_dtype = weight.dtype if bias is None else bias.dtype

    def add(self, first: int, hidden: Tensor, logits: Tensor) -> None:
        """Adds those of a chunk, whose logits have been overwritten by their gradient."""
        if self.for_hidden:
            torch.mm(logits, self.weight, out=self.by_hidden[first : first + len(hidden)])
        if self.for_bias:
            self.by_bias += logits.sum(0, dtype=torch.float32)
        if not self.for_weight:
            return
        if self.by_weight.dtype == logits.dtype:
            if first == 0:
                torch.mm(logits.t(), hidden, out=self.by_weight)
            else:
                torch.addmm(self.by_weight, logits.t(), hidden, out=self.by_weight)
            return
        # cuBLAS does not accumulate 16-bit products into a float32 tensor: add them in slices, which take little memory
        rows = max(128, _SLICE_BYTES // (hidden.shape[1] * hidden.element_size()) // 128 * 128)
        for start in range(0, len(self.weight), rows):
            product = torch.mm(logits[:, start : start + rows].t(), hidden)
            part = self.by_weight[start : start + rows]
            if first == 0:
                part.copy_(product)
            else:
                part.add_(product)

    def results(self, shape: torch.Size) -> tuple[Tensor, Tensor, Tensor]:
        by_hidden = self.by_hidden.view(shape) if self.for_hidden else self.by_hidden
        return by_hidden, self.by_weight.to(self.weight.dtype), self.by_bias.to(self.bias_dtype)


def _logits_by_chunk(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, chunk: int
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """For each chunk its first token, its hidden states and its logits, in one buffer that is used again.

    Its rows are padded: those of an odd vocabulary would begin anywhere, for which cuBLAS has slow kernels only. The
    three products of 16384 x 2048 x 50257 took 81 ms without padding on an H200, where 12 are expected.
    """
    columns = len(weight)
    padded = -(-columns // _ROW_MULTIPLE) * _ROW_MULTIPLE
    buffer = torch.empty(chunk, padded, dtype=hidden.dtype, device=hidden.device)
    for first in range(0, len(hidden), chunk):
        part = hidden[first : first + chunk]
        logits = buffer[: len(part), :columns]
        if bias is None:
            torch.mm(part, weight.t(), out=logits)
        else:
            torch.addmm(bias, part, weight.t(), out=logits)
        yield first, part, logits


@torch.no_grad()
def linear_cross_entropy_forward(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, class_weight: Tensor | None,
    ignore_index: int, label_smoothing: float, softcap: float, z_loss: float, reduction: str, chunk_tokens: int,
    float32: bool | None, with_logprobs: bool, with_entropy: bool, for_hidden: bool, for_weight: bool, for_bias: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The loss; its gradients of hidden, weight and bias; a factor to multiply these by; logprobs; entropies; top and
    sum of each row; the denominator of a mean. Empty tensors for what is not requested.
    """
    settings = LossSettings(ignore_index, label_smoothing, softcap, z_loss, reduction)
    rows = hidden.reshape(-1, hidden.shape[-1])
    flat = target.reshape(-1).contiguous()
    columns, count = weight.shape[0], len(rows)
    class_weight = None if class_weight is None else class_weight.contiguous()
    parts = denominator(flat, class_weight, columns, settings)
    total = weight_total(class_weight, settings)

    def by_token(wanted: bool = True) -> Tensor:
        return torch.empty(count if wanted else 0, dtype=torch.float32, device=hidden.device)

    losses, logprobs, entropies = by_token(), by_token(with_logprobs), by_token(with_entropy)
    statistics = torch.empty(2, count, dtype=torch.float32, device=hidden.device)
    chunk = tokens_per_chunk(count, weight, hidden.element_size(), chunk_tokens)
    wanted = (for_hidden, for_weight, for_bias)
    gradients = _GradientAccumulator(rows, weight, bias, -(-count // chunk), float32, wanted)
    # in float16 the share of a row in a mean of thousands underflows: keep the gradient of the sum until the end
    scale_late = hidden.dtype == torch.float16 and reduction == "mean"
    for first, part, logits in _logits_by_chunk(rows, weight, bias, chunk):
        end = first + len(part)
        write_rows(
            logits, flat[first:end], class_weight, total, parts, losses[first:end], statistics[0, first:end],
            statistics[1, first:end], settings, gradient=logits if gradients.any else None, scaled=not scale_late,
            logprobs=logprobs[first:end] if with_logprobs else None,
            entropies=entropies[first:end] if with_entropy else None,
        )  # fmt: skip
        if gradients.any:
            gradients.add(first, part, logits)
    factor = torch.ones((), dtype=torch.float32, device=hidden.device)
    if scale_late:
        total_weight = parts.sum()
        factor = torch.where(total_weight > 0, 1.0 / total_weight, 0.0)
    return (
        reduce_losses(losses, target.shape, settings), *gradients.results(hidden.shape), factor,
        logprobs.view(target.shape) if with_logprobs else logprobs,
        entropies.view(target.shape) if with_entropy else entropies, statistics, parts,
    )  # fmt: skip


@torch.no_grad()
def linear_cross_entropy_backward(
    upstream: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, class_weight: Tensor | None,
    statistics: Tensor, parts: Tensor, ignore_index: int, label_smoothing: float, softcap: float, z_loss: float,
    reduction: str, chunk_tokens: int, float32: bool | None, for_hidden: bool, for_weight: bool, for_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of hidden, weight and bias, from logits that are computed again."""
    settings = LossSettings(ignore_index, label_smoothing, softcap, z_loss, reduction)
    rows = hidden.reshape(-1, hidden.shape[-1])
    flat = target.reshape(-1)
    above = upstream.reshape(-1)
    chunk = tokens_per_chunk(len(rows), weight, hidden.element_size(), chunk_tokens)
    wanted = (for_hidden, for_weight, for_bias)
    gradients = _GradientAccumulator(rows, weight, bias, -(-len(rows) // chunk), float32, wanted)
    for first, part, logits in _logits_by_chunk(rows, weight, bias, chunk):
        end = first + len(part)
        write_gradient(
            above[first:end] if upstream.dim() else upstream, logits, logits, flat[first:end], class_weight,
            statistics[0, first:end], statistics[1, first:end], parts, settings,
        )  # fmt: skip
        gradients.add(first, part, logits)
    return gradients.results(hidden.shape)
