"""Pretrains a vision transformer as a masked autoencoder: a quarter of the patches is seen, the others are painted."""

# cpu: --batch-size 8 --resolution 64 --patch 8 --width 64 --depth 3 --decoder-width 64
# cuda: --batch-size 512 --resolution 224 --patch 16 --width 1024 --depth 6 --decoder-width 512 --compile

import argparse

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, width, head=64):
        super().__init__()
        self.heads = max(1, width // head)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def waves(count, width):
    """Sines and cosines of the places of patches, (count, width)."""
    angles = torch.arange(count)[:, None] / 10000 ** (torch.arange(width // 2) / (width // 2))
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def take(rows, order):
    return rows.gather(1, order[..., None].expand(-1, -1, rows.shape[-1]))


class MaskedAutoencoder(nn.Module):
    """The loss of painting the patches that are not seen; patches stay in their random order throughout."""

    def __init__(self, args):
        super().__init__()
        self.patch, values = args.patch, 3 * args.patch**2
        self.count = (args.resolution // args.patch) ** 2
        self.seen = self.count // 4
        self.embed = nn.Linear(values, args.width)
        self.encoder = nn.Sequential(*[Block(args.width) for _ in range(args.depth)], nn.LayerNorm(args.width))
        self.bridge = nn.Linear(args.width, args.decoder_width)
        self.blank = nn.Parameter(0.02 * torch.randn(args.decoder_width))
        self.decoder = nn.Sequential(*[Block(args.decoder_width) for _ in range(2)], nn.LayerNorm(args.decoder_width))
        self.paint = nn.Linear(args.decoder_width, values)
        self.register_buffer("places", waves(self.count, args.width))
        self.register_buffer("decoder_places", waves(self.count, args.decoder_width))

    def patches(self, images):
        side, size = images.shape[-1] // self.patch, self.patch
        cells = images.unflatten(3, (side, size)).unflatten(2, (side, size))
        return cells.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)

    def forward(self, images, order):
        patches = self.patches(images)
        seen, hidden = order[:, : self.seen], order[:, self.seen :]
        features = self.encoder(self.embed(take(patches, seen)) + self.places[seen])
        blanks = self.blank.expand(len(images), self.count - self.seen, -1)
        x = torch.cat([self.bridge(features), blanks], dim=1) + self.decoder_places[order]
        painted = self.paint(self.decoder(x)[:, self.seen :])
        target = take(patches, hidden)
        variance, mean = torch.var_mean(target, dim=-1, keepdim=True)
        return F.mse_loss(painted.float(), (target - mean) * torch.rsqrt(variance + 1e-6))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--resolution", type=int, default=224)
    parser.add_argument("--patch", type=int, default=16)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--decoder-width", type=int, default=512)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = MaskedAutoencoder(args).to(device)
    if args.compile:
        model = torch.compile(model, dynamic=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.5e-4, betas=(0.9, 0.95), weight_decay=0.05, fused=True)
    shape = (args.batch_size, 3, args.resolution, args.resolution)
    pool = [torch.rand(shape, device=device) for _ in range(3)]
    patches = (args.resolution // args.patch) ** 2
    for step in range(args.steps):
        order = torch.rand(args.batch_size, patches, device=device).argsort(dim=1)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = model(pool[step % len(pool)], order)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.4f}")
        # step


if __name__ == "__main__":
    main()
