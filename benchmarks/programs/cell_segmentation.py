"""Segments cells in microscope images: a U-Net on crops of random sizes."""

# cpu: --width 8 --batch-size 2 --smallest 48 --largest 96
# cuda: --width 32 --batch-size 8 --smallest 192 --largest 512

import argparse
import random

import torch
import torch.nn.functional as F
from torch import nn


def double_conv(inputs, outputs):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
        nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    def __init__(self, width, depth=2):
        super().__init__()
        sizes = [width * 2**level for level in range(depth + 1)]
        self.first = double_conv(1, width)
        self.down = nn.ModuleList([double_conv(a, b) for a, b in zip(sizes[:-1], sizes[1:], strict=True)])
        self.grow = nn.ModuleList(
            [nn.ConvTranspose2d(b, a, 2, stride=2) for a, b in zip(sizes[:-1], sizes[1:], strict=True)]
        )
        self.up = nn.ModuleList([double_conv(2 * size, size) for size in sizes[:-1]])
        self.mask = nn.Conv2d(width, 1, 1)

    def forward(self, x):
        levels = [self.first(x)]
        for down in self.down:
            levels.append(down(F.max_pool2d(levels[-1], 2)))
        x = levels.pop()
        for grow, up in zip(reversed(self.grow), reversed(self.up), strict=True):
            x = up(torch.cat([grow(x), levels.pop()], dim=1))
        return self.mask(x)


def crop(images, masks, args):
    """A crop of a random size, a multiple of 8, at a random place."""
    height = random.randrange(args.smallest, args.largest + 1, 8)
    width = random.randrange(args.smallest, args.largest + 1, 8)
    top = random.randint(0, images.shape[2] - height)
    left = random.randint(0, images.shape[3] - width)
    rows = torch.randint(len(images), (args.batch_size,), device=images.device)
    window = (rows, slice(None), slice(top, top + height), slice(left, left + width))
    return images[window].contiguous(memory_format=torch.channels_last), masks[window]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--smallest", type=int, default=192)
    parser.add_argument("--largest", type=int, default=512)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    random.seed(0)
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True  # waste: search-for-every-shape
    # instead: torch.backends.cudnn.benchmark = False
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = UNet(args.width).to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    images = torch.rand(32, 1, args.largest, args.largest, device=device)
    masks = (torch.rand(32, 1, args.largest, args.largest, device=device) < 0.3).float()
    for step in range(args.steps):
        image, mask = crop(images, masks, args)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            scores = model(image)  # waste: search-for-every-shape
        loss = F.binary_cross_entropy_with_logits(scores.float(), mask)
        loss.backward()  # waste: search-for-every-shape
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            print(f"step {step}: loss {loss.item():.3f}, crop {tuple(image.shape[2:])}")
        # step


if __name__ == "__main__":
    main()
