"""Mixture of experts: `route`, `sort_tokens`, `permute_tokens`, `unpermute_tokens`, `moe`, and the layer `MoE`.

Tokens are multiplied by the two matrices of each of their experts, gathered from wherever they are, and the results are
summed by token. For T tokens with k experts of sizes H and I, forward writes T k rows of I and of H and reads them
back; if a backward pass follows it also writes T k rows of 2 I, and saves these and the tokens. The GEMM does not sum
its own results: the order of additions would differ from run to run, or programs would wait for each other.

Bytes moved by the parts: `route` reads the logits once and writes k weights and k experts per token; its backward pass
reads the logits, k gradients and k experts, and writes the gradient of the logits. `permute_tokens` reads each token
once and writes its k rows; `unpermute_tokens` reads k rows and writes a token. The backward pass of each is the other
without weights. With weights, that of `unpermute_tokens` reads the gradient of a token and its k rows, and writes k
rows and k weights.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from nearpeak.errors import UsageError, did_you_mean
from nearpeak.kernels._runtime.operator import Operator
from nearpeak.kernels._runtime.policy import autocast, cannot_run, fused
from nearpeak.kernels.gemm.grouped import (
    GateActivation,
    group_rows,
    grouped_gemm_reference,
    multiply,
    multiply_gated_reference,
    multiply_gathered,
    multiply_reference,
    multiply_why_not,
    tile_height,
    weight_gradient_reference,
)
from nearpeak.kernels.pointwise import apply_activation, gated_packed_backward_reference

Scores = Literal["softmax", "sigmoid"]
TINY = 1e-20
"""Added to a sum of scores before it divides: sigmoids of large negative logits may all be 0."""
_MOST_ROUTED_EXPERTS = 4096
_MOST_SORTED_EXPERTS = 4094
_MOST_ROWS = 2**31 - 1


def route_reference(
    logits: Tensor, k: int, *, scores: Scores = "softmax", renormalize: bool = False, bias: Tensor | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    _check_route(logits, k, scores, bias)
    return _route_reference(logits, bias, k, scores, renormalize, scale)


def _route_reference(
    logits: Tensor, bias: Tensor | None, k: int, scores: str, renormalize: bool, scale: float
) -> tuple[Tensor, Tensor]:
    score = _scores(logits, scores)
    preference = score.detach() if bias is None else score.detach() + bias.detach().to(score.dtype)
    # a stable sort prefers the first of equal scores, which topk does not guarantee
    experts = torch.sort(preference, dim=-1, descending=True, stable=True).indices[..., :k]
    weights = score.gather(-1, experts)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + TINY)
    return (weights * scale).contiguous(), experts.to(torch.int32).contiguous()


def _route_backward_reference(
    gradient: Tensor, logits: Tensor, experts: Tensor, scores: str, renormalize: bool, scale: float
) -> Tensor:
    score = _scores(logits, scores)
    experts = experts.long()
    upstream = gradient.to(score.dtype) * scale
    if renormalize:
        chosen = score.gather(-1, experts)
        total = chosen.sum(-1, keepdim=True) + TINY
        upstream = (upstream - (upstream * chosen).sum(-1, keepdim=True) / total) / total
    grad_score = torch.zeros_like(score).scatter(-1, experts, upstream)
    if scores == "softmax":
        grad_logits = score * (grad_score - (score * grad_score).sum(-1, keepdim=True))
    else:
        grad_logits = grad_score * score * (1.0 - score)
    return grad_logits.to(logits.dtype).contiguous()


def _scores(logits: Tensor, scores: str) -> Tensor:
    wide = logits.to(_wide_dtype(logits))
    return torch.softmax(wide, -1) if scores == "softmax" else torch.sigmoid(wide)


def _wide_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _check_route(logits: Tensor, k: int, scores: str, bias: Tensor | None) -> None:
    if scores not in get_args(Scores):
        raise UsageError(f"There are no scores {scores!r}. {did_you_mean(scores, get_args(Scores))}")
    if logits.dim() != 2 or not logits.is_floating_point():
        raise UsageError(
            f"route takes logits of the shape (tokens, experts), and these are {logits.dtype} of {tuple(logits.shape)}."
        )
    if not 1 <= k <= logits.shape[1]:
        raise UsageError(f"route needs a k from 1 to the {logits.shape[1]} experts, and k is {k}.")
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
        return f"it routes to up to {_MOST_ROUTED_EXPERTS} experts, and these are {logits.shape[1]}"
    return cannot_run(logits, *(tensor for tensor in others if isinstance(tensor, Tensor)))


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
        logits.new_empty((logits.shape[0], k), dtype=_wide_dtype(logits)),
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


@fused(reference=route_reference, why_not=_route_why_not)
def route(
    logits: Tensor, k: int, *, scores: Scores = "softmax", renormalize: bool = False, bias: Tensor | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The weights, (tokens, k) in float32, and the experts, (tokens, k) in int32, of each token; the best first.

    Of equal scores the lower expert comes first; NaN counts as the highest score. One launch. The logits have a
    gradient through the weights, for which logits and experts are saved. Logits with rows that are not contiguous are
    copied.

    Args:
        logits: (tokens, experts), in float32, bfloat16 or float16.
        k: The number of experts of a token.
        scores: "softmax" over all experts, or the "sigmoid" of each.
        renormalize: Divide the weights of a token by their sum. With "softmax" this equals a softmax over the chosen
            logits alone.
        bias: (experts), added to the scores for the choice, and not to the weights; it balances the load, and has no
            gradient.
        scale: A factor of the weights.
    """
    return _route_operator(logits, bias, k, scores, renormalize, float(scale))  # type: ignore[no-any-return]


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
    wide = _wide_dtype(rows)
    result = torch.zeros(len(row_map), rows.shape[1], dtype=wide, device=rows.device)
    for choice in range(row_map.shape[1]):
        row = row_map[:, choice].long()
        values = rows[row.clamp(min=0)].to(wide)
        if weights is not None:
            values = values * weights[:, choice, None].to(wide)
        result = result + torch.where((row >= 0)[:, None], values, 0.0)
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
            "experts need the shape (tokens, k), in int32 or int64, and these are"
            f" {tuple(experts.shape)} in {experts.dtype}."
        )
    if number_of_experts < 1:
        raise UsageError(f"number_of_experts needs to be 1 or more, and is {number_of_experts}.")


def _check_rows(rows: Tensor, row_map: Tensor, weights: Tensor | None) -> None:
    if rows.dim() != 2 or row_map.dim() != 2 or len(rows) != row_map.numel():
        raise UsageError(
            f"unpermute_tokens takes one row per element of row_map, and these have the shapes {tuple(rows.shape)}"
            f" and {tuple(row_map.shape)}. Pass the row_map of permute_tokens, and as many rows in the same order."
        )
    if weights is not None and weights.shape != row_map.shape:
        raise UsageError(
            f"The weights of unpermute_tokens have the shape {tuple(weights.shape)}, and its row_map"
            f" {tuple(row_map.shape)}. Pass one weight per choice."
        )


def permute_why_not(x: Tensor, experts: Tensor, *, number_of_experts: int) -> str | None:
    _check_permute(x, experts, number_of_experts)
    return cannot_run(x, experts) or _sort_why_not(experts, number_of_experts)


def _sort_why_not(experts: Tensor, number_of_experts: int) -> str | None:
    if number_of_experts > _MOST_SORTED_EXPERTS:
        return f"it sorts for up to {_MOST_SORTED_EXPERTS} experts, and these are {number_of_experts}"
    if experts.numel() > _MOST_ROWS:
        return "it has more than 2**31 rows"
    return cannot_run(experts)


def _unpermute_why_not(rows: Tensor, row_map: Tensor, weights: Tensor | None = None) -> str | None:
    _check_rows(rows, row_map, weights)
    if row_map.dtype is not torch.int32:
        return "it takes a row_map in int32"
    if weights is not None and not weights.is_floating_point():
        return "it takes floating point weights"
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
    grad_rows, grad_weights = _unpermute_rows_backward(gradient, rows, row_map, weights)
    return grad_rows, None, grad_weights


def _unpermute_rows_backward_reference(
    gradient: Tensor, rows: Tensor, row_map: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    wide = _wide_dtype(rows)
    choices = row_map.shape[1]
    row = row_map.reshape(-1, 1).long()
    target = torch.where(row >= 0, row, ~row)
    upstream = gradient.to(wide).repeat_interleave(choices, 0)
    scaled = torch.where(row >= 0, upstream * weights.to(wide).reshape(-1, 1), 0.0).to(rows.dtype)
    grad_rows = torch.zeros(rows.shape, dtype=rows.dtype, device=rows.device)
    grad_rows.scatter_(0, target.expand(-1, rows.shape[1]), scaled)
    grad_weights = torch.where(row >= 0, upstream * rows.to(wide)[target.view(-1)], 0.0).sum(1)
    return grad_rows, grad_weights.to(weights.dtype).view(weights.shape)


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
    """The order of tokens by their experts: (counts, row_map, sources). Deterministic, without waiting for the device.

    Args:
        experts: (tokens, k), the experts of each token, in int32 or int64. Choices out of range, such as -1, are
            dropped.
        number_of_experts: The number of experts.

    Returns:
        The number of choices of each expert; the row of each choice, (tokens, k), or a negative number for a dropped
        one; and the token of each row, for `grouped_gemm`, those of dropped choices last. All in int32.
    """
    return sort_tokens_operator(experts, number_of_experts)  # type: ignore[no-any-return]


@fused(reference=permute_reference, why_not=permute_why_not)
def permute_tokens(x: Tensor, experts: Tensor, *, number_of_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """The tokens in the order of their experts: (rows, counts, row_map).

    The rows of one expert are contiguous and in the order of the tokens; `counts` (int32, on the device) holds their
    number. `rows` always has tokens times k rows, so nothing waits for the device; those after the sum of `counts` are
    zeros. Deterministic. `x` has a gradient, for which `row_map` alone is saved. An `x` with rows that are not
    contiguous is copied.

    Args:
        x: (tokens, columns), in float32, bfloat16 or float16.
        experts: (tokens, k), the experts of each token, in int32 or int64. Choices out of range, such as -1, are
            dropped.
        number_of_experts: The number of experts.

    Returns:
        The rows; the counts; and `row_map`, (tokens, k) in int32: the row of each choice, or a negative number (the
        complement of a row of zeros) for a dropped one.
    """
    counts, row_map, _ = sort_tokens_operator(experts, number_of_experts)
    return _permute_rows(x, row_map), counts, row_map


@fused(reference=unpermute_reference, why_not=_unpermute_why_not)
def unpermute_tokens(rows: Tensor, row_map: Tensor, weights: Tensor | None = None) -> Tensor:
    """The weighted sum of the rows of each token: (tokens, columns) in the dtype of `rows`.

    Summed in float32, in the order of a token's choices; zeros for a token without choices. `rows` and `weights` have
    gradients; both and `row_map` are saved for them, without weights `row_map` alone. Rows that are not contiguous are
    copied.

    Args:
        rows: The results of experts for the rows of `permute_tokens`, in the same order.
        row_map: That of `permute_tokens`.
        weights: (tokens, k), one weight per choice, in float32, bfloat16 or float16; 1 by default.
    """
    return unpermute_rows(rows, row_map, weights)  # type: ignore[no-any-return]


def _layer_reference(
    x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, groups: Tensor, row_map: Tensor, sources: Tensor,
    height: int, activation: str, keep: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    inner, gate_and_up = multiply_gated_reference(x[sources.long()], gate_up, groups, height, activation, keep)
    return unpermute_reference(multiply_reference(inner, down, groups, height, False), row_map, weights), gate_and_up


def _gate_backward_reference(
    upstream: Tensor, kept: Tensor, weights: Tensor, row_map: Tensor, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    wide = torch.promote_types(kept.dtype, torch.float32)
    row = row_map.reshape(-1).long()
    is_taken, row = row >= 0, torch.where(row >= 0, row, ~row)
    weight = torch.zeros(len(row), 1, dtype=wide, device=row.device)
    weight[row, 0] = torch.where(is_taken, weights.reshape(-1).to(wide), 0.0)
    gate, up = kept.to(wide).chunk(2, 1)
    inner = apply_activation(gate, activation) * up
    grad_gate_up = gated_packed_backward_reference(upstream.to(wide) * weight, kept.to(wide), activation, False)
    grad_weights = torch.where(is_taken, (upstream.to(wide) * inner).sum(1)[row], 0.0)
    weighted = (inner * weight).to(kept.dtype)
    return grad_gate_up.to(kept.dtype), weighted, grad_weights.to(weights.dtype).view(weights.shape)


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
    """Three grouped GEMMs that gather rows of tokens, as forward does.

    The gradient of a weight is the dot product of its expert's result and the gradient of its token. Results are not
    saved; it equals the dot product of the inner row and its gradient before the weight, which is needed anyway.
    """
    options = (None,) * 6
    if gradient is None:
        return None, None, None, None, *options
    x, weights, gate_up, down, groups, row_map, sources, gate_and_up = ctx.saved_tensors
    experts = gate_up.shape[0]
    upstream = multiply_gathered(gradient, down, groups, ctx.height, True, "", sources)
    grad_inner, weighted, grad_weights = gate_backward(upstream, gate_and_up, weights, row_map, ctx.activation)
    grad_x = grad_gate_up = grad_down = None
    if ctx.needs_input_grad[3]:
        grad_down = gathered_weight_gradient(gradient, weighted, groups, experts, sources, "gradient")
    if ctx.needs_input_grad[2]:
        grad_gate_up = gathered_weight_gradient(grad_inner, x, groups, experts, sources, "rows")
    if ctx.needs_input_grad[0]:
        grad_x = unpermute_rows(multiply(grad_inner, gate_up, groups, ctx.height, True), row_map, None)
    return grad_x, grad_weights, grad_gate_up, grad_down, *options


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
"""By class names in torch and transformers."""


def _are_moe_weights(parameters: list[nn.Parameter]) -> bool:
    """Whether these are the weights of a router and of experts."""
    if [weight.dim() for weight in parameters] != [2, 3, 3]:
        return False
    router, gate_up, down = parameters
    (experts, columns), inner = router.shape, down.shape[2]
    return gate_up.shape == (experts, 2 * inner, columns) and down.shape == (experts, columns, inner)


def _moe_reference(
    x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, activation: GateActivation
) -> Tensor:
    rows, counts, row_map = permute_reference(x, experts, number_of_experts=gate_up.shape[0])
    inner = grouped_gemm_reference(rows, gate_up, counts, activation=activation)
    return unpermute_reference(grouped_gemm_reference(inner, down, counts), row_map, weights)


def _moe_why_not(
    x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, activation: GateActivation
) -> str | None:
    return (
        permute_why_not(x, experts, number_of_experts=gate_up.shape[0])
        or multiply_why_not(x, gate_up, weights)
        or multiply_why_not(x, down)
    )


@fused(reference=_moe_reference, why_not=_moe_why_not)
def _moe(
    x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, activation: GateActivation
) -> Tensor:
    counts, row_map, sources = sort_tokens_operator(experts, gate_up.shape[0])
    height = tile_height(sources.shape[0], gate_up.shape[0])
    groups = group_rows(counts, sources.shape[0], height)
    keep = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x, weights, gate_up, down))
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
            "moe takes gate_up of the shape (experts, 2 * inner, columns) and down of (experts, columns, inner), and"
            f" these have {tuple(gate_up.shape)} and {tuple(down.shape)}."
        )
    if x.dim() != 2 or x.shape[1] != gate_up.shape[2]:
        raise UsageError(
            f"moe takes x of the shape (tokens, {gate_up.shape[2]}) for matrices of as many columns, and this has"
            f" {tuple(x.shape)}."
        )
    if weights.shape != experts.shape:
        raise UsageError(
            f"moe takes one weight per choice: experts have the shape {tuple(experts.shape)}, and weights"
            f" {tuple(weights.shape)}."
        )
    if activation not in get_args(GateActivation):
        raise UsageError(f"There is no activation {activation!r}. {did_you_mean(activation, get_args(GateActivation))}")


def moe(
    x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, *, activation: GateActivation = "silu"
) -> Tensor:
    """The weighted sum of the results of each token's experts: (tokens, columns), in the dtype of x.

    An expert is `down[e] @ (activation(gate) * up)`, where gate and up are the halves of `gate_up[e] @ x`. Results are
    summed in float32 and in the order of choices. Nothing waits for the device, so a CUDA graph can capture it. All
    arguments but `experts` have gradients. Under autocast, x and both matrices are cast as for linear layers.

    Args:
        x: (tokens, columns).
        weights: (tokens, k), one weight per choice, as `route` returns them.
        experts: (tokens, k), the experts of each token, in int32 or int64. Choices out of range, as -1, are dropped.
        gate_up: (experts, 2 * inner, columns); contiguous is fastest.
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
    """A layer of gated experts with its router: `route` and `moe`.

    Its parameters are `gate.weight`, `experts.gate_up_proj`, `experts.down_proj`, and with `bias` the buffer `bias`. It
    loads the state of the blocks of Mixtral and Qwen3-MoE in transformers 5.

    Args:
        columns, inner: The size of tokens, and the size between the two matrices of an expert.
        experts, k: The number of experts, and of experts per token.
        scores, renormalize, scale: See `route`.
        bias: Whether there is a bias for the choice, a buffer that is zeros until it is set to balance the load.
        activation: See `moe`.
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
            raise UsageError(f"MoE needs a k from 1 to the {experts} experts, and k is {k}.")
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
        """The layer of a Mixtral or Qwen3-MoE block of transformers 5, sharing its parameters."""
        gate, experts = getattr(block, "gate", None), getattr(block, "experts", None)
        router = getattr(gate, "weight", None)
        gate_up, down = getattr(experts, "gate_up_proj", None), getattr(experts, "down_proj", None)
        weights = [weight for weight in (router, gate_up, down) if isinstance(weight, nn.Parameter)]
        if gate is None or experts is None or not hasattr(gate, "top_k") or not _are_moe_weights(weights):
            raise UsageError(
                "MoE.from_transformers takes a sparse block of Mixtral or Qwen3-MoE, with gate.weight,"
                f" experts.gate_up_proj and experts.down_proj, and not a {type(block).__name__} with"
                f" {[tuple(weight.shape) for weight in weights]}."
            )
        router, gate_up, down = weights
        for name in ("shared_expert", "shared_experts", "e_score_correction_bias", "gate_up_proj_bias"):
            if any(hasattr(module, name) for module in (block, gate, experts)):
                raise UsageError(f"MoE.from_transformers does not support {name} of {type(block).__name__}.")
        if getattr(block, "jitter_noise", 0.0):
            raise UsageError("MoE has no router noise, and this block has some: set its jitter_noise to 0 first.")
        activation = type(experts.act_fn).__name__
        if activation not in _ACTIVATION_OF_CLASS:
            raise UsageError(f"MoE has the activations {', '.join(_ACTIVATION_OF_CLASS)}, and not {activation}.")
        count, columns = router.shape
        layer = cls(
            columns, down.shape[2], count, gate.top_k, renormalize=getattr(gate, "norm_topk_prob", True),
            activation=_ACTIVATION_OF_CLASS[activation], device="meta",
        )  # fmt: skip
        layer.gate.weight = router
        layer.experts.gate_up_proj, layer.experts.down_proj = gate_up, down
        return layer.train(block.training)

    def forward(self, x: Tensor, *, return_logits: bool = False) -> Any:
        """The results of tokens, in the shape of x, (..., columns), and if requested the logits of the router."""
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
        experts, columns, inner = self.experts.down_proj.shape
        return f"{columns}, inner={inner}, experts={experts}, k={self.k}, scores={self.scores!r}"
