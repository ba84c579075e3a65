"""Small models, and fixes of them that are right or wrong on purpose."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from nearpeak.fixes import engine, registry
from nearpeak.fixes.record import Speed
from nearpeak.fixes.registry import ModelRun, Site


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width))
        self.eps = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.project, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        rows, length, width = x.shape
        q, k, v = self.project(x).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / (width // self.heads) ** 0.5
        scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), -1e9)
        if mask is not None:
            scores = scores.masked_fill(mask[:, None, None] == 0, -1e9)
        weights = functional.dropout(scores.softmax(-1), self.dropout, self.training)
        return self.out((weights @ v).transpose(1, 2).reshape(rows, length, width))


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.up, self.down = (
            nn.Linear(width, 2 * width),
            nn.Linear(width, 2 * width),
            nn.Linear(2 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Model(nn.Module):
    def __init__(self, width: int = 32, heads: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, width)
        self.norm, self.attention, self.mlp = Norm(width), Attention(width, heads, dropout), Mlp(width)
        self.head = nn.Linear(width, 50)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.embedding(tokens)
        x = x + self.attention(self.norm(x), mask)
        return self.head(x + self.mlp(x))


def make_model(**options: Any) -> Model:
    torch.manual_seed(0)
    return Model(**options)


def make_batch(rows: int = 3, length: int = 24) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randint(50, (rows, length)), torch.ones(rows, length, dtype=torch.long)


@contextmanager
def registered(path: str, forward: Callable[..., Any], *, id: str = "planted", **options: Any) -> Iterator[str]:
    """A fix that gives the module at a path another forward."""

    @registry.fix(id, "a fix of a test", **options)
    def sites(run: ModelRun) -> Iterator[Site]:
        call = run.call(path)
        yield Site(call=call, what=f"test of {path}", change=lambda edits: edits.set_forward(call.module, forward))

    try:
        yield id
    finally:
        registry.forget_fix(id)


def speed(ratio: float = 0.5) -> Speed:
    verdict = engine.verdict(ratio, ratio, 0.01)
    return Speed(
        before_s=1.0, after_s=ratio, ratio=ratio, low=ratio, high=ratio, confidence=0.98, pairs=8, verdict=verdict
    )
