"""Dropout masks from Philox 4x32 in plain torch: the same random numbers as in the kernels."""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 4096
"""Elements that share CHUNK / 4 counters: number i of a counter belongs to quarter i of the chunk."""
ROUNDS = 7
"""The fewest rounds with which Philox 4x32 passes every test of BigCrush (Salmon and others, 2011)."""
_LOW = 0xFFFFFFFF


def threshold(p: float) -> int:
    """An element is kept if its 32-bit random number is below this."""
    return min(round((1.0 - p) * 2**32), _LOW)


def signed_threshold(p: float) -> int:
    return threshold(p) - 2**31


def keep_scale(p: float) -> float:
    """The factor of elements that are kept."""
    return 1.0 / (1.0 - p) if p < 1.0 else 0.0


def random_numbers(seed: Tensor, elements: int) -> Tensor:
    """The random number of each element, 0 to 2**32 - 1, as int64 on the device of the seed."""
    chunks = -(-elements // CHUNK)
    counter = torch.arange(chunks * (CHUNK // 4), device=seed.device, dtype=torch.int64)
    numbers = _philox(seed.reshape(()), counter)  # (4, counters)
    return numbers.view(4, chunks, CHUNK // 4).transpose(0, 1).reshape(-1)[:elements]


def keep_mask(seed: Tensor, shape: torch.Size, p: float) -> Tensor:
    """The dropout mask of a tensor of this shape: True for elements that are kept."""
    return (random_numbers(seed, shape.numel()) < threshold(p)).view(shape)


def attention_keep_mask(seed: Tensor, number: Tensor, query_at: Tensor, key_at: Tensor, p: float) -> Tensor:
    """The dropout mask of attention weights, from the index of the head in the batch and the positions of both."""
    counter = (query_at << 32) + key_at
    return _philox(seed.reshape(()), *torch.broadcast_tensors(counter, number))[0] < threshold(p)


def _philox(seed: Tensor, counter: Tensor, third: Tensor | None = None) -> Tensor:
    key0, key1 = seed & _LOW, (seed >> 32) & _LOW
    c0, c1 = counter & _LOW, (counter >> 32) & _LOW
    c3 = torch.zeros_like(counter)
    c2 = c3 if third is None else third & _LOW
    for _ in range(ROUNDS):
        # 64-bit products wrap into negative numbers, with the right bits
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = ((b >> 32) & _LOW) ^ c1 ^ key0, b & _LOW, ((a >> 32) & _LOW) ^ c3 ^ key1, a & _LOW
        key0, key1 = (key0 + 0x9E3779B9) & _LOW, (key1 + 0xBB67AE85) & _LOW
    return torch.stack([c0, c1, c2, c3])
