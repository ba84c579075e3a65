"""Backtest a probabilistic demand forecaster (DeepAR): sample paths for many series and score their quantiles."""

# cpu: --series 12 --paths 40 --history 60 --horizon 10 --width 40
# cuda: --series 96 --paths 100 --history 336 --horizon 24 --width 256

import argparse
from dataclasses import dataclass

import torch
from torch import nn


@dataclass
class Window:
    history: torch.Tensor
    future: torch.Tensor
    calendar: torch.Tensor
    series: torch.Tensor


class Forecaster(nn.Module):
    """An LSTM over scaled demand that emits the mean and spread of the next value."""

    def __init__(self, series, width, calendar=4, embedding=8):
        super().__init__()
        self.identity = nn.Embedding(series, embedding)
        self.lstm = nn.LSTM(1 + calendar + embedding, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, 2)

    def inputs(self, demand, calendar, series):
        identity = self.identity(series)[:, None].expand(-1, demand.size(1), -1)
        return torch.cat([demand.unsqueeze(-1), calendar, identity], dim=-1)

    def next_value(self, hidden):
        mean, spread = self.head(hidden).unbind(-1)
        return mean, nn.functional.softplus(spread) + 1e-3

    @torch.no_grad()
    def sample(self, window, paths):
        """(series * paths, horizon) demands, the paths of a series in a row."""
        history, calendar, series = window.history, window.calendar, window.series
        length, horizon = history.size(1), calendar.size(1) - history.size(1)
        scale = history.abs().mean(dim=1, keepdim=True) + 1.0
        demand = history / scale
        # mend: history-of-every-path
        demand = demand.repeat_interleave(paths, dim=0)
        calendar = calendar.repeat_interleave(paths, dim=0)
        series = series.repeat_interleave(paths, dim=0)
        hidden, state = self.lstm(self.inputs(demand, calendar[:, :length], series))  # waste: history-of-every-path
        hidden = hidden[:, -1]
        # instead: hidden, state = self.lstm(self.inputs(demand, calendar[:, :length], series))
        # instead: hidden = hidden[:, -1].repeat_interleave(paths, dim=0)
        # instead: state = tuple(part.repeat_interleave(paths, dim=1) for part in state)
        # instead: calendar = calendar.repeat_interleave(paths, dim=0)
        # instead: series = series.repeat_interleave(paths, dim=0)
        drawn = []
        for t in range(horizon):
            mean, spread = self.next_value(hidden)
            value = mean + spread * torch.randn_like(mean)
            drawn.append(value)
            if t + 1 < horizon:
                moment = calendar[:, length + t : length + t + 1]
                hidden, state = self.lstm(self.inputs(value[:, None], moment, series), state)
                hidden = hidden[:, 0]
        return torch.stack(drawn, dim=1) * scale.repeat_interleave(paths, dim=0)


def quantile_loss(paths, truth, levels):
    """paths: (series, paths, horizon)."""
    forecasts = paths.quantile(levels, dim=1)
    miss = truth - forecasts
    weights = levels.view(-1, 1, 1)
    return torch.maximum(weights * miss, (weights - 1) * miss).sum(dim=(1, 2)) / truth.abs().sum()


def windows(demand, history, horizon, series):
    """One window after another of all series, like the folds of a backtest."""
    time = torch.arange(demand.size(1), device=demand.device)
    angle = torch.stack([2 * torch.pi * time / period for period in (7, 30.5)], dim=-1)
    calendar = torch.cat([angle.sin(), angle.cos()], dim=-1)
    for start in range(0, demand.size(1) - history - horizon + 1, horizon):
        middle, end = start + history, start + history + horizon
        covariates = calendar[start:end].expand(len(demand), -1, -1)
        yield Window(demand[:, start:middle], demand[:, middle:end], covariates, series)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--series", type=int, default=12)
    parser.add_argument("--paths", type=int, default=40)
    parser.add_argument("--history", type=int, default=60)
    parser.add_argument("--horizon", type=int, default=10)
    parser.add_argument("--width", type=int, default=40)
    args = parser.parse_args()

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    device = "cuda" if torch.cuda.is_available() else "cpu"
    length = args.history + args.horizon * args.steps
    days = torch.arange(length, device=device)
    season = 1 + torch.sin(2 * torch.pi * days / 7 + torch.randn(args.series, 1, device=device))
    demand = torch.poisson(20 * season)
    model = Forecaster(args.series, args.width).to(device).eval()
    levels = torch.tensor([0.1, 0.5, 0.9], device=device)
    names = torch.arange(args.series, device=device)
    scores = torch.zeros(3, device=device)

    for step, window in enumerate(windows(demand, args.history, args.horizon, names)):
        paths = model.sample(window, args.paths).view(args.series, args.paths, args.horizon)
        scores += quantile_loss(paths, window.future, levels)
        if step % 10 == 9 or step == args.steps - 1:
            low, middle, high = (scores / (step + 1)).tolist()
            print(f"fold {step}: loss {low:.4f} at 10 %, {middle:.4f} at 50 %, {high:.4f} at 90 %")
        # step


if __name__ == "__main__":
    main()
