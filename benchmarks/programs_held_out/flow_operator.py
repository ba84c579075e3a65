"""Learns how a fluid moves: a Fourier neural operator from the last states of the vorticity to the next ones."""

# cpu: --grid 32 --width 24 --modes 8 --batch-size 6 --samples 512 --past 4 --future 2
# cuda: --grid 128 --width 64 --modes 16 --batch-size 32 --samples 2048 --past 10 --future 4

import argparse

import torch
import torch.nn.functional as F
from torch import nn


class Normalizer:
    """Zero mean and unit deviation at every place of the grid, as in the training data."""

    def __init__(self, data):
        self.data = data
        # mend: statistics-every-step
        # instead: self.mean, self.deviation = data.mean(dim=0), data.std(dim=0) + 1e-5

    def statistics(self):
        # mend: statistics-every-step
        mean = self.data.mean(dim=0)  # waste: statistics-every-step
        deviation = self.data.std(dim=0) + 1e-5  # waste: statistics-every-step
        return mean, deviation
        # instead: return self.mean, self.deviation

    def encode(self, x):
        mean, deviation = self.statistics()
        return (x - mean) / deviation

    def decode(self, x):
        mean, deviation = self.statistics()
        return torch.addcmul(mean, x, deviation)


class SpectralConv(nn.Module):
    """Multiplies the lowest modes by weights, and drops the others."""

    def __init__(self, width, modes):
        super().__init__()
        self.modes = modes
        self.weights = nn.Parameter(torch.randn(2, width, width, modes, modes, 2) / width)

    def forward(self, x):
        m = self.modes
        low, high = torch.view_as_complex(self.weights)
        spectrum = torch.fft.rfft2(x, norm="ortho")
        out = torch.zeros_like(spectrum)
        out[:, :, :m, :m] = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, :m, :m], low)
        out[:, :, -m:, :m] = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, -m:, :m], high)
        return torch.fft.irfft2(out, s=x.shape[-2:], norm="ortho")


class FourierOperator(nn.Module):
    def __init__(self, past, future, width, modes, layers):
        super().__init__()
        self.lift = nn.Conv2d(past, width, 1)
        self.spectral = nn.ModuleList([SpectralConv(width, modes) for _ in range(layers)])
        self.local = nn.ModuleList([nn.Conv2d(width, width, 1) for _ in range(layers)])
        self.project = nn.Sequential(nn.Conv2d(width, 2 * width, 1), nn.GELU(), nn.Conv2d(2 * width, future, 1))

    def forward(self, x):
        x = self.lift(x)
        for spectral, local in zip(self.spectral, self.local, strict=True):
            x = F.gelu(spectral(x) + local(x))
        return self.project(x)


def smooth_fields(count, grid, device):
    """Random periodic fields whose modes decay."""
    frequency = torch.fft.fftfreq(grid, 1 / grid, device=device)
    decay = (1 + frequency[:, None] ** 2 + frequency[: grid // 2 + 1] ** 2) ** -1.5
    noise = torch.randn(count, grid, grid, device=device)
    return torch.fft.irfft2(torch.fft.rfft2(noise) * decay, s=(grid, grid)) * grid**0.5


def make_trajectories(args, device):
    """Vorticity that drifts and fades: (samples, past, ...) and (samples, future, ...)."""
    field = smooth_fields(args.samples, args.grid, device) + 1
    states = []
    for moment in range(args.past + args.future):
        states.append(0.98**moment * field.roll((moment, 2 * moment), dims=(1, 2)))
    states = torch.stack(states, dim=1)
    return states[:, : args.past].contiguous(), states[:, args.past :].contiguous()


def relative_error(answer, truth):
    """Euclidean, of a sample relative to its norm."""
    return ((answer - truth).flatten(1).norm(dim=1) / truth.flatten(1).norm(dim=1)).mean()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--grid", type=int, default=128)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--modes", type=int, default=16)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--past", type=int, default=10)
    parser.add_argument("--future", type=int, default=4)
    parser.add_argument("--samples", type=int, default=2048)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    inputs, outputs = make_trajectories(args, device)
    input_scale, output_scale = Normalizer(inputs), Normalizer(outputs)
    model = FourierOperator(args.past, args.future, args.width, args.modes, args.layers).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, fused=True)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1000, gamma=0.5)
    for step in range(args.steps):
        rows = torch.randint(args.samples, (args.batch_size,), device=device)
        answer = output_scale.decode(model(input_scale.encode(inputs[rows])))
        loss = relative_error(answer, outputs[rows])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 20 == 0:
            print(f"step {step}: relative error {loss.item():.4f}")
        # step


if __name__ == "__main__":
    main()
