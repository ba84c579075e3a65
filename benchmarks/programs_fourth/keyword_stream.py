"""Spot keywords in live audio streams: every chunk of sound moves the window that a network classifies."""

# cpu: --streams 6 --seconds 4 --width 24
# cuda: --streams 1024 --seconds 4 --width 64

import argparse
import math

import torch
import torch.nn as nn

RATE = 16000
HOP = 160
SIZE = 512
CHUNK = 10 * HOP


def to_mel(hertz):
    return 2595.0 * math.log10(1.0 + hertz / 700.0)


def mel_filters(bands, bins, device):
    frequencies = torch.linspace(0, RATE / 2, bins, device=device)
    mels = torch.linspace(to_mel(20.0), to_mel(RATE / 2), bands + 2, device=device)
    edges = 700.0 * (10.0 ** (mels / 2595.0) - 1.0)
    rows = []
    for band in range(bands):
        rise = (frequencies - edges[band]) / (edges[band + 1] - edges[band])
        fall = (edges[band + 2] - frequencies) / (edges[band + 2] - edges[band + 1])
        rows.append(torch.minimum(rise, fall).clamp(min=0))
    return torch.stack(rows)


class LogMel(nn.Module):
    def __init__(self, bands, device):
        super().__init__()
        self.bands = bands
        # mend: filters-built-per-chunk
        self.register_buffer("taper", torch.hann_window(SIZE, device=device))
        # instead: self.register_buffer("taper", torch.hann_window(SIZE, device=device))
        # instead: self.register_buffer("filters", mel_filters(bands, SIZE // 2 + 1, device))

    def forward(self, audio):
        spectrum = torch.stft(audio, SIZE, HOP, window=self.taper, center=False, return_complex=True)
        power = torch.view_as_real(spectrum).square().sum(dim=-1)
        filters = mel_filters(self.bands, power.shape[1], audio.device)  # waste: filters-built-per-chunk
        # instead: filters = self.filters
        return (filters @ power).clamp(min=1e-8).log()


class KeywordNet(nn.Module):
    def __init__(self, bands, width, keywords):
        super().__init__()
        self.enter = nn.Sequential(nn.Conv1d(bands, 4 * width, 5, 2, 2), nn.BatchNorm1d(4 * width), nn.ReLU())
        blocks = []
        for dilation in (1, 2, 4, 8):
            blocks += [
                nn.Conv1d(4 * width, 4 * width, 9, padding=4 * dilation, dilation=dilation, groups=4 * width),
                nn.Conv1d(4 * width, 4 * width, 1),
                nn.BatchNorm1d(4 * width),
                nn.ReLU(),
            ]
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(4 * width, keywords)

    def forward(self, features):
        features = features - features.mean(dim=-1, keepdim=True)
        return self.head(self.blocks(self.enter(features)).mean(dim=-1))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--streams", type=int, default=6)
    parser.add_argument("--seconds", type=int, default=4)
    parser.add_argument("--width", type=int, default=24)
    parser.add_argument("--bands", type=int, default=128)
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    frontend = LogMel(args.bands, device).eval()
    model = KeywordNet(args.bands, args.width, 20).to(device).eval()
    sound = 0.1 * torch.randn(args.streams, 20 * CHUNK, device=device)
    sound += torch.sin(torch.arange(20 * CHUNK, device=device) * 0.2)
    audio = torch.zeros(args.streams, args.seconds * RATE + SIZE - HOP, device=device)

    with torch.inference_mode():
        features = frontend(audio)
        level = model(features).softmax(dim=-1)
        for step in range(args.steps):
            chunk = sound[:, step % 20 * CHUNK :][:, :CHUNK]
            audio = torch.cat([audio[:, CHUNK:], chunk], dim=1)
            features = frontend(audio)  # waste: whole-window-transformed
            # instead: fresh = frontend(audio[:, -(CHUNK + SIZE - HOP) :])
            # instead: features = torch.cat([features[..., fresh.shape[-1] :], fresh], dim=-1)
            level = 0.7 * level + 0.3 * model(features).softmax(dim=-1)
            if step % 10 == 0:
                print(f"chunk {step}: keyword {level[0].argmax().item()}, level {level.amax().item():.5f}")
            # step


if __name__ == "__main__":
    main()
