"""`cross_entropy`, torch's with softcap and z-loss, in one pass over the logits, and `linear_cross_entropy`, the last
layer of a language model and its loss without the logits in memory.

A scalar loss has its gradient written in the forward pass, while the logits are at hand, and multiplied by the upstream
gradient in the backward pass, which costs nothing where that is 1. Otherwise the backward pass reads the logits again:
for a loss per row, whose upstream gradient has one number per row; in float16, where a gradient divided by the number
of rows underflows before loss scaling could save it; and in compiled code, which would copy.
"""

from __future__ import annotations

from math import prod
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from nearpeak.errors import UsageError, did_you_mean
from nearpeak.kernels._runtime.operator import Operator, refuse_second_derivative
from nearpeak.kernels._runtime.policy import autocast_dtype, cannot_run, fused

PARTS = 128
"""The kernels count targets in so many parts, whose sum every program computes."""
LOSS_SCHEMA = "int ignore_index, float label_smoothing, float softcap, float z_loss, str reduction"
"""The options of a loss in operator schemas; a softcap of 0 is none."""


def capped(logits: Tensor, softcap: float) -> Tensor:
    """Logits in float32 or float64, with the softcap applied."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return softcap * torch.tanh(logits / softcap) if softcap else logits


def rows_reference(
    logits: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, label_smoothing: float, softcap: float,
    z_loss: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Per row: the loss, its weight in a mean, the top, and the sum of exponentials. NaN for targets out of range."""
    values = capped(logits, softcap)
    is_kept, valid, own = _targets(values, target, weight, ignore_index)
    safe = target.long().where(valid, 0)
    top = values.amax(-1).clamp_min(torch.finfo(torch.float32).min)
    total = (values - top[..., None]).exp().sum(-1)
    far = top[..., None] - values + total.log()[..., None]
    loss = (1.0 - label_smoothing) * own * far.gather(-1, safe[..., None])[..., 0]
    if label_smoothing:
        loss = loss + label_smoothing / values.shape[-1] * (far if weight is None else far * weight).sum(-1)
    if z_loss:
        loss = loss + z_loss * (top + total.log()).square()
    invalid = torch.where(is_kept, float("nan"), 0.0).to(loss.dtype)
    return loss.where(valid, invalid), own.where(valid, 0.0), top.where(valid, 0.0), total.where(valid, 1.0)


def gradient_reference(
    upstream: Tensor, logits: Tensor, target: Tensor, weight: Tensor | None, statistics: Tensor, parts: Tensor,
    ignore_index: int, label_smoothing: float, softcap: float, z_loss: float, reduction: str,
) -> Tensor:  # fmt: skip
    """The gradient of the logits, from the statistics of `forward_reference`."""
    values = capped(logits, softcap)
    is_kept, valid, own = _targets(values, target, weight, ignore_index)
    columns = values.shape[-1]
    top, total = (statistic.view(target.shape) for statistic in statistics)
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
    invalid = torch.where(is_kept, float("nan"), 0.0).to(result.dtype)[..., None]
    gradient: Tensor = result.where(valid[..., None], invalid).to(logits.dtype)
    return gradient


def _targets(values: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int) -> tuple[Tensor, Tensor, Tensor]:
    is_kept = target != ignore_index
    valid = is_kept & (target >= 0) & (target < values.shape[-1])
    if weight is None:
        return is_kept, valid, torch.ones_like(target, dtype=values.dtype)
    return is_kept, valid, weight.to(values.dtype)[target.long().where(valid, 0)]


def forward_reference(
    logits: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, label_smoothing: float, softcap: float,
    z_loss: float, reduction: str, with_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The operator `cross_entropy` in plain torch."""
    settings = (ignore_index, label_smoothing, softcap, z_loss)
    losses, counted, top, total = rows_reference(logits, target, weight, *settings)
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
        upstream = torch.ones_like(loss)
        gradient = gradient_reference(
            upstream, logits, target, weight, statistics, parts, *settings, reduction
        ).contiguous()
    return loss, gradient, statistics, parts


def _forward_inplace_reference(
    logits: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, label_smoothing: float, softcap: float,
    z_loss: float, reduction: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    settings = (ignore_index, label_smoothing, softcap, z_loss, reduction)
    loss, gradient, statistics, _ = forward_reference(logits, target, weight, *settings, True)
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


def _fake_forward_inplace(
    logits: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, label_smoothing: float, softcap: float,
    z_loss: float, reduction: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    loss = _fake_loss(logits, target, reduction)
    return loss, loss.new_empty(2, target.numel())


def _forward_why_not(logits: Tensor, target: Tensor, weight: Tensor | None, *_: Any) -> str | None:
    return cannot_run(logits, target, weight)


def _backward_why_not(upstream: Tensor, logits: Tensor, target: Tensor, weight: Tensor | None, *_: Any) -> str | None:
    return cannot_run(upstream, logits, target, weight)


def may_overwrite() -> bool:
    """Whether a backward pass may overwrite saved tensors: the graph is not retained, and nothing traces it.

    Modes that only observe, such as fake tensors and estimates, do not count: they see what runs without them.
    """
    modes = torch._C._TorchDispatchModeKey
    return not (
        torch._C._autograd._get_current_graph_task_keep_graph()
        or torch._C._get_dispatch_mode(modes.PROXY) is not None
        or torch._C._get_dispatch_mode(modes.FUNCTIONAL) is not None
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.compiler.is_compiling()
    )


def scale_gradient(gradient: Tensor, factor: Tensor) -> Tensor:
    """A gradient of the forward pass times a scalar: in place unless it is needed again."""
    if not may_overwrite():
        return gradient * factor
    scale_gradient_(gradient, factor)
    return gradient


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, target, weight, *settings, with_gradient = inputs
    _, gradient, statistics, parts = output
    ctx.mark_non_differentiable(gradient, statistics, parts)
    ctx.set_materialize_grads(False)  # else torch would make zeros for the gradient of the gradient: 2 GB
    ctx.settings = settings
    ctx.with_gradient = with_gradient
    if with_gradient:
        ctx.save_for_backward(gradient)
    else:
        ctx.save_for_backward(logits, target, weight, statistics, parts)


def _autograd_backward(ctx: Any, upstream: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    options = (None,) * 8
    if upstream is None:
        return (None, *options)
    refuse_second_derivative("cross_entropy")
    if ctx.with_gradient:
        (gradient,) = ctx.saved_tensors
        return (scale_gradient(gradient, upstream), *options)
    logits, target, weight, statistics, parts = ctx.saved_tensors
    return (cross_entropy_backward(upstream, logits, target, weight, statistics, parts, *ctx.settings), *options)


cross_entropy_forward = Operator(
    f"cross_entropy(Tensor logits, Tensor target, Tensor? weight, {LOSS_SCHEMA}, bool with_gradient)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    backends={"nvidia": "losses.triton:cross_entropy_forward"},
    reference=forward_reference,
    fake=_fake_forward,
    why_not=_forward_why_not,
    setup_context=_setup_context,
    backward=_autograd_backward,
)
cross_entropy_forward_ = Operator(
    f"cross_entropy_(Tensor(a!) logits, Tensor target, Tensor? weight, {LOSS_SCHEMA}) -> (Tensor, Tensor)",
    backends={"nvidia": "losses.triton:cross_entropy_forward_"},
    reference=_forward_inplace_reference,
    fake=_fake_forward_inplace,
    why_not=_forward_why_not,
)
_BACKWARD_SCHEMA = f"Tensor target, Tensor? weight, Tensor statistics, Tensor parts, {LOSS_SCHEMA}"
cross_entropy_backward = Operator(
    f"cross_entropy_backward(Tensor upstream, Tensor logits, {_BACKWARD_SCHEMA}) -> Tensor",
    backends={"nvidia": "losses.triton:cross_entropy_backward"},
    reference=gradient_reference,
    fake=lambda upstream, logits, *_: logits.new_empty(logits.shape),
    why_not=_backward_why_not,
)
cross_entropy_backward_ = Operator(
    f"cross_entropy_backward_(Tensor upstream, Tensor(a!) logits, {_BACKWARD_SCHEMA}) -> ()",
    backends={"nvidia": "losses.triton:cross_entropy_backward_"},
    reference=lambda upstream, logits, *options: logits.copy_(gradient_reference(upstream, logits, *options)),
    fake=lambda *_: None,
    why_not=_backward_why_not,
)
scale_gradient_ = Operator(
    "scale_gradient_(Tensor(a!) gradient, Tensor factor) -> ()",
    backends={"nvidia": "losses.triton:scale_gradient_"},
    reference=lambda gradient, factor: gradient.mul_(factor),
    fake=lambda *_: None,
    why_not=cannot_run,
)

Reduction = Literal["mean", "sum", "none"]
_INTEGER_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def _check_loss(
    columns: int, shape: torch.Size, target: Tensor, weight: Tensor | None, reduction: str, label_smoothing: float,
    softcap: float | None,
) -> None:  # fmt: skip
    """Raises if the arguments do not match each other."""
    if reduction not in get_args(Reduction):
        raise UsageError(f"There is no reduction {reduction!r}. {did_you_mean(reduction, get_args(Reduction))}")
    if target.dtype not in _INTEGER_DTYPES:
        raise UsageError(
            f"Targets are indices of classes, and this is a tensor of {str(target.dtype).removeprefix('torch.')}."
            " torch.nn.functional.cross_entropy takes probabilities."
        )
    if target.shape != shape:
        raise UsageError(f"Targets need the shape {tuple(shape)}, one per row, and have {tuple(target.shape)}.")
    if weight is not None and tuple(weight.shape) != (columns,):
        raise UsageError(f"Class weights need the shape {(columns,)}, and have {tuple(weight.shape)}.")
    if not 0.0 <= label_smoothing <= 1.0:
        raise UsageError(f"label_smoothing needs to be between 0 and 1, and is {label_smoothing}.")
    if softcap is not None and not softcap > 0.0:
        raise UsageError(f"softcap needs to be above 0, or None, and is {softcap}.")


def cross_entropy_reference(
    logits: Tensor, target: Tensor, *, reduction: Reduction = "mean", ignore_index: int = -100,
    label_smoothing: float = 0.0, softcap: float | None = None, z_loss: float = 0.0, weight: Tensor | None = None,
    inplace: bool = False, return_lse: bool = False,
) -> Any:  # fmt: skip
    _check_loss(logits.shape[-1], logits.shape[:-1], target, weight, reduction, label_smoothing, softcap)
    values = capped(logits, softcap or 0.0).reshape(prod(logits.shape[:-1]), logits.shape[-1])
    label = target.reshape(-1).long()
    weight = None if weight is None else weight.to(values.dtype)
    loss = torch.nn.functional.cross_entropy(
        values, label, weight=weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
    )
    is_kept = label != ignore_index
    if z_loss:
        # masked before the logsumexp: an ignored row of NaN must have no gradient
        penalty = z_loss * values.masked_fill(~is_kept[:, None], 0.0).logsumexp(-1).square().where(is_kept, 0.0)
        if reduction == "mean":
            weights = (
                is_kept.to(values.dtype) if weight is None else weight[label.where(is_kept, 0)].where(is_kept, 0.0)
            )
            penalty = penalty.sum() / weights.sum()
        loss = loss + (penalty.sum() if reduction == "sum" else penalty)
    if reduction == "none":
        loss = loss.view(target.shape)
    if not return_lse:
        return loss
    return loss, values.detach().logsumexp(-1).where(is_kept, 0.0).view(target.shape)


def _cross_entropy_why_not(
    logits: Tensor, target: Tensor, *, reduction: Reduction = "mean", ignore_index: int = -100,
    label_smoothing: float = 0.0, softcap: float | None = None, z_loss: float = 0.0, weight: Tensor | None = None,
    inplace: bool = False, return_lse: bool = False,
) -> str | None:  # fmt: skip
    return cannot_run(logits, target, weight)


@fused(reference=cross_entropy_reference, why_not=_cross_entropy_why_not)
def cross_entropy(
    logits: Tensor, target: Tensor, *, reduction: Reduction = "mean", ignore_index: int = -100,
    label_smoothing: float = 0.0, softcap: float | None = None, z_loss: float = 0.0, weight: Tensor | None = None,
    inplace: bool = False, return_lse: bool = False,
) -> Any:  # fmt: skip
    """The cross-entropy of logits (..., classes) and the indices of the target classes (...), in float32.

    As torch.nn.functional.cross_entropy, but with the classes in the last dimension, and in float32 whatever the dtype
    of the logits. Logits are copied if their last stride is not 1, or if more than two strides lead from row to row
    (`logits[:, :-1]` is not copied). A target out of range makes its row NaN on a GPU, where torch aborts the process,
    and raises on a CPU. Ignored rows are not read.

    A mean or a sum has its gradient written in the forward pass: each logit is read once, and its gradient written once
    and saved. The backward pass then moves no bytes if backward() is called on the loss itself. With "none", in float16
    and in compiled code the backward pass writes the gradient and reads the logits once more.

    Args:
        reduction: "mean" divides by the weights of the targets that are not ignored, and is NaN if all are.
        ignore_index: Rows with this target have no loss and a gradient of 0.
        label_smoothing: The share of a target that goes to all classes equally.
        softcap: Replaces the logits by softcap * tanh(logits / softcap).
        z_loss: Adds z_loss * logsumexp(logits)**2 to the loss of each row, without class weights.
        weight: (classes), a weight for each class, without a gradient.
        inplace: Overwrites the logits with the gradient: no further memory is allocated. They must be the result of an
            operation and not a leaf. They stay as they are if no gradient is needed, and in compiled code.
        return_lse: Returns (loss, logsumexp of each row), the latter 0 for ignored rows and not differentiable.

    >>> import torch, nearpeak.kernels as kernels
    >>> kernels.cross_entropy(torch.zeros(2, 4), torch.tensor([1, -100])).item() == torch.tensor(4.0).log().item()
    True
    """
    _check_loss(logits.shape[-1], logits.shape[:-1], target, weight, reduction, label_smoothing, softcap)
    settings = (ignore_index, float(label_smoothing), float(softcap or 0.0), float(z_loss), reduction)
    needed = torch.is_grad_enabled() and logits.requires_grad
    traced = torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None
    ahead = needed and not traced and reduction != "none" and logits.dtype != torch.float16
    if inplace and needed and not traced:
        _check_inplace(logits)
        loss, statistics = _InplaceCrossEntropy.apply(logits, target, weight, settings, ahead)  # type: ignore[no-untyped-call]
    else:
        loss, _, statistics, _ = cross_entropy_forward(logits, target, weight, *settings, ahead)
    if not return_lse:
        return loss
    return loss, (statistics[0] + statistics[1].log()).view(target.shape)


def _check_inplace(logits: Tensor) -> None:
    if logits.is_leaf:
        raise UsageError("inplace=True would overwrite a leaf with its own gradient. Leave it out.")
    if any(stride == 0 and size > 1 for size, stride in zip(logits.shape, logits.stride(), strict=True)):
        raise UsageError("inplace=True cannot overwrite expanded logits, which share memory. Leave it out.")


class _InplaceCrossEntropy(torch.autograd.Function):
    """The loss, with the logits overwritten by their gradient in the forward or in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, weight: Tensor | None, settings: tuple[Any, ...], ahead: bool
    ) -> tuple[Tensor, Tensor]:
        if ahead:
            loss, statistics = cross_entropy_forward_(logits, target, weight, *settings)
            torch.autograd.graph.increment_version(logits)  # a backward pass that saved them raises
            ctx.save_for_backward(logits)
        else:
            loss, _, statistics, parts = cross_entropy_forward(logits, target, weight, *settings, False)
            ctx.save_for_backward(logits, target, weight, statistics, parts)
        ctx.mark_non_differentiable(statistics)
        ctx.set_materialize_grads(False)
        ctx.settings, ctx.ahead = settings, ahead
        return loss, statistics

    @staticmethod
    def backward(ctx: Any, upstream: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if upstream is None:
            return (None,) * 5
        refuse_second_derivative("cross_entropy")
        if ctx.ahead:
            gradient = scale_gradient(ctx.saved_tensors[0].detach(), upstream)
        else:
            logits, *saved = ctx.saved_tensors
            gradient = logits.detach()
            if may_overwrite():
                cross_entropy_backward_(upstream, gradient, *saved, *ctx.settings)
                torch.autograd.graph.increment_version(logits)
            else:
                gradient = cross_entropy_backward(upstream, gradient, *saved, *ctx.settings)
        return gradient, None, None, None, None


class CrossEntropyLoss(torch.nn.Module):
    """`cross_entropy` as a module with the same options."""

    weight: Tensor | None

    def __init__(
        self, weight: Tensor | None = None, *, reduction: Reduction = "mean", ignore_index: int = -100,
        label_smoothing: float = 0.0, softcap: float | None = None, z_loss: float = 0.0, inplace: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.register_buffer("weight", weight)
        self.reduction: Reduction = reduction
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing
        self.softcap = softcap
        self.z_loss = z_loss
        self.inplace = inplace

    def forward(self, logits: Tensor, target: Tensor) -> Any:
        return cross_entropy(
            logits, target, reduction=self.reduction, ignore_index=self.ignore_index, softcap=self.softcap,
            label_smoothing=self.label_smoothing, z_loss=self.z_loss, weight=self.weight, inplace=self.inplace,
        )  # fmt: skip


_WANTED_SCHEMA = "bool for_hidden, bool for_weight, bool for_bias"
_CHUNK_SCHEMA = "int chunk_tokens, bool? float32"


def _linear_gradients_reference(
    grad_logits: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, needed: tuple[bool, bool, bool]
) -> tuple[Tensor, Tensor, Tensor]:
    empty = hidden.new_empty(0)
    grad_logits = grad_logits.to(hidden.dtype)
    rows = grad_logits.reshape(-1, grad_logits.shape[-1])
    states = hidden.reshape(-1, hidden.shape[-1])
    return (
        (grad_logits @ weight).contiguous() if needed[0] else empty,
        (rows.t() @ states).contiguous() if needed[1] else empty.to(weight.dtype),
        rows.sum(0) if needed[2] else empty.to(weight.dtype if bias is None else bias.dtype),
    )


def _linear_forward_reference(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, class_weight: Tensor | None,
    ignore_index: int, label_smoothing: float, softcap: float, z_loss: float, reduction: str, chunk_tokens: int,
    float32: bool | None, with_logprobs: bool, with_entropy: bool, *needed: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    logits = torch.nn.functional.linear(hidden, weight, bias)
    settings = (ignore_index, label_smoothing, softcap, z_loss, reduction)
    loss, grad_logits, statistics, parts = forward_reference(logits, target, class_weight, *settings, any(needed))
    empty = statistics.new_empty(0)
    gradients = [empty.to(hidden.dtype), empty.to(weight.dtype), empty.to(weight.dtype)]
    if any(needed):
        gradients = list(_linear_gradients_reference(grad_logits, hidden, weight, bias, needed))  # type: ignore[arg-type]
    logprobs, entropies = logprobs_reference(logits, target, ignore_index, softcap)
    return (
        loss, *gradients, statistics.new_ones(()), logprobs if with_logprobs else empty,
        entropies if with_entropy else empty, statistics, parts,
    )  # fmt: skip


def logprobs_reference(logits: Tensor, target: Tensor, ignore_index: int, softcap: float) -> tuple[Tensor, Tensor]:
    """The log-probabilities of the targets, and the entropies of the rows; 0 for ignored rows."""
    values = logits if logits.dtype == torch.float64 else logits.float()
    logs = torch.log_softmax(softcap * torch.tanh(values / softcap) if softcap else values, -1)
    is_kept = target != ignore_index
    logprob = logs.gather(-1, target.long().where(is_kept, 0)[..., None])[..., 0]
    return logprob.where(is_kept, 0.0), torch.special.entr(logs.exp()).sum(-1).where(is_kept, 0.0)


def _linear_backward_reference(
    upstream: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, class_weight: Tensor | None,
    statistics: Tensor, parts: Tensor, ignore_index: int, label_smoothing: float, softcap: float, z_loss: float,
    reduction: str, chunk_tokens: int, float32: bool | None, *needed: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    logits = torch.nn.functional.linear(hidden, weight, bias)
    settings = (ignore_index, label_smoothing, softcap, z_loss, reduction)
    grad_logits = gradient_reference(upstream, logits, target, class_weight, statistics, parts, *settings)
    return _linear_gradients_reference(grad_logits, hidden, weight, bias, needed)  # type: ignore[arg-type]


def _fake_linear_gradients(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, for_hidden: bool, for_weight: bool, for_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        hidden.new_empty(hidden.shape if for_hidden else (0,)),
        weight.new_empty(weight.shape if for_weight else (0,)),
        (weight if bias is None else bias).new_empty(weight.shape[0] if for_bias else 0),
    )


def _fake_linear_forward(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, class_weight: Tensor | None,
    ignore_index: int, label_smoothing: float, softcap: float, z_loss: float, reduction: str, chunk_tokens: int,
    float32: bool | None, with_logprobs: bool, with_entropy: bool, *needed: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    loss = hidden.new_empty(target.shape if reduction == "none" else (), dtype=dtype)
    by_token = [loss.new_empty(target.shape if is_needed else (0,)) for is_needed in (with_logprobs, with_entropy)]
    statistics = loss.new_empty(2, target.numel())
    parts = loss.new_empty(PARTS if reduction == "mean" else 0)
    return (
        loss,
        *_fake_linear_gradients(hidden, weight, bias, *needed),
        loss.new_empty(()),
        *by_token,
        statistics,
        parts,
    )


def _fake_linear_backward(
    upstream: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, class_weight: Tensor | None,
    statistics: Tensor, parts: Tensor, *settings: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return _fake_linear_gradients(hidden, weight, bias, *settings[-3:])


def _linear_setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
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


def _linear_autograd_backward(ctx: Any, upstream: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    options = (None,) * 14
    if upstream is None:
        return (None, None, None, *options)
    refuse_second_derivative("linear_cross_entropy")
    if ctx.ahead:
        *gradients, factor = ctx.saved_tensors
        scale = upstream * factor if ctx.late else upstream
        needed = ctx.wanted
        gradients = [
            scale_gradient(tensor, scale) if is_needed else None
            for tensor, is_needed in zip(gradients, needed, strict=True)
        ]
    else:
        needed = tuple(ctx.needs_input_grad[:3])
        gradients = [
            tensor if is_needed else None
            for tensor, is_needed in zip(
                linear_cross_entropy_backward(upstream, *ctx.saved_tensors, *ctx.settings, *needed), needed, strict=True
            )
        ]
    return (*gradients, *options)


def _linear_forward_why_not(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *others: Any
) -> str | None:
    return cannot_run(hidden, weight, bias, target, others[0])


linear_cross_entropy_forward = Operator(
    "linear_cross_entropy(Tensor hidden, Tensor weight, Tensor? bias, Tensor target, Tensor? class_weight,"
    f" {LOSS_SCHEMA}, {_CHUNK_SCHEMA}, bool with_logprobs, bool with_entropy, {_WANTED_SCHEMA})"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    backends={"nvidia": "losses.triton:linear_cross_entropy_forward"},
    reference=_linear_forward_reference,
    fake=_fake_linear_forward,
    why_not=_linear_forward_why_not,
    setup_context=_linear_setup_context,
    backward=_linear_autograd_backward,
)
linear_cross_entropy_backward = Operator(
    "linear_cross_entropy_backward(Tensor upstream, Tensor hidden, Tensor weight, Tensor? bias, Tensor target,"
    f" Tensor? class_weight, Tensor statistics, Tensor parts, {LOSS_SCHEMA}, {_CHUNK_SCHEMA}, {_WANTED_SCHEMA})"
    " -> (Tensor, Tensor, Tensor)",
    backends={"nvidia": "losses.triton:linear_cross_entropy_backward"},
    reference=_linear_backward_reference,
    fake=_fake_linear_backward,
    why_not=lambda upstream, *others: _linear_forward_why_not(*others),
)


def _check_linear(hidden: Tensor, weight: Tensor, bias: Tensor | None, chunk_tokens: int | None) -> None:
    if weight.dim() != 2 or not hidden.dim() or hidden.shape[-1] != weight.shape[1]:
        raise UsageError(
            f"The weight needs the shape [classes, {hidden.shape[-1] if hidden.dim() else 'features'}] for hidden"
            f" states of {tuple(hidden.shape)}, and has {tuple(weight.shape)}."
        )
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise UsageError(f"The bias needs the shape {(weight.shape[0],)}, and has {tuple(bias.shape)}.")
    if chunk_tokens is not None and chunk_tokens < 1:
        raise UsageError(f"chunk_tokens needs to be at least 1, or None, and is {chunk_tokens}.")


def _as_autocast(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """As torch's linear takes them: in the dtype of autocast, where that is on."""
    dtype = autocast_dtype(next(tensor for tensor in tensors if tensor is not None).device)
    if dtype is None:
        return tensors
    return tuple(tensor if tensor is None or tensor.dtype == torch.float64 else tensor.to(dtype) for tensor in tensors)


def linear_cross_entropy_reference(
    hidden: Tensor, weight: Tensor, target: Tensor, *, bias: Tensor | None = None, reduction: Reduction = "mean",
    ignore_index: int = -100, label_smoothing: float = 0.0, softcap: float | None = None, z_loss: float = 0.0,
    class_weight: Tensor | None = None, chunk_tokens: int | None = None, accumulate_float32: bool | None = None,
    return_logprobs: bool = False, return_entropy: bool = False,
) -> Any:  # fmt: skip
    _check_linear(hidden, weight, bias, chunk_tokens)
    logits = torch.nn.functional.linear(hidden, weight, bias)
    loss = cross_entropy_reference(
        logits, target, reduction=reduction, ignore_index=ignore_index, label_smoothing=label_smoothing,
        softcap=softcap, z_loss=z_loss, weight=class_weight,
    )  # fmt: skip
    logprobs, entropies = logprobs_reference(logits.detach(), target, ignore_index, softcap or 0.0)
    statistics = [
        tensor for tensor, is_requested in ((logprobs, return_logprobs), (entropies, return_entropy)) if is_requested
    ]
    return (loss, *statistics) if statistics else loss


def _linear_cross_entropy_why_not(
    hidden: Tensor, weight: Tensor, target: Tensor, *, bias: Tensor | None = None, reduction: Reduction = "mean",
    ignore_index: int = -100, label_smoothing: float = 0.0, softcap: float | None = None, z_loss: float = 0.0,
    class_weight: Tensor | None = None, chunk_tokens: int | None = None, accumulate_float32: bool | None = None,
    return_logprobs: bool = False, return_entropy: bool = False,
) -> str | None:  # fmt: skip
    if (
        autocast_dtype(hidden.device) is None
        and len({tensor.dtype for tensor in (hidden, weight, bias) if tensor is not None}) > 1
    ):
        return "hidden states, weight and bias need one dtype, as in torch's linear"
    return cannot_run(hidden, weight, bias, target, class_weight)


@fused(reference=linear_cross_entropy_reference, why_not=_linear_cross_entropy_why_not, replayable=False)
def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, target: Tensor, *, bias: Tensor | None = None, reduction: Reduction = "mean",
    ignore_index: int = -100, label_smoothing: float = 0.0, softcap: float | None = None, z_loss: float = 0.0,
    class_weight: Tensor | None = None, chunk_tokens: int | None = None, accumulate_float32: bool | None = None,
    return_logprobs: bool = False, return_entropy: bool = False,
) -> Any:  # fmt: skip
    """`cross_entropy(linear(hidden, weight, bias), target)` in float32, with the logits of a few tokens at a time.

    hidden is (..., features), weight (classes, features), target (...). The logits are rounded to the dtype of hidden,
    as by linear. For the options see `cross_entropy`.

    A mean or a sum has all its gradients computed in the forward pass, by three GEMMs for each chunk of tokens. They
    are saved, and the backward pass multiplies them by a scalar, at no cost if that is 1. With "none" the factor of
    each token is only known in the backward pass: it computes the logits again, which makes four GEMMs of three.

    Memory beside inputs and gradients is that of the logits of one chunk. The gradient of the weight is the sum over
    chunks. Each addition in bfloat16 rounds it by up to 1/256 of itself, so this is done for up to 8 chunks; for more
    it is accumulated in float32, which takes 4 more bytes per weight and rounds the share of every chunk once.

    Args:
        class_weight: (classes), a weight for each class, as `weight` of `cross_entropy`.
        chunk_tokens: The number of tokens in a chunk. By default as few as take hardly more than the least time by a
            model of the cost, with logits of up to 1 GiB; at least 128.
        accumulate_float32: Accumulate the gradient of the weight in float32 whatever the number of chunks.
        return_logprobs: Also returns the log-probability of each target. It is not differentiable; minus the loss with
            reduction="none" is the same and has a gradient.
        return_entropy: Also returns the entropy of each token's distribution, which is not differentiable. Both are 0
            for ignored tokens.
    """
    _check_linear(hidden, weight, bias, chunk_tokens)
    _check_loss(weight.shape[0], hidden.shape[:-1], target, class_weight, reduction, label_smoothing, softcap)
    hidden, weight, bias = _as_autocast(hidden, weight, bias)  # type: ignore[assignment]
    ahead = torch.is_grad_enabled() and reduction != "none"
    needed = [ahead and tensor is not None and tensor.requires_grad for tensor in (hidden, weight, bias)]
    loss, *_, logprobs, entropies, _, _ = linear_cross_entropy_forward(
        hidden, weight, bias, target, class_weight, ignore_index, float(label_smoothing), float(softcap or 0.0),
        float(z_loss), reduction, chunk_tokens or 0, accumulate_float32, return_logprobs, return_entropy, *needed,
    )  # fmt: skip
    statistics = [
        tensor for tensor, is_requested in ((logprobs, return_logprobs), (entropies, return_entropy)) if is_requested
    ]
    return (loss, *statistics) if statistics else loss
