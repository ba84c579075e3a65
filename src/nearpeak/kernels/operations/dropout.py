"""`dropout_add`: dropout and the addition to the residual stream in one kernel, without a mask in memory.

Bytes that must be moved: forward reads x and the residual and writes the sum; backward reads the gradient and writes
that of x. The gradient of the residual is the gradient itself. The mask is made again from the seed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nearpeak.errors import UsageError
from nearpeak.kernels.operator import Operator
from nearpeak.kernels.philox import kept, scale_of
from nearpeak.kernels.policy import cannot_run, fused


def _check(x: Tensor, residual: Tensor, p: float) -> None:
    if not 0.0 <= p <= 1.0:
        raise UsageError(f"The probability of dropout is from 0 to 1, and this is {p}.")
    if residual.shape != x.shape or not (x.is_floating_point() and residual.is_floating_point()):
        raise UsageError(
            f"dropout_add takes two floating-point tensors of one shape, and these are {x.dtype} of shape"
            f" {tuple(x.shape)} and {residual.dtype} of shape {tuple(residual.shape)}."
        )


def _dropped(x: Tensor, seed: Tensor, p: float, dtype: torch.dtype) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    return torch.where(kept(seed, x.shape, p), x.to(wide) * scale_of(p), 0.0).to(dtype)


def _operator_reference(x: Tensor, residual: Tensor, seed: Tensor, p: float) -> Tensor:
    dtype = torch.promote_types(x.dtype, residual.dtype)
    wide = torch.promote_types(dtype, torch.float32)
    return (_dropped(x, seed, p, wide) + residual.to(wide)).to(dtype).contiguous()


def reference(
    x: Tensor, residual: Tensor, p: float = 0.5, *, training: bool = True, seed: Tensor | int | None = None
) -> Tensor:
    _check(x, residual, p)
    if not training or p == 0.0:
        return x + residual
    return _operator_reference(x, residual, seed_of(seed, x.device), p)


def _why_not(
    x: Tensor, residual: Tensor, p: float = 0.5, *, training: bool = True, seed: Tensor | int | None = None
) -> str | None:
    _check(x, residual, p)
    return cannot_run(x, residual, seed if isinstance(seed, Tensor) else None)


def seed_of(seed: Tensor | int | None, device: torch.device) -> Tensor:
    """On the device, and made there: nothing is copied, so that a CUDA graph can have it."""
    if isinstance(seed, Tensor):
        if seed.numel() != 1 or seed.dtype != torch.int64:
            raise UsageError(f"A seed is one number of int64, and this is {seed.dtype} of shape {tuple(seed.shape)}.")
        return seed
    if seed is None:
        return torch.randint(0, 2**63 - 1, (), dtype=torch.int64, device=device)
    if not -(2**63) <= seed < 2**63:
        raise UsageError(f"A seed is a number of 64 bits, and this is {seed}.")
    return torch.full((), seed, dtype=torch.int64, device=device)


def _fake(x: Tensor, residual: Tensor, seed: Tensor, p: float) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype))


def _setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, float], output: Tensor) -> None:
    x, residual, seed, p = inputs
    ctx.save_for_backward(seed)
    ctx.p, ctx.dtypes = p, (x.dtype, residual.dtype)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
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
    launch="dropout:dropout_backward",
    reference=lambda gradient, seed, p, dtype: _dropped(gradient, seed, p, dtype).contiguous(),
    fake=lambda gradient, seed, p, dtype: gradient.new_empty(gradient.shape, dtype=dtype),
    why_not=lambda gradient, seed, p, dtype: cannot_run(gradient, seed),
)
_dropout_add = Operator(
    "dropout_add(Tensor x, Tensor residual, Tensor seed, float p) -> Tensor",
    launch="dropout:dropout_add",
    reference=_operator_reference,
    fake=_fake,
    why_not=lambda x, residual, seed, p: cannot_run(x, residual, seed),
    setup_context=_setup_context,
    backward=_backward,
)


@fused(reference=reference, why_not=_why_not)
def dropout_add(
    x: Tensor, residual: Tensor, p: float = 0.5, *, training: bool = True, seed: Tensor | int | None = None
) -> Tensor:
    """`dropout(x, p) + residual`, computed in float32 and rounded once, in the dtype that torch gives such a sum.

    Args:
        x: Each element is 0 with probability p, and x / (1 - p) otherwise.
        residual: Of the shape of x. Tensors that are not contiguous are copied first.
        p: From 0 to 1.
        training: False adds alone.
        seed: What decides on the mask, with the shape and p: a number, or a tensor of one int64 on the device of x.
            None draws one from torch's generator of that device, which `torch.manual_seed` makes repeatable.

    The mask depends on the place of an element alone, not on layout, dtype or device. For the backward pass the seed is
    kept.
    """
    if not training or p == 0.0:
        return x + residual
    return _dropout_add(x, residual, seed_of(seed, x.device), p)  # type: ignore[no-any-return]


class DropoutAdd(torch.nn.Dropout):
    """`torch.nn.Dropout` with an addition: `module(x, residual)`, by `dropout_add`."""

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:  # type: ignore[override]
        return dropout_add(x, residual, self.p, training=self.training)
