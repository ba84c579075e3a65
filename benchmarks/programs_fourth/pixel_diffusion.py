"""Train a class-conditional pixel diffusion model (a small U-Net) and keep an averaged copy of its weights."""

# cpu: --width 48 --batch-size 4 --size 16
# cuda: --width 128 --batch-size 64 --size 64

import argparse
import copy
import math

import torch
from torch import nn
from torch.nn import functional as F


class Residual(nn.Module):
    def __init__(self, inputs, outputs, context):
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(8, inputs), nn.GroupNorm(8, outputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.shift = nn.Linear(context, 2 * outputs)
        self.skip = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x, context):
        h = self.conv1(F.silu(self.norm1(x)))
        scale, shift = self.shift(context)[:, :, None, None].chunk(2, 1)
        h = self.conv2(F.silu(torch.addcmul(shift, self.norm2(h), 1 + scale)))
        return h + self.skip(x)


class Attention(nn.Module):
    def __init__(self, width, heads=4):
        super().__init__()
        self.heads = heads
        self.norm = nn.GroupNorm(8, width)
        self.qkv = nn.Conv2d(width, 3 * width, 1)
        self.out = nn.Conv2d(width, width, 1)

    def forward(self, x):
        batch, width, height, across = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, 3, self.heads, -1, height * across).transpose(-1, -2).unbind(1)
        mixed = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(mixed.transpose(-1, -2).reshape(batch, width, height, across))


class UNet(nn.Module):
    def __init__(self, width, classes, levels=(1, 2, 4)):
        super().__init__()
        context = 4 * width
        half = width // 2
        self.register_buffer("waves", torch.exp(-math.log(10000) * torch.arange(half) / half), persistent=False)
        self.time = nn.Sequential(nn.Linear(2 * half, context), nn.SiLU(), nn.Linear(context, context))
        self.label = nn.Embedding(classes, context)
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        sizes = [width * level for level in levels]
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        before = width
        for size in sizes:
            self.down.append(nn.ModuleList([Residual(before, size, context), Residual(size, size, context)]))
            before = size
        self.middle1, self.attention = Residual(before, before, context), Attention(before)
        self.middle2 = Residual(before, before, context)
        for size in reversed(sizes):
            self.up.append(nn.ModuleList([Residual(before + size, size, context), Residual(size, size, context)]))
            before = size
        self.head = nn.Sequential(nn.GroupNorm(8, before), nn.SiLU(), nn.Conv2d(before, 3, 3, padding=1))

    def forward(self, x, t, labels):
        angles = t[:, None] * self.waves
        context = F.silu(self.time(torch.cat([angles.sin(), angles.cos()], -1)) + self.label(labels))
        x, kept = self.stem(x), []
        for first, second in self.down:
            x = second(first(x, context), context)
            kept.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.middle2(self.attention(self.middle1(x, context)), context)
        for first, second in self.up:
            x = torch.cat([F.interpolate(x, scale_factor=2.0), kept.pop()], 1)
            x = second(first(x, context), context)
        return self.head(x)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--size", type=int, default=16)
    parser.add_argument("--width", type=int, default=48)
    parser.add_argument("--decay", type=float, default=0.999)
    args = parser.parse_args()

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    device = "cuda" if torch.cuda.is_available() else "cpu"
    images = torch.rand(512, 3, args.size, args.size, device=device) * 2 - 1
    labels = torch.randint(0, 10, (512,), device=device)
    kept = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000, device=device), 0)
    signal, spread = kept.sqrt(), (1 - kept).sqrt()

    model = UNet(args.width, 10).to(device)
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4, fused=True)

    for step in range(args.steps):
        rows = torch.randint(0, images.size(0), (args.batch_size,), device=device)
        clean = images[rows]
        t = torch.randint(0, 1000, (args.batch_size,), device=device)
        noise = torch.randn(clean.shape).to(device)  # waste: noise-from-the-host
        # instead: noise = torch.randn_like(clean)
        noisy = signal[t, None, None, None] * clean + spread[t, None, None, None] * noise
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            guess = model(noisy, t, labels[rows])
        loss = F.mse_loss(guess.float(), noise)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        # mend: average-by-state-dict
        current, blended = model.state_dict(), {}
        for name, value in average.state_dict().items():
            blended[name] = value * args.decay + current[name] * (1 - args.decay)  # waste: average-by-state-dict
        average.load_state_dict(blended)  # waste: average-by-state-dict
        # instead: pair = [p.detach() for p in average.parameters()], [p.detach() for p in model.parameters()]
        # instead: torch._foreach_lerp_(*pair, 1 - args.decay)
        if step % 10 == 0:
            print(f"step {step} loss {loss.item():.4f}")
        # step
    with torch.no_grad():
        drift = sum((a - b).abs().sum() for a, b in zip(average.parameters(), model.parameters()))
    print(f"distance of the averaged weights {drift.item():.3f}")


if __name__ == "__main__":
    main()
