"""What a tensor holds, as far as it matters for the time of a kernel: kept beside every result."""

from __future__ import annotations

import math

import torch

from nearpeak.errors import UsageError
from nearpeak.measure.input_facts import InputStatistics

__all__ = ["InputStatistics", "describe"]

SAMPLE = 65536
"""Elements that are looked at; of a larger tensor, positions spread over all of it."""

DISTINCT_SAMPLE = 4096
"""Elements among which distinct values are counted."""

_AS_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def describe(tensor: torch.Tensor) -> InputStatistics:
    """The statistics of a tensor, from at most 65536 of its elements and, on a GPU, with one small copy to the host.

    >>> describe(torch.zeros(2, 3)).degenerate
    'all values are zero'
    >>> describe(torch.tensor([1.0, 2.0, 6.0])).mean
    3.0
    """
    if not isinstance(tensor, torch.Tensor):
        raise UsageError(f"describe takes a tensor, found {type(tensor).__name__}.")
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        raise UsageError(f"describe takes a dense tensor, found {tensor.layout}. Describe its values, or to_dense().")
    if tensor.device.type == "meta":
        raise UsageError("describe takes a tensor with values, found one on the device 'meta'.")
    if "float4" in str(tensor.dtype):
        raise UsageError(f"describe cannot read {tensor.dtype}, which packs two numbers. Describe it before packing.")
    values = _sample(tensor.detach())
    finite = values[values.isfinite()]
    count = values.numel()
    known = finite.numel() > 0
    return InputStatistics(
        shape=tuple(tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        device=str(tensor.device),
        mean=finite.mean().item() if known else None,
        std=finite.std(correction=0).item() if known else None,
        minimum=finite.min().item() if known else None,
        maximum=finite.max().item() if known else None,
        zero_fraction=(values == 0).sum().item() / count if count else None,
        nonfinite_fraction=1 - finite.numel() / count if count else None,
        distinct=len(set(finite[_spread(finite.numel(), DISTINCT_SAMPLE)].tolist())),
        sampled=tensor.numel() > SAMPLE,
    )


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """At most SAMPLE elements as float64 on the CPU, without a copy of the whole tensor."""
    bits = tensor.view(_AS_BITS[tensor.dtype.itemsize]) if _lacks_indexing(tensor.dtype) else tensor
    if tensor.numel() <= SAMPLE:
        taken = bits.reshape(-1)
    else:
        positions = _spread(tensor.numel(), SAMPLE).to(tensor.device)
        taken = bits[torch.unravel_index(positions, tensor.shape)]
    values = taken.cpu().view(tensor.dtype)
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj()).reshape(-1)
    return values.to(torch.float64)


def _spread(size: int, count: int) -> torch.Tensor:
    """At most `count` distinct positions below `size`, spread evenly.

    The stride shares no factor with `size`. A stride of 4096 in a tensor with 4096 channels would see one channel.
    """
    if size <= count:
        return torch.arange(size)
    stride = max(1, int(size * 0.6180339887498949))  # the golden ratio leaves no large gap for any count
    while math.gcd(stride, size) != 1:
        stride += 1
    return torch.arange(count) * stride % size


def _lacks_indexing(dtype: torch.dtype) -> bool:
    """Whether a tensor of that dtype is indexed by its bits, since torch cannot index it on every device."""
    return dtype in (torch.uint16, torch.uint32, torch.uint64) or (dtype.is_floating_point and dtype.itemsize == 1)
