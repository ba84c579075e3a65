"""Trains a convolutional network that spots keywords in clips of a second; features are made once, before training."""

# cpu: --width 32 --batch-size 8 --clips 32
# cuda: --width 256 --batch-size 512 --clips 4096 --compile

import argparse

import torch
import torch.nn.functional as F
from torch import nn

RATE, HOP, MELS, FRAMES = 16000, 125, 64, 128


def mel_filters(bins):
    """Triangles on the mel scale, one a column."""
    top = 2595 * torch.log10(torch.tensor(1 + RATE / 2 / 700))
    edges = 700 * (10 ** (torch.linspace(0, 1, MELS + 2) * top / 2595) - 1)
    pitch = torch.linspace(0, RATE / 2, bins)[:, None]
    rising = (pitch - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - pitch) / (edges[2:] - edges[1:-1])
    return torch.minimum(rising, falling).clamp(min=0)


@torch.no_grad()
def features_of(waves):
    """Log-mel spectrograms, folded so that 4 by 4 of their points are the channels of one."""
    window = torch.hann_window(512, device=waves.device)
    spectra = torch.stft(waves, 512, HOP, window=window, return_complex=True).abs().square()
    mels = mel_filters(257).to(waves.device).T @ spectra[..., :FRAMES]
    return F.pixel_unshuffle((mels + 1e-6).log()[:, None], 4)


class Residual(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)

    def forward(self, x):
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        return F.relu(self.norm2(self.conv2(y)) + x, inplace=True)


class Spotter(nn.Module):
    def __init__(self, width, keywords):
        super().__init__()
        self.stem = nn.Conv2d(16, width, 3, padding=1)
        self.early = nn.Sequential(Residual(width), Residual(width))
        self.down = nn.Conv2d(width, 2 * width, 2, stride=2)
        self.late = nn.Sequential(Residual(2 * width), Residual(2 * width))
        self.head = nn.Linear(2 * width, keywords)

    def forward(self, features):
        x = self.early(self.stem(features))
        return self.head(self.late(self.down(x)).mean((2, 3)))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--keywords", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--clips", type=int, default=4096)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cudnn.benchmark = True
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    clips = torch.randn(args.clips, RATE, device=device).split(args.batch_size)
    pool = [features_of(waves).to(dtype, memory_format=torch.channels_last) for waves in clips]
    labels = torch.randint(args.keywords, (len(pool), args.batch_size), device=device)
    model = Spotter(args.width, args.keywords).to(device, dtype, memory_format=torch.channels_last)
    if args.compile:
        model = torch.compile(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, fused=True)

    for step in range(args.steps):
        batch = step % len(pool)
        loss = F.cross_entropy(model(pool[batch]), labels[batch])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
        # step


if __name__ == "__main__":
    main()
