"""Maps floods in satellite images of sixteen bands as it should be done."""

# cpu: --width 32 --batch-size 2 --side 64
# cuda: --width 64 --batch-size 64 --side 256 --compile

import argparse

import torch
import torch.nn.functional as F
from torch import nn

BANDS = 16
CLASSES = 8


class Double(nn.Sequential):
    def __init__(self, inputs, outputs):
        super().__init__(
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
        )


class FloodNet(nn.Module):
    """A U-Net; two levels of resolution are joined by a sum, which needs no copy."""

    def __init__(self, width):
        super().__init__()
        self.first = Double(BANDS, width)
        self.shrink = nn.ModuleList(
            [nn.Conv2d(width, 2 * width, 2, stride=2), nn.Conv2d(2 * width, 4 * width, 2, stride=2)]
        )
        self.down = nn.ModuleList([Double(2 * width, 2 * width), Double(4 * width, 4 * width)])
        self.grow = nn.ModuleList(
            [nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2), nn.ConvTranspose2d(2 * width, width, 2, stride=2)]
        )
        self.up = nn.ModuleList([Double(2 * width, 2 * width), Double(width, width)])
        self.head = nn.Conv2d(width, CLASSES, 1)

    def forward(self, x, kinds):
        """The loss: classes of pixels against those of a map."""
        levels = [self.first(x)]
        for shrink, down in zip(self.shrink, self.down, strict=True):
            levels.append(down(shrink(levels[-1])))
        x = levels.pop()
        for grow, up in zip(self.grow, self.up, strict=True):
            x = up(grow(x) + levels.pop())
        scores = self.head(x).permute(0, 2, 3, 1)
        return F.cross_entropy(scores.reshape(-1, CLASSES), kinds.flatten())


def make_scene(batch_size, side, device, dtype):
    """Images and the class of every pixel: water has a spectrum of its own."""
    kinds = torch.randint(CLASSES, (batch_size, 1, side // 8, side // 8), device=device)
    kinds = kinds.repeat_interleave(8, dim=2).repeat_interleave(8, dim=3)[:, 0]
    spectra = torch.randn(CLASSES, BANDS, device=device)
    images = spectra[kinds] + torch.randn(batch_size, side, side, BANDS, device=device)
    return images.to(dtype).permute(0, 3, 1, 2), kinds


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--side", type=int, default=256)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = FloodNet(args.width).to(device, memory_format=torch.channels_last)
    if args.compile:
        model.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    pool = [make_scene(args.batch_size, args.side, device, dtype) for _ in range(4)]
    total = torch.zeros((), device=device)
    for step in range(args.steps):
        images, kinds = pool[step % len(pool)]
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = model(images, kinds)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total += loss.detach()
        if (step + 1) % 50 == 0:
            print(f"step {step + 1}: mean loss {total.item() / 50:.3f}")
            total.zero_()
        # step


if __name__ == "__main__":
    main()
