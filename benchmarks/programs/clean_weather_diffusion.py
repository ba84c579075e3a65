"""Trains a diffusion transformer that draws the weather of the next day, given that of today."""

# cpu: --width 128 --layers 3 --batch-size 4 --side 32
# cuda: --width 1024 --layers 8 --batch-size 128 --side 64 --compile
# block: 10

import argparse
import copy
import math

import torch
import torch.nn.functional as F
from torch import nn

PATCH = 4


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.modulation = nn.Parameter(torch.randn(6, width) * 0.02)

    def forward(self, x, condition):
        shift1, scale1, gate1, shift2, scale2, gate2 = (condition + self.modulation)[:, None].unbind(2)
        y = self.norm1(x) * (1 + scale1) + shift1
        q, k, v = self.qkv(y).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + gate1 * self.out(y)
        y = self.norm2(x) * (1 + scale2) + shift2
        return x + gate2 * self.down(F.gelu(self.up(y), approximate="tanh"))


class WeatherTransformer(nn.Module):
    def __init__(self, channels, side, width, layers, heads):
        super().__init__()
        self.width = width
        self.patches = nn.Linear(2 * channels * PATCH**2, width)
        self.places = nn.Parameter(torch.randn((side // PATCH) ** 2, width) * 0.02)
        self.time = nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, 6 * width))
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, channels * PATCH**2)
        self.register_buffer("frequencies", torch.exp(-math.log(1e4) * torch.arange(128) / 128))

    def forward(self, noisy, today, times):
        """Fields are (batch, patches, values); times are between 0 and 1."""
        angles = 1000 * times[:, None] * self.frequencies
        condition = self.time(torch.cat([angles.cos(), angles.sin()], dim=1).to(noisy.dtype))
        condition = condition.unflatten(1, (6, self.width))
        x = self.patches(torch.cat([noisy, today], dim=2)) + self.places
        for block in self.blocks:
            x = block(x, condition)
        return self.out(self.norm(x))


def made_up_weather(days, channels, side, device):
    """Smooth fields that drift from day to day, cut into patches."""
    coarse = torch.randn(days, channels, side // 8, side // 8, device=device)
    fields = F.interpolate(coarse, size=(side, side), mode="bicubic").cumsum(0)
    fields = (fields - fields.mean((0, 2, 3), keepdim=True)) / fields.std((0, 2, 3), keepdim=True)
    return F.pixel_unshuffle(fields, PATCH).flatten(2).transpose(1, 2).contiguous()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--channels", type=int, default=8)
    parser.add_argument("--side", type=int, default=64)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--days", type=int, default=1000)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--decay", type=float, default=0.99, help="of the averaged weights, every ten steps")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with torch.device(device):
        model = WeatherTransformer(args.channels, args.side, args.width, args.layers, args.heads).to(dtype)
    average = copy.deepcopy(model).requires_grad_(False)
    weights, average_weights = list(model.parameters()), list(average.parameters())
    if args.compile:
        for block in model.blocks:
            block.compile()
    optimizer = torch.optim.AdamW(weights, lr=args.lr, fused=True)
    weather = made_up_weather(args.days, args.channels, args.side, device).to(dtype)
    for step in range(args.steps):
        days = torch.randint(args.days - 1, (args.batch_size,), device=device)
        today, tomorrow = weather[days], weather[days + 1]
        noise = torch.randn_like(tomorrow)
        times = torch.rand(args.batch_size, device=device)
        noisy = torch.lerp(tomorrow, noise, times.to(dtype)[:, None, None])
        loss = F.mse_loss(model(noisy, today, times), noise - tomorrow)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 9:
            with torch.no_grad():
                torch._foreach_lerp_(average_weights, weights, 1 - args.decay)
        if step % 200 == 0:
            print(f"step {step}: loss {loss.item():.4f}")
        # step


if __name__ == "__main__":
    main()
