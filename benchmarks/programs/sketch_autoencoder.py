"""Trains an autoencoder on a small set of sketches, for many short epochs."""

# cpu: --hidden 512 --batch-size 64 --sketches 768 --steps 60
# cuda: --hidden 4096 --batch-size 256 --sketches 4096 --steps 80
# block: 24

import argparse
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Sketches(Dataset):
    """Sketches of a circle each, drawn when they are asked for."""

    def __init__(self, count, side=28):
        self.count = count
        line = torch.linspace(-1.0, 1.0, side)
        self.y, self.x = torch.meshgrid(line, line, indexing="ij")

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        angle, radius = 2.4 * index, 0.2 + 0.5 * (index / self.count)
        dx, dy = 0.3 * math.cos(angle), 0.3 * math.sin(angle)
        distance = ((self.x - dx) ** 2 + (self.y - dy) ** 2).sqrt()
        return torch.exp(-40 * (distance - radius) ** 2).flatten()


class Autoencoder(nn.Module):
    def __init__(self, pixels, hidden, code):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(pixels, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, code)
        )
        self.decoder = nn.Sequential(
            nn.Linear(code, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, pixels)
        )

    def forward(self, x):
        return self.decoder(self.encoder(x))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--code", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--sketches", type=int, default=4096)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=80)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loader = DataLoader(  # waste: workers-started-every-epoch
        Sketches(args.sketches),
        batch_size=args.batch_size,
        shuffle=True,
        num_workers=args.workers,
        pin_memory=device.type == "cuda",
        # mend: workers-started-every-epoch
        # instead: persistent_workers=True,
    )
    model = Autoencoder(28 * 28, args.hidden, args.code).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    step = epoch = 0
    while step < args.steps:
        total = torch.zeros((), device=device)
        for batch in loader:  # waste: workers-started-every-epoch
            x = batch.to(device, non_blocking=True)
            loss = F.mse_loss(model(x), x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total += loss.detach()
            step += 1
            # step
        epoch += 1
        print(f"epoch {epoch}: loss {total.item() / len(loader):.4f}")


if __name__ == "__main__":
    main()
