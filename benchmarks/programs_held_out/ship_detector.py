"""Finds ships in satellite images: a detector with anchors at three strides."""

# cpu: --width 24 --batch-size 4 --resolution 128 --ships 4
# cuda: --width 128 --batch-size 16 --resolution 512 --ships 4

import argparse

import torch
import torch.nn.functional as F
from torch import nn

STRIDES = (8, 16, 32)
SHAPES = ((1.0, 1.0), (2.0, 1.0), (1.0, 2.0), (1.6, 1.6))
CLASSES = 4


def make_anchors(resolution, device):
    """Corners of all anchors (count, 4), in the order in which the network answers."""
    boxes = []
    for stride in STRIDES:
        for row in range(resolution // stride):
            for column in range(resolution // stride):
                for wide, high in SHAPES:
                    x, y = (column + 0.5) * stride, (row + 0.5) * stride
                    w, h = wide * stride, high * stride
                    boxes.append((x - w, y - h, x + w, y + h))  # waste: anchors-every-step
    return torch.tensor(boxes, device=device)


def overlap(a, b):
    """Intersection over union of boxes whose leading dimensions are broadcast."""
    low, high = torch.maximum(a[..., :2], b[..., :2]), torch.minimum(a[..., 2:], b[..., 2:])
    shared = (high - low).clamp(min=0).prod(-1)
    sizes = (a[..., 2:] - a[..., :2]).prod(-1) + (b[..., 2:] - b[..., :2]).prod(-1)
    return shared / (sizes - shared)


def match(anchors, boxes):
    """For every anchor of every image the ship that it overlaps most, and by how much."""
    # mend: box-by-box
    images, ships, _ = boxes.shape
    most = torch.zeros(images, len(anchors), device=boxes.device)
    owner = torch.zeros(images, len(anchors), dtype=torch.long, device=boxes.device)
    for image in range(images):
        for ship in range(ships):
            shared = overlap(anchors, boxes[image, ship])  # waste: box-by-box
            owner[image] = torch.where(shared > most[image], ship, owner[image])  # waste: box-by-box
            most[image] = torch.maximum(shared, most[image])  # waste: box-by-box
    # instead: most, owner = overlap(anchors, boxes[:, :, None]).max(dim=1)
    return most, owner


class Stage(nn.Sequential):
    def __init__(self, inputs, outputs, stride):
        super().__init__(
            nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
        )


class Detector(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(4, width, 4, stride=4), Stage(width, width, 1))
        self.stages = nn.ModuleList(
            [Stage(width, 2 * width, 2), Stage(2 * width, 4 * width, 2), Stage(4 * width, 8 * width, 2)]
        )
        self.heads = nn.ModuleList(
            [nn.Conv2d(size * width, len(SHAPES) * (4 + CLASSES), 3, padding=1) for size in (2, 4, 8)]
        )

    def forward(self, images):
        x, answers = self.stem(images), []
        for stage, head in zip(self.stages, self.heads, strict=True):
            x = stage(x)
            answers.append(head(x).permute(0, 2, 3, 1).reshape(len(x), -1, 4 + CLASSES))
        return torch.cat(answers, dim=1)


def detection_loss(answers, anchors, boxes, kinds):
    most, owner = match(anchors, boxes)
    ship = (most > 0.4).float()
    wanted = F.one_hot(kinds.gather(1, owner), CLASSES) * ship[..., None]
    scores = F.binary_cross_entropy_with_logits(answers[..., 4:], wanted, reduction="sum")
    goal = boxes.gather(1, owner[..., None].expand(-1, -1, 4))
    span = (anchors[:, 2:] - anchors[:, :2]).repeat(1, 2)
    misses = F.smooth_l1_loss(answers[..., :4], (goal - anchors) / span, reduction="none").sum(-1)
    return (scores + (misses * ship).sum()) / ship.sum().clamp(min=1)


def make_scenes(count, args, device):
    """Seas with ships: images, boxes and kinds."""
    images = torch.rand(count, 4, args.resolution, args.resolution, device=device)
    centre = torch.rand(count, args.ships, 2, device=device) * args.resolution
    half = 6 + torch.rand(count, args.ships, 2, device=device) * 30
    kinds = torch.randint(CLASSES, (count, args.ships), device=device)
    boxes = torch.cat([centre - half, centre + half], dim=2)
    return images.contiguous(memory_format=torch.channels_last), boxes, kinds


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--resolution", type=int, default=512)
    parser.add_argument("--ships", type=int, default=4)
    parser.add_argument("--lr", type=float, default=0.002)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = Detector(args.width).to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, fused=True)
    pool = [make_scenes(args.batch_size, args, device) for _ in range(6)]
    # mend: anchors-every-step
    # instead: anchors = make_anchors(args.resolution, device)
    for step in range(args.steps):
        images, boxes, kinds = pool[step % len(pool)]
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            answers = model(images)
        anchors = make_anchors(args.resolution, device)  # waste: anchors-every-step
        # instead:
        loss = detection_loss(answers.float(), anchors, boxes, kinds)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
        # step


if __name__ == "__main__":
    main()
