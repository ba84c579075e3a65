"""`sort_tokens`, `permute_tokens` and `unpermute_tokens`: tokens to the rows of their experts, and back.

Bytes: `permute_tokens` reads each token once and writes its k rows; `unpermute_tokens` reads k rows and writes a token.
The backward pass of each is the other without weights, and moves as much. With weights the backward pass of
`unpermute_tokens` reads the gradient of a token and its k rows, and writes k rows and k weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nearpeak.errors import UsageError
from nearpeak.kernels.operator import Operator
from nearpeak.kernels.policy import cannot_run, fused

_MOST = 2**31 - 1


def reference(x: Tensor, experts: Tensor, *, number_of_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    _check(x, experts, number_of_experts)
    counts, row_map, _ = _sort_reference(experts, number_of_experts)
    return _copy_reference(x, row_map), counts, row_map


def _sort_reference(experts: Tensor, number_of_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    flat = experts.reshape(-1).long()
    dropped = (flat < 0) | (flat >= number_of_experts)
    flat = torch.where(dropped, number_of_experts, flat)
    order = torch.sort(flat, stable=True).indices
    row = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    row_map = torch.where(dropped, ~row, row).to(torch.int32).view(experts.shape)
    zeros = torch.zeros(number_of_experts + 1, dtype=torch.int32, device=experts.device)
    counts = zeros.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
    sources = (order // max(experts.shape[1], 1)).to(torch.int32)
    return counts[:number_of_experts].clone(), row_map, sources


def _copy_reference(x: Tensor, row_map: Tensor) -> Tensor:
    tokens, choices = row_map.shape
    row = row_map.reshape(-1, 1).long()
    copies = torch.where(row >= 0, x.repeat_interleave(choices, 0), 0.0)
    target = torch.where(row >= 0, row, ~row).expand(-1, x.shape[1])
    return x.new_zeros(tokens * choices, x.shape[1]).scatter(0, target, copies)


def unpermute_reference(rows: Tensor, row_map: Tensor, weights: Tensor | None = None) -> Tensor:
    _check_rows(rows, row_map, weights)
    wide = torch.float64 if rows.dtype is torch.float64 else torch.float32
    result = torch.zeros(len(row_map), rows.shape[1], dtype=wide, device=rows.device)
    for choice in range(row_map.shape[1]):
        row = row_map[:, choice].long()
        taken = (row >= 0)[:, None]
        given = rows[row.clamp(min=0)].to(wide)
        if weights is not None:
            given = given * weights[:, choice, None].to(wide)
        result = result + torch.where(taken, given, 0.0)
    return result.to(rows.dtype)


def _check(x: Tensor, experts: Tensor, number_of_experts: int) -> None:
    if x.dim() != 2 or experts.dim() != 2 or len(x) != len(experts):
        raise UsageError(
            f"permute_tokens takes x of the shape (tokens, columns) and experts of the shape (tokens, k), and these"
            f" have {tuple(x.shape)} and {tuple(experts.shape)}."
        )
    _check_experts(experts, number_of_experts)


def _check_experts(experts: Tensor, number_of_experts: int) -> None:
    if experts.dim() != 2 or experts.dtype not in (torch.int32, torch.int64):
        raise UsageError(
            "Choices of experts have the shape (tokens, k), in int32 or int64, and these are"
            f" {tuple(experts.shape)} in {experts.dtype}."
        )
    if number_of_experts < 1:
        raise UsageError(f"There is a number_of_experts of 1 or more, and this is {number_of_experts}.")


def _check_rows(rows: Tensor, row_map: Tensor, weights: Tensor | None) -> None:
    if rows.dim() != 2 or row_map.dim() != 2 or len(rows) != row_map.numel():
        raise UsageError(
            f"unpermute_tokens takes a row for each number of row_map, and these have the shapes {tuple(rows.shape)}"
            f" and {tuple(row_map.shape)}. Give it the row_map of permute_tokens, and as many rows in the same order."
        )
    if weights is not None and weights.shape != row_map.shape:
        raise UsageError(
            f"The weights of unpermute_tokens have the shape {tuple(weights.shape)}, and its row_map"
            f" {tuple(row_map.shape)}. Give a weight for each."
        )


def why_not(x: Tensor, experts: Tensor, *, number_of_experts: int) -> str | None:
    _check(x, experts, number_of_experts)
    return cannot_run(x, experts) or _sort_why_not(experts, number_of_experts)


def _sort_why_not(experts: Tensor, number_of_experts: int) -> str | None:
    if number_of_experts > 4094:
        return f"it sorts for up to 4094 experts, and these are {number_of_experts}"
    if experts.numel() > _MOST:
        return "it has more than 2**31 rows"
    return cannot_run(experts)


def _unpermute_why_not(rows: Tensor, row_map: Tensor, weights: Tensor | None = None) -> str | None:
    _check_rows(rows, row_map, weights)
    if row_map.dtype is not torch.int32:
        return "it takes a row_map in int32"
    if weights is not None and not weights.is_floating_point():
        return "it takes weights that are floating point numbers"
    return cannot_run(rows, row_map, weights)


def _copy_fake(x: Tensor, row_map: Tensor) -> Tensor:
    return x.new_empty(row_map.shape[0] * row_map.shape[1], x.shape[1])


def _copy_setup(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _copy_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    (row_map,) = ctx.saved_tensors
    return sum_rows(gradient, row_map, None), None


def _sum_fake(rows: Tensor, row_map: Tensor, weights: Tensor | None) -> Tensor:
    return rows.new_empty(row_map.shape[0], rows.shape[1])


def _sum_setup(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor) -> None:
    rows, row_map, weights = inputs
    ctx.save_for_backward(row_map, *(() if weights is None else (rows, weights)))


def _sum_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, Tensor | None]:
    row_map, *others = ctx.saved_tensors
    if not others:
        return _copy(gradient, row_map), None, None
    rows, weights = others
    to_rows, to_weights = _weighted_backward(gradient, rows, row_map, weights)
    return to_rows, None, to_weights


def _weighted_backward_reference(
    gradient: Tensor, rows: Tensor, row_map: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    wide = torch.float64 if rows.dtype is torch.float64 else torch.float32
    choices = row_map.shape[1]
    row = row_map.reshape(-1, 1).long()
    target = torch.where(row >= 0, row, ~row)
    upstream = gradient.to(wide).repeat_interleave(choices, 0)
    scaled = torch.where(row >= 0, upstream * weights.to(wide).reshape(-1, 1), 0.0).to(rows.dtype)
    to_rows = torch.zeros(rows.shape, dtype=rows.dtype, device=rows.device)
    to_rows.scatter_(0, target.expand(-1, rows.shape[1]), scaled)
    product = torch.where(row >= 0, upstream * rows.to(wide)[target.view(-1)], 0.0).sum(1)
    return to_rows, product.to(weights.dtype).view(weights.shape)


def _weighted_backward_fake(gradient: Tensor, rows: Tensor, row_map: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    return rows.new_empty(rows.shape), weights.new_empty(weights.shape)


sort_operator = Operator(
    "sort_tokens(Tensor experts, int number_of_experts) -> (Tensor, Tensor, Tensor)",
    launch="permutation:sort",
    reference=_sort_reference,
    fake=lambda experts, number: (
        experts.new_empty(number, dtype=torch.int32),
        experts.new_empty(experts.shape, dtype=torch.int32),
        experts.new_empty(experts.shape[0] * experts.shape[1], dtype=torch.int32),
    ),
    why_not=_sort_why_not,
)
_copy = Operator(
    "permute_rows(Tensor x, Tensor row_map) -> Tensor",
    launch="permutation:copy",
    reference=_copy_reference,
    fake=_copy_fake,
    why_not=lambda x, row_map: cannot_run(x, row_map),
    setup_context=_copy_setup,
    backward=_copy_backward,
)
sum_rows = Operator(
    "unpermute_rows(Tensor rows, Tensor row_map, Tensor? weights) -> Tensor",
    launch="permutation:sum_rows",
    reference=unpermute_reference,
    fake=_sum_fake,
    why_not=_unpermute_why_not,
    setup_context=_sum_setup,
    backward=_sum_backward,
)
_weighted_backward = Operator(
    "unpermute_rows_backward(Tensor gradient, Tensor rows, Tensor row_map, Tensor weights) -> (Tensor, Tensor)",
    launch="permutation:sum_rows_backward",
    reference=_weighted_backward_reference,
    fake=_weighted_backward_fake,
    why_not=lambda gradient, rows, row_map, weights: cannot_run(gradient, rows, row_map, weights),
)


def _sort_by_keyword(experts: Tensor, *, number_of_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    _check_experts(experts, number_of_experts)
    return _sort_reference(experts, number_of_experts)


def _sort_why_not_by_keyword(experts: Tensor, *, number_of_experts: int) -> str | None:
    _check_experts(experts, number_of_experts)
    return _sort_why_not(experts, number_of_experts)


@fused(reference=_sort_by_keyword, why_not=_sort_why_not_by_keyword)
def sort_tokens(experts: Tensor, *, number_of_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """The order of tokens by their experts: (counts, row_map, sources). Deterministic; nothing waits for the device.

    Args:
        experts: The experts of each token, (tokens, k), in int32 or int64. A choice outside of 0 to
            `number_of_experts` - 1, such as -1, is dropped.
        number_of_experts: How many there are.

    Returns:
        How many choices each expert has; the row of each choice, (tokens, k), or a negative number for a dropped one;
        and the token of each row, for `grouped_product`, of which those of dropped choices are last. All in int32.
    """
    return sort_operator(experts, number_of_experts)  # type: ignore[no-any-return]


@fused(reference=reference, why_not=why_not)
def permute_tokens(x: Tensor, experts: Tensor, *, number_of_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """The tokens in the order of their experts: (rows, counts, row_map).

    The rows of each expert are together and in the order of the tokens: as many as `counts` (int32, on the device) has
    for it. `rows` always has tokens times k rows, so nothing waits for the device; those behind the sum of `counts` are
    zeros. Deterministic. `x` has a gradient; `row_map` alone is kept for it. An `x` whose rows have holes is copied.

    Args:
        x: Tokens and columns, in float32, bfloat16 or float16.
        experts: The experts of each token, (tokens, k), in int32 or int64. A choice outside of 0 to
            `number_of_experts` - 1, such as -1, is dropped.
        number_of_experts: How many there are.

    Returns:
        The rows; the counts; and `row_map`, (tokens, k) in int32: the row of each choice, or a negative number (the
        complement of a row of zeros) for a dropped one.
    """
    counts, row_map, _ = sort_operator(experts, number_of_experts)
    return _copy(x, row_map), counts, row_map


@fused(reference=unpermute_reference, why_not=_unpermute_why_not)
def unpermute_tokens(rows: Tensor, row_map: Tensor, weights: Tensor | None = None) -> Tensor:
    """The rows of each token added, times their weights: (tokens, columns) in the dtype of `rows`.

    Added in float32, in the order of a token's choices; a token of which all choices were dropped is zeros. `rows` and
    `weights` have gradients; with weights, both and `row_map` are kept for them, and without, `row_map` alone. Rows
    with holes are copied.

    Args:
        rows: What the experts made of the rows of `permute_tokens`, in the same order.
        row_map: That of `permute_tokens`.
        weights: A weight for each choice, (tokens, k), in float32, bfloat16 or float16; by default 1.
    """
    return sum_rows(rows, row_map, weights)  # type: ignore[no-any-return]
