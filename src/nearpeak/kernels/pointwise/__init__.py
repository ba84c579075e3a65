"""Pointwise operations: `add`, activations with a bias, gated activations (SwiGLU, GeGLU), dropout with a residual.

All arithmetic is in float32 and rounded once. torch rounds after each of its operations, so that results in 16 bits are
a little nearer to the exact ones here, and not equal to torch's to the last bit.

An operation is: a reference in plain torch; `why_not`, the reason why its kernel does not support some arguments; the
operators of torch for its forward and backward pass; and the function that users call. `add` is the smallest complete
example. The kernels are in `pointwise.triton`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from nearpeak.errors import UsageError
from nearpeak.kernels._runtime.operator import Operator
from nearpeak.kernels._runtime.philox import keep_mask, keep_scale
from nearpeak.kernels._runtime.policy import cannot_run, fused

Approximate = Literal["none", "tanh"]


def _empty(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _shapes(*tensors: Tensor) -> str:
    return " and ".join(str(tuple(tensor.shape)) for tensor in tensors)


def _why_not_floats(*tensors: Tensor | None) -> str | None:
    for tensor in tensors:
        if tensor is not None and not tensor.is_floating_point():
            return f"it takes floating-point numbers, and this is {str(tensor.dtype).removeprefix('torch.')}"
    return cannot_run(*tensors)


def _autograd_gradients(
    function: Callable[..., Tensor], tensors: Sequence[Tensor], gradient: Tensor, *settings: Any
) -> list[Tensor]:
    """The gradients of tensors by autograd, contiguous: the reference of a backward pass."""
    with torch.enable_grad():
        leaves = [tensor.detach().requires_grad_() for tensor in tensors]
        result = function(*leaves, *settings)
    return [leaf.contiguous() for leaf in torch.autograd.grad(result, leaves, gradient)]


def _add_reference(x: Tensor, y: Tensor) -> Tensor:
    return torch.add(x, y)


def _add_why_not(x: Tensor, y: Tensor) -> str | None:
    if x.shape != y.shape or x.dtype != y.dtype:
        return "it takes tensors of one shape and dtype"
    return cannot_run(x, y)


def _add_setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    """Saves nothing: both gradients are that of the sum."""


_add = Operator(
    "add(Tensor x, Tensor y) -> Tensor",
    backends={"nvidia": "pointwise.triton:add"},
    reference=_add_reference,
    fake=lambda x, y: _empty(x),
    why_not=_add_why_not,
    setup_context=_add_setup_context,
    backward=lambda ctx, gradient: (gradient, gradient),
)


@fused(reference=_add_reference, why_not=_add_why_not)
def add(x: Tensor, y: Tensor) -> Tensor:
    """`x + y` for tensors of one shape and dtype; the result is contiguous.

    torch's own addition is as fast; this is an example of how a kernel is made.
    """
    return _add(x, y)  # type: ignore[no-any-return]


def gelu_name(approximate: str) -> str:
    """The kernels' name of a form of GELU."""
    if approximate not in ("none", "tanh"):
        raise UsageError(f'approximate is "none" or "tanh", and not {approximate!r}.')
    return "gelu" if approximate == "none" else "gelu_tanh"


def apply_activation(x: Tensor, activation: str) -> Tensor:
    """The activation in plain torch."""
    if activation == "silu":
        return functional.silu(x)
    if activation == "relu_squared":
        return functional.relu(x).square()
    return functional.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


def _activation_reference(x: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    return apply_activation(x if bias is None else x + bias, activation).to(x.dtype)


def _activation_why_not(x: Tensor, bias: Tensor | None, activation: str) -> str | None:
    if bias is not None and (bias.dim() != 1 or not x.dim() or bias.shape[0] != x.shape[-1]):
        return f"it takes a bias as long as the last dimension, and this has the shapes {_shapes(x, bias)}"
    return _why_not_floats(x, bias)


def _activation_setup_context(ctx: Any, inputs: tuple[Tensor, Tensor | None, str], output: Tensor) -> None:
    x, bias, ctx.activation = inputs
    ctx.save_for_backward(x, bias)


def _activation_gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, bias = ctx.saved_tensors
    if bias is None or not ctx.needs_input_grad[1]:
        return _activation_backward(gradient, x, bias, ctx.activation), None, None
    return *_activation_backward_with_bias(gradient, x, bias, ctx.activation), None


_activation_backward = Operator(
    "activation_backward(Tensor gradient, Tensor x, Tensor? bias, str activation) -> Tensor",
    backends={"nvidia": "pointwise.triton:activation_backward"},
    reference=lambda gradient, x, *rest: _autograd_gradients(_activation_reference, [x], gradient, *rest)[0],
    fake=lambda gradient, x, bias, activation: _empty(x),
    why_not=lambda gradient, *rest: cannot_run(gradient) or _activation_why_not(*rest),
)
_activation_backward_with_bias = Operator(
    "activation_backward_with_bias(Tensor gradient, Tensor x, Tensor bias, str activation) -> (Tensor, Tensor)",
    backends={"nvidia": "pointwise.triton:activation_backward_with_bias"},
    reference=lambda gradient, x, bias, activation: tuple(
        _autograd_gradients(_activation_reference, [x, bias], gradient, activation)
    ),
    fake=lambda gradient, x, bias, activation: (_empty(x), _empty(bias)),
    why_not=lambda gradient, *rest: cannot_run(gradient) or _activation_why_not(*rest),
)
_activation = Operator(
    "activation(Tensor x, Tensor? bias, str activation) -> Tensor",
    backends={"nvidia": "pointwise.triton:activation_forward"},
    reference=_activation_reference,
    fake=lambda x, bias, activation: _empty(x),
    why_not=_activation_why_not,
    setup_context=_activation_setup_context,
    backward=_activation_gradients,
)


def _gelu_reference(x: Tensor, bias: Tensor | None = None, approximate: Approximate = "none") -> Tensor:
    return _activation_reference(x, bias, gelu_name(approximate))


def _gelu_why_not(x: Tensor, bias: Tensor | None = None, approximate: Approximate = "none") -> str | None:
    return _activation_why_not(x, bias, gelu_name(approximate))


@fused(reference=_gelu_reference, why_not=_gelu_why_not)
def bias_gelu(x: Tensor, bias: Tensor | None = None, approximate: Approximate = "none") -> Tensor:
    """`gelu(x + bias)`, contiguous and in the dtype of x.

    Args:
        x: Any shape, float32, bfloat16 or float16. It is copied if its last stride is not 1, or if its rows are not one
            stride apart; so is an upstream gradient.
        bias: As long as the last dimension of x, any of these dtypes.
        approximate: "none" for the error function, "tanh" for the approximation with a hyperbolic tangent.

    Bytes moved: forward reads x and writes the result; backward reads the gradient and x and writes the gradient of x.
    x and bias are saved for the backward pass. The gradient of the bias is summed in float32, always in the same order.
    """
    return _activation(x, bias, gelu_name(approximate))  # type: ignore[no-any-return]


def _silu_reference(x: Tensor, bias: Tensor | None = None) -> Tensor:
    return _activation_reference(x, bias, "silu")


def _silu_why_not(x: Tensor, bias: Tensor | None = None) -> str | None:
    return _activation_why_not(x, bias, "silu")


@fused(reference=_silu_reference, why_not=_silu_why_not)
def bias_silu(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """`silu(x + bias)`, contiguous and in the dtype of x. Arguments and gradients are those of `bias_gelu`."""
    return _activation(x, bias, "silu")  # type: ignore[no-any-return]


def _relu_squared_reference(x: Tensor, bias: Tensor | None = None) -> Tensor:
    return _activation_reference(x, bias, "relu_squared")


def _relu_squared_why_not(x: Tensor, bias: Tensor | None = None) -> str | None:
    return _activation_why_not(x, bias, "relu_squared")


@fused(reference=_relu_squared_reference, why_not=_relu_squared_why_not)
def bias_relu_squared(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """`relu(x + bias) ** 2`, contiguous and in the dtype of x. Arguments and gradients are those of `bias_gelu`."""
    return _activation(x, bias, "relu_squared")  # type: ignore[no-any-return]


def _gated_reference(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    return apply_activation(gate, activation) * up


def _unpack(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    if not x.dim() or x.shape[-1] % 2:
        raise UsageError(f"A packed tensor has an even last dimension, and this has the shape {tuple(x.shape)}.")
    if interleaved:
        return x[..., ::2], x[..., 1::2]
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


def _gated_packed_reference(x: Tensor, activation: str, interleaved: bool) -> Tensor:
    return _gated_reference(*_unpack(x, interleaved), activation).contiguous()


def gated_packed_backward_reference(gradient: Tensor, x: Tensor, activation: str, interleaved: bool) -> Tensor:
    return _autograd_gradients(_gated_packed_reference, [x], gradient, activation, interleaved)[0]


def _gated_why_not(gate: Tensor, up: Tensor, activation: str) -> str | None:
    if gate.shape != up.shape or gate.dtype != up.dtype:
        return "it takes tensors of one shape and dtype"
    return _why_not_floats(gate, up)


def _gated_packed_why_not(x: Tensor, activation: str, interleaved: bool) -> str | None:
    if not x.dim() or x.shape[-1] % 2:
        return f"it takes an even last dimension, and this has the shape {tuple(x.shape)}"
    return _why_not_floats(x)


def _gated_setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, str], output: Tensor) -> None:
    gate, up, ctx.activation = inputs
    ctx.save_for_backward(gate, up)


def _gated_gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
    return *_gated_backward(gradient, *ctx.saved_tensors, ctx.activation), None


def _gated_packed_setup_context(ctx: Any, inputs: tuple[Tensor, str, bool], output: Tensor) -> None:
    x, ctx.activation, ctx.interleaved = inputs
    ctx.save_for_backward(x)


def _gated_packed_gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    return gated_packed_backward(gradient, *ctx.saved_tensors, ctx.activation, ctx.interleaved), None, None


_gated_backward = Operator(
    "gated_backward(Tensor gradient, Tensor gate, Tensor up, str activation) -> (Tensor, Tensor)",
    backends={"nvidia": "pointwise.triton:gated_backward"},
    reference=lambda gradient, gate, up, activation: tuple(
        _autograd_gradients(_gated_reference, [gate, up], gradient, activation)
    ),
    fake=lambda gradient, gate, up, activation: (_empty(gate), _empty(up)),
    why_not=lambda gradient, *rest: _gated_why_not(*rest) or _why_not_floats(gradient),
)
gated_packed_backward = Operator(
    "gated_packed_backward(Tensor gradient, Tensor x, str activation, bool interleaved) -> Tensor",
    backends={"nvidia": "pointwise.triton:gated_packed_backward"},
    reference=gated_packed_backward_reference,
    fake=lambda gradient, x, activation, interleaved: _empty(x),
    why_not=lambda gradient, *rest: _gated_packed_why_not(*rest) or _why_not_floats(gradient),
)
_gated = Operator(
    "gated(Tensor gate, Tensor up, str activation) -> Tensor",
    backends={"nvidia": "pointwise.triton:gated_forward"},
    reference=lambda gate, up, activation: _gated_reference(gate, up, activation).contiguous(),
    fake=lambda gate, up, activation: _empty(gate),
    why_not=_gated_why_not,
    setup_context=_gated_setup_context,
    backward=_gated_gradients,
)
_gated_packed = Operator(
    "gated_packed(Tensor x, str activation, bool interleaved) -> Tensor",
    backends={"nvidia": "pointwise.triton:gated_packed_forward"},
    reference=_gated_packed_reference,
    fake=lambda x, activation, interleaved: x.new_empty([*x.shape[:-1], x.shape[-1] // 2]),
    why_not=_gated_packed_why_not,
    setup_context=_gated_packed_setup_context,
    backward=_gated_packed_gradients,
)


def _swiglu_reference(gate: Tensor, up: Tensor) -> Tensor:
    return _gated_reference(gate, up, "silu")


def _swiglu_why_not(gate: Tensor, up: Tensor) -> str | None:
    return _gated_why_not(gate, up, "silu")


@fused(reference=_swiglu_reference, why_not=_swiglu_why_not)
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up`, contiguous.

    Args:
        gate, up: One shape and dtype: float32, bfloat16 or float16. Rows may be strided, as in `x[..., :n]`; a tensor
            is copied if its last stride is not 1, or if its rows are not one stride apart.

    Bytes moved: forward reads both and writes the result; backward reads the gradient and both and writes both
    gradients, in one pass. Both are saved for the backward pass. If they are halves of one tensor, `swiglu_packed` also
    writes their gradients into one.
    """
    return _gated(gate, up, "silu")  # type: ignore[no-any-return]


def _geglu_reference(gate: Tensor, up: Tensor, approximate: Approximate = "none") -> Tensor:
    return _gated_reference(gate, up, gelu_name(approximate))


def _geglu_why_not(gate: Tensor, up: Tensor, approximate: Approximate = "none") -> str | None:
    return _gated_why_not(gate, up, gelu_name(approximate))


@fused(reference=_geglu_reference, why_not=_geglu_why_not)
def geglu(gate: Tensor, up: Tensor, approximate: Approximate = "none") -> Tensor:
    """`gelu(gate, approximate=approximate) * up`, contiguous. Arguments and gradients are those of `swiglu`."""
    return _gated(gate, up, gelu_name(approximate))  # type: ignore[no-any-return]


def _swiglu_packed_reference(x: Tensor, *, interleaved: bool = False) -> Tensor:
    return _gated_packed_reference(x, "silu", interleaved)


def _swiglu_packed_why_not(x: Tensor, *, interleaved: bool = False) -> str | None:
    return _gated_packed_why_not(x, "silu", interleaved)


@fused(reference=_swiglu_packed_reference, why_not=_swiglu_packed_why_not)
def swiglu_packed(x: Tensor, *, interleaved: bool = False) -> Tensor:
    """`silu(gate) * up` of a tensor whose last dimension contains both, contiguous.

    Args:
        x: float32, bfloat16 or float16. It is copied if its last stride is not 1, or if its rows are not one stride
            apart.
        interleaved: Whether gate and up alternate: `x[..., ::2]` and `x[..., 1::2]`. Otherwise they are the first and
            the second half.

    x is saved for the backward pass. The gradient is one tensor like x, written in one pass.
    """
    return _gated_packed(x, "silu", interleaved)  # type: ignore[no-any-return]


def _geglu_packed_reference(x: Tensor, approximate: Approximate = "none", *, interleaved: bool = False) -> Tensor:
    return _gated_packed_reference(x, gelu_name(approximate), interleaved)


def _geglu_packed_why_not(x: Tensor, approximate: Approximate = "none", *, interleaved: bool = False) -> str | None:
    return _gated_packed_why_not(x, gelu_name(approximate), interleaved)


@fused(reference=_geglu_packed_reference, why_not=_geglu_packed_why_not)
def geglu_packed(x: Tensor, approximate: Approximate = "none", *, interleaved: bool = False) -> Tensor:
    """`gelu(gate, approximate=approximate) * up` of a tensor whose last dimension contains both, as `swiglu_packed`."""
    return _gated_packed(x, gelu_name(approximate), interleaved)  # type: ignore[no-any-return]


class SwiGLU(nn.Module):
    """`swiglu_packed` as a module, after a linear layer with twice as many outputs as the next one has inputs."""

    def __init__(self, *, interleaved: bool = False) -> None:
        super().__init__()
        self.interleaved = interleaved

    def forward(self, x: Tensor) -> Tensor:
        return swiglu_packed(x, interleaved=self.interleaved)

    def extra_repr(self) -> str:
        return f"interleaved={self.interleaved}"


class GeGLU(nn.Module):
    """`geglu_packed` as a module, after a linear layer with twice as many outputs as the next one has inputs."""

    def __init__(self, approximate: Approximate = "none", *, interleaved: bool = False) -> None:
        super().__init__()
        gelu_name(approximate)
        self.approximate: Approximate = approximate
        self.interleaved = interleaved

    def forward(self, x: Tensor) -> Tensor:
        return geglu_packed(x, self.approximate, interleaved=self.interleaved)

    def extra_repr(self) -> str:
        return f"approximate={self.approximate!r}, interleaved={self.interleaved}"


def _check_dropout(x: Tensor, residual: Tensor, p: float) -> None:
    if not 0.0 <= p <= 1.0:
        raise UsageError(f"The probability of dropout is from 0 to 1, and this is {p}.")
    if residual.shape != x.shape or not (x.is_floating_point() and residual.is_floating_point()):
        raise UsageError(
            f"dropout_add takes two floating-point tensors of one shape, and these are {x.dtype} of shape"
            f" {tuple(x.shape)} and {residual.dtype} of shape {tuple(residual.shape)}."
        )


def _dropout_reference(x: Tensor, seed: Tensor, p: float, dtype: torch.dtype) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    return torch.where(keep_mask(seed, x.shape, p), x.to(wide) * keep_scale(p), 0.0).to(dtype)


def _dropout_add_operator_reference(x: Tensor, residual: Tensor, seed: Tensor, p: float) -> Tensor:
    dtype = torch.promote_types(x.dtype, residual.dtype)
    wide = torch.promote_types(dtype, torch.float32)
    return (_dropout_reference(x, seed, p, wide) + residual.to(wide)).to(dtype).contiguous()


def dropout_add_reference(
    x: Tensor, residual: Tensor, p: float = 0.5, *, training: bool = True, seed: Tensor | int | None = None
) -> Tensor:
    _check_dropout(x, residual, p)
    if not training or p == 0.0:
        return x + residual
    return _dropout_add_operator_reference(x, residual, seed_tensor(seed, x.device), p)


def _dropout_add_why_not(
    x: Tensor, residual: Tensor, p: float = 0.5, *, training: bool = True, seed: Tensor | int | None = None
) -> str | None:
    _check_dropout(x, residual, p)
    return cannot_run(x, residual, seed if isinstance(seed, Tensor) else None)


def seed_tensor(seed: Tensor | int | None, device: torch.device) -> Tensor:
    """A seed on the device. It is created there, without a copy, so that a CUDA graph can record it."""
    if isinstance(seed, Tensor):
        if seed.numel() != 1 or seed.dtype != torch.int64:
            raise UsageError(f"A seed is one number of int64, and this is {seed.dtype} of shape {tuple(seed.shape)}.")
        return seed
    if seed is None:
        return torch.randint(0, 2**63 - 1, (), dtype=torch.int64, device=device)
    if not -(2**63) <= seed < 2**63:
        raise UsageError(f"A seed is a number of 64 bits, and this is {seed}.")
    return torch.full((), seed, dtype=torch.int64, device=device)


def _dropout_add_fake(x: Tensor, residual: Tensor, seed: Tensor, p: float) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype))


def _dropout_add_setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, float], output: Tensor) -> None:
    x, residual, seed, p = inputs
    ctx.save_for_backward(seed)
    ctx.p, ctx.dtypes = p, (x.dtype, residual.dtype)


def _dropout_add_gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    (seed,) = ctx.saved_tensors
    for_x, for_residual = ctx.needs_input_grad[:2]
    return (
        _dropout_backward(gradient, seed, ctx.p, ctx.dtypes[0]) if for_x else None,
        gradient.to(ctx.dtypes[1]) if for_residual else None,
        None,
        None,
    )


_dropout_backward = Operator(
    "dropout_add_backward(Tensor gradient, Tensor seed, float p, ScalarType dtype) -> Tensor",
    backends={"nvidia": "pointwise.triton:dropout_backward"},
    reference=lambda gradient, seed, p, dtype: _dropout_reference(gradient, seed, p, dtype).contiguous(),
    fake=lambda gradient, seed, p, dtype: gradient.new_empty(gradient.shape, dtype=dtype),
    why_not=lambda gradient, seed, p, dtype: cannot_run(gradient, seed),
)
_dropout_add = Operator(
    "dropout_add(Tensor x, Tensor residual, Tensor seed, float p) -> Tensor",
    backends={"nvidia": "pointwise.triton:dropout_add"},
    reference=_dropout_add_operator_reference,
    fake=_dropout_add_fake,
    why_not=lambda x, residual, seed, p: cannot_run(x, residual, seed),
    setup_context=_dropout_add_setup_context,
    backward=_dropout_add_gradients,
)


@fused(reference=dropout_add_reference, why_not=_dropout_add_why_not)
def dropout_add(
    x: Tensor, residual: Tensor, p: float = 0.5, *, training: bool = True, seed: Tensor | int | None = None
) -> Tensor:
    """`dropout(x, p) + residual`, computed in float32 and rounded once, in the dtype that torch gives such a sum.

    Args:
        x: Each element becomes 0 with probability p, and x / (1 - p) otherwise.
        residual: The shape of x. Tensors that are not contiguous are copied first.
        p: From 0 to 1.
        training: If False, only adds.
        seed: Determines the mask, with the shape and p: a number, or a tensor of one int64 on the device of x. None
            draws one from torch's generator of that device, which `torch.manual_seed` makes reproducible.

    The mask is not stored: it depends on the seed and the index of an element alone, not on layout, dtype or device.
    Bytes moved: forward reads x and the residual and writes the sum; backward reads the gradient and writes that of x.
    The seed is saved for the backward pass.
    """
    if not training or p == 0.0:
        return x + residual
    return _dropout_add(x, residual, seed_tensor(seed, x.device), p)  # type: ignore[no-any-return]


class DropoutAdd(torch.nn.Dropout):
    """`torch.nn.Dropout` with an addition: `module(x, residual)`, by `dropout_add`."""

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:  # type: ignore[override]
        return dropout_add(x, residual, self.p, training=self.training)
