"""What `benchmarks/kernels.py` measures of attention: both passes beside what else there is, and memory.

All forward passes run without gradients but for that of flex: it would be compiled once more, and does the same. FLOPs
are those of two products for each query and key that it sees, and of five in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from kernel_attention_ways import COMPILED, Way, attention_ways
from kernel_cases import random_tensor
from kernel_jobs import without_failures
from torch import Tensor

from nearpeak import kernels

Call = Callable[[], Any]
Gradients = tuple[Tensor, ...]
BACKWARD_FLOPS = 2.5
"""Of the backward pass, as a multiple of the forward pass: five products of matrices for two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSizes:
    """Of all cases."""

    together: int = 16384
    """Tokens of all sequences of a batch."""
    tokens: Sequence[int] = (2048, 4096, 8192, 16384)
    heads: Mapping[int, int] = field(default_factory=lambda: {128: 16, 64: 32})
    """Their number by their size."""
    repeats: int = 100
    """How often both passes are run for results that are to be the same to the last bit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCase:
    """Attention of one size."""

    batch: int
    heads: int
    tokens: int
    dim: int
    causal: bool
    device: str
    repeats: int
    operation: str = "attention"

    @property
    def name(self) -> str:
        mask = "causal" if self.causal else "full"
        return f"{self.batch} x {self.heads} x {self.tokens} x {self.dim} {mask}"

    @property
    def flops(self) -> float:
        """Of the forward pass."""
        pairs = self.tokens * self.tokens / (2 if self.causal else 1)
        return 4.0 * self.batch * self.heads * pairs * self.dim

    def inputs(self) -> list[Tensor]:
        torch.manual_seed(0)
        shape = (self.batch, self.heads, self.tokens, self.dim)
        return [random_tensor(*shape, device=self.device) for _ in "qkv"]

    def passes(self) -> dict[str, dict[str, Call]]:
        """By pass and name of the way, calls on the same inputs."""
        inputs, ways = self.inputs(), attention_ways(self.causal, self.tokens, self.device)
        above = torch.randn_like(inputs[0])
        return {
            "forward": {name: _forward(way, inputs, name == "flex") for name, way in ways.items()},
            "backward": {name: _backward(way, inputs, above) for name, way in ways.items()},
        }

    def steps(self) -> dict[str, Call]:
        """What has to be compiled, by name."""
        passes = self.passes()
        return {name: lambda name=name: [one[name]() for one in passes.values()] for name in COMPILED}  # type: ignore[misc]

    def rows(self, setting: Any, job: str) -> list[dict[str, Any]]:
        """One for each pass."""
        from kernel_timing import in_turns

        found = []
        errors = self.errors() if setting.check else {}
        repeated = self.repeated()
        for (name, ways), flops in zip(self.passes().items(), (self.flops, BACKWARD_FLOPS * self.flops), strict=True):
            allowed, late = setting.allowed(ways, job)
            running, failed = without_failures(allowed)
            waiting: list[str] = []
            row = {
                "operation": self.operation,
                "pass": name,
                "batch": self.batch,
                "heads": self.heads,
                "tokens": self.tokens,
                "dim": self.dim,
                "causal": self.causal,
                "flops": flops,
                "seconds": in_turns(running, waiting=waiting),
                "errors": errors.get(name, {}),
                "repeated": repeated,
                "waiting": waiting,
                "failed": {**late, **failed},
            }
            found.append(row)
        return found

    def errors(self) -> dict[str, dict[str, float]]:
        """By pass and way, the largest error of one head against float64, relative to the largest value."""
        inputs = self.inputs()
        above = torch.randn_like(inputs[0])
        wide = [one[:1, :1].detach().double().requires_grad_() for one in inputs]
        scores = wide[0] @ wide[1].mT * self.dim**-0.5
        if self.causal:
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
        result = torch.softmax(scores, -1) @ wide[2]
        gradients = torch.autograd.grad(result, wide, above[:1, :1].double())
        found: dict[str, dict[str, float]] = {"forward": {}, "backward": {}}
        for name, way in attention_ways(self.causal, self.tokens, self.device).items():
            if name == "flex":  # compiled where it is timed
                continue
            try:
                own = way(*inputs)
                own_gradients = torch.autograd.grad(own, inputs, above)
            except Exception:  # said where it is timed
                continue
            found["forward"][name] = _error(own, result)
            found["backward"][name] = max(map(_error, own_gradients, gradients))
        return found

    def repeated(self) -> dict[str, int]:
        """How many runs of both passes were made, and how many had a result or gradient that was not the first."""
        inputs = self.inputs()
        above = torch.randn_like(inputs[0])
        first: Sequence[Tensor] = ()
        different = torch.zeros((), dtype=torch.int64, device=self.device)
        for _ in range(self.repeats):
            result = kernels.attention(*inputs, causal=self.causal)
            found = [result.detach(), *torch.autograd.grad(result, inputs, above)]
            first = first or found
            changed = [(one != other).any() for one, other in zip(first, found, strict=True)]
            different += torch.stack(changed).any()
        return {"runs": self.repeats, "different": int(different)}


def attention_cases(sizes: AttentionSizes | None = None, device: str = "cuda") -> Iterator[AttentionCase]:
    sizes = sizes or AttentionSizes()
    for dim, heads in sizes.heads.items():
        for causal in (False, True):
            for tokens in sizes.tokens:
                batch = max(1, sizes.together // tokens)
                yield AttentionCase(
                    batch=batch,
                    heads=heads,
                    tokens=tokens,
                    dim=dim,
                    causal=causal,
                    device=device,
                    repeats=sizes.repeats,
                )


def _forward(way: Way, inputs: Sequence[Tensor], with_gradients: bool) -> Call:
    def call() -> Tensor:
        with torch.set_grad_enabled(with_gradients):
            return way(*inputs)

    return call


def _backward(way: Way, inputs: Sequence[Tensor], above: Tensor) -> Call:
    kept: list[Tensor] = []

    def call() -> Gradients:
        if not kept:
            kept.append(way(*inputs))
        return torch.autograd.grad(kept[0], inputs, above, retain_graph=True)

    return call


def _error(found: Tensor, exact: Tensor) -> float:
    found = found[:1, :1].detach().double()
    return float((found - exact.detach()).abs().max() / exact.detach().abs().max())
