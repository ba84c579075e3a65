"""Evaluates a lightweight street-scene segmentation network on a stream of labelled images."""

# cpu: --width 24 --batch-size 1 --height 256 --image-width 512
# cuda: --width 96 --batch-size 16 --height 512 --image-width 1024

import argparse

import torch
import torch.nn.functional as F
from torch import nn

IGNORE = 255


class ConvBlock(nn.Module):
    def __init__(self, in_channels, out_channels, stride=1, dilation=1):
        super().__init__()
        self.conv = nn.Conv2d(
            in_channels, out_channels, 3, stride=stride, padding=dilation, dilation=dilation, bias=False
        )
        self.norm = nn.BatchNorm2d(out_channels)

    def forward(self, x):
        return F.relu(self.norm(self.conv(x)))


class ContextModule(nn.Module):
    """Parallel dilated convolutions and a global branch, as in DeepLab."""

    def __init__(self, channels, rates=(1, 2, 4)):
        super().__init__()
        self.branches = nn.ModuleList(ConvBlock(channels, channels // 2, dilation=r) for r in rates)
        self.pooled = nn.Conv2d(channels, channels // 2, 1)
        self.fuse = nn.Conv2d(channels // 2 * (len(rates) + 1), channels, 1)

    def forward(self, x):
        pooled = self.pooled(x.mean(dim=(2, 3), keepdim=True)).expand(-1, -1, *x.shape[2:])
        return self.fuse(torch.cat([branch(x) for branch in self.branches] + [pooled], dim=1))


class SegmentationNet(nn.Module):
    def __init__(self, width, num_classes):
        super().__init__()
        self.stem = nn.Sequential(ConvBlock(3, width, stride=2), ConvBlock(width, width, stride=2))
        self.low = ConvBlock(width, 2 * width, stride=2)
        self.deep = nn.Sequential(ConvBlock(2 * width, 4 * width, stride=2), ConvBlock(4 * width, 4 * width))
        self.context = ContextModule(4 * width)
        self.reduce = nn.Conv2d(2 * width, width, 1)
        self.decode = ConvBlock(5 * width, 2 * width)
        self.classify = nn.Conv2d(2 * width, num_classes, 1)

    def forward(self, x):
        low = self.low(self.stem(x))
        deep = self.context(self.deep(low))
        deep = F.interpolate(deep, size=low.shape[2:], mode="bilinear", align_corners=False)
        logits = self.classify(self.decode(torch.cat([deep, self.reduce(low)], dim=1)))
        return F.interpolate(logits, size=x.shape[2:], mode="bilinear", align_corners=False)


class IoUMeter(nn.Module):
    """Accumulates intersection and union of every class."""

    def __init__(self, num_classes):
        super().__init__()
        self.num_classes = num_classes
        self.register_buffer("intersection", torch.zeros(num_classes, dtype=torch.int64))
        self.register_buffer("union", torch.zeros(num_classes, dtype=torch.int64))

    def update(self, pred, target):
        valid = target != IGNORE
        # mend: per-class-masks
        for c in range(self.num_classes):
            pred_c = (pred == c) & valid  # waste: per-class-masks
            target_c = target == c  # waste: per-class-masks
            self.intersection[c] += (pred_c & target_c).sum()  # waste: per-class-masks
            self.union[c] += (pred_c | target_c).sum()  # waste: per-class-masks
        # instead: n = self.num_classes
        # instead: cells = torch.where(valid, target * n + pred, n * n).flatten()
        # instead: table = torch.bincount(cells, minlength=n * n + 1)[: n * n].view(n, n)
        # instead: self.intersection += table.diagonal()
        # instead: self.union += table.sum(0) + table.sum(1) - table.diagonal()

    def compute(self):
        return self.intersection.float() / self.union.clamp(min=1)


def make_requests(count, batch_size, height, width, num_classes, device):
    generator = torch.Generator().manual_seed(1)
    requests = []
    for _ in range(count):
        coarse = torch.randint(num_classes, (batch_size, 1, height // 32, width // 32), generator=generator)
        target = F.interpolate(coarse.float(), size=(height, width), mode="nearest").long().squeeze(1)
        target[:, -height // 16 :] = IGNORE
        images = torch.randn(batch_size, 3, height, width, generator=generator)
        requests.append((images.to(device), target.to(device)))
    return requests


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--width", type=int, default=24)
    parser.add_argument("--height", type=int, default=256)
    parser.add_argument("--image-width", type=int, default=512)
    parser.add_argument("--num-classes", type=int, default=19)
    args = parser.parse_args()

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    amp = torch.autocast(device, torch.bfloat16, enabled=device == "cuda")

    requests = make_requests(4, args.batch_size, args.height, args.image_width, args.num_classes, device)
    model = SegmentationNet(args.width, args.num_classes).to(device).eval()
    if device == "cuda":
        model = model.to(memory_format=torch.channels_last)
        requests = [(images.to(memory_format=torch.channels_last), target) for images, target in requests]
    meter = IoUMeter(args.num_classes).to(device)

    with torch.inference_mode():
        for step in range(args.steps):
            images, target = requests[step % len(requests)]
            with amp:
                logits = model(images)
                # mend: softmax-before-argmax
                probs = torch.softmax(logits, dim=1)  # waste: softmax-before-argmax
                pred = probs.argmax(dim=1)
                # instead: pred = logits.argmax(dim=1)
            meter.update(pred, target)

            if step % 10 == 0:
                print(f"step {step}: mIoU {meter.compute().mean().item():.5f}")
            # step
    print(f"final mIoU {meter.compute().mean().item():.5f}")


if __name__ == "__main__":
    main()
