"""Pretrains an encoder of proteins: some residues are hidden, and the model guesses them."""

# cpu: --width 128 --layers 2 --batch-size 4 --length 128
# cuda: --width 512 --layers 8 --batch-size 16 --length 768

import argparse
import math

import torch
import torch.nn.functional as F
from torch import nn

RESIDUES, HIDDEN = 25, 0


def window_mask(length, window):
    """Which residues see which: those at most `window` apart."""
    rows = [[0.0 if abs(i - j) <= window else float("-inf") for j in range(length)] for i in range(length)]
    return torch.tensor(rows)


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)

    def split(self, x):
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)

    def forward(self, x, mask):
        q, k, v = self.split(self.query(x)), self.split(self.key(x)), self.split(self.value(x))
        # mend: attention-by-hand
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])  # waste: attention-by-hand
        weights = torch.softmax(scores + mask, dim=-1)  # waste: attention-by-hand
        mixed = weights @ v  # waste: attention-by-hand
        # instead: mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x, mask):
        x = x + self.attention(self.norm1(x), mask)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class ProteinEncoder(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.window = args.window
        self.residues = nn.Embedding(RESIDUES, args.width)
        self.positions = nn.Parameter(torch.randn(args.length, args.width) * 0.02)
        self.layers = nn.ModuleList([Layer(args.width, args.heads) for _ in range(args.layers)])
        self.head = nn.Linear(args.width, RESIDUES)
        # mend: mask-made-every-step
        # instead: self.mask = None

    def forward(self, residues):
        x = self.residues(residues) + self.positions
        # mend: mask-made-every-step
        mask = window_mask(residues.shape[1], self.window).to(x)  # waste: mask-made-every-step
        # instead: if self.mask is None:
        # instead:     self.mask = window_mask(residues.shape[1], self.window).to(x)
        # instead: mask = self.mask
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(x)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--length", type=int, default=768)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = ProteinEncoder(args).to(device, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4, fused=True)
    proteins = torch.randint(1, RESIDUES, (256, args.length), device=device)
    for step in range(args.steps):
        target = proteins[torch.randint(len(proteins), (args.batch_size,), device=device)]
        hidden = torch.rand(target.shape, device=device) < 0.15
        scores = model(target.masked_fill(hidden, HIDDEN))
        losses = F.cross_entropy(scores.flatten(0, 1), target.flatten(), reduction="none")
        loss = (losses * hidden.flatten()).sum() / hidden.sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
        # step


if __name__ == "__main__":
    main()
