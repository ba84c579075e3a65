"""`gemm`: a matrix product with a fused epilogue, `Linear`, the layer, and their torch operators.

Bytes moved: forward reads x and the weight and writes the result; bias, activation, gate and scales need no pass over
memory of their own, a residual is read once. If a gradient is needed, the input of the activation is written as well,
in the dtype of x: recomputing it would take a second GEMM, which costs far more than writing and reading it. The
backward pass turns the gradient into that of the product (two or three tensors read, one written) and runs two GEMMs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from nearpeak.errors import UsageError, did_you_mean
from nearpeak.kernels._runtime.operator import Operator
from nearpeak.kernels._runtime.policy import FLOATS, autocast, autocast_dtype, cannot_run, fused, too_old
from nearpeak.kernels.pointwise import apply_activation

Activation = Literal["gelu", "gelu_tanh", "relu", "relu_squared", "silu"]
_ACTIVATIONS: tuple[str, ...] = get_args(Activation)
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
SCALE_BLOCK_SIZE = 128
"""Features that share an fp8 scale, if scales are by block."""
NO_SCALES, OUTER_SCALES, BLOCK_SCALES = range(3)
"""Kinds of fp8 scales: none, of whole rows and columns of the result, or of blocks of features."""
_OLDEST_FOR_FP8 = (8, 9)


def _check(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: Any, gated: bool, residual: Tensor | None,
    scale_x: Tensor | None, scale_weight: Tensor | None, out_dtype: torch.dtype | None,
) -> None:  # fmt: skip
    """Raises if the arguments do not match each other."""
    if weight.dim() != 2 or not x.dim() or x.shape[-1] != weight.shape[1]:
        features = x.shape[-1] if x.dim() else "features"
        raise UsageError(
            f"The weight needs the shape [results, {features}] for x of {tuple(x.shape)}, and has"
            f" {tuple(weight.shape)}."
        )
    if activation is not None and activation not in _ACTIVATIONS:
        raise UsageError(f"There is no activation {activation!r}. {did_you_mean(str(activation), _ACTIVATIONS)}")
    results = weight.shape[0]
    if gated and (activation is None or results % 2):
        raise UsageError(
            f"With a gate, gemm needs an activation and an even number of results, and got {activation!r} and"
            f" {results}."
        )
    if bias is not None and tuple(bias.shape) != (results,):
        raise UsageError(f"The bias needs the shape {(results,)}, and has {tuple(bias.shape)}.")
    shape = tuple(_result_shape(x, weight, gated))
    if residual is not None and tuple(residual.shape) != shape:
        raise UsageError(f"The residual needs the shape {shape} of the result, and has {tuple(residual.shape)}.")
    if out_dtype is not None and not out_dtype.is_floating_point:
        raise UsageError(f"out_dtype needs a floating point dtype, and is {out_dtype}.")
    _check_scale(x, scale_x, 1, "scale_x")
    _check_scale(weight, scale_weight, SCALE_BLOCK_SIZE, "scale_weight")


def _check_scale(values: Tensor, scale: Tensor | None, block_rows: int, name: str) -> None:
    """Raises unless the scale is of the tensor, of rows, or of blocks of so many rows and 128 columns."""
    if scale is None:
        return
    if values.dtype not in FP8_DTYPES:
        raise UsageError(f"{name} goes with values of torch.float8_e4m3fn, and these are {values.dtype}.")
    rows, blocks = tuple(values.shape[:-1]), -(-values.shape[-1] // SCALE_BLOCK_SIZE)
    by_block = (*rows, blocks) if block_rows == 1 else (*rows[:-1], -(-rows[-1] // block_rows), blocks)
    shapes = [(), rows, by_block]
    if tuple(scale.shape) not in shapes:
        raise UsageError(
            f"{name} needs one of the shapes {', '.join(map(str, shapes))} for values of {tuple(values.shape)}, and has"
            f" {tuple(scale.shape)}."
        )


def scale_kind(x: Tensor, scale_x: Tensor | None, weight: Tensor, scale_weight: Tensor | None) -> int | None:
    """The kind of scales; None if one operand has scales by block and the other has not."""
    by_block = [
        scale is not None and scale.dim() == values.dim() for values, scale in ((x, scale_x), (weight, scale_weight))
    ]
    if all(by_block):
        return BLOCK_SCALES
    if any(by_block):
        return None
    return NO_SCALES if scale_x is None and scale_weight is None else OUTER_SCALES


def dequantize_operand(values: Tensor, scale: Tensor | None, block_rows: int) -> Tensor:
    """fp8 values times their scales, in float32."""
    wide = values.to(torch.float32)
    if scale is None:
        return wide
    if scale.dim() < values.dim():
        return wide * (scale[..., None] if scale.dim() else scale)
    scale = scale.repeat_interleave(SCALE_BLOCK_SIZE, -1)[..., : values.shape[-1]]
    if block_rows > 1:
        scale = scale.repeat_interleave(block_rows, -2)[..., : values.shape[-2], :]
    return wide * scale


def _result_dtype(x: Tensor, out_dtype: torch.dtype | None) -> torch.dtype:
    if out_dtype is not None:
        return out_dtype
    return torch.bfloat16 if x.dtype in FP8_DTYPES else x.dtype


def _result_shape(x: Tensor, weight: Tensor, gated: bool) -> list[int]:
    return [*x.shape[:-1], weight.shape[0] // 2 if gated else weight.shape[0]]


def epilogue_reference(before: Tensor, activation: str, gated: bool, residual: Tensor | None) -> Tensor:
    """The epilogue of a product, in its dtype or that of the residual."""
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


def gemm_reference(
    x: Tensor, weight: Tensor, *, bias: Tensor | None = None, activation: Activation | None = None,
    gated: bool = False, residual: Tensor | None = None, scale_x: Tensor | None = None,
    scale_weight: Tensor | None = None, fast_accumulate: bool = False, recompute: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    _check(x, weight, bias, activation, gated, residual, scale_x, scale_weight, out_dtype)
    if x.dtype in FP8_DTYPES:
        out_dtype = _result_dtype(x, out_dtype)
        x, weight = dequantize_operand(x, scale_x, 1), dequantize_operand(weight, scale_weight, SCALE_BLOCK_SIZE)
    before = _linear(x, weight, bias)
    return epilogue_reference(before, activation or "", gated, residual).to(out_dtype or before.dtype)


def _why_not(
    x: Tensor, weight: Tensor, *, bias: Tensor | None = None, activation: Activation | None = None,
    gated: bool = False, residual: Tensor | None = None, scale_x: Tensor | None = None,
    scale_weight: Tensor | None = None, fast_accumulate: bool = False, recompute: bool = False,
    out_dtype: torch.dtype | None = None,
) -> str | None:  # fmt: skip
    _check(x, weight, bias, activation, gated, residual, scale_x, scale_weight, out_dtype)
    if not x.is_floating_point():
        return f"it takes floating point numbers, and this is {x.dtype}"
    if out_dtype is not None and out_dtype not in FLOATS:
        return f"its result is float32, bfloat16 or float16, and not {out_dtype}"
    reason = cannot_run(bias, residual, scale_x, scale_weight)
    if reason is not None:
        return reason
    if x.dtype in FP8_DTYPES:
        if weight.dtype != torch.float8_e4m3fn or x.dtype != torch.float8_e4m3fn:
            return "the only fp8 dtype that it takes is float8_e4m3fn"
        if scale_kind(x, scale_x, weight, scale_weight) is None:
            return "it takes scales by block for both operands, or for neither"
        if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in (bias, residual)):
            return "an fp8 product has no derivatives"
        return cannot_run(x, weight, dtypes=FP8_DTYPES) or too_old(x.device, _OLDEST_FOR_FP8)
    if x.dtype != weight.dtype and autocast_dtype(x.device) is None:
        return "x and the weight need one dtype, as in torch's linear"
    return cannot_run(x, weight, bias, residual)


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


def _fp8_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, scale_x: Tensor | None,
    scale_weight: Tensor | None, activation: str, gated: bool, dtype: torch.dtype, fast_accumulate: bool,
) -> Tensor:  # fmt: skip
    wide = dequantize_operand(x, scale_x, 1), dequantize_operand(weight, scale_weight, SCALE_BLOCK_SIZE)
    return epilogue_reference(_linear(*wide, bias), activation, gated, residual).to(dtype).contiguous()


def _bias_dtype(weight: Tensor, bias: Tensor | None) -> torch.dtype:
    return weight.dtype if bias is None else bias.dtype


def _fake_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str, gated: bool,
    dtype: torch.dtype, tf32: bool, keep: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    before = [*x.shape[:-1], weight.shape[0]] if keep else [0]
    return x.new_empty(_result_shape(x, weight, gated), dtype=dtype), x.new_empty(before)


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
    options = (None,) * 5
    if gradient is None:
        return (None, None, None, None, *options)
    needed = tuple(ctx.needs_input_grad[:3])
    gradients: list[Tensor | None] = [None, None, None]
    if any(needed):
        computed = gemm_backward(gradient, *ctx.saved_tensors, ctx.activation, ctx.gated, ctx.tf32, *needed)
        gradients = [tensor if is_needed else None for tensor, is_needed in zip(computed, needed, strict=True)]
    grad_residual = gradient.to(ctx.residual_dtype) if ctx.needs_input_grad[3] else None
    return (*gradients, grad_residual, *options)


def _operator_why_not(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, *options: Any
) -> str | None:
    if x.dtype != weight.dtype:
        return "x and the weight need one dtype"
    return cannot_run(x, weight, bias, residual)


def _backward_why_not(
    gradient: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, before: Tensor | None, *options: Any
) -> str | None:
    return cannot_run(gradient) or _operator_why_not(x, weight, bias, before)


def _fp8_why_not(x: Tensor, weight: Tensor, *rest: Any) -> str | None:
    if x.dtype != torch.float8_e4m3fn or weight.dtype != torch.float8_e4m3fn:
        return "the only fp8 dtype that it takes is float8_e4m3fn"
    return cannot_run(x, weight, *rest[:4], dtypes=(*FLOATS, *FP8_DTYPES)) or too_old(x.device, _OLDEST_FOR_FP8)


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
    f"gemm_backward(Tensor gradient, Tensor x, Tensor weight, Tensor? bias, Tensor? before, {_EPILOGUE_SCHEMA},"
    " bool tf32, bool for_x, bool for_weight, bool for_bias) -> (Tensor, Tensor, Tensor)",
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


def _allows_tf32() -> bool:
    return torch.get_float32_matmul_precision() != "highest"


_allows_tf32._dynamo_marked_constant = True  # type: ignore[attr-defined]  # compiled code is guarded by it anyway


def _native(x: Tensor, weight: Tensor, **options: Any) -> Callable[..., Tensor] | None:
    """torch's linear, for a product without an epilogue."""
    bias = options.get("bias")
    if options.get("activation") or options.get("residual") is not None or x.dtype in FP8_DTYPES:
        return None
    if options.get("out_dtype") not in (None, x.dtype) or (bias is not None and bias.dtype != x.dtype):
        return None
    return lambda x, weight, *, bias=None, **_: torch.nn.functional.linear(x, weight, bias)


@fused(reference=gemm_reference, why_not=_why_not, replayable=False, has_choice=True, native=_native)
def gemm(
    x: Tensor, weight: Tensor, *, bias: Tensor | None = None, activation: Activation | None = None,
    gated: bool = False, residual: Tensor | None = None, scale_x: Tensor | None = None,
    scale_weight: Tensor | None = None, fast_accumulate: bool = False, recompute: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """`activation(x @ weight.T + bias) + residual`, contiguous; with a gate `activation(gate) * up + residual`.

    Which backend runs is chosen by size, see `supports`: this package's kernels compute the epilogue from float32 sums
    and round once. Where cuBLAS is faster it computes the product, which is rounded before an activation, as in torch.

    Args:
        x: [..., features], in float32, bfloat16, float16, or float8_e4m3fn.
        weight: [results, features] in the dtype of x, as in `torch.nn.functional.linear`. Both operands may have any
            strides; on Hopper, the fast ones are contiguous along rows or columns and aligned to 16 bytes.
        bias: [results], of any floating point dtype.
        activation: "gelu" (by the error function), "gelu_tanh", "relu", "relu_squared" or "silu".
        gated: Whether the first half of the results is the gate of the second half, as in SwiGLU ("silu") and GeGLU
            ("gelu"); the result is half as wide.
        residual: Added at the end, of the shape of the result.
        scale_x, scale_weight: float32 scales of fp8 operands, as `quantize` returns them: of the whole tensor, of each
            row, or of x by blocks of (1, 128) and of the weight by blocks of (128, 128).
        fast_accumulate: Accumulate fp8 products in the tensor cores alone, which keep 14 bits. Otherwise sums over 128
            features are added in float32, as always with scales by block.
        recompute: Save nothing of the product for the backward pass, and compute it again there.
        out_dtype: The dtype of the result; by default that of x, and bfloat16 for fp8.

    float32 operands are multiplied in full precision, or in TF32 if `torch.set_float32_matmul_precision` allows it.
    Deterministic. Saved for the backward pass: x, the weight and the input of the activation, if there is one. fp8
    products have no derivatives.
    """
    dtype = _result_dtype(x, out_dtype)
    if x.dtype in FP8_DTYPES:
        return gemm_fp8(  # type: ignore[no-any-return]
            x, weight, bias, residual, scale_x, scale_weight, activation or "", gated, dtype, fast_accumulate
        )
    x, weight = autocast(x, weight)
    tf32 = x.dtype == torch.float32 and _allows_tf32()
    needs_grad = any(tensor is not None and tensor.requires_grad for tensor in (x, weight, bias))
    keep = activation is not None and needs_grad and torch.is_grad_enabled() and not recompute
    result, _ = gemm_forward(x, weight, bias, residual, activation or "", gated, out_dtype or x.dtype, tf32, keep)
    return result  # type: ignore[no-any-return]


class Linear(nn.Linear):
    """`gemm` as a layer: a `torch.nn.Linear` with an activation, and a residual if one is given.

    Args:
        in_features, out_features, bias, device, dtype: As in `torch.nn.Linear`.
        activation, gated: As in `gemm`. With a gate the weight has twice as many rows as there are results.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, device: Any = None, dtype: Any = None, *,
        activation: Activation | None = None, gated: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(in_features, out_features * (2 if gated else 1), bias, device=device, dtype=dtype)
        self.activation, self.gated = activation, gated

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """The activation of the product, plus the residual."""
        return gemm(
            x, self.weight, bias=self.bias, activation=self.activation, gated=self.gated, residual=residual
        )  # fmt: skip

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, activation={self.activation!r}, gated={self.gated}"
