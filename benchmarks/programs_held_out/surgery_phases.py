"""Recognizes the phase of an operation from short clips of its video."""

# cpu: --width 16 --batch-size 2 --frames 8 --side 56 --videos 4
# cuda: --width 64 --batch-size 16 --frames 16 --side 112 --videos 12

import argparse
import random

import torch
import torch.nn.functional as F
from torch import nn

PHASES = 8
LENGTH = 120
"""Frames that are kept of a video."""


class Block(nn.Module):
    """A convolution over space and one over time, beside the identity."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.space = nn.Conv3d(inputs, outputs, (1, 3, 3), stride=(1, stride, stride), padding=(0, 1, 1), bias=False)
        self.norm1 = nn.BatchNorm3d(outputs)
        self.time = nn.Conv3d(outputs, outputs, (3, 1, 1), stride=(stride, 1, 1), padding=(1, 0, 0), bias=False)
        self.norm2 = nn.BatchNorm3d(outputs)
        self.skip = nn.Conv3d(inputs, outputs, 1, stride=stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x):
        y = F.relu(self.norm1(self.space(x)), inplace=True)
        y = self.norm2(self.time(y))
        return F.relu(y + self.skip(x), inplace=True)


class PhaseNet(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv3d(3, width, (3, 4, 4), stride=(1, 2, 2), padding=1, bias=False),
            nn.BatchNorm3d(width),
            nn.ReLU(inplace=True),
        )
        self.blocks = nn.Sequential(
            Block(width, width, 1),
            Block(width, 2 * width, 2),
            Block(2 * width, 4 * width, 2),
            Block(4 * width, 4 * width, 1),
        )
        self.head = nn.Linear(4 * width, PHASES)

    def forward(self, clips):
        return self.head(self.blocks(self.stem(clips)).mean((2, 3, 4)))


class OperationVideos:
    """Decoded videos in memory, as bytes (frame, row, column, colour), with the phase of each frame."""

    def __init__(self, videos, side, frames):
        self.pixels = torch.randint(256, (videos, LENGTH, side, side, 3), dtype=torch.uint8)
        self.phases = (torch.arange(LENGTH) * PHASES // LENGTH).expand(videos, -1)
        self.frames = frames

    def batch(self, size):
        """Clips from random places, and the phase in which each ends."""
        clips, phases = [], []
        for _ in range(size):
            video = random.randrange(len(self.pixels))
            first = random.randrange(LENGTH - self.frames)
            clips.append(self.pixels[video, first : first + self.frames])
            phases.append(self.phases[video, first + self.frames - 1])
        return torch.stack(clips), torch.stack(phases)


def prepare(clips, device):
    """Clips as the network takes them, on its device."""
    clips = clips.permute(0, 4, 1, 2, 3)
    # mend: floats-from-the-host
    clips = (clips.float() / 255 - 0.45) / 0.225  # waste: floats-from-the-host
    return clips.to(device)  # waste: floats-from-the-host
    # instead: return (clips.to(device).float() / 255 - 0.45) / 0.225


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--frames", type=int, default=16)
    parser.add_argument("--side", type=int, default=112)
    parser.add_argument("--videos", type=int, default=12)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    random.seed(0)
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    videos = OperationVideos(args.videos, args.side, args.frames)
    model = PhaseNet(args.width).to(device, memory_format=torch.channels_last_3d)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4, fused=True)
    right = torch.zeros((), device=device)
    for step in range(args.steps):
        clips, phases = videos.batch(args.batch_size)
        clips, phases = prepare(clips, device), phases.to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            scores = model(clips)
        loss = F.cross_entropy(scores.float(), phases, label_smoothing=0.1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        right += (scores.argmax(1) == phases).float().mean()
        if step % 20 == 0:
            print(f"step {step}: loss {loss.item():.3f}, right {right.item() / (step + 1):.1%}")
        # step


if __name__ == "__main__":
    main()
