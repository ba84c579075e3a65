"""`Problem`: what a call of attention is about, as arguments of its kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nearpeak.kernels.configs import shared_bytes, tuned
from nearpeak.kernels.jit.launch import next_power_of_2
from nearpeak.kernels.philox import scale_of, signed_threshold

_FARTHEST = 2**31 // 256
"""Rows of a tile may be so far apart: a tile has fewer than 256, and is addressed in 32 bits from its start."""
_FAR = 2**29
"""A window of more than any number of tokens."""
_SHARED_BYTES = 227 * 1024
"""Of the GPU on which configurations were measured, which may take all of it; GPUs for desktops have 99 KB."""


def kernel_name(kernel: str, causal: bool) -> str:
    """What a portable kernel is called in tables, where its size is that of heads."""
    return kernel + ("_causal" if causal else "")


def addressable(x: Tensor) -> Tensor:
    """The tensor [batch, heads, tokens, dim], or a copy where the kernel cannot address it."""
    if (x.stride(-1) == 1 or x.shape[-1] == 1) and x.stride(-2) < _FARTHEST:
        return x
    return x.contiguous()


class Problem:
    """Sizes, strides and options, from the arguments of the operator.

    Tensors are [batch, heads, tokens, dim]; with starts, of one batch.
    """

    def __init__(
        self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, slopes: Tensor | None,
        sinks: Tensor | None, seed: Tensor | None, query_starts: Tensor | None, key_starts: Tensor | None,
        longest_query: int, longest_key: int, left: int, right: int, bottom_right: bool, scale: float, softcap: float,
        dropout: float,
    ) -> None:  # fmt: skip
        self.query, self.key, self.value = addressable(query), addressable(key), addressable(value)
        self.batches, self.heads, self.queries, self.dim = query.shape
        _, self.key_heads, self.keys, self.value_dim = value.shape
        self.packed = query_starts is not None
        self.query_starts = None if query_starts is None else query_starts.contiguous()
        self.key_starts = None if key_starts is None else key_starts.contiguous()
        self.sequences = self.batches if query_starts is None else query_starts.numel() - 1
        self.most_queries = longest_query if self.packed else self.queries
        self.most_keys = longest_key if self.packed else self.keys
        self.given_bias = bias
        self.bias = None if bias is None else bias.expand(self.batches, self.heads, self.queries, self.keys)
        self.slopes = None if slopes is None else slopes.contiguous()
        self.sinks = None if sinks is None else sinks.contiguous()
        self.seed = seed
        self.left, self.right, self.bottom_right = left, right, bottom_right
        self.scale, self.softcap, self.dropout = scale, softcap, dropout
        self.itemsize = query.element_size()
        self.block_dim, self.block_value_dim = (max(next_power_of_2(dim), 16) for dim in (self.dim, self.value_dim))
        self.widest = max(self.block_dim, self.block_value_dim)

    @property
    def group(self) -> int:
        """How many heads of queries have the same head of keys."""
        return self.heads // max(self.key_heads, 1)

    def tuned(self, kernel: str) -> dict[str, Any] | None:
        """What was measured to be best for a portable kernel, where scores are plain: others need more registers."""
        device = self.query.device
        if not self.is_plain or self.seed is not None or self.itemsize == 4 or shared_bytes(device) < _SHARED_BYTES:
            return None
        return tuned(kernel_name(kernel, self.right >= 0), self.widest, device)

    def by_token(self, batches: int, tokens: int, heads: int, dim: int) -> Tensor:
        """A new tensor [batch, heads, tokens, dim] with tokens before heads in memory.

        It is empty, or zeros where sequences are packed, as there may be tokens that are of none.
        """
        strides = (tokens * heads * dim, dim, heads * dim, 1)
        shape = (batches, heads, tokens, dim)
        made = torch.empty_strided(shape, strides, dtype=self.query.dtype, device=self.query.device)
        return made.zero_() if self.packed else made

    def by_head(self, outside: float) -> Tensor:
        """A new tensor [batch, heads, queries] of float32; of queries that are of no sequence it has this value."""
        shape = (self.batches, self.heads, self.queries)
        made = torch.empty(shape, dtype=torch.float32, device=self.query.device)
        return made.fill_(outside) if self.packed else made

    def of_both(self) -> tuple[Any, ...]:
        return self.seed, self.query_starts, self.key_starts

    def strides(self) -> tuple[int, ...]:
        found: list[int] = []
        for one in (self.query, self.key, self.value):
            found += (0 if self.packed else one.stride(0), one.stride(1), one.stride(2))
        found += (0, 0, 0, 0) if self.bias is None else self.bias.stride()
        found.append(self.heads if self.slopes is not None and self.slopes.dim() == 2 else 0)
        return tuple(found)

    def numbers(self, blocks: int) -> tuple[Any, ...]:
        return (
            self.heads, self.group, self.queries, self.keys, blocks, min(max(self.left, 0), _FAR),
            min(max(self.right, 0), _FAR), self.scale, self.softcap, signed_threshold(self.dropout),
            scale_of(self.dropout),
        )  # fmt: skip

    @property
    def is_plain(self) -> bool:
        """Whether scores are products times the scale, which can be left to the exponential."""
        return self.bias is None and self.slopes is None and self.softcap == 0.0 and self.scale > 0.0

    def constants(self) -> tuple[Any, ...]:
        return (
            self.dim, self.value_dim, self.block_dim, self.block_value_dim, self.bottom_right, self.left >= 0,
            self.right >= 0, self.softcap != 0.0, self.is_plain,
        )  # fmt: skip
