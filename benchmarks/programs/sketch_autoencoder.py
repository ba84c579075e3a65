"""Trains an autoencoder on a small set of sketches, for many short epochs."""

# cpu: --hidden 512 --batch-size 64 --sketches 768 --workers 2 --steps 60
# cuda: --hidden 8192 --batch-size 256 --sketches 3072 --workers 4
# block: 24

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Sketches(Dataset):
    """Sketches of a circle each."""

    def __init__(self, count, side=28):
        line = torch.linspace(-1.0, 1.0, side)
        y, x = torch.meshgrid(line, line, indexing="ij")
        angle = 2.4 * torch.arange(count)[:, None, None]
        radius = torch.linspace(0.2, 0.7, count)[:, None, None]
        distance = ((x - 0.3 * angle.cos()) ** 2 + (y - 0.3 * angle.sin()) ** 2).sqrt()
        self.sketches = torch.exp(-40 * (distance - radius) ** 2).flatten(1)

    def __len__(self):
        return len(self.sketches)

    def __getitem__(self, index):
        return self.sketches[index]


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
    parser.add_argument("--hidden", type=int, default=8192)
    parser.add_argument("--code", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--sketches", type=int, default=3072)
    parser.add_argument("--workers", type=int, default=4)
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
