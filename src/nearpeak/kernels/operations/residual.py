"""`add_rms_norm` and `add_layer_norm`: an addition to the residual stream and the norm of the sum, in one kernel.

The sum is rounded to the dtype of the residual, and what is normalised is the rounded sum: that is what a model
computes which adds and normalises apart, and both results are the same as there.

Bytes that must be moved: forward reads x and the residual and writes the sum and the norm; backward reads the sum and
the gradients of both results and writes one gradient, which is that of x and of the residual, where these have one
dtype, and two where they have not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nearpeak.kernels.operations.norms import (
    check,
    empty_statistics,
    norm_backward,
    normalised,
    statistics,
    why_not_norm,
)
from nearpeak.kernels.operator import Operator
from nearpeak.kernels.policy import fused


def _both(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float, centred: bool
) -> tuple[Tensor, Tensor]:
    check(x, weight, bias, residual)
    wide = torch.promote_types(torch.promote_types(x.dtype, residual.dtype), torch.float32)
    total = (x.to(wide) + residual.to(wide)).to(residual.dtype)
    return normalised(total, weight, bias, eps, offset, centred, x.dtype), total


def add_rms_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, *, bias: Tensor | None = None, eps: float = 1e-6,
    offset: float = 0.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _both(x, residual, weight, bias, eps, offset, False)


def add_layer_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    return _both(x, residual, weight, bias, eps, 0.0, True)


def _why_not_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, *, bias: Tensor | None = None, eps: float = 1e-6,
    offset: float = 0.0,
) -> str | None:  # fmt: skip
    return why_not_norm(x, weight, bias, residual)


def _why_not_add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5
) -> str | None:
    return why_not_norm(x, weight, bias, residual)


def _reference(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float, centred: bool
) -> tuple[Tensor, Tensor, Tensor]:
    result, total = _both(x, residual, weight, bias, eps, offset, centred)
    return result.contiguous(), total.contiguous(), statistics(total, eps, centred)


def _fake(x: Tensor, residual: Tensor, centred: bool) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), residual.new_empty(x.shape), empty_statistics(x, centred)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...], centred: bool, offset: float) -> None:
    _, total, kept = output
    ctx.save_for_backward(total, kept, inputs[2], inputs[3])
    ctx.mark_non_differentiable(kept)
    ctx.set_materialize_grads(False)
    ctx.dtype, ctx.centred, ctx.offset = inputs[0].dtype, centred, offset


def _backward(ctx: Any, gradient: Tensor | None, sum_gradient: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
    """For x, residual, weight and bias."""
    total, kept, weight, bias = ctx.saved_tensors
    for_x, for_residual, for_weight, for_bias = ctx.needs_input_grad[:4]
    if gradient is None:  # nobody used the norm: what is left is an addition
        if sum_gradient is None:
            return None, None, None, None
        return sum_gradient.to(ctx.dtype) if for_x else None, sum_gradient if for_residual else None, None, None
    # one gradient of one dtype serves both
    shared = ctx.dtype == total.dtype
    wants = [for_x or (shared and for_residual), for_residual and not shared, for_weight, for_bias]
    dx, dresidual, dweight, dbias = norm_backward(
        gradient, total, sum_gradient, kept, weight, bias, ctx.offset, ctx.centred, wants
    )
    return (
        dx if for_x else None,
        (dx if shared else dresidual) if for_residual else None,
        dweight if for_weight else None,
        dbias if for_bias else None,
    )


_add_rms_norm = Operator(
    "add_rms_norm(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, float eps, float offset)"
    " -> (Tensor, Tensor, Tensor)",
    launch="norms:add_rms_norm",
    reference=lambda x, residual, weight, bias, eps, offset: _reference(x, residual, weight, bias, eps, offset, False),
    fake=lambda x, residual, weight, bias, eps, offset: _fake(x, residual, False),
    why_not=lambda x, residual, weight, bias, eps, offset: why_not_norm(x, weight, bias, residual),
    setup_context=lambda ctx, inputs, output: _keep(ctx, inputs, output, False, inputs[5]),
    backward=lambda ctx, *gradients: (*_backward(ctx, *gradients), None, None),
)
_add_layer_norm = Operator(
    "add_layer_norm(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, float eps) -> (Tensor, Tensor, Tensor)",
    launch="norms:add_layer_norm",
    reference=lambda x, residual, weight, bias, eps: _reference(x, residual, weight, bias, eps, 0.0, True),
    fake=lambda x, residual, weight, bias, eps: _fake(x, residual, True),
    why_not=lambda x, residual, weight, bias, eps: why_not_norm(x, weight, bias, residual),
    setup_context=lambda ctx, inputs, output: _keep(ctx, inputs, output, True, 0.0),
    backward=lambda ctx, *gradients: (*_backward(ctx, *gradients), None),
)


@fused(reference=add_rms_norm_reference, why_not=_why_not_add_rms_norm)
def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, *, bias: Tensor | None = None, eps: float = 1e-6,
    offset: float = 0.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The RMS norm of x + residual, in the dtype of x, and x + residual itself, in the dtype of the residual.

    Both results are differentiable. The other arguments, and what is copied first, are as for `rms_norm`. For the
    backward pass the sum is kept, which is a result anyway, and a number of float32 for each row.
    """
    return _add_rms_norm(x, residual, weight, bias, eps, offset)[:2]  # type: ignore[no-any-return]


@fused(reference=add_layer_norm_reference, why_not=_why_not_add_layer_norm)
def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """The layer norm of x + residual, in the dtype of x, and x + residual itself, in the dtype of the residual.

    As `add_rms_norm`, with two numbers of float32 kept for each row.
    """
    return _add_layer_norm(x, residual, weight, bias, eps)[:2]  # type: ignore[no-any-return]
