"""Trains a classifier of leaves with soft mixtures of experts: each slot of an expert sees a mean of all patches."""

# cpu: --width 256 --heads 4 --layers 2 --experts 4 --slots 8 --patches 32 --batch-size 16
# cuda: --width 1024 --heads 8 --layers 3 --experts 16 --slots 16 --patches 256 --batch-size 96 --compile

import argparse

import torch
import torch.nn.functional as F
from torch import nn


class SoftExperts(nn.Module):
    """Experts of two layers; every slot gets a weighted mean of the patches, every patch one of the slots' results."""

    def __init__(self, width, hidden, experts, slots):
        super().__init__()
        self.experts, self.slots = experts, slots
        self.keys = nn.Linear(width, experts * slots, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, hidden) * width**-0.5)
        self.up_bias = nn.Parameter(torch.zeros(experts, 1, hidden))
        self.down = nn.Parameter(torch.randn(experts, hidden, width) * hidden**-0.5)
        self.down_bias = nn.Parameter(torch.zeros(experts, 1, width))

    def forward(self, x):
        batch, _, width = x.shape
        scores = self.keys(x)
        given, taken = scores.softmax(dim=1), scores.softmax(dim=2)
        seen = (given.transpose(1, 2) @ x).view(batch, self.experts, self.slots, width)
        seen = seen.transpose(0, 1).reshape(self.experts, batch * self.slots, width)
        hidden = F.relu(torch.baddbmm(self.up_bias, seen, self.up))
        said = torch.baddbmm(self.down_bias, hidden, self.down)
        said = said.view(self.experts, batch, self.slots, width).transpose(0, 1)
        return taken @ said.reshape(batch, self.experts * self.slots, width)


class Layer(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.heads = args.heads
        self.norm1, self.norm2 = nn.LayerNorm(args.width), nn.LayerNorm(args.width)
        self.qkv, self.out = nn.Linear(args.width, 3 * args.width), nn.Linear(args.width, args.width)
        self.mixture = SoftExperts(args.width, 2 * args.width, args.experts, args.slots)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, width)
        x = x + self.out(y)
        return x + self.mixture(self.norm2(x))


class LeafModel(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.start = nn.Linear(args.pixels, args.width)
        self.positions = nn.Parameter(0.02 * torch.randn(args.patches, args.width))
        self.layers = nn.ModuleList([Layer(args) for _ in range(args.layers)])
        self.norm = nn.LayerNorm(args.width)
        self.out = nn.Linear(args.width, args.kinds)

    def forward(self, patches, kinds):
        """The loss of a batch."""
        x = self.start(patches) + self.positions
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.out(self.norm(x.mean(1))), kinds)


class Leaves:
    """Made-up leaves as patches, on the device: the kind shows in the first pixels."""

    def __init__(self, args, device, dtype, count=1000):
        self.patches = torch.randn(count, args.patches, args.pixels, device=device, dtype=dtype)
        self.kinds = torch.randint(args.kinds, (count,), device=device)
        self.patches[:, :, 0] += self.kinds[:, None] / args.kinds

    def batch(self, size):
        picked = torch.randint(len(self.kinds), (size,), device=self.kinds.device)
        return self.patches[picked], self.kinds[picked]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--slots", type=int, default=16, help="of each expert")
    parser.add_argument("--patches", type=int, default=256, help="of a leaf")
    parser.add_argument("--pixels", type=int, default=192, help="of a patch, three colours")
    parser.add_argument("--kinds", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=96)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with device:
        model = LeafModel(args).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    if args.compile:
        model = torch.compile(model)
    leaves = Leaves(args, device, dtype)
    average = torch.zeros((), device=device)
    for step in range(args.steps):
        loss = model(*leaves.batch(args.batch_size))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        average.lerp_(loss.detach().float(), 0.05)
        if (step + 1) % 50 == 0:
            print(f"step {step + 1}: loss {average.item():.3f}")
        # step


if __name__ == "__main__":
    main()
