"""Pretrains an image encoder with the SimCLR contrastive objective on synthetic 32x32 images."""

# cpu: --width 8 --batch-size 128
# cuda: --width 64 --batch-size 1024

import argparse

import torch
import torch.nn.functional as F
from torch import nn


class Bottleneck(nn.Module):
    def __init__(self, channels, stride, out_channels):
        super().__init__()
        mid = out_channels // 2
        self.reduce = nn.Conv2d(channels, mid, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(mid)
        self.spatial = nn.Conv2d(mid, mid, 3, stride=stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(mid)
        self.expand = nn.Conv2d(mid, out_channels, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(out_channels)
        self.short = nn.Identity()
        if stride != 1 or channels != out_channels:
            self.short = nn.Conv2d(channels, out_channels, 1, stride=stride, bias=False)

    def forward(self, x):
        h = F.relu(self.norm1(self.reduce(x)))
        h = F.relu(self.norm2(self.spatial(h)))
        return F.relu(self.norm3(self.expand(h)) + self.short(x))


class Encoder(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, stride=2, padding=1)
        self.blocks = nn.Sequential(
            Bottleneck(width, 1, 2 * width),
            Bottleneck(2 * width, 2, 4 * width),
            Bottleneck(4 * width, 1, 4 * width),
            Bottleneck(4 * width, 2, 8 * width),
        )
        self.out_dim = 8 * width

    def forward(self, x):
        return self.blocks(F.relu(self.stem(x))).mean(dim=(2, 3))


class SimCLR(nn.Module):
    def __init__(self, width, projection):
        super().__init__()
        self.encoder = Encoder(width)
        dim = self.encoder.out_dim
        self.projector = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, projection))

    def forward(self, x):
        return self.projector(self.encoder(x))


class NTXentLoss(nn.Module):
    def __init__(self, batch_size, temperature):
        super().__init__()
        self.temperature = temperature
        count = 2 * batch_size
        self.register_buffer("self_mask", torch.eye(count, dtype=torch.bool))
        self.register_buffer("positives", (torch.arange(count) + batch_size) % count)

    def forward(self, z):
        # mend: similarity-by-broadcast
        similarity = F.cosine_similarity(z.unsqueeze(1), z.unsqueeze(0), dim=2)  # waste: similarity-by-broadcast
        # instead: z = F.normalize(z, dim=1)
        # instead: similarity = z @ z.T
        similarity = (similarity / self.temperature).masked_fill(self.self_mask, float("-inf"))
        return F.cross_entropy(similarity, self.positives)


class Augment(nn.Module):
    """Flip, brightness, contrast and a cut-out square, drawn for every image."""

    def __init__(self, size, hole=8):
        super().__init__()
        self.size = size
        self.hole = hole
        self.register_buffer("axis", torch.arange(size))

    @torch.no_grad()
    def forward(self, x):
        n, device = len(x), x.device
        flip = torch.rand(n, 1, 1, 1, device=device) < 0.5
        x = torch.where(flip, x.flip(3), x)
        contrast = 0.6 + 0.8 * torch.rand(n, 1, 1, 1, device=device)
        brightness = 0.4 * torch.rand(n, 1, 1, 1, device=device) - 0.2
        x = x * contrast + brightness
        corner = torch.randint(self.size - self.hole, (2, n, 1), device=device)
        inside = (self.axis >= corner) & (self.axis < corner + self.hole)
        square = inside[0].unsqueeze(2) & inside[1].unsqueeze(1)
        return x.masked_fill(square.unsqueeze(1), 0.0)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--projection", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.2)
    args = parser.parse_args()

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    amp = torch.autocast(device, torch.bfloat16, enabled=device == "cuda")

    generator = torch.Generator().manual_seed(1)
    coarse = torch.randn(4 * args.batch_size, 3, 8, 8, generator=generator)
    images = F.interpolate(coarse, size=(32, 32), mode="bilinear", align_corners=False).to(device)

    model = SimCLR(args.width, args.projection).to(device)
    if device == "cuda":
        images = images.to(memory_format=torch.channels_last)
        model = model.to(memory_format=torch.channels_last)
    augment = Augment(32).to(device)
    criterion = NTXentLoss(args.batch_size, args.temperature).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4, fused=True)

    for step in range(args.steps):
        pick = torch.randint(len(images), (args.batch_size,), device=device)
        views = augment(images[pick].repeat(2, 1, 1, 1))
        with amp:
            z = model(views)
        loss = criterion(z.float())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.6f}")
        # step


if __name__ == "__main__":
    main()
