"""`grouped_product`: rows by the matrix of their expert, where the rows of each expert are together.

Bytes: forward reads rows and the matrices of experts that have any, and writes a result for each row. Backward does it
once more for the gradient of rows, and reads rows and gradients again for that of matrices, which it writes whole. With
an activation, the two factors are written too where there is a backward pass to come, and read by it.
"""

from __future__ import annotations

from typing import get_args

import torch
from torch import Tensor

from nearpeak.errors import UsageError, did_you_mean
from nearpeak.kernels.operations import grouped_product_operators as operators
from nearpeak.kernels.operations.activations import apply
from nearpeak.kernels.operations.grouped_product_operators import (
    Activation,
    entries_at,
    groups_size,
    height_of,
)
from nearpeak.kernels.policy import cannot_run, fused

__all__ = [
    "Activation",
    "entries_at",
    "grouped_product",
    "groups_size",
    "height_of",
    "row_groups",
]

_MOST = 4096


def reference(
    rows: Tensor, weight: Tensor, counts: Tensor, *, activation: Activation | None = None, groups: Tensor | None = None,
    sources: Tensor | None = None, row_scales: Tensor | None = None, weight_scales: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    _check(rows, weight, counts, activation, sources, row_scales, weight_scales)
    if row_scales is not None and weight_scales is not None:
        rows = operators.widened_rows(rows, row_scales)
        weight = operators.widened_matrices(weight, weight_scales)
    if sources is not None:
        rows = rows[sources.long()]
    ends = counts.cumsum(0).clamp(max=rows.shape[0])
    starts = torch.cat([ends.new_zeros(1), ends])
    result = operators.by_expert(rows, weight, starts.tolist())
    if activation is not None:
        half = weight.shape[1] // 2
        result = apply(result[:, :half], activation) * result[:, half:]
    return result if row_scales is None else result.to(dtype or torch.bfloat16)


def _check(
    rows: Tensor, weight: Tensor, counts: Tensor, activation: str | None, sources: Tensor | None,
    row_scales: Tensor | None, weight_scales: Tensor | None,
) -> None:  # fmt: skip
    if rows.dim() != 2 or weight.dim() != 3 or weight.shape[2] != rows.shape[1]:
        raise UsageError(
            "grouped_product takes rows of the shape (rows, depth) and a weight of (experts, columns, depth), and these"
            f" have {tuple(rows.shape)} and {tuple(weight.shape)}."
        )
    if counts.shape != weight.shape[:1] or counts.dtype not in (torch.int32, torch.int64):
        raise UsageError(
            f"grouped_product takes a count for each of {weight.shape[0]} experts, in int32 or int64, and these are"
            f" {tuple(counts.shape)} in {counts.dtype}."
        )
    if activation is not None:
        if activation not in get_args(Activation):
            raise UsageError(f"There is no activation {activation!r}. {did_you_mean(activation, get_args(Activation))}")
        if weight.shape[1] % 2:
            raise UsageError(f"With an activation a weight has an even number of columns, and not {weight.shape[1]}.")
    if sources is not None and (sources.dim() != 1 or sources.dtype != torch.int32):
        raise UsageError(
            f"grouped_product takes sources as numbers of rows in int32, as sort_tokens gives them, and these are"
            f" {tuple(sources.shape)} in {sources.dtype}."
        )
    if (row_scales is None) != (weight_scales is None):
        raise UsageError("Numbers of 8 bits need row_scales and weight_scales, and one of them is not there.")
    if row_scales is not None and weight_scales is not None:
        operators.check_scales(rows, weight, row_scales, weight_scales)


def _why_not(
    rows: Tensor, weight: Tensor, counts: Tensor, *, activation: Activation | None = None, groups: Tensor | None = None,
    sources: Tensor | None = None, row_scales: Tensor | None = None, weight_scales: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> str | None:  # fmt: skip
    _check(rows, weight, counts, activation, sources, row_scales, weight_scales)
    if sources is not None and torch.is_grad_enabled() and (rows.requires_grad or weight.requires_grad):
        return "with sources it has no gradients: see mixture_of_experts, or permute_tokens"
    if weight.shape[0] > _MOST:
        return f"it takes up to {_MOST} experts, and these are {weight.shape[0]}"
    if row_scales is not None:
        return operators.why_not_eight(rows, weight, row_scales, weight_scales, sources)
    return operators.why_not(rows, weight, counts, sources)


def _groups_reference(counts: Tensor, *, rows: int) -> Tensor:
    _check_counts(counts, rows)
    return operators.plain_groups(counts, rows, height_of(rows, counts.shape[0]))


def _groups_why_not(counts: Tensor, *, rows: int) -> str | None:
    _check_counts(counts, rows)
    return cannot_run(counts) or (f"it takes up to {_MOST} experts" if counts.shape[0] > _MOST else None)


def _check_counts(counts: Tensor, rows: int) -> None:
    if counts.dim() != 1 or not counts.shape[0] or counts.dtype not in (torch.int32, torch.int64):
        raise UsageError(f"row_groups takes one count per expert, and these are {counts.dtype} {tuple(counts.shape)}.")
    if not 0 <= rows < 2**31:
        raise UsageError(f"row_groups takes from 0 to 2**31 - 1 rows, and not {rows}.")


@fused(reference=_groups_reference, why_not=_groups_why_not)
def row_groups(counts: Tensor, *, rows: int) -> Tensor:
    """What `grouped_product` needs to know of rows by experts, to be used for several products of the same rows.

    One launch; nothing waits for the device. Its contents are for `grouped_product` alone.

    Args:
        counts: How many rows each expert has, in int32 or int64, as `permute_tokens` gives them. Where they are more
            than there are rows, the last experts have less.
        rows: How many rows there are.
    """
    return operators.group(counts, rows, height_of(rows, counts.shape[0]))  # type: ignore[no-any-return]


@fused(reference=reference, why_not=_why_not)
def grouped_product(
    rows: Tensor, weight: Tensor, counts: Tensor, *, activation: Activation | None = None, groups: Tensor | None = None,
    sources: Tensor | None = None, row_scales: Tensor | None = None, weight_scales: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Each row by the matrix of its expert, `row @ weight[expert].T`, in the dtype of rows: (rows, columns).

    The first `counts[0]` rows are those of the first expert, and so on; rows behind the last expert's become zeros.
    Added up in float32; float32 is multiplied in full precision. Deterministic, and nothing waits for the device. The
    time is that of the rows there are, however they are spread over experts. rows and weight have gradients, and are
    kept for them; experts without rows have a gradient of zeros. Rows with holes are copied.

    Args:
        rows: (rows, depth), in float32, bfloat16 or float16, or in torch.float8_e4m3fn with scales.
        weight: (experts, columns, depth) in the same dtype, with any strides.
        counts: How many rows each expert has, (experts) in int32 or int64.
        activation: "silu", "gelu" or "gelu_tanh": the result is half as wide, the activation of what the first half
            of a matrix gives, times what the second half gives. For the gradient both are written and kept.
        groups: What `row_groups` made of counts and as many rows; by default it is made here.
        sources: Which of `rows` each product takes, in int32, as `sort_tokens` names the token of each: then nothing
            is copied, and there are as many products as sources. They have no gradients by kernels; plain torch runs
            where there are any to come.
        row_scales: What rows in 8 bits are multiplied by, in float32: (rows), or (rows, depth / 128) for each 128 of a
            row, as `quantise` makes them with blocks of "row" and (1, 128). Numbers of 8 bits have no gradients.
        weight_scales: The same of matrices: (experts), or (experts, columns / 128, depth / 128) by blocks of 128 x 128,
            rounded up. Either both scales are by blocks, or none.
        dtype: That of a result of 8 bits; by default bfloat16.
    """
    number = operators.number_of(rows, sources)
    height = height_of(number, weight.shape[0])
    if groups is None:
        groups = operators.group(counts, number, height)
    elif groups.shape[0] != groups_size(weight.shape[0], number, height):
        raise UsageError(f"These groups are not of {number} rows and {weight.shape[0]} experts: see row_groups.")
    sources = None if sources is None else sources.contiguous()
    if row_scales is not None:
        wanted = dtype or torch.bfloat16
        scaled = rows, weight, row_scales, weight_scales
        return operators.eight(*scaled, groups, height, activation or "", wanted, sources)  # type: ignore[no-any-return]
    if sources is not None:
        return operators.gathered(rows, weight, groups, height, False, activation or "", sources)  # type: ignore[no-any-return]
    if activation is None:
        return operators.product(rows, weight, groups, height, False)  # type: ignore[no-any-return]
    keep = torch.is_grad_enabled() and (rows.requires_grad or weight.requires_grad)
    return operators.gated(rows, weight, groups, height, activation, keep)[0]  # type: ignore[no-any-return]
