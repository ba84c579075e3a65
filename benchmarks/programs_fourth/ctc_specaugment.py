"""Train a small speech recogniser on waveforms with log-mel features, SpecAugment and a CTC loss."""

# cpu: --width 64 --batch-size 8 --seconds 1 --layers 1
# cuda: --width 512 --batch-size 64 --seconds 8 --layers 8

import argparse
import math

import torch
from torch import nn
from torch.nn import functional as F

RATE = 16000


def mel_bank(mels, bins):
    """Triangular filters on the mel scale, one row per filter."""
    top = 2595 * math.log10(1 + RATE / 2 / 700)
    edges = [700 * (10 ** (top * i / (mels + 1) / 2595) - 1) * 2 * (bins - 1) / RATE for i in range(mels + 2)]
    frequencies = torch.arange(bins, dtype=torch.float32)
    rows = []
    for low, mid, high in zip(edges, edges[1:], edges[2:]):
        rising = (frequencies - low) / (mid - low)
        falling = (high - frequencies) / (high - mid)
        rows.append(torch.minimum(rising, falling).clamp(min=0) * 2 / (high - low))
    return torch.stack(rows)


class LogMel(nn.Module):
    def __init__(self, mels=80, window=400, hop=160, size=512):
        super().__init__()
        self.mels, self.hop, self.size = mels, hop, size
        self.register_buffer("window", F.pad(torch.hann_window(window), ((size - window) // 2,) * 2), persistent=False)

    def forward(self, wave):
        spectrum = torch.stft(wave, self.size, self.hop, window=self.window, return_complex=True)
        power = torch.view_as_real(spectrum).square().sum(-1)
        # mend: bank-of-every-batch
        bank = mel_bank(self.mels, self.size // 2 + 1).to(wave.device)  # waste: bank-of-every-batch
        # instead: if not hasattr(self, "bank"): self.bank = mel_bank(self.mels, self.size // 2 + 1).to(wave.device)
        # instead: bank = self.bank
        mel = (bank @ power).clamp(min=1e-6).log()
        return (mel - mel.mean((1, 2), keepdim=True)) / mel.std((1, 2), keepdim=True)


class SpecAugment(nn.Module):
    def __init__(self, bands=2, band=20, gaps=8, gap=12):
        super().__init__()
        self.bands, self.band, self.gaps, self.gap = bands, band, gaps, gap

    def forward(self, mel):
        if not self.training:
            return mel
        batch, mels, frames = mel.shape
        low = torch.randint(0, mels - self.band, (batch, self.bands), device=mel.device)
        high = low + torch.randint(1, self.band, (batch, self.bands), device=mel.device)
        start = torch.randint(0, frames - self.gap, (batch, self.gaps), device=mel.device)
        end = start + torch.randint(1, self.gap, (batch, self.gaps), device=mel.device)
        # mend: masks-one-by-one
        mel = mel.clone()
        for i in range(batch):
            for k in range(self.bands):
                mel[i, low[i, k] : high[i, k]] = 0  # waste: masks-one-by-one
            for k in range(self.gaps):
                mel[i, :, start[i, k] : end[i, k]] = 0  # waste: masks-one-by-one
        # instead: rows = torch.arange(mels, device=mel.device)
        # instead: columns = torch.arange(frames, device=mel.device)
        # instead: struck_rows = ((rows >= low[..., None]) & (rows < high[..., None])).any(1)
        # instead: struck_columns = ((columns >= start[..., None]) & (columns < end[..., None])).any(1)
        # instead: mel = mel.masked_fill(struck_rows[:, :, None] | struck_columns[:, None], 0.0)
        return mel


class Recogniser(nn.Module):
    def __init__(self, width, layers, symbols, mels=80):
        super().__init__()
        self.features = LogMel(mels)
        self.augment = SpecAugment()
        self.stem = nn.Sequential(
            nn.Conv1d(mels, width, 5, stride=2, padding=2),
            nn.GELU(),
            nn.Conv1d(width, width, 5, stride=2, padding=2),
            nn.GELU(),
        )
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, symbols + 1)

    def forward(self, wave):
        with torch.no_grad():
            mel = self.augment(self.features(wave))
        return self.head(self.encoder(self.stem(mel).transpose(1, 2))).log_softmax(-1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=1.5)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--layers", type=int, default=2)
    args = parser.parse_args()

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    symbols, spoken = 40, int(args.seconds * 8)
    samples = int(args.seconds * RATE)
    waves = torch.randn(128, samples, device=device)
    texts = torch.randint(1, symbols + 1, (128, spoken), device=device)

    model = Recogniser(args.width, args.layers, symbols).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    target_lengths = torch.full((args.batch_size,), spoken)

    for step in range(args.steps):
        rows = torch.randint(0, waves.size(0), (args.batch_size,), device=device)
        scores = model(waves[rows]).transpose(0, 1)
        input_lengths = torch.full((args.batch_size,), scores.size(0))
        loss = F.ctc_loss(scores, texts[rows], input_lengths, target_lengths, zero_infinity=True)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step} loss {loss.item():.4f}")
        # step


if __name__ == "__main__":
    main()
