"""Trains a 3-d convolutional network that names gestures in short videos."""

# cpu: --batch-size 1 --video-frames 24 --stride 4 --decoded 64 --resolution 40 --width 8
# cuda: --batch-size 12 --video-frames 128 --stride 8 --decoded 256 --resolution 112 --width 32

import argparse
import time

import torch
import torch.nn.functional as F
from torch import nn

GESTURES = 174


class Block(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv3d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm3d(outputs)
        self.conv2 = nn.Conv3d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm3d(outputs)
        self.skip = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.skip = nn.Conv3d(inputs, outputs, 1, stride=stride, bias=False)

    def forward(self, x):
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        return F.relu(self.norm2(self.conv2(y)) + self.skip(x), inplace=True)


class VideoNet(nn.Module):
    def __init__(self, width, depth=3):
        super().__init__()
        self.stem = nn.Conv3d(3, width, (3, 7, 7), stride=(1, 2, 2), padding=(1, 3, 3), bias=False)
        self.norm = nn.BatchNorm3d(width)
        blocks, inputs = [], width
        for number in range(4):
            outputs = width * 2**number
            for place in range(depth):
                blocks.append(Block(inputs, outputs, 2 if place == 0 and number > 0 else 1))
                inputs = outputs
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(inputs, GESTURES)

    def forward(self, clips):
        x = F.relu(self.norm(self.stem(clips)), inplace=True)
        return self.head(self.blocks(x).mean((2, 3, 4)))


def prepare(videos, resolution, stride):
    """Decoded videos, (clips, frames, 3, height, width) of bytes, as clips (clips, 3, frames, height, width)."""
    # mend: frames-thrown-away
    # instead: videos, stride = videos[:, ::stride], 1
    frames = videos.flatten(0, 1).float() / 255  # waste: frames-thrown-away
    frames = F.interpolate(frames, size=(resolution, resolution), mode="bilinear")  # waste: frames-thrown-away
    frames = (frames - 0.45) / 0.225
    clips = frames.unflatten(0, videos.shape[:2])[:, ::stride]
    return clips.transpose(1, 2).contiguous(memory_format=torch.channels_last_3d)


def clip_gradients(model, most):
    """Shortens the gradient of all parameters to a norm of at most `most`; returns the norm that it had."""
    # mend: norm-of-each
    total = 0.0
    for parameter in model.parameters():
        total += parameter.grad.norm().item() ** 2  # waste: norm-of-each
    norm = total**0.5
    if norm > most:
        for parameter in model.parameters():
            parameter.grad.mul_(most / norm)  # waste: norm-of-each
    # instead: norm = nn.utils.clip_grad_norm_(model.parameters(), most)
    return norm


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=12)
    parser.add_argument("--video-frames", type=int, default=128, help="frames of a video")
    parser.add_argument("--stride", type=int, default=8, help="every how many frames one is looked at")
    parser.add_argument("--decoded", type=int, default=256, help="height and width of decoded frames")
    parser.add_argument("--resolution", type=int, default=112)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cudnn.benchmark = True
    model = VideoNet(args.width).to(device, memory_format=torch.channels_last_3d)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4, fused=True)
    shape = (args.batch_size, args.video_frames, 3, args.decoded, args.decoded)
    pool = [torch.randint(256, shape, dtype=torch.uint8, device=device) for _ in range(2)]
    gestures = torch.randint(GESTURES, (len(pool), args.batch_size), device=device)

    started = time.perf_counter()
    for step in range(args.steps):
        clips = prepare(pool[step % len(pool)], args.resolution, args.stride)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = F.cross_entropy(model(clips), gestures[step % len(pool)], label_smoothing=0.1)
        loss.backward()
        norm = clip_gradients(model, args.clip)
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            seconds = time.perf_counter() - started
            print(f"step {step}: loss {loss.item():.3f}, gradient {float(norm):.2f}, {seconds:.1f} s")
        # step


if __name__ == "__main__":
    main()
