"""Train a light semantic segmentation network at a quarter of the resolution and track the running IoU."""

# cpu: --width 16 --batch-size 4 --size 192
# cuda: --width 96 --batch-size 32 --size 512

import argparse

import torch
from torch import nn
from torch.nn import functional as F

IGNORE = 255


def unit(inputs, outputs, stride=1, dilation=1):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride=stride, padding=dilation, dilation=dilation, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


class Segmenter(nn.Module):
    def __init__(self, width, classes):
        super().__init__()
        self.stem = nn.Sequential(unit(3, width, 2), unit(width, width, 2))
        self.deep = nn.Sequential(
            unit(width, 2 * width, 2), unit(2 * width, 4 * width, 2), unit(4 * width, 4 * width, 1, 2)
        )
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(4 * width, 4 * width, 1), nn.Sigmoid())
        self.narrow = nn.Conv2d(4 * width, width, 1)
        self.fuse = unit(2 * width, width)
        self.classify = nn.Conv2d(width, classes, 1)

    def forward(self, images):
        shallow = self.stem(images)
        deep = self.deep(shallow)
        deep = self.narrow(deep * self.pool(deep))
        deep = F.interpolate(deep, size=shallow.shape[-2:], mode="bilinear", align_corners=False)
        return self.classify(self.fuse(torch.cat([shallow, deep], 1)))


class RunningIoU:
    def __init__(self, classes, device):
        self.classes = classes
        self.shared = torch.zeros(classes, dtype=torch.long, device=device)
        self.joined = torch.zeros(classes, dtype=torch.long, device=device)

    def update(self, predicted, target):
        valid = target != IGNORE
        # mend: counts-class-by-class
        for label in range(self.classes):
            given = (predicted == label) & valid  # waste: counts-class-by-class
            wanted = target == label  # waste: counts-class-by-class
            self.shared[label] += (given & wanted).sum()  # waste: counts-class-by-class
            self.joined[label] += (given | wanted).sum()  # waste: counts-class-by-class
        # instead: bins = self.classes * self.classes
        # instead: codes = torch.where(valid, target * self.classes + predicted, bins).flatten()
        # instead: table = torch.bincount(codes, minlength=bins + 1)[:bins].view(self.classes, self.classes)
        # instead: self.shared += table.diagonal()
        # instead: self.joined += table.sum(0) + table.sum(1) - table.diagonal()

    def value(self):
        return (self.shared / self.joined.clamp(min=1)).mean().item()


def make_scenes(count, size, classes, device):
    """Images of flat noisy regions, with an unlabelled frame."""
    seeds = torch.randint(0, classes, (count, 1, 12, 12), device=device).float()
    labels = F.interpolate(seeds, size=(size, size), mode="nearest").long().squeeze(1)
    palette = torch.rand(classes, 3, device=device)
    images = palette[labels].permute(0, 3, 1, 2) + 0.2 * torch.randn(count, 3, size, size, device=device)
    labels[:, :4] = IGNORE
    labels[:, :, :4] = IGNORE
    return images.contiguous(memory_format=torch.channels_last), labels


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--size", type=int, default=192)
    parser.add_argument("--width", type=int, default=24)
    parser.add_argument("--classes", type=int, default=21)
    args = parser.parse_args()

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    device = "cuda" if torch.cuda.is_available() else "cpu"
    images, labels = make_scenes(64, args.size, args.classes, device)
    model = Segmenter(args.width, args.classes).to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4, fused=True)
    meter = RunningIoU(args.classes, device)

    for step in range(args.steps):
        rows = torch.randint(0, images.size(0), (args.batch_size,), device=device)
        target = labels[rows]
        size = target.shape[-2:]
        logits = model(images[rows])
        full = F.interpolate(logits, size, mode="bilinear", align_corners=False)
        loss = F.cross_entropy(full, target, ignore_index=IGNORE)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

        with torch.no_grad():
            # mend: upsampled-twice
            scores = F.interpolate(logits, size, mode="bilinear", align_corners=False)  # waste: upsampled-twice
            predicted = scores.softmax(1).argmax(1)  # waste: upsampled-twice
            # instead: predicted = full.argmax(1)
            meter.update(predicted, target)
        if step % 10 == 0:
            print(f"step {step} loss {loss.item():.4f} mean IoU {meter.value():.4f}")
        # step
    print(f"mean IoU {meter.value():.4f}")


if __name__ == "__main__":
    main()
