"""`cross_entropy`: torch's, with softcap and z-loss, in one pass over the logits; `linear_cross_entropy`: the last layer of a language model and its loss without the logits in memory; and their torch operators.

A scalar loss has its gradient written in the forward pass, while the logits are at hand, and multiplied by the upstream gradient
in the backward pass, which costs nothing where that is 1. Otherwise the backward pass reads the logits again: for a loss per row,
whose upstream gradient has one number per row; in float16, where a gradient divided by the number of rows underflows before loss
scaling could save it; and in compiled code, which would copy.
"""

from __future__ import annotations

from math import prod
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from nearpeak.errors import UsageError, did_you_mean
from nearpeak.kernels._runtime.operator import Operator, refuse_second_derivative
from nearpeak.kernels._runtime.policy import cannot_run, fused

PARTS = 128
"""In so many parts the kernels count targets."""
LOSS_SCHEMA = "int ignore_index, float label_smoothing, float softcap, float z_loss, str reduction"
"""How schemas have what a loss is beside its tensors; a softcap of 0 is none."""


def capped(logits: Tensor, softcap: float) -> Tensor:
    """Logits in float32 or float64, below the softcap."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return softcap * torch.tanh(logits / softcap) if softcap else logits


def rows_reference(
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


def gradient_reference(
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


def forward_reference(
    logits: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, label_smoothing: float, softcap: float,
    z_loss: float, reduction: str, with_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """What the operator `cross_entropy` gives, in plain torch."""
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
        one = torch.ones_like(loss)
        gradient = gradient_reference(one, logits, target, weight, statistics, parts, *settings, reduction).contiguous()
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


def scale_gradient(gradient: Tensor, factor: Tensor) -> Tensor:
    """A gradient of the forward pass times one number: in place where it will not be needed again."""
    if not may_overwrite():
        return gradient * factor
    scale_gradient_(gradient, factor)
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


def _autograd_backward(ctx: Any, upstream: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    rest = (None,) * 8
    if upstream is None:
        return (None, *rest)
    refuse_second_derivative("cross_entropy")
    if ctx.with_gradient:
        (gradient,) = ctx.saved_tensors
        return (scale_gradient(gradient, upstream), *rest)
    logits, target, weight, statistics, parts = ctx.saved_tensors
    return (cross_entropy_backward(upstream, logits, target, weight, statistics, parts, *ctx.settings), *rest)


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
    reference=lambda upstream, logits, *rest: logits.copy_(gradient_reference(upstream, logits, *rest)),
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
    """Raises what a user has to know of arguments that have no meaning together."""
    if reduction not in get_args(Reduction):
        raise UsageError(f"There is no reduction {reduction!r}. {did_you_mean(reduction, get_args(Reduction))}")
    if target.dtype not in _INTEGER_DTYPES:
        raise UsageError(
            f"Targets are the numbers of classes, and this is a tensor of {str(target.dtype).removeprefix('torch.')}."
            " torch.nn.functional.cross_entropy takes probabilities."
        )
    if target.shape != shape:
        raise UsageError(f"Targets need the shape {tuple(shape)}, one for each row, and have {tuple(target.shape)}.")
    if weight is not None and tuple(weight.shape) != (columns,):
        raise UsageError(f"Weights of classes need the shape {(columns,)}, and have {tuple(weight.shape)}.")
    if not 0.0 <= label_smoothing <= 1.0:
        raise UsageError(f"label_smoothing is between 0 and 1, and this is {label_smoothing}.")
    if softcap is not None and not softcap > 0.0:
        raise UsageError(f"A softcap is above 0, or None, and this is {softcap}.")


def cross_entropy_reference(
    logits: Tensor, target: Tensor, *, reduction: Reduction = "mean", ignore_index: int = -100,
    label_smoothing: float = 0.0, softcap: float | None = None, z_loss: float = 0.0, weight: Tensor | None = None,
    inplace: bool = False, return_lse: bool = False,
) -> Any:  # fmt: skip
    _check_loss(logits.shape[-1], logits.shape[:-1], target, weight, reduction, label_smoothing, softcap)
    values = capped(logits, softcap or 0.0).reshape(prod(logits.shape[:-1]), logits.shape[-1])
    wanted = target.reshape(-1).long()
    weight = None if weight is None else weight.to(values.dtype)
    loss = torch.nn.functional.cross_entropy(
        values, wanted, weight=weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
    )
    kept = wanted != ignore_index
    if z_loss:
        # taken where the loss is, so that a row that is ignored and is not a number gives no gradient
        more = z_loss * values.masked_fill(~kept[:, None], 0.0).logsumexp(-1).square().where(kept, 0.0)
        if reduction == "mean":
            counted = kept.to(values.dtype) if weight is None else weight[wanted.where(kept, 0)].where(kept, 0.0)
            more = more.sum() / counted.sum()
        loss = loss + (more.sum() if reduction == "sum" else more)
    if reduction == "none":
        loss = loss.view(target.shape)
    if not return_lse:
        return loss
    return loss, values.detach().logsumexp(-1).where(kept, 0.0).view(target.shape)


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
    """The cross-entropy of logits [..., classes] and the numbers of the classes that were wanted [...], in float32.

    As torch.nn.functional.cross_entropy, but for the classes, which are in the last dimension. Arithmetic is in float32
    whatever the logits are. Rows may lie anywhere; logits are copied where their last stride is not 1 or more than two
    strides lead from row to row (`logits[:, :-1]` is not copied). A target out of range makes its row NaN on a GPU,
    where torch ends the process, and is an error on a CPU. Of ignored rows nothing is read.

    A mean or a sum has its gradient written in the forward pass: each logit is read once and its gradient written once,
    and kept; a backward pass of its own moves no bytes where the loss itself is what backward() is called on. With
    "none", in float16 and in compiled code the backward pass writes it and reads the logits once more.

    Args:
        reduction: "mean" divides by the weights of the targets that are kept, and is NaN where all are ignored.
        ignore_index: Rows with this target have no loss and a gradient of 0.
        label_smoothing: The share of a target that goes to all classes alike.
        softcap: Takes softcap * tanh(logits / softcap) for the logits.
        z_loss: Adds z_loss * logsumexp(logits)**2 to the loss of each row; class weights do not weigh it.
        weight: A weight for each class, which has no gradient.
        inplace: Writes the gradient where the logits are, which are lost: no further memory is taken. They must be the
            result of something and not a leaf. Without a gradient to compute, and in compiled code, they stay as
            they are.
        return_lse: Gives (loss, logsumexp of each row) instead, the latter 0 for ignored rows and not differentiable.

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
        raise UsageError("inplace=True would overwrite a leaf, whose gradient would then be itself. Leave it out.")
    if any(stride == 0 and size > 1 for size, stride in zip(logits.shape, logits.stride(), strict=True)):
        raise UsageError("inplace=True cannot overwrite expanded logits, several of which are one. Leave it out.")


class _InplaceCrossEntropy(torch.autograd.Function):
    """The loss with the gradient where the logits are: from the forward pass on, or from the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, weight: Tensor | None, settings: tuple[Any, ...], ahead: bool
    ) -> tuple[Tensor, Tensor]:
        if ahead:
            loss, statistics = cross_entropy_forward_(logits, target, weight, *settings)
            torch.autograd.graph.increment_version(logits)  # whoever kept them for a backward pass is told
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
            logits, *rest = ctx.saved_tensors
            gradient = logits.detach()
            if may_overwrite():
                cross_entropy_backward_(upstream, gradient, *rest, *ctx.settings)
                torch.autograd.graph.increment_version(logits)
            else:
                gradient = cross_entropy_backward(upstream, gradient, *rest, *ctx.settings)
        return gradient, None, None, None, None


class CrossEntropyLoss(torch.nn.Module):
    """`cross_entropy` as a module, with its arguments."""

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


def _linear_forward_reference(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, class_weight: Tensor | None,
    ignore_index: int, label_smoothing: float, softcap: float, z_loss: float, reduction: str, chunk_tokens: int,
    float32: bool | None, with_logprobs: bool, with_entropy: bool, *wanted: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    logits = torch.nn.functional.linear(hidden, weight, bias)
    settings = (ignore_index, label_smoothing, softcap, z_loss, reduction)
    loss, by_logits, statistics, parts = forward_reference(logits, target, class_weight, *settings, any(wanted))
    nothing = statistics.new_empty(0)
    gradients = [nothing.to(hidden.dtype), nothing.to(weight.dtype), nothing.to(weight.dtype)]
    if any(wanted):
        gradients = list(_linear_gradients_reference(by_logits, hidden, weight, bias, wanted))  # type: ignore[arg-type]
    # minus the loss by rows of nothing but the logits, and the entropy
    logprobs, entropies = logprobs_reference(logits, target, ignore_index, softcap)
    return (
        loss, *gradients, statistics.new_ones(()), logprobs if with_logprobs else nothing,
        entropies if with_entropy else nothing, statistics, parts,
    )  # fmt: skip


def logprobs_reference(logits: Tensor, target: Tensor, ignore_index: int, softcap: float) -> tuple[Tensor, Tensor]:
    """The logarithms of the probabilities of the targets, and the entropies of the rows; 0 for ignored ones."""
    values = logits if logits.dtype == torch.float64 else logits.float()
    logs = torch.log_softmax(softcap * torch.tanh(values / softcap) if softcap else values, -1)
    kept = target != ignore_index
    wanted = logs.gather(-1, target.long().where(kept, 0)[..., None])[..., 0]
    return wanted.where(kept, 0.0), torch.special.entr(logs.exp()).sum(-1).where(kept, 0.0)


def _linear_backward_reference(
    upstream: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, class_weight: Tensor | None,
    statistics: Tensor, parts: Tensor, ignore_index: int, label_smoothing: float, softcap: float, z_loss: float,
    reduction: str, chunk_tokens: int, float32: bool | None, *wanted: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    logits = torch.nn.functional.linear(hidden, weight, bias)
    settings = (ignore_index, label_smoothing, softcap, z_loss, reduction)
    by_logits = gradient_reference(upstream, logits, target, class_weight, statistics, parts, *settings)
    return _linear_gradients_reference(by_logits, hidden, weight, bias, wanted)  # type: ignore[arg-type]


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
    float32: bool | None, with_logprobs: bool, with_entropy: bool, *wanted: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    loss = hidden.new_empty(target.shape if reduction == "none" else (), dtype=dtype)
    by_token = [loss.new_empty(target.shape if asked else (0,)) for asked in (with_logprobs, with_entropy)]
    statistics = loss.new_empty(2, target.numel())
    parts = loss.new_empty(PARTS if reduction == "mean" else 0)
    return (
        loss,
        *_fake_linear_gradients(hidden, weight, bias, *wanted),
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
    rest = (None,) * 14
    if upstream is None:
        return (None, None, None, *rest)
    refuse_second_derivative("linear_cross_entropy")
    if ctx.ahead:
        *gradients, factor = ctx.saved_tensors
        by = upstream * factor if ctx.late else upstream
        wanted = ctx.wanted
        gradients = [scale_gradient(one, by) if asked else None for one, asked in zip(gradients, wanted, strict=True)]
    else:
        wanted = tuple(ctx.needs_input_grad[:3])
        gradients = [
            one if asked else None
            for one, asked in zip(
                linear_cross_entropy_backward(upstream, *ctx.saved_tensors, *ctx.settings, *wanted), wanted, strict=True
            )
        ]
    return (*gradients, *rest)


def _linear_forward_why_not(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *rest: Any
) -> str | None:
    return cannot_run(hidden, weight, bias, target, rest[0])


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
    why_not=lambda upstream, *rest: _linear_forward_why_not(*rest),
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
        raise UsageError(f"chunk_tokens is at least 1, or None, and this is {chunk_tokens}.")


def _as_autocast(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """As torch's linear takes them: in the dtype of autocast, where that is on."""
    device = next(one for one in tensors if one is not None).device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(one if one is None or one.dtype == torch.float64 else one.to(dtype) for one in tensors)


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
    more = [one for one, asked in ((logprobs, return_logprobs), (entropies, return_entropy)) if asked]
    return (loss, *more) if more else loss


def _linear_cross_entropy_why_not(
    hidden: Tensor, weight: Tensor, target: Tensor, *, bias: Tensor | None = None, reduction: Reduction = "mean",
    ignore_index: int = -100, label_smoothing: float = 0.0, softcap: float | None = None, z_loss: float = 0.0,
    class_weight: Tensor | None = None, chunk_tokens: int | None = None, accumulate_float32: bool | None = None,
    return_logprobs: bool = False, return_entropy: bool = False,
) -> str | None:  # fmt: skip
    device = hidden.device.type
    if (
        not torch.is_autocast_enabled(device)
        and len({one.dtype for one in (hidden, weight, bias) if one is not None}) > 1
    ):
        return "hidden states, weight and bias have one dtype, as torch's linear needs it"
    return cannot_run(hidden, weight, bias, target, class_weight)


@fused(reference=linear_cross_entropy_reference, why_not=_linear_cross_entropy_why_not, replayable=False)
def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, target: Tensor, *, bias: Tensor | None = None, reduction: Reduction = "mean",
    ignore_index: int = -100, label_smoothing: float = 0.0, softcap: float | None = None, z_loss: float = 0.0,
    class_weight: Tensor | None = None, chunk_tokens: int | None = None, accumulate_float32: bool | None = None,
    return_logprobs: bool = False, return_entropy: bool = False,
) -> Any:  # fmt: skip
    """`cross_entropy(linear(hidden, weight, bias), target)` in float32, with the logits of few tokens at a time.

    hidden is [..., features], weight [classes, features], target [...]. The logits are rounded to the dtype of hidden,
    as linear rounds them. For options see `cross_entropy`.

    A mean or a sum has all its gradients computed in the forward pass, by three matrix products for each chunk of
    tokens; they are kept, and the backward pass multiplies them by one number, at no cost where that is 1. For "none"
    it is known only in the backward pass what multiplies each token: the logits are computed again there, which makes
    four products of three.

    Memory beside inputs and gradients is the logits of one chunk. The gradient of the weight is the sum over chunks.
    Each addition in bfloat16 rounds it by up to 1/256 of itself, so that is done for up to 4 chunks; for more it is
    added up in float32, which takes 4 bytes more for each weight, and every chunk's share is rounded once.

    Args:
        class_weight: A weight for each class, as `weight` of `cross_entropy`.
        chunk_tokens: How many tokens a chunk has; by default what makes logits of up to 512 MiB, and 128 at least.
        accumulate_float32: Whether the gradient of the weight is added up in float32 whatever the number of chunks.
        return_logprobs: Gives also the logarithm of the probability of each target. It is not differentiable; minus
            the loss with reduction="none" is the same and has a gradient.
        return_entropy: Gives also the entropy of each token's distribution, which is not differentiable. Both are 0
            for ignored tokens.
    """
    _check_linear(hidden, weight, bias, chunk_tokens)
    _check_loss(weight.shape[0], hidden.shape[:-1], target, class_weight, reduction, label_smoothing, softcap)
    hidden, weight, bias = _as_autocast(hidden, weight, bias)  # type: ignore[assignment]
    ahead = torch.is_grad_enabled() and reduction != "none"
    wanted = [ahead and one is not None and one.requires_grad for one in (hidden, weight, bias)]
    loss, *_, logprobs, entropies, _, _ = linear_cross_entropy_forward(
        hidden, weight, bias, target, class_weight, ignore_index, float(label_smoothing), float(softcap or 0.0),
        float(z_loss), reduction, chunk_tokens or 0, accumulate_float32, return_logprobs, return_entropy, *wanted,
    )  # fmt: skip
    more = [one for one, asked in ((logprobs, return_logprobs), (entropies, return_entropy)) if asked]
    return (loss, *more) if more else loss
