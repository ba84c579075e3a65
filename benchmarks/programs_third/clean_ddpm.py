"""Trains a small diffusion U-Net to predict noise on synthetic 32x32 images, with an averaged copy."""

# cpu: --width 16 --batch-size 8
# cuda: --width 128 --batch-size 256

import argparse
import copy
import math

import torch
import torch.nn.functional as F
from torch import nn


class TimeEmbedding(nn.Module):
    def __init__(self, dim, out_dim):
        super().__init__()
        freqs = torch.exp(-math.log(10000.0) * torch.arange(dim // 2) / (dim // 2))
        self.register_buffer("freqs", freqs)
        self.mlp = nn.Sequential(nn.Linear(dim, out_dim), nn.SiLU(), nn.Linear(out_dim, out_dim))

    def forward(self, t):
        angle = t.unsqueeze(1) * self.freqs
        return self.mlp(torch.cat([angle.cos(), angle.sin()], dim=1))


class ResBlock(nn.Module):
    def __init__(self, in_channels, out_channels, time_dim):
        super().__init__()
        self.norm1 = nn.GroupNorm(8, in_channels)
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, padding=1)
        self.shift = nn.Linear(time_dim, out_channels)
        self.norm2 = nn.GroupNorm(8, out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1)
        self.short = nn.Conv2d(in_channels, out_channels, 1) if in_channels != out_channels else nn.Identity()

    def forward(self, x, emb):
        h = self.conv1(F.silu(self.norm1(x)))
        h = h + self.shift(emb)[:, :, None, None]
        return self.conv2(F.silu(self.norm2(h))) + self.short(x)


class AttentionBlock(nn.Module):
    def __init__(self, channels, heads=4):
        super().__init__()
        self.heads = heads
        self.norm = nn.GroupNorm(8, channels)
        self.qkv = nn.Linear(channels, 3 * channels)
        self.out = nn.Linear(channels, channels)

    def forward(self, x):
        b, c, height, width = x.shape
        h = self.norm(x).flatten(2).transpose(1, 2)
        q, k, v = self.qkv(h).view(b, height * width, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        h = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, height * width, c)
        return x + self.out(h).transpose(1, 2).view(b, c, height, width)


class UNet(nn.Module):
    def __init__(self, width):
        super().__init__()
        time_dim = 4 * width
        self.time = TimeEmbedding(width, time_dim)
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.down1 = ResBlock(width, width, time_dim)
        self.pool1 = nn.Conv2d(width, width, 3, stride=2, padding=1)
        self.down2 = ResBlock(width, 2 * width, time_dim)
        self.pool2 = nn.Conv2d(2 * width, 2 * width, 3, stride=2, padding=1)
        self.middle1 = ResBlock(2 * width, 2 * width, time_dim)
        self.attention = AttentionBlock(2 * width)
        self.middle2 = ResBlock(2 * width, 2 * width, time_dim)
        self.grow2 = nn.ConvTranspose2d(2 * width, 2 * width, 4, stride=2, padding=1)
        self.up2 = ResBlock(4 * width, 2 * width, time_dim)
        self.grow1 = nn.ConvTranspose2d(2 * width, width, 4, stride=2, padding=1)
        self.up1 = ResBlock(2 * width, width, time_dim)
        self.norm = nn.GroupNorm(8, width)
        self.head = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, x, t):
        emb = F.silu(self.time(t))
        a = self.down1(self.stem(x), emb)
        b = self.down2(self.pool1(a), emb)
        c = self.middle2(self.attention(self.middle1(self.pool2(b), emb)), emb)
        b = self.up2(torch.cat([self.grow2(c), b], dim=1), emb)
        a = self.up1(torch.cat([self.grow1(b), a], dim=1), emb)
        return self.head(F.silu(self.norm(a)))


class Diffusion(nn.Module):
    """Cosine schedule; the loss is the error of the predicted noise."""

    def __init__(self, timesteps):
        super().__init__()
        self.timesteps = timesteps
        t = torch.linspace(0, 1, timesteps + 1)
        alpha_bar = torch.cos((t + 0.008) / 1.008 * math.pi / 2).square()
        alpha_bar = (alpha_bar / alpha_bar[0])[1:].clamp(min=1e-5)
        self.register_buffer("signal", alpha_bar.sqrt())
        self.register_buffer("noise", (1 - alpha_bar).sqrt())

    def forward(self, model, x):
        t = torch.randint(self.timesteps, (len(x),), device=x.device)
        eps = torch.randn_like(x)
        noisy = self.signal[t].view(-1, 1, 1, 1) * x + self.noise[t].view(-1, 1, 1, 1) * eps
        return F.mse_loss(model(noisy, t), eps)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--timesteps", type=int, default=1000)
    parser.add_argument("--ema", type=float, default=0.999)
    args = parser.parse_args()

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    device = "cuda" if torch.cuda.is_available() else "cpu"
    amp = torch.autocast(device, torch.bfloat16, enabled=device == "cuda")

    coarse = torch.randn(1024, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    images = F.interpolate(coarse, size=(32, 32), mode="bilinear", align_corners=False).tanh().to(device)
    model = UNet(args.width).to(device)
    if device == "cuda":
        images = images.to(memory_format=torch.channels_last)
        model = model.to(memory_format=torch.channels_last)
    average = copy.deepcopy(model).requires_grad_(False)
    diffusion = Diffusion(args.timesteps).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4, fused=True)
    params, averaged = list(model.parameters()), list(average.parameters())

    for step in range(args.steps):
        x = images[torch.randint(len(images), (args.batch_size,), device=device)]
        with amp:
            loss = diffusion(model, x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(averaged, params, 1 - args.ema)

        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.6f}")
        # step


if __name__ == "__main__":
    main()
