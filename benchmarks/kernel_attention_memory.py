"""What `benchmarks/kernels.py` measures of attention to very many tokens: whether it runs, and in how much memory.

Memory is what a call takes at its highest beyond its inputs: results and gradients count. One byte for each pair of a
query and a key would be `pair_bytes`. Calls are timed once, as the longest take seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from kernel_attention_ways import Way, attention_ways, by_torch
from kernel_cases import random_tensor
from kernel_jobs import without_failures
from torch import Tensor
from torch.nn.attention import SDPBackend

Call = Callable[[], Any]
LOOKED_AT = 8
"""Queries whose results are compared with float64, from the first to the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySizes:
    """Tokens of one head."""

    dim: int = 128
    beside_others: int = 2**16
    alone: int = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCase:
    """Causal attention of one head."""

    tokens: int
    dim: int
    backward: bool
    others: bool
    device: str
    operation: str = "attention_memory"

    @property
    def name(self) -> str:
        return f"{self.tokens} tokens, {'both passes' if self.backward else 'forward'}"

    def ways(self) -> dict[str, Call]:
        torch.manual_seed(0)
        shape = (1, 1, self.tokens, self.dim)
        inputs = [random_tensor(*shape, device=self.device, grad=self.backward) for _ in "qkv"]
        above = torch.randn_like(inputs[0])
        found = attention_ways(True, self.tokens, self.device)
        if self.others:
            del found["flex"]  # its block mask is made from all pairs, if only once
            found["written out"] = by_torch(SDPBackend.MATH, True)
        else:
            found = {"nearpeak": found["nearpeak"]}
        return {name: self._call(way, inputs, above) for name, way in found.items()}

    def _call(self, way: Way, inputs: Sequence[Tensor], above: Tensor) -> Call:
        def forward() -> tuple[Tensor, ...]:
            with torch.no_grad():
                return (way(inputs[0], inputs[1], inputs[2]), *inputs)

        def both() -> tuple[Tensor, ...]:
            result = way(inputs[0], inputs[1], inputs[2])
            torch.autograd.grad(result, inputs, above)
            return (result.detach(), *inputs)

        return both if self.backward else forward

    def steps(self) -> dict[str, Call]:
        return {name: way for name, way in self.ways().items() if name in ("nearpeak", "portable")}

    def rows(self, setting: Any, job: str) -> list[dict[str, Any]]:
        allowed, late = setting.allowed(self.ways(), job)
        ways, failed = without_failures(allowed)
        extra, seconds, errors = {}, {}, {}
        for name, way in ways.items():
            result, extra[name], seconds[name] = _once(way)
            if setting.check:
                errors[name] = self.error(result)
            del result
        row = {
            "operation": self.operation,
            "pass": "both" if self.backward else "forward",
            "tokens": self.tokens,
            "dim": self.dim,
            "pair_bytes": self.tokens**2,
            "extra_bytes": extra,
            "seconds": seconds,
            "errors": errors,
            "failed": {**late, **failed},
        }
        return [row]

    def error(self, found: tuple[Tensor, ...]) -> float:
        """The largest of some queries against float64, relative to the largest value."""
        result, query, key, value = (one.detach()[0, 0] for one in found)
        worst = 0.0
        for place in torch.linspace(0, self.tokens - 1, LOOKED_AT).long().tolist():
            keys, values = key[: place + 1].double(), value[: place + 1].double()
            exact = torch.softmax(keys @ query[place].double() * self.dim**-0.5, 0) @ values
            worst = max(worst, float((result[place].double() - exact).abs().max() / exact.abs().max()))
        return worst


def memory_cases(sizes: MemorySizes | None = None, device: str = "cuda") -> Iterator[MemoryCase]:
    sizes = sizes or MemorySizes()
    for tokens, backward in ((sizes.beside_others, True), (sizes.alone, False), (sizes.alone, True)):
        yield MemoryCase(
            tokens=tokens,
            dim=sizes.dim,
            backward=backward,
            others=tokens == sizes.beside_others,
            device=device,
        )


def _once(way: Call) -> tuple[Any, int | None, float]:
    """The result of a call, how much more memory it takes at its highest than before, and its seconds."""
    is_gpu = torch.cuda.is_available()
    before = 0
    if is_gpu:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    result = way()
    if is_gpu:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    return result, torch.cuda.max_memory_allocated() - before if is_gpu else None, seconds
