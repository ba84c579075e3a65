"""What `benchmarks/kernels.py` measures of decoding: one new token of each sequence, and the keys and values of all.

The ways are "nearpeak" with a cache in one piece, and with pages of 1, 16 and 256 tokens that lie in memory in a random
order, in bfloat16 and in float8; and "sdpa", what torch picks for the cache in one piece. All read the same keys and
values. The bytes that count are those of the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from kernel_cases import random_tensor
from kernel_jobs import without_failures
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from nearpeak import kernels

Call = Callable[[], Any]
FLOAT8 = torch.float8_e4m3fn
OWN: dict[str, tuple[torch.dtype, int | None]] = {
    "nearpeak": (torch.bfloat16, None),
    "pages of 1": (torch.bfloat16, 1),
    "pages of 16": (torch.bfloat16, 16),
    "pages of 256": (torch.bfloat16, 256),
    "float8": (FLOAT8, None),
    "float8, pages of 1": (FLOAT8, 1),
    "float8, pages of 16": (FLOAT8, 16),
    "float8, pages of 256": (FLOAT8, 256),
}
"""The caches of nearpeak: their dtypes, and tokens of a page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodingSizes:
    """Of all cases."""

    sequences: Sequence[tuple[int, int]] = ((1, 32768), (1, 131072), (16, 8192), (64, 4096))
    """How many there are, and tokens of each."""
    heads: int = 32
    key_heads: int = 8
    dim: int = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodingCase:
    """So many sequences of so many tokens."""

    batch: int
    tokens: int
    heads: int
    key_heads: int
    dim: int
    device: str
    operation: str = "decoding"

    @property
    def name(self) -> str:
        return f"{self.batch} x {self.tokens}"

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        torch.manual_seed(0)
        shape = (self.batch, self.key_heads, self.tokens, self.dim)
        query = random_tensor(self.batch, self.heads, 1, self.dim, device=self.device, grad=False)
        key, value = (random_tensor(*shape, device=self.device, grad=False) for _ in "kv")
        return query, key, value

    def ways(self, query: Tensor, key: Tensor, value: Tensor) -> dict[str, Call]:
        def sdpa() -> Tensor:
            return scaled_dot_product_attention(query, key, value, enable_gqa=True)

        found: dict[str, Call] = {}
        for name, (dtype, page_size) in OWN.items():
            cache = self.filled(key, value, dtype, page_size)
            found[name] = lambda cache=cache: cache.attend(query)
        return {**found, "sdpa": sdpa}

    def filled(self, key: Tensor, value: Tensor, dtype: torch.dtype, page_size: int | None) -> kernels.KVCache:
        cache = kernels.KVCache.create(self.batch, self.tokens, self.key_heads, self.dim, dtype, self.device, page_size)
        if cache.pages is not None:
            order = torch.randperm(cache.pages.numel(), device=self.device)
            cache.pages.copy_(order.view(cache.pages.shape))
        cache.append(key, value)
        return cache

    def cache_bytes(self, way: str) -> int:
        dtype, _ = OWN.get(way, OWN["nearpeak"])
        return 2 * self.batch * self.tokens * self.key_heads * self.dim * dtype.itemsize

    def steps(self) -> dict[str, Call]:
        """What has to be compiled: all of nearpeak's, as one step."""
        ways = self.ways(*self.inputs())

        def own() -> None:
            for name in OWN:
                ways[name]()

        return {"nearpeak": own}

    def rows(self, setting: Any, job: str) -> list[dict[str, Any]]:
        from kernel_timing import in_turns

        inputs = self.inputs()
        allowed, late = setting.allowed(self.ways(*inputs), job)
        ways, failed = without_failures(allowed)
        waiting: list[str] = []
        seconds = in_turns(ways, waiting=waiting)
        moved = {name: self.cache_bytes(name) for name in seconds}
        row = {
            "operation": self.operation,
            "batch": self.batch,
            "tokens": self.tokens,
            "heads": self.heads,
            "key_heads": self.key_heads,
            "dim": self.dim,
            "bytes": moved,
            "seconds": seconds,
            "of_copy": {name: moved[name] / one / setting.copy_rate for name, one in seconds.items()},
            "errors": {name: _error(way(), *inputs) for name, way in ways.items()} if setting.check else {},
            "waiting": waiting,
            "failed": {**late, **failed},
        }
        return [row]


def decoding_cases(sizes: DecodingSizes | None = None, device: str = "cuda") -> Iterator[DecodingCase]:
    sizes = sizes or DecodingSizes()
    for batch, tokens in sizes.sequences:
        yield DecodingCase(
            batch=batch,
            tokens=tokens,
            heads=sizes.heads,
            key_heads=sizes.key_heads,
            dim=sizes.dim,
            device=device,
        )


def _error(found: Tensor, query: Tensor, key: Tensor, value: Tensor) -> float:
    """The largest of the last sequence against float64, relative to the largest value."""
    rows, keys, values = (one[-1].double() for one in (query, key, value))
    rows = rows.reshape(len(keys), -1, rows.shape[-1])
    exact = torch.softmax(rows @ keys.mT * rows.shape[-1] ** -0.5, -1) @ values
    return float((found[-1].double().reshape(exact.shape) - exact).abs().max() / exact.abs().max())
