"""The operators of torch behind `cross_entropy`, each with the same in plain torch.

A loss that is one number has its gradient written in the forward pass, as the logits are at hand there, and multiplied
by the gradient from above in the backward pass, which costs nothing where that is 1. Otherwise the backward pass reads
the logits again: for a loss by rows, whose gradient from above has a number for each; in float16, where a gradient
divided by the number of rows is lost before a scaled loss could save it; and in compiled code, which would copy.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nearpeak.kernels.operator import Operator
from nearpeak.kernels.policy import cannot_run

PARTS = 128
"""In so many parts the kernels count targets."""
SETTINGS = "int ignore_index, float label_smoothing, float softcap, float z_loss, str reduction"
"""How schemas have what a loss is beside its tensors; a softcap of 0 is none."""


def capped(logits: Tensor, softcap: float) -> Tensor:
    """Logits in float32 or float64, below the softcap."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return softcap * torch.tanh(logits / softcap) if softcap else logits


def plain_rows(
    logits: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, label_smoothing: float, softcap: float,
    z_loss: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """By rows: the loss, the weight in a mean, the top and the sum of exponentials. NaN for targets out of range."""
    values = capped(logits, softcap)
    kept, valid, own = _targets(values, target, weight, ignore_index)
    safe = target.long().where(valid, 0)
    top = values.amax(-1).clamp_min(torch.finfo(torch.float32).min)
    total = (values - top[..., None]).exp().sum(-1)
    far = top[..., None] - values + total.log()[..., None]
    loss = (1.0 - label_smoothing) * own * far.gather(-1, safe[..., None])[..., 0]
    if label_smoothing:
        loss = loss + label_smoothing / values.shape[-1] * (far if weight is None else far * weight).sum(-1)
    if z_loss:
        loss = loss + z_loss * (top + total.log()).square()
    nothing = torch.where(kept, float("nan"), 0.0).to(loss.dtype)
    return loss.where(valid, nothing), own.where(valid, 0.0), top.where(valid, 0.0), total.where(valid, 1.0)


def plain_gradient(
    upstream: Tensor, logits: Tensor, target: Tensor, weight: Tensor | None, statistics: Tensor, parts: Tensor,
    ignore_index: int, label_smoothing: float, softcap: float, z_loss: float, reduction: str,
) -> Tensor:  # fmt: skip
    """The gradient by the logits, from what `plain_forward` found."""
    values = capped(logits, softcap)
    kept, valid, own = _targets(values, target, weight, ignore_index)
    columns = values.shape[-1]
    top, total = (one.view(target.shape) for one in statistics)
    spread = values.new_full((columns,), label_smoothing / columns)
    spread = spread if weight is None else spread * weight
    own = (1.0 - label_smoothing) * own
    pull = own + spread.sum() + 2.0 * z_loss * (top + total.log())
    result = (pull / total)[..., None] * (values - top[..., None]).exp() - spread
    safe = target.long().where(valid, 0)[..., None]
    result = result.scatter_add(-1, safe, -own[..., None].to(result.dtype))
    if softcap:
        result = result * (1.0 - (values / softcap).square())
    scale = upstream / parts.sum() if reduction == "mean" else upstream
    result = result * (scale.expand(target.shape)[..., None])
    nothing = torch.where(kept, float("nan"), 0.0).to(result.dtype)[..., None]
    final: Tensor = result.where(valid[..., None], nothing).to(logits.dtype)
    return final


def _targets(values: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int) -> tuple[Tensor, Tensor, Tensor]:
    kept = target != ignore_index
    valid = kept & (target >= 0) & (target < values.shape[-1])
    if weight is None:
        return kept, valid, torch.ones_like(target, dtype=values.dtype)
    return kept, valid, weight.to(values.dtype)[target.long().where(valid, 0)]


def plain_forward(
    logits: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, label_smoothing: float, softcap: float,
    z_loss: float, reduction: str, with_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """What the operator `cross_entropy` gives, in plain torch."""
    settings = (ignore_index, label_smoothing, softcap, z_loss)
    losses, counted, top, total = plain_rows(logits, target, weight, *settings)
    statistics = torch.stack([top.reshape(-1), total.reshape(-1)])
    parts = statistics.new_zeros(PARTS if reduction == "mean" else 0)
    loss = losses.clone()
    if reduction == "mean":
        parts[0] = counted.sum()
        loss = losses.sum() / parts[0]
    elif reduction == "sum":
        loss = losses.sum()
    gradient = logits.new_empty(0)
    if with_gradient:
        one = torch.ones_like(loss)
        gradient = plain_gradient(one, logits, target, weight, statistics, parts, *settings, reduction).contiguous()
    return loss, gradient, statistics, parts


def _plain_forward_(
    logits: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, label_smoothing: float, softcap: float,
    z_loss: float, reduction: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    settings = (ignore_index, label_smoothing, softcap, z_loss, reduction)
    loss, gradient, statistics, _ = plain_forward(logits, target, weight, *settings, True)
    logits.copy_(gradient)
    return loss, statistics


def _fake_loss(logits: Tensor, target: Tensor, reduction: str) -> Tensor:
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    return logits.new_empty(target.shape if reduction == "none" else (), dtype=dtype)


def _fake_forward(
    logits: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, label_smoothing: float, softcap: float,
    z_loss: float, reduction: str, with_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    loss = _fake_loss(logits, target, reduction)
    gradient = logits.new_empty(logits.shape if with_gradient else (0,))
    statistics = loss.new_empty(2, target.numel())
    return loss, gradient, statistics, loss.new_empty(PARTS if reduction == "mean" else 0)


def _fake_forward_(
    logits: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, label_smoothing: float, softcap: float,
    z_loss: float, reduction: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    loss = _fake_loss(logits, target, reduction)
    return loss, loss.new_empty(2, target.numel())


def _why_not_forward(logits: Tensor, target: Tensor, weight: Tensor | None, *_: Any) -> str | None:
    return cannot_run(logits, target, weight)


def _why_not_backward(upstream: Tensor, logits: Tensor, target: Tensor, weight: Tensor | None, *_: Any) -> str | None:
    return cannot_run(upstream, logits, target, weight)


def may_write() -> bool:
    """Whether a backward pass may change what was kept for it: no second one can follow, and nobody makes a graph of
    it. A mode that only looks on, as a fake one and that of an estimate, sees what runs without it.
    """
    modes = torch._C._TorchDispatchModeKey
    return not (
        torch._C._autograd._get_current_graph_task_keep_graph()
        or torch._C._get_dispatch_mode(modes.PROXY) is not None
        or torch._C._get_dispatch_mode(modes.FUNCTIONAL) is not None
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.compiler.is_compiling()
    )


def refuse_second_derivative(name: str) -> None:
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"nearpeak.kernels.{name} has no second derivative. Ask for it inside of nearpeak.kernels.using('off')."
        )


def times(gradient: Tensor, factor: Tensor) -> Tensor:
    """A gradient of the forward pass times one number: in place where it will not be needed again."""
    if not may_write():
        return gradient * factor
    _scale_(gradient, factor)
    return gradient


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, target, weight, *settings, with_gradient = inputs
    _, gradient, statistics, parts = output
    ctx.mark_non_differentiable(gradient, statistics, parts)
    ctx.set_materialize_grads(False)  # of a gradient by our gradient, which nobody has, there would be 2 GB of zeros
    ctx.settings = settings
    ctx.with_gradient = with_gradient
    if with_gradient:
        ctx.save_for_backward(gradient)
    else:
        ctx.save_for_backward(logits, target, weight, statistics, parts)


def _backward(ctx: Any, upstream: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    rest = (None,) * 8
    if upstream is None:
        return (None, *rest)
    refuse_second_derivative("cross_entropy")
    if ctx.with_gradient:
        (gradient,) = ctx.saved_tensors
        return (times(gradient, upstream), *rest)
    logits, target, weight, statistics, parts = ctx.saved_tensors
    return (backward(upstream, logits, target, weight, statistics, parts, *ctx.settings), *rest)


forward = Operator(
    f"cross_entropy(Tensor logits, Tensor target, Tensor? weight, {SETTINGS}, bool with_gradient)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    launch="cross_entropy:forward",
    reference=plain_forward,
    fake=_fake_forward,
    why_not=_why_not_forward,
    setup_context=_setup_context,
    backward=_backward,
)
forward_ = Operator(
    f"cross_entropy_(Tensor(a!) logits, Tensor target, Tensor? weight, {SETTINGS}) -> (Tensor, Tensor)",
    launch="cross_entropy:forward_",
    reference=_plain_forward_,
    fake=_fake_forward_,
    why_not=_why_not_forward,
)
_BACKWARD = f"Tensor target, Tensor? weight, Tensor statistics, Tensor parts, {SETTINGS}"
backward = Operator(
    f"cross_entropy_backward(Tensor upstream, Tensor logits, {_BACKWARD}) -> Tensor",
    launch="cross_entropy:backward",
    reference=plain_gradient,
    fake=lambda upstream, logits, *_: logits.new_empty(logits.shape),
    why_not=_why_not_backward,
)
backward_ = Operator(
    f"cross_entropy_backward_(Tensor upstream, Tensor(a!) logits, {_BACKWARD}) -> ()",
    launch="cross_entropy:backward_",
    reference=lambda upstream, logits, *rest: logits.copy_(plain_gradient(upstream, logits, *rest)),
    fake=lambda *_: None,
    why_not=_why_not_backward,
)
_scale_ = Operator(
    "scale_gradient_(Tensor(a!) gradient, Tensor factor) -> ()",
    launch="cross_entropy:scale_",
    reference=lambda gradient, factor: gradient.mul_(factor),
    fake=lambda *_: None,
    why_not=cannot_run,
)
