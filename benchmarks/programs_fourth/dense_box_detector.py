"""Train an anchor-free detector: every object is claimed by its nearest feature points, boxes by a GIoU loss."""

# cpu: --width 16 --batch-size 6 --size 128 --objects 10
# cuda: --width 128 --batch-size 48 --size 512 --objects 16

import argparse

import torch
from torch import nn
from torch.nn import functional as F

STRIDE = 8


def giou(a, b):
    """Generalised intersection over union of boxes (x1, y1, x2, y2); shapes broadcast."""
    area_a = (a[..., 2] - a[..., 0]) * (a[..., 3] - a[..., 1])
    area_b = (b[..., 2] - b[..., 0]) * (b[..., 3] - b[..., 1])
    inner = (torch.minimum(a[..., 2:], b[..., 2:]) - torch.maximum(a[..., :2], b[..., :2])).clamp(min=0)
    outer = (torch.maximum(a[..., 2:], b[..., 2:]) - torch.minimum(a[..., :2], b[..., :2])).clamp(min=0)
    overlap, hull = inner[..., 0] * inner[..., 1], outer[..., 0] * outer[..., 1]
    union = area_a + area_b - overlap
    return overlap / union.clamp(min=1e-6) - (hull - union) / hull.clamp(min=1e-6)


class Stage(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.down = nn.Conv2d(inputs, outputs, 3, stride=2, padding=1)
        self.conv = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.norm1 = nn.GroupNorm(8, outputs)
        self.norm2 = nn.GroupNorm(8, outputs)

    def forward(self, x):
        x = F.silu(self.norm1(self.down(x)))
        return x + F.silu(self.norm2(self.conv(x)))


class Detector(nn.Module):
    def __init__(self, width, classes):
        super().__init__()
        self.backbone = nn.Sequential(Stage(3, width), Stage(width, 2 * width), Stage(2 * width, 4 * width))
        self.classes = nn.Conv2d(4 * width, classes, 3, padding=1)
        self.sides = nn.Conv2d(4 * width, 4, 3, padding=1)
        nn.init.constant_(self.classes.bias, -4.0)

    def forward(self, images):
        features = self.backbone(images)
        scores = self.classes(features).flatten(2).transpose(1, 2)
        sides = F.softplus(self.sides(features).flatten(2).transpose(1, 2)) * STRIDE
        return scores, sides


def focal(scores, targets, alpha=0.25, gamma=2.0):
    plain = F.binary_cross_entropy_with_logits(scores, targets, reduction="none")
    chance = torch.sigmoid(scores)
    missed = chance + targets - 2 * chance * targets
    weight = alpha * targets + (1 - alpha) * (1 - targets)
    return (weight * missed**gamma * plain).sum()


def detection_loss(scores, sides, points, boxes, labels, near=9):
    batch, objects, _ = boxes.shape
    with torch.no_grad():
        centers = (boxes[..., :2] + boxes[..., 2:]) / 2
        claimed = torch.cdist(centers, points.expand(batch, -1, -1)).topk(near, largest=False).indices
        targets = torch.zeros_like(scores)
        rows = torch.arange(batch, device=boxes.device)[:, None, None]
        targets[rows, claimed, labels[..., None]] = 1.0
    claimed = claimed.flatten(1)
    chosen = sides.gather(1, claimed[..., None].expand(-1, -1, 4))
    at = points[claimed]
    predicted = torch.cat([at - chosen[..., :2], at + chosen[..., 2:]], -1).flatten(0, 1)
    wanted = boxes.repeat_interleave(near, 1).flatten(0, 1)
    # mend: matrix-for-its-diagonal
    overlaps = giou(predicted[:, None], wanted[None])  # waste: matrix-for-its-diagonal
    box_loss = (1 - torch.diag(overlaps)).sum()  # waste: matrix-for-its-diagonal
    # instead: box_loss = (1 - giou(predicted, wanted)).sum()
    return (focal(scores, targets) + 2 * box_loss) / (batch * objects * near)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--size", type=int, default=160)
    parser.add_argument("--width", type=int, default=24)
    parser.add_argument("--objects", type=int, default=8)
    args = parser.parse_args()

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    device = "cuda" if torch.cuda.is_available() else "cpu"
    classes, kept = 20, 128
    images = torch.randn(kept, 3, args.size, args.size, device=device)
    corner = torch.rand(kept, args.objects, 2, device=device) * args.size * 0.6
    extent = (0.1 + 0.3 * torch.rand(kept, args.objects, 2, device=device)) * args.size
    boxes = torch.cat([corner, corner + extent], -1)
    labels = torch.randint(0, classes, (kept, args.objects), device=device)
    line = (torch.arange(args.size // STRIDE, device=device) + 0.5) * STRIDE
    points = torch.stack(torch.meshgrid(line, line, indexing="xy"), -1).view(-1, 2)

    model = Detector(args.width, classes).to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, nesterov=True, fused=True)

    for step in range(args.steps):
        rows = torch.randint(0, kept, (args.batch_size,), device=device)
        scores, sides = model(images[rows].to(memory_format=torch.channels_last))
        loss = detection_loss(scores, sides, points, boxes[rows], labels[rows])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step} loss {loss.item():.4f}")
        # step


if __name__ == "__main__":
    main()
