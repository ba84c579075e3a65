"""The launchers of `product`: which kernel multiplies, and the backward pass out of the same products.

A product is `a @ b.T` of two matrices with any strides. On Hopper, factors that can be copied by tiles go to the kernel
in `product_hopper`; all others, and other GPUs, to the portable one. So do results of few tiles, which have smaller
tiles there, and so more programs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nearpeak.kernels.jit import activations, gated, product_hopper_launch, product_portable
from nearpeak.kernels.jit.product_portable import Epilogue, Scales


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str, gated: bool,
    dtype: torch.dtype, tf32: bool, keep: bool, *, config: dict[str, Any] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The result, and what the activation was of, in the dtype of x; an empty tensor where nobody keeps it."""
    epilogue = Epilogue(bias=bias, residual=residual, activation=activation, gated=gated, keep=keep)
    result, kept = _shaped(x, weight, epilogue, dtype)
    _multiply(as_matrix(x), weight, result, kept, epilogue, None, tf32, config)
    return result, x.new_empty(0) if kept is None else kept


def scaled(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, scale_x: Tensor | None,
    scale_weight: Tensor | None, activation: str, gated: bool, dtype: torch.dtype, fast_accumulate: bool, *,
    config: dict[str, Any] | None = None,
) -> Tensor:  # fmt: skip
    """The result of factors of 8 bits and their scales."""
    epilogue = Epilogue(bias=bias, residual=residual, activation=activation, gated=gated, keep=False)
    result, _ = _shaped(x, weight, epilogue, dtype)
    scales = Scales(x, scale_x, weight, scale_weight, fast_accumulate)
    _multiply(as_matrix(x), weight, result, None, epilogue, scales, False, config)
    return result


def backward(
    gradient: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, before: Tensor | None, activation: str,
    gated: bool, tf32: bool, for_x: bool, for_weight: bool, for_bias: bool, *, config: dict[str, Any] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of x, weight and bias, contiguous; empty tensors for what nobody wants."""
    rows = as_matrix(_through_activation(gradient, x, weight, bias, before, activation, gated, tf32)).to(x.dtype)
    by_x = x.new_empty(x.shape if for_x else (0,))
    by_weight = weight.new_empty(weight.shape if for_weight else (0,))
    none = Epilogue()
    if for_x:
        _multiply(rows, weight.t(), by_x, None, none, None, tf32, config)
    if for_weight:
        _multiply(rows.t(), as_matrix(x).t(), by_weight, None, none, None, tf32, config)
    bias_dtype = weight.dtype if bias is None else bias.dtype
    if not for_bias:
        return by_x, by_weight, weight.new_empty(0, dtype=bias_dtype)
    return by_x, by_weight, rows.sum(0, dtype=torch.float32).to(bias_dtype)


def _through_activation(
    gradient: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, before: Tensor | None, activation: str,
    has_gate: bool, tf32: bool,
) -> Tensor:  # fmt: skip
    """The gradient of what the activation was of."""
    if not activation:
        return gradient
    if before is None:
        before, _ = forward(x, weight, bias, None, "", False, x.dtype, tf32, False)
    if has_gate:
        return gated.backward_packed(gradient, before, activation, False)
    return activations.backward(gradient, before, None, activation)


def as_matrix(x: Tensor) -> Tensor:
    """[rows, columns]: a view where one stride leads from each row to the next, and a copy otherwise."""
    return x if x.dim() == 2 else x.reshape(-1 if x.numel() else _count(x), x.shape[-1])


def _count(x: Tensor) -> int:
    """Rows of a tensor without elements."""
    rows = 1
    for size in x.shape[:-1]:
        rows *= size
    return rows


def _shaped(x: Tensor, weight: Tensor, epilogue: Epilogue, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    columns = weight.shape[0]
    result = x.new_empty([*x.shape[:-1], columns // 2 if epilogue.gated else columns], dtype=dtype)
    return result, x.new_empty([*x.shape[:-1], columns]) if epilogue.keep else None


def _multiply(
    a: Tensor, b: Tensor, result: Tensor, kept: Tensor | None, epilogue: Epilogue, scales: Scales | None, tf32: bool,
    config: dict[str, Any] | None,
) -> None:  # fmt: skip
    """Writes a @ b.T and what follows it into `result`, and what the activation is of into `kept`."""
    if not result.numel():
        return
    result = result.view(-1, result.shape[-1])
    kept = None if kept is None else kept.view(-1, kept.shape[-1])
    on_hopper = product_hopper_launch.fills(result) if config is None else "consumers" in config
    if on_hopper and product_hopper_launch.takes(a, b, result, epilogue, scales):
        product_hopper_launch.multiply(a, b, result, kept, epilogue, scales, config)
    else:
        own = config is not None and "block_m" in config  # a configuration of the other kernel says nothing here
        product_portable.multiply(a, b, result, kept, epilogue, scales, tf32, config if own else None)
