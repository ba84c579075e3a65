"""`product`: a matrix product with what follows it done before the result is written, and `Linear`, the layer.

Bytes moved: forward reads x and the weight and writes the result; bias, activation, gate and scales cost no pass over
memory of their own, a residual is read once. Where a gradient is wanted, what the activation was of is written too, in
the dtype of x: computing it again would take a product, which costs far more than writing and reading it. The backward
pass turns the gradient into that of the product (two or three tensors read, one written) and multiplies twice.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from nearpeak.kernels.operations import product_operators as operators
from nearpeak.kernels.operations.product_arguments import FLOAT8, check, dequantised, kind_of_scales, result_dtype
from nearpeak.kernels.policy import FLOATS, cannot_run, fused, too_old

Activation = Literal["gelu", "gelu_tanh", "relu", "relu_squared", "silu"]
_OLDEST_FOR_FLOAT8 = (8, 9)


def reference(
    x: Tensor, weight: Tensor, *, bias: Tensor | None = None, activation: Activation | None = None,
    gated: bool = False, residual: Tensor | None = None, scale_x: Tensor | None = None,
    scale_weight: Tensor | None = None, fast_accumulate: bool = False, recompute: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    check(x, weight, bias, activation, gated, residual, scale_x, scale_weight, out_dtype)
    if x.dtype in FLOAT8:
        out_dtype = result_dtype(x, out_dtype)
        x, weight = dequantised(x, scale_x, 1), dequantised(weight, scale_weight, 128)
    before = torch.nn.functional.linear(x, weight, None if bias is None else bias.to(x.dtype))
    return operators.plain_epilogue(before, activation or "", gated, residual).to(out_dtype or before.dtype)


def _why_not(
    x: Tensor, weight: Tensor, *, bias: Tensor | None = None, activation: Activation | None = None,
    gated: bool = False, residual: Tensor | None = None, scale_x: Tensor | None = None,
    scale_weight: Tensor | None = None, fast_accumulate: bool = False, recompute: bool = False,
    out_dtype: torch.dtype | None = None,
) -> str | None:  # fmt: skip
    check(x, weight, bias, activation, gated, residual, scale_x, scale_weight, out_dtype)
    if not x.is_floating_point():
        return f"it takes numbers with a fraction, and this is {x.dtype}"
    if out_dtype is not None and out_dtype not in FLOATS:
        return f"it makes float32, bfloat16 and float16, and not {out_dtype}"
    reason = cannot_run(bias, residual, scale_x, scale_weight)
    if reason is not None:
        return reason
    if x.dtype in FLOAT8:
        if weight.dtype != torch.float8_e4m3fn or x.dtype != torch.float8_e4m3fn:
            return "of 8 bits it takes float8_e4m3fn alone"
        if kind_of_scales(x, scale_x, weight, scale_weight) is None:
            return "it takes scales of blocks for both factors, or for neither"
        if torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in (bias, residual)):
            return "a product of 8 bits has no derivatives"
        return cannot_run(x, weight, dtypes=FLOAT8) or too_old(x.device, _OLDEST_FOR_FLOAT8)
    if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
        return "x and the weight have one dtype, as torch's linear needs it"
    return cannot_run(x, weight, bias, residual)


def _as_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """As torch's linear takes them: in the dtype of autocast, where that is on."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(one.to(dtype) for one in tensors)


def _allows_tf32() -> bool:
    return torch.get_float32_matmul_precision() != "highest"


_allows_tf32._dynamo_marked_constant = True  # type: ignore[attr-defined]  # compiled code is guarded by it anyway


@fused(reference=reference, why_not=_why_not, remembered=False)
def product(
    x: Tensor, weight: Tensor, *, bias: Tensor | None = None, activation: Activation | None = None,
    gated: bool = False, residual: Tensor | None = None, scale_x: Tensor | None = None,
    scale_weight: Tensor | None = None, fast_accumulate: bool = False, recompute: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """`activation(x @ weight.T + bias) + residual`, contiguous; with a gate `activation(gate) * up + residual`.

    All after the product is computed from its sums in float32 and rounded once. torch rounds after each step: results
    of 16 bits are a little nearer to the true ones here, and not the same to the last bit.

    Args:
        x: [..., features], float32, bfloat16, float16, or float8_e4m3fn.
        weight: [results, features] in the dtype of x, as of `torch.nn.functional.linear`. Both factors may have any
            strides; on Hopper, those whose rows or columns lie next to each other, 16 bytes aligned, are the fast ones.
        bias: [results], of any floating point dtype.
        activation: "gelu" (by the error function), "gelu_tanh", "relu", "relu_squared" or "silu".
        gated: Whether the first half of the results is the gate of the second, as in SwiGLU ("silu") and GeGLU
            ("gelu"); the result is half as wide.
        residual: Added in the end, of the shape of the result.
        scale_x, scale_weight: float32 factors of values of 8 bits, as `quantise` returns them: for a whole tensor, for
            each row, or x by blocks of (1, 128) and the weight by blocks of (128, 128).
        fast_accumulate: Of 8 bits, sum up in the tensor cores alone, which keep 14 bits; else sums of 128 products are
            added in float32, as for scales of blocks always.
        recompute: Keep nothing of the product for the backward pass; it is computed again there.
        out_dtype: The dtype of the result; by default that of x, and bfloat16 for values of 8 bits.

    Numbers of float32 are multiplied as such, and by TF32 where `torch.set_float32_matmul_precision` allows it. Sums
    are made in one order in every run. Kept for the backward pass: x, the weight and, with an activation, what it was
    of. Values of 8 bits have no derivatives.
    """
    dtype = result_dtype(x, out_dtype)
    if x.dtype in FLOAT8:
        return operators.scaled(  # type: ignore[no-any-return]
            x, weight, bias, residual, scale_x, scale_weight, activation or "", gated, dtype, fast_accumulate
        )
    x, weight = _as_autocast(x, weight)
    dtype = out_dtype or x.dtype
    tf32 = x.dtype == torch.float32 and _allows_tf32()
    wanted = any(one is not None and one.requires_grad for one in (x, weight, bias))
    keep = activation is not None and wanted and torch.is_grad_enabled() and not recompute
    result, _ = operators.forward(x, weight, bias, residual, activation or "", gated, dtype, tf32, keep)
    return result  # type: ignore[no-any-return]


class Linear(nn.Linear):
    """`product` as a layer: a `torch.nn.Linear` with an activation, and a residual if one is given.

    Args:
        in_features, out_features, bias, device, dtype: As of `torch.nn.Linear`.
        activation, gated: As of `product`. With a gate the weight has twice as many rows as there are results.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, device: Any = None, dtype: Any = None, *,
        activation: Activation | None = None, gated: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(in_features, out_features * (2 if gated else 1), bias, device=device, dtype=dtype)
        self.activation, self.gated = activation, gated

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """The activation of the product, and the residual added."""
        return product(
            x, self.weight, bias=self.bias, activation=self.activation, gated=self.gated, residual=residual
        )  # fmt: skip

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, activation={self.activation!r}, gated={self.gated}"
