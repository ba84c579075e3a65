"""Section "linear_attention" of `benchmarks.kernels`: time by length, and the crossover with softmax attention.

Everything is causal and in bfloat16; a batch has `together` tokens, or one sequence. Implementations: "nearpeak";
"naive", the formula with the state of every token from a cumulative sum; "quadratic", with all weights materialized;
and softmax attention, which computes something else: nearpeak's ("attention") and torch's ("sdpa"). An implementation
that would run out of memory is left out, with the bytes that it would need. Long calls are timed a few times alone, the
others in turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.kernels.cases import random_tensor
from benchmarks.kernels.flops_cases import both_call, forward_call
from benchmarks.kernels.jobs import without_failures
from nearpeak import kernels
from nearpeak.kernels.linear_attention import EPS, feature_map, naive_linear_attention
from nearpeak.measure.statistics import median

Call = Callable[[], Any]
Way = Callable[[Tensor, Tensor, Tensor], Tensor]
CHECKED_TOKENS = 8
"""Queries whose results are compared with float64, from the first to the last."""
LONG_SECONDS, LONG_CALLS = 0.01, 3
"""Calls that take longer are timed so often, each by itself: their launches, and what caches hold, matter little."""
COPIES = {"forward": 3.5, "both": 6.5}
"""How many tensors of states, or of weights, a way that has them holds at once, at its highest."""
ROOM = 0.9
"""Of the memory of the GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearSizes:
    """Of all cases."""

    together: int = 16384
    """Tokens of all sequences of a batch, at the least."""
    tokens: Sequence[int] = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
    heads: int = 16
    dim: int = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearCase:
    """Both passes at one length."""

    batch: int
    heads: int
    tokens: int
    dim: int
    device: str
    operation: str = "linear_attention"

    @property
    def name(self) -> str:
        return f"{self.batch} x {self.heads} x {self.tokens} x {self.dim}"

    def inputs(self) -> list[Tensor]:
        torch.manual_seed(0)
        shape = (self.batch, self.heads, self.tokens, self.dim)
        return [random_tensor(*shape, device=self.device) for _ in "qkv"]

    def large_bytes(self) -> dict[str, int]:
        """Of the largest tensor of the ways that write states or weights."""
        rows = 2 * self.batch * self.heads * self.tokens
        return {"naive": rows * self.dim**2, "quadratic": rows * self.tokens}

    def left_out(self, step: str) -> dict[str, int]:
        """The ways that do not fit into memory, with the bytes that they would need."""
        has = torch.cuda.get_device_properties(0).total_memory if self.device == "cuda" else 2**34
        needed = {way: int(COPIES[step] * size) for way, size in self.large_bytes().items()}
        return {way: size for way, size in needed.items() if size > ROOM * has}

    def calls(self, step: str) -> dict[str, Call]:
        inputs = self.inputs()
        above = torch.randn_like(inputs[0])
        without = self.left_out(step)
        return {
            name: forward_call(way, *inputs) if step == "forward" else both_call(way, above, inputs, *inputs)
            for name, way in WAYS.items()
            if name not in without
        }

    def steps(self) -> dict[str, Call]:
        """What has to be compiled: "attention" is also nearpeak's."""
        forward, both = self.calls("forward"), self.calls("both")
        return {name: lambda name=name: (forward[name](), both[name]()) for name in COMPILED}  # type: ignore[misc]

    def rows(self, setting: Any, job: str) -> list[dict[str, Any]]:
        """One for each pass."""
        rows = []
        for step in ("forward", "both"):
            allowed, late = setting.allowed(self.calls(step), job, COMPILED)
            running, failed = without_failures(allowed)
            waiting: list[str] = []
            row = {
                "operation": self.operation,
                "pass": step,
                "batch": self.batch,
                "heads": self.heads,
                "tokens": self.tokens,
                "dim": self.dim,
                "seconds": timed(running, waiting),
                "errors": self.errors(running) if setting.check and step == "forward" else {},
                "left_out": self.left_out(step),
                "waiting": waiting,
                "failed": {**late, **failed},
            }
            rows.append(row)
            del allowed, running
        return rows

    def errors(self, ways: dict[str, Call]) -> dict[str, float]:
        """The largest of some queries of a head against float64, relative to the largest value."""
        query, key, value = (one.detach()[0, 0] for one in self.inputs())
        places = torch.linspace(0, self.tokens - 1, CHECKED_TOKENS).long().tolist()
        exact = []
        for place in places:
            weights = feature_map(key[: place + 1].double()) @ feature_map(query[place].double())
            exact.append(weights @ value[: place + 1].double() / (weights.sum() + EPS))
        right = torch.stack(exact)
        errors: dict[str, float] = {}
        for name in ("nearpeak", "naive", "quadratic"):
            if name in ways:
                difference = ways[name]()[0, 0, places].double() - right
                errors[name] = float(difference.abs().max() / right.abs().max())
        return errors


def linear_cases(sizes: LinearSizes | None = None, device: str = "cuda") -> Iterator[LinearCase]:
    sizes = sizes or LinearSizes()
    for tokens in sizes.tokens:
        batch = max(1, sizes.together // tokens)
        yield LinearCase(batch=batch, heads=sizes.heads, tokens=tokens, dim=sizes.dim, device=device)


def timed(ways: dict[str, Call], waiting: list[str]) -> dict[str, float]:
    """Seconds of each way, in the order of the ways: the quick ones in turns."""
    from benchmarks.kernels.timing import in_turns

    took = {name: _once(way) for name, way in ways.items()}
    quick = {name: way for name, way in ways.items() if took[name] <= LONG_SECONDS}
    seconds = in_turns(quick, waiting=waiting) if quick else {}
    for name, way in ways.items():
        if name not in quick:
            seconds[name] = median([took[name], *(_once(way) for _ in range(LONG_CALLS - 1))])
    return {name: seconds[name] for name in ways}


def _once(way: Call) -> float:
    is_gpu = torch.cuda.is_available()
    if is_gpu:
        torch.cuda.synchronize()
    start = time.perf_counter()
    way()
    if is_gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    result: Tensor = kernels.attention(query, key, value, causal=True)
    return result


def _sdpa(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return scaled_dot_product_attention(query, key, value, is_causal=True)


WAYS: dict[str, Way] = {
    "nearpeak": kernels.linear_attention,
    "attention": _attention,
    "sdpa": _sdpa,
    "naive": naive_linear_attention,
    "quadratic": kernels.linear_attention.reference,  # type: ignore[attr-defined]
}
COMPILED = ("nearpeak", "attention")
