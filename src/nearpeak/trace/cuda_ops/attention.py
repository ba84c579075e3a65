"""`scaled_dot_product_attention` on CUDA: one fused operator where the tensors allow it, else matrix products.

`choose_backend` follows the rules of torch 2.6 to 2.14 (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp and
sdp_utils_cpp.h). Where they changed, the release decides. Nested tensors are not covered.
"""

from __future__ import annotations

import functools
import math
import os
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from nearpeak.trace.cuda_ops.registry import lowers
from nearpeak.trace.cuda_ops.target import Target

_aten = torch.ops.aten
_FLASH_WIDTH = 8
_BIAS_ALIGNMENT = 8
_CUDNN_LOWEST = -65504.0
"""The value in cuDNN's masks in place of minus infinity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """One call of `scaled_dot_product_attention`."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    dropout: float
    causal: bool
    grouped: bool
    """Keys and values may have fewer heads than queries."""

    @property
    def inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys, values."""
        return self.query, self.key, self.value

    @property
    def needs_gradient(self) -> bool:
        """Whether a backward pass can follow."""
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self.inputs)


@lowers("scaled_dot_product_attention")
def attention(
    target: Target,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """The call as torch's CUDA build makes it, with padding and conversions around the fused operator."""
    call = AttentionCall(
        query=query,
        key=key,
        value=value,
        mask=attn_mask,
        dropout=dropout_p,
        causal=is_causal,
        grouped=enable_gqa,
    )
    if any(tensor.is_nested for tensor in call.inputs):
        return _math_attention(call, attn_mask, scale)
    backend = choose_backend(call, target)
    if backend == "flash":
        return _flash_attention(call, scale)
    mask = _additive_mask(attn_mask, query.dtype, _CUDNN_LOWEST if backend == "cudnn" else -math.inf)
    if backend == "math":
        return _math_attention(call, mask, scale)
    gradient = call.needs_gradient
    if backend == "cudnn":
        results = _aten._scaled_dot_product_cudnn_attention(
            query, key, value, mask, gradient, dropout_p, is_causal, False, scale=scale
        )
    else:
        bias = None if mask is None else _align_bias(mask).expand(*query.shape[:3], key.shape[2])
        results = _aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, gradient, dropout_p, is_causal, scale=scale
        )
    output: torch.Tensor = results[0]
    return output


def _flash_attention(call: AttentionCall, scale: float | None) -> torch.Tensor:
    width = call.query.shape[-1]
    missing = -width % _FLASH_WIDTH
    inputs = [pad(tensor, (0, missing)) if missing else tensor for tensor in call.inputs]
    scale = 1 / math.sqrt(width) if scale is None else scale
    results = _aten._scaled_dot_product_flash_attention(*inputs, call.dropout, call.causal, False, scale=scale)
    output: torch.Tensor = results[0]
    return output[..., :width] if missing else output


def _math_attention(call: AttentionCall, mask: torch.Tensor | None, scale: float | None) -> torch.Tensor:
    results = _aten._scaled_dot_product_attention_math(
        *call.inputs, mask, call.dropout, call.causal, None, scale=scale, enable_gqa=call.grouped
    )
    output: torch.Tensor = results[0]
    return output


def _additive_mask(mask: torch.Tensor | None, dtype: torch.dtype, lowest: float) -> torch.Tensor | None:
    if mask is None or mask.dtype is not torch.bool:
        return mask
    zero = torch.scalar_tensor(0.0, dtype=dtype, device=mask.device)
    if _inverts_masks():
        return torch.where(mask.logical_not(), lowest, zero)
    return torch.where(mask, zero, lowest)


def _align_bias(bias: torch.Tensor) -> torch.Tensor:
    """A bias whose rows start at multiples of eight elements, as the memory-efficient kernel needs them."""
    if bias.stride(-1) == 1 and all(stride % _BIAS_ALIGNMENT == 0 for stride in bias.stride()[:-1]):
        return bias
    width = bias.shape[-1]
    return pad(bias, (0, _BIAS_ALIGNMENT - width % _BIAS_ALIGNMENT))[..., :width]


class _OpNames(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@functools.cache
def _inverts_masks() -> bool:
    """Whether this torch negates a boolean mask before it fills in values; releases differ."""
    with no_dispatch(), torch.inference_mode(False), _OpNames() as recorded, sdpa_kernel([SDPBackend.MATH]):
        tensor = torch.empty(1, 1, 1, 1, device="meta")
        torch.nn.functional.scaled_dot_product_attention(tensor, tensor, tensor, tensor.to(torch.bool))
    return "aten.logical_not.default" in recorded.names


Backend = Literal["math", "flash", "efficient", "cudnn"]

_BACKEND_NUMBERS: dict[int, Backend] = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}
"""The numbers of torch's SDPBackend."""
_DEFAULT_ORDER: tuple[Backend, ...] = ("flash", "efficient", "math", "cudnn")
_CUDNN_ORDER: tuple[Backend, ...] = ("cudnn", "flash", "efficient", "math")
_HALF_DTYPES = (torch.float16, torch.bfloat16)
_CUDNN_MAX_BATCH_OR_HEADS = 65535


def choose_backend(call: AttentionCall, target: Target) -> Backend:
    """The first backend in torch's order that is enabled and supports these tensors."""
    for backend in _backend_order(target):
        if _is_enabled(backend) and _supports(backend, call, target):
            return backend
    raise RuntimeError(
        "No available kernel for scaled_dot_product_attention on the target. The call allows "
        f"{[name for name in _BACKEND_NUMBERS.values() if _is_enabled(name)]}."
    )


def _backend_order(target: Target) -> tuple[Backend, ...]:
    read = getattr(torch._C, "_get_sdp_priority_order", None)
    order = (
        _DEFAULT_ORDER
        if read is None
        else tuple(_BACKEND_NUMBERS[number] for number in read() if number in _BACKEND_NUMBERS)
    )
    return _CUDNN_ORDER if order == _DEFAULT_ORDER and _prefers_cudnn(target) else order


def _prefers_cudnn(target: Target) -> bool:
    """Since torch 2.10, on data center GPUs since Hopper, with cuDNN 9.15.1; the wheels have that since 2.11."""
    deprioritized = os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") == "1"
    new_enough = target.torch >= (2, 10) and target.cudnn > 91500
    data_center = target.capability is not None and target.capability[0] in (9, 10)
    return data_center and new_enough and not deprioritized


def _is_enabled(backend: Backend) -> bool:
    flags = torch.backends.cuda
    read = {
        "math": flags.math_sdp_enabled,
        "flash": flags.flash_sdp_enabled,
        "efficient": flags.mem_efficient_sdp_enabled,
        "cudnn": flags.cudnn_sdp_enabled,
    }
    return bool(read[backend]())  # type: ignore[no-untyped-call]


def _supports(backend: Backend, call: AttentionCall, target: Target) -> bool:
    if backend == "math":
        return True
    if any(tensor.dim() != 4 for tensor in call.inputs) or 0 in (call.query.shape[2], call.key.shape[2]):
        return False
    if backend == "flash":
        return _flash_supports(call, target)
    return _efficient_supports(call, target) if backend == "efficient" else _cudnn_supports(call, target)


def _flash_supports(call: AttentionCall, target: Target) -> bool:
    width = call.query.shape[-1]
    capability = target.capability
    consumer = capability is not None and ((8, 6) <= capability <= (8, 9) or capability[0] == 12)
    too_wide = 192 < width <= 224 or (width > 224 and call.dropout > 0)
    return (
        call.mask is None
        and target.runs_kernels_since((8, 0))
        and _has_dtype(call, _HALF_DTYPES)
        and all(tensor.shape[-1] == width for tensor in call.inputs)
        and width <= 256
        and not (call.needs_gradient and consumer and too_wide)
        and not (call.causal and call.query.shape[2] != call.key.shape[2])
        and _heads_agree(call, grouped=True, same=True)
        and _last_dim_is_contiguous(call, single=True)
    )


def _efficient_supports(call: AttentionCall, target: Target) -> bool:
    half = call.query.dtype in _HALF_DTYPES
    modern = target.runs_kernels_since((8, 0))
    alignment = max(4 if modern else 1, (8 if half else 4) if modern or half else 1)
    widths = (call.query.shape[-1], call.value.shape[-1])
    since_2_14 = target.torch >= (2, 14)
    aligned = not (since_2_14 and modern) or all(tensor.storage_offset() % alignment == 0 for tensor in call.inputs)
    return (
        _has_dtype(call, (*_HALF_DTYPES, torch.float32) if modern else (torch.float16, torch.float32))
        and call.query.shape[-1] == call.key.shape[-1]
        and all(width > 0 and width % alignment == 0 for width in widths)
        and (target.nvidia or call.key.shape[-1] == call.value.shape[-1])
        and aligned
        and _heads_agree(call, grouped=since_2_14 and target.nvidia, same=True)
        and _last_dim_is_contiguous(call, single=False)
    )


def _cudnn_supports(call: AttentionCall, target: Target) -> bool:
    query, key, value = call.inputs
    widths = (query.shape[-1], value.shape[-1])
    limit = _max_cudnn_width(call, target)
    deterministic = torch.are_deterministic_algorithms_enabled()
    warns_only = torch.is_deterministic_algorithms_warn_only_enabled()
    return (
        target.nvidia
        and target.cudnn >= 90000
        and target.runs_kernels_since((8, 0))
        and not (call.dropout > 0 and 91100 < target.cudnn < 91400)
        and (not deterministic or warns_only)
        and _has_dtype(call, _HALF_DTYPES)
        and _mask_fits(call)
        and (target.torch < (2, 12) or (call.dropout * 16).is_integer())
        and (target.torch < (2, 12) or max(query.shape[0], query.shape[1]) <= _CUDNN_MAX_BATCH_OR_HEADS)
        and max(widths) <= limit
        and all(width % 8 == 0 for width in widths)
        and key.shape[2] != 1
        and not (call.dropout > 0 and query.shape[2] == 1)
        and _heads_agree(call, grouped=True, same=False)
        and _last_dim_is_contiguous(call, single=True)
    )


def _max_cudnn_width(call: AttentionCall, target: Target) -> int:
    """The widest head that cuDNN supports. Since torch 2.14 the backward pass limits it too."""
    widths = (call.query.shape[-1], call.value.shape[-1])
    hopper, blackwell = target.hopper, target.capability is not None and target.capability[0] == 10
    if target.torch >= (2, 14) and (hopper or blackwell):
        if target.cudnn > 92200:
            narrow = max(widths) <= 128 or widths in ((192, 128), (256, 256))
            return 256 if narrow or not call.needs_gradient else 0
        return 192 if widths == (192, 128) else 128
    if hopper and target.cudnn >= 91000:
        return 256
    return 192 if blackwell and target.cudnn >= 91100 and widths == (192, 128) else 128


def _has_dtype(call: AttentionCall, allowed: tuple[torch.dtype, ...]) -> bool:
    return call.query.dtype in allowed and all(tensor.dtype is call.query.dtype for tensor in call.inputs)


def _heads_agree(call: AttentionCall, *, grouped: bool, same: bool) -> bool:
    """Whether batches agree, and heads agree or may be grouped; `same`: keys and values have equally many heads."""
    if len({tensor.shape[0] for tensor in call.inputs}) > 1:
        return False
    queries, keys, values = (tensor.shape[1] for tensor in call.inputs)
    if call.grouped and grouped:
        return queries % keys == 0 and queries % values == 0 and not (same and keys != values)
    return queries == keys == values


def _last_dim_is_contiguous(call: AttentionCall, *, single: bool) -> bool:
    """Whether the last dimension is contiguous; `single`: or has one element."""
    inputs = all(tensor.stride(-1) == 1 for tensor in call.inputs) or (single and call.query.shape[-1] == 1)
    return inputs and (call.mask is None or call.mask.stride(-1) == 1)


def _mask_fits(call: AttentionCall) -> bool:
    mask = call.mask
    if mask is None:
        return True
    if mask.requires_grad or mask.dim() not in (2, 4):
        return False
    full = (call.query.shape[0], call.query.shape[1], call.query.shape[2], call.key.shape[2])
    expected = full[-mask.dim() :]
    return all(size in (1, target) for size, target in zip(mask.shape, expected, strict=True))
