"""Segments the liver in scans that are too large for one pass: overlapping windows, whose answers are weighted."""

# cpu: --width 4 --window 16 --scan 32 --batch-size 9
# cuda: --width 32 --window 64 --scan 128 --batch-size 9

import argparse
import itertools

import torch
import torch.nn.functional as F
from torch import nn


class Double(nn.Module):
    """Two convolutions."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.conv1 = nn.Conv3d(inputs, outputs, 3, padding=1)
        self.conv2 = nn.Conv3d(outputs, outputs, 3, padding=1)

    def forward(self, x):
        x = F.relu(self.conv1(x), inplace=True)
        return F.relu(self.conv2(x), inplace=True)


class UNet(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first = Double(1, width)
        self.down1, self.down2 = Double(width, 2 * width), Double(2 * width, 4 * width)
        self.grow2 = nn.ConvTranspose3d(4 * width, 2 * width, 2, stride=2)
        self.grow1 = nn.ConvTranspose3d(2 * width, width, 2, stride=2)
        self.up2, self.up1 = Double(4 * width, 2 * width), Double(2 * width, width)
        self.out = nn.Conv3d(width, 1, 1)

    def forward(self, x):
        fine = self.first(x)
        middle = self.down1(F.max_pool3d(fine, 2))
        coarse = self.down2(F.max_pool3d(middle, 2))
        middle = self.up2(torch.cat([self.grow2(coarse), middle], dim=1))
        return self.out(self.up1(torch.cat([self.grow1(middle), fine], dim=1)))


class WindowedSegmenter:
    def __init__(self, model, args, device):
        self.model, self.window, self.batch_size = model, args.window, args.batch_size
        self.device = device
        # mend: sums-on-the-host
        self.sums_on = torch.device("cpu")
        # instead: self.sums_on = device
        firsts = range(0, args.scan - args.window + 1, args.window // 2)
        self.corners = list(itertools.product(firsts, repeat=3))
        self.importance = self.bell(args.window).to(self.sums_on)
        self.coverage = torch.zeros(args.scan, args.scan, args.scan, device=self.sums_on)
        for corner in self.corners:
            self.coverage[self.place(corner)] += self.importance

    @staticmethod
    def bell(window):
        """Voxels at the centre of a window count more than those at its border."""
        x = torch.linspace(-1, 1, window)
        line = torch.exp(-2 * x**2)
        return line[:, None, None] * line[:, None] * line

    def place(self, corner):
        return tuple(slice(first, first + self.window) for first in corner)

    @torch.inference_mode()
    def __call__(self, scan):
        """Whether a voxel of the scan, which is on the device, belongs to the liver."""
        sums = torch.zeros(scan.shape, device=self.sums_on)
        for first in range(0, len(self.corners), self.batch_size):
            corners = self.corners[first : first + self.batch_size]
            windows = torch.stack([scan[self.place(corner)] for corner in corners])[:, None]
            scores = self.model(windows.to(memory_format=torch.channels_last_3d))
            shares = scores.float().sigmoid()[:, 0].to(self.sums_on)  # waste: sums-on-the-host
            for corner, share in zip(corners, shares, strict=True):
                sums[self.place(corner)].addcmul_(share, self.importance)  # waste: sums-on-the-host
        return sums > 0.5 * self.coverage


def make_scan(size):
    """A scan in Hounsfield units: a bright ellipsoid in noise."""
    axis = torch.linspace(-1, 1, size)
    centre, radius = torch.rand(3) - 0.5, 0.3 + 0.4 * torch.rand(3)
    squares = [((axis - c) / r) ** 2 for c, r in zip(centre, radius, strict=True)]
    inside = squares[0][:, None, None] + squares[1][:, None] + squares[2] < 1
    return (torch.randn(size, size, size) * 80 + inside * 100).to(torch.int16)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--window", type=int, default=64)
    parser.add_argument("--scan", type=int, default=128)
    parser.add_argument("--scans", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=9)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = UNet(args.width).to(device, dtype, memory_format=torch.channels_last_3d).eval()
    segmenter = WindowedSegmenter(model, args, device)
    scans = [make_scan(args.scan) for _ in range(args.scans)]
    if device.type == "cuda":
        scans = [scan.pin_memory() for scan in scans]
    voxels = torch.zeros((), device=device)
    for step in range(args.steps):
        scan = scans[step % len(scans)].to(device, non_blocking=True)
        liver = segmenter((scan.to(dtype) - 40) / 200)
        voxels += liver.to(device).sum()
        if step % 20 == 0:
            print(f"scan {step}: {voxels.item() / (step + 1):.0f} voxels of the liver in a scan")
        # step


if __name__ == "__main__":
    main()
