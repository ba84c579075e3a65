"""Trains an audio codec of transformers: frames of samples become codes of a codebook, and samples again."""

# cpu: --width 128 --heads 2 --blocks 1 --batch-size 4 --frames 64 --codes 256
# cuda: --width 1024 --heads 16 --blocks 3 --batch-size 128 --frames 256 --compile

import argparse

import torch
import torch.nn.functional as F
from torch import nn

SAMPLES = 320
"""Samples of a frame."""


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*qkv, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class Quantizer(nn.Module):
    """The nearest of the codes by angle; gradients pass as if there were no choice."""

    def __init__(self, codes, dimension):
        super().__init__()
        self.codebook = nn.Embedding(codes, dimension)

    def forward(self, z):
        z = F.normalize(z, dim=-1)
        codebook = F.normalize(self.codebook.weight, dim=-1)
        chosen = F.embedding((z.detach() @ codebook.detach().T).argmax(-1), codebook)
        loss = F.mse_loss(chosen, z.detach()) + 0.25 * F.mse_loss(z, chosen.detach())
        return z + (chosen - z).detach(), loss


class Codec(nn.Module):
    def __init__(self, args, dimension=64):
        super().__init__()
        self.positions = nn.Parameter(0.02 * torch.randn(args.frames, args.width))
        self.read = nn.Linear(SAMPLES, args.width)
        self.encoder = nn.Sequential(*[Block(args.width, args.heads) for _ in range(args.blocks)])
        self.squeeze = nn.Linear(args.width, dimension)
        self.quantizer = Quantizer(args.codes, dimension)
        self.widen = nn.Linear(dimension, args.width)
        self.decoder = nn.Sequential(*[Block(args.width, args.heads) for _ in range(args.blocks)])
        self.write = nn.Linear(args.width, SAMPLES)

    def forward(self, frames):
        """The loss of frames that were encoded and decoded."""
        x = self.encoder(self.read(frames) + self.positions)
        z, commitment = self.quantizer(self.squeeze(x))
        heard = self.write(self.decoder(self.widen(z) + self.positions))
        return F.l1_loss(heard, frames) + F.mse_loss(heard, frames) + commitment


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument("--codes", type=int, default=1024)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--frames", type=int, default=256)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = Codec(args).to(device, dtype)
    if args.compile:
        model = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    time = torch.arange(args.frames * SAMPLES, device=device) / 16000
    pitches = 80 + 800 * torch.rand(4, args.batch_size, 1, device=device)
    pool = torch.sin(2 * torch.pi * pitches * time).unflatten(-1, (args.frames, SAMPLES)).to(dtype)

    for step in range(args.steps):
        loss = model(pool[step % len(pool)])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.4f}")
        # step


if __name__ == "__main__":
    main()
