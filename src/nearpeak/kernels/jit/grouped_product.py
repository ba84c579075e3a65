"""The launchers of `grouped_product`: which kernel, with which tiles."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from nearpeak.kernels.configs import processors, tuned
from nearpeak.kernels.jit import grouped_product_launch as hopper
from nearpeak.kernels.jit.grouped_product_portable import group_kernel, grouped_gradient_kernel, grouped_kernel
from nearpeak.kernels.jit.launch import launch, next_power_of_2
from nearpeak.kernels.jit.rows import as_rows
from nearpeak.kernels.operations.grouped_product import entries_at, groups_size
from nearpeak.kernels.operations.grouped_product_operators import number_of
from nearpeak.kernels.policy import INTERPRETED

_RESIDENT = 2
"""Programs that a multiprocessor runs at a time, or may."""


def group(counts: Tensor, rows: int, height: int) -> Tensor:
    """Where the rows of each expert begin, and the list of tiles of rows."""
    experts = len(counts)
    groups = torch.empty(groups_size(experts, rows, height), dtype=torch.int32, device=counts.device)
    launch(
        group_kernel, (experts + 1, 1, 1), counts.contiguous(), groups, experts, rows, entries_at(experts),
        height, next_power_of_2(experts), warps=4,
    )  # fmt: skip
    return groups


def product(
    rows: Tensor, weight: Tensor, groups: Tensor, height: int, transposed: bool, sources: Tensor | None = None,
    *, config: dict[str, Any] | None = None,
) -> Tensor:  # fmt: skip
    """The rows by the matrices of their experts, contiguous; with `sources` those that they name.

    Copies rows with holes.
    """
    columns = weight.shape[2 if transposed else 1]
    result = torch.empty((number_of(rows, sources), columns), dtype=rows.dtype, device=rows.device)
    if not result.numel():
        return result
    rows = as_rows(rows)
    if _for_hopper(config, rows, sources) and hopper.takes(rows, weight, height, transposed, False):
        hopper.product(rows, weight, groups, result, None, transposed, "", config, sources)
        return result
    strides = weight.stride(0), weight.stride(2 if transposed else 1), weight.stride(1 if transposed else 2)
    _launch(rows, sources, weight, groups, result, None, None, None, height, "", "", strides, config)
    return result


def gated(
    rows: Tensor, weight: Tensor, groups: Tensor, height: int, activation: str, keep: bool,
    sources: Tensor | None = None, *, config: dict[str, Any] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The activation of the first columns times the second, and both if they are to be kept, else nothing."""
    columns, number = weight.shape[1] // 2, number_of(rows, sources)
    result = torch.empty((number, columns), dtype=rows.dtype, device=rows.device)
    kept = torch.empty((number, 2 * columns) if keep else 0, dtype=rows.dtype, device=rows.device)
    if not result.numel():
        return result, kept
    rows = as_rows(rows)
    to_keep = kept if keep else None
    if _for_hopper(config, rows, sources) and hopper.takes(rows, weight, height, False, True):
        hopper.product(rows, weight, groups, result, to_keep, False, activation, config, sources)
    else:
        strides = weight.stride()
        _launch(rows, sources, weight, groups, result, to_keep, None, None, height, activation, "", strides, config)
    return result, kept


def gathered(
    tokens: Tensor, weight: Tensor, groups: Tensor, height: int, transposed: bool, activation: str, sources: Tensor
) -> Tensor:
    """The products of the tokens that `sources` name, without derivatives."""
    if activation:
        return gated(tokens, weight, groups, height, activation, False, sources)[0]
    return product(tokens, weight, groups, height, transposed, sources)


def eight(
    rows: Tensor, weight: Tensor, row_scales: Tensor, weight_scales: Tensor, groups: Tensor, height: int,
    activation: str, dtype: torch.dtype, sources: Tensor | None = None, *, config: dict[str, Any] | None = None,
) -> Tensor:  # fmt: skip
    """The same of numbers of 8 bits with scales, without derivatives."""
    columns = weight.shape[1] // (2 if activation else 1)
    result = torch.empty((number_of(rows, sources), columns), dtype=dtype, device=rows.device)
    if not result.numel():
        return result
    rows = as_rows(rows)
    row_scales, weight_scales = row_scales.contiguous(), weight_scales.contiguous()
    scales = "whole" if weight_scales.dim() == 1 else "blocks"
    if _for_hopper(config, rows, sources) and hopper.takes_eight(rows, weight, height, dtype, activation):
        hopper.eight(rows, weight, row_scales, weight_scales, groups, result, activation, sources)
    else:
        _launch(
            rows, sources, weight, groups, result, None, row_scales, weight_scales, height, activation, scales,
            weight.stride(), config,
        )  # fmt: skip
    return result


def _launch(
    rows: Tensor, sources: Tensor | None, weight: Tensor, groups: Tensor, result: Tensor, kept: Tensor | None,
    row_scales: Tensor | None, weight_scales: Tensor | None, height: int, activation: str, scales: str,
    strides: tuple[int, ...], config: dict[str, Any] | None,
) -> None:  # fmt: skip
    experts = weight.shape[0]
    columns = result.shape[1]
    bytes_each = rows.element_size()
    if _is_hoppers(config):
        config = None  # one of the other kernels says nothing here
    chosen = config or _measured(height, rows, activation) or heuristic(height, bytes_each, bool(activation))
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
        grouped_kernel, (min(tiles, _programs(rows.device)), 1, 1), rows, sources, weight, groups, result, kept,
        row_scales, weight_scales, experts, columns, rows.shape[1], entries_at(experts), rows.stride(0), *strides,
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
    if _for_hopper(config, tokens, sources) and hopper.takes_gradient(gradient, rows):
        hopper.weight_gradient(gradient, rows, groups, result, config, sources, gathered)
        return result
    if _is_hoppers(config):
        config = None
    chosen = config or gradient_heuristic(rows.element_size())
    high, wide = (
        min(chosen[name], max(16, next_power_of_2(n))) for name, n in (("columns", columns), ("depth", depth))
    )
    tiles = experts * triton.cdiv(columns, high) * triton.cdiv(depth, wide)
    launch(
        grouped_gradient_kernel, (min(tiles, _programs(rows.device)), 1, 1), gradient, rows, sources, groups, result,
        experts, columns, depth, gradient.stride(0), rows.stride(0), gathered, high, wide, chosen["rows"],
        warps=chosen["warps"], stages=chosen["stages"],
    )  # fmt: skip
    return result


def _for_hopper(config: dict[str, Any] | None, rows: Tensor, sources: Tensor | None) -> bool:
    """Whether a configuration is one of the kernels for Hopper, or of none, and they find the rows of `sources`."""
    return _is_hoppers(config) and (sources is None or hopper.can_gather(rows))


def _is_hoppers(config: dict[str, Any] | None) -> bool:
    return config is None or "warps" not in config


def _measured(height: int, rows: Tensor, activation: str) -> dict[str, Any] | None:
    """What was measured for tiles of so many rows of 16 bits."""
    if rows.element_size() != 2:
        return None
    return tuned("grouped_product_gated" if activation else "grouped_product", height, rows.device)


def _programs(device: torch.device) -> int:
    return 3 if INTERPRETED else _RESIDENT * processors(device)


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
