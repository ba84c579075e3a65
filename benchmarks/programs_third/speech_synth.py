"""Trains a non-autoregressive text-to-speech model that predicts durations, pitch and a mel spectrogram."""

# cpu: --width 64 --layers 2 --batch-size 8 --phonemes 40
# cuda: --width 256 --layers 4 --batch-size 16 --phonemes 60

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F


def sinusoids(length, width, device):
    # mend: position-table
    angles = []
    for pos in range(length):
        angles.append([pos / 10000 ** (i // 2 * 2 / width) for i in range(width)])  # waste: position-table
    table = torch.tensor(angles, device=device)
    # instead: exponent = torch.arange(width, device=device).div(2, rounding_mode="floor") * 2 / width
    # instead: table = torch.arange(length, device=device).unsqueeze(1) / 10000.0**exponent
    return torch.stack([table[:, 0::2].sin(), table[:, 1::2].cos()], dim=-1).flatten(1)


class FeedForwardTransformer(nn.Module):
    def __init__(self, width, layers):
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, F.gelu, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

    def forward(self, x):
        return self.layers(x + sinusoids(x.size(1), x.size(2), x.device))


class VariancePredictor(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1 = nn.Conv1d(width, width, 3, padding=1)
        self.conv2 = nn.Conv1d(width, width, 3, padding=1)
        self.out = nn.Linear(width, 1)

    def forward(self, x):
        y = F.relu(self.conv2(F.relu(self.conv1(x.transpose(1, 2)))))
        return self.out(y.transpose(1, 2)).squeeze(-1)


class LengthRegulator(nn.Module):
    def forward(self, hidden, durations, total):
        # mend: phoneme-expansion
        stretched = []
        for sentence, counts in zip(hidden, durations, strict=False):
            parts = [
                row.expand(int(n), -1) for row, n in zip(sentence, counts, strict=False)
            ]  # waste: phoneme-expansion
            frames = torch.cat(parts)
            stretched.append(F.pad(frames, (0, 0, 0, total - frames.size(0))))
        return torch.stack(stretched)
        # instead: ends = durations.cumsum(1)
        # instead: clock = torch.arange(total, device=hidden.device).expand(hidden.size(0), -1).contiguous()
        # instead: owner = torch.searchsorted(ends, clock, right=True).clamp(max=hidden.size(1) - 1)
        # instead: frames = hidden.gather(1, owner.unsqueeze(-1).expand(-1, -1, hidden.size(2)))
        # instead: return frames * (clock < ends[:, -1:]).unsqueeze(-1).to(hidden.dtype)


class Synthesizer(nn.Module):
    def __init__(self, symbols, width, layers, mels):
        super().__init__()
        self.embed = nn.Embedding(symbols, width)
        self.encoder = FeedForwardTransformer(width, layers)
        self.duration = VariancePredictor(width)
        self.pitch = VariancePredictor(width)
        self.pitch_embed = nn.Linear(1, width)
        self.regulator = LengthRegulator()
        self.decoder = FeedForwardTransformer(width, layers)
        self.mel = nn.Linear(width, mels)

    def forward(self, phonemes, durations, pitch, total):
        hidden = self.encoder(self.embed(phonemes))
        log_durations = self.duration(hidden)
        predicted_pitch = self.pitch(hidden)
        hidden = hidden + self.pitch_embed(pitch.unsqueeze(-1))
        frames = self.regulator(hidden, durations, total)
        return self.mel(self.decoder(frames)), log_durations, predicted_pitch


def make_utterances(count, phonemes, symbols, mels, seed):
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(symbols, (count, phonemes), generator=generator)
    durations = 3 + text % 5 + torch.randint(0, 3, (count, phonemes), generator=generator)
    pitch = torch.sin(text.float()) + 0.1 * torch.randn(count, phonemes, generator=generator)
    total = int(durations.sum(1).max())
    timbre = torch.randn(symbols, mels, generator=generator)
    mel = torch.zeros(count, total, mels)
    for i in range(count):
        frames = timbre[text[i]].repeat_interleave(durations[i], dim=0)
        mel[i, : frames.size(0)] = frames
    return text, durations, pitch, mel, total


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--symbols", type=int, default=70)
    parser.add_argument("--mels", type=int, default=80)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--phonemes", type=int, default=40)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args()

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Synthesizer(args.symbols, args.width, args.layers, args.mels).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    *data, total = make_utterances(args.batch_size * 8, args.phonemes, args.symbols, args.mels, seed=12)
    data = [part.to(device).split(args.batch_size) for part in data]

    for step in range(args.steps):
        phonemes, durations, pitch, mel = (part[step % 8] for part in data)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            output, log_durations, predicted_pitch = model(phonemes, durations, pitch, total)
        loss = F.l1_loss(output.float(), mel)
        loss = loss + 0.1 * F.mse_loss(log_durations.float(), durations.float().log())
        loss = loss + 0.1 * F.mse_loss(predicted_pitch.float(), pitch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0 or step == args.steps - 1:
            print(f"step {step} loss {loss.item():.5f}")
        # step


if __name__ == "__main__":
    main()
