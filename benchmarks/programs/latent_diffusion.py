"""Trains a diffusion transformer on latents, with an optimizer of its own."""

# cpu: --width 192 --layers 3 --batch-size 4 --side 16
# cuda: --width 768 --layers 12 --batch-size 32 --side 32

import argparse
import copy
import math

import torch
import torch.nn.functional as F
from torch import nn


class AdamW(torch.optim.Optimizer):
    """AdamW as in the paper."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    state["m"] = torch.zeros_like(p)
                    state["v"] = torch.zeros_like(p)
                state["step"] += 1
                m, v = state["m"], state["v"]
                p.mul_(1 - group["lr"] * group["weight_decay"])  # waste: adamw-by-hand
                m.mul_(beta1).add_(p.grad, alpha=1 - beta1)  # waste: adamw-by-hand
                v.mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)  # waste: adamw-by-hand
                m_hat = m / (1 - beta1 ** state["step"])  # waste: adamw-by-hand
                v_hat = v / (1 - beta2 ** state["step"])  # waste: adamw-by-hand
                p.sub_(group["lr"] * m_hat / (v_hat.sqrt() + group["eps"]))  # waste: adamw-by-hand


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class DiffusionTransformer(nn.Module):
    def __init__(self, channels, side, width, layers, heads):
        super().__init__()
        self.patch = nn.Linear(4 * channels, width)
        self.place = nn.Parameter(torch.randn((side // 2) ** 2, width) * 0.02)
        self.time = nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.out = nn.Linear(width, 4 * channels)

    def forward(self, latents, times):
        frequencies = torch.exp(-math.log(1e4) * torch.arange(128, device=latents.device) / 128)
        angles = times[:, None] * frequencies
        moment = self.time(torch.cat([angles.cos(), angles.sin()], dim=1).to(latents.dtype))
        patches = F.pixel_unshuffle(latents, 2).flatten(2).transpose(1, 2)
        x = self.patch(patches) + self.place + moment[:, None]
        for block in self.blocks:
            x = block(x)
        side = latents.shape[-1] // 2
        return F.pixel_shuffle(self.out(x).transpose(1, 2).unflatten(2, (side, side)), 2)


@torch.no_grad()
def update_average(average, model, decay):
    """Moves the averaged weights, with which pictures are drawn, toward those of the model."""
    # mend: average-one-by-one
    for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
        slow.mul_(decay).add_(fast, alpha=1 - decay)  # waste: average-one-by-one
    # instead: torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 1 - decay)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--channels", type=int, default=4)
    parser.add_argument("--side", type=int, default=32)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--decay", type=float, default=0.999)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = DiffusionTransformer(args.channels, args.side, args.width, args.layers, args.heads).to(device, dtype)
    # mend: adamw-by-hand
    optimizer = AdamW(model.parameters(), lr=args.lr)
    # instead: optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    average = copy.deepcopy(model)
    signal = torch.cos(torch.linspace(0, math.pi / 2, 1000, device=device)).to(dtype)
    for step in range(args.steps):
        latents = torch.randn(args.batch_size, args.channels, args.side, args.side, device=device, dtype=dtype)
        noise = torch.randn_like(latents)
        times = torch.randint(1000, (args.batch_size,), device=device)
        level = signal[times].view(-1, 1, 1, 1)
        noisy = level * latents + (1 - level**2).sqrt() * noise
        loss = F.mse_loss(model(noisy, times), noise)
        loss.backward()
        optimizer.step()  # waste: adamw-by-hand
        optimizer.zero_grad()
        update_average(average, model, args.decay)
        if step % 20 == 0:
            print(f"step {step}: loss {loss.item():.4f}")
        # step


if __name__ == "__main__":
    main()
