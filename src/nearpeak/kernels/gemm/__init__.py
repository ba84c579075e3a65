"""`gemm`: a matrix product with a fused epilogue, `Linear`, the layer, and their torch operators.

Bytes moved: forward reads x and the weight and writes the result; bias, activation, gate and scales need no pass over memory of
their own, a residual is read once. If a gradient is needed, the input of the activation is written as well, in the dtype of x:
recomputing it would take a second GEMM, which costs far more than writing and reading it. The backward pass turns the gradient
into that of the product (two or three tensors read, one written) and runs two GEMMs.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from nearpeak.errors import UsageError, did_you_mean
from nearpeak.kernels._runtime.operator import Operator
from nearpeak.kernels._runtime.policy import FLOATS, autocast, cannot_run, fused, too_old
from nearpeak.kernels.pointwise import apply_activation

ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "relu_squared", "silu")
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
SCALE_BLOCK_SIZE = 128
"""Features that share a scale, where blocks have them."""
NO_SCALES, OUTER_SCALES, BLOCK_SCALES = range(3)
"""Kinds of scales: none, factors of whole rows and columns of the result, or factors of blocks of features."""


def _check(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: Any, gated: bool, residual: Tensor | None,
    scale_x: Tensor | None, scale_weight: Tensor | None, out_dtype: torch.dtype | None,
) -> None:  # fmt: skip
    """Raises where arguments do not go together."""
    if weight.dim() != 2 or not x.dim() or x.shape[-1] != weight.shape[1]:
        features = x.shape[-1] if x.dim() else "features"
        raise UsageError(
            f"The weight needs the shape [results, {features}] for x of {tuple(x.shape)}, and has"
            f" {tuple(weight.shape)}."
        )
    if activation is not None and activation not in ACTIVATIONS:
        raise UsageError(f"There is no activation {activation!r}. {did_you_mean(str(activation), ACTIVATIONS)}")
    results = weight.shape[0]
    if gated and (activation is None or results % 2):
        raise UsageError(
            f"With a gate, product needs an activation and an even number of results, and got {activation!r} and"
            f" {results}."
        )
    if bias is not None and tuple(bias.shape) != (results,):
        raise UsageError(f"The bias needs the shape {(results,)}, and has {tuple(bias.shape)}.")
    shape = (*x.shape[:-1], results // 2 if gated else results)
    if residual is not None and tuple(residual.shape) != shape:
        raise UsageError(f"The residual needs the shape {shape} of the result, and has {tuple(residual.shape)}.")
    if out_dtype is not None and not out_dtype.is_floating_point:
        raise UsageError(f"out_dtype is a dtype of floating point, and not {out_dtype}.")
    _check_scale(x, scale_x, 1, "scale_x")
    _check_scale(weight, scale_weight, SCALE_BLOCK_SIZE, "scale_weight")


def _check_scale(values: Tensor, scale: Tensor | None, rows: int, name: str) -> None:
    if scale is None:
        return
    if values.dtype not in FP8_DTYPES:
        raise UsageError(f"{name} goes with values of torch.float8_e4m3fn, and these are {values.dtype}.")
    shapes = _scale_shapes(values, rows)
    if tuple(scale.shape) not in shapes:
        raise UsageError(
            f"{name} needs one of the shapes {', '.join(map(str, shapes))} for values of {tuple(values.shape)}, and has"
            f" {tuple(scale.shape)}."
        )


def _scale_shapes(values: Tensor, rows: int) -> list[tuple[int, ...]]:
    """Shapes of scales: of the tensor, of rows, and of blocks of so many rows and 128 columns."""
    before, across = tuple(values.shape[:-1]), -(-values.shape[-1] // SCALE_BLOCK_SIZE)
    by_block = (*before, across) if rows == 1 else (*before[:-1], -(-before[-1] // rows), across)
    return [(), before, by_block]


def scale_kind(x: Tensor, scale_x: Tensor | None, weight: Tensor, scale_weight: Tensor | None) -> int | None:
    """Which scales these are; None for those of blocks for one factor and others for the other."""
    of_blocks = [
        scale is not None and scale.dim() == values.dim() for values, scale in ((x, scale_x), (weight, scale_weight))
    ]
    if all(of_blocks):
        return BLOCK_SCALES
    if any(of_blocks):
        return None
    return NO_SCALES if scale_x is None and scale_weight is None else OUTER_SCALES


def dequantize_operand(values: Tensor, scale: Tensor | None, rows: int) -> Tensor:
    """The numbers that values of 8 bits stand for, in float32."""
    wide = values.to(torch.float32)
    if scale is None:
        return wide
    if scale.dim() < values.dim():
        return wide * (scale[..., None] if scale.dim() else scale)
    scale = scale.repeat_interleave(SCALE_BLOCK_SIZE, -1)[..., : values.shape[-1]]
    if rows > 1:
        scale = scale.repeat_interleave(rows, -2)[..., : values.shape[-2], :]
    return wide * scale


def result_dtype(x: Tensor, out_dtype: torch.dtype | None) -> torch.dtype:
    """The dtype of the result, but for what autocast says."""
    if out_dtype is not None:
        return out_dtype
    return torch.bfloat16 if x.dtype in FP8_DTYPES else x.dtype


def epilogue_reference(before: Tensor, activation: str, gated: bool, residual: Tensor | None) -> Tensor:
    """What follows a product, in its dtype or that of the residual."""
    if gated:
        half = before.shape[-1] // 2
        result = _activate(before[..., :half], activation) * before[..., half:]
    else:
        result = _activate(before, activation)
    return result if residual is None else result + residual


def _activate(x: Tensor, activation: str) -> Tensor:
    if not activation:
        return x
    return torch.relu(x) if activation == "relu" else apply_activation(x, activation)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.nn.functional.linear(x, weight, None if bias is None else bias.to(x.dtype))


def _forward_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str, gated: bool,
    dtype: torch.dtype, tf32: bool, keep: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    before = _linear(x, weight, bias)
    result = epilogue_reference(before, activation, gated, residual).to(dtype)
    return result.contiguous().clone(), before.contiguous() if keep else x.new_empty(0)


def _backward_reference(
    gradient: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, before: Tensor | None, activation: str,
    gated: bool, tf32: bool, for_x: bool, for_weight: bool, for_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    if activation:
        with torch.enable_grad():
            before = (_linear(x, weight, bias) if before is None else before).detach().requires_grad_()
            result = epilogue_reference(before, activation, gated, None)
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


def _autograd_backward(ctx: Any, gradient: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    rest = (None,) * 5
    if gradient is None:
        return (None, None, None, None, *rest)
    wanted = tuple(ctx.needs_input_grad[:3])
    gradients: list[Tensor | None] = [None, None, None]
    if any(wanted):
        found = gemm_backward(gradient, *ctx.saved_tensors, ctx.activation, ctx.gated, ctx.tf32, *wanted)
        gradients = [one if asked else None for one, asked in zip(found, wanted, strict=True)]
    by_residual = gradient.to(ctx.residual_dtype) if ctx.needs_input_grad[3] else None
    return (*gradients, by_residual, *rest)


def _fp8_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, scale_x: Tensor | None,
    scale_weight: Tensor | None, activation: str, gated: bool, dtype: torch.dtype, fast_accumulate: bool,
) -> Tensor:  # fmt: skip
    before = _linear(dequantize_operand(x, scale_x, 1), dequantize_operand(weight, scale_weight, 128), bias)
    return epilogue_reference(before, activation, gated, residual).to(dtype).contiguous()


def _operator_why_not(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, *rest: Any
) -> str | None:
    if x.dtype != weight.dtype:
        return "x and the weight have one dtype"
    return cannot_run(x, weight, bias, residual)


def _backward_why_not(
    gradient: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, before: Tensor | None, *rest: Any
) -> str | None:
    return cannot_run(gradient) or _operator_why_not(x, weight, bias, before)


def _fp8_why_not(x: Tensor, weight: Tensor, *rest: Any) -> str | None:
    if x.dtype != torch.float8_e4m3fn or weight.dtype != torch.float8_e4m3fn:
        return "of 8 bits it takes float8_e4m3fn alone"
    return cannot_run(x, weight, *rest[:4], dtypes=(*FLOATS, *FP8_DTYPES)) or too_old(x.device, (8, 9))


_EPILOGUE_SCHEMA = "str activation, bool gated"
gemm_forward = Operator(
    f"gemm(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, {_EPILOGUE_SCHEMA}, ScalarType dtype, bool tf32,"
    " bool keep) -> (Tensor, Tensor)",
    backends={"nvidia": "gemm.triton:forward"},
    reference=_forward_reference,
    fake=_fake_forward,
    why_not=_operator_why_not,
    setup_context=_setup_context,
    backward=_autograd_backward,
)
gemm_backward = Operator(
    f"gemm_backward(Tensor gradient, Tensor x, Tensor weight, Tensor? bias, Tensor? before, {_EPILOGUE_SCHEMA}, bool tf32,"
    " bool for_x, bool for_weight, bool for_bias) -> (Tensor, Tensor, Tensor)",
    backends={"nvidia": "gemm.triton:backward"},
    reference=_backward_reference,
    fake=_fake_backward,
    why_not=_backward_why_not,
)
gemm_fp8 = Operator(
    "gemm_fp8(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, Tensor? scale_x, Tensor? scale_weight,"
    f" {_EPILOGUE_SCHEMA}, ScalarType dtype, bool fast_accumulate) -> Tensor",
    backends={"nvidia": "gemm.triton:fp8_forward"},
    reference=_fp8_reference,
    fake=lambda x, weight, *rest: x.new_empty(_result_shape(x, weight, rest[5]), dtype=rest[6]),
    why_not=_fp8_why_not,
)

Activation = Literal["gelu", "gelu_tanh", "relu", "relu_squared", "silu"]
_OLDEST_FOR_FP8 = (8, 9)


def gemm_reference(
    x: Tensor, weight: Tensor, *, bias: Tensor | None = None, activation: Activation | None = None,
    gated: bool = False, residual: Tensor | None = None, scale_x: Tensor | None = None,
    scale_weight: Tensor | None = None, fast_accumulate: bool = False, recompute: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    _check(x, weight, bias, activation, gated, residual, scale_x, scale_weight, out_dtype)
    if x.dtype in FP8_DTYPES:
        out_dtype = result_dtype(x, out_dtype)
        x, weight = dequantize_operand(x, scale_x, 1), dequantize_operand(weight, scale_weight, 128)
    before = torch.nn.functional.linear(x, weight, None if bias is None else bias.to(x.dtype))
    return epilogue_reference(before, activation or "", gated, residual).to(out_dtype or before.dtype)


def _why_not(
    x: Tensor, weight: Tensor, *, bias: Tensor | None = None, activation: Activation | None = None,
    gated: bool = False, residual: Tensor | None = None, scale_x: Tensor | None = None,
    scale_weight: Tensor | None = None, fast_accumulate: bool = False, recompute: bool = False,
    out_dtype: torch.dtype | None = None,
) -> str | None:  # fmt: skip
    _check(x, weight, bias, activation, gated, residual, scale_x, scale_weight, out_dtype)
    if not x.is_floating_point():
        return f"it takes numbers with a fraction, and this is {x.dtype}"
    if out_dtype is not None and out_dtype not in FLOATS:
        return f"it makes float32, bfloat16 and float16, and not {out_dtype}"
    reason = cannot_run(bias, residual, scale_x, scale_weight)
    if reason is not None:
        return reason
    if x.dtype in FP8_DTYPES:
        if weight.dtype != torch.float8_e4m3fn or x.dtype != torch.float8_e4m3fn:
            return "of 8 bits it takes float8_e4m3fn alone"
        if scale_kind(x, scale_x, weight, scale_weight) is None:
            return "it takes scales of blocks for both factors, or for neither"
        if torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in (bias, residual)):
            return "a product of 8 bits has no derivatives"
        return cannot_run(x, weight, dtypes=FP8_DTYPES) or too_old(x.device, _OLDEST_FOR_FP8)
    if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
        return "x and the weight have one dtype, as torch's linear needs it"
    return cannot_run(x, weight, bias, residual)


def _allows_tf32() -> bool:
    return torch.get_float32_matmul_precision() != "highest"


_allows_tf32._dynamo_marked_constant = True  # type: ignore[attr-defined]  # compiled code is guarded by it anyway


@fused(reference=gemm_reference, why_not=_why_not, replayable=False)
def gemm(
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
        scale_x, scale_weight: float32 factors of values of 8 bits, as `quantize` returns them: for a whole tensor, for
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
    if x.dtype in FP8_DTYPES:
        return gemm_fp8(  # type: ignore[no-any-return]
            x, weight, bias, residual, scale_x, scale_weight, activation or "", gated, dtype, fast_accumulate
        )
    x, weight = autocast(x, weight)
    dtype = out_dtype or x.dtype
    tf32 = x.dtype == torch.float32 and _allows_tf32()
    wanted = any(one is not None and one.requires_grad for one in (x, weight, bias))
    keep = activation is not None and wanted and torch.is_grad_enabled() and not recompute
    result, _ = gemm_forward(x, weight, bias, residual, activation or "", gated, dtype, tf32, keep)
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
        return gemm(
            x, self.weight, bias=self.bias, activation=self.activation, gated=self.gated, residual=residual
        )  # fmt: skip

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, activation={self.activation!r}, gated={self.gated}"
