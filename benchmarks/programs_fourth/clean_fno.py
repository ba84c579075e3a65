"""Train a two-dimensional Fourier neural operator that maps coefficient fields to solution fields."""

# cpu: --size 48 --batch-size 6 --width 20 --modes 10
# cuda: --size 128 --batch-size 32 --width 64 --modes 24

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F


class SpectralConv(nn.Module):
    def __init__(self, width, modes):
        super().__init__()
        self.modes = modes
        scale = 1 / width**2
        self.low = nn.Parameter(scale * torch.rand(width, width, modes, modes, dtype=torch.cfloat))
        self.high = nn.Parameter(scale * torch.rand(width, width, modes, modes, dtype=torch.cfloat))

    def forward(self, x):
        spectrum = torch.fft.rfft2(x)
        result = torch.zeros_like(spectrum)
        m = self.modes
        result[:, :, :m, :m] = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, :m, :m], self.low)
        result[:, :, -m:, :m] = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, -m:, :m], self.high)
        return torch.fft.irfft2(result, s=x.shape[-2:])


class OperatorBlock(nn.Module):
    def __init__(self, width, modes):
        super().__init__()
        self.spectral = SpectralConv(width, modes)
        self.local = nn.Conv2d(width, width, 1)
        self.mix = nn.Sequential(nn.Conv2d(width, width, 1), nn.GELU(), nn.Conv2d(width, width, 1))

    def forward(self, x):
        return x + self.mix(F.gelu(self.spectral(x) + self.local(x)))


class FourierOperator(nn.Module):
    def __init__(self, size, width, modes, blocks=3):
        super().__init__()
        line = torch.linspace(0, 1, size)
        grid = torch.stack(torch.meshgrid(line, line, indexing="ij"))
        self.register_buffer("grid", grid[None], persistent=False)
        self.lift = nn.Conv2d(3, width, 1)
        self.blocks = nn.ModuleList(OperatorBlock(width, modes) for _ in range(blocks))
        self.project = nn.Sequential(nn.Conv2d(width, 2 * width, 1), nn.GELU(), nn.Conv2d(2 * width, 1, 1))

    def forward(self, field):
        x = self.lift(torch.cat([field, self.grid.expand(len(field), -1, -1, -1)], dim=1))
        for block in self.blocks:
            x = block(x)
        return self.project(x)


def make_fields(count, size, device):
    """Smooth random coefficients and the solutions of a screened Poisson equation with them as sources."""
    waves = torch.fft.fftfreq(size, 1 / size, device=device)
    half = torch.fft.rfftfreq(size, 1 / size, device=device)
    square = waves[:, None].square() + half.square()
    noise = torch.fft.rfft2(torch.randn(count, 1, size, size, device=device))
    spectrum = noise / (square + 9)
    source, solution = (
        torch.fft.irfft2(spectrum, s=(size, size)),
        torch.fft.irfft2(spectrum / (square + 4), s=(size, size)),
    )
    return source / source.std(), solution / solution.std()


def relative_error(predicted, truth):
    miss = (predicted - truth).flatten(1).norm(dim=1)
    return (miss / truth.flatten(1).norm(dim=1)).mean()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--size", type=int, default=48)
    parser.add_argument("--batch-size", type=int, default=6)
    parser.add_argument("--width", type=int, default=20)
    parser.add_argument("--modes", type=int, default=10)
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    torch.manual_seed(0)
    sources, solutions = make_fields(16 * args.batch_size, args.size, device)
    model = FourierOperator(args.size, args.width, args.modes).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(args.steps, 1))

    for step in range(args.steps):
        if step % 16 == 0:
            order = torch.randperm(len(sources), device=device)
        rows = order[step % 16 * args.batch_size :][: args.batch_size]
        loss = relative_error(model(sources[rows]), solutions[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 10 == 0:
            print(f"step {step}: relative error {loss.item():.4f}")
        # step


if __name__ == "__main__":
    main()
