"""The operators of torch behind `product`, each with the same in plain torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nearpeak.kernels.operations.activations import apply
from nearpeak.kernels.operations.product_arguments import FLOAT8, dequantised
from nearpeak.kernels.operator import Operator
from nearpeak.kernels.policy import FLOATS, cannot_run, too_old


def plain_epilogue(before: Tensor, activation: str, gated: bool, residual: Tensor | None) -> Tensor:
    """What follows a product, in its dtype or that of the residual."""
    if gated:
        half = before.shape[-1] // 2
        result = _activated(before[..., :half], activation) * before[..., half:]
    else:
        result = _activated(before, activation)
    return result if residual is None else result + residual


def _activated(x: Tensor, activation: str) -> Tensor:
    if not activation:
        return x
    return torch.relu(x) if activation == "relu" else apply(x, activation)


def _plain_before(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.nn.functional.linear(x, weight, None if bias is None else bias.to(x.dtype))


def _plain_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str, gated: bool,
    dtype: torch.dtype, tf32: bool, keep: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    before = _plain_before(x, weight, bias)
    result = plain_epilogue(before, activation, gated, residual).to(dtype)
    return result.contiguous().clone(), before.contiguous() if keep else x.new_empty(0)


def _plain_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, before: Tensor | None, activation: str,
    gated: bool, tf32: bool, for_x: bool, for_weight: bool, for_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    if activation:
        with torch.enable_grad():
            before = (_plain_before(x, weight, bias) if before is None else before).detach().requires_grad_()
            result = plain_epilogue(before, activation, gated, None)
        (gradient,) = torch.autograd.grad(result, before, gradient.to(result.dtype))
    rows = gradient.to(x.dtype).reshape(-1, weight.shape[0])
    columns = x.reshape(-1, x.shape[-1])
    return (
        (rows @ weight).reshape(x.shape).contiguous() if for_x else x.new_empty(0),
        (rows.t() @ columns).contiguous() if for_weight else weight.new_empty(0),
        rows.sum(0).to(_bias_dtype(weight, bias)) if for_bias else weight.new_empty(0, dtype=_bias_dtype(weight, bias)),
    )


def _bias_dtype(weight: Tensor, bias: Tensor | None) -> torch.dtype:
    return weight.dtype if bias is None else bias.dtype


def _result_shape(x: Tensor, weight: Tensor, gated: bool) -> list[int]:
    return [*x.shape[:-1], weight.shape[0] // 2 if gated else weight.shape[0]]


def _fake_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str, gated: bool,
    dtype: torch.dtype, tf32: bool, keep: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    kept = [*x.shape[:-1], weight.shape[0]] if keep else [0]
    return x.new_empty(_result_shape(x, weight, gated), dtype=dtype), x.new_empty(kept)


def _fake_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, before: Tensor | None, activation: str,
    gated: bool, tf32: bool, for_x: bool, for_weight: bool, for_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return (
        x.new_empty(x.shape if for_x else (0,)),
        weight.new_empty(weight.shape if for_weight else (0,)),
        weight.new_empty(weight.shape[0] if for_bias else 0, dtype=_bias_dtype(weight, bias)),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, bias, residual, ctx.activation, ctx.gated, _, ctx.tf32, keep = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.residual_dtype = None if residual is None else residual.dtype
    ctx.save_for_backward(x, weight, bias, output[1] if keep else None)


def _backward(ctx: Any, gradient: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    rest = (None,) * 5
    if gradient is None:
        return (None, None, None, None, *rest)
    wanted = tuple(ctx.needs_input_grad[:3])
    gradients: list[Tensor | None] = [None, None, None]
    if any(wanted):
        found = backward(gradient, *ctx.saved_tensors, ctx.activation, ctx.gated, ctx.tf32, *wanted)
        gradients = [one if asked else None for one, asked in zip(found, wanted, strict=True)]
    by_residual = gradient.to(ctx.residual_dtype) if ctx.needs_input_grad[3] else None
    return (*gradients, by_residual, *rest)


def _plain_scaled(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, scale_x: Tensor | None,
    scale_weight: Tensor | None, activation: str, gated: bool, dtype: torch.dtype, fast_accumulate: bool,
) -> Tensor:  # fmt: skip
    before = _plain_before(dequantised(x, scale_x, 1), dequantised(weight, scale_weight, 128), bias)
    return plain_epilogue(before, activation, gated, residual).to(dtype).contiguous()


def _why_not(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, *rest: Any) -> str | None:
    if x.dtype != weight.dtype:
        return "x and the weight have one dtype"
    return cannot_run(x, weight, bias, residual)


def _why_not_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, before: Tensor | None, *rest: Any
) -> str | None:
    return cannot_run(gradient) or _why_not(x, weight, bias, before)


def _why_not_scaled(x: Tensor, weight: Tensor, *rest: Any) -> str | None:
    if x.dtype != torch.float8_e4m3fn or weight.dtype != torch.float8_e4m3fn:
        return "of 8 bits it takes float8_e4m3fn alone"
    return cannot_run(x, weight, *rest[:4], dtypes=(*FLOATS, *FLOAT8)) or too_old(x.device, (8, 9))


_EPILOGUE = "str activation, bool gated"
forward = Operator(
    f"product(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, {_EPILOGUE}, ScalarType dtype, bool tf32,"
    " bool keep) -> (Tensor, Tensor)",
    launch="product:forward",
    reference=_plain_forward,
    fake=_fake_forward,
    why_not=_why_not,
    setup_context=_setup_context,
    backward=_backward,
)
backward = Operator(
    f"product_backward(Tensor gradient, Tensor x, Tensor weight, Tensor? bias, Tensor? before, {_EPILOGUE}, bool tf32,"
    " bool for_x, bool for_weight, bool for_bias) -> (Tensor, Tensor, Tensor)",
    launch="product:backward",
    reference=_plain_backward,
    fake=_fake_backward,
    why_not=_why_not_backward,
)
scaled = Operator(
    "product_scaled(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, Tensor? scale_x, Tensor? scale_weight,"
    f" {_EPILOGUE}, ScalarType dtype, bool fast_accumulate) -> Tensor",
    launch="product:scaled",
    reference=_plain_scaled,
    fake=lambda x, weight, *rest: x.new_empty(_result_shape(x, weight, rest[5]), dtype=rest[6]),
    why_not=_why_not_scaled,
)
