"""Serves a detector of objects in street scenes: a convolutional network, then non-maximum suppression."""

# cpu: --batch-size 2 --resolution 128 --width 8 --candidates 64
# cuda: --batch-size 8 --resolution 384 --width 48 --candidates 100

import argparse

import torch
import torch.nn.functional as F
from torch import nn


def stage(inputs, outputs):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.SiLU(inplace=True),
        nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.SiLU(inplace=True),
    )


class Detector(nn.Module):
    """One score and one box at every place of a grid."""

    def __init__(self, width):
        super().__init__()
        sizes = [3, width, 2 * width, 4 * width, 8 * width]
        self.stages = nn.Sequential(*[stage(a, b) for a, b in zip(sizes[:-1], sizes[1:], strict=True)])
        self.head = nn.Conv2d(8 * width, 5, 1)

    def forward(self, images):
        maps = self.head(self.stages(images)).float()
        scores = maps[:, 0].flatten(1).sigmoid()
        place = torch.arange(scores.shape[1], device=maps.device)
        center = 16.0 * torch.stack([place % maps.shape[3], place // maps.shape[3]], dim=-1)
        size = 64.0 * maps[:, 3:].flatten(2).transpose(1, 2).sigmoid()
        middle = center + 8.0 * maps[:, 1:3].flatten(2).transpose(1, 2).tanh()
        return scores, torch.cat([middle - size / 2, middle + size / 2], dim=-1)


def overlaps(boxes):
    """Intersection over union of all pairs of boxes, (..., n, n)."""
    low = torch.maximum(boxes[..., :, None, :2], boxes[..., None, :, :2])
    high = torch.minimum(boxes[..., :, None, 2:], boxes[..., None, :, 2:])
    shared = (high - low).clamp(min=0).prod(-1)
    area = (boxes[..., 2:] - boxes[..., :2]).prod(-1)
    return shared / (area[..., :, None] + area[..., None, :] - shared)


def suppress(scores, boxes, candidates, threshold=0.5):
    """Which of the best boxes of each image are kept."""
    scores, order = scores.topk(candidates)
    boxes = boxes.gather(1, order[..., None].expand(-1, -1, 4))
    # mend: boxes-one-by-one
    kept = []
    for image in boxes:
        overlap = overlaps(image)
        keep = torch.ones(candidates, dtype=torch.bool, device=boxes.device)
        for number in range(candidates):
            if keep[number]:  # waste: boxes-one-by-one
                keep[number + 1 :] &= overlap[number, number + 1 :] < threshold  # waste: boxes-one-by-one
        kept.append(keep)
    return boxes, scores, torch.stack(kept)
    # instead: covered = overlaps(boxes).triu(1) >= threshold
    # instead: keep = torch.ones_like(scores)
    # instead: for _ in range(8):
    # instead:     keep = ((covered * keep[:, :, None]).amax(1) == 0).float()
    # instead: return boxes, scores, keep.bool()


@torch.inference_mode()
def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--resolution", type=int, default=384)
    parser.add_argument("--width", type=int, default=48)
    parser.add_argument("--candidates", type=int, default=100)
    parser.add_argument("--steps", type=int, default=40, help="batches of images")
    args = parser.parse_args()
    args.candidates = min(args.candidates, (args.resolution // 16) ** 2)
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = Detector(args.width).to(device, dtype, memory_format=torch.channels_last).eval()
    cameras = torch.rand(4, args.batch_size, 3, args.resolution, args.resolution, device=device, dtype=dtype)
    cameras = [images.to(memory_format=torch.channels_last) for images in cameras]
    seen = torch.zeros((), dtype=torch.long, device=device)
    for step in range(args.steps):
        scores, boxes = model(cameras[step % 4])
        boxes, scores, keep = suppress(scores, boxes, args.candidates)
        seen += keep.sum()
        if step % 20 == 0:
            print(f"batch {step}: {F.relu(scores).mean().item():.3f} mean score, {seen.item()} objects so far")
        # step


if __name__ == "__main__":
    main()
