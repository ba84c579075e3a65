"""`scaled_dot_product_attention` on CUDA: one fused operator where the tensors allow it, else matrix products."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from nearpeak.capture.lowering.attention_backend import Call, choose
from nearpeak.capture.lowering.register import lowers
from nearpeak.capture.lowering.target import Target

_aten = torch.ops.aten
_FLASH_WIDTH = 8
_BIAS_ALIGNMENT = 8
_CUDNN_LOWEST = -65504.0
"""What cuDNN's masks hold in place of minus infinity."""


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
    """The call as torch's CUDA build makes it, with its paddings and conversions around the fused operator."""
    call = Call(
        query=query,
        key=key,
        value=value,
        mask=attn_mask,
        dropout=dropout_p,
        causal=is_causal,
        grouped=enable_gqa,
    )
    if any(tensor.is_nested for tensor in call.inputs):
        return _math(call, attn_mask, scale)
    backend = choose(call, target)
    if backend == "flash":
        return _flash(call, scale)
    mask = _additive(attn_mask, query.dtype, _CUDNN_LOWEST if backend == "cudnn" else -math.inf)
    if backend == "math":
        return _math(call, mask, scale)
    gradient = call.needs_gradient
    if backend == "cudnn":
        results = _aten._scaled_dot_product_cudnn_attention(
            query, key, value, mask, gradient, dropout_p, is_causal, False, scale=scale
        )
    else:
        bias = None if mask is None else _aligned(mask).expand(*query.shape[:3], key.shape[2])
        results = _aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, gradient, dropout_p, is_causal, scale=scale
        )
    output: torch.Tensor = results[0]
    return output


def _flash(call: Call, scale: float | None) -> torch.Tensor:
    width = call.query.shape[-1]
    missing = -width % _FLASH_WIDTH
    inputs = [pad(tensor, (0, missing)) if missing else tensor for tensor in call.inputs]
    scale = 1 / math.sqrt(width) if scale is None else scale
    results = _aten._scaled_dot_product_flash_attention(*inputs, call.dropout, call.causal, False, scale=scale)
    output: torch.Tensor = results[0]
    return output[..., :width] if missing else output


def _math(call: Call, mask: torch.Tensor | None, scale: float | None) -> torch.Tensor:
    results = _aten._scaled_dot_product_attention_math(
        *call.inputs, mask, call.dropout, call.causal, None, scale=scale, enable_gqa=call.grouped
    )
    output: torch.Tensor = results[0]
    return output


def _additive(mask: torch.Tensor | None, dtype: torch.dtype, lowest: float) -> torch.Tensor | None:
    if mask is None or mask.dtype is not torch.bool:
        return mask
    zero = torch.scalar_tensor(0.0, dtype=dtype, device=mask.device)
    if _inverts_masks():
        return torch.where(mask.logical_not(), lowest, zero)
    return torch.where(mask, zero, lowest)


def _aligned(bias: torch.Tensor) -> torch.Tensor:
    """Rows that start at multiples of eight elements, as the memory-efficient kernel reads them."""
    if bias.stride(-1) == 1 and all(stride % _BIAS_ALIGNMENT == 0 for stride in bias.stride()[:-1]):
        return bias
    width = bias.shape[-1]
    return pad(bias, (0, _BIAS_ALIGNMENT - width % _BIAS_ALIGNMENT))[..., :width]


class _Names(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@functools.cache
def _inverts_masks() -> bool:
    """Whether this torch negates a boolean mask before it fills in; asked of torch, since releases differ."""
    with no_dispatch(), torch.inference_mode(False), _Names() as seen, sdpa_kernel([SDPBackend.MATH]):
        tensor = torch.empty(1, 1, 1, 1, device="meta")
        torch.nn.functional.scaled_dot_product_attention(tensor, tensor, tensor, tensor.to(torch.bool))
    return "aten.logical_not.default" in seen.names
