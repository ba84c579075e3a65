"""Segments lesions in scans of the brain: a 3-d U-Net over overlapping windows, blended by a Gaussian weight."""

# cpu: --volume 32 --window 20 --stride 12 --width 4 --windows-at-once 2
# cuda: --volume 160 --window 64 --stride 48 --width 32 --windows-at-once 3

import argparse
import functools
import itertools

import torch
import torch.nn.functional as F
from torch import nn

MODALITIES, CLASSES = 4, 4


class DoubleConv(nn.Module):
    """Two convolutions; their batch norms were folded into them when the model was exported."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.conv1 = nn.Conv3d(inputs, outputs, 3, padding=1)
        self.conv2 = nn.Conv3d(outputs, outputs, 3, padding=1)
        for conv in (self.conv1, self.conv2):
            nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")

    def forward(self, x):
        return F.relu(self.conv2(F.relu(self.conv1(x), inplace=True)), inplace=True)


class UNet(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.down1 = DoubleConv(MODALITIES, width)
        self.down2 = DoubleConv(width, 2 * width)
        self.bottom = DoubleConv(2 * width, 4 * width)
        self.up2 = nn.ConvTranspose3d(4 * width, 2 * width, 2, stride=2)
        self.merge2 = DoubleConv(4 * width, 2 * width)
        self.up1 = nn.ConvTranspose3d(2 * width, width, 2, stride=2)
        self.merge1 = DoubleConv(2 * width, width)
        self.head = nn.Conv3d(width, CLASSES, 1, bias=False)

    def forward(self, x):
        fine = self.down1(x)
        middle = self.down2(F.max_pool3d(fine, 2))
        coarse = self.bottom(F.max_pool3d(middle, 2))
        middle = self.merge2(torch.cat([self.up2(coarse), middle], dim=1))
        fine = self.merge1(torch.cat([self.up1(middle), fine], dim=1))
        return self.head(fine)


# mend: weights-made-again
# instead: @functools.cache
def gaussian_weights(window, device, sharpness=0.125):
    """How much each voxel of a window counts: most in its middle."""
    places = torch.arange(window, dtype=torch.float32) - (window - 1) / 2
    grid = torch.stack(torch.meshgrid(places, places, places, indexing="ij"))
    weights = torch.exp(-grid.square().sum(0) / (2 * (sharpness * window) ** 2))  # waste: weights-made-again
    return weights.clamp(min=1e-4).to(device)  # waste: weights-made-again


def corners(volume, window, stride):
    starts = [*range(0, volume - window, stride), volume - window]
    return list(itertools.product(starts, repeat=3))


def place(corner, window):
    return (..., *(slice(start, start + window) for start in corner))


def segment(model, scan, args):
    """The class of every voxel of a scan (modalities, depth, height, width)."""
    scores = torch.zeros(CLASSES, *scan.shape[1:], device=scan.device)
    total = torch.zeros(scan.shape[1:], device=scan.device)
    for group in batches(corners(args.volume, args.window, args.stride), args.windows_at_once):
        windows = torch.stack([scan[place(corner, args.window)] for corner in group])
        predicted = model(windows.contiguous(memory_format=torch.channels_last_3d)).float().softmax(dim=1)
        for corner, prediction in zip(group, predicted, strict=True):
            weights = gaussian_weights(args.window, scan.device)
            scores[place(corner, args.window)] += weights * prediction
            total[place(corner, args.window)] += weights
    return (scores / total).argmax(dim=0)


def batches(items, size):
    for start in range(0, len(items), size):
        yield items[start : start + size]


@functools.lru_cache(maxsize=1)
def load_model(width, device, dtype):
    model = UNet(width).eval()
    return model.to(device, dtype, memory_format=torch.channels_last_3d)


@torch.inference_mode()
def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--volume", type=int, default=160, help="voxels along an edge of a scan")
    parser.add_argument("--window", type=int, default=64)
    parser.add_argument("--stride", type=int, default=48)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--windows-at-once", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20, help="scans")
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cudnn.benchmark = True
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = load_model(args.width, device, dtype)
    scans = torch.randn(3, MODALITIES, args.volume, args.volume, args.volume, device=device, dtype=dtype)
    lesions = torch.zeros((), device=device)
    for step in range(args.steps):
        classes = segment(model, scans[step % len(scans)], args)
        lesions += (classes != 0).float().mean()
        if step % 10 == 0:
            print(f"scan {step}: {100 * lesions.item() / (step + 1):.2f} % of the voxels in lesions so far")
        # step


if __name__ == "__main__":
    main()
