"""`add`: two tensors added. torch's own is as fast; it is the smallest complete example of how a kernel is made.

An operation is: a reference in plain torch; `why_not`, the arguments that its kernel does not take; the operators of
torch for its forward and backward pass; and the function that users call. The kernels are in `jit/`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nearpeak.kernels._runtime.operator import Operator
from nearpeak.kernels._runtime.policy import cannot_run, fused


def reference(x: Tensor, y: Tensor) -> Tensor:
    return torch.add(x, y)


def _why_not(x: Tensor, y: Tensor) -> str | None:
    if x.shape != y.shape or x.dtype != y.dtype:
        return "it takes tensors of one shape and dtype"
    return cannot_run(x, y)


def _fake(x: Tensor, y: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    """Nothing to keep: both gradients are that of the sum."""


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
    return gradient, gradient


_add = Operator(
    "add(Tensor x, Tensor y) -> Tensor",
    backends={"nvidia": "add.triton:forward"},
    reference=reference,
    fake=_fake,
    why_not=_why_not,
    setup_context=_setup_context,
    backward=_backward,
)


@fused(reference=reference, why_not=_why_not)
def add(x: Tensor, y: Tensor) -> Tensor:
    """`x + y` for tensors of one shape and dtype; the result is contiguous."""
    return _add(x, y)  # type: ignore[no-any-return]
