"""`route`: the experts of each token and their weights, from the logits of a router.

Bytes: forward reads the logits once and writes k weights and k numbers of experts for each token; backward reads the
logits, k gradients and k numbers, and writes the gradient of the logits.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor

from nearpeak.errors import UsageError, did_you_mean
from nearpeak.kernels.operator import Operator
from nearpeak.kernels.policy import cannot_run, fused

Scores = Literal["softmax", "sigmoid"]
TINY = 1e-20
"""Added to a sum of scores before it divides: sigmoids of large negative logits may all be 0."""
_MOST = 4096


def reference(
    logits: Tensor, k: int, *, scores: Scores = "softmax", renormalise: bool = False, bias: Tensor | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    _check(logits, k, scores, bias)
    return _reference(logits, bias, k, scores, renormalise, scale)


def _reference(
    logits: Tensor, bias: Tensor | None, k: int, scores: str, renormalise: bool, scale: float
) -> tuple[Tensor, Tensor]:
    wide = logits.to(torch.float64 if logits.dtype == torch.float64 else torch.float32)
    found = torch.softmax(wide, -1) if scores == "softmax" else torch.sigmoid(wide)
    preference = found.detach() if bias is None else found.detach() + bias.detach().to(found.dtype)
    # stable, so that of equal ones the first is chosen, which topk does not promise
    experts = torch.sort(preference, dim=-1, descending=True, stable=True).indices[..., :k]
    weights = found.gather(-1, experts)
    if renormalise:
        weights = weights / (weights.sum(-1, keepdim=True) + TINY)
    return (weights * scale).contiguous(), experts.to(torch.int32).contiguous()


def _reference_backward(
    gradient: Tensor, logits: Tensor, experts: Tensor, scores: str, renormalise: bool, scale: float
) -> Tensor:
    wide = logits.to(torch.float64 if logits.dtype == torch.float64 else torch.float32)
    found = torch.softmax(wide, -1) if scores == "softmax" else torch.sigmoid(wide)
    experts = experts.long()
    upstream = gradient.to(wide.dtype) * scale
    if renormalise:
        chosen = found.gather(-1, experts)
        total = chosen.sum(-1, keepdim=True) + TINY
        upstream = (upstream - (upstream * chosen).sum(-1, keepdim=True) / total) / total
    by_score = torch.zeros_like(wide).scatter(-1, experts, upstream)
    if scores == "softmax":
        by_logit = found * (by_score - (found * by_score).sum(-1, keepdim=True))
    else:
        by_logit = by_score * found * (1.0 - found)
    return by_logit.to(logits.dtype).contiguous()


def _check(logits: Tensor, k: int, scores: str, bias: Tensor | None) -> None:
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


def _why_not(
    logits: Tensor, k: int, *, scores: Scores = "softmax", renormalise: bool = False, bias: Tensor | None = None,
    scale: float = 1.0,
) -> str | None:  # fmt: skip
    _check(logits, k, scores, bias)
    return _tensors_why_not(logits, bias)


def _tensors_why_not(logits: Tensor, *others: Any) -> str | None:
    if logits.shape[1] > _MOST:
        return f"it chooses from up to {_MOST} experts, and these are {logits.shape[1]}"
    return cannot_run(logits, *(one for one in others if isinstance(one, Tensor)))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, _, _, *ctx.settings = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(logits, output[1])


def _backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Any, ...]:
    return _route_backward(gradient, *ctx.saved_tensors, *ctx.settings), None, None, None, None, None


_route = Operator(
    "route(Tensor logits, Tensor? bias, int k, str scores, bool renormalise, float scale) -> (Tensor, Tensor)",
    launch="routing:forward",
    reference=_reference,
    fake=lambda logits, bias, k, *rest: (
        logits.new_empty((logits.shape[0], k), dtype=_wide(logits)),
        logits.new_empty((logits.shape[0], k), dtype=torch.int32),
    ),
    why_not=_tensors_why_not,
    setup_context=_setup_context,
    backward=_backward,
)
_route_backward = Operator(
    "route_backward(Tensor gradient, Tensor logits, Tensor experts, str scores, bool renormalise, float scale)"
    " -> Tensor",
    launch="routing:backward",
    reference=_reference_backward,
    fake=lambda gradient, logits, *rest: logits.new_empty(logits.shape),
    why_not=lambda gradient, logits, *rest: _tensors_why_not(logits, gradient, *rest),
)


def _wide(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


@fused(reference=reference, why_not=_why_not)
def route(
    logits: Tensor, k: int, *, scores: Scores = "softmax", renormalise: bool = False, bias: Tensor | None = None,
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
        renormalise: Divide the weights of a token by their sum, which is then 1. With "softmax" this is the same as
            a softmax over the chosen logits alone.
        bias: A number for each expert which is added to its score for the choice, and not to its weight; it balances
            the load, and has no gradient.
        scale: What the weights are multiplied by in the end.
    """
    return _route(logits, bias, k, scores, renormalise, float(scale))  # type: ignore[no-any-return]
