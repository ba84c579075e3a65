"""Forecasts the traffic of many roads by quantiles; every road is a series of its own, cut into patches."""

# cpu: --width 96 --heads 4 --layers 3 --batch-size 16 --length 256 --horizon 24 --roads 32
# cuda: --width 1024 --heads 16 --layers 4 --batch-size 512 --length 512 --horizon 96 --roads 512 --compile

import argparse
import math

import torch
import torch.nn.functional as F
from torch import nn

PATCH = 16
QUANTILES = (0.1, 0.5, 0.9)


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Forecaster(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.length, self.horizon = args.length, args.horizon
        self.patch = nn.Linear(PATCH, args.width)
        self.places = nn.Parameter(0.02 * torch.randn(args.length // PATCH, args.width))
        self.blocks = nn.Sequential(*[Block(args.width, args.heads) for _ in range(args.layers)])
        self.norm = nn.LayerNorm(args.width)
        self.head = nn.Linear(args.width, len(QUANTILES) * args.horizon)
        self.register_buffer("quantiles", torch.tensor(QUANTILES)[:, None])

    def forward(self, window):
        """The quantile loss of what follows the past, in units of the past's deviation."""
        deviation, mean = torch.std_mean(window[:, : self.length], dim=1, keepdim=True)
        window = (window - mean) / (deviation + 1e-4)
        past, future = window.split([self.length, self.horizon], dim=1)
        x = self.patch(past.unflatten(1, (-1, PATCH))) + self.places
        forecast = self.head(self.norm(self.blocks(x)).mean(1)).unflatten(1, (len(QUANTILES), -1))
        apart = future[:, None] - forecast.float()
        return torch.maximum(self.quantiles * apart, (self.quantiles - 1) * apart).mean()


class Roads:
    """Counts of cars by five minutes: rush hours, weeks, and chance."""

    def __init__(self, args, device, moments=8192):
        clock = torch.arange(moments, device=device)
        phase = torch.rand(args.roads, 1, device=device)
        day = torch.sin(2 * math.pi * (clock / 288 + phase))
        week = torch.sin(2 * math.pi * (clock / 2016 + phase))
        self.counts = 1 + day + 0.3 * week + 0.2 * torch.randn(args.roads, moments, device=device)
        self.moments = torch.arange(args.length + args.horizon, device=device)

    def batch(self, size):
        roads, moments = self.counts.shape
        chosen = torch.randint(roads, (size, 1), device=self.counts.device)
        starts = torch.randint(moments - len(self.moments), (size, 1), device=self.counts.device)
        return self.counts[chosen, starts + self.moments]


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--roads", type=int, default=512)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--horizon", type=int, default=96)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--steps", type=int, default=40)
    return parser.parse_args()


def main():
    args = parse()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with device:
        model = Forecaster(args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    loss_of = torch.compile(model) if args.compile else model
    roads = Roads(args, device)
    for step in range(args.steps):
        window = roads.batch(args.batch_size)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = loss_of(window)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.4f}")
        # step


if __name__ == "__main__":
    main()
