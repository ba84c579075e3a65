"""Trains a decomposition-linear forecaster with a separate linear map for every channel of a long series."""

# cpu: --channels 64 --batch-size 16
# cuda: --channels 321 --batch-size 128

import argparse
import math

import torch
import torch.nn.functional as F
from torch import nn


class MovingAverage(nn.Module):
    """Trend of a (batch, length, channels) series; the ends are repeated."""

    def __init__(self, window):
        super().__init__()
        self.window = window

    def forward(self, x):
        x = x.transpose(1, 2)
        x = F.pad(x, ((self.window - 1) // 2, self.window // 2), mode="replicate")
        return F.avg_pool1d(x, self.window, stride=1).transpose(1, 2)


# mend: linear-per-channel
class ChannelLinear(nn.Module):
    """Maps the length of a (batch, length, channels) series with a layer of its own for every channel."""

    def __init__(self, channels, length, horizon):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(length, horizon) for _ in range(channels))
        self.horizon = horizon

    def forward(self, x):
        x = x.transpose(1, 2)
        out = torch.zeros(x.shape[0], x.shape[1], self.horizon, dtype=x.dtype, device=x.device)
        for i, layer in enumerate(self.layers):
            out[:, i, :] = layer(x[:, i, :])  # waste: linear-per-channel
        return out.transpose(1, 2)


# instead: class ChannelLinear(nn.Module):
# instead:     def __init__(self, channels, length, horizon):
# instead:         super().__init__()
# instead:         layers = [nn.Linear(length, horizon) for _ in range(channels)]
# instead:         self.weight = nn.Parameter(torch.stack([layer.weight.detach() for layer in layers]))
# instead:         self.bias = nn.Parameter(torch.stack([layer.bias.detach() for layer in layers]))
# instead:
# instead:     def forward(self, x):
# instead:         x = x.permute(2, 0, 1)
# instead:         return torch.baddbmm(self.bias.unsqueeze(1), x, self.weight.transpose(1, 2)).permute(1, 2, 0)


class InstanceScale(nn.Module):
    """Normalizes every window and undoes that on the forecast."""

    def __init__(self, channels):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(channels))
        self.shift = nn.Parameter(torch.zeros(channels))

    def forward(self, x):
        mean = x.mean(dim=1, keepdim=True).detach()
        std = (x.var(dim=1, keepdim=True, unbiased=False) + 1e-5).sqrt().detach()
        return (x - mean) / std * self.gain + self.shift, mean, std

    def invert(self, y, mean, std):
        return (y - self.shift) / (self.gain + 1e-5) * std + mean


class DecompositionForecaster(nn.Module):
    def __init__(self, channels, length, horizon, window):
        super().__init__()
        self.scale = InstanceScale(channels)
        self.average = MovingAverage(window)
        self.trend = ChannelLinear(channels, length, horizon)
        self.seasonal = ChannelLinear(channels, length, horizon)

    def forward(self, x):
        x, mean, std = self.scale(x)
        trend = self.average(x)
        forecast = self.trend(trend) + self.seasonal(x - trend)
        return self.scale.invert(forecast, mean, std)


def make_series(length, channels, generator):
    time = torch.arange(length).unsqueeze(1)
    period = 24 * (1 + torch.randint(7, (channels,), generator=generator))
    phase = 2 * math.pi * torch.rand(channels, generator=generator)
    season = torch.sin(2 * math.pi * time / period + phase)
    walk = 0.05 * torch.randn(length, channels, generator=generator).cumsum(dim=0)
    return season + walk + 0.2 * torch.randn(length, channels, generator=generator)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--channels", type=int, default=64)
    parser.add_argument("--length", type=int, default=336)
    parser.add_argument("--horizon", type=int, default=96)
    parser.add_argument("--window", type=int, default=25)
    parser.add_argument("--lr", type=float, default=5e-4)
    args = parser.parse_args()

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() else "cpu"

    series = make_series(6000, args.channels, torch.Generator().manual_seed(1)).to(device)
    windows = series.unfold(0, args.length + args.horizon, 1)
    model = DecompositionForecaster(args.channels, args.length, args.horizon, args.window).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, fused=True)

    for step in range(args.steps):
        pick = torch.randint(len(windows), (args.batch_size,), device=device)
        past, future = windows[pick].transpose(1, 2).split([args.length, args.horizon], dim=1)
        loss = F.mse_loss(model(past), future)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.6f}")
        # step


if __name__ == "__main__":
    main()
