"""Trains a decoder on raw bytes of text."""

# cpu: --width 256 --layers 2 --heads 4 --batch-size 4 --length 96
# cuda: --width 2048 --layers 4 --heads 16 --batch-size 32 --length 512 --compile

import argparse
import math
import time

import torch
import torch.nn.functional as F
from torch import nn

SYMBOLS = 256


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class ByteModel(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.symbols = nn.Embedding(SYMBOLS, args.width)
        self.positions = nn.Parameter(torch.randn(args.length, args.width) * 0.02)
        self.blocks = nn.ModuleList([Block(args.width, args.heads) for _ in range(args.layers)])
        self.norm = nn.LayerNorm(args.width, bias=False)
        self.head = nn.Linear(args.width, SYMBOLS, bias=False)

    def forward(self, window):
        ids = window[:, :-1]
        x = self.symbols(ids) + self.positions
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())


def made_up_text(count, seed):
    """Bytes in which a letter depends on the one before."""
    generator = torch.Generator().manual_seed(seed)
    steps = torch.randint(1, 7, (count,), generator=generator)
    return (steps.cumsum(0) % 96 + 32).to(torch.uint8)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--rate", type=float, default=3e-4)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = ByteModel(args).to(device, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.rate, betas=(0.9, 0.95), fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 200))
    if args.compile:
        model = torch.compile(model)
    text = made_up_text(2_000_000, seed=1).to(device)
    columns = torch.arange(args.length + 1, device=device)

    started = time.perf_counter()
    for step in range(args.steps):
        starts = torch.randint(len(text) - args.length - 1, (args.batch_size, 1), device=device)
        loss = model(text[starts + columns].long())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if (step + 1) % 50 == 0:
            bits = loss.item() / math.log(2)
            rate = (step + 1) * args.batch_size * args.length / (time.perf_counter() - started)
            print(f"step {step + 1}: {bits:.3f} bits per byte, {rate:.0f} bytes/s")
        # step


if __name__ == "__main__":
    main()
