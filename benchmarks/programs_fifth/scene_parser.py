"""Semantic segmentation with a small pyramid; mean intersection over union is kept up on the training images."""

# cpu: --batch-size 2 --size 96 --width 8 --pyramid 192 --classes 48
# cuda: --batch-size 8 --size 512 --width 64 --pyramid 256 --classes 60

import argparse

import torch
import torch.nn.functional as F
from torch import nn


class Stage(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.enter = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.inner = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)

    def forward(self, x):
        x = F.relu(self.norm1(self.enter(x)), inplace=True)
        return F.relu(x + self.norm2(self.inner(x)), inplace=True)


class PyramidParser(nn.Module):
    def __init__(self, width, pyramid, classes):
        super().__init__()
        sizes = [3, width, 2 * width, 4 * width, 4 * width]
        self.stages = nn.ModuleList(Stage(a, b, 2) for a, b in zip(sizes, sizes[1:], strict=False))
        self.lateral = nn.ModuleList(nn.Conv2d(c, pyramid, 1) for c in sizes[2:])
        self.smooth = nn.Sequential(
            nn.Conv2d(pyramid, pyramid, 3, padding=1, groups=pyramid, bias=False),
            nn.Conv2d(pyramid, pyramid, 1, bias=False),
            nn.BatchNorm2d(pyramid),
        )
        self.classify = nn.Conv2d(pyramid, classes, 1)

    def forward(self, images):
        levels, x = [], images
        for stage in self.stages:
            x = stage(x)
            levels.append(x)
        merged = None
        for level, lateral in zip(reversed(levels[1:]), reversed(self.lateral), strict=True):
            merged = lateral(level) if merged is None else lateral(level) + F.interpolate(merged, scale_factor=2.0)
        features = F.relu(self.smooth(merged))
        # mend: classified-at-full-size
        features = F.interpolate(features, size=images.shape[-2:], mode="bilinear")  # waste: classified-at-full-size
        return self.classify(features)  # waste: classified-at-full-size
        # instead: return F.interpolate(self.classify(features), size=images.shape[-2:], mode="bilinear")


class MeanOverlap:
    """Intersection over union of every class since the last reset."""

    def __init__(self, classes, device):
        self.classes = classes
        self.shared = torch.zeros(classes, device=device)
        self.joined = torch.zeros(classes, device=device)

    @torch.no_grad()
    def update(self, logits, labels):
        guesses = logits.argmax(dim=1)
        # mend: class-by-class
        for c in range(self.classes):
            guessed, true = guesses == c, labels == c  # waste: class-by-class
            self.shared[c] += (guessed & true).sum()  # waste: class-by-class
            self.joined[c] += (guessed | true).sum()  # waste: class-by-class
        # instead: pairs = torch.bincount((labels * self.classes + guesses).flatten(), minlength=self.classes**2)
        # instead: confusion = pairs.view(self.classes, self.classes)
        # instead: shared = confusion.diagonal()
        # instead: self.shared += shared
        # instead: self.joined += confusion.sum(dim=0) + confusion.sum(dim=1) - shared

    def compute(self):
        return (self.shared / self.joined.clamp(min=1)).mean().item()

    def reset(self):
        self.shared.zero_()
        self.joined.zero_()


def make_scenes(count, size, classes, device):
    """Blobs of classes, and images in which a class has a colour of its own."""
    coarse = torch.randn(count, classes, 8, 8)
    labels = F.interpolate(coarse, size=(size, size), mode="bilinear").argmax(dim=1)
    colours = torch.randn(classes, 3)
    images = colours[labels].permute(0, 3, 1, 2) + 0.5 * torch.randn(count, 3, size, size)
    return images.to(device, memory_format=torch.channels_last), labels.to(device)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--size", type=int, default=96)
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--pyramid", type=int, default=192)
    parser.add_argument("--classes", type=int, default=48)
    args = parser.parse_args()

    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = PyramidParser(args.width, args.pyramid, args.classes)
    model = model.to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4, fused=True)
    schedule = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=200, power=0.9)
    batches = [make_scenes(args.batch_size, args.size, args.classes, device) for _ in range(2)]
    overlap = MeanOverlap(args.classes, device)

    for step in range(args.steps):
        images, labels = batches[step % 2]
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            logits = model(images)
            loss = F.cross_entropy(logits, labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        schedule.step()
        overlap.update(logits, labels)
        if step % 10 == 9 or step == args.steps - 1:
            print(f"iteration {step}: loss {loss.item():.4f} mean overlap {overlap.compute():.4f}")
            overlap.reset()
        # step


if __name__ == "__main__":
    main()
