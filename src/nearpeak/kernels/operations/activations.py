"""`bias_gelu`, `bias_silu`, `bias_relu_squared`: a bias added and an activation applied in one pass.

One pair of kernels computes them all, in float32 whatever the dtype: torch rounds the sum with the bias first, so
results in 16 bits are a little nearer to the true ones than torch's.

Bytes moved: forward reads x and writes the result; backward reads the gradient and x and writes the gradient of x. The
bias, and the sums that its gradient is made of, are small beside these. x and the bias are kept for the backward pass.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from nearpeak.errors import UsageError
from nearpeak.kernels.operator import Operator
from nearpeak.kernels.policy import cannot_run, fused

Approximate = Literal["none", "tanh"]


def gelu_name(approximate: str) -> str:
    """The kernels' name of a form of GELU."""
    if approximate not in ("none", "tanh"):
        raise UsageError(f'approximate is "none" or "tanh", and not {approximate!r}.')
    return "gelu" if approximate == "none" else "gelu_tanh"


def apply(x: Tensor, activation: str) -> Tensor:
    """The activation in plain torch."""
    if activation == "silu":
        return functional.silu(x)
    if activation == "relu_squared":
        return functional.relu(x).square()
    return functional.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


def _reference(x: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    return apply(x if bias is None else x + bias, activation).to(x.dtype)


def _reference_backward(gradient: Tensor, x: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        result = _reference(x, bias, activation)
    return torch.autograd.grad(result, x, gradient)[0].contiguous()


def _reference_backward_with_bias(gradient: Tensor, x: Tensor, bias: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():
        x, bias = x.detach().requires_grad_(), bias.detach().requires_grad_()
        result = _reference(x, bias, activation)
    x_gradient, bias_gradient = torch.autograd.grad(result, (x, bias), gradient)
    return x_gradient.contiguous(), bias_gradient.contiguous()


def _why_not(x: Tensor, bias: Tensor | None, activation: str) -> str | None:
    if bias is not None and (bias.dim() != 1 or not x.dim() or bias.shape[0] != x.shape[-1]):
        return f"it takes a bias as long as the last dimension, and this has the shapes {_shapes(x, bias)}"
    return cannot_run(x, bias) or _not_float(x, bias)


def _not_float(*tensors: Tensor | None) -> str | None:
    for tensor in tensors:
        if tensor is not None and not tensor.is_floating_point():
            return f"it takes numbers with a fraction, and this is {str(tensor.dtype).removeprefix('torch.')}"
    return None


def _shapes(*tensors: Tensor) -> str:
    return " and ".join(str(tuple(tensor.shape)) for tensor in tensors)


def _why_not_backward(gradient: Tensor, x: Tensor, bias: Tensor | None, activation: str) -> str | None:
    return cannot_run(gradient) or _why_not(x, bias, activation)


def _fake(x: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _fake_backward(gradient: Tensor, x: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _fake_backward_with_bias(gradient: Tensor, x: Tensor, bias: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    contiguous = torch.contiguous_format
    return torch.empty_like(x, memory_format=contiguous), torch.empty_like(bias, memory_format=contiguous)


def _setup_context(ctx: Any, inputs: tuple[Tensor, Tensor | None, str], output: Tensor) -> None:
    x, bias, ctx.activation = inputs
    ctx.save_for_backward(x, bias)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, bias = ctx.saved_tensors
    if bias is None or not ctx.needs_input_grad[1]:
        return _activation_backward(gradient, x, bias, ctx.activation), None, None
    return *_activation_backward_with_bias(gradient, x, bias, ctx.activation), None


_activation_backward = Operator(
    "activation_backward(Tensor gradient, Tensor x, Tensor? bias, str activation) -> Tensor",
    launch="activations:backward",
    reference=_reference_backward,
    fake=_fake_backward,
    why_not=_why_not_backward,
)
_activation_backward_with_bias = Operator(
    "activation_backward_with_bias(Tensor gradient, Tensor x, Tensor bias, str activation) -> (Tensor, Tensor)",
    launch="activations:backward_with_bias",
    reference=_reference_backward_with_bias,
    fake=_fake_backward_with_bias,
    why_not=_why_not_backward,
)
_activation = Operator(
    "activation(Tensor x, Tensor? bias, str activation) -> Tensor",
    launch="activations:forward",
    reference=_reference,
    fake=_fake,
    why_not=_why_not,
    setup_context=_setup_context,
    backward=_backward,
)


def _gelu_reference(x: Tensor, bias: Tensor | None = None, approximate: Approximate = "none") -> Tensor:
    return _reference(x, bias, gelu_name(approximate))


def _gelu_why_not(x: Tensor, bias: Tensor | None = None, approximate: Approximate = "none") -> str | None:
    return _why_not(x, bias, gelu_name(approximate))


@fused(reference=_gelu_reference, why_not=_gelu_why_not)
def bias_gelu(x: Tensor, bias: Tensor | None = None, approximate: Approximate = "none") -> Tensor:
    """`gelu(x + bias)`, contiguous and in the dtype of x.

    Args:
        x: Of any shape, float32, bfloat16 or float16. It is copied where its last stride is not 1, or its other
            dimensions are not one after another in memory; so is an upstream gradient.
        bias: As long as the last dimension of x, of any of these dtypes.
        approximate: "none" for the error function, "tanh" for the approximation with a hyperbolic tangent.

    Kept for the backward pass: x and bias. The gradient of the bias is summed in float32, each time in one order.
    """
    return _activation(x, bias, gelu_name(approximate))  # type: ignore[no-any-return]


def _silu_reference(x: Tensor, bias: Tensor | None = None) -> Tensor:
    return _reference(x, bias, "silu")


def _silu_why_not(x: Tensor, bias: Tensor | None = None) -> str | None:
    return _why_not(x, bias, "silu")


@fused(reference=_silu_reference, why_not=_silu_why_not)
def bias_silu(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """`silu(x + bias)`, contiguous and in the dtype of x. Arguments and gradients are as of `bias_gelu`."""
    return _activation(x, bias, "silu")  # type: ignore[no-any-return]


def _relu_squared_reference(x: Tensor, bias: Tensor | None = None) -> Tensor:
    return _reference(x, bias, "relu_squared")


def _relu_squared_why_not(x: Tensor, bias: Tensor | None = None) -> str | None:
    return _why_not(x, bias, "relu_squared")


@fused(reference=_relu_squared_reference, why_not=_relu_squared_why_not)
def bias_relu_squared(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """`relu(x + bias) ** 2`, contiguous and in the dtype of x. Arguments and gradients are as of `bias_gelu`."""
    return _activation(x, bias, "relu_squared")  # type: ignore[no-any-return]
