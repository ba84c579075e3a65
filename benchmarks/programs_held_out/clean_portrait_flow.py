"""Draws portraits of given kinds by a flow from noise to pictures, with guidance, as it should be done."""

# cpu: --width 256 --heads 4 --layers 3 --batch-size 2 --side 24 --moments 5
# cuda: --width 1024 --heads 16 --layers 12 --batch-size 64 --side 32 --moments 20 --compile
# block: 20

import argparse
import math

import torch
import torch.nn.functional as F
from torch import nn

KINDS = 100
CHANNELS = 16
"""Channels of a latent picture, of which four places make a token."""


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False)
        self.modulate = nn.Linear(width, 6 * width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x, condition):
        batch, length, width = x.shape
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulate(condition)[:, None].chunk(6, dim=2)
        y = torch.addcmul(shift1, self.norm1(x), scale1)
        q, k, v = self.qkv(y).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v)
        x = torch.addcmul(x, self.out(y.transpose(1, 2).reshape(batch, length, width)), gate1)
        y = torch.addcmul(shift2, self.norm2(x), scale2)
        return torch.addcmul(x, self.down(F.gelu(self.up(y), approximate="tanh")), gate2)


class Velocity(nn.Module):
    """Where pictures move: a transformer over patches, which kind and time modulate."""

    def __init__(self, width, heads, layers, side):
        super().__init__()
        self.patch = nn.Linear(4 * CHANNELS, width)
        self.place = nn.Parameter(torch.randn((side // 2) ** 2, width) * 0.02)
        self.kind = nn.Embedding(KINDS + 1, width)
        self.time = nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.out = nn.Linear(width, 4 * CHANNELS)

    def embed_times(self, times):
        frequencies = torch.exp(-math.log(1e4) * torch.arange(128, device=times.device) / 128)
        angles = 1000 * times[:, None] * frequencies
        return self.time(torch.cat([angles.cos(), angles.sin()], dim=1).to(self.place.dtype))

    def forward(self, patches, condition):
        x = self.patch(patches) + self.place
        for block in self.blocks:
            x = block(x, condition)
        return self.out(x)


class Euler(nn.Module):
    """A step along the velocity, toward a kind and away from no kind: both in one pass of the network."""

    def __init__(self, model, scale, length):
        super().__init__()
        self.model, self.scale, self.length = model, scale, length

    def forward(self, patches, kinds, time):
        condition = F.silu(kinds + time)
        toward, plain = self.model(patches.repeat(2, 1, 1), condition).chunk(2)
        return patches + self.length * torch.lerp(plain, toward, self.scale)


def to_picture(patches):
    side = math.isqrt(patches.shape[1])
    return F.pixel_shuffle(patches.transpose(1, 2).unflatten(2, (side, side)), 2)


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--side", type=int, default=32)
    parser.add_argument("--moments", type=int, default=20)
    parser.add_argument("--scale", type=float, default=3.0)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = Velocity(args.width, args.heads, args.layers, args.side).to(device, dtype).eval()
    move = Euler(model, args.scale, 1 / args.moments)
    if args.compile:
        move.compile()
    times = model.embed_times(torch.arange(args.moments, device=device) / args.moments)
    shape = (args.batch_size, (args.side // 2) ** 2, 4 * CHANNELS)
    none = torch.full((args.batch_size,), KINDS, device=device)
    for step in range(args.steps):
        moment = step % args.moments
        if moment == 0:
            patches = torch.randn(shape, device=device, dtype=dtype)
            kinds = model.kind(torch.cat([torch.randint(KINDS, (args.batch_size,), device=device), none]))
        patches = move(patches, kinds, times[moment])
        if (step + 1) % (5 * args.moments) == 0:
            picture = to_picture(patches)
            print(f"step {step + 1}: pictures {tuple(picture.shape)}, mean {picture.float().mean().item():.3f}")
        # step


if __name__ == "__main__":
    main()
