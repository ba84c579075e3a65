"""Trains a one-stage detector of apples in pictures of orchards: anchors at three scales, matched by overlap."""

# cpu: --batch-size 4 --resolution 128 --width 8 --most-boxes 8
# cuda: --batch-size 32 --resolution 512 --width 64 --most-boxes 24

import argparse

import torch
import torch.nn.functional as F
from torch import nn

STRIDES = (8, 16, 32)


def conv(inputs, outputs, stride=1):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.SiLU(inplace=True),
    )


class Detector(nn.Module):
    """A score and the offsets of a box for every anchor."""

    def __init__(self, width):
        super().__init__()
        self.stem = nn.Sequential(conv(3, width, 2), conv(width, 2 * width, 2))
        self.stages = nn.ModuleList(
            nn.Sequential(conv(a * width, b * width, 2), conv(b * width, b * width))
            for a, b in ((2, 4), (4, 4), (4, 8))
        )
        self.heads = nn.ModuleList(nn.Conv2d(size * width, 5, 1) for size in (4, 4, 8))

    def forward(self, images):
        x, outputs = self.stem(images), []
        for stage, head in zip(self.stages, self.heads, strict=True):
            x = stage(x)
            outputs.append(head(x).flatten(2).transpose(1, 2))
        outputs = torch.cat(outputs, dim=1).float()
        return outputs[..., 0], outputs[..., 1:]


def make_anchors(resolution, device):
    """Squares at the middle of every cell, (anchors, 4): left, top, right, bottom."""
    anchors = []
    for stride in STRIDES:
        middle = (torch.arange(resolution // stride, device=device) + 0.5) * stride
        y, x = torch.meshgrid(middle, middle, indexing="ij")
        center = torch.stack([x, y], dim=-1).flatten(0, 1)
        anchors.append(torch.cat([center - 1.5 * stride, center + 1.5 * stride], dim=-1))
    return torch.cat(anchors)


def overlaps(anchors, boxes):
    """Intersection over union, (..., anchors, boxes)."""
    boxes = boxes[..., None, :, :]
    low = torch.maximum(anchors[:, None, :2], boxes[..., :2])
    high = torch.minimum(anchors[:, None, 2:], boxes[..., 2:])
    shared = (high - low).clamp(min=0).prod(-1)
    areas = (anchors[:, None, 2:] - anchors[:, None, :2]).prod(-1) + (boxes[..., 2:] - boxes[..., :2]).prod(-1)
    return shared / (areas - shared)


def encode(anchors, boxes):
    """The offsets that make a box of an anchor."""
    size = anchors[..., 2:] - anchors[..., :2]
    shift = (boxes[..., :2] + boxes[..., 2:] - anchors[..., :2] - anchors[..., 2:]) / (2 * size)
    return torch.cat([shift, torch.log((boxes[..., 2:] - boxes[..., :2]) / size)], dim=-1)


def detection_loss(scores, offsets, anchors, boxes, valid):
    # mend: image-by-image
    score_loss, box_loss, positives = 0.0, 0.0, 0
    for image in range(len(boxes)):
        truth = boxes[image][valid[image]]  # waste: image-by-image
        best, which = overlaps(anchors, truth).max(dim=1)
        positive = best > 0.4
        score_loss += F.binary_cross_entropy_with_logits(scores[image], positive.float(), reduction="sum")
        target = encode(anchors[positive], truth[which[positive]])  # waste: image-by-image
        box_loss += F.smooth_l1_loss(offsets[image][positive], target, reduction="sum")
        positives += positive.sum()
    # instead: best, which = overlaps(anchors, boxes).masked_fill(~valid[:, None], -1.0).max(dim=2)
    # instead: positive = best > 0.4
    # instead: score_loss = F.binary_cross_entropy_with_logits(scores, positive.float(), reduction="sum")
    # instead: target = encode(anchors, boxes.gather(1, which[..., None].expand(-1, -1, 4)))
    # instead: distance = F.smooth_l1_loss(offsets, target, reduction="none").sum(-1)
    # instead: box_loss = (distance * positive).sum()
    # instead: positives = positive.sum()
    return (score_loss + box_loss) / positives.clamp(min=1)


def make_batch(args, device):
    """Images, and the boxes of each, filled up to the same number."""
    images = torch.rand(args.batch_size, 3, args.resolution, args.resolution, device=device)
    size = torch.empty(args.batch_size, args.most_boxes, 2, device=device).uniform_(16, args.resolution / 3)
    corner = torch.rand_like(size) * (args.resolution - size)
    count = torch.randint(2, args.most_boxes + 1, (args.batch_size, 1), device=device)
    valid = torch.arange(args.most_boxes, device=device) < count
    return images.to(memory_format=torch.channels_last), torch.cat([corner, corner + size], dim=-1), valid


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--resolution", type=int, default=512)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--most-boxes", type=int, default=24)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cudnn.benchmark = True
    model = Detector(args.width).to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4, fused=True)
    anchors = make_anchors(args.resolution, device)
    pool = [make_batch(args, device) for _ in range(4)]
    for step in range(args.steps):
        images, boxes, valid = pool[step % len(pool)]
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            scores, offsets = model(images)
        loss = detection_loss(scores, offsets, anchors, boxes, valid)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            print(f"step {step}: loss {loss.item():.3f} over {len(anchors)} anchors")
        # step


if __name__ == "__main__":
    main()
