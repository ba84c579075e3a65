"""Train a residual network on images that lie on the device as bytes: channels last, bfloat16, flips in batch."""

# cpu: --photos 256 --size 40 --batch-size 24 --width 12
# cuda: --photos 4096 --size 128 --batch-size 256 --width 64

import argparse

import torch
import torch.nn.functional as F
from torch import nn


class Bottleneck(nn.Module):
    def __init__(self, inputs, middle, outputs, stride):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(inputs, middle, 1, bias=False), nn.BatchNorm2d(middle)
        self.conv2, self.norm2 = nn.Conv2d(middle, middle, 3, stride, 1, bias=False), nn.BatchNorm2d(middle)
        self.conv3, self.norm3 = nn.Conv2d(middle, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
        self.short = None
        if stride != 1 or inputs != outputs:
            self.short = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        nn.init.zeros_(self.norm3.weight)

    def forward(self, x):
        way = F.relu(self.norm1(self.conv1(x)), inplace=True)
        way = F.relu(self.norm2(self.conv2(way)), inplace=True)
        way = self.norm3(self.conv3(way))
        way += x if self.short is None else self.short(x)
        return F.relu(way, inplace=True)


class ResidualNetwork(nn.Module):
    def __init__(self, width, depths, labels):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )
        blocks, inputs = [], width
        for i, depth in enumerate(depths):
            middle = width * 2**i
            for j in range(depth):
                blocks.append(Bottleneck(inputs, middle, 4 * middle, 2 if i > 0 and j == 0 else 1))
                inputs = 4 * middle
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(inputs, labels)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)).mean(dim=(2, 3)))


class Pictures:
    """Batches of normalized pictures in the dtype and layout that the network wants."""

    def __init__(self, count, size, labels, device, dtype):
        self.pixels = torch.randint(0, 256, (count, size, size, 3), dtype=torch.uint8, device=device)
        self.labels = torch.randint(0, labels, (count,), device=device)
        self.dtype = dtype

    def epoch(self, batch):
        order = torch.randperm(len(self.pixels), device=self.pixels.device)
        for rows in order.split(batch):
            if len(rows) == batch:
                yield self.prepare(self.pixels[rows]), self.labels[rows]

    def prepare(self, pixels):
        x = pixels.permute(0, 3, 1, 2).to(self.dtype).sub_(118.0).mul_(1 / 60.0)
        half = len(x) // 2
        x[:half] = x[:half].flip(-1)
        return x

    def forever(self, batch):
        while True:
            yield from self.epoch(batch)


def split_parameters(model, decay):
    plain = [p for p in model.parameters() if p.ndim < 2]
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    return [{"params": plain, "weight_decay": 0.0}, {"params": decayed, "weight_decay": decay}]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--photos", type=int, default=256)
    parser.add_argument("--size", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=24)
    parser.add_argument("--width", type=int, default=12)
    parser.add_argument("--labels", type=int, default=100)
    args = parser.parse_args()

    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = ResidualNetwork(args.width, (2, 3, 3, 2), args.labels).to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(split_parameters(model, 5e-5), lr=0.1, momentum=0.9, nesterov=True, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=args.steps + 1)
    pictures = Pictures(args.photos, args.size, args.labels, device, dtype)
    running = torch.zeros((), device=device)

    for step, (images, labels) in zip(range(args.steps), pictures.forever(args.batch_size), strict=False):
        with torch.autocast(device, dtype=dtype, enabled=device == "cuda"):
            scores = model(images)
            loss = F.cross_entropy(scores, labels, label_smoothing=0.1)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        schedule.step()
        running += loss.detach()
        if step % 10 == 9 or step == args.steps - 1:
            print(f"step {step}: mean loss {running.item() / (step % 10 + 1):.4f}")
            running.zero_()
        # step


if __name__ == "__main__":
    main()
