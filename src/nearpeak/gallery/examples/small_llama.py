"""A small Llama in plain torch, which the examples on memory and on MFU train."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from nearpeak import plan
from nearpeak.plan.models.model import Model


class Layer(nn.Module):
    """Attention and a SwiGLU network, each behind a norm and beside a residual path."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.heads = model.heads
        self.first_norm, self.second_norm = nn.RMSNorm(model.hidden), nn.RMSNorm(model.hidden)
        self.query, self.key, self.value, self.out = (
            nn.Linear(model.hidden, model.hidden, bias=False) for _ in range(4)
        )
        self.gate, self.up = (nn.Linear(model.hidden, model.intermediate, bias=False) for _ in range(2))
        self.down = nn.Linear(model.intermediate, model.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Without rotary embeddings: they hardly count, neither in bytes nor in operations."""
        y = self.first_norm(x)
        q, k, v = (product(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for product in self.products)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        y = self.second_norm(x)
        out: torch.Tensor = x + self.down(functional.silu(self.gate(y)) * self.up(y))
        return out

    @property
    def products(self) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
        """Of queries, keys and values."""
        return self.query, self.key, self.value


class Llama(nn.Module):
    """Gives the loss of a batch. With `recompute` a layer keeps its input alone and runs again in the backward pass."""

    def __init__(self, model: Model, *, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.embedding = nn.Embedding(model.vocabulary, model.hidden)
        self.layers = nn.ModuleList(Layer(model) for _ in range(model.layers))
        self.norm = nn.RMSNorm(model.hidden)
        self.head = nn.Linear(model.hidden, model.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Every token is to be predicted from those before it."""
        logits = self.head(self.norm(self.trunk(tokens[:, :-1])))
        return functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    def trunk(self, tokens: torch.Tensor) -> torch.Tensor:
        """All but the output layer."""
        x: torch.Tensor = self.embedding(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return x


def shape(*, layers: int, hidden: int, heads: int, intermediate: int, vocabulary: int) -> Model:
    """The numbers of such a model, as plans take them."""
    return plan.Model(
        name="the small one",
        mixers="A" * layers,
        feeds="D" * layers,
        hidden=hidden,
        vocabulary=vocabulary,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        intermediate=intermediate,
    )
