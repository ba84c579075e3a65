"""Trains an anchor-free detector with a feature pyramid on synthetic images with rectangles."""

# cpu: --width 12 --batch-size 2 --size 128
# cuda: --width 64 --batch-size 32 --size 512

import argparse

import torch
import torch.nn.functional as F
from torch import nn

STRIDES = (8, 16, 32)


class ConvNorm(nn.Module):
    def __init__(self, in_channels, out_channels, stride=1):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 3, stride=stride, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(out_channels)

    def forward(self, x):
        return F.relu(self.norm(self.conv(x)), inplace=True)


class Pyramid(nn.Module):
    def __init__(self, width, channels):
        super().__init__()
        self.stem = nn.Sequential(ConvNorm(3, width, 2), ConvNorm(width, 2 * width, 2))
        self.c3 = nn.Sequential(ConvNorm(2 * width, 4 * width, 2), ConvNorm(4 * width, 4 * width))
        self.c4 = nn.Sequential(ConvNorm(4 * width, 8 * width, 2), ConvNorm(8 * width, 8 * width))
        self.c5 = nn.Sequential(ConvNorm(8 * width, 8 * width, 2), ConvNorm(8 * width, 8 * width))
        self.lateral = nn.ModuleList(nn.Conv2d(k * width, channels, 1) for k in (4, 8, 8))

    def forward(self, x):
        c3 = self.c3(self.stem(x))
        c4 = self.c4(c3)
        c5 = self.c5(c4)
        p5 = self.lateral[2](c5)
        p4 = self.lateral[1](c4) + F.interpolate(p5, scale_factor=2.0, mode="nearest")
        p3 = self.lateral[0](c3) + F.interpolate(p4, scale_factor=2.0, mode="nearest")
        return p3, p4, p5


class Head(nn.Module):
    def __init__(self, channels, num_classes):
        super().__init__()
        self.cls_tower = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1), nn.GroupNorm(4, channels), nn.ReLU()
        )
        self.box_tower = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1), nn.GroupNorm(4, channels), nn.ReLU()
        )
        self.classify = nn.Conv2d(channels, num_classes, 3, padding=1)
        self.regress = nn.Conv2d(channels, 4, 3, padding=1)
        nn.init.constant_(self.classify.bias, -4.6)

    def forward(self, features):
        logits, boxes = [], []
        for feature, stride in zip(features, STRIDES, strict=True):
            logits.append(self.classify(self.cls_tower(feature)).flatten(2))
            boxes.append(F.softplus(self.regress(self.box_tower(feature)).float()).flatten(2) * stride)
        return torch.cat(logits, dim=2).transpose(1, 2), torch.cat(boxes, dim=2).transpose(1, 2)


class Assigner(nn.Module):
    """Every location takes the smallest box that holds it and fits its level."""

    def __init__(self, size):
        super().__init__()
        points, low, high = [], [], []
        for stride, limit in zip(STRIDES, ((0, 64), (64, 128), (128, 1e5)), strict=True):
            axis = (torch.arange(size // stride) + 0.5) * stride
            y, x = torch.meshgrid(axis, axis, indexing="ij")
            points.append(torch.stack([x.flatten(), y.flatten()], dim=1))
            low.append(torch.full((x.numel(),), float(limit[0])))
            high.append(torch.full((x.numel(),), float(limit[1])))
        self.register_buffer("points", torch.cat(points))
        self.register_buffer("low", torch.cat(low).unsqueeze(1))
        self.register_buffer("high", torch.cat(high).unsqueeze(1))

    @torch.no_grad()
    def forward(self, boxes, labels):
        near = self.points[:, None] - boxes[:, None, :, :2]
        far = boxes[:, None, :, 2:] - self.points[:, None]
        sides = torch.cat([near, far], dim=-1)
        reach = sides.amax(dim=-1)
        fits = (sides.amin(dim=-1) > 0) & (reach > self.low) & (reach <= self.high)
        area = (boxes[..., 2:] - boxes[..., :2]).prod(dim=-1)
        smallest, index = torch.where(fits, area[:, None], torch.inf).min(dim=2)
        positive = smallest < torch.inf
        target = sides.gather(2, index[..., None, None].expand(-1, -1, 1, 4)).squeeze(2)
        return positive, labels.gather(1, index), target


class DetectionLoss(nn.Module):
    def forward(self, logits, sides, positive, labels, target):
        count = positive.sum().clamp(min=1)
        onehot = torch.zeros_like(logits).scatter_(2, labels.unsqueeze(2), positive.unsqueeze(2).to(logits.dtype))
        ce = F.binary_cross_entropy_with_logits(logits, onehot, reduction="none")
        prob = logits.sigmoid()
        wrong = prob + onehot - 2 * prob * onehot
        weight = 0.75 - 0.5 * onehot
        focal = (weight * wrong.square() * ce).sum() / count

        inner = torch.minimum(sides, target)
        outer = torch.maximum(sides, target)
        overlap = (inner[..., 0] + inner[..., 2]) * (inner[..., 1] + inner[..., 3])
        hull = (outer[..., 0] + outer[..., 2]) * (outer[..., 1] + outer[..., 3])
        ours = (sides[..., 0] + sides[..., 2]) * (sides[..., 1] + sides[..., 3])
        theirs = (target[..., 0] + target[..., 2]) * (target[..., 1] + target[..., 3])
        union = ours + theirs - overlap
        giou = overlap / union.clamp(min=1e-6) - (hull - union) / hull.clamp(min=1e-6)
        return focal + torch.where(positive, 1 - giou, 0.0).sum() / count


def make_images(count, size, objects, num_classes, generator):
    corner = torch.rand(count, objects, 2, generator=generator) * 0.6 * size
    extent = (0.1 + 0.3 * torch.rand(count, objects, 2, generator=generator)) * size
    boxes = torch.cat([corner, corner + extent], dim=2)
    labels = torch.randint(num_classes, (count, objects), generator=generator)
    images = 0.2 * torch.randn(count, 3, size, size, generator=generator)
    for image, image_boxes, image_labels in zip(images, boxes.long().tolist(), labels.tolist(), strict=True):
        for (x0, y0, x1, y1), label in zip(image_boxes, image_labels, strict=True):
            image[label % 3, y0:y1, x0:x1] += 1.0
    return images, boxes, labels


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--width", type=int, default=12)
    parser.add_argument("--channels", type=int, default=64)
    parser.add_argument("--objects", type=int, default=12)
    parser.add_argument("--num-classes", type=int, default=20)
    args = parser.parse_args()

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    device = "cuda" if torch.cuda.is_available() else "cpu"
    amp = torch.autocast(device, torch.bfloat16, enabled=device == "cuda")

    generator = torch.Generator().manual_seed(1)
    data = make_images(4 * args.batch_size, args.size, args.objects, args.num_classes, generator)
    images, boxes, labels = (d.to(device) for d in data)
    model = nn.Sequential(Pyramid(args.width, args.channels), Head(args.channels, args.num_classes)).to(device)
    if device == "cuda":
        images = images.to(memory_format=torch.channels_last)
        model = model.to(memory_format=torch.channels_last)
    assigner = Assigner(args.size).to(device)
    criterion = DetectionLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    for step in range(args.steps):
        start = step % 4 * args.batch_size
        batch = slice(start, start + args.batch_size)
        with amp:
            logits, sides = model(images[batch])
        loss = criterion(logits.float(), sides, *assigner(boxes[batch], labels[batch]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.6f}")
        # step


if __name__ == "__main__":
    main()
