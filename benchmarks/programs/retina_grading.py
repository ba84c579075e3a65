"""Trains a network that grades photographs of the retina: five grades of retinopathy, learned as an ordered scale."""

# cpu: --batch-size 4 --resolution 96 --width 16
# cuda: --batch-size 64 --resolution 384 --width 64

import argparse
import random
import time

import torch
import torch.nn.functional as F
from torch import nn

GRADES = 5


class Residual(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.skip = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.skip = nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)

    def forward(self, x):
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        return F.relu(self.norm2(self.conv2(y)) + self.skip(x), inplace=True)


class Grader(nn.Module):
    """Answers with the logits of "worse than grade 0", "worse than grade 1", ..."""

    def __init__(self, width):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 4, stride=4), nn.BatchNorm2d(width), nn.ReLU(inplace=True))
        sizes = [width, width, 2 * width, 4 * width, 8 * width]
        stages = []
        for number, (inputs, outputs) in enumerate(zip(sizes[:-1], sizes[1:], strict=True)):
            stages += [Residual(inputs, outputs, 1 if number == 0 else 2), Residual(outputs, outputs, 1)]
        self.stages = nn.Sequential(*stages)
        self.score = nn.Linear(8 * width, 1)
        self.thresholds = nn.Parameter(torch.linspace(-2, 2, GRADES - 1))

    def forward(self, images):
        features = self.stages(self.stem(images)).mean((2, 3))
        return self.score(features) - self.thresholds


class Shards:
    """Decoded photographs by the batch, of bytes; they are read in another order in every epoch."""

    def __init__(self, args, count, pinned):
        size = (args.batch_size, args.resolution, args.resolution, 3)
        self.shards = []
        for _ in range(count):
            images = torch.randint(256, size, dtype=torch.uint8)
            grades = torch.randint(GRADES, (args.batch_size,))
            self.shards.append((images.pin_memory(), grades.pin_memory()) if pinned else (images, grades))

    def __iter__(self):
        while True:
            random.shuffle(self.shards)
            for images, grades in self.shards:
                yield images.permute(0, 3, 1, 2), grades


def standardize(images):
    return images.float().div_(255).sub_(0.45).div_(0.24)


def ordinal_loss(logits, grades):
    worse = grades[:, None] > torch.arange(GRADES - 1, device=grades.device)
    return F.binary_cross_entropy_with_logits(logits, worse.float())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--resolution", type=int, default=384)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    torch.manual_seed(0)
    random.seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cudnn.benchmark = True
    model = Grader(args.width).to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.05, fused=True)
    shards = Shards(args, count=4, pinned=device.type == "cuda")

    started = time.perf_counter()
    for step, (images, grades) in enumerate(shards):
        if step >= args.steps:
            break
        images = standardize(images).to(device, non_blocking=True)  # waste: floats-made-on-host
        # instead: images = standardize(images.to(device, non_blocking=True))
        grades = grades.to(device, non_blocking=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(images)
        loss = ordinal_loss(logits.float(), grades)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            print(f"step {step}: loss {loss.item():.4f}, {time.perf_counter() - started:.1f} s")
        # step


if __name__ == "__main__":
    main()
