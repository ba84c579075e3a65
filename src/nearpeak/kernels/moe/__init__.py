"""Mixture of experts: `route`, `sort_tokens`, `permute_tokens`, `unpermute_tokens`, the function `moe` and the layer `MoE`.

Tokens are multiplied by the two matrices of each of their experts, gathered from wherever they are, and results are summed by
token. For T tokens with k experts of sizes H and I, forward writes T k rows of I and of H and reads them back; if a backward pass
follows it also writes T k rows of 2 I, and keeps these and the tokens. Results are not summed by the GEMM that produces them: the
order of additions would differ from run to run, or programs would wait for each other.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from nearpeak.errors import UsageError, did_you_mean
from nearpeak.kernels._runtime.operator import Operator
from nearpeak.kernels._runtime.policy import autocast, cannot_run, fused
from nearpeak.kernels.gemm import grouped
from nearpeak.kernels.gemm.grouped import (
    GateActivation,
    group_rows,
    multiply,
    multiply_gated_reference,
    multiply_gathered,
    multiply_reference,
    multiply_why_not,
    tile_height,
    weight_gradient_reference,
)
from nearpeak.kernels.gemm.grouped import multiply_why_not as product_why_not
from nearpeak.kernels.pointwise import apply_activation, gated_packed_backward_reference

Scores = Literal["softmax", "sigmoid"]
TINY = 1e-20
"""Added to a sum of scores before it divides: sigmoids of large negative logits may all be 0."""
_MOST_ROUTED_EXPERTS = 4096


def route_reference(
    logits: Tensor, k: int, *, scores: Scores = "softmax", renormalize: bool = False, bias: Tensor | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    _check_route(logits, k, scores, bias)
    return _route_reference(logits, bias, k, scores, renormalize, scale)


def _route_reference(
    logits: Tensor, bias: Tensor | None, k: int, scores: str, renormalize: bool, scale: float
) -> tuple[Tensor, Tensor]:
    wide = logits.to(torch.float64 if logits.dtype == torch.float64 else torch.float32)
    found = torch.softmax(wide, -1) if scores == "softmax" else torch.sigmoid(wide)
    preference = found.detach() if bias is None else found.detach() + bias.detach().to(found.dtype)
    # stable, so that of equal ones the first is chosen, which topk does not promise
    experts = torch.sort(preference, dim=-1, descending=True, stable=True).indices[..., :k]
    weights = found.gather(-1, experts)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + TINY)
    return (weights * scale).contiguous(), experts.to(torch.int32).contiguous()


def _route_backward_reference(
    gradient: Tensor, logits: Tensor, experts: Tensor, scores: str, renormalize: bool, scale: float
) -> Tensor:
    wide = logits.to(torch.float64 if logits.dtype == torch.float64 else torch.float32)
    found = torch.softmax(wide, -1) if scores == "softmax" else torch.sigmoid(wide)
    experts = experts.long()
    upstream = gradient.to(wide.dtype) * scale
    if renormalize:
        chosen = found.gather(-1, experts)
        total = chosen.sum(-1, keepdim=True) + TINY
        upstream = (upstream - (upstream * chosen).sum(-1, keepdim=True) / total) / total
    by_score = torch.zeros_like(wide).scatter(-1, experts, upstream)
    if scores == "softmax":
        by_logit = found * (by_score - (found * by_score).sum(-1, keepdim=True))
    else:
        by_logit = by_score * found * (1.0 - found)
    return by_logit.to(logits.dtype).contiguous()


def _check_route(logits: Tensor, k: int, scores: str, bias: Tensor | None) -> None:
    if scores not in get_args(Scores):
        raise UsageError(f"There are no scores {scores!r}. {did_you_mean(scores, get_args(Scores))}")
    if logits.dim() != 2 or not logits.is_floating_point():
        raise UsageError(
            f"route takes logits of the shape (tokens, experts), and these are {logits.dtype} of {tuple(logits.shape)}."
        )
    if not 1 <= k <= logits.shape[1]:
        raise UsageError(f"route chooses from 1 to {logits.shape[1]} experts of as many, and k is {k}.")
    if bias is not None and bias.shape != logits.shape[1:]:
        raise UsageError(f"The bias of route needs the shape {tuple(logits.shape[1:])}, and has {tuple(bias.shape)}.")


def _route_why_not(
    logits: Tensor, k: int, *, scores: Scores = "softmax", renormalize: bool = False, bias: Tensor | None = None,
    scale: float = 1.0,
) -> str | None:  # fmt: skip
    _check_route(logits, k, scores, bias)
    return _route_tensors_why_not(logits, bias)


def _route_tensors_why_not(logits: Tensor, *others: Any) -> str | None:
    if logits.shape[1] > _MOST_ROUTED_EXPERTS:
        return f"it chooses from up to {_MOST_ROUTED_EXPERTS} experts, and these are {logits.shape[1]}"
    return cannot_run(logits, *(one for one in others if isinstance(one, Tensor)))


def _route_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, _, _, *ctx.settings = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(logits, output[1])


def _route_autograd(ctx: Any, gradient: Tensor, _: Any) -> tuple[Any, ...]:
    return _route_backward(gradient, *ctx.saved_tensors, *ctx.settings), None, None, None, None, None


_route_operator = Operator(
    "route(Tensor logits, Tensor? bias, int k, str scores, bool renormalize, float scale) -> (Tensor, Tensor)",
    backends={"nvidia": "moe.triton:route"},
    reference=_route_reference,
    fake=lambda logits, bias, k, *rest: (
        logits.new_empty((logits.shape[0], k), dtype=_score_dtype(logits)),
        logits.new_empty((logits.shape[0], k), dtype=torch.int32),
    ),
    why_not=_route_tensors_why_not,
    setup_context=_route_setup,
    backward=_route_autograd,
)
_route_backward = Operator(
    "route_backward(Tensor gradient, Tensor logits, Tensor experts, str scores, bool renormalize, float scale)"
    " -> Tensor",
    backends={"nvidia": "moe.triton:route_backward"},
    reference=_route_backward_reference,
    fake=lambda gradient, logits, *rest: logits.new_empty(logits.shape),
    why_not=lambda gradient, logits, *rest: _route_tensors_why_not(logits, gradient, *rest),
)


def _score_dtype(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


@fused(reference=route_reference, why_not=_route_why_not)
def route(
    logits: Tensor, k: int, *, scores: Scores = "softmax", renormalize: bool = False, bias: Tensor | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The weights, (tokens, k) in float32, and the experts, (tokens, k) in int32, of each token; the best first.

    Of equal scores the expert with the smaller number comes first, and what is not a number counts as the highest.
    One launch. The logits have a gradient, by the weights; for it logits and experts are kept. Logits whose rows have
    holes are copied.

    Args:
        logits: A number for each token and expert, in float32, bfloat16 or float16.
        k: How many experts a token has.
        scores: "softmax" over all experts, or the "sigmoid" of each.
        renormalize: Divide the weights of a token by their sum, which is then 1. With "softmax" this is the same as
            a softmax over the chosen logits alone.
        bias: A number for each expert which is added to its score for the choice, and not to its weight; it balances
            the load, and has no gradient.
        scale: What the weights are multiplied by in the end.
    """
    return _route_operator(logits, bias, k, scores, renormalize, float(scale))  # type: ignore[no-any-return]


_MOST_ROWS = 2**31 - 1


def permute_reference(x: Tensor, experts: Tensor, *, number_of_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    _check_permute(x, experts, number_of_experts)
    counts, row_map, _ = _sort_reference(experts, number_of_experts)
    return _permute_rows_reference(x, row_map), counts, row_map


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


def _permute_rows_reference(x: Tensor, row_map: Tensor) -> Tensor:
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


def _check_permute(x: Tensor, experts: Tensor, number_of_experts: int) -> None:
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


def permute_why_not(x: Tensor, experts: Tensor, *, number_of_experts: int) -> str | None:
    _check_permute(x, experts, number_of_experts)
    return cannot_run(x, experts) or _sort_why_not(experts, number_of_experts)


def _sort_why_not(experts: Tensor, number_of_experts: int) -> str | None:
    if number_of_experts > 4094:
        return f"it sorts for up to 4094 experts, and these are {number_of_experts}"
    if experts.numel() > _MOST_ROWS:
        return "it has more than 2**31 rows"
    return cannot_run(experts)


def _unpermute_why_not(rows: Tensor, row_map: Tensor, weights: Tensor | None = None) -> str | None:
    _check_rows(rows, row_map, weights)
    if row_map.dtype is not torch.int32:
        return "it takes a row_map in int32"
    if weights is not None and not weights.is_floating_point():
        return "it takes weights that are floating point numbers"
    return cannot_run(rows, row_map, weights)


def _permute_rows_fake(x: Tensor, row_map: Tensor) -> Tensor:
    return x.new_empty(row_map.shape[0] * row_map.shape[1], x.shape[1])


def _permute_rows_setup(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _permute_rows_autograd(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    (row_map,) = ctx.saved_tensors
    return unpermute_rows(gradient, row_map, None), None


def _unpermute_rows_fake(rows: Tensor, row_map: Tensor, weights: Tensor | None) -> Tensor:
    return rows.new_empty(row_map.shape[0], rows.shape[1])


def _unpermute_rows_setup(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor) -> None:
    rows, row_map, weights = inputs
    ctx.save_for_backward(row_map, *(() if weights is None else (rows, weights)))


def _unpermute_rows_autograd(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, Tensor | None]:
    row_map, *others = ctx.saved_tensors
    if not others:
        return _permute_rows(gradient, row_map), None, None
    rows, weights = others
    to_rows, to_weights = _unpermute_rows_backward(gradient, rows, row_map, weights)
    return to_rows, None, to_weights


def _unpermute_rows_backward_reference(
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


def _unpermute_rows_backward_fake(
    gradient: Tensor, rows: Tensor, row_map: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    return rows.new_empty(rows.shape), weights.new_empty(weights.shape)


sort_tokens_operator = Operator(
    "sort_tokens(Tensor experts, int number_of_experts) -> (Tensor, Tensor, Tensor)",
    backends={"nvidia": "moe.triton:sort_tokens"},
    reference=_sort_reference,
    fake=lambda experts, number: (
        experts.new_empty(number, dtype=torch.int32),
        experts.new_empty(experts.shape, dtype=torch.int32),
        experts.new_empty(experts.shape[0] * experts.shape[1], dtype=torch.int32),
    ),
    why_not=_sort_why_not,
)
_permute_rows = Operator(
    "permute_rows(Tensor x, Tensor row_map) -> Tensor",
    backends={"nvidia": "moe.triton:permute_rows"},
    reference=_permute_rows_reference,
    fake=_permute_rows_fake,
    why_not=lambda x, row_map: cannot_run(x, row_map),
    setup_context=_permute_rows_setup,
    backward=_permute_rows_autograd,
)
unpermute_rows = Operator(
    "unpermute_rows(Tensor rows, Tensor row_map, Tensor? weights) -> Tensor",
    backends={"nvidia": "moe.triton:unpermute_rows"},
    reference=unpermute_reference,
    fake=_unpermute_rows_fake,
    why_not=_unpermute_why_not,
    setup_context=_unpermute_rows_setup,
    backward=_unpermute_rows_autograd,
)
_unpermute_rows_backward = Operator(
    "unpermute_rows_backward(Tensor gradient, Tensor rows, Tensor row_map, Tensor weights) -> (Tensor, Tensor)",
    backends={"nvidia": "moe.triton:unpermute_rows_backward"},
    reference=_unpermute_rows_backward_reference,
    fake=_unpermute_rows_backward_fake,
    why_not=lambda gradient, rows, row_map, weights: cannot_run(gradient, rows, row_map, weights),
)


def _sort_tokens_reference(experts: Tensor, *, number_of_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    _check_experts(experts, number_of_experts)
    return _sort_reference(experts, number_of_experts)


def _sort_tokens_why_not(experts: Tensor, *, number_of_experts: int) -> str | None:
    _check_experts(experts, number_of_experts)
    return _sort_why_not(experts, number_of_experts)


@fused(reference=_sort_tokens_reference, why_not=_sort_tokens_why_not)
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
    return sort_tokens_operator(experts, number_of_experts)  # type: ignore[no-any-return]


@fused(reference=permute_reference, why_not=permute_why_not)
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
    counts, row_map, _ = sort_tokens_operator(experts, number_of_experts)
    return _permute_rows(x, row_map), counts, row_map


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
    return unpermute_rows(rows, row_map, weights)  # type: ignore[no-any-return]


def _layer_reference(
    x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, groups: Tensor, row_map: Tensor, sources: Tensor,
    height: int, activation: str, keep: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    inner, kept = multiply_gated_reference(x[sources.long()], gate_up, groups, height, activation, keep)
    return unpermute_reference(multiply_reference(inner, down, groups, height, False), row_map, weights), kept


def _gate_backward_reference(
    upstream: Tensor, kept: Tensor, weights: Tensor, row_map: Tensor, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    wide = torch.promote_types(kept.dtype, torch.float32)
    row = row_map.reshape(-1).long()
    taken, row = row >= 0, torch.where(row >= 0, row, ~row)
    by_row = torch.zeros(len(row), dtype=wide, device=row.device)
    by_row[row] = torch.where(taken, weights.reshape(-1).to(wide), 0.0)
    gate, up = kept.to(wide).chunk(2, 1)
    inner = apply_activation(gate, activation) * up
    by_factors = gated_packed_backward_reference(upstream.to(wide) * by_row[:, None], kept.to(wide), activation, False)
    by_weights = torch.where(taken, (upstream.to(wide) * inner).sum(1)[row], 0.0)
    weighted = (inner * by_row[:, None]).to(kept.dtype)
    return by_factors.to(kept.dtype), weighted, by_weights.to(weights.dtype).view(weights.shape)


def _gathered_weight_gradient_reference(
    gradient: Tensor, rows: Tensor, groups: Tensor, experts: int, sources: Tensor, which: str
) -> Tensor:
    if which == "gradient":
        gradient = gradient[sources.long()]
    else:
        rows = rows[sources.long()]
    return weight_gradient_reference(gradient, rows, groups, experts)


def _fake_layer(
    x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, groups: Tensor, row_map: Tensor, sources: Tensor,
    height: int, activation: str, keep: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return x.new_empty(x.shape), x.new_empty((sources.shape[0], gate_up.shape[1]) if keep else (0,))


def _setup_layer(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weights, gate_up, down, groups, row_map, sources, ctx.height, ctx.activation, _ = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, weights, gate_up, down, groups, row_map, sources, output[1])


def _layer_backward(ctx: Any, gradient: Tensor | None, _: Any) -> tuple[Any, ...]:
    rest = (None,) * 6
    if gradient is None:
        return None, None, None, None, *rest
    x, weights, gate_up, down, groups, row_map, sources, kept = ctx.saved_tensors
    experts = gate_up.shape[0]
    upstream = multiply_gathered(gradient, down, groups, ctx.height, True, "", sources)
    by_factors, weighted, by_weights = gate_backward(upstream, kept, weights, row_map, ctx.activation)
    by_x = by_gate_up = by_down = None
    if ctx.needs_input_grad[3]:
        by_down = gathered_weight_gradient(gradient, weighted, groups, experts, sources, "gradient")
    if ctx.needs_input_grad[2]:
        by_gate_up = gathered_weight_gradient(by_factors, x, groups, experts, sources, "rows")
    if ctx.needs_input_grad[0]:
        by_x = unpermute_rows(multiply(by_factors, gate_up, groups, ctx.height, True), row_map, None)
    return by_x, by_weights, by_gate_up, by_down, *rest


moe_layer = Operator(
    "moe(Tensor x, Tensor weights, Tensor gate_up, Tensor down, Tensor groups, Tensor row_map,"
    " Tensor sources, int height, str activation, bool keep) -> (Tensor, Tensor)",
    backends={"nvidia": "moe.triton:moe_forward"},
    reference=_layer_reference,
    fake=_fake_layer,
    why_not=lambda x, weights, gate_up, down, *others: multiply_why_not(x, gate_up, down, weights),
    setup_context=_setup_layer,
    backward=_layer_backward,
)
gate_backward = Operator(
    "moe_gate_backward(Tensor upstream, Tensor kept, Tensor weights, Tensor row_map, str activation)"
    " -> (Tensor, Tensor, Tensor)",
    backends={"nvidia": "moe.triton:gate_backward"},
    reference=_gate_backward_reference,
    fake=lambda upstream, kept, weights, row_map, activation: (
        kept.new_empty(kept.shape),
        upstream.new_empty(upstream.shape),
        weights.new_empty(weights.shape),
    ),
    why_not=lambda upstream, kept, weights, row_map, activation: cannot_run(upstream, kept, weights, row_map),
)
gathered_weight_gradient = Operator(
    "gathered_weight_gradient(Tensor gradient, Tensor rows, Tensor groups, SymInt experts, Tensor sources,"
    " str which) -> Tensor",
    backends={"nvidia": "gemm.grouped_triton:weight_gradient"},
    reference=_gathered_weight_gradient_reference,
    fake=lambda gradient, rows, groups, experts, sources, which: rows.new_empty(
        experts, gradient.shape[1], rows.shape[1]
    ),
    why_not=multiply_why_not,
)

_ACTIVATION_OF_CLASS: dict[str, GateActivation] = {
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "GELU": "gelu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
}
"""By the names of classes of torch and transformers."""


def _are_moe_weights(found: list[nn.Parameter]) -> bool:
    """Whether these are the weights of a router and of experts."""
    if [one.dim() for one in found] != [2, 3, 3]:
        return False
    (experts, columns), inner = found[0].shape, found[2].shape[2]
    return found[1].shape == (experts, 2 * inner, columns) and found[2].shape == (experts, columns, inner)


def _moe_reference(
    x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, activation: GateActivation
) -> Tensor:
    rows, counts, row_map = permute_reference(x, experts, number_of_experts=gate_up.shape[0])
    inner = grouped.grouped_gemm_reference(rows, gate_up, counts, activation=activation)
    return unpermute_reference(grouped.grouped_gemm_reference(inner, down, counts), row_map, weights)


def _moe_why_not(
    x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, activation: GateActivation
) -> str | None:
    return (
        permute_why_not(x, experts, number_of_experts=gate_up.shape[0])
        or product_why_not(x, gate_up, weights)
        or product_why_not(x, down)
    )


@fused(reference=_moe_reference, why_not=_moe_why_not)
def _moe(
    x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, activation: GateActivation
) -> Tensor:
    number = gate_up.shape[0]
    counts, row_map, sources = sort_tokens_operator(experts, number)
    height = tile_height(sources.shape[0], number)
    groups = group_rows(counts, sources.shape[0], height)
    keep = torch.is_grad_enabled() and any(one.requires_grad for one in (x, weights, gate_up, down))
    return moe_layer(x, weights, gate_up, down, groups, row_map, sources, height, activation, keep)[0]  # type: ignore[no-any-return]


def _check_moe(
    x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, activation: GateActivation
) -> None:
    if (
        gate_up.dim() != 3
        or gate_up.shape[1] % 2
        or down.shape != (gate_up.shape[0], gate_up.shape[2], gate_up.shape[1] // 2)
    ):
        raise UsageError(
            "Experts take gate_up of the shape (experts, 2 * inner, columns) and down of (experts, columns, inner), and"
            f" these have {tuple(gate_up.shape)} and {tuple(down.shape)}."
        )
    if x.dim() != 2 or x.shape[1] != gate_up.shape[2]:
        raise UsageError(
            f"Experts of {gate_up.shape[2]} columns take tokens of the shape (tokens, {gate_up.shape[2]}), and these"
            f" have {tuple(x.shape)}."
        )
    if weights.shape != experts.shape:
        raise UsageError(
            f"Each choice has a weight: experts have the shape {tuple(experts.shape)}, and weights"
            f" {tuple(weights.shape)}."
        )
    if activation not in get_args(GateActivation):
        raise UsageError(f"There is no activation {activation!r}. {did_you_mean(activation, get_args(GateActivation))}")


def moe(
    x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, *, activation: GateActivation = "silu"
) -> Tensor:
    """The results of each token's experts, times their weights, added up: (tokens, columns), in the dtype of x.

    An expert is `down[e] @ (activation(gate) * up)`, where gate and up are the halves of `gate_up[e] @ x`. Results of
    experts are added in float32 and in the order of choices; nothing waits for the device, so a CUDA graph can record
    it. All but `experts` have gradients. Inside of autocast x and both matrices are cast as for linear layers.

    Args:
        x: (tokens, columns).
        weights: A weight for each choice, (tokens, k), as `route` gives them.
        experts: The experts of each token, (tokens, k), in int32 or int64. A choice of none of them, as -1, is dropped.
        gate_up: (experts, 2 * inner, columns), contiguous for speed.
        down: (experts, columns, inner).
        activation: "silu", "gelu" or "gelu_tanh".
    """
    _check_moe(x, weights, experts, gate_up, down, activation)
    x, gate_up, down = autocast(x, gate_up, down)
    return _moe(x, weights, experts, gate_up, down, activation)


class Experts(nn.Module):
    """The matrices of all experts, `gate_up_proj` and `down_proj`, named and laid out as in transformers 5."""

    def __init__(
        self, columns: int, inner: int, experts: int, *, device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * inner, columns, device=device, dtype=dtype))
        self.down_proj = nn.Parameter(torch.empty(experts, columns, inner, device=device, dtype=dtype))
        for weight in self.parameters():
            nn.init.uniform_(weight, -(weight.shape[2] ** -0.5), weight.shape[2] ** -0.5)


class MoE(nn.Module):
    """A layer of gated experts with its router: `mixture_of_experts` with the choice of `route`.

    Parameters are `gate.weight`, `experts.gate_up_proj`, `experts.down_proj`, and with `bias` the buffer `bias`: the
    state of blocks of Mixtral and Qwen3-MoE in transformers 5 fits.

    Args:
        columns, inner: The size of tokens, and that between the two matrices of an expert.
        experts, k: How many experts there are, and how many a token has.
        scores, renormalize, scale: See `route`.
        bias: Whether there is a bias for the choice, a buffer that is zeros until someone balances the load.
        activation: See `mixture_of_experts`.
    """

    bias: Tensor | None

    def __init__(
        self, columns: int, inner: int, experts: int, k: int, *, scores: Scores = "softmax", renormalize: bool = True,
        scale: float = 1.0, bias: bool = False, activation: GateActivation = "silu",
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if scores not in get_args(Scores):
            raise UsageError(f"There are no scores {scores!r}. {did_you_mean(scores, get_args(Scores))}")
        if activation not in get_args(GateActivation):
            raise UsageError(
                f"There is no activation {activation!r}. {did_you_mean(activation, get_args(GateActivation))}"
            )
        if not 1 <= k <= experts:
            raise UsageError(f"A token has from 1 to {experts} experts of as many, and k is {k}.")
        self.k = k
        self.scores: Scores = scores
        self.renormalize = renormalize
        self.scale = scale
        self.activation: GateActivation = activation
        self.gate = nn.Linear(columns, experts, bias=False, device=device, dtype=dtype)
        self.experts = Experts(columns, inner, experts, device=device, dtype=dtype)
        self.register_buffer("bias", torch.zeros(experts, device=device) if bias else None)

    @classmethod
    def from_transformers(cls, block: nn.Module) -> MoE:
        """The same layer as a block of Mixtral or Qwen3-MoE of transformers 5, which shares its parameters."""
        gate, experts = getattr(block, "gate", None), getattr(block, "experts", None)
        router = getattr(gate, "weight", None)
        gate_up, down = getattr(experts, "gate_up_proj", None), getattr(experts, "down_proj", None)
        found = [one for one in (router, gate_up, down) if isinstance(one, nn.Parameter)]
        if gate is None or experts is None or not hasattr(gate, "top_k") or not _are_moe_weights(found):
            raise UsageError(
                "MoE.from_transformers takes a sparse block of Mixtral or Qwen3-MoE, with gate.weight,"
                f" experts.gate_up_proj and experts.down_proj, and not a {type(block).__name__} with"
                f" {[tuple(one.shape) for one in found]}."
            )
        router, gate_up, down = found
        for name in ("shared_expert", "shared_experts", "e_score_correction_bias", "gate_up_proj_bias"):
            if any(hasattr(one, name) for one in (block, gate, experts)):
                raise UsageError(f"MoE.from_transformers knows nothing of {name} of {type(block).__name__}.")
        if getattr(block, "jitter_noise", 0.0):
            raise UsageError("MoE has no noise for its router, and this block has: set jitter_noise to 0 before.")
        named = type(experts.act_fn).__name__
        if named not in _ACTIVATION_OF_CLASS:
            raise UsageError(f"MoE has the activations {', '.join(_ACTIVATION_OF_CLASS)}, and not {named}.")
        number, columns = router.shape
        made = cls(
            columns, down.shape[2], number, gate.top_k, renormalize=getattr(gate, "norm_topk_prob", True),
            activation=_ACTIVATION_OF_CLASS[named], device="meta",
        )  # fmt: skip
        made.gate.weight = router
        made.experts.gate_up_proj, made.experts.down_proj = gate_up, down
        return made.train(block.training)

    def forward(self, x: Tensor, *, return_logits: bool = False) -> Any:
        """The results of tokens, in the shape of x, (..., columns); and the logits of the router, if asked for."""
        tokens = x.reshape(-1, x.shape[-1])
        logits = self.gate(tokens)
        weights, experts = route(
            logits, self.k, scores=self.scores, renormalize=self.renormalize, bias=self.bias, scale=self.scale
        )
        result = moe(
            tokens, weights, experts, self.experts.gate_up_proj, self.experts.down_proj, activation=self.activation
        ).view(x.shape)
        return (result, logits) if return_logits else result

    def extra_repr(self) -> str:
        number, columns, inner = self.experts.down_proj.shape
        return f"{columns}, inner={inner}, experts={number}, k={self.k}, scores={self.scores!r}"
