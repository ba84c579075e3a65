"""Train a one-stage detector: anchors on three levels, boxes padded to a fixed number per image, focal loss."""

# cpu: --size 96 --batch-size 6 --width 12 --classes 6
# cuda: --size 512 --batch-size 24 --width 48 --classes 40

import argparse

import torch
import torch.nn.functional as F
from torch import nn

MAX_BOXES = 100
STRIDES = (8, 16, 32)
SHAPES = [(scale, aspect) for scale in (1.5, 2.0, 2.6) for aspect in (0.5, 1.0, 2.0)]


def conv(inputs, outputs, stride=1):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)
    )


class Detector(nn.Module):
    def __init__(self, width, classes):
        super().__init__()
        self.stem = nn.Sequential(conv(3, width, 2), conv(width, 2 * width, 2))
        sizes = (2 * width, 4 * width, 4 * width)
        self.down = nn.ModuleList(conv(inputs, 4 * width, 2) for inputs in sizes)
        self.tower = nn.Sequential(conv(4 * width, 4 * width), conv(4 * width, 4 * width))
        self.scores = nn.Conv2d(4 * width, len(SHAPES) * classes, 3, padding=1)
        self.offsets = nn.Conv2d(4 * width, len(SHAPES) * 4, 3, padding=1)
        self.classes = classes
        nn.init.constant_(self.scores.bias, -4.0)

    def forward(self, images):
        x = self.stem(images)
        scores, offsets = [], []
        for down in self.down:
            x = down(x)
            features = self.tower(x)
            scores.append(self.scores(features).permute(0, 2, 3, 1).reshape(len(images), -1, self.classes))
            offsets.append(self.offsets(features).permute(0, 2, 3, 1).reshape(len(images), -1, 4))
        return torch.cat(scores, dim=1), torch.cat(offsets, dim=1)


def make_anchors(size, device):
    """Corner form, level by level, in the order of the network's outputs."""
    levels = []
    for stride in STRIDES:
        line = (torch.arange(size // stride, device=device) + 0.5) * stride
        y, x = torch.meshgrid(line, line, indexing="ij")
        centre = torch.stack([x, y], dim=-1)[:, :, None]
        scale, aspect = torch.tensor(SHAPES, device=device).unbind(1)
        half = stride * scale[:, None] * torch.stack([aspect.rsqrt(), aspect.sqrt()], dim=-1)
        levels.append(torch.cat([centre - half, centre + half], dim=-1).view(-1, 4))
    return torch.cat(levels)


def area(boxes):
    return (boxes[..., 2] - boxes[..., 0]) * (boxes[..., 3] - boxes[..., 1])


def pairwise_iou(anchors, boxes):
    """(anchors, 4) and (batch, boxes, 4) to (batch, anchors, boxes)."""
    low = torch.maximum(anchors[None, :, None, :2], boxes[:, None, :, :2])
    high = torch.minimum(anchors[None, :, None, 2:], boxes[:, None, :, 2:])
    shared = (high - low).clamp(min=0).prod(dim=-1)
    return shared / (area(anchors)[None, :, None] + area(boxes)[:, None] - shared)


@torch.no_grad()
def assign(anchors, boxes, labels, counts):
    """For every anchor its class (-1: background, -2: ignored) and the box it should find."""
    # mend: overlaps-with-padding
    overlaps = pairwise_iou(anchors, boxes)  # waste: overlaps-with-padding
    # instead: most = max(counts)
    # instead: boxes, labels = boxes[:, :most], labels[:, :most]
    # instead: overlaps = pairwise_iou(anchors, boxes)
    best, index = overlaps.max(dim=2)
    found = labels.gather(1, index)
    found = torch.where(best >= 0.5, found, torch.where(best < 0.4, -1, -2))
    return found, boxes.gather(1, index[..., None].expand(-1, -1, 4))


def detection_loss(scores, offsets, anchors, found, boxes):
    wanted = torch.zeros_like(scores)
    wanted.scatter_(2, found.clamp(min=0)[..., None], (found >= 0).to(scores.dtype)[..., None])
    plain = F.binary_cross_entropy_with_logits(scores, wanted, reduction="none")
    hard = (1 - torch.exp(-plain)).square() * plain
    positive = found >= 0
    scale = 1 / positive.sum().clamp(min=1)
    focal = (hard.sum(dim=2) * (found != -2)).sum() * scale
    size = (anchors[:, 2:] - anchors[:, :2]).repeat(1, 2)
    miss = F.smooth_l1_loss(offsets, (boxes - anchors) / size, reduction="none").sum(dim=2)
    return focal + (miss * positive).sum() * scale


def make_batch(batch, size, classes, device):
    counts = torch.randint(2, 11, (batch,))
    corner = torch.rand(batch, MAX_BOXES, 2) * 0.7 * size
    extent = (0.08 + 0.2 * torch.rand(batch, MAX_BOXES, 2)) * size
    real = torch.arange(MAX_BOXES) < counts[:, None]
    boxes = torch.cat([corner, corner + extent], dim=-1) * real[..., None]
    labels = torch.randint(0, classes, (batch, MAX_BOXES)).masked_fill(~real, -1)
    images = torch.randn(batch, 3, size, size)
    return images.to(device), boxes.to(device), labels.to(device), counts.tolist()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--size", type=int, default=96)
    parser.add_argument("--batch-size", type=int, default=6)
    parser.add_argument("--width", type=int, default=12)
    parser.add_argument("--classes", type=int, default=6)
    args = parser.parse_args()

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Detector(args.width, args.classes).to(device, memory_format=torch.channels_last)
    anchors = make_anchors(args.size, device)
    batches = [make_batch(args.batch_size, args.size, args.classes, device) for _ in range(4)]
    batches = [(images.contiguous(memory_format=torch.channels_last), *rest) for images, *rest in batches]
    optimizer = torch.optim.SGD(model.parameters(), lr=5e-3, momentum=0.9, weight_decay=1e-4, fused=True)

    for step in range(args.steps):
        images, boxes, labels, counts = batches[step % len(batches)]
        found, targets = assign(anchors, boxes, labels, counts)
        scores, offsets = model(images)
        loss = detection_loss(scores, offsets, anchors, found, targets)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if step % 10 == 0 or step == args.steps - 1:
            print(f"iteration {step}: loss {loss.item():.4f}")
        # step


if __name__ == "__main__":
    main()
