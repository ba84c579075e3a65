"""`emulate_target`: code that runs inside on fake CPU tensors runs the operators and the optimizers of a target.

Below it are the lowerings of dropout, softmax, normalization, sampling and recurrent layers: one fused operator on
CUDA, several on the CPU.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from nearpeak.kernels._runtime.policy import simulate_gpu
from nearpeak.trace.cuda_ops import attention as attention  # registers its lowering
from nearpeak.trace.cuda_ops import autocast
from nearpeak.trace.cuda_ops.registry import (
    OPAQUE_OPERATORS,
    Lowering,
    current_target,
    lowering_for,
    lowers,
    meta_kernel,
    run_native,
)
from nearpeak.trace.cuda_ops.target import Target
from nearpeak.trace.patches.shared_patch import SharedPatch, patch_attribute

_DEVICE_LIST_FUNCTIONS = ("_get_foreach_kernels_supported_devices", "_get_capturable_supported_devices")
"""Functions of torch that list the devices of multi-tensor and of capturable optimizers."""
_TYPE_LIST = "_foreach_supported_types"
"""The name of torch's lists of parameter types that multi-tensor optimizers take by default."""


@SharedPatch
@contextmanager
def emulate_gpu_optimizers() -> Iterator[None]:
    """Inside, on threads that trace for a GPU, an optimizer on fake CPU tensors takes the path of GPU tensors.

    That is the multi-tensor path by default, and the capturable one, without synchronization, if the user chooses it.
    """
    with ExitStack() as stack:
        for module in _optimizer_modules():
            for name in _DEVICE_LIST_FUNCTIONS:
                if name in vars(module):
                    stack.enter_context(patch_attribute(module, name, _with_cpu(getattr(module, name))))
            if _TYPE_LIST in vars(module):
                stack.enter_context(patch_attribute(module, _TYPE_LIST, _TypesWithFake(getattr(module, _TYPE_LIST))))
        yield


class _TypesWithFake(list[type]):
    """A list of types that includes fake tensors on threads that trace for a GPU."""

    def __contains__(self, item: object) -> bool:
        return super().__contains__(item) or (item is FakeTensor and current_target() is not None)


def _optimizer_modules() -> list[Any]:
    names = [name for name in sys.modules if name.startswith("torch.optim.")]
    return [sys.modules[name] for name in (*names, "torch.utils._foreach_utils")]


def _with_cpu(listing: Any) -> Any:
    def devices(*args: Any, **kwargs: Any) -> list[str]:
        names: list[str] = listing(*args, **kwargs)
        return [*names, "cpu"] if current_target() is not None else names

    return devices


@contextmanager
def emulate_target(target: Target | None) -> Iterator[None]:
    """Inside, operators and optimizers are those of the target; None and a CPU change nothing."""
    if target is None or target.kind == "cpu":
        yield
        return
    simulated = target.capability or (8, 0)  # on AMD's GPUs, the portable kernels run
    with lowering_for(target), emulate_gpu_optimizers(), simulate_gpu(simulated):
        if torch.is_autocast_enabled("cpu"):
            autocast.use_cuda_autocast_rules()
        yield


_aten = torch.ops.aten
_CUDNN_MIN_EPSILON = 1e-5
_CUDNN_MAX_BATCH = {True: 880801, False: 65535}
"""The largest batch of a batch norm, by whether it trains."""

_CUDNN_SAMPLER_DTYPES = (torch.float64, torch.float32, torch.float16)
_CUDNN_MAX_CHANNELS = 1024
"""Channels of the largest input that cuDNN samples."""

OPAQUE_OPERATORS.add("_fused_rms_norm")


@lowers("dropout")
def dropout(target: Target, input: torch.Tensor, p: float, train: bool) -> Any:
    """One operator that draws, scales and stores the mask for the backward pass."""
    if train and 0 < p < 1 and input.numel() > 0:
        return _aten.native_dropout(input, p, train)[0]
    return run_native("dropout", input, p, train)


@lowers("softmax.int")
def softmax(target: Target, self: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:
    """Float32 from float16 without a separate conversion; bfloat16 is converted as on the CPU."""
    if self.dtype is torch.float16 and dtype is torch.float32:
        return _aten._softmax(self, dim, True)
    return run_native("softmax.int", self, dim, dtype)


@lowers("log_softmax.int")
def log_softmax(target: Target, self: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:
    """As `softmax`."""
    if self.dtype is torch.float16 and dtype is torch.float32:
        return _aten._log_softmax(self, dim, True)
    return run_native("log_softmax.int", self, dim, dtype)


@lowers("_fused_rms_norm")
def fused_rms_norm(
    target: Target, input: torch.Tensor, normalized_shape: list[int], weight: torch.Tensor | None, eps: float | None
) -> Any:
    """One operator forward and one backward; `rms_norm` calls it if dtypes and layout allow it."""
    if torch._C._are_functorch_transforms_active():  # they do not support a derivative in Python
        return run_native("_fused_rms_norm", input, normalized_shape, weight, eps)
    return _FusedRmsNorm.apply(input, normalized_shape, weight, eps)  # type: ignore[no-untyped-call]


class _FusedRmsNorm(torch.autograd.Function):
    """torch has the derivative of this operator for CUDA tensors alone."""

    @staticmethod
    def forward(
        input: torch.Tensor, shape: list[int], weight: torch.Tensor | None, eps: float | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with torch._C._AutoDispatchBelowAutograd():
            normalized, scale = _aten._fused_rms_norm(input, shape, weight, eps)
        return normalized, scale

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
        output_mask = [ctx.needs_input_grad[0], ctx.needs_input_grad[2]]
        computed = _aten._fused_rms_norm_backward(gradients[0], input, ctx.shape, scale, weight, output_mask)
        of_input, of_weight = (
            gradient if needed else None for gradient, needed in zip(computed, output_mask, strict=True)
        )
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
    """cuDNN's or MIOpen's kernel if its conditions hold, else torch's own."""
    statistics = (running_mean, running_var)
    has_statistics = all(tensor is not None for tensor in statistics)
    lacks_statistics = training and all(tensor is None for tensor in statistics)
    affine = weight is not None and bias is not None
    plain = (input, weight, bias, *statistics, training, momentum, eps)
    library = (
        torch.backends.cudnn.enabled
        and affine
        and (has_statistics or lacks_statistics)
        and input.dim() >= 3
        and input.numel() > 0
    )
    if library and weight is not None and target.nvidia and _cudnn_supports_batch_norm(input, weight, training, eps):
        format = torch._prims_common.suggest_memory_format(input)
        contiguous = tuple(None if tensor is None else tensor.contiguous() for tensor in (weight, bias, *statistics))
        results = _aten.cudnn_batch_norm(input.contiguous(memory_format=format), *contiguous, training, momentum, eps)
        return (*results, 1)
    if library and weight is not None and target.vendor == "amd" and _miopen_supports_batch_norm(input, weight):
        results = _aten.miopen_batch_norm(*plain)
        return (*results, input.new_empty(0, dtype=torch.uint8), 2)
    return run_native("_batch_norm_impl_index", *plain, cudnn_enabled)


def _cudnn_supports_batch_norm(input: torch.Tensor, weight: torch.Tensor, training: bool, eps: float) -> bool:
    return (
        torch.bfloat16 not in (input.dtype, weight.dtype)
        and (input.dtype is not torch.float16 or weight.dtype is torch.float32)
        and input.shape[0] <= _CUDNN_MAX_BATCH[training]
        and eps >= _CUDNN_MIN_EPSILON
        and input.numel() < 2**31 - 1
    )


def _miopen_supports_batch_norm(input: torch.Tensor, weight: torch.Tensor) -> bool:
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
    """cuDNN's kernel for bilinear interpolation with zero padding and aligned corners."""
    plain = (interpolation_mode, padding_mode) == (0, 0) and align_corners and input.dim() == 4
    small = all(tensor.dtype in _CUDNN_SAMPLER_DTYPES and 0 < tensor.numel() < 2**31 for tensor in (input, grid))
    acceptable = target.nvidia and torch.backends.cudnn.enabled and small
    if acceptable and plain and input.shape[1] <= _CUDNN_MAX_CHANNELS:
        return _aten.cudnn_grid_sampler(input, grid)
    return run_native("grid_sampler", input, grid, interpolation_mode, padding_mode, align_corners)


@meta_kernel("cudnn_grid_sampler")
def _grid_sampler_shape(self: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
    return self.new_empty((*self.shape[:2], *grid.shape[1:3]))


@meta_kernel("cudnn_grid_sampler_backward")
def _grid_sampler_backward_shapes(
    self: torch.Tensor, grid: torch.Tensor, grad_output: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    return self.new_empty(self.shape), grid.new_empty(grid.shape)


_RELU, _TANH, _LSTM, _GRU = range(4)
"""cuDNN's numbers of the kinds of cells."""
_CUDNN_RNN_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_GRU_WORKSPACE = 5
"""Vectors of the hidden size that the fused GRU cell stores for its backward pass."""


@lowers("lstm.input")
def lstm(
    target: Target,
    input: torch.Tensor,
    hx: Sequence[torch.Tensor],
    params: Sequence[torch.Tensor],
    *options: Any,
) -> Any:
    """All layers and time steps as one operator."""
    if not _cudnn_supports_rnn(target, input):
        return run_native("lstm.input", input, hx, params, *options)
    return _cudnn_rnn(_LSTM, input, hx[0], hx[1], params, *options)


def _single_state_rnn(name: str, mode: int) -> Lowering:
    @lowers(name)
    def layer(
        target: Target, input: torch.Tensor, hx: torch.Tensor, params: Sequence[torch.Tensor], *options: Any
    ) -> Any:
        if not _cudnn_supports_rnn(target, input):
            return run_native(name, input, hx, params, *options)
        output, hidden, _ = _cudnn_rnn(mode, input, hx, None, params, *options)
        return output, hidden

    return layer


gru = _single_state_rnn("gru.input", _GRU)
rnn_tanh = _single_state_rnn("rnn_tanh.input", _TANH)
rnn_relu = _single_state_rnn("rnn_relu.input", _RELU)


def _cudnn_supports_rnn(target: Target, input: torch.Tensor) -> bool:
    return target.nvidia and torch.backends.cudnn.enabled and input.dtype in _CUDNN_RNN_DTYPES and input.numel() > 0


def _cudnn_rnn(
    mode: int,
    input: torch.Tensor,
    hidden: torch.Tensor,
    cell: torch.Tensor | None,
    params: Sequence[torch.Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The weights are passed one by one; the buffer that holds all of them on a GPU is left empty here."""
    projected = cell is not None and cell.shape[2] != hidden.shape[2]
    size = cell.shape[2] if projected and cell is not None else hidden.shape[2]
    projection = hidden.shape[2] if projected else 0
    stride = (4 if has_biases else 2) + projected
    shape = (size, projection, num_layers, batch_first, dropout, train, bidirectional)
    results = _aten._cudnn_rnn(input, params, stride, input.new_empty(0), hidden, cell, mode, *shape, [], None)
    return results[0], results[1], results[2]


@lowers("lstm_cell")
def lstm_cell(
    target: Target,
    input: torch.Tensor,
    hx: Sequence[torch.Tensor],
    w_ih: torch.Tensor,
    w_hh: torch.Tensor,
    b_ih: torch.Tensor | None = None,
    b_hh: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two matrix products, and one operator for everything after them."""
    gates = torch.matmul(input, w_ih.t()), torch.matmul(hx[0], w_hh.t())
    hidden, cell, _ = _aten._thnn_fused_lstm_cell(*gates, hx[1], b_ih, b_hh)
    return hidden, cell


@lowers("gru_cell")
def gru_cell(
    target: Target,
    input: torch.Tensor,
    hx: torch.Tensor,
    w_ih: torch.Tensor,
    w_hh: torch.Tensor,
    b_ih: torch.Tensor | None = None,
    b_hh: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `lstm_cell`."""
    gates = torch.matmul(input, w_ih.t()), torch.matmul(hx, w_hh.t())
    hidden: torch.Tensor = _aten._thnn_fused_gru_cell(*gates, hx, b_ih, b_hh)[0]
    return hidden


@meta_kernel("_thnn_fused_gru_cell")
def _gru_cell_shapes(input_gates: torch.Tensor, hidden_gates: torch.Tensor, hx: torch.Tensor, *biases: Any) -> Any:
    return hx.new_empty(hx.shape), hx.new_empty((hx.shape[0], _GRU_WORKSPACE * hx.shape[1]))


@meta_kernel("_thnn_fused_gru_cell_backward")
def _gru_cell_backward_shapes(grad_hy: torch.Tensor, workspace: torch.Tensor, has_bias: bool) -> Any:
    gates = 3 * grad_hy.shape[1]
    of_gates = (workspace.new_empty((grad_hy.shape[0], gates)) for _ in range(2))
    of_biases = (workspace.new_empty(gates) if has_bias else None for _ in range(2))
    return (*of_gates, grad_hy.new_empty(grad_hy.shape), *of_biases)


@meta_kernel("_cudnn_rnn_backward")
def _rnn_backward_shapes(input: torch.Tensor, weight: Sequence[torch.Tensor], *arguments: Any) -> Any:
    hidden, cell, output_mask = arguments[2], arguments[3], arguments[-1]
    like = torch.empty_like
    weights = [like(tensor) for tensor in weight] if output_mask[3] else [None] * len(weight)
    return like(input), like(hidden), None if cell is None else like(cell), weights
