"""Pretrain a masked autoencoder on video: tubes of patches are hidden, only visible ones are embedded and encoded."""

# cpu: --frames 8 --size 64 --batch-size 8 --width 96 --layers 3
# cuda: --frames 16 --size 224 --batch-size 48 --width 768 --layers 8

import argparse

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, width, heads=6):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, d))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


def patches_of(video, patch, span):
    """(batch, frames, height, width, 3) bytes to (batch, time, places, values), still bytes."""
    b, f, h, w, c = video.shape
    cut = video.view(b, f // span, span, h // patch, patch, w // patch, patch, c)
    return cut.permute(0, 1, 3, 5, 2, 4, 6, 7).reshape(b, f // span, (h // patch) * (w // patch), -1)


class MaskedVideo(nn.Module):
    def __init__(self, times, places, values, width, layers, hidden=0.9, decoder_layers=1):
        super().__init__()
        self.kept = max(1, round(places * (1 - hidden)))
        self.values = values
        half = width // 2
        self.embed = nn.Linear(values, width)
        self.position = nn.Parameter(0.02 * torch.randn(times, places, width))
        self.encoder = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.bridge = nn.Linear(width, half)
        self.mask_token = nn.Parameter(0.02 * torch.randn(half))
        self.decoder_position = nn.Parameter(0.02 * torch.randn(times, places, half))
        self.decoder = nn.ModuleList(Block(half) for _ in range(decoder_layers))
        self.decoder_norm = nn.LayerNorm(half)
        self.pixels = nn.Linear(half, values)

    def forward(self, patches):
        b, t, p, _ = patches.shape
        order = torch.rand(b, p, device=patches.device).argsort(dim=1)
        shown, masked = order[:, : self.kept], order[:, self.kept :]
        rows = torch.arange(b, device=patches.device)[:, None]

        visible = patches.transpose(1, 2)[rows, shown]
        dtype = self.embed.weight.dtype
        x = self.embed(visible.to(dtype).div_(127.5).sub_(1.0)) + self.position.transpose(0, 1)[shown]
        x = x.flatten(1, 2)
        for block in self.encoder:
            x = block(x)
        x = self.bridge(self.norm(x))

        place = self.decoder_position.transpose(0, 1)
        seen = x.view(b, self.kept, t, -1) + place[shown]
        y = torch.cat([seen, self.mask_token + place[masked]], dim=1).flatten(1, 2)
        for block in self.decoder:
            y = block(y)
        guess = self.pixels(self.decoder_norm(y[:, self.kept * t :]))

        target = patches.transpose(1, 2)[rows, masked].flatten(1, 2).to(dtype)
        target = F.layer_norm(target, (self.values,))
        return F.mse_loss(guess, target)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--frames", type=int, default=8)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--patch", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--layers", type=int, default=3)
    args = parser.parse_args()

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    span = 2
    times, places = args.frames // span, (args.size // args.patch) ** 2
    values = span * args.patch**2 * 3
    with torch.device(device):
        model = MaskedVideo(times, places, values, args.width, args.layers).to(dtype)
        shape = (4 * args.batch_size, args.frames, args.size, args.size, 3)
        videos = torch.randint(0, 256, shape, dtype=torch.uint8)
    clips = patches_of(videos, args.patch, span)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, betas=(0.9, 0.95), weight_decay=0.05, fused=True)

    for step in range(args.steps):
        loss = model(clips[step % 4 * args.batch_size :][: args.batch_size])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if step % 10 == 0 or step == args.steps - 1:
            print(f"step {step}: loss {loss.item():.4f}")
        # step


if __name__ == "__main__":
    main()
