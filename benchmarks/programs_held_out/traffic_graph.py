"""Forecasts the speed on every street of a city from its last readings and from those of the streets around it."""

# cpu: --streets 2000 --around 8 --width 64 --layers 3
# cuda: --streets 20000 --around 16 --width 512 --layers 4

import argparse

import torch
import torch.nn.functional as F
from torch import nn


def street_graph(streets, around, generator):
    """Edges (from, to): each street hears from some streets that are near it in number."""
    to = torch.arange(streets).repeat_interleave(around)
    offsets = torch.randint(1, 4 * around, (len(to),), generator=generator)
    signs = torch.randint(2, (len(to),), generator=generator) * 2 - 1
    return (to + offsets * signs) % streets, to


def made_up_readings(hours, streets, generator):
    """Speeds (hours, streets) with a daily rhythm and slow noise."""
    clock = torch.arange(hours)[:, None] * (2 * torch.pi / 24)
    phase = torch.rand(streets, generator=generator)
    noise = torch.randn(hours, streets, generator=generator)
    return torch.sin(clock + phase) + 0.3 * noise


class StreetLayer(nn.Module):
    """What a street knows, and the mean of what the streets around it say."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.own, self.message = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x, source, target, share):
        y = self.norm(x)
        messages = self.message(y.index_select(0, source))  # waste: messages-made-for-each-edge
        # instead: messages = self.message(y).index_select(0, source)
        heard = torch.zeros_like(y).index_add_(0, target, messages)
        return x + F.relu(torch.addcmul(self.own(y), heard, share))


class Forecaster(nn.Module):
    def __init__(self, past, width, layers):
        super().__init__()
        self.start = nn.Linear(past, width)
        self.layers = nn.ModuleList([StreetLayer(width) for _ in range(layers)])
        self.end = nn.Linear(width, 1)

    def forward(self, past, source, target, share):
        x = self.start(past)
        for layer in self.layers:
            x = layer(x, source, target, share)
        return self.end(x)[:, 0]


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--streets", type=int, default=20000)
    parser.add_argument("--around", type=int, default=16, help="streets that a street hears from")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--past", type=int, default=12, help="hours")
    parser.add_argument("--ahead", type=int, default=3, help="hours")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--steps", type=int, default=60)
    return parser.parse_args()


def main():
    args = parse()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator().manual_seed(5)
    source, target = street_graph(args.streets, args.around, generator)
    share = (1.0 / torch.bincount(target, minlength=args.streets).clamp(min=1))[:, None]
    source, target, share = source.to(device), target.to(device), share.to(device)
    readings = made_up_readings(400, args.streets, generator).to(device)
    model = Forecaster(args.past, args.width, args.layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    average = torch.zeros((), device=device)
    hours = len(readings) - args.past - args.ahead
    for step in range(args.steps):
        hour = step * 37 % hours
        past = readings[hour : hour + args.past].T
        future = readings[hour + args.past + args.ahead - 1]
        loss = F.smooth_l1_loss(model(past, source, target, share), future)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        average.lerp_(loss.detach(), 0.05)
        if (step + 1) % 50 == 0:
            print(f"step {step + 1}: error {average.item():.4f}")
        # step


if __name__ == "__main__":
    main()
