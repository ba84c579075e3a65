"""Forecast many time series with doubly residual stacks (N-BEATS): trend and season bases, then free ones."""

# cpu: --series 300 --batch-size 768 --width 128
# cuda: --series 4000 --batch-size 65536 --width 512

import argparse
import math

import torch
import torch.nn.functional as F
from torch import nn


def trend_basis(length, degree, begin, end):
    time = torch.linspace(begin, end, length)
    return torch.stack([time**power for power in range(degree + 1)])


def season_basis(length, harmonics, begin, end):
    angle = 2 * math.pi * torch.linspace(begin, end, length)
    waves = [f(k * angle) for k in range(1, harmonics + 1) for f in (torch.cos, torch.sin)]
    return torch.stack(waves)


class Block(nn.Module):
    """Four layers, then coefficients of what it explains of the past and what it says of the future."""

    def __init__(self, past, future, width, bases=None):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(past, width),
            nn.ReLU(inplace=True),
            nn.Linear(width, width),
            nn.ReLU(inplace=True),
            nn.Linear(width, width),
            nn.ReLU(inplace=True),
            nn.Linear(width, width),
            nn.ReLU(inplace=True),
        )
        if bases is None:
            self.split = [past, future]
            self.backward_basis = self.forward_basis = None
        else:
            self.split = [len(bases[0]), len(bases[1])]
            self.register_buffer("backward_basis", bases[0], persistent=False)
            self.register_buffer("forward_basis", bases[1], persistent=False)
        self.coefficients = nn.Linear(width, sum(self.split))

    def forward(self, past):
        explained, said = self.coefficients(self.layers(past)).split(self.split, dim=1)
        if self.backward_basis is not None:
            explained, said = explained @ self.backward_basis, said @ self.forward_basis
        return explained, said


class BasisForecaster(nn.Module):
    def __init__(self, past, future, width):
        super().__init__()
        share = future / past
        trend = trend_basis(past, 3, -1.0, 0.0), trend_basis(future, 3, 0.0, share)
        season = season_basis(past, 6, -8.0, 0.0), season_basis(future, 6, 0.0, 8.0 * share)
        kinds = [trend, trend, season, season, None, None]
        self.blocks = nn.ModuleList(Block(past, future, width, bases) for bases in kinds)

    def forward(self, past):
        level = past[:, -1:]
        rest, forecast = past - level, level
        for i, block in enumerate(self.blocks):
            explained, said = block(rest)
            forecast = forecast + said
            if i + 1 < len(self.blocks):
                rest = rest - explained
        return forecast


def make_series(count, length, device):
    time = torch.arange(length, device=device)
    phase = torch.rand(count, 2, 1, device=device)
    week = torch.sin(2 * math.pi * (time / 7 + phase[:, 0]))
    year = torch.sin(2 * math.pi * (time / 365 + phase[:, 1]))
    steps = 0.05 * torch.randn(count, length, device=device)
    return 0.7 * week + year + steps.cumsum(dim=1)


class Windows:
    def __init__(self, series, past, future):
        self.views = series.unfold(1, past + future, 1)
        self.past, self.future = past, future

    def draw(self, count):
        device = self.views.device
        which = torch.randint(0, self.views.size(0), (count,), device=device)
        start = torch.randint(0, self.views.size(1), (count,), device=device)
        return self.views[which, start].split([self.past, self.future], dim=1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--series", type=int, default=300)
    parser.add_argument("--length", type=int, default=800)
    parser.add_argument("--past", type=int, default=112)
    parser.add_argument("--future", type=int, default=28)
    parser.add_argument("--batch-size", type=int, default=768)
    parser.add_argument("--width", type=int, default=128)
    args = parser.parse_args()

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    windows = Windows(make_series(args.series, args.length, device), args.past, args.future)
    model = BasisForecaster(args.past, args.future, args.width).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=500, gamma=0.5)

    for step in range(args.steps):
        past, future = windows.draw(args.batch_size)
        loss = F.l1_loss(model(past), future)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 10 == 0 or step == args.steps - 1:
            print(f"step {step}: absolute error {loss.item():.4f}")
        # step


if __name__ == "__main__":
    main()
