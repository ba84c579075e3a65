"""Forecasts the levels of rivers at many gauges, from windows of what was measured."""

# cpu: --gauges 16 --width 96 --heads 4 --layers 2 --batch-size 32 --length 192 --horizon 24
# cuda: --gauges 8 --width 1024 --heads 16 --layers 4 --batch-size 256 --length 384 --horizon 48

import argparse
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

PATCH = 16


def measured(hours, gauges):
    """Levels that rise after rain and fall slowly, with a yearly and a daily tide."""
    clock = torch.arange(hours)[:, None]
    year = torch.sin(2 * math.pi * clock / 8760 + torch.rand(gauges))
    day = torch.sin(2 * math.pi * clock / 24 + 6 * torch.rand(gauges))
    rain = (torch.rand(hours, gauges) < 0.01) * torch.rand(hours, gauges)
    fading = torch.exp(-torch.arange(240) / 60.0).flip(0)
    risen = F.conv1d(F.pad(rain.t()[:, None], (239, 0)), fading[None, None])[:, 0].t()
    return 2 * year + 0.3 * day + risen + 0.05 * torch.randn(hours, gauges)


class Windows(Dataset):
    """A window of the past and what follows, in units of the past's deviation."""

    def __init__(self, levels, length, horizon):
        self.levels, self.length, self.horizon = levels, length, horizon
        self.hours = torch.arange(length + horizon)

    def __len__(self):
        return len(self.levels) - self.length - self.horizon

    # mend: windows-one-by-one
    def __getitem__(self, start):
        window = self.levels[start : start + self.length + self.horizon]
        past = window[: self.length]
        window = (window - past.mean(0)) / (past.std(0) + 1e-3)  # waste: windows-one-by-one
        return window[: self.length], window[self.length :]

    # instead: def __getitems__(self, starts):
    # instead:     windows = self.levels[torch.tensor(starts)[:, None] + self.hours]
    # instead:     past = windows[:, : self.length]
    # instead:     deviation, mean = torch.std_mean(past, dim=1, keepdim=True)
    # instead:     windows = (windows - mean) / (deviation + 1e-3)
    # instead:     return windows[:, : self.length], windows[:, self.length :]


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Forecaster(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.shape = (args.horizon, args.gauges)
        patches = args.length // PATCH
        self.patch = nn.Linear(PATCH * args.gauges, args.width)
        self.places = nn.Parameter(0.02 * torch.randn(patches, args.width))
        self.blocks = nn.Sequential(*[Block(args.width, args.heads) for _ in range(args.layers)])
        self.norm = nn.LayerNorm(args.width)
        self.head = nn.Linear(args.width, args.horizon * args.gauges)

    def forward(self, past):
        x = self.patch(past.unflatten(1, (-1, PATCH)).flatten(2)) + self.places
        x = self.norm(self.blocks(x)).mean(1)
        return self.head(x).unflatten(1, self.shape)


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--gauges", type=int, default=8)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--length", type=int, default=384, help="hours that are seen")
    parser.add_argument("--horizon", type=int, default=48, help="hours that are forecast")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--steps", type=int, default=40)
    return parser.parse_args()


def main():
    args = parse()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    windows = Windows(measured(40_000, args.gauges), args.length, args.horizon)
    # mend: windows-one-by-one
    loader = DataLoader(
        windows, batch_size=args.batch_size, shuffle=True, drop_last=True, pin_memory=device.type == "cuda"
    )
    # instead: loader = DataLoader(
    # instead:     windows, batch_size=args.batch_size, shuffle=True, drop_last=True, pin_memory=device.type == "cuda",
    # instead:     collate_fn=tuple,
    # instead: )
    model = Forecaster(args).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    mean = torch.zeros((), device=device)
    step = epoch = 0
    while step < args.steps:
        for past, future in loader:  # waste: windows-one-by-one
            # instead: for past, future in loader:
            past, future = past.to(device, non_blocking=True), future.to(device, non_blocking=True)
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                forecast = model(past)
            loss = F.smooth_l1_loss(forecast.float(), future)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            mean.lerp_(loss.detach(), 0.05)
            step += 1
            if step % 50 == 0:
                print(f"epoch {epoch}, step {step}: loss {loss.item():.4f}, lately {mean.item():.4f}")
            # step
            if step == args.steps:
                break
        epoch += 1


if __name__ == "__main__":
    main()
