"""Forecasts what bakeries will sell: a level of each product that is smoothed over time, and a network around it."""

# cpu: --days 96 --width 192 --layers 2 --batch-size 24 --products 512
# cuda: --days 224 --width 1024 --layers 4 --batch-size 512 --products 8192

import argparse
import math

import torch
import torch.nn.functional as F
from torch import nn

WEEK = 7
SEEN = 28
AHEAD = 7


class Smoothing(nn.Module):
    """The level of each product: a mean of its sales that forgets, at a speed that is learned."""

    def __init__(self, products):
        super().__init__()
        self.speed = nn.Embedding(products, 1)
        nn.init.constant_(self.speed.weight, -1.5)

    def forward(self, sales, products):
        speed = self.speed(products)
        alpha, kept = torch.sigmoid(speed).squeeze(1), torch.sigmoid(-speed).squeeze(1)
        # mend: level-day-by-day
        level = sales[:, 0]
        levels = [level]
        for day in range(1, sales.shape[1]):
            level = alpha * sales[:, day] + kept * level  # waste: level-day-by-day
            levels.append(level)
        return torch.stack(levels, dim=1)
        # instead: days = torch.arange(sales.shape[1], device=sales.device)
        # instead: age = (days[:, None] - days).clamp(min=0)
        # instead: weights = torch.exp(F.logsigmoid(-speed)[:, None] * age).tril()
        # instead: first = F.pad(sales[:, :1], (0, sales.shape[1] - 1))
        # instead: added = alpha[:, None] * (sales - first) + first
        # instead: return (weights * added[:, None]).sum(-1)


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x)), approximate="tanh"))


class Demand(nn.Module):
    """What is sold in the next week, relative to the level, from the last four weeks and the kind of the product."""

    def __init__(self, args):
        super().__init__()
        self.smoothing = Smoothing(args.products)
        self.kinds = nn.Embedding(args.products, args.width)
        self.first = nn.Linear(SEEN, args.width)
        self.blocks = nn.Sequential(*[Residual(args.width) for _ in range(args.layers)])
        self.norm = nn.LayerNorm(args.width)
        self.last = nn.Linear(args.width, AHEAD)

    def forward(self, sales, products):
        """The logarithms of sales forecast and sold, for all weeks that have four before them."""
        levels = self.smoothing(sales, products).log()
        logs = sales.log()
        ends = levels[:, SEEN - 1 : -AHEAD : WEEK]
        seen = logs[:, :-AHEAD].unfold(1, SEEN, WEEK) - ends[..., None]
        sold = logs[:, SEEN:].unfold(1, AHEAD, WEEK)
        x = self.first(seen) + self.kinds(products)[:, None]
        return self.last(self.norm(self.blocks(x))).float() + ends[..., None], sold


def sold_in_shops(products, days):
    """Sales that follow the week and drift."""
    clock = torch.arange(days)
    week = torch.exp(0.4 * torch.sin(2 * math.pi * (clock / WEEK + torch.rand(products, 1))))
    drift = torch.exp(0.02 * torch.randn(products, days).cumsum(1))
    return 40 * torch.rand(products, 1).add(0.1) * week * drift * torch.exp(0.1 * torch.randn(products, days))


def quantile_loss(forecast, sold, quantile=0.6):
    """Bread that is missing costs more than bread that is left."""
    apart = sold - forecast
    return torch.maximum(quantile * apart, (quantile - 1) * apart).mean()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--products", type=int, default=8192)
    parser.add_argument("--days", type=int, default=224)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = Demand(args).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    history = sold_in_shops(args.products, args.days + 364).to(device)
    days = torch.arange(args.days, device=device)
    for step in range(args.steps):
        products = torch.randint(args.products, (args.batch_size,), device=device)
        starts = torch.randint(364, (args.batch_size, 1), device=device)
        sales = history[products[:, None], starts + days]
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            forecast, sold = model(sales, products)
        loss = quantile_loss(forecast, sold)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.4f}")
        # step


if __name__ == "__main__":
    main()
