"""`swiglu`, `geglu`, and the same from packed tensors: an activation of one factor times the other, in one pass.

All is computed in float32 and rounded once. torch's `silu(gate) * up` rounds the activation too: in 16 bits results
here are nearer to the true ones, and not the same as torch's to the last bit.

Bytes moved: forward reads both factors and writes the result; backward reads the gradient and both factors and writes
both gradients, five tensors in one pass. The two factors are kept for the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from nearpeak.errors import UsageError
from nearpeak.kernels.operations.activations import Approximate, apply, gelu_name
from nearpeak.kernels.operator import Operator
from nearpeak.kernels.policy import cannot_run, fused


def _reference(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    return apply(gate, activation) * up


def _parts(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    if not x.dim() or x.shape[-1] % 2:
        raise UsageError(f"A packed tensor has an even last dimension, and this has the shape {tuple(x.shape)}.")
    if interleaved:
        return x[..., ::2], x[..., 1::2]
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


def _reference_packed(x: Tensor, activation: str, interleaved: bool) -> Tensor:
    return _reference(*_parts(x, interleaved), activation).contiguous()


def _reference_backward(gradient: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():
        gate, up = gate.detach().requires_grad_(), up.detach().requires_grad_()
        result = _reference(gate, up, activation)
    gate_gradient, up_gradient = torch.autograd.grad(result, (gate, up), gradient)
    return gate_gradient.contiguous(), up_gradient.contiguous()


def packed_backward_reference(gradient: Tensor, x: Tensor, activation: str, interleaved: bool) -> Tensor:
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        result = _reference_packed(x, activation, interleaved)
    return torch.autograd.grad(result, x, gradient)[0].contiguous()


def _why_not(gate: Tensor, up: Tensor, activation: str) -> str | None:
    if gate.shape != up.shape or gate.dtype != up.dtype:
        return "it takes tensors of one shape and dtype"
    return _why_not_floats(gate, up)


def _why_not_packed(x: Tensor, activation: str, interleaved: bool) -> str | None:
    if not x.dim() or x.shape[-1] % 2:
        return f"it takes an even last dimension, and this has the shape {tuple(x.shape)}"
    return _why_not_floats(x)


def _why_not_floats(*tensors: Tensor) -> str | None:
    if not all(tensor.is_floating_point() for tensor in tensors):
        return "it takes numbers with a fraction"
    return cannot_run(*tensors)


def _why_not_backward(gradient: Tensor, gate: Tensor, up: Tensor, activation: str) -> str | None:
    return _why_not(gate, up, activation) or _why_not_floats(gradient)


def _why_not_backward_packed(gradient: Tensor, x: Tensor, activation: str, interleaved: bool) -> str | None:
    return _why_not_packed(x, activation, interleaved) or _why_not_floats(gradient)


def _empty(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, str], output: Tensor) -> None:
    gate, up, ctx.activation = inputs
    ctx.save_for_backward(gate, up)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
    return *_gated_backward(gradient, *ctx.saved_tensors, ctx.activation), None


def _setup_context_packed(ctx: Any, inputs: tuple[Tensor, str, bool], output: Tensor) -> None:
    x, ctx.activation, ctx.interleaved = inputs
    ctx.save_for_backward(x)


def _backward_packed(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    return packed_backward(gradient, *ctx.saved_tensors, ctx.activation, ctx.interleaved), None, None


_gated_backward = Operator(
    "gated_backward(Tensor gradient, Tensor gate, Tensor up, str activation) -> (Tensor, Tensor)",
    launch="gated:backward",
    reference=_reference_backward,
    fake=lambda gradient, gate, up, activation: (_empty(gate), _empty(up)),
    why_not=_why_not_backward,
)
packed_backward = Operator(
    "gated_packed_backward(Tensor gradient, Tensor x, str activation, bool interleaved) -> Tensor",
    launch="gated:backward_packed",
    reference=packed_backward_reference,
    fake=lambda gradient, x, activation, interleaved: _empty(x),
    why_not=_why_not_backward_packed,
)
_gated = Operator(
    "gated(Tensor gate, Tensor up, str activation) -> Tensor",
    launch="gated:forward",
    reference=lambda gate, up, activation: _reference(gate, up, activation).contiguous(),
    fake=lambda gate, up, activation: _empty(gate),
    why_not=_why_not,
    setup_context=_setup_context,
    backward=_backward,
)
_gated_packed = Operator(
    "gated_packed(Tensor x, str activation, bool interleaved) -> Tensor",
    launch="gated:forward_packed",
    reference=_reference_packed,
    fake=lambda x, activation, interleaved: x.new_empty([*x.shape[:-1], x.shape[-1] // 2]),
    why_not=_why_not_packed,
    setup_context=_setup_context_packed,
    backward=_backward_packed,
)


def _swiglu_reference(gate: Tensor, up: Tensor) -> Tensor:
    return _reference(gate, up, "silu")


def _swiglu_why_not(gate: Tensor, up: Tensor) -> str | None:
    return _why_not(gate, up, "silu")


@fused(reference=_swiglu_reference, why_not=_swiglu_why_not)
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up`, contiguous.

    Args:
        gate, up: Of one shape and dtype, float32, bfloat16 or float16. Rows may be apart, as in `x[..., :n]`; a tensor
            is copied where its last stride is not 1, or its other dimensions are not one after another in memory.

    Kept for the backward pass: both. Where they are halves of one tensor, `swiglu_packed` also writes their gradients
    into one.
    """
    return _gated(gate, up, "silu")  # type: ignore[no-any-return]


def _geglu_reference(gate: Tensor, up: Tensor, approximate: Approximate = "none") -> Tensor:
    return _reference(gate, up, gelu_name(approximate))


def _geglu_why_not(gate: Tensor, up: Tensor, approximate: Approximate = "none") -> str | None:
    return _why_not(gate, up, gelu_name(approximate))


@fused(reference=_geglu_reference, why_not=_geglu_why_not)
def geglu(gate: Tensor, up: Tensor, approximate: Approximate = "none") -> Tensor:
    """`gelu(gate, approximate=approximate) * up`, contiguous. Arguments and gradients are as of `swiglu`."""
    return _gated(gate, up, gelu_name(approximate))  # type: ignore[no-any-return]


def _swiglu_packed_reference(x: Tensor, *, interleaved: bool = False) -> Tensor:
    return _reference_packed(x, "silu", interleaved)


def _swiglu_packed_why_not(x: Tensor, *, interleaved: bool = False) -> str | None:
    return _why_not_packed(x, "silu", interleaved)


@fused(reference=_swiglu_packed_reference, why_not=_swiglu_packed_why_not)
def swiglu_packed(x: Tensor, *, interleaved: bool = False) -> Tensor:
    """`silu(gate) * up` of a tensor whose last dimension holds both, contiguous.

    Args:
        x: float32, bfloat16 or float16. It is copied where its last stride is not 1, or its other dimensions are not
            one after another in memory.
        interleaved: Whether gate and up take turns, `x[..., ::2]` and `x[..., 1::2]`. Else they are the first and the
            second half.

    Kept for the backward pass: x. The gradient is one tensor like x, written in one pass.
    """
    return _gated_packed(x, "silu", interleaved)  # type: ignore[no-any-return]


def _geglu_packed_reference(x: Tensor, approximate: Approximate = "none", *, interleaved: bool = False) -> Tensor:
    return _reference_packed(x, gelu_name(approximate), interleaved)


def _geglu_packed_why_not(x: Tensor, approximate: Approximate = "none", *, interleaved: bool = False) -> str | None:
    return _why_not_packed(x, gelu_name(approximate), interleaved)


@fused(reference=_geglu_packed_reference, why_not=_geglu_packed_why_not)
def geglu_packed(x: Tensor, approximate: Approximate = "none", *, interleaved: bool = False) -> Tensor:
    """`gelu(gate, approximate=approximate) * up` of a tensor whose last dimension holds both, as `swiglu_packed`."""
    return _gated_packed(x, gelu_name(approximate), interleaved)  # type: ignore[no-any-return]


class SwiGLU(nn.Module):
    """`swiglu_packed` as a module, to come after a linear layer with twice as many results as the next one takes."""

    def __init__(self, *, interleaved: bool = False) -> None:
        super().__init__()
        self.interleaved = interleaved

    def forward(self, x: Tensor) -> Tensor:
        return swiglu_packed(x, interleaved=self.interleaved)

    def extra_repr(self) -> str:
        return f"interleaved={self.interleaved}"


class GeGLU(nn.Module):
    """`geglu_packed` as a module, to come after a linear layer with twice as many results as the next one takes."""

    def __init__(self, approximate: Approximate = "none", *, interleaved: bool = False) -> None:
        super().__init__()
        gelu_name(approximate)
        self.approximate: Approximate = approximate
        self.interleaved = interleaved

    def forward(self, x: Tensor) -> Tensor:
        return geglu_packed(x, self.approximate, interleaved=self.interleaved)

    def extra_repr(self) -> str:
        return f"approximate={self.approximate!r}, interleaved={self.interleaved}"
