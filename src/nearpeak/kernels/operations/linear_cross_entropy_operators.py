"""The operators of torch behind `linear_cross_entropy`, each with the same in plain torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nearpeak.kernels.operations.cross_entropy_operators import (
    PARTS,
    SETTINGS,
    plain_forward,
    plain_gradient,
    refuse_second_derivative,
    times,
)
from nearpeak.kernels.operator import Operator
from nearpeak.kernels.policy import cannot_run

_WANTED = "bool for_hidden, bool for_weight, bool for_bias"
_CHUNKS = "int chunk_tokens, bool? float32"


def _plain_gradients(
    by_logits: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: tuple[bool, bool, bool]
) -> tuple[Tensor, Tensor, Tensor]:
    nothing = hidden.new_empty(0)
    by_logits = by_logits.to(hidden.dtype)
    rows = by_logits.reshape(-1, by_logits.shape[-1])
    states = hidden.reshape(-1, hidden.shape[-1])
    return (
        (by_logits @ weight).contiguous() if wanted[0] else nothing,
        (rows.t() @ states).contiguous() if wanted[1] else nothing.to(weight.dtype),
        rows.sum(0) if wanted[2] else nothing.to(weight.dtype if bias is None else bias.dtype),
    )


def _plain_forward(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, class_weight: Tensor | None,
    ignore_index: int, label_smoothing: float, softcap: float, z_loss: float, reduction: str, chunk_tokens: int,
    float32: bool | None, with_logprobs: bool, with_entropy: bool, *wanted: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    logits = torch.nn.functional.linear(hidden, weight, bias)
    settings = (ignore_index, label_smoothing, softcap, z_loss, reduction)
    loss, by_logits, statistics, parts = plain_forward(logits, target, class_weight, *settings, any(wanted))
    nothing = statistics.new_empty(0)
    gradients = [nothing.to(hidden.dtype), nothing.to(weight.dtype), nothing.to(weight.dtype)]
    if any(wanted):
        gradients = list(_plain_gradients(by_logits, hidden, weight, bias, wanted))  # type: ignore[arg-type]
    # minus the loss by rows of nothing but the logits, and the entropy
    logprobs, entropies = plain_logprobs(logits, target, ignore_index, softcap)
    return (
        loss, *gradients, statistics.new_ones(()), logprobs if with_logprobs else nothing,
        entropies if with_entropy else nothing, statistics, parts,
    )  # fmt: skip


def plain_logprobs(logits: Tensor, target: Tensor, ignore_index: int, softcap: float) -> tuple[Tensor, Tensor]:
    """The logarithms of the probabilities of the targets, and the entropies of the rows; 0 for ignored ones."""
    values = logits if logits.dtype == torch.float64 else logits.float()
    logs = torch.log_softmax(softcap * torch.tanh(values / softcap) if softcap else values, -1)
    kept = target != ignore_index
    wanted = logs.gather(-1, target.long().where(kept, 0)[..., None])[..., 0]
    return wanted.where(kept, 0.0), torch.special.entr(logs.exp()).sum(-1).where(kept, 0.0)


def _plain_backward(
    upstream: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, class_weight: Tensor | None,
    statistics: Tensor, parts: Tensor, ignore_index: int, label_smoothing: float, softcap: float, z_loss: float,
    reduction: str, chunk_tokens: int, float32: bool | None, *wanted: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    logits = torch.nn.functional.linear(hidden, weight, bias)
    settings = (ignore_index, label_smoothing, softcap, z_loss, reduction)
    by_logits = plain_gradient(upstream, logits, target, class_weight, statistics, parts, *settings)
    return _plain_gradients(by_logits, hidden, weight, bias, wanted)  # type: ignore[arg-type]


def _fake_gradients(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, for_hidden: bool, for_weight: bool, for_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        hidden.new_empty(hidden.shape if for_hidden else (0,)),
        weight.new_empty(weight.shape if for_weight else (0,)),
        (weight if bias is None else bias).new_empty(weight.shape[0] if for_bias else 0),
    )


def _fake_forward(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, class_weight: Tensor | None,
    ignore_index: int, label_smoothing: float, softcap: float, z_loss: float, reduction: str, chunk_tokens: int,
    float32: bool | None, with_logprobs: bool, with_entropy: bool, *wanted: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    loss = hidden.new_empty(target.shape if reduction == "none" else (), dtype=dtype)
    by_token = [loss.new_empty(target.shape if asked else (0,)) for asked in (with_logprobs, with_entropy)]
    statistics = loss.new_empty(2, target.numel())
    parts = loss.new_empty(PARTS if reduction == "mean" else 0)
    return loss, *_fake_gradients(hidden, weight, bias, *wanted), loss.new_empty(()), *by_token, statistics, parts


def _fake_backward(
    upstream: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, class_weight: Tensor | None,
    statistics: Tensor, parts: Tensor, *settings: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return _fake_gradients(hidden, weight, bias, *settings[-3:])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, bias, target, class_weight, *settings, _, _, for_hidden, for_weight, for_bias = inputs
    _, by_hidden, by_weight, by_bias, factor, _, _, statistics, parts = output
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.ahead = for_hidden or for_weight or for_bias
    ctx.has_bias = bias is not None
    if ctx.ahead:
        ctx.wanted = (for_hidden, for_weight, for_bias)
        ctx.late = hidden.dtype == torch.float16
        ctx.save_for_backward(by_hidden, by_weight, by_bias, factor)
    else:
        ctx.settings = settings
        ctx.save_for_backward(hidden, weight, bias, target, class_weight, statistics, parts)


def _backward(ctx: Any, upstream: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    rest = (None,) * 14
    if upstream is None:
        return (None, None, None, *rest)
    refuse_second_derivative("linear_cross_entropy")
    if ctx.ahead:
        *gradients, factor = ctx.saved_tensors
        by = upstream * factor if ctx.late else upstream
        wanted = ctx.wanted
        gradients = [times(one, by) if asked else None for one, asked in zip(gradients, wanted, strict=True)]
    else:
        wanted = tuple(ctx.needs_input_grad[:3])
        gradients = [
            one if asked else None
            for one, asked in zip(backward(upstream, *ctx.saved_tensors, *ctx.settings, *wanted), wanted, strict=True)
        ]
    return (*gradients, *rest)


def _why_not_forward(hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *rest: Any) -> str | None:
    return cannot_run(hidden, weight, bias, target, rest[0])


forward = Operator(
    "linear_cross_entropy(Tensor hidden, Tensor weight, Tensor? bias, Tensor target, Tensor? class_weight,"
    f" {SETTINGS}, {_CHUNKS}, bool with_logprobs, bool with_entropy, {_WANTED})"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    launch="linear_cross_entropy:forward",
    reference=_plain_forward,
    fake=_fake_forward,
    why_not=_why_not_forward,
    setup_context=_setup_context,
    backward=_backward,
)
backward = Operator(
    "linear_cross_entropy_backward(Tensor upstream, Tensor hidden, Tensor weight, Tensor? bias, Tensor target,"
    f" Tensor? class_weight, Tensor statistics, Tensor parts, {SETTINGS}, {_CHUNKS}, {_WANTED})"
    " -> (Tensor, Tensor, Tensor)",
    launch="linear_cross_entropy:backward",
    reference=_plain_backward,
    fake=_fake_backward,
    why_not=lambda upstream, *rest: _why_not_forward(*rest),
)
