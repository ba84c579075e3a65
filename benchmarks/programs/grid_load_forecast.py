"""Forecasts the load of many substations: an LSTM reads some days, and quantiles of every coming hour are told."""

# cpu: --hidden 96 --batch-size 32 --length 72 --horizon 48
# cuda: --hidden 1024 --batch-size 256 --length 96 --horizon 48

import argparse
import math

import torch
from torch import nn

QUANTILES = (0.02, 0.1, 0.25, 0.4, 0.5, 0.6, 0.75, 0.9, 0.98)


class Forecaster(nn.Module):
    def __init__(self, features, hidden, horizon):
        super().__init__()
        self.encoder = nn.LSTM(features, hidden, batch_first=True)
        self.norm = nn.LayerNorm(hidden)
        # mend: a-head-for-every-hour
        self.heads = nn.ModuleList([nn.Linear(hidden, len(QUANTILES)) for _ in range(horizon)])
        # instead: self.head = nn.Linear(hidden, horizon * len(QUANTILES))

    def forward(self, past):
        _, (state, _) = self.encoder(past)
        state = self.norm(state[-1])
        return [head(state) for head in self.heads]  # waste: a-head-for-every-hour
        # instead: return self.head(state).view(len(state), -1, len(QUANTILES))


class PinballLoss(nn.Module):
    """The mean pinball loss of all quantiles and hours."""

    def __init__(self):
        super().__init__()
        self.register_buffer("quantiles", torch.tensor(QUANTILES))

    def forward(self, forecast, load):
        # mend: a-head-for-every-hour
        losses = []
        for hour, told in enumerate(forecast):
            error = load[:, hour, None] - told
            above, below = self.quantiles * error, (self.quantiles - 1) * error
            losses.append(torch.maximum(above, below).mean())  # waste: a-head-for-every-hour
        return torch.stack(losses).mean()
        # instead: error = load[..., None] - forecast
        # instead: return torch.maximum(self.quantiles * error, (self.quantiles - 1) * error).mean()


class Substations:
    """Loads with a rhythm of days and weeks, and the temperature."""

    def __init__(self, count, hours, device, dtype):
        time = torch.arange(hours, device=device)
        phase = torch.rand(count, 1, device=device) * 2 * math.pi
        day, week = 2 * math.pi * time / 24, 2 * math.pi * time / 168
        temperature = torch.sin(day + phase) + 0.3 * torch.randn(count, hours, device=device)
        load = 1 + 0.5 * torch.sin(day - phase) + 0.2 * torch.cos(week) - 0.1 * temperature
        load = load + 0.05 * torch.randn(count, hours, device=device)
        clock = torch.stack([day.sin(), day.cos(), week.sin(), week.cos()], dim=-1).expand(count, -1, -1)
        features = torch.cat([load[..., None], temperature[..., None], clock], dim=-1)
        self.features, self.load = features.to(dtype), load.to(dtype)

    def windows(self, size, length, horizon):
        count, hours = self.load.shape
        device = self.load.device
        station = torch.randint(count, (size, 1), device=device)
        start = torch.randint(hours - length - horizon, (size, 1), device=device)
        past = self.features[station, start + torch.arange(length, device=device)]
        return past, self.load[station, start + length + torch.arange(horizon, device=device)]


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--length", type=int, default=96)
    parser.add_argument("--horizon", type=int, default=48)
    parser.add_argument("--stations", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--steps", type=int, default=60)
    return parser.parse_args()


def main():
    args = parse()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    data = Substations(args.stations, 24 * 365, device, dtype)
    model = Forecaster(data.features.shape[-1], args.hidden, args.horizon).to(device, dtype)
    criterion = PinballLoss().to(device, dtype)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, fused=True)
    running = torch.zeros((), device=device)

    for step in range(args.steps):
        past, load = data.windows(args.batch_size, args.length, args.horizon)
        loss = criterion(model(past), load)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        running.mul_(0.95).add_(loss.detach(), alpha=0.05)
        if step % 20 == 0:
            print(f"step {step}: pinball loss {running.item() / (1 - 0.95 ** (step + 1)):.4f}")
        # step


if __name__ == "__main__":
    main()
