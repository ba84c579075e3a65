"""Norms by the kernels that torch has, `native_layer_norm` and `_fused_rms_norm`, and when these run.

They take what torch's own functions take without a further pass: contiguous rows with parameters in their dtype, no
offset, and no addition before the norm. Statistics of rows are the same as those of this package's kernels, so that a
backward pass may take another backend than the forward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nearpeak.kernels._runtime.choice import Chooser, torch_runs_on

_aten: Any = torch.ops.aten
_HAS_RMS_NORM = hasattr(_aten, "_fused_rms_norm") and hasattr(_aten, "_fused_rms_norm_backward")
"""Not in older versions of torch."""
FEATURES = {"rows": 0.5, "columns": 0.5, "padding": 0.5, "itemsize": 0.5, "weighted": 1.0}
"""By which a backend is chosen, with their weights. The padding is the next power of 2 over the number of columns, in
percent."""


_choosers = {
    (False, False): Chooser("rms_norm", FEATURES),
    (False, True): Chooser("layer_norm", FEATURES),
    (True, False): Chooser("rms_norm_backward", FEATURES),
    (True, True): Chooser("layer_norm_backward", FEATURES),
}
"""By whether it is a backward pass, and of a LayerNorm."""


def chooses_torch(x: Tensor, weight: Tensor | None, bias: Tensor | None, offset: float, centered: bool) -> bool:
    """Whether torch's kernel runs the forward pass."""
    takes = bool(x.numel()) and _takes((x,), weight, bias, offset, centered)
    return _chooses_torch(_choosers[False, centered], x, weight, takes)


def backward_chooses_torch(
    gradient: Tensor, x: Tensor, sum_gradient: Tensor | None, statistics: Tensor, weight: Tensor | None,
    bias: Tensor | None, offset: float, centered: bool, wants: list[bool],
) -> bool:  # fmt: skip
    """Whether torch's kernel runs the backward pass."""
    takes = (
        sum_gradient is None
        and not wants[1]
        and any(wants)
        and bool(x.numel())
        and gradient.dtype == x.dtype
        and statistics.dtype == torch.float32
        and _takes((gradient, x), weight, bias, offset, centered)
    )
    return _chooses_torch(_choosers[True, centered], x, weight, takes)


def _takes(
    tensors: tuple[Tensor, ...], weight: Tensor | None, bias: Tensor | None, offset: float, centered: bool
) -> bool:
    x = tensors[-1]
    return (
        torch_runs_on(x.device)
        and (centered or (_HAS_RMS_NORM and bias is None))
        and (offset == 0.0 or weight is None)
        and all(tensor.is_contiguous() for tensor in tensors)
        and all(parameter is None or parameter.dtype == x.dtype for parameter in (weight, bias))
    )


def _chooses_torch(chooser: Chooser, x: Tensor, weight: Tensor | None, takes: bool) -> bool:
    key = (x.shape, x.dtype, x.device, weight is None, takes)
    known = chooser.known(key)
    if known is None:
        names = ["torch", "triton"] if takes else ["triton"]
        known = chooser.choose(key, names, features(x, weight), x.device)
    return known == "torch"


def features(x: Tensor, weight: Tensor | None) -> tuple[float, ...]:
    """The values of `FEATURES`."""
    columns = max(x.shape[-1], 1)
    return x.numel() // columns, columns, padding(columns), x.element_size(), weight is not None


def padding(columns: int) -> int:
    """The next power of 2 over the number of columns, in percent."""
    return 100 * (1 << (columns - 1).bit_length()) // columns


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """The result, and rstd of each row, (1, rows)."""
    result, rstd = _aten._fused_rms_norm(x, x.shape[-1:], weight, eps)
    return result, rstd.view(1, -1)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """The result, and rstd and mean of each row, (2, rows)."""
    result, mean, rstd = _aten.native_layer_norm(x, x.shape[-1:], weight, bias, eps)
    return result, torch.stack([rstd.view(-1), mean.view(-1)])


def norm_backward(
    gradient: Tensor, x: Tensor, statistics: Tensor, weight: Tensor | None, bias: Tensor | None, centered: bool,
    wants: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of x, residual, weight and bias, each without elements if it is not wanted."""
    lead = (*x.shape[:-1], 1)
    for_weight, for_bias = wants[2] and weight is not None, wants[3] and bias is not None
    if centered:
        dx, dweight, dbias = _aten.native_layer_norm_backward(
            gradient, x, x.shape[-1:], statistics[1].view(lead), statistics[0].view(lead), weight, bias,
            [wants[0], for_weight, for_bias],
        )  # fmt: skip
    else:
        dx, dweight = _aten._fused_rms_norm_backward(
            gradient, x, x.shape[-1:], statistics[0].view(lead), weight, [wants[0], for_weight]
        )
        dbias = None
    empty = gradient.new_empty
    return (
        dx if wants[0] else empty(0),
        empty(0),
        dweight if for_weight else empty(0),
        dbias if for_bias else empty(0),
    )
