"""A small language model, trained on random tokens: something to profile on any machine.

nearpeak profile examples/train.py --steps 30
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    """Attention and a two-layer network, each behind a norm and beside a residual path."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first_norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project_in, self.project_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        projected = self.project_in(self.first_norm(x)).view(batch, tokens, 3, self.heads, width // self.heads)
        query, key, value = projected.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project_out(attended.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(functional.gelu(self.up(self.second_norm(x))))


class LanguageModel(nn.Module):
    """Predicts the next token."""

    def __init__(self, vocabulary: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.embedding(tokens))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    vocabulary = 4096
    model = LanguageModel(vocabulary, arguments.width, arguments.layers, heads=8).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    loss = torch.zeros(())
    for _ in range(arguments.steps):
        batch = torch.randint(vocabulary, (arguments.batch, arguments.tokens + 1), device=device)
        logits = model(batch[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
