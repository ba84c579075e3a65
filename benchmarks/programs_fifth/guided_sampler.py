"""Sample images from a text-conditioned diffusion transformer, guided without a classifier in the middle of the way."""

# cpu: --width 128 --layers 3 --batch-size 4 --side 8 --text-tokens 192 --text-width 256
# cuda: --width 1024 --layers 8 --batch-size 24 --side 16 --text-tokens 512 --text-width 2048
# block: 20

import argparse
import math

import torch
import torch.nn.functional as F
from torch import nn

SAMPLING_STEPS = 20


class CrossAttention(nn.Module):
    def __init__(self, width, text_width, heads):
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(text_width, 2 * width)
        self.out = nn.Linear(width, width)

    def project(self, text):
        pairs = self.key_value(text)  # waste: text-keys-of-every-step
        # instead: pairs = self.key_value(text)
        return pairs.unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)

    def forward(self, x, text):
        b, n, d = x.shape
        keys, values = self.project(text)  # waste: text-keys-of-every-step
        # instead: keys, values = text
        q = self.query(x).view(b, n, self.heads, -1).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q, keys, values)
        return self.out(mixed.transpose(1, 2).reshape(b, n, d))


class Block(nn.Module):
    def __init__(self, width, text_width, heads):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.cross = CrossAttention(width, text_width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.norm3 = nn.LayerNorm(width, elementwise_affine=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))
        self.modulation = nn.Linear(width, 4 * width)

    def forward(self, x, condition, text):
        b, n, d = x.shape
        scale1, shift1, scale2, shift2 = self.modulation(condition)[:, None].chunk(4, dim=-1)
        h = torch.addcmul(shift1, self.norm1(x), 1 + scale1)
        q, k, v = self.qkv(h).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, d))
        x = x + self.cross(self.norm2(x), text)
        return x + self.mlp(torch.addcmul(shift2, self.norm3(x), 1 + scale2))


class TextToImage(nn.Module):
    def __init__(self, channels, side, width, layers, text_width, heads=8):
        super().__init__()
        self.patch = nn.Linear(channels, width)
        self.position = nn.Parameter(0.02 * torch.randn(side * side, width))
        self.blocks = nn.ModuleList(Block(width, text_width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.noise = nn.Linear(width, channels)
        self.register_buffer("frequencies", torch.exp(-math.log(1e4) * torch.linspace(0, 1, width // 2)))

    def forward(self, latents, level, text):
        phase = level * self.frequencies
        condition = torch.cat([phase.sin(), phase.cos()]).expand(latents.size(0), -1)
        x = self.patch(latents) + self.position
        # mend: text-keys-of-every-step
        for block in self.blocks:
            x = block(x, condition, text)
        # instead: for block, projected in zip(self.blocks, text): x = block(x, condition, projected)
        return self.noise(self.norm(x))


class Guidance:
    """Guides between two noise levels only; outside of them the weight is one."""

    def __init__(self, weight=5.0, first=5, last=13):
        self.weight, self.first, self.last = weight, first, last

    def __call__(self, i):
        return self.weight if self.first <= i < self.last else 1.0


@torch.inference_mode()
def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--side", type=int, default=8)
    parser.add_argument("--channels", type=int, default=16)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--text-tokens", type=int, default=192)
    parser.add_argument("--text-width", type=int, default=256)
    args = parser.parse_args()

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with torch.device(device):
        model = TextToImage(args.channels, args.side, args.width, args.layers, args.text_width).eval().to(dtype)
    guidance = Guidance()
    signal = torch.cos(torch.linspace(0.5 * math.pi * 0.98, 0, SAMPLING_STEPS + 1)).square().tolist()
    shape = (args.batch_size, args.text_tokens, args.text_width)

    for step in range(args.steps):
        i = step % SAMPLING_STEPS
        if i == 0:
            latents = torch.randn(args.batch_size, args.side**2, args.channels, device=device)
            # mend: text-keys-of-every-step
            text, empty = torch.randn(2, *shape, device=device, dtype=dtype)
            # instead: words = torch.randn(2, *shape, device=device, dtype=dtype)
            # instead: text, empty = ([block.cross.project(w) for block in model.blocks] for w in words)
        level = torch.full((), float(SAMPLING_STEPS - i), device=device, dtype=dtype)
        x = latents.to(dtype)
        weight = guidance(i)
        noise = model(x, level, text)
        # mend: guidance-of-weight-one
        unguided = model(x, level, empty)  # waste: guidance-of-weight-one
        noise = unguided + weight * (noise - unguided)
        # instead: unguided = model(x, level, empty) if weight != 1.0 else noise
        # instead: noise = unguided + weight * (noise - unguided) if weight != 1.0 else noise
        now, after = signal[i], signal[i + 1]
        clean = (latents - (1 - now) ** 0.5 * noise.float()) / now**0.5
        latents = after**0.5 * clean.clamp(-3, 3) + (1 - after) ** 0.5 * noise.float()
        if i == SAMPLING_STEPS - 1:
            mean, deviation = latents.mean().item(), latents.std().item()
            print(f"sample {step // SAMPLING_STEPS}: mean {mean:.4f} deviation {deviation:.4f}")
        # step


if __name__ == "__main__":
    main()
