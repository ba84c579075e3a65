"""Draws map tiles from captions: a diffusion transformer that is guided, and noise is added in every step."""

# cpu: --width 192 --heads 3 --layers 3 --text-layers 3 --batch-size 2 --side 64 --words 32 --moments 5
# cuda: --width 1024 --heads 16 --layers 8 --text-layers 12 --batch-size 32 --side 128 --words 128 --moments 20
# block: 20

import argparse
import math

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY = 8192
PATCH = 8


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class CaptionEncoder(nn.Module):
    def __init__(self, width, heads, layers, words):
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, width)
        self.place = nn.Parameter(torch.randn(words, width) * 0.02)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)

    def forward(self, words):
        x = self.words(words) + self.place
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class Denoiser(nn.Module):
    """A transformer over the words of the caption and the patches of the picture."""

    def __init__(self, width, heads, layers, side):
        super().__init__()
        self.patch = nn.Linear(3 * PATCH**2, width)
        self.place = nn.Parameter(torch.randn((side // PATCH) ** 2, width) * 0.02)
        self.time = nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.out = nn.Linear(width, 3 * PATCH**2)
        frequencies = torch.exp(-math.log(1e4) * torch.arange(128) / 128)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, pictures, moment, context):
        angles = moment * self.frequencies
        time = self.time(torch.cat([angles.cos(), angles.sin()]))
        x = F.pixel_unshuffle(pictures, PATCH).flatten(2).transpose(1, 2)
        x = torch.cat([context, self.patch(x) + self.place + time], dim=1)
        for block in self.blocks:
            x = block(x)
        side = pictures.shape[-1] // PATCH
        return F.pixel_shuffle(self.out(x[:, context.shape[1] :]).transpose(1, 2).unflatten(2, (side, side)), PATCH)


class Sampler:
    def __init__(self, args, device):
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.encoder = CaptionEncoder(args.width, args.heads, args.text_layers, args.words).to(device, dtype).eval()
        self.model = Denoiser(args.width, args.heads, args.layers, args.side).to(device, dtype).eval()
        self.scale, self.device, self.dtype = args.scale, device, dtype
        betas = torch.linspace(1e-4, 0.2, args.moments, dtype=torch.float64)
        self.alphas = (1 - betas).tolist()
        self.signals = (1 - betas).cumprod(0).tolist()
        self.generator = torch.Generator(device).manual_seed(args.seed)

    def noise(self, shape):
        """Noise that a seed repeats."""
        return torch.randn(shape, generator=self.generator, device=self.device, dtype=self.dtype)

    def encode(self, captions):
        """The captions' contexts, and as many of the empty caption."""
        context = self.encoder(F.pad(captions, (0, 0, 0, 1)))
        return torch.cat([context[:-1], context[-1:].expand(len(captions), -1, -1)])

    def guided(self, pictures, moment, captions):
        """The noise in pictures, toward the captions and away from the empty one."""
        context = self.encode(captions)  # waste: captions-encoded-again
        # instead: context = captions
        both = self.model(torch.cat([pictures, pictures]), moment, context)
        toward, plain = both.chunk(2)
        return torch.lerp(plain, toward, self.scale)

    def back(self, pictures, moment, captions):
        """Pictures with less noise: one step of the chain."""
        alpha, signal = self.alphas[moment], self.signals[moment]
        noise = self.guided(pictures, moment, captions)
        mean = (pictures - (1 - alpha) / math.sqrt(1 - signal) * noise) / math.sqrt(alpha)
        return mean.add_(self.noise(mean.shape), alpha=math.sqrt(1 - alpha)) if moment else mean


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser()
    for name, default in dict(width=1024, heads=16, layers=8, text_layers=12, batch_size=32, side=128).items():
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=default)
    for name, default in dict(words=128, moments=20, seed=0, steps=40).items():
        parser.add_argument("--" + name, type=int, default=default)
    parser.add_argument("--scale", type=float, default=4.0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sampler = Sampler(args, device)
    for step in range(args.steps):
        moment = args.moments - 1 - step % args.moments
        if moment == args.moments - 1:
            captions = torch.randint(1, VOCABULARY, (args.batch_size, args.words), device=device)
            # mend: captions-encoded-again
            # instead: captions = sampler.encode(captions)
            trace = []
            pictures = sampler.noise((args.batch_size, 3, args.side, args.side))
        pictures = sampler.back(pictures, moment, captions)
        trace.append(pictures.float().cpu())  # waste: trace-on-the-host
        # instead: trace.append(pictures.float())
        if moment == 0:
            moved = torch.stack(trace).diff(dim=0).abs().mean((1, 2, 3, 4)).tolist()
            print(f"step {step}: {args.batch_size} tiles, moved by", ", ".join(f"{far:.3f}" for far in moved))
        # step


if __name__ == "__main__":
    main()
