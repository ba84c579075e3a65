"""Tags music: log-mel spectrograms of short clips, then a convolutional network."""

# cpu: --clips 256 --batch-size 16 --seconds 1 --width 16 --workers 1
# cuda: --clips 1024 --batch-size 64 --seconds 3 --width 64 --workers 8

import argparse
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

RATE, BANDS, TAGS = 16000, 64, 50


def mel_filters(size=512):
    """Triangles over the bins of a spectrum, evenly spaced in pitch, (bands, bins)."""
    pitches = torch.linspace(0.0, 2595 * math.log10(1 + RATE / 2 / 700), BANDS + 2)
    centers = (700 * (10 ** (pitches / 2595) - 1)) * size / RATE
    bins = torch.arange(size // 2 + 1)
    rise = (bins - centers[:-2, None]) / (centers[1:-1] - centers[:-2])[:, None]
    fall = (centers[2:, None] - bins) / (centers[2:] - centers[1:-1])[:, None]
    return torch.minimum(rise, fall).clamp(min=0)


class Clips(Dataset):
    def __init__(self, count, seconds):
        generator = torch.Generator().manual_seed(0)
        self.waves = torch.randn(count, seconds * RATE, generator=generator)
        self.tags = (torch.rand(count, TAGS, generator=generator) < 0.1).float()
        self.window, self.filters = torch.hann_window(512), mel_filters()

    def __len__(self):
        return len(self.waves)

    def __getitem__(self, index):
        spectrum = torch.stft(self.waves[index], 512, 128, window=self.window, return_complex=True).abs().square()
        return (self.filters @ spectrum + 1e-6).log()[None], self.tags[index]


class Tagger(nn.Module):
    def __init__(self, width):
        super().__init__()
        layers, inputs = [], 1
        for outputs in (width, 2 * width, 4 * width, 4 * width):
            layers += [nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(outputs)]
            layers.append(nn.ReLU(inplace=True))
            inputs = outputs
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(inputs, TAGS)

    def forward(self, spectrum):
        return self.head(self.layers(spectrum).mean((2, 3)))


def forever(loader):
    while True:
        yield from loader  # waste: spectrograms-in-the-loop


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--clips", type=int, default=1024)
    parser.add_argument("--seconds", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    clips = Clips(args.clips, args.seconds)
    # mend: spectrograms-in-the-loop
    loader = DataLoader(clips, args.batch_size, shuffle=True, drop_last=True)  # waste: spectrograms-in-the-loop
    # instead: loader = DataLoader(
    # instead:     clips, args.batch_size, shuffle=True, drop_last=True, num_workers=args.workers,
    # instead:     persistent_workers=True, pin_memory=device.type == "cuda",
    # instead: )
    model = Tagger(args.width).to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for step, (spectrum, tags) in enumerate(forever(loader)):  # waste: spectrograms-in-the-loop
        if step >= args.steps:
            break
        spectrum = spectrum.to(device, non_blocking=True, memory_format=torch.channels_last)
        tags = tags.to(device, non_blocking=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = F.binary_cross_entropy_with_logits(model(spectrum).float(), tags)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
        # step


if __name__ == "__main__":
    main()
