"""Dropout, softmax, normalisation, sampling: one fused operator on CUDA where the CPU composes several."""

from __future__ import annotations

from typing import Any

import torch

from nearpeak.capture.lowering.register import KERNELS, OPAQUE, Kernel, lowers, natively
from nearpeak.capture.lowering.target import Target

_aten = torch.ops.aten
_CUDNN_SMALLEST_EPSILON = 1e-5
_CUDNN_LARGEST_BATCH = {True: 880801, False: 65535}
"""Of a batch norm in training and in evaluation."""

_CUDNN_DTYPES = (torch.float64, torch.float32, torch.float16)
_CUDNN_CHANNELS = 1024
"""The most that cuDNN samples."""

OPAQUE.add("_fused_rms_norm")


@lowers("dropout")
def dropout(target: Target, input: torch.Tensor, p: float, train: bool) -> Any:
    """One operator that draws, scales and keeps the mask for the backward pass."""
    if train and 0 < p < 1 and input.numel() > 0:
        return _aten.native_dropout(input, p, train)[0]
    return natively("dropout", input, p, train)


@lowers("softmax.int")
def softmax(target: Target, self: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:
    """Float32 from float16 without a conversion before; bfloat16 is converted as on the CPU."""
    if self.dtype is torch.float16 and dtype is torch.float32:
        return _aten._softmax(self, dim, True)
    return natively("softmax.int", self, dim, dtype)


@lowers("log_softmax.int")
def log_softmax(target: Target, self: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:
    """As `softmax`."""
    if self.dtype is torch.float16 and dtype is torch.float32:
        return _aten._log_softmax(self, dim, True)
    return natively("log_softmax.int", self, dim, dtype)


@lowers("_fused_rms_norm")
def fused_rms_norm(
    target: Target, input: torch.Tensor, normalized_shape: list[int], weight: torch.Tensor | None, eps: float | None
) -> Any:
    """One operator forward and one backward; `rms_norm` comes here when dtypes and layout allow it."""
    if torch._C._are_functorch_transforms_active():  # they do not take a derivative that is given in Python
        return natively("_fused_rms_norm", input, normalized_shape, weight, eps)
    return _FusedRmsNorm.apply(input, normalized_shape, weight, eps)  # type: ignore[no-untyped-call]


class _FusedRmsNorm(torch.autograd.Function):
    """torch has this pair's derivative for CUDA's tensors alone."""

    @staticmethod
    def forward(
        input: torch.Tensor, shape: list[int], weight: torch.Tensor | None, eps: float | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with torch._C._AutoDispatchBelowAutograd():
            normalised, scale = _aten._fused_rms_norm(input, shape, weight, eps)
        return normalised, scale

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
        input, ctx.shape, weight, _ = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(input, weight, output[1])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if gradients[0] is None:
            return None, None, None, None
        input, weight, scale = ctx.saved_tensors
        wanted = [ctx.needs_input_grad[0], ctx.needs_input_grad[2]]
        found = _aten._fused_rms_norm_backward(gradients[0], input, ctx.shape, scale, weight, wanted)
        of_input, of_weight = (gradient if asked else None for gradient, asked in zip(found, wanted, strict=True))
        return of_input, None, of_weight, None


@lowers("_batch_norm_impl_index")
def batch_norm(
    target: Target,
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Any:
    """cuDNN's or MIOpen's kernel where its conditions hold, else torch's own."""
    statistics = (running_mean, running_var)
    known = all(tensor is not None for tensor in statistics)
    unknown = training and all(tensor is None for tensor in statistics)
    affine = weight is not None and bias is not None
    plain = (input, weight, bias, *statistics, training, momentum, eps)
    library = torch.backends.cudnn.enabled and affine and (known or unknown) and input.dim() >= 3 and input.numel() > 0
    if library and weight is not None and target.nvidia and _cudnn_takes(input, weight, training, eps):
        format = torch._prims_common.suggest_memory_format(input)
        contiguous = tuple(None if tensor is None else tensor.contiguous() for tensor in (weight, bias, *statistics))
        results = _aten.cudnn_batch_norm(input.contiguous(memory_format=format), *contiguous, training, momentum, eps)
        return (*results, 1)
    if library and weight is not None and target.vendor == "amd" and _miopen_takes(input, weight):
        results = _aten.miopen_batch_norm(*plain)
        return (*results, input.new_empty(0, dtype=torch.uint8), 2)
    return natively("_batch_norm_impl_index", *plain, cudnn_enabled)


def _cudnn_takes(input: torch.Tensor, weight: torch.Tensor, training: bool, eps: float) -> bool:
    return (
        torch.bfloat16 not in (input.dtype, weight.dtype)
        and (input.dtype is not torch.float16 or weight.dtype is torch.float32)
        and input.shape[0] <= _CUDNN_LARGEST_BATCH[training]
        and eps >= _CUDNN_SMALLEST_EPSILON
        and input.numel() < 2**31 - 1
    )


def _miopen_takes(input: torch.Tensor, weight: torch.Tensor) -> bool:
    format = torch._prims_common.suggest_memory_format(input)
    return (
        input.dtype not in (torch.float64, torch.bfloat16)
        and weight.dtype is not torch.float16
        and format is torch.contiguous_format
    )


@lowers("grid_sampler")
def grid_sampler(
    target: Target,
    input: torch.Tensor,
    grid: torch.Tensor,
    interpolation_mode: int,
    padding_mode: int,
    align_corners: bool,
) -> Any:
    """cuDNN's kernel for bilinear interpolation with zeros around and aligned corners."""
    plain = (interpolation_mode, padding_mode) == (0, 0) and align_corners and input.dim() == 4
    small = all(tensor.dtype in _CUDNN_DTYPES and 0 < tensor.numel() < 2**31 for tensor in (input, grid))
    acceptable = target.nvidia and torch.backends.cudnn.enabled and small
    if acceptable and plain and input.shape[1] <= _CUDNN_CHANNELS:
        return _aten.cudnn_grid_sampler(input, grid)
    return natively("grid_sampler", input, grid, interpolation_mode, padding_mode, align_corners)


def _sampled(self: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
    return self.new_empty((*self.shape[:2], *grid.shape[1:3]))


def _sampled_backward(self: torch.Tensor, grid: torch.Tensor, grad_output: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return self.new_empty(self.shape), grid.new_empty(grid.shape)


KERNELS.extend(
    [  # torch has no shapes for these
        Kernel("cudnn_grid_sampler", "Meta", _sampled),
        Kernel("cudnn_grid_sampler_backward", "Meta", _sampled_backward),
    ]
)
