"""Trains a residual network that enlarges pictures four times; all work is done at the small size."""

# cpu: --batch-size 4 --resolution 24 --width 32 --blocks 4
# cuda: --batch-size 64 --resolution 64 --width 256 --blocks 8 --compile

import argparse

import torch
import torch.nn.functional as F
from torch import nn

SCALE = 4


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)

    def forward(self, x):
        return x + 0.1 * self.conv2(F.relu(self.conv1(x)))


class Enlarger(nn.Module):
    """What is to be added to a picture whose pixels are repeated."""

    def __init__(self, width, blocks):
        super().__init__()
        self.head = nn.Conv2d(3, width, 3, padding=1)
        self.body = nn.Sequential(*[Block(width) for _ in range(blocks)])
        self.tail = nn.Conv2d(width, 3 * SCALE**2, 3, padding=1)

    def forward(self, small):
        details = F.pixel_shuffle(self.tail(self.body(self.head(small))), SCALE)
        return details + F.interpolate(small, scale_factor=SCALE, mode="nearest")


class PictureLoss(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, small, large):
        return (self.model(small).float() - large).abs().mean()


def pictures(args, device):
    """Smooth random pictures, and the same made small."""
    size = SCALE * args.resolution
    seeds = torch.rand(args.batch_size, 3, size // 8, size // 8, device=device)
    large = F.interpolate(seeds, size=(size, size), mode="bicubic").clamp(0, 1)
    large = large.to(memory_format=torch.channels_last)
    return F.avg_pool2d(large, SCALE), large


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--resolution", type=int, default=64, help="of the small pictures")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cudnn.benchmark = True
    model = PictureLoss(Enlarger(args.width, args.blocks)).to(device, memory_format=torch.channels_last)
    if args.compile:
        model = torch.compile(model, dynamic=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.99), fused=True)
    pool = [pictures(args, device) for _ in range(4)]
    for step in range(args.steps):
        small, large = pool[step % len(pool)]
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = model(small, large)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.4f}")
        # step


if __name__ == "__main__":
    main()
