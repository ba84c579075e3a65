"""`rms_norm` and `layer_norm` over the last dimension, and `add_rms_norm` and `add_layer_norm` after an addition.

Bytes moved: forward reads x, and the residual, and writes the result, and the sum; backward reads what was normalized
and the gradients of the results, and writes the gradient of x, which is also that of the residual if both have one
dtype. The weight, the statistics of rows and the partial sums for its gradient are small beside these.

The sum is rounded to the dtype of the residual before it is normalized, so that results are the same as those of a
model that adds and normalizes in two steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from nearpeak.errors import UsageError
from nearpeak.kernels._runtime.operator import Operator
from nearpeak.kernels._runtime.policy import cannot_run, fused

MAX_COLUMNS = 2**31 - 2**16
"""Columns are indexed in 32 bits."""


def check_arguments(x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None = None) -> None:
    """Raises `UsageError` for arguments that no norm takes."""
    if not x.dim() or not x.is_floating_point():
        raise UsageError(
            f"A norm takes floating-point numbers of one dimension or more, and x is {x.dtype} of shape"
            f" {tuple(x.shape)}."
        )
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is None:
            continue
        if parameter.dim() != 1 or parameter.shape[0] != x.shape[-1] or not parameter.is_floating_point():
            raise UsageError(
                f"The {name} of a norm has a number for each of the {x.shape[-1]} columns of x, and this is"
                f" {parameter.dtype} of shape {tuple(parameter.shape)}."
            )
    if residual is not None and (residual.shape != x.shape or not residual.is_floating_point()):
        raise UsageError(
            f"The residual has the shape of x, {tuple(x.shape)}, and this is {residual.dtype} of shape"
            f" {tuple(residual.shape)}."
        )


def norm_reference(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float, centered: bool, dtype: torch.dtype
) -> Tensor:
    """A norm in plain torch, in float32 or float64, rounded once."""
    wide = torch.promote_types(x.dtype, torch.float32)
    scale = None if weight is None else weight.to(wide) + offset
    shift = None if bias is None else bias.to(wide)
    if centered:
        return functional.layer_norm(x.to(wide), x.shape[-1:], scale, shift, eps).to(dtype)
    result = functional.rms_norm(x.to(wide), x.shape[-1:], scale, eps)
    return (result if shift is None else result + shift).to(dtype)


def why_not_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None = None) -> str | None:
    check_arguments(x, weight, bias, residual)
    return _why_not_rows(x, residual, weight, bias)


def _why_not_rows(x: Tensor, *others: Tensor | None) -> str | None:
    if x.shape[-1] > MAX_COLUMNS:
        return f"it takes rows of up to {MAX_COLUMNS} elements, and these have {x.shape[-1]}"
    return cannot_run(x, *others)


def rms_norm_reference(
    x: Tensor, weight: Tensor | None = None, *, bias: Tensor | None = None, eps: float = 1e-6, offset: float = 0.0
) -> Tensor:
    check_arguments(x, weight, bias)
    return norm_reference(x, weight, bias, eps, offset, False, x.dtype)


def layer_norm_reference(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5
) -> Tensor:
    check_arguments(x, weight, bias)
    return norm_reference(x, weight, bias, eps, 0.0, True, x.dtype)


def _why_not_rms_norm(
    x: Tensor, weight: Tensor | None = None, *, bias: Tensor | None = None, eps: float = 1e-6, offset: float = 0.0
) -> str | None:
    return why_not_norm(x, weight, bias)


def _why_not_layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5
) -> str | None:
    return why_not_norm(x, weight, bias)


def row_statistics(x: Tensor, eps: float, centered: bool) -> Tensor:
    """What the forward pass saves of each row, (1 or 2, rows) in float32: rstd and, for a LayerNorm, the mean."""
    columns = x.shape[-1]
    rows = x.reshape(x.numel() // columns if columns else x.shape[:-1].numel(), columns).double()
    if not x.numel():
        return torch.zeros((2 if centered else 1, rows.shape[0]), dtype=torch.float32, device=x.device)
    if not centered:
        return (rows.square().mean(1, keepdim=True) + eps).rsqrt().t().float()
    mean = rows.mean(1)
    return torch.stack([((rows - mean[:, None]).square().mean(1) + eps).rsqrt(), mean]).float()


def empty_statistics(x: Tensor, centered: bool) -> Tensor:
    rows = 1
    for size in x.shape[:-1]:
        rows *= size
    return x.new_empty((2 if centered else 1, rows), dtype=torch.float32)


def _norm_backward_reference(
    gradient: Tensor, x: Tensor, sum_gradient: Tensor | None, statistics: Tensor, weight: Tensor | None,
    bias: Tensor | None, offset: float, centered: bool, wants: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    wide = torch.promote_types(x.dtype, torch.float32)
    lead = (*x.shape[:-1], 1)
    g, rstd = gradient.to(wide), statistics[0].to(wide).view(lead)
    n = (x.to(wide) - statistics[1].to(wide).view(lead) if centered else x.to(wide)) * rstd
    leading = tuple(range(x.dim() - 1))
    scaled = g if weight is None else g * (weight.to(wide) + offset)
    dx = scaled - n * (scaled * n).mean(-1, keepdim=True)
    if centered:
        dx = dx - scaled.mean(-1, keepdim=True)
    dx = dx * rstd
    if sum_gradient is not None:
        dx = dx + sum_gradient.to(wide)
    unwanted = gradient.new_empty(0)
    return (
        dx.to(gradient.dtype, copy=True, memory_format=torch.contiguous_format) if wants[0] else unwanted,
        dx.to(x.dtype, copy=True, memory_format=torch.contiguous_format) if wants[1] else x.new_empty(0),
        (g * n).sum(leading).to(weight.dtype) if wants[2] and weight is not None else unwanted.clone(),
        g.sum(leading).to(bias.dtype, copy=True) if wants[3] and bias is not None else unwanted.clone(),
    )


def _norm_backward_fake(
    gradient: Tensor, x: Tensor, sum_gradient: Tensor | None, statistics: Tensor, weight: Tensor | None,
    bias: Tensor | None, offset: float, centered: bool, wants: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return (
        gradient.new_empty(gradient.shape if wants[0] else (0,)),
        x.new_empty(gradient.shape if wants[1] else (0,)),
        weight.new_empty(weight.shape) if weight is not None and wants[2] else gradient.new_empty(0),
        bias.new_empty(bias.shape) if bias is not None and wants[3] else gradient.new_empty(0),
    )


norm_backward = Operator(
    "norm_backward(Tensor gradient, Tensor x, Tensor? sum_gradient, Tensor statistics, Tensor? weight, Tensor? bias,"
    " float offset, bool centered, bool[] wants) -> (Tensor, Tensor, Tensor, Tensor)",
    backends={"nvidia": "norms.triton:norm_backward"},
    reference=_norm_backward_reference,
    fake=_norm_backward_fake,
    why_not=lambda *arguments: _why_not_rows(*arguments[:6]),
)
"""The gradients of x, residual, weight and bias of any norm, each without elements if it is not wanted."""


def _save_for_backward(
    ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor], centered: bool, offset: float
) -> None:
    x, weight, bias = inputs[:3]
    ctx.save_for_backward(x, output[1], weight, bias)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.centered, ctx.offset = centered, offset


def _norm_gradients(ctx: Any, gradient: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    """For x, weight and bias."""
    if gradient is None:
        return None, None, None
    x, statistics, weight, bias = ctx.saved_tensors
    wants = [ctx.needs_input_grad[0], False, *ctx.needs_input_grad[1:3]]
    dx, _, dweight, dbias = norm_backward(gradient, x, None, statistics, weight, bias, ctx.offset, ctx.centered, wants)
    return dx if wants[0] else None, dweight if wants[2] else None, dbias if wants[3] else None


_rms_norm = Operator(
    "rms_norm(Tensor x, Tensor? weight, Tensor? bias, float eps, float offset) -> (Tensor, Tensor)",
    backends={"nvidia": "norms.triton:rms_norm"},
    reference=lambda x, weight, bias, eps, offset: (
        norm_reference(x, weight, bias, eps, offset, False, x.dtype).contiguous(),
        row_statistics(x, eps, False),
    ),
    fake=lambda x, weight, bias, eps, offset: (x.new_empty(x.shape), empty_statistics(x, False)),
    why_not=lambda x, weight, bias, eps, offset: why_not_norm(x, weight, bias),
    setup_context=lambda ctx, inputs, output: _save_for_backward(ctx, inputs, output, False, inputs[4]),
    backward=lambda ctx, *gradients: (*_norm_gradients(ctx, *gradients), None, None),
)
_layer_norm = Operator(
    "layer_norm(Tensor x, Tensor? weight, Tensor? bias, float eps) -> (Tensor, Tensor)",
    backends={"nvidia": "norms.triton:layer_norm"},
    reference=lambda x, weight, bias, eps: (
        norm_reference(x, weight, bias, eps, 0.0, True, x.dtype).contiguous(),
        row_statistics(x, eps, True),
    ),
    fake=lambda x, weight, bias, eps: (x.new_empty(x.shape), empty_statistics(x, True)),
    why_not=lambda x, weight, bias, eps: why_not_norm(x, weight, bias),
    setup_context=lambda ctx, inputs, output: _save_for_backward(ctx, inputs, output, True, 0.0),
    backward=lambda ctx, *gradients: (*_norm_gradients(ctx, *gradients), None),
)


def _native_rms_norm(*args: Any, **options: Any) -> Callable[..., Tensor]:
    """torch's backend is chosen only for arguments that this takes."""
    return lambda x, weight=None, *, eps=1e-6, **_: functional.rms_norm(x, x.shape[-1:], weight, eps)


def _native_layer_norm(*args: Any, **options: Any) -> Callable[..., Tensor]:
    return lambda x, weight=None, bias=None, *, eps=1e-5: functional.layer_norm(x, x.shape[-1:], weight, bias, eps)


@fused(reference=rms_norm_reference, why_not=_why_not_rms_norm, has_choice=True, native=_native_rms_norm)
def rms_norm(
    x: Tensor, weight: Tensor | None = None, *, bias: Tensor | None = None, eps: float = 1e-6, offset: float = 0.0
) -> Tensor:
    """x / sqrt(mean(x**2) + eps) * (offset + weight) + bias over the last dimension, computed in float32.

    Args:
        x: Any shape. It is copied first only if its last dimension is not dense, or if more than three strides lead
            through the others.
        weight: A number for each column, any dtype. None means no factor, whatever `offset` is.
        bias: Likewise.
        eps: Keeps rows of zeros finite.
        offset: 1 for models that store weights as differences from 1.

    The result has the dtype of x. x is saved for the backward pass, and one float32 number per row.
    """
    return _rms_norm(x, weight, bias, eps, offset)[0]  # type: ignore[no-any-return]


@fused(reference=layer_norm_reference, why_not=_why_not_layer_norm, has_choice=True, native=_native_layer_norm)
def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5) -> Tensor:
    """(x - mean(x)) / sqrt(variance(x) + eps) * weight + bias over the last dimension, computed in float32.

    Arguments, dtype and copies are those of `rms_norm`. x is saved for the backward pass, and two numbers per row.
    """
    return _layer_norm(x, weight, bias, eps)[0]  # type: ignore[no-any-return]


class RMSNorm(torch.nn.RMSNorm):
    """`torch.nn.RMSNorm` over one dimension, computed by `rms_norm`; state dicts are compatible.

    Args:
        offset: 1 for models that store weights as differences from 1; they are then initialized to 0.
    """

    def __init__(
        self, columns: int, eps: float = 1e-6, elementwise_affine: bool = True, *, offset: float = 0.0, **settings: Any
    ) -> None:
        self.offset = offset
        super().__init__(columns, eps, elementwise_affine, **settings)

    def reset_parameters(self) -> None:
        if self.elementwise_affine:
            torch.nn.init.constant_(self.weight, 1.0 - self.offset)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, eps=self.eps or 0.0, offset=self.offset)


class LayerNorm(torch.nn.LayerNorm):
    """`torch.nn.LayerNorm` over one dimension, computed by `layer_norm`; state dicts are compatible."""

    def __init__(self, columns: int, eps: float = 1e-5, elementwise_affine: bool = True, **settings: Any) -> None:
        super().__init__(columns, eps, elementwise_affine, **settings)

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias, eps=self.eps)


def _add_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float, centered: bool
) -> tuple[Tensor, Tensor]:
    check_arguments(x, weight, bias, residual)
    wide = torch.promote_types(torch.promote_types(x.dtype, residual.dtype), torch.float32)
    total = (x.to(wide) + residual.to(wide)).to(residual.dtype)
    return norm_reference(total, weight, bias, eps, offset, centered, x.dtype), total


def add_rms_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, *, bias: Tensor | None = None, eps: float = 1e-6,
    offset: float = 0.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _add_norm_reference(x, residual, weight, bias, eps, offset, False)


def add_layer_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    return _add_norm_reference(x, residual, weight, bias, eps, 0.0, True)


def _why_not_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, *, bias: Tensor | None = None, eps: float = 1e-6,
    offset: float = 0.0,
) -> str | None:  # fmt: skip
    return why_not_norm(x, weight, bias, residual)


def _why_not_add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5
) -> str | None:
    return why_not_norm(x, weight, bias, residual)


def _add_norm_operator_reference(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float, centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    result, total = _add_norm_reference(x, residual, weight, bias, eps, offset, centered)
    return result.contiguous(), total.contiguous(), row_statistics(total, eps, centered)


def _add_norm_fake(x: Tensor, residual: Tensor, centered: bool) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), residual.new_empty(x.shape), empty_statistics(x, centered)


def _save_sum_for_backward(
    ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...], centered: bool, offset: float
) -> None:
    _, total, statistics = output
    ctx.save_for_backward(total, statistics, inputs[2], inputs[3])
    ctx.mark_non_differentiable(statistics)
    ctx.set_materialize_grads(False)
    ctx.dtype, ctx.centered, ctx.offset = inputs[0].dtype, centered, offset


def _add_norm_gradients(
    ctx: Any, gradient: Tensor | None, sum_gradient: Tensor | None, _: Any
) -> tuple[Tensor | None, ...]:
    """For x, residual, weight and bias."""
    total, statistics, weight, bias = ctx.saved_tensors
    for_x, for_residual, for_weight, for_bias = ctx.needs_input_grad[:4]
    if gradient is None:  # the norm was not used: only the addition is left
        if sum_gradient is None:
            return None, None, None, None
        return sum_gradient.to(ctx.dtype) if for_x else None, sum_gradient if for_residual else None, None, None
    # one gradient serves both if they have one dtype
    shared = ctx.dtype == total.dtype
    wants = [for_x or (shared and for_residual), for_residual and not shared, for_weight, for_bias]
    dx, dresidual, dweight, dbias = norm_backward(
        gradient, total, sum_gradient, statistics, weight, bias, ctx.offset, ctx.centered, wants
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
    backends={"nvidia": "norms.triton:add_rms_norm"},
    reference=lambda x, residual, weight, bias, eps, offset: _add_norm_operator_reference(
        x, residual, weight, bias, eps, offset, False
    ),
    fake=lambda x, residual, weight, bias, eps, offset: _add_norm_fake(x, residual, False),
    why_not=lambda x, residual, weight, bias, eps, offset: why_not_norm(x, weight, bias, residual),
    setup_context=lambda ctx, inputs, output: _save_sum_for_backward(ctx, inputs, output, False, inputs[5]),
    backward=lambda ctx, *gradients: (*_add_norm_gradients(ctx, *gradients), None, None),
)
_add_layer_norm = Operator(
    "add_layer_norm(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, float eps) -> (Tensor, Tensor, Tensor)",
    backends={"nvidia": "norms.triton:add_layer_norm"},
    reference=lambda x, residual, weight, bias, eps: _add_norm_operator_reference(
        x, residual, weight, bias, eps, 0.0, True
    ),
    fake=lambda x, residual, weight, bias, eps: _add_norm_fake(x, residual, True),
    why_not=lambda x, residual, weight, bias, eps: why_not_norm(x, weight, bias, residual),
    setup_context=lambda ctx, inputs, output: _save_sum_for_backward(ctx, inputs, output, True, 0.0),
    backward=lambda ctx, *gradients: (*_add_norm_gradients(ctx, *gradients), None),
)


@fused(reference=add_rms_norm_reference, why_not=_why_not_add_rms_norm)
def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, *, bias: Tensor | None = None, eps: float = 1e-6,
    offset: float = 0.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The RMS norm of x + residual, in the dtype of x, and x + residual itself, in the dtype of the residual.

    Both results are differentiable. The other arguments and copies are those of `rms_norm`. The sum, which is a result
    anyway, is saved for the backward pass, and one float32 number per row.
    """
    return _add_rms_norm(x, residual, weight, bias, eps, offset)[:2]  # type: ignore[no-any-return]


@fused(reference=add_layer_norm_reference, why_not=_why_not_add_layer_norm)
def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """The layer norm of x + residual, in the dtype of x, and x + residual itself, in the dtype of the residual.

    As `add_rms_norm`, with two float32 numbers saved per row.
    """
    return _add_layer_norm(x, residual, weight, bias, eps)[:2]  # type: ignore[no-any-return]
