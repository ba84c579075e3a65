"""Fits the density of detector readings with a normalizing flow of affine couplings."""

# cpu: --features 64 --hidden 256 --couplings 4 --batch-size 256
# cuda: --features 512 --hidden 4096 --couplings 6 --batch-size 16384 --compile

import argparse
import math

import torch
from torch import nn


class Coupling(nn.Module):
    """Scales and shifts one half of the features by what the other half says, and swaps them."""

    def __init__(self, features, hidden):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(features // 2, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, features),
        )
        nn.init.zeros_(self.net[-1].weight)

    def forward(self, x, log_volume):
        kept, moved = x.chunk(2, dim=1)
        log_scale, shift = self.net(kept).float().chunk(2, dim=1)
        log_scale = 2 * torch.tanh(log_scale / 2)
        moved = moved * log_scale.exp() + shift
        return torch.cat([moved, kept], dim=1), log_volume + log_scale.sum(1)


class Flow(nn.Module):
    def __init__(self, features, hidden, couplings):
        super().__init__()
        self.constant = 0.5 * features * math.log(2 * math.pi)
        self.couplings = nn.ModuleList([Coupling(features, hidden) for _ in range(couplings)])

    def forward(self, x):
        """The logarithm of the density of each row."""
        log_volume = x.new_zeros(len(x))
        for coupling in self.couplings:
            x, log_volume = coupling(x, log_volume)
        return log_volume - 0.5 * x.square().sum(1) - self.constant


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--features", type=int, default=512)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--couplings", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=16384)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with torch.device(device):
        model = Flow(args.features, args.hidden, args.couplings)
    if args.compile:
        for coupling in model.couplings:
            coupling.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    sources = torch.randn(8, args.batch_size, args.features, device=device)
    readings = torch.sinh(sources @ torch.randn(args.features, args.features, device=device) * args.features**-0.5)
    total = torch.zeros((), device=device)
    for step in range(args.steps):
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = -model(readings[step % len(readings)]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total += loss.detach()
        if step % 100 == 99:
            print(f"step {step}: {total.item() / 100 / args.features:.4f} nats a feature")
            total.zero_()
        # step
    print(f"the last batch: {loss.item() / args.features:.4f} nats a feature")


if __name__ == "__main__":
    main()
