"""Tells what grows on a field: a vision transformer on satellite images of sixteen bands."""

# cpu: --width 128 --heads 4 --depth 3 --batch-size 4 --side 48 --patch 4
# cuda: --width 768 --heads 12 --depth 8 --batch-size 64 --side 160 --patch 8

import argparse
import math

import torch
import torch.nn.functional as F
from torch import nn

BANDS = 16
CROPS = 24


class EncoderLayer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        y = self.norm1(x)
        y, _ = self.attention(y, y, y)  # waste: weights-that-nobody-reads
        # instead: y, _ = self.attention(y, y, y, need_weights=False)
        x = x + y
        return x + self.mlp(self.norm2(x))


class FieldTransformer(nn.Module):
    def __init__(self, side, patch, width, heads, depth):
        super().__init__()
        self.patch = nn.Conv2d(BANDS, width, patch, stride=patch)
        self.place = nn.Parameter(torch.randn(1, (side // patch) ** 2, width) * 0.02)
        self.season = nn.Embedding(12, width)
        self.layers = nn.ModuleList([EncoderLayer(width, heads) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, CROPS)

    def forward(self, images, months):
        x = self.patch(images).flatten(2).transpose(1, 2)
        x = x + self.place + self.season(months)[:, None]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x).mean(dim=1))


class Fields:
    """Images of fields on the device: every crop has a spectrum of its own."""

    def __init__(self, count, side, device):
        self.crops = torch.randint(CROPS, (count,), device=device)
        self.months = torch.randint(12, (count,), device=device)
        spectra = torch.randn(CROPS, BANDS, device=device)
        images = spectra[self.crops][:, :, None, None] + torch.randn(count, BANDS, side, side, device=device)
        self.images = images.contiguous(memory_format=torch.channels_last)

    def batch(self, size):
        rows = torch.randint(len(self.crops), (size,), device=self.crops.device)
        return self.images[rows], self.months[rows], self.crops[rows]


def parameter_groups(model, decay):
    """Weights decay, and biases and norms do not."""
    weights = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    return [dict(params=weights, weight_decay=decay), dict(params=others, weight_decay=0.0)]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--side", type=int, default=160)
    parser.add_argument("--patch", type=int, default=8)
    parser.add_argument("--fields", type=int, default=256)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--warmup", type=int, default=100)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    fields = Fields(args.fields, args.side, device)
    model = FieldTransformer(args.side, args.patch, args.width, args.heads, args.depth)
    model = model.to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(parameter_groups(model, 0.05), lr=args.lr, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / args.warmup) * (1 + math.cos(math.pi * step / 1e5)) / 2
    )
    model.train()
    for step in range(args.steps):
        images, months, crops = fields.batch(args.batch_size)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            scores = model(images, months)
        loss = F.cross_entropy(scores.float(), crops, label_smoothing=0.05)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 20 == 0:
            print(f"step {step}: loss {loss.item():.3f}, rate {schedule.get_last_lr()[0]:.2e}")
        # step


if __name__ == "__main__":
    main()
