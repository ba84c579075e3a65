"""The launchers of `cross_entropy`: which kernel, and with what.

Bytes moved, for n logits of b bytes: n * b for the loss alone; 2 * n * b with the gradient written in the same pass;
3 * n * b where the gradient is written in a backward pass of its own.
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from nearpeak.kernels.configs import tuned
from nearpeak.kernels.jit.cross_entropy_long import long_rows_kernel
from nearpeak.kernels.jit.cross_entropy_whole import count_kernel, gradient_kernel, scale_kernel, whole_rows_kernel
from nearpeak.kernels.jit.launch import launch, next_power_of_2

WHOLE = 32768
"""The longest row that is held in registers."""
_NARROW_WHOLE = 4096
"""The same for rows that do not begin at multiples of 16 elements: longer ones are loaded better block by block."""
PARTS = 128
"""In so many parts the targets are counted, whose sum every program takes."""
_COUNTED = 1024
_SCALED = 8192
_PROGRAMS = 132 * 8

Config = dict[str, Any]


class Settings(NamedTuple):
    """What a loss is, beside its tensors."""

    ignore_index: int
    label_smoothing: float
    softcap: float
    z_loss: float
    reduction: str


class Rows(NamedTuple):
    """Logits as rows, without a copy where two strides lead to all of them: also logits[:, :-1]."""

    tensor: Tensor
    rows: int
    columns: int
    inner: int
    outer_stride: int
    row_stride: int

    @property
    def has_outer(self) -> bool:
        return self.inner < self.rows


def rows_of(logits: Tensor) -> Rows:
    """A tensor [..., columns] as rows. It is copied where the last stride is not 1, or more than two others lead on."""
    columns = logits.shape[-1]
    count = prod(logits.shape[:-1])
    if columns > 1 and logits.stride(-1) != 1:
        logits = logits.contiguous()
    levels: list[tuple[int, int]] = []
    for size, stride in zip(logits.shape[:-1], logits.stride()[:-1], strict=True):
        if size == 1:
            continue
        if levels and levels[-1][1] == size * stride:
            levels[-1] = (levels[-1][0] * size, stride)
        else:
            levels.append((size, stride))
    if len(levels) > 2:
        logits = logits.contiguous()
        levels = [(count, columns)]
    levels = [(1, 0)] * (2 - len(levels)) + levels
    return Rows(logits, count, columns, levels[1][0], levels[0][1], levels[1][1])


def _source_and_sink(logits: Tensor, gradient: Tensor | None) -> tuple[Rows, Rows]:
    """The rows of logits and of their gradient, which is contiguous or the logits; both are counted the same way."""
    source = rows_of(logits)
    if gradient is None or gradient is logits:
        return source, source
    columns = source.columns
    return source, Rows(gradient, source.rows, columns, source.inner, source.inner * columns, columns)


def _is_wide(*numbers: int) -> bool:
    return not any(number % 16 for number in numbers)


def _shift(source: Rows, sink: Rows) -> int:
    """How many elements are 16 bytes, where rows of both begin equally far from a multiple of these but not at one."""
    numbers = (source.outer_stride, source.row_stride, sink.outer_stride, sink.row_stride)
    width = 16 // source.tensor.element_size()
    if _is_wide(*numbers) or source.tensor.dtype != sink.tensor.dtype:
        return 0
    apart = (source.outer_stride - sink.outer_stride, source.row_stride - sink.row_stride)
    return 0 if any(number % width for number in apart) else width


def heuristic(columns: int, rows: int, wide: bool, gradient: bool) -> Config:
    """What to launch with where nobody measured."""
    if columns <= (WHOLE if wide else _NARROW_WHOLE):
        block = next_power_of_2(columns)
        several = max(1, min(4096 // block, next_power_of_2(triton.cdiv(rows, 264))))
        return {"kernel": "whole", "rows": several, "warps": max(1, min(32, several * block // 1024))}
    # one program of 32 warps on each SM: the rows in work, 132 of them, then stay in the cache
    return {"kernel": "long", "repeats": 2, "warps": 32 if columns > 65536 and gradient else 16}


def candidates(columns: int) -> list[Config]:
    """What is worth measuring, of forward passes that write the gradient, for rows of this length."""
    block = next_power_of_2(columns)
    whole = [
        {"kernel": "whole", "rows": rows, "warps": warps}
        for rows in (1, 2, 4, 8, 16, 32)
        for warps in (1, 2, 4, 8, 16, 32)
        if 8 <= rows * block // (32 * warps) <= 64 and (rows == 1 or rows * block <= 16384)
    ]
    long = [
        {"kernel": "long", "repeats": repeats, "warps": warps}
        for repeats in (1, 2, 4)
        for warps in (4, 8, 16, 32)
        if repeats * warps * 256 <= columns and repeats * warps <= 64
    ]
    return (whole if columns <= WHOLE else []) + (long if columns > _NARROW_WHOLE else [])


def denominator(target: Tensor, weight: Tensor | None, columns: int, settings: Settings) -> Tensor:
    """The sum of the weights of the targets that are kept, in parts, on the device; empty where it is not a mean."""
    rows = target.numel()
    parts = torch.empty(PARTS if settings.reduction == "mean" else 0, dtype=torch.float32, device=target.device)
    if settings.reduction == "mean":
        programs = min(PARTS, next_power_of_2(triton.cdiv(rows, _COUNTED)))
        launch(
            count_kernel, (programs, 1, 1), target, target if weight is None else weight, parts, rows, columns,
            settings.ignore_index, triton.cdiv(rows, programs), weight is not None, PARTS // programs, _COUNTED,
            warps=4,
        )  # fmt: skip
    return parts


def weight_total(weight: Tensor | None, settings: Settings) -> Tensor | None:
    """The sum of all weights, where smoothing needs it."""
    if weight is None or not settings.label_smoothing:
        return None
    return weight.sum(dtype=torch.float32)


def write_rows(
    logits: Tensor, target: Tensor, weight: Tensor | None, total: Tensor | None, parts: Tensor, losses: Tensor,
    tops: Tensor, totals: Tensor, settings: Settings, *, gradient: Tensor | None = None, scaled: bool = True,
    logprobs: Tensor | None = None, entropies: Tensor | None = None, config: Config | None = None,
) -> None:  # fmt: skip
    """Writes the loss of each row, its top and sum of exponentials, and the rest where there is a tensor for it.

    `target` is contiguous and of one dimension, `gradient` may be `logits`. With `scaled` the gradient is that of a
    mean where the loss is one.
    """
    source, sink = _source_and_sink(logits, gradient)
    rows, columns = source.rows, source.columns
    wide = _is_wide(columns, source.outer_stride, source.row_stride, sink.outer_stride, sink.row_stride)
    if config is None and wide:
        config = tuned("cross_entropy", columns, logits.device)
    config = config or heuristic(columns, rows, wide, gradient is not None)
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
    warps = config["warps"]
    if config["kernel"] == "whole":
        block = next_power_of_2(columns)
        grid = (triton.cdiv(rows, config["rows"]), 1, 1)
        launch(whole_rows_kernel, grid, *shared, config["rows"], block, warps=warps)
    else:
        lanes = warps * 32 * (16 // source.tensor.element_size())
        launch(
            long_rows_kernel, (rows, 1, 1), *shared, config["repeats"], lanes, _shift(source, sink), warps=warps
        )  # fmt: skip
    if gradient is logits and sink.tensor is not logits:
        logits.copy_(sink.tensor)  # it could not be addressed, and was copied


def reduced(losses: Tensor, shape: torch.Size, settings: Settings) -> Tensor:
    """The loss from that of each row, which a mean has divided already."""
    if settings.reduction == "none":
        return losses.view(shape)
    if settings.reduction == "mean" and not losses.numel():
        return losses.new_full((), float("nan"))
    return losses.sum()


def _forward(
    logits: Tensor, target: Tensor, weight: Tensor | None, settings: Settings, gradient: Tensor | None,
    config: Config | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    flat = target.reshape(-1).contiguous()
    losses = torch.empty(flat.numel(), dtype=torch.float32, device=logits.device)
    statistics = torch.empty(2, flat.numel(), dtype=torch.float32, device=logits.device)
    weight = None if weight is None else weight.contiguous()
    parts = denominator(flat, weight, logits.shape[-1], settings)
    total = weight_total(weight, settings)
    tops, totals = statistics.unbind()
    write_rows(logits, flat, weight, total, parts, losses, tops, totals, settings, gradient=gradient, config=config)
    return reduced(losses, target.shape, settings), statistics, parts


def forward(
    logits: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, label_smoothing: float, softcap: float,
    z_loss: float, reduction: str, with_gradient: bool, *, config: Config | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The loss; the gradient by the logits or an empty tensor; top and sum of each row; what a mean divides by."""
    settings = Settings(ignore_index, label_smoothing, softcap, z_loss, reduction)
    gradient = torch.empty(logits.shape if with_gradient else (0,), dtype=logits.dtype, device=logits.device)
    written = gradient if with_gradient else None
    loss, statistics, parts = _forward(logits, target, weight, settings, written, config)
    return loss, gradient, statistics, parts


def forward_(
    logits: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, label_smoothing: float, softcap: float,
    z_loss: float, reduction: str, *, config: Config | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The loss, and top and sum of each row; the gradient is then where the logits were."""
    settings = Settings(ignore_index, label_smoothing, softcap, z_loss, reduction)
    return _forward(logits, target, weight, settings, logits, config)[:2]


def write_gradient(
    upstream: Tensor, logits: Tensor, gradient: Tensor, target: Tensor, weight: Tensor | None, tops: Tensor,
    totals: Tensor, parts: Tensor, settings: Settings, config: Config | None = None,
) -> None:  # fmt: skip
    """Writes the gradient; `upstream` is one number or one for each row, `gradient` may be `logits`."""
    source, sink = _source_and_sink(logits, gradient)
    rows, columns = source.rows, source.columns
    weight = None if weight is None else weight.contiguous()
    total = weight_total(weight, settings)
    upstream = upstream.reshape(-1)
    shift = _shift(source, sink)
    config = config or tuned("cross_entropy_gradient", columns, logits.device)
    if config is None:
        config = {"elements": 4096, "warps": 4}
    block = min(next_power_of_2(columns), config["elements"])
    several = 1 if shift and columns > _NARROW_WHOLE else config["elements"] // block
    shift = shift if several == 1 else 0
    grid = (triton.cdiv(rows, several), triton.cdiv(columns + max(shift - 1, 0), block), 1)
    launch(
        gradient_kernel, grid, upstream, source.tensor, sink.tensor, target.reshape(-1).contiguous(),
        tops if weight is None else weight, tops if total is None else total, parts, tops, totals,
        rows, columns, source.inner, source.outer_stride, source.row_stride, sink.outer_stride, sink.row_stride,
        0 if upstream.numel() == 1 else upstream.stride(0),
        settings.ignore_index, float(settings.label_smoothing), float(settings.softcap or 1.0), float(settings.z_loss),
        source.has_outer, settings.reduction == "mean", weight is not None, settings.label_smoothing != 0.0,
        settings.softcap != 0.0, settings.z_loss != 0.0, PARTS, several, block, shift, warps=config["warps"],
    )  # fmt: skip
    if gradient is logits and sink.tensor is not logits:
        logits.copy_(sink.tensor)


def backward(
    upstream: Tensor, logits: Tensor, target: Tensor, weight: Tensor | None, statistics: Tensor, parts: Tensor,
    ignore_index: int, label_smoothing: float, softcap: float, z_loss: float, reduction: str,
    *, config: Config | None = None,
) -> Tensor:  # fmt: skip
    """The gradient by the logits, contiguous."""
    settings = Settings(ignore_index, label_smoothing, softcap, z_loss, reduction)
    gradient = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    write_gradient(upstream, logits, gradient, target, weight, statistics[0], statistics[1], parts, settings, config)
    return gradient


def backward_(
    upstream: Tensor, logits: Tensor, target: Tensor, weight: Tensor | None, statistics: Tensor, parts: Tensor,
    ignore_index: int, label_smoothing: float, softcap: float, z_loss: float, reduction: str,
    *, config: Config | None = None,
) -> None:  # fmt: skip
    """Writes the gradient where the logits were."""
    settings = Settings(ignore_index, label_smoothing, softcap, z_loss, reduction)
    write_gradient(upstream, logits, logits, target, weight, statistics[0], statistics[1], parts, settings, config)


def scale_(gradient: Tensor, factor: Tensor) -> None:
    """Multiplies in place by one number on the device, which costs a launch and no more where it is 1."""
    if not gradient.is_contiguous():
        gradient.mul_(factor)
        return
    programs = min(triton.cdiv(gradient.numel(), _SCALED), _PROGRAMS)
    launch(scale_kernel, (programs, 1, 1), gradient, factor, gradient.numel(), _SCALED, warps=8)
