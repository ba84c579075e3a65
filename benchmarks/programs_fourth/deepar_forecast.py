"""Forecast batches of series with a recurrent model: sample future paths and report their percentiles."""

# cpu: --series 6 --samples 60 --history 96 --width 64
# cuda: --series 64 --samples 100 --history 192 --width 256

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F


class DeepForecaster(nn.Module):
    def __init__(self, width, covariates, layers=2):
        super().__init__()
        self.lstm = nn.LSTM(1 + covariates, width, layers, batch_first=True)
        self.mean = nn.Linear(width, 1)
        self.spread = nn.Linear(width, 1)

    def encode(self, values, covariates):
        """State after the history has been read."""
        inputs = torch.cat([values.unsqueeze(-1), covariates], dim=-1)
        return self.lstm(inputs)[1]

    def next(self, value, covariate, state):
        inputs = torch.cat([value.unsqueeze(-1), covariate], dim=-1).unsqueeze(1)
        output, state = self.lstm(inputs, state)
        output = output[:, 0]
        return self.mean(output).squeeze(-1), F.softplus(self.spread(output)).squeeze(-1), state


def make_series(count, length):
    time = torch.arange(length)
    phase, height = torch.rand(count, 1) * 24, 0.5 + torch.rand(count, 1)
    daily = height * torch.sin(2 * torch.pi * (time + phase) / 24)
    level = 0.05 * torch.randn(count, length).cumsum(dim=1) + 3 + torch.randn(count, 1)
    hour = 2 * torch.pi * time / 24
    week = 2 * torch.pi * time / 168
    covariates = torch.stack([hour.sin(), hour.cos(), week.sin(), week.cos()], dim=-1)
    return daily + level, covariates.expand(count, length, 4)


def sample_paths(model, history, covariates, samples, horizon):
    """Paths of the coming values, shape (series, samples, horizon)."""
    series, length = history.shape
    scale = history.abs().mean(dim=1, keepdim=True)
    scaled = history / scale
    past = covariates[:, 1 : length + 1]
    future = covariates[:, length + 1 :].repeat_interleave(samples, dim=0)
    # mend: history-read-per-sample
    values = scaled.repeat_interleave(samples, dim=0)  # waste: history-read-per-sample
    past = past.repeat_interleave(samples, dim=0)  # waste: history-read-per-sample
    state = model.encode(values[:, :-1], past[:, :-1])  # waste: history-read-per-sample
    value, covariate = values[:, -1], past[:, -1]
    # instead: hidden, cell = model.encode(scaled[:, :-1], past[:, :-1])
    # instead: state = hidden.repeat_interleave(samples, dim=1), cell.repeat_interleave(samples, dim=1)
    # instead: value = scaled[:, -1].repeat_interleave(samples)
    # instead: covariate = past[:, -1].repeat_interleave(samples, dim=0)
    noise = torch.randn(horizon, series * samples, device=history.device)
    path = []
    for hour in range(horizon):
        mean, spread, state = model.next(value, covariate, state)
        value = mean + spread * noise[hour]
        path.append(value)
        if hour + 1 < horizon:
            covariate = future[:, hour]
    return torch.stack(path, dim=1).view(series, samples, horizon) * scale.unsqueeze(-1)


def percentiles(paths, levels):
    # mend: percentile-at-a-time
    rows = []
    for level in levels:
        rows.append(torch.quantile(paths, level, dim=1))  # waste: percentile-at-a-time
    return torch.stack(rows)
    # instead: return torch.quantile(paths, levels, dim=1)


def pinball(forecast, truth, levels):
    miss = truth - forecast
    levels = levels[:, None, None]
    return torch.maximum(levels * miss, (levels - 1) * miss).mean()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--series", type=int, default=6)
    parser.add_argument("--samples", type=int, default=60)
    parser.add_argument("--history", type=int, default=96)
    parser.add_argument("--horizon", type=int, default=24)
    parser.add_argument("--width", type=int, default=64)
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    model = DeepForecaster(args.width, covariates=4).to(device).eval()
    values, covariates = make_series(10 * args.series, args.history + args.horizon)
    values, covariates = values.to(device), covariates.to(device)
    levels = torch.arange(1, 100, device=device) / 100

    with torch.inference_mode():
        for step in range(args.steps):
            rows = slice(step % 10 * args.series, (step % 10 + 1) * args.series)
            history, truth = values[rows, : args.history], values[rows, args.history :]
            paths = sample_paths(model, history, covariates[rows], args.samples, args.horizon)
            forecast = percentiles(paths, levels)
            score = pinball(forecast, truth, levels)
            if step % 10 == 0:
                print(f"request {step}: score {score.item():.4f}, median {forecast[49].mean().item():.4f}")
            # step


if __name__ == "__main__":
    main()
