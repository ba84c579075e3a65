"""Serves a keyword-spotting conformer on batches of one-second recordings."""

# cpu: --dim 96 --depth 3 --batch-size 4
# cuda: --dim 384 --depth 12 --batch-size 256

import argparse
import math

import torch
import torch.nn.functional as F
from torch import nn


class LogMel(nn.Module):
    def __init__(self, rate=16000, n_fft=512, hop=160, bands=64):
        super().__init__()
        self.n_fft = n_fft
        self.hop = hop
        self.register_buffer("window", torch.hann_window(n_fft))
        top = 2595 * math.log10(1 + rate / 2 / 700)
        edges = 700 * (10 ** (torch.linspace(0, top, bands + 2) / 2595) - 1)
        bins = torch.linspace(0, rate / 2, n_fft // 2 + 1).unsqueeze(1)
        rising = (bins - edges[:-2]) / (edges[1:-1] - edges[:-2])
        falling = (edges[2:] - bins) / (edges[2:] - edges[1:-1])
        self.register_buffer("filters", torch.minimum(rising, falling).clamp(min=0))

    def forward(self, wave):
        spectrum = torch.stft(wave, self.n_fft, self.hop, window=self.window, return_complex=True)
        power = torch.view_as_real(spectrum).square().sum(-1)
        mel = (power.transpose(1, 2) @ self.filters).clamp(min=1e-6).log()
        return mel - mel.mean(dim=1, keepdim=True)


class Subsample(nn.Module):
    """Two strided convolutions: a quarter of the frames, projected to the model's width."""

    def __init__(self, bands, dim, channels=32):
        super().__init__()
        self.conv1 = nn.Conv2d(1, channels, 3, stride=2, padding=1)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride=2, padding=1)
        self.project = nn.Linear(channels * bands // 4, dim)

    def forward(self, mel):
        h = F.relu(self.conv2(F.relu(self.conv1(mel.unsqueeze(1)))))
        return self.project(h.transpose(1, 2).flatten(2))


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, d))


class ConvModule(nn.Module):
    def __init__(self, dim, kernel=9):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.expand = nn.Linear(dim, 2 * dim)
        self.depthwise = nn.Conv1d(dim, dim, kernel, padding=kernel // 2, groups=dim)
        self.norm_inner = nn.LayerNorm(dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x):
        h = F.glu(self.expand(self.norm(x)), dim=-1)
        h = self.depthwise(h.transpose(1, 2)).transpose(1, 2)
        return self.out(F.silu(self.norm_inner(h)))


class FeedForward(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x):
        return self.down(F.silu(self.up(self.norm(x))))


class ConformerBlock(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.ff1 = FeedForward(dim)
        self.attention = Attention(dim, heads)
        self.conv = ConvModule(dim)
        self.ff2 = FeedForward(dim)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x):
        x = x + 0.5 * self.ff1(x)
        x = x + self.attention(x)
        x = x + self.conv(x)
        x = x + 0.5 * self.ff2(x)
        return self.norm(x)


class KeywordNet(nn.Module):
    def __init__(self, bands, dim, depth, heads, keywords):
        super().__init__()
        self.subsample = Subsample(bands, dim)
        self.blocks = nn.Sequential(*(ConformerBlock(dim, heads) for _ in range(depth)))
        self.classify = nn.Linear(dim, keywords)

    def forward(self, mel):
        return self.classify(self.blocks(self.subsample(mel)).mean(dim=1))


def make_recordings(count, batch_size, generator):
    """Tones with a random pitch in noise."""
    time = torch.arange(16000) / 16000
    pitch = 200 + 2000 * torch.rand(count, batch_size, 1, generator=generator)
    noise = torch.randn(count, batch_size, 16000, generator=generator)
    return torch.sin(2 * math.pi * pitch * time) + 0.3 * noise


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--dim", type=int, default=96)
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--keywords", type=int, default=35)
    args = parser.parse_args()

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32

    requests = make_recordings(6, args.batch_size, torch.Generator().manual_seed(1))
    if device == "cuda":
        requests = requests.pin_memory()
    front = LogMel().to(device)
    model = KeywordNet(64, args.dim, args.depth, args.heads, args.keywords).to(device, dtype).eval()

    counts = [0] * args.keywords
    with torch.inference_mode():
        for step in range(args.steps):
            wave = requests[step % len(requests)].to(device, non_blocking=True)
            scores = model(front(wave).to(dtype)).float().softmax(dim=1)
            best, keyword = scores.max(dim=1)
            for score, index in torch.stack([best, keyword.float()], dim=1).tolist():
                if score > 1.5 / args.keywords:
                    counts[int(index)] += 1
            # step
    heard = sorted(((c, i) for i, c in enumerate(counts) if c), reverse=True)
    print(f"{sum(counts)} keywords in {args.steps * args.batch_size} recordings, most often {heard[:3]}")


if __name__ == "__main__":
    main()
