"""`softmax` and `log_softmax`, with a scale, a mask and causality in the same pass.

Bytes moved: forward, each element is read once and written once; of a causal row only the visible keys are read. Rows
too long for registers are read a second time, mostly from a cache. Backward, the result and its gradient are read once
and the gradient of `x` is written once. Only the result is saved for the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nearpeak.errors import UsageError
from nearpeak.kernels._runtime.operator import Operator
from nearpeak.kernels._runtime.policy import FLOATS, cannot_run, fused


def _prepare(
    x: Tensor, dim: int, mask: Tensor | None, causal: bool, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor | None, torch.dtype]:
    """Checks arguments. Returns `x` and its mask with the reduced dimension last, and the dtype of the result."""
    if not (dtype or x.dtype).is_floating_point:
        raise UsageError(
            f"A softmax is of floats, and this is {dtype or x.dtype}. Pass a floating-point dtype for the result."
        )
    if causal and (x.dim() < 2 or dim not in (-1, x.dim() - 1)):
        raise UsageError(
            f"causal=True takes [..., queries, keys] and dim=-1; this is {list(x.shape)} and dim={dim}."
            " Transpose first, or pass a mask."
        )
    if mask is not None:
        if mask.dtype != torch.bool and not mask.is_floating_point():
            raise UsageError(
                f"A mask is boolean, True where a key is kept, or floats to add; this is {mask.dtype}."
                " Make it boolean with mask != 0."
            )
        if not _broadcasts(mask.shape, x.shape):
            raise UsageError(
                f"A mask must broadcast to x, of shape {list(x.shape)}; this has shape {list(mask.shape)}."
            )
    if x.dim() > 1 and dim not in (-1, x.dim() - 1):
        mask = None if mask is None else mask.expand(x.shape).movedim(dim, -1)
        x = x.movedim(dim, -1)
    elif not -max(x.dim(), 1) <= dim < max(x.dim(), 1):
        x.softmax(dim)  # raises what torch raises
    return x, mask, dtype or x.dtype


def _broadcasts(mask: torch.Size, to: torch.Size) -> bool:
    return len(mask) <= len(to) and all(
        size == 1 or size == target for size, target in zip(reversed(mask), reversed(to), strict=False)
    )


def _scores(x: Tensor, mask: Tensor | None, scale: float, causal: bool, dtype: torch.dtype) -> Tensor:
    """scale * x + mask, in float32 at least, and -inf for hidden keys."""
    wide = torch.promote_types(torch.promote_types(x.dtype, dtype), torch.float32)
    scores = x.to(wide)
    if scale != 1.0:
        scores = scores * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask.to(wide)
    if causal:
        queries, keys = x.shape[-2:]
        hidden = torch.ones(queries, keys, dtype=torch.bool, device=x.device).triu(keys - queries + 1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores


def _operator_reference(
    x: Tensor, mask: Tensor | None, scale: float, causal: bool, dtype: torch.dtype, *, log: bool
) -> Tensor:
    """The softmax of the last dimension. Keys at -inf do not count, and neither does their gradient."""
    scores = _scores(x, mask, scale, causal, dtype)
    hidden = scores == float("-inf")
    # torch returns NaN for a row without keys, backward too: such rows get zeros, which are hidden afterward
    scores = scores.masked_fill(hidden.all(-1, keepdim=True), 0.0)
    if log:
        return torch.log_softmax(scores, -1).masked_fill(hidden, float("-inf")).to(dtype)
    return torch.softmax(scores, -1).masked_fill(hidden, 0.0).to(dtype)


def _backward_operator_reference(
    gradient: Tensor, result: Tensor, scale: float, causal: bool, dtype: torch.dtype, *, log: bool
) -> Tensor:
    wide = torch.promote_types(result.dtype, torch.float32)
    gradient, y = gradient.to(wide), result.to(wide)
    if log:
        gradient = gradient.masked_fill(y == float("-inf"), 0.0)
        return (scale * (gradient - y.exp() * gradient.sum(-1, keepdim=True))).to(dtype)
    return (scale * y * (gradient - (gradient * y).sum(-1, keepdim=True))).to(dtype)


def _operator_why_not(x: Tensor, mask: Tensor | None, scale: float, causal: bool, dtype: torch.dtype) -> str | None:
    if not x.is_floating_point():
        return f"it takes floats, and this is {x.dtype}"
    if dtype not in FLOATS:
        return f"it cannot write {dtype}"
    return cannot_run(x, mask)


def _backward_why_not(gradient: Tensor, result: Tensor, scale: float, causal: bool, dtype: torch.dtype) -> str | None:
    return cannot_run(gradient, result) if dtype in FLOATS else f"it cannot write {dtype}"


def _fake(x: Tensor, mask: Tensor | None, scale: float, causal: bool, dtype: torch.dtype) -> Tensor:
    return x.new_empty(x.shape, dtype=dtype)


def _backward_fake(gradient: Tensor, result: Tensor, scale: float, causal: bool, dtype: torch.dtype) -> Tensor:
    return result.new_empty(result.shape, dtype=dtype)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, mask, ctx.scale, ctx.causal, _ = inputs
    ctx.dtype = x.dtype
    ctx.mask = (mask.shape, mask.dtype) if mask is not None and mask.requires_grad else None
    ctx.save_for_backward(output)


def _operator(name: str, *, log: bool) -> Operator:
    prefix = "log_" if log else ""
    backward = Operator(
        f"{name}_backward(Tensor gradient, Tensor result, float scale, bool causal, ScalarType dtype) -> Tensor",
        backends={"nvidia": f"softmax.triton:{prefix}backward"},
        reference=lambda *args: _backward_operator_reference(*args, log=log),
        fake=_backward_fake,
        why_not=_backward_why_not,
    )

    def gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (result,) = ctx.saved_tensors
        if ctx.mask is None:
            return backward(gradient, result, ctx.scale, ctx.causal, ctx.dtype), None, None, None, None
        shape, dtype = ctx.mask
        # one more pass, in float32: a mask has the gradient of the scores, summed over expanded dimensions
        scores = backward(gradient, result, 1.0, ctx.causal, torch.float32)
        return (scores * ctx.scale).to(ctx.dtype), scores.sum_to_size(shape).to(dtype), None, None, None

    return Operator(
        f"{name}(Tensor x, Tensor? mask, float scale, bool causal, ScalarType dtype) -> Tensor",
        backends={"nvidia": f"softmax.triton:{prefix}forward"},
        reference=lambda *args: _operator_reference(*args, log=log),
        fake=_fake,
        why_not=_operator_why_not,
        setup_context=_setup_context,
        backward=gradients,
    )


_softmax = _operator("softmax", log=False)
_log_softmax = _operator("log_softmax", log=True)


def _why_not(
    x: Tensor, dim: int = -1, *, scale: float = 1.0, mask: Tensor | None = None, causal: bool = False,
    dtype: torch.dtype | None = None,
) -> str | None:  # fmt: skip
    return _operator_why_not(x, mask, scale, causal, dtype or x.dtype)


def _run(
    function: Callable[..., Any], x: Tensor, dim: int, scale: float, mask: Tensor | None, causal: bool,
    dtype: torch.dtype | None,
) -> Tensor:  # fmt: skip
    rows, mask, result_dtype = _prepare(x, dim, mask, causal, dtype)
    result: Tensor = function(rows, mask, scale, causal, result_dtype)
    return result if rows is x else result.movedim(-1, dim)


def reference(
    x: Tensor, dim: int = -1, *, scale: float = 1.0, mask: Tensor | None = None, causal: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    return _run(lambda *args: _operator_reference(*args, log=False), x, dim, scale, mask, causal, dtype)


def log_reference(
    x: Tensor, dim: int = -1, *, scale: float = 1.0, mask: Tensor | None = None, causal: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    return _run(lambda *args: _operator_reference(*args, log=True), x, dim, scale, mask, causal, dtype)


@fused(reference=reference, why_not=_why_not)
def softmax(
    x: Tensor, dim: int = -1, *, scale: float = 1.0, mask: Tensor | None = None, causal: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """softmax(scale * x + mask) over `dim`.

    >>> import torch, nearpeak.kernels as kernels
    >>> kernels.softmax(torch.zeros(2, 2), causal=True)
    tensor([[1.0000, 0.0000],
            [0.5000, 0.5000]])

    Args:
        x: Floats of any shape and strides. It is copied first if `dim` is not dense in memory, as where `dim` is not
            the last dimension.
        dim: The dimension that sums to 1.
        scale: Factor of `x`.
        mask: Boolean, True for visible keys, or floats to add. It broadcasts to `x`, and is not expanded in memory. If
            floats require a gradient, that takes another pass in float32.
        causal: `x` is (..., queries, keys), and query i sees the keys up to i + keys - queries. Hidden keys are not
            read.
        dtype: The dtype of the result; None for that of `x`. Arithmetic is in float32.

    A row without visible keys, or of -inf alone, is 0 everywhere and has no gradient. The result is saved for the
    backward pass, in its dtype.
    """
    return _run(_softmax, x, dim, scale, mask, causal, dtype)


@fused(reference=log_reference, why_not=_why_not)
def log_softmax(
    x: Tensor, dim: int = -1, *, scale: float = 1.0, mask: Tensor | None = None, causal: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """The logarithm of `softmax`, with the same arguments.

    >>> import torch, nearpeak.kernels as kernels
    >>> kernels.log_softmax(torch.zeros(2, 2), causal=True)
    tensor([[ 0.0000,    -inf],
            [-0.6931, -0.6931]])

    A hidden key is -inf, and its upstream gradient is ignored.
    """
    return _run(_log_softmax, x, dim, scale, mask, causal, dtype)
