"""Trains a residual network on photos."""

# cpu: --batch-size 4 --resolution 64 --width 32
# cuda: --batch-size 128 --resolution 224 --width 64

import argparse
import time

import torch
import torch.nn.functional as F
from torch import nn


def conv3(inputs, outputs, stride=1):
    return nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)


class BasicBlock(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1, self.norm1 = conv3(inputs, outputs, stride), nn.BatchNorm2d(outputs)
        self.conv2, self.norm2 = conv3(outputs, outputs), nn.BatchNorm2d(outputs)
        self.shortcut = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x):
        y = F.relu(self.norm1(self.conv1(x)))  # waste: channels-first
        y = self.norm2(self.conv2(y))  # waste: channels-first
        return F.relu(y + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self, width, classes=1000):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        stages, inputs = [], width
        for number in range(4):
            outputs = width * 2**number
            stages += [BasicBlock(inputs, outputs, 1 if number == 0 else 2), BasicBlock(outputs, outputs, 1)]
            inputs = outputs
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(inputs, classes)

    def forward(self, x):
        return self.head(self.stages(self.stem(x)).mean((2, 3)))


class Photos:
    """Decoded photos that wait in memory, as a loader would hand them over."""

    def __init__(self, args, device):
        self.images = torch.rand(2 * args.batch_size, 3, args.resolution, args.resolution, device=device)
        self.labels = torch.randint(1000, (2 * args.batch_size,), device=device)
        self.batch_size = args.batch_size

    def __iter__(self):
        while True:
            order = torch.randperm(len(self.images), device=self.images.device)[: self.batch_size]
            yield self.images[order], self.labels[order]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--resolution", type=int, default=224)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = ResNet(args.width).to(device)  # waste: channels-first
    # instead: model = ResNet(args.width).to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4, fused=True)

    started = time.perf_counter()
    for step, (images, labels) in enumerate(Photos(args, device)):
        if step >= args.steps:
            break
        # mend: channels-first
        # instead: images = images.to(memory_format=torch.channels_last)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = F.cross_entropy(model(images), labels)  # waste: channels-first
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            print(f"{step} loss {loss.item():.3f} time {time.perf_counter() - started:.1f}")
        # step


if __name__ == "__main__":
    main()
