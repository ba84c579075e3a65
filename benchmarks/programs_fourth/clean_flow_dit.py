"""Train a diffusion transformer by flow matching on latents and keep an averaged copy of its weights."""

# cpu: --width 128 --depth 3 --batch-size 8 --size 16
# cuda: --width 768 --depth 8 --batch-size 64 --size 32

import argparse
import copy
import math

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))
        self.modulation = nn.Linear(width, 6 * width)
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)

    def forward(self, x, context):
        batch, length, width = x.shape
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(context)[:, None].chunk(6, -1)
        h = torch.addcmul(shift1, self.norm1(x), 1 + scale1)
        q, k, v = self.qkv(h).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, width)
        x = torch.addcmul(x, gate1, self.out(mixed))
        return torch.addcmul(x, gate2, self.mlp(torch.addcmul(shift2, self.norm2(x), 1 + scale2)))


class DiT(nn.Module):
    def __init__(self, width, depth, size, classes, channels=4, patch=2):
        super().__init__()
        self.embed = nn.Conv2d(channels, width, patch, stride=patch)
        self.position = nn.Parameter(torch.randn(1, (size // patch) ** 2, width) * 0.02)
        half = width // 2
        waves = 1000 * torch.exp(-math.log(10000) * torch.arange(half) / half)
        self.register_buffer("waves", waves, persistent=False)
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.label = nn.Embedding(classes + 1, width)
        self.blocks = nn.ModuleList(Block(width, max(4, width // 64)) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, channels * patch * patch)
        self.patch = patch

    def forward(self, x, t, labels):
        batch, channels, height, across = x.shape
        tokens = self.embed(x).flatten(2).transpose(1, 2) + self.position
        angles = t[:, None] * self.waves
        context = F.silu(self.time(torch.cat([angles.sin(), angles.cos()], -1)) + self.label(labels))
        for block in self.blocks:
            tokens = block(tokens, context)
        patches = self.head(self.norm(tokens)).transpose(1, 2)
        return F.fold(patches, (height, across), self.patch, stride=self.patch)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--size", type=int, default=16)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--depth", type=int, default=3)
    args = parser.parse_args()

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    classes = 10
    latents = torch.randn(1024, 4, args.size, args.size, device=device)
    labels = torch.randint(0, classes, (1024,), device=device)

    model = DiT(args.width, args.depth, args.size, classes).to(device)
    average = copy.deepcopy(model).requires_grad_(False)
    slow, fast = list(average.parameters()), list(model.parameters())
    optimizer = torch.optim.AdamW(fast, lr=1e-4, weight_decay=0.0, fused=True)
    running = torch.zeros((), device=device)

    for step in range(args.steps):
        rows = torch.randint(0, latents.size(0), (args.batch_size,), device=device)
        data = latents[rows]
        noise = torch.randn_like(data)
        t = torch.sigmoid(torch.randn(args.batch_size, device=device))
        mixed = torch.lerp(data, noise, t[:, None, None, None])
        dropped = torch.rand(args.batch_size, device=device) < 0.1
        label = labels[rows].masked_fill(dropped, classes)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            velocity = model(mixed, t, label)
        loss = F.mse_loss(velocity.float(), noise - data)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(fast, 1.0)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(slow, fast, 0.001)
            running.lerp_(loss.detach(), 0.1)
        if step % 10 == 0:
            print(f"step {step} running loss {running.item():.4f}")
        # step


if __name__ == "__main__":
    main()
