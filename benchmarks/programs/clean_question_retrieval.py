"""Trains embeddings of questions and of passages: the passage of a question is to be nearer than those of others."""

# cpu: --width 256 --layers 2 --heads 4 --pairs 4 --length 32 --vocabulary 2000
# cuda: --width 1536 --layers 4 --heads 12 --pairs 160 --length 128 --compile

import argparse

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Embedder(nn.Module):
    """One encoder for questions and passages, which are cut to the same length."""

    def __init__(self, args):
        super().__init__()
        self.tokens = nn.Embedding(args.vocabulary, args.width)
        self.positions = nn.Parameter(torch.randn(args.length, args.width) * 0.02)
        self.blocks = nn.ModuleList([Block(args.width, args.heads) for _ in range(args.layers)])
        self.norm = nn.LayerNorm(args.width)
        self.out = nn.Linear(args.width, 256, bias=False)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions
        for block in self.blocks:
            x = block(x)
        return F.normalize(self.out(self.norm(x.mean(1))), dim=-1)


class Matcher(nn.Module):
    def __init__(self, embedder, temperature):
        super().__init__()
        self.embedder, self.temperature = embedder, temperature

    def forward(self, pairs):
        """The loss in both directions; pairs are questions in [0] and passages in [1]."""
        questions, passages = self.embedder(pairs.flatten(0, 1)).chunk(2)
        scores = (questions @ passages.T).float() / self.temperature
        own = torch.arange(len(scores), device=scores.device)
        return (F.cross_entropy(scores, own) + F.cross_entropy(scores.T, own)) / 2


class Pairs:
    """Made-up questions and passages in main memory: a passage shares half of the words of its question."""

    def __init__(self, args, count=5000, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(args.vocabulary, (2, count, args.length), generator=generator)
        self.ids[1, :, ::2] = self.ids[0, :, ::2]

    def batch(self, size, device):
        picked = self.ids[:, torch.randint(self.ids.shape[1], (size,))]
        if device.type == "cuda":
            return picked.pin_memory().to(device, non_blocking=True)
        return picked


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--vocabulary", type=int, default=16384)
    parser.add_argument("--width", type=int, default=1536)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--pairs", type=int, default=160, help="per batch")
    parser.add_argument("--temperature", type=float, default=0.05)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = Matcher(Embedder(args), args.temperature).to(device, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    if args.compile:
        model = torch.compile(model)
    pairs = Pairs(args)
    average = torch.zeros((), device=device)
    for step in range(args.steps):
        loss = model(pairs.batch(args.pairs, device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        average.lerp_(loss.detach(), 0.05)
        if (step + 1) % 50 == 0:
            print(f"step {step + 1}: loss {average.item():.3f}")
        # step


if __name__ == "__main__":
    main()
