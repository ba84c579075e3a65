"""Trains a temporal head for action recognition on top of a fixed per-frame image network."""

# cpu: --width 8 --batch-size 2 --frames 32 --source 96 --size 64
# cuda: --width 64 --batch-size 32 --frames 32 --source 256 --size 160

import argparse

import torch
import torch.nn.functional as F
from torch import nn


class Residual(nn.Module):
    def __init__(self, in_channels, out_channels, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(out_channels)
        self.short = nn.Conv2d(in_channels, out_channels, 1, stride=stride, bias=False)

    def forward(self, x):
        h = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(h)) + self.short(x))


class FrameNet(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 7, stride=2, padding=3)
        self.blocks = nn.Sequential(
            Residual(width, width, 1),
            Residual(width, 2 * width, 2),
            Residual(2 * width, 4 * width, 2),
            Residual(4 * width, 8 * width, 2),
        )
        self.out_dim = 8 * width

    def forward(self, x):
        return self.blocks(F.relu(self.stem(x))).mean(dim=(2, 3))


class ActionNet(nn.Module):
    def __init__(self, width, hidden, num_classes, max_frames=64):
        super().__init__()
        self.backbone = FrameNet(width)
        self.position = nn.Parameter(torch.zeros(max_frames, hidden))
        self.project = nn.Linear(self.backbone.out_dim, hidden)
        layer = nn.TransformerEncoderLayer(hidden, 4, 2 * hidden, dropout=0.0, batch_first=True, norm_first=True)
        self.temporal = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.classify = nn.Linear(hidden, num_classes)

    def head_parameters(self):
        return [p for name, p in self.named_parameters() if not name.startswith("backbone.")]

    def forward(self, frames):
        b, t = frames.shape[:2]
        features = self.backbone(frames.flatten(0, 1))  # waste: backward-through-fixed-backbone
        # instead: with torch.no_grad():
        # instead:     features = self.backbone(frames.flatten(0, 1))
        h = self.project(features).view(b, t, -1) + self.position[:t]
        return self.classify(self.temporal(h).mean(dim=1))


class Preprocess(nn.Module):
    """Bytes to normalized frames of the network's size; keeps every stride-th frame."""

    def __init__(self, size, stride):
        super().__init__()
        self.size = size
        self.stride = stride
        self.register_buffer("mean", torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1))
        self.register_buffer("std", torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1))

    def forward(self, clips):
        # mend: resize-before-subsampling
        b, t = clips.shape[:2]
        frames = clips.flatten(0, 1).float() / 255  # waste: resize-before-subsampling
        size = (self.size, self.size)
        frames = F.interpolate(frames, size=size, mode="bilinear")  # waste: resize-before-subsampling
        frames = (frames - self.mean) / self.std  # waste: resize-before-subsampling
        frames = frames.view(b, t, 3, self.size, self.size)
        return frames[:, :: self.stride]  # waste: resize-before-subsampling
        # instead: clips = clips[:, :: self.stride]
        # instead: b, t = clips.shape[:2]
        # instead: frames = clips.flatten(0, 1).float() / 255
        # instead: frames = F.interpolate(frames, size=(self.size, self.size), mode="bilinear")
        # instead: frames = (frames - self.mean) / self.std
        # instead: return frames.view(b, t, 3, self.size, self.size)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--frames", type=int, default=32)
    parser.add_argument("--stride", type=int, default=4)
    parser.add_argument("--source", type=int, default=96)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--num-classes", type=int, default=50)
    args = parser.parse_args()

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    amp = torch.autocast(device, torch.bfloat16, enabled=device == "cuda")

    generator = torch.Generator().manual_seed(1)
    shape = (2 * args.batch_size, args.frames, 3, args.source, args.source)
    clips = torch.randint(256, shape, dtype=torch.uint8, generator=generator).to(device)
    labels = torch.randint(args.num_classes, (len(clips),), generator=generator).to(device)

    preprocess = Preprocess(args.size, args.stride).to(device)
    model = ActionNet(args.width, args.hidden, args.num_classes).to(device)
    model.train()
    model.backbone.eval()
    optimizer = torch.optim.AdamW(model.head_parameters(), lr=3e-4, weight_decay=0.01, fused=True)

    for step in range(args.steps):
        start = (step % 2) * args.batch_size
        frames = preprocess(clips[start : start + args.batch_size])
        with amp:
            logits = model(frames)
            loss = F.cross_entropy(logits, labels[start : start + args.batch_size])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.6f}")
        # step


if __name__ == "__main__":
    main()
