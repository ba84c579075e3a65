"""Compresses map tiles to codes of a codebook: an autoencoder with vector quantization."""

# cpu: --width 32 --codes 256 --code-width 32 --batch-size 8 --side 32
# cuda: --width 256 --codes 1024 --code-width 64 --batch-size 96 --side 64

import argparse

import torch
import torch.nn.functional as F
from torch import nn


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, width, 1)

    def forward(self, x):
        return x + self.conv2(F.relu(self.conv1(F.relu(x)), inplace=True))


class Quantizer(nn.Module):
    """Replaces every vector by the nearest code; gradients pass it by."""

    def __init__(self, codes, width, commitment=0.25):
        super().__init__()
        self.codes = nn.Parameter(torch.empty(codes, width).uniform_(-1 / codes, 1 / codes))
        self.commitment = commitment
        self.register_buffer("used", torch.zeros(codes), persistent=False)

    @torch.no_grad()
    def nearest(self, vectors):
        differences = vectors[:, None] - self.codes  # waste: all-differences-kept
        # instead:
        distances = differences.square().sum(dim=-1)  # waste: all-differences-kept
        # instead: distances = torch.cdist(vectors, self.codes)
        return distances.argmin(dim=1)

    def forward(self, z):
        vectors = z.permute(0, 2, 3, 1).float()
        index = self.nearest(vectors.flatten(0, 2))
        quantized = F.embedding(index, self.codes).view(vectors.shape)
        toward_codes = F.mse_loss(vectors, quantized.detach())
        toward_vectors = F.mse_loss(quantized, vectors.detach())
        self.used.index_fill_(0, index, 1.0)
        passed = vectors + (quantized - vectors).detach()
        return passed.permute(0, 3, 1, 2), toward_vectors + self.commitment * toward_codes


class TileAutoencoder(nn.Module):
    def __init__(self, width, codes, code_width):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, width, 4, stride=2, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, 2 * width, 4, stride=2, padding=1),
            Residual(2 * width),
            Residual(2 * width),
            nn.Conv2d(2 * width, code_width, 1),
        )
        self.quantizer = Quantizer(codes, code_width)
        self.decoder = nn.Sequential(
            nn.Conv2d(code_width, 2 * width, 3, padding=1),
            Residual(2 * width),
            Residual(2 * width),
            nn.ConvTranspose2d(2 * width, width, 4, stride=2, padding=1),
            nn.ReLU(inplace=True),
            nn.ConvTranspose2d(width, 3, 4, stride=2, padding=1),
        )

    def forward(self, tiles):
        quantized, loss = self.quantizer(self.encoder(tiles))
        return self.decoder(quantized), loss


def make_tiles(count, side, device):
    """Areas of plain colours, with roads across them."""
    areas = torch.rand(count, 3, 4, 4, device=device)
    tiles = F.interpolate(areas, size=(side, side), mode="nearest")
    roads = torch.rand(count, 1, side, 1, device=device) < 0.1
    tiles = torch.where(roads, 1.0, tiles) + 0.02 * torch.randn(tiles.shape, device=device)
    return tiles.contiguous(memory_format=torch.channels_last)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--codes", type=int, default=1024)
    parser.add_argument("--code-width", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=96)
    parser.add_argument("--side", type=int, default=64)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = TileAutoencoder(args.width, args.codes, args.code_width).to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    pool = [make_tiles(args.batch_size, args.side, device) for _ in range(8)]
    for step in range(args.steps):
        tiles = pool[step % len(pool)]
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            drawn, quantization = model(tiles)
        loss = F.mse_loss(drawn.float(), tiles) + quantization
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.4f}, codes in use {model.quantizer.used.mean().item():.1%}")
            model.quantizer.used.zero_()
        # step


if __name__ == "__main__":
    main()
