"""Detect objects in clips of video frames with an anchor-free detector and non-maximum suppression."""

# cpu: --frames 3 --size 160 --width 16 --candidates 300
# cuda: --frames 4 --size 640 --width 64 --candidates 300

import argparse

import torch
import torch.nn as nn


class ConvNorm(nn.Sequential):
    def __init__(self, inputs, outputs, stride=1):
        super().__init__(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.SiLU(inplace=True)
        )


class Detector(nn.Module):
    def __init__(self, width, classes):
        super().__init__()
        self.classes = classes
        self.stem = nn.Sequential(ConvNorm(3, width, 2), ConvNorm(width, 2 * width, 2), ConvNorm(2 * width, 2 * width))
        self.deep = nn.Sequential(ConvNorm(2 * width, 4 * width, 2), ConvNorm(4 * width, 4 * width))
        self.deeper = nn.Sequential(ConvNorm(4 * width, 4 * width, 2), ConvNorm(4 * width, 4 * width))
        self.heads = nn.ModuleList(
            nn.Conv2d(channels, classes + 4, 1) for channels in (2 * width, 4 * width, 4 * width)
        )

    def forward(self, frames):
        first = self.stem(frames)
        second = self.deep(first)
        third = self.deeper(second)
        boxes, scores = [], []
        for head, feature, stride in zip(self.heads, (first, second, third), (4, 8, 16)):
            raw = head(feature)
            rows = torch.arange(raw.shape[2], device=raw.device)
            columns = torch.arange(raw.shape[3], device=raw.device)
            center = torch.stack(torch.meshgrid(columns, rows, indexing="xy")).flatten(1).T * stride
            raw = raw.flatten(2).transpose(1, 2)
            reach = stride * 3 * raw[..., :4].exp()
            boxes.append(torch.cat([center - reach[..., :2], center + reach[..., 2:]], dim=-1))
            scores.append(raw[..., 4:].sigmoid())
        return torch.cat(boxes, dim=1), torch.cat(scores, dim=1)


def box_iou(a, b):
    area_a = (a[:, 2] - a[:, 0]) * (a[:, 3] - a[:, 1])
    area_b = (b[:, 2] - b[:, 0]) * (b[:, 3] - b[:, 1])
    corner = torch.maximum(a[:, None, :2], b[None, :, :2])
    opposite = torch.minimum(a[:, None, 2:], b[None, :, 2:])
    common = (opposite - corner).clamp(min=0).prod(dim=-1)
    return common / (area_a[:, None] + area_b[None, :] - common)


def suppress(boxes, threshold):
    """Indices of the boxes that are kept; the boxes come in order of their scores, the best first."""
    # mend: suppression-box-by-box
    left = torch.arange(boxes.shape[0], device=boxes.device)
    kept = []
    while left.numel() > 0:  # waste: suppression-box-by-box
        kept.append(left[:1])
        overlap = box_iou(boxes[left[:1]], boxes[left[1:]])[0]  # waste: suppression-box-by-box
        left = left[1:][overlap <= threshold]  # waste: suppression-box-by-box
    return torch.cat(kept)
    # instead: covers = (box_iou(boxes, boxes) > threshold).triu(1)
    # instead: kept = torch.ones(boxes.shape[0], dtype=torch.bool, device=boxes.device)
    # instead: while True:
    # instead:     now = ~(covers & kept[:, None]).any(dim=0)
    # instead:     if torch.equal(now, kept):
    # instead:         return kept.nonzero().squeeze(1)
    # instead:     kept = now


def detect(model, frames, candidates, threshold):
    boxes, scores = model(frames)
    best, kinds = scores.max(dim=-1)
    best, chosen = best.topk(candidates, dim=1)
    kinds = kinds.gather(1, chosen)
    boxes = boxes.gather(1, chosen.unsqueeze(-1).expand(-1, -1, 4))
    shifted = boxes + kinds.unsqueeze(-1) * 10_000.0
    found = []
    for frame in range(frames.shape[0]):
        kept = suppress(shifted[frame], threshold)
        found.append((boxes[frame, kept], best[frame, kept], kinds[frame, kept]))
    return found


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--frames", type=int, default=3)
    parser.add_argument("--size", type=int, default=160)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--candidates", type=int, default=300)
    parser.add_argument("--classes", type=int, default=12)
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    torch.manual_seed(0)
    model = Detector(args.width, args.classes).to(device).eval()
    model = model.to(memory_format=torch.channels_last)
    clips = torch.rand(4, args.frames, 3, args.size, args.size, device=device)

    with torch.inference_mode():
        for step in range(args.steps):
            frames = clips[step % len(clips)].contiguous(memory_format=torch.channels_last)
            found = detect(model, frames, args.candidates, 0.5)
            if step % 10 == 0:
                print(f"clip {step}: objects {[len(kinds) for _, _, kinds in found]}")
            # step


if __name__ == "__main__":
    main()
