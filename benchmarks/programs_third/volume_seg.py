"""Trains a small 3-d U-Net on synthetic volumes with elastic deformation as augmentation."""

# cpu: --width 6 --batch-size 1 --size 32 --sigma 1.5
# cuda: --width 32 --batch-size 4 --size 96 --sigma 2.0

import argparse

import torch
import torch.nn.functional as F
from torch import nn


class ConvBlock(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv1 = nn.Conv3d(in_channels, out_channels, 3, padding=1)
        self.norm1 = nn.InstanceNorm3d(out_channels, affine=True)
        self.conv2 = nn.Conv3d(out_channels, out_channels, 3, padding=1)
        self.norm2 = nn.InstanceNorm3d(out_channels, affine=True)

    def forward(self, x):
        x = F.leaky_relu(self.norm1(self.conv1(x)), 0.01, inplace=True)
        return F.leaky_relu(self.norm2(self.conv2(x)), 0.01, inplace=True)


class UNet3d(nn.Module):
    def __init__(self, width, num_classes):
        super().__init__()
        self.down1 = ConvBlock(1, width)
        self.down2 = ConvBlock(width, 2 * width)
        self.bottom = ConvBlock(2 * width, 4 * width)
        self.grow2 = nn.ConvTranspose3d(4 * width, 2 * width, 2, stride=2)
        self.up2 = ConvBlock(4 * width, 2 * width)
        self.grow1 = nn.ConvTranspose3d(2 * width, width, 2, stride=2)
        self.up1 = ConvBlock(2 * width, width)
        self.head = nn.Conv3d(width, num_classes, 1)

    def forward(self, x):
        a = self.down1(x)
        b = self.down2(F.max_pool3d(a, 2))
        c = self.bottom(F.max_pool3d(b, 2))
        b = self.up2(torch.cat([self.grow2(c), b], dim=1))
        a = self.up1(torch.cat([self.grow1(b), a], dim=1))
        return self.head(a)


class ElasticDeformation(nn.Module):
    """Warps volume and labels by smoothed random displacements."""

    def __init__(self, size, sigma, alpha=12.0):
        super().__init__()
        self.alpha = alpha
        self.radius = int(3 * sigma)
        taps = torch.arange(-self.radius, self.radius + 1)
        kernel = torch.exp(-0.5 * (taps / sigma) ** 2)
        self.register_buffer("kernel", kernel / kernel.sum())
        axis = (torch.arange(size) * 2 + 1) / size - 1
        z, y, x = torch.meshgrid(axis, axis, axis, indexing="ij")
        self.register_buffer("grid", torch.stack([x, y, z], dim=-1))

    def smooth(self, noise):
        b, c = noise.shape[:2]
        field = noise.flatten(0, 1).unsqueeze(1)
        k = self.kernel
        # mend: dense-gaussian-kernel
        ball = k.view(-1, 1, 1) * k.view(1, -1, 1) * k.view(1, 1, -1)
        field = F.conv3d(field, ball[None, None], padding=self.radius)  # waste: dense-gaussian-kernel
        # instead: field = F.conv3d(field, k.view(1, 1, -1, 1, 1), padding=(self.radius, 0, 0))
        # instead: field = F.conv3d(field, k.view(1, 1, 1, -1, 1), padding=(0, self.radius, 0))
        # instead: field = F.conv3d(field, k.view(1, 1, 1, 1, -1), padding=(0, 0, self.radius))
        return field.view(b, c, *field.shape[2:])

    @torch.no_grad()
    def forward(self, volume, label):
        size = volume.shape[-1]
        noise = torch.rand(len(volume), 3, size, size, size, device=volume.device) * 2 - 1
        shift = self.smooth(noise) * (self.alpha * 2 / size)
        grid = self.grid + shift.movedim(1, -1)
        volume = F.grid_sample(volume, grid, padding_mode="border", align_corners=False)
        label = F.grid_sample(label.unsqueeze(1).float(), grid, mode="nearest", align_corners=False)
        return volume, label.squeeze(1).long()


class DiceCrossEntropy(nn.Module):
    def forward(self, logits, label):
        ce = F.cross_entropy(logits, label)
        probs = logits.softmax(dim=1)
        onehot = torch.zeros_like(probs).scatter_(1, label.unsqueeze(1), 1.0)
        axes = (0, 2, 3, 4)
        overlap = (probs * onehot).sum(axes)
        total = probs.sum(axes) + onehot.sum(axes)
        dice = (2 * overlap + 1e-5) / (total + 1e-5)
        return ce + 1.0 - dice.mean()


def make_volumes(count, size, num_classes, generator):
    coarse = torch.randint(num_classes, (count, 1, 4, 4, 4), generator=generator)
    label = F.interpolate(coarse.float(), size=(size,) * 3, mode="nearest")
    volume = label / num_classes + 0.3 * torch.randn(label.shape, generator=generator)
    return volume, label.squeeze(1).long()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--sigma", type=float, default=1.5)
    parser.add_argument("--width", type=int, default=6)
    parser.add_argument("--num-classes", type=int, default=4)
    args = parser.parse_args()

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    amp = torch.autocast(device, torch.bfloat16, enabled=device == "cuda")

    volumes, labels = make_volumes(8, args.size, args.num_classes, torch.Generator().manual_seed(1))
    volumes, labels = volumes.to(device), labels.to(device)
    augment = ElasticDeformation(args.size, args.sigma).to(device)
    model = UNet3d(args.width, args.num_classes).to(device)
    if device == "cuda":
        model = model.to(memory_format=torch.channels_last_3d)
    criterion = DiceCrossEntropy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    for step in range(args.steps):
        start = step * args.batch_size % len(volumes)
        volume = volumes[start : start + args.batch_size]
        label = labels[start : start + args.batch_size]
        volume, label = augment(volume, label)
        with amp:
            logits = model(volume)
            loss = criterion(logits.float(), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.6f}")
        # step


if __name__ == "__main__":
    main()
