"""Train a non-autoregressive speech synthesiser: phonemes are stretched by their durations and decoded to mel."""

# cpu: --width 32 --batch-size 8 --phonemes 64
# cuda: --width 384 --batch-size 16 --phonemes 96

import argparse

import torch
from torch import nn
from torch.nn import functional as F


class FeedForwardBlock(nn.Module):
    """Self-attention and a convolutional feed-forward part, as FastSpeech has them."""

    def __init__(self, width, heads=2):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.conv1 = nn.Conv1d(width, 2 * width, 9, padding=4)
        self.conv2 = nn.Conv1d(2 * width, width, 1)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x, keep):
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=keep[:, None, None])
        x = self.norm1(x + self.out(mixed.transpose(1, 2).reshape(batch, length, width)))
        h = self.conv2(F.relu(self.conv1(x.transpose(1, 2)))).transpose(1, 2)
        return self.norm2(x + h) * keep[..., None]


class LengthRegulator(nn.Module):
    def forward(self, hidden, durations, frames):
        # mend: stretched-phoneme-by-phoneme
        rows = []
        for states, counts in zip(hidden, durations):
            parts = []
            for state, count in zip(states, counts):
                parts.append(state.expand(int(count), -1))  # waste: stretched-phoneme-by-phoneme
            row = torch.cat(parts)  # waste: stretched-phoneme-by-phoneme
            rows.append(F.pad(row, (0, 0, 0, frames - row.size(0))))
        stretched = torch.stack(rows)
        # instead: ends = durations.cumsum(1)
        # instead: clock = torch.arange(frames, device=hidden.device).expand(hidden.size(0), -1).contiguous()
        # instead: source = torch.searchsorted(ends, clock, right=True).clamp(max=hidden.size(1) - 1)
        # instead: stretched = hidden.gather(1, source[..., None].expand(-1, -1, hidden.size(2)))
        # instead: stretched = stretched * (clock < ends[:, -1:])[..., None]
        return stretched


class DurationPredictor(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1 = nn.Conv1d(width, width, 3, padding=1)
        self.conv2 = nn.Conv1d(width, width, 3, padding=1)
        self.out = nn.Linear(width, 1)

    def forward(self, x):
        h = F.relu(self.conv2(F.relu(self.conv1(x.transpose(1, 2)))))
        return self.out(h.transpose(1, 2)).squeeze(-1)


class Synthesiser(nn.Module):
    def __init__(self, symbols, width, frames, mels, layers=2):
        super().__init__()
        self.symbols = nn.Embedding(symbols, width)
        self.places = nn.Parameter(torch.randn(frames, width) * 0.02)
        self.encoder = nn.ModuleList(FeedForwardBlock(width) for _ in range(layers))
        self.durations = DurationPredictor(width)
        self.regulator = LengthRegulator()
        self.decoder = nn.ModuleList(FeedForwardBlock(width) for _ in range(layers))
        self.mel = nn.Linear(width, mels)

    def forward(self, phonemes, durations, spoken, heard):
        x = self.symbols(phonemes) + self.places[: phonemes.size(1)]
        for block in self.encoder:
            x = block(x, spoken)
        guess = self.durations(x.detach())
        x = self.regulator(x, durations, heard.size(1)) + self.places
        for block in self.decoder:
            x = block(x, heard)
        return self.mel(x), guess


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--phonemes", type=int, default=48)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--mels", type=int, default=80)
    args = parser.parse_args()

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    device = "cuda" if torch.cuda.is_available() else "cpu"
    kept = 256
    lengths = torch.randint(args.phonemes // 2, args.phonemes + 1, (kept, 1), device=device)
    spoken = torch.arange(args.phonemes, device=device) < lengths
    phonemes = torch.randint(0, 70, (kept, args.phonemes), device=device) * spoken
    durations = torch.randint(1, 7, (kept, args.phonemes), device=device) * spoken
    totals = durations.sum(1, keepdim=True)
    frames = int(totals.max())
    heard = torch.arange(frames, device=device) < totals
    mels = torch.randn(kept, frames, args.mels, device=device) * heard[..., None]

    model = Synthesiser(70, args.width, frames, args.mels).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, fused=True)

    for step in range(args.steps):
        rows = torch.randint(0, kept, (args.batch_size,), device=device)
        mask, voiced = spoken[rows], heard[rows]
        given, guess = model(phonemes[rows], durations[rows], mask, voiced)
        mel_loss = ((given - mels[rows]).abs().mean(-1) * voiced).sum() / voiced.sum()
        wanted = torch.log1p(durations[rows].float())
        duration_loss = ((guess - wanted).square() * mask).sum() / mask.sum()
        loss = mel_loss + 0.1 * duration_loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step} loss {loss.item():.4f}")
        # step


if __name__ == "__main__":
    main()
