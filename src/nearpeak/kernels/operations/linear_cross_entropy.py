"""`linear_cross_entropy`: the last layer of a language model and its loss, without the logits in memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nearpeak.errors import UsageError
from nearpeak.kernels.operations import linear_cross_entropy_operators as operators
from nearpeak.kernels.operations.cross_entropy import Reduction, check
from nearpeak.kernels.operations.cross_entropy import reference as cross_entropy_reference
from nearpeak.kernels.policy import cannot_run, fused


def _check(hidden: Tensor, weight: Tensor, bias: Tensor | None, chunk_tokens: int | None) -> None:
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


def reference(
    hidden: Tensor, weight: Tensor, target: Tensor, *, bias: Tensor | None = None, reduction: Reduction = "mean",
    ignore_index: int = -100, label_smoothing: float = 0.0, softcap: float | None = None, z_loss: float = 0.0,
    class_weight: Tensor | None = None, chunk_tokens: int | None = None, accumulate_float32: bool | None = None,
    return_logprobs: bool = False, return_entropy: bool = False,
) -> Any:  # fmt: skip
    _check(hidden, weight, bias, chunk_tokens)
    logits = torch.nn.functional.linear(hidden, weight, bias)
    loss = cross_entropy_reference(
        logits, target, reduction=reduction, ignore_index=ignore_index, label_smoothing=label_smoothing,
        softcap=softcap, z_loss=z_loss, weight=class_weight,
    )  # fmt: skip
    logprobs, entropies = operators.plain_logprobs(logits.detach(), target, ignore_index, softcap or 0.0)
    more = [one for one, asked in ((logprobs, return_logprobs), (entropies, return_entropy)) if asked]
    return (loss, *more) if more else loss


def _why_not(
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


@fused(reference=reference, why_not=_why_not, remembered=False)
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
    _check(hidden, weight, bias, chunk_tokens)
    check(weight.shape[0], hidden.shape[:-1], target, class_weight, reduction, label_smoothing, softcap)
    hidden, weight, bias = _as_autocast(hidden, weight, bias)  # type: ignore[assignment]
    ahead = torch.is_grad_enabled() and reduction != "none"
    wanted = [ahead and one is not None and one.requires_grad for one in (hidden, weight, bias)]
    loss, *_, logprobs, entropies, _, _ = operators.forward(
        hidden, weight, bias, target, class_weight, ignore_index, float(label_smoothing), float(softcap or 0.0),
        float(z_loss), reduction, chunk_tokens or 0, accumulate_float32, return_logprobs, return_entropy, *wanted,
    )  # fmt: skip
    more = [one for one, asked in ((logprobs, return_logprobs), (entropies, return_entropy)) if asked]
    return (loss, *more) if more else loss
