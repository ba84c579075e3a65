"""Train a keyword spotter on waveforms: log-mel features, masks and mixup on the device, separable convolutions."""

# cpu: --width 48 --batch-size 32
# cuda: --width 256 --batch-size 512

import argparse
import math

import torch
from torch import nn
from torch.nn import functional as F

RATE = 16000


def mel_bank(mels, bins):
    top = 2595 * math.log10(1 + RATE / 2 / 700)
    edges = 700 * (10 ** (torch.linspace(0, top, mels + 2) / 2595) - 1) * 2 * (bins - 1) / RATE
    frequencies = torch.arange(bins)
    low, mid, high = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    return torch.minimum((frequencies - low) / (mid - low), (high - frequencies) / (high - mid)).clamp(min=0)


class Features(nn.Module):
    def __init__(self, mels=64, size=512, hop=256):
        super().__init__()
        self.size, self.hop = size, hop
        self.register_buffer("window", torch.hann_window(size), persistent=False)
        self.register_buffer("bank", mel_bank(mels, size // 2 + 1), persistent=False)

    def forward(self, wave):
        spectrum = torch.stft(wave, self.size, self.hop, window=self.window, return_complex=True)
        return (self.bank @ torch.view_as_real(spectrum).square().sum(-1)).add(1e-5).log()


def strike(mel, widest, dim):
    """Blank one random stretch of every example along dim."""
    length = mel.size(dim)
    start = torch.randint(0, length - widest, (mel.size(0), 1), device=mel.device)
    end = start + torch.randint(0, widest, (mel.size(0), 1), device=mel.device)
    place = torch.arange(length, device=mel.device)
    hit = (place >= start) & (place < end)
    return mel.masked_fill(hit.unsqueeze(3 - dim), 0.0)


class Separable(nn.Module):
    def __init__(self, width, kernel, dilation):
        super().__init__()
        padding = dilation * (kernel - 1) // 2
        self.wide = nn.Conv1d(width, width, kernel, padding=padding, dilation=dilation, groups=width, bias=False)
        self.point = nn.Conv1d(width, width, 1, bias=False)
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x):
        return F.relu(x + self.norm(self.point(self.wide(x))))


class Spotter(nn.Module):
    def __init__(self, width, classes, mels=64):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv1d(mels, width, 5, padding=2, bias=False), nn.BatchNorm1d(width), nn.ReLU(inplace=True)
        )
        self.body = nn.Sequential(*(Separable(width, 9, dilation) for dilation in (1, 1, 2, 2, 4, 4)))
        self.score = nn.Conv1d(width, 1, 1)
        self.head = nn.Linear(width, classes)

    def forward(self, mel):
        x = self.body(self.stem(mel))
        weight = self.score(x).softmax(-1)
        return self.head((x * weight).sum(-1))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--width", type=int, default=48)
    parser.add_argument("--classes", type=int, default=35)
    args = parser.parse_args()

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    device = "cuda" if torch.cuda.is_available() else "cpu"
    labels = torch.randint(0, args.classes, (1024,), device=device)
    time = torch.arange(RATE, device=device) / RATE
    waves = torch.sin(2 * torch.pi * (200 + 60 * labels[:, None]) * time) + 0.3 * torch.randn(1024, RATE, device=device)

    features = Features().to(device)
    model = Spotter(args.width, args.classes).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-2, fused=True)
    blend = torch.distributions.Beta(torch.tensor(0.3, device=device), torch.tensor(0.3, device=device))
    right, seen = torch.zeros((), device=device), 0

    for step in range(args.steps):
        rows = torch.randint(0, waves.size(0), (args.batch_size,), device=device)
        wanted = labels[rows]
        with torch.no_grad():
            mel = strike(strike(features(waves[rows]), 12, 1), 16, 2)
            partner = torch.randperm(args.batch_size, device=device)
            share = blend.sample((args.batch_size,))
            mel = torch.lerp(mel[partner], mel, share[:, None, None])
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            scores = model(mel)
        scores = scores.float()
        first = F.cross_entropy(scores, wanted, reduction="none", label_smoothing=0.1)
        second = F.cross_entropy(scores, wanted[partner], reduction="none", label_smoothing=0.1)
        loss = torch.lerp(second, first, share).mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        right += (scores.detach().argmax(-1) == wanted).sum()
        seen += args.batch_size
        if step % 10 == 0:
            print(f"step {step} loss {loss.item():.4f} accuracy {right.item() / seen:.3f}")
        # step


if __name__ == "__main__":
    main()
