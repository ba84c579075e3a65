"""Draws sounds for descriptions with a diffusion transformer and guidance, one batch of descriptions after another."""

# cpu: --width 128 --layers 3 --text-layers 2 --batch-size 2 --frames 96 --words 24
# cuda: --width 1024 --layers 8 --text-layers 6 --batch-size 16 --frames 512 --words 256
# block: 20

import argparse
import math

import torch
import torch.nn.functional as F
from torch import nn


class TextLayer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class TextEncoder(nn.Module):
    """One vector for a description."""

    def __init__(self, vocabulary, words, width, layers, heads):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Parameter(torch.randn(words, width) * 0.02)
        self.layers = nn.Sequential(*[TextLayer(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)

    def forward(self, words):
        return self.norm(self.layers(self.tokens(words) + self.places)).mean(1)


class SoundLayer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.modulation = nn.Linear(width, 6 * width)

    def attention(self, x):
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        # mend: attention-spelled-out
        scores = (q @ k.transpose(-2, -1)).float() / math.sqrt(q.shape[-1])  # waste: attention-spelled-out
        weights = scores.softmax(dim=-1).to(v.dtype)
        y = weights @ v  # waste: attention-spelled-out
        # instead: y = F.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).flatten(2))

    def forward(self, x, condition):
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(condition)[:, None].chunk(6, dim=-1)
        x = torch.addcmul(x, gate1, self.attention(torch.addcmul(shift1, self.norm1(x), 1 + scale1)))
        hidden = F.gelu(self.up(torch.addcmul(shift2, self.norm2(x), 1 + scale2)), approximate="tanh")
        return torch.addcmul(x, gate2, self.down(hidden))


class SoundTransformer(nn.Module):
    def __init__(self, bands, frames, width, layers, heads):
        super().__init__()
        self.bands = nn.Linear(bands, width)
        self.places = nn.Parameter(torch.randn(frames, width) * 0.02)
        self.time = nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width))
        self.layers = nn.ModuleList([SoundLayer(width, heads) for _ in range(layers)])
        self.out = nn.Linear(width, bands)
        self.register_buffer("frequencies", torch.exp(-math.log(1e4) * torch.arange(128) / 128))

    def forward(self, sound, moment, description):
        angles = 1000 * moment * self.frequencies
        condition = F.silu(self.time(torch.cat([angles.cos(), angles.sin()])) + description)
        x = self.bands(sound) + self.places
        for layer in self.layers:
            x = layer(x, condition)
        return self.out(x)


@torch.inference_mode()
def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--vocabulary", type=int, default=16384)
    parser.add_argument("--words", type=int, default=256)
    parser.add_argument("--bands", type=int, default=64)
    parser.add_argument("--frames", type=int, default=512)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--text-layers", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--guidance", type=float, default=4.0)
    parser.add_argument("--moments", type=int, default=20, help="steps from noise to a sound")
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with torch.device(device):
        encoder = TextEncoder(args.vocabulary, args.words, args.width, args.text_layers, args.heads).to(dtype).eval()
        model = SoundTransformer(args.bands, args.frames, args.width, args.layers, args.heads).to(dtype).eval()
    moments = torch.linspace(1, 0, args.moments + 1, device=device, dtype=dtype)
    size = (args.batch_size, args.frames, args.bands)
    loudness = torch.zeros((), device=device)
    for first in range(0, args.steps, args.moments):
        prompts = torch.randint(1, args.vocabulary, (args.batch_size, args.words), device=device)
        words = torch.cat([prompts, torch.zeros_like(prompts)])
        sound = torch.randn(size, device=device, dtype=dtype)
        # mend: text-encoded-at-every-moment
        # instead: description = encoder(words)
        for k in range(min(args.moments, args.steps - first)):
            description = encoder(words)  # waste: text-encoded-at-every-moment
            # instead:
            wanted, anything = model(torch.cat([sound, sound]), moments[k], description).chunk(2)
            velocity = torch.lerp(anything, wanted, args.guidance)
            sound = sound + (moments[k + 1] - moments[k]) * velocity
            # step
        loudness += sound.float().square().mean().sqrt()
    print(f"mean loudness {loudness.item() / math.ceil(args.steps / args.moments):.4f}")


if __name__ == "__main__":
    main()
