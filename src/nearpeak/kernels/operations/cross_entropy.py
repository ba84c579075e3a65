"""`cross_entropy`: torch's, with softcap and z-loss, in one pass over the logits."""

from __future__ import annotations

from math import prod
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from nearpeak.errors import UsageError, did_you_mean
from nearpeak.kernels.operations import cross_entropy_operators as operators
from nearpeak.kernels.policy import cannot_run, fused

Reduction = Literal["mean", "sum", "none"]
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def check(
    columns: int, shape: torch.Size, target: Tensor, weight: Tensor | None, reduction: str, label_smoothing: float,
    softcap: float | None,
) -> None:  # fmt: skip
    """Raises what a user has to know of arguments that have no meaning together."""
    if reduction not in get_args(Reduction):
        raise UsageError(f"There is no reduction {reduction!r}. {did_you_mean(reduction, get_args(Reduction))}")
    if target.dtype not in _INTEGERS:
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


def reference(
    logits: Tensor, target: Tensor, *, reduction: Reduction = "mean", ignore_index: int = -100,
    label_smoothing: float = 0.0, softcap: float | None = None, z_loss: float = 0.0, weight: Tensor | None = None,
    inplace: bool = False, return_lse: bool = False,
) -> Any:  # fmt: skip
    check(logits.shape[-1], logits.shape[:-1], target, weight, reduction, label_smoothing, softcap)
    values = operators.capped(logits, softcap or 0.0).reshape(prod(logits.shape[:-1]), logits.shape[-1])
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


def _why_not(
    logits: Tensor, target: Tensor, *, reduction: Reduction = "mean", ignore_index: int = -100,
    label_smoothing: float = 0.0, softcap: float | None = None, z_loss: float = 0.0, weight: Tensor | None = None,
    inplace: bool = False, return_lse: bool = False,
) -> str | None:  # fmt: skip
    return cannot_run(logits, target, weight)


@fused(reference=reference, why_not=_why_not)
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
    check(logits.shape[-1], logits.shape[:-1], target, weight, reduction, label_smoothing, softcap)
    settings = (ignore_index, float(label_smoothing), float(softcap or 0.0), float(z_loss), reduction)
    needed = torch.is_grad_enabled() and logits.requires_grad
    traced = torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None
    ahead = needed and not traced and reduction != "none" and logits.dtype != torch.float16
    if inplace and needed and not traced:
        _check_overwritten(logits)
        loss, statistics = _InPlace.apply(logits, target, weight, settings, ahead)  # type: ignore[no-untyped-call]
    else:
        loss, _, statistics, _ = operators.forward(logits, target, weight, *settings, ahead)
    if not return_lse:
        return loss
    return loss, (statistics[0] + statistics[1].log()).view(target.shape)


def _check_overwritten(logits: Tensor) -> None:
    if logits.is_leaf:
        raise UsageError("inplace=True would overwrite a leaf, whose gradient would then be itself. Leave it out.")
    if any(stride == 0 and size > 1 for size, stride in zip(logits.shape, logits.stride(), strict=True)):
        raise UsageError("inplace=True cannot overwrite expanded logits, several of which are one. Leave it out.")


class _InPlace(torch.autograd.Function):
    """The loss with the gradient where the logits are: from the forward pass on, or from the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, weight: Tensor | None, settings: tuple[Any, ...], ahead: bool
    ) -> tuple[Tensor, Tensor]:
        if ahead:
            loss, statistics = operators.forward_(logits, target, weight, *settings)
            torch.autograd.graph.increment_version(logits)  # whoever kept them for a backward pass is told
            ctx.save_for_backward(logits)
        else:
            loss, _, statistics, parts = operators.forward(logits, target, weight, *settings, False)
            ctx.save_for_backward(logits, target, weight, statistics, parts)
        ctx.mark_non_differentiable(statistics)
        ctx.set_materialize_grads(False)
        ctx.settings, ctx.ahead = settings, ahead
        return loss, statistics

    @staticmethod
    def backward(ctx: Any, upstream: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if upstream is None:
            return (None,) * 5
        operators.refuse_second_derivative("cross_entropy")
        if ctx.ahead:
            gradient = operators.times(ctx.saved_tensors[0].detach(), upstream)
        else:
            logits, *rest = ctx.saved_tensors
            gradient = logits.detach()
            if operators.may_write():
                operators.backward_(upstream, gradient, *rest, *ctx.settings)
                torch.autograd.graph.increment_version(logits)
            else:
                gradient = operators.backward(upstream, gradient, *rest, *ctx.settings)
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
